"""The frozen encoders that transformers has: CLIP's text and image encoders, T5, Llama; and the tokenizers of the last two.

They have the tensor names of published weights and the same random weights under any version of transformers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import CLIPTextConfig, CLIPVisionConfig, LlamaConfig, T5Config, UMT5Config

# --- the layers of a published model that nothing reads, and that ours do not have ---


def with_layers(config: Any, num: int) -> Any:
    """Return a copy of a configuration with so many layers more."""
    config = copy.deepcopy(config)
    config.num_hidden_layers += num
    return config


def unread_layers(module: Any, num: int) -> dict[str, Tensor]:
    """Return the tensors of so many layers after a module's last one, all zeros."""
    depth, tensors = module.config.num_hidden_layers, module.state_dict()
    last = {name: tensor for name, tensor in tensors.items() if f"layers.{depth - 1}." in name}
    return {
        name.replace(f"layers.{depth - 1}.", f"layers.{depth + number}."): torch.zeros_like(tensor)
        for number in range(num)
        for name, tensor in last.items()
    }


# --- CLIP's text encoder ---

# Published weights and transformers 4 name its tensors text_model.*; transformers 5 leaves out that prefix.

CLIP_NUM_TOKENS = 77
CLIP_VOCABULARY = 49408  # of CLIP's byte-pair encoder
CLIP_END = CLIP_VOCABULARY - 1


class ClipTextModel(nn.Module):
    """transformers 5's CLIPTextModel with the names of transformers 4."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.text_model = model
        self.config = model.config

    # diffusers' pipelines read `device` and `dtype`, as transformers' own models have them.

    @property
    def device(self) -> torch.device:
        return self.text_model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.text_model.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Same as CLIPTextModel: input_ids (B, L) -> last_hidden_state (B, L, D), pooler_output (B, D)."""
        return self.text_model(*args, **kwargs)


def pad_with_end_token(tokens: Tensor) -> Tensor:  # (B, 77) -> (B, 77)
    """Pad with the end token, as CLIP ViT-L's text encoder was trained; batches are padded with 0, as open_clip does it."""
    return torch.where((tokens == CLIP_END).cumsum(dim=1) > 0, CLIP_END, tokens)


def clip_text_config(**sizes: Any) -> CLIPTextConfig:
    """Return the configuration of a text encoder of these sizes, with CLIP's vocabulary."""
    from transformers import CLIPTextConfig

    return CLIPTextConfig(vocab_size=CLIP_VOCABULARY, max_position_embeddings=CLIP_NUM_TOKENS, **sizes)


def build_clip_text(config: CLIPTextConfig, *, projected: bool = False) -> nn.Module:
    """Build CLIP's text encoder with random weights, from torch's global generator; names as `text_model.encoder...`.

    Args:
        projected: with the projection of the caption's pooled state to (B, config.projection_dim), `text_embeds`.
    """
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    with torch.random.fork_rng(devices=[]):  # the weights are drawn below
        model = CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)
    encoder = model if hasattr(model, "text_model") else ClipTextModel(model)
    draw_clip_text_weights(encoder, config)
    if projected:
        nn.init.normal_(encoder.text_projection.weight, std=config.hidden_size**-0.5 * config.initializer_factor)
    return encoder


def draw_clip_text_weights(model: nn.Module, config: CLIPTextConfig) -> None:
    """Draw a text encoder's weights as transformers 4 does, number for number.

    transformers 5 draws other weights from the same generator: a run with random encoders would not be reproduced, and its
    checkpoints would be refused.
    """
    for module in model.modules():  # what the constructors draw, and the weights below replace
        if isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()
    width, depth, factor = config.hidden_size, config.num_hidden_layers, config.initializer_factor
    embeddings, layers = model.text_model.embeddings, model.text_model.encoder.layers
    for table in (embeddings.token_embedding, embeddings.position_embedding):
        nn.init.normal_(table.weight, std=0.02 * factor)
    residual_std, output_std = width**-0.5 * (2 * depth) ** -0.5 * factor, width**-0.5 * factor
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear, std in (
            *((linear, residual_std) for linear in (attention.q_proj, attention.k_proj, attention.v_proj)),
            (attention.out_proj, output_std),
            (mlp.fc1, (2 * width) ** -0.5 * factor),
            (mlp.fc2, residual_std),
        ):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)


# --- CLIP's image encoder ---
#
# Wan's image-to-video model (Wan Team 2025, arXiv:2503.20314) receives the first frame's states.

NUM_UNREAD_CLIP_VISION = 1  # layers at the end of the published model
CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
"""Of the images that CLIP was trained on; transformers' OPENAI_CLIP_MEAN and OPENAI_CLIP_STD."""


class ClipVision(nn.Module):
    """transformers' CLIPVisionModel. Args: config: num_hidden_layers is the published model's less NUM_UNREAD_CLIP_VISION."""

    def __init__(self, config: CLIPVisionConfig):
        super().__init__()
        from transformers import CLIPVisionModel

        with torch.random.fork_rng(devices=[]):
            model: Any = CLIPVisionModel(config)
        self.vision_model = getattr(model, "vision_model", model)  # transformers 5 leaves that name out
        self.config: Any = model.config
        self.published_config = with_layers(model.config, NUM_UNREAD_CLIP_VISION)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=config.initializer_range)
        for norm in (module for module in self.modules() if isinstance(module, nn.LayerNorm)):
            norm.reset_parameters()

    def published_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of CLIPVisionModel; those of the unread layer are zeros."""
        return {**self.state_dict(), **unread_layers(self, NUM_UNREAD_CLIP_VISION)}

    def forward(self, images: Tensor) -> Tensor:  # (B, 3, H, W) in [-1, 1] -> (B, 1 + patches, D)
        """Return the states of the image's middle square."""
        dtype = next(self.parameters()).dtype
        return self.vision_model(pixel_values=self.preprocess(images).to(dtype)).last_hidden_state

    def preprocess(self, images: Tensor) -> Tensor:  # (B, 3, H, W) in [-1, 1] -> (B, 3, side, side)
        """Resize and normalize as transformers' CLIPImageProcessor does, which also rounds to bytes."""
        side = self.config.image_size
        height, width = covering_size(images.shape[-2:], side)
        images = F.interpolate(images.float(), (height, width), mode="bicubic", antialias=True, align_corners=False)
        top, left = (height - side) // 2, (width - side) // 2
        unit = ((images[..., top : top + side, left : left + side] + 1.0) / 2.0).clamp(0.0, 1.0)
        mean, std = (torch.tensor(value, device=unit.device)[:, None, None] for value in (CLIP_MEAN, CLIP_STD))
        return (unit - mean) / std


