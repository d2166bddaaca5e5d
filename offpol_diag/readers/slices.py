"""Files → slices: rows that fit in memory, with their place in the file for messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns
from offpol_diag.readers.checks import Problem
from offpol_diag.readers.files import READ_ERRORS, Part, chunk_of, first_line, open_again, open_parquet
from offpol_diag.readers.kept import KEPT
from offpol_diag.readers.outages import outage
from offpol_diag.readers.pages import check
from offpol_diag.readers.plain import plain
from offpol_diag.readers.ragged import Flags, Ints, starts
from offpol_diag.readers.reel import Reel, Rows
from offpol_diag.readers.schemas import Plan

# Row group, number of the first row in the file, and the rows.
Located = tuple[int, int, pa.RecordBatch]


@dataclass(frozen=True)
class Slice:
    """Rows of one row group.

    Attributes:
        file: path.
        row_group: number in the file, from 0.
        rows: number of each row in the file, from 0, [S].
        before: rows in the files before this one.
        table: the columns of the plan, S rows.
        flaws: what was found wrong with rows before their values are looked at.
    """

    file: str
    row_group: int
    rows: Ints
    before: int
    table: pa.RecordBatch
    flaws: tuple[Problem, ...] = ()

    def place(self, index: int) -> str:
        """Where a row of the slice stands."""
        return f"{self.file}, row group {self.row_group}, row {self.rows[index]}"

    def keep(self, good: Flags) -> Slice:
        """The rows that are good, [S] bool; none of them has a flaw."""
        return replace(self, rows=self.rows[good], table=self.table.filter(pa.array(good)), flaws=())


def slices(part: Part, plan: Plan, before: int, most: Mapping[int, int], reel: Reel) -> Iterator[Slice]:
    """The rows of a file, at most so many tokens at a time and at least one row.

    Args:
        part: the file.
        plan: the columns to read.
        before: rows in the files before this one.
        most: row group → tokens, masked ones counted.
        reel: where a row group that is read in pieces stays open.

    Raises:
        DumpError: data that cannot be read.
    """
    pieces = _located(part, plan, most, reel)
    for group, first, table in _filled(pieces, plan.columns[columns.ROLLOUT], most):
        rows = np.arange(first, first + table.num_rows)
        yield Slice(str(part.path), group, rows, before, table)


def _filled(pieces: Iterator[Located], name: str, most: Mapping[int, int]) -> Iterator[Located]:
    """The same rows in tables of at most `most` tokens by column `name`, or of one row.

    What is left of one piece and the beginning of the next make one table: few batches have to be joined.
    """
    held: Located | None = None
    try:
        for group, first, piece in pieces:
            if not piece.num_rows:
                continue
            if held and held[0] != group:
                yield held
                held = None
            *full, held = _cut(*_with(held, group, first, piece), name, most[group])
            yield from full
    except DumpError:
        if held:
            yield held  # these rows were read before the error: what is wrong with them goes first
        raise
    if held:
        yield held


def _with(held: Located | None, group: int, first: int, piece: pa.RecordBatch) -> tuple[int, int, pa.Table]:
    """A piece and what is held of the one before it, not copied."""
    batches = [held[2], piece] if held else [piece]
    return group, held[1] if held else first, pa.Table.from_batches(batches)


def _cut(group: int, first: int, table: pa.Table, name: str, tokens: int) -> list[Located]:
    lengths = pc.list_value_length(table.column(name)).fill_null(0).to_numpy()
    return [
        (group, first + begin, table.slice(begin, end - begin).combine_chunks().to_batches()[0])
        for begin, end in cuts(starts(lengths), tokens)
    ]


def cuts(offsets: Ints, tokens: int) -> Iterator[tuple[int, int]]:
    """Spans of rows that hold at most `tokens` tokens, or one row; rows start at `offsets` [S+1]."""
    begin, rows = 0, len(offsets) - 1
    while begin < rows:
        fit = int(np.searchsorted(offsets, offsets[begin] + tokens, side="right")) - 1
        end = max(fit, begin + 1)
        yield begin, end
        begin = end


def tables(part: Part, plan: Plan, most: Mapping[int, int]) -> Iterator[Located]:
    """Row group, number of the first row in the file, and the rows, of whole row groups."""
    with open_again(part.path) as parquet:
        for group in part.groups:
            yield from _placed(part, group, plan, _read(parquet, part, group, plan, most[group]))


def _located(part: Part, plan: Plan, most: Mapping[int, int], reel: Reel) -> Iterator[Located]:
    """As `tables`, or some rows of one row group."""
    if part.between is None:
        return tables(part, plan, most)
    group = part.groups.start
    rows = reel.rows((part.path, group), *part.between, lambda: _alone(part, group, plan, most[group]))
    return _placed(part, group, plan, rows)


def _alone(part: Part, group: int, plan: Plan, tokens: int) -> Rows:
    with open_again(part.path) as parquet:
        yield from _read(parquet, part, group, plan, tokens)


def _placed(part: Part, group: int, plan: Plan, found: Rows) -> Iterator[Located]:
    first = sum(part.group_rows[:group])
    for done, table in found:
        for key, value in part.partitions.items():
            table = table.append_column(key, pa.repeat(value, table.num_rows))
        for name in plan.labels:
            at = table.schema.get_field_index(name)
            table = table.set_column(at, name, plain(table.column(at)))
        yield group, first + done, table


def tokens_in(part: Part, group: int, plan: Plan) -> int:
    """Tokens of a row group, masked ones included, by the footer; an empty list counts as one.

    Raises:
        DumpError: the file does not open any more, or that column of it is damaged.
    """
    if plan.form.long:
        return part.group_rows[group]
    name = plan.columns[columns.ROLLOUT]
    with open_again(part.path) as parquet:
        try:
            return _checked(parquet, part, group, [name])[name]
        except READ_ERRORS as error:
            raise _corrupt(part, group, 0, [name], error) from error


def _read(parquet: pq.ParquetFile, part: Part, group: int, plan: Plan, tokens: int) -> Rows:
    """One row group in pieces, each with the number of rows before it."""
    names = [name for name in plan.names if name not in part.partitions]
    done = 0
    try:
        values = _checked(parquet, part, group, names)[plan.columns[columns.ROLLOUT]]
        rows = max(1, tokens * part.group_rows[group] // max(values, 1))
        key = str(part.path), part.bytes, group, rows

        def decoded(some: list[str]) -> Iterator[pa.RecordBatch]:
            found: Iterator[pa.RecordBatch] = parquet.iter_batches(rows, row_groups=[group], columns=some)
            return found

        for table in KEPT.rows(key, names, plan.bare, decoded):
            yield done, table
            done += table.num_rows
    except READ_ERRORS as error:
        raise _corrupt(part, group, done, names, error) from error
    if done != part.group_rows[group]:
        raise _corrupt(part, group, done, names, EOFError("not the rows its footer had"))


def _checked(parquet: pq.ParquetFile, part: Part, group: int, names: list[str]) -> dict[str, int]:
    """How many values columns of a row group have, by the footer; the sizes that they declare are checked.

    Far away, where a look at a page is a request, the footer is believed for all but the first.

    Raises:
        Exception: one of `READ_ERRORS`.
    """
    paths = [parquet.schema.column(i).path for i in range(len(parquet.schema))]
    found: dict[str, int] = {}
    with nullcontext() if part.path.far else part.path.open() as stream:
        for name in names[:1] if part.path.far else names:
            leaves = [i for i, path in enumerate(paths) if f"{path}.".startswith(f"{name}.")]
            for leaf in leaves:
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
    """Whether a column of a row group can be read on its own."""
    try:
        with open_parquet(part.path) as parquet:
            _checked(parquet, part, group, [name])
            for _ in parquet.iter_batches(1024, row_groups=[group], columns=[name]):
                pass
    except READ_ERRORS:
        return False
    return True
