"""weights/ldm.py: names against diffusers' converter and OpenCLIP's own modules, outputs after loading, and what is said."""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from weights import ldm, ldm_names
from weights.clip_text import TextModel, build_text_model
from weights.tensors import fingerprint
from zoo import load_family

TINY_UNETS = {
    "sd2": dict(use_linear_projection=True, cross_attention_dim=16),
    "sd15": dict(use_linear_projection=False, cross_attention_dim=24),
}
SHAPES = {
    "four levels": dict(block_out_channels=(8, 16, 16, 16)),
    "two levels": dict(
        block_out_channels=(8, 16),
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    ),
}


def tiny_unet(kind: str, shape: str = "four levels") -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    sizes = dict(attention_head_dim=2, norm_num_groups=4, layers_per_block=2)
    return UNet2DConditionModel(**sizes, **TINY_UNETS[kind], **SHAPES[shape])


def tiny_text(layers: int = 2, width: int = 16, act: str = "gelu") -> nn.Module:
    from transformers import CLIPTextConfig

    torch.manual_seed(0)
    sizes = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=2)
    config = CLIPTextConfig(vocab_size=49408, max_position_embeddings=77, hidden_act=act, **sizes)
    return build_text_model(config).eval()


def tiny_networks(seed: int = 0) -> dict[str, tuple[nn.Module, ldm_names.Network]]:
    """SD2's three networks in the tiny preset, as the model has them."""
    torch.manual_seed(seed)
    family = load_family("sd2", "tiny", "stock")
    encoders, denoiser = family.build_encoders(), family.build_denoiser()
    modules = {"vae": encoders["vae"].eval(), "text": encoders["text"].eval(), "denoiser": denoiser.eval()}
    places = {"vae": ldm_names.vae, "text": ldm_names.open_clip_text, "denoiser": ldm_names.unet}
    return {label: (module, places[label](module)) for label, module in modules.items()}


def as_ldm(networks: Mapping[str, tuple[nn.Module, ldm_names.Network]]) -> dict[str, torch.Tensor]:
    """What an export writes, which is compared with diffusers' converter and OpenCLIP's modules below."""
    return ldm_names.as_ldm(networks.values())


def last_block(tensors: Mapping[str, torch.Tensor], layers: int = 2) -> dict[str, torch.Tensor]:
    """The text tower's block that SD 2 does not use, its projection and what else stands there."""
    prefix = "cond_stage_model.model."
    begin = f"{prefix}transformer.resblocks.{layers - 1}."
    block = {name.replace(f".{layers - 1}.", f".{layers}."): t for name, t in tensors.items() if name.startswith(begin)}
    return {
        **block,
        f"{prefix}text_projection": torch.ones(16, 16),
        f"{prefix}logit_scale": torch.ones(()),
        f"{prefix}attn_mask": torch.zeros(77, 77),
    }


def whole_ldm_file(networks: Mapping[str, tuple[nn.Module, ldm_names.Network]]) -> dict[str, torch.Tensor]:
    tensors = as_ldm(networks)
    beside = {
        "betas": torch.ones(5),
        "model_ema.decay": torch.ones(()),
        "first_stage_model.loss.logvar": torch.ones(()),
    }
    return {**tensors, **last_block(tensors), **beside}


