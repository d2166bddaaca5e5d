"""What all rows of a sequence must have in common."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.readers.ragged import Ints, dense
from offpol_diag.readers.spans import Opening, Piece, Spans


@dataclass(frozen=True)
class Flaw:
    """Something wrong with a sequence.

    Attributes:
        role: our name of the column, or the column's where it plays no part.
        text: what is wrong.
    """

    role: str
    text: str


@dataclass(frozen=True)
class Column:
    """A column with one value per sequence.

    Attributes:
        name: in the file.
        role: our name of it; its own where it plays no part.
    """

    name: str
    role: str


def differing(
    piece: Piece, spans: Spans, column: Column, begun: int, openings: Sequence[Opening]
) -> Iterator[tuple[int, Flaw]]:
    """Sequences whose rows in a piece differ from their first row: number and flaw.

    Args:
        piece: the rows.
        spans: whose they are.
        column: where they must not differ.
        begun: sequences before this number began before the piece.
        openings: first rows, in order.
    """
    values = piece.table.column(column.name)
    heads = spans.order[spans.begins]
    firsts = [opening.first for opening in openings]
    for number, row in zip(spans.numbers.tolist(), heads.tolist(), strict=True):
        if number >= begun:
            break
        opening = openings[bisect_right(firsts, number) - 1]
        first = value(opening.table.column(column.name)[number - opening.first])
        if not _same(first, value(values[row])):
            yield number, _flaw(piece, column, first, row)
    for which, row in _within(values, spans):
        yield int(spans.numbers[which]), _flaw(piece, column, value(values[int(heads[which])]), row)


def _within(column: pa.Array, spans: Spans) -> Iterator[tuple[int, int]]:
    """Sequences whose rows in the piece differ: their index in the spans, and the first row that does."""
    codes = _codes(column)[spans.order]
    lengths = spans.ends - spans.begins
    bad = np.flatnonzero(codes != np.repeat(codes[spans.begins], lengths))
    which, first = np.unique(np.searchsorted(spans.begins, bad, side="right") - 1, return_index=True)
    yield from zip(which.tolist(), spans.order[bad[first]].tolist(), strict=True)


def _codes(column: pa.Array) -> Ints:
    """A number per row that is the same where the values are."""
    plain = dense(column)
    if pt.is_null(plain.type):
        return np.zeros(len(plain), np.int64)
    indices: Ints = plain.dictionary_encode(null_encoding="encode").indices.to_numpy()
    return indices


def _flaw(piece: Piece, column: Column, first: Any, row: int) -> Flaw:
    other = value(piece.table.column(column.name)[row])
    return Flaw(
        column.role,
        f"a sequence has one value, and this one has {first!r} where it begins and {other!r} in row "
        f"{piece.first + row} of {piece.file}",
    )


def _same(one: Any, two: Any) -> bool:
    return bool(one == two or (one != one and two != two))  # NaN is NaN


def value(scalar: pa.Scalar) -> Any:
    """A value for messages and comparisons; text that is not UTF-8 has marks in it."""
    try:
        found = scalar.as_py()
    except UnicodeDecodeError:
        found = scalar.as_buffer().to_pybytes()
    return found.decode(errors="replace") if isinstance(found, bytes) else found
