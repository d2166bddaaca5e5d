"""Open a dump, and read its sequences as batches: `open_dump(sources).batches()`."""

from __future__ import annotations

import json
import math
import platform
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from heapq import nsmallest
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag.dump import schema
from offpol_diag.dump.batch import Batch, joined, label
from offpol_diag.dump.check import Seen, Skipped, good_rows, judge, remark, signs
from offpol_diag.dump.long import Gathering
from offpol_diag.dump.pack import Ints, Plan, Rows, pack, plain, starts
from offpol_diag.dump.schema import (
    LABELS,
    LAG,
    MASK,
    PROMPT_IDS,
    RESCORED,
    ROLLOUT,
    ROLLOUT_VERSION,
    TRAIN_VERSION,
    is_list,
    is_long,
)
from offpol_diag.dump.sources import Location, find
from offpol_diag.dump.writer import KEY
from offpol_diag.errors import DumpError
from offpol_diag.printable import cleaned

Progress = Callable[[int], None]
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises on damaged files: OSError from codecs, ValueError from text."""
BUFFER, REMOTE_BUFFER = 1 << 20, 8 << 20
"""Bytes of a column per read; larger for remote files, where each read costs a round trip."""
FETCHED_WHOLE = 128 << 20
"""Remote row groups up to this many uncompressed bytes are fetched with all columns at once."""
FOOTERS_AT_ONCE = 16
TABLE = 1 << 18
"""Most tokens decoded at once, but for a longer sequence."""
MOST_ROWS = 1 << 15
"""Most sequences per table, and per batch: what is computed of each takes memory however short it is."""
FULL = 0.75
"""Share of the largest batch from which a batch does not wait for the next, with which it might be joined."""
RECYCLED = (32 << 20) - (64 << 10)
"""Bytes just below glibc's maximum mmap threshold; freeing such a block makes malloc reuse smaller ones."""
MOST_SHARDS = 4096
MOST_COUNTED = 1 << 21
"""Labels of a column beyond which they are not counted."""
MOST_DESCRIBED, SMALL, FEW = 16, 64, 256
"""Most columns without a role that are read, mean bytes of their texts, and rows looked at for that."""


# ---------------------------------------------------------------- files


