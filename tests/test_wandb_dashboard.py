"""reports/wandb_dashboard.py with wandb-workspaces, which `make test-dashboard` has beside the environment."""

from __future__ import annotations

import importlib.util
import json

import pytest

from reports import wandb_dashboard

HAS = importlib.util.find_spec("wandb_workspaces") is not None


@pytest.mark.skipif(not HAS, reason="wandb-workspaces: make test-dashboard has it")
@pytest.mark.timeout(60, func_only=True)
def test_the_view_has_the_sections_and_metrics_of_the_dashboard():
    text = wandb_dashboard.workspace("team", "shapes", grouped=True)._to_model().spec.model_dump_json(by_alias=True)
    sections = json.loads(text)["section"]["panelBankConfig"]["sections"]
    assert [section["name"] for section in sections] == list(wandb_dashboard.SECTIONS)
    assert [name for name in wandb_dashboard.metrics() if name not in text.replace(".+", "NAME")] == []
