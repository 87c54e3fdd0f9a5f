"""Read samples from tars and folders of files: KEY.jpg, KEY.txt, KEY.json, or other suffixes; KEY.npy for stored moments.

Nothing is extracted to disk. A tar is read as a stream, so a member's name is only used as a key. Tables are in tables.py,
Hugging Face data sets in hub_datasets.py; `Source` is what all of them are to prepare/shards.py.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from cli.errors import Failed, Refused
from prepare.counts import EMPTY
from prepare.objects import Objects, StoreObject
from prepare.parts import GO_ON
from prepare.samples import VIDEO_SUFFIXES, Sample, SourceError, Taken, column_of
from prepare.tars import MAX_MEMBER_BYTES, is_tar, members, open_tar
from stages.image_files import IMAGE_SUFFIXES

MOMENTS_SUFFIX = "npy"
IMG2DATASET = Taken()
SAMPLES_PER_PART, BYTES_PER_PART = 1000, 2**30  # of a folder of files; of videos fewer are a part
SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, MOMENTS_SUFFIX)
"""Of the file that makes a sample."""
ALWAYS = {MOMENTS_SUFFIX, "json"}  # parts of a sample whatever the captions are
NO_NAME = "has no name of the form KEY.SUFFIX"
NOT_ADJACENT = "files of one key are not adjacent; repack with tar --sort=name"
Ignore = Callable[[str, str | None], None]
"""Called with a file's name and why it belongs to no sample; None: its sample has no use for it."""


class Source:
    """One input: what a part is made from. It is given to worker processes, and holds no open file."""

    name: str
    """In plan.json and in reports."""

    def known_by(self) -> dict[str, Any]:
        """Return what identifies the input in a plan: its name and more. Raises OSError."""
        raise NotImplementedError

    def read(self, taken: Taken | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        """Yield the samples in order.

        Args:
            taken: the parts that are wanted; None: all that there are.
            folder: for files that have to be fetched.
            ignore: called with each file that is not read.

        Raises:
            SourceError: it is not readable to its end (samples before that are yielded), or has no sample.
            Failed: an error of the disk or the network; the next try may succeed.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class Located(Source):
    """A file here, or an object in a store, which is fetched when it is read."""

    place: Path | StoreObject

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.place.name

    def known_by(self) -> dict[str, Any]:
        return known_by(self.place) if isinstance(self.place, Path) else self.place.known_by()

    def here(self, folder: Path) -> tuple[Path, str]:
        """Return the file, in `folder` if it had to be fetched, and its address."""
        if isinstance(self.place, Path):
            return self.place, str(self.place)
        return Objects().fetch(self.place.address, folder), self.place.address


class Files(Located):
    """A tar."""

    def read(self, taken: Taken | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        return read_source(self.here(folder)[0], ignore, taken)


@dataclass(frozen=True)
class FolderPart(Source):
    """Some files of a folder.

    sizes: bytes of each file, by name.
    """

    path: Path
    name: str
    sizes: Mapping[str, int]

    def known_by(self) -> dict[str, Any]:
        content = "\0".join(f"{size} {name}" for name, size in self.sizes.items()).encode(errors="surrogateescape")
        digest = xxhash.xxh3_64_hexdigest(content)
        return {"name": self.name, "bytes": sum(self.sizes.values()), "digest": digest, "folder": self.path.name}

    def read(self, taken: Taken | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        return read_source(self.path, ignore, taken, list(self.sizes))


def cut_folder(path: Path) -> list[Source]:
    """Cut a folder into parts. Raises OSError: it cannot be read."""
    entries = (file for file in path.iterdir() if not file.is_dir())  # a link to itself is neither
    sizes = {file.name: file.stat().st_size if file.is_file() else 0 for file in entries}
    parts: list[dict[str, int]] = [{}]
    num_samples = num_bytes = 0
    names = sorted(sizes, key=lambda name: (PurePosixPath(name).stem, name))
    for _, of_key in itertools.groupby(names, lambda name: PurePosixPath(name).stem):
        files = {name: sizes[name] for name in of_key}
        # A part begins with a sample, so that there is none without: other files belong to the part before.
        is_sample = any(PurePosixPath(name).suffix[1:].lower() in SUFFIXES for name in files)
        if is_sample and (num_samples == SAMPLES_PER_PART or (num_samples and num_bytes >= BYTES_PER_PART)):
            parts.append({})
            num_samples = num_bytes = 0
        parts[-1] |= files
        num_samples += is_sample
        num_bytes += sum(files.values())
    many = f", part {{}} of {len(parts)}" if len(parts) > 1 else ""
    return [FolderPart(path, path.name + many.format(number), part) for number, part in enumerate(parts, 1)]


@contextlib.contextmanager
def damage_told(source: str, lost: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn what a decoder raises into SourceError, and an error of the disk or the network into Failed.

    Args:
        lost: how many samples are known to be left then.
    """
    try:
        yield
    except (Failed, Refused, SourceError):
        raise
    except Exception as error:  # decoders raise a dozen classes
        if isinstance(error, OSError) and error.errno is not None:  # of the disk or the network, not the content
            raise Failed(f"SOURCE: {source} cannot be read: {error}. {GO_ON}.") from error
        raise SourceError("cannot be read to its end", lost()) from error


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
    source: Path, ignore: Ignore, taken: Taken | None = IMG2DATASET, names: Sequence[str] | None = None
) -> Iterator[Sample]:
    """Yield the samples of a tar or a folder of files in order, see `Source.read`.

    A key's files have to be adjacent in a tar, as img2dataset writes them: what else lies apart is ignored, and is a fault
    of the tar. `names`: of a folder's files those to read.
    """
    wanted = None if taken is None else {name.partition(":")[0] for name in taken.names} | ALWAYS
    files = _tar_files(source, wanted, ignore) if source.is_file() else _folder_files(source, wanted, ignore, names)
    parts: dict[str, frozenset[str]] = {}
    kinds: dict[frozenset[str], frozenset[str]] = {}  # a tar may have millions of keys with the same parts
    is_scattered = False
    for key, of_key in itertools.groupby(_checked(files, str(source)), operator.itemgetter(0)):
        sample, not_read, names_read = Sample(key), [], []
        try:
            for _, part, name, content in of_key:
                if content is None:
                    not_read.append(name)
                    continue
                names_read.append(name)
                if part in sample.files:  # another sample with the same key: it will be reported as a duplicate
                    yield sample
                    sample = Sample(key)
                sample.files[part] = content
        except SourceError:
            if sample.files:
                yield sample
            raise
        for name in not_read:
            ignore(name, None if sample.files else NOT_ADJACENT if key in parts else "belongs to no sample")
        if not sample.files:
            continue
        if key in parts and not parts[key] & sample.files.keys():
            is_scattered = True
            for name in names_read:
                ignore(name, NOT_ADJACENT)
            continue
        of_sample = parts.get(key, frozenset()).union(sample.files)
        parts[key] = kinds.setdefault(of_sample, of_sample)
        yield sample
    if is_scattered:
        raise SourceError(NOT_ADJACENT)
    if not parts:
        raise SourceError(EMPTY)


