"""Convert table cells to the parts that all renderers show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from offpol_diag.numerals import count, minus, written
from offpol_diag.table import Cell

Kind = Literal["number", "text", "unknown", "none"]


class Shown(NamedTuple):
    """The parts of a cell.

    Attributes:
        text: the value.
        interval: the interval, or empty.
        note: a caution on the cell, shown as a footnote.
        kind: number, text, unknown (`text` or `note` gives the reason), or none (not applicable).
    """

    text: str
    interval: str = ""
    note: str = ""
    kind: Kind = "text"


def shown(cell: Cell, terse: bool = False) -> Shown:
    """Return the parts of a cell; `terse` moves the reason of an unknown number to its note."""
    if cell is None:
        return Shown("–", kind="none")
    if isinstance(cell, str):
        return Shown(cell)
    if isinstance(cell, int):
        return Shown(count(cell), kind="number")
    value, interval = written(cell)
    if not cell.known:
        text = "unknown" if terse and cell.unknown else value
        note = ". ".join(filter(None, (value if text != value else "", cell.note)))
        return Shown(text, "", note, "unknown")
    note = minus((cell.note or "").removeprefix("unreliable: "))
    return Shown(minus(value), minus(interval), note, "number")


def footnotes(rows: Iterable[Iterable[Shown]]) -> dict[str, int]:
    """Number the notes of a table's cells in reading order; equal notes share a number."""
    notes = dict.fromkeys(cell.note for row in rows for cell in row if cell.note)
    return {note: number for number, note in enumerate(notes, 1)}
