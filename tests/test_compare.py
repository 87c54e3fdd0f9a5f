"""reports/compare.py: the rule of the verdict against scipy and drawn pairs, what compares, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT
from scipy.stats import mannwhitneyu

from reports import compare, compare_records, verdicts
from reports.compare_records import SPEED
from reports.verdicts import ALIKE, LESS, MORE, Sample, left_out, ratio_of, sample_of
from training.speed import SpeedKeys

RESULTS = ROOT / "reports/results"
EAGER, BLOCKS = (RESULTS / f"sd2_tiny_cpu_compile/{name}.json" for name in ("eager", "blocks"))


# --- the rule ---


@pytest.mark.parametrize(("num", "other"), [(1, 1), (3, 3), (4, 6), (5, 5), (6, 9), (7, 7), (10, 10)])
def test_what_is_left_out_is_what_the_exact_rank_test_allows(num, other):
    """Whatever number of pairs is in the wrong order, by scipy's p-value."""

    def p_value(wrong: int) -> float:
        values = []
        for place in range(other):
            below = min(num, wrong)  # so many of the first sample's values lie above this one
            wrong -= below
            values.append(num - 0.5 - below + 1e-3 * place)
        return mannwhitneyu(values, range(num), method="exact").pvalue

    allowed = [wrong for wrong in range(num * other // 2) if p_value(wrong) <= verdicts.CHANCE]
    assert left_out(num, other) == len(allowed)


@pytest.mark.parametrize(("num", "other"), [(5, 5), (4, 7), (7, 7), (10, 10)])
def test_the_verdict_is_that_of_scipys_exact_test(num, other):
    rng, told = np.random.default_rng(0), 0
    for shift in np.repeat([1.0, 1.05, 1.1, 1.2], 50):
        first, second = rng.lognormal(3.0, 0.05, num), shift * rng.lognormal(3.0, 0.05, other)
        is_told = ratio_of(sample_of([*second], "round"), sample_of([*first], "round")).verdict != ALIKE
        assert is_told == (mannwhitneyu(first, second, method="exact").pvalue <= verdicts.CHANCE)
        told += is_told
    assert 20 < told < 180  # so both sides were met


def rounds(rng: np.random.Generator, num: int) -> Sample:
    """Return speeds that vary by 5 %."""
    return sample_of([*(100.0 * np.exp(rng.normal(0.0, 0.05, num)))], "round")


def test_two_starts_of_one_run_get_no_verdict_however_far_their_windows_lie_apart():
    """Two identical runs on a shared machine were 1.645 times apart, with windows of 5 % spread."""
    rng = np.random.default_rng(1)
    one, other = (sample_of([*(factor * np.exp(rng.normal(0.0, 0.05, 150)))], "window") for factor in (1.0, 1.645))
    ratio = ratio_of(other, one)
    assert ratio.verdict == "cannot be told apart from one start each"
    assert (ratio.least, ratio.greatest) == (other.least / one.greatest, other.greatest / one.least)


@pytest.mark.parametrize(("num", "most"), [(10, 20), (12, 25)])
def test_of_1000_pairs_that_do_not_differ_few_are_told_apart(num, most):
    rng = np.random.default_rng(1)
    assert sum(ratio_of(rounds(rng, num), rounds(rng, num)).verdict != ALIKE for _ in range(1000)) <= most


@pytest.mark.parametrize(("shift", "verdict"), [(1.2, MORE), (0.8, LESS)])
def test_a_shift_is_found_and_its_spread_holds_it(shift, verdict):
    rng, found = np.random.default_rng(2), []
    for _ in range(200):
        shifted = sample_of([shift * value for value in rounds(rng, 10).values], "round")
        found.append(ratio_of(shifted, rounds(rng, 10)))
    assert sum(ratio.verdict == verdict for ratio in found) >= 190
    assert sum(ratio.least <= shift <= ratio.greatest for ratio in found) >= 195


def test_of_extremes_alone_only_ranges_apart_are_told_and_never_otherwise_than_with_all_values():
    rng = np.random.default_rng(4)
    told = 0
    for shift in np.repeat([1.0, 1.1, 1.3], 100):
        one = rounds(rng, 8)
        other = sample_of([shift * value for value in rounds(rng, 8).values], "round")
        short = [Sample(of.middle, of.least, of.greatest, of.num, unit="round") for of in (one, other)]
        ratio, whole = ratio_of(short[1], short[0]), ratio_of(other, one)
        assert (ratio.verdict == MORE) == (other.least > one.greatest)
        assert (
            ratio.verdict in (ALIKE, whole.verdict) and ratio.least <= whole.least <= whole.greatest <= ratio.greatest
        )
        told += ratio.verdict == MORE
    assert 100 < told < 250


@pytest.mark.timeout(60, func_only=True)
def test_very_many_windows_of_which_only_the_extremes_are_known_are_no_more_work():
    many, few = Sample(2.0, 1.9, 2.1, 10**9, unit="round"), Sample(1.0, 0.9, 1.1, 4, unit="round")
    assert ratio_of(many, many).is_enough and not ratio_of(few, few).is_enough


def test_the_ratio_turned_round_has_the_verdict_turned_round():
    rng = np.random.default_rng(5)
    for _ in range(20):
        one, other = rounds(rng, 30), rounds(rng, 30)
        there, back = ratio_of(other, one), ratio_of(one, other)
        turned = (1 / back.value, 1 / back.greatest, 1 / back.least)
        assert (there.value, there.least, there.greatest) == pytest.approx(turned)
        assert {there.verdict, back.verdict} in ({ALIKE}, {MORE, LESS})


def test_few_values_are_not_judged():
    far = sample_of([100.0, 101.0, 102.0], "run"), sample_of([1.0, 1.1, 1.2], "run")
    ratio = ratio_of(*far)
    assert (ratio.verdict, ratio.is_enough) == (ALIKE, False)
    unknown = Sample(100.0, 99.0, 101.0, 0, unit="round"), Sample(1.0, 0.9, 1.1, 0, unit="round")
    assert ratio_of(*unknown).verdict == ALIKE


@pytest.mark.parametrize(
    ("key", "side"),
    [
        ("images_per_sec_per_device", 1),
        ("480: ours_clips_per_sec", 1),
        ("ema_speedup_vs_composer", 1),
        ("ema_ms", -1),
        ("480: ours_cpu_ms_a_clip", -1),
        ("verify_sec_per_gb", -1),
        ("ours_worker_cpu_us_a_sample", -1),
        ("download_mb_per_sec", 1),
        ("ema_over_flat", 0),
        ("gib", 0),
    ],
)
def test_more_is_better_for_speeds_and_less_for_times(key, side):
    assert compare.better(key) == side
    words = {1: "faster", -1: "slower", 0: MORE}
    assert compare.said_of(key, verdicts.Ratio(2.0, 1.9, 2.1, True)) == words[side]


# --- what compares ---


@pytest.fixture
def record(tmp_path):
    """Write a rung's record with some keys changed, and return its path."""
    numbers = itertools.count()

    def write(name: str = "", of: Path = EAGER, **changed: Any) -> str:
        path = tmp_path / f"{name or f'r{next(numbers)}'}.json"
        path.parent.mkdir(exist_ok=True, parents=True)
        content = {**json.loads(of.read_text()), **changed}
        path.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))
        return str(path)

    return write


