"""Enlarge a grid of samples, and write a number and the caption under each image.

    python -m reports.samples GRID.png CAPTIONS.txt OUT.png
    python -m reports.samples runs/NAME/samples/im000000512000.png runs/NAME/samples/captions.txt samples.png tile_px=256

GRID.png: a grid of callbacks/sample_grid.py, about square, an image for each line of CAPTIONS.txt, row by row.

    tile_px=128, columns=8      width of an image in OUT.png, images in a row of it
    gap_px=2, most=4096         between two images of GRID.png; how many of them OUT.png has, the first ones
    note="..."                  one line under all images

`make report` makes the images of the docs.
Exit code: 0, or 2 where a file cannot be read or is not such a grid.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from common.command import command
from common.errors import Refused
from common.files import open_regular, read_regular
from common.value_types import limited
from reports.formatting import read_words

MARGIN_PX, FONT_PX, LINE_PX, MAX_LINES = 10, 16, 18, 6


def tiles_of(grid: Image.Image, num_images: int, gap_px: int) -> list[Image.Image]:
    """Return a grid's images, row by row. Raises ValueError: it cannot be cut into so many."""
    columns = math.ceil(math.sqrt(num_images))
    rows = math.ceil(num_images / max(1, columns))
    across, down = grid.width + gap_px, grid.height + gap_px
    if not num_images or across % columns or down % rows:
        problem = f"{grid.width} x {grid.height} px, not {columns} x {rows} images with gaps of {gap_px} px"
        raise ValueError(
            f"{problem}. Possible: a grid with a line of captions for each image. Give its own, or gap_px=."
        )
    width, height = across // columns, down // rows
    corners = [(index % columns * width, index // columns * height) for index in range(num_images)]
    return [grid.crop((left, top, left + width - gap_px, top + height - gap_px)) for left, top in corners]


def wrapped(text: str, font: ImageFont.FreeTypeFont, wide_px: int) -> list[str]:
    """Break a text into lines that fit, MAX_LINES at most; a word that is wider than a line, within itself."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= wide_px:
            lines[-1] = longer
            continue
        lines += [""] if lines[-1] else []
        for letter in word:
            is_over = font.getlength(lines[-1] + letter) > wide_px and lines[-1]
            lines = [*lines, letter] if is_over else [*lines[:-1], lines[-1] + letter]
        if len(lines) > MAX_LINES:
            break
    return lines if len(lines) <= MAX_LINES else [*lines[: MAX_LINES - 1], "..."]


def captioned(
    tiles: Sequence[Image.Image], captions: Sequence[str], tile_px: int, columns: int, note: str | None = None
) -> Image.Image:
    """Return all images in one, enlarged without smoothing, each with its number and caption under it.

    Args:
        tile_px: width of an image in it.
        note: a line under all of them.
    """
    tall_px = round(tile_px * tiles[0].height / tiles[0].width)
    font = ImageFont.load_default(size=FONT_PX)
    texts = [wrapped(f"{number}. {caption}", font, tile_px) for number, caption in enumerate(captions, 1)]
    across_px, down_px = tile_px + MARGIN_PX, tall_px + LINE_PX * max(map(len, texts)) + 2 * MARGIN_PX
    columns = min(columns, len(tiles))
    below_px = math.ceil(len(tiles) / columns) * down_px + MARGIN_PX
    size = (columns * across_px + MARGIN_PX, below_px + (LINE_PX + MARGIN_PX if note else 0))
    overview = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(overview)
    for index, (tile, lines) in enumerate(zip(tiles, texts, strict=True)):
        left, top = MARGIN_PX + index % columns * across_px, MARGIN_PX + index // columns * down_px
        overview.paste(tile.resize((tile_px, tall_px), Image.Resampling.NEAREST), (left, top))
        draw.rectangle((left - 1, top - 1, left + tile_px, top + tall_px), outline="#c8c8c8")
        for number, line in enumerate(lines):
            draw.text((left, top + tall_px + 4 + number * LINE_PX), line, fill="#202020", font=font)
    if note:
        draw.text((MARGIN_PX, below_px), note, fill="#202020", font=font)
    return overview


@dataclass(frozen=True)
class SamplesKeys:
    """The keys of this command."""

    tile_px: int = limited(128, 1, 4096)
    """Width of an image in OUT.png."""
    columns: int = limited(8, 1, 4096)
    """Images in a row of OUT.png."""
    gap_px: int = limited(2, 0, 4096)
    """Between two images of GRID.png."""
    most: int = limited(4096, 1, 4096)
    """Images of OUT.png, the first ones."""
    note: str | None = None
    """One line under all images. null: none."""


@command(keys=SamplesKeys)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    text = "command line: Give three paths: GRID.png CAPTIONS.txt OUT.png."
    paths, keys = read_words(argv, SamplesKeys, lambda paths: [] if len(paths) == 3 else [text])
    grid_path, captions_path, out = map(Path, paths)
    try:
        captions = read_regular(captions_path).decode().splitlines()
        with open_regular(grid_path) as file, Image.open(file) as grid:
            tiles = tiles_of(grid.convert("RGB"), len(captions), keys.gap_px)
        overview = captioned(tiles[: keys.most], captions[: keys.most], keys.tile_px, keys.columns, keys.note)
        out.parent.mkdir(parents=True, exist_ok=True)
        overview.save(out, optimize=True)
    except (OSError, ValueError) as error:
        raise Refused(str(error)) from error
    print(f"written: {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
