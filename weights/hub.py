"""Weights by their name on the Hugging Face Hub: found, downloaded into its cache, and compared with their digests.

    found = look("owner/name", need)         # asks the hub for facts alone: the commit, the files with sizes and digests
    found = fetch("owner/name", need)        # downloads what is missing, compares every digest
    hub_names.place(str(found.name))         # "owner/name@COMMIT" -> the folder in the cache

With a commit nobody is asked where the cache has the files, so that a run resumes without a network. huggingface_hub checks
the size of what it downloads; the digests are compared here: a file's SHA-256, or git's SHA-1 of a small one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from filelock import FileLock

from cli.files import write_whole
from cli.log import log
from weights.files import Refused
from weights.hub_errors import host, is_away, reason, why
from weights.hub_names import MIRRORS, WITHDRAWN, Name, api, cache, endpoint, is_offline, parse, place
from weights.hub_need import Need

ASK_SEC = 10.0


@dataclass(frozen=True)
class File:
    """One needed file of a repository."""

    path: str
    bytes: int
    digest: str | None
    """SHA-256, or git's SHA-1 of a small file; None: not known."""


@dataclass(frozen=True)
class Found:
    """What a name leads to: the commit, the file where the key takes a single one, and all files that are needed."""

    name: Name
    files: tuple[File, ...]
    notes: tuple[str, ...] = ()
    """Remarks for the user."""

    @property
    def missing(self) -> list[File]:
        """The files that the cache does not have."""
        return [file for file in self.files if not (self.name.snapshot / file.path).is_file()]

    def lines(self) -> list[str]:
        """Say what was found and what has to be downloaded."""
        if not (missing := self.missing):
            unknown = sum(file.digest is None for file in self.files)
            why_not = f"copied without its links: the digests of {unknown} are not known, nor compared"
            there = f"{cache()}, {why_not}" if unknown else f"{cache()}"
            return [*self.notes, f"{self.name}: all {len(self.files)} files are in {there}"]
        size = sum(file.bytes for file in missing) / 2**30
        files = "1 file" if len(missing) == 1 else f"{len(missing)} files"
        listed = ", ".join(file.path for file in missing)
        return [*self.notes, f"{self.name}: {files} to download, {size:.3g} GiB, to {cache()}: {listed}"]


def checked(text: str, need: Need) -> Path | None:
    """Return the path of weights that are here, None for a name whose files are still to be downloaded.

    One rank of a machine asks the hub; the others leave it to that one.

    Raises:
        Refused: see `look`.
    """
    if parse(text) is None:
        return place(text)
    if os.environ.get("LOCAL_RANK", "0") != "0":
        return None
    found = look(text, need)
    return None if found.missing else place(str(found.name))


def can_be_mended(text: str, need: Need) -> bool:
    """True where a file that cannot be read is a damaged one in the cache, which `fetch` brings again."""
    return parse(text) is not None and not is_offline() and bool(_damaged(look(text, need)))


# --- what a name leads to ---


def look(text: str, need: Need) -> Found:
    """Find a name's commit and the files that are needed; nothing is downloaded.

    The hub is asked, but for a commit of which the cache has all, for a repository that its owner withdrew and the cache
    still has, and in offline mode (HF_HUB_OFFLINE=1). Where the hub is away, the cache serves as well, with a note.

    Raises:
        Refused: there is no such model, revision or file; no access to it; or it can be neither asked nor found in the cache.
    """
    given = parse(text)
    assert given is not None, text
    name = replace(given, repo=MIRRORS.get(given.repo, given.repo))
    if name != given and (here := _in_cache(given, need)) is not None:
        return here
    here, notes = _in_cache(name, need), _notes(text, name, need)
    if here is not None and (name.is_pinned or is_offline()):
        return replace(here, notes=notes)
    try:
        commit, is_gated, listed = _listing(endpoint(), name.repo, name.revision)
        found = _found(replace(name, revision=commit), need, listed)
        if is_gated and found.missing:
            _ask_for(found)
    except Refused:
        raise
    except Exception as error:  # of httpx, of huggingface_hub, of the system
        if here is None or not is_away(error):
            raise Refused(why(text, name, need, error)) from error
        return replace(here, notes=(*notes, f"{host()} cannot be reached ({reason(error)}), the cache has it"))
    return replace(found, notes=notes)


