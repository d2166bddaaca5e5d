"""Open a dump, and read its sequences as batches: `open_dump(sources).batches()`."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pt

from offpol_diag.dump import schema
from offpol_diag.dump.batch import Batch, joined, label
from offpol_diag.dump.check import Seen, Skipped, good_rows, judge, remark, signs
from offpol_diag.dump.long import gathered
from offpol_diag.dump.pack import Ints, Plan, Rows, pack, plain, starts
from offpol_diag.dump.sources import Location, find
from offpol_diag.dump.writer import KEY
from offpol_diag.errors import DumpError
from offpol_diag.printable import cleaned

Progress = Callable[[int], None]
Placed = tuple[str, Ints, pa.RecordBatch]
"""File and row group of a table, the number of each row in the file, and the table."""
IGNORED: Progress = lambda rows: None  # noqa: E731
READ_ERRORS = (pa.ArrowException, OSError, ValueError)
"""What pyarrow raises on damaged files: OSError from codecs, ValueError from text."""
BUFFER = 1 << 20
"""Bytes of a column per read of a local file; remote row groups are fetched with all columns at once."""
BATCH = 1 << 18
"""Tokens per batch, and decoded at once, unless others are asked for, or a sequence is longer."""
FINITE: Any = dict.fromkeys(
    ("parse_constant", "parse_float"), lambda x: y if math.isfinite(y := float(x)) else None
)
"""How JSON is read of which a result is made: it holds no infinity, and 1e999 is one."""
MOST_ROWS = 1 << 13
"""Most sequences per table, and per batch: what is computed of each takes memory however short it is."""
RECYCLED = (32 << 20) - (64 << 10)
"""Bytes just below glibc's largest mmap threshold: having freed such a block, malloc keeps smaller ones."""
WHOLE = re.compile(r"-?\d{1,18}")
"""A value of a hive partition that is an integer."""
MOST_SHARDS = 4096
MOST_COUNTED = 1 << 21
"""Labels of a column beyond which they are not counted."""
MOST_DESCRIBED, SMALL, FEW = 16, 64, 256
"""Most columns without a role that are read, mean bytes of their texts, and rows looked at for that."""


# ---------------------------------------------------------------- files


class Group(NamedTuple):
    """A row group: its rows, uncompressed bytes, and log-probs of the rollout."""

    rows: int
    size: int
    tokens: int


