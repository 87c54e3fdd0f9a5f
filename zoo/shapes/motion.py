"""The moving miniature's scenes: one object that crosses a place, in one of four directions.

    a large red triangle at the top moving to the left on white
    a small green cross at the centre moving to the bottom on orange

An object that moves to a side crosses the top, the centre or the bottom at half time, one that moves up or down the left, the
centre or the right. So no frame alone tells the direction: only their order does. 2 sizes x 8 colours x 4 shapes x 7 other
colours of the background x 4 directions x 3 places = 5,376 scenes. Equal captions, equal scenes.

Parts are those of the still scenes (scenes.py), and so are all words but two: the text encoder has no word for "moving" and
"to", which are in every caption.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import permutations, product

from zoo.shapes.scenes import COLOURS, PLACES, SHAPES, SIZES, Part, part_of

NUM_FRAMES = 9  # the autoencoder takes 1 + 4 n
FRAMES_PER_SEC = 8.0
DIRECTIONS = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
"""Name -> step (x, y); y grows downwards."""
CROSSED = {
    direction: ("top", "centre", "bottom") if x else ("left", "centre", "right")
    for direction, (x, _) in DIRECTIONS.items()
}
"""Direction -> the places that an object moving there may cross."""
PATH = 0.32
"""From the first frame's place to the last's, as a fraction of the image's side: 1.3 px a frame at 32 px."""


@dataclass(frozen=True)
class MovingScene:
    """What a film shows. `place` is crossed at half time."""

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
        return part_of(self.caption)

    def centre(self, progress: float) -> tuple[float, float]:
        """Return where the object is, as fractions of the image's side; `progress`: 0 in the first frame, 1 in the last."""
        (x, y), (dx, dy) = PLACES[self.place], DIRECTIONS[self.direction]
        along = PATH * (progress - 0.5)
        return x + along * dx, y + along * dy


def draw_moving_scene(number: int, seed: int, part: Part = "training") -> MovingScene:
    """Draw a part's scene with this number; the seed and the number decide it."""
    choose = random.Random(f"moving {seed} {number}")  # a text seed: the same on every version and machine
    while True:
        colour, background = choose.sample(sorted(COLOURS), 2)
        direction = choose.choice(sorted(DIRECTIONS))
        thing = choose.choice(sorted(SIZES)), colour, choose.choice(sorted(SHAPES))
        scene = MovingScene(*thing, choose.choice(CROSSED[direction]), direction, background)
        if scene.part == part:
            return scene


def all_moving_scenes() -> list[MovingScene]:
    """Return every scene once."""
    pairs, kinds = permutations(COLOURS, 2), list(product(SIZES, SHAPES, DIRECTIONS))
    return [
        MovingScene(size, colour, shape, place, direction, background)
        for (colour, background), (size, shape, direction) in product(pairs, kinds)
        for place in CROSSED[direction]
    ]
