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
    "sky": ("skypilot.yaml", "recover_on_exit_codes", "recover_on_codes"),
    "jobset": ("kubernetes.yaml", "maxRestarts", "restarts"),
    "kubernetes": ("kubernetes.yaml", "backoffLimit", "backLimit"),
}
"""A tool -> its file, a key in it, and a wrong name for that."""


def test_the_tools_accept_our_files_and_refuse_faults_in_them(tmp_path):
    """In one process of theirs: loading SkyPilot takes seconds."""
    asked = []
    for tool, (file, key, wrong) in CASES.items():
        content = (LAUNCH / file).read_text()
        asked += [(tool, content), (tool, content.replace(key, wrong))]
    env = {**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    words = [f"{PROGRAMS}/python", "tests/launch_file_checks.py"]
    ways = dict(cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    done = subprocess.run(words, input=json.dumps(asked), **ways)
    assert done.returncode == 0, done.stderr
    problems = json.loads(done.stdout.splitlines()[-1])
    assert problems[::2] == [None] * len(CASES)
    assert all(wrong in (text or "") for (*_, wrong), text in zip(CASES.values(), problems[1::2], strict=True)), (
        problems
    )


def hadolint(path: Path) -> str:
    done = subprocess.run([f"{PROGRAMS}/hadolint", path], capture_output=True, text=True, timeout=60)
    return done.stdout + done.stderr


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.rocm"])
def test_hadolint_has_nothing_against_our_dockerfiles_and_sees_a_fault(name, tmp_path):
    assert hadolint(LAUNCH / name) == ""
    broken = tmp_path / name
    broken.write_text((LAUNCH / name).read_text().replace("FROM ", "FROM debian AS first\nFROM ") + "RUN cd /tmp\n")
    assert {code for code in ("DL3003", "DL3006") if code in hadolint(broken)} == {"DL3003", "DL3006"}
