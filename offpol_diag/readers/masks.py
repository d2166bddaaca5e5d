"""Refuse a dump without a mask in which a column looks like one, or whose rows are padded with zeros.

Without a mask every token counts, padding and tool output included. The beginning of the dump is read, the
same rows however it is cut; of the rest the footers say whether a column that looks like a mask holds another
number, or a 0 where the beginning has none.

A token that was sampled may have log-prob 0 in both columns, if the policies are certain of it, and so may
several at the end of a response. Padding differs: rows of equal length lie together, and their zeros at the
end are more than elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns, parquet
from offpol_diag.readers.columns import NONE, Plan, may_mask, no_mask, unnamed_mask
from offpol_diag.readers.decode import Array, Flags, Ints, dense, narrow, ragged, span, starts
from offpol_diag.readers.sources import Part

ROWS, TOKENS = 1 << 12, 1 << 18
"""Rows and tokens at the beginning of the dump that are read, at most; in the long form a row is a token."""
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


class Column(NamedTuple):
    """Values of a column [N], and their number per sequence [S]."""

    values: Array
    lengths: Ints


def require_mask(parts: Sequence[Part], plan: Plan, overrides: Mapping[str, str]) -> None:
    """Refuse a dump that has no mask, though a column looks like one or its rows are padded.

    Raises:
        DumpError: it names the columns, and how to say that there is no mask.
    """
    if columns.MASK in plan.columns or no_mask(overrides):
        return
    head, file = _head(parts, plan), str(parts[0].path)
    if head is None:
        return  # what is damaged is refused where it is read
    found = [name for name, begun in head.masks() if _of_0_and_1(parts, name, begun)]
    if found:
        raise unnamed_mask(file, found)
    seen = padding(*head.zeros)
    if seen is not None:
        one, two = (plan.columns[role] for role in _policies(plan))
        first = "the first " if head.cut else ""
        raise DumpError(
            f"{file}: columns {one!r} and {two!r} are both exactly 0 from some token to the end in "
            f"{seen.padded:,} of {first}{seen.rows:,} sequences, in {seen.share:.0%} of the tokens: padding, "
            "and nothing says which column is the mask",
            f"name it with --columns mask=NAME, or add it with --join FILE:{columns.MASK}; if those tokens "
            f"were sampled, say --columns mask={NONE}",
        )


def _policies(plan: Plan) -> tuple[str, str]:
    """Return the roles of rollout and trainer."""
    return columns.ROLLOUT, columns.OLD if columns.OLD in plan.columns else columns.CURRENT


def _candidates(parts: Sequence[Part], plan: Plan) -> list[str]:
    """Return the columns that nobody reads and that could be a mask by name, type and the first footer."""
    read, many = set(plan.names), Counter(parts[0].schema.names)
    names = [
        field.name
        for field in parts[0].schema
        if field.name not in read and may_mask(field.name, field.type, plan.form) and many[field.name] == 1
    ]
    if not names:
        return []
    known: dict[str, tuple[float, float]] = {}
    with suppress(DumpError, *parquet.READ_ERRORS):
        known = parquet.extents(parts[0], names, 1)
    return [name for name in names if _within(known.get(name, (0, 1)))][:MOST]


def _of_0_and_1(parts: Sequence[Part], name: str, begun: tuple[float, float]) -> bool:
    """Return whether a column that begins like a mask holds both 0 and 1, and no other number."""
    spans = [begun]
    for part in parts:
        with suppress(DumpError, *parquet.READ_ERRORS):
            spans += parquet.extents(part, [name]).values()
    return min(low for low, _ in spans) == 0 and max(high for _, high in spans) == 1


def _within(span: tuple[float, float]) -> bool:
    low, high = span
    return low >= 0 and high <= 1


# ---------------------------------------------------------------- the beginning of the dump


@dataclass(frozen=True)
class Head:
    """The first sequences of a dump.

    Attributes:
        lengths: tokens per sequence, [S].
        zeros: tokens of the sequences that both policies cover [S'], and whether the log-probs of each are
            exactly 0 in both columns [T'].
        others: columns that may be a mask: values [N], and their number per sequence [S].
        long: whether they are of a dump with one row per token.
        cut: whether the dump goes on.
    """

    lengths: Ints
    zeros: tuple[Ints, Flags]
    others: dict[str, Column]
    long: bool
    cut: bool

    def masks(self) -> Iterator[tuple[str, tuple[float, float]]]:
        """Yield the columns with 0 or 1 for each token, and their minimum and maximum.

        In the long form a column that is the same throughout each sequence is none.
        """
        filled = self.lengths > 0
        for name, (values, lengths) in self.others.items():
            whole = filled.any() and (lengths == self.lengths)[filled].mean() >= NEARLY_ALL
            if whole and ((values == 0) | (values == 1)).all() and (self._varies(values) or not self.long):
                yield name, span(values)

    def _varies(self, values: Array) -> bool:
        """Return whether values [T] differ within a sequence."""
        return not np.isin(np.flatnonzero(np.diff(values)) + 1, starts(self.lengths)).all()


def _head(parts: Sequence[Part], plan: Plan) -> Head | None:
    """Read the first sequences, without the other columns where one is damaged; None where that fails."""
    for others in (_candidates(parts, plan), []):
        with suppress(DumpError, *parquet.READ_ERRORS):
            return _gathered(parts, plan, others) if plan.form.long else _listed(parts, plan, others)
    return None


def _tables(parts: Sequence[Part], first: Sequence[str], others: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Yield tables of some columns, and of others that a file has."""
    for part in parts:
        there = [name for name in others if name in part.schema.names and name not in part.partitions]
        for _, table in parquet.tables(part, [*first, *there], AT_ONCE):
            yield table


def _listed(parts: Sequence[Part], plan: Plan, others: Sequence[str]) -> Head:
    """Read them where a row is a sequence."""
    policies = [plan.columns[role] for role in _policies(plan)]
    held: dict[str, list[Column]] = {name: [] for name in (*policies, *others)}
    rows = tokens = 0
    for table in _tables(parts, policies, others):
        sizes = pc.list_value_length(table.column(policies[0])).fill_null(0).to_numpy()
        room = min(int(np.searchsorted(starts(sizes)[:-1], TOKENS - tokens)), ROWS - rows)
        rows, tokens = rows + min(room, len(sizes)), tokens + int(sizes[:room].sum())
        for name, some in held.items():
            some.append(_lists(table.slice(0, room), name))
        if rows == ROWS or tokens >= TOKENS:
            break
    found = {name: Column(*map(_joined, zip(*some, strict=True))) for name, some in held.items()}
    (rollout, lengths), (train, same) = (found.pop(name) for name in policies)
    good = lengths == same  # others are bad rows
    zero = (rollout[np.repeat(good, lengths)] == 0) & (train[np.repeat(good, same)] == 0)
    return Head(lengths, (lengths[good], zero), found, False, rows < sum(part.rows for part in parts))


def _lists(table: pa.RecordBatch, name: str) -> Column:
    """Return a column of lists; of a file that lacks it, empty ones."""
    if name not in table.schema.names:
        return Column(np.zeros(0), np.zeros(table.num_rows, np.int64))
    found = ragged(table.column(name))
    return Column(_flat(found.values, found.null), found.lengths)


def _gathered(parts: Sequence[Part], plan: Plan, others: Sequence[str]) -> Head:
    """Read them where a row is a token; of the last row's sequence there may be more."""
    name = plan.columns[columns.SEQUENCE]
    order = [plan.columns[columns.POSITION]] if columns.POSITION in plan.columns else []
    policies = [plan.columns[role] for role in _policies(plan)]
    held: dict[str, list[Array]] = {one: [] for one in ("", *order, *policies, *others)}
    numbers: dict[object, int] = {}
    rows = 0
    for table in _tables(parts, (name, *order, *policies), others):
        some = table.slice(0, TOKENS - rows)
        rows += some.num_rows
        ids = dense(some.column(name)).dictionary_encode()
        if ids.null_count:
            raise ValueError("a token belongs to no sequence")  # which the reader says better
        known = [numbers.setdefault(key, len(numbers)) for key in ids.dictionary.to_pylist()]
        held[""].append(np.array(known, np.int64)[ids.indices.to_numpy()])
        for one in (one for one in held if one):
            there = one in some.schema.names
            held[one].append(_flat(*narrow(some.column(one))) if there else np.full(some.num_rows, np.nan))
        if rows == TOKENS:
            break
    found = {one: _joined(values) for one, values in held.items()}
    number, cut = found.pop(""), rows < sum(part.rows for part in parts)
    keep = np.lexsort((found.pop(order[0]), number)) if order else np.argsort(number, kind="stable")
    keep = keep[number[keep] != number[-1]] if cut else keep
    lengths = np.unique(number[keep], return_counts=True)[1]
    rollout, train = (found.pop(one)[keep] for one in policies)
    each = {one: Column(values[keep], lengths) for one, values in found.items()}
    return Head(lengths, (lengths, (rollout == 0) & (train == 0)), each, True, cut)


def _flat(values: Array, null: Flags | None) -> Array:
    """Return values as floats, NaN where null."""
    return values.astype(np.float64) if null is None else np.where(null, np.nan, values)


def _joined(arrays: Iterable[Array]) -> Array:
    return np.concatenate(list(arrays))


# ---------------------------------------------------------------- padding


class Padding(NamedTuple):
    """Sequences that end in padding, of how many, and its share of their tokens."""

    padded: int
    rows: int
    share: float


def padding(lengths: Ints, zero: Flags) -> Padding | None:
    """Find padding at the end of most sequences.

    Args:
        lengths: tokens per sequence, [S].
        zero: whether both log-probs of a token are exactly 0, [T].
    """
    lengths = lengths[lengths > 0]
    if len(lengths) < FEWEST or np.mean(lengths[1:] == lengths[:-1]) < TOGETHER:
        return None
    begins, ends = starts(lengths)[:-1], starts(lengths)[1:]
    last = np.maximum.reduceat(np.where(zero, -1, np.arange(len(zero))), begins)  # token that is not 0
    some = last >= 0  # a column of zeros says nothing
    tail = (ends - 1 - last)[some]
    if some.mean() <= 0.5 or (tail > 0).mean() <= 0.5:
        return None
    edges = np.flatnonzero(np.diff(np.concatenate(([0], zero.astype(np.int8), [0]))))
    first, length = edges[::2], np.diff(edges)[::2]
    row = np.searchsorted(ends, first, side="right")
    longest = np.zeros(len(lengths), np.int64)  # run of zeros before the last token that is none
    inside = first < last[row]
    np.maximum.at(longest, row[inside], length[inside])
    mean = tail[tail > 0].mean()
    if mean < max(SEVERAL, 2 * longest[some].mean()) or (mean < MANY and np.ptp(tail) < mean / 2):
        return None
    return Padding(int((tail > 0).sum()), len(tail), float(tail.sum() / lengths[some].sum()))
