"""The charts of a dump, ten at most beside that of places, each with a finding for its title."""

from __future__ import annotations

import math
from collections.abc import Container

from offpol_diag.metrics import PAIRS
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, rounded, say_value
from offpol_diag.report.plot import (
    BLUE,
    GREY,
    LABELS,
    LOG,
    LOGITS,
    ORANGE,
    PURPLE,
    SHARE,
    TEAL,
    Chart,
    Dict,
    Panel,
    chart,
    curve,
    k3_panel,
    level,
    logit,
    placed,
    plain,
    steps_axis,
    tint,
    upright,
)
from offpol_diag.result import Positions, Result, in_sync

FEW = 30
"""Tokens below which a mean is not drawn."""
FACTOR_2, TENTH, NOTABLE = math.log(2), 0.1, 1e-3
"""|Δ| of a factor of 2; ESS below which weights are unusable; share of tokens from which it is said what they
carry of K3."""


def charts(result: Result) -> tuple[Chart, ...]:
    """Return every chart that the result has numbers for, in reading order."""
    made = (by_step, by_lag, drifts, histogram, noise, density, tail, position, length, thresholds, where)
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
    series = steps.series
    k3, reward = series[f"{drift}k3"], series.get("reward", [])
    values, rewards = ([one.value for one in some if one.value is not None] for some in (k3, reward))
    if not values:
        return None
    _, bound, at = next(iter(result.charts.crossings[::-1]), ("", 0.0, None))
    x, axis, marks = steps.first, steps_axis(steps.first), [] if at is None else [upright(at)]
    panels = [k3_panel("training step", [(x, k3, "", BLUE)], marks, axis)]
    if ess := series.get(f"{drift}ess_tokens"):
        traces = curve((x, ess, "", TEAL))
        panels.append(Panel("training step", "ESS of raw ratios", traces, axis, SHARE, marks))
    if rewards:
        panels.append(Panel("training step", "mean reward", curve((x, reward, "", PURPLE)), axis, {}, marks))
    of = f"K3 of {PAIRS[drift]}" if drift else "K3"
    low, high = rounded(min(values)), rounded(max(values))
    title = f"{of} lies between {low} and {high} over {len(values)} steps"
    if at is not None:
        title = f"{of} passes {say_value(bound)} at step {at}"
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
    rows = zip(steps.series["policy_lag"], steps.series["k3"], steps.first, strict=True)
    known = [(lag.value, k3, step) for lag, k3, step in rows if lag.value is not None and k3.value]
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
    found = result.charts.log_ratios
    if not found:
        return None
    x, widths = [(a + b) / 2 for a, b, _, _ in found], [b - a for a, b, _, _ in found]
    counts, synced = [n for *_, n, _ in found], [n for *_, n in found]
    colours = [ORANGE if at < -FACTOR_2 else BLUE if at > FACTOR_2 else GREY for at in x]
    bar = {"type": "bar", "x": x, "y": counts, "width": widths, "marker": {"color": colours}}
    traces = [bar | {"showlegend": False, "hovertemplate": "Δ %{x:.3g}: %{y:,} tokens<extra></extra>"}]
    if any(synced):
        dashed: Dict = {
            "mode": "lines",
            "line": {"color": GREY, "dash": "dot", "shape": "hvh"},
            "hoverinfo": "skip",
        }
        traces += curve((x, plain(n or None for n in synced), "at lag 0", GREY), **dashed)
    off, less, more = result.main("f_2").value, result.charts.less, result.charts.more
    title = "The log-ratio Δ of every token"
    if off is not None:
        many = f"{rounded(off, 'fraction')} of tokens differ" if off else "No token differs"
        title = f"{many} by more than a factor of 2"
    if less and more and off:
        low, high = (rounded(one.share, "share") for one in (less, more))
        title += f": {low} are less likely under the trainer, {high} more"
    axis = LOG | {"range": [-0.15, math.log10(max(counts) or 1) + 0.2]}
    return chart(
        "histogram", title, Panel("Δ = log π_train − log π_rollout, nats", "tokens", traces, {}, axis)
    )


