"""What one reading decoded, left to the next one of the same process: Parquet is read once, not twice."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

Rows = Iterator[pa.RecordBatch]
ROOM = 64 << 20
"""Bytes: two columns of 7 M tokens."""


@dataclass
class Kept:
    """Columns of row groups; none is kept before it is said how much may be.

    A row group is taken out when a reading with more columns comes by, and what finds no room is read again.

    Attributes:
        room: bytes that may be kept.
    """

    room: int = 0
    _tables: dict[Hashable, pa.Table] = field(default_factory=dict)

    @contextmanager
    def open(self, room: int = ROOM) -> Iterator[None]:
        """Keep so many bytes within the block, and none after it."""
        self.room = room
        try:
            yield
        finally:
            self.room = 0
            self._tables.clear()

    def rows(
        self, key: Hashable, names: list[str], leave: bool, decoded: Callable[[list[str]], Rows]
    ) -> Rows:
        """The rows of a row group.

        Args:
            key: which row group, and how many rows come at once.
            names: the columns.
            leave: whether they are left to the next reading.
            decoded: reads columns of it from the file, rows in the same pieces each time.
        """
        there = self._tables.get(key) if leave else self._taken(key)
        if there is None:
            return self._leaving(key, decoded(names)) if leave else decoded(names)
        lacking = [name for name in names if name not in there.column_names]
        own = there.select([name for name in names if name not in lacking])
        return _beside(own, decoded(lacking)) if lacking else iter(own.to_batches())

    def _taken(self, key: Hashable) -> pa.Table | None:
        found = self._tables.pop(key, None)
        self.room += 0 if found is None else found.nbytes
        return found

    def _leaving(self, key: Hashable, rows: Rows) -> Rows:
        """The same rows; they are kept when the last has come, if there is room for all of them."""
        held: list[pa.RecordBatch] = []
        size = 0
        for batch in rows:
            size += batch.nbytes
            held = [*held, batch] if size <= self.room else []
            yield batch
        if held:
            self.room -= size
            self._tables[key] = pa.Table.from_batches(held)


def _beside(own: pa.Table, more: Iterable[pa.RecordBatch]) -> Rows:
    """The same rows with more columns."""
    done = 0
    for batch in more:
        here = own.slice(done, batch.num_rows).combine_chunks().to_batches()[0]
        columns = dict(zip(here.schema.names, here.columns, strict=True))
        columns |= dict(zip(batch.schema.names, batch.columns, strict=True))
        yield pa.RecordBatch.from_pydict(columns)
        done += batch.num_rows


KEPT = Kept()
"""Of this process."""
