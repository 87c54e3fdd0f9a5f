"""CLIP's text encoder under the names that published files have, whichever transformers is installed.

transformers 4 names its tensors text_model.*, and so do published weights. transformers 5 has and writes them without that.
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

    # Asked for by diffusers' pipelines, as transformers' own models have them.

    @property
    def device(self) -> torch.device:
        return self.text_model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.text_model.dtype

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Take and give what CLIPTextModel does: input_ids (B, L) -> last_hidden_state (B, L, D), pooler_output (B, D)."""
        return self.text_model(*args, **kwargs)


def build_text_model(config: CLIPTextConfig) -> nn.Module:
    """Build CLIP's text encoder with random weights, from torch's global generator; names as `text_model.encoder...`."""
    from transformers import CLIPTextModel

    model = CLIPTextModel(config)
    return model if hasattr(model, "text_model") else TextModel(model)


def stored_name(name: str, names: Collection[str], before: str = "") -> str:
    """Return the name that a file has for one of ours: without `text_model.` where transformers 5 has written it.

    Args:
        name: ours, with what the file puts before every name.
        names: of the file.
        before: what that is, e.g. "cond_stage_model.transformer.".
    """
    bare = before + name.removeprefix(before).removeprefix(PREFIX)
    return bare if name not in names and bare in names else name
