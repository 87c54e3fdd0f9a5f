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
import sys
import time
from pathlib import Path
from types import SimpleNamespace

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
from checkpointing.files import (
    FULL,
    WEIGHTS,
    file_stem,
    find_newest,
    is_whole,
    list_checkpoints,
    read_checkpoint,
    write_checkpoint,
)
from checkpointing.resume import RunState
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import flatten, load
from mds.moments import MomentsDataset
from reports import page
from run_folder.files import read_config
from training.config import ALIASES, RunConfig, resolve
from training.optimizer import ScheduleConfig
from training.start import identity_of

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


def test_a_checkpoint_is_named_by_its_digest_reads_back_and_replaces_one_of_its_number(tmp_path):
    write_checkpoint(tmp_path / "new", file_stem(FULL, 7), content())
    path = write_checkpoint(tmp_path / "new", file_stem(FULL, 7), content(nested={"a": [1, 2.5, "x", None]}))
    assert path.name.startswith("full-ba000000000007-") and is_whole(path)
    assert differences(read_checkpoint(path), content(nested={"a": [1, 2.5, "x", None]})) == []
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("how", ["truncated", "flipped", "emptied"])
def test_a_damaged_newest_checkpoint_is_set_aside_and_the_one_before_is_found(tmp_path, capsys, how):
    older, newest = (write_checkpoint(tmp_path, file_stem(FULL, n), content()) for n in (1, 2))
    damaged(newest, how)
    assert find_newest(tmp_path) == older
    assert f"{newest} is damaged (its bytes do not have the digest in its name); set aside." in capsys.readouterr().err
    assert {p.name for p in tmp_path.iterdir()} == {older.name, f"{newest.name}.damaged"}
    assert find_newest(tmp_path) == older and capsys.readouterr().err == ""


def test_when_every_checkpoint_is_damaged_each_start_is_refused(tmp_path):
    for number in (1, 2):
        damaged(write_checkpoint(tmp_path, file_stem(FULL, number), content()), "flipped")
    for _ in range(2):
        with pytest.raises(
            ConfigError, match="every one of the 2 full checkpoints in .* is damaged, the newest is full-"
        ):
            find_newest(tmp_path)


def test_the_newest_checkpoint_has_the_greatest_number_and_unrelated_files_stay(tmp_path):
    paths = {n: write_checkpoint(tmp_path, file_stem(FULL, n), content()) for n in (900, 1000, 99)}
    write_checkpoint(tmp_path, file_stem(WEIGHTS, 10**9), content())
    for name in ("notes.txt", "full-ba1.pt", "full-ba000000009999-xyz.pt"):
        (tmp_path / name).write_bytes(b"mine")
    (tmp_path / ".full-ba000000002000.77.tmp").write_bytes(b"half")
    assert find_newest(tmp_path) == paths[1000] and find_newest(tmp_path / "none") is None
    assert not list(tmp_path.glob("*.tmp")) and (tmp_path / "notes.txt").exists()


def test_a_pickled_class_is_refused_and_none_of_its_code_runs(tmp_path):
    class Mischief:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "ran"),))

    path = write_checkpoint(tmp_path, file_stem(FULL, 1), content(object=Mischief()))
    with pytest.raises(ConfigError, match=r"holds more than tensors and plain values \(posix.mkdir\)"):
        read_checkpoint(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: path.write_bytes(b"no zip at all"), "cannot be read as a checkpoint: "),
        (lambda path: torch.save([1], path), "has schema list; this version reads 1."),
        (lambda path: torch.save({"schema": 9}, path), "has schema 9; this version reads 1."),
    ],
)
def test_a_file_that_is_not_a_checkpoint_is_named(tmp_path, make, message):
    make(tmp_path / "full.pt")
    with pytest.raises(ConfigError, match=f"full.pt: {message}"):
        read_checkpoint(tmp_path / "full.pt")


@pytest.mark.parametrize(("batch_in_epoch", "expected"), [(5, (2, 17, 136, 5, 40)), (6, (3, 18, 144, 0, 0))])
def test_progress_after_the_last_batch_of_an_epoch_is_at_the_start_of_the_next(batch_in_epoch, expected):
    """Six batches of eight images an epoch, in the third epoch."""
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
    path = list_checkpoints(tmp_path / name / "checkpoints", FULL)[0]
    assert is_whole(path)
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
    assert f"{tmp_path}/part resumes from batch 5, 40 images ({tmp_path}/part/checkpoints/full-ba" in (
        capsys.readouterr().err
    )


