"""Score a run, published weights or a folder of images, and plot the scores; or make images or videos of captions.

    composer eval.py runs/NAME                                     # its snapshots in order -> eval.jsonl, eval.csv, eval.png
    composer eval.py runs/NAME snapshots=to_target                 # to the first that meets target.*, and the one before it
    composer eval.py runs/NAME eval.guidance=[1.5,2,3,4,5,6,7,8] eval.resize=bicubic256 eval.statistics=...  # -> guidance.png
    composer eval.py runs/A runs/B OWNER/NAME out=compared         # several models in one table and plot
    composer -n 8 eval.py checkpoints/stable-diffusion-2-base eval.prompts=... out=published     # a diffusers folder
    composer -n 8 eval.py 512-base-ema.ckpt eval.prompts=... out=published                       # an LDM file
    composer eval.py samples/ eval.prompts=val2014_30k.tsv eval.clip=... out=scores              # a folder of images
    composer eval.py runs/NAME images=look prompts='[a red circle, "a cat, asleep"]'   # -> look/*.png
    composer eval.py runs/NAME images=look prompts=captions.txt images_per_prompt=4    # of a file, with four seeds

A run is scored with its own configuration. Keys that a score depends on can be given again (eval.*, target.*, precision,
model.weights where the encoders have moved, ...); other keys are refused. A score that eval.jsonl already has, of the same
weights and settings, is not made again. So the same command resumes a killed one, even in the middle of a score
(eval_parts/ next to the table holds its finished part). Two commands may share a table.

    snapshots   all, to_target (in order up to the first that meets the target, after `from_images`; if that is the first one
                scored, backwards to the one that does not), or last; null: last for a list of guidances or for images,
                to_target where a target is given, else all. A snapshot can also be given by its file.

The sources are those of evaluation/sources.py. For images, see evaluation/generate.py: no metric is loaded.
Exit code: 0, 2 when something cannot be scored (each problem on a line of stderr), 1 when it failed otherwise, 128 + signal
after a signal.
"""

from __future__ import annotations

from common import interrupts
from config import flatten, load, refuse_early, replace_keys

if __name__ == "__main__":
    interrupts.print_on_interrupt("eval.py: interrupted before it began. The same command starts it again.")
    refuse_early(__file__, takes_arguments=True)

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from common import dist, errors
from common.command import command, start
from common.command_line import Assignment, CommandLine, Problem, parse_command_line
from common.errors import ConfigError
from common.files import write_problem
from common.log import EVERY_RANK, log
from evaluation import plots, sources
from evaluation.generate import ImageFolder, folder_problem
from evaluation.prompts import parse_captions
from evaluation.scorer import TargetConfig, sampler_problems
from evaluation.scores import EvalKeys, ScoreRequest, score
from evaluation.sources import EvalSource
from evaluation.table import Row, ScoreTable
from families import load_family
from families.encoders import ModelConfig, model_problems
from families.spec import parse_size
from model import LatentDiffusion
from preflight.config_checks import batch_problem, speed_problems
from ranks import collectives, rendezvous
from run_folder.files import check_record, read_files
from training import initial_weights, speed
from training.config import ALIASES, RunConfig, build, resolve
from training.start import OF_EVALUATION, fetch_from_hub
from training.trainer import build_device, torch_device

DIST_TIMEOUT_SEC = 1800.0
UNREAD: tuple[str, ...] = ("run_name", "run_folder", "data.remote", "data.local", "data.metadata", "data.streams")
UNREAD += ("model.denoiser", "validation.", "loggers.", "mlperf.")
"""Keys that no score depends on: an unset environment variable in them is ignored."""


@dataclass(frozen=True)
class EvalCommand(EvalKeys, RunConfig):  # fields of the last base come first
    """A run's keys, and those of this command."""