def run_folder(place: Path, speed: float = 1.0, **changed: Any) -> str:
    """Write a finished run's folder, its windows that many times as fast."""
    shutil.copytree(RESULTS / "shapes_run", place, ignore=shutil.ignore_patterns("samples"))
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    lines = [{**line, "images_per_sec": speed * line["images_per_sec"]} if "lr" in line else line for line in lines]
    (place / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    summary = json.loads((place / "summary.json").read_text())
    speeds = {key: speed * value for key, value in summary.items() if key.startswith("images_per_sec")}
    (place / "summary.json").write_text(json.dumps({**summary, **speeds, **changed}))
    return str(place)


def test_two_rungs_are_set_beside_each_other_with_what_differs(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert compare.main([str(EAGER.relative_to(ROOT)), str(BLOCKS.relative_to(ROOT))]) == 0
    head, columns, first, second, *notes = capsys.readouterr().out.splitlines()
    assert head == "Set against eager; the median, with the least and the greatest:"
    assert columns.split("  ")[0] == "record" and first.endswith("the first")
    one, other = (json.loads(path.read_text()) for path in (EAGER, BLOCKS))
    ratio = other["images_per_sec"] / one["images_per_sec"]
    ends = [other[f"images_per_sec_{a}"] / one[f"images_per_sec_{b}"] for a, b in (("min", "max"), ("max", "min"))]
    assert f"  {ratio:.3f} ({ends[0]:.3f} to {ends[1]:.3f})  cannot be told apart from one start each" in second
    assert notes[0] == "differs, setting: compile off | blocks"
    assert "torch_version 2.7.0, commit a2423f366445" in notes[2]
    assert len(notes) == 3 and notes[1].startswith(
        "trained in all: family sd2, preset tiny, variant stock, stage moments"
    )


def test_a_runs_folder_has_all_its_windows_and_its_summary_is_the_same_record(tmp_path, capsys):
    slow, fast = run_folder(tmp_path / "a"), run_folder(tmp_path / "b", 4.0)
    table, notes = compare.compared([slow, f"{fast}/summary.json"])
    [one, other] = table.rows
    assert (one[0], other[0]) == ("a", "b") and one[3] == other[3] == "159 windows"
    assert other[4].startswith("4.000 (") and other[5] == verdicts.ONE_START
    assert not any("extreme" in note or "window" in note for note in notes)
    assert notes[0].startswith("nothing that was recorded differs: two starts of the same.")
    found = compare_records.read(slow).figures[SPEED]
    summary = json.loads((tmp_path / "a/summary.json").read_text())
    kept = [summary[f"images_per_sec{end}"] for end in ("", "_min", "_max")]
    assert [found.middle, found.least, found.greatest] == pytest.approx(kept, rel=1e-5)


def test_every_key_that_differs_between_two_runs_folders_is_named(tmp_path):
    folders = [Path(run_folder(tmp_path / name)) for name in "ab"]
    config = (folders[1] / "config.yaml").read_text()
    (folders[1] / "config.yaml").write_text(
        config.replace("run_name: shapes_run", "run_name: b").replace("lr: ", "lr: 1")
    )
    _, notes = compare.compared(list(map(str, folders)))
    assert notes[0].startswith("differs, setting: optimizer.lr ") and notes[1].startswith("trained in all: ")
    assert not any("run_name" in note for note in notes)


def test_the_speed_is_that_of_a_device(record):
    short = record(num_devices=2, global_batch_size=16, images_per_sec_per_device=57.155)
    table, notes = compare.compared([record("one"), short])
    assert table.rows[1][1].startswith("2 x CPU") and table.rows[1][2].endswith(" (53.51 to 58.45)")
    assert table.rows[1][4].startswith("0.500 (") and "differs, machine: num_devices 1 | 2" in notes


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("family", "sdxl", "family: sd2 in a, sdxl in b."),
        ("image_size", [64, 64, 9], "image_size: [64, 64] in a, [64, 64, 9] in b."),
        ("trained_parameters", 30720, "trained_parameters: 1070308 in a, 30720 in b."),
        ("ema", ..., "ema: true in a, not recorded in b."),
        ("bucket_sizes", [[64, 32]], "bucket_sizes: none in a, [[64, 32]] in b."),
        ("tflop_per_image", 0.00017, "tflop_per_image: 0.000150974 in a, 0.00017 in b."),
    ],
)
def test_what_is_trained_has_to_be_the_same_and_across_allows_its_key(key, value, said, record):
    one, other = record("a"), record("b", **{key: value})
    with pytest.raises(ValueError) as refused:
        compare.compared([one, other])
    end = f" It says what was measured, so they do not compare. Give others, or say across={key}."
    assert str(refused.value) == said + end
    assert any(note.startswith(f"allowed by across: {key} ") for note in compare.compared([one, other], [key])[1])


