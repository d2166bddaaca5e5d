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
from offpol_diag.numerals import minus, say

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
HEIGHT, TITLE = 250, 22
"""Pixels of a chart, and of a line of its title where it has no page around it."""
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

    @property
    def panels(self) -> int:
        """How many panels lie side by side."""
        return int(self.layout.get("grid", {}).get("columns", 1))

    def to_json(self) -> str:
        """Return traces and layout as plotly reads them."""
        return json.dumps(
            {"data": self.data, "layout": self.layout}, ensure_ascii=False, separators=(",", ":")
        )

    def figure(self) -> go.Figure:
        """Return the chart as a figure of plotly, with its title."""
        import plotly.graph_objects as go

        lines = [f"<b>{escaped(line)}</b>" for line in wrap(self.title, 88)]
        above, style = TITLE * (len(lines) + 1), look("light")
        title = {"text": "<br>".join(lines), "x": 0.01, "y": 0.97, "yref": "container", "yanchor": "top"}
        more = {"title": title, "height": HEIGHT + above, "margin": style["layout"]["margin"] | {"t": above}}
        return go.Figure(self.data, {**self.layout, "template": style, **more})


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
    data: list[Dict] = []
    layout: Dict = {"height": HEIGHT, "shapes": []}
    if len(panels) > 1:
        layout["grid"] = {
            "rows": 1,
            "columns": len(panels),
            "pattern": "independent",
            "xgap": 0.22,
            "ygap": 0.3,
        }
    for end, panel in zip(("", *map(str, range(2, len(panels) + 1))), panels, strict=True):
        layout[f"xaxis{end}"] = {"title": {"text": escaped(panel.across)}, **panel.x}
        layout[f"yaxis{end}"] = {"title": {"text": escaped(panel.up)}, **panel.y}
        data += [trace | {"xaxis": f"x{end}", "yaxis": f"y{end}"} for trace in panel.traces]
        for one in panel.shapes:
            refs = {ref: one.get(ref, ref[0]).replace(ref[0], ref[0] + end, 1) for ref in ("xref", "yref")}
            layout["shapes"].append(one | refs)
    return Chart(name, title, data, layout)


def look(name: Literal["light", "dark"]) -> Dict:
    """Return the template of plotly that all charts share."""
    text = (TEMPLATES / "look.json").read_text(encoding="utf-8")
    return dict(json.loads(Template(text).safe_substitute(json.loads(text)[name]))["template"])


def escaped(text: str) -> str:
    """Escape a text for plotly, which reads tags, values and formulas in every text."""
    for sign, code in {"&": "&amp;", "<": "&lt;", ">": "&gt;", "%{": "&#37;{", "$": "&#36;"}.items():
        text = text.replace(sign, code)
    return text


# ---------------------------------------------------------------- traces, axes, and what lies behind them


def curve(
    points: Points,
    /,
    where: Sequence[str] = (),
    floor: float = -FARTHEST,
    **more: Any,
) -> list[Dict]:
    """Return a line and its 95% band; with `mode="markers"`, points and their 95% intervals.

    Args:
        points: what is drawn.
        where: what names the points under the pointer, if not x.
        floor: where intervals end on a log axis.
        more: what else differs in the trace.
    """
    x, numbers, name, colour = points
    y = [placed(one.value) for one in numbers]
    said = zip(where or map(str, x), numbers, strict=True)
    trace: Dict = {
        "type": "scatter",
        "mode": "lines+markers" if len(y) <= MARKED else "lines",
        "x": [escaped(at) if isinstance(at, str) else at for at in x],
        "y": y,
        "line": {"color": colour},
        "marker": {"color": colour},
        "text": [escaped(minus(f"{at}: {say(one)}")) for at, one in said],
        "hovertemplate": f"%{{text}}<extra>{escaped(name)}</extra>",
    }
    shared = {"name": escaped(name), "legendgroup": escaped(name)}
    ends: list[tuple[Any, float, float, float] | None] = []
    for at, value, one in zip(trace["x"], y, numbers, strict=True):
        low, high = one.interval or (0.0, 0.0)
        sure = one.interval is not None and value is not None
        ends.append((at, value or 0.0, max(low, floor), min(high, FARTHEST)) if sure else None)
    if "mode" in more and any(ends):
        up, down = ([abs(end[side] - end[1]) if end else 0 for end in ends] for side in (3, 2))
        trace["error_y"] = {"array": up, "arrayminus": down, "color": colour}
    found = [trace | shared | {"showlegend": bool(name)} | more]
    if "mode" in more or not any(ends):
        return found
    across, outline = list[Any](), list[float | None]()
    for known, run in groupby(ends, bool):
        some = [end for end in run if end]
        across += [*(end[0] for end in some), *(end[0] for end in some[::-1]), None] if known else []
        outline += [*(end[3] for end in some), *(end[2] for end in some[::-1]), None] if known else []
    band = {"type": "scatter", "mode": "none", "x": across, "y": outline, "fill": "toself"}
    return [band | shared | {"fillcolor": f"{colour}2e", "hoverinfo": "skip", "showlegend": False}, *found]


