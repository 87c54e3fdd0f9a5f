"""launch/: MLPerf's variables as words, files of systems, what ranks.sh refuses. On a cluster: tests/test_slurm.py."""

from __future__ import annotations

import json
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

from cli.command_line import parse_command_line
from cli.errors import ConfigError
from config import load
from launch import mlperf
from training.run_config import ALIASES, RunConfig

SYSTEMS = sorted((ROOT / "launch").glob("config_*.sh"))


def variables_of(path: Path) -> dict[str, str]:
    """What a system's file exports."""
    done = subprocess.run(
        ["bash", "-c", f"source {path} && env"], env={}, capture_output=True, text=True, check=True, timeout=60
    )
    found = dict(line.split("=", 1) for line in done.stdout.splitlines())
    return {name: value for name, value in found.items() if name not in ("PWD", "SHLVL", "_", "OLDPWD", "PATH")}


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("path", SYSTEMS, ids=lambda path: path.name)
def test_a_systems_file_says_nodes_gpus_and_batch_and_its_recipe_has_that_batch(path):
    given = variables_of(path)
    name = re.fullmatch(r"config_(\w+?)_(\d\d)x(\d\d)x(\d\d)\.sh", path.name)
    assert given["DGXSYSTEM"] == path.stem.removeprefix("config_")
    numbers = [int(given[key]) for key in ("DGXNNODES", "DGXNGPU", "BATCHSIZE")]
    assert numbers == [int(name[part]) for part in (2, 3, 4)] and re.fullmatch(r"\d\d:\d\d:\d\d", given["WALLTIME"])
    batch = numbers[0] * numbers[1] * numbers[2]
    [train, *_] = mlperf.commands_of(given, [])
    recipe = load(RunConfig, parse_command_line([train[1]], ALIASES), check=lambda config: [])
    assert recipe.global_batch_size == batch


def test_a_submissions_variables_become_words_and_words_count_last(tmp_path):
    given = {
        **variables_of(ROOT / "launch/config_DGXH100_01x08x32.sh"),
        "SEED": "7",
        "NEMOLOGS": "/runs",
        "CONFIG_MAX_STEPS": "100",
        "BASE_LR": "2.5e-7",
        "WARMUP_STEPS": "0",
        "DATADIR": str(tmp_path),
        "MLPERF_SUBMISSION_ORG": "Us",
    }
    train, score = mlperf.commands_of(given, ["max_duration=50ba", "mlperf.division=closed"])
    assert train[:2] == ["benchmark.py", "yamls/mlperf_256.yaml"] and score == ["eval.py", "/runs/mlperf-7"]
    config = load(RunConfig, parse_command_line(train[1:], ALIASES), check=lambda config: [])
    assert (config.seed, config.run_name, config.run_folder) == (7, "mlperf-7", "/runs")
    assert (config.global_batch_size, config.device_train_microbatch_size, config.max_duration) == (256, 32, "50ba")
    assert (config.optimizer.lr_per_image, config.schedule.warmup_batches) == (2.5e-7, 0)
    assert (config.mlperf.enabled, config.mlperf.division) == (True, "closed")
    assert (config.mlperf.org, config.mlperf.platform) == ("Us", "DGXH100_01x08x32")
    assert config.data.remote == f"{tmp_path}/laion-400m/moments"
    assert config.eval.prompts == f"{tmp_path}/coco2014/val2014_30k.tsv"
    assert config.model.weights == "checkpoints/sd/512-base-ema.ckpt"  # CHECKPOINTS is not given
    alone = {name: value for name, value in given.items() if name != "SEED"}
    assert "seed=12" in mlperf.commands_of({**alone, "RANDOM_SEED": "12"}, [])[0]
    assert "seed=31" in mlperf.commands_of({**alone, "SLURM_JOB_ID": "31"}, [])[0]  # the same on all nodes
    del alone["DGXNNODES"]
    assert "global_batch_size=512" in mlperf.commands_of({**alone, "SLURM_JOB_NUM_NODES": "2"}, [])[0]


