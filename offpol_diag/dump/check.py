"""Bad rows: find, refuse or skip them, and add up what a pass has seen.

Most columns pass by their smallest and largest value alone; single tokens are looked at only where these
fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations

import numpy as np

from offpol_diag.dump.pack import Array, Flags, Ints, Ragged, Rows, counts, span, starts
from offpol_diag.dump.schema import (
    ADVANTAGES,
    CURRENT,
    DIGESTS,
    MASK,
    OLD,
    PROMPT_IDS,
    PROMPT_LENGTH,
    REWARDS,
    ROLLOUT,
    WEIGHT_VERSIONS,
)
from offpol_diag.errors import DumpError

TOLERANCE = 1e-3
"""Largest log-prob in nats that counts as rounding: in reduced precision a certain token can exceed 0."""
MOST_TOKENS = 1 << 22
"""Most tokens of one sequence, masked ones included."""
LIMIT = 2.0**63
"""Upper limit on the magnitude of steps, lags and versions, which are stored as 64-bit integers."""
LARGE = "and a number between -2^63 and 2^63 is needed"
UNKNOWN = -1
"""Version of weights of which nothing is known."""
EXAMPLES = 5
"""Number of skipped rows that are described."""
JUDGED_AT = 32
"""Tokens from which on a column can be told to have the wrong sign."""
SKIP = "mend the writer, or leave such rows out with --on-bad-row skip"
NEGATE = "a log-probability is at most 0; if the column holds negative log-likelihoods, negate it"


@dataclass(frozen=True)
class Problem:
    """What is wrong with some rows (ascending indices) of a column; `detail` says it of the i-th of them."""

    role: str
    rows: Ints
    detail: Callable[[int], str]
    hint: str = SKIP


# ---------------------------------------------------------------- checks, on rows that passed those before


def shapes(rows: Rows) -> Iterator[Problem]:
    """Find null lists, rows whose lists differ in length, and rows of too many tokens."""
    tokens = rows.lengths
    for role, column in rows.lists.items():
        yield from _at_rows(
            role,
            column.absent,
            lambda _: "there is null where a list belongs",
            f"every column needs a list in every row; {SKIP}",
        )
        differs = ~column.absent & (column.lengths != tokens)

        def unequal(row: int, lengths: Ints = column.lengths) -> str:
            return f"it holds {lengths[row]} values and {ROLLOUT} holds {tokens[row]}"

        yield from _at_rows(
            role, differs, unequal, f"all token columns of a row hold one value per response token; {SKIP}"
        )
    many = f"tokens, and a sequence has at most {MOST_TOKENS}"
    yield from _at_rows(
        ROLLOUT,
        tokens > MOST_TOKENS,
        lambda row: f"it holds {tokens[row]} {many}",
        f"write one sequence per row; {SKIP}",
    )


def mask(rows: Rows) -> Iterator[Problem]:
    """Find masks with values other than 0 and 1."""
    column = rows.lists.get(MASK)
    if column is None:
        return
    first, last = column.span
    if column.null is None and column.values.dtype.kind in "iu" and first >= 0 and last <= 1:
        return
    odd = (column.values != 0) & (column.values != 1)
    odd = odd if column.null is None else odd | column.null
    hint = f"1 is a token that counts, 0 one that does not; {SKIP}"
    yield from _at_tokens(MASK, column, odd, "a mask is 0 or 1", hint)


def tokens(rows: Rows) -> Iterator[Problem]:
    """Find values that are not finite where the mask is 1, rollout log-probs above 0, and odd versions."""
    for role, column in rows.lists.items():
        if not at_most(sys.float_info.max, column, rows):
            bad = ~np.isfinite(column.values) & rows.live
            bad = bad if column.null is None else bad | (column.null & rows.live)
            hint = f"if such tokens do not count, set their {MASK} to 0; if not, {SKIP}"
            yield from _at_tokens(role, column, bad, "a token that counts needs a finite value", hint)
    column = rows.lists[ROLLOUT]
    if not at_most(TOLERANCE, column, rows):
        bad = (column.values.astype(np.float64) > TOLERANCE) & rows.live
        yield from _at_tokens(
            ROLLOUT, column, bad, "a log-probability is at most 0", f"{NEGATE}; if not, {SKIP}"
        )
    if (versions := rows.lists.get(WEIGHT_VERSIONS)) is not None:
        why = f"a version is at least 0, or {UNKNOWN} where it is unknown"
        yield from _at_tokens(WEIGHT_VERSIONS, versions, (versions.values < UNKNOWN) & rows.live, why)
        hint = f"write the engine's counter of updates, and tokens in the order of sampling; {SKIP}"
        older = falls(versions.values, rows.live, rows.offsets)
        yield from _at_tokens(
            WEIGHT_VERSIONS, versions, older, "the tokens before it are of a later version", hint
        )


def row_values(rows: Rows) -> Iterator[Problem]:
    """Find numbers per row that are none, prompts with a null in them, and digests of one side only."""
    for role, values in rows.numbers(ADVANTAGES, REWARDS).items():
        yield from _at_rows(
            role, ~np.isfinite(values), lambda _: "it is null, NaN or infinite, and a finite number is needed"
        )
    for role, values in counts(rows).items():
        yield from _at_rows(role, np.abs(values) >= LIMIT, _value(values, LARGE))
        if role == PROMPT_LENGTH:
            with np.errstate(invalid="ignore"):  # null is NaN
                odd = (values < 0) | ((values != np.floor(values)) & np.isfinite(values))
            yield from _at_rows(role, odd, _value(values, "and no length"))
    if (lists := rows.prompts) is not None and lists.null is not None:
        row = np.repeat(np.arange(rows.many), lists.lengths)
        holes = np.bincount(row[lists.null], minlength=rows.many) > 0
        yield from _at_rows(PROMPT_IDS, holes, lambda _: "there is null among its values")
    null = {
        role: rows.columns[role].is_null().to_numpy(zero_copy_only=False)
        for role in DIGESTS
        if role in rows.columns
    }
    hint = f"digests are compared: write both of a sequence, or null for both; {SKIP}"
    for role, other in permutations(null, 2):
        yield from _at_rows(role, null[role] & ~null[other], partial(_lone, other), hint)


def _value(values: Array, why: str) -> Callable[[int], str]:
    return lambda row: f"it is {values[row]:.6g}, {why}"


def _lone(other: str, _: int) -> str:
    return f"it is null, and {other} is not"


CHECKS = shapes, mask, tokens, row_values


def at_most(high: float, column: Ragged, rows: Rows) -> bool:
    """Return whether every unmasked token has a finite value of at most `high`."""
    if column.null is not None and (column.null & rows.live).any():
        return False
    low = -sys.float_info.max
    first, last = column.span
    if low <= first and last <= high:  # neither holds of NaN
        return True
    first, last = span(rows.unmasked(column.values))
    return low <= first and last <= high


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


def _at_rows(role: str, bad: Flags, detail: Callable[[int], str], hint: str = SKIP) -> Iterator[Problem]:
    """Yield a Problem for the rows flagged in `bad` [S], if any."""
    found = np.flatnonzero(bad)
    if found.size:
        yield Problem(role, found, lambda i: detail(int(found[i])), hint)


def _at_tokens(role: str, column: Ragged, bad: Flags, why: str, hint: str = SKIP) -> Iterator[Problem]:
    """Yield a Problem for rows with tokens flagged in `bad` [T]; it names each row's first such token."""
    found = np.flatnonzero(bad)
    if not found.size:
        return
    offsets = starts(column.lengths)
    rows, index = np.unique(np.searchsorted(offsets, found, side="right") - 1, return_index=True)
    first = found[index]

    def detail(i: int) -> str:
        null = column.null is not None and column.null[first[i]]
        shown = "null" if null else f"{column.values[first[i]]:.6g}"
        return f"token {first[i] - offsets[rows[i]]} is {shown}, and {why}"

    yield Problem(role, rows, detail, hint)


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
        for role, one in more.signs.items():
            had = self.signs.setdefault(role, Signs())
            first = had.first or one.first
            self.signs[role] = Signs(
                had.tokens + one.tokens, had.positive + one.positive, had.sizeable + one.sizeable, first
            )


