"""Open a dump, and read its sequences as batches: `open_dump(sources).batches()`."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag.dump import schema
from offpol_diag.dump.batch import Batch, joined
from offpol_diag.dump.check import NEGATE, Seen, good_rows
from offpol_diag.dump.long import Placed, gathered
from offpol_diag.dump.pack import Rows, dense, pack
from offpol_diag.dump.sources import Location, find
from offpol_diag.dump.writer import KEY
from offpol_diag.errors import DumpError
from offpol_diag.printable import cleaned

Progress = Callable[[int, int], None]
"""Called with (rows done, rows in all)."""
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises on damaged files: OSError from codecs, ValueError from text."""
BUFFER = 1 << 20
"""Bytes of a column per read of a local file; remote row groups are fetched with all columns at once."""
BATCH = 1 << 17
"""Tokens per batch: a balance between its fixed cost, memory, and an even share for each thread."""
MOST_ROWS = 1 << 13
"""Most sequences per table, and per batch: what is computed of each takes memory however short it is."""
RECYCLED = (32 << 20) - (64 << 10)
"""Bytes just below glibc's largest mmap threshold: having freed such a block, malloc keeps smaller ones."""
MOST_SMALL, SMALL, FEW = 16, 64, 256
"""Most columns without a role that are read, mean bytes of their texts, and tokens looked at for that."""


class RowGroup(NamedTuple):
    """A row group: its number, its first row, rows, uncompressed bytes, log-probs of the rollout."""

    at: int
    first: int
    rows: int
    size: int
    tokens: int


@dataclass(frozen=True)
class File:
    """A file of a dump: what its footer says.

    Attributes:
        schema: its columns, hive partitions included.
        partitions: hive partition column → value.
        columns: canonical name → its column; empty where it has no row.
        provenance: how the numbers were made, from the file's metadata.
        groups: its row groups.
    """

    path: Location
    schema: pa.Schema
    partitions: dict[str, pa.Scalar]
    columns: dict[str, str]
    provenance: dict[str, object]
    groups: tuple[RowGroup, ...]

    @classmethod
    def of(cls, path: Location, given: Mapping[str, str]) -> File:
        """Read a footer, and find the columns that an analysis needs; of partitions, counts are numbers.

        Raises:
            DumpError: it cannot be read, or a column is missing, ambiguous or of the wrong type.
        """
        partitions = dict[str, pa.Scalar]()
        try:
            with opened(path) as file:
                columns, footer = file.schema_arrow, file.metadata
            for key, text in path.partitions.items():
                if key not in columns.names:
                    count = any(key in schema.COLUMNS[one].every_name(long=False) for one in schema.COUNTS)
                    partitions[key] = pa.scalar(text, pa.string()).cast(pa.int64() if count else pa.string())
                    columns = columns.append(pa.field(key, partitions[key].type))
            text = (footer.metadata or {}).get(KEY, b"{}")
            provenance = json.loads(text, parse_constant=lambda name: None)  # for NaN: a result holds none
            groups = [footer.row_group(at) for at in range(footer.num_row_groups) if footer.num_rows]
            leaves = [footer.schema.column(at).path for at in range(footer.num_columns)]
        except READ_ERRORS as error:
            hint = "check that it may be read, or dump it again; docs/dumps.md has the forms"
            raise DumpError(f"{path}: cannot be read as Parquet ({first_line(error)})", hint) from error
        found = schema.resolve(columns, given, str(path)) if groups else {}
        rollout = f"{found.get(schema.ROLLOUT)}."
        leaf = next((at for at, name in enumerate(leaves) if f"{name}.".startswith(rollout)), 0)
        described, first = list[RowGroup](), 0
        for at, group in enumerate(groups):
            tokens = max(group.column(leaf).num_values, group.num_rows, 1)
            described.append(RowGroup(at, first, group.num_rows, group.total_byte_size, tokens))
            first += group.num_rows
        provenance = provenance if isinstance(provenance, dict) else {}
        return cls(path, columns, partitions, found, provenance, tuple(described))


