"""Write a run's model for use elsewhere: a diffusers pipeline folder, or a single file.

    python export.py runs/NAME OUT                           # a folder: DiffusionPipeline.from_pretrained("OUT")
    python export.py runs/NAME OUT snapshot=im512000         # its snapshot after 512,000 images; ba1000: a full checkpoint
    python export.py runs/NAME/checkpoints/weights-im000000512000-DIGEST.pt OUT weights=training
    python export.py runs/NAME model.safetensors             # its makers' layout, for tools that do not know diffusers
    python export.py runs/NAME adapter.safetensors lora=separate   # of a LoRA run, for diffusers' load_lora_weights
    python export.py runs/NAME adapter.safetensors lora=comfyui    # for ComfyUI and A1111
    python export.py runs/NAME OUT lora=separate push_to_hub=OWNER/NAME   # a folder with the adapter and its card
    python export.py runs/NAME OUT push_to_hub=OWNER/NAME    # and to the Hugging Face Hub, as a private model

The folder has the denoiser, the run's frozen encoders, its tokenizers, the scheduler of its evaluations, a model card
(README.md), the run's configuration (run_config.yaml, without secrets) and export.json: what was exported, with fingerprints.
It needs nothing of this project, and makes the images of the run's evaluations.

A run with an adapter (lora.rank) needs its base again, and writes both as one model unless lora=separate or comfyui.

OUT may be an earlier export of the same run, which is replaced when the new one is whole; anything else there is refused.
Exit code: 0, 2 when something cannot be exported (each problem on a line of stderr), 1 when it failed otherwise.
"""

from __future__ import annotations

if __name__ == "__main__":  # the imports below take seconds, and an interrupt in them never reaches main
    from common import command_help, interrupts

    interrupts.print_on_interrupt("export.py: interrupted. No partial export is left. The same command starts over.")
    command_help.answer_help(__file__)

import contextlib
import dataclasses
import json
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from omegaconf import OmegaConf
from torch import Tensor

from checkpointing.files import FULL, NAME, WEIGHTS, list_checkpoints, number_of, read_outline
from common import errors, masking
from common.command import command, start
from common.command_line import Assignment, CommandLine, Problem, leaves, parse_command_line
from common.errors import ConfigError
from common.files import atomic_folder, atomic_path, read_regular, write_atomic, write_json
from common.log import EVERY_RANK, log
from common.value_types import ImageSize
from config import load, to_yaml
from evaluation.scorer import EvalConfig
from evaluation.sources import EXPORT_FILE, load_snapshot
from evaluation.table import read_rows
from families import encoders, load_family, lora, pipeline_files
from families.encoders import ModelConfig, default_weights, model_problems
from families.lora import LoraConfig
from families.sampling import MIN_STEPS, default_sampler, sampling_problems
from families.spec import Family
from model import LatentDiffusion
from reports.model_card import Card
from run_folder.environment import commit
from run_folder.files import (
    CONFIG,
    ENVIRONMENT,
    check_record,
    evaluations_of,
    masked_text,
    read_files,
    read_object,
    read_summary,
    run_id_of,
)
from run_folder.history import result_line
from training import initial_weights
from training.config import RunConfig, build
from weights.files import WEIGHT_SUFFIXES, open_weights
from weights.hub import upload, upload_problem
from weights.hub_names import parse_hub_name
from weights.published import Networks
from weights.tensors import fingerprint

SCHEMA = 1
RUN_CONFIG = "run_config.yaml"  # not config.yaml: a folder with that is a run
CAPTION = "a photograph of an astronaut riding a horse"
UNREAD = ("run_name", "run_folder", "model.denoiser", "data.", "optimizer.", "schedule.", "save.", "target.")
UNREAD += ("validation.", "samples.", "measure.", "profile.", "loggers.", "mlperf.")
UNREAD += ("eval.prompts", "eval.statistics", "eval.inception", "eval.clip", "eval.cmmd")
"""Keys that the model does not depend on: an unset environment variable in them is ignored."""


@dataclass(frozen=True)
class EncodersConfig:
    """The frozen encoders, and the base of an adapter."""

    weights: str | None = None
    """The run's frozen encoders, where they have moved. null: where the run has them."""
    denoiser: str | None = None
    """The denoiser that a LoRA run has its adapter on, where it has moved. null: where the run has it."""


