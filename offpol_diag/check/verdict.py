"""Which logged metrics are equal to what the dump says, and which variant reproduces the others."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, Field

from offpol_diag.batch import Batch
from offpol_diag.check import curves as tracker
from offpol_diag.check.expected import by_step
from offpol_diag.check.variants import Step, Values, Variant, variants
from offpol_diag.engine import correction
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.forms import Reading, open_dump
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import Catalogue, load
from offpol_diag.readers import Dump
from offpol_diag.trainers import LOGS, TRAINERS, trainer_named

RELATIVE, ABSOLUTE = 1e-5, 2e-8
"""Differences below |value| · RELATIVE + ABSOLUTE are rounding of float32."""


class MetricCheck(BaseModel):
    """One metric of the trainer against the dump."""

    name: str = Field(description="the trainer's name of it (docs/crosswalk.md)")
    curve: str = Field(description="its name in the file of curves")
    verdict: Literal["equal", "different"]
    steps: int = Field(description="training steps compared")
    different: int = Field(0, description="those of them that differ")
    first: int | None = Field(None, description="first step that differs")
    worst: int = Field(description="step with the largest difference")
    logged: float = Field(description="the trainer's value there")
    expected: float = Field(description="the value that the dump says, there")
    variant: str | None = Field(
        None, description="name of the variant that reproduces every step that differs"
    )
    text: str | None = Field(None, description="that variant in words")
    also: list[str] = Field([], description="further variants that reproduce it as well")


class Checked(BaseModel):
    """The verdict on a trainer's curves."""

    format: Literal["offpol-diag check 1"] = "offpol-diag check 1"
    trainer: str
    preset: str
    chosen: bool = Field(description="whether the preset was chosen because it reproduces the most metrics")
    steps: list[int] = Field(description="training steps that both the dump and the curves hold")
    micro_batch: int | None = None
    dp: int | None = None
    metrics: list[MetricCheck]
    unmatched: list[str] = Field([], description="metrics of the trainer that no curve holds")

    @property
    def equal(self) -> bool:
        """Whether every metric compared is equal."""
        return all(one.verdict == "equal" for one in self.metrics)

    def to_json(self) -> str:
        """Return the result as JSON."""
        return self.model_dump_json(indent=1) + "\n"


def same(logged: float, expected: float) -> bool:
    """Return whether two values differ by no more than float32 rounds."""
    return math.isclose(logged, expected, rel_tol=RELATIVE, abs_tol=ABSOLUTE)


def check(
    sources: Sequence[str],
    logged: Sequence[Path],
    *,
    trainer: str | None = None,
    preset: str | None = None,
    micro_batch: int | None = None,
    dp: int | None = None,
    catalogue: Catalogue | None = None,
    columns: Mapping[str, str] | None = None,
    reading: Reading | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
) -> Checked:
    """Compare a trainer's curves with its dump; the dump is held in memory.

    Raises:
        UsageError: nothing can be compared: no curve has a name that the trainer logs, or no common step.
        DumpError: the dump cannot be read.
    """
    curves = tracker.read(logged)
    how: dict[str, Any] = {"columns": columns, "on_bad_row": on_bad_row}
    dump = open_dump(sources, reading=reading or Reading(), **how)
    batches = by_step(dump.batches())
    have = frozenset(dump.info.columns)
    if not batches:
        raise UsageError("the dump has no training steps", "log `step`, or name its column with --columns")
    candidates = _candidates(dump, catalogue or load(), trainer, preset, curves)
    held = {step for curve in curves.values() for step in curve}
    steps = [step for step in batches if step in held]
    if not steps:
        spans = (f"{min(one)} to {max(one)}" for one in (batches, held))
        raise UsageError("the dump has steps {}, the curves {}".format(*spans), "give the same run of both")

    def built(one: Preset) -> dict[int, Step]:
        found = {at: Step(batch, None, one, have, micro_batch, dp) for at, batch in batches.items()}
        for at, step in found.items():
            step.near = {by: found[at + by] for by in (-1, 1) if at + by in found}
        return found

    best = max(candidates, key=lambda one: _score(built(one)[steps[0]], steps[0], curves))
    every = built(best)
    names = tracker.matched(curves, (entry.name for entry in LOGS[best.logs or ""].entries_of(best)))
    expected = {at: every[at].expected() for at in steps}
    checked = [
        one
        for name, curve in names.items()
        if (one := _compared(name, curve, curves[curve], expected)) is not None
    ]
    if not checked:
        raise UsageError(
            f"no curve holds a number that {best.name} logs at these steps",
            f"it logs {', '.join(expected[steps[0]])}; name the method with --preset",
        )
    if any(one.verdict == "different" for one in checked):
        for at, batch in _unmasked(dump).items():
            if at in every and batch.sequences == every[at].batch.sequences:
                every[at].unmasked = batch
        _explain(checked, every, curves, expected, _siblings(best, (catalogue or load()).values(), have))
    return Checked(
        trainer=next((one for one, t in TRAINERS.items() if best.logs in {log.name for log in t.logs}), ""),
        preset=best.name,
        chosen=len(candidates) > 1,
        steps=steps,
        micro_batch=micro_batch,
        dp=dp,
        metrics=checked,
        unmatched=[name for name in expected[steps[0]] if name not in names],
    )


