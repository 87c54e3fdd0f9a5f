"""T5's text encoder with the tensor names of published weights, and the tokens that it reads.

Raffel et al. 2020 (arXiv:1910.10683), in the version 1.1 that FLUX and the video models take: gated GELU, no bias. UMT5
(Chung et al. 2023, arXiv:2304.09151), of 107 languages, has a table of relative places in each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import T5Config, UMT5Config

PAD, END = 0, 1
T5_VOCABULARY, UMT5_VOCABULARY = 32128, 256384
FIRST_BYTE = 3  # of tokens that stand for bytes, as in ByT5 (arXiv:2105.13626)
TOKENIZER = "tokenizer.json"


class T5Text(nn.Module):
    """transformers' T5EncoderModel; its table of tokens has one name, where that one has two for the same tensor.

    Args:
        config: of T5, or of UMT5, whose class is another one.
    """

    def __init__(self, config: T5Config | UMT5Config):
        super().__init__()
        from transformers import T5EncoderModel, UMT5EncoderModel

        before = torch.get_rng_state()
        model: Any = (UMT5EncoderModel if config.model_type == "umt5" else T5EncoderModel)(config)
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

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Tensor:  # (B, L) -> (B, L, D)
        """Return the last states. `mask`: (B, L), 0 where none looks; None: padding is seen, as in FLUX's pipeline."""
        return self.encoder(inputs_embeds=self.shared(input_ids), attention_mask=mask).last_hidden_state

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


def t5_config(*, multilingual: bool = False, **sizes: Any) -> T5Config | UMT5Config:
    """Return the configuration of a text encoder of these sizes. `multilingual`: UMT5's."""
    from transformers import T5Config, UMT5Config

    given = dict(feed_forward_proj="gated-gelu", is_encoder_decoder=False, use_cache=False, **sizes)
    if multilingual:
        return UMT5Config(vocab_size=UMT5_VOCABULARY, **given)
    return T5Config(vocab_size=T5_VOCABULARY, **given)


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
        self.words = None if file is None else read_words(file.parent.name, file)

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


def read_words(name: str, file: Path) -> Any:
    """Read a tokenizer.json: a `tokenizers.Tokenizer` that neither cuts nor pads.

    Raises:
        ValueError: it is missing, or none; `name` begins the message.
    """
    from tokenizers import Tokenizer

    try:
        words = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        ways = "Copy the whole diffusers folder, with it"
        raise ValueError(f"{name}: {file} is missing, or no tokenizer's ({error}). {ways}.") from error
    words.no_padding()
    words.no_truncation()
    return words