def tables(file: File, groups: Iterable[RowGroup], names: Sequence[str], most: int) -> Iterator[Placed]:
    """Yield the rows of row groups of a file in order, in tables of even size and about `most` tokens.

    Raises:
        DumpError: the file cannot be read, in Arrow's words.
    """
    where, row = str(file.path), 0
    try:
        parquet = opened(file.path)
        stored = [name for name in names if name not in file.partitions]
        for group in groups:
            where, row = f"{file.path}, row group {group.at}", group.first
            size = max(-(-group.rows * most // group.tokens), 1)
            for table in parquet.iter_batches(size, [group.at], stored):
                for key, value in file.partitions.items():
                    table = table.append_column(key, pa.repeat(value, table.num_rows))
                yield where, np.arange(row, row + table.num_rows), table
                row += table.num_rows
                del table  # frees it before the next one is read
    except READ_ERRORS as error:
        hint = "the file is damaged, or memory is short: copy it again, or dump it in smaller row groups"
        what = f"{where}, from row {row} on: the data cannot be read ({first_line(error)})"
        raise DumpError(what, hint) from error


def opened(path: Location) -> pq.ParquetFile:
    """Open a file; page checksums are verified where the writer stored them."""
    away = path.store is not None
    return pq.ParquetFile(
        path.open(), pre_buffer=away, buffer_size=0 if away else BUFFER, page_checksum_verification=True
    )


def first_line(error: BaseException) -> str:
    """Return the first line of an error message without secrets, or the name of the error's type."""
    return cleaned((str(error).splitlines() or [type(error).__name__])[0])


def named(files: Sequence[object]) -> str:
    """Return the names of the first files, and how many more there are."""
    return f"{', '.join(map(str, files[:3]))}{f' and {len(files) - 3} more' if len(files) > 3 else ''}"


# ---------------------------------------------------------------- the dump


@dataclass
class Dump:
    """A dump with validated files, columns and types; its values are checked as they are read.

    Attributes:
        files: their names, as reports show them.
        columns: canonical name → the column it is read from.
        others: further columns, read by their own names: for breakdowns, and for the diagnosis.
        ignored: columns that nobody reads.
        provenance: how the numbers were made; where files disagree, the list of their values.
        groups: the row groups that are read, with their files.
        skip: whether bad rows are left out.
        batch_tokens: tokens per batch, masked ones included.
        long: whether a row is a token.
        given: files, folders, globs and URLs as they were given.
        notes: remarks for the report on how its files were made.
        seen: what the latest pass has seen; complete when the pass has ended.
        folder: what keeps its temporary file alive, or None.
        before: of a part of a dump, the number of rows that precede it; None of a whole one.
    """

    files: tuple[str, ...]
    columns: dict[str, str]
    others: tuple[str, ...]
    ignored: tuple[str, ...]
    provenance: dict[str, object]
    groups: list[tuple[File, RowGroup]]
    skip: bool
    batch_tokens: int
    long: bool
    given: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    seen: Seen = field(default_factory=Seen)
    folder: object = field(default=None, compare=False, repr=False)
    before: int | None = None

    @property
    def names(self) -> list[str]:
        """All columns to read, the rollout's log-probs first."""
        return list(dict.fromkeys((*self.columns.values(), *self.others)))

    @property
    def rows(self) -> int:
        """Rows of the files, bad ones included; tokens where a row is one."""
        return sum(group.rows for _, group in self.groups)

    @property
    def tokens(self) -> int:
        """Number of tokens, masked ones and one of each empty sequence included."""
        return sum(group.tokens for _, group in self.groups)

    def shards(self, size: int) -> list[Dump]:
        """Divide the dump between row groups into dumps of about `size` uncompressed bytes.

        This depends on the dump alone. Shards can be read in another process and working directory. A dump of
        a row per token is one shard.
        """
        found, pending, before = list[Dump](), list[tuple[File, RowGroup]](), 0
        for pair in self.groups:
            pending.append(pair)
            if pair is self.groups[-1] or (sum(x.size for _, x in pending) >= size and not self.long):
                found.append(replace(self, groups=pending, seen=Seen(), folder=None, before=before))
                pending, before = [], before + sum(x.rows for _, x in pending)
        return found

    def batches(self, progress: Progress | None = None) -> Iterator[Batch]:
        """Yield the sequences as CPU float64 batches, in the order of the files; can be called repeatedly.

        A batch has at most about `batch_tokens` tokens, or one sequence. Bad rows count as done, too.

        Raises:
            DumpError: a bad row (unless skipped), corrupt data, a column of the wrong sign, or no token, as
                every row is skipped or every token masked.
        """
        np.empty(RECYCLED, np.uint8)  # makes malloc reuse memory between batches; it is never touched
        pa.set_memory_pool(pa.system_memory_pool())  # and Arrow use what NumPy has freed
        self.seen, pending, tokens, sequences, done = Seen(), list[Batch](), 0, 0, 0
        for rows in self.read(self.names, self.batch_tokens):
            self.seen.rows += len(rows.row)
            done += int(rows.rollout.offsets[-1]) if self.long else len(rows.row)
            if progress:
                progress(done, self.rows)
            rows = good_rows(rows, self.seen if self.skip else None)
            if not len(rows.row):
                continue
            self.seen.count(rows)
            batch = pack(rows)
            del rows  # frees the table before the next one is read
            tokens, sequences = tokens + batch.tokens, sequences + batch.sequences
            if pending and (tokens > self.batch_tokens or sequences > MOST_ROWS):
                yield joined(pending)
                pending, tokens, sequences = [], batch.tokens, batch.sequences
            pending.append(batch)
            del batch
            if tokens > self.batch_tokens / 2:
                yield joined(pending)
                pending, tokens, sequences = [], 0, 0
        if pending:
            yield joined(pending)
        if self.before is None:
            self.judge()

    def judge(self) -> None:
        """Refuse the dump for what a whole pass has seen: a wrong sign, no token."""
        for name, many in self.seen.above.items():
            if 2 * many > self.seen.tokens:
                what = f"column {name!r}: {many} of {self.seen.tokens} tokens are above 0"
                raise DumpError(f"{named(self.files)}, {what}: it has the wrong sign", NEGATE)
        if not self.seen.tokens:
            what = f"{named(self.files)}: no token is left in {self.seen.rows} rows"
            if self.seen.skipped:
                what += f"; {self.seen.skipped} are bad, the first: {self.seen.examples[0]}"
            raise DumpError(what, "see what its writer puts into lists, and into the mask, where 1 counts")

    def read(self, names: Sequence[str] | None, most: int) -> Iterator[Rows]:
        """Yield the rows with some columns (None: all), at most `most` tokens or one row at once."""
        rollout, number, ids = self.columns[schema.ROLLOUT], self.before or 0, set[object]()
        for file, pairs in groupby(self.groups, itemgetter(0)):
            there = [name for name in names or file.schema.names if name in file.schema.names]
            placed = tables(file, (group for _, group in pairs), there, most)
            placed = gathered(placed, self.columns, str(file.path), ids) if self.long else placed
            for where, row, table in placed:
                lengths = pc.list_value_length(table.column(rollout)).fill_null(0).to_numpy()
                offsets, begin = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64))), 0
                while begin < table.num_rows:
                    fit = int(np.searchsorted(offsets, offsets[begin] + most, side="right")) - 1
                    end = min(max(fit, begin + 1), begin + MOST_ROWS)
                    cut, numbers = table.slice(begin, end - begin), number + np.arange(begin, end)
                    yield Rows(cut, self.columns, self.others, numbers, where, row[begin:end])
                    begin = end
                number += table.num_rows
                del table


