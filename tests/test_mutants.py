"""The table of mutants fits the code: every fault can be made, and its outcome is reported correctly."""

from __future__ import annotations

import ast
import subprocess

import mutants
import pytest
from conftest import ROOT
from mutants import Mutant, read_table


def test_mutants_are_numbered_in_order_and_each_can_be_made():
    table = read_table()
    assert [mutant.number for mutant in table] == list(range(1, len(table) + 1))
    assert [text for mutant in table for text in mutant.problems()] == []
    for mutant in table:
        source = (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(source.replace(mutant.old, mutant.new))), mutant


def test_a_text_that_is_not_found_once_and_a_file_that_is_not_there_are_named():
    mutant = Mutant(1, "ema.py", ("tests/test_none.py",), "", "import", "")
    [found, missing] = mutant.problems()
    assert found.startswith("mutant 1: ema.py has 'import' ") and found.endswith(" times, not once.")
    assert missing == "mutant 1: there is no tests/test_none.py."
    assert Mutant(2, "none.py", (), "", "a", "b").problems() == ["mutant 2: none.py has 'a' 0 times, not once."]


def test_words_that_are_not_possible_are_refused(capsys):
    for words in ([], ["pass=again"], ["list", "number=1"], ["base", "pass=before"]):
        assert mutants.main(words) == 2
        assert f"mutants: '{' '.join(words)}' is not possible." in capsys.readouterr().err
    assert mutants.main(["list", "numbers=3,41"]) == 2
    assert capsys.readouterr().err == "numbers: there is no mutant 41.\n"


@pytest.mark.slow
@pytest.mark.timeout(120, func_only=True)
def test_a_mutant_is_killed_or_survives_or_times_out(tmp_path, monkeypatch):
    """In a project of one function and two tests, which stays as it is."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "half.py").write_text("def half(n):\n    return n / 2\n")
    test = "from half import half\n\ndef test_two():\n    assert half(2) == 1\n\ndef test_four():\n    assert half(4) == 2\n"
    (tmp_path / "tests" / "test_half.py").write_text(test)
    (tmp_path / "pyproject.toml").write_text(
        '[tool.pytest.ini_options]\npythonpath = ["."]\nmarkers = ["slow", "gpu"]\naddopts = "-ra"\n'
    )
    for words in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True, timeout=60)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)

    def outcome(new: str, limit_sec: int = 60) -> tuple[str, str | None]:
        mutant = Mutant(1, "half.py", ("tests/test_half.py",), "", "return n / 2", new)
        return mutants.outcome_of(mutant, mutant.tests, limit_sec)[:2]

    assert outcome("return n - 1") == ("killed", "tests/test_half.py::test_four")
    assert outcome("return 0.5 * n") == ("survived", None)
    assert outcome("while True: pass", limit_sec=5) == ("timed out", None)
    assert "return n / 2" in (tmp_path / "half.py").read_text()
