"""Find the inputs that a SOURCE of the command line names: tars, folders of files, tables, or a Hugging Face dataset.

a file                by its suffix: a Parquet or Arrow file, a CSV file, JSON lines; any other is a tar
a folder, s3://...    its tars and its folders of images, or, where it has none, its tables, one level deep
hf://datasets/...     on the hub; also OWNER/NAME where there is no such folder here
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from common.errors import Refused
from common.files import read_json
from common.log import log
from mds.dataset import is_remote
from prepare.sources import (
    SUFFIXES,
    TAR_SUFFIXES,
    Source,
    StoreClient,
    StoreObject,
    TarSource,
    is_tar,
    list_objects,
    split_folder,
)
from prepare.tables import COLUMNAR, HUB, HUB_NAME, LINES, ColumnarFile, HubKeys, find_split, split_table

METADATA = tuple(f"metadata{suffix}" for suffix in (*LINES, ".parquet"))  # beside images, as Hugging Face has them
SPLIT_NAME = re.compile(r"(train|test|validation|valid|val|dev)(?![a-z])")
POSSIBLE = "a tar, a Parquet or Arrow file, a CSV file, JSON lines, a folder of these or of KEY.jpg, KEY.txt"


def find_sources(arguments: Sequence[str], keys: HubKeys, folder: Path) -> list[Source]:
    """Return the parts that these words stand for, in a fixed order.

    Args:
        keys: which part of a Hugging Face dataset.
        folder: for copies of tables that lie in a store.

    Raises:
        ValueError: a word stands for nothing; says what is possible.
        OSError: a file cannot be read.
    """
    sources, is_hub_source = [], False
    for word in arguments:
        name = hub_name(word)
        if keys.split and (Path(word) / "dataset_dict.json").is_file():  # as save_to_disk of `datasets` writes it
            sources += _sources_on_disk(Path(word, keys.split))
            is_hub_source = True
        elif name is not None or (keys != HubKeys() and Path(word).is_dir()):
            address, _, revision = (name or word).partition("@") if name else (word, "", "")
            revision = revision or keys.revision
            try:
                sources += find_split(address, HubKeys(keys.config, keys.split, revision or None))
            except Refused as error:
                if word.startswith(HUB) or Path(word).is_dir():
                    raise
                what = f"{word}: no such file or folder here. To look for it on the hub:"
                raise Refused(f"SOURCE: {what} {str(error).removeprefix('SOURCE: ')}") from error
            is_hub_source = True
        elif is_remote(word):
            sources += _sources_in_store(word, folder)
        else:
            sources += _sources_on_disk(Path(word))
    if keys != HubKeys() and not is_hub_source:
        key_name = next(key for key, value in vars(keys).items() if value)
        raise ValueError(f"{key_name}: no SOURCE is a Hugging Face dataset, or a folder of one. Leave it out.")
    return sources


def hub_name(word: str) -> str | None:
    """Return OWNER/NAME, or OWNER/NAME@REVISION, of a dataset on the hub; None: it is none."""
    if word.startswith(HUB):
        return word.removeprefix(HUB).strip("/")
    is_file = PurePosixPath(word).suffix in (*COLUMNAR, *LINES, ".json") or is_tar(word)
    is_name = HUB_NAME.fullmatch(word.partition("@")[0]) and not is_file and not Path(word).exists()
    return word if is_name and not Path(word).parent.exists() else None


def _sources_on_disk(path: Path) -> list[Source]:
    """Return the sources of a file or a folder. Raises ValueError: it is neither, or has none."""
    if path.is_file():
        return _sources_of_file(path, str(path.parent))
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder. Possible: {POSSIBLE}, s3://..., hf://datasets/OWNER/NAME.")
    sources: list[Source] = [TarSource(file) for file in sorted(path.iterdir()) if is_tar(file.name)]
    children = [path, *sorted(child for child in path.iterdir() if child.is_dir())]
    for child in children:
        if _holds_samples(child):
            table = next((child / name for name in METADATA if (child / name).is_file()), None)
            is_by_table = table is not None and not any(child.glob("*.txt"))
            sources += _sources_of_file(table, str(child)) if is_by_table else split_folder(child)
    for files in ([path], children[1:]):
        if not sources:
            tables = [table for child in files for table in _tables(child)]
            check_single_split([table.relative_to(path).as_posix() for table in tables], str(path))
            sources += [source for table in tables for source in _sources_of_file(table, str(table.parent))]
    if not sources:
        raise ValueError(f"{path}: holds neither tars nor images nor tables. Possible: {POSSIBLE}.")
    if deeper := [inner for child in children[1:] for inner in _too_deep(child)]:
        more = f" and {len(deeper) - 1:,} more" if len(deeper) > 1 else ""
        log.warning(f"SOURCE: {path}: too deep in it to be read: {deeper[0]}{more}. Give each folder as a SOURCE.")
    return sources


def _too_deep(folder: Path) -> Iterator[Path]:
    """Yield the tars of a folder in a SOURCE, and its folders of samples."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if (entry.is_dir() and _holds_samples(Path(entry.path))) or (entry.is_file() and is_tar(entry.name)):
                yield Path(entry.path)


