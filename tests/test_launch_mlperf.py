"""launch/: MLPerf's variables as words, files of systems, what ranks.sh refuses. On a cluster: tests/test_slurm.py."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import ROOT

from common.command_line import parse_command_line
from common.errors import ConfigError
from config import flatten, load
from launch import mlperf
from training.config import ALIASES, RunConfig

SYSTEMS = sorted((ROOT / "launch").glob("config_*.sh"))


def read(words: list[str]) -> RunConfig:
    return load(RunConfig, parse_command_line(words, ALIASES), check=lambda config: [])


def variables_of(path: Path) -> dict[str, str]:
    """What a system's file exports."""
    words = ["bash", "-c", f"source {path} && env"]
    done = subprocess.run(words, env={}, capture_output=True, text=True, check=True, timeout=60)
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in found.items() if name not in ("PWD", "SHLVL", "_", "OLDPWD", "PATH")}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.slow
@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.name)
def test_a_systems_file_says_nodes_gpus_and_batch_and_its_recipe_has_that_batch(path):
    given = variables_of(path)
    name = re.fullmatch(r"config_(\w+?)_(\d\d)x(\d\d)x(\d\d)\.sh", path.name)
    assert given["DGXSYSTEM"] == path.stem.removeprefix("config_")
    numbers = [int(given[key]) for key in ("DGXNNODES", "DGXNGPU", "BATCHSIZE")]
    assert numbers == [int(name[part]) for part in (2, 3, 4)] and re.fullmatch(r"\d\d:\d\d:\d\d", given["WALLTIME"])
    [train, *_] = mlperf.commands_of(given, [])
    assert read(train[1:2]).global_batch_size == math.prod(numbers)


@pytest.mark.slow
def test_a_submissions_variables_become_words_and_words_count_last(tmp_path):
    given = variables_of(ROOT / "launch/config_DGXH100_01x08x32.sh")
    given |= {"SEED": "7", "NEMOLOGS": "/runs", "CONFIG_MAX_STEPS": "100", "BASE_LR": "2.5e-7", "WARMUP_STEPS": "0"}
    given |= {"DATADIR": str(tmp_path), "MLPERF_SUBMISSION_ORG": "Us"}
    train, score = mlperf.commands_of(given, ["max_duration=50ba", "mlperf.division=closed"])
    assert train[:2] == ["benchmark.py", "yamls/mlperf_256.yaml"] and score == ["eval.py", "/runs/mlperf-7"]
    config = flatten(read(train[1:]))
    expected = {"seed": 7, "run_name": "mlperf-7", "run_folder": "/runs", "global_batch_size": 256}
    expected |= {"device_train_microbatch_size": 32, "max_duration": "50ba", "optimizer.lr_per_image": 2.5e-7}
    expected |= {"schedule.warmup_batches": 0, "mlperf.enabled": True, "mlperf.division": "closed", "mlperf.org": "Us"}
    expected |= {"mlperf.platform": "DGXH100_01x08x32", "data.remote": f"{tmp_path}/laion-400m/moments"}
    expected |= {"eval.prompts": f"{tmp_path}/coco2014/val2014_30k.tsv"}
    expected |= {"model.weights": "checkpoints/sd/512-base-ema.ckpt"}  # CHECKPOINTS is not given
    assert {key: config[key] for key in expected} == expected
    alone = {name: value for name, value in given.items() if name != "SEED"}
    assert "seed=12" in mlperf.commands_of({**alone, "RANDOM_SEED": "12"}, [])[0]
    assert "seed=31" in mlperf.commands_of({**alone, "SLURM_JOB_ID": "31"}, [])[0]  # the same on all nodes
    del alone["DGXNNODES"]
    assert "global_batch_size=512" in mlperf.commands_of({**alone, "SLURM_JOB_NUM_NODES": "2"}, [])[0]


def problems_of(**given: str) -> list[str]:
    with pytest.raises(ConfigError) as error:
        mlperf.commands_of(given, [])
    return error.value.problems


def test_impossible_variables_are_reported_at_once():
    assert problems_of(DGXNNODES="two", BATCHSIZE="0", SLURM_JOB_NUM_NODES="4", DATADIR="/nowhere", DGXNGPU="8") == [
        "DGXNNODES is 'two'. Possible: a whole number.",
        "BATCHSIZE is '0'. Possible: a whole number.",
        "DATADIR: /nowhere is not a folder. Wanted: what the recipes have in datasets/.",
    ]
    [text] = problems_of(DGXNNODES="2", DGXNGPU="8", SLURM_JOB_NUM_NODES="4")
    assert text == "DGXNNODES is 2, but the job has 4 nodes. Give sbatch --nodes=2."
    [text] = problems_of(DGXNGPU="8", BATCHSIZE="31")
    assert text.startswith(
        "DGXNNODES x DGXNGPU x BATCHSIZE = 1 x 8 x 31 = 248: there is no yamls/mlperf_248.yaml. Known"
    )


TWO = {"RANKS_PER_NODE": "1", "NUM_NODES": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}


