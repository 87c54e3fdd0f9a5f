"""Check Python and the packages that a run needs: within the bounds of requirements*.txt, and those that were tested."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.version import Version

from preflight.machine import ERROR, OK, WARNING, Finding

ROOT = Path(__file__).resolve().parent.parent

# Packages that a run needs. wandb counts only if its logger is used.
PACKAGES = (
    "torch",
    "torchvision",
    "mosaicml",
    "mosaicml-streaming",
    "diffusers",
    "transformers",
    "open_clip_torch",
    "omegaconf",
    "filelock",
)
SETS = {  # lock -> the files whose bounds it was resolved with; a later one's line takes the place of an earlier one's
    "requirements.lock": ("requirements.txt",),
    "requirements/newest.lock": ("requirements.txt", "requirements/newest.txt"),
}
NEWER_HAS_RUN = ("torch", "torchvision")  # docs/versions.md: torch 2.11 on a CPU
FIRST_PYTHON, LAST_PYTHON = (3, 11), (3, 13)

Bounds = dict[str, list[tuple[Requirement, str]]]
"""Package -> its bounds for this machine, each with its reason."""


def versions(*, wandb: bool) -> list[Finding]:
    """Compare Python and the packages that a run needs with the set whose torch is installed, else with requirements.lock.

    Args:
        wandb: the W&B logger is used.
    """
    found = []
    first, last = (".".join(map(str, version)) for version in (FIRST_PYTHON, LAST_PYTHON))
    python = ".".join(map(str, sys.version_info[:3]))
    if not FIRST_PYTHON <= sys.version_info[:2] <= LAST_PYTHON:
        found.append(Finding(ERROR, "versions", f"Python {python}. Possible: {first} to {last}. Use one of them."))
    lock, bounds, locked = _set_here()
    if not bounds or not locked:
        missing = f"requirements.txt or {lock} is not in {ROOT}: nothing to compare with. Take a whole checkout."
        found.append(Finding(WARNING, "versions", missing))
    here, install = [], f"Install what was tested: pip install --no-deps -r {lock}"
    for name in (*PACKAGES, *(["wandb"] if wandb else [])):
        version = _installed(name)
        if version is None:
            found.append(Finding(ERROR, "versions", f"{name} is not installed. {install}"))
            continue
        here.append(f"{name} {version}")
        if finding := _problem(name, version, bounds.get(_plain(name), []), locked.get(_plain(name), [])):
            level, text = finding
            found.append(Finding(level, "versions", f"{text}. {install}"))
    return found or [Finding(OK, "versions", f"Python {python}, {', '.join(here)}: those of {lock}")]


def _set_here() -> tuple[str, Bounds, Bounds]:
    """Return the lock of the newest torch that is not newer than the installed one; its bounds; its versions."""
    torch = Version(_installed("torch") or "0")
    fitting = [
        lock
        for lock in SETS
        for pin, _ in _pins(ROOT / lock).get("torch", [])
        if any(Version(one.version) <= torch for one in pin.specifier)
    ]
    lock = fitting[-1] if fitting else next(iter(SETS))
    bounds: Bounds = {}
    for name in SETS[lock]:
        bounds |= _pins(ROOT / name)
    return lock, bounds, _pins(ROOT / lock)


def _problem(
    name: str, version: str, bounds: list[tuple[Requirement, str]], locked: list[tuple[Requirement, str]]
) -> tuple[str, str] | None:
    """Return level and text where a version is out of its bounds, or not the one that was tested."""
    for wanted, reason in bounds:
        if not _allows(wanted, version):
            least = min((Version(s.version) for s in wanted.specifier if s.operator in ("==", ">=")), default=None)
            newer = name in NEWER_HAS_RUN and least is not None and Version(version) > least
            given = f"{name} {version} is not {name}{wanted.specifier}" + (f": {reason}" if reason else "")
            return WARNING if newer else ERROR, given
    if locked and not any(_allows(wanted, version) for wanted, _ in locked):
        return (
            WARNING,
            f"{name} {version} is within the bounds, but tests and figures are with {name}{locked[0][0].specifier}",
        )
    return None


def _allows(wanted: Requirement, version: str) -> bool:
    return wanted.specifier.contains(version, prereleases=True)


def _installed(name: str) -> str | None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return None


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


def _pins(path: Path) -> Bounds:
    """Read a requirements file."""
    found: Bounds = {}
    for line in path.read_text().splitlines() if path.is_file() else ():
        text, _, reason = line.partition("#")
        if not text.strip():
            continue
        with contextlib.suppress(InvalidRequirement):
            wanted = Requirement(text.strip())
            if wanted.marker is None or wanted.marker.evaluate():
                found.setdefault(_plain(wanted.name), []).append((wanted, reason.strip()))
    return found
