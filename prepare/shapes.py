"""Render the miniature's images or videos, whose captions describe all that they show.

    python -m prepare.shapes OUT
    python -m prepare.shapes OUT num_images=2048 image_size=64 seed=1 objects=one part=reference
    python -m prepare.shapes reference part=reference layout=files    # images without captions, for prepare.fid_statistics
    python -m prepare.shapes prompts.tsv part=prompts num_images=1000
    python -m prepare.shapes OUT world=moving num_images=4096         # videos; prompts of them too: prompts.tsv world=moving

families/shapes/scenes.py defines the scenes: one object or two (objects=one|two|both), of two sizes, eight colours and four
shapes. An image depends only on the seed and its number, so the same command gives the same bytes. Two images of one scene
differ by about a pixel in place and size. The three parts (training, prompts, reference) share no scene. OUT becomes a
folder of tars in img2dataset's layout (KEY.png, KEY.txt, KEY.json), which `python -m prepare.shards` reads like any other.
If OUT ends in .tsv, it becomes a file of prompts (evaluation/prompts.py), each caption once (use part=prompts).
For a control, captions=shuffled permutes the captions. world=moving renders videos (KEY.mp4) of one object that moves.
Exit code: 0 if OUT was written, 1 if it could not be written, 2 if the command could not start.
"""

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
from random import Random
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor
from tqdm import tqdm

from common.command import command, start
from common.command_line import Problem
from common.errors import ConfigError, Failed
from common.files import write_problem
from common.value_types import limited
from families.shapes.scenes import (
    ARRANGEMENTS,
    COLOURS,
    FRAMES_PER_SEC,
    NUM_FRAMES,
    PLACES,
    SIZES,
    MovingScene,
    Objects,
    Part,
    Scene,
    draw_moving_scene,
    draw_scene,
    list_moving_scenes,
    list_scenes,
)
from prepare.arguments import parse_arguments
from run_folder.sample_videos import mp4_of

OVERSAMPLING = 4  # drawn larger and scaled down: smooth edges
IMAGES_PER_TAR = 1000
MAX_SHIFT, MAX_GROWTH = 0.03, 0.06  # a pixel of 32, and half a pixel of a large object's radius


class DrawnObject(NamedTuple):
    """One object."""

    size: str
    colour: str
    shape: str


@dataclass(frozen=True)
class Jitter:
    """How one object deviates from its nominal position and size: in fractions of the image's side, and of its radius."""

    x: float = 0.0
    y: float = 0.0
    growth: float = 0.0


STILL = (Jitter(), Jitter())


def draw_jitter(number: int, seed: int) -> tuple[Jitter, Jitter]:
    """Draw the deviations of an image's two objects; they depend only on seed and number."""
    choose = random.Random(f"jitter {seed} {number}")

    def draw_one() -> Jitter:
        x, y, growth = (choose.uniform(-1, 1) for _ in range(3))
        return Jitter(MAX_SHIFT * x, MAX_SHIFT * y, MAX_GROWTH * growth)

    return draw_one(), draw_one()


def render(scene: Scene, side_px: int, jitter: tuple[Jitter, Jitter] = STILL) -> Image.Image:
    """Draw a scene as a square RGB image."""
    first = DrawnObject(scene.size, scene.colour, scene.shape)
    if scene.shape_2 is None:
        return render_objects(scene.background, [(first, PLACES[scene.place], jitter[0])], side_px)
    assert scene.size_2 is not None and scene.colour_2 is not None
    objects = (first, DrawnObject(scene.size_2, scene.colour_2, scene.shape_2))
    return render_objects(scene.background, list(zip(objects, ARRANGEMENTS[scene.place], jitter, strict=True)), side_px)


