"""Checkpoints: their files and content, what is refused, and that a run resumes bit for bit.

Tests that kill whole commands are in tests/test_resume.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import gc
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from composer import Time, Timestamp
from composer.loggers import ProgressBarLogger
from conftest import ROOT, TINY_RUN, tree

import benchmark
from callbacks.run_record import RunRecord
from callbacks.throughput import CLOCKS
from cli.command_line import parse_command_line
from cli.errors import ConfigError
from config import load
from record import checkpoint_files
from record.checkpoint_files import FULL, WEIGHTS, find_newest, is_whole, listed, read, stem, write
from record.config_file import read_config
from reports import page
from stages.moments import MomentsStream
from training.checkpoint_content import Progress
from training.checkpoints import STOP_SIGNALS, Checkpointer, SaveConfig
from training.endings import how_to_resume
from training.resume import RunState, identity_of
from training.run_config import ALIASES, RunConfig, resolve

pytestmark = pytest.mark.timeout(60, func_only=True)


def damaged(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        del data[len(data) // 2 :]
    elif how == "flipped":
        data[len(data) // 2] ^= 1
    else:
        data.clear()
    path.write_bytes(data)


def differences(one, two, path: str = "") -> list[str]:
    """Where two nested contents differ, to the last bit."""
    if isinstance(one, torch.Tensor):
        return [] if torch.equal(one, two) else [path]
    if isinstance(one, dict):
        if one.keys() != two.keys():
            return [f"{path}: keys"]
        return [text for key in one for text in differences(one[key], two[key], f"{path}.{key}")]
    if isinstance(one, list | tuple):
        return [text for n, pair in enumerate(zip(one, two, strict=True)) for text in differences(*pair, f"{path}.{n}")]
    return [] if one == two else [path]


def content(**more) -> dict:
    return {"schema": 1, "tensor": torch.arange(1000.0), **more}


# --- files ---


def test_a_file_is_named_by_the_digest_of_its_bytes_and_reads_back(tmp_path):
    path = write(tmp_path / "new", stem(FULL, 7), content(nested={"a": [1, 2.5, "x", None]}))
    assert path.name.startswith("full-ba000000000007-") and is_whole(path)
    assert differences(read(path), content(nested={"a": [1, 2.5, "x", None]})) == []
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("how", ["truncated", "flipped", "emptied"])
def test_a_damaged_newest_is_set_aside_with_a_word_and_the_one_before_is_found(tmp_path, capsys, how):
    older = write(tmp_path, stem(FULL, 1), content())
    newest = write(tmp_path, stem(FULL, 2), content())
    damaged(newest, how)
    assert find_newest(tmp_path) == older
    assert capsys.readouterr().err == (
        f"checkpoints: {newest} is damaged (its bytes do not have the digest in its name); set aside.\n"
    )
    assert {p.name for p in tmp_path.iterdir()} == {older.name, f"{newest.name}.damaged"}
    assert find_newest(tmp_path) == older and capsys.readouterr().err == ""


def test_when_every_checkpoint_is_damaged_the_run_does_not_begin_anew_in_silence(tmp_path):
    paths = [write(tmp_path, stem(FULL, n), content()) for n in (1, 2)]
    for path in paths:
        damaged(path, "flipped")
    for _ in range(2):  # the second start says it too
        with pytest.raises(ConfigError) as error:
            find_newest(tmp_path)
        assert str(error.value) == (
            f"checkpoints: every one of the 2 full checkpoints in {tmp_path} is damaged, the newest is "
            f"{paths[1].name}.damaged. Bring back a copy, or take another run_name to begin anew."
        )


def test_newest_means_the_greatest_number_and_other_files_are_left_alone(tmp_path):
    paths = {n: write(tmp_path, stem(FULL, n), content()) for n in (900, 1000, 99)}
    write(tmp_path, stem(WEIGHTS, 10**9), content())
    for name in ("notes.txt", "full-ba1.pt", "full-ba000000009999-xyz.pt"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / ".full-ba000000002000.77.tmp").write_bytes(b"half")
    assert find_newest(tmp_path) == paths[1000]
    assert not list(tmp_path.glob("*.tmp")) and (tmp_path / "notes.txt").exists()
    assert find_newest(tmp_path / "none") is None


def test_a_number_written_again_replaces_the_other(tmp_path):
    write(tmp_path, stem(WEIGHTS, 5), content(a=1))
    again = write(tmp_path, stem(WEIGHTS, 5), content(a=2))
    assert list(tmp_path.iterdir()) == [again]


def test_a_pickled_class_is_refused_and_none_of_its_code_runs(tmp_path):
    class Mischief:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = write(tmp_path, stem(FULL, 1), content(object=Mischief()))
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value) == (
        f"{path}: holds more than tensors and plain values (posix.mkdir). No code from a file runs here. Remove it."
    )
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"no zip at all"), "cannot be read as a checkpoint: "),
        (lambda path: torch.save([1], path), "has schema list; this version reads 1. Use the version that wrote it."),
        (
            lambda path: torch.save({"schema": 9}, path),
            "has schema 9; this version reads 1. Use the version that wrote it.",
        ),
    ],
)
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, make, message):
    path = tmp_path / "full.pt"
    make(path)
    with pytest.raises(ConfigError) as error:
        read(path)
    assert str(error.value).startswith(f"{path}: {message}") and len(error.value.problems) == 1


def test_a_disk_that_fills_leaves_nothing_behind_and_gives_its_reason(tmp_path):
    """A real limit of the kernel on the size of files, in a process of its own."""
    code = (
        "import resource, signal, sys, torch; from pathlib import Path; from record import checkpoint_files as c\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))\n"
        "try: c.write(Path(sys.argv[1]), 'full-ba000000000001', {'schema': 1, 't': torch.zeros(10**6)})\n"
        "except OSError as error: print(error.errno, error.strerror)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.stdout.strip() == f"{errno.EFBIG} File too large", done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("batch_in_epoch", [0, 3])
def test_a_run_that_resumes_within_an_epoch_shows_its_progress(tmp_path, batch_in_epoch):
    """Composer begins the bar with an epoch, which then begins after the resume or not at all."""
    now = Timestamp(batch=7, batch_in_epoch=batch_in_epoch)
    state = SimpleNamespace(
        timestamp=now, max_duration=Time.from_batch(400), dataloader_len=None, dataloader_label="train"
    )
    off = SaveConfig().resolved(0, 0, 0.0)
    nothing = dict(model=torch.nn.Linear(1, 1), average=None, identity={}, before_saving=lambda: None, resume_from=None)
    with open(os.devnull, "w") as out:
        bar = ProgressBarLogger(stream=out)
        Checkpointer(tmp_path, off, **nothing).fit_start(state, SimpleNamespace(destinations=[bar]))
    assert (bar.train_pbar is None) == (batch_in_epoch == 0)


@pytest.mark.parametrize(("batch_in_epoch", "expected"), [(5, (2, 17, 136, 5, 40)), (6, (3, 18, 144, 0, 0))])
def test_progress_after_the_last_batch_of_an_epoch_is_at_the_begin_of_the_next(batch_in_epoch, expected):
    """Six batches of eight images an epoch, in the third of them; Composer counts on until the next one begins."""
    batch, took = 12 + batch_in_epoch, datetime.timedelta(seconds=2.5)
    in_epoch = dict(batch_in_epoch=batch_in_epoch, sample_in_epoch=8 * batch_in_epoch)
    now = Timestamp(epoch=2, batch=batch, sample=8 * batch, **in_epoch, total_wct=took)
    progress = Progress.of(SimpleNamespace(timestamp=now, dataloader_len=Time.from_batch(6)))
    assert progress == Progress(*expected, seconds=2.5)
    assert Progress.of(SimpleNamespace(timestamp=progress.timestamp(), dataloader_len=None)) == progress


# --- runs ---


def main(*words: str) -> int:
    return benchmark.main(list(words))


@pytest.fixture(scope="module")
def words_of(miniature):
    """Words of a run of the miniature: batches of 8, a checkpoint each third and a snapshot each fourth."""
    every_three = ["save.every_images=24", "save.snapshot_every_images=32", "ema.decay=null", "ema.half_life=40sp"]
    return lambda folder, name, *more: miniature.small(folder, name, *every_three, *more)


def newest(tmp_path, name: str) -> dict:
    path = listed(tmp_path / name / "checkpoints", FULL)[0]
    assert is_whole(path)
    return read(path)


def same_training(one: dict, two: dict) -> bool:
    keys = ("model", "ema", "optimizer", "schedule", "scaler")
    return differences({key: one[key] for key in keys}, {key: two[key] for key in keys}) == []


@pytest.fixture(scope="module")
def whole(words_of, tmp_path_factory):
    """An unbroken run of 10 batches of 8, with checkpoints each third and snapshots each fourth."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(*words_of(folder, "whole", "max_duration=10ba")) == 0
    return folder


