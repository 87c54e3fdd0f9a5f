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

import fnmatch
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

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
from prepare.wanted import Memory, Seen, Wanted, is_address
from prepare.words import read_words

LIST = "list"
MOST_SHOWN = 40
MAX_LIST_BYTES = 2**26
GIB = 2**30


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
    """Return a group's files, asking for its list where it has one; that is kept in the folder.

    Returns:
        the files, and the names of those of which the list has two digests.

    Raises:
        Failed: the list cannot be had, or is none.
        OSError: it cannot be written.
    """
    if group.kind == "files":
        return _only(wanted_of(group, config.mirror), config), []
    base = read_text(list_urls(group, ".uri", config.mirror), config)
    md5 = read_text(list_urls(group, ".md5", config.mirror), config)
    try:
        listed, twice = read_list(md5, read_address(base, str(group.uri)), list_urls(group, ".md5")[0])
    except ValueError as error:
        raise Failed(f"{error}. Look at that address") from error
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(folder / Path(list_urls(group, ".md5")[0]).name, md5)
    twice = [name for name in twice if _is_chosen(name, config)]
    return _only([with_mirror(one, group, config.mirror) for one in listed], config), twice


def read_text(urls: tuple[str, ...], config: DownloadsConfig) -> str:
    """Return a small text from the first address that gives it. Raises Failed: none does."""
    with tempfile.TemporaryDirectory() as folder:
        ways = dict(timeout_sec=config.timeout_sec, tries=config.tries, most_bytes=MAX_LIST_BYTES)
        [outcome] = fetch_all([Wanted("list", urls)], Path(folder), is_quiet=True, **ways)
        if outcome.reason:
            raise Failed(f"its list cannot be had: {outcome.reason}")
        try:
            return Path(folder, "list").read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise Failed(f"its list, {urls[0]}, is no text") from error


def known_files(group: Group, folder: Path, config: DownloadsConfig) -> list[Wanted] | None:
    """Return a group's files without asking anybody; None: its list was not fetched yet, or is damaged."""
    if group.kind == "files":
        return _only(wanted_of(group), config)
    if group.kind == "data_set":
        return _only(Memory(folder).wanted(), config) or None
    path = folder / Path(list_urls(group, ".md5")[0]).name
    try:
        return _only(read_list(path.read_text(), "https://-", str(path))[0], config)
    except (OSError, ValueError):
        return None


def _only(wanted: Sequence[Wanted], config: DownloadsConfig) -> list[Wanted]:
    return [one for one in wanted if _is_chosen(one.name, config)]


def _is_chosen(name: str, config: DownloadsConfig) -> bool:
    return config.only is None or fnmatch.fnmatch(name, config.only)


# ---------------------------------------------------------------------------------------------------------------------
# Fetching
# ---------------------------------------------------------------------------------------------------------------------


