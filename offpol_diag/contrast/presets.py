"""Presets on one dump against one of them: paired differences, which is better, what each drops."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from offpol_diag.accumulators import Sums
from offpol_diag.analysis.readout import Readout
from offpol_diag.analysis.replicates import Groups, Replicates, less, of_preset, sure
from offpol_diag.analyze import Examined
from offpol_diag.better import DIRECTIONS, Better
from offpol_diag.errors import UsageError
from offpol_diag.metrics import drops
from offpol_diag.metrics.formula import Reader
from offpol_diag.summary import Comparison, Number, Numbers, PresetResult, Summary

NO_DIRECTION, EQUAL, UNDECIDED, UNKNOWN = "–", "equal", "undecided", "unknown"


def reference(names: Mapping[str, list[str]], against: str | None) -> str | None:
    """The preset that others are compared with: the one asked for, else the first that can be computed.

    Args:
        names: presets in the order in which they were named → the columns that the dump lacks for them.
        against: the one asked for, or None.

    Raises:
        UsageError: the one asked for needs a column that the dump lacks.
    """
    if against is None:
        return next((name for name, needs in names.items() if not needs), None)
    if names[against]:
        lacking = " and no ".join(names[against])
        raise UsageError(
            f"--against {against}: the dump has no {lacking}", "compare with a preset that can be computed"
        )
    return against


def of_presets(found: Examined, summary: Summary, against: str) -> Comparison:
    """The presets of a study against one of them; `summary` has its numbers."""
    out = Readout(found.study, found.tally)
    drawn = {preset.name: of_preset(out, preset) for preset in found.study.presets}
    judged = {name: summary.presets[name] for name in drawn}
    reader = Reader({**out.reader.sums, **_sums(out)}, out.groups.groups)
    groups = Groups.of(out.reader.sums["tokens"], out.groups.groups)
    lots = drops.everything(reader) if found.study.pairs else (None, None)
    ways = [(a.name, b.name) for one, other in found.study.pairs for a, b in ((other, one), (one, other))]
    return Comparison(
        against=against,
        differences={
            name: _differences(judged, drawn, name, against, groups) for name in judged if name != against
        },
        better=_leaders(judged, drawn, groups),
        all_tokens=lots[0],
        all_sequences=lots[1],
        drops=[drops.drops(reader, found.tally.states, *way) for way in ways],
    )


def _sums(out: Readout) -> dict[str, Tensor]:
    """Of what presets drop, where that was looked at."""
    sums = out.tally.states.get("drops")
    return sums.read() if isinstance(sums, Sums) else {}


def _differences(
    judged: Mapping[str, PresetResult],
    drawn: Mapping[str, Replicates],
    name: str,
    against: str,
    groups: Groups,
) -> Numbers:
    """Every number of a preset less that of the reference."""
    mine, theirs = judged[name].metrics, judged[against].metrics
    return {
        metric: _difference(number, theirs[metric], _both(drawn, metric, name, against), groups, against)
        for metric, number in mine.items()
        if metric in theirs
    }


def _both(drawn: Mapping[str, Replicates], metric: str, *names: str) -> list[Tensor]:
    """The replicates of a number under some presets; none where one has none."""
    found = [drawn[name][metric] for name in names if metric in drawn[name]]
    return found if len(found) == len(names) else []


def _difference(one: Number, other: Number, both: list[Tensor], groups: Groups, against: str) -> Number:
    text = f"less that of {against}, within each replicate"
    if both:
        return less(both[0], both[1], one, groups, text)
    blank = Number(unit=one.unit, over=one.over, formula=text)
    if one.value is None or other.value is None:
        return blank.model_copy(update={"unknown": one.unknown or other.unknown or "not known"})
    return blank.model_copy(update={"value": one.value - other.value})


def _leaders(
    judged: Mapping[str, PresetResult], drawn: Mapping[str, Replicates], groups: Groups
) -> dict[str, str]:
    """For every number, the preset that is better."""
    names = dict.fromkeys(metric for result in judged.values() for metric in result.metrics)
    return {
        metric: better(
            {name: result.metrics.get(metric, Number()) for name, result in judged.items()},
            {name: found[metric] for name, found in drawn.items() if metric in found},
            DIRECTIONS.get(metric, "neither"),
            groups,
        )
        for metric in names
    }


def better(
    numbers: Mapping[str, Number], drawn: Mapping[str, Tensor], direction: Better, groups: Groups
) -> str:
    """The preset whose number is better, or in words why none is named.

    It is named where the interval of its difference from the next excludes 0. A number without replicates
    (the largest weight) is what it is on this dump: there the values decide.
    """
    if direction == "neither" or len(numbers) < 2:
        return NO_DIRECTION
    values = {name: number.value for name, number in numbers.items() if number.value is not None}
    if len(values) < len(numbers):
        return UNKNOWN
    sign = 1 if direction == "higher" else -1
    first, second = sorted(values, key=lambda name: sign * values[name], reverse=True)[:2]
    if values[first] == values[second]:
        return EQUAL
    if first not in drawn or second not in drawn:
        return first
    return first if sure(less(drawn[first], drawn[second], numbers[first], groups, "")) else UNDECIDED
