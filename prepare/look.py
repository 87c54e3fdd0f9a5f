"""Look at a stage: its facts, line by line, and a contact sheet of samples with their captions.

    python -m prepare.look REMOTE [OUT.png]
    python -m prepare.look s3://bucket/laion_moments /tmp/moments.png samples=32 model.weights=/weights/512-base-ema.ckpt

REMOTE: a stage of images or moments, a folder or an address in a store; it is only read, and nothing of it is executed.
OUT.png: where the picture is written, look.png in the current folder if not given; one that is there is replaced.

The first facts are those of dataset.json and index.json, for the whole stage. The others come from a random sample: `read`
samples of some shards, at least 8 where the stage has as many, and of more of them only where these hold too few. Each of
these shards is fetched whole and checked by its hash; one that is damaged or missing is named, and the others are looked at.

Moments are shown as the VAE of model.weights decodes their mean (a name on the hub, a folder, a checkpoint, or random where
the stage was made so), without weights as colours. What of model.family, preset and variant is not given is as
dataset.json says.

Keys: samples (shown, 16), read (measured, 2000), seed (0), model.family preset variant weights.
Exit code: 0 when the picture was written, 1 when a shard is damaged or the work failed, 2 when it could not start.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from cli.command import command, start
from cli.command_line import Assignment, Problem
from cli.errors import ConfigError, Failed
from cli.limits import limited
from cli.log import log
from cli.masking import printable
from prepare.encoder import AGAIN, in_order, open_shard
from prepare.look_samples import Fact, Seen, channels_as_rgb, decode, look_at, size_in_words, spread, write_page
from prepare.places import Place, address_problem, open_place, out_problem
from prepare.words import read_words, split_words
from stages.dataset import FACTS_FILE, Stage, is_remote, read_stage
from stages.shard_file import ShardError, ShardFile
from zoo import load_family
from zoo.encoders import RANDOM, build_encoders
from zoo.model_config import ModelConfig, fetched, model_problems
from zoo.spec import as_size

NEEDED = {"images": ("jpg", "bytes"), "moments": ("moments", "ndarray")}
"""Kind of stage -> the column without which there is nothing to look at, and its encoding."""
DEFAULT_OUT = "look.png"
MAX_SAMPLES = 400
MIN_SHARDS = 8  # neighbours in a shard came from the same place: a few shards more say more than a few samples more
NAME_WIDTH = 34
AS_COLOURS = "channels 1 to 3 of the posterior's mean as RGB, 1st to 99th percentile; model.weights=PATH decodes them"


@dataclass(frozen=True)
class LookConfig:
    """The keys of this command."""

    samples: int = limited(16, 1, MAX_SAMPLES)
    """Samples in the picture."""
    read: int = limited(2000, 1, 10**9)
    """Samples that are measured."""
    seed: int = limited(0, 0, 2**32 - 1)
    """Seed for choosing the samples."""
    model: ModelConfig = field(default_factory=ModelConfig)


def check(config: LookConfig, stage: Stage | None) -> list[Problem]:
    """Return every problem of the keys, also with the stage where it could be read."""
    found = []
    if config.model.denoiser is not None:
        found.append(Problem("model.denoiser: has no use here: nothing is trained. Leave it out.", ("model.denoiser",)))
    if stage is not None and stage.kind == "images" and config.model.weights is not None:
        text = f"model.weights: has no use with a stage of images: {stage.location} is shown as it is. Leave it out."
        found.append(Problem(text, ("model.weights",)))
    try:
        size = as_size(512 if stage is None else stage.facts.get("image_size", 512))
    except ValueError as error:
        return [*found, Problem(f"image_size: {error}", ("image_size",))]
    return found + model_problems(config.model, size, encoders_wanted=False)


def open_stage(location: str) -> tuple[Place, Stage]:
    """Return the place of a stage, and what it says of itself.

    Raises:
        ValueError: it is no stage that can be looked at without executing something of it.
    """
    if text := address_problem(location):
        raise ValueError(f"REMOTE: {text}")
    try:
        stage, place = read_stage(location), open_place(location)
    except (ValueError, OSError) as error:
        raise ValueError(f"REMOTE: {error}") from error
    if stage.adopted is not None:
        raise ValueError(
            f"REMOTE: {location} was written by others. What it holds, python -m prepare.adopt {location} says."
        )
    if stage.buckets:
        raise ValueError(f"REMOTE: {location} is a set of buckets. Look at one of them: {stage.buckets[0].location}.")
    if stage.kind not in NEEDED:
        raise ValueError(f"REMOTE: {location} is a stage of {stage.kind}. Possible: a stage of {' or '.join(NEEDED)}.")
    column, wanted = NEEDED[stage.kind]
    if not dict(zip(stage.columns, stage.encodings, strict=True)).get(column, "").startswith(wanted):
        raise ValueError(f"REMOTE: {location} has no column {column} of {wanted}. {AGAIN}.")
    return place, stage


def picture_problem(out: str, remote: str) -> str | None:
    """Say why the picture could not be written there, before any work is done; or None."""
    path = Path(out)
    if is_remote(out) or path.is_dir() or path.suffix.lower() != ".png":
        return f"OUT: {out} is not a PNG file on this machine. Give one, e.g. {DEFAULT_OUT}."
    return out_problem(str(path.parent), [remote])


def choose(sizes: Sequence[int], read: int, seed: int) -> dict[int, list[int]]:
    """Choose samples at random: shard -> its rows, both in order.

    Args:
        sizes: samples of each shard.
        read: how many to choose; all of them where there are no more.
    """
    generator = np.random.default_rng(seed)
    order = generator.permutation(len(sizes))
    enough = 1 + int(np.searchsorted(np.cumsum(np.take(sizes, order)), read))
    shards = sorted(order[: max(enough, MIN_SHARDS)].tolist())
    rows = [(shard, row) for shard in shards for row in range(sizes[shard])]
    chosen: dict[int, list[int]] = {}
    for at in sorted(generator.permutation(len(rows))[:read]):
        chosen.setdefault(rows[at][0], []).append(rows[at][1])
    return chosen


def stage_facts(stage: Stage) -> list[Fact]:
    """Return what dataset.json and index.json say."""
    facts = [("kind", stage.kind), ("location", stage.location)]
    for name, value in stage.facts.items():
        if name not in ("schema", "stage", "samples", "index_sha256"):
            group = {f", {key}": of for key, of in value.items()} if isinstance(value, dict) else {"": value}
            words = {key: of if isinstance(of, str) else json.dumps(of) for key, of in group.items()}
            facts += [(f"{name}{key}".replace("_", " "), text) for key, text in words.items()]
    sizes, samples = stage.shards.raw_bytes, stage.shards.samples
    total = int(sizes.sum())
    columns = zip(stage.columns, stage.encodings, strict=True)
    return [
        *facts,
        ("columns", ", ".join(f"{name} ({encoding})" for name, encoding in columns)),
        ("shards", f"{len(sizes):,}"),
        ("samples", f"{stage.num_samples:,}"),
        ("samples a shard", spread(samples)),
        ("bytes", f"{size_in_words(total)} ({total:,})"),
        ("bytes a shard", spread(sizes, size_in_words)),
    ]


def print_facts(facts: Iterable[Fact]) -> None:
    """Print one a line; what a terminal cannot show or could be led astray by is replaced."""
    for name, value in facts:
        line = f"{printable(name):<{NAME_WIDTH}} {printable(value)}"
        encoding = sys.stdout.encoding or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), flush=True)


# --- the command ---


def read_samples(place: Place, stage: Stage, chosen: dict[int, list[int]], seen: Seen) -> list[str]:
    """Read the chosen samples, shard by shard; return what is wrong with those that cannot be read."""
    problems, num_threads = [], len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(num_threads) as pool,
        tqdm(total=sum(map(len, chosen.values())), unit=" samples", desc="read", disable=None) as progress,
    ):
        for number, rows in chosen.items():
            try:
                reader = open_shard(place, stage.shards[number], Path(scratch))
                with ShardFile(reader) as shard:
                    found = [{name: bytes(data) for name, data in row.items()} for row in shard.read(rows)]
            except (Failed, ShardError, OSError) as error:
                text = f"IN: {place.address}/{stage.shards.names[number]} cannot be read: {error} {AGAIN}."
                text = str(error) if isinstance(error, Failed) else text
                problems.append(f"REMOTE{text.removeprefix('IN')}")
                continue
            encodings = dict(zip(reader.column_names, reader.column_encodings, strict=True))
            work = functools.partial(look_at, seen.family, encodings)
            for sample in in_order(pool, work, found, ahead=4 * num_threads):
                seen.add(sample)
                progress.update()
            if Path(reader.dirname) == Path(scratch):
                Path(reader.dirname, reader.raw_data.basename).unlink()
    return problems


def pictures_of(config: LookConfig, stage: Stage, seen: Seen) -> tuple[list[np.ndarray], str]:
    """Return the pictures, and in words how moments are shown. Raises ConfigError: the weights are damaged."""
    values, weights = [sample.value for sample in seen.shown()], config.model.weights
    if stage.kind == "images":
        return values, ""
    if weights is None:
        return channels_as_rgb(values), AS_COLOURS
    encoders = build_encoders(seen.family, str(fetched(config.model).weights))
    for note in encoders.notes:
        log.info(f"model.weights: {note}")
    used, made = encoders.fingerprints["vae"], stage.facts.get("encoders")
    made = made.get("vae") if isinstance(made, dict) else None
    whose = f"NOT the one that made them: {used} instead of {made}" if used != made else "which made them"
    whose = "perhaps not the one that made them: dataset.json does not say" if made is None else whose
    how = f"pictures by {'a VAE of random weights' if weights == RANDOM else f'the VAE of {weights}'}, {whose}"
    on_gpu = torch.cuda.is_available() and config.model.frozen_device == "device"
    vae = encoders.modules["vae"].to("cuda" if on_gpu else "cpu")
    return decode(vae, values, stage.facts.get("normalize", "symmetric")), how


def look(config: LookConfig, place: Place, stage: Stage, out: Path) -> int:
    """Print the facts and write the picture; return the exit code. Raises ConfigError: the weights are damaged."""
    print_facts(stage_facts(stage))
    seen = Seen(
        config.samples, config.seed, stage, load_family(config.model.family, config.model.preset, config.model.variant)
    )
    chosen = choose(stage.shards.samples.tolist(), config.read, config.seed)
    problems = read_samples(place, stage, chosen, seen)
    num = len(chosen) - len(problems)
    read = f"{len(seen.samples):,} samples of {num:,} of {len(stage.shards):,} shards"
    facts = [("read", f"{read}; the hashes of these are right" if num else read)]
    if problems:
        facts.append(("shards that cannot be read", f"{len(problems):,} of {len(chosen):,} that were tried"))
    print_facts(facts + (seen.facts() if seen.samples else []))
    if not seen.samples:
        problems.append(f"OUT: no sample of {place.address} could be read: there is no picture.")
    else:
        pictures, how = pictures_of(config, stage, seen)
        which = f"{len(pictures):,} of {stage.num_samples:,} samples, chosen at random (seed {config.seed})"
        head = [f"{stage.kind}: {stage.location}", f"{which}; {how}" if how else which]
        try:
            write_page(out, head, pictures, [sample.caption for sample in seen.shown()])
        except OSError as error:
            problems.append(f"OUT: {out} cannot be written: {error.strerror or error}. Give another file.")
        else:
            print_facts([*([("moments are shown as", how)] if how else []), ("picture", str(out.absolute()))])
    for text in problems:
        log.info(text)
    return 1 if problems else 0


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, place, stage, problems = split_words(argv)[0], None, None, []
    out = paths[1] if len(paths) == 2 else DEFAULT_OUT
    if not 1 <= len(paths) <= 2:
        usage = "REMOTE has to be given, OUT.png can be, and nothing else"
        problems.append(f"command line: {usage}. python -m prepare.look --help says more.")
    else:
        try:
            place, stage = open_stage(paths[0])
        except ValueError as error:
            problems.append(str(error))
        problems += [text] if (text := picture_problem(out, paths[0])) else []
    made = []  # what dataset.json says of the model, which keys on the command line replace
    for name in ("family", "preset", "variant"):
        if stage is not None and name in stage.facts:
            where, key = f"{stage.location}/{FACTS_FILE}", f"model.{name}"
            made.append(Assignment(where, key, stage.facts[name], key))
    _, config, wrong = read_words(argv, LookConfig, functools.partial(check, stage=stage), made)
    if wrong or problems:
        raise ConfigError(wrong + problems)
    if config is None:
        return 0
    assert place is not None and stage is not None
    return look(config, place, stage, Path(out))


if __name__ == "__main__":
    start(main)
