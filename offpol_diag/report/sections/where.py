"""Section on the mismatch by step, position, length, probability, lag and group, and its histograms."""

from __future__ import annotations

from itertools import pairwise

from offpol_diag.blocks import Block, Cell, Figure, Section, Series, Table
from offpol_diag.numerals import count, say, say_value
from offpol_diag.summary import Histogram, Location, Number, Place, Summary

CURVES: tuple[tuple[str, str, tuple[tuple[float, str], ...]], ...] = (
    ("k3", "k3, nats per token", ()),
    ("mean_ratio", "E[r]", ((1.0, "no bias"),)),
    ("ess_tokens", "ESS over tokens", ()),
)
"""Metric, axis label, reference lines."""

WORST, MOST_NAMED = "k3", 3
"""Metric whose largest values are located, and the maximum number of groups named."""
_LOG_SPAN = 20.0
"""Ratio of maximum to minimum above which a positive curve is drawn on a log axis."""


def where(summary: Summary) -> Section | None:
    """Return three curves and a table per axis, then the histograms."""
    blocks = (
        *(block for place in summary.by.values() for block in _location(place)),
        *(_histogram(name, one) for name, one in summary.histograms.items()),
    )
    return Section("where", "Where the mismatch is", blocks) if blocks else None


def _location(location: Location) -> tuple[Block, ...]:
    drawn = tuple(
        _curve(location, name, label, reference)
        for name, label, reference in CURVES
        if len(location.places) > 1 and any(name in place.metrics for place in location.places)
    )
    return (*drawn, _table(location))


def _curve(location: Location, name: str, label: str, reference: tuple[tuple[float, str], ...]) -> Figure:
    places = [place for place in location.places if name in place.metrics]
    numbers = [place.metrics[name] for place in places]
    return Figure(
        id=f"where-{location.axis}-{name}",
        title=f"{name} by {location.title}",
        caption=finding(location, name),
        x_label=location.title,
        y_label=label,
        series=(_series(name, _axis(places), numbers, location.numeric),),
        y_log=_spans(numbers),
        y_unit=numbers[0].unit,
        reference=reference,
        named=_largest(location, name) if name == WORST else "",
    )


def _largest(location: Location, name: str) -> str:
    """Return where a number is largest: one place on an ordered axis, a few groups otherwise."""
    known = [
        (value, place.key)
        for place in location.places
        if name in place.metrics and (value := place.metrics[name].value) is not None
    ]
    ranked = sorted(known, key=lambda pair: -pair[0])[: 1 if location.numeric else MOST_NAMED]
    return "largest: " + ", ".join(f"{key} ({say_value(value)})" for value, key in ranked) if ranked else ""


def _axis(places: list[Place]) -> tuple[float | str, ...]:
    """Return keys as numbers if possible, else as they are, already in order (buckets, names)."""
    try:
        return tuple(float(place.key) for place in places)
    except ValueError:
        return tuple(place.key for place in places)


def _series(name: str, x: tuple[float | str, ...], numbers: list[Number], ordered: bool) -> Series:
    return Series(
        name=name,
        x=x,
        y=tuple(number.value for number in numbers),
        low=tuple(number.interval[0] if number.interval else None for number in numbers),
        high=tuple(number.interval[1] if number.interval else None for number in numbers),
        kind="line" if ordered else "points",
    )


def _spans(numbers: list[Number]) -> bool:
    values = [number.value for number in numbers if number.value is not None]
    return bool(values) and min(values) > 0 and max(values) > _LOG_SPAN * min(values)


def finding(location: Location, name: str) -> str:
    """Return a sentence on what the curve shows, as far as the intervals support it."""
    known = [(place.key, place.metrics[name]) for place in location.places if name in place.metrics]
    sure = [
        (key, number) for key, number in known if number.value is not None and number.interval is not None
    ]
    if len(sure) < 2:
        return f"There are too few intervals to say how {name} changes with {location.title}."
    trend = location.numeric and (_apart(sure[0][1], sure[-1][1]) or not _apart(*_low_and_high(sure)))
    return _ends(location, name, sure) if trend else _extremes(location, name, sure)


def _low_and_high(sure: list[tuple[str, Number]]) -> tuple[Number, Number]:
    ordered = sorted((number for _, number in sure), key=_middle)
    return ordered[0], ordered[-1]


def _ends(location: Location, name: str, sure: list[tuple[str, Number]]) -> str:
    (first_key, first), (last_key, last) = sure[0], sure[-1]
    at = f"{say(first)} at {first_key} and {say(last)} at {last_key}"
    if _apart(first, last):
        verb = "rises" if _middle(last) > _middle(first) else "falls"
        return f"{name} {verb} with {location.title}: {at}; the intervals do not overlap."
    return f"{name} at the two ends cannot be told apart: {at}; the intervals overlap."


def _extremes(location: Location, name: str, sure: list[tuple[str, Number]]) -> str:
    low_key, low = min(sure, key=lambda pair: _middle(pair[1]))
    high_key, high = max(sure, key=lambda pair: _middle(pair[1]))
    at = f"{say(high)} for {high_key}, {say(low)} for {low_key}"
    if _apart(low, high):
        return f"{name} differs by {location.title}: {at}; these intervals do not overlap."
    return f"{name} cannot be told apart by {location.title}: {at}; the intervals overlap."


def _middle(number: Number) -> float:
    return number.value or 0.0


def _apart(one: Number, other: Number) -> bool:
    if one.interval is None or other.interval is None:
        return False
    return one.interval[1] < other.interval[0] or other.interval[1] < one.interval[0]


def _table(location: Location) -> Table:
    names = tuple(dict.fromkeys(name for place in location.places for name in place.metrics))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (place.key, place.tokens, place.sequences, *(place.metrics.get(name, Number()) for name in names))
        for place in location.places
    )
    left = (f"{count(location.left_out)} more places are not listed.",) if location.left_out else ()
    header = (location.title, "tokens", "sequences", *names)
    caption = f"All numbers by {location.title}"
    return Table(f"by-{location.axis}", caption, header, rows, left, wide=True, collapsed=True)


def _histogram(name: str, histogram: Histogram) -> Figure:
    edges = histogram.edges
    centres = tuple((low + high) / 2 for low, high in pairwise(edges))
    counts = tuple(value or None for value in histogram.counts)
    caption = (
        f"{count(sum(histogram.counts))} tokens, from {edges[0]:.3g} to {edges[-1]:.3g} {histogram.unit}. "
        "Counts are on a logarithmic scale, so that the tails show."
    )
    bars = Series("count", centres, counts, kind="bar")
    return Figure(f"histogram-{name}", histogram.title, caption, histogram.unit, "count", (bars,), y_log=True)
