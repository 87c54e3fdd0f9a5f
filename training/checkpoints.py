"""Checkpoints: their content, when they are written, and how a run resumes from one. Files: record/checkpoint_files.py.

RUN/checkpoints/full-ba000000001200-DIGEST.pt        weights, EMA, optimizer, schedule, scaler, counts, callbacks
                weights-im000000512000-DIGEST.pt     a snapshot: weights, EMA, images seen, time

Before anything is loaded, names, shapes and the run's `identity` are compared exactly.

Composer's own checkpoints are not used: it does not compare names, removes `latest` before it creates a new one, writes in
place, and unpickles any file that it finds (seen with 0.32.1).
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State, Timestamp
from composer.utils import dist
from torch import Tensor, nn

from cli import masking
from cli.errors import ConfigError
from cli.limits import limited
from cli.log import log
from cli.ranks import STOP_SIGNALS
from ema import EMA
from record.checkpoint_files import FULL, SCHEMA, WEIGHTS, listed, stem, write
from training.adamw import SmallAdamW
from weights.tensors import canonical_name, difference, lay_out_like, tensor_specs

DEFAULT_EVERY_IMAGES = 512_000  # the evaluation interval of the MLPerf benchmark


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints and snapshots."""

    every_images: int | None = limited(None, 0)
    """Images between full checkpoints; 0: never. null: eval.every_images if the run is evaluated, 0 with synthetic
    data, else 512000."""
    keep: int = limited(2, 1)
    """Number of newest full checkpoints to keep. All snapshots are kept."""
    snapshot_every_images: int | None = limited(None, 0)
    """Images between snapshots of the weights; 0: never. null: the default of every_images; for mlperf, without
    evaluation, the benchmark's interval."""
    grace_sec: float = limited(30.0, 0.0, 1e6)
    """Seconds from SIGTERM or SIGUSR1 to the kill, 30 with Composer's launcher. A checkpoint is written if there is time."""

    def resolved(self, every_images: int, snapshot_every_images: int) -> SaveConfig:
        """Fill in these intervals where null was given."""
        every = every_images if self.every_images is None else self.every_images
        snapshots = snapshot_every_images if self.snapshot_every_images is None else self.snapshot_every_images
        return dataclasses.replace(self, every_images=every, snapshot_every_images=snapshots)


@dataclass(frozen=True)
class Progress:
    """A run's progress at a batch's end: images over all ranks, seconds of training since its first start."""

    epoch: int
    batch: int
    images: int
    batch_in_epoch: int
    images_in_epoch: int
    seconds: float

    @classmethod
    def of(cls, state: State) -> Progress:
        """Read a run's progress. After the last batch of an epoch, it is the start of the next epoch."""
        now = state.timestamp
        if state.dataloader_len is not None and now.batch_in_epoch.value == state.dataloader_len.value:
            now = now.to_next_epoch()
        return cls(
            epoch=now.epoch.value,
            batch=now.batch.value,
            images=now.sample.value,
            batch_in_epoch=now.batch_in_epoch.value,
            images_in_epoch=now.sample_in_epoch.value,
            seconds=now.total_wct.total_seconds(),
        )

    def timestamp(self) -> Timestamp:
        """Return it as Composer's Timestamp."""
        return Timestamp(
            epoch=self.epoch,
            epoch_in_iteration=self.epoch,
            batch=self.batch,
            sample=self.images,
            batch_in_epoch=self.batch_in_epoch,
            sample_in_epoch=self.images_in_epoch,
            total_wct=datetime.timedelta(seconds=self.seconds),
        )


# ---------------------------------------------------------------------------------------------------------------------
# Contents
# ---------------------------------------------------------------------------------------------------------------------


def _weights(model: nn.Module) -> dict[str, Tensor]:
    return {canonical_name(name): tensor for name, tensor in model.state_dict().items()}


def _optimizer_names(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[str]]:
    """Return the names of each group's parameters; torch itself only stores positions."""
    names = {id(parameter): canonical_name(name) for name, parameter in model.named_parameters()}
    return [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]


def _own_callbacks(state: State) -> dict[str, Callback]:
    """Name in checkpoints -> callback, for all callbacks that save state."""
    return {c.saved_as: c for c in state.callbacks if hasattr(c, "saved_as")}


