"""The locks: one version of every package on every Python, all that requirements.txt asks for, nothing resolved later."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from pathlib import Path

import pytest
from conftest import ROOT
from packaging.requirements import Requirement

LOCKS = ["requirements.lock", "requirements/newest.lock", "requirements/dev.lock", "requirements/clouds.lock"]
VERSIONS = ["3.11", "3.12", "3.13"]


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(name: str) -> list[Requirement]:
    lines = [line.split(" #")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def environment_of(python: str) -> dict[str, str]:
    """What markers are compared with: Linux, x86-64, with this Python."""
    platform = {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    kind = {"implementation_name": "cpython", "platform_python_implementation": "CPython", "extra": ""}
    return {"python_version": python, "python_full_version": f"{python}.4", **platform, **kind}


def pins(name: str, python: str) -> dict[str, list[str]]:
    """Package -> versions whose marker holds on Linux, x86-64, with this Python."""
    environment = environment_of(python)
    result: dict[str, list[str]] = {}
    for pin in requirements(name):
        [specifier] = pin.specifier
        assert specifier.operator == "==", f"{name}: {pin} is not pinned"
        if pin.marker is None or pin.marker.evaluate(environment):
            result.setdefault(canonical(pin.name), []).append(specifier.version)
    return result


@pytest.mark.parametrize("python", VERSIONS)
@pytest.mark.parametrize("lock", LOCKS)
def test_a_lock_has_one_version_of_every_package_within_the_declared_bounds(lock, python):
    locked = pins(lock, python)
    assert len(locked) > 30
    assert {name: versions for name, versions in locked.items() if len(versions) != 1} == {}
    declared = {canonical(wanted.name): wanted for wanted in requirements(lock.replace(".lock", ".txt"))}
    if lock == "requirements/newest.lock":
        rest = {canonical(wanted.name): wanted for wanted in requirements("requirements.txt")}
        assert declared.keys() == {"torch", "torchvision"} and "xformers" not in locked
        declared = {**{name: wanted for name, wanted in rest.items() if name != "xformers"}, **declared}
    for name, wanted in declared.items():
        [version] = locked[name]
        assert wanted.specifier.contains(version), f"{wanted} but {version}"


def test_an_override_is_no_wider_than_the_bound_that_it_takes_the_place_of():
    """For the resolver it replaces those of requirements.txt too. torch and torchvision are given by `-c`."""
    asked = {canonical(wanted.name): wanted.specifier for wanted in requirements("requirements.txt")}
    for wanted in requirements("requirements/overrides.txt"):
        name = canonical(wanted.name)
        assert name in ("torch", "torchvision") or wanted.specifier == (asked.get(name) or wanted.specifier), name


def test_the_environment_is_the_lock():
    """The environment of the tests, so that their results are about the locked versions of a set."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if not any(Path(sys.prefix).glob(".easel-*")):
        pytest.skip(f"{sys.prefix} was not made by `make env`")
    names = "torch mosaicml mosaicml-streaming diffusers transformers omegaconf numpy pillow wandb".split()  # noqa: SIM905
    here = {name: [importlib.metadata.version(name).split("+")[0]] for name in names}
    assert here in [{name: pins(lock, python)[name] for name in names} for lock in LOCKS[:2]]
