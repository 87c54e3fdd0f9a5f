"""Which samples are left out of a stage although they could be used: too small, too long, too unlike their captions.

Size and aspect are those of the picture, and, where the metadata has them (`original_width`, `original_height`, as
img2dataset writes them), those that it had before it was resized too. The similarity of picture and caption stands in the
metadata under the name that its set gave it; it is never computed here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stages.images import SampleError

# Of LAION, of COYO, of DataComp.
USUAL_SIMILARITIES = ("similarity", "clip_similarity_vitl14", "clip_similarity_vitb32")
USUAL_SIMILARITIES += ("clip_l14_similarity_score", "clip_b32_similarity_score")


class LeftOut(SampleError):
    """A sample that could be used, and is not wanted."""


@dataclass(frozen=True)
class Filters:
    """What is wanted; None: anything."""

    min_side_px: int | None = None
    max_aspect: float | None = None
    min_similarity: float | None = None
    similarity: str | None = None
    """Field of the metadata; None: the first usual one."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields of the metadata that may have the similarity."""
        return (self.similarity,) if self.similarity else USUAL_SIMILARITIES

    @property
    def facts(self) -> dict[str, Any]:
        """Return it for the plan; empty where anything is wanted."""
        given = {name: value for name, value in vars(self).items() if value is not None}
        return {"filters": given} if given else {}

    def check(self, width: int, height: int, metadata: Any) -> None:
        """Raise LeftOut if a picture of this size, px, and with this metadata is not wanted."""
        known = metadata if isinstance(metadata, Mapping) else {}
        before = [as_number(known.get(name)) for name in ("original_width", "original_height")]
        sizes = [(width, height), *([tuple(before)] if all(side and side > 0 for side in before) else [])]
        if self.min_side_px is not None and min(map(min, sizes)) < self.min_side_px:
            raise LeftOut(f"side below {self.min_side_px} px")
        if self.max_aspect is not None and max(max(size) / min(size) for size in sizes) > self.max_aspect:
            raise LeftOut(f"aspect above {self.max_aspect:g}")
        if self.min_similarity is not None:
            numbers = [number for name in self.names if (number := as_number(known.get(name))) is not None]
            if not numbers:
                raise LeftOut("no similarity in the metadata")
            if not numbers[0] >= self.min_similarity:
                raise LeftOut(f"similarity below {self.min_similarity:g}")

    def check_names(self, metadata: Sequence[Any], where: str) -> None:
        """Raise ValueError if a similarity is wanted, and none of the first samples' metadata has one."""
        known = {name for of_sample in metadata if isinstance(of_sample, Mapping) for name in of_sample}
        if self.min_similarity is not None and not known & {*self.names}:
            has = f"The metadata of {where} has {', '.join(sorted(known)[:20]) or 'nothing'}"
            raise ValueError(
                f"min_similarity: no {' or '.join(self.names)}. {has}. Give similarity=NAME, or leave min_similarity out."
            )


def as_number(value: Any) -> float | None:
    """Return a number, also one in a text, as CSV files have them; None: it is none, or nan."""
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
