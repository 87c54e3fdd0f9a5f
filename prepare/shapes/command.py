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

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import Timeout

from cli.command import command
from cli.errors import ConfigError, Failed, Refused
from cli.limits import shown, text_possible
from preflight.limits import unwritable
from prepare.shapes.films import Films, film_prompts
from prepare.shapes.pictures import LAYOUTS, Pictures, prompt_scenes, write, write_prompts
from zoo.shapes.scenes import PARTS

# --- the command ---

NUMBERS = {"num_images": (2048, 1, 10**9), "image_size": (32, 8, 4096), "seed": (17, 0, 2**32 - 1)}
"""Key -> default, minimum, maximum."""
CHOICES = {
    "world": ("still", "moving"),
    "part": tuple(PARTS),
    "objects": ("both", "one", "two"),
    "captions": ("own", "shuffled"),
    "layout": tuple(LAYOUTS),
}
"""Key -> possible values, the default first."""


def parse(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Read key=value words; return the values and the problems."""
    values: dict[str, Any] = {key: default for key, (default, _, _) in NUMBERS.items()}
    values |= {key: possible[0] for key, possible in CHOICES.items()}
    problems = []
    for word in words:
        key, _, value = word.partition("=")
        if key in NUMBERS:
            _, low, high = NUMBERS[key]
            values[key] = int(value) if re.fullmatch("[0-9]{1,10}", value) else -1
            if not low <= values[key] <= high:
                possible = f"a whole number from {low} to {high}"
                problems.append(f"command line: {key} is '{value[:40]}'. Possible: {possible}.")
        elif key in CHOICES:
            values[key] = value
            if value not in CHOICES[key]:
                problems.append(f"command line: {key} is '{value[:40]}'. Possible: {', '.join(CHOICES[key])}.")
        else:
            problems.append(f"command line: unknown key '{key}'. Known: {', '.join(values)}.")
    return values, problems


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    paths = [word for word in argv if "=" not in word]
    given = [word.partition("=")[0] for word in argv if "=" in word]
    values, problems = parse([word for word in argv if "=" in word])
    if odd := next(
        (f"'{shown(path)}' is not a path. Possible: {text}" for path in paths if (text := text_possible(path))), None
    ):
        problems.append(f"OUT: {odd}.")
    elif len(paths) == 1 and Path(paths[0]).exists():
        kind = "file" if _is_prompts(paths[0]) else "folder"
        problems.append(f"OUT: {paths[0]} exists. Give a new {kind}, or remove it.")
    else:
        problems += _path_problems(paths)
    problems += _vain_keys(given, paths, values)
    if values["world"] == "moving" and values["image_size"] % 2:
        problems.append(f"command line: image_size is {values['image_size']}. A film's sides are even numbers.")
    if problems:
        raise ConfigError(problems)
    try:
        print(_make(Path(paths[0]), values))
    except Timeout as error:
        text = f"OUT: {paths[0]} is being written by another process"
        raise Refused(f"{text}. Wait for it, or give another name.") from error
    except OSError as error:
        raise Failed(
            f"OUT: {paths[0]} cannot be written: {error}. Make room or give another place, then again."
        ) from error
    return 0


def _make(out: Path, values: dict[str, Any]) -> str:
    """Write OUT and return the message about it."""
    layout, moves = values.pop("layout"), values.pop("world") == "moving"
    if _is_prompts(str(out)):
        of_part = (values["seed"], values["part"])
        scenes = film_prompts(*of_part) if moves else prompt_scenes(*of_part, values["objects"])
        return f"wrote {write_prompts(out, values['num_images'], scenes):,} prompts to {out}"
    write(out, (Films if moves else Pictures)(**values), layout)
    return f"rendered {values['num_images']:,} {'films' if moves else 'pictures'} of {values['image_size']} px in {out}"


def _path_problems(paths: Sequence[str]) -> list[str]:
    if len(paths) != 1:
        return ["command line: exactly one OUT has to be given. python -m prepare.shapes --help says more."]
    return [f"OUT: {text}"] if (text := unwritable(paths[0])) else []


def _vain_keys(given: Sequence[str], paths: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return a problem for each given key that has no effect on OUT."""
    found = []
    if any(map(_is_prompts, paths)):
        found += [(key, "a file of prompts") for key in ("image_size", "captions", "layout")]
    elif values["layout"] == "files":
        found += [("captions", "pictures alone (layout=files)")]
    if values["world"] == "moving":
        found += [("objects", "films, which show one")]
    return [f"command line: {key} changes nothing of {what}. Leave it out." for key, what in found if key in given]


def _is_prompts(path: str) -> bool:
    return path.endswith(".tsv")
