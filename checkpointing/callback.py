"""Checkpoints: when they are written. What they hold: checkpointing/content.py; files: checkpointing/files.py.

Between two batches a state is only copied, into host memory (checkpointing/host_copy.py). A thread writes it while the run
continues; the next one waits for it. An error in the thread stops the run at the next batch's end. A signal, an evaluation's
line and the run's end wait for it. States that are in parts over the ranks are written between the batches, by all of them.

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
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from composer import Callback, Logger, State
from composer.loggers import ProgressBarLogger
from torch import nn

from checkpointing import sharded
from checkpointing.content import FULL_KEYS, Progress, collect_content, gather_content, stateful_callbacks
from checkpointing.files import FULL, WEIGHTS, file_stem, list_checkpoints, write_checkpoint
from checkpointing.host_copy import HostCopy
from common import dist
from common.log import log
from common.value_types import limited
from ema import EMA
from ranks import collectives, rendezvous
from ranks.collectives import STOP_SIGNALS
from weights.tensors import is_sharded_tensor, iterate_tensors

if TYPE_CHECKING:
    from checkpointing.uploads import Uploads

DEFAULT_EVERY_IMAGES = 512_000  # the evaluation interval of the MLPerf benchmark
DEFAULT_EVERY_MIN = 30.0
LEAVE_SEC = 600.0  # of a write, where another rank has failed: a disk that hangs must not hold the job


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints and snapshots."""

    every_images: int | None = limited(None, 0)
    """Images between full checkpoints; 0: never. null: eval.every_images, else 512000; synthetic data: 0."""
    every_min: float | None = limited(None, 0.0, 1e6)
    """Minutes between full checkpoints; 0: never. null: 30; with save.every_images, synthetic data or mlperf: 0."""
    keep: int = limited(2, 1)
    """Full checkpoints to keep; all snapshots are kept."""
    snapshot_every_images: int | None = limited(None, 0)
    """Images between snapshots of the weights; 0: never. null: as every_images; mlperf: the benchmark's."""
    grace_sec: float = limited(30.0, 0.0, 1e6)
    """Seconds from a signal to the kill, for the last upload; Composer's launcher: 30."""
    remote: str | None = None
    """s3://BUCKET/PREFIX that also receives checkpoints and record; resumes from there."""
    patience_sec: float = limited(600.0, 0.0, 1e6)
    """How long the final upload may make no progress."""

    def resolved(self, every_images: int, snapshot_every_images: int, every_min: float) -> SaveConfig:
        """Fill in these intervals where null was given; `every_min` only where images between checkpoints were not given."""
        every = every_images if self.every_images is None else self.every_images
        snapshots = snapshot_every_images if self.snapshot_every_images is None else self.snapshot_every_images
        if (minutes := self.every_min) is None:
            minutes = every_min if self.every_images is None else 0.0
        return dataclasses.replace(self, every_images=every, snapshot_every_images=snapshots, every_min=minutes)

    @property
    def is_on(self) -> bool:
        """True for a resolved run that writes full checkpoints."""
        return bool(self.every_images or self.every_min)

    def describe(self) -> str:
        """Return when a resolved run writes full checkpoints, for the user."""
        every = [f"{self.every_images:,} images"] if self.every_images else []
        every += [f"{self.every_min:g} minutes"] if self.every_min else []
        return f"every {' and every '.join(every)}" if every else "none"


class StoppedBySignal(SystemExit):
    """The run was stopped by a signal, on all ranks at once; the exit code is 128 + signal."""

    code: int