def write(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save({"global_step": 1, "state_dict": tensors}, path)
    return str(path)


def assert_equal(given: nn.Module | Mapping[str, torch.Tensor], expected: nn.Module):
    given = given.state_dict() if isinstance(given, nn.Module) else given
    expected = expected.state_dict()
    assert given.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(given[name], tensor), name


# --- names ---


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kind", TINY_UNETS)
def test_unet_names_are_those_of_diffusers_converter(kind, shape):
    from diffusers.loaders.single_file_utils import convert_ldm_unet_checkpoint

    module = tiny_unet(kind, shape)
    converted = convert_ldm_unet_checkpoint(as_ldm({"denoiser": (module, ldm_names.unet(module))}), dict(module.config))
    assert_equal(converted, module)


@pytest.mark.parametrize("widths", [(8, 16, 16, 16), (8, 16)])
def test_vae_names_are_those_of_diffusers_converter(widths):
    from diffusers import AutoencoderKL
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    torch.manual_seed(0)
    kinds = dict(
        down_block_types=("DownEncoderBlock2D",) * len(widths), up_block_types=("UpDecoderBlock2D",) * len(widths)
    )
    module = AutoencoderKL(**kinds, block_out_channels=widths, norm_num_groups=4, layers_per_block=2, latent_channels=4)
    tensors = as_ldm({"vae": (module, ldm_names.vae(module))})
    assert tensors["first_stage_model.encoder.mid.attn_1.q.weight"].shape == (16, 16, 1, 1)
    assert_equal(convert_ldm_vae_checkpoint(tensors, dict(module.config)), module)


def test_open_clip_names_are_those_of_diffusers_converter():
    from diffusers.loaders.single_file_utils import convert_open_clip_checkpoint

    module = tiny_text()
    converted = convert_open_clip_checkpoint(module, as_ldm({"text": (module, ldm_names.open_clip_text(module))}))
    converted.pop("text_model.embeddings.position_ids", None)
    assert_equal(converted, module)


KNOWN = """
vae encoder.conv_in.weight                                      encoder.conv_in.weight
vae encoder.down_blocks.1.resnets.0.conv_shortcut.weight        encoder.down.1.block.0.nin_shortcut.weight
vae encoder.down_blocks.2.downsamplers.0.conv.bias              encoder.down.2.downsample.conv.bias
vae encoder.mid_block.resnets.1.norm2.weight                    encoder.mid.block_2.norm2.weight
vae encoder.mid_block.attentions.0.group_norm.weight            encoder.mid.attn_1.norm.weight
vae encoder.conv_norm_out.weight                                encoder.norm_out.weight
vae decoder.mid_block.attentions.0.to_out.0.weight              decoder.mid.attn_1.proj_out.weight
vae decoder.mid_block.attentions.0.to_v.bias                    decoder.mid.attn_1.v.bias
vae decoder.up_blocks.0.resnets.0.conv1.weight                  decoder.up.3.block.0.conv1.weight
vae decoder.up_blocks.2.upsamplers.0.conv.weight                decoder.up.1.upsample.conv.weight
vae decoder.up_blocks.3.resnets.2.norm1.bias                    decoder.up.0.block.2.norm1.bias
vae post_quant_conv.weight                                      post_quant_conv.weight
denoiser conv_in.weight                                         input_blocks.0.0.weight
denoiser time_embedding.linear_2.weight                         time_embed.2.weight
denoiser down_blocks.0.resnets.0.norm1.weight                   input_blocks.1.0.in_layers.0.weight
denoiser down_blocks.0.downsamplers.0.conv.weight               input_blocks.3.0.op.weight
denoiser down_blocks.1.resnets.0.conv_shortcut.weight           input_blocks.4.0.skip_connection.weight
denoiser down_blocks.2.attentions.1.proj_in.weight              input_blocks.8.1.proj_in.weight
denoiser down_blocks.3.resnets.1.time_emb_proj.bias             input_blocks.11.0.emb_layers.1.bias
denoiser mid_block.attentions.0.norm.weight                     middle_block.1.norm.weight
denoiser mid_block.resnets.1.conv2.weight                       middle_block.2.out_layers.3.weight
denoiser up_blocks.0.upsamplers.0.conv.weight                   output_blocks.2.1.conv.weight
denoiser up_blocks.1.upsamplers.0.conv.weight                   output_blocks.5.2.conv.weight
denoiser up_blocks.3.attentions.2.transformer_blocks.0.norm2.bias output_blocks.11.1.transformer_blocks.0.norm2.bias
denoiser conv_norm_out.bias                                     out.0.bias
denoiser conv_out.weight                                        out.2.weight
text text_model.embeddings.token_embedding.weight               token_embedding.weight
text text_model.embeddings.position_embedding.weight            positional_embedding
text text_model.encoder.layers.22.self_attn.q_proj.weight       transformer.resblocks.22.attn.in_proj_weight[0/3]
text text_model.encoder.layers.22.self_attn.v_proj.bias         transformer.resblocks.22.attn.in_proj_bias[2/3]
text text_model.encoder.layers.0.self_attn.out_proj.weight      transformer.resblocks.0.attn.out_proj.weight
text text_model.encoder.layers.0.layer_norm2.weight             transformer.resblocks.0.ln_2.weight
text text_model.encoder.layers.7.mlp.fc1.bias                   transformer.resblocks.7.mlp.c_fc.bias
text text_model.final_layer_norm.weight                         ln_final.weight
"""  # as they stand in 512-base-ema.ckpt


@pytest.fixture(scope="module")
def full_size() -> dict[str, tuple[nn.Module, ldm_names.Network]]:
    import diffusers  # noqa: F401  which imports torch._dynamo, and that fails under another default device

    with torch.device("meta"):
        family = load_family("sd2", "full", "stock")
        vae, text = family.build_encoders().values()
        denoiser = family.build_denoiser()
    return {
        "vae": (vae, ldm_names.vae(vae)),
        "text": (text, ldm_names.open_clip_text(text)),
        "denoiser": (denoiser, ldm_names.unet(denoiser)),
    }


@pytest.mark.parametrize("line", KNOWN.strip().splitlines(), ids=lambda line: line.split()[1])
def test_known_names_of_the_published_sd2_checkpoint(full_size, line):
    label, ours, theirs = line.split()
    module, network = full_size[label]
    assert ours in module.state_dict()
    source = network.source(ours)
    assert source.name + (f"[{source.part}/{source.parts}]" if source.parts > 1 else "") == theirs


def test_the_published_sd2_checkpoint_has_as_many_tensors(full_size):
    """Tensors under each prefix of 512-base-ema.ckpt, less the text encoder's block that is not used and what follows it."""
    counts = {}
    for label, (module, network) in full_size.items():
        sources = [network.source(name) for name in module.state_dict()]
        assert len(set(sources)) == len(sources)
        counts[label] = len({source.name for source in sources})
    assert counts == {"denoiser": 686, "vae": 248, "text": 23 * 12 + 4}


def test_names_are_for_any_depth():
    module = tiny_unet("sd2", "two levels")
    network = ldm_names.unet(module)
    assert network.source("up_blocks.0.upsamplers.0.conv.weight").name == "output_blocks.2.1.conv.weight"
    assert network.source("up_blocks.1.attentions.2.norm.weight").name == "output_blocks.5.1.norm.weight"


# --- an LDM file ---


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_all_networks_come_out_of_an_ldm_file_as_they_went_in(tmp_path, suffix):
    path = write(whole_ldm_file(source := tiny_networks(1)), tmp_path / f"w{suffix}")
    target = tiny_networks(2)
    assert ldm.problems(path, target) == []
    assert ldm.load(path, target) == []
    for label in target:
        assert_equal(target[label][0], source[label][0])


def test_the_encoders_alone_are_read_from_a_file_with_all(tmp_path):
    path = write(whole_ldm_file(source := tiny_networks(1)), tmp_path / "w.ckpt")
    target = tiny_networks(2)
    del target["denoiser"]
    assert ldm.load(path, target) == []
    assert_equal(target["vae"][0], source["vae"][0])


def test_problems_need_no_memory_for_the_modules(full_size, tmp_path):
    path = write(whole_ldm_file(tiny_networks(1)), tmp_path / "w.ckpt")
    assert len(ldm.problems(path, full_size)) == 3


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
def test_text_states_are_those_of_open_clips_tower_before_its_last_block(tmp_path, suffix):
    """The oracle is OpenCLIP itself, run to the last block but one, then its final layer norm: (B, 77, D)."""
    import open_clip
    from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg

    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=1, width=64, head_width=64, patch_size=16, image_size=32)
    tower = CLIP(24, vision, CLIPTextCfg(width=32, heads=4, layers=3)).eval()
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    tokens = open_clip.tokenize(["a cat", "", "word " * 100])
    with torch.no_grad():
        states = tower.token_embedding(tokens) + tower.positional_embedding
        for block in tower.transformer.resblocks[:-1]:
            states = block(states, attn_mask=tower.attn_mask)
        expected = tower.ln_final(states)

    named = {name: t for name, t in tower.state_dict().items() if not name.startswith("visual.")}
    named["attn_mask"] = tower.attn_mask
    path = write({f"cond_stage_model.model.{name}": t for name, t in named.items()}, tmp_path / f"w{suffix}")
    from transformers import CLIPTextConfig

    sizes = dict(hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, hidden_act="gelu")
    module = build_text_model(CLIPTextConfig(vocab_size=49408, max_position_embeddings=77, **sizes)).eval()
    assert ldm.load(path, {"text": (module, ldm_names.open_clip_text(module))}) == []
    with torch.no_grad():
        given = module(input_ids=tokens).last_hidden_state
    assert given.shape == (3, 77, 32)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-5)


