"""Charts as data for plotly: lines with their intervals, bands behind them, panels side by side.

A chart is traces and a layout in plotly's JSON. The page sets its panels below each other on narrow screens,
and gives all charts one look, light or dark (`templates/look.json`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from offpol_diag.metrics import BANDS, tone
from offpol_diag.number import Number
from offpol_diag.numerals import format_number, minus

if TYPE_CHECKING:
    import plotly.graph_objects as go

_PACKAGE = Path(__file__).parents[1]
TEMPLATES = next(filter(Path.is_dir, (_PACKAGE / "templates", _PACKAGE.parent / "templates")))
"""In the package if it is installed from a wheel, else in the repository."""
Dict = dict[str, Any]
Points = tuple[Sequence[Any], Sequence[Number], str, str]
"""x, numbers, name and colour of a line."""
BLUE, ORANGE, TEAL, PURPLE, GREY = COLOURS = ("#3a82d8", "#d8711c", "#1f9a8a", "#9467d6", "#848c99")
"""Each has a contrast of 3 on the light and on the dark page."""
TINTS = {"good": "#2f9e6a", "info": "#e0b43c", "warn": "#e07a3c", "bad": "#d6384c"}
HEIGHT, ALONE = 250, 320
"""Pixels of a chart on the page, and of one that has its title in it."""
MARKED, REACH, FARTHEST = 20, 4.0, 1e300
"""Points up to which a line marks each; factor below the smallest value at which a log axis ends, as an
interval may reach towards 0; values beyond which there is no place."""


@dataclass(frozen=True)
class Chart:
    """A chart: a name, a finding for its title, and traces and layout of plotly."""

    name: str
    title: str
    data: list[Dict]
    layout: Dict

    def figure(self) -> go.Figure:
        """Return the chart as a figure of plotly, with its title."""
        import plotly.graph_objects as go

        text = "<br>".join(f"<b>{escaped(line)}</b>" for line in wrap(self.title, 88))
        more = {"template": look("light"), "title": {"text": text}, "height": ALONE}
        return go.Figure(self.data, {**self.layout, **more})


@dataclass(frozen=True)
class Panel:
    """A pair of axes with its traces; `x` and `y` say how they differ from the usual, `shapes` lie behind."""

    across: str
    up: str
    traces: list[Dict]
    x: Dict = field(default_factory=dict)
    y: Dict = field(default_factory=dict)
    shapes: Sequence[Dict] = ()


def chart(name: str, title: str, *panels: Panel) -> Chart:
    """Return a chart of panels side by side."""
    grid = {"rows": 1, "columns": len(panels), "pattern": "independent", "xgap": 0.22, "ygap": 0.3}
    data, layout = list[Dict](), Dict(height=HEIGHT, grid=grid, shapes=[])
    for end, panel in zip(("", *map(str, range(2, len(panels) + 1))), panels, strict=True):
        layout[f"xaxis{end}"] = {"title": {"text": escaped(panel.across)}, **panel.x}
        layout[f"yaxis{end}"] = {"title": {"text": escaped(panel.up)}, **panel.y}
        data += [trace | {"xaxis": f"x{end}", "yaxis": f"y{end}"} for trace in panel.traces]
        for one in panel.shapes:
            refs = {ref: one.get(ref, ref[0]).replace(ref[0], ref[0] + end, 1) for ref in ("xref", "yref")}
            layout["shapes"].append(one | refs)
    return Chart(name, title, data, layout)


def look(name: Literal["light", "dark"]) -> Dict:
    """Return the template of plotly that all charts share: its colours are those of the page."""
    text = (TEMPLATES / "look.json").read_text(encoding="utf-8")
    return dict(json.loads(Template(text).safe_substitute(json.loads(text)[name]))["template"])


def escaped(text: str) -> str:
    """Escape a text for plotly, which reads tags, values and formulas in every text."""
    for sign, code in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "%{": "&#37;{", "$": "&#36;"}.items():
        text = text.replace(sign, code)
    return text


# ---------------------------------------------------------------- traces, axes, and what lies behind them


def curve(points: Points, /, where: Sequence[str] = (), floor: float = -FARTHEST, **more: Any) -> list[Dict]:
    """Return a line and its 95% band; with `mode="markers"`, points and their 95% intervals.

    Args:
        points: what is drawn.
        where: what names the points under the pointer, if not x.
        floor: where intervals end on a log axis.
        more: what else differs in the trace.
    """
    x, numbers, name, colour = points
    y = [one.value if one.value is not None and abs(one.value) < FARTHEST else None for one in numbers]
    said = zip(where or map(str, x), numbers, strict=True)
    shared: Dict = {
        "type": "scatter",
        "x": [escaped(at) if isinstance(at, str) else at for at in x],
        "name": escaped(name),
        "legendgroup": escaped(name),
        "showlegend": bool(name),
    }
    line = shared | {
        "mode": "lines+markers" if len(y) <= MARKED else "lines",
        "y": y,
        "line": {"color": colour},
        "marker": {"color": colour},
        "text": [escaped(minus(f"{at}: {format_number(one)}")) for at, one in said],
        "hovertemplate": f"%{{text}}<extra>{escaped(name)}</extra>",
    }
    ends = [None if at is None else one.interval for at, one in zip(y, numbers, strict=True)]
    low, high = ([end and min(max(end[side], floor), FARTHEST) for end in ends] for side in (0, 1))
    if not any(ends):
        return [line | more]
    if "mode" in more:
        up, down = (
            [0 if end is None or at is None else abs(end - at) for end, at in zip(side, y, strict=True)]
            for side in (high, low)
        )
        return [line | {"error_y": {"array": up, "arrayminus": down, "color": colour}} | more]
    across, outline = list[Any](), list[float | None]()
    for known, run in groupby(range(len(ends)), lambda at: ends[at] is not None):
        if known:  # there along the upper ends and back along the lower ones
            there = [*run]
            across += [*(shared["x"][at] for at in (*there, *there[::-1])), None]
            outline += [*(high[at] for at in there), *(low[at] for at in there[::-1]), None]
    band = {"mode": "none", "x": across, "y": outline, "fill": "toself", "fillcolor": f"{colour}2e"}
    return [shared | band | {"hoverinfo": "skip", "showlegend": False}, line | more]


def plain(values: Iterable[float | None], unit: str = "") -> list[Number]:
    """Return values as numbers without intervals."""
    return [Number(value=value, unit=unit) for value in values]


def k3_panel(
    across: str, lines: Sequence[Points], shapes: Sequence[Dict] = (), x: Dict | None = None, **more: Any
) -> Panel:
    """Return K3 on a log axis that is tinted by its bands; these are named on a side where no line ends."""
    known = [one for line in lines for one in line[1] if one.value and 0 < one.value < FARTHEST]
    values = [one.value or 0.0 for one in known] or [1.0]
    reached = [*values, *(end for one in known for end in one.interval or ())]
    low, high = max(min(reached), min(values) / REACH) / 1.2, min(max(reached), FARTHEST) * 1.2
    later = [one.value or 0.0 for line in lines for one in line[1][len(line[1]) // 2 :]]
    bands = []
    for one in BANDS["k3"]:
        bottom, top = max(one.low or 0.0, low), min(one.high or math.inf, high)
        if bottom < top:
            side = "left" if any(bottom <= value < top for value in later) else "right"
            room = math.log(top / bottom) > 0.12 * math.log(high / low)
            label = {"text": one.name if room else "", "textposition": f"top {side}"}
            bands.append(tint(bottom, top, tone(one.name)) | {"label": label})
    ticks = 1 if high > 50 * low else "D2" if high > 5 * low else "D1"
    axis = LOG | {"range": [math.log10(low), math.log10(high)], "dtick": ticks}
    traces = [trace for line in lines for trace in curve(line, floor=low, **more)]
    return Panel(across, "K3 KL, nats per token", traces, x or {}, axis, [*bands, *shapes])


def tint(low: float, high: float, shade: str) -> Dict:
    """Return a shaded range of y."""
    look = {"type": "rect", "fillcolor": TINTS[shade], "opacity": 0.11, "line": {"width": 0}}
    return {"xref": "x domain", "x0": 0, "x1": 1, "y0": low, "y1": high, **look}


def upright(x: float, text: str = "", **label: Any) -> Dict:
    """Return a dashed line at x, with a name right of its top, unless the label says otherwise."""
    usual = {"textangle": 0, "textposition": "end", "xanchor": "left", "yanchor": "top"}
    ends = {"yref": "y domain", "x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", **ends, "label": {"text": escaped(text), **usual, **label}}


def steps_axis(steps: Sequence[float]) -> Dict:
    """Return an axis of training steps, with ticks at whole numbers."""
    return {"dtick": 1} if max(steps) - min(steps) < 9 else {"tickformat": ",d"}


def logit(p: float) -> float:
    """Return log₁₀(p/(1 − p)) of a probability, at most 7 from 0."""
    p = min(max(p, 1e-7), 1 - 1e-7)
    return math.log10(p / (1 - p))


TICKS = {1e-6: "10⁻⁶", 1e-4: "10⁻⁴", 0.01: "0.01", 0.5: "0.5", 0.99: "0.99", 0.9999: "0.9999"}
LOG: Dict = {"type": "log", "dtick": 1, "tickformat": ".6~g"}
LOGITS: Dict = {"tickvals": [*map(logit, TICKS)], "ticktext": [*TICKS.values()], "tickangle": 0}
SHARE: Dict = {"tickformat": ".6~%", "rangemode": "tozero"}
LABELS: Dict = {"type": "category"}
"""Axes of powers of ten, of probabilities by `logit`, of shares, of names."""
