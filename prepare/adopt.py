"""Adopt an MDS data set that others have written: say which columns are read, and write dataset.json. Nothing is copied.

    python -m prepare.adopt s3://bucket/laion/mds
    python -m prepare.adopt /data/theirs image=picture caption=text,alt_text key=id
    python -m prepare.adopt s3://not-mine/mds facts=/data/theirs.json          # then data.facts=/data/theirs.json in a run
    python -m prepare.adopt s3://bucket/mds latents=latents_512 model.weights=/weights/sd2 facts=/data/theirs-512.json

REMOTE: a folder or an address in a store, with index.json and shards of streaming's MDSWriter: compressed or not, with hashes
of any kind or none. index.json is not changed. A sample is read, some rows of a few shards, their pictures decoded, and what
was seen is printed; nothing is known of the other rows. dataset.json is written beside index.json, or where `facts` says; it
is the file that a run then asks for.

Columns that are not given are found by name (upper or lower case) and encoding:

    image     image, jpg, jpeg, png, webp, img, picture; else the only column of jpeg, png or pil
    caption   caption, captions, text, prompt, txt; a json column may have a list
    key       key, __key__, id, uid, image_id; none: the sample's number is its key

latents: a column of latents as mosaicml/diffusion stores them, float16, drawn once from the VAE's posterior; the stage is
then `moments`. The data set says neither which VAE made them, nor whether they were multiplied by its scale. So those of
some rows are compared with what the VAE of `model.weights` makes of the pictures beside them.

Keys: image, caption (a name, or several with commas between them), key, latents, facts, shards (4, to read), rows (64), seed
(0), model.family preset variant weights. Exit code: 0, 1 when the work failed, 2 when it could not start.
"""

from __future__ import annotations

import dataclasses
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
from cli.command_line import Problem, parse_command_line
from cli.errors import ConfigError, Failed, Refused
from cli.files import write_whole
from cli.limits import limited
from cli.masking import printable
from cli.table import as_table
from config import load
from prepare.adopt_latents import compare, problems_of_latents
from prepare.encoder import open_shard
from prepare.places import open_place
from prepare.words import split_words
from stages.adopted import Columns, wrong_encoding
from stages.dataset import FACTS_FILE, FACTS_SCHEMA, is_remote, read_index, read_json, split_place
from stages.fetch import known_digest
from stages.image_files import IMAGE_SUFFIXES, format_of
from stages.images import Pixels, SampleError, captions_of, decode_image, size_of
from stages.index_file import check_named_columns, stored_file
from stages.shard_table import ShardTable
from zoo.model_config import ModelConfig

NAMES = {
    "image": ("image", *IMAGE_SUFFIXES, "img", "picture"),
    "captions": ("caption", "captions", "text", "prompt", "txt"),
    "key": ("key", "__key__", "id", "uid", "image_id"),
}
PICTURES = ("jpeg", "png", "pil")  # encodings that say so
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
    latents: str | None = None
    """Column of float16 latents, e.g. latents_512: the data set becomes a stage of moments. null: a stage of images."""
    facts: str | None = None
    """Where to write dataset.json, if not beside index.json: a file, or an address."""
    shards: int = limited(4, 1, 1000)
    """Shards to read."""
    rows: int = limited(64, 1, 10**5)
    """Rows to read in all."""
    seed: int = limited(0, 0, 2**32 - 1)
    """Seed for choosing the shards and rows."""
    model: ModelConfig = field(default_factory=ModelConfig)


# --- columns ---