ADAPTER_FILE = "pytorch_lora_weights.safetensors"  # the name that load_lora_weights looks for in a folder
ADAPTER_TENSORS = {"separate": lora.tensors, "comfyui": lora.comfyui_tensors}


@dataclass(frozen=True)
class ExportConfig:
    """What is exported, and how."""

    weights: Literal["ema", "training"] | None = None
    """Which weights. null: as the run is scored (eval.weights)."""
    snapshot: str = "last"
    """last: the newest snapshot or checkpoint; im512000: the snapshot after so many images; ba1000: the full checkpoint."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type in which the weights are stored."""
    lora: Literal["merged", "separate", "comfyui"] = "merged"
    """A run with LoRA: its adapter merged into its base; or alone: separate for diffusers, comfyui."""
    push_to_hub: str | None = None
    """OWNER/NAME on the Hugging Face Hub, to which the folder is uploaded too."""
    private: bool = True
    """A new model on the hub is private."""
    model: EncodersConfig = field(default_factory=EncodersConfig)

    def problems(self, out: Path) -> list[Problem]:
        """Return what cannot be, whatever the run is."""
        if self.lora == "comfyui" and not is_ldm(out):
            text = f"lora: {self.lora}, but {out} is not a file name: its adapter is one file. Give FILE.safetensors."
            return [Problem(text, ("lora",))]
        if self.push_to_hub is None:
            text = "private: false, but nothing is uploaded to the hub. Give push_to_hub=OWNER/NAME, or leave it out."
            return [] if self.private else [Problem(text, ("private",))]
        text = upload_problem(self.push_to_hub)
        if is_ldm(out):
            text = f"{self.push_to_hub}, but {out} is a single file. Give a folder: its model card goes with it."
        return [Problem(f"push_to_hub: {text}", ("push_to_hub",))] if text else []


def is_ldm(out: Path) -> bool:
    """True for the name of an LDM file; any other is a folder's."""
    return out.suffix.lower() == ".safetensors"


# --- which run, which weights ---


def find_run(address: str) -> tuple[Path, Path | None]:
    """Return a run's folder, and the checkpoint where one is named. Raises ConfigError: there is no run."""
    path = Path(address).expanduser()
    file = path if NAME.fullmatch(path.name) and path.exists() else None
    run = path.parent.parent if file else path.parent if path.name == "checkpoints" else path
    if (run / CONFIG).is_file():
        return run, file
    todo = "Give a run (runs/NAME), or a checkpoint in its folder (runs/NAME/checkpoints/weights-im...pt)"
    what = f"{address} is not in a run's folder" if file else f"{address} is not a run"
    raise ConfigError([f"{what}: {run} has no {CONFIG}. {todo}."])


def find_checkpoint(run: Path, snapshot: str) -> Path:
    """Return the checkpoint that `snapshot` names. Raises ConfigError: there is none."""
    snapshots, full = (list_checkpoints(run / "checkpoints", kind) for kind in (WEIGHTS, FULL))
    by_name = {f"{path.name.split('-')[1][:2]}{number_of(path)}": path for path in snapshots + full}
    if not by_name:
        todo = "Train it with save.every_images or save.snapshot_every_images"
        raise ConfigError([f"{run} has no snapshot or checkpoint to export. {todo}."])
    if snapshot == "last":
        if snapshots and full:  # a full checkpoint's name has its batch alone
            return full[0] if read_outline(full[0])["progress"]["images"] > number_of(snapshots[0]) else snapshots[0]
        return (snapshots or full)[0]
    match = re.fullmatch(r"(im|ba)0*(\d+)", snapshot)
    path = by_name.get(f"{match[1]}{match[2]}") if match else None
    if path is None:
        text = f"snapshot: {run} has no '{masking.to_printable(snapshot)[:80]}'"
        raise ConfigError([f"{text}. It has: last, {', '.join(by_name)}."])
    return path


