"""Thrift's compact protocol, as far as Parquet's headers need it: a struct → its fields by number."""

from __future__ import annotations

from typing import Any

Struct = dict[int, Any]

TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(1, 13)
DEEPEST = 16
"""Structs in structs; Parquet's own headers have five."""


def struct(data: bytes, at: int = 0, depth: int = 0) -> tuple[Struct, int]:
    """The struct that begins at a byte, and where it ends; text and maps are skipped, and are None.

    Raises:
        IndexError: the data end before it does.
        ValueError: what is there is no struct.
    """
    if depth > DEEPEST:
        raise ValueError("structs are nested too deeply")
    found: Struct = {}
    number = 0
    while data[at]:
        kind, delta = data[at] & 15, data[at] >> 4
        at += 1
        if delta:
            number += delta
        else:
            number, at = _integer(data, at)
        found[number], at = (kind == TRUE, at) if kind in (TRUE, FALSE) else _value(data, at, kind, depth)
    return found, at + 1


def _value(data: bytes, at: int, kind: int, depth: int) -> tuple[Any, int]:
    if kind in (TRUE, FALSE, BYTE):
        return data[at], at + 1
    if kind in (I16, I32, I64):
        return _integer(data, at)
    if kind == DOUBLE:
        return None, _skipped(data, at, 8)
    if kind == BINARY:
        size, at = _unsigned(data, at)
        return None, _skipped(data, at, size)
    if kind in (LIST, SET):
        return _list(data, at, depth)
    if kind == STRUCT:
        return struct(data, at, depth + 1)
    raise ValueError(f"there is no type {kind} in a header")


def _list(data: bytes, at: int, depth: int) -> tuple[list[Any], int]:
    size, kind = data[at] >> 4, data[at] & 15
    at += 1
    if size == 15:
        size, at = _unsigned(data, at)
    found = []
    for _ in range(size):
        value, at = _value(data, at, kind, depth)
        found.append(value)
    return found, at


def _skipped(data: bytes, at: int, size: int) -> int:
    if at + size > len(data):
        raise IndexError("the data end within a value")
    return at + size


def _unsigned(data: bytes, at: int) -> tuple[int, int]:
    found, shift = 0, 0
    while True:
        byte = data[at]
        found |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return found, at
        if shift > 63:
            raise ValueError("an integer has more than 64 bits")


def _integer(data: bytes, at: int) -> tuple[int, int]:
    found, at = _unsigned(data, at)
    return (found >> 1) ^ -(found & 1), at