def test_a_finished_run_repeats_its_result_and_changes_nothing(words_of, whole, capsys):
    summary, before = summary_of(whole / "whole"), tree(whole / "whole")
    for duration in ("10ba", "6ba", "80sp"):
        assert main(*words_of(whole, "whole", f"max_duration={duration}")) == 0
        printed = capsys.readouterr()
        assert (
            printed.err == f"run_name: {whole}/whole is finished (max_duration=10ba); a longer one would resume it.\n"
        )
        assert printed.out.startswith(f"images_per_sec={summary['images_per_sec']} ") and printed.out.count("\n") == 1
        assert tree(whole / "whole") == before


def test_the_record_is_cut_back_to_the_checkpoint_and_what_is_cut_is_kept(words_of, whole, tmp_path):
    """A run that died at batch 8 with a checkpoint at 6: lines 7 and 8 will be written again."""
    folder = shutil.copytree(whole / "whole", tmp_path / "whole")
    for path in list_checkpoints(folder / "checkpoints", FULL):
        path.unlink()
    assert main(*words_of(tmp_path, "donor", "max_duration=6ba")) == 0
    donor = list_checkpoints(tmp_path / "donor" / "checkpoints", FULL)[0]
    shutil.copy(donor, folder / "checkpoints")
    (folder / "summary.json").unlink()
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('{"schema": 1, "ba')  # killed while it wrote
    before = lines_of(whole / "whole" / "metrics.jsonl")

    assert main(*words_of(tmp_path, "whole", "max_duration=10ba")) == 0
    after = lines_of(folder / "metrics.jsonl")
    assert [(line["batch"], line["loss"]) for line in after] == [(line["batch"], line["loss"]) for line in before]
    assert [line["start"] for line in after] == [1, 1, 1, 2, 2]
    assert [line["batch"] for line in lines_of(folder / "metrics.cut.jsonl")] == [8, 10]
    starts = lines_of(folder / "starts.jsonl")
    assert [(start["start"], start["batch"]) for start in starts] == [(1, 0), (2, 6)]
    assert starts[0]["run_id"] == starts[1]["run_id"]
    summary = summary_of(folder)
    assert (summary["batches"], summary["starts"], summary["warmup_batches"]) == (10, 2, 4)


def lines_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def windows(folder: Path) -> list[tuple[int, float, float]]:
    return [(line["batch"], line["loss"], line["gradient_norm"]) for line in lines_of(folder / "metrics.jsonl")]


def summary_of(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def has_the_windows_of(whole: Path, folder: Path) -> bool:
    """The same batches, the same losses and norms to the last bit, the loss on the result line too."""
    return windows(folder) == windows(whole) and summary_of(folder)["loss"] == summary_of(whole)["loss"]


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
    began = time.time() - 50.0  # as a process that was 50 s in building
    assert benchmark.main(words, began=began) == 0
    took_sec, summary = time.time() - began, summary_of(tmp_path / "a")
    lines, cut, starts = (lines_of(tmp_path / "a" / f"{name}.jsonl") for name in ("metrics", "metrics.cut", "starts"))
    assert [line["batch"] for line in cut] == [4, 5] and [line["start"] for line in lines] == [1] * 3 + [2] * 5
    first, second = cut[-1]["start_sec"], starts[1]["seconds"]
    assert sum(line[f"{clock}_sec"] for line in [*lines[:3], *cut] for clock in CLOCKS) <= first
    assert 50.0 < lines[-1]["start_sec"] < second < took_sec
    assert summary["wall_seconds"] == pytest.approx(first + second, rel=1e-5)
    assert summary["images_per_sec_wall"] == pytest.approx(64 / summary["wall_seconds"], rel=1e-5)
    assert summary["device_hours"] == pytest.approx(summary["wall_seconds"] / 3600, rel=1e-5) and "cost" not in summary
    # A price is reported, changes nothing else, and may be given to a run that has ended.
    capsys.readouterr()
    assert main(*words, "cost.per_device_hour=3600") == 0
    now = summary_of(tmp_path / "a")
    assert now == {**summary, "cost": pytest.approx(3600 * summary["device_hours"], rel=1e-5)}
    assert capsys.readouterr().out.endswith(f" cost={now['cost']}\n")
    assert read_config(tmp_path / "a")["cost.per_device_hour"] == 3600.0


def test_a_disk_without_room_for_a_whole_run_is_refused(words_of, tmp_path, capsys, monkeypatch):
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=48 * 2**20))
    words = words_of(tmp_path, "a", "max_duration=1ep", "save.snapshot_every_images=8")
    assert refused(capsys, *words).startswith(
        f"disk: 3 full checkpoints of 0.0107 GiB and 24 snapshots of 0.00533 GiB: 0.16 GiB more; {tmp_path} has 0.0469 free."
    )
    assert not (tmp_path / "a").exists()


