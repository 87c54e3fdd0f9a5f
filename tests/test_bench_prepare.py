"""bench/prepare.py: its record, from a small run of each contestant."""

from __future__ import annotations

import importlib.util
import json

import pytest

from bench import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600, func_only=True)]


def test_the_record_has_rates_parts_of_the_time_and_bytes(tmp_path, capsys):
    keys = ["num_images=32", "num_encoded=16", "image_size=64", "preset=tiny", "rounds=1"]
    assert prepare.main([*keys, f"results={tmp_path / 'record.json'}"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    has_ray = importlib.util.find_spec("ray") is not None
    kinds = {"local": ["decode", "write", "rest"], "latents": ["wait_for_decoding", "encode", "write", "rest"]}
    kinds |= {"ray": kinds["local"]} if has_ray else {}
    for name, own in kinds.items():
        assert 0 < record[f"{name}_per_sec_min"] <= record[f"{name}_per_sec"] <= record[f"{name}_per_sec_max"]
        assert record[f"{name}_command_sec"] > 0
        parts = [record[f"{name}_{kind}_frac"] for kind in own]
        assert all(0 <= part < 1 for part in parts) and sum(parts) == pytest.approx(1, abs=0.01)
    assert ("ray_over_local" in record) == has_ray
    # Moments of 512 pixels: 8 x 64 x 64 in two bytes or four, and little beside them.
    assert 1 < record["bytes_ours"] / 65_536 < 1.02 and 1 < record["bytes_reference"] / 131_072 < 1.05
    assert "images -> moments" in capsys.readouterr().out