def test_a_run_leaves_its_newest_full_checkpoints_and_all_its_snapshots(whole):
    folder = whole / "whole" / "checkpoints"
    assert [path.name[:20] for path in listed(folder, FULL)] == [
        "full-ba000000000010-"[:20],
        "full-ba000000000009-"[:20],
    ]
    assert [int(path.name[10:22]) for path in listed(folder, WEIGHTS)] == [64, 32]
    snapshot = read(listed(folder, WEIGHTS)[0])
    assert sorted(snapshot) == ["callbacks", "ema", "identity", "model", "progress", "schema", "unix_time"]
    assert snapshot["progress"]["images"] == 64 and snapshot["identity"]["model.preset"] == "tiny"
    assert set(snapshot["ema"]["weights"]) == set(snapshot["model"])
    assert all(name.startswith("denoiser.") for name in snapshot["model"])  # no frozen encoder, no wrapper


def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(words_of, whole, tmp_path, capsys):
    assert main(*words_of(tmp_path, "part", "max_duration=4ba")) == 0
    assert main(*words_of(tmp_path, "part", "max_duration=10ba", "data.workers=1", "save.keep=1")) == 0
    resumed = newest(tmp_path, "part")
    assert same_training(resumed, newest(whole, "whole"))
    assert len(listed(tmp_path / "part" / "checkpoints", FULL)) == 1  # save.keep
    assert f"run_name: {tmp_path}/part resumes from batch 4, 32 images ({tmp_path}/part/checkpoints/full-ba" in (
        capsys.readouterr().err
    )


