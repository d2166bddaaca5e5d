"""A table before it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offpol_diag.number import Number

Cell = str | int | Number | None
Shown = Literal["always", "more", "folded", "page"]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; a `Number` is drawn with its interval.

    Attributes:
        id: its name, and its anchor on the page.
        caption: the finding, in words.
        notes: sentences below it.
        shown: always; folded in a pull request and on the page, with -v too (`more`) or not (`folded`); or on
            the page alone.
    """

    id: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: tuple[str, ...] = ()
    shown: Shown = "always"

    def without_empty(self) -> Table:
        """Return the table without its empty columns."""
        kept = [i for i in range(len(self.header)) if any(row[i] is not None for row in self.rows)]
        rows = [[row[i] for i in kept] for row in self.rows]
        return replace(self, header=[self.header[i] for i in kept], rows=rows)
