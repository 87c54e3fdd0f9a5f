"""Weights by their name on the Hugging Face Hub, through huggingface_hub's own client and cache.

    model = resolve_name("owner/name", required)     # asks the hub for the commit and the files' sizes only
    model = fetch("owner/name", required, key=...)   # downloads what is missing, and compares digests
    hub_names.resolve_weights_path(str(model.name))  # "owner/name@COMMIT" -> the folder in the cache

For a name with a commit whose files are in the cache, the hub is not asked, so a run resumes without a network.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import functools
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

from common import dist
from common.files import write_atomic
from common.log import log
from common.value_types import truncate
from weights.files import WeightsError, choose_weight_files
from weights.hub_names import (
    MIRRORS,
    NAME_PATTERN,
    WELL_KNOWN,
    HubName,
    build_client,
    cache,
    format_first_names,
    get_endpoint,
    is_offline,
    parse_hub_name,
    resolve_weights_path,
)

REQUEST_TIMEOUT_SEC = 10.0
LOG_IN = "log in: hf auth login, or set HF_TOKEN"


@dataclass(frozen=True)
class RequiredFiles:
    """The files that one configuration key needs from a repository: the folders of some networks, or a single file.

    networks: folder and stems of each network's weights, as in ldm_names.NetworkNames.
    whole_folders: folders of which all files are needed; optional_files: files that are taken if they exist.
    single_file_names: names of a single file; the first that exists is taken.
    instead: what the user can give to do without the download.
    """

    networks: tuple[tuple[str, tuple[str, str]], ...] = ()
    whole_folders: tuple[str, ...] = ()
    optional_files: tuple[str, ...] = ()
    single_file_names: tuple[str, ...] = ()
    instead: str = ""

    def select(self, name: HubName, repo_files: Mapping[str, int]) -> list[str]:
        """Return the required files of a repository, weights first. Raises WeightsError: some are missing."""
        if name.file or not self.networks:
            file = self._select_single_file(name, repo_files)
            adjacent_paths = [str(Path(file).parent / optional) for optional in self.optional_files]
            return [file, *(path for path in adjacent_paths if path in repo_files)]
        files, missing = [], []
        for folder, stems in self.networks:
            prefix = "" if self._is_at_root(repo_files, stems, folder) else f"{folder}/"
            folder_files = {path.removeprefix(prefix) for path in repo_files if path.startswith(prefix)}
            weight_files = choose_weight_files(folder_files, stems)
            missing += [] if weight_files else [f"weights in {folder}/"]
            missing += [] if "config.json" in folder_files else [f"{folder}/config.json"]
            files += [f"{prefix}{file}" for file in (*weight_files, "config.json")]
        for folder in self.whole_folders:
            folder_paths = [path for path in repo_files if path.startswith(f"{folder}/")]
            files, missing = files + folder_paths, missing + ([] if folder_paths else [f"{folder}/"])
        if missing:
            text = f"{name} has no {', '.join(missing)}. It has: {format_first_names(repo_files)}"
            raise WeightsError(f"{text}. Give a model's diffusers folder.")
        return [*files, *(path for path in self.optional_files if path in repo_files)]

    def _is_at_root(self, repo_files: Mapping[str, int], stems: tuple[str, str], folder: str) -> bool:
        """Return whether the only required network lies at the root of the repository instead of in its folder."""
        root_files = [path for path in repo_files if "/" not in path]
        has_folder = any(path.startswith(f"{folder}/") for path in repo_files)
        is_network = "config.json" in root_files and bool(choose_weight_files(root_files, stems))
        return len(self.networks) == 1 and not has_folder and is_network

    def _select_single_file(self, name: HubName, repo_files: Mapping[str, int]) -> str:
        candidates = (name.file,) if name.file else self.single_file_names
        for path in candidates:
            if path in repo_files:
                return path
        text = f"{name} has no file {' or '.join(candidates)}. It has: {format_first_names(repo_files)}"
        raise WeightsError(f"{text}. Give one as hf://{name.repo}/FILE.")


@dataclass(frozen=True)
class ResolvedModel:
    """A model on the hub, with its commit and its required files.

    name: with the commit, and with the file if the key needs a single one.
    files: path -> bytes of each required file.
    notes: remarks for the user.
    """

    name: HubName
    files: dict[str, int]
    notes: tuple[str, ...] = ()

    @property
    def missing(self) -> dict[str, int]:
        """The files that are not in the cache, path -> bytes."""
        return {path: size for path, size in self.files.items() if not (self.name.snapshot_folder / path).is_file()}

    def lines(self) -> list[str]:
        """Describe the model and what has to be downloaded."""
        if not (missing := self.missing):
            return [*self.notes, f"{self.name}: all {len(self.files)} files are in {cache()}"]
        text = f"{len(missing)} files to download, {_sum_gib(missing):.3g} GiB, to {cache()}: {', '.join(missing)}"
        return [*self.notes, f"{self.name}: {text}"]


def _sum_gib(files: Mapping[str, int]) -> float:
    return sum(files.values()) / 2**30


def path_if_downloaded(text: str, required: RequiredFiles) -> Path | None:
    """Return the path of weights on this machine; None for a name whose files are still to be downloaded.

    One rank per machine asks the hub; the other ranks get None for each name.

    Raises:
        WeightsError: see `resolve_name`.
    """
    if parse_hub_name(text) is None:
        return resolve_weights_path(text)
    if dist.get_local_rank() > 0:
        return None
    model = resolve_name(text, required)
    return None if model.missing else resolve_weights_path(str(model.name))


# --- from a name to a commit and its files ---


def resolve_name(text: str, required: RequiredFiles) -> ResolvedModel:
    """Find a name's commit and the files that are needed; nothing is downloaded.

    The hub is not asked for a commit of which the cache has all, for a withdrawn repository that the cache still has, and in
    offline mode (HF_HUB_OFFLINE=1). Where the hub cannot be reached, the cache serves as well, with a note.

    Raises:
        WeightsError: there is no such model, revision or file; there is no access to it; or the hub cannot be asked and
            the cache does not have it.
    """
    requested = parse_hub_name(text)
    assert requested is not None, text
    name, cached = _replace_withdrawn(requested), resolve_in_cache(text, required)
    if cached is not None and (cached.name.repo != name.repo or name.is_pinned or is_offline()):
        return cached
    try:
        commit, is_gated, repo_files = _list_repo_files(get_endpoint(), name.repo, name.revision)
        model = _select_files(replace(name, revision=commit), required, repo_files)
        if is_gated and model.missing:
            _check_access(model)
    except WeightsError:
        raise
    except Exception as error:  # of httpx, of huggingface_hub, of the system
        if cached is None or not is_unreachable(error):
            raise WeightsError(_explain_failure(text, name, required, error)) from error
        return replace(
            cached,
            notes=(*cached.notes, f"{get_host()} cannot be reached ({summarize_error(error)}), the cache has it"),
        )
    return model


def _replace_withdrawn(name: HubName) -> HubName:
    """Return a name with the mirror of a repository that its owner has withdrawn."""
    return replace(name, repo=MIRRORS.get(name.repo, name.repo))


def resolve_in_cache(text: str, required: RequiredFiles) -> ResolvedModel | None:
    """Resolve a name if the cache has all required files; the hub is not asked. None: it has not."""
    requested = parse_hub_name(text)
    assert requested is not None, text
    for name in (requested.pinned(), _replace_withdrawn(requested).pinned()):
        if name is not None and name.snapshot_folder.is_dir():
            files = (path for path in sorted(name.snapshot_folder.rglob("*")) if path.is_file())
            repo_files = {path.relative_to(name.snapshot_folder).as_posix(): path.stat().st_size for path in files}
            with contextlib.suppress(WeightsError):
                return _select_files(name, required, repo_files)
    return None


def _check_access(model: ResolvedModel) -> None:
    """Ask for one file's metadata, which the hub refuses to users without access; anyone may list the files."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(model.name.repo, next(iter(model.missing)), revision=model.name.revision, endpoint=get_endpoint())
    get_hf_file_metadata(url, timeout=REQUEST_TIMEOUT_SEC)


