"""Trainers' logs, run on batches and read from merged sums.

A log is a function `log(t, s)` of the trainer's own formulas, which returns {logged name: number}. `t` is
a batch under a preset (`Tokens`): numbers of its tokens [T] and of its sequences, which trainers call rows,
[S]. `s` adds numbers of sequences up:

    s.sum(x)          the sum of a number of each sequence, [S], or how many flags are set
    s.max(x)          the largest of a number of each sequence, [S]; −∞ stands for none
    s.min(x)          the smallest of a number of each sequence, [S]; +∞ stands for none
    s.given(flag, x)  x, or None, which is not logged, where a condition on sums does not hold
    s.part(log, t)    log(t, s), computed once for all presets of which `t.only` leaves the same

It runs on every batch with an `s` that collects (`Collected`), and once more on an empty batch with one that
reads the merged sums back in the same order (`Merged`). So it may branch on the preset and on which columns
there are, and never on data: what `s` returns is a number only when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any, TypeVar

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Arrays, Names
from offpol_diag.presets import Preset
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.base import Number, Numbers
from offpol_diag.trainers.tokens import Tokens

BLOCK = 1 << 18
"""Tokens at a time: in smaller blocks the overhead of calls exceeds the work, preset by preset."""
T = TypeVar("T")
Ends = dict[str, tuple[float, float]]
"""Name → smallest and largest value."""


# ---------------------------------------------------------------- adding up


class Collected:
    """What a log asks to add up of one batch.

    Attributes:
        sums: summands, [S] float64 each.
        ends: numbers whose extremes are asked for, [S] each.
    """

    def __init__(self, sequences: int) -> None:
        self.sums: list[Array] = []
        self.ends: list[Array] = []
        self._shape = (sequences,)

    def sum(self, x: Array) -> Number:
        """Keep the summands."""
        if x.shape != self._shape:
            raise ValueError("s.sum is of a number of each sequence: t.row_sum makes it")
        self.sums.append(segments.numbers(x) if x.dtype == bool else x)
        return np.float64(1)

    def max(self, x: Array) -> Number:
        """Keep the numbers."""
        if x.shape != self._shape:
            raise ValueError("s.max and s.min are of a number of each sequence: t.row_max, t.row_min")
        self.ends.append(segments.numbers(x) if x.dtype == bool else x)
        return np.float64(1)

    min = max

    def given(self, flag: Number, x: Number) -> Number:
        """Return x: conditions hold when sums are read."""
        return x

    def part(self, log: Callable[..., T], t: Tokens, *more: Hashable) -> T:
        """Collect a part once per batch."""

        def made() -> tuple[T, Collected]:
            own = Collected(*self._shape)
            return log(t, own, *more), own

        result, own = t.context.cached(("part", log, t.preset, more), made)
        self.sums += own.sums
        self.ends += own.ends
        return result


class Merged:
    """Merged sums and extremes, given back in the order in which they were asked for.

    Attributes:
        sums: the sum at a place of that order.
        ends: the smallest and the largest at a place.
        parts: what was read of parts that presets share.
    """

    def __init__(
        self,
        sums: Callable[[int], Number],
        ends: Callable[[int], tuple[Number, Number]],
        parts: dict[Hashable, Any] | None = None,
    ) -> None:
        self.sums, self.ends = sums, ends
        self.parts = {} if parts is None else parts
        self.at = self.end = 0

    def sum(self, x: Array) -> Number:
        """Return the next sum."""
        self.at += 1
        return self.sums(self.at - 1)

    def max(self, x: Array) -> Number:
        """Return the next maximum."""
        self.end += 1
        return self.ends(self.end - 1)[1]

    def min(self, x: Array) -> Number:
        """Return the next minimum."""
        self.end += 1
        return self.ends(self.end - 1)[0]

    def given(self, flag: Number, x: Number) -> Number:
        """Return x if the condition holds."""
        return x if flag else None

    def part(self, log: Callable[..., T], t: Tokens, *more: Hashable) -> T:
        """Read a part once for all presets: they have collected the same."""
        key = log, t.preset, more
        if key not in self.parts:
            at, end = self.at, self.end
            self.parts[key] = log(t, self, *more), self.at - at, self.end - end
            return self.parts[key][0]  # type: ignore[no-any-return]
        result, sums, ends = self.parts[key]
        self.at, self.end = self.at + sums, self.end + ends
        return result  # type: ignore[no-any-return]


Totals = Collected | Merged
"""Sums and extremes over all batches, in the order in which a log asks for them."""


@np.errstate(all="ignore")
def collected(t: Tokens) -> Collected:
    """Run the log of the preset's trainer on a batch."""
    result = Collected(t.batch.sequences)
    LOGS[t.preset.logs or ""].of(t, result)
    return result


@np.errstate(all="ignore")
def read(t: Tokens, totals: Merged) -> Numbers:
    """Return logged name → number from merged sums; `t` is of an empty batch with the dump's columns."""
    return {name: x for name, x in LOGS[t.preset.logs or ""].of(t, totals).items() if x is not None}


