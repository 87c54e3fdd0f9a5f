"""reports/wandb_dashboard.py with wandb-workspaces, which `make test-loggers` has beside the environment."""

from __future__ import annotations

import importlib.util

from reports import wandb_dashboard


def test_other_words_and_a_missing_package_are_refused(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    missing = "wandb-workspaces is not installed, which the dashboard is made with. Run: pip install --no-deps -r "
    for words, text in (
        (["team"], "command line: 'team'. Possible: ENTITY/PROJECT, then grouped=true."),
        (["a/b", "x"], "command line: 'a/b x'. Possible: ENTITY/PROJECT, then grouped=true."),
        (["a/b"], missing),
    ):
        assert wandb_dashboard.main(words) == 2
        assert capsys.readouterr().err.startswith(text)
