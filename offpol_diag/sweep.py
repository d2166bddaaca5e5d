"""One preset at many thresholds, which are presets that differ in one bound; the bounds that keep a share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from offpol_diag.core.evaluate import Rule
from offpol_diag.core.gap import Tokens
from offpol_diag.core.observe import examine
from offpol_diag.core.preset_numbers import AT_LAG_0
from offpol_diag.core.state import Array
from offpol_diag.core.study import Study
from offpol_diag.diagnosis.decide import diagnosed
from offpol_diag.dump.batch import Batch
from offpol_diag.dump.read import Dump
from offpol_diag.errors import DumpError, UsageError, did_you_mean
from offpol_diag.presets import OF_SEQUENCES, Preset, Reject, Weight, problems
from offpol_diag.presets.grammar import FACTORS, name_with
from offpol_diag.presets.words import RATIOS, judged
from offpol_diag.result import Result, SolvedWindow, Sweep, SweptPoint

SIGNED = ("ratio", "k1", "prob_diff")
"""Statistics that deviate from their on-policy value in both directions."""
ALIKE = 0.01
"""Largest relative difference of |log| of two bounds that count as 1/b and b."""
METRICS = (
    *("tokens_weighted", "tokens_rejected", "sequences_dropped", "truncated_high", "truncated_low"),
    *("ess_tokens", "ess_sequences", "weight_mean", "chi2_token", "chi2_sequence", AT_LAG_0.name),
)
"""Numbers of a preset that are listed at each threshold."""


@dataclass(frozen=True)
class Bound:
    """One bound of a preset, or two that move together.

    Attributes:
        place: the key of its part in the preset's table: `weight`, `reject[0]`.
        side: upper, lower, or window: [1/b, b].
        rule: that part.
    """

    preset: Preset
    place: str
    side: Literal["upper", "lower", "window"]
    rule: Weight | Reject

    def __str__(self) -> str:
        return self.place if self.side == "window" else f"{self.place}.{self.side}"

    @property
    def statistic(self) -> str:
        """The name of the statistic that is compared with the bound."""
        return self.rule.statistic if isinstance(self.rule, Reject) else "ratio"

    @property
    def unit(self) -> str:
        """What the bound acts on: token or sequence."""
        return "sequence" if self.rule.over in OF_SEQUENCES else "token"

    @property
    def own(self) -> float:
        """The preset's own threshold; of a window its upper end."""
        return (self.rule.lower if self.side == "lower" else self.rule.upper) or 0.0

    def ends(self, value: float) -> dict[str, float]:
        """Return the keys of the part that move, with their values at a threshold."""
        return {"lower": 1 / value, "upper": value} if self.side == "window" else {self.side: value}

    def moved(self, ends: Mapping[str, float]) -> Preset:
        """Return the preset with bounds of the part replaced, under a name of its own.

        Its weights are not divided by their batch mean, after which a mean weight says nothing of a bound.
        """
        old, rule = self.preset, replace(self.rule, **ends)  # type: ignore[arg-type]
        weight = rule if isinstance(rule, Weight) else old.weight
        reject: Any = tuple(rule if one is self.rule else one for one in old.reject)
        weight = weight and replace(weight, normalize=False)
        name = f"{old.name}@{','.join(map(repr, ends.values()))}"
        return replace(old, name=name, weight=weight, reject=reject, generation=None, aliases=())

    def objection(self, value: float) -> str:
        """Return why a threshold is invalid; empty if it is valid."""
        if self.side == "window" and value <= 1:
            return "the window is [1/b, b] on r, and b must be above 1"
        moved = replace(self.rule, **self.ends(value))  # type: ignore[arg-type]
        return next((f"{key}: {why}" for key, why in problems(moved)), "")


def bounds_of(preset: Preset) -> dict[str, Bound]:
    """Return the bounds of a preset that can move, by name: of rules, then of the weight; windows first."""
    parts = {f"reject[{at}]": rule for at, rule in enumerate(preset.reject)} | {"weight": preset.weight}
    found = []
    for place, rule in parts.items():
        if rule is None or (isinstance(rule, Weight) and rule.action == "none"):
            continue
        factor = isinstance(rule, Weight) or rule.statistic == "ratio"
        if factor and rule.lower and rule.upper and rule.upper > 1:
            up = math.log(rule.upper)
            if abs(up + math.log(rule.lower)) <= ALIKE * up:
                found.append(Bound(preset, place, "window", rule))
        found += [Bound(preset, place, "upper", rule)] if rule.upper is not None else []
        found += [Bound(preset, place, "lower", rule)] if rule.lower is not None else []
    return {str(bound): bound for bound in found}


