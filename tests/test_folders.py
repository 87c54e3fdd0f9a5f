"""prepare/sources.py: a folder of files in parts."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from conftest import picture, sample_files, tree
from test_prepare import rows, skipped

from prepare import shards, sources
from prepare.sources import cut_folder


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


def names_of(folder: Path) -> list[list[str]]:
    return [list(part.sizes) for part in cut_folder(folder)]


def test_a_folder_has_a_part_for_each_thousand_samples_whose_files_stay_together(tmp_path):
    tmp_path.joinpath("in").mkdir()
    for number in range(2_000):
        for suffix in ("txt", "json", "jpg"):
            (tmp_path / "in" / f"{number:04d}.{suffix}").write_bytes(b"")
    first, second = names_of(tmp_path / "in")
    assert len(first) == len(second) == 3_000
    assert first[-3:] == ["0999.jpg", "0999.json", "0999.txt"] and second[0] == "1000.jpg"


def test_any_number_of_workers_writes_the_same_parts(tmp_path, by_ten):
    source, outs = write_folder(tmp_path / "in", 25), [tmp_path / "one", tmp_path / "three"]
    for out, workers in zip(outs, (1, 3), strict=True):
        assert shards.main([str(source), str(out), f"workers={workers}"]) == 0
    assert len(list(outs[0].glob("part-*"))) == 3
    assert [row["key"] for row in rows(outs[0])] == [f"{number:04d}" for number in range(25)]
    one, three = map(tree, outs)
    assert {name: data for name, data in one.items() if not name.endswith("part.json")} == {
        name: data
        for name, data in three.items()
        if not name.endswith("part.json")  # which has measured times
    }


def test_a_stopped_command_resumes_within_a_folder(tmp_path, by_ten, monkeypatch, capsys):
    source, out, made = write_folder(tmp_path / "in", 25), tmp_path / "out", shards.make_one

    def one_alone(place, work, sources, number):
        if number:
            raise KeyboardInterrupt
        return made(place, work, sources, number)

    with monkeypatch.context() as patch:
        patch.setattr(shards, "make_one", one_alone)
        with pytest.raises(KeyboardInterrupt):
            shards.write_stage(
                cut_folder(source), shards.open_place(str(out)), shards.ShardsConfig(workers=1), tmp_path
            )
    assert shards.main([str(source), str(out), "workers=1"]) == 0
    assert "1 of 3 parts are done already, the work continues" in capsys.readouterr().out
    assert len(rows(out)) == 25


def test_links_that_lead_nowhere_and_pipes_cost_their_own_sample_alone(tmp_path):
    source, out = tmp_path / "in", tmp_path / "out"
    source.mkdir()
    for name in ("good", "loop", "gone", "pipe"):
        (source / f"{name}.txt").write_text("a caption")
    (source / "good.png").write_bytes(picture(1))
    (source / "loop.png").symlink_to("loop.png")
    (source / "gone.png").symlink_to("nowhere")
    os.mkfifo(source / "pipe.png")
    assert shards.main([str(source), str(out)]) == 0
    assert [row["key"] for row in rows(out)] == ["good"]
    reasons = {(name, reason) for _, name, reason in skipped(out / "skipped.jsonl")}
    assert {(f"{name}.png", "is no plain file") for name in ("loop", "gone", "pipe")} <= reasons


def test_a_caption_that_claims_gigabytes_is_not_read_and_a_pipe_is_no_table(tmp_path, capsys):
    source, out = write_folder(tmp_path / "in", 2), tmp_path / "out"
    with open(source / "0000.txt", "r+b") as file:
        file.truncate(2**35)
    assert shards.main([str(source), str(out)]) == 0
    assert [row["key"] for row in rows(out)] == ["0001"]
    assert ("0000.txt", "has more than 256 MiB") in [line[1:] for line in skipped(out / "skipped.jsonl")]
    tmp_path.joinpath("tables").mkdir()
    for name in ("a.csv", "state.json"):
        os.mkfifo(tmp_path / "tables" / name)
    assert shards.main([str(tmp_path / "tables"), str(tmp_path / "none")]) == 2
    assert "holds neither tars nor images nor tables" in capsys.readouterr().err


def test_files_of_no_sample_make_no_part_and_a_large_sample_ends_one(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "SAMPLES_PER_PART", 2)
    monkeypatch.setattr(sources, "BYTES_PER_PART", 100)
    sizes = {
        "a.html": 1,
        "b.jpg": 1,
        "c.html": 1,
        "d.jpg": 1,
        "e.txt": 1,
        "f.html": 1,
        "g.mp4": 100,
        "h.jpg": 1,
        "i.log": 1,
    }
    for name, size in sizes.items():
        (tmp_path / name).write_bytes(bytes(size))
    assert names_of(tmp_path) == [
        ["a.html", "b.jpg", "c.html", "d.jpg", "e.txt", "f.html"],
        ["g.mp4"],
        ["h.jpg", "i.log"],
    ]


@pytest.mark.parametrize("is_finished", [False, True])
def test_a_folder_whose_files_changed_is_another_input(tmp_path, by_ten, capsys, is_finished):
    source, out = write_folder(tmp_path / "pictures", 25), tmp_path / "out"
    words = [str(source), str(out), "workers=1"]
    assert shards.main(words) == 0
    if not is_finished:
        (out / "dataset.json").unlink()
    (source / "0003.txt").write_bytes(b"another caption than before")
    (source / "0030\n.txt").write_bytes(b"")
    before = tree(out)
    capsys.readouterr()
    assert shards.main(words) == 2 and tree(out) == before
    state = "finished" if is_finished else "unfinished"
    assert f"OUT: {out} holds the {state} work of another command: files in " in capsys.readouterr().err