def test_images_a_device_and_step_have_to_be_the_same(record):
    with pytest.raises(ValueError, match=r"^device_batch_size: 8 in a, 16 in b\. "):
        compare.compared([record("a"), record("b", global_batch_size=16)])


def test_every_key_of_speed_is_a_setting_and_is_listed(record):
    for key in SpeedKeys.__dataclass_fields__:
        notes = compare.compared([record("a", **{key: "x"}), record("b", **{key: "y"})])[1]
        assert f"differs, setting: {key} x | y" in notes


def test_every_key_of_a_committed_record_is_of_one_kind():
    """What a run came to is no setting: else it would be listed as one. These are all that have one."""
    found = set()
    for path in RESULTS.rglob("*.json"):
        content = json.loads(path.read_text())
        if content.get(SPEED):
            found |= compare_records.read(str(path)).settings.keys()
    speed = {*SpeedKeys.__dataclass_fields__, "precision", "device_train_microbatch_size", "optimizer_states"}
    assert found == {*speed, "seed", "max_duration", "program", "copy_stream"}  # the last one of earlier commits


def test_repeated_runs_are_one_value_each(record):
    speeds = {"a": (100, 101, 102, 103, 104), "b": (110, 111, 112, 113, 114)}
    sides = []
    for side, values in speeds.items():
        kinds = ("", "_min", "_max", "_per_device")
        each = [
            record(f"{side}{place}", seed=place, **{f"images_per_sec{kind}": value for kind in kinds})
            for place, value in enumerate(values)
        ]
        sides.append(",".join(each))
    table, _ = compare.compared(sides)
    assert table.rows[1][0] == "b0, b1, b2, b3, b4" and table.rows[1][3] == "5 runs"
    assert table.rows[1][4:] == ("1.098 (1.058 to 1.140)", "faster")
    few, notes = compare.compared([sides[0].rpartition(",")[0], sides[1]])
    assert few.rows[1][5] == ALIKE
    assert "some figures have too few values for a verdict: five of each suffice" in notes
    with pytest.raises(
        ValueError, match=r"are not repeated runs: compile is 'off' and 'whole'\. Give runs that differ"
    ):
        compare.compared([f"{record('c')},{record('d', compile='whole')}", sides[1]])
    with pytest.raises(ValueError, match="commas join repeated runs"):
        compare.compared([f"{RESULTS}/step.json,{RESULTS}/micro.json", sides[1]])


