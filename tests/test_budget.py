"""Each test that starts a run has a limit in seconds, and the limit holds."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest
from budget import OF_FILES
from conftest import ROOT, run

TESTS = """
import contextlib, time, pytest

@pytest.fixture
def made_for_others():
    time.sleep(1.2)

@pytest.mark.budget(1)
def test_within(made_for_others):
    pass

@pytest.mark.budget(1)
def test_hangs():
    time.sleep(60)

@pytest.mark.budget(1)
def test_hangs_and_lets_nothing_out():
    with contextlib.suppress(BaseException):
        time.sleep(60)

@pytest.mark.budget(30)
def test_fails_in_time():
    assert 1 == 2
"""

COMMANDS = ("run", "started", "subprocess.run", "subprocess.Popen")


def is_start(node: ast.AST) -> bool:
    """Whether a call trains: benchmark.main in this process, or the launcher or benchmark.py in one of its own."""
    if not isinstance(node, ast.Call):
        return False
    words = ast.unparse(node).replace(ast.unparse(node.func), "", 1)
    is_command = ast.unparse(node.func) in COMMANDS and ("'composer'" in words or "'benchmark.py'" in words)
    return is_command or ast.unparse(node.func) == "benchmark.main"


def test_a_test_over_its_budget_is_interrupted_and_fails_with_budget_and_time(tmp_path):
    """The time of fixtures is not its own; one that fails within its budget fails for its own reason."""
    (tmp_path / "test_it.py").write_text(TESTS)
    words = [
        "-q",
        "-c",
        str(ROOT / "pyproject.toml"),
        f"--rootdir={tmp_path}",
        "-p",
        "budget",
        "-p",
        "no:cacheprovider",
    ]
    done = run(
        sys.executable, "-m", "pytest", *words, str(tmp_path), timeout=50, PYTHONPATH=str(ROOT / "tests"), COLUMNS="300"
    )
    assert done.returncode == 1 and "3 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    summary = [line for line in done.stdout.splitlines() if line.startswith("FAILED")]
    assert [line.split("::")[1].split(" - ")[0] for line in summary] == [
        "test_hangs",
        "test_hangs_and_lets_nothing_out",
        "test_fails_in_time",
    ]
    for line in summary[:2]:
        assert " s, of 1 s that it may take." in line and 1.0 <= float(line.split("budget: ")[1].split()[0]) < 20.0
    assert "assert 1 == 2" in summary[2]


def without_budget(path: Path) -> list[str]:
    """The tests of a file that start a run, or are marked slow, and have no budget."""
    tree = ast.parse(path.read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    fixtures = {
        name
        for name, node in functions.items()
        if any("pytest.fixture" in ast.unparse(each) for each in node.decorator_list)
    }
    of_file = " ".join(
        ast.unparse(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    )

    def starts(name: str, seen: frozenset[str] = frozenset()) -> bool:
        nodes = list(ast.walk(functions[name]))
        called = {node.id for node in nodes if isinstance(node, ast.Name)} & functions.keys() - fixtures
        return any(map(is_start, nodes)) or any(starts(other, seen | {name}) for other in called - seen - {name})

    found = []
    for name, function in functions.items():
        marks = of_file + " ".join(map(ast.unparse, function.decorator_list))
        if name.startswith("test_") and "mark.budget(" not in marks and ("mark.slow" in marks or starts(name)):
            found.append(f"{path.name}: {name}")
    return found


def test_every_test_that_starts_a_run_has_a_budget():
    files = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if path.name not in OF_FILES]
    assert [text for path in files for text in without_budget(path)] == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def test_a(): benchmark.main([])", ["test_a"]),
        ("def main(*w): return benchmark.main(w)\ndef test_a(): assert main() == 0", ["test_a"]),
        ("def test_a(): run('composer', '-n', '2')", ["test_a"]),
        ("@pytest.mark.slow\ndef test_a(): pass", ["test_a"]),
        ("pytestmark = [pytest.mark.slow]\ndef test_a(): pass\ndef helper(): pass", ["test_a"]),
        ("@pytest.mark.budget(9)\ndef test_a(): benchmark.main([])\ndef test_b(): pass", []),
        ("pytestmark = pytest.mark.budget(9)\n@pytest.mark.slow\ndef test_a(): pass", []),
    ],
)
def test_the_rule_sees_a_test_without_one(tmp_path, text, found):
    (tmp_path / "test_x.py").write_text(text)
    assert without_budget(tmp_path / "test_x.py") == [f"test_x.py: {name}" for name in found]