def test_sd15s_text_encoder_stands_under_its_own_names(tmp_path):
    source, target = tiny_text(act="quick_gelu"), tiny_text(layers=2, act="quick_gelu")
    nn.init.normal_(target.text_model.final_layer_norm.weight)
    tensors = {f"cond_stage_model.transformer.{name}": t for name, t in source.state_dict().items()}
    tensors["cond_stage_model.transformer.text_model.embeddings.position_ids"] = torch.arange(77)[None]
    path = write(tensors, tmp_path / "w.ckpt")
    assert ldm.load(path, {"text": (target, ldm_names.clip_text(target))}) == []
    assert_equal(target, source)


def test_half_precision_is_widened_and_said(tmp_path):
    source = tiny_networks(1)
    tensors = whole_ldm_file(source)
    path = write({n: t.half() if n.startswith("first") else t for n, t in tensors.items()}, tmp_path / "w.ckpt")
    target = tiny_networks(2)
    assert ldm.load(path, target) == [
        f"vae: stored in float16 at {path}, widened to float32. Values were rounded on the way, so the fingerprint is "
        "not that of weights stored in float32."
    ]
    weight = target["vae"][0].encoder.conv_in.weight
    assert weight.dtype == torch.float32
    assert torch.equal(weight, source["vae"][0].encoder.conv_in.weight.half().float())


