"""Read samples from tars and folders of files: KEY.jpg, KEY.txt, KEY.json, or other suffixes; KEY.npy for stored moments.

Nothing is extracted to disk. A tar is read as a stream, so a member's name is only used as a key. Tables and Hugging
Face datasets are in tables.py; `Source` is the interface of all of them to prepare/shards.py.

A source at s3:// is an object, listed and then fetched to a file while a part is made, with the clients and the retries of
mds/: an object is waited for while its store is unreachable. S3 alone is read, whose listing has an object's size and entity
tag, by which a plan recognizes it.
"""

from __future__ import annotations

import bz2
import contextlib
import errno
import gzip
import itertools
import lzma
import operator
import re
import tarfile
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash

from common.errors import Failed, Refused
from common.private_api import require_private_api
from mds.fetch import PATIENCE_SEC, StreamFailure, download_with_retries
from mds.images import IMAGE_SUFFIXES
from mds.stores import READ_TIMEOUT_SEC, S3Client, address_problem, explain_store_error, scheme_of
from prepare.arguments import RESUME_HINT
from prepare.parts import NO_SAMPLE
from prepare.samples import VIDEO_SUFFIXES, Sample, SampleFields, SourceError, column_of

MOMENTS_SUFFIX = "npy"
IMG2DATASET = SampleFields()
SAMPLES_PER_PART, BYTES_PER_PART = 1000, 2**30  # of a folder of files; of videos fewer are a part
SUFFIXES = (*IMAGE_SUFFIXES, *VIDEO_SUFFIXES, MOMENTS_SUFFIX)
"""Of the file that makes a sample."""
ALWAYS_READ = {MOMENTS_SUFFIX, "json"}  # parts of a sample whatever the captions are
NO_NAME = "has no name of the form KEY.SUFFIX"
NOT_ADJACENT = "files of one key are not adjacent; repack with tar --sort=name"
Ignore = Callable[[str, str | None], None]
"""Called with a file's name and why it belongs to no sample; None: its sample has no use for it."""


