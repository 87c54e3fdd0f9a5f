"""prepare/sources.py: tars as strangers make them, compared with tarfile; joined, unsorted, hostile; folders."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import picture, sample_files, write_tar
from test_shards import rows, skipped
from test_sources import make

from prepare.samples import SourceError
from prepare.sources import MAX_HEADER_BYTES, NOT_ADJACENT, iter_members, open_tar

LONG = "a" * 90 + "/" + "b" * 120 + "/ä\udcff" + "c" * 200
CLAIMED = 3 * 2**29
BLOCK = tarfile.BLOCKSIZE


def tar_of(
    files: Mapping[str, bytes], how: int = tarfile.GNU_FORMAT, links: Iterable[tuple] = (), **options: Any
) -> bytes:
    """A tar of these files and links: name, type and target of each."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w", format=how, **options) as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 0.5
            tar.addfile(member, io.BytesIO(content))
        for name, kind, target in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
    return data.getvalue()


def read_all(data: bytes) -> dict[str, bytes | None]:
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(data)
        with open_tar(Path(file.name)) as tar:
            return {one.name: None if problem else tar.extractfile(one).read() for one, problem in iter_members(tar)}


# --- what tarfile reads ---


@pytest.mark.parametrize("how", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_names_and_contents_are_those_that_tarfile_reads_in_every_format(how):
    names = ["x.jpg", "sub/y.txt", "ä.txt", "d\udcff.txt", "z" * 100, *([] if how == tarfile.USTAR_FORMAT else [LONG])]
    files = {name: bytes(range(256)) * number for number, name in enumerate(names)}
    kinds = {"folder": tarfile.DIRTYPE, "soft": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}
    links = [(name, kind, names[0] if how == tarfile.USTAR_FORMAT else LONG) for name, kind in kinds.items()]
    data = tar_of(files, how, links, pax_headers={"comment": "of git"})
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert {member.name: tar.extractfile(member).read() for member in tar if member.isreg()} == files
    assert read_all(data) == {**files, "soft": None, "hard": None}


@pytest.mark.parametrize("compress", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_tar_is_read_also_where_two_were_joined(compress):
    one, two = (tar_of({f"{n}.txt": b"x" * n}) for n in (1, 2))
    assert list(read_all(compress(one) + compress(two)).items()) == [("1.txt", b"x"), ("2.txt", b"xx")]


# --- hostile headers ---


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE])
def test_extended_headers_are_held_for_one_file_only_and_are_few(kind):
    extended = extended_header(b"14 path=x.txt\n", kind)
    with pytest.raises(SourceError, match="^has more than 8 extended headers of one file$"):
        read_all(extended * 9 + tar_of({"a.txt": b"a"}))
    first = "x.txt" if kind == tarfile.XHDTYPE else "a.txt"
    assert read_all(extended * 8 + tar_of({"a.txt": b"a", "b.txt": b"b"})) == {first: b"a", "b.txt": b"b"}


def extended_header(record: bytes, kind: bytes = tarfile.XHDTYPE) -> bytes:
    return header(kind, len(record)) + record + bytes(-len(record) % BLOCK)


