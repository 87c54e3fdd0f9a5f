"""Sample grids for the page: as small as they can be, thinned where there are very many."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

from record.history import History, grid_bytes
from reports.page_text import plain

MOST_SIDE_PX, SMALL_SIDE_PX = 1100, 420
MOST_GRIDS, MOST_CAPTIONS = 60, 64
WEBP_QUALITY = 85


@dataclass(frozen=True)
class Grid:
    """One picture: images seen, and its bytes as an address that an <img> takes; of videos also those of the moving one."""

    images: int
    address: str
    film: str | None = None


@dataclass(frozen=True)
class Samples:
    """The pictures of a run, over training.

    width, height: px, of the moving pictures where there are some. is_small: shown enlarged without smoothing.
    left_out: what of them the page does not have, a sentence each.
    """

    grids: Sequence[Grid]
    captions: Sequence[str]
    width: int
    height: int
    left_out: Sequence[str]

    @property
    def has_films(self) -> bool:
        return any(grid.film is not None for grid in self.grids)

    @property
    def is_small(self) -> bool:
        return max(self.width, self.height) <= SMALL_SIDE_PX


def samples_of(run: History, most_bytes: int) -> Samples | None:
    """Return a run's sample grids within so many bytes, the first and the last among them; None where there are none."""
    if not run.grids:
        return None
    left_out: list[str] = []
    sizes: dict[int, tuple[int, int]] = {}
    found: dict[int, Grid] = {}
    last = _packed(run.grids[-1][1])
    each = len(last[1]) + len(_film_beside(run.grids[-1][1]) or "") if last else most_bytes
    places = spread(len(run.grids), max(1, min(MOST_GRIDS, most_bytes // each)))
    for place in places:
        images, path = run.grids[place]
        packed = _packed(path)
        if packed is None:
            left_out.append(f"{path.name} cannot be read.")
            continue
        grid = Grid(images, packed[1], _film_beside(path))
        if (room := most_bytes - _bytes_of(grid) - sum(map(_bytes_of, found.values()))) >= 0:
            sizes[images], found[images] = _size_of_film(path) if grid.film else packed[0], grid
        elif grid.film is not None and room + len(grid.film) >= 0:
            left_out.append(f"{path.with_suffix('.gif').name} is too large for this page.")
            sizes[images], found[images] = packed[0], replace(grid, film=None)
    if not found:
        return Samples([], [], 0, 0, left_out or ["The sample grids are too large for this page."])
    if len(found) + len(left_out) < len(run.grids):
        left_out.append(f"{len(found):,} of {len(run.grids):,} sample grids are shown, evenly over training.")
    captions = [plain(caption) for caption in run.captions[:MOST_CAPTIONS]]
    if len(run.captions) > MOST_CAPTIONS:
        left_out.append(f"{MOST_CAPTIONS} of {len(run.captions):,} captions are shown.")
    width, height = sizes[max(sizes)]
    return Samples(list(found.values()), captions, width, height, left_out)


def _film_beside(path: Path) -> str | None:
    """Return the address of a grid's moving picture, or None where there is none."""
    film = path.with_suffix(".gif")
    try:
        content = grid_bytes(film) if film.is_file() else b""
    except OSError:
        return None
    is_gif = content.startswith((b"GIF87a", b"GIF89a"))
    return f"data:image/gif;base64,{base64.b64encode(content).decode()}" if is_gif else None


def _size_of_film(path: Path) -> tuple[int, int]:
    """Return width and height, px, as a GIF's header has them."""
    header = grid_bytes(path.with_suffix(".gif"))[6:10]
    return int.from_bytes(header[:2], "little"), int.from_bytes(header[2:], "little")


def _bytes_of(grid: Grid) -> int:
    return len(grid.address) + len(grid.film or "")


def spread(num: int, most: int) -> list[int]:
    """Return `most` places among `num`, evenly, the last one always and the first one where there are two."""
    if num <= most:
        return list(range(num))
    return sorted({num - 1, *(round(part * (num - 1) / max(1, most - 1)) for part in range(most if most > 1 else 0))})


def _packed(path: Path) -> tuple[tuple[int, int], str] | None:
    """Return (width, height) and address of a picture in the smaller of PNG and WebP, or None where it is none."""
    try:
        content = grid_bytes(path)
        with Image.open(io.BytesIO(content)) as picture:
            image = picture.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((MOST_SIDE_PX, MOST_SIDE_PX), Image.Resampling.LANCZOS)
    ways: list[dict[str, object]] = [{"format": "png", "optimize": True}, {"format": "webp", "quality": WEBP_QUALITY}]
    if max(image.size) <= SMALL_SIDE_PX:
        ways[1] = {"format": "webp", "lossless": True}  # enlarged without smoothing, every fault of WebP would be seen
    packed = []
    for way in ways:
        file = io.BytesIO()
        image.save(file, **way)  # type: ignore[arg-type]
        packed.append((len(file.getvalue()), str(way["format"]), file.getvalue()))
    _, kind, smallest = min(packed)
    return image.size, f"data:image/{kind};base64,{base64.b64encode(smallest).decode()}"
