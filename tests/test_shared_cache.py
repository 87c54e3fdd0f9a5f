"""mds/cache.py: several jobs and ranks use one cache folder, and a killed one blocks no other. Processes are real."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import run, started
from test_cache_space import COLUMNS, bytes_of_shards, write_stage

from mds.cache import CacheFolder
from mds.fetch import RetryingStream, StreamFailure
from mds.moments import MomentsDataset

SHARED_MEMORY = Path("/dev/shm")
SAMPLES, BATCH = 60, 6
DATASET = {"batch_size": BATCH, "num_canonical_nodes": 1, "shuffle_seed": 3}
USERS = (54321, 54322) if os.geteuid() == 0 else (0, 0)
"""Two users of no other process; only root can start a process as another user."""

# Notes each fetch and each batch in files. `halt_at`: the shard that it fetches half, and never to the end.
JOB = """
import json, multiprocessing.popen_fork, os, sys, tempfile, time
from pathlib import Path
from mds.fetch import RetryingStream
from mds.loader import Loader
from mds.moments import MomentsDataset

task = json.loads(sys.argv[1])
tempfile.tempdir = None  # not that of the process which this one was forked from
if task["user"]:  # from here on: it need not be able to read this checkout
    os.setgroups([]), os.setgid(task["user"]), os.setuid(task["user"])
out, download = Path(task["out"]), RetryingStream._download_file

def download_slowly(self, name):
    if name == task["halt_at"]:
        Path(self.local, f"{name}.tmp.1a2B3c4D").write_bytes(b"half")  # as boto3 does
        (out / "halted").touch()
        time.sleep(600)
    with open(out / "fetched", "a") as file:
        file.write(f"{name}\\n")
    if name.endswith(".mds"):
        time.sleep(0.02)
    return download(self, name)

RetryingStream._download_file = download_slowly
stream = RetryingStream(**task["stream"])
dataset = MomentsDataset(columns=[{"moments": ((4,), "float16", "float16")}], streams=[stream], **task["dataset"])
batches, workers = dataset.count_epoch_batches(task["dataset"]["batch_size"]), task["workers"]
limits = dict(timeout=60, persistent_workers=True) if workers else {}
loader = Loader(dataset, epoch_batches=batches, max_bad_samples=0, num_workers=workers, **limits)
(out / "ready").touch()
while not Path(task["begin"]).exists():
    time.sleep(0.01)
for _ in range(2):
    for batch in loader:
        with open(out / "samples", "a") as file:
            file.write(" ".join(f"{value:.0f}" for value in batch["moments"][:, 0].tolist()) + "\\n")
loader.close()
"""


class Job:
    """A job's process, and what it has noted so far."""

    def __init__(self, process: subprocess.Popen[str], out: Path):
        self.process, self.out = process, out

    def lines(self, name: str) -> list[str]:
        return (self.out / name).read_text().splitlines() if (self.out / name).exists() else []

    @property
    def samples(self) -> list[list[int]]:
        return [list(map(int, line.split())) for line in self.lines("samples")]

    def wait_for(self, is_so: Callable[[], bool], limit_sec: float = 90.0) -> None:
        deadline = time.monotonic() + limit_sec
        while not is_so():
            assert self.process.poll() is None, self.process.communicate()
            assert time.monotonic() < deadline, "hangs"
            time.sleep(0.01)

    def end(self) -> None:
        """Wait for its end, a good one."""
        _, printed = self.process.communicate(timeout=120)
        assert self.process.returncode == 0, printed

    def kill(self) -> None:
        """Kill it with its workers."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.communicate(timeout=30)


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder that every user may write in, with a dataset and a cache folder; a test's own is closed to other users."""
    folder = Path(tempfile.mkdtemp(prefix="easel-test-"))
    write_stage(folder / "stage", SAMPLES)
    for path in (folder, folder / "cache", folder / "temporary"):
        path.mkdir(exist_ok=True)
        path.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def begin(home) -> Iterator[Callable[..., Job]]:
    """Start a job; it is killed when the test ends."""
    with contextlib.ExitStack() as jobs:

        def start(name: str, **more: Any) -> Job:
            out = home / name
            out.mkdir()
            out.chmod(0o777)
            task = {"stream": {"remote": str(home / "stage"), "local": str(home / "cache")}, "out": str(out)}
            task |= {key: more.pop(key, default) for key, default in (("user", 0), ("workers", 0), ("halt_at", ""))}
            task |= {"begin": str(home / more.pop("wait", "")), "dataset": {**DATASET, **more}}
            command = (sys.executable, "-c", JOB, json.dumps(task))
            process = started(*command, output=subprocess.PIPE, TMPDIR=str(home / "temporary"))
            return Job(jobs.enter_context(process), out)

        yield start


