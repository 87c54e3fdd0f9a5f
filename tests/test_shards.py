"""prepare/shards.py and shapes.py: img2dataset's layout -> dataset `images`, MLPerf's -> `moments`, rendered images."""

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
from test_image_formats import encoded

from families import load_family
from families.shapes import scenes
from mds.dataset import read_dataset
from prepare import shapes, shards, sources

COUNTS = {"read": 48, "written": 48, "skipped": {}, "left_out": {}, "failed": {}, "bad_sources": {}, "ignored_files": 0}


def rows(stage: Path) -> list[dict]:
    dataset = StreamingDataset(local=str(stage), batch_size=1)
    return [dataset[i] for i in range(len(dataset))]


def skipped(path: Path) -> list[tuple]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [(line["source"], line.get("file", line["key"]), line["reason"]) for line in lines]


def test_bytes_captions_sizes_and_metadata_arrive_unchanged_by_any_number_of_workers(stage, tars, tmp_path):
    written = rows(stage)
    assert [row["key"] for row in written] == [f"{n:09d}" for n in range(48)]
    for number, row in enumerate(written):
        files = sample_files(number, SIZES[number % 4])
        assert row["jpg"] == files["jpg"] and row["caption"] == f"picture number {number}"
        assert (row["width"], row["height"]) == SIZES[number % 4] and row["metadata"] == json.loads(files["json"])
    dataset, index, plan = (json.loads((stage / f"{name}.json").read_text()) for name in ("dataset", "index", "plan"))
    assert {"stage": "images", "samples": 48, "made_by": "prepare.shards", "counts": COUNTS}.items() <= dataset.items()
    sizes = {tar.name: tar.stat().st_size for tar in tars.glob("*.tar")}
    assert {part["name"]: part["bytes"] for part in plan["parts"]} == sizes
    assert len({part["digest"] for part in plan["parts"]}) == 2
    assert len(index["shards"]) > 1 and all(set(shard["raw_data"]["hashes"]) == {"xxh64"} for shard in index["shards"])
    assert shards.main([str(tars), str(tmp_path / "out"), "workers=3", "shard_size=32kb"]) == 0
    assert tree(tmp_path / "out") == tree(stage)


def split_pace(line: str) -> tuple[str, str]:
    """Take out of a last line what was fast or slow on this machine: return the rest of it, and that."""
    match = re.search(r"; ([0-9.,]+ \w+/s over [^;]*)(?=;)", line)
    return (line, "") if match is None else (line.replace(match[0], ""), match[1])


