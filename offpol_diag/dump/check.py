"""Bad rows: find, refuse or skip them, and add up what a pass has seen."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import permutations
from typing import NamedTuple

import numpy as np

from offpol_diag.dump import schema
from offpol_diag.dump.batch import Array
from offpol_diag.dump.pack import Flags, Ints, Ragged, Rows
from offpol_diag.errors import DumpError

TOLERANCE = 1e-3
"""Largest log-prob in nats that counts as rounding: in reduced precision a certain token can exceed 0."""
MOST_TOKENS = 1 << 22
"""Most tokens of one sequence, masked ones included."""
LIMIT = float(np.nextafter(2.0**63, 0))
"""Largest step, lag or version, which are stored as 64-bit integers."""
UNKNOWN = -1
"""Version of weights of which nothing is known."""
EXAMPLES = 5
"""Number of skipped rows that are described."""
JUDGED_AT = 32
"""Tokens from which on a column can be told to have the wrong sign."""
FINITE = sys.float_info.max
SKIP = "mend the writer, or leave such rows out with --on-bad-row skip"
NEGATE = "a log-probability is at most 0; if the column holds negative log-likelihoods, negate it"


class Bound(NamedTuple):
    """What a number, or a token that counts, must lie in, ends included; no `column`: each one of tokens."""

    column: str
    low: float
    high: float
    why: str
    hint: str = SKIP


UNMASK = f"if such tokens do not count, set their {schema.MASK} to 0; if not, {SKIP}"
VERSION = f"a version is at least 0, or {UNKNOWN} where it is unknown"
BOUNDS = (
    Bound("", -FINITE, FINITE, "a token that counts needs a finite value", UNMASK),
    Bound(schema.ROLLOUT, -FINITE, TOLERANCE, "a log-probability is at most 0", f"{NEGATE}; if not, {SKIP}"),
    Bound(schema.WEIGHT_VERSIONS, UNKNOWN, FINITE, VERSION),
    Bound(schema.ADVANTAGES, -FINITE, FINITE, "a finite number is needed"),
    Bound(schema.REWARDS, -FINITE, FINITE, "a finite number is needed"),
    Bound(schema.PROMPT_LENGTH, 0, LIMIT, "a length is needed"),
    *(Bound(name, -LIMIT, LIMIT, "a number between -2^63 and 2^63 is needed") for name in schema.COUNTS),
)


class Bad(NamedTuple):
    """A fault: the column, where it is, [S], or [T] if it is of tokens; values, and what to say and do."""

    column: str
    flags: Flags
    values: Array | Ragged
    text: str
    hint: str = SKIP


def shapes(rows: Rows) -> Iterator[Bad]:
    """Find null lists, rows whose lists differ in length, and rows of too many tokens."""
    many = rows.lengths
    for name, column in rows.lists.items():
        hint = f"all token columns of a row hold one value per response token; {SKIP}"
        yield Bad(name, column.absent, many, "there is null where a list belongs", hint)
        text, held = f"it holds {{}} values and {schema.ROLLOUT} holds {{}}", column.lengths
        yield Bad(name, held != many, np.stack((held, many), 1), text, hint)
    text = f"it holds {{}} tokens, and a sequence has at most {MOST_TOKENS}"
    yield Bad(schema.ROLLOUT, many > MOST_TOKENS, many, text, f"write one sequence per row; {SKIP}")


def values(rows: Rows) -> Iterator[Bad]:
    """Find values that cannot be; lists of a row have one length by now."""
    for name, column in rows.lists.items():
        x, null, (first, last) = column.values, column.null, column.span
        if name == schema.MASK:
            if x.dtype.kind == "f" or null is not None or first < 0 or last > 1:
                odd = ((x != 0) & (x != 1)) | (False if null is None else null)
                hint = f"1 is a token that counts, 0 one that does not; {SKIP}"
                yield Bad(name, odd, column, "a mask is 0 or 1", hint)
            continue
        for _, low, high, why, hint in (one for one in BOUNDS if one.column in ("", name)):
            if null is not None or not (low <= first and last <= high):  # neither holds of NaN
                wide = x.astype(np.float64)  # bounds are exact however narrow the values are
                odd = ~((wide >= low) & (wide <= high)) | (False if null is None else null)
                yield Bad(name, odd & rows.live, column, why, hint)
        if name == schema.WEIGHT_VERSIONS:
            why = "the tokens before it are of a later version"
            hint = f"write the engine's counter of updates, and tokens in the order of sampling; {SKIP}"
            yield Bad(name, older(x, rows), column, why, hint)
    numbers = rows.numbers(*(one.column for one in BOUNDS))
    for name, low, high, why, hint in (one for one in BOUNDS if one.column in numbers):
        x = numbers[name]
        missing = np.isnan(x) & (name not in schema.COUNTS)  # null, and NaN, is no fault of a count
        yield Bad(name, (x < low) | (x > high) | missing, x, f"it is {{:.6g}}, and {why}", hint)
    if (prompts := rows.prompts) is not None and prompts.null is not None:
        holes = np.diff(np.concatenate(([0], np.cumsum(prompts.null)))[prompts.offsets]) > 0
        yield Bad(schema.PROMPT_IDS, holes, holes, "there is null among its values")
    sides = (name for name in schema.DIGESTS if name in rows.columns)
    null_of = {name: rows.columns[name].is_null().to_numpy(zero_copy_only=False) for name in sides}
    for name, other in permutations(null_of, 2):
        hint = f"digests are compared: write both of a sequence, or null for both; {SKIP}"
        lone = null_of[name] & ~null_of[other]
        yield Bad(name, lone, lone, f"it is null, and {other} is not", hint)


def older(versions: Ints, rows: Rows) -> Flags:
    """Flag tokens of older weights than one before them in their response; unknown ones are passed over."""
    at = np.flatnonzero(rows.live & (versions > UNKNOWN))
    row = np.searchsorted(rows.offsets, at, side="right")
    found = np.zeros(len(versions), np.bool_)
    found[at[1:][(np.diff(versions[at]) < 0) & (np.diff(row) == 0)]] = True
    return found


def good_rows(rows: Rows, skipped: Skipped | None) -> Rows:
    """Refuse the first bad row, or leave bad rows out and count them in `skipped`."""
    for check in (shapes, values):
        bad, said = np.zeros(rows.many, np.bool_), dict[int, tuple[str, str]]()
        for column, flags, x, text, hint in check(rows):
            at = row = np.flatnonzero(flags)
            if isinstance(x, Ragged):
                row, first = np.unique(np.searchsorted(x.offsets, at, side="right") - 1, return_index=True)
                at = at[first]
            bad[row] = True
            for i, j in zip(row[:EXAMPLES].tolist(), at.tolist(), strict=False):
                if isinstance(x, Ragged):
                    shown = "null" if x.null is not None and x.null[j] else f"{x.values[j]:.6g}"
                    what = f"token {j - x.offsets[i]} is {shown}, and {text}"
                else:
                    what = text.format(*np.atleast_1d(x[j]))
                shown = rows.plan.columns.get(column, column)
                said.setdefault(i, (f"{rows.place(i)}, column {shown!r}: {what}", hint))
        if not said:
            continue
        if skipped is None:
            raise DumpError(*said[min(said)])
        skipped.count += int(bad.sum())
        skipped.examples += [said[row][0] for row in sorted(said)[: EXAMPLES - len(skipped.examples)]]
        rows = rows.only(~bad)
    return rows


# ---------------------------------------------------------------- what a pass has seen


@dataclass
class Skipped:
    """Number of skipped rows, and what is wrong with the first `EXAMPLES` of them."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


