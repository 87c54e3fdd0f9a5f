"""The cluster of slurm_two_nodes.sh: brought up in a folder, asked by Slurm's own commands, always brought down."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parent.parent.parent
SCRIPT = Path(__file__).with_name("slurm_two_nodes.sh")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "mungekey", "ip", "nsenter", "unshare", "setsid")
OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE")
COMMAND_SEC = 240
SETTINGS = {"CRED_EXPIRE": "10", "KILLWAIT": "30", "SLURMD_TIMEOUT": "30"}
"""Seconds, see slurm_two_nodes.sh."""


def missing() -> str | None:
    """Return why there can be no cluster here, or None."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        packages = "apt-get install slurmctld slurmd slurm-client munge iproute2"
        return f"no {', '.join(absent)} on the PATH (Debian: {packages})"
    if os.geteuid() != 0:
        return "namespaces of a network need root"
    made = subprocess.run(["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, timeout=COMMAND_SEC)
    return None if made.returncode == 0 else "this container may make no namespaces (CAP_SYS_ADMIN, CAP_NET_ADMIN)"


@dataclass(frozen=True)
class Cluster:
    """Two nodes, node1 and node2, and where jobs write.

    folder: of the cluster itself; logs: LOGDIR of the jobs.
    """

    folder: Path

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def at(self, *words: str, where: str = "ctl", check: bool = True, folder: Path = ROOT, **variables: str) -> str:
        """Run a command on a node, in a checkout; return what it prints."""
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "LOGDIR": str(self.logs)}
        command, env = [str(SCRIPT), "exec", str(self.folder), where, *words], {**os.environ, **own, **variables}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=COMMAND_SEC)
        assert not check or done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def submit(self, words: list[str], *options: str, script: str = "launch/slurm.sbatch", **variables: str) -> str:
        """Submit a job; return its number."""
        output = f"--output={self.folder}/out/%j.txt"
        said = self.at("sbatch", "--parsable", output, *options, script, *words, **variables)
        return said.strip().splitlines()[-1]

    def said(self, job: str) -> str:
        """Return all that a job has said, of every start."""
        path = self.folder / "out" / f"{job}.txt"
        return path.read_text(errors="replace") if path.exists() else ""

    def all_said(self, job: str) -> str:
        """Return that, and what each rank but the first has said: for a test that fails."""
        ranks = sorted((self.logs / job).glob("rank*.txt")) if (self.logs / job).is_dir() else []
        return self.said(job) + "".join(f"\n--- {path.name}\n{path.read_text(errors='replace')}" for path in ranks)

    def job(self, job: str) -> dict[str, str]:
        """Return what `scontrol show job` knows."""
        said = self.at("scontrol", "show", "job", "-o", job)
        return dict(re.findall(r"(\w+)=(\S*)", said))

    def times(self, job: str) -> list[dict[str, Any]]:
        """Return the times that a job has written down."""
        path = self.logs / job / "times.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def batches(self, job: str, start: int = 0) -> int:
        """Return the batch that a start of a job has reached on rank 0."""
        lines = [line for line in self.times(job) if line["at"] == "batch" and line["start"] == start]
        return max((line["batch"] for line in lines if line["rank"] == 0), default=0)

    def until(self, job: str, is_so: Callable[[], bool], limit_sec: float = 900.0) -> None:
        """Wait for something that a job does; fails where the job is over before, or it takes too long."""
        end = time.monotonic() + limit_sec
        while not is_so():
            state = self.job(job)["JobState"]
            assert state not in OVER or is_so(), f"{state}: {self.all_said(job)}"
            assert time.monotonic() < end, f"{state} after {limit_sec} s: {self.all_said(job)}"
            time.sleep(0.5)

    def end_of(self, job: str, limit_sec: float = 900.0) -> dict[str, str]:
        """Wait for a job's end, and return what Slurm knows of it."""
        self.until(job, lambda: self.job(job)["JobState"] in OVER, limit_sec)
        return self.job(job)

    def wait_until_idle(self, limit_sec: float = 900.0) -> None:
        """Wait until no job is left in the queue."""
        end = time.monotonic() + limit_sec
        while self.at("squeue", "--noheader").strip():
            assert time.monotonic() < end
            time.sleep(0.5)

    def completed(self, words: list[str], *options: str, **variables: str) -> str:
        """Submit a job and wait for its end, which has to be a good one; return its number."""
        job = self.submit(words, *options, **variables)
        assert self.end_of(job)["JobState"] == "COMPLETED", self.all_said(job)
        return job

    def refused(self, words: list[str], *options: str, **variables: str) -> str:
        """Submit a job that is refused, by exit code 2; return what it has said."""
        job = self.submit(words, *options, **variables)
        end = self.end_of(job)
        assert (end["JobState"], end["ExitCode"], end["Restarts"]) == ("FAILED", "2:0", "0"), self.all_said(job)
        return self.said(job)

    def lose(self, node: str) -> None:
        """Take a node's power away."""
        call(self.folder, "fail", node)

    def revive(self, node: str) -> None:
        """Give it back."""
        call(self.folder, "revive", node)


def call(folder: Path, verb: str, *words: str, **variables: str) -> None:
    """Call slurm_two_nodes.sh."""
    command, env = [str(SCRIPT), verb, str(folder), *words], {**os.environ, **variables}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=COMMAND_SEC)
    assert done.returncode == 0, done.stdout + done.stderr


@contextlib.contextmanager
def two_nodes(folder: Path) -> Iterator[Cluster]:
    """Bring two nodes up in a folder, for as long as the context lasts."""
    cluster = Cluster(folder)
    for part in ("out", "logs"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    try:
        call(folder, "start", **SETTINGS)
        yield cluster
    finally:
        subprocess.run([str(SCRIPT), "stop", str(folder)], capture_output=True, timeout=COMMAND_SEC)


def process_of(words: str, what: str, node: str) -> psutil.Process:
    """Return a rank or a launcher by a part of its words and the node that its environment names."""
    found = []
    for process in psutil.process_iter(["cmdline", "create_time"]):
        line = process.info["cmdline"] or []
        is_launcher = any(word.endswith("/composer") for word in line[:2])
        if line[:1] and "python" in line[0] and words in f"{' '.join(line)} " and is_launcher == (what == "launcher"):
            environ = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
            if f"SLURMD_NODENAME={node}".encode() in environ:
                found.append(process)  # a rank's loader worker has its words too, and is younger
    if not found:
        raise RuntimeError(f"no {what} of {words} on {node}")
    return min(found, key=lambda process: process.create_time())
