"""Show a dataset: its facts, line by line, and a contact sheet of samples with their captions.

    python -m prepare.look REMOTE [OUT.png]
    python -m prepare.look s3://bucket/laion_moments /tmp/moments.png samples=32 model.weights=/weights/512-base-ema.ckpt

REMOTE: a dataset of images or moments, a folder or an address in a store; it is only read, and nothing of it is executed.
OUT.png: the contact sheet, look.png in the current folder by default; an existing file is replaced.

The first facts are those of dataset.json and index.json, for the whole dataset. The others are measured on a random sample:
`read` samples from at least 8 shards. Each of these shards is fetched whole and checked by its hash; one that is damaged or
missing is named, and the others are read.

Moments are shown as the VAE of model.weights decodes their mean (a name on the hub, a folder, a checkpoint, or random where
the dataset was made so), without weights as colors.

Keys: samples (shown, 16), read (measured, 2000), seed (0), model.weights.
Exit code: 0 when the contact sheet was written, 1 when a shard is damaged or the work failed, 2 when it could not start.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
import textwrap
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torchvision.transforms.v2.functional import to_pil_image
from tqdm import tqdm

from common.command import command, start
from common.errors import ConfigError, Failed
from common.files import atomic_path
from common.log import log
from common.masking import to_printable
from common.value_types import limited
from families import load_family
from families.encoders import ModelConfig, build_encoders, fetch_model_weights, model_problems
from families.spec import Family, parse_size
from mds.dataset import Dataset, is_remote, read_dataset
from mds.images import SampleError, clean_caption, decode_image, detect_format, size_of
from mds.shard_file import read_sample
from mds.shard_table import Shard
from prepare.addresses import Address, open_address, out_problem, writable_store_problem
from prepare.arguments import parse_arguments
from prepare.moment_rows import check_finite
from prepare.source_shards import map_in_order, open_shard

DEFAULT_OUT = "look.png"
MIN_SHARDS = 8  # neighbors in a shard have the same source: a few shards more say more than a few samples more
NAME_WIDTH = 34
NUM_COLUMNS, TILE_IN, DPI = 6, 2.2, 120
AS_COLORS = "channels 1 to 3 of the posterior's mean as RGB, 1st to 99th percentile; model.weights=PATH decodes them"

Fact = tuple[str, str]  # a name and its value


@dataclass(frozen=True)
class LookModel:
    """The keys of `model`; the family is that of the dataset."""

    weights: str | None = None
    """Weights whose VAE decodes moments: a name on the hub, a folder, a checkpoint, or random. null: shown as colors."""


@dataclass(frozen=True)
class LookConfig:
    """The keys of this command."""

    samples: int = limited(16, 1, 400)
    """Samples in the contact sheet."""
    read: int = limited(2000, 1, 10**9)
    """Samples that are measured."""
    seed: int = limited(0, 0, 2**32 - 1)
    """Seed for choosing the samples."""
    model: LookModel = field(default_factory=LookModel)


def open_dataset(location: str) -> tuple[Address, Dataset]:
    """Return the address of a dataset and its facts. Raises ValueError: it is not one that can be shown."""
    try:
        if text := writable_store_problem(location):
            raise ValueError(text)
        dataset = read_dataset(location)
    except (ValueError, OSError) as error:
        raise ValueError(f"REMOTE: {error}") from error
    kind = (
        "videos' moments" if np.size(dataset.metadata.get("image_size")) > 2 else dataset.kind
    )  # width, height, frames
    if dataset.adopted or dataset.buckets or kind not in ("images", "moments"):
        what = "adopted" if dataset.adopted else "a set of buckets" if dataset.buckets else f"a dataset of {kind}"
        raise ValueError(
            f"REMOTE: {location} is {what}. Possible: a dataset of images or moments, one bucket of a set."
        )
    return open_address(location), dataset


def resolve_model(config: LookConfig, dataset: Dataset) -> ModelConfig:
    """Return the model that made a dataset, with the weights of the command. Raises ConfigError: they do not fit it."""
    model_keys = {name: dataset.metadata[name] for name in ("family", "preset", "variant") if name in dataset.metadata}
    model, problems = ModelConfig(weights=config.model.weights, **model_keys), []
    if dataset.kind == "images" and model.weights is not None:
        problems = [f"model.weights: has no use with a dataset of images: {dataset.location}. Leave it out."]
    elif dataset.kind == "moments":
        size = parse_size(dataset.metadata["image_size"])
        problems = [problem.text for problem in model_problems(model, size, needs_encoders=False)]
    if problems:
        raise ConfigError(problems)
    return model


def choose_rows(sizes: Sequence[int], read: int, seed: int) -> dict[int, list[int]]:
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


# --- what is measured ---


@dataclass
class ShownSample:
    """One sample of a dataset.

    value: a thumbnail, uint8 (H, W, 3), or moments, float16 (2C, h, w); problem: why it cannot be used.
    """

    key: str
    caption: str
    value: Any = None
    problem: str | None = None
    measured: dict[str, float] = field(default_factory=dict)
    """Numbers, and what is true or not."""


def read_and_measure(family: Family, shard: Shard, number: int) -> ShownSample:
    """Read and measure a row."""
    row = read_sample(shard, number)
    sample = ShownSample(str(row.get("key", "")), str(row.get("caption", "")))
    if "caption" in row:
        sample.measured |= {"caption, characters": len(sample.caption), "empty captions": not sample.caption.strip()}
    if "caption" in row and "tokens" in row:
        tokens = family.tokenize([sample.caption])["tokens"][0].numpy()
        sample.measured["stored tokens not of the caption"] = not np.array_equal(row["tokens"], tokens)
    try:
        if "moments" in row:
            sample.value, moments = row["moments"], torch.from_numpy(row["moments"].astype(np.float32))[None]
            check_finite("moments", sample.value)
            mean, *logvar = moments.chunk(2 if family.has_posterior else 1, dim=1)
            noise = torch.randn(mean.shape, generator=torch.Generator().manual_seed(0))
            statistics = [("mean", mean), *(("deviation", (0.5 * v.clamp(-30.0, 20.0)).exp()) for v in logvar)]
            for name, values in (*statistics, ("draws, scaled", family.sample_latents(moments, noise))):
                sample.measured[f"posterior's {name}: mean"] = float(values.mean())
                sample.measured[f"posterior's {name}: spread"] = float(values.std())
            return sample
        sample.measured |= {"bytes an image": len(row["jpg"]), f"format: {detect_format(row['jpg'])}": True}
        pixels = decode_image(row["jpg"])
        width, height = size_of(pixels)
        sample.measured |= {"width, px": width, "height, px": height, "width / height": width / height}
        sample.value = thumbnail(to_pil_image(pixels))
        if "caption" in row:
            clean_caption(sample.caption)
    except SampleError as error:
        sample.problem = str(error)
    return sample


def read_samples(
    address: Address, dataset: Dataset, config: LookConfig, family: Family, chosen: dict[int, list[int]]
) -> tuple[list[ShownSample], list[ShownSample], list[str]]:
    """Read the chosen samples. Returns all of them, a random choice of the usable ones, and the shards' problems."""
    samples, selected, problems = [], [], []
    generator, num_threads = np.random.default_rng([config.seed, 1]), len(os.sched_getaffinity(0))
    with (
        tempfile.TemporaryDirectory() as scratch,
        ThreadPoolExecutor(num_threads) as pool,
        tqdm(total=sum(map(len, chosen.values())), unit=" samples", desc="read", disable=None) as progress,
    ):
        for number, rows in chosen.items():
            try:
                shard = open_shard(address, dataset.shards[number], Path(scratch))
            except Failed as error:
                problems.append(f"REMOTE{str(error).removeprefix('IN')}")
                continue
            for sample in map_in_order(
                pool, functools.partial(read_and_measure, family, shard), rows, ahead=4 * num_threads
            ):
                samples.append(sample)
                progress.update()
                if sample.problem is None:
                    selected.append((generator.random(), len(samples), sample))
                if len(selected) > config.samples:
                    selected.remove(least := min(selected))
                    least[2].value = None
            if Path(shard.folder) == Path(scratch):
                Path(shard.path).unlink()
    return samples, [sample for _, _, sample in sorted(selected, key=lambda entry: entry[1])], problems


