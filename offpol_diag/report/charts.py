"""The charts of a dump, ten at most, each with a finding for its title."""

from __future__ import annotations

import math

from offpol_diag.metrics import PAIRS
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, format_value, rounded
from offpol_diag.report import plot
from offpol_diag.report.plot import BLUE, GREY, ORANGE, PURPLE, TEAL, Chart, Dict, Panel, chart, curve, plain
from offpol_diag.result import Result, in_sync

FEW = 30
"""Tokens below which a mean is not drawn."""
FACTOR_2, TENTH, NOTABLE = math.log(2), 0.1, 1e-3
"""|Δ| of a factor of 2; ESS below which weights are unusable; share of tokens from which it is said what they
carry of K3."""


def charts(result: Result) -> tuple[Chart, ...]:
    """Return every chart that the result has numbers for, in reading order."""
    made = (by_step, by_lag, drifts, histogram, noise, density, tail, position, length, thresholds)
    return tuple(one for make in made if (one := make(result)) is not None)


def by_step(result: Result) -> Chart | None:
    """K3, ESS of raw token ratios and mean reward by training step."""
    steps, series = result.charts.steps, result.charts.steps.series if result.charts.steps else {}
    pair = next((one for one in ("", "total.") if f"{one}k3" in series), "")
    k3, ess, reward = (series.get(name, []) for name in (f"{pair}k3", f"{pair}ess_tokens", "reward"))
    values = [one.value for one in k3 if one.value is not None]
    if steps is None or len(steps.first) < 2 or not values:
        return None
    _, bound, at = next(iter(result.charts.crossings[::-1]), ("", 0.0, None))
    x, axis = steps.first, plot.steps_axis(steps.first)
    marks = [] if at is None else [plot.upright(at)]
    panels = [plot.k3_panel("training step", [(x, k3, "", BLUE)], marks, axis)]
    for numbers, up, colour, y in (
        (ess, "ESS of raw ratios", TEAL, plot.SHARE),
        (reward, "mean reward", PURPLE, {}),
    ):
        if any(one.value is not None for one in numbers):
            panels.append(Panel("training step", up, curve((x, numbers, "", colour)), axis, y, marks))
    title, low, high = f"K3 of {PAIRS[pair]}" if pair else "K3", min(values), max(values)
    if at is not None:
        title += f" passes {format_value(bound)} at step {at}"
    elif high > 3 * low:
        title += f" goes from {rounded(values[0])} to {rounded(values[-1])} over {len(values)} steps"
    else:
        title += f" lies between {rounded(low)} and {rounded(high)} over {len(values)} steps"
    return chart("by_step", title, *panels)


def by_lag(result: Result) -> Chart | None:
    """K3 against policy lag, a point for each training step: the evidence of stale weights."""
    steps, lag, synced = result.charts.steps, result.charts.lag, in_sync(result)
    if steps is None or not {"policy_lag", "k3"} <= steps.series.keys():
        return None
    rows = zip(steps.series["policy_lag"], steps.series["k3"], steps.first, strict=True)
    known = [(lag.value, k3, step) for lag, k3, step in rows if lag.value is not None and k3.value]
    if len({at for at, _, _ in known}) < 2:
        return None
    x = [at + 0.3 * (place / len(known) - 0.5) for place, (at, _, _) in enumerate(known)]
    names = [f"step {step}, lag {rounded(at)}" for at, _, step in known]
    points, across = (x, [k3 for _, k3, _ in known], "", BLUE), "policy lag, updates; a point for each step"
    title = "K3 by policy lag"
    if result.diagnosis and any(one.id == "stale" for one in result.diagnosis.causes):
        title = "Stale rollouts"
        if lag and lag.growth and lag.growth > 2 and lag.lag is not None:
            title += f": K3 rises {rounded(lag.growth)}-fold at lag {lag.lag}"
    elif synced and synced.value:
        title = f"At lag 0, K3 is {rounded(synced.value)}"
    panel = plot.k3_panel(across, [points], x=plot.steps_axis(x), mode="markers", where=names)
    return chart("by_lag", title, panel)


def drifts(result: Result) -> Chart | None:
    """K1 of each pair of policies, which adds up."""
    traces, value = list[Dict](), dict[str, float]()
    for pair, colour in {"": BLUE, "drift2.": ORANGE, "total.": GREY}.items():
        k1, name = result.whole.get(f"{pair}k1", Number()), PAIRS[pair].replace(" ", "")
        if k1.value is not None:
            value[pair], points = k1.value, curve(([name], [k1], "", colour), mode="markers")
            bar = {"type": "bar", "x": [name], "y": points[0]["y"], "marker": {"color": colour}, "width": 0.7}
            traces += [bar | {"opacity": 0.5, "hoverinfo": "skip", "showlegend": False}, *points]
    if len(value) < 2:
        return None
    title = "The gap between each pair of policies: K1 adds up, K3 does not"
    if len(value) == len(PAIRS) and value["total."] and 0 <= value[""] / value["total."] <= 1:
        before, within = (rounded(value[one] / value["total."], "share") for one in ("", "drift2."))
        title = f"{before} of the gap is there before the first update (rollout → old); "
        title += f"updates within the step add {within} (old → current)"
    return chart("drifts", title, Panel("", "K1, nats per token", traces, plot.LABELS))


