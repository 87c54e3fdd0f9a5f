"""Download what others publish: weights, prompts, statistics, data sets; each file compared with its digest.

    python -m prepare.downloads list                              # what there is, and what of it is here
    python -m prepare.downloads list moments verify=true          # read every file of a group again
    python -m prepare.downloads sd2 inception clip prompts statistics
    python -m prepare.downloads moments to=/data at_once=8        # 831 GB; the same command resumes
    python -m prepare.downloads moments to=/data only='0000?.tar' # ten of the 832
    python -m prepare.downloads zoo                               # what AMD's benchmark fetches (make download_assets)

A GROUP is one of the manifest, prepare/downloads.yaml, which says where each size and digest is from. Its files go to the
folder that the recipes in yamls/ name, in `to`: checkpoints/sd, datasets/coco2014, ... Models of the zoo go into the Hugging
Face Hub's cache, from where runs take them by name. Of the hub, its own library fetches and compares.

A file gets its name when it is whole and its digest is right (prepare/transfer.py). Where no digest is published, its size
alone is compared. A file that is there with the right size is left as it is.
What is gated says so: accept its terms on the page that is named, and set HF_TOKEN.
Exit code: 0 if all is there, 1 if something is not available or is damaged, 2 if it could not start.
"""

from __future__ import annotations

import fnmatch
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cli.command import command, start
from cli.errors import ConfigError, Failed, Refused
from cli.files import write_whole
from cli.limits import limited, shown
from cli.log import log
from preflight.limits import unwritable
from prepare.manifest import MANIFEST, Group, choose, list_urls, read_list, read_manifest
from prepare.transfer import GO_ON, Wanted, fetch_all
from prepare.words import read_words
from weights import hub
from weights.hub_names import cache
from zoo import load_family
from zoo.encoders import need_of_denoiser, need_of_encoders

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
    manifest: str | None = None
    """Another manifest, a YAML file. null: prepare/downloads.yaml."""
    tries: int = limited(5, 1, 1000)
    """Tries of an address that bring nothing, one after the other."""


# --- a group's files ---


def files_of(group: Group, folder: Path, config: DownloadsConfig, *, ask: bool) -> list[Wanted]:
    """Return a group's files that `only` leaves.

    Args:
        ask: fetch a group's list, and keep it in its folder. False: use the one that was kept; without it there are no files.

    Raises:
        Failed: the list is not available, or is none.
    """
    files = group.wanted()
    if group.uri:
        kept = folder / Path(group.uri).with_suffix(".md5").name
        if not ask and not kept.is_file():
            return []
        base, text = _fetch_list(group, config) if ask else ("http://-", kept.read_text(errors="replace"))
        try:
            files = read_list(base, text, list_urls(group, ".md5")[0])
        except ValueError as error:
            raise Failed(f"{error}. Look at that address") from error
        if ask:
            folder.mkdir(parents=True, exist_ok=True)
            write_whole(kept, text)
    return [one for one in files if fnmatch.fnmatch(one.name, config.only or "*")]


def _fetch_list(group: Group, config: DownloadsConfig) -> list[str]:
    """Return the texts of a list's .uri and .md5. Raises Failed."""
    names = ".uri", ".md5"
    with tempfile.TemporaryDirectory() as scratch:
        wanted = [Wanted(name, list_urls(group, name)) for name in names]
        if failed := fetch_all(wanted, Path(scratch), tries=config.tries, most_bytes=MAX_LIST_BYTES):
            raise Failed(f"its list is not available: {'; '.join(failed.values())}")
        return [Path(scratch, name).read_text(errors="replace") for name in names]


def needs_of(group: Group) -> dict[str, tuple[str, hub.Need]]:
    """Return what a group takes of its model: key -> (name, files), for the encoders and for the denoiser."""
    assert group.model and group.family and group.variant
    family = load_family(group.family, "full", group.variant)
    needs = {"model.weights": need_of_encoders(family), "model.denoiser": need_of_denoiser(family)}
    return {key: (group.model, need) for key, need in needs.items()}


# --- fetching ---


def fetch_group(name: str, group: Group, config: DownloadsConfig) -> str:
    """Fetch what is missing of a group, and return where it is.

    Raises:
        Failed: some of it is not available; a line each.
        Refused: see `fetch_all`, and of the hub.
        OSError: its folder cannot be written.
    """
    if group.model:
        hub.fetch_all(needs_of(group))
        return f"{group.model} is in {cache()}"
    folder = Path(config.to, str(group.folder))
    if group.data_set:
        return f"{hub.fetch_data_set(group.data_set, group.revision, folder, config.at_once)} files are in {folder}"
    wanted = files_of(group, folder, config, ask=True)
    if not wanted:
        raise Failed(f"has no file like {config.only}. Give another pattern")
    if bare := [one.name for one in wanted if not one.digest]:
        log.info(f"{name}: {', '.join(_some(bare, 3))}: digest not published, the size alone is compared.")
    about_bytes = int(1e9 * group.about_gb) if group.about_gb and config.only is None else 0
    failed = fetch_all(wanted, folder, config.at_once, config.tries, about_bytes=about_bytes)
    if failed:
        raise Failed("\n".join([*_some([f"{folder / one}: {why}" for one, why in failed.items()]), *_gate(group)]))
    return f"{len(wanted)} files are in {folder}"