def in_cache(text: str, need: Need) -> Found | None:
    """Return what a name leads to where the cache has all that is needed of it; nobody is asked."""
    given = parse(text)
    assert given is not None, text
    return _in_cache(given, need) or _in_cache(replace(given, repo=MIRRORS.get(given.repo, given.repo)), need)


def _notes(text: str, name: Name, need: Need) -> tuple[str, ...]:
    """Return what to say of a name where it is first given."""
    original = next((old for old, new in MIRRORS.items() if new == name.repo), None)
    if original is None or name.is_pinned:
        return ()
    default = ", the default for real data," if text == need.default else ""
    return (f"{name.repo}{default} is an unofficial mirror of {original}: {WITHDRAWN[original.partition('/')[0]]}",)


def _ask_for(found: Found) -> None:
    """Ask for a file's facts, which the hub refuses to those who may not have it; the list of files is everybody's."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    where = dict(revision=found.name.revision, endpoint=endpoint())
    get_hf_file_metadata(hf_hub_url(found.name.repo, found.missing[0].path, **where), timeout=ASK_SEC)


@functools.lru_cache
def _listing(endpoint: str, repo: str, revision: str | None) -> tuple[str, bool, tuple[File, ...]]:
    """Ask the hub, once in a process: the commit, whether access is given by request, and all files."""
    info = api().model_info(repo, revision=revision, files_metadata=True, timeout=ASK_SEC)
    files = ((s.rfilename, s.size or 0, s.lfs.sha256 if s.lfs else s.blob_id) for s in info.siblings or ())
    assert info.sha is not None
    return info.sha, bool(info.gated), tuple(File(*facts) for facts in sorted(files))


def _in_cache(name: Name, need: Need) -> Found | None:
    """Return what is needed where the cache has all of it."""
    pinned = name.pinned()
    if pinned is None or not pinned.snapshot.is_dir():
        return None
    files = sorted(path for path in pinned.snapshot.rglob("*") if path.is_file())
    listed = tuple(
        File(path.relative_to(pinned.snapshot).as_posix(), path.stat().st_size, _name_of_blob(path)) for path in files
    )
    try:
        return _found(pinned, need, listed)
    except Refused:
        return None


def _found(name: Name, need: Need, listed: tuple[File, ...]) -> Found:
    files = {file.path: file for file in listed}
    chosen = need.chosen(name, {path: file.digest for path, file in files.items()})
    is_folder = bool(need.networks) and not name.file
    return Found(name if is_folder else replace(name, file=chosen[0]), tuple(files[path] for path in chosen))


def _name_of_blob(path: Path) -> str | None:
    """Return the digest that the cache keeps a file under; None for a cache that was copied without its links."""
    digest = path.readlink().name if path.is_symlink() else ""
    return digest if re.fullmatch(r"[0-9a-f]{40}|[0-9a-f]{64}", digest) else None


# --- into the cache ---


def pin_all(wanted: Mapping[str, tuple[str, Need]]) -> dict[str, str]:
    """Return key -> its name with the commit, see `look`. Raises Refused: of all keys, a line each."""
    return _of_all(wanted, lambda key, text, need: look(text, need))


def fetch_all(wanted: Mapping[str, tuple[str, Need]], pins: Mapping[str, str] | None = None) -> dict[str, str]:
    """Fetch several keys' weights and say what is done; return key -> name with the commit. Raises Refused as `pin_all`."""
    return _of_all(wanted, lambda key, text, need: fetch(text, need, key=key, pin=(pins or {}).get(key)))


def _of_all(wanted: Mapping[str, tuple[str, Need]], work: Callable[[str, str, Need], Found]) -> dict[str, str]:
    pinned, problems = {}, []
    for key, (text, need) in wanted.items():
        try:
            pinned[key] = str(work(key, text, need).name)
        except Refused as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise Refused("\n".join(problems))
    return pinned


