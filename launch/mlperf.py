"""Turn the variables of an MLPerf submission into commands: a line for training, one for scoring where that comes after.

    source launch/config_DGXH100_01x08x32.sh
    DATADIR=/data CHECKPOINTS=/weights NEMOLOGS=/runs SEED=7 python -m launch.mlperf optimizer.lr_per_image=2.5e-7

launch/run_and_time.sh runs them: --null ends each word by a NUL, and each command by an empty word. docs/launching.md has the
table of the variables. Words are keys of benchmark.py, and count last. The recipe is that of the global batch, DGXNNODES x
DGXNGPU x BATCHSIZE: yamls/mlperf_256.yaml; YAML= names another.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common.command import command, start
from common.command_line import parse_command_line
from common.errors import ConfigError
from config import flatten, load
from training.config import ALIASES, RunConfig

FOLDER_VARIABLES = {"datasets/": "DATADIR", "checkpoints/": "CHECKPOINTS"}
"""Folder in the recipes -> variable of the folder that takes its place."""
NUMBERS = ("DGXNNODES", "DGXNGPU", "BATCHSIZE", "SEED", "RANDOM_SEED", "CONFIG_MAX_STEPS", "WARMUP_STEPS")


def read_variables() -> dict[str, str]:
    """Return those of the environment that are set, without empty ones."""
    names = (
        *("DGXNNODES", "DGXNGPU", "BATCHSIZE", "DGXSYSTEM", "YAML", "SEED", "RANDOM_SEED", "DATADIR", "CHECKPOINTS"),
        *("NEMOLOGS", "CONFIG_MAX_STEPS", "BASE_LR", "WARMUP_STEPS", "MLPERF_SUBMISSION_ORG"),
        *("MLPERF_SUBMISSION_PLATFORM", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
    )
    return {name: value for name in names if (value := os.environ.get(name))}


def commands_of(env: Mapping[str, str], words: Sequence[str]) -> list[list[str]]:
    """Return the words after `composer` of training, and of scoring where the recipe has it for afterwards.

    Raises:
        ConfigError: all that is wrong with the variables, and then with the keys.
    """
    if problems := _problems(env):
        raise ConfigError(problems)
    nodes = int(env.get("DGXNNODES") or env.get("SLURM_JOB_NUM_NODES") or 1)
    gpus, each = int(env["DGXNGPU"]), int(env.get("BATCHSIZE", "1"))
    batch = nodes * gpus * each
    yaml = env.get("YAML") or f"yamls/mlperf_{batch}.yaml"
    if not Path(yaml).is_file():
        known = ", ".join(sorted(path.name for path in Path("yamls").glob("mlperf_[0-9]*.yaml")))
        product = f"DGXNNODES x DGXNGPU x BATCHSIZE = {nodes} x {gpus} x {each} = {batch}"
        where = "YAML" if env.get("YAML") else product
        raise ConfigError([f"{where}: there is no {yaml}. Known: {known}. Change BATCHSIZE, or name a file by YAML."])
    seed = env.get("SEED") or env.get("RANDOM_SEED") or env.get("SLURM_JOB_ID") or str(int(time.time()))
    own = [f"seed={seed}", f"run_name=mlperf-{seed}", "mlperf.enabled=true"]
    own += [f"global_batch_size={batch}", f"device_train_microbatch_size={each}"]
    for key, name, unit in (
        ("run_folder", "NEMOLOGS", ""),
        ("max_duration", "CONFIG_MAX_STEPS", "ba"),
        ("optimizer.lr_per_image", "BASE_LR", ""),
        ("schedule.warmup_batches", "WARMUP_STEPS", ""),
        ("mlperf.org", "MLPERF_SUBMISSION_ORG", ""),
    ):
        own += [f"{key}={env[name]}{unit}"] if name in env else []
    if platform := env.get("MLPERF_SUBMISSION_PLATFORM") or env.get("DGXSYSTEM"):
        own.append(f"mlperf.platform={platform}")
    train = [yaml, *own, *_moved(yaml, env), *words]
    config = load(RunConfig, parse_command_line(train, ALIASES), check=lambda config: [])
    folder = str(Path(config.run_folder, config.run_name or ""))
    return [["benchmark.py", *train], *([["eval.py", folder]] if config.eval.when == "after" else [])]


def _problems(env: Mapping[str, str]) -> list[str]:
    problems = []
    for name in NUMBERS:
        if name in env and not (_is_whole(env[name]) and (int(env[name]) or name.endswith(("SEED", "STEPS")))):
            problems.append(f"{name} is '{env[name]}'. Possible: a whole number.")
    if "DGXNGPU" not in env:  # launch/ranks.sh would count them, and the recipe would be that of another batch
        what = "Give the ranks of a node, of which the batch is made, or source a launch/config_*.sh"
        problems.append(f"DGXNGPU is not given. {what}.")
    has, wanted = env.get("SLURM_JOB_NUM_NODES"), env.get("DGXNNODES")
    if has and wanted and _is_whole(wanted) and has != wanted:
        problems.append(f"DGXNNODES is {wanted}, but the job has {has} nodes. Give sbatch --nodes={wanted}.")
    for folder, name in FOLDER_VARIABLES.items():
        if name in env and not Path(env[name]).is_dir():
            problems.append(f"{name}: {env[name]} is not a folder. Wanted: what the recipes have in {folder}.")
    return problems


def _is_whole(text: str) -> bool:
    """True for a number in ASCII digits that int() reads."""
    return re.fullmatch(r"[0-9]{1,10}", text) is not None


def _moved(yaml: str, env: Mapping[str, str]) -> list[str]:
    """Return a recipe's paths in the folders that the variables name."""
    recipe = flatten(load(RunConfig, parse_command_line([yaml], ALIASES), check=lambda config: []))
    return [
        f"{key}={Path(env[name], value.removeprefix(folder))}"
        for key, value in recipe.items()
        for folder, name in FOLDER_VARIABLES.items()
        if name in env and isinstance(value, str) and value.startswith(folder)
    ]


@command(needs_words=False, keeps_secrets=True)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    is_for_script = "--null" in argv
    for words in commands_of(read_variables(), [word for word in argv if word != "--null"]):
        if is_for_script:  # to a pipe, with the passwords that the training needs
            sys.stdout.buffer.write("".join(f"{word}\0" for word in [*words, ""]).encode())
        else:
            print(shlex.join(words))
    return 0


if __name__ == "__main__":
    start(main)
