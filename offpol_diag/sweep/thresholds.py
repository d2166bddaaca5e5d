"""The bound of a preset that a sweep varies, and its thresholds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Literal

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.presets import Preset, Reject, Veto, Weight

Side = Literal["upper", "lower", "window"]
Bounded = Weight | Reject | Veto
LOGARITHMIC = ("ratio", "mult_prob_error")
"""Statistics whose bounds are factors: 1.001 is near, and a window is [1/b, b]."""
ALIKE = 0.01
"""Largest relative difference of |log| of two bounds that count as 1/b and b."""

# ---------------------------------------------------------------- the varying bound


@dataclass(frozen=True)
class SweptBound:
    """One bound of a preset, or two that vary together.

    Attributes:
        part: weight, reject or veto.
        index: position of the rule in reject; None for the others.
        side: upper, lower, or window: [1/b, b].
    """

    part: str
    index: int | None
    side: Side

    def __str__(self) -> str:
        return self.place if self.side == "window" else f"{self.place}.{self.side}"

    @property
    def place(self) -> str:
        """The key of the part in a preset's table: `weight`, `reject[0]`, `veto`."""
        return self.part if self.index is None else f"{self.part}[{self.index}]"

    def rule(self, preset: Preset) -> Bounded:
        """Return the part of the preset that has the bound."""
        found: Bounded = preset.reject[self.index] if self.index is not None else getattr(preset, self.part)
        return found

    def over(self, preset: Preset) -> str:
        """Return the level that the bound acts on: token, segment, sum, mean, …; token for a veto."""
        return "token" if self.part == "veto" else self.rule(preset).over  # type: ignore[union-attr]

    def statistic(self, preset: Preset) -> str:
        """Return the name of the statistic that is compared with the bound."""
        rule = self.rule(preset)
        return rule.statistic if isinstance(rule, Reject) else "ratio"

    def threshold(self, preset: Preset) -> float | None:
        """Return the preset's own bound; for a window, its upper end."""
        rule = self.rule(preset)
        return rule.lower if self.side == "lower" else rule.upper

    def bounds(self, value: float) -> dict[str, float]:
        """Return the keys of the part that vary, with their values at a threshold."""
        return {"lower": 1 / value, "upper": value} if self.side == "window" else {self.side: value}

    def places(self, bounds: Mapping[str, float]) -> dict[str, float]:
        """Return the bounds by their full keys in a preset's table."""
        return {f"{self.place}.{side}": value for side, value in bounds.items()}

    def moved(self, preset: Preset, bounds: Mapping[str, float | None]) -> Preset:
        """Return the preset with bounds of the part replaced."""
        rule: Any = replace(self.rule(preset), **bounds)  # type: ignore[arg-type]
        if self.index is None:
            return replace(preset, **{self.part: rule})
        rules = (*preset.reject[: self.index], rule, *preset.reject[self.index + 1 :])
        return replace(preset, reject=rules)


def swept_bounds(preset: Preset) -> tuple[SweptBound, ...]:
    """List the bounds of a preset that can vary: rules first, then weight and veto; windows before sides."""
    if not preset.apply:
        return ()
    parts: list[tuple[str, int | None, Bounded | None]] = [
        *(("reject", index, rule) for index, rule in enumerate(preset.reject)),
        ("weight", None, preset.weight),
        ("veto", None, preset.veto),
    ]
    sides: tuple[Side, ...] = ("window", "upper", "lower")
    return tuple(
        SweptBound(part, index, side)
        for part, index, rule in parts
        if rule and not (isinstance(rule, Weight) and rule.action not in ("truncate", "mask"))
        for side in sides
        if (_reciprocal(rule) if side == "window" else getattr(rule, side) is not None)
    )


def _reciprocal(rule: Bounded) -> bool:
    """Return whether the bounds are 1/b and b."""
    factor = not isinstance(rule, Reject) or rule.statistic == "ratio"
    if not factor or isinstance(rule, Veto) or not rule.lower or not rule.upper or rule.upper <= 1:
        return False
    up = math.log(rule.upper)
    return abs(up + math.log(rule.lower)) <= ALIKE * up


