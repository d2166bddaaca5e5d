"""The bounds that keep an asked share, and what they would keep of other lengths."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from offpol_diag import loglattice
from offpol_diag.accumulators import State
from offpol_diag.batch import Batch
from offpol_diag.engines import Engine
from offpol_diag.errors import UsageError
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset, Reject
from offpol_diag.readers import Dump
from offpol_diag.summary import Number, PredictedKeep, SolvedWindow
from offpol_diag.sweeps.columns import Plan, statistic, swept
from offpol_diag.sweeps.dial import Dial
from offpol_diag.sweeps.lengths import Forecast, Model, Scale, Spreads
from offpol_diag.sweeps.numbers import Readings
from offpol_diag.sweeps.ranks import Near, around
from offpol_diag.tally import Tally

SIGNED = ("ratio", "k1", "prob_diff")
"""Statistics that lie on both sides of what they are on-policy."""
LENGTHS = tuple(2.0**power for power in range(5, 18))
FURTHER = 8.0
"""How many times the longest response, or the shortest, a forecast reaches."""
SPARE = 1e-3
"""How far beyond the outermost value a bound is put, of that value."""
NORMAL = 1.96
MOST_NATS = 700.0
"""e^±this is still a float."""


def check(share: float) -> float:
    """The share asked for.

    Raises:
        UsageError: it is no share of anything.
    """
    if not 0 < share <= 1:  # also refuses NaN
        raise UsageError(f"--keep {share:g}: it must be above 0 and at most 1", "to keep 95%: --keep 0.95")
    return share


def solvable(preset: Preset, dial: Dial) -> None:
    """Refuse what no bound alone decides.

    Raises:
        UsageError: what the bound drops depends on more than each unit's own statistic.
    """
    held = dial.held(preset)
    hint = "leave --keep out: the table shows what each threshold keeps"
    if getattr(held, "among", "all") == "left" or getattr(held, "over", "") == "batch":
        raise UsageError(f"--keep: what {dial} of {preset.name} drops depends on other tokens", hint)
    if isinstance(held, Reject) and held.advantage != "any":
        raise UsageError(f"--keep: {dial} of {preset.name} acts only for some signs of the advantage", hint)


def sides(preset: Preset, dial: Dial, chosen: bool) -> tuple[str, ...]:
    """Which bounds are solved for: both where the preset has both, unless one of them was asked for."""
    held = dial.held(preset)
    signed = not isinstance(held, Reject) or held.statistic in SIGNED
    both = held.lower is not None and held.upper is not None and signed and not chosen
    return ("lower", "upper") if both or dial.side == "window" else (dial.side,)


@dataclass(frozen=True)
class Ends:
    """The bounds found.

    Attributes:
        bounds: side → bound, as a preset holds it.
        kept: units within.
        of: units there are.
        ties: how many more than asked.
    """

    bounds: dict[str, float]
    kept: int
    of: int
    ties: int


def solve(
    engine: Engine, dump: Dump, readings: Readings, share: float, asked: tuple[str, ...]
) -> tuple[SolvedWindow, Readings]:
    """The window; and the readings of the preset with it, which has been applied to the dump."""
    plan, shape = readings.plan, readings.shape
    assert shape is not None
    ends = _ends(engine, dump, readings, share, asked)
    preset = plan.dial.turned(plan.preset, ends.bounds)
    side = asked[-1]
    turned = replace(
        plan,
        study=replace(plan.study, presets=(preset,)),
        dial=replace(plan.dial, side=side),  # type: ignore[arg-type]
        values=(ends.bounds[side],),
    )
    scale = _scale(readings)
    seen = engine.reduce(dump, After(turned, scale))
    assert seen is not None
    after = Readings(turned, Tally(readings.tally.states | seen.states))
    point = after.point(0).model_copy(update={"bounds": plan.dial.places(ends.bounds), "own": False})
    found = SolvedWindow(asked=share, kept=ends.kept, of=ends.of, ties=ends.ties, point=point)
    return _forecast(_centred(found, readings, asked), after, scale), after


def _centred(found: SolvedWindow, readings: Readings, asked: tuple[str, ...]) -> SolvedWindow:
    if len(asked) < 2:
        return found
    per = "tokens" if readings.per_token else "sequences"
    number = Number(
        value=readings.centre(), unit="nats", over=per, formula="mean of the log of the statistic"
    )
    return found.model_copy(update={"centre": number})


# ---------------------------------------------------------------- bounds


def _ends(engine: Engine, dump: Dump, readings: Readings, share: float, asked: tuple[str, ...]) -> Ends:
    plan, shape = readings.plan, readings.shape
    assert shape is not None
    many = round(float(shape.counts.sum()))
    keep = max(1, math.ceil(share * many - 1e-9))
    below = {"lower": many - keep, "upper": 0}[asked[0]] if len(asked) == 1 else (many - keep) // 2
    ranks = {"lower": below + 1, "upper": below + keep}
    near = dict(
        zip(asked, around(engine, dump, plan, shape, tuple(ranks[side] for side in asked)), strict=True)
    )
    held = plan.dial.held(plan.preset)
    logs = not isinstance(held, Reject) or held.statistic == "ratio"
    bounds = {side: _bound(one, ranks[side], side, logs) for side, one in near.items()}
    kept = _upto(near, ranks, many) - _before(near, ranks)
    return Ends(bounds, kept, many, kept - keep)


def _upto(near: dict[str, Near], ranks: dict[str, int], many: int) -> int:
    """How many values are not above the upper bound."""
    if "upper" not in near:
        return many
    _, _, _, before, equal = near["upper"].at(ranks["upper"])
    return round(before + equal)


def _before(near: dict[str, Near], ranks: dict[str, int]) -> int:
    return round(near["lower"].at(ranks["lower"])[3]) if "lower" in near else 0


def _bound(near: Near, rank: int, side: str, logs: bool) -> float:
    """The shortest number between the last value kept and the first that is not."""
    down, value, up, _, _ = near.at(rank)
    spare = max(abs(value) * SPARE, 1e-9)
    if side == "upper":
        return shortest(value, up if up < math.inf else value + spare, logs, nearest=value)
    return shortest(down if down > -math.inf else value - spare, value, logs, nearest=value)


def shortest(low: float, high: float, logs: bool, nearest: float) -> float:
    """The number of fewest digits that lies, with its log if asked, strictly between two values.

    Where floats leave no room between them: the one whose log is `nearest`.

    Raises:
        UsageError: its log is beyond what floats hold.
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
    """The job that follows: the preset with its new bounds, and how the statistic spreads by length."""

    plan: Plan
    scale: Scale | None

    def __call__(self, batch: Batch) -> Tally:
        """Of one batch."""
        batch = self.plan.found.filled(batch)
        states: dict[str, State] = dict(swept(self.plan, batch))
        if self.scale is not None:
            states["sweep.spreads"] = _spreads(self.plan, batch, self.scale)
        return Tally(states)


