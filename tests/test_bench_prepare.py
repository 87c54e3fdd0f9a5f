"""bench/prepare.py: its record, from a small run of each contestant."""

from __future__ import annotations

import importlib.util
import json

import pytest

from bench import prepare

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300, func_only=True)]


@pytest.mark.usefixtures("same_number_of_threads")
def test_the_record_has_rates_parts_of_the_time_and_bytes(tmp_path, capsys):
    keys = ["num_images=32", "num_encoded=4", "image_size=64", "preset=tiny", "rounds=2"]
    assert prepare.main([*keys, f"results={tmp_path / 'record.json'}"]) == 0
    record = json.loads((tmp_path / "record.json").read_text())
    has_ray = importlib.util.find_spec("ray") is not None
    rates = ["shards_local_per_sec", "latents_per_sec", *(["shards_ray_per_sec", "ray_over_local"] if has_ray else [])]
    assert all(0 < record[f"{name}_min"] <= record[name] <= record[f"{name}_max"] for name in rates)
    assert ("ray_over_local" in record) == has_ray
    for of, kinds in {"shards": ("decode", "write"), "latents": ("decode", "encode", "write")}.items():
        assert all(0 < record[f"{of}_{kind}_frac"] < 1 for kind in kinds)
    # Moments of 512 pixels: 8 x 64 x 64 in two bytes or four, and little beside them.
    assert 1 < record["bytes_ours"] / 65_536 < 1.02 and 1 < record["bytes_reference"] / 131_072 < 1.05
    assert "images -> moments" in capsys.readouterr().out
