"""Write a run's model for use elsewhere: a diffusers pipeline folder, or a single file.

    python export.py runs/NAME OUT                           # a folder: DiffusionPipeline.from_pretrained("OUT")
    python export.py runs/NAME OUT snapshot=im512000         # its snapshot after 512,000 images; ba1000: a full checkpoint
    python export.py runs/NAME/checkpoints/weights-im000000512000-DIGEST.pt OUT weights=training
    python export.py runs/NAME model.safetensors             # its makers' layout, for tools that do not know diffusers
    python export.py runs/NAME adapter.safetensors lora=separate   # of a LoRA run, for diffusers' load_lora_weights
    python export.py runs/NAME OUT push_to_hub=OWNER/NAME    # and to the Hugging Face Hub, as a private model

The folder has the denoiser, the run's frozen encoders, its tokenizers, the scheduler of its evaluations, a model card
(README.md), the run's configuration (run_config.yaml, without secrets) and export.json: what was exported, with fingerprints.
It needs nothing of this project, and makes the images of the run's evaluations.

A run with an adapter (lora.rank) needs its base again, and writes both as one model unless lora=separate.

OUT may be an earlier export of the same run, which is replaced when the new one is whole; anything else there is refused.
Exit code: 0, 2 when something cannot be exported (each problem on a line of stderr), 1 when it failed otherwise.
"""

from __future__ import annotations

if __name__ == "__main__":  # the imports below take seconds, and an interrupt in them never reaches main
    from cli import interrupts

    interrupts.told("export.py: interrupted. Nothing of a new export is left. The same command begins anew.")

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

from cli import errors, masking
from cli.command import command, start
from cli.command_line import Assignment, CommandLine, Problem, leaves, parse_command_line
from cli.errors import ConfigError
from cli.files import read_regular, whole, whole_folder, write_json, write_whole
from cli.log import EVERY_RANK, log
from config import load, to_yaml
from evaluation.score_table import read_rows
from model import LatentDiffusion
from record.checkpoint_files import FULL, NAME, WEIGHTS, listed, outline
from record.config_file import CONFIG, masked_text, read_files
from record.environment import commit
from record.files import check_record, evaluations_of, read_summary, run_id_of
from record.summary import result_line
from reports.model_card import Card
from training import adapter, warm_start
from training.places import EXPORT
from training.run_config import RunConfig, build
from training.snapshots import load_snapshot
from weights.files import SUFFIXES, open_weights
from weights.hub import upload, upload_problem
from weights.tensors import fingerprint
from zoo import load_family, model_config, pipeline_folder
from zoo.encoders import own_weights
from zoo.model_config import model_problems
from zoo.sampling import MIN_STEPS, sampling_problems, usual_sampler
from zoo.spec import as_size

SCHEMA = 1
FACTS, OF_RUN = EXPORT, "run_config.yaml"  # not config.yaml: a folder with that is a run
CAPTION = "a photograph of an astronaut riding a horse"
UNREAD = ("run_name", "run_folder", "model.denoiser", "data.", "optimizer.", "schedule.", "save.", "target.")
UNREAD += ("validation.", "samples.", "measure.", "profile.", "loggers.", "mlperf.")
UNREAD += ("eval.prompts", "eval.statistics", "eval.inception", "eval.clip")
"""Of a run's files: where a variable that stands there is not set, its model is the same."""


@dataclass(frozen=True)
class EncodersConfig:
    """The frozen encoders, and the base of an adapter."""

    weights: str | None = None
    """The run's frozen encoders, where they have moved. null: where the run has them."""
    denoiser: str | None = None
    """The denoiser that a LoRA run has its adapter on, where it has moved. null: where the run has it."""


