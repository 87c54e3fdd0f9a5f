"""From tables of URLs, as LAION publishes them, to tars of pictures, and on to moments; each stage can be stopped anywhere.

    python -m prepare.laion all yamls/prepare/laion.yaml folder=/data/laion       # the whole way, or what is missing of it
    python -m prepare.laion metadata|filter|images|shards|latents FILE.yaml     # one stage of it
    python -m prepare.laion account FILE.yaml                                     # what has become of each row

metadata fetches the parts of the table. filter leaves the rows that are wanted. images brings their pictures, by
img2dataset. shards and latents are prepare.shards and prepare.latents with the file's keys; they may write to a store. Each
stage ends with its account: rows, rows that are left, and how many others there are for which reason.

Killed in any way, the same command goes on with what is missing, and ends with the same bytes wherever hosts send the same.
Keys: docs/laion.md. engine=ray spreads images, shards and latents over a Ray cluster.

Exit code: 0 when the stage is whole, 1 when it failed or nothing is left, 2 when it could not start.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import torch
from tqdm import tqdm

from cli.command import command
from cli.command_line import Problem, parse_command_line
from cli.errors import ConfigError, Failed
from config import flat, load, to_yaml
from prepare import latents, shards
from prepare.laion import account, filter, images
from prepare.laion.account import STAGES, Account
from prepare.laion.config import METADATA, TARS, LaionConfig, check
from prepare.parts import GO_ON
from prepare.transfer import Wanted, check_wanted, fetch_all
from record import processes

PR_SET_PDEATHSIG = 1  # linux/prctl.h


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    what, *words = argv
    if what not in (*STAGES, "all", "account"):
        raise ConfigError([f"command line: '{what}' is no stage. Possible: {', '.join(STAGES)}, all, account."])
    command_line = parse_command_line(words, {})
    config = load(LaionConfig, command_line, check=functools.partial(check_stage, what))
    if command_line.print_config:
        print(to_yaml(config), end="")
        return 0
    if what == "account":
        return show_account(config)
    for stage in STAGES if what == "all" else [what]:
        try:
            code = MAKERS[stage](config)
        except OSError as error:
            raise Failed(f"{stage}: {error}. Look at the disk of {config.folder}. {GO_ON}.") from error
        if code:
            return code
    return show_account(config) if what == "all" else 0


def check_stage(what: str, config: LaionConfig) -> list[Problem]:
    """Return every problem of the stages that are to be made."""
    found = check(config)
    for name, of in (("shards", shards.check), ("latents", latents.check)):
        if what in (name, "all"):
            problems = of(getattr(config, name))
            found += [Problem(f"{name}.{one.text}", tuple(f"{name}.{key}" for key in one.keys)) for one in problems]
    return found


def show_account(config: LaionConfig) -> int:
    """Print what has become of each row. Raises Failed: some have got lost."""
    accounts, missing = account.all_accounts(config)
    print(*accounts, *missing, sep="\n")
    account.check_accounts(accounts)
    if not accounts:
        raise Failed(f"account: nothing is finished in {config.folder}.")
    first, last = accounts[0], accounts[-1]
    if between := account.without_account(accounts):
        print(f"{', '.join(between)}: removed, or made anew; what it has left out is not known")
        return 0
    print(f"all {first.rows:,} rows are accounted for: {last.kept:,} are left after {last.stage}")
    return 0


# --- the stages ---


def make_metadata(config: LaionConfig) -> int:
    """Fetch the parts of the table, each of the name that ends its address, and open them: one may be cut off, or a page.

    Raises:
        ConfigError, Refused, Failed: what is not available, and why.
    """
    folder, of = config.inside(METADATA), config.metadata
    urls = [of.urls.format(part=number) for number in range(of.num_parts)] if of.urls else []
    wanted = [Wanted(PurePosixPath(urlsplit(url).path).name, (url,)) for url in urls]
    try:
        check_wanted(wanted)
    except ValueError as error:
        raise ConfigError([f"metadata.urls: {line}" for line in str(error).splitlines()[:3]]) from error
    if wanted and (failed := fetch_all(wanted, folder, of.at_once, word="folder")):
        named = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:3])
        raise Failed(f"metadata: {len(failed)} of {len(wanted)} parts are not available: {named}. {GO_ON}.")
    return show(account.of_metadata(config))


def make_filter(config: LaionConfig) -> int:
    """Leave the rows that are wanted, in processes of this machine: the metadata lie on its disk."""
    filter.filter_all(config, functools.partial(run_on, dataclasses.replace(config, engine="local", ray="auto")))
    return show(account.of_filter(config))


def make_images(config: LaionConfig) -> int:
    """Download the pictures."""
    images.bring_all(config, functools.partial(run_on, config))
    return show(account.of_images(config))


def make_shards(config: LaionConfig) -> int:
    """Make the stage of images."""
    words = words_of(config.shards, engine=config.engine, ray=config.ray, workers=config.workers)
    return shards.main([str(config.inside(TARS)), config.place_of_images, *words])


def make_latents(config: LaionConfig) -> int:
    """Make the stage of moments: on a cluster, or in ranks of this machine."""
    places = [config.place_of_images, config.place_of_moments]
    if config.engine == "ray":
        return latents.main([*places, *words_of(config.latents, engine=config.engine, ray=config.ray)])
    ranks = config.ranks or torch.cuda.device_count() or len(os.sched_getaffinity(0))
    words = processes.of_composer(ranks, "-m", "prepare.latents", *places, *words_of(config.latents))
    child = subprocess.Popen(words, cwd=processes.ROOT, preexec_fn=end_with_parent)
    try:
        return child.wait()
    except BaseException:
        child.terminate()
        child.wait(processes.END_SEC)
        raise


MAKERS: dict[str, Callable[[LaionConfig], int]] = {
    "metadata": make_metadata,
    "filter": make_filter,
    "images": make_images,
    "shards": make_shards,
    "latents": make_latents,
}


def show(found: Account) -> int:
    """Print a stage's account; 1 where nothing is left."""
    print(found, flush=True)
    return 0 if found.kept else 1


def words_of(section: Any, **given: Any) -> list[str]:
    """Return a section as words of its own command: what differs from the defaults, and what is given for all stages."""
    values, usual = flat(section), flat(type(section)())
    words = {key: value for key, value in given.items() if value is not None and value != usual[key]}
    words |= {key: value for key, value in values.items() if value != usual[key]}
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in words.items()]


# --- engines ---


def run_on(
    config: LaionConfig, make: Callable[[int], Any], numbers: Sequence[int], rows: Sequence[int], name: str
) -> None:
    """Make numbered parts on the engine, and show how many rows have come, how fast, and how long the rest takes."""
    if not numbers:
        return
    total = sum(rows[number] for number in numbers)
    with (
        config.opened(functools.partial(_as_it_is, make), config.workers) as engine,
        tqdm(total=total, unit=" rows", unit_scale=True, desc=name) as progress,
    ):
        for _, num_rows in engine.run(numbers):
            progress.update(num_rows)


def _as_it_is(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return it: a worker has nothing to begin with."""
    return make


def end_with_parent() -> None:
    """In a child: let the kernel end it with this process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
