"""Weights by their name on the Hugging Face Hub, through huggingface_hub's own client and cache.

    found = look("owner/name", need)         # asks the hub for facts alone: the commit, and the files with their sizes
    found = fetch("owner/name", need)        # downloads what is missing, and compares digests
    hub_names.place(str(found.name))         # "owner/name@COMMIT" -> the folder in the cache

With a commit nobody is asked where the cache has the files, so that a run resumes without a network.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from cli.files import write_whole
from cli.limits import shown
from cli.log import log
from weights.files import Refused, weight_files
from weights.hub_names import MIRRORS, NAME, WELL_KNOWN, Name, api, cache, endpoint, is_offline, parse, place, some

ASK_SEC = 10.0
LOG_IN = "log in: hf auth login, or set HF_TOKEN"


@dataclass(frozen=True)
class Need:
    """What one key takes of a repository: the folders of some networks, or one file.

    networks: folder and stems of its weights, as in ldm_names.Network; whole: folders of which all files are taken; more:
    files that are taken if they exist.
    one_of: names of a single file, of which the first that exists is taken.
    instead: what to give to do without.
    """

    networks: tuple[tuple[str, tuple[str, str]], ...] = ()
    whole: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    one_of: tuple[str, ...] = ()
    instead: str = ""

    def chosen(self, name: Name, listed: Mapping[str, int]) -> list[str]:
        """Return the files to take of those of a repository, weights first. Raises Refused: some are missing."""
        if name.file or not self.networks:
            file = self._one_file(name, listed)
            next_to_it = [str(Path(file).parent / more) for more in self.more]
            return [file, *(path for path in next_to_it if path in listed)]
        files, absent = [], []
        for folder, stems in self.networks:
            before = "" if self._is_alone_in(listed, stems, folder) else f"{folder}/"
            inside = {path.removeprefix(before) for path in listed if path.startswith(before)}
            of_weights = weight_files(inside, stems)
            absent += [] if of_weights else [f"weights in {folder}/"]
            absent += [] if "config.json" in inside else [f"{folder}/config.json"]
            files += [f"{before}{file}" for file in (*of_weights, "config.json")]
        for folder in self.whole:
            inside_whole = [path for path in listed if path.startswith(f"{folder}/")]
            files, absent = files + inside_whole, absent + ([] if inside_whole else [f"{folder}/"])
        if absent:
            ways = "Give a model's diffusers folder"
            raise Refused(f"{name} has no {', '.join(absent)}. It has: {some(listed)}. {ways}.")
        return [*files, *(path for path in self.more if path in listed)]

    def _is_alone_in(self, listed: Mapping[str, int], stems: tuple[str, str], folder: str) -> bool:
        """True where the only network that is wanted has the whole repository for its folder."""
        of_root = [path for path in listed if "/" not in path]
        has_own = any(path.startswith(f"{folder}/") for path in listed)
        is_network = "config.json" in of_root and bool(weight_files(of_root, stems))
        return len(self.networks) == 1 and not has_own and is_network

    def _one_file(self, name: Name, listed: Mapping[str, int]) -> str:
        named = [path for path in ((name.file,) if name.file else self.one_of) if path in listed]
        if named:
            return named[0]
        wanted = name.file or " or ".join(self.one_of)
        raise Refused(f"{name} has no file {wanted}. It has: {some(listed)}. Give one as hf://{name.repo}/FILE.")


@dataclass(frozen=True)
class Found:
    """What a name leads to.

    name: with the commit, and the file where the key takes a single one.
    files: path -> bytes of all that are needed.
    notes: remarks for the user.
    """

    name: Name
    files: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> dict[str, int]:
        """The files that the cache does not have."""
        return {path: size for path, size in self.files.items() if not (self.name.snapshot / path).is_file()}

    def lines(self) -> list[str]:
        """Say what was found and what has to be downloaded."""
        if not (missing := self.missing):
            return [*self.notes, f"{self.name}: all {len(self.files)} files are in {cache()}"]
        what = f"{len(missing)} files to download, {_gib(missing):.3g} GiB, to {cache()}: {', '.join(missing)}"
        return [*self.notes, f"{self.name}: {what}"]


def _gib(files: Mapping[str, int]) -> float:
    return sum(files.values()) / 2**30


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


# --- what a name leads to ---


def look(text: str, need: Need) -> Found:
    """Find a name's commit and the files that are needed; nothing is downloaded.

    The hub is not asked for a commit of which the cache has all, for a withdrawn repository that the cache still has, and in
    offline mode (HF_HUB_OFFLINE=1). Where the hub cannot be reached, the cache serves as well, with a note.

    Raises:
        Refused: there is no such model, revision or file; no access to it; or it can be neither asked nor found in the cache.
    """
    given = parse(text)
    assert given is not None, text
    name, here = _current(given), in_cache(text, need)
    if here is not None and (here.name.repo != name.repo or name.is_pinned or is_offline()):
        return here
    try:
        commit, is_gated, listed = _listing(endpoint(), name.repo, name.revision)
        found = _found(replace(name, revision=commit), need, listed)
        if is_gated and found.missing:
            _check_access(found)
    except Refused:
        raise
    except Exception as error:  # of httpx, of huggingface_hub, of the system
        if here is None or not is_away(error):
            raise Refused(_why(text, name, need, error)) from error
        return replace(here, notes=(*here.notes, f"{host()} cannot be reached ({reason(error)}), the cache has it"))
    return found


def _current(name: Name) -> Name:
    """Return a name with the mirror of a repository that its owner has withdrawn."""
    return replace(name, repo=MIRRORS.get(name.repo, name.repo))


def in_cache(text: str, need: Need) -> Found | None:
    """Return what a name leads to where the cache has all that is needed of it; nobody is asked."""
    given = parse(text)
    assert given is not None, text
    for name in (given.pinned(), _current(given).pinned()):
        if name is not None and name.snapshot.is_dir():
            files = (path for path in sorted(name.snapshot.rglob("*")) if path.is_file())
            listed = {path.relative_to(name.snapshot).as_posix(): path.stat().st_size for path in files}
            with contextlib.suppress(Refused):
                return _found(name, need, listed)
    return None


def _check_access(found: Found) -> None:
    """Ask for a file's facts, which the hub refuses to those who may not have it; the list of files is everybody's."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(found.name.repo, next(iter(found.missing)), revision=found.name.revision, endpoint=endpoint())
    get_hf_file_metadata(url, timeout=ASK_SEC)