def test_nothing_is_lost_without_a_word(tmp_path, capsys):
    """Repeated parts, two images of a key, keys with dots, links, names that are no text, folders in folders, cut tars."""
    folder, out = tmp_path / "in", tmp_path / "out"
    one, two = sample_files(1), sample_files(2)
    tar = write_tar(folder / "0.tar", {"a": one})
    members = {"a.jpg": two["jpg"], "a.txt": two["txt"]}
    members |= {"b.jpg": one["jpg"], "b.png": picture(3, kind="PNG"), "b.txt": b"b", "c.v2.jpg": one["jpg"]}
    members |= {"d\udcff.jpg": one["jpg"], "d\udcff.txt": b"d"}
    members |= {"e.jpg": one["jpg"], "e.txt": b"e", "e.json": b"[" * 200_000}
    climbing = ["../../climbed", "/absolute", "sub/../../under"]
    members |= {f"{key}.{suffix}": one[suffix] for key in climbing for suffix in ("jpg", "txt")}
    with tarfile.open(tar, "a") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("f.jpg")
        link.type, link.linkname = tarfile.LNKTYPE, "a.jpg"
        file.addfile(link)
    (folder / "1.tar").symlink_to("nowhere")
    os.mkfifo(folder / "2.tar")
    write_tar(folder / "3.tar", {})
    (folder / "4.tar").write_bytes(b"")
    whole = write_tar(folder / "5.tar", {f"g{n}": sample_files(n) for n in range(2)})
    whole.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    (folder / "00000").mkdir()
    for suffix, content in sample_files(4).items():
        (folder / "00000" / f"deep.{suffix}").write_bytes(content)
    (folder / "00000" / "stats.parquet").touch()

    assert shards.main([str(folder), str(out)]) == 1
    captions = {"a": "picture number 1", "b": "b", "g0": "picture number 0", "deep": "picture number 4"}
    assert [(row["key"], row["caption"]) for row in rows(out)] == list(captions.items())
    unread = "cannot be read to its end"
    assert skipped(out / "skipped.jsonl") == [
        ("0.tar", "a", "duplicate key"),
        ("0.tar", "b", "missing caption"),
        ("0.tar", "c.v2.jpg", "belongs to no sample"),
        ("0.tar", "d\udcff", "key is not UTF-8"),
        ("0.tar", "e", "metadata is not JSON"),
        *(("0.tar", key, "key leads out of its source") for key in climbing[:2]),
        ("0.tar", "f.jpg", "is a link"),
        ("0.tar", climbing[2], "key leads out of its source"),
        *((f"{n}.tar", None, "has no sample" if n == 3 else unread) for n in range(1, 6)),
        ("00000", "stats.parquet", "belongs to no sample"),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "out"] and not Path("/absolute.jpg").exists()
    last, pace = split_pace(capsys.readouterr().out.splitlines()[-1])
    assert re.fullmatch(r"[0-9.,]+ samples/s over [0-9.]+ s", pace)
    assert last == (
        "found 11 samples, wrote 4, skipped 7 (duplicate key: 1, key is not UTF-8: 1, key leads out of its source: 3, "
        f"metadata is not JSON: 1, missing caption: 1); sources with a fault: 5 ({unread}: 4, has no sample: 1); "
        f"files that were not read: 3, e.g. c.v2.jpg; in {out}; reasons: {out}/skipped.jsonl"
    )


def test_where_no_sample_can_be_used_there_is_no_stage_but_the_reasons(tmp_path, capsys):
    tar, out = write_tar(tmp_path / "in.tar", {"a": {"jpg": b"", "txt": b"x"}}), tmp_path / "out"
    for _ in range(2):  # a second start reports it again
        assert shards.main([str(tar), str(out)]) == 1
        assert sorted(tree(out)) == ["part-00000/part.json", "plan.json", "skipped.jsonl"]
        assert split_pace(capsys.readouterr().out.splitlines()[-1])[0] == (
            f"found 1 samples, wrote 0, skipped 1 (image of zero bytes: 1); no dataset; reasons: {out}/skipped.jsonl"
        )
    with pytest.raises(ValueError, match="no index.json under"):
        read_dataset(str(out))


# --- inputs of every kind ---


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(Image.new("RGB", (60, 40)), "JPEG", exif=exif)


RED, BLUE = Image.new("RGB", (40, 40), "red"), Image.new("RGB", (40, 40), "blue")
IMAGES = {
    "cmyk": ("jpg", picture(1, mode="CMYK"), (80, 96)),
    "palette": ("png", picture(4, kind="PNG", mode="P"), (80, 96)),
    "sixteen": ("png", encoded(Image.fromarray(np.full((40, 40), 30000, np.uint16)), "PNG"), (40, 40)),
    "turned": ("jpg", turned(), (40, 60)),
    "animated_webp": ("webp", encoded(RED, "WEBP", save_all=True, append_images=[BLUE], lossless=True), (40, 40)),
    "wide": ("png", encoded(RED.resize((20_000, 3)), "PNG"), (20_000, 3)),
    "avif": ("avif", picture(5, kind="AVIF"), (80, 96)),
    "tif_as_jpg": ("jpg", picture(8, kind="TIFF"), (80, 96)),
    "html": ("jpg", b"<!DOCTYPE html><html>404</html>", "not an image"),
    "truncated": ("jpg", picture(0, (200, 200))[:1500], "truncated or damaged image"),
    "empty": ("jpg", b"", "image of zero bytes"),
    "bomb": ("png", encoded(Image.new("1", (14_000, 14_000)), "PNG"), "too many pixels"),
}
"""Name -> suffix, content, and the size of the image or why it cannot be used."""


