"""Adopt a third-party MDS dataset: name which columns are read, and write dataset.json. Nothing is copied.

    python -m prepare.adopt s3://bucket/laion/mds
    python -m prepare.adopt /data/theirs image=picture caption=text,alt_text key=id
    python -m prepare.adopt s3://not-mine/mds metadata=/data/theirs.json  # then data.metadata=/data/theirs.json in a run

REMOTE: a folder or an address in a store, with index.json and shards of streaming's MDSWriter: compressed or not, with hashes
of any kind or none. index.json is not changed. A sample is read, some rows of a few shards, their images decoded, and what
was seen is printed; nothing is known of the other rows. dataset.json is written beside index.json, or where `metadata` says;
it is the file that a run then asks for.

Columns that are not given are found by name (upper or lower case) and encoding:

    image     image, jpg, jpeg, png, webp, img, picture; else the only column of jpeg, png or pil
    caption   caption, captions, text, prompt, txt; a json column may have a list
    key       key, __key__, id, uid, image_id; none: the sample's number is its key

Keys: image, caption (a name, or several with commas between them), key, metadata, shards (4, to read), rows (64), seed (0).
Exit code: 0, 1 when the work failed, 2 when it could not start.
"""

from __future__ import annotations

import itertools
import json
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from common.command import command, start
from common.errors import ConfigError, Failed, Refused
from common.files import write_atomic
from common.log import render_table
from common.masking import to_printable
from common.value_types import limited
from mds.adopted import AdoptedColumns, encoding_problem
from mds.dataset import METADATA_FILE, METADATA_SCHEMA, is_remote, read_index, read_json, split_address
from mds.fetch import known_digest
from mds.images import IMAGE_SUFFIXES, RawImage, SampleError, decode_image, detect_format, read_captions, size_of
from mds.index import check_adopted_columns, file_in_store
from mds.shard_file import read_samples
from mds.shard_table import ShardTable
from prepare.addresses import open_address
from prepare.arguments import parse_arguments
from prepare.source_shards import open_shard

USUAL_NAMES = {
    "image": ("image", *IMAGE_SUFFIXES, "img", "picture"),
    "captions": ("caption", "captions", "text", "prompt", "txt"),
    "key": ("key", "__key__", "id", "uid", "image_id"),
}
KEY_OF = {"captions": "caption"}  # what a column is read as -> the key of this command, where it has another name


@dataclass(frozen=True)
class AdoptConfig:
    """The keys of this command."""

    image: str | None = None
    """Column of the images. null: found by its name."""
    caption: str | None = None
    """Column of the captions; several with commas between them. null: found by its name."""
    key: str | None = None
    """Column of the keys. null: found by its name; where there is none, the sample's number."""
    metadata: str | None = None
    """Where to write dataset.json, if not beside index.json: a file, or an address."""
    shards: int = limited(4, 1, 1000)
    """Shards to read."""
    rows: int = limited(64, 1, 10**5)
    """Rows to read in all."""
    seed: int = limited(0, 0, 2**32 - 1)
    """Seed for choosing the shards and rows."""


# --- columns ---


def find_columns(config: AdoptConfig, encodings: Mapping[str, str]) -> AdoptedColumns:
    """Return the columns to read. Raises ConfigError: a column is missing, or cannot be read so.

    Args:
        encodings: column -> encoding, of the first shard.
    """
    captions = [name for name in (config.caption or "").strip("[]").split(",") if name]
    named = {"image": [config.image] if config.image else [], "captions": captions}
    named["key"] = [config.key] if config.key else []
    has, problems = ", ".join(f"{column} ({encoding})" for column, encoding in encodings.items()), []
    for what, names in named.items():
        key = KEY_OF.get(what, what)
        for name in names:
            if name not in encodings:
                problems.append(f"{key}: the dataset has no column {name}. It has: {has}.")
            elif possible := encoding_problem(what, encodings[name]):
                problems.append(f"{key}: column {name} is {encodings[name]}. Possible: {possible}.")
        if not names:
            names += _usual_columns(what, encodings)
        if not names and what != "key":
            problems.append(f"{key}: not given, and no column is known by its name. It has: {has}.")
    if max(Counter(itertools.chain.from_iterable(named.values())).values(), default=0) > 1:
        problems.append("command line: a column is named twice. Name each once.")
    if problems:
        raise ConfigError(problems)
    return AdoptedColumns(
        image=named["image"][0], captions=tuple(named["captions"]), key=next(iter(named["key"]), None)
    )


