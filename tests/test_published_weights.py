"""weights/published.py: names against diffusers' converter and OpenCLIP's own modules, outputs after loading, messages."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Mapping
from pathlib import Path

import open_clip
import pytest
import torch
from diffusers import AutoencoderKL
from diffusers.loaders import single_file_utils
from open_clip.model import CLIP, CLIPTextCfg, CLIPVisionCfg
from safetensors.torch import save_file
from torch import nn
from transformers import CLIPTextConfig

from families import load_family
from weights import ldm_names, published
from weights.encoder_networks import ClipTextModel, build_clip_text
from weights.tensors import fingerprint

TINY_UNETS = {
    "sd2": dict(use_linear_projection=True, cross_attention_dim=16),
    "sd15": dict(use_linear_projection=False, cross_attention_dim=24),
}


def tiny_unet(kind: str) -> nn.Module:
    from diffusers import UNet2DConditionModel

    torch.manual_seed(0)
    sizes = dict(attention_head_dim=2, norm_num_groups=4, layers_per_block=2, block_out_channels=(8, 16, 16, 16))
    return UNet2DConditionModel(**sizes, **TINY_UNETS[kind])


def tiny_text(layers: int = 2, width: int = 16, act: str = "gelu") -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=2)
    config = CLIPTextConfig(vocab_size=49408, max_position_embeddings=77, hidden_act=act, **sizes)
    return build_clip_text(config).eval()


def networks_of(preset: str) -> dict[str, tuple[nn.Module, ldm_names.NetworkNames]]:
    """SD2's three networks, as the model has them."""
    family = load_family("sd2", preset, "stock")
    modules = {**family.build_encoders(), "denoiser": family.build_denoiser()}
    return {label: (modules[label].eval(), names(modules[label])) for label, names in family.network_names().items()}


def tiny_networks(seed: int = 0) -> dict[str, tuple[nn.Module, ldm_names.NetworkNames]]:
    torch.manual_seed(seed)
    return networks_of("tiny")


def as_ldm(networks: Mapping[str, tuple[nn.Module, ldm_names.NetworkNames]]) -> dict[str, torch.Tensor]:
    """What an export writes, which is compared with diffusers' converter and OpenCLIP's modules below."""
    return ldm_names.to_ldm_tensors(networks.values())


def unused_tensors(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The text tower's last block, which SD 2 does not use, its projection and what else is in such a file."""
    prefix = "cond_stage_model.model."
    begin = f"{prefix}transformer.resblocks.1."
    block = {name.replace(".1.", ".2."): tensor for name, tensor in tensors.items() if name.startswith(begin)}
    block |= {f"{prefix}text_projection": torch.ones(16, 16), f"{prefix}attn_mask": torch.zeros(77, 77)}
    names = f"{prefix}logit_scale", "betas", "model_ema.decay", "first_stage_model.loss.logvar"
    return {**block, **dict.fromkeys(names, torch.ones(()))}


def whole_ldm_file(networks: Mapping[str, tuple[nn.Module, ldm_names.NetworkNames]]) -> dict[str, torch.Tensor]:
    tensors = as_ldm(networks)
    return {**tensors, **unused_tensors(tensors)}


def write(tensors: Mapping[str, torch.Tensor], path: Path) -> str:
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}
    if path.suffix == ".safetensors":
        save_file(tensors, path)
    else:
        torch.save({"global_step": 1, "state_dict": tensors}, path)
    return str(path)


def assert_equal(tensors: nn.Module | Mapping[str, torch.Tensor], expected: nn.Module):
    tensors = tensors.state_dict() if isinstance(tensors, nn.Module) else tensors
    expected = expected.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name


# --- names ---


@pytest.mark.parametrize("kind", TINY_UNETS)
def test_unet_names_are_those_of_diffusers_converter(kind):
    module = tiny_unet(kind)
    tensors = as_ldm({"denoiser": (module, ldm_names.unet(module))})
    assert_equal(single_file_utils.convert_ldm_unet_checkpoint(tensors, dict(module.config)), module)


