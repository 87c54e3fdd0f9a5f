"""The miniature's scenes: their captions, which describe all that an image shows, and their split into parts.

A scene has one object or two, on a background of another colour:

    a large red triangle at the top left on a white background
    a small green cross left of a large black circle on an orange background
    a large yellow square above a small blue circle on a purple background

One object: 2 sizes x 8 colours x 4 shapes x 9 places x 7 other colours of the background = 4,032 scenes. Two, of different
colours: 2 arrangements x 4 pairs of sizes x 16 of shapes x 8 x 7 x 6 colours = 43,008. Equal captions, equal scenes.

A hash of its caption assigns each scene to one part: training, prompts (never trained on) or reference (the images that FID
compares with; neither trained on nor prompted).
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from itertools import permutations, product
from typing import Literal, get_args

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
SHAPES = ("triangle", "square", "circle", "cross")
SIZES = {"small": 0.13, "large": 0.21}
"""Name -> radius of a circle of that size, as a fraction of the image's side. Other shapes have about the same area."""
PLACES = {
    "top left": (0.29, 0.29),
    "top": (0.5, 0.29),
    "top right": (0.71, 0.29),
    "left": (0.29, 0.5),
    "centre": (0.5, 0.5),
    "right": (0.71, 0.5),
    "bottom left": (0.29, 0.71),
    "bottom": (0.5, 0.71),
    "bottom right": (0.71, 0.71),
}
"""Of one object: name -> centre (x, y) as fractions of the image's side."""
ARRANGEMENTS = {"left of": ((0.27, 0.5), (0.73, 0.5)), "above": ((0.5, 0.27), (0.5, 0.73))}
"""Of two objects: name -> the centres of both."""

Objects = Literal["one", "two", "both"]
Part = Literal["training", "prompts", "reference"]
PARTS: dict[str, range] = {"training": range(12), "prompts": range(12, 14), "reference": range(14, 16)}
"""Part -> its sixteenths of all scenes."""

ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "size": tuple(SIZES),
    "colour": tuple(COLOURS),
    "shape": SHAPES,
    "place": (*PLACES, *ARRANGEMENTS),
    "size_2": tuple(SIZES),
    "colour_2": tuple(COLOURS),
    "shape_2": SHAPES,
    "background": tuple(COLOURS),
}
"""Attribute -> its possible values; names with _2 belong to the second object."""


@dataclass(frozen=True)
class Scene:
    """What an image shows. `place` is one object's place, or the arrangement of two (first relative to second)."""

    size: str
    colour: str
    shape: str
    place: str
    background: str
    size_2: str | None = None
    colour_2: str | None = None
    shape_2: str | None = None

    @property
    def caption(self) -> str:
        first = f"{self.size} {self.colour} {self.shape}"
        if self.shape_2 is None:
            objects = f"a {first} at the {self.place}"
        else:
            objects = f"a {first} {self.place} a {self.size_2} {self.colour_2} {self.shape_2}"
        return f"{objects} on {'an' if self.background == 'orange' else 'a'} {self.background} background"

    @property
    def part(self) -> str:
        """The part that the scene belongs to."""
        return assign_part(self.caption)

    @property
    def answers(self) -> dict[str, int]:
        """Attribute -> index of the scene's value; -100 (torch's ignore_index) where there is no second object."""
        return {
            name: -100 if (value := getattr(self, name)) is None else values.index(value)
            for name, values in ATTRIBUTES.items()
        }


def assign_part(caption: str) -> str:
    """Return the part of the scene that has this caption."""
    digest = hashlib.blake2b(caption.encode(), digest_size=8).digest()
    sixteenth = int.from_bytes(digest, "big") % 16
    return next(part for part, sixteenths in PARTS.items() if sixteenth in sixteenths)


def draw_scene(number: int, seed: int, part: Part = "training", objects: Objects = "both") -> Scene:
    """Draw a part's scene with this number; the seed and the number decide it. `both`: every other scene has two objects."""
    assert part in PARTS and objects in get_args(Objects), (part, objects)
    choose = random.Random(f"{seed} {number}")  # a text seed: the same on every version and machine
    while True:
        scene = draw_any_scene(choose, num_objects={"one": 1, "two": 2, "both": 1 + number % 2}[objects])
        if scene.part == part:
            return scene


