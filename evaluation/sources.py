"""What `composer eval.py` scores or draws from: a run, one of its snapshots, published weights, or a folder of images.

runs/NAME                              config.yaml, checkpoints/: each snapshot, with its EMA or training weights
runs/NAME/checkpoints/weights-*.pt     one of them
stable-diffusion-2-base/               published weights: a diffusers folder, or one of a UNet alone
512-base-ema.ckpt                      an LDM file (.ckpt, .safetensors), or one of a UNet alone
OWNER/NAME[@REVISION], hf://...        one of both on the hub
samples/                               KEY.png and the like: KEY ends in a prompt's id, or else in its image_id
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash
from torch import Tensor

from checkpointing.files import FULL, NAME, WEIGHTS, find_damage, list_checkpoints, read_checkpoint
from common.errors import ConfigError
from common.log import log
from common.value_types import ImageSize, Pixels, join_first, kind_of_path
from evaluation.image_folder import SUFFIXES
from evaluation.prompts import Prompt, PromptSet
from evaluation.scorer import EvalConfig
from evaluation.table import Row
from families import load_family, pipeline_files
from families.encoders import ModelConfig, list_denoiser_files, list_encoder_files
from families.lora import format_other_base
from families.objectives import ObjectiveConfig
from families.sampling import SCHEDULE
from families.spec import Family, parse_size
from model import LatentDiffusion
from ranks import collectives
from run_folder.files import run_id_of
from weights import hub, hub_names
from weights.files import WEIGHT_SUFFIXES, WeightsError, open_weights, printable
from weights.tensors import canonical_name, fingerprint, format_difference, tensor_specs

SourceKind = Literal["run", "diffusers", "file", "images"]

PUBLISHED = "published weights (diffusers folder, LDM file, name on the hub)"
SOURCES = f"a run (runs/NAME) or its snapshot, {PUBLISHED}, a folder of images"
DENOISER_FOLDERS = ("unet", "transformer")
ENCODER_FOLDERS = ("vae", "text_encoder", "text_encoder_2")
ENCODER_PREFIXES = ("first_stage_model.", "cond_stage_model.", "conditioner.")  # of tensors in an LDM file
EXPORT_FILE = "export.json"


@dataclass(frozen=True)
class EvalSource:
    """What is scored, or generates images.

    address: as on the command line; path: on this machine; snapshot: the one of a run that was given.
    """

    address: str
    path: Path
    kind: SourceKind
    snapshot: Path | None = None

    @property
    def name(self) -> str:
        """What it is called in tables: relative to the current folder if it is inside, so that records name no machine."""
        if hub_names.parse_hub_name(self.address) is not None:
            return self.address.removeprefix("hf://").removeprefix("https://huggingface.co/")
        if self.kind != "images":
            return self.path.name
        return str(self.path.relative_to(Path.cwd()) if self.path.is_relative_to(Path.cwd()) else self.path)


def find_source(address: str, model: ModelConfig, *, with_encoders: bool) -> EvalSource:
    """Return what is at an address; published weights on the hub are downloaded to this machine.

    Args:
        model: the family of published weights.
        with_encoders: download the encoders of published weights too, if they have some.

    Raises:
        ValueError: nothing that could be scored is there.
    """
    if hub_names.parse_hub_name(address) is not None:
        family = load_family(model.family, model.preset, model.variant)
        path = hub_names.resolve_weights_path(str(_fetch_published(address, family, with_encoders=with_encoders)))
        return EvalSource(address, path, "diffusers" if path.is_dir() else "file")
    path = Path(address).expanduser()
    kind = kind_of_path(path)
    if kind == "folder" and not NAME.fullmatch(path.name):
        return EvalSource(address, path.resolve(), _kind_of_folder(address, path))
    if kind is not None and NAME.fullmatch(path.name):
        run = path.resolve().parent.parent
        if path.resolve().parent.name == "checkpoints" and (run / "config.yaml").is_file():
            return EvalSource(address, run, "run", path.resolve())
        raise ValueError(
            f"{address} is a run's checkpoint, outside its run's folder. Give its path in RUN/checkpoints/."
        )
    if kind == "file" and path.suffix in WEIGHT_SUFFIXES:
        return EvalSource(address, path.resolve(), "file")
    raise ValueError(
        f"{printable(address)} is neither a folder nor a file of weights. Possible: {SOURCES}. Check the path."
    )


def _kind_of_folder(address: str, folder: Path) -> SourceKind:
    if (folder / "config.yaml").is_file():
        return "run"
    if any(path.suffix in (".pt", ".parts") for path in (folder / "checkpoints").glob("*-*")):
        todo = "The training command writes it again, or restore a copy"
        raise ValueError(f"{address}: it has checkpoints of a run, but no config.yaml. {todo}.")
    is_one_network = "_class_name" in pipeline_files.read_first_json([folder / "config.json"])
    parts = (folder / "model_index.json", *(folder / part for part in DENOISER_FOLDERS))
    if is_one_network or any(part.exists() for part in parts):
        return "diffusers"
    entries = sorted(folder.iterdir())
    if entries and not any(path.suffix.lower() in SUFFIXES for path in entries):
        names = ", ".join(printable(path.name) for path in entries[:5])
        wanted = "config.yaml, model_index.json, unet/, transformer/ nor images"
        raise ValueError(f"{address} has neither {wanted}: {names}. Possible: {SOURCES}.")
    return "images"


# --- a run ---


def describe_run(source: EvalSource) -> Row:
    """Return what a run is called in tables, and what tells it from another run of the same name."""
    return {"model": source.name, "model_id": collectives.on_rank_zero(lambda: run_id_of(source.path))}


def snapshots_of(source: EvalSource) -> list[Path]:
    """Return a run's snapshots, the oldest first, or the one that was given. Raises ConfigError: there is none."""
    return [source.snapshot] if source.snapshot else collectives.on_rank_zero(lambda: list_snapshots(source.path))


