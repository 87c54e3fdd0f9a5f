"""The stage `filter`: of each part of the metadata the rows that are wanted, in a Parquet file of the same name.

    FOLDER/filtered/plan.json                 the parts and the conditions; another command's are refused
    FOLDER/filtered/digests/NAME-00.npy ...   of `unique`: the digests of a part's rows, in sorted runs; then NAME.json
    FOLDER/filtered/later/NAME.npy ...        rows whose value an earlier row has had; then all.json
    FOLDER/filtered/NAME.parquet              the rows that are left, a row group for each tar
    FOLDER/filtered/NAME.json                 last: how many rows there were, and why others were left out

Parts are read by a few rows at a time, so that memory does not depend on their length. `all.json` of `later` is written
before any rows are: so a row is left out for another one that stays.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cli.errors import ConfigError, Failed, Refused
from prepare import tables
from prepare.laion.config import FILTERED, METADATA, FilterConfig, LaionConfig
from prepare.laion.duplicates import MOST_ROWS, digests, duplicates_of, write_runs
from prepare.laion.rows import Columns, conditions, find_columns, has_texts, needed, wanted_rows
from prepare.parts import GO_ON, PLAN_FILE, Plan, begin
from prepare.places import Folder
from prepare.sources import known_by

MADE_BY = "prepare.laion filter"
ROWS = 65_536  # in memory
DIGESTS, LATER, ALL = "digests", "later", "all.json"
DUPLICATE = "duplicate"
AGAIN = "Remove it, and run: python -m prepare.laion metadata"


@dataclass(frozen=True)
class Rows:
    """One part of the metadata."""

    path: Path
    num_rows: int
    columns: Columns

    @property
    def stem(self) -> str:
        return self.path.name.removesuffix(".parquet")


def find_rows(folder: Path, config: FilterConfig) -> list[Rows]:
    """Return the parts of the metadata, whose heads are read. Raises ConfigError: what is wrong with them."""
    paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    if not paths:
        raise ConfigError([f"folder: no *.parquet in {folder}. Put them there, or give metadata.urls."])
    problems, found = [], []
    for path in paths:
        try:
            with open_table(path) as table:
                found.append(Rows(path, table.metadata.num_rows, find_columns(table.schema_arrow, config, str(path))))
                if table.metadata.num_rows > MOST_ROWS:
                    problems.append(f"{path}: more than {MOST_ROWS:,} rows. Cut it into several files.")
        except ValueError as error:
            problems += str(error).splitlines()
        except OSError as error:
            problems.append(f"{path}: cannot be read: {_first_line(error)}. Remove it, or look at its disk.")
        if f"{path.stem}.json" == PLAN_FILE:
            problems.append(f"{path}: the stage has a file {PLAN_FILE} of its own. Give it another name.")
    if problems:
        raise ConfigError(problems)
    return found


def open_table(path: Path, todo: str = AGAIN) -> Any:
    """Open a Parquet file. Raises ValueError: it is none, or is cut off; OSError: the disk is at fault."""
    parquet = needed("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    except OSError as error:
        if error.errno is not None:
            raise
        raise ValueError(f"{path}: cannot be read as Parquet: {_first_line(error)}. {todo}") from error
    except ValueError as error:  # pyarrow's own are of that kind
        raise ValueError(f"{path}: cannot be read as Parquet: {_first_line(error)}. {todo}") from error


def without_views(schema: Any) -> Any:
    """Return a schema with plain types for string_view and binary_view, whose rows pyarrow cannot take."""
    arrow = needed("pyarrow")
    plain = {arrow.string_view(): arrow.large_string(), arrow.binary_view(): arrow.large_binary()}
    fields = [field.with_type(plain.get(field.type, field.type)) for field in schema]
    return arrow.schema(fields, schema.metadata)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")


def batches(part: Rows, names: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield a part's rows, a few at a time. Raises Failed: they cannot be read to their end."""
    seen = 0
    try:
        with open_table(part.path) as table:
            for batch in table.iter_batches(ROWS, columns=None if names is None else list(names), use_threads=False):
                yield batch if (schema := without_views(batch.schema)) == batch.schema else batch.cast(schema)
                seen += batch.num_rows
    except GeneratorExit:
        raise
    except (OSError, ValueError) as error:
        text = f"{part.path}: damaged after row {seen:,} of {part.num_rows:,}: {_first_line(error)}"
        raise Failed(f"{text}. {AGAIN}") from error


