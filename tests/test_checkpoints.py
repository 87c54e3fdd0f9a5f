"""Checkpoints: their files and content, what is refused, and that a run resumes bit for bit.

Tests that kill whole commands are in tests/test_resume.py.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import gc
import json
import os
import re
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from composer import Time, Timestamp
from conftest import tree
from filelock import FileLock

import benchmark
from callbacks.run_record import RunRecord
from callbacks.throughput import CLOCKS
from checkpointing import files
from checkpointing.callback import STOP_SIGNALS, Checkpointer
from checkpointing.content import Progress
from checkpointing.files import FULL, WEIGHTS, file_stem, find_newest, list_checkpoints, read_checkpoint
from checkpointing.resume import RunState
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import flatten, load
from reports import page
from run_folder.files import read_config
from training.config import ALIASES, RunConfig, resolve
from training.optimizer import ScheduleConfig
from training.start import identity_of

pytestmark = pytest.mark.timeout(60, func_only=True)


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


def test_a_checkpoint_is_named_by_its_digest_reads_back_and_replaces_one_of_its_number(tmp_path):
    files.write_checkpoint(tmp_path / "new", file_stem(FULL, 7), content())
    path = files.write_checkpoint(tmp_path / "new", file_stem(FULL, 7), content(nested={"a": [1, 2.5, "x", None]}))
    assert path.name.startswith("full-ba000000000007-") and files.is_whole(path)
    assert differences(read_checkpoint(path), content(nested={"a": [1, 2.5, "x", None]})) == []
    assert list(path.parent.iterdir()) == [path]


def test_damaged_checkpoints_are_set_aside_until_none_is_left_and_each_start_is_refused(tmp_path, capsys):
    paths = [files.write_checkpoint(tmp_path, file_stem(FULL, n), content()) for n in range(4)]
    whole = paths[0].read_bytes()
    for number, damaged in ((3, b""), (2, whole[: len(whole) // 2]), (1, whole[:-1] + bytes([whole[-1] ^ 1]))):
        paths[number].write_bytes(damaged)
        assert find_newest(tmp_path) == paths[number - 1]
        problem = f"{paths[number]} is damaged (its bytes do not have the digest in its name); set aside."
        assert problem in capsys.readouterr().err
        assert find_newest(tmp_path) == paths[number - 1] and capsys.readouterr().err == ""
    assert {p.name for p in tmp_path.iterdir()} == {paths[0].name, *(f"{path.name}.damaged" for path in paths[1:])}
    paths[0].write_bytes(b"")
    for _ in range(2):
        with pytest.raises(ConfigError, match="every one of the 4 full checkpoints in .* is damaged"):
            find_newest(tmp_path)


def test_the_newest_checkpoint_has_the_greatest_number_and_unrelated_files_stay(tmp_path):
    paths = {n: files.write_checkpoint(tmp_path, file_stem(FULL, n), content()) for n in (900, 1000, 99)}
    files.write_checkpoint(tmp_path, file_stem(WEIGHTS, 10**9), content())
    for name in ("notes.txt", "full-ba1.pt", "full-ba000000009999-xyz.pt"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / ".full-ba000000002000.77.tmp").write_bytes(b"half")
    assert find_newest(tmp_path) == paths[1000] and find_newest(tmp_path / "none") is None
    assert not list(tmp_path.glob("*.tmp")) and (tmp_path / "notes.txt").exists()


def test_a_pickled_class_is_refused_and_none_of_its_code_runs(tmp_path):
    class Mischief:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = files.write_checkpoint(tmp_path, file_stem(FULL, 1), content(object=Mischief()))
    with pytest.raises(ConfigError, match=r"holds more than tensors and plain values \(posix.mkdir\)"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path):
    path = tmp_path / "full.pt"
    path.write_bytes(b"no zip at all")
    with pytest.raises(ConfigError, match="full.pt: cannot be read as a checkpoint: "):
        read_checkpoint(path)
    for saved, schema in (([1], "list"), ({"schema": 9}, "9")):
        torch.save(saved, path)
        with pytest.raises(ConfigError, match=f"full.pt: has schema {schema}; this version reads 1."):
            read_checkpoint(path)


@pytest.mark.parametrize(("batch_in_epoch", "expected"), [(5, (2, 17, 136, 5, 40)), (6, (3, 18, 144, 0, 0))])
def test_progress_after_the_last_batch_of_an_epoch_is_at_the_start_of_the_next(batch_in_epoch, expected):
    """Six batches of eight images an epoch, in the third epoch."""
    batch, in_epoch = 12 + batch_in_epoch, dict(batch_in_epoch=batch_in_epoch, sample_in_epoch=8 * batch_in_epoch)
    now = Timestamp(epoch=2, batch=batch, sample=8 * batch, **in_epoch, total_wct=datetime.timedelta(seconds=2.5))
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
    path = list_checkpoints(tmp_path / name / "checkpoints", FULL)[0]
    assert files.is_whole(path)
    return read_checkpoint(path)


def same_training(one: dict, two: dict) -> bool:
    keys = ("model", "ema", "optimizer", "schedule", "scaler")
    return differences({key: one[key] for key in keys}, {key: two[key] for key in keys}) == []


@pytest.fixture(scope="module")
def whole(words_of, tmp_path_factory):
    """An unbroken run of 10 batches of 8, with checkpoints each third and snapshots each fourth."""
    folder = tmp_path_factory.mktemp("whole")
    assert main(*words_of(folder, "whole", "max_duration=10ba")) == 0
    return folder


def test_a_run_keeps_its_newest_full_checkpoints_and_all_its_snapshots(whole):
    folder = whole / "whole" / "checkpoints"
    assert [int(path.name[7:19]) for path in list_checkpoints(folder, FULL)] == [10, 9]
    assert [int(path.name[10:22]) for path in list_checkpoints(folder, WEIGHTS)] == [64, 32]
    snapshot = read_checkpoint(list_checkpoints(folder, WEIGHTS)[0])
    assert sorted(snapshot) == ["callbacks", "ema", "identity", "model", "progress", "schema", "unix_time"]
    assert snapshot["progress"]["images"] == 64 and snapshot["identity"]["model.preset"] == "tiny"
    assert set(snapshot["ema"]["weights"]) == set(snapshot["model"])
    assert all(name.startswith("denoiser.") for name in snapshot["model"])  # no frozen encoder, no wrapper


def test_a_resumed_run_is_the_unbroken_one_to_the_last_bit(words_of, whole, tmp_path, capsys):
    """The end of the shorter run closes a window early; the resumed one finishes it."""
    assert main(*words_of(tmp_path, "part", "max_duration=5ba")) == 0
    assert [batch for batch, *_ in windows(tmp_path / "part")] == [2, 4, 5]
    assert main(*words_of(tmp_path, "part", "max_duration=10ba", "data.workers=1", "save.keep=1")) == 0
    assert same_training(newest(tmp_path, "part"), newest(whole, "whole"))
    assert has_the_windows_of(whole / "whole", tmp_path / "part")
    assert len(list_checkpoints(tmp_path / "part" / "checkpoints", FULL)) == 1  # save.keep
    message = f"{tmp_path}/part resumes from batch 5, 40 images ({tmp_path}/part/checkpoints/full-ba"
    assert message in capsys.readouterr().err


def test_a_finished_run_repeats_its_result_and_changes_nothing(words_of, whole, capsys):
    summary, before = summary_of(whole / "whole"), tree(whole / "whole")
    for duration in ("10ba", "48sp"):
        assert main(*words_of(whole, "whole", f"max_duration={duration}")) == 0
        output = capsys.readouterr()
        assert output.err == f"run_name: {whole}/whole is finished (max_duration=10ba); a longer one would resume it.\n"
        assert output.out.startswith(f"images_per_sec={summary['images_per_sec']} ") and output.out.count("\n") == 1
        assert tree(whole / "whole") == before


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def windows(folder: Path) -> list[tuple[int, float, float]]:
    return [(line["batch"], line["loss"], line["gradient_norm"]) for line in lines_of(folder / "metrics.jsonl")]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def has_the_windows_of(whole: Path, folder: Path) -> bool:
    """The same batches, the same losses and norms to the last bit, the loss on the result line too."""
    return windows(folder) == windows(whole) and summary_of(folder)["loss"] == summary_of(whole)["loss"]


@pytest.mark.usefixtures("traced_cost")
def test_a_disk_without_room_for_a_whole_run_is_refused(words_of, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=48 * 2**20))
    needed = "disk: 3 full checkpoints of 0.0107 GiB and 24 snapshots of 0.00533 GiB: 0.16 GiB more; "
    output = refused(capsys, *words_of(tmp_path, "a", "max_duration=1ep", "save.snapshot_every_images=8"))
    assert output.startswith(f"{needed}{tmp_path} has 0.0469 free.") and not (tmp_path / "a").exists()


def test_a_run_without_an_interval_also_saves_by_time_unless_it_is_a_measurement():
    rows = {
        "": 30.0,
        "save.every_images=64 save.every_min=5": 5.0,
        "save.every_images=64": 0.0,
        "data.synthetic=true": 0.0,
    }
    for words, every_min in rows.items():
        words = ["model.family=shapes", "model.preset=tiny", "image_size=32", *words.split()]
        config = load(RunConfig, parse_command_line(words, ALIASES), check=lambda config: [])
        assert resolve(config).save.every_min == every_min, words


def test_every_run_gets_a_page_a_failed_one_too_and_no_run_fails_for_it(words_of, whole, tmp_path, capsys, monkeypatch):
    assert (whole / "whole" / "page.html").is_file()
    fail = Mock(side_effect=OSError("no more."))
    with monkeypatch.context() as patch:
        patch.setattr(RunRecord, "after_train_batch", fail)
        assert main(*words_of(tmp_path, "failed")) == 1
    assert "no more." in (tmp_path / "failed" / "page.html").read_text()
    monkeypatch.setattr(page, "write", fail)
    assert main(*words_of(tmp_path, "a", "max_duration=1ba")) == 0
    problem = f"page: cannot be written: no more. To retry: python -m reports.page {tmp_path}/a\n"
    assert problem in capsys.readouterr().err


def refused(capsys, *words: str) -> str:
    assert main(*words) == 2
    return capsys.readouterr().err


@pytest.fixture
def begun(whole, tmp_path):
    shutil.copytree(whole / "whole", tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    return tmp_path


def test_a_run_resumes_only_as_it_began_and_all_that_differs_is_named(words_of, begun, capsys):
    changed = {"seed": ("18", "17"), "optimizer.lr": ("0.001", "0.0015"), "ema.half_life": ("41sp", "40sp")}
    words = words_of(begun, "a", *(f"{key}={value}" for key, (value, _) in changed.items()), "max_duration=12ba")
    assert refused(capsys, *words).splitlines() == [
        f"{key}: {value}, but {begun}/a was begun with {was}. A run resumes as it began: use that value, or another run_name."
        for key, (value, was) in changed.items()
    ]


def test_a_value_that_a_checkpoint_lacks_or_has_otherwise_is_refused():
    identity = identity_of(flatten(resolve(RunConfig())), [], {}, denoiser_start=None)

    def verify(saved: dict) -> None:
        RunState(Path(), Progress(0, 0, 0, 0, 0, 0.0), (Path("x.pt"), {"identity": saved}), None, []).verify(identity)

    verify(identity)
    lacking = {key: value for key, value in identity.items() if key != "seed"}
    for saved, value in ((lacking, None), ({**identity, "seed": 3}, 3)):
        with pytest.raises(ConfigError, match=f"^seed: 17, but x.pt was made with {value}. "):
            verify(saved)
    # A schedule that ends with the run keeps the run's duration.
    cosine = resolve(RunConfig(schedule=ScheduleConfig(name="cosine")))
    assert "max_duration" in identity_of(flatten(cosine), [], {}, denoiser_start=None)
    assert "max_duration" not in identity


MISFITS = {
    "its weights do not fit the model: 1 missing (denoiser.conv_in.bias). ": lambda content: content["model"].pop(
        "denoiser.conv_in.bias"
    ),
    "its optimizer has other parameters or groups. ": lambda content: content["optimizer"]["names"][0].reverse(),
    " has no EMA weights. ": lambda content: content.update(ema=None),
    "was made with '00": lambda content: content["identity"].update({"encoders.vae": 32 * "0"}),
}


@pytest.mark.parametrize("message", MISFITS)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(words_of, begun, capsys, message):
    path = list_checkpoints(begun / "a" / "checkpoints", FULL)[0]
    content = read_checkpoint(path)
    MISFITS[message](content)
    path = files.write_checkpoint(path.parent, file_stem(FULL, 10), content)  # with a right digest
    before = tree(begun / "a")
    output = refused(capsys, *words_of(begun, "a", "max_duration=12ba"))
    assert tree(begun / "a") == before  # the record is not cut back, nor marked as unfinished
    assert str(path) in output.splitlines()[-1] and message in output.splitlines()[-1]


def test_a_folder_that_another_process_trains_in_is_refused(words_of, begun, capsys):
    with FileLock(begun / "a" / ".lock"):
        assert main(*words_of(begun, "a", "max_duration=12ba")) == 1  # a later start may find the other one ended
    assert f"run_name: another process is training in {begun}/a. " in capsys.readouterr().err


def test_a_disk_that_fills_while_a_checkpoint_is_written_stops_the_run(words_of, begun, monkeypatch, capsys):
    last = list_checkpoints(begun / "a" / "checkpoints", FULL)[0]
    full_disk = Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    monkeypatch.setattr(files.DigestingFile, "flush", full_disk)
    assert main(*words_of(begun, "a", "max_duration=12ba", "save.snapshot_every_images=0")) == 1
    output = capsys.readouterr().err
    assert "Traceback" not in output
    for text in (
        "/full-ba000000000012 (0.01",
        "cannot be written: No space left",
        f"last whole checkpoint is {last}. ",
    ):
        assert text in output.splitlines()[-1]
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


@pytest.mark.slow
def test_a_signal_ends_the_run_at_the_next_batch_edge_with_a_checkpoint(words_of, whole, tmp_path, capsys, monkeypatch):
    words = words_of(tmp_path, "a", "max_duration=10ba")
    assert stopped_in_batch_five(monkeypatch, signal.SIGUSR1, *words) == 128 + signal.SIGUSR1
    gc.collect()  # the run's folder is free when its process ends: here, when its frames are gone
    path = list_checkpoints(tmp_path / "a" / "checkpoints", FULL)[0]
    message = f"SIGUSR1: stopped after batch 5; saved {path}. The same command resumes it.\n"
    assert capsys.readouterr().err.endswith(message)
    assert main(*words) == 0
    assert same_training(newest(tmp_path, "a"), newest(whole, "whole"))
    assert has_the_windows_of(whole / "whole", tmp_path / "a")  # batch 5 is the first of the window of 5 and 6
    # A start's first two batches are not measured, here 6 and 7, nor is 8, in the same window as 7.
    one, two = summary_of(tmp_path / "a"), summary_of(whole / "whole")
    assert (one["warmup_batches"], one["windows"], two["warmup_batches"], two["windows"]) == (5, 2, 2, 4)


@pytest.mark.long
def test_the_wall_figure_has_all_starts_and_what_a_restart_costs(words_of, tmp_path, monkeypatch, capsys):
    """Killed after its checkpoint: batches 4 and 5 are trained again, and their time counts twice."""
    words = words_of(tmp_path, "a", "max_duration=8ba", "measure.window_batches=1")

    def save_and_die(self, state, logger, save=Checkpointer.batch_checkpoint):
        save(self, state, logger)
        if state.timestamp.batch.value == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(RunRecord, "clock_to_end", lambda self: contextlib.nullcontext())
        patch.setattr(Checkpointer, "batch_checkpoint", save_and_die)
        main(*words)
    gc.collect()
    with open(tmp_path / "a" / "metrics.jsonl", "a") as file:
        file.write('{"schema": 1, "ba')  # killed while it wrote
    assert benchmark.main(words, began=time.time() - 50.0) == 0  # as a process that was 50 s in building
    summary = summary_of(tmp_path / "a")
    lines, cut, starts = (lines_of(tmp_path / "a" / f"{name}.jsonl") for name in ("metrics", "metrics.cut", "starts"))
    assert [line["batch"] for line in cut] == [4, 5] and [line["start"] for line in lines] == [1] * 3 + [2] * 5
    assert [(start["start"], start["batch"]) for start in starts] == [(1, 0), (2, 3)]
    assert len({start["run_id"] for start in starts}) == 1
    assert (summary["batches"], summary["starts"]) == (8, 2)
    first, second = cut[-1]["start_sec"], starts[1]["seconds"]
    assert sum(line[f"{clock}_sec"] for line in [*lines[:3], *cut] for clock in CLOCKS) <= first
    assert 50.0 < lines[-1]["start_sec"] < second
    figures = [summary[key] for key in ("wall_seconds", "images_per_sec_wall", "device_hours")]
    assert figures == pytest.approx([first + second, 64 / (first + second), (first + second) / 3600], rel=1e-5)
    # A price is reported, changes nothing else, and may be given to a run that has ended.
    assert main(*words, "cost.per_device_hour=3600") == 0
    assert summary_of(tmp_path / "a") == {**summary, "cost": pytest.approx(3600 * summary["device_hours"], rel=1e-5)}
    assert re.search(r" cost=[\d.]+\n$", capsys.readouterr().out)
    assert read_config(tmp_path / "a")["cost.per_device_hour"] == 3600.0


@pytest.mark.long
def test_a_record_that_lost_its_history_is_reported_at_the_start_and_in_every_summary(words_of, tmp_path, capsys):
    folder = tmp_path / "a"
    assert main(*words_of(tmp_path, "a")) == 0
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    (folder / "starts.jsonl").unlink()
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a", "max_duration=6ba")) == 0
    output = capsys.readouterr().err
    assert f"run_name: {folder}/starts.jsonl has 0 of 1 starts: it was cut" in output
    assert f"run_name: {folder}/metrics.jsonl has 1 of 2 lines: it was cut" in output
    assert main(*words_of(tmp_path, "a", "max_duration=8ba")) == 0  # later starts do not forget it
    assert summary_of(folder)["history_lost"] == ["metrics.jsonl", "starts.jsonl"]
    assert summary_of(folder)["images_per_sec_wall"] is None
