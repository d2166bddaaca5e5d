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

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.presets import Preset
from offpol_diag.trainers import LOGS
from offpol_diag.trainers.base import Number, Numbers
from offpol_diag.trainers.tokens import Tokens

T = TypeVar("T")


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

    empty = Tokens(BatchContext(context.batch.rows(0, 0), context.draws[:0], context.cut), preset)
    made = read(empty, Merged(lambda at: found.sums[at].sum(), ends_at))
    return {name: float(x) for name, x in made.items()}
