"""What becomes of bad rows: the first is an error, or all are left out and counted."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.readers.checks import CHECKS, Problem
from offpol_diag.readers.rows import Rows, decode
from offpol_diag.readers.schemas import Plan
from offpol_diag.readers.slices import Slice

EXAMPLES = 5


@dataclass(frozen=True)
class BadRow:
    """A row that was left out, and why; rows count from 0 in their file."""

    file: str
    row_group: int
    row: int
    column: str
    reason: str

    def __str__(self) -> str:
        """The sentence an error would have said."""
        return (
            f"{self.file}, row group {self.row_group}, row {self.row}, column {self.column!r}: {self.reason}"
        )


@dataclass
class Skipped:
    """Rows left out so far.

    Attributes:
        count: how many.
        examples: the first `EXAMPLES`.
    """

    count: int = 0
    examples: list[BadRow] = field(default_factory=list)

    def merge(self, more: Skipped) -> None:
        """Count those of the rows that follow."""
        self.count += more.count
        self.examples += more.examples[: EXAMPLES - len(self.examples)]


@dataclass(frozen=True)
class Sieve:
    """Lets good rows through.

    Attributes:
        plan: the columns.
        skip: leave bad rows out instead of stopping at the first.
        skipped: where they are counted.
    """

    plan: Plan
    skip: bool
    skipped: Skipped

    def sift(self, piece: Slice) -> tuple[Slice, Rows]:
        """The good rows of a slice, and their columns.

        Raises:
            DumpError: a bad row, unless bad rows are to be skipped.
        """
        if piece.flaws:
            piece = self._without(piece, list(piece.flaws))
        rows = decode(piece.table, self.plan)
        for check in CHECKS:
            problems = list(check(rows))
            if problems:
                piece = self._without(piece, problems)
                rows = decode(piece.table, self.plan)
        return piece, rows

    def _without(self, piece: Slice, problems: list[Problem]) -> Slice:
        if not self.skip:
            worst = min(problems, key=lambda problem: int(problem.rows[0]))
            raise DumpError(str(self._bad_row(piece, worst, 0)), worst.hint)
        bad = np.unique(np.concatenate([problem.rows for problem in problems]))
        self._remember(piece, problems, bad[: EXAMPLES - len(self.skipped.examples)].tolist())
        self.skipped.count += len(bad)
        good = np.ones(len(piece.rows), np.bool_)
        good[bad] = False
        return piece.keep(good)

    def _remember(self, piece: Slice, problems: list[Problem], rows: list[int]) -> None:
        for row in rows:
            problem = next(p for p in problems if row in p.rows)
            index = int(np.searchsorted(problem.rows, row))
            self.skipped.examples.append(self._bad_row(piece, problem, index))

    def _bad_row(self, piece: Slice, problem: Problem, index: int) -> BadRow:
        row = int(piece.rows[problem.rows[index]])
        column = self.plan.columns.get(problem.role, problem.role)
        return BadRow(piece.file, piece.row_group, row, column, problem.detail(index))
