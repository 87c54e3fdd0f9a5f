"""prepare/shards.py and command.py: img2dataset's layout -> stage `images`, MLPerf's -> `moments`, rendered pictures."""

from __future__ import annotations

import errno
import io
import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest
from conftest import picture, sample_files, tree, write_tar
from PIL import Image
from streaming import StreamingDataset

from prepare import shards, sources
from prepare.shapes import command, pictures
from stages.dataset import read_stage
from zoo import load_family
from zoo.shapes import scenes

POSSIBLE = "Possible: a tar, a Parquet or Arrow file, a CSV file, JSON lines, a folder of these or of KEY.jpg, KEY.txt"


COUNTS = {"read": 48, "written": 48, "skipped": {}, "left_out": {}, "failed": {}, "bad_sources": {}, "ignored_files": 0}


def rows(stage: Path) -> list[dict]:
    dataset = StreamingDataset(local=str(stage), batch_size=1)
    return [dataset[i] for i in range(len(dataset))]


def skipped(path: Path) -> list[tuple]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["source"], line.get("file", line["key"]), line["reason"]) for line in lines]


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
    assert facts["counts"] == COUNTS
    plan = json.loads((stage / "plan.json").read_text())
    assert [(part["name"], part["bytes"]) for part in plan["parts"]] == [
        (tar.name, tar.stat().st_size) for tar in sorted(tars.glob("*.tar"))
    ]
    assert len({part["digest"] for part in plan["parts"]}) == 2
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


def test_any_number_of_workers_gives_the_same_bytes(tars, tmp_path):
    for workers in (1, 2, 3):
        assert shards.main([str(tars), str(tmp_path / f"{workers}"), f"workers={workers}"]) == 0
    assert tree(tmp_path / "1") == tree(tmp_path / "2") == tree(tmp_path / "3")


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
    assert shards.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 1  # two tars are cut off
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
    assert last.startswith(f"found {counts['read']} samples, wrote {counts['written']}, skipped ")
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


def split_pace(line: str) -> tuple[str, str]:
    """Take out of a last line what was fast or slow on this machine: return the rest of it, and that."""
    found = re.search(r"; ([0-9.,]+ \w+/s over [^;]*)(?=;)", line)
    return (line, "") if found is None else (line.replace(found[0], ""), found[1])


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

    assert shards.main([str(folder), str(tmp_path / "out")]) == 1
    assert [(row["key"], row["caption"]) for row in rows(tmp_path / "out")] == [
        ("a", "picture number 1"),
        ("b", "b"),
        ("deep", "picture number 4"),
    ]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        ("0.tar", "a", "duplicate key"),
        ("0.tar", "b", "missing caption"),
        ("0.tar", "c.v2.jpg", "belongs to no sample"),
        ("0.tar", "d\udcff", "key is not UTF-8"),
        ("0.tar", "f.jpg", "is a link"),
        ("0.tar", "e", "metadata is not JSON"),
        ("1.tar", None, "cannot be read to its end"),
        ("2.tar", None, "cannot be read to its end"),
        ("00000", "stats.parquet", "belongs to no sample"),
    ]
    last, pace = split_pace(capsys.readouterr().out.splitlines()[-1])
    assert re.fullmatch(r"[0-9.,]+ samples/s over [0-9.]+ s", pace)
    assert last == (
        "found 7 samples, wrote 3, skipped 4 (duplicate key: 1, key is not UTF-8: 1, metadata is not JSON: 1, missing "
        "caption: 1); sources with a fault: 2 (cannot be read to its end: 2); files that were not read: 3, e.g. c.v2.jpg; in"
        f" {tmp_path}/out; reasons: {tmp_path}/out/skipped.jsonl"
    )


def test_where_no_sample_can_be_used_there_is_no_stage_but_the_reasons(tmp_path, capsys):
    tar, out = write_tar(tmp_path / "in.tar", {"a": {"jpg": b"", "txt": b"x"}}), tmp_path / "out"
    for _ in range(2):  # a second start says it again
        assert shards.main([str(tar), str(out)]) == 1
        assert sorted(tree(out)) == ["part-00000/part.json", "plan.json", "skipped.jsonl"]
        assert split_pace(capsys.readouterr().out.splitlines()[-1])[0] == (
            f"found 1 samples, wrote 0, skipped 1 (image of zero bytes: 1); no stage; reasons: {out}/skipped.jsonl"
        )
    assert skipped(out / "skipped.jsonl") == [("in.tar", "a", "image of zero bytes")]
    with pytest.raises(ValueError, match="no index.json under"):
        read_stage(str(out))