def _spreads(plan: Plan, batch: Batch, scale: Scale) -> Spreads:
    scene = Scene.of(batch, 0, 1, plan.found.settled)
    level = statistic(scene, plan.preset, plan.dial)
    assert level is not None
    there = torch.nonzero(batch.lengths > 0).flatten()
    lengths, x = batch.lengths[there], level.values[there]
    scene.forget()
    return Spreads.of(x / lengths if _product(plan) else x, lengths, batch.key[there], scale)


def _product(plan: Plan) -> bool:
    return getattr(plan.dial.held(plan.preset), "over", "") == "sum"


def _scale(readings: Readings) -> Scale | None:
    """The axis for log r per token; None where the statistic is not the ratio of a sequence."""
    held, shape = readings.plan.dial.held(readings.plan.preset), readings.shape
    ratio = not isinstance(held, Reject) or held.statistic == "ratio"
    if not ratio or getattr(held, "over", "") not in ("sum", "mean") or shape is None:
        return None
    low, middle, high = (loglattice.quantile(shape.counts.cpu(), q) for q in (0.025, 0.5, 0.975))
    per, wider = (1.0, 1.0)
    if _product(readings.plan):
        per, wider = float(readings.sums["tokens"][0] / readings.sums["sequences"][0]), 3.0
    return Scale(middle / per, max((high - low) / 2 * wider / per, 1e-9))


def _forecast(found: SolvedWindow, after: Readings, scale: Scale | None) -> SolvedWindow:
    if scale is None:
        return found
    spreads = after.tally.states["sweep.spreads"]
    assert isinstance(spreads, Spreads)
    model = Model.of(spreads, scale, _product(after.plan))
    if model is None:
        return found
    held = after.plan.dial.held(after.plan.preset)
    low, high = (-math.inf if not held.lower else math.log(held.lower)), _log_or_inf(held.upper)
    least, most = model.seen()
    lengths = [one for one in LENGTHS if least / FURTHER <= one <= most * FURTHER]
    predicted = [_predicted(one) for one in model.forecast(lengths, (low, high))]
    spread = {
        "falling": Number(
            value=math.sqrt(model.whole.falling),
            unit="nats",
            formula="√a of √(a/L + b), the spread of log r per token at L tokens: what averages out",
        ),
        "staying": Number(
            value=math.sqrt(model.whole.staying), unit="nats", formula="√b of the same: what does not"
        ),
    }
    return found.model_copy(update={"predicted": predicted, "spread": spread})


def _log_or_inf(bound: float | None) -> float:
    return math.log(bound) if bound else math.inf


def _predicted(one: Forecast) -> PredictedKeep:
    low, high = max(one.kept - NORMAL * one.error, 0.0), min(one.kept + NORMAL * one.error, 1.0)
    text = "from the spread of log r by length; jackknife over groups and the misfit of the fit"
    kept = Number(value=one.kept, interval=(low, high), unit="fraction", over="sequences", formula=text)
    seen = None if one.observed is None else Number(value=one.observed, unit="fraction", over="sequences")
    return PredictedKeep(length=one.length, kept=kept, observed=seen)
