"""Render small captioned pictures: a world in which a caption says everything that there is to see.

    python -m prepare.shapes OUT
    python -m prepare.shapes OUT num_images=2048 image_size=64 seed=1 objects=one part=reference
    python -m prepare.shapes reference part=reference layout=files    # pictures alone, for prepare.fid_statistics
    python -m prepare.shapes prompts.tsv part=prompts num_images=1000
    python -m prepare.shapes --train_encoders OUT max_minutes=60      # see prepare/shapes_training.py

zoo/shapes_world.py says which scenes there are: one object or two (objects=one|two|both), of two sizes, eight colours and
four shapes. Every picture is drawn from (seed, its number), so the same command gives the same bytes; two pictures of one
scene differ by about a pixel in place and size. The scenes of the three parts (training, prompts, reference) are never the
same. OUT becomes a folder of tars in img2dataset's layout (KEY.png, KEY.txt, KEY.json), which `python -m prepare.shards`
reads like any other; a name that ends in .tsv becomes a file of prompts (prompts.py), each caption once (say part=prompts).
A control: captions=shuffled deals the captions out anew.
Exit code: 0 when OUT was written, 1 when it could not be written, 2 when the command could not start.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import math
import os
import random
import re
import shutil
import sys
import tarfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from PIL import Image, ImageDraw
from tqdm import tqdm

from limits import shown, text_possible
from preflight import unwritable
from zoo.shapes_world import (
    ARRANGEMENTS,
    COLOURS,
    PARTS,
    PLACES,
    SHAPES,
    SIZES,
    Objects,
    Part,
    Scene,
    all_scenes,
    draw_scene,
)

__all__ = ["COLOURS", "PLACES", "SHAPES", "SIZES", "Jitter", "Scene", "draw_scene", "render"]

OVERSAMPLING = 4  # drawn larger and scaled down: smooth edges
IMAGES_PER_TAR = 1000
MAX_SHIFT, MAX_GROWTH = 0.03, 0.06  # a pixel of 32, and half a pixel of a large object's radius


@dataclass(frozen=True)
class Jitter:
    """How one object of one picture differs from what its words mean: in fractions of the side, and of its radius."""

    x: float = 0.0
    y: float = 0.0
    growth: float = 0.0


STILL = (Jitter(), Jitter())


def draw_jitter(number: int, seed: int) -> tuple[Jitter, Jitter]:
    """Choose how both objects of a picture differ, by its number alone."""
    choose = random.Random(f"jitter {seed} {number}")

    def one() -> Jitter:
        x, y, growth = (choose.uniform(-1, 1) for _ in range(3))
        return Jitter(MAX_SHIFT * x, MAX_SHIFT * y, MAX_GROWTH * growth)

    return one(), one()


def render(scene: Scene, side_px: int, jitter: tuple[Jitter, Jitter] = STILL) -> Image.Image:
    """Draw a scene as a square RGB picture."""
    side = side_px * OVERSAMPLING
    image = Image.new("RGB", (side, side), COLOURS[scene.background])
    draw = ImageDraw.Draw(image)
    objects = [(scene.size, scene.colour, scene.shape), (scene.size_2, scene.colour_2, scene.shape_2)]
    centres = [PLACES[scene.place]] if scene.shape_2 is None else ARRANGEMENTS[scene.place]
    for (size, colour, shape), (x, y), own in zip(objects, centres, jitter, strict=False):
        radius = SIZES[size] * (1 + own.growth)
        points = outline(shape, (x + own.x) * side, (y + own.y) * side, radius * side)
        draw.polygon(points, fill=COLOURS[colour])
    return image.resize((side_px, side_px), Image.Resampling.BOX)


def outline(shape: str, x: float, y: float, radius: float) -> list[tuple[float, float]]:
    """Return the corners of a shape about (x, y); `radius` is that of a circle."""
    if shape == "cross":  # four arms of 2/3 of its half-width on each side of the middle
        a, b = 1.05 * radius, 0.35 * radius
        corners = [(-b, -a), (b, -a), (b, -b), (a, -b), (a, b), (b, b), (b, a), (-b, a), (-b, b), (-a, b), (-a, -b)]
        return [(x + dx, y + dy) for dx, dy in [*corners, (-b, -b)]]
    y += 0.25 * radius if shape == "triangle" else 0.0  # so that it is as far from above as from below
    num, reach, turn = {"triangle": (3, 1.25, 0.0), "square": (4, 1.25, math.pi / 4), "circle": (64, 1.0, 0.0)}[shape]
    angles = [2 * math.pi * corner / num + turn for corner in range(num)]
    return [(x + reach * radius * math.sin(angle), y - reach * radius * math.cos(angle)) for angle in angles]


@dataclass(frozen=True)
class Pictures:
    """What is rendered."""

    num_images: int
    image_size: int
    seed: int
    part: Part
    objects: Objects
    captions: str
    """own; or shuffled: dealt out anew, so that nothing can be learned from them."""

    def scene(self, number: int) -> Scene:
        return draw_scene(number, self.seed, self.part, self.objects)

    def png(self, number: int) -> bytes:
        content = io.BytesIO()
        render(self.scene(number), self.image_size, draw_jitter(number, self.seed)).save(content, "PNG")
        return content.getvalue()

    @cached_property
    def captioned_by(self) -> Sequence[int]:
        """Number of a picture -> number of the one whose caption it has."""
        numbers = list(range(self.num_images))
        if self.captions == "shuffled":
            random.Random(f"captions {self.seed}").shuffle(numbers)
        return numbers


def write_tars(out: Path, pictures: Pictures, numbers: Iterable[int]) -> None:
    """Write pictures, captions and scenes as tars."""
    for tar_number, of_tar in groupby(numbers, lambda number: number // IMAGES_PER_TAR):
        with tarfile.open(out / f"{tar_number:05d}.tar", "w") as tar:
            for number in of_tar:
                name, caption = f"{number:09d}", pictures.scene(pictures.captioned_by[number]).caption
                facts = {key: value for key, value in asdict(pictures.scene(number)).items() if value is not None}
                _add(tar, f"{name}.png", pictures.png(number))
                _add(tar, f"{name}.txt", caption.encode())
                _add(tar, f"{name}.json", json.dumps(facts).encode())


def write_files(out: Path, pictures: Pictures, numbers: Iterable[int]) -> None:
    """Write pictures alone, a file each."""
    for number in numbers:
        (out / f"{number:09d}.png").write_bytes(pictures.png(number))


LAYOUTS = {"tars": write_tars, "files": write_files}


def write(out: Path, pictures: Pictures, layout: str) -> None:
    """Write pictures to `out`; the folder appears when it is whole. Raises OSError, Timeout: another process writes it."""
    with unfinished(out) as partial:
        if partial.exists():  # of a command that was killed
            shutil.rmtree(partial)
        partial.mkdir()
        with tqdm(range(pictures.num_images), unit=" images", desc="shapes") as numbers:
            LAYOUTS[layout](partial, pictures, numbers)


@contextlib.contextmanager
def unfinished(out: Path) -> Iterator[Path]:
    """Give the name under which `out` is written; it gets its own at the end.

    Raises:
        Timeout: another process is writing it.
        FileExistsError: another process has written it since this one looked.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    partial, lock = out.with_name(out.name + ".partial"), FileLock(out.with_name(out.name + ".lock"))
    with lock.acquire(timeout=0):
        if out.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(out))
        try:
            yield partial
            partial.rename(out)
        except BaseException:  # a full disk has to be emptied again
            if partial.is_dir():
                shutil.rmtree(partial)
            partial.unlink(missing_ok=True)
            raise
        finally:
            Path(lock.lock_file).unlink()


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    member = tarfile.TarInfo(name)  # with a modification time of 0: the same bytes every time
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def prompt_scenes(seed: int, part: str, objects: str) -> Iterator[Scene]:
    """Yield the scenes of a part in an order that `seed` decides, each once; `both`: one object and two in turn."""
    kinds = ["one", "two"] if objects == "both" else [objects]
    lists = []
    for kind in kinds:
        scenes = [scene for scene in all_scenes(kind) if scene.part == part]
        random.Random(f"prompts {seed} {kind}").shuffle(scenes)
        lists.append(scenes)
    for row in zip(*lists, strict=False):
        yield from row
    shortest = min(map(len, lists))
    for scenes in lists:
        yield from scenes[shortest:]