def test_what_the_variables_cannot_mean_is_said_at_once():
    given = {"DGXNNODES": "two", "BATCHSIZE": "0", "SLURM_JOB_NUM_NODES": "4", "DATADIR": "/nowhere", "DGXNGPU": "8"}
    with pytest.raises(ConfigError) as error:
        mlperf.commands_of(given, [])
    assert error.value.problems == [
        "DGXNNODES is 'two'. Possible: a whole number.",
        "BATCHSIZE is '0'. Possible: a whole number.",
        "DATADIR: /nowhere is no folder. Wanted: what the recipes have in datasets/.",
    ]
    for text in ("²", "9" * 5000, "8\n8"):  # which str.isdigit or int takes, but not both
        with pytest.raises(ConfigError) as error:
            mlperf.commands_of({"DGXNGPU": text}, [])
        assert error.value.problems == [f"DGXNGPU is '{text}'. Possible: a whole number."]
    with pytest.raises(ConfigError) as error:
        mlperf.commands_of({"DGXNNODES": "2", "DGXNGPU": "8", "SLURM_JOB_NUM_NODES": "4"}, [])
    assert str(error.value) == "DGXNNODES is 2, but the job has 4 nodes. Give sbatch --nodes=2."
    for unset in ({}, {"YAML": "yamls/shapes.yaml"}):
        with pytest.raises(ConfigError) as error:
            mlperf.commands_of({"BATCHSIZE": "256", **unset}, [])
        assert str(error.value) == (
            "DGXNGPU is not given. Give the ranks of a node, of which the batch is made, or source a launch/config_*.sh."
        )
    with pytest.raises(ConfigError) as error:
        mlperf.commands_of({"DGXNGPU": "8", "BATCHSIZE": "31"}, [])
    assert str(error.value).startswith(
        "DGXNNODES x DGXNGPU x BATCHSIZE = 1 x 8 x 31 = 248: there is no yamls/mlperf_248.yaml. Known: mlperf_1024.yaml,"
    )


TWO = {"RANKS_PER_NODE": "1", "NUM_NODES": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({"RANKS_PER_NODE": "many"}, ": RANKS_PER_NODE is 'many'. Possible: a number of ranks.\n"),
        ({"PATH": "/usr/bin:/bin", "RANKS_PER_NODE": "1"}, ": no composer on the PATH. Activate the environment"),
        (
            {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "12"},
            ": WORLD_SIZE is '12'. Possible: a multiple of the 8 ranks of a node; or give NUM_NODES.\n",
        ),
        (
            {"LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"},
            "MASTER_ADDR or MASTER_PORT is not given, and there are 2 nodes. Give the name of the first",
        ),
        (
            {"RANKS_PER_NODE": "1", "NUM_NODES": "2"},
            "MASTER_ADDR or MASTER_PORT is not given, and there are 2 nodes. Give the name of the first",
        ),
        ({"NUM_NODES": "two"}, ": NUM_NODES is 'two'. Possible: a number of nodes, from 1 on.\n"),
        ({"NUM_NODES": "0"}, ": NUM_NODES is '0'. Possible: a number of nodes, from 1 on.\n"),
        (
            {**TWO, "NODE_RANK": "2"},
            ": NODE_RANK is '2'. Possible: from 0 to 1, the number of nodes being 2. NUM_NODES sets it.\n",
        ),
        (
            {**TWO, "NODE_RANK": "x"},
            ": NODE_RANK is 'x'. Possible: from 0 to 1, the number of nodes being 2. NUM_NODES sets it.\n",
        ),
        (
            {"NODE_RANK": "1"},
            ": NODE_RANK is '1'. Possible: from 0 to 0, the number of nodes being 1. NUM_NODES sets it.\n",
        ),
        (
            TWO,
            ": NODE_RANK is not given, and there are 2 nodes. Give each its own: 0 on that of MASTER_ADDR, up to 1.\n",
        ),
        ({"MASTER_PORT": "abc"}, ": MASTER_PORT is 'abc'. Possible: a number from 1 to 65535.\n"),
        ({**TWO, "MASTER_PORT": "65536"}, ": MASTER_PORT is '65536'. Possible: a number from 1 to 65535.\n"),
    ],
)
def test_a_node_refuses_what_no_launcher_could_use(variables, text):
    done = launched("x=1", **variables)
    assert done.returncode == 2 and text in done.stderr, done


