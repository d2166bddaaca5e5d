"""The charts of a dump, ten at most, each with a finding for its title, as data for plotly.

A chart is a list of traces and a layout in plotly's JSON. The page sets the panels of one below each other on
narrow screens and gives all the same look, light or dark (`templates/look.json`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from offpol_diag.metrics import BANDS, PAIRS, tone
from offpol_diag.number import Number, finite
from offpol_diag.numerals import count, counted, format_number, format_value, minus, rounded
from offpol_diag.result import Result, in_sync

if TYPE_CHECKING:
    import plotly.graph_objects as go

_PACKAGE = Path(__file__).parents[1]
TEMPLATES = next(filter(Path.is_dir, (_PACKAGE / "templates", _PACKAGE.parent / "templates")))
"""In the package if it is installed from a wheel, else in the repository."""
Dict = dict[str, Any]
BLUE, ORANGE, TEAL, PURPLE, GREY = COLOURS = ("#3a82d8", "#d8711c", "#1f9a8a", "#9467d6", "#848c99")
"""Each has a contrast of 3 on the light and on the dark page."""
TINTS = {"good": "#2f9e6a", "info": "#e0b43c", "warn": "#e07a3c", "bad": "#d6384c"}
HEIGHT, WITH_TITLE = 250, 320
"""Pixels of a chart on the page, which sets the title as a heading, and of a figure that has it inside."""
MARKED, REACH = 20, 1.5
"""Points up to which a line marks each; factor below the smallest K3 at which its axis ends."""
FEW, FACTOR_2, GROWS = 30, math.log(2), 2.0
"""Tokens below which a mean is not drawn; |Δ| of a factor of 2; growth of K3 at one lag that is a finding."""


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

        title = "<br>".join(f"<b>{escaped(line)}</b>" for line in wrap(self.title, 88))
        own = {"template": look("light"), "title": {"text": title}, "height": WITH_TITLE}
        return go.Figure(self.data, self.layout | own)


@dataclass(frozen=True)
class Panel:
    """A pair of axes: their titles, the traces, plotly's settings of both, and shapes behind the traces."""

    x_title: str
    y_title: str
    traces: Sequence[Dict]
    x: Dict = field(default_factory=dict)
    y: Dict = field(default_factory=dict)
    shapes: Sequence[Dict] = ()


def chart(name: str, title: str, *panels: Panel) -> Chart:
    """Return a chart of panels side by side."""
    grid = {"rows": 1, "columns": len(panels), "pattern": "independent", "xgap": 0.22, "ygap": 0.3}
    data, layout = list[Dict](), Dict(height=HEIGHT, grid=grid, shapes=[])
    for place, panel in enumerate(panels, 1):
        number = "" if place == 1 else str(place)  # plotly counts x, x2, x3
        layout[f"xaxis{number}"] = {"title": {"text": escaped(panel.x_title)}} | panel.x
        layout[f"yaxis{number}"] = {"title": {"text": escaped(panel.y_title)}} | panel.y
        data += [trace | {"xaxis": f"x{number}", "yaxis": f"y{number}"} for trace in panel.traces]
        for shape in panel.shapes:
            x, y = (shape.get(ref, ref[0]).replace(ref[0], ref[0] + number, 1) for ref in ("xref", "yref"))
            layout["shapes"].append(shape | {"xref": x, "yref": y})
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


# ---------------------------------------------------------------- traces


def curve(x: Sequence[Any], numbers: Sequence[Number], name: str, colour: str, **more: Any) -> Dict:
    """Return a line `name` through numbers with 95% error bars; `more` are settings of plotly's trace."""
    ends = [(n.value or 0.0, *(n.interval or (n.value or 0.0,) * 2)) for n in numbers]
    up = [finite(max(high - y, 0.0)) for y, _, high in ends]
    down = [finite(max(y - low, 0.0)) for y, low, _ in ends]
    return {
        "type": "scatter",
        "mode": "lines+markers" if len(ends) <= MARKED else "lines",
        "x": [escaped(at) if isinstance(at, str) else at for at in x],
        "y": [n.value for n in numbers],
        "error_y": {"array": up, "arrayminus": down, "color": f"{colour}80", "visible": any(up + down)},
        "name": escaped(name),
        "showlegend": bool(name),
        "line": {"color": colour},
        "marker": {"color": colour},
        "text": [escaped(minus(f"{at}: {format_number(n)}")) for at, n in zip(x, numbers, strict=True)],
        "hovertemplate": f"%{{text}}<extra>{escaped(name)}</extra>",
    } | more