@dataclass(frozen=True)
class Part:
    """A file of a dump, or some of its row groups: what its footer says.

    Attributes:
        schema: its columns, hive partitions included.
        partitions: hive partition column → value.
        rows_of, bytes_of: rows and uncompressed bytes of each row group.
        provenance: how the numbers were made, from the file's metadata.
        span: the row groups that are read.
        state: what changes when the file is replaced or rewritten, where it is on this disk.
    """

    path: Location
    schema: pa.Schema
    partitions: dict[str, pa.Scalar]
    rows_of: tuple[int, ...]
    bytes_of: tuple[int, ...]
    provenance: dict[str, object]
    span: range
    state: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows that are read."""
        return sum(self.rows_of[group] for group in self.span)

    def tokens_in(self, group: int) -> float:
        """Estimate the tokens in a row group by its bytes before compression, masked ones included."""
        lists = [one.type.value_type for one in self.schema if is_list(one.type)]
        wide = (one.bit_width / 8 for one in lists if pt.is_floating(one) or pt.is_integer(one))
        size = sum(width for width in wide if width > 1) or 1.0
        return max(self.bytes_of[group], self.rows_of[group], 1) / size

    def open(self) -> pq.ParquetFile:
        """Open the file again.

        Raises:
            DumpError: it cannot be opened, or is another one by now.
        """
        try:
            found = opened(self.path)
        except READ_ERRORS as error:
            raise unreadable(self.path, error) from error
        self.require_unchanged([found.metadata.row_group(i).num_rows for i in range(found.num_row_groups)])
        return found

    def require_unchanged(self, rows: Sequence[int] | None = None) -> None:
        """Refuse a file that is another one by now: rows of two files must not mix."""
        with suppress(OSError):  # a node of a cluster may hold a copy, whose times are its own
            state = state_of(self.path)
        if (
            (rows is not None and [*rows] != [*self.rows_of])
            or state[:1] != self.state[:1]
            or (state[1:] != self.state[1:] and state[-1:] == self.state[-1:])
        ):
            hint = "wait until its writer has ended, or read a copy; then read again"
            raise DumpError(f"{self.path}: the file was changed while it was read", hint)


def opened(path: Location) -> pq.ParquetFile:
    """Open a file; page checksums are verified where the writer stored them."""
    if not path.store:
        return pq.ParquetFile(path.open(), buffer_size=BUFFER, page_checksum_verification=True)
    stream = path.open()
    metadata = pq.read_metadata(stream)
    sizes = [metadata.row_group(group).total_byte_size for group in range(metadata.num_row_groups)]
    ahead = max(sizes, default=0) <= FETCHED_WHOLE
    return pq.ParquetFile(
        stream,
        metadata=metadata,
        buffer_size=REMOTE_BUFFER,
        pre_buffer=ahead,
        page_checksum_verification=True,
    )


def state_of(path: Location) -> tuple[int, ...]:
    """Return size, time and inode of a file on this disk, and this machine."""
    if path.store:
        return ()
    found = Path(path.path).stat()
    return found.st_size, found.st_mtime_ns, found.st_ino, hash(platform.node())


def described(files: Sequence[Location]) -> list[Part]:
    """Read the footers of all files."""
    pairs = [(key, text) for file in files for key, text in file.partitions.items()]
    words = {key for key, text in pairs if text is not None and not _whole(text)}
    numeric = {key for key, _ in pairs} - words
    with ThreadPoolExecutor(FOOTERS_AT_ONCE if any(one.store for one in files) else 1) as pool:
        return list(pool.map(lambda file: _footer(file, numeric), files))


def _whole(text: str) -> bool:
    return text.removeprefix("-").isdecimal() and -(2**63) <= int(text) < 2**63


def _footer(path: Location, numeric: Collection[str]) -> Part:
    try:
        with opened(path) as file:
            found, metadata = file.schema_arrow, file.metadata
            groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
            rows, sizes = (
                tuple(getattr(one, name) for one in groups) for name in ("num_rows", "total_byte_size")
            )
            partitions = {}
            for key, text in path.partitions.items():
                if key not in found.names:
                    kind = pa.int64() if key in numeric else pa.string()
                    partitions[key] = pa.scalar(
                        int(text) if text is not None and key in numeric else text, kind
                    )
                    found = found.append(pa.field(key, kind))
            said = _provenance((metadata.metadata or {}).get(KEY, b"{}"))
            return Part(path, found, partitions, rows, sizes, said, range(len(groups)), state_of(path))
    except READ_ERRORS as error:
        raise unreadable(path, error) from error


def _provenance(text: bytes) -> dict[str, object]:
    """Parse the metadata; empty if another tool has rewritten them."""

    def finite(digits: str) -> float | None:
        return number if math.isfinite(number := float(digits)) else None

    try:
        found = json.loads(text, parse_constant=finite, parse_float=finite)
        found = json.loads(json.dumps(found, ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def merged(provenances: Iterable[dict[str, object]]) -> dict[str, object]:
    """Merge the provenance of files: one value where they agree, else the list of distinct values."""
    seen: dict[str, list[object]] = {}
    for key, value in (pair for one in provenances for pair in one.items()):
        values = seen.setdefault(key, [])
        if value not in values:
            values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in seen.items()}


def unreadable(path: Location, error: Exception) -> DumpError:
    """Explain why a file cannot be opened, from its first and last bytes."""
    if isinstance(error, UnicodeEncodeError):
        return DumpError(f"{path}: the path is not UTF-8", "rename the file and its directories")
    if isinstance(error, MemoryError):  # Arrow's is one
        return DumpError(
            f"{path}: there is not enough memory to read its footer ({said(error)})", "leave more memory free"
        )
    try:
        with path.open() as stream:
            head = stream.read(4)
            stream.seek(max(stream.seek(0, 2) - 4, 0))
            tail = stream.read(4)
    except (OSError, pa.ArrowException) as failure:
        return DumpError(
            f"{path}: cannot be opened ({said(failure)})", "check that it exists and may be read"
        )
    if not head:
        return DumpError(f"{path}: the file is empty (0 bytes)", "its writer did not finish; dump again")
    if head != b"PAR1":
        return DumpError(
            f"{path}: not a Parquet file", "see `offpol-diag convert --list` for what else is read"
        )
    if tail != b"PAR1":
        return DumpError(
            f"{path}: the file is truncated: its Parquet footer is missing", "copy it again, or dump again"
        )
    return DumpError(f"{path}: the Parquet footer is corrupt ({said(error)})", "copy or dump the file again")


def said(error: BaseException) -> str:
    """Return the first line of an error message without secrets, or the name of the error's type."""
    return cleaned((str(error).splitlines() or [type(error).__name__])[0])