def test_a_finished_run_says_so_and_repeats_its_result(words_of, whole, capsys):
    assert main(*words_of(whole, "whole", "max_duration=10ba")) == 0
    told = capsys.readouterr()
    finished = f"run_name: {whole}/whole is finished (max_duration=10ba); a longer one would resume it.\n"
    assert told.err == finished
    summary = json.loads((whole / "whole" / "summary.json").read_text())
    assert told.out.startswith(f"images_per_sec={summary['images_per_sec']} ") and told.out.count("\n") == 1
    for shorter in ("6ba", "80sp"):  # the same in other units, too
        before = tree(whole / "whole")
        assert main(*words_of(whole, "whole", f"max_duration={shorter}")) == 0
        assert capsys.readouterr().err == finished
        assert tree(whole / "whole") == before


def test_the_record_is_cut_back_to_the_checkpoint_and_what_is_cut_is_kept(words_of, whole, tmp_path):
    """A run that died at batch 8 with a checkpoint at 6: lines 7 and 8 will be written again."""
    folder = shutil.copytree(whole / "whole", tmp_path / "whole")
    for path in listed(folder / "checkpoints", FULL):
        path.unlink()
    assert main(*words_of(tmp_path, "donor", "max_duration=6ba")) == 0
    donor = listed(tmp_path / "donor" / "checkpoints", FULL)[0]
    shutil.copy(donor, folder / "checkpoints")
    (folder / "summary.json").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"schema": 1, "ba')  # killed while it wrote
    before = [json.loads(line) for line in (whole / "whole" / "metrics.jsonl").read_text().splitlines()]

    assert main(*words_of(tmp_path, "whole", "max_duration=10ba")) == 0
    after = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [(line["batch"], line["loss"]) for line in after] == [(line["batch"], line["loss"]) for line in before]
    assert [line["start"] for line in after] == [1, 1, 1, 2, 2]
    cut = (folder / "metrics.cut.jsonl").read_text().splitlines()
    assert [json.loads(line)["batch"] for line in cut] == [8, 10]
    starts = [json.loads(line) for line in (folder / "starts.jsonl").read_text().splitlines()]
    assert [(start["start"], start["batch"]) for start in starts] == [(1, 0), (2, 6)]
    assert starts[0]["run_id"] == starts[1]["run_id"]
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["batches"], summary["starts"], summary["warmup_batches"]) == (10, 2, 4)


