"""Score what a run has left, or what others have made, and draw the curves.

    composer eval.py runs/NAME                                     # its snapshots in order -> eval.jsonl, eval.csv, eval.png
    composer eval.py runs/NAME snapshots=to_target                 # to the first that meets target.*, and the one before it
    composer eval.py runs/NAME eval.guidance=[1.5,2,3,4,5,6,7,8] eval.resize=bicubic256 eval.statistics=...  # -> guidance.png
    composer eval.py runs/A runs/B out=compared                    # several models in one table and one plot
    composer -n 8 eval.py checkpoints/stable-diffusion-2-base eval.prompts=... out=published     # a diffusers folder
    composer eval.py samples/ eval.prompts=val2014_30k.tsv eval.clip=... out=scores              # a folder of images

A run is scored with its own configuration. Keys that a score depends on can be given anew (eval.*, target.*, precision,
model.weights where the encoders have moved, ...); other keys are refused. A score that eval.jsonl already has, of the same
weights and settings, is not made again. So the same command resumes a killed one, even in the middle of a score
(eval_parts/ beside the table holds its finished part). Two commands may share a table.

    snapshots   all, to_target (in order up to the first that meets the target, after `from_images`; if that is the first one
                scored, backwards to the one that does not), or last; null: last for a list of guidances, to_target where a
                target is given, else all

Exit code: 0, 2 when something cannot be scored (each problem on a line of stderr), 1 when it failed otherwise, 128 + signal
after a signal.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from composer.utils import dist

from callbacks import mlperf_log
from callbacks.quality_target import outcome, said
from cli import errors, masking, ranks
from cli.command import command, start
from cli.command_line import Assignment, CommandLine, Problem, parse_command_line
from cli.errors import ConfigError
from cli.limits import limited
from cli.log import EVERY_RANK, log
from config import flat, load, schema_keys
from evaluation import plots, unfinished
from evaluation.image_folder import image_batches, list_images
from evaluation.prompts import read_prompts
from evaluation.score_table import Table
from evaluation.scoring import FIGURES, Scorer
from evaluation.unfinished import Parts
from model import LatentDiffusion, build_device, model_problems
from preflight import limits
from preflight.run import precision_problems, speed_problems
from record.config_file import LATER, keep_batch_size, read_config, read_files
from record.files import check_record, run_id_of
from record.summary import result_line, rounded, write_outcome
from training import published, speed, warm_start
from training.run_config import ALIASES, NOT_YET, RunConfig, build, resolve
from training.snapshots import (
    Kind,
    digest_of,
    kind_of,
    load_snapshot,
    match_prompts,
    named,
    of_diffusers_folder,
    snapshots_of,
)
from weights.tensors import fingerprint
from zoo import load_family
from zoo.sampling import shard
from zoo.spec import as_size

Row = dict[str, Any]

DIST_TIMEOUT_SEC = 1800.0


@dataclass(frozen=True)
class EvalCommand(RunConfig):
    """A run's keys, and those of this command."""

    snapshots: Literal["all", "to_target", "last"] | None = None
    """all; last; to_target: up to the first that meets the target. null: last for a list of guidances, to_target with a
    target, else all."""
    from_images: int = limited(0, 0)
    """Images seen where to_target begins: a hint that saves scoring early snapshots."""
    out: str | None = None
    """Folder of eval.jsonl, eval.csv and the pictures. null: the run's own."""


# What changes a score, which are made, or how fast: any other key would be given in vain.
OF_METERS = ("eval.statistics", "eval.inception", "eval.resize", "eval.precision", "eval.clip", "eval.batch_size")
OF_IMAGES = ("out", "eval.prompts", "eval.num_prompts", "loggers.debug", *OF_METERS)
OF_MODELS = ("model.family", "model.preset", "model.variant", "objective.prediction", "image_size", "precision", "seed")
OF_GENERATING = ("eval.guidance", "eval.steps", "eval.sampler", "eval.image_size", "loggers.progress_bar")
OF_SPEED = tuple(key.name for key in dataclasses.fields(speed.SpeedKeys) if key.name not in speed.OF_TRAINING)
OF_RUNS = ("model.weights", "eval.weights", "target.fid", "target.clip", "snapshots", "from_images")
EFFECTIVE: dict[Kind, tuple[str, ...]] = {
    "images": OF_IMAGES,
    "diffusers": (*OF_IMAGES, *OF_MODELS, *OF_GENERATING, *OF_SPEED),
    "run": (*OF_IMAGES, *OF_MODELS, *OF_GENERATING, *OF_SPEED, *OF_RUNS),
}


