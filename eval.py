"""Score what a run has left, or what others have made, and draw the curves; or draw images or videos of captions.

    composer eval.py runs/NAME                                     # its snapshots in order -> eval.jsonl, eval.csv, eval.png
    composer eval.py runs/NAME snapshots=to_target                 # to the first that meets target.*, and the one before it
    composer eval.py runs/NAME eval.guidance=[1.5,2,3,4,5,6,7,8] eval.resize=bicubic256 eval.statistics=...  # -> guidance.png
    composer eval.py runs/A runs/B OWNER/NAME out=compared         # several models, ours and others', in one table and plot
    composer -n 8 eval.py checkpoints/stable-diffusion-2-base eval.prompts=... out=published     # a diffusers folder
    composer -n 8 eval.py 512-base-ema.ckpt eval.prompts=... out=published                       # an LDM file
    composer eval.py samples/ eval.prompts=val2014_30k.tsv eval.clip=... out=scores              # a folder of images
    composer eval.py runs/NAME images=look prompts='[a red circle, "a cat, asleep"]'   # -> look/*.png
    composer eval.py runs/NAME images=look prompts=captions.txt images_per_prompt=4    # of a file, with four seeds

A run is scored with its own configuration. Keys that a score depends on can be given anew (eval.*, target.*, precision,
model.weights where the encoders have moved, ...); other keys are refused. A score that eval.jsonl already has, of the same
weights and settings, is not made again. So the same command resumes a killed one, even in the middle of a score
(eval_parts/ beside the table holds its finished part). Two commands may share a table.

    snapshots   all, to_target (in order up to the first that meets the target, after `from_images`; if that is the first one
                scored, backwards to the one that does not), or last; null: last for a list of guidances or for images,
                to_target where a target is given, else all. A snapshot can also be given by its file.

A place is one of those in training/places.py. Images are those of training/pictures.py: no metric is loaded.
Exit code: 0, 2 when something cannot be scored (each problem on a line of stderr), 1 when it failed otherwise, 128 + signal
after a signal.
"""

from __future__ import annotations

if __name__ == "__main__":
    from cli import interrupts

    interrupts.told("eval.py: interrupted before it began. The same command starts it again.")

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from composer.utils import dist

from cli import errors, meeting, ranks
from cli.command import command, start
from cli.command_line import Assignment, CommandLine, Problem, parse_command_line
from cli.errors import ConfigError
from cli.log import EVERY_RANK, log
from config import load
from evaluation import plots
from evaluation.score_table import Table
from evaluation.scoring import sampler_problems
from preflight import limits
from preflight.run import speed_problems
from record.config_file import read_files
from record.files import check_record
from training import pictures, places, published, speed, warm_start
from training.device import build_device
from training.eval_keys import UNREAD, EvalCommand, snapshots_problems
from training.places import Place
from training.run_config import ALIASES, resolve
from training.scores import Row, score
from zoo import load_family
from zoo.model_config import ModelConfig, model_problems
from zoo.spec import as_size

DIST_TIMEOUT_SEC = 1800.0


