"""Validate the values of rows, refuse or skip bad rows, and add up what a pass has seen of them.

Most columns pass by their minimum and maximum alone; single tokens are checked only where these fail.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import permutations

import numpy as np
import pyarrow.compute as pc

from offpol_diag import versions
from offpol_diag.errors import DumpError
from offpol_diag.readers import columns
from offpol_diag.readers.decode import MOST_TOKENS, Flags, Floats, Ints, Ragged, Rows, span, starts
from offpol_diag.writer import TOLERANCE

LIMIT = 2.0**63
"""Upper limit on the magnitude of steps, lags and versions, which are stored as 64-bit integers."""
EXAMPLES = 5
"""Number of skipped rows that are described individually."""

SKIP = "mend the writer, or leave such rows out with --on-bad-row skip"
HINTS = {
    "null": f"every column needs a list in every row, an empty one for an empty response; {SKIP}",
    "length": f"all token columns of a row hold one value per response token; {SKIP}",
    "long": f"write one sequence per row; {SKIP}",
    "mask": f"1 is a token that counts, 0 one that does not; {SKIP}",
    "value": f"if such tokens do not count, set their {columns.MASK} to 0; if not, {SKIP}",
    "positive": f"if the column holds negative log-likelihoods, negate it; if not, {SKIP}",
    "number": SKIP,
    "versions": f"a response has the version of each token's weights, or runs [[0, 5], [120, 6]]; {SKIP}",
    "falls": f"write the engine's counter of updates, and tokens in the order of sampling; {SKIP}",
    "prompt": f"it is the number of tokens of the prompt; {SKIP}",
    "ids": f"a prompt has the id of each of its tokens, or null where it is unknown; {SKIP}",
    "digests": f"digests are compared: write both of a sequence, or null for both; {SKIP}",
}


# ---------------------------------------------------------------- checks of rows


@dataclass(frozen=True)
class Problem:
    """A defect in rows (ascending indices); `detail` describes the i-th of them, `role` names the column."""

    role: str
    rows: Ints
    detail: Callable[[int], str]
    hint: str


def shapes(rows: Rows) -> Iterator[Problem]:
    """Find null lists, rows whose lists differ in length, and rows of more than `MOST_TOKENS` tokens."""
    tokens = rows.lengths
    too_long = f"tokens, and a sequence has at most {MOST_TOKENS}"
    yield from _at_rows(
        columns.ROLLOUT, tokens > MOST_TOKENS, lambda row: f"it holds {tokens[row]} {too_long}", "long"
    )

    def unequal(row: int, lengths: Ints) -> str:
        return f"it holds {lengths[row]} values and {columns.ROLLOUT} holds {tokens[row]}"

    for role, column in rows.lists.items():
        differs = ~column.absent & (column.lengths != tokens)
        yield from _at_rows(role, column.absent, lambda _: "there is null where a list belongs", "null")
        yield from _at_rows(role, differs, partial(unequal, lengths=column.lengths), "length")
    odd = np.isin(np.arange(len(tokens)), list(rows.odd_runs))
    yield from _at_rows(columns.WEIGHT_VERSIONS, odd, rows.odd_runs.__getitem__, "versions")


def mask_values(rows: Rows) -> Iterator[Problem]:
    """Find mask values other than 0 and 1."""
    mask = rows.lists.get(columns.MASK)
    if mask is None:
        return
    integers = mask.null is None and mask.values.dtype.kind in "iu"
    if not (integers and mask.span[0] >= 0 and mask.span[1] <= 1):
        odd = (mask.values != 0) & (mask.values != 1)
        yield from _at_tokens(columns.MASK, mask, _with_null(odd, mask), "a mask is 0 or 1", "mask")


def token_values(rows: Rows) -> Iterator[Problem]:
    """Find null, NaN and infinite values at unmasked tokens."""
    for role, column in rows.lists.items():
        if not at_most(sys.float_info.max, column, rows):
            bad = _with_null(~np.isfinite(column.values), column) & rows.live
            yield from _at_tokens(role, column, bad, "a token that counts needs a finite value", "value")


def version_values(rows: Rows) -> Iterator[Problem]:
    """Find versions of weights that are none, or that fall within a response."""
    column = rows.lists.get(columns.WEIGHT_VERSIONS)
    if column is not None:
        none = (column.values < versions.UNKNOWN) & rows.live
        why = f"a version is at least 0, or {versions.UNKNOWN} where it is unknown"
        yield from _at_tokens(columns.WEIGHT_VERSIONS, column, none, why, "versions")
        older = versions.falls(column.values, rows.live, rows.offsets)
        why = "the tokens before it are of a later version"
        yield from _at_tokens(columns.WEIGHT_VERSIONS, column, older, why, "falls")


def rollout_signs(rows: Rows) -> Iterator[Problem]:
    """Find rollout log-probs above 0, which are errors: the rollout policy is normalised."""
    column = rows.lists[columns.ROLLOUT]
    if not at_most(TOLERANCE, column, rows):
        bad = (column.values.astype(np.float64) > TOLERANCE) & rows.live
        yield from _at_tokens(columns.ROLLOUT, column, bad, "a log-probability is at most 0", "positive")


def row_values(rows: Rows) -> Iterator[Problem]:
    """Find numbers per row that are not finite, and steps, lags and versions beyond 64-bit integers."""
    detail = "it is null, NaN or infinite, and a finite number is needed"
    for role, values in rows.numbers.items():
        yield from _at_rows(role, ~np.isfinite(values), lambda _: detail, "number")

    def too_large(row: int, values: Floats) -> str:
        return f"it is {values[row]:.6g}, and a number between -2^63 and 2^63 is needed"

    for role, values in rows.counts.items():
        yield from _at_rows(role, np.abs(values) >= LIMIT, partial(too_large, values=values), "number")
    prompts = rows.counts.get(columns.PROMPT_LENGTH, np.zeros(0))
    with np.errstate(invalid="ignore"):  # null is NaN
        odd = (prompts < 0) | ((prompts != np.floor(prompts)) & np.isfinite(prompts))
    yield from _at_rows(
        columns.PROMPT_LENGTH, odd, lambda row: f"it is {prompts[row]:.6g}, and no length", "prompt"
    )


def prompt_values(rows: Rows) -> Iterator[Problem]:
    """Find prompts with a null among their tokens."""
    lists = rows.prompts
    if lists is not None and lists.null is not None:
        many = len(lists.lengths)
        holes = np.bincount(np.repeat(np.arange(many), lists.lengths)[lists.null], minlength=many) > 0
        yield from _at_rows(columns.PROMPT_IDS, holes, lambda _: "there is null among its values", "ids")


def digests(rows: Rows) -> Iterator[Problem]:
    """Find sequences that have the digest of one side's weights without the other's."""
    null = {role: rows.columns[role].is_null() for role in columns.DIGESTS if role in rows.columns}
    for role, other in permutations(null, 2):
        odd = pc.and_not(null[role], null[other]).to_numpy(zero_copy_only=False)
        what = f"it is null, and {other} is not"
        yield from _at_rows(role, odd, lambda _, what=what: what, "digests")  # type: ignore[misc]


CHECKS = (
    *(shapes, mask_values, token_values, version_values, rollout_signs),
    *(row_values, prompt_values, digests),
)
"""Checks in order; each runs on the rows that passed the earlier ones, so values may assume equal lengths."""


def at_most(high: float, column: Ragged, rows: Rows) -> bool:
    """Return whether every unmasked token has a finite value of at most `high`."""
    if column.null is not None and (column.null & rows.live).any():
        return False
    return _inside(column.span, high) or _inside(span(rows.unmasked(column.values)), high)


def _inside(found: tuple[float, float], high: float) -> bool:
    return -sys.float_info.max <= found[0] and found[1] <= high  # neither holds of NaN


def _with_null(bad: Flags, column: Ragged) -> Flags:
    return bad if column.null is None else bad | column.null


def _at_rows(role: str, bad: Flags, detail: Callable[[int], str], hint: str) -> Iterator[Problem]:
    """Yield a Problem for the rows flagged in `bad` [S], if any; `detail` maps a row to its message."""
    found = np.flatnonzero(bad)
    if found.size:
        yield Problem(role, found, lambda i: detail(found[i]), HINTS[hint])


def _at_tokens(
    role: str, column: Ragged, bad: Flags, why: str, hint: str, what: str = "token"
) -> Iterator[Problem]:
    """Yield a Problem for rows with tokens flagged in `bad` [T]; it names each row's first such token."""
    found = np.flatnonzero(bad)
    if not found.size:
        return
    offsets = starts(column.lengths)
    rows, index = np.unique(np.searchsorted(offsets, found, side="right") - 1, return_index=True)
    tokens = found[index]

    def detail(i: int) -> str:
        null = column.null is not None and column.null[tokens[i]]
        shown = "null" if null else f"{column.values[tokens[i]]:.6g}"
        return f"{what} {tokens[i] - offsets[rows[i]]} is {shown}, and {why}"

    yield Problem(role, rows, detail, HINTS[hint])


