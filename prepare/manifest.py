"""The manifest of what can be downloaded, prepare/downloads.yaml: groups of files with their addresses, sizes and digests.

MLCommons publishes a set of files as two small ones: NAME.uri has the address of a folder, NAME.md5 beside it a line for each
file in that folder, its MD5 and its name. Source: mlcommons/r2-downloader, mlc-r2-downloader.sh.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from cli.errors import ConfigError
from cli.limits import shown
from prepare.wanted import Wanted, check_wanted, folders_of, is_address, wanted_problem

MANIFEST = Path(__file__).with_name("downloads.yaml")
LISTS_COPY = "https://raw.githubusercontent.com/mlcommons/r2-infra/main/training/metadata"
LINE = re.compile(r"([0-9a-f]{32})\s+\*?(?:\./)?(\S.*)")


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
        """files, uri, model, data_set or groups."""
        return next((name for name in ("uri", "model", "data_set", "groups") if getattr(self, name)), "files")


def read_manifest(path: Path = MANIFEST) -> dict[str, Group]:
    """Return the groups of a manifest by name. Raises ConfigError: it is none; a problem a line."""
    try:
        content = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        if not isinstance(content, dict):
            raise ValueError("it has no groups")
    except Exception as error:  # of the disk, of yaml, of OmegaConf, of the decoder
        text = f"manifest: {path} cannot be read: {_first_line(error)}. Give a YAML file as {MANIFEST.name}."
        raise ConfigError([text]) from error
    groups, problems = {}, []
    for name, given in content.items():
        try:
            if not re.fullmatch(r"[a-z][a-z0-9_]*", str(name)) or name == "list":
                raise ValueError("is no name of a group. Possible: small letters, digits and _, but not list")
            groups[str(name)] = _read_group(given, content)
        except (OmegaConfBaseException, ValueError, TypeError, LookupError, AttributeError) as error:
            problems.append(f"manifest: {path}: {name}: {_first_line(error).removesuffix('.')}.")
    if problems:
        raise ConfigError(problems)
    return groups


def _read_group(given: Any, names: Iterable[Any]) -> Group:
    """Read one group. Raises ValueError, or what OmegaConf raises, for what it may not be."""
    if not isinstance(given, dict):
        raise ValueError("is no group. Possible: about, folder, files, ..., as keys")
    group: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Group), given))
    own = [name for name in ("uri", "model", "data_set", "groups", "files") if getattr(group, name)]
    whose = (group.family and group.variant) if group.model else (group.folder or group.groups)
    if len(own) != 1 or not whose:
        possible = "files, uri or data_set with folder, model with family and variant, or groups"
        raise ValueError(f"has {', '.join(own) or 'nothing'}. Give one of {possible}")
    if group.folder is not None and (PurePosixPath(group.folder).is_absolute() or ".." in group.folder.split("/")):
        raise ValueError(f"its folder {shown(group.folder)} is not one inside another. Give a relative path")
    if unknown := [name for name in group.groups if name not in names]:
        raise ValueError(f"names no group: {', '.join(unknown)}")
    check_wanted(wanted_of(group))
    return group


def _first_line(error: Exception) -> str:
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return shown(text.splitlines()[0], 200)


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


def wanted_of(group: Group, mirror: str | None = None) -> list[Wanted]:
    """Return the files of a group of files.

    Args:
        mirror: address of a folder with the groups' folders, which is asked first.
    """
    found = []
    for entry in group.files:
        for number in range(entry.count or 1):
            names = [text.format(number=number) if entry.count else text for text in (entry.name, *entry.urls)]
            own = Wanted(names[0], tuple(names[1:]), entry.bytes, entry.digest, group.token)
            found.append(with_mirror(own, group, mirror))
    return found


def with_mirror(wanted: Wanted, group: Group, mirror: str | None) -> Wanted:
    """Return a file with the mirror's address before its own ones. The token is for the own ones: it is then left out."""
    if mirror is None:
        return wanted
    url = f"{mirror.rstrip('/')}/{quote(f'{group.folder}/{wanted.name}')}"
    return Wanted(wanted.name, (url, *wanted.urls), wanted.bytes, wanted.digest)


def list_urls(group: Group, suffix: str, mirror: str | None = None) -> tuple[str, ...]:
    """Return the addresses of a list: `.uri`, or the `.md5` beside it."""
    assert group.uri is not None
    name = PurePosixPath(group.uri).stem + suffix
    own = (f"{group.uri.rpartition('/')[0]}/{name}", f"{LISTS_COPY}/{name}")
    return own if mirror is None else (f"{mirror.rstrip('/')}/{quote(str(group.folder))}/{name}", *own)


def read_address(text: str, where: str) -> str:
    """Return the address of a folder that a .uri has. Raises ValueError: it has none."""
    lines = text.split()
    if len(lines) != 1 or not is_address(lines[0]):
        raise ValueError(f"{where} is not one address, but begins {shown(text.strip(), 60)!r}")
    return lines[0].rstrip("/")


def read_list(text: str, base: str, where: str) -> tuple[list[Wanted], list[str]]:
    """Return the files of a .md5, a digest and a name a line; and the names of which it has two digests, which are left out.

    Args:
        base: address of their folder.

    Raises:
        ValueError: it is no such list, or a name in it leads out of the folder or is a file and a folder.
    """
    found: dict[str, Wanted] = {}
    twice: set[str] = set()
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        match = LINE.fullmatch(line.strip())
        if match is None:
            raise ValueError(f"{where}, line {number}: is not an MD5 and a name, but {shown(line, 60)!r}")
        one = Wanted(match[2], (f"{base}/{quote(match[2])}",), None, f"md5:{match[1]}")
        if problem := wanted_problem(one):
            raise ValueError(f"{where}, line {number}: {problem.removesuffix('.')}")
        if found.setdefault(one.name, one) != one:
            twice.add(one.name)
    if not found:
        raise ValueError(f"{where} names no file")
    if both := folders_of(found) & found.keys():
        raise ValueError(f"{where}: {min(both)} is a file and a folder of files")
    return [one for name, one in sorted(found.items()) if name not in twice], sorted(twice)
