"""benchmark.py through its main(): whole runs of the miniature and of the tiny SD2 on a CPU, and what it refuses, in full."""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN

import benchmark
from common.command_line import parse_command_line
from config import load
from run_folder.files import read_lines
from run_folder.history import RESULT_KEYS
from training import memory

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


def test_the_benchmarks_variant_alone_has_the_benchmarks_defaults():
    """Learning rate, warm-up, target, captions and snapshots, unless another value is given."""
    run = resolved("model.variant=mlperf", "global_batch_size=384")
    assert (run.optimizer.lr, run.optimizer.lr_per_image, run.schedule.warmup_batches) == (None, 2.3e-7, 1000)
    assert (run.objective.prediction, run.objective.caption_dropout) == ("v", 0.0)
    assert (run.save.every_images, run.save.snapshot_every_images) == (512_000, 1334 * 384)
    changed = resolved("model.variant=mlperf", "global_batch_size=384", "optimizer.lr=1e-5", "schedule.warmup_images=0")
    assert (changed.optimizer.lr, changed.optimizer.lr_per_image) == (1e-5, None)
    assert (changed.schedule.warmup_batches, changed.schedule.warmup_images) == (None, 0)
    stock = resolved("global_batch_size=384", "ema.enabled=true", "optimizer.states=bf16")
    assert (stock.optimizer.lr, stock.optimizer.rounding, stock.ema.decay) == (1e-4, "stochastic", 0.9999)


@pytest.fixture(scope="module")
def streamed(miniature, tmp_path_factory) -> tuple[Path, str]:
    """One run on streamed images: its folder and what it printed."""
    runs, printed = tmp_path_factory.mktemp("runs"), io.StringIO()
    words = ["data.stage=images", f"data.remote={miniature.images}", "data.workers=1", "max_duration=5ba"]
    words += ["schedule.warmup_batches=4", "optimizer.lr=1e-3"]
    with contextlib.redirect_stdout(printed):
        assert main(*miniature.small(runs, "streamed", *words)) == 0
    return runs / "streamed", printed.getvalue()