UNREAD: tuple[str, ...] = ("run_name", "run_folder", "data.remote", "data.local", "data.facts", "data.streams")
UNREAD += ("model.denoiser", "validation.", "loggers.", "mlperf.")
"""Of a run's files: where a variable that stands there is not set, its scores are the same."""
DECIDING = {*OF_IMAGES, *OF_MODELS, *OF_GENERATING, *OF_RUNS}
DECIDING -= {"out", "eval.batch_size", "loggers.progress_bar", "loggers.debug"}
DECIDING -= {"model.weights", "snapshots", "from_images"}
"""What a target is met with: given in another way than in a run's files, its scores are a trial."""


def read(place: str, kind: Kind, command: CommandLine) -> EvalCommand:
    """Return the configuration that something is scored with. Raises ConfigError: with every problem at once."""
    given = {at.key for at in command.assignments}
    when = Assignment("eval.py", "eval.when", "after", "eval.when")
    of_run: list[Assignment] = []
    if kind == "run":
        check_record(Path(place))
        of_run, unreadable = read_files(Path(place))
        if unreadable:
            raise ConfigError([problem.text for problem in unreadable])
    command = dataclasses.replace(command, yaml=None, assignments=[*of_run, *command.assignments, when])

    def check(config: EvalCommand) -> list[Problem]:
        found = [*config.eval.problems(now=True, images_alone=kind == "images"), *config.target.problems(config.eval)]
        found += _snapshots_problems(config)
        problems = [Problem(f"{key}: {text}", (key,)) for key, text in found]
        if kind != "images":
            config = _completed(config, place, kind, given)
            problems += model_problems(config.model, config.size, encoders_wanted=False)
            problems += _size_problems(config) + precision_problems(config)
            problems += speed_problems(config)
            if text := limits.batch_problem(config.global_batch_size, 1, 1):
                problems.append(Problem(f"global_batch_size: {text}", ("global_batch_size",)))
        if kind == "diffusers":
            problems += warm_start.problems(config.model, config.objective.prediction)
        if kind != "run" and config.out is None:
            problems.append(Problem("out: not given. Name the folder that the table goes to.", ("out",)))
        elif text := limits.unwritable(config.out or place):
            problems.append(Problem(f"out: {text}", ("out",)))
        return problems

    config = load(EvalCommand, command, not_yet=NOT_YET, check=check, unread=UNREAD)
    return resolve(_completed(config, place, kind, given)) if kind != "images" else config


def _vain(command: CommandLine, kinds: Collection[Kind]) -> list[str]:
    """Return a problem for each key that changes nothing of what is scored."""
    possible = {key for kind in kinds for key in EFFECTIVE[kind]}
    names = {"run": "a run", "diffusers": "a diffusers folder", "images": "a folder of images"}
    what = " or ".join(names[kind] for kind in dict.fromkeys(kinds))
    return [
        f"{at.where}: {at.typed}{'' if at.typed == at.key else f' ({at.key})'} changes no score of {what}. Possible: "
        f"{', '.join(sorted(possible))}. Leave it out."
        for at in command.assignments
        if at.key in schema_keys(EvalCommand) and at.key not in possible
    ]


def _which(config: EvalCommand) -> str:
    """Return which snapshots of a run are scored."""
    is_curve = len(config.eval.guidances()) > 1
    return config.snapshots or ("last" if is_curve else "to_target" if config.target.is_given else "all")


