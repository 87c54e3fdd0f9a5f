"""Which rows of a table of URLs are wanted: conditions over Arrow batches, and how many rows each leaves out.

A row counts under the first condition that it does not meet, so that the counts and the rows that are left add up to all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from prepare import tables
from prepare.laion.config import FilterConfig
from prepare.samples import usual_name

# Of LAION-400M, LAION-5B, COYO and CC12M, in any case of letters.
USUAL = {
    "url": ("url", "image_url"),
    "caption": ("text", "caption", "top_caption"),
    "license": ("license",),
    "nsfw": ("nsfw",),
    "language": ("language", "lang"),
    "width": ("width", "original_width"),
    "height": ("height", "original_height"),
    "similarity": ("similarity", "clip_similarity_vitl14", "clip_similarity_vitb32"),
    "unsafe": ("punsafe",),
    "watermark": ("pwatermark", "watermark_score"),
}
TEXTS = ("url", "caption", "license", "nsfw", "language")


def needed(module: str) -> Any:
    """Return a module that the environment may lack. Raises Refused."""
    return tables.needed(module, "prepare.laion: {} is not installed, which it works with", "prepare")


@dataclass(frozen=True)
class Columns:
    """The columns of a table that are read; None: not needed."""

    url: str
    caption: str | None
    by_role: dict[str, str]
    """Role in a condition -> column."""
    unique: str | None

    @property
    def names(self) -> list[str]:
        """Return all that conditions read."""
        names = [self.url, *self.by_role.values(), *([self.unique] if self.unique else [])]
        return list(dict.fromkeys(names))


def find_columns(schema: Any, config: FilterConfig, where: str) -> Columns:
    """Return the columns of a table.

    Args:
        schema: pyarrow's.
        where: the file, for messages.

    Raises:
        ValueError: one is missing or of another type; a problem a line.
    """
    problems: list[str] = []

    def find(role: str, key: str, asked: str | None = None) -> str | None:
        possible = (asked,) if asked else USUAL[role]
        found = asked if asked in schema.names else None if asked else usual_name(schema.names, possible)
        if found is None:
            problems.append(f"filter.{key}: {where} has no {' or '.join(possible)}. It has {_listed(schema.names)}.")
        elif schema.names.count(found) > 1:
            problems.append(_twice(key, found, where))
        elif text := _type_problem(schema.field(found).type, role in TEXTS):
            problems.append(f"filter.{key}: {found} of {where} is {text}")
        return found

    url = find("url", "url", config.url)
    caption = find("caption", "caption", config.caption)
    wanted = {
        "license": ("licenses", config.licenses),
        "nsfw": ("nsfw", config.nsfw),
        "language": ("languages", config.languages),
        "width": ("min_side_px", config.min_side_px or config.max_aspect),
        "height": ("min_side_px", config.min_side_px or config.max_aspect),
        "similarity": ("min_similarity", config.min_similarity),
        "unsafe": ("max_unsafe", config.max_unsafe),
        "watermark": ("max_watermark", config.max_watermark),
    }
    by_role = {role: find(role, key) for role, (key, value) in wanted.items() if value is not None}
    unique = url if config.unique == "url" else config.unique
    if unique is not None and unique not in schema.names:
        problems.append(f"filter.unique: {where} has no {unique}. It has {_listed(schema.names)}.")
    elif unique not in (None, url) and schema.names.count(unique) > 1:
        problems.append(_twice("unique", unique, where))
    if url is not None and url == caption:
        problems.append(f"filter.caption: {caption} of {where} is the column of the URLs too. Give another one.")
    if problems:
        raise ValueError("\n".join(problems))
    assert url is not None
    return Columns(url, caption, {role: name for role, name in by_role.items() if name}, unique)


def _twice(key: str, name: str, where: str) -> str:
    return f"filter.{key}: {where} has more than one column {name}. Give another column, or rename one of them."


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def has_texts(kind: Any) -> bool:
    """Return whether a column of this type, pyarrow's, has texts."""
    types = needed("pyarrow").types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind)