def read_source_config(source: EvalSource, command: CommandLine) -> EvalCommand:
    """Return the configuration that a source is scored with. Raises ConfigError: with every problem at once."""
    typed = {at.key: at.value for at in command.assignments}
    makes_images, is_model = typed.get("images") is not None, source.kind != "images"
    more = [Assignment("eval.py", "eval.when", "after", "eval.when")]
    if makes_images and "eval.batch_size" not in typed:  # the same passes, whatever a run's evaluations take
        more += [Assignment("eval.py", "eval.batch_size", None, "eval.batch_size")]
    of_source: list[Assignment] = []
    if source.kind == "run":
        check_record(source.path)
        of_source, unreadable = read_files(source.path)
        if unreadable:
            raise ConfigError([problem.text for problem in unreadable])
    of_export = sources.model_keys_of_export(source)
    of_source += [Assignment(source.address, key, value, key) for key, value in of_export.items()]
    command = dataclasses.replace(command, yaml=None, assignments=[*of_source, *command.assignments, *more])

    def check(config: EvalCommand) -> list[Problem]:
        problems = config.snapshot_problems(config.eval, config.target)
        if source.snapshot is not None and config.snapshots is not None:
            problems.append(
                ("snapshots", f"{config.snapshots}, but {source.address} is one snapshot. Leave snapshots out.")
            )
        if makes_images:
            problems += _image_problems(config, source)
        else:
            problems += config.eval.problems(now=True, images_alone=not is_model)
            problems += [*config.target.problems(config.eval), *_out_problems(config, source)]
        if source.kind == "run" and "model.denoiser" in typed and not config.lora.is_given:
            problems.append(("model.denoiser", f"{source.address} has no adapter, and needs no base. Leave it out."))
        if is_model:
            config = _complete(config, source, set(typed))
            if source.kind != "run":
                problems += sources.published_problems(source, config.model, typed.get("eval.weights"))
        with_keys = [Problem(f"{key}: {text}", (key,)) for key, text in problems]
        return with_keys + (_model_problems(config, source) if is_model else [])

    config = load(EvalCommand, command, check=check, unread=UNREAD)
    return resolve(_complete(config, source, set(typed))) if is_model else config


def _image_problems(config: EvalCommand, source: EvalSource) -> list[tuple[str, str]]:
    """(key, message) for what keeps images from being made."""
    if source.kind == "images":
        possible = f"a run (runs/NAME) or its snapshot, {sources.PUBLISHED}"
        return [("images", f"{source.address} is a folder of images, without a model. Possible: {possible}.")]
    problems, folder = [], str(config.images)
    if text := folder_problem(folder) or write_problem(folder):
        problems.append(("images", text))
    try:
        parse_captions(config.prompts)
    except ValueError as error:
        problems.append(("prompts", str(error)))
    with contextlib.suppress(ValueError):  # named by model_problems
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        problems += sampler_problems(config.eval, config.objective.resolved(family.objective))
    return problems


def _out_problems(config: EvalCommand, source: EvalSource) -> list[tuple[str, str]]:
    if source.kind != "run" and config.out is None:
        return [("out", "not given. Name the folder that the table goes to.")]
    text = write_problem(config.out or str(source.path))
    return [("out", text)] if text else []


def _model_problems(config: EvalCommand, source: EvalSource) -> list[Problem]:
    """Return what keeps a source's model from being built."""
    problems = model_problems(config.model, config.size, needs_encoders=False)
    problems += _size_problems(config) + speed_problems(config, config.precision)
    if text := batch_problem(config.global_batch_size, 1, 1):
        problems.append(Problem(f"global_batch_size: {text}", ("global_batch_size",)))
    if source.kind != "run":
        problems += initial_weights.problems(config.model, config.objective.prediction)
    return problems


def _size_problems(config: EvalCommand) -> list[Problem]:
    with contextlib.suppress(ValueError):  # named by model_problems, or by the section itself
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        if family.media == "videos" and config.images is None:
            why = f"{family.name} makes videos, and FID and CLIP score are of images"
            todo = "" if family.image_columns(config.size) else " Draw some: images=FOLDER prompts=FILE."
            return [Problem(f"model.family: {why}.{todo}", ("model.family",))]
        if family.image_columns(config.size):
            why = f"{family.variant}, which starts a video from its first frame; prompts are captions alone"
            return [Problem(f"model.variant: {why}. Give a run of another variant.", ("model.variant",))]
        if config.eval.image_size is not None and (text := family.size_problem(parse_size(config.eval.image_size))):
            return [Problem(f"eval.image_size: {text}", ("eval.image_size",))]
    return []


