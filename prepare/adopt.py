"""Adopt an MDS data set that others have written: say which columns are read, and write dataset.json. Nothing is copied.

    python -m prepare.adopt s3://bucket/laion/mds
    python -m prepare.adopt /data/theirs image=picture caption=text,alt_text key=id
    python -m prepare.adopt s3://not-mine/mds facts=/data/theirs.json          # then data.facts=/data/theirs.json in a run

REMOTE: a folder or an address in a store, with index.json and shards of streaming's MDSWriter: compressed or not, with hashes
of any kind or none. index.json is not changed. A sample is read, some rows of a few shards, their pictures decoded, and what
was seen is printed; nothing is known of the other rows. dataset.json is written beside index.json, or where `facts` says; it
is the file that a run then asks for.

Columns that are not given are found by name (upper or lower case) and encoding:

    image     image, jpg, jpeg, png, webp, img, picture; else the only column of jpeg, png or pil
    caption   caption, captions, text, prompt, txt; a json column may have a list
    key       key, __key__, id, uid, image_id; none: the sample's number is its key

Keys: image, caption (a name, or several with commas between them), key, facts, shards (4, to read), rows (64), seed (0).
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

from cli.command import command, start
from cli.errors import ConfigError, Failed, Refused
from cli.files import write_whole
from cli.limits import limited
from cli.masking import printable
from cli.table import as_table
from prepare.encoder import open_shard
from prepare.places import open_place
from prepare.words import read_words
from stages.adopted import Columns, wrong_encoding
from stages.dataset import FACTS_FILE, FACTS_SCHEMA, is_remote, read_index, read_json, split_place
from stages.fetch import known_digest
from stages.image_files import IMAGE_SUFFIXES, format_of
from stages.images import Pixels, SampleError, captions_of, decode_image, size_of
from stages.index_file import check_named_columns, stored_file
from stages.shard_table import ShardTable

NAMES = {
    "image": ("image", *IMAGE_SUFFIXES, "img", "picture"),
    "captions": ("caption", "captions", "text", "prompt", "txt"),
    "key": ("key", "__key__", "id", "uid", "image_id"),
}
KEY_OF = {"captions": "caption"}  # what a column is read as -> the key of this command, where it has another name


@dataclass(frozen=True)
class AdoptConfig:
    """The keys of this command."""

    image: str | None = None
    """Column of the pictures. null: found by its name."""
    caption: str | None = None
    """Column of the captions; several with commas between them. null: found by its name."""
    key: str | None = None
    """Column of the keys. null: found by its name; where there is none, the sample's number."""
    facts: str | None = None
    """Where to write dataset.json, if not beside index.json: a file, or an address."""
    shards: int = limited(4, 1, 1000)
    """Shards to read."""
    rows: int = limited(64, 1, 10**5)
    """Rows to read in all."""
    seed: int = limited(0, 0, 2**32 - 1)
    """Seed for choosing the shards and rows."""


# --- columns ---


def find_columns(config: AdoptConfig, encodings: Mapping[str, str]) -> Columns:
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
                problems.append(f"{key}: the data set has no column {name}. It has: {has}.")
            elif possible := wrong_encoding(what, encodings[name]):
                problems.append(f"{key}: column {name} is {encodings[name]}. Possible: {possible}.")
        if not names:
            names += _usual_columns(what, encodings)
        if not names and what != "key":
            problems.append(f"{key}: not given, and no column is known by its name. It has: {has}.")
    if max(Counter(itertools.chain.from_iterable(named.values())).values(), default=0) > 1:
        problems.append("command line: a column is named twice. Each is read as one thing.")
    if problems:
        raise ConfigError(problems)
    return Columns(image=named["image"][0], captions=tuple(named["captions"]), key=next(iter(named["key"]), None))


def _usual_columns(what: str, encodings: Mapping[str, str]) -> list[str]:
    by_name = {name.lower(): name for name in reversed(encodings)}
    for name in NAMES[what]:
        if name in by_name and wrong_encoding(what, encodings[by_name[name]]) is None:
            return [by_name[name]]
    images = [name for name, encoding in encodings.items() if what == "image" and encoding in ("jpeg", "png", "pil")]
    return images if len(images) == 1 else []


# --- rows ---


@dataclass
class Seen:
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
            texts, image = captions_of(sample), decode_image(sample["jpg"])
            self.lengths += map(len, texts)
            self.formats["pixels" if isinstance(sample["jpg"], Pixels) else format_of(sample["jpg"])] += 1
            self.sides.append(min(size_of(image)))
        except SampleError as error:
            self.unusable[str(error)] += 1

    def lines(self) -> dict[str, str]:
        """Return what was seen: what a column is read as -> in words."""
        formats = ", ".join(f"{name} {num}" for name, num in self.formats.most_common())
        return {
            "image": f"{formats}; shorter side {min(self.sides):,} to {max(self.sides):,} px",
            "captions": f"{len(self.lengths)} of {min(self.lengths):,} to {max(self.lengths):,} characters",
            "key": f"{len(set(self.keys))} different of {self.rows}, e.g. {printable(self.keys[0])[:40]}",
        }


