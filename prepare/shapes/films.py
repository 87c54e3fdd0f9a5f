"""Draw the moving miniature's films from (seed, number)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from prepare.shapes.pictures import Jitter, Pictures, Thing, draw_jitter, render_things
from record.films import mp4_of
from zoo.shapes.motion import FRAMES_PER_SEC, NUM_FRAMES, MovingScene, all_moving_scenes, draw_moving_scene


def render_moving(scene: MovingScene, side_px: int, jitter: Jitter) -> Tensor:  # -> uint8 (3, F, H, W)
    """Draw every frame of a scene; `jitter` is the object's deviation, the same in each."""
    thing = Thing(scene.size, scene.colour, scene.shape)
    frames = [
        render_things(scene.background, [(thing, scene.centre(number / (NUM_FRAMES - 1)), jitter)], side_px)
        for number in range(NUM_FRAMES)
    ]
    return torch.from_numpy(np.stack([np.asarray(frame) for frame in frames])).permute(3, 0, 1, 2)


@dataclass(frozen=True)
class Films(Pictures):
    """The films to render; `objects` is not read."""

    ending: ClassVar[str] = "mp4"

    def scene(self, number: int) -> MovingScene:
        return draw_moving_scene(number, self.seed, self.part)

    def file(self, number: int) -> bytes:
        video = render_moving(self.scene(number), self.image_size, draw_jitter(number, self.seed)[0])
        return mp4_of(video, FRAMES_PER_SEC)


def film_prompts(seed: int, part: str) -> Iterator[MovingScene]:
    """Yield each scene of a part once, in an order given by `seed`."""
    scenes = [scene for scene in all_moving_scenes() if scene.part == part]
    Random(f"moving prompts {seed}").shuffle(scenes)
    yield from scenes
