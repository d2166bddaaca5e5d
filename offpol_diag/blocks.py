"""Define the blocks that a report consists of.

Sections create blocks from a Summary, and renderers draw them; neither computes numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offpol_diag.metrics import Tone as Tone
from offpol_diag.summary import Number


class Block:
    """A part of a section."""


class Composite(Block):
    """A block that the page draws in a way of its own, by the macro of its name; others draw `plain`."""

    def plain(self) -> tuple[Block, ...]:
        """Return the same as plain blocks."""
        raise NotImplementedError


@dataclass(frozen=True)
class Text(Block):
    """A paragraph, plain text."""

    text: str
    tone: Tone = "info"


@dataclass(frozen=True)
class Verdict(Block):
    """A one-sentence conclusion; `detail` is the evidence."""

    label: str
    text: str
    tone: Tone
    detail: tuple[str, ...] = ()


@dataclass(frozen=True)
class Code(Block):
    """Lines to be copied as they are."""

    caption: str
    text: str


Cell = str | int | Number | None


@dataclass(frozen=True)
class Table(Block):
    """A table; a `Number` is drawn with its interval, and its formula as a tooltip.

    `folded` tables are folded on the page; `collapsed` ones are reference material, folded there and omitted
    elsewhere; `caption` states the finding in words. Columns of `context` are the first to be omitted where
    space is short.
    """

    id: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: tuple[str, ...] = ()
    collapsed: bool = False
    context: tuple[str, ...] = ()
    folded: bool = False


@dataclass(frozen=True)
class Series:
    """One series of a figure: its name, the character that marks it, and a value for each label."""

    name: str
    mark: str
    y: Sequence[float | None]


@dataclass(frozen=True)
class Figure(Block):
    """A chart for terminals, a row for each label; the page has pictures of its own (`report/picture.py`)."""

    title: str
    labels: Sequence[str]
    series: Sequence[Series]
    y_unit: str = ""


@dataclass(frozen=True)
class Section:
    """A titled section of the report; `short` is its name in the contents."""

    id: str
    title: str
    blocks: tuple[Block, ...]
    short: str = ""


def filled(*blocks: Block | None) -> tuple[Block, ...]:
    """Return the blocks that there are, without tables that have no rows."""
    return tuple(one for one in blocks if one is not None and not (isinstance(one, Table) and not one.rows))


def plain(blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Return blocks with composites as plain ones."""
    return tuple(b for block in blocks for b in (block.plain() if isinstance(block, Composite) else (block,)))
