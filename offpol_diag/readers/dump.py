"""Open a dump and read its sequences as batches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from heapq import nsmallest
from itertools import repeat
from pathlib import Path
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offpol_diag.batch import Batch, joined, label
from offpol_diag.errors import DumpError
from offpol_diag.readers import parquet
from offpol_diag.readers.checks import Count, Skipped, count_signs, good_rows, remarks
from offpol_diag.readers.columns import MASK, PROMPT_IDS, ROLLOUT, TEXTS, Plan, agree, ignored
from offpol_diag.readers.decode import Ints, Rows, pack, plain, starts
from offpol_diag.readers.parquet import MOST_ROWS
from offpol_diag.readers.sources import Location, Part, find

Progress = Callable[[int], None]

RECYCLED = (32 << 20) - (64 << 10)
"""Bytes just below glibc's maximum mmap threshold; freeing such a block makes malloc reuse smaller ones."""
TABLE = 1 << 18
"""Most tokens decoded at once, but for a longer sequence."""
FULL = 0.75
"""Share of the largest batch from which a batch does not wait for the next, with which it might be joined."""
FOOTERS_AT_ONCE = 16
MOST_SHARDS = 4096
"""Maximum number of shards; larger dumps get larger shards."""
MOST_COUNTED = 1 << 21
"""Labels of a column beyond which they are not counted."""
MOST_DESCRIBED = 16
"""Maximum number of columns without a role that are read for the diagnosis."""


# ---------------------------------------------------------------- files


def describe(files: Sequence[Location]) -> list[Part]:
    """Read the footers of all files."""
    pairs = [(key, text) for file in files for key, text in file.partitions.items()]
    words = {key for key, text in pairs if text is not None and not _is_integer(text)}
    numeric = {key for key, _ in pairs} - words
    if not any(file.store for file in files):
        return [parquet.footer(file, numeric) for file in files]
    with ThreadPoolExecutor(FOOTERS_AT_ONCE, "offpol-diag-footers") as pool:
        return list(pool.map(parquet.footer, files, repeat(numeric)))


