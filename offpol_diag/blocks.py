"""Define the five kinds of block that a report consists of.

Sections create blocks from a Summary, and renderers draw them; neither computes numbers.
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
    """A one-sentence conclusion; `detail` is the evidence."""

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
    """A table; a `Number` is drawn with its interval, and its formula as a tooltip.

    `wide` tables may be omitted where space is short (the terminal); `collapsed` ones are reference material,
    folded where possible and omitted elsewhere; `caption` states the finding in words. Columns of `context`
    are the first to be omitted where space is short. `lookup` marks tables to be searched rather than read;
    large ones may be placed last.
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
    """A chart; `caption` states the finding in words, for readers without the chart."""

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
    """Names of the extreme points to mention where a terminal draws a line without an axis."""
    marks: tuple[str, ...] = ()
    """A character for each series; if given, a terminal draws every point instead of a sparkline."""


Block = Text | Verdict | Code | Table | Figure


@dataclass(frozen=True)
class Section:
    """A titled section of the report."""

    id: str
    title: str
    blocks: tuple[Block, ...]