def launched(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """What ranks.sh does with these variables, and with none of another launcher's."""
    others = {"RANK_LOGS", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NUM_NODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"}
    environment = {name: value for name, value in os.environ.items() if name not in others} | variables
    return subprocess.run(
        ["bash", "launch/ranks.sh", *words], env=environment, capture_output=True, text=True, timeout=120
    )


def test_numbers_with_zeros_before_them_are_decimal(tmp_path):
    """The names of machines have such numbers; the shell's arithmetic would read 08 as octal."""
    (tmp_path / "composer").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "composer").chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = launched("x=1", **path, **{**TWO, "NUM_NODES": "010", "NODE_RANK": "08", "RANKS_PER_NODE": "08"})
    assert done.stdout == (
        "--nproc 8 --world_size 80 --node_rank 8 --master_addr n0 --master_port 29500 benchmark.py x=1\n"
    ), done


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


@pytest.mark.parametrize("words", [[], ["no_rank"]], ids=["ranks import", "no rank yet"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGUSR1, 138), (signal.SIGINT, 143)])
def test_a_signal_before_the_ranks_can_hear_it_gives_its_code_too(number, code, words, tmp_path):
    (tmp_path / "composer").write_text(LAUNCHER.format(python=sys.executable, here=str(tmp_path)))
    (tmp_path / "composer").chmod(0o755)
    own = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "RANKS_PER_NODE": "1", "SLURM_JOB_ID": ""}
    with subprocess.Popen(["bash", "launch/ranks.sh", *words], env={**os.environ, **own}) as process:
        until = time.monotonic() + 30
        while not (tmp_path / "ready").exists() and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(number)
        assert process.wait(timeout=30) == code


def test_a_rank_that_ends_of_a_signal_which_the_job_was_not_sent_keeps_its_code(tmp_path):
    (tmp_path / "composer").write_text("#!/bin/sh\nexit 241\n")
    (tmp_path / "composer").chmod(0o755)
    done = launched(PATH=f"{tmp_path}:{os.environ['PATH']}", RANKS_PER_NODE="1")
    assert done.returncode == 241, done


LINES = "\ntouch broken_out\n$(touch broken_out) `touch broken_out` '; touch broken_out; '"
"""A value whose other lines are commands to a shell that reads it."""


@pytest.fixture
def recorded(tmp_path) -> tuple[dict[str, str], Callable[[], list[list[str]]]]:
    """Variables with a launcher that writes down its words; and what it was given."""
    write = f"open({str(tmp_path / 'words')!r}, 'a').write(json.dumps(sys.argv[1:]) + chr(10))"
    text = f"#!{sys.executable}\nimport json, sys\n{write}\n"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/composer").write_text(text)
    (tmp_path / "bin/composer").chmod(0o755)
    python = Path(sys.executable).parent
    variables = {"PATH": f"{tmp_path}/bin:{python}:{os.environ['PATH']}", "RANKS_PER_NODE": "1", "SLURM_JOB_ID": ""}
    return {**os.environ, **variables}, lambda: [
        json.loads(line) for line in (tmp_path / "words").read_text().splitlines()
    ]


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_value_is_no_code_of_the_shell_and_one_of_several_lines_is_refused(recorded, tmp_path):
    environment, words = recorded
    own = {"DGXNGPU": "8", "BATCHSIZE": "32", "SEED": "7", "NEMOLOGS": "/runs"}

    def launched(org: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", str(ROOT / "launch/run_and_time.sh"), "data.remote=sftp://user:hunter2@host/x"],
            env={**environment, **own, "MLPERF_SUBMISSION_ORG": org},
            capture_output=True,
            text=True,
            timeout=100,
        )

    done = launched(f"Us{LINES}")
    assert done.returncode == 2 and not (tmp_path / "words").exists(), done
    assert "mlperf.org is " in done.stderr
    assert "Possible: a text without control characters and line ends or null." in done.stderr
    line = "Us $(touch broken_out) `touch broken_out` '; touch broken_out; '"
    done = launched(line)
    assert done.returncode == 0, done
    train, score = words()
    assert f"mlperf.org={line}" in train and score[-2:] == ["eval.py", "/runs/mlperf-7"]
    assert train[-1] == "data.remote=sftp://user:hunter2@host/x"  # the ranks need it
    assert not (ROOT / "broken_out").exists() and "RESULT,stable_diffusion," in done.stdout


