"""What opens the page of a comparison, a sweep or a gate: the answer in a sentence, tiles, and charts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import PurePath
from typing import Any

from offpol_diag.bands import Tone
from offpol_diag.directions import FIRST_GAP, GAP_PREFIXES, worse
from offpol_diag.gate import outcome
from offpol_diag.gate.diagnosis import plain
from offpol_diag.numerals import count, counted, say, say_value, written
from offpol_diag.report.picture import Colour, Layer, Panel, Picture, Values
from offpol_diag.report.sections import gate as gates
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.runs import named
from offpol_diag.report.sections.sweep import QUARTERS, distinct, kept_metric, label, window_text
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
NAMES = {
    "tokens_kept": "Kept tokens",
    "sequences_kept": "Kept sequences",
    "ess_tokens": "ESS, tokens",
    "ess_sequences": "ESS, sequences",
    "acted": "Bounded weights",
    "kappa": "κ, mean weight",
    "fresh_kept": "Kept at lag 0",
    "chi2_token": "χ², tokens",
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


def _value(number: Number | None) -> str:
    return written(number).value if number and _known(number) else "–"


def _two(value: float | None, unit: str = "") -> str:
    return say(Number(value=value, unit=unit))


def _known(number: Number | None) -> bool:
    return number is not None and (number.value is not None or number.log10 is not None)


def _ends(numbers: Iterable[Number | None], end: int) -> Values:
    return tuple(one.interval[end] if one and one.interval else None for one in numbers)


def _layer(name: str, numbers: Sequence[Number | None], colour: Colour, kind: Any = "line") -> Layer:
    values = tuple(one.value if one else None for one in numbers)
    x = tuple(map(float, range(len(numbers))))
    return Layer(name, x, values, colour, kind, _ends(numbers, 0), _ends(numbers, 1))


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


# ---------------------------------------------------------------- presets side by side


def _presets(summary: Summary, found: Comparison) -> Opening:
    able = {name: one for name, one in summary.presets.items() if not one.needs}
    lacking = [f"{name} needs {_listed(one.needs)}" for name, one in summary.presets.items() if one.needs]
    cautions = (f"Not computed: {'; '.join(lacking[:5])}.",) if lacking else ()
    if not able:
        return Opening("None of these presets can be computed from this dump", "warn", "", cautions=cautions)
    ranked = sorted(able, key=lambda name: -(_ess(able[name]).value or 0.0))
    shown = [name for name in ranked if not able[name].same_as][: MOST if len(able) > TILES else TILES]
    facts = tuple(_fact(name, able[name], found, is_bug(summary)) for name in shown[:TILES])
    pictures = _of_presets({name: able[name] for name in shown}, found)
    lead = f"ESS of tokens after each correction, of {counted(len(able), 'preset')}; 95% intervals."
    if is_bug(summary):
        text = summary.diagnosis.headline if summary.diagnosis else ""
        return Opening(
            text, "bad", "Nothing is ranked before the fix.", "Bug:", "", cautions, lead, facts, pictures
        )
    first = able[ranked[0]]
    best, losing = (
        found.better.get("ess_tokens", ""),
        max(able, key=lambda name: _share(able[name], "tokens_rejected")),
    )
    lost = able[losing].metrics.get("tokens_rejected", Number())
    said = f"{losing} rejects most: {say(lost)} of the tokens." if (lost.value or 0) > 0.001 else ""
    if best in able and len(able) > 1:
        other = next(name for name in ranked if name != best)
        title, interval = written(_ess(able[best]))
        lede = f"Next is {other} with {say(_ess(able[other]))}"
        lede += (
            "; paired, the difference excludes 0. " if _overlap(_ess(able[best]), _ess(able[other])) else ". "
        )
        lede += said
        return Opening(
            f"{best} keeps the largest ESS of tokens: {title}",
            "good",
            lede,
            "",
            interval,
            cautions,
            lead,
            facts,
            pictures,
        )
    tied = [name for name in ranked if _overlap(_ess(able[name]), _ess(first))] if len(able) > 1 else ranked
    title, interval = written(_ess(first))
    head = f"{tied[0]} keeps an ESS of tokens of {title}"
    if len(tied) > 1:
        names = tied if len(tied) <= 3 else [*tied[:2], f"{len(tied) - 2} more"]
        head = f"{_listed(names)} tie for the largest ESS of tokens: {title}"
    lede = f"Their intervals overlap, so the simplest is preferred. {said}" if len(tied) > 1 else first.method
    return Opening(head, "info", lede, "", interval, cautions, lead, facts, pictures)


def _ess(one: PresetResult) -> Number:
    return one.metrics.get("ess_tokens", Number())


def _share(one: PresetResult, name: str) -> float:
    return one.metrics.get(name, Number()).value or 0.0


def _overlap(a: Number, b: Number) -> bool:
    if not a.interval or not b.interval:
        return a.value == b.value
    return a.interval[0] <= b.interval[1] and b.interval[0] <= a.interval[1]


def _fact(name: str, one: PresetResult, found: Comparison, bug: bool) -> Fact:
    value, interval = written(_ess(one).model_copy(update={"note": None}))
    best = found.better.get("ess_tokens") == name and not bug
    cut, kept = one.metrics.get("truncated_high"), 1 - _share(one, "tokens_rejected")
    below = f"keeps {_two(kept, 'share')}" + (f", truncates {_value(cut)}" if _known(cut) else "")
    band = "largest" if best else "reference" if name == found.against else ""
    return Fact(name, value, interval, band, "good" if best else None, below, "")


def _of_presets(shown: dict[str, PresetResult], found: Comparison) -> tuple[Picture, ...]:
    names = tuple(shown)
    pictures: list[Picture] = []
    if len(names) > 1:
        ess = [_ess(one) for one in shown.values()]
        rejected = [one.metrics.get("tokens_rejected") for one in shown.values()]
        kept = tuple(None if one is None or one.value is None else 1 - one.value for one in rejected)
        x = tuple(map(float, range(len(names))))
        bars = Layer("", x, kept, "orange", "bars", width=0.7)
        ends = [f"{name} {_value(_ess(shown[name]))}" for name in (names[0], names[-1])]
        title = f"ESS of tokens runs from {ends[0]} to {ends[1]}"
        panels = (
            Panel(
                "",
                "ESS of tokens",
                (_layer("", ess, "teal", "points"),),
                names=names,
                percent=True,
                y_range=(0, 1.05),
            ),
            Panel("", "kept share of the tokens", (bars,), names=names, percent=True, y_range=(0, 1.05)),
        )
        sub = "After the correction, with 95% intervals; a token that is kept may still be truncated."
        pictures.append(Picture("ess", "", title, sub, panels, wide=True))
    others = [name for name in names if name in found.differences]
    apart = [found.differences[name].get("ess_tokens") for name in others]
    if sum(_known(one) for one in apart) > 0:
        sure = [one for one in apart if one and one.interval and (one.interval[0] > 0 or one.interval[1] < 0)]
        title = (
            f"{len(sure)} of {counted(len(others), 'preset')} differ from {found.against} in ESS of tokens"
        )
        panel = Panel(
            "",
            "difference of ESS",
            (_layer("", apart, "blue", "points"),),
            names=tuple(others),
            percent=True,
            levels=((0.0, found.against),),
        )
        sub = (
            "Paired: both presets on the same bootstrap replicates, with 95% intervals, in percentage points."
        )
        pictures.append(Picture("differences", "", title, sub, (panel,), telling=bool(sure)))
    parts = (
        ("kept_length_q1", "shortest quarter"),
        ("kept_length_q2", "second"),
        ("kept_length_q3", "third"),
        ("kept_length_q4", "longest quarter"),
    )
    kept_by = {name: [one.metrics.get(key) for key, _ in parts] for name, one in shown.items()}
    spread = {
        name: abs((some[0].value or 0) - (some[-1].value or 0))
        for name, some in kept_by.items()
        if some[0] is not None and some[-1] is not None
    }
    if spread:
        most = max(spread, key=lambda name: spread[name])
        first, last = (_value(kept_by[most][end]) for end in (0, -1))
        telling = spread[most] > 0.05
        title = f"{most} keeps {first} of the shortest responses' tokens and {last} of the longest's"
        title = title if telling else "Short and long responses are kept alike"
        order = sorted(spread, key=lambda name: -spread[name])[: len(SERIES)]
        layers = tuple(_layer(name, kept_by[name], SERIES[i]) for i, name in enumerate(order))
        panel = Panel(
            "response length",
            "kept share of the tokens",
            layers,
            names=tuple(name for _, name in parts),
            percent=True,
            y_range=(0, 1.05),
        )
        pictures.append(
            Picture("lengths", "", title, "By quartile of response length.", (panel,), telling=telling)
        )
    return tuple(pictures)


# ---------------------------------------------------------------- run A against run B


def _runs(summary: Summary, found: Against) -> Opening:
    prefix = next((one for one in GAP_PREFIXES if any(c.name == f"{one}k3" for c in found.contrasts)), "")
    by_name = {one.name: one for one in found.contrasts}
    bugs = [
        f"{run}: {one.headline}"
        for run, one in (("A", summary.diagnosis), ("B", found.b.diagnosis))
        if one is not None and one.verdict == "bug"
    ]
    lead = by_name.get(f"{prefix}k3")
    differ = f"{count(found.differing)} of {count(found.tested)} metrics differ"
    first, second = (PurePath(named(one)).name for one in (summary.dump, found.b.dump))
    lede = f"A is {first}, B is {second}. {differ} ({found.correction}). "
    lede += found.pairing.sentence
    sev, h1, tone = "", found.headline, _judged(lead, prefix) or "info"
    interval = ""
    if lead is not None and _known(lead.a) and _known(lead.b):
        a, b = _value(lead.a), _value(lead.b)
        h1 = f"K3 KL is {a} nats per token in A and {b} in B: no difference can be told"
        if lead.differs:
            h1 = f"K3 KL {'falls' if tone == 'good' else 'rises'} from {a} to {b} nats per token"
            interval = f"{say(lead.ratio)} of A's" if lead.ratio and _known(lead.ratio) else ""
            sev = "Better in B:" if tone == "good" else "Worse in B:"
    if bugs:
        sev, h1, interval, tone = "Bug in one run:" if len(bugs) == 1 else "Bug in both:", bugs[0], "", "bad"
        lede = f"Mend it before the runs are compared. {lede}"
    names = [prefix + name for name in FIRST_GAP if prefix + name in by_name]
    rest = [one.name for one in found.contrasts if one.differs and one.name not in names]
    facts = tuple(_contrast(by_name[name]) for name in [*names, *rest][:TILES])
    lacking = "; ".join(f"{what}: {why}" for what, why in found.needs.items())
    cautions = (*found.notes, *((f"Cannot be compared: {lacking}.",) if lacking else ()))
    tiles = "A → B, and how B stands to A; a number differs where its corrected p-value says so."
    return Opening(h1, tone, lede, sev, interval, cautions, tiles, facts, _of_runs(summary, found))


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
    prefix = one.name[: -len(one.name.rpartition(".")[2])]
    name = one.name.removeprefix(prefix)
    band = {True: "differs", False: "not told apart", None: "not tested"}[one.differs]
    tone = _judged(one, prefix)
    if tone:
        band = "better" if tone == "good" else "worse"
    value = f"{_value(one.a)} → {_value(one.b)}"
    below = one.reason if one.differs is None else ""
    return Fact(LABELS.get(name, name), value, one.effect, band, tone, below, one.name)


def _of_runs(summary: Summary, found: Against) -> tuple[Picture, ...]:
    curves = (_both(axis, one, found.b.by[axis]) for axis, one in summary.by.items() if axis in found.b.by)
    bars = [
        _shapes(name, one, found.b.histograms[name], found.contrasts)
        for name, one in summary.histograms.items()
        if name in found.b.histograms and one.counts and found.b.histograms[name].counts
    ]
    return (*(one for one in curves if one), *bars)


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
    pairs = [(x, y) for x, y in zip(ours, theirs, strict=True) if x and y and x.interval and y.interval]
    lower = sum(y.interval[1] < x.interval[0] for x, y in pairs if x.interval and y.interval)
    higher = sum(x.interval[1] < y.interval[0] for x, y in pairs if x.interval and y.interval)
    title = f"K3 by {a.title}: the intervals of A and B overlap at all {len(pairs)} places both have"
    if max(lower, higher):
        side, many = ("below", lower) if lower >= higher else ("above", higher)
        title = f"K3 of B lies {side} A's at {many} of {len(pairs)} places, by {a.title}"
    layers = (_layer("A", ours, "blue"), _layer("B", theirs, "orange"))
    panel = Panel(a.title, "K3 KL, nats per token (log)", layers, y_scale="log", names=tuple(keys))
    return Picture(
        f"runs-{axis}",
        "",
        title,
        "With 95% intervals, each of one run alone.",
        (panel,),
        telling=max(lower, higher) > 0 and len(pairs) > 1,
    )


def _shapes(name: str, a: Histogram, b: Histogram, contrasts: Sequence[Contrast]) -> Picture:
    layers = tuple(
        Layer(run, tuple((low + high) / 2 for low, high in pairwise(one.edges)), _density(one), SERIES[i])
        for i, (run, one) in enumerate((("A", a), ("B", b)))
    )
    off = next((one for one in contrasts if one.name == name.replace("log_ratio", "f_2")), None)
    title = f"{a.title[:1].upper()}{a.title[1:]}"
    if off is not None and name.endswith("log_ratio"):
        pair = a.title.partition(": ")[2] or a.title
        title = f"{_value(off.a)} of A's tokens and {_value(off.b)} of B's are off by more than 2×, {pair}"
    panel = Panel(f"Δ, {a.unit}", f"density, 1/{a.unit} (log)", layers, y_scale="log")
    sub = "Share of the tokens in each bin, divided by its width."
    return Picture(f"runs-{name}", "", title, sub, (panel,), telling=bool(off and off.differs))


def _density(one: Histogram) -> Values:
    whole = sum(one.counts) or 1.0
    return tuple(
        n / whole / (b - a) or None if b > a else None
        for (a, b), n in zip(pairwise(one.edges), one.counts, strict=True)
    )


# ---------------------------------------------------------------- one preset at many thresholds


def _sweep(found: Sweep) -> Opening:
    point = (
        found.window.point
        if found.window
        else next((one for one in found.points if one.own), found.points[0])
    )
    name = kept_metric(found)
    what = {"ess_tokens": "an ESS of", "tokens_kept": "", "sequences_kept": ""}[name]
    of = {"ess_tokens": "over tokens", "tokens_kept": "of the tokens", "sequences_kept": "of the sequences"}[
        name
    ]
    value, interval = written(point.metrics.get(name, Number()))
    at = f"{point.threshold:.7g}"
    if found.window:
        h1, interval = (
            f"{window_text(found, found.window)[0]}",
            f"asked: {say_value(found.window.asked, 'fraction')}",
        )
    else:
        h1 = f"{found.preset} at {at} keeps {f'{what} ' if what else ''}{value} {of}"
    ends = (
        f"{_value(one.metrics.get(name))} at {one.threshold:.7g}"
        for one in (found.points[0], found.points[-1])
    )
    window = "" if "." in found.which else ", a window [1/b, b]"
    lede = f"Over the thresholds b of {found.which}{window}, it goes from {' to '.join(ends)}."
    lede += f" The bound is on {found.statistic} of each {found.unit}."
    facts = tuple(
        Fact(
            head,
            *written(point.metrics[key].model_copy(update={"note": None})),
            below=" → ".join(_value(one.metrics.get(key)) for one in (found.points[0], found.points[-1])),
            key=key,
            curve=tuple(one.metrics.get(key, Number()).value for one in found.points),
        )
        for key, head in NAMES.items()
        if _known(point.metrics.get(key)) and any(_value(one.metrics.get(key)) != "0" for one in found.points)
    )
    where = (
        "within these bounds" if found.window else f"at the preset's own {at}" if point.own else f"at {at}"
    )
    lead = f"{found.preset} {where}; the small curves run over all thresholds."
    config = (
        (f"For {found.window.trainer}", found.window.config)
        if found.window and found.window.config
        else ("", "")
    )
    tone: Tone = "warn" if any(mark in point.marks for mark in ("length", "floor")) else "info"
    return Opening(
        h1, tone, lede, "", interval, tuple(found.remarks), lead, facts[:TILES], _of_sweep(found), config
    )


def _of_sweep(found: Sweep) -> tuple[Picture, ...]:
    names = tuple(label(one).removesuffix(" ←") for one in found.points)
    across = f"threshold b of {found.which}"
    own = tuple((float(i), "as it stands") for i, one in enumerate(found.points) if one.own)
    layers = tuple(
        _layer(text, [one.metrics.get(key) for one in found.points], SERIES[i])
        for i, (key, text, _) in enumerate(distinct(found))
    )
    pictures: list[Picture] = []
    if layers:
        first = layers[0]
        known = [(name, y) for name, y in zip(names, first.y, strict=True) if y is not None]
        title = f"{first.name.capitalize()}: " + ", ".join(
            f"{_two(y, 'share')} at {name}" for name, y in (known[0], known[len(known) // 2], known[-1])
        )
        panel = Panel(across, "share", layers, names=names, percent=True, y_range=(0, None), uprights=own)
        pictures.append(Picture("sweep", "", title, "With 95% intervals.", (panel,)))
    name = kept_metric(found)
    quarters = [
        [one.quartiles[at].get(name) for one in found.points]
        for at in range(len(QUARTERS))
        if found.points[0].quartiles
    ]
    if quarters:
        spread = [
            abs((a.value or 0) - (b.value or 0)) if a and b else 0.0
            for a, b in zip(quarters[0], quarters[-1], strict=True)
        ]
        most = spread.index(max(spread))
        telling = spread[most] > 0.05
        title = "Short and long responses are kept alike at every threshold"
        if telling:
            shortest, longest = _value(quarters[0][most]), _value(quarters[-1][most])
            title = (
                f"At {names[most]}, {shortest} is kept of the shortest quarter and {longest} of the longest"
            )
        lines = tuple(
            _layer(text, some, SERIES[i])
            for i, (text, some) in enumerate(zip(QUARTERS, quarters, strict=True))
        )
        lines = tuple(Layer(one.name, one.x, one.y, one.colour) for one in lines)
        panel = Panel(
            across,
            {"ess_tokens": "ESS of tokens"}.get(name, "kept share"),
            lines,
            names=names,
            percent=True,
            y_range=(0, None),
            uprights=own,
        )
        lengths = "; ".join(f"{a}: {b} tokens" for a, b in zip(QUARTERS, found.quartiles, strict=True))
        pictures.append(
            Picture(
                "sweep-length", "", title, f"By quartile of length. {lengths}.", (panel,), telling=telling
            )
        )
    if found.window and found.window.predicted:
        rows = found.window.predicted
        x = tuple(one.length for one in rows)
        kept = [one.kept for one in rows]
        seen = tuple(one.observed.value if one.observed else None for one in rows)
        lines = (
            Layer(
                "predicted",
                x,
                tuple(one.value for one in kept),
                "blue",
                low=_ends(kept, 0),
                high=_ends(kept, 1),
            ),
            Layer("seen", x, seen, "orange", "points", at=0),
        )
        panel = Panel(
            "response length, tokens (log)", "kept share", lines, "log", percent=True, y_range=(0, 1.05)
        )
        ends = [
            f"{_value(one.kept)} of responses of {count(round(one.length))}" for one in (rows[0], rows[-1])
        ]
        title = f"The same bounds keep {' and '.join(ends)} tokens"
        sub = "Predicted from how the spread of log r falls with length, with 95% intervals."
        pictures.append(Picture("sweep-predicted", "", title, sub, (panel,)))
    return tuple(pictures)


# ---------------------------------------------------------------- gates


def _gates(summary: Summary) -> Opening:
    verdicts = sorted(summary.gates or [], key=gates.weight)
    label_, tone = gates.SAID[outcome(verdicts)]
    failed = [one for one in verdicts if one.passed is False and one.level == "error"]
    unknown = [one for one in verdicts if one.passed is None and one.level == "error"]
    many = len(verdicts)
    h1 = f"all {many} bounds hold" if many > 1 else "the bound holds"
    if failed:
        h1 = (
            f"{len(failed)} of {many} bounds {'fails' if len(failed) == 1 else 'fail'}"
            if many > 1
            else "the bound fails"
        )
    elif unknown:
        h1 = f"{len(unknown)} of {counted(many, 'bound')} could not be judged"
    h1 += f", {len(unknown)} could not be judged" if failed and unknown else ""
    lede = " ".join(
        f"{gates.title(one)} is {say(gates.found(one))}; the bound is {gates.bound(one)}."
        if one.bound != "diagnosis"
        else f"The diagnosis: {one.reason}."
        for one in failed[:3]
    )
    if not failed:
        lede = (
            " ".join(f"{gates.title(one)}: {one.reason}." for one in unknown[:3])
            or gates.tally(verdicts) + "."
        )
    facts = tuple(_bound(one) for one in verdicts[:TILES])
    pictures = (*_over(verdicts), *(one for verdict in verdicts if (one := _stepwise(summary, verdict))))
    lead = "Each bound with the value found and its 95% interval." + (
        f" The {TILES} that matter most of {many}." if many > TILES else ""
    )
    return Opening(h1, tone, lede, f"{label_}:", "", (), lead, facts, pictures)


def _bound(one: GateVerdict) -> Fact:
    tone: Tone = "info" if one.passed is None else "good" if one.passed else "bad"
    value, interval = written(gates.found(one)) if _known(gates.found(one)) else ("–", one.reason)
    value = plain(one.diagnosis) if one.diagnosis else value
    return Fact(gates.title(one), value, interval, gates.word(one), tone, gates.bound(one), one.where)


def _over(verdicts: Sequence[GateVerdict]) -> tuple[Picture, ...]:
    """Return values over their bounds, where both are positive."""
    pictures = []
    for bound, side, wrong in (("max", "at most", "above"), ("min", "at least", "below")):
        some = [one for one in verdicts if one.bound == bound and one.limit > 0 and (one.value or 0) > 0][
            :MOST
        ]
        if not some:
            continue
        ratios = [
            Number(
                value=(one.value or 0) / one.limit,
                interval=(max(one.interval[0], 0.0) / one.limit, one.interval[1] / one.limit)
                if one.interval
                else None,
            )
            for one in some
        ]
        beyond = [
            one
            for one in some
            if ((one.value or 0) > one.limit) == (bound == "max") and one.value != one.limit
        ]
        worst = (max if bound == "max" else min)(
            zip(ratios, some, strict=True), key=lambda pair: pair[0].value or 0
        )
        title = f"No value lies {wrong} a bound of {side}"
        if beyond:
            times = _two(worst[0].value)
            title = f"{gates.title(worst[1])} is {times} times its bound, {gates.bound(worst[1])}"
        panel = Panel(
            "",
            f"value over its bound, {side} 1 (log)",
            (_layer("", ratios, "blue", "points"),),
            y_scale="log",
            names=tuple(map(gates.title, some)),
            levels=((1.0, "bound"),),
        )
        pictures.append(
            Picture(f"bounds-{bound}", "", title, "With 95% intervals.", (panel,), telling=bool(beyond))
        )
    return tuple(pictures)


def _stepwise(summary: Summary, one: GateVerdict) -> Picture | None:
    """Return a number by training step against its bound."""
    steps, name = summary.charts.steps, one.name.removeprefix("step:")
    if (
        steps is None
        or name == one.name
        or name not in steps.series
        or len(steps.first) < 2
        or one.bound == "within"
    ):
        return None
    series = steps.series[name]
    beyond = [
        at
        for at, y in zip(steps.first, series.values, strict=True)
        if y is not None and y != one.limit and (y > one.limit) == (one.bound == "max")
    ]
    wrong = "above" if one.bound == "max" else "below"
    title = f"{name} lies {wrong} {say_value(one.limit)} at {len(beyond)} of {len(steps.first)} steps"
    title += f", first at step {beyond[0]}" if beyond else ""
    share = series.unit in ("fraction", "share")
    positive = all(y is None or y > 0 for y in series.values)
    layer = Layer(
        "",
        tuple(map(float, steps.first)),
        tuple(series.values),
        "blue",
        low=tuple(series.low),
        high=tuple(series.high),
    )
    panel = Panel(
        "training step",
        name + (" (log)" if positive and not share else ""),
        (layer,),
        y_scale="log" if positive and not share else "linear",
        percent=share,
        levels=((one.limit, f"bound {gates.bound(one)}"),),
    )
    return Picture(
        f"step-{name}-{one.bound}",
        "",
        title,
        "Means of each training step, with 95% intervals.",
        (panel,),
        telling=bool(beyond),
    )