class Source:
    """One input: what a part is made from. It is given to worker processes, and holds no open file."""

    name: str
    """In plan.json and in reports."""

    def identify(self) -> dict[str, Any]:
        """Return what identifies the input in a plan: its name and more. Raises OSError."""
        raise NotImplementedError

    def read(self, fields: SampleFields | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        """Yield the samples in order.

        Args:
            fields: the parts of a sample that are wanted; None: all that there are.
            folder: for files that have to be fetched.
            ignore: called with each file that is not read.

        Raises:
            SourceError: it is not readable to its end (samples before that are yielded), or has no sample.
            Failed: an error of the disk or the network; the next try may succeed.
        """
        raise NotImplementedError


@dataclass(frozen=True)
class FileSource(Source):
    """A file here, or an object in a store, which is fetched when it is read."""

    location: Path | StoreObject

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.location.name

    def identify(self) -> dict[str, Any]:
        return identify_file(self.location) if isinstance(self.location, Path) else self.location.identify()

    def fetch_local(self, folder: Path) -> tuple[Path, str]:
        """Return the file, in `folder` if it had to be fetched, and its address."""
        if isinstance(self.location, Path):
            return self.location, str(self.location)
        return StoreClient().fetch(self.location.address, folder), self.location.address


class TarSource(FileSource):
    """A tar."""

    def read(self, fields: SampleFields | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        return read_source(self.fetch_local(folder)[0], ignore, fields)


@dataclass(frozen=True)
class FolderPart(Source):
    """Some files of a folder.

    sizes: bytes of each file, by name.
    """

    path: Path
    name: str
    sizes: Mapping[str, int]

    def identify(self) -> dict[str, Any]:
        content = "\0".join(f"{size} {name}" for name, size in self.sizes.items()).encode(errors="surrogateescape")
        digest = xxhash.xxh3_64_hexdigest(content)
        return {"name": self.name, "bytes": sum(self.sizes.values()), "digest": digest, "folder": self.path.name}

    def read(self, fields: SampleFields | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        return read_source(self.path, ignore, fields, list(self.sizes))


def split_folder(path: Path) -> list[Source]:
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
def classify_read_errors(source: str, lost: Callable[[], int] = lambda: 0) -> Iterator[None]:
    """Turn an exception of a decoder into SourceError, and an error of the disk or the network into Failed.

    Args:
        lost: how many samples are known to be left then.
    """
    try:
        yield
    except (Failed, Refused, SourceError):
        raise
    except Exception as error:  # decoders raise a dozen classes
        if isinstance(error, OSError) and error.errno is not None:  # of the disk or the network, not the content
            raise Failed(f"SOURCE: {source} cannot be read: {error}. {RESUME_HINT}.") from error
        raise SourceError("cannot be read to its end", lost()) from error


def identify_file(source: Path) -> dict[str, Any]:
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
    source: Path, ignore: Ignore, fields: SampleFields | None = IMG2DATASET, names: Sequence[str] | None = None
) -> Iterator[Sample]:
    """Yield the samples of a tar or a folder of files in order, see `Source.read`.

    A key's files have to be adjacent in a tar, as img2dataset writes them: what else lies apart is ignored, and is a fault
    of the tar. `names`: of a folder's files those to read.
    """
    wanted = None if fields is None else {name.partition(":")[0] for name in fields.names} | ALWAYS_READ
    files = _tar_files(source, wanted, ignore) if source.is_file() else _folder_files(source, wanted, ignore, names)
    parts: dict[str, frozenset[str]] = {}
    kinds: dict[frozenset[str], frozenset[str]] = {}  # a tar may have millions of keys with the same parts
    is_scattered = False
    for key, of_key in itertools.groupby(_with_read_errors(files, str(source)), operator.itemgetter(0)):
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
        raise SourceError(NO_SAMPLE)


NamedFile = tuple[str, str, str, bytes | None]
"""Of a file: the key, the part, its own name, and its content; None: it is not wanted."""


def _with_read_errors(files: Iterator[NamedFile], source: str) -> Iterator[NamedFile]:
    with classify_read_errors(source):
        yield from files


def _tar_files(source: Path, wanted: set[str] | None, ignore: Ignore) -> Iterator[NamedFile]:
    """Yield a tar's files. The key ends at the first dot: WebDataset's convention, which img2dataset follows."""
    with open_tar(source) as tar:
        for member, problem in iter_members(tar):
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
) -> Iterator[NamedFile]:
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


# --- read a tar's members as a stream ---
#
# `tarfile` takes a tar that is cut off in a header for a shorter one, stops where the first of two joined tars ends,
# and fills memory as a header asks. Here every end is either an end of archive or an error, what follows an end is
# read, and extended headers are limited.

TAR_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
MAX_MEMBER_BYTES = 2**28  # 256 MiB, far more than any image
MAX_HEADER_BYTES = 2**20  # of an extended header or a long name; a path has at most some thousand bytes
MAX_EXTENDED = 8  # headers of one file; each is held while the next one is read
BLOCK = tarfile.BLOCKSIZE
DECOMPRESSORS = ((rb"\x1f\x8b\x08", gzip.open), (rb"BZh[1-9]1AY&SY", bz2.open), (rb"\xfd7zXZ|\x5d\0\0\x80", lzma.open))
EXTENDED = {
    tarfile.XHDTYPE,
    tarfile.XGLTYPE,
    tarfile.SOLARIS_XHDTYPE,
    tarfile.GNUTYPE_LONGNAME,
    tarfile.GNUTYPE_LONGLINK,
}

SPARSE = "_proc_sparse", "_proc_gnusparse_10", "_sparse_structs"
require_private_api(tarfile.TarInfo, *SPARSE, why="the map of a sparse file is not held in memory")


def is_tar(name: str) -> bool:
    """Tell by a file's name."""
    return name.lower().endswith(TAR_SUFFIXES)


class Header(tarfile.TarInfo):
    """A member's header, which raises where `tarfile` would see the end of the tar."""

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Header:
        info = super().frombuf(buf, encoding, errors)
        if info.size < 0:
            raise tarfile.ReadError("damaged header")
        if info.type in EXTENDED and info.size > MAX_HEADER_BYTES:
            raise SourceError(f"has an extended header of more than {MAX_HEADER_BYTES // 2**20} MiB")
        return info

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Header:
        return tarfile.checked(super().fromtarfile)

    # The map of a sparse file, which is not read, can have any length: it is skipped.

    _sparse_structs: Any

    def _proc_sparse(self, tarfile: Any) -> Any:
        is_more = self._sparse_structs[1]
        while is_more:
            is_more = tarfile.fileobj.read(BLOCK)[504]
        self._sparse_structs = [], False, 0
        return super()._proc_sparse(tarfile)  # type: ignore[misc]

    def _proc_gnusparse_10(self, next: Any, pax_headers: Any, tarfile: Any) -> None:
        next.sparse = []


class StrictTar(tarfile.TarFile):
    """A tar whose end has to be an end of archive."""

    tarinfo = Header
    is_ended, depth = False, 0

    def checked(self, read_header: Any) -> Header:
        """Read a header. Raises tarfile.ReadError: it is damaged, or the tar ends before its end of archive.

        It is called within itself for the header that follows an extended one.
        """
        if self.depth > MAX_EXTENDED:
            raise SourceError(f"has more than {MAX_EXTENDED} extended headers of one file")
        self.pax_headers = {}  # what a global header says of all files is not used, and could fill memory
        self.depth += 1
        try:
            header = read_header(self)
        except tarfile.HeaderError as error:
            is_end = isinstance(error, tarfile.EOFHeaderError)  # type: ignore[attr-defined]
            if not is_end and not (self.is_ended and isinstance(error, tarfile.EmptyHeaderError)):  # type: ignore[attr-defined]
                raise tarfile.ReadError("damaged header, or no end of archive") from error
            self.is_ended = True
            raise
        finally:
            self.depth -= 1
        self.is_ended = False
        return header


@contextlib.contextmanager
def open_tar(path: Path) -> Iterator[StrictTar]:
    """Open a tar, decompressed if need be."""
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(open(path, "rb"))
        for magic, decompressed in DECOMPRESSORS:
            if re.match(magic, file.peek(16)):
                file = stack.enter_context(decompressed(path, "rb"))
                break
        keys: dict[str, Any] = {"ignore_zeros": True, "encoding": "utf-8", "errors": "surrogateescape"}
        stream: Any = types.SimpleNamespace(read=file.read1)  # a damaged file gives what lies before the damage
        yield stack.enter_context(StrictTar.open(fileobj=stream, mode="r|", bufsize=2**16, **keys))


def iter_members(tar: StrictTar) -> Iterator[tuple[tarfile.TarInfo, str | None]]:
    """Yield a tar's members but its folders, and why one is not read; None: it can be, by `extractfile`.

    Raises:
        tarfile.ReadError: the tar is cut off or damaged.
        SourceError: a header is too large to be read.
    """
    for info in tar:
        tar.members = []  # type: ignore[attr-defined]  # a tar may have millions
        if not info.isdir():
            yield info, _member_problem(info)


def _member_problem(info: tarfile.TarInfo) -> str | None:
    if info.islnk() or info.issym():
        return "is a link"  # a stream cannot go back to its target
    if info.issparse():
        return "is a sparse file"  # a few bytes can claim any size
    if not info.isreg():
        return "is no plain file"
    return f"has more than {MAX_MEMBER_BYTES // 2**20} MiB" if info.size > MAX_MEMBER_BYTES else None


# --- objects in a store that a source is made of ---

MISSING = {"404", "NoSuchKey"}
DISK_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES}


