"""Values of Arrow columns as Python values, such that a bad one costs itself: pyarrow gives up a whole batch for it.

A text that is not UTF-8 keeps its other bytes as surrogates, as in a CSV file, and is refused where it is used. What has no
Python value, such as a time after the year 9999, is None.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cli.log import log

BAD = (ValueError, OverflowError, LookupError, NotImplementedError)  # pyarrow's own errors are of these kinds


def rows_of(batch: Any, lost: Counter[str]) -> list[dict[str, Any]]:
    """Return a record batch's rows; values by column.

    Args:
        lost: column -> how many of its values are None for want of a Python value; added to.
    """
    try:
        return batch.to_pylist()
    except BAD:
        names = batch.schema.names
        columns = [values_of(column, name, lost) for name, column in zip(names, batch.columns, strict=True)]
        return [dict(zip(names, values, strict=True)) for values in zip(*columns, strict=True)]


def log_lost(lost: Mapping[str, int], where: str) -> None:
    """Log which columns of a source have values that are stored as null."""
    for name, num in lost.items():
        log.warning(
            f"{where}: {num:,} values of {name} have no Python value, such as a time out of range. They are null."
        )


def values_of(column: Any, name: str, lost: Counter[str]) -> list[Any]:
    """Return a column's values. `name`, `lost`: see `rows_of`."""
    try:
        return column.to_pylist()
    except BAD:
        return [_value_of(scalar, name, lost) for scalar in column]


def _value_of(scalar: Any, name: str, lost: Counter[str]) -> Any:
    try:
        return scalar.as_py()
    except BAD:
        arrow = importlib.import_module("pyarrow")
        if isinstance(scalar, arrow.StructScalar):
            return {field: _value_of(inner, name, lost) for field, inner in scalar.items()}
        if isinstance(scalar, arrow.ListScalar):
            return [_value_of(inner, name, lost) for inner in scalar.values]
        if isinstance(scalar, arrow.DictionaryScalar):
            return _value_of(scalar.value, name, lost)
        if isinstance(scalar, arrow.StringScalar):
            return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
        lost[name] += 1
        return None
