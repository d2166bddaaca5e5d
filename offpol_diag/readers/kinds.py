"""Kinds of column: which Arrow types can play a part.

A width never matters (float16 or float64, list or large_list); what an element is does. The null type will do
for anything: it is what some writers make of a column that is empty or null throughout.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.types as pt

Test = Callable[[pa.DataType], bool]

LISTS: tuple[Test, ...] = (
    pt.is_list,
    pt.is_large_list,
    pt.is_fixed_size_list,
    pt.is_list_view,
    pt.is_large_list_view,
)
TEXTS: tuple[Test, ...] = (
    pt.is_string,
    pt.is_large_string,
    pt.is_string_view,
    pt.is_binary,
    pt.is_large_binary,
    pt.is_binary_view,
)
BYTES: tuple[Test, ...] = (
    pt.is_binary,
    pt.is_large_binary,
    pt.is_binary_view,
    pt.is_fixed_size_binary,
)
# The family of the null type, which agrees with all others.
ANY = "anything"
NUMBERS: tuple[Test, ...] = (pt.is_integer, pt.is_floating, pt.is_boolean)


@dataclass(frozen=True)
class Kind:
    """What a column must hold.

    Attributes:
        needs: in words, for messages.
        accepts: whether an Arrow type will do.
    """

    needs: str
    accepts: Test


def is_list(dtype: pa.DataType) -> bool:
    """Whether a column holds a list per row."""
    return _is_any(dtype, LISTS)


def is_padded(dtype: pa.DataType) -> bool:
    """Whether every list of a column has the same length."""
    return bool(pt.is_fixed_size_list(dtype))


def is_float(dtype: pa.DataType) -> bool:
    """Whether a column holds a float per row."""
    return bool(pt.is_floating(plain(dtype)))


def is_bytes(dtype: pa.DataType) -> bool:
    """Whether a column holds bytes per row, which may be text."""
    return _is_any(plain(dtype), BYTES)


def plain(dtype: pa.DataType) -> pa.DataType:
    """The type without its dictionary, and an extension's as it is stored."""
    inner = dtype.value_type if pt.is_dictionary(dtype) else dtype
    return inner.storage_type if isinstance(inner, pa.BaseExtensionType) else inner


def alike(one: pa.DataType, two: pa.DataType) -> bool:
    """Whether two files agree on a column: in having lists, and in the family of the elements."""
    return is_list(one) == is_list(two) and len({_family(one), _family(two)} - {ANY}) < 2


def _family(dtype: pa.DataType) -> str:
    inner = plain(dtype.value_type if is_list(dtype) else dtype)
    named = ((ANY, (pt.is_null,)), ("number", NUMBERS), ("text", TEXTS))
    return next((name for name, tests in named if _is_any(inner, tests)), str(inner))


def _is_any(dtype: pa.DataType, tests: tuple[Test, ...]) -> bool:
    return any(test(dtype) for test in tests)


def _list_of(*tests: Test) -> Test:
    return lambda dtype: is_list(dtype) and _is_any(dtype.value_type, (*tests, pt.is_null))


def _one(*tests: Test) -> Test:
    return lambda dtype: _is_any(plain(dtype), (*tests, pt.is_null))


def _is_number(dtype: pa.DataType) -> bool:
    return _is_any(plain(dtype), (*NUMBERS, pt.is_null))


FLOATS = Kind("a list of floats per row", _list_of(pt.is_floating))
INTEGERS = Kind("a list of integers per row", _list_of(pt.is_integer))
FLAGS = Kind("a list of 0 and 1 per row", _list_of(*NUMBERS))
NUMBER = Kind("one number per row", _is_number)
NUMBER_OR_LIST = Kind(
    "one number or a list of numbers per row", lambda dtype: _is_number(dtype) or _list_of(*NUMBERS)(dtype)
)
LABEL = Kind("one value per row", lambda dtype: not pt.is_nested(plain(dtype)))

LONG = "per row, as the other columns of one row per token"
FLOAT = Kind(f"one float {LONG}", _one(pt.is_floating))
INTEGER = Kind(f"one integer {LONG}", _one(pt.is_integer))
FLAG = Kind(f"one 0 or 1 {LONG}", _is_number)
# What a list holds → what a row per token holds in its place.
PER_TOKEN = {FLOATS: FLOAT, INTEGERS: INTEGER, FLAGS: FLAG, NUMBER_OR_LIST: NUMBER}