def contents(
    state: State, model: nn.Module, average: EMA | None, identity: Mapping[str, Any], *, full: bool
) -> dict[str, Any]:
    """Return a checkpoint's content as tensors and plain values; the tensors are not copied."""
    content = {
        "schema": SCHEMA,
        "identity": dict(identity),
        "progress": asdict(Progress.of(state)),
        "unix_time": time.time(),
        "model": _weights(model),
        "ema": None if average is None else average.state_dict(),
        "callbacks": {name: kept for name, c in _own_callbacks(state).items() if (kept := c.state_dict())},
    }
    if full:
        [optimizer], [schedule] = state.optimizers, state.schedulers
        content |= {
            "optimizer": {"names": _optimizer_names(model, optimizer), **optimizer.state_dict()},
            "schedule": schedule.state_dict(),
            "scaler": state.scaler.state_dict() if state.scaler is not None else {},
        }
    return content


def restore(
    checkpoint: tuple[Path, Mapping[str, Any]],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    schedule: torch.optim.lr_scheduler.LRScheduler,
    average: EMA | None,
) -> None:
    """Load weights, optimizer, schedule and EMA weights from a checkpoint, after comparing every name and tensor spec.

    Raises:
        ConfigError: lists what does not fit; nothing has been changed then.
    """
    (path, content), problems = checkpoint, []
    saved = content["optimizer"]
    if text := difference(tensor_specs(_weights(model)), tensor_specs(content["model"])):
        fix = "Use the configuration that it was made with."
        problems.append(f"{path}: its weights do not fit the model: {text}. {fix}")
    if saved["names"] != _optimizer_names(model, optimizer):
        problems.append(f"{path}: its optimizer has other parameters or groups. Use optimizer.decay as it was.")
    elif text := difference(_wanted_moments(optimizer), _moments(saved["state"])):
        problems.append(f"{path}: its optimizer state does not fit the model: {text}. The file is not whole.")
    if (average is None) != (content.get("ema") is None):
        has, wants = ("EMA weights", "false") if average is None else ("no EMA weights", "true")
        problems.append(f"ema.enabled: {wants}, but {path} has {has}. Leave it as the run was begun.")
    if problems:
        raise ConfigError(problems)
    if average is not None:
        average.bind(model)
        try:
            average.load_state_dict(content["ema"])
        except ValueError as error:
            raise ConfigError([f"{path}: {error}"]) from error
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(content["model"][canonical_name(name)])
    kept = _cloned(saved["state"]) if next(model.parameters()).device.type == "cpu" else saved["state"]
    optimizer.load_state_dict({"state": kept, "param_groups": saved["param_groups"]})
    for parameter, of_parameter in () if isinstance(optimizer, SmallAdamW) else optimizer.state.items():
        optimizer.state[parameter] = lay_out_like(of_parameter, parameter.detach())
    schedule.load_state_dict(content["schedule"])


