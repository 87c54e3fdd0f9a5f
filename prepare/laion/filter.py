"""The stage `filter`: of each part of the metadata the rows that are wanted, in a Parquet file of the same name.

    FOLDER/filtered/plan.json           the parts and the conditions; another command's are refused
    FOLDER/filtered/later/NAME.npy ...  of `unique`: rows whose value an earlier row has had; then all.json
    FOLDER/filtered/NAME.parquet        the rows that are left, a row group for each tar
    FOLDER/filtered/NAME.json           last: how many rows there were, and why others were left out

Parts are read by a few rows at a time, so that memory does not depend on their length. A row counts under the first
condition that it does not meet, so that the counts and the rows that are left add up to all. A row is a duplicate only of one
that stays.
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
from tqdm import tqdm

from common.errors import ConfigError, Failed, Refused
from prepare import tables
from prepare.addresses import Folder
from prepare.arguments import RESUME_HINT
from prepare.laion.config import FILTERED, METADATA, FilterConfig, LaionConfig
from prepare.parts import PLAN_FILE, Plan, begin_dataset
from prepare.samples import usual_name
from prepare.sources import identify_file

MADE_BY = "prepare.laion filter"
ROWS_IN_MEMORY = 65_536  # in memory
LATER, ALL = "later", "all.json"
REFETCH_HINT = "Remove it, and run: python -m prepare.laion metadata"

# Of LAION-400M, LAION-5B, COYO and CC12M, in any case of letters.
USUAL = {
    "url": ("url", "image_url"),
    "caption": ("text", "caption", "top_caption"),
    "license": ("license",),
    "nsfw": ("nsfw",),
    "language": ("language", "lang"),
    "width": ("width", "original_width"),
    "height": ("height", "original_height"),
    "similarity": ("similarity", "clip_similarity_vitl14", "clip_similarity_vitb32"),
    "unsafe": ("punsafe",),
    "watermark": ("pwatermark", "watermark_score"),
}
NUMBERS = ("width", "height", "similarity", "unsafe", "watermark")


def import_optional(module: str) -> Any:
    """Return a module that the environment may lack. Raises Refused."""
    return tables.import_optional(module, "prepare.laion: {} is not installed, which it works with", "prepare")


# --- columns ---


def find_columns(schema: Any, config: FilterConfig, where: str) -> dict[str, str]:
    """Return role -> column of a table, for the roles that are needed.

    Args:
        schema: pyarrow's.
        where: the file, for messages.

    Raises:
        ValueError: one is missing, there twice or of another type; a problem a line.
    """
    types, problems, columns = import_optional("pyarrow").types, [], {}
    column_keys = {"url": config.url, "caption": config.caption, "unique": config.unique}
    conditions_by_role = {"license": config.licenses, "nsfw": config.nsfw, "language": config.languages}
    conditions_by_role |= dict.fromkeys(("width", "height"), config.min_side_px or config.max_aspect)
    conditions_by_role |= {
        "similarity": config.min_similarity,
        "unsafe": config.max_unsafe,
        "watermark": config.max_watermark,
    }
    roles = ["url", "caption", *(role for role, value in conditions_by_role.items() if value is not None)]
    for role in [*roles, "unique"] if config.unique not in (None, "url") else roles:
        possible = (str(column_keys[role]),) if column_keys.get(role) else USUAL[role]
        name = possible[0] if possible[0] in schema.names else usual_name(schema.names, possible)
        if name is None or schema.names.count(name) > 1:
            has = f"It has {', '.join(schema.names[:20])}"
            problems.append(
                f"filter: {where} has no column for {role}, or more than one: {' or '.join(possible)}. {has}."
            )
            continue
        columns[role] = name
        kind = schema.field(name).type
        kind = kind.value_type if types.is_dictionary(kind) else kind
        is_number = types.is_integer(kind) or types.is_floating(kind)
        if role != "unique" and not types.is_null(kind) and is_number != (role in NUMBERS):
            wanted = "numbers" if role in NUMBERS else "texts"
            problems.append(f"filter: {name} of {where} is {kind}. Possible for {role}: {wanted}. Give another column.")
    if config.unique == "url" and "url" in columns:
        columns["unique"] = columns["url"]
    if problems:
        raise ValueError("\n".join(problems))
    return columns


# --- conditions ---


def conditions(batch: Any, config: FilterConfig, columns: dict[str, str]) -> Iterator[tuple[str, Any]]:
    """Yield, in order, why a row of a batch is left out, and which rows are not: an Arrow array, null counting as false."""
    arrow, compute = import_optional("pyarrow"), import_optional("pyarrow.compute")

    def text(role: str) -> Any:  # a dictionary's values, and a part's nulls without a type
        return compute.cast(batch.column(columns[role]), arrow.large_string())

    def number(role: str) -> Any:  # not each type of numbers can be compared
        return compute.cast(batch.column(columns[role]), arrow.float64(), safe=False)

    yield "no URL", compute.greater(compute.utf8_length(text("url")), 0)
    for role, names in (("license", config.licenses), ("nsfw", config.nsfw), ("language", config.languages)):
        if names is not None:  # `a,b`; `not a,b`: all others, missing ones included
            listed = [part.strip() for part in names.strip().removeprefix("not ").split(",")]
            is_listed = compute.is_in(text(role), value_set=arrow.array(listed, arrow.large_string()))
            yield f"{role} is not wanted", compute.invert(is_listed) if names.strip().startswith("not ") else is_listed
    if "width" in columns:
        both = number("width"), number("height")
        few, many = compute.min_element_wise(*both, skip_nulls=False), compute.max_element_wise(*both, skip_nulls=False)
        yield "no width or height", compute.greater(few, 0)
        if config.min_side_px is not None:
            yield f"side below {config.min_side_px} px", compute.greater_equal(few, config.min_side_px)
        if config.max_aspect is not None:
            is_narrow = compute.less_equal(many, compute.multiply(few, config.max_aspect))
            yield f"aspect above {config.max_aspect:g}", is_narrow
    if (least := config.min_similarity) is not None:
        name, values = columns["similarity"], number("similarity")
        yield f"no {name}", compute.is_finite(values)
        yield f"{name} below {least:g}", compute.greater_equal(values, least)
    for role, most in (("unsafe", config.max_unsafe), ("watermark", config.max_watermark)):
        if most is not None:
            yield f"no {columns[role]}", compute.is_finite(number(role))
            yield f"{columns[role]} above {most:g}", compute.less_equal(number(role), most)


def wanted_rows(batch: Any, config: FilterConfig, columns: dict[str, str], left_out: Counter[str]) -> Any:
    """Return the rows of a batch that meet all conditions, as a numpy array of truth values; count the others."""
    compute, wanted = import_optional("pyarrow.compute"), np.ones(batch.num_rows, bool)
    for why, meets in conditions(batch, config, columns):
        is_met = compute.fill_null(meets, False).to_numpy(zero_copy_only=False)
        left_out[why] += int((wanted & ~is_met).sum())
        wanted &= is_met
    return wanted


# --- the parts ---


@dataclass(frozen=True)
class MetadataPart:
    """One part of the metadata. columns: role -> column."""

    path: Path
    num_rows: int
    columns: dict[str, str]

    @property
    def stem(self) -> str:
        return self.path.name.removesuffix(".parquet")


def find_metadata_parts(folder: Path, config: FilterConfig) -> list[MetadataPart]:
    """Return the parts of the metadata, whose heads are read. Raises ConfigError: what is wrong with them."""
    paths = sorted(folder.glob("*.parquet")) if folder.is_dir() else []
    if not paths:
        raise ConfigError([f"folder: no *.parquet in {folder}. Put them there, or give metadata.urls."])
    problems, parts = [], []
    for path in paths:
        try:
            with open_table(path) as table:
                parts.append(
                    MetadataPart(path, table.metadata.num_rows, find_columns(table.schema_arrow, config, str(path)))
                )
        except (OSError, ValueError) as error:
            problems += str(error).splitlines()
    if problems:
        raise ConfigError(problems)
    return parts


def open_table(path: Path, todo: str = REFETCH_HINT) -> Any:
    """Open a Parquet file. Raises ValueError: it is none, or is cut off; OSError: the disk is at fault."""
    parquet = import_optional("pyarrow.parquet")
    try:
        return parquet.ParquetFile(path, pre_buffer=False, buffer_size=2**20)
    except (OSError, ValueError) as error:  # pyarrow's own are of these kinds
        if isinstance(error, OSError) and error.errno is not None:
            raise
        raise ValueError(f"{path}: cannot be read as Parquet: {_first_line(error)}. {todo}") from error


def without_views(schema: Any) -> Any:
    """Return a schema with plain types for string_view and binary_view, whose rows pyarrow cannot take."""
    arrow = import_optional("pyarrow")
    plain = {arrow.string_view(): arrow.large_string(), arrow.binary_view(): arrow.large_binary()}
    return arrow.schema([field.with_type(plain.get(field.type, field.type)) for field in schema], schema.metadata)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].strip().rstrip(".")


def iter_batches(part: MetadataPart, names: Sequence[str] | None = None) -> Iterator[Any]:
    """Yield a part's rows, a few at a time. Raises Failed: they cannot be read to their end."""
    num_read = 0
    try:
        with open_table(part.path) as table:
            for batch in table.iter_batches(ROWS_IN_MEMORY, columns=names, use_threads=False):
                yield batch.cast(without_views(batch.schema))
                num_read += batch.num_rows
    except (OSError, ValueError) as error:
        text = f"{part.path}: damaged after row {num_read:,} of {part.num_rows:,}: {_first_line(error)}"
        raise Failed(f"{text}. {REFETCH_HINT}") from error