def test_records_of_bench_compare_figure_by_figure(tmp_path, capsys):
    made = json.loads((RESULTS / "step.json").read_text())
    rounds = {key: [0.5 * v if key == "ema_ours_ms" else v for v in values] for key, values in made["by_round"].items()}
    (tmp_path / "new.json").write_text(json.dumps({**made, "by_round": rounds, "load_average_before": 0.1}))
    table, notes = compare.compared([f"{RESULTS}/step.json", f"{tmp_path}/new.json"])
    verdict = {row[0]: row[-1] for row in table.rows if row[1] == "new"}
    assert verdict.pop("ema_ours_ms") == "faster" and set(verdict.values()) == {ALIKE}
    assert "step: other work was going on: load average 1.19 before it, on 2 processors" in notes
    with pytest.raises(
        ValueError, match=r"^command line: micro is of keys .*, step of bench\.step\. Records of one kind"
    ):
        compare.compared([f"{RESULTS}/step.json", f"{RESULTS}/micro.json"])
    (tmp_path / "other.json").write_text(json.dumps({**made, "config": {**made["config"], "batch_size": 4}}))
    with pytest.raises(ValueError, match=r"^config\.batch_size: 8 in step, 4 in other\."):
        compare.compared([f"{RESULTS}/step.json", f"{tmp_path}/other.json"])


def test_records_of_one_name_are_told_apart_by_their_folders(record):
    table, _ = compare.compared([record("x/a"), record("y/a"), record("z")])
    assert [row[0] for row in table.rows] == ["x/a", "y/a", "z"]


def test_a_record_of_code_that_nobody_has_is_said_to_be(record):
    commit = json.loads(EAGER.read_text())["commit"]
    notes = compare.compared([record("a"), record("b", commit=f"{commit}+changes")])[1]
    assert "b: made of a tree with changes that are in no commit" in notes


def test_nvidias_figures_a_card_follow_from_those_that_it_states_and_stand_on_the_page():
    page = (ROOT / "docs/comparing.md").read_text()
    for row in json.loads((ROOT / "reports/nvidia_published.json").read_text())["rows"]:
        for card, speed in row[SPEED].items():
            assert speed == pytest.approx(row["images_per_sec"][card] / row["num_devices"], abs=0.005)
            assert f"| NVIDIA, {row['name']} | {card} | {speed:.2f} |" in page


# --- bad input ---


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is no whole JSON (JSONDecodeError: Expecting value"),
        ("[" * 100_000, "is no whole JSON (RecursionError: "),
        ("[1]", "holds a list. Give a record, which is one object."),
        ("{}", "is no record that can be compared. Wanted: images_per_sec_per_device, or figures with _min and _max."),
        (
            {"status": "out_of_memory"},
            "its status is 'out_of_memory': no speed was measured. Give one whose status is ok.",
        ),
        ({"schema": 9}, "is of schema 9. Possible: 1. Read it with the code of its commit."),
        ({"images_per_sec_per_device": None}, "its images_per_sec_per_device is null. Possible: a number above 0."),
        ({"images_per_sec_per_device": 0}, "its images_per_sec_per_device is 0. Possible: a number above 0."),
        ({"images_per_sec_min": math.nan}, "its images_per_sec_min is nan. Possible: a number above 0."),
        ({"images_per_sec_max": True}, "its images_per_sec_max is True. Possible: a number above 0."),
        ({"images_per_sec_max": ...}, "it has no images_per_sec_max. Possible: a number above 0."),
        ({"images_per_sec_min": 200.0}, "its median 114.31 is not between its extremes 200 and 116.899. Give a record"),
    ],
)
def test_what_is_no_record_or_has_no_figure_is_refused(content, said, record, tmp_path, capsys):
    path = str(tmp_path / "bad.json")
    Path(path).write_text(content) if isinstance(content, str) else record("bad", **content)
    assert compare.main([record("good"), path]) == 2
    assert capsys.readouterr().err.startswith(f"{path}: {said}")