def test_a_record_that_lost_its_history_is_reported_at_the_start_and_in_every_summary(words_of, tmp_path, capsys):
    folder = tmp_path / "a"
    assert main(*words_of(tmp_path, "a")) == 0
    assert summary_of(folder)["history_lost"] == [] and summary_of(folder)["images_per_sec_wall"] > 0
    path = folder / "metrics.jsonl"
    path.write_text(path.read_text().splitlines(keepends=True)[1])
    (folder / "starts.jsonl").unlink()
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a", "max_duration=6ba")) == 0
    assert [line.partition(": it was cut")[0] for line in capsys.readouterr().err.splitlines()[1:3]] == [
        f"run_name: {folder}/starts.jsonl has 0 of 1 starts",
        f"run_name: {folder}/metrics.jsonl has 1 of 2 lines",
    ]
    assert [line["start"] for line in lines_of(folder / "starts.jsonl")] == [2]
    assert main(*words_of(tmp_path, "a", "max_duration=8ba")) == 0  # later starts do not forget it
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


def test_ctrl_c_reports_that_a_run_without_checkpoints_saved_nothing(words_of, tmp_path, capsys, monkeypatch):
    before = signal.signal(signal.SIGINT, lambda number, frame: sys.exit(128 + number))  # as the command does
    try:
        words = words_of(tmp_path, "a", "save.every_images=0", "save.snapshot_every_images=0", "max_duration=10ba")
        assert stopped_in_batch_five(monkeypatch, signal.SIGINT, *words) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert "SIGINT: stopped. Nothing was saved: save.every_images and save.every_min are 0. " in capsys.readouterr().err


def saves_of(*words: str) -> tuple[int | None, float | None]:
    command_line = parse_command_line(["model.family=shapes", "model.preset=tiny", "image_size=32", *words], ALIASES)
    save = resolve(load(RunConfig, command_line, check=lambda config: [])).save
    return save.every_images, save.every_min


def test_a_run_without_an_interval_also_saves_by_time_unless_it_is_a_measurement():
    assert saves_of()[1] == saves_of("save.keep=3")[1] == 30.0 and saves_of("save.every_min=0")[1] == 0.0
    assert saves_of("save.every_images=64") == (64, 0.0) and saves_of("save.every_images=0")[1] == 0.0
    assert saves_of("save.every_images=64", "save.every_min=5") == (64, 5.0)
    assert saves_of("data.synthetic=true") == (0, 0.0) and saves_of("mlperf.enabled=true")[1] == 0.0


def test_checkpoints_are_saved_by_time(words_of, tmp_path):
    """Each batch takes longer than the interval; the number of images causes none."""
    by_time = ["save.every_images=null", "save.snapshot_every_images=0", "save.every_min=0.000001", "save.keep=99"]
    assert main(*words_of(tmp_path, "a", *by_time)) == 0
    paths = list_checkpoints(tmp_path / "a" / "checkpoints", FULL)
    assert [int(path.name[7:19]) for path in paths] == [4, 3, 2, 1]


