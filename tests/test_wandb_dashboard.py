"""reports/wandb_dashboard.py with wandb-workspaces, which `make test-loggers` has beside the environment."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from reports import wandb_dashboard
from run_folder.metric_names import SAMPLES, row_of

HAS = importlib.util.find_spec("wandb_workspaces") is not None
with_workspaces = pytest.mark.skipif(not HAS, reason="wandb-workspaces: make test-loggers has it")


def named_in(content: Any) -> set[str]:
    """What the panels of a view name: on their axes, as pictures, by an expression."""
    if isinstance(content, list):
        return {name for part in content for name in named_in(part)}
    if not isinstance(content, dict):
        return set()
    lists = [content.get(key, ()) for key in ("metrics", "mediaKeys")]
    texts = [
        content[key].replace(".+", "NAME") for key in ("xAxis", "metricRegex") if isinstance(content.get(key), str)
    ]
    found = {name for names in [*lists, texts] for name in names if isinstance(name, str)}
    return found | {name for part in content.values() for name in named_in(part)}


@with_workspaces
@pytest.mark.timeout(60, func_only=True)
def test_the_view_names_what_the_dashboard_says_and_nothing_else():
    made = wandb_dashboard.workspace("team", "shapes", grouped=True)
    view = json.loads(made._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    sections = view["section"]["panelBankConfig"]["sections"]
    named = named_in([panel["config"] for section in sections for panel in section["panels"]])
    assert named == set(wandb_dashboard.metrics()) and SAMPLES in named and all(map(row_of, named))
    assert [section["name"] for section in sections] == list(wandb_dashboard.SECTIONS)
    assert view["section"]["runSets"][0]["grouping"] == [{"section": "run", "name": "group"}]


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
