"""Bad rows: find, refuse or skip them, and add up what a pass has seen.

Most columns pass by their smallest and largest value alone; single tokens are looked at only where these
fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import NamedTuple

import numpy as np

from offpol_diag.dump import schema
from offpol_diag.dump.pack import Flags, Ints, Ragged, Rows, starts
from offpol_diag.errors import DumpError

TOLERANCE = 1e-3
"""Largest log-prob in nats that counts as rounding: in reduced precision a certain token can exceed 0."""
MOST_TOKENS = 1 << 22
"""Most tokens of one sequence, masked ones included."""
LIMIT = 2.0**63
"""Upper limit on the magnitude of steps, lags and versions, which are stored as 64-bit integers."""
UNKNOWN = -1
"""Version of weights of which nothing is known."""
EXAMPLES = 5
"""Number of skipped rows that are described."""
JUDGED_AT = 32
"""Tokens from which on a column can be told to have the wrong sign."""
SKIP = "mend the writer, or leave such rows out with --on-bad-row skip"
NEGATE = "a log-probability is at most 0; if the column holds negative log-likelihoods, negate it"
FINITE = sys.float_info.max


class Bound(NamedTuple):
    """What the unmasked tokens of a column must lie in, ends included; `column` is empty for all of them."""

    column: str
    low: float
    high: float
    why: str
    hint: str = SKIP


UNMASK = f"if such tokens do not count, set their {schema.MASK} to 0; if not, {SKIP}"
VERSIONS = f"a version is at least 0, or {UNKNOWN} where it is unknown"
BOUNDS = (
    Bound("", -FINITE, FINITE, "a token that counts needs a finite value", UNMASK),
    Bound(schema.ROLLOUT, -FINITE, TOLERANCE, "a log-probability is at most 0", f"{NEGATE}; if not, {SKIP}"),
    Bound(schema.WEIGHT_VERSIONS, UNKNOWN, FINITE, VERSIONS),
)


class Problem(NamedTuple):
    """What is wrong with a column: number of a row → what is wrong in it, rows ascending."""

    column: str
    rows: dict[int, str]
    hint: str = SKIP


# ---------------------------------------------------------------- checks


def shapes(rows: Rows) -> Iterator[Problem]:
    """Find null lists, rows whose lists differ in length, and rows of too many tokens."""
    tokens = rows.lengths
    for name, column in rows.lists.items():
        null = dict.fromkeys(_at(column.absent), "there is null where a list belongs")
        yield Problem(name, null, f"every column needs a list in every row; {SKIP}")
        unequal = {
            row: f"it holds {column.lengths[row]} values and {schema.ROLLOUT} holds {tokens[row]}"
            for row in _at(~column.absent & (column.lengths != tokens))
        }
        yield Problem(name, unequal, f"all token columns of a row hold one value per response token; {SKIP}")
    long = {
        row: f"it holds {tokens[row]} tokens, and a sequence has at most {MOST_TOKENS}"
        for row in _at(tokens > MOST_TOKENS)
    }
    yield Problem(schema.ROLLOUT, long, f"write one sequence per row; {SKIP}")


def of_tokens(rows: Rows) -> Iterator[Problem]:
    """Find values of tokens that cannot be, where the mask is 1; lists of a row have one length by now."""
    for name, column in rows.lists.items():
        x, null = column.values, False if column.null is None else column.null
        if name == schema.MASK:
            low, high = column.span
            if x.dtype.kind == "f" or column.null is not None or low < 0 or high > 1:
                odd = null | ((x != 0) & (x != 1))
                hint = f"1 is a token that counts, 0 one that does not; {SKIP}"
                yield Problem(name, _first(column, odd, "a mask is 0 or 1"), hint)
            continue
        for one in (one for one in BOUNDS if one.column in ("", name)):
            if not within(one.low, one.high, column, rows):
                wide = x.astype(np.float64)  # bounds are exact however narrow the values are
                bad = rows.live & (null | ~((wide >= one.low) & (wide <= one.high)))
                yield Problem(name, _first(column, bad, one.why), one.hint)
    if (versions := rows.lists.get(schema.WEIGHT_VERSIONS)) is not None:
        older = falls(versions.values, rows.live, rows.offsets)
        found = _first(versions, older, "the tokens before it are of a later version")
        hint = f"write the engine's counter of updates, and tokens in the order of sampling; {SKIP}"
        yield Problem(schema.WEIGHT_VERSIONS, found, hint)


def of_rows(rows: Rows) -> Iterator[Problem]:
    """Find values of rows that cannot be: numbers, prompts, and digests of one side only."""
    for name, x in rows.numbers(schema.ADVANTAGES, schema.REWARDS).items():
        what = "it is null, NaN or infinite, and a finite number is needed"
        yield Problem(name, dict.fromkeys(_at(~np.isfinite(x)), what))
    for name, x in rows.numbers(*schema.COUNTS).items():  # null is NaN, and no fault
        what = "and a number between -2^63 and 2^63 is needed"
        yield Problem(name, {row: f"it is {x[row]:.6g}, {what}" for row in _at(np.abs(x) >= LIMIT)})
        if name == schema.PROMPT_LENGTH:
            odd = (x < 0) | ((x != np.floor(x)) & np.isfinite(x))
            yield Problem(name, {row: f"it is {x[row]:.6g}, and no length" for row in _at(odd)})
    if (lists := rows.prompts) is not None and lists.null is not None:
        holes = _first(lists, lists.null, "")
        yield Problem(schema.PROMPT_IDS, dict.fromkeys(holes, "there is null among its values"))
    there = (name for name in schema.DIGESTS if name in rows.columns)
    null = {name: rows.columns[name].is_null().to_numpy(zero_copy_only=False) for name in there}
    for name, other in permutations(null, 2):
        lone = dict.fromkeys(_at(null[name] & ~null[other]), f"it is null, and {other} is not")
        yield Problem(name, lone, f"digests are compared: write both of a sequence, or null for both; {SKIP}")


CHECKS = shapes, of_tokens, of_rows
"""Each is of rows that passed those before it."""


def within(low: float, high: float, column: Ragged, rows: Rows) -> bool:
    """Return whether every unmasked token has a value from `low` to `high`."""
    if column.null is not None and (column.null & rows.live).any():
        return False
    spans = (one.span for one in (column, replace(column, values=rows.unmasked(column.values))))
    return any(low <= first and last <= high for first, last in spans)  # neither holds of NaN


def falls(versions: Ints, live: Flags, offsets: Ints) -> Flags:
    """Return flags of tokens of older weights than the token before them in their response, [T].

    Args:
        versions: of each token, [T].
        live: which tokens count, [T]; those that do not are passed over, as are unknown versions.
        offsets: where each response starts, [S+1].
    """
    at = np.flatnonzero(live & (versions > UNKNOWN))
    row = np.searchsorted(offsets, at, side="right")
    found = np.zeros(len(versions), np.bool_)
    found[at[1:][(np.diff(versions[at]) < 0) & (np.diff(row) == 0)]] = True
    return found


def _at(flags: Flags) -> list[int]:
    found: list[int] = np.flatnonzero(flags).tolist()
    return found


def _first(column: Ragged, bad: Flags, why: str) -> dict[int, str]:
    """Return of each row with tokens flagged in `bad` [T] what is wrong with the first of them."""
    offsets, at = starts(column.lengths), np.flatnonzero(bad)
    rows, index = np.unique(np.searchsorted(offsets, at, side="right") - 1, return_index=True)
    found = dict[int, str]()
    for row, token in zip(rows.tolist(), at[index].tolist(), strict=True):
        shown = "null" if column.null is not None and column.null[token] else f"{column.values[token]:.6g}"
        found[row] = f"token {token - offsets[row]} is {shown}, and {why}"
    return found


# ---------------------------------------------------------------- what a pass has seen


@dataclass
class Skipped:
    """Number of skipped rows, and what is wrong with the first `EXAMPLES` of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Signs:
    """Signs of the unmasked tokens of a train column; `sizeable` ones are further from 0 than rounding."""

    tokens: int = 0
    positive: int = 0
    sizeable: int = 0
    first: str = ""


