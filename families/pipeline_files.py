"""A model as a diffusers pipeline folder, which diffusers and transformers load without this project; or as a single file.

The last part reads what a published model, in such a folder or file, says of itself.

model_index.json             the class of the pipeline and of each part, see `Family.pipeline`
unet/ vae/ text_encoder/     config.json and a .safetensors file each; FLUX: transformer/; it and SDXL: text_encoder_2/
tokenizer/ scheduler/        SDXL, FLUX: tokenizer_2/; Wan's image to video: image_encoder/ and image_processor/
unet/mixed_norms.py          for mlperf of SD2 alone: its UNet is no class of diffusers', see families/mixed_norms.py
"""

from __future__ import annotations

import functools
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from common.files import write_json
from common.value_types import ImageSize
from families.sampling import FLOW, FLOW_SCHEDULERS
from families.spec import Family, Pipeline
from weights.encoder_networks import (
    CLIP_MEAN,
    CLIP_NUM_TOKENS,
    CLIP_STD,
    LLAMA_END,
    LLAMA_PAD,
    T5_END,
    T5_FIRST_BYTE,
    T5_PAD,
    TOKENIZER_FILE,
    ClipTextModel,
    ClipVision,
    LlamaText,
    LlamaTokenizer,
    T5Text,
)
from weights.files import open_weights
from weights.ldm_names import to_ldm_tensors
from weights.published import Networks

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHIPPED_CODE = ("families.mixed_norms",)
"""Modules with our own classes that are copied next to the weights: they import nothing from this project."""
NO_PART = [None, None]


def collect_networks(family: Family, denoiser: nn.Module, encoders: Mapping[str, nn.Module]) -> Networks:
    """Return all networks of a model with their published names. Raises ValueError: diffusers has no class for one."""
    get_pipeline(family)
    modules = {"denoiser": denoiser, **encoders}
    for label, module in modules.items():
        library, name = _find_class(module)
        if library not in ("diffusers", "transformers", *SHIPPED_CODE):
            text = f"{label}: a {name} of {family.name} is no class of diffusers or transformers"
            raise ValueError(f"{text}, and no loader for it is written here. Give a run of another variant.")
    return {label: (module, family.network_names()[label](module)) for label, module in modules.items()}


def get_pipeline(family: Family) -> Pipeline:
    """Return diffusers' pipeline of a family. Raises ValueError: there is none."""
    if family.pipeline is None:
        text = f"model.variant: {family.variant} of {family.name} is not exported: no pipeline of diffusers takes its parts"
        raise ValueError(f"{text}. Give a run of another variant.")
    return family.pipeline


def save_pipeline(
    folder: Path, family: Family, networks: Networks, scheduler: Any, *, size: ImageSize, dtype: str
) -> str | None:
    """Write a pipeline into an empty folder.

    Args:
        scheduler: of `Family.pipeline_scheduler`, as the model is to be sampled.
        size: default (width, height) of the pipeline's images, px; the pipelines of FLUX and of videos have constants.
        dtype: fp32, fp16 or bf16, in which the weights are stored.

    Returns:
        The Python file in it that diffusers has to run to load it; None: there is none.

    Raises:
        ValueError: a value is too large for the type.
        OSError: the folder cannot be written, e.g. the disk is full.
    """
    from diffusers import __version__

    pipeline = get_pipeline(family)
    index: dict[str, Any] = {"_class_name": pipeline.name, "_diffusers_version": __version__, **pipeline.settings}
    index |= {**dict.fromkeys(pipeline.absent_parts, NO_PART), "scheduler": ["diffusers", type(scheduler).__name__]}
    denoiser: Any = networks["denoiser"][0]
    if "sample_size" in denoiser.config:
        _, height, width = family.latent_shape(size)
        sides = [height, width] if height != width and not pipeline.is_square else max(height, width)
        denoiser.register_to_config(sample_size=sides)
    for label, (module, network) in networks.items():
        (folder / network.folder).mkdir()
        index[network.folder] = _save_network(folder / network.folder, module)
        stored = module.published_tensors() if isinstance(module, ClipVision | LlamaText) else module.state_dict()
        tensors = {name: cast_for_storage(f"{label}.{name}", tensor, dtype) for name, tensor in stored.items()}
        write_safetensors(folder / network.folder / f"{network.stems[0]}.safetensors", tensors)
    index |= {name: ["transformers", kind] for name, kind in family.save_tokenizers(folder).items()}
    index |= pipeline.settings  # again: one may name another library for a part's class
    scheduler.save_config(folder / "scheduler")
    write_json(folder / "model_index.json", dict(sorted(index.items())))
    return next((file.relative_to(folder).as_posix() for file in folder.rglob("*.py")), None)


