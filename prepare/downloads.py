"""Download what others publish: weights, prompts, statistics, datasets; each file compared with its digest.

    python -m prepare.downloads list                              # what is available, and what is here
    python -m prepare.downloads list moments verify=true          # read every file of a group again
    python -m prepare.downloads sd2 inception clip prompts statistics
    python -m prepare.downloads moments to=/data at_once=8        # 831 GB; the same command resumes
    python -m prepare.downloads moments to=/data only='0000?.tar' # ten of the 832
    python -m prepare.downloads zoo                               # what AMD's benchmark fetches (make download_assets)

A GROUP is one of the manifest, prepare/downloads.yaml, which says where each size and digest is from. Its files go to the
folder that the recipes in yamls/ name, in `to`: checkpoints/sd, datasets/coco2014, ... Models of the zoo go into the Hugging
Face Hub's cache, from where runs take them by name. Of the hub, its own library fetches and compares.

A file gets its name when it is whole and its digest is right (prepare/http_download.py). Where no digest is published, only
its size is compared. A file that is there with the right size is left as it is.
For gated files accept the terms on the page that is named, and set HF_TOKEN.
MLCommons publishes a set of files as two small ones: NAME.uri has the address of a folder; NAME.md5 next to it has a line
for each file in that folder, its MD5 and its name. Source: mlcommons/r2-downloader, mlc-r2-downloader.sh.

Exit code: 0 if all is there, 1 if something is not available or is damaged, 2 if it could not start.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from omegaconf import OmegaConf

from common.command import command, start
from common.errors import ConfigError, Failed, Refused
from common.files import write_problem
from common.log import log
from common.value_types import limited, truncate
from families import load_family
from families.encoders import list_denoiser_files, list_encoder_files
from prepare.arguments import RESUME_HINT, parse_arguments
from prepare.http_download import MISSING, FileToFetch, check_files, fetch_all, is_http_url
from weights import hub
from weights.files import WeightsError
from weights.hub_names import HubName, cache

MANIFEST = Path(__file__).with_name("downloads.yaml")
LISTS_COPY = "https://raw.githubusercontent.com/mlcommons/r2-infra/main/training/metadata"
LIST_LINE = re.compile(r"([0-9a-f]{32})\s+\*?(?:\./)?(\S.*)")
KINDS = "files", "uri", "model", "data_set", "groups"
LIST = "list"
LISTS_FOLDER = ".list"  # folder of a list of MLCommons' in its group's
MAX_LINES = 40
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


# --- the manifest ---


@dataclass
class Entry:
    """A file of the manifest, or `count` of them whose names and addresses have {number:05d} in them."""

    name: str
    urls: list[str]
    bytes: int | None = None
    digest: str | None = None
    count: int | None = None


@dataclass
class DownloadGroup:
    """A group of the manifest: files, a list of MLCommons', a model or a dataset of the hub, or other groups.

    about: what it is; source: where its facts are from; about_gb: its size as it is published, 10**9 bytes.
    folder: of its files, in the folder that the user gives.
    uri: address of a list.
    model, family, variant: a name on the hub, and whose weights are taken of it.
    data_set, revision: a name on the hub.
    gated: the page where its terms are accepted; token: the variable with a token, where a file is at the hub.
    """

    about: str
    source: str | None = None
    folder: str | None = None
    about_gb: float | None = None
    files: list[Entry] = field(default_factory=list)
    uri: str | None = None
    model: str | None = None
    family: str | None = None
    variant: str | None = None
    data_set: str | None = None
    revision: str | None = None
    gated: str | None = None
    token: str | None = None
    groups: list[str] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """One of KINDS."""
        return next((name for name in KINDS if getattr(self, name)), "nothing")

    def wanted(self) -> list[FileToFetch]:
        """Return the files of a group of files."""
        files = []
        for entry in self.files:
            for number in range(entry.count or 1):
                name, *urls = (
                    text.format(number=number) if entry.count else text for text in (entry.name, *entry.urls)
                )
                files.append(FileToFetch(name, tuple(urls), entry.bytes, entry.digest, self.token))
        return files


def read_manifest(path: Path = MANIFEST) -> dict[str, DownloadGroup]:
    """Return the groups of a manifest by name. Raises ConfigError: what is wrong with it."""
    where, groups = str(path), {}
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for name, entry in content.items():
            where = f"{path}: {name}"
            group: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(DownloadGroup), entry))
            parts = PurePosixPath(group.folder or "").parts
            if group.kind == "nothing":
                raise ValueError(f"has {group.kind}. Give one of {', '.join(KINDS)}")
            if "/" in parts or ".." in parts:
                raise ValueError(f"has the folder '{group.folder}', which leads out of `to`. Give a relative one")
            if unknown := [member for member in group.groups if member not in content]:
                raise ValueError(f"names no group: {', '.join(unknown)}")
            check_files(group.wanted())
            groups[str(name)] = group
    except Exception as error:  # of the disk, of yaml, of OmegaConf
        text = truncate((getattr(error, "strerror", None) or str(error)).splitlines()[0], 200).removesuffix(".")
        raise ConfigError([f"manifest: {where}: {text}. Give a YAML file as {MANIFEST.name}."]) from error
    return groups


def choose_groups(names: Sequence[str], manifest: dict[str, DownloadGroup]) -> list[str]:
    """Return the groups of these names, with those that a group of groups stands for, each once.

    Raises:
        ConfigError: there is no such group.
    """
    chosen: list[str] = []
    for name in names:
        if name not in manifest:
            near = difflib.get_close_matches(name, manifest, n=1)
            nearest = f" Nearest: {near[0]}." if near else ""
            raise ConfigError([f"GROUP: there is no {truncate(name)}.{nearest} Possible: {', '.join(manifest)}."])
        chosen += manifest[name].groups or [name]
    return list(dict.fromkeys(chosen))


def list_urls(group: DownloadGroup, suffix: str) -> tuple[str, ...]:
    """Return the addresses of a list: `.uri`, or the `.md5` next to it."""
    assert group.uri is not None
    folder, _, name = group.uri.rpartition("/")
    name = f"{name.removesuffix('.uri')}{suffix}"
    return f"{folder}/{name}", f"{LISTS_COPY}/{name}"


def read_list(address: str, text: str, where: str) -> list[FileToFetch]:
    """Return the files of a list of MLCommons'.

    Args:
        address: content of its .uri.
        text: content of its .md5, a digest and a name a line.
        where: its address, for messages.

    Raises:
        ValueError: it is no such list, has two digests of a file, or a name that leads out of the folder.
    """
    base = address.strip().rstrip("/")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    pairs = [match.groups() for line in dict.fromkeys(lines) if (match := LIST_LINE.fullmatch(line))]
    if not is_http_url(base) or not lines or len(pairs) < len(set(lines)):
        raise ValueError(f"{where} is no list of MLCommons', but begins {truncate(f'{base} {text}', 60)!r}")
    files = [FileToFetch(name, (f"{base}/{quote(name)}",), None, f"md5:{md5}") for md5, name in pairs]
    try:
        check_files(files)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).splitlines()[0].removesuffix('.')}") from error
    return sorted(files, key=lambda file: file.name)


# --- a group's files ---


def fetch_list(group: DownloadGroup, folder: Path, config: DownloadsConfig) -> None:
    """Fetch the two texts of a group's list into its folder. Raises Failed: they are not available."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # it may have changed since the last one
        wanted = [FileToFetch(suffix, list_urls(group, suffix)) for suffix in (".uri", ".md5")]
        if failed := fetch_all(wanted, Path(scratch), tries=config.tries, most_bytes=MAX_LIST_BYTES):
            raise Failed(f"its list is not available: {'; '.join(failed.values())}")
        (folder / LISTS_FOLDER).mkdir(exist_ok=True)
        for file in wanted:
            Path(scratch, file.name).replace(folder / LISTS_FOLDER / file.name)


