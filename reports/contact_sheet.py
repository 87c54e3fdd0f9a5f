"""A contact sheet: pictures in rows, each with its caption and a grey line under it, and a heading over all of them.

A film is a strip of its frames.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from cli.files import open_regular
from cli.masking import printable
from record import films
from reports.samples import wrapped

BOX_PX, STRIP_PX = 208, 416  # the sides that a picture is brought to, at most, and the length of a strip
GAP_PX, EDGE_PX = 16, 24
CAPTION_PX, NOTE_PX, HEADING_PX = 14, 12, 20
INK, GREY, FRAME = "#1c1c1c", "#6b6b6b", "#d4d4d4"
MAX_COLUMNS = 8


@dataclass(frozen=True)
class Picture:
    """One of a sheet: its file, its caption, and what tells it from others with that caption."""

    path: Path
    caption: str
    note: str = ""


@functools.cache
def font(size_px: int, style: str = "") -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans, which matplotlib ships: Latin, Greek, Cyrillic; a box for all else. style: "-Bold" or none."""
    import matplotlib

    path = Path(matplotlib.get_data_path(), "fonts", "ttf", f"DejaVuSans{style}.ttf")
    return ImageFont.truetype(str(path), size_px)


def contact_sheet(pictures: Sequence[Picture], heading: str, about: str, alike: int = 1) -> Image.Image:
    """Return the sheet.

    Args:
        heading, about: a line in bold letters over all pictures, and what is the same for all of them.
        alike: so many neighbours have one caption: a row holds whole groups of them, where they fit.
    """
    tiles = [_tile(picture.path) for picture in pictures]
    wide, tall = (max(sizes) for sizes in zip(*[tile.size for tile in tiles], strict=True))
    wide = max(wide, BOX_PX * 3 // 4)
    columns = columns_of(len(pictures), alike, MAX_COLUMNS if wide <= BOX_PX else MAX_COLUMNS // 2)
    texts = [_texts(picture, wide) for picture in pictures]
    rows = [range(begin, min(begin + columns, len(tiles))) for begin in range(0, len(tiles), columns)]
    deep = [tall + 6 + max(sum(_line_px(font_) for font_, _, _ in texts[place]) for place in row) for row in rows]
    width = columns * (wide + GAP_PX) - GAP_PX
    head = [
        (font(HEADING_PX, "-Bold"), INK, line) for line in wrapped(printable(heading), font(HEADING_PX, "-Bold"), width)
    ]
    head += [(font(NOTE_PX), GREY, line) for line in wrapped(printable(about), font(NOTE_PX), width)]
    begin = EDGE_PX + sum(_line_px(font_) for font_, _, _ in head) + GAP_PX
    sheet = Image.new("RGB", (width + 2 * EDGE_PX, begin + sum(deep) + GAP_PX * (len(rows) - 1) + EDGE_PX), "white")
    draw = ImageDraw.Draw(sheet)
    _write(draw, EDGE_PX, EDGE_PX, head)
    for row, depth in zip(rows, deep, strict=True):
        for column, place in enumerate(row):
            left, tile = EDGE_PX + column * (wide + GAP_PX), tiles[place]
            sheet.paste(tile, (left, begin))
            draw.rectangle((left - 1, begin - 1, left + tile.width, begin + tile.height), outline=FRAME)
            _write(draw, left, begin + tall + 6, texts[place])
        begin += depth + GAP_PX
    return sheet


def columns_of(num: int, alike: int, most: int = MAX_COLUMNS) -> int:
    """Return how many pictures a row has: about a square of them, in whole groups where these fit, and at most `most`."""
    group = alike if alike <= most else 1
    wanted = max(math.ceil(math.sqrt(num * 1.5)), group)
    return min(group * max(1, min(wanted, most) // group), num)


def _tile(path: Path) -> Image.Image:
    """Return a picture, small ones enlarged by a whole factor, so that each of their pixels is seen, large ones reduced."""
    if path.suffix == ".mp4":
        picture, box_px = Image.fromarray(films.strip_of(films.read_mp4(path)).permute(1, 2, 0).numpy()), STRIP_PX
    else:
        with open_regular(path) as file, Image.open(file) as image:
            picture, box_px = image.convert("RGB"), BOX_PX
    longest = max(picture.size)
    if longest > box_px:
        scale = box_px / longest
        size = (max(1, round(picture.width * scale)), max(1, round(picture.height * scale)))
        return picture.resize(size, Image.Resampling.LANCZOS)
    factor = box_px // longest
    return picture.resize((picture.width * factor, picture.height * factor), Image.Resampling.NEAREST)


Line = tuple[ImageFont.FreeTypeFont, str, str]


def _texts(picture: Picture, wide_px: int) -> list[Line]:
    lines = [(font(CAPTION_PX), INK, line) for line in wrapped(printable(picture.caption), font(CAPTION_PX), wide_px)]
    notes = wrapped(printable(picture.note), font(NOTE_PX), wide_px) if picture.note else []
    return lines + [(font(NOTE_PX), GREY, line) for line in notes]


def _line_px(font_: ImageFont.FreeTypeFont) -> int:
    return round(font_.size * 1.35)


def _write(draw: ImageDraw.ImageDraw, left: int, top: int, lines: Sequence[Line]) -> None:
    for font_, colour, line in lines:
        draw.text((left, top), line, fill=colour, font=font_)
        top += _line_px(font_)