def find_columns(config: AdoptConfig, encodings: Mapping[str, str]) -> tuple[Columns | None, list[str]]:
    """Return the columns to read, or None with what is wrong.

    Args:
        encodings: column -> encoding, of the first shard.
    """
    captions = [name for name in (config.caption or "").strip("[]").split(",") if name]
    given = {"image": config.image, "key": config.key, "latents": config.latents}
    named = {what: [name] if name else [] for what, name in given.items()} | {"captions": list(captions)}
    problems = []
    for what, names in named.items():
        for name in names:
            if name not in encodings:
                has = ", ".join(f"{column} ({encoding})" for column, encoding in encodings.items())
                problems.append(f"{KEY_OF.get(what, what)}: the data set has no column {name}. It has: {has}.")
            elif possible := wrong_encoding(what, encodings[name]):
                given_as = f"column {name} is {encodings[name]}"
                problems.append(f"{KEY_OF.get(what, what)}: {given_as}. Possible: {possible}.")
    if any(num > 1 for num in Counter(itertools.chain.from_iterable(named.values())).values()):
        problems.append("command line: a column is named twice. Each is read as one thing.")
    if problems:
        return None, problems
    found = {what: names or _found(what, encodings) for what, names in named.items()}
    for what in ("image", "captions"):
        if not found[what]:
            has = ", ".join(f"{column} ({encoding})" for column, encoding in encodings.items())
            why = "" if config.latents is None or what != "image" else ", and latents are compared with their pictures"
            problems.append(
                f"{KEY_OF.get(what, what)}: not given, and no column is known by its name{why}. It has: {has}."
            )
    if problems:
        return None, problems
    one = {what: next(iter(found[what]), None) for what in ("image", "key", "latents")}
    return Columns(captions=tuple(found["captions"]), **one), []


def _found(what: str, encodings: Mapping[str, str]) -> list[str]:
    by_name = {name.lower(): name for name in reversed(encodings)}
    for name in NAMES.get(what, ()):
        if name in by_name and wrong_encoding(what, encodings[by_name[name]]) is None:
            return [by_name[name]]
    pictures = [name for name, encoding in encodings.items() if what == "image" and encoding in PICTURES]
    return pictures if len(pictures) == 1 else []


def other_captions(columns: Columns, encodings: Mapping[str, str]) -> list[str]:
    """Return further columns that are called like captions."""
    names = [name for name in encodings if name.lower() in NAMES["captions"] and name not in columns.captions]
    return [name for name in names if wrong_encoding("captions", encodings[name]) is None]


# --- rows ---


@dataclass
class Seen:
    """What was read of some rows."""

    rows: int = 0
    shards: int = 0
    num_bytes: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    sides: list[int] = field(default_factory=list)
    """Shorter side of each picture, px."""
    captions: list[int] = field(default_factory=list)
    """Usable captions of each row that has any."""
    lengths: list[int] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    unusable: Counter[str] = field(default_factory=Counter)
    samples: list[dict[str, Any]] = field(default_factory=list)
    """Of latents, the samples themselves."""

    def add(self, sample: dict[str, Any], columns: Columns) -> None:
        self.rows += 1
        self.keys.append(sample["key"])
        try:
            texts = captions_of(sample)
            self.captions.append(len(texts))
            self.lengths += map(len, texts)
            if columns.image is not None:
                image = decode_image(sample["jpg"])
                self.formats[_format_of(sample["jpg"])] += 1
                self.sides.append(min(size_of(image)))
            if columns.latents is not None and not len(sample["latents"]):
                raise SampleError("no latent")
            if columns.latents is not None:
                self.samples.append(sample)
        except SampleError as error:
            self.unusable[str(error)] += 1

    @property
    def usable(self) -> int:
        return self.rows - self.unusable.total()

    def lines(self, columns: Columns) -> dict[str, str]:
        """Return what was seen: what a column is read as -> in words."""
        image = ", ".join(f"{name} {num}" for name, num in self.formats.most_common())
        keys = f"{len(set(self.keys))} different of {self.rows}"
        return {
            "image": f"{image}; shorter side {_range(self.sides)} px",
            "captions": f"{_range(self.captions)} a sample, {_range(self.lengths)} characters",
            "key": f"{keys}, e.g. {printable(self.keys[0])[:40]}",
            "latents": f"{len(self.samples)} of {self.rows} rows have one",
        }