def _some(lines: Sequence[str], most: int = MOST_SHOWN) -> list[str]:
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def _gate(group: Group) -> list[str]:
    return [f"Gated: accept its terms at {group.gated}, and set HF_TOKEN to a token of that account."] * bool(
        group.gated
    )


def fetch(names: Sequence[str], manifest: dict[str, Group], config: DownloadsConfig) -> int:
    """Fetch these groups, one after the other; one that fails does not hold up the next."""
    failed = []
    for name in names:
        try:
            print(f"{name}: {fetch_group(name, manifest[name], config)}", flush=True)
        except (Failed, hub.Refused) as error:
            failed.append(name)
            log.error("\n".join(f"{name}: {line.rstrip('.')}." for line in str(error).splitlines()))
    if failed:
        log.error(f"Not complete: {', '.join(failed)}. {GO_ON}.")
    return 1 if failed else 0


# --- the list ---


def show(names: Sequence[str], manifest: dict[str, Group], config: DownloadsConfig, *, in_full: bool) -> int:
    """Print what is there of these groups; nobody is asked. Returns 1 if a file is not what it should be, else 0.

    Args:
        in_full: also the files, and the contents of the hub's cache.
    """
    is_wrong, width = False, max(map(len, names))
    for name in names:
        group, lines = manifest[name], []
        folder = Path(config.to, str(group.folder))
        if group.groups:
            state = f"stands for {', '.join(group.groups)}"
        elif group.model and in_full:
            missing = [key for key, (text, need) in needs_of(group).items() if hub.in_cache(text, need) is None]
            state = (
                f"{' and '.join(missing)}: not all is in the hub's cache" if missing else "all is in the hub's cache"
            )
        elif group.model or group.data_set:
            path = folder if group.data_set else cache() / f"models--{str(group.model).replace('/', '--')}"
            state = f"{path}: {'begun or there' if path.is_dir() else 'not here'}"
        else:
            state, lines, wrong = _look(group, folder, config)
            is_wrong |= wrong
        about = f", about {group.about_gb:,g} GB" if group.about_gb else ""
        lines = [*(lines if in_full else []), *_gate(group), *([f"source: {group.source}"] if group.source else [])]
        print(f"{name:{width}}  {state}{about}; {group.about}")
        print("".join(f"{'':{width}}    {line}\n" for line in lines if in_full), end="")
    return 1 if is_wrong else 0


def _look(group: Group, folder: Path, config: DownloadsConfig) -> tuple[str, list[str], bool]:
    """Return a line on a group's files, lines on each, and whether one is wrong. Raises Refused: one cannot be read."""
    wanted = files_of(group, folder, config, ask=False)
    try:
        faults = {one.name: one.fault_of(folder / one.name, read=config.verify) for one in wanted}
    except OSError as error:
        raise Refused(f"to: {folder} cannot be read: {error}. Check its permissions.") from error
    num_wrong = sum(fault not in (None, "missing") for fault in faults.values())
    num_there = sum(fault is None for fault in faults.values())
    lines = _some([f"{name}: {fault or 'there'}" for name, fault in faults.items()], 1000)
    state = f"{folder}: {num_there} of {len(wanted) or 'an unknown number of'} files, {num_wrong} wrong"
    return state, lines, num_wrong > 0


@command(__doc__)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    words, config, problems = read_words(argv, DownloadsConfig)
    if config is None:
        return 0
    is_list, names = words[:1] == [LIST], [word for word in words if word != LIST]
    if not words:
        problems.append("command line: a GROUP has to be given, or list. python -m prepare.downloads list shows them.")
    if config.verify and not is_list:
        problems.append("verify: is of list alone, since what is fetched is compared. Leave it out.")
    if not is_list and (text := unwritable(config.to)):
        problems.append(f"to: {shown(text, 500)}")
    if problems:
        raise ConfigError(problems)
    manifest = read_manifest(Path(config.manifest) if config.manifest else MANIFEST)
    chosen = choose(names, manifest) if names else list(manifest)
    if is_list:
        return show(chosen, manifest, config, in_full=bool(names))
    try:
        return fetch(chosen, manifest, config)
    except OSError as error:
        raise Failed(f"to: {config.to} cannot be written: {error}. {GO_ON}.") from error


if __name__ == "__main__":
    start(main)