# ---------------------------------------------------------------------------------------------------------------------
# The stage
# ---------------------------------------------------------------------------------------------------------------------

Run = Callable[[Callable[[int], Any], Sequence[int], Sequence[int], str], None]
"""Calls a function with each number on an engine, and shows the progress under a name. The third: rows of each number."""


def filter_all(config: LaionConfig, run: Run) -> dict[str, Any]:
    """Make the stage, or what is missing of it; return its account."""
    own = config.filter
    place, parts = Folder(str(config.inside(FILTERED))), find_rows(config.inside(METADATA), own)
    keys = {key: value for key, value in asdict(own).items() if value is not None and key != "rows_at_once"}
    inputs = [{**known_by(part.path), "rows": part.num_rows} for part in parts]
    sizes = [part.num_rows for part in parts]
    with place.only_writer():
        begin(place, Plan(MADE_BY, "rows", {}, 0, {"filter": keys}, inputs))
        if own.unique is not None and f"{LATER}/{ALL}" not in place.names(f"{LATER}/"):
            todo = _missing(place, parts, f"{DIGESTS}/")
            run(functools.partial(write_digests, place, parts, own), todo, sizes, "digests")
            _write_later(place, parts, own)
        run(functools.partial(write_rows, place, parts, own), _missing(place, parts, ""), sizes, "filter")
        account = account_of(place, [part.stem for part in parts])
        place.clear_scratch()
    return account


def _missing(place: Folder, parts: Sequence[Rows], folder: str) -> list[int]:
    names = place.names(folder)
    return [number for number, part in enumerate(parts) if f"{folder}{part.stem}.json" not in names]


def account_of(place: Folder, stems: Sequence[str]) -> dict[str, Any]:
    """Return rows, rows that are left, and why others are not, of all parts."""
    left_out: Counter[str] = Counter()
    rows = kept = 0
    for stem in stems:
        of_part = json.loads(place.read(f"{stem}.json"))
        rows, kept = rows + of_part["rows"], kept + of_part["kept"]
        left_out.update(of_part["left_out"])
    return {"rows": rows, "kept": kept, "left_out": dict(left_out.most_common())}


