"""Plotly figures of pictures, as plain dicts: plotly is imported only for a `Figure` of its own type.

A figure holds the panels of one picture, below each other, and in `layout.meta` what a page needs to set them
side by side, to change scales, and to choose ticks and tints when a reader zooms. Colours are names of a
palette: a page takes `PAGE`, whose colours are variables of its style sheet, so that one figure serves both
themes; notebooks and trackers take `palette("light")` or `palette("dark")`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from offpol_diag.errors import OffpolError
from offpol_diag.numerals import counted, minus, written
from offpol_diag.report.embedded import UNSEEN, templates_dir
from offpol_diag.report.picture import (
    COLOURS,
    FARTHEST,
    HEATS,
    MARKED,
    TONES,
    Axis,
    Heat,
    Layer,
    Panel,
    Picture,
    number,
    place_name,
    plain,
    runs,
    shade,
    x_axis,
    y_axis,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go

Palette = Mapping[str, str]
Dict = dict[str, Any]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
ROW, TALL, GAP, APART = 236, 420, 44, 0.16
"""Pixels of a panel and of a tall one, pixels between rows, and the share of the width between columns."""
MARGIN = {"l": 66, "r": 18, "t": 30, "b": 48}
LINE, LEGEND = 20, 34
"""Pixels that each line of the title, and a legend, take above a figure for notebooks."""
MOST = 400
"""Most ticks that a page chooses from."""
INTERVAL = "95% interval"
NAMES = (
    *(f"{kind}{i}" for kind in "cfr" for i in range(len(COLOURS))),
    *(f"z{i + 1}" for i in range(len(TONES))),
    *(f"q{i}" for i in range(HEATS)),
    *("ink", "soft", "card", "hair", "bg", "line"),
)
PAGE: Palette = {name: f"var(--{name})" for name in NAMES}


@cache
def palette(theme: Literal["light", "dark"] = "light") -> Palette:
    """Return the colours of the page's style sheet."""
    css = (templates_dir() / "report.css").read_text(encoding="utf-8")
    head = {"light": r":root \{", "dark": r":root\[data-theme=dark\] \{"}[theme]
    body = re.search(head + r"(.*?)\}", css, re.DOTALL)
    found = dict(re.findall(r"--(\w+):\s*([^;]+);", body[1] if body else ""))
    return {name: found[name] for name in NAMES}


def library() -> Path:
    """Return the file of plotly.js that the package plotly ships, without importing it.

    Raises:
        OffpolError: the package is not installed, or lacks the file.
    """
    spec = find_spec("plotly")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder, "package_data", "plotly.min.js")
        if path.is_file():
            return path
    raise OffpolError(
        "the package plotly, which draws charts to explore, is missing",
        'install "offpol-diag[cli]", or leave them out with --no-explore',
    )


def template(paint: Palette) -> Dict:
    """Return the look that all figures share."""
    axis = {
        "showgrid": False,
        "zeroline": False,
        "ticks": "",
        "ticklabelstandoff": 3,
        "tickfont": {"color": paint["soft"]},
        "linecolor": paint["c0"],
        "gridcolor": paint["hair"],
        "title": {"font": {"color": paint["soft"], "size": 13}, "standoff": 8},
        "exponentformat": "power",
        "minexponent": 4,
    }
    label = {"bgcolor": paint["ink"], "bordercolor": paint["ink"], "align": "left", "namelength": -1}
    layout = {
        "font": {"family": FONT, "size": 13, "color": paint["ink"]},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "hovermode": "closest",
        "hoverdistance": 40,
        "hoverlabel": label | {"font": {"color": paint["bg"], "size": 13}},
        "barmode": "overlay",
        "bargap": 0,
        "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": paint["soft"], "activecolor": paint["ink"]},
        "legend": {"orientation": "h", "x": 1, "xanchor": "right", "yanchor": "bottom", "tracegroupgap": 0},
        "xaxis": {**axis, "showline": True},
        "yaxis": {**axis, "showgrid": True},
        "annotationdefaults": {"showarrow": False, "borderpad": 0, "font": {"size": 13}},
    }
    return {"layout": layout}


