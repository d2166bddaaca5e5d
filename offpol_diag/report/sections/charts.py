"""The pictures of an analysis: each with a finding for a title, in reading order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from offpol_diag.bands import Tone, tone
from offpol_diag.blocks import Block, Cell, Composite, Section, Table, Text, Verdict
from offpol_diag.numerals import count, say, say_value
from offpol_diag.report.picture import Colour, Heat, Layer, Panel, Picture, Tint, Values, listed
from offpol_diag.summary import Band, Histogram, Location, Number, PositionSteps, Series, Summary

OVER, DRIFT, ALONG, COSTS = (
    "Over training",
    "Which drift, which tokens",
    "Along the response",
    "What a threshold costs",
)
PAIRS: tuple[tuple[str, str, Colour], ...] = (
    ("", "rollout → old", "blue"),
    ("drift2.", "old → current", "orange"),
    ("total.", "rollout → current", "slate"),
)
TENTH, FEW, FACTOR_2 = 0.1, 30, 0.6931
"""ESS below which sequence weights are called unusable; tokens below which a mean is not drawn; log 2."""


SMALL = 12
"""Points of a chart up to which a terminal and a pull request list them."""


@dataclass(frozen=True)
class Charts(Composite):
    """The charts, the bands of K3 that tint them (how bad, name), and all their numbers by place."""

    pictures: tuple[Picture, ...]
    bands: tuple[tuple[Tone, str], ...]
    tables: tuple[Table, ...]

    def plain(self) -> tuple[Block, ...]:
        """Return what each chart finds, with its numbers if they are few."""
        found: list[Block] = []
        for one in self.pictures:
            if one.telling:
                table = replace(one.data or listed(one), caption="")
                found.append(Verdict(one.title, "", "info", (one.sub,)))
                found += [table] if 1 < len(table.rows) <= SMALL else []
        same = "; ".join(one.title for one in self.pictures if not one.telling)
        return (*found, *((Text(f"Other charts of the page: {same}."),) if same else ()))


def charts(summary: Summary) -> Section | None:
    """Return the charts, and a table of all numbers for each axis."""
    found, tables = pictures(summary), tuple(map(_table, summary.by.values()))
    bands = tuple((tone(one.name), one.name) for one in summary.charts.bands if one.metric == "k3")
    title = "Where the mismatch is"
    return Section("charts", title, (Charts(found, bands, tables),), "Charts") if found or tables else None


def _table(location: Location) -> Table:
    names = dict.fromkeys(name for place in location.places for name in place.metrics)
    rows: list[tuple[Cell, ...]] = [
        (place.key, place.tokens, place.sequences, *(place.metrics.get(name, Number()) for name in names))
        for place in location.places
    ]
    more = (f"{count(location.left_out)} more places are not listed.",) if location.left_out else ()
    header = (location.title, "tokens", "sequences", *names)
    return Table(
        f"by-{location.axis}", f"All numbers by {location.title}", header, tuple(rows), more, collapsed=True
    )


def pictures(summary: Summary) -> tuple[Picture, ...]:
    """Return every picture that the result has numbers for."""
    made = (make(summary) for make in PICTURES)
    return (*(one for one in made if one is not None), *_groups(summary), *_other_histograms(summary))


def value(number: float | None, unit: str = "") -> str:
    """Write a measured value for a sentence, with two digits."""
    return say(Number(value=number, unit=unit))


def tint(one: Band, name: bool = True) -> Tint:
    """Return the tint of a band."""
    return Tint(one.low, one.high, tone(one.name), one.name if name else "")


def tints(summary: Summary, metric: str, named: bool = True) -> tuple[Tint, ...]:
    """Return the tints of all bands of a metric."""
    return tuple(tint(one, named) for one in summary.charts.bands if one.metric == metric)


def _layer(name: str, x: Iterable[float], one: Series, colour: Colour, **more: object) -> Layer:
    ends: dict[str, Any] = {"low": tuple(one.low), "high": tuple(one.high), **more}
    return Layer(name, tuple(x), tuple(one.values), colour, **ends)


# ---------------------------------------------------------------- over training


def _by_step(summary: Summary) -> Picture | None:
    steps = summary.charts.steps
    if steps is None or len(steps.first) < 2 or "k3" not in steps.series:
        return None
    x = [float(step) for step in steps.first]
    khat = steps.series.get("khat_tokens")
    hollow = tuple((one or 0) > 0.7 for one in khat.values) if khat else ()
    crossed = [one for one in summary.charts.crossings if one.metric == "k3"]
    worst = crossed[-1] if crossed else None
    uprights = ((float(worst.step), ""),) if worst else ()
    panels = [
        Panel(
            "training step",
            "K3 KL, nats per token (log)",
            (_layer("", x, steps.series["k3"], "blue"),),
            y_scale="log",
            tints=tints(summary, "k3"),
            uprights=uprights,
        ),
    ]
    if "ess_tokens" in steps.series:
        ess = _layer("", x, steps.series["ess_tokens"], "teal", hollow=hollow)
        title = "ESS of raw token ratios" + (" (hollow: k̂ > 0.7)" if any(hollow) else "")
        panels.append(
            Panel(
                "training step",
                title,
                (ess,),
                percent=True,
                y_range=(0, 1.04),
                uprights=uprights,
                tints=tuple(t for t in tints(summary, "ess_tokens") if t.tone != "good"),
            )
        )
    reward = steps.series.get("reward")
    if reward and _known(reward.values):
        panels.append(
            Panel("training step", "mean reward", (_layer("", x, reward, "purple"),), uprights=uprights)
        )
    elif "mean_ratio" in steps.series:
        ratio = _layer("", x, steps.series["mean_ratio"], "purple", hollow=hollow)
        panels.append(
            Panel("training step", "E[r], mean ratio", (ratio,), levels=((1.0, ""),), uprights=uprights)
        )
    values = _known(steps.series["k3"].values)
    if worst:
        title = f"K3 passes {say_value(worst.bound)} at step {worst.step}"
        rewards = _known(reward.values) if reward else []
        if rewards and rewards[-1] < 0.8 * max(rewards):
            peak = steps.first[reward.values.index(max(rewards))]  # type: ignore[union-attr]
            fell = f"the mean reward falls from {value(max(rewards))} to {value(rewards[-1])}"
            title += f"; from step {peak} to {steps.last[-1]} {fell}"
    elif max(values) > 3 * min(values):
        title = f"K3 goes from {value(values[0])} to {value(values[-1])} over {len(values)} steps"
    else:
        title = f"K3 is flat over {len(values)} steps: {value(min(values))} to {value(max(values))}"
    mark = f" Dashed: the step at which K3 becomes {worst.band}." if worst else ""
    sub = f"Means of each training step, with 95% intervals.{mark}"
    return Picture("by-step", OVER, title, sub, tuple(panels), wide=True)


def _by_lag(summary: Summary) -> Picture | None:
    """K3 against policy lag, a point for each step: the evidence of the cause."""
    steps, lag = summary.charts.steps, summary.charts.lag
    lags = steps.series.get("policy_lag") if steps else None
    if steps is None or lags is None or len(set(_known(lags.values))) < 2:
        return None
    k3 = steps.series["k3"]
    rows = [i for i, (a, b) in enumerate(zip(lags.values, k3.values, strict=True)) if a is not None and b]
    many = max(1, len(rows))
    x = [(lags.values[i] or 0) + 0.3 * (place / many - 0.5) for place, i in enumerate(rows)]

    def pick(values: Sequence[float | None]) -> Values:
        return tuple(values[i] for i in rows) if values else ()

    layer = Layer("", tuple(x), pick(k3.values), "blue", "points", pick(k3.low), pick(k3.high))
    panel = Panel(
        "policy lag, updates behind",
        "K3 KL, nats per token (log)",
        (layer,),
        y_scale="log",
        tints=tints(summary, "k3", False),
        whole=True,
    )
    title = "Stale rollouts"
    if lag and lag.growth and lag.growth > 2 and lag.lag is not None:
        title += f" and growing updates: K3 rises {value(lag.growth)}-fold at lag {lag.lag}"
    elif lag and lag.in_sync and lag.in_sync.value:
        title = f"At lag 0, K3 is {value(lag.in_sync.value)}"
    return Picture("by-lag", "", title, "One point per training step, in order within each lag.", (panel,))


# ---------------------------------------------------------------- which drift, which tokens


def _drifts(summary: Summary) -> Picture | None:
    found = [(title, summary.metrics.get(f"{prefix}k1", Number()), colour) for prefix, title, colour in PAIRS]
    known = [(title, one, colour) for title, one, colour in found if one.value is not None]
    if len(known) < 2:
        return None
    layers = tuple(
        Layer(title, (float(place),), (one.value,), colour, "bars", width=0.8)
        for place, (title, one, colour) in enumerate(known)
    )
    errors = tuple(
        Layer(
            "",
            (float(place),),
            (one.value,),
            "grey",
            "points",
            (one.interval[0] if one.interval else None,),
            (one.interval[1] if one.interval else None,),
        )
        for place, (_, one, _) in enumerate(known)
    )
    panels = [
        Panel(
            "",
            "K1, mean of −Δ, nats per token",
            (*layers, *errors),
            names=tuple(title.replace(" ", "") for title, _, _ in known),
        )
    ]
    steps = summary.charts.steps
    if steps and len(steps.first) > 1 and "drift2.k1" in steps.series:
        x = tuple(map(float, range(len(steps.first))))
        first, second = ([one or 0.0 for one in steps.series[name].values] for name in ("k1", "drift2.k1"))
        stacked = (
            Layer("rollout → old", x, tuple(first), "blue", "bars", width=0.9),
            Layer("old → current", x, tuple(second), "orange", "bars", width=0.9, base=tuple(first)),
        )
        panels.append(
            Panel(
                "training step",
                "K1 by step, stacked: blue before, orange within the step",
                stacked,
                names=tuple(map(str, steps.first)),
            )
        )
    shares = summary.charts.gap_shares
    title, telling = "The gap between each pair of policies: K1 adds up, K3 does not", False
    if {"rollout_old", "old_current"} <= set(shares):
        before, within = shares["rollout_old"].value, shares["old_current"].value
        if before is not None and within is not None and 0 <= before <= 1:
            telling = True
            title = (
                f"{value(before, 'share')} of the gap is there before the first update (rollout → old); "
                f"updates within the step add {value(within, 'share')} (old → current)"
            )
    sub = "Rollout → old is engine numerics and lag; old → current is the epochs and minibatches of one step."
    return Picture("drifts", DRIFT, title, sub, tuple(panels), wide=True, telling=telling)


def _histogram(summary: Summary) -> Picture | None:
    name = next(
        (f"{prefix}log_ratio" for prefix in ("", "total.") if f"{prefix}log_ratio" in summary.histograms),
        None,
    )
    if name is None or not summary.histograms[name].counts:
        return None
    found = summary.histograms[name]
    bars = _bins(found)
    sides: tuple[tuple[str, Colour, list[tuple[float, float | None]]], ...] = (
        ("less likely under the trainer", "orange", [b for b in bars if b[0] < -FACTOR_2]),
        ("within a factor of 2", "grey", [b for b in bars if abs(b[0]) <= FACTOR_2]),
        ("more likely under the trainer", "blue", [b for b in bars if b[0] > FACTOR_2]),
    )
    layers = [
        Layer(said, tuple(b[0] for b in some), tuple(b[1] for b in some), colour, "bars", width=_width(found))
        for said, colour, some in sides
        if some
    ]
    if found.in_sync and any(found.in_sync):
        synced = _bins(found.model_copy(update={"counts": found.in_sync}))
        x, y = tuple(b[0] for b in synced), tuple(b[1] for b in synced)
        layers.append(Layer("lag 0", x, y, "slate", "steps", dashed=True, at=0))
    ranges = summary.charts.ranges
    under = [one for one in ranges if one.high is not None and one.high <= 0.5]
    over = [one for one in ranges if one.low is not None and one.low >= 2]
    low, high = (sum(one.share for one in some) for some in (under, over))
    shares = [sum(one.k3_share or 0 for one in some) for some in (under, over)]
    off = summary.metrics.get(name.replace("log_ratio", "f_2"), Number()).value
    title = "Nearly all tokens agree within a factor of 2"
    if off:
        way = (
            "in both directions"
            if min(low, high) * 4 > max(low, high)
            else f"nearly all of them {'less' if low > high else 'more'} likely under the trainer"
        )
        title = f"{value(off, 'fraction')} of tokens differ by more than a factor of 2, {way}"
    sub = "Log-ratio Δ of every token (counts on a log scale)."
    if ranges and off:
        left, right = (
            f"{value(a, 'share')} of tokens, {value(b, 'share')} of K3"
            for a, b in zip((low, high), shares, strict=True)
        )
        sub += f" r < ½: {left}; r > 2: {right}."
    panel = Panel(
        "Δ = log π_train − log π_rollout, nats",
        "tokens (log)",
        tuple(layers),
        y_scale="log",
        y_range=(0.7, None),
    )
    return Picture("histogram", DRIFT, title, sub, (panel,), telling=bool(off))


def _bins(one: Histogram) -> list[tuple[float, float | None]]:
    """Return the middle of each bin, and its count; None for 0."""
    return [
        ((a + b) / 2, float(n) or None) for (a, b), n in zip(pairwise(one.edges), one.counts, strict=True)
    ]


def _width(one: Histogram) -> float:
    widths = sorted(b - a for a, b in pairwise(one.edges))
    return widths[len(widths) // 2] if widths else 1.0


def _noise(summary: Summary) -> Picture | None:
    noise = summary.charts.noise
    if noise is None or sum(one is not None for one in noise.median) < 3:
        return None
    middle = [((a or b / 2) * (b if b < 1 else (a + 1) / 2)) ** 0.5 for a, b in pairwise(noise.edges)]
    x = tuple(min(one, 1 - 1e-6) for one in middle)
    layers = [
        Layer("99th percentile", x, tuple(noise.p99), "grey", at=len(x) // 3),
        Layer("90th percentile", x, tuple(noise.p90), "blue", at=len(x) // 2),
        Layer("median", x, tuple(noise.median), "slate", at=len(x) // 2),
    ]
    synced = [
        one
        for one, n in zip(noise.in_sync_p90, noise.in_sync_tokens, strict=False)
        if one is not None and n >= 30
    ]
    if synced:
        enough = tuple(
            one if n >= 30 else None for one, n in zip(noise.in_sync_p90, noise.in_sync_tokens, strict=True)
        )
        layers.append(Layer("lag 0, 90th percentile", x, enough, "slate", dashed=True, at=1))
    inner = [
        i
        for i, (a, b) in enumerate(pairwise(noise.edges))
        if a >= 0.25 and b <= 0.98 and noise.p90[i] is not None
    ]
    title = "|Δ| by the rollout probability of the token"
    if inner:
        a, b = noise.edges[inner[0]], noise.edges[inner[-1] + 1]
        least = min(noise.p90[i] or 0.0 for i in inner)
        title = (
            f"Between π_rollout = {value(a)} and {value(b)} one token in ten is off by {value(least)} nats"
        )
        title += " or more"
        alone = [
            noise.in_sync_p90[i] or 0.0 for i in inner if noise.in_sync_p90 and noise.in_sync_tokens[i] >= 30
        ]
        if alone:
            title += f"; the engine alone accounts for at most {value(max(alone))}"
    panel = Panel(
        "π_rollout of the token (logit)",
        "|Δ|, nats (log)",
        tuple(layers),
        "logit",
        "log",
        levels=((FACTOR_2, ""),),
        tall=True,
    )
    sub = "Quantiles of |Δ| by the rollout probability of the token. Line: a factor of 2." + (
        " Dashed: weights in sync." if synced else ""
    )
    return Picture("noise", DRIFT, title, sub, (panel,))


def _density(summary: Summary) -> Picture | None:
    found, lost = summary.charts.density, summary.charts.lost
    if found is None:
        return None
    share = lost.share if lost else 0.0
    boxed = f"{value(share, 'share')} of tokens" if lost and lost.tokens else ""
    title = "Tokens lie on the diagonal: both policies give them similar probabilities"
    if lost and share > 1e-3:
        title = (
            f"{value(share, 'share')} of tokens are near certain for the rollout but unlikely for the trainer"
        )
        if lost.k3_share is not None:
            title += f"; they carry {value(lost.k3_share, 'share')} of K3"
            boxed += f", {value(lost.k3_share, 'share')} of K3"
    heat = Heat(
        tuple(found.edges), tuple(map(tuple, found.counts)), (0.9, 1.0, 0.0, 0.5) if boxed else None, boxed
    )
    panel = Panel(
        "π_rollout (logit)", "π_train (logit)", x_scale="logit", y_scale="logit", heat=heat, tall=True
    )
    mirror = summary.charts.found
    box = " Boxed: π_rollout above 0.9, π_train below 0.5" if boxed else ""
    other = (
        f"; the mirror image holds {value(mirror.share, 'share')}."
        if boxed and mirror
        else "."
        if boxed
        else ""
    )
    corners = (("lost: π_rollout > 0.9, π_train < 0.5", lost), ("found: the mirror image", mirror))
    rows = tuple(
        (name, one.tokens, Number(value=one.share, unit="share"), Number(value=one.k3_share, unit="share"))
        for name, one in corners
        if one
    )
    data = Table("density-data", "Corners", ("tokens", "count", "share of tokens", "share of K3"), rows)
    return Picture(
        "density",
        DRIFT,
        title,
        f"Both probabilities of each sampled token; dark cells hold more.{box}{other}",
        (panel,),
        data,
        telling=share > 1e-3,
    )


def _tail(summary: Summary) -> Picture | None:
    drawn: tuple[tuple[str, Colour], ...] = (("tokens", "teal"), ("sequences", "purple"))
    found = [
        (name, summary.charts.tails[name], colour) for name, colour in drawn if name in summary.charts.tails
    ]
    layers: list[Layer] = []
    for name, one, colour in found:
        if len(one.rank) < 5:
            continue
        x = tuple(rank / one.weights for rank in one.rank)
        layers.append(Layer(name, x, tuple(one.log_weight), colour, "points", at=0))
        layers.append(Layer("", x, tuple(one.log_fitted), colour, dashed=True, named=False))
    if not layers:
        return None
    worst = max(found, key=lambda pair: pair[1].khat.value or 0)
    khats = ", ".join(
        f"{value(one.khat.value)} of {name}" for name, one, _ in found if one.khat.value is not None
    )
    heavy = (worst[1].khat.value or 0) > worst[1].limit
    weight = "too heavy" if heavy else "light enough"
    title = f"The tail of the weights is {weight} for their means to be trusted: k̂ is {khats}"
    panel = Panel("share of weights above (log)", "log weight, nats", tuple(layers), "log")
    return Picture(
        "tail",
        DRIFT,
        title,
        "The largest weights against their rank. Dashed: the fitted Pareto tail.",
        (panel,),
        telling=heavy,
    )


# ---------------------------------------------------------------- along the response


def _positions(summary: Summary) -> Picture | None:
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
    x = tuple(map(float, range(len(labels))))
    layers = tuple(
        Layer(
            name,
            x,
            _kept_where(one.k3.values, enough)[: len(x)],
            colour,
            low=_kept_where(one.k3.low, enough)[: len(x)],
            high=_kept_where(one.k3.high, enough)[: len(x)],
            at=-2,
        )
        for name, one, colour in parts
    )
    panel = Panel(
        "position in the response, tokens",
        "K3 KL, nats per token (log)",
        layers,
        y_scale="log",
        names=tuple(labels),
        tints=tints(summary, "k3", False),
    )
    known = _known(_kept_where(parts[-1][1].k3.values, enough))
    if not known:
        return None
    grows = known[-1] > 2 * known[0]
    growth = (
        f"grows along the response to {value(known[-1])}"
        if grows
        else "is highest at its first tokens"
        if known[0] > 3 * known[-1]
        else "is even along the response"
    )
    title, telling = f"K3 {growth}", grows or known[0] > 3 * known[-1]
    if found.early and found.late:
        pairs = zip(found.early.k3.values, found.late.k3.values, enough, strict=True)
        times = [b / a for a, b, sure in pairs if sure and a and b and a > 0]
        if times and min(times) > 1.2:
            telling = True
            ends = f"{value(min(times))} to {value(max(times))}"
            title = f"From step {found.late.first_step} on, K3 is {ends} times higher at every position"
            title += f", and {growth}"
    sub = "Mean K3 by position from the start, with 95% intervals."
    sub += f" Cut where {found.split}." if found.split else ""
    return Picture("position", ALONG, title, sub, (panel,), telling=telling)


def _kept_where(values: Sequence[float | None], enough: Sequence[bool]) -> Values:
    return tuple(value if sure else None for value, sure in zip(values, enough, strict=False))


def _steps(one: PositionSteps) -> str:
    return (
        f"step {one.first_step}"
        if one.first_step == one.last_step
        else f"steps {one.first_step}–{one.last_step}"
    )


def _length(summary: Summary) -> Picture | None:
    found = summary.lengths
    if found is None or len(found.curve) < 3:
        return None
    x = tuple(float(one.tokens) for one in found.curve)
    ess = [one.ess_sequences for one in found.curve]
    khat = [one.khat.value if one.khat else None for one in found.curve]
    hollow = tuple((one or 0) > 0.7 for one in khat)
    low, high = (tuple(one.interval[end] if one.interval else None for one in ess) for end in (0, 1))
    uprights = ((float(found.median), "median response"),) if found.median else ()
    across, axis = "T, tokens multiplied into one weight (log)", "ESS of sequence weights (red: below 10%)"
    layer = Layer("", x, tuple(one.value for one in ess), "teal", low=low, high=high, hollow=hollow)
    tinted = (Tint(0, TENTH, "bad"),)
    first = Panel(
        across, axis, (layer,), "log", percent=True, y_range=(0, 1.04), tints=tinted, uprights=uprights
    )
    second = Panel(
        "T, tokens (log)",
        "Pareto k̂ of sequence weights",
        (Layer("", x, tuple(khat), "slate", hollow=hollow),),
        "log",
        tints=(Tint(0.7, None, "bad"),),
        levels=((0.7, "unreliable above 0.7"),),
        uprights=tuple((at, "") for at, _ in uprights),
    )
    last, longest = ess[-1].value, found.longest.value
    trap = longest is not None and (found.median is None or longest < found.median)
    if trap:
        title = f"Length trap: sequence weights keep less than 10% ESS beyond about {value(longest)} tokens"
        title += f"; the median response has {found.median}" if found.median else ""
    else:
        title = f"Sequence weights keep {value(last, 'fraction')} ESS at full length"
    rule = f" The log-normal rule says {value(found.log_normal)}." if found.log_normal and trap else ""
    crossing = f" Crossing: {say(found.longest)} tokens." if trap else ""
    sub = "Every response cut to its first T tokens; weight: the product of their ratios."
    sub += f"{crossing}{rule} Hollow: k̂ above 0.7."
    panels = (first, second) if any(one is not None for one in khat) else (first,)
    return Picture("length", ALONG, title, sub, panels, telling=trap)


# ---------------------------------------------------------------- thresholds


def _token_thresholds(summary: Summary) -> Picture | None:
    found = summary.charts.token_thresholds
    if found is None or not found.b or _bug(summary):
        return None
    x = tuple(found.b)
    layers = (
        Layer("ESS of min(r, b)", x, tuple(found.ess_tokens), "teal", at=len(x) * 2 // 3),
        Layer("kept by a mask [1/b, b]", x, tuple(found.kept), "orange", at=0),
        Layer("truncated by TIS", x, tuple(found.truncated), "slate", dashed=True, at=0),
    )
    usual = [i for i, b in enumerate(found.b) if 1.5 <= b <= 5 and found.ess_tokens[i] is not None]
    title = "What token rules keep at each threshold"
    if usual:
        most, least = max(found.truncated[i] for i in usual), min(found.ess_tokens[i] or 0 for i in usual)
        head = "Token rules are cheap: any cap" if least > 0.5 else "A cap"
        title = f"{head} from 1.5 to 5 truncates at most {value(most, 'share')}"
        title += f" and keeps ESS at {value(least, 'share')} or more"
    given = summary.recommendation
    at = _number(given.threshold) if given and given.threshold else None
    uprights = (
        ((at, f"recommended: {say_value(at)}"),)
        if at and given and given.title and "token" in given.title
        else ()
    )
    panel = Panel(
        "threshold b on r (log of b − 1)",
        "share of tokens, or ESS",
        layers,
        "excess",
        percent=True,
        y_range=(0, 1.05),
        uprights=uprights,
    )
    return Picture(
        "token-thresholds",
        COSTS,
        title,
        "Token TIS weights by min(r, b); a token mask keeps 1/b ≤ r ≤ b.",
        (panel,),
    )


def _sequence_thresholds(summary: Summary) -> Picture | None:
    found = summary.charts.sequence_thresholds
    if found is None or not found.b or _bug(summary):
        return None
    x = tuple(found.b)
    layers = (
        Layer("kept: geometric mean", x, tuple(found.kept_geometric), "orange", at=len(x) // 2),
        Layer("kept: product", x, tuple(found.kept_product), "blue"),
        Layer("ESS of min(∏r, b)", x, tuple(found.ess_tokens), "teal", at=len(x) // 3),
    )
    geo, product = (
        _near(found.b, values, b) for values, b in ((found.kept_geometric, 1.001), (found.kept_product, 2.0))
    )
    most = max(_known(found.ess_tokens), default=0.0)
    opening = "Sequence rules are not" if most < 0.5 else "Sequence rules keep most too"
    title = f"{opening}: ±0.1% on the geometric mean keeps {value(geo, 'share')} of tokens"
    title += f", [0.5, 2] on the product {value(product, 'share')}"
    title += f"; sequence TIS never exceeds {value(most, 'share')} ESS" if most < 0.5 else ""
    panel = Panel(
        "threshold b on the sequence ratio (log of b − 1)",
        "share of tokens, or ESS",
        layers,
        "excess",
        percent=True,
        y_range=(0, 1.05),
    )
    return Picture(
        "sequence-thresholds",
        COSTS,
        title,
        "Kept share of tokens when a whole sequence is judged, and ESS when min(∏r, b) weighs it.",
        (panel,),
    )


def _kept(summary: Summary) -> Picture | None:
    given = summary.recommendation
    named = {name: one for name, one in summary.charts.kept.items() if name != "none"}
    if not named or given is None or _bug(summary):
        return None
    first = next(iter(named.values()))
    colours: tuple[Colour, ...] = ("teal", "blue", "orange", "purple")
    layers = tuple(
        Layer(
            name.replace("_", " "),
            tuple(map(float, range(4))),
            tuple(one.weight_by_length or one.by_length),
            colour,
        )
        for (name, one), colour in zip(named.items(), colours, strict=False)
    )
    panel = Panel(
        "response length, quartiles",
        "mean weight of a token (0 if rejected)",
        layers,
        names=tuple(first.lengths),
    )
    signs = [(name, one.positive, one.negative) for name, one in named.items()]
    spread = max(
        (abs((a or 0) - (b or 0)) for _, a, b in signs if a is not None and b is not None), default=0.0
    )
    weights = [w for one in named.values() for w in (one.weight_by_length or one.by_length) if w is not None]
    even = bool(weights) and max(weights) < 1.1 * min(weights) and spread < 0.05
    title = (
        "The candidates treat short and long responses, and both signs of the advantage, alike"
        if even
        else "What the candidates keep depends on the length of the response"
    )
    rows: list[tuple[Cell, ...]] = [
        (name, *(Number(value=v, unit="share") for v in (*one.by_length, one.positive, one.negative)))
        for name, one in named.items()
    ]
    data = Table(
        "kept-data", "Kept share of tokens", ("method", *first.lengths, "A > 0", "A < 0"), tuple(rows)
    )
    return Picture(
        "kept", COSTS, title, "Mean weight by quartile of response length.", (panel,), data, telling=not even
    )


# ---------------------------------------------------------------- by group


def _groups(summary: Summary) -> list[Picture]:
    """Return a chart for each metadata column and the other axes; those without a difference are folded."""
    return [
        one
        for axis, found in summary.by.items()
        if axis not in ("step", "position") and (one := _places(summary, axis, found))
    ]


def _places(summary: Summary, axis: str, found: Location) -> Picture | None:
    places = [place for place in found.places if place.metrics.get("k3", Number()).value is not None]
    if len(places) < 2:
        return None
    numbers = [place.metrics["k3"] for place in places]
    low, high = (tuple(one.interval[end] if one.interval else None for one in numbers) for end in (0, 1))
    layer = Layer(
        "",
        tuple(map(float, range(len(places)))),
        tuple(one.value for one in numbers),
        "blue",
        "points",
        low,
        high,
    )
    sure = [(place.key, one) for place, one in zip(places, numbers, strict=True) if one.interval]
    title, telling = f"K3 by {found.title}", False
    if len(sure) > 1:
        least, most = (pick(sure, key=lambda pair: pair[1].value or 0) for pick in (min, max))
        telling = least[1].interval[1] < most[1].interval[0]  # type: ignore[index]
        ends = f"{say(most[1])} for {most[0]}, {say(least[1])} for {least[0]}"
        title = (
            f"K3 differs by {found.title}: {ends}"
            if telling
            else f"K3 does not differ by {found.title}: {ends}"
        )
    own = axis not in (
        "policy_lag",
        "length",
        "rollout_probability",
        "advantage_sign",
        "final_position",
        "position_from_end",
    )
    panel = Panel(
        found.title,
        "K3 KL, nats per token (log)",
        (layer,),
        y_scale="log",
        names=tuple(place.key for place in places),
        tints=tints(summary, "k3", False),
    )
    return Picture(f"by-{axis}", "By group", title, "With 95% intervals.", (panel,), telling=telling and own)


def _other_histograms(summary: Summary) -> list[Picture]:
    names = [name for name, one in summary.histograms.items() if name != "log_ratio" and one.counts]
    found = []
    for name in names:
        one = summary.histograms[name]
        bars = _bins(one)
        layer = Layer(
            "", tuple(b[0] for b in bars), tuple(b[1] for b in bars), "grey", "bars", width=_width(one)
        )
        panel = Panel(one.unit, "count (log)", (layer,), y_scale="log", y_range=(0.7, None))
        found.append(
            Picture(
                f"histogram-{name}",
                DRIFT,
                f"{one.title[:1].upper()}{one.title[1:]}",
                f"{count(sum(one.counts))} tokens.",
                (panel,),
                telling=False,
            )
        )
    return found


def _known(values: Iterable[float | None]) -> list[float]:
    return [one for one in values if one is not None]


def _near(b: Sequence[float], values: Sequence[float | None], at: float) -> float | None:
    return min(zip(b, values, strict=True), key=lambda pair: abs(pair[0] - at))[1] if b else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _bug(summary: Summary) -> bool:
    return summary.diagnosis is not None and summary.diagnosis.verdict == "bug"


PICTURES: tuple[Callable[[Summary], Picture | None], ...] = (
    _by_step,
    _drifts,
    _histogram,
    _noise,
    _density,
    _tail,
    _positions,
    _length,
    _token_thresholds,
    _sequence_thresholds,
    _kept,
)
"""In reading order within their groups."""

cause = _by_lag