def histogram(result: Result) -> Chart | None:
    """The log-ratios of all tokens, and of those at lag 0."""
    if not result.charts.log_ratios:
        return None
    low, high, tokens, synced = zip(*result.charts.log_ratios, strict=True)
    x = [(a + b) / 2 for a, b in zip(low, high, strict=True)]
    colours = [ORANGE if at < -FACTOR_2 else BLUE if at > FACTOR_2 else GREY for at in x]
    bar = {"type": "bar", "x": x, "y": [*tokens], "marker": {"color": colours}, "showlegend": False}
    bar |= {"width": [b - a for a, b in zip(low, high, strict=True)]}
    traces = [bar | {"hovertemplate": "Δ %{x:.3g}: %{y:,} tokens<extra></extra>"}]
    if any(synced):
        points = (x, plain(n or None for n in synced), "at lag 0", GREY)
        traces += curve(points, mode="lines", line={"color": GREY, "dash": "dot", "shape": "hvh"})
    off, less, more = result.main("f_2").value, result.charts.less, result.charts.more
    many = f"{rounded(off, 'fraction')} of tokens differ" if off else "No token differs"
    title = f"{many} by more than a factor of 2"
    if off and less is not None and more is not None:
        below, above = rounded(less, "share"), rounded(more, "share")
        title += f": {below} are less likely under the trainer, {above} more"
    up = plot.LOG | {"range": [-0.15, math.log10(max(tokens) or 1) + 0.2]}
    panel = Panel("Δ = log π_train − log π_rollout, nats", "tokens", traces, {}, up)
    return chart("histogram", title, panel)


def noise(result: Result) -> Chart | None:
    """Quantiles of |Δ| by the rollout probability of the token."""
    if sum(row[2] is not None for row in result.charts.noise) < 3:
        return None
    low, high, median, p90, p99, tokens, p90_synced = zip(*result.charts.noise, strict=True)
    bins = [*zip(low, high, strict=True)]
    x = [plot.logit(math.sqrt((a or b / 2) * (b if b < 1 else (a + 1) / 2))) for a, b in bins]
    names = [f"π_rollout {a:.4g} to {b:.4g}" for a, b in bins]
    synced = [one if many >= FEW else None for many, one in zip(tokens, p90_synced, strict=True)]
    traces = curve((x, plain(p99, "nats"), "99th percentile", GREY), names)
    traces += curve((x, plain(p90, "nats"), "90th", BLUE), names)
    traces += curve((x, plain(median, "nats"), "median", TEAL), names)
    if any(one is not None for one in synced):
        points = (x, plain(synced, "nats"), "90th at lag 0", BLUE)
        traces += curve(points, names, mode="lines", line={"color": BLUE, "dash": "dot"})
    title = "|Δ| by the rollout probability of the token"
    if inner := [i for i, (a, b) in enumerate(bins) if a >= 0.25 and b <= 0.98 and p90[i] is not None]:
        ends = f"{rounded(low[inner[0]])} and {rounded(high[inner[-1]])}"
        least = rounded(min(p90[i] for i in inner))
        title = f"Between π_rollout = {ends} one token in ten is off by {least} nats or more"
    level: Dict = {"type": "line", "xref": "x domain", "x0": 0, "x1": 1, "y0": FACTOR_2, "y1": FACTOR_2}
    level["label"] = {"text": "a factor of 2", "textposition": "end", "yanchor": "top"}
    panel = Panel("π_rollout of the token", "|Δ|, nats", traces, plot.LOGITS, plot.LOG, [level])
    return chart("noise", title, panel)


def density(result: Result) -> Chart | None:
    """How many tokens have which probability under both policies."""
    found, lost = result.charts.density, result.charts.lost
    if found is None:
        return None
    edges, tokens = [plot.logit(p) for p in found[0]], [*zip(*found[1], strict=True)]
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
        corner = {"x0": plot.logit(0.9), "x1": edges[-1], "y0": edges[0], "y1": plot.logit(0.5)}
        shapes.append({"type": "rect", **corner, "layer": "above", "line": {"color": ORANGE, "width": 1.6}})
    return chart("density", title, Panel("π_rollout", "π_train", [heat], plot.LOGITS, plot.LOGITS, shapes))