def write_prompts(out: Path, num_images: int, seed: int, part: str, objects: str) -> int:
    """Write a file of so many prompts, or of all that there are; return how many."""
    lines = ["image_id\tid\tcaption"]
    for number, scene in zip(range(num_images), prompt_scenes(seed, part, objects), strict=False):
        lines.append(f"{number}\t{number}\t{scene.caption}")
    with unfinished(out) as partial:
        partial.write_text("\n".join(lines) + "\n")
    return len(lines) - 1


# --- the command ---

NUMBERS = {"num_images": (2048, 1, 10**9), "image_size": (32, 8, 4096), "seed": (17, 0, 2**32 - 1)}
"""Key -> default, least and greatest."""
TRAIN = "--train_encoders"
CHOICES = {
    "part": tuple(PARTS),
    "objects": ("both", "one", "two"),
    "captions": ("own", "shuffled"),
    "layout": tuple(LAYOUTS),
}
"""Key -> what is possible, the default first."""


TRAINING_NUMBERS = {
    "seed": (17, 0, 2**32 - 1),
    "reader_steps": (5000, 1, 10**7),
    "clip_steps": (7000, 1, 10**7),
    "vae_steps": (5000, 1, 10**7),
    "every_steps": (500, 1, 10**7),
    "num_measured": (1024, 64, 10**5),
    "max_minutes": (10**6, 0, 10**6),
}


