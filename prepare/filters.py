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

from prepare.samples import Sample, Taken, usual_name
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
    """Field of the metadata; None: a usual one, see `with_similarity`."""

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
            similarity = as_number(known.get(self.similarity))
            if similarity is None:
                raise LeftOut(f"no {self.similarity} in the metadata")
            if not similarity >= self.min_similarity:
                raise LeftOut(f"{self.similarity} below {self.min_similarity:g}")

    def with_similarity(self, samples: Sequence[Sample], taken: Taken, where: str) -> Filters:
        """Return it with the field of the metadata that has the similarity. Raises ValueError: no sample has one."""
        if self.min_similarity is None:
            return self
        names: dict[str, None] = {}
        for sample in samples:
            try:
                metadata = sample.metadata(taken)
            except SampleError:
                continue
            if isinstance(metadata, Mapping):
                names |= {name: None for name, value in metadata.items() if as_number(value) is not None}
        wanted = (self.similarity,) if self.similarity else USUAL_SIMILARITIES
        found = self.similarity if self.similarity in names else usual_name(names, wanted)
        if found is None:
            numbers = f"Numbers there: {', '.join(list(names)[:20]) or 'none'}"
            raise ValueError(
                f"min_similarity: the metadata of {where} has no {' or '.join(wanted)}, and it is not computed here. "
                f"{numbers}. Give similarity=NAME, or leave min_similarity out."
            )
        return Filters(self.min_side_px, self.max_aspect, self.min_similarity, found)


def as_number(value: Any) -> float | None:
    """Return a number, also one in a text, as CSV files have them; None: it is none, or nan."""
    try:
        number = math.nan if isinstance(value, bool) or value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None
