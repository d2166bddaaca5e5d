"""Convert a dump of one row per token to one row per sequence, by polars.

Sequences come in the order of their first rows. One ends when `FAR` rows of others have followed its last
row, so its rows may lie anywhere within that distance, in one file or in several, and no more than so many
rows are held. Tokens are ordered by the position column, if there is one, else by row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
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
    MASK,
    POSITION,
    ROLLOUT,
    SEQUENCE,
    TEXTS,
    TOKEN_IDS,
    TOKENS,
    Plan,
    agree,
    may_mask,
)
from offpol_diag.readers.decode import MOST_TOKENS, Ints, dense, plain
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
MOST = 256
"""Most columns that are looked at for a mask that nobody named."""
OURS = "offpol_diag:"
NUMBER, FILE, GROUP_, ROW = (f"{OURS}{word}" for word in ("number", "file", "group", "row"))
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
    frames = gathering.frames()
    first = gathering.table(next(frames))
    with closing(pq.ParquetWriter(target, first.schema, compression="lz4")) as writer:
        for table in (first, *map(gathering.table, frames)):
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
        skipped: what is wrong with each sequence that is left to skip.
    """

    parts: Sequence[Part]
    plan: Plan
    skip: bool
    numbers: dict[object, int] = field(default_factory=dict)
    last: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    sizes: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    read: int = 0
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
        self.tokens |= dict.fromkeys(_like_a_mask(self.parts, self.plan), pa.float64())

    def frames(self) -> Iterator[pl.DataFrame]:
        """Yield rows of whole sequences, in the order of their first rows."""
        held, out = list[pl.DataFrame](), 0
        for frame in self._rows():
            held.append(frame)
            unfinished = self.read - self.last[out:] - 1 <= FAR
            count = int(unfinished.argmax()) if unfinished.any() else len(unfinished)
            if self.sizes[out : out + count].sum() > WORTHWHILE * self.sizes[out:].sum():
                whole, out = pl.concat(held), out + count
                yield whole.filter(pl.col(NUMBER) < out)
                held = [whole.filter(pl.col(NUMBER) >= out)]
        if out < len(self.numbers):
            yield pl.concat(held)

    def _rows(self) -> Iterator[pl.DataFrame]:
        """Yield the rows with the numbers of their sequences and their places."""
        for at, part in enumerate(self.parts):
            names = [name for name in (*self.tokens, *self.constants) if name not in part.partitions]
            group, row = -1, 0
            for now, table in parquet.tables(part, names, AT_ONCE):
                if now != group:
                    group, row = now, sum(part.group_rows[:now])
                for key, value in part.partitions.items():
                    table = table.append_column(key, pa.repeat(value, table.num_rows))
                made = {NUMBER: pl.Series(self._numbered(table, part, group, row), dtype=pl.Int64)}
                for name, kind in self.tokens.items():
                    made[name] = _series(dense(table.column(name)), kind)
                for name, kind in self.constants.items():
                    made[name] = _series(plain(table.column(name)), kind)
                made[ROW] = pl.Series(np.arange(row, row + table.num_rows))
                where = pl.lit(at, pl.Int32).alias(FILE), pl.lit(group, pl.Int32).alias(GROUP_)
                yield pl.DataFrame(made).with_columns(where)
                row += table.num_rows

    def _numbered(self, table: pa.RecordBatch, part: Part, group: int, row: int) -> Ints:
        """Return the number of each row's sequence, [N]."""
        ids = dense(table.column(self.id))
        text = pt.is_string(ids.type), pt.is_large_string(ids.type), pt.is_string_view(ids.type)
        ids = ids.cast(pa.large_binary()) if any(text) else ids

        def refuse(at: int, what: str, hint: str) -> None:
            where = _placed(str(part.path), group, row + at)
            raise DumpError(f"{where}, column {self.id!r}: {what}", hint)

        if ids.is_null(nan_is_null=True).true_count:
            at = int(ids.is_null(nan_is_null=True).index(True).as_py())
            hint = "give every row the id of its sequence; without one, no sequence can be known to be whole"
            refuse(at, "it is null, and a token belongs to a sequence", hint)
        coded = ids.dictionary_encode()
        known = [self.numbers.setdefault(key, len(self.numbers)) for key in coded.dictionary.to_pylist()]
        numbers: Ints = np.array(known, np.int64)[coded.indices.to_numpy()]
        rows = np.arange(self.read, self.read + len(numbers))
        new = np.zeros(len(self.numbers) - len(self.last), np.int64)
        self.last, self.sizes = np.concatenate((self.last, new - 1)), np.concatenate((self.sizes, new))
        shifted = pl.DataFrame({"number": numbers, "row": rows}).select(pl.col("row").shift().over("number"))
        before = shifted.to_series().fill_null(-1).to_numpy()
        before = np.where(before < 0, self.last[numbers], before)  # the latest row of the same sequence
        late = np.flatnonzero((before >= 0) & (rows - before - 1 > FAR))
        if late.size:
            one = _shown(ids[late[0]].as_py())
            what = f"sequence {one!r} comes back after more than {FAR} rows of others"
            hint = f"sort the dump by {self.id!r}, or write the rows of a sequence nearer to each other"
            refuse(int(late[0]), what, hint)
        self.last[numbers] = rows  # of equal numbers the last one counts
        self.sizes += np.bincount(numbers, minlength=len(self.sizes))
        if self.sizes[numbers].max() > MOST_TOKENS:
            row, hint = (
                int(self.sizes[numbers].argmax()),
                f"give every sequence an id of its own in {self.id!r}",
            )
            refuse(row, f"a sequence has more than {MOST_TOKENS} tokens", hint)
        self.read += len(numbers)
        return numbers

    def table(self, frame: pl.DataFrame) -> pa.Table:
        """Return the sequences of some rows, one each."""
        varying = [name for name in self.constants if name != self.id]
        differs = (
            pl.col(name).ne_missing(pl.col(name).first()).any().alias(f"{OURS}{name}") for name in varying
        )
        firsts = pl.col(*self.constants, FILE, GROUP_, ROW).first()
        by_number = frame.group_by(NUMBER, maintain_order=True)
        heads = by_number.agg(firsts, *differs)
        if self.position:
            frame = frame.sort(NUMBER, self.position, maintain_order=True)
            twice = pl.col(self.position).is_duplicated().any() | pl.col(self.position).has_nulls()
            heads = heads.with_columns(frame.group_by(NUMBER, maintain_order=True).agg(twice)[self.position])
        lists = frame.group_by(NUMBER, maintain_order=True).agg(*self.tokens)
        odd = [f"{OURS}{name}" for name in varying] + ([self.position] if self.position else [])
        bad = heads.select(pl.any_horizontal(pl.lit(False), *odd)).to_series()
        for head in heads.filter(bad).iter_rows(named=True):
            self._refuse(frame.filter(pl.col(NUMBER) == head[NUMBER]), head, varying)
        if bad.any():  # the reader skips a row without a list
            rollout = self.plan.columns[ROLLOUT]
            lists = lists.with_columns(pl.when(~bad).then(pl.col(rollout)).alias(rollout))
        made = {name: lists[name].to_arrow() for name in self.tokens}
        made |= {name: heads[name].to_arrow() for name in self.constants}
        files = pa.DictionaryArray.from_arrays(heads[FILE].to_arrow(), [str(one.path) for one in self.parts])
        where = [files.cast(pa.string()), heads[GROUP_].to_arrow(), heads[ROW].to_arrow()]
        made[PLACE] = pa.StructArray.from_arrays(where, ["file", "group", "row"])
        return pa.table(made)

    def _refuse(self, rows: pl.DataFrame, head: dict[str, Any], varying: Sequence[str]) -> None:
        """Refuse a sequence whose rows contradict each other, or keep what is wrong with it."""
        name = next((name for name in varying if head[f"{OURS}{name}"]), self.position or "")
        if name in varying:
            rows = rows.sort(FILE, ROW)
            first = rows[name][0]
            other = rows.filter(pl.col(name).ne_missing(pl.lit(first, rows[name].dtype))).row(0, named=True)
            what = (
                f"a sequence has one value, and this one has {_shown(first)!r} where it begins and "
                f"{_shown(other[name])!r} in row {other[ROW]} of {self.parts[other[FILE]].path}"
            )
        elif rows[name].has_nulls():
            what = "it is null in a row of the sequence"
        else:
            what = (
                f"two rows of the sequence are at position {rows[name].filter(rows[name].is_duplicated())[0]}"
            )
        text = (
            f"{_placed(str(self.parts[head[FILE]].path), head[GROUP_], head[ROW])}, column {name!r}: {what}"
        )
        if not self.skip:
            raise DumpError(text, SKIP)
        self.skipped.append(text)


