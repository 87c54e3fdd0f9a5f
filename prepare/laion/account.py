"""What has become of each row: the stages of the way, with what went in, what is left, and why the rest is not."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.errors import Failed, Refused
from prepare.counts import SampleCounts
from prepare.laion import filter, images
from prepare.laion.config import METADATA, TARS, LaionConfig
from prepare.places import open_place
from stages.dataset import FACTS_FILE

STAGES = ("metadata", "filter", "images", "shards", "latents")
MAX_REASONS = 30  # that are shown: some are what hosts or tables like to say


@dataclass(frozen=True)
class Account:
    """One stage, finished."""

    stage: str
    rows: int
    kept: int
    left_out: dict[str, int]
    """Why -> how many."""
    bytes: int | None = None

    def __str__(self) -> str:
        size = f", {self.bytes / 2**30:,.2f} GiB" if self.bytes is not None else ""
        text = f"{self.stage}: {self.rows:,} rows, {self.kept:,} left{size}"
        reasons = Counter(self.left_out)
        shown = dict(reasons.most_common(MAX_REASONS))
        shown |= {"other reasons": others} if (others := reasons.total() - sum(shown.values())) else {}
        why = ", ".join(f"{why} {num:,}" for why, num in shown.items())
        return f"{text}; left out: {why}" if why else text


def of_metadata(config: LaionConfig) -> Account:
    """Return the account of the metadata, whose heads are read. Raises Refused: there are none; Failed: one is damaged."""
    paths, rows = sorted(config.inside(METADATA).glob("*.parquet")), 0
    if not paths:
        raise Refused(f"metadata: no *.parquet in {config.inside(METADATA)}.")
    for path in paths:
        try:
            with filter.open_table(path) as table:
                rows += table.metadata.num_rows
        except (OSError, ValueError) as error:
            raise Failed(f"metadata: {error}") from error
    return Account("metadata", rows, rows, {}, sum(path.stat().st_size for path in paths))


def of_filter(config: LaionConfig) -> Account:
    """Return the account of the filter. Raises Refused: it is not finished."""
    return of_parts("filter", filter.filtered_parts(config))


def of_images(config: LaionConfig) -> Account:
    """Return the account of the pictures that were downloaded. Raises OSError: it is not finished."""
    parts, _ = images.find_parts(config)
    return of_parts("images", [config.inside(TARS) / f"{images.name_of(number)}.tar" for number in range(len(parts))])


def of_parts(stage: str, paths: Sequence[Path]) -> Account:
    """Return the account of a stage whose parts have one each beside them. Raises OSError: one is missing."""
    left_out, sums = Counter[str](), Counter[str]()
    for path in paths:
        of_part = json.loads(path.with_suffix(".json").read_bytes())
        left_out.update(of_part["left_out"])
        sums.update(rows=of_part["rows"], kept=of_part["kept"], bytes=path.stat().st_size)
    return Account(stage, sums["rows"], sums["kept"], dict(left_out), sums["bytes"])


def of_stage(stage: str, address: str) -> Account:
    """Return the account of a stage of images or moments. Raises OSError: it is not finished."""
    counts = SampleCounts.from_facts(json.loads(open_place(address).read(FACTS_FILE))["counts"])
    return Account(stage, counts.found, counts.written, dict(counts.skipped + counts.left_out + counts.failed))


def all_accounts(config: LaionConfig) -> tuple[list[Account], list[str]]:
    """Return the accounts of the stages that are finished, in order, and why others have none.

    Raises:
        Failed: a table is damaged.
    """
    makers: dict[str, Callable[[], Account]] = {
        "metadata": lambda: of_metadata(config),  # which may be removed once the filter is finished
        "filter": lambda: of_filter(config),
        "images": lambda: of_images(config),
        "shards": lambda: of_stage("shards", config.place_of_images),
        "latents": lambda: of_stage("latents", config.place_of_moments),
    }
    found, missing = [], []
    for name, make in makers.items():
        try:
            found.append(make())
        except (OSError, Refused) as error:
            missing.append(f"{name}: not finished ({str(error).splitlines()[0].rstrip('.')})")
        except (ValueError, KeyError, TypeError) as error:
            text = f"account: {name}: a file of it is damaged: {type(error).__name__}: {error}"
            raise Failed(f"{text}. Remove the folder of this stage, and make it anew.") from error
    return found, missing


def without_account(accounts: Sequence[Account]) -> list[str]:
    """Return the stages between the first and the last one that have none: their files were removed to make room."""
    there = [STAGES.index(account.stage) for account in accounts]
    return [STAGES[number] for number in range(min(there), max(there)) if number not in there]


def check_accounts(accounts: Sequence[Account]) -> None:
    """Raise Failed where a stage has lost rows without a word."""
    for account in accounts:
        gone = account.rows - account.kept - sum(account.left_out.values())
        if gone:
            raise Failed(f"account: {account.stage}: {gone:,} of {account.rows:,} rows are unaccounted for.")
    for before, after in itertools.pairwise(accounts):
        if not without_account([before, after]) and before.kept != after.rows:
            text = f"account: {before.stage} left {before.kept:,} rows, {after.stage} read {after.rows:,}"
            raise Failed(f"{text}. They are of different commands: make {after.stage} anew.")
