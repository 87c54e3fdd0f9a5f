"""The files of launch/: what their commands say, on how many GPUs, and what passes signals on.

tests/test_launch_tools.py has them read by their own tools.
"""

from __future__ import annotations

import contextlib
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed
import yaml
from composer.cli import launcher
from conftest import ROOT, started
from test_yamls import keys_of, read
from test_yamls import resolve as of_a_recipe

from preflight import checks
from preflight.config_checks import quick_problems
from training.config import resolve

pytestmark = pytest.mark.timeout(120, func_only=True)

LAUNCH = ROOT / "launch"
MCLOUD = [ROOT / "mcloud.yaml", *sorted(LAUNCH.glob("mcloud_*.yaml"))]
CLOUDS = [*MCLOUD, LAUNCH / "skypilot.yaml", LAUNCH / "kubernetes.yaml"]
BATCH = {"global_batch_size", "device_train_microbatch_size", "data.num_canonical_nodes"}


def content(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


def job_of(jobset: dict[str, Any]) -> dict[str, Any]:
    """The one Job of a JobSet."""
    [replicated] = jobset["spec"]["replicatedJobs"]
    return replicated["template"]["spec"]


def container_of(jobset: dict[str, Any]) -> dict[str, Any]:
    [container] = job_of(jobset)["template"]["spec"]["containers"]
    return container


def commands(path: Path) -> list[list[str]]:
    """The words after `benchmark.py` of each run that a file starts."""
    given = content(path)
    text = given["command"] if "command" in given else given.get("run") or shlex.join(container_of(given)["command"])
    lines = [shlex.split(line.removesuffix("&&")) for line in text.splitlines() if "benchmark.py" in line]
    assert lines
    for words in lines:
        before = words[: words.index("benchmark.py")]
        assert before in (["composer"], ["launch/ranks.sh"], ["exec", "launch/ranks.sh"]), path
    return [words[words.index("benchmark.py") + 1 :] for words in lines]


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.name)
def test_a_command_names_a_recipe_repeats_none_of_its_values_and_passes_the_checks_of_a_run(path, stage, monkeypatch):
    """With a tiny network, and the tests' own data and weights. A disk that is not kept needs a store and a name."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(checks, "_check_room", lambda needs: iter(()))  # a small batch has a snapshot to each one
    assert {file for file in LAUNCH.glob("*.yaml") if "benchmark.py" in file.read_text()} <= {*CLOUDS}
    for yaml_file, *words in commands(path):
        keys = dict(word.split("=", 1) for word in words)
        assert re.fullmatch(r"yamls/\w+\.yaml", yaml_file) and keys and len(keys) == len(words)
        there, given = keys_of([yaml_file]), keys_of([yaml_file, *words])
        assert [key for key in keys if not key.startswith("loggers.") and there[key] == given[key]] == []
        config = of_a_recipe([yaml_file, *words], stage)
        assert config.data.synthetic == (path.name == "mcloud.yaml") and config.run_name == given["run_name"]
        if path.name == "mcloud.yaml":
            continue
        assert keys["data.remote"].startswith("s3://YOUR_BUCKET/") and keys["data.local"].startswith(("/", "$HOME/"))
        if path.name != "mcloud_streaming.yaml":  # a measurement of some minutes
            assert keys["save.remote"].startswith("s3://YOUR_BUCKET/") and keys["run_name"]


@pytest.mark.slow
@pytest.mark.parametrize("path", MCLOUD, ids=lambda path: path.name)
def test_each_size_of_a_job_divides_the_batch_and_the_order_of_samples(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)  # by another test's run: variables count
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    for config in map(read, commands(path)):
        for gpus in (8, 256, 24):
            monkeypatch.setenv("WORLD_SIZE", str(gpus))
            found = [problem for problem in quick_problems(resolve(config), []) if BATCH & {*problem.keys}]
            assert (found != []) == (gpus == 24)


# --- MosaicML's platform ---


@pytest.mark.parametrize("path", MCLOUD, ids=lambda path: path.name)
def test_mosaicmls_own_classes_accept_each_of_their_files(path):
    """What `mcli run` would send, up to the call of their service."""
    from mcli import RunConfig
    from mcli.models.run_config import FinalRunConfig

    config = RunConfig.from_file(str(path))
    config.compute["gpus"] = 256  # as its --gpus does
    sent = FinalRunConfig.finalize_config(config).to_create_run_api_input()["runInput"]
    assert sent["runName"] == content(path)["name"] and sent["compute"]["gpus"] == 256
    [integration] = sent["integrations"]
    assert integration["type"] == "git_repo" and "gitCommit" in str(integration)
    assert sent["command"] == content(path)["command"].strip()
    is_long = "save.remote" in sent["command"]
    assert sent.get("scheduling", {}).get("preemptible", False) == is_long
    assert not is_long or sent["scheduling"]["maxRetries"] > 0


# --- Kubernetes and SkyPilot: what Composer's launcher is told ---

TOLD = {"WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}


def test_the_pods_of_the_jobset_know_their_rank_and_each_other():
    text = Path(launcher.__file__).read_text()
    assert all(f"os.environ['{name}']" in text or f"'{name}' in os.environ" in text for name in TOLD)
    jobset = content(LAUNCH / "kubernetes.yaml")
    job, container = job_of(jobset), container_of(jobset)
    env = {variable["name"]: variable for variable in container["env"]}
    assert env.keys() == TOLD
    gpus, nodes = container["resources"]["limits"]["nvidia.com/gpu"], job["completions"]
    assert nodes == job["parallelism"] and job["completionMode"] == "Indexed"
    assert int(env["LOCAL_WORLD_SIZE"]["value"]) == gpus and int(env["WORLD_SIZE"]["value"]) == gpus * nodes
    name, [replicated] = jobset["metadata"]["name"], jobset["spec"]["replicatedJobs"]
    assert env["MASTER_ADDR"]["value"] == f"{name}-{replicated['name']}-0-0.{name}"  # JobSet's name of its first pod


# --- launch/ranks.sh ---

RANK = """
import os, pathlib, signal, sys, time
here, number, name = pathlib.Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3] + "-" + os.environ["RANK"]
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(number, lambda *_: ((here / f"heard-{name}").touch(), os._exit(128 + number)))
(here / f"ready-{name}").touch()
while True:
    time.sleep(0.1)
