"""A row group that is read in pieces, by turns with others: it stays open where the last piece ended.

Rows in the middle of a row group are reached only by decoding all before them. What is open is read on, so
pieces in rising order cost one reading of the row group in all, whoever reads those between them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import pyarrow as pa

Rows = Iterator[tuple[int, pa.RecordBatch]]
"""Tables, each with the number of rows of the row group before it."""


class Reel:
    """At most one row group, open at some row. It does not travel: a copy is closed."""

    def __init__(self) -> None:
        self._key: Hashable = None
        self._tables: Rows = iter(())
        self._rest: tuple[int, pa.RecordBatch] | None = None
        self._at = 0

    def __reduce__(self) -> tuple[type[Reel], tuple[()]]:
        return Reel, ()

    def rows(self, key: Hashable, begin: int, end: int, opened: Callable[[], Rows]) -> Rows:
        """The rows from one to before another.

        Args:
            key: which row group.
            begin: counted from its first row.
            end: at most its number of rows.
            opened: begins to read it from its first row.
        """
        if key != self._key or begin < self._at:
            self._key, self._tables, self._rest, self._at = key, opened(), None, 0
        while self._at < end:
            first, table = self._next()
            low, high = max(begin - first, 0), min(end - first, table.num_rows)
            self._at = first + max(high, 0)
            if high < table.num_rows:
                self._rest = first + high, table.slice(high)
            if low < high:
                yield first + low, table.slice(low, high - low)

    def _next(self) -> tuple[int, pa.RecordBatch]:
        """What was read and not asked for, or the next table; what fails is begun again by who asks again."""
        found, self._rest = self._rest, None
        if found is None:
            key, self._key = self._key, None
            found = next(self._tables)
            self._key = key
        return found