def parse(
    words: Sequence[str], numbers: Mapping[str, tuple[int, int, int]], choices: Mapping[str, Sequence[str]]
) -> tuple[dict[str, Any], list[str]]:
    """Read key=value words; return the values, and what is wrong with the others."""
    values: dict[str, Any] = {key: default for key, (default, _, _) in numbers.items()}
    values |= {key: possible[0] for key, possible in choices.items()}
    problems = []
    for word in words:
        key, _, value = word.partition("=")
        if key in numbers:
            _, low, high = numbers[key]
            values[key] = int(value) if re.fullmatch("[0-9]{1,10}", value) else -1
            if not low <= values[key] <= high:
                possible = f"a whole number from {low} to {high}"
                problems.append(f"command line: {key} is '{value[:40]}'. Possible: {possible}.")
        elif key in choices:
            values[key] = value
            if value not in choices[key]:
                problems.append(f"command line: {key} is '{value[:40]}'. Possible: {', '.join(choices[key])}.")
        else:
            problems.append(f"command line: unknown key '{key}'. Known: {', '.join(values)}.")
    return values, problems


def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    if not argv or {"-h", "--help"} & set(argv):
        print(__doc__)
        return 0 if argv else 2
    if TRAIN in argv:
        return train_main([word for word in argv if word != TRAIN])
    paths = [word for word in argv if "=" not in word]
    given = [word.partition("=")[0] for word in argv if "=" in word]
    values, problems = parse([word for word in argv if "=" in word], NUMBERS, CHOICES)
    if odd := next(
        (f"'{shown(path)}' is no path. Possible: {text}" for path in paths if (text := text_possible(path))), None
    ):
        problems.append(f"OUT: {odd}.")
    elif len(paths) == 1 and Path(paths[0]).exists():
        kind = "file" if _is_prompts(paths[0]) else "folder"
        problems.append(f"OUT: {paths[0]} exists. Give a new {kind}, or remove it.")
    else:
        problems += _path_problems(paths)
    problems += _vain_keys(given, paths, values)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    try:
        print(_make(Path(paths[0]), values))
    except Timeout:
        print(
            f"OUT: {paths[0]} is being written by another process. Wait for it, or give another name.", file=sys.stderr
        )
        return 2
    except OSError as error:
        print(
            f"OUT: {paths[0]} cannot be written: {error}. Make room or give another place, then again.", file=sys.stderr
        )
        return 1
    return 0


def _make(out: Path, values: dict[str, Any]) -> str:
    """Write what is wanted and return what to say of it."""
    if _is_prompts(str(out)):
        wanted = {key: values[key] for key in ("num_images", "seed", "part", "objects")}
        return f"wrote {write_prompts(out, **wanted):,} prompts to {out}"
    layout = values.pop("layout")
    write(out, Pictures(**values), layout)
    return f"rendered {values['num_images']:,} pictures of {values['image_size']} px in {out}"


def train_main(words: Sequence[str]) -> int:
    """Run `--train_encoders`."""
    from prepare.shapes_training import TrainingConfig, train_encoders

    paths = [word for word in words if "=" not in word]
    values, problems = parse([word for word in words if "=" in word], TRAINING_NUMBERS, {})
    problems += _path_problems(paths)
    if problems:
        print("\n".join(problems), file=sys.stderr)
        return 2
    is_done = train_encoders(Path(paths[0]), TrainingConfig(**values))
    print(f"{'done' if is_done else 'stopped after max_minutes; the same command goes on'}: {paths[0]}/weights")
    return 0


def _path_problems(paths: Sequence[str]) -> list[str]:
    if len(paths) != 1:
        return ["command line: exactly one OUT has to be given. python -m prepare.shapes --help says more."]
    return [f"OUT: {text}"] if (text := unwritable(paths[0])) else []


def _vain_keys(given: Sequence[str], paths: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Return a problem for each key that changes nothing of what is written."""
    is_prompts = any(map(_is_prompts, paths))
    in_vain = (
        ["image_size", "captions", "layout"] if is_prompts else ["captions"] if values["layout"] == "files" else []
    )
    what = "a file of prompts" if is_prompts else "pictures alone (layout=files)"
    return [f"command line: {key} changes nothing of {what}. Leave it out." for key in in_vain if key in given]


def _is_prompts(path: str) -> bool:
    return path.endswith(".tsv")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
