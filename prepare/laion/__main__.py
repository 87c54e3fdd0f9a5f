"""From tables of URLs, as LAION publishes them, to tars of images; each stage can be stopped anywhere.

    python -m prepare.laion all yamls/prepare/laion.yaml folder=/data/laion       # the whole way, or what is missing of it
    python -m prepare.laion metadata|filter|images FILE.yaml                      # one stage of it
    python -m prepare.laion account FILE.yaml                                     # what has become of each row

metadata fetches the parts of the table. filter keeps the rows that are wanted. images brings their images, by
img2dataset, into FOLDER/tars, where prepare.shards continues. Each stage ends with its account: rows, rows that are left,
and how many others there are for which reason.

Killed in any way, the same command continues with what is missing, and ends with the same bytes wherever hosts send the same.
engine=ray spreads images over a Ray cluster.

Exit code: 0 when the stage is whole, 1 when it failed or nothing is left, 2 when it could not start.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

from tqdm import tqdm

from common.command import command, start
from common.command_line import parse_command_line
from common.errors import ConfigError, Failed, Refused
from config import load, to_yaml
from prepare.arguments import RESUME_HINT
from prepare.http_download import FileToFetch, check_files, fetch_all
from prepare.laion import filter, images
from prepare.laion.config import METADATA, TARS, LaionConfig, check

MAX_REASONS = 30  # in a line of the account: hosts send their own messages


@command(keys=LaionConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    what, *words = argv
    if what not in (*STAGES, "all", "account"):
        raise ConfigError([f"command line: '{what}' is not a stage. Possible: {', '.join(STAGES)}, all, account."])
    command_line = parse_command_line(words, {})
    config = load(LaionConfig, command_line, check=check)
    if command_line.print_config:
        print(to_yaml(config), end="")
        return 0
    for stage in STAGES if what == "all" else [what] if what in STAGES else []:
        make, account_of = STAGES[stage]
        try:
            make(config)
            account = account_of(config)
        except OSError as error:
            raise Failed(f"{stage}: {error}. Look at the disk of {config.folder}. {RESUME_HINT}.") from error
        print(account, flush=True)
        if not account.kept:
            return 1
    return 0 if what in STAGES else print_account(config)


# --- the stages ---


def make_metadata(config: LaionConfig) -> None:
    """Fetch the parts of the table, each under the last name of its address.

    Raises:
        ConfigError, Refused, Failed: what is not available, and why.
    """
    folder, metadata = config.subfolder(METADATA), config.metadata
    urls = [metadata.urls.format(part=number) for number in range(metadata.num_parts)] if metadata.urls else []
    wanted = [FileToFetch(PurePosixPath(urlsplit(url).path).name, (url,)) for url in urls]
    try:
        check_files(wanted)
    except ValueError as error:
        raise ConfigError([f"metadata.urls: {line}" for line in str(error).splitlines()[:3]]) from error
    if wanted and (failed := fetch_all(wanted, folder, metadata.at_once, argument_name="folder")):
        named = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:3])
        raise Failed(f"metadata: {len(failed)} of {len(wanted)} parts are not available: {named}. {RESUME_HINT}.")


def make_filter(config: LaionConfig) -> None:
    """Keep the rows that are wanted, in processes of this machine: the metadata is on its disk."""
    filter.filter_all(config, functools.partial(run_on, dataclasses.replace(config, engine="local", ray="auto")))


def make_images(config: LaionConfig) -> None:
    """Download the images."""
    images.download_all(config, functools.partial(run_on, config))


def run_on(
    config: LaionConfig, make: Callable[[int], Any], numbers: Sequence[int], rows: Sequence[int], name: str
) -> None:
    """Make numbered parts on the engine, and show how many rows have come, how fast, and how long the rest takes."""
    if not numbers:
        return
    total = sum(rows[number] for number in numbers)
    with (
        config.open_engine(functools.partial(_return_unchanged, make), config.workers) as engine,
        tqdm(total=total, unit=" rows", unit_scale=True, desc=name) as progress,
    ):
        for _, num_rows in engine.run(numbers):
            progress.update(num_rows)


def _return_unchanged(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """Return it: a worker has nothing to begin with."""
    return make


# --- the account ---


@dataclass(frozen=True)
class Account:
    """One stage, finished."""

    stage: str
    rows: int
    kept: int
    left_out: dict[str, int]
    """Why -> how many."""
    bytes: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}: {self.rows:,} rows, {self.kept:,} left, {self.bytes / 2**30:,.2f} GiB"
        reasons = Counter(self.left_out)
        listed = dict(reasons.most_common(MAX_REASONS))
        listed |= {"other reasons": others} if (others := reasons.total() - sum(listed.values())) else {}
        why = ", ".join(f"{why} {num:,}" for why, num in listed.items())
        return f"{text}; left out: {why}" if why else text


def metadata_account(config: LaionConfig) -> Account:
    """Return the account of the metadata, whose heads are read. Raises Refused: there are none; Failed: one is damaged."""
    paths = sorted(config.subfolder(METADATA).glob("*.parquet"))
    if not paths:
        raise Refused(f"metadata: no *.parquet in {config.subfolder(METADATA)}.")
    try:
        rows = sum(part.num_rows for part in filter.find_metadata_parts(config.subfolder(METADATA), config.filter))
    except ConfigError as error:
        raise Failed(f"metadata: {error}") from error
    return Account("metadata", rows, rows, {}, sum(path.stat().st_size for path in paths))


def filter_account(config: LaionConfig) -> Account:
    """Return the account of the filter. Raises Refused: it is not finished."""
    return parts_account("filter", filter.filtered_parts(config))


def images_account(config: LaionConfig) -> Account:
    """Return the account of the images that were downloaded. Raises OSError: it is not finished."""
    parts, _ = images.find_row_groups(config)
    return parts_account(
        "images", [config.subfolder(TARS) / f"{images.tar_stem(number)}.tar" for number in range(len(parts))]
    )


def parts_account(stage: str, paths: Sequence[Path]) -> Account:
    """Return the account of a stage whose parts have one each beside them. Raises OSError: one is missing."""
    left_out, sums = Counter[str](), Counter[str]()
    for path in paths:
        of_part = json.loads(path.with_suffix(".json").read_bytes())
        left_out.update(of_part["left_out"])
        sums.update(rows=of_part["rows"], kept=of_part["kept"], bytes=path.stat().st_size)
    return Account(stage, sums["rows"], sums["kept"], dict(left_out), sums["bytes"])


STAGES: dict[str, tuple[Callable[[LaionConfig], None], Callable[[LaionConfig], Account]]] = {
    "metadata": (make_metadata, metadata_account),
    "filter": (make_filter, filter_account),
    "images": (make_images, images_account),
}
"""What makes each stage, and its account."""


def print_account(config: LaionConfig) -> int:
    """Print what has become of each row. Raises Failed: some have got lost, or a file is damaged."""
    accounts = []
    for name, (_, account_of) in STAGES.items():
        try:
            accounts.append(account_of(config))
            print(accounts[-1])
        except (OSError, Refused) as error:  # not finished, or removed since: the metadata may be, after the filter
            print(f"{name}: not finished ({str(error).splitlines()[0].rstrip('.')})")
        except (ValueError, KeyError, TypeError) as error:
            text = f"account: {name}: a file of it is damaged: {type(error).__name__}: {error}"
            raise Failed(f"{text}. Remove the folder of this stage, and make it again.") from error
    if not accounts:
        raise Failed(f"account: nothing is finished in {config.folder}.")
    check_accounts(accounts)
    first, last = accounts[0], accounts[-1]
    print(f"all {first.rows:,} rows are accounted for: {last.kept:,} are left after {last.stage}")
    return 0


def check_accounts(accounts: Sequence[Account]) -> None:
    """Raise Failed where a stage has lost rows without a word."""
    for account in accounts:
        gone = account.rows - account.kept - sum(account.left_out.values())
        if gone:
            raise Failed(f"account: {account.stage}: {gone:,} of {account.rows:,} rows are unaccounted for.")
    for before, after in itertools.pairwise(accounts):
        if before.kept != after.rows:
            text = f"account: {before.stage} left {before.kept:,} rows, {after.stage} read {after.rows:,}"
            raise Failed(f"{text}. They are of different commands: make {after.stage} again.")


# --- run `python -m prepare.laion` ---

if __name__ == "__main__":
    start(main)
