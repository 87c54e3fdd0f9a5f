"""Sample grids for the page: as small as they can be, thinned where there are very many."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

from record.history import History, grid_bytes
from reports.page_text import plain

MOST_SIDE_PX, SMALL_SIDE_PX = 1100, 420
MOST_GRIDS, MOST_CAPTIONS = 60, 64
WEBP_QUALITY = 85


class Grid(NamedTuple):
    """One picture: images seen, and its bytes as an address that an <img> takes; of videos also those of the moving one."""

    images: int
    address: str
    film: str | None = None


class Samples(NamedTuple):
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
    found: list[Grid] = []
    left_out: list[str] = []
    size, room, last = (0, 0), most_bytes, _embedded(run.grids[-1][1])
    each = len(last[0]) + len(last[1] or "") if last else most_bytes
    for place in spread(len(run.grids), max(1, min(MOST_GRIDS, most_bytes // each))):
        images, path = run.grids[place]
        if (packed := _embedded(path)) is None:
            left_out.append(f"{path.name} cannot be read.")
            continue
        address, film, size = packed
        if film and len(film) > room - len(address) >= 0:
            left_out.append(f"{path.with_suffix('.gif').name} is too large for this page.")
            film = None
        if (left := room - len(address) - len(film or "")) >= 0:
            found.append(Grid(images, address, film))
            room = left
    if len(found) + len(left_out) < len(run.grids):
        left_out.append(f"{len(found):,} of {len(run.grids):,} sample grids are shown, evenly over training.")
    return Samples(found, [plain(caption) for caption in run.captions[:MOST_CAPTIONS]], *size, left_out)


def spread(num: int, most: int) -> list[int]:
    """Return `most` places among `num`, evenly, the last one always and the first one where there are two."""
    if num <= most:
        return list(range(num))
    return sorted({num - 1, *(round(part * (num - 1) / max(1, most - 1)) for part in range(most if most > 1 else 0))})


def _embedded(path: Path) -> tuple[str, str | None, tuple[int, int]] | None:
    """Return the addresses of a grid and of its moving picture, if any, and (width, height); None: it is no picture."""
    try:
        with Image.open(io.BytesIO(grid_bytes(path))) as picture:
            image = picture.convert("RGB")
        film = grid_bytes(path.with_suffix(".gif")) if path.with_suffix(".gif").is_file() else b""
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError):
        return None
    image.thumbnail((MOST_SIDE_PX, MOST_SIDE_PX), Image.Resampling.LANCZOS)
    file, size = io.BytesIO(), image.size
    # Small ones are enlarged without smoothing, where every fault of WebP would be seen.
    image.save(file, format="webp", quality=WEBP_QUALITY, lossless=max(size) <= SMALL_SIDE_PX)
    address = f"data:image/webp;base64,{base64.b64encode(file.getvalue()).decode()}"
    if not film.startswith((b"GIF87a", b"GIF89a")):
        return address, None, size
    size = int.from_bytes(film[6:8], "little"), int.from_bytes(film[8:10], "little")
    return address, f"data:image/gif;base64,{base64.b64encode(film).decode()}", size
