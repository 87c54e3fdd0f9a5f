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
    "a key that SkyPilot does not know": ("sky", "skypilot.yaml", "use_spot: true", "use_spots: true", "use_spots"),
    "a word for the number of its nodes": ("sky", "skypilot.yaml", "num_nodes: 2", "num_nodes: two", "num_nodes"),
    "a key of its recovery": ("sky", "skypilot.yaml", "recover_on_exit_codes", "recover_on_codes", "recover_on_codes"),
    "a key that JobSet does not know": ("jobset", "kubernetes.yaml", "maxRestarts", "restarts", "restarts=3"),
    "a text for a number of it": ("jobset", "kubernetes.yaml", "maxRestarts: 3", "maxRestarts: three", "maxRestarts"),
    "a key of its pods": ("jobset", "kubernetes.yaml", "envFrom", "envOf", "envOf"),
    "a key that Kubernetes does not know": ("kubernetes", "kubernetes.yaml", "backoffLimit", "backLimit", "backLimit"),
    "a value that it does not take": ("kubernetes", "kubernetes.yaml", "operator: In", "operators: In", "operators"),
}
"""What is tried -> tool, file, a text and what stands in its place, and what the tool has to name."""


@pytest.fixture(scope="module")
def problems(tmp_path_factory) -> dict[str, str | None]:
    """What the tools have against each case, in one process of theirs: loading SkyPilot takes seconds."""
    asked = []
    for tool, file, text, instead, _ in CASES.values():
        content = (LAUNCH / file).read_text()
        assert not text or content.count(text) >= 1
        asked.append((tool, content.replace(text, instead) if text else content))
    home = {"HOME": str(tmp_path_factory.mktemp("home")), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    done = subprocess.run(
        [f"{PROGRAMS}/python", "tests/launch_tools.py"],
        input=json.dumps(asked),
        cwd=ROOT,
        env={**os.environ, **home},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_the_tools_take_our_files_and_refuse_faults_in_them(case, problems):
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