@pytest.mark.parametrize("widths", [(8, 16, 16, 16), (8, 16)])
def test_vae_names_are_those_of_diffusers_converter(widths):
    torch.manual_seed(0)
    num = len(widths)
    kinds = dict(down_block_types=("DownEncoderBlock2D",) * num, up_block_types=("UpDecoderBlock2D",) * num)
    module = AutoencoderKL(**kinds, block_out_channels=widths, norm_num_groups=4, layers_per_block=2, latent_channels=4)
    tensors = as_ldm({"vae": (module, ldm_names.vae(module))})
    assert tensors["first_stage_model.encoder.mid.attn_1.q.weight"].shape == (16, 16, 1, 1)
    assert_equal(single_file_utils.convert_ldm_vae_checkpoint(tensors, dict(module.config)), module)


def test_open_clip_names_are_those_of_diffusers_converter():
    module = tiny_text()
    tensors = as_ldm({"text": (module, ldm_names.open_clip_text(module))})
    converted = single_file_utils.convert_open_clip_checkpoint(module, tensors)
    assert_equal({n: t for n, t in converted.items() if not n.endswith("position_ids")}, module)


KNOWN = """
vae encoder.down_blocks.1.resnets.0.conv_shortcut.weight        encoder.down.1.block.0.nin_shortcut.weight
vae decoder.mid_block.attentions.0.to_out.0.weight              decoder.mid.attn_1.proj_out.weight
vae decoder.up_blocks.2.upsamplers.0.conv.weight                decoder.up.1.upsample.conv.weight
denoiser down_blocks.0.downsamplers.0.conv.weight               input_blocks.3.0.op.weight
denoiser down_blocks.3.resnets.1.time_emb_proj.bias             input_blocks.11.0.emb_layers.1.bias
denoiser up_blocks.1.upsamplers.0.conv.weight                   output_blocks.5.2.conv.weight
denoiser conv_norm_out.bias                                     out.0.bias
text text_model.embeddings.position_embedding.weight            positional_embedding
text text_model.encoder.layers.22.self_attn.v_proj.bias         transformer.resblocks.22.attn.in_proj_bias[2/3]
text text_model.final_layer_norm.weight                         ln_final.weight
"""  # as they stand in 512-base-ema.ckpt


def test_names_and_counts_are_those_of_the_published_sd2_checkpoint(tmp_path):
    """Tensors under each prefix of 512-base-ema.ckpt, without the text encoder's last block and what follows it."""
    with torch.device("meta"):
        networks, counts = networks_of("full"), {}
    for line in KNOWN.strip().splitlines():
        label, ours, theirs = line.split()
        assert ours in networks[label][0].state_dict()
        source = networks[label][1].source(ours)
        assert source.name + (f"[{source.first_slice}/{source.num_slices}]" if source.num_slices > 1 else "") == theirs
    for label, (module, network) in networks.items():
        sources = [network.source(name) for name in module.state_dict()]
        assert len(set(sources)) == len(sources)
        counts[label] = len({source.name for source in sources})
    assert counts == {"denoiser": 686, "vae": 248, "text": 23 * 12 + 4}
    path = write(whole_ldm_file(tiny_networks(1)), tmp_path / "w.ckpt")
    assert len(published.find_problems(path, networks)) == 3  # modules without memory are compared too


# --- an LDM file ---


def test_text_states_are_those_of_open_clips_tower_before_its_last_block(tmp_path):
    """The oracle is OpenCLIP itself, run to the last block but one, then its final layer norm: (B, 77, D)."""
    torch.manual_seed(0)
    vision = CLIPVisionCfg(layers=1, width=64, head_width=64, patch_size=16, image_size=32)
    tower = CLIP(24, vision, CLIPTextCfg(width=32, heads=4, layers=3)).eval()
    tokens = open_clip.tokenize(["a cat", "", "word " * 100])
    with torch.no_grad():
        for parameter in tower.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        states = tower.token_embedding(tokens) + tower.positional_embedding
        for block in tower.transformer.resblocks[:-1]:
            states = block(states, attn_mask=tower.attn_mask)
        expected = tower.ln_final(states)
    named = {name: t for name, t in tower.state_dict().items() if not name.startswith("visual.")}
    tensors = {f"cond_stage_model.model.{name}": t for name, t in {**named, "attn_mask": tower.attn_mask}.items()}
    sizes = dict(hidden_size=32, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, hidden_act="gelu")
    module = build_clip_text(CLIPTextConfig(vocab_size=49408, max_position_embeddings=77, **sizes)).eval()
    networks = {"text": (module, ldm_names.open_clip_text(module))}
    assert published.load_networks(write(tensors, tmp_path / "w.ckpt"), networks) == []
    with torch.no_grad():
        states = module(input_ids=tokens).last_hidden_state
    assert states.shape == (3, 77, 32)
    torch.testing.assert_close(states, expected, rtol=0, atol=1e-5)


