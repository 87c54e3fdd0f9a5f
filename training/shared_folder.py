"""Whether all machines of a run see one run folder, found out before anything is built."""

from __future__ import annotations

import contextlib
import platform
import time
import uuid
from pathlib import Path

from composer.utils import dist

from cli import ranks
from cli.errors import ConfigError

SEEN = ".seen-"
SEEN_SEC = 30.0  # a network's file system may keep what it knows of a folder so long
POLL_SEC = 0.5


def check_is_shared(folder: Path) -> None:
    """Have each machine look for a file that rank 0 writes into the run's folder. All ranks call it.

    Checkpoints are read by all ranks: a machine without them would end the run at its first resume.

    Raises:
        ConfigError: on all ranks, names the machines that do not see it.
    """
    if ranks.num_nodes() == 1:
        return
    token = folder / f"{SEEN}{uuid.uuid4().hex}"

    def leave() -> tuple[Path, str]:
        try:
            for left in folder.glob(f"{SEEN}*"):  # by a start that was killed
                left.unlink(missing_ok=True)
            token.touch()
        except OSError as error:
            raise ConfigError([f"run_folder: {error}. Give a folder that this user may write in."]) from error
        return token, platform.node()

    def look() -> None:
        until = time.monotonic() + SEEN_SEC
        while not path.exists():
            if time.monotonic() > until:
                given = f"{platform.node()} does not see what {first} has written into {folder}"
                possible = (
                    "Wanted: a folder that all machines share, or save.every_images=0, which keeps no checkpoints"
                )
                raise ConfigError([f"run_folder: {given}. {possible}."])
            with contextlib.suppress(OSError):
                list(folder.iterdir())  # has some file systems ask again
            time.sleep(POLL_SEC)

    path, first = ranks.on_rank_zero(leave)
    try:
        ranks.on_one_rank_of_each_machine(look)
    finally:
        if dist.get_global_rank() == 0:
            path.unlink(missing_ok=True)