def test_each_kind_of_image_and_caption_is_stored_or_skipped_with_its_reason(tmp_path):
    good, out = sample_files(1), tmp_path / "out"
    texts = [" ".join(["word"] * 2_000), "one\r\ntwo\n\nthree\n", "\u00e4\u4e16\U0001f600", "a\0b", "\ufeffwith a mark"]
    captions = [text.removeprefix("\ufeff").removesuffix("\n") for text in texts]
    unusable = {
        "spaces": ({**good, "txt": b" \t\n"}, "empty caption"),
        "latin": ({**good, "txt": "K\u00e4se".encode("latin-1")}, "caption is not UTF-8"),
        "no caption": ({"jpg": good["jpg"]}, "missing caption"),
        "no image": ({"txt": b"x"}, "missing image"),
        "bad json": ({**good, "json": b"{"}, "metadata is not JSON"),
    }
    samples = {name: {suffix: data, "txt": b"x"} for name, (suffix, data, _) in IMAGES.items()}
    samples |= {f"caption {n}": {"jpg": good["jpg"], "txt": text.encode()} for n, text in enumerate(texts)}
    samples |= {name: files for name, (files, _) in unusable.items()}
    assert shards.main([str(write_tar(tmp_path / "in.tar", samples)), str(out)]) == 0
    written = {row["key"]: row for row in rows(out)}
    reasons = {key: reason for _, key, reason in skipped(out / "skipped.jsonl")}
    assert written.keys() | reasons.keys() == samples.keys()
    for name, (_, data, outcome) in IMAGES.items():
        if isinstance(outcome, str):
            assert reasons.pop(name) == outcome
        else:
            assert written[name]["jpg"] == data and (written[name]["width"], written[name]["height"]) == outcome
    assert reasons == {name: reason for name, (_, reason) in unusable.items()}
    assert [written[f"caption {n}"]["caption"] for n in range(5)] == captions


# --- the MLPerf reference's moments ---


def npy(array: np.ndarray, **options) -> bytes:
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def moments(number: int, side: int = 8) -> np.ndarray:
    return np.random.default_rng(number).normal(0, 3, (1, 8, side, side)).astype(np.float32)


def test_published_moments_become_the_stage_moments(tmp_path):
    good = {f"{n:03d}": {"npy": npy(moments(n)), "txt": f"picture {n}".encode(), "json": b'{"n": 1}'} for n in range(5)}
    tar = write_tar(tmp_path / "in.tar", {**good, "fortran": {"npy": npy(np.asfortranarray(moments(9))), "txt": b"f"}})
    assert shards.main([str(tar), str(tmp_path / "out")]) == 0
    written = rows(tmp_path / "out")
    assert [row["key"] for row in written] == [*good, "fortran"] and written[0]["metadata"] == {"n": 1}
    for number, row in [*enumerate(written[:5]), (9, written[5])]:
        assert row["moments"].dtype == np.float16 and np.array_equal(row["moments"], moments(number)[0].astype("f2"))
    tokens = load_family("sd2", "full", "stock").tokenize([row["caption"] for row in written])["tokens"]
    assert written[0]["tokens"].dtype == np.uint16 and [list(row["tokens"]) for row in written] == tokens.tolist()
    facts = json.loads((tmp_path / "out" / "dataset.json").read_text())
    expected = {"stage": "moments", "family": "sd2", "preset": "full", "variant": "stock", "image_size": [64, 64]}
    expected |= {"normalize": "unit", "encoders": {"vae": None, "text": None}}
    assert expected.items() <= facts.items() and read_dataset(str(tmp_path / "out")).num_samples == 6


