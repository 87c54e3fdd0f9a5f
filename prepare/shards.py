"""Turn image-caption pairs as img2dataset writes them into the stage `images`.

    python -m prepare.shards SOURCE... OUT
    python -m prepare.shards laion/00000.tar laion/00001.tar /data/laion_images
    python -m prepare.shards laion/ /data/laion_images shard_size=64mb

SOURCE: a tar, a folder of tars, or a folder of files. A sample is the files of one key: KEY.jpg, .png or .webp (the image),
KEY.txt (the caption), and KEY.json (metadata, optional); a key ends at the first dot. OUT: a folder that does not exist
yet, or an empty one.

The image's bytes are stored as they are, never encoded again; each is decoded once to know that it can be. A sample that
cannot be used is skipped, named with its reason in OUT/skipped.jsonl, and counted; training will not meet it.
The work goes on in OUT.partial and is renamed at its end: OUT is either whole or not there.
Exit code: 0 when at least one sample was written, 1 when none was, 2 when it could not start.
"""

from __future__ import annotations

import json
import lzma
import shutil
import sys
import tarfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import IO, Any

from streaming import MDSWriter
from streaming.base.util import bytes_to_int
from tqdm import tqdm

from data import SampleError, check_caption, decode_image
from preflight import unwritable
from stream import HASH, is_remote, write_facts

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
COLUMNS = {"jpg": "bytes", "caption": "str", "key": "str", "width": "int", "height": "int", "metadata": "json"}


@dataclass
class Sample:
    """The files of one key, as bytes by suffix."""

    source: str
    key: str
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Account:
    """What became of every sample and source; the counters are by reason."""

    read: int = 0
    written: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    bad_sources: Counter[str] = field(default_factory=Counter)
    ignored: list[str] = field(default_factory=list)
    """Files that belong to no sample."""

    @property
    def skipped(self) -> int:
        return sum(self.reasons.values())

    def __str__(self) -> str:
        why = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.reasons.items()))
        sources = ", ".join(f"{reason}: {count}" for reason, count in sorted(self.bad_sources.items()))
        return (
            f"read {self.read:,} samples, wrote {self.written:,}, skipped {self.skipped:,}"
            + (f" ({why})" if why else "")
            + (f"; sources with a fault: {self.bad_sources.total()} ({sources})" if sources else "")
            + (f"; files of no sample: {len(self.ignored):,}, e.g. {self.ignored[0]}" if self.ignored else "")
        )


# ---------------------------------------------------------------------------------------------------------------------
# Reading img2dataset's layout
# ---------------------------------------------------------------------------------------------------------------------


def find_sources(paths: Sequence[Path]) -> list[Path]:
    """Return tars and folders of files in a fixed order; a folder is looked through to one level below it.

    Raises:
        ValueError: a path that is neither, or a folder that holds neither.
    """
    sources = []
    for path in paths:
        if path.is_dir():
            folders = [
                folder for folder in (path, *sorted(path.iterdir())) if folder.is_dir() and _holds_images(folder)
            ]
            found = [*sorted(path.glob("*.tar")), *folders]
            if not found:
                possible = "a tar, a folder of tars, a folder of KEY.jpg, KEY.txt"
                raise ValueError(f"{path}: holds neither tars nor images. Possible: {possible}.")
            sources += found
        elif path.is_file():
            sources.append(path)
        else:
            raise ValueError(f"{path}: no such file or folder. Possible: a tar, a folder of tars, a folder of files.")
    return sources


def _holds_images(folder: Path) -> bool:
    return any(child.suffix.lstrip(".").lower() in IMAGE_SUFFIXES for child in folder.iterdir())


class SourceError(ValueError):
    """What is wrong with a source itself; the message is the reason, in a few words."""