def test_what_cannot_be_found_or_is_unfinished_is_refused_all_at_once(record, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    run_folder(Path("begun"))
    Path("begun/summary.json").unlink()
    assert compare.main(["none", "empty", "begun", "c.json,d.json"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "none: no such file or folder. Give runs/NAME or a record.",
        "empty: is no run: it has no config.yaml. Give a run's folder: runs/NAME.",
        "begun: is not finished: it has no summary.json. Its own command resumes it.",
        "c.json: no such file or folder. Give runs/NAME or a record.",
    ]


def test_one_record_alone_and_one_given_twice_are_refused(record, tmp_path, capsys):
    one, folder = record("a"), run_folder(tmp_path / "run")
    assert compare.main([one]) == 2
    assert capsys.readouterr().err == "command line: one record given, a. Give another one to set against it.\n"
    (tmp_path / "link.json").symlink_to(one)
    for words, path in (([one, one], one), ([one, f"{tmp_path}/link.json"], f"{tmp_path}/link.json")):
        assert compare.main(words) == 2
        assert capsys.readouterr().err == f"{path}: is given twice. Give each record once.\n"
    assert compare.main([folder, f"{folder}/summary.json"]) == 2
    assert capsys.readouterr().err == f"{folder}/summary.json: is given twice. Give each record once.\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["across=ema"], "command line: 0 records given. Possible: 2 to 16: runs/NAME, or files."),
        (["a", "b", "over=c"], "command line: unknown key 'over'. Known: across. --print_config shows every key."),
        (["a", "b", "across="], "command line: 'across=' has no value. Write across=VALUE, or across=null for none."),
        (
            ["a", "a\nb"],
            r"command line: 'a\nb' is not a path. Possible: a text without control characters and line ends.",
        ),
        (["a"] * 17, "command line: 17 records given. Possible: 2 to 16: runs/NAME, or files."),
    ],
)
def test_a_wrong_command_line_is_refused(words, said, capsys):
    assert compare.main(words) == 2
    assert capsys.readouterr().err == f"{said}\n"


def test_a_key_that_need_not_be_the_same_is_refused_in_across(record, capsys):
    assert compare.main([record("a"), record("b"), "across=compile"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("across: 'compile' is no key that has to be the same. Possible: family, preset, ")


def test_names_with_bars_and_control_characters_do_no_harm(record, tmp_path, capsys):
    one, other = record("a|b"), record("c", device="GPU\x1b[2J|x")
    page = tmp_path / "page.md"
    page.write_text(f"<!-- table of {one} {other} -->\n<!-- end of table -->\n")
    assert compare.main([one, other, str(page)]) == 0
    assert r"| a\|b |" in page.read_text() and "\x1b" not in page.read_text()
    assert compare.main([one, other]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_a_page_without_marks_is_refused(record, tmp_path, capsys):
    (tmp_path / "page.md").write_text("# A\n")
    assert compare.main([record("a"), record("b"), f"{tmp_path}/page.md"]) == 2
    assert "the page has no place for the table of " in capsys.readouterr().err


# --- the page ---


def test_the_page_names_every_key_that_has_to_be_the_same_and_its_figures_are_those_of_the_rule():
    page = (ROOT / "docs/comparing.md").read_text()
    assert all(f"`{key}`" in page for key in compare_records.OF_A_RUN)
    assert f"these are {left_out(10, 10) - 1} of the 100 ratios" in page
    assert "five of each suffice" in page and left_out(5, 5) == 1 and left_out(4, 5) == 0
    assert f"at {100 * verdicts.CHANCE:.0f} %" in page
    table, notes = compare.compared([str(RESULTS / f"shapes_sharding/ddp_{number}.json") for number in (1, 2)])
    assert table.rows[1][5] == verdicts.ONE_START and notes[0].startswith("nothing that was recorded differs")