def pick(preset: Preset, which: str | None) -> SweptBound:
    """Return the bound of this name (`reject.upper`: of the first rule that has one), or the main one.

    Raises:
        UsageError: the preset has no bound, or none of this name.
    """
    found = swept_bounds(preset)
    if not found:
        why = "it has no bound" if preset.apply else "its numbers are logged and nothing is applied"
        raise UsageError(
            f"there is nothing to sweep in {preset.name}: {why}", "name a preset with a threshold"
        )
    if which is None:
        return found[0]
    named = {name: one for one in reversed(found) for name in (str(one), str(replace(one, index=None)))}
    if which not in named:
        known = [str(one) for one in found]
        hint = did_you_mean(which, known) or f"--which may be {', '.join(known)}"
        raise UsageError(f'{preset.name} has no bound "{which}"', hint)
    return named[which]


# ---------------------------------------------------------------- thresholds

STEPS = (1.0, 1.5, 2.0, 3.0, 5.0, 7.0)
"""Round numbers within a decade."""
FAR = (2.0, 2.5, 3.0, 4.0, 5.0, 7.0, 10.0, 15.0, 20.0, 30.0, 50.0, 100.0, 1000.0, 10_000.0)
MOST = 12
"""Most thresholds that a table shows, roughly."""
LIMIT = 200
"""Most thresholds that `--at` accepts."""
EXAMPLE = "--at 1.0001,1.001,1.01"


def parse(text: str, preset: Preset, bound: SweptBound) -> tuple[float, ...]:
    """Parse the thresholds of `--at`, which must ascend.

    Raises:
        UsageError: not numbers, not ascending, too many, or invalid for the bound.
    """
    values = []
    for word in map(str.strip, text.split(",")):
        try:
            values.append(float(word))
        except ValueError:
            raise UsageError(f'--at: "{word}" is no number', f"write them like {EXAMPLE}") from None
        if not math.isfinite(values[-1]):
            raise UsageError(f"--at: {word} is no threshold", "give finite numbers")
    if any(one >= two for one, two in pairwise(values)):
        raise UsageError(f"--at {text}: thresholds must rise", f"write them like {EXAMPLE}")
    if len(values) > LIMIT:
        raise UsageError(f"--at has {len(values)} thresholds, and {LIMIT} are the most", "leave some out")
    for value in values:
        if objection := _objection(value, preset, bound):
            raise UsageError(f"--at {value:g}: {bound}{objection[0]}", objection[1])
    return tuple(values)


def _objection(value: float, preset: Preset, bound: SweptBound) -> tuple[str, str] | None:
    """Return why a threshold is invalid for the bound, and a hint; None if it is valid."""
    if bound.side == "window" and value <= 1:
        hint = f"give b, or sweep one side with --which {bound}.upper"
        return " is the window [1/b, b] on r, and b must be above 1", hint
    moved = bound.rule(bound.moved(preset, bound.bounds(value)))
    for key, rule in moved.slips():
        return f"{key and ': '}{key}: {rule}", "leave that one out"
    return None


def round_numbers(preset: Preset, bound: SweptBound) -> tuple[float, ...]:
    """List all round thresholds of a wide range, ascending, and the preset's own."""

    def decades(first: int, last: int) -> list[float]:
        return [_tidy(step * 10.0**power) for power in range(first, last + 1) for step in STEPS]

    statistic, below = bound.statistic(preset), bound.side == "lower"
    if statistic not in LOGARITHMIC:
        sign = -1 if below and statistic in ("k1", "prob_diff") else 1
        values = [sign * x for x in decades(-8, 2)]
    elif below:
        values = [_tidy(1 - x) for x in decades(-6, -1)] + [0.1**k for k in range(1, 9)]
    else:
        values = [_tidy(1 + x) for x in decades(-6, -1)] + list(FAR)
    found = {value for value in values if _objection(value, preset, bound) is None}
    own = bound.threshold(preset)
    return tuple(sorted(found if own is None else found | {own}))


def _tidy(x: float) -> float:
    """Return the float nearest to the intended decimal: 9 significant digits."""
    return float(f"{x:.9g}")


def informative(values: Sequence[float], effects: Sequence[float], own: float | None) -> list[int]:
    """Select the thresholds to show: where the effect changes, evenly thinned, and the preset's own.

    `effects` holds the effect, e.g. the share kept, of each of the ascending `values`. Returns indices.
    """
    changes = [at for at, (one, two) in enumerate(pairwise(effects)) if abs(one - two) > 1e-12]
    first, last = (changes[0], changes[-1] + 1) if changes else (0, len(values) - 1)
    shown = range(first, last + 1)
    kept = {*shown[:: max(1, math.ceil(len(shown) / MOST))], last}
    return sorted(kept | {at for at, value in enumerate(values) if value == own})