# --- a diffusers folder ---


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    """A tokenizer/ as SD 2's folder has it, from the byte-pair table in open_clip."""
    import open_clip.tokenizer as bpe

    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    folder.mkdir()
    renamed = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    encoder = {renamed.get(token, token): number for token, number in bpe.SimpleTokenizer().encoder.items()}
    assert encoder["<|endoftext|>"] == ldm.END_TOKEN == len(encoder) - 1
    (folder / "vocab.json").write_text(json.dumps(encoder, ensure_ascii=False))
    lines = gzip.decompress(Path(bpe.default_bpe()).read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    write_special(folder, "!")
    return folder


def write_special(folder: Path, pad: str):
    special = dict(bos_token="<|startoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>", pad_token=pad)
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "model_max_length": 77}))


def save_folder(root: Path, networks=None, **how) -> str:
    networks = networks or tiny_networks(1)
    for module, network in networks.values():
        saved = module.text_model if isinstance(module, TextModel) else module  # as whoever uses transformers 5 has it
        saved.save_pretrained(root / network.folder, **how)
    return str(root)


def copy_tokenizer(folder: Path, root: Path) -> Path:
    (root / "tokenizer").mkdir(parents=True)
    for path in folder.iterdir():
        (root / "tokenizer" / path.name).write_bytes(path.read_bytes())
    return root / "tokenizer"


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "bin"])
def test_a_diffusers_folder_gives_the_outputs_of_what_was_saved(tmp_path, safe):
    source, target = tiny_networks(1), tiny_networks(2)
    path = save_folder(tmp_path, source, safe_serialization=safe)
    assert ldm.problems(path, target) == []
    assert ldm.load(path, target) == []
    generator = torch.Generator().manual_seed(0)
    images, latents = torch.randn(1, 3, 16, 16, generator=generator), torch.randn(1, 4, 8, 8, generator=generator)
    tokens = torch.randint(0, 49408, (1, 77), generator=generator)

    def outputs(networks):
        vae, text, denoiser = (networks[label][0] for label in ("vae", "text", "denoiser"))
        with torch.no_grad():
            states = text(input_ids=tokens).last_hidden_state
            moments = vae.encode(images).latent_dist.parameters
            return states, moments, vae.decode(latents).sample, denoiser(latents, 7, states).sample

    for given, expected in zip(outputs(target), outputs(source), strict=True):
        assert torch.equal(given, expected)