# --- facts ---


def format_spread(values: Sequence[float]) -> str:
    """Return median, least, the 95th percentile, and greatest."""
    points = np.percentile(values, [50, 0, 95, 100], method="inverted_cdf")
    return "median {:,.8g}, least {:,.8g}, 95 % at most {:,.8g}, greatest {:,.8g}".format(*points)


def format_share(num: int, of: int) -> str:
    """Return a count, its whole, and per cent."""
    return f"{num:,} of {of:,} ({100 * num / max(of, 1):.3g} %)"


def dataset_facts(dataset: Dataset) -> list[Fact]:
    """Return what dataset.json and index.json say."""
    columns = ", ".join(f"{name} ({kind})" for name, kind in zip(dataset.columns, dataset.encodings, strict=True))
    return [
        ("location", dataset.location),
        *[(name, value if isinstance(value, str) else json.dumps(value)) for name, value in dataset.metadata.items()],
        ("columns", columns),
        ("shards", f"{len(dataset.shards):,}"),
        ("bytes", f"{int(dataset.shards.raw_bytes.sum()):,}"),
    ]


def sample_facts(samples: Sequence[ShownSample]) -> list[Fact]:
    """Return what was measured."""
    num, reasons = len(samples), Counter(sample.problem for sample in samples if sample.problem is not None)
    example = {sample.problem: sample.key for sample in samples}
    named = [f"{why}: {count:,} (e.g. {example[why]})" for why, count in sorted(reasons.items())]
    facts = [("unusable samples", "; ".join([format_share(reasons.total(), num), *named]))]
    for name in dict.fromkeys(name for sample in samples for name in sample.measured):
        values = [sample.measured[name] for sample in samples if name in sample.measured]
        facts.append((name, format_share(sum(values), num) if isinstance(values[0], bool) else format_spread(values)))
    for column in ("caption", "key"):
        texts = Counter(getattr(sample, column) for sample in samples)
        facts.append((f"{column}s that repeat", format_share(sum(count for count in texts.values() if count > 1), num)))
    return facts