def begin_together(home: Path, *jobs: Job) -> None:
    for job in jobs:
        job.wait_for((job.out / "ready").exists)
    (home / "go").touch()


def shards_of(stage: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(stage.glob("shard.*.mds"))}


def samples_of(stage: Path, **arguments: Any) -> list[list[int]]:
    """Return the samples of two epochs, batch by batch, as this process reads them in place."""
    streams = [RetryingStream(local=str(stage))]
    with contextlib.closing(MomentsDataset(columns=[COLUMNS], streams=streams, **{**DATASET, **arguments})) as dataset:
        return [batch["moments"][:, 0].int().tolist() for _ in range(2) for batch in dataset]


# --- living jobs ---


@pytest.mark.timeout(240, func_only=True)
def test_two_jobs_read_the_same_samples_and_fetch_each_shard_once(home, begin):
    """As root, those of two users who may both write in the folder."""
    jobs = [begin(f"job{n}", user=user, workers=2, wait="go", shuffle=True) for n, user in enumerate(USERS)]
    begin_together(home, *jobs)
    for job in jobs:
        job.end()
    expected = samples_of(home / "stage", shuffle=True)
    assert len(expected) == 2 * SAMPLES // BATCH and sorted(sum(expected[:10], [])) == list(range(SAMPLES))
    assert [job.samples for job in jobs] == [expected, expected]
    shards = shards_of(home / "stage")
    assert sorted(name for job in jobs for name in job.lines("fetched")) == ["index.json", *shards]
    assert shards_of(home / "cache") == shards


@pytest.mark.timeout(240, func_only=True)
def test_two_jobs_together_stay_within_a_limit(home, begin):
    """They read in different orders, so that each wants what the other evicts."""
    shards, index = shards_of(home / "stage"), (home / "stage" / "index.json").stat().st_size
    largest = max(map(len, shards.values()))
    own = dict(wait="go", shuffle=True, cache_limit=index + 5 * largest, predownload=2 * BATCH)
    jobs = {seed: begin(f"seed{seed}", shuffle_seed=seed, **own) for seed in (3, 4)}
    folder, used = CacheFolder(home / "cache", len(shards)), []
    begin_together(home, *jobs.values())
    while any(job.process.poll() is None for job in jobs.values()):
        with folder.locked():  # no room is made or taken in the meantime
            used.append((bytes_of_shards(home / "cache"), int(folder.num_bytes.sum())))
        time.sleep(0.002)
    for seed, job in jobs.items():
        job.end()
        assert job.samples == samples_of(home / "stage", shuffle=True, shuffle_seed=seed)
    assert sum(len(job.lines("fetched")) for job in jobs.values()) > 2 * len(shards) + 1  # some again
    on_disk, counted = map(max, zip(*used, strict=True))
    assert largest < on_disk <= counted <= 5 * largest
    assert bytes_of_shards(home / "cache") == folder.num_bytes.sum() > 0


