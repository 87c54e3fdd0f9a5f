"""Look at a stage: its facts, line by line, and one picture of samples with their captions and histograms.

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

import dataclasses
import functools
import heapq
import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from cli.command import command, start
from cli.command_line import Assignment, CommandLine, Problem, parse_command_line
from cli.errors import ConfigError, Failed
from cli.limits import limited
from cli.log import log
from cli.masking import printable
from config import load, to_yaml
from prepare import look_picture as draw
from prepare.encoder import AGAIN, in_order, open_shard
from prepare.look_picture import Histogram, Sample, Tile, first_of, share, size_in_words, spread
from prepare.places import Place, address_problem, open_place, out_problem
from prepare.words import split_words
from stages.dataset import FACTS_FILE, Stage, is_remote, read_stage
from stages.shard_file import ShardError, ShardFile
from stages.shard_table import ShardTable
from zoo import load_family
from zoo.model_config import ModelConfig, fetched, model_problems
from zoo.spec import Family, as_size

Fact = tuple[str, str]  # a name, and what is known of it
NEEDED = {"images": ("jpg", "bytes"), "moments": ("moments", "ndarray")}
"""Kind of stage -> the column without which there is nothing to look at, and its encoding."""
DEFAULT_OUT = "look.png"
MAX_SAMPLES = 400
MIN_SHARDS = 8  # neighbours in a shard came from the same place: a few shards more say more than a few samples more
VALUES_A_CHANNEL = 64  # of each sample, for the histograms
NAME_WIDTH = 34
MAX_SHOWN = 90  # letters of a caption in a line


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
    if is_remote(out):
        return f"OUT: {out} is in a store. Possible: a file on this machine, e.g. {DEFAULT_OUT}."
    if path.is_dir():
        return f"OUT: {out} is a folder. Give a file, e.g. {path / DEFAULT_OUT}."
    if path.suffix.lower() != ".png":
        return f"OUT: {out} does not end in .png. Possible: a PNG file, e.g. {path.with_suffix('.png')}."
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


# --- facts about the whole ---


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
    mean, least, greatest = map(size_in_words, (total / len(sizes), int(sizes.min()), int(sizes.max())))
    columns = zip(stage.columns, stage.encodings, strict=True)
    return [
        *facts,
        ("columns", ", ".join(f"{name} ({encoding})" for name, encoding in columns)),
        ("shards", f"{len(sizes):,}"),
        ("samples", f"{stage.num_samples:,}"),
        ("samples a shard", f"mean {samples.mean():,.1f}, least {samples.min():,}, greatest {samples.max():,}"),
        ("bytes", f"{size_in_words(total)} ({total:,})"),
        ("bytes a shard", f"mean {mean}, least {least}, greatest {greatest}"),
    ]


def print_facts(facts: Iterable[Fact]) -> None:
    """Print one a line; what a terminal cannot show or could be led astray by is replaced."""
    for name, value in facts:
        line = f"{printable(name):<{NAME_WIDTH}} {printable(value)}"
        encoding = sys.stdout.encoding or "utf-8"
        print(line.encode(encoding, "replace").decode(encoding), flush=True)


# --- facts about the samples ---


class Seen:
    """What was read of a stage so far. The samples of the picture are a random choice of the usable ones."""

    def __init__(self, config: LookConfig, stage: Stage, family: Family):
        self.stage = stage
        self.family = family
        self.num_shown = config.samples
        self.num_tokens = family.tokenize([""])["tokens"].shape[1]  # what is beyond is cut off
        self.samples: list[Sample] = []
        """All, without their values."""
        self.shape: tuple[int, ...] | None = None
        """Of the moments of a sample, (2C, h, w)."""
        self.powers: dict[str, list[np.ndarray]] = {"mean": [], "deviation": [], "latent": []}
        """Means over each sample of a quantity and of its square, (2, C)."""
        self.values: dict[str, list[np.ndarray]] = {name: [] for name in self.powers}
        """Some of the numbers themselves, (C, n) of each sample."""
        self.shown: list[tuple[float, int, Sample]] = []
        """A heap: priority, place in the stage's order, sample."""
        self._generator = np.random.default_rng([config.seed, 1])

    def add(self, sample: Sample) -> None:
        """Take a sample; only of those that may be shown the value is kept."""
        if self.stage.kind == "moments" and sample.problem is None:
            sample = self._add_moments(sample)
        self.samples.append(dataclasses.replace(sample, value=None))
        if sample.problem is None:
            heapq.heappush(self.shown, (self._generator.random(), len(self.samples), sample))
            if len(self.shown) > self.num_shown:
                heapq.heappop(self.shown)

    def _add_moments(self, sample: Sample) -> Sample:
        self.shape = self.shape or sample.value.shape
        if self.shape != sample.value.shape:
            return dataclasses.replace(sample, problem=f"moments are not {self.shape} as others are")
        moments = torch.from_numpy(sample.value.astype(np.float32))[None]  # (1, 2C, h, w)
        mean, logvar = moments.chunk(2, dim=1)
        noise = torch.from_numpy(self._generator.standard_normal(mean.shape, np.float32))
        found = {"mean": mean, "deviation": torch.exp(0.5 * logvar.clamp(-30.0, 20.0))}
        found["latent"] = self.family.sample_latents(moments, noise)
        some = self._generator.permutation(mean[0, 0].numel())[:VALUES_A_CHANNEL]
        for name, quantity in found.items():
            values = quantity[0].flatten(1).double().numpy()  # (C, h w)
            self.powers[name].append(np.stack([values.mean(axis=1), (values**2).mean(axis=1)]))
            self.values[name].append(values[:, some])
        return sample

    def facts(self) -> list[Fact]:
        num = len(self.samples)
        reasons: dict[str, list[str]] = {}
        for sample in self.samples:
            if sample.problem is not None:
                reasons.setdefault(sample.problem, []).append(sample.key)
        named = [f"{why}: {len(keys):,} ({first_of(keys)})" for why, keys in sorted(reasons.items())]
        unusable = "; ".join([share(sum(map(len, reasons.values())), num), *named])
        of_kind = self._image_facts() if self.stage.kind == "images" else self._moments_facts()
        facts = [("unusable samples", unusable), *of_kind]
        if "caption" in self.stage.columns:
            facts += self._caption_facts()
        if "key" in self.stage.columns:
            again = [key for key, count in Counter(sample.key for sample in self.samples).items() if count > 1]
            facts.append(("keys that come again", f"{len(again):,} ({first_of(again)})" if again else "0"))
        return facts

    def _image_facts(self) -> list[Fact]:
        num, counts = len(self.samples), Counter(sample.form for sample in self.samples)
        sizes = [sample.size for sample in self.samples if sample.size is not None]
        ratios = [width / height for width, height in sizes]
        names = ("higher than wide", "square", "wider than high")
        shapes = Counter(names[1 + (width > height) - (width < height)] for width, height in sizes)
        return [
            ("formats", ", ".join(f"{form} {share(count, num)}" for form, count in counts.most_common())),
            ("width, px", spread([width for width, _ in sizes])),
            ("height, px", spread([height for _, height in sizes])),
            ("width / height", spread(ratios, "{:.3g}".format)),
            ("", ", ".join(f"{name} {share(count, len(ratios))}" for name, count in shapes.most_common()) or "none"),
            ("bytes an image", spread([sample.num_bytes for sample in self.samples], size_in_words)),
        ]

    def _moments_facts(self) -> list[Fact]:
        num_values = sum(sample.num_values for sample in self.samples)
        facts = [("values that are not finite", share(sum(s.num_infinite for s in self.samples), num_values))]
        if self.shape is None:
            return facts
        facts.append(("moments", f"{self.shape}: mean and logvar of {self.shape[0] // 2} channels"))
        names = {"mean": "posterior's mean", "deviation": "posterior's deviation", "latent": "drawn latents, scaled"}
        for key, name in names.items():
            means, squares = np.mean(self.powers[key], axis=0)  # (C,) each
            spreads = np.sqrt(np.maximum(squares - means**2, 0.0))
            spread = max(squares.mean() - means.mean() ** 2, 0.0) ** 0.5
            facts += [
                (f"{name}: mean", f"{means.mean():.4g}; by channel {', '.join(map('{:.3g}'.format, means))}"),
                (f"{name}: spread", f"{spread:.4g}; by channel {', '.join(map('{:.3g}'.format, spreads))}"),
            ]
        return facts

    def _caption_facts(self) -> list[Fact]:
        captions = [sample.caption for sample in self.samples]
        counts, limit = [sample.num_tokens for sample in self.samples], self.num_tokens
        again = [(text, num) for text, num in Counter(captions).most_common() if num > 1]
        facts = [
            ("caption, characters", spread([len(text) for text in captions])),
            ("caption, tokens", f"{spread(counts)}; with start and end, by CLIP's tokenizer"),
            (f"cut off at {limit} tokens", share(sum(count > limit for count in counts), len(captions))),
            ("empty captions", share(sum(not text.strip() for text in captions), len(captions))),
            ("captions that come again", share(sum(num for _, num in again), len(captions))),
        ]
        facts += [("", f"{num:,} times: {text[:MAX_SHOWN]}") for text, num in again[:3]]
        stored = [sample.tokens for sample in self.samples]
        if stored and all(tokens is not None and tokens.shape == (limit,) for tokens in stored):
            ours = self.family.tokenize(captions)["tokens"].numpy()
            others = int((np.stack(stored) != ours).any(axis=1).sum())
            facts.append(("stored tokens not of the caption", share(others, len(stored))))
        return facts