@dataclass(frozen=True)
class ExportConfig:
    """What is exported, and how."""

    weights: Literal["ema", "training"] | None = None
    """Which weights. null: as the run is scored (eval.weights)."""
    snapshot: str = "last"
    """last: the newest snapshot or checkpoint; im512000: the snapshot after so many images; ba1000: the full checkpoint."""
    dtype: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Type in which the weights are stored."""
    lora: Literal["merged", "separate"] = "merged"
    """A run with LoRA: its adapter merged into its base; or alone, one file for diffusers' load_lora_weights."""
    push_to_hub: str | None = None
    """OWNER/NAME on the Hugging Face Hub, which the folder is brought to, too."""
    private: bool = True
    """A new model on the hub is private."""
    model: EncodersConfig = field(default_factory=EncodersConfig)

    def problems(self, out: Path) -> list[Problem]:
        """Return what cannot be, whatever the run is."""
        if self.lora == "separate" and not is_ldm(out):
            text = f"lora: separate, but {out} is no file's name: an adapter is one file. Give FILE.safetensors."
            return [Problem(text, ("lora",))]
        if self.push_to_hub is None:
            text = "private: false, but nothing is brought to the hub. Give push_to_hub=OWNER/NAME, or leave it out."
            return [] if self.private else [Problem(text, ("private",))]
        text = upload_problem(self.push_to_hub)
        if is_ldm(out):
            text = f"{self.push_to_hub}, but {out} is a single file. Give a folder: its model card goes with it."
        return [Problem(f"push_to_hub: {text}", ("push_to_hub",))] if text else []


def is_ldm(out: Path) -> bool:
    """True for the name of an LDM file; any other is a folder's."""
    return out.suffix.lower() == ".safetensors"


# --- which run, which weights ---


def run_of(place: str) -> tuple[Path, Path | None]:
    """Return a run's folder, and the checkpoint where one is named. Raises ConfigError: there is no run."""
    path = Path(place).expanduser()
    file = path if NAME.fullmatch(path.name) and path.exists() else None
    run = path.parent.parent if file else path.parent if path.name == "checkpoints" else path
    if (run / CONFIG).is_file():
        return run, file
    ways = "Give a run (runs/NAME), or a checkpoint in its folder (runs/NAME/checkpoints/weights-im...pt)"
    what = f"{place} is in no run's folder" if file else f"{place} is no run"
    raise ConfigError([f"{what}: {run} has no {CONFIG}. {ways}."])


def chosen(run: Path, wanted: str) -> Path:
    """Return the checkpoint that `snapshot` names. Raises ConfigError: there is none."""
    snapshots, full = (listed(run / "checkpoints", kind) for kind in (WEIGHTS, FULL))
    there = {f"{path.name.split('-')[1][:2]}{_number(path)}": path for path in snapshots + full}
    if not there:
        ways = "Train it with save.every_images or save.snapshot_every_images"
        raise ConfigError([f"{run} has no snapshot or checkpoint to export. {ways}."])
    if wanted == "last":
        if snapshots and full:  # a full checkpoint's name has its batch alone
            return full[0] if outline(full[0])["progress"]["images"] > _number(snapshots[0]) else snapshots[0]
        return (snapshots or full)[0]
    found = re.fullmatch(r"(im|ba)0*(\d+)", wanted)
    path = there.get(f"{found[1]}{found[2]}") if found else None
    if path is None:
        given = f"snapshot: {run} has no '{masking.printable(wanted)[:80]}'"
        raise ConfigError([f"{given}. It has: last, {', '.join(there)}."])
    return path


def _number(path: Path) -> int:
    return int(path.name.split("-")[1][2:])