@dataclass
class Seen:
    """What a pass has seen of the rows: bad ones included, unmasked tokens, signs by canonical name."""

    rows: int = 0
    tokens: int = 0
    skipped: Skipped = field(default_factory=Skipped)
    signs: dict[str, Signs] = field(default_factory=dict)

    def add(self, more: Seen) -> None:
        """Add what was seen of later rows."""
        self.rows += more.rows
        self.tokens += more.tokens
        self.skipped.count += more.skipped.count
        self.skipped.examples += more.skipped.examples[: EXAMPLES - len(self.skipped.examples)]
        for name, one in more.signs.items():
            had = self.signs.setdefault(name, Signs())
            had.tokens, had.positive = had.tokens + one.tokens, had.positive + one.positive
            had.sizeable, had.first = had.sizeable + one.sizeable, had.first or one.first


def good_rows(rows: Rows, skipped: Skipped | None) -> Rows:
    """Refuse the first bad row, or leave bad rows out and count them in `skipped`."""
    for check in CHECKS:
        problems = [one for one in check(rows) if one.rows]
        if not problems:
            continue
        said = dict[int, tuple[str, str]]()
        for one in problems:
            shown = rows.plan.columns.get(one.column, one.column)
            for row, what in one.rows.items():
                said.setdefault(row, (f"{rows.place(row)}, column {shown!r}: {what}", one.hint))
        if skipped is None:
            raise DumpError(*said[min(said)])
        skipped.count += len(said)
        skipped.examples += [said[row][0] for row in sorted(said)[: EXAMPLES - len(skipped.examples)]]
        rows = rows.only(~np.isin(np.arange(rows.many), [*said]))
    return rows


