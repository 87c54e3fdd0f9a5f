"""What a name on the hub leads to nothing for, in words: a typo, no access, a revision that is gone, no network."""

from __future__ import annotations

import contextlib
import difflib

from cli.limits import shown
from weights.hub_names import WELL_KNOWN, Name, api, cache, endpoint, is_offline, some
from weights.hub_need import Need


def host() -> str:
    """Return the hub's name, e.g. huggingface.co."""
    return endpoint().partition("://")[2]


def is_away(error: Exception) -> bool:
    """True where the hub has not answered, or has answered that it cannot for now."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response.status_code >= 500 or error.response.status_code == 429
    return not isinstance(error, errors.HFValidationError)


def why(text: str, name: Name, need: Need, error: Exception) -> str:
    """Say why a name leads to nothing, and what to do."""
    from huggingface_hub import errors, get_token

    given, hub = shown(text, 200), host()
    way_in = "log in: hf auth login, or set HF_TOKEN"
    if isinstance(error, errors.GatedRepoError):
        whose = "no token is set" if get_token() is None else "the token that is set has no access"
        page = f"{endpoint()}/{name.repo}"
        return f"{given} is gated, and {whose}. Accept its terms at {page}, and {way_in}."
    if isinstance(error, errors.RevisionNotFoundError):
        others = f"It has: {some(found)}. " if (found := _revisions(name)) else ""
        ways = "Give another one, leave out @revision for the newest, or bring the cache of a machine that has it (HF_HOME)"
        return f"{given}: {hub} has no revision {name.revision} of {name.repo}. {others}{ways}."
    is_stranger = isinstance(error, errors.HfHubHTTPError) and error.response.status_code == 401 and get_token() is None
    if is_stranger or isinstance(error, errors.RepositoryNotFoundError | errors.HFValidationError):
        nearest = _nearest(name.repo)
        near = f" Nearest: {', '.join(nearest)}." if nearest else ""
        return (
            f"{given} is neither a path here nor a model on {hub}.{near} Check the name; for a private model {way_in}."
        )
    if isinstance(error, errors.HfHubHTTPError) and not is_away(error):
        return f"{given}: {hub} refuses it ({reason(error)}). Check the token that is set, or {way_in}."
    return _unreachable(given, name, need, error)


def _unreachable(given: str, name: Name, need: Need, error: Exception) -> str:
    cause = "HF_HUB_OFFLINE is set" if is_offline() else f"{host()} cannot be reached ({reason(error)})"
    files = [name.file] if name.file else need.usual()
    revision = f" --revision {name.revision}" if name.revision else ""
    command = f"hf download {name.repo}{revision} {' '.join(files)} --local-dir FOLDER"
    there = "FOLDER" if need.networks and not name.file else f"FOLDER/{files[0]}"
    instead = f", or {need.instead}" if need.instead else ""
    return (
        f"{given} is no path here, the cache {cache()} does not have all of it, and {cause}. Where there is a network: "
        f"{command}. Bring FOLDER and give {there}{instead}. Or bring that machine's cache and set HF_HOME to it."
    )


def reason(error: Exception) -> str:
    """Return an error in a few words."""
    # huggingface_hub's own error may stand for that of the connection.
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    response = getattr(cause, "response", None)
    if response is not None:
        return f"HTTP {response.status_code}"
    return f"{type(cause).__name__}: {shown((str(cause).splitlines() or [''])[0], 120)}"


def _nearest(repo: str) -> list[str]:
    """Return up to three models of a similar name: well-known ones, the owner's, and what the hub's search finds."""
    owner, _, title = repo.partition("/")
    known = dict.fromkeys(WELL_KNOWN)
    for asked in ({"author": owner}, {"search": title}):
        with contextlib.suppress(Exception):
            known |= dict.fromkeys(model.id for model in api().list_models(**asked, limit=100))
    return difflib.get_close_matches(repo, known, n=3, cutoff=0.6)


def _revisions(name: Name) -> list[str]:
    with contextlib.suppress(Exception):
        refs = api().list_repo_refs(name.repo)
        return [ref.name for ref in (*refs.branches, *refs.tags)]
    return []
