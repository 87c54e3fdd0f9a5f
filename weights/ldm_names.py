"""The names of a network's tensors in published weights: in diffusers folders and in LDM files.

A diffusers folder has one folder per network and uses our modules' own names. An LDM file (CompVis, Stability:
`512-base-ema.ckpt`, `v1-5-pruned-emaonly.safetensors`, `sd_xl_base_1.0.safetensors`) has all networks in one dictionary,
under the names of the program that trained them; FLUX's (`flux1-dev.safetensors`) has its transformer alone. `source` of a
`Network` maps our name to the file's.

    our module (diffusers, transformers)          LDM file
    vae    encoder.down_blocks.1.resnets.0.conv1  first_stage_model.encoder.down.1.block.0.conv1
           decoder.up_blocks.0.resnets.0.conv1    first_stage_model.decoder.up.3.block.0.conv1     counted from the other end
    text   ...layers.0.self_attn.k_proj.weight    cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight, part 2
    unet   up_blocks.1.upsamplers.0.conv          model.diffusion_model.output_blocks.5.2.conv
           its EMA weights, where they are apart  model_ema.diffusion_modeloutput_blocks52conv               without the dots
    flux   single_transformer_blocks.3.attn.to_k.weight      single_blocks.3.linear1.weight, part 1 of q, k, v and the MLP

Names were checked against diffusers' converter and OpenCLIP's modules (tests/test_ldm.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weights.clip_vision import NUM_UNREAD as UNREAD_OF_CLIP
from weights.llama_text import NUM_UNREAD

OPEN_CLIP_PREFIX, CLIP_PREFIX = "cond_stage_model.model.", "cond_stage_model.transformer."
SDXL_PREFIX = "conditioner.embedders."
NOTHING = re.compile(r"(?!)")
TRANSFORMERS, DIFFUSERS = ("model", "pytorch_model"), ("diffusion_pytorch_model", "diffusion_pytorch_model")
CLIP_PART = re.compile(r"(text|vision)_model\.")  # begins the names in published weights; transformers 5 leaves it out
# 0 .. 76; stored only by old transformers
POSITION_IDS = re.compile(rf"({CLIP_PART.pattern})?embeddings\.position_ids")

# Keys of config.json that no tensor's shape shows
VAE_FACTS = ("scaling_factor", "shift_factor", "norm_num_groups", "act_fn")
UNET_FACTS = ("attention_head_dim", "norm_num_groups", "act_fn", "flip_sin_to_cos", "freq_shift")
TEXT_FACTS = ("hidden_act", "num_attention_heads", "layer_norm_eps")
T5_FACTS = ("num_heads", "d_kv", "feed_forward_proj", "layer_norm_epsilon")
LLAMA_FACTS = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
FLUX_FACTS = ("num_attention_heads", "axes_dims_rope", "guidance_embeds")
UNET_RESNET = dict(norm1="in_layers.0", conv1="in_layers.2", norm2="out_layers.0", conv2="out_layers.3")
UNET_RESNET |= dict(time_emb_proj="emb_layers.1", conv_shortcut="skip_connection")


@dataclass(frozen=True)
class Source:
    """One tensor's place: its name in the file, and what part of the file's tensor it is.

    With `parts` > 1 dimension 0 has that many equal slices, of which it is `span` from `part` on.
    turned: it is the file's matrix transposed, or its two halves exchanged.
    """

    name: str
    part: int = 0
    parts: int = 1
    span: int = 1
    turned: Literal["transposed", "halves"] | None = None

    def shape_in_file(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the file's tensor, of which ours has this shape."""
        if self.turned == "transposed":
            return tuple(shape[::-1])
        return (shape[0] * self.parts // self.span, *shape[1:]) if self.parts > 1 else tuple(shape)

    def taken(self, tensor: Tensor) -> Tensor:
        """Return our tensor of the file's."""
        if self.parts > 1:
            size = len(tensor) // self.parts
            return tensor[self.part * size : (self.part + self.span) * size]
        return self.put(tensor)

    def put(self, tensor: Tensor) -> Tensor:
        """Return our tensor as it stands in the file, alone or as one of the parts there."""
        if self.turned == "transposed":
            return tensor.T
        return torch.cat(tensor.chunk(2)[::-1]) if self.turned == "halves" else tensor


@dataclass(frozen=True)
class Network:
    """The place of one network in published weights. Made by `vae`, `unet`, `open_clip_text` or `clip_text`.

    folder: its folder, e.g. "vae", in a diffusers folder; stems: of the .safetensors and the .bin file in it.
    prefix: in an LDM file, e.g. "first_stage_model."; source: our tensor's name -> its place after the prefix.
    unused: names after the prefix that an LDM file may have and this network does not need; with only_folders, whole names
        in its folder.
    facts: key of the folder's config.json -> our module's value, for settings that no tensor's shape shows.
    only_folders: an LDM file is not read for it, or does not tell it from another network with the same shapes.
    alone: a single file has this network and no other one.
    """

    folder: str
    facts: Mapping[str, Any]
    stems: tuple[str, str] = DIFFUSERS
    prefix: str = ""
    source: Callable[[str], Source] = Source
    unused: re.Pattern[str] = NOTHING
    only_folders: bool = False
    alone: bool = False


def vae(module: nn.Module) -> Network:
    """Return the place of an AutoencoderKL of any depth and width."""
    levels = len(module.config.block_out_channels)
    rules = (
        (r"down_blocks\.(\d+)\.resnets", r"down.\1.block"),
        (r"down_blocks\.(\d+)\.downsamplers\.0", r"down.\1.downsample"),
        (r"up_blocks\.(\d+)\.resnets", lambda m: f"up.{levels - 1 - int(m[1])}.block"),
        (r"up_blocks\.(\d+)\.upsamplers\.0", lambda m: f"up.{levels - 1 - int(m[1])}.upsample"),
        (r"mid_block\.resnets\.(\d)", lambda m: f"mid.block_{int(m[1]) + 1}"),
        (r"mid_block\.attentions\.0", "mid.attn_1"),
        (r"attn_1\.group_norm", "attn_1.norm"),
        (r"attn_1\.to_([qkv])", r"attn_1.\1"),
        (r"attn_1\.to_out\.0", "attn_1.proj_out"),
        (r"conv_shortcut", "nin_shortcut"),
        (r"conv_norm_out", "norm_out"),
    )
    return Network(
        folder="vae",
        facts=_facts(module, VAE_FACTS, "AutoencoderKL"),
        prefix="first_stage_model.",
        source=lambda name: Source(_renamed(name, rules)),
        unused=re.compile(r"loss\.|model_ema\."),
    )


def unet(module: nn.Module) -> Network:
    """Return the place of Stable Diffusion's UNet2DConditionModel (1.x, 2, XL) of any depth and width.

    An LDM file numbers the blocks between skip connections. Input block 0 is the first convolution; then each level has
    its layers and a downsampler. The output blocks have one layer more per level. The upsampler is the last entry of the
    level's last block: index 2 if that block has an attention, else 1.
    """
    stride = module.config.layers_per_block + 1
    has_attention = ["Attn" in kind for kind in module.config.up_block_types]

    def block(match: re.Match[str]) -> str:
        way, level, kind, layer = match.groups()
        index = stride * int(level) + int(layer)
        place = f"input_blocks.{1 + index}" if way == "down" else f"output_blocks.{index}"
        return f"{place}.{int(kind == 'attentions')}"

    def upsampler(match: re.Match[str]) -> str:
        level = int(match[1])
        return f"output_blocks.{stride * level + stride - 1}.{1 + has_attention[level]}"

    rules = (
        (r"(resnets\.\d+)\.(\w+)", lambda m: f"{m[1]}.{UNET_RESNET[m[2]]}"),
        (r"^(down|up)_blocks\.(\d+)\.(resnets|attentions)\.(\d+)", block),
        (r"^down_blocks\.(\d+)\.downsamplers\.0\.conv", lambda m: f"input_blocks.{stride * int(m[1]) + stride}.0.op"),
        (r"^up_blocks\.(\d+)\.upsamplers\.0", upsampler),
        (r"^mid_block\.resnets\.(\d)", lambda m: f"middle_block.{2 * int(m[1])}"),
        (r"^mid_block\.attentions\.0", "middle_block.1"),
        (r"^time_embedding\.linear_1", "time_embed.0"),
        (r"^time_embedding\.linear_2", "time_embed.2"),
        (r"^add_embedding\.linear_1", "label_emb.0.0"),
        (r"^add_embedding\.linear_2", "label_emb.0.2"),
        (r"^conv_in", "input_blocks.0.0"),
        (r"^conv_norm_out", "out.0"),
        (r"^conv_out", "out.2"),
    )
    return Network(
        folder="unet",
        facts=_facts(module, UNET_FACTS, "UNet2DConditionModel"),
        prefix="model.diffusion_model.",
        source=lambda name: Source(_renamed(name, rules)),
    )


def unet_of_class(module: nn.Module) -> Network:
    """Return the place of a UNet whose class has more to it than its settings, e.g. other norms: config.json names it."""
    place = unet(module)
    return replace(place, facts={**place.facts, "_class_name": type(module).__name__}, only_folders=True)


def forms(network: Network) -> dict[str, Network]:
    """Return the ways in which a single file may hold a denoiser: name -> its place in that way.

    training: as in an LDM file; ema: its EMA weights, as ldm/modules/ema.py of CompVis names them; bare: an LDM file's names
    without the prefix; own: our own names, those of a diffusers folder.
    """
    average = f"model_ema.{network.prefix.removeprefix('model.').removesuffix('.')}"

    def undotted(name: str) -> Source:
        source = network.source(name)
        return replace(source, name=source.name.replace(".", ""))

    return {
        "training": network,
        "ema": replace(network, prefix=average, source=undotted),
        "bare": replace(network, prefix=""),
        "own": replace(network, prefix="", source=Source),
    }


_OPEN_CLIP_RULES = (
    (r"^text_model\.encoder\.layers", "transformer.resblocks"),
    (r"^text_model\.embeddings\.token_embedding", "token_embedding"),
    (r"^text_model\.embeddings\.position_embedding\.weight", "positional_embedding"),
    (r"^text_model\.final_layer_norm", "ln_final"),
    (r"^text_projection\.weight", "text_projection"),
    (r"self_attn\.[qkv]_proj\.", "attn.in_proj_"),
    (r"self_attn", "attn"),
    (r"layer_norm([12])", r"ln_\1"),
    (r"mlp\.fc1", "mlp.c_fc"),
    (r"mlp\.fc2", "mlp.c_proj"),
)


def _open_clip_source(name: str) -> Source:
    place = _renamed(name, _OPEN_CLIP_RULES)
    if packed := re.search(r"self_attn\.([qkv])_proj", name):
        return Source(place, "qkv".index(packed[1]), 3)
    return Source(place, turned="transposed" if place == "text_projection" else None)


def open_clip_text(module: nn.Module) -> Network:
    """Return the place of a CLIPTextModel that has all blocks but the last of an OpenCLIP text tower, as SD 2 uses it.

    The file may have that last block and its `text_projection`. Files made from a diffusers folder have neither.
    """
    layers = module.config.num_hidden_layers
    return Network(
        folder="text_encoder",
        stems=TRANSFORMERS,
        prefix=OPEN_CLIP_PREFIX,
        source=_open_clip_source,
        unused=re.compile(rf"transformer\.resblocks\.{layers}\.|(text_projection|logit_scale|attn_mask)$"),
        facts=_facts(module, TEXT_FACTS),
    )


def clip_text(module: nn.Module) -> Network:
    """Return the place of SD 1.x's CLIPTextModel; LDM files use transformers' own names for it."""
    return Network(
        folder="text_encoder",
        stems=TRANSFORMERS,
        prefix=CLIP_PREFIX,
        unused=POSITION_IDS,
        facts=_facts(module, TEXT_FACTS),
    )


def first_text_of_xl(module: nn.Module) -> Network:
    """Return the place of SDXL's first text encoder, SD 1.x's."""
    return replace(clip_text(module), prefix=f"{SDXL_PREFIX}0.transformer.")


def second_text_of_xl(module: nn.Module) -> Network:
    """Return the place of SDXL's second text encoder: OpenCLIP's, whole, as a CLIPTextModelWithProjection."""
    place = replace(clip_text(module), folder="text_encoder_2", prefix=f"{SDXL_PREFIX}1.model.")
    return replace(place, source=_open_clip_source, unused=re.compile(r"(logit_scale|attn_mask)$"))


def t5_text_in(folder: str) -> Callable[[nn.Module], Network]:
    """Return a function that returns the place of a T5 or UMT5 encoder in this folder; only folders are read."""
    return in_folder(folder, None, *T5_FACTS, stems=TRANSFORMERS, unused=r"encoder\.embed_tokens\.weight")


def clip_text_in(folder: str) -> Callable[[nn.Module], Network]:
    """Return a function that returns the place of a CLIPTextModel in this folder; only folders are read."""
    return in_folder(folder, None, *TEXT_FACTS, stems=TRANSFORMERS, unused=POSITION_IDS.pattern)


def llama_text(module: nn.Module) -> Network:
    """Return the place of HunyuanVideo's Llama, whose last layers are not read; only folders are read."""
    unused = rf"({_layers_after(module, NUM_UNREAD)}|norm)\..*"
    return in_folder("text_encoder", None, *LLAMA_FACTS, stems=TRANSFORMERS, unused=unused)(module)


def clip_vision(module: nn.Module) -> Network:
    """Return the place of Wan's image encoder, whose last layer is not read; only folders are read."""
    unused = rf"({CLIP_PART.pattern})?encoder\.{_layers_after(module, UNREAD_OF_CLIP)}\..*"
    facts = ("num_attention_heads", "hidden_act")
    return in_folder("image_encoder", None, *facts, stems=TRANSFORMERS, unused=unused)(module)


def _layers_after(module: Any, num: int) -> str:
    """Return a pattern of the layers that a published model has after the last one of a module."""
    depth = module.config.num_hidden_layers
    return rf"layers\.({'|'.join(str(depth + more) for more in range(num))})"


def in_folder(
    folder: str, kind: str | None, *facts: str, stems: tuple[str, str] = DIFFUSERS, unused: str = NOTHING.pattern
) -> Callable[[nn.Module], Network]:
    """Return a function that returns the place of a network in this folder, under its own names; only folders are read.

    Args:
        kind: its class, by config.json; facts: further keys of it that no tensor's shape shows.
        stems, unused: see Network.
    """
    pattern = re.compile(unused)
    return lambda module: Network(folder, _facts(module, facts, kind), stems, unused=pattern, only_folders=True)


def _facts(module: Any, keys: Iterable[str], kind: str | None = None) -> dict[str, Any]:
    return ({"_class_name": kind} if kind else {}) | {key: getattr(module.config, key) for key in keys}


def flux_transformer(module: nn.Module) -> Network:
    """Return the place of FLUX's transformer. A file's matrices of q, k and v are one, in single blocks with the MLP's."""
    return Network(
        folder="transformer",
        facts=_facts(module, FLUX_FACTS, "FluxTransformer2DModel"),
        source=_flux_source,
        alone=True,
    )


_QK = {"q": "query_norm.scale", "k": "key_norm.scale"}
_FLUX_RULES = (
    (r"^time_text_embed\.timestep_embedder", "time_in"),
    (r"^time_text_embed\.guidance_embedder", "guidance_in"),
    (r"^time_text_embed\.text_embedder", "vector_in"),
    (r"^(\w+_in)\.linear_1", r"\1.in_layer"),
    (r"^(\w+_in)\.linear_2", r"\1.out_layer"),
    (r"^x_embedder", "img_in"),
    (r"^context_embedder", "txt_in"),
    (r"^norm_out\.linear", "final_layer.adaLN_modulation.1"),
    (r"^proj_out", "final_layer.linear"),
    (
        r"^single_transformer_blocks\.(\d+)\.attn\.norm_([qk])\.weight",
        lambda m: f"single_blocks.{m[1]}.norm.{_QK[m[2]]}",
    ),
    (r"^single_transformer_blocks\.(\d+)\.(attn\.to_[qkv]|proj_mlp)", r"single_blocks.\1.linear1"),
    (r"^single_transformer_blocks\.(\d+)\.proj_out", r"single_blocks.\1.linear2"),
    (r"^single_transformer_blocks\.(\d+)\.norm\.linear", r"single_blocks.\1.modulation.lin"),
    (r"^transformer_blocks", "double_blocks"),
    (r"attn\.norm_added_([qk])\.weight", lambda m: f"txt_attn.norm.{_QK[m[1]]}"),
    (r"attn\.norm_([qk])\.weight", lambda m: f"img_attn.norm.{_QK[m[1]]}"),
    (r"attn\.add_[qkv]_proj", "txt_attn.qkv"),
    (r"attn\.to_[qkv]\b", "img_attn.qkv"),
    (r"attn\.to_add_out", "txt_attn.proj"),
    (r"attn\.to_out\.0", "img_attn.proj"),
    (r"norm1\.linear", "img_mod.lin"),
    (r"norm1_context\.linear", "txt_mod.lin"),
    (r"ff\.net\.0\.proj", "img_mlp.0"),
    (r"ff\.net\.2", "img_mlp.2"),
    (r"ff_context\.net\.0\.proj", "txt_mlp.0"),
    (r"ff_context\.net\.2", "txt_mlp.2"),
)
_OF_SINGLE_BLOCK = 7  # slices of its first matrix: q, k, v and the MLP, which is four times as wide


def _flux_source(name: str) -> Source:
    place = _renamed(name, _FLUX_RULES)
    is_single = place.startswith("single_blocks.")
    if packed := re.search(r"attn\.(?:to|add)_([qkv])(?:_proj)?\.", name):
        return Source(place, "qkv".index(packed[1]), _OF_SINGLE_BLOCK if is_single else 3)
    if is_single and ".proj_mlp." in name:
        return Source(place, 3, _OF_SINGLE_BLOCK, span=4)
    return Source(place, turned="halves" if place.startswith("final_layer.adaLN") else None)


def stored_name(name: str, names: Collection[str], before: str = "") -> str:
    """Return a tensor's name in a file: without CLIP_PART if transformers 5 wrote the file.

    Args:
        name: our name, with the file's prefix.
        names: all names in the file.
        before: the file's prefix, e.g. "cond_stage_model.transformer.".
    """
    rest = name.removeprefix(before)
    bare = before + rest[match.end() if (match := CLIP_PART.match(rest)) else 0 :]
    return bare if name not in names and bare in names else name


def as_ldm(networks: Iterable[tuple[nn.Module, Network]]) -> dict[str, Tensor]:
    """Return all tensors of modules under their names in an LDM file: `source` turned round.

    Packed projections are put together. The VAE's attention has 1 x 1 convolutions there, where we have linear layers.
    """
    parts: dict[str, dict[int, Tensor]] = {}
    for module, network in networks:
        for name, tensor in module.state_dict().items():
            source = network.source(name)
            if ".attn_1." in source.name and tensor.dim() == 2:
                tensor = tensor[:, :, None, None]
            parts.setdefault(network.prefix + source.name, {})[source.part] = source.put(tensor)
    return {name: torch.cat([by_part[n] for n in sorted(by_part)]) for name, by_part in parts.items()}


def _renamed(name: str, rules: Iterable[tuple[str, Any]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
