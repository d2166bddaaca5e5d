"""Refuse a dump without a mask in which a column looks like one, or whose rows are padded with zeros.

Without a mask every token counts, padding and tool output included. Neither depends on how a dump is cut.

A column that looks like a mask is found when the dump is opened: at its beginning it holds a 0 or a 1 for
each token, and everywhere no other number, and both.

Padding is found as the dump is read, in its first sequences. A token that was sampled may have log-prob 0 in
both columns, if the policies are certain of it, and so may several at the end of a response. Padding differs:
rows of equal length lie together, and their zeros at the end are more than elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns, parquet
from offpol_diag.readers.columns import NONE, Plan, is_list, may_mask, no_mask, unnamed_mask
from offpol_diag.readers.decode import Flags, Ints, Ragged, Rows, ragged, starts
from offpol_diag.readers.sources import Part

ROWS, TOKENS = 1 << 12, 1 << 18
"""Rows and tokens at the beginning of the dump that are looked at, at most."""
FIRST, AT_ONCE = 1 << 12, 1 << 16
"""Tokens that are looked at first, and per table."""
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
    read, many = set(plan.names), Counter(parts[0].schema.names)
    unread = (one for one in parts[0].schema if one.name not in read and many[one.name] == 1)
    within = [one.name for one in unread if is_list(one.type) and may_mask(one.name, one.type, plan.long)]
    found = list[str]()
    with suppress(DumpError):  # what is damaged is refused where it is read
        found = list(_like_masks(parts, plan, within[:MOST])) if within else []
    if found:
        raise unnamed_mask(str(parts[0].path), found)


def _like_masks(parts: Sequence[Part], plan: Plan, names: Sequence[str]) -> Iterator[str]:
    """Yield the columns of lists that hold a 0 or a 1 for each token at the beginning, and both in all."""
    rollout = plan.columns[columns.ROLLOUT]
    _, first = next(parquet.tables(parts[0], [rollout, *names], FIRST, glimpse=True))  # most are told by this
    for name in names:
        flags = _flags(ragged(first.column(name)))
        if flags and _begins(parts, rollout, name) and _of_0_and_1(parts, name):
            yield name


def _flags(column: Ragged) -> bool:
    return column.null is None and bool(((column.values == 0) | (column.values == 1)).all())


def _begins(parts: Sequence[Part], rollout: str, name: str) -> bool:
    """Return whether a column begins with a 0 or a 1 for each token, in nearly all of the first sequences."""
    same, rows, tokens = 0, 0, TOKENS
    for part in parts:
        if name not in part.schema.names:
            return False
        for _, table in parquet.tables(part, [rollout, name], AT_ONCE, glimpse=True):
            sizes = pc.list_value_length(table.column(0)).fill_null(0).to_numpy().astype(np.int64)
            room = min(int(np.searchsorted(starts(sizes)[:-1], tokens)), ROWS - rows)
            found = ragged(table.column(1).slice(0, room))
            if not _flags(found):
                return False
            filled = sizes[:room] > 0
            same += int((found.lengths == sizes[:room])[filled].sum())
            rows, tokens = rows + int(filled.sum()), tokens - int(sizes[:room].sum())
            if rows >= ROWS or tokens <= 0:
                return same >= NEARLY_ALL * rows
    return rows > 0 and same >= NEARLY_ALL * rows


def _of_0_and_1(parts: Sequence[Part], name: str) -> bool:
    """Return whether a column of lists holds both 0 and 1, and no other number, in the files that have it."""
    seen = set[float]()
    for part in (part for part in parts if name in part.schema.names):
        for _, table in parquet.tables(part, [name], TOKENS):
            found = ragged(table.column(0))
            seen.update(np.unique(found.values).tolist() if found.null is None else [np.nan])
            if not seen <= {0, 1}:
                return False
    return seen == {0, 1}


# ---------------------------------------------------------------- padding


class Padding(NamedTuple):
    """Sequences that end in padding, of how many, and its share of their tokens."""

    padded: int
    rows: int
    share: float


def next_ends(rows: Rows, seen: Sequence[Ints]) -> list[Ints]:
    """Return how the next sequences end; `seen` are the ends of those before.

    Nothing is looked for if a column is the mask, or the user says that there is none, nor after the first
    `ROWS` sequences and `TOKENS` tokens.
    """
    enough = sum(map(len, seen)) >= ROWS or sum(int(one[:, 0].sum()) for one in seen) >= TOKENS
    train = rows.lists.get(columns.OLD, rows.lists.get(columns.CURRENT))
    if columns.MASK in rows.plan.columns or rows.plan.unmasked or enough or train is None:
        return []
    many = min(len(rows.lengths), ROWS, int(np.searchsorted(rows.offsets[:-1], TOKENS)))
    end = int(rows.offsets[many])
    zero = (rows.lists[columns.ROLLOUT].values[:end] == 0) & (train.values[:end] == 0)
    return [ends(rows.lengths[:many], zero)]


def refuse_padding(seen: Sequence[Ints], plan: Plan, name: str, total: int) -> None:
    """Refuse the dump `name` of `total` sequences for how the first ones end.

    Raises:
        DumpError: most of these sequences end in padding.
    """
    head = np.concatenate([np.zeros((0, 3), np.int64), *seen])[:ROWS]
    head = head[: int(np.searchsorted(starts(head[:, 0])[:-1], TOKENS))]
    found = padding(head)
    if found is None:
        return
    one = plan.columns[columns.ROLLOUT]
    two = plan.columns.get(columns.OLD) or plan.columns[columns.CURRENT]
    first = "the first " if total > len(head) else ""
    raise DumpError(
        f"{name}: columns {one!r} and {two!r} are both exactly 0 from some token to the end in "
        f"{found.padded:,} of {first}{found.rows:,} sequences, in {found.share:.0%} of the tokens: "
        "padding, and nothing says which column is the mask",
        f"name it with --columns mask=NAME, or add it with --join FILE:{columns.MASK}; if those tokens "
        f"were sampled, say --columns mask={NONE}",
    )


def ends(lengths: Ints, zero: Flags) -> Ints:
    """Return how sequences end, [S, 3].

    These are the tokens of each, the zeros of both columns at its end, and the longest run of them before its
    last token that is not zero.

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
    """Find padding at the end of most sequences; `rows` are their `ends`, [S, 3]."""
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
