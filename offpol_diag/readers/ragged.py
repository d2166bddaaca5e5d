"""Arrow lists → values and lengths."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Ragged:
    """A column of lists.

    Attributes:
        values: [N] numbers as wide as they are stored, NaN or 0 where null; not to be written to.
        null: which values are null, [N] bool, or None when none is.
        lengths: values per row, [S] int64; 0 for a null list.
        absent: which rows hold no list at all, [S] bool.
    """

    values: Array
    null: Flags | None
    lengths: Ints
    absent: Flags

    @cached_property
    def span(self) -> tuple[float, float]:
        """`span` of the values."""
        return span(self.values)


def span(values: Array) -> tuple[float, float]:
    """The smallest and the largest value, [N]; NaN if any is; 0 and 0 of none."""
    if not values.size:
        return 0.0, 0.0
    with np.errstate(invalid="ignore"):
        return values.min().item(), values.max().item()


def ragged(column: pa.Array) -> Ragged:
    """A list column of any of Arrow's list types, whose slices and nulls are minded."""
    lengths = pc.list_value_length(column).fill_null(0)
    # Not `.values`: that is the whole parent of a slice, what lies under null lists included.
    values, null = narrow(column.flatten())
    absent = column.is_null().to_numpy(zero_copy_only=False)
    return Ragged(values, null, lengths.to_numpy(zero_copy_only=False).astype(np.int64), absent)


def floats(column: pa.Array) -> Floats:
    """A column of numbers as float64 in memory of its own, NaN where null."""
    return np.array(dense(column).cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False))


def narrow(column: pa.Array) -> tuple[Array, Flags | None]:
    """A column of numbers as wide as they are stored, and which are null: NaN or 0 stand for those.

    Half floats come as float32, which the checks are fast in, and booleans as bytes.
    """
    found = dense(column)
    null = found.is_null().to_numpy(zero_copy_only=False) if found.null_count else None
    if pt.is_floating(found.type):  # nulls turn into NaN here
        values = found.to_numpy(zero_copy_only=False)
        return values.astype(np.float32) if values.dtype == np.float16 else values, null
    if not pt.is_integer(found.type) or pt.is_uint64(found.type):
        found = found.cast(pa.uint8() if pt.is_boolean(found.type) else pa.int64(), safe=False)
    return (found if null is None else found.fill_null(0)).to_numpy(zero_copy_only=False), null


def dense(column: pa.Array) -> pa.Array:
    """A column without its dictionary, and an extension's as it is stored."""
    found = column.dictionary_decode() if pt.is_dictionary(column.type) else column
    return found.storage if isinstance(found.type, pa.BaseExtensionType) else found


def starts(lengths: Ints) -> Ints:
    """Where each row starts, and the end: [S] → [S+1] int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