def list_group_files(group: DownloadGroup, folder: Path, config: DownloadsConfig) -> list[FileToFetch]:
    """Return a group's files that `only` leaves; none, if its list was not fetched yet. Raises Failed: it is no list."""
    files = group.wanted()
    if group.uri and (folder / LISTS_FOLDER / ".md5").is_file():  # it is moved there last
        uri, md5 = ((folder / LISTS_FOLDER / suffix).read_text(errors="replace") for suffix in (".uri", ".md5"))
        try:
            files = read_list(uri, md5, list_urls(group, ".md5")[0])
        except ValueError as error:
            raise Failed(f"{error}. Look at that address") from error
    return [file for file in files if fnmatch.fnmatch(file.name, config.only or "*")]


def model_needs(group: DownloadGroup) -> dict[str, tuple[str, hub.RequiredFiles]]:
    """Return what a group takes of its model: key -> (name, files), for the encoders and for the denoiser."""
    assert group.model and group.family and group.variant
    family = load_family(group.family, "full", group.variant)
    needs = {"model.weights": list_encoder_files(family), "model.denoiser": list_denoiser_files(family)}
    return {key: (group.model, need) for key, need in needs.items()}


# --- fetching ---


def fetch_group(name: str, group: DownloadGroup, config: DownloadsConfig) -> str:
    """Fetch what is missing of a group, and return its path.

    Raises:
        Failed: some of it is not available; a line each.
        Refused: see `fetch_all`. WeightsError: a model or dataset of the hub is not available.
        OSError: its folder cannot be written.
    """
    if group.model:
        hub.fetch_all(model_needs(group))
        return f"{group.model} is in {cache()}"
    folder = Path(config.to, str(group.folder))
    if group.data_set:
        return f"{hub.fetch_dataset(group.data_set, group.revision, folder, config.at_once)} files are in {folder}"
    if group.uri:
        fetch_list(group, folder, config)
    wanted = list_group_files(group, folder, config)
    if not wanted:
        raise Failed(f"has no file like {config.only}. Give another pattern")
    if bare := [file.name for file in wanted if not file.digest]:
        log.info(f"{name}: {', '.join(_truncate_lines(bare, 3))}: digest not published, the size alone is compared.")
    about_bytes = int(1e9 * group.about_gb) if group.about_gb and config.only is None else 0
    failed = fetch_all(wanted, folder, config.at_once, config.tries, about_bytes=about_bytes)
    if failed:
        raise Failed(
            "\n".join(
                [
                    *_truncate_lines([f"{folder / file_name}: {why}" for file_name, why in failed.items()]),
                    *_gate_hint(group),
                ]
            )
        )
    return f"{len(wanted)} files are in {folder}"