def tail(result: Result) -> Chart | None:
    """The largest weights of tokens and sequences against their rank, and the fitted Pareto tails."""
    tails = result.charts.tails
    pair = next((one for one in ("", "total.") if f"{one}tokens" in tails), "")
    traces, heavy, khats = list[Dict](), list[str](), list[str]()
    for over, colour in {"tokens": TEAL, "sequences": PURPLE}.items():
        one = tails.get(f"{pair}{over}")
        if one is None or len(one.points) < 5:
            continue
        ranks, logs, fitted = zip(*one.points, strict=True)
        x, names = [rank / one.weights for rank in ranks], [f"rank {count(rank)}" for rank in ranks]
        traces += curve((x, plain(logs, "nats"), over, colour), names, mode="markers")
        traces += curve((x, plain(fitted), "", colour), mode="lines", line={"color": colour, "dash": "dot"})
        if one.khat.value is not None:
            khats.append(f"{rounded(one.khat.value)} of {over}")
            heavy += [over] if one.khat.value > one.limit else []
    if not traces:
        return None
    whose, weight = (f" of {' and '.join(heavy)}", "too heavy") if heavy else ("", "light enough")
    title = f"The tail of the weights{whose}{f' ({PAIRS[pair]})' if pair else ''} is {weight} "
    title += f"for their means to be trusted: k̂ is {', '.join(khats)}"
    panel = Panel("share of the weights above", "log weight (dots: fit)", traces, plot.LOG)
    return chart("tail", title, panel)


def position(result: Result) -> Chart | None:
    """K3 along the response: by position, and by turn."""
    places = result.at("position")
    sure = {place.key: place.numbers["k3"] for place in places if place.tokens >= FEW}
    if len(places) < 2 or not sure:
        return None
    k3 = [*sure.values()]
    title = f"K3 is {rounded(k3[0].value)} where responses begin, and {rounded(k3[-1].value)} at their end"
    line: plot.Points = ([*sure], k3, "", BLUE)
    panels = [plot.k3_panel("position in the response, tokens", [line], x=plot.LABELS)]
    turns = {place.key: place.numbers["k3"] for place in result.at("turn") if "k3" in place.numbers}
    if len(turns) > 1:
        points = ([*turns], [*turns.values()], "", TEAL)
        panels.append(plot.k3_panel("turn of the response", [points], x=plot.LABELS))
    return chart("position", title, *panels)


def length(result: Result) -> Chart | None:
    """ESS of sequence weights by the tokens that are multiplied into one."""
    found = result.lengths
    if found is None or len(found.curve) < 3:
        return None
    x, ess = [one.tokens for one in found.curve], [one.ess_sequences for one in found.curve]
    title = f"Sequence weights over {count(x[-1])} tokens keep {rounded(ess[-1].value, 'fraction')} ESS"
    longest, shapes = found.longest, [plot.tint(0, TENTH, "bad")]
    if longest is not None and (found.median is None or longest < found.median):
        title = f"Length trap: sequence weights keep less than 10% ESS beyond about {rounded(longest)} tokens"
        title += f"; the median response has {found.median}" if found.median else ""
    if found.median:
        high, late = (ess[-1].value or 0.0) > 0.5, found.median**2 > x[0] * x[-1]
        place = {"textposition": "start", "yanchor": "bottom"} if high else {}  # away from the line
        place["xanchor"] = "right" if late else "left"
        shapes.append(plot.upright(found.median, "median response", **place))
    traces = curve((x, ess, "", TEAL), [counted(one, "token") for one in x])
    across, up = "tokens multiplied into one weight", "ESS of sequence weights"
    return chart("length", title, Panel(across, up, traces, plot.LOG, plot.SHARE, shapes))


def thresholds(result: Result) -> Chart | None:
    """What rules on single tokens keep at each threshold."""
    found = result.charts.token_thresholds
    if not found or result.is_bug:
        return None
    each, ess, truncated, kept = zip(*found, strict=True)
    names = [f"b = {b:g}" for b in each]
    traces = curve((each, plain(ess, "share"), "ESS of TIS", TEAL), names, mode="lines")
    traces += curve((each, plain(kept, "share"), "kept by a mask", ORANGE), names, mode="lines")
    traces += curve((each, plain(truncated, "share"), "truncated", GREY), names, mode="lines")
    title = "What token rules keep at each threshold"
    if usual := [row for row in found if 1.5 <= row[0] <= 5 and row[1] is not None]:
        most, least = max(row[2] for row in usual), rounded(min(row[1] or 0.0 for row in usual), "share")
        share = f"at most {rounded(most, 'share')} of tokens" if most else "no token"
        title = f"A cap on r from 1.5 to 5 truncates {share} and keeps ESS at {least} or more"
    axis = {"type": "log", "tickvals": [2, 5, 10, 100, 1000]}
    return chart("thresholds", title, Panel("threshold b on r", "share", traces, axis, plot.SHARE))
