"""Checks of a run's configuration before it starts: its keys, memory, schedule, disk space, and earlier starts.

They share a `Case`; `python -m prepare.doctor` runs them in order. Each returns its findings and changes nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch
from composer.utils import dist

from cli.command_line import Problem
from cli.errors import ConfigError
from config import count
from data import SYNTHETIC_EPOCH_BATCHES
from preflight import limits, machine
from preflight import stage as stage_checks
from preflight.machine import ERROR, OK, WARNING, Finding
from preflight.run import batch_gib, cost_of, order_need, planned_microbatch, quick_problems, savings, wanted_of_stage
from preflight.stage import Need
from record.checkpoint_files import FULL, WEIGHTS, fault, is_whole, listed
from record.checkpoint_folders import size_of
from stages.dataset import Stage
from stages.mixture import StreamConfig, epoch_samples
from stages.shared_memory import is_held
from training import cost
from training import microbatch as microbatch_search
from training.optimizer import total_batches
from training.published import as_begun
from training.resume import check_begun
from training.run_config import RunConfig, needs_encoders, resolve
from weights import hub
from zoo import load_family
from zoo.encoders import RANDOM, on_hub, own_weights

# First key of a problem from `quick_problems` -> the check that reports it; all others: config.
CHECK_OF_KEY = {
    "global_batch_size": "batch",
    "device_train_microbatch_size": "batch",
    "data.num_canonical_nodes": "batch",
    "model.weights": "weights",
    "model.denoiser": "weights",
    "run_folder": "folders",
    "data.local": "folders",
    "run_name": "run",
}
# The same for problems with the stage.
CHECK_OF_STAGE_KEY = {
    "data.": "store",  # data.streams: how they are mixed
    "data.remote": "store",
    "data.local": "cache",
    "data.cache_limit": "disk",
    "global_batch_size": "schedule",
    "data.stage": "stage",
    "image_size": "stage",
    "model.family": "stage",
    "data.normalize": "stage",
    "model.variant": "stage",
    "mlperf.division": "stage",
}
OF_STREAM = re.compile(r"streams(\[\d+\]\.?|$)")
# If one of these is invalid, there is no network to trace.
TRACED = (
    "image_size",
    "precision",
    "global_batch_size",
    "device_train_microbatch_size",
    "model.",
    "objective.",
    "ema.",
)


@dataclass
class Case:
    """The run being checked, and results that several checks use."""

    config: RunConfig
    opened: list[tuple[StreamConfig, Stage]] = field(default_factory=list)
    """Each stage that could be read."""
    of_stage: list[tuple[str, str]] = field(default_factory=list)
    """(key, message): the section `data` against the stage."""

    @functools.cached_property
    def problems(self) -> list[Problem]:
        alone = dataclasses.replace(self.config.data, synthetic=True)  # the stage has its own checks
        of_validation = self.config.validation.problems(self.config.data, *wanted_of_stage(self.config))
        return quick_problems(self.config, alone.problems(self.config.global_batch_size, {}) + of_validation)

    @functools.cached_property
    def resolved(self) -> RunConfig | None:
        """The configuration with null replaced by its values; None: its problems make that impossible."""
        # Missing weights do not change the network.
        others = [p for p in self.problems if CHECK_OF_KEY.get(p.text.partition(":")[0]) != "weights"]
        if any(key.startswith(TRACED) for problem in others for key in problem.keys):
            return None
        try:
            return resolve(self.config)
        except ValueError:  # reported as a problem
            return None

    @functools.cached_property
    def cost(self) -> cost.Cost:
        run = self.resolved
        assert run is not None and run.precision is not None
        network = dataclasses.replace(run.model, weights=None, denoiser=None)  # weights do not affect the cost
        return cost_of(dataclasses.replace(run, model=network))

    @functools.cached_property
    def order(self) -> machine.OrderNeed | None:
        """What the order of an epoch takes; None: there is none, or no stage."""
        return order_need(self.config.data)

    @property
    def num_batches(self) -> int | None:
        """Batches of the run; None: unknown."""
        run = self.resolved
        if run is None:
            return None
        epoch_batches = SYNTHETIC_EPOCH_BATCHES
        if not run.data.synthetic:
            samples = [stage.num_samples for _, stage in self.opened]
            epoch = epoch_samples([source for source, _ in self.opened], samples) if samples else 0
            epoch_batches = epoch // run.global_batch_size
        num = total_batches(run.max_duration, global_batch_size=run.global_batch_size, epoch_batches=epoch_batches)
        return num or None

    @property
    def folder(self) -> Path | None:
        """The run's folder, if the run has a name."""
        return Path(self.config.run_folder, self.config.run_name) if self.config.run_name else None

    def errors(self, check: str) -> list[Finding]:
        """Return the problems of the configuration and the stage that belong to this check."""
        texts = [p.text for p in self.problems if CHECK_OF_KEY.get(p.text.partition(":")[0], "config") == check]
        texts += [
            f"{key}: {text}" for key, text in self.of_stage if CHECK_OF_STAGE_KEY.get(OF_STREAM.sub("", key)) == check
        ]
        return [Finding(ERROR, check, text) for text in texts]