# --- the stage ---

RunOnEngine = Callable[[Callable[[int], Any], Sequence[int], Sequence[int], str], None]
"""Calls a function with each number on an engine, and shows the progress under a name. The third: rows of each number."""


def filter_all(config: LaionConfig, run: RunOnEngine) -> None:
    """Make the dataset, or what is missing of it."""
    filter_config = config.filter
    address, parts = (
        Folder(str(config.subfolder(FILTERED))),
        find_metadata_parts(config.subfolder(METADATA), filter_config),
    )
    keys = {key: value for key, value in asdict(filter_config).items() if value is not None}
    inputs = [{**identify_file(part.path), "rows": part.num_rows} for part in parts]
    with address.lock_for_writing():
        begin_dataset(address, Plan(MADE_BY, "rows", {}, 0, {"filter": keys}, inputs))
        existing_files = address.list_files()
        if filter_config.unique is not None and f"{LATER}/{ALL}" not in existing_files:
            write_later_duplicates(address, parts, filter_config)
        todo = [number for number, part in enumerate(parts) if f"{part.stem}.json" not in existing_files]
        run(
            functools.partial(write_rows, address, parts, filter_config),
            todo,
            [part.num_rows for part in parts],
            "filter",
        )
        address.clear_scratch()


def write_later_duplicates(address: Folder, parts: Sequence[MetadataPart], config: FilterConfig) -> None:
    """Write which wanted rows of each part have the value of an earlier one, by 64 bits of the values' hashes."""
    import pandas

    hashes_by_part = [_hash_unique_column(part, config) for part in tqdm(parts, unit=" parts", desc="unique")]
    is_later = pandas.Series(np.concatenate([hashes for _, hashes in hashes_by_part])).duplicated().to_numpy()
    first = 0
    for part, (rows, _) in zip(parts, hashes_by_part, strict=True):
        with address.scratch_folder() as folder:
            np.save(folder / f"{part.stem}.npy", rows[is_later[first : first + len(rows)]])
            address.put(f"{LATER}/{part.stem}.npy", folder / f"{part.stem}.npy")
        first += len(rows)
    address.put_bytes(f"{LATER}/{ALL}", b"{}\n")