@functools.lru_cache
def _listing(endpoint: str, repo: str, revision: str | None) -> tuple[str, bool, dict[str, int]]:
    """Ask the hub, once in a process: the commit, whether access is given by request, and all files."""
    info = api().model_info(repo, revision=revision, files_metadata=True, timeout=ASK_SEC)
    assert info.sha is not None
    return info.sha, bool(info.gated), dict(sorted((one.rfilename, one.size or 0) for one in info.siblings or ()))


def _found(name: Name, need: Need, listed: Mapping[str, int]) -> Found:
    chosen = need.chosen(name, listed)
    is_folder = bool(need.networks) and not name.file
    original = next((old for old, new in MIRRORS.items() if new == name.repo), None)
    notes = (f"{name.repo} is an unofficial mirror of {original}, which its owner has withdrawn",) if original else ()
    files = {path: listed[path] for path in chosen}
    return Found(name if is_folder else replace(name, file=chosen[0]), files, notes)


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
    """Download what the cache does not have. Several processes may: huggingface_hub locks each file.

    Args:
        key: for the lines to the user.
        pin: the name with the commit that all machines take; None: the newest of its revision.

    Raises:
        Refused: as `look`; or the download broke off.
    """
    found, given = look(pin or text, need), parse(text)
    assert given is not None
    for line in found.lines():
        log.info(f"{key}: {line}.")
    _download(text, found, need)
    ref = replace(found.name, revision=given.revision).ref
    if not given.is_pinned:
        with contextlib.suppress(OSError):  # as huggingface_hub does it, for a start without a network
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_whole(ref, found.name.revision or "")
    return found


def _download(text: str, found: Found, need: Need) -> None:
    from huggingface_hub import hf_hub_download

    name, missing = found.name, found.missing
    where: dict[str, Any] = dict(revision=name.revision, cache_dir=cache())
    try:
        if missing:
            name.cached.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(name.cached).free / 2**30
            if _gib(missing) > free:
                raise OSError(errno.ENOSPC, f"{_gib(missing):.3g} GiB are to come, {free:.3g} GiB are free")
        for path in missing:
            hf_hub_download(name.repo, path, endpoint=endpoint(), etag_timeout=ASK_SEC, **where)
        if missing:
            remove_damaged(str(name), name.snapshot, api().verify_repo_checksums(name.repo, **where))
    except Refused:
        raise
    except Exception as error:  # of httpx, of huggingface_hub, of hf_xet, of the system
        if is_of_disk(error):
            ways = "Make room there, or set HF_HOME to another folder. The same command resumes"
            raise Refused(f"{text}: cannot be written to {cache()} ({error.strerror}). {ways}.") from error
        raise Refused(_why(text, name, need, error)) from error


def is_of_disk(error: Exception) -> TypeGuard[OSError]:
    """True for an error of this machine's disk, not of the network."""
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)


def remove_damaged(name: str, folder: Path, checked: Any) -> None:
    """Remove the files that have not the hub's digests. Raises Refused: names them.

    Args:
        checked: what HfApi.verify_repo_checksums returned.
    """
    damaged = [folder / one["path"] for one in checked.mismatches]
    for path in damaged:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if damaged:
        given = f"{name}: {', '.join(map(str, damaged))} did not have the digest that {host()} states"
        raise Refused(f"{given}. Removed: start again to download anew.")