def draw_any_scene(choose: random.Random, num_objects: int) -> Scene:
    """Draw a scene of any part, all values of an attribute equally likely."""
    colour, background, colour_2 = choose.sample(sorted(COLOURS), 3)
    size, size_2 = choose.choices(sorted(SIZES), k=2)
    shape, shape_2 = choose.choices(sorted(SHAPES), k=2)
    if num_objects == 1:
        return Scene(size, colour, shape, choose.choice(sorted(PLACES)), background)
    return Scene(size, colour, shape, choose.choice(sorted(ARRANGEMENTS)), background, size_2, colour_2, shape_2)


def list_scenes(objects: Objects = "both") -> list[Scene]:
    """Return every scene once."""
    scenes = []
    if objects != "two":
        for (colour, background), size, shape, place in product(permutations(COLOURS, 2), SIZES, SHAPES, PLACES):
            scenes.append(Scene(size, colour, shape, place, background))
    if objects != "one":
        for (colour, background, colour_2), size, size_2, shape, shape_2, place in product(
            permutations(COLOURS, 3), SIZES, SIZES, SHAPES, SHAPES, ARRANGEMENTS
        ):
            scenes.append(Scene(size, colour, shape, place, background, size_2, colour_2, shape_2))
    return scenes


WORDS = (
    *("a", "an", "the", "at", "of", "above", "on", "background"),
    *SIZES,
    *COLOURS,
    *SHAPES,
    *dict.fromkeys(word for place in PLACES for word in place.split()),
)
"""Every word of every caption, once."""


# --- the moving miniature's scenes ---
#
#     a large red triangle at the top moving to the left on white
#     a small green cross at the centre moving to the bottom on orange
#
# An object that moves to a side crosses the top, the centre or the bottom at half time, one that moves up or down the
# left, the centre or the right. So no frame alone tells the direction: only their order does. 2 sizes x 8 colours x 4
# shapes x 7 other colours of the background x 4 directions x 3 places = 5,376 scenes. Equal captions, equal scenes.
#
# Parts are as above, and so are all words but two: the text encoder has no token for "moving" and "to", which are in
# every caption.

NUM_FRAMES = 9  # the autoencoder takes 1 + 4 n
FRAMES_PER_SEC = 8.0
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
"""Name -> step (x, y); y grows downwards."""
CROSSED_PLACES = {
    direction: ("top", "centre", "bottom") if x else ("left", "centre", "right")
    for direction, (x, _) in DIRECTIONS.items()
}
"""Direction -> the places that an object moving there may cross."""
PATH_FRAC = 0.32
"""From the first frame's place to the last's, as a fraction of the image's side: 1.3 px a frame at 32 px."""


@dataclass(frozen=True)
class MovingScene:
    """What a video shows. `place` is crossed at half time."""

    size: str
    colour: str
    shape: str
    place: str
    direction: str
    background: str

    @property
    def caption(self) -> str:
        thing = f"a {self.size} {self.colour} {self.shape} at the {self.place}"
        return f"{thing} moving to the {self.direction} on {self.background}"

    @property
    def part(self) -> str:
        """The part that the scene belongs to."""
        return assign_part(self.caption)

    def centre(self, progress: float) -> tuple[float, float]:
        """Return where the object is, as fractions of the image's side; `progress`: 0 in the first frame, 1 in the last."""
        (x, y), (dx, dy) = PLACES[self.place], DIRECTIONS[self.direction]
        offset = PATH_FRAC * (progress - 0.5)
        return x + offset * dx, y + offset * dy


def draw_moving_scene(number: int, seed: int, part: Part = "training") -> MovingScene:
    """Draw a part's scene with this number; the seed and the number decide it."""
    choose = random.Random(f"moving {seed} {number}")  # a text seed: the same on every version and machine
    while True:
        colour, background = choose.sample(sorted(COLOURS), 2)
        direction = choose.choice(sorted(DIRECTIONS))
        object_values = choose.choice(sorted(SIZES)), colour, choose.choice(sorted(SHAPES))
        scene = MovingScene(*object_values, choose.choice(CROSSED_PLACES[direction]), direction, background)
        if scene.part == part:
            return scene


def list_moving_scenes() -> list[MovingScene]:
    """Return every scene once."""
    pairs, kinds = permutations(COLOURS, 2), list(product(SIZES, SHAPES, DIRECTIONS))
    return [
        MovingScene(size, colour, shape, place, direction, background)
        for (colour, background), (size, shape, direction) in product(pairs, kinds)
        for place in CROSSED_PLACES[direction]
    ]