def test_a_run_that_reads_another_dataset_is_refused_while_the_folder_is_in_use(tmp_path):
    """Of two datasets with as many shards, one job would read the other's samples: a shard is compared once in a run."""
    stages, digests = [write_stage(tmp_path / name, SAMPLES) for name in ("one", "other")], []
    for stage in stages:
        index = (stage / "index.json").read_bytes().replace(b": 280", b": %d" % (280 + len(digests)))
        (stage / "index.json").write_bytes(index)
        digests.append(hashlib.sha256(index).hexdigest())
    assert digests[0] != digests[1]

    def read(number: int) -> MomentsDataset:
        remote, local = str(stages[number]), str(tmp_path / "cache")
        streams = [RetryingStream(remote=remote, local=local, index_sha256=digests[number])]
        return MomentsDataset(columns=[COLUMNS], streams=streams, **DATASET)

    text = f"^data.local: {tmp_path}/cache is in use by a run that reads another dataset. "
    with contextlib.closing(read(0)), pytest.raises(StreamFailure, match=text):
        read(1)
    gc.collect()  # the refused one
    with contextlib.closing(read(1)) as dataset:  # the folder is free
        assert len(list(dataset)) == SAMPLES // BATCH


# --- killed jobs ---


def shared_memory_of(user: int) -> set[str]:
    names = set()
    for path in SHARED_MEMORY.iterdir():
        with contextlib.suppress(FileNotFoundError):
            names |= {path.name} if path.stat().st_uid == (user or os.geteuid()) else set()
    return names


@pytest.mark.timeout(240, func_only=True)
def test_a_killed_job_leaves_nothing_and_blocks_no_later_one(home, begin):
    """As root, the later one is another user's."""
    first, second = USERS
    shards, before = shards_of(home / "stage"), shared_memory_of(first)
    killed = begin("killed", user=first, workers=2, halt_at="shard.00015.mds", predownload=BATCH)
    killed.wait_for(lambda: (killed.out / "halted").exists() and len(killed.samples) >= 4)
    killed.kill()
    rest = list((home / "temporary").iterdir())
    assert [path for path in rest if not path.name.startswith("pymp-")] == []  # Python's own
    assert shared_memory_of(first) <= before
    assert (home / "cache" / "shard.00015.mds.tmp.1a2B3c4D").read_bytes() == b"half"
    cached = shards_of(home / "cache")
    after = begin("after", user=second, workers=2)
    after.end()
    assert after.samples == samples_of(home / "stage") and shards_of(home / "cache") == shards
    assert sorted(after.lines("fetched")) == sorted(set(shards) - set(cached)) and len(cached) >= 8
    assert not list((home / "cache").glob("*.tmp*"))
    assert sorted((home / "temporary").iterdir()) == sorted(rest)  # these two leave nothing at all


@pytest.mark.timeout(240, func_only=True)
def test_a_shard_whose_fetcher_was_killed_is_fetched_by_another_run(home, begin):
    wanted = "shard.00009.mds"
    killed = begin("killed", halt_at=wanted)
    killed.wait_for((killed.out / "halted").exists)
    other = begin("other")
    other.wait_for(lambda: len(other.samples) == 4)  # the next batch has it
    time.sleep(0.5)
    assert len(other.samples) == 4 and wanted not in other.lines("fetched") and other.process.poll() is None
    killed.kill()
    other.end()
    assert other.samples == samples_of(home / "stage") and other.lines("fetched").count(wanted) == 1
    shards = shards_of(home / "stage")
    assert shards_of(home / "cache") == shards
    assert CacheFolder(home / "cache", len(shards)).num_bytes.tolist() == list(map(len, shards.values()))


TWO_LOCKS = """
import os, sys, threading, time
from mds.cache import SharedStates
states = [SharedStates(4), SharedStates(4)]
number = int(os.fork() == 0)

def want_the_others():
    time.sleep(0.5)
    with states[1 - number].locked():
        pass

other = threading.Thread(target=want_the_others)
with states[number].locked():
    other.start()
    time.sleep(1.0)
other.join()
sys.exit(0 if number else os.wait()[1])
"""


def test_two_datasets_of_two_processes_do_not_deadlock():
    """The kernel sees a circle where each process waits in two threads: Resource deadlock avoided."""
    done = run("python", "-c", TWO_LOCKS, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
