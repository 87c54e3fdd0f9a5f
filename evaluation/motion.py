"""Where an object moves in a film: read off by arithmetic, without a network.

The background is the film's most frequent colour. What differs from it, weighted by how much, has a centre in each frame; a
line through the centres over time has the speed. It is the moving miniature's measure (zoo/shapes/motion.py): one object, on
a background of one colour.

Shapes: B films, F frames, H W height and width in px.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from zoo.shapes.motion import CROSSED, DIRECTIONS, NUM_FRAMES, PATH
from zoo.shapes.scenes import PLACES

UNLIKE = 40.0  # levels: less than half of what the miniature's nearest colours differ by, and more than their noise
LEAST = 0.25
"""Of the path that a scene's object takes: one that moves less stands still."""


class Motion(NamedTuple):
    """What is read off a film. None: no object is seen in every frame; direction None: it stands still."""

    direction: str | None
    place: str | None
    """The place that is crossed at half time."""


def centres_of(video: Tensor) -> Tensor | None:
    """# uint8 (3, F, H, W) -> (F, 2): x and y of the object's centre in each frame, as fractions of the sides; or None."""
    height, width = video.shape[2:]
    background = video.flatten(1).mode(dim=1).values.float()
    distance = (video.float() - background[:, None, None, None]).norm(dim=0)  # (F, H, W)
    weights = torch.where(distance > UNLIKE, distance, 0.0).flatten(1)
    if not weights.any(dim=1).all():
        return None
    y, x = torch.meshgrid((torch.arange(height) + 0.5) / height, (torch.arange(width) + 0.5) / width, indexing="ij")
    places = torch.stack([x, y], dim=-1).reshape(-1, 2)
    return weights @ places / weights.sum(dim=1, keepdim=True)


def motion_in(video: Tensor) -> Motion:
    """Read off where an object moves; `video`: uint8 (3, F, H, W), F as in a scene."""
    assert video.shape[1] == NUM_FRAMES, video.shape
    centres = centres_of(video)
    if centres is None:
        return Motion(None, None)
    times = torch.linspace(-0.5, 0.5, NUM_FRAMES)
    path = times @ centres / times.square().sum()  # (2,), of the whole film: the slope of a least-squares line
    along = int(path.abs().argmax())
    towards = [name for name, step in DIRECTIONS.items() if step[along] and (step[along] > 0) == bool(path[along] > 0)]
    direction = towards[0] if path[along].abs() >= LEAST * PATH else None
    middle = centres.mean(dim=0)
    places = CROSSED[direction] if direction else tuple(PLACES)
    place = min(places, key=lambda name: float((middle - torch.tensor(PLACES[name])).square().sum()))
    return Motion(direction, place)
