"""What has become of each row: the stages of the way, with what went in, what is left, and why the rest is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cli.errors import Failed
from prepare.laion import download, filter
from prepare.laion.config import FILTERED, METADATA, TARS, LaionConfig
from prepare.places import Folder, open_place
from stages.dataset import FACTS_FILE


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
        why = ", ".join(f"{why} {num:,}" for why, num in self.left_out.items())
        return f"{text}; left out: {why}" if why else text


def of_metadata(config: LaionConfig) -> Account:
    """Return the account of the metadata, whose heads are read."""
    rows = num_bytes = 0
    for path in sorted(config.inside(METADATA).glob("*.parquet")):
        with filter.open_table(path) as table:
            rows += table.metadata.num_rows
        num_bytes += path.stat().st_size
    return Account("metadata", rows, rows, {}, num_bytes)


def of_filter(config: LaionConfig) -> Account:
    """Return the account of the filter. Raises Refused: it is not finished."""
    paths = filter.filtered_parts(config)
    found = filter.account_of(Folder(str(config.inside(FILTERED))), [path.name.removesuffix(".parquet") for path in paths])
    return Account("filter", **found, bytes=sum(path.stat().st_size for path in paths))


def of_download(config: LaionConfig) -> Account:
    """Return the account of the pictures that were downloaded. Raises OSError: it is not finished."""
    parts, _ = download.find_parts(config)
    place = Folder(str(config.inside(TARS)))
    return Account("download", **download.account_of(place, [download.name_of(number) for number in range(len(parts))]))


def of_stage(stage: str, address: str) -> Account:
    """Return the account of a stage of images or moments. Raises OSError: it is not finished."""
    counts: dict[str, Any] = json.loads(open_place(address).read(FACTS_FILE))["counts"]
    return Account(stage, counts["read"], counts["written"], counts["skipped"])


def all_accounts(config: LaionConfig) -> list[Account]:
    """Return the accounts of the stages that are finished, in order."""
    makers = (
        lambda: of_metadata(config),
        lambda: of_filter(config),
        lambda: of_download(config),
        lambda: of_stage("shards", config.images_at),
        lambda: of_stage("latents", config.moments_at),
    )
    found = []
    for make in makers:
        try:
            found.append(make())
        except (OSError, ValueError):  # not there yet
            break
    return found


def check_accounts(accounts: Sequence[Account]) -> None:
    """Raise Failed where a stage has lost rows without a word."""
    for account in accounts:
        gone = account.rows - account.kept - sum(account.left_out.values())
        if gone:
            raise Failed(f"account: {account.stage}: {gone:,} of {account.rows:,} rows are unaccounted for.")
    for before, after in zip(accounts, accounts[1:], strict=False):
        if before.kept != after.rows:
            text = f"account: {before.stage} left {before.kept:,} rows, {after.stage} read {after.rows:,}"
            raise Failed(f"{text}. They are of different commands: make {after.stage} anew.")