def read_run(run: Path, weights: str | None, base: str | None = None) -> RunConfig:
    """Return a run's configuration. Raises ConfigError.

    Args:
        weights: the place of its encoders; None: its own.
        base: that of the denoiser that its adapter was trained on; None: its own.
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

    def complete(config: RunConfig) -> RunConfig:
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        own = config.model.weights or own_weights(family, is_real=not config.data.synthetic)
        return dataclasses.replace(config, model=dataclasses.replace(config.model, weights=own))

    def check(config: RunConfig) -> list[Problem]:
        found = model_problems(config.model, config.size, encoders_wanted=False)
        return found or model_problems(complete(config).model, config.size, encoders_wanted=False)

    words = CommandLine(None, [*of_run, *moved], False, [])
    return complete(load(RunConfig, words, check=check, unread=UNREAD))


# --- what it is ---


def facts_of(
    run: Path, config: RunConfig, model: LatentDiffusion, progress: dict[str, Any], shown: dict[str, Any]
) -> dict[str, Any]:
    """Return what export.json says. `shown`: key -> value of the run's files, without secrets."""
    prediction, zero_terminal_snr = model.objective.prediction, model.objective.zero_terminal_snr
    sampler = config.eval.sampler or usual_sampler(prediction)
    trained_on: dict[str, Any] = dict(prediction=prediction, zero_terminal_snr=zero_terminal_snr)
    if sampling_problems(sampler, MIN_STEPS, 1.0, **trained_on):  # such a run was never sampled
        sampler = usual_sampler(prediction)
    size, guidance = as_size(config.eval.image_size or config.image_size), config.eval.guidances()[0]
    return {
        "schema": SCHEMA,
        **_identity(run),
        **{key: progress[key] for key in ("snapshot", "batch", "images", "weights")},
        "family": model.family.name,
        "variant": model.family.variant,
        "preset": config.model.preset,
        "image_size": list(size),
        "prediction": prediction,
        "zero_terminal_snr": zero_terminal_snr,
        "sampler": sampler,
        "steps": config.eval.steps,
        "guidance": guidance,
        "pipeline": pipeline_folder.pipeline_of(model.family).name,
        "pipeline_call": model.family.pipeline_call(size, guidance),
        "seed": config.seed,
        "precision": config.precision or "fp32",
        "encoders": masking.written({"model.weights": config.model.weights})["model.weights"],
        "denoiser_start": shown.get("model.denoiser"),
        "denoiser_fingerprint": fingerprint(model.denoiser),
        "lora": dataclasses.asdict(config.lora) if config.lora.is_given else None,
        **{f"{name}_fingerprint": digest for name, digest in model.encoders.fingerprints.items()},
        "run_commit": _commit_of(run),
        "commit": commit(),
    }