Named = tuple[str, str, str, bytes | None]
"""Of a file: the key, the part, its own name, and its content; None: it is not wanted."""


def _checked(files: Iterator[Named], source: str) -> Iterator[Named]:
    with damage_told(source):
        yield from files


def _tar_files(source: Path, wanted: set[str] | None, ignore: Ignore) -> Iterator[Named]:
    """Yield a tar's files. The key ends at the first dot: WebDataset's convention, which img2dataset follows."""
    with open_tar(source) as tar:
        for member, problem in members(tar):
            path = PurePosixPath(member.name)
            stem, _, suffix = path.name.partition(".")
            problem = problem or (None if stem and suffix else NO_NAME)
            if problem is not None:
                ignore(member.name, problem)
                continue
            part = column_of(suffix)
            is_wanted = wanted is None or part in wanted
            yield str(path.with_name(stem)), part, member.name, tar.extractfile(member).read() if is_wanted else None


def _folder_files(
    source: Path, wanted: set[str] | None, ignore: Ignore, names: Sequence[str] | None = None
) -> Iterator[Named]:
    """Yield a folder's files, or those of some names. The key is the stem: `10.21.33.png` goes with `10.21.33.txt`."""
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is neither a file nor a folder")
    paths = source.iterdir() if names is None else map(source.joinpath, names)
    for path in sorted(paths, key=lambda path: (path.stem, path.suffix)):
        if path.is_dir() or is_tar(path.name):
            continue  # separate sources
        problem = None if path.suffix[1:] else NO_NAME
        if not path.is_file():
            problem = "is no plain file"
        elif (wanted is None or not _is_video(path)) and path.stat().st_size > MAX_MEMBER_BYTES:
            problem = f"has more than {MAX_MEMBER_BYTES // 2**20} MiB"
        if problem is not None:
            ignore(path.name, problem)
            continue
        part = column_of(path.suffix[1:])
        is_wanted = wanted is None or part in wanted
        yield path.stem, part, path.name, path.read_bytes() if is_wanted else None


def _is_video(path: Path) -> bool:
    return path.suffix[1:].lower() in VIDEO_SUFFIXES