# ---------------------------------------------------------------- a batch, a dump


def sums(context: BatchContext, presets: Sequence[Preset]) -> tuple[Arrays, Ends]:
    """Compute the sums and extremes of a batch that the presets' logs ask for, a few sequences at a time.

    Those of a preset are `PRESET!0`, `PRESET!1`, …, numbers that presets share being added once; `masked` are
    the masked tokens. They have no replicates: no number of a trainer has an interval.
    """
    result = [_of_block(part, presets) for part in _blocks(context)]
    ends = {name: [one[name] for _, one in result] for name in result[0][1]}
    return reduce(Arrays.merge, (one for one, _ in result)), {
        name: (min(low for low, _ in pairs), max(high for _, high in pairs)) for name, pairs in ends.items()
    }


def _blocks(context: BatchContext) -> Iterator[BatchContext]:
    spans = segments.spans(context.batch.cu_seqlens, BLOCK)
    for first, last in spans:
        if len(spans) == 1:
            yield context
        else:
            part = BatchContext(context.batch.rows(first, last), context.draws[first:last], context.fits)
            yield part
            part.forget()


def _of_block(
    context: BatchContext, presets: Sequence[Preset]
) -> tuple[Arrays, dict[str, tuple[float, float]]]:
    """Compute the same of a few sequences; an array that presets share is one row."""
    masked = context.batch.masked.astype(np.float64)
    result = {preset.name: collected(Tokens(context, preset)) for preset in presets}
    summed = {"masked": masked} | {
        f"{name}!{at}": x for name, one in result.items() for at, x in enumerate(one.sums)
    }
    rows = {id(x): x for x in summed.values()}
    row = dict(zip(rows, range(len(rows)), strict=True))
    which = np.array([row[id(x)] for x in summed.values()], np.int64)
    ended = {id(x): x for one in result.values() for x in one.ends}
    pairs = {key: (x.min(initial=np.inf), x.max(initial=-np.inf)) for key, x in ended.items()}
    ends = {f"{name}!{at}": pairs[id(x)] for name, one in result.items() for at, x in enumerate(one.ends)}
    totals = np.stack([*rows.values()]).sum(axis=1)
    return Arrays(sums={"logged": totals}, names={"logged": Names(tuple(summed), which)}), ends


class Reading:
    """Reads what trainers would have logged for a dump from its merged sums."""

    def __init__(self, sums: Mapping[str, Number], ends: Ends, columns: frozenset[str]) -> None:
        self._sums, self._ends, self._empty = sums, ends, nothing(columns)
        self._parts: dict[Hashable, Any] = {}

    def numbers(self, preset: Preset) -> dict[str, float]:
        """Return logged name → number of a preset."""

        def sum_at(at: int) -> Number:
            return self._sums[f"{preset.name}!{at}"]

        def ends_at(at: int) -> tuple[Number, Number]:
            low, high = self._ends[f"{preset.name}!{at}"]
            return np.float64(low), np.float64(high)

        result = read(Tokens(self._empty, preset), Merged(sum_at, ends_at, self._parts))
        return {name: float(x) for name, x in result.items()}


OPTIONAL = {"old_log_probs": "old", "current_log_probs": "current"}
"""Column of a dump → field of a batch, where their names differ."""


def nothing(columns: frozenset[str]) -> BatchContext:
    """Return a batch without sequences that has these columns of a dump."""
    none, zero = np.empty(0), np.zeros(1, np.int64)
    have = {OPTIONAL.get(name, name) for name in columns}
    optional: dict[str, Any] = {
        name: none for name in ("old", "current", "advantages", "rewards", "entropy") if name in have
    }
    whole = none.astype(np.int64)
    return BatchContext(Batch(none, zero, zero, whole, whole, whole, **optional), np.empty((0, 0)))


EVERY = frozenset(("old_log_probs", "current_log_probs", "advantages", "rewards", "entropy"))


def names(preset: Preset) -> tuple[str, ...]:
    """Return the names that are logged under a preset of a dump that has every column."""
    made = _Every(lambda at: np.float64(1), lambda at: (np.float64(1), np.float64(1)))
    return tuple(read(Tokens(nothing(EVERY), preset), made))


class _Every(Merged):
    """Made-up sums, of which no condition leaves a number out."""

    def given(self, flag: Number, x: Number) -> Number:
        """Return x."""
        return x


def of_context(context: BatchContext, preset: Preset) -> dict[str, float]:
    """Return logged name → number of one batch."""
    found = collected(Tokens(context, preset))

    def ends_at(at: int) -> tuple[Number, Number]:
        return found.ends[at].min(initial=np.inf), found.ends[at].max(initial=-np.inf)

    empty = Tokens(BatchContext(context.batch.rows(0, 0), context.draws[:0], context.fits), preset)
    made = read(empty, Merged(lambda at: found.sums[at].sum(), ends_at))
    return {name: float(x) for name, x in made.items()}
