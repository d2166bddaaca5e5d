"""The opening of the page of a comparison, a sweep or a gate: the answer in a sentence, tiles, and charts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from offpol_diag.bands import Tone
from offpol_diag.directions import FIRST_GAP, GAP_PREFIXES, worse
from offpol_diag.gate import outcome
from offpol_diag.gate.diagnosis import plain
from offpol_diag.gate.verdicts import say_limit
from offpol_diag.numerals import count, counted, rounded, say, say_value, value_or_dash, written
from offpol_diag.report.picture import Colour, Layer, Panel, Picture, Values, at_places
from offpol_diag.report.sections import gate as gates
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.numbers import below_0
from offpol_diag.report.sections.runs import bugs, file_name
from offpol_diag.report.sections.sweep import COLUMNS, columns, kept_metric, label, window_text
from offpol_diag.summary import (
    Against,
    Comparison,
    Contrast,
    GateVerdict,
    Histogram,
    Location,
    Number,
    PresetResult,
    Summary,
    Sweep,
)

MOST, TILES = 12, 8
"""Presets in a chart; tiles in all."""
LABELS = {
    "k3": "K3 KL",
    "k1": "K1",
    "mean_ratio": "E[r]",
    "ess_tokens": "ESS, tokens",
    "ess_sequences": "ESS, sequences",
    "chi2_token": "χ², tokens",
    "chi2_sequence": "χ², sequences",
    "ppl_ratio": "PPL ratio",
}
LENGTHS = {
    "kept_length_q1": "shortest quarter",
    "kept_length_q2": "second",
    "kept_length_q3": "third",
    "kept_length_q4": "longest quarter",
}
SERIES: tuple[Colour, ...] = ("blue", "orange", "teal", "purple", "slate", "grey")


@dataclass(frozen=True)
class Fact:
    """A tile: a number, what it is called, how it is judged, and a small curve."""

    label: str
    value: str
    interval: str = ""
    band: str = ""
    tone: Tone | None = None
    below: str = ""
    key: str = ""
    curve: Values = ()


@dataclass(frozen=True)
class Opening:
    """The answer: `sev` is a word of judgement before the sentence `h1`, `lede` what follows it."""

    h1: str
    tone: Tone
    lede: str
    sev: str = ""
    interval: str = ""
    cautions: tuple[str, ...] = ()
    lead: str = ""
    facts: tuple[Fact, ...] = ()
    pictures: tuple[Picture, ...] = ()
    config: tuple[str, str] = ("", "")


def opening(summary: Summary) -> Opening | None:
    """Return the answer to what was asked, or None where that is an analysis."""
    if summary.against is not None:
        return _runs(summary, summary.against)
    if summary.comparison is not None:
        return _presets(summary, summary.comparison)
    if summary.sweep is not None:
        return _sweep(summary.sweep)
    return _gates(summary) if summary.gates else None


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _spread(a: Number | None, b: Number | None) -> float:
    return abs((a.value or 0) - (b.value or 0)) if a and b else 0.0


# ---------------------------------------------------------------- presets side by side


def _presets(summary: Summary, found: Comparison) -> Opening:
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    lacking = [f"{name} needs {_listed(one.needs)}" for name, one in summary.presets.items() if one.needs]
    cautions = (f"Not computed: {'; '.join(lacking[:5])}.",) if lacking else ()
    if not able:
        return Opening("None of these presets can be computed from this dump", "warn", "", cautions=cautions)
    ess = {name: one.metrics.get("ess_tokens", Number()) for name, one in able.items()}
    weighted = {name: one.metrics.get("tokens_weighted", Number()) for name, one in able.items()}
    best, bug = found.better.get("ess_tokens", ""), is_bug(summary)
    ranked, idle = by_ess(able), without_effect(able)
    acting = {name: ess[name] for name in ranked if not able[name].idle}
    shown = [name for name in ranked if not able[name].same_as][: MOST if len(able) > TILES else TILES]
    facts = []
    for name in shown[:TILES]:
        cut, leads = able[name].metrics.get("truncated_high", Number()), best == name and not bug
        below = f"{value_or_dash(weighted[name])} with a weight"
        below += f", {value_or_dash(cut)} above the bound" if cut.value else ""
        band = "largest" if leads else "reference" if name == found.against else ""
        band = "changes nothing" if able[name].idle and not bug else band
        value, interval = written(ess[name].model_copy(update={"note": None}))
        facts.append(Fact(name, value, interval, band, "good" if leads else None, below))
    answered = partial(
        Opening,
        cautions=cautions,
        lead=f"ESS of tokens after each correction, of {counted(len(able), 'preset')}; 95% intervals.",
        facts=tuple(facts),
        pictures=tuple(_of_presets({name: able[name] for name in shown}, found)),
    )
    if bug:
        text = summary.diagnosis.headline if summary.diagnosis else ""
        return answered(text, "bad", "Nothing is ranked before the fix.", "Bug:")
    known = {name: one.value for name, one in weighted.items() if one.value is not None}
    losing, said = min(known, key=lambda name: known[name], default=""), ""
    if losing and known[losing] < 0.999:
        said = f"{losing} gives the fewest tokens a weight: {say(weighted[losing])}."
    if best in able and len(able) > 1:
        other = next(name for name in acting if name != best)
        title, interval = written(ess[best])
        paired = "; paired, the difference excludes 0" if _overlap(ess[best], ess[other]) else ""
        lede = " ".join(filter(None, (f"Next is {other} with {say(ess[other])}{paired}.", said, idle)))
        return answered(f"{best} keeps the largest ESS of tokens: {title}", "good", lede, interval=interval)
    first = ranked[0]
    title, interval = written(ess[first])
    if not acting and len(able) > 1:
        return answered(f"{IDLE} on this dump", "info", "Every token weighs 1.")
    if len(acting) < 2:
        head = f"{first} keeps an ESS of tokens of {title}"
        why = able[first].method if len(able) == 1 else f"{said} {idle}".strip()
        return answered(head, "info", why, interval=interval)
    head, lede = undecided(acting, found)
    return answered(head, "info", " ".join(filter(None, (lede, said, idle))), interval=interval)


IDLE = "None of these presets changes anything"


def by_ess(presets: Mapping[str, PresetResult]) -> list[str]:
    """Return presets by their ESS of tokens, the largest first; last those that change nothing."""

    def key(name: str) -> tuple[bool, float]:
        return presets[name].idle, -(presets[name].metrics.get("ess_tokens", Number()).value or 0.0)

    return sorted(presets, key=key)


def without_effect(presets: Mapping[str, PresetResult]) -> str:
    """Return a sentence on the presets that change nothing, whose ESS says nothing of the mismatch."""
    idle = [name for name, one in presets.items() if one.idle]
    if not idle or len(presets) == 1:
        return ""
    if len(idle) == 1:
        return f"{idle[0]} changes nothing here, so that its ESS of 100% says nothing."
    more = f"{idle[0]} and {count(len(idle) - 1)} more" if len(idle) > 2 else " and ".join(idle)
    return f"{more} change nothing here, so that their ESS of 100% says nothing."


def undecided(ess: Mapping[str, Number], found: Comparison) -> tuple[str, str]:
    """Return what is said where no preset has the largest ESS of tokens: of the two largest, and why."""
    one, other = sorted(ess, key=lambda name: -(ess[name].value or 0.0))[:2]
    both, word = f"{one} and {other}", found.better.get("ess_tokens", "")
    if word == "equal":
        return f"{both} have the same ESS of tokens", f"It is {say(ess[one])}: a toss-up, so the simpler one."
    if word == "undecided":
        values = f"It is {value_or_dash(ess[one])} and {value_or_dash(ess[other])}"
        why = (
            f"{values}, and the paired interval of the difference includes 0: a toss-up, so the simpler one."
        )
        return f"{both} cannot be told apart by ESS of tokens", why
    return "The ESS of tokens is not known of all these presets", "Nothing is ranked."


def _overlap(a: Number, b: Number) -> bool:
    if not a.interval or not b.interval:
        return a.value == b.value
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _of_presets(shown: Mapping[str, PresetResult], found: Comparison) -> Iterator[Picture]:
    names = list(shown)
    ess = [one.metrics.get("ess_tokens", Number()) for one in shown.values()]
    share = partial(Panel, names=names, percent=True, y_range=(0, 1.05))
    if len(names) > 1:
        weighted = [one.metrics.get("tokens_weighted", Number()).value for one in shown.values()]
        bars = Layer("", range(len(names)), weighted, "orange", "bars", width=0.7)
        panels = (
            share("", "ESS of tokens", (at_places("", ess, "teal", "points"),)),
            share("", "tokens with a weight", (bars,)),
        )
        acting = [end for end, name in enumerate(names) if not shown[name].idle] or [0, -1]
        ends = [f"{names[end]} {value_or_dash(ess[end])}" for end in (acting[0], acting[-1])]
        title = f"ESS of tokens runs from {ends[0]} to {ends[1]}"
        sub = "After the correction, with 95% intervals; a token with a weight may still be truncated."
        yield Picture("ess", "", title, sub, panels, wide=True)
    apart = {name: found.differences[name].get("ess_tokens") for name in names if name in found.differences}
    if any(one and one.known for one in apart.values()):
        ends_ = [one.interval for one in apart.values() if one and one.interval]
        sure = sum(low > 0 or high < 0 for low, high in ends_)
        differ = "differs" if sure == 1 else "differ"
        title = f"{sure} of {counted(len(apart), 'preset')} {differ} from {found.against} in ESS of tokens"
        sub = (
            "Paired: both presets on the same bootstrap replicates, with 95% intervals, in percentage points."
        )
        layer, level = at_places("", [*apart.values()], "blue", "points"), ((0.0, found.against),)
        panel = Panel("", "difference of ESS", (layer,), names=[*apart], percent=True, levels=level)
        yield Picture("differences", "", title, sub, (panel,), telling=sure > 0)
    kept_by = {name: [one.metrics.get(key) for key in LENGTHS] for name, one in shown.items()}
    spread = {name: _spread(some[0], some[-1]) for name, some in kept_by.items() if some[0] and some[-1]}
    if spread:
        order = sorted(spread, key=lambda name: -spread[name])[: len(SERIES)]
        first, last = (value_or_dash(kept_by[order[0]][end]) for end in (0, -1))
        telling = spread[order[0]] > 0.05
        title = f"{order[0]} rejects all but {first} of the shortest responses' tokens, and of the longest's"
        title += f" all but {last}"
        layers = [at_places(name, kept_by[name], SERIES[i]) for i, name in enumerate(order)]
        panel = share("response length", "tokens not rejected", layers, names=[*LENGTHS.values()])
        yield Picture("lengths", "", title, "By quartile of response length.", (panel,), telling=telling)


# ---------------------------------------------------------------- run A against run B


def _runs(summary: Summary, found: Against) -> Opening:
    prefix = next((one for one in GAP_PREFIXES if any(c.name == f"{one}k3" for c in found.contrasts)), "")
    by_name = {one.name: one for one in found.contrasts}
    lead = by_name.get(f"{prefix}k3")
    differ = f"{count(found.differing)} of {count(found.tested)} metrics differ"
    lede = f"A is {file_name(summary.dump)}, B is {file_name(found.b.dump)}. {differ} ({found.correction}). "
    lede += found.pairing.sentence
    sev, h1, interval, tone = "", found.headline, "", _judged(lead, prefix) or "info"
    if lead is not None and lead.a.known and lead.b.known:
        a, b = value_or_dash(lead.a), value_or_dash(lead.b)
        h1 = f"K3 KL is {a} nats per token in A and {b} in B: no difference can be told"
        if lead.differs:
            h1 = f"K3 KL {'falls' if tone == 'good' else 'rises'} from {a} to {b} nats per token"
            interval = f"{say(lead.ratio)} of A's" if lead.ratio and lead.ratio.known else ""
            sev = "Better in B:" if tone == "good" else "Worse in B:"
    if wrong := bugs(summary, found):
        sev, h1 = "Bug in one run:" if len(wrong) == 1 else "Bug in both:", ": ".join(wrong[0])
        interval, tone, lede = "", "bad", f"Mend it before the runs are compared. {lede}"
    names = [prefix + name for name in FIRST_GAP if prefix + name in by_name]
    names += [one.name for one in found.contrasts if one.differs and one.name not in names]
    lacking = "; ".join(f"{what}: {why}" for what, why in found.needs.items())
    return Opening(
        h1,
        tone,
        lede,
        sev,
        interval,
        cautions=(*found.notes, *((f"Cannot be compared: {lacking}.",) if lacking else ())),
        lead="A → B, and how B stands to A; a number differs where its corrected p-value says so.",
        facts=tuple(_contrast(by_name[name]) for name in names[:TILES]),
        pictures=(
            *(
                one
                for axis, places in summary.by.items()
                if axis in found.b.by and (one := _both(axis, places, found.b.by[axis]))
            ),
            *(
                _shapes(name, one, other, found.contrasts)
                for name, one in summary.histograms.items()
                if one.counts and (other := found.b.histograms.get(name)) and other.counts
            ),
        ),
    )


def _judged(one: Contrast | None, prefix: str) -> Tone | None:
    """Return whether B is better (good) or worse (bad) than A; None where that cannot be said."""
    if one is None or not one.differs or one.a.value is None or one.b.value is None:
        return None
    way = worse(prefix, one.name.removeprefix(prefix))
    if way.sign == "either":
        return None
    a, b = (abs(v - way.target) if way.sign == "away" else v for v in (one.a.value, one.b.value))
    return "good" if (b > a) == (way.sign == "lower") else "bad"


def _contrast(one: Contrast) -> Fact:
    prefix, dot, name = one.name.rpartition(".")
    tone = _judged(one, prefix + dot)
    band = {True: "differs", False: "not told apart", None: "not tested"}[one.differs]
    band = {"good": "better", "bad": "worse"}.get(tone or "", band)
    value = f"{value_or_dash(one.a)} → {value_or_dash(one.b)}"
    below = one.reason if one.differs is None else below_0(name, one.b) or below_0(name, one.a)
    return Fact(LABELS.get(name, name), value, one.effect, band, tone, below, one.name)


def _both(axis: str, a: Location, b: Location) -> Picture | None:
    """Return K3 of both runs at the places that either has."""
    points = [
        {place.key: place.metrics["k3"] for place in one.places if "k3" in place.metrics} for one in (a, b)
    ]
    keys = list(dict.fromkeys([*points[0], *points[1]]))
    if axis == "step" and all(key.lstrip("-").isdecimal() for key in keys):
        keys.sort(key=int)
    if len(keys) < 2 or not all(points):
        return None
    ours, theirs = ([some.get(key) for key in keys] for some in points)
    pairs = [
        (x.interval, y.interval)
        for x, y in zip(ours, theirs, strict=True)
        if x and y and x.interval and y.interval
    ]
    lower, higher = sum(y[1] < x[0] for x, y in pairs), sum(x[1] < y[0] for x, y in pairs)
    title = f"K3 by {a.title}: the intervals of A and B overlap at all {len(pairs)} places both have"
    if lower or higher:
        side, many = ("below", lower) if lower >= higher else ("above", higher)
        title = f"K3 of B lies {side} A's at {many} of {len(pairs)} places, by {a.title}"
    layers = (at_places("A", ours, "blue"), at_places("B", theirs, "orange"))
    panel = Panel(a.title, "K3 KL, nats per token (log)", layers, y_scale="log", names=keys)
    telling = bool(lower or higher) and len(pairs) > 1
    sub = "With 95% intervals, each of one run alone."
    return Picture(f"runs-{axis}", "", title, sub, (panel,), telling=telling)


def _shapes(name: str, a: Histogram, b: Histogram, contrasts: Sequence[Contrast]) -> Picture:
    layers = [
        Layer(run, [(low + high) / 2 for low, high in pairwise(one.edges)], _density(one), SERIES[i])
        for i, (run, one) in enumerate((("A", a), ("B", b)))
    ]
    off = next((one for one in contrasts if one.name == name.replace("log_ratio", "f_2")), None)
    title = _capital(a.title)
    if off is not None and name.endswith("log_ratio"):
        pair, ends = a.title.partition(": ")[2] or a.title, (value_or_dash(off.a), value_or_dash(off.b))
        title = f"{ends[0]} of A's tokens and {ends[1]} of B's are off by more than 2×, {pair}"
    panel = Panel(f"Δ, {a.unit}", f"density, 1/{a.unit} (log)", layers, y_scale="log")
    sub = "Share of the tokens in each bin, divided by its width."
    return Picture(f"runs-{name}", "", title, sub, (panel,), telling=bool(off and off.differs))


def _density(one: Histogram) -> Values:
    whole = sum(one.counts) or 1.0
    bins = zip(pairwise(one.edges), one.counts, strict=True)
    return [n / whole / (b - a) or None if b > a else None for (a, b), n in bins]


# ---------------------------------------------------------------- one preset at many thresholds


def _sweep(found: Sweep) -> Opening:
    window, name = found.window, kept_metric(found)
    point = next((one for one in found.points if one.own), found.points[0])
    point = window.point if window else point
    at, goes, ends = f"{point.threshold:.7g}", change(found), (found.points[0], found.points[-1])
    what, of = ("an ESS of ", "over tokens") if name == "ess_tokens" else ("", "of the tokens")
    value, interval = written(point.metrics.get(name, Number()))
    h1 = f"{found.preset} at {at} keeps {what}{value} {of}"
    where = f"at the preset's own {at}" if point.own else f"at {at}"
    if window:
        h1, interval = window_text(found, window)[0], f"asked: {say_value(window.asked, 'fraction')}"
        where = "within these bounds"
    lede = f"{_capital(goes)} The bound is on {found.statistic} of each {found.unit}.".strip()
    facts = tuple(
        Fact(
            _capital(COLUMNS[key][1]),
            *written(point.metrics[key].model_copy(update={"note": None})),
            below=" → ".join(value_or_dash(one.metrics.get(key)) for one in ends) if goes else "",
            key=key,
            curve=[one.metrics.get(key, Number()).value for one in found.points],
        )
        for key in columns(found)
        if point.metrics.get(key, Number()).known
    )
    return Opening(
        h1,
        "warn" if found.remarks else "info",
        lede,
        interval=interval,
        cautions=tuple(found.remarks),
        lead=f"{found.preset} {where}{'; the small curves run over all thresholds' if goes else ''}.",
        facts=facts[:TILES],
        pictures=tuple(_of_sweep(found)),
        config=(f"For {window.trainer}", window.config) if window and window.config else ("", ""),
    )


def change(found: Sweep) -> str:
    """Say how what is kept changes from the first threshold to the last; empty if there is only one."""
    ends, name = (found.points[0], found.points[-1]), kept_metric(found)
    if len(found.points) == 1:
        return ""
    goes = (f"{value_or_dash(one.metrics.get(name))} at {one.threshold:.7g}" for one in ends)
    between = "" if "." in found.which else ", a window [1/b, b],"
    return f"over the thresholds b of {found.which}{between} it goes from {' to '.join(goes)}."


def _of_sweep(found: Sweep) -> Iterator[Picture]:
    names = [label(one).removesuffix(" ←") for one in found.points]
    own = [(float(i), "as it stands") for i, one in enumerate(found.points) if one.own]
    panel = partial(
        Panel, f"threshold b of {found.which}", names=names, percent=True, y_range=(0, None), uprights=own
    )
    shares = [name for name in columns(found) if name != "loss_scale_kept" and "length" not in name]
    layers = [
        at_places(COLUMNS[key][1], [one.metrics.get(key) for one in found.points], SERIES[i])
        for i, key in enumerate(shares)
    ]
    first = layers[0].y if layers else [None] * len(names)
    known = [(name, y) for name, y in zip(names, first, strict=True) if y is not None]
    if known and len(names) > 1:
        some = (known[0], known[len(known) // 2], known[-1])
        goes = ", ".join(f"{rounded(y, 'share')} at {name}" for name, y in some)
        title = f"{_capital(layers[0].name)}: {goes}"
        yield Picture("sweep", "", title, "With 95% intervals.", (panel("share", layers),))
    if any(one.metrics[key].value != 1 for one in found.points for key in LENGTHS if key in one.metrics):
        yield _by_length(found, names, panel)


def _by_length(found: Sweep, names: Sequence[str], panel: Any) -> Picture:
    own, telling = next((one for one in found.points if one.own), None), False
    title = f"What is kept of short and long responses at {'each threshold' if len(names) > 1 else names[0]}"
    if own is not None:
        shortest, longest = own.metrics.get("kept_length_q1"), own.metrics.get("kept_length_q4")
        telling = _spread(shortest, longest) > 0.05
        title = f"Short and long responses are kept alike at the preset's own {own.threshold:.7g}"
        if telling:
            title = (
                f"The preset's own {own.threshold:.7g} keeps {value_or_dash(shortest)} of the shortest "
                f"quarter and {value_or_dash(longest)} of the longest"
            )
    lines = [
        at_places(text, [one.metrics.get(key) for one in found.points], SERIES[i])
        for i, (key, text) in enumerate(LENGTHS.items())
    ]
    if len(names) == 1:
        kept = [found.points[0].metrics.get(key) for key in LENGTHS]
        lines = [at_places("", kept, SERIES[0], "points")]
        panel = partial(Panel, "response length", names=[*LENGTHS.values()], percent=True, y_range=(0, None))
    lengths = "; ".join(f"{a}: {b} tokens" for a, b in zip(LENGTHS.values(), found.quartiles, strict=False))
    sub = f"Kept tokens by quarter of the responses by length. {lengths}."
    return Picture("sweep-length", "", title, sub, (panel("kept share", lines),), telling=telling)


# ---------------------------------------------------------------- gates


def _gates(summary: Summary) -> Opening:
    verdicts = sorted(summary.gates, key=gates.weight)
    label_, tone = gates.SAID[outcome(verdicts)]
    failed, unknown = (
        [one for one in verdicts if one.passed is passed and one.level == "error"] for passed in (False, None)
    )
    many, h1 = len(verdicts), gates.headline(verdicts)
    if failed:
        lede = " ".join([f"{failed[0].reason}.", *(f"{gates.explained(one)}." for one in failed[1:3])])
    else:
        lede = " ".join(f"{gates.explained(one)}." for one in unknown[1:3])
        lede = lede or " ".join(map(_capital, gates.opened(verdicts)))
    lead = "Each bound with the value found and its 95% interval."
    return Opening(
        h1,
        tone,
        lede,
        f"{label_}:",
        lead=lead + (f" The {TILES} that matter most of {many}." if many > TILES else ""),
        facts=tuple(map(_bound, verdicts[:TILES])),
        pictures=(
            *_over(verdicts),
            *(one for verdict in verdicts if (one := _stepwise(summary, verdict))),
        ),
    )


def _bound(one: GateVerdict) -> Fact:
    tone: Tone = "info" if one.passed is None or one.open else "good" if one.passed else "bad"
    value, interval = written(gates.found(one)) if gates.found(one).known else ("–", one.reason)
    value = plain(one.diagnosis) if one.diagnosis else value
    return Fact(gates.title(one), value, interval, gates.word(one), tone, gates.bound(one), one.where)


def _beyond(value: float | None, one: GateVerdict) -> bool:
    return value is not None and value != one.limit and (value > one.limit) == (one.bound == "max")


def _over(verdicts: Sequence[GateVerdict]) -> Iterator[Picture]:
    """Yield values over their bounds, where both are positive."""
    for bound, side, wrong in (("max", "at most", "above"), ("min", "at least", "below")):
        some = [one for one in verdicts if one.bound == bound and one.limit > 0 and (one.value or 0) > 0]
        if not (some := some[:MOST]):
            continue
        ratios = []
        for one in some:
            low, high = one.interval or (0.0, 0.0)
            ends = (max(low, 0.0) / one.limit, high / one.limit) if one.interval else None
            ratios.append(Number(value=(one.value or 0) / one.limit, interval=ends))
        title, telling = f"No value lies {wrong} a bound of {side}", any(_beyond(o.value, o) for o in some)
        if telling:
            values = [one.value or 0 for one in ratios]
            at = values.index(max(values) if bound == "max" else min(values))
            title = (
                f"{gates.title(some[at])} is {rounded(values[at])} times its bound, {gates.bound(some[at])}"
            )
        panel = Panel(
            "",
            f"value over its bound, {side} 1 (log)",
            (at_places("", ratios, "blue", "points"),),
            y_scale="log",
            names=[*map(gates.title, some)],
            levels=((1.0, "bound"),),
        )
        yield Picture(f"bounds-{bound}", "", title, "With 95% intervals.", (panel,), telling=telling)


def _stepwise(summary: Summary, one: GateVerdict) -> Picture | None:
    """Return a number by training step against its bound."""
    steps, (step, _, name) = summary.charts.steps, one.name.partition("step:")
    series = steps.series.get(name) if steps and not step else None
    if steps is None or series is None or len(steps.first) < 2 or one.bound == "within":
        return None
    beyond = [at for at, y in zip(steps.first, series.values, strict=True) if _beyond(y, one)]
    wrong = "above" if one.bound == "max" else "below"
    where = f"at {len(beyond)} of {len(steps.first)} steps"
    title = f"{name} lies {wrong} {say_limit(one.limit, series.unit)} {where}"
    title += f", first at step {beyond[0]}" if beyond else ""
    share = series.unit in ("fraction", "share")
    log = not share and all(y is None or y > 0 for y in series.values)
    panel = Panel(
        "training step",
        name + (" (log)" if log else ""),
        (Layer("", steps.first, series.values, "blue", low=series.low, high=series.high),),
        y_scale="log" if log else "linear",
        percent=share,
        levels=((one.limit, f"bound {gates.bound(one)}"),),
    )
    sub = "Means of each training step, with 95% intervals."
    return Picture(f"step-{name}-{one.bound}", "", title, sub, (panel,), telling=bool(beyond))