def tables(part: Part, names: Sequence[str], most: int) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Yield the rows of a part in order: row group, number of the first row in the file, table.

    A table has about `most` values of the first column.
    """
    stored = [name for name in names if name not in part.partitions]
    flat = not is_list(part.schema.field(stored[0]).type)
    with part.open() as parquet:
        for group in part.span:
            done, rows = 0, part.rows_of[group]
            first = sum(part.rows_of[:group])
            size = most if flat else min(int(most * rows / part.tokens_in(group)), MOST_ROWS)
            try:
                for table in parquet.iter_batches(max(size, 1), [group], stored):
                    for key, value in part.partitions.items():
                        table = table.append_column(key, pa.repeat(value, table.num_rows))
                    part.require_unchanged()
                    yield group, first + done, table
                    done += table.num_rows
                    del table
                if done != rows:
                    raise EOFError("not the rows its footer had")
            except (*READ_ERRORS, EOFError) as error:
                raise _corrupt(part, group, first + done, stored, error) from error


def _corrupt(part: Part, group: int, row: int, names: Sequence[str], error: Exception) -> DumpError:
    """Return the error of a row group that cannot be read."""
    where = f"{part.path}, row group {group}, from row {row} on"
    if isinstance(error, MemoryError):
        hint = "leave more memory free, say --threads 1, or write smaller row groups"
        return DumpError(f"{where}: there is not enough memory to read it ({said(error)})", hint)
    culprits = ", ".join(repr(name) for name in names if not _reads(part, group, name)) or "unknown"
    hint = "the file is damaged: copy it again and compare sizes; if the error stays, dump again"
    return DumpError(f"{where}, column {culprits}: the data cannot be read ({said(error)})", hint)


def _reads(part: Part, group: int, name: str) -> bool:
    """Return whether a column of a row group can be read."""
    try:
        with opened(part.path) as parquet:
            for _ in parquet.iter_batches(1024, row_groups=[group], columns=[name]):
                pass
    except READ_ERRORS:
        return False
    return True


# ---------------------------------------------------------------- the dump


@dataclass(frozen=True)
class DumpInfo:
    """Facts about a dump, for the report.

    Attributes:
        columns: canonical name → the column it is read from.
        others: columns that are read by their own names, for groups of sequences.
        ignored: columns that nobody reads.
        provenance: how the numbers were made; where files disagree, the list of their values.
        prompts: column of prompt ids, which `rescore` needs; empty: none.
        given: files, folders, globs and URLs as they were given.
    """

    files: tuple[str, ...]
    columns: dict[str, str]
    provenance: dict[str, object]
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prompts: str = ""
    given: tuple[str, ...] = ()


@dataclass
class Dump:
    """A dump with validated files, columns and types; its values are checked as they are read.

    Attributes:
        parts: its files that have rows.
        plan: what is read of each row.
        skip: whether bad rows are left out.
        batch_tokens: tokens per batch, masked ones included.
        remarks: what is to be said about how its files were made.
        long: whether a row is a token.
        seen: what the latest pass has seen; complete when the pass has ended.
        folder: what keeps its temporary file alive, or None.
    """

    info: DumpInfo
    parts: list[Part]
    plan: Plan
    skip: bool
    batch_tokens: int
    remarks: tuple[str, ...] = ()
    long: bool = False
    seen: Seen = field(default_factory=Seen)
    folder: object = field(default=None, compare=False, repr=False)
    shard: bool = False
    before: int = 0

    @property
    def rows(self) -> int:
        """Rows of the files, bad ones included; tokens where a row is one."""
        return sum(part.rows for part in self.parts)

    @property
    def tokens(self) -> float:
        """Approximate number of tokens, masked ones included."""
        return (
            float(self.rows)
            if self.long
            else sum(part.tokens_in(group) for part in self.parts for group in part.span)
        )

    def only(self, roles: Collection[str]) -> Dump:
        """Return the dump with some columns only, by canonical name; batches lack positions, turns and keys.

        It is the dump itself where bad rows are skipped, which needs all columns, or a row is a token.
        """
        if self.skip or self.long:
            return self
        return replace(self, plan=self.plan.only([ROLLOUT, MASK, *roles]), seen=Seen())

    def shards(self, size: int) -> list[Dump]:
        """Divide the dump between row groups into dumps of about `size` uncompressed bytes.

        This depends on the dump alone. Shards can be read in another process and working directory. A dump of
        a row per token is one shard.
        """
        groups = [(part, group) for part in self.parts for group in part.span]
        whole = sum(part.bytes_of[group] for part, group in groups)
        size = max(size, whole // MOST_SHARDS)
        found, held, weight, first, before = list[Dump](), list[Part](), 0, 0, 0
        for part, group in groups:
            path = (
                part.path
                if part.path.store
                else replace(part.path, path=str(Path(part.path.path).absolute()))
            )
            if held and held[-1].path == path and held[-1].span.stop == group:
                held[-1] = replace(held[-1], span=range(held[-1].span.start, group + 1))
            else:
                held.append(replace(part, path=path, span=range(group, group + 1)))
            weight, first = weight + part.bytes_of[group], first + part.rows_of[group]
            if (weight >= size and not self.long) or (part, group) == groups[-1]:
                found.append(replace(self, parts=held, seen=Seen(), folder=None, shard=True, before=before))
                held, weight, before = [], 0, first
        return found

    def largest(self, name: str, most: int) -> tuple[frozenset[str], int] | None:
        """Return the labels that most rows have, and the number of all others; it reads that column alone.

        Of labels with equally many rows the first ones in order are taken. None where there are no more than
        `most`, or where they are not counted.
        """
        column, counts = self.plan.columns.get(name, name), Counter[str]()
        if self.long:
            return None
        for part in self.parts:
            if column not in part.schema.names or len(counts) > MOST_COUNTED:
                return None
            if column in part.partitions:
                counts[label(part.partitions[column].as_py())] += part.rows
                continue
            with suppress(UnicodeDecodeError):  # an error, with its place, when all columns are read
                for _, _, table in tables(part, [column], self.batch_tokens):
                    for one in pc.value_counts(plain(table.column(0))).to_pylist():
                        counts[label(one["values"])] += one["counts"]
        if len(counts) <= most:
            return None
        return frozenset(nsmallest(most, counts, key=lambda one: (-counts[one], one))), len(counts) - most

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings from opening and from the latest pass; complete when the pass has ended."""
        found = ((self.plan.columns[role], one) for role, one in self.seen.signs.items() if one.positive)
        return *self.remarks, *(remark(column, one) for column, one in found)

    def batches(self, progress: Progress | None = None) -> Iterator[Batch]:
        """Yield the sequences as CPU float64 batches, in the order of the files; can be called repeatedly.

        A batch has at most about `batch_tokens` tokens, or one sequence. `progress` is called with the number
        of rows just read, bad ones included; they add up to `rows`.

        Raises:
            DumpError: a bad row (unless skipped), corrupt data, a column of the wrong sign, or no token, as
                every row is skipped or every token masked.
        """
        np.empty(RECYCLED, np.uint8)  # makes malloc reuse memory between batches; it is never touched
        self.seen = Seen()
        for batch in _joined_up(self._packed(progress or (lambda _: None)), self.batch_tokens):
            if self.seen.tokens or self.shard:
                yield batch
            del batch  # frees it before the next one is read
        if not self.shard:
            self.judge()

    def judge(self) -> None:
        """Refuse the dump for what a whole pass has seen: a wrong sign, no token."""
        for one in self.seen.signs.values():
            judge(one)
        if self.seen.tokens:
            return
        name, skipped = named([part.path for part in self.parts]), self.seen.skipped
        if skipped.count and skipped.count == self.seen.rows:
            what = f"{name}: every row was skipped, all {skipped.count}; the first: {skipped.examples[0]}"
            raise DumpError(what, "mend what is wrong with the first, then read again")
        mask = self.plan.columns.get(MASK)
        hint = f"column {mask!r} excludes every token; 1 is a token that counts, 0 one that does not"
        raise DumpError(
            f"{name}: no token is left in {self.seen.rows} rows",
            hint if mask else "every list is empty; check the writer",
        )

    def _packed(self, progress: Progress) -> Iterator[Batch]:
        # No loop: its variable would keep a batch, or its rows, while the next one is read.
        most = min(TABLE, self.batch_tokens)
        return filter(None, map(self._see, self.read(self.plan.names, most, progress)))

    def _see(self, rows: Rows) -> Batch | None:
        """Pack the good ones of some rows, and note what is seen of all of them."""
        many, skipped = rows.many, Skipped()
        rows = good_rows(rows, skipped if self.skip else None)
        self.seen.add(Seen(many, rows.kept if rows.many else 0, skipped, signs(rows) if rows.many else {}))
        return pack(rows) if rows.many else None

    def read(
        self, names: Sequence[str] | None, most: int, progress: Progress = lambda _: None
    ) -> Iterator[Rows]:
        """Yield the rows with some columns, at most `most` tokens or one row at once.

        Args:
            names: the columns, the rollout's log-probs first; None for all.
            most: tokens at once.
            progress: called with the number of rows of the files just read.
        """
        number, gathering = self.before, Gathering(self.plan.columns)
        for part in self.parts:
            own = [one for one in (part.schema.names if names is None else names) if one in part.schema.names]
            own.sort(key=lambda one: one != self.plan.columns[ROLLOUT])  # its values are counted
            for table, place in _placed(part, own, most, gathering if self.long else None, progress):
                yield from self._cut(table, number, place, most, None if self.long else progress)
                number += table.num_rows
                del table

    def _cut(
        self,
        table: pa.RecordBatch,
        number: int,
        place: tuple[str, Ints],
        most: int,
        progress: Progress | None,
    ) -> Iterator[Rows]:
        lengths = pc.list_value_length(table.column(self.plan.columns[ROLLOUT])).fill_null(0)
        for begin, end in _cuts(starts(lengths.to_numpy()), most):
            here = table.slice(begin, end - begin)
            yield Rows(here, self.plan, number + begin, partial(_place, place[0], place[1][begin:]))
            if progress:
                progress(end - begin)