def windows(folder: Path) -> list[tuple[int, float, float]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["batch"], line["loss"], line["gradient_norm"]) for line in lines]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def has_the_windows_of(whole: Path, folder: Path) -> bool:
    """The same batches, the same losses and norms to the last bit, the loss on the result line too."""
    return windows(folder) == windows(whole) and summary_of(folder)["loss"] == summary_of(whole)["loss"]


def test_a_window_that_the_end_of_a_shorter_training_closed_is_finished_as_if_there_had_been_none(
    words_of, whole, tmp_path
):
    words = words_of(tmp_path, "part", "max_duration=10ba")
    assert main(*words, "max_duration=5ba") == 0
    assert [batch for batch, *_ in windows(tmp_path / "part")] == [2, 4, 5]
    assert main(*words) == 0
    assert has_the_windows_of(whole / "whole", tmp_path / "part")


def test_a_disk_without_room_for_the_snapshots_of_the_whole_run_is_refused(words_of, tmp_path, capsys, monkeypatch):
    """Of an epoch: 24 batches."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=48 * 2**20))
    words = words_of(tmp_path, "a", "max_duration=1ep", "save.snapshot_every_images=8")
    said = refused(capsys, *words)
    need = "disk: 3 full checkpoints of 0.0107 GiB and 24 snapshots of 0.00533 GiB: 0.16 GiB more; "
    assert said.startswith(f"{need}{tmp_path} has 0.0469 free. Make room. Lower save.keep, ")
    assert not (tmp_path / "a").exists()
    assert main(*words, "max_duration=1ba") == 0


def test_the_wall_figure_has_all_starts_and_what_a_restart_costs(words_of, tmp_path, monkeypatch, capsys):
    """Killed (as far as a test can be) behind its checkpoint: batches 4 and 5 come again, and their time counts twice."""
    words = words_of(tmp_path, "a", "max_duration=8ba", "measure.window_batches=1")

    def killed(self, state, logger):
        if state.timestamp.batch.value == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "clocked", lambda self: contextlib.nullcontext())
        patch.setattr(
            Checkpointer,
            "batch_checkpoint",
            lambda self, *given, save=Checkpointer.batch_checkpoint: (save(self, *given), killed(self, *given)),
        )
        main(*words)
    gc.collect()
    began = time.time() - 50.0  # as a process that was 50 s in building
    assert benchmark.main(words, began=began) == 0
    took_sec, summary = time.time() - began, summary_of(tmp_path / "a")
    lines = [json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()]
    cut = [json.loads(line) for line in (tmp_path / "a" / "metrics.cut.jsonl").read_text().splitlines()]
    assert [line["batch"] for line in cut] == [4, 5] and [line["start"] for line in lines] == [1] * 3 + [2] * 5
    first, second = cut[-1]["start_sec"], json.loads((tmp_path / "a" / "starts.jsonl").read_text().splitlines()[1])
    clocks = sum(line[f"{clock}_sec"] for line in [*lines[:3], *cut] for clock in CLOCKS)
    assert clocks <= first and 50.0 < lines[-1]["start_sec"] < second["seconds"] < took_sec
    assert summary["wall_seconds"] == pytest.approx(first + second["seconds"], rel=1e-5)
    assert summary["images_per_sec_wall"] == pytest.approx(64 / summary["wall_seconds"], rel=1e-5)
    assert summary["device_hours"] == pytest.approx(summary["wall_seconds"] / 3600, rel=1e-5) and "cost" not in summary
    # A price is told, changes nothing else, and may be given to a run that has ended.
    capsys.readouterr()
    for price in (3600.0, 7200.0):
        assert main(*words, f"cost.per_device_hour={price}") == 0
        result = dict(pair.split("=") for pair in capsys.readouterr().out.split())
        now = summary_of(tmp_path / "a")
        assert float(result["cost"]) == now["cost"] == pytest.approx(price * summary["device_hours"], rel=1e-5)
        assert now == {**summary, "cost": now["cost"]} and read_config(tmp_path / "a")["cost.per_device_hour"] == price
    assert main(*words, "max_duration=9ba", "cost.per_device_hour=1") == 0
    longer = summary_of(tmp_path / "a")
    assert longer["cost"] == longer["device_hours"] > summary["device_hours"]
    assert f"device_hours={longer['device_hours']} cost={longer['cost']}\n" in capsys.readouterr().out


def test_a_record_that_lost_its_history_is_said_at_the_start_and_marked_in_every_summary(words_of, tmp_path, capsys):
    folder = tmp_path / "a"
    assert main(*words_of(tmp_path, "a")) == 0
    assert summary_of(folder)["history_lost"] == [] and summary_of(folder)["images_per_sec_wall"] > 0
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    (folder / "starts.jsonl").unlink()
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a", "max_duration=6ba")) == 0
    told = "it was cut, or is a copy of before. summary.json will say so (history_lost)."
    assert capsys.readouterr().err.splitlines()[1:3] == [
        f"run_name: {folder}/starts.jsonl has 0 of 1 starts: {told}",
        f"run_name: {folder}/metrics.jsonl has 1 of 2 lines: {told}",
    ]
    assert json.loads((folder / "starts.jsonl").read_text())["start"] == 2  # the lines of the first one stay its own
    assert main(*words_of(tmp_path, "a", "max_duration=8ba")) == 0  # what later starts say is of no whole record either
    assert summary_of(folder)["history_lost"] == ["metrics.jsonl", "starts.jsonl"]
    assert summary_of(folder)["images_per_sec_wall"] is None


def test_a_run_without_checkpoints_begins_again_and_says_so(words_of, tmp_path, capsys):
    words = words_of(tmp_path, "a", "save.every_images=0", "save.snapshot_every_images=0")
    assert main(*words) == 0
    (tmp_path / "a" / "summary.json").unlink()
    capsys.readouterr()
    assert main(*words) == 0
    assert f"run_name: {tmp_path}/a resumes from its beginning: it has no checkpoint.\n" in capsys.readouterr().err
    assert not (tmp_path / "a" / "checkpoints").exists()


def test_ctrl_c_says_that_nothing_was_saved_of_a_run_without_checkpoints(words_of, tmp_path, capsys, monkeypatch):
    before = signal.signal(signal.SIGINT, lambda number, frame: sys.exit(128 + number))  # as in a process of its own
    try:
        words = words_of(tmp_path, "a", "save.every_images=0", "save.snapshot_every_images=0", "max_duration=10ba")
        assert stopped_in_batch_five(monkeypatch, signal.SIGINT, *words) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err.endswith(
        "SIGINT: stopped. Nothing was saved: save.every_images and save.every_min are 0. "
        "The same command starts it again.\n"
    )


def minutes_of(*words: str) -> float | None:
    command_line = parse_command_line(["model.family=shapes", "model.preset=tiny", "image_size=32", *words], ALIASES)
    return resolve(load(RunConfig, command_line, check=lambda config: [])).save.every_min


def test_a_run_that_is_given_no_interval_also_saves_by_time_unless_it_is_a_measurement():
    assert minutes_of() == minutes_of("save.keep=3") == 30.0 and minutes_of("save.every_min=0") == 0.0
    assert minutes_of("save.every_images=64") == minutes_of("save.every_images=0") == 0.0
    assert minutes_of("save.every_images=64", "save.every_min=5") == 5.0
    assert minutes_of("data.synthetic=true") == minutes_of("mlperf.enabled=true") == 0.0


def test_a_checkpoint_that_time_has_brought_resumes_to_the_last_bit(words_of, whole, tmp_path):
    """Here each batch takes longer than the interval; of images none falls due."""
    own = ["save.every_images=null", "save.snapshot_every_images=0", "save.every_min=0.000001", "save.keep=99"]
    words = words_of(tmp_path, "a", *own, "max_duration=10ba")
    assert main(*words) == 0
    paths = listed(tmp_path / "a" / "checkpoints", FULL)
    assert [path.name[:19] for path in paths] == [f"full-ba{batch:012d}" for batch in range(10, 0, -1)]
    for path in paths[:6]:
        path.unlink()
    (tmp_path / "a" / "summary.json").unlink()
    assert main(*words, "save.every_min=0") == 0
    assert same_training(newest(tmp_path, "a"), newest(whole, "whole"))
    assert len(listed(tmp_path / "a" / "checkpoints", FULL)) == 5  # those four, and that of the end


def test_every_run_gets_a_page_and_none_fails_for_it(words_of, whole, tmp_path, capsys, monkeypatch):
    assert (whole / "whole" / "page.html").is_file()

    def broken(folders):
        raise ZeroDivisionError("a defect.")

    monkeypatch.setattr(page, "write", broken)
    assert main(*words_of(tmp_path, "a", "max_duration=1ba")) == 0
    said, folder = capsys.readouterr(), tmp_path / "a"
    assert f"page: it cannot be written: a defect. python -m reports.page {folder} tries again.\n" in said.err
    assert said.out.splitlines()[-1].startswith("images_per_sec=")


def test_a_run_that_fails_gets_a_page_too(words_of, tmp_path, monkeypatch):
    def failing(self, state, logger):
        raise OSError("no more")

    monkeypatch.setattr(RunRecord, "after_train_batch", failing)
    assert main(*words_of(tmp_path, "a")) == 1
    assert "no more" in (tmp_path / "a" / "page.html").read_text()


def test_a_run_that_was_given_no_name_says_which_one_resumes_it():
    unnamed = resolve(RunConfig(global_batch_size=8))
    assert how_to_resume(unnamed) == f"The same command with run_name={unnamed.run_name}"
    assert how_to_resume(dataclasses.replace(unnamed, run_name="mine")) == "The same command"


def test_synthetic_runs_write_no_checkpoint_unless_asked(tmp_path):
    small = ["model.family=shapes", "image_size=32", f"run_folder={tmp_path}", "run_name=a"]
    assert main(*TINY_RUN, "--use_synth_data", *small) == 0
    assert not (tmp_path / "a" / "checkpoints").exists()


def refused(capsys, *words: str) -> str:
    assert main(*words) == 2
    return capsys.readouterr().err


@pytest.fixture
def begun(whole, tmp_path):
    shutil.copytree(whole / "whole", tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    return tmp_path


def rewrite(tmp_path, change) -> Path:
    """Change the content of a run's newest checkpoint, with a right digest."""
    path = listed(tmp_path / "a" / "checkpoints", FULL)[0]
    kept = {**read(path)}
    change(kept)
    return write(path.parent, stem(FULL, 10), kept)


