"""The pictures of an analysis: each with a finding for a title, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

from offpol_diag.metrics import BANDS, PAIRS, tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, rounded, say, say_value
from offpol_diag.report.picture import Colour, Heat, Layer, Panel, Picture, Tint, at_places
from offpol_diag.result import Histogram, PositionSteps, Result, Series
from offpol_diag.result.steps import in_sync
from offpol_diag.table import Cell, Table

OVER, DRIFT, ALONG, COSTS = (
    "Over training",
    "Which drift, which tokens",
    "Along the response",
    "What a threshold costs",
)
COLOURS: Mapping[str, Colour] = {"": "blue", "drift2.": "orange", "total.": "slate"}
"""Prefix of a pair of policies → its colour."""
TENTH, FEW, FACTOR_2 = 0.1, 30, 0.6931
"""ESS below which sequence weights are called unusable; tokens below which a mean is not drawn; log 2."""
PREDICTABLE = ("policy_lag", "token_lag", "length", "rollout_probability", "advantage_sign")
"""Axes along which K3 differs in any dump, so that their charts are folded."""


def by_place(summary: Result) -> Iterator[Table]:
    """Yield a table of all numbers for each axis."""
    for axis, found in summary.axes.items():
        places = summary.at(axis)
        names = dict.fromkeys(name for place in places for name in place.numbers)
        rows: list[tuple[Cell, ...]] = [
            (place.key, place.tokens, place.sequences, *(place.numbers.get(name, Number()) for name in names))
            for place in places
        ]
        more = (f"{count(found.left_out)} more places are not listed.",) if found.left_out else ()
        header = (found.title, "tokens", "sequences", *names)
        yield Table(f"by-{axis}", f"All numbers by {found.title}", header, rows, more, shown="page")


def pictures(summary: Result) -> tuple[Picture, ...]:
    """Return every picture that the result has numbers for."""
    made = (make(summary) for make in PICTURES)
    return (*(one for one in made if one is not None), *_groups(summary), *_other_histograms(summary))


def _main(known: Container[str], metric: str) -> str:
    """Return the prefix of the pair of policies that a chart shows first: rollout → old, else the whole."""
    return next((prefix for prefix in ("", "total.") if f"{prefix}{metric}" in known), "")


def _tints(metric: str, named: bool = True) -> tuple[Tint, ...]:
    """Return the tints of all bands of a metric."""
    return tuple(Tint(one.low, one.high, tone(one.name), one.name if named else "") for one in BANDS[metric])


def _k3_panel(
    summary: Result, x_title: str, layers: Iterable[Layer], named: bool = False, **more: Any
) -> Panel:
    """Return a panel of K3 on a log scale, tinted by its bands."""
    title, tinted = "K3 KL, nats per token (log)", _tints("k3", named)
    return Panel(x_title, title, tuple(layers), y_scale="log", tints=tinted, **more)


def _curve(name: str, x: Sequence[float], one: Series, colour: Colour, **more: Any) -> Layer:
    return Layer(name, x, one.values, colour, low=one.low, high=one.high, **more)


def _known(values: Iterable[float | None]) -> list[float]:
    return [one for one in values if one is not None]


# ---------------------------------------------------------------- over training


def _by_step(summary: Result) -> Picture | None:
    steps = summary.charts.steps
    if steps is None or len(steps.first) < 2:
        return None
    drift = _main(steps.series, "k3")
    if f"{drift}k3" not in steps.series:
        return None
    x, k3 = steps.first, steps.series[f"{drift}k3"]
    khat, ess, ratio = (
        steps.series.get(drift + name) for name in ("khat_tokens", "ess_tokens", "mean_ratio")
    )
    reward = steps.series.get("reward")
    hollow = [(one or 0) > 0.7 for one in khat.values] if khat else []
    worst = next(iter(summary.charts.crossings[::-1]), None)
    uprights = ((float(worst.step), ""),) if worst else ()
    by_step = partial(Panel, "training step", uprights=uprights)
    layer = _curve("", x, k3, "blue")
    panels = [_k3_panel(summary, "training step", (layer,), named=True, uprights=uprights)]
    if ess:
        title = "ESS of raw token ratios" + (" (hollow: k̂ > 0.7)" if any(hollow) else "")
        layer = _curve("", x, ess, "teal", hollow=hollow)
        bad = [one for one in _tints("ess_tokens") if one.tone != "good"]
        panels.append(by_step(title, (layer,), percent=True, y_range=(0, 1.04), tints=bad))
    elif k1 := steps.series.get(f"{drift}k1"):
        panels.append(by_step("K1, mean of −Δ, nats per token", (_curve("", x, k1, "teal"),)))
    rewards = _known(reward.values) if reward else []
    if reward and rewards:
        panels.append(by_step("mean reward", (_curve("", x, reward, "purple"),)))
    elif ratio:
        layer = _curve("", x, ratio, "purple", hollow=hollow)
        panels.append(by_step("E[r], mean ratio", (layer,), levels=((1.0, ""),)))
    values = _known(k3.values)
    if not values:
        return None
    of = f"K3 of {PAIRS[drift]}" if drift else "K3"
    if worst:
        title = f"{of} passes {say_value(worst.bound)} at step {worst.step}"
        if reward and rewards and rewards[-1] < max(rewards) - 0.2 * abs(max(rewards)):
            peak = steps.first[reward.values.index(max(rewards))]
            fell = f"the mean reward falls from {rounded(max(rewards))} to {rounded(rewards[-1])}"
            title += f"; from step {peak} to {steps.last[-1]} {fell}"
    elif max(values) > 3 * min(values):
        title = f"{of} goes from {rounded(values[0])} to {rounded(values[-1])} over {len(values)} steps"
    else:
        title = (
            f"{of} lies between {rounded(min(values))} and {rounded(max(values))} over {len(values)} steps"
        )
    mark = f" Dashed: the step at which K3 becomes {worst.band}." if worst else ""
    sub = f"Means of each training step, with 95% intervals.{mark}"
    return Picture("by-step", OVER, title, sub, panels)


def cause(summary: Result) -> Picture | None:
    """Return K3 against policy lag, a point for each step: the evidence of the cause."""
    steps, lag = summary.charts.steps, summary.charts.lag
    lags = steps.series.get("policy_lag") if steps else None
    if steps is None or lags is None or len(set(_known(lags.values))) < 2:
        return None
    k3 = steps.series.get("k3")
    if k3 is None:
        return None
    rows = [i for i, (a, b) in enumerate(zip(lags.values, k3.values, strict=True)) if a is not None and b]
    x = [(lags.values[i] or 0) + 0.3 * (place / len(rows) - 0.5) for place, i in enumerate(rows)]
    y, low, high = ([some[i] for i in rows] if some else () for some in (k3.values, k3.low, k3.high))
    layer = Layer("", x, y, "blue", "points", low, high)
    panel = _k3_panel(summary, "policy lag, updates behind", (layer,), whole=True)
    named = {one.id for one in summary.diagnosis.causes} if summary.diagnosis else set()
    title = "Stale rollouts" if "stale" in named else "K3 by policy lag"
    if "stale" in named and lag and lag.growth and lag.growth > 2 and lag.lag is not None:
        title += f": K3 rises {rounded(lag.growth)}-fold at lag {lag.lag}"
    elif (synced := in_sync(summary)) and synced.value:
        title = f"At lag 0, K3 is {rounded(synced.value)}"
    return Picture("by-lag", "", title, "One point per training step, in order within each lag.", (panel,))


# ---------------------------------------------------------------- which drift, which tokens


def _drifts(summary: Result) -> Picture | None:
    found = {prefix: summary.whole.get(f"{prefix}k1", Number()) for prefix in COLOURS}
    known = [(PAIRS[prefix], one, COLOURS[prefix]) for prefix, one in found.items() if one.value is not None]
    if len(known) < 2:
        return None
    bars = [
        Layer(title, (place,), (one.value,), colour, "bars", width=0.8)
        for place, (title, one, colour) in enumerate(known)
    ]
    ends = [at_places("", [one], "grey", "points", place) for place, (_, one, _) in enumerate(known)]
    names = [title.replace(" ", "") for title, _, _ in known]
    panels = [Panel("", "K1, mean of −Δ, nats per token", (*bars, *ends), names=names)]
    steps = summary.charts.steps
    if steps and len(steps.first) > 1 and "drift2.k1" in steps.series:
        x = range(len(steps.first))
        first, second = ([one or 0.0 for one in steps.series[name].values] for name in ("k1", "drift2.k1"))
        stacked = (
            Layer("rollout → old", x, first, "blue", "bars", width=0.9),
            Layer("old → current", x, second, "orange", "bars", width=0.9, base=first),
        )
        axis = "K1 by step, stacked: blue before, orange within the step"
        panels.append(Panel("training step", axis, stacked, names=[*map(str, steps.first)]))
    whole = found["total."].value or 0.0
    before, within = ((found[prefix].value or 0.0) / whole if whole else -1.0 for prefix in ("", "drift2."))
    title = "The gap between each pair of policies: K1 adds up, K3 does not"
    telling = 0 <= before <= 1 and len(known) == len(COLOURS)
    if telling:
        title = (
            f"{rounded(before, 'share')} of the gap is there before the first update (rollout → old); "
            f"updates within the step add {rounded(within, 'share')} (old → current)"
        )
    sub = "Rollout → old is engine numerics and lag; old → current is the epochs and minibatches of one step."
    return Picture("drifts", DRIFT, title, sub, panels, telling=telling)


def _histogram(summary: Result, drift: str | None = None) -> Picture | None:
    main = _main(summary.histograms, "log_ratio")
    drift = main if drift is None else drift
    found = summary.histograms.get(f"{drift}log_ratio")
    if found is None or not found.counts:
        return None
    sides: tuple[tuple[str, Colour, Callable[[float], bool]], ...] = (
        ("less likely under the trainer", "orange", lambda x: x < -FACTOR_2),
        ("within a factor of 2", "grey", lambda x: abs(x) <= FACTOR_2),
        ("more likely under the trainer", "blue", lambda x: x > FACTOR_2),
    )
    whole = _bars(found, "grey")
    layers = []
    for said, colour, within in sides:
        some = [(x, y) for x, y in zip(whole.x, whole.y, strict=True) if within(x)]
        x, y = [x for x, _ in some], [y for _, y in some]
        layers += [replace(whole, name=said, colour=colour, x=x, y=y)] if some else []
    if found.in_sync and any(found.in_sync):
        synced = _bars(found.model_copy(update={"counts": found.in_sync}), "slate")
        layers.append(Layer("lag 0", synced.x, synced.y, "slate", "steps", dashed=True, at=0))
    less, more = (summary.charts.less, summary.charts.more) if drift == main else (None, None)
    off = summary.whole.get(f"{drift}f_2", Number()).value
    title, sub = "The log-ratio Δ of every token", "Log-ratio Δ of every token (counts on a log scale)."
    if off is not None:
        many = f"{rounded(off, 'fraction')} of tokens differ" if off else "No token differs"
        title = f"{many} by more than a factor of 2"
    if less and more and off:
        low, high = (rounded(one.share, "share") for one in (less, more))
        title += f": {low} are less likely under the trainer, {high} more"
        left, right = (
            f"{rounded(one.share, 'share')} of tokens, {rounded(one.k3_share or 0.0, 'share')} of K3"
            for one in (less, more)
        )
        sub += f" r < ½: {left}; r > 2: {right}."
    axis, name = "Δ = log π_train − log π_rollout, nats", "histogram"
    if drift != main:
        name, (before, after) = f"histogram-{drift}log_ratio", PAIRS[drift].split(" → ")
        axis = f"Δ = log π_{after} − log π_{before}, nats"
        title = f"{PAIRS[drift]}: {title[:1].lower()}{title[1:]}"
    panel = Panel(axis, "tokens (log)", layers, y_scale="log", y_range=(0.7, None))
    return Picture(name, DRIFT, title, sub, (panel,), telling=bool(off) and drift == main)


def _bars(one: Histogram, colour: Colour) -> Layer:
    """Return the bars of a histogram, without those of count 0."""
    middle = [(a + b) / 2 for a, b in pairwise(one.edges)]
    widths = sorted(b - a for a, b in pairwise(one.edges))
    counts = [float(n) or None for n in one.counts]
    return Layer("", middle, counts, colour, "bars", width=widths[len(widths) // 2] if widths else 1.0)


def _other_histograms(summary: Result) -> Iterator[Picture]:
    """Yield those of the other pairs of policies, and of whatever else there is."""
    main = _main(summary.histograms, "log_ratio")
    ratios = {f"{prefix}log_ratio": prefix for prefix in PAIRS}
    for name, one in summary.histograms.items():
        if name in ratios:
            found = _histogram(summary, ratios[name]) if ratios[name] != main else None
            if found:
                yield found
        elif one.counts:
            panel = Panel(one.unit, "count (log)", (_bars(one, "grey"),), y_scale="log", y_range=(0.7, None))
            title, sub = f"{one.title[:1].upper()}{one.title[1:]}", f"{count(sum(one.counts))} tokens."
            yield Picture(f"histogram-{name}", DRIFT, title, sub, (panel,), telling=False)


def _noise(summary: Result) -> Picture | None:
    noise = summary.charts.noise
    if noise is None or sum(one is not None for one in noise.median) < 3:
        return None
    bins = list(pairwise(noise.edges))
    x = [min(((a or b / 2) * (b if b < 1 else (a + 1) / 2)) ** 0.5, 1 - 1e-6) for a, b in bins]
    layers = [
        Layer("99th percentile", x, noise.p99, "grey", at=len(x) // 3),
        Layer("90th percentile", x, noise.p90, "blue", at=len(x) // 2),
        Layer("median", x, noise.median, "slate", at=len(x) // 2),
    ]
    in_sync = zip(noise.in_sync_p90, noise.in_sync_tokens, strict=False)
    synced = [one if n >= FEW else None for one, n in in_sync]
    if _known(synced):
        layers.append(Layer("lag 0, 90th percentile", x, synced, "slate", dashed=True, at=1))
    inner = [i for i, (a, b) in enumerate(bins) if a >= 0.25 and b <= 0.98 and noise.p90[i] is not None]
    title = "|Δ| by the rollout probability of the token"
    if inner:
        a, b = (rounded(end) for end in (noise.edges[inner[0]], noise.edges[inner[-1] + 1]))
        least = rounded(min(noise.p90[i] or 0.0 for i in inner))
        title = f"Between π_rollout = {a} and {b} one token in ten is off by {least} nats or more"
        alone = [noise.in_sync_p90[i] or 0.0 for i in inner if synced and noise.in_sync_tokens[i] >= FEW]
        if alone and max(alone) < min(noise.p90[i] or 0.0 for i in inner):
            title += f"; the engine alone accounts for at most {rounded(max(alone))}"
    axis, level = "π_rollout of the token (logit)", ((FACTOR_2, ""),)
    panel = Panel(axis, "|Δ|, nats (log)", layers, "logit", "log", levels=level, tall=True)
    sub = "Quantiles of |Δ| by the rollout probability of the token. Line: a factor of 2."
    sub += " Dashed: weights in sync." if _known(synced) else ""
    return Picture("noise", DRIFT, title, sub, (panel,))


def _density(summary: Result) -> Picture | None:
    found, lost, mirror = summary.charts.density, summary.charts.lost, summary.charts.found
    if found is None:
        return None
    share = lost.share if lost else 0.0
    boxed = f"{rounded(share, 'share')} of tokens" if lost and lost.tokens else ""
    title = "Both probabilities of every token"
    if lost:
        some = f"{rounded(share, 'share')} of tokens are" if lost.tokens else "No token is"
        title = f"{some} near certain for the rollout but unlikely for the trainer"
        if lost.k3_share is not None and share > 1e-3:
            title += f"; they carry {rounded(lost.k3_share, 'share')} of K3"
            boxed += f", {rounded(lost.k3_share, 'share')} of K3"
    heat = Heat(found.edges, found.counts, (0.9, 1.0, 0.0, 0.5) if boxed else None, boxed)
    axes = ("π_rollout (logit)", "π_train (logit)")
    panel = Panel(*axes, x_scale="logit", y_scale="logit", heat=heat, tall=True)
    sub = "Both probabilities of each sampled token; dark cells hold more."
    if boxed:
        other = f"; the mirror image holds {rounded(mirror.share, 'share')}" if mirror else ""
        sub += f" Boxed: π_rollout above 0.9, π_train below 0.5{other}."
    return Picture("density", DRIFT, title, sub, (panel,), telling=share > 1e-3)


def _tail(summary: Result) -> Picture | None:
    drift = _main(summary.charts.tails, "tokens")
    drawn: tuple[tuple[str, Colour], ...] = (("tokens", "teal"), ("sequences", "purple"))
    tails = summary.charts.tails
    found = [(name, tails[drift + name], colour) for name, colour in drawn if drift + name in tails]
    layers: list[Layer] = []
    for name, one, colour in found:
        if len(one.rank) >= 5:
            x = [rank / one.weights for rank in one.rank]
            layers.append(Layer(name, x, one.log_weight, colour, "points", at=0))
            layers.append(Layer("", x, one.log_fitted, colour, dashed=True, named=False))
    if not layers:
        return None
    khats = [f"{rounded(one.khat.value)} of {name}" for name, one, _ in found if one.khat.value is not None]
    heavy = [name for name, one, _ in found if (one.khat.value or 0) > one.limit]
    whose, weight = (f" of {' and '.join(heavy)}", "too heavy") if heavy else ("", "light enough")
    of = f" ({PAIRS[drift]})" if drift else ""
    title = f"The tail of the weights{whose}{of} is {weight} for their means to be trusted"
    title += f": k̂ is {', '.join(khats)}"
    sub = "The largest weights against their rank. Dashed: the fitted Pareto tail."
    panel = Panel("share of weights above (log)", "log weight, nats", layers, "log")
    return Picture("tail", DRIFT, title, sub, (panel,), telling=bool(heavy))


def _where(summary: Result) -> Picture | None:
    """Draw K3 on both sides of each cut that tells damaged tokens from clean ones.

    It is folded where the clearest cut is by step or lag, which have charts of their own.
    """
    found = summary.diagnosis.where if summary.diagnosis else []
    if not found:
        return None
    x = range(len(found))
    layers = [
        Layer("inside", x, [one.inside for one in found], "orange", "points"),
        Layer("all other tokens", x, [one.outside for one in found], "blue", "points"),
    ]
    names, telling = (
        [one.split.replace("_", " ") for one in found],
        found[0].split not in ("step", "policy_lag"),
    )
    panel = _k3_panel(summary, "what is cut", layers, names=names)
    sub = f"Inside: {found[0].words}. Mean K3 of these and of all other tokens, single ones cut at 4 nats."
    return Picture("where", DRIFT, found[0].sentence.rstrip("."), sub, (panel,), telling=telling)


# ---------------------------------------------------------------- along the response


def _positions(summary: Result) -> Picture | None:
    found = summary.charts.positions
    if found is None or len(found.labels) < 2:
        return None
    parts: list[tuple[str, PositionSteps, Colour]] = [("all steps", found.every, "blue")]
    if found.early and found.late:
        parts = [(_steps(found.early), found.early, "grey"), (_steps(found.late), found.late, "blue")]
    enough = [min(one.tokens[i] for _, one, _ in parts) >= FEW for i in range(len(found.labels))]
    if not any(enough):
        return None
    labels = found.labels[: len(enough) - enough[::-1].index(True)]

    def sure(values: Sequence[float | None]) -> list[float | None]:
        return [one if some else None for one, some in zip(values, enough, strict=False)][: len(labels)]

    layers = []
    for name, one, colour in parts:
        values, low, high = (sure(some) for some in (one.k3.values, one.k3.low, one.k3.high))
        layers.append(Layer(name, range(len(labels)), values, colour, low=low, high=high, at=-2))
    panel = _k3_panel(summary, "position in the response, tokens", layers, names=labels)
    known = _known(layers[-1].y)
    if not known:
        return None
    growth = f"goes along the response from {rounded(known[0])} to {rounded(known[-1])}"
    telling = known[-1] > 2 * known[0] or known[0] > 3 * known[-1]
    title = f"K3 {growth}"
    if found.early and found.late:
        pairs = zip(found.early.k3.values, found.late.k3.values, enough, strict=True)
        times = [b / a for a, b, some in pairs if some and a and b and a > 0]
        if times and min(times) > 1.2:
            telling = True
            ends = f"{rounded(min(times))} to {rounded(max(times))}"
            title = f"From step {found.late.first_step} on, K3 is {ends} times higher at every position"
            title += f", and {growth}"
    sub = "Mean K3 by position from the start, with 95% intervals."
    sub += f" Cut where {found.split}." if found.split else ""
    return Picture("position", ALONG, title, sub, (panel,), telling=telling)


def _steps(one: PositionSteps) -> str:
    if one.first_step == one.last_step:
        return f"step {one.first_step}"
    return f"steps {one.first_step}–{one.last_step}"


def _length(summary: Result) -> Picture | None:
    found = summary.lengths
    if found is None or len(found.curve) < 3:
        return None
    x = [one.tokens for one in found.curve]
    khat = [one.khat.value if one.khat else None for one in found.curve]
    hollow = [(one or 0) > 0.7 for one in khat]
    ess = replace(at_places("", [one.ess_sequences for one in found.curve], "teal"), x=x, hollow=hollow)
    uprights = ((float(found.median), "median response"),) if found.median else ()
    across, axis = "T, tokens multiplied into one weight (log)", "ESS of sequence weights (red: below 10%)"
    bad = (Tint(0, TENTH, "bad"),)
    panels = [
        Panel(across, axis, (ess,), "log", percent=True, y_range=(0, 1.04), tints=bad, uprights=uprights)
    ]
    if _known(khat):
        panels.append(
            Panel(
                "T, tokens (log)",
                "Pareto k̂ of sequence weights",
                (Layer("", x, khat, "slate", hollow=hollow),),
                "log",
                tints=(Tint(0.7, None, "bad"),),
                levels=((0.7, "unreliable above 0.7"),),
                uprights=tuple((at, "") for at, _ in uprights),
            )
        )
    longest = found.longest.value
    trap = longest is not None and (found.median is None or longest < found.median)
    title = f"Sequence weights over {count(x[-1])} tokens keep {rounded(ess.y[-1], 'fraction')} ESS"
    sub = "Every response cut to its first T tokens; weight: the product of their ratios."
    if trap:
        title = f"Length trap: sequence weights keep less than 10% ESS beyond about {rounded(longest)} tokens"
        title += f"; the median response has {found.median}" if found.median else ""
        sub += f" Crossing: {say(found.longest)} tokens."
        sub += f" The log-normal rule says {rounded(found.log_normal)}." if found.log_normal else ""
    return Picture("length", ALONG, title, f"{sub} Hollow: k̂ above 0.7.", panels, telling=trap)


# ---------------------------------------------------------------- thresholds


def _threshold_panel(of: str, layers: Sequence[Layer], uprights: Sequence[tuple[float, str]] = ()) -> Panel:
    across, up = f"threshold b on {of} (log of b − 1)", "share of tokens, or ESS"
    return Panel(across, up, layers, "excess", percent=True, y_range=(0, 1.05), uprights=uprights)


def _token_thresholds(summary: Result) -> Picture | None:
    found, given = summary.charts.token_thresholds, summary.recommendation
    if found is None or not found.b or summary.is_bug:
        return None
    layers = (
        Layer("ESS of min(r, b)", found.b, found.ess_tokens, "teal", at=len(found.b) * 2 // 3),
        Layer("kept by a mask [1/b, b]", found.b, found.kept, "orange", at=0),
        Layer("truncated by TIS", found.b, found.truncated, "slate", dashed=True, at=0),
    )
    usual = [i for i, b in enumerate(found.b) if 1.5 <= b <= 5 and found.ess_tokens[i] is not None]
    title = "What token rules keep at each threshold"
    if usual:
        most, least = max(found.truncated[i] for i in usual), min(found.ess_tokens[i] or 0 for i in usual)
        share = f"at most {rounded(most, 'share')} of tokens" if most else "no token"
        title = f"A cap on r from 1.5 to 5 truncates {share}"
        title += f" and keeps ESS at {rounded(least, 'share')} or more"
    uprights: tuple[tuple[float, str], ...] = ()
    if given and given.threshold and given.title and "token" in given.title:
        with suppress(ValueError):  # two bounds, in words
            at = float(given.threshold)
            uprights = ((at, f"recommended: {say_value(at)}"),) if at else ()
    sub = "Token TIS weights by min(r, b); a token mask keeps 1/b ≤ r ≤ b."
    return Picture("token-thresholds", COSTS, title, sub, (_threshold_panel("r", layers, uprights),))


def _sequence_thresholds(summary: Result) -> Picture | None:
    found = summary.charts.sequence_thresholds
    if found is None or not found.b or summary.is_bug:
        return None
    layers = (
        Layer("kept: geometric mean", found.b, found.kept_geometric, "orange", at=len(found.b) // 2),
        Layer("kept: product", found.b, found.kept_product, "blue"),
        Layer("ESS of min(∏r, b)", found.b, found.ess_tokens, "teal", at=len(found.b) // 3),
    )
    geometric, product = (
        rounded(min(zip(found.b, kept, strict=True), key=lambda pair: abs(pair[0] - at))[1], "share")
        for kept, at in ((found.kept_geometric, 1.001), (found.kept_product, 2.0))
    )
    title = f"±0.1% on the geometric mean keeps {geometric} of tokens, [0.5, 2] on the product {product}"
    sub = "Share of tokens left when a whole sequence is judged, and ESS when min(∏r, b) weighs it."
    panel = _threshold_panel("the sequence ratio", layers)
    return Picture("sequence-thresholds", COSTS, title, sub, (panel,))


# ---------------------------------------------------------------- by group


def _groups(summary: Result) -> Iterator[Picture]:
    """Yield a chart for each metadata column and the other axes; those without a difference are folded."""
    for axis, found in summary.axes.items():
        k3 = {place.key: place.numbers["k3"] for place in summary.at(axis) if "k3" in place.numbers}
        k3 = {key: one for key, one in k3.items() if one.value is not None}
        if axis in ("step", "position") or len(k3) < 2:
            continue
        sure = [(key, one, one.interval) for key, one in k3.items() if one.interval]
        title, telling = f"K3 by {found.title}", False
        if len(sure) > 1:
            least, most = (pick(sure, key=lambda row: row[1].value or 0) for pick in (min, max))
            telling = least[2][1] < most[2][0]
            title = f"K3 {'differs ' if telling else ''}by {found.title}: "
            title += f"{say(most[1])} for {most[0]}, {say(least[1])} for {least[0]}"
            title += "" if telling else ", whose intervals overlap"
        layer = at_places("", [*k3.values()], "blue", "points")
        panel = _k3_panel(summary, found.title, (layer,), names=[*k3])
        telling = telling and axis not in PREDICTABLE
        yield Picture(f"by-{axis}", "By group", title, "With 95% intervals.", (panel,), telling=telling)


PICTURES: tuple[Callable[[Result], Picture | None], ...] = (
    _by_step,
    _drifts,
    _histogram,
    _noise,
    _density,
    _tail,
    _where,
    _positions,
    _length,
    _token_thresholds,
    _sequence_thresholds,
)
"""In reading order within their groups."""
