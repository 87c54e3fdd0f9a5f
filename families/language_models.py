"""Language models as text encoders, and their tokenizers: Gemma 2, T5Gemma, Qwen, Mistral. The networks are transformers'.

Random weights come without a tokenizer: each byte of a caption is a token then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from families.pipeline_files import build_byte_tokenizer, read_first_json, save_tokenizer_config
from weights.encoder_networks import TOKENIZER_FILE, read_tokenizer
from weights.ldm_names import TRANSFORMERS_STEMS, NetworkNames, network_in_folder

FIRST_BYTE = 256
"""The first of the tokens that stand for bytes; smaller numbers are free for the special tokens of published tokenizers."""
BYTE_VOCABULARY = FIRST_BYTE + 256
PREFIX = FIRST_BYTE - 1
"""The token of a tokenizer's `prefix`."""


class LanguageTokenizer:
    """Captions -> tokens, (B, L): the start token if the model has one, the text in its template, padding; cut at the end.

    Args:
        length: L.
        pad: the token of padding.
        start: the start token of random weights; a published tokenizer adds its own. None: none.
        template: the text around a caption, which is at {}.
        prefix: a text before captions that is a single token where bytes are the others, so that tests are fast.
        folder: a published tokenizer's; None: bytes.
        padding_side: None: the published tokenizer's.

    Raises:
        ValueError: the folder has no tokenizer.json.
    """

    def __init__(
        self,
        length: int,
        pad: int,
        start: int | None,
        template: str = "{}",
        folder: Path | None = None,
        *,
        prefix: str = "",
        padding_side: Literal["left", "right"] | None = "right",
    ):
        self.length, self.pad, self.start, self.template, self.folder = length, pad, start, template, folder
        self.prefix = prefix
        self._published = None if folder is None else read_tokenizer(folder.name, folder / TOKENIZER_FILE)
        stated = {} if folder is None else read_first_json([folder / "tokenizer_config.json"])
        self.padding_side = padding_side or stated.get("padding_side", "right")

    def __call__(self, captions: Sequence[str]) -> Tensor:
        tokens = torch.full((len(captions), self.length), self.pad)
        for row, caption in zip(tokens, captions, strict=True):
            numbers = self.encode(self.template.replace("{}", caption))[: self.length]
            first = 0 if self.padding_side == "right" else self.length - len(numbers)
            row[first : first + len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return tokens

    def encode(self, text: str) -> list[int]:
        """Return a text's tokens, of any number, with the start token."""
        if self._published is not None:  # a template has all special tokens
            return self._published.encode(text, add_special_tokens=self.template == "{}").ids
        start = [] if self.start is None else [self.start]
        if self.prefix and text.startswith(self.prefix):
            start, text = [*start, PREFIX], text.removeprefix(self.prefix)
        return [*start, *(FIRST_BYTE + byte for byte in text.encode(errors="replace"))]

    def save(self, folder: Path, class_name: str, **config: Any) -> str:
        """Write the tokenizer into a new folder for transformers, a published one as it is; return its class.

        Args:
            class_name: of the published one; bytes have transformers' PreTrainedTokenizerFast.
            config: further keys of the tokenizer_config.json of bytes.
        """
        if self.folder is not None:
            shutil.copytree(self.folder, folder)
            return class_name
        from tokenizers import AddedToken, processors

        marks = {"<pad>": self.pad} | ({} if self.start is None else {"<start>": self.start})
        tokenizer = build_byte_tokenizer(marks | ({self.prefix: PREFIX} if self.prefix else {}), FIRST_BYTE)
        if self.prefix:
            tokenizer.add_tokens([AddedToken(self.prefix)])
        if self.start is not None:
            tokenizer.post_processor = processors.TemplateProcessing(
                single="<start> $A", special_tokens=[("<start>", self.start)]
            )
        folder.mkdir()
        tokenizer.save(str(folder / TOKENIZER_FILE))
        kind = "PreTrainedTokenizerFast"
        settings = dict(tokenizer_class=kind, pad_token="<pad>", padding_side="right", model_max_length=self.length)
        save_tokenizer_config(folder, **settings, **config)
        return kind


def build_language_model(kind: str, config_kind: str, **sizes: Any) -> nn.Module:
    """Build transformers' language model of a class, with random weights from torch's global generator.

    Args:
        kind, config_kind: names of transformers' classes, of the model and of its configuration.
        sizes: arguments of the configuration.
    """
    import transformers

    return getattr(transformers, kind)(getattr(transformers, config_kind)(use_cache=False, **sizes))


def language_model_in_folder(
    unused: str = "lm_head.weight", folder: str = "text_encoder"
) -> Callable[[nn.Module], NetworkNames]:
    """Return a function that returns a language model's names in this folder; only folders are read.

    Args:
        unused: a pattern of the tensors there that the model does not have.
    """
    keys = ("num_attention_heads", "num_key_value_heads")
    return network_in_folder(folder, None, *keys, stems=TRANSFORMERS_STEMS, unused=unused)
