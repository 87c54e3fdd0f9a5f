"""stages/shared_memory.py: what is removed, what is kept, and the messages. Folders are temporary, processes are real."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from conftest import ROOT
from filelock import FileLock

from stages import shared_memory
from stages.shared_memory import one_at_a_time, remove_dead_segments


@pytest.fixture
def places(tmp_path, monkeypatch):
    """Segments and locks in folders of the test; settled, since nobody here makes one at this moment."""
    segments, locks = tmp_path / "shm", tmp_path / "tmp"
    segments.mkdir()
    locks.mkdir()
    monkeypatch.setattr(shared_memory, "SEGMENTS", segments)
    monkeypatch.setattr(shared_memory, "SETTLED_SEC", 0.0)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(locks))
    monkeypatch.setattr(shared_memory, "PROCESSES", OwnProcesses())
    return segments, locks


class OwnProcesses:
    """/proc as it would be if all processes were this user's: in some sandboxes even root cannot inspect the first one."""

    def glob(self, pattern: str):
        for path in Path("/proc").glob(pattern):
            with contextlib.suppress(PermissionError):
                with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                    (path / "maps").read_text(errors="replace")
                yield path

    def __truediv__(self, name: str) -> Path:
        return Path("/proc", name)


def leave(segments: Path, locks: Path, number: str) -> None:
    """What a run leaves that is killed."""
    for name in ("locals", "barrier", "next_epoch", "shard_states"):
        (segments / f"{number}_{name}").write_bytes(b"\0" * 4096)
    for name in ("barrier_filelock", "cache_filelock"):
        (locks / f"{number}_{name}").touch()


def left(places) -> set[str]:
    return {path.name[:6] for folder in places for path in folder.iterdir()}


MAP = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    view = mmap.mmap(file.fileno(), 0)
print("mapped", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def mapping():
    """Start a process that maps a file and holds it until the test ends."""
    processes = []

    def begin(path: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-c", MAP, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        processes.append(process)
        assert process.stdout.readline() == "mapped\n"

    yield begin
    for process in processes:
        process.stdin.close()
        process.wait(timeout=30)
        process.stdout.close()


def test_what_no_process_maps_is_removed_with_its_locks_and_what_one_maps_stays(places, mapping, capsys):
    for number in ("000000", "000001", "000007"):
        leave(*places, number)
    (places[1] / "000009_cache_filelock").touch()  # a run that ended well leaves its locks
    mapping(places[0] / "000001_next_epoch")
    assert remove_dead_segments() == ["000000", "000007", "000009"]
    assert left(places) == {"000001"} and len(list(places[0].iterdir())) == 4
    assert capsys.readouterr().err == ""


def test_other_files_are_never_touched(places):
    for folder in places:
        for name in ("psm_1234", "000000", "123_locals", "sem.mp-xyz", "000000-notes"):
            (folder / name).touch()
    (places[1] / "000003_notes").touch()
    assert remove_dead_segments() == []
    assert len(list(places[0].iterdir())) == 5 and len(list(places[1].iterdir())) == 6


def test_a_lock_that_is_held_keeps_its_number(places):
    leave(*places, "000000")
    with FileLock(places[1] / "000000_cache_filelock"):
        assert remove_dead_segments() == [] and left(places) == {"000000"}
    assert remove_dead_segments() == ["000000"]


def test_where_a_process_cannot_be_inspected_nothing_is_removed_and_the_command_is_named(
    places, tmp_path, monkeypatch, capsys
):
    proc = tmp_path / "proc"
    (proc / "1").mkdir(parents=True)
    (proc / "1" / "maps").mkdir()  # reading it fails, as another user's does
    (proc / "mounts").write_text("proc /proc proc rw 0 0\n")
    monkeypatch.setattr(shared_memory, "PROCESSES", proc)
    leave(*places, "000004")
    assert remove_dead_segments() == [] and left(places) == {"000004"}
    segments, locks = places
    six = "[0-9]" * 6
    assert capsys.readouterr().err == (
        f"shared memory: 000004 may be left from runs that are gone, but 1 processes of other users could not be inspected: "
        f"left as they are. If no other run is alive on this machine: rm -f {segments}/{six}_* {locks}/{six}_*_filelock\n"
    )
    (segments / "000004_locals").rename(segments / "000005_locals")
    for number in ("000006", "000007", "000008"):
        leave(*places, number)
    remove_dead_segments()
    assert "shared memory: 000004, 000005, 000006 and 2 more may be left" in capsys.readouterr().err
    for path in segments.iterdir():
        path.unlink()
    assert remove_dead_segments() == [] and capsys.readouterr().err == ""  # locks alone are not worth a line


@pytest.mark.parametrize(
    ("ipc", "pid", "mounts", "reason"),
    [
        (0xEFFFFFFF, 1, "", "this container shares its memory with processes that it cannot see"),
        (1, 1, "proc /proc proc rw,hidepid=invisible 0 0\n", "/proc is mounted with hidepid"),
        (1, 1, "proc /proc proc rw,hidepid=0 0 0\n", None),
        (0xEFFFFFFF, 0xEFFFFFFC, "", None),
    ],
)
def test_hidden_processes_count_as_processes_that_could_not_be_inspected(
    places, tmp_path, monkeypatch, capsys, ipc, pid, mounts, reason
):
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "mounts").write_text(mounts)
    monkeypatch.setattr(shared_memory, "PROCESSES", proc)
    numbers = {"ipc": ipc, "pid": pid}
    monkeypatch.setattr(shared_memory, "_namespace", numbers.__getitem__)
    leave(*places, "000004")
    assert remove_dead_segments() == ([] if reason else ["000004"])
    assert (reason or "") in capsys.readouterr().err


def test_a_machine_without_shared_memory_files_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "SEGMENTS", tmp_path / "none")
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(tmp_path))
    assert remove_dead_segments() == []


def test_one_process_at_a_time_takes_a_number():
    """Without it two runs that start at one moment take the same: FileExistsError in one of them."""
    code = "from stages.shared_memory import one_at_a_time\nprint('asks', flush=True)\n"
    code += "with one_at_a_time(): print('in', flush=True)"
    with one_at_a_time():
        other = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        assert other.stdout.readline() == "asks\n"
        with pytest.raises(subprocess.TimeoutExpired):
            other.wait(timeout=0.5)
    assert other.communicate(timeout=30)[0] == "in\n"


def test_after_a_while_it_goes_on_without_its_turn(monkeypatch):
    monkeypatch.setattr(shared_memory, "TURN_SEC", 0.1)
    with FileLock(Path(tempfile.gettempdir(), f"easel-{os.getuid()}-streams.lock")) as others, one_at_a_time():
        assert others.is_locked