def test_summary_result_line_and_metrics_agree(streamed):
    folder, printed = streamed
    result, summary, lines = result_of(printed), json.loads((folder / "summary.json").read_text()), metrics(folder)
    assert tuple(result) == RESULT_KEYS
    for key, value in result.items():
        assert summary[key] == (None if value == "none" else float(value))
    windows = [(line["batch"], line["images"], line["warmup"]) for line in lines]
    assert windows == [(2, 16, True), (4, 32, False), (5, 40, False)]
    assert [line["lr"] for line in lines] == pytest.approx([0.25e-3, 0.75e-3, 1e-3], rel=1e-4)
    assert summary["images_per_sec"] == pytest.approx(lines[1]["images_per_sec"], rel=1e-5)
    assert summary["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-5)
    assert (summary["batches"], summary["warmup_batches"], summary["windows"]) == (5, 2, 1)
    assert all(math.isfinite(line["loss"]) and line["gradient_norm"] > 0 for line in lines)
    environment = json.loads((folder / "environment.json").read_text())
    assert (summary["stage"], summary["preset"], summary["image_size"]) == ("images", "tiny", [32, 32])
    assert environment.items() <= summary.items() and not any(isinstance(value, dict) for value in summary.values())


@pytest.mark.slow
def test_the_written_config_repeats_the_run_bit_for_bit_and_its_keys_change_it(streamed, tmp_path):
    def losses(name: str, *words: str) -> list[float]:
        own = [f"run_folder={tmp_path}", f"run_name={name}", "data.workers=0", *words]
        assert main(str(streamed[0] / "config.yaml"), *own) == 0
        return [line["loss"] for line in metrics(tmp_path / name)]

    expected = [line["loss"] for line in metrics(streamed[0])]
    assert losses("again") == expected
    in_passes = losses("passes", "device_train_microbatch_size=2", "max_duration=2ba")
    assert in_passes == pytest.approx(expected[:1], rel=1e-4)
    assert losses("mean", "data.posterior=mean", "max_duration=2ba") != expected[:1]
    assert losses("seed", "seed=3", "max_duration=2ba") != expected[:1]


def test_the_predecessors_flags_mean_what_they_meant_and_an_infinite_norm_is_null(tmp_path, capsys, monkeypatch):
    """fp16's GradScaler skips its first steps with infinite gradients; JSON has no infinity."""
    monkeypatch.setattr(benchmark.GradientNorm, "mean", lambda self: math.inf)
    words = ["--use_synth_data", "--device_train_microbatch_size", "4", "--batch_size", "8", "--image_size", "64"]
    rest = ["model.preset=tiny", "max_duration=2ba", f"run_folder={tmp_path}", "run_name=a"]
    assert main(*words, *rest, "loggers.progress_bar=false") == 0
    summary = json.loads((tmp_path / "a" / "summary.json").read_text())
    assert (summary["synthetic"], summary["global_batch_size"], summary["device_train_microbatch_size"]) == (True, 8, 4)
    assert [line["gradient_norm"] for line in metrics(tmp_path / "a")] == [None]
    assert summary["images_per_sec"] is None and "images_per_sec=none" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_stops_the_run_and_names_batch_and_rank(tmp_path, capsys):
    words = ["data.synthetic=true", "optimizer.lr=1e30", f"run_folder={tmp_path}", "run_name=a", "max_duration=9000ba"]
    assert main(*TINY_RUN, *words, "measure.window_batches=1", "loggers.debug=true") == 1
    trace, _, problem = capsys.readouterr().err.rpartition("loss: ")
    assert "\nTraceback (most recent call last):\n" in trace
    assert re.match(r"(nan|inf) in batch [12] \(counted from 0\), first seen on rank 0\. The run stops before", problem)
    [start] = read_lines(tmp_path / "a" / "starts.jsonl")
    assert start["failed"] == f"loss: {problem}".rstrip("\n") and start["seconds"] > 0
    assert not (tmp_path / "a" / "summary.json").exists()


# --- configurations ---


def test_print_config_prints_the_resolved_run_and_starts_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(memory, "available_gib", lambda: (20.0, "this machine (free now)"))  # the real one changes
    assert main(*TINY_RUN, "data.synthetic=true", f"run_folder={tmp_path}", "--print_config") == 0
    printed = capsys.readouterr().out
    lines = {"precision: fp32", "device_train_microbatch_size: 8", "  prediction: epsilon", "  lr: 0.0001"}
    assert lines <= set(printed.splitlines()) and list(tmp_path.iterdir()) == []
    path = tmp_path / "printed.yaml"
    path.write_text(printed)
    assert main(str(path), "--print_config") == 0
    assert capsys.readouterr().out == printed


def test_all_problems_of_a_run_are_reported_at_once(tmp_path, capsys):
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "notes.txt").touch()
    words = "global_batch_size=10 device_train_microbatch_size=4 optimizer.lr=1e-4 optimizer.lr_per_image=1e-7"
    words += " precision=fp16 data.remote=/nowhere loggers.wandb.group=x num_frames=16 --use_ema"
    words += f" run_folder={tmp_path} run_name=old"
    of_types = [text.partition(". ")[0] for text in refused(capsys, *words.split(), "max_duration=soon", "seed=-1")]
    assert of_types == ["command line: max_duration is 'soon'", "command line: seed is -1"]
    problems = refused(capsys, *words.split())
    keys = (
        "run_name global_batch_size data.remote optimizer.lr loggers.wandb.project precision num_frames model.weights"
    )
    assert [problem.partition(":")[0] for problem in problems] == keys.split()
    assert problems[1] == "global_batch_size: 10 is not a multiple of 1 ranks x 4 microbatch = 4. Nearest: 8, 12."


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("model.family=sd4", "model.family: unknown family 'sd4'. Known: flux, "),
        ("zzz=1 --print_config", "command line: unknown key 'zzz'. "),
        ("image_size=60", "image_size: 60 x 60 px does not fit sd2. Both sides have to be multiples of 8."),
        ("objective.prediction=flow", "objective.prediction: sd2 cannot be trained on 'flow'. Possible: epsilon, v."),
        ("run_folder=/proc/runs", "run_folder: /proc/runs cannot be written: /proc: No such file or directory. "),
        ("data.synthetic=false data.remote=STAGE data.local=/proc/c", "data.local: /proc/c cannot be written: "),
        ("data.synthetic=false data.local=STAGE global_batch_size=64", "global_batch_size: 64 is more than the 48 sa"),
    ],
)
def test_an_impossible_run_is_refused_with_the_reason(capsys, tmp_path, stage, words, message):
    words = words.replace("STAGE", str(stage)).split()
    more = ["model.weights=random"] if "data.synthetic=false" in words else []
    [problem] = refused(capsys, *TINY_RUN, "data.synthetic=true", f"run_folder={tmp_path}", *more, *words)
    assert problem.startswith(message)


def test_ranks_that_do_not_fit_nodes_and_gpus_are_refused(capsys, tmp_path, monkeypatch):
    words = [*TINY_RUN, "data.synthetic=true", f"run_folder={tmp_path}"]
    monkeypatch.setattr(benchmark.dist, "get_local_world_size", lambda: 2)
    with monkeypatch.context() as patch:
        patch.setattr(benchmark.dist, "get_world_size", lambda: 4)
        [problem] = refused(capsys, *words, "data.num_canonical_nodes=3")
        assert problem.startswith("data.num_canonical_nodes: 3 and 2 nodes: one has to divide the other.")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    [problem] = refused(capsys, *words)
    assert problem.startswith("composer -n: 2 ranks on this machine, which has 1 GPUs. ")