def _usual_columns(what: str, encodings: Mapping[str, str]) -> list[str]:
    by_name = {name.lower(): name for name in reversed(encodings)}
    for name in USUAL_NAMES[what]:
        if name in by_name and encoding_problem(what, encodings[by_name[name]]) is None:
            return [by_name[name]]
    images = [name for name, encoding in encodings.items() if what == "image" and encoding in ("jpeg", "png", "pil")]
    return images if len(images) == 1 else []


# --- rows ---


@dataclass
class SampledRows:
    """What was read of some rows."""

    rows: int = 0
    shards: int = 0
    num_bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    sides: list[int] = field(default_factory=list)
    """Shorter side of each image, px."""
    lengths: list[int] = field(default_factory=list)
    """Characters of each usable caption."""
    keys: list[str] = field(default_factory=list)
    unusable: Counter[str] = field(default_factory=Counter)

    def add(self, sample: dict[str, Any]) -> None:
        self.rows += 1
        self.keys.append(sample["key"])
        try:
            texts, image = read_captions(sample), decode_image(sample["jpg"])
            self.lengths += map(len, texts)
            self.formats["pixels" if isinstance(sample["jpg"], RawImage) else detect_format(sample["jpg"])] += 1
            self.sides.append(min(size_of(image)))
        except SampleError as error:
            self.unusable[str(error)] += 1

    def lines(self) -> dict[str, str]:
        """Return what was seen: what a column is read as -> in words."""
        formats = ", ".join(f"{name} {num}" for name, num in self.formats.most_common())
        return {
            "image": f"{formats}; shorter side {min(self.sides):,} to {max(self.sides):,} px",
            "captions": f"{len(self.lengths)} of {min(self.lengths):,} to {max(self.lengths):,} characters",
            "key": f"{len(set(self.keys))} different of {self.rows}, e.g. {to_printable(self.keys[0])[:40]}",
        }