class Checkpointer(Callback):
    """Writes checkpoints between batches on rank 0, and stops the run at a signal.

    On a resume it restores Composer's own state: time, scaler, callbacks. `restore` has already loaded the rest.

    Args:
        folder: of the checkpoints.
        config: with its intervals resolved.
        model: the ComposerModel itself, not wrapped by DDP.
        average: the EMA, if there is one.
        identity: key -> plain value; a checkpoint has to agree with it.
        before_saving: called on all ranks before saving; raises if the state must not be saved.
        resume_from: path and content of the checkpoint to resume from, or None.
        uploads: notified of each checkpoint, on rank 0; None: save.remote is not given.
        how_to_resume: what resumes the run, for the message when a signal stops it.
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
        uploads: Uploads | None = None,
        how_to_resume: str = "The same command",
    ):
        self.folder, self.config, self.model, self.identity = folder, config, model, dict(identity)
        self.average, self.before_saving, self.resume_from = average, before_saving, resume_from
        self.last_full: Path | None = resume_from[0] if resume_from else None
        self.how_to_resume = how_to_resume
        self._copy, self._uploads = HostCopy(), uploads
        self._writing: threading.Thread | None = None
        self._write_error: str | None = None  # why the thread could not write
        collectives.call_before_exit(lambda text: self._join(LEAVE_SEC))
        self._has_logged_no_room = False
        self._last_batch = -1
        self._saved_at = time.monotonic()  # of the last full checkpoint, on this rank
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
            for name, callback in stateful_callbacks(state).items():
                if name in content["callbacks"]:
                    callback.load_state_dict(content["callbacks"][name])
            state.timestamp = Progress(**content["progress"]).timestamp()
            self._last_batch = state.timestamp.batch.value

    def fit_start(self, state: State, logger: Logger) -> None:
        for bar in logger.destinations:  # Composer begins a bar with an epoch, and a resume may lie within one
            if isinstance(bar, ProgressBarLogger) and state.timestamp.batch_in_epoch.value:
                bar.epoch_start(state, logger)
        if not self.config.is_on:
            return
        self._state, self._saved_at = state, time.monotonic()
        if dist.get_world_size() > 1:
            self._group = rendezvous.new_cpu_group()
        for number in STOP_SIGNALS:
            self._handlers[number] = signal.signal(number, self._note_signal)

    def _note_signal(self, number: int, frame: Any) -> None:
        if not self._signal:
            self._signal, self._signal_at = number, time.monotonic()

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        assert state.previous_timestamp is not None
        # The snapshot first: a run killed after this batch's full checkpoint would resume behind the missing snapshot.
        before, now = state.previous_timestamp.sample.value, state.timestamp.sample.value
        every = {WEIGHTS: self.config.snapshot_every_images, FULL: self.config.every_images}
        due = [kind for kind, images in every.items() if _has_passed(images, before, now)]
        if self._handlers:
            number, _, is_late = self._agree()
            if number:
                if WEIGHTS in due:
                    self._save(state, [WEIGHTS])
                self._stop(state, number)
            if is_late and FULL not in due:
                due.append(FULL)
        if due:
            self._save(state, due, in_background=True)

    def all_ready(self, is_here: bool) -> bool:
        """Tell the others whether this rank has its next batch; return whether all have theirs. Stop if any got a signal.

        A rank that has its batch waits for the others here, and not in the step's collectives, which cannot be
        interrupted. So when a signal comes, all ranks are between the same two batches and can save and stop together.
        No rank hangs: each calls this repeatedly until all have their batch, about once a second while it waits for data.
        """
        if not self._handlers or self._state is None:
            return is_here
        number, are_here, _ = self._agree(is_here)
        if number:
            self._stop(self._state, number)
        return are_here

    def stop_between_batches(self, state: State) -> None:
        """Stop as between batches, after a signal has stopped an evaluation. All ranks call it."""
        self._stop(state, self._agree()[0])

    @property
    def signal(self) -> int:
        """The signal that this rank has received, 0: none."""
        return self._signal

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.config.is_on and self._last_batch != state.timestamp.batch.value:
            self._save(state, [FULL])
        self.settle()
        self._restore_signal_handlers()

    def close(self, state: State, logger: Logger) -> None:
        self._restore_signal_handlers()
        self._join()
        self._copy.close()

    def _restore_signal_handlers(self) -> None:
        for number, handler in self._handlers.items():
            with contextlib.suppress(ValueError):  # the interpreter is shutting down
                signal.signal(number, handler)
        self._handlers = {}

    def _agree(self, is_here: bool = True) -> tuple[int, bool, bool]:
        """Return the signal that any rank has received, or 0, whether all have their batch, and whether save.every_min have
        passed on rank 0's clock. The same on all ranks.

        Raises:
            OSError: on all ranks, what the background write failed with.
        """
        every_sec = 60.0 * (self.config.every_min or 0.0)
        is_late = dist.get_global_rank() == 0 and 0.0 < every_sec <= time.monotonic() - self._saved_at
        has_failed = self._write_error is not None or self._replaced is not None
        flags = torch.tensor([self._signal, not is_here, is_late, has_failed], dtype=torch.int64)
        if self._group is not None:
            torch.distributed.all_reduce(flags, torch.distributed.ReduceOp.MAX, group=self._group)
        if flags[3]:
            self.settle()
        return int(flags[0]), not flags[1], bool(flags[2])

    @property
    def _replaced(self) -> str | None:
        """Why this start may no longer write, or None."""
        return None if self._uploads is None else self._uploads.replaced

    def _stop(self, state: State, number: int) -> None:
        """Save a checkpoint, and exit with 128 + signal. All ranks are between the same two batches."""
        batch, since = state.timestamp.batch.value, self._signal_at or time.monotonic()
        self.settle()
        if not batch:
            outcome = "nothing has been trained"
        elif self._last_batch == batch:
            outcome = f"batch {batch} is saved already"
        else:
            self._save(state, [FULL])
            outcome = f"saved {self.last_full}"
        outcome += self._uploaded(time.monotonic() - since)
        log.info(
            f"{signal.Signals(number).name}: stopped after batch {batch}; {outcome}. {self.how_to_resume} resumes it."
        )
        self._handlers = {}  # not restored: when the first rank exits, the launcher sends SIGTERM to the others
        raise StoppedBySignal(128 + number)

    def _uploaded(self, waited_sec: float) -> str:
        """Wait for the uploads in what is left of the grace, on all ranks, and return a text about them for the log."""
        if self.config.remote is None:
            return ""
        missing = None if self._uploads is None else self._uploads.wait(max(0.0, self.config.grace_sec - waited_sec))
        dist.barrier()  # the first rank that leaves has the launcher end the others
        return f". {missing}" if missing else f", in {self.config.remote} too"

    def newest(self) -> Path | None:
        """Return the newest whole full checkpoint that rank 0 knows of, after any background write; None: none yet."""
        self._join()
        return self.last_full

    def _join(self, limit_sec: float | None = None) -> None:
        """Wait for the background write, if there is one; no longer than the limit, if one is given."""
        if self._writing is not None:
            self._writing.join(limit_sec)

    def settle(self) -> None:
        """Wait for the background write; all ranks call it. Raises OSError: on all ranks, what it failed with."""
        self._join()
        failure, self._write_error = self._write_error, None
        self._fail_together(failure or self._replaced)

    def _fail_together(self, failure: str | None) -> None:
        """Raise OSError on all ranks where rank 0 has a failure."""
        outcome = [failure]
        dist.broadcast_object_list(outcome)
        if outcome[0] is not None:
            self._restore_signal_handlers()
            raise OSError(outcome[0])

    def _save(self, state: State, kinds: Sequence[str], *, in_background: bool = False) -> None:
        """Write checkpoints of this batch; all ranks learn the outcome, and stop if it failed.

        Args:
            kinds: WEIGHTS, FULL, or both, in the order in which they are written.
            in_background: let a thread write a copy, and continue.
        """
        self.before_saving()
        self.settle()
        # Without full checkpoints ranks do not agree between batches, and would not hear of a failure.
        in_background = in_background and bool(self._handlers)
        if any(map(is_sharded_tensor, self.model.parameters())):
            for kind in kinds:
                self._save_parts(state, kind)
        elif dist.get_global_rank() == 0:
            now = state.timestamp
            content = collect_content(state, self.model, self.average, self.identity, full=FULL in kinds)
            names = [file_stem(kind, now.batch.value if kind == FULL else now.sample.value) for kind in kinds]
            is_copied = in_background and self._has_room(content)
            content, ready = self._copy.of(content) if is_copied else (content, lambda: None)
            # No daemon: a process that ends waits for it.
            self._writing = threading.Thread(target=self._write, args=(names, content, ready), name="checkpoints")
            self._writing.start()
            if not is_copied:  # the state itself is written, which the next batch changes
                self._join()
        if not in_background:
            self.settle()
        if FULL in kinds:
            self._last_batch, self._saved_at = state.timestamp.batch.value, time.monotonic()

    def _has_room(self, content: Mapping[str, Any]) -> bool:
        has_room = self._copy.has_room(content)
        if not has_room and not self._has_logged_no_room:
            self._has_logged_no_room = True
            need = f"{count_bytes(content) / 2**30:.3g} GiB of free memory are needed for a copy of the state"
            log.info(f"checkpoints: {need}: training waits while one is written.")
        return has_room

    def _write(self, names: Sequence[str], content: Mapping[str, Any], ready: Callable[[], None]) -> None:
        """Write checkpoints of one state in a thread of rank 0."""
        name, kind_content = names[0], content
        try:
            ready()
            for name in names:
                is_full = name.startswith(FULL)
                kind_content = (
                    content if is_full else {key: value for key, value in content.items() if key not in FULL_KEYS}
                )
                path = write_checkpoint(self.folder, name, kind_content)
                if is_full:
                    self._has_written(path)
                if self._uploads is not None:
                    self._uploads.ask()
        except Exception as error:
            self._write_error = self._failure(name, kind_content, error)

    def _save_parts(self, state: State, kind: str) -> None:
        """Write a checkpoint on all ranks where weights are shared out over them, or a snapshot on rank 0."""
        full, rank = kind == FULL, dist.get_global_rank()
        content = collect_content(state, self.model, self.average, self.identity, full=full)
        name = file_stem(kind, state.timestamp.batch.value if full else state.timestamp.sample.value)
        failure = None
        if not full:
            content = gather_content(content, here=rank == 0)
        try:
            if full:
                path = sharded.write_parts(self.folder, name, content, rank, dist.all_gather_object, self._group)
            elif rank == 0:
                write_checkpoint(self.folder, name, content)
            if full and rank == 0:
                self._has_written(path)
        except (OSError, RuntimeError) as error:
            failure = self._failure(name, content, error)
        self._fail_together(failure)
        if self._uploads is not None:
            self._uploads.ask()

    def _has_written(self, path: Path) -> None:
        """Note a new full checkpoint, and remove those beyond save.keep."""
        self.last_full = path
        for old in list_checkpoints(self.folder, FULL)[self.config.keep :]:
            if self._uploads is None or not self._uploads.is_kept(old):
                sharded.remove_checkpoint(old)

    def _failure(self, name: str, content: Mapping[str, Any], error: Exception) -> str:
        free_gib = shutil.disk_usage(self.folder).free / 2**30 if self.folder.exists() else 0.0
        reason = getattr(error, "strerror", None) or error
        return (
            f"checkpoints: {self.folder / name} ({count_bytes(content) / 2**30:.3g} GiB) cannot be written: {reason}; "
            f"{free_gib:.3g} GiB are free. The run stops, since it could not be resumed from here. The last whole checkpoint "
            f"is {self.last_full}. Make room, and start the same command again."
        )


def _has_passed(every: int | None, before: int, now: int) -> bool:
    """True if a multiple of `every` is in (before, now]."""
    return bool(every and now // every > before // every)


def count_bytes(content: Any) -> int:
    """Return the bytes of all tensors in nested containers."""
    return sum(tensor.nbytes for tensor in iterate_tensors(content))