@functools.lru_cache
def _list_repo_files(endpoint: str, repo: str, revision: str | None) -> tuple[str, bool, dict[str, int]]:
    """Ask the hub, once in a process: the commit, whether access is given by request, and all files."""
    info = build_client().model_info(repo, revision=revision, files_metadata=True, timeout=REQUEST_TIMEOUT_SEC)
    assert info.sha is not None
    return info.sha, bool(info.gated), dict(sorted((file.rfilename, file.size or 0) for file in info.siblings or ()))


def _select_files(name: HubName, required: RequiredFiles, repo_files: Mapping[str, int]) -> ResolvedModel:
    paths = required.select(name, repo_files)
    is_folder = bool(required.networks) and not name.file
    original = next((old for old, new in MIRRORS.items() if new == name.repo), None)
    notes = (f"{name.repo} is an unofficial mirror of {original}, which its owner has withdrawn",) if original else ()
    files = {path: repo_files[path] for path in paths}
    return ResolvedModel(name if is_folder else replace(name, file=paths[0]), files, notes)


# --- download into the cache ---


def pin_all(required_by_key: Mapping[str, tuple[str, RequiredFiles]]) -> dict[str, str]:
    """Return key -> its name with the commit, see `resolve_name`. Raises WeightsError: one line for each key that fails."""
    return _apply_to_all(required_by_key, lambda key, text, required: resolve_name(text, required))