# ---------------------------------------------------------------- opening


def open_dump(
    sources: Sequence[str | Location],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    batch_tokens: int = BATCH,
) -> Dump:
    """Open a dump of Parquet files and check their columns and types; `convert.open_dump` reads any form.

    Args:
        sources: Parquet files, directories (searched recursively for *.parquet), globs and URLs.
        columns: role → column, for columns not found by name (`{"rollout": "my_logps"}`; `none` is none).
        group_by: further columns with one value per row to put into `Batch.scalars`.
        on_bad_row: whether to raise at a bad row, or to skip and count it.
        batch_tokens: tokens per batch, masked ones included.

    Raises:
        DumpError: a source that cannot be found or read, a column that is missing, ambiguous or of the wrong
            type, files that differ, or no row at all.
    """
    given = columns or {}
    files = [one for one in sources if isinstance(one, Location)] or find([str(one) for one in sources])
    read = [File.of(path, given) for path in files]
    filled = [one for one in read if one.groups]
    if not filled:
        raise DumpError(f"{named(files)}: the dump is empty: it has no row", "was its writer closed?")
    first = filled[0]
    found, long = dict(first.columns), schema.is_long(first.schema, given)
    known = {name for name in schema.LABELS if name in found}
    known |= {schema.LAG} if {schema.ROLLOUT_VERSION, schema.TRAIN_VERSION} <= known else set()
    extra = tuple(name for name in group_by if name not in known)
    for name in extra:
        schema.require_one(name, first.schema.names, f"{first.path}: --group-by")
    for one in filled[1:]:
        odd = {name for _, name in {*found.items()} ^ {*one.columns.items()}} | {*extra} - {*one.schema.names}
        if odd:
            what = f"{first.path} and {one.path} differ: column {min(odd)!r} is not in both"
            raise DumpError(what, "read files of one form at a time, or write them alike")
    if long:
        found.pop(schema.PROMPT_IDS, None)  # a list in the row of every token
    others = extra if long else (*extra, *_small_columns(filled, {*found.values(), *extra}))
    there = dict.fromkeys(name for one in filled for name in one.schema.names)
    provenance: dict[str, list[object]] = {}
    for key, value in (pair for one in read for pair in one.provenance.items()):
        provenance[key] = [*(one for one in provenance.get(key, ()) if one != value), value]
    return Dump(
        files=tuple(map(str, files)),
        columns=found,
        others=others,
        ignored=tuple(name for name in there if name not in {*found.values(), *others}),
        provenance={key: values[0] if len(values) == 1 else values for key, values in provenance.items()},
        groups=[(one, group) for one in filled for group in one.groups],
        skip=on_bad_row == "skip",
        batch_tokens=batch_tokens,
        long=long,
    )


def _small_columns(files: Sequence[File], used: Collection[str]) -> tuple[str, ...]:
    """Return small columns of text, integers or booleans without a role that all files have alike."""
    plain = (pt.is_string, pt.is_large_string, pt.is_integer, pt.is_boolean)
    found = [
        one.name
        for one in files[0].schema
        if one.name not in used
        and any(is_plain(schema.plain_type(one.type)) for is_plain in plain)
        and all([*x.schema].count(one) == x.schema.names.count(one.name) == 1 for x in files)
    ]
    with suppress(DumpError):  # which reading will find
        _, _, table = next(tables(files[0], files[0].groups, found, FEW))
        texts = {name: dense(table.column(name)).cast(pa.string()) for name in found}
        found = [name for name, x in texts.items() if (pc.mean(pc.binary_length(x)).as_py() or 0) <= SMALL]
    return tuple(found)[:MOST_SMALL]
