"""Download what others publish: weights, prompts, statistics, data sets; each file compared with its digest.

    python -m prepare.downloads list                              # what there is, and what of it is here
    python -m prepare.downloads list moments verify=true          # read every file of a group again
    python -m prepare.downloads sd2 inception clip prompts statistics
    python -m prepare.downloads moments to=/data at_once=8        # 831 GB; the same command resumes
    python -m prepare.downloads moments to=/data only='0000?.tar' # ten of the 832
    python -m prepare.downloads zoo                               # what AMD's benchmark fetches (make download_assets)

A GROUP is one of the manifest, prepare/downloads.yaml, which says where each size and digest is from. Its files go to the
folder that the recipes in yamls/ name, in `to`: checkpoints/sd, datasets/coco2014, ... Models of the zoo go into the Hugging
Face Hub's cache, from where runs take them by name.

A file takes its name when it is whole and its digest is right (prepare/transfer.py). Where no digest is published, its size
alone is compared. A file that is there is left as it is; its digest is compared once, and remembered in .digests beside it.
What is gated says so: accept its terms on the page that is named, and set HF_TOKEN.
Exit code: 0 if all is there, 1 if something could not be had or is damaged, 2 if it could not start.
"""

from __future__ import annotations

import contextlib
import fnmatch
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cli.command import command, start
from cli.command_line import Problem
from cli.errors import ConfigError, Failed, Refused
from cli.files import write_whole
from cli.limits import limited, shown
from cli.log import log
from preflight.limits import unwritable
from prepare import hub_files
from prepare.manifest import (
    MANIFEST,
    Group,
    choose,
    list_urls,
    read_address,
    read_list,
    read_manifest,
    wanted_of,
    with_mirror,
)
from prepare.transfer import GO_ON, Outcome, fetch_all
from prepare.wanted import Memory, Wanted, is_address
from prepare.words import read_words

LIST = "list"
MOST_SHOWN = 40
MAX_LIST_BYTES = 2**26


@dataclass(frozen=True)
class DownloadsConfig:
    """The keys of this command."""

    to: str = "."
    """Folder in which the groups have theirs, by the names that the recipes use."""
    only: str | None = None
    """Pattern of file names, as '0000?.tar', of each group. null: all files."""
    at_once: int = limited(4, 1, 64)
    """Files at a time."""
    verify: bool = False
    """Of list: read every file, and compare its digest again."""
    mirror: str | None = None
    """Address of a copy with the same folders, asked first: http://, https:// or file://. null: none."""
    manifest: str | None = None
    """Another manifest, a YAML file. null: prepare/downloads.yaml."""
    timeout_sec: float = limited(60.0, 1, 3600)
    """Longest silence of a server, seconds."""
    tries: int = limited(5, 1, 1000)
    """Tries of an address that bring nothing, one after the other."""


def check(config: DownloadsConfig) -> list[Problem]:
    """Return every problem that can be found before the manifest is read."""
    if config.mirror is not None and not is_address(config.mirror):
        possible = "http://, https:// and file://"
        return [
            Problem(f"mirror: {config.mirror} is no address. Possible: {possible}, as file:///mnt/copy.", ("mirror",))
        ]
    return []


# ---------------------------------------------------------------------------------------------------------------------
# A group's files
# ---------------------------------------------------------------------------------------------------------------------


def files_of(group: Group, folder: Path, config: DownloadsConfig) -> tuple[list[Wanted], list[str]]:
    """Return a group's files, and the names of those of which its list has two digests; a list is fetched, and kept.

    Raises:
        Failed: the list is not available, or is none.
        OSError: it cannot be written.
    """
    if group.kind == "files":
        return _chosen(wanted_of(group, config.mirror), config), []
    base, md5 = (read_text(list_urls(group, suffix, config.mirror), config) for suffix in (".uri", ".md5"))
    try:
        listed, twice = read_list(md5, read_address(base, str(group.uri)), list_urls(group, ".md5")[0])
    except ValueError as error:
        raise Failed(f"{error}. Look at that address") from error
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(_list_path(group, folder), md5)
    files = _chosen([with_mirror(one, group, config.mirror) for one in listed], config)
    return files, [name for name in twice if fnmatch.fnmatch(name, config.only or "*")]