def fetch_all(
    required_by_key: Mapping[str, tuple[str, RequiredFiles]], pins: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Fetch the weights of several keys and log it; return key -> name with the commit. Raises WeightsError as `pin_all`."""
    return _apply_to_all(
        required_by_key, lambda key, text, required: fetch(text, required, key=key, pin=(pins or {}).get(key))
    )


def _apply_to_all(
    required_by_key: Mapping[str, tuple[str, RequiredFiles]], work: Callable[[str, str, RequiredFiles], ResolvedModel]
) -> dict[str, str]:
    pinned, problems = {}, []
    for key, (text, required) in required_by_key.items():
        try:
            pinned[key] = str(work(key, text, required).name)
        except WeightsError as error:
            problems.append(f"{key}: {error}")
    if problems:
        raise WeightsError("\n".join(problems))
    return pinned


def fetch(text: str, required: RequiredFiles, *, key: str, pin: str | None = None) -> ResolvedModel:
    """Download what the cache does not have. Several processes may: huggingface_hub locks each file.

    Args:
        key: for the lines to the user.
        pin: the name with the commit that all machines take; None: the newest of its revision.

    Raises:
        WeightsError: as `resolve_name`; or the download failed.
    """
    model, requested = resolve_name(pin or text, required), parse_hub_name(text)
    assert requested is not None
    for line in model.lines():
        log.info(f"{key}: {line}.")
    _download(text, model, required)
    ref = replace(model.name, revision=requested.revision).ref_file
    if not requested.is_pinned:
        with contextlib.suppress(OSError):  # as huggingface_hub does, for a start without a network
            ref.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(ref, model.name.revision or "")
    return model


def _download(text: str, model: ResolvedModel, required: RequiredFiles) -> None:
    from huggingface_hub import hf_hub_download

    name, missing = model.name, model.missing
    revision_and_cache: dict[str, Any] = dict(revision=name.revision, cache_dir=cache())
    try:
        if missing:
            name.repo_folder.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(name.repo_folder).free / 2**30
            if _sum_gib(missing) > free:
                raise OSError(errno.ENOSPC, f"{_sum_gib(missing):.3g} GiB are to come, {free:.3g} GiB are free")
        for path in missing:
            hf_hub_download(
                name.repo, path, endpoint=get_endpoint(), etag_timeout=REQUEST_TIMEOUT_SEC, **revision_and_cache
            )
        if missing:
            remove_damaged(
                str(name), name.snapshot_folder, build_client().verify_repo_checksums(name.repo, **revision_and_cache)
            )
    except WeightsError:
        raise
    except Exception as error:  # of httpx, of huggingface_hub, of hf_xet, of the system
        if is_disk_error(error):
            advice = "Make room there, or set HF_HOME to another folder. The same command resumes"
            raise WeightsError(f"{text}: cannot be written to {cache()} ({error.strerror}). {advice}.") from error
        raise WeightsError(_explain_failure(text, name, required, error)) from error


def is_disk_error(error: Exception) -> TypeGuard[OSError]:
    """True for an error of this machine's disk, not of the network."""
    return isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError)


def remove_damaged(name: str, folder: Path, verification: Any) -> None:
    """Remove the files whose digests differ from the hub's. Raises WeightsError: lists them.

    Args:
        verification: the result of HfApi.verify_repo_checksums.
    """
    damaged = [folder / mismatch["path"] for mismatch in verification.mismatches]
    for path in damaged:
        path.resolve().unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    if damaged:
        text = f"{name}: {', '.join(map(str, damaged))} did not have the digest that {get_host()} states"
        raise WeightsError(f"{text}. Removed: start again to download it again.")


def fetch_dataset(repo: str, revision: str | None, folder: Path, num_workers: int) -> int:
    """Fetch a dataset into a folder, and compare its files with the hub's digests; return how many there are.

    Raises:
        WeightsError: it is not available, or a file was damaged on its way.
        OSError: the folder cannot be written.
    """
    from huggingface_hub import snapshot_download

    repo_and_folder: dict[str, Any] = dict(repo_type="dataset", revision=revision, local_dir=folder)
    try:
        snapshot_download(
            repo, endpoint=get_endpoint(), max_workers=num_workers, etag_timeout=REQUEST_TIMEOUT_SEC, **repo_and_folder
        )
        verification = build_client().verify_repo_checksums(repo, **repo_and_folder)
    except Exception as error:  # of the disk, of httpx2, of huggingface_hub, of hf_xet
        if is_disk_error(error):
            raise
        page = f"{get_endpoint()}/datasets/{repo}"
        advice = f"If it is gated or private, accept its terms at {page}, and {LOG_IN}"
        raise WeightsError(f"{repo}: {get_host()} does not give it ({summarize_error(error)}). {advice}.") from error
    remove_damaged(repo, folder, verification)
    return int(verification.checked_count)


