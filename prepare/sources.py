"""Read samples from img2dataset's files: tars or folders of KEY.jpg, KEY.txt, KEY.json; or KEY.npy for stored moments.

Nothing is extracted to disk. A tar is read as a stream, so a member's name is only used as a key.
"""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from cli.errors import Failed
from prepare.parts import GO_ON
from stages.images import SampleError, check_caption

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
MOMENTS_SUFFIX = "npy"
MAX_MEMBER_BYTES = 2**28  # 256 MiB, far more than any image
SUFFIXES = (*IMAGE_SUFFIXES, MOMENTS_SUFFIX, "txt", "json")


@dataclass
class Sample:
    """The files of one key, as bytes by suffix; all image suffixes are "image"."""

    key: str
    files: dict[str, bytes] = field(default_factory=dict)


class SourceError(ValueError):
    """A source itself is bad; the message is the reason, in a few words."""


def find_sources(paths: Sequence[Path]) -> list[Path]:
    """Return tars and folders of files in a fixed order; folders are searched one level deep.

    Raises:
        ValueError: a path is neither, or a folder contains neither.
    """
    sources = []
    for path in paths:
        if path.is_dir():
            folders = [folder for folder in (path, *sorted(path.iterdir())) if _holds_samples(folder)]
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


def _holds_samples(folder: Path) -> bool:
    suffixes = (*IMAGE_SUFFIXES, MOMENTS_SUFFIX)
    return folder.is_dir() and any(child.suffix.lstrip(".").lower() in suffixes for child in folder.iterdir())


def known_by(source: Path) -> dict[str, Any]:
    """Return what identifies a source in a plan: name, size, and a digest of a tar's ends or a folder's names and sizes."""
    digest = xxhash.xxh3_64()
    files = [file for file in sorted(source.iterdir()) if file.is_file()] if source.is_dir() else [source]
    num_bytes = 0
    for file in files:
        size = file.stat().st_size if file.is_file() else 0
        digest.update(f"{file.name} {size}\n".encode(errors="surrogateescape"))
        num_bytes += size
    if source.is_file():
        with open(source, "rb") as file:
            digest.update(file.read(2**20))
            file.seek(max(0, num_bytes - 2**20))
            digest.update(file.read(2**20))
    return {"name": source.name, "bytes": num_bytes, "digest": digest.hexdigest()}


def read_source(source: Path, ignore: Callable[[str], None]) -> Iterator[Sample]:
    """Yield the samples of one source in order. A key's files have to be adjacent, as img2dataset writes them.

    Args:
        source: a tar, or a folder of files.
        ignore: called with each file that belongs to no sample.

    Raises:
        SourceError: the source is not readable to its end (samples before that are yielded), or has no sample.
        Failed: an error of the disk or the network; the next try may succeed.
    """
    sample = None
    try:
        for key, suffix, content in _tar_files(source, ignore) if source.is_file() else _folder_files(source, ignore):
            part = "image" if suffix in IMAGE_SUFFIXES else suffix
            # A second file of the same type is another sample with the same key: it will be reported as a duplicate.
            if sample is None or sample.key != key or part in sample.files:
                if sample is not None:
                    yield sample
                sample = Sample(key)
            sample.files[part] = content
    except Exception as error:  # tarfile passes on all errors of its decoders and header parsing
        if isinstance(error, OSError) and error.errno is not None:  # of the disk or the network, not the content
            raise Failed(f"SOURCE: {source} cannot be read: {error}. {GO_ON}.") from error
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
    return (str(path.with_name(stem)), suffix) if stem and suffix in SUFFIXES else None


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


def _tar_files(source: Path, ignore: Callable[[str], None]) -> Iterator[tuple[str, str, bytes]]:
    with tarfile.open(source, mode="r|*", tarinfo=StrictInfo) as tar:
        for member in tar:
            if member.isdir():
                continue
            # Links are skipped: a stream cannot go back to a link's target. Very large members are skipped too: a few bytes
            # of a compressed or sparse tar can claim any size and would fill the memory.
            is_plain = member.isfile() and not member.issparse() and member.size <= MAX_MEMBER_BYTES
            named = _key_and_suffix(member.name) if is_plain else None
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
            continue  # separate sources
        named = _key_and_suffix(path.name) if path.is_file() else None
        if named is None:
            ignore(path.name)
        else:
            yield (*named, path.read_bytes())


def check_key(key: str) -> None:
    """Raise SampleError if the key cannot be stored, or is a path that leads out of its source."""
    try:
        key.encode()
    except UnicodeEncodeError as error:
        raise SampleError("key is not UTF-8") from error
    path = PurePosixPath(key)
    if path.is_absolute() or ".." in path.parts:
        raise SampleError("key climbs out of its tar")


def read_caption(sample: Sample) -> str:
    """Return the sample's caption. Raises SampleError: missing, not UTF-8, empty."""
    if "txt" not in sample.files:
        raise SampleError("missing caption")
    try:
        return check_caption(sample.files["txt"].decode("utf-8"))
    except UnicodeDecodeError as error:
        raise SampleError("caption is not UTF-8") from error
