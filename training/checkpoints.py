"""Checkpoints: when they are written. What they hold: training/checkpoint_content.py; files: record/checkpoint_files.py.

RUN/checkpoints/full-ba000000001200-DIGEST.pt        weights, EMA, optimizer, schedule, scaler, counts, callbacks
                full-ba000000001200-DIGEST.parts/    the same, where weights are shared out: each rank writes its parts
                weights-im000000512000-DIGEST.pt     a snapshot: weights, EMA, images seen, time

Composer's own checkpoints are not used: it does not compare names, removes `latest` before it creates a new one, writes in
place, and unpickles any file that it finds (seen with 0.32.1).
"""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from composer import Callback, Logger, State
from composer.utils import dist
from torch import Tensor, nn

from cli.limits import limited
from cli.log import log
from cli.ranks import STOP_SIGNALS
from ema import EMA
from record import checkpoint_folders
from record.checkpoint_files import FULL, WEIGHTS, listed, stem, write
from training.checkpoint_content import Progress, contents, gathered, own_callbacks
from weights.parts import is_part

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
            for name, callback in own_callbacks(state).items():
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
        """Write on rank 0, or on all ranks where weights are shared out. All learn the outcome, and stop if it failed."""
        self.before_saving()
        outcome: list[str | None] = [None]
        rank, begun = dist.get_global_rank(), time.monotonic()
        is_shared, content = any(map(is_part, self.model.parameters())), {}
        if is_shared or rank == 0:
            content = contents(state, self.model, self.average, self.identity, full=full)
        now = state.timestamp
        name = stem(FULL, now.batch.value) if full else stem(WEIGHTS, now.sample.value)
        if is_shared and not full:
            content = gathered(content, here=rank == 0)
        try:
            if is_shared and full:
                path = checkpoint_folders.write(self.folder, name, content, rank, dist.all_gather_object, self._group)
            elif rank == 0:
                path = write(self.folder, name, content)
            if full and rank == 0:
                self.last_full, self._last_write_sec = path, time.monotonic() - begun
                for old in listed(self.folder, FULL)[self.config.keep :]:
                    checkpoint_folders.remove(old)
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
