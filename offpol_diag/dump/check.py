"""Bad rows: a table of what is refused, and a loop that refuses the first such row, or leaves them out."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from offpol_diag.dump import schema
from offpol_diag.dump.pack import NULL, Flags, Rows
from offpol_diag.errors import DumpError

TOLERANCE = 1e-3
"""Largest log-prob in nats that counts as rounding: in reduced precision a certain token can exceed 0."""
MOST_TOKENS = 1 << 22
"""Most tokens of one sequence, masked ones included."""
LIMIT = float(np.nextafter(2.0**63, 0))
"""Largest step, lag or version, which are stored as 64-bit integers."""
UNKNOWN = -1
"""Version of weights that is not known."""
FINITE, LEAST = sys.float_info.max, NULL + 1
"""Largest number that counts, and least whole one, which is not null."""
SKIP = "mend the writer, or leave such rows out with --on-bad-row skip"
NEGATE = "a log-probability is at most 0; if the column holds negative log-likelihoods, negate it"
EVEN = f"all token columns of a row hold one value per response token; {SKIP}"


class Rule(NamedTuple):
    """What is refused: which rows, or values, of which columns, in words, and what to do.

    In `why` {it} is the value, or what the row holds of it, and {many} the row's number of tokens.
    """

    columns: tuple[str, ...]
    bad: Callable[[Rows, str], Flags]
    why: str
    hint: str = SKIP


def outside(low: float, high: float, null: bool = False) -> Callable[[Rows, str], Flags]:
    """Return what flags values that count outside of [low, high]; null and NaN too, unless `null` is fine."""

    def bad(rows: Rows, name: str) -> Flags:
        x = rows.lists[name].values if name in rows.lists else rows.numbers(name)
        least = low if x.dtype.kind == "f" else max(low, LEAST)
        with np.errstate(invalid="ignore"):
            if not x.size or (least <= x.min().item() and x.max().item() <= high):  # neither holds of NaN
                return np.zeros(0, np.bool_)
        wide = x.astype(np.float64) if x.dtype.kind == "f" else x  # bounds are exact in any width
        flags: Flags = (wide < least) | (wide > high) | (np.isnan(wide) & (not null))
        return flags & rows.live if name in rows.lists and name != schema.PROMPT_IDS else flags

    return bad


# fmt: off
SHAPES = (
    Rule(schema.OF_TOKENS, lambda rows, name: rows.lists[name].absent,
         "there is null where a list belongs", EVEN),
    Rule(schema.OF_TOKENS, lambda rows, name: rows.lists[name].lengths != rows.rollout.lengths,
         f"it holds {{it}} values and {schema.ROLLOUT} holds {{many}}", EVEN),
    Rule((schema.ROLLOUT,), lambda rows, name: rows.rollout.lengths > MOST_TOKENS,
         f"it holds {{it}} tokens, and a sequence has at most {MOST_TOKENS}", f"write one per row; {SKIP}"),
)
"""Rules of the lists of rows, flags [S]."""
VALUES = (
    Rule((schema.MASK,), lambda rows, name: (rows.lists[name].values != 0) & ~rows.live,
         "{it}, and a mask is 0 or 1", f"1 is a token that counts, 0 one that does not; {SKIP}"),
    Rule(schema.OF_TOKENS, outside(-FINITE, FINITE), "{it}, and a token that counts needs a finite value",
         f"if such tokens do not count, set their {schema.MASK} to 0; if not, {SKIP}"),
    Rule((schema.ROLLOUT,), outside(-FINITE, TOLERANCE), "{it}, and a log-probability is at most 0",
         f"{NEGATE}; if not, {SKIP}"),
    Rule((schema.WEIGHT_VERSIONS,), outside(UNKNOWN, FINITE),
         f"{{it}}, and a version is at least 0, or {UNKNOWN} where it is unknown"),
    Rule((schema.REWARDS,), outside(-FINITE, FINITE), "{it}, and a finite number is needed"),
    Rule((schema.PROMPT_LENGTH,), outside(0, LIMIT, null=True), "{it}, and a length is needed"),
    Rule(schema.COUNTS, outside(-LIMIT, LIMIT, null=True), "{it}, and a number within 64 bits is needed"),
    Rule((schema.PROMPT_IDS,), outside(-LIMIT, LIMIT), "{it}, and a prompt is token ids"),
)
"""Rules of values, flags [N] of lists and [S] of numbers; the lists of a row have one length by now."""
# fmt: on


@dataclass
class Seen:
    """What a pass has seen: rows with bad ones, unmasked tokens, skipped rows and the first of them.

    Attributes:
        above: column of the trainer → its tokens that are above 0 by more than rounding.
    """

    rows: int = 0
    tokens: int = 0
    skipped: int = 0
    examples: list[str] = field(default_factory=list)
    above: Counter[str] = field(default_factory=Counter)

    def count(self, rows: Rows) -> None:
        """Count good rows' tokens, and those of the trainer that are above 0."""
        self.tokens += rows.kept.size
        for role in (schema.OLD, schema.CURRENT):
            if role in rows.lists and (many := int(outside(-FINITE, TOLERANCE)(rows, role).sum())):
                self.above[rows.roles[role]] += many

    def add(self, more: Seen) -> None:
        """Add what was seen of later rows."""
        self.rows, self.tokens = self.rows + more.rows, self.tokens + more.tokens
        self.skipped, self.examples = self.skipped + more.skipped, self.examples or more.examples
        self.above += more.above


def good_rows(rows: Rows, seen: Seen | None) -> Rows:
    """Refuse the first bad row; or with `seen`, leave bad rows out, count them and describe the first there.

    Raises:
        DumpError: file, row group, row, column, token, and what is wrong.
    """
    for rules in (SHAPES, VALUES):  # the values of lists are looked at once their lengths agree
        bad, first = np.zeros(len(rows.row), np.bool_), (len(rows.row), "", "")
        for rule, name in ((one, name) for one in rules for name in one.columns):
            there = rows.lists if rules is SHAPES or name in schema.TOKENS else rows.columns
            if name not in there or not (flags := rule.bad(rows, name)).any():
                continue
            column, at = rows.lists.get(name), np.flatnonzero(flags)
            row = np.searchsorted(column.offsets, at, side="right") - 1 if column and rules is VALUES else at
            bad[row] = True
            if (i := int(row[0])) >= first[0]:
                continue
            if column is None:
                it = f"it is {rows.numbers(name)[i]:.6g}"
            elif rules is SHAPES:
                it = f"{column.lengths[i]}"
            else:
                value = column.values[at[0]]
                it = f"token {at[0] - column.offsets[i]} is {'null' if value == NULL else f'{value:.6g}'}"
            why = rule.why.format(it=it, many=rows.rollout.lengths[i])
            first = (i, f"{rows.where}, row {rows.row[i]}, column {rows.roles[name]!r}: {why}", rule.hint)
        if bad.any() and seen is None:
            raise DumpError(*first[1:])
        if bad.any() and seen:
            seen.skipped, seen.examples = seen.skipped + int(bad.sum()), seen.examples or [first[1]]
            rows = rows.only(~bad)
    return rows
