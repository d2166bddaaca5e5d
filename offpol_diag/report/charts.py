"""The charts of a report, as data for plotly: each has a finding for its title.

A chart is traces and a layout in plotly's JSON. Its panels lie side by side; the page sets them below each
other on narrow screens, and gives all charts one look, light or dark (`templates/look.json`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, pairwise
from pathlib import Path
from string import Template
from textwrap import wrap
from typing import TYPE_CHECKING, Any, Literal

from offpol_diag.metrics import BANDS, PAIRS, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, minus, rounded, say, say_value
from offpol_diag.result import PositionSteps, Result, Series
from offpol_diag.result.steps import in_sync

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
HEIGHT, TITLE = 300, 22
"""Pixels of a chart, and of a line of its title where it has no page around it."""
FEW, MARKED, REACH, FARTHEST = 30, 20, 4.0, 1e300
"""Tokens below which a mean is not drawn; points up to which a line marks each; factor below the smallest
value at which a log axis ends, as an interval may reach towards 0; values beyond which there is no place."""
FACTOR_2, KHAT, TENTH, NOTABLE = math.log(2), 0.7, 0.1, 1e-3
"""|Δ| of a factor of 2; k̂ above which weights are unreliable; ESS below which they are unusable; share of
tokens from which it is said what they carry of K3."""


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
    hollow: Sequence[bool] = (),
    floor: float = -FARTHEST,
    **more: Any,
) -> list[Dict]:
    """Return a line and its 95% band; with `mode="markers"`, points and their 95% intervals.

    Args:
        points: what is drawn.
        where: what names the points under the pointer, if not x.
        hollow: which points are unreliable; they have no interval.
        floor: where intervals end on a log axis.
        more: what else differs in the trace.
    """
    x, numbers, name, colour = points
    hollow = hollow or [False] * len(x)
    y = [placed(one.value) for one in numbers]
    said = zip(where or map(str, x), numbers, hollow, strict=True)
    trace: Dict = {
        "type": "scatter",
        "mode": "lines+markers" if len(y) <= MARKED else "lines",
        "x": [escaped(at) if isinstance(at, str) else at for at in x],
        "y": y,
        "line": {"color": colour},
        "marker": {"color": colour, "symbol": [f"circle{'-open' * doubt}" for doubt in hollow]},
        "text": [escaped(minus(f"{at}: {say(one)}{', unreliable' * doubt}")) for at, one, doubt in said],
        "hovertemplate": f"%{{text}}<extra>{escaped(name)}</extra>",
    }
    shared = {"name": escaped(name), "legendgroup": escaped(name)}
    ends: list[tuple[Any, float, float, float] | None] = []
    for at, value, one, doubt in zip(trace["x"], y, numbers, hollow, strict=True):
        low, high = one.interval or (0.0, 0.0)
        sure = one.interval is not None and not doubt and value is not None
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


def of_series(one: Series) -> list[Number]:
    """Return the numbers of a series with their unit."""
    return [replace(number, unit=one.unit) for number in one.numbers()]


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
    axis = LOG | {"range": [*map(math.log10, ends)]} | ({} if ends[1] > 50 * ends[0] else {"dtick": "D2"})
    traces = [trace for line in lines for trace in curve(line, floor=ends[0], **more)]
    return Panel(across, "K3 KL, nats per token", traces, x or {}, axis, [*bands, *shapes])


def tint(low: float, high: float, tone_: str) -> Dict:
    """Return a shaded range of y."""
    look = {"type": "rect", "fillcolor": TINTS[tone_], "opacity": 0.11, "line": {"width": 0}}
    return {"xref": "x domain", "x0": 0, "x1": 1, "y0": low, "y1": high, **look}


def upright(x: float, text: str = "", side: Literal["left", "right"] = "right") -> Dict:
    """Return a dashed line at x, with a name beside its top."""
    anchor = {"xanchor": "left" if side == "right" else "right", "yanchor": "top"}
    label = {"text": escaped(text), "textangle": 0, "textposition": "end", **anchor}
    return {"type": "line", "yref": "y domain", "x0": x, "x1": x, "y0": 0, "y1": 1, "label": label}


def level(y: float, text: str = "") -> Dict:
    """Return a dashed line at y, with a name at its end."""
    label = {"text": escaped(text), "textposition": "end", "yanchor": "bottom"}
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


# ---------------------------------------------------------------- the ten charts of a dump


def charts(result: Result) -> tuple[Chart, ...]:
    """Return every chart that the result has numbers for, in reading order."""
    made = (by_step, by_lag, drifts, histogram, noise, density, tail, position, length, thresholds)
    return tuple(one for make in made if (one := make(result)) is not None)


def _main(known: Container[str], metric: str) -> str:
    """Return the prefix of the pair of policies that a chart shows: rollout → old, else the whole."""
    return next((prefix for prefix in ("", "total.") if f"{prefix}{metric}" in known), "")


def by_step(result: Result) -> Chart | None:
    """K3, ESS of raw token ratios and mean reward by training step."""
    steps = result.charts.steps
    drift = _main(steps.series, "k3") if steps else ""
    if steps is None or len(steps.first) < 2 or f"{drift}k3" not in steps.series:
        return None
    series = {name: of_series(one) for name, one in steps.series.items()}
    k3, reward = series[f"{drift}k3"], series.get("reward", [])
    values, rewards = ([one.value for one in some if one.value is not None] for some in (k3, reward))
    if not values:
        return None
    worst = next(iter(result.charts.crossings[::-1]), None)
    x, axis, marks = steps.first, steps_axis(steps.first), [upright(worst.step)] if worst else []
    panels = [k3_panel("training step", [(x, k3, "", BLUE)], marks, axis)]
    if ess := series.get(f"{drift}ess_tokens"):
        hollow = [(one.value or 0) > KHAT for one in series.get(f"{drift}khat_tokens", [])]
        up = f"ESS of raw ratios{' (○ unreliable)' * any(hollow)}"
        panels.append(
            Panel("training step", up, curve((x, ess, "", TEAL), hollow=hollow), axis, SHARE, marks)
        )
    if rewards:
        panels.append(Panel("training step", "mean reward", curve((x, reward, "", PURPLE)), axis, {}, marks))
    of = f"K3 of {PAIRS[drift]}" if drift else "K3"
    low, high = rounded(min(values)), rounded(max(values))
    title = f"{of} lies between {low} and {high} over {len(values)} steps"
    if worst:
        title = f"{of} passes {say_value(worst.bound)} at step {worst.step}"
        if rewards and rewards[-1] < max(rewards) - 0.2 * abs(max(rewards)):
            peak = x[[one.value for one in reward].index(max(rewards))]
            fell = f"the mean reward falls from {rounded(max(rewards))} to {rounded(rewards[-1])}"
            title += f"; from step {peak} to {steps.last[-1]} {fell}"
    elif max(values) > 3 * min(values):
        title = f"{of} goes from {rounded(values[0])} to {rounded(values[-1])} over {len(values)} steps"
    return chart("by_step", title, *panels)


def by_lag(result: Result) -> Chart | None:
    """K3 against policy lag, a point for each training step: the evidence of stale weights."""
    steps, lag = result.charts.steps, result.charts.lag
    if steps is None or not {"policy_lag", "k3"} <= steps.series.keys():
        return None
    rows = zip(steps.series["policy_lag"].values, of_series(steps.series["k3"]), steps.first, strict=True)
    known = [(at, k3, step) for at, k3, step in rows if at is not None and k3.value]
    if len({at for at, _, _ in known}) < 2:
        return None
    x = [at + 0.3 * (place / len(known) - 0.5) for place, (at, _, _) in enumerate(known)]
    where = [f"step {step}, lag {rounded(at)}" for at, _, step in known]
    points, across = (x, [k3 for _, k3, _ in known], "", BLUE), "policy lag, updates; a point for each step"
    title = "K3 by policy lag"
    if "stale" in {one.id for one in (result.diagnosis.causes if result.diagnosis else ())}:
        title = "Stale rollouts"
        if lag and lag.growth and lag.growth > 2 and lag.lag is not None:
            title += f": K3 rises {rounded(lag.growth)}-fold at lag {lag.lag}"
    elif (synced := in_sync(result)) and synced.value:
        title = f"At lag 0, K3 is {rounded(synced.value)}"
    return chart("by_lag", title, k3_panel(across, [points], x=steps_axis(x), mode="markers", where=where))


def drifts(result: Result) -> Chart | None:
    """K1 of each pair of policies, which adds up."""
    colours = {"": BLUE, "drift2.": ORANGE, "total.": GREY}
    found = {prefix: result.whole.get(f"{prefix}k1", Number()) for prefix in colours}
    value = {prefix: one.value for prefix, one in found.items() if one.value is not None}
    if len(value) < 2:
        return None
    traces = list[Dict]()
    for prefix, k1 in value.items():
        colour, place = colours[prefix], [PAIRS[prefix].replace(" ", "")]
        bar = {"type": "bar", "x": place, "y": [placed(k1)], "width": 0.7, "marker": {"color": colour}}
        traces.append(bar | {"opacity": 0.5, "hoverinfo": "skip", "showlegend": False})
        traces += curve((place, [found[prefix]], "", colour), mode="markers")
    title = "The gap between each pair of policies: K1 adds up, K3 does not"
    if len(value) == len(colours) and value["total."] and 0 <= value[""] / value["total."] <= 1:
        before, within = (rounded(value[one] / value["total."], "share") for one in ("", "drift2."))
        title = f"{before} of the gap is there before the first update (rollout → old); "
        title += f"updates within the step add {within} (old → current)"
    return chart("drifts", title, Panel("", "K1, nats per token", traces, LABELS))


def histogram(result: Result) -> Chart | None:
    """The log-ratios of all tokens, and of those at lag 0."""
    drift = _main(result.histograms, "log_ratio")
    found = result.histograms.get(f"{drift}log_ratio")
    if found is None or not found.counts:
        return None
    x = [(a + b) / 2 for a, b in pairwise(found.edges)]
    widths = [b - a for a, b in pairwise(found.edges)]
    colours = [ORANGE if at < -FACTOR_2 else BLUE if at > FACTOR_2 else GREY for at in x]
    bar = {"type": "bar", "x": x, "y": found.counts, "width": widths, "marker": {"color": colours}}
    traces = [bar | {"showlegend": False, "hovertemplate": "Δ %{x:.3g}: %{y:,} tokens<extra></extra>"}]
    if any(found.in_sync):
        dashed: Dict = {
            "mode": "lines",
            "line": {"color": GREY, "dash": "dot", "shape": "hvh"},
            "hoverinfo": "skip",
        }
        traces += curve((x, plain(n or None for n in found.in_sync), "at lag 0", GREY), **dashed)
    off, less, more = result.whole.get(f"{drift}f_2", Number()).value, result.charts.less, result.charts.more
    title = "The log-ratio Δ of every token"
    if off is not None:
        many = f"{rounded(off, 'fraction')} of tokens differ" if off else "No token differs"
        title = f"{many} by more than a factor of 2"
    if less and more and off:
        low, high = (rounded(one.share, "share") for one in (less, more))
        title += f": {low} are less likely under the trainer, {high} more"
    axis = {"type": "log", "range": [-0.15, math.log10(max(found.counts) or 1) + 0.2], "dtick": 1}
    return chart(
        "histogram", title, Panel("Δ = log π_train − log π_rollout, nats", "tokens", traces, {}, axis)
    )


def noise(result: Result) -> Chart | None:
    """Quantiles of |Δ| by the rollout probability of the token."""
    found = result.charts.noise
    if found is None or sum(one is not None for one in found.median) < 3:
        return None
    bins = [*pairwise(found.edges)]
    x = [logit(math.sqrt((a or b / 2) * (b if b < 1 else (a + 1) / 2))) for a, b in bins]
    where = [f"π_rollout {a:.4g} to {b:.4g}" for a, b in bins]
    pairs = zip(found.in_sync_p90, found.in_sync_tokens, strict=False)
    synced = [one if tokens >= FEW else None for one, tokens in pairs] or [None] * len(x)
    traces = curve((x, plain(found.p99, "nats"), "99th percentile", GREY), where)
    traces += curve((x, plain(found.p90, "nats"), "90th", BLUE), where)
    traces += curve((x, plain(found.median, "nats"), "median", TEAL), where)
    if any(one is not None for one in synced):
        dashed: Dict = {"mode": "lines", "line": {"color": BLUE, "dash": "dot"}}
        traces += curve((x, plain(synced, "nats"), "90th at lag 0", BLUE), where, **dashed)
    title = "|Δ| by the rollout probability of the token"
    inner = [i for i, (a, b) in enumerate(bins) if a >= 0.25 and b <= 0.98 and found.p90[i] is not None]
    if inner:
        a, b, least = bins[inner[0]][0], bins[inner[-1]][1], min(found.p90[i] or 0.0 for i in inner)
        title = f"Between π_rollout = {rounded(a)} and {rounded(b)} one token in ten is off by "
        title += f"{rounded(least)} nats or more"
        alone = [one for i in inner if (one := synced[i]) is not None]
        if alone and max(alone) < least:
            title += f"; the engine alone accounts for at most {rounded(max(alone))}"
    axis, factor = LOG, [level(FACTOR_2, "a factor of 2")]
    return chart("noise", title, Panel("π_rollout of the token", "|Δ|, nats", traces, LOGITS, axis, factor))


def density(result: Result) -> Chart | None:
    """How many tokens have which probability under both policies."""
    found, lost = result.charts.density, result.charts.lost
    if found is None:
        return None
    edges, tokens = [logit(p) for p in found.edges], [*zip(*found.counts, strict=True)]
    heat = {"type": "heatmap", "x": edges, "y": edges, "hovertemplate": "%{text}<extra></extra>"}
    heat["z"] = [[math.log10(n) if n else None for n in row] for row in tokens]
    heat["text"] = [[counted(n, "token") for n in row] for row in tokens]
    shapes: list[Dict] = [{"type": "line", "x0": edges[0], "y0": edges[0], "x1": edges[-1], "y1": edges[-1]}]
    title = "Both probabilities of every token"
    if lost:
        some = f"{rounded(lost.share, 'share')} of tokens are" if lost.tokens else "No token is"
        title = f"{some} near certain for the rollout but unlikely for the trainer"
        if lost.k3_share is not None and lost.share > NOTABLE:
            title += f"; they carry {rounded(lost.k3_share, 'share')} of K3"
        box = {"x0": logit(0.9), "x1": edges[-1], "y0": edges[0], "y1": logit(0.5)}
        shapes.append({"type": "rect", **box, "layer": "above", "line": {"color": ORANGE, "width": 1.6}})
    return chart("density", title, Panel("π_rollout", "π_train", [heat], LOGITS, LOGITS, shapes))


def tail(result: Result) -> Chart | None:
    """The largest weights of tokens and sequences against their rank, and the fitted Pareto tails."""
    drift = _main(result.charts.tails, "tokens")
    tails = {over: result.charts.tails.get(f"{drift}{over}") for over in ("tokens", "sequences")}
    found = {over: one for over, one in tails.items() if one and len(one.rank) >= 5}
    if not found:
        return None
    traces = list[Dict]()
    for (over, one), colour in zip(found.items(), (TEAL, PURPLE), strict=False):
        x, where = [rank / one.weights for rank in one.rank], [f"rank {count(rank)}" for rank in one.rank]
        traces += curve((x, plain(one.log_weight, "nats"), over, colour), where, mode="markers")
        dashed: Dict = {"mode": "lines", "line": {"color": colour, "dash": "dot"}, "hoverinfo": "skip"}
        traces += curve((x, plain(one.log_fitted), "", colour), **dashed)
    heavy = [over for over, one in found.items() if (one.khat.value or 0) > one.limit]
    whose, weight = (f" of {' and '.join(heavy)}", "too heavy") if heavy else ("", "light enough")
    khats = [
        f"{rounded(one.khat.value)} of {over}" for over, one in found.items() if one.khat.value is not None
    ]
    title = (
        f"The tail of the weights{whose}{f' ({PAIRS[drift]})' if drift else ''} is {weight} for their means "
    )
    title += f"to be trusted: k̂ is {', '.join(khats)}"
    axis = LOG
    return chart(
        "tail", title, Panel("share of the weights above", "log weight, nats (dotted: fit)", traces, axis)
    )


def position(result: Result) -> Chart | None:
    """K3 along the response: by position, before and after the mismatch grew, and by turn."""
    found = result.charts.positions
    if found is None or len(found.labels) < 2:
        return None
    parts = [("", found.every, BLUE)]
    if found.early and found.late:
        parts = [(_steps(one), one, colour) for one, colour in ((found.early, GREY), (found.late, BLUE))]
    enough = [min(one.tokens[i] for _, one, _ in parts) >= FEW for i in range(len(found.labels))]
    known = [at for at, sure in enumerate(enough) if sure and parts[-1][1].k3.values[at] is not None]
    if not known:
        return None
    labels = found.labels[: known[-1] + 1]
    lines = [
        (
            labels,
            [k3 if sure else Number() for k3, sure in zip(of_series(one.k3), enough, strict=True)][
                : len(labels)
            ],
            name,
            colour,
        )
        for name, one, colour in parts
    ]
    ends = " to ".join(rounded(lines[-1][1][at].value) for at in (known[0], known[-1]))
    title = f"K3 goes along the response from {ends}"
    if found.early and found.late:
        pairs = zip(found.early.k3.values, found.late.k3.values, enough, strict=True)
        times = [b / a for a, b, sure in pairs if sure and a and b and a > 0]
        if times and min(times) > 1.2:
            growth = " to ".join(rounded(end) for end in (min(times), max(times)))
            title = f"From step {found.late.first_step} on, K3 is {growth} times higher at every position, "
            title += f"and goes along the response from {ends}"
    panels = [k3_panel("position in the response, tokens", lines, x=LABELS)]
    turns = {place.key: place.numbers["k3"] for place in result.at("turn") if "k3" in place.numbers}
    if len(turns) > 1:
        panels.append(k3_panel("turn of the response", [([*turns], [*turns.values()], "", TEAL)], x=LABELS))
    return chart("position", title, *panels)


def _steps(one: PositionSteps) -> str:
    last = "" if one.first_step == one.last_step else f"–{one.last_step}"
    return f"step{'s' * bool(last)} {one.first_step}{last}"


def length(result: Result) -> Chart | None:
    """ESS of sequence weights by the tokens that are multiplied into one."""
    found = result.lengths
    if found is None or len(found.curve) < 3:
        return None
    x, ess = [one.tokens for one in found.curve], [one.ess_sequences for one in found.curve]
    hollow = [bool(one.khat and (one.khat.value or 0) > KHAT) for one in found.curve]
    title = f"Sequence weights over {count(x[-1])} tokens keep {rounded(ess[-1].value, 'fraction')} ESS"
    longest = found.longest.value
    if longest is not None and (found.median is None or longest < found.median):
        title = f"Length trap: sequence weights keep less than 10% ESS beyond about {rounded(longest)} tokens"
        title += f"; the median response has {found.median}" if found.median else ""
    shapes = [tint(0, TENTH, "bad")]
    if found.median:
        side: Literal["left", "right"] = "left" if found.median**2 > x[0] * x[-1] else "right"
        shapes.append(upright(found.median, "median response", side))
    up, axis = f"ESS of sequence weights{' (○ unreliable)' * any(hollow)}", LOG
    traces = curve((x, ess, "", TEAL), [counted(tokens, "token") for tokens in x], hollow)
    return chart("length", title, Panel("tokens multiplied into one weight", up, traces, axis, SHARE, shapes))


def thresholds(result: Result) -> Chart | None:
    """What rules on single tokens keep at each threshold."""
    found = result.charts.token_thresholds
    if found is None or not found.b or result.is_bug:
        return None
    where = [f"b = {b:g}" for b in found.b]
    traces = curve((found.b, plain(found.ess_tokens, "share"), "ESS of TIS", TEAL), where, mode="lines")
    traces += curve((found.b, plain(found.kept, "share"), "kept by a mask", ORANGE), where, mode="lines")
    traces += curve((found.b, plain(found.truncated, "share"), "truncated", GREY), where, mode="lines")
    usual = [i for i, b in enumerate(found.b) if 1.5 <= b <= 5 and found.ess_tokens[i] is not None]
    title = "What token rules keep at each threshold"
    if usual:
        most, least = max(found.truncated[i] for i in usual), min(found.ess_tokens[i] or 0 for i in usual)
        share = f"at most {rounded(most, 'share')} of tokens" if most else "no token"
        title = (
            f"A cap on r from 1.5 to 5 truncates {share} and keeps ESS at {rounded(least, 'share')} or more"
        )
    axis = {"type": "log", "tickvals": [2, 5, 10, 100, 1000]}
    return chart("thresholds", title, Panel("threshold b on r", "share", traces, axis, SHARE))
