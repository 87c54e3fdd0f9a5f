"""prepare/look.py: facts against the samples themselves, the contact sheet, what is damaged, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import tree
from PIL import Image
from test_latents import rows
from test_parts import bucket  # noqa: F401  bucket is a fixture

from families import load_family
from families.encoders import build_encoders
from prepare import latents, look
from prepare.shards import COLUMNS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(60, func_only=True),
    pytest.mark.usefixtures("same_number_of_threads"),
]

TINY = ["model.preset=tiny", "model.weights=random", "image_size=64", "batch_size=8"]


@pytest.fixture(scope="module")
def encoded(stage, tmp_path_factory) -> Path:
    """The moments of the dataset, with text states."""
    out = tmp_path_factory.mktemp("look") / "moments"
    assert latents.main([str(stage), str(out), *TINY, "store_text=true"]) == 0
    return out


def facts_of(text: str) -> dict[str, str]:
    """Name -> value of the printed facts."""
    return {line[: look.NAME_WIDTH].rstrip(): line[look.NAME_WIDTH + 1 :] for line in text.splitlines()}


def looked(capsys, *words: object, code: int = 0) -> dict[str, str]:
    """Look, quietly and to this exit code; one sample if not told otherwise: a page of 16 takes a second."""
    capsys.readouterr()
    assert look.main(["samples=1", *map(str, words)]) == code
    captured = capsys.readouterr()
    assert code or captured.err == ""
    return facts_of(captured.out)


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


# --- facts ---


@pytest.mark.long
def test_facts_of_images_are_those_of_the_files_and_the_samples(stage, tmp_path, capsys, monkeypatch):
    before = tree(stage)
    monkeypatch.chdir(tmp_path)
    facts, made = looked(capsys, stage.resolve()), rows(stage)
    assert tree(stage) == before
    files = [stage / shard["raw_data"]["basename"] for shard in shards_of(stage)]
    expected = {"location": str(stage), "made_by": "prepare.shards", "stage": "images", "samples": "48"}
    expected |= {"contact sheet": str(tmp_path / "look.png"), "shards": str(len(files))}
    expected |= {"bytes": f"{sum(file.stat().st_size for file in files):,}", "format: JPEG": "48 of 48 (100 %)"}
    expected["columns"] = ", ".join(f"{name} ({kind})" for name, kind in sorted(COLUMNS.items()))
    expected["read"] = f"48 samples of {len(files)} of {len(files)} shards, whose hashes are right"
    expected |= dict.fromkeys(["unusable samples", "captions that repeat", "keys that repeat"], "0 of 48 (0 %)")
    for name in ("width", "height"):
        values = sorted(row[name] for row in made)
        points = values[23], values[0], values[int(np.ceil(0.95 * 48)) - 1], values[-1]
        expected[f"{name}, px"] = "median {}, least {}, 95 % at most {}, greatest {}".format(*points)
    assert expected.items() <= facts.items()


def shards_of(stage: Path) -> list[dict]:
    return json.loads((stage / "index.json").read_text())["shards"]


# --- which samples ---


@pytest.mark.long
def test_samples_are_spread_over_eight_shards_and_more_only_where_these_hold_too_few():
    sizes = [100, 120, 80] * 20
    few, many = (look.choose_rows(sizes, num, seed=0) for num in (50, 2000))
    assert (len(few), *(sum(map(len, chosen.values())) for chosen in (few, many))) == (8, 50, 2000)
    assert 17 <= len(many) <= 24  # 2000 of 80 to 120 each
    for chosen in (few, many):
        assert list(chosen) == sorted(chosen)
        for shard, of in chosen.items():
            assert of == sorted(set(of)) and of[0] >= 0 and of[-1] < sizes[shard]
    assert look.choose_rows(sizes, 50, seed=0) == few != look.choose_rows(sizes, 50, seed=1)
    assert look.choose_rows([3, 0, 2], 9, seed=0) == {0: [0, 1, 2], 2: [0, 1]}


# --- the picture ---


def test_moments_are_decoded_from_their_mean_by_the_vae_in_the_range_of_their_images(encoded):
    family = load_family("sd2", "tiny", "stock")
    vae = build_encoders(family, "random").modules["vae"]
    stored = [row["moments"] for row in rows(encoded)[:2]]
    with torch.no_grad():
        for normalize in ("symmetric", "unit"):
            for values, shown in zip(stored, look.decode_moments(family, vae, stored, normalize), strict=True):
                image = vae.decode(torch.from_numpy(values[:4].astype(np.float32))[None]).sample[0]
                unit = (image / 2 + 0.5 if normalize == "symmetric" else image).clamp(0, 1)
                expected = (unit.permute(1, 2, 0).numpy() * 255).round()
                assert shown.shape == (64, 64, 3) and np.abs(shown - expected).max() <= 1  # rounding at a half


# --- stages that are damaged, or elsewhere ---


# --- keys, and what is refused ---