"""


@pytest.mark.slow
@pytest.mark.timeout(400, func_only=True)
def test_a_signal_to_the_job_reaches_every_rank_and_their_exit_code_is_that_of_the_job(tmp_path, monkeypatch):
    """With Composer's own launcher, which would leave its ranks alone or kill them. What Ctrl-C sends comes as SIGTERM.

    It sends SIGTERM to the ranks that have not ended yet, which is left unheard here.
    """
    for name in TOLD:  # what runs in the tests' own process have set
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "rank.py").write_text(RANK)
    hears = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGINT: signal.SIGTERM}
    own = {"RANKS_PER_NODE": "2", "SLURM_JOB_ID": ""}
    with contextlib.ExitStack() as stack:
        jobs = {}
        for number, heard in hears.items():
            job = ["launch/ranks.sh", f"{tmp_path}/rank.py", str(tmp_path), str(int(heard)), number.name]
            jobs[number] = stack.enter_context(started(*job, output=subprocess.PIPE, **own))
        end = time.monotonic() + 250
        while len(list(tmp_path.glob("ready-*"))) < 6 and time.monotonic() < end:
            time.sleep(0.1)
        for number, process in jobs.items():
            process.send_signal(number)
        assert {number: process.wait(timeout=100) for number, process in jobs.items()} == {15: 143, 10: 138, 2: 143}
    assert {path.name for path in tmp_path.glob("heard-*")} == {f"heard-{n.name}-{r}" for n in hears for r in (0, 1)}
