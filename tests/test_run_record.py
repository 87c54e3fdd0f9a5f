"""callbacks/run_record.py: files left by a killed writer are read; other damage is reported with the file's name."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from conftest import tree
from omegaconf import OmegaConf

from callbacks.gradient_norm import GradientNorm
from callbacks.losses import Losses
from callbacks.run_record import RunRecord
from callbacks.throughput import MeasureConfig, Throughput
from common.errors import ConfigError, error_text
from common.files import write_atomic
from run_folder import files
from run_folder.files import ConfigFiles, keep_keys, lost_history, read_config, read_lines, read_summary
from run_folder.history import cost_so_far, read_history, write_outcome


def window(batch: int, **more) -> dict:
    """A line of metrics.jsonl."""
    clocks = {"train_sec": 1.0, "data_wait_sec": 0.5, "eval_sec": 0.0, "other_sec": 0.5}
    figures = {"loss": 0.5, "images_per_sec": 8.0, "peak_mem_gib": 1.0, "warmup": False, "window_batches": 1}
    return {"batch": batch, "images": 8 * batch, **figures, **clocks, "start": 1, **more}


def written(*lines: dict) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()


def start(number: int, **more) -> dict:
    """A line of starts.jsonl."""
    return {"start": number, "run_id": "abcdef12", "device": "CPU", "num_devices": 1, "batch": 0, **more}


EVALUATION = {"batch": 1, "images": 8, "evaluation": True, "seconds": 2.0, "eval_sec": 1.0, "start": 1}
LINES = [written(line) for line in (window(1), EVALUATION, window(2))]
OF_FILE = {
    "metrics.jsonl": LINES,
    "starts.jsonl": [written(start(n)) for n in (1, 2, 3)],
    "bad_samples.jsonl": [written({"sample": n, "key": "a", "reason": "b"}) for n in (1, 2, 3)],
}


def record_of(folder: Path) -> RunRecord:
    callbacks = dict(gradient_norm=GradientNorm(None), losses=Losses(folder / "checkpoints"), samples=None)
    throughput = Throughput(MeasureConfig(), flops_per_image=1.0, peak=None)
    return RunRecord(folder, ConfigFiles({"seed": 1}), {}, throughput=throughput, **callbacks)


@pytest.mark.parametrize("end", [b'{"batch": 3, "lo', b"\x00\x00\x00", b'{"a": "\xc3', b"123", b""])
def test_a_last_line_that_a_killed_writer_left_is_cut_off(tmp_path, end):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b"".join(LINES) + end)
    assert [line["batch"] for line in read_lines(path)] == [1, 1, 2]
    record_of(tmp_path).start(1)
    assert path.read_bytes() == b"".join(LINES[:2])
    assert (tmp_path / "metrics.cut.jsonl").read_bytes() == LINES[2]


@pytest.mark.parametrize(
    ("name", "key", "reader"),
    [
        ("metrics.jsonl", "batch", files.evaluations_of),
        ("starts.jsonl", "start", files.run_id_of),
        ("bad_samples.jsonl", "sample", lambda folder: read_lines(folder / "bad_samples.jsonl")),
    ],
)
def test_a_broken_line_before_others_is_refused_and_the_record_stays_as_it_is(tmp_path, name, key, reader):
    path = tmp_path / name
    (tmp_path / "summary.json").write_text("{}")
    for broken in (b'{"batch": 1, "eva\n', b"\n", b"\xff\n", b'{"other": 1}\n'):
        path.write_bytes(OF_FILE[name][0] + broken + OF_FILE[name][2])
        before = tree(tmp_path)
        quoted = f"'{broken.decode(errors='replace')[:-1]}' is no whole JSON object"
        reason = f"it has no {key}" if b"other" in broken else quoted
        advice = "Fix it, or remove that line: what it said is then lost, the others stay."
        for read in (lambda folder: record_of(folder).start(1), reader):
            with pytest.raises(ConfigError) as caught:
                read(tmp_path)
            assert str(caught.value) == f"{path}: line 2 cannot be read: {reason}. {advice}"
        assert tree(tmp_path) == before


def test_the_seconds_of_earlier_starts_are_those_of_their_end_or_of_their_last_line_cut_ones_included(tmp_path):
    """The first ended, the second was killed, the third left no word."""
    (tmp_path / "starts.jsonl").write_bytes(written(start(1, seconds=10.0), *(start(number) for number in (2, 3))))
    lines = [window(1, start_sec=9.0), window(2, start=2, start_sec=20.0)]
    (tmp_path / "metrics.jsonl").write_bytes(written(*lines))
    cut = [window(3, start=2, start_sec=31.0), {**EVALUATION, "start": 2, "start_sec": 45.0}]
    (tmp_path / "metrics.cut.jsonl").write_bytes(written(cut[0]) + b'{"batch": 9, "sta\n[]\n' + written(cut[1]))
    assert read_history(tmp_path).seconds == 10.0 + 45.0


def test_the_device_hours_of_a_run_are_each_starts_seconds_times_its_devices(tmp_path):
    """36 s on 8 devices, then 90 s on 2."""
    (tmp_path / "starts.jsonl").write_bytes(written(start(1, seconds=36.0, num_devices=8), start(2, num_devices=2)))
    (tmp_path / "metrics.jsonl").write_bytes(written(window(1), window(2, start=2, start_sec=90.0)))
    assert cost_so_far(tmp_path, None) == {"device_hours": 0.13}
    assert cost_so_far(tmp_path, 2.5, ["bad_samples.jsonl"]) == {"device_hours": 0.13, "cost": 0.325}
    for lost in ("starts.jsonl", "metrics.jsonl"):
        assert cost_so_far(tmp_path, 2.5, [lost]) == {"device_hours": None, "cost": None}


def test_a_record_that_lacks_what_it_had_at_its_checkpoint_is_known(tmp_path):
    def checkpoint(lines: int, starts: int) -> dict:
        saved = {"batch": 3, "losses": [], "lines": lines, "starts": starts}
        return {"progress": {"batch": 3}, "callbacks": {"RunRecord": saved}}

    (tmp_path / "starts.jsonl").write_bytes(written(start(1), start(2)))
    (tmp_path / "metrics.jsonl").write_bytes(b"".join(LINES) + written(window(3, unfinished=True), window(4)))
    assert lost_history(tmp_path, None) == lost_history(tmp_path, checkpoint(3, 2)) == {}
    lost = {"starts.jsonl": "has 2 of 3 starts", "metrics.jsonl": "has 3 of 4 lines"}
    assert lost_history(tmp_path, checkpoint(4, 3)) == lost
    (tmp_path / "starts.jsonl").write_bytes(written(start(2), start(3)))
    assert lost_history(tmp_path, None) == {"starts.jsonl": "has 2 of 3 starts"}


@pytest.mark.parametrize(
    ("content", "output"), [('{"target": "pen', "it is no whole JSON"), ("[1]", "it holds a list")]
)
def test_a_broken_summary_is_named_with_what_to_do(tmp_path, content, output):
    assert read_summary(tmp_path) == {}
    path = tmp_path / "summary.json"
    path.write_text(content)
    problem = f"^{path} cannot be read: {output}.* resumes from the run's newest checkpoint"
    for read in (read_summary, lambda folder: write_outcome(folder, {"target": "reached"})):
        with pytest.raises(ConfigError, match=problem):
            read(tmp_path)
    assert path.read_text() == content


@pytest.mark.parametrize("name", ["config.yaml", "overrides.yaml"])
@pytest.mark.parametrize("content", ["eval: {batch_size: 4\n", "- a\n", "eval: ${no}\n"])
def test_a_broken_config_of_a_run_is_named_with_what_to_do(tmp_path, name, content):
    assert read_config(tmp_path) == {}
    ConfigFiles({"seed": 17}, {"seed": 18}).write(tmp_path)
    path = tmp_path / name
    path.write_text(content)
    for read in (read_config, files.saved_batch_size, lambda folder: keep_keys(folder, {"eval.batch_size": 4})):
        with pytest.raises(ConfigError, match=rf"^{path}: [^\n]*Restore a copy, or remove it[^\n]*$"):
            read(tmp_path)
    assert path.read_text() == content


def test_config_yaml_is_written_once_and_later_values_go_to_overrides_yaml(tmp_path):
    def start(keys: dict, **resolved) -> dict:
        ConfigFiles.of(keys, {**keys, **resolved}).write(tmp_path)
        return read_config(tmp_path)

    first = {"seed": 17, "max_duration": "1ep", "micro": "auto", "eval.batch_size": None}
    assert start(first, micro=8) == {**first, "micro": 8}
    content, overrides = (tmp_path / "config.yaml").read_bytes(), tmp_path / "overrides.yaml"
    nested = {"seed": 17, "max_duration": "1ep", "micro": "auto", "eval": {"batch_size": None}}
    assert OmegaConf.load(tmp_path / "config.yaml") == OmegaConf.create(nested)
    keep_keys(tmp_path, {"eval.batch_size": 4})
    assert (
        read_config(tmp_path) == {**first, "micro": 8, "eval.batch_size": 4} and files.saved_batch_size(tmp_path) == 4
    )
    longer = {**first, "max_duration": "2ep", "new": 1}
    assert start(longer, micro=2) == {**longer, "micro": 2}
    assert overrides.read_text() == "max_duration: 2ep\nmicro: 2\nnew: 1\n"
    assert start({**first, "micro": 4}) == {**first, "micro": 4} and overrides.read_text() == "micro: 4\n"
    assert start(first) == first and not overrides.exists()
    assert (tmp_path / "config.yaml").read_bytes() == content


def test_a_full_disk_names_the_file_and_what_to_do(tmp_path, monkeypatch):
    """The system's error of a write has no name."""
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(OSError) as caught:
        write_atomic(tmp_path / "a.json", "{}")
    text = "cannot be written: No space left on device. Make room, and start the same command again."
    assert error_text(caught.value) == f"{tmp_path / 'a.json'} {text}"
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_writer_left_is_removed_at_a_start_and_nothing_else(tmp_path):
    ours, others = tmp_path / ".bad_samples.jsonl.77.tmp", [tmp_path / ".eval.jsonl.77.tmp", tmp_path / ".mine.tmp"]
    for path in (ours, *others):
        path.write_text("half")
    (tmp_path / ".config.tmp").mkdir()
    record_of(tmp_path).start(0)
    assert not ours.exists() and all(path.exists() for path in others) and (tmp_path / ".config.tmp").is_dir()


