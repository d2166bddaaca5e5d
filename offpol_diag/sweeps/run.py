"""The loop of a sweep: one reading of the dump for all thresholds, two more where a window is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from offpol_diag import correction
from offpol_diag.analysis import readout
from offpol_diag.analyze import MADE, engine_named, plan, record, settled, tokens_at_once
from offpol_diag.configs import config_for, trainer_named
from offpol_diag.engines import Engine, Progress
from offpol_diag.errors import DumpError, UsageError
from offpol_diag.presets import Preset
from offpol_diag.readers import Dump, open_dump
from offpol_diag.settle import Found
from offpol_diag.summary import Summary, Sweep
from offpol_diag.sweeps import grid, remarks, window
from offpol_diag.sweeps.columns import Plan, Swept
from offpol_diag.sweeps.dial import Dial, dials
from offpol_diag.sweeps.numbers import Readings
from offpol_diag.tally import Study, Tally


@dataclass(frozen=True)
class Ask:
    """What is asked of a sweep.

    Attributes:
        preset: whose bound moves.
        dial: which bound.
        values: thresholds, rising; None for round numbers where the data are.
        keep: the share that a window is to keep, or None.
        chosen: whether that one bound was named, so that no other is solved for.
        trainer: whose configuration of the window is printed, or empty.
    """

    preset: Preset
    dial: Dial
    values: tuple[float, ...] | None = None
    keep: float | None = None
    chosen: bool = False
    trainer: str = ""


def sweep(
    sources: Sequence[str],
    ask: Ask,
    *,
    columns: Mapping[str, str] | None = None,
    on_bad_row: Literal["error", "skip"] = "error",
    device: str = "auto",
    seed: int = 0,
    progress: Progress | None = None,
    batch_tokens: int | None = None,
    engine: str = "local",
    workers: int | None = None,
) -> Summary:
    """A preset at many thresholds; the arguments beside `ask` are those of `analyze`.

    Returns:
        The Summary of the dump with the preset as it stands, and `sweep` filled.

    Raises:
        UsageError: the dump lacks a column that the preset reads, or what is asked cannot be solved.
        DumpError: the dump cannot be read.
        WorkerError: worker processes cannot be started, or are killed.
        ClusterError: the cluster cannot be reached, or does not do its work.
    """
    start = engine_named(engine)
    if ask.keep is not None:
        window.check(ask.keep)
        window.solvable(ask.preset, ask.dial)
    size = batch_tokens or tokens_at_once(engine, device)
    dump = open_dump(sources, columns=columns, group_by=(), on_bad_row=on_bad_row, batch_tokens=size)
    study = plan(dump, (ask.preset,), (), seed)
    _require(ask.preset, study)
    with start(device, workers, progress) as runs:
        todo, tally = swept(runs, dump, study, ask)
        found = _read(todo, tally, ask)
        if ask.keep is not None:
            found = _solved(runs, dump, found, Readings(todo, tally), ask)
    facts = readout.facts(dump, tally, (MADE,) if todo.found.rewards else ())
    run = record(runs, study, facts, "sweep")
    whole = readout.summary(study, tally, (ask.preset,), facts, run)
    return whole.model_copy(update={"sweep": _with_k1(found, whole, ask)})


def _require(preset: Preset, study: Study) -> None:
    lacking = correction.needs(preset, set(study.columns))
    if lacking:
        raise UsageError(
            f"the dump has no {' and no '.join(lacking)}, which {preset.name} cannot do without",
            "name the column with --columns, or sweep another preset",
        )


def swept(engine: Engine, dump: Dump, study: Study, ask: Ask) -> tuple[Plan, Tally]:
    """The one reading: what was done, and the states it left."""
    values = ask.values or grid.round_numbers(ask.preset, ask.dial)
    found = _settled(engine, dump, study, ask, values)
    todo = Plan(study, found, ask.dial, values)
    tally: Tally | None = engine.reduce(dump, Swept(todo))
    if tally is None:
        raise DumpError("the dump has no sequence", "check that its writer was closed")
    return todo, tally


def _settled(engine: Engine, dump: Dump, study: Study, ask: Ask, values: Sequence[float]) -> Found:
    """What trainer batches settle for the preset at every threshold."""
    turned = tuple(ask.dial.turned(ask.preset, ask.dial.bounds(value)) for value in values)
    return settled(engine, dump, replace(study, presets=(ask.preset, *turned)))


def _read(todo: Plan, tally: Tally, ask: Ask) -> Sweep:
    readings = Readings(todo, tally)
    shown = _shown(readings, ask)
    found = Sweep(
        preset=ask.preset.name,
        which=str(ask.dial),
        others=[str(one) for one in dials(ask.preset) if one != ask.dial],
        statistic=remarks.statistic(ask.preset, ask.dial),
        unit="token" if readings.per_token else "sequence",
        quartiles=readings.borders(),
        points=[readings.point(at) for at in shown],
    )
    return remarks.marked(found, readings)


def _shown(readings: Readings, ask: Ask) -> list[int]:
    values = readings.plan.values
    if ask.values is not None:
        return list(range(len(values)))
    effects = [readings.effect(at) for at in range(len(values))]
    if ask.dial.part == "weight":
        effects = [min(effect, grid.MUCH) for effect in effects]
    else:
        effects = [max(effect, grid.LITTLE) for effect in effects]
    return grid.telling(values, effects, ask.dial.at(ask.preset))


def _solved(engine: Engine, dump: Dump, found: Sweep, readings: Readings, ask: Ask) -> Sweep:
    """With the window that keeps the share asked for, and its configuration."""
    assert ask.keep is not None
    sides = window.sides(ask.preset, ask.dial, ask.chosen)
    one, after = window.solve(engine, dump, readings, ask.keep, sides)
    point = remarks.marks(one.point, after, found.floor)
    one = one.model_copy(update={"point": point, **_config(after.plan.preset, ask.trainer)})
    return found.model_copy(
        update={"window": one, "remarks": [*found.remarks, *remarks.of_window(one, after, found.floor)]}
    )


def _config(preset: Preset, trainer: str) -> dict[str, str]:
    if not trainer:
        return {}
    return {"trainer": trainer_named(trainer), "config": config_for(preset, trainer).text()}


def _with_k1(found: Sweep, whole: Summary, ask: Ask) -> Sweep:
    """With −k1 beside the centre of the window: the same over tokens, where the centre is per token."""
    if getattr(ask.dial.held(ask.preset), "over", "") not in ("mean", "token"):
        return found
    k1 = whole.metrics.get(f"{PREFIXES.get(ask.preset.policy, '')}k1")
    if found.window is None or found.window.centre is None or k1 is None or k1.value is None:
        return found
    ends = None if k1.interval is None else (-k1.interval[1], -k1.interval[0])
    number = k1.model_copy(update={"value": -k1.value, "interval": ends, "formula": "mean of Δ"})
    return found.model_copy(update={"window": found.window.model_copy(update={"centre_k1": number})})


PREFIXES = {"old": "", "current": "total."}
"""Numerator → under which prefix the metrics of its drift are found."""
