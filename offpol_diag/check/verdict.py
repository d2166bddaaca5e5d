"""The verdict on a trainer's curves: which are what the dump says, and from which step on others differ."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import NamedTuple

from offpol_diag.check import ABSOLUTE, Checked, MetricCheck, Point, relative_difference
from offpol_diag.check import curves as tracker
from offpol_diag.check.curves import Curves
from offpol_diag.core.observe import Ahead, refuse_steps
from offpol_diag.core.study import Study
from offpol_diag.dump.batch import Batch, joined
from offpol_diag.dump.read import Dump
from offpol_diag.engine.context import BatchContext
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.trainers import DEFAULTS, LOGS, TRAINERS, logs, trainer_named

Values = dict[str, float]
"""Logged name → value."""
RELATIVE = 1e-5
"""Differences below |value| · RELATIVE + ABSOLUTE are rounding of float32."""
MOST_SHIFTS = 3
"""Differences between the step numbers of dump and curves that are tried."""


def same(logged: float, expected: float) -> bool:
    """Return whether two values differ by no more than float32 rounds."""
    return math.isclose(logged, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def check(
    dump: Dump, curves: Curves, catalogue: Catalogue, trainer: str | None, preset: str | None
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
    def logged(one: Preset, at: int) -> Values:
        return logged_of(batches[at], one, have)

    def matching(by: int) -> _Match | None:
        """Compare the curves, whose steps are `by` higher; None where no step is in both."""
        moved = {name: {at - by: x for at, x in curve.items()} for name, curve in curves.items()}
        held = {at for curve in moved.values() for at in curve}
        if not (steps := [at for at in batches if at in held]):
            return None
        best = _best({one: logged(one, steps[0]) for one in candidates}, steps[0], moved)
        expected = {at: logged(best, at) for at in steps}
        names, ambiguous = tracker.matched(moved, expected[steps[0]])
        found = (_compared(name, curve, moved[curve], expected) for name, curve in names.items())
        return _Match(by, best, expected, names, ambiguous, [one for one in found if one])

    match = matching(0)
    if match is None or any(one.different for one in match.metrics):
        first = min(batches)
        shifts = _shifts(curves, [logged(one, first) for one in candidates], first)
        tried = (found for by in shifts if (found := matching(by)) and found.certain(len(batches)))
        match = next(tried, match)
    if match is None:
        held = {at for curve in curves.values() for at in curve}
        spans = (f"{min(one)} to {max(one)}" for one in (batches, held))
        apart = any(at + by in held for at in batches for by in (-1, 1))
        hint = "number both alike: their steps are one apart" if apart else "give the same run of both"
        raise UsageError("the dump has steps {}, the curves {}".format(*spans), hint)
    best, steps = match.best, list(match.expected)
    names = list(match.expected[steps[0]])
    if not match.metrics:
        raise UsageError(
            f"no curve holds a number that {best.name} logs at these steps",
            f"it logs {', '.join(names)}; name the method with --preset",
        )
    several = {curve for some in match.ambiguous.values() for curve in some}
    return Checked(
        dump=list(dump.info.files),
        trainer=next((one for one, t in TRAINERS.items() if best.logs in {log.name for log in t.logs}), ""),
        preset=best.name,
        chosen=len(candidates) > 1,
        steps=steps,
        shift=match.by,
        missing=sorted(set(batches) - {point.step for one in match.metrics for point in one.points}),
        metrics=match.metrics,
        unmatched=[name for name in names if name not in match.names and name not in match.ambiguous],
        unknown=[curve for curve in curves if curve not in {*match.names.values(), *several}],
        ambiguous=match.ambiguous,
    )


class _Match(NamedTuple):
    """Curves and dump, compared.

    Attributes:
        by: how much higher the curves number a step than the dump.
        best: the preset whose numbers they are compared with.
        expected: step in both → what the dump says.
        names: logged name → its curve.
        ambiguous: logged name → curves among which none is chosen.
        metrics: a result per metric.
    """

    by: int
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


# ---------------------------------------------------------------- what the dump says


def by_step(batches: Iterable[Batch]) -> dict[int, Batch]:
    """Divide a dump by training step; without a column of steps nothing is returned."""
    found: dict[int, list[Batch]] = {}
    for batch in batches:
        rows: dict[int, list[int]] = {}
        for row, step in enumerate(batch.scalars.get("step", ())):
            if isinstance(step, int):
                rows.setdefault(step, []).append(row)
        for step, at in rows.items():
            cuts = [0, *(i for i, (a, b) in enumerate(pairwise(at), 1) if b != a + 1), len(at)]
            runs = [batch.rows(at[a], at[b - 1] + 1) for a, b in pairwise(cuts)]
            found.setdefault(step, []).append(joined(runs))
        refuse_steps(len(found))
    return {step: joined(parts) for step, parts in sorted(found.items())}


def logged_of(batch: Batch, preset: Preset, columns: frozenset[str]) -> Values:
    """Return logged name → value of one training step; `columns` are the dump's canonical ones."""
    ahead = Ahead.of_batch(Study.of(columns, (preset,)), batch)
    context = BatchContext.of(ahead.filled(batch), 0, 2, ahead.cut)
    return logs.of_context(context, preset)