def good_rows(rows: Rows, skipped: Skipped | None) -> Rows:
    """Refuse the first bad row, or leave bad rows out and count them in `skipped`."""
    for check in CHECKS:
        if not (problems := list(check(rows))):
            continue
        if skipped is None:
            worst = min(problems, key=lambda one: int(one.rows[0]))
            raise DumpError(_said(rows, worst, 0), worst.hint)
        bad = np.zeros(rows.many, np.bool_)
        for one in problems:
            for i, row in enumerate(one.rows.tolist()):
                if not bad[row] and len(skipped.examples) < EXAMPLES:
                    skipped.examples.append(_said(rows, one, i))
                bad[row] = True
        skipped.count += int(bad.sum())
        rows = rows.only(~bad)
    return rows


def _said(rows: Rows, problem: Problem, i: int) -> str:
    column = rows.plan.columns.get(problem.role, problem.role)
    return f"{rows.place(int(problem.rows[i]))}, column {column!r}: {problem.detail(i)}"


def signs(rows: Rows) -> dict[str, Signs]:
    """Count the signs of the train columns; without a positive value all tokens are sizeable."""
    found = {}
    for role in (role for role in (OLD, CURRENT) if role in rows.lists):
        found[role] = one = Signs(rows.kept, sizeable=rows.kept)
        if not at_most(TOLERANCE, rows.lists[role], rows):
            values = np.where(rows.live, rows.lists[role].values, 0.0).astype(np.float64)
            positive = np.flatnonzero(values > TOLERANCE)
            one.positive, one.sizeable = positive.size, int((np.abs(values) > TOLERANCE).sum())
            if positive.size:
                row = int(np.searchsorted(rows.offsets, positive[0], side="right")) - 1
                at = f"{rows.place(row)}, column {rows.plan.columns[role]!r}"
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
