"""Fit a table to a width: select columns, set their widths, and collect notes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich import box
from rich.cells import cell_len
from rich.table import Table as Grid

from offpol_diag.blocks import Table
from offpol_diag.printable import printable
from offpol_diag.report.render.numbers import Shown, shown
from offpol_diag.summary import Number

PADDING = 2
GAP = PADDING + 1
"""Characters between two columns: padding and divider."""
TEXT_WIDTH = 28
"""Minimum width of a shrunk text column; numeric columns are never shrunk."""
WORD_WIDTH = 48
"""Width up to which words stay unbroken in complete output, so that names can be searched and copied."""
FEW_NUMBERS = 3
"""Maximum numeric columns that keep their intervals where omitting these would not help."""


@dataclass(frozen=True)
class Fitted:
    """A table fitted to a width.

    Attributes:
        grids: grids to print one below the other, each with the first column.
        dropped: headers of omitted columns.
        without_intervals: whether intervals are omitted.
        notes: cautions on single numbers, numbered as in the cells.
    """

    grids: tuple[Grid, ...]
    dropped: tuple[str, ...]
    without_intervals: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A column of formatted cells."""

    header: str
    cells: tuple[str, ...]
    numeric: bool
    unbroken: bool = False

    @property
    def natural(self) -> int:
        """Width without wrapping."""
        return max(cell_len(text) for text in (self.header, *self.cells))

    @property
    def least(self) -> int:
        """Minimum width."""
        if self.numeric:
            return self.natural
        words = (cell_len(word) for text in self.cells for word in text.split())
        longest = max(words, default=0) if self.unbroken else 0
        return min(self.natural, max(TEXT_WIDTH, min(longest, WORD_WIDTH)))


def fit(
    table: Table, width: int, stack: bool = False, all_of_it: bool = False, intervals: bool = True
) -> Fitted:
    """Choose intervals and columns so that the table is no wider than `width`.

    Columns that do not fit are omitted, or with `stack` placed in a further grid below; columns of context go
    first. With `all_of_it` nothing is omitted, intervals included, and no name is broken. Where there is room
    for the columns but not for their intervals, some columns are placed below, unless the intervals may go.
    """
    cautions = (shown(cell, terse=True).note for row in table.rows for cell in row)
    notes = [note for note in dict.fromkeys(cautions) if note]
    full = _columns(table, notes, intervals=True, unbroken=all_of_it)
    bare = _columns(table, notes, intervals=False, unbroken=all_of_it)
    few = sum(column.numeric for column in full) <= FEW_NUMBERS and not _fits(bare, width)
    whole = all_of_it or few or _fits(full, width)
    stack = stack or all_of_it
    columns = full if whole else bare
    spared = () if stack or _fits(columns, width) else table.context
    columns = [column for column in columns if column.header not in spared]
    pages = _pages(columns, width)
    dropped = (*spared, *(column.header for page in pages[1:] for column in page[1:]))
    if dropped and not stack:
        return replace(fit(_without(table, dropped), width, intervals=intervals), dropped=dropped)
    if intervals and not whole:
        pages, whole = _pages([column for column in full if column.header not in spared], width), True
    numbered = tuple(f"({place}) {note}" for place, note in enumerate(notes, 1))
    return Fitted(tuple(_grid(page) for page in pages), (), not whole, numbered)


def _without(table: Table, headers: Sequence[str]) -> Table:
    """Return the table without some columns, so that notes cover visible cells only."""
    kept = [place for place, header in enumerate(table.header) if header not in headers]
    rows = tuple(tuple(row[place] for place in kept) for row in table.rows)
    return replace(table, header=tuple(table.header[place] for place in kept), rows=rows, context=())


def _fits(columns: Sequence[Column], width: int) -> bool:
    return sum(column.least + GAP for column in columns) - GAP <= width


def _pages(columns: Sequence[Column], width: int) -> list[Sequence[Column]]:
    """Split the columns into groups that fit, each with the first column and at least one other."""
    label, rest = columns[:1], list(columns[1:])
    pages: list[Sequence[Column]] = []
    while rest or not pages:
        counts = range(len(rest), 1, -1)
        count = next((count for count in counts if _fits([*label, *rest[:count]], width)), 1)
        pages.append([*label, *rest[:count]])
        rest = rest[count:]
    return pages


def _columns(table: Table, notes: Sequence[str], intervals: bool, unbroken: bool) -> list[Column]:
    found = []
    for place, header in enumerate(table.header):
        cells = [row[place] for row in table.rows]
        texts = tuple(_written(shown(cell, terse=True), notes, intervals) for cell in cells)
        numeric = any(isinstance(cell, int | Number) for cell in cells)
        found.append(Column(printable(header), texts, numeric, unbroken))
    return found


def _written(cell: Shown, notes: Sequence[str], intervals: bool) -> str:
    mark = f"({notes.index(cell.note) + 1})" if cell.note else ""
    parts = (cell.text, cell.interval if intervals else "", mark)
    return printable(" ".join(part for part in parts if part))


def _grid(columns: Sequence[Column]) -> Grid:
    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, PADDING, 0, 0), show_edge=False)
    for column in columns:
        grid.add_column(column.header, no_wrap=column.numeric, min_width=column.least, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        grid.add_row(*row)
    return grid