def choose_rows(sizes: Sequence[int], config: AdoptConfig) -> dict[int, list[int]]:
    """Choose rows of the first, the last and some other shards: shard -> rows, both in order."""
    random, filled = np.random.default_rng(config.seed), [number for number, size in enumerate(sizes) if size]
    shards = sorted({filled[0], filled[-1], *random.permutation(filled[1:-1])[: max(0, config.shards - 2)].tolist()})
    shards = shards[: config.shards]
    each = -(-config.rows // len(shards))
    return {shard: sorted(random.permutation(sizes[shard])[:each].tolist()) for shard in shards}


def read_rows(remote: str, shards: ShardTable, columns: AdoptedColumns, config: AdoptConfig) -> SampledRows:
    """Fetch a few shards, and read rows of them. Raises Failed: a shard is missing or damaged, or no row is usable."""
    address, sampled = open_address(remote), SampledRows()
    firsts = np.cumsum([0, *shards.samples]).tolist()
    for number, rows in choose_rows(shards.samples.tolist(), config).items():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                shard = open_shard(address, {**shards[number], "first": firsts[number]}, Path(scratch), columns)
                for sample in read_samples(shard, rows):
                    sampled.add(sample)
            except (Failed, RuntimeError, OSError, IndexError) as error:
                raise Failed(f"REMOTE: {str(error).removeprefix('IN: ').removeprefix('data: ')}") from error
        sampled.shards += 1
        sampled.num_bytes += file_in_store(shards[number])["bytes"]
    if not sampled.sides:
        reasons = "; ".join(f"{reason}: {num}" for reason, num in sampled.unusable.most_common())
        problem = f"none of {sampled.rows} rows can be used ({reasons}), read as {', '.join(columns.named)}"
        raise Failed(f"REMOTE: {remote}: {problem}. Name other columns: image=COLUMN caption=COLUMN.")
    return sampled


# --- the command ---


def format_report(
    shards: ShardTable, columns: AdoptedColumns, encodings: Mapping[str, str], sampled: SampledRows
) -> str:
    """Return what was found, in a table."""
    lines, named = sampled.lines(), columns.named
    rows = [
        (KEY_OF.get(named[name], named[name]), name, encodings[name], lines.pop(named[name], ""))
        for name in sorted(named, key=list(encodings).index)
    ]
    rows += [("not read", name, encoding, "") for name, encoding in encodings.items() if name not in named]
    packed = sorted({shard["compression"] or "not compressed" for shard in shards})
    kinds = sorted({(known_digest(file_in_store(shard)["hashes"]) or ("no hashes", ""))[0] for shard in shards})
    samples = int(shards.samples.sum())
    text = [f"{samples:,} samples in {len(shards):,} shards; {', '.join(packed)}; {', '.join(kinds)}"]
    head = ("read as", "column", "encoding", f"in {sampled.rows} rows of {sampled.shards} shards")
    text.append(render_table(head, rows, "llll"))
    if sampled.unusable:
        reasons = "; ".join(f"{reason}: {num}" for reason, num in sampled.unusable.most_common(5))
        text.append(
            f"unusable: {sampled.unusable.total()} of {sampled.rows} rows ({reasons}); see data.max_bad_samples"
        )
    others = [
        n
        for n, e in encodings.items()
        if n not in named and n.lower() in USUAL_NAMES["captions"] and e in ("str", "json")
    ]
    if others:
        text.append(f"further captions, not read; to read all: caption={','.join([*columns.captions, *others])}")
    return "\n".join(text)


def check_is_third_party(metadata_path: str) -> None:
    """Raise Refused where dataset.json of a dataset of our own would be replaced."""
    try:
        existing = read_json(*split_address(metadata_path))[1]
    except ValueError:
        return  # nothing there, or nothing that a run would take
    if existing.get("columns") is None and existing.get("schema") is not None:
        raise Refused(
            f"{metadata_path} is that of a dataset which needs no adoption. Give another REMOTE, or metadata=PATH."
        )


def write_metadata(content: Mapping[str, Any], metadata_path: str) -> None:
    """Write dataset.json, whole or not at all. Raises Failed: not possible there."""
    text = json.dumps(content, indent=2) + "\n"
    try:
        if is_remote(metadata_path):
            folder, name = split_address(metadata_path)
            open_address(folder).put_bytes(name, text.encode())
        else:
            Path(metadata_path).parent.mkdir(parents=True, exist_ok=True)
            write_atomic(Path(metadata_path), text)
    except (OSError, ValueError, ImportError) as error:
        raise Failed(
            f"{metadata_path} cannot be written: {error}. Give metadata=PATH here, and data.metadata=PATH to a run."
        ) from error


def adopt(remote: str, config: AdoptConfig) -> None:
    """Adopt the dataset at a folder or address.

    Raises:
        ConfigError: it cannot be read as a dataset. Refused: it is one of ours. Failed: what was read is damaged.
    """
    started, metadata_path = time.monotonic(), config.metadata or f"{remote.rstrip('/')}/{METADATA_FILE}"
    try:
        index = read_index(remote)
        shards = index.shards
        check_is_third_party(metadata_path)
        encodings = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
        columns = find_columns(config, encodings)
        check_adopted_columns(remote, columns, shards)
    except (ConfigError, Refused):
        raise
    except ValueError as error:
        raise ConfigError([f"REMOTE: {error}"]) from error
    sampled = read_rows(remote, shards, columns, config)
    print(format_report(shards, columns, encodings, sampled))
    facts = {
        "schema": METADATA_SCHEMA,
        "stage": "images",
        "samples": int(shards.samples.sum()),
        "index_sha256": index.sha256,
        "made_by": "prepare.adopt",
        "columns": columns.as_metadata(),
        "sampled": {"shards": sampled.shards, "rows": sampled.rows, "unusable": sampled.unusable.total()},
    }
    write_metadata(facts, metadata_path)
    sizes = f"{sampled.num_bytes + index.num_bytes:,} bytes of {sampled.shards} shards and index.json"
    print(f"{metadata_path} written; {sizes} read in {time.monotonic() - started:.2f} s")
    print(
        f"composer benchmark.py data.remote={remote}{f' data.metadata={metadata_path}' if config.metadata else ''}",
        flush=True,
    )


@command(keys=AdoptConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = parse_arguments(argv, AdoptConfig)
    if config is None:
        return 0
    if len(paths) != 1:
        problems.append("command line: one REMOTE has to be given. python -m prepare.adopt --help says more.")
    if problems:
        raise ConfigError(problems)
    adopt(paths[0], config)
    return 0


if __name__ == "__main__":
    start(main)
