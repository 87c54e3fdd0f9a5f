"""The table of mutants fits the code: every fault can be made."""

from __future__ import annotations

import ast

from conftest import ROOT
from mutants import read_table


def test_mutants_are_numbered_in_order_and_each_can_be_made():
    table = read_table()
    assert [mutant.number for mutant in table] == list(range(1, len(table) + 1))
    assert [text for mutant in table for text in mutant.problems()] == []
    for mutant in table:
        source = (ROOT / mutant.file).read_text()
        assert ast.dump(ast.parse(source)) != ast.dump(ast.parse(source.replace(mutant.old, mutant.new))), mutant