def _type_problem(kind: Any, is_text: bool) -> str | None:
    types = needed("pyarrow").types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    if types.is_null(kind):  # a part in which every row has none
        return None
    if is_text:
        fits, possible = has_texts(kind), "a text"
    else:
        fits, possible = types.is_integer(kind) or types.is_floating(kind), "a number"
    return None if fits else f"{kind}. Possible: {possible}. Give another column, or leave it out."


# --- conditions ---

Condition = tuple[str, Callable[[Any], Any]]
"""Why a row is left out, and a function of a batch: an Arrow array of truth values, null counting as false."""


def conditions(config: FilterConfig, columns: Columns) -> list[Condition]:
    """Return what a row has to meet, in the order in which it is asked."""
    compute = needed("pyarrow.compute")
    of = columns.by_role
    found: list[Condition] = [
        ("no URL", lambda batch: compute.greater(compute.utf8_length(_text(batch, columns.url)), 0))
    ]
    for role, names in (("license", config.licenses), ("nsfw", config.nsfw), ("language", config.languages)):
        if names is not None:
            found.append((f"{role} is not wanted", _is_among(of[role], names)))
    if "width" in of:
        sizes = [of["width"], of["height"]]

        def sides(batch: Any) -> tuple[Any, Any]:
            both = [_number(batch, name) for name in sizes]
            few = compute.min_element_wise(*both, skip_nulls=False)
            return few, compute.max_element_wise(*both, skip_nulls=False)

        found.append(("no width or height", lambda batch: compute.greater(sides(batch)[0], 0)))
        if config.min_side_px is not None:
            least = config.min_side_px
            found.append((f"side below {least} px", lambda batch: compute.greater_equal(sides(batch)[0], least)))
        if config.max_aspect is not None:
            most = config.max_aspect

            def is_wide_enough(batch: Any) -> Any:
                few, many = sides(batch)
                return compute.less_equal(many, compute.multiply(few, most))

            found.append((f"aspect above {most:g}", is_wide_enough))
    for role, limit, is_least in (
        ("similarity", config.min_similarity, True),
        ("unsafe", config.max_unsafe, False),
        ("watermark", config.max_watermark, False),
    ):
        if limit is not None:
            name, compare = of[role], compute.greater_equal if is_least else compute.less_equal
            found.append((f"no {name}", lambda batch, name=name: compute.is_finite(_number(batch, name))))
            why = f"{name} {'below' if is_least else 'above'} {limit:g}"
            found.append((why, lambda batch, name=name, by=compare, limit=limit: by(_number(batch, name), limit)))
    return found


def _text(batch: Any, name: str) -> Any:
    """Return a column as plain texts: a dictionary's values, and a part's nulls without a type."""
    return needed("pyarrow.compute").cast(batch.column(name), needed("pyarrow").large_string())


def _number(batch: Any, name: str) -> Any:
    """Return a column as float64: not each type of numbers can be compared."""
    return needed("pyarrow.compute").cast(batch.column(name), needed("pyarrow").float64(), safe=False)


def _is_among(name: str, text: str) -> Callable[[Any], Any]:
    """Return whether a value is among names: `a,b`; `not a,b`: among all others, missing ones included."""
    arrow, compute = needed("pyarrow"), needed("pyarrow.compute")
    is_without = text.strip().startswith("not ")
    names = [part.strip() for part in text.strip().removeprefix("not ").split(",")]
    given = arrow.array(names, arrow.large_string())

    def among(batch: Any) -> Any:
        found = compute.is_in(_text(batch, name), value_set=given)
        return compute.invert(found) if is_without else found

    return among


def wanted_rows(batch: Any, asked: Sequence[Condition], left_out: Counter[str]) -> Any:
    """Return the rows of a batch that meet all conditions, as a numpy array of truth values; count the others."""
    import numpy as np

    compute = needed("pyarrow.compute")
    wanted = np.ones(batch.num_rows, bool)
    for why, meets in asked:
        met = compute.fill_null(meets(batch), False).to_numpy(zero_copy_only=False)
        left_out[why] += int((wanted & ~met).sum())
        wanted &= met
    return wanted