def render_objects(
    background: str, objects: Sequence[tuple[DrawnObject, tuple[float, float], Jitter]], side_px: int
) -> Image.Image:
    """Draw objects, each with its centre, as fractions of the side, and its deviation: a square RGB image."""
    side = side_px * OVERSAMPLING
    image = Image.new("RGB", (side, side), COLOURS[background])
    draw = ImageDraw.Draw(image)
    for drawn_object, (x, y), jitter in objects:
        radius = SIZES[drawn_object.size] * (1 + jitter.growth)
        points = outline(drawn_object.shape, (x + jitter.x) * side, (y + jitter.y) * side, radius * side)
        draw.polygon(points, fill=COLOURS[drawn_object.colour])
    return image.resize((side_px, side_px), Image.Resampling.BOX)


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Return the corners of a shape around (x, y); `radius` is a circle's of that size."""
    if shape == "cross":  # its arms have a third of its width
        a, b = 1.05 * radius, 0.35 * radius
        corners = [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b), (b, a), (-b, a), (-b, b), (-a, b), (-a, -b)]
        return [(x + dx, y + dy) for dx, dy in [*corners, (-b, -b)]]
    y += 0.25 * radius if shape == "triangle" else 0.0  # centres it vertically
    num, radius_factor, turn = {"triangle": (3, 1.25, 0.0), "square": (4, 1.25, math.pi / 4), "circle": (64, 1.0, 0.0)}[
        shape
    ]
    angles = [2 * math.pi * corner / num + turn for corner in range(num)]
    return [
        (x + radius_factor * radius * math.sin(angle), y - radius_factor * radius * math.cos(angle)) for angle in angles
    ]


@dataclass(frozen=True)
class ImageSet:
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