def placed(value: float | None) -> float | None:
    """Return a value that has a place on an axis, else None."""
    return value if value is not None and abs(value) < FARTHEST else None


def plain(values: Iterable[float | None], unit: str = "") -> list[Number]:
    """Return values as numbers without intervals."""
    return [Number(value=value, unit=unit) for value in values]


def k3_panel(
    across: str, lines: Sequence[Points], shapes: Sequence[Dict] = (), x: Dict | None = None, **more: Any
) -> Panel:
    """Return K3 on a log axis that is tinted by its bands; these are named on a side where no line ends."""
    known = [one for line in lines for one in line[1] if one.value and 0 < one.value < FARTHEST]
    values = [one.value or 0.0 for one in known] or [1.0]
    low, high = ([one.interval[end] for one in known if one.interval] for end in (0, 1))
    ends = max(min((*values, *low)), min(values) / REACH) / 1.2, min(max((*values, *high)), FARTHEST) * 1.2
    bands = []
    for one in BANDS["k3"]:
        bottom, top = max(one.low or 0.0, ends[0]), min(one.high or math.inf, ends[1])
        if bottom < top:
            later = [one.value or 0.0 for line in lines for one in line[1][len(line[1]) // 2 :]]
            taken = any(bottom <= value < top for value in later)
            room = math.log(top / bottom) > 0.12 * math.log(ends[1] / ends[0])
            label = {"text": one.name if room else "", "textposition": f"top {'left' if taken else 'right'}"}
            bands.append(tint(bottom, top, tone(one.name)) | {"label": label})
    span = ends[1] / ends[0]
    axis = LOG | {"range": [*map(math.log10, ends)], "dtick": 1 if span > 50 else "D2" if span > 5 else "D1"}
    axis |= {"tickformat": "~e"} if ends[0] < 1e-4 else {}
    traces = [trace for line in lines for trace in curve(line, floor=ends[0], **more)]
    return Panel(across, "K3 KL, nats per token", traces, x or {}, axis, [*bands, *shapes])


def tint(low: float, high: float, tone_: str) -> Dict:
    """Return a shaded range of y."""
    look = {"type": "rect", "fillcolor": TINTS[tone_], "opacity": 0.11, "line": {"width": 0}}
    return {"xref": "x domain", "x0": 0, "x1": 1, "y0": low, "y1": high, **look}


def upright(x: float, text: str = "", **label: Any) -> Dict:
    """Return a dashed line at x, with a name right of its top, unless the label says otherwise."""
    usual = {"textangle": 0, "textposition": "end", "xanchor": "left", "yanchor": "top"}
    ends = {"yref": "y domain", "x0": x, "x1": x, "y0": 0, "y1": 1}
    return {"type": "line", **ends, "label": {"text": escaped(text), **usual, **label}}


def level(y: float, text: str = "") -> Dict:
    """Return a dashed line at y, with a name at its end."""
    label = {"text": escaped(text), "textposition": "end", "yanchor": "top"}
    return {"type": "line", "xref": "x domain", "x0": 0, "x1": 1, "y0": y, "y1": y, "label": label}


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
