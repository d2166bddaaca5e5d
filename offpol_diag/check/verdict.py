"""The verdict on a trainer's curves: what is equal to what the dump says, and what explains the rest."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import combinations
from typing import NamedTuple

from offpol_diag.check import ABSOLUTE, UNKNOWN, Checked, Finding, MetricCheck, Point, relative_difference
from offpol_diag.check import curves as tracker
from offpol_diag.check.curves import Curves
from offpol_diag.check.variants import BASE, Step, Values, Variant, by_step, of_presets, variants
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.readers import Dump
from offpol_diag.trainers import LOGS, TRAINERS, logs, trainer_named

RELATIVE = 1e-5
"""Differences below |value| · RELATIVE + ABSOLUTE are rounding of float32."""
NOT_FINITE = "a value that is not finite (NaN or infinite)"
EMPTY = "Look for a rank or micro-batch without tokens, or an overflow, at these steps."
SPLIT = (
    "Give --preset, --micro-batch and --dp if they are known; rows may have been shuffled before the split."
)
MOST_SHIFTS = 3
"""Differences between the step numbers of dump and curves that are tried."""
MOST_TOKENS = 100_000_000
"""Tokens of changed batches that the search for pairs computes at most."""
NEAR = 0.3
"""Largest share of a difference that a variant may leave to be named as the nearest."""


def same(logged: float, expected: float) -> bool:
    """Return whether two values differ by no more than float32 rounds."""
    return math.isclose(logged, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def check(
    dump: Dump,
    curves: Curves,
    catalogue: Catalogue,
    trainer: str | None,
    preset: str | None,
    micro_batch: int | None,
    dp: int | None,
) -> Checked:
    """Compare a trainer's curves with its dump, which is held in memory.

    Raises:
        UsageError: nothing can be compared: no curve has a name that the trainer logs, or no common step.
        DumpError: the dump cannot be read.
    """
    batches = by_step(dump.batches())
    have = frozenset(dump.info.columns)
    if not batches:
        raise UsageError("the dump has no training steps", "log `step`, or name its column with --columns")
    candidates = _candidates(dump, catalogue, trainer, preset, curves)

    @cache
    def step(one: Preset, at: int) -> Step:
        return Step(batches[at], one, have, micro_batch, dp)

    def matching(by: int) -> _Match | None:
        """Compare the curves, whose steps are `by` higher; None where no step is in both."""
        moved = {name: {at - by: x for at, x in curve.items()} for name, curve in curves.items()}
        held = {at for curve in moved.values() for at in curve}
        if not (steps := [at for at in batches if at in held]):
            return None
        best = _best({one: step(one, steps[0]) for one in candidates}, steps[0], moved)
        expected = {at: step(best, at).values() for at in steps}
        names, ambiguous = tracker.matched(moved, expected[steps[0]])
        found = (_compared(name, curve, moved[curve], expected) for name, curve in names.items())
        return _Match(by, moved, best, expected, names, ambiguous, [one for one in found if one])

    match = matching(0)
    if match is None or any(one.different for one in match.metrics):
        first = min(batches)
        shifts = _shifts(curves, [step(one, first).values() for one in candidates], first)
        tried = (found for by in shifts if (found := matching(by)) and found.certain(len(batches)))
        match = next(tried, match)
    if match is None:
        held = {at for curve in curves.values() for at in curve}
        spans = (f"{min(one)} to {max(one)}" for one in (batches, held))
        apart = any(at + by in held for at in batches for by in (-1, 1))
        hint = "number both alike: their steps are one apart" if apart else "give the same run of both"
        raise UsageError("the dump has steps {}, the curves {}".format(*spans), hint)
    best, steps = match.best, list(match.expected)
    logs_of = list(match.expected[steps[0]])
    if not match.metrics:
        raise UsageError(
            f"no curve holds a number that {best.name} logs at these steps",
            f"it logs {', '.join(logs_of)}; name the method with --preset",
        )
    findings: list[Finding] = []
    if different := [one for one in match.metrics if one.different]:
        every = {at: step(best, at) for at in batches}
        unmasked = dump.unmasked()
        with suppress(DumpError):  # masked tokens have no log-probs
            for at, batch in by_step(unmasked.batches()).items() if unmasked else ():
                if at in every and batch.sequences == every[at].batch.sequences:
                    every[at].unmasked = batch
        others = {_behaviour(one): one for one in catalogue.values() if one.logs == best.logs}
        others.pop(_behaviour(best), None)
        able = [one for one in others.values() if not one.lacking(have)]
        findings = explain(different, every, match.curves, able)
    return Checked(
        dump=list(dump.info.files),
        trainer=next((one for one, t in TRAINERS.items() if best.logs in {log.name for log in t.logs}), ""),
        preset=best.name,
        chosen=len(candidates) > 1,
        steps=steps,
        shift=match.by,
        missing=sorted(set(batches) - {point.step for one in match.metrics for point in one.points}),
        micro_batch=micro_batch,
        dp=dp,
        findings=findings,
        metrics=match.metrics,
        unmatched=[name for name in logs_of if name not in match.names and name not in match.ambiguous],
        ambiguous=match.ambiguous,
    )


class _Match(NamedTuple):
    """Curves and dump, compared.

    Attributes:
        by: how much higher the curves number a step than the dump.
        curves: name → step of the dump → value.
        best: the preset whose numbers they are compared with.
        expected: step in both → what the dump says.
        names: logged name → its curve.
        ambiguous: logged name → curves among which none is chosen.
        metrics: a result per metric.
    """

    by: int
    curves: Curves
    best: Preset
    expected: dict[int, Values]
    names: dict[str, str]
    ambiguous: dict[str, list[str]]
    metrics: list[MetricCheck]

    def certain(self, steps: int) -> bool:
        """Return whether all is equal, at two steps of the dump or at all, and not by chance."""
        values = [point.logged for one in self.metrics for point in one.points if point.logged not in (0, 1)]
        equal = not any(one.different for one in self.metrics)
        return equal and len(self.expected) >= min(2, steps) and len(values) >= 2


def _shifts(curves: Curves, expected: Sequence[Values], step: int) -> list[int]:
    """Return by how much the curves may number a step of the dump higher, the likeliest first.

    Args:
        curves: as logged.
        expected: what the dump says at the step under each preset.
        step: of the dump.
    """
    found = Counter(
        at - step
        for values in expected
        for name, curve in tracker.matched(curves, values)[0].items()
        for at, logged in curves[curve].items()
        if at != step and math.isfinite(logged) and same(logged, values[name])
    )
    return [by for by, _ in sorted(found.items(), key=lambda one: (-one[1], abs(one[0])))][:MOST_SHIFTS]


def _candidates(
    dump: Dump, catalogue: Catalogue, trainer: str | None, preset: str | None, curves: Curves
) -> list[Preset]:
    """Return the presets that may have run: the one named, else those of the trainer that log most names."""
    have = set(dump.info.columns)
    if {"rewards", "group_id"} <= have:
        have.add("advantages")
    given = catalogue.resolve(preset) if preset else ()
    if given:
        if len(given) > 1 or given[0].logs not in LOGS:
            raise UsageError(
                f'"{preset}" is no single preset whose logged numbers are known', "see docs/crosswalk.md"
            )
        if lacking := given[0].lacking(have):
            raise UsageError(f"preset {preset} needs {', '.join(lacking)}", "log it, or name another preset")
        return list(given)
    said = trainer or str(dump.info.provenance.get("trainer", "")).strip().lower()
    if trainer is not None or said in TRAINERS:
        words = {log.name for log in TRAINERS[trainer_named(said)].logs}
    else:
        words = set(LOGS)
    able: dict[tuple[object, ...], Preset] = {}
    for one in catalogue.values():
        if one.logs in words and not one.lacking(have):
            able.setdefault(_behaviour(one), one)
    held = {one.name: _held(one, curves) for one in able.values()}
    most = max(held.values(), default=(0, 0))
    if not any(most):
        who = trainer_named(said) if trainer else "a known trainer"
        raise UsageError(f"no curve has a name that {who} logs", "docs/crosswalk.md lists the names")
    return [one for one in able.values() if held[one.name] == most]


def _held(preset: Preset, curves: Curves) -> tuple[int, int]:
    """Count the metrics of a preset that the curves hold, and those by their whole name."""
    names = logs.names(preset)
    return len(tracker.matched(curves, names)[0]), sum(name in curves for name in names)


def _behaviour(one: Preset) -> tuple[object, ...]:
    """Return what decides the numbers that a preset logs."""
    return one.logs, one.policy, one.weight, one.reject, one.veto, one.loss, one.clip, one.shape, one.apply


def _best(steps: Mapping[Preset, Step], at: int, curves: Curves) -> Preset:
    """Return the preset of which most metrics are equal at a step, as logged or else by one variant."""

    def score(step: Step, variant: Variant = BASE) -> tuple[int, float]:
        """Count the metrics that are equal; where that is a tie, how near the others are."""
        values = step.values(variant)
        pairs = [
            (curves[curve][at], values[name])
            for name, curve in tracker.matched(curves, values)[0].items()
            if at in curves[curve] and math.isfinite(curves[curve][at])
        ]
        off = [min(abs(x - y) / max(abs(x), abs(y), ABSOLUTE), 1.0) for x, y in pairs if not same(x, y)]
        return len(pairs) - len(off), -sum(off, 0.0)

    def best_score(step: Step) -> tuple[int, float]:
        some = [BASE]
        if sum(one.tokens for one in steps.values()) < MOST_TOKENS:
            some += [one for one in variants(step) if not (one.alone or one.preset or one.across)]
        return max(score(step, one) for one in some)

    found = {one: score(step) for one, step in steps.items()}
    best = max(found, key=lambda one: found[one])
    if len(steps) == 1 or found[best][1] == 0.0:
        return best
    kinds: dict[tuple[float | None, ...], Preset] = {}
    for one, step in steps.items():  # of those that log the same values the first
        values = step.values()
        kinds.setdefault(tuple(map(values.get, sorted(tracker.matched(curves, values)[0]))), one)
    return max(kinds.values(), key=lambda one: (best_score(steps[one]), found[one]))


def _compared(
    name: str, curve: str, points: Mapping[int, float], expected: Mapping[int, Values]
) -> MetricCheck | None:
    """Compare one metric at every step; None where nothing can be compared."""
    pairs = [
        Point(step=at, logged=points[at] if math.isfinite(points[at]) else None, expected=one[name])
        for at, one in expected.items()
        if at in points and math.isfinite(one.get(name, math.nan))
    ]
    if not pairs:
        return None
    wrong = [one.step for one in pairs if one.logged is None or not same(one.logged, one.expected)]
    return MetricCheck(
        name=name,
        curve=curve,
        verdict="different" if wrong else "equal",
        points=pairs,
        different=wrong,
        worst=max(pairs, key=relative_difference).step,
    )


# ---------------------------------------------------------------- what explains the rest


def explain(
    wrong: Sequence[MetricCheck], every: Mapping[int, Step], curves: Curves, others: Sequence[Preset]
) -> list[Finding]:
    """Name the variants that reproduce the metrics that differ, each for as many of them as it can."""
    found: dict[str, list[Variant]] = {one.name: [] for one in wrong}
    finite = {one.name: {p.step for p in one.points if p.logged is not None} for one in wrong}
    search = {one.name: one for one in wrong if finite[one.name] & set(one.different)}
    beside = {at + by for at in every for by in (-1, 1)}

    def hits(one: MetricCheck, variant: Variant) -> int:
        """Count the steps that a variant reproduces; 0 where it fails at one.

        These are the steps that differ, and for a variant of several steps also those beyond the dump.
        """
        steps = [at for at in one.different if at in finite[one.name]]
        if variant.across:
            steps += sorted(curves[one.curve].keys() & beside - {p.step for p in one.points})
        count = 0
        for at in steps:
            value = predicted(variant, every, one.name, at)
            if not (variant.across if value is None else same(curves[one.curve][at], value)):
                return 0
            count += value is not None
        return count

    def try_out(some: Iterable[Variant], least: int = 1) -> None:
        """Add the variants that reproduce a metric without an explanation, with all that they reproduce."""
        unexplained = [one for one in search.values() if not found[one.name]]
        for variant in some if unexplained else ():
            if any(hits(one, variant) for one in unexplained):
                names = {one.name: n for one in search.values() if (n := hits(one, variant))}
                for name in names if sum(names.values()) >= least else ():
                    found[name].append(variant)

    ones: list[Variant] = []
    if search:
        start = every[min(at for one in search.values() for at in one.different)]
        ones, presets = list(variants(start)), list(of_presets(others))
        try_out(ones)
        try_out(presets)
        try_out(_pairs([*ones, *presets], start, [name for name in search if not found[name]]), least=2)
    findings = _findings(wrong, found, finite)
    for one in findings:
        if one.text == UNKNOWN:
            near = _nearest([search[name] for name in one.metrics], every, ones)
            one.nearest, one.nearest_text, one.leaves = near or (None, None, None)
    return findings


def _nearest(
    wrong: Sequence[MetricCheck], every: Mapping[int, Step], some: Iterable[Variant]
) -> tuple[str, str, float] | None:
    """Return name and text of the variant that comes nearest at the worst steps, and the share it leaves."""
    points = [
        (one, max((p for p in one.points if p.logged is not None), key=relative_difference)) for one in wrong
    ]

    def far(variant: Variant = BASE) -> float:
        made = (every[point.step].values(variant).get(one.name) for one, point in points)
        changed = (
            point if x is None or not math.isfinite(x) else point.model_copy(update={"expected": x})
            for (_, point), x in zip(points, made, strict=True)
        )
        return sum(map(relative_difference, changed))

    best = min((one for one in some if not (one.alone or one.across)), key=far)
    leaves = far(best) / (far() or 1.0)
    return (best.name, best.text, leaves) if leaves < NEAR else None


def predicted(variant: Variant, every: Mapping[int, Step], name: str, at: int) -> float | None:
    """Return the value of a metric at a step by a variant; None where the dump does not say it."""

    def value(step: int) -> float | None:
        return every[step].values(variant).get(name) if step in every else None

    return value(at) if variant.across is None else variant.across(value, at)


def _pairs(some: Iterable[Variant], step: Step, names: Sequence[str]) -> Iterator[Variant]:
    """Yield pairs of variants that each change one of the metrics, until too many tokens were computed.

    Of variants that give the same values the first is taken.
    """
    kinds: dict[tuple[float | None, ...], Variant] = {}
    base = step.values()
    for one in some:
        made = step.values(one) if one.across is None else {}
        if one.across or any(name in made and not same(made[name], base[name]) for name in names):
            kinds.setdefault(tuple(map(made.get, names)) if made else (one.name,), one)  # type: ignore[arg-type]
    most = step.tokens + MOST_TOKENS
    for one, other in combinations(kinds.values(), 2):
        both = one & other
        if both is not None and step.tokens < most:
            yield both


def _findings(
    wrong: Sequence[MetricCheck], found: Mapping[str, list[Variant]], finite: Mapping[str, set[int]]
) -> list[Finding]:
    """Choose the variant of the most metrics, the simplest of equal ones, until all are explained."""
    findings, left = [], {one.name: one for one in wrong}
    order = {v.name: (v.simple, place) for place, v in enumerate(v for each in found.values() for v in each)}
    while any(found[name] for name in left):
        held: dict[Variant, list[str]] = {}
        for name in left:
            for variant in found[name]:
                held.setdefault(variant, []).append(name)
        best = min(held, key=lambda v: (-len(held[v]), order[v.name]))
        same_ones = [v.name for v, names in held.items() if v is not best and names == held[best]]
        for name in held[best]:
            one = left.pop(name)
            one.variant, one.text = best.name, best.text
            one.also = [v.name for v in found[name] if v is not best]
        findings.append(
            Finding(variant=best.name, text=best.text, fix=best.fix, metrics=held[best], also=same_ones)
        )
    odd = [name for name in left if not finite[name] & set(left[name].different)]
    for name in odd:
        left[name].variant, left[name].text = "not_finite", NOT_FINITE
    if odd:
        findings.append(Finding(variant="not_finite", text=NOT_FINITE, fix=EMPTY, metrics=odd))
    if unknown := [name for name in left if name not in odd]:
        findings.append(Finding(variant=None, text=UNKNOWN, fix=SPLIT, metrics=unknown))
    return findings