def test_a_run_goes_on_only_as_it_began_and_all_that_differs_is_named(words_of, begun, capsys):
    words = words_of(begun, "a", "optimizer.lr=1e-3", "seed=18", "ema.half_life=41sp", "max_duration=12ba")
    tail = "A run resumes as it began: use that value, or another run_name.\n"
    assert refused(capsys, *words) == (
        f"seed: 18, but {begun}/a was begun with 17. {tail}"
        f"optimizer.lr: 0.001, but {begun}/a was begun with 0.0015. {tail}"
        f"ema.half_life: 41sp, but {begun}/a was begun with 40sp. {tail}"
    )


def test_a_schedule_that_ends_with_the_run_keeps_its_duration(words_of, tmp_path, capsys):
    words = ["schedule.name=cosine", "save.every_images=8"]
    assert main(*words_of(tmp_path, "a", *words)) == 0
    capsys.readouterr()
    assert refused(capsys, *words_of(tmp_path, "a", *words, "max_duration=9ba")) == (
        f"max_duration: 9ba, but {tmp_path}/a was begun with 4ba. A run resumes as it began: use that value, or another "
        f"run_name.\n"
    )


def test_another_value_is_refused():
    def disagreements(config: benchmark.RunConfig, saved: dict) -> list[str]:
        state = RunState(Path(), Progress(0, 0, 0, 0, 0, 0.0), (Path("x.pt"), {"identity": saved}), None, [])
        try:
            state.verify(config, [], {}, denoiser_start=None)
        except ConfigError as error:
            return error.problems
        return []

    def of(**more) -> benchmark.RunConfig:
        return benchmark.resolve(dataclasses.replace(benchmark.RunConfig(), **more))

    plain, whole = of(), identity_of(of(), [], {})
    assert disagreements(plain, whole) == []
    [lacking] = disagreements(plain, {key: value for key, value in whole.items() if key != "seed"})
    assert lacking.startswith("seed: 17, but x.pt was made with None. ")
    tail = "A run resumes as it began: use that value, or another run_name."
    other = of(optimizer=dataclasses.replace(plain.optimizer, clip_norm=2.0), seed=3)
    assert disagreements(other, whole) == [
        f"seed: 3, but x.pt was made with 17. {tail}",
        f"optimizer.clip_norm: 2.0, but x.pt was made with {plain.optimizer.clip_norm}. {tail}",
    ]


