"""Values of tokens summed by fold and bucket, times what each of some rows multiplies their sequences by.

On a CPU. Where sequences are long their tokens are added once for all rows, to a table that has a line for
each sequence; the tables are then multiplied. Short ones fill less of a line than it costs, and are added row
by row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag.metrics.coordinates import BUCKETS, FOLDS

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Times = Floats | None
"""What the tokens of each sequence are multiplied by, [S]; None for 1."""

LONG = 1 << 7
"""Tokens per sequence from which a table pays."""
LINES = 1 << 9
"""Sequences of a table."""


class FoldBins:
    """Sums of some kinds of values while blocks of sequences go by, in order."""

    def __init__(self, fold: Ints, times: Mapping[str, Sequence[Times]]) -> None:
        """With the fold of each sequence [S] and, by kind of value, what each row multiplies sequences by."""
        self._fold = fold
        self._kinds = {kind: _Kind(rows) for kind, rows in times.items()}
        self._lines = slice(0, 0)
        self._order = self._line = np.empty(0, np.int64)

    def add(self, rows: slice, lengths: Ints, bucket: Ints, values: Mapping[str, Floats]) -> None:
        """The tokens of some sequences of these lengths: buckets and values by kind, [T] each."""
        long = len(bucket) >= LONG * len(lengths)
        if long and rows.stop > self._lines.stop:
            self._begin(rows)
        first = self._line[rows.start - self._lines.start :][: len(lengths)] if long else self._fold[rows]
        at = bucket + np.repeat(first * BUCKETS, lengths)
        for kind, x in values.items():
            if long:
                _add(self._kinds[kind].table, at, x)
            else:
                self._kinds[kind].add(rows, lengths, at, x)

    def sums(self, kind: str) -> Floats:
        """Of all that was added, [rows, FOLDS, BUCKETS]."""
        self._multiply()
        return self._kinds[kind].found()

    def _begin(self, rows: slice) -> None:
        """A new table, whose lines are in the order of their folds."""
        self._multiply()
        self._lines = slice(rows.start, max(rows.stop, rows.start + LINES))
        self._order = np.argsort(self._fold[self._lines], kind="stable")
        self._line = np.argsort(self._order)
        for kind in self._kinds.values():
            kind.begin(len(self._order))

    def _multiply(self) -> None:
        """Away with the table."""
        if not len(self._order):
            return
        lines = self._lines.start + self._order
        sizes = np.bincount(self._fold[lines], minlength=FOLDS).tolist()
        for kind in self._kinds.values():
            kind.multiply(lines, sizes)
        self._lines, self._order = slice(0, 0), self._order[:0]


def _add(sums: Tensor, at: Ints, x: Floats) -> None:
    sums.scatter_add_(0, torch.from_numpy(at), torch.from_numpy(x))  # half of what counting into bins takes


class _Kind:
    """Sums of one kind of value; rows that multiply nothing are one."""

    def __init__(self, times: Sequence[Times]) -> None:
        own = [x for x in times if x is not None]
        self._times: list[Times] = [None, *own]
        at = iter(range(1, len(self._times)))
        self._rows = [0 if x is None else next(at) for x in times]
        self._sums = torch.zeros(len(self._times), FOLDS, BUCKETS, dtype=torch.float64)
        self.table = torch.zeros(0, dtype=torch.float64)

    def begin(self, lines: int) -> None:
        """A table of so many lines, all 0."""
        if self.table.numel() == lines * BUCKETS:  # new memory costs a fault per page
            self.table.zero_()
        else:
            self.table = torch.zeros(lines * BUCKETS, dtype=torch.float64)

    def add(self, rows: slice, lengths: Ints, at: Ints, x: Floats) -> None:
        """Values [T] of some sequences, by fold and bucket."""
        for sums, times in zip(self._sums, self._times, strict=True):
            _add(sums.view(-1), at, x if times is None else x * np.repeat(times[rows], lengths))

    def multiply(self, lines: Ints, sizes: list[int]) -> None:
        """The table, whose lines are those sequences, so many of each fold."""
        times = [np.ones(len(lines)) if x is None else x[lines] for x in self._times]
        parts = torch.from_numpy(np.stack(times)).split_with_sizes(sizes, 1)
        tables = self.table.view(-1, BUCKETS).split_with_sizes(sizes)
        for sums, one, two in zip(self._sums.unbind(1), parts, tables, strict=True):
            sums.addmm_(one, two)

    def found(self) -> Floats:
        """[rows, FOLDS, BUCKETS]."""
        return self._sums.numpy()[self._rows]