def read(place: Place, command: CommandLine) -> EvalCommand:
    """Return the configuration that something is scored with. Raises ConfigError: with every problem at once."""
    typed = {at.key: at.value for at in command.assignments}
    draws, is_model = typed.get("images") is not None, place.kind != "images"
    more = [Assignment("eval.py", "eval.when", "after", "eval.when")]
    if draws and "eval.batch_size" not in typed:  # the same passes, whatever a run's evaluations take
        more += [Assignment("eval.py", "eval.batch_size", None, "eval.batch_size")]
    of_run: list[Assignment] = []
    if place.kind == "run":
        check_record(place.path)
        of_run, unreadable = read_files(place.path)
        if unreadable:
            raise ConfigError([problem.text for problem in unreadable])
    of_run += [Assignment(place.given, key, value, key) for key, value in places.of_export(place).items()]
    command = dataclasses.replace(command, yaml=None, assignments=[*of_run, *command.assignments, *more])

    def check(config: EvalCommand) -> list[Problem]:
        found = snapshots_problems(config)
        if place.snapshot is not None and config.snapshots is not None:
            found += [("snapshots", f"{config.snapshots}, but {place.given} is one already. Leave it out.")]
        if draws:
            found += _drawing_problems(config, place)
        else:
            found += [*config.eval.problems(now=True, images_alone=not is_model), *config.target.problems(config.eval)]
            found += _out_problems(config, place)
        if place.kind == "run" and "model.denoiser" in typed and not config.lora.is_given:
            found.append(("model.denoiser", f"{place.given} has no adapter, and needs no base. Leave it out."))
        if is_model:
            config = _completed(config, place, set(typed))
            if place.kind != "run":
                found += places.problems_of_published(config, place, typed.get("eval.weights"))
        problems = [Problem(f"{key}: {text}", (key,)) for key, text in found]
        if is_model:
            problems += model_problems(config.model, config.size, encoders_wanted=False)
            problems += _size_problems(config) + speed_problems(config)
            if text := limits.batch_problem(config.global_batch_size, 1, 1):
                problems.append(Problem(f"global_batch_size: {text}", ("global_batch_size",)))
            if place.kind != "run":
                problems += warm_start.problems(config.model, config.objective.prediction)
        return problems

    config = load(EvalCommand, command, check=check, unread=UNREAD)
    return resolve(_completed(config, place, set(typed))) if is_model else config


def _drawing_problems(config: EvalCommand, place: Place) -> list[tuple[str, str]]:
    """(key, message) for what keeps images from being drawn."""
    if place.kind == "images":
        possible = f"a run (runs/NAME) or its snapshot, {places.OTHERS}"
        return [("images", f"{place.given} is a folder of images, without a model. Possible: {possible}.")]
    found, folder = [], str(config.images)
    if text := pictures.folder_problem(folder) or limits.unwritable(folder):
        found.append(("images", text))
    try:
        pictures.captions_of(config.prompts)
    except ValueError as error:
        found.append(("prompts", str(error)))
    with contextlib.suppress(ValueError):  # named by model_problems
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        found += sampler_problems(config.eval, config.objective.resolved(family.objective))
    return found


def _out_problems(config: EvalCommand, place: Place) -> list[tuple[str, str]]:
    if place.kind != "run" and config.out is None:
        return [("out", "not given. Name the folder that the table goes to.")]
    text = limits.unwritable(config.out or str(place.path))
    return [("out", text)] if text else []


def _size_problems(config: EvalCommand) -> list[Problem]:
    with contextlib.suppress(ValueError):  # named by model_problems, or by the section itself
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        if family.pictures == "videos" and config.images is None:
            why = f"{family.name} makes videos, and FID and CLIP score are of images"
            way = "" if family.beside(config.size) else " Draw some: images=FOLDER prompts=FILE."
            return [Problem(f"model.family: {why}.{way}", ("model.family",))]
        if family.beside(config.size):
            why = f"{family.variant}, which draws what follows a picture; prompts are captions alone"
            return [Problem(f"model.variant: {why}. Give a run of another variant.", ("model.variant",))]
        if config.eval.image_size is not None and (text := family.size_problem(as_size(config.eval.image_size))):
            return [Problem(f"eval.image_size: {text}", ("eval.image_size",))]
    return []


def _completed(config: EvalCommand, place: Place, given: set[str]) -> EvalCommand:
    keys = [key for key in dataclasses.fields(speed.SpeedKeys) if key.name in speed.OF_TRAINING]
    plain: dict[str, Any] = {key.name: key.default for key in keys}
    config = dataclasses.replace(config, **plain)  # they change no score, and may want a GPU
    return config if place.kind == "run" else places.of_published(config, place, given)


# --- the command ---


