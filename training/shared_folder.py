"""Whether all machines of a run see one run folder, and what the others get where they do not.

Every rank reads the run's record and its newest checkpoint when it starts; only rank 0 writes them. With save.remote the
store has both, so each machine may have a folder of its own: rank 0 sends what it has to those that do not see its folder.
"""

from __future__ import annotations

import contextlib
import platform
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed
from composer.utils import dist

from cli import ranks
from cli.errors import ConfigError
from cli.files import read_regular, whole, write_whole
from cli.log import log
from record.checkpoint_files import FULL, fault, find_newest, listed, number_of
from record.checkpoint_folders import remove
from record.files import ALL, MOST_OF_LINES
from training.uploads import REPLACED

SEEN = ".seen-"
CHECKPOINTS = "checkpoints"
COPIES = ".sent-by-rank-0"
"""File of a machine's own folder: the name of the checkpoint that was sent there."""
CHUNK_BYTES = 64 * 2**20


def check_is_shared(folder: Path) -> None:
    """Have each machine look for a file that rank 0 writes into the run's folder. All ranks call it.

    Raises:
        ConfigError: on all ranks, names the machines that do not see it: they would end the run at its first resume.
    """
    first, blind = _machines(folder)
    if names := [name for name in blind if name]:
        given = f"{' and '.join(names)} {'does' if len(names) == 1 else 'do'} not see what {first} has written into {folder}"
        possible = "Wanted: a folder that all machines share, or save.every_images=0, which keeps no checkpoints"
        raise ConfigError(
            [f"run_folder: {given}. {possible}; with save.remote and sharding=off each may have its own."]
        )


def bring_to_all(folder: Path) -> None:
    """Give each machine that does not see rank 0's folder the record and the newest checkpoint. All ranks call it.

    Raises:
        ConfigError: on all ranks, a machine cannot write them; or every checkpoint is damaged.
    """
    first, blind = _machines(folder)
    if not any(blind):
        return
    names = ", ".join(name for name in blind if name)

    def to_send() -> tuple[Path | None, dict[str, bytes]]:
        newest = find_newest(folder / CHECKPOINTS)
        if newest is not None and newest.is_dir():
            given = f"{names} cannot see that of {first}, whose newest checkpoint is in parts, of a start with sharding"
            raise ConfigError([f"run_folder: {given}. Give a folder that all machines share, for this start alone."])
        return newest, {name: read_regular(folder / name, MOST_OF_LINES) for name in ALL if (folder / name).is_file()}

    newest, record = ranks.on_rank_zero(to_send)
    log.info(f"run_folder: {names} cannot see that of {first}: the record, and what it resumes from, are sent there.")
    is_blind = blind[dist.get_global_rank() - dist.get_local_rank()] is not None

    def write_record() -> None:
        with _said(folder):
            _write(folder, record, newest)

    # All look before one writes.
    ranks.on_one_rank_of_each_machine((lambda: _check_is_no_newer(folder, newest, first)) if is_blind else lambda: None)
    ranks.on_one_rank_of_each_machine(write_record if is_blind else lambda: None)
    if newest is not None:
        _send(newest, is_wanted=is_blind and dist.get_local_rank() == 0)


