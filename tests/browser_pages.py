"""Run folders for the tests of pages: the committed record of a demo, another one, and one that is broken."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

from conftest import ROOT

RECORD = ROOT / "reports/results/shapes_run"
NASTY = "a<b>&'q\" \U0001f600"
HTML = "<img src=x onerror=\"document.title='hit'\"><script>document.title='hit'</script>"


def find_browser() -> str | None:
    """Return the program of a Chromium, or None where there is none."""
    names = (os.environ.get("CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def words_for_browser() -> list[str]:
    """Return the words without which it does not start in a container: root has no sandbox, /dev/shm may be small."""
    return ["--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


def copy_run(runs: Path, name: str = "shapes_run", *, num_grids: int = 4) -> Path:
    """The record of a demo's run under another name, with its first grids."""
    folder = shutil.copytree(RECORD, runs / name, copy_function=shutil.copy)
    for grid in sorted((folder / "samples").glob("*.png"))[num_grids:]:
        grid.unlink()
    return folder


def other_run(runs: Path) -> Path:
    """One of another seed and learning rate, with a price, whose name is HTML."""
    folder = copy_run(runs, NASTY, num_grids=3)
    config = (folder / "config.yaml").read_text()
    assert "seed: 17" in config and "lr: 0.0015" in config
    (folder / "config.yaml").write_text(config.replace("seed: 17", "seed: 18").replace("lr: 0.0015", "lr: 0.001"))
    (folder / "overrides.yaml").write_text((folder / "overrides.yaml").read_text() + "cost:\n  per_device_hour: 10\n")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    worse = [{**line, "fid": line["fid"] + 14.3941} if line.get("evaluation") else line for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in worse))
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "fid": worse[-1]["fid"], "target": "missed"}))
    return folder


def broken_run(runs: Path) -> Path:
    """Killed in the middle of a line, after an error; captions with HTML, an escape sequence and 10,000 letters."""
    folder = copy_run(runs, "broken", num_grids=2)
    for name in ("summary.json", "environment.json", "config.yaml", "overrides.yaml"):
        (folder / name).unlink()
    lines = (folder / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_bytes(b"".join([*lines[:60], b"\xff{}\n", lines[60][:50]]))
    captions = (folder / "samples/captions.txt").read_text().splitlines()
    captions[:3] = [HTML, "\x1b[31mred\x1b[0m", "long " * 2000]
    (folder / "samples/captions.txt").write_text("\n".join(captions) + "\n")
    start = json.loads((folder / "starts.jsonl").read_text())
    (folder / "starts.jsonl").write_text(json.dumps({**start, "failed": f"loss: nan {HTML}"}) + "\n")
    return folder
