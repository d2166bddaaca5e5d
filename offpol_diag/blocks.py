"""What a report is made of: five kinds of block, which every renderer can draw.

Sections fill them from a Summary; renderers draw them; neither computes a number.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from offpol_diag.summary import Number

Tone = Literal["good", "warn", "bad", "info"]


@dataclass(frozen=True)
class Text:
    """A paragraph, plain text."""

    text: str
    tone: Tone = "info"


@dataclass(frozen=True)
class Verdict:
    """One sentence that decides something; `detail` is the evidence."""

    label: str
    text: str
    tone: Tone
    detail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Code:
    """Lines to be copied as they are."""

    caption: str
    text: str


Cell = str | int | Number | None


@dataclass(frozen=True)
class Table:
    """Rows of cells; a `Number` is drawn with its interval, its formula as a tooltip.

    `wide` tables may be left out where there is no room (the terminal); `collapsed` ones are reference
    material, folded where that is possible and left out elsewhere; `caption` says the finding in words.
    Columns of `context` are the first to go where there is no room. A `lookup` table is searched, not read:
    where there is much of that, it may come last.
    """

    id: str
    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    wide: bool = False
    collapsed: bool = False
    context: tuple[str, ...] = ()
    lookup: bool = False


@dataclass(frozen=True)
class Series:
    """One line, one set of points or one set of bars; `low`/`high` is a 95% band."""

    name: str
    x: tuple[float | str, ...]
    y: tuple[float | None, ...]
    low: tuple[float | None, ...] = ()
    high: tuple[float | None, ...] = ()
    kind: Literal["line", "bar", "points"] = "line"


@dataclass(frozen=True)
class Figure:
    """A chart; `caption` says the finding in words, so that the chart can be missed."""

    id: str
    title: str
    caption: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    x_log: bool = False
    y_log: bool = False
    reference: tuple[tuple[float, str], ...] = ()
    """Horizontal lines: (y, label)."""
    y_unit: str = ""
    named: str = ""
    """Which points a reader asks for first, where a terminal draws a line without an axis."""
    marks: tuple[str, ...] = ()
    """A character for each series: with them a terminal draws every point, not a sparkline."""


Block = Text | Verdict | Code | Table | Figure


@dataclass(frozen=True)
class Section:
    """A titled part of the report."""

    id: str
    title: str
    blocks: tuple[Block, ...]
