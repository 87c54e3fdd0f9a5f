"""A model as a diffusers pipeline folder, which diffusers and transformers load without this project; or as a single file.

model_index.json             the class of the pipeline and of each part, see `Family.pipeline`
unet/ vae/ text_encoder/     config.json and a .safetensors file each; FLUX: transformer/; it and SDXL: text_encoder_2/
tokenizer/ scheduler/        SDXL, FLUX: tokenizer_2/
unet/mixed_norms.py          for mlperf of SD2 alone: its UNet is no class of diffusers', see zoo/mixed_norms.py
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cli.files import write_json
from cli.limits import ImageSize
from weights.clip_text import TextModel
from weights.ldm_names import Network, as_ldm
from weights.t5_text import T5Text
from zoo.spec import Family, Pipeline

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHIPPED_CODE = ("zoo.mixed_norms",)
"""Modules with classes of ours that are copied beside the weights: they import nothing of this project."""
NONE = [None, None]

Networks = Mapping[str, tuple[nn.Module, Network]]
"""Encoder or "denoiser" -> the network and its place."""


def networks_of(family: Family, denoiser: nn.Module, encoders: Mapping[str, nn.Module]) -> Networks:
    """Return all networks of a model with their places. Raises ValueError: diffusers has no class for one."""
    pipeline_of(family)
    modules = {"denoiser": denoiser, **encoders}
    for label, module in modules.items():
        library, name = _class_of(module)
        if library not in ("diffusers", "transformers", *SHIPPED_CODE):
            given = f"{label}: a {name} of {family.name} is no class of diffusers or transformers"
            raise ValueError(f"{given}, and no loader for it is written here. Give a run of another variant.")
    return {label: (module, family.published()[label](module)) for label, module in modules.items()}


def pipeline_of(family: Family) -> Pipeline:
    """Return diffusers' pipeline of a family. Raises ValueError: there is none."""
    if family.pipeline is None:
        why = "no pipeline of diffusers takes its parts"
        if family.pictures == "videos":
            why = "folders of videos are not written yet; a snapshot has its weights under diffusers' own names"
        given = f"model.variant: {family.variant} of {family.name} is not exported: {why}"
        raise ValueError(f"{given}. Give a run of another variant.")
    return family.pipeline


def save_folder(
    folder: Path, family: Family, networks: Networks, scheduler: Any, *, size: ImageSize, dtype: str
) -> str | None:
    """Write a pipeline into an empty folder.

    Args:
        scheduler: of `Family.pipeline_scheduler`, as the model is to be sampled.
        size: (width, height) of the images that the pipeline makes where none is given, px; FLUX's makes 1024 x 1024.
        dtype: fp32, fp16 or bf16, in which the weights are stored.

    Returns:
        The file of Python in it that diffusers has to run to load it; None: there is none.

    Raises:
        ValueError: a value is too large for the type.
        OSError: the disk is full, or the like.
    """
    from diffusers import __version__

    pipeline = pipeline_of(family)
    index: dict[str, Any] = {"_class_name": pipeline.name, "_diffusers_version": __version__, **pipeline.settings}
    index |= {**dict.fromkeys(pipeline.absent, NONE), "scheduler": ["diffusers", type(scheduler).__name__]}
    denoiser: Any = networks["denoiser"][0]
    if "sample_size" in denoiser.config:
        _, height, width = family.latent_shape(size)
        sides = [height, width] if height != width and not pipeline.square else max(height, width)
        denoiser.register_to_config(sample_size=sides)
    for label, (module, network) in networks.items():
        (folder / network.folder).mkdir()
        index[network.folder] = _save_network(folder / network.folder, module)
        tensors = {name: in_type(f"{label}.{name}", t, dtype) for name, t in module.state_dict().items()}
        write_safetensors(folder / network.folder / f"{network.stems[0]}.safetensors", tensors)
    index |= {name: ["transformers", kind] for name, kind in family.save_tokenizers(folder).items()}
    scheduler.save_config(folder / "scheduler")
    write_json(folder / "model_index.json", dict(sorted(index.items())))
    return next((file.relative_to(folder).as_posix() for file in folder.rglob("*.py")), None)


def single_file_tensors(networks: Networks, dtype: str) -> dict[str, Tensor]:
    """Return a model's tensors under their names in a single file: of FLUX those of its transformer alone, as published.

    Raises ValueError: see `save_folder`.
    """
    alone = [pair for pair in networks.values() if pair[1].alone]
    return {name: in_type(name, tensor, dtype) for name, tensor in as_ldm(alone or networks.values()).items()}


def write_safetensors(path: Path, tensors: Mapping[str, Tensor], **about: str) -> None:
    """Write tensors, and texts about them, into one file. Raises OSError: the disk is full, or the like."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path.touch()
    mode = path.stat().st_mode
    try:
        save_file(dict(tensors), path, metadata={"format": "pt", **about})
    except SafetensorError as error:
        raise OSError(f"{path.name} cannot be written: {error}") from error
    path.chmod(mode)  # safetensors leaves it to its writer alone


def in_type(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """Return a tensor as it is stored. Raises ValueError: a value is too large for the type."""
    stored = tensor.detach().to("cpu", DTYPES[dtype]).contiguous()
    if dtype == "fp16" and not torch.isfinite(stored).all() and torch.isfinite(tensor).all():
        raise ValueError(f"dtype: fp16, but {name} has values beyond 65,504. Say dtype=bf16, or fp32.")
    return stored


def _save_network(folder: Path, module: Any) -> list[str]:
    """Write a network's settings, and its code where diffusers does not have it; return where its class is."""
    library, name = _class_of(module)
    if library == "transformers":
        module.config.architectures = [name]
        write_json(folder / "config.json", json.loads(module.config.to_json_string(use_diff=True)))
        return [library, name]
    module.save_config(folder)
    if library == "diffusers":
        return [library, name]
    code = Path(str(sys.modules[library].__file__))
    (folder / code.name).write_bytes(code.read_bytes())
    return [code.stem, name]


def _class_of(module: nn.Module) -> tuple[str, str]:
    """Return a network's library and its class there, or the module of this project that it is of.

    T5Text and TextModel stand for classes of transformers, whose tensors they have under the published names.
    """
    if isinstance(module, T5Text):
        return "transformers", "T5EncoderModel"
    kind = type(module.text_model if isinstance(module, TextModel) else module)
    library = kind.__module__.partition(".")[0]
    return library if library in ("diffusers", "transformers") else kind.__module__, kind.__name__
