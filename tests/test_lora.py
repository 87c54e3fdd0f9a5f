"""LoRA in a model: the adapter alone is trained, plain diffusers draws the same with it, and what is refused.

Whole runs are in tests/test_lora_runs.py.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from conftest import TINY_RUN, with_frames
from exported_runs import run_without_project, save_pipeline
from test_families import CAPTIONS, TRAINED, every_network, tiny

import benchmark
from common.errors import ConfigError
from families import lora, pipeline_files
from families.lora import LoraConfig, find_adapted_layers
from families.sampling import prompt_noise
from model import AUTOCAST_DTYPES, LatentDiffusion
from weights.tensors import fingerprint, trained_parameters

pytestmark = [
    pytest.mark.timeout(120, func_only=True),
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight"),  # FLUX's norms, autocast on a CPU
]

RANK = 4
SIZE = (96, 64)


def with_adapter(name: str, variant: str, precision: str = "fp32", **keys) -> LatentDiffusion:
    """A tiny model with an adapter, on the CPU."""
    model = tiny(name, variant)
    config = LoraConfig(**({"rank": RANK} | keys)).resolved(model.family.lora_targets)
    lora.add(model, config, base=fingerprint(model.denoiser), seed=1, base_dtype=AUTOCAST_DTYPES.get(precision))
    return model.to_device(torch.device("cpu"), precision)


def step_batch(model: LatentDiffusion) -> dict[str, torch.Tensor]:
    """A batch of moments and captions with its random numbers, always the same."""
    generator = torch.Generator().manual_seed(0)
    family, size = model.family, with_frames(model.family.name, SIZE, model.family.variant)
    columns, further = family.columns("moments", size), family.passthrough_values(size)
    drawn = ("moments", *family.image_columns(size))
    batch = {n: torch.randn(4, *columns[n].shape, generator=generator) for n in drawn}
    batch |= model.family.tokenize(CAPTIONS) | {n: value.expand(4, *value.shape[1:]) for n, value in further.items()}
    return model.draw(batch, generator)


def base_of(model: LatentDiffusion) -> dict[str, torch.Tensor]:
    """The frozen tensors, under the names of a denoiser without an adapter."""
    parts = model.denoiser.state_dict().items()
    return {name.replace(".base_layer.", "."): t.clone() for name, t in parts if ".lora_" not in name}


# --- a step ---


@pytest.mark.slow
@every_network
def test_a_new_adapter_changes_nothing_and_then_it_alone_is_trained(name, variant):
    plain, model = tiny(name, variant), with_adapter(name, variant)
    batch = step_batch(model)
    # Another graph with the same sums: the kernels may round otherwise, here by some float32 roundings of 6e-8.
    torch.testing.assert_close(plain.loss(plain(batch), batch), model.loss(model(batch), batch), rtol=1e-5, atol=0.0)
    before, start = base_of(model), plain.denoiser.state_dict()
    assert before.keys() == start.keys() and all(torch.equal(before[n], t) for n, t in start.items())
    trained, layers = trained_parameters(model), find_adapted_layers(plain.denoiser, model.family.lora_targets)
    assert len(trained) == 2 * len(layers) > 0 and model.state_dict().keys() == trained.keys()
    sizes = [RANK * (layer.in_features + layer.out_features) for layer in layers.values()]
    assert sum(p.numel() for p in trained.values()) == sum(sizes)
    optimizer, losses, with_gradient = torch.optim.AdamW(trained.values(), lr=1e-2), [], set()
    for _ in range(4):
        loss = model.loss(model(batch), batch)
        optimizer.zero_grad()
        loss.backward()
        with_gradient |= {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
        optimizer.step()
        losses.append(loss.item())
    # A last layer of zeros passes no gradient.
    is_dark = (name, variant) == ("sd2", "mlperf") or name == "prx"
    assert losses[-1] == losses[0] if is_dark else losses[-1] < losses[0]
    last = {"mochi": ".1.attn1.add_q_proj.", "sd3": ".1.attn.add_q_proj."}.get(name)  # their last block makes no text
    unused = {n for n in trained if last is not None and last in n}
    assert with_gradient == (set() if is_dark else set(trained) - unused)
    assert all(torch.equal(tensor, before[n]) for n, tensor in base_of(model).items())


@pytest.mark.slow
@pytest.mark.parametrize(("name", "variant"), TRAINED)
def test_a_base_in_bf16_gives_the_loss_and_gradients_of_one_that_autocast_casts(name, variant):
    """Norms stay as they are, and everything else autocast would have rounded in the same way."""
    cast, plain = with_adapter(name, variant, "bf16"), with_adapter(name, variant)
    plain.to_device(torch.device("cpu"), "bf16")
    dtypes = {n: t.dtype for n, t in cast.denoiser.named_parameters()}
    assert {dtypes[n] for n in dtypes if ".lora_" in n} == {torch.float32}
    assert {dtypes[n] for n in dtypes if ".base_layer." in n} == {torch.bfloat16}
    losses = []
    for model in (cast, plain):
        batch = step_batch(model)
        losses.append(model.loss(model(batch), batch))
        losses[-1].backward()
    # Both round to bfloat16 at the same places; a kernel that sums otherwise moves a rounding of 2^-9 = 0.002 here and there.
    torch.testing.assert_close(*losses, rtol=0.01, atol=0.0)
    for one, two in zip(trained_parameters(cast).values(), trained_parameters(plain).values(), strict=True):
        assert (one.grad - two.grad).norm() <= 0.05 * two.grad.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "variant", "keys"),
    [*((*member, {}) for member in TRAINED), ("sd2", "sd15", {"targets": ["proj_in", "conv1"]})],
    ids=str,
)
def test_a_merged_denoiser_is_a_plain_one_that_draws_what_base_and_adapter_draw(name, variant, keys):
    """Also where a convolution has an adapter."""
    model, generator = with_adapter(name, variant, alpha=6.0, **keys), torch.Generator().manual_seed(0)
    for parameter in trained_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    batch, before, tensors = step_batch(model), base_of(model), lora.tensors(model)
    with torch.no_grad():
        expected = model(batch)["prediction"]
        lora.merge(model)
        torch.testing.assert_close(model(batch)["prediction"], expected, rtol=1e-4, atol=1e-5)
    merged = model.denoiser.state_dict()
    assert merged.keys() == tiny(name, variant).denoiser.state_dict().keys()
    folder = model.family.network_names()["denoiser"](model.denoiser).folder
    layers = [] if keys else find_adapted_layers(model.denoiser, model.family.lora_targets)
    for layer in layers:  # W + B A, the scale in B
        a, b = (tensors[f"{folder}.{layer}.lora_{part}.weight"] for part in "AB")
        torch.testing.assert_close(merged[f"{layer}.weight"], before[f"{layer}.weight"] + b @ a)
    assert keys or len(tensors) == 2 * len(layers)


# --- plain diffusers ---

DRAWING = """
import json, sys, torch
sys.path.append(sys.argv[2])
torch.set_num_threads(1)
from diffusers import DiffusionPipeline
for out, case in json.load(open(sys.argv[1])).items():
    pipeline = DiffusionPipeline.from_pretrained(case["base"])
    pipeline.set_progress_bar_config(disable=True)
    call = dict(case["call"], num_inference_steps=4, output_type="pt", latents=torch.load(case["latents"]))
    plain = pipeline(case["captions"], return_dict=False, **call)[0]
    pipeline.load_lora_weights(case["adapter"])
    torch.save([plain, pipeline(case["captions"], return_dict=False, **call)[0]], out)
