"""The records under reports/results: each is of a commit that everybody can check out, with one exception."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT

RESULTS = ROOT / "reports/results"
NOT_IN_HISTORY = "dfd43805"
"""The tree that ran on an H200: its commit never landed, its files came into the history with fbd7033 (reports/NOTES.md)."""


def named_commits(content: Any) -> Iterator[str]:
    """Yield every commit that a record names, at any depth."""
    if isinstance(content, dict):
        if isinstance(commit := content.get("commit"), str):
            yield commit
        content = list(content.values())
    if isinstance(content, list):
        for value in content:
            yield from named_commits(value)


def commits_of_records() -> dict[str, set[str]]:
    """Return the file of each record that names a commit, and those that it names."""
    found = {}
    for path in sorted([*RESULTS.rglob("*.json"), *RESULTS.rglob("*.jsonl")]):
        lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
        if commits := {commit for line in lines for commit in named_commits(json.loads(line))}:
            found[str(path.relative_to(RESULTS))] = commits
    return found


def test_every_record_is_of_a_commit_in_the_history():
    """One of a tree with changes is of code that nobody has. Make it again from a clean tree; its command is in docs/."""

    def git(*words: str) -> str:
        command = ["git", "-C", str(ROOT), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    records = commits_of_records()
    assert len(records) > 20
    assert [name for name, commits in records.items() if any("+" in commit for commit in commits)] == []
    try:
        is_whole = git("rev-parse", "--is-shallow-repository").strip() == "false"
        history = set(git("rev-list", "HEAD").split())
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no git, or no checkout")
    if not is_whole:
        pytest.skip("the history was cut: git fetch --unshallow")
    named = {(name, commit) for name, commits in records.items() for commit in commits}
    assert {of for of in named if of[1] not in history and not of[1].startswith(NOT_IN_HISTORY)} == set()
