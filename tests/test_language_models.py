"""Language models as text encoders: their tokenizers against transformers' own, and published folders with more in them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from families import load_family
from families.language_models import FIRST_BYTE, LanguageTokenizer
from families.sana import INSTRUCTION
from weights import published

TEXTS = ["a red fox, naïve café", "", "word " * 40]


def save_published_tokenizer(folder: Path, texts: Sequence[str] = TEXTS, **config: object) -> Path:
    """A byte-pair encoder that was trained on a few words, with a mark before each text, as transformers saves it."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(special_tokens=["<pad>", "<eos>", "<bos>"], initial_alphabet=alphabet, vocab_size=500)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["published", "bytes", "template"])
def test_tokens_are_those_of_transformers_from_the_saved_folder(kind, side, tmp_path):
    from transformers import AutoTokenizer

    source = save_published_tokenizer(tmp_path / "source", padding_side=side)
    template = "<bos>read: {}" if kind == "template" else "{}"
    folder = None if kind == "bytes" else source
    ours = LanguageTokenizer(24, 0, 2, template, folder, padding_side=None)
    ours.save(tmp_path / "saved", "PreTrainedTokenizerFast")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "saved")
    options = dict(padding="max_length", truncation=True, max_length=24, add_special_tokens=kind != "template")
    expected = theirs([template.replace("{}", text) for text in TEXTS], **options)["input_ids"]
    assert ours(TEXTS).tolist() == expected and ours(TEXTS).max() < FIRST_BYTE + 256


def test_captions_of_sana_are_read_after_its_instruction_as_by_its_pipeline(tmp_path):
    """The unconditional call has no instruction."""
    from diffusers import SanaPipeline
    from transformers import PreTrainedTokenizerFast

    family = load_family("sana", "tiny", "1600m")
    family.read_tokenizers(save_published_tokenizer(tmp_path / "tokenizer", [INSTRUCTION]).parent)
    torch.manual_seed(0)
    gemma = family.build_encoders()["gemma"].eval()
    parts: dict[str, Any] = dict.fromkeys(("vae", "transformer", "scheduler"))
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tmp_path / "tokenizer")
    pipeline = SanaPipeline(tokenizer=tokenizer, text_encoder=gemma, **parts)
    instruction = inspect.signature(SanaPipeline.__call__).parameters["complex_human_instruction"].default
    captions = ["A red fox, naïve café"]
    with torch.no_grad():
        ours = family.encode_text({"gemma": gemma}, family.tokenize([*captions, ""]))
        states = pipeline.encode_prompt(captions, device="cpu", complex_human_instruction=instruction)
    text, mask = torch.cat(states[::2]), torch.cat(states[1::2]).bool()
    assert torch.equal(ours["mask"].bool(), mask) and mask[1].sum() == 1
    torch.testing.assert_close(ours["text"][mask], text[mask], rtol=1e-5, atol=1e-5)


def test_a_language_model_is_read_from_a_folder_with_its_head_and_its_image_encoder(tmp_path):
    """Qwen-Image's text encoder is stored as a whole Qwen2.5-VL; of FLUX.2's the later layers are not read."""
    import transformers

    family = load_family("qwen_image", "tiny", "stock")
    text = {key: value for key, value in family.sizes["qwen"].items() if key != "rope_parameters"}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [1, 1, 2]}
    vision = dict(depth=1, hidden_size=16, intermediate_size=16, num_heads=2, out_hidden_size=16)
    torch.manual_seed(0)
    whole = transformers.Qwen2_5_VLForConditionalGeneration(
        transformers.Qwen2_5_VLConfig(text_config=text | {"rope_parameters": rope}, vision_config=vision)
    )
    whole.save_pretrained(tmp_path / "text_encoder")
    ours = family.build_encoders()["qwen"]
    published.load_networks(str(tmp_path), {"qwen": (ours, family.network_names()["qwen"](ours))})
    tokens = family.tokenize(["a red fox", ""])["qwen_tokens"][:, :300]
    inputs = dict(input_ids=tokens, attention_mask=tokens != family.sizes["pad"])
    with torch.no_grad():
        states = ours(**inputs).last_hidden_state
        expected = whole(**inputs, output_hidden_states=True).hidden_states[-1]
    mask = inputs["attention_mask"]
    torch.testing.assert_close(states[mask], expected[mask], rtol=1e-5, atol=1e-5)

    family = load_family("flux2", "tiny", "klein_4b")
    sizes = {key: value for key, value in family.sizes["text"].items() if key != "layers"}
    deeper = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(num_hidden_layers=6, **sizes))
    deeper.save_pretrained(tmp_path / "deeper" / "text_encoder")
    ours = family.build_encoders()["text"]
    published.load_networks(str(tmp_path / "deeper"), {"text": (ours, family.network_names()["text"](ours))})
    tokens = family.tokenize(["a red fox"])["text_tokens"]
    with torch.no_grad():
        states = family.encode_text({"text": ours}, {"text_tokens": tokens})["text"]
        output = deeper(input_ids=tokens, attention_mask=tokens != 0, output_hidden_states=True)
    torch.testing.assert_close(states, torch.cat([output.hidden_states[layer] for layer in (1, 2, 3)], dim=-1))
