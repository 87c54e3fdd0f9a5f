"""Images of given captions, each a PNG file that says how it was made: `eval.py PLACE images=OUT`.

    OUT/00001-17-a-red-circle-3f9c2a1b.png     the caption's number and words, the seed, a digest of all that made the image
    OUT/00001-17-a-red-circle-7b01d5e4.mp4     the same of a family of videos

The noise comes from seed and number, as in an evaluation: a caption has the same image whatever is drawn beside it. An image
that is there is not drawn again. Other settings, weights or captions have other names. So the same command resumes a killed
one, and nothing is overwritten.

A PNG has caption, settings and model as JSON in its text `easel`, an MP4 as its comment.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from composer.utils import dist
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor
from tqdm import tqdm

from cli import ranks
from cli.files import whole
from cli.limits import MAX_CAPTION, file_problem, kind_of_path, shown
from cli.ranks import Hearing, Signalled
from evaluation.drawing import Heard, as_bytes, chunks_of, generate
from evaluation.prompts import Prompt
from model import LatentDiffusion
from record import films
from record.environment import commit
from record.summary import result_line
from training.eval_keys import EvalCommand, which
from training.places import Place
from training.samples import read_captions
from training.scores import build_at, fingerprints, name_of_published, name_of_run, snapshots_at
from training.snapshots import load_snapshot
from zoo.sampling import shard
from zoo.spec import as_size

BATCH_SIZE = 4  # of a pass, whatever is drawn: on a CPU another size changes an image by a grey level here and there
EXAMPLE = "Give a file with a caption in each line, or captions: prompts='[a red circle, a blue square]'"


# --- captions ---


def captions_of(text: str | None) -> Sequence[Prompt]:
    """Read the key `prompts`: a list of captions, whose places are their numbers, or a file. Raises ValueError."""
    if text is None:
        raise ValueError(f"not given. {EXAMPLE}.")
    if not text.lstrip().startswith("["):
        if len(text) < MAX_CAPTION and (problem := file_problem(text)):
            raise ValueError(f"{problem} {EXAMPLE}.")
        return read_captions(text)
    try:
        given = yaml.load(text, Loader=yaml.BaseLoader)  # every word a text: no, 1e3, 2024-01-01
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{shown(text)} cannot be read as a list. Put captions with a comma in quotes.") from error
    for number, caption in enumerate(given, 1):
        if not isinstance(caption, str) or not caption.strip() or "\0" in caption or len(caption) > MAX_CAPTION:
            possible = f"a text of 1 to {MAX_CAPTION:,} characters, in quotes where it has a colon or a bracket"
            raise ValueError(f"the caption at place {number} is {shown(repr(caption))}. Possible: {possible}.")
    if not given:
        raise ValueError(f"an empty list. {EXAMPLE}.")
    return [Prompt(number, number, caption.strip()) for number, caption in enumerate(given, 1)]


# --- the folder ---


def folder_problem(folder: str) -> str | None:
    """Say why images cannot go to a folder, or None."""
    return f"{shown(folder)} is a file. Give a folder." if kind_of_path(folder) not in (None, "folder") else None


@dataclass(frozen=True)
class Wanted:
    """One image to draw, and all that it depends on."""

    prompt: Prompt
    seed: int
    guidance: float
    settings: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its file's: number, seed, words of the caption, digest."""
        ending = ".mp4" if len(self.settings["image_size"]) == 3 else ".png"
        number = f"{self.prompt.number:05d}" if 0 <= self.prompt.number < 10**12 else "id"
        plain = unicodedata.normalize("NFKD", self.prompt.caption).encode("ascii", "ignore").decode().lower()
        words = re.sub("[^a-z0-9]+", "-", plain)[:40].strip("-")
        digest = hashlib.blake2b(json.dumps(self.made_by(), sort_keys=True).encode(), digest_size=4).hexdigest()
        return "-".join(part for part in (number, str(self.seed), words, digest) if part) + ending

    def made_by(self) -> dict[str, Any]:
        """Return what the image depends on, for its name and its metadata."""
        own = {
            "prompt": self.prompt.caption,
            "number": self.prompt.number,
            "seed": self.seed,
            "guidance": self.guidance,
        }
        return {**own, **self.settings}


def save(image: Tensor, path: Path, wanted: Wanted, about: Mapping[str, Any]) -> None:
    """Write an image, (3, H, W) uint8, or a video, (3, F, H, W), whole or not at all.

    Args:
        about: what is told of it beside what it depends on; of a video its `fps` too.
    """
    made = {**wanted.made_by(), **about}
    if image.ndim == 4:
        films.write_mp4(path, image, made["fps"], json.dumps(made))
        return
    info = PngInfo()
    info.add_text("easel", json.dumps(made))  # in ASCII: an escape sequence reaches no terminal
    with whole(path) as temporary:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(temporary, format="PNG", pnginfo=info)