def read_run_config(run: Path, weights: str | None, base: str | None = None) -> RunConfig:
    """Return a run's configuration. Raises ConfigError.

    Args:
        weights: the run's encoders, where they have moved; None: where the run has them.
        base: the same of the denoiser that its adapter was trained on.
    """
    check_record(run)
    of_run, unreadable = read_files(run)
    if unreadable:
        raise ConfigError([problem.text for problem in unreadable])
    moved = [Assignment("command line", "model.weights", weights, "model.weights", weights)] if weights else []
    has_adapter = any(at.key == "lora.rank" and at.value is not None for at in of_run)
    if base is not None and not has_adapter:
        raise ConfigError([f"model.denoiser: {base}, but {run} has no adapter, and needs no base. Leave it out."])
    if base is not None or not has_adapter:  # where it has none it may be gone, and is not needed
        moved.append(Assignment("export.py", "model.denoiser", base, "model.denoiser"))
    config = load(
        RunConfig,
        CommandLine(None, [*of_run, *moved], False, []),
        check=lambda config: _model_problems(config.model, config.size, is_real=not config.data.synthetic),
        unread=UNREAD,
    )
    return dataclasses.replace(config, model=_with_encoders(config.model, is_real=not config.data.synthetic))


def _with_encoders(config: ModelConfig, *, is_real: bool) -> ModelConfig:
    """Return the section with the encoders in place of null; `is_real`: the run's data are not synthetic."""
    family = load_family(config.family, config.preset, config.variant)
    return dataclasses.replace(config, weights=config.weights or default_weights(family, is_real=is_real))


def _model_problems(config: ModelConfig, size: ImageSize, *, is_real: bool) -> list[Problem]:
    problems = model_problems(config, size, needs_encoders=False)
    return problems or model_problems(_with_encoders(config, is_real=is_real), size, needs_encoders=False)


# --- what it is ---


def describe_export(
    run: Path,
    model: LatentDiffusion,
    progress: Mapping[str, Any],
    masked_keys: Mapping[str, Any],
    *,
    model_config: ModelConfig,
    lora_config: LoraConfig,
    evaluation: EvalConfig,
    size: ImageSize,
    seed: int,
    precision: str,
) -> dict[str, Any]:
    """Return what export.json says.

    Args:
        progress: of the run at the exported weights, and which these are.
        masked_keys: key -> value of the run's files, without secrets.
        model_config, lora_config, evaluation, size, seed, precision: of the run.
    """
    prediction, zero_terminal_snr = model.objective.prediction, model.objective.zero_terminal_snr
    sampler = evaluation.sampler or default_sampler(prediction)
    trained_on: dict[str, Any] = dict(prediction=prediction, zero_terminal_snr=zero_terminal_snr)
    if sampling_problems(sampler, MIN_STEPS, 1.0, **trained_on):  # such a run was never sampled
        sampler = default_sampler(prediction)
    (width, height, *num_frames), guidance = evaluation.image_size_or(size), evaluation.guidances()[0]
    return {
        "schema": SCHEMA,
        **_identity(run),
        **{key: progress[key] for key in ("snapshot", "batch", "images", "weights")},
        "family": model.family.name,
        "variant": model.family.variant,
        "preset": model_config.preset,
        "image_size": [width, height],
        "num_frames": num_frames[0] if num_frames else None,
        "frames_per_sec": (masked_keys.get("data.fps") or model.family.frames_per_sec) if num_frames else None,
        "prediction": prediction,
        "zero_terminal_snr": zero_terminal_snr,
        "sampler": sampler,
        "steps": evaluation.steps,
        "guidance": guidance,
        "pipeline": pipeline_files.get_pipeline(model.family).name,
        "pipeline_call": model.family.pipeline_call((width, height, *num_frames), guidance),
        "seed": seed,
        "precision": precision,
        "encoders": masking.restore_interpolations({"model.weights": model_config.weights})["model.weights"],
        "denoiser_start": masked_keys.get("model.denoiser"),
        "denoiser_fingerprint": fingerprint(model.denoiser),
        "lora": dataclasses.asdict(lora_config) if lora_config.is_given else None,
        **{f"{name}_fingerprint": digest for name, digest in model.encoders.fingerprints.items()},
        "run_commit": read_object(run / ENVIRONMENT)[0].get("commit"),
        "commit": commit(),
    }


