"""Whether a result holds what must hold: numbers, looked up by name, against limits and an earlier result.

All together: failed if any failed, else could not say if any could not be judged, else passed.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from offpol_diag.errors import PresetError, did_you_mean
from offpol_diag.gate.bounds import (
    GAPS,
    KINDS,
    ORDER,
    Baseline,
    Bound,
    FailOn,
    Gates,
    Kind,
    Name,
    joined,
    split,
)
from offpol_diag.gate.ruling import HIDDEN, Ruling, rule, shown, silence
from offpol_diag.metrics import WATCHED_GAP, WATCHED_PRESET, Worse, worse
from offpol_diag.number import Number, Numbers, finite
from offpol_diag.numerals import FRACTIONS, doubted, told_apart, written
from offpol_diag.presets import catalogue
from offpol_diag.result import Diagnosis, DiagnosisVerdict, GateVerdict, Place, Result, place_of
from offpol_diag.trainers.ours import advice, unlike

Outcome = Literal["passed", "failed", "could not say"]

DIFFER = "tokens_differ"
"""The share of tokens whose log-probs are not equal to the last bit: a count, judged by its value."""
MOST_HINTS, MOST_NAMED, FEWEST = 5, 5, 5
"""Unknown names for which similar ones are sought, which is slow; steps that a reason lists; fewest sequences
of a step for which its interval is used."""


def judged(now: Result, gates: Gates, base: Result | None = None) -> tuple[GateVerdict, ...]:
    """Return all verdicts on the result `now`; `base` is the earlier result."""
    numbers = Lookup(now)
    compared = against(numbers, base, gates.baseline) if base and gates.baseline else ()
    equal = numbers.equal and any(name.number.endswith(DIFFER) for row in gates.bound for name in row.names)
    diagnoses = (verdict for one in gates.diagnosis for verdict in diagnosis(now, one, equal))
    return (*diagnoses, *bounds(numbers, gates.bound), *compared)


def outcome(verdicts: Iterable[GateVerdict]) -> Outcome:
    """Combine verdicts: any failure fails; else, if one was not judged or there is none, "could not say"."""
    said = [verdict.passed for verdict in verdicts]
    if False in said:
        return "failed"
    return "could not say" if None in said or not said else "passed"


def beyond(verdict: GateVerdict) -> bool:
    """Return whether the plain value lies on the wrong side of the bound, whatever its interval.

    A diagnosis that this dump cannot make lies there too.
    """
    value, limit = verdict.value, verdict.limit
    if verdict.bound == "diagnosis":
        return verdict.passed is False or verdict.open
    if value is None:
        return False
    if verdict.bound == "within":
        return abs(value - (verdict.centre or 0.0)) > limit
    return value > limit if verdict.bound == "max" else value < limit


# ---------------------------------------------------------------- looking a number up

Row = tuple[str, Number]
"""A training step (empty: none) and a number, which says why it is unknown."""


class Lookup:
    """The numbers of a result by their names."""

    def __init__(self, summary: Result) -> None:
        self.summary = summary
        self._hints = MOST_HINTS

    def __call__(self, name: Name) -> tuple[list[Row], str]:
        """Return the number, or that of each step; and that some steps are not in the result."""
        return self.at_steps(name.number) if name.by_step else ([("", self.find(name.number))], "")

    @property
    def equal(self) -> bool:
        """Whether the log-probs of every token are equal to the last bit."""
        return self.summary.number(DIFFER).value == 0

    def find(self, name: str) -> Number:
        """Return the number of the whole dump."""
        if name in self.summary.whole:
            return self.summary.whole[name]
        preset, prefix, metric = self.preset_of(name)
        if preset is None:
            return Number(unknown=self._absent(name))
        if needs := self.summary.presets[preset].needs:
            return Number(unknown=f"{prefix} needs {', '.join(needs)}, which the dump lacks")
        numbers = self.summary.preset(preset)
        if metric in numbers:
            return numbers[metric]
        near = advice(metric) or (did_you_mean(metric, list(numbers)) if self._hint() else "")
        return Number(unknown=joined(f'no metric "{metric}" of {prefix}', near))

    def preset(self, name: str) -> str | None:
        """Return the name of a preset given by name or alias, in any spelling that the catalogue accepts."""
        rows, plain = self.summary.presets, catalogue.plain
        alike = [key for key, row in rows.items() if plain(name) in map(plain, (key, *row.aliases))]
        with contextlib.suppress(KeyError, PresetError):
            alike.append(catalogue.load()[name].name)
        return name if name in rows else next((key for key in alike if key in rows), None)

    def preset_of(self, name: str) -> tuple[str | None, str, str]:
        """Return the preset that a number belongs to, how it was named, and its metric."""
        prefix, metric = split(name)
        found = None if name in self.summary.whole else self.preset(prefix)
        return (found, prefix, metric) if found else (None, "", name)

    def at_steps(self, name: str) -> tuple[list[Row], str]:
        """Return the number at each step, unreliable where that of the dump is, and what is missing.

        Metrics by step are those of the first policy gap of the dump.
        """
        axis, whole = self.summary.axes.get("step"), self.find(name)
        chosen = [one for one in self.summary.at("step") if math.isfinite(_number(one.key))]
        if axis is None or not chosen:
            why = "no row of this dump has a step" if axis else "the dump has no column step"
            return [("", Number(unknown=why))], ""
        main, rows = self.summary.prefix, list[Row]()
        preset, _, metric = self.preset_of(name)
        for place in chosen:
            own = place.numbers if preset is None else self._of_preset(preset, place)
            names = (metric, metric.removeprefix(main)) if preset or metric.startswith(main) else ()
            if number := next((own[one] for one in names if one in own), None):
                update: dict[str, Any] = {"interval": None} if place.sequences < FEWEST else {}
                update |= {"note": whole.note} if doubted(whole) else {}
                rows.append((place.key, replace(number, **update)))
        if len(rows) < len(chosen):
            unlisted = f"{name} is not listed by step in this result; gate the dump itself"
            return [("", Number(unknown=(not whole.known and whole.unknown) or unlisted))], ""
        every = len(chosen) + axis.left_out
        return rows, f"only {len(chosen)} of {every} steps are in this result" if len(chosen) < every else ""

    def _of_preset(self, preset: str, place: Place) -> Numbers:
        return self.summary.of(place_of("step", place.key, f"preset/{preset}"))

    def _absent(self, name: str) -> str:
        """Return why the result has no number of this name."""
        own = {key: list(self.summary.preset(key)) for key in self.summary.presets}
        known = [*self.summary.whole, *(f"{key}.{one}" for key, names in own.items() for one in names)]
        metrics = {one for names in own.values() for one in names}
        preset, metric = split(name)
        preset, near = preset if metric in metrics else "", self._hint()
        if preset and near and not did_you_mean(preset, [*own, *GAPS]):
            return (
                f"{preset} is not among the presets of this result; analyze the dump with --presets {preset}"
            )
        return joined(f'no metric "{name}" in this result', advice(name) or did_you_mean(name, known * near))

    def _hint(self) -> bool:
        self._hints -= 1
        return self._hints >= 0


def _number(key: str) -> float:
    try:
        return float(key)
    except ValueError:
        return math.nan


def size(number: Number) -> float:
    """Return the sort key of a number: its value, +∞ if it overflows float64, NaN if it is unknown."""
    if number.value is not None:
        return number.value
    return math.inf if number.log10 is not None else math.nan


# ---------------------------------------------------------------- bounds


def bounds(numbers: Lookup, asked: Sequence[Bound]) -> list[GateVerdict]:
    """Return the verdicts on bounds, in order."""
    rows = [(one, name, kind) for one in asked for name in one.names for kind in KINDS]
    return [_bound(numbers, *row) for row in rows if getattr(row[0], row[2]) is not None]


def _bound(numbers: Lookup, bound: Bound, name: Name, kind: Kind) -> GateVerdict:
    """Judge a number, or that of every step by the worst one; one failed step is enough to fail."""
    rows, missing = numbers(name)
    limit, metric = getattr(bound, kind), name.number.rpartition(".")[2]
    if metric == DIFFER:  # an exact count
        rows = [(key, replace(one, interval=None)) for key, one in rows]
    rulings = [rule(one, kind, limit, HIDDEN.get(metric) == kind) for _, one in rows]
    failed, unsaid = ([at for at, one in enumerate(rulings) if one.passed is said] for said in (False, None))
    opened = [at for at, one in enumerate(rulings) if one.open]
    sign = 1.0 if kind == "max" else -1.0
    at = (
        unsaid[0]
        if unsaid and not failed
        else max(failed or range(len(rows)), key=lambda at: sign * size(rows[at][1]))
    )
    (key, number), ruling = rows[at], rulings[at]
    where, more, lead = f"step {key}" if key else "", "", ""

    def counted(those: Sequence[int], verb: str) -> str:
        return f"{len(those)} of {len(rows)} steps {verb}: {_some([rows[at][0] for at in those], MOST_NAMED)}"

    if where:
        lead = "at " if unsaid and not failed else "worst at "
        if failed:
            more = counted(failed, "fail")
        elif unsaid:
            more = counted(unsaid, "cannot be judged")
        elif opened and opened != [at]:
            more = "the intervals of " + counted(opened, "hold values on both sides")
    if missing and not failed and not unsaid:
        where, number, ruling = "", Number(), Ruling(None, f"{missing}; gate the dump itself")
        more = ""
    said = joined(f"{lead}{where}: {ruling.reason}" if where else ruling.reason, more, unlike(name.said))
    return GateVerdict(
        name=str(name),
        said=name.said,
        bound=kind,
        limit=limit,
        source=bound.source,
        reason=said,
        where=where,
        **shown(number, ruling._replace(open=ruling.passed is True and bool(opened))),
    )


# ---------------------------------------------------------------- the diagnosis

SEQUENCES, PROMPTS = 16, 4
"""Fewest sequences, and prompts where the dump has group_id, of which not finding a bug says something."""
UNSURE = "which cause it is, this dump cannot tell; --fail-on cannot_tell fails for that"
UNTESTED = "whether it is a bug could not be tested"


def diagnosis(summary: Result, asked: FailOn, equal: bool = False) -> Iterator[GateVerdict]:
    """Yield a verdict for each diagnosis that fails (`docs/ci.md` has the table).

    Several causes that fit pass as open, unless `cannot_tell` fails. What could not be tested is not judged,
    and whether it is a bug is not where one of the causes that fit is a bug. Columns that are `equal` because
    a bound asks for it are no copies, and pass.
    """
    found = summary.diagnosis
    for fails in asked.fail_on:
        passed, unsure, more = None, False, ""
        if found is not None:
            cannot_tell = found.verdict == "cannot_tell" != fails
            bugs = [one.id for one in found.candidates if one.kind == "bug" == fails]
            if equal and found.verdict == "cannot_tell" and not (more := _few(summary)):
                passed = True
            elif not cannot_tell and ORDER.index(found.verdict) >= ORDER.index(fails):
                passed = False
            elif few := _few(summary):
                more = few
            elif cannot_tell and not found.candidates:
                more = UNTESTED
            elif cannot_tell and bugs:
                more = f"whether it is a bug, this dump cannot tell: {' or '.join(bugs)} would be one"
            else:
                passed, unsure, more = True, cannot_tell, UNSURE if cannot_tell else ""
        of = {"source": asked.source, "diagnosis_fails": fails}
        yield _diagnosis(found, Ruling(passed, more, unsure), of)


def _few(summary: Result) -> str:
    """Return that there is too little data to miss a bug in; empty where there is enough."""
    dump = summary.dump
    counts = [(dump.sequences, SEQUENCES, "sequences")]
    counts += [(dump.groups, PROMPTS, "prompts")] if "group_id" in dump.columns else []
    said = (
        f"{UNTESTED}: that needs {least} {unit}, and there are {n}" for n, least, unit in counts if n < least
    )
    return next(said, "")


def plain(verdict: DiagnosisVerdict) -> str:
    """Return the diagnosis in words."""
    return verdict.replace("_", " ")


def _diagnosis(found: Diagnosis | None, ruling: Ruling, of: Mapping[str, Any]) -> GateVerdict:
    """Build the verdict; it says the diagnosis with its cause, and the first sentence of the fix of a bug."""
    said = "this result holds no diagnosis"
    if found:
        headline, decide = (
            text[:1].lower() + text[1:].rstrip(".") for text in (found.headline, found.decide)
        )
        said = f"{plain(found.verdict)}: {found.headline.rstrip('.')}"
        bug = next((one for one in found.causes if one.kind == "bug"), None)
        if found.candidates:
            causes = ", ".join(one.id for one in found.candidates)
            said = joined(f"{headline}: {causes}", f"to decide, {decide}" if decide else "")
        elif bug and found.verdict == "bug":
            fix = re.split(r"(?<=[.!?])\s+(?=[A-Z])", bug.fix)[0].rstrip(".")
            what = f"{plain(found.verdict)} ({bug.id}): {bug.statement.rstrip('.')}"
            said = joined(what, f"fix: {fix}" if fix else "")
    number = shown(Number(), ruling) | {"diagnosis": found and found.verdict} | dict(of)
    return GateVerdict(
        name="diagnosis", bound="diagnosis", limit=0.0, reason=joined(said, ruling.reason), **number
    )


# ---------------------------------------------------------------- against an earlier result


def against(now: Lookup, base: Result, asked: Baseline) -> Iterator[GateVerdict]:
    """Yield a verdict per number, and one on the diagnosis.

    Default numbers are compared only if reliable in the baseline, and the diagnosis if it has one.
    """
    there, rows = Lookup(base), _rows(base, asked)
    names = [one for one in asked.named if one.number != "diagnosis"]
    if not asked.only:
        usual = [
            *_gaps(there),
            *(f"{row}.{one}" for row in rows if there.preset(row) for one in WATCHED_PRESET),
        ]
        names += [Name(one) for one in usual if Name(one) not in names and _usable(there.find(one))]
        names += [Name(f"{row}.{WATCHED_PRESET[0]}") for row in rows if there.preset(row) is None]
    for name in names:
        yield _compare(now, there, name, asked)
    if Name("diagnosis") in asked.named or (base.diagnosis and not asked.only):
        here, earlier = now.summary.diagnosis, base.diagnosis
        ruling = Ruling(None, "" if earlier else f"{asked.label} holds no diagnosis")
        if here and earlier:
            passed = ORDER.index(here.verdict) <= ORDER.index(earlier.verdict)
            ruling = Ruling(passed, "" if passed else f"it was {plain(earlier.verdict)} in {asked.label}")
        of = {"source": asked.label, "diagnosis_baseline": earlier and earlier.verdict}
        yield _diagnosis(here, ruling, of)


def not_compared(base: Result, asked: Baseline) -> str:
    """Return a sentence naming what was not compared; empty if everything was."""
    there = Lookup(base)
    doubtful = [one for one in _gaps(there) if doubted(there.find(one))]
    named = [there.preset(row) for row in _rows(base, asked)]
    rows = [row for row in base.presets if row not in named]
    parts = joined(
        f"{', '.join(doubtful)}: unreliable in {asked.label}" if doubtful else "",
        f"its presets ({_some(rows, 3)}): name them with --presets" if rows else "",
    )
    return f"Not compared: {parts}." if parts and not asked.only else ""


def _gaps(base: Lookup) -> list[str]:
    """List the default numbers of the policy gaps: rollout → old (or rollout → current), old → current."""
    first = "" if _usable(base.find("k3")) else "total."
    return [f"{gap}{metric}" for gap in (first, "drift2.") for metric in WATCHED_GAP]


def _rows(base: Result, asked: Baseline) -> list[str]:
    """List the presets to compare, each once; `all` stands for every preset of the baseline."""
    every = [base.presets if catalogue.plain(row) == catalogue.ALL else [row] for row in asked.presets]
    return list(dict.fromkeys(row for rows in every for row in rows))


def _some(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _usable(number: Number) -> bool:
    return number.value is not None and not doubted(number)


def _compare(now: Lookup, base: Lookup, name: Name, asked: Baseline) -> GateVerdict:
    """Judge the difference of a number from the baseline's, in the direction that is worse.

    The results count as independent runs: a comparison fails if the whole interval of the difference lies
    beyond the tolerance.
    """
    ((_, here),), ((_, there),) = now(name)[0], base(name)[0]
    metric = name.number.rpartition(".")[2]
    tolerance = asked.tolerances.get(name, asked.tolerance)
    ruling = Ruling(None, _uncomparable(now, base, name, asked, here, there))
    limit: dict[str, Any] = {"bound": "max", "limit": 0.0}
    if not ruling.reason and here.value is not None and there.value is not None:
        way, earlier = worse(metric), there.value
        change = replace(difference(_badness(here, way), _badness(there, way)), note=here.note)
        allowed = tolerance.of(_badness(there, way).value or 0.0)
        above = way.sign == "away" and here.interval is not None and here.interval[0] >= way.target
        outward = "max" if way.sign == "higher" or above else "min"
        ruling = rule(change, "max", allowed, HIDDEN.get(metric) == outward)
        if way.sign == "either":
            other = rule(change, "min", -allowed)
            ruling = min(ruling, other, key=lambda one: (one.passed is True, not one.open))
        if ruling.passed is not None:
            ruling = ruling._replace(reason=_worse_by(way, change, allowed, ruling, here.unit))
            limits: dict[str, dict[str, Any]] = {
                "away": {
                    "bound": "within",
                    "centre": way.target,
                    "limit": abs(earlier - way.target) + allowed,
                },
                "either": {"bound": "within", "centre": earlier, "limit": allowed},
                "lower": {"bound": "min", "limit": earlier - allowed},
                "higher": {"bound": "max", "limit": earlier + allowed},
            }
            limit = limits[way.sign]
            limit["limit"] = finite(limit["limit"])
    was = shown(there, ruling)
    return GateVerdict(
        name=str(name),
        said=name.said,
        source=asked.label,
        tolerance=str(tolerance),
        baseline=was["value"],
        baseline_interval=was["interval"],
        reason=joined(ruling.reason, unlike(name.said)),
        **limit,
        **shown(here, ruling),
    )


def _uncomparable(now: Lookup, base: Lookup, name: Name, asked: Baseline, here: Number, there: Number) -> str:
    """Return why two numbers cannot be compared; empty if they can, or if only the new one is unreliable."""
    (mine, preset, _), (other, _, _) = now.preset_of(name.number), base.preset_of(name.number)
    if not doubted(here) and (why := _unknown(here)):
        return why
    if mine and not other:
        return (
            f"{asked.label} has no preset {preset}; it has {_some(list(base.summary.presets), 8) or 'none'}"
        )
    if mine and other:
        ours, theirs = now.summary.presets[mine], base.summary.presets[other]
        if any(getattr(ours, key) != getattr(theirs, key) for key in ("method", "policy", "loss")):
            return f"{preset} is another method in {asked.label}: {theirs.method} there, {ours.method} here"
    why = _unknown(there)
    return f"{asked.label}: {why}" if why else (_unknown(here) if here.value is None else "")


def _unknown(number: Number) -> str:
    return silence(number) or ("the value overflows float64" if number.value is None else "")


def _badness(number: Number, way: Worse) -> Number:
    """Transform a number so that higher is worse: negate it, or take its distance from the target."""
    assert number.value is not None
    value, (low, high) = number.value, number.interval or (number.value, number.value)
    if way.sign == "lower":
        value, low, high = -value, -high, -low
    elif way.sign == "away":
        ends = sorted((abs(low - way.target), abs(high - way.target)))
        value, low, high = abs(value - way.target), 0.0 if low <= way.target <= high else ends[0], ends[1]
    return Number(value=value, interval=(low, high) if number.interval else None)


def difference(one: Number, other: Number) -> Number:
    """Return `one` − `other` of independent runs; without an interval if either has none.

    Each end lies √(a² + b²) from the difference, a and b being the distances of the two ends it comes from
    (Zou and Donner 2008).
    """
    assert one.value is not None
    assert other.value is not None
    gap = one.value - other.value
    if one.interval is None or other.interval is None:
        return Number(value=gap)
    below = math.hypot(one.value - one.interval[0], other.interval[1] - other.value)
    above = math.hypot(one.interval[1] - one.value, other.value - other.interval[0])
    return Number(value=gap, interval=(gap - below, gap + above))


def _worse_by(way: Worse, change: Number, allowed: float, ruling: Ruling, unit: str) -> str:
    """Return the reason: `worse by 0.01 [0.005, 0.015], 0.002 allowed; …`."""
    value, (low, high) = change.value or 0.0, change.interval or (0.0, 0.0)
    kind = "changed" if way.sign == "either" else "better" if value < 0 else "worse"
    if kind == "better":
        value, low, high = -value, -high, -low
    scale, points = (100.0, " points") if unit in FRACTIONS else (1.0, "")
    value, exact = value * scale, allowed * scale
    of = Number(value=value, interval=(low * scale, high * scale) if change.interval else None)
    size, interval = written(of)
    short = float(f"{exact:.4g}")  # of a share of the baseline four digits do
    bound = short if (value > short) is (value > exact) and value != short else exact
    size, right = told_apart(size, value, bound, "")
    sure = ruling.passed is False and ruling.on == "interval"
    return joined(
        f"{kind} by {size}{points}{f' {interval}' if interval else ''}, {right}{points} allowed",
        "the whole 95% interval of the difference lies beyond that" if sure else "",
        "" if change.interval else "no interval",
        change.note and f"although {change.note}: what a heavy tail hides is worse still"
        if doubted(change)
        else change.note,
    )
