"""Read samples from tars and folders of files: KEY.jpg, KEY.txt, KEY.json, or other suffixes; KEY.npy for stored moments.

Nothing is extracted to disk. A tar is read as a stream, so a member's name is only used as a key. Tables are in tables.py,
Hugging Face data sets in hub_datasets.py; `Source` is what all of them are to prepare/shards.py.
"""

from __future__ import annotations

import contextlib
import functools
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from cli.errors import Failed, Refused
from prepare.objects import Objects, StoreObject
from prepare.parts import GO_ON
from prepare.samples import Sample, Taken, column_of

MOMENTS_SUFFIX = "npy"
IMG2DATASET = Taken()
ALWAYS = {MOMENTS_SUFFIX, "json"}  # parts of a sample whatever the captions are
MAX_MEMBER_BYTES = 2**28  # 256 MiB, far more than any image


class SourceError(ValueError):
    """A source itself is bad; the message is the reason, in a few words."""


class Source:
    """One input: what a part is made from. It is given to worker processes, and holds no open file."""

    name: str
    """In plan.json and in reports."""

    def known_by(self) -> dict[str, Any]:
        """Return what identifies the input in a plan: its name and more. Raises OSError."""
        raise NotImplementedError

    def read(self, taken: Taken | None, folder: Path, ignore: Callable[[str], None]) -> Iterator[Sample]:
        """Yield the samples in order.

        Args:
            taken: the parts that are wanted; None: all that there are.
            folder: for files that have to be fetched.
            ignore: called with each file that belongs to no sample.

        Raises:
            SourceError: it is not readable to its end (samples before that are yielded), or has no sample.
            Failed: an error of the disk or the network; the next try may succeed.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Files(Source):
    """A tar; folders of files are in folders.py."""

    path: Path

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.path.name

    def known_by(self) -> dict[str, Any]:
        return known_by(self.path)

    def read(self, taken: Taken | None, folder: Path, ignore: Callable[[str], None]) -> Iterator[Sample]:
        return read_source(self.path, ignore, taken)


@dataclass(frozen=True)
class TarObject(Source):
    """A tar in a store; it is fetched when it is read."""

    object: StoreObject

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.object.name

    def known_by(self) -> dict[str, Any]:
        return self.object.known_by()

    def read(self, taken: Taken | None, folder: Path, ignore: Callable[[str], None]) -> Iterator[Sample]:
        return read_source(Objects().fetch(self.object.address, folder), ignore, taken)


@contextlib.contextmanager
def damage_told(source: str) -> Iterator[None]:
    """Turn what a decoder raises into SourceError, and an error of the disk or the network into Failed."""
    try:
        yield
    except (Failed, Refused, SourceError):
        raise
    except Exception as error:  # decoders raise a dozen classes
        if isinstance(error, OSError) and error.errno is not None:  # of the disk or the network, not the content
            raise Failed(f"SOURCE: {source} cannot be read: {error}. {GO_ON}.") from error
        raise SourceError("cannot be read to its end") from error


def known_by(source: Path) -> dict[str, Any]:
    """Return what identifies a file in a plan: name, size, and a digest of its ends."""
    num_bytes = source.stat().st_size if source.is_file() else 0  # the others are named when they are read
    digest = xxhash.xxh3_64(f"{source.name} {num_bytes}\n".encode(errors="surrogateescape"))
    if source.is_file():
        with open(source, "rb") as file:
            digest.update(file.read(2**20))
            file.seek(max(0, num_bytes - 2**20))
            digest.update(file.read(2**20))
    return {"name": source.name, "bytes": num_bytes, "digest": digest.hexdigest()}


def read_source(
    source: Path, ignore: Callable[[str], None], taken: Taken | None = IMG2DATASET, names: Sequence[str] | None = None
) -> Iterator[Sample]:
    """Yield the samples of a tar or a folder of files in order, see `Source.read`.

    A key's files have to be adjacent, as img2dataset writes them. `names`: of the folder's files, those that are read.
    """
    sample = None
    wanted = None if taken is None else {name.partition(":")[0] for name in taken.names} | ALWAYS
    files = _tar_files if source.is_file() else functools.partial(_folder_files, names)
    try:
        with damage_told(str(source)):
            for key, part, content in files(source, wanted, ignore):
                # A second file of the same type is another sample with the same key: it will be reported as a duplicate.
                if sample is None or sample.key != key or part in sample.files:
                    if sample is not None:
                        yield sample
                    sample = Sample(key)
                sample.files[part] = content
    except SourceError:
        if sample is not None:
            yield sample
        raise
    if sample is None:
        raise SourceError("has no sample")
    yield sample


def _key_and_part(name: str, wanted: set[str] | None) -> tuple[str, str] | None:
    """Split a file's name by WebDataset's convention, which img2dataset follows: the key ends at the first dot."""
    path = PurePosixPath(name)
    stem, _, suffix = path.name.partition(".")
    part = column_of(suffix)
    return (str(path.with_name(stem)), part) if stem and suffix and (wanted is None or part in wanted) else None


class StrictInfo(tarfile.TarInfo):
    """A member's header that raises if a tar is cut off; tarfile itself silently treats that as the end."""

    @classmethod
    def fromtarfile(cls, tar: tarfile.TarFile) -> tarfile.TarInfo:
        at = tar.offset
        try:
            return super().fromtarfile(tar)
        except tarfile.EOFHeaderError:
            raise  # the block that ends a tar
        except tarfile.EmptyHeaderError as error:
            if at == 0:
                raise
            raise tarfile.ReadError("no end of archive") from error
        except tarfile.InvalidHeaderError as error:
            raise tarfile.ReadError("damaged header") from error


def _tar_files(
    source: Path, wanted: set[str] | None, ignore: Callable[[str], None]
) -> Iterator[tuple[str, str, bytes]]:
    with tarfile.open(source, mode="r|*", tarinfo=StrictInfo) as tar:
        for member in tar:
            if member.isdir():
                continue
            # Links are skipped: a stream cannot go back to a link's target. Very large members are skipped too: a few bytes
            # of a compressed or sparse tar can claim any size and would fill the memory.
            is_plain = member.isfile() and not member.issparse() and member.size <= MAX_MEMBER_BYTES
            named = _key_and_part(member.name, wanted) if is_plain else None
            if named is None:
                ignore(member.name)
            else:
                extracted = tar.extractfile(member)
                assert extracted is not None
                yield (*named, extracted.read())


def _folder_files(
    names: Sequence[str] | None, source: Path, wanted: set[str] | None, ignore: Callable[[str], None]
) -> Iterator[tuple[str, str, bytes]]:
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is neither a file nor a folder")
    for path in sorted(source.iterdir() if names is None else map(source.joinpath, names)):
        if path.is_dir() or path.suffix == ".tar":
            continue  # separate sources
        is_one = path.is_file() and (wanted is not None or path.stat().st_size <= MAX_MEMBER_BYTES)
        named = _key_and_part(path.name, wanted) if is_one else None
        if named is None:
            ignore(path.name)
        else:
            yield (*named, path.read_bytes())
