"""Open a dump and read its sequences as batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import chain, repeat
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offpol_diag.batch import Batch, joined, label
from offpol_diag.errors import DumpError
from offpol_diag.readers import parquet
from offpol_diag.readers.checks import Count, Signs, Skipped, good_rows, remarks
from offpol_diag.readers.columns import MASK, ROLLOUT, Plan, agree, ignored
from offpol_diag.readers.decode import MOST_ROWS, Ints, Slice, cuts, is_text, pack, plain, starts
from offpol_diag.readers.masks import ROWS, TOKENS, Ends, require_mask
from offpol_diag.readers.sources import File, Part, find

Progress = Callable[[int], None]

ROOM = 1.2
"""Largest batch of a shard relative to `batch_tokens`, so that a shard of little more is one batch."""
RECYCLED = (32 << 20) - (64 << 10)
"""Bytes just below glibc's maximum mmap threshold; freeing such a block makes malloc reuse smaller ones."""
TABLES = 8
"""Tables per batch that Parquet is decoded in, since decoding takes several times the memory of a table."""
FULL = 0.75
"""Share of the largest batch from which a batch does not wait for the next, with which it might be joined."""
FOOTERS_AT_ONCE = 16
MOST_SHORT = 1_000_000
"""Most rows of a dump whose rows have fewer than two tokens on average: each row takes time of its own.

With every preset, 500,000 rows of one token took 43 s of CPU time on two cores.
"""
MOST_COUNTED = 1 << 21
"""Labels of a column beyond which they are not counted."""
MOST_DIGITS = 64
"""Maximum digits of an integer in a directory name, leading zeros included."""


# ---------------------------------------------------------------- files


def describe(files: Sequence[File]) -> list[Part]:
    """Read the footers of all files."""
    pairs = [(key, text) for file in files for key, text in file.partitions.items()]
    words = {key for key, text in pairs if text is not None and not _is_integer(text)}
    numeric = {key for key, _ in pairs} - words
    if not any(file.path.store for file in files):
        return [_describe(file, numeric) for file in files]
    with ThreadPoolExecutor(FOOTERS_AT_ONCE, "offpol-diag-footers") as pool:
        return list(pool.map(_describe, files, repeat(numeric)))


def _describe(file: File, numeric: set[str]) -> Part:
    """Read a footer; partition columns in `numeric` hold integers, the others text."""
    try:
        partitions = {
            key: pa.scalar(int(text) if text is not None and key in numeric else text, dtype)
            for key, text in file.partitions.items()
            for dtype in [pa.int64() if key in numeric else pa.string()]
        }
        state = file.path.state()
        footer = parquet.footer(file.path)
    except parquet.READ_ERRORS as error:
        raise parquet.unreadable(file.path, error) from error
    schema, small = footer.schema, footer.small | partitions.keys()
    partitions = {key: value for key, value in partitions.items() if key not in schema.names}
    for key, value in partitions.items():
        schema = schema.append(pa.field(key, value.type))
    known = vars(footer) | {"schema": schema, "small": small}
    return Part(path=file.path, partitions=partitions, state=state, **known)


def _is_integer(text: str) -> bool:
    """Return whether text is a 64-bit integer."""
    digits = text.removeprefix("-").isdecimal() and len(text) <= MOST_DIGITS
    return digits and -(2**63) <= int(text) < 2**63


def merged(provenances: Iterable[dict[str, object]]) -> dict[str, object]:
    """Merge the provenance of several files: one value where they agree, else the list of distinct values."""
    seen: dict[str, list[object]] = {}
    for provenance in provenances:
        for key, value in provenance.items():
            values = seen.setdefault(key, [])
            if value not in values:
                values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in seen.items()}


# ---------------------------------------------------------------- the dump


@dataclass(frozen=True)
class DumpInfo:
    """Facts about a dump, for the report.

    Attributes:
        rows: sequences, bad ones included; in the long form tokens, until the dump has been read.
        columns: canonical name → the column it is read from.
        others: columns that are read by their own names, for groups of sequences.
        ignored: columns that nobody reads.
        provenance: how the numbers were made; where files disagree, the list of their values.
    """

    files: tuple[str, ...]
    rows: int
    row_groups: int
    bytes: int
    columns: dict[str, str]
    provenance: dict[str, object]
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True)
class Findings:
    """Findings of a pass: sequences (bad ones included), unmasked tokens, skipped rows, signs by role.

    `ends` is how the first sequences of the dump end, of a part that has some of them.
    """

    rows: int
    tokens: int
    skipped: Skipped
    signs: dict[str, Count]
    ends: list[Ints]


