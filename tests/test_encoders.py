"""Published weights in use: the same encoders from any file, known by fingerprints."""

from __future__ import annotations

import pytest
import torch
from test_published_weights import tiny_networks, whole_ldm_file, write

from families import load_family
from families.encoders import build_encoders, weights_problems


@pytest.fixture(scope="module")
def published(tmp_path_factory) -> dict[str, str]:
    """One tiny SD2 with a UNet as an LDM checkpoint in both kinds of file, and another one."""
    folder = tmp_path_factory.mktemp("published")
    whole = whole_ldm_file(tiny_networks(seed=5))
    return {
        "ckpt": write(whole, folder / "512-base-ema.ckpt"),
        "safetensors": write(whole, folder / "512-base-ema.safetensors"),
        "other": write(whole_ldm_file(tiny_networks(seed=6)), folder / "other.ckpt"),
    }


def test_the_same_weights_have_the_same_fingerprints_in_every_file_and_are_frozen(published):
    family = load_family("sd2", "tiny", "stock")
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    of = {kind: build_encoders(family, path) for kind, path in published.items()}
    assert torch.equal(before, torch.random.get_rng_state())  # nothing is taken from the global generator
    of["random"] = build_encoders(family, "random")
    assert of["ckpt"].fingerprints == of["safetensors"].fingerprints and set(of["ckpt"].fingerprints) == {"vae", "text"}
    assert len({tuple(encoders.fingerprints.values()) for encoders in of.values()}) == 3
    for encoders in of.values():
        assert encoders.notes == [] and not any(module.training for module in encoders.modules.values())
        assert not any(p.requires_grad for module in encoders.modules.values() for p in module.parameters())
    [text] = weights_problems(load_family("sd2", "tiny", "sd15"), published["ckpt"])  # another text encoder
    assert text.startswith("text: ") and "It has " in text and "cond_stage_model.model" in text
