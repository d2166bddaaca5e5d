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

from offpol_diag.directions import GAP_PREFIXES
from offpol_diag.errors import did_you_mean
from offpol_diag.gate.aliases import advice
from offpol_diag.gate.bounds import GAPS, PERCENTILE, Name, Steps, splits
from offpol_diag.numerals import doubted
from offpol_diag.presets.catalogue import plain
from offpol_diag.summary import Number, Place, PresetResult, Summary, finite

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
        if result is not None and result.needs:
            return f"{prefix} needs {', '.join(result.needs)}, which the dump lacks"
        if result is not None:
            known = list(result.metrics) if near else []
            return result.metrics.get(metric) or _no_metric(metric, known, f"of {prefix}")
    if not near:
        return _no_metric(name, [], "in this result")
    own = {key: list(result.metrics) for key, result in summary.presets.items()}
    metrics = {metric for result in own.values() for metric in result}
    named = next((prefix for prefix, metric in splits(name) if metric in metrics), "")
    if named and not did_you_mean(named, [*own, *GAPS]):
        return f"{named} is not among the presets of this result; analyze the dump with --presets {named}"
    every = [*summary.metrics, *(f"{key}.{metric}" for key, result in own.items() for metric in result)]
    return _no_metric(name, every, "in this result")


def _no_metric(name: str, known: list[str], where: str) -> str:
    more = advice(name) or did_you_mean(name, known)
    return "; ".join(part for part in (f'no metric "{name}" {where}', more) if part)


def no_metric(summary: Summary, name: str) -> str:
    """Return why no dump could have a number of this name; empty where one could.

    A result of other presets, or of fewer policies, lacks numbers that another one has.
    """
    gap = next((one for one in GAP_PREFIXES if one and name.startswith(one)), "")
    if name.removeprefix(gap) in summary.metrics:
        return ""
    found = find(summary, name)
    return found if isinstance(found, str) and found.startswith("no metric") else ""


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
    return next((found for prefix, _ in splits(name) if (found := preset(summary, prefix))), None)


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
    """Return the number at each step, or the reason why there is none; `near` as in `find`.

    A number is unreliable at each step if that of the whole dump is. Metrics by place are those of the first
    policy gap of the dump.
    """
    location = summary.by.get("step")
    if location is None:
        return "the dump has no column step"
    whole, chosen = find(summary, name, near), chosen_steps(summary, steps)
    if not chosen:
        return f"no step of this dump is among {steps}" if steps else "no row of this dump has a step"
    first = {prefix: summary.metrics.get(f"{prefix}k3", Number()) for prefix in ("", "drift2.", "total.")}
    main = next((prefix for prefix, one in first.items() if not math.isnan(size(one))), "")
    update = {"note": whole.note} if isinstance(whole, Number) and doubted(whole) else {}
    numbers = []
    for place in chosen:
        own = place.metrics.get(name.removeprefix(main)) if name.startswith(main) else None
        number = place.asked.get(name) or own
        if number is not None:
            few = {"interval": None} if place.sequences < FEWEST else {}
            numbers.append(number.model_copy(update=few | update))
    if len(numbers) < len(chosen):
        if isinstance(whole, str):
            return whole
        unknown = whole.unknown if math.isnan(size(whole)) else None
        return unknown or f"{name} is not listed by step in this result; gate the dump itself"
    of_one = steps.within.first == steps.within.last  # a single step that is listed is complete
    every = len(chosen) + (0 if of_one else location.left_out)
    missing = f"only {len(chosen)} of {every} steps are in this result" if len(chosen) < every else ""
    return Series(tuple(place.key for place in chosen), tuple(numbers), missing)


def chosen_steps(summary: Summary, steps: Steps) -> list[Place]:
    """List the steps of the dump that are among these; rows without a step are in none."""

    def number(key: str) -> float:
        try:
            return float(key)
        except ValueError:
            return math.nan

    return [place for place in summary.by["step"].places if number(place.key) in steps]


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
        if found.missing:
            return found.missing, ""
        for key, number, its in zip(found.keys, found.numbers, sizes, strict=True):
            if math.isnan(its):
                return f"at step {key}: {number.unknown or 'it is not a number'}", ""
        if name.over not in ("min", "max"):
            return pool(found.numbers, name.over), ""
        picked = sizes.index(min(sizes) if name.over == "min" else max(sizes))
    return found.numbers[picked], f"step {found.keys[picked]}"


def size(number: Number) -> float:
    """Return the sort key of a number: its value, +∞ if it overflows float64, NaN if it is unknown."""
    if number.value is not None:
        return number.value
    return math.inf if number.log10 is not None else math.nan


def pool(numbers: Sequence[Number], over: str) -> Number:
    """Return the mean, median or a percentile (`p90`) of numbers, with its interval."""
    percentile = PERCENTILE.fullmatch(over)
    share = float(percentile[1]) / 100 if percentile else 0.5

    def make(values: Sequence[float]) -> float:
        if over != "mean":
            return quantile(values, share)
        return 2 * math.fsum(x / 2 / len(values) for x in values)  # their sum may overflow

    value = make([size(one) for one in numbers])
    if not math.isfinite(value):
        return Number(unknown="overflows float64 at some steps", unit=numbers[0].unit)
    lows, highs = zip(*(one.interval or (size(one), size(one)) for one in numbers), strict=True)
    interval = (finite(make(lows)), finite(make(highs))) if any(one.interval for one in numbers) else None
    note = next((one.note for one in numbers if doubted(one)), None)
    return Number(value=value, interval=interval, unit=numbers[0].unit, note=note)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly between order statistics; values may be infinite."""
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ranked) - 1)
    beyond = at - low
    return ranked[low] + beyond * (ranked[high] - ranked[low]) if beyond else ranked[low]