def _list_path(group: Group, folder: Path) -> Path:
    return folder / Path(list_urls(group, ".md5")[0]).name


def read_text(urls: tuple[str, ...], config: DownloadsConfig) -> str:
    """Return a small text from the first address that gives it. Raises Failed: none does."""
    with tempfile.TemporaryDirectory() as folder:
        ways: dict[str, Any] = dict(timeout_sec=config.timeout_sec, tries=config.tries, most_bytes=MAX_LIST_BYTES)
        [outcome] = fetch_all([Wanted("list", urls)], Path(folder), is_quiet=True, **ways)
        if outcome.reason:
            raise Failed(f"its list is not available: {outcome.reason}")
        try:
            return Path(folder, "list").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Failed(f"its list, {urls[0]}, is no text") from error


def known_files(group: Group, folder: Path, config: DownloadsConfig) -> list[Wanted]:
    """Return a group's files without asking anybody; none: its list was not fetched yet, or is damaged."""
    if group.kind == "files":
        return _chosen(wanted_of(group), config)
    if group.kind == "data_set":
        return _chosen(Memory(folder).wanted(), config)
    with contextlib.suppress(OSError, ValueError):
        return _chosen(read_list(_list_path(group, folder).read_text(), "https://-", "-")[0], config)
    return []


def _chosen(wanted: Sequence[Wanted], config: DownloadsConfig) -> list[Wanted]:
    return [one for one in wanted if fnmatch.fnmatch(one.name, config.only or "*")]


# ---------------------------------------------------------------------------------------------------------------------
# Fetching
# ---------------------------------------------------------------------------------------------------------------------


def fetch_group(name: str, group: Group, config: DownloadsConfig) -> str:
    """Fetch what is missing of a group, and return a line that says where it is.

    Raises:
        Failed: some of it is not available; a line each.
        Refused: see `fetch_all`.
        OSError: its folder cannot be written.
    """
    if group.kind == "model":
        hub_files.fetch_model(group)
        return f"{name}: {group.model} is in {hub_files.hub.cache()}"
    folder = Path(config.to, str(group.folder))
    if group.kind == "data_set":
        wanted = hub_files.fetch_data_set(group, folder, config.at_once)
        return f"{name}: {len(wanted)} files are in {folder}"
    wanted, twice = files_of(group, folder, config)
    if not wanted and not twice:
        raise Failed(f"has no file like {config.only}. Give another pattern")
    if bare := [one for one in wanted if not one.digest]:
        log.info(
            f"{name}: {', '.join(_some([one.name for one in bare], 3))}: digest not published, the size alone is compared."
        )
    about_bytes = int(1e9 * group.about_gb) if group.about_gb and config.only is None else 0
    ways: dict[str, Any] = dict(timeout_sec=config.timeout_sec, tries=config.tries, about_bytes=about_bytes)
    outcomes = fetch_all(wanted, folder, config.at_once, **ways)
    failed = [one for one in outcomes if one.reason]
    failed += [Outcome(name, reason="its list has two digests of it") for name in twice]
    if failed:
        gate = [_gate(group)] if any(one.is_refused for one in failed) and group.gated else []
        raise Failed("\n".join([*_some([f"{folder / one.name}: {one.reason}" for one in failed]), *gate]))
    return f"{name}: {len(wanted)} {'file is' if len(wanted) == 1 else 'files are'} in {folder}"


def _some(lines: Sequence[str], most: int = MOST_SHOWN) -> list[str]:
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def _gate(group: Group) -> str:
    return f"Gated: accept its terms at {group.gated}, and set HF_TOKEN to a token of that account."


def fetch(names: Sequence[str], manifest: dict[str, Group], config: DownloadsConfig) -> int:
    """Fetch these groups, one after the other; one that fails does not hold up the next."""
    failed = []
    for name in names:
        try:
            print(fetch_group(name, manifest[name], config), flush=True)
        except Failed as error:
            failed.append(name)
            log.error("\n".join(f"{name}: {line.rstrip('.')}." for line in str(error).splitlines()))
            print(f"{name}: not complete", flush=True)
    if failed:
        log.error(f"Not complete: {', '.join(failed)}. {GO_ON}.")
    return 1 if failed else 0