def _holds_samples(folder: Path) -> bool:
    return any(child.suffix.lstrip(".").lower() in SUFFIXES for child in folder.iterdir())


def _tables(folder: Path) -> list[Path]:
    """Return a folder's tables of the first kind that it has."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # it is none
        # As save_to_disk of `datasets` writes it; other Arrow files there are its caches.
        state = read_json(folder / "state.json")
        return [folder / entry["filename"] for entry in state["_data_files"]]
    files = sorted(file for file in folder.iterdir() if file.is_file())
    kinds = ([file for file in files if file.name.endswith(suffix)] for suffix in (*COLUMNAR, *LINES))
    return next((tables for tables in kinds if tables), [])


def _sources_of_file(path: Path, folder: str) -> list[Source]:
    if path.suffix in COLUMNAR:
        return [ColumnarFile(path)]
    return list(split_table(path, folder)) if path.suffix in (*LINES, ".json") else [TarSource(path)]


def _sources_in_store(address: str, copies: Path) -> list[Source]:
    """Return the sources at an address. Raises ValueError: it cannot be listed, or there is none."""
    objects, prefix = list_objects(address), f"{address.rstrip('/')}/"
    if len(objects) == 1 and objects[0].address == address:
        return _sources_of_object(objects[0], copies)
    kinds = [(0, TAR_SUFFIXES), *((depth, suffix) for depth in (0, 1) for suffix in (*COLUMNAR, *LINES))]
    for depth, suffixes in kinds:
        level = [entry for entry in objects if entry.address.removeprefix(prefix).count("/") == depth]
        if matching := [entry for entry in level if entry.address.endswith(suffixes)]:
            check_single_split([entry.address.removeprefix(prefix) for entry in matching], address)
            return [source for entry in matching for source in _sources_of_object(entry, copies)]
    possible = "s3://BUCKET/FILE or a prefix with tars, Parquet or Arrow files, CSV files, JSON lines"
    raise ValueError(f"{address}: holds neither tars nor tables. Possible: {possible}.")


def _sources_of_object(entry: StoreObject, copies: Path) -> list[Source]:
    suffix = PurePosixPath(entry.name).suffix
    if suffix in COLUMNAR:
        return [ColumnarFile(entry)]
    if suffix not in (*LINES, ".json"):
        return [TarSource(entry)]
    folder = copies / f"{len(list(copies.iterdir()))}"
    folder.mkdir()
    return list(split_table(StoreClient().fetch(entry.address, folder), entry.address.rpartition("/")[0]))


def check_single_split(names: Sequence[str], where: str) -> None:
    """Raise ValueError if files are, by their names, of several splits: what is held out would be trained on."""
    if any(map(is_tar, names)):
        return
    splits = {found[1] for name in names for part in name.split("/")[-2:] if (found := SPLIT_NAME.match(part))}
    if len(splits) > 1:
        listed = ", ".join(sorted(splits))
        raise ValueError(
            f"SOURCE: {where} holds several splits, by the names of its files: {listed}. Give the files, or the folder, of "
            f"one; or split=NAME with the folder."
        )
