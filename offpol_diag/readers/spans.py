"""Rows of one token each, grouped by sequence: where each sequence's rows are in a piece of a row group."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from offpol_diag.readers.ragged import Ints


@dataclass(frozen=True)
class Piece:
    """Adjacent rows of a row group.

    Attributes:
        file: path.
        group: number of the row group in the file.
        first: number of the first row in the file.
        table: the rows.
    """

    file: str
    group: int
    first: int
    table: pa.RecordBatch

    def place(self, row: int) -> str:
        """Where a row of the piece stands."""
        return f"{self.file}, row group {self.group}, row {self.first + row}"


@dataclass(frozen=True)
class Spans:
    """The rows of a piece, sequence by sequence.

    Attributes:
        order: the rows, by sequence and then as they stand, [N].
        numbers: the sequences, ascending, [S].
        begins: where each begins in `order`, [S].
        ends: where it ends, [S].
    """

    order: Ints
    numbers: Ints
    begins: Ints
    ends: Ints

    @classmethod
    def of(cls, numbers: Ints) -> Spans:
        """From the number of each row's sequence, [N]."""
        order = np.argsort(numbers, kind="stable")
        sorted_ = numbers[order]
        begins = np.flatnonzero(np.diff(sorted_, prepend=-1))
        return cls(order, sorted_[begins], begins, np.append(begins[1:], len(order)))


@dataclass(frozen=True)
class Opening:
    """Sequences that begin in one piece.

    Attributes:
        file: path.
        group: number of the row group.
        first: number of the first of them; the others follow it.
        rows: the row in the file that each begins in, [S].
        table: what is constant in a sequence, S rows.
    """

    file: str
    group: int
    first: int
    rows: Ints
    table: pa.RecordBatch

    @property
    def end(self) -> int:
        """The number after the last of them."""
        return self.first + len(self.rows)

    def between(self, begin: int, end: int) -> Opening:
        """Those with numbers from `begin` to before `end`."""
        low = min(max(begin - self.first, 0), len(self.rows))
        high = max(min(end - self.first, len(self.rows)), low)
        table = self.table.slice(low, high - low)
        return Opening(self.file, self.group, self.first + low, self.rows[low:high], table)
