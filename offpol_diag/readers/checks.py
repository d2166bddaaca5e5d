"""Which rows are bad, and why.

Most columns are found right by their smallest and largest value; only where those are not is every token
looked at.

A check takes rows and says what is wrong with some of them. The checks run in the order of `CHECKS`,
each on the rows that passed those before it: values cannot be compared before the lists are known to be
equally long.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from offpol_diag.readers import columns
from offpol_diag.readers.ragged import Flags, Floats, Ints, Ragged, span, starts
from offpol_diag.readers.rows import Rows

# Above 0 by this much (nats) is rounding: reduced precision puts a sure token a little above 0.
TOLERANCE = 1e-3
# What steps, lags and versions stay below: what is made of them is stored in 64 bits.
LIMIT = 2.0**63

SKIP = "mend the writer, or leave such rows out with --on-bad-row skip"
HINTS = {
    "null": f"every column needs a list in every row, an empty one for an empty response; {SKIP}",
    "length": f"all token columns of a row hold one value per response token; {SKIP}",
    "mask": f"1 is a token that counts, 0 one that does not; {SKIP}",
    "value": f"if such tokens do not count, set their {columns.MASK} to 0; if not, {SKIP}",
    "positive": f"if the column holds negative log-likelihoods, negate it; if not, {SKIP}",
    "number": SKIP,
}


@dataclass(frozen=True)
class Problem:
    """Something wrong with some rows of a slice.

    Attributes:
        role: our name of the column.
        rows: indices of the bad rows in the slice, ascending.
        detail: what is wrong with the i-th of them.
        hint: what to do.
    """

    role: str
    rows: Ints
    detail: Callable[[int], str]
    hint: str


Check = Callable[[Rows], Iterator[Problem]]


def shapes(rows: Rows) -> Iterator[Problem]:
    """A null where a list belongs; lists of different length in a row."""
    for role, column in rows.lists.items():
        yield from _at_rows(role, column.absent, lambda _: "there is null where a list belongs", "null")
        yield from _at_rows(
            role, ~column.absent & (column.lengths != rows.lengths), _differs(column, rows), "length"
        )


def _differs(column: Ragged, rows: Rows) -> Callable[[int], str]:
    return lambda row: (
        f"it holds {column.lengths[row]} values and {columns.ROLLOUT} holds {rows.lengths[row]}"
    )


def mask_values(rows: Rows) -> Iterator[Problem]:
    """A mask of something else than 0 and 1."""
    mask = rows.lists.get(columns.MASK)
    if mask is not None and not _is_zero_or_one(mask):
        odd = (mask.values != 0) & (mask.values != 1)
        yield from _at_tokens(columns.MASK, mask, _with_null(odd, mask), "a mask is 0 or 1", "mask")


def _is_zero_or_one(mask: Ragged) -> bool:
    low, high = mask.span
    return mask.null is None and mask.values.dtype.kind in "iu" and low >= 0 and high <= 1


def token_values(rows: Rows) -> Iterator[Problem]:
    """A null, NaN or infinity at a token that counts."""
    for role, column in rows.lists.items():
        if at_most(sys.float_info.max, column, rows):
            continue
        bad = _with_null(~np.isfinite(column.values), column) & rows.live
        yield from _at_tokens(role, column, bad, "a token that counts needs a finite value", "value")


def rollout_signs(rows: Rows) -> Iterator[Problem]:
    """A rollout log-prob above 0: the policy that sampled the token gave it a probability, so it has one."""
    column = rows.lists[columns.ROLLOUT]
    if not at_most(TOLERANCE, column, rows):
        bad = (column.values.astype(np.float64) > TOLERANCE) & rows.live
        yield from _at_tokens(columns.ROLLOUT, column, bad, "a log-probability is at most 0", "positive")


def at_most(high: float, column: Ragged, rows: Rows) -> bool:
    """Whether every token that counts has a finite value up to `high`; masked ones most often have too."""
    if column.null is not None and (column.null & rows.live).any():
        return False
    return _inside(column.span, high) or _inside(span(rows.let_through(column.values)), high)


def _inside(found: tuple[float, float], high: float) -> bool:
    return -sys.float_info.max <= found[0] and found[1] <= high  # neither holds of NaN


def number_values(rows: Rows) -> Iterator[Problem]:
    """A null, NaN or infinity where each row has one number."""
    for role, values in rows.numbers.items():
        yield from _at_rows(role, ~np.isfinite(values), _not_finite, "number")


def _not_finite(_: int) -> str:
    return "it is null, NaN or infinite, and a finite number is needed"


def count_values(rows: Rows) -> Iterator[Problem]:
    """A step, lag or version that no integer of 64 bits holds; null and NaN are let through."""
    for role, values in rows.counts.items():
        yield from _at_rows(role, np.abs(values) >= LIMIT, _too_large(values), "number")


def _too_large(values: Floats) -> Callable[[int], str]:
    return lambda row: f"it is {values[row]:.6g}, and a number between -2^63 and 2^63 is needed"


CHECKS: tuple[Check, ...] = (shapes, mask_values, token_values, rollout_signs, number_values, count_values)


def _with_null(bad: Flags, column: Ragged) -> Flags:
    return bad if column.null is None else bad | column.null


def _at_rows(role: str, bad: Flags, detail: Callable[[int], str], hint: str) -> Iterator[Problem]:
    """The problem of the rows that are bad, [S] bool; `detail` is told the row."""
    found = np.flatnonzero(bad)
    if found.size:
        yield Problem(role, found, lambda i: detail(found[i]), HINTS[hint])


def _at_tokens(role: str, column: Ragged, bad: Flags, why: str, hint: str) -> Iterator[Problem]:
    """The problem of the rows with bad tokens, [T] bool; the first bad token of each row is named."""
    found = np.flatnonzero(bad)
    if not found.size:
        return
    offsets = starts(column.lengths)
    rows, index = np.unique(row_of(found, offsets), return_index=True)
    tokens = found[index]
    yield Problem(
        role,
        rows,
        lambda i: f"token {tokens[i] - offsets[rows[i]]} is {_shown(column, tokens[i])}, and {why}",
        HINTS[hint],
    )


def row_of(tokens: Ints, offsets: Ints) -> Ints:
    """The row that each token [N] is in; rows start at `offsets` [S+1]."""
    return np.searchsorted(offsets, tokens, side="right") - 1


def _shown(column: Ragged, token: int) -> str:
    null = column.null is not None and column.null[token]
    return "null" if null else f"{column.values[token]:.6g}"