def test_the_whole_float32_file_comes_before_the_half_precision_one(tmp_path):
    source, target = tiny_networks(1), tiny_networks(2)
    path = save_folder(tmp_path, {k: (m.half(), n) for k, (m, n) in tiny_networks(1).items()}, variant="fp16")
    notes = ldm.load(path, target)
    assert notes == [
        f"vae, text, denoiser: stored in float16 at {path}, widened to float32. Values were rounded on the way, so the "
        "fingerprint is not that of weights stored in float32."
    ]
    save_folder(tmp_path, source, safe_serialization=False)
    assert ldm.load(path, target) == []
    assert_equal(target["text"][0], source["text"][0])


def test_the_attention_of_a_vae_may_have_its_older_names(tmp_path):
    source, target = tiny_networks(1), tiny_networks(2)
    path = save_folder(tmp_path, source)
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    tensors = {}
    for name, tensor in source["vae"][0].state_dict().items():
        for new, old in older.items():
            name = name.replace(f".{new}.", f".{old}.")
        tensors[name] = tensor
    assert "encoder.mid_block.attentions.0.proj_attn.weight" in tensors
    save_file(tensors, tmp_path / "vae/diffusion_pytorch_model.safetensors")
    text = {**source["text"][0].state_dict(), "text_model.embeddings.position_ids": torch.arange(77)[None]}
    save_file(text, tmp_path / "text_encoder/model.safetensors")
    assert ldm.load(path, target) == []
    assert_equal(target["vae"][0], source["vae"][0])


def without_prefix(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name.replace("text_model.", ""): tensor for name, tensor in tensors.items()}


def test_a_text_encoder_saved_by_transformers_5_has_names_without_text_model(tmp_path):
    """In a folder and in a file, with and without what old versions stored beside it: the same weights, the same digest."""
    source, target = tiny_networks(1), tiny_networks(2)
    path, position_ids = save_folder(tmp_path, source), {"text_model.embeddings.position_ids": torch.arange(77)[None]}
    assert all(name.startswith("text_model.") for name in source["text"][0].state_dict())
    text = source["text"][0].state_dict()
    for tensors in (without_prefix(text), without_prefix({**text, **position_ids}), {**text, **position_ids}):
        save_file(tensors, tmp_path / "text_encoder/model.safetensors")
        assert ldm.load(path, target) == []
        assert_equal(target["text"][0], source["text"][0])
    assert fingerprint(target["text"][0]) == fingerprint(source["text"][0])

    of_sd15, other = tiny_text(act="quick_gelu"), tiny_text(act="quick_gelu")
    nn.init.normal_(other.text_model.final_layer_norm.weight)
    named = {f"cond_stage_model.transformer.{name}": tensor for name, tensor in of_sd15.state_dict().items()}
    assert (
        ldm.load(write(without_prefix(named), tmp_path / "w.ckpt"), {"text": (other, ldm_names.clip_text(other))}) == []
    )
    assert_equal(other, of_sd15)


def test_config_json_is_compared_where_no_shape_shows_it(tmp_path):
    path = save_folder(tmp_path)
    target = tiny_networks(2)
    for name, changes in (
        ("vae", {"scaling_factor": 0.13025}),
        ("text_encoder", {"hidden_act": "quick_gelu"}),
        ("unet", {"attention_head_dim": [2, 2, 2, 4]}),
    ):
        config = tmp_path / name / "config.json"
        config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    end = "it is of another model. Give this model's."
    assert ldm.problems(path, target) == [
        f"vae: {path}/vae/config.json has scaling_factor 0.13025, this model's has 0.18215: {end}",
        f"text: {path}/text_encoder/config.json has hidden_act quick_gelu, this model's has gelu: {end}",
        f"denoiser: {path}/unet/config.json has attention_head_dim [2, 2, 2, 4], this model's has (2, 2, 2, 2): {end}",
    ]


def test_one_number_of_heads_is_as_many_equal_ones_and_an_old_key_may_be_absent(tmp_path):
    path = save_folder(tmp_path)
    config = json.loads((tmp_path / "unet/config.json").read_text())
    (tmp_path / "unet/config.json").write_text(json.dumps({**config, "attention_head_dim": 2}))
    config = json.loads((tmp_path / "vae/config.json").read_text())
    config.pop("scaling_factor")
    (tmp_path / "vae/config.json").write_text(json.dumps(config))
    assert ldm.problems(path, tiny_networks(2)) == []
    (tmp_path / "vae/config.json").write_text("{")
    assert ldm.problems(path, tiny_networks(2)) == [
        f"vae: {path}/vae/config.json is missing or no JSON of a configuration. Copy the folder again, with its config.json."
    ]