_WIDE = {TOKEN_IDS: pa.int64(), POSITION: pa.int64()}
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


def _series(column: pa.Array, kind: pa.DataType) -> pl.Series:
    found = pl.from_arrow(column.cast(kind, safe=False))
    assert isinstance(found, pl.Series)
    return found


def _shown(value: object) -> object:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _like_a_mask(parts: Sequence[Part], plan: Plan) -> list[str]:
    """Return the columns that nobody reads and that begin as a mask: of 0 and 1, not the same in a sequence.

    They are written as well, and the reader judges them.
    """
    if MASK in plan.columns or plan.unmasked:
        return []
    read, schema = set(plan.names), parts[0].schema
    unread = [one.name for one in schema if one.name not in read and may_mask(one.name, one.type, plan.form)]
    once = [name for name in unread if all(part.schema.names.count(name) == 1 for part in parts)]
    names = [name for name in once if name not in parts[0].partitions][:MOST]
    sequence = plan.columns[SEQUENCE]
    ids = [sequence] if sequence not in parts[0].partitions else []
    if not names or not ids:
        return []
    _, table = next(parquet.tables(parts[0], [*ids, *names], AT_ONCE))
    made = {name: _series(dense(table.column(name)), pa.float64()) for name in names}
    frame = pl.DataFrame(
        made | {NUMBER: dense(table.column(sequence)).dictionary_encode().indices.to_numpy()}
    )
    flags = [name for name in names if frame[name].is_in([0.0, 1.0]).all() and not frame[name].has_nulls()]
    if not flags:
        return []
    apart = (
        frame.group_by(NUMBER).agg(pl.col(name).n_unique() > 1 for name in flags).select(pl.col(*flags).any())
    )
    return [name for name in flags if apart[name][0]]