def _complete(config: EvalCommand, source: EvalSource, typed: set[str]) -> EvalCommand:
    """Return the configuration without keys of training alone, and with what published weights say of themselves."""
    keys = [key for key in dataclasses.fields(speed.SpeedKeys) if key.name in speed.OF_TRAINING]
    plain: dict[str, Any] = {key.name: key.default for key in keys}
    config = dataclasses.replace(config, **plain)  # they change no score, and may want a GPU
    if source.kind == "run":
        return config
    sections: dict[str, Any] = dict(model=config.model, objective=config.objective, evaluation=config.eval)
    settings = sources.published_settings(source, typed, **sections, image_size=config.image_size)
    return dataclasses.replace(config, **settings)


# --- the command ---


def evaluate(command: CommandLine) -> None:
    """Score each source with its own configuration and the same keys, or make images, and plot the scores."""
    typed = {at.key: at.value for at in command.assignments}
    to_score = _find_sources(command.arguments, typed)
    makes_images = typed.get("images") is not None
    if len(to_score) > 1 and "out" not in typed and not makes_images:
        raise ConfigError(["out: not given. Several models share one table. Give its folder: out=FOLDER."])
    configs = [read_source_config(source, command) for source in to_score]
    composer_device = build_device(configs[0].precision or "fp32")
    device = torch_device(composer_device)
    rendezvous.init_process_group(composer_device, DIST_TIMEOUT_SEC)
    collectives.watch_for_abort()
    rows: list[Row] = []
    folder = Path()
    for source, config in zip(to_score, configs, strict=True):
        keys: tuple[str, ...] = () if source.kind == "images" else ("model.weights",)
        keys += ("model.denoiser",) if source.kind == "run" and config.lora.is_given else ()  # an adapter's base
        keys += () if makes_images else OF_EVALUATION
        pins = fetch_from_hub(config.model, config.eval, config.objective.prediction, keys)
        config = replace_keys(config, pins)
        if "objective.prediction" not in typed:
            sources.log_assumed_prediction(source, config.objective.prediction)
        if makes_images:
            write_images(config, source, device)
            continue
        table = ScoreTable(Path(config.out or source.path, "eval.jsonl"))
        rows += score(score_request(config, source, device), table)
        folder = table.path.parent
    with collectives.stop_together():
        if dist.get_global_rank() == 0 and not makes_images:
            plot_scores(rows, folder, configs[0].target)


def _find_sources(addresses: Sequence[str], typed: dict[str, Any]) -> list[EvalSource]:
    """Return what is at each address, once. Raises ConfigError: nothing is at one."""
    of_family: dict[str, Any] = {
        key: str(typed[f"model.{key}"]) for key in ("family", "preset", "variant") if f"model.{key}" in typed
    }
    model, eval_sources, problems = dataclasses.replace(ModelConfig(), **of_family), [], []
    for address in dict.fromkeys(addresses):
        try:
            eval_sources.append(sources.find_source(address, model, with_encoders=typed.get("model.weights") is None))
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return eval_sources


def build_model(config: EvalCommand, source: EvalSource, device: torch.device) -> LatentDiffusion:
    """Build a source's model on the device; a run's still has its initial weights."""
    model = build(config)
    if config.lora.is_given:
        precision = config.precision or "fp32"
        initial_weights.add_adapter(model, config.model.denoiser, config.lora, precision=precision, seed=config.seed)
    if source.kind != "run":
        initial_weights.load(model, str(config.model.denoiser), config.eval.weights or "training")
    model.to_device(device, config.precision or "fp32")
    speed.apply(model, config)
    return model


