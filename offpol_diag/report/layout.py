"""Lay out tables for the page and render their rows as HTML.

A report has some 20,000 cells, so rows are rendered here; a template takes ten times as long.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

from offpol_diag.number import Number
from offpol_diag.report.cells import Kind, Shown, footnotes, shown
from offpol_diag.table import Table

DENSE = 4
"""Numbers per row above which a table is dense; so is one with twice as many columns."""

TALL = 50
"""Rows above which a table is tall."""

LONG = 40
"""Characters above which a text is prose."""

PLAIN: Mapping[bool, tuple[Kind, ...]] = {True: ("number", "none"), False: ("text",)}
"""Dense or not → the default kinds of cell, which get no CSS class."""


@dataclass(frozen=True)
class TableView:
    """A table with its layout.

    `dense` tables show intervals below values, `tall` ones scroll in a box.
    """

    table: Table
    numeric: tuple[bool, ...]
    tooltips: tuple[str, ...]
    body: Markup
    footnotes: tuple[str, ...]
    dense: bool
    tall: bool

    @property
    def folded(self) -> bool:
        """Whether the table is folded on the page."""
        return self.table.shown != "always"


def laid_out(table: Table) -> TableView:
    """Return the layout of a table."""
    numbers = max((sum(isinstance(cell, Number) for cell in row) for row in table.rows), default=0)
    cells = [[shown(cell, terse=numbers > 1) for cell in row] for row in table.rows]
    columns = [[row[place] for row in cells] for place in range(len(table.header))]
    marks = footnotes(cells) if numbers > 1 else {}
    heads = tuple(_most([cell.meaning for cell in column if cell.meaning]) for column in columns)
    numeric = tuple(any(cell.kind == "number" for cell in column) for column in columns)
    dense = numbers > DENSE or (numbers > 1 and len(table.header) > 2 * DENSE)
    body = Markup("".join(_row(row, heads, marks, PLAIN[dense]) for row in cells))
    return TableView(table, numeric, heads, body, tuple(marks), dense, len(cells) > TALL)


def _most(meanings: list[str]) -> str:
    """Return the meaning shared by more than half of several cells, which moves to the column's header."""
    common = Counter(meanings).most_common(1)
    return common[0][0] if common and len(meanings) > 1 and 2 * common[0][1] > len(meanings) else ""


# ---------------------------------------------------------------- in HTML


def breakable(name: str) -> Markup:
    """Return a name with optional line breaks after each slash and underscore."""
    return Markup(str(escape(name)).replace("_", "_<wbr>").replace("/", "/<wbr>"))


def _row(
    cells: Sequence[Shown], heads: Sequence[str], marks: Mapping[str, int], plain: Sequence[Kind]
) -> str:
    """Render a row; its first cell is the header."""
    first, *rest = (_look(cell, head, plain) for cell, head in zip(cells, heads, strict=True))
    label = f'<th scope="row"{first}>{breakable(cells[0].text)}{_beside(cells[0], marks)}</th>'
    values = (
        f"<td{look}>{escape(cell.text)}{_beside(cell, marks)}</td>"
        for cell, look in zip(cells[1:], rest, strict=True)
    )
    return f"<tr>{label}{''.join(values)}</tr>\n"


def _look(cell: Shown, head: str, plain: Sequence[Kind]) -> str:
    """Return the class and tooltip attributes of a cell."""
    prose = cell.kind == "text" and len(cell.text) > LONG
    kind = ' class="text prose"' if prose else "" if cell.kind in plain else f' class="{cell.kind}"'
    said = " · ".join(filter(None, (cell.meaning if cell.meaning != head else "", cell.bound)))
    return f'{kind} title="{escape(said)}"' if said else kind


def _beside(cell: Shown, marks: Mapping[str, int]) -> str:
    """Render what follows the value: footnote mark, interval, and a note without a footnote."""
    interval = f" <i>{escape(cell.interval)}</i>" if cell.interval else ""
    if cell.note in marks:
        return f"<sup>{marks[cell.note]}</sup>{interval}"
    return f'{interval}<span class="caution">{escape(cell.note)}</span>' if cell.note else interval
