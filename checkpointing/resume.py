"""Resuming a run: its folder's lock, its newest whole checkpoint, and whether this start computes what it began with.

A run's identity is one dict of plain values: everything that may not change between its starts (training/start.py makes it).
Before anything is built its keys are compared with config.yaml and overrides.yaml. Then, with encoders and datasets loaded,
it is compared with the checkpoint's identity.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from checkpointing.content import Progress, identity_problems
from checkpointing.files import find_newest, read_outline
from checkpointing.shared_folder import check_is_shared
from common import dist, errors, masking
from common.errors import ConfigError, Failed
from common.log import log
from ranks import collectives
from run_folder.files import CONFIG, lost_history, read_config
from run_folder.mlperf_log import lost_events

ENCODERS = "encoders."
"""Prefix of the encoders' fingerprints in an identity."""

# --- the identity ---


def without_paths(key: str, value: Any) -> Any:
    """Return a key's value without what may differ between the starts of one run: the paths of streams."""
    if key != "data.streams" or not isinstance(value, list):
        return value
    paths = ("remote", "local", "metadata")
    return [{n: part for n, part in stream.items() if n not in paths and part is not None} for stream in value]


def identity_for_checkpoint(identity: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity as a checkpoint stores it: the initial weights' path as it was given, with its `${...}`.

    Numbers and names of choices are stored resolved, since they identify the run.
    """
    return {**identity, **masking.restore_interpolations({"model.denoiser": identity["model.denoiser"]})}


def compare_with_config(folder: Path, identity: Mapping[str, Any]) -> bool:
    """Compare an identity's keys with the configuration that a run began with.

    Returns:
        True if the run's files have every key of the identity. If they lack some (a file was cut off), the checkpoint has
        them.

    Raises:
        ConfigError: lists what differs.
    """
    saved = {key: without_paths(key, value) for key, value in read_config(folder).items()}
    differing = {key: value for key, value in identity.items() if key in saved and saved[key] != value}
    if differing:
        texts = {key: [json.dumps(each).strip('"') for each in (value, saved[key])] for key, value in differing.items()}
        again = "A run resumes as it began: use that value, or another run_name."
        raise ConfigError(
            [f"{key}: {now}, but {folder} was begun with {was}. {again}" for key, (now, was) in texts.items()]
        )
    return identity.keys() <= saved.keys()


def is_begun(folder: Path) -> bool:
    """True if an earlier start has written this run's configuration."""
    return (folder / CONFIG).is_file()


def _with_encoders_of(identity: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Return an identity, with another's encoders if it has none: a start builds them only if it needs them."""
    if any(key.startswith(ENCODERS) for key in identity):
        return dict(identity)
    return {**identity, **{key: digest for key, digest in other.items() if key.startswith(ENCODERS)}}


# --- the run's folder ---


@dataclass
class RunState:
    """A run that this process has locked, and its progress.

    checkpoint: path and content of the one to resume from, or None; lock: held by rank 0 until the process ends.
    """

    folder: Path
    progress: Progress
    checkpoint: tuple[Path, dict[str, Any]] | None
    lock: FileLock | None
    made: list[Path]
    """Folders that did not exist before this start, the outermost first."""
    lost: dict[str, str] = field(default_factory=dict)
    """File of the record -> what it has lost since the checkpoint."""

    def log_status(self, num_starts: int, save: str) -> None:
        """Log where the run begins or resumes, when it saves, and how to watch it.

        Args:
            save: the points of its checkpoints, for the user.
        """
        if self.lock is None:
            return
        if num_starts == 1 and self.checkpoint is None:
            log.info(f"run_name: {self.folder} begins.")
        else:
            at = f"batch {self.progress.batch}, {self.progress.images:,} images"
            where = f"{at} ({self.checkpoint[0]})" if self.checkpoint else "its beginning: it has no checkpoint"
            log.info(f"run_name: {self.folder} resumes from {where}.")
        for name, text in self.lost.items():
            why = "truncated, or an older copy. summary.json lists it in history_lost"
            log.info(f"run_name: {self.folder / name} {text}: {why}.")
        log.info(f"checkpoints: {save}; page: python -m reports.live {self.folder}")

    def verify(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Compare this start's identity with that of the checkpoint that it resumes from.

        Returns:
            the identity; with the checkpoint's encoders if this start builds none.

        Raises:
            ConfigError: lists what differs.
        """
        if self.checkpoint is None:
            return dict(identity)
        path, content = self.checkpoint
        saved = _with_encoders_of(content["identity"], identity)
        full = _with_encoders_of(identity, saved)
        if problems := identity_problems({**content, "identity": saved}, full, path):
            raise ConfigError(problems)
        return full

    def release(self) -> None:
        """Release the folder's lock."""
        if self.lock is not None:
            self.lock.release()

    @contextlib.contextmanager
    def cleanup_on_error(self) -> Iterator[None]:
        """Remove this start's folders if an error ends it in the context, on whichever rank.

        Raises:
            ConfigError: instead of a ValueError: an impossible start. Failed stays.
        """
        try:
            yield
        except BaseException as error:
            self.release()
            _remove(self.made, self.folder)
            is_ours = isinstance(error, ConfigError | Failed)
            if isinstance(error, ValueError) and not is_ours and errors.is_expected(error):
                raise ConfigError([str(error)]) from error
            raise


def _missing(folder: Path) -> list[Path]:
    """Return those of a folder and its parents that do not exist, the outermost first."""
    return [path for path in reversed((folder.absolute(), *folder.absolute().parents)) if not path.exists()]


def _remove(made: Sequence[Path], own: Path) -> None:
    """Remove what a start has created: its own folder with its content, parents only if they are empty."""
    for path in reversed(made):
        with contextlib.suppress(OSError):  # another rank was first, or another process uses it too
            if path.is_file():
                path.unlink()
            elif path == own.absolute():
                shutil.rmtree(path)
            else:
                path.rmdir()


@contextlib.contextmanager
def locked(lock: FileLock, folder: Path) -> Iterator[None]:
    """Create a run's folder and take its lock, which stays taken unless the context fails.

    Raises:
        Failed: another process has it.
        OSError: this user cannot write there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
        yield
    except Timeout as error:
        problem = f"another process is training in {folder}"
        raise Failed(f"run_name: {problem}. Wait for it, or take another run_name.") from error
    except BaseException:
        lock.release()
        raise


def open_run(folder: Path, *, must_be_shared: bool, has_mlperf_log: bool) -> RunState:
    """Lock a run's folder and find its progress. All ranks call it.

    Args:
        must_be_shared: all machines read the checkpoints from this folder.
        has_mlperf_log: the run writes mlperf.log, which is compared with the checkpoint too.

    Raises:
        Failed: another process uses it.
        ConfigError: all its checkpoints are damaged; the newest one or the record is unreadable; a machine does not see it.
    """
    lock = FileLock(folder / ".lock")

    def find() -> tuple[Path | None, list[Path]]:
        made = _missing(folder / ".lock")
        try:
            with locked(lock, folder):
                return find_newest(folder / "checkpoints"), made
        except Failed:
            raise
        except BaseException as error:
            _remove(made, folder)
            if isinstance(error, OSError):
                raise ConfigError([f"run_folder: {error}. Give a folder that this user may write in."]) from error
            raise

    newest, made = collectives.on_rank_zero(find)
    state = RunState(folder, Progress(0, 0, 0, 0, 0, 0.0), None, lock if dist.get_global_rank() == 0 else None, made)
    with state.cleanup_on_error():
        if must_be_shared:
            check_is_shared(folder)
        content = None if newest is None else read_outline(newest)
        if newest is not None and content is not None:
            state.checkpoint, state.progress = (newest, content), Progress(**content["progress"])
        state.lost = collectives.on_rank_zero(
            lambda: lost_history(folder, content) | (lost_events(folder, content) if has_mlperf_log else {})
        )
    return state