def _range(values: Sequence[int]) -> str:
    if not values:
        return "none"
    return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"


def _format_of(content: bytes) -> str:
    return "pixels" if isinstance(content, Pixels) else format_of(content)


def choose(sizes: Sequence[int], config: AdoptConfig) -> dict[int, list[int]]:
    """Choose rows of the first, the last and some other shards: shard -> rows, both in order."""
    random, filled = np.random.default_rng(config.seed), [number for number, size in enumerate(sizes) if size]
    shards = sorted({filled[0], filled[-1], *random.permutation(filled[1:-1])[: max(0, config.shards - 2)].tolist()})
    shards = shards[: config.shards]
    each = -(-config.rows // len(shards))
    return {shard: sorted(random.permutation(sizes[shard])[:each].tolist()) for shard in shards}


def read_rows(remote: str, shards: ShardTable, columns: Columns, config: AdoptConfig) -> Seen:
    """Fetch a few shards, and look at rows of them. Raises Failed: a shard is not there, or damaged."""
    place, seen = open_place(remote), Seen()
    firsts = np.cumsum([0, *shards.samples]).tolist()
    with tempfile.TemporaryDirectory() as scratch:
        for number, rows in choose(shards.samples.tolist(), config).items():
            try:
                reader = open_shard(place, {**shards[number], "first": firsts[number]}, Path(scratch), columns)
                for row in rows:
                    seen.add(reader[row], columns)
            except (Failed, RuntimeError, OSError, IndexError) as error:
                raise Failed(f"REMOTE: {str(error).removeprefix('IN: ').removeprefix('data: ')}") from error
            seen.shards += 1
            seen.num_bytes += stored_file(shards[number])["bytes"]
            if Path(reader.dirname) == Path(scratch):
                Path(scratch, reader.raw_data.basename).unlink()
    if not seen.usable:
        reasons = "; ".join(f"{reason}: {num}" for reason, num in seen.unusable.most_common())
        given = f"none of {seen.rows} rows can be used ({reasons}), read as {', '.join(columns.named)}"
        raise Failed(f"REMOTE: {remote}: {given}. Name other columns: image=COLUMN caption=COLUMN.")
    return seen


# --- the command ---


def write(content: Mapping[str, Any], remote: str, facts: str | None) -> str:
    """Write dataset.json, whole or not at all; return where. Raises Failed: not possible there."""
    at = facts or f"{remote.rstrip('/')}/{FACTS_FILE}"
    text = json.dumps(content, indent=2) + "\n"
    try:
        if is_remote(at):
            folder, name = split_place(at)
            open_place(folder).put_bytes(name, text.encode())
        else:
            Path(at).parent.mkdir(parents=True, exist_ok=True)
            write_whole(Path(at), text)
    except (OSError, ValueError, ImportError) as error:
        other = "Give another facts=PATH" if facts else "Give facts=PATH here, and data.facts=PATH to a run"
        raise Failed(f"{at} cannot be written: {error}. {other}.") from error
    return at


def check_is_of_others(remote: str, facts: str | None) -> None:
    """Raise Refused where dataset.json of a stage of our own would be replaced."""
    at = facts or f"{remote.rstrip('/')}/{FACTS_FILE}"
    try:
        there = read_json(*split_place(at))[1]
    except ValueError:
        return  # nothing there, or nothing that a run would take
    if there.get("columns") is None and there.get("schema") is not None:
        raise Refused(f"{at} is that of a stage which needs no adoption. Give another REMOTE, or facts=PATH.")


def report(shards: ShardTable, columns: Columns, encodings: Mapping[str, str], seen: Seen) -> str:
    """Return what was found, in a table."""
    lines, named = seen.lines(columns), columns.named
    rows = [
        (KEY_OF.get(named[name], named[name]), name, encodings[name], lines.pop(named[name], ""))
        for name in sorted(named, key=list(encodings).index)
    ]
    rows += [("not read", name, encoding, "") for name, encoding in encodings.items() if name not in named]
    packed = sorted({shard["compression"] or "not compressed" for shard in shards})
    kinds = sorted({(known_digest(stored_file(shard)["hashes"]) or ("no hashes", ""))[0] for shard in shards})
    samples = int(shards.samples.sum())
    text = [f"{samples:,} samples in {len(shards):,} shards; {', '.join(packed)}; {', '.join(kinds)}"]
    text.append(
        as_table(("read as", "column", "encoding", f"in {seen.rows} rows of {seen.shards} shards"), rows, "llll")
    )
    if seen.unusable:
        reasons = "; ".join(f"{reason}: {num}" for reason, num in seen.unusable.most_common(5))
        text.append(f"unusable: {seen.unusable.total()} of {seen.rows} rows ({reasons}); see data.max_bad_samples")
    if others := other_captions(columns, encodings):
        all_of_them = f"caption={','.join([*columns.captions, *others])}"
        text.append(f"further captions, not read: {', '.join(others)}. To read all: {all_of_them}")
    if "no hashes" in kinds:
        text.append("a shard without a hash has its digest kept when a run first reads it")
    return "\n".join(text)


@dataclass(frozen=True)
class Adoption:
    """What was done: dataset.json and its place, what was found, and how many bytes were read for it."""

    facts: dict[str, Any]
    at: str
    text: str
    num_shards: int
    num_bytes: int


def adopt(remote: str, config: AdoptConfig) -> Adoption:
    """Adopt the data set at a folder or address.

    Raises:
        ConfigError: it cannot be read as a stage. Refused: it is one. Failed: what was read is damaged; not written.
    """
    try:
        index = read_index(remote)
        shards = index.shards
    except ValueError as error:
        raise ConfigError([f"REMOTE: {error}"]) from error
    check_is_of_others(remote, config.facts)
    encodings = dict(zip(shards[0]["column_names"], shards[0]["column_encodings"], strict=True))
    columns, problems = find_columns(config, encodings)
    if columns is None:
        raise ConfigError(problems)
    try:
        check_named_columns(remote, columns, shards)
    except ValueError as error:
        raise ConfigError([f"REMOTE: {error}"]) from error
    seen = read_rows(remote, shards, columns, config)
    text = report(shards, columns, encodings, seen)
    facts = {
        "schema": FACTS_SCHEMA,
        "stage": "images" if columns.latents is None else "moments",
        "samples": int(shards.samples.sum()),
        "index_sha256": index.sha256,
        "made_by": "prepare.adopt",
        "columns": dataclasses.replace(columns, image=None if columns.latents else columns.image).as_facts(),
        "sampled": {"shards": seen.shards, "rows": seen.rows, "unusable": seen.unusable.total()},
    }
    if columns.latents is not None:
        made, of_latents = compare(config.model, columns.latents, seen.samples)
        facts, text = facts | made, f"{text}\n{of_latents}"
    at = write(facts, remote, config.facts)
    return Adoption(facts, at, text, seen.shards, seen.num_bytes + index.num_bytes)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    started = time.monotonic()
    paths, words = split_words(argv)
    config = load(AdoptConfig, parse_command_line(words, {}), check=check)
    if len(paths) != 1:
        raise ConfigError(["command line: one REMOTE has to be given. python -m prepare.adopt --help says more."])
    done = adopt(paths[0], config)
    print(done.text)
    sizes = f"{done.num_bytes:,} bytes of {done.num_shards} shards and index.json"
    print(f"{done.at} written; {sizes} read in {time.monotonic() - started:.2f} s")
    facts = f" data.facts={done.at}" if config.facts else ""
    print(f"composer benchmark.py data.stage={done.facts['stage']} data.remote={paths[0]}{facts}", flush=True)
    return 0


def check(config: AdoptConfig) -> list[Problem]:
    """Return the problems of the keys that can be found before anything is read."""
    return problems_of_latents(config.model, config.latents)


if __name__ == "__main__":
    start(main)
