"""Refuse a dump without a mask in which a column looks like one, or whose rows are padded with zeros.

Without a mask every token counts, padding and tool output included. Neither depends on how a dump is cut.

A column that looks like a mask is found when the dump is opened: footers say whether it holds both 0 and 1
and no other number, and the beginning of the dump whether there is one for each token. Of a dump at a URL
nothing is fetched for that but footers.

Padding is found as the dump is read, in its first sequences. A token that was sampled may have log-prob 0 in
both columns, if the policies are certain of it, and so may several at the end of a response. Padding differs:
rows of equal length lie together, and their zeros at the end are more than elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pt

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns, parquet
from offpol_diag.readers.columns import NONE, Plan, is_list, may_mask, no_mask, unnamed_mask
from offpol_diag.readers.decode import Array, Flags, Ints, Rows, dense, narrow, ragged, span, starts
from offpol_diag.readers.sources import Part

ROWS, TOKENS = 1 << 12, 1 << 18
"""Rows and tokens at the beginning of the dump that are looked at, at most."""
AT_ONCE = 1 << 16
"""Tokens per table of these."""
MOST = 256
"""Most columns that are looked at; there are dumps with thousands."""
NEARLY_ALL = 0.95
"""Share of sequences in which a mask has a value for each token; the others are bad rows."""
FEWEST = 4
"""Fewest sequences that are called padded."""
TOGETHER = 0.7
"""Share of rows that are as long as the one before: batches of four rows have 0.75."""
SEVERAL, MANY = 2.0, 16.0
"""Mean zeros at the end of a padded row: the fewest, and so many that they need not vary between rows."""


# ---------------------------------------------------------------- a column that looks like a mask


def require_mask(parts: Sequence[Part], plan: Plan, overrides: Mapping[str, str]) -> None:
    """Refuse a dump that has no mask, though a column that nobody reads looks like one.

    Raises:
        DumpError: it names the columns, and how to say that there is no mask.
    """
    if columns.MASK in plan.columns or no_mask(overrides):
        return
    within = _candidates(parts, plan)
    begun = _begun(parts, plan, within) if within else {}
    if found := [name for name, seen in begun.items() if _of_0_and_1(parts, name, seen)]:
        raise unnamed_mask(str(parts[0].path), found)


def _candidates(parts: Sequence[Part], plan: Plan) -> list[str]:
    """Return the columns that nobody reads and that could be a mask by name, type and the first footer."""
    read, many = set(plan.names), Counter(parts[0].schema.names)
    unread = (one for one in parts[0].schema if one.name not in read and one.name in parts[0].binary)
    found = (one.name for one in unread if may_mask(one.name, one.type, plan.form) and many[one.name] == 1)
    return list(islice(found, MOST))


def _of_0_and_1(parts: Sequence[Part], name: str, begun: tuple[float, float]) -> bool:
    """Return whether a column that begins like a mask holds both 0 and 1, and no other number."""
    low, high = begun
    for part in parts:
        with suppress(DumpError, *parquet.READ_ERRORS):
            for one in parquet.extents(part, [name]).values():
                low, high = min(low, one.low), max(high, one.high)
    return low == 0 and high == 1


def _begun(parts: Sequence[Part], plan: Plan, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the columns with 0 or 1 for each token at the beginning, and their minimum and maximum."""
    with suppress(DumpError, *parquet.READ_ERRORS):  # what is damaged is refused where it is read
        if any(part.path.store for part in parts):
            return _by_footers(parts, plan, names)
        return dict(_of_tokens(parts, plan, names) if plan.form.long else _of_lists(parts, plan, names))
    return {}