# ---------------------------------------------------------------------------------------------------------------------
# The list
# ---------------------------------------------------------------------------------------------------------------------


def show(names: Sequence[str], manifest: dict[str, Group], config: DownloadsConfig, *, in_full: bool) -> int:
    """Print what is there of these groups; nobody is asked. Returns 1 if a file is not what it should be, else 0.

    Args:
        in_full: also the files, and the contents of the hub's cache.
    """
    is_wrong, width = False, max(map(len, names))
    for name in names:
        group, wrong = manifest[name], False
        lines: list[str] = []
        if group.kind == "groups":
            state = f"stands for {', '.join(group.groups)}"
        elif group.kind == "model":
            missing = hub_files.missing_of_model(group) if in_full else []
            state = f"{' and '.join(missing)}: not all is" if missing else "all is"
            if not in_full:
                state = "is begun or there" if hub_files.is_begun(group) else "nothing is"
            state = f"{group.model}: {state} in the hub's cache {hub_files.hub.cache()}"
        else:
            state, lines, wrong = _look(group, config, in_full)
        lines += [_gate(group)] if in_full and group.gated else []
        lines += [f"source: {group.source}"] if in_full and group.source else []
        print("\n".join([f"{name:{width}}  {state}; {group.about}", *(f"{'':{width}}    {line}" for line in lines)]))
        is_wrong |= wrong
    return 1 if is_wrong else 0


def _look(group: Group, config: DownloadsConfig, in_full: bool) -> tuple[str, list[str], bool]:
    """Return a line on a group's files, lines on each, and whether one is wrong. Raises Refused: one cannot be read."""
    folder, about = Path(config.to, str(group.folder)), f", about {group.about_gb:,g} GB" if group.about_gb else ""
    wanted, memory = known_files(group, folder, config), Memory(folder)
    if not wanted:
        what = {"data_set": "data set", "uri": "list"}.get(group.kind, f"file like {config.only}")
        return f"{folder}: its {what} was not fetched yet{about}", [], False
    try:
        seen = [(one, memory.look(one, again=config.verify)) for one in wanted]
    except OSError as error:
        raise Refused(f"to: {folder} cannot be read: {error}. Check its permissions.") from error
    order = ("wrong", "missing", "unread", "there")
    seen.sort(key=lambda entry: order.index(entry[1].state))
    there = [one.name for one, found in seen if found.state in ("there", "unread")]
    num_wrong = sum(found.state == "wrong" for _, found in seen)
    gib = sum((folder / name).stat().st_size for name in there) / 2**30
    damaged = f", {num_wrong} wrong" if num_wrong else ""
    lines = []
    for one, found in seen if in_full else seen[:num_wrong]:
        size = "size not known" if one.bytes is None else f"{one.bytes:,} bytes"
        bare = "" if one.digest or "digest" in found.text else ", digest not published"
        lines.append(f"{one.name}: {found.text}, {size}{bare}")
    state = f"{folder}: {len(there)} of {len(wanted)} files, {gib:,.3g} GiB{damaged}{about}"
    return state, _some(lines), bool(num_wrong)


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    words, config, problems = read_words(argv, DownloadsConfig, check)
    if config is None:
        return 0
    is_list, names = words[:1] == [LIST], [word for word in words if word != LIST]
    if not words:
        problems.append("command line: a GROUP has to be given, or list. python -m prepare.downloads list shows them.")
    if config.verify and not is_list:
        problems.append("verify: is of list alone, since what is fetched is compared. Leave it out.")
    if not problems:  # with some, the keys are the default ones
        try:
            manifest = read_manifest(Path(config.manifest) if config.manifest else MANIFEST)
            chosen = choose(names, manifest) if names else list(manifest)
        except ConfigError as error:
            problems += error.problems
    if not is_list and (text := unwritable(config.to)):
        problems.append(f"to: {shown(text, 500)}")
    if problems:
        raise ConfigError(problems)
    if is_list:
        return show(chosen, manifest, config, in_full=bool(names))
    try:
        return fetch(chosen, manifest, config)
    except OSError as error:
        raise Failed(
            f"to: {config.to} cannot be written: {error}. What has come stays; make room, and start again."
        ) from error


if __name__ == "__main__":
    start(main)
