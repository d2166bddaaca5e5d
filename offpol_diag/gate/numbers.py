"""Lookup of a number by name in a result: of the whole dump, at each step, or pooled over steps.

A `str` in place of a number is the reason why there is none.

The interval of a quantifier (mean, median, percentile) applies it to the steps' lower ends and to their upper
ends: this is conservative, and assumes nothing about how steps depend on each other. A step without an
interval contributes its value to both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offpol_diag.errors import did_you_mean
from offpol_diag.gate.bounds import GAPS, PERCENTILE, Name, Steps, splits
from offpol_diag.numerals import doubted
from offpol_diag.presets.catalogue import plain
from offpol_diag.summary import Number, Place, PresetResult, Summary

Found = Number | str

ALL_STEPS = Steps()
FEWEST = 5
"""Fewest sequences of a step for which its interval is used."""

# ---------------------------------------------------------------- of the whole dump


def find(summary: Summary, name: str, near: bool = True) -> Found:
    """Return the number of this name, or why there is none; `near`: suggest similar names (slow)."""
    if name in summary.metrics:
        return summary.metrics[name]
    for prefix, metric in splits(name):
        result = preset(summary, prefix)
        if result is None:
            continue
        if result.needs:
            return f"{prefix} needs {', '.join(result.needs)}, which the dump lacks"
        known = list(result.metrics) if near else []
        return result.metrics.get(metric) or _no_metric(metric, known, f"of {prefix}")
    if not near:
        return _no_metric(name, [], "in this result")
    own = {key: list(result.metrics) for key, result in summary.presets.items()}
    named = next(
        (prefix for prefix, metric in splits(name) if any(metric in one for one in own.values())), ""
    )
    if named and not did_you_mean(named, [*own, *GAPS]):
        return f"{named} is not among the presets of this result; analyze the dump with --presets {named}"
    every = [*summary.metrics, *(f"{key}.{metric}" for key, one in own.items() for metric in one)]
    return _no_metric(name, every, "in this result")


def _no_metric(name: str, known: list[str], where: str) -> str:
    return "; ".join(part for part in (f'no metric "{name}" {where}', did_you_mean(name, known)) if part)


def preset(summary: Summary, name: str) -> PresetResult | None:
    """Return the preset of this name or alias, in any spelling that the catalogue accepts, or None."""
    if name in summary.presets:
        return summary.presets[name]
    rows = summary.presets.items()
    return next((row for key, row in rows if plain(name) in map(plain, (key, *row.aliases))), None)


def preset_of(summary: Summary, name: str) -> PresetResult | None:
    """Return the preset that a number belongs to; None for a metric of a policy gap."""
    if name in summary.metrics:
        return None
    found = (preset(summary, prefix) for prefix, _ in splits(name))
    return next((one for one in found if one is not None), None)


# ---------------------------------------------------------------- by step


@dataclass(frozen=True)
class Series:
    """One number at each selected step, in order.

    Attributes:
        keys: the steps.
        numbers: the number at each step.
        missing: a sentence if some selected steps are not in the result; else empty.
    """

    keys: tuple[str, ...]
    numbers: tuple[Number, ...]
    missing: str = ""


def series(summary: Summary, name: str, steps: Steps, near: bool = True) -> Series | str:
    """Return the number at each step, or the reason why there is none; `near` as in `find`."""
    location = summary.by.get("step")
    if location is None:
        return "the dump has no column step"
    whole = find(summary, name, near)
    chosen = [place for place in location.places if _step(place) in steps]
    if not chosen:
        return f"no step of this dump is among {steps}" if steps else "no row of this dump has a step"
    main = next((prefix for prefix in ("", *(f"{gap}." for gap in GAPS)) if _known(summary, prefix)), "")
    numbers = [_at(place, name, main, whole) for place in chosen]
    found = tuple(one for one in numbers if one is not None)
    if len(found) < len(chosen):
        return _unlisted(whole, name)
    of_one = steps.within.first == steps.within.last  # a single step that is listed is complete
    every = len(chosen) + (0 if of_one else location.left_out)
    missing = f"only {len(chosen)} of {every} steps are in this result" if len(chosen) < every else ""
    return Series(tuple(place.key for place in chosen), found, missing)


def any_step(summary: Summary, steps: Steps) -> bool:
    """Return whether the dump has any of these steps."""
    location = summary.by.get("step")
    return location is not None and any(_step(place) in steps for place in location.places)


def _step(place: Place) -> float:
    """Return the step of a place; NaN, which lies in no span, for rows without a step."""
    try:
        return float(place.key)
    except ValueError:
        return math.nan


def _known(summary: Summary, prefix: str) -> bool:
    """Return whether the dump has this policy gap; metrics by place are those of its first gap."""
    number = summary.metrics.get(f"{prefix}k3", Number())
    return number.value is not None or number.log10 is not None


def _at(place: Place, name: str, main: str, whole: Found) -> Number | None:
    """Return the number at a step; it is unreliable if that of the whole dump is."""
    own = place.metrics.get(name.removeprefix(main)) if name.startswith(main) else None
    found = place.asked.get(name) or own
    if found is None:
        return None
    if place.sequences < FEWEST:
        found = found.model_copy(update={"interval": None})
    unreliable = isinstance(whole, Number) and doubted(whole)
    return found.model_copy(update={"note": whole.note}) if unreliable else found  # type: ignore[union-attr]


def _unlisted(whole: Found, name: str) -> str:
    """Return the reason why a number is not listed by step."""
    if isinstance(whole, str):
        return whole
    if whole.value is None and whole.log10 is None and whole.unknown:
        return whole.unknown
    return f"{name} is not listed by step in this result; gate the dump itself"


# ---------------------------------------------------------------- one number of all steps


def look_up(summary: Summary, name: Name, steps: Steps = ALL_STEPS, near: bool = True) -> tuple[Found, str]:
    """Return the number of this name, and the step it was taken from (empty if not a single step)."""
    if not name.over:
        return find(summary, name.number, near), ""
    found = series(summary, name.number, steps, near)
    if isinstance(found, str):
        return found, ""
    sizes = [size(number) for number in found.numbers]
    picked = {"first": 0, "last": len(sizes) - 1}.get(name.over)
    if picked is None:
        silent = found.missing or _unknown(found)
        if silent:
            return silent, ""
        if name.over in ("min", "max"):
            picked = sizes.index(min(sizes) if name.over == "min" else max(sizes))
    if picked is None:
        return pool(found.numbers, name.over), ""
    return found.numbers[picked], f"step {found.keys[picked]}"


def size(number: Number) -> float:
    """Return the sort key of a number: its value, or +∞ if it overflows float64."""
    if number.value is not None:
        return number.value
    return math.inf if number.log10 is not None else math.nan


def _unknown(found: Series) -> str:
    for key, number in zip(found.keys, found.numbers, strict=True):
        if math.isnan(size(number)):
            return f"at step {key}: {number.unknown or 'it is not a number'}"
    return ""


def pool(numbers: Sequence[Number], over: str) -> Number:
    """Return the mean, median or a percentile (`p90`) of numbers, with its interval."""
    percentile = PERCENTILE.fullmatch(over)
    share = float(percentile[1]) / 100 if percentile else 0.5

    def make(values: Sequence[float]) -> float:
        return math.fsum(values) / len(values) if over == "mean" else quantile(values, share)

    value = make([size(one) for one in numbers])
    if not math.isfinite(value):
        return Number(unknown="overflows float64 at some steps", unit=numbers[0].unit)
    lows, highs = zip(*(one.interval or (size(one), size(one)) for one in numbers), strict=True)
    interval = (make(lows), make(highs)) if any(one.interval for one in numbers) else None
    note = next((one.note for one in numbers if doubted(one)), None)
    return Number(value=value, interval=interval, unit=numbers[0].unit, note=note)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly between order statistics."""
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (at - low) * (ranked[high] - ranked[low])
