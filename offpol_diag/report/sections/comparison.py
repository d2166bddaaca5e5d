"""Presets side by side; metrics as rows, or presets where these are many."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.blocks import Block, Cell, Section, Table, Text
from offpol_diag.directions import FIRST_PRESET
from offpol_diag.numerals import count
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.drops import drops
from offpol_diag.summary import Comparison, Number, PresetResult, Summary

ACROSS = 8
"""Maximum number of presets shown as columns; more are shown as rows."""


def comparison(summary: Summary) -> Section | None:
    """Return numbers, differences and drops of the presets; None if no presets were compared."""
    found = summary.comparison
    if found is None:
        return None
    judged = {name: result for name, result in summary.presets.items() if not result.needs}
    many = len(judged) > ACROSS
    blocks = (
        *_needing(summary.presets),
        *(() if many else _methods(judged)),
        *_tables(summary, judged, found, many),
        *drops(found, many),
    )
    return Section("comparison", "Presets side by side", blocks)


def _needing(presets: Mapping[str, PresetResult]) -> tuple[Block, ...]:
    lacking = [f"{name} needs {', '.join(result.needs)}" for name, result in presets.items() if result.needs]
    return (Text(f"Not computed, for want of columns: {'; '.join(lacking)}.", "warn"),) if lacking else ()


def _methods(judged: Mapping[str, PresetResult]) -> tuple[Block, ...]:
    return tuple(Text(f"{name}: {result.method}") for name, result in judged.items())


def _tables(
    summary: Summary, judged: Mapping[str, PresetResult], found: Comparison, many: bool
) -> tuple[Block, ...]:
    if not judged:
        return (Text("None of these presets can be computed from this dump.", "warn"),)
    known, unknown = _metrics(judged)
    others = [name for name in judged if name in found.differences]
    ranked = not is_bug(summary)
    lines: list[tuple[Cell, ...]] = [("metric", *judged, *(("better",) if ranked else ()))]
    lines += [_row(metric, judged, found, ranked) for metric in known]
    facts = f"{count(summary.dump.tokens)} tokens, {count(summary.dump.sequences)} sequences"
    note = BETTER if ranked else UNRANKED
    notes = (*((note,) if others else ()), *_unknown(unknown))
    values = _table("comparison", f"All numbers, with 95% intervals ({facts})", lines, many, notes)
    return (values, *_differences(known, others, found, many))


BETTER = (
    "better: a preset is named where the interval of its difference from the next best excludes 0, and "
    "undecided stands where it does not; without intervals the values decide."
)
UNRANKED = "No preset is called better while the diagnosis is a bug: fix the bug first."
PAIRED = (
    "What two presets share cancels within a replicate, so these intervals are usually narrower than those "
    "of the numbers themselves. Differences of shares are in percentage points."
)


def _differences(known: list[str], others: list[str], found: Comparison, many: bool) -> tuple[Block, ...]:
    """Return each preset's difference from the reference; numbers equal for all are omitted and listed."""
    rows = {metric: [found.differences[name].get(metric) for name in others] for metric in known}
    alike = [metric for metric, cells in rows.items() if all(one and one.value == 0 for one in cells)]
    lines: list[tuple[Cell, ...]] = [("metric", *(f"{name} − {found.against}" for name in others))]
    lines += [(metric, *cells) for metric, cells in rows.items() if metric not in alike]
    if not others or len(lines) == 1:
        return ()
    equal = (f"Equal: {', '.join(alike)}.",) if alike else ()
    caption = f"Differences from {found.against}, paired by bootstrap replicate"
    return (_table("differences", caption, lines, many, (PAIRED, *equal), folded=many),)


def _table(
    name: str,
    caption: str,
    lines: list[tuple[Cell, ...]],
    turned: bool,
    notes: tuple[str, ...],
    folded: bool = False,
) -> Table:
    """Return a table of lines, transposed if `turned`."""
    header, *rows = zip(*lines, strict=True) if turned else lines
    titles = ("preset" if turned else "metric", *map(str, header[1:]))
    return Table(name, caption, titles, tuple(rows), notes, collapsed=folded)


def _unknown(names: list[str]) -> tuple[str, ...]:
    return (f"Cannot be known from this dump: {', '.join(names)}.",) if names else ()


def _metrics(judged: Mapping[str, PresetResult]) -> tuple[list[str], list[str]]:
    """Return the metrics with a value for some preset, and those without; metrics with a direction first."""
    found = dict.fromkeys(name for result in judged.values() for name in result.metrics)
    ordered = [name for name in FIRST_PRESET if name in found]
    ordered += [name for name in found if name not in FIRST_PRESET]
    known = [name for name in ordered if any(_has_value(result, name) for result in judged.values())]
    return known, [name for name in ordered if name not in known]


def _has_value(result: PresetResult, metric: str) -> bool:
    number = result.metrics.get(metric)
    return number is not None and (number.value is not None or number.log10 is not None)


def _row(
    metric: str, judged: Mapping[str, PresetResult], found: Comparison, ranked: bool
) -> tuple[Cell, ...]:
    absent = Number(unknown="not computed for this preset")
    numbers = [result.metrics.get(metric, absent) for result in judged.values()]
    return (metric, *numbers, *((found.better.get(metric, "–"),) if ranked else ()))