# ---------------------------------------------------------------- which preset, which steps


def _candidates(
    dump: Dump, catalogue: Catalogue, trainer: str | None, preset: str | None, curves: Curves
) -> list[Preset]:
    """Return the presets that may have run, each with the logs of which the curves have the most names."""
    have = set(dump.info.columns)
    if {"rewards", "group_id"} <= have:
        have.add("advantages")
    said = trainer or str(dump.info.provenance.get("trainer", "")).strip().lower()
    known = trainer_named(said) if trainer is not None or said in TRAINERS else ""
    words = [log.name for log in TRAINERS[known].logs] if known else list(LOGS)
    further = [catalogue[name] for own, names in DEFAULTS.items() if known in (own, "") for name in names]
    rows = catalogue.resolve(preset) if preset else (*catalogue.values(), *further)
    if preset and len(rows) > 1:
        raise UsageError(f'"{preset}" names {len(rows)} presets', "name the one that ran")
    if preset and (lacking := rows[0].lacking(have)):
        raise UsageError(f"preset {preset} needs {', '.join(lacking)}", "log it, or name another preset")
    able: dict[tuple[object, ...], Preset] = {}
    for one in (replace(row, logs=word) for row in rows for word in words if not row.lacking(have)):
        able.setdefault(_behaviour(one), one)
    held = {key: _held(one, curves) for key, one in able.items()}
    most = max(held.values(), default=(0, 0))
    if not any(most):
        who = known or "a known trainer"
        raise UsageError(f"no curve has a name that {who} logs", "name the method that ran with --preset")
    return [one for key, one in able.items() if held[key] == most]


def _held(preset: Preset, curves: Curves) -> tuple[int, int]:
    """Count the metrics of a preset that the curves hold, and those by their whole name."""
    names = logs.names(preset)
    return len(tracker.matched(curves, names)[0]), sum(name in curves for name in names)


def _behaviour(one: Preset) -> tuple[object, ...]:
    """Return what decides the numbers that a preset logs."""
    return one.logs, one.policy, one.weight, one.reject, one.veto, one.loss, one.clip


def _best(logged: Mapping[Preset, Values], at: int, curves: Curves) -> Preset:
    """Return the preset of which most metrics are equal at a step; of equal ones the nearest."""

    def score(one: Preset) -> tuple[int, float]:
        values = logged[one]
        pairs = [
            (curves[curve][at], values[name])
            for name, curve in tracker.matched(curves, values)[0].items()
            if at in curves[curve] and math.isfinite(curves[curve][at])
        ]
        off = [min(abs(x - y) / max(abs(x), abs(y), ABSOLUTE), 1.0) for x, y in pairs if not same(x, y)]
        return len(pairs) - len(off), -sum(off, 0.0)

    return max(logged, key=score)


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
