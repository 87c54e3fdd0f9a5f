"""Say how many videos of the moving miniature move as their captions say. No network is asked.

    composer eval.py runs/NAME images=drawn prompts=cache/miniature/moving/prompts.tsv      # draws them
    python -m bench.motion videos=drawn                      # a table, and reports/results/shapes_moving/motion.json
    python -m bench.motion videos=seed17,shuffled results=two.json

A folder is one of `eval.py`. One of four directions is right in a quarter of all videos by chance, one of three places in a
third. A video that shows no object in some frame, or one that stands still, is wrong.
Exit code: 0 when the record was written, 2 when the command cannot be read, or a folder has no such video.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.command import measure_and_record
from common.command import command
from common.command_line import Problem
from common.errors import ConfigError
from families.shapes.scenes import (
    CROSSED_PLACES,
    DIRECTIONS,
    NUM_FRAMES,
    PATH_FRAC,
    PLACES,
    MovingScene,
    list_moving_scenes,
)
from mds.images import SampleError
from run_folder import sample_videos


@dataclass(frozen=True)
class MotionBenchConfig:
    """The keys of this command."""

    videos: str = ""
    """Folders of videos that eval.py drew, with commas between."""
    results: str = "reports/results/shapes_moving/motion.json"
    """File of the record; an earlier one is replaced."""


# --- where an object moves in a video ---
#
# The background is the video's most frequent color. What differs from it, weighted by how much, has a centre in each
# frame; a line through the centres over time has the speed. It is the moving miniature's measure
# (families/shapes/scenes.py): one object, on a background of one color.
#
# Shapes: B videos, F frames, H W height and width in px.

# Levels: less than half of what the miniature's nearest colors differ by, and more than their noise.
MIN_COLOR_DISTANCE = 40.0
MIN_PATH = 0.25
"""Of the path that a scene's object takes: one that moves less stands still."""


class Motion(NamedTuple):
    """What is read off a video. None: no object is seen in every frame; direction None: it stands still."""

    direction: str | None
    place: str | None
    """The place that is crossed at half time."""


def centres_of(video: Tensor) -> Tensor | None:
    """# uint8 (3, F, H, W) -> (F, 2): x and y of the object's centre in each frame, as fractions of the sides; or None."""
    height, width = video.shape[2:]
    background = video.flatten(1).mode(dim=1).values.float()
    distance = (video.float() - background[:, None, None, None]).norm(dim=0)  # (F, H, W)
    weights = torch.where(distance > MIN_COLOR_DISTANCE, distance, 0.0).flatten(1)
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
    path = times @ centres / times.square().sum()  # (2,), of the whole video: the slope of a least-squares line
    along = int(path.abs().argmax())
    towards = [name for name, step in DIRECTIONS.items() if step[along] and (step[along] > 0) == bool(path[along] > 0)]
    direction = towards[0] if path[along].abs() >= MIN_PATH * PATH_FRAC else None
    middle = centres.mean(dim=0)
    places = CROSSED_PLACES[direction] if direction else tuple(PLACES)
    place = min(places, key=lambda name: float((middle - torch.tensor(PLACES[name])).square().sum()))
    return Motion(direction, place)


# --- the command ---


def folders_of(config: MotionBenchConfig) -> list[Path]:
    """Return the folders that are given."""
    return [Path(text).expanduser() for text in config.videos.split(",") if text]


def check(config: MotionBenchConfig) -> list[Problem]:
    """Return what is wrong with the folders."""
    folders = folders_of(config)
    texts = [] if folders else ["not given. Give folders of videos that eval.py drew: videos=a,b."]
    texts += [f"no folder {path}. Check the path." for path in folders if not path.is_dir()]
    return [Problem(f"videos: {text}", ("videos",)) for text in texts]


def read_folder(folder: Path) -> list[tuple[dict[str, Any], MovingScene, Motion]]:
    """Return each video's metadata, what its caption says, and what is seen. Raises ConfigError: one is no such video."""
    scenes, rows = {scene.caption: scene for scene in list_moving_scenes()}, []
    for path in sorted(folder.glob("*.mp4")):
        try:
            metadata, video = json.loads(sample_videos.comment_in(path) or "{}"), sample_videos.read_mp4(path)
        except (OSError, ValueError, SampleError) as error:
            raise ConfigError([f"videos: {path} cannot be read: {error}. Draw it again."]) from error
        if metadata.get("prompt") not in scenes or video.shape[1] != NUM_FRAMES:
            text = f"has no caption of the moving miniature, or not {NUM_FRAMES} frames"
            raise ConfigError([f"videos: {path} {text}. Give a folder that eval.py drew of its prompts."])
        rows.append((metadata, scenes[metadata["prompt"]], motion_in(video)))
    if not rows:
        raise ConfigError([f"videos: {folder} has no MP4 file. Give a folder that eval.py drew."])
    return rows


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the figures of a folder: how many videos, and the fractions of them that are right."""
    rows = read_folder(folder)
    described = {
        key: sorted({json.dumps(metadata.get(key)) for metadata, _, _ in rows})
        for key in ("model", "images_seen", "weights")
    }
    seen = Counter((scene.direction, motion.direction or "none") for _, scene, motion in rows)
    return {
        "folder": folder.name,
        **{key: json.loads(values[0]) if len(values) == 1 else "several" for key, values in described.items()},
        "num_videos": len(rows),
        "num_captions": len({scene.caption for _, scene, _ in rows}),
        "direction": sum(scene.direction == motion.direction for _, scene, motion in rows) / len(rows),
        "place": sum(scene.place == motion.place for _, scene, motion in rows) / len(rows),
        "seen": {f"{caption} as {video}": num for (caption, video), num in sorted(seen.items())},
    }


def measure(config: MotionBenchConfig) -> dict[str, Any]:
    """Return the figures of every folder."""
    return {"cases": [figures_of(folder) for folder in folders_of(config)]}


@command(keys=MotionBenchConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    return measure_and_record("motion", MotionBenchConfig, argv, measure, check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