def noise(result: Result) -> Chart | None:
    """Quantiles of |Δ| by the rollout probability of the token."""
    found = result.charts.noise
    if sum(row[2] is not None for row in found) < 3:
        return None
    _, _, median, p90, p99, _, _ = zip(*found, strict=True)
    bins = [(a, b) for a, b, *_ in found]
    x = [logit(math.sqrt((a or b / 2) * (b if b < 1 else (a + 1) / 2))) for a, b in bins]
    where = [f"π_rollout {a:.4g} to {b:.4g}" for a, b in bins]
    synced = [one if tokens >= FEW else None for *_, tokens, one in found]
    traces = curve((x, plain(p99, "nats"), "99th percentile", GREY), where)
    traces += curve((x, plain(p90, "nats"), "90th", BLUE), where)
    traces += curve((x, plain(median, "nats"), "median", TEAL), where)
    if any(one is not None for one in synced):
        dashed: Dict = {"mode": "lines", "line": {"color": BLUE, "dash": "dot"}}
        traces += curve((x, plain(synced, "nats"), "90th at lag 0", BLUE), where, **dashed)
    title = "|Δ| by the rollout probability of the token"
    inner = [i for i, (a, b) in enumerate(bins) if a >= 0.25 and b <= 0.98 and p90[i] is not None]
    if inner:
        a, b, least = bins[inner[0]][0], bins[inner[-1]][1], min(p90[i] or 0.0 for i in inner)
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
    edges, tokens = [logit(p) for p in found[0]], [*zip(*found[1], strict=True)]
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
    found = {over: one for over, one in tails.items() if one and len(one.points) >= 5}
    if not found:
        return None
    traces = list[Dict]()
    for (over, one), colour in zip(found.items(), (TEAL, PURPLE), strict=False):
        ranks, logs, fitted = zip(*one.points, strict=True)
        x, where = [rank / one.weights for rank in ranks], [f"rank {count(rank)}" for rank in ranks]
        traces += curve((x, plain(logs, "nats"), over, colour), where, mode="markers")
        dashed: Dict = {"mode": "lines", "line": {"color": colour, "dash": "dot"}, "hoverinfo": "skip"}
        traces += curve((x, plain(fitted), "", colour), **dashed)
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
    return chart("tail", title, Panel("share of the weights above", "log weight (dots: fit)", traces, axis))


def position(result: Result) -> Chart | None:
    """K3 along the response: by position, before and after the mismatch grew, and by turn."""
    if not result.charts.positions or len(result.charts.positions[0].labels) < 2:
        return None
    every, *halves = result.charts.positions
    parts = [("", every, BLUE)]
    if halves:
        parts = [(_steps(one), one, colour) for one, colour in zip(halves, (GREY, BLUE), strict=True)]
    enough = [min(one.tokens[i] for _, one, _ in parts) >= FEW for i in range(len(every.labels))]
    known = [at for at, sure in enumerate(enough) if sure and parts[-1][1].k3[at].value is not None]
    if not known:
        return None
    labels = every.labels[: known[-1] + 1]
    lines = [
        (
            labels,
            [k3 if sure else Number() for k3, sure in zip(one.k3, enough, strict=True)][: len(labels)],
            name,
            colour,
        )
        for name, one, colour in parts
    ]
    ends = " to ".join(rounded(lines[-1][1][at].value) for at in (known[0], known[-1]))
    title = f"K3 goes along the response from {ends}"
    if halves:
        pairs = [(a.value, b.value) for a, b in zip(halves[0].k3, halves[1].k3, strict=True)]
        times = [b / a for (a, b), sure in zip(pairs, enough, strict=True) if sure and a and b and a > 0]
        if times and min(times) > 1.2:
            growth = " to ".join(rounded(end) for end in (min(times), max(times)))
            step, _ = halves[1].steps or (0, 0)
            title = f"From step {step} on, K3 is {growth} times higher at every position, "
            title += f"and goes along the response from {ends}"
    panels = [k3_panel("position in the response, tokens", lines, x=LABELS)]
    turns = {place.key: place.numbers["k3"] for place in result.at("turn") if "k3" in place.numbers}
    if len(turns) > 1:
        panels.append(k3_panel("turn of the response", [([*turns], [*turns.values()], "", TEAL)], x=LABELS))
    return chart("position", title, *panels)