# --- the command ---


def read_samples(place: Place, shards: ShardTable, chosen: dict[int, list[int]], seen: Seen) -> list[str]:
    """Read the chosen samples, shard by shard; return what is wrong with those that cannot be read."""
    problems, num_threads = [], len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(num_threads) as pool,
        tqdm(total=sum(map(len, chosen.values())), unit=" samples", desc="read", disable=None) as progress,
    ):
        for number, rows in chosen.items():
            name = shards.names[number]
            try:
                reader = open_shard(place, shards[number], Path(scratch))
                with ShardFile(reader) as shard:
                    found = shard.read(rows)
            except (Failed, ShardError, OSError) as error:
                is_plain = isinstance(error, Failed)
                text = str(error) if is_plain else f"IN: {place.address}/{name} cannot be read: {error} {AGAIN}."
                problems.append(f"REMOTE{text.removeprefix('IN')}")
                continue
            encodings = dict(zip(reader.column_names, reader.column_encodings, strict=True))
            one = functools.partial(draw.look_at, encodings)
            for sample in in_order(pool, one, found, ahead=4 * num_threads):
                seen.add(sample)
                progress.update()
            if Path(reader.dirname) == Path(scratch):
                Path(reader.dirname, reader.raw_data.basename).unlink()
    return problems


