"""Images of given captions, each a PNG file that says how it was made, and a contact sheet: `eval.py PLACE images=OUT`.

    OUT/00001-17-a-red-circle-3f9c2a1b.png     the caption's number and words, the seed, a digest of all that made the image
    OUT/00001-17-a-red-circle-7b01d5e4.mp4     the same of a family of videos
    OUT/sheet.png                              the folder's images, each with its caption; of videos some frames

The noise comes from seed and number, as in an evaluation: a caption has the same image whatever is drawn beside it. An image
that is there is not drawn again. Other settings, weights or captions have other names. So the same command resumes a killed
one, and nothing is overwritten. Metadata of a PNG:

    parameters    caption and settings, as other programs write and show them
    easel         the same and more, as JSON; an MP4 has it as its comment
"""

from __future__ import annotations

import bisect
import contextlib
import hashlib
import json
import re
import sys
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from composer.utils import dist
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from cli import ranks
from cli.errors import ConfigError
from cli.files import open_regular, whole
from cli.limits import MAX_CAPTION, file_problem, kind_of_path, shown
from cli.log import log
from cli.masking import printable
from cli.ranks import Hearing, Signalled
from evaluation.drawing import Heard, as_bytes, chunks_of, generate
from evaluation.prompts import Prompt
from model import LatentDiffusion
from record import films
from record.environment import commit
from record.summary import result_line
from reports.samples import Picture, contact_sheet
from training.eval_keys import EvalCommand, which
from training.places import Place
from training.samples import read_captions
from training.scores import build_at, fingerprints, name_of_published, name_of_run, snapshots_at
from training.snapshots import load_snapshot
from zoo.sampling import shard
from zoo.spec import Family, as_size

BATCH_SIZE = 4  # of a pass, whatever is drawn: on a CPU another size changes an image by a grey level here and there
SHEET = "sheet.png"
MOST_ON_SHEET = 240
NAME = re.compile(r"(\d{5,12}|id)-\d+(-[a-z0-9-]+)?-[0-9a-f]{8}\.(png|mp4)")
SAMPLER_NAMES = {"ddim": "DDIM", "plms": "PLMS", "dpm++": "DPM++ 2M", "euler": "Euler"}
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
        given = yaml.load(
            text, Loader=getattr(yaml, "CBaseLoader", yaml.BaseLoader)
        )  # every word a text: no, 1e3, 2024-01-01
    except (yaml.YAMLError, RecursionError) as error:
        raise ValueError(f"{shown(text)} cannot be read as a list. Put captions with a comma in quotes.") from error
    found = []
    for number, caption in enumerate(given if isinstance(given, list) else [given], 1):
        if not isinstance(caption, str):
            raise ValueError(f"the caption at place {number} is {shown(repr(caption))}, not a text. Put it in quotes.")
        if not caption.strip() or "\0" in caption or len(caption) > MAX_CAPTION:
            possible = f"1 to {MAX_CAPTION:,} characters, no NUL"
            raise ValueError(
                f"the caption at place {number} is {shown(repr(caption))}. Possible: {possible}. Change it."
            )
        found.append(Prompt(number, number, caption.strip()))
    if not found:
        raise ValueError(f"an empty list. {EXAMPLE}.")
    return found


def cut_off(family: Family, caption: str) -> int | None:
    """Return how many characters of a caption its text encoder reads; None: all."""

    def same(num: int) -> bool:
        return all(torch.equal(*pair) for pair in zip(tokens(num).values(), tokens(len(caption)).values(), strict=True))

    def tokens(num: int) -> Mapping[str, Tensor]:
        return family.tokenize([caption[:num]])

    if not all(row[0, -1] for row in tokens(len(caption)).values()):
        return None  # there is room at the end
    num = bisect.bisect_left(range(len(caption) + 1), True, key=same)
    return num if any(letter.isalnum() for letter in caption[num:]) else None


# --- the folder ---


def folder_problem(folder: str) -> str | None:
    """Say why images cannot go to a folder, or None: there is something else in it."""
    if kind_of_path(folder) is None:
        return None
    if kind_of_path(folder) != "folder":
        return f"{shown(folder)} is a file. Give a folder."
    there = sorted(path.name for path in Path(folder).expanduser().iterdir() if not path.name.startswith("."))
    others = [name for name in there if not (NAME.fullmatch(name) or name == SHEET)]
    if SHEET in there and told_by(Path(folder).expanduser() / SHEET) is None:
        others.append(SHEET)
    if not others:
        return None
    some = ", ".join(map(shown, others[:3])) + (f" and {len(others) - 3:,} more" if len(others) > 3 else "")
    return f"{shown(folder)} has other files: {some}. Give a folder that is new, or has images of this command alone."


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
    info.add_text("parameters", parameters(made))
    info.add_text("easel", json.dumps(made))  # in ASCII: an escape sequence reaches no terminal
    with whole(path) as temporary:
        Image.fromarray(image.permute(1, 2, 0).numpy()).save(temporary, format="PNG", pnginfo=info)