def _commit_of(run: Path) -> str | None:
    try:
        return json.loads(read_regular(run / "environment.json"))["commit"]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def scores_of(run: Path, facts: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the scores that a run has of the exported weights, each once."""
    rows = [*evaluations_of(run), *read_rows(run / "eval.jsonl")]
    own = [row for row in rows if (row["images"], row.get("weights")) == (facts["images"], facts["weights"])]
    unique = {json.dumps([row.get(key) for key in ("guidance", "steps", "sampler", "fid", "clip")]): row for row in own}
    return list(unique.values())


def caption_of(run: Path) -> str:
    """Return the first caption of a run's sample grid, or another one."""
    try:
        return read_regular(run / "samples/captions.txt").decode().splitlines()[0][:200] or CAPTION
    except (OSError, ValueError, IndexError):
        return CAPTION


# --- where it goes ---


def taken(out: Path, run: Path) -> str | None:
    """Say what is in the way there, or None: nothing is, or an earlier export of the same run."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir()) and not is_ldm(out)):
        return None
    text, identity = "is no export", _identity(run)
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        earlier = _facts_in_file(out) if is_ldm(out) else json.loads(read_regular(out / FACTS))
        strangers = [] if is_ldm(out) else sorted(_files(out) - {*earlier["files"], FACTS})
        if {key: earlier[key] for key in identity} != identity:
            text = f"is an export of another run, {masking.printable(str(earlier['run_name']))[:80]}"
        elif strangers:
            text = f"has files that no export has: {', '.join(map(masking.printable, strangers[:3]))}"
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


def export(place: str, out: Path, config: ExportConfig) -> dict[str, Any]:
    """Write a run's model and return what was written. Raises ValueError: it cannot be exported; OSError: nor written."""
    began = time.monotonic()
    if out.suffix in SUFFIXES and not is_ldm(out):
        raise ConfigError([f"{out}: no {out.suffix} file is written. Give FILE.safetensors, or a folder."])
    run, file = run_of(place)
    if problem := taken(out, run):
        raise ConfigError([problem])
    if file and config.snapshot != "last":
        raise ConfigError([f"snapshot: {config.snapshot}, but {file} is one. Give the run's folder, or leave it out."])
    path = file or chosen(run, config.snapshot)
    run_config = read_run(run, config.model.weights, config.model.denoiser)
    if config.lora == "separate" and not run_config.lora.is_given:
        raise ConfigError([f"lora: separate, but {run} has no adapter (lora.rank). Leave it out."])
    run_config = dataclasses.replace(run_config, model=model_config.fetched(run_config.model))
    model = build(run_config)
    if run_config.lora.is_given:  # in float32, whatever the run computes in
        warm_start.add_adapter(dataclasses.replace(run_config, precision="fp32"), model)
    progress = load_snapshot(model, path, config.weights or run_config.eval.weights, weights_key="weights")
    alone = adapter.tensors(model) if config.lora == "separate" else None
    if model.adapter is not None:
        adapter.merge(model)
    networks = pipeline_folder.networks_of(model.family, model.denoiser, model.encoders.modules)
    for note in model.encoders.notes:
        log.info(f"model.weights: {note}")

    text = masked_text(run)
    shown = dict(leaves(OmegaConf.to_container(OmegaConf.create(text))))
    facts = {**facts_of(run, run_config, model, progress, shown), "dtype": config.dtype}
    if alone is not None:
        stored = {name: pipeline_folder.in_type(name, tensor, config.dtype) for name, tensor in alone.items()}
        return _done(out, facts, write_file(out, stored, facts), began)
    if is_ldm(out):
        size = write_file(out, pipeline_folder.single_file_tensors(networks, config.dtype), facts)
    else:
        sampled = dict(zero_terminal_snr=facts["zero_terminal_snr"])
        scheduler = model.family.pipeline_scheduler(facts["sampler"], facts["prediction"], **sampled)
        with whole_folder(out) as folder:
            ways = dict(size=facts["image_size"], dtype=config.dtype)
            facts["code"] = pipeline_folder.save_folder(folder, model.family, networks, scheduler, **ways)
            scored = dict(scores=scores_of(run, facts), summary=read_summary(run))
            card = Card(config.push_to_hub or out.resolve().name, facts, shown, caption_of(run), **scored)
            write_whole(folder / "README.md", card.text())
            write_whole(folder / OF_RUN, text)
            write_json(folder / FACTS, {**facts, "files": sorted(_files(folder))})
            size = sum((folder / name).stat().st_size for name in _files(folder))
    return _done(out, facts, size, began)


def write_file(out: Path, tensors: Mapping[str, Tensor], facts: dict[str, Any]) -> int:
    """Write tensors and facts into a single file; return its bytes. Raises OSError."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with whole(out) as temporary:
        pipeline_folder.write_safetensors(temporary, tensors, easel=json.dumps(facts))
    return out.stat().st_size


def _done(out: Path, facts: dict[str, Any], size: int, began: float) -> dict[str, Any]:
    done = {key: facts[key] for key in ("snapshot", "weights", "denoiser_fingerprint")}
    return {"out": str(out), **done, "bytes": size, "seconds": round(time.monotonic() - began, 2)}


def export_and_push(place: str, out: Path, config: ExportConfig) -> dict[str, Any]:
    """Export, and bring the folder to the hub where that is wanted."""
    done = export(place, out, config)
    if config.push_to_hub is None:
        return done
    message = f"{masking.printable(Path(done['out']).name)}: {done['snapshot']}, {done['weights']} weights"
    return {**done, "hub": upload(out, config.push_to_hub, private=config.private, message=message)}


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Read the command line, export, print a line."""
    words = parse_command_line(argv, {}, takes_places=True)
    try:
        out = Path(words.places[-1]).expanduser() if words.places else Path()
        config = load(ExportConfig, words, check=lambda config: config.problems(out))
        if words.print_config:
            print(to_yaml(config), end="")
            return 0
        if len(words.places) != 2:
            given = " ".join(words.places) or "nothing"
            raise ConfigError([f"export.py: {given}. Give a run and a place: python export.py runs/NAME OUT."])
        print(result_line(export_and_push(words.places[0], out, config)), flush=True)
    except ValueError as error:
        log.error(error, extra=EVERY_RANK)
        return 2
    except OSError as error:
        said = f"{error.filename or out} cannot be written: {error.strerror}" if error.errno else str(error)
        log.error(f"{said}. Nothing of a new export is left. Make room, or give another place.", extra=EVERY_RANK)
        return 1
    except Exception as error:
        errors.tell(error, debug=False)
        return 1
    return 0


if __name__ == "__main__":
    start(main)