def _snapshots_problems(config: EvalCommand) -> list[tuple[str, str]]:
    which, is_curve = _which(config), len(config.eval.guidances()) > 1
    if which == "to_target" and (is_curve or not config.target.is_given):
        return [("snapshots", "to_target needs a target.fid or target.clip, and one guidance. Give them, or all.")]
    if which != "to_target" and config.from_images:
        text = f"{config.from_images:,}, but {which} snapshots are scored. It is where snapshots=to_target begins"
        return [("from_images", f"{text}. Leave it out.")]
    return []


def _size_problems(config: EvalCommand) -> list[Problem]:
    with contextlib.suppress(ValueError):  # named by model_problems, or by the section itself
        family = load_family(config.model.family, config.model.preset, config.model.variant)
        if config.eval.image_size is not None and (text := family.size_problem(as_size(config.eval.image_size))):
            return [Problem(f"eval.image_size: {text}", ("eval.image_size",))]
    return []


def _completed(config: EvalCommand, place: str, kind: Kind, given: set[str]) -> EvalCommand:
    plain: dict[str, Any] = {
        key.name: key.default for key in dataclasses.fields(speed.SpeedKeys) if key.name in speed.OF_TRAINING
    }
    config = dataclasses.replace(config, **plain)  # they change no score, and may want a GPU
    return of_diffusers_folder(config, Path(place), given) if kind == "diffusers" else config


# --- what is scored ---


def score_run(config: EvalCommand, folder: Path, table: Table, device: torch.device) -> list[Row]:
    """Score a run's snapshots and return their rows; where one meets the target, the run's summary says so."""
    model, scorer = _ready(config, folder, table.path.parent, device)
    paths, guidances = ranks.on_rank_zero(lambda: snapshots_of(folder)), config.eval.guidances()
    name = {"model": folder.name, "model_id": ranks.on_rank_zero(lambda: run_id_of(folder))}

    def scored(path: Path) -> list[Row]:
        where = {**name, **load_snapshot(model, path, config.eval.weights)}
        return [_scored(table, where, scorer, model, guidance) for guidance in guidances]

    def first(path: Path) -> Row:
        return scored(path)[0]

    kind = _which(config)
    if kind != "to_target":
        rows = [row for path in (paths if kind == "all" else paths[-1:]) for row in scored(path)]
    else:
        begin = next((n for n, path in enumerate(paths) if _images(path) >= config.from_images), len(paths) - 1)
        rows = list(to_target([functools.partial(first, path) for path in paths], begin, config.target.is_met))
    if config.target.is_given and len(guidances) == 1 and kind != "last":
        _conclude(config, folder, rows)
    return rows


def to_target(snapshots: Sequence[Callable[[], Row]], begin: int, is_met: Callable[[Row], bool]) -> Iterator[Row]:
    """Score in order from `begin` to the first that meets the target; if `begin` itself does, backwards to one that does not.

    The rules ask for the first that passes and the one before it.
    """
    at, met = begin, False
    while at < len(snapshots) and not met:
        yield (row := snapshots[at]())
        met, at = is_met(row), at + 1
    if met and at - 1 == begin:
        for before in range(begin - 1, -1, -1):
            yield (row := snapshots[before]())
            if not is_met(row):
                return


def _images(path: Path) -> int:
    return int(path.name.split("-")[1][2:])


def _conclude(config: EvalCommand, folder: Path, rows: Sequence[Row]) -> None:
    """Say which snapshot met the target first, and write that into the summary of a run that is decided afterwards.

    Not from a part of the prompts, nor where the table goes elsewhere, nor with other keys than the run's own: a trial.
    """
    in_order = sorted(rows, key=lambda row: row["images"])
    reached = next((row for row in in_order if config.target.is_met(row)), None)
    if dist.get_global_rank() == 0:
        result, own = outcome(in_order, reached), {"eval.precision": "fp32", **read_config(folder)}
        differing = sorted(key for key in DECIDING if key in own and own[key] != flat(config)[key])
        if differing:
            given = f"a trial: not as the run in {folder}: {', '.join(differing)}. Its summary.json stays as it is"
            log.info(f"target: {given}. To decide the run so, start it with these keys: composer benchmark.py")
        elif config.out is None and not any(row["partial"] for row in rows):
            if config.mlperf.enabled:
                mlperf_log.conclude(folder, in_order, reached, afterwards=own.get("eval.when") == "after")
            write_outcome(folder, result, over=None if own.get("eval.when") == "after" else "pending")
        if reached is not None:
            log.info(f"target: {said(reached)}.")
        print(result_line({key: rounded(value) for key, value in result.items()}), flush=True)


