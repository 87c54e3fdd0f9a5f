"""`make report`: all that README.md and docs/ show is written from files of the repository, and is what is committed."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT
from PIL import Image, ImageChops

from evaluation import plots

PICTURE = re.compile(r"!\[[^]]*\]\(([^)\s]+)\)")
BY_HAND = {"docs/pictures/page.png"}
"""Pictures that no line of the recipe writes: a page in a browser."""
TABLES = [Path("reports/results", name) for name in ("latency_cpu.csv", "scaling_rows.csv")]


def recipe() -> list[tuple[str, list[str]]]:
    """Return (module, words) of each line of the target `report`."""
    text = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    lines = re.search(r"^report:.*\n((?:\t.*\n)+)", text, re.M)[1].splitlines()
    commands = [shlex.split(line.strip(), comments=True) for line in lines if "mkdir" not in line]
    assert all(words[:2] == ["$(PY)", "-m"] for words in commands)
    return [(words[2], words[3:]) for words in commands]


def shown() -> set[str]:
    """Return the pictures that the pages show, as paths from the root."""
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    places = [(page.parent / link).resolve() for page in pages for link in PICTURE.findall(page.read_text())]
    return {place.relative_to(ROOT).as_posix() for place in places}


def same_pixels(one: Path, other: Path) -> bool:
    with Image.open(one) as a, Image.open(other) as b:
        return a.size == b.size and ImageChops.difference(a.convert("RGB"), b.convert("RGB")).getbbox() is None


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    """A copy of the pages and records without the pictures and CSV files, after the recipe."""
    copy = tmp_path_factory.mktemp("report")
    for folder in ("docs", "reports", "yamls"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(ROOT / "README.md", copy)
    for name in (*shown(), *TABLES):
        (copy / name).unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(copy)
        Path("cache").mkdir()
        for module, words in recipe():
            expanded = [str(name) for word in words for name in (sorted(Path().glob(word)) if "*" in word else [word])]
            assert importlib.import_module(module).main(expanded) == 0
    return copy


def test_every_picture_that_a_page_shows_is_written_and_is_the_committed_one(written):
    assert len(shown()) >= 4
    for picture in shown() - BY_HAND:
        assert (written / picture).is_file(), f"{picture}: no line of `make report` writes it"
        assert same_pixels(written / picture, ROOT / picture), f"{picture}: run make report"


def test_the_pages_and_tables_are_those_that_are_committed(written):
    for name in (*(path.relative_to(written) for path in (written / "docs").glob("*.md")), *TABLES):
        assert (written / name).read_text() == (ROOT / name).read_text(), "run make report"


# --- evaluation.plots as a command ---


@pytest.mark.parametrize(
    ("name", "content", "text"),
    [
        ("OUT.png", "", "command line: OUT.png. Possible: SCORES.jsonl or RECORD.json, one OUT.png, "),
        ("a.json", '{"rung": "x"}', "a.json: cannot be drawn (KeyError: 'evaluations'). "),
        ("d.json", "[]", "d.json: cannot be drawn (TypeError: "),
        ("c.jsonl", "", "c.jsonl: cannot be drawn (ValueError: it has no scores). "),
    ],
)
def test_a_file_without_scores_is_refused(name, content, text, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    if content:
        Path(name).write_text(content)
    assert plots.main([name, "OUT.png"][name == "OUT.png" :]) == 2
    assert capsys.readouterr().err.startswith(text) and not Path("OUT.png").exists()
