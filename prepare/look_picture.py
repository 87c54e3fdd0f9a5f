"""From the rows of a stage to one picture: a grid of samples with their captions, and histograms below.

matplotlib's constrained layout places everything. Captions come in any length and any script, so each text is measured and
broken into lines before. A user's own settings of matplotlib are neither used nor changed.

Shapes: N samples, C latent channels, h w height and width of the latent, H W height and width of a picture, px.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from streaming.base.format.mds.encodings import mds_decode
from torch import nn
from torchvision.transforms.v2.functional import to_pil_image

from cli.files import whole
from cli.limits import MAX_CAPTION
from cli.log import log
from cli.masking import printable
from prepare.moments import check_finite
from stages.image_files import format_of
from stages.images import SampleError, check_caption, decode_image, size_of
from zoo.encoders import RANDOM, build_encoders
from zoo.model_config import ModelConfig
from zoo.spec import Family

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.backends.backend_agg import RendererAgg

DPI = 120
PAGE_IN, MARGIN_IN, GAP_IN = 13.0, 0.28, 0.14
HEAD_IN, TITLE_POINTS, HEAD_POINTS = 0.75, 13.0, 9.0
MIN_COLUMNS, MAX_COLUMNS = 5, 8
CAPTION_LINES, CAPTION_POINTS, CAPTION_IN = 3, 7.5, 0.58
HISTOGRAM_COLUMNS, HISTOGRAM_IN = 4, 2.2
TILE_PX = round((PAGE_IN - 2 * MARGIN_IN) / MIN_COLUMNS * DPI)
READ_CHARACTERS = 1000  # of a caption: far more than three lines hold
NUM_BINS = 40
ELLIPSIS = "\N{HORIZONTAL ELLIPSIS}"
COLOURS = ("#31688e", "#d95f02", "#35864a", "#a6368c", "#8a6d1d", "#666666")
PALE = "#c9c9c9"
AS_COLOURS = "channels 1 to 3 of the posterior's mean as RGB, 1st to 99th percentile; model.weights=PATH decodes them"


@dataclass(frozen=True)
class Tile:
    """One sample of the grid."""

    picture: np.ndarray
    """uint8 (H, W, 3)."""
    caption: str


@dataclass(frozen=True)
class Histogram:
    """One histogram; several series share its axes."""

    label: str
    """What is counted, with its unit."""
    series: Mapping[str, np.ndarray]
    """Name -> values of any shape; an only one needs no name."""
    is_whole: bool = False
    """The values are whole numbers: the edges of bars lie between them."""
    mark: float | None = None
    """Where to draw a line; what lies beyond twice as much goes into the last bar."""


# --- samples as pictures ---


def thumbnail(image: Image.Image) -> np.ndarray:
    """# RGB of any size -> uint8 (H, W, 3), at most as large as a tile of the grid, in its own proportions."""
    image.thumbnail((TILE_PX, TILE_PX))  # in place
    return np.asarray(image)


def build_vae(family: Family, config: ModelConfig, made: str | None) -> tuple[nn.Module, str]:
    """Return the VAE of some weights on this machine's device, and in words whether it is the one that made the moments.

    Args:
        config: with its weights fetched.
        made: fingerprint of the one that made them, where dataset.json says it.

    Raises:
        ConfigError: the weights are damaged.
    """
    weights = str(config.weights)
    encoders, on_gpu = build_encoders(family, weights), torch.cuda.is_available() and config.frozen_device == "device"
    for note in encoders.notes:
        log.info(f"model.weights: {note}")
    used = encoders.fingerprints["vae"]
    text = "pictures by a VAE of random weights" if weights == RANDOM else f"pictures by the VAE of {weights}"
    if made is None:
        text += ", perhaps not the one that made them: dataset.json does not say"
    else:
        text += ", which made them" if used == made else f", NOT the one that made them: {used} instead of {made}"
    return encoders.modules["vae"].to("cuda" if on_gpu else "cpu"), text


