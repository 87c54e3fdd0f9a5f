"""What `composer eval.py` is given: a run, one of its snapshots, others' weights, or a folder of images.

runs/NAME                              config.yaml, checkpoints/: each snapshot, with its EMA or training weights
runs/NAME/checkpoints/weights-*.pt     one of them
stable-diffusion-2-base/               others' weights: a diffusers folder, or one of a UNet alone
512-base-ema.ckpt                      an LDM file (.ckpt, .safetensors), or one of a UNet alone
OWNER/NAME[@REVISION], hf://...        one of both on the hub
samples/                               KEY.png and the like: KEY ends in a prompt's id, or else in its image_id
"""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from cli.limits import ImageSize, kind_of_path
from cli.log import log
from evaluation.image_folder import SUFFIXES as OF_IMAGES
from record.checkpoint_files import NAME
from training import warm_start
from training.run_config import Config, RunConfig
from weights import hub, hub_names
from weights.files import SUFFIXES as OF_WEIGHTS
from weights.files import Refused, open_weights, shown
from zoo import load_family
from zoo.encoders import need_of_denoiser, need_of_encoders
from zoo.model_config import ModelConfig
from zoo.sampling import SCHEDULE
from zoo.spec import Family, as_size

Kind = Literal["run", "diffusers", "file", "images"]

OTHERS = "others' weights (diffusers folder, LDM file, name on the hub)"
POSSIBLE = f"a run (runs/NAME) or its snapshot, {OTHERS}, a folder of images"
DENOISERS = ("unet", "transformer")
EXPORT = "export.json"
ENCODERS = ("vae", "text_encoder", "text_encoder_2")  # folders of a diffusers model
OF_ENCODERS = ("first_stage_model.", "cond_stage_model.", "conditioner.")


@dataclass(frozen=True)
class Place:
    """One thing that is scored or drawn from.

    given: as on the command line; path: where it is on this machine; snapshot: the one of a run that was given.
    """

    given: str
    path: Path
    kind: Kind
    snapshot: Path | None = None

    @property
    def name(self) -> str:
        """What it is called in tables: relative to the current folder if it is inside, so that records name no machine."""
        if hub_names.parse(self.given) is not None:
            return self.given.removeprefix("hf://").removeprefix("https://huggingface.co/")
        if self.kind != "images":
            return self.path.name
        return str(self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path)


def find(given: str, model: ModelConfig, *, encoders: bool) -> Place:
    """Return what is at a place; others' weights on the hub are brought to this machine.

    Args:
        model: the family of others' weights.
        encoders: others' weights come with their encoders, where they have some.

    Raises:
        ValueError: nothing that could be scored is there.
    """
    if hub_names.parse(given) is not None:
        family = load_family(model.family, model.preset, model.variant)
        path = hub_names.place(str(_fetched(given, family, encoders=encoders)))
        return Place(given, path, "diffusers" if path.is_dir() else "file")
    path = Path(given).expanduser()
    kind = kind_of_path(path)
    if kind == "folder" and not NAME.fullmatch(path.name):
        return Place(given, path.resolve(), _kind_of_folder(given, path))
    if kind is not None and NAME.fullmatch(path.name):
        run = path.resolve().parent.parent
        if path.resolve().parent.name == "checkpoints" and (run / "config.yaml").is_file():
            return Place(given, run, "run", path.resolve())
        raise ValueError(
            f"{given} is a run's checkpoint, without its run's config.yaml. Give it in checkpoints/ of its run."
        )
    if kind == "file" and path.suffix in OF_WEIGHTS:
        return Place(given, path.resolve(), "file")
    raise ValueError(f"{shown(given)} is no folder, and no file of weights. Possible: {POSSIBLE}. Check the path.")


def _kind_of_folder(given: str, folder: Path) -> Kind:
    if (folder / "config.yaml").is_file():
        return "run"
    if any(path.suffix in (".pt", ".parts") for path in (folder / "checkpoints").glob("*-*")):
        way = "The training command writes it again, or bring back a copy"
        raise ValueError(f"{given}: it has checkpoints of a run, but no config.yaml. {way}.")
    is_one_network = "_class_name" in warm_start.first_object([folder / "config.json"])
    parts = (folder / "model_index.json", *(folder / part for part in DENOISERS))
    if is_one_network or any(part.exists() for part in parts):
        return "diffusers"
    there = sorted(folder.iterdir())
    if there and not any(path.suffix.lower() in OF_IMAGES for path in there):
        names = ", ".join(shown(path.name) for path in there[:5])
        wanted = "config.yaml, model_index.json, unet/, transformer/ nor images"
        raise ValueError(f"{given} has neither {wanted}: {names}. Possible: {POSSIBLE}.")
    return "images"