def signs(rows: Rows) -> dict[str, Signs]:
    """Count the signs of the train columns; without a positive value all tokens are sizeable."""
    found = {}
    for name in (name for name in (schema.OLD, schema.CURRENT) if name in rows.lists):
        found[name] = one = Signs(rows.kept.size, sizeable=rows.kept.size)
        if not within(-FINITE, TOLERANCE, rows.lists[name], rows):
            values = np.where(rows.live, rows.lists[name].values, 0.0).astype(np.float64)
            positive = np.flatnonzero(values > TOLERANCE)
            one.positive, one.sizeable = positive.size, int((np.abs(values) > TOLERANCE).sum())
            if positive.size:
                row = int(np.searchsorted(rows.offsets, positive[0], side="right")) - 1
                at = f"{rows.place(row)}, column {rows.plan.columns[name]!r}"
                one.first = f"{at}: token {positive[0] - rows.offsets[row]} is {values[positive[0]]:.6g}"
    return found


def judge(found: Signs) -> None:
    """Refuse a train column that is positive more often than not: it has the wrong sign."""
    if found.tokens >= JUDGED_AT and 2 * found.positive > found.sizeable:
        what = f"{found.first}, and {found.positive} of {found.tokens} tokens are above 0 like it"
        raise DumpError(f"{what}: the column has the wrong sign", NEGATE)


def remark(column: str, found: Signs) -> str:
    """Say that some tokens of a column are above 0."""
    share = found.positive / found.tokens
    return (
        f"{found.positive} of {found.tokens} tokens ({share:.2%}) of {column!r} are above 0 by more than "
        f"{TOLERANCE:g} nats (first: {found.first}); such values are no log-probabilities"
    )