def collect_single_file_tensors(networks: Networks, dtype: str) -> dict[str, Tensor]:
    """Return a model's tensors under their names in a single file; of FLUX only the transformer's, as published.

    Raises ValueError: there are no such names, or see `save_pipeline`.
    """
    single_network = [pair for pair in networks.values() if pair[1].is_alone_in_file]
    nameless = [label for label, (_, network) in networks.items() if not network.prefix]
    if nameless and not single_network:
        text = f"out: a .safetensors file, but {', '.join(nameless)} of this model have no names in a single file"
        raise ValueError(f"{text}. Give the name of a folder.")
    return {
        name: cast_for_storage(name, tensor, dtype)
        for name, tensor in to_ldm_tensors(single_network or networks.values()).items()
    }


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> None:
    """Write tensors and metadata into one file. Raises OSError: it cannot be written, e.g. the disk is full."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **metadata})
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error
    path.chmod(mode)  # safetensors makes it readable for its owner only


def cast_for_storage(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Return a tensor as it is stored. Raises ValueError: a value is too large for the type."""
    is_float = tensor.is_floating_point()
    stored = tensor.detach().to("cpu", DTYPES[dtype] if is_float else tensor.dtype).contiguous()
    if dtype == "fp16" and not torch.isfinite(stored).all() and torch.isfinite(tensor).all():
        raise ValueError(f"dtype: fp16, but {name} has values beyond 65,504. Set dtype=bf16, or fp32.")
    return stored


def _save_network(folder: Path, module: Any) -> list[str]:
    """Write a network's settings, and its code if diffusers does not have it; return its class for model_index.json."""
    library, name = _find_class(module)
    if library == "transformers":
        config = getattr(module, "published_config", module.config)
        config.architectures = [name]
        write_json(folder / "config.json", json.loads(config.to_json_string(use_diff=True)))
        return [library, name]
    module.save_config(folder)
    if library == "diffusers":
        return [library, name]
    code = Path(str(sys.modules[library].__file__))
    (folder / code.name).write_bytes(code.read_bytes())
    return [code.stem, name]


def _find_class(module: nn.Module) -> tuple[str, str]:
    """Return a network's library and its class there, or its module in this project.

    Those of weights.encoder_networks stand for classes of transformers, whose tensors they have under the published names.
    """
    if isinstance(module, T5Text):
        return "transformers", "UMT5EncoderModel" if module.config.model_type == "umt5" else "T5EncoderModel"
    if isinstance(module, LlamaText | ClipVision):
        return "transformers", "LlamaModel" if isinstance(module, LlamaText) else "CLIPVisionModel"
    kind = type(module.text_model if isinstance(module, ClipTextModel) else module)
    library = kind.__module__.partition(".")[0]
    return library if library in ("diffusers", "transformers") else kind.__module__, kind.__name__


# --- a family's tokenizer in the files that transformers loads ---
#
# Special tokens are not read in captions (`split_special_tokens`): SD2 pads with token 0, which is "!", and a "!" of a
# caption stays one. One difference is left: OpenCLIP first repairs a caption (ftfy, HTML entities), transformers does
# not.

CLIP_START_TEXT, CLIP_END_TEXT = "<|startoftext|>", "<|endoftext|>"
CLIP_ZERO_TEXT = "!"
"""Token 0: OpenCLIP pads with it."""