def fetch_data_set(repo: str, revision: str | None, folder: Path, at_once: int) -> int:
    """Fetch a data set into a folder, and compare its files with the hub's digests; return how many there are.

    Raises:
        Refused: it is not available, or a file was damaged on its way.
        OSError: the folder cannot be written.
    """
    from huggingface_hub import snapshot_download

    where: dict[str, Any] = dict(repo_type="dataset", revision=revision, local_dir=folder)
    try:
        snapshot_download(repo, endpoint=endpoint(), max_workers=at_once, etag_timeout=ASK_SEC, **where)
        checked = api().verify_repo_checksums(repo, **where)
    except Exception as error:  # of the disk, of httpx2, of huggingface_hub, of hf_xet
        if is_of_disk(error):
            raise
        page = f"{endpoint()}/datasets/{repo}"
        ways = f"If it is gated or private, accept its terms at {page}, and {LOG_IN}"
        raise Refused(f"{repo}: {host()} does not give it ({reason(error)}). {ways}.") from error
    remove_damaged(repo, folder, checked)
    return int(checked.checked_count)


# --- why a name leads to nothing ---


def host() -> str:
    """Return the hub's name, e.g. huggingface.co."""
    return endpoint().partition("://")[2]


def is_away(error: Exception) -> bool:
    """True where the hub has not answered, or has answered that it cannot for now."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return not isinstance(error, errors.HFValidationError)


def reason(error: Exception) -> str:
    """Return an error in a few words; huggingface_hub's own may stand for that of the connection."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if (response := getattr(cause, "response", None)) is not None:
        return f"HTTP {response.status_code}"
    return f"{type(cause).__name__}: {shown((str(cause).splitlines() or [''])[0], 120)}"


def _why(text: str, name: Name, need: Need, error: Exception) -> str:
    """Say why a name leads to nothing, and what to do."""
    from huggingface_hub import errors, get_token

    given, hub, page = shown(text, 200), host(), f"{endpoint()}/{name.repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"{given} is gated. Accept its terms at {page}, and {LOG_IN}, with a token that has access."
    if isinstance(error, errors.RevisionNotFoundError):
        ways = f"Give one of {page}/tree/main, or leave out @revision for the newest"
        return f"{given}: {hub} has no revision {name.revision} of {name.repo}. {ways}."
    is_stranger = isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401 and get_token() is None
    if is_stranger or isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        known = dict.fromkeys(WELL_KNOWN)
        with contextlib.suppress(Exception):
            known |= dict.fromkeys(
                model.id for model in api().list_models(author=name.repo.partition("/")[0], limit=100)
            )
        near = difflib.get_close_matches(name.repo, known, n=3, cutoff=0.6)
        nearest = f" Nearest: {', '.join(near)}." if near else ""
        return f"{given} is neither a path here nor a model on {hub}.{nearest} Check the name; for a private model {LOG_IN}."
    if isinstance(error, errors.HfHubHTTPError) and not is_away(error):
        return f"{given}: {hub} refuses it ({reason(error)}). Check the token that is set, or {LOG_IN}."
    cause = "HF_HUB_OFFLINE is set" if is_offline() else f"{hub} cannot be reached ({reason(error)})"
    folders = () if name.file else (*(folder for folder, _ in need.networks), *need.whole)
    files = [name.file] if name.file else [*need.one_of[:1], *need.more]
    wanted = " ".join((*files, *(f"--include '{folder}/*'" for folder in folders)))
    revision, instead = (
        f" --revision {name.revision}" if name.revision else "",
        f", or {need.instead}" if need.instead else "",
    )
    brought = "FOLDER" if folders else f"FOLDER/{files[0]}"
    return (
        f"{given} is no path here, the cache {cache()} does not have all of it, and {cause}. Where there is a network: "
        f"hf download {name.repo}{revision} {wanted} --local-dir FOLDER. Copy FOLDER here and give {brought}{instead}."
    )


# --- upload ---


def upload_problem(repo: str) -> str | None:
    """Say why nothing can be brought to a repository from here; the hub is not asked."""
    from huggingface_hub import get_token

    found = NAME.fullmatch(repo)
    if found is None or any(found[part] for part in ("prefix", "revision", "file")):
        return f"'{shown(repo, 200)}' is not a model's name. Possible: OWNER/NAME."
    if is_offline():
        return f"{repo}, but HF_HUB_OFFLINE is set. Unset it, or upload later: the same command does."
    if get_token() is None:
        return f"{repo}, but no token is set for {host()}. To write, {LOG_IN}."
    return None


def upload(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Bring a folder's files to a model on the hub, which is made where there is none; return its address.

    Files of the same name are replaced, others stay. A model that exists stays as private or public as it is.

    Raises:
        Refused: the hub refuses it or cannot be reached.
    """
    hub = api()
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # of httpx, of huggingface_hub, of hf_xet
        status = getattr(getattr(error, "response", None), "status_code", None)
        way = f"To write, {LOG_IN}" if status in (401, 403) else f"{folder} is whole: the same command uploads it again"
        raise Refused(f"push_to_hub: {repo}: {host()} did not take it ({reason(error)}). {way}.") from error
    return str(address)
