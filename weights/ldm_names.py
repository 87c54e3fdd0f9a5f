"""The names of a network's tensors in published weights: in diffusers folders and in LDM files.

A diffusers folder has one folder per network and uses our modules' own names. An LDM file (CompVis, Stability:
`512-base-ema.ckpt`, `v1-5-pruned-emaonly.safetensors`, `sd_xl_base_1.0.safetensors`) has all networks in one dictionary,
under the names of the program that trained them; FLUX's (`flux1-dev.safetensors`) has its transformer alone.
`NetworkNames.source` maps our name to the file's.

    our module (diffusers, transformers)          LDM file
    vae    encoder.down_blocks.1.resnets.0.conv1  first_stage_model.encoder.down.1.block.0.conv1
           decoder.up_blocks.0.resnets.0.conv1    first_stage_model.decoder.up.3.block.0.conv1     counted from the other end
    text   ...layers.0.self_attn.k_proj.weight    cond_stage_model.model.transformer.resblocks.0.attn.in_proj_weight, part 2
    unet   up_blocks.1.upsamplers.0.conv          model.diffusion_model.output_blocks.5.2.conv
           its EMA weights, where they are apart  model_ema.diffusion_modeloutput_blocks52conv               without the dots
    flux   single_transformer_blocks.3.attn.to_k.weight      single_blocks.3.linear1.weight, part 1 of q, k, v and the MLP

Names were checked against diffusers' converter and OpenCLIP's modules (tests/test_published_weights.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weights.encoder_networks import NUM_UNREAD_CLIP_VISION, NUM_UNREAD_LLAMA

OPEN_CLIP_PREFIX, CLIP_PREFIX = "cond_stage_model.model.", "cond_stage_model.transformer."
SDXL_PREFIX = "conditioner.embedders."
MATCH_NOTHING = re.compile(r"(?!)")
TRANSFORMERS_STEMS, DIFFUSERS_STEMS = ("model", "pytorch_model"), ("diffusion_pytorch_model", "diffusion_pytorch_model")
CLIP_PART = re.compile(r"(text|vision)_model\.")  # begins the names in published weights; transformers 5 leaves it out
# 0 .. 76; stored only by old transformers
POSITION_IDS = re.compile(rf"({CLIP_PART.pattern})?embeddings\.position_ids")

# Keys of config.json that no tensor's shape shows
VAE_CONFIG_KEYS = ("scaling_factor", "shift_factor", "norm_num_groups", "act_fn")
UNET_CONFIG_KEYS = ("attention_head_dim", "norm_num_groups", "act_fn", "flip_sin_to_cos", "freq_shift")
TEXT_CONFIG_KEYS = ("hidden_act", "num_attention_heads", "layer_norm_eps")
T5_CONFIG_KEYS = ("num_heads", "d_kv", "feed_forward_proj", "layer_norm_epsilon")
LLAMA_CONFIG_KEYS = ("num_attention_heads", "num_key_value_heads", "rms_norm_eps")
FLUX_CONFIG_KEYS = ("num_attention_heads", "axes_dims_rope", "guidance_embeds")
UNET_RESNET = dict(norm1="in_layers.0", conv1="in_layers.2", norm2="out_layers.0", conv2="out_layers.3")
UNET_RESNET |= dict(time_emb_proj="emb_layers.1", conv_shortcut="skip_connection")


@dataclass(frozen=True)
class TensorSource:
    """Where one of our tensors is in a file: the name there, and which part of the file's tensor it is.

    With `num_slices` > 1, dimension 0 of the file's tensor has that many equal slices. Ours has `slice_span` of them, from
    number `first_slice` on.
    layout: ours is the file's matrix transposed, or with its two halves exchanged.
    """

    name: str
    first_slice: int = 0
    num_slices: int = 1
    slice_span: int = 1
    layout: Literal["transposed", "swapped_halves"] | None = None

    def shape_in_file(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the file's tensor. `shape`: of ours."""
        if self.layout == "transposed":
            return tuple(shape[::-1])
        return (shape[0] * self.num_slices // self.slice_span, *shape[1:]) if self.num_slices > 1 else tuple(shape)

    def extract(self, tensor: Tensor) -> Tensor:
        """Return our tensor. `tensor`: the file's."""
        if self.num_slices > 1:
            size = len(tensor) // self.num_slices
            return tensor[self.first_slice * size : (self.first_slice + self.slice_span) * size]
        return self.change_layout(tensor)

    def change_layout(self, tensor: Tensor) -> Tensor:
        """Return a whole tensor in the other layout: ours in the file's, or the file's in ours."""
        if self.layout == "transposed":
            return tensor.T
        return torch.cat(tensor.chunk(2)[::-1]) if self.layout == "swapped_halves" else tensor


@dataclass(frozen=True)
class NetworkNames:
    """The names of one network's tensors in published weights. Made by `vae`, `unet`, `open_clip_text` or `clip_text`.

    folder: its folder, e.g. "vae", in a diffusers folder; stems: of the .safetensors and the .bin file in it.
    prefix: in an LDM file, e.g. "first_stage_model."; source: our tensor's name -> its source, named after the prefix.
    unused: names after the prefix that an LDM file may have and this network does not need; with is_folder_only, whole names
        in its folder.
    config_values: key of the folder's config.json -> our module's value, for settings that no tensor's shape shows.
    is_folder_only: an LDM file is not read for it, or does not tell it from another network with the same shapes.
    is_alone_in_file: a single file has this network and no other one.
    """

    folder: str
    config_values: Mapping[str, Any]
    stems: tuple[str, str] = DIFFUSERS_STEMS
    prefix: str = ""
    source: Callable[[str], TensorSource] = TensorSource
    unused: re.Pattern[str] = MATCH_NOTHING
    is_folder_only: bool = False
    is_alone_in_file: bool = False


def vae(module: nn.Module) -> NetworkNames:
    """Return the names of an AutoencoderKL of any depth and width."""
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
    return NetworkNames(
        folder="vae",
        config_values=_config_values(module, VAE_CONFIG_KEYS, "AutoencoderKL"),
        prefix="first_stage_model.",
        source=lambda name: TensorSource(_apply_rules(name, rules)),
        unused=re.compile(r"loss\.|model_ema\."),
    )


def unet(module: nn.Module) -> NetworkNames:
    """Return the names of Stable Diffusion's UNet2DConditionModel (1.x, 2, XL) of any depth and width.

    An LDM file numbers the blocks between skip connections. Input block 0 is the first convolution; then each level has
    its layers and a downsampler. The output blocks have one layer more per level. The upsampler is the last entry of the
    level's last block: index 2 if that block has an attention, else 1.
    """
    stride = module.config.layers_per_block + 1
    has_attention = ["Attn" in kind for kind in module.config.up_block_types]

    def block(match: re.Match[str]) -> str:
        direction, level, kind, layer = match.groups()
        index = stride * int(level) + int(layer)
        block_name = f"input_blocks.{1 + index}" if direction == "down" else f"output_blocks.{index}"
        return f"{block_name}.{int(kind == 'attentions')}"

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
    return NetworkNames(
        folder="unet",
        config_values=_config_values(module, UNET_CONFIG_KEYS, "UNet2DConditionModel"),
        prefix="model.diffusion_model.",
        source=lambda name: TensorSource(_apply_rules(name, rules)),
    )


def unet_by_class(module: nn.Module) -> NetworkNames:
    """Return the names of a UNet that its settings do not describe fully, e.g. its norms: config.json names its class."""
    names = unet(module)
    config_values = {**names.config_values, "_class_name": type(module).__name__}
    return replace(names, config_values=config_values, is_folder_only=True)


def list_file_layouts(network: NetworkNames) -> dict[str, NetworkNames]:
    """Return the layouts in which a single file may hold a denoiser: layout -> the denoiser's names in it.

    training: as in an LDM file; ema: its EMA weights, as ldm/modules/ema.py of CompVis names them; bare: an LDM file's names
    without the prefix; own: our own names, those of a diffusers folder.
    """
    average = f"model_ema.{network.prefix.removeprefix('model.').removesuffix('.')}"

    def undotted(name: str) -> TensorSource:
        source = network.source(name)
        return replace(source, name=source.name.replace(".", ""))

    return {
        "training": network,
        "ema": replace(network, prefix=average, source=undotted),
        "bare": replace(network, prefix=""),
        "own": replace(network, prefix="", source=TensorSource),
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


def _open_clip_source(name: str) -> TensorSource:
    stored_name = _apply_rules(name, _OPEN_CLIP_RULES)
    if packed := re.search(r"self_attn\.([qkv])_proj", name):
        return TensorSource(stored_name, "qkv".index(packed[1]), 3)
    return TensorSource(stored_name, layout="transposed" if stored_name == "text_projection" else None)


def open_clip_text(module: nn.Module) -> NetworkNames:
    """Return the names of a CLIPTextModel that has all blocks but the last of an OpenCLIP text tower, as SD 2 uses it.

    The file may have that last block and its `text_projection`. Files made from a diffusers folder have neither.
    """
    layers = module.config.num_hidden_layers
    return NetworkNames(
        folder="text_encoder",
        stems=TRANSFORMERS_STEMS,
        prefix=OPEN_CLIP_PREFIX,
        source=_open_clip_source,
        unused=re.compile(rf"transformer\.resblocks\.{layers}\.|(text_projection|logit_scale|attn_mask)$"),
        config_values=_config_values(module, TEXT_CONFIG_KEYS),
    )


def clip_text(module: nn.Module) -> NetworkNames:
    """Return the names of SD 1.x's CLIPTextModel; LDM files use transformers' own names for it."""
    return NetworkNames(
        folder="text_encoder",
        stems=TRANSFORMERS_STEMS,
        prefix=CLIP_PREFIX,
        unused=POSITION_IDS,
        config_values=_config_values(module, TEXT_CONFIG_KEYS),
    )


def sdxl_clip_text(module: nn.Module) -> NetworkNames:
    """Return the names of SDXL's first text encoder, SD 1.x's."""
    return replace(clip_text(module), prefix=f"{SDXL_PREFIX}0.transformer.")


def sdxl_open_clip_text(module: nn.Module) -> NetworkNames:
    """Return the names of SDXL's second text encoder: OpenCLIP's, whole, as a CLIPTextModelWithProjection."""
    names = replace(clip_text(module), folder="text_encoder_2", prefix=f"{SDXL_PREFIX}1.model.")
    return replace(names, source=_open_clip_source, unused=re.compile(r"(logit_scale|attn_mask)$"))


def t5_text_in_folder(folder: str) -> Callable[[nn.Module], NetworkNames]:
    """Return a function that returns the names of a T5 or UMT5 encoder in this folder; only folders are read."""
    return network_in_folder(
        folder, None, *T5_CONFIG_KEYS, stems=TRANSFORMERS_STEMS, unused=r"encoder\.embed_tokens\.weight"
    )


def clip_text_in_folder(folder: str) -> Callable[[nn.Module], NetworkNames]:
    """Return a function that returns the names of a CLIPTextModel in this folder; only folders are read."""
    return network_in_folder(folder, None, *TEXT_CONFIG_KEYS, stems=TRANSFORMERS_STEMS, unused=POSITION_IDS.pattern)


def llama_text(module: nn.Module) -> NetworkNames:
    """Return the names of HunyuanVideo's Llama, whose last layers are not read; only folders are read."""
    unused = rf"({_match_layers_after(module, NUM_UNREAD_LLAMA)}|norm)\..*"
    return network_in_folder("text_encoder", None, *LLAMA_CONFIG_KEYS, stems=TRANSFORMERS_STEMS, unused=unused)(module)


def clip_vision(module: nn.Module) -> NetworkNames:
    """Return the names of Wan's image encoder, whose last layer is not read; only folders are read."""
    unused = rf"({CLIP_PART.pattern})?encoder\.{_match_layers_after(module, NUM_UNREAD_CLIP_VISION)}\..*"
    config_keys = ("num_attention_heads", "hidden_act")
    return network_in_folder("image_encoder", None, *config_keys, stems=TRANSFORMERS_STEMS, unused=unused)(module)


def _match_layers_after(module: Any, num: int) -> str:
    """Return a pattern of the layers that a published model has after the last one of a module."""
    depth = module.config.num_hidden_layers
    return rf"layers\.({'|'.join(str(depth + more) for more in range(num))})"


def network_in_folder(
    folder: str,
    class_name: str | None,
    *config_keys: str,
    stems: tuple[str, str] = DIFFUSERS_STEMS,
    unused: str = MATCH_NOTHING.pattern,
) -> Callable[[nn.Module], NetworkNames]:
    """Return a function that returns the names of a network in this folder, under its own names; only folders are read.

    Args:
        class_name: its class in config.json; config_keys: further keys there, which no tensor's shape shows.
        stems, unused: see NetworkNames.
    """
    pattern = re.compile(unused)
    return lambda module: NetworkNames(
        folder, _config_values(module, config_keys, class_name), stems, unused=pattern, is_folder_only=True
    )


def _config_values(module: Any, keys: Iterable[str], class_name: str | None = None) -> dict[str, Any]:
    return ({"_class_name": class_name} if class_name else {}) | {key: getattr(module.config, key) for key in keys}


def flux_transformer(module: nn.Module) -> NetworkNames:
    """Return the names of FLUX's transformer. A file's matrices of q, k and v are one, in single blocks with the MLP's."""
    return NetworkNames(
        folder="transformer",
        config_values=_config_values(module, FLUX_CONFIG_KEYS, "FluxTransformer2DModel"),
        source=_flux_source,
        is_alone_in_file=True,
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
_NUM_SINGLE_BLOCK_SLICES = 7  # slices of its first matrix: q, k, v and the MLP, which is four times as wide


def _flux_source(name: str) -> TensorSource:
    stored_name = _apply_rules(name, _FLUX_RULES)
    is_single = stored_name.startswith("single_blocks.")
    if packed := re.search(r"attn\.(?:to|add)_([qkv])(?:_proj)?\.", name):
        return TensorSource(stored_name, "qkv".index(packed[1]), _NUM_SINGLE_BLOCK_SLICES if is_single else 3)
    if is_single and ".proj_mlp." in name:
        return TensorSource(stored_name, 3, _NUM_SINGLE_BLOCK_SLICES, slice_span=4)
    return TensorSource(stored_name, layout="swapped_halves" if stored_name.startswith("final_layer.adaLN") else None)


def find_stored_name(name: str, names: Collection[str], prefix: str = "") -> str:
    """Return a tensor's name in a file: without CLIP_PART if transformers 5 wrote the file.

    Args:
        name: our name, with the file's prefix.
        names: all names in the file.
        prefix: the file's, e.g. "cond_stage_model.transformer.".
    """
    short_name = name.removeprefix(prefix)
    bare_name = prefix + short_name[match.end() if (match := CLIP_PART.match(short_name)) else 0 :]
    return bare_name if name not in names and bare_name in names else name


def to_ldm_tensors(networks: Iterable[tuple[nn.Module, NetworkNames]]) -> dict[str, Tensor]:
    """Return all tensors of modules under their names in an LDM file: the inverse of `source`.

    Packed projections are joined. The VAE's attention has 1 x 1 convolutions there, where we have linear layers.
    """
    slices_by_name: dict[str, dict[int, Tensor]] = {}
    for module, network in networks:
        for name, tensor in module.state_dict().items():
            source = network.source(name)
            if ".attn_1." in source.name and tensor.dim() == 2:
                tensor = tensor[:, :, None, None]
            slices = slices_by_name.setdefault(network.prefix + source.name, {})
            slices[source.first_slice] = source.change_layout(tensor)
    return {name: torch.cat([slices[n] for n in sorted(slices)]) for name, slices in slices_by_name.items()}


def _apply_rules(name: str, rules: Iterable[tuple[str, Any]]) -> str:
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name