def print_facts(facts: Iterable[Fact]) -> None:
    """Print one a line, without what a terminal cannot show or would interpret."""
    for name, value in facts:
        print(f"{to_printable(name):<{NAME_WIDTH}} {to_printable(value)}", flush=True)


# --- the contact sheet ---


def thumbnail(image: Image.Image) -> np.ndarray:
    """# RGB of any size -> uint8 (H, W, 3), at most as large as a tile, with the same aspect ratio."""
    image.thumbnail((round(TILE_IN * DPI),) * 2)  # in place
    return np.asarray(image)


@torch.no_grad()
def decode_moments(
    family: Family, vae: torch.nn.Module, moments: Sequence[np.ndarray], normalize: str
) -> list[np.ndarray]:
    """# moments as stored -> thumbnails of the decoded means, uint8 (H, W, 3); one by one: gigabytes each.

    Args:
        vae: the family's autoencoder.
        normalize: "symmetric" or "unit": the range of the images that the VAE saw (see `model.normalize_images`).
    """
    weight, thumbnails = next(vae.parameters()), []
    for values in moments:
        latents = family.sample_latents(torch.tensor(values[None]).float(), torch.zeros(()))
        image = family.decode_latents({"vae": vae}, latents.to(weight.device))[0].float()
        unit = (image if normalize == "unit" else (image + 1.0) / 2.0).nan_to_num().clamp(0.0, 1.0)
        thumbnails.append(thumbnail(to_pil_image((unit * 255.0).round().to(torch.uint8).cpu())))
    return thumbnails