MARKUP = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "%{": "&#37;{", "$": "&#36;", "var(": "var&#40;"}
"""What plotly takes for tags, values and formulas, and a page for a colour → what is drawn as that."""


def escaped(text: str) -> str:
    """Escape a text for plotly, which reads tags, values and formulas in every text."""
    for sign, code in MARKUP.items():
        text = text.replace(sign, code)
    return UNSEEN.sub("\ufffd", text)


# ---------------------------------------------------------------- a picture as a figure


def figure(picture: Picture, paint: Palette = PAGE) -> Dict:
    """Return a picture as a figure: its data and layout, as plotly's JSON has them."""
    parts = [_Part(panel, i, paint) for i, panel in enumerate(picture.panels)]
    shared = len(parts) > 1 and len({(part.x, tuple(part.panel.names)) for part in parts}) == 1
    height = sum(TALL if panel.tall else ROW for panel in picture.panels) + GAP * (len(parts) - 1)
    layout: Dict = {
        "height": height + MARGIN["t"] + MARGIN["b"],
        "margin": MARGIN,
        "shapes": [],
        "annotations": [],
        "meta": {"shared": shared, "panels": []},
    }
    for part in parts:
        first = len(layout["shapes"])
        layout["shapes"] += [*part.tints(), *part.lines()]
        layout["annotations"].append(part.y_title())
        layout["meta"]["panels"].append(part.meta(first))
        layout[f"xaxis{part.end}"] = part.x_layout() | {"anchor": f"y{part.end}"}
        y_layout = _axis(part.y, part.panel.percent) | {"nticks": 8, "anchor": f"x{part.end}"}
        layout[f"yaxis{part.end}"] = y_layout
    _arrange(layout, beside=False)
    data = [trace for part in parts for trace in part.traces()]
    leads = {trace["name"]: trace for trace in data[::-1] if "meta" in trace and trace["name"]}
    for trace in leads.values():
        trace["showlegend"] = True
    return {"data": data, "layout": layout}


def _arrange(layout: Dict, beside: bool) -> None:
    """Set the panels side by side, or below each other; those that then share an axis name it once."""
    many = len(layout["annotations"])
    height, shared = layout["height"] - MARGIN["t"] - MARGIN["b"], layout["meta"]["shared"]
    gap = APART / many if beside else GAP / height
    each = (1 - gap * (many - 1)) / many
    for i in range(many):
        x, y = (layout[f"{letter}axis{i + 1 if i else ''}"] for letter in "xy")
        left, top = i * (each + gap), 1 - i * (each + gap)
        x["domain"] = [left, left + each] if beside else [0.0, 1.0]
        y["domain"] = [0.0, 1.0] if beside else [max(top - each, 0.0), top]
        if shared and i < many - 1:
            x["showticklabels"], x["title"] = False, {"text": ""}
        if shared and i:
            x["matches"] = "x"


def joined(picture: Picture, paint: Palette) -> go.Figure:
    """Return a picture as a figure of plotly with its finding as title, for notebooks, trackers and files."""
    import plotly.graph_objects as go

    found = figure(picture, paint)
    layout = found["layout"]
    if len(picture.panels) > 1 and not layout["meta"]["shared"]:
        _arrange(layout, beside=True)
        layout["height"] = TALL + MARGIN["t"] + MARGIN["b"]
    del layout["meta"]
    for name in [name for name in layout if re.match("[xy]axis", name)]:
        if layout[name]["type"] == "log":  # plotly finds the ticks, also after a zoom
            kept = {k: v for k, v in layout[name].items() if k not in ("tickvals", "ticktext")}
            layout[name] = kept | {"tickformat": ",.6~g", "nticks": 4}
    several = sum(trace["showlegend"] for trace in found["data"]) > 1
    heads = [f"<b>{escaped(line)}</b>" for line in wrap(picture.title, 88)]
    heads += [f'<span style="font-size:12px">{escaped(line)}</span>' for line in wrap(picture.sub, 120)]
    text, above = "<br>".join(heads), LINE * len(heads) + (LEGEND if several else 0)
    layout["height"] += above
    layout["margin"] = MARGIN | {"t": MARGIN["t"] + above}
    layout["title"] = {
        "text": text,
        "font": {"size": 15},
        "x": 0,
        "xref": "container",
        "xanchor": "left",
        "y": 1,
        "yref": "container",
        "yanchor": "top",
        "pad": {"l": 14, "t": 14},
    }
    inner = layout["height"] - layout["margin"]["t"] - layout["margin"]["b"]
    layout |= {"template": template(paint), "showlegend": several, "legend": {"y": 1 + 22 / inner}}
    layout |= {"paper_bgcolor": paint["card"], "plot_bgcolor": paint["card"]}
    return go.Figure(found["data"], layout)