def not_looked_at(check: str) -> list[Finding]:
    """Return the finding of a check that is not possible."""
    return [Finding(WARNING, check, "not checked: it depends on an error above. Fix that first.")]


# --- the configuration ---


def config_values(case: Case) -> list[Finding]:
    """Check the keys by themselves."""
    run = case.resolved or case.config
    named = f"{run.model.family}, {run.model.preset}, {run.model.variant}, {run.precision or 'precision by device'}"
    return case.errors("config") or [Finding(OK, "config", f"every key is possible ({named})")]


def batch(case: Case) -> list[Finding]:
    """Check that ranks and microbatch divide the global batch."""
    if found := case.errors("batch"):
        return found
    ranks, size = dist.get_world_size(), case.config.global_batch_size
    microbatch = case.config.device_train_microbatch_size or size // ranks
    if microbatch == microbatch_search.AUTO:
        return [Finding(OK, "batch", f"{count(size, 'image')}; how many a pass is found when the run starts")]
    parts = (count(ranks, "rank"), count(size // ranks // microbatch, "pass", "passes"), count(microbatch, "image"))
    text = f"{count(size, 'image')} = {' x '.join(parts)}"
    return [Finding(OK, "batch", text)]


def weights(case: Case) -> list[Finding]:
    """Check the files of the encoders and of the denoiser, by names and shapes."""
    if found := case.errors("weights"):
        return found
    config, is_real = as_begun(case.config).model, not case.config.data.synthetic
    family = load_family(config.family, config.preset, config.variant)
    if not needs_encoders(case.config):
        begins = config.denoiser or "from random weights"
        return [Finding(OK, "weights", f"encoders: none are built, batches have what they make; denoiser: {begins}")]
    given = config.weights or own_weights(family, is_real=is_real)
    text = f"encoders: {given}" + (", which mean nothing" if given == RANDOM else "")
    for name, need in on_hub(family, given, None).values():
        text = f"encoders: {'. '.join(hub.look(name, need).lines())}"
    begins = config.denoiser
    return [Finding(OK, "weights", f"{text}; denoiser: {begins or 'from random weights'}")]


def memory(case: Case) -> list[Finding]:
    """Compare a step's memory with the device's; traces the real network, which takes some seconds."""
    run = case.resolved
    if run is None:
        return not_looked_at("memory")
    on_device = run.ema.enabled and (run.ema.device == "model" or not torch.cuda.is_available())
    ranks_on_device = 1 if torch.cuda.is_available() else dist.get_local_world_size()
    microbatch = planned_microbatch(run, case.cost)
    ways = dict(ema=on_device, savings=savings(run))
    if text := cost.memory_problem(case.cost, microbatch, ranks_on_device, **ways):
        return [Finding(ERROR, "memory", text)]
    need = case.cost.memory_gib(microbatch, ema=on_device)
    room = cost.room_of_a_rank(ranks_on_device)
    return [Finding(OK, "memory", f"about {need:.3g} GiB at {microbatch} images a pass; {room}")]


def host_memory(case: Case) -> list[Finding]:
    """Compare the memory of loader workers, of an epoch's order, and of models that are built here, with the machine's."""
    run, ranks = case.resolved, dist.get_local_world_size()
    if run is None:
        return not_looked_at("host memory")
    workers = 0 if run.data.synthetic else run.data.workers
    need = {
        count(ranks * workers, "worker"): ranks * workers * machine.WORKER_GIB,
        "batches": ranks * machine.batches_on_their_way(workers) * batch_gib(run),
    }
    if case.order is not None:
        need[machine.ORDER] = case.order.gib
    if run.save.is_on and run.sharding == "off":
        need["copy of the state for checkpoints"] = case.cost.checkpoint_gib(ema=run.ema.enabled)
    if torch.cuda.is_available():
        of_ema = case.cost.trained_parameters if run.ema.enabled and run.ema.device == "cpu" else 0
        built = case.cost.trained_parameters + case.cost.frozen_parameters + of_ema
        need["models as they are built, float32"] = ranks * built * 4 / 2**30
    return machine.host_memory(need)


def shared_memory_room(case: Case) -> list[Finding]:
    """Compare the workers' batches, and the order of an epoch, with the size of /dev/shm."""
    run = case.resolved
    if run is None:
        return not_looked_at("/dev/shm")
    workers = 0 if run.data.synthetic else run.data.workers
    num = dist.get_local_world_size() * machine.batches_on_their_way(workers)
    return machine.shared_memory_room(batch_gib(run), num, case.order)


# --- the run ---


def schedule(case: Case) -> list[Finding]:
    """Compare the length of the run with the stage, the warm-up and the checkpoints."""
    if found := case.errors("schedule"):
        return found
    run, num = case.resolved, case.num_batches
    if run is None or num is None:
        return not_looked_at("schedule")
    images = num * run.global_batch_size
    length = f"{num:,} batches, {images:,} images"
    found = []
    if (warmup := run.schedule.num_warmup_batches(run.global_batch_size)) > num:
        text = (
            f"schedule: the warm-up of {warmup:,} batches is longer than the run ({length}): the learning rate never "
        )
        text += "reaches its value. Lower schedule.warmup_batches, or raise max_duration."
        found.append(Finding(WARNING if run.data.synthetic else ERROR, "schedule", text))
    if run.measure.warmup_batches >= num:
        text = (
            f"measure.warmup_batches: {run.measure.warmup_batches} of {num:,} batches: no speed is measured. Lower it."
        )
        found.append(Finding(WARNING, "schedule", text))
    every, snapshots = run.save.every_images or 0, run.save.snapshot_every_images or 0
    if not run.save.is_on and not run.data.synthetic:
        text = "save.every_images: 0: a stopped run begins anew. Give an interval, unless that is intended."
        found.append(Finding(WARNING, "schedule", text))
    if every > images and not run.save.every_min:
        text = f"save.every_images: {every:,} is more than the run ({length}): one checkpoint, at its end. Lower it, unless"
        found.append(Finding(WARNING, "schedule", f"{text} that is intended."))
    for key, value in (("every_images", every), ("snapshot_every_images", snapshots)):
        if 0 < value <= run.global_batch_size < images:
            text = f"save.{key}: {value:,} is no more than a batch: one is written after every batch. Raise it."
            found.append(Finding(WARNING, "schedule", text))
    epochs = ""
    if case.opened:
        samples = sum(stage.num_samples for _, stage in case.opened)
        epochs = f", {images / samples:.3g} times the stage's {samples:,} samples"
    return found or [Finding(OK, "schedule", f"{length}{epochs}; warm-up {warmup:,} batches")]


def folders(case: Case) -> list[Finding]:
    """Check that this user may write to the run's folders and to those in environment variables."""
    data, found = case.config.data, case.errors("folders")
    cached = [source.local for source in data.sources if source.remote and source.local]
    for variable in ("TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        if not (folder := os.environ.get(variable)):
            continue
        if variable == "TMPDIR" and not Path(folder).is_dir():  # Python silently uses another one
            found.append(Finding(ERROR, "folders", f"TMPDIR: {folder} is not a folder. Make it, or take it out."))
        elif text := limits.unwritable(folder):
            found.append(Finding(ERROR, "folders", f"{variable}: {text}"))
    places = [case.config.run_folder, *cached, tempfile.gettempdir()]
    return found or [Finding(OK, "folders", f"can be written: {', '.join(places)}")]


def disk(case: Case) -> list[Finding]:
    """Compare checkpoints, snapshots and the cache with the space on their disks; unwritable folders are skipped."""
    found, run = case.errors("disk"), case.resolved
    needs = stage_checks.need_of_cache(case.config.data, case.opened) if not found else []
    if run is not None and not limits.unwritable(run.run_folder):
        folder = Path(run.run_folder, run.run_name or "")
        if run.save.is_on:
            gib, num = case.cost.checkpoint_gib(ema=run.ema.enabled), run.save.keep + 1
            if text := limits.room_problem(folder, gib, num):
                return [*found, Finding(ERROR, "disk", f"save: {text}")]
            held = sum(size_of(path) for path in listed(folder / "checkpoints", FULL)) / 2**30
            way_out = "Lower save.keep, or give another run_folder"
            needs.append(Need(f"{num} full checkpoints", way_out, folder, max(0.0, num * gib - held)))
        if run.save.snapshot_every_images and case.num_batches:
            num = case.num_batches * run.global_batch_size // run.save.snapshot_every_images
            held = sum(size_of(path) for path in listed(folder / "checkpoints", WEIGHTS)) / 2**30
            gib = max(0.0, num * case.cost.snapshot_gib(ema=run.ema.enabled) - held)
            way_out = "Raise save.snapshot_every_images (0: none), or give another run_folder"
            needs.append(Need(f"{num:,} snapshots", way_out, folder, gib))
    return found or stage_checks.disk([n for n in needs if n.gib > 0.0 and not limits.unwritable(n.folder)])


def begun_run(case: Case) -> list[Finding]:
    """Report on an earlier run of this name: in use, finished, begun with other values, its newest checkpoint."""
    if found := case.errors("run"):
        return found
    folder = case.folder
    if folder is None:
        return [Finding(OK, "run", "no run_name: every start is a new run, and none can be resumed")]
    if not folder.exists():
        return [Finding(OK, "run", f"{folder} is new")]
    if is_held(folder / ".lock"):
        text = f"run_name: another process is training in {folder}. Wait for it, or take another run_name."
        return [Finding(ERROR, "run", text)]
    if case.resolved is not None:
        try:
            with contextlib.redirect_stderr(io.StringIO()):  # hides its own message that the run is finished
                result = check_begun(case.resolved, folder)
        except ConfigError as error:
            return [Finding(ERROR, "run", text) for text in error.problems]
        if result is not None:
            text = (
                f"{folder} is finished (max_duration={case.config.max_duration}). Raise it, or take another run_name."
            )
            return [Finding(WARNING, "run", text)]
    return _newest_checkpoint(folder)


def _newest_checkpoint(folder: Path) -> list[Finding]:
    there = listed(folder / "checkpoints", FULL)
    for number, path in enumerate(there):
        if is_whole(path):
            if number == 0:
                return [Finding(OK, "run", f"{folder} resumes from {path.name}, which is whole")]
            text = f"{there[0]} is damaged: {fault(there[0])}. The run resumes from {path.name}."
            return [Finding(WARNING, "run", text)]
    damaged = [*there, *(folder / "checkpoints").glob(f"{FULL}*.damaged")]
    if damaged:
        text = f"checkpoints: every one of the {len(damaged)} full checkpoints in {folder / 'checkpoints'} is damaged. Bring "
        text += "back a copy, or take another run_name to begin anew."
        return [Finding(ERROR, "run", text)]
    return [Finding(OK, "run", f"{folder} has no checkpoint yet: it begins anew")]