def _wanted_moments(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Return the tensor specs of AdamW's state, by each parameter's position."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if isinstance(optimizer, SmallAdamW):
        return _moments({n: optimizer.empty_state(parameter, "meta") for n, parameter in enumerate(parameters)})
    found: dict[str, str] = {}
    for n, form in tensor_specs({str(n): parameter for n, parameter in enumerate(parameters)}).items():
        found |= {f"step of parameter {n}": "float32 ()", f"exp_avg of {n}": form, f"exp_avg_sq of {n}": form}
    return found


def _moments(state: Mapping[int, Mapping[str, Any]]) -> dict[str, str]:
    kept = {n: {k: v for k, v in of.items() if isinstance(v, Tensor)} for n, of in state.items()}
    return tensor_specs(
        {f"{k} of parameter {n}" if k == "step" else f"{k} of {n}": v for n, of in kept.items() for k, v in of.items()}
    )


def _cloned(state: Mapping[int, Any]) -> dict[int, Any]:
    """Copy an optimizer's tensors: on a CPU it would otherwise use the mapped file, whose disk space stays occupied."""
    return {n: {k: v.clone() if isinstance(v, Tensor) else v for k, v in kept.items()} for n, kept in state.items()}


def disagreements(
    content: Mapping[str, Any], identity: Mapping[str, Any], path: Path, defaults: Mapping[str, Any]
) -> list[str]:
    """One message for each value of a run's identity that differs between a checkpoint and this run.

    Args:
        defaults: key -> default, for every key of a configuration. A key that the checkpoint lacks had its default: the
            checkpoint comes from a version without it. A key that only the checkpoint has may change now. An unknown key
            is refused: a newer version wrote it. A value that was given as `${...}` is not compared, because a checkpoint
            does not store what it resolved to.
    """
    saved = content["identity"]
    made = {key: saved.get(key, defaults.get(key)) for key in identity}
    differing = [
        f"{key}: {value!r}, but {path} was made with {made[key]!r}. A run resumes as it began: use that value, or another "
        f"run_name."
        for key, value in identity.items()
        if made[key] != value and not masking.is_interpolated(made[key])
    ]
    unknown = [key for key, value in saved.items() if key not in (*identity, *defaults) and value is not None]
    return differing + [
        f"{key}: {path} was made with {saved[key]!r}, and this version has no such key. Use the version that wrote it."
        for key in unknown
    ]


# ---------------------------------------------------------------------------------------------------------------------
# When
# ---------------------------------------------------------------------------------------------------------------------


class Stopped(SystemExit):
    """The run was stopped by a signal, on all ranks at once; the exit code is 128 + signal."""

    code: int


class Checkpointer(Callback):
    """Writes checkpoints between batches on rank 0, and stops the run at a signal.

    On a resume it restores Composer's own state: time, scaler, callbacks. `restore` has already loaded the rest.

    Args:
        folder: of the checkpoints.
        config: with every_images and snapshot_every_images resolved.
        model: the ComposerModel itself, not wrapped by DDP.
        average: the EMA, if there is one.
        identity: key -> plain value; a checkpoint has to agree with it.
        before_saving: called on all ranks before saving; raises if the state must not be saved.
        resume_from: path and content of the checkpoint to resume from, or None.
    """

    def __init__(
        self,
        folder: Path,
        config: SaveConfig,
        *,
        model: nn.Module,
        average: EMA | None,
        identity: Mapping[str, Any],
        before_saving: Callable[[], None],
        resume_from: tuple[Path, Mapping[str, Any]] | None,
    ):
        assert config.every_images is not None and config.snapshot_every_images is not None
        self.folder, self.config, self.model, self.identity = folder, config, model, dict(identity)
        self.average, self.before_saving, self.resume_from = average, before_saving, resume_from
        self.last_full: Path | None = resume_from[0] if resume_from else None
        self._last_batch = -1
        self._last_write_sec: float | None = None
        self._signal = 0
        self._signal_at = 0.0
        self._handlers: dict[int, Any] = {}
        self._group: torch.distributed.ProcessGroup | None = None
        self._state: State | None = None

    def after_load(self, state: State, logger: Logger) -> None:
        if self.resume_from is not None:
            _, content = self.resume_from
            self.resume_from = None  # drop all references: the file may be pruned
            if state.scaler is not None and content["scaler"]:
                state.scaler.load_state_dict(content["scaler"])
            for name, callback in _own_callbacks(state).items():
                if name in content["callbacks"]:
                    callback.load_state_dict(content["callbacks"][name])
            state.timestamp = Progress(**content["progress"]).timestamp()
            self._last_batch = state.timestamp.batch.value

    def fit_start(self, state: State, logger: Logger) -> None:
        if not self.config.every_images:
            return
        self._state = state
        if dist.get_world_size() > 1:
            # On the CPU, so that checking for a signal does not wait for a device.
            self._group = torch.distributed.new_group(backend="gloo")
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, frame: Any) -> None:
        if not self._signal:
            self._signal, self._signal_at = number, time.monotonic()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        assert state.previous_timestamp is not None
        # The snapshot first: a run killed after this batch's full checkpoint would resume behind the missing snapshot.
        before, now = state.previous_timestamp.sample.value, state.timestamp.sample.value
        if _passed(self.config.snapshot_every_images, before, now):
            self._save(state, full=False)
        if self._handlers:
            number, waited_sec = self._agree_on_signal()
            if number:
                self._stop(state, number, waited_sec)
        if _passed(self.config.every_images, before, now):
            self._save(state, full=True)

    def all_ready(self, is_here: bool) -> bool:
        """Tell the others whether this rank has its next batch; return whether all have theirs. Stop if any got a signal.

        A rank that has its batch waits for the others here, and not in the step's collectives, which cannot be
        interrupted. So when a signal comes, all ranks are between the same two batches and can save and stop together.
        No rank hangs: each calls this repeatedly until all have their batch, about once a second while it waits for data.
        """
        if not self._handlers or self._state is None:
            return is_here
        number, waited_sec, are_here = self._agree(is_here)
        if number:
            self._stop(self._state, number, waited_sec)
        return are_here

    def stop_between_batches(self, state: State) -> None:
        """Stop as between batches, after a signal has stopped an evaluation. All ranks call it."""
        self._stop(state, *self._agree_on_signal())

    @property
    def signal(self) -> int:
        """The signal that this rank has received, 0: none."""
        return self._signal

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.config.every_images and self._last_batch != state.timestamp.batch.value:
            self._save(state, full=True)
        self._give_back_signals()

    def close(self, state: State, logger: Logger) -> None:
        self._give_back_signals()

    def _give_back_signals(self) -> None:
        for number, handler in self._handlers.items():
            with contextlib.suppress(ValueError):  # the interpreter is shutting down
                signal.signal(number, handler)
        self._handlers = {}

    def _agree_on_signal(self) -> tuple[int, float]:
        """Return the signal that any rank has received, or 0, and the longest time since one. The same on all ranks."""
        number, waited_sec, _ = self._agree(True)
        return number, waited_sec

    def _agree(self, is_here: bool) -> tuple[int, float, bool]:
        """As `_agree_on_signal`, and also return whether all ranks have their batch."""
        waited = time.monotonic() - self._signal_at if self._signal else 0.0
        if self._group is None:
            return self._signal, waited, is_here
        seen = torch.tensor([float(self._signal), waited, float(not is_here)], dtype=torch.float64)
        torch.distributed.all_reduce(seen, torch.distributed.ReduceOp.MAX, group=self._group)
        return int(seen[0]), float(seen[1]), not seen[2]

    def _stop(self, state: State, number: int, waited_sec: float) -> None:
        """Exit with 128 + signal, after saving a checkpoint if there is time. All ranks are between the same two batches."""
        name, batch = signal.Signals(number).name, state.timestamp.batch.value
        needed = self._slowest_write_sec()
        if not batch:
            outcome = "nothing has been trained"
        elif self._last_batch == batch:
            outcome = f"batch {batch} is saved already"
        elif waited_sec + needed > self.config.grace_sec:
            outcome = (
                f"no checkpoint: the last one took {needed:.1f} s, and {waited_sec:.1f} of save.grace_sec="
                f"{self.config.grace_sec:g} had passed; the last whole one is {self.last_full}"
            )
        else:
            self._save(state, full=True)
            outcome = f"saved {self.last_full}"
        log.info(f"{name}: stopped after batch {batch}; {outcome}. The same command resumes it.")
        self._handlers = {}  # not restored: when the first rank exits, the launcher sends SIGTERM to the others
        raise Stopped(128 + number)

    def _slowest_write_sec(self) -> float:
        """Seconds that the last write took on rank 0. 0 before the first: a failed try cannot damage anything."""
        known = [self._last_write_sec or 0.0]
        dist.broadcast_object_list(known)
        return known[0]

    def _save(self, state: State, *, full: bool) -> None:
        """Write on rank 0. All ranks learn the outcome, and stop together if it failed."""
        self.before_saving()
        outcome: list[str | None] = [None]
        if dist.get_global_rank() == 0:
            begun = time.monotonic()
            content = contents(state, self.model, self.average, self.identity, full=full)
            batch, images = content["progress"]["batch"], content["progress"]["images"]
            name = stem(FULL, batch) if full else stem(WEIGHTS, images)
            try:
                path = write(self.folder, name, content)
                if full:
                    self.last_full, self._last_write_sec = path, time.monotonic() - begun
                    for old in listed(self.folder, FULL)[self.config.keep :]:
                        old.unlink()
            except (OSError, RuntimeError) as error:
                outcome[0] = self._failure(name, content, error)
        dist.broadcast_object_list(outcome)
        if outcome[0] is not None:
            self._give_back_signals()
            raise OSError(outcome[0])
        if full:
            self._last_batch = state.timestamp.batch.value

    def _failure(self, name: str, content: Mapping[str, Any], error: Exception) -> str:
        free_gib = shutil.disk_usage(self.folder).free / 2**30 if self.folder.exists() else 0.0
        reason = getattr(error, "strerror", None) or error
        return (
            f"checkpoints: {self.folder / name} ({num_bytes(content) / 2**30:.3g} GiB) cannot be written: {reason}; "
            f"{free_gib:.3g} GiB are free. The run stops, since it could not be resumed from here. The last whole checkpoint "
            f"is {self.last_full}. Make room, and start the same command again."
        )


def _passed(every: int | None, before: int, now: int) -> bool:
    """True if a multiple of `every` is in (before, now]."""
    return bool(every and now // every > before // every)


def num_bytes(content: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    if isinstance(content, Tensor):
        return content.nbytes
    if isinstance(content, Mapping):
        return sum(num_bytes(value) for value in content.values())
    return sum(num_bytes(value) for value in content) if isinstance(content, list | tuple) else 0