@dataclass(frozen=True)
class StoreObject:
    """One object of a listing."""

    address: str
    num_bytes: int
    tag: str
    """Its entity tag: another one, another content."""

    @property
    def name(self) -> str:
        return PurePosixPath(self.address).name

    def identify(self) -> dict[str, Any]:
        """Return the values that identify it in a plan."""
        return {"name": self.name, "bytes": self.num_bytes, "digest": self.tag}


def list_objects(address: str) -> list[StoreObject]:
    """Return the objects at an address: that object, or all under it as a folder. Raises ValueError: it cannot be listed."""
    if text := address_problem(address):
        raise ValueError(f"SOURCE: {text}")
    if scheme_of(address) != "s3":
        raise ValueError(f"SOURCE: {address} is in no store that is read here. Possible: a folder, a file, s3://.")
    bucket, _, key = address.removeprefix("s3://").partition("/")
    client, key = S3Client(attempts=3), key.rstrip("/")
    try:
        rows = client.list_objects(f"s3://{bucket}/{key}/" if key else f"s3://{bucket}/", READ_TIMEOUT_SEC)
        rows = rows or [row for row in client.list_objects(address, READ_TIMEOUT_SEC) if row[0] == key]
    except Exception as error:  # each client has its own exceptions
        raise ValueError(f"SOURCE: {explain_store_error(error, address)}") from error
    objects = [StoreObject(f"s3://{bucket}/{name}", *more) for name, *more in rows if not name.endswith("/")]
    if not objects:
        raise ValueError(f"SOURCE: {address}: nothing lies there; bucket '{bucket}' is there. Check the address.")
    return objects