# --- inputs of every kind ---


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.new("RGB", (60, 40)), "JPEG", exif=exif)


RED, BLUE = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (40, 40), "blue")
IMAGES = {
    "cmyk": ("jpg", picture(1, mode="CMYK"), (80, 96)),
    "gray": ("jpg", picture(2, mode="L"), (80, 96)),
    "rgba": ("png", picture(3, kind="PNG", mode="RGBA"), (80, 96)),
    "palette": ("png", picture(4, kind="PNG", mode="P"), (80, 96)),
    "sixteen": ("png", encoded(Image.fromarray(np.full((40, 40), 30000, np.uint16)), "PNG"), (40, 40)),
    "turned": ("jpg", turned(), (40, 60)),
    "animated_webp": ("webp", encoded(RED, "WEBP", save_all=True, append_images=[BLUE], lossless=True), (40, 40)),
    "animated_png": ("png", encoded(RED, "PNG", save_all=True, append_images=[BLUE]), (40, 40)),
    "pixel": ("png", encoded(RED.resize((1, 1)), "PNG"), (1, 1)),
    "wide": ("png", encoded(RED.resize((20_000, 3)), "PNG"), (20_000, 3)),
    "animated_gif": ("gif", encoded(RED, "GIF", save_all=True, append_images=[BLUE]), (40, 40)),
    "avif": ("avif", picture(5, kind="AVIF"), (80, 96)),
    "bmp": ("bmp", picture(6, kind="BMP"), (80, 96)),
    "tiff": ("tiff", picture(7, kind="TIFF"), (80, 96)),
    "tif_as_jpg": ("jpg", picture(8, kind="TIFF"), (80, 96)),
    "ppm": ("jpg", picture(9, kind="PPM"), "not an image"),
    "html": ("jpg", b"<!DOCTYPE html><html>404</html>", "not an image"),
    "truncated": ("jpg", picture(0, (200, 200))[:1500], "truncated or damaged image"),
    "cut_webp": ("webp", picture(0, (200, 200), kind="WEBP")[:400], "truncated or damaged image"),
    "empty": ("jpg", b"", "image of zero bytes"),
    "bomb": ("png", encoded(Image.new("1", (14_000, 14_000)), "PNG"), "too many pixels"),
}
"""Name -> suffix, content, and the size of the picture or why it cannot be used."""


def odd_images(path: Path) -> Path:
    return write_tar(path, {name: {suffix: data, "txt": b"x"} for name, (suffix, data, _) in IMAGES.items()})


def test_every_kind_of_image_is_stored_as_it_is_or_skipped_with_its_reason(tmp_path):
    assert shards.main([str(odd_images(tmp_path / "in.tar")), str(tmp_path / "out")]) == 0
    found = {row["key"]: row for row in rows(tmp_path / "out")}
    reasons = {key: reason for _, key, reason in skipped(tmp_path / "out" / "skipped.jsonl")}
    assert found.keys() | reasons.keys() == IMAGES.keys()
    for name, (_, data, outcome) in IMAGES.items():
        if isinstance(outcome, str):
            assert reasons[name] == outcome
        else:
            assert found[name]["jpg"] == data and (found[name]["width"], found[name]["height"]) == outcome