def show(config: LookConfig, stage: Stage, seen: Seen, vae: nn.Module | None, shown_by: str, out: Path) -> None:
    """Write the picture. Raises OSError."""
    shown, samples = [sample for _, _, sample in sorted(seen.shown, key=lambda entry: entry[1])], seen.samples
    pictures = [sample.value for sample in shown]
    which = f"{len(shown):,} of {stage.num_samples:,} samples, chosen at random (seed {config.seed})"
    if stage.kind == "moments":
        which += f"; shown as {shown_by}"
        normalize = stage.facts.get("normalize", "symmetric")
        pictures = draw.decode(vae, pictures, normalize) if vae else draw.channels_as_rgb(pictures)
    tiles = [Tile(picture, sample.caption) for picture, sample in zip(pictures, shown, strict=True)]
    is_images = stage.kind == "images"
    histograms = draw.histograms_of_images(samples) if is_images else draw.histograms_of_moments(seen.values)
    if "caption" in stage.columns:
        label, counts = f"tokens a caption (cut at {seen.num_tokens})", [sample.num_tokens for sample in samples]
        histograms.append(Histogram(label, {"": counts}, is_whole=True, mark=seen.num_tokens + 0.5))
    head = [f"{stage.kind}: {stage.location}", which, f"histograms: of the {len(samples):,} samples that were read"]
    out.parent.mkdir(parents=True, exist_ok=True)
    draw.write_page(out, head, tiles, histograms)