# ---------------------------------------------------------------- refusing or skipping bad rows


@dataclass
class Skipped:
    """Number of skipped rows, and where the first `EXAMPLES` of them are and why they are bad."""

    count: int = 0
    examples: list[str] = field(default_factory=list)

    def merge(self, more: Skipped) -> None:
        """Add the skipped rows of a later part of the dump."""
        self.count += more.count
        self.examples += more.examples[: EXAMPLES - len(self.examples)]


def good_rows(rows: Rows, skipped: Skipped | None) -> Rows:
    """Refuse the first bad row, or leave bad rows out and count them in `skipped`."""
    for check in CHECKS:
        if problems := list(check(rows)):
            rows = _without(rows, problems, skipped)
    return rows


def _without(rows: Rows, problems: list[Problem], skipped: Skipped | None) -> Rows:
    def bad_row(problem: Problem, index: int) -> str:
        column = rows.plan.columns.get(problem.role, problem.role)
        return f"{rows.place(int(problem.rows[index]))}, column {column!r}: {problem.detail(index)}"

    if skipped is None:
        first = min(problems, key=lambda problem: int(problem.rows[0]))
        raise DumpError(bad_row(first, 0), first.hint)
    bad = np.unique(np.concatenate([problem.rows for problem in problems]))
    for row in bad[: EXAMPLES - len(skipped.examples)]:
        problem = next(problem for problem in problems if row in problem.rows)
        skipped.examples.append(bad_row(problem, int(np.searchsorted(problem.rows, row))))
    skipped.count += len(bad)
    good = np.ones(len(rows.rows), np.bool_)
    good[bad] = False
    return rows.only(good)


