"""Comparison of presets with a reference on one dump: paired differences, the better one, dropped tokens."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from offpol_diag.core import kept_rows, preset_numbers
from offpol_diag.core.intervals import Formula, Groups, less, sure
from offpol_diag.core.observe import Examined
from offpol_diag.core.readout import Readout
from offpol_diag.core.state import Array
from offpol_diag.core.study import Study
from offpol_diag.errors import UsageError
from offpol_diag.metrics import Better, better
from offpol_diag.number import Number
from offpol_diag.presets import Preset
from offpol_diag.result import Comparison, Result, idle


def lacking(columns: Collection[str], presets: Sequence[Preset]) -> dict[str, list[str]]:
    """Return the columns that a dump with these canonical columns lacks for each preset."""
    have = set(Study.of(columns).columns)
    return {preset.name: preset.lacking(have) for preset in presets}


def reference(names: Mapping[str, list[str]], against: str | None) -> str | None:
    """Return the preset that others are compared with: the one named, else the first that can be computed.

    Args:
        names: preset, in the user's order → the columns it needs that the dump lacks.
        against: the preset named by the user, or None.

    Raises:
        UsageError: the named preset needs a column that the dump lacks.
    """
    if against is None:
        return next((name for name, needs in names.items() if not needs), None)
    if names[against]:
        lacking = " and no ".join(names[against])
        raise UsageError(
            f"--against {against}: the dump has no {lacking}", "compare with a preset that can be computed"
        )
    return against


@np.errstate(all="ignore")
def of_presets(found: Examined, summary: Result, against: str) -> Comparison:
    """Compare the presets of a study with the preset `against`; `summary` holds their numbers."""
    out = Readout(found.study, found.state)
    drawn = {preset.name: of_preset(out, preset) for preset in found.study.presets}
    numbers = {name: summary.preset(name) for name in drawn}
    groups = out.reader.groups
    text = f"less that of {against}, within each replicate"
    differences = {
        name: {
            metric: difference(
                [numbers[one][metric] for one in (name, against)],
                [drawn[one][metric] for one in (name, against) if metric in drawn[one]],
                groups,
                text,
            )
            for metric in numbers[name]
            if metric in numbers[against]
        }
        for name in drawn
        if name != against
    }
    metrics = dict.fromkeys(metric for row in numbers.values() for metric in row)
    acting = {name: row for name, row in numbers.items() if not idle(row)}
    leaders = {
        metric: leader(
            {name: row.get(metric, Number()) for name, row in acting.items()},
            {name: row[metric] for name, row in drawn.items() if metric in row and name in acting},
            better(metric),
            groups,
        )
        for metric in metrics
    }
    study, state = found.study, found.state
    return Comparison(
        against=against,
        differences=differences,
        better=leaders,
        **(kept_rows.dropped(state, study.seed, study.pairs) if study.pairs else {}),
    )


def of_preset(out: Readout, preset: Preset) -> dict[str, Array]:
    """Return one preset's numbers that have an interval, with their replicates, [1+B], by name."""
    prefix = f"{preset.name}|"
    rows: list[Formula] = [*preset_numbers.ROWS]
    if f"{prefix}loss" in out.reader.drawn:
        rows += preset_numbers.LOSSES
    return {row.name: row.of(partial(out.reader.column, prefix=prefix)) for row in rows}


def difference(both: Sequence[Number], drawn: Sequence[Array], groups: Groups, text: str) -> Number:
    """Return the difference of two numbers: within each replicate if both have replicates, else of values.

    Args:
        both: the two numbers; the second is subtracted.
        drawn: the value and replicates [1+B] of each number that has them.
        groups: the groups that were resampled.
        text: the formula of the difference.
    """
    one, other = both
    if len(drawn) == 2:
        return less(drawn[0], drawn[1], one, groups, text)
    blank = Number(unit=one.unit, over=one.over, formula=text)
    if one.value is None or other.value is None:
        return replace(blank, unknown=one.unknown or other.unknown or "not known")
    return replace(blank, value=one.value - other.value)


def leader(
    numbers: Mapping[str, Number], drawn: Mapping[str, Array], direction: Better, groups: Groups
) -> str:
    """Return the preset with the best number, or a word saying why none is named.

    Presets that change nothing on this dump are not among them: weights of 1 have the best ESS of all.

    It is named if the interval of its difference from the second best excludes 0. For a number without
    replicates (the largest weight) the values decide.
    """
    if direction == "neither" or len(numbers) < 2:
        return "–"
    values = {name: number.value for name, number in numbers.items() if number.value is not None}
    if len(values) < len(numbers):
        return "unknown"
    sign = 1 if direction == "higher" else -1
    first, second = sorted(values, key=lambda name: sign * values[name], reverse=True)[:2]
    if values[first] == values[second]:
        return "equal"
    if first not in drawn or second not in drawn:
        return first
    return first if sure(less(drawn[first], drawn[second], numbers[first], groups, "")) else "undecided"
