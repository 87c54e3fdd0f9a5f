"""Runs with LoRA: the adapter alone in checkpoints, resumed bit for bit, on two ranks, exported, scored; what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from diffusers import StableDiffusionXLPipeline
from diffusers.utils import convert_state_dict_to_kohya
from exported_runs import CASES
from hub_server import TOKEN, Hub
from PIL import Image
from safetensors.torch import load_file
from test_export import SHORT, train
from test_families import DECAY, RUN, resume_from_second_batch
from test_lora import RANK, with_adapter

import benchmark
import eval as scoring
import export
from checkpointing.files import FULL, list_checkpoints, read_checkpoint
from families.pipeline_files import write_safetensors
from reports.model_card import Card
from weights.hub_names import SDXL

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200, func_only=True)]

LORA = (f"lora.rank={RANK}", "lora.alpha=2")


@pytest.mark.parametrize(("name", "variant"), [pytest.param("sdxl", "stock", marks=pytest.mark.long), ("flux", "dev")])
def test_a_run_saves_and_averages_its_adapter_alone_and_resumes_bit_for_bit(name, variant, tmp_path):
    words = [*RUN, *LORA, f"model.family={name}", f"model.variant={variant}", f"run_folder={tmp_path}"]
    words += ["data.synthetic=true", "data.stage=moments"]
    assert benchmark.main([*words, "run_name=whole"]) == 0
    contents = [read_checkpoint(path) for path in list_checkpoints(tmp_path / "whole/checkpoints", FULL)]
    names = set(with_adapter(name, variant).state_dict())
    for content in contents:
        assert set(content["model"]) == set(content["ema"]["weights"]) == names
        assert sum(map(len, content["optimizer"]["names"])) == len(content["optimizer"]["state"]) == len(names)
        assert content["identity"]["lora.rank"] == RANK and content["identity"]["denoiser_start"]
    for key, average in contents[0]["ema"]["weights"].items():
        assert contents[0]["model"][key].any()
        one, two = contents[1]["ema"]["weights"][key].double(), contents[0]["model"][key].double()
        expected = DECAY * one + (1 - DECAY) * two
        torch.testing.assert_close(average.double(), expected, rtol=1e-5, atol=1e-7)
    resume_from_second_batch(words, tmp_path)


# --- out of a run ---


@pytest.fixture(scope="module")
def tuned(tmp_path_factory) -> tuple[Path, Path]:
    """A base, as the export of a tiny SDXL, and a run with an adapter on it."""
    folder = tmp_path_factory.mktemp("tuned")
    base = train(folder, "first", *CASES["sdxl"], *SHORT)
    assert export.main([str(base), str(folder / "base")]) == 0
    begun = [f"model.denoiser={folder / 'base'}", f"model.weights={folder / 'base'}", "optimizer.lr=0.05", *LORA]
    return folder / "base", train(folder, "tuned", *CASES["sdxl"], *begun)


def other_base(base: Path, at: Path) -> Path:
    """A copy of a base with one changed tensor."""
    shutil.copytree(base, at)
    file = at / "unet/diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).add_(1.0)
    write_safetensors(file, tensors)
    return at


def said_in_refusal(command, capsys, *words: object) -> str:
    capsys.readouterr()
    assert command.main([str(word) for word in words]) == 2
    return capsys.readouterr().err.rstrip("\n")


@pytest.mark.long
def test_a_merged_export_is_base_plus_product_and_an_adapter_is_written_alone(tuned, tmp_path, capsys):
    base, folder = tuned
    merged, file, kohya_file = (tmp_path / name for name in ("merged", "adapter.safetensors", "kohya.safetensors"))
    for out, words in ((merged, []), (file, ["lora=separate"]), (kohya_file, ["lora=comfyui"])):
        assert export.main([str(folder), str(out), *words]) == 0
    before, after = (load_file(at / "unet/diffusion_pytorch_model.safetensors") for at in (base, merged))
    adapter, kohya = load_file(file), load_file(kohya_file)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    layers = {name.removeprefix("unet.").removesuffix(".lora_A.weight") for name in adapter if ".lora_A." in name}
    assert changed == {f"{layer}.weight" for layer in layers} and len(adapter) == 2 * len(layers)
    read, alphas = StableDiffusionXLPipeline.lora_state_dict(dict(kohya))[:2]  # diffusers reads A1111's names too
    assert kohya.keys() == convert_state_dict_to_kohya(dict(adapter)).keys()
    assert len(read) == 2 * len(layers) == 2 * len(alphas)
    for layer in layers:
        product = adapter[f"unet.{layer}.lora_B.weight"] @ adapter[f"unet.{layer}.lora_A.weight"]
        torch.testing.assert_close(after[f"{layer}.weight"], before[f"{layer}.weight"] + product)
        at = "lora_unet_" + layer.replace(".", "_")
        up, down, alpha = (kohya[f"{at}.{part}"] for part in ("lora_up.weight", "lora_down.weight", "alpha"))
        torch.testing.assert_close(alpha / RANK * up @ down, product)
    facts = json.loads((merged / "export.json").read_text())
    assert facts["lora"]["rank"] == RANK and facts["weights"] == "ema" and facts["denoiser_start"] == str(base)
    drawn, options = [], [f"eval.{key}={facts[key]}" for key in ("sampler", "steps", "guidance")]
    for number, at in enumerate((folder, merged)):  # eval.py has the adapter beside its base in the run
        assert scoring.main([str(at), f"images={tmp_path}/{number}", "prompts=[a red circle]", *options]) == 0
        [path] = (tmp_path / str(number)).glob("0*.png")
        drawn.append(np.asarray(Image.open(path)).astype(int))
    assert np.abs(drawn[0] - drawn[1]).max() <= 1 and drawn[0].std() > 10


@pytest.mark.long
def test_a_run_resumes_only_with_its_rank_and_its_base(tuned, tmp_path, capsys):
    base, folder = tuned
    text = said_in_refusal(benchmark, capsys, folder / "config.yaml", "lora.rank=2")
    assert f"lora.rank: 2, but {folder} was begun with {RANK}. A run resumes as it began" in text
    copy, other = tmp_path / "tuned", other_base(base, tmp_path / "other")
    shutil.copytree(folder, copy)
    (copy / "summary.json").unlink()
    config = (copy / "config.yaml").read_text()  # as if what lies at the base's place had changed
    (copy / "config.yaml").write_text(config.replace(f"denoiser: {base}", f"denoiser: {other}"))
    full = list_checkpoints(copy / "checkpoints", FULL)[0]
    text = said_in_refusal(benchmark, capsys, copy / "config.yaml", f"run_folder={tmp_path}", "max_duration=6ba")
    assert f"but the adapter in {full} was trained on" in text and "Give that base, or another run." in text
    text = said_in_refusal(export, capsys, folder, tmp_path / "out", f"model.denoiser={other}")
    assert "was trained on" in text and "Give that base, or another run." in text


@pytest.mark.long
def test_an_adapter_is_uploaded_under_diffusers_name_with_a_card(tuned, hub: Hub, tmp_path, monkeypatch, capsys):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    base, folder = tuned
    file, out, words = tmp_path / "a.safetensors", tmp_path / "adapter", ["lora=separate", "push_to_hub=easel/dog"]
    assert export.main([str(folder), str(file), "lora=separate"]) == 0
    for _ in range(2):  # an earlier export of the run is replaced
        assert export.main([str(folder), str(out), *words]) == 0, capsys.readouterr().err
    assert f"hub={hub.address}/easel/dog" in capsys.readouterr().out
    model, adapter = hub.models["easel/dog"], load_file(file)
    files = {"README.md", "export.json", "pytorch_lora_weights.safetensors", "run_config.yaml"}
    assert model.commits[model.refs["main"]].keys() == files == {path.name for path in out.iterdir()}
    read = StableDiffusionXLPipeline.lora_state_dict(str(out))[0]  # as load_lora_weights reads it
    assert read.keys() == adapter.keys() and all(torch.equal(read[name], adapter[name]) for name in adapter)
    card = (out / "README.md").read_text()
    assert f"from_pretrained('{base}')" in card and "load_lora_weights('easel/dog')" in card
    facts = json.loads((out / "export.json").read_text())
    assert f"base_model: {SDXL}\n" in Card("easel/dog", facts, {}, "a dog", is_adapter=True, base_model=SDXL).text()


# --- recipes ---

KINDS = ("finetune", "dreambooth")
OF_FINE_TUNING = sorted(path.name for kind in KINDS for path in (ROOT / "yamls").glob(f"{kind}*.yaml"))


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in OF_FINE_TUNING if "sd2" not in name])
def test_a_recipe_of_fine_tuning_takes_two_steps_from_published_weights_and_is_exported(name, stage, tmp_path, capsys):
    """In the tiny preset, from the folder of a pipeline as the hub has it."""
    family = name.split("_")[1]
    small = ["image_size=64", "global_batch_size=8", "device_train_microbatch_size=4", "compile=off", "precision=fp32"]
    small += ["data.workers=0", "measure.warmup_batches=0", "loggers.progress_bar=false", f"run_folder={tmp_path}"]
    first = ["model.preset=tiny", f"model.family={family}", "model.weights=random", "data.synthetic=true"]
    assert benchmark.main([*first, *small, "max_duration=1ba", "save.every_images=8", "run_name=first"]) == 0
    assert export.main([str(tmp_path / "first"), str(tmp_path / "base")]) == 0
    own = ["model.preset=tiny", f"model.weights={tmp_path / 'base'}", f"model.denoiser={tmp_path / 'base'}"]
    own += [f"data.remote={stage}", "max_duration=2ba", "run_name=tuned"]
    own += ["samples.every_images=16", "eval.steps=2"] if "_lora" in name else []
    assert benchmark.main([str(ROOT / "yamls" / name), *small, *own]) == 0, capsys.readouterr().err
    summary = json.loads((tmp_path / "tuned/summary.json").read_text())
    base = json.loads((tmp_path / "base/export.json").read_text())
    assert summary["denoiser_start_fingerprint"] == base["denoiser_fingerprint"] and 0 < summary["loss"] < 10
    assert export.main([str(tmp_path / "tuned"), str(tmp_path / "out")]) == 0
    code = export.main([str(tmp_path / "tuned"), str(tmp_path / "adapter.safetensors"), "lora=separate"])
    assert code == (0 if "_lora" in name else 2)
    assert len(list((tmp_path / "tuned").glob("samples/*.png"))) == (2 if "_lora" in name else 0)