CASES = {
    "missing weight": (
        lambda kept: kept["model"].pop("denoiser.conv_in.bias"),
        "{path}: its weights do not fit the model: 1 missing (denoiser.conv_in.bias). Use the configuration that it was "
        "made with.",
    ),
    "another shape": (
        lambda kept: kept["model"].update({"denoiser.conv_in.bias": torch.zeros(3)}),
        "{path}: its weights do not fit the model: 1 of another form (denoiser.conv_in.bias is float32 (3,), not float32 "
        "(32,)). Use the "
        "configuration that it was made with.",
    ),
    "optimizer of others": (
        lambda kept: kept["optimizer"]["names"][0].reverse(),
        "{path}: its optimizer has other parameters or groups. Use optimizer.decay as it was.",
    ),
    "no average": (
        lambda kept: kept.update(ema=None),
        "ema.enabled: true, but {path} has no EMA weights. Leave it as the run was begun.",
    ),
    "emptied average": (
        lambda kept: kept["ema"]["weights"].clear(),
        "{path}: ema: the saved EMA weights do not fit the model: 286 missing (denoiser.conv_in.weight, "
        "denoiser.conv_in.bias, denoiser.time_embedding.linear_1.weight and 283 more).",
    ),
    "other encoders": (
        lambda kept: kept["identity"].update({"encoders.vae": "0" * 32}),
        "encoders.vae: '{vae}', but {path} was made with '00000000000000000000000000000000'. A run resumes as it began: "
        "use that value, or another run_name.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(words_of, begun, capsys, case):
    change, message = CASES[case]
    vae = newest(begun, "a")["identity"]["encoders.vae"]
    path = rewrite(begun, change)
    before = tree(begun / "a")
    told = refused(capsys, *words_of(begun, "a", "max_duration=12ba"))
    assert tree(begun / "a") == before  # the record is not cut back, nor is the run said to be unfinished
    assert told.splitlines()[-1] == message.format(path=path, vae=vae)


def test_what_a_start_leaves_that_was_killed_at_once_does_not_hinder_the_next(words_of, tmp_path, monkeypatch, capsys):
    """A run without its config.yaml also resumes: its checkpoint has the run's identity."""
    import callbacks.run_record as run_record

    def killed(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_record, "write_whole", killed)
        main(*words_of(tmp_path, "a"))
    gc.collect()
    assert main(*words_of(tmp_path, "a")) == 0
    (tmp_path / "a" / "config.yaml").unlink()
    with open(tmp_path / "a" / "starts.jsonl", "a") as file:
        file.write('{"start": 2, "ru')
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a", "max_duration=6ba")) == 0
    assert "resumes from batch 4" in capsys.readouterr().err
    assert [json.loads(line)["start"] for line in (tmp_path / "a" / "starts.jsonl").read_text().splitlines()] == [1, 2]
    assert refused(capsys, *words_of(tmp_path, "a", "max_duration=8ba", "seed=18")).startswith("seed: 18, but ")


def test_a_folder_that_another_process_trains_in_is_refused(words_of, begun, capsys):
    from filelock import FileLock

    with FileLock(begun / "a" / ".lock"):
        assert main(*words_of(begun, "a", "max_duration=12ba")) == 1  # a new start finds the other one ended
        assert capsys.readouterr().err == (
            f"run_name: another process is training in {begun}/a. Wait for it, or take another run_name.\n"
        )


def test_a_disk_that_fills_while_a_checkpoint_is_written_stops_the_run_with_the_last_whole_one(
    words_of, begun, monkeypatch, capsys
):
    def full_disk(self):
        raise OSError(errno.ENOSPC, "No space left on device")

    last = listed(begun / "a" / "checkpoints", FULL)[0]
    monkeypatch.setattr(checkpoint_files.DigestingFile, "flush", full_disk, raising=True)

    def is_checkpoint(descriptor):
        return "/checkpoints/." in str(Path(f"/proc/self/fd/{descriptor}").readlink())

    sync = os.fsync  # of the run's record, too
    monkeypatch.setattr(os, "fsync", lambda at: full_disk(None) if is_checkpoint(at) else sync(at))
    assert main(*words_of(begun, "a", "max_duration=12ba", "save.snapshot_every_images=0")) == 1
    said = capsys.readouterr().err
    text = said.rstrip("\n").splitlines()[-1]
    assert "Traceback" not in said
    named = re.escape(f"checkpoints: {begun}/a/checkpoints/full-ba000000000012")
    assert re.match(
        named + r" \(0\.01\d* GiB\) cannot be written: No space left on device; [\d.e+]+ GiB are free\. ", text
    )
    assert text.endswith(
        f"GiB are free. The run stops, since it could not be resumed from here. The last whole checkpoint is {last}. Make "
        f"room, and start the same command again."
    )
    assert not list((begun / "a" / "checkpoints").glob(".*"))


# --- signals ---


def stopped_in_batch_five(monkeypatch, number: int, *words: str) -> int:
    """Run until this process has sent itself a signal, as a batch system would, and return the exit code."""
    before = RunRecord.after_train_batch

    def after_train_batch(self, state, logger):
        before(self, state, logger)
        if state.timestamp.batch.value == 4:
            os.kill(os.getpid(), number)

    handlers = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        with monkeypatch.context() as patch:
            patch.setattr(RunRecord, "after_train_batch", after_train_batch)
            return main(*words)
    finally:  # a run that a signal ends keeps its own to the end of the process
        for number, handler in handlers.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGINT])