def parameters(made: Mapping[str, Any]) -> str:
    """Return the text that Stable Diffusion's web interfaces write into a PNG, and show."""
    facts = {
        "Steps": made["steps"],
        "Sampler": SAMPLER_NAMES[made["sampler"]],
        "CFG scale": f"{made['guidance']:g}",
        "Seed": made["seed"],
        "Size": "x".join(map(str, made["image_size"])),
        "Model hash": made["denoiser_fingerprint"][:10],
        "Model": made["model"],
        "Version": f"easel {(made['commit'] or 'unknown')[:12]}",
    }
    texts = {key: printable(str(value)) for key, value in facts.items()}
    quoted = {key: json.dumps(text) if set(text) & set(',:"') else text for key, text in texts.items()}
    return f"{printable(made['prompt'])}\n" + ", ".join(f"{key}: {text}" for key, text in quoted.items())


def told_by(path: Path) -> dict[str, Any] | None:
    """Return the metadata of a file that was written here; None: it is no such file."""
    with contextlib.suppress(Exception):  # the decoders raise OSError, SyntaxError, ValueError, struct.error and more
        if path.suffix == ".mp4":
            told = json.loads(films.comment_in(path))
            return told if isinstance(told, dict) else None
        with open_regular(path) as file, Image.open(file, formats=("PNG",)) as image:
            told = json.loads(image.info["easel"])
        return told if isinstance(told, dict) else None
    return None


# --- drawing ---


def draw(config: EvalCommand, place: Place, device: torch.device) -> None:
    """Draw the images of a place's model that its folder does not have. All ranks call it.

    Raises:
        ranks.Signalled: a rank has received a signal; what is drawn stays.
    """
    assert config.images is not None
    prompts, folder = captions_of(config.prompts), Path(config.images).expanduser()
    model = build_at(config, place, device)
    for prompt in prompts:
        if (num := cut_off(model.family, prompt.caption)) is not None:
            given = f"caption {prompt.number}: its text encoder reads the first {num:,} of {len(prompt.caption):,} characters"
            log.info(f"prompts: {given}, to '{printable(prompt.caption[max(0, num - 20) : num])}'.")
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
        with contextlib.suppress(Heard), _progress(len(missing), config.loggers.progress_bar) as count:
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
                count(len(chunk))
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


@contextlib.contextmanager
def _progress(total: int, is_shown: bool) -> Iterator[Callable[[int], object]]:
    """Show rank 0's progress, in images of all ranks; gives what is told how many this rank has drawn."""
    if not (is_shown and total and dist.get_global_rank() == 0):
        yield lambda num: None
        return
    from tqdm import tqdm

    with tqdm(total=total, desc="images", unit="image", file=sys.stderr) as bar:
        yield lambda num: bar.update(min(num * dist.get_world_size(), total - bar.n))


# --- the contact sheet ---

ORDER = (
    "model",
    "model_id",
    "images_seen",
    "weights",
    "guidance",
    "seed",
    "sampler",
    "steps",
    "image_size",
    "precision",
)


def write_sheet(folder: Path) -> Path:
    """Draw the contact sheet of all images in a folder, and return its path."""
    paths = sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))
    found = [(told, path) for path in paths if (told := told_by(path)) is not None]
    if not found:
        raise ConfigError([f"{folder} has no image of this command any more."])
    differing = [key for key in ORDER if len({str(told.get(key)) for told, _ in found}) > 1]
    if len({str(told.get("model")) for told, _ in found}) == len({str(told.get("model_id")) for told, _ in found}):
        differing = [key for key in differing if key != "model_id"]  # the names tell them apart

    def place(told: Mapping[str, Any]) -> tuple:
        values = [told.get(key) for key in ORDER]
        return (told["number"], told["prompt"], *((type(value).__name__, value) for value in values))

    found.sort(key=lambda one: place(one[0]))
    of_caption: dict[tuple, int] = {}
    for told, _ in found:
        of_caption[told["number"], told["prompt"]] = of_caption.get((told["number"], told["prompt"]), 0) + 1
    groups = set(of_caption.values())
    pictures = [Picture(path, told["prompt"], _said(told, differing)) for told, path in found[:MOST_ON_SHEET]]
    if len(found) > MOST_ON_SHEET:
        log.info(f"images: {folder / SHEET} shows the first {MOST_ON_SHEET} of {len(found):,} images.")
    first = found[0][0]
    heading = "" if "model" in differing else str(first["model"])
    about = _said(first, [key for key in ORDER if key not in (*differing, "model", "model_id")])
    sheet = contact_sheet(
        pictures, heading or f"{len({told['model'] for told, _ in found})} models", about, max(groups)
    )
    info = PngInfo()
    info.add_text("easel", json.dumps({"images": len(pictures), "commit": commit()}))
    with whole(folder / SHEET) as temporary:
        sheet.save(temporary, format="PNG", pnginfo=info)
    return folder / SHEET


def _said(told: Mapping[str, Any], keys: Sequence[str]) -> str:
    """Say some of an image's facts in words."""
    words: dict[str, Callable[[Any], str]] = {
        "images_seen": lambda value: f"{value:,} images seen",
        "weights": lambda value: value if value == "published" else f"{value} weights".replace("ema", "EMA"),
        "guidance": lambda value: f"guidance {value:g}",
        "seed": lambda value: f"seed {value}",
        "steps": lambda value: f"{value} steps",
        "image_size": lambda value: f"{value[0]} x {value[1]} px{f', {value[2]} frames' if value[2:] else ''}",
    }
    return ", ".join(words.get(key, str)(told[key]) for key in keys if told.get(key) is not None)