def fetch(text: str, need: Need, *, key: str, pin: str | None = None) -> Found:
    """Download what the cache does not have, and compare the digest of every needed file.

    One process of a machine at a time; the others then find all in the cache. A damaged file is fetched once more.

    Args:
        key: for the lines to the user.
        pin: the name with the commit that all machines take; None: the newest of its revision.

    Raises:
        Refused: as `look`; the download broke off; or a file's digest is another one.
    """
    found = look(pin or text, need)
    name, given = found.name, parse(text)
    assert given is not None
    with _one_at_a_time(name):
        for line in (*_notes(text, replace(given, repo=name.repo), need), *replace(found, notes=()).lines()):
            log.info(f"{key}: {line}.")
        for is_last in (False, True):
            _download(text, found, need)
            if not (damaged := _damaged(found)):
                break
            which = f"{name.snapshot / damaged[0].path} does not have the digest {damaged[0].digest}"
            if is_offline():
                raise Refused(f"{text}: {which}. Bring it from another machine, or take HF_HUB_OFFLINE out.")
            for file in damaged:
                _remove(name.snapshot / file.path)
            if is_last:
                ways = "Look for what changes files on their way (a proxy), and start again"
                raise Refused(f"{text}: {which}, twice; it was removed. {ways}.")
            log.warning(f"{key}: {which}: fetched once more.")
    if not given.is_pinned:
        with contextlib.suppress(OSError):  # the cache may be read-only
            _keep(replace(name, revision=given.revision).ref, name.revision or "")
    return found


@contextlib.contextmanager
def _one_at_a_time(name: Name) -> Iterator[None]:
    """Wait for another process that is fetching the same. The lock is not in the cache, which may be read-only."""
    digest = hashlib.sha256(str(name.snapshot).encode()).hexdigest()[:16]
    with FileLock(Path(tempfile.gettempdir(), f"hub-{os.getuid()}-{digest}.lock")):
        yield


def _keep(ref: Path, commit: str) -> None:
    """Note the commit of a branch or tag, as huggingface_hub does, for a start without a network."""
    if not ref.is_file() or ref.read_text() != commit:
        ref.parent.mkdir(parents=True, exist_ok=True)
        write_whole(ref, commit)


def _download(text: str, found: Found, need: Need) -> None:
    from huggingface_hub import hf_hub_download

    name, missing = found.name, found.missing
    if not missing:
        return
    try:
        name.cached.mkdir(parents=True, exist_ok=True)
        size, free = sum(file.bytes for file in missing), shutil.disk_usage(name.cached).free
        if size > free:
            raise OSError(errno.ENOSPC, f"{size / 2**30:.3g} GiB are to come, {free / 2**30:.3g} GiB are free")
        for file in missing:
            here = dict(cache_dir=cache(), endpoint=endpoint(), etag_timeout=ASK_SEC)
            hf_hub_download(name.repo, file.path, revision=name.revision, **here)
    except Exception as error:  # of httpx, of huggingface_hub, of hf_xet, of the system
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            given = f"{text}: cannot be written to {cache()} ({error.strerror})"
            raise Refused(
                f"{given}. Make room there, or set HF_HOME to another folder. The same command goes on."
            ) from error
        raise Refused(why(text, name, need, error)) from error


def _damaged(found: Found) -> list[File]:
    return [file for file in found.files if file.digest and not _is_whole(found.name.snapshot / file.path, file)]


def _is_whole(path: Path, file: File) -> bool:
    """Compare a file with its digest."""
    is_small = len(file.digest or "") == 40
    digest = hashlib.sha1(b"blob %d\0" % path.stat().st_size) if is_small else hashlib.sha256()
    with open(path, "rb") as content:
        while block := content.read(1 << 22):
            digest.update(block)
    return digest.hexdigest() == file.digest


def _remove(path: Path) -> None:
    path.resolve().unlink(missing_ok=True)
    path.unlink(missing_ok=True)
