"""Read samples from Hugging Face data sets: on the hub, or a local folder in that form. They are streamed, not downloaded.

    hf://datasets/OWNER/NAME     on the hub, with config=, split= and revision= where there are several
    FOLDER split=train           a folder that `datasets` reads, such as a clone of one on the hub

The library `datasets` reads them (requirements/tables.lock). A part is one of the data set's own files, as it cuts them. A
branch of the hub moves, so the plan has its commit, and every part is read from that. A data set whose making needs code of
its own is refused: the library runs none.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from cli.errors import Failed, Refused
from prepare.parts import GO_ON
from prepare.samples import Sample, SourceError, Taken
from prepare.sources import Ignore, Source, damage_told
from prepare.tables import ROWS_AT_ONCE, ImageFiles, Table, check_columns, log_lost, needed, rows_of
from stages.images import SampleError

HUB = "hf://datasets/"
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*", re.ASCII)


@dataclass(frozen=True)
class HubKeys:
    """What of a data set is read, as the user gave it; None: the only one that there is, or `train`."""

    config: str | None = None
    split: str | None = None
    revision: str | None = None


@dataclass(frozen=True)
class Split:
    """One split of a data set.

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
    """Reads the files that rows of a data set on the hub name: those of that data set alone."""

    def __call__(self, path: str) -> bytes:
        if not path.rpartition("::")[2].startswith(f"{HUB}{self.folder}@"):
            raise SampleError("path leads out of the data set")
        import fsspec

        try:
            with fsspec.open(path, "rb") as file:
                return file.read()
        except Exception as error:  # of the hub's client and of its HTTP library
            if isinstance(error, FileNotFoundError) or type(error).__name__.endswith("EntryNotFoundError"):
                raise SampleError("no such image file") from error
            raise Failed(f"SOURCE: {path} cannot be read: {_first_line(error)}. {GO_ON}.") from error


@dataclass(frozen=True)
class HubShard(Table):
    """One of a split's own files."""

    split: Split
    number: int
    num_shards: int

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.split.name}, file {self.number + 1} of {self.num_shards}"

    @property
    def file_name(self) -> str:
        """What the keys of its rows begin with."""
        return f"{self.split.split}-{self.number:05d}"

    def known_by(self) -> dict[str, Any]:
        known = {"revision": self.split.revision, "digest": self.split.digest}
        return {"name": self.name, **{key: value for key, value in known.items() if value is not None}}

    def read(self, taken: Taken | None, folder: Path, ignore: Ignore) -> Iterator[Sample]:
        of_hub = self.split.revision is not None
        files = HubFiles(self.split.address) if of_hub else ImageFiles(self.split.address)
        lost = Counter[str]()
        with _network_told(self.name) if of_hub else damage_told(self.name):
            data = stream(self.split)
            if data.features:
                check_columns(data.features, taken)
            tables = data.shard(num_shards=self.num_shards, index=self.number).with_format("arrow").iter(ROWS_AT_ONCE)
            batches = (batch for table in tables for batch in table.to_batches())
            rows = (row for batch in batches for row in rows_of(batch, lost))
            yield from self.named_rows(((row, None) for row in rows), taken, files)
        log_lost(lost, self.name)


@functools.lru_cache(maxsize=4)  # it asks the hub for its files; worker processes inherit what the first one heard
def stream(split: Split) -> Any:
    """Return the data set, whose images come as their files' bytes, not decoded."""
    data = needed("datasets").load_dataset(
        split.address, split.config, split=split.split, revision=split.revision, streaming=True
    )
    return data.decode(False)


@contextlib.contextmanager
def _network_told(name: str) -> Iterator[None]:
    """Turn an error of the hub or the network into Failed: a part that lacks samples would stay so."""
    try:
        yield
    except (Failed, Refused, SourceError):
        raise
    except Exception as error:  # of the hub's client, of its HTTP library, of decoders
        is_damage = isinstance(error, ValueError) or type(error).__module__.startswith("pyarrow")
        if is_damage and not isinstance(error, OSError):
            raise SourceError("cannot be read to its end") from error
        raise Failed(f"SOURCE: {name} cannot be read: {_first_line(error)}. {GO_ON}.") from error


def find_split(address: str, keys: HubKeys) -> list[Source]:
    """Return the parts of a data set's split.

    Args:
        address: OWNER/NAME on the hub, or a folder.

    Raises:
        Refused: `datasets` is not installed.
        ValueError: there is no such data set, configuration, split or revision; says which there are.
    """
    from huggingface_hub import HfApi

    datasets, folder = needed("datasets"), Path(address)
    is_folder = folder.is_dir()
    if is_folder and keys.revision:
        raise ValueError(f"revision: {address} is a folder, which has none. Leave it out.")
    try:
        revision = None if is_folder else HfApi().dataset_info(address, revision=keys.revision).sha
        config = _one("config", datasets.get_dataset_config_names(address, revision=revision), keys.config, address)
        splits = datasets.get_dataset_split_names(address, config, revision=revision)
        split = _one("split", splits, keys.split or ("train" if "train" in splits else None), address)
        of = Split(address, config, split, revision, _digest(folder) if is_folder else None)
        num_shards = stream(of).num_shards
    except Exception as error:  # of a dozen classes of two libraries
        if type(error) is ValueError and str(error).startswith(("config:", "split:")):
            raise
        raise ValueError(f"SOURCE: {_why(error, address, keys.revision)}") from error
    return [HubShard(of, number, num_shards) for number in range(num_shards)]


def _why(error: Exception, address: str, revision: str | None) -> str:
    """Return why a data set was not to be had, and what to do."""
    if Path(address).is_dir():
        return f"{address} is not in a form that `datasets` reads ({_first_line(error)}). Give its files."
    todo = {
        "GatedRepoError": "Ask for access on its page, and set HF_TOKEN to a token of that account",
        "RevisionNotFoundError": f"It has no revision '{revision}'. Check its name",
        "RepositoryNotFoundError": "Check the name, and HF_TOKEN where it is private",
        "DatasetNotFoundError": "Check the name, and HF_TOKEN where it is private or gated",
        "RuntimeError": "If it is made by code, which is never run: give its files, or revision=refs/convert/parquet",
    }.get(type(error).__name__, "Check the network, HF_ENDPOINT and HF_HUB_OFFLINE; or give its files")
    return f"{address}: no such folder here, and not to be read on the hub: {_first_line(error)}. {todo}."


def _one(key: str, possible: list[str], given: str | None, address: str) -> str:
    if given in possible:
        return given
    if given is None and len(possible) == 1:
        return possible[0]
    what = "is not given" if given is None else f"is {given}"
    raise ValueError(f"{key}: {what}. {address} has: {', '.join(possible)}. Give {key}=NAME.")


def _digest(folder: Path) -> str:
    """Return a digest of the names and sizes of a folder's files."""
    digest = xxhash.xxh3_64()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name} {path.stat().st_size}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    text = (str(error).splitlines() or [""])[0].strip().rstrip(".")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