@pytest.mark.parametrize(
    ("num_batches", "said"),
    [
        (10, "2.88 minutes for the first step, 160 images/s, MFU 16.0%, 114.0 GiB, 40 seconds left"),
        (20, "7.11 images/s, MFU 0.7%, 114.0 GiB, 15 minutes left"),  # the window is not this process's first
    ],
)
def test_a_first_step_that_compiles_is_left_out_of_the_speed_and_the_time_left(num_batches, said):
    """Ten batches of 128 images: 0.8 s each, and the first in 172.8 s."""
    throughput = SimpleNamespace(first_step_seconds=172.8, num_batches=num_batches, mfu=lambda speed: speed / 1000)
    record = SimpleNamespace(throughput=throughput, loss=0.5)
    record._long_first_step_sec = lambda line: RunRecord._long_first_step_sec(record, line)
    speed = 1280 / 180.0
    line = {"batch": 10, "images": 1280, "images_per_sec": speed, "images_per_sec_wall": speed, "train_sec": 180.0}
    line |= {"window_batches": 10, "peak_mem_gib": 114.0}
    state = SimpleNamespace(get_elapsed_duration=lambda: SimpleNamespace(value=1 / 6))
    assert RunRecord._describe(record, line, state) == f"step 10 of 60, 1,280 images, loss 0.5, {said}"