def _truncate_lines(lines: Sequence[str], most: int = MAX_LINES) -> list[str]:
    return [*lines[:most], *([f"and {len(lines) - most} more"] if len(lines) > most else [])]


def _gate_hint(group: DownloadGroup) -> list[str]:
    return [f"Gated: accept its terms at {group.gated}, and set HF_TOKEN to a token of that account."] * bool(
        group.gated
    )


def fetch_groups(names: Sequence[str], manifest: dict[str, DownloadGroup], config: DownloadsConfig) -> int:
    """Fetch these groups, one after the other; one that fails does not hold up the next."""
    failed = []
    for name in names:
        try:
            print(f"{name}: {fetch_group(name, manifest[name], config)}", flush=True)
        except (Failed, WeightsError) as error:
            failed.append(name)
            log.error("\n".join(f"{name}: {line.rstrip('.')}." for line in str(error).splitlines()))
    if failed:
        log.error(f"Not complete: {', '.join(failed)}. {RESUME_HINT}.")
    return 1 if failed else 0


# --- the list ---


def print_groups(
    names: Sequence[str], manifest: dict[str, DownloadGroup], config: DownloadsConfig, *, in_full: bool
) -> int:
    """Print which files of these groups are here; no host is asked. Returns 1 if a file is not what it should be, else 0.

    Args:
        in_full: also the files, and the contents of the hub's cache.
    """
    is_wrong, width = False, max(map(len, names))
    for name in names:
        group, faults = manifest[name], {}
        folder = Path(config.to, str(group.folder))
        if group.groups:
            state = f"stands for {', '.join(group.groups)}"
        elif group.model and in_full:
            missing = [
                key for key, (text, need) in model_needs(group).items() if hub.resolve_in_cache(text, need) is None
            ]
            state = (
                f"{' and '.join(missing)}: not all is in the hub's cache" if missing else "all is in the hub's cache"
            )
        elif group.model or group.data_set:
            path = folder if group.data_set else HubName(str(group.model)).repo_folder
            state = f"{path}: {'begun or there' if path.is_dir() else 'not here'}"
        else:
            try:
                wanted = list_group_files(group, folder, config)
                faults = {file.name: file.find_fault(folder / file.name, read=config.verify) for file in wanted}
            except OSError as error:
                raise Refused(f"to: {folder} cannot be read: {error}. Check its permissions.") from error
            num_there, num_missing = (sum(fault == what for fault in faults.values()) for what in (None, MISSING))
            num_wrong = len(faults) - num_there - num_missing
            is_wrong |= num_wrong > 0
            state = f"{folder}: {num_there} of {len(faults) or 'an unknown number of'} files, {num_wrong} wrong"
        about = f", about {group.about_gb:,g} GB" if group.about_gb else ""
        print(f"{name:{width}}  {state}{about}; {group.about}")
        lines = [f"{file}: {fault or 'there'}" for file, fault in faults.items()]
        lines += [*_gate_hint(group), *([f"source: {group.source}"] if group.source else [])]
        print("".join(f"{'':{width}}    {line}\n" for line in lines if in_full), end="")
    return 1 if is_wrong else 0


@command(keys=DownloadsConfig)
def main(argv: Sequence[str]) -> int:
    """Run the command; see the head of this file."""
    words, config, problems = parse_arguments(argv, DownloadsConfig)
    if config is None:
        return 0
    is_list, names = words[:1] == [LIST], [word for word in words if word != LIST]
    if not words:
        problems.append("command line: a GROUP has to be given, or list. python -m prepare.downloads list shows them.")
    if config.verify and not is_list:
        problems.append("verify: works only with list; downloads are always verified. Leave it out.")
    if not is_list and (text := write_problem(config.to)):
        problems.append(f"to: {truncate(text, 500)}")
    if problems:
        raise ConfigError(problems)
    manifest = read_manifest(Path(config.manifest) if config.manifest else MANIFEST)
    chosen = choose_groups(names, manifest) if names else list(manifest)
    if is_list:
        return print_groups(chosen, manifest, config, in_full=bool(names))
    try:
        return fetch_groups(chosen, manifest, config)
    except OSError as error:
        raise Failed(f"to: {config.to} cannot be written: {error}. {RESUME_HINT}.") from error


if __name__ == "__main__":
    start(main)