# ---------------------------------------------------------------- axes, and what lies behind the traces


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


def steps_axis(steps: Sequence[float]) -> Dict:
    """Return an axis of training steps, with ticks at whole numbers."""
    return {"dtick": 1} if max(steps) - min(steps) < 9 else {"tickformat": ",d"}


def k3_panel(x_title: str, curves: Sequence[Dict], x: Dict) -> Panel:
    """Return K3 on a log axis tinted by its bands, each named on the side where no curve ends in it."""
    pairs = [pair for one in curves for pair in zip(one["y"], one["error_y"]["array"], strict=True)]
    known = [(y, up) for y, up in pairs if y is not None and y > 0] or [(1.0, 0.0)]
    low, high = min(y for y, _ in known) / REACH, finite(max(y + up for y, up in known) * 1.2)
    late = [y for one in curves for y in one["y"][len(one["y"]) // 2 :] if y is not None]
    bands = []
    for band in BANDS["k3"]:
        bottom, top = max(band.low or 0.0, low), min(band.high or math.inf, high)
        if bottom < top:
            side = "left" if any(bottom <= y < top for y in late) else "right"
            room = math.log(top / bottom) > 0.12 * math.log(high / low)  # for a line of text
            label = {"text": band.name if room else "", "textposition": f"top {side}"}
            tint = {
                "type": "rect",
                "fillcolor": TINTS[tone(band.name)],
                "opacity": 0.11,
                "line": {"width": 0},
            }
            place = {"xref": "x domain", "x0": 0, "x1": 1, "y0": bottom, "y1": top}
            bands.append(tint | place | {"label": label})
    ticks = 1 if high > 50 * low else "D2" if high > 5 * low else "D1"
    y = LOG | {"range": [math.log10(low), math.log10(high)], "dtick": ticks, "showgrid": False}
    return Panel(x_title, "K3 KL, nats per token", curves, x, y, bands)


# ---------------------------------------------------------------- the charts


def charts(result: Result) -> tuple[Chart, ...]:
    """Return every chart that the result has numbers for, in reading order."""
    every = (by_step, by_lag, drifts, histogram, noise, density, tail, position, length, thresholds)
    return tuple(found for make in every if (found := make(result)) is not None)


def by_step(result: Result) -> Chart | None:
    """K3, ESS of raw token ratios and mean reward by training step."""
    steps = result.charts.steps
    k3 = steps.series.get("k3", []) if steps else []
    values = [number.value for number in k3 if number.value is not None]
    if steps is None or len(steps.first) < 2 or not values:
        return None
    title = f"K3 lies between {rounded(min(values))} and {rounded(max(values))} over {len(values)} steps"
    if result.charts.crossings:
        _, bound, step = result.charts.crossings[-1]
        title = f"K3 passes {format_value(bound)} at step {step}"
    x, axis = steps.first, steps_axis(steps.first)
    panels = [k3_panel("training step", [curve(x, k3, "", BLUE)], axis)]
    if ess := steps.series.get("ess_tokens"):
        panels.append(Panel("training step", "ESS of raw ratios", [curve(x, ess, "", TEAL)], axis, SHARE))
    if reward := steps.series.get("reward"):
        panels.append(Panel("training step", "mean reward", [curve(x, reward, "", PURPLE)], axis))
    return chart("by_step", title, *panels)


def by_lag(result: Result) -> Chart | None:
    """K3 against policy lag, a point for each training step: the evidence of stale weights."""
    steps, lag, synced = result.charts.steps, result.charts.lag, in_sync(result)
    if steps is None or not {"policy_lag", "k3"} <= steps.series.keys():
        return None
    rows = zip(steps.first, steps.series["policy_lag"], steps.series["k3"], strict=True)
    known = [(step, at.value, k3) for step, at, k3 in rows if at.value is not None and k3.value]
    if len({at for _, at, _ in known}) < 2:
        return None
    x = [at + 0.3 * (i / len(known) - 0.5) for i, (_, at, _) in enumerate(known)]  # equal lags side by side
    text = [f"step {step}, lag {rounded(at)}: {format_number(k3)}" for step, at, k3 in known]
    points = curve(x, [k3 for _, _, k3 in known], "", BLUE, mode="markers", text=text)
    title = "K3 by policy lag"
    if lag and lag.lag is not None and lag.growth and lag.growth > GROWS:
        title = f"K3 rises {rounded(lag.growth)}-fold at lag {lag.lag}"
    elif synced and synced.value:
        title = f"At lag 0, K3 is {rounded(synced.value)}"
    panel = k3_panel("policy lag, updates; a point for each step", [points], steps_axis(x))
    return chart("by_lag", title, panel)


def drifts(result: Result) -> Chart | None:
    """K1 of each pair of policies, which adds up."""
    colours = {"": BLUE, "drift2.": ORANGE, "total.": GREY}
    numbers = [result.whole.get(f"{pair}k1", Number()) for pair in colours]
    if any(number.value is None for number in numbers):
        return None
    bars = curve([PAIRS[pair].replace(" ", "") for pair in colours], numbers, "", GREY)
    del bars["mode"], bars["line"]
    bars |= {"type": "bar", "width": 0.7, "textposition": "none"}
    bars["marker"] = {"color": [*colours.values()], "opacity": 0.6}
    before, within, _ = (minus(rounded(number.value)) for number in numbers)
    title = f"K1 is {before} before the first update (rollout → old); "
    title += f"updates within the step add {within} (old → current)"
    return chart("drifts", title, Panel("", "K1, nats per token", [bars], LABELS))


def histogram(result: Result) -> Chart | None:
    """The log-ratios of all tokens, and of those at lag 0."""
    if not result.charts.log_ratios:
        return None
    low, high, tokens, synced = zip(*result.charts.log_ratios, strict=True)
    x = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    colours = [ORANGE if at < -FACTOR_2 else BLUE if at > FACTOR_2 else GREY for at in x]
    width = [b - a for a, b in zip(low, high, strict=True)]
    bars: Dict = {"type": "bar", "x": x, "y": [*tokens], "width": width, "marker": {"color": colours}}
    bars |= {"showlegend": False, "hovertemplate": "Δ %{x:.3g}: %{y:,} tokens<extra></extra>"}
    known = [Number(n or None) for n in synced]
    lines = [curve(x, known, "at lag 0", TEAL, mode="lines")] if any(synced) else []
    off, less, more = result.main("f_2").value, result.charts.less, result.charts.more
    title = f"{rounded(off, 'share')} of the tokens differ by more than a factor of 2"
    if off and less is not None and more is not None:
        below, above = rounded(less, "share"), rounded(more, "share")
        title += f": {below} are less likely under the trainer, {above} more"
    y = LOG | {"range": [-0.15, math.log10(max(tokens) or 1) + 0.2]}
    panel = Panel("Δ = log π_train − log π_rollout, nats", "tokens", [bars, *lines], {}, y)
    return chart("histogram", title, panel)


def noise(result: Result) -> Chart | None:
    """Quantiles of |Δ| by the rollout probability of the token, of all tokens and of those at lag 0."""
    rows = [row for row in result.charts.noise if row[2] is not None]
    if len(rows) < 3:
        return None
    low, high, p50, p90, p99, _, lag_0 = zip(*rows, strict=True)
    bins = [f"π_rollout {a:.4g} to {b:.4g}" for a, b in zip(low, high, strict=True)]
    hover = {"customdata": bins, "hovertemplate": "%{customdata}: %{y:.2g} nats"}
    x, traces = [logit((a + b) / 2) for a, b in zip(low, high, strict=True)], list[Dict]()
    lines = (("99%", p99, GREY), ("90%", p90, BLUE), ("median", p50, TEAL), ("90%, lag 0", lag_0, PURPLE))
    for name, y, colour in lines:
        if any(value is not None for value in y):
            traces.append(curve(x, [*map(Number, y)], name, colour, **hover))
    middle = min(rows, key=lambda row: abs(row[1] - 0.5))
    title = f"One in ten tokens of π_rollout from {middle[0]:.2g} to {middle[1]:.2g} is off by "
    title += f"{rounded(middle[3])} nats or more"
    panel = Panel("π_rollout of the token", "quantiles of |Δ|, nats", traces, LOGITS, LOG)
    return chart("noise", title, panel)


def density(result: Result) -> Chart | None:
    """How many tokens have which probability under both policies."""
    found, lost = result.charts.density, result.charts.lost
    if found is None or lost is None:
        return None
    edges, tokens = [logit(p) for p in found[0]], [*zip(*found[1], strict=True)]
    heat = {"type": "heatmap", "x": edges, "y": edges, "hovertemplate": "%{text}<extra></extra>"}
    heat["z"] = [[math.log10(n) if n else None for n in row] for row in tokens]
    heat["text"] = [[counted(n, "token") for n in row] for row in tokens]
    share, of_k3 = rounded(lost.share, "share"), rounded(lost.k3_share, "share")
    title = f"{share} of the tokens are near certain for the rollout but unlikely for the trainer"
    title += f"; they carry {of_k3} of K3" if lost.tokens else ""
    equal: Dict = {"type": "line", "x0": edges[0], "y0": edges[0], "x1": edges[-1], "y1": edges[-1]}
    corner: Dict = {"type": "rect", "layer": "above", "line": {"color": ORANGE, "width": 1.6}}
    corner |= {"x0": logit(0.9), "x1": edges[-1], "y0": edges[0], "y1": logit(0.5)}
    panel = Panel("π_rollout", "π_train", [heat], LOGITS, LOGITS, [equal, corner])
    return chart("density", title, panel)


def tail(result: Result) -> Chart | None:
    """The largest weights of tokens and sequences against their rank, and the fitted Pareto tails."""
    traces, khats = list[Dict](), list[str]()
    for unit, colour in {"tokens": TEAL, "sequences": PURPLE}.items():
        found = result.charts.tails.get(f"{result.prefix}{unit}")
        if found is None or len(found.points) < 5 or found.khat.value is None:
            continue
        ranks, logs, fitted = zip(*found.points, strict=True)
        x = [rank / found.weights for rank in ranks]
        traces.append(curve(x, [*map(Number, logs)], unit, colour, mode="markers"))
        traces.append(curve(x, [*map(Number, fitted)], "", GREY, mode="lines"))
        weight = "too heavy: above" if found.khat.value > found.limit else "light enough: below"
        khats.append(f"{rounded(found.khat.value)} for {unit} ({weight} {found.limit:.2g})")
    if not traces:
        return None
    panel = Panel("share of the weights above", "log weight (lines: fit)", traces, LOG)
    return chart("tail", f"The tail of the weights has a k̂ of {' and of '.join(khats)}", panel)


def position(result: Result) -> Chart | None:
    """K3 along the response: by position, and by turn."""
    places = result.at("position")
    sure = {place.key: place.numbers["k3"] for place in places if place.tokens >= FEW}
    if len(places) < 2 or not sure:
        return None
    line, k3 = curve([*sure], [*sure.values()], "", BLUE), [rounded(number.value) for number in sure.values()]
    panels = [k3_panel("position in the response, tokens", [line], LABELS)]
    turns = {place.key: place.numbers["k3"] for place in result.at("turn") if "k3" in place.numbers}
    if len(turns) > 1:
        line = curve([*turns], [*turns.values()], "", TEAL)
        panels.append(k3_panel("turn of the response", [line], LABELS))
    return chart("position", f"K3 is {k3[0]} where responses begin, and {k3[-1]} at their end", *panels)


def length(result: Result) -> Chart | None:
    """ESS of sequence weights by the tokens that are multiplied into one."""
    found = result.lengths
    if found is None or len(found.curve) < 3:
        return None
    x, ess = [point.tokens for point in found.curve], [point.ess_sequences for point in found.curve]
    title = f"Sequence weights over {count(x[-1])} tokens keep {rounded(ess[-1].value, 'share')} ESS"
    if found.longest is not None:
        title = f"Sequence weights keep less than 10% ESS beyond about {rounded(found.longest)} tokens"
    title += f"; the median response has {found.median}" if found.median else ""
    line = curve(x, ess, "", TEAL)
    panel = Panel("tokens multiplied into one weight", "ESS of sequence weights", [line], LOG, SHARE)
    return chart("length", title, panel)


def thresholds(result: Result) -> Chart | None:
    """What rules on single tokens keep at each threshold."""
    found = result.charts.token_thresholds
    if not found or result.is_bug:
        return None
    bounds, ess, truncated, kept = zip(*found, strict=True)
    lines = {"ESS": (ess, TEAL), "kept": (kept, ORANGE), "truncated": (truncated, GREY)}
    traces = [curve(bounds, [*map(Number, y)], name, colour) for name, (y, colour) in lines.items()]
    usual = [(ess or 0.0, cut) for bound, ess, cut, _ in found if 1.5 <= bound <= 5] or [(0.0, 1.0)]
    least, most = (rounded(end, "share") for end in (min(usual)[0], max(cut for _, cut in usual)))
    title = f"A cap on r from 1.5 to 5 truncates at most {most} of tokens and keeps ESS at {least} or more"
    axis = {"type": "log", "tickvals": [2, 5, 10, 100, 1000]}
    return chart(
        "thresholds", title, Panel("threshold b on r, of TIS or a mask", "share", traces, axis, SHARE)
    )
