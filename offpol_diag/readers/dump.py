"""A dump, opened: what it is, and its sequences as batches."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.errors import DumpError
from offpol_diag.readers.checks import Count, Signs, Skipped, good_rows
from offpol_diag.readers.columns import MASK, ROLLOUT, is_padded
from offpol_diag.readers.decode import Slice, pack
from offpol_diag.readers.long import gathered
from offpol_diag.readers.parquet import Part, describe, merged
from offpol_diag.readers.rowgroups import Cursor, slices, tokens_in
from offpol_diag.readers.schema import Plan, agree
from offpol_diag.readers.sources import find

Progress = Callable[[int], None]

ROOM = 1.2
"""By how much batches may be larger than `batch_tokens`, where that makes one batch less."""
SLACK = 1.1
"""By how much one may be larger than another: sequences are not cut, and footers tell sizes about."""
RECYCLED = (32 << 20) - (64 << 10)
"""Bytes; freeing the largest block that counts makes the GNU allocator keep smaller ones."""


@dataclass(frozen=True)
class DumpInfo:
    """What a report says of the dump.

    Attributes:
        files: paths, as read.
        rows: sequences, bad ones included; in the long form known once the dump was read, tokens until then.
        row_groups: of all files.
        bytes: size of the files.
        columns: our name → the column it is read from.
        provenance: what the files' metadata says of how the numbers were made; where files disagree, the list
            of what they say.
    """

    files: tuple[str, ...]
    rows: int
    row_groups: int
    bytes: int
    columns: dict[str, str]
    provenance: dict[str, object]


@dataclass(frozen=True)
class Noticed:
    """What a reading noticed beside its batches.

    Attributes:
        rows: sequences, bad ones included.
        tokens: that were kept.
        skipped: rows left out.
        signs: what was seen of the signs of the train columns, by our name.
    """

    rows: int
    tokens: int
    skipped: Skipped
    signs: dict[str, Count]


@dataclass
class Dump:
    """A dump whose files, columns and types were found right; its values are checked as they are read.

    Attributes:
        info: what a report says of it.
        skipped: rows left out by the last reading so far.
    """

    info: DumpInfo
    _parts: list[Part]
    _plan: Plan
    _skip: bool
    _tokens: int
    skipped: Skipped = field(default_factory=Skipped)
    _signs: Signs | None = None
    _kept: int = 0
    _shard: bool = False
    _waits: bool = False
    _before: int = 0
    _rate: float = 0.0
    _cursor: Cursor = field(default_factory=Cursor, compare=False, repr=False)

    @property
    def long(self) -> bool:
        """Whether a row is a token."""
        return self._plan.form.long

    def shard(self, parts: Sequence[Part], before: int) -> Dump:
        """Some of its rows as a dump, of which it is no error to hold no token.

        Args:
            parts: files, or row groups of them.
            before: rows of the files before them.
        """
        info = replace(self.info, rows=sum(part.rows for part in parts))
        first = before + sum(parts[0].group_rows[: parts[0].groups.start]) + (parts[0].between or (0,))[0]
        begun = Dump(info, list(parts), self._plan, self._skip, self._tokens, _rate=self._rate)
        return replace(begun, _shard=True, _waits=first > 0, _before=before, _cursor=self._cursor)

    def only(self, roles: Collection[str]) -> Dump:
        """The same dump with some columns alone, by our names; its batches have no positions, turns or keys.

        It is the dump itself where rows are left out or put together by what stands in all their columns.
        """
        if self._skip or self.long:
            return self
        plan = self._plan.only({ROLLOUT, MASK, *roles})
        return replace(self, _plan=plan, skipped=Skipped(), _signs=None, _cursor=Cursor())

    @property
    def rows(self) -> int:
        """Rows of the files, bad ones included: a sequence each, or a token each in the long form."""
        return sum(part.rows for part in self._parts)

    @property
    def batch_tokens(self) -> int:
        """How many tokens, masked ones included, are held at once."""
        return self._tokens

    @property
    def tokens(self) -> float:
        """About how many its files hold, masked ones included.

        Raises:
            DumpError: its first file does not open any more.
        """
        return sum(self.group_tokens)

    @property
    def group_tokens(self) -> list[float]:
        """About how many each row group holds that is read, masked ones included.

        By its bytes before compression, and what they are to a token in the first of them; by its rows in the
        long form, and where footers do not tell bytes.

        Raises:
            DumpError: the first file does not open any more.
        """
        groups = [(part, at) for part in self._parts for at in part.groups]
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
    def parts(self) -> tuple[Part, ...]:
        """Its files, those without rows left out."""
        return tuple(self._parts)

    @property
    def signs(self) -> dict[str, Count]:
        """What the last reading so far saw of the signs of columns, by their names in the dump."""
        counts = self._signs.counts if self._signs else {}
        return {self._plan.columns[role]: count for role, count in counts.items()}

    @property
    def notes(self) -> tuple[str, ...]:
        """Warnings from opening and from the last reading; complete once the reading ended."""
        return (*_padding(self._parts[0], self._plan), *(self._signs.notes() if self._signs else ()))

    def batches(self, progress: Progress | None = None, even: bool = False) -> Iterator[Batch]:
        """The sequences as CPU float64 batches, in the order of the files; it can be called again.

        Args:
            progress: called with the number of rows just read, bad ones included; they add up to `rows`.
            even: whether they may be a little larger than `batch_tokens`, to be of about one size: a small
                one costs what a large one does beside its tokens.

        Yields:
            Batches of at most about `batch_tokens` tokens, or of one sequence.

        Raises:
            DumpError: a bad row (unless skipped), corrupt data, a column of the wrong sign, or nothing left:
                every row skipped or every token masked.
        """
        np.empty(
            RECYCLED, np.uint8
        )  # the memory of a batch is kept for the next; never touched, it takes none
        self.skipped, self._signs, self._kept = Skipped(), Signs(self._plan, waits=self._waits), 0
        most, aim = self._tokens, math.inf
        if even:
            most, tokens = max(1, int(ROOM * self._tokens)), self.tokens
            aim = tokens / math.ceil(max(tokens, 1) / most)
        for batch in join(self._packed(most, even, self._signs, progress or (lambda _: None)), most, aim):
            self._kept += batch.tokens
            if self._kept or self._shard:
                yield batch
        if not (self._kept or self._shard):
            raise self._nothing()

    def noticed(self) -> Noticed:
        """What the last reading noticed; complete once it ended."""
        signs = self._signs.counts if self._signs else {}
        return Noticed(self.info.rows, self._kept, self.skipped, signs)

    def notice(self, shards: Iterable[Noticed]) -> None:
        """Take in what the readings of its shards noticed, in order, as if all of it had been read here.

        Raises:
            DumpError: a column of the wrong sign, or nothing left.
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
            yield from gathered(self._parts, self._plan, most, progress)
            return
        before, tokens = self._before, iter(self.group_tokens if even else ())
        for part in self._parts:
            sizes = {at: _evenly(next(tokens), most) if even else most for at in part.groups}
            for piece in slices(part, self._plan, before, sizes, self._cursor):
                yield piece
                progress(len(piece.rows))
            before += sum(part.group_rows)

    def _nothing(self) -> DumpError:
        name = _named(self._parts)
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
        columns: which column has a role, where its name does not say: `{"rollout": "my_logps"}`. A role is
            one of rollout, old, current, mask, or a canonical column name.
        group_by: columns with one value per row that should reach `Batch.scalars`.
        on_bad_row: whether a bad row is an error or is left out and counted.
        batch_tokens: how many tokens, masked ones included, are held at once.

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
    """A warning where padding may be taken for tokens."""
    column = plan.columns[ROLLOUT]
    if MASK in plan.columns or not is_padded(part.schema.field(column).type):
        return ()
    return (f"{column!r} is padded to one length and there is no {MASK}: padding, if any, counts as tokens",)


# ---------------------------------------------------------------- the size of batches


def _evenly(tokens: float, most: int) -> int:
    """The largest slice of a row group of so many tokens that is cut into about equal ones."""
    return max(1, math.ceil(SLACK * tokens / math.ceil(max(tokens, 1) / most)))


def join(batches: Iterable[Batch], most: int, aim: float = math.inf) -> Iterator[Batch]:
    """The same sequences in order, in batches of at most `most` tokens unless one alone is larger.

    Many small row groups are then no slower to analyse than a few large ones. A batch ends where it is
    nearest to `aim` tokens.
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