def score_diffusers(config: EvalCommand, folder: Path, table: Table, device: torch.device) -> list[Row]:
    """Score a diffusers folder as it is published."""
    model, scorer = _ready(config, None, table.path.parent, device)
    digests = _fingerprints(model)
    where = {"model": folder.name, "model_id": digests["denoiser_fingerprint"][:8], "weights": "published", **digests}
    return [_scored(table, where, scorer, model, guidance) for guidance in config.eval.guidances()]


def _fingerprints(model: LatentDiffusion) -> Row:
    encoders = {f"{name}_fingerprint": digest for name, digest in model.encoders.fingerprints.items()}
    return {"denoiser_fingerprint": fingerprint(model.denoiser), **encoders}


def score_images(config: EvalCommand, folder: Path, table: Table, device: torch.device) -> list[Row]:
    """Score a folder of images; their captions are those of the prompts that their names give."""
    paths = ranks.on_rank_zero(lambda: list_images(folder))
    facts: Row = {"partial": False}
    captions = dict.fromkeys(paths, "")
    numbers: dict[Path, Any] = {path: path.name for path in paths}
    if config.eval.prompts is not None:
        prompt_set = read_prompts(config.eval.prompts, config.eval.num_prompts)
        matched = match_prompts(paths, prompt_set)
        captions = {path: prompt.caption for path, prompt in zip(paths, matched, strict=True)}
        numbers = {path: prompt.number for path, prompt in zip(paths, matched, strict=True)}
        facts = {"partial": prompt_set.partial, "prompts_sha256": prompt_set.sha256}
    meter = config.eval.meter()
    meter.say_what_is_short(len(paths))
    mine = [paths[place] for place in shard(len(paths), dist.get_global_rank(), dist.get_world_size())]

    def score() -> Row:
        with meter.on(device):
            for names, images in image_batches(mine, config.eval.batch_size or 16):
                unit = images.to(device).float() / 255.0
                meter.add(unit, [numbers[name] for name in names], [captions[name] for name in names])
            return meter.figures()

    what = {"model": named(folder), "images_in_folder": len(paths), "images_fingerprint": digest_of(paths)}
    return [table.get({**what, **facts, **meter.facts}, score)]


def _scored(table: Table, where: Row, scorer: Scorer, model: LatentDiffusion, guidance: float) -> Row:
    """Return the row of a model at a guidance. Raises ranks.Signalled: it was stopped, and what is scored is kept."""

    def figures() -> Row:
        return {key: value for key, value in scorer.score(model, guidance).items() if key in FIGURES}

    with ranks.stopping_together() as scorer.signal:
        return table.get({**where, **scorer.settings(guidance)}, figures, lambda: scorer.forget(model, guidance))


def _ready(config: EvalCommand, run: Path | None, folder: Path, device: torch.device) -> tuple[LatentDiffusion, Scorer]:
    """Build the model and what scores it, the batch size found: a run keeps it in later.yaml; `folder`: of the table."""
    model = build(config)
    if run is None:
        warm_start.load(model, str(config.model.denoiser))
    model.place(device, config.precision or "fp32")
    speed.apply(model, config, config.precision)
    of_model = {"precision": config.precision, **config.objective.of_scores()}
    own = run if config.eval.image_size is None and config.out is None else None
    scorer = Scorer(
        config.eval,
        size=config.size,
        seed=config.seed,
        settings=of_model,
        show_progress=config.loggers.progress_bar,
        found=functools.partial(_keep, own),
        parts=Parts(folder / unfinished.NAME, is_alone=False),
    )
    scorer.find_batch_size(model)  # it is one of the settings by which rows are known
    return model, scorer


