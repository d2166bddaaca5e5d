"""Which bound of a preset moves, and the preset with that bound somewhere else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.presets import Preset, Reject, Veto, Weight

Side = Literal["upper", "lower", "window"]
Bounded = Weight | Reject | Veto
LOGARITHMIC = ("ratio", "mult_prob_error")
"""Statistics whose bounds are factors: 1.001 is near, and a window is [1/b, b]."""
ALIKE = 0.01
"""How far the logs of two bounds may differ for them to count as 1/b and b."""
ACTING = ("truncate", "mask")
"""Weights whose bounds do something."""


@dataclass(frozen=True)
class Dial:
    """One bound of a preset, or two that move together.

    Attributes:
        part: weight, reject or veto.
        index: which rule of reject; None for the others.
        side: upper, lower, or window: [1/b, b].
    """

    part: str
    index: int | None
    side: Side

    def __str__(self) -> str:
        place = self.part if self.index is None else f"{self.part}[{self.index}]"
        return place if self.side == "window" else f"{place}.{self.side}"

    def held(self, preset: Preset) -> Bounded:
        """The part of the preset that has the bound."""
        found: Bounded = preset.reject[self.index] if self.index is not None else getattr(preset, self.part)
        return found

    def at(self, preset: Preset) -> float | None:
        """Where the bound stands in the preset; of a window, its upper end."""
        held = self.held(preset)
        return held.lower if self.side == "lower" else held.upper

    def bounds(self, value: float) -> dict[str, float]:
        """The keys of the part that move, and where to."""
        return {"lower": 1 / value, "upper": value} if self.side == "window" else {self.side: value}

    def turned(self, preset: Preset, bounds: Mapping[str, float | None]) -> Preset:
        """The preset with the part's bounds replaced."""
        held = replace(self.held(preset), **bounds)  # type: ignore[arg-type]
        if self.index is None:
            return replace(preset, **{self.part: held})  # type: ignore[arg-type]
        rules: list[Any] = list(preset.reject)
        rules[self.index] = held
        return replace(preset, reject=tuple(rules))

    def places(self, bounds: Mapping[str, float]) -> dict[str, float]:
        """The bounds by their places in a preset's table."""
        base = replace(self, side="window")
        return {f"{base}.{side}": value for side, value in bounds.items()}

    def logarithmic(self, preset: Preset) -> bool:
        """Whether the bound is a factor."""
        held = self.held(preset)
        return not isinstance(held, Reject) or held.statistic in LOGARITHMIC


def dials(preset: Preset) -> tuple[Dial, ...]:
    """Every bound of a preset that can move, what it is about first."""
    return tuple(
        [
            *(one for index, rule in enumerate(preset.reject) for one in _sides("reject", index, rule)),
            *_of_weight(preset.weight),
            *(_sides("veto", None, preset.veto) if preset.veto else ()),
        ]
        if preset.apply
        else ()
    )


def _of_weight(weight: Weight | None) -> Iterator[Dial]:
    if weight is not None and weight.action in ACTING:
        yield from _sides("weight", None, weight)


def _sides(part: str, index: int | None, held: Bounded) -> Iterator[Dial]:
    """A window where the bounds are 1/b and b; then each bound there is."""
    sides: tuple[Side, ...] = ("window",) if _reciprocal(held) else ()
    for side in (*sides, "upper", "lower"):
        if side == "window" or getattr(held, side) is not None:
            yield Dial(part, index, side)


def _reciprocal(held: Bounded) -> bool:
    factor = not isinstance(held, Reject) or held.statistic == "ratio"
    if not factor or isinstance(held, Veto) or not held.lower or not held.upper or held.upper <= 1:
        return False
    up = math.log(held.upper)
    return abs(up + math.log(held.lower)) <= ALIKE * up


def pick(preset: Preset, which: str | None) -> Dial:
    """The bound asked for, or the one the preset is about.

    Raises:
        UsageError: the preset has no bound, or none of that name.
    """
    found = dials(preset)
    if not found:
        why = "its numbers are logged and nothing is applied" if not preset.apply else "it has no bound"
        raise UsageError(
            f"there is nothing to sweep in {preset.name}: {why}", "name a preset with a threshold"
        )
    if which is None:
        return found[0]
    named = {name: one for one in reversed(found) for name in _names(one)}
    if which not in named:
        known = [str(one) for one in found]
        hint = did_you_mean(which, known) or f"--which may be {', '.join(known)}"
        raise UsageError(f'{preset.name} has no bound "{which}"', hint)
    return named[which]


def _names(dial: Dial) -> tuple[str, ...]:
    """`reject.upper` is that of the first rule that has one."""
    return (str(dial), str(replace(dial, index=None)))