@torch.no_grad()
def decode(vae: nn.Module, moments: Sequence[np.ndarray], normalize: str) -> list[np.ndarray]:
    """# float16 (2C, h, w) each -> thumbnails of what the VAE makes of the posterior's mean, uint8 (H, W, 3) each.

    One by one: at 512 px a decoder's activations take gigabytes.

    Args:
        vae: diffusers' AutoencoderKL; stored moments are not scaled, which is how it takes them.
        moments: mean | logvar.
        normalize: "symmetric" or "unit": the range of the images that the VAE saw (see `model.normalize_images`).
    """
    weight = next(vae.parameters())
    pictures = []
    for mean in (one[: len(one) // 2] for one in moments):
        latents = torch.tensor(mean[None]).to(weight.device, weight.dtype)
        image = vae.decode(latents).sample[0].float()
        unit = (image if normalize == "unit" else (image + 1.0) / 2.0).nan_to_num().clamp(0.0, 1.0)
        pixels = (unit * 255.0).round().to(torch.uint8).permute(1, 2, 0)  # (3, H, W) -> (H, W, 3)
        pictures.append(thumbnail(Image.fromarray(pixels.cpu().numpy())))
    return pictures


def channels_as_rgb(moments: Sequence[np.ndarray]) -> list[np.ndarray]:
    """# float16 (2C, h, w) each -> uint8 (h, w, 3) each: the first three channels of the posterior's mean.

    Each channel from its 1st to its 99th percentile over all the samples, so that they can be compared.
    """
    if not moments:
        return []
    means = np.stack([one[: len(one) // 2] for one in moments]).astype(np.float32)
    means = means[:, [min(channel, means.shape[1] - 1) for channel in range(3)]]  # (N, 3, h, w)
    low, high = np.percentile(means, [1, 99], axis=(0, 2, 3), keepdims=True)
    unit = np.clip((means - low) / np.maximum(high - low, 1e-6), 0.0, 1.0)
    return list(np.round(255 * unit).astype(np.uint8).transpose(0, 2, 3, 1))


@dataclass(frozen=True)
class Sample:
    """One sample as it was read; `problem` says why it cannot be used."""

    key: str
    caption: str
    num_bytes: int
    form: str = ""
    """As `format_of` names it; "" for moments."""
    size: tuple[int, int] | None = None
    """(width, height), px."""
    num_values: int = 0
    num_infinite: int = 0
    """Of the moments."""
    value: Any = None
    """Thumbnail, or moments."""
    tokens: Any = None
    """As they are stored, where they are."""
    num_tokens: int = 0
    """Of the caption if none were cut off, start and end included."""
    problem: str | None = None


@functools.cache
def _tokenizer() -> Any:
    import open_clip

    return open_clip.SimpleTokenizer()


def look_at(encodings: dict[str, str], row: dict[str, memoryview]) -> Sample:
    """Decode what is shown and measured of a row, and nothing else of it; in a thread."""
    raw = {name: bytes(row[name]) for name in ("key", "caption", "jpg", "moments", "tokens") if name in row}
    caption, data = raw.get("caption", b"").decode(errors="replace"), raw.get("jpg", b"")
    sample = Sample(raw.get("key", b"").decode(errors="replace"), caption, num_bytes=len(data))
    sample = dataclasses.replace(sample, num_tokens=len(_tokenizer().encode(caption[:MAX_CAPTION])) + 2)
    try:
        if "moments" in encodings:
            has_tokens = encodings.get("tokens", "").startswith("ndarray")
            tokens = mds_decode(encodings["tokens"], raw["tokens"]) if has_tokens else None
            values = mds_decode(encodings["moments"], raw["moments"])
            counts = {"num_values": values.size, "num_infinite": int(np.count_nonzero(~np.isfinite(values)))}
            sample = dataclasses.replace(sample, tokens=tokens, value=values, **counts)
            if values.ndim != 3 or len(values) % 2:
                raise SampleError("moments are not (2C, h, w)")
            check_finite("moments", values)
            return sample
        sample = dataclasses.replace(sample, form=format_of(data))
        image = decode_image(data)
        sample = dataclasses.replace(sample, size=size_of(image), value=thumbnail(to_pil_image(image)))
        if "caption" in raw:
            check_caption(caption)
    except SampleError as error:
        return dataclasses.replace(sample, problem=str(error))
    return sample


# --- texts and bars ---


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


def break_lines(text: str, fits: Callable[[str], bool], max_lines: int) -> list[str]:
    """Break a text into lines that fit, at spaces where there are some; the last one says where it was cut.

    Args:
        text: of any length; only its beginning is read.
        fits: whether a line is short enough.
        max_lines: how many there may be.
    """
    rest, lines = printable(text[:READ_CHARACTERS]), []
    while rest and len(lines) < max_lines:
        num = max(1, bisect.bisect_right(range(1, len(rest) + 1), 0, key=lambda n, rest=rest: not fits(rest[:n])))
        if num < len(rest) and len(lines) == max_lines - 1:
            while num and not fits(rest[:num].rstrip() + ELLIPSIS):
                num -= 1
            return [*lines, rest[:num].rstrip() + ELLIPSIS]
        if num < len(rest) and (space := rest.rfind(" ", 0, num + 1)) > 0:
            num = space  # otherwise a single long word, or a script without spaces: as many letters as fit
        lines.append(rest[:num])
        rest = rest[num:].lstrip()
    return lines


def bar_edges(values: np.ndarray, *, is_whole: bool = False, upper: float = math.inf) -> np.ndarray:
    """Return the edges of the bars for some values, (n + 1,).

    A few values far out would press all the others into one bar: what lies further from the inner 90 % than twice their
    span, or above `upper`, is left to the outermost bars (see `bars`).
    """
    values = np.minimum(values, upper)
    low, high = float(values.min()), float(values.max())
    inner_low, inner_high = np.percentile(values, [5, 95])
    if (reach := 2.0 * (inner_high - inner_low)) > 0:
        low, high = max(low, float(inner_low - reach)), min(high, float(inner_high + reach))
    if is_whole:
        low, high = math.floor(low), math.ceil(high)
        low, high = (low - 2, high + 2) if high - low < 4 else (low, high)
        step = math.ceil((high - low + 1) / NUM_BINS)
        return np.arange(low, high + 1 + step, step) - 0.5
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        half = 0.1 * abs(low) or 0.5
        return np.linspace(low - half, low + half, 6)
    return np.linspace(low, high, NUM_BINS + 1)


def bars(values: np.ndarray, edges: np.ndarray) -> tuple[np.ndarray, int]:
    """Return the number of values in each bar, (n,), and how many lie outside and were put into the outermost ones."""
    inside = np.clip(values, edges[0], edges[-1])
    return np.histogram(inside, edges)[0], int(np.count_nonzero(inside != values))


# --- the page ---


def histograms_of_images(samples: Sequence[Sample]) -> list[Histogram]:
    """Return what a stage of images is about, whatever its captions."""
    sizes = np.array([sample.size for sample in samples if sample.size is not None]).reshape(-1, 2)
    return [
        Histogram("px", {"width": sizes[:, 0], "height": sizes[:, 1]}, is_whole=True),
        Histogram("width / height", {"": sizes[:, 0] / sizes[:, 1]}),
        Histogram("KiB an image", {"": np.array([sample.num_bytes / 1024 for sample in samples])}),
    ]


def histograms_of_moments(values: Mapping[str, Sequence[np.ndarray]]) -> list[Histogram]:
    """Return those of mean, deviation and latent, (C, n) of each sample."""
    deviation = "log10 of the posterior's deviation"
    labels = {"mean": "posterior's mean", "deviation": deviation, "latent": "drawn latents, scaled"}
    found = []
    for name, label in labels.items():
        channels = np.concatenate(values[name], axis=1) if values[name] else []
        channels = np.log10(channels) if name == "deviation" else channels
        found.append(Histogram(f"{label}, by channel", {f"{number}": of for number, of in enumerate(channels, 1)}))
    return found


def write_page(out: Path, head: Sequence[str], tiles: Sequence[Tile], histograms: Sequence[Histogram]) -> None:
    """Write the picture as a PNG; what was there stays until the new one is whole.

    Args:
        head: the title, then further lines.
        histograms: at least one; there may be no tiles.

    Raises:
        OSError: it cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    num_rows = math.ceil(len(tiles) / MAX_COLUMNS)
    num_columns = max(MIN_COLUMNS, math.ceil(len(tiles) / max(1, num_rows)))
    tile_in = (PAGE_IN - 2 * MARGIN_IN) / num_columns - GAP_IN
    rows = [tiles[at : at + num_columns] for at in range(0, len(tiles), num_columns)]
    shapes = [[tile.picture.shape for tile in row] for row in rows]
    heights_in = [max(tile_in * min(1.0, height / width) for height, width, _ in row) for row in shapes]
    grid_in = HEAD_IN + sum(heights_in) + len(rows) * CAPTION_IN
    histograms_in = math.ceil(len(histograms) / HISTOGRAM_COLUMNS) * HISTOGRAM_IN
    with matplotlib.rc_context(), warnings.catch_warnings():
        matplotlib.rcdefaults()
        warnings.filterwarnings("ignore", "Glyph ")  # that no font has: they show as boxes
        height_in = grid_in + histograms_in + MARGIN_IN
        figure = Figure((PAGE_IN, height_in), DPI, layout="constrained")
        left, bottom = MARGIN_IN / PAGE_IN, MARGIN_IN / height_in
        inside = (left, bottom, 1.0 - 2 * left, 1.0 - bottom)
        figure.get_layout_engine().set(w_pad=GAP_IN / 2, h_pad=GAP_IN / 2, wspace=0.0, hspace=0.0, rect=inside)
        canvas = FigureCanvasAgg(figure)
        cut = functools.partial(_lines, canvas.get_renderer())
        above, below = figure.subfigures(2, height_ratios=[grid_in, histograms_in])
        for part, texts, points in ((figure, head[:1], TITLE_POINTS), (above, head[1:], HEAD_POINTS)):
            lines = [line for text in texts for line in cut(text, PAGE_IN - 3 * MARGIN_IN, points, 1)]
            at = GAP_IN / 2 / PAGE_IN + (left if part is figure else 0.0)
            part.suptitle("\n".join(lines), x=at, ha="left", fontsize=points, parse_math=False)
        if rows:
            grid = above.subplots(len(rows), num_columns, squeeze=False, height_ratios=heights_in)
            for axes, tile in itertools.zip_longest(grid.flat, tiles):
                _draw_tile(axes, tile, cut, tile_in)
        plots = below.subplots(math.ceil(len(histograms) / HISTOGRAM_COLUMNS), HISTOGRAM_COLUMNS, squeeze=False)
        for axes, histogram in itertools.zip_longest(plots.flat, histograms):
            _draw_histogram(axes, histogram)
        with whole(out) as temporary:
            canvas.print_png(temporary)


def _lines(renderer: RendererAgg, text: str, width_in: float, points: float, max_lines: int) -> list[str]:
    """Return a text in lines of a width at most."""
    from matplotlib.font_manager import FontProperties

    font = FontProperties(size=points)

    def fits(line: str) -> bool:
        return renderer.get_text_width_height_descent(line, font, ismath=False)[0] <= width_in * DPI

    return break_lines(text, fits, max_lines)


def _draw_tile(axes: Axes, tile: Tile | None, cut: Callable[..., list[str]], width_in: float) -> None:
    if tile is None:
        axes.set_axis_off()
        return
    is_small = max(tile.picture.shape[:2]) < width_in * DPI
    axes.imshow(tile.picture, interpolation="nearest" if is_small else "antialiased", aspect="equal")
    axes.set_anchor("SW")  # beside its caption, whatever its proportions
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=PALE, linewidth=0.6)  # a white picture has an edge too
    lines = cut(tile.caption or "(empty caption)", width_in, CAPTION_POINTS, CAPTION_LINES)
    # Captions have prices in them, which must not be read as formulas.
    axes.set_xlabel("\n".join(lines), fontsize=CAPTION_POINTS, loc="left", parse_math=False)


def _draw_histogram(axes: Axes, histogram: Histogram | None) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    if histogram is None:
        axes.set_axis_off()
        return
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=7.5)
    series = {name: np.ravel(values) for name, values in histogram.series.items() if np.size(values)}
    if not series:
        axes.set(xticks=[], yticks=[])
        axes.set_xlabel(histogram.label, fontsize=8)
        axes.text(0.5, 0.5, "none", ha="center", va="center", color="#888888", transform=axes.transAxes)
        return
    upper = math.inf if histogram.mark is None else 2.0 * histogram.mark
    edges = bar_edges(np.concatenate(list(series.values())), is_whole=histogram.is_whole, upper=upper)
    num_outside = 0
    for (name, values), colour in zip(series.items(), itertools.cycle(COLOURS)):
        counts, outside = bars(values, edges)
        axes.stairs(counts, edges, fill=len(series) == 1, color=colour, linewidth=1.2, label=name)
        num_outside += outside
    if histogram.mark is not None and edges[0] < histogram.mark < edges[-1]:
        axes.axvline(histogram.mark, color="#b00020", linewidth=1.0, linestyle="--")
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=histogram.is_whole))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    axes.ticklabel_format(axis="x", style="plain", useOffset=False)
    if 1 < len(series) <= len(COLOURS):
        place = {"loc": "lower right", "bbox_to_anchor": (1.0, 0.97), "ncols": len(series)}
        axes.legend(fontsize=7, frameon=False, handlelength=1.0, columnspacing=1.0, **place)
    note = f"\n{num_outside:,} further out, in the outermost bars" if num_outside else ""
    axes.set_xlabel(histogram.label + note, fontsize=8, parse_math=False)