# ---------------------------------------------------------------- words


def quantity(title: str) -> tuple[str, str]:
    """Return the name and the unit in the title of an axis: `K3 KL, nats per token (log)` is K3 in nats."""
    bare = re.sub(r" \([^)]*\)$", "", title)
    unit = re.search(r", (1/nats|nats|tokens)\b", bare)
    name = bare.partition(", ")[0].partition(" = ")[0].removesuffix(" KL").removeprefix("training ")
    return name, unit[1] if unit else ""


def said(panel: Panel, layer: Layer, place: int) -> str:
    """Return a point in words, with axis names and units: `step 8, K3 0.011 nats [0.003, 0.035]`."""
    (of, of_unit), (name, unit) = quantity(panel.x_title), quantity(panel.y_title)
    x = layer.x[place]
    where = place_name(panel, round(x) if panel.whole else x)
    unitless = panel.names and not where[:1].isdigit()
    where = " ".join(part for part in (of, where, "" if unitless else of_unit) if part)
    value, interval = written(number(layer, place, panel.percent))
    unit = unit if layer.y[place] is not None else ""
    amount = " ".join(part for part in (name, minus(value), unit, minus(interval)) if part)
    doubt = ", unreliable: k̂ above 0.7" if layer.hollow and layer.hollow[place] else ""
    series = f"{layer.name}: " if layer.name else ""
    return f"{series}{where}, {amount}{doubt}"


def _said_cell(panel: Panel, heat: Heat, i: int, j: int) -> str:
    if not heat.counts[i][j]:
        return ""
    ends = ((f"{heat.edges[k]:.4g}", f"{heat.edges[k + 1]:.4g}") for k in (i, j))
    names = (quantity(title)[0] for title in (panel.x_title, panel.y_title))
    where = ", ".join(f"{name} {low} to {high}" for name, (low, high) in zip(names, ends, strict=True))
    return f"{where}: {counted(heat.counts[i][j], 'token')}"


def _scaled(title: str, log: bool) -> str:
    """Return the title of an axis with or without the word that its scale is logarithmic."""
    bare = title.removesuffix(" (log)")
    return f"{bare} (log)" if log else bare


# ---------------------------------------------------------------- a panel