def test_a_signal_ends_the_run_at_the_next_batch_edge_with_a_checkpoint(
    number, words_of, whole, tmp_path, capsys, monkeypatch
):
    words = words_of(tmp_path, "a", "max_duration=10ba")
    assert stopped_in_batch_five(monkeypatch, number, *words) == 128 + number
    gc.collect()  # the run's folder is free when its process ends: here, when its frames are gone
    path = listed(tmp_path / "a" / "checkpoints", FULL)[0]
    assert capsys.readouterr().err.endswith(
        f"{number.name}: stopped after batch 5; saved {path}. The same command resumes it.\n"
    )
    assert main(*words) == 0
    assert same_training(newest(tmp_path, "a"), newest(whole, "whole"))
    assert has_the_windows_of(whole / "whole", tmp_path / "a")  # batch 5 is the first of the window of 5 and 6
    # A start's first two batches are not measured, here 6 and 7, nor is 8, in the same window as 7.
    one, two = summary_of(tmp_path / "a"), summary_of(whole / "whole")
    assert (one["warmup_batches"], one["windows"], two["warmup_batches"], two["windows"]) == (5, 2, 2, 4)


def test_a_signal_ends_a_run_that_waits_for_its_first_batch(words_of, tmp_path, capsys, monkeypatch):
    """No batch's edge comes while a store is away: it was obeyed there alone."""
    read_batch = MomentsStream.read_batch

    def slow(self, sample_ids):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        return read_batch(self, sample_ids)

    monkeypatch.setattr(MomentsStream, "read_batch", slow)
    seen = signal.getsignal(signal.SIGTERM)
    assert main(*words_of(tmp_path, "a")) == 128 + signal.SIGTERM
    assert capsys.readouterr().err.endswith(
        "SIGTERM: stopped after batch 0; nothing has been trained. The same command resumes it.\n"
    )
    assert not listed(tmp_path / "a" / "checkpoints", FULL)
    signal.signal(signal.SIGTERM, seen)