def test_words_of_several_lines_reach_the_ranks_of_a_slurm_job_whole(recorded, tmp_path):
    environment, words = recorded
    srun = '#!/bin/bash\nwhile [ "$1" != bash ]; do shift; done\n[ "$2" = -c ] || exec "$@"\n'
    for name, text in {"srun": srun, "scontrol": "#!/bin/sh\necho job\n"}.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    slurm = {"SUBMIT_DIR": str(ROOT), "JOB_ID": "7", "JOB_NODELIST": "n1", "JOB_NUM_NODES": "1", "CPUS_ON_NODE": "2"}
    environment |= {f"SLURM_{name}": value for name, value in slurm.items()} | {"LOGDIR": str(tmp_path / "logs")}

    def submit(*given: str, **variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "launch/slurm.sbatch", *given],
            env={**environment, **variables},
            capture_output=True,
            text=True,
            timeout=60,
        )

    name = f"mlperf.org=a{LINES}\nrun_name=b"  # no run_name
    done = submit(name)
    assert done.returncode == 0 and "no run_name is given" in done.stdout, done
    grace = "save.grace_sec=150"
    assert [line[line.index("--stderr") + 2 :] for line in words()] == [
        ["benchmark.py", name, "run_name=slurm-7", grace]
    ]
    assert not (ROOT / "broken_out").exists()


def test_both_batch_scripts_have_what_a_restart_needs_and_differ_in_the_container_alone():
    plain, container = (
        [line for line in (ROOT / "launch" / name).read_text().splitlines() if line.startswith("#SBATCH ")]
        for name in ("slurm.sbatch", "slurm_container.sbatch")
    )
    assert plain == container
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180", "--ntasks-per-node=1"} <= {
        line.split()[1] for line in plain
    }


def test_the_container_sees_each_folder_under_its_whole_name(tmp_path):
    """A relative name is one of the checkout, and a link keeps its own name: what the ranks are given has it."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "real").mkdir()
    (tmp_path / "data").symlink_to("real")
    for name, text in {"srun": 'echo "$* RANK_LOGS=$RANK_LOGS"', "scontrol": "echo job"}.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n[ $1 != --help ] || exec echo --container-image\n{text}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    slurm = {
        "SUBMIT_DIR": str(tmp_path),
        "JOB_ID": "7",
        "JOB_NODELIST": "n1",
        "JOB_NUM_NODES": "1",
        "CPUS_ON_NODE": "2",
    }
    own = {f"SLURM_{name}": value for name, value in slurm.items()} | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    own |= {"CONT": "easel.sqsh", "LOGDIR": "data/logs", "DATADIR": f"{tmp_path}/data", "NEMOLOGS": "../runs"}
    done = subprocess.run(
        ["bash", "launch/slurm_container.sbatch", "run_name=a"],
        env={**os.environ, **own},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done
    [mounts] = re.findall(r"--container-mounts=(\S+)", done.stdout)
    places = [tmp_path, tmp_path / "data", tmp_path.parent / "runs", tmp_path / "data/logs"]
    assert mounts == ",".join(f"{place}:{place}" for place in places)
    assert f"RANK_LOGS={tmp_path}/data/logs/7" in done.stdout
