"""Render small captioned pictures: a world in which a caption says everything that there is to see.

    python -m prepare.shapes OUT
    python -m prepare.shapes OUT num_images=2048 image_size=64 seed=1

A picture shows one object: a shape of one of three sizes, in one of eight colours, at one of nine places, on a background of
another colour. "a large red triangle at the top left on a white background". Every picture is drawn from (seed, its
number), so the same command gives the same bytes. OUT becomes a folder of tars in img2dataset's layout (KEY.png, KEY.txt,
KEY.json), which `python -m prepare.shards` reads like any other.
"""

from __future__ import annotations

import io
import json
import math
import random
import re
import shutil
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from PIL import Image, ImageDraw
from tqdm import tqdm

from preflight import unwritable

COLOURS = {
    "red": (214, 39, 40),
    "green": (44, 160, 44),
    "blue": (31, 90, 200),
    "yellow": (240, 200, 30),
    "purple": (140, 60, 180),
    "orange": (245, 130, 32),
    "black": (20, 20, 20),
    "white": (245, 245, 245),
}
SHAPES = {"triangle": 3, "square": 4, "pentagon": 5, "circle": 64}
"""Name -> corners of a regular polygon; 64 of them look round at these sizes."""
SIZES = {"small": 0.13, "medium": 0.19, "large": 0.26}
"""Name -> radius as a fraction of the picture's side."""
PLACES = {
    "top left": (0.3, 0.3),
    "top": (0.5, 0.3),
    "top right": (0.7, 0.3),
    "left": (0.3, 0.5),
    "centre": (0.5, 0.5),
    "right": (0.7, 0.5),
    "bottom left": (0.3, 0.7),
    "bottom": (0.5, 0.7),
    "bottom right": (0.7, 0.7),
}
"""Name -> centre (x, y) as fractions of the picture's side."""
OVERSAMPLING = 4  # drawn larger and scaled down: smooth edges
IMAGES_PER_TAR = 1000


@dataclass(frozen=True)
class Scene:
    """What a picture shows."""

    size: str
    colour: str
    shape: str
    place: str
    background: str

    @property
    def caption(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} at the {self.place} on a {self.background} background"


def draw_scene(number: int, seed: int) -> Scene:
    """Choose a scene by its number alone."""
    choose = random.Random(f"{seed} {number}")  # a text seed: the same on every version and machine
    colour, background = choose.sample(sorted(COLOURS), 2)
    return Scene(
        size=choose.choice(sorted(SIZES)),
        colour=colour,
        shape=choose.choice(sorted(SHAPES)),
        place=choose.choice(sorted(PLACES)),
        background=background,
    )


def render(scene: Scene, side_px: int) -> Image.Image:
    """Draw a scene as a square RGB picture."""
    side = side_px * OVERSAMPLING
    image = Image.new("RGB", (side, side), COLOURS[scene.background])
    corners, radius, (x, y) = SHAPES[scene.shape], SIZES[scene.size] * side, PLACES[scene.place]
    turn = math.pi / 4 if scene.shape == "square" else 0.0  # squares lie flat, the others stand on a side
    angles = [2 * math.pi * corner / corners + turn for corner in range(corners)]
    outline = [(x * side + radius * math.sin(angle), y * side - radius * math.cos(angle)) for angle in angles]
    ImageDraw.Draw(image).polygon(outline, fill=COLOURS[scene.colour])
    return image.resize((side_px, side_px), Image.Resampling.BOX)


def write_tars(out: Path, num_images: int, image_size: int, seed: int) -> None:
    """Write the tars to `out`; the folder appears when it is whole."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with tqdm(total=num_images, unit=" images", desc="shapes") as progress:
        for first in range(0, num_images, IMAGES_PER_TAR):
            with tarfile.open(partial / f"{first // IMAGES_PER_TAR:05d}.tar", "w") as tar:
                for number in range(first, min(first + IMAGES_PER_TAR, num_images)):
                    scene = draw_scene(number, seed)
                    png = io.BytesIO()
                    render(scene, image_size).save(png, "PNG")
                    _add(tar, f"{number:09d}.png", png.getvalue())
                    _add(tar, f"{number:09d}.txt", scene.caption.encode())
                    _add(tar, f"{number:09d}.json", json.dumps(asdict(scene)).encode())
                    progress.update()
    partial.rename(out)


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # with a modification time of 0: the same bytes every time
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0 if argv else 2
    values = {"num_images": 2048, "image_size": 64, "seed": 17}
    bounds = {"num_images": (1, 10**9), "image_size": (8, 4096), "seed": (0, 2**32 - 1)}
    paths = [word for word in argv if "=" not in word]
    problems = []
    for word in argv:
        key, is_pair, value = word.partition("=")
        if not is_pair:
            continue
        if key not in values:
            problems.append(f"command line: unknown key '{key}'. Known: {', '.join(values)}.")
            continue
        low, high = bounds[key]
        number = int(value) if re.fullmatch("[0-9]{1,10}", value) else -1
        if not low <= number <= high:
            problems.append(f"command line: {key} is '{value[:40]}'. Possible: a whole number from {low} to {high}.")
        else:
            values[key] = number
    if len(paths) != 1:
        problems.append("command line: exactly one OUT has to be given. python -m prepare.shapes --help says more.")
    elif Path(paths[0]).exists():
        problems.append(f"OUT: {paths[0]} exists. Give a new folder, or remove it.")
    elif text := unwritable(paths[0]):
        problems.append(f"OUT: {text}")
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    write_tars(Path(paths[0]), **values)
    print(f"rendered {values['num_images']:,} pictures of {values['image_size']} px in {paths[0]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