def _hash_unique_column(part: MetadataPart, config: FilterConfig) -> tuple[np.ndarray, np.ndarray]:
    """Return the wanted rows of a part that have a value in the column of `unique`, and 64 bits of each value's hash."""
    from pandas.util import hash_array

    arrow = import_optional("pyarrow")
    rows, hashes, first = [np.empty(0, np.int64)], [np.empty(0, np.uint64)], 0
    for batch in iter_batches(part, sorted(set(part.columns.values()))):
        column = batch.column(part.columns["unique"])
        if not arrow.types.is_binary(column.type) and not arrow.types.is_large_binary(column.type):
            column = column.cast(arrow.large_string())
        is_valid = column.is_valid().to_numpy(zero_copy_only=False)
        [batch_rows] = np.nonzero(wanted_rows(batch, config, part.columns, Counter()) & is_valid)
        values = column.take(arrow.array(batch_rows)).cast(
            arrow.large_binary()
        )  # not each writer checks that it is UTF-8
        hashes.append(hash_array(np.array(values.to_pylist(), dtype=object), categorize=False))
        rows.append(batch_rows + first)
        first += batch.num_rows
    return np.concatenate(rows), np.concatenate(hashes)


def write_rows(address: Folder, parts: Sequence[MetadataPart], config: FilterConfig, number: int) -> int:
    """Write the rows of one part that are wanted, and its account; return how many rows were read."""
    part, arrow, parquet = parts[number], import_optional("pyarrow"), import_optional("pyarrow.parquet")
    later = address.path / LATER / f"{part.stem}.npy"
    is_later = np.load(later) if config.unique is not None else np.empty(0, np.int64)
    left_out: Counter[str] = Counter()
    num_kept = first = 0
    with address.scratch_folder() as folder:
        file = folder / f"{part.stem}.parquet"
        with open_table(part.path) as table:
            schema = without_views(table.schema_arrow)
        pending = schema.empty_table()
        with parquet.ParquetWriter(file, schema, compression="zstd") as writer:
            for batch in iter_batches(part):
                wanted = wanted_rows(batch, config, part.columns, left_out)
                of_batch = is_later[slice(*np.searchsorted(is_later, [first, first + batch.num_rows]))]
                wanted[of_batch - first] = False
                left_out["duplicate"] += len(of_batch)
                first, num_kept = first + batch.num_rows, num_kept + int(wanted.sum())
                pending = arrow.concat_tables(
                    [pending, arrow.Table.from_batches([batch.filter(arrow.array(wanted))], schema)]
                )
                while pending.num_rows >= config.rows_per_tar:
                    writer.write_table(pending.slice(0, config.rows_per_tar), row_group_size=config.rows_per_tar)
                    pending = pending.slice(config.rows_per_tar)
            if pending.num_rows:
                writer.write_table(pending)
        account = {"rows": first, "kept": num_kept, "left_out": {why: num for why, num in left_out.items() if num}}
        assert first == num_kept + sum(left_out.values()), account
        if first != part.num_rows:
            raise Failed(f"{part.path}: {first:,} rows were read of {part.num_rows:,}. {REFETCH_HINT}")
        address.put(f"{part.stem}.parquet", file)
    address.put_bytes(f"{part.stem}.json", (json.dumps(account, indent=1) + "\n").encode())
    return part.num_rows


def filtered_parts(config: LaionConfig) -> list[Path]:
    """Return the files of the finished stage. Raises Refused: it is not finished."""
    folder, names = config.subfolder(FILTERED), []
    if (folder / PLAN_FILE).is_file():  # and not the metadata, which may be removed in whole or in part by now
        names = [part["name"] for part in json.loads((folder / PLAN_FILE).read_bytes())["parts"]]
    missing = [name for name in names if not (folder / name).with_suffix(".json").is_file()]
    if not names or missing:
        what = f"{len(missing)} of {len(names)} parts are missing" if names else "there are none"
        raise Refused(f"filter: {folder}: {what}. {RESUME_HINT}: python -m prepare.laion filter")
    return [folder / name for name in names]
