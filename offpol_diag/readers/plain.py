"""Labels of any scalar Arrow type → numbers, booleans, text or bytes, which every later step can handle.

Python's own dates end in the year 9999 and at microseconds, so Arrow writes temporal values as text. A label
that is NaN says nothing: it is null.
"""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

Rule = tuple[Callable[[pa.DataType], bool], Callable[[pa.Array], pa.Array]]


def plain(column: pa.Array) -> pa.Array:
    """The same labels as numbers, booleans, text or bytes; a type that no rule names stays as it is.

    Raises:
        pa.ArrowException: Arrow has no text for the type.
    """
    for applies, rewritten in RULES:
        if applies(column.type):
            return rewritten(column)
    return column


def _without_nan(column: pa.Array) -> pa.Array:
    wide = column.cast(pa.float32()) if pt.is_float16(column.type) else column
    return pc.if_else(pc.is_nan(wide), None, wide)


def _text(column: pa.Array) -> pa.Array:
    return column.cast(pa.string())


def _time(column: pa.Array) -> pa.Array:
    """`00:00:01.500`; a fraction of zeros is left out."""
    return pc.replace_substring_regex(_text(column), r"\.0+$", "")


def _timestamp(column: pa.Array) -> pa.Array:
    """`2026-01-31 00:00:01.500`, in UTC and with a Z where the type has a time zone."""
    naive = _time(column.cast(pa.int64()).cast(pa.timestamp(column.type.unit)))
    return naive if column.type.tz is None else pc.binary_join_element_wise(naive, "Z", "")


def _duration(column: pa.Array) -> pa.Array:
    """`1500 ms`."""
    return pc.binary_join_element_wise(_text(column.cast(pa.int64())), column.type.unit, " ")


def _uuid(column: pa.Array) -> pa.Array:
    found = column.storage.to_pylist()
    return pa.array([None if one is None else str(UUID(bytes=one)) for one in found], pa.string())


def _fixed_bytes(column: pa.Array) -> pa.Array:
    return pa.array([None if one is None else _text_or_hex(one) for one in column.to_pylist()], pa.string())


def _text_or_hex(value: bytes) -> str:
    """Hexadecimal digits where bytes are no text that prints; no text of the same column is as long."""
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex()
    return text if text.isprintable() else value.hex()


def _is_extension(name: str) -> Callable[[pa.DataType], bool]:
    return lambda dtype: isinstance(dtype, pa.BaseExtensionType) and dtype.extension_name == name


RULES: tuple[Rule, ...] = (
    (pt.is_dictionary, lambda column: plain(column.dictionary_decode())),
    (_is_extension("arrow.uuid"), _uuid),
    (_is_extension("arrow.bool8"), lambda column: column.storage.cast(pa.bool_())),
    (lambda dtype: isinstance(dtype, pa.BaseExtensionType), lambda column: plain(column.storage)),
    (pt.is_floating, _without_nan),
    (pt.is_timestamp, _timestamp),
    (pt.is_time, _time),
    (pt.is_duration, _duration),
    (pt.is_fixed_size_binary, _fixed_bytes),
    (lambda dtype: pt.is_temporal(dtype) or pt.is_decimal(dtype), _text),
)
