"""A folder brought to the Hugging Face Hub as a model, by huggingface_hub's own client and its token."""

from __future__ import annotations

from pathlib import Path

from cli.limits import shown
from weights.files import Refused
from weights.hub import host, reason
from weights.hub_names import NAME, api, is_offline

LOG_IN = "Log in: hf auth login, or set HF_TOKEN to a token that may write"


def upload_problem(repo: str) -> str | None:
    """Say why nothing can be brought to a repository from here; the hub is not asked."""
    from huggingface_hub import get_token

    found = NAME.fullmatch(repo)
    if found is None or any(found[part] for part in ("prefix", "revision", "file")):
        return f"'{shown(repo, 200)}' is not a model's name. Possible: OWNER/NAME."
    if is_offline():
        return f"{repo}, but HF_HUB_OFFLINE is set. Unset it, or upload later: the same command does."
    if get_token() is None:
        return f"{repo}, but no token is set for {host()}. {LOG_IN}."
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
        way = LOG_IN if status in (401, 403) else f"{folder} is whole: the same command uploads it again"
        raise Refused(f"push_to_hub: {repo}: {host()} did not take it ({reason(error)}). {way}.") from error
    return str(address)