"""
MODELS = {"sd2": ("stock", 3.0), "sdxl": ("stock", 5.0), "flux": ("dev", 3.5)}
MODELS |= {"mochi": ("stock", 4.5), "hunyuan_video": ("stock", 6.0), "wan": ("t2v", 5.0)}


def saved(name: str, folder: Path) -> tuple[dict, list[torch.Tensor]]:
    """Write a base as a diffusers folder and its adapter as a file; return what to do with them, and our own images.

    Those of the base alone, of base and adapter, and of the merged denoiser.
    """
    (variant, guidance), sampler = MODELS[name], "ddim" if name in ("sd2", "sdxl") else "euler"
    size = with_frames(name, SIZE, variant)
    model, captions = with_adapter(name, variant, alpha=3.0), ["a red circle", "two dogs on a beach"]
    noise = prompt_noise(0, [0, 1], model.latent_shape)

    def drawn() -> torch.Tensor:
        return model.generate(model.family.tokenize(captions), noise, sampler=sampler, steps=4, guidance=guidance)

    plain, images, folder = tiny(name, variant), [drawn()], folder / name
    save_pipeline(plain, folder / "base", sampler, size)
    generator = torch.Generator().manual_seed(0)
    for parameter in trained_parameters(model).values():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    pipeline_files.write_safetensors(folder / "adapter.safetensors", lora.tensors(model))
    torch.save(model.family.pipeline_latents(noise), folder / "latents.pt")
    images.append(drawn())
    lora.merge(model)
    paths = {"base": "base", "adapter": "adapter.safetensors", "latents": "latents.pt"}
    case = {key: str(folder / path) for key, path in paths.items()}
    return case | {"captions": captions, "call": model.family.pipeline_call(size, guidance)}, [*images, drawn()]


@pytest.mark.long
def test_plain_diffusers_loads_base_and_adapter_and_draws_our_images(tmp_path):
    import peft

    cases, ours = {}, {}
    for name in MODELS:
        cases[str(tmp_path / f"{name}.pt")], ours[name] = saved(name, tmp_path)
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run_without_project([DRAWING, str(tmp_path / "cases.json"), str(Path(peft.__file__).parent.parent)], tmp_path)
    for name, (base, adapted, merged) in ours.items():
        drawn = torch.load(tmp_path / f"{name}.pt")
        plain, theirs = (images.transpose(1, 2) if images.ndim == 5 else images for images in drawn)
        for one, two in ((base, plain), (adapted, theirs), (merged, theirs)):
            assert float((one - two).abs().max()) < 5e-5, name
        assert float((base - adapted).abs().max()) > 0.05, name


# --- what it takes ---


# --- refused ---


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("lora.rank=0", "command line: lora.rank is 0. Possible: 1 to 4,096 or null."),
        ("lora.alpha=8", "lora.alpha: 8.0, but lora.rank is not given, and no adapter is trained."),
        (
            "lora.rank=4 lora.targets=[too_k]",
            "lora.targets: no linear layer or convolution of the denoiser ends in too_k",
        ),
        (
            "lora.rank=17",
            "lora.rank: 17, but down_blocks.0.attentions.0.transformer_blocks.0.attn2.to_k has 16 inputs or",
        ),
        (
            "lora.rank=4 data.synthetic=false data.remote=gone",
            "model.denoiser: not given, but lora.rank=4: random weig",
        ),
    ],
)
def test_an_impossible_adapter_is_refused_with_what_is_possible(words, problem, capsys):
    assert benchmark.main([*TINY_RUN, "data.synthetic=true", *words.split()]) == 2
    assert f"\n{problem}" in f"\n{capsys.readouterr().err}"


def test_a_file_for_comfyui_has_its_names_for_some_transformers_and_none_for_others():
    """For UNets: tests/test_lora_runs.py."""
    prefixes = {("flux", "dev"): "lora_transformer_", ("sd3", "large"): "lora_transformer_"}
    for (family, variant), prefix in (prefixes | {("qwen_image", "stock"): "lycoris_"}).items():
        names = lora.comfyui_tensors(with_adapter(family, variant))
        assert {name.partition(".")[0].startswith(prefix) for name in names} == {True}
        assert f"{prefix}transformer_blocks_0_attn_to_out_0.lora_up.weight" in names
    text = r"^lora: comfyui, but ComfyUI does not find the layers of wan by their names here\. Possible"
    with pytest.raises(ConfigError, match=text):
        lora.comfyui_tensors(with_adapter("wan", "t2v"))
