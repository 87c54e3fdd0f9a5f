"""prepare/tars.py and sources.py: tars as strangers make them, compared with tarfile; joined, unsorted, hostile; folders."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import random
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import picture, sample_files, write_tar
from test_prepare import rows, skipped
from test_sources import facts, make

from prepare.samples import SourceError
from prepare.sources import NOT_ADJACENT
from prepare.tars import MAX_HEADER_BYTES, members, open_tar

LONG = "a" * 90 + "/" + "b" * 120 + "/ä\udcff" + "c" * 200
CLAIMED = 3 * 2**29
BLOCK = tarfile.BLOCKSIZE


def tar_of(files: Mapping[str, bytes], how: int = tarfile.GNU_FORMAT) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=how) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return data.getvalue()


def read_all(data: bytes) -> dict[str, bytes | None]:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        with open_tar(Path(file.name)) as tar:
            return {one.name: None if problem else tar.extractfile(one).read() for one, problem in members(tar)}


# --- what tarfile reads ---


@pytest.mark.parametrize("how", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_contents_are_those_that_tarfile_reads_in_every_format(how):
    names = ["x.jpg", "sub/y.txt", "ä.txt", "d\udcff.txt", "z" * 100, *([] if how == tarfile.USTAR_FORMAT else [LONG])]
    files = {name: bytes(range(256)) * number for number, name in enumerate(names)}
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=how, pax_headers={"comment": "of git"}) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 0.5
            tar.addfile(member, io.BytesIO(content))
        for name, kind in (("folder", tarfile.DIRTYPE), ("soft", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, LONG if how != tarfile.USTAR_FORMAT else "x.jpg"
            tar.addfile(member)
    with tarfile.open(fileobj=io.BytesIO(data.getvalue())) as tar:
        of_tarfile = {member.name: tar.extractfile(member).read() for member in tar if member.isreg()}
    assert of_tarfile == files
    assert read_all(data.getvalue()) == {**files, "soft": None, "hard": None}


@pytest.mark.parametrize("module", [None, gzip, bz2, lzma])
def test_a_compressed_tar_is_read_also_where_two_were_joined(tmp_path, module):
    compress = module.compress if module else bytes
    one, two = (tar_of({f"{n}.txt": b"x" * n}) for n in (1, 2))
    (tmp_path / "t.tar").write_bytes(compress(one) + compress(two))
    with open_tar(tmp_path / "t.tar") as tar:
        assert [(one.name, tar.extractfile(one).read()) for one, _ in members(tar)] == [
            ("1.txt", b"x"),
            ("2.txt", b"xx"),
        ]


def test_zeros_after_the_end_are_no_damage_and_other_bytes_are():
    data = tar_of({"a.txt": b"a"})
    end = 3 * BLOCK  # header, content, and one block of zeros
    for padded in (data[:end], data, data + bytes(200 * BLOCK)):
        assert read_all(padded) == {"a.txt": b"a"}
    for damaged in (data[: 2 * BLOCK], data + b"x" * BLOCK, data + b"x", data[: BLOCK + 1], data[:100], b""):
        with pytest.raises(tarfile.ReadError):
            read_all(damaged)


def test_a_sparse_file_is_named_and_what_follows_it_is_read(tmp_path):
    with open(tmp_path / "holes.jpg", "wb") as file:
        for number in range(40):  # more pieces than a header holds
            file.seek(2 * number * 2**16)
            file.write(b"x" * 2**16)
    (tmp_path / "z.txt").write_bytes(b"z")
    for how in ("gnu", "posix"):
        words = ["tar", "--sparse", f"--format={how}", "-cf", "t.tar", "holes.jpg", "z.txt"]
        subprocess.run(words, cwd=tmp_path, check=True)
        assert (tmp_path / "t.tar").stat().st_size < 60 * 2**16
        assert read_all((tmp_path / "t.tar").read_bytes()) == {"holes.jpg": None, "z.txt": b"z"}
        with open_tar(tmp_path / "t.tar") as tar:
            assert [one.sparse for one, _ in members(tar)] == [[], None]  # a map can have any length


def test_what_lies_before_the_damage_of_a_compressed_tar_is_read(tmp_path):
    data = gzip.compress(tar_of({f"{n}.txt": random.Random(n).randbytes(5000) for n in range(3)}))
    for damaged in (data[:-3], data[:-8] + bytes(8), data + b"junk"):
        (tmp_path / "t.tar.gz").write_bytes(damaged)
        names = []
        with pytest.raises((EOFError, gzip.BadGzipFile)), open_tar(tmp_path / "t.tar.gz") as tar:
            for one, _ in members(tar):
                assert len(tar.extractfile(one).read()) == 5000
                names.append(one.name)
        assert names == ["0.txt", "1.txt", "2.txt"]


# --- hostile headers ---


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_extended_headers_are_held_for_one_file_only_and_are_few(kind):
    record = b"14 path=x.txt\n"
    extended = header(kind, len(record)) + record + bytes(-len(record) % BLOCK)
    with pytest.raises(SourceError, match="^has more than 8 extended headers of one file$"):
        read_all(extended * 9 + tar_of({"a.txt": b"a"}))
    first = "x.txt" if kind == tarfile.XHDTYPE else "a.txt"
    assert read_all(extended * 8 + tar_of({"a.txt": b"a", "b.txt": b"b"})) == {first: b"a", "b.txt": b"b"}


def header(kind: bytes, size: int, **more: Any) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT, **more)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extended_header_that_claims_a_gigabyte_is_refused_unread(kind):
    with pytest.raises(SourceError, match="^has an extended header of more than 1 MiB$"):
        read_all(header(kind, CLAIMED) + bytes(2**20))
    with pytest.raises(tarfile.ReadError):
        read_all(header(kind, -5))


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, b"?", tarfile.REGTYPE])
def test_what_follows_a_member_that_is_not_wanted_is_read(kind):
    size = 0 if kind == tarfile.CHRTYPE else 2**20
    assert read_all(header(kind, size) + bytes(size) + tar_of({"a.txt": b"a"}))["a.txt"] == b"a"


def test_a_header_of_the_largest_size_is_read_and_a_hostile_tar_costs_only_itself(tmp_path):
    record = b"path=" + b"p/" * (MAX_HEADER_BYTES // 2 - 20) + b"a.txt\n"
    record = b"%d " % (len(record) + 8) + record
    assert len(record) <= MAX_HEADER_BYTES
    data = header(tarfile.XHDTYPE, len(record)) + record + bytes(-len(record) % BLOCK) + tar_of({"a.txt": b"a"})
    [name] = read_all(data)
    assert name.endswith("p/a.txt") and len(name) > 10**6
    write_tar(tmp_path / "in" / "0.tar", {"good": sample_files(1)})
    (tmp_path / "in" / "1.tar").write_bytes(gzip.compress(header(tarfile.XHDTYPE, CLAIMED) + bytes(2**16)))
    assert make(tmp_path / "in", tmp_path / "out") == 1
    assert [row["key"] for row in rows(tmp_path / "out")] == ["good"]
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        ("1.tar", None, "has an extended header of more than 1 MiB"),
    ]


# --- samples ---


def test_two_tars_that_were_joined_give_all_of_their_samples(tmp_path, capsys):
    halves = [write_tar(tmp_path / f"{n}", {f"{n}{k}": sample_files(n) for k in "ab"}) for n in range(2)]
    (tmp_path / "joined.tar").write_bytes(b"".join(half.read_bytes() for half in halves))
    assert make(tmp_path / "joined.tar", tmp_path / "out") == 0
    assert [row["key"] for row in rows(tmp_path / "out")] == ["0a", "0b", "1a", "1b"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("found 4 samples, wrote 4, skipped 0; ")


def test_a_tar_whose_images_and_captions_lie_apart_says_how_to_repack_it(tmp_path, capsys):
    files = {f"{n}.jpg": picture(n) for n in range(3)} | {f"{n}.txt": b"x" for n in range(3)}
    (tmp_path / "in.tar").write_bytes(tar_of(files))
    assert make(tmp_path / "in.tar", tmp_path / "out") == 1
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        *(("in.tar", f"{n}", "missing caption") for n in range(3)),
        *(("in.tar", f"{n}.txt", NOT_ADJACENT) for n in range(3)),
        ("in.tar", None, NOT_ADJACENT),
    ]
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        "found 3 samples, wrote 0, skipped 3 (missing caption: 3); sources with a fault: 1 (files of"
    )
    assert "repack with tar --sort=name: 1)" in said


@pytest.mark.parametrize("late", ["txt", "json"])
def test_a_tar_with_one_file_apart_is_written_without_it_and_ends_with_1(tmp_path, capsys, late):
    files = {f"{n}.{suffix}": content for n in range(3) for suffix, content in sample_files(n).items()}
    files["1." + late] = files.pop("1." + late)
    (tmp_path / "in.tar").write_bytes(tar_of(files))
    assert make(tmp_path / "in.tar", tmp_path / "out") == 1
    num = {"txt": 2, "json": 3}[late]
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(f"found 3 samples, wrote {num}, skipped {3 - num}") and NOT_ADJACENT in said
    assert ("in.tar", f"1.{late}", NOT_ADJACENT) in skipped(tmp_path / "out" / "skipped.jsonl")


def test_a_folders_key_ends_at_the_last_dot_and_a_tars_at_the_first(tmp_path, capsys):
    names = [
        "plain",
        "Screenshot 2024-01-01 at 10.21.33",
        "Screenshot 2024-01-01 at 10.21.34",
        "cat",
        "cat.v1",
        "cat-2",
    ]
    folder, files = tmp_path / "in", {}
    folder.mkdir()
    for number, name in enumerate(names):
        files |= {f"{name}.jpg": picture(number), f"{name}.txt": f"number {number}".encode()}
    for name, content in {**files, ".DS_Store": b"x", "README": b"x", "notes.md": b"x", "cat.cls": b"3"}.items():
        (folder / name).write_bytes(content)
    (tmp_path / "in.tar").write_bytes(tar_of(files))
    assert make(folder, tmp_path / "out") == 0
    found = {row["key"]: (row["jpg"], row["caption"]) for row in rows(tmp_path / "out")}
    assert found == {name: (files[f"{name}.jpg"], files[f"{name}.txt"].decode()) for name in names}
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [
        ("in", ".DS_Store", "has no name of the form KEY.SUFFIX"),
        ("in", "README", "has no name of the form KEY.SUFFIX"),
        ("in", "notes.md", "belongs to no sample"),
    ]
    assert make(tmp_path / "in.tar", tmp_path / "tar") == 0
    assert [row["key"] for row in rows(tmp_path / "tar")] == ["plain", "cat", "cat-2"]
    assert {entry[1] for entry in skipped(tmp_path / "tar" / "skipped.jsonl")} == {
        f"{name}.{suffix}" for name in names if "." in name for suffix in ("jpg", "txt") if name != "cat.v1"
    }


def test_compressed_tars_of_a_folder_are_sources_and_what_lies_too_deep_is_named(tmp_path, capsys):
    for number, suffix in enumerate(("tar", "tar.gz", "tgz")):
        data = tar_of({f"{number}.jpg": picture(number), f"{number}.txt": b"x"})
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number}.{suffix}").write_bytes(data if suffix == "tar" else gzip.compress(data))
    write_tar(tmp_path / "in" / "sub" / "deep.tar", {"a": sample_files(1)})
    assert make(tmp_path / "in", tmp_path / "out") == 0
    assert [row["key"] for row in rows(tmp_path / "out")] == ["0", "1", "2"]
    assert f"in: too deep in it to be read: {tmp_path}/in/sub/deep.tar. Give each" in capsys.readouterr().err


def test_the_balance_has_every_sample_and_a_source_that_breaks_ends_in_one(tmp_path, capsys):
    good, small = sample_files(1), {**sample_files(2, (32, 32))}
    tar = write_tar(tmp_path / "0.tar", {"a": good, "b": {**good, "jpg": b"?"}, "c": small})
    keys = [tmp_path / "out", "min_side_px=64"]
    assert make(tar, *keys) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("found 3 samples, wrote 1, skipped 1 (not an image: 1), left out 1 (side below 64 px: 1); ")
    assert said.endswith(f"; in {tmp_path}/out; reasons: {tmp_path}/out/skipped.jsonl")
    (tmp_path / "1.tar").write_bytes(tar.read_bytes()[: 3 * BLOCK])
    assert make(tar, tmp_path / "1.tar", tmp_path / "two", *keys[1:]) == 1
    counts = facts(tmp_path / "two")["counts"]
    assert counts["read"] == counts["written"] + sum(sum(counts[name].values()) for name in ("skipped", "left_out"))
    assert make(tar, tmp_path / "1.tar", tmp_path / "two", *keys[1:]) == 1  # a second start says it again


@pytest.mark.parametrize("suffix", ["csv", "jsonl", "folder", "json"])
def test_a_byte_order_mark_is_no_part_of_a_caption(tmp_path: Path, suffix):
    mark, image = b"\xef\xbb\xbf", picture(0)
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jpg").write_bytes(image)
    text = {
        "csv": mark + b"image,caption\na.jpg," + mark + b"a cat\n",
        "jsonl": mark + b'{"image": "a.jpg", "caption": "\\ufeffa cat"}\n',
        "folder": mark + b"a cat",
        "json": mark + b'{"caption": "\\ufeff a cat"}',
    }[suffix]
    name = {"folder": "a.txt", "json": "a.json"}.get(suffix, f"t.{suffix}")
    (tmp_path / "in" / name).write_bytes(text)
    source = tmp_path / "in" / (name if name.startswith("t.") else "")
    assert make(source, tmp_path / "out", *(["caption=json:caption"] if suffix == "json" else [])) == 0
    [row] = rows(tmp_path / "out")
    assert row["caption"] == "a cat" and row["jpg"] == image
