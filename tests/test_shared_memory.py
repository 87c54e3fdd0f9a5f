"""stages/shared_memory.py: which number a run takes, what is removed and what is kept. Processes are real."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from conftest import ROOT

from stages import shared_memory
from stages.shared_memory import by_number, dead_segments, remove_dead_segments

NOBODY = 65534
TAKE = """
import os, sys
from pathlib import Path
from stages import shared_memory
shared_memory.SEGMENTS = Path(sys.argv[1])
if int(sys.argv[2]) != os.getuid():
    os.setgid(int(sys.argv[2])), os.setuid(int(sys.argv[2]))  # here: it need not be able to read this checkout
number = shared_memory.take_number()
for name in ("locals", "barrier", "next_epoch", "shard_states"):
    Path(sys.argv[1], f"{number:06d}_{name}").write_bytes(bytes(4096))
for name in ("barrier_filelock", "cache_filelock"):
    Path(os.environ["TMPDIR"], f"{number:06d}_{name}").touch()
print(number, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def places(monkeypatch) -> Iterator[tuple[Path, Path]]:
    """Segments and locks in folders of the test, in which every user may write, as in /dev/shm and /tmp."""
    parent = Path(tempfile.mkdtemp(dir=shared_memory.SEGMENTS))  # a test's own folder is closed to other users
    parent.chmod(0o755)
    segments, locks = parent / "shm", parent / "tmp"
    for folder in (segments, locks):
        folder.mkdir()
        folder.chmod(0o1777)
    monkeypatch.setattr(shared_memory, "SEGMENTS", segments)
    monkeypatch.setattr(shared_memory.tempfile, "gettempdir", lambda: str(locks))
    yield segments, locks
    shutil.rmtree(parent)


Begin = Callable[..., tuple[subprocess.Popen[str], int]]


@pytest.fixture
def run(places) -> Iterator[Begin]:
    """Start a process that takes a number, makes what streaming makes and lives until the test ends; also as another user."""
    processes = []

    def begin(user: int = os.getuid()) -> tuple[subprocess.Popen[str], int]:
        process = subprocess.Popen(
            [sys.executable, "-c", TAKE, str(places[0]), str(user)],
            env={**os.environ, "TMPDIR": str(places[1])},
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        processes.append(process)
        return process, int(process.stdout.readline())

    yield begin
    for process in processes:
        process.kill()
        process.communicate(timeout=30)


def left(places) -> set[str]:
    return {path.name[:6] for path in places[0].iterdir()}


def kill(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(timeout=30)


def test_what_a_killed_run_has_left_is_removed_and_what_a_living_one_has_stays(places, run):
    (killed, first), (_, second) = run(), run()
    assert (first, second) == (0, 1) and dead_segments() == {} and remove_dead_segments() == []
    kill(killed)
    assert list(dead_segments()) == ["000000"] and len(list(places[0].iterdir())) == 10
    assert remove_dead_segments() == ["000000"]
    assert left(places) == {"000001"} and len(list(places[0].iterdir())) == 5
    assert list(by_number(places[1], "_filelock")) == ["000001"]


def test_the_next_run_takes_the_killed_ones_number(places, run):
    kill(run()[0])
    (_, again), (_, other) = run(), run()
    assert (again, other) == (0, 1)


as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a process as another user")


@as_root
def test_a_user_who_may_not_look_at_others_processes_restarts_too(places, run):
    (_, roots), (killed, first) = run(), run(NOBODY)
    assert (roots, first) == (0, 1)
    kill(killed)
    assert run(NOBODY)[1] == 1 and left(places) == {"000000", "000001"}


@as_root
def test_what_another_users_killed_run_has_left_is_passed_over(places, run):
    """In a folder as /dev/shm a user may not remove what is another's."""
    kill(run()[0])
    assert run(NOBODY)[1] == 1 and left(places) == {"000000", "000001"}
    locks = [path for path in places[1].iterdir() if path.stat().st_uid == 0]
    assert remove_dead_segments() == ["000000"] and not any(path.exists() for path in locks)
    assert run(NOBODY)[1] == 0


@as_root
def test_a_users_lock_that_was_left_keeps_its_number_from_others(places, run):
    (places[1] / "000000_cache_filelock").touch()  # root's: nobody could not open it
    assert run(NOBODY)[1] == 1 and run()[1] == 0


def test_a_run_that_ends_well_takes_its_mark_with_it(places, run):
    process, _ = run()
    mark = places[0] / "000000_easel"
    assert mark.exists()
    process.communicate(timeout=30)
    assert process.returncode == 0 and not mark.exists()


def test_what_other_programs_have_is_never_touched(places, run):
    """Of a number without our mark nobody knows here whether it lives: streaming by itself holds no lock."""
    for folder in places:
        for name in ("psm_1234", "000000", "000000_locals", "123_locals", "sem.mp-xyz", "000000-notes"):
            (folder / name).touch()
    (places[1] / "000003_notes").touch()
    assert dead_segments() == {} and remove_dead_segments() == []
    assert run()[1] == 1
    assert len(list(places[0].iterdir())) == 6 + 5 and len(list(places[1].iterdir())) == 7 + 2


def test_runs_that_start_at_once_take_different_numbers(places, run):
    """One may take another's new mark for a dead run's, before its maker has locked it."""
    with ThreadPoolExecutor(6) as pool:
        numbers = [number for _, number in pool.map(lambda _: run(), range(6))]
    assert len({*numbers}) == 6 and left(places) == {f"{number:06d}" for number in numbers}
