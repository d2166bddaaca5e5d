"""Convert table cells to the parts that all renderers show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from offpol_diag.number import Number
from offpol_diag.numerals import count, minus, say_value, written
from offpol_diag.table import Cell

Kind = Literal["number", "text", "unknown", "none"]


class Shown(NamedTuple):
    """The parts of a cell.

    Attributes:
        text: the value.
        interval: the interval, or empty.
        note: a caution on the cell, shown as a footnote.
        meaning: formula, averaging and unit, for a tooltip.
        bound: how often a safety bound applied, for a tooltip; empty if never.
        kind: number, text, unknown (`text` or `note` gives the reason), or none (not applicable).
    """

    text: str
    interval: str = ""
    note: str = ""
    meaning: str = ""
    bound: str = ""
    kind: Kind = "text"


def shown(cell: Cell, terse: bool = False) -> Shown:
    """Return the parts of a cell; `terse` moves the reason of an unknown number to its note."""
    if cell is None:
        return Shown("–", kind="none")
    if isinstance(cell, str):
        return Shown(cell)
    if isinstance(cell, int):
        return Shown(count(cell), kind="number")
    return _unknown(cell, terse) if cell.value is None and cell.log10 is None else _known(cell)


def footnotes(rows: Iterable[Iterable[Shown]]) -> dict[str, int]:
    """Number the notes of a table's cells in reading order; equal notes share a number."""
    notes = dict.fromkeys(cell.note for row in rows for cell in row if cell.note)
    return {note: number for number, note in enumerate(notes, 1)}


def meaning(number: Number) -> str:
    """Return the formula, averaging and unit of a number in one line."""
    parts = (number.formula, number.over and f"over {number.over}", number.unit and f"unit: {number.unit}")
    return " · ".join(part for part in parts if part)


def _bound(number: Number) -> str:
    share = say_value(number.clamped, "fraction") if number.clamped else ""
    return share and f"safety bound acted on {share} of terms"


def _known(number: Number) -> Shown:
    text, interval = map(minus, written(number))
    note = minus((number.note or "").removeprefix("unreliable: "))
    return Shown(text, interval, note, meaning(number), _bound(number), "number")


def _unknown(number: Number, terse: bool) -> Shown:
    reason = written(number).value
    text = "unknown" if terse and number.unknown else reason
    note = ". ".join(part for part in (reason if text != reason else "", number.note) if part)
    return Shown(text, "", note, meaning(number), kind="unknown")
