"""The files of launch/ as SkyPilot, Kubernetes, JobSet and hadolint read them: `make test-clouds`, which installs these."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT

PROGRAMS = os.environ.get("CLOUDS", "")
LAUNCH = ROOT / "launch"

pytestmark = [
    pytest.mark.timeout(180, func_only=True),
    pytest.mark.skipif(not PROGRAMS, reason="its tools lie beside the environment: make test-clouds"),
]

CASES = {
    "skypilot": ("sky", "skypilot.yaml", "", "", None),
    "jobset": ("jobset", "kubernetes.yaml", "", "", None),
    "kubernetes": ("kubernetes", "kubernetes.yaml", "", "", None),
    "a key of SkyPilot": ("sky", "skypilot.yaml", "recover_on_exit_codes", "recover_on_codes", "recover_on_codes"),
    "a key of JobSet": ("jobset", "kubernetes.yaml", "maxRestarts", "restarts", "restarts=3"),
    "a key of Kubernetes": ("kubernetes", "kubernetes.yaml", "backoffLimit", "backLimit", "backLimit"),
}
"""A case -> tool, file, a text and its replacement, and what the tool has to name."""


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> dict[str, str | None]:
    """The objections of the tools to each case, in one process of theirs: loading SkyPilot takes seconds."""
    asked = []
    for tool, file, text, instead, _ in CASES.values():
        content = (LAUNCH / file).read_text()
        assert text in content
        asked.append((tool, content.replace(text, instead) if text else content))
    env = {**os.environ, "HOME": str(tmp_path_factory.mktemp("home")), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [f"{PROGRAMS}/python", "tests/launch_file_checks.py"]
    ways = dict(cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    done = subprocess.run(words, input=json.dumps(asked), **ways)
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_tools_accept_our_files_and_refuse_faults_in_them(case, problems):
    named = CASES[case][-1]
    assert problems[case] is None if named is None else named in (problems[case] or "")


def hadolint(path: Path) -> str:
    done = subprocess.run([f"{PROGRAMS}/hadolint", path], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.rocm"])
def test_hadolint_has_nothing_against_our_dockerfiles_and_sees_a_fault(name, tmp_path):
    assert hadolint(LAUNCH / name) == ""
    broken = tmp_path / name
    broken.write_text((LAUNCH / name).read_text().replace("FROM ", "FROM debian AS first\nFROM ") + "RUN cd /tmp\n")
    assert {code for code in ("DL3003", "DL3006") if code in hadolint(broken)} == {"DL3003", "DL3006"}