def pick(preset: Preset, which: str | None) -> Bound:
    """Return the bound of this name; without one that which the preset is about.

    Raises:
        UsageError: there is none.
    """
    bounds = bounds_of(preset)
    if not bounds:
        raise UsageError(f"{preset.name} has no bound that can be swept", "name a preset with a threshold")
    if which is not None and which not in bounds:
        hint = did_you_mean(which, list(bounds)) or f"--which may be {', '.join(bounds)}"
        raise UsageError(f'{preset.name} has no bound "{which}"', hint)
    return bounds[which or next(iter(bounds))]


# ---------------------------------------------------------------- thresholds

STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Round numbers within a decade."""
FAR = (2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 1000.0, 10_000.0)
"""Factors from 2 on."""


def round_thresholds(bound: Bound) -> list[float]:
    """Return round numbers of a wide range that a bound may be, and the preset's own, ascending."""
    # each is the float nearest to the intended decimal
    values = [float(f"{step * 10.0**power:.9g}") for power in range(-8, 3) for step in STEPS]
    if bound.statistic in FACTORS:
        sign = -1 if bound.side == "lower" else 1
        near_1 = [float(f"{1 + sign * x:.9g}") for x in values if 1e-6 <= x < 1]
        values = near_1 + ([10.0**-k for k in range(1, 9)] if bound.side == "lower" else [*FAR])
    elif bound.side == "lower" and bound.statistic in SIGNED:
        values = [-x for x in values]
    return sorted({bound.own, *(x for x in values if not bound.objection(x))})


def thresholds(bound: Bound, at: str) -> list[float]:
    """Parse the thresholds of `--at`.

    Raises:
        UsageError: they are no numbers, do not rise, or one is invalid for the bound.
    """
    try:
        values = [float(word) for word in at.split(",")]
    except ValueError:
        values = [math.nan]
    if not (all(map(math.isfinite, values)) and all(one < two for one, two in pairwise(values))):
        raise UsageError(f"--at {at}: thresholds are numbers that rise", "for example --at 1.0001,1.001,1.01")
    for value in values:
        if why := bound.objection(value):
            raise UsageError(f"--at {value:g}: {bound} of {bound.preset.name}: {why}", "leave it out")
    return values


@np.errstate(all="ignore")
def sweep(
    dump: Dump,
    preset: Preset,
    which: str | None = None,
    at: str | None = None,
    keep: float | None = None,
    **how: Any,
) -> Result:
    """Analyse a preset at many thresholds in one pass; the Result is that of the dump with `sweep` filled.

    Args:
        dump: what is read.
        preset: whose bound moves.
        which: the name of the bound that moves; None for the one it is about.
        at: the thresholds, rising, with commas between; None for round numbers.
        keep: the share that the bounds keep that are solved for, in a pass of its own.
        **how: as of `examine`.

    Raises:
        UsageError: a bound, a threshold or the share cannot be, or a column is missing.
    """
    bound = pick(preset, which)
    values = round_thresholds(bound) if at is None else thresholds(bound, at)
    if lacking := preset.lacking(Study.of(dump.columns).columns):
        missing = f"the dump has no {' and no '.join(lacking)}, which {preset.name} cannot do without"
        raise UsageError(missing, "name the column with --columns, or sweep another preset")
    solved = None if keep is None else solve(dump, bound, keep, alone=which is not None)
    every = [*map(bound.ends, values), *([solved[0]] if solved else [])]
    moved = [bound.moved(ends) for ends in every]
    whole = diagnosed(examine(dump, presets=(preset, *moved), lag_0=True, **how))
    points = [
        SweptPoint(
            threshold=ends.get("upper", ends.get("lower", 0.0)),
            bounds={f"{bound.place}.{side}": end for side, end in ends.items()},
            own=ends == bound.ends(bound.own or 1.0),
            numbers={name: x for name in METRICS if (x := whole.preset(one.name).get(name))},
        )
        for ends, one in zip(every, moved, strict=True)
    ]
    window = None
    if solved:
        point, (_, kept, of) = points.pop(), solved
        name = name_with(preset.name, {place: repr(end) for place, end in point.bounds.items()})
        window = SolvedWindow(asked=keep or 0.0, kept=kept, of=of, preset=name, point=point)
    on = judged(bound.rule) if isinstance(bound.rule, Reject) else RATIOS[bound.rule.over]
    about = {"preset": preset.name, "which": str(bound), "statistic": on, "unit": bound.unit}
    found = Sweep(**about, points=points, window=window)
    others = tuple(f"preset/{one.name}" for one in moved)
    numbers = {subject: one for subject, one in whole.subjects.items() if not subject.startswith(others)}
    presets = {preset.name: whole.presets[preset.name]}
    return whole.model_copy(update={"presets": presets, "subjects": numbers, "sweep": found})


