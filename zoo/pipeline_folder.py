"""A model as a diffusers pipeline folder, which diffusers and transformers load without this project; or as an LDM file.

model_index.json             the class of each part; the pipeline is StableDiffusionPipeline
unet/ vae/ text_encoder/     config.json and a .safetensors file each
tokenizer/ scheduler/
unet/mixed_norms.py          for mlperf alone: its UNet is no class of diffusers', see zoo/mixed_norms.py
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
from zoo.sampling import Scheduler
from zoo.spec import Family

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
SHIPPED_CODE = ("zoo.mixed_norms",)
"""Modules with classes of ours that are copied beside the weights: they import nothing of this project."""
EXPORTED = ("sd2", "shapes")
"""Families whose pipeline is diffusers' StableDiffusionPipeline, which is the one that is written here."""
NONE = [None, None]
OF_PUBLISHED = dict(clip_sample=False, set_alpha_to_one=False)
"""Settings in all of Stable Diffusion's published scheduler files: another sampler can be made of any of them."""

Networks = Mapping[str, tuple[nn.Module, Network]]
"""Encoder or "denoiser" -> the network and its place."""


def networks_of(family: Family, denoiser: nn.Module, encoders: Mapping[str, nn.Module]) -> Networks:
    """Return all networks of a model with their places. Raises ValueError: diffusers has no class for one."""
    if family.name not in EXPORTED:
        raise ValueError(f"model.family: {family.name} is not exported yet. Possible: {', '.join(EXPORTED)}.")
    if family.predictions == ("flow",):
        given = f"model.variant: {family.variant} of {family.name} is not exported: FLUX's pipeline needs a T5"
        raise ValueError(f"{given}. Possible: stock.")
    modules = {"denoiser": denoiser, **encoders}
    for label, module in modules.items():
        if _library(module) not in ("diffusers", "transformers") and type(_bare(module)).__module__ not in SHIPPED_CODE:
            given = f"{label}: a {type(module).__name__} of {family.name} is no class of diffusers or transformers"
            raise ValueError(f"{given}, and no loader for it is written here. Possible: the families sd2 and shapes.")
    return {label: (module, family.published()[label](module)) for label, module in modules.items()}


def num_bytes(networks: Networks, dtype: str) -> int:
    """Return the bytes of all tensors when stored in a type."""
    numbers = sum(tensor.numel() for module, _ in networks.values() for tensor in module.state_dict().values())
    return numbers * DTYPES[dtype].itemsize


def save_folder(
    folder: Path, family: Family, networks: Networks, scheduler: Scheduler, *, size: ImageSize, dtype: str
) -> str | None:
    """Write a pipeline into an empty folder.

    Args:
        scheduler: of zoo.sampling.build_scheduler, as the model is to be sampled.
        size: (width, height) of the images that the pipeline makes where none is given, px.
        dtype: fp32, fp16 or bf16, in which the weights are stored.

    Returns:
        The file of Python in it that diffusers has to run to load it; None: there is none.

    Raises:
        ValueError: a value is too large for the type.
        OSError: the disk is full, or the like.
    """
    from diffusers import __version__

    index: dict[str, Any] = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": __version__}
    index |= {"requires_safety_checker": False, **dict.fromkeys(("safety_checker", "feature_extractor"), NONE)}
    index |= {"image_encoder": NONE, "scheduler": ["diffusers", type(scheduler).__name__]}
    _, height, width = family.latent_shape(size)
    denoiser: Any = networks["denoiser"][0]
    denoiser.register_to_config(sample_size=height if height == width else [height, width])
    for label, (module, network) in networks.items():
        (folder / network.folder).mkdir()
        index[network.folder] = _save_network(folder / network.folder, _bare(module), label)
        tensors = {name: in_type(f"{label}.{name}", t, dtype) for name, t in module.state_dict().items()}
        write_safetensors(folder / network.folder / f"{network.stems[0]}.safetensors", tensors)
    (folder / "tokenizer").mkdir()
    index["tokenizer"] = ["transformers", family.save_tokenizer(folder / "tokenizer")]
    scheduler.register_to_config(**OF_PUBLISHED)  # type: ignore[attr-defined]
    scheduler.save_config(folder / "scheduler")  # type: ignore[attr-defined]
    write_json(folder / "model_index.json", dict(sorted(index.items())))
    return next((file.relative_to(folder).as_posix() for file in folder.rglob("*.py")), None)


def ldm_tensors(networks: Networks, dtype: str) -> dict[str, Tensor]:
    """Return all tensors of a model under their names in an LDM file. Raises ValueError: see `save_folder`."""
    return {name: in_type(name, tensor, dtype) for name, tensor in as_ldm(networks.values()).items()}


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


def _save_network(folder: Path, module: Any, label: str) -> list[str]:
    """Write a network's settings, and its code where diffusers does not have it; return where its class is."""
    name = type(module).__name__
    if _library(module) == "transformers":
        module.config.architectures = [name]
        write_json(folder / "config.json", json.loads(module.config.to_json_string(use_diff=True)))
        return ["transformers", name]
    module.save_config(folder)
    if _library(module) == "diffusers":
        return ["diffusers", name]
    code = Path(str(sys.modules[type(module).__module__].__file__))
    (folder / code.name).write_bytes(code.read_bytes())
    return [code.stem, name]


def _bare(module: nn.Module) -> nn.Module:
    return module.text_model if isinstance(module, TextModel) else module


def _library(module: nn.Module) -> str:
    return type(_bare(module)).__module__.partition(".")[0]