class StoreClient:
    """A client of this process; make one for each part, since a client is not shared between processes."""

    def __init__(self) -> None:
        self._client = S3Client()

    def fetch(self, address: str, folder: Path) -> Path:
        """Return the file in `folder` with an object's content. Raises FileNotFoundError; Failed: the store is away."""
        file = folder / PurePosixPath(address).name
        file.unlink(missing_ok=True)  # the client would accept it as the wanted one
        self._retry(lambda timeout: self._client.download(address, str(file), timeout), address, file)
        return file

    def read(self, address: str, most: int) -> bytes:
        """Return an object's first bytes; raises as `download_with_retries` does."""
        contents: list[bytes] = []
        self._retry(lambda timeout: contents.append(self._client.read(address, most, timeout)), address, Path())
        return contents[0]

    def _retry(self, request: Callable[[float], Any], address: str, file: Path) -> None:
        if text := address_problem(address):
            raise Failed(f"SOURCE: {text}")
        final_errors: list[Exception] = []

        def attempt(timeout: float) -> None:
            """Send the request; an error that no retry would fix ends it."""
            try:
                request(timeout)
            except Exception as error:
                if not (_is_missing(error) or (isinstance(error, OSError) and error.errno in DISK_ERRORS)):
                    raise
                final_errors.append(error)

        patience = {"patience_sec": PATIENCE_SEC, "is_wanted": lambda: True, "limit": None}
        try:
            download_with_retries(attempt, self._client.clean_up, address, file, **patience)
        except StreamFailure as error:
            raise Failed(f"SOURCE: {str(error).removeprefix('data: ')} {RESUME_HINT}.") from error
        for error in final_errors:
            if _is_missing(error):
                raise FileNotFoundError(errno.ENOENT, "no such object", address) from error
            raise Failed(f"SOURCE: {address} cannot be fetched to {file.parent}: {error}. {RESUME_HINT}.") from error


def _is_missing(error: Exception) -> bool:
    answer = getattr(error, "response", None)
    return isinstance(answer, dict) and str(answer.get("Error", {}).get("Code")) in MISSING