def _machines(folder: Path) -> tuple[str, list[str | None]]:
    """Return the name of rank 0's machine; and for each rank None, or its machine's name: it is the first, and blind."""
    if ranks.num_nodes() == 1:
        return platform.node(), [None] * dist.get_world_size()
    word, was_there = uuid.uuid4().hex, folder.is_dir()

    def leave() -> tuple[Path, str, str]:
        token = folder / f"{SEEN}{uuid.uuid4().hex}"
        with _said(folder):
            folder.mkdir(parents=True, exist_ok=True)
            for left in folder.glob(f"{SEEN}*"):  # by a start that was killed
                left.unlink(missing_ok=True)
            token.write_text(word)
        return token, word, platform.node()

    path, word, first = ranks.on_rank_zero(leave)
    seen: list[bool] = []

    def look() -> None:
        if dist.get_global_rank():
            with _said(folder):
                seen.append(_is_seen(path, word))

    try:
        ranks.on_one_rank_of_each_machine(look)
        found = dist.all_gather_object(platform.node() if seen == [False] else None)
    finally:
        if dist.get_global_rank() == 0:
            path.unlink(missing_ok=True)
            if not was_there:
                with contextlib.suppress(OSError):  # another process writes there by now
                    folder.rmdir()  # a start that is refused leaves nothing
    return first, found


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
def _said(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        given = f"{platform.node()}: {folder}: {error.strerror or error}"
        raise ConfigError([f"run_folder: {given}. Give a folder that this user may write in, with room."]) from error


# --- what is sent ---


def _sent(folder: Path) -> set[str]:
    """Return the names of the checkpoints that rank 0 has sent to this machine's own folder."""
    file = folder / COPIES
    return set(file.read_text().split()) if file.is_file() else set()


def _check_is_no_newer(folder: Path, newest: Path | None, first: str) -> None:
    """Raises ConfigError: this machine has a checkpoint, its own or a copy, which rank 0 and the store have lost."""
    own = next(iter(listed(folder / CHECKPOINTS, FULL)), None)
    if own is not None and (newest is None or number_of(own) > number_of(newest)):
        has = f"batch {number_of(newest)}" if newest is not None else "no checkpoint"
        given = f"{platform.node()} has {own}, of batch {number_of(own)}, and rank 0 on {first} has {has}"
        todo = f"Make {platform.node()} the first machine, so that it goes on from there, or move that folder away"
        raise ConfigError([f"run_folder: {given}. {todo}."])


def replace_record(folder: Path, aside: Path, names: Collection[str]) -> None:
    """Give a run's folder these files, which lie aside. What its record had instead is kept in the folder `replaced`."""
    kept = folder / REPLACED / time.strftime("%Y%m%d-%H%M%S")
    for name in {*names, *ALL}:
        old, new = folder / name, aside / name
        if old.is_file() and (
            not new.is_file() or read_regular(old, MOST_OF_LINES) != read_regular(new, MOST_OF_LINES)
        ):
            kept.mkdir(parents=True, exist_ok=True)
            old.replace(kept / old.name)
        if new.is_file():
            old.parent.mkdir(parents=True, exist_ok=True)
            new.replace(old)


def _write(folder: Path, record: Mapping[str, bytes], newest: Path | None) -> None:
    """Bring a machine's own folder to rank 0's record, and remove what was sent there for an earlier start."""
    aside = folder / ".record.tmp"
    remove(aside)
    try:
        aside.mkdir(parents=True)
        for name, content in record.items():
            (aside / name).write_bytes(content)
        replace_record(folder, aside, record)
    finally:
        remove(aside)
    (folder / CHECKPOINTS).mkdir(exist_ok=True)
    for name in _sent(folder):
        if newest is None or name != newest.name:
            (folder / CHECKPOINTS / Path(name).name).unlink(missing_ok=True)


def _send(path: Path, *, is_wanted: bool) -> None:
    """Send a checkpoint's file from rank 0 to the ranks that want it, in pieces, over the CPU. All ranks call it."""
    has_it = is_wanted and path.is_file() and fault(path) is None
    wanting = dist.all_gather_object(is_wanted and not has_it)
    takers = [rank for rank, wants in enumerate(wanting) if wants]
    if not takers:
        return
    group = torch.distributed.new_group([0, *takers], backend="gloo")
    problem: list[str] = []
    if dist.get_global_rank() == 0:
        size = path.stat().st_size
        log.info(f"run_folder: {path.name} ({size / 2**30:.3g} GiB) is sent to {len(takers)} machines.")
        with open(path, "rb") as file:
            for piece in _pieces(size, group):
                file.readinto(piece.numpy().data)
                torch.distributed.broadcast(piece, 0, group)
    elif dist.get_global_rank() in takers:
        try:
            with _said(path.parent):
                _take(path, group)
        except ConfigError as error:
            problem = list(error.problems)
    if found := [text for each in dist.all_gather_object(problem) for text in each]:
        raise ConfigError(found)


def _pieces(size: int, group: torch.distributed.ProcessGroup) -> Iterator[torch.Tensor]:
    """Tell the others a file's size; yield a tensor for each of its pieces."""
    told = torch.tensor([size])
    torch.distributed.broadcast(told, 0, group)
    left = int(told.item())
    while left:
        yield torch.empty(min(left, CHUNK_BYTES), dtype=torch.uint8)
        left -= min(left, CHUNK_BYTES)


def _take(path: Path, group: torch.distributed.ProcessGroup) -> None:
    """Write what rank 0 sends. A disk that is full ends no collective: what is left is taken and dropped."""
    failed: OSError | None = None
    with contextlib.ExitStack() as stack:
        try:
            sent = path.parent.parent / COPIES
            write_whole(sent, f"{path.name}\n")
            file = open(stack.enter_context(whole(path)), "wb")  # noqa: SIM115
            stack.callback(file.close)
        except OSError as error:
            failed = error
        for piece in _pieces(0, group):
            torch.distributed.broadcast(piece, 0, group)
            try:
                if failed is None:
                    file.write(piece.numpy().data)
            except OSError as error:
                failed = error
        if failed is not None:
            raise failed
    if wrong := fault(path):
        path.unlink()
        raise ConfigError([f"run_folder: {platform.node()}: {path} has come damaged ({wrong}). Start again."])