def fetch_group(name: str, group: Group, config: DownloadsConfig) -> str:
    """Fetch what is missing of a group, and return a line that says where it is.

    Raises:
        Failed: some of it cannot be had; a line each.
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
    if not all(one.digest for one in wanted):
        log.info(f"{name}: {_not_published(wanted)}.")
    ways = dict(timeout_sec=config.timeout_sec, tries=config.tries)
    outcomes = fetch_all(wanted, folder, config.at_once, about_bytes=_about_bytes(group, config), **ways)
    outcomes += [Outcome(name, reason="its list has two digests of it") for name in twice]
    if failed := [one for one in outcomes if one.reason]:
        listed = [f"{folder / one.name}: {one.reason}" for one in failed[:MOST_SHOWN]]
        more = [f"and {len(failed) - MOST_SHOWN} more"] if len(failed) > MOST_SHOWN else []
        gate = [_gate(group)] if any(one.is_refused for one in failed) and group.gated else []
        raise Failed("\n".join([*listed, *more, *gate]))
    return f"{name}: {len(wanted)} {_files(wanted)} in {folder}"


def _files(wanted: Sequence[Wanted]) -> str:
    return "file is" if len(wanted) == 1 else "files are"


def _not_published(wanted: Sequence[Wanted]) -> str:
    """Say of which files no digest is published, and what is compared of them."""
    bare = [one for one in wanted if not one.digest]
    which = bare[0].name if len(bare) == 1 else f"{len(bare)} files"
    has_size = all(one.bytes is not None for one in bare)
    compared = "size alone is compared" if has_size else "nor is its size: what the server says is taken"
    return f"{which}: digest not published, {compared}"


def _about_bytes(group: Group, config: DownloadsConfig) -> int:
    return int(1e9 * group.about_gb) if group.about_gb and config.only is None else 0


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
        in_full: also the files, and what the hub's cache has.
    """
    is_wrong, width = False, max(map(len, names))
    for name in names:
        group = manifest[name]
        if group.kind == "groups":
            line, files, wrong = f"stands for {', '.join(group.groups)}", [], False
        elif group.kind == "model":
            line, files, wrong = _model_line(group, in_full), [], False
        else:
            line, files, wrong = _seen_of(group, config, in_full)
        print(f"{name:{width}}  {line}; {group.about}", flush=True)
        for text in files:
            print(f"{'':{width}}    {text}", flush=True)
        is_wrong |= wrong
        if in_full and group.gated:
            print(f"{'':{width}}    {_gate(group)}")
        if in_full and group.source:
            print(f"{'':{width}}    source: {group.source}")
    return 1 if is_wrong else 0


def _model_line(group: Group, in_full: bool) -> str:
    where = f"{hub_files.hub.cache()}"
    if not in_full:
        state = "is begun or there" if hub_files.is_begun(group) else "nothing is"
        return f"{group.model}: {state} in the hub's cache {where}"
    missing = hub_files.missing_of_model(group)
    state = "all is" if not missing else f"{' and '.join(missing)}: not all is"
    return f"{group.model}: {state} in the hub's cache {where}"


def _seen_of(group: Group, config: DownloadsConfig, in_full: bool) -> tuple[str, list[str], bool]:
    """Return a line on a group with files, lines on them, and whether one is wrong. Raises Refused: one cannot be read."""
    folder = Path(config.to, str(group.folder))
    wanted = known_files(group, folder, config)
    about = f", about {group.about_gb:,g} GB" if group.about_gb else ""
    if wanted is None:
        what = "data set" if group.kind == "data_set" else "list"
        return f"{folder}: its {what} was not fetched yet{about}", [], False
    memory = Memory(folder)
    try:
        seen = {one.name: memory.look(one, again=config.verify) for one in wanted}
    except OSError as error:
        raise Refused(f"to: {folder} cannot be read: {error}. Check its permissions.") from error
    there = [name for name, one in seen.items() if one.state in ("there", "unread")]
    num_bytes = sum((folder / name).stat().st_size for name in there)
    wrong = [name for name, one in seen.items() if one.state == "wrong"]
    damaged = f", {len(wrong)} wrong" if wrong else ""
    line = f"{folder}: {len(there)} of {len(wanted)} files, {num_bytes / GIB:,.3g} GiB{damaged}{about}"
    return line, _lines_of(wanted, seen, in_full), bool(wrong)


def _lines_of(wanted: Sequence[Wanted], seen: dict[str, Seen], in_full: bool) -> list[str]:
    """Return a line for each file: those that are wrong first, then the missing ones; of many files some."""
    order = ("wrong", "missing", "unread", "there")
    by_state = sorted(wanted, key=lambda one: order.index(seen[one.name].state))
    listed = by_state if in_full else [one for one in wanted if seen[one.name].state == "wrong"]
    lines = []
    for one in listed[:MOST_SHOWN]:
        size = "size not known" if one.bytes is None else f"{one.bytes:,} bytes"
        bare = "" if one.digest or "digest" in seen[one.name].text else ", digest not published"
        lines.append(f"{one.name}: {seen[one.name].text}, {size}{bare}")
    return lines + ([f"and {len(listed) - MOST_SHOWN} more"] if len(listed) > MOST_SHOWN else [])


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
