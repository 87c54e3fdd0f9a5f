"""The table of faults: its comparison sees what it should, its page is that of the record, and a few rows for each commit."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
import torch
from conftest import ROOT

from checkpointing.files import FULL, WEIGHTS, file_stem, write_checkpoint
from tests.faults import compare
from tests.faults.__main__ import counts_of, draw, format_counts, run_row, table
from tests.faults.rows import ROWS
from tests.faults.runs import Setting

PAGE = (ROOT / "docs/faults.md").read_text()
NUM_DRAWN = 1


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads((ROOT / "reports/results/faults.json").read_text())


# --- the comparison ---


def content(**more) -> dict:
    tensors = {"a": torch.arange(4.0), "b": torch.tensor([True, False])}
    return {"schema": 1, "model": tensors, "ema": None, **more}


def event(key: str, images: int | None, value=None, time_ms: int = 0, **metadata) -> str:
    where = {} if images is None else {"samples_count": images}
    line = {"key": key, "value": value, "metadata": {**where, **metadata}, "time_ms": time_ms, "namespace": ""}
    return f":::MLLOG {json.dumps({**line, 'event_type': 'POINT_IN_TIME'})}\n"


def log(*restarts: str) -> list[str]:
    """The log of a run of 8 batches of 32 with an evaluation each 4, interrupted by these lines after its first block."""
    first = [event("init_start", None), event("init_stop", None), event("run_start", 0), event("block_start", 0)]
    block = [event("loss", 128, 0.9), event("block_stop", 128), event("eval_start", 128, 128)]
    block += [event("eval_accuracy", 128, 1129.4, metric="FID"), event("eval_stop", 128, 128)]
    last = [event("block_start", 128), event("loss", 256, 0.8), event("block_stop", 256), event("eval_start", 256, 256)]
    last += [event("eval_accuracy", 256, 679.1, metric="FID"), event("eval_stop", 256, 256)]
    return [*first, *block, *restarts, *last, event("run_stop", 256, status="success")]


@pytest.fixture
def whole(tmp_path):
    """The folder of a finished run, as far as it is compared."""
    run = tmp_path / "whole"
    write_checkpoint(run / "checkpoints", file_stem(FULL, 8), content(optimizer={"lr": 1.0}))
    write_checkpoint(run / "checkpoints", file_stem(WEIGHTS, 128), content())
    windows = [dict.fromkeys(compare.WINDOW, 32.0 * n) | {"batch": n} for n in range(1, 9)]
    score = dict.fromkeys(compare.SCORE, 1.0) | {"evaluation": True, "batch": 4, "seconds": 2.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*windows, score]))
    (run / "mlperf.log").write_text("".join(log()))
    (run / "summary.json").write_text("{}")
    return run


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "copied")


def test_a_run_is_as_itself_and_one_that_was_restarted_in_a_block_too(whole, copied):
    assert compare.problems(copied, whole) == [] and compare.bits_lost(copied, whole) == 0
    resumed = [event("block_start", 128), event("restart", 64, 1), event("block_start", 64), event("block_stop", 128)]
    (copied / "mlperf.log").write_text("".join(log(*resumed)))
    assert compare.problems(copied, whole) == []


def test_every_lost_bit_counts(whole, copied):
    changed = content(optimizer={"lr": 2.0})
    changed["model"]["a"] = torch.tensor([0.0, -1.0, 2.0, 3.0])  # one bit: the sign
    write_checkpoint(copied / "checkpoints", file_stem(FULL, 8), changed)
    assert compare.bits_lost(copied, whole) == 1 + 64
    for path in (copied / "checkpoints").glob("weights*"):
        path.unlink()
    assert compare.bits_lost(copied, whole) == 1 + 64 + 8 * (4 * 4 + 2)


def test_a_record_with_a_fault_is_seen(whole, copied):
    """A step twice, one missing, another score, another rate, a clock set back."""
    path = copied / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    first, last = lines[0], lines[-1]
    for changed, said in (
        ([*lines[:3], *lines[2:]], "metrics.jsonl: windows at batches [1, 2, 3, 3, 4, 5, 6, 7, 8], not "),
        ([*lines[:3], *lines[4:]], "metrics.jsonl: windows at batches [1, 2, 3, 5, 6, 7, 8], not "),
        ([*lines[:-1], last.replace('"fid": 1.0', '"fid": 1.5')], "batch 4 has another fid"),
        ([first.replace('"lr": 32.0', '"lr": 3'), *lines[1:]], "window at batch 1 has another lr"),
        ([*lines[:-1], last.replace("2.5", "-0.5")], "the clock of training goes back: [-0.5]"),
    ):
        path.write_text("".join(changed))
        [found] = compare.problems(copied, whole)
        assert said in found


def test_an_mlperf_log_with_a_fault_is_seen(whole, copied):
    for lines, said in (
        ([*log(), event("run_stop", 256, status="success")], "mlperf.log: 2 run_stop"),
        (log(event("restart", 192, 1)), "a restart at 192 images, but blocks up to 128"),
        (log(event("restart", 64, 1)), "a block begins at 128 images, the last one ended at 64"),
        ([line.replace("679.1", "679.2") for line in log()], "otherwise than the unbroken run's"),
        ([line.replace("success", "aborted") for line in log()], "otherwise than the unbroken run's"),
        (log(event("eval_stop", 128, 128)), "mlperf.log: evaluations at [128, 128, 256]"),
        ([*log()[:-1], event("run_stop", 256, status="success", time_ms=-1)], "mlperf.log: its times go back"),
    ):
        (copied / "mlperf.log").write_text("".join(lines))
        assert any(said in found for found in compare.problems(copied, whole))


# --- the table ---


def test_each_moment_is_a_function_that_still_exists(monkeypatch, tmp_path):
    monkeypatch.setenv("FAULTS_FOLDER", str(tmp_path))
    from tests.faults import trainer

    found = []
    monkeypatch.setattr(trainer, "halting", lambda owner, name, **_: found.append(getattr(owner, name)))
    for moment in trainer.MOMENTS.values():
        moment()
    assert len(found) == len(trainer.MOMENTS)


def test_the_csv_file_and_the_counts_of_the_pages_are_those_of_the_committed_record(record):
    assert (ROOT / "reports/results/faults.csv").read_text() == table(record)
    assert format_counts(record["counts"]) in " ".join(PAGE.split())
    counts, readme = record["counts"], (ROOT / "README.md").read_text()
    assert f"{counts['injected']} injected faults" in readme and counts["bits_lost"] == 0
    assert record["counts"] == counts_of(record["rows"])
    assert all(row["commit"] and "+" not in row["commit"] for row in record["rows"].values())
    assert record["rows"].keys() >= ROWS.keys() and record["skipped"] == {}  # some rows are of an earlier commit alone
    assert all(row["good"] for row in record["rows"].values()) and record["counts"]["bits_lost"] == 0


@pytest.mark.slow
@pytest.mark.timeout(600, func_only=True)
def test_a_row_that_this_commit_draws_is_good(miniature, tmp_path, record, capsys):
    """The rest: make test-faults."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    commit = done.stdout.strip() or "no commit"
    names = draw(commit, record["rows"], NUM_DRAWN)
    with capsys.disabled():
        print(f"\nfaults drawn by {commit[:12]}: {', '.join(names)}. Again: make test-faults ONLY={','.join(names)}")
    setting = Setting(tmp_path, miniature, slack=4.0)
    found = {name: run_row(name, setting) for name in names}
    assert all(row["good"] for row in found.values()), json.dumps(found, indent=1)
