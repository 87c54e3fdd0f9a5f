"""A run's folder with a damaged file: each reader says what is wrong and what to do (exit code 2), or continues."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlperf_fixture import curves, write_run

import benchmark
import eval as eval_command
from evaluation import scores
from evaluation.table import NEEDED, read_rows, write_rows
from reports.mlperf import read_run
from run_folder.files import evaluations_of, lost_history, read_config, read_lines, read_summary, run_id_of
from run_folder.mlperf_log import is_begun, lost_events

pytestmark = pytest.mark.timeout(200, func_only=True)

CONTENTS: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "emptied": lambda content, draw: b"",
    "cut": lambda content, draw: content[: draw.randrange(1, len(content))],
    "cut at a line": lambda content, draw: b"".join(content.splitlines(keepends=True)[: draw.randrange(1, 3)]),
    "flipped": lambda content, draw: flipped(content, draw),
    "garbage": lambda content, draw: draw.randbytes(300),
    "a list": lambda content, draw: b"[1]\n",
    "nested": lambda content, draw: b"[" * 50_000 + b"\n",
    "of nothing": lambda content, draw: b"{}\n",
}
"""Kind of damage -> content, source of random numbers -> content. Besides: a folder."""


def flipped(content: bytes, draw: random.Random) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


def damage(folder: Path, what: str, how: str, seed: int) -> None:
    path, draw = folder / what, random.Random(f"{what} {how} {seed}")
    content = path.read_bytes()
    path.unlink()
    if how == "a folder":
        path.mkdir()
    else:
        path.write_bytes(CONTENTS[how](content, draw))


@pytest.fixture(scope="module")
def short(miniature, tmp_path_factory) -> Path:
    """Four batches of 8: checkpoints and snapshots after the second and the last."""
    folder = tmp_path_factory.mktemp("short")
    assert benchmark.main(short_words(miniature, folder, "max_duration=4ba")) == 0
    return folder / "run"


def short_words(miniature, folder: Path, *more: str) -> list[str]:
    return miniature.small(folder, "run", "save.every_images=16", "save.snapshot_every_images=16", *more)


REMOVE = "Remove it: benchmark.py then resumes from the run's newest checkpoint, and writes it again."
FIX = "Fix it, or remove that line: what it said is then lost, the others stay."
REFUSALS = {
    ("summary.json", "emptied"): f"{{}} cannot be read: it is no whole JSON. {REMOVE}",
    ("metrics.jsonl", "a list"): f"{{}}: line 1 cannot be read: '[1]' is no whole JSON object. {FIX}",
    ("metrics.jsonl", "of nothing"): f"{{}}: line 1 cannot be read: it has no batch. {FIX}",
    ("metrics.jsonl", "nested"): f"{{}}: line 1 cannot be read: '{40 * '['}' is no whole JSON object. {FIX}",
    ("starts.jsonl", "a folder"): "{} cannot be read: Is a directory. It belongs to the run: restore it.",
    ("config.yaml", "a list"): "{}: holds a list. A run is a mapping of keys to values. Restore a copy",
}


@pytest.mark.slow
@pytest.mark.parametrize(("what", "how"), REFUSALS)
def test_a_damaged_file_is_named_by_a_start_and_by_eval_before_anything_is_built(
    miniature, short, tmp_path, capsys, monkeypatch, what, how
):
    monkeypatch.setattr(benchmark, "build_networks", lambda *args: pytest.fail("it was built"))
    folder = shutil.copytree(short, tmp_path / "run")
    damage(folder, what, how, 0)
    assert benchmark.main(short_words(miniature, tmp_path, "max_duration=6ba")) == 2
    assert capsys.readouterr().err.startswith(REFUSALS[what, how].format(folder / what))
    if what in ("summary.json", "starts.jsonl"):
        monkeypatch.setattr(scores, "_build", lambda *args: pytest.fail("it was built"))
        assert eval_command.main([str(folder)]) == 2
        assert capsys.readouterr().err.startswith(REFUSALS[what, how].format(folder / what))


@pytest.fixture(scope="module")
def records(short, tmp_path_factory) -> Path:
    """A folder with a record that has all files, the log of a fixture among them."""
    folder = tmp_path_factory.mktemp("records")
    write_run(folder / "fixture", curves(512)[0][:4], seed=1)
    for path in short.glob("*.*"):
        shutil.copy(path, folder) if path.is_file() else None
    shutil.copy(folder / "fixture/mlperf.log", folder)
    row = {**dict.fromkeys(NEEDED, 1.0), "model": "a", "snapshot": "b", "weights": "ema", "partial": False}
    write_rows(folder / "eval.jsonl", [row, {**row, "images": 2}])
    (folder / "bad_samples.jsonl").write_text('{"sample": 3, "key": "a", "reason": "b"}\n' * 2)
    shutil.copy(folder / "metrics.jsonl", folder / "metrics.cut.jsonl")
    return folder


READERS: dict[str, list[Callable[[Path], object]]] = {
    "config.yaml": [read_config, read_run],
    "environment.json": [read_run],
    "starts.jsonl": [run_id_of, lambda folder: lost_history(folder, None)],
    "metrics.jsonl": [evaluations_of, read_run],
    "metrics.cut.jsonl": [read_run],
    "bad_samples.jsonl": [lambda folder: read_lines(folder / "bad_samples.jsonl")],
    "summary.json": [lambda folder: read_summary(folder, "batches"), read_run],
    "mlperf.log": [is_begun, lambda folder: lost_events(folder, None), read_run],
    "eval.jsonl": [lambda folder: read_rows(folder / "eval.jsonl")],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", READERS)
def test_readers_of_the_record_read_or_name_the_file(records, tmp_path, what):
    """Ten damages of each kind that has a position, two of the others."""
    content, num_named = (records / what).read_bytes(), 0
    folder = shutil.copytree(records, tmp_path / "run")
    for how in CONTENTS.keys() - ({"nested"} if what == "config.yaml" else set()):  # libyaml has no limit
        for seed in range(10 if how in ("cut", "flipped") and what != "config.yaml" else 2):
            (folder / what).write_bytes(content)
            damage(folder, what, how, seed)
            for read_it in READERS[what]:
                try:
                    read_it(folder)
                except ValueError as error:
                    assert str(error).startswith(f"{folder / what}"), (how, seed)
                    num_named += 1
    assert num_named > 0 or what == "metrics.cut.jsonl"