# --- what is said ---


def said(path, networks=None) -> list[str]:
    """The problems, which are also what `load` refuses with."""
    networks = networks or tiny_networks(2)
    found = ldm.problems(str(path), networks)
    with pytest.raises(ValueError) as caught:
        ldm.load(str(path), networks)
    assert str(caught.value) == "\n".join(found)
    return found


END = "Give the weights of this model in this size."


def test_a_path_that_is_not_there_is_said(tmp_path):
    assert said(tmp_path / "none") == [
        f"{tmp_path}/none: there is no such file or folder. Give a diffusers folder or an LDM file."
    ]
    assert said("/" + "a" * 300) == [
        f"/{'a' * 300}: cannot be looked into (File name too long). Give a diffusers folder or an LDM file."
    ]


def test_missing_left_over_and_misshapen_tensors_are_listed_by_their_names_in_the_file(tmp_path):
    tensors = whole_ldm_file(tiny_networks(1))
    del tensors["first_stage_model.decoder.up.3.block.0.conv1.weight"]
    tensors["first_stage_model.encoder.extra"] = torch.ones(1)
    tensors["first_stage_model.encoder.conv_in.bias"] = torch.ones(9)
    tensors["first_stage_model.quant_conv.bias"] = torch.ones(8).to(torch.int8)
    for name in [name for name in tensors if "resblocks.0." in name]:
        del tensors[name]
    path = write(tensors, tmp_path / "w.ckpt")
    names = ["attn.in_proj_weight", "attn.in_proj_bias"]
    found = said(path)
    assert found[0] == (
        f"vae: {path} does not fit: 1 missing (first_stage_model.decoder.up.3.block.0.conv1.weight); "
        "1 left over (first_stage_model.encoder.extra); 1 of another shape (first_stage_model.encoder.conv_in.bias is "
        "(9,), wanted (8,)); 1 of no floating-point type (first_stage_model.quant_conv.bias is int8). " + END
    )
    assert found[1].startswith(
        f"text: {path} does not fit: 12 missing (cond_stage_model.model.transformer.resblocks.0."
    )
    assert all(f"cond_stage_model.model.transformer.resblocks.0.{name}" in found[1] for name in names)
    assert found[1].endswith(f" and 2 more). {END}") and len(found) == 2


def test_weights_of_another_width_are_said_to_be_so(tmp_path):
    module = tiny_text(width=32)
    path = write(as_ldm({"text": (module, ldm_names.open_clip_text(module))}), tmp_path / "w.safetensors")
    target = {"text": tiny_networks(2)["text"]}
    (text,) = said(path, target)
    assert text.startswith(f"text: {path} does not fit: 28 of another shape (")
    assert "cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight is (96, 32), wanted (48, 16)" in text
    assert text.endswith(f" and 18 more). These are weights of another width. {END}")


def test_a_text_encoder_of_another_depth_is_said_to_be_so(tmp_path):
    """Three layers in the file for two in the module; two is a file cut to what is used; all else is another model."""
    target = {"text": tiny_networks(2)["text"]}
    deeper = tiny_text(layers=4)
    path = write(as_ldm({"text": (deeper, ldm_names.open_clip_text(deeper))}), tmp_path / "w.ckpt")
    (text,) = said(path, target)
    assert "12 left over (cond_stage_model.model.transformer.resblocks.3." in text
    assert ldm.problems(write(as_ldm({"text": target["text"]}), tmp_path / "w.ckpt"), target) == []


def test_without_the_prefix_the_groups_are_listed(tmp_path):
    vae = tiny_networks(1)["vae"]
    bare = {name.removeprefix("first_stage_model."): t for name, t in as_ldm({"vae": vae}).items()}
    path = write(bare, tmp_path / "vae.safetensors")
    (text,) = said(path, {"vae": tiny_networks(2)["vae"]})
    assert text.startswith(f"vae: {path} has no first_stage_model.*. It has decoder.conv_in (2), ")
    assert text.endswith(" more. Give a whole LDM checkpoint or a diffusers folder of this model.")
    path = write(
        {"model.a.x": torch.ones(1), "model.b.x": torch.ones(1), "model.b.y": torch.ones(1)}, tmp_path / "w.ckpt"
    )
    assert "It has model.a (1), model.b (2). Give" in said(path)[0]