def look(config: LookConfig, place: Place, stage: Stage, out: Path) -> int:
    """Print the facts and write the picture; return the exit code. Raises ConfigError: the weights are damaged."""
    family = load_family(config.model.family, config.model.preset, config.model.variant)
    vae, shown_by, made = None, draw.AS_COLOURS, stage.facts.get("encoders")
    if stage.kind == "moments" and config.model.weights is not None:
        made = made.get("vae") if isinstance(made, dict) else None
        vae, shown_by = draw.build_vae(family, fetched(config.model), made)
    print_facts(stage_facts(stage))
    seen = Seen(config, stage, family)
    chosen = choose(stage.shards.samples.tolist(), config.read, config.seed)
    problems = read_samples(place, stage.shards, chosen, seen)
    num = len(chosen) - len(problems)
    read = f"{len(seen.samples):,} samples of {num:,} of {len(stage.shards):,} shards"
    facts = [("read", f"{read}; the hashes of these are right" if num else read)]
    if problems:
        facts.append(("shards that cannot be read", f"{len(problems):,} of {len(chosen):,} that were tried"))
    print_facts(facts + (seen.facts() if seen.samples else []))
    if not seen.samples:
        problems.append(f"OUT: no sample of {place.address} could be read: there is no picture.")
    else:
        try:
            show(config, stage, seen, vae, shown_by, out)
        except OSError as error:
            problems.append(f"OUT: {out} cannot be written: {error.strerror or error}. Give another file.")
        else:
            how = [("moments are shown as", shown_by)] if stage.kind == "moments" else []
            print_facts([*how, ("picture", str(out.absolute()))])
    for text in problems:
        log.info(text)
    return 1 if problems else 0


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, words = split_words(argv)
    problems, config, found = [], LookConfig(), None
    if not 1 <= len(paths) <= 2:
        usage = "REMOTE has to be given, OUT.png can be, and nothing else"
        problems.append(f"command line: {usage}. python -m prepare.look --help says more.")
    else:
        out = paths[1] if len(paths) == 2 else DEFAULT_OUT
        try:
            found = open_stage(paths[0])
        except ValueError as error:
            problems.append(str(error))
        problem = picture_problem(out, paths[0])
        problems += [problem] if problem else []
    stage = found[1] if found else None
    command_line = _command_line(words, stage)
    try:
        config = load(LookConfig, command_line, check=functools.partial(check, stage=stage))
    except ConfigError as error:
        problems = error.problems + problems
    if command_line.print_config and not problems:
        print(to_yaml(config), end="")
        return 0
    if problems:
        raise ConfigError(problems)
    assert found is not None
    return look(config, *found, Path(out))


def _command_line(words: Sequence[str], stage: Stage | None) -> CommandLine:
    """Read the keys; before them stands what dataset.json says of the model."""
    command_line, made = parse_command_line(words, {}), []
    for name in ("family", "preset", "variant"):
        if stage is not None and name in stage.facts:
            key, where = f"model.{name}", f"{stage.location}/{FACTS_FILE}"
            made.append(Assignment(where, key, stage.facts[name], key))
    return dataclasses.replace(command_line, assignments=made + command_line.assignments)


if __name__ == "__main__":
    start(main)
