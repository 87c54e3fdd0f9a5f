"""T5's text encoder with the tensor names of published weights, and the tokens that it reads.

Raffel et al. 2020 (arXiv:1910.10683), in the version 1.1 that FLUX and the video models take: gated GELU, no bias.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import T5Config

PAD, END = 0, 1
FIRST_BYTE = 3  # of tokens that stand for bytes, as in ByT5 (arXiv:2105.13626)
TOKENIZER = "tokenizer.json"


class T5Text(nn.Module):
    """transformers' T5EncoderModel; its table of tokens has one name, where that one has two for the same tensor."""

    def __init__(self, config: T5Config):
        super().__init__()
        from transformers import T5EncoderModel

        before = torch.get_rng_state()
        model = T5EncoderModel(config)
        torch.set_rng_state(before)
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

    def forward(self, input_ids: Tensor) -> Tensor:  # (B, L) -> (B, L, D)
        """Return the last states; padding is seen, as in FLUX's pipeline, which gives no mask."""
        return self.encoder(inputs_embeds=self.shared(input_ids)).last_hidden_state

    def _draw_weights(self) -> None:
        """Draw random weights as transformers does it, from torch's global generator, under any of its versions."""
        c = self.config
        width, inner = c.d_model**-0.5, (c.d_model * c.d_kv) ** -0.5
        spread = {"q": inner, "k": width, "v": width, "o": (c.num_heads * c.d_kv) ** -0.5, "wo": c.d_ff**-0.5}
        spread |= {"wi_0": width, "wi_1": width, "relative_attention_bias": width, "shared": 1.0}
        for name, parameter in self.named_parameters():
            layer = name.split(".")[-2]
            if layer in spread:
                nn.init.normal_(parameter, std=spread[layer])
            else:
                nn.init.ones_(parameter)  # norms


class T5Tokenizer:
    """Captions -> tokens, (B, L): text, end mark, padding; too long a text is cut, its end mark kept.

    Args:
        length: L.
        file: a model's tokenizer.json; None: bytes, for random weights, since T5's own table is published with its weights.

    Attributes:
        words: the file's `tokenizers.Tokenizer`; None: bytes.

    Raises:
        ValueError: the file is missing, or is none of a tokenizer.
    """

    def __init__(self, length: int, file: Path | None = None):
        self.length = length
        self.words: Any = None
        if file is not None:
            from tokenizers import Tokenizer

            try:
                self.words = Tokenizer.from_file(str(file))
            except Exception as error:  # the library raises Exception itself
                ways = "Copy the whole diffusers folder, with it"
                raise ValueError(f"tokenizer_2: {file} is missing, or no tokenizer's ({error}). {ways}.") from error
            self.words.no_padding()
            self.words.no_truncation()

    def __call__(self, captions: Sequence[str]) -> Tensor:
        tokens = torch.full((len(captions), self.length), PAD)
        for row, caption in zip(tokens, captions, strict=True):
            found = [*self._tokens_of(caption)[: self.length - 1], END]
            row[: len(found)] = torch.tensor(found)
        return tokens

    def _tokens_of(self, caption: str) -> list[int]:
        if self.words is None:
            return [FIRST_BYTE + byte for byte in caption.encode(errors="replace")]
        return self.words.encode(caption, add_special_tokens=False).ids