def test_every_kind_of_caption_is_stripped_or_skipped_with_its_reason(tmp_path):
    image, long = picture(1), " ".join(["word"] * 2_000)
    captions = {
        "long": long.encode(),
        "lines": b"one\r\ntwo\n\nthree\n",
        "accents": "\u00e4\u4e16\U0001f600".encode(),
        "nul": b"a\0b",
        "marked": b"\xef\xbb\xbfwith a byte order mark",
        "spaces": b" \t\n",
        "nothing": b"",
        "latin": "K\u00e4se".encode("latin-1"),
        "utf16": "cheese".encode("utf-16"),
    }
    samples = {name: {"jpg": image, "txt": text} for name, text in captions.items()}
    tar = write_tar(tmp_path / "in.tar", {**samples, "missing": {"jpg": image}})
    assert shards.main([str(tar), str(tmp_path / "out")]) == 0
    assert {row["key"]: row["caption"] for row in rows(tmp_path / "out")} == {
        "long": long,
        "lines": "one\r\ntwo\n\nthree",
        "accents": "\u00e4\u4e16\U0001f600",
        "nul": "a\0b",
        "marked": "with a byte order mark",
    }
    assert [(key, reason) for _, key, reason in skipped(tmp_path / "out" / "skipped.jsonl")] == [
        ("spaces", "empty caption"),
        ("nothing", "empty caption"),
        ("latin", "caption is not UTF-8"),
        ("utf16", "caption is not UTF-8"),
        ("missing", "missing caption"),
    ]


def test_a_name_that_climbs_out_of_its_tar_is_skipped_and_nothing_is_written_there(tmp_path):
    files = sample_files(1)
    names = ["../../climbed", "/absolute", "sub/../../under", "sub/fine", "dots..fine"]
    tar = write_tar(tmp_path / "in" / "0.tar", dict.fromkeys(names, files))
    assert shards.main([str(tar), str(tmp_path / "out")]) == 0
    assert [row["key"] for row in rows(tmp_path / "out")] == ["sub/fine"]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        *(("0.tar", name, "key climbs out of its tar") for name in names[:3]),
        *(("0.tar", f"dots..fine.{suffix}", "belongs to no sample") for suffix in files),  # a key ends at the first dot
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"] and not Path("/absolute.jpg").exists()


# --- the MLPerf reference's moments ---


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def moments(number: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(number).normal(0, 3, (1, 8, side, side)).astype(np.float32)


def test_published_moments_become_the_stage_moments(tmp_path, capsys):
    good = {f"{n:03d}": {"npy": npy(moments(n)), "txt": f"picture {n}".encode(), "json": b'{"n": 1}'} for n in range(5)}
    tar = write_tar(tmp_path / "in.tar", {**good, "fortran": {"npy": npy(np.asfortranarray(moments(9))), "txt": b"f"}})
    assert shards.main([str(tar), str(tmp_path / "out")]) == 0
    found = rows(tmp_path / "out")
    assert [row["key"] for row in found] == [*good, "fortran"]
    for number, row in [*enumerate(found[:5]), (9, found[5])]:
        assert row["moments"].dtype == np.float16 and np.array_equal(row["moments"], moments(number)[0].astype("f2"))
    tokens = load_family("sd2", "full", "stock").tokenize([row["caption"] for row in found])["tokens"]
    assert found[0]["tokens"].dtype == np.uint16 and [list(row["tokens"]) for row in found] == tokens.tolist()
    assert found[0]["metadata"] == {"n": 1}
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    assert facts["stage"] == "moments" and read_stage(str(tmp_path / "out")).num_samples == 6
    assert {key: facts[key] for key in ("family", "preset", "variant", "image_size", "normalize", "encoders")} == {
        "family": "sd2",
        "preset": "full",
        "variant": "stock",
        "image_size": [64, 64],
        "normalize": "unit",
        "encoders": {"vae": None, "text": None},
    }


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("code from a file was run",))