# --- drawing ---


def draw(config: EvalCommand, place: Place, device: torch.device) -> None:
    """Draw the images of a place's model that its folder does not have. All ranks call it.

    Raises:
        ranks.Signalled: a rank has received a signal; what is drawn stays.
    """
    assert config.images is not None
    prompts, folder = captions_of(config.prompts), Path(config.images).expanduser()
    model = build_at(config, place, device)
    if place.kind != "run":
        _draw(config, model, name_of_published(config, place, model), prompts, folder)
        return
    paths = snapshots_at(place)
    for path in paths if which(config) == "all" else paths[-1:]:
        progress = load_snapshot(model, path, config.eval.weights)
        of_model = {
            "images_seen" if key == "images" else key: progress[key] for key in ("snapshot", "images", "weights")
        }
        _draw(config, model, {**name_of_run(place), **of_model, **fingerprints(model)}, prompts, folder)


def _draw(
    config: EvalCommand, model: LatentDiffusion, of_model: Mapping[str, Any], prompts: Sequence[Prompt], folder: Path
) -> None:
    """Draw what one model is asked for."""
    size = config.size if config.eval.image_size is None else (*as_size(config.eval.image_size), *config.size[2:])
    settings: dict[str, Any] = {"steps": config.eval.steps, "sampler": config.eval.sampler, "image_size": list(size)}
    settings |= {"precision": config.precision, **config.objective.of_scores()}
    settings |= {key: value for key, value in of_model.items() if key.endswith("_fingerprint")}
    about = {key: value for key, value in of_model.items() if key not in settings} | {"commit": commit()}
    if model.family.pictures == "videos":
        about["fps"] = config.data.fps or model.family.frames_per_sec
    seeds = range(config.seed, config.seed + config.images_per_prompt)
    wanted = [
        Wanted(prompt, seed, guidance, settings)
        for guidance in config.eval.guidances()
        for prompt in prompts
        for seed in seeds
    ]
    missing = ranks.on_rank_zero(lambda: [n for n, one in enumerate(wanted) if not (folder / one.name).is_file()])
    mine = [wanted[missing[n]] for n in shard(len(missing), dist.get_global_rank(), dist.get_world_size())]
    chunks = [
        chunk
        for guidance in config.eval.guidances()
        for chunk in chunks_of([one for one in mine if one.guidance == guidance], config.eval.batch_size or BATCH_SIZE)
    ]
    ranks.on_one_rank_of_each_machine(lambda: folder.mkdir(parents=True, exist_ok=True))
    ways: dict[str, Any] = {"sampler": config.eval.sampler, "steps": config.eval.steps}
    with ranks.stopping_together() as signal:
        hearing = Hearing(signal, len(chunks))
        is_shown = config.loggers.progress_bar and bool(missing) and dist.get_global_rank() == 0
        bar = tqdm(total=len(missing), desc="images", unit="image", file=sys.stderr, disable=not is_shown)
        with contextlib.suppress(Heard), bar:
            for chunk in chunks:
                ways["guidance"] = chunk[0].guidance
                batch, of_chunk = config.eval.batch_size or BATCH_SIZE, [one.prompt for one in chunk]
                images = generate(model, of_chunk, batch, size, [one.seed for one in chunk], ways, hearing)
                for one, image in zip(chunk, images[: len(chunk)], strict=True):
                    if not image.isfinite().all():
                        given = f"images: not finite for caption {one.prompt.number}"
                        raise ValueError(f"{given}. Look at the weights and the precision.")
                    save(as_bytes(image), folder / one.name, one, about)
                hearing.done()
                bar.update(min(len(chunk) * dist.get_world_size(), len(missing) - bar.n))  # of all ranks
        if number := hearing.agreed():
            raise Signalled(number)
    if dist.get_global_rank() == 0:
        elsewhere = [one.name for one in wanted if not (folder / one.name).is_file()]
        if elsewhere:
            given = f"images: {len(elsewhere):,} of {len(wanted):,} are on other machines"
            raise ValueError(f"{given}. Give a folder that all machines have.")
        told = {"model": of_model["model"], "images_seen": of_model.get("images_seen"), "weights": of_model["weights"]}
        facts = {**told, "images": len(wanted), "drawn": len(missing), "folder": shown(str(folder), 300)}
        print(result_line({key: value for key, value in facts.items() if value is not None}), flush=True)
