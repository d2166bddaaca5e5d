"""Draw pictures and small curves as static SVG; colours are classes of the page's style sheet."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from typing import Any

from markupsafe import Markup, escape

from offpol_diag.metrics import Band, tone
from offpol_diag.number import Number
from offpol_diag.numerals import minus, rounded, say, written
from offpol_diag.report.picture import (
    COLOURS,
    MARKED,
    TONES,
    Axis,
    Layer,
    Panel,
    number,
    place_name,
    plain,
    runs,
    shade,
    x_axis,
    y_axis,
)
from offpol_diag.result.reference import Reference

WIDTH, HEIGHT, TALL = 360, 216, 290
LEFT, RIGHT, TOP, BOTTOM = 50, 10, 24, 38
TURNED, MOST_TURNED, LONGEST = 42, 24, 16
"""Room below for names that are turned, how many may be, and their characters."""
SPECK, MUCH = 6, 60
"""Pixels that a text may cover, and from which it rather stands farther away."""
Point = tuple[float, float]
Spot = tuple[float, float, str]
"""Position of a text, and the end of it that is there: x, y, anchor."""


def panel_svg(panel: Panel, label: str) -> tuple[Markup, list[tuple[float, float, str]]]:
    """Draw one panel; return with it what to say of each point, by its place in the drawing."""
    drawing = _Drawing(panel)
    return Markup(drawing.svg(label)), [(round(x), round(y), text) for x, y, text in drawing.hover]


class _Drawing:
    """Coordinates of one panel, in pixels from the upper left corner."""

    def __init__(self, panel: Panel) -> None:
        self.panel, self.x, self.y = panel, x_axis(panel), y_axis(panel)
        self.right = WIDTH - RIGHT
        self.turned = bool(panel.names) and len(_thinned(self.x)) < len(panel.names) <= MOST_TURNED
        self.height = (TALL if panel.tall else HEIGHT) + (TURNED if self.turned else 0)
        self.bottom = self.height - BOTTOM - (TURNED if self.turned else 0)
        self.hover: list[tuple[float, float, str]] = []
        self.points = [
            [self.point(a, b) for a, b in zip(layer.x, layer.y, strict=True)] for layer in panel.layers
        ]
        self.ink = self.drawn_over()

    def across(self, place: float) -> float:
        return LEFT + (place - self.x.low) / (self.x.high - self.x.low) * (self.right - LEFT)

    def up(self, place: float) -> float:
        return self.bottom - (place - self.y.low) / (self.y.high - self.y.low) * (self.bottom - TOP)

    def svg(self, label: str) -> str:
        parts = [*self.tints(), *self.heat(), *self.grid()]
        for layer, points in zip(self.panel.layers, self.points, strict=True):
            parts += self.layer(layer, points)
        parts += [*self.lines(), *self.names()]
        box = f'viewBox="0 0 {WIDTH} {self.height}"'
        return f'<svg class="pic" {box} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'

    def tints(self) -> Iterable[str]:
        for tint in self.panel.tints:
            low, high = self.up(self.y.held(tint.low, True)), self.up(self.y.held(tint.high, False))
            if low - high > 0.5:
                yield _box(f"z{TONES.index(tint.tone) + 1}", LEFT, high, self.right - LEFT, low - high)
                if tint.name and low - high > 15:
                    middle = (LEFT + self.right) / 2
                    places = ((self.right - 4, "end"), (LEFT + 4, "start"), (middle, "middle"))
                    ups = (high + 13, (high + low) / 2 + 4)
                    yield self.text("n halo", tint.name, [(x, y, at) for x, at in places for y in ups])

    def heat(self) -> Iterable[str]:
        heat = self.panel.heat
        if heat is None:
            return
        edges = [self.x.held(edge, i == 0) for i, edge in enumerate(heat.edges)]
        most = max((max(row) for row in heat.counts), default=1)
        paths: dict[int, list[str]] = {}
        for i, row in enumerate(heat.counts):
            left, right = self.across(edges[i]), self.across(edges[i + 1])
            shades = [shade(count, most) if count else -1 for count in row]
            for j, count in enumerate(row):
                if count:
                    middle = (self.up(edges[j]) + self.up(edges[j + 1])) / 2
                    self.hover.append(((left + right) / 2, middle, f"{count:,} tokens"))
            for depth, run in groupby(range(len(row)), shades.__getitem__):
                cells = list(run)
                top, low = self.up(edges[cells[-1] + 1]), self.up(edges[cells[0]])
                if depth >= 0:
                    here = f"M{left:.1f} {top:.1f}h{right - left:.1f}v{low - top:.1f}h{left - right:.1f}z"
                    paths.setdefault(depth, []).append(here)
        for depth, drawn in sorted(paths.items()):
            yield f'<path class="q{depth}" d="{"".join(drawn)}"/>'
        yield _path("dg", f"M{LEFT} {self.bottom}L{self.right} {TOP}")
        if heat.box:
            a, b, c, d = heat.box
            left, right = self.across(self.x.held(a, True)), self.across(self.x.held(b, False))
            low, top = self.up(self.y.held(c, True)), self.up(self.y.held(d, False))
            yield _box("box", left, top, right - left, low - top)
            yield self.text("nb halo", heat.box_name, [(right - 4, low - 6, "end")])

    def grid(self) -> Iterable[str]:
        for place, name in self.y.ticks:
            yield _path("g", f"M{LEFT} {self.up(place):.1f}H{self.right}")
            yield _text("k", LEFT - 6, self.up(place) + 4, name, "end")
        for place, name in self.x.ticks if self.turned else ():
            at = f"translate({self.across(place) + 4:.1f} {self.bottom + 14}) rotate(-32)"
            said = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
            yield f'<text class="k" transform="{at}" text-anchor="end">{escape(said)}</text>'
        for place, name in () if self.turned else _thinned(self.x):
            if self.across(place) + 3 * len(name) < WIDTH:
                yield _text("k", self.across(place), self.bottom + 16, name, "middle")
        yield _path("a", f"M{LEFT} {self.bottom}H{self.right}")
        yield _text("t", 2, 13, f"↑ {self.panel.y_title}", "start")
        if self.panel.x_title:
            yield _text("t", self.right, self.height - 5, f"{self.panel.x_title} →", "end")

    def layer(self, layer: Layer, points: Sequence[Point | None]) -> Iterable[str]:
        c = f"c{COLOURS.index(layer.colour)}"
        self.hover += [
            (point[0], point[1], said(layer, self.panel, place))
            for place, point in enumerate(points)
            if point and layer.named
        ]
        if layer.kind == "bars":
            yield from self.bars(layer, c)
            return
        if layer.low and layer.kind == "line":
            for run in runs(self.ends(layer)):
                outline = [*(top for top, _ in run), *(low for _, low in run[::-1])]
                yield _path(f"r {c}", "M" + "L".join(outline) + "z")
        if layer.low and layer.kind == "points":
            for x, low, high in zip(layer.x, layer.low, layer.high, strict=True):
                if low is not None and high is not None:
                    a, b, d = self.point(x, low), self.point(x, high), self.x.at(x)
                    if b and d is not None:
                        yield _path(f"e {c}", f"M{b[0]:.1f} {b[1]:.1f}V{a[1] if a else self.bottom:.1f}")
        if layer.kind in ("line", "steps"):
            dash = " th" if layer.dashed else ""
            for line in runs(points):
                yield _line(f"l {c}{dash}", line)
        if layer.kind != "steps" and (layer.kind == "points" or len(points) <= MARKED) and not layer.dashed:
            for place, point in enumerate(points):
                if point:
                    look = "h" if layer.hollow and layer.hollow[place] else "d"
                    yield _dot(f"{look} {c}", *point, "3.6")

    def bars(self, layer: Layer, c: str) -> Iterable[str]:
        for place, (x, y) in enumerate(zip(layer.x, layer.y, strict=True)):
            if y is None:
                continue
            base = layer.base[place] if layer.base else 0.0
            ends = [self.across(x + side * layer.width * 0.46) for side in (-1, 1)]
            top, low = self.up(self.y.held(base + y, True)), self.up(self.y.held(base, True))
            yield _box(f"b {c}", ends[0], min(top, low), ends[1] - ends[0], abs(low - top))

    def ends(self, layer: Layer) -> Iterable[tuple[str, str] | None]:
        """Yield the ends of the interval of each point, None where it is not known or not reliable."""
        for place, x in enumerate(layer.x):
            low, high, at = layer.low[place], layer.high[place], self.x.at(x)
            if low is None or high is None or at is None or (layer.hollow and layer.hollow[place]):
                yield None
            else:
                ups = (self.up(self.y.held(high, False)), self.up(self.y.held(low, True)))
                yield f"{self.across(at):.1f} {ups[0]:.1f}", f"{self.across(at):.1f} {ups[1]:.1f}"

    def point(self, x: float, y: float | None) -> Point | None:
        a, b = self.x.at(x), self.y.at(y)
        if a is None or b is None:
            return None
        return self.across(a), self.up(min(max(b, self.y.low), self.y.high))

    def text(self, look: str, text: str, near: Sequence[Spot], far: Sequence[Spot] = ()) -> str:
        """Write a text at the first place where it covers next to nothing, else where it covers least."""
        for most, places in ((SPECK, near), (MUCH, near), (WIDTH * HEIGHT * 9, (*near, *far))):
            boxes = [_extent(x, y, text, anchor) for x, y, anchor in places]
            covered = [int(self.ink[top:low, left:right].sum()) for left, top, right, low in boxes]
            if covered and min(covered) <= most:
                break
        enough = SPECK if most == SPECK else min(covered)
        best = next(i for i, n in enumerate(covered) if n <= enough)
        left, top, right, low = boxes[best]
        self.ink[top:low, left:right] = 9
        return _text(look, places[best][0], places[best][1], text, places[best][2])

    def drawn_over(self) -> Any:
        """Return which pixels lines, points and bars cover, [height, width]."""
        import numpy as np

        ink = np.zeros((self.height, WIDTH), dtype=np.int32)
        for layer, points in zip(self.panel.layers, self.points, strict=True):
            for (x0, y0), (x1, y1) in (pair for run in runs(points) for pair in pairwise(run)):
                many = int(max(abs(x1 - x0), abs(y1 - y0))) + 2
                ink[np.linspace(y0, y1, many).astype(int), np.linspace(x0, x1, many).astype(int)] = 1
            for x, y in (point for point in points if point and layer.kind != "steps"):
                low = int(self.bottom) if layer.kind == "bars" else int(y) + 4
                ink[max(int(y) - 3, 0) : low, max(int(x) - 3, 0) : int(x) + 4] = 1
        for at, _ in self.x.within(self.panel.uprights):
            ink[TOP : int(self.bottom), int(self.across(at))] = 1
        for at, _ in self.y.within(self.panel.levels):
            ink[int(self.up(at)), LEFT : self.right] = 1
        return ink

    def lines(self) -> Iterable[str]:
        for place, name in self.y.within(self.panel.levels):
            up = self.up(place)
            yield _path("u", f"M{LEFT} {up:.1f}H{self.right}")
            ends = [(LEFT + 4, "start"), (self.right - 4, "end")]
            yield self.text("n halo", name, [(x, y, side) for y in (up - 4, up + 14) for x, side in ends])
        for place, name in self.x.within(self.panel.uprights):
            at, wide = self.across(place), 6.5 * len(name)
            sides = [(at + 5, "start")] if at + wide < self.right else []
            sides += [(at - 5, "end")] if at - wide > LEFT else []
            downs = (TOP + 12, TOP + 27, self.bottom - 8)
            yield _path("u", f"M{at:.1f} {TOP}V{self.bottom}")
            yield self.text("n halo", name, [(x, y, s) for y in downs for x, s in sides or [(at, "end")]])

    def names(self) -> Iterable[str]:
        """Write each line's name beside one of its points, above or below."""
        for layer, points in zip(self.panel.layers, self.points, strict=True):
            known = [point for point in points if point]
            if not (layer.named and layer.name and known) or layer.kind == "bars":
                continue
            first = known[max(min(layer.at, len(known) - 1), -len(known))]
            some = known[:: -(-len(known) // 24)]
            near, far = (
                [
                    (x + aside, y + down, anchor)
                    for x, y in sorted(some, key=lambda point, at=first: abs(point[0] - at[0]))  # type: ignore[misc]
                    for down in downs
                    for aside, anchor in ((0, "middle"), (-7, "end"), (7, "start"))
                    if self.inside(_extent(x + aside, y + down, layer.name, anchor))
                ]
                for downs in ((-8, 17, 4), (32, -23))
            )
            if near or far:
                yield self.text(f"nb halo f{COLOURS.index(layer.colour)}", layer.name, near, far)

    def inside(self, box: tuple[int, int, int, int]) -> bool:
        return box[0] >= LEFT + 2 and box[1] >= TOP - 2 and box[2] <= self.right and box[3] <= self.bottom - 1


def _extent(x: float, y: float, text: str, anchor: str) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a text."""
    wide = 7.4 * len(text)
    left = x - wide * {"start": 0.0, "middle": 0.5, "end": 1.0}[anchor]
    return max(int(left), 0), max(int(y) - 11, 0), max(int(left + wide), 0), int(y) + 4


def said(layer: Layer, panel: Panel, place: int) -> str:
    """Return a point in words."""
    name = f"{layer.name}, " if layer.name else ""
    doubt = " (unreliable)" if layer.hollow and layer.hollow[place] else ""
    return (
        f"{name}{place_name(panel, layer.x[place])}: {minus(say(number(layer, place, panel.percent)))}{doubt}"
    )


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


def _line(look: str, points: Iterable[Point]) -> str:
    return _path(look, "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in points))


def _dot(look: str, x: float, y: float, radius: str) -> str:
    return f'<circle class="{look}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def _box(look: str, x: float, y: float, width: float, height: float) -> str:
    return f'<path class="{look}" d="M{x:.1f} {y:.1f}h{width:.1f}v{height:.1f}h{-width:.1f}z"/>'


def _text(look: str, x: float, y: float, text: str, anchor: str) -> str:
    at = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text class="{look}" x="{x:.1f}" y="{y:.1f}"{at}>{escape(text)}</text>'


# ---------------------------------------------------------------- small curves and the scale


def spark(values: Sequence[float | None], bands: Sequence[Band], log: bool) -> Markup:
    """Draw a curve by step, with the band that its last point is in."""
    wide, high = 240, 46
    layer = Layer("", range(len(values)), values, "slate")
    y = y_axis(Panel("", "", (layer,), y_scale="log" if log else "linear"))
    span = max(len(values) - 1, 1)
    points = [
        None if (up := y.share(value)) is None else (3 + 230 * place / span, high - 5 - up * (high - 9))
        for place, value in enumerate(values)
    ]
    parts: list[str] = []
    for one in bands:
        ends = [
            high - 5 - (y.held(end, first) - y.low) / (y.high - y.low) * (high - 9)
            for end, first in ((one.high, False), (one.low, True))
        ]
        parts.append(_box(f"z{TONES.index(tone(one.name)) + 1}", 3, ends[0], 230, max(ends[1] - ends[0], 0)))
    parts += [_line("l sp", run) for run in runs(points)]
    last = next((point for point in reversed(points) if point), None)
    parts += [_dot("spd", *last, "3.2")] if last else []
    return Markup(f'<svg class="spark" viewBox="0 0 {wide} {high}" aria-hidden="true">{"".join(parts)}</svg>')


def meter(k3: Number, bands: Sequence[Band], synced: float | None, expected: Band | None) -> Markup:
    """Draw K3 on a log scale of its bands, with its value at lag 0 and its expected range, if known."""
    low, high, width, margin = 1e-5, 1.0, 1116.0, 2.0
    said, interval = written(k3)[0], k3.interval
    axis = Axis("log", -5.0, 0.0, ())

    def at(number: float | None, first: bool) -> float:
        return margin + (axis.held(number, first) + 5) / 5 * width

    parts = [_text("k", margin, 70, plain(low), "start"), _text("k", margin + width, 70, plain(high), "end")]
    for one in bands:
        left, right = at(one.low, True), at(one.high, False)
        parts.append(_box(f"zz{TONES.index(tone(one.name)) + 1}", left, 26, right - left, 14))
        parts.append(_text("n", (left + right) / 2, 55, one.name, "middle"))
        if one.low:
            parts.append(_text("k", left, 70, plain(one.low), "middle"))
    if interval:
        parts.append(_path("mi", f"M{at(max(interval[0], low), True):.1f} 33H{at(interval[1], False):.1f}"))
    here = at(max(k3.value or 0.0, low), True)
    parts.append(_path("mk", f"M{here:.1f} 22v22"))
    anchor = "end" if here > 1040 else "start" if here < 80 else "middle"
    parts.append(_text("nb", here, 16, f"this dump {said}", anchor))
    if synced and synced > 0 and abs(at(synced, True) - here) > 190:
        there = at(max(synced, low), True)
        parts.append(f'<circle class="m0" cx="{there:.1f}" cy="33" r="5"/>')
        anchor = "start" if there < 150 else "middle"
        parts.append(_text("n", there, 16, f"weights in sync (lag 0) {rounded(synced)}", anchor))
    if expected:
        left, right = at(max(expected.low or 0.0, low), True), at(expected.high or 0.0, False)
        parts.append(_path("me", f"M{left:.1f} 78v6H{right:.1f}v-6"))
        parts.append(_text("k", (left + right) / 2, 108, f"expected: {expected.regime}", "middle"))
    label = f"K3 KL on a logarithmic scale with named bands: this dump {said}"
    tall = 116 if expected else 74
    head = f'<svg class="meter" viewBox="0 0 1120 {tall}" role="img" aria-label="{escape(label)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")


CORNERS = {"trainer": (70.0, 34.0), "reference": (306.0, 34.0), "engine": (188.0, 196.0)}
CENTRE = complex(188, 88)
"""Corners of the triangle, and what they surround."""


def triangle(found: Reference) -> Markup:
    """Draw engine, trainer and reference with the distances between them, dashed where two differ."""
    sides = {
        ("trainer", "reference"): (rounded(found.trainer.distance), found.trainer.state == "same"),
        ("engine", "reference"): (rounded(found.engine.distance), found.engine.state == "same"),
        ("trainer", "engine"): (rounded(found.apart), found.verdict in ("same", "reference")),
    }
    parts = list[str]()
    for (one, two), (said, alike) in sides.items():
        (a, b), (c, d) = CORNERS[one], CORNERS[two]
        parts.append(_line("l c4" if alike else "l th c2", [(a, b), (c, d)]))
        middle = complex(a + c, b + d) / 2
        outside = middle + 24 * (middle - CENTRE) / abs(middle - CENTRE)
        parts.append(_text("nb", outside.real, outside.imag + 4, said, "middle"))
    for name, (x, y) in CORNERS.items():
        parts.append(_dot("m0", x, y, "6"))
        parts.append(_text("n", x, y + 22 if name == "engine" else y - 14, name, "middle"))
    label = "; ".join(f"{one} to {two} {said} nats" for (one, two), (said, _) in sides.items())
    head = f'<svg class="pic" viewBox="0 0 376 226" role="img" aria-label="{escape(label)}">'
    return Markup(f"{head}{''.join(parts)}</svg>")