def _unmasked(dump: Dump) -> dict[int, Batch]:
    """Return each step with masked tokens counted; nothing where they have no log-probs."""
    found = dump.unmasked()
    try:
        return by_step(found.batches()) if found else {}
    except DumpError:
        return {}


def _candidates(
    dump: Dump, catalogue: Catalogue, trainer: str | None, preset: str | None, curves: tracker.Curves
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
        if lacking := correction.needs(given[0], have):
            raise UsageError(f"preset {preset} needs {', '.join(lacking)}", "log it, or name another preset")
        return list(given)
    said = trainer or str(dump.info.provenance.get("trainer", "")).strip().lower()
    if trainer is not None or said in TRAINERS:
        logs = {log.name for log in TRAINERS[trainer_named(said)].logs}
    else:
        logs = set(LOGS)
    able: dict[tuple[object, ...], Preset] = {}
    for one in catalogue.values():
        if one.logs in logs and not correction.needs(one, have):
            able.setdefault(_behaviour(one), one)
    held = {
        one.name: len(tracker.matched(curves, (e.name for e in LOGS[one.logs or ""].entries_of(one))))
        for one in able.values()
    }
    most = max(held.values(), default=0)
    if not most:
        who = trainer_named(said) if trainer else "a known trainer"
        raise UsageError(f"no curve has a name that {who} logs", "docs/crosswalk.md lists the names")
    return [one for one in able.values() if held[one.name] == most]


def _behaviour(one: Preset) -> tuple[object, ...]:
    """Return what decides the numbers that a preset logs."""
    return one.logs, one.policy, one.weight, one.reject, one.veto, one.loss, one.clip, one.apply


def _siblings(preset: Preset, every: Iterable[Preset], have: frozenset[str]) -> list[Preset]:
    """Return other presets that log the same names."""
    found = {_behaviour(one): one for one in every if one.logs == preset.logs}
    found.pop(_behaviour(preset), None)
    return [one for one in found.values() if not correction.needs(one, set(have))]


def _score(step: Step, at: int, curves: tracker.Curves) -> int:
    """Count the metrics of a step that are equal."""
    values = step.expected()
    names = tracker.matched(curves, values)
    return sum(at in curves[curve] and same(curves[curve][at], values[name]) for name, curve in names.items())


def _compared(
    name: str, curve: str, points: Mapping[int, float], expected: Mapping[int, Values]
) -> MetricCheck | None:
    """Compare one metric at every step; None where nothing can be compared."""
    pairs = {at: (points[at], one[name]) for at, one in expected.items() if at in points and name in one}
    pairs = {at: pair for at, pair in pairs.items() if math.isfinite(pair[1])}
    if not pairs:
        return None
    wrong = [at for at, pair in pairs.items() if not same(*pair)]
    worst = max(wrong or pairs, key=lambda at: abs(pairs[at][0] - pairs[at][1]))
    return MetricCheck(
        name=name,
        curve=curve,
        verdict="different" if wrong else "equal",
        steps=len(pairs),
        different=len(wrong),
        first=wrong[0] if wrong else None,
        worst=worst,
        logged=pairs[worst][0],
        expected=pairs[worst][1],
    )


def _explain(
    checked: list[MetricCheck],
    every: Mapping[int, Step],
    curves: tracker.Curves,
    expected: Mapping[int, Values],
    others: Sequence[Preset],
) -> None:
    """Name the variant that reproduces each metric that differs, the same for as many as possible."""
    wrong = {
        one.name: [
            at
            for at, values in expected.items()
            if at in curves[one.curve]
            and one.name in values
            and not same(curves[one.curve][at], values[one.name])
        ]
        for one in checked
        if one.verdict == "different"
    }
    if not wrong:
        return
    points = {one.name: curves[one.curve] for one in checked}
    found: dict[str, list[Variant]] = {name: [] for name in wrong}
    first = next(iter(wrong.values()))[0]
    for variant in variants(every[first], others):
        if variant.name.startswith("preset_") and all(found.values()):
            break
        made: dict[int, Mapping[str, float]] = {}
        for name, steps in wrong.items():
            hits = 0
            for at in steps:
                if at not in made:
                    made[at] = variant.of(every[at])
                if variant.name.startswith("step_") and name not in made[at]:
                    continue  # the first or last step of the dump has no neighbour
                if name not in made[at] or not same(points[name][at], made[at][name]):
                    hits = 0
                    break
                hits += 1
            if hits:
                found[name].append(variant)
    explained = {v.name: sum(v in one for one in found.values()) for each in found.values() for v in each}
    for one in checked:
        if which := sorted(found.get(one.name, []), key=lambda v: -explained[v.name]):
            one.variant, one.text = which[0].name, which[0].text
            one.also = [v.name for v in which[1:]]
