"""Render the miniature's images, or its films, whose captions describe all that they show.

    python -m prepare.shapes OUT
    python -m prepare.shapes OUT num_images=2048 image_size=64 seed=1 objects=one part=reference
    python -m prepare.shapes reference part=reference layout=files    # images without captions, for prepare.fid_statistics
    python -m prepare.shapes prompts.tsv part=prompts num_images=1000
    python -m prepare.shapes OUT world=moving num_images=4096         # films; prompts of them too: prompts.tsv world=moving

zoo/shapes/scenes.py defines the scenes: one object or two (objects=one|two|both), of two sizes, eight colours and four
shapes. An image depends only on the seed and its number, so the same command gives the same bytes. Two images of one scene
differ by about a pixel in place and size. The three parts (training, prompts, reference) share no scene. OUT becomes a
folder of tars in img2dataset's layout (KEY.png, KEY.txt, KEY.json), which `python -m prepare.shards` reads like any other.
If OUT ends in .tsv, it becomes a file of prompts (evaluation/prompts.py), each caption once (use part=prompts).
For a control, captions=shuffled permutes the captions. world=moving renders films (KEY.mp4) of one object that moves, whose
scenes zoo/shapes/motion.py defines.
Exit code: 0 if OUT was written, 1 if it could not be written, 2 if the command could not start.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cli.command import command
from cli.command_line import Problem
from cli.errors import ConfigError, Failed
from cli.limits import limited
from preflight.limits import unwritable
from prepare.shapes.films import Films, film_prompts
from prepare.shapes.pictures import LAYOUTS, Pictures, prompt_scenes, write, write_prompts
from prepare.words import read_words
from zoo.shapes.scenes import Objects, Part


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
        return [Problem(f"image_size: {config.image_size}. A film's sides are even numbers.", ("image_size",))]
    return []


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths, config, problems = read_words(argv, ShapesConfig, check)
    if config is None:
        return 0
    if len(paths) != 1:
        problems.append("command line: exactly one OUT has to be given. python -m prepare.shapes --help says more.")
    elif Path(paths[0]).exists():
        problems.append(f"OUT: {paths[0]} exists. Give a new name, or remove it.")
    elif text := unwritable(paths[0]):
        problems.append(f"OUT: {text}")
    if problems:
        raise ConfigError(problems)
    try:
        print(_make(Path(paths[0]), config))
    except OSError as error:
        todo = "Make room or give another place, then again"
        raise Failed(f"OUT: {paths[0]} cannot be written: {error}. {todo}.") from error
    return 0


def _make(out: Path, config: ShapesConfig) -> str:
    """Write OUT and return the message about it."""
    seed, part, moves = config.seed, config.part, config.world == "moving"
    if out.suffix == ".tsv":
        scenes = film_prompts(seed, part) if moves else prompt_scenes(seed, part, config.objects)
        return f"wrote {write_prompts(out, config.num_images, scenes):,} prompts to {out}"
    kind = Films if moves else Pictures
    made = kind(config.num_images, config.image_size, seed, part, config.objects, config.captions)
    write(out, made, LAYOUTS[config.layout])
    return f"rendered {config.num_images:,} {'films' if moves else 'pictures'} of {config.image_size} px in {out}"