def evaluate(command: CommandLine) -> None:
    """Score each place with its own configuration and the same words, or draw images, and draw what there is to be drawn."""
    typed = {at.key: at.value for at in command.assignments}
    found = _find(command.places, typed)
    draws = typed.get("images") is not None
    if len(found) > 1 and "out" not in typed and not draws:
        raise ConfigError(["out: not given. Several models in one table want a folder for it: out=FOLDER."])
    configs = [read(place, command) for place in found]
    device = build_device(configs[0].precision or "fp32")
    on: Any = device._device  # declared None, and set in each kind
    meeting.meet(device, DIST_TIMEOUT_SEC)
    ranks.watch_for_abort()
    rows: list[Row] = []
    folder = Path()
    for place, config in zip(found, configs, strict=True):
        keys: tuple[str, ...] = () if place.kind == "images" else ("model.weights",)
        keys += ("model.denoiser",) if place.kind == "run" and config.lora.is_given else ()  # an adapter's base
        config = published.fetched(config, (*keys, *(() if draws else published.OF_EVALUATION)))
        if "objective.prediction" not in typed:
            places.say_what_is_assumed(config, place)
        if draws:
            pictures.draw(config, place, on)
            continue
        table = Table(Path(config.out or place.path, "eval.jsonl"))
        rows += score(config, place, table, on)
        folder = table.path.parent
    with ranks.stopping_together():
        if dist.get_global_rank() == 0 and not draws:
            draw(rows, folder, configs[0])


def _find(given: Sequence[str], typed: dict[str, Any]) -> list[Place]:
    """Return what is at each place, once. Raises ConfigError: what is at none."""
    of_family: dict[str, Any] = {
        key: str(typed[f"model.{key}"]) for key in ("family", "preset", "variant") if f"model.{key}" in typed
    }
    model, found, problems = dataclasses.replace(ModelConfig(), **of_family), {}, []
    for text in dict.fromkeys(given):
        try:
            found[text] = places.find(text, model, encoders=typed.get("model.weights") is None)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return list(found.values())


def draw(rows: Sequence[Row], folder: Path, config: EvalCommand) -> None:
    """Draw FID against CLIP where guidance varies, and both over images, with what has seen nobody knows how many across."""
    on_curve = [row for row in rows if all(row.get(key) is not None for key in ("guidance", "fid", "clip"))]
    if len({row["guidance"] for row in on_curve}) > 1:
        plots.draw_guidance(on_curve, folder / "guidance.png")
    images = [row.get("images") for row in rows]
    is_compared = None in images and len({row.get("guidance") for row in rows} - {None}) < 2
    if len(set(images) - {None}) + is_compared > 1:
        plots.draw_over_images(rows, folder / "eval.png", dataclasses.asdict(config.target))


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Read the command line, score, print a line a score; rank 0 speaks for all."""
    command = parse_command_line(argv, ALIASES, takes_places=True)
    debug = any(at.key == "loggers.debug" and at.value is True for at in command.assignments)
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_local_rank())
    try:
        if command.print_config:
            raise ConfigError(["eval.py: --print_config is benchmark.py's. A run's is in config.yaml and later.yaml."])
        if not command.places:
            ways = f"Possible: {places.POSSIBLE}"
            raise ConfigError([p.text for p in command.problems] or [f"eval.py: nothing to score. {ways}."])
        evaluate(command)
    except ValueError as error:
        ranks.abort_all_ranks(str(error), code=2)
        log.error(error, extra=EVERY_RANK)
        return 2
    except ranks.Signalled as stop:
        log.info(f"{stop}: stopped. The same command resumes it.")
        ranks.be_quiet()
        return 128 + stop.number
    except Exception as error:
        ranks.abort_all_ranks(errors.text_of(error))
        errors.tell(error, debug=debug)
        return 1
    except SystemExit as stop:
        return ranks.stopped(stop, "What is scored or drawn stays. The same command resumes it.")
    ranks.be_quiet()
    return 0


if __name__ == "__main__":
    start(main)
