"""Numbers by training step, and one number of all of them.

The interval of a quantifier goes from that of the steps' lower ends to that of their upper ends: it may be
wider than need be, and supposes nothing about how steps depend on each other. A step without an interval
counts with its value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from offpol_diag.gate.bounds import GAPS, PERCENTILE, Steps
from offpol_diag.gate.find import Found, find
from offpol_diag.numerals import doubted
from offpol_diag.summary import Location, Number, Place, Summary

FEWEST = 5
"""Sequences of a step below which an interval says nothing."""


@dataclass(frozen=True)
class Series:
    """One number at every step asked for, in the order of the steps."""

    keys: tuple[str, ...]
    numbers: tuple[Number, ...]
    left_out: int = 0

    @property
    def missing(self) -> str:
        """Why nothing can be said of all steps; empty where all are here."""
        here = len(self.keys)
        return f"only {here} of {here + self.left_out} steps are in this result" if self.left_out else ""


def series(summary: Summary, name: str, steps: Steps, near: bool = True) -> Series | str:
    """The number at each step, or why there is none; `near` as in `find`."""
    location = summary.by.get("step")
    if location is None:
        return "the dump has no column step"
    whole = find(summary, name, near)
    chosen = [place for place in location.places if _at(place) in steps]
    if not chosen:
        return f"no step of this dump is among {steps}" if steps else "no row of this dump has a step"
    found = [_number(summary, place, name) for place in chosen]
    if None in found:
        return _unlisted(whole, name)
    numbers = tuple(_doubtful(one, whole) for one in found if one is not None)
    return Series(tuple(place.key for place in chosen), numbers, _left_out(location, steps))


def any_step(summary: Summary, steps: Steps) -> bool:
    """Whether the dump has a step among these."""
    location = summary.by.get("step")
    return location is not None and any(_at(place) in steps for place in location.places)


def _at(place: Place) -> float:
    """Where the place lies; rows without a step lie nowhere."""
    try:
        return float(place.key)
    except ValueError:
        return math.nan


def _left_out(location: Location, steps: Steps) -> int:
    """Steps that the listing leaves out; of a single step nothing can lie between."""
    return 0 if steps.within.first == steps.within.last else location.left_out


def _unlisted(whole: Found, name: str) -> str:
    """Why a number is not listed by step."""
    if isinstance(whole, str):
        return whole
    if whole.value is None and whole.log10 is None and whole.unknown:
        return whole.unknown
    return f"{name} is not listed by step in this result; gate the dump itself"


def _number(summary: Summary, place: Place, name: str) -> Number | None:
    prefix = _main(summary)
    found = place.asked.get(name) or (
        place.metrics.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
    )
    if found is None:
        return None
    return found if place.sequences >= FEWEST else found.model_copy(update={"interval": None})


def _main(summary: Summary) -> str:
    """The prefix of the drift that places are about: the first that the dump has."""
    known = (prefix for prefix in ("", *(f"{gap}." for gap in GAPS)) if _known(summary, prefix))
    return next(known, "")


def _known(summary: Summary, prefix: str) -> bool:
    number = summary.metrics.get(f"{prefix}k3", Number())
    return number.value is not None or number.log10 is not None


def _doubtful(number: Number, whole: Found) -> Number:
    """A step's number shares the tail that makes the whole dump's unreliable."""
    if isinstance(whole, Number) and doubted(whole):
        return number.model_copy(update={"note": whole.note})
    return number


# ---------------------------------------------------------------- quantifiers


def quantile(values: Sequence[float], share: float) -> float:
    """Linear between the two nearest order statistics."""
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (at - low) * (ranked[high] - ranked[low])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


POOLED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": _mean,
    "median": lambda values: quantile(values, 0.5),
}
"""Numbers made of all steps."""

PICKED: Mapping[str, Callable[[Sequence[Number]], int]] = {
    "first": lambda numbers: 0,
    "last": lambda numbers: len(numbers) - 1,
    "min": lambda numbers: min(range(len(numbers)), key=lambda at: size(numbers[at])),
    "max": lambda numbers: max(range(len(numbers)), key=lambda at: size(numbers[at])),
}
"""Numbers that are those of one step."""

ENDS = ("first", "last")
"""Of these two nothing but that step needs to be known."""


def size(number: Number) -> float:
    """By what numbers are ranked; what overflows lies above all floats."""
    if number.value is not None:
        return number.value
    return math.inf if number.log10 is not None else math.nan


def pick(found: Series, over: str) -> tuple[Number, str] | str:
    """The number of all steps and the step it is that of (empty: of none alone), or why there is none."""
    if over not in ENDS:
        silent = found.missing or _unknown(found)
        if silent:
            return silent
    if over in PICKED:
        at = PICKED[over](found.numbers)
        return found.numbers[at], f"step {found.keys[at]}"
    return pool(found.numbers, over), ""


def _unknown(found: Series) -> str:
    for key, number in zip(found.keys, found.numbers, strict=True):
        if math.isnan(size(number)):
            return f"at step {key}: {number.unknown or 'it is not a number'}"
    return ""


def pool(numbers: Sequence[Number], over: str) -> Number:
    """One number of all."""
    percentile = PERCENTILE.fullmatch(over)
    share = float(percentile[1]) / 100 if percentile else 0.0
    make = POOLED[over] if over in POOLED else lambda values: quantile(values, share)
    ends = [one.interval or (size(one), size(one)) for one in numbers]
    value = make([size(one) for one in numbers])
    if not math.isfinite(value):
        return Number(unknown="overflows float64 at some steps", unit=numbers[0].unit)
    bare = all(one.interval is None for one in numbers)
    interval = None if bare else (make([low for low, _ in ends]), make([high for _, high in ends]))
    note = next((one.note for one in numbers if doubted(one)), None)
    return Number(value=value, interval=interval, unit=numbers[0].unit, note=note)