def test_moments_that_cannot_be_used_say_why(tmp_path):
    spoilt = moments(1)
    spoilt[0, 3, 2, 1] = np.nan
    huge_header = npy(moments(2)).replace(b"(1, 8, 8, 8)", b"(1, 8, 9, 9)")
    cases = {
        "good": (npy(moments(0)), None),
        "shape": (npy(moments(0, side=16)), "moments of another shape than (1, 8, 8, 8)"),
        "flat": (npy(moments(0)[0]), "moments of another shape than (1, 8, 8, 8)"),
        "lie": (huge_header, "moments are no whole .npy array"),
        "double": (npy(moments(0).astype("f8")), "moments are not float32"),
        "nan": (npy(spoilt), "moments are not finite in float16"),
        "large": (npy(moments(0) * 1e6), "moments are not finite in float16"),
        "cut": (npy(moments(0))[:-5], "moments are no whole .npy array"),
        "zero": (b"", "moments are no whole .npy array"),
        "text": (b"<html>", "moments are no whole .npy array"),
        "pickled": (npy(np.array([Bomb()], object), allow_pickle=True), "moments are no whole .npy array"),
    }
    samples = {name: {"npy": content, "txt": b"x"} for name, (content, _) in cases.items()}
    tar = write_tar(tmp_path / "in.tar", {**samples, "picture": sample_files(1), "mute": {"npy": npy(moments(3))}})
    assert shards.main([str(tar), str(tmp_path / "out")]) == 0
    assert [row["key"] for row in rows(tmp_path / "out")] == ["good"]
    expected = {name: reason for name, (_, reason) in cases.items() if reason}
    expected |= {"picture": "missing moments", "mute": "missing caption"}
    assert {key: reason for _, key, reason in skipped(tmp_path / "out" / "skipped.jsonl")} == expected