def _is_integer(text: str) -> bool:
    """Return whether text is a 64-bit integer."""
    return text.removeprefix("-").isdecimal() and -(2**63) <= int(text) < 2**63


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
        rows: sequences, bad ones included.
        columns: canonical name → the column it is read from.
        others: columns that are read by their own names, for groups of sequences.
        ignored: columns that nobody reads.
        provenance: how the numbers were made; where files disagree, the list of their values.
        prompts: column of prompt ids, which `rescore` needs; empty: none.
        given: files, folders, globs and URIs as they were given.
    """

    files: tuple[str, ...]
    rows: int
    bytes: int
    columns: dict[str, str]
    provenance: dict[str, object]
    others: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    prompts: str = ""
    given: tuple[str, ...] = ()


@dataclass
class Seen:
    """What a pass has seen of the rows, added up in their order.

    Attributes:
        rows: sequences, bad ones included.
        tokens: unmasked tokens of those that are not skipped.
        signs: of the train columns, by role.
    """

    rows: int = 0
    tokens: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    signs: dict[str, Count] = field(default_factory=dict)

    def add(self, more: Seen) -> None:
        """Add what was seen of later rows."""
        self.rows += more.rows
        self.tokens += more.tokens
        self.skipped.merge(more.skipped)
        for role, count in more.signs.items():
            self.signs.setdefault(role, Count()).add(count)


@dataclass
class Dump:
    """A dump with validated files, columns and types; its values are checked as they are read.

    Attributes:
        parts: its files that have rows.
        batch_tokens: tokens per batch, masked ones included.
        seen: what the latest pass has seen; complete when the pass has ended.
        remarks: what is to be said about how its files were made.
        folder: what keeps its temporary file alive, or None.
    """

    info: DumpInfo
    parts: list[Part]
    _plan: Plan
    _skip: bool
    batch_tokens: int
    seen: Seen = field(default_factory=Seen)
    _shard: bool = False
    _before: int = 0
    remarks: tuple[str, ...] = ()
    folder: object = field(default=None, compare=False, repr=False)

    def only(self, roles: Collection[str]) -> Dump:
        """Return the dump with some columns only, by canonical name; batches lack positions, turns and keys.

        Returns the dump itself where bad rows are skipped, since that needs all columns.
        """
        return self if self._skip else self._with(self._plan.only({ROLLOUT, MASK, *roles}))

    def _with(self, plan: Plan) -> Dump:
        return replace(self, _plan=plan, seen=Seen())

    def shards(self, size: int) -> list[Dump]:
        """Divide the dump between row groups into dumps of about `size` file bytes, maybe without tokens.

        This depends on the dump alone. Shards can be read in another process and working directory; rows and
        files keep their numbers and names.
        """
        size = max(size, self.info.bytes // MOST_SHARDS)
        found, held, weight, before, first = list[Dump](), list[Part](), 0.0, 0, 0
        for part in self.parts:
            path, begin = part.path, 0
            if not path.store:
                path = replace(path, path=str(Path(path.path).absolute()))
            for group, rows in enumerate(part.group_rows, 1):
                weight += part.bytes * rows / part.rows
                if weight >= size or group == len(part.group_rows):
                    held.append(replace(part, path=path, span=(begin, group)))
                    begin = group
                if weight >= size:
                    found.append(self._shard_of(held, before))
                    held, weight, before = [], 0.0, first
            first += sum(part.group_rows)
            before = before if held else first
        return [*found, self._shard_of(held, before)] if held else found

    def _shard_of(self, parts: list[Part], before: int) -> Dump:
        return replace(self, parts=parts, seen=Seen(), folder=None, _shard=True, _before=before)

    @property
    def rows(self) -> int:
        """Rows of the files, bad ones included."""
        return sum(part.rows for part in self.parts)

    @property
    def tokens(self) -> float:
        """Approximate number of tokens, masked ones included."""
        return sum(parquet.tokens_in(part, group) for part in self.parts for group in part.groups)

    @property
    def skipped(self) -> Skipped:
        """Rows skipped so far by the latest pass."""
        return self.seen.skipped

    def largest(self, name: str, most: int) -> tuple[frozenset[str], int] | None:
        """Return the labels that most rows have, and the number of all others; it reads that column alone.

        Of labels with equally many rows the first ones in order are taken. None where there are no more than
        `most`, or where they are not counted: without such a column, beyond `MOST_COUNTED`.
        """
        column, counts = self._plan.columns.get(name, name), Counter[str]()
        for part in self.parts:
            if column not in part.schema.names or len(counts) > MOST_COUNTED:
                return None
            if column in part.partitions:
                value = part.partitions[column].as_py()
                counts[label(value)] += part.rows
                continue
            for _, table in parquet.tables(part, [column], self.batch_tokens):
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
        return {self._plan.columns[role]: count for role, count in self.seen.signs.items()}

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
        self.seen = Seen()
        for batch in join(self._packed(progress or (lambda _: None)), self.batch_tokens):
            if self.seen.tokens or self._shard:
                yield batch
            del batch  # frees it before the next one is read
        if not self._shard:
            self.judge()

    def judge(self) -> None:
        """Refuse the dump for what a whole pass has seen: a wrong sign, no token.

        Raises:
            DumpError: one of them.
        """
        for count in self.seen.signs.values():
            count.judge()
        if not self.seen.tokens:
            raise self._nothing()

    def _packed(self, progress: Progress) -> Iterator[Batch]:
        # No loop: its variable would keep a batch, or its rows, while the next one is read.
        return filter(None, map(self._see, self._rows(progress)))

    def _see(self, rows: Rows) -> Batch | None:
        """Pack the good ones of some rows, and note what is seen of all of them."""
        many = len(rows.rows)
        rows = good_rows(rows, self.seen.skipped if self._skip else None)
        self.seen.add(Seen(many, rows.kept, signs=count_signs(rows)))
        return pack(rows) if len(rows.rows) else None

    def _rows(self, progress: Progress) -> Iterator[Rows]:
        """Yield the rows, at most `TABLE` tokens or one row at once, with hive partitions as columns."""
        before, most = self._before, min(TABLE, self.batch_tokens)
        for part in self.parts:
            names = [name for name in self._plan.names if name not in part.partitions]
            for group, table, numbers in parquet.numbered(part, names, most):
                rows = Rows(table, self._plan, part.path, group, numbers, before)
                lengths = pc.list_value_length(table.column(self._plan.columns[ROLLOUT])).fill_null(0)
                for begin, end in cuts(starts(lengths.to_numpy()), most):
                    yield rows.between(begin, end)
                    progress(end - begin)
                del table, rows
            before += sum(part.group_rows)

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
    sources: Sequence[str | Location],
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
            type, files that differ, or no row at all.
    """
    parts = describe(find(sources))
    filled = [part for part in parts if part.rows]
    if not filled:
        hint = "check that its writer was closed"
        raise DumpError(f"{_named(parts)}: the dump is empty: it has no row", hint)
    plan = agree(filled, columns or {}, group_by)
    stored = [name for name in plan.described if name not in filled[0].partitions]
    texts = [name for name in stored if _is_text(filled[0], name)]
    long = {*texts} - parquet.short(filled[0], texts)
    described = tuple(name for name in plan.described if name not in long)
    plan = replace(plan, described=described[:MOST_DESCRIBED])
    info = DumpInfo(
        files=tuple(str(part.path) for part in parts),
        rows=sum(part.rows for part in parts),
        bytes=sum(part.bytes for part in parts),
        columns=dict(plan.columns),
        provenance=merged(part.provenance for part in parts),
        others=tuple(name for name in plan.names if name not in plan.columns.values()),
        ignored=ignored(filled, plan),
        prompts=PROMPT_IDS if PROMPT_IDS in filled[0].schema.names else "",
    )
    return Dump(info, filled, plan, on_bad_row == "skip", max(1, batch_tokens))


def _is_text(part: Part, name: str) -> bool:
    kind = part.schema.field(name).type
    return any(test(kind) for test in TEXTS) or pa.types.is_dictionary(kind)


def _named(parts: Sequence[Part]) -> str:
    rest = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return ", ".join(str(part.path) for part in parts[:3]) + rest


# ---------------------------------------------------------------- the size of batches


def cuts(offsets: Ints, tokens: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of rows with at most `tokens` tokens and `MOST_ROWS` rows, or one row.

    Rows start at `offsets` [S+1].
    """
    begin, rows = 0, len(offsets) - 1
    while begin < rows:
        fit = int(np.searchsorted(offsets, offsets[begin] + tokens, side="right")) - 1
        end = min(max(fit, begin + 1), begin + MOST_ROWS)
        yield begin, end
        begin = end


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