def _steps(one: Positions) -> str:
    first, last = one.steps or (None, None)
    return f"step {first}" if first == last else f"steps {first}–{last}"


def length(result: Result) -> Chart | None:
    """ESS of sequence weights by the tokens that are multiplied into one."""
    found = result.lengths
    if found is None or len(found.curve) < 3:
        return None
    x, ess = [one.tokens for one in found.curve], [one.ess_sequences for one in found.curve]
    title = f"Sequence weights over {count(x[-1])} tokens keep {rounded(ess[-1].value, 'fraction')} ESS"
    longest = found.longest.value
    if longest is not None and (found.median is None or longest < found.median):
        title = f"Length trap: sequence weights keep less than 10% ESS beyond about {rounded(longest)} tokens"
        title += f"; the median response has {found.median}" if found.median else ""
    shapes = [tint(0, TENTH, "bad")]
    if found.median:
        late, high = found.median**2 > x[0] * x[-1], (ess[-1].value or 0.0) > 0.5
        place = {"xanchor": "right"} if late else {}
        place |= {"textposition": "start", "yanchor": "bottom"} if high else {}
        shapes.append(upright(found.median, "median response", **place))
    up, across, axis = "ESS of sequence weights", "tokens multiplied into one weight", LOG
    traces = curve((x, ess, "", TEAL), [counted(tokens, "token") for tokens in x])
    return chart("length", title, Panel(across, up, traces, axis, SHARE, shapes))


def thresholds(result: Result) -> Chart | None:
    """What rules on single tokens keep at each threshold."""
    found = result.charts.token_thresholds
    if not found or result.is_bug:
        return None
    each, ess, truncated, kept = zip(*found, strict=True)
    where = [f"b = {b:g}" for b in each]
    traces = curve((each, plain(ess, "share"), "ESS of TIS", TEAL), where, mode="lines")
    traces += curve((each, plain(kept, "share"), "kept by a mask", ORANGE), where, mode="lines")
    traces += curve((each, plain(truncated, "share"), "truncated", GREY), where, mode="lines")
    usual = [row for row in found if 1.5 <= row[0] <= 5 and row[1] is not None]
    title = "What token rules keep at each threshold"
    if usual:
        most, least = max(row[2] for row in usual), min(row[1] or 0.0 for row in usual)
        share = f"at most {rounded(most, 'share')} of tokens" if most else "no token"
        title = (
            f"A cap on r from 1.5 to 5 truncates {share} and keeps ESS at {rounded(least, 'share')} or more"
        )
    axis = {"type": "log", "tickvals": [2, 5, 10, 100, 1000]}
    return chart("thresholds", title, Panel("threshold b on r", "share", traces, axis, SHARE))


def where(result: Result) -> Chart | None:
    """K3 on both sides of each cut that tells damaged tokens from clean ones."""
    found = [one for one in result.diagnosis.where if one.outside > 0] if result.diagnosis else []
    if not found:
        return None
    names, ends = [one.words for one in found], [(one.outside, one.inside) for one in found]
    joined: Dict = {"type": "scatter", "mode": "lines", "line": {"color": GREY}, "showlegend": False}
    joined |= {"x": [x for both in ends for x in (*both, None)], "y": [y for y in names for _ in range(3)]}
    traces = [joined | {"hoverinfo": "skip"}]
    for name, colour, x in zip(("elsewhere", "there"), (GREY, ORANGE), zip(*ends, strict=True), strict=True):
        trace = {"mode": "markers+text", "x": [*x], "y": names, "text": [*map(rounded, x)]}
        point = {"type": "scatter", "name": name, "marker": {"color": colour, "size": 11}}
        traces.append(
            trace | point | {"textposition": "top center", "hoverinfo": "skip", "cliponaxis": False}
        )
    low, high = min(map(min, ends)), max(map(max, ends))
    across = LOG | {"range": [math.log10(low) - 0.3, math.log10(high) + 0.3]}
    up = LABELS | {"automargin": True, "autorange": "reversed"}
    made = chart(
        "where", found[0].sentence.rstrip("."), Panel("K3 KL, nats per token", "", traces, across, up)
    )
    made.layout["height"] = 110 + 45 * len(found)
    return made