def _keep(run: Path | None, batch_size: int) -> None:
    if run is None:
        return
    try:
        keep_batch_size(run, batch_size)
    except OSError as error:
        given = f"eval.batch_size: {batch_size} was found, but {run / LATER} cannot be written: {error.strerror}"
        log.info(f"{given}. Another machine may find another one: give it with eval.batch_size.")


# --- the command ---


def evaluate(command: CommandLine) -> None:
    """Score each place with its own configuration and the same words, and draw what there is to be drawn."""
    places = command.places
    kinds = {place: kind_of(place) for place in places}
    if vain := _vain(command, kinds.values()):
        raise ConfigError(vain)
    if len(places) > 1 and not any(at.key == "out" for at in command.assignments):
        raise ConfigError(["out: not given. Several models in one table want a folder for it: out=FOLDER."])
    configs = {place: read(place, kind, command) for place, kind in kinds.items()}
    device = build_device(configs[places[0]].precision or "fp32")
    ranks.meet(device, DIST_TIMEOUT_SEC)
    ranks.watch_for_abort()
    rows: list[Row] = []
    for place, kind in kinds.items():
        of_run = ("model.weights",) if kind == "run" else ()
        configs[place] = published.fetched(configs[place], (*of_run, *published.OF_EVALUATION))
        config, folder = configs[place], Path(place).expanduser().resolve()
        table = Table(Path(config.out or folder, "eval.jsonl"))
        score = {"run": score_run, "diffusers": score_diffusers, "images": score_images}[kind]
        rows += score(config, folder, table, device._device)  # type: ignore[arg-type]  # declared None, and set in each kind
    with ranks.stopping_together():
        if dist.get_global_rank() == 0:
            draw(rows, table.path.parent, configs[places[0]])


def draw(rows: Sequence[Row], folder: Path, config: EvalCommand) -> None:
    """Draw FID against CLIP where guidance varies, both over images where the images do, of the rows that have these."""

    def over_images(rows: Sequence[Row], path: Path) -> None:
        plots.draw_over_images(rows, path, dataclasses.asdict(config.target))

    for name, along, more, picture in (
        ("guidance.png", "guidance", ("fid", "clip"), plots.draw_guidance),
        ("eval.png", "images", (), over_images),
    ):
        drawn = [row for row in rows if all(row.get(key) is not None for key in (along, *more))]
        if len({row[along] for row in drawn}) < 2:
            continue
        picture(drawn, folder / name)
        if left_out := dict.fromkeys(str(row["model"]) for row in rows if row not in drawn):
            what = f"without {', '.join(left_out)}, where {' or '.join((along, *more))} is missing"
            log.info(f"eval: {folder / name} is drawn {what}. The table has all.")


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Read the command line, score, print a line a score; rank 0 speaks for all."""
    command = parse_command_line(argv, ALIASES, takes_places=True)
    masking.watch()
    debug = any(at.key == "loggers.debug" and at.value is True for at in command.assignments)
    if torch.cuda.is_available():
        torch.cuda.set_device(dist.get_local_rank())
    try:
        if command.print_config:
            shown = "What a run is scored with is in its config.yaml and later.yaml"
            raise ConfigError([f"eval.py: --print_config is benchmark.py's. {shown}."])
        if not command.places:
            ways = "Give a run (runs/NAME), a diffusers folder or a folder of images"
            raise ConfigError([p.text for p in command.problems] or [f"eval.py: nothing to score. {ways}."])
        evaluate(command)
    except ValueError as error:
        ranks.abort_all_ranks(str(error), code=2)
        if debug:
            traceback.print_exc()
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
        return ranks.stopped(stop)
    ranks.be_quiet()
    return 0


if __name__ == "__main__":
    start(main)