class Signs(NamedTuple):
    """Unmasked tokens of a train column, those above 0 and below it by more than rounding, and the first."""

    tokens: int = 0
    above: int = 0
    below: int = 0
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
        self.rows, self.tokens = self.rows + more.rows, self.tokens + more.tokens
        self.skipped.count += more.skipped.count
        self.skipped.examples += more.skipped.examples[: EXAMPLES - len(self.skipped.examples)]
        for name, one in more.signs.items():
            had = self.signs.get(name, Signs())
            tokens, above, below = (x + y for x, y in zip(had[:3], one[:3], strict=True))
            self.signs[name] = Signs(tokens, above, below, had.first or one.first)


def signs(rows: Rows) -> dict[str, Signs]:
    """Count the signs of the train columns; where none is above 0, all tokens are below."""
    found, many = dict[str, Signs](), rows.kept.size
    for name in (name for name in (schema.OLD, schema.CURRENT) if name in rows.lists):
        column, found[name] = rows.lists[name], Signs(many, below=many)
        if not column.span[1] <= TOLERANCE:
            x = np.where(rows.live, column.values, 0.0).astype(np.float64)
            above = np.flatnonzero(x > TOLERANCE)
            for at in above[:1]:
                row = int(np.searchsorted(rows.offsets, at, side="right")) - 1
                place = f"{rows.place(row)}, column {rows.plan.columns[name]!r}"
                first = f"{place}: token {at - rows.offsets[row]} is {x[at]:.6g}"
                found[name] = Signs(many, above.size, int((x < -TOLERANCE).sum()), first)
    return found


def judge(found: Signs) -> None:
    """Refuse a train column that is positive more often than negative: it has the wrong sign."""
    if found.tokens >= JUDGED_AT and found.above > found.below:
        what = f"{found.first}, and {found.above} of {found.tokens} tokens are above 0 like it"
        raise DumpError(f"{what}: the column has the wrong sign", NEGATE)


def remark(column: str, found: Signs) -> str:
    """Say that some tokens of a column are above 0."""
    share = found.above / found.tokens
    return (
        f"{found.above} of {found.tokens} tokens ({share:.2%}) of {column!r} are above 0 by more than "
        f"{TOLERANCE:g} nats (first: {found.first}); such values are no log-probabilities"
    )
