"""Convert a dump of one row per token to one row per sequence.

Sequences come in the order of their first rows. One ends when `FAR` rows of others have followed its last
row, so its rows may lie anywhere within that distance, in one file or in several, and no more than so many
rows are held. Tokens are ordered by the position column, if there is one, else by row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag.errors import DumpError
from offpol_diag.forms.form import Row
from offpol_diag.forms.generic import table_records
from offpol_diag.readers import parquet
from offpol_diag.readers.checks import SKIP
from offpol_diag.readers.columns import (
    POSITION,
    ROLLOUT,
    SEQUENCE,
    TEXTS,
    TOKEN_IDS,
    TOKENS,
    WEIGHT_VERSIONS,
    Plan,
    agree,
)
from offpol_diag.readers.decode import MOST_TOKENS, Ints, dense, plain, starts
from offpol_diag.readers.dump import describe
from offpol_diag.readers.sources import Part, find
from offpol_diag.wholefiles import TemporaryFolder

FAR = 4_000_000
"""Rows of others between two rows of a sequence, at most: four row groups of a million."""
AT_ONCE = 1 << 18
"""Rows that are read at once."""
GROUP = 1 << 20
"""Tokens of a row group, about."""
WORTHWHILE = 0.25
"""Share of the rows held that must belong to finished sequences before these are written."""
OURS = "offpol_diag:"
NUMBER, ROW = f"{OURS}number", f"{OURS}row"
PLACE = f"{OURS}place"
"""Column of the converted dump that `place` reads."""


def convert(parts: Sequence[Part], plan: Plan, target: Path, skip: bool) -> list[str]:
    """Write a dump of one row per token as one of one row per sequence, its columns by the same names.

    Args:
        parts: its files that have rows.
        plan: its columns, checked.
        target: the Parquet file to make.
        skip: whether sequences whose rows contradict each other are left to the reader to skip, not refused.

    Returns:
        A remark on those that are left to skip.

    Raises:
        DumpError: a row without an id, or a sequence that comes back too late or contradicts itself.
    """
    gathering = _Gathering(parts, plan, skip)
    tables = map(gathering.whole, gathering.tables())
    first = next(tables)
    with closing(pq.ParquetWriter(target, first.schema, compression="lz4")) as writer:
        for table in chain([first], tables):
            tokens = np.cumsum(pc.list_value_length(table.column(plan.columns[ROLLOUT])).fill_null(0))
            cuts = np.searchsorted(tokens, np.arange(GROUP, tokens[-1], GROUP), side="right")
            for begin, end in pairwise(dict.fromkeys([0, *cuts.tolist(), len(table)])):
                writer.write_table(table.slice(begin, end - begin))
    if not gathering.skipped:
        return []
    found = gathering.skipped
    return [
        f"{len(found)} sequences are skipped because their rows contradict each other; the first: {found[0]}"
    ]


def rows(files: Sequence[Path], overrides: Mapping[str, str]) -> Iterator[Row]:
    """Read files of one row per token as rows of one sequence each, without the positions of its tokens."""
    parts = [part for part in describe(find([str(path) for path in files])) if part.rows]
    if not parts:
        return
    plan = agree(parts, overrides, ())
    roles = {role: name for role, name in plan.columns.items() if role != POSITION}
    with TemporaryFolder() as folder:
        convert(parts, plan, folder.path / "dump.parquet", skip=False)
        for _, record in table_records([folder.path / "dump.parquet"]):
            tokens = {role: record[name] for role, name in roles.items() if role in TOKENS}
            scalars = {role: _shown(record[name]) for role, name in roles.items() if role not in TOKENS}
            yield Row(tokens, scalars, _placed(**record[PLACE]), roles)


def place(path: str, group: int, row: int) -> str:
    """Return where the sequence in a row of a converted dump begins, for messages."""
    with pq.ParquetFile(path) as file:
        before = sum(file.metadata.row_group(i).num_rows for i in range(group))
        found = file.read_row_group(group, [PLACE]).column(0)[row - before].as_py()
    return _placed(found["file"], found["group"], found["row"])


def _placed(file: str, group: int, row: int) -> str:
    return f"{file}, row group {group}, row {row}"


@dataclass
class _Gathering:
    """The rows of unfinished sequences, which are numbered in the order of their first rows.

    Attributes:
        numbers: id → number, of every sequence so far.
        last: latest row of each sequence.
        sizes: rows of each sequence.
        read: rows so far.
        tables_read: first row of each table, number of its file, its row group, its first row in the file.
        skipped: what is wrong with each sequence that is left to skip.
    """

    parts: Sequence[Part]
    plan: Plan
    skip: bool
    numbers: dict[object, int] = field(default_factory=dict)
    last: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    read: int = 0
    tables_read: list[tuple[int, int, int, int]] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        by_role = self.plan.columns
        self.id, self.position = by_role[SEQUENCE], by_role.get(POSITION)
        self.tokens = {by_role[role]: _WIDE.get(role, pa.float64()) for role in TOKENS if role in by_role}
        self.constants = {
            name: _wide([part.schema.field(name).type for part in self.parts])
            for name in self.plan.names
            if name not in self.tokens
        }

    def tables(self) -> Iterator[pa.Table]:
        """Yield rows of whole sequences, in the order of their first rows."""
        held, out = list[pa.Table](), 0
        for table in self._rows():
            held.append(table)
            unfinished = self.read - self.last[out:] - 1 <= FAR
            count = int(unfinished.argmax()) if unfinished.any() else len(unfinished)
            if self.sizes[out : out + count].sum() > WORTHWHILE * self.sizes[out:].sum():
                rows, out = pa.concat_tables(held), out + count
                done = pc.less(rows.column(NUMBER), out)
                yield rows.filter(done)
                held = [rows.filter(pc.invert(done))]
        if out < len(self.numbers):
            yield pa.concat_tables(held)

    def _rows(self) -> Iterator[pa.Table]:
        """Yield the rows with the numbers of their sequences and their own in the dump."""
        for at, part in enumerate(self.parts):
            names = [name for name in (*self.tokens, *self.constants) if name not in part.partitions]
            for group, table, numbers in parquet.numbered(part, names, AT_ONCE):
                self.tables_read.append((self.read, at, group, int(numbers[0])))
                made = {ROW: np.arange(self.read, self.read + table.num_rows)}
                made[NUMBER] = self._numbered(table)
                for name, kind in self.tokens.items():
                    made[name] = dense(table.column(name)).cast(kind, safe=False)
                for name, kind in self.constants.items():
                    made[name] = plain(table.column(name)).cast(kind, safe=False)
                yield pa.table(made)

    def place(self, row: int) -> tuple[str, int, int]:
        """Return file, row group and row in the file of a row in the dump."""
        latest = bisect_right(self.tables_read, row, key=itemgetter(0)) - 1
        first, at, group, before = self.tables_read[latest]
        return str(self.parts[at].path), group, before + row - first

    def _numbered(self, table: pa.RecordBatch) -> Ints:
        """Return the number of each row's sequence, [N]."""
        ids = dense(table.column(self.id))
        text = pt.is_string(ids.type), pt.is_large_string(ids.type), pt.is_string_view(ids.type)
        ids = ids.cast(pa.large_binary()) if any(text) else ids  # which may be no UTF-8

        def refuse(at: int, what: str, hint: str) -> None:
            where = _placed(*self.place(self.read + int(at)))
            raise DumpError(f"{where}, column {self.id!r}: {what}", hint)

        if (missing := ids.is_null(nan_is_null=True)).true_count:
            hint = "give every row the id of its sequence; without one, no sequence can be known to be whole"
            refuse(missing.index(True).as_py(), "it is null, and a token belongs to a sequence", hint)
        coded = ids.dictionary_encode()
        known = [self.numbers.setdefault(key, len(self.numbers)) for key in coded.dictionary.to_pylist()]
        numbers: Ints = np.array(known, np.int64)[coded.indices.to_numpy()]
        rows = np.arange(self.read, self.read + len(numbers))
        new = np.zeros(len(self.numbers) - len(self.last), np.int64)
        self.last, self.sizes = np.concatenate((self.last, new - 1)), np.concatenate((self.sizes, new))
        order = np.argsort(numbers, kind="stable")
        before = np.empty(len(numbers), np.int64)  # the latest row of the same sequence
        before[order[1:]] = rows[order[:-1]]
        begins = order[np.diff(numbers[order], prepend=-1) > 0]
        before[begins] = self.last[numbers[begins]]
        late = np.flatnonzero((before >= 0) & (rows - before - 1 > FAR))
        if late.size:
            what = (
                f"sequence {_shown(ids[late[0]].as_py())!r} comes back after more than {FAR} rows of others"
            )
            hint = f"sort the dump by {self.id!r}, or write the rows of a sequence nearer to each other"
            refuse(late[0], what, hint)
        self.last[numbers] = rows  # of equal numbers the last one counts
        self.sizes += np.bincount(numbers, minlength=len(self.sizes))
        if self.sizes[numbers].max() > MOST_TOKENS:
            hint = f"give every sequence an id of its own in {self.id!r}"
            refuse(int(self.sizes[numbers].argmax()), f"a sequence has more than {MOST_TOKENS} tokens", hint)
        self.read += len(numbers)
        return numbers

    def whole(self, rows: pa.Table) -> pa.Table:
        """Return the sequences of some rows, one each."""
        number = rows.column(NUMBER).to_numpy()
        number = number - number[0]  # they begin with the first row
        offsets, first = starts(np.bincount(number)), np.empty(number.max() + 1, np.int64)
        first[number[::-1]] = np.arange(len(number))[::-1]
        heads = rows.take(first)
        flaws: dict[int, str] = {}

        def note(bad: Ints, of: Ints, say: Callable[[int], str]) -> None:
            """Keep what is wrong with the first bad row of each sequence."""
            for one, at in zip(*np.unique(of[bad], return_index=True), strict=True):
                flaws.setdefault(int(one), say(int(bad[at])))

        for name in (name for name in self.constants if name != self.id):
            codes = rows.column(name).combine_chunks().dictionary_encode("encode").indices.to_numpy()
            bad = np.flatnonzero(codes != codes[first][number])
            note(bad, number, partial(self._differing, rows, name))
        order = None
        if self.position:
            said, column = f"column {self.position!r}", rows.column(self.position)
            null = np.flatnonzero(column.is_null())
            note(null, number, lambda _: f"{said}: it is null in a row of the sequence")
            position = column.fill_null(0).to_numpy()
            if not ((np.diff(number) > 0) | ((np.diff(number) == 0) & (np.diff(position) > 0))).all():
                order = np.lexsort((position, number))
                of, at = number[order], position[order]
                twice = np.flatnonzero((np.diff(of) == 0) & (np.diff(at) == 0))
                note(twice, of, lambda row: f"{said}: two rows of the sequence are at position {at[row]}")
        elif (np.diff(number) < 0).any():
            order = np.argsort(number, kind="stable")
        places = [self.place(row) for row in heads.column(ROW).to_pylist()]
        for one in sorted(flaws):
            text = f"{_placed(*places[one])}, {flaws[one]}"
            if not self.skip:
                raise DumpError(text, SKIP)
            self.skipped.append(text)
        made: dict[str, pa.Array] = {}
        for name in self.tokens:
            values = rows.column(name) if order is None else rows.column(name).take(order)
            made[name] = pa.LargeListArray.from_arrays(offsets, values.combine_chunks())
        if flaws:  # the reader skips a row without a list
            name, odd = self.plan.columns[ROLLOUT], np.isin(np.arange(len(first)), list(flaws))
            made[name] = pc.if_else(pa.array(odd), None, made[name])
        made |= {name: heads.column(name) for name in self.constants}
        file, group, row = zip(*places, strict=True)
        names = ["file", "group", "row"]
        made[PLACE] = pa.StructArray.from_arrays([pa.array(file), pa.array(group), pa.array(row)], names)
        return pa.table(made)

    def _differing(self, rows: pa.Table, name: str, other: int) -> str:
        """Return how a row differs from the first one of its sequence."""
        first = pc.index(rows.column(NUMBER), rows.column(NUMBER)[other]).as_py()
        one, two = (_shown(rows.column(name)[row].as_py()) for row in (first, other))
        file, _, at = self.place(rows.column(ROW)[other].as_py())
        what = f"this one has {one!r} where it begins and {two!r} in row {at} of {file}"
        return f"column {name!r}: a sequence has one value, and {what}"


_WIDE = dict.fromkeys((TOKEN_IDS, POSITION, WEIGHT_VERSIONS), pa.int64())
"""Types of columns with a value per token; the others are numbers of 64 bits, since files may differ."""


def _wide(types: Sequence[pa.DataType]) -> pa.DataType:
    """Return the type of a column with a value per sequence that holds those of all files."""
    kinds = {plain(pa.array([], one)).type for one in types} - {pa.null()}
    if any(test(one) for test in TEXTS for one in kinds):
        return pa.large_binary()  # which may be no UTF-8; the reader says so
    if any(map(pt.is_floating, kinds)):
        return pa.float64()
    if kinds <= {pa.bool_()} or kinds == {pa.uint64()}:
        return kinds.pop() if kinds else pa.null()
    return pa.int64()


def _shown(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
