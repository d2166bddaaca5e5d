"""Charts as figures of plotly, for notebooks and trackers: the panels of a picture side by side or stacked.

plotly is imported when a figure is made.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from functools import cache
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from offpol_diag.errors import OffpolError, UsageError, did_you_mean, install
from offpol_diag.numerals import counted, minus, written
from offpol_diag.report import answered
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
    runs,
    shade,
    x_axis,
    y_axis,
)
from offpol_diag.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

Dict = dict[str, Any]
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
ROW, TALL, GAP, APART = 236, 420, 44, 0.16
"""Pixels of a panel and of a tall one, pixels between rows, and the share of the width between columns."""
MARGIN = {"l": 66, "r": 18, "t": 30, "b": 48}
LINE, LEGEND = 20, 34
"""Pixels that each line of the title, and a legend, take above a figure for notebooks."""
INTERVAL = "95% interval"
NAMES = (
    *(f"{kind}{i}" for kind in "cr" for i in range(len(COLOURS))),
    *(f"z{i + 1}" for i in range(len(TONES))),
    *(f"q{i}" for i in range(HEATS)),
    *("ink", "soft", "card", "hair", "bg"),
)


@cache
def palette() -> dict[str, str]:
    """Return the colours of the page's style sheet."""
    css = (templates_dir() / "report.css").read_text(encoding="utf-8")
    body = re.search(r":root \{(.*?)\}", css, re.DOTALL)
    found = dict(re.findall(r"--(\w+):\s*([^;]+);", body[1] if body else ""))
    return {name: found[name] for name in NAMES}


def pictures(summary: Result) -> dict[str, Picture]:
    """Return every chart of a result by name."""
    answer = answered(summary)
    evidence = [fact.chart for fact in answer.facts if fact.chart]
    found: dict[str, Picture] = {}
    for one in (*answer.charts, *evidence):
        found.setdefault(re.sub(r"[^\w.]+", "_", one.id), one)
    return found


def figure(summary: Result, name: str) -> go.Figure:
    """Return a chart by name as a figure of plotly; see `Report.figure`."""
    known = pictures(summary)
    if name not in known:
        hint = did_you_mean(name, list(known)) or f"there are {', '.join(known)}"
        raise UsageError(f'unknown figure "{name}"', hint if known else "the result has no charts")
    return drawn(known[name])


def template() -> Dict:
    """Return the look that all figures share."""
    paint = palette()
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
        "paper_bgcolor": paint["card"],
        "plot_bgcolor": paint["card"],
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


MARKUP = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "%{": "&#37;{", "$": "&#36;"}
"""What plotly takes for tags, values and formulas → what is drawn as that."""


def escaped(text: str) -> str:
    """Escape a text for plotly, which reads tags, values and formulas in every text."""
    for sign, code in MARKUP.items():
        text = text.replace(sign, code)
    return UNSEEN.sub("\ufffd", text)


# ---------------------------------------------------------------- a picture as a figure


def drawn(picture: Picture) -> go.Figure:
    """Return a picture as a figure of plotly, with its finding as title."""
    try:
        import plotly.graph_objects as go
    except ImportError as error:
        what = "the package plotly, which draws figures, is missing"
        raise OffpolError(what, install("cli")) from error

    data, layout = parts(picture)
    several = sum(trace["showlegend"] for trace in data) > 1
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
    layout |= {"template": template(), "showlegend": several, "legend": {"y": 1 + 22 / inner}}
    return go.Figure(data, layout)


def parts(picture: Picture) -> tuple[list[Dict], Dict]:
    """Return the traces and the layout of a picture: panels of one x axis below each other, else in a row."""
    panels = [_Part(panel, i) for i, panel in enumerate(picture.panels)]
    shared = len({(part.x, tuple(part.panel.names)) for part in panels}) == 1
    height = sum(TALL if panel.tall else ROW for panel in picture.panels) + GAP * (len(panels) - 1)
    layout: Dict = {
        "height": (height if shared else TALL) + MARGIN["t"] + MARGIN["b"],
        "margin": MARGIN,
        "shapes": [shape for part in panels for shape in (*part.tints(), *part.lines())],
        "annotations": [part.y_title() for part in panels],
    }
    for part in panels:
        layout[f"xaxis{part.end}"] = part.x_layout() | {"anchor": f"y{part.end}"}
        y_layout = {"nticks": 8, "anchor": f"x{part.end}"} | _axis(part.y, part.panel.percent)
        layout[f"yaxis{part.end}"] = y_layout
    _arrange(layout, beside=not shared)
    data = [trace for part in panels for trace in part.traces()]
    leads = {trace["name"]: trace for trace in data[::-1] if "fill" not in trace and trace["name"]}
    for trace in leads.values():
        trace["showlegend"] = True
    return data, layout