def write_tars(out: Path, images: ImageSet, numbers: Iterable[int]) -> None:
    """Write images, captions and scenes as tars."""
    for tar_number, of_tar in groupby(numbers, lambda number: number // IMAGES_PER_TAR):
        with tarfile.open(out / f"{tar_number:05d}.tar", "w") as tar:
            for number in of_tar:
                name, caption = f"{number:09d}", images.scene(images.captioned_by[number]).caption
                facts = {key: value for key, value in asdict(images.scene(number)).items() if value is not None}
                _add_member(tar, f"{name}.{images.ending}", images.file(number))
                _add_member(tar, f"{name}.txt", caption.encode())
                _add_member(tar, f"{name}.json", json.dumps(facts).encode())


def write_files(out: Path, images: ImageSet, numbers: Iterable[int]) -> None:
    """Write only the images, one file each."""
    for number in numbers:
        (out / f"{number:09d}.{images.ending}").write_bytes(images.file(number))


LAYOUTS = {"tars": write_tars, "files": write_files}


def write_layout(out: Path, images: ImageSet, layout: Callable[[Path, ImageSet, Iterable[int]], None]) -> None:
    """Write images to `out`; the folder appears when it is complete. Raises OSError."""
    with write_then_rename(out) as partial, tqdm(range(images.num_images), unit=" images", desc="shapes") as numbers:
        partial.mkdir()
        layout(partial, images, numbers)


@contextlib.contextmanager
def write_then_rename(out: Path) -> Iterator[Path]:
    """Yield a temporary name for `out`; it is renamed at the end."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as folder:
        partial = Path(folder, out.name)
        yield partial
        partial.rename(out)


def _add_member(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # its modification time is 0, so the bytes are always the same
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def prompt_scenes(seed: int, part: str, objects: str) -> Iterator[Scene]:
    """Yield each scene of a part once, in an order given by `seed`; `both`: alternately with one object and two."""
    kinds = ["one", "two"] if objects == "both" else [objects]
    lists = []
    for kind in kinds:
        scenes = [scene for scene in list_scenes(kind) if scene.part == part]
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
    with write_then_rename(out) as partial:
        partial.write_text("\n".join(lines) + "\n")
    return len(lines) - 1


# --- the moving miniature's videos ---


def render_moving(scene: MovingScene, side_px: int, jitter: Jitter) -> Tensor:  # -> uint8 (3, F, H, W)
    """Draw every frame of a scene; `jitter` is the object's deviation, the same in each."""
    drawn_object = DrawnObject(scene.size, scene.colour, scene.shape)
    frames = [
        render_objects(scene.background, [(drawn_object, scene.centre(number / (NUM_FRAMES - 1)), jitter)], side_px)
        for number in range(NUM_FRAMES)
    ]
    return torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(3, 0, 1, 2)


@dataclass(frozen=True)
class VideoSet(ImageSet):
    """The videos to render; `objects` is not read."""

    ending: ClassVar[str] = "mp4"

    def scene(self, number: int) -> MovingScene:
        return draw_moving_scene(number, self.seed, self.part)

    def file(self, number: int) -> bytes:
        video = render_moving(self.scene(number), self.image_size, draw_jitter(number, self.seed)[0])
        return mp4_of(video, FRAMES_PER_SEC)


def moving_prompt_scenes(seed: int, part: str) -> Iterator[MovingScene]:
    """Yield each scene of a part once, in an order given by `seed`."""
    scenes = [scene for scene in list_moving_scenes() if scene.part == part]
    Random(f"moving prompts {seed}").shuffle(scenes)
    yield from scenes


# --- render the miniature's images ---


@dataclass(frozen=True)
class ShapesConfig:
    """The keys of this command."""

    num_images: int = limited(2048, 1, 10**9)
    """Images, videos or prompts."""
    image_size: int = limited(32, 8, 4096)
    """Their side in pixels."""
    seed: int = limited(17, 0, 2**32 - 1)
    """Seed of the scenes."""
    world: Literal["still", "moving"] = "still"
    """Images, or videos of one object that moves."""
    part: Part = "training"
    """Which scenes; no two parts share one."""
    objects: Objects = "both"
    """Scenes of one object, of two, or both; of images alone."""
    captions: Literal["own", "shuffled"] = "own"
    """Each image's caption, or those of other images."""
    layout: Literal["tars", "files"] = "tars"
    """Tars with captions and scenes, or a folder of images alone."""


def check(config: ShapesConfig) -> list[Problem]:
    """Return every problem that can be found before anything is written."""
    if config.world == "moving" and config.image_size % 2:
        return [Problem(f"image_size: {config.image_size}. A video's sides are even numbers.", ("image_size",))]
    return []


@command(keys=ShapesConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = parse_arguments(argv, ShapesConfig, check)
    if config is None:
        return 0
    if len(paths) != 1:
        problems.append("command line: exactly one OUT has to be given. python -m prepare.shapes --help says more.")
    elif Path(paths[0]).exists():
        problems.append(f"OUT: {paths[0]} exists. Give a new name, or remove it.")
    elif text := write_problem(paths[0]):
        problems.append(f"OUT: {text}")
    if problems:
        raise ConfigError(problems)
    try:
        print(_write_out(Path(paths[0]), config))
    except OSError as error:
        todo = "Make room or give another folder, then start it again"
        raise Failed(f"OUT: {paths[0]} cannot be written: {error}. {todo}.") from error
    return 0


def _write_out(out: Path, config: ShapesConfig) -> str:
    """Write OUT and return the message about it."""
    seed, part, moves = config.seed, config.part, config.world == "moving"
    if out.suffix == ".tsv":
        scenes = moving_prompt_scenes(seed, part) if moves else prompt_scenes(seed, part, config.objects)
        return f"wrote {write_prompts(out, config.num_images, scenes):,} prompts to {out}"
    kind = VideoSet if moves else ImageSet
    image_set = kind(config.num_images, config.image_size, seed, part, config.objects, config.captions)
    write_layout(out, image_set, LAYOUTS[config.layout])
    return f"rendered {config.num_images:,} {'videos' if moves else 'images'} of {config.image_size} px in {out}"


# --- run `python -m prepare.shapes` ---

if __name__ == "__main__":
    start(main)
