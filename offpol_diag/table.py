"""A table before it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from offpol_diag.number import Number

Cell = str | int | Number | None


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header; a `Number` is drawn with its interval.

    Attributes:
        id: its name in files.
        caption: the finding, in words.
        notes: what is said below it.
        shown: always; with -v, and folded in a pull request and on the page (`more`); or on the page alone.
    """

    id: str
    caption: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    notes: tuple[str, ...] = ()
    shown: Literal["always", "more", "page"] = "always"
