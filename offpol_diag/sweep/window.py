"""Bounds that keep a given share, and a forecast of what they keep at other response lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from offpol_diag.analysis.tally import Tally
from offpol_diag.batch import Batch
from offpol_diag.engine import loglattice
from offpol_diag.engine.accumulators import State
from offpol_diag.engine.scene import Scene
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.readers import Dump
from offpol_diag.run.task import Engine
from offpol_diag.summary import Number, PredictedKeep, SolvedWindow
from offpol_diag.sweep.evaluate import Plan, states, statistic
from offpol_diag.sweep.exact import AtRank, at_ranks
from offpol_diag.sweep.lengths import Model, Scale, Spreads
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


def sides(preset: Preset, bound: SweptBound, chosen: bool) -> tuple[Side, ...]:
    """Return the sides to solve for: both if the preset has both, unless one was `chosen`."""
    rule = bound.rule(preset)
    signed = bound.statistic(preset) in SIGNED
    both = rule.lower is not None and rule.upper is not None and signed and not chosen
    return ("lower", "upper") if both or bound.side == "window" else (bound.side,)


def solve(
    engine: Engine, dump: Dump, readings: Readings, share: float, sought: tuple[Side, ...]
) -> tuple[SolvedWindow, Readings]:
    """Solve for the bounds that keep the share; also return the readings of the preset with these bounds."""
    plan, shape = readings.plan, readings.shape
    assert shape is not None
    many = round(float(shape.counts.sum()))
    keep = max(1, math.ceil(share * many - 1e-9))
    below = (many - keep) // 2 if len(sought) == 2 else many - keep if sought == ("lower",) else 0
    ranks = {"lower": below + 1, "upper": below + keep}
    each = at_ranks(engine, dump, plan, shape, [ranks[side] for side in sought])
    found = dict(zip(sought, each, strict=True))
    logs = plan.bound.statistic(plan.preset) == "ratio"
    bounds: dict[str, float] = {side: _bound(one, side, logs) for side, one in found.items()}
    upto = found["upper"].before + found["upper"].equal if "upper" in found else many
    kept = upto - (found["lower"].before if "lower" in found else 0)

    after = Readings(*_applied(engine, dump, readings, bounds, sought[-1]))
    point = after.point(0).model_copy(update={"bounds": plan.bound.places(bounds), "own": False})
    centre = None
    if len(sought) == 2:
        formula = "mean of the log of the statistic"
        centre = Number(value=readings.centre(), unit="nats", over=readings.units, formula=formula)
    window = SolvedWindow(asked=share, kept=kept, of=many, ties=kept - keep, centre=centre, point=point)
    return _forecast(window, after, _scale(readings)), after


def _applied(
    engine: Engine, dump: Dump, readings: Readings, bounds: dict[str, float], side: Side
) -> tuple[Plan, Tally]:
    """Read the dump with the new bounds, with the bound on `side` as the one that varies."""
    plan = readings.plan
    preset = plan.bound.moved(plan.preset, bounds)
    study, bound = replace(plan.study, presets=(preset,)), replace(plan.bound, side=side)
    turned = replace(plan, study=study, bound=bound, values=(bounds[side],))
    seen = engine.reduce(dump, After(turned, _scale(readings)))
    assert seen is not None
    return turned, Tally(readings.tally.states | seen.states)


def _bound(found: AtRank, side: Side, logs: bool) -> float:
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
    if logs and abs(nearest) > MOST_NATS:
        what = f"--keep: the bound would have to let through |log r| = {abs(nearest):.4g} nats"
        raise UsageError(f"{what}, which no number holds", "ask for a smaller share")
    if logs:
        low, high = max(low, nearest - 1), min(high, nearest + 1)
    into: Callable[[float], float] = math.exp if logs else float
    back: Callable[[float], float] = math.log if logs else float
    middle = into((low + high) / 2)
    for digits in range(1, 18):
        found = float(f"{middle:.{digits}g}")
        if (found > 0 or not logs) and low < back(found) < high:
            return found
    return into(nearest)


# ---------------------------------------------------------------- other lengths


@dataclass(frozen=True)
class After:
    """The job of the last pass: the preset with its new bounds, and the spread of the statistic by length."""

    plan: Plan
    scale: Scale | None

    def __call__(self, batch: Batch) -> Tally:
        """Compute the states of one batch."""
        batch = self.plan.found.filled(batch)
        found: dict[str, State] = dict(states(self.plan, batch))
        if self.scale is not None:
            scene = Scene.of(batch, 0, 1, self.plan.found.settled)
            x = statistic(scene, self.plan)
            assert x is not None
            there = torch.nonzero(batch.lengths > 0).flatten()
            lengths = batch.lengths[there]
            x = x / lengths if _product(self.plan) else x
            found["sweep.spreads"] = Spreads.of(x, lengths, batch.key[there], self.scale)
            scene.forget()
        return Tally(found)


def _product(plan: Plan) -> bool:
    return plan.bound.over(plan.preset) == "sum"


def _scale(readings: Readings) -> Scale | None:
    """Return the axis for log r per token; None unless the statistic is the ratio of a sequence."""
    plan, shape = readings.plan, readings.shape
    of_sequences = plan.bound.over(plan.preset) in ("sum", "mean")
    if plan.bound.statistic(plan.preset) != "ratio" or not of_sequences or shape is None:
        return None
    low, middle, high = (loglattice.quantile(shape.counts, q) for q in (0.025, 0.5, 0.975))
    per, wider = (readings.length, 3.0) if _product(plan) else (1.0, 1.0)
    return Scale(middle / per, max((high - low) / 2 * wider / per, 1e-9))


def _forecast(found: SolvedWindow, after: Readings, scale: Scale | None) -> SolvedWindow:
    if scale is None:
        return found
    model = Model.of(after.state("sweep.spreads", Spreads), scale, _product(after.plan))
    if model is None:
        return found
    rule = after.plan.bound.rule(after.plan.preset)
    ends = (
        math.log(rule.lower) if rule.lower else -math.inf,
        math.log(rule.upper) if rule.upper else math.inf,
    )
    least, most = model.seen()
    lengths = [one for one in LENGTHS if least / FURTHER <= one <= most * FURTHER]
    text = "from the spread of log r by length; jackknife over groups and the misfit of the fit"
    predicted = []
    for one in model.forecast(lengths, ends):
        interval = (max(one.kept - NORMAL * one.error, 0.0), min(one.kept + NORMAL * one.error, 1.0))
        kept = Number(value=one.kept, interval=interval, unit="fraction", over="sequences", formula=text)
        seen = None
        if one.observed is not None:
            seen = Number(value=one.observed, unit="fraction", over="sequences")
        predicted.append(PredictedKeep(length=one.length, kept=kept, observed=seen))
    falling = "√a of √(a/L + b), the spread of log r per token at L tokens: what averages out"
    spread = {
        "falling": Number(value=math.sqrt(model.whole.falling), unit="nats", formula=falling),
        "staying": Number(
            value=math.sqrt(model.whole.staying), unit="nats", formula="√b of the same: what does not"
        ),
    }
    return found.model_copy(update={"predicted": predicted, "spread": spread})
