"""What a run leaves where it ends: its page, and how to resume it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

from composer.utils import dist

from cli.interrupts import CODE
from cli.log import log
from record.checkpoint_files import FULL, listed
from training.run_config import RunConfig, name_without_time


def how_to_resume(config: RunConfig) -> str:
    """Return what resumes a run: the same command, with the name that the run was given where it had none."""
    name = config.run_name or ""
    is_made_up = re.fullmatch(rf"{re.escape(name_without_time(config))}-\d{{8}}-\d{{6}}-\d+", name)
    return "The same command" + (f" with run_name={name}" if is_made_up else "")


def what_is_left(config: RunConfig | None) -> str:
    """Return what is saved of a run that a signal has ended outside of its training, and what to do.

    Args:
        config: resolved; None: the signal came before there was one.
    """
    if config is not None:
        if saved := listed(Path(config.run_folder, config.run_name or "", "checkpoints"), FULL):
            return f"The last checkpoint is {saved[0]}. {how_to_resume(config)} resumes it."
        if not config.save.is_on:
            return "Nothing was saved: save.every_images and save.every_min are 0. The same command starts it again."
    return "Nothing was saved yet. The same command starts it again."


@contextlib.contextmanager
def page_if_it_fails(folder: Path) -> Iterator[None]:
    """Write the page of a run that fails here, or is interrupted, without a word: what comes last is how it ended.

    After SIGTERM and SIGUSR1 it is not written: the time until the kill is the checkpoint's.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if not isinstance(error, SystemExit) or error.code == CODE:
            write_page(folder, is_silent=True)
        raise


def write_page(folder: Path, *, is_silent: bool = False) -> None:
    """Write a run's page on rank 0, and print where it is. No run fails for its page."""
    if dist.get_global_rank() != 0:
        return
    try:
        from reports import page  # its libraries are no part of training

        path = page.write([folder])
    except Exception as error:  # also a defect of the page: the run's result is more
        log.warning(f"page: it cannot be written: {error} python -m reports.page {folder} tries again.")
        return
    if not is_silent:
        log.info(f"page: {path}")