def choose(sizes: Sequence[int], config: AdoptConfig) -> dict[int, list[int]]:
    """Choose rows of the first, the last and some other shards: shard -> rows, both in order."""
    random, filled = np.random.default_rng(config.seed), [number for number, size in enumerate(sizes) if size]
    shards = sorted({filled[0], filled[-1], *random.permutation(filled[1:-1])[: max(0, config.shards - 2)].tolist()})
    shards = shards[: config.shards]
    each = -(-config.rows // len(shards))
    return {shard: sorted(random.permutation(sizes[shard])[:each].tolist()) for shard in shards}


def read_rows(remote: str, shards: ShardTable, columns: Columns, config: AdoptConfig) -> Seen:
    """Fetch a few shards, and read rows of them. Raises Failed: a shard is missing or damaged, or no row is usable."""
    place, seen = open_place(remote), Seen()
    firsts = np.cumsum([0, *shards.samples]).tolist()
    for number, rows in choose(shards.samples.tolist(), config).items():
        with tempfile.TemporaryDirectory() as scratch:
            try:
                reader = open_shard(place, {**shards[number], "first": firsts[number]}, Path(scratch), columns)
                for row in rows:
                    seen.add(reader[row])
            except (Failed, RuntimeError, OSError, IndexError) as error:
                raise Failed(f"REMOTE: {str(error).removeprefix('IN: ').removeprefix('data: ')}") from error
        seen.shards += 1
        seen.num_bytes += stored_file(shards[number])["bytes"]
    if not seen.sides:
        reasons = "; ".join(f"{reason}: {num}" for reason, num in seen.unusable.most_common())
        given = f"none of {seen.rows} rows can be used ({reasons}), read as {', '.join(columns.named)}"
        raise Failed(f"REMOTE: {remote}: {given}. Name other columns: image=COLUMN caption=COLUMN.")
    return seen


# --- the command ---


def report(shards: ShardTable, columns: Columns, encodings: Mapping[str, str], seen: Seen) -> str:
    """Return what was found, in a table."""
    lines, named = seen.lines(), columns.named
    rows = [
        (KEY_OF.get(named[name], named[name]), name, encodings[name], lines.pop(named[name], ""))
        for name in sorted(named, key=list(encodings).index)
    ]
    rows += [("not read", name, encoding, "") for name, encoding in encodings.items() if name not in named]
    packed = sorted({shard["compression"] or "not compressed" for shard in shards})
    kinds = sorted({(known_digest(stored_file(shard)["hashes"]) or ("no hashes", ""))[0] for shard in shards})
    samples = int(shards.samples.sum())
    text = [f"{samples:,} samples in {len(shards):,} shards; {', '.join(packed)}; {', '.join(kinds)}"]
    head = ("read as", "column", "encoding", f"in {seen.rows} rows of {seen.shards} shards")
    text.append(as_table(head, rows, "llll"))
    if seen.unusable:
        reasons = "; ".join(f"{reason}: {num}" for reason, num in seen.unusable.most_common(5))
        text.append(f"unusable: {seen.unusable.total()} of {seen.rows} rows ({reasons}); see data.max_bad_samples")
    others = [
        n for n, e in encodings.items() if n not in named and n.lower() in NAMES["captions"] and e in ("str", "json")
    ]
    if others:
        text.append(f"further captions, not read; to read all: caption={','.join([*columns.captions, *others])}")
    return "\n".join(text)


def check_is_of_others(at: str) -> None:
    """Raise Refused where dataset.json of a stage of our own would be replaced."""
    try:
        there = read_json(*split_place(at))[1]
    except ValueError:
        return  # nothing there, or nothing that a run would take
    if there.get("columns") is None and there.get("schema") is not None:
        raise Refused(f"{at} is that of a stage which needs no adoption. Give another REMOTE, or facts=PATH.")


def write(content: Mapping[str, Any], at: str) -> None:
    """Write dataset.json, whole or not at all. Raises Failed: not possible there."""
    text = json.dumps(content, indent=2) + "\n"
    try:
        if is_remote(at):
            folder, name = split_place(at)
            open_place(folder).put_bytes(name, text.encode())
        else:
            Path(at).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(at), text)
    except (OSError, ValueError, ImportError) as error:
        raise Failed(f"{at} cannot be written: {error}. Give facts=PATH here, and data.facts=PATH to a run.") from error


def adopt(remote: str, config: AdoptConfig) -> None:
    """Adopt the data set at a folder or address.

    Raises:
        ConfigError: it cannot be read as a stage. Refused: it is one. Failed: what was read is damaged; not written.
    """
    started, at = time.monotonic(), config.facts or f"{remote.rstrip('/')}/{FACTS_FILE}"
    try:
        index = read_index(remote)
        shards = index.shards
        check_is_of_others(at)
        encodings = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
        columns = find_columns(config, encodings)
        check_named_columns(remote, columns, shards)
    except (ConfigError, Refused):
        raise
    except ValueError as error:
        raise ConfigError([f"REMOTE: {error}"]) from error
    seen = read_rows(remote, shards, columns, config)
    print(report(shards, columns, encodings, seen))
    facts = {
        "schema": FACTS_SCHEMA,
        "stage": "images",
        "samples": int(shards.samples.sum()),
        "index_sha256": index.sha256,
        "made_by": "prepare.adopt",
        "columns": columns.as_facts(),
        "sampled": {"shards": seen.shards, "rows": seen.rows, "unusable": seen.unusable.total()},
    }
    write(facts, at)
    sizes = f"{seen.num_bytes + index.num_bytes:,} bytes of {seen.shards} shards and index.json"
    print(f"{at} written; {sizes} read in {time.monotonic() - started:.2f} s")
    print(f"composer benchmark.py data.remote={remote}{f' data.facts={at}' if config.facts else ''}", flush=True)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = read_words(argv, AdoptConfig)
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