def list_snapshots(run: Path) -> list[Path]:
    """Return a run's snapshots, the oldest first; if it has none, its newest full checkpoint.

    Raises:
        ConfigError: the run has neither.
    """
    folder = run / "checkpoints"
    snapshots = list_checkpoints(folder, WEIGHTS)[::-1] or list_checkpoints(folder, FULL)[:1]
    if not snapshots:
        raise ConfigError([f"{run} has no snapshot. Train it with save.snapshot_every_images, or eval.when=after."])
    return snapshots


def load_snapshot(
    model: LatentDiffusion, path: Path, weights: str | None, weights_key: str = "eval.weights"
) -> dict[str, Any]:
    """Copy a snapshot's weights into a model's denoiser.

    Args:
        weights: ema or training; None: the EMA weights if there are any.
        weights_key: the key that chooses them, for messages.

    Returns:
        The run's progress (batch, images, seconds of training), and which weights were loaded.

    Raises:
        ConfigError: the snapshot is damaged, of another model, or of a run with other encoders.
    """
    if damage := find_damage(path):
        raise ConfigError([f"{path} is damaged: {damage}. Restore a copy, or remove it to score the others."])
    content = read_checkpoint(path)
    progress = content["progress"]
    problems = _identity_problems(model, path, content["identity"])
    ema_weights: Any = (content.get("ema") or {}).get("weights") or None
    if weights == "ema" and content.get("ema") is None:
        problems.append(f"{weights_key}: ema, but {path} has no EMA weights. Say {weights_key}=training.")
    use = "ema" if ema_weights is not None and weights != "training" else "training"
    tensors = ema_weights if use == "ema" else content["model"]
    of_model = {canonical_name(name): tensor for name, tensor in model.state_dict().items()}
    wanted = {name: of_model[name] for name in tensors if name in of_model} if use == "ema" else of_model
    if text := format_difference(_shapes(wanted), _shapes(tensors)):
        problems.append(f"{path} does not fit the model: {text}. Use the configuration that it was made with.")
    if problems:
        raise ConfigError(problems)
    with torch.no_grad():
        for name, tensor in of_model.items():
            # The EMA has no buffers: they are taken from the training weights.
            tensor.copy_(tensors[name] if name in tensors else content["model"][name])
    return {
        "snapshot": path.name,
        "batch": progress["batch"],
        "images": progress["images"],
        "seconds": progress["seconds"],
        "weights": use,
    }


def _identity_problems(model: LatentDiffusion, path: Path, identity: Mapping[str, Any]) -> list[str]:
    """Return where a snapshot was trained with other encoders, another objective, or an adapter's other base."""
    problems = [
        f"model.weights: its {name} has the fingerprint {digest}, {path} was trained with {identity[key]}. Use those weights."
        for name, digest in model.encoders.fingerprints.items()
        if identity.get(key := f"encoders.{name}", digest) != digest
    ]
    for key in ("prediction", "zero_terminal_snr"):
        value = getattr(model.objective, key)
        if (trained_on := identity.get(f"objective.{key}", value)) != value:
            problems.append(f"objective.{key}: {value}, but {path} was trained on {trained_on}. Use that value.")
    if model.adapter is not None and (trained_on := identity.get("denoiser_start")) != model.adapter.base:
        problems.append(format_other_base(model.adapter.base, str(path), trained_on))
    return problems


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: spec.split(" ", 1)[1] for name, spec in tensor_specs(tensors).items()}  # EMA weights are float32


