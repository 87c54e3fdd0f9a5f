"""tests/warm.py: a program sees the same process as after a cold start."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
from conftest import ROOT, run, started

PROGRAM = """
import json, os, sys
print(json.dumps([__name__, sys.argv, os.getcwd(), os.environ["EASEL_A"], os.environ.get("EASEL_B"), sys.path[0]]))
print("said", file=sys.stderr)
sys.exit(json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize("ends_with", [7, None, "a text"])
def test_words_variables_streams_and_code_are_those_of_a_cold_start(tmp_path, monkeypatch, ends_with):
    monkeypatch.delenv("EASEL_B", raising=False)
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    command = [sys.executable, str(path), json.dumps(ends_with), "two words"]
    warm = run(*command, EASEL_A="1")
    monkeypatch.setenv("EASEL_A", "1")
    cold = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (warm.returncode, warm.stdout, warm.stderr) == (cold.returncode, cold.stdout, cold.stderr)
    assert warm.returncode == {7: 7, None: 0, "a text": 1}[ends_with]


def test_an_error_that_nobody_catches_is_a_traceback_and_code_1():
    done = run("python", "-c", "import threading\n1 / 0")
    assert done.returncode == 1 and done.stderr.startswith("Traceback ") and "ZeroDivisionError" in done.stderr


def test_a_signal_ends_it_with_the_code_that_composer_gives_it_once_it_is_imported():
    with started(
        "python", "-c", "import time; print('begun', flush=True); time.sleep(60)", output=subprocess.PIPE
    ) as one:
        assert one.stdout.readline() == "begun\n" and one.poll() is None
        one.send_signal(signal.SIGTERM)
        assert one.wait(timeout=30) == 128 + signal.SIGTERM
    with started(
        "python", "-c", "import time; print('begun', flush=True); time.sleep(60)", output=subprocess.PIPE
    ) as one:
        assert one.stdout.readline() == "begun\n"
        one.kill()
        assert one.wait(timeout=30) == -signal.SIGKILL


def test_the_launchers_ranks_are_its_children_and_its_code_is_theirs(tmp_path):
    program = "import os, sys\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.getppid())\n"
    (tmp_path / "a.py").write_text(program + "sys.exit(3 * int(os.environ['RANK']))\n")
    with started("composer", "-n", "2", str(tmp_path / "a.py"), output=subprocess.PIPE) as launcher:
        printed, said = launcher.communicate(timeout=100)
    assert launcher.returncode == 3 and f"0 2 {launcher.pid}\n" in printed and f"1 2 {launcher.pid}\n" in printed, said