class _Part:
    """One panel of a figure, on the axes of its number."""

    def __init__(self, panel: Panel, place: int, paint: Palette) -> None:
        self.panel, self.place, self.paint = panel, place, paint
        self.end = "" if place == 0 else str(place + 1)
        self.x, self.y = x_axis(panel), y_axis(panel)
        self.across = {"xref": f"x{self.end} domain", "x0": 0, "x1": 1, "yref": f"y{self.end}"}
        self.axes = {"xaxis": f"x{self.end}", "yaxis": f"y{self.end}"}
        self.up = {"yref": f"y{self.end} domain", "y0": 0, "y1": 1, "xref": f"x{self.end}"}

    # ------------------------------------------------------------ axes

    def x_layout(self) -> Dict:
        title = f"{escaped(self.panel.x_title)} →" if self.panel.x_title else ""
        found = _axis(self.x) | {"title": {"text": title}, "automargin": "height"}
        if not self.panel.names:
            return found
        ticks = self.x_ticks()[:: -(-len(self.panel.names) // 40)]
        return found | {"tickvals": [at for at, _ in ticks], "ticktext": [text for _, text in ticks]}

    def y_title(self) -> Dict:
        at = {"xref": f"x{self.end} domain", "x": 0, "yref": f"y{self.end} domain", "y": 1}
        shift = {"xshift": -MARGIN["l"] + 8, "yshift": 7, "xanchor": "left", "yanchor": "bottom"}
        text = f"↑ {escaped(self.panel.y_title)}"
        return {"text": text, **at, **shift, "font": {"color": self.paint["soft"]}}

    def x_ticks(self) -> list[tuple[float, str]]:
        if self.panel.names:
            return [(at, escaped(name)) for at, name in self.x.ticks]
        return _ticks(self.x)

    def meta(self, first: int) -> Dict:
        """Return what a page needs to redraw: ticks, the scales that each axis can have, and whole tints."""
        shapes = [*self.drawn_tints()]
        tints = [
            {"shape": first + i, "low": tint.low, "high": tint.high, "name": escaped(tint.name)}
            for i, (tint, *_) in enumerate(shapes)
        ]
        return {
            "names": bool(self.panel.names),
            "name": escaped(_scaled(self.panel.y_title, False)),
            "x": {"scales": self.x_scales(), "ticks": self.x_ticks()},
            "y": {"scales": self.y_scales(), "ticks": _ticks(self.y)},
            "tints": tints,
        }

    def x_scales(self) -> dict[str, Dict]:
        """Return the ranges and titles of a log axis on both scales; empty if it cannot be changed."""
        if self.x.scale != "log" or self.panel.heat:
            return {}
        other = x_axis(replace(self.panel, x_scale="linear"))
        return {one.scale: _scale(one, "{} →", self.panel.x_title) for one in (self.x, other)}

    def y_scales(self) -> dict[str, Dict]:
        """Return the ranges and titles of the y axis on both scales, its own first; empty if it has one."""
        panel, ys = self.panel, (_number(y) for layer in self.panel.layers for y in layer.y)
        known = [y for y in ys if y is not None]
        bases = any(layer.base for layer in panel.layers)
        if panel.heat or self.y.scale not in ("log", "linear") or not known:
            return {}
        if self.y.scale == "log":
            other = y_axis(replace(panel, y_scale="linear", y_range=(None, None)))
        elif min(known) > 0 and not bases and max(known) > 3 * min(known):
            other = y_axis(replace(panel, y_scale="log", y_range=(None, None)))
        else:
            return {}
        return {one.scale: _scale(one, "↑ {}", panel.y_title, panel.percent) for one in (self.y, other)}

    # ------------------------------------------------------------ beside the data

    def drawn_tints(self) -> Iterable[tuple[Any, float, float]]:
        for tint in self.panel.tints:
            low, high = self.y.held(tint.low, True), self.y.held(tint.high, False)
            if high > low:
                yield tint, low, high

    def tints(self) -> Iterable[Dict]:
        for tint, low, high in self.drawn_tints():
            ends = {"y0": _back(self.y, low), "y1": _back(self.y, high)}
            text = escaped(tint.name) if high - low > 0.07 * (self.y.high - self.y.low) else ""
            label = {"text": text, "textposition": f"top {self.free(high)}", "padding": 5}
            look = {"fillcolor": self.paint[f"z{TONES.index(tint.tone) + 1}"], "line": {"width": 0}}
            look |= {"label": label | {"font": {"color": self.paint["soft"]}}, "layer": "below"}
            yield {"type": "rect", **self.across, **ends, **look}

    def free(self, top: float) -> str:
        """Return at which end there is room for a name below a place of the y axis, else right."""
        taken = set()
        deep = 0.14 * (self.y.high - self.y.low)
        for layer in self.panel.layers:
            for x, y in zip(layer.x, layer.y, strict=True):
                at, across = self.y.at(y), self.x.share(x)
                if at is not None and across is not None and top - deep < at < top + deep / 6:
                    taken |= {side for side, end in (("left", across), ("right", 1 - across)) if end < 0.1}
        return "left" if taken == {"right"} else "right"

    def lines(self) -> Iterable[Dict]:
        soft = self.paint["soft"]
        look = {"type": "line", "line": {"color": soft, "width": 1, "dash": "3px,3px"}}
        for at, name in self.x.within(self.panel.uprights):
            x, left = _back(self.x, at), (at - self.x.low) / (self.x.high - self.x.low) < 0.75
            label = {"text": escaped(name), "textposition": "end", "textangle": 0, "padding": 4}
            label |= {"xanchor": "left" if left else "right", "yanchor": "top", "font": {"color": soft}}
            yield look | self.up | {"x0": x, "x1": x, "label": label}
        for at, name in self.y.within(self.panel.levels):
            y = _back(self.y, at)
            label = {"text": escaped(name), "textposition": "start", "padding": 3, "yanchor": "bottom"}
            yield look | self.across | {"y0": y, "y1": y, "label": label | {"font": {"color": soft}}}
        if self.panel.heat:
            yield from self.over_heat(self.panel.heat)

    def over_heat(self, heat: Heat) -> Iterable[Dict]:
        on = {"xref": f"x{self.end}", "yref": f"y{self.end}"}
        ends = {"x0": self.x.low, "x1": self.x.high, "y0": self.y.low, "y1": self.y.high}
        line = {"color": self.paint["ink"], "width": 1.2, "dash": "4px,3px"}
        yield {"type": "line", **on, **ends, "line": line}
        if heat.box:
            a, b, c, d = heat.box
            ends = {"x0": self.x.held(a, True), "x1": self.x.held(b, False)}
            ends |= {"y0": self.y.held(c, True), "y1": self.y.held(d, False)}
            font = {"color": self.paint["ink"], "weight": 600}
            label = {"text": escaped(heat.box_name), "textposition": "bottom right", "padding": 6}
            line = {"color": self.paint["c2"], "width": 1.6}
            yield {"type": "rect", **on, **ends, "line": line, "label": label | {"font": font}}

    # ------------------------------------------------------------ the data

    def traces(self) -> Iterable[Dict]:
        if self.panel.heat:
            yield self.heat(self.panel.heat) | self.axes
        name = ""
        for place, layer in enumerate(self.panel.layers):
            name = self.named(layer, name)
            colour = self.paint[f"c{COLOURS.index(layer.colour)}"]
            same = {"name": escaped(name), "legendgroup": escaped(name), "showlegend": False, **self.axes}
            for ribbon in self.ribbons(layer):
                yield ribbon | same
            drawn = self.bars(layer, colour) if layer.kind == "bars" else self.scatter(layer, colour)
            yield drawn | same | self.hover(layer) | {"meta": self.raw(place, layer)}

    def named(self, layer: Layer, before: str) -> str:
        """Return the name of a layer in the legend, where layers of one name are one."""
        others = any(one.name for one in self.panel.layers)
        if layer.name or not others:
            return layer.name or quantity(self.panel.y_title)[0]
        return INTERVAL if layer.named and layer.low else before

    def raw(self, place: int, layer: Layer) -> Dict:
        """Return the numbers of a layer as the picture has them, where the trace does not."""
        found: Dict = {"panel": self.place, "layer": place}
        if self.panel.names:
            found["x"] = [escaped(place_name(self.panel, x)) for x in layer.x]
        elif self.x.scale not in ("linear", "log"):
            found["x"] = [float(x) for x in layer.x]
        for name in ("low", "high"):
            ends = getattr(layer, name)
            if len(ends):
                found[name] = [_number(end) for end in ends]
        return found

    def bars(self, layer: Layer, colour: str) -> Dict:
        found: Dict = {
            "type": "bar",
            "x": [_on(self.x, x) for x in layer.x],
            "y": [_on(self.y, y) for y in layer.y],
            "width": layer.width * 0.92,
            "marker": {"color": colour, "line": {"width": 0}},
            "textposition": "none",
        }
        return found | ({"base": [_number(base) for base in layer.base]} if layer.base else {})

    def scatter(self, layer: Layer, colour: str) -> Dict:
        x, y = [_on(self.x, one) for one in layer.x], [_on(self.y, one) for one in layer.y]
        y = [value if at is not None else None for value, at in zip(y, x, strict=True)]
        lined = layer.kind != "points"
        marked = layer.kind == "points" or (layer.kind == "line" and len(x) <= MARKED and not layer.dashed)
        hollow = layer.hollow if any(layer.hollow) else ()
        drawn = (("lines", lined), ("markers", marked))
        found: Dict = {
            "type": "scatter",
            "x": x,
            "y": y,
            "mode": "+".join(name for name, on in drawn if on),
            "line": {"color": colour, "width": 1.6 if layer.dashed else 2.2},
            "marker": {
                "color": [self.paint["card"] if one else colour for one in hollow] if hollow else colour,
                "size": 8,
                "line": {"color": colour, "width": [2 if one else 0 for one in hollow] if hollow else 0},
            },
        }
        if layer.dashed:
            found["line"]["dash"] = "2px,4px"
        if layer.low and not lined:
            found["error_y"] = _errors(layer, colour)
        return found

    def ribbons(self, layer: Layer) -> Iterable[Dict]:
        """Yield the 95% band of a line, one area for each run of known intervals."""
        if not layer.low or layer.kind != "line":
            return
        for some in runs(self.ends(layer)):
            yield {
                "type": "scatter",
                "x": [*(x for x, _, _ in some), *(x for x, _, _ in some[::-1])],
                "y": [*(high for _, _, high in some), *(low for _, low, _ in some[::-1])],
                "fill": "toself",
                "fillcolor": self.paint[f"r{COLOURS.index(layer.colour)}"],
                "mode": "none",
                "hoverinfo": "skip",
            }

    def ends(self, layer: Layer) -> Iterable[tuple[float, float, float] | None]:
        """Yield place, low and high of each point, None where they are not known or not reliable."""
        hollow = layer.hollow or [False] * len(layer.x)
        for x, low, high, doubt in zip(layer.x, layer.low, layer.high, hollow, strict=True):
            at = _on(self.x, x)
            if low is None or high is None or at is None or doubt:
                yield None
            else:
                bottom, top = self.y.at(low), self.y.at(high)
                yield (
                    at,
                    _back(self.y, self.y.low if bottom is None else bottom),
                    _back(self.y, self.y.high if top is None else top),
                )

    def heat(self, heat: Heat) -> Dict:
        edges = [self.x.held(edge, i == 0) for i, edge in enumerate(heat.edges)]
        most = max((max(row) for row in heat.counts), default=1)
        bins = range(len(edges) - 1)
        return {
            "type": "heatmap",
            "x": edges,
            "y": edges,
            "z": [[shade(n, most) if (n := heat.counts[i][j]) else None for i in bins] for j in bins],
            "text": [[escaped(_said_cell(self.panel, heat, i, j)) for i in bins] for j in bins],
            "hovertemplate": "%{text}<extra></extra>",
            "hoverongaps": False,
            "colorscale": [[(i + end) / HEATS, self.paint[f"q{i}"]] for i in range(HEATS) for end in (0, 1)],
            "zmin": -0.5,
            "zmax": HEATS - 0.5,
            "showscale": False,
            "showlegend": False,
            "name": "",
            "meta": {
                "panel": self.place,
                "edges": [float(edge) for edge in heat.edges],
                "counts": [[int(n) for n in row] for row in heat.counts],
            },
        }

    def hover(self, layer: Layer) -> Dict:
        if not layer.named:
            return {"hoverinfo": "skip"}
        texts = [escaped(said(self.panel, layer, place)) for place in range(len(layer.x))]
        return {"text": texts, "hovertemplate": "%{text}<extra></extra>"}


def _errors(layer: Layer, colour: str) -> Dict:
    ends = [*zip(map(_number, layer.y), map(_number, layer.low), map(_number, layer.high), strict=True)]
    up = [high - y if y is not None and high is not None else None for y, _, high in ends]
    down = [y - low if y is not None and low is not None else None for y, low, _ in ends]
    return {"array": up, "arrayminus": down, "color": colour, "thickness": 1.6, "width": 0}


# ---------------------------------------------------------------- axes


def _number(value: float | None) -> float | None:
    """Return a value that an axis can hold; None if it has no place."""
    return float(value) if value is not None and math.isfinite(value) and abs(value) < FARTHEST else None


def _on(axis: Axis, value: float | None) -> float | None:
    """Return a value as the figure holds it: itself on linear and log axes, else transformed.

    What is 0 or negative is held for a log axis too, which leaves it out, as the axis may become linear.
    """
    if axis.scale in ("linear", "log"):
        held = _number(value)
        return None if axis.scale == "log" and held is not None and 0 < held < 1 / FARTHEST else held
    return axis.at(value)


def _back(axis: Axis, at: float) -> float:
    """Return a transformed place as shapes and traces take it."""
    return 10.0**at if axis.scale == "log" else at


def _axis(axis: Axis, percent: bool = False) -> Dict:
    """Return an axis; on a linear one plotly finds the ticks, on others it has those of a static chart."""
    found: Dict = {"type": "log" if axis.scale == "log" else "linear", "range": [axis.low, axis.high]}
    if axis.scale == "linear":
        return found | {"tickformat": ".6~%" if percent else ",.6~g"}
    ticks = [(_back(axis, at), text) for at, text in axis.ticks]
    return found | {"tickvals": [at for at, _ in ticks], "ticktext": [text for _, text in ticks]}


def _scale(axis: Axis, form: str, title: str, percent: bool = False) -> Dict:
    """Return what changes with the scale of an axis; `form` is its title with an arrow."""
    title = form.format(escaped(_scaled(title, axis.scale == "log")))
    shape = {"type": axis.scale, "range": [axis.low, axis.high], "tickformat": ".6~%" if percent else ",.6~g"}
    return {"axis": shape, "ticks": _ticks(axis, percent), "title": title}


def _ticks(axis: Axis, percent: bool = False) -> list[tuple[float, str]]:
    """Return all ticks of a transformed axis, rough ones first, of which a page shows those that fit."""
    if axis.scale == "linear":
        return []
    if axis.scale == "logit":
        tails = [10.0**-p * m for m in (1, 5, 2) for p in range(1, 7)]
        known = [*(one for tail in tails for one in (tail, 1 - tail)), 0.3, 0.7, 0.4, 0.6]
    elif axis.scale == "excess":
        known = [1 + 10.0**p * m for m in (5, 2) for p in range(-4, 0)]
        known += [10.0**p * m for m in (1, 2, 5) for p in range(4) if p or m > 1]
    else:
        powers = range(math.floor(axis.low) - 1, math.ceil(axis.high) + 2)
        known = [10.0**p * m for m in (1, 2, 5, 3, 1.5, 7) for p in powers if abs(p) < 308]
    spelled = [f"{value * 100:.3g}%" if percent else _digits(value) for value in known]
    finer = [
        (at, text) for value, text in zip(known, spelled, strict=True) if (at := axis.at(value)) is not None
    ]
    return [*dict([*(() if percent else axis.ticks), *finer]).items()][:MOST]


def _digits(value: float) -> str:
    """Return a tick of few digits in full: 0.002, 2·10⁻⁴, 1−5·10⁻⁵."""
    if 0.99995 < value < 1:
        return f"1−{_digits(1 - value)}"
    lead, _, power = f"{value:.2e}".partition("e")
    if value >= 1e-3 or float(lead) == 1:
        return plain(float(f"{value:.7g}"))
    return f"{float(lead):g}·{plain(10.0 ** int(power))}"
