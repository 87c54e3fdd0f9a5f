"""prepare/: img2dataset's layout -> stage `images`, and the rendered pictures."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path

import pytest
from conftest import picture, sample_files, write_tar
from PIL import Image
from streaming import StreamingDataset

from prepare import shapes, shards


def rows(stage: Path) -> list[dict]:
    dataset = StreamingDataset(local=str(stage), batch_size=1)
    return [dataset[i] for i in range(len(dataset))]


def skipped(path: Path) -> list[tuple]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["source"], line["key"], line["reason"]) for line in lines]


def test_bytes_captions_sizes_and_metadata_arrive_unchanged(stage):
    found = rows(stage)
    assert [row["key"] for row in found] == [f"{n:09d}" for n in range(48)]
    for number, row in enumerate(found):
        files = sample_files(number, [(80, 96), (128, 64), (64, 64), (200, 150)][number % 4])
        assert row["jpg"] == files["jpg"] and row["caption"] == f"picture number {number}"
        assert (row["width"], row["height"]) == [(80, 96), (128, 64), (64, 64), (200, 150)][number % 4]
        assert row["metadata"] == json.loads(files["json"])


def test_the_stage_says_what_made_it_and_has_hashes(stage, tars):
    facts = json.loads((stage / "dataset.json").read_text())
    index = json.loads((stage / "index.json").read_text())
    assert facts["stage"] == "images" and facts["samples"] == 48 and facts["made_by"] == "prepare.shards"
    assert facts["counts"] == {"read": 48, "written": 48, "skipped": {}, "bad_sources": {}, "ignored_files": 0}
    assert facts["sources"] == [{"name": t.name, "bytes": t.stat().st_size} for t in sorted(tars.glob("*.tar"))]
    assert len(index["shards"]) > 1 and all(set(shard["raw_data"]["hashes"]) == {"xxh64"} for shard in index["shards"])


def test_tar_folder_of_tars_and_folder_of_files_give_the_same_samples(tars, tmp_path):
    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(24):
        for suffix, content in sample_files(number, [(80, 96), (128, 64), (64, 64), (200, 150)][number % 4]).items():
            (folder / f"{number:09d}.{suffix}").write_bytes(content)
    assert shards.main([str(folder), str(tmp_path / "a")]) == 0
    assert shards.main([str(tars / "00000.tar"), str(tmp_path / "b")]) == 0
    assert rows(tmp_path / "a") == rows(tmp_path / "b")


def test_the_same_command_gives_the_same_bytes(tars, tmp_path):
    for name in ("a", "b"):
        assert shards.main([str(tars), str(tmp_path / name)]) == 0
    for path in (tmp_path / "a").iterdir():
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_what_cannot_be_used_is_counted_and_named_and_the_rest_is_written(tmp_path, capsys):
    good = sample_files(1)
    tar = write_tar(
        tmp_path / "in" / "00000.tar",
        {
            "good": good,
            "png": {"png": picture(2, kind="PNG"), "txt": b"a png"},
            "webp": {"webp": picture(3, kind="WEBP"), "txt": b"a webp", "json": b"{}"},
            "truncated": {**good, "jpg": picture(0, (200, 200))[:1500]},
            "zero": {**good, "jpg": b""},
            "html": {**good, "jpg": b"<html></html>"},
            "no_caption": {"jpg": good["jpg"]},
            "empty_caption": {**good, "txt": b" \n"},
            "latin": {**good, "txt": "Käse".encode("latin-1")},
            "no_image": {"txt": b"only words"},
            "bad_json": {**good, "json": b"{"},
            "sub.dir/other": {"txt": b"x"},
        },
    )
    (tmp_path / "in" / "00001.tar").write_bytes(b"")
    (tmp_path / "in" / "00002.tar").write_bytes(tar.read_bytes()[: tar.stat().st_size // 2])
    write_tar(tmp_path / "in" / "00003.tar", {})
    assert shards.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 0
    assert [row["key"] for row in rows(tmp_path / "out")][:3] == ["good", "png", "webp"]
    named = skipped(tmp_path / "out" / "skipped.jsonl")
    assert [entry for entry in named if entry[0] == "00000.tar"] == [
        ("00000.tar", "truncated", "truncated or damaged image"),
        ("00000.tar", "zero", "image of zero bytes"),
        ("00000.tar", "html", "not an image"),
        ("00000.tar", "no_caption", "missing caption"),
        ("00000.tar", "empty_caption", "empty caption"),
        ("00000.tar", "latin", "caption is not UTF-8"),
        ("00000.tar", "no_image", "missing image"),
        ("00000.tar", "bad_json", "metadata is not JSON"),
        ("00000.tar", "sub.dir/other", "missing image"),
    ]
    assert ("00001.tar", None, "cannot be read to its end") in named
    assert ("00002.tar", None, "cannot be read to its end") in named
    assert ("00003.tar", None, "has no sample") in named
    counts = json.loads((tmp_path / "out" / "dataset.json").read_text())["counts"]
    assert counts["read"] == counts["written"] + sum(counts["skipped"].values())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(f"read {counts['read']} samples, wrote {counts['written']}, skipped ")
    assert "sources with a fault: 3 (cannot be read to its end: 2, has no sample: 1)" in last


def test_a_key_that_comes_twice_in_a_source_is_written_once(tmp_path):
    one = write_tar(tmp_path / "one.tar", {"a": sample_files(1), "b": sample_files(2)})
    two = write_tar(tmp_path / "two.tar", {"a": sample_files(3)})
    with tarfile.open(one, "a") as tar, tarfile.open(two) as more:
        for member in more:
            tar.addfile(member, more.extractfile(member))
    assert shards.main([str(one), str(tmp_path / "out")]) == 0
    assert [row["caption"] for row in rows(tmp_path / "out")] == ["picture number 1", "picture number 2"]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [("one.tar", "a", "duplicate key")]


def test_nothing_is_lost_without_a_word(tmp_path, capsys):
    """Repeated parts, two pictures of a key, keys with dots, links, names that are no text, folders in folders."""
    folder = tmp_path / "in"
    one, two = sample_files(1), sample_files(2)
    write_tar(folder / "0.tar", {"a": one})
    with tarfile.open(folder / "0.tar", "a") as tar:
        for name, content in {
            "a.jpg": two["jpg"],
            "a.txt": two["txt"],
            "b.jpg": one["jpg"],
            "b.png": picture(3, kind="PNG"),
            "b.txt": b"b",
            "c.v2.jpg": one["jpg"],
            "d\udcff.jpg": one["jpg"],
            "d\udcff.txt": b"d",
            "e.jpg": one["jpg"],
            "e.txt": b"e",
            "e.json": b"[" * 200_000,
        }.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("f.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        tar.addfile(link)
    (folder / "1.tar").symlink_to("nowhere")
    os.mkfifo(folder / "2.tar")
    (folder / "00000").mkdir()
    for suffix, content in sample_files(4).items():
        (folder / "00000" / f"deep.{suffix}").write_bytes(content)
    (folder / "00000" / "stats.parquet").touch()

    assert shards.main([str(folder), str(tmp_path / "out")]) == 0
    assert [(row["key"], row["caption"]) for row in rows(tmp_path / "out")] == [
        ("a", "picture number 1"),
        ("b", "b"),
        ("deep", "picture number 4"),
    ]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        ("0.tar", "a", "duplicate key"),
        ("0.tar", "b", "missing caption"),
        ("0.tar", "d\udcff", "key is not UTF-8"),
        ("0.tar", "e", "metadata is not JSON"),
        ("1.tar", None, "cannot be read to its end"),
        ("2.tar", None, "cannot be read to its end"),
    ]
    assert capsys.readouterr().out.splitlines()[-1] == (
        "read 7 samples, wrote 3, skipped 4 (duplicate key: 1, key is not UTF-8: 1, metadata is not JSON: 1, missing "
        "caption: 1); sources with a fault: 2 (cannot be read to its end: 2); files of no sample: 3, e.g. c.v2.jpg; in "
        f"{tmp_path}/out"
    )


def test_nothing_is_left_but_the_reasons_when_no_sample_can_be_used(tmp_path, capsys):
    tar = write_tar(tmp_path / "in.tar", {"a": {"jpg": b"", "txt": b"x"}})
    assert shards.main([str(tar), str(tmp_path / "out")]) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.tar", "out.skipped.jsonl"]
    assert capsys.readouterr().out == (
        f"read 1 samples, wrote 0, skipped 1 (image of zero bytes: 1); nothing written; why is in "
        f"{tmp_path}/out.skipped.jsonl\n"
    )


def test_what_a_stopped_run_left_is_no_stage_and_does_not_hinder_the_next(tars, tmp_path, monkeypatch):
    from stream import read_stage

    def stop(sample):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(shards, "to_row", stop)
        shards.main([str(tars), str(tmp_path / "out")])
    with pytest.raises(ValueError, match="no folder"):
        read_stage(str(tmp_path / "out"))
    assert shards.main([str(tars), str(tmp_path / "out")]) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/in"], "command line: SOURCE... and OUT have to be given. python -m prepare.shards --help says more."),
        (
            ["{tmp}/none", "{tmp}/out"],
            "{tmp}/none: no such file or folder. Possible: a tar, a folder of tars, a folder of files.",
        ),
        (
            ["{tmp}/empty", "{tmp}/out"],
            "{tmp}/empty: holds neither tars nor images. Possible: a tar, a folder of tars, a folder of KEY.jpg, KEY.txt.",
        ),
        (["{tmp}/in.tar", "{tmp}/full"], "OUT: {tmp}/full exists and is not empty. Give a new folder, or remove it."),
        (
            ["{tmp}/in.tar", "s3://b/o"],
            "OUT: s3://b/o is in a store. This version writes folders; copy the finished one.",
        ),
        (
            ["{tmp}/in.tar", "/proc/out"],
            "OUT: /proc cannot be written: /proc: No such file or directory. Give a folder that this user may write in.",
        ),
        (
            ["{tmp}/in.tar", "{tmp}/out", "size=3"],
            "command line: unknown key 'size'. Known: shard_size (e.g. shard_size=64mb).",
        ),
        (
            ["{tmp}/in.tar", "{tmp}/out", "shard_size=x"],
            "command line: shard_size is 'x'. Possible: 1kb to 4gb, e.g. 64mb.",
        ),
        (
            ["{tmp}/in.tar", "{tmp}/out", "shard_size=99tb"],
            "command line: shard_size is '99tb'. Possible: 1kb to 4gb, e.g. 64mb.",
        ),
        (
            ["{tmp}/in.tar", "{tmp}/link"],
            "OUT: {tmp}/link is a link, a mount point or the current folder, which cannot be replaced. Give a folder in it.",
        ),
    ],
)
def test_shards_says_what_it_cannot_do(tmp_path, capsys, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    write_tar(tmp_path / "in.tar", {"a": sample_files(0)})
    assert shards.main([word.format(tmp=tmp_path) for word in words]) == 2
    assert capsys.readouterr().err == message.format(tmp=tmp_path) + "\n"
    assert not (tmp_path / "out").exists()


# --- the rendered pictures ---


def test_shapes_are_the_same_for_the_same_seed_and_others_for_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert shapes.main([str(tmp_path / name), "num_images=20", "image_size=32", f"seed={seed}"]) == 0
    a, b, c = ((tmp_path / name / "00000.tar").read_bytes() for name in "abc")
    assert a == b != c


def test_a_picture_shows_what_its_caption_says():
    scene = shapes.Scene(size="large", colour="red", shape="square", place="top left", background="white")
    assert scene.caption == "a large red square at the top left on a white background"
    image = shapes.render(scene, 64)
    assert image.size == (64, 64)
    assert image.getpixel((int(0.3 * 64), int(0.3 * 64))) == shapes.COLOURS["red"]
    assert image.getpixel((60, 60)) == shapes.COLOURS["white"]


def test_every_size_shape_and_place_keeps_inside_the_picture_and_differs():
    def ink(**changes: str) -> Image.Image:
        base = {"size": "large", "colour": "black", "shape": "circle", "place": "centre", "background": "white"}
        return shapes.render(shapes.Scene(**{**base, **changes}), 64)

    pictures = {
        ink(size=s, shape=f, place=p).tobytes() for s in shapes.SIZES for f in shapes.SHAPES for p in shapes.PLACES
    }
    assert len(pictures) == 3 * 4 * 9
    for place in shapes.PLACES:
        corners = [ink(place=place).getpixel(at) for at in ((0, 0), (0, 63), (63, 0), (63, 63))]
        assert corners == [shapes.COLOURS["white"]] * 4


def test_rendered_pictures_go_through_prepare_shards(tmp_path):
    assert shapes.main([str(tmp_path / "tars"), "num_images=12", "image_size=32"]) == 0
    assert shards.main([str(tmp_path / "tars"), str(tmp_path / "images")]) == 0
    found = rows(tmp_path / "images")
    assert len(found) == 12
    assert found[0]["caption"] == shapes.draw_scene(0, 17).caption
    assert found[0]["metadata"]["shape"] in shapes.SHAPES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "command line: exactly one OUT has to be given. python -m prepare.shapes --help says more."),
        (["{tmp}"], "OUT: {tmp} exists. Give a new folder, or remove it."),
        (
            ["{tmp}/a", "num_images=0"],
            "command line: num_images is '0'. Possible: a whole number from 1 to 1000000000.",
        ),
        (["{tmp}/a", "seed=²"], "command line: seed is '²'. Possible: a whole number from 0 to 4294967295."),
        (["{tmp}/a", "images=3"], "command line: unknown key 'images'. Known: num_images, image_size, seed."),
    ],
)
def test_shapes_says_what_it_cannot_do(tmp_path, capsys, words, message):
    assert shapes.main([word.format(tmp=tmp_path) for word in words]) == 2
    assert capsys.readouterr().err == message.format(tmp=tmp_path) + "\n"