@dataclass(frozen=True)
class Part:
    """A file of a dump, or some of its row groups: what its footer says.

    Attributes:
        schema: its columns, hive partitions included.
        partitions: hive partition column → value.
        columns: canonical name → its column; empty where it has no row.
        provenance: how the numbers were made, from the file's metadata.
        groups: all its row groups, of which those in `span` are read.
        state: size and time of the file; empty where another machine may hold a copy.
    """

    path: Location
    schema: pa.Schema
    partitions: dict[str, pa.Scalar]
    columns: dict[str, str]
    provenance: dict[str, object]
    groups: tuple[Group, ...]
    span: range
    state: tuple[int, ...]

    @classmethod
    def of(cls, path: Location, words: Collection[str], given: Mapping[str, str]) -> Part:
        """Read a footer, and find the columns that an analysis needs; partitions named in `words` are text.

        Raises:
            DumpError: it cannot be read, or a column is missing, ambiguous or of the wrong type.
        """
        try:
            with opened(path) as file:
                found, metadata, state = file.schema_arrow, file.metadata, path.state
            own = {}
            for key, text in path.partitions.items():
                if key not in found.names:
                    number = None if key in words or text is None else int(text)
                    own[key] = pa.scalar(text) if key in words else pa.scalar(number, pa.int64())
                    found = found.append(pa.field(key, own[key].type))
            said = json.loads((metadata.metadata or {}).get(KEY, b"{}"), **FINITE)
            groups = [metadata.row_group(at) for at in range(metadata.num_row_groups)]
            leaves = [f"{metadata.schema.column(at).path}." for at in range(metadata.num_columns)]
        except READ_ERRORS as error:
            raise unreadable(path, error) from error
        columns = schema.resolve(found, given, str(path)) if metadata.num_rows else {}
        rollout = f"{columns.get(schema.ROLLOUT)}."
        leaf = next((at for at, name in enumerate(leaves) if name.startswith(rollout)), 0)
        counts = [
            Group(x.num_rows, x.total_byte_size, max(x.column(leaf).num_values, x.num_rows, 1))
            for x in groups
        ]
        provenance = said if isinstance(said, dict) else {}
        return cls(path, found, own, columns, provenance, tuple(counts), range(len(counts)), state)

    @property
    def read(self) -> list[Group]:
        """The row groups that are read."""
        return [self.groups[at] for at in self.span]

    def tables(self, names: Sequence[str], most: int, progress: Progress = IGNORED) -> Iterator[Placed]:
        """Yield the rows in order, in tables of even size.

        Args:
            names: the columns.
            most: log-probs of a table, about.
            progress: called with the number of rows just read.

        Raises:
            DumpError: the file cannot be read, or is another one by now: rows of two files must not mix.
        """
        stored = [name for name in names if name not in self.partitions]
        try:
            parquet, state = opened(self.path), self.state or self.path.state
        except READ_ERRORS as error:
            raise unreadable(self.path, error) from error
        for at in self.span:
            group, row = self.groups[at], sum(one.rows for one in self.groups[:at])
            end, where = row + group.rows, f"{self.path}, row group {at}"
            try:
                for table in parquet.iter_batches(
                    max(-(-group.rows // -(-group.tokens // most)), 1), [at], stored
                ):
                    for key, value in self.partitions.items():
                        table = table.append_column(key, pa.repeat(value, table.num_rows))
                    if self.path.state != state:
                        hint = "wait until its writer has ended, or read a copy; then read again"
                        raise DumpError(f"{self.path}: the file was changed while it was read", hint)
                    many = table.num_rows
                    progress(many)
                    yield where, np.arange(row, row + many), table
                    row += many
                    del table  # frees it before the next one is read
                if row != end:
                    raise EOFError("not the rows its footer had")
            except (*READ_ERRORS, EOFError) as error:
                if isinstance(error, MemoryError):  # Arrow's is one
                    hint = "leave more memory free, say --threads 1, or write smaller row groups"
                    what = f"{where}: there is not enough memory to read it ({said(error)})"
                    raise DumpError(what, hint) from error
                odd = ", ".join(repr(name) for name in stored if not self._reads(at, name)) or "unknown"
                what = f"{where}, from row {row} on, column {odd}: the data cannot be read ({said(error)})"
                hint = "the file is damaged: copy it again and compare sizes; if the error stays, dump again"
                raise DumpError(what, hint) from error

    def _reads(self, group: int, name: str) -> bool:
        """Return whether a column of a row group can be read by itself."""
        try:
            return all(True for _ in opened(self.path).iter_batches(1024, [group], [name]))
        except READ_ERRORS:
            return False


def opened(path: Location) -> pq.ParquetFile:
    """Open a file; page checksums are verified where the writer stored them."""
    away = path.store is not None
    return pq.ParquetFile(
        path.open(), pre_buffer=away, buffer_size=0 if away else BUFFER, page_checksum_verification=True
    )


def unreadable(path: Location, error: Exception) -> DumpError:
    """Explain why a file cannot be opened, from its first and last bytes."""
    if isinstance(error, UnicodeEncodeError):
        return DumpError(f"{path}: the path is not UTF-8", "rename the file and its directories")
    try:
        with path.open() as stream:
            head = stream.read(4)
            stream.seek(max(stream.seek(0, 2) - 4, 0))
            tail = stream.read(4)
    except (OSError, pa.ArrowException) as failure:
        what = f"{path}: cannot be opened ({said(failure)})"
        return DumpError(what, "check that it exists and may be read")
    if not head:
        what, hint = "the file is empty (0 bytes)", "its writer did not finish; dump again"
    elif head != b"PAR1":
        what, hint = "not a Parquet file", "see `offpol-diag convert --list` for what else is read"
    elif tail != b"PAR1":
        what, hint = "the file is truncated: its Parquet footer is missing", "copy it again, or dump again"
    else:
        what, hint = f"the Parquet footer is corrupt ({said(error)})", "copy or dump the file again"
    return DumpError(f"{path}: {what}", hint)


def said(error: BaseException) -> str:
    """Return the first line of an error message without secrets, or the name of the error's type."""
    return cleaned((str(error).splitlines() or [type(error).__name__])[0])


def merged(provenances: Iterable[dict[str, object]]) -> dict[str, object]:
    """Merge the provenance of files: one value where they agree, else the list of distinct values."""
    seen: dict[str, list[object]] = {}
    for key, value in (pair for one in provenances for pair in one.items()):
        values = seen.setdefault(key, [])
        if value not in values:
            values.append(value)
    return {key: values[0] if len(values) == 1 else values for key, values in seen.items()}


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
        shard: whether it is a part of a dump, which `before` rows precede.
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
        return sum(group.rows for part in self.parts for group in part.read)

    @property
    def tokens(self) -> int:
        """Number of tokens, masked ones and one of each empty sequence included."""
        return sum(group.tokens for part in self.parts for group in part.read)

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings from opening and from the latest pass; complete when the pass has ended."""
        found = ((self.plan.columns[role], one) for role, one in self.seen.signs.items() if one.positive)
        return *self.remarks, *(remark(column, one) for column, one in found)

    def only(self, roles: Collection[str]) -> Dump:
        """Return the dump with some columns only, by canonical name; batches lack positions, turns and keys.

        It is the dump itself where bad rows are skipped, which needs all columns, or a row is a token.
        """
        if self.skip or self.long:
            return self
        return replace(self, plan=self.plan.only([schema.ROLLOUT, schema.MASK, *roles]), seen=Seen())

    def shards(self, size: int) -> list[Dump]:
        """Divide the dump between row groups into dumps of about `size` uncompressed bytes.

        This depends on the dump alone. Shards can be read in another process and working directory. A dump of
        a row per token is one shard.
        """
        size, rows = (
            max(size, sum(one.size for part in self.parts for one in part.read) // MOST_SHARDS),
            self.rows,
        )
        found, held, weight, first, before = list[Dump](), list[Part](), 0, 0, 0
        for part in self.parts:
            for at in part.span:
                begin = held.pop().span.start if held and held[-1].path == part.path else at
                held.append(replace(part, span=range(begin, at + 1), state=()))
                weight, first = weight + part.groups[at].size, first + part.groups[at].rows
                if (weight >= size and not self.long) or first == rows:
                    one = replace(self, parts=held, seen=Seen(), folder=None, shard=True, before=before)
                    found, held, weight, before = [*found, one], [], 0, first
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
                counts[label(part.partitions[column].as_py())] += sum(group.rows for group in part.read)
                continue
            with suppress(UnicodeDecodeError):  # an error, with its place, when all columns are read
                for _, _, table in part.tables([column], self.batch_tokens):
                    for one in pc.value_counts(plain(table.column(0))).to_pylist():
                        counts[label(one["values"])] += one["counts"]
        if len(counts) <= most:
            return None
        return frozenset(nsmallest(most, counts, key=lambda one: (-counts[one], one))), len(counts) - most

    def batches(self, progress: Progress = IGNORED) -> Iterator[Batch]:
        """Yield the sequences as CPU float64 batches, in the order of the files; can be called repeatedly.

        A batch has at most about `batch_tokens` tokens, or one sequence. `progress` is called with the number
        of rows just read, bad ones included; they add up to `rows`.

        Raises:
            DumpError: a bad row (unless skipped), corrupt data, a column of the wrong sign, or no token, as
                every row is skipped or every token masked.
        """
        np.empty(RECYCLED, np.uint8)  # makes malloc reuse memory between batches; it is never touched
        self.seen = Seen()
        for batch in _joined_up(self._packed(progress), self.batch_tokens):
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
        mask = self.plan.columns.get(schema.MASK)
        hint = f"column {mask!r} excludes every token; 1 is a token that counts, 0 one that does not"
        what = f"{name}: no token is left in {self.seen.rows} rows"
        raise DumpError(what, hint if mask else "every list is empty; check the writer")

    def _packed(self, progress: Progress) -> Iterator[Batch]:
        """Pack the good rows, and note what is seen of all of them."""
        for rows in self.read(self.plan.names, self.batch_tokens, progress):
            many, skipped = rows.many, Skipped()
            rows = good_rows(rows, skipped if self.skip else None)
            self.seen.add(Seen(many, rows.kept.size, skipped, signs(rows)))
            batch = pack(rows) if rows.many else None
            del rows  # frees the table before the next one is read
            if batch:
                yield batch
            del batch

    def read(self, names: Sequence[str] | None, most: int, progress: Progress = IGNORED) -> Iterator[Rows]:
        """Yield the rows with some columns (None: all), at most `most` tokens or one row at once."""
        number, seen, rollout = self.before, set[object](), self.plan.columns[schema.ROLLOUT]
        for part in self.parts:
            there = part.schema.names
            tables = part.tables([name for name in names or there if name in there], most, progress)
            for where, row, table in (
                gathered(tables, self.plan.columns, str(part.path), seen) if self.long else tables
            ):
                lengths = pc.list_value_length(table.column(rollout)).fill_null(0)
                offsets, begin = starts(lengths.to_numpy()), 0
                while begin < table.num_rows:
                    fit = int(np.searchsorted(offsets, offsets[begin] + most, side="right")) - 1
                    end = min(max(fit, begin + 1), begin + MOST_ROWS)
                    numbers = number + np.arange(begin, end)
                    yield Rows(table.slice(begin, end - begin), self.plan, numbers, where, row[begin:end])
                    begin = end
                number += table.num_rows
                del table


def _joined_up(batches: Iterable[Batch], most: int) -> Iterator[Batch]:
    """Join batches, in order, up to `most` tokens and `MOST_ROWS` rows; one of half as many stays alone."""

    def whole() -> Batch:
        found = joined(held)
        held.clear()  # so that they can be freed
        return found

    held = list[Batch]()
    for batch in batches:
        tokens = sum(one.tokens for one in held) + batch.tokens
        if held and (tokens > most or sum(one.sequences for one in held) + batch.sequences > MOST_ROWS):
            yield whole()
        held.append(batch)
        del batch
        if sum(one.tokens for one in held) > most / 2:
            yield whole()
    if held:
        yield whole()


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
    files = [one if one.store else replace(one, path=str(Path(one.path).absolute())) for one in files]
    texts = [(key, text) for one in files for key, text in one.partitions.items() if text is not None]
    words = {key for key, text in texts if not WHOLE.fullmatch(text)}  # of a hive partition, in every file
    parts = [Part.of(path, words, given) for path in files]
    filled = [part for part in parts if part.columns]
    if not filled:
        what = f"{named(files)}: the dump is empty: it has no row"
        raise DumpError(what, "check that its writer was closed")
    first = filled[0]
    found, long = dict(first.columns), schema.is_long(first.schema, given)
    known = {name for name in schema.LABELS if name in found}
    known |= {schema.LAG} if {schema.ROLLOUT_VERSION, schema.TRAIN_VERSION} <= known else set()
    extra = tuple(name for name in group_by if name not in known)
    for name in extra:
        schema.once(name, first.schema.names, f"{first.path}: --group-by")
        if pt.is_nested(schema.plain_type(kind := first.schema.field(name).type)):
            what = f"{first.path}: column {name!r} holds {kind}, and one value per row is needed"
            raise DumpError(what, "group by a column with one value per sequence")
    for part in filled[1:]:
        _same(first, part, extra, long != schema.is_long(part.schema, given))
    prompts = found.pop(schema.PROMPT_IDS, "")
    prompts = prompts if not long and all(prompts in part.schema.names for part in filled) else ""
    plan = Plan(found, extra, prompts=prompts)
    plan = replace(plan, described=() if long else _described(filled, plan))
    there = dict.fromkeys(name for part in filled for name in part.schema.names)
    info = DumpInfo(
        files=tuple(str(part.path) for part in parts),
        columns=dict(found),
        provenance=merged(part.provenance for part in parts),
        others=(*extra, *plan.described),
        ignored=tuple(name for name in there if name not in {*plan.names, *schema.RESCORED}),
        prompts=prompts,
    )
    remarks = _cautions(first, plan, info)
    return Dump(info, filled, plan, on_bad_row == "skip", max(1, batch_tokens), remarks, long)


def named(files: Sequence[object]) -> str:
    """Return the names of the first files, and how many more there are."""
    return f"{', '.join(map(str, files[:3]))}{f' and {len(files) - 3} more' if len(files) > 3 else ''}"


def _same(first: Part, part: Part, extra: Sequence[str], other_form: bool) -> None:
    """Refuse a file whose columns differ from the first file's."""
    one, two = first.columns, part.columns
    odd = [two.get(role) or one[role] for role in {**one, **two} if one.get(role) != two.get(role)]
    odd = [name for name in odd if name not in (one.get(schema.PROMPT_IDS), two.get(schema.PROMPT_IDS))]
    odd += [name for name in extra if name not in part.schema.names]
    for name in (*first.columns.values(), *extra):
        if name not in odd and name in part.schema.names:
            kinds = [schema.plain_type(x.schema.field(name).type) for x in (first, part)]
            differ = schema.is_text(kinds[0]) != schema.is_text(kinds[1])
            odd += [name] if differ and not any(map(pt.is_null, kinds)) else []
    odd = [one[schema.ROLLOUT]] if other_form else odd
    if odd:
        what = f"{first.path} and {part.path} differ: column {odd[0]!r} is not in both, or not of one kind"
        raise DumpError(what, "read files of one form at a time, or write them alike")


def _described(parts: Sequence[Part], plan: Plan) -> tuple[str, ...]:
    """Return columns of short text, integers or booleans without a role that all files have alike."""
    first, found = parts[0], list[str]()
    for one in first.schema:
        kinds = {
            str(x.schema.field(one.name).type) if x.schema.names.count(one.name) == 1 else "" for x in parts
        }
        if one.name in plan.names or kinds != {str(one.type)}:
            continue
        kind = schema.plain_type(one.type)
        text = pt.is_string(kind) or pt.is_large_string(kind)
        if pt.is_integer(kind) or pt.is_boolean(kind) or text:
            found.append(one.name)
        if text and one.name not in first.partitions:
            with suppress(DumpError):  # which reading will find
                _, _, table = next(first.tables([one.name], FEW))
                if (pc.mean(pc.binary_length(plain(table.column(0)))).as_py() or 0) > SMALL:
                    found.remove(one.name)
    return tuple(found[:MOST_DESCRIBED])


def _cautions(first: Part, plan: Plan, info: DumpInfo) -> tuple[str, ...]:
    """Say what may be padding or a mask where no column is the mask."""
    if schema.MASK in plan.columns:
        return ()
    column, found = plan.columns[schema.ROLLOUT], list[str]()
    if pt.is_fixed_size_list(first.schema.field(column).type):
        what = f"{column!r} is padded to one length and there is no {schema.MASK}"
        found.append(f"{what}: padding, if any, counts as tokens")
    once = [name for name in info.ignored if first.schema.names.count(name) == 1]
    kinds = {name: first.schema.field(name).type for name in once}
    kinds = {name: str(kind.value_type) for name, kind in kinds.items() if schema.is_list(kind)}
    flags = [
        name for name, kind in kinds.items() if kind in ("bool", "int8", "uint8") or "mask" in name.lower()
    ]
    if flags:
        ways = " or ".join(f"--columns mask={name}" for name in flags[:3])
        what = f"there is no {schema.MASK}, so every token counts; if a list that is not read is the mask"
        found.append(f"{what}, say {ways}")
    return tuple(found)