# --- a diffusers folder ---


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory) -> Path:
    """A tokenizer/ as SD 2's folder has it, from the byte-pair table in open_clip."""
    import open_clip.tokenizer as bpe

    folder = tmp_path_factory.mktemp("tokenizer") / "tokenizer"
    folder.mkdir()
    renamed = {"<start_of_text>": "<|startoftext|>", "<end_of_text>": "<|endoftext|>"}
    encoder = {renamed.get(token, token): number for token, number in bpe.SimpleTokenizer().encoder.items()}
    assert encoder["<|endoftext|>"] == published.CLIP_END == len(encoder) - 1
    (folder / "vocab.json").write_text(json.dumps(encoder, ensure_ascii=False))
    lines = gzip.decompress(Path(bpe.default_bpe()).read_bytes()).decode().split("\n")[1 : 49152 - 256 - 2 + 1]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    write_special(folder, "!")
    return folder


def write_special(folder: Path, pad: str):
    special = dict(bos_token="<|startoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>", pad_token=pad)
    (folder / "tokenizer_config.json").write_text(json.dumps({**special, "model_max_length": 77}))


def save_folder(root: Path, networks=None, **how) -> str:
    for module, network in (networks or tiny_networks(1)).values():
        saved = module.text_model if isinstance(module, ClipTextModel) else module  # as transformers 5 saves it
        saved.save_pretrained(root / network.folder, **how)
    return str(root)


@pytest.mark.parametrize("kind", [".ckpt", ".safetensors", "folder", "folder with pickles"])
def test_all_networks_come_out_of_a_file_or_folder_as_they_went_in(tmp_path, kind):
    source, target = tiny_networks(1), tiny_networks(2)
    if kind.startswith("."):
        path = write(whole_ldm_file(source), tmp_path / f"w{kind}")
    else:
        path = save_folder(tmp_path, source, safe_serialization=kind == "folder")
    assert published.find_problems(path, target) == [] == published.load_networks(path, target)
    for label in target:
        assert_equal(target[label][0], source[label][0])


def test_a_text_encoder_may_have_the_names_of_each_version_of_transformers(tmp_path):
    """In a folder and in a file, with and without the position_ids of old versions: the same weights, the same digest."""

    def versions(module: nn.Module) -> list[dict[str, torch.Tensor]]:
        new = module.state_dict()
        old = {**new, "text_model.embeddings.position_ids": torch.arange(77)[None]}
        return [old, *({name.removeprefix("text_model."): t for name, t in each.items()} for each in (new, old))]

    source, target = tiny_networks(1), tiny_networks(2)
    path = save_folder(tmp_path, source)
    assert all(name.startswith("text_model.") for name in source["text"][0].state_dict())
    for tensors in versions(source["text"][0]):
        save_file(tensors, tmp_path / "text_encoder/model.safetensors")
        assert published.load_networks(path, target) == []
        assert_equal(target["text"][0], source["text"][0])
    assert fingerprint(target["text"][0]) == fingerprint(source["text"][0])

    sd15, other = tiny_text(act="quick_gelu"), tiny_text(act="quick_gelu")
    nn.init.normal_(other.text_model.final_layer_norm.weight)
    for tensors in versions(sd15):
        path = write({f"cond_stage_model.transformer.{name}": t for name, t in tensors.items()}, tmp_path / "w.ckpt")
        assert published.load_networks(path, {"text": (other, ldm_names.clip_text(other))}) == []
        assert_equal(other, sd15)


