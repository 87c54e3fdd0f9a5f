"""launch/: MLPerf's variables as words, files of systems, what ranks.sh refuses. On a cluster: tests/test_slurm.py."""

from __future__ import annotations

import os
import re
import subprocess
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


def test_what_the_variables_cannot_mean_is_said_at_once():
    given = {"DGXNNODES": "two", "BATCHSIZE": "0", "SLURM_JOB_NUM_NODES": "4", "DATADIR": "/nowhere"}
    with pytest.raises(ConfigError) as error:
        mlperf.commands_of(given, [])
    assert error.value.problems == [
        "DGXNNODES is 'two'. Possible: a whole number.",
        "BATCHSIZE is '0'. Possible: a whole number.",
        "DATADIR: /nowhere is no folder. Wanted: what the recipes have in datasets/.",
    ]
    with pytest.raises(ConfigError) as error:
        mlperf.commands_of({"DGXNNODES": "2", "SLURM_JOB_NUM_NODES": "4"}, [])
    assert str(error.value) == "DGXNNODES is 2, but the job has 4 nodes. Give sbatch --nodes=2."
    with pytest.raises(ConfigError) as error:
        mlperf.commands_of({"DGXNGPU": "8", "BATCHSIZE": "31"}, [])
    assert str(error.value).startswith(
        "DGXNNODES x DGXNGPU x BATCHSIZE = 1 x 8 x 31 = 248: there is no yamls/mlperf_248.yaml. Known: mlperf_1024.yaml,"
    )


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
    ],
)
def test_a_node_refuses_what_no_launcher_could_use(variables, text):
    environment = {**os.environ, **variables}
    for name in {"MASTER_ADDR", "MASTER_PORT", "RANK_LOGS", "WORLD_SIZE", "LOCAL_WORLD_SIZE"} - variables.keys():
        environment.pop(name, None)
    done = subprocess.run(
        ["bash", "launch/ranks.sh", "x=1"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2 and text in done.stderr, done


def test_both_batch_scripts_have_what_a_restart_needs_and_differ_in_the_container_alone():
    plain, container = (
        [line for line in (ROOT / "launch" / name).read_text().splitlines() if line.startswith("#SBATCH ")]
        for name in ("slurm.sbatch", "slurm_container.sbatch")
    )
    assert plain == container
    assert {"--requeue", "--open-mode=append", "--signal=B:USR1@180", "--ntasks-per-node=1"} <= {
        line.split()[1] for line in plain
    }