# ---------------------------------------------------------------- positive log-probs on the train side
# A value above 0 is no log-probability. In the train columns it is reported, not refused: perturbed or
# quantised dumps hold some, and every number stays defined. A column that is positive more often than not has
# the wrong sign.

TRAIN = (columns.OLD, columns.CURRENT)
JUDGED_AT = 32
"""Number of tokens from which a majority of positive values is not chance."""
NEGATE = "a log-probability is at most 0; if the column holds negative log-likelihoods, negate it"


@dataclass
class Count:
    """Counts of the signs in one column.

    Attributes:
        positive: tokens with values above the tolerance.
        sizeable: tokens whose absolute value exceeds the tolerance, or more.
        first: location and value of the first positive token.
    """

    tokens: int = 0
    positive: int = 0
    sizeable: int = 0
    first: str = ""

    def add(self, more: Count) -> None:
        """Add the counts of later rows."""
        self.tokens += more.tokens
        self.positive += more.positive
        self.sizeable += more.sizeable
        self.first = self.first or more.first

    def judge(self) -> None:
        """Refuse a column that is positive more often than not.

        Raises:
            DumpError: it has the wrong sign.
        """
        if self.tokens >= JUDGED_AT and 2 * self.positive > self.sizeable:
            what = f"{self.first}, and {self.positive} of {self.tokens} tokens are above 0 like it"
            raise DumpError(f"{what}: the column has the wrong sign", NEGATE)


def count_signs(rows: Rows) -> dict[str, Count]:
    """Count the signs of the train columns by role; without a positive value all tokens are sizeable."""
    found = {}
    for role in (role for role in TRAIN if role in rows.lists):
        found[role] = count = Count(rows.kept, sizeable=rows.kept)
        if not at_most(TOLERANCE, rows.lists[role], rows):
            values = np.where(rows.live, rows.lists[role].values, 0.0).astype(np.float64)
            positive = np.flatnonzero(values > TOLERANCE)
            count.positive, count.sizeable = positive.size, int((np.abs(values) > TOLERANCE).sum())
            if positive.size:
                row = int(np.searchsorted(rows.offsets, positive[0], side="right")) - 1
                at = f"{rows.place(row)}, column {rows.plan.columns[role]!r}"
                token = positive[0] - rows.offsets[row]
                count.first = f"{at}: token {token} is {values[positive[0]]:.6g}"
    return found


def remarks(counts: Mapping[str, Count]) -> tuple[str, ...]:
    """A warning for each column, by its name in the dump, with positive values."""
    return tuple(
        f"{count.positive} of {count.tokens} tokens ({count.positive / count.tokens:.2%}) of "
        f"{column!r} are above 0 by more than {TOLERANCE:g} nats "
        f"(first: {count.first}); such values are no log-probabilities"
        for column, count in counts.items()
        if count.positive
    )
