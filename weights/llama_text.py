"""Llama 3 as an encoder of captions: its states before the last layers, and the tokens that it reads.

HunyuanVideo (Kong et al. 2024, arXiv:2412.03603) reads captions so, inside of a system prompt whose own states are cut off.
The network: Grattafiori et al. 2024 (arXiv:2407.21783).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from weights.t5_text import read_words

if TYPE_CHECKING:
    from transformers import LlamaConfig

VOCABULARY = 128320
PAD = VOCABULARY - 1  # no text has it: it says where there is none
END = 256  # after the bytes of a caption: the published template has an end mark there, so that no text is empty
NUM_UNREAD = 2
"""Layers at the end that no state is taken from, nor from the norm behind them."""


class LlamaText(nn.Module):
    """transformers' LlamaModel without what is not read of it; its tensors have the names of published weights.

    Args:
        config: num_hidden_layers is that of the published model less NUM_UNREAD.
    """

    def __init__(self, config: LlamaConfig):
        super().__init__()
        from transformers import LlamaModel

        before = torch.get_rng_state()
        model = LlamaModel(config)
        torch.set_rng_state(before)
        model.norm = nn.Identity()
        self.config: Any = model.config
        self.embed_tokens, self.layers, self.rotary_emb = model.embed_tokens, model.layers, model.rotary_emb
        self._whole = (model,)  # its parts are ours: as a module of its own it would give each tensor a second name
        for parameter in self.parameters():  # as transformers draws them, under any of its versions
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=config.initializer_range)

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, L) -> (B, L, D)
        """Return the states; no state sees padding."""
        states = self._whole[0](input_ids=input_ids, attention_mask=(input_ids != PAD).long(), use_cache=False)
        return states.last_hidden_state


class LlamaTokenizer:
    """Captions inside of a template -> tokens, (B, L): the template with the caption, padding; cut at the end.

    Args:
        length: L.
        template: the text that the model is asked with, {} for the caption.
        num_before: the tokens before the caption.
        file: a model's tokenizer.json; None: bytes, for random weights, after the first `num_before` of the template.

    Raises:
        ValueError: the file is missing, or is none of a tokenizer.
    """

    def __init__(self, length: int, template: str, num_before: int, file: Path | None = None):
        self.length, self.template, self.num_before = length, template, num_before
        self.words = None if file is None else read_words("tokenizer", file)

    def __call__(self, captions: Sequence[str]) -> Tensor:
        tokens = torch.full((len(captions), self.length), PAD)
        for row, caption in zip(tokens, captions, strict=True):
            found = self._tokens_of(caption)[: self.length]
            row[: len(found)] = torch.tensor(found)
        return tokens

    def _tokens_of(self, caption: str) -> list[int]:
        if self.words is not None:
            return self.words.encode(self.template.replace("{}", caption)).ids
        return [*self.template.encode()[: self.num_before], *caption.encode(errors="replace"), END]