def _arrange(layout: Dict, beside: bool) -> None:
    """Set the panels side by side, or below each other on one x axis that the last one names."""
    many = len(layout["annotations"])
    gap = APART / many if beside else GAP / (layout["height"] - MARGIN["t"] - MARGIN["b"])
    each = (1 - gap * (many - 1)) / many
    for i in range(many):
        x, y = (layout[f"{letter}axis{i + 1 if i else ''}"] for letter in "xy")
        left, top = i * (each + gap), 1 - i * (each + gap)
        x["domain"] = [left, left + each] if beside else [0.0, 1.0]
        y["domain"] = [0.0, 1.0] if beside else [max(top - each, 0.0), top]
        if not beside and i < many - 1:
            x["showticklabels"], x["title"] = False, {"text": ""}
        if not beside and i:
            x["matches"] = "x"


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


# ---------------------------------------------------------------- a panel


class _Part:
    """One panel of a figure, on the axes of its number."""

    def __init__(self, panel: Panel, place: int) -> None:
        self.panel, self.paint = panel, palette()
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
        ticks = self.x.ticks[:: -(-len(self.panel.names) // 40)]
        names = [escaped(text) for _, text in ticks]
        return found | {"tickvals": [at for at, _ in ticks], "ticktext": names}

    def y_title(self) -> Dict:
        at = {"xref": f"x{self.end} domain", "x": 0, "yref": f"y{self.end} domain", "y": 1}
        shift = {"xshift": -MARGIN["l"] + 8, "yshift": 7, "xanchor": "left", "yanchor": "bottom"}
        text = f"↑ {escaped(self.panel.y_title)}"
        return {"text": text, **at, **shift, "font": {"color": self.paint["soft"]}}

    # ------------------------------------------------------------ beside the data

    def tints(self) -> Iterable[Dict]:
        for tint in self.panel.tints:
            low, high = self.y.held(tint.low, True), self.y.held(tint.high, False)
            if high <= low:
                continue
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
        for layer in self.panel.layers:
            name = self.named(layer, name)
            colour = self.paint[f"c{COLOURS.index(layer.colour)}"]
            same = {"name": escaped(name), "legendgroup": escaped(name), "showlegend": False, **self.axes}
            for ribbon in self.ribbons(layer):
                yield ribbon | same
            drawn = self.bars(layer, colour) if layer.kind == "bars" else self.scatter(layer, colour)
            yield drawn | same | self.hover(layer)

    def named(self, layer: Layer, before: str) -> str:
        """Return the name of a layer in the legend, where layers of one name are one."""
        others = any(one.name for one in self.panel.layers)
        if layer.name or not others:
            return layer.name or quantity(self.panel.y_title)[0]
        return INTERVAL if layer.named and layer.low else before

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
    """Return a value as the figure holds it: itself on linear and log axes, else transformed."""
    if axis.scale in ("linear", "log"):
        held = _number(value)
        return None if axis.scale == "log" and held is not None and 0 < held < 1 / FARTHEST else held
    return axis.at(value)


def _back(axis: Axis, at: float) -> float:
    """Return a transformed place as shapes and traces take it."""
    return 10.0**at if axis.scale == "log" else at


def _axis(axis: Axis, percent: bool = False) -> Dict:
    """Return an axis; plotly finds the ticks of linear and log ones, others have those of a static chart."""
    found: Dict = {"type": "log" if axis.scale == "log" else "linear", "range": [axis.low, axis.high]}
    if axis.scale == "log":
        return found | {"tickformat": ",.6~g", "nticks": 4}
    if axis.scale == "linear":
        return found | {"tickformat": ".6~%" if percent else ",.6~g"}
    return found | {"tickvals": [at for at, _ in axis.ticks], "ticktext": [text for _, text in axis.ticks]}
