"""What is specific to one family of models. `load_family` maps a family's name to the module that builds it.

Any file that needs a network imports this room. It imports weights/ and common/; a family imports no other family.
"""

from __future__ import annotations

import importlib

from families.spec import Family

FAMILIES = {
    "sd2": "families.sd2",
    "sdxl": "families.sdxl",
    "flux": "families.flux",
    "mochi": "families.mochi",
    "hunyuan_video": "families.hunyuan_video",
    "wan": "families.wan",
    "shapes": "families.shapes.family",
}
"""family -> module; each module has `build(preset, variant) -> Family`. Imported only when asked for."""


def load_family(name: str, preset: str, variant: str) -> Family:
    """Build a family in one of its sizes.

    Args:
        name: a key of FAMILIES.
        preset: "full", or "tiny": the same code and block types, small enough for a CPU.
        variant: a version of the network that the family knows.

    Raises:
        ValueError: an unknown name, preset or variant; the message lists the known ones.
    """
    if name not in FAMILIES:
        raise ValueError(f"model.family: unknown family '{name}'. Known: {', '.join(sorted(FAMILIES))}.")
    return importlib.import_module(FAMILIES[name]).build(preset, variant)
