"""Open a dump and read its sequences as batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.errors import DumpError
from offpol_diag.readers.checks import Count, Signs, Skipped, good_rows
from offpol_diag.readers.columns import MASK, ROLLOUT, Plan, agree
from offpol_diag.readers.decode import Slice, pack
from offpol_diag.readers.long import gathered
from offpol_diag.readers.parquet import Cursor, Part, describe, merged, slices, tokens_in
from offpol_diag.readers.sources import find

Progress = Callable[[int], None]

ROOM = 1.2
"""Largest size of an even batch relative to `batch_tokens`."""
SLACK = 1.1
"""Tolerance on the size of even slices: sequences are not cut, and footers give sizes approximately."""
RECYCLED = (32 << 20) - (64 << 10)
"""Bytes just below glibc's maximum mmap threshold; freeing such a block makes malloc reuse smaller ones."""


@dataclass(frozen=True)
class DumpInfo:
    """Facts about a dump, for the report.

    Attributes:
        files: paths, as read.
        rows: sequences, bad ones included; in the long form tokens, until the dump has been read.
        row_groups: of all files.
        bytes: size of the files.
        columns: canonical name → the column it is read from.
        provenance: how the numbers were made, from the files' metadata; where files disagree, the list
            of their values.
    """

    files: tuple[str, ...]
    rows: int
    row_groups: int
    bytes: int
    columns: dict[str, str]
    provenance: dict[str, object]


@dataclass(frozen=True)
class Noticed:
    """Counts and findings of one pass over a dump, besides its batches.

    Attributes:
        rows: sequences, bad ones included.
        tokens: unmasked tokens.
        skipped: skipped rows.
        signs: canonical name of each train column → counts of its signs.
    """

    rows: int
    tokens: int
    skipped: Skipped
    signs: dict[str, Count]


