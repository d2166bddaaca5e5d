"""A table before it is drawn."""

from __future__ import annotations

from collections.abc import Container, Sequence
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
        notes: what is said below it.
        shown: always; folded in a pull request and on the page, with -v too (`more`) or not (`folded`); or on
            the page alone.
    """

    id: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: tuple[str, ...] = ()
    shown: Shown = "always"

    @property
    def empty(self) -> list[int]:
        """The columns that no row has a cell of."""
        return [i for i in range(len(self.header)) if all(row[i] is None for row in self.rows)]

    def without(self, columns: Container[int]) -> Table:
        """Return the table without some columns."""
        header = [head for i, head in enumerate(self.header) if i not in columns]
        rows = [[cell for i, cell in enumerate(row) if i not in columns] for row in self.rows]
        return replace(self, header=header, rows=rows)