# --- others' weights ---


def _fetched(given: str, family: Family, *, encoders: bool) -> hub_names.Name:
    """Fetch a model, or what it has of one: its UNet, or a single file. Raises Refused."""
    network = need_of_denoiser(family)
    alone = dataclasses.replace(network, more=("model_index.json", EXPORT, *network.more))
    if encoders:
        whole = need_of_encoders(family)
        need = dataclasses.replace(alone, networks=(*network.networks, *whole.networks), whole=whole.whole)
        with contextlib.suppress(Refused):  # it has none
            hub.look(given, need)
            return hub.fetch(given, need, key="eval.py").name
    return hub.fetch(given, alone, key="eval.py").name


def of_export(place: Place) -> dict[str, str]:
    """Return what an export says of its network, as keys of a run; {}: it is no export, which has to be told them."""
    stated = warm_start.first_object([place.path / EXPORT]) if place.kind == "diffusers" else {}
    keys = ("family", "preset", "variant")
    return {f"model.{key}": stated[key] for key in keys if isinstance(stated.get(key), str)}


def has_encoders(place: Place) -> bool:
    """True where others' weights come with an autoencoder or a text encoder of their own."""
    if place.kind == "diffusers":
        return any((place.path / folder).is_dir() for folder in ENCODERS)
    try:
        return any(name.startswith(OF_ENCODERS) for name in open_weights(place.path).entries)
    except ValueError:
        return True  # said where its weights are read


def of_published(config: Config, place: Place, given: set[str]) -> Config:
    """Return the configuration of others' weights: size and prediction come from their folder, unless keys set them.

    Args:
        given: keys set on the command line.
    """
    own = str(place.path) if has_encoders(place) else None
    model = dataclasses.replace(config.model, weights=config.model.weights or own, denoiser=str(place.path))
    of_objective = {
        key: value for key, value in warm_start.trained_on(place.path).items() if f"objective.{key}" not in given
    }
    objective = dataclasses.replace(config.objective, **of_objective)
    evaluation = config.eval
    if place.kind == "file" and evaluation.weights is None:
        evaluation = dataclasses.replace(
            evaluation, weights="ema" if warm_start.has_average(place.path) else "training"
        )
    size = config.image_size if "image_size" in given else _size_of(place, model) or config.image_size
    return dataclasses.replace(config, model=model, objective=objective, image_size=size, eval=evaluation)


def _size_of(place: Place, model: ModelConfig) -> ImageSize | None:
    """Return the size of the images that others' weights are for; None: they do not say."""
    exported = warm_start.first_object([place.path / EXPORT]).get("image_size")
    if exported is not None:
        with contextlib.suppress(ValueError):
            return as_size(exported)
    sample_size: Any = warm_start.unet_config(place.path).get("sample_size")
    sides = sample_size[::-1] if isinstance(sample_size, list) else [sample_size] * 2  # it has the height first
    if [type(side) for side in sides] != [int, int]:
        return None
    with contextlib.suppress(ValueError):  # of the family: reported elsewhere
        scale = load_family(model.family, model.preset, model.variant).pixels_per_latent
        return (sides[0] * scale, sides[1] * scale)
    return None


def problems_of_published(config: RunConfig, place: Place, weights: str | None) -> list[tuple[str, str]]:
    """(key, message) for what keeps others' weights from being sampled, apart from their names and shapes.

    Args:
        weights: which of a file's are wanted, ema or training; None: the EMA weights if there are any.
    """
    found = []
    if config.model.weights is None:
        given = f"not given, and {place.given} has no autoencoder and no text encoder"
        found.append(
            ("model.weights", f"{given}. Give those that it was trained with: folder, file or name on the hub.")
        )
    if weights == "ema" and place.kind == "file" and not warm_start.has_average(place.path):
        found.append(("eval.weights", f"ema, but {place.given} has no model_ema.*. Say eval.weights=training."))
    stated = warm_start.scheduler_config(place.path)
    other = {key: stated[key] for key, value in SCHEDULE.items() if key in NOISE and stated.get(key, value) != value}
    if other:
        said = ", ".join(f"{key} {shown(str(value))}, not {SCHEDULE[key]}" for key, value in other.items())
        found.append(
            ("eval.sampler", f"{place.given} was trained with another schedule: {said}. No sampler here has it.")
        )
    return found


NOISE = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end")


def say_what_is_assumed(config: RunConfig, place: Place) -> None:
    """Say what others' weights do not say of themselves."""
    if place.kind in ("diffusers", "file") and not warm_start.trained_on(place.path):
        given = f"{place.given} does not say what its network predicts: taken to be {config.objective.prediction}"
        log.info(f"eval: {given}. Say objective.prediction=epsilon, or v, where that is wrong.")
