"""prepare/sources.py: a folder of files in parts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from conftest import sample_files, tree
from test_shards import rows, skipped

from prepare import shards, sources
from prepare.sources import split_folder


def write_folder(folder: Path, num: int) -> Path:
    """Write samples of three files each."""
    folder.mkdir(parents=True)
    for number in range(num):
        for suffix, content in sample_files(number, (24, 16)).items():
            (folder / f"{number:04d}.{suffix}").write_bytes(content)
    return folder


@pytest.fixture
def by_ten(monkeypatch):
    monkeypatch.setattr(sources, "SAMPLES_PER_PART", 10)


def test_a_folder_is_cut_into_parts_that_any_number_of_workers_writes_alike(tmp_path, by_ten, capsys):
    source, one, two = write_folder(tmp_path / "in", 25), tmp_path / "one", tmp_path / "two"
    assert shards.main([str(source), str(one), "workers=1"]) == shards.main([str(source), str(two), "workers=3"]) == 0
    shutil.rmtree(one / "part-00001")
    (one / "dataset.json").unlink()  # as if stopped
    assert shards.main([str(source), str(one), "workers=1"]) == 0
    assert "2 of 3 parts are done already, the work continues" in capsys.readouterr().out
    assert [row["key"] for row in rows(one)] == [f"{number:04d}" for number in range(25)]
    trees = [{name: data for name, data in tree(out).items() if not name.endswith("part.json")} for out in (one, two)]
    assert trees[0] == trees[1]  # part.json has measured times


def test_a_part_ends_after_so_many_samples_or_bytes_and_files_of_no_sample_make_none(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SAMPLES_PER_PART", 2)
    monkeypatch.setattr(sources, "BYTES_PER_PART", 100)
    names = ["a.html", "b.jpg", "b.json", "b.txt", "c.html", "d.jpg", "e.txt", "f.html", "g.mp4", "h.jpg", "i.log"]
    for name in names:
        (tmp_path / name).write_bytes(bytes(100 if name == "g.mp4" else 1))
    assert [list(part.sizes) for part in split_folder(tmp_path)] == [names[:8], ["g.mp4"], ["h.jpg", "i.log"]]


def test_photos_without_captions_get_the_one_of_all(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(3):
        (tmp_path / "in" / f"{number}.jpg").write_bytes(sample_files(number, (24, 16))["jpg"])
    words, text = [str(tmp_path / "in"), str(tmp_path / "out")], "a photo of sks dog, json:sitting"
    assert shards.main([*words, f"caption_text= {text} "]) == 0
    assert [row["caption"] for row in rows(tmp_path / "out")] == [text] * 3
    assert shards.main([*words, "caption_text=another"]) == 2  # the folder has a dataset with other captions


def test_links_pipes_and_huge_captions_cost_their_own_sample_alone(tmp_path):
    source, out = write_folder(tmp_path / "in", 2), tmp_path / "out"
    for name in ("loop", "gone", "pipe"):
        (source / f"{name}.txt").write_text("a caption")
    (source / "loop.png").symlink_to("loop.png")
    (source / "gone.png").symlink_to("nowhere")
    os.mkfifo(source / "pipe.png")
    with open(source / "0000.txt", "r+b") as file:
        file.truncate(2**35)
    assert shards.main([str(source), str(out)]) == 0
    assert [row["key"] for row in rows(out)] == ["0001"]
    reasons = {(name, reason) for _, name, reason in skipped(out / "skipped.jsonl")}
    assert {(f"{name}.png", "is no plain file") for name in ("loop", "gone", "pipe")} <= reasons
    assert ("0000.txt", "has more than 256 MiB") in reasons
