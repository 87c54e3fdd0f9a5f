"""CLIP's text encoder with the tensor names of published weights, under any version of transformers.

Published weights and transformers 4 name the tensors text_model.*; transformers 5 leaves out that prefix.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import CLIPTextConfig

PREFIX = "text_model."


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


def build_text_model(config: CLIPTextConfig) -> nn.Module:
    """Build CLIP's text encoder with random weights, from torch's global generator; names as `text_model.encoder...`."""
    from transformers import CLIPTextModel

    before = torch.get_rng_state()
    model = CLIPTextModel(config)
    torch.set_rng_state(before)
    named = model if hasattr(model, "text_model") else TextModel(model)
    draw_weights(named, config)
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


def stored_name(name: str, names: Collection[str], before: str = "") -> str:
    """Return a tensor's name in a file: without `text_model.` if transformers 5 wrote the file.

    Args:
        name: our name, with the file's prefix.
        names: all names in the file.
        before: the file's prefix, e.g. "cond_stage_model.transformer.".
    """
    bare = before + name.removeprefix(before).removeprefix(PREFIX)
    return bare if name not in names and bare in names else name