def read_source(source: Path, ignore: Callable[[str], None]) -> Iterator[Sample]:
    """Yield the samples of one source in order; the files of a key have to follow one another, as img2dataset has them.

    Args:
        source: a tar, or a folder of files.
        ignore: is told each file that belongs to no sample.

    Raises:
        SourceError: the source cannot be read to its end (samples before that are yielded), or has no sample.
    """
    sample = None
    try:
        for key, suffix, content in _tar_files(source, ignore) if source.is_file() else _folder_files(source, ignore):
            part = "image" if suffix in IMAGE_SUFFIXES else suffix
            # The same part again is another sample of the same key: it will be named as a duplicate, not swallowed.
            if sample is None or sample.key != key or part in sample.files:
                if sample is not None:
                    yield sample
                sample = Sample(source.name, key)
            sample.files[part] = content
    except (tarfile.TarError, EOFError, OSError, zlib.error, lzma.LZMAError) as error:
        if sample is not None:
            yield sample
        raise SourceError("cannot be read to its end") from error
    if sample is None:
        raise SourceError("has no sample")
    yield sample


def _key_and_suffix(name: str) -> tuple[str, str] | None:
    """Split a file's name by WebDataset's convention, which img2dataset follows: the key ends at the first dot."""
    path = PurePosixPath(name)
    stem, _, suffix = path.name.partition(".")
    suffix = suffix.lower()
    return (str(path.with_name(stem)), suffix) if stem and suffix in (*IMAGE_SUFFIXES, "txt", "json") else None


def _tar_files(source: Path, ignore: Callable[[str], None]) -> Iterator[tuple[str, str, bytes]]:
    with tarfile.open(source, mode="r|*") as tar:
        for member in tar:
            if member.isdir():
                continue
            # A link is left out: a stream cannot go back to its target.
            named = _key_and_suffix(member.name) if member.isfile() else None
            if named is None:
                ignore(member.name)
            else:
                extracted = tar.extractfile(member)
                assert extracted is not None
                yield (*named, extracted.read())


def _folder_files(source: Path, ignore: Callable[[str], None]) -> Iterator[tuple[str, str, bytes]]:
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is neither a file nor a folder")
    for path in sorted(source.iterdir()):
        if path.is_dir() or path.suffix == ".tar":
            continue  # sources of their own
        named = _key_and_suffix(path.name) if path.is_file() else None
        if named is None:
            ignore(path.name)
        else:
            yield (*named, path.read_bytes())