# --- published weights ---


def describe_published(source: EvalSource, model: LatentDiffusion, weights: str | None) -> Row:
    """Return what published weights are called in tables, which of them are taken, and their fingerprints.

    Args:
        weights: ema or training, of a file that has both.
    """
    digests, used = fingerprint_networks(model), "published"
    if source.kind == "file" and pipeline_files.has_ema_weights(source.path):
        used = weights or "training"
    return {"model": source.name, "model_id": digests["denoiser_fingerprint"][:8], "weights": used, **digests}


def fingerprint_networks(model: LatentDiffusion) -> Row:
    """Return the fingerprints of all networks that an image depends on."""
    encoders = {f"{name}_fingerprint": digest for name, digest in model.encoders.fingerprints.items()}
    return {"denoiser_fingerprint": fingerprint(model.denoiser), **encoders}


def _fetch_published(name: str, family: Family, *, with_encoders: bool) -> hub_names.HubName:
    """Fetch a model, or the part of one that is there: its UNet, or a single file. Raises WeightsError."""
    network = list_denoiser_files(family)
    denoiser_alone = dataclasses.replace(
        network, optional_files=("model_index.json", EXPORT_FILE, *network.optional_files)
    )
    if with_encoders:
        encoders = list_encoder_files(family)
        networks = (*network.networks, *encoders.networks)
        need = dataclasses.replace(denoiser_alone, networks=networks, whole_folders=encoders.whole_folders)
        with contextlib.suppress(WeightsError):  # it has none
            hub.resolve_name(name, need)
            return hub.fetch(name, need, key="eval.py").name
    return hub.fetch(name, denoiser_alone, key="eval.py").name


def model_keys_of_export(source: EvalSource) -> dict[str, str | int]:
    """Return what an export says of its network, as keys of a run; {}: it is no export, and the user has to give them."""
    stated = pipeline_files.read_first_json([source.path / EXPORT_FILE]) if source.kind == "diffusers" else {}
    keys = ("family", "preset", "variant")
    num_frames = stated.get("num_frames")
    of_videos = {"num_frames": num_frames} if isinstance(num_frames, int) else {}
    return {f"model.{key}": stated[key] for key in keys if isinstance(stated.get(key), str)} | of_videos


def has_encoders(source: EvalSource) -> bool:
    """True where published weights include an autoencoder or a text encoder."""
    if source.kind == "diffusers":
        return any((source.path / folder).is_dir() for folder in ENCODER_FOLDERS)
    try:
        return any(name.startswith(ENCODER_PREFIXES) for name in open_weights(source.path).entries)
    except ValueError:
        return True  # reported where its weights are read


def published_settings(
    source: EvalSource,
    typed: set[str],
    *,
    model: ModelConfig,
    objective: ObjectiveConfig,
    evaluation: EvalConfig,
    image_size: Pixels,
) -> dict[str, Any]:
    """Return the sections and the image size for published weights, by their keys in a run's configuration.

    Size and prediction come from the weights' folder, unless keys set them.

    Args:
        typed: keys set on the command line.
        model, objective, evaluation, image_size: as configured so far.
    """
    encoders = str(source.path) if has_encoders(source) else None
    model = dataclasses.replace(model, weights=model.weights or encoders, denoiser=str(source.path))
    stated = pipeline_files.read_stated_objective(source.path)
    stated = {key: value for key, value in stated.items() if f"objective.{key}" not in typed}
    if source.kind == "file" and evaluation.weights is None:
        has_ema = pipeline_files.has_ema_weights(source.path)
        evaluation = dataclasses.replace(evaluation, weights="ema" if has_ema else "training")
    return {
        "model": model,
        "objective": dataclasses.replace(objective, **stated),
        "eval": evaluation,
        "image_size": image_size if "image_size" in typed else _size_of(source, model) or image_size,
    }


