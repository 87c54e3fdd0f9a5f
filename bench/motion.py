"""Say how many videos of the moving miniature move as their captions say. No network is asked, see evaluation/motion.py.

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
from typing import Any

from bench.command import keep, read_keys
from cli.command import command
from cli.command_line import Problem
from cli.errors import ConfigError
from evaluation.motion import Motion, motion_in
from record import films
from stages.images import SampleError
from zoo.shapes.motion import NUM_FRAMES, MovingScene, all_moving_scenes


@dataclass(frozen=True)
class MotionBenchConfig:
    """The keys of this command."""

    videos: str = ""
    """Folders of videos that eval.py drew, with commas between."""
    results: str = "reports/results/shapes_moving/motion.json"
    """File of the record; an earlier one is replaced."""


def folders_of(config: MotionBenchConfig) -> list[Path]:
    """Return the folders that are given."""
    return [Path(text).expanduser() for text in config.videos.split(",") if text]


def check(config: MotionBenchConfig) -> list[Problem]:
    """Return what is wrong with the folders."""
    folders = folders_of(config)
    found = [] if folders else ["not given. Give folders of videos that eval.py drew: videos=a,b."]
    found += [f"no folder {path}. Check the path." for path in folders if not path.is_dir()]
    return [Problem(f"videos: {text}", ("videos",)) for text in found]


def read_folder(folder: Path) -> list[tuple[dict[str, Any], MovingScene, Motion]]:
    """Return what made each video, what its caption says, and what is seen. Raises ConfigError: one is no such video."""
    scenes, found = {scene.caption: scene for scene in all_moving_scenes()}, []
    for path in sorted(folder.glob("*.mp4")):
        try:
            made, video = json.loads(films.comment_in(path) or "{}"), films.read_mp4(path)
        except (OSError, ValueError, SampleError) as error:
            raise ConfigError([f"videos: {path} cannot be read: {error}. Draw it again."]) from error
        if made.get("prompt") not in scenes or video.shape[1] != NUM_FRAMES:
            text = f"has no caption of the moving miniature, or not {NUM_FRAMES} frames"
            raise ConfigError([f"videos: {path} {text}. Give a folder that eval.py drew of its prompts."])
        found.append((made, scenes[made["prompt"]], motion_in(video)))
    if not found:
        raise ConfigError([f"videos: {folder} has no MP4 file. Give a folder that eval.py drew."])
    return found


def figures_of(folder: Path) -> dict[str, Any]:
    """Return the figures of a folder: how many videos, and the fractions of them that are right."""
    rows = read_folder(folder)
    made = [one for one, _, _ in rows]
    told = {key: sorted({json.dumps(one.get(key)) for one in made}) for key in ("model", "images_seen", "weights")}
    seen = Counter((scene.direction, motion.direction or "none") for _, scene, motion in rows)
    return {
        "folder": folder.name,
        **{key: json.loads(values[0]) if len(values) == 1 else "several" for key, values in told.items()},
        "num_videos": len(rows),
        "num_captions": len({scene.caption for _, scene, _ in rows}),
        "direction": sum(scene.direction == motion.direction for _, scene, motion in rows) / len(rows),
        "place": sum(scene.place == motion.place for _, scene, motion in rows) / len(rows),
        "seen": {f"{said} as {read}": num for (said, read), num in sorted(seen.items())},
    }


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    config = read_keys(MotionBenchConfig, argv, check)
    if config is not None:
        keep("motion", config, lambda: {"cases": [figures_of(folder) for folder in folders_of(config)]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