def launched(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ranks.sh does with these variables, and with none of another launcher's."""
    others = {"RANK_LOGS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    return bash("ranks.sh", *words, **dict.fromkeys(others, "") | variables)


def bash(script: str, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of launch/ to its end; a variable that is given as nothing is not set."""
    environment = {
        name: value for name, value in {**os.environ, **variables}.items() if value or name == "SLURM_JOB_ID"
    }
    command = ["bash", str(ROOT / "launch" / script), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_a_node_refuses_variables_that_no_launcher_could_use():
    for variables, text in (
        ({"RANKS_PER_NODE": "many"}, ": RANKS_PER_NODE is 'many'. Possible: a number of ranks.\n"),
        ({"PATH": "/usr/bin:/bin", "RANKS_PER_NODE": "1"}, ": no composer on the PATH. Activate the environment"),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "12"}, "WORLD_SIZE is '12'. Possible: a multiple of the 8 ranks of a"),
        ({"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}, "MASTER_ADDR or MASTER_PORT is not given, and there are 2"),
        (TWO, ": NODE_RANK is not given, and there are 2 nodes. Give each its own: 0 on that of MASTER_ADDR, up to 1."),
    ):
        done = launched("x=1", **variables)
        assert done.returncode == 2 and text in done.stderr, done


def program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


# Composer's launcher, as far as signals go: it waits for its rank and ends with what poll() gives, as -15 or -10.
LAUNCHER = """#!{python}
import pathlib, subprocess, sys, time
here = pathlib.Path({here!r})
if "no_rank" in sys.argv:
    (here / "ready").touch()
    time.sleep(60)
rank = subprocess.Popen(["sleep", "60"])
(here / "ready").touch()
sys.exit(rank.wait())
"""


@pytest.mark.parametrize(
    ("number", "code", "words"),
    [(signal.SIGTERM, 143, []), (signal.SIGUSR1, 138, ["no_rank"]), (signal.SIGINT, 143, [])],
)
def test_a_signal_before_the_ranks_can_handle_it_gives_its_code_too(number, code, words, tmp_path):
    program(tmp_path / "composer", LAUNCHER.format(python=sys.executable, here=str(tmp_path)))
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS_PER_NODE": "1", "SLURM_JOB_ID": ""}
    with subprocess.Popen(["bash", "launch/ranks.sh", *words], env={**os.environ, **own}) as process:
        until = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=30) == code


LINES = "\ntouch broken_out\n$(touch broken_out) `touch broken_out` '; touch broken_out; '"
"""A value whose other lines are commands to a shell that reads it."""


@pytest.fixture
def recorded(tmp_path) -> tuple[dict[str, str], Callable[[], list[list[str]]]]:
    """Variables with a launcher that writes down its words; and what it was given."""
    write = f"open({str(tmp_path / 'words')!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    program(tmp_path / "bin/composer", f"#!{sys.executable}\nimport json, sys\n{write}\n")
    path = f"{tmp_path}/bin:{Path(sys.executable).parent}:{os.environ['PATH']}"
    variables = {"PATH": path, "RANKS_PER_NODE": "1", "SLURM_JOB_ID": ""}
    return variables, lambda: [json.loads(line) for line in (tmp_path / "words").read_text().splitlines()]


SLURM = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1", "SLURM_CPUS_ON_NODE": "2"}


def test_words_of_several_lines_reach_the_ranks_of_a_slurm_job_whole(recorded, tmp_path):
    variables, words = recorded
    srun = '#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\n[ "$2" = -c ] || exec "$@"\n'
    for name, text in {"srun": srun, "scontrol": "#!/bin/sh\necho job\n"}.items():
        program(tmp_path / "bin" / name, text)
    variables |= {**SLURM, "SLURM_SUBMIT_DIR": str(ROOT), "LOGDIR": str(tmp_path / "logs")}
    name = f"mlperf.org=a{LINES}\nrun_name=b"  # no run_name
    done = bash("slurm.sbatch", name, **variables)
    assert done.returncode == 0 and "no run_name is given" in done.stdout, done
    [line] = words()
    given = line[line.index("--stderr") + 2 :]
    assert given == ["benchmark.py", name, "run_name=slurm-7", "save.grace_sec=150"]
    assert not (ROOT / "broken_out").exists()


def test_the_container_sees_each_folder_under_its_whole_name(tmp_path, monkeypatch):
    """A relative name is one of the checkout, and a link keeps its own name: the words of the ranks have it."""
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to("real")
    for name, text in {"srun": 'echo "$* RANK_LOGS=$RANK_LOGS"', "scontrol": "echo job"}.items():
        program(tmp_path / "bin" / name, f"#!/bin/sh\n[ $1 != --help ] || exec echo --container-image\n{text}\n")
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    monkeypatch.chdir(tmp_path)
    env = {**SLURM, "SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    env |= {"CONT": "easel.sqsh", "LOGDIR": "data/logs", "DATADIR": f"{tmp_path}/data", "NEMOLOGS": "../runs"}
    done = bash("slurm_container.sbatch", "run_name=a", **env)
    assert done.returncode == 0, done
    [mounts] = re.findall(r"--container-mounts=(\S+)", done.stdout)
    places = [tmp_path, tmp_path / "data", tmp_path.parent / "runs", tmp_path / "data/logs"]
    assert mounts == ",".join(f"{place}:{place}" for place in places)
    assert f"RANK_LOGS={tmp_path}/data/logs/7" in done.stdout
