"""Whether all machines of a run see one run folder, and what the others get where they do not.

Every rank reads the run's record and its newest checkpoint when it starts; only rank 0 writes them. With save.remote the
store has both, so each machine may have a separate folder: those that do not see rank 0's fetch what they need.
"""

from __future__ import annotations

import contextlib
import platform
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from checkpointing.files import FULL, find_newest, list_checkpoints, number_of
from checkpointing.uploads import REPLACED
from common import dist
from common.errors import ConfigError
from common.log import log
from ranks import collectives
from run_folder.files import ALL_FILES

SEEN = ".seen-"
CHECKPOINTS = "checkpoints"


def check_is_shared(folder: Path) -> None:
    """Have each machine look for a file that rank 0 writes into the run's folder. All ranks call it.

    Raises:
        ConfigError: on all ranks, names the machines that do not see it: they would end the run at its first resume.
    """
    first, blind = _machines(folder)
    if names := [name for name in blind if name]:
        verb = "does" if len(names) == 1 else "do"
        problem = f"{' and '.join(names)} {verb} not see what {first} has written into {folder}"
        possible = "Wanted: a folder that all machines share, or save.every_images=0, which keeps no checkpoints"
        raise ConfigError(
            [f"run_folder: {problem}. {possible}; with save.remote and sharding=off each may have its own."]
        )


def fetch_to_all(folder: Path, upload: Callable[[], None], fetch: Callable[[], None]) -> None:
    """Have each machine that does not see rank 0's folder fetch what a start reads from the store. All ranks call it.

    Args:
        upload: gives the store what rank 0's folder has and the store has not. Rank 0 calls it first.
        fetch: brings the record and the newest checkpoint into this machine's folder. One rank of each machine calls it.

    Raises:
        ConfigError: on all ranks, a machine cannot write them, or has a checkpoint that rank 0 does not have.
        Failed: on all ranks, the store is away.
    """
    first, blind = _machines(folder)
    if not any(blind):
        return

    def newest_of_first() -> Path | None:
        newest = find_newest(folder / CHECKPOINTS)
        if newest is None or not newest.is_dir():
            upload()
            return newest
        problem = f"{names} cannot see {folder} on {first}, whose newest checkpoint is in parts"
        raise ConfigError([f"run_folder: {problem}. Give a folder that all machines share, for this start alone."])

    names = ", ".join(name for name in blind if name)
    log.info(f"run_folder: {names} cannot see {folder} on {first}: they fetch the record and the newest checkpoint.")
    newest = collectives.on_rank_zero(newest_of_first)
    is_blind = blind[dist.get_global_rank() - dist.get_local_rank()] is not None

    def own() -> list[Path]:
        return list_checkpoints(folder / CHECKPOINTS, FULL)

    def check() -> None:
        """Check that this machine has no newer checkpoint than rank 0 and the store."""
        if own() and (newest is None or number_of(own()[0]) > number_of(newest)):
            has = f"batch {number_of(newest)}" if newest is not None else "no checkpoint"
            problem = (
                f"{platform.node()} has {own()[0]}, of batch {number_of(own()[0])}, and rank 0 on {first} has {has}"
            )
            todo = f"Make {platform.node()} the first machine, so that the run resumes from there, or move that folder away"
            raise ConfigError([f"run_folder: {problem}. {todo}."])

    def fetch_here() -> None:
        with _explain_os_errors(folder):
            fetch()
            if newest is not None and [path.name for path in own()[:1]] != [newest.name]:
                problem = f"{platform.node()} has not fetched {newest.name} of {first}"
                raise ConfigError([f"run_folder: {problem}. Give a folder that all machines share."])
            for path in own()[1:]:
                path.unlink()

    for work in (check, fetch_here):  # all look before one writes
        collectives.on_one_rank_of_each_machine(work if is_blind else lambda: None)


def _machines(folder: Path) -> tuple[str, list[str | None]]:
    """Return the name of rank 0's machine; and for each rank None, or its machine's name: it is the first, and blind."""
    if collectives.num_nodes() == 1:
        return platform.node(), [None] * dist.get_world_size()
    word, was_there = uuid.uuid4().hex, folder.is_dir()

    def leave() -> tuple[Path, str, str]:
        token = folder / f"{SEEN}{uuid.uuid4().hex}"
        with _explain_os_errors(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{SEEN}*"):  # by a start that was killed
                left.unlink(missing_ok=True)
            token.write_text(word)
        return token, word, platform.node()

    path, word, first = collectives.on_rank_zero(leave)
    seen: list[bool] = []

    def look() -> None:
        if dist.get_global_rank():
            with _explain_os_errors(folder):
                seen.append(_is_seen(path, word))

    try:
        collectives.on_one_rank_of_each_machine(look)
        nodes = dist.all_gather_object(platform.node() if seen == [False] else None)
    finally:
        if dist.get_global_rank() == 0:
            path.unlink(missing_ok=True)
            if not was_there:
                with contextlib.suppress(OSError):  # another process writes there by now
                    folder.rmdir()  # a start that is refused leaves nothing
    return first, nodes


def _is_seen(path: Path, word: str) -> bool:
    """True where rank 0's file is seen from here.

    A network's file system may say for a minute that a new file is not there. So the file is created, as one that must not
    exist yet: that its server has to decide.
    """
    was_there = path.parent.is_dir()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.open("x").close()
    except FileExistsError:
        return path.read_text() == word  # another word: two machines have one folder, and it is not rank 0's
    path.unlink(missing_ok=True)
    if not was_there:
        with contextlib.suppress(OSError):
            path.parent.rmdir()
    return False


@contextlib.contextmanager
def _explain_os_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        problem = f"{platform.node()}: {folder}: {error.strerror or error}"
        raise ConfigError([f"run_folder: {problem}. Give a folder that this user may write in, with room."]) from error


def replace_record(folder: Path, aside: Path, names: Collection[str]) -> None:
    """Give a run's folder these files, which lie aside. What its record had is kept in the folder `replaced`."""
    archive = folder / REPLACED / time.strftime("%Y%m%d-%H%M%S")
    for name in {*names, *ALL_FILES}:
        old, new = folder / name, aside / name
        if old.is_file():
            archive.mkdir(parents=True, exist_ok=True)
            old.replace(archive / old.name)
        if new.is_file():
            old.parent.mkdir(parents=True, exist_ok=True)
            new.replace(old)
