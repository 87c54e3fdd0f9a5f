"""The manifest of what can be downloaded, prepare/downloads.yaml: groups of files with their addresses, sizes and digests.

MLCommons publishes a set of files as two small ones: NAME.uri has the address of a folder; NAME.md5 next to it has a line
for each file in that folder, its MD5 and its name. Source: mlcommons/r2-downloader, mlc-r2-downloader.sh.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from omegaconf import OmegaConf

from cli.errors import ConfigError
from cli.limits import shown
from prepare.transfer import Wanted, check_wanted, is_address

MANIFEST = Path(__file__).with_name("downloads.yaml")
LISTS_COPY = "https://raw.githubusercontent.com/mlcommons/r2-infra/main/training/metadata"
LINE = re.compile(r"([0-9a-f]{32})\s+\*?(?:\./)?(\S.*)")
KINDS = "files", "uri", "model", "data_set", "groups"


@dataclass
class Entry:
    """A file of the manifest, or `count` of them whose names and addresses have {number:05d} in them."""

    name: str
    urls: list[str]
    bytes: int | None = None
    digest: str | None = None
    count: int | None = None


@dataclass
class Group:
    """A group of the manifest: files, a list of MLCommons', a model or a data set of the hub, or other groups.

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

    def wanted(self) -> list[Wanted]:
        """Return the files of a group of files."""
        found = []
        for entry in self.files:
            for number in range(entry.count or 1):
                name, *urls = (
                    text.format(number=number) if entry.count else text for text in (entry.name, *entry.urls)
                )
                found.append(Wanted(name, tuple(urls), entry.bytes, entry.digest, self.token))
        return found


def read_manifest(path: Path = MANIFEST) -> dict[str, Group]:
    """Return the groups of a manifest by name. Raises ConfigError: what is wrong with it."""
    where, groups = str(path), {}
    try:
        content: Any = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        for name, given in content.items():
            where = f"{path}: {name}"
            group: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Group), given))
            parts = PurePosixPath(group.folder or "").parts
            if group.kind == "nothing" or "/" in parts or ".." in parts:
                raise ValueError(f"has {group.kind}. Give one of {', '.join(KINDS)}, and a relative folder")
            if unknown := [one for one in group.groups if one not in content]:
                raise ValueError(f"names no group: {', '.join(unknown)}")
            check_wanted(group.wanted())
            groups[str(name)] = group
    except Exception as error:  # of the disk, of yaml, of OmegaConf
        text = shown((getattr(error, "strerror", None) or str(error)).splitlines()[0], 200).removesuffix(".")
        raise ConfigError([f"manifest: {where}: {text}. Give a YAML file as {MANIFEST.name}."]) from error
    return groups


def choose(names: Sequence[str], manifest: dict[str, Group]) -> list[str]:
    """Return the groups of these names, with those that a group of groups stands for, each once.

    Raises:
        ConfigError: there is no such group.
    """
    chosen: list[str] = []
    for name in names:
        if name not in manifest:
            near = difflib.get_close_matches(name, manifest, n=1)
            nearest = f" Nearest: {near[0]}." if near else ""
            raise ConfigError([f"GROUP: there is no {shown(name)}.{nearest} Possible: {', '.join(manifest)}."])
        chosen += manifest[name].groups or [name]
    return list(dict.fromkeys(chosen))


def list_urls(group: Group, suffix: str) -> tuple[str, ...]:
    """Return the addresses of a list: `.uri`, or the `.md5` next to it."""
    assert group.uri is not None
    folder, _, name = group.uri.rpartition("/")
    name = f"{name.removesuffix('.uri')}{suffix}"
    return f"{folder}/{name}", f"{LISTS_COPY}/{name}"


def read_list(address: str, text: str, where: str) -> list[Wanted]:
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
    pairs = [match.groups() for line in dict.fromkeys(lines) if (match := LINE.fullmatch(line))]
    if not is_address(base) or not lines or len(pairs) < len(set(lines)):
        raise ValueError(f"{where} is no list of MLCommons', but begins {shown(f'{base} {text}', 60)!r}")
    found = [Wanted(name, (f"{base}/{quote(name)}",), None, f"md5:{md5}") for md5, name in pairs]
    try:
        check_wanted(found)
    except ValueError as error:
        raise ValueError(f"{where}: {str(error).splitlines()[0].removesuffix('.')}") from error
    return sorted(found, key=lambda one: one.name)