# ---------------------------------------------------------------- the bounds that keep a share

SPARE = 1e-3
"""Relative distance of a bound from the outermost value, if there is no value beyond it."""
MOST_NATS = 700.0
"""Largest |log| of a bound, whose exponential is still a float."""


def statistic(batch: Batch, bound: Bound) -> Array:
    """Return what a bound is compared with, of tokens or of sequences; of ratios the logarithm."""
    rule, tokens = bound.rule, Tokens.of(batch)
    if isinstance(rule, Weight):
        rule = Reject("ratio", rule.over, safety=rule.safety, safety_at=rule.safety_at)
    x: Array = tokens.judged(Rule(bound.preset.policy, rule))
    return x[tokens.sequences.filled] if rule.over in OF_SEQUENCES else x


def solve(dump: Dump, bound: Bound, share: float, alone: bool) -> tuple[dict[str, float], int, int]:
    """Return the bounds that keep a share, as many lost below as above; how many they keep, and of how many.

    Each is the shortest number between the last value kept and the first lost; equal values are not parted.
    Both sides of a rule are solved for, unless one stands `alone`. All values are held, 8 bytes each.

    Raises:
        UsageError: it is no share, or what the bound drops depends on more than the statistic of each unit.
    """
    rule, logs = bound.rule, bound.statistic == "ratio"
    if not 0 < share <= 1:  # also refuses NaN
        raise UsageError(f"--keep {share:g}: it must be above 0 and at most 1", "to keep 95%: --keep 0.95")
    if isinstance(rule, Reject) and (rule.over == "batch" or rule.advantage != "any"):
        what = f"--keep: what {bound} of {bound.preset.name} drops is not decided by each {bound.unit} alone"
        raise UsageError(what, "leave --keep out: the table shows what each threshold keeps")
    x = np.sort(np.concatenate([statistic(batch, bound) for batch in dump.batches()] or [np.zeros(0)]))
    many = len(x)
    if not many:
        raise DumpError("the dump has no sequence", "check that its writer was closed")
    both = bound.side == "window"
    both = both or (not alone and bound.statistic in SIGNED and None not in (rule.lower, rule.upper))
    keep = max(1, math.ceil(share * many - 1e-9))
    below = (many - keep) // 2 if both else many - keep if bound.side == "lower" else 0
    first, last = int((x < x[below]).sum()), int((x <= x[below + keep - 1]).sum())  # kept is x[first:last]
    outside = np.maximum(abs(x[[0, -1]]) * SPARE, 1e-9) * [-1, 1] + x[[0, -1]]
    x = np.concatenate([outside[:1], x, outside[1:]]).tolist()
    kept_and_lost = {"lower": (x[first + 1], x[first]), "upper": (x[last], x[last + 1])}
    bounds = {
        side: shortest(*ends, logs) for side, ends in kept_and_lost.items() if both or side == bound.side
    }
    return bounds, (last if "upper" in bounds else many) - (first if "lower" in bounds else 0), many


def shortest(kept: float, lost: float, logs: bool) -> float:
    """Return the number of fewest digits strictly between two values; if `logs`, its log is.

    If no float lies between them: the one whose value, or log, is nearest to what is `kept`.

    Raises:
        UsageError: its exponential overflows or underflows.
    """
    low, high = sorted((kept, lost))
    if logs:
        if abs(kept) > MOST_NATS:
            what = (
                f"--keep: the bound would have to let through |log r| = {abs(kept):.4g} nats, which overflows"
            )
            raise UsageError(what, "ask for a smaller share")
        low, high = max(low, kept - 1), min(high, kept + 1)
    into, back = (math.exp, math.log) if logs else (float, float)
    for digits in range(1, 18):
        found = float(f"{into((low + high) / 2):.{digits}g}")
        if (found > 0 or not logs) and low < back(found) < high:
            return found
    return into(kept)