@dataclass
class Dump:
    """A dump with validated files, columns and types; its values are checked as they are read.

    Attributes:
        info: facts for the report.
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
    _kept: int = 0
    _shard: bool = False
    _waits: bool = False
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
        """Return some of its rows as a dump, which may be without tokens.

        Args:
            parts: files or row groups.
            before: rows of the files before them.
        """
        first = before + sum(parts[0].group_rows[: parts[0].groups.start]) + (parts[0].between or (0,))[0]
        return replace(
            self,
            info=replace(self.info, rows=sum(part.rows for part in parts)),
            parts=list(parts),
            skipped=Skipped(),
            _signs=None,
            _kept=0,
            _shard=True,
            _waits=first > 0,
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

    @property
    def rows(self) -> int:
        """Rows of the files, bad ones included: a sequence each, or a token each in the long form."""
        return sum(part.rows for part in self.parts)

    @property
    def tokens(self) -> float:
        """Approximate number of tokens, masked ones included.

        Raises:
            DumpError: the first file can no longer be opened.
        """
        return sum(self.group_tokens)

    @property
    def group_tokens(self) -> list[float]:
        """Approximate number of tokens in each row group that is read, masked ones included.

        Estimated from uncompressed bytes, at the bytes per token of the first row group; from rows in the
        long form and where footers give no bytes.

        Raises:
            DumpError: the first file can no longer be opened.
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
            self._rate = max(tokens_in(*groups[filled], self._plan), 1) / sizes[filled]
        return [
            self._rate * size * (part.rows / part.group_rows[at] if part.between else 1.0)
            for size, (part, at) in zip(sizes, groups, strict=True)
        ]

    @property
    def signs(self) -> dict[str, Count]:
        """Counts of signs from the latest pass, by the dump's column names."""
        counts = self._signs.counts if self._signs else {}
        return {self._plan.columns[role]: count for role, count in counts.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings from opening and from the latest pass; complete when the pass has ended."""
        return (
            *self.remarks,
            *_padding(self.parts[0], self._plan),
            *(self._signs.notes() if self._signs else ()),
        )

    def batches(self, progress: Progress | None = None, even: bool = False) -> Iterator[Batch]:
        """Yield the sequences as CPU float64 batches, in the order of the files; can be called repeatedly.

        Args:
            progress: called with the number of rows just read, bad ones included; they add up to `rows`.
            even: whether batches may exceed `batch_tokens` by up to `ROOM` to be of similar size, which saves
                the fixed cost of a small last batch.

        Yields:
            Batches of at most about `batch_tokens` tokens, or of one sequence.

        Raises:
            DumpError: a bad row (unless skipped), corrupt data, a column of the wrong sign, or no token, as
                every row is skipped or every token masked.
        """
        np.empty(
            RECYCLED, np.uint8
        )  # makes malloc reuse memory between batches; the block is never touched, so it costs no memory
        self.skipped, self._signs, self._kept = Skipped(), Signs(self._plan, waits=self._waits), 0
        most, aim = self.batch_tokens, math.inf
        if even:
            most, tokens = max(1, int(ROOM * self.batch_tokens)), self.tokens
            aim = tokens / math.ceil(max(tokens, 1) / most)
        for batch in join(self._packed(most, even, self._signs, progress or (lambda _: None)), most, aim):
            self._kept += batch.tokens
            if self._kept or self._shard:
                yield batch
        if not (self._kept or self._shard):
            raise self._nothing()

    def noticed(self) -> Noticed:
        """Return the findings of the latest pass; complete when the pass has ended."""
        signs = self._signs.counts if self._signs else {}
        return Noticed(self.info.rows, self._kept, self.skipped, signs)

    def notice(self, shards: Iterable[Noticed]) -> None:
        """Merge the findings of all shards, in order, as if the dump had been read in one pass.

        Raises:
            DumpError: a column of the wrong sign, or no unmasked token.
        """
        self.skipped, self._signs, self._kept, rows = Skipped(), Signs(self._plan), 0, 0
        for one in shards:
            rows += one.rows
            self._kept += one.tokens
            self.skipped.merge(one.skipped)
            self._signs.merge(one.signs)
        self.info = replace(self.info, rows=rows)
        if not self._kept:
            raise self._nothing()

    def _packed(self, most: int, even: bool, signs: Signs, progress: Progress) -> Iterator[Batch]:
        sequences = 0
        for piece in self._slices(most, even, progress):
            good, rows = good_rows(piece, self._plan, self.skipped if self._skip else None)
            signs.see(good, rows)
            if len(good.rows):
                yield pack(good, rows, self._plan)
            sequences += len(piece.rows)
        self.info = replace(self.info, rows=sequences)

    def _slices(self, most: int, even: bool, progress: Progress) -> Iterator[Slice]:
        if self.long:
            yield from gathered(self.parts, self._plan, most, progress)
            return
        before, tokens = self._before, iter(self.group_tokens if even else ())
        for part in self.parts:
            sizes = {at: _evenly(next(tokens), most) if even else most for at in part.groups}
            for piece in slices(part, self._plan, before, sizes, self._cursor):
                yield piece
                progress(len(piece.rows))
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
        return DumpError(
            f"{name}: no token is left in {self.info.rows} rows",
            hint if mask else "every list is empty; check the writer",
        )


def open_dump(
    sources: Sequence[str],
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
            rollout, old, current, mask, or a canonical column name.
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
        raise DumpError(
            f"{_named(parts)}: the dump is empty: it has no row", "check that its writer was closed"
        )
    plan = agree(filled, columns or {}, group_by)
    info = DumpInfo(
        files=tuple(str(part.path) for part in parts),
        rows=sum(part.rows for part in parts),
        row_groups=sum(len(part.group_rows) for part in parts),
        bytes=sum(part.bytes for part in parts),
        columns=dict(plan.columns),
        provenance=merged(part.provenance for part in parts),
    )
    return Dump(info, filled, plan, on_bad_row == "skip", max(1, batch_tokens))


def _named(parts: Sequence[Part]) -> str:
    rest = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
    return ", ".join(str(part.path) for part in parts[:3]) + rest


def _padding(part: Part, plan: Plan) -> tuple[str, ...]:
    """Return a warning if padding may be counted as tokens."""
    column = plan.columns[ROLLOUT]
    if MASK in plan.columns or not pa.types.is_fixed_size_list(part.schema.field(column).type):
        return ()
    return (f"{column!r} is padded to one length and there is no {MASK}: padding, if any, counts as tokens",)


# ---------------------------------------------------------------- the size of batches


def _evenly(tokens: float, most: int) -> int:
    """Return the slice size that divides a row group of `tokens` evenly, at about `most` tokens or fewer."""
    return max(1, math.ceil(SLACK * tokens / math.ceil(max(tokens, 1) / most)))


def join(batches: Iterable[Batch], most: int, aim: float = math.inf) -> Iterator[Batch]:
    """Join batches, in order, up to `most` tokens; a larger batch stays on its own.

    Many small row groups are then as fast to analyse as a few large ones. Each joined batch ends where its
    size is nearest to `aim` tokens.
    """
    held: list[Batch] = []
    size = 0
    for batch in batches:
        if size and (size + batch.tokens > most or size + batch.tokens / 2 > aim):
            yield _concatenated(held)
            held, size = [], 0
        held.append(batch)
        size += batch.tokens
    if held:
        yield _concatenated(held)


def _concatenated(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    joined: dict[str, Any] = {}
    for name in (f.name for f in fields(Batch)):
        values = [getattr(batch, name) for batch in batches]
        if name == "scalars":
            joined[name] = {key: list(chain.from_iterable(s[key] for s in values)) for key in values[0]}
        else:
            joined[name] = _cat([x for x in values if x is not None], name in ("cu_seqlens", "cu_runs"))
    return Batch(**joined)


def _cat(values: Sequence[Tensor], offsets: bool) -> Tensor | None:
    if not values or not offsets:
        return torch.cat(list(values)) if values else None
    lengths = torch.cat([segments.lengths(value) for value in values])
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
