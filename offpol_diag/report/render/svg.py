"""Draw pictures and small curves as static SVG; colours are classes of the page's style sheet."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from markupsafe import Markup, escape

from offpol_diag.blocks import Tone
from offpol_diag.report.picture import COLOURS, TONES, Axis, Colour, Layer, Panel, names, x_axis, y_axis

WIDTH, HEIGHT, TALL = 460, 280, 340
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 24, 40
HEATS = 7


def panel_svg(panel: Panel, label: str) -> Markup:
    """Draw one panel."""
    return Markup(_Drawing(panel).svg(label))


class _Drawing:
    """Coordinates of one panel, in pixels from the upper left corner."""

    def __init__(self, panel: Panel) -> None:
        self.panel, self.x, self.y = panel, x_axis(panel), y_axis(panel)
        self.height = TALL if panel.tall else HEIGHT
        self.right, self.bottom = WIDTH - RIGHT, self.height - BOTTOM

    def across(self, place: float) -> float:
        return LEFT + (place - self.x.low) / (self.x.high - self.x.low) * (self.right - LEFT)

    def up(self, place: float) -> float:
        return self.bottom - (place - self.y.low) / (self.y.high - self.y.low) * (self.bottom - TOP)

    def svg(self, label: str) -> str:
        parts = [*self.tints(), *self.heat(), *self.grid()]
        for layer in self.panel.layers:
            parts += self.layer(layer)
        parts += [*self.lines(), *self.names()]
        head = (
            f'<svg class="pic" viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{escape(label)}">'
        )
        return head + "".join(parts) + "</svg>"

    def tints(self) -> Iterable[str]:
        for tint in self.panel.tints:
            low, high = self.up(self.y.held(tint.low, True)), self.up(self.y.held(tint.high, False))
            if low - high > 0.5:
                yield _box(f"z{TONES.index(tint.tone) + 1}", LEFT, high, self.right - LEFT, low - high)
                if tint.name and low - high > 15:
                    yield _text("n", self.right - 4, high + 13, tint.name, "end")

    def heat(self) -> Iterable[str]:
        heat = self.panel.heat
        if heat is None:
            return
        edges = [self.x.held(edge, i == 0) for i, edge in enumerate(heat.edges)]
        most = max((max(row) for row in heat.counts), default=1)
        paths: dict[int, list[str]] = {}
        for i, row in enumerate(heat.counts):
            left, right = self.across(edges[i]), self.across(edges[i + 1])
            shades = [level(count, most) if count else -1 for count in row]
            for shade, run in groupby(range(len(row)), shades.__getitem__):
                cells = list(run)
                top, low = self.up(edges[cells[-1] + 1]), self.up(edges[cells[0]])
                if shade >= 0:
                    here = f"M{left:.1f} {top:.1f}h{right - left:.1f}v{low - top:.1f}h{left - right:.1f}z"
                    paths.setdefault(shade, []).append(here)
        for depth, drawn in sorted(paths.items()):
            yield f'<path class="q{depth}" d="{"".join(drawn)}"/>'
        yield _path("dg", f"M{LEFT} {self.bottom}L{self.right} {TOP}")
        if heat.box:
            a, b, c, d = heat.box
            left, right = self.across(self.x.held(a, True)), self.across(self.x.held(b, False))
            low, top = self.up(self.y.held(c, True)), self.up(self.y.held(d, False))
            yield _box("box", left, top, right - left, low - top)
            yield _text("nb halo", right - 4, low - 6, heat.box_name, "end")

    def grid(self) -> Iterable[str]:
        for place, name in self.y.ticks:
            yield _path("g", f"M{LEFT} {self.up(place):.1f}H{self.right}")
            yield _text("k", LEFT - 6, self.up(place) + 4, name, "end")
        for place, name in _thinned(self.x):
            yield _text("k", self.across(place), self.bottom + 16, name, "middle")
        yield _path("a", f"M{LEFT} {self.bottom}H{self.right}")
        yield _text("t", 2, 13, f"↑ {self.panel.y_title}", "start")
        if self.panel.x_title:
            yield _text("t", self.right, self.height - 5, f"{self.panel.x_title} →", "end")

    def layer(self, layer: Layer) -> Iterable[str]:
        c = f"c{COLOURS.index(layer.colour)}"
        points = [self.point(a, b) for a, b in zip(layer.x, layer.y, strict=True)]
        if layer.kind == "bars":
            yield from self.bars(layer, c)
            return
        if layer.low and layer.kind == "line":
            for run in self.runs(layer):
                yield _path(f"r {c}", "M" + "L".join(run) + "z")
        if layer.low and layer.kind == "points":
            for x, low, high in zip(layer.x, layer.low, layer.high, strict=True):
                if low is not None and high is not None:
                    a, b, d = self.point(x, low), self.point(x, high), self.x.at(x)
                    if b and d is not None:
                        yield _path(f"e {c}", f"M{b[0]:.1f} {b[1]:.1f}V{a[1] if a else self.bottom:.1f}")
        if layer.kind in ("line", "steps"):
            dash = " th" if layer.dashed else ""
            for line in _runs(points):
                yield _path(f"l {c}{dash}", "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in line))
        if layer.kind != "steps" and (layer.kind == "points" or len(points) <= 16) and not layer.dashed:
            for place, point in enumerate(points):
                if point:
                    hollow = layer.hollow and layer.hollow[place]
                    look = "h" if hollow else "d"
                    yield f'<circle class="{look} {c}" cx="{point[0]:.1f}" cy="{point[1]:.1f}" r="3.6"/>'

    def bars(self, layer: Layer, c: str) -> Iterable[str]:
        for place, (x, y) in enumerate(zip(layer.x, layer.y, strict=True)):
            if y is None:
                continue
            base = layer.base[place] if layer.base else 0.0
            ends = [self.across(x + side * layer.width * 0.46) for side in (-1, 1)]
            top, low = self.up(self.y.held(base + y, True)), self.up(self.y.held(base, True))
            yield _box(f"b {c}", ends[0], min(top, low), ends[1] - ends[0], abs(low - top))

    def runs(self, layer: Layer) -> list[list[str]]:
        found: list[list[str]] = []
        uppers: list[str] = []
        lowers: list[str] = []
        for place, x in enumerate(layer.x):
            low, high, at = layer.low[place], layer.high[place], self.x.at(x)
            known = low is not None and high is not None and at is not None
            if known and not (layer.hollow and layer.hollow[place]):
                a = f"{self.across(at or 0):.1f}"
                uppers.append(f"{a} {self.up(self.y.held(high, False)):.1f}")
                lowers.append(f"{a} {self.up(self.y.held(low, True)):.1f}")
            elif uppers:
                found.append([*uppers, *lowers[::-1]])
                uppers, lowers = [], []
        return [*found, [*uppers, *lowers[::-1]]] if uppers else found

    def point(self, x: float, y: float | None) -> tuple[float, float] | None:
        a, b = self.x.at(x), self.y.at(y)
        return (
            None
            if a is None or b is None
            else (self.across(a), self.up(min(max(b, self.y.low), self.y.high)))
        )

    def lines(self) -> Iterable[str]:
        for level_, name in self.panel.levels:
            place = self.y.at(level_)
            if place is not None and self.y.low <= place <= self.y.high:
                yield _path("u", f"M{LEFT} {self.up(place):.1f}H{self.right}")
                yield _text("n halo", LEFT + 4, self.up(place) - 4, name, "start")
        for number, (upright, name) in enumerate(self.panel.uprights):
            place = self.x.at(upright)
            if place is not None and self.x.low <= place <= self.x.high:
                at = self.across(place)
                side = at > (LEFT + self.right) / 2
                yield _path("u", f"M{at:.1f} {TOP}V{self.bottom}")
                yield _text(
                    "n halo",
                    at + (-5 if side else 5),
                    TOP + 12 + 15 * number,
                    name,
                    "end" if side else "start",
                )

    def names(self) -> Iterable[str]:
        for mark in names(self.panel, self.x, self.y):
            x = LEFT + mark.x * (self.right - LEFT)
            y = self.bottom - mark.y * (self.bottom - TOP)
            yield _text(f"nb halo f{_index(mark.colour)}", x, y, mark.text, mark.anchor)


def _index(colour: Colour | None) -> int:
    return 3 if colour is None else COLOURS.index(colour)


def level(count: int, most: int) -> int:
    """Return the shade of a cell, 0 to 6, on a log scale."""
    return 0 if most <= 1 else min(HEATS - 1, int(math.log(count) / math.log(most) * HEATS))


def _runs(points: Sequence[tuple[float, float] | None]) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for point in points:
        if point is None:
            runs.append([])
        else:
            runs[-1].append(point)
    return [run for run in runs if len(run) > 1]


def _thinned(axis: Axis) -> list[tuple[float, str]]:
    """Leave out ticks whose labels would touch."""
    kept: list[tuple[float, str]] = []
    wide = (WIDTH - LEFT - RIGHT) / (axis.high - axis.low)
    for place, name in axis.ticks:
        if not kept or (place - kept[-1][0]) * wide > 3.6 * (len(name) + len(kept[-1][1])) + 4:
            kept.append((place, name))
    return kept


def _path(look: str, d: str) -> str:
    return f'<path class="{look}" d="{d}"/>'


def _box(look: str, x: float, y: float, width: float, height: float) -> str:
    return f'<path class="{look}" d="M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"/>'


def _text(look: str, x: float, y: float, text: str, anchor: str) -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}"{at}>{escape(text)}</text>'


# ---------------------------------------------------------------- small curves and the scale


def spark(
    values: Sequence[float | None], bands: Sequence[tuple[float | None, float | None, Tone]], log: bool
) -> Markup:
    """Draw a curve by step, with the band that its last point is in."""
    wide, high = 240, 46
    panel = Panel(
        "",
        "",
        (Layer("", tuple(map(float, range(len(values)))), tuple(values), "slate"),),
        y_scale="log" if log else "linear",
    )
    y = y_axis(panel)
    span = max(len(values) - 1, 1)
    points = [
        None if (up := y.share(value)) is None else (3 + 230 * place / span, high - 5 - up * (high - 9))
        for place, value in enumerate(values)
    ]
    parts: list[str] = []
    for low, top, tone in bands:
        ends = [
            high - 5 - (y.held(end, first) - y.low) / (y.high - y.low) * (high - 9)
            for end, first in ((top, False), (low, True))
        ]
        parts.append(_box(f"z{TONES.index(tone) + 1}", 3, ends[0], 230, max(ends[1] - ends[0], 0)))
    parts += [_path("l sp", "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in run)) for run in _runs(points)]
    last = next((point for point in reversed(points) if point), None)
    parts += [f'<circle class="spd" cx="{last[0]:.1f}" cy="{last[1]:.1f}" r="3.2"/>'] if last else []
    return Markup(f'<svg class="spark" viewBox="0 0 {wide} {high}" aria-hidden="true">{"".join(parts)}</svg>')


def meter(
    bands: Sequence[tuple[float | None, float | None, Tone, str]],
    value: float,
    interval: tuple[float, float] | None,
    said: str,
    synced: tuple[float, str] | None,
) -> Markup:
    """Draw K3 on a log scale of its bands, with the value at policy lag 0 where it is known."""
    from offpol_diag.report.picture import plain

    low, high, width, margin = 1e-5, 1.0, 1116.0, 2.0
    axis = Axis("log", -5.0, 0.0, ())

    def at(number: float | None, first: bool) -> float:
        return margin + (axis.held(number, first) + 5) / 5 * width

    parts = [_text("k", margin, 70, plain(low), "start"), _text("k", margin + width, 70, plain(high), "end")]
    for start, end, tone, name in bands:
        left, right = at(start, True), at(end, False)
        parts.append(_box(f"zz{TONES.index(tone) + 1}", left, 26, right - left, 14))
        parts.append(_text("n", (left + right) / 2, 55, name, "middle"))
        if start:
            parts.append(_text("k", left, 70, plain(start), "middle"))
    if interval:
        parts.append(_path("mi", f"M{at(max(interval[0], low), True):.1f} 33H{at(interval[1], False):.1f}"))
    here = at(max(value, low), True)
    parts.append(_path("mk", f"M{here:.1f} 22v22"))
    anchor = "end" if here > 1040 else "start" if here < 80 else "middle"
    parts.append(_text("nb", here, 16, f"this dump {said}", anchor))
    if synced and abs(at(synced[0], True) - here) > 190:
        there = at(max(synced[0], low), True)
        parts.append(f'<circle class="m0" cx="{there:.1f}" cy="33" r="5"/>')
        parts.append(
            _text(
                "n", there, 16, f"weights in sync (lag 0) {synced[1]}", "start" if there < 150 else "middle"
            )
        )
    label = f"K3 KL on a logarithmic scale with named bands: this dump {said}"
    head = f'<svg class="meter" viewBox="0 0 1120 74" role="img" aria-label="{escape(label)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")
