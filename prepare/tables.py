"""Read samples from tables: Parquet and Arrow files with the images' bytes, CSV files and JSON lines with their paths.

A Parquet or Arrow file is a part. A CSV file or JSON lines are cut into parts of ROWS_PER_PART rows, each known by a digest
of its lines. Paths are relative to the table's folder, absolute, or s3://; what lies at a path is not in the plan.

Parquet and Arrow need pyarrow, which requirements/tables.lock has.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import errno
import functools
import importlib
import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import xxhash

from common.errors import Failed, Refused
from common.log import log
from mds.images import SampleError
from mds.stores import address_problem, scheme_of
from prepare.arguments import RESUME_HINT
from prepare.parts import NO_SAMPLE
from prepare.samples import Sample, SampleFields, SourceError, TableRow
from prepare.sources import MAX_MEMBER_BYTES, FileSource, Ignore, Source, StoreClient, classify_read_errors

COLUMNAR = (".parquet", ".arrow")
CSV = (".csv", ".tsv")
LINES = (".jsonl", ".ndjson", *CSV)
ROWS_PER_PART = 10_000  # as many as img2dataset puts into a tar
ROWS_AT_ONCE = 16  # of a columnar file in memory
MAX_LINE_BYTES = 2**24
NOT_INSTALLED = "SOURCE: {} is not installed, which reads Parquet and Arrow files and Hugging Face datasets"
DELIMITERS = ",\t;|"
CONVERSION_ERRORS = (
    ValueError,
    OverflowError,
    LookupError,
    NotImplementedError,
)  # pyarrow's own errors are of these kinds
MISSING_FILE_ERRNOS = {
    errno.ENOENT,
    errno.EACCES,
    errno.EPERM,
    errno.ENAMETOOLONG,
    errno.ENOTDIR,
    errno.ELOOP,
    errno.EINVAL,
}


class ImageFiles:
    """Reads the files that rows name.

    Args:
        folder: of the table, on this machine or in a store.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._objects = StoreClient()

    def __call__(self, path: str) -> bytes:
        """Return a file's content. Raises SampleError: there is no such file. Failed: the disk or the store is at fault."""
        is_in_store = bool(scheme_of(self.folder))
        if scheme_of(path) == "s3":
            return self._object(path)
        if "://" in path:
            raise SampleError("image is at an address of another kind than s3://")
        if not is_in_store:
            return self._file(Path(self.folder, path))
        inner = posixpath.normpath(path)
        if inner.startswith(("/", "..")):
            raise SampleError("path leads out of the table's folder in its store")
        return self._object(f"{self.folder.rstrip('/')}/{inner}")

    def _object(self, address: str) -> bytes:
        if address_problem(address):
            raise SampleError("image is at an address that cannot be read")
        try:
            content = self._objects.read(address, MAX_MEMBER_BYTES + 1)
        except FileNotFoundError as error:
            raise SampleError("no such image file") from error
        if len(content) > MAX_MEMBER_BYTES:
            raise SampleError("image file is too large")
        return content

    def _file(self, path: Path) -> bytes:
        try:
            if not path.is_file():  # a device or a pipe is none either: it may have no end
                raise SampleError("no such image file")
            if path.stat().st_size > MAX_MEMBER_BYTES:
                raise SampleError("image file is too large")
            return path.read_bytes()
        except OSError as error:
            if error.errno in MISSING_FILE_ERRNOS:
                raise SampleError("image file cannot be opened") from error
            raise Failed(f"SOURCE: {path} cannot be read: {error}. {RESUME_HINT}.") from error