def header(kind: bytes, size: int) -> bytes:
    member = tarfile.TarInfo("x")
    member.type, member.size = kind, size
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_an_extended_header_that_claims_a_gigabyte_is_refused_unread(kind):
    with pytest.raises(SourceError, match="^has an extended header of more than 1 MiB$"):
        read_all(header(kind, CLAIMED) + bytes(2**20))
    with pytest.raises(tarfile.ReadError):
        read_all(header(kind, -5))
    record = b"path=" + b"p/" * (MAX_HEADER_BYTES // 2 - 20) + b"a.txt\n"  # just short of it
    [name] = read_all(extended_header(b"%d " % (len(record) + 8) + record) + tar_of({"a.txt": b"a"}))
    assert name.endswith("p/a.txt") and len(name) > 10**6


# --- samples ---


def test_a_tar_whose_images_and_captions_lie_apart_is_reported_with_how_to_repack_it(tmp_path, capsys):
    def fault_of(files: Mapping[str, bytes], out: Path) -> list[tuple]:
        (tmp_path / "in.tar").write_bytes(tar_of(files))
        assert make(tmp_path / "in.tar", out) == 1
        assert "sources with a fault: 1 (files of one key are not adjacent; repack with tar" in capsys.readouterr().out
        *reasons, of_tar = skipped(out / "skipped.jsonl")
        assert of_tar == ("in.tar", None, NOT_ADJACENT)
        return [entry[1:] for entry in reasons]

    apart = [(f"{n}", "missing caption") for n in range(3)] + [(f"{n}.txt", NOT_ADJACENT) for n in range(3)]
    files = {f"{n}.jpg": picture(n) for n in range(3)} | {f"{n}.txt": b"x" for n in range(3)}
    assert fault_of(files, tmp_path / "out") == apart
    files = {f"{n}.{suffix}": content for n in range(3) for suffix, content in sample_files(n).items()}
    files["1.json"] = files.pop("1.json")
    assert fault_of(files, tmp_path / "late") == [("1.json", NOT_ADJACENT)] and len(rows(tmp_path / "late")) == 3


def test_a_folders_key_ends_at_the_last_dot_and_a_tars_at_the_first(tmp_path):
    names, folder = ["plain", "Shot 10.21.33", "Shot 10.21.34", "cat", "cat.v1", "cat-2"], tmp_path / "in"
    folder.mkdir()
    files = {f"{name}.jpg": picture(number) for number, name in enumerate(names)}
    files |= {f"{name}.txt": name.encode() for name in names}
    for name, content in {**files, ".DS_Store": b"x", "README": b"x", "notes.md": b"x", "cat.cls": b"3"}.items():
        (folder / name).write_bytes(content)
    assert make(folder, tmp_path / "out") == 0
    written = {row["key"]: (row["jpg"], row["caption"]) for row in rows(tmp_path / "out")}
    assert written == {name: (files[f"{name}.jpg"], name) for name in names}
    nameless = "has no name of the form KEY.SUFFIX"
    reasons = [(".DS_Store", nameless), ("README", nameless), ("notes.md", "belongs to no sample")]
    assert [entry[1:] for entry in skipped(tmp_path / "out" / "skipped.jsonl")] == reasons
    (tmp_path / "in.tar").write_bytes(tar_of({name: files[name] for name in sorted(files)}))
    assert make(tmp_path / "in.tar", tmp_path / "tar") == 0
    assert {row["key"] for row in rows(tmp_path / "tar")} == {"plain", "cat", "cat-2"}


def test_compressed_tars_of_a_folder_are_sources_and_what_lies_too_deep_is_named(tmp_path, capsys):
    for number, suffix in enumerate(("tar", "tar.gz", "tgz")):
        tar = write_tar(tmp_path / "in" / f"{number}.{suffix}", {f"{number}": sample_files(number)})
        if number:
            tar.write_bytes(gzip.compress(tar.read_bytes()))
    write_tar(tmp_path / "in" / "sub" / "deep.tar", {"a": sample_files(1)})
    (tmp_path / "in" / "3.tar").write_bytes(gzip.compress(header(tarfile.XHDTYPE, CLAIMED) + bytes(2**16)))
    assert make(tmp_path / "in", tmp_path / "out") == 1
    assert [row["key"] for row in rows(tmp_path / "out")] == ["0", "1", "2"]
    hostile = ("3.tar", None, "has an extended header of more than 1 MiB")
    assert skipped(tmp_path / "out" / "skipped.jsonl") == [hostile]
    assert f"in: too deep in it to be read: {tmp_path}/in/sub/deep.tar. Give each" in capsys.readouterr().err