def write_digests(place: Folder, parts: Sequence[Rows], config: FilterConfig, number: int) -> int:
    """Write the digests of one part's wanted rows; return how many rows were read."""
    part = parts[number]
    unique = part.columns.unique
    assert unique is not None

    def chunks() -> Iterator[np.ndarray]:
        first, asked = 0, conditions(config, part.columns)
        for batch in batches(part, part.columns.names):
            column = batch.column(unique)
            wanted = wanted_rows(batch, asked, Counter()) & column.is_valid().to_numpy(zero_copy_only=False)
            [rows] = np.nonzero(wanted)
            yield digests(values_of(column.take(needed("pyarrow").array(rows)), unique), rows + first)
            first += batch.num_rows

    def put(run: int, content: np.ndarray) -> None:
        _put_array(place, f"{DIGESTS}/{part.stem}-{run:02d}.npy", content)

    num_runs, total = write_runs(chunks(), max(1, config.rows_at_once // 4), put)
    place.put_bytes(f"{DIGESTS}/{part.stem}.json", json.dumps({"runs": num_runs, "digests": total}).encode())
    return part.num_rows


def values_of(column: Any, name: str) -> list[Any]:
    """Return a column as Python values; texts as bytes, since writers of Parquet do not check that they are UTF-8.

    What has no Python value, such as a time out of range, is None.
    """
    arrow = needed("pyarrow")
    if has_texts(column.type):
        column = column.cast(arrow.large_string()).cast(arrow.large_binary())
    lost: Counter[str] = Counter()
    values = tables.values_of(column, name, lost)
    tables.log_lost(lost, "metadata")
    return values


def _put_array(place: Folder, name: str, content: np.ndarray) -> None:
    with place.scratch_folder() as folder:
        file = folder / Path(name).name
        np.save(file, content)
        place.put(name, file)


def _write_later(place: Folder, parts: Sequence[Rows], config: FilterConfig) -> None:
    """Write which rows of each part have the value of an earlier row."""
    runs = []
    for number, part in enumerate(parts):
        num_runs = json.loads(place.read(f"{DIGESTS}/{part.stem}.json"))["runs"]
        runs += [(number, place.path / DIGESTS / f"{part.stem}-{run:02d}.npy") for run in range(num_runs)]

    def put(number: int, rows: np.ndarray) -> None:
        _put_array(place, f"{LATER}/{parts[number].stem}.npy", rows)

    with place.scratch_folder() as folder:
        duplicates_of(runs, config.rows_at_once, folder, put)
    place.put_bytes(f"{LATER}/{ALL}", b"{}\n")
    for _, path in runs:
        path.unlink(missing_ok=True)


def write_rows(place: Folder, parts: Sequence[Rows], config: FilterConfig, number: int) -> int:
    """Write the rows of one part that are wanted, and its account; return how many rows were read."""
    part, parquet = parts[number], needed("pyarrow.parquet")
    later = place.path / LATER / f"{part.stem}.npy"
    is_later = np.load(later) if later.is_file() else np.empty(0, np.uint32)
    left_out: Counter[str] = Counter()
    kept = first = 0
    with place.scratch_folder() as folder:
        file = folder / f"{part.stem}.parquet"
        with open_table(part.path) as table:
            schema = without_views(table.schema_arrow)
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            groups = RowGroups(writer, config.rows_per_tar)
            asked = conditions(config, part.columns)
            for batch in batches(part):
                wanted = wanted_rows(batch, asked, left_out)
                of_batch = is_later[slice(*np.searchsorted(is_later, [first, first + batch.num_rows]))]
                wanted[of_batch - first] = False
                left_out[DUPLICATE] += len(of_batch)
                first, kept = first + batch.num_rows, kept + int(wanted.sum())
                groups.add(batch.filter(needed("pyarrow").array(wanted)))
            groups.close()
        account = {"rows": first, "kept": kept, "left_out": {why: num for why, num in left_out.items() if num}}
        assert first == kept + sum(left_out.values()), account
        if first != part.num_rows:
            raise Failed(f"{part.path}: {first:,} rows were read of {part.num_rows:,}. {AGAIN}")
        place.put(f"{part.stem}.parquet", file)
    place.put_bytes(f"{part.stem}.json", (json.dumps(account, indent=1) + "\n").encode())
    return part.num_rows


class RowGroups:
    """Writes rows in groups of one length, but for the last one."""

    def __init__(self, writer: Any, length: int):
        self._writer, self._length = writer, length
        self._held: list[Any] = []
        self._num_held = 0

    def add(self, batch: Any) -> None:
        """Take rows, and write the groups that are full."""
        while batch.num_rows:
            taken = batch.slice(0, self._length - self._num_held)
            batch = batch.slice(taken.num_rows)
            self._held.append(taken)
            self._num_held += taken.num_rows
            if self._num_held == self._length:
                self.close()

    def close(self) -> None:
        """Write what is held."""
        if self._held:
            table = needed("pyarrow").Table.from_batches(self._held)
            self._writer.write_table(table, row_group_size=self._length)
        self._held, self._num_held = [], 0


def filtered_parts(config: LaionConfig) -> list[Path]:
    """Return the files of the finished stage. Raises Refused: it is not finished."""
    folder, names = config.inside(FILTERED), []
    if (folder / PLAN_FILE).is_file():  # and not the metadata, which may be removed in whole or in part by now
        names = [part["name"] for part in json.loads((folder / PLAN_FILE).read_bytes())["parts"]]
    finals = [(folder / name, folder / f"{name.removesuffix('.parquet')}.json") for name in names]
    missing = sum(not (path.is_file() and account.is_file()) for path, account in finals)
    if not names or missing:
        what = f"{missing} of {len(names)} parts are missing" if names else "there are none"
        raise Refused(f"filter: {folder}: {what}. {GO_ON}: python -m prepare.laion filter")
    return [path for path, _ in finals]