class SourceTable(Source):
    """What all tables have in common."""

    def rows_with_keys(
        self,
        rows: Iterable[tuple[dict[str, Any], str | None]],
        fields: SampleFields | None,
        files: ImageFiles,
        first: int = 0,
    ) -> Iterator[Sample]:
        """Yield each row with its key: that of its key column, else one made from the file's name and the row's number.

        Args:
            rows: (values by column, why they are none).
            first: number of the first one.
        """
        stem, number = PurePosixPath(self.file_name).stem, first - 1
        for number, (values, problem) in enumerate(rows, first):
            row = TableRow(f"{stem}/{number:08d}", values, problem, files)
            key = _key_from_column(row, fields)
            row.key = row.key if key is None else key
            yield row
        if number < first:
            raise SourceError(NO_SAMPLE)

    @property
    def file_name(self) -> str:
        return self.name


def _key_from_column(row: TableRow, fields: SampleFields | None) -> str | None:
    """Return the key in a row's own column; None: there is none."""
    if fields is None or fields.key is None or not row.has(fields.key):
        return None
    key = row.part(fields.key)
    return str(key) if isinstance(key, str | int) and not isinstance(key, bool) and str(key).strip() else None


def check_columns(names: Iterable[str], fields: SampleFields | None) -> None:
    """Raise SourceError if a file has not the columns that are read."""
    columns = set(names)
    for name in (
        () if fields in (None, SampleFields()) else fields.names
    ):  # the latter: no source had a sample to choose by
        if name not in columns and name.partition(":")[0] not in columns:
            raise SourceError(f"no column {name}")


# ---------------------------------------------------------------------------------------------------------------------
# Parquet and Arrow
# ---------------------------------------------------------------------------------------------------------------------