class Bomb:
    """Fails the test when it is unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("code from a file was run",))


def test_moments_that_cannot_be_used_say_why(tmp_path):
    spoilt = moments(1)
    spoilt[0, 3, 2, 1] = 1e6
    cases = {
        "good": (npy(moments(0)), None),
        "shape": (npy(moments(0, side=16)), "moments of another shape than (1, 8, 8, 8)"),
        "large": (npy(spoilt), "moments are not finite in float16"),
        "cut": (npy(moments(0))[:-5], "moments are no whole .npy array"),
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
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "0.tar").write_bytes(b"no tar")
    stray = {"npy": npy(moments(0)), "txt": b"x"}
    write_tar(tmp_path / "in" / "1.tar", {"words": {"txt": b"x"}, "a": sample_files(1), "b": stray})
    assert shards.main([str(tmp_path / "in"), str(tmp_path / "out")]) == 1
    assert json.loads((tmp_path / "out" / "dataset.json").read_text())["stage"] == "images"
    assert ("1.tar", "b", "missing image") in skipped(tmp_path / "out" / "skipped.jsonl")


def test_a_disk_that_fails_once_does_not_become_a_finished_part(tmp_path, capsys, monkeypatch):
    for number in range(2):
        write_tar(tmp_path / "in" / f"{number}.tar", {f"{number}": sample_files(number)})
    open_tar = sources.open_tar

    def fail(source):
        if source.name == "1.tar" and "part-00000" in {path.name for path in (tmp_path / "out").iterdir()}:
            raise OSError(errno.EIO, "Input/output error", str(source))
        return open_tar(source)

    words = [str(tmp_path / "in"), str(tmp_path / "out"), "workers=1"]
    with monkeypatch.context() as patch:
        patch.setattr("prepare.sources.open_tar", fail)
        assert shards.main(words) == 1
    message = f"SOURCE: {tmp_path}/in/1.tar cannot be read: [Errno 5] Input/output error: "
    assert capsys.readouterr().err.splitlines()[-1].startswith(message)
    assert not (tmp_path / "out" / "dataset.json").exists()
    assert shards.main(words) == 0 and len(rows(tmp_path / "out")) == 2


# --- the rendered pictures ---


def test_rendered_shapes_depend_on_the_seed_alone_and_go_through_prepare_shards(tmp_path):
    for name, seed in (("a", 17), ("b", 17), ("c", 2)):
        assert shapes.main([str(tmp_path / name), "num_images=12", "image_size=32", f"seed={seed}"]) == 0
    a, b, c = ((tmp_path / name / "00000.tar").read_bytes() for name in "abc")
    assert a == b != c
    assert shards.main([str(tmp_path / "a"), str(tmp_path / "images")]) == 0
    captions = [scenes.draw_scene(n, 17).caption for n in range(12)]
    assert [row["caption"] for row in rows(tmp_path / "images")] == captions


SIZES = [(80, 96), (128, 64), (64, 64), (200, 150)]


def test_a_tar_that_lies_about_sizes_costs_itself_and_no_memory(tmp_path, monkeypatch):
    folder, zeros = tmp_path / "in", tarfile.TarInfo("c.jpg")
    write_tar(folder / "0.tar", {"good": sample_files(1)})
    for number, size in ((1, "200000000000"), (2, "abc")):
        with tarfile.open(folder / f"{number}.tar", "w", format=tarfile.PAX_FORMAT) as tar:
            member = tarfile.TarInfo("a.jpg")
            member.size, member.pax_headers = 5, {"GNU.sparse.size": size, "GNU.sparse.map": "0,5"}
            tar.addfile(member, io.BytesIO(b"12345"))
    monkeypatch.setattr("prepare.sources.MAX_MEMBER_BYTES", 2**22)
    zeros.size = 5_000_000
    with tarfile.open(folder / "3.tar", "w:gz") as tar, open("/dev/zero", "rb") as file:  # 5 MB of zeros in 5 kB
        tar.addfile(zeros, file)
    assert shards.main([str(folder), str(tmp_path / "out"), "workers=1"]) == 1
    assert [row["key"] for row in rows(tmp_path / "out")] == ["good"]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        ("1.tar", "a.jpg", "is a sparse file"),
        ("1.tar", None, "has no sample"),
        ("2.tar", None, "cannot be read to its end"),
        ("3.tar", "c.jpg", "has more than 4 MiB"),
        ("3.tar", None, "has no sample"),
    ]