def test_the_first_sample_decides_between_images_and_moments(tmp_path):
    stray = {"npy": npy(moments(0)), "txt": b"x"}
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.tar").write_bytes(b"no tar")
    write_tar(tmp_path / "in" / "1.tar", {"words": {"txt": b"x"}, "a": sample_files(1), "b": stray})
    assert shards.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["stage"] == "images"
    assert ("1.tar", "b", "missing image") in skipped(tmp_path / "out" / "skipped.jsonl")
    whole = sources.Files(write_tar(tmp_path / "m.tar", {"cut": {"npy": b"?"}, "a": stray}))
    assert shards.peek([whole], tmp_path)[:2] == ("moments", (64, 64))
    broken = sources.Files(write_tar(tmp_path / "n.tar", {"cut": {"npy": b"?"}}))
    assert shards.peek([broken], tmp_path)[:2] == ("moments", (512, 512))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{tmp}/in"], "command line: SOURCE... and OUT have to be given. python -m prepare.shards --help says more."),
        (
            ["{tmp}/none", "{tmp}/out"],
            "{tmp}/none: no such file or folder. " + POSSIBLE + ", s3://..., hf://datasets/OWNER/NAME.",
        ),
        (
            ["{tmp}/empty", "{tmp}/out"],
            "{tmp}/empty: holds neither tars nor images nor tables. " + POSSIBLE + ".",
        ),
        (["{tmp}/in.tar", "{tmp}/full"], "OUT: {tmp}/full exists and is not empty. Give a new folder, or remove it."),
        (
            ["{tmp}/in.tar", "ftp://b/o"],
            "OUT: ftp://b/o is in no known store. Possible: a folder, alipan://, gs://, oci://, s3://.",
        ),
        (["{tmp}/in.tar", "s3:b/o"], "OUT: s3:b/o names no bucket. Write s3://BUCKET/PREFIX."),
        (
            ["{tmp}/in.tar", "/proc/out"],
            "OUT: /proc/out cannot be written: /proc: No such file or directory. Give a folder that this user may write in.",
        ),
        (
            ["{tmp}/in.tar", "{tmp}/out", "size=3"],
            "command line: unknown key 'size'. Known: caption, config, empty, engine, image, key, max_aspect, min_side_px, "
            "min_similarity, ray, revision, shard_size, similarity, split, video, workers. --print_config shows every key.",
        ),
        (
            ["{tmp}/in.tar", "{tmp}/out", "shard_size=99tb"],
            "command line: shard_size is '99tb'. Possible: 1kb to 4gb.",
        ),
        (["{tmp}/in.tar", "{tmp}/out", "workers=0"], "command line: workers is 0. Possible: 1 to 512 or null."),
        (["{tmp}/in.tar", "{tmp}/in.tar"], "OUT: {tmp}/in.tar is a file. Give a folder."),
        (["{tmp}/in.tar", "{tmp}/link"], "OUT: {tmp}/link is a link to nothing. Give a folder, or remove the link."),
        (
            ["{tmp}/tars", "{tmp}/tars/out"],
            "OUT: {tmp}/tars/out lies in {tmp}/tars, which is only read. Give a place outside of it.",
        ),
        (
            ["{tmp}/tars", "{tmp}/tars"],
            "OUT: {tmp}/tars lies in {tmp}/tars, which is only read. Give a place outside of it.",
        ),
        (
            ["{tmp}/none", "{tmp}/out", "shard_size=x", "wokers=2"],
            "command line: shard_size is 'x'. Possible: 1kb to 4gb.\n"
            "command line: unknown key 'wokers'. Did you mean 'workers'?\n"
            "{tmp}/none: no such file or folder. " + POSSIBLE + ", s3://..., hf://datasets/OWNER/NAME.",
        ),
    ],
)
def test_shards_says_what_it_cannot_do(tmp_path, capsys, words, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    write_tar(tmp_path / "tars" / "0.tar", {"a": sample_files(0)})
    write_tar(tmp_path / "in.tar", {"a": sample_files(0)})
    assert shards.main([word.format(tmp=tmp_path) for word in words]) == 2
    assert capsys.readouterr().err == message.format(tmp=tmp_path) + "\n"
    assert not (tmp_path / "out").exists()


def test_a_tar_that_lies_about_sizes_or_has_a_broken_header_costs_itself_and_no_memory(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "in"
    write_tar(folder / "0.tar", {"good": sample_files(1)})
    with tarfile.open(folder / "1.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for key, headers in {"a": {"GNU.sparse.size": "200000000000", "GNU.sparse.map": "0,5"}}.items():
            member = tarfile.TarInfo(f"{key}.jpg")
            member.size, member.pax_headers = 5, headers
            tar.addfile(member, io.BytesIO(b"12345"))
    with tarfile.open(folder / "2.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        member = tarfile.TarInfo("b.jpg")
        member.size, member.pax_headers = 5, {"GNU.sparse.size": "abc"}
        tar.addfile(member, io.BytesIO(b"12345"))
    monkeypatch.setattr("prepare.tars.MAX_MEMBER_BYTES", 2**22)
    with tarfile.open(folder / "3.tar", "w:gz") as tar:  # 5 MB of zeros in 5 kB
        member = tarfile.TarInfo("c.jpg")
        member.size = 5_000_000
        with open("/dev/zero", "rb") as zeros:
            tar.addfile(member, zeros)
    assert shards.main([str(folder), str(tmp_path / "out"), "workers=1"]) == 1
    assert [row["key"] for row in rows(tmp_path / "out")] == ["good"]
    last = capsys.readouterr().out.splitlines()[-1]
    assert "sources with a fault: 3 (cannot be read to its end: 1, has no sample: 2); " in last
    assert [entry for entry in skipped(tmp_path / "out" / "skipped.jsonl") if entry[1]] == [
        ("1.tar", "a.jpg", "is a sparse file"),
        ("3.tar", "c.jpg", "has more than 4 MiB"),
    ]


@pytest.mark.parametrize("damage", ["header", "cut at a member's edge", "cut in a header", "no end"])
def test_a_tar_that_ends_too_early_is_named_and_not_taken_for_a_shorter_one(tmp_path, capsys, damage):
    tar = write_tar(tmp_path / "in.tar", {f"{n}": {"jpg": picture(n), "txt": b"x"} for n in range(10)})
    with tarfile.open(tar) as whole:
        edge = next(member.offset for member in whole if member.name == "4.jpg")
        end = max(member.offset_data + 512 for member in whole)
    data = bytearray(tar.read_bytes())
    if damage == "header":
        data[edge + 148] ^= 1  # its checksum
    else:
        del data[end if damage == "no end" else edge + 100 * (damage == "cut in a header") :]
    tar.write_bytes(data)
    assert shards.main([str(tar), str(tmp_path / "out"), "workers=1"]) == 1
    written = 10 if damage == "no end" else 4
    assert len(rows(tmp_path / "out")) == written
    assert (
        f"wrote {written}, skipped 0; sources with a fault: 1 (cannot be read to its end: 1)" in capsys.readouterr().out
    )


def test_a_disk_that_fails_once_does_not_become_a_finished_part(tmp_path, capsys, monkeypatch):
    for number in range(2):
        write_tar(tmp_path / "in" / f"{number}.tar", {f"{number}": sample_files(number)})
    begin, calls = sources.open_tar, []

    def fail_once(source):
        calls.append(source)
        if source.name == "1.tar" and len(calls) < 4:
            raise OSError(errno.EIO, "Input/output error", str(source))
        return begin(source)

    words = [str(tmp_path / "in"), str(tmp_path / "out"), "workers=1"]
    with monkeypatch.context() as patch:
        patch.setattr("prepare.sources.open_tar", fail_once)
        assert shards.main(words) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"SOURCE: {tmp_path}/in/1.tar cannot be read: [Errno 5] Input/output error: '{tmp_path}/in/1.tar'. What is done "
        f"stays; the same command resumes from there."
    )
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert shards.main(words) == 0 and len(rows(tmp_path / "out")) == 2


def test_another_tar_of_the_same_name_and_size_is_another_plan(tmp_path, capsys):
    one, two = (write_tar(tmp_path / name / "0.tar", {name: sample_files(1)}) for name in "ab")
    assert one.stat().st_size == two.stat().st_size
    assert shards.main([str(one), str(tmp_path / "out")]) == 0
    assert shards.main([str(two), str(tmp_path / "out")]) == 2
    assert f"OUT: {tmp_path}/out holds the finished work of another command: part-00000.digest was " in (
        capsys.readouterr().err
    )


# --- the rendered pictures ---


def test_shapes_are_the_same_for_the_same_seed_and_others_for_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        assert command.main([str(tmp_path / name), "num_images=20", "image_size=32", f"seed={seed}"]) == 0
    a, b, c = ((tmp_path / name / "00000.tar").read_bytes() for name in "abc")
    assert a == b != c


def test_a_picture_shows_what_its_caption_says():
    scene = scenes.Scene(size="large", colour="red", shape="square", place="top left", background="white")
    assert scene.caption == "a large red square at the top left on a white background"
    image = pictures.render(scene, 64)
    assert image.size == (64, 64)
    assert image.getpixel((int(0.3 * 64), int(0.3 * 64))) == scenes.COLOURS["red"]
    assert image.getpixel((60, 60)) == scenes.COLOURS["white"]


def test_every_size_shape_and_place_keeps_inside_the_picture_and_differs():
    def ink(**changes: str) -> Image.Image:
        base = {"size": "large", "colour": "black", "shape": "circle", "place": "centre", "background": "white"}
        return pictures.render(scenes.Scene(**{**base, **changes}), 64)

    drawn = {
        ink(size=s, shape=f, place=p).tobytes() for s in scenes.SIZES for f in scenes.SHAPES for p in scenes.PLACES
    }
    assert len(drawn) == 2 * 4 * 9
    for place in scenes.PLACES:
        corners = [ink(place=place).getpixel(at) for at in ((0, 0), (0, 63), (63, 0), (63, 63))]
        assert corners == [scenes.COLOURS["white"]] * 4


def test_rendered_pictures_go_through_prepare_shards(tmp_path):
    assert command.main([str(tmp_path / "tars"), "num_images=12", "image_size=32"]) == 0
    assert shards.main([str(tmp_path / "tars"), str(tmp_path / "images")]) == 0
    found = rows(tmp_path / "images")
    assert len(found) == 12
    assert found[0]["caption"] == scenes.draw_scene(0, 17).caption
    assert found[0]["metadata"]["shape"] in scenes.SHAPES


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a", "b"], "command line: exactly one OUT has to be given. python -m prepare.shapes --help says more."),
        (["{tmp}"], "OUT: {tmp} exists. Give a new name, or remove it."),
        (["{tmp}/a", "num_images=0"], "command line: num_images is 0. Possible: 1 to 1,000,000,000."),
        (["{tmp}/a", "images=3"], "command line: unknown key 'images'. Did you mean 'num_images'?"),
    ],
)
def test_shapes_says_what_it_cannot_do(tmp_path, capsys, words, message):
    assert command.main([word.format(tmp=tmp_path) for word in words]) == 2
    assert capsys.readouterr().err == message.format(tmp=tmp_path) + "\n"
