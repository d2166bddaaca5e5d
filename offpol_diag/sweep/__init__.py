"""Sweep of one preset over many thresholds in one pass, and the bounds that keep a given share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from offpol_diag.analysis import readout
from offpol_diag.analysis.study import Study
from offpol_diag.analyze import MADE, chosen_devices, engine_named, read_ahead_for, record
from offpol_diag.engine.tally import Tally
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.forms import Reading, open_dump
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.presets.formulas import RATIOS, judged
from offpol_diag.readers import Dump
from offpol_diag.run.devices import ON_CPU
from offpol_diag.run.task import TOKENS, Engine, Progress
from offpol_diag.summary import Summary, Sweep
from offpol_diag.sweep import thresholds, window
from offpol_diag.sweep.evaluate import Plan, Swept
from offpol_diag.sweep.readings import Readings
from offpol_diag.sweep.thresholds import SweptBound, pick, swept_bounds
from offpol_diag.trainers import config_for, trainer_named

__all__ = ["SweepOptions", "SweptBound", "pick", "sweep", "swept_bounds"]

MUCH = 0.1
"""Thresholds of a weight that change more than this share of the weights count as equal in effect."""
LITTLE = 0.02
"""Thresholds whose kept shares of tokens and of sequences sum to less than this count as equal in effect."""
PREFIXES = {"old": "", "current": "total."}
"""Numerator policy → prefix of the metrics of its policy gap."""


@dataclass(frozen=True)
class SweepOptions:
    """The preset, the bound and the thresholds of a sweep.

    Attributes:
        preset: the preset.
        bound: the bound of the preset that varies.
        values: thresholds, ascending; None for round numbers in the range of the data.
        keep: the share that the solved bounds must keep, or None.
        chosen: whether the user named the bound, so that only this one is solved for.
        trainer: the trainer whose configuration of the solved bounds is printed, or empty.
    """

    preset: Preset
    bound: SweptBound
    values: tuple[float, ...] | None = None
    keep: float | None = None
    chosen: bool = False
    trainer: str = ""


@np.errstate(all="ignore")
def sweep(
    sources: Sequence[str],
    options: SweepOptions,
    *,
    columns: Mapping[str, str] | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    batch_tokens: int | None = None,
    engine: str = "local",
    workers: int | None = None,
    reading: Reading | None = None,
) -> Summary:
    """Evaluate a preset at many thresholds; arguments other than `options` are those of `analyze`.

    Returns:
        The Summary of the dump with the unchanged preset, and `sweep` filled.

    Raises:
        UsageError: the dump lacks a column that the preset reads, or the bounds cannot be solved for.
        DumpError: the dump cannot be read.
        WorkerError: worker processes cannot be started, or are killed.
        ClusterError: the cluster cannot be reached, or fails.
    """
    start, preset = engine_named(engine), options.preset
    if options.keep is not None:
        window.check(options.keep, preset, options.bound)
    dump = open_dump(
        sources,
        reading=reading or Reading(),
        columns=columns,
        on_bad_row=on_bad_row,
        batch_tokens=batch_tokens or TOKENS,
    )
    study = Study.of(dump.info.columns, (preset,), (), seed)
    lacking = preset.lacking(study.columns)
    if lacking:
        raise UsageError(
            f"the dump has no {' and no '.join(lacking)}, which {preset.name} cannot do without",
            "name the column with --columns, or sweep another preset",
        )
    chosen_devices(engine, device, worth=False)  # refuses an unknown one; a sweep computes on the CPU
    with start(ON_CPU, workers, progress) as runs:
        readings = _read(runs, dump, study, options)
        found = _points(readings, options)
        if options.keep is not None:
            solved, after = window.solve(runs, dump, readings, options.keep, options.chosen)
            if options.trainer:
                config = config_for(after.plan.preset, options.trainer).text()
                named = {"trainer": trainer_named(options.trainer), "config": config}
                solved = solved.model_copy(update=named)
            remarks = found.remarks + after.window_remarks(solved)
            found = found.model_copy(update={"window": solved, "remarks": remarks})
    made = (MADE,) if readings.plan.first_pass.rewards else ()
    facts = readout.facts(dump, readings.tally, made)
    run = record(runs, study, facts, "sweep")
    whole = readout.summary(study, readings.tally, (preset,), facts, run)
    return whole.model_copy(update={"sweep": _with_k1(found, whole, options)})


def _read(engine: Engine, dump: Dump, study: Study, options: SweepOptions) -> Readings:
    """Read the dump once, after computing what rules over whole trainer batches need at each threshold."""
    preset, bound = options.preset, options.bound
    values = options.values or thresholds.round_numbers(preset, bound)
    moved = tuple(bound.moved(preset, bound.bounds(value)) for value in values)
    todo = Plan(study, read_ahead_for(engine, dump, replace(study, presets=(preset, *moved))), bound, values)
    tally: Tally | None = engine.reduce(dump, Swept(todo))
    if tally is None:
        raise DumpError("the dump has no sequence", "check that its writer was closed")
    return Readings(todo, tally)


def _points(readings: Readings, options: SweepOptions) -> Sweep:
    preset, bound, values = options.preset, options.bound, readings.plan.values
    shown = list(range(len(values)))
    if options.values is None:
        effects = [readings.effect(at) for at in shown]
        of_weight = bound.part == "weight"
        effects = [min(one, MUCH) if of_weight else max(one, LITTLE) for one in effects]
        shown = thresholds.informative(values, effects, bound.threshold(preset))
    points = [readings.point(at) for at in shown]
    rule = bound.rule(preset)
    if isinstance(rule, Reject):
        statistic = judged(rule)
    elif isinstance(rule, Weight):
        statistic = RATIOS[rule.over]
    else:
        statistic = "r_t, any token" if bound.side == "upper" else "the smallest r_t"
    return Sweep(
        preset=preset.name,
        which=str(bound),
        others=[str(one) for one in swept_bounds(preset) if one != bound],
        statistic=statistic,
        unit=readings.plan.units.removesuffix("s"),
        quartiles=readings.borders(),
        points=points,
        floor=readings.floors,
        remarks=readings.remarks(points),
    )


def _with_k1(found: Sweep, whole: Summary, options: SweepOptions) -> Sweep:
    """Add −K1 (the mean of Δ) to the centre of the window, where the centre is a mean per token."""
    bound, preset = options.bound, options.preset
    k1 = whole.metrics.get(f"{PREFIXES.get(preset.policy, '')}k1")
    per_token = bound.part != "veto" and bound.over(preset) in ("mean", "token")
    window = found.window
    if not per_token or window is None or window.centre is None or k1 is None or k1.value is None:
        return found
    ends = None if k1.interval is None else (-k1.interval[1], -k1.interval[0])
    number = k1.model_copy(update={"value": -k1.value, "interval": ends, "formula": "mean of Δ"})
    return found.model_copy(update={"window": window.model_copy(update={"centre_k1": number})})
