"""bench/latency.py, reports/latency.py: images of the pipeline, what cannot be, what is lost, what a killed one keeps."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run

from bench import latency
from bench.latency import Contest
from bench.pipeline import Case, model_of, theirs
from reports import latency as report

CASE = Case("stock", "tiny", 64, "plms", 3, 7.5, "fp32", 2, False, 2, 1)
FEW = ["variants=stock", "samplers=plms", "steps=2", "batches=[1]", "precisions=fp32", "ways=eager", "rounds=1"]
LATENCY_CPU = "reports/results/latency_cpu.json"


def case(**changes) -> Case:
    return Case(**{**vars(CASE), **changes})


@pytest.fixture(autouse=True)
def threads(same_number_of_threads):
    """Each contest sets them."""


# --- a contest ---


@pytest.mark.parametrize("variant", ["stock", "sd15"])
def test_the_images_in_fp32_are_those_of_the_pipeline_and_every_figure_is_there(variant):
    made = Contest(case(variant=variant), ["eager"]).measure()
    assert made["status"] == {"pipeline": "ok", "eager": "ok"} and made["reasons"] == {}
    assert made["eager_max_abs_difference"] < 1e-5 and made["eager_image_std"] > 0.1
    assert made["variant"] == variant and made["batch_size"] == 2 and made["load_average_before"] >= 0
    for name in ("pipeline", "eager"):
        rounds = made["by_round"][f"{name}_sec"]
        assert len(rounds) == 2 and made[f"{name}_sec"] == pytest.approx(statistics.median(rounds), rel=1e-5)
        assert min(rounds) == made[f"{name}_sec_min"] <= made[f"{name}_sec_p95"] <= max(rounds)
        assert made[f"{name}_first_sec"] > 0
    ratios = [
        theirs / ours for theirs, ours in zip(*(made["by_round"][f"{n}_sec"] for n in made["status"]), strict=True)
    ]
    assert made["eager_speedup_vs_pipeline"] == pytest.approx(statistics.median(ratios), rel=1e-5)


@pytest.mark.parametrize("variant", ["sdxl", "flux"])
def test_the_images_of_other_families_are_those_of_their_own_pipelines(variant):
    made = Contest(case(variant=variant, sampler="euler", guidance=3.5), ["eager"]).measure()
    assert made["status"] == {"pipeline": "ok", "eager": "ok"}, made["reasons"]
    assert made["eager_max_abs_difference"] < 2e-5 and made["eager_image_std"] > 0.05
    assert next(report.rows_of([made]))[0] == {"sdxl": "SDXL", "flux": "FLUX.1 dev"}[variant]


@pytest.mark.parametrize("variant", ["sdxl", "flux"])
def test_the_pipeline_computes_in_fp16_with_encoders_that_ours_has_in_float32(variant):
    of_fp16 = case(variant=variant, precision="fp16", sampler="euler", steps=2, batch_size=1)
    images = theirs(model_of(of_fp16), of_fp16)()
    assert images.shape == (1, 3, 64, 64) and torch.isfinite(images).all() and images.std() > 0.05


def test_a_flow_is_measured_with_its_only_sampler_and_sizes_are_those_of_each_family(capsys):
    config = latency.LatencyConfig(variants="sdxl,flux", samplers="plms,ddim", batches=(1,), precisions="fp32")
    found = [(each.variant, each.sampler) for each in latency.cases_of(config)]
    assert found == [("sdxl", "plms"), ("sdxl", "ddim"), ("flux", "euler")]
    assert latency.main(["variants=stock,flux", "image_size=72"]) == 2
    assert "72 x 72 px does not fit flux. Both sides have to be multiples of 16." in capsys.readouterr().err


def test_contestants_share_their_weights_but_no_module(monkeypatch):
    models = {}
    monkeypatch.setattr(latency, "ours", lambda model, case, way: models.update(ours=model))
    monkeypatch.setattr(latency, "theirs", lambda model, case: models.update(theirs=model))
    Contest(CASE, ["eager"])._build()
    ours, pipelines = models["ours"], models["theirs"]
    assert ours.denoiser is not pipelines.denoiser and ours.denoiser.conv_in is not pipelines.denoiser.conv_in
    assert all(a is b for a, b in zip(ours.parameters(), pipelines.parameters(), strict=True))


def test_in_bf16_the_pipelines_weights_are_cast_and_its_images_nearly_the_same(monkeypatch):
    types = {}

    def noted(name, make):
        def noting(model, *given):
            made = make(model, *given)
            types[name] = next(model.parameters()).dtype
            return made

        monkeypatch.setattr(latency, name, noting)

    noted("ours", latency.ours)
    noted("theirs", latency.theirs)
    made = Contest(case(precision="bf16", steps=2, guidance=2.0), ["eager"]).measure()
    assert types == {"ours": torch.float32, "theirs": torch.bfloat16}
    assert 0 < made["eager_max_abs_difference"] < 0.1


def test_what_runs_out_of_memory_in_any_turn_is_a_row_that_says_so_and_the_others_go_on(monkeypatch):
    def greedy(model, case, way):
        calls = iter(range(10))
        size = {"whole": 0, "blocks": 2}[way] if way in ("whole", "blocks") else 10
        small = plain(model, case, "eager")
        return lambda: torch.empty(2**52) if next(calls) >= size else small()

    plain = latency.ours
    monkeypatch.setattr(latency, "ours", greedy)
    monkeypatch.setattr(latency, "way_problem", lambda way, precision: None)
    made = Contest(case(steps=2), ["eager", "whole", "blocks"]).measure()
    lost = "out_of_memory"
    assert made["status"] == {"pipeline": "ok", "eager": "ok", "whole": lost, "blocks": lost}
    assert "can't allocate memory" in made["reasons"]["blocks"]
    assert "whole_sec" not in made and "blocks_sec" not in made and len(made["by_round"]["eager_sec"]) == 2
    rows = list(report.rows_of([made]))
    assert [row[4:6] for row in rows[2:]] == [("whole", "out of memory"), ("blocks", "out of memory")]
    assert any(note.startswith("whole, out of memory: RuntimeError: ") for note in report.left_out([made]))


def test_a_model_that_does_not_fit_at_all_is_recorded_as_that(monkeypatch):
    monkeypatch.setattr(latency, "model_of", lambda case: torch.empty(2**52))
    made = Contest(CASE, ["eager"]).measure()
    assert set(made["status"].values()) == {"out_of_memory"} and made["by_round"] == {}
    assert [row[5] for row in report.rows_of([made])] == ["out of memory"] * 2


def test_a_contestant_that_fails_is_named_and_the_command_s_code_is_1(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(latency, "theirs", lambda model, case: lambda: 1 / 0)
    assert latency.main([*FEW, f"results={tmp_path}/l.json"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "diffusers' pipeline failed" in out and "pipeline, failed: ZeroDivisionError: division by zero" in out
    [contest] = json.loads((tmp_path / "l.json").read_text())["contests"]
    assert "eager_sec" in contest and "eager_speedup_vs_pipeline" not in contest


@pytest.mark.skipif(torch.cuda.is_available(), reason="what a CPU cannot do")
def test_what_this_machine_cannot_do_is_skipped_with_its_reason():
    made = Contest(case(steps=2), ["cuda_graphs"]).measure()
    assert made["status"] == {"pipeline": "ok", "cuda_graphs": "skipped"}
    assert report.left_out([made]) == [
        "cuda_graphs: true needs a GPU. Leave it out on a CPU.",
    ]
    assert report.left_out([Contest(case(precision="fp16"), ["eager"]).measure()]) == ["fp16: needs a GPU."]


# --- the command ---


def test_other_samplers_are_measured_in_the_first_batch_of_the_first_precision_that_is_possible(monkeypatch):
    monkeypatch.setattr(latency.torch.cuda, "is_available", lambda: False)
    config = latency.LatencyConfig(variants="sd15", samplers="plms,euler", batches=(1, 4), precisions="fp16,bf16,fp32")
    found = [(each.precision, each.sampler, each.batch_size) for each in latency.cases_of(config)]
    plms = [(precision, "plms", batch) for precision in ("fp16", "bf16", "fp32") for batch in (1, 4)]
    assert found == [*plms[:4], ("bf16", "euler", 1), *plms[4:]]
    assert {(each.preset, each.image_size) for each in latency.cases_of(config)} == {("tiny", 64)}
    monkeypatch.setattr(latency.torch.cuda, "is_available", lambda: True)
    assert {(each.preset, each.image_size) for each in latency.cases_of(config)} == {("full", 512)}


def test_every_wrong_key_is_said_at_once(capsys):
    words = ["variants=sd3", "samplers=plms,heun", "precisions=fp8", "ways=fast", "batches=[0]", "image_size=65"]
    assert latency.main(words) == 2
    assert capsys.readouterr().err.splitlines() == [
        "variants: unknown 'sd3'. Known: stock, mlperf, sd15, shapes, sdxl, flux.",
        "samplers: unknown 'heun'. Known: ddim, plms, dpm++, euler.",
        "precisions: unknown 'fp8'. Known: fp16, bf16, tf32, fp32.",
        "ways: unknown 'fast'. Known: eager, whole, cuda_graphs, blocks.",
        "batches: [0]. Possible: numbers from 1 to 1,024, e.g. [1,2,4].",
        "image_size: 65 x 65 px does not fit sd2. Both sides have to be multiples of 8.",
    ]
    assert latency.main(["rounds=0", "steps=1000"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "command line: rounds is 0. Possible: 1 and up.",
        "command line: steps is 1000. Possible: 2 to 500.",
    ]


def test_a_command_that_was_killed_goes_on_where_the_record_ends(monkeypatch, tmp_path, capsys):
    path = tmp_path / "latency.json"
    words = [*FEW, "batches=[1,2,3]", f"results={path}"]
    place = {"schema": 1, "device": "x", "commit": "abc", "torch_version": "y"}
    monkeypatch.setattr(latency, "head", lambda: dict(place))
    measured = []

    def measure(contest: Contest) -> dict:
        if len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(contest.case.batch_size)
        status = "failed" if measured == [1] else "skipped"
        figures = {"status": {"pipeline": status, "eager": "skipped"}, "reasons": {"pipeline": "x", "eager": "y"}}
        return {**vars(contest.case), "load_average_before": 0.0, **figures}

    monkeypatch.setattr(Contest, "measure", measure)
    with pytest.raises(KeyboardInterrupt):
        latency.main(words)
    assert [each["batch_size"] for each in json.loads(path.read_text())["contests"]] == [1, 2] == measured
    measured[:] = [0]  # the next one that ends is a whole one
    with pytest.raises(KeyboardInterrupt):
        latency.main(words)
    measured[:] = [0]
    assert latency.main(words) == 0
    assert measured == [0, 3]  # 1 had failed, and was measured again by the call before
    assert "stock, plms, fp32, batch 1: has a record of this commit" in capsys.readouterr().err
    for changed in ({"commit": "abd"}, {"device": "z"}, {"commit": "abc+changes"}, {"commit": None}):
        monkeypatch.setattr(latency, "head", lambda changed=changed: place | changed)
        assert latency.begun_record(latency.LatencyConfig(results=str(path)))["contests"] == []
        assert capsys.readouterr().err == (
            f"{path}: is not of this commit and device, or of uncommitted code. It is replaced.\n"
        )
    path.write_text("{")
    assert latency.begun_record(latency.LatencyConfig(results=str(path)))["contests"] == []


def test_gpu_latency_installs_nothing_and_takes_the_interpreter_at_hand():
    done = run("make", "-n", "--no-print-directory", "gpu-latency", "PYTHON=some-python", MAKEFLAGS="")
    assert done.stdout == "some-python -m bench.latency results=reports/results/latency_gpu.json\n"


# --- what shows a record ---


def test_the_committed_record_is_of_a_cpu_beside_the_pipeline_with_a_case_at_full_size():
    record = json.loads((ROOT / LATENCY_CPU).read_text())
    assert record["device"].startswith("CPU") and record["commit"]
    sizes = {contest["preset"] for contest in record["contests"] if "eager_sec" in contest}
    assert sizes == {"tiny", "full"}
    assert {c["steps"] for c in record["contests"] if c["preset"] == "tiny"} == {50}
    assert all(report.largest_difference(contests) < 1e-4 for contests in report.groups_of(record))


@pytest.fixture
def record() -> dict:
    return json.loads((ROOT / LATENCY_CPU).read_text())


def test_the_table_stands_between_the_marks_of_its_record_and_nothing_else_changes(record, tmp_path):
    page = tmp_path / "page.md"
    marks = "<!-- table of {} -->\n{}<!-- end of table -->\n"
    path = tmp_path / "r.json"
    path.write_text(json.dumps(record))
    page.write_text("# A\n" + marks.format(path, "old\n") + "b\n" + marks.format("other.json", "kept\n"))
    assert report.main([str(path), str(page)]) == 0
    after = page.read_text()
    assert after == "# A\n" + marks.format(path, report.markdown_of(record)) + "b\n" + marks.format(
        "other.json", "kept\n"
    )
    assert report.main([str(path), str(page)]) == 0 and page.read_text() == after


def test_what_several_contests_say_together_is_their_median(record):
    speeds = [c["eager_speedup_vs_pipeline"] for c in record["contests"] if c["preset"] == "tiny" and "eager_sec" in c]
    [tiny, full] = report.groups_of(record)
    said = f"{statistics.median(speeds):.2f} times as fast as the pipeline ({min(speeds):.2f} to {max(speeds):.2f})."
    assert report.notes_of(tiny)[0] == f"eager, over {len(speeds)} contests: {said}"
    assert report.notes_of(full) == ["fp32 images differ from the pipeline's by 0 at most, of 0 to 1."]


def test_a_reason_that_looks_like_markup_stays_text(record):
    contest = record["contests"][0]
    contest["status"]["eager"], contest["reasons"]["eager"] = "failed", "X: <b>|`a`"
    assert "eager, failed: X: \\<b\\>\\|\\`a\\`" in report.markdown_of({**record, "contests": [contest]})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{}", "is no record of bench.latency (KeyError: 'device')."),
        ('{"contests": [{}], "device": 1, "commit": 2}', "is no record of bench.latency (KeyError: 'preset')."),
        ("[]", "is no record of bench.latency (TypeError: "),
        ("{", "is no record of bench.latency (JSONDecodeError: "),
    ],
)
def test_what_is_no_record_is_refused(content, said, tmp_path, capsys):
    (tmp_path / "r.json").write_text(content)
    assert report.main([f"{tmp_path}/r.json"]) == 2
    assert capsys.readouterr().err.startswith(f"{tmp_path}/r.json: {said}")


def test_other_words_and_pages_without_marks_are_refused(tmp_path, capsys):
    assert report.main(["a.json", "b.json"]) == 2
    assert capsys.readouterr().err == (
        "command line: a.json b.json. Possible: RECORD.json, PAGE.md. Give one record.\n"
    )
    assert report.main([f"{tmp_path}/none.json"]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/none.json: No such file or directory. Check the path.\n"
    (tmp_path / "page.md").write_text("# A\n")
    assert report.main([str(ROOT / LATENCY_CPU), f"{tmp_path}/page.md"]) == 2
    assert capsys.readouterr().err == (
        f"the page has no place for the table of {ROOT / LATENCY_CPU}. "
        f"Add <!-- table of {ROOT / LATENCY_CPU} --> and <!-- end of table -->.\n"
    )


def test_the_record_needs_neither_torch_nor_a_gpu_to_be_shown():
    code = "import sys, reports.latency; print(sorted({'torch', 'diffusers', 'composer'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr
