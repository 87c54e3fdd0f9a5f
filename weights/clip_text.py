"""CLIP's text encoder with the tensor names of published weights, under any version of transformers.

Published weights and transformers 4 name the tensors text_model.*; transformers 5 leaves out that prefix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import CLIPTextConfig

NUM_TOKENS = 77
VOCABULARY = 49408  # of CLIP's byte-pair encoder
END_TOKEN = VOCABULARY - 1


class TextModel(nn.Module):
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


def padded_with_end(tokens: Tensor) -> Tensor:  # (B, 77) -> (B, 77)
    """Pad with the end mark, as CLIP ViT-L's text encoder was trained; batches are padded with 0, as open_clip does it."""
    return torch.where((tokens == END_TOKEN).cumsum(dim=1) > 0, END_TOKEN, tokens)


def text_config(**sizes: Any) -> CLIPTextConfig:
    """Return the configuration of a text encoder of these sizes, with CLIP's vocabulary."""
    from transformers import CLIPTextConfig

    return CLIPTextConfig(vocab_size=VOCABULARY, max_position_embeddings=NUM_TOKENS, **sizes)


def build_text_model(config: CLIPTextConfig, *, projected: bool = False) -> nn.Module:
    """Build CLIP's text encoder with random weights, from torch's global generator; names as `text_model.encoder...`.

    Args:
        projected: with the projection of the whole caption's state to (B, config.projection_dim), `text_embeds`.
    """
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    before = torch.get_rng_state()
    model = CLIPTextModelWithProjection(config) if projected else CLIPTextModel(config)
    torch.set_rng_state(before)
    named = model if hasattr(model, "text_model") else TextModel(model)
    draw_weights(named, config)
    if projected:
        nn.init.normal_(named.text_projection.weight, std=config.hidden_size**-0.5 * config.initializer_factor)
    return named


def draw_weights(model: nn.Module, config: CLIPTextConfig) -> None:
    """Draw a text encoder's weights as transformers 4 does, number for number.

    transformers 5 draws others from the same generator. A run with random encoders would be another one, and its checkpoints
    would be refused.
    """
    for module in model.modules():  # what the constructors draw, and the weights below replace
        if isinstance(module, nn.Linear | nn.Embedding):
            module.reset_parameters()
    width, depth, factor = config.hidden_size, config.num_hidden_layers, config.initializer_factor
    embeddings, layers = model.text_model.embeddings, model.text_model.encoder.layers
    for table in (embeddings.token_embedding, embeddings.position_embedding):
        nn.init.normal_(table.weight, std=0.02 * factor)
    inner, outer = width**-0.5 * (2 * depth) ** -0.5 * factor, width**-0.5 * factor
    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for linear, std in (
            *((part, inner) for part in (attention.q_proj, attention.k_proj, attention.v_proj)),
            (attention.out_proj, outer),
            (mlp.fc1, (2 * width) ** -0.5 * factor),
            (mlp.fc2, inner),
        ):
            nn.init.normal_(linear.weight, std=std)
            nn.init.zeros_(linear.bias)
