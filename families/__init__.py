"""What is specific to one family of models. `load_family` maps a family's name to the module that builds it.

Any file that needs a network imports this room. It imports weights/ and common/; a family imports no other family.
"""

from __future__ import annotations

import importlib

from common.plugins import is_plugin, parse_plugin
from families.spec import Family

FAMILIES = {
    "sd2": "families.sd2",
    "sdxl": "families.sdxl",
    "sd3": "families.sd3",
    "flux": "families.flux",
    "prx": "families.prx",
    "sana": "families.sana",
    "qwen_image": "families.qwen_image",
    "flux2": "families.flux2",
    "mochi": "families.mochi",
    "hunyuan_video": "families.hunyuan_video",
    "wan": "families.wan",
    "shapes": "families.shapes.family",
}
"""family -> module; each module has `build(preset, variant) -> Family`. Imported only when asked for."""
NEEDED = ("name", "objective", "pixels_per_latent", "latent_scale", "num_tokens", "vocabulary_size", "text_width")
"""Attributes that a class from outside has to set."""
METHODS = ("build_denoiser", "build_encoders", "tokenize", "encode_text")
"""What it has to define."""


def load_family(name: str, preset: str, variant: str) -> Family:
    """Build a family in one of its sizes.

    Args:
        name: a key of FAMILIES, or a class from outside (common/plugins.py), which is called with preset and variant.
        preset: "full", or "tiny": the same code and block types, small enough for a CPU.
        variant: a version of the network that the family knows.

    Raises:
        ValueError: an unknown name, preset or variant; the message lists the known ones. Or see common/plugins.py.
    """
    if is_plugin(name):
        return _load_from_outside(name, preset, variant)
    if name not in FAMILIES:
        raise ValueError(
            f"model.family: unknown family '{name}'. Known: {', '.join(sorted(FAMILIES))}, or FILE.py:Class."
        )
    return importlib.import_module(FAMILIES[name]).build(preset, variant)


def _load_from_outside(name: str, preset: str, variant: str) -> Family:
    plugin = parse_plugin("model.family", name)
    family = plugin.build(Family, preset, variant)
    family.variant = getattr(family, "variant", variant)
    missing = [attribute for attribute in NEEDED if not hasattr(family, attribute)]
    missing += [f"{method}()" for method in METHODS if getattr(type(family), method) is getattr(Family, method)]
    if "objective" not in missing:
        keys = ("prediction", "caption_dropout", "timesteps", *(["shift"] if "flow" in family.predictions else []))
        missing += [f"objective['{key}']" for key in keys if key not in family.objective]
    if missing:
        raise ValueError(
            f"model.family: {plugin.text} does not define {', '.join(missing)}. families/spec.py says what they are."
        )
    return family