def test_every_run_gets_a_page_a_failed_one_too_and_no_run_fails_for_it(words_of, whole, tmp_path, capsys, monkeypatch):
    assert (whole / "whole" / "page.html").is_file()

    def fail(*arguments):
        raise OSError("no more.")

    with monkeypatch.context() as patch:
        patch.setattr(RunRecord, "after_train_batch", fail)
        assert main(*words_of(tmp_path, "failed")) == 1
    assert "no more." in (tmp_path / "failed" / "page.html").read_text()
    monkeypatch.setattr(page, "write", fail)
    assert main(*words_of(tmp_path, "a", "max_duration=1ba")) == 0
    printed = capsys.readouterr()
    assert f"page: it cannot be written: no more. python -m reports.page {tmp_path}/a tries again.\n" in printed.err
    assert printed.out.splitlines()[-1].startswith("images_per_sec=")


def refused(capsys, *words: str) -> str:
    assert main(*words) == 2
    return capsys.readouterr().err


@pytest.fixture
def begun(whole, tmp_path):
    shutil.copytree(whole / "whole", tmp_path / "a")
    (tmp_path / "a" / "summary.json").unlink()
    return tmp_path


def test_a_run_resumes_only_as_it_began_and_all_that_differs_is_named(words_of, begun, capsys):
    words = words_of(begun, "a", "optimizer.lr=1e-3", "seed=18", "ema.half_life=41sp", "max_duration=12ba")
    tail = "A run resumes as it began: use that value, or another run_name.\n"
    assert refused(capsys, *words) == (
        f"seed: 18, but {begun}/a was begun with 17. {tail}"
        f"optimizer.lr: 0.001, but {begun}/a was begun with 0.0015. {tail}"
        f"ema.half_life: 41sp, but {begun}/a was begun with 40sp. {tail}"
    )


def test_a_value_that_a_checkpoint_lacks_or_has_otherwise_is_refused():
    identity = identity_of(flatten(resolve(RunConfig())), [], {}, denoiser_start=None)

    def disagreements(saved: dict) -> list[str]:
        state = RunState(Path(), Progress(0, 0, 0, 0, 0, 0.0), (Path("x.pt"), {"identity": saved}), None, [])
        try:
            state.verify(identity)
        except ConfigError as error:
            return [problem.partition(". ")[0] for problem in error.problems]
        return []

    assert disagreements(identity) == []
    lacking = {key: value for key, value in identity.items() if key != "seed"}
    assert disagreements(lacking) == ["seed: 17, but x.pt was made with None"]
    assert disagreements({**identity, "seed": 3}) == ["seed: 17, but x.pt was made with 3"]
    # A schedule that ends with the run keeps the run's duration.
    cosine = resolve(RunConfig(schedule=ScheduleConfig(name="cosine")))
    assert (
        "max_duration" in identity_of(flatten(cosine), [], {}, denoiser_start=None) and "max_duration" not in identity
    )