def channels_as_rgb(moments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """# float16 (2C, h, w) each -> uint8 (h, w, 3) each: the mean's first three channels, scaled over all samples."""
    means = np.stack([values[: len(values) // 2] for values in moments]).astype(np.float32)
    means = means[:, [min(channel, means.shape[1] - 1) for channel in range(3)]]  # (N, 3, h, w)
    low, high = np.percentile(means, [1, 99], axis=(0, 2, 3), keepdims=True)
    unit = np.clip((means - low) / np.maximum(high - low, 1e-6), 0.0, 1.0)
    return list(np.round(255 * unit).astype(np.uint8).transpose(0, 2, 3, 1))


def render_images(
    model: ModelConfig, family: Family, dataset: Dataset, samples: Sequence[ShownSample]
) -> tuple[list[Any], str]:
    """Return the images to show, and how moments were made into them. Raises ConfigError: the weights are damaged."""
    values = [sample.value for sample in samples]
    if dataset.kind == "images" or not values:
        return values, ""
    if model.weights is None:
        return channels_as_rgb(values), AS_COLORS
    encoders = build_encoders(family, str(fetch_model_weights(model).weights))
    stored_vae, loaded_vae = dataset.metadata["encoders"]["vae"], encoders.fingerprints["vae"]
    vae_note = (
        "the one that made them"
        if loaded_vae == stored_vae
        else f"NOT the one that made them: {loaded_vae} instead of {stored_vae}"
    )
    vae_note = vae_note if stored_vae else "not known to be the one that made them"
    vae = encoders.modules["vae"].to("cuda" if torch.cuda.is_available() else "cpu")
    thumbnails = decode_moments(family, vae, values, dataset.metadata["normalize"])
    return thumbnails, f"decoded by the VAE of {model.weights}, {vae_note}"


def write_contact_sheet(out: Path, head: Sequence[str], images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Write a contact sheet as a PNG; an existing file stays until the new one is whole. Raises OSError."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = max(1, -(-len(images) // NUM_COLUMNS))
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        warnings.filterwarnings("ignore", "Glyph ")  # characters that no font has are shown as boxes
        figure = Figure((NUM_COLUMNS * TILE_IN, num_rows * (TILE_IN + 0.6) + 1.0), DPI, layout="constrained")
        lines = [textwrap.shorten(to_printable(text), 150, placeholder="...") for text in head]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9, parse_math=False)
        grid = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flatten()
        for axes in grid:
            axes.set(xticks=[], yticks=[], anchor="SW")
            axes.spines[:].set_visible(False)
        for axes, image, caption in zip(grid, images, captions, strict=False):
            text = textwrap.fill(to_printable(caption[:1000]), 30, max_lines=3, placeholder="...")
            axes.imshow(image, interpolation="nearest")
            axes.set_xlabel(text, fontsize=6.5, loc="left", parse_math=False)  # captions hold prices, not formulas
        out.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(out) as temporary:
            FigureCanvasAgg(figure).print_png(temporary)


# --- the command ---


def show_dataset(config: LookConfig, address: Address, dataset: Dataset, out: Path) -> int:
    """Print the facts and write the contact sheet; return the exit code. Raises ConfigError: the weights are damaged."""
    model = resolve_model(config, dataset)
    print_facts(dataset_facts(dataset))
    family = load_family(model.family, model.preset, model.variant)
    chosen = choose_rows(dataset.shards.samples.tolist(), config.read, config.seed)
    samples, selected, problems = read_samples(address, dataset, config, family, chosen)
    read = f"{len(samples):,} samples of {len(chosen) - len(problems):,} of {len(dataset.shards):,} shards"
    print_facts([("read", f"{read}, whose hashes are right")])
    if samples:
        print_facts(sample_facts(samples))
        images, rendering = render_images(model, family, dataset, selected)
        head = [f"{dataset.kind}: {dataset.location}", f"{len(images):,} samples, seed {config.seed}. {rendering}"]
        try:
            write_contact_sheet(out, head, images, [sample.caption for sample in selected])
        except OSError as error:
            problems.append(f"OUT: {out} cannot be written: {error.strerror or error}. Give another file.")
        else:
            print_facts(
                [*([("moments are shown as", rendering)] if rendering else []), ("contact sheet", str(out.absolute()))]
            )
    else:
        problems.append(f"REMOTE: no sample of {address.location} could be read, so there is no contact sheet.")
    for text in problems:
        log.info(text)
    return 1 if problems else 0


@command(keys=LookConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = parse_arguments(argv, LookConfig)
    if config is None:
        return 0
    if not 1 <= len(paths) <= 2:
        usage = "REMOTE has to be given, OUT.png can be, and nothing else"
        problems.append(f"command line: {usage}. python -m prepare.look --help says more.")
    else:
        out = paths[1] if len(paths) == 2 else DEFAULT_OUT
        try:
            address, dataset = open_dataset(paths[0])
        except ValueError as error:
            problems.append(str(error))
        if is_remote(out) or Path(out).is_dir() or Path(out).suffix.lower() != ".png":
            problems.append(f"OUT: {out} is not a PNG file on this machine. Give one, e.g. {DEFAULT_OUT}.")
        elif text := out_problem(str(Path(out).parent), [paths[0]]):
            problems.append(text)
    if problems:
        raise ConfigError(problems)
    return show_dataset(config, address, dataset, Path(out))


if __name__ == "__main__":
    start(main)