def score_request(config: EvalCommand, source: EvalSource, device: torch.device) -> ScoreRequest:
    """Return how a source is scored with its configuration."""
    return ScoreRequest(
        source,
        device,
        lambda: build_model(config, source, device),
        config.eval,
        config.target,
        snapshots=config.chosen_snapshots(config.eval, config.target),
        from_images=config.from_images,
        size=config.size,
        seed=config.seed,
        model_settings={"precision": config.precision, **config.objective.score_settings()},
        keys=flatten(config),
        has_own_table=config.out is None,
        has_mlperf_log=config.mlperf.enabled,
        show_progress=config.loggers.progress_bar,
    )


def write_images(config: EvalCommand, source: EvalSource, device: torch.device) -> None:
    """Make the images of a source's model that the folder does not have. All ranks call it.

    Raises:
        collectives.Signalled: a rank has received a signal; what is written stays.
    """
    assert config.images is not None
    folder = ImageFolder(
        Path(config.images).expanduser(),
        parse_captions(config.prompts),
        seeds=range(config.seed, config.seed + config.images_per_prompt),
        guidances=config.eval.guidances(),
        steps=config.eval.steps,
        sampler=config.eval.sampler,
        size=config.eval.image_size_or(config.size),
        settings={"precision": config.precision, **config.objective.score_settings()},
        fps=config.data.fps,
        batch_size=config.eval.batch_size,
        show_progress=config.loggers.progress_bar,
    )
    model = build_model(config, source, device)
    if source.kind != "run":
        folder.write(model, sources.describe_published(source, model, config.eval.weights))
        return
    paths, run = sources.snapshots_of(source), sources.describe_run(source)
    for path in paths if config.chosen_snapshots(config.eval, config.target) == "all" else paths[-1:]:
        snapshot = sources.load_snapshot(model, path, config.eval.weights)
        loaded = {"snapshot": snapshot["snapshot"], "images_seen": snapshot["images"], "weights": snapshot["weights"]}
        folder.write(model, {**run, **loaded, **sources.fingerprint_networks(model)})


def plot_scores(rows: Sequence[Row], folder: Path, target: TargetConfig) -> None:
    """Plot FID against CLIP where guidance varies, and both over images; a model whose images are not known goes across."""
    on_curve = [row for row in rows if all(row.get(key) is not None for key in ("guidance", "fid", "clip"))]
    if len({row["guidance"] for row in on_curve}) > 1:
        plots.plot_guidance(on_curve, folder / "guidance.png")
    images = [row.get("images") for row in rows]
    is_compared = None in images and len({row.get("guidance") for row in rows} - {None}) < 2
    if len(set(images) - {None}) + is_compared > 1:
        plots.plot_over_images(rows, folder / "eval.png", dataclasses.asdict(target))


@command(keys=EvalCommand)
def main(argv: Sequence[str]) -> int:
    """Read the command line, score, print a line a score; rank 0 speaks for all."""
    command = parse_command_line(argv, ALIASES, takes_arguments=True)
    debug = any(at.key == "loggers.debug" and at.value is True for at in command.assignments)
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_local_rank())
    try:
        if command.print_config:
            raise ConfigError(
                ["eval.py: --print_config is benchmark.py's. A run's is in config.yaml and overrides.yaml."]
            )
        if not command.arguments:
            possible = f"Possible: {sources.SOURCES}"
            raise ConfigError([p.text for p in command.problems] or [f"eval.py: nothing to score. {possible}."])
        evaluate(command)
    except ValueError as error:
        collectives.abort_all_ranks(str(error), code=2)
        log.error(error, extra=EVERY_RANK)
        return 2
    except collectives.Signalled as stop:
        log.info(f"{stop}: stopped. The same command resumes it.")
        collectives.stop_watchdogs()
        return 128 + stop.number
    except Exception as error:
        collectives.abort_all_ranks(errors.error_text(error))
        errors.report_error(error, debug=debug)
        return 1
    except SystemExit as stop:
        return collectives.exit_code_for(stop, "What is scored or drawn stays. The same command resumes it.")
    collectives.stop_watchdogs()
    return 0


if __name__ == "__main__":
    start(main)
