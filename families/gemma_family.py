"""Shared by the families whose captions Gemma reads: sana and prx. Both are rectified flows with the same times.

Shapes: B batch, L text tokens, D = 2304 width of Gemma's states.
    gemma_tokens (B, L) -> text (B, L, D), mask (B, L): 1 where a caption has a token
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from families.language_models import BYTE_VOCABULARY, LanguageTokenizer
from families.spec import Column, Family

PAD, START = 0, 2  # of Gemma's tokenizer
VOCABULARY, WIDTH = 256000, 2304
SHIFT = 3.0  # of both in scheduler_config.json
TINY_GEMMA = dict(vocab_size=BYTE_VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
TINY_GEMMA |= dict(num_attention_heads=2, num_key_value_heads=1, head_dim=8)


class GemmaFamily(Family):
    """The methods of `families.spec.Family` around the captions.

    Args:
        sizes: `gemma`: of its configuration; {}: the published one.
    """

    predictions = ("flow",)
    objective: Mapping[str, Any] = dict(prediction="flow", timesteps="logit_normal", shift=SHIFT, caption_dropout=0.1)
    scheduler_settings: Mapping[str, Any] = dict(shift=SHIFT)
    sampling_spacing = "inclusive"
    clip_tokenizer_folder = None
    prefix = ""
    """What captions are read after, see LanguageTokenizer."""

    def __init__(self, sizes: Mapping[str, Any], variant: str):
        self.sizes, self.variant = sizes, variant
        self.text_width = sizes["gemma"].get("hidden_size", WIDTH)
        self.vocabulary_size = sizes["gemma"].get("vocab_size", VOCABULARY)
        self.tokenizer = LanguageTokenizer(self.num_tokens, PAD, START, prefix=self.prefix)

    def clean_caption(self, caption: str) -> str:
        """Return a caption as the published pipeline tokenizes it."""
        raise NotImplementedError

    def text_columns(self) -> dict[str, Column]:
        return {"gemma_tokens": Column((self.num_tokens,), torch.int64, below=self.vocabulary_size)}

    def stored_columns(self) -> dict[str, Column]:
        return super().stored_columns() | {"mask": Column((self.num_tokens,), torch.float16)}

    def tokenize(self, captions: Sequence[str]) -> dict[str, Tensor]:
        return {"gemma_tokens": self.tokenizer([self.clean_caption(caption) for caption in captions])}

    def read_tokenizers(self, folder: Path) -> None:
        """Gemma's vocabulary is published with its weights; random ones read bytes."""
        self.tokenizer = LanguageTokenizer(self.num_tokens, PAD, START, folder=folder / "tokenizer")

    def save_tokenizers(self, folder: Path) -> dict[str, str]:
        return {"tokenizer": self.tokenizer.save(folder / "tokenizer", "GemmaTokenizerFast")}

    def encode_text(self, encoders: Mapping[str, nn.Module], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mask = self.text_mask(batch)["mask"]
        text = encoders["gemma"](input_ids=batch["gemma_tokens"].long(), attention_mask=mask).last_hidden_state
        return {"text": text, "mask": mask.to(text.dtype)}

    def text_mask(self, text: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"mask": text["gemma_tokens"] != PAD}
