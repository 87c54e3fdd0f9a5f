"""The samples of a stage as prepare.look reads them: what is measured, and their contact sheet."""

from __future__ import annotations

import functools
import heapq
import math
import textwrap
import unicodedata
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from streaming.base.format.mds.encodings import mds_decode
from torchvision.transforms.v2.functional import to_pil_image

from cli.files import whole
from cli.limits import MAX_CAPTION
from cli.masking import printable
from prepare.moments import check_finite
from stages.dataset import Stage
from stages.image_files import format_of
from stages.images import SampleError, check_caption, decode_image, size_of
from zoo.spec import Family

Fact = tuple[str, str]  # a name, and what is known of it
MAX_SHOWN = 90  # letters of a caption in a line
NUM_COLUMNS, TILE_IN, DPI = 6, 2.2, 120
CAPTION_LINES, LINE_LETTERS = 3, 30


def size_in_words(num_bytes: float) -> str:
    """Return 12.3 MiB for 12,897,484."""
    power = min(int(math.log2(max(num_bytes, 1)) // 10), 4)
    number = num_bytes / 1024**power
    return f"{number:,.1f} {'KMGT'[power - 1]}iB" if power else f"{number:,.0f} bytes"


def spread(values: Sequence[float], form: Callable[[float], str] = "{:,g}".format) -> str:
    """Return median, least, what 95 % do not exceed, and greatest."""
    if not len(values):
        return "none"
    most = np.percentile(values, 95, method="inverted_cdf")
    found = {"median": np.median(values), "least": min(values), "95 % at most": most, "greatest": max(values)}
    return ", ".join(f"{name} {form(float(value))}" for name, value in found.items())


def share(num: int, of: int) -> str:
    """Return a count, what it is a part of, and per cent."""
    return f"{num:,} of {of:,} ({100 * num / max(of, 1):.3g} %)"


def first_of(keys: Sequence[str]) -> str:
    """Return three keys of many."""
    return ", ".join(keys[:3]) + (", ..." if len(keys) > 3 else "")


# --- the samples ---


@dataclass
class Sample:
    """One sample. value: a thumbnail, uint8 (H, W, 3), or moments (2C, h, w); problem: why it cannot be used.

    numbers, flags: what is measured of it; powers: means over the moments of posterior's mean, its deviation and a drawn
    latent, and of their squares, (3, 2, C).
    """

    key: str
    caption: str
    value: Any = None
    problem: str | None = None
    numbers: dict[str, float] = field(default_factory=dict)
    flags: dict[str, bool] = field(default_factory=dict)
    powers: Any = None


@functools.cache
def _tokenizer() -> Any:
    import open_clip

    return open_clip.SimpleTokenizer()


def look_at(family: Family, encodings: dict[str, str], row: dict[str, memoryview]) -> Sample:
    """Decode what is shown and measured of a row, and nothing else of it; in a thread."""
    raw = {name: bytes(row[name]) for name in ("key", "caption", "jpg", "moments", "tokens") if name in row}
    sample = Sample(*(raw.get(name, b"").decode(errors="replace") for name in ("key", "caption")))
    if "caption" in raw:
        tokens = family.tokenize([sample.caption])["tokens"][0].numpy()
        num_tokens = len(_tokenizer().encode(sample.caption[:MAX_CAPTION])) + 2  # with start and end
        sample.numbers |= {"caption, characters": len(sample.caption), "caption, CLIP's tokens": num_tokens}
        is_empty, is_cut = not sample.caption.strip(), num_tokens > len(tokens)
        sample.flags |= {"empty captions": is_empty, f"cut off at {len(tokens)} tokens": is_cut}
        if encodings.get("tokens", "").startswith("ndarray"):
            stored = mds_decode(encodings["tokens"], raw["tokens"])
            sample.flags["stored tokens not of the caption"] = not np.array_equal(stored, tokens)
    try:
        if "moments" in encodings:
            sample.value = mds_decode(encodings["moments"], raw["moments"])
            if sample.value.ndim != 3 or len(sample.value) % 2:
                raise SampleError("moments are not (2C, h, w)")
            check_finite("moments", sample.value)
            return sample
        data = raw.get("jpg", b"")
        sample.numbers["bytes an image"] = len(data)
        sample.flags[f"format: {format_of(data)}"] = True
        pixels = decode_image(data)
        width, height = size_of(pixels)
        sample.numbers |= {"width, px": width, "height, px": height, "width / height": width / height}
        sample.flags |= {
            "higher than wide": height > width,
            "square": height == width,
            "wider than high": width > height,
        }
        sample.value = thumbnail(to_pil_image(pixels))
        if "caption" in raw:
            check_caption(sample.caption)
    except SampleError as error:
        sample.problem = str(error)
    return sample


class Seen:
    """What was read of a stage so far. The samples of the picture are a random choice of the usable ones."""

    def __init__(self, num_shown: int, seed: int, stage: Stage, family: Family):
        self.stage, self.family, self.num_shown = stage, family, num_shown
        self.samples: list[Sample] = []
        self.shape: tuple[int, ...] | None = None  # of moments
        self._heap: list[tuple[float, int, Sample]] = []  # priority, place in the stage's order
        self._generator = np.random.default_rng([seed, 1])

    def add(self, sample: Sample) -> None:
        """Take a sample; only of those that may be shown the value is kept."""
        if self.stage.kind == "moments" and sample.problem is None:
            self.shape = self.shape or sample.value.shape
            if sample.value.shape != self.shape:
                sample.problem = f"moments are not {self.shape} as others are"
        if self.stage.kind == "moments" and sample.problem is None:
            moments = torch.from_numpy(sample.value.astype(np.float32))[None]  # (1, 2C, h, w)
            mean, logvar = moments.chunk(2, dim=1)
            noise = torch.from_numpy(self._generator.standard_normal(mean.shape, np.float32))
            parts = (mean, torch.exp(0.5 * logvar.clamp(-30.0, 20.0)), self.family.sample_latents(moments, noise))
            values = torch.cat(parts).flatten(2).double().numpy()  # (3, C, h w)
            sample.powers = np.stack([values.mean(axis=2), (values**2).mean(axis=2)], axis=1)
        self.samples.append(sample)
        if sample.problem is None:
            heapq.heappush(self._heap, (self._generator.random(), len(self.samples), sample))
            if len(self._heap) > self.num_shown:
                heapq.heappop(self._heap)[2].value = None
        else:
            sample.value = None

    def shown(self) -> list[Sample]:
        """Return the samples of the picture, in the stage's order."""
        return [sample for _, _, sample in sorted(self._heap, key=lambda entry: entry[1])]

    def facts(self) -> list[Fact]:
        samples, num, reasons = self.samples, len(self.samples), {}
        for sample in samples:
            if sample.problem is not None:
                reasons.setdefault(sample.problem, []).append(sample.key)
        named = [f"{why}: {len(keys):,} ({first_of(keys)})" for why, keys in sorted(reasons.items())]
        facts = [("unusable samples", "; ".join([share(sum(map(len, reasons.values())), num), *named]))]
        for name in dict.fromkeys(name for sample in samples for name in sample.numbers):
            form = size_in_words if name.startswith("bytes") else "{:,g}".format
            facts.append((name, spread([one.numbers[name] for one in samples if name in one.numbers], form)))
        for name in dict.fromkeys(name for sample in samples for name in sample.flags):
            facts.append((name, share(sum(sample.flags.get(name, False) for sample in samples), num)))
        names = ("posterior's mean", "posterior's deviation", "drawn latents, scaled")
        powers = [sample.powers for sample in samples if sample.powers is not None]
        for name, (mean, square) in zip(names, np.mean(powers, axis=0) if powers else (), strict=bool(powers)):
            spread_of = np.sqrt(np.maximum([square.mean() - mean.mean() ** 2, *(square - mean**2)], 0.0))
            for what, (whole_of, *channels) in (("mean", [mean.mean(), *mean]), ("spread", spread_of)):
                by_channel = ", ".join(map("{:.3g}".format, channels))
                facts.append((f"{name}: {what}", f"{whole_of:.4g}; by channel {by_channel}"))
        for column in (name for name in ("caption", "key") if name in self.stage.columns):
            texts = Counter(getattr(sample, column) for sample in samples).most_common()
            again = [f"{count:,} times: {text[:MAX_SHOWN]}" for text, count in texts if count > 1]
            total = share(sum(count for _, count in texts if count > 1), num)
            facts += [(f"{column}s that come again", total), *(("", text) for text in again[:3])]
        return facts


# --- the picture ---


def thumbnail(image: Image.Image) -> np.ndarray:
    """# RGB of any size -> uint8 (H, W, 3), at most as large as a tile, in its own proportions."""
    image.thumbnail((round(TILE_IN * DPI),) * 2)  # in place
    return np.asarray(image)


@torch.no_grad()
def decode(vae: torch.nn.Module, moments: Sequence[np.ndarray], normalize: str) -> list[np.ndarray]:
    """# float16 (2C, h, w) each -> thumbnails of what the VAE makes of the mean, uint8 (H, W, 3); one by one: gigabytes each.

    Args:
        vae: diffusers' AutoencoderKL, which takes stored moments as they are, unscaled.
        normalize: "symmetric" or "unit": the range of the images that the VAE saw (see `model.normalize_images`).
    """
    weight, pictures = next(vae.parameters()), []
    for mean in (one[: len(one) // 2] for one in moments):
        image = vae.decode(torch.tensor(mean[None]).to(weight.device, weight.dtype)).sample[0].float()
        unit = (image if normalize == "unit" else (image + 1.0) / 2.0).nan_to_num().clamp(0.0, 1.0)
        pictures.append(thumbnail(to_pil_image((unit * 255.0).round().to(torch.uint8).cpu())))
    return pictures


def channels_as_rgb(moments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """# float16 (2C, h, w) each -> uint8 (h, w, 3) each: the mean's first three channels, scaled over all samples."""
    if not moments:
        return []
    means = np.stack([one[: len(one) // 2] for one in moments]).astype(np.float32)
    means = means[:, [min(channel, means.shape[1] - 1) for channel in range(3)]]  # (N, 3, h, w)
    low, high = np.percentile(means, [1, 99], axis=(0, 2, 3), keepdims=True)
    unit = np.clip((means - low) / np.maximum(high - low, 1e-6), 0.0, 1.0)
    return list(np.round(255 * unit).astype(np.uint8).transpose(0, 2, 3, 1))


def write_page(out: Path, head: Sequence[str], pictures: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Write a contact sheet as a PNG; what was there stays until the new one is whole. Raises OSError."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = max(1, math.ceil(len(pictures) / NUM_COLUMNS))
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()  # a user's own settings are neither used nor changed
        warnings.filterwarnings("ignore", "Glyph ")  # that no font has: they show as boxes
        figure = Figure((NUM_COLUMNS * TILE_IN, num_rows * (TILE_IN + 0.6) + 1.0), DPI, layout="constrained")
        lines = [textwrap.shorten(printable(text), 150, placeholder="...") for text in head]
        figure.suptitle("\n".join(lines), x=0.01, ha="left", fontsize=9, parse_math=False)
        grid = figure.subplots(num_rows, NUM_COLUMNS, squeeze=False).flatten()
        for axes in grid:
            axes.set(xticks=[], yticks=[], anchor="SW")
            axes.spines[:].set_visible(False)
        for axes, picture, caption in zip(grid, pictures, captions, strict=False):
            text = printable(caption[:1000]) or "(empty caption)"
            wide = 1 + sum(unicodedata.east_asian_width(letter) in "WF" for letter in text) / len(text)
            text = textwrap.fill(text, int(LINE_LETTERS / wide), max_lines=CAPTION_LINES, placeholder="...")
            axes.imshow(picture, interpolation="nearest")
            # Captions have prices in them, which must not be read as formulas.
            axes.set_xlabel(text, fontsize=6.5, loc="left", parse_math=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        with whole(out) as temporary:
            FigureCanvasAgg(figure).print_png(temporary)
