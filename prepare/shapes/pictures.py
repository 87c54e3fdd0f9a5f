"""Draw the miniature's images from (seed, number), and write them as tars or as plain files."""

from __future__ import annotations

import contextlib
import io
import json
import math
import random
import tarfile
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from PIL import Image, ImageDraw
from tqdm import tqdm

from zoo.shapes.scenes import (
    ARRANGEMENTS,
    COLOURS,
    PLACES,
    SIZES,
    Objects,
    Part,
    Scene,
    all_scenes,
    draw_scene,
)

OVERSAMPLING = 4  # drawn larger and scaled down: smooth edges
IMAGES_PER_TAR = 1000
MAX_SHIFT, MAX_GROWTH = 0.03, 0.06  # a pixel of 32, and half a pixel of a large object's radius


class Thing(NamedTuple):
    """One object."""

    size: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Jitter:
    """How one object deviates from its nominal place and size: in fractions of the image's side, and of its radius."""

    x: float = 0.0
    y: float = 0.0
    growth: float = 0.0


STILL = (Jitter(), Jitter())


def draw_jitter(number: int, seed: int) -> tuple[Jitter, Jitter]:
    """Draw the deviations of an image's two objects; they depend only on seed and number."""
    choose = random.Random(f"jitter {seed} {number}")

    def one() -> Jitter:
        x, y, growth = (choose.uniform(-1, 1) for _ in range(3))
        return Jitter(MAX_SHIFT * x, MAX_SHIFT * y, MAX_GROWTH * growth)

    return one(), one()


def render(scene: Scene, side_px: int, jitter: tuple[Jitter, Jitter] = STILL) -> Image.Image:
    """Draw a scene as a square RGB image."""
    first = Thing(scene.size, scene.colour, scene.shape)
    if scene.shape_2 is None:
        return render_things(scene.background, [(first, PLACES[scene.place], jitter[0])], side_px)
    assert scene.size_2 is not None and scene.colour_2 is not None
    things = (first, Thing(scene.size_2, scene.colour_2, scene.shape_2))
    return render_things(scene.background, list(zip(things, ARRANGEMENTS[scene.place], jitter, strict=True)), side_px)


def render_things(
    background: str, things: Sequence[tuple[Thing, tuple[float, float], Jitter]], side_px: int
) -> Image.Image:
    """Draw objects, each with its centre, as fractions of the side, and its deviation: a square RGB image."""
    side = side_px * OVERSAMPLING
    image = Image.new("RGB", (side, side), COLOURS[background])
    draw = ImageDraw.Draw(image)
    for thing, (x, y), own in things:
        radius = SIZES[thing.size] * (1 + own.growth)
        points = outline(thing.shape, (x + own.x) * side, (y + own.y) * side, radius * side)
        draw.polygon(points, fill=COLOURS[thing.colour])
    return image.resize((side_px, side_px), Image.Resampling.BOX)


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Return the corners of a shape around (x, y); `radius` is a circle's of that size."""
    if shape == "cross":  # its arms have a third of its width
        a, b = 1.05 * radius, 0.35 * radius
        corners = [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b), (b, a), (-b, a), (-b, b), (-a, b), (-a, -b)]
        return [(x + dx, y + dy) for dx, dy in [*corners, (-b, -b)]]
    y += 0.25 * radius if shape == "triangle" else 0.0  # centres it vertically
    num, reach, turn = {"triangle": (3, 1.25, 0.0), "square": (4, 1.25, math.pi / 4), "circle": (64, 1.0, 0.0)}[shape]
    angles = [2 * math.pi * corner / num + turn for corner in range(num)]
    return [(x + reach * radius * math.sin(angle), y - reach * radius * math.cos(angle)) for angle in angles]


@dataclass(frozen=True)
class Pictures:
    """The images to render."""

    ending: ClassVar[str] = "png"
    num_images: int
    image_size: int
    seed: int
    part: Part
    objects: Objects
    captions: str
    """own; or shuffled: permuted, so that nothing can be learned from them."""

    def scene(self, number: int) -> Any:
        return draw_scene(number, self.seed, self.part, self.objects)

    def file(self, number: int) -> bytes:
        content = io.BytesIO()
        render(self.scene(number), self.image_size, draw_jitter(number, self.seed)).save(content, "PNG")
        return content.getvalue()

    @cached_property
    def captioned_by(self) -> Sequence[int]:
        """Number of an image -> number of the image whose caption it has."""
        numbers = list(range(self.num_images))
        if self.captions == "shuffled":
            random.Random(f"captions {self.seed}").shuffle(numbers)
        return numbers


def write_tars(out: Path, pictures: Pictures, numbers: Iterable[int]) -> None:
    """Write images, captions and scenes as tars."""
    for tar_number, of_tar in groupby(numbers, lambda number: number // IMAGES_PER_TAR):
        with tarfile.open(out / f"{tar_number:05d}.tar", "w") as tar:
            for number in of_tar:
                name, caption = f"{number:09d}", pictures.scene(pictures.captioned_by[number]).caption
                facts = {key: value for key, value in asdict(pictures.scene(number)).items() if value is not None}
                _add(tar, f"{name}.{pictures.ending}", pictures.file(number))
                _add(tar, f"{name}.txt", caption.encode())
                _add(tar, f"{name}.json", json.dumps(facts).encode())


def write_files(out: Path, pictures: Pictures, numbers: Iterable[int]) -> None:
    """Write only the images, one file each."""
    for number in numbers:
        (out / f"{number:09d}.{pictures.ending}").write_bytes(pictures.file(number))


LAYOUTS = {"tars": write_tars, "files": write_files}


def write(out: Path, pictures: Pictures, layout: Callable[[Path, Pictures, Iterable[int]], None]) -> None:
    """Write images to `out`; the folder appears when it is complete. Raises OSError."""
    with unfinished(out) as partial, tqdm(range(pictures.num_images), unit=" images", desc="shapes") as numbers:
        partial.mkdir()
        layout(partial, pictures, numbers)


@contextlib.contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Yield a temporary name for `out`; it is renamed at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        partial = Path(folder, out.name)
        yield partial
        partial.rename(out)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its modification time is 0, so the bytes are always the same
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def prompt_scenes(seed: int, part: str, objects: str) -> Iterator[Scene]:
    """Yield each scene of a part once, in an order given by `seed`; `both`: alternately with one object and two."""
    kinds = ["one", "two"] if objects == "both" else [objects]
    lists = []
    for kind in kinds:
        scenes = [scene for scene in all_scenes(kind) if scene.part == part]
        random.Random(f"prompts {seed} {kind}").shuffle(scenes)
        lists.append(scenes)
    for row in zip(*lists, strict=False):
        yield from row
    shortest = min(map(len, lists))
    for scenes in lists:
        yield from scenes[shortest:]


def write_prompts(out: Path, num: int, scenes: Iterable[Any]) -> int:
    """Write a file of the prompts of up to `num` scenes, as many as there are; return their number."""
    lines = ["image_id\tid\tcaption"]
    lines += [f"{number}\t{number}\t{scene.caption}" for number, scene in enumerate(islice(scenes, num))]
    with unfinished(out) as partial:
        partial.write_text("\n".join(lines) + "\n")
    return len(lines) - 1
