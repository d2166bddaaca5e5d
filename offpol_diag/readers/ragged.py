"""Arrow lists → values and lengths."""

from __future__ import annotations

from dataclasses import dataclass
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
        values: [N] float64 or int64; NaN or 0 where null.
        null: which values are null, [N] bool, or None when none is.
        lengths: values per row, [S] int64; 0 for a null list.
        absent: which rows hold no list at all, [S] bool.
    """

    values: Array
    null: Flags | None
    lengths: Ints
    absent: Flags


def ragged(column: pa.Array) -> Ragged:
    """A list column of any of Arrow's list types, whose slices and nulls are minded."""
    lengths = pc.list_value_length(column).fill_null(0)
    # Not `.values`: that is the whole parent of a slice, what lies under null lists included.
    values, null = numbers(column.flatten())
    absent = column.is_null().to_numpy(zero_copy_only=False)
    return Ragged(values, null, lengths.to_numpy(zero_copy_only=False).astype(np.int64), absent)


def numbers(column: pa.Array) -> tuple[Array, Flags | None]:
    """A column of numbers as float64 (integers and booleans: int64), and which are null."""
    dense = column.dictionary_decode() if pt.is_dictionary(column.type) else column
    null = dense.is_null().to_numpy(zero_copy_only=False) if dense.null_count else None
    if pt.is_floating(dense.type):  # nulls turn into NaN here, and every float width is exact in float64
        return dense.to_numpy(zero_copy_only=False).astype(np.float64, copy=False), null
    return dense.cast(pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False), null


def starts(lengths: Ints) -> Ints:
    """Where each row starts, and the end: [S] → [S+1] int64."""
    return np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