def covering_size(size: Sequence[int], side: int) -> tuple[int, int]:
    """Return (height, width) of an image scaled so that its shorter side is `side`; the longer one is rounded down."""
    height, width = size
    return (side * height // min(size), side * width // min(size))


# --- T5's text encoder and tokenizer ---
#
# Raffel et al. 2020 (arXiv:1910.10683), in the version 1.1 that FLUX and the video models take: gated GELU, no bias.
# UMT5 (Chung et al. 2023, arXiv:2304.09151), of 107 languages, has a table of relative positions in each layer.

T5_PAD, T5_END = 0, 1
T5_VOCABULARY, UMT5_VOCABULARY = 32128, 256384
T5_FIRST_BYTE = 3  # the first of the tokens that stand for bytes, as in ByT5 (arXiv:2105.13626)
TOKENIZER_FILE = "tokenizer.json"


class T5Text(nn.Module):
    """transformers' T5EncoderModel, but with one name for the token embedding, which has two there.

    Args:
        config: of T5, or of UMT5, for which transformers has another class.
    """

    def __init__(self, config: T5Config | UMT5Config):
        super().__init__()
        from transformers import T5EncoderModel, UMT5EncoderModel

        with torch.random.fork_rng(devices=[]):
            model: Any = (UMT5EncoderModel if config.model_type == "umt5" else T5EncoderModel)(config)
        self.config: Any = model.config
        self.shared, self.encoder = model.shared, model.encoder
        self.encoder.embed_tokens = None
        self._draw_weights()

    @property
    def device(self) -> torch.device:
        return self.shared.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.shared.weight.dtype

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:  # (B, L) -> (B, L, D)
        """Return the last states. `mask`: (B, L), 0 for masked tokens; None: padding is not masked, as in FLUX's pipeline."""
        return self.encoder(inputs_embeds=self.shared(input_ids), attention_mask=mask).last_hidden_state

    def _draw_weights(self) -> None:
        """Draw random weights as transformers does it, from torch's global generator, under any of its versions."""
        c = self.config
        width, inner = c.d_model**-0.5, (c.d_model * c.d_kv) ** -0.5
        std = {"q": inner, "k": width, "v": width, "o": (c.num_heads * c.d_kv) ** -0.5, "wo": c.d_ff**-0.5}
        std |= {"wi_0": width, "wi_1": width, "relative_attention_bias": width, "shared": 1.0}
        for name, parameter in self.named_parameters():
            layer = name.split(".")[-2]
            if layer in std:
                nn.init.normal_(parameter, std=std[layer])
            else:
                nn.init.ones_(parameter)  # norms


def t5_config(*, multilingual: bool = False, **sizes: Any) -> T5Config | UMT5Config:
    """Return the configuration of a text encoder of these sizes. `multilingual`: UMT5's."""
    from transformers import T5Config, UMT5Config

    settings = dict(feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False, **sizes)
    if multilingual:
        return UMT5Config(vocab_size=UMT5_VOCABULARY, **settings)
    return T5Config(vocab_size=T5_VOCABULARY, **settings)


class T5Tokenizer:
    """Captions -> tokens, (B, L): text, end token, padding. A text that is too long is cut before its end token.

    Args:
        length: L.
        file: a model's tokenizer.json; None: each byte is a token, for random weights (T5's table comes with its weights).

    Attributes:
        published: the file's `tokenizers.Tokenizer`; None: bytes.

    Raises:
        ValueError: the file is missing or is not a tokenizer's.
    """

    def __init__(self, length: int, file: Path | None = None):
        self.length = length
        self.published = None if file is None else read_tokenizer(file.parent.name, file)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        tokens = torch.full((len(captions), self.length), T5_PAD)
        for row, caption in zip(tokens, captions, strict=True):
            numbers = [*self._encode(caption)[: self.length - 1], T5_END]
            row[: len(numbers)] = torch.tensor(numbers)
        return tokens

    def _encode(self, caption: str) -> list[int]:
        if self.published is None:
            return [T5_FIRST_BYTE + byte for byte in caption.encode(errors="replace")]
        return self.published.encode(caption, add_special_tokens=False).ids


def read_tokenizer(name: str, file: Path) -> Any:
    """Read a tokenizer.json: a `tokenizers.Tokenizer` that neither truncates nor pads.

    Raises:
        ValueError: it is missing or is not a tokenizer's; `name` begins the message.
    """
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        advice = "Copy the whole diffusers folder, with it"
        raise ValueError(f"{name}: {file} is missing, or no tokenizer's ({error}). {advice}.") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


# --- Llama 3 as a text encoder, and its tokenizer ---
#
# HunyuanVideo (Kong et al. 2024, arXiv:2412.03603) encodes captions with it, inside a system prompt whose states are cut
# off. The network: Grattafiori et al. 2024 (arXiv:2407.21783).

LLAMA_VOCABULARY = 128320
LLAMA_PAD = LLAMA_VOCABULARY - 1  # in no text
LLAMA_END = 256  # after the bytes of a caption: the published template has an end token there, so that no text is empty
NUM_UNREAD_LLAMA = 2
"""Layers at the end of the published model whose states are not read; nor is the norm after them."""


class LlamaText(nn.Module):
    """transformers' LlamaModel without its unread layers; its tensors have the names of published weights.

    Args:
        config: num_hidden_layers is that of the published model less NUM_UNREAD_LLAMA.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        from transformers import LlamaModel

        with torch.random.fork_rng(devices=[]):
            model = LlamaModel(config)
        model.norm = nn.Identity()
        self.config: Any = model.config
        self.published_config = with_layers(model.config, NUM_UNREAD_LLAMA)
        self.embed_tokens, self.layers, self.rotary_emb = model.embed_tokens, model.layers, model.rotary_emb
        self._model = (model,)  # in a tuple: as a registered module it would give each tensor a second name
        for parameter in self.parameters():  # as transformers draws them, under any of its versions
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.initializer_range)

    def published_tensors(self) -> dict[str, Tensor]:
        """Return the tensors of LlamaModel; those of the unread layers are zeros, its norm's are 1."""
        norm = {"norm.weight": torch.ones(self.config.hidden_size)}
        return {**self.state_dict(), **unread_layers(self, NUM_UNREAD_LLAMA), **norm}

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, L) -> (B, L, D)
        """Return the states; padding is masked."""
        states = self._model[0](input_ids=input_ids, attention_mask=(input_ids != LLAMA_PAD).long(), use_cache=False)
        return states.last_hidden_state


class LlamaTokenizer:
    """Captions in a template -> tokens, (B, L): the template with the caption, padding; cut at the end.

    Args:
        length: L.
        template: the prompt of the model, with {} for the caption.
        num_prefix_tokens: of the template, before the caption.
        file: a model's tokenizer.json; None: bytes, for random weights, after the template's first `num_prefix_tokens` bytes.

    Raises:
        ValueError: the file is missing or is not a tokenizer's.
    """

    def __init__(self, length: int, template: str, num_prefix_tokens: int, file: Path | None = None):
        self.length, self.template, self.num_prefix_tokens = length, template, num_prefix_tokens
        self.published = None if file is None else read_tokenizer("tokenizer", file)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        tokens = torch.full((len(captions), self.length), LLAMA_PAD)
        for row, caption in zip(tokens, captions, strict=True):
            numbers = self._encode(caption)[: self.length]
            row[: len(numbers)] = torch.tensor(numbers)
        return tokens

    def _encode(self, caption: str) -> list[int]:
        if self.published is not None:
            return self.published.encode(self.template.replace("{}", caption)).ids
        return [*self.template.encode()[: self.num_prefix_tokens], *caption.encode(errors="replace"), LLAMA_END]
