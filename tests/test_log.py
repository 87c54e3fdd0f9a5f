"""What is logged on stderr, by rank 0 or by one rank; tables as text; and which modules are commands."""

from __future__ import annotations

import logging

import pytest
from test_layout import module_of, sources

from common.log import EVERY_RANK, log, render_table

COMMANDS = sorted(module_of(path) for path in sources() if "\n@command(" in path.read_text())


@pytest.mark.parametrize("rank", ["0", "3", None])
def test_one_rank_speaks_unless_a_line_is_of_one_rank(rank, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    if rank is not None:
        monkeypatch.setenv("RANK", rank)
    log.info("of the run: 100 %s")
    log.info("of this rank", extra=EVERY_RANK)
    said = ["of this rank"] if rank == "3" else ["of the run: 100 %s", "of this rank"]
    assert capsys.readouterr().err.splitlines() == said


def test_the_libraries_loggers_do_not_say_it_again(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [logging.StreamHandler()])
    log.info("once")
    assert capsys.readouterr().err == "once\n"


def test_cells_are_shown_as_they_are_given_none_as_a_dash_and_no_line_ends_in_blanks():
    rows = [("a", "1,234", "x y"), ("longer", 0.10, None), ("1e3", "007", "z")]
    expected = ["what     ours  note", "a       1,234  x y", "longer    0.1  -", "1e3       007  z"]
    assert render_table(("what", "ours", "note"), rows, "lrl").splitlines() == expected
    assert render_table(("what", "ours"), [], "lr") == "what  ours"


def test_the_commands_are_all_there():
    assert {"benchmark", "eval", "prepare.shards", "prepare.doctor", "bench.ladder", "reports.mlperf"} <= set(COMMANDS)
    main = {module_of(path) for path in sources() if "\ndef main(argv" in path.read_text()}
    assert main == set(COMMANDS)