# --- what to do about a failed request ---


def get_host() -> str:
    """Return the hub's name, e.g. huggingface.co."""
    return get_endpoint().partition("://")[2]


def is_unreachable(error: Exception) -> bool:
    """Return whether the hub did not answer, or answered that it cannot for now."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return not isinstance(error, errors.HFValidationError)


def summarize_error(error: Exception) -> str:
    """Return an error in a few words; for an error of huggingface_hub, the connection's error behind it."""
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if (response := getattr(cause, "response", None)) is not None:
        return f"HTTP {response.status_code}"
    return f"{type(cause).__name__}: {truncate((str(cause).splitlines() or [''])[0], 120)}"


def _explain_failure(text: str, name: HubName, required: RequiredFiles, error: Exception) -> str:
    """Explain why a name could not be resolved or downloaded, and what to do."""
    from huggingface_hub import errors, get_token

    name_text, hub, page = truncate(text, 200), get_host(), f"{get_endpoint()}/{name.repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"{name_text} is gated. Accept its terms at {page}, and {LOG_IN}, with a token that has access."
    if isinstance(error, errors.RevisionNotFoundError):
        advice = f"Give one of {page}/tree/main, or leave out @revision for the newest"
        return f"{name_text}: {hub} has no revision {name.revision} of {name.repo}. {advice}."
    is_anonymous = (
        isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401 and get_token() is None
    )
    if is_anonymous or isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        known = dict.fromkeys(WELL_KNOWN)
        with contextlib.suppress(Exception):
            known |= dict.fromkeys(
                model.id for model in build_client().list_models(author=name.repo.partition("/")[0], limit=100)
            )
        close_matches = difflib.get_close_matches(name.repo, known, n=3, cutoff=0.6)
        nearest = f" Nearest: {', '.join(close_matches)}." if close_matches else ""
        advice = f"Check the name; for a private model {LOG_IN}"
        return f"{name_text} is neither a path here nor a model on {hub}.{nearest} {advice}."
    if isinstance(error, errors.HfHubHTTPError) and not is_unreachable(error):
        return f"{name_text}: {hub} refuses it ({summarize_error(error)}). Check the token that is set, or {LOG_IN}."
    cause = "HF_HUB_OFFLINE is set" if is_offline() else f"{hub} cannot be reached ({summarize_error(error)})"
    folders = () if name.file else (*(folder for folder, _ in required.networks), *required.whole_folders)
    file_names = [name.file] if name.file else [*required.single_file_names[:1], *required.optional_files]
    download_arguments = " ".join((*file_names, *(f"--include '{folder}/*'" for folder in folders)))
    revision = f" --revision {name.revision}" if name.revision else ""
    instead = f", or {required.instead}" if required.instead else ""
    copied_path = "FOLDER" if folders else f"FOLDER/{file_names[0]}"
    command = f"hf download {name.repo}{revision} {download_arguments} --local-dir FOLDER"
    return (
        f"{name_text} is no path here, the cache {cache()} does not have all of it, and {cause}. Where there is a network: "
        f"{command}. Copy FOLDER here and give {copied_path}{instead}."
    )


# --- upload ---


def upload_problem(repo: str) -> str | None:
    """Return why nothing can be uploaded to a repository from this machine, or None; the hub is not asked."""
    from huggingface_hub import get_token

    match = NAME_PATTERN.fullmatch(repo)
    if match is None or any(match[part] for part in ("prefix", "revision", "file")):
        return f"'{truncate(repo, 200)}' is not a model's name. Possible: OWNER/NAME."
    if is_offline():
        return f"{repo}, but HF_HUB_OFFLINE is set. Unset it, or upload later: the same command does."
    if get_token() is None:
        return f"{repo}, but no token is set for {get_host()}. To write, {LOG_IN}."
    return None


def upload(folder: Path, repo: str, *, private: bool, message: str) -> str:
    """Upload a folder's files to a model on the hub, which is created if it does not exist; return its address.

    Files of the same name are replaced, others stay. A model that exists stays as private or public as it is.

    Raises:
        WeightsError: the hub refuses it or cannot be reached.
    """
    hub = build_client()
    try:
        address = hub.create_repo(repo, private=private, exist_ok=True)
        hub.upload_folder(repo_id=repo, folder_path=folder, commit_message=message)
    except Exception as error:  # of httpx, of huggingface_hub, of hf_xet
        status = getattr(getattr(error, "response", None), "status_code", None)
        retry = f"{folder} is whole: the same command uploads it again"
        advice = f"To write, {LOG_IN}" if status in (401, 403) else retry
        raise WeightsError(
            f"push_to_hub: {repo}: {get_host()} did not take it ({summarize_error(error)}). {advice}."
        ) from error
    return str(address)