def scores_of(run: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scores that a run has of the exported weights, each once."""
    rows = [*evaluations_of(run), *read_rows(run / "eval.jsonl")]
    of_weights = [row for row in rows if (row["images"], row.get("weights")) == (facts["images"], facts["weights"])]
    unique = {
        json.dumps([row.get(key) for key in ("guidance", "steps", "sampler", "fid", "clip")]): row for row in of_weights
    }
    return list(unique.values())


def caption_of(run: Path) -> str:
    """Return the first caption of a run's sample grid, or another one."""
    try:
        return read_regular(run / "samples/captions.txt").decode().splitlines()[0][:200] or CAPTION
    except (OSError, ValueError, IndexError):
        return CAPTION


# --- where it goes ---


def output_problem(out: Path, run: Path) -> str | None:
    """Say why nothing can be written there, or None: it is free, or has an earlier export of the same run."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir()) and not is_ldm(out)):
        return None
    text, identity = "is no export", _identity(run)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        earlier = _facts_in_file(out) if is_ldm(out) else json.loads(read_regular(out / EXPORT_FILE))
        unknown = [] if is_ldm(out) else sorted(_files(out) - {*earlier["files"], EXPORT_FILE})
        if {key: earlier[key] for key in identity} != identity:
            text = f"is an export of another run, {masking.to_printable(str(earlier['run_name']))[:80]}"
        elif unknown:
            text = f"has files that no export has: {', '.join(map(masking.to_printable, unknown[:3]))}"
        else:
            return None
    return f"{out} exists and {text}. Give another name, or remove it."


def _identity(run: Path) -> dict[str, Any]:
    return {"run_name": run.resolve().name, "run_id": run_id_of(run)}


def _facts_in_file(path: Path) -> dict[str, Any]:
    from safetensors import safe_open

    open_weights(path)  # whose messages are ValueErrors
    with safe_open(path, framework="pt") as file:
        return json.loads((file.metadata() or {})["easel"])


def _files(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


# --- the command ---


def export(address: str, out: Path, config: ExportConfig) -> dict[str, Any]:
    """Write a run's model and return what was written. Raises ValueError: it cannot be exported; OSError: nor written."""
    began = time.monotonic()
    if out.suffix in WEIGHT_SUFFIXES and not is_ldm(out):
        raise ConfigError([f"{out}: no {out.suffix} file is written. Give FILE.safetensors, or a folder."])
    run, file = find_run(address)
    if problem := output_problem(out, run):
        raise ConfigError([problem])
    if file and config.snapshot != "last":
        raise ConfigError([f"snapshot: {config.snapshot}, but {file} is a snapshot. Give its run, or no snapshot."])
    path = file or find_checkpoint(run, config.snapshot)
    run_config = read_run_config(run, config.model.weights, config.model.denoiser)
    if config.lora != "merged" and not run_config.lora.is_given:
        raise ConfigError([f"lora: {config.lora}, but {run} has no adapter (lora.rank). Leave it out."])
    run_config = dataclasses.replace(run_config, model=encoders.fetch_model_weights(run_config.model))
    model = build(run_config)
    if run_config.lora.is_given:  # in float32, whatever the run computes in
        base, seed = run_config.model.denoiser, run_config.seed
        initial_weights.add_adapter(model, base, run_config.lora, precision="fp32", seed=seed)
    progress = load_snapshot(model, path, config.weights or run_config.eval.weights, weights_key="weights")
    adapter = None if config.lora == "merged" else ADAPTER_TENSORS[config.lora](model)
    if model.adapter is not None:
        lora.merge(model)
    networks = pipeline_files.collect_networks(model.family, model.denoiser, model.encoders.modules)
    for note in model.encoders.notes:
        log.info(f"model.weights: {note}")

    text = masked_text(run)
    masked_keys = dict(leaves(OmegaConf.to_container(OmegaConf.create(text))))
    facts = describe_export(
        run,
        model,
        progress,
        masked_keys,
        model_config=run_config.model,
        lora_config=run_config.lora,
        evaluation=run_config.eval,
        size=run_config.size,
        seed=run_config.seed,
        precision=run_config.precision or "fp32",
    )
    facts["dtype"] = config.dtype
    if adapter is not None:
        adapter = {key: pipeline_files.cast_for_storage(key, tensor, config.dtype) for key, tensor in adapter.items()}
    name = config.push_to_hub or out.resolve().name
    if adapter is not None and is_ldm(out):
        num_bytes = write_file(out, adapter, facts)
    elif adapter is not None:
        base_model = getattr(parse_hub_name(facts["denoiser_start"]), "repo", None)
        card = Card(name, facts, masked_keys, caption_of(run), is_adapter=True, base_model=base_model)
        num_bytes = write_adapter_folder(out, adapter, facts, card=card, run_config=text)
    elif is_ldm(out):
        num_bytes = write_file(out, pipeline_files.collect_single_file_tensors(networks, config.dtype), facts)
    else:
        scored = dict(scores=scores_of(run, facts), summary=read_summary(run))
        card = Card(name, facts, masked_keys, caption_of(run), **scored)
        size = run_config.eval.image_size_or(run_config.size)
        num_bytes = write_folder(out, model.family, networks, facts, size=size, card=card, run_config=text)
    return _summarize(out, facts, num_bytes, began)


def write_folder(
    out: Path,
    family: Family,
    networks: Networks,
    facts: dict[str, Any],
    *,
    size: ImageSize,
    card: Card,
    run_config: str,
) -> int:
    """Write a pipeline's folder and what describes it; return its bytes. Raises OSError, or ValueError: see `save_pipeline`.

    Args:
        facts: of export.json; gets the key `code`, which the card reads too.
        size: of the pipeline's images or videos.
        run_config: the run's configuration, without secrets.
    """
    sampled = dict(zero_terminal_snr=facts["zero_terminal_snr"], size=size)
    scheduler = family.pipeline_scheduler(facts["sampler"], facts["prediction"], **sampled)
    with atomic_folder(out) as folder:
        how = dict(size=size, dtype=facts["dtype"])
        facts["code"] = pipeline_files.save_pipeline(folder, family, networks, scheduler, **how)
        return _describe_folder(folder, facts, card=card, run_config=run_config)


def write_adapter_folder(
    out: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any], *, card: Card, run_config: str
) -> int:
    """Write an adapter under diffusers' file name and what describes it; return the folder's bytes. Raises OSError."""
    with atomic_folder(out) as folder:
        pipeline_files.write_safetensors(folder / ADAPTER_FILE, tensors, easel=json.dumps(facts))
        return _describe_folder(folder, facts, card=card, run_config=run_config)


