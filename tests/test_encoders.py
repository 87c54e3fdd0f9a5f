"""Published weights in use: the same encoders from any file, known by fingerprints."""

from __future__ import annotations

import pytest
import torch
from test_published_weights import tiny_networks, whole_ldm_file, write
from transformers import CLIPTextConfig

from families import load_family
from families.encoders import build_encoders, weights_problems
from weights.encoder_networks import build_clip_text


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


def test_random_text_encoders_are_those_of_transformers_4_number_for_number():
    """Its successor draws in another order: runs with random encoders would be other ones.

    The sum is that of 4.57.6, weighted by place. Without AVX2 torch's normal numbers differ in their last bits.
    """
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CLIPTextConfig(vocab_size=1000, bos_token_id=0, eos_token_id=1, **sizes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = build_clip_text(config)
        drawn_next = torch.rand(1).item()
    weighted = 0.0
    for place, (_, value) in enumerate(sorted(model.named_parameters()), 1):
        weights = torch.linspace(1, 2, value.numel(), dtype=torch.float64)
        weighted += place * (value.detach().double().flatten() * weights).sum().item()
    assert weighted == pytest.approx(6823.852140101677, rel=1e-5) and drawn_next == 0.2904285192489624