def _placed(
    part: Part, names: Sequence[str], most: int, gathering: Gathering | None, progress: Progress
) -> Iterator[tuple[pa.RecordBatch, tuple[str, Ints]]]:
    """Yield tables of a row per sequence, and where its rows lie: file and row group, rows in the file."""
    if gathering is None:
        for group, first, table in tables(part, names, most):
            yield table, (f"{part.path}, row group {group}", first + np.arange(table.num_rows))
            del table
        return

    def counted() -> Iterator[pa.RecordBatch]:
        for _, _, table in tables(part, names, most):
            progress(table.num_rows)
            yield table

    for table, firsts in gathering.gathered(counted(), str(part.path)):
        yield table, (str(part.path), firsts)


def _place(where: str, rows: Ints, i: int) -> str:
    return f"{where}, row {rows[i]}"


def _cuts(offsets: Ints, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows, which start at `offsets`, with at most `tokens` tokens, or of one row."""
    begin, rows = 0, len(offsets) - 1
    while begin < rows:
        fit = int(np.searchsorted(offsets, offsets[begin] + tokens, side="right")) - 1
        end = min(max(fit, begin + 1), begin + MOST_ROWS)
        yield begin, end
        begin = end


def _joined_up(batches: Iterable[Batch], most: int) -> Iterator[Batch]:
    """Join batches, in order, up to `most` tokens and `MOST_ROWS` rows; a larger batch stays on its own."""

    def whole() -> Batch:
        found = joined(held)
        held.clear()  # so that they can be freed
        return found

    held: list[Batch] = []
    size = rows = 0
    for batch in batches:
        if (size and size + batch.tokens > most) or (rows and rows + batch.sequences > MOST_ROWS):
            yield whole()
            size = rows = 0
        size, rows = size + batch.tokens, rows + batch.sequences
        held.append(batch)
        del batch
        if size >= FULL * most:
            yield whole()
            size = rows = 0
    if held:
        yield whole()


# ---------------------------------------------------------------- opening


def open_dump(
    sources: Sequence[str | Location],
    *,
    columns: Mapping[str, str] | None = None,
    group_by: Sequence[str] = (),
    on_bad_row: Literal["error", "skip"] = "error",
    batch_tokens: int = 1_000_000,
) -> Dump:
    """Open a dump of Parquet files and check their columns and types; `convert.open_dump` reads any form.

    Args:
        sources: Parquet files, directories (searched recursively for *.parquet) and globs.
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
    parts = described(files)
    filled = [part for part in parts if part.rows]
    if not filled:
        raise DumpError(
            f"{named(files)}: the dump is empty: it has no row", "check that its writer was closed"
        )
    first = filled[0]
    found, long = schema.resolve(first.schema, given, str(first.path)), is_long(first.schema, given)
    known = {name for name in LABELS if name in found} | (
        {LAG} if {ROLLOUT_VERSION, TRAIN_VERSION} <= found.keys() else set()
    )
    extra = tuple(name for name in group_by if name not in known)
    for name in extra:
        schema.once(name, first.schema.names, f"{first.path}: --group-by")
        if pt.is_nested(schema.plain_type(kind := first.schema.field(name).type)):
            what = f"{first.path}: column {name!r} holds {kind}, and one value per row is needed"
            raise DumpError(what, "group by a column with one value per sequence")
    for part in filled[1:]:
        _same(first, part, found, extra, given)
    prompts = found.pop(PROMPT_IDS, "")
    prompts = prompts if all(prompts in part.schema.names for part in filled) else ""
    plan = Plan(found, extra, prompts="" if long else prompts)
    plan = replace(plan, described=() if long else _described(filled, plan))
    info = DumpInfo(
        files=tuple(str(part.path) for part in parts),
        columns=dict(found),
        provenance=merged(part.provenance for part in parts),
        others=(*extra, *plan.described),
        ignored=tuple(
            name
            for name in dict.fromkeys(name for part in filled for name in part.schema.names)
            if name not in {*plan.names, *RESCORED}
        ),
        prompts=plan.prompts,
    )
    return Dump(
        info, filled, plan, on_bad_row == "skip", max(1, batch_tokens), _cautions(first, plan, info), long
    )


def named(files: Sequence[object]) -> str:
    """Return the names of the first files, and how many more there are."""
    return f"{', '.join(map(str, files[:3]))}{f' and {len(files) - 3} more' if len(files) > 3 else ''}"


def _same(
    first: Part, part: Part, found: Mapping[str, str], extra: Sequence[str], given: Mapping[str, str]
) -> None:
    """Refuse a file whose columns differ from the first file's."""
    here = schema.resolve(part.schema, given, str(part.path))
    odd = [
        here.get(role) or found[role]
        for role in {**found, **here}
        if role != PROMPT_IDS and here.get(role) != found.get(role)
    ]
    odd += [name for name in extra if name not in part.schema.names]
    both = {*first.schema.names} & {*part.schema.names}
    for name in (name for name in (*found.values(), *extra) if name in both and name not in odd):
        kinds = [schema.plain_type(one.schema.field(name).type) for one in (first, part)]
        if not any(map(pt.is_null, kinds)) and schema.is_text(kinds[0]) != schema.is_text(kinds[1]):
            odd.append(name)
    if is_long(part.schema, given) != is_long(first.schema, given):
        odd = [found[ROLLOUT]]
    if odd:
        what = f"{first.path} and {part.path} differ: column {odd[0]!r} is not in both, or not of one kind"
        raise DumpError(what, "read files of one form at a time, or write them alike")


def _described(parts: Sequence[Part], plan: Plan) -> tuple[str, ...]:
    """Return columns of short text, integers or booleans without a role that all files have alike."""
    first, found = parts[0], list[str]()
    for one in first.schema:
        kinds = {
            str(part.schema.field(one.name).type) for part in parts if part.schema.names.count(one.name) == 1
        }
        kind = schema.plain_type(one.type)
        small = pt.is_integer(kind) or pt.is_boolean(kind) or pt.is_string(kind) or pt.is_large_string(kind)
        if (
            small
            and one.name not in plan.names
            and len(kinds) == 1
            and all(part.schema.names.count(one.name) == 1 for part in parts)
        ):
            found.append(one.name)
    texts = [
        name
        for name in found
        if name not in first.partitions and schema.is_text(first.schema.field(name).type)
    ]
    with suppress(DumpError):
        for name in texts:
            _, _, table = next(tables(first, [name], FEW))
            if (pc.mean(pc.binary_length(plain(table.column(0)))).as_py() or 0) > SMALL:
                found.remove(name)
    return tuple(found[:MOST_DESCRIBED])


def _cautions(first: Part, plan: Plan, info: DumpInfo) -> tuple[str, ...]:
    """Say what may be padding or a mask where no column is the mask."""
    if MASK in plan.columns:
        return ()
    column, found = plan.columns[ROLLOUT], list[str]()
    if pt.is_fixed_size_list(first.schema.field(column).type):
        found.append(
            f"{column!r} is padded to one length and there is no {MASK}: padding, if any, counts as tokens"
        )
    once = [name for name in info.ignored if first.schema.names.count(name) == 1]
    lists = [name for name in once if is_list(first.schema.field(name).type)]
    kinds = {name: str(first.schema.field(name).type.value_type) for name in lists}
    flags = [name for name in lists if kinds[name] in ("bool", "int8", "uint8") or "mask" in name.lower()]
    if flags:
        ways = " or ".join(f"--columns mask={name}" for name in flags[:3])
        found.append(
            f"there is no {MASK}, so every token counts; if a list that is not read is the mask, say {ways}"
        )
    return tuple(found)