CASES = {
    "missing weight": (
        lambda content: content["model"].pop("denoiser.conv_in.bias"),
        "{path}: its weights do not fit the model: 1 missing (denoiser.conv_in.bias). ",
    ),
    "another optimizer": (
        lambda content: content["optimizer"]["names"][0].reverse(),
        "{path}: its optimizer has other parameters or groups. ",
    ),
    "no average": (lambda content: content.update(ema=None), "ema.enabled: true, but {path} has no EMA weights. "),
    "emptied average": (
        lambda content: content["ema"]["weights"].clear(),
        "{path}: ema: the saved EMA weights do not fit the model: 286 missing (denoiser.conv_in.weight, ",
    ),
    "other encoders": (
        lambda content: content["identity"].update({"encoders.vae": "0" * 32}),
        "encoders.vae: '{vae}', but {path} was made with '00000000000000000000000000000000'. ",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_that_does_not_fit_is_refused_by_name(words_of, begun, capsys, case):
    change, message = CASES[case]
    path = list_checkpoints(begun / "a" / "checkpoints", FULL)[0]
    content = read_checkpoint(path)
    vae = content["identity"]["encoders.vae"]
    change(content)
    path = write_checkpoint(path.parent, file_stem(FULL, 10), content)  # with a right digest
    before = tree(begun / "a")
    output = refused(capsys, *words_of(begun, "a", "max_duration=12ba"))
    assert tree(begun / "a") == before  # the record is not cut back, nor marked as unfinished
    assert output.splitlines()[-1].startswith(message.format(path=path, vae=vae))


def test_what_a_start_leaves_that_was_killed_at_once_does_not_hinder_the_next(words_of, tmp_path, monkeypatch, capsys):
    """A run without its config.yaml also resumes: its checkpoint has the run's identity."""
    import callbacks.run_record as run_record

    def killed(path, text):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(run_record, "write_atomic", killed)
        main(*words_of(tmp_path, "a"))
    gc.collect()
    assert main(*words_of(tmp_path, "a")) == 0
    (tmp_path / "a" / "config.yaml").unlink()
    with open(tmp_path / "a" / "starts.jsonl", "a") as file:
        file.write('{"start": 2, "ru')
    capsys.readouterr()
    assert main(*words_of(tmp_path, "a", "max_duration=6ba")) == 0
    assert "resumes from batch 4" in capsys.readouterr().err
    assert [line["start"] for line in lines_of(tmp_path / "a" / "starts.jsonl")] == [1, 2]
    assert refused(capsys, *words_of(tmp_path, "a", "max_duration=8ba", "seed=18")).startswith("seed: 18, but ")


def test_a_folder_that_another_process_trains_in_is_refused(words_of, begun, capsys):
    with FileLock(begun / "a" / ".lock"):
        assert main(*words_of(begun, "a", "max_duration=12ba")) == 1  # a later start may find the other one ended
    assert f"run_name: another process is training in {begun}/a. " in capsys.readouterr().err


def test_a_disk_that_fills_while_a_checkpoint_is_written_stops_the_run(words_of, begun, monkeypatch, capsys):
    def full_disk(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    last = list_checkpoints(begun / "a" / "checkpoints", FULL)[0]
    monkeypatch.setattr(files.DigestingFile, "flush", full_disk)
    assert main(*words_of(begun, "a", "max_duration=12ba", "save.snapshot_every_images=0")) == 1
    output = capsys.readouterr().err
    assert "Traceback" not in output
    text = output.splitlines()[-1]
    named = re.escape(f"checkpoints: {begun}/a/checkpoints/full-ba000000000012")
    assert re.match(
        named + r" \(0\.01\d* GiB\) cannot be written: No space left on device; [\d.e+]+ GiB are free\. ", text
    )
    assert f"The last whole checkpoint is {last}. Make room" in text
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


def test_a_signal_ends_the_run_at_the_next_batch_edge_with_a_checkpoint(words_of, whole, tmp_path, capsys, monkeypatch):
    words = words_of(tmp_path, "a", "max_duration=10ba")
    assert stopped_in_batch_five(monkeypatch, signal.SIGUSR1, *words) == 128 + signal.SIGUSR1
    gc.collect()  # the run's folder is free when its process ends: here, when its frames are gone
    path = list_checkpoints(tmp_path / "a" / "checkpoints", FULL)[0]
    output = f"SIGUSR1: stopped after batch 5; saved {path}. The same command resumes it.\n"
    assert capsys.readouterr().err.endswith(output)
    assert main(*words) == 0
    assert same_training(newest(tmp_path, "a"), newest(whole, "whole"))
    assert has_the_windows_of(whole / "whole", tmp_path / "a")  # batch 5 is the first of the window of 5 and 6
    # A start's first two batches are not measured, here 6 and 7, nor is 8, in the same window as 7.
    one, two = summary_of(tmp_path / "a"), summary_of(whole / "whole")
    assert (one["warmup_batches"], one["windows"], two["warmup_batches"], two["windows"]) == (5, 2, 2, 4)


def test_a_signal_ends_a_run_that_waits_for_its_first_batch(words_of, tmp_path, capsys, monkeypatch):
    """While a store is away no batch ends, and a signal was obeyed there alone."""
    read_batch = MomentsDataset.read_batch

    def slow(self, sample_ids):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
        return read_batch(self, sample_ids)

    monkeypatch.setattr(MomentsDataset, "read_batch", slow)
    handler = signal.getsignal(signal.SIGTERM)
    assert main(*words_of(tmp_path, "a")) == 128 + signal.SIGTERM
    assert "SIGTERM: stopped after batch 0; nothing has been trained. " in capsys.readouterr().err
    assert not list_checkpoints(tmp_path / "a" / "checkpoints", FULL)
    signal.signal(signal.SIGTERM, handler)