def _by_footers(parts: Sequence[Part], plan: Plan, names: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Return the lists of integers that have as many values as the log-probs, which is all that is known."""
    rollout = plan.columns[columns.ROLLOUT]
    types = {name: parts[0].schema.field(name).type for name in names}
    whole = [name for name, kind in types.items() if is_list(kind) and not pt.is_floating(kind.value_type)]
    found = parquet.extents(parts[0], [rollout, *whole], 1)
    size = found[rollout].values if rollout in found else 0
    alike = (name for name in whole if name in found and found[name].values >= NEARLY_ALL * size)
    return {name: (found[name].low, found[name].high) for name in alike if found[name].values <= size}


def _of_lists(
    parts: Sequence[Part], plan: Plan, names: Sequence[str]
) -> Iterator[tuple[str, tuple[float, float]]]:
    rollout = plan.columns[columns.ROLLOUT]
    lengths, held = list[Ints](), {name: list[tuple[Array, Ints]]() for name in names}
    rows = tokens = 0
    for table in _tables(parts, [rollout], names):
        sizes = pc.list_value_length(table.column(rollout)).fill_null(0).to_numpy().astype(np.int64)
        room = min(int(np.searchsorted(starts(sizes)[:-1], TOKENS - tokens)), ROWS - rows)
        lengths.append(sizes[:room])
        rows, tokens = rows + len(lengths[-1]), tokens + int(lengths[-1].sum())
        for name, some in held.items():
            some.append(_list(table.slice(0, room), name))
        if rows == ROWS or tokens >= TOKENS:
            break
    size = _joined(lengths)
    for name, some in held.items():
        values, own = (_joined(each) for each in zip(*some, strict=True))
        whole = size.any() and (own == size)[size > 0].mean() >= NEARLY_ALL
        if whole and _flags(values):
            yield name, span(values)


def _list(table: pa.RecordBatch, name: str) -> tuple[Array, Ints]:
    """Return a column of lists, their values and lengths; of a file that lacks it, empty ones."""
    if name not in table.schema.names:
        return np.zeros(0), np.zeros(table.num_rows, np.int64)
    found = ragged(table.column(name))
    return _with_nan(found.values, found.null), found.lengths


def _of_tokens(
    parts: Sequence[Part], plan: Plan, names: Sequence[str]
) -> Iterator[tuple[str, tuple[float, float]]]:
    """Yield columns of the long form; those that are the same throughout each sequence are no masks."""
    sequence = plan.columns[columns.SEQUENCE]
    numbers: dict[object, int] = {}
    which, held = list[Ints](), {name: list[Array]() for name in names}
    rows = 0
    for table in _tables(parts, [sequence], names):
        some = table.slice(0, TOKENS - rows)
        rows += some.num_rows
        ids = dense(some.column(sequence)).dictionary_encode()
        if ids.null_count:
            return  # which is an error where it is read
        known = [numbers.setdefault(key, len(numbers)) for key in ids.dictionary.to_pylist()]
        which.append(np.array(known, np.int64)[ids.indices.to_numpy()])
        for name, values in held.items():
            there = name in some.schema.names
            values.append(_with_nan(*narrow(some.column(name))) if there else np.full(some.num_rows, np.nan))
        if rows == TOKENS:
            break
    number = _joined(which)
    for name, parted in held.items():
        flags = _joined(parted)
        if _flags(flags):
            ones, every = np.bincount(number, flags), np.bincount(number)
            if ((ones > 0) & (ones < every)).any():
                yield name, span(flags)


def _tables(parts: Sequence[Part], first: Sequence[str], names: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield tables of some columns, and of others that a file has."""
    for part in parts:
        there = [name for name in names if name in part.schema.names and name not in part.partitions]
        for _, table in parquet.tables(part, [*first, *there], AT_ONCE):
            yield table


def _flags(values: Array) -> bool:
    return bool(((values == 0) | (values == 1)).all())


def _with_nan(values: Array, null: Flags | None) -> Array:
    return values.astype(np.float64) if null is None else np.where(null, np.nan, values)


def _joined(arrays: Iterable[Array]) -> Array:
    return np.concatenate(list(arrays))


# ---------------------------------------------------------------- padding


class Padding(NamedTuple):
    """Sequences that end in padding, of how many, and its share of their tokens."""

    padded: int
    rows: int
    share: float


@dataclass
class Ends:
    """How the first sequences end, at most `ROWS` of them and `TOKENS` tokens.

    Attributes:
        plan: its columns; nothing is looked for if one is the mask, or the user says that there is none.
        rows: for each, its tokens, the zeros of both columns at its end, and the longest run of them before
            its last token that is not zero, [S, 3].
    """

    plan: Plan
    rows: list[Ints] = field(default_factory=list)

    def wanted(self) -> bool:
        """Return whether padding is looked for, and more of the dump is needed for it."""
        if columns.MASK in self.plan.columns or self.plan.unmasked:
            return False
        return sum(map(len, self.rows)) < ROWS and sum(int(one[:, 0].sum()) for one in self.rows) < TOKENS

    def see(self, rows: Rows) -> None:
        """Look at the next rows."""
        train = rows.lists.get(columns.OLD, rows.lists.get(columns.CURRENT))
        if train is None or not self.wanted():
            return
        many = min(len(rows.lengths), ROWS)
        many = min(many, int(np.searchsorted(rows.offsets[:-1], TOKENS)))
        end = int(rows.offsets[many])
        zero = (rows.lists[columns.ROLLOUT].values[:end] == 0) & (train.values[:end] == 0)
        self.rows.append(ends(rows.lengths[:many], zero))

    def merge(self, more: Sequence[Ints]) -> None:
        """Add the rows of a later part of the dump."""
        if self.wanted():
            self.rows += more

    def judge(self, name: str, total: int) -> None:
        """Refuse padding.

        Args:
            name: of the dump.
            total: sequences of the dump.

        Raises:
            DumpError: most of these sequences end in padding.
        """
        head = _joined(self.rows)[:ROWS] if self.rows else np.zeros((0, 3), np.int64)
        head = head[: int(np.searchsorted(starts(head[:, 0])[:-1], TOKENS))]
        found = padding(head)
        if found is None:
            return
        one = self.plan.columns[columns.ROLLOUT]
        two = self.plan.columns.get(columns.OLD) or self.plan.columns[columns.CURRENT]
        first = "the first " if total > len(head) else ""
        raise DumpError(
            f"{name}: columns {one!r} and {two!r} are both exactly 0 from some token to the end in "
            f"{found.padded:,} of {first}{found.rows:,} sequences, in {found.share:.0%} of the tokens: "
            "padding, and nothing says which column is the mask",
            f"name it with --columns mask=NAME, or add it with --join FILE:{columns.MASK}; if those tokens "
            f"were sampled, say --columns mask={NONE}",
        )


def ends(lengths: Ints, zero: Flags) -> Ints:
    """Return how sequences end, [S, 3] as `Ends.rows`.

    Args:
        lengths: tokens per sequence, [S].
        zero: whether both log-probs of a token are exactly 0, [T].
    """
    found = np.stack([lengths, lengths, np.zeros_like(lengths)], axis=1)
    filled = np.flatnonzero(lengths)
    if not filled.size:
        return found
    offsets = starts(lengths[filled])
    last = np.maximum.reduceat(np.where(zero, -1, np.arange(len(zero))), offsets[:-1])  # that is not zero
    found[filled, 1] = np.where(last < 0, lengths[filled], offsets[1:] - 1 - last)
    edges = np.flatnonzero(np.diff(np.concatenate(([0], zero.astype(np.int8), [0]))))
    first, length = edges[::2], np.diff(edges)[::2]
    row = np.searchsorted(offsets[1:], first, side="right")
    inside = first < last[row]  # a token that is not zero ends each of these, so none spans two sequences
    np.maximum.at(found[:, 2], filled[row[inside]], length[inside])
    return found


def padding(rows: Ints) -> Padding | None:
    """Find padding at the end of most sequences; `rows` are those of `Ends` [S, 3]."""
    rows = rows[rows[:, 0] > 0]
    lengths, tail, longest = rows.T
    if len(rows) < FEWEST or np.mean(lengths[1:] == lengths[:-1]) < TOGETHER:
        return None
    some = tail < lengths  # columns of zeros say nothing
    lengths, tail, longest = rows[some].T
    if some.mean() <= 0.5 or np.mean(tail > 0) <= 0.5:
        return None
    mean = tail[tail > 0].mean()
    if mean < max(SEVERAL, 2 * longest.mean()) or (mean < MANY and np.ptp(tail) < mean / 2):
        return None
    return Padding(int((tail > 0).sum()), len(tail), float(tail.sum() / lengths.sum()))