def _describe_folder(folder: Path, facts: Mapping[str, Any], *, card: Card, run_config: str) -> int:
    write_atomic(folder / "README.md", card.text())
    write_atomic(folder / RUN_CONFIG, run_config)
    write_json(folder / EXPORT_FILE, {**facts, "files": sorted(_files(folder))})
    return sum((folder / name).stat().st_size for name in _files(folder))


def write_file(out: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> int:
    """Write tensors and facts into a single file; return its bytes. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(out) as temporary:
        pipeline_files.write_safetensors(temporary, tensors, easel=json.dumps(facts))
    return out.stat().st_size


def _summarize(out: Path, facts: dict[str, Any], size: int, began: float) -> dict[str, Any]:
    weights = {key: facts[key] for key in ("snapshot", "weights", "denoiser_fingerprint")}
    return {"out": str(out), **weights, "bytes": size, "seconds": round(time.monotonic() - began, 2)}


def export_and_push(address: str, out: Path, config: ExportConfig) -> dict[str, Any]:
    """Export, and bring the folder to the hub where that is wanted."""
    result = export(address, out, config)
    if config.push_to_hub is None:
        return result
    message = f"{masking.to_printable(Path(result['out']).name)}: {result['snapshot']}, {result['weights']} weights"
    return {**result, "hub": upload(out, config.push_to_hub, private=config.private, message=message)}


@command(keys=ExportConfig)
def main(argv: Sequence[str]) -> int:
    """Read the command line, export, print a line."""
    command_line = parse_command_line(argv, {}, takes_arguments=True)
    try:
        out = Path(command_line.arguments[-1]).expanduser() if command_line.arguments else Path()
        config = load(ExportConfig, command_line, check=lambda config: config.problems(out))
        if command_line.print_config:
            print(to_yaml(config), end="")
            return 0
        if len(command_line.arguments) != 2:
            arguments = " ".join(command_line.arguments) or "nothing"
            raise ConfigError(
                [f"export.py: {arguments}. Give a run and a folder or file: python export.py runs/NAME OUT."]
            )
        print(result_line(export_and_push(command_line.arguments[0], out, config)), flush=True)
    except ValueError as error:
        log.error(error, extra=EVERY_RANK)
        return 2
    except OSError as error:
        text = f"{error.filename or out} cannot be written: {error.strerror}" if error.errno else str(error)
        log.error(f"{text}. No partial export is left. Make room, or give another path.", extra=EVERY_RANK)
        return 1
    except Exception as error:
        errors.report_error(error, debug=False)
        return 1
    return 0


if __name__ == "__main__":
    start(main)
