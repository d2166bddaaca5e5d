"""Bounds that keep a given share, and a forecast of what they keep at other response lengths.

The histogram of the first pass gives the bin of each rank; the next pass collects the values in that bin, so
that the order statistic is exact. The last pass applies the preset with the solved bounds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine import loglattice
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Arrays, Tally
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.readers import Dump
from offpol_diag.run.task import Engine
from offpol_diag.summary import Number, PredictedKeep, SolvedWindow
from offpol_diag.sweep.evaluate import Plan, arrays, statistic
from offpol_diag.sweep.lengths import Model, Scale, spreads
from offpol_diag.sweep.readings import Readings
from offpol_diag.sweep.thresholds import Side, SweptBound

SIGNED = ("ratio", "k1", "prob_diff")
"""Statistics that deviate from their on-policy value in both directions."""
LENGTHS = tuple(2.0**power for power in range(5, 18))
FURTHER = 8.0
"""The forecast reaches this many times the longest length, and this fraction of the shortest."""
SPARE = 1e-3
"""Relative distance of a bound from the outermost value, if there is no value beyond it."""
NORMAL = 1.96
MOST_NATS = 700.0
"""Largest |log| of a bound, whose exponential is still a float."""


def check(share: float, preset: Preset, bound: SweptBound) -> None:
    """Refuse a share outside (0, 1], and bounds that cannot be solved for.

    Raises:
        UsageError: the share is invalid, or what the bound drops depends on more than the statistic of each
            token or sequence.
    """
    if not 0 < share <= 1:  # also refuses NaN
        raise UsageError(f"--keep {share:g}: it must be above 0 and at most 1", "to keep 95%: --keep 0.95")
    rule = bound.rule(preset)
    hint = "leave --keep out: the table shows what each threshold keeps"
    if isinstance(rule, Reject | Weight) and (rule.among == "left" or rule.over == "batch"):
        raise UsageError(f"--keep: what {bound} of {preset.name} drops depends on other tokens", hint)
    if isinstance(rule, Reject) and rule.advantage != "any":
        raise UsageError(f"--keep: {bound} of {preset.name} acts only for some signs of the advantage", hint)


def solve(
    engine: Engine, dump: Dump, readings: Readings, share: float, chosen: bool
) -> tuple[SolvedWindow, Readings]:
    """Solve for the bounds that keep the share; also return the readings of the preset with these bounds.

    Both bounds of the rule are sought if it has both, unless the user has `chosen` one.
    """
    plan, shape = readings.plan, readings.shape
    assert shape is not None
    rule, name = plan.bound.rule(plan.preset), plan.bound.statistic(plan.preset)
    both = rule.lower is not None and rule.upper is not None and name in SIGNED and not chosen
    two = both or plan.bound.side == "window"
    sought: tuple[Side, ...] = ("lower", "upper") if two else (plan.bound.side,)

    many = round(float(shape[0].sum()))
    keep = max(1, math.ceil(share * many - 1e-9))
    below = (many - keep) // 2 if two else many - keep if sought == ("lower",) else 0
    ranks = {"lower": below + 1, "upper": below + keep}
    found = at_ranks(engine, dump, plan, shape, {side: ranks[side] for side in sought})
    bounds: dict[str, float] = {side: _bound(one, side, name == "ratio") for side, one in found.items()}
    upto = found["upper"].before + found["upper"].equal if "upper" in found else many
    kept = upto - (found["lower"].before if "lower" in found else 0)

    preset = plan.bound.moved(plan.preset, bounds)
    study, bound = replace(plan.study, presets=(preset,)), replace(plan.bound, side=sought[-1])
    turned, scale = replace(plan, study=study, bound=bound, values=(bounds[sought[-1]],)), _scale(readings)
    seen = engine.reduce(dump, After(turned, scale))
    assert seen is not None
    whole = readings.tally.whole
    whole = replace(whole, sums=whole.sums | seen.whole.sums, names=whole.names | seen.whole.names)
    after = Readings(turned, replace(readings.tally, whole=whole))
    point = after.point(0).model_copy(update={"bounds": plan.bound.places(bounds), "own": False})
    centre = None
    if two:
        text, value = "mean of the log of the statistic", readings.centre()
        centre = Number(value=value, unit="nats", over=plan.units, formula=text)
    window = SolvedWindow(asked=share, kept=kept, of=many, ties=kept - keep, centre=centre, point=point)
    return _forecast(window, after, scale), after


def _bound(found: AtRank, side: str, logs: bool) -> float:
    """Return the number with fewest digits between the last value kept and the first one dropped."""
    value = found.value
    spare = max(abs(value) * SPARE, 1e-9)
    if side == "upper":
        return shortest(value, found.over if found.over < math.inf else value + spare, logs, nearest=value)
    return shortest(found.under if found.under > -math.inf else value - spare, value, logs, nearest=value)


def shortest(low: float, high: float, logs: bool, nearest: float) -> float:
    """Return the number of fewest digits strictly between two values; if `logs`, its log is.

    If no float lies between them: the one whose value, or log, is `nearest`.

    Raises:
        UsageError: its exponential overflows or underflows.
    """
    into: Callable[[float], float] = math.exp if logs else float
    back: Callable[[float], float] = math.log if logs else float
    if logs:
        if abs(nearest) > MOST_NATS:
            what = f"--keep: the bound would have to let through |log r| = {abs(nearest):.4g} nats"
            raise UsageError(f"{what}, which no number holds", "ask for a smaller share")
        low, high = max(low, nearest - 1), min(high, nearest + 1)
    middle = into((low + high) / 2)
    for digits in range(1, 18):
        found = float(f"{middle:.{digits}g}")
        if (found > 0 or not logs) and low < back(found) < high:
            return found
    return into(nearest)


# ---------------------------------------------------------------- exact order statistics


class AtRank(NamedTuple):
    """The value at a rank, its neighbours (±inf if none), and the counts of smaller and of equal values."""

    under: float
    value: float
    over: float
    before: int
    equal: int


@dataclass(frozen=True)
class Inside:
    """The distinct values in a bin and their counts, a pair per batch; the nearest values outside it."""

    blocks: tuple[tuple[Array, Array], ...]
    under: float
    over: float

    @classmethod
    def of(cls, x: Array, at: int) -> Inside:
        """Collect the values of one batch in bin `at`."""
        bins = loglattice.index(x)
        below, above = x[bins < at], x[bins > at]
        values, counts = np.unique(x[bins == at], return_counts=True)
        under = float(below.max()) if len(below) else -math.inf
        over = float(above.min()) if len(above) else math.inf
        return cls(((values, counts),), under, over)

    def merge(self, other: Inside) -> Inside:
        """Join the values."""
        return Inside(self.blocks + other.blocks, max(self.under, other.under), min(self.over, other.over))

    def at(self, rank: int, below: float) -> AtRank:
        """Return the value at a rank (1 is the smallest); `below` values lie in bins below."""
        each, many = (np.concatenate(parts) for parts in zip(*self.blocks, strict=True))
        values, where = np.unique(each, return_inverse=True)
        counts = np.bincount(where, many)
        upto = round(below) + np.cumsum(counts)
        at = int(np.searchsorted(upto, rank))
        under, value, over = [self.under, *values.tolist(), self.over][at : at + 3]
        return AtRank(under, value, over, int(upto[at] - counts[at]), int(counts[at]))


def _values(plan: Plan, batch: Batch) -> Array:
    """Compute the statistic of one batch."""
    context = BatchContext.of(batch, 0, 1, plan.first_pass.fits)
    found = statistic(context, plan)
    assert found is not None
    context.forget()
    return found


@dataclass(frozen=True)
class Gather:
    """The job of one pass: collect the values of one batch in the bin of each rank."""

    plan: Plan
    bins: dict[Side, int]

    def __call__(self, batch: Batch) -> Sides:
        """Collect the values of one batch."""
        x = _values(self.plan, self.plan.first_pass.filled(batch))
        return Sides({side: Inside.of(x, at) for side, at in self.bins.items()})


@dataclass(frozen=True)
class Sides:
    """Values by side of the window."""

    inside: dict[Side, Inside]

    def merge(self, other: Sides) -> Sides:
        """Join the values of both sides."""
        return Sides({side: one.merge(other.inside[side]) for side, one in self.inside.items()})


def at_ranks(
    engine: Engine, dump: Dump, plan: Plan, bins: Array, ranks: dict[Side, int]
) -> dict[str, AtRank]:
    """Find the value at each rank (1 is the smallest) and its neighbours."""
    counts = bins[0]
    upto = np.cumsum(counts)
    places = {side: int(np.searchsorted(upto, rank)) for side, rank in ranks.items()}
    seen = engine.reduce(dump, Gather(plan, places))
    assert seen is not None
    return {
        side: seen.inside[side].at(ranks[side], float(upto[at] - counts[at])) for side, at in places.items()
    }


# ---------------------------------------------------------------- other lengths


@dataclass(frozen=True)
class After:
    """The job of the last pass: the preset with its new bounds, and the spread of the statistic by length."""

    plan: Plan
    scale: Scale | None

    def __call__(self, batch: Batch) -> Tally:
        """Tally one batch."""
        batch = self.plan.first_pass.filled(batch)
        found = arrays(self.plan, batch)
        if self.scale is None:
            return Tally(found)
        x = _values(self.plan, batch)
        lengths, key = (each[batch.lengths > 0] for each in (batch.lengths, batch.key))
        x = x / lengths if self.plan.product else x
        return Tally(found.merge(Arrays(sums=spreads(x, lengths, key, self.scale))))


def _scale(readings: Readings) -> Scale | None:
    """Return the axis for log r per token; None unless the statistic is the ratio of a sequence."""
    plan, shape = readings.plan, readings.shape
    of_sequences = plan.bound.over(plan.preset) in ("sum", "mean")
    if plan.bound.statistic(plan.preset) != "ratio" or not of_sequences or shape is None:
        return None
    low, middle, high = (loglattice.quantile(shape[0], q) for q in (0.025, 0.5, 0.975))
    per, wider = (readings.length, 3.0) if plan.product else (1.0, 1.0)
    return Scale(middle / per, max((high - low) / 2 * wider / per, 1e-9))


def _forecast(found: SolvedWindow, after: Readings, scale: Scale | None) -> SolvedWindow:
    """Add the shares that the bounds would keep at other lengths."""
    if scale is None:
        return found
    model = Model.of(after.tally.whole.sums, scale, after.plan.product)
    if model is None:
        return found
    rule = after.plan.bound.rule(after.plan.preset)
    low, high = (math.log(end) if end else math.inf for end in (rule.lower, rule.upper))
    least, most = model.seen()
    lengths = [one for one in LENGTHS if least / FURTHER <= one <= most * FURTHER]
    text = "from the spread of log r by length; jackknife over groups and the misfit of the fit"
    of: dict[str, Any] = {"unit": "fraction", "over": "sequences"}
    predicted = []
    for one in model.forecast(lengths, (low if rule.lower else -math.inf, high)):
        ends = max(one.kept - NORMAL * one.error, 0.0), min(one.kept + NORMAL * one.error, 1.0)
        kept = Number(value=one.kept, interval=ends, formula=text, **of)
        seen = None if one.observed is None else Number(value=one.observed, **of)
        predicted.append(PredictedKeep(length=one.length, kept=kept, observed=seen))
    falling = "√a of √(a/L + b), the spread of log r per token at L tokens: what averages out"
    staying = "√b of the same: what does not"
    spread = {
        name: Number(value=math.sqrt(getattr(model.whole, name)), unit="nats", formula=formula)
        for name, formula in (("falling", falling), ("staying", staying))
    }
    return found.model_copy(update={"predicted": predicted, "spread": spread})