class ColumnarFile(FileSource, SourceTable):
    """A Parquet or an Arrow file."""

    def read(self, fields: SampleFields | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        path, where = self.fetch_local(folder)
        beside = posixpath.dirname(where) or "."
        read, lost = parquet_rows if path.suffix == ".parquet" else arrow_rows, Counter[str]()
        with classify_read_errors(where):
            yield from self.rows_with_keys(
                ((row, None) for row in read(path, fields, lost)), fields, ImageFiles(beside)
            )
        log_lost(lost, where)


def parquet_rows(path: Path, fields: SampleFields | None, lost: Counter[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a Parquet file as Python values. `lost`: see `rows_of`."""
    num_read = 0
    # Not a row group at once, which may be gigabytes of images: through a buffer, by a few rows.
    with import_optional("pyarrow.parquet").ParquetFile(path, pre_buffer=False, buffer_size=2**20) as file:
        names = columns_to_read(file.schema_arrow, fields)
        with classify_read_errors(str(path), lambda: file.metadata.num_rows - num_read):
            for batch in file.iter_batches(ROWS_AT_ONCE, columns=names, use_threads=False):
                yield from rows_of(batch, lost)
                num_read += batch.num_rows


def arrow_rows(path: Path, fields: SampleFields | None, lost: Counter[str]) -> Iterator[dict[str, Any]]:
    """The same of an Arrow file: a stream, as `save_to_disk` of `datasets` writes it, or Feather."""
    arrow = import_optional("pyarrow")
    with arrow.memory_map(str(path)) as file:
        is_feather = file.read(6) == b"ARROW1"
        file.seek(0)
        reader = arrow.ipc.open_file(file) if is_feather else arrow.ipc.open_stream(file)
        names = columns_to_read(reader.schema, fields)
        batches = (reader.get_batch(n) for n in range(reader.num_record_batches)) if is_feather else reader
        for batch in batches:
            wanted = batch.select(names)
            for start in range(0, wanted.num_rows, ROWS_AT_ONCE):
                yield from rows_of(wanted.slice(start, ROWS_AT_ONCE), lost)


def columns_to_read(schema: Any, fields: SampleFields | None) -> list[str]:
    """Return the columns that a dataset can hold: no other images. Raises SourceError: one is missing."""
    check_columns(schema.names, fields)
    read = {name.partition(":")[0] for name in fields.names} | {*fields.names} if fields else {*schema.names}
    return [column.name for column in schema if column.name in read or not _is_binary(column.type)]


def _is_binary(kind: Any) -> bool:
    types = import_optional("pyarrow").types
    if types.is_struct(kind):
        return any(_is_binary(kind.field(number).type) for number in range(kind.num_fields))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return _is_binary(kind.value_type)
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def import_optional(module: str, text: str = NOT_INSTALLED, lock: str = "tables") -> Any:
    """Return a module that the environment may lack. `text`, `lock`: of the message. Raises Refused."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        name = module.partition(".")[0]
        raise Refused(f"{text.format(name)}. Run: pip install --no-deps -r requirements/{lock}.lock") from error


# ---------------------------------------------------------------------------------------------------------------------
# Arrow columns as Python values
# ---------------------------------------------------------------------------------------------------------------------


def rows_of(batch: Any, lost: Counter[str]) -> list[dict[str, Any]]:
    """Return a record batch's rows; values by column.

    Args:
        lost: column -> how many of its values are None since they have no Python value; added to.
    """
    columns = [values_of(column, name, lost) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    return [dict(zip(batch.schema.names, values, strict=True)) for values in zip(*columns, strict=True)]


def values_of(column: Any, name: str, lost: Counter[str]) -> list[Any]:
    """Return a column's values. One that has no Python value, e.g. a time after the year 9999, is None; see `rows_of`.

    A text that is not UTF-8 keeps its other bytes as surrogates, as in a CSV file, and is refused when it is used.
    """
    try:
        return column.to_pylist()
    except CONVERSION_ERRORS:
        return [_value_of(scalar, name, lost) for scalar in column]


def _value_of(scalar: Any, name: str, lost: Counter[str]) -> Any:
    try:
        return scalar.as_py()
    except CONVERSION_ERRORS:
        if isinstance(scalar, import_optional("pyarrow").DictionaryScalar):
            return _value_of(scalar.value, name, lost)
        if isinstance(scalar, import_optional("pyarrow").StringScalar):
            return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
        lost[name] += 1
        return None


def log_lost(lost: Mapping[str, int], where: str) -> None:
    """Log which columns of a source have values that are stored as null."""
    for name, num in lost.items():
        log.warning(
            f"{where}: {num:,} values of {name} have no Python value, such as a time out of range. They are null."
        )


# ---------------------------------------------------------------------------------------------------------------------
# CSV files and JSON lines
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TextTablePart(SourceTable):
    """Some rows of a CSV file or of JSON lines.

    path: of the table on this machine; one in a store was copied.
    folder: where relative paths of images begin.
    start, end: of the rows, bytes of the file.
    first: number of the first row.
    header: the columns of a CSV file; None: JSON lines.
    """

    path: Path
    folder: str
    name: str
    digest: str
    start: int
    end: int
    first: int
    header: tuple[str, ...] | None
    delimiter: str = ","

    @property
    def file_name(self) -> str:
        return self.path.name

    def identify(self) -> dict[str, Any]:
        return {"name": self.name, "bytes": self.end - self.start, "digest": self.digest}

    def read(self, fields: SampleFields | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        files = ImageFiles(self.folder)
        with classify_read_errors(str(self.path)), open(self.path, "rb") as file:
            file.seek(self.start)
            lines = _lines(file, self.end - self.start)
            if self.header is None:
                yield from self.rows_with_keys(
                    (_json_row(line) for line in lines if line.strip()), fields, files, self.first
                )
            else:
                check_columns(self.header, fields)
                rows = (self._csv_row(row) for row in _csv_rows(lines, self.delimiter) if row)
                yield from self.rows_with_keys(rows, fields, files, self.first)

    def _csv_row(self, row: Sequence[str]) -> tuple[dict[str, Any], str | None]:
        assert self.header is not None
        if len(row) != len(self.header):
            return {}, "row has another number of columns than the first line"
        return dict(zip(self.header, row, strict=True)), None


def split_table(path: Path, folder: str) -> list[TextTablePart]:
    """Cut a CSV file or JSON lines into parts.

    Args:
        path: of the table on this machine.
        folder: where relative paths of images begin: a folder, or an address in a store.

    Raises:
        ValueError: its first line is not what such a file begins with.
        OSError: it cannot be read.
    """
    is_csv = path.suffix in CSV
    with open(path, "rb") as file:
        header, delimiter = _read_header(file, path) if is_csv else (None, ",")
        if not is_csv and file.peek(4).removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"[":
            lines = f"jq -c '.[]' {path} > {path.with_suffix('.jsonl')}"
            raise ValueError(f"SOURCE: {path} is one JSON array. Possible: JSON lines, an object a line. Run: {lines}")
        marked = MarkedLines(file, f"{header}{delimiter}")
        rows = csv.reader(map(_decoded, marked), delimiter=delimiter) if is_csv else marked
        cuts, first, num_rows, is_whole = [], 0, 0, False
        with contextlib.suppress(csv.Error, SourceError):  # reported when that part is read
            for row in rows:
                num_rows += bool(row if is_csv else row.strip())
                if num_rows == ROWS_PER_PART:
                    cuts.append((first, *marked.take()))
                    first, num_rows = first + num_rows, 0
            is_whole = True
        if num_rows or not is_whole or not cuts:
            start, end, digest = marked.take()
            cuts.append((first, start, end if is_whole else path.stat().st_size, digest))
    parts = []
    for number, (first, start, end, digest) in enumerate(cuts):
        name = path.name if len(cuts) == 1 else f"{path.name}, part {number + 1} of {len(cuts)}"
        parts.append(TextTablePart(path, folder, name, digest, start, end, first, header, delimiter))
    return parts


class MarkedLines:
    """The lines of a file, with where the last ones began, and their digest.

    Args:
        salt: what else the digest depends on.
    """

    def __init__(self, file: BinaryIO, salt: str):
        self._file, self._salt = file, salt
        self._start = self._at = file.tell()
        self._digest = xxhash.xxh3_64(salt.encode())

    def __iter__(self) -> Iterator[bytes]:
        for line in _lines(self._file):
            self._at += len(line)
            self._digest.update(line)
            yield line

    def take(self) -> tuple[int, int, str]:
        """Return (start, end, digest) of the lines since the last call."""
        fields = self._start, self._at, self._digest.hexdigest()
        self._start, self._digest = self._at, xxhash.xxh3_64(self._salt.encode())
        return fields


def _lines(file: BinaryIO, num_bytes: int | None = None) -> Iterator[bytes]:
    """Yield the lines of the next bytes. Raises SourceError: one has no end."""
    while (num_bytes is None or num_bytes > 0) and (line := file.readline(MAX_LINE_BYTES)):
        if len(line) == MAX_LINE_BYTES:
            raise SourceError(f"has a line of more than {MAX_LINE_BYTES // 2**20} MiB")
        num_bytes = None if num_bytes is None else num_bytes - len(line)
        yield line


def _decoded(line: bytes) -> str:
    return line.decode("utf-8", "surrogateescape")  # reported for the value that has it


def _csv_rows(lines: Iterable[bytes], delimiter: str) -> Iterator[list[str]]:
    """Yield the rows of a CSV file's lines. Raises SourceError: the last one has taken others into a quote without an end."""
    of_row: list[str] = []

    def recorded_lines() -> Iterator[str]:
        for line in map(_decoded, lines):
            of_row.append(line)
            yield line

    for row in csv.reader(recorded_lines(), delimiter=delimiter):
        if len(of_row) > 1:
            try:
                next(csv.reader(of_row, delimiter=delimiter, strict=True))
            except csv.Error as error:
                if "end of data" in str(error):
                    raise SourceError(f"a quote is not closed in its last {len(of_row):,} lines") from error
        yield row
        of_row.clear()


def _read_header(file: BinaryIO, path: Path) -> tuple[tuple[str, ...], str]:
    """Read the first line of a CSV file: its columns, and its delimiter, which is the one that stands there most often."""
    line = file.readline(MAX_LINE_BYTES)
    try:
        text = line.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        again = f"iconv -f LATIN1 -t UTF-8 {path} > NEW.csv, with the name of its encoding"
        raise ValueError(f"SOURCE: {path} is not UTF-8 in its first line. Possible: UTF-8. Run: {again}") from error
    delimiter = max(DELIMITERS, key=text.count)
    try:
        header = tuple(next(csv.reader([text], delimiter=delimiter), ()))
    except csv.Error as error:  # its lines end with CR alone, or it is no table
        again = f"tr '\\r' '\\n' < {path} > NEW.csv, if its lines end with CR alone"
        raise ValueError(
            f"SOURCE: {path} cannot be read in its first line: {error}. Possible: CSV. Run: {again}"
        ) from error
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise ValueError(f"SOURCE: {path} has two columns {twice[0]}. Give them different names in its first line.")
    return header, delimiter


def _json_row(line: bytes) -> tuple[dict[str, Any], str | None]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError:
        return {}, "row is not UTF-8"
    except (ValueError, RecursionError):
        return {}, "row is not JSON"
    return (row, None) if isinstance(row, dict) else ({}, "row is not a JSON object")


# --- read samples from Hugging Face datasets ---
#
#     hf://datasets/OWNER/NAME     on the hub, with config=, split= and revision= where there are several
#     FOLDER split=train           a folder that `datasets` reads, such as a clone of one on the hub
#
# The library `datasets` reads them (requirements/tables.lock). A part is one of the dataset's own files, as it cuts
# them. A branch of the hub moves, so the plan has its commit, and every part is read from that. A dataset whose making
# needs its own code is refused: the library runs none.

HUB = "hf://datasets/"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class HubKeys:
    """What of a dataset is read, as the user gave it; None: the only one that there is, or `train`."""

    config: str | None = None
    split: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class HubSplit:
    """One split of a dataset.

    address: name on the hub, or a folder.
    revision: commit on the hub; None: a folder.
    digest: of the names and sizes of a folder's files.
    """

    address: str
    config: str
    split: str
    revision: str | None
    digest: str | None

    @property
    def name(self) -> str:
        return f"{self.address if self.revision else Path(self.address).name} {self.config} {self.split}"


class HubFiles(ImageFiles):
    """Reads the files that rows of a dataset on the hub name: those of that dataset alone."""

    def __call__(self, path: str) -> bytes:
        if not path.rpartition("::")[2].startswith(f"{HUB}{self.folder}@"):
            raise SampleError("path leads out of the dataset")
        import fsspec

        try:
            with fsspec.open(path, "rb") as file:
                return file.read()
        except Exception as error:  # of the hub's client and of its HTTP library
            if isinstance(error, FileNotFoundError) or type(error).__name__.endswith("EntryNotFoundError"):
                raise SampleError("no such image file") from error
            raise Failed(f"SOURCE: {path} cannot be read: {_first_line(error)}. {RESUME_HINT}.") from error


@dataclass(frozen=True)
class HubShard(SourceTable):
    """One of a split's own files."""

    split: HubSplit
    number: int
    num_shards: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.split.name}, file {self.number + 1} of {self.num_shards}"

    @property
    def file_name(self) -> str:
        """What the keys of its rows begin with."""
        return f"{self.split.split}-{self.number:05d}"

    def identify(self) -> dict[str, Any]:
        known = {"revision": self.split.revision, "digest": self.split.digest}
        return {"name": self.name, **{key: value for key, value in known.items() if value is not None}}

    def read(self, fields: SampleFields | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        of_hub = self.split.revision is not None
        files = HubFiles(self.split.address) if of_hub else ImageFiles(self.split.address)
        lost = Counter[str]()
        with _classify_hub_errors(self.name) if of_hub else classify_read_errors(self.name):
            data = open_stream(self.split)
            if data.features:
                check_columns(data.features, fields)
            tables = data.shard(num_shards=self.num_shards, index=self.number).with_format("arrow").iter(ROWS_AT_ONCE)
            batches = (batch for table in tables for batch in table.to_batches())
            rows = (row for batch in batches for row in rows_of(batch, lost))
            yield from self.rows_with_keys(((row, None) for row in rows), fields, files)
        log_lost(lost, self.name)


@functools.lru_cache(maxsize=4)  # it asks the hub for its files; worker processes inherit what the first one heard
def open_stream(split: HubSplit) -> Any:
    """Return the dataset, whose images come as their files' bytes, not decoded."""
    data = import_optional("datasets").load_dataset(
        split.address, split.config, split=split.split, revision=split.revision, streaming=True
    )
    return data.decode(False)


@contextlib.contextmanager
def _classify_hub_errors(name: str) -> Iterator[None]:
    """Turn an error of the hub or the network into Failed: a part that lacks samples would stay so."""
    try:
        yield
    except (Failed, Refused, SourceError):
        raise
    except Exception as error:  # of the hub's client, of its HTTP library, of decoders
        is_damage = isinstance(error, ValueError) or type(error).__module__.startswith("pyarrow")
        if is_damage and not isinstance(error, OSError):
            raise SourceError("cannot be read to its end") from error
        raise Failed(f"SOURCE: {name} cannot be read: {_first_line(error)}. {RESUME_HINT}.") from error


def find_split(address: str, keys: HubKeys) -> list[Source]:
    """Return the parts of a dataset's split.

    Args:
        address: OWNER/NAME on the hub, or a folder.

    Raises:
        Refused: `datasets` is not installed.
        ValueError: there is no such dataset, configuration, split or revision; says which there are.
    """
    from huggingface_hub import HfApi

    datasets, folder = import_optional("datasets"), Path(address)
    is_folder = folder.is_dir()
    if is_folder and keys.revision:
        raise ValueError(f"revision: {address} is a folder, which has none. Leave it out.")
    try:
        revision = None if is_folder else HfApi().dataset_info(address, revision=keys.revision).sha
        config = _choose_name(
            "config", datasets.get_dataset_config_names(address, revision=revision), keys.config, address
        )
        splits = datasets.get_dataset_split_names(address, config, revision=revision)
        split = _choose_name("split", splits, keys.split or ("train" if "train" in splits else None), address)
        hub_split = HubSplit(address, config, split, revision, _folder_digest(folder) if is_folder else None)
        num_shards = open_stream(hub_split).num_shards
    except Exception as error:  # of a dozen classes of two libraries
        if type(error) is ValueError and str(error).startswith(("config:", "split:")):
            raise
        raise ValueError(f"SOURCE: {_explain_hub_error(error, address, keys.revision)}") from error
    return [HubShard(hub_split, number, num_shards) for number in range(num_shards)]


def _explain_hub_error(error: Exception, address: str, revision: str | None) -> str:
    """Return why a dataset was not to be had, and what to do."""
    if Path(address).is_dir():
        return f"{address} is not in a form that `datasets` reads ({_first_line(error)}). Give its files."
    hint = {
        "GatedRepoError": "Ask for access on its page, and set HF_TOKEN to a token of that account",
        "RevisionNotFoundError": f"It has no revision '{revision}'. Check its name",
        "RepositoryNotFoundError": "Check the name, and HF_TOKEN if it is private",
        "DatasetNotFoundError": "Check the name, and HF_TOKEN if it is private or gated",
        "RuntimeError": "If it is made by code, which is never run: give its files, or revision=refs/convert/parquet",
    }.get(type(error).__name__, "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE; or give its files")
    return f"{address}: no such folder here, and not to be read on the hub: {_first_line(error)}. {hint}."


def _choose_name(key: str, possible: list[str], requested: str | None, address: str) -> str:
    if requested in possible:
        return requested
    if requested is None and len(possible) == 1:
        return possible[0]
    what = "is not given" if requested is None else f"is {requested}"
    raise ValueError(f"{key}: {what}. {address} has: {', '.join(possible)}. Give {key}=NAME.")


def _folder_digest(folder: Path) -> str:
    """Return a digest of the names and sizes of a folder's files."""
    digest = xxhash.xxh3_64()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name} {path.stat().st_size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