@functools.cache
def load_open_clip_tokenizer() -> ModuleType:
    """Return the module open_clip.tokenizer, loaded without its package, which imports timm and W&B for half a second."""
    package = importlib.util.find_spec("open_clip")
    assert package is not None and package.origin is not None
    spec = importlib.util.spec_from_file_location("open_clip.tokenizer", Path(package.origin).with_name("tokenizer.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def tokenize_clip(captions: Sequence[str]) -> Tensor:
    """# -> int64 (B, 77), padded with 0."""
    return load_open_clip_tokenizer().tokenize(list(captions), context_length=CLIP_NUM_TOKENS)


def save_clip_tokenizer(folder: Path, pad_token: str) -> str:
    """Write OpenCLIP's byte-pair encoder into a new folder, as in Stable Diffusion's folders; return its class."""
    folder.mkdir()
    tokenizer = load_open_clip_tokenizer().SimpleTokenizer()
    names = {"<start_of_text>": CLIP_START_TEXT, "<end_of_text>": CLIP_END_TEXT}
    vocabulary = {names.get(token, token): number for token, number in tokenizer.encoder.items()}
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False))
    merges = ["#version: 0.2", *(" ".join(pair) for pair in tokenizer.bpe_ranks), ""]
    (folder / "merges.txt").write_text("\n".join(merges))
    ends = dict(bos_token=CLIP_START_TEXT, eos_token=CLIP_END_TEXT, unk_token=CLIP_END_TEXT, pad_token=pad_token)
    save_tokenizer_config(folder, tokenizer_class="CLIPTokenizer", model_max_length=CLIP_NUM_TOKENS, **ends)
    return "CLIPTokenizer"


def save_word_tokenizer(
    folder: Path, num_tokens: int, word_tokens: Mapping[str, int], special_tokens: Mapping[str, int]
) -> str:
    """Write a tokenizer that has a token for each word of a-z, in any case, into a new folder; return its class.

    Args:
        word_tokens: word -> its token.
        special_tokens: pad_token, unk_token, bos_token and eos_token -> their tokens.
    """
    from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors

    names = {key: f"<{key.removesuffix('_token')}>" for key in special_tokens}
    vocabulary = {**word_tokens, **{names[key]: number for key, number in special_tokens.items()}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=names["unk_token"]))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[a-z]+"), behavior="removed", invert=True)
    start, end = names["bos_token"], names["eos_token"]
    ends = [(start, special_tokens["bos_token"]), (end, special_tokens["eos_token"])]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{start} $A {end}", special_tokens=ends)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    save_tokenizer_config(folder, tokenizer_class="PreTrainedTokenizerFast", model_max_length=num_tokens, **names)
    return "PreTrainedTokenizerFast"


def save_t5_tokenizer(folder: Path, published: Any, num_tokens: int) -> str:
    """Write a tokenizer as `weights.encoder_networks.T5Tokenizer` into a new folder; return its class.

    Args:
        published: the tokenizer of a published model, which is copied; None: each byte is a token.
    """
    from tokenizers import Tokenizer, processors

    copy = (
        Tokenizer.from_str(published.to_str())
        if published is not None
        else build_byte_tokenizer({"<pad>": T5_PAD, "</s>": T5_END}, T5_FIRST_BYTE)
    )
    pad, end = copy.id_to_token(T5_PAD), copy.id_to_token(T5_END)
    copy.post_processor = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, T5_END)])
    folder.mkdir()
    copy.save(str(folder / TOKENIZER_FILE))
    # T5's own table reads "</s>" in a caption as the end token; without such a table it is text.
    is_text = not copy.get_added_tokens_decoder()
    class_name, names = "PreTrainedTokenizerFast", dict(pad_token=pad, eos_token=end)
    save_tokenizer_config(
        folder, tokenizer_class=class_name, model_max_length=num_tokens, split_special_tokens=is_text, **names
    )
    return class_name