class Cursor:
    """Reader of row ranges in a row group that keeps the file open where the previous range ended.

    Rows in the middle of a row group are reached only by decoding all rows before them. Ranges in ascending
    order, with gaps or without, decode the row group only once. A pickled copy is closed.
    """

    def __init__(self) -> None:
        self._key: Hashable = None
        self._tables: Iterator[pa.RecordBatch] = iter(())
        self._at = 0

    def __reduce__(self) -> tuple[type[Cursor], tuple[()]]:
        return Cursor, ()

    def rows(self, part: Part, names: Sequence[str], tokens: int) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the rows of a part of a row group, as `parquet.tables` does."""
        assert part.between is not None
        begin, end = part.between
        key = part.path, part.groups.start
        if key != self._key or begin < self._at:
            whole = replace(part, between=None)
            self._tables, self._at = (table for _, table in parquet.tables(whole, names, tokens)), 0
        self._key = None  # until the range is read without an error
        while self._at < end:
            table, first = next(self._tables), self._at
            low, high = max(begin - first, 0), min(end - first, table.num_rows)
            self._at = first + high
            if high < table.num_rows:
                self._tables = chain([table.slice(high)], self._tables)
            if low < high:
                yield part.groups.start, table.slice(low, high - low)
        self._key = key


@dataclass
class Dump:
    """A dump with validated files, columns and types; its values are checked as they are read.

    Attributes:
        parts: its files that have rows.
        batch_tokens: tokens per batch, masked ones included.
        skipped: rows skipped so far by the latest pass.
        remarks: what is to be said about how its files were made.
        made: what keeps a temporary file alive, or None.
    """

    info: DumpInfo
    parts: list[Part]
    _plan: Plan
    _skip: bool
    batch_tokens: int
    skipped: Skipped = field(default_factory=Skipped)
    _signs: Signs | None = None
    _ends: Ends | None = None
    _kept: int = 0
    _shard: bool = False
    _waits: bool = False
    _late: bool = False
    _before: int = 0
    _rate: float = 0.0
    _cursor: Cursor = field(default_factory=Cursor, compare=False, repr=False)
    remarks: tuple[str, ...] = ()
    made: object = field(default=None, compare=False, repr=False)

    @property
    def long(self) -> bool:
        """True in the long form (one row per token)."""
        return self._plan.form.long

    def shard(self, parts: Sequence[Part], before: int) -> Dump:
        """Return files or row groups, after `before` rows of other files, as a dump, maybe without tokens."""
        first = before + sum(parts[0].group_rows[: parts[0].groups.start]) + (parts[0].between or (0,))[0]
        return replace(
            self,
            info=replace(self.info, rows=sum(part.rows for part in parts)),
            parts=list(parts),
            batch_tokens=int(ROOM * self.batch_tokens),
            skipped=Skipped(),
            _signs=None,
            _ends=None,
            _kept=0,
            _shard=True,
            _waits=first > 0,
            _late=first >= (TOKENS if self.long else ROWS),
            _before=before,
        )

    def only(self, roles: Collection[str]) -> Dump:
        """Return the dump with some columns only, by canonical name; batches lack positions, turns and keys.

        Returns the dump itself where bad rows are skipped or rows are tokens, since both need all columns.
        """
        if self._skip or self.long:
            return self
        plan = self._plan.only({ROLLOUT, MASK, *roles})
        return replace(self, _plan=plan, skipped=Skipped(), _signs=None, _cursor=Cursor())

    def unmasked(self) -> Dump | None:
        """Return the dump with masked tokens counted, or None where it has no mask or a row is a token."""
        if self.long or MASK not in self._plan.columns:
            return None
        columns = {role: at for role, at in self._plan.columns.items() if role != MASK}
        plan = replace(self._plan, columns=columns, unmasked=True)
        return replace(self, _plan=plan, skipped=Skipped(), _signs=None, _cursor=Cursor())

    @property
    def rows(self) -> int:
        """Rows of the files, bad ones included: a sequence each, or a token each in the long form."""
        return sum(part.rows for part in self.parts)

    @property
    def tokens(self) -> float:
        """Approximate number of tokens, masked ones included; see `group_tokens`."""
        return sum(self.group_tokens)

    @property
    def group_tokens(self) -> list[float]:
        """Approximate number of tokens in each row group that is read, masked ones included.

        Estimated from uncompressed bytes, at the bytes per token of the first row group; from rows in the
        long form and where footers give no bytes.
        """
        groups = [(part, at) for part in self.parts for at in part.groups]
        stated = all(part.group_bytes[at] > 0 for part, at in groups if part.group_rows[at])
        by_bytes = stated and not self.long
        sizes = [
            float(part.group_bytes[at] if by_bytes and part.group_rows[at] else part.group_rows[at])
            for part, at in groups
        ]
        filled = next((i for i, size in enumerate(sizes) if size), None)
        if filled is not None and not self._rate:
            part, at = groups[filled]
            name = self._plan.columns[ROLLOUT]
            tokens = part.group_rows[at] if self.long else parquet.values_in(part, at, name)
            self._rate = max(tokens, 1) / sizes[filled]
        return [
            self._rate * size * (part.rows / part.group_rows[at] if part.between else 1.0)
            for size, (part, at) in zip(sizes, groups, strict=True)
        ]

    def largest(self, name: str, most: int) -> tuple[frozenset[str], int] | None:
        """Return the labels that most rows have, and the number of all others; it reads that column alone.

        Of labels with equally many rows the first ones in order are taken. None where there are no more than
        `most`, or where they are not counted: without such a column, in the long form, beyond `MOST_COUNTED`.
        """
        column, counts = self._plan.columns.get(name, name), Counter[str]()
        for part in self.parts:
            if self.long or column not in part.schema.names or len(counts) > MOST_COUNTED:
                return None
            if column in part.partitions:
                value = part.partitions[column].as_py()
                counts[label(value)] += part.rows
                continue
            for _, table in _of_few_bytes(parquet.tables(part, [column], self.batch_tokens), [column]):
                try:
                    for one in pc.value_counts(plain(table.column(0))).to_pylist():
                        counts[label(one["values"])] += one["counts"]
                except UnicodeDecodeError:  # an error, with its place, when all columns are read
                    return None
        if len(counts) <= most:
            return None
        kept = nsmallest(most, counts, key=lambda one: (-counts[one], one))
        return frozenset(kept), len(counts) - most

    @property
    def signs(self) -> dict[str, Count]:
        """Counts of signs from the latest pass, by the dump's column names."""
        return {self._plan.columns[role]: count for role, count in self.findings().signs.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings from opening and from the latest pass; complete when the pass has ended."""
        column, signs = self._plan.columns[ROLLOUT], remarks(self.signs)
        padded = pa.types.is_fixed_size_list(self.parts[0].schema.field(column).type)
        if MASK in self._plan.columns or not padded:
            return *self.remarks, *signs
        text = f"{column!r} is padded to one length and there is no {MASK}: padding, if any, counts as tokens"
        return *self.remarks, text, *signs

    def batches(self, progress: Progress | None = None) -> Iterator[Batch]:
        """Yield the sequences as CPU float64 batches, in the order of the files; can be called repeatedly.

        A batch has at most about `batch_tokens` tokens, or one sequence. `progress` is called with the number
        of rows just read, bad ones included; they add up to `rows`.

        Raises:
            DumpError: a bad row (unless skipped), corrupt data, a column of the wrong sign, or no token, as
                every row is skipped or every token masked.
        """
        # Makes malloc reuse memory between batches; the block is never touched, so it costs no memory.
        np.empty(RECYCLED, np.uint8)
        self.skipped, self._signs, self._kept = Skipped(), Signs(self._plan, waits=self._waits), 0
        self._ends = Ends(self._plan)
        packed = self._packed(self._signs, self._ends, progress or (lambda _: None))
        for batch in join(packed, self.batch_tokens):
            self._kept += batch.tokens
            if self._kept or self._shard:
                yield batch
            del batch  # frees it before the next one is read
        if not self._shard:
            self._ends.judge(_named(self.parts), self.info.rows)
            if not self._kept:
                raise self._nothing()

    def findings(self) -> Findings:
        """Return the findings of the latest pass; complete when the pass has ended."""
        signs = self._signs.counts if self._signs else {}
        rows = self._ends.rows if self._ends else []
        return Findings(self.info.rows, self._kept, self.skipped, signs, rows)

    def merge_findings(self, shards: Iterable[Findings]) -> None:
        """Merge the findings of all shards, in order, as if the dump had been read in one pass."""
        self.skipped, self._signs, self._kept, rows = Skipped(), Signs(self._plan), 0, 0
        self._ends = Ends(self._plan)
        for one in shards:
            rows += one.rows
            self._kept += one.tokens
            self.skipped.merge(one.skipped)
            self._signs.merge(one.signs)
            self._ends.merge(one.ends)
        self.info = replace(self.info, rows=rows)
        self._ends.judge(_named(self.parts), rows)
        if not self._kept:
            raise self._nothing()

    def _packed(self, signs: Signs, ends: Ends, progress: Progress) -> Iterator[Batch]:
        sequences = 0

        def packed(piece: Slice) -> Batch | None:
            nonlocal sequences
            sequences += len(piece.rows)
            good, rows = good_rows(piece, self._plan, self.skipped if self._skip else None)
            signs.see(good, rows)
            if ends.wanted() and not self._late:
                ends.see(rows)
                if not (ends.wanted() or self._shard):
                    ends.judge(_named(self.parts), self.info.rows)
            progress(len(piece.rows))
            return pack(good, rows, self._plan) if len(good.rows) else None

        # No loop: its variable would keep a batch, or its rows, while the next one is read.
        yield from filter(None, map(packed, self._slices()))
        self.info = replace(self.info, rows=sequences)

    def _slices(self) -> Iterator[Slice]:
        """Yield the rows in slices of at most `batch_tokens` tokens, or of one row."""
        before = self._before
        for part in self.parts:
            tables = self._tables(part, before)
            yield from _filled(tables, self._plan.columns[ROLLOUT], self.batch_tokens)
            before += sum(part.group_rows)

    def _tables(self, part: Part, before: int) -> Iterator[Slice]:
        """Yield the rows of a part, with hive partitions and labels as plain values."""
        names = [name for name in self._plan.names if name not in part.partitions]
        reader = self._cursor.rows if part.between else parquet.tables
        found = reader(part, names, self.batch_tokens // TABLES)
        at, done = -1, 0
        for group, table in _of_few_bytes(found, self._plan.labels):
            if group != at:
                at, done = group, sum(part.group_rows[:group]) + (part.between or (0,))[0]
            rows, done = np.arange(done, done + table.num_rows), done + table.num_rows
            for key, value in part.partitions.items():
                table = table.append_column(key, pa.repeat(value, table.num_rows))
            for name in self._plan.labels:
                index = table.schema.get_field_index(name)
                table = table.set_column(index, name, plain(table.column(index)))
            if table.num_rows:
                yield Slice(part.path, group, rows, before, table)

    def _nothing(self) -> DumpError:
        name = _named(self.parts)
        if self.skipped.count == self.info.rows:
            return DumpError(
                f"{name}: every row was skipped, all {self.info.rows}; the first: {self.skipped.examples[0]}",
                "mend what is wrong with the first, then read again",
            )
        mask = self._plan.columns.get(MASK)
        hint = f"column {mask!r} excludes every token; 1 is a token that counts, 0 one that does not"
        hint = hint if mask else "every list is empty; check the writer"
        return DumpError(f"{name}: no token is left in {self.info.rows} rows", hint)


def open_dump(
    sources: Sequence[str | File],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    batch_tokens: int = 1_000_000,
) -> Dump:
    """Open a dump and check its files, columns and types; values are read by `Dump.batches`.

    Args:
        sources: Parquet files, directories (searched recursively for *.parquet) and globs.
        columns: role → column, for columns not found by name: `{"rollout": "my_logps"}`. A role is one of
            rollout, old, current, mask, or a canonical column name; column `none` is none.
        group_by: further columns with one value per row to put into `Batch.scalars`.
        on_bad_row: whether to raise at a bad row, or to skip and count it.
        batch_tokens: tokens per batch, masked ones included.

    Raises:
        DumpError: a source that cannot be found or read, a column that is missing, ambiguous or of the wrong
            type, files that differ, no row at all, or no mask where one must be (`masks`).
    """
    parts = describe(find(sources))
    filled = [part for part in parts if part.rows]
    if not filled:
        hint = "check that its writer was closed"
        raise DumpError(f"{_named(parts)}: the dump is empty: it has no row", hint)
    plan = agree(filled, columns or {}, group_by)
    rows, name = sum(part.rows for part in parts), plan.columns[ROLLOUT]
    if not plan.form.long and rows > MOST_SHORT:  # run-length encoding makes empty rows cost nothing
        values = sum(parquet.values_in(part, group, name) for part in filled for group in part.groups)
        if values < 2 * rows:
            raise DumpError(
                f"{_named(filled)}: {rows:,} rows have at most {values:,} tokens in column {name!r}: more "
                f"than {MOST_SHORT:,} rows of fewer than two tokens on average",
                "leave out rows without a token; or analyze parts of the dump with --tally, and merge them",
            )
    require_mask(filled, plan, columns or {})
    info = DumpInfo(
        files=tuple(str(part.path) for part in parts),
        rows=rows,
        row_groups=sum(len(part.group_rows) for part in parts),
        bytes=sum(part.bytes for part in parts),
        columns=dict(plan.columns),
        provenance=merged(part.provenance for part in parts),
        others=tuple(name for name in plan.names if name not in plan.columns.values()),
        ignored=ignored(filled, plan),
    )
    return Dump(info, filled, plan, on_bad_row == "skip", max(1, batch_tokens))


def _named(parts: Sequence[Part]) -> str:
    rest = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return ", ".join(str(part.path) for part in parts[:3]) + rest


# ---------------------------------------------------------------- the size of batches


def _of_few_bytes(
    found: Iterator[tuple[int, pa.RecordBatch]], labels: Collection[str]
) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Cut tables where the texts of dictionaries, which many rows may share, would take too many bytes."""
    for group, table in found:
        width = 1
        for at, name in enumerate(table.schema.names):
            column = table.column(at)
            if name in labels and pa.types.is_dictionary(column.type):
                words = plain(column.dictionary)
                table = table.set_column(at, name, pa.DictionaryArray.from_arrays(column.indices, words))
                width += (pc.max(pc.binary_length(words)).as_py() or 0) if is_text(words.type) else 0
        rows = max(1, parquet.TEXT_AT_ONCE // width)
        for first in range(0, table.num_rows, rows):
            yield group, table.slice(first, rows)


def _filled(found: Iterator[Slice], name: str, most: int) -> Iterator[Slice]:
    """Regroup rows into slices of at most `most` tokens, by the lists in column `name`, or of one row.

    Slices may span several input tables, but only one row group.
    """
    held: list[Slice] = []
    tokens = rows = 0
    try:
        for piece in found:
            offsets = starts(pc.list_value_length(piece.table.column(name)).fill_null(0).to_numpy())
            for begin, end in cuts(offsets, most):
                size, many = int(offsets[end] - offsets[begin]), end - begin
                full = tokens + size > most or rows + many > MOST_ROWS
                if held and (full or held[0].row_group != piece.row_group):
                    yield _concatenated(held)
                    tokens = rows = 0
                held.append(piece.between(begin, end))
                tokens, rows = tokens + size, rows + many
            del piece
    except DumpError:
        if held:
            yield _concatenated(held)  # rows read before the error come first: errors in them take precedence
        raise
    if held:
        yield _concatenated(held)


def _concatenated(held: list[Slice]) -> Slice:
    """Concatenate slices of one row group, and empty the list, so that they can be freed."""
    first, rows = held[0], np.concatenate([one.rows for one in held])
    tables = [one.table for one in held]
    held.clear()
    table = pa.Table.from_batches(tables).combine_chunks().to_batches()[0] if len(tables) > 1 else first.table
    return replace(first, rows=rows, table=table)


def join(batches: Iterable[Batch], most: int) -> Iterator[Batch]:
    """Join batches, in order, up to `most` tokens and `MOST_ROWS` rows; a larger batch stays on its own.

    Many small row groups are then as fast to analyse as a few large ones.
    """
    held: list[Batch] = []
    size = rows = 0
    for batch in batches:
        if (size and size + batch.tokens > most) or (rows and rows + batch.sequences > MOST_ROWS):
            yield _joined(held)
            size = rows = 0
        size, rows = size + batch.tokens, rows + batch.sequences
        held.append(batch)
        del batch
        if size >= FULL * most:
            yield _joined(held)
            size = rows = 0
    if held:
        yield _joined(held)


def _joined(held: list[Batch]) -> Batch:
    """Concatenate batches, and empty the list, so that they can be freed."""
    found = joined(held)
    held.clear()
    return found