def test_a_folder_without_the_networks_lists_what_it_has(tmp_path):
    (tmp_path / "unet").mkdir()
    (tmp_path / "README.md").touch()
    assert said(tmp_path) == [
        f"{tmp_path}: has no vae/, text_encoder/. A diffusers folder has one for each network; this one has: README.md, "
        "unet/. To load an LDM file, give its own path."
    ]


def test_a_networks_folder_without_weights_lists_what_it_has(tmp_path):
    path = save_folder(tmp_path)
    (tmp_path / "text_encoder/model.safetensors").rename(tmp_path / "text_encoder/flax_model.msgpack")
    assert said(path) == [
        f"text: {path}/text_encoder has none of model.safetensors, pytorch_model.bin, or not all of their parts. It has: "
        "config.json, flax_model.msgpack."
    ]


def test_a_file_that_cannot_be_read_is_said_with_its_network(tmp_path):
    path = save_folder(tmp_path)
    file = tmp_path / "unet/diffusion_pytorch_model.safetensors"
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    [text] = said(path)
    assert text.startswith(f"denoiser: {file}: is text, not weights: ") and text.endswith("git lfs pull).")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite_are_refused_by_name(tmp_path, value):
    tensors = whole_ldm_file(tiny_networks(1))
    tensors["first_stage_model.quant_conv.bias"][2] = value
    path = write(tensors, tmp_path / "w.ckpt")
    with pytest.raises(
        ValueError, match="^vae: .*w.ckpt: first_stage_model.quant_conv.bias has 1 of 8 values that are not"
    ):
        ldm.load(path, tiny_networks(2))


# --- the tokenizer ---


def tokenize(captions):
    return load_family("sd2", "tiny", "stock").tokenize(captions)["tokens"]


@pytest.mark.parametrize("pad", ["!", "<|endoftext|>"])
def test_the_folders_tokens_are_ours_with_either_padding(tmp_path, vocabulary, pad):
    write_special(copy_tokenizer(vocabulary, tmp_path), pad)
    assert ldm.tokenizer_problem(str(tmp_path), tokenize) is None


def test_another_vocabulary_is_named_by_caption_and_token(tmp_path, vocabulary):
    folder = copy_tokenizer(vocabulary, tmp_path)
    numbers = json.loads((folder / "vocab.json").read_text())
    numbers["horse</w>"], numbers["cat</w>"] = numbers["cat</w>"], numbers["horse</w>"]
    (folder / "vocab.json").write_text(json.dumps(numbers))
    assert ldm.tokenizer_problem(str(tmp_path), tokenize) == (
        f"tokenizer: {folder} gives other tokens than this model trains with: for 'a photograph of an astronaut riding a "
        "horse' token 8 is 2368, ours is 4558. Give the weights of this model, with their own tokenizer."
    )


def test_another_padding_is_named(tmp_path, vocabulary):
    write_special(folder := copy_tokenizer(vocabulary, tmp_path), "a</w>")
    text = ldm.tokenizer_problem(str(tmp_path), tokenize)
    assert text.startswith(
        f"tokenizer: {folder} gives other tokens than this model trains with: for '' token 2 is 320, ours is 0"
    )


def test_a_folder_without_a_tokenizer_is_said(tmp_path, vocabulary):
    (tmp_path / "vae").mkdir()
    text = ldm.tokenizer_problem(str(tmp_path), tokenize)
    assert text.startswith(f"tokenizer: {tmp_path}/tokenizer is missing, or is not a CLIPTokenizer's (")
    assert text.endswith(". Copy the folder again, with vocab.json and merges.txt.")
    folder = copy_tokenizer(vocabulary, tmp_path)
    (folder / "merges.txt").unlink()
    assert ldm.tokenizer_problem(str(tmp_path), tokenize).startswith(f"tokenizer: {folder} is missing, or is not a ")


def test_an_ldm_file_has_no_tokenizer_to_compare(tmp_path):
    assert ldm.tokenizer_problem(write({"a": torch.ones(1)}, tmp_path / "w.ckpt"), tokenize) is None
