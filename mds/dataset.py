"""A dataset on disk or in a store: what `index.json` and `dataset.json` say of it, read and written.

A dataset is an MDS dataset (`index.json` and shards, with hashes) with a `dataset.json` next to the index that says what
made it. A folder without both is not a dataset: `index.json` is written last, so a half-written one has none.

A third-party dataset has its own index, and a `dataset.json` that prepare.adopt writes, which may lie elsewhere.
Its shards may be compressed, and have hashes of another kind or none, and columns of other names (mds/adopted.py).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from streaming.base.storage.download import DOWNLOADER_MAPPINGS

from common.files import atomic_path, write_json
from mds.adopted import AdoptedColumns, parse_adopted_columns
from mds.fetch import HASH, file_digest, known_digest
from mds.index import (
    DIGEST,
    INDEX,
    MISSING,
    REMAKE,
    REMAKE_ADOPTED,
    Index,
    check_adopted_columns,
    check_memory,
    fits_in_memory,
    is_integer,
    is_list_of_str,
    parse_index,
    parse_object,
    value_error,
)
from mds.shard_table import NO_SHARDS, ShardTable
from mds.stores import address_problem, as_user_error, download_once, explain_store_error, read_stored_size, scheme_of

METADATA_FILE = "dataset.json"
METADATA_SCHEMA = 1
KEYS_DIGEST = "keys_xxh64"
"""Its key of the digest of keys.u64."""
EMPTY_DIGEST = "empty_text_xxh64"
"""Its key of the digest of empty_text.safetensors, see mds/moments.py."""
KINDS = {
    "images": {"jpg": "bytes", "caption": "str", "key": ""},
    "videos": {"mp4": "bytes", "caption": "str", "key": "", "num_frames": "int", "fps": "float64"},
    "moments": {"moments": "ndarray"},
}
"""Kind of dataset -> the columns that every run reads, and how their encodings begin."""
ADOPT_COMMAND = "python -m prepare.adopt"
STORE_SILENCE_SEC = 10.0  # dataset.json is requested three times; a run waits for its shards, this does not
BUCKET = re.compile(r"[1-9]\d*x[1-9]\d*")
REMAKE_BUCKETS = "Make the buckets again: python -m prepare.buckets --help"


def is_remote(location: str) -> bool:
    """True for an address in a store (s3://bucket/prefix), False for a folder."""
    return bool(scheme_of(location))


@dataclass(frozen=True)
class Dataset:
    """What `index.json` and `dataset.json` say about a dataset."""

    location: str
    kind: str
    """images, videos or moments."""
    index_sha256: str
    num_samples: int
    columns: tuple[str, ...]
    encodings: tuple[str, ...]
    """Of the columns, as MDS names them: str, ndarray:float16:8,64,64."""
    largest_shard_bytes: int
    shards: ShardTable = field(default=NO_SHARDS, repr=False, compare=False)
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The rest of dataset.json: family, image_size, normalize, encoders, as far as the dataset has them."""
    metadata_address: str = ""
    """The path or address of dataset.json."""
    is_compressed: bool = False
    buckets: tuple[Dataset, ...] = ()
    """The datasets of a set of buckets, one for each size (mds/images.py)."""

    @property
    def size(self) -> tuple[int, int]:
        """(width, height) in pixels of a bucket's images."""
        return tuple(self.metadata["image_size"])

    @property
    def has_captions(self) -> bool:
        """An image may have several captions."""
        if self.adopted is None:
            return "captions" in self.columns
        encodings = dict(zip(self.columns, self.encodings, strict=True))
        return len(self.adopted.captions) > 1 or encodings[self.adopted.captions[0]] == "json"

    def digests(self) -> Iterator[str]:
        """Yield the digest of each shard, of the kind that is computed fastest; "" where it has none."""
        return ((known_digest(json.loads(hashes)) or ("", ""))[1] for hashes in self.shards.hashes)

    @property
    def adopted(self) -> AdoptedColumns | None:
        """The columns that are read of a third-party dataset; None: the dataset is ours."""
        return parse_adopted_columns(self.metadata)


def array_encoding(stored: str, shape: Sequence[int]) -> str:
    """Return the encoding of a column of arrays of one shape, e.g. ndarray:float16:8,64,64."""
    return f"ndarray:{stored}:{','.join(map(str, shape))}"


def column_problem(dataset: Dataset, encodings: Mapping[str, str]) -> str | None:
    """Say that a dataset has not the columns that a run reads, or None.

    Args:
        encodings: column -> its encoding, of a dataset of moments; those that the run knows.
    """
    if dataset.adopted is not None:
        return None  # read_dataset has looked at them
    expected = {**KINDS[dataset.kind], **(encodings if dataset.kind == "moments" else {})}
    expected |= {"captions": "json"} if "captions" in dataset.columns else {}
    if missing := [name for name in expected if name not in dataset.columns]:
        return f"{dataset.location} has no column {', '.join(missing)}. Rebuild the dataset."
    stored = dict(zip(dataset.columns, dataset.encodings, strict=True))
    for name, encoding in expected.items():
        if not stored[name].startswith(encoding) or (name in encodings and stored[name] != encoding):
            problem = f"{dataset.location} has a column {name} of {stored[name]}, this run reads {encoding}"
            return f"{problem}. Rebuild the dataset."
    return None


def read_dataset(location: str, metadata_address: str | None = None) -> Dataset:
    """Read the metadata of the dataset at a folder or store address.

    All that a reader of the dataset leans on is looked at here, so that nothing of it fails later: what both files hold, that
    they belong together, and in a folder that every shard is there in its size.

    Args:
        metadata_address: address of dataset.json, if it lies elsewhere: a file, or an address.

    Raises:
        ValueError: nothing is there, it is no dataset, or a file cannot be read; says which and what to do.
    """
    metadata_address = metadata_address or f"{location.rstrip('/')}/{METADATA_FILE}"
    text = _read_index_bytes(location)
    _, metadata = read_json(
        *split_address(metadata_address), or_adopt=f" If others have written it: {ADOPT_COMMAND} {location}"
    )
    index = parse_index(location, text, metadata.get("columns") is not None, "buckets" in metadata)
    _check_metadata(metadata_address, location, metadata, index)
    if "buckets" in metadata:
        return _read_buckets(location, metadata_address, metadata)
    shards, columns = index.shards, parse_adopted_columns(metadata)
    if columns is not None:
        check_adopted_columns(location, columns, shards)
    if not is_remote(location):
        _check_shards(location, shards, REMAKE_ADOPTED if columns else REMAKE)
    return Dataset(
        location=location,
        kind=metadata["stage"],
        index_sha256=index.sha256,
        num_samples=metadata["samples"],
        columns=tuple(shards[0]["column_names"]),
        encodings=tuple(shards[0]["column_encodings"]),
        largest_shard_bytes=int((shards.raw_bytes + shards.zip_bytes).max()),
        shards=shards,
        metadata=metadata,
        metadata_address=metadata_address,
        is_compressed=shards.is_compressed,
    )


def _read_buckets(location: str, metadata_address: str, metadata: Mapping[str, Any]) -> Dataset:
    """Read each dataset of a set of buckets. Raises ValueError: one is not there, or is none of this set's."""
    names = metadata["buckets"]
    if not is_list_of_str(names) or not names or not all(map(BUCKET.fullmatch, names)) or len(set(names)) < len(names):
        raise value_error(metadata_address, "buckets", names, "a list of sizes, e.g. 576x448", REMAKE_BUCKETS)
    buckets = tuple(read_dataset(f"{location.rstrip('/')}/{name}") for name in names)
    for name, dataset in zip(names, buckets, strict=True):
        if dataset.kind != metadata["stage"] or dataset.metadata.get("image_size") != [
            int(px) for px in name.split("x")
        ]:
            description = f"{dataset.kind} of {dataset.metadata.get('image_size')} px"
            raise ValueError(
                f"{dataset.location} has {description}, and is no bucket of {metadata_address}. {REMAKE_BUCKETS}"
            )
    if not is_integer(metadata.get("samples"), total := sum(dataset.num_samples for dataset in buckets)):
        description = metadata.get("samples", MISSING)
        raise value_error(metadata_address, "samples", description, f"{total}, the sum of its buckets", REMAKE_BUCKETS)
    digests = "".join(f"{name} {dataset.index_sha256}\n" for name, dataset in zip(names, buckets, strict=True))
    return Dataset(
        location=location,
        kind=metadata["stage"],
        index_sha256=hashlib.sha256(digests.encode()).hexdigest(),
        num_samples=metadata["samples"],
        columns=buckets[0].columns,
        encodings=buckets[0].encodings,
        largest_shard_bytes=max(dataset.largest_shard_bytes for dataset in buckets),
        metadata=metadata,
        metadata_address=metadata_address,
        buckets=buckets,
    )


def read_index(location: str) -> Index:
    """Return index.json of a third-party dataset at a folder or store address. Raises ValueError: nothing is there."""
    return parse_index(location, _read_index_bytes(location), is_adopted=True)


def _read_index_bytes(location: str) -> bytes:
    if text := address_problem(location):
        raise ValueError(text)
    scheme = scheme_of(location)
    if scheme not in DOWNLOADER_MAPPINGS:
        known = ", ".join(f"{name}://" for name in sorted(name for name in DOWNLOADER_MAPPINGS if name))
        raise ValueError(f"'{location}' is in no known store. Known: a folder, {known}.")
    if not scheme and not os.path.isdir(location):  # noqa: PTH112  # a Path raises where a name is too long
        raise ValueError(f"no folder {location}. Check the path, or make the dataset: python -m prepare.shards --help")
    return _read_bytes(location, INDEX)


def split_address(address: str) -> tuple[str, str]:
    """Return (folder or address, name) of a file's path or address."""
    folder, slash, name = address.rpartition("/")
    return folder or ("/" if slash else "."), name


def _check_metadata(where: str, location: str, metadata: Mapping[str, Any], index: Index) -> None:
    """Look at what dataset.json says of every dataset. Raises ValueError."""
    is_adopted = metadata.get("columns") is not None
    advice = f"Adopt the dataset again: {ADOPT_COMMAND} {location}" if is_adopted else REMAKE
    of_index = metadata.get("index_sha256")
    if metadata.get("schema") == METADATA_SCHEMA and of_index != index.sha256:
        raise ValueError(
            f"{location}/{INDEX} (sha256 {index.sha256[:12]}) is not the one that {where} was written for "
            f"({str(of_index)[:12]}). {advice}"
        )
    encoders, total, columns = (
        metadata.get("encoders"),
        int(index.shards.samples.sum()),
        parse_adopted_columns(metadata),
    )
    known = [digest for digest in encoders.values() if digest is not None] if isinstance(encoders, dict) else None
    checks = [
        ("schema", is_integer(metadata.get("schema"), METADATA_SCHEMA), f"{METADATA_SCHEMA}, a number"),
        ("encoders", encoders is None or is_list_of_str(known), "an object of names and fingerprints"),
        ("stage", metadata.get("stage") in list(KINDS), " or ".join(map(json.dumps, KINDS))),
        (
            "samples",
            "buckets" in metadata or is_integer(metadata.get("samples"), total),
            f"{total}, the sum of {INDEX}",
        ),
    ]
    for name in (KEYS_DIGEST, EMPTY_DIGEST):
        digest = metadata.get(name)
        is_right = digest is None or (isinstance(digest, str) and DIGEST.fullmatch(digest) is not None)
        checks.append((name, is_right, "16 hexadecimal digits"))
    if is_adopted:
        is_right = columns is not None and metadata.get("stage") == "images"
        checks.append(("columns", is_right, "of a dataset of images, an object of captions, image and key"))
    for key, is_right, possible in checks:
        if not is_right:
            raise value_error(where, key, metadata.get(key, MISSING), possible, advice)


def _check_shards(folder: str, shards: ShardTable, remake: str) -> None:
    """Look for shards that are not there or were cut; without this a run finds them hours later."""
    for name, size in shards.iterate_stored_files():
        problem = "is missing or no file"
        with contextlib.suppress(OSError):
            status = os.stat(f"{folder}/{name}")  # noqa: PTH116  # a Path takes twice as long as the call
            if stat.S_ISREG(status.st_mode):
                problem = f"has {status.st_size:,} bytes"
                if status.st_size == size:
                    continue
        part = Path(folder, name).parent
        advice = remake if part == Path(folder) else f"Remove {part}, and give the command that made it again."
        raise ValueError(f"{folder}/{name} {problem}, {INDEX} says {size:,} bytes. {advice}")


def read_json(location: str, name: str, or_adopt: str = "") -> tuple[bytes, dict[str, Any]]:
    """Return a file of a dataset, as it is and read. `or_adopt`: added to a message that it is not there."""
    text = _read_bytes(location, name, or_adopt)
    return text, parse_object(f"{location}/{name}", text)


def _read_bytes(location: str, name: str, or_adopt: str = "") -> bytes:
    """Return a file of a dataset. Raises ValueError: it is not there, or would not fit into memory."""
    if not is_remote(location):
        path = Path(location, name)
        try:
            if not path.is_file():
                make = f"Make the dataset: python -m prepare.shards --help{'.' * bool(or_adopt)}{or_adopt}"
                raise ValueError(f"no {name} under {location}. {make}")
            check_memory(f"{location}/{name}", path.stat().st_size)
            return path.read_bytes()
        except OSError as error:
            raise ValueError(f"cannot read {path}: {error.strerror}.") from error
    address = f"{location.rstrip('/')}/{name}"
    # On NFS an open file keeps its folder until it is closed.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        try:
            size = read_stored_size(address, STORE_SILENCE_SEC) if name == INDEX else None
            if size is None or fits_in_memory(size):
                download_once(address, f"{folder}/{name}", STORE_SILENCE_SEC)
                size = Path(folder, name).stat().st_size
        except Exception as error:  # each store's client has its own exceptions
            raise as_user_error(error, f"{explain_store_error(error, location)}{or_adopt}") from error
        check_memory(address, size)
        return Path(folder, name).read_bytes()


def fetch_side_file(dataset: Dataset, name: str, expected_digest: str, folder: str | None) -> Path:
    """Return a local path of a file next to dataset.json. Raises ValueError: it is not there, or another.

    Args:
        expected_digest: its digest, of the kind HASH.
        folder: where that of a dataset in a store is kept.
    """
    source = f"{dataset.location.rstrip('/')}/{name}"
    path = Path(source)
    if is_remote(dataset.location):
        assert folder is not None
        path = Path(folder, name)
        if path.is_file() and file_digest(path) == expected_digest:
            return path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as temporary:
                download_once(source, str(temporary))
        except Exception as error:  # each store's client has its own exceptions
            raise as_user_error(error, explain_store_error(error, source)) from error
    try:
        digest = file_digest(path)
    except OSError as error:
        raise ValueError(f"{source} cannot be read: {error.strerror}; dataset.json names it. Copy it again.") from error
    if digest != expected_digest:
        raise ValueError(
            f"{source} is damaged: its {HASH} is {digest}, dataset.json says {expected_digest}. Copy it again."
        )
    return path


def write_metadata(folder: Path, kind: str, metadata: dict[str, Any]) -> None:
    """Write `dataset.json` next to an existing index; its digest covers every shard through its hash."""
    index = (folder / "index.json").read_bytes()
    content = {
        "schema": METADATA_SCHEMA,
        "stage": kind,
        "samples": sum(shard["samples"] for shard in json.loads(index)["shards"]),
        "index_sha256": hashlib.sha256(index).hexdigest(),
        **metadata,
    }
    write_json(folder / METADATA_FILE, content)


# --- which samples a dataset has ---
#
#     keys.u64    a little-endian uint64 for each sample, sorted: xxh3_64 of its key, a zero byte and its caption
#
# The caption belongs to it: img2dataset numbers the samples of every dataset alike. dataset.json has the file's digest
# (`keys_xxh64`). A dataset that was made before, or by others, has neither.

KEYS_FILE = "keys.u64"
DIGEST_DTYPE = np.dtype("<u8")


def key_digest(sample: Mapping[str, Any]) -> int:
    """Return a sample's digest, 64 bits, from its columns."""
    caption = sample.get("caption", "")
    if isinstance(caption, list):  # third-party; a dataset that is made from it has the first usable one
        caption = next((text.strip() for text in caption if text.strip()), "")
    return xxhash.xxh3_64_intdigest(f"{sample['key']}\0{caption}".encode())


def sort_digests(digests: Collection[int]) -> np.ndarray:
    """Return digests as `keys.u64` has them."""
    return np.sort(np.fromiter(digests, DIGEST_DTYPE, len(digests)))


def find_known_keys(dataset: Dataset, digests: np.ndarray, folder: str | None) -> np.ndarray | None:
    """Say for each digest whether a sample of the dataset has it, bool (N,); None: the dataset has no list of them.

    Args:
        digests: uint64 (N,).
        folder: where the list of a dataset in a store is kept.

    Raises:
        ValueError: the list that dataset.json names is not there, or is damaged.
    """
    keys_digest = dataset.metadata.get(KEYS_DIGEST)
    if keys_digest is None:
        return None
    path = fetch_side_file(dataset, KEYS_FILE, keys_digest, folder)
    known = np.memmap(path, DIGEST_DTYPE, "r")  # of a large dataset some GiB, of which a search reads a few pages
    positions = np.minimum(np.searchsorted(known, digests), len(known) - 1)
    return known[positions] == digests
