"""Read row groups as slices that fit in memory, with their location for messages."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import nullcontext

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns
from offpol_diag.readers.decode import Slice, cuts, plain
from offpol_diag.readers.keys import starts
from offpol_diag.readers.pages import check
from offpol_diag.readers.parquet import READ_ERRORS, Part, chunk_of, first_line, open_again, open_parquet
from offpol_diag.readers.remote import outage
from offpol_diag.readers.schema import Plan

Located = tuple[int, int, pa.RecordBatch]
"""Number of a row group, number of the first row in the file, and a table of rows."""
Rows = Iterator[tuple[int, pa.RecordBatch]]
"""Tables, each with the number of its first row within the row group."""


class Cursor:
    """Reader of row ranges in a row group that keeps the file open where the previous range ended.

    Rows in the middle of a row group are reached only by decoding all rows before them. Ranges in ascending
    order, with gaps or without, decode the row group only once. A pickled copy is closed.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._tables: Rows = iter(())
        self._rest: tuple[int, pa.RecordBatch] | None = None
        self._at = 0

    def __reduce__(self) -> tuple[type[Cursor], tuple[()]]:
        return Cursor, ()

    def rows(self, key: Hashable, begin: int, end: int, opened: Callable[[], Rows]) -> Rows:
        """Yield the rows `begin` to `end` − 1 of a row group.

        Args:
            key: identifies the row group.
            begin: counted from its first row.
            end: at most its number of rows.
            opened: starts reading the row group at its first row.
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
        """Return the unused rest of the previous table, or the next table; after an error, `rows` reopens."""
        found, self._rest = self._rest, None
        if found is None:
            key, self._key = self._key, None
            found = next(self._tables)
            self._key = key
        return found


def slices(part: Part, plan: Plan, before: int, most: Mapping[int, int], cursor: Cursor) -> Iterator[Slice]:
    """Yield the rows of a file in slices of at most `most` tokens, or of one row.

    Args:
        part: the file.
        plan: the columns to read.
        before: rows in the files before this one.
        most: row group → tokens per slice, masked ones included.
        cursor: keeps a partly read row group open.

    Raises:
        DumpError: data that cannot be read.
    """
    if part.between is None:
        found = tables(part, plan, most)
    else:
        group = part.groups.start
        rows = cursor.rows((part.path, group), *part.between, lambda: _alone(part, group, plan, most[group]))
        found = _placed(part, group, plan, rows)
    for group, first, table in _filled(found, plan.columns[columns.ROLLOUT], most):
        yield Slice(str(part.path), group, np.arange(first, first + table.num_rows), before, table)


def tables(part: Part, plan: Plan, most: Mapping[int, int]) -> Iterator[Located]:
    """Yield the rows of whole row groups, in tables of about `most` tokens."""
    with open_again(part.path) as parquet:
        for group in part.groups:
            yield from _placed(part, group, plan, _read(parquet, part, group, plan, most[group]))


def tokens_in(part: Part, group: int, plan: Plan) -> int:
    """Return a row group's tokens from the footer, masked ones included; an empty list counts as one.

    Raises:
        DumpError: the file can no longer be opened, or the column is damaged.
    """
    if plan.form.long:
        return part.group_rows[group]
    name = plan.columns[columns.ROLLOUT]
    with open_again(part.path) as parquet:
        try:
            return _checked(parquet, part, group, [name])[name]
        except READ_ERRORS as error:
            raise _corrupt(part, group, 0, [name], error) from error


def _filled(pieces: Iterator[Located], name: str, most: Mapping[int, int]) -> Iterator[Located]:
    """Regroup rows into tables of at most `most` tokens, by the lists in column `name`, or of one row.

    Tables may span several input pieces, so that few batches have to be joined.
    """
    held: Located | None = None
    try:
        for group, first, piece in pieces:
            if not piece.num_rows:
                continue
            if held and held[0] != group:
                yield held
                held = None
            table = pa.Table.from_batches([held[2], piece] if held else [piece])
            first = held[1] if held else first
            lengths = pc.list_value_length(table.column(name)).fill_null(0).to_numpy()
            *full, held = (
                (group, first + begin, table.slice(begin, end - begin).combine_chunks().to_batches()[0])
                for begin, end in cuts(starts(lengths), most[group])
            )
            yield from full
    except DumpError:
        if held:
            yield held  # rows read before the error come first, since errors in them take precedence
        raise
    if held:
        yield held


def _alone(part: Part, group: int, plan: Plan, tokens: int) -> Rows:
    with open_again(part.path) as parquet:
        yield from _read(parquet, part, group, plan, tokens)


def _placed(part: Part, group: int, plan: Plan, found: Rows) -> Iterator[Located]:
    """Add the columns of hive partitions, and rewrite labels as plain values."""
    first = sum(part.group_rows[:group])
    for done, table in found:
        for key, value in part.partitions.items():
            table = table.append_column(key, pa.repeat(value, table.num_rows))
        for name in plan.labels:
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, plain(table.column(at)))
        yield group, first + done, table


def _read(parquet: pq.ParquetFile, part: Part, group: int, plan: Plan, tokens: int) -> Rows:
    """Yield one row group in tables, each with the number of its first row."""
    names = [name for name in plan.names if name not in part.partitions]
    done = 0
    try:
        values = _checked(parquet, part, group, names)[plan.columns[columns.ROLLOUT]]
        rows = max(1, tokens * part.group_rows[group] // max(values, 1))
        for table in parquet.iter_batches(rows, row_groups=[group], columns=names):
            yield done, table
            done += table.num_rows
    except READ_ERRORS as error:
        raise _corrupt(part, group, done, names, error) from error
    if done != part.group_rows[group]:
        raise _corrupt(part, group, done, names, EOFError("not the rows its footer had"))


def _checked(parquet: pq.ParquetFile, part: Part, group: int, names: list[str]) -> dict[str, int]:
    """Check the declared sizes of columns in a row group; return each column's number of values.

    For remote files, where each page header costs a request, only the first column's pages are checked.

    Raises:
        Exception: one of `READ_ERRORS`.
    """
    paths = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
    remote, found = part.path.remote, dict[str, int]()
    with nullcontext() if remote else part.path.open() as stream:
        for name in names[:1] if remote else names:
            for leaf, path in enumerate(paths):
                if f"{path}.".startswith(f"{name}."):
                    chunk = chunk_of(parquet, group, leaf)
                    check(chunk, part.group_rows[group], part.bytes, stream)
                    found.setdefault(name, int(chunk.num_values))
    return found


def _corrupt(part: Part, group: int, done: int, names: list[str], error: Exception) -> DumpError:
    first = sum(part.group_rows[:group]) + done
    where = f"{part.path}, row group {group}, from row {first} on"
    if lost := outage(part.path, error):
        return DumpError(f"{where}: {lost[0]}", lost[1])
    culprits = ", ".join(repr(name) for name in names if not _reads(part, group, name)) or "unknown"
    return DumpError(
        f"{where}, column {culprits}: the data cannot be read ({first_line(error)})",
        "the file is damaged: copy it again and compare sizes; if the error stays, dump again",
    )


def _reads(part: Part, group: int, name: str) -> bool:
    """Return whether a column of a row group can be read."""
    try:
        with open_parquet(part.path) as parquet:
            _checked(parquet, part, group, [name])
            for _ in parquet.iter_batches(1024, row_groups=[group], columns=[name]):
                pass
    except READ_ERRORS:
        return False
    return True