def save_llama_tokenizer(folder: Path, llama: LlamaTokenizer) -> str:
    """Write a tokenizer for captions in their template into a new folder; return its class.

    transformers' LlamaTokenizer splits text as Llama 2 did, whatever the file says.
    """
    from tokenizers import AddedToken, Tokenizer, normalizers

    if llama.published is not None:
        tokenizer = Tokenizer.from_str(llama.published.to_str())
        marks = tokenizer.get_added_tokens_decoder()
        pad = marks[max(marks)].content  # a mask hides it
    else:
        pad, (before, end) = "<pad>", llama.template.split("{}")
        tokenizer = build_byte_tokenizer({pad: LLAMA_PAD, end: LLAMA_END}, 0)
        tokenizer.normalizer = normalizers.Replace(before[llama.num_prefix_tokens :], "")
        tokenizer.add_tokens([AddedToken(end, normalized=True)])
    folder.mkdir()
    tokenizer.save(str(folder / TOKENIZER_FILE))
    class_name, has_marks = "PreTrainedTokenizerFast", llama.published is not None
    settings = dict(tokenizer_class=class_name, pad_token=pad, padding_side="right", model_max_length=llama.length)
    save_tokenizer_config(folder, split_special_tokens=not has_marks, **settings)
    return class_name


def save_clip_image_processor(folder: Path, side: int) -> str:
    """Write what prepares images as `weights.encoder_networks.ClipVision` does into a new folder; return its class."""
    from transformers import CLIPImageProcessor

    sizes: dict[str, Any] = dict(size={"shortest_edge": side}, crop_size=side)
    CLIPImageProcessor(image_mean=list(CLIP_MEAN), image_std=list(CLIP_STD), **sizes).save_pretrained(folder)
    return "CLIPImageProcessor"


def build_byte_tokenizer(marks: Mapping[str, int], first_byte: int) -> Any:
    """Build a `tokenizers.Tokenizer` with a token for each byte, from `first_byte` on, and these marks."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    characters = load_open_clip_tokenizer().bytes_to_unicode()  # byte -> the character that stands for it, as in GPT-2
    table = {**marks, **{name: first_byte + byte for byte, name in characters.items()}}
    tokenizer = Tokenizer(models.BPE(table, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def save_tokenizer_config(folder: Path, **settings: Any) -> None:
    """Write a tokenizer_config.json."""
    settings = {"split_special_tokens": True, **settings}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")


# --- what a published model says of itself ---

STATED_PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v"}
"""prediction_type of a scheduler's configuration -> objective.prediction."""


def read_stated_objective(path: Path) -> dict[str, Any]:
    """Return the keys of `objective` that a diffusers folder's scheduler names: prediction, zero_terminal_snr."""
    stated = read_scheduler_config(path)
    if stated.get("_class_name") in FLOW_SCHEDULERS.values():
        return {"prediction": FLOW, "zero_terminal_snr": False}
    if stated.get("prediction_type") not in STATED_PREDICTIONS:
        return {}
    return {
        "prediction": STATED_PREDICTIONS[stated["prediction_type"]],
        "zero_terminal_snr": stated.get("rescale_betas_zero_snr") is True,
    }


def read_scheduler_config(path: Path) -> dict[str, Any]:
    """Return a diffusers folder's scheduler configuration. `path`: the folder, a file in it, or its denoiser's folder."""
    parents = [path.parent] if path.name in ("unet", "transformer") or path.is_file() else []
    return read_first_json([folder / "scheduler" / "scheduler_config.json" for folder in (path, *parents)])


def read_unet_config(path: Path) -> dict[str, Any]:
    """Return the arguments of a diffusers folder's UNet; {}: it does not say."""
    return read_first_json([path / "unet" / "config.json", path / "config.json"])


def read_first_json(paths: Sequence[Path]) -> dict[str, Any]:
    """Return the object of the first JSON file that holds one; {}: none does."""
    for path in paths:
        try:
            stated = json.loads(path.read_text())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(stated, dict):
            return stated
    return {}


def has_ema_weights(path: Path) -> bool:
    """True where a single file has EMA weights, with or without the training weights."""
    return _has_tensor(path, "model_ema.diffusion_model")


def is_lora_file(path: Path) -> bool:
    """True for a single file of LoRA, as diffusers (peft) and kohya's scripts name its tensors."""
    return _has_tensor(path, ".lora_A.") or _has_tensor(path, ".lora_down.")


def _has_tensor(path: Path, part: str) -> bool:
    try:
        return any(part in name for name in open_weights(path).entries)
    except ValueError:
        return False  # reported where its weights are read
