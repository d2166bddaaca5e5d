"""Pictures: panels of layers on scaled axes, independent of how they are drawn."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, TypeVar

from offpol_diag.metrics import Tone
from offpol_diag.number import Number

Scale = Literal["linear", "log", "logit", "excess"]
Colour = Literal["grey", "blue", "orange", "slate", "teal", "purple"]
Kind = Literal["line", "points", "bars", "steps"]
COLOURS: tuple[Colour, ...] = ("grey", "blue", "orange", "slate", "teal", "purple")
SERIES: tuple[Colour, ...] = ("blue", "orange", "teal", "purple", "slate", "grey")
"""Colours of lines side by side."""
TONES: tuple[Tone, ...] = ("good", "info", "warn", "bad")
HEATS, MARKED = 7, 16
"""Shades of counts; points of a line up to which each is marked."""

Values = Sequence[float | None]
T = TypeVar("T")


@dataclass(frozen=True)
class Layer:
    """One line, set of points or bars; `low` and `high` are its 95% interval.

    `hollow` marks unreliable points, which get no interval. `base` is where bars begin, 0 if empty, and
    `width` is theirs in units of x. `at` is the point that carries the name, from the last if negative.
    """

    name: str
    x: Sequence[float]
    y: Values
    colour: Colour
    kind: Kind = "line"
    low: Values = ()
    high: Values = ()
    hollow: Sequence[bool] = ()
    dashed: bool = False
    base: Sequence[float] = ()
    width: float = 1.0
    at: int = -1
    named: bool = True


def at_places(
    name: str, numbers: Sequence[Number | None], colour: Colour, kind: Kind = "line", start: int = 0
) -> Layer:
    """Return a layer of numbers with their intervals, one at each whole x from `start` on."""
    low, high = ([one.interval[end] if one and one.interval else None for one in numbers] for end in (0, 1))
    values = [one.value if one else None for one in numbers]
    return Layer(name, range(start, start + len(numbers)), values, colour, kind, low, high)


@dataclass(frozen=True)
class Tint:
    """A named range of y, shaded."""

    low: float | None
    high: float | None
    tone: Tone
    name: str = ""


@dataclass(frozen=True)
class Heat:
    """Counts on bins of both axes, `counts[x][y]`, and a box around some of them."""

    edges: Sequence[float]
    counts: Sequence[Sequence[int]]
    box: tuple[float, float, float, float] | None = None
    box_name: str = ""


@dataclass(frozen=True)
class Panel:
    """One pair of axes; titles stand at their ends."""

    x_title: str
    y_title: str
    layers: Sequence[Layer] = ()
    x_scale: Scale = "linear"
    y_scale: Scale = "linear"
    names: Sequence[str] = ()
    percent: bool = False
    tints: Sequence[Tint] = ()
    uprights: Sequence[tuple[float, str]] = ()
    levels: Sequence[tuple[float, str]] = ()
    y_range: tuple[float | None, float | None] = (None, None)
    heat: Heat | None = None
    tall: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Picture:
    """A chart of one or more panels: its title is a finding, `sub` says what is drawn.

    `telling` is false where the chart shows no difference, so that it is folded away.
    """

    id: str
    group: str
    title: str
    sub: str
    panels: Sequence[Panel]
    telling: bool = True


# ---------------------------------------------------------------- scales

FARTHEST = 1e300
"""Values beyond, and positive ones below its inverse on a log scale, have no place on an axis."""
_SCALES: Mapping[Scale, Callable[[float], float | None]] = {
    "linear": lambda value: value if abs(value) < FARTHEST else None,
    "log": lambda value: math.log10(value) if 1 / FARTHEST < value < FARTHEST else None,
    "logit": lambda value: math.log10(value / (1 - value)) if 0 < value < 1 else None,
    "excess": lambda value: math.log10(value - 1) if value > 1 else None,
}
_LOGIT = (1e-6, 1e-4, 0.01, 0.1, 0.5, 0.9, 0.99, 0.9999, 0.999999)
_EXCESS = (1.0001, 1.001, 1.01, 1.1, 1.5, 2.0, 3.0, 5.0, 20.0, 100.0, 1000.0)
_SUPER = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
PAD = 0.04


@dataclass(frozen=True)
class Axis:
    """A drawn axis: its range on the transformed scale, and ticks (position, label)."""

    scale: Scale
    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]

    def at(self, value: float | None) -> float | None:
        """Return the transformed value; None if it has no place on the scale."""
        return None if value is None or not math.isfinite(value) else _SCALES[self.scale](value)

    def within(self, marks: Iterable[tuple[float, str]]) -> list[tuple[float, str]]:
        """Return the marks on the axis, at their transformed values."""
        places = ((self.at(value), name) for value, name in marks)
        return [(at, name) for at, name in places if at is not None and self.low <= at <= self.high]

    def share(self, value: float | None) -> float | None:
        """Return how far along the axis a value lies, 0 to 1 within it."""
        place = self.at(value)
        return None if place is None else (place - self.low) / (self.high - self.low)

    def held(self, value: float | None, low: bool) -> float:
        """Return the transformed value cut at the ends; an open or unplaceable one is the low or high end."""
        place = self.at(value)
        return (self.low if low else self.high) if place is None else min(max(place, self.low), self.high)


def x_axis(panel: Panel) -> Axis:
    """Return the axis that holds all points."""
    if panel.names:
        ticks = tuple((float(i), name) for i, name in enumerate(panel.names))
        return Axis("linear", -0.5, len(panel.names) - 0.5, ticks)
    values = [x for layer in panel.layers for x in layer.x]
    bars = [layer.width / 2 for layer in panel.layers if layer.kind == "bars"]
    if panel.heat:
        values = [edge for edge in panel.heat.edges if 0 < edge < 1]
    found = [place for place in map(_SCALES[panel.x_scale], values) if place is not None]
    whole = panel.whole or (panel.x_scale == "linear" and all(float(value).is_integer() for value in values))
    low, high = (min(found), max(found)) if found else (0.0, 1.0)
    high = high if high - low > abs(low) * 1e-9 + 1e-99 else low
    room: float = 0.0 if panel.heat else max(bars, default=(high - low) * PAD or 0.5)
    return _axis(panel.x_scale, low - room, high + room, False, whole, most=9)


def y_axis(panel: Panel) -> Axis:
    """Return the axis that holds all points and intervals; ends close to 0 do not stretch a log axis."""
    if panel.heat:
        across = x_axis(panel)
        return Axis(panel.y_scale, across.low, across.high, across.ticks)
    points = [y for layer in panel.layers for y in layer.y if y is not None]
    ends = [y for layer in panel.layers for y in (*layer.low, *layer.high) if y is not None]
    tops = [b + (y or 0) for layer in panel.layers for b, y in zip(layer.base, layer.y, strict=False)]
    place = _SCALES[panel.y_scale]
    found = [one for one in map(place, points + tops) if one is not None] or [0.0, 1.0]
    wider = [one for one in map(place, ends) if one is not None]
    low, high = min(found), max(found)
    if panel.y_scale == "linear":
        wider += [0.0] if any(layer.kind == "bars" for layer in panel.layers) else []
        low, high = min(low, *wider, low), max(high, *wider, high)
    else:
        low, high = min(low, max(min(wider, default=low), low - 0.7)), max(high, *wider, high)
    bottom, top = (None if end is None else place(end) for end in panel.y_range)
    pad = ((high - low) or 1.0) * PAD
    low = low - pad if bottom is None else bottom
    high = high + 2 * pad if top is None else top
    low, high = max(low, -FARTHEST), min(high, FARTHEST)  # so that the length does not overflow
    high = high if high - low > abs(low) * 1e-9 + 1e-99 else low + max(1.0, abs(low) * 1e-6)
    return _axis(panel.y_scale, low, high, panel.percent, False, most=6)


def _axis(scale: Scale, low: float, high: float, percent: bool, whole: bool, most: int) -> Axis:
    fixed = {"logit": _LOGIT, "excess": _EXCESS}.get(scale)
    if fixed:
        known = [(_SCALES[scale](value), plain(value)) for value in fixed]
        ticks = [(place, name) for place, name in known if place is not None and low <= place <= high]
    elif scale == "log" and high - low >= 1.2:
        first, last = math.ceil(low - 1e-9), math.floor(high + 1e-9)
        every = -(-(last - first + 1) // most)
        ticks = [(float(at), _power(at)) for at in range(first, last + 1, every)]
    elif scale == "log":
        values = [m * 10.0**p for p in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
        ticks = [(math.log10(v), plain(v)) for v in values if low <= math.log10(v) <= high]
    else:
        step = _step((high - low) / most, whole)
        steps = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
        ticks = [(i * step, f"{i * step * 100:.6g}%" if percent else _linear(i * step)) for i in steps]
    return Axis(scale, low, high, tuple(ticks))


def _step(rough: float, whole: bool) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    found = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return max(1.0, round(found)) if whole else found


def _power(power: int) -> str:
    return plain(10.0**power) if -3 <= power <= 4 else f"10{str(power).translate(_SUPER)}"


def _linear(value: float) -> str:
    """Return a tick of a linear axis: 1,500, 0.0002, 5·10⁻⁶."""
    digits, _, power = f"{value:.6g}".partition("e")
    if not power:
        return f"{value:,.6g}".replace("-", "−")
    return f"{digits}·10{str(int(power)).translate(_SUPER)}".replace("-", "−")


def plain(value: float) -> str:
    """Return a tick in plain digits: 0.0001 as 10⁻⁴, 0.999999 as 1−10⁻⁶, 10000 as 10,000."""
    if value and abs(value) < 1e-3:
        return f"10{str(round(math.log10(abs(value)))).translate(_SUPER)}"
    if 0.99995 < value < 1:
        return f"1−{plain(1 - value)}"
    return f"{value:,.6g}".replace("-", "−") if abs(value) < 1e6 else f"{value:.3g}"


# ---------------------------------------------------------------- points in words


def runs(points: Iterable[T | None]) -> list[list[T]]:
    """Split points where one is missing; a single one is no run."""
    found = [[one for one in run if one is not None] for there, run in groupby(points, bool) if there]
    return [run for run in found if len(run) > 1]


def number(layer: Layer, place: int, percent: bool) -> Number:
    """Return a point with its interval."""
    value, low, high = (
        some[place] if some and math.isfinite(some[place] or 0.0) else None
        for some in (layer.y, layer.low, layer.high)
    )
    interval = None if low is None or high is None else (low, high)
    return Number(value=value, interval=interval, unit="share" if percent else "")


def shade(count: int, most: int) -> int:
    """Return the shade of a count above 0, 0 to 6, on a log scale."""
    return 0 if most <= 1 else min(HEATS - 1, int(math.log(count) / math.log(most) * HEATS))


def place_name(panel: Panel, x: float) -> str:
    """Return the name of a place on the x axis, or its number."""
    return panel.names[int(x)] if panel.names and 0 <= x < len(panel.names) else f"{x:.5g}".replace("-", "−")