def test_config_json_is_compared_where_no_shape_shows_it(tmp_path):
    path, target = save_folder(tmp_path), tiny_networks(2)

    def problems(name: str, **changes: object) -> str:
        file = tmp_path / name / "config.json"
        old = file.read_text()
        file.write_text(json.dumps({k: v for k, v in {**json.loads(old), **changes}.items() if v is not None}))
        texts = published.find_problems(path, target)
        file.write_text(old)
        return "\n".join(texts)

    assert "has scaling_factor 0.13025, this model's has 0.18215" in problems("vae", scaling_factor=0.13025)
    assert "hidden_act quick_gelu, this model's has gelu" in problems("text_encoder", hidden_act="quick_gelu")
    assert problems("unet", attention_head_dim=2) == problems("vae", scaling_factor=None) == ""
    (tmp_path / "vae/config.json").write_text("{")
    [text] = published.find_problems(path, target)
    assert text.startswith(f"vae: {path}/vae/config.json is missing or no JSON of a configuration. ")


# --- what is said ---


def problems(path, networks=None) -> list[str]:
    """The problems, which are also what `load_networks` refuses with."""
    networks = networks or tiny_networks(2)
    texts = published.find_problems(str(path), networks)
    with pytest.raises(ValueError) as caught:
        published.load_networks(str(path), networks)
    assert str(caught.value) == "\n".join(texts)
    return texts


def test_missing_left_over_and_misshapen_tensors_are_listed_by_their_names_in_the_file(tmp_path):
    tensors, prefix = whole_ldm_file(tiny_networks(1)), "first_stage_model."
    del tensors[f"{prefix}decoder.up.3.block.0.conv1.weight"]
    tensors[f"{prefix}encoder.extra"] = torch.ones(1)
    tensors[f"{prefix}encoder.conv_in.bias"] = torch.ones(9)
    tensors[f"{prefix}quant_conv.bias"] = torch.ones(8).to(torch.int8)
    tensors = {name: tensor for name, tensor in tensors.items() if "resblocks.0." not in name}
    vae, text = problems(write(tensors, tmp_path / "w.ckpt"))
    for part in (
        "1 missing (first_stage_model.decoder.up.3.block.0.conv1.weight); ",
        "1 left over (first_stage_model.encoder.extra); ",
        "1 of another shape (first_stage_model.encoder.conv_in.bias is (9,), wanted (8,)); ",
        "1 of no floating-point type (first_stage_model.quant_conv.bias is int8). ",
    ):
        assert part in vae
    assert "does not fit: 12 missing (cond_stage_model.model.transformer.resblocks.0." in text


def test_values_that_are_not_finite_are_refused_by_name(tmp_path):
    tensors = whole_ldm_file(tiny_networks(1))
    tensors["first_stage_model.quant_conv.bias"][2:4] = torch.tensor([float("nan"), float("inf")])
    path = write(tensors, tmp_path / "w.ckpt")
    with pytest.raises(ValueError, match="^vae: .*: first_stage_model.quant_conv.bias has 2 of 8 values that are not"):
        published.load_networks(path, tiny_networks(2))


# --- the tokenizer ---


def tokenize(captions):
    return load_family("sd2", "tiny", "stock").tokenize(captions)["tokens"]


def test_the_folders_tokens_are_ours_with_either_padding_and_others_are_named(tmp_path, vocabulary):
    def problem() -> str:
        return published.tokenizer_problem(str(tmp_path), tokenize)

    (tmp_path / "vae").mkdir()
    assert problem().startswith(f"tokenizer: {tmp_path}/tokenizer is missing, or is not a CLIPTokenizer's (")
    folder = shutil.copytree(vocabulary, tmp_path / "tokenizer")
    for pad in ("!", "<|endoftext|>"):
        write_special(folder, pad)
        assert problem() is None
    write_special(folder, "a</w>")
    begin = f"tokenizer: {folder} gives other tokens than this model trains with: for "
    assert problem().startswith(f"{begin}'' token 2 is 320, ours is 0")


def test_the_attention_of_a_vae_may_have_its_older_names(tmp_path):
    source, target = tiny_networks(1), tiny_networks(2)
    path, tensors = save_folder(tmp_path, source), {}
    older = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    for name, tensor in source["vae"][0].state_dict().items():
        for new, old in older.items():
            name = name.replace(f".{new}.", f".{old}.")
        tensors[name] = tensor
    assert "encoder.mid_block.attentions.0.proj_attn.weight" in tensors
    save_file(tensors, tmp_path / "vae/diffusion_pytorch_model.safetensors")
    assert published.load_networks(path, target) == []
    assert_equal(target["vae"][0], source["vae"][0])
