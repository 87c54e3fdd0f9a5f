"""Models and data sets of the Hugging Face Hub as groups of the manifest: its own library fetches them.

A model goes into the hub's cache, from where runs take it by name (weights/hub.py): the files alone that its family reads.
A data set goes into a folder, which prepare.shards reads. Each file's digest is compared: its SHA-256, or git's SHA-1 of a
small one. FOLDER/.digests has them (prepare/wanted.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cli.errors import Failed
from cli.log import log
from prepare.manifest import Group
from prepare.wanted import Memory, Wanted
from weights import hub
from weights.hub import Need, host, reason
from weights.hub_names import api, endpoint, parse
from zoo import load_family
from zoo.encoders import need_of_denoiser, need_of_encoders

ASK_SEC = 10.0
WAY_IN = "log in: hf auth login, or set HF_TOKEN"


def needs_of(group: Group) -> dict[str, tuple[str, Need]]:
    """Return what a group takes of its model: key -> (name, files), for the encoders and for the denoiser."""
    assert group.model and group.family and group.variant
    family = load_family(group.family, "full", group.variant)
    return {
        "model.weights": (group.model, need_of_encoders(family)),
        "model.denoiser": (group.model, need_of_denoiser(family)),
    }


def fetch_model(group: Group) -> None:
    """Fetch a group's model into the hub's cache. Raises Failed: it cannot be had."""
    try:
        hub.fetch_all(needs_of(group))
    except hub.Refused as error:
        raise Failed(str(error).splitlines()[0]) from error


def is_begun(group: Group) -> bool:
    """Return whether the hub's cache has a folder of a group's model; what is in it is not looked at."""
    name = parse(group.model)
    return name is not None and name.cached.is_dir()


def missing_of_model(group: Group) -> list[str]:
    """Return those of `model.weights` and `model.denoiser` for which the cache has not all; nobody is asked."""
    return [key for key, (text, need) in needs_of(group).items() if hub.in_cache(text, need) is None]


def fetch_data_set(group: Group, folder: Path, at_once: int) -> list[Wanted]:
    """Fetch a group's data set into a folder, and compare every file's digest.

    Returns:
        its files, without addresses.

    Raises:
        Failed: it is not available, or a file has another digest, twice.
        OSError: the folder cannot be written.
    """
    from huggingface_hub import snapshot_download

    repo, memory = str(group.data_set), Memory(folder)
    try:
        info = api().dataset_info(repo, revision=group.revision, files_metadata=True, timeout=ASK_SEC)
        wanted = [_wanted(one) for one in info.siblings or ()]
        for again in (": fetched again", ""):
            place: dict[str, Any] = dict(revision=info.sha, local_dir=folder, endpoint=endpoint())
            snapshot_download(repo, repo_type="dataset", max_workers=at_once, etag_timeout=ASK_SEC, **place)
            wrong = [one.name for one in wanted if memory.look(one, read=True).state != "there"]
            for name in wrong:
                (folder / name).unlink(missing_ok=True)
                log.warning(f"{folder / name}: has another digest than at {host()}{again}.")
            if not wrong:
                memory.keep(*wanted)
                return wanted
    except Exception as error:  # of the disk, of httpx2, of huggingface_hub, of hf_xet
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, ConnectionError):
            raise
        raise Failed(_why(repo, group, error)) from error
    ways = "Look for what changes files on their way (a proxy), and start again"
    raise Failed(f"{repo}: {wrong[0]} has another digest than at {host()}, twice. {ways}")


def _wanted(sibling: Any) -> Wanted:
    digest = f"sha256:{sibling.lfs.sha256}" if sibling.lfs else f"git:{sibling.blob_id}"
    return Wanted(sibling.rfilename, (), sibling.size, digest)


def _why(repo: str, group: Group, error: Exception) -> str:
    """Say why a data set cannot be had, and what to do."""
    from huggingface_hub import errors

    page = f"{endpoint()}/datasets/{repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"{repo} is gated. Accept its terms at {page}, and {WAY_IN}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{repo}: {host()} has no revision {group.revision} of it"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{repo}: {host()} has no such data set that you may see. For a private one {WAY_IN}"
    elsewhere = f"hf download --repo-type dataset {repo} --local-dir FOLDER"
    return f"{repo}: {host()} cannot give it ({reason(error)}). Where there is a network: {elsewhere}"