def to_row(sample: Sample) -> dict[str, Any]:
    """Check one sample and return its MDS row. Raises SampleError: it cannot be used."""
    try:
        sample.key.encode()
    except UnicodeEncodeError as error:
        raise SampleError("key is not UTF-8") from error
    if "image" not in sample.files:
        raise SampleError("missing image")
    image = decode_image(sample.files["image"])
    if "txt" not in sample.files:
        raise SampleError("missing caption")
    try:
        caption = check_caption(sample.files["txt"].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SampleError("caption is not UTF-8") from error
    try:
        metadata = json.loads(sample.files.get("json", b"{}"))
    except (ValueError, RecursionError) as error:
        raise SampleError("metadata is not JSON") from error
    return {
        "jpg": sample.files["image"],
        "caption": caption,
        "key": sample.key,
        "width": image.width,
        "height": image.height,
        "metadata": metadata,
    }


# ---------------------------------------------------------------------------------------------------------------------
# Writing the stage
# ---------------------------------------------------------------------------------------------------------------------


def write_stage(sources: Sequence[Path], out: Path, shard_size: int) -> Account:
    """Write `images` from all sources to `out`, and return the account. No stage stays when no sample could be written."""
    account, partial = Account(), out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    with (
        MDSWriter(out=str(partial), columns=COLUMNS, hashes=[HASH], size_limit=shard_size) as writer,
        open(partial / "skipped.jsonl", "w") as skipped,
        tqdm(unit=" samples", desc=f"{len(sources)} sources") as progress,
    ):
        for source in sources:
            _write_source(source, writer, account, skipped, progress)
    if not account.written:
        shutil.copy(partial / "skipped.jsonl", out.with_name(out.name + ".skipped.jsonl"))
        shutil.rmtree(partial)
        return account
    write_facts(
        partial,
        "images",
        {
            "made_by": "prepare.shards",
            "sources": [{"name": source.name, "bytes": _num_bytes(source)} for source in sources],
            "counts": {
                "read": account.read,
                "written": account.written,
                "skipped": dict(account.reasons),
                "bad_sources": dict(account.bad_sources),
                "ignored_files": len(account.ignored),
            },
        },
    )
    if out.exists():
        out.rmdir()  # it was found empty
    partial.rename(out)
    return account


def _write_source(source: Path, writer: MDSWriter, account: Account, skipped: IO[str], progress: tqdm) -> None:
    """Write one source's samples; what cannot be used is named in the list of skipped ones with its reason."""

    def skip(key: str | None, reason: str, counts: Counter[str]) -> None:
        counts[reason] += 1
        skipped.write(json.dumps({"source": source.name, "key": key, "reason": reason}) + "\n")

    seen: set[str] = set()
    try:
        for sample in read_source(source, account.ignored.append):
            account.read += 1
            progress.update()
            try:
                if sample.key in seen:
                    raise SampleError("duplicate key")
                writer.write(to_row(sample))
            except SampleError as error:
                skip(sample.key, str(error), account.reasons)
            else:
                account.written += 1
                seen.add(sample.key)
    except SourceError as error:
        skip(None, str(error), account.bad_sources)


def _num_bytes(source: Path) -> int:
    files = source.iterdir() if source.is_dir() else [source]
    return sum(file.stat().st_size for file in files if file.is_file())


def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0 if argv else 2
    keys = dict(word.split("=", 1) for word in argv if "=" in word)
    paths = [word for word in argv if "=" not in word]
    problems = [
        f"command line: unknown key '{key}'. Known: shard_size (e.g. shard_size=64mb)."
        for key in keys
        if key != "shard_size"
    ]
    try:
        shard_size = bytes_to_int(keys.get("shard_size", "64mb"))
    except ValueError:
        shard_size = -1
    if not 1024 <= shard_size < 2**32:  # an MDS shard counts its bytes in 32 bits
        problems.append(f"command line: shard_size is '{keys['shard_size']}'. Possible: 1kb to 4gb, e.g. 64mb.")
    sources: list[Path] = []
    if len(paths) < 2:
        problems.append("command line: SOURCE... and OUT have to be given. python -m prepare.shards --help says more.")
    else:
        try:
            sources = find_sources([Path(path) for path in paths[:-1]])
        except ValueError as error:
            problems.append(str(error))
        problems += _out_problems(paths[-1])
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    try:
        account = write_stage(sources, Path(paths[-1]), shard_size)
    except OSError as error:
        print(
            f"OUT: {paths[-1]} cannot be written: {error}. Nothing was kept but {paths[-1]}.partial.", file=sys.stderr
        )
        return 1
    where = f"in {paths[-1]}" if account.written else f"nothing written; why is in {paths[-1]}.skipped.jsonl"
    print(f"{account}; {where}")
    return 0 if account.written else 1


def _out_problems(out: str) -> list[str]:
    """Say why the finished stage could not be put in place: found before the work, not after it."""
    path = Path(out)
    if is_remote(out):
        return [f"OUT: {out} is in a store. This version writes folders; copy the finished one."]
    if path.is_symlink() or path.is_mount() or path.resolve() == Path.cwd():
        return [
            f"OUT: {out} is a link, a mount point or the current folder, which cannot be replaced. Give a folder in it."
        ]
    if path.is_file() or (path.is_dir() and any(path.iterdir())):
        return [f"OUT: {out} exists and is not empty. Give a new folder, or remove it."]
    text = unwritable(path.parent)
    return [f"OUT: {text}"] if text else []


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
