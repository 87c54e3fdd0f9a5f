"""A family's tokenizer in the files that transformers loads: the tokens of `Family.tokenize`, for use elsewhere.

Special tokens are not read in captions (`split_special_tokens`): SD2 pads with token 0, which is "!", and a "!" of a caption
stays one. One difference is left: OpenCLIP first repairs a caption (ftfy, HTML entities), transformers does not.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import Tensor

from weights.clip_text import NUM_TOKENS
from weights.t5_text import END, FIRST_BYTE, PAD, TOKENIZER

CLIP_START, CLIP_END = "<|startoftext|>", "<|endoftext|>"
CLIP_ZERO = "!"
"""Token 0: OpenCLIP pads with it."""


@functools.cache
def open_clip_tokenizer() -> ModuleType:
    """Return the module open_clip.tokenizer, loaded alone: with its package come timm and W&B, half a second long."""
    package = importlib.util.find_spec("open_clip")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("open_clip.tokenizer", Path(package.origin).with_name("tokenizer.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clip_tokens(captions: Sequence[str]) -> Tensor:
    """# -> int64 (B, 77), padded with 0."""
    return open_clip_tokenizer().tokenize(list(captions), context_length=NUM_TOKENS)


def save_clip(folder: Path, pad_token: str) -> str:
    """Write OpenCLIP's byte-pair encoder, as Stable Diffusion's folders have it, into a new folder; return its class."""
    folder.mkdir()
    known = open_clip_tokenizer().SimpleTokenizer()
    names = {"<start_of_text>": CLIP_START, "<end_of_text>": CLIP_END}
    vocabulary = {names.get(token, token): number for token, number in known.encoder.items()}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in known.bpe_ranks), ""]
    (folder / "merges.txt").write_text("\n".join(merges))
    ends = dict(bos_token=CLIP_START, eos_token=CLIP_END, unk_token=CLIP_END, pad_token=pad_token)
    _save_config(folder, tokenizer_class="CLIPTokenizer", model_max_length=NUM_TOKENS, **ends)
    return "CLIPTokenizer"


def save_words(folder: Path, num_tokens: int, token_of: Mapping[str, int], special: Mapping[str, int]) -> str:
    """Write a tokenizer that has a token for each word of a-z, in any case, into a new folder; return the class.

    Args:
        token_of: word -> its token.
        special: pad_token, unk_token, bos_token and eos_token -> their tokens.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    names = {key: f"<{key.removesuffix('_token')}>" for key in special}
    vocabulary = {**token_of, **{names[key]: number for key, number in special.items()}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk_token"]))
    words.normalizer = normalizers.Lowercase()
    words.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]+"), behavior="removed", invert=True)
    start, end = names["bos_token"], names["eos_token"]
    ends = [(start, special["bos_token"]), (end, special["eos_token"])]
    words.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=ends)
    folder.mkdir()
    words.save(str(folder / "tokenizer.json"))
    _save_config(folder, tokenizer_class="PreTrainedTokenizerFast", model_max_length=num_tokens, **names)
    return "PreTrainedTokenizerFast"


def save_t5(folder: Path, words: Any, num_tokens: int) -> str:
    """Write what `weights.t5_text.T5Tokenizer` makes into a new folder: text, end mark, padding. Return its class.

    Args:
        words: the tokenizer of a published model, which is copied; None: each byte is a token.
    """
    from tokenizers import Tokenizer, processors

    copy = Tokenizer.from_str(words.to_str()) if words is not None else _bytes()
    pad, end = copy.id_to_token(PAD), copy.id_to_token(END)
    copy.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, END)])
    folder.mkdir()
    copy.save(str(folder / TOKENIZER))
    # T5's own table reads "</s>" in a caption as the end mark; where it is no such table, it is text.
    is_text = not copy.get_added_tokens_decoder()
    kind, names = "PreTrainedTokenizerFast", dict(pad_token=pad, eos_token=end)
    _save_config(folder, tokenizer_class=kind, model_max_length=num_tokens, split_special_tokens=is_text, **names)
    return kind


def _bytes() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = open_clip_tokenizer().bytes_to_unicode()  # byte -> the character that stands for it, as in GPT-2
    table = {"<pad>": PAD, "</s>": END, **{name: FIRST_BYTE + byte for byte, name in characters.items()}}
    found = Tokenizer(models.BPE(table, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    return found


def _save_config(folder: Path, **settings: Any) -> None:
    settings = {"split_special_tokens": True, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