def _size_of(source: EvalSource, model: ModelConfig) -> ImageSize | None:
    """Return the size of the images that published weights are for; None: they do not say."""
    exported = pipeline_files.read_first_json([source.path / EXPORT_FILE]).get("image_size")
    if exported is not None:
        with contextlib.suppress(ValueError):
            return parse_size(exported)
    sample_size: Any = pipeline_files.read_unet_config(source.path).get("sample_size")
    sides = sample_size[::-1] if isinstance(sample_size, list) else [sample_size] * 2  # it has the height first
    if [type(side) for side in sides] != [int, int]:
        return None
    with contextlib.suppress(ValueError):  # of the family: reported elsewhere
        scale = load_family(model.family, model.preset, model.variant).pixels_per_latent
        return (sides[0] * scale, sides[1] * scale)
    return None


SCHEDULE_KEYS = ("num_train_timesteps", "beta_schedule", "beta_start", "beta_end")


def published_problems(source: EvalSource, model: ModelConfig, weights: str | None) -> list[tuple[str, str]]:
    """(key, message) for what keeps published weights from being sampled, apart from their names and shapes.

    Args:
        weights: which of a file's are wanted, ema or training; None: the EMA weights if there are any.
    """
    problems = []
    if model.weights is None:
        text = f"not given, and {source.address} has no autoencoder and no text encoder"
        todo = "Give those that it was trained with: folder, file or name on the hub"
        problems.append(("model.weights", f"{text}. {todo}."))
    if weights == "ema" and source.kind == "file" and not pipeline_files.has_ema_weights(source.path):
        problems.append(("eval.weights", f"ema, but {source.address} has no model_ema.*. Set eval.weights=training."))
    stated = pipeline_files.read_scheduler_config(source.path)
    differing = {key: stated[key] for key in SCHEDULE_KEYS if stated.get(key, SCHEDULE[key]) != SCHEDULE[key]}
    if differing:
        values = ", ".join(f"{key} {printable(str(value))}, not {SCHEDULE[key]}" for key, value in differing.items())
        text = f"{source.address} was trained with another schedule: {values}. No sampler here has it."
        problems.append(("eval.sampler", text))
    return problems


def log_assumed_prediction(source: EvalSource, prediction: str | None) -> None:
    """Log what is assumed where published weights do not say what they predict."""
    if source.kind in ("diffusers", "file") and not pipeline_files.read_stated_objective(source.path):
        text = f"{source.address} does not say what its network predicts: taken to be {prediction}"
        log.info(f"eval: {text}. Set objective.prediction=epsilon, or v, where that is wrong.")


# --- a folder of images ---


def match_prompts(paths: Sequence[Path], prompt_set: PromptSet) -> list[Prompt]:
    """Return each image's prompt: the last number in its name is the prompt's id, or else, for all images, its image_id.

    Raises:
        ValueError: an image has no prompt, or several with its image_id; two images have the same; or a prompt has no image.
    """
    numbers = [int((re.findall(r"\d+", path.stem) or ["-1"])[-1]) for path in paths]
    by_id = {prompt.number: prompt for prompt in prompt_set.prompts}
    by_image = {prompt.image_id: prompt for prompt in prompt_set.prompts}
    are_ids = sum(n in by_id for n in numbers) >= sum(n in by_image for n in numbers)
    table, column = (by_id, "id") if are_ids else (by_image, "image_id")
    if unmatched := [path.name for path, number in zip(paths, numbers, strict=True) if number not in table]:
        todo = "Give the prompts that the images are of; an image's name ends in its prompt's id, e.g. 770337.png"
        raise ValueError(f"eval.prompts: no {column} for {join_first(unmatched, 3)}. {todo}.")
    images, prompts = Counter(numbers), Counter(prompt.image_id for prompt in prompt_set.prompts)
    if repeated := [path.name for path, number in zip(paths, numbers, strict=True) if images[number] > 1]:
        raise ValueError(f"{join_first(repeated, 3)}: several images have one {column}. Give one image a prompt.")
    if several := [str(number) for number in numbers if prompts[number] > 1 and not are_ids]:
        todo = "Name the images after their prompt's id, or give a file with one prompt an image"
        raise ValueError(f"eval.prompts: several prompts of image_id {join_first(several, 3)}. {todo}.")
    if missing := [str(number) for number in table if number not in images]:
        todo = "Give the images that are missing, or a file of prompts without theirs"
        raise ValueError(f"eval.prompts: no image for {column} {join_first(missing, 3)}. {todo}.")
    return [table[number] for number in numbers]


def digest_files(paths: Sequence[Path]) -> str:
    """Return 32 hex digits over the names and bytes of files."""
    digest = xxhash.xxh3_128()
    for path in paths:
        digest.update(path.name)
        digest.update(path.read_bytes())
    return digest.hexdigest()
