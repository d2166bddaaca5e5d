"""Presets side by side; metrics as rows, or presets where these are many."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.blocks import Block, Cell, Section, Table, Text
from offpol_diag.metrics import FIRST_PRESET
from offpol_diag.numerals import count
from offpol_diag.report.sections.diagnosis import is_bug
from offpol_diag.report.sections.drops import drops
from offpol_diag.summary import Comparison, Number, PresetResult, Summary

ABSENT = Number(unknown="not computed for this preset")
ACROSS = 8
"""Maximum number of presets shown as columns; more are shown as rows."""


def comparison(summary: Summary) -> Section | None:
    """Return numbers, differences and drops of the presets; None if no presets were compared."""
    found = summary.comparison
    if found is None:
        return None
    judged = {name: one for name, one in summary.presets.items() if not one.needs}
    lacking = [f"{name} needs {', '.join(one.needs)}" for name, one in summary.presets.items() if one.needs]
    many = len(judged) > ACROSS
    blocks = (
        *((Text(f"Not computed, for want of columns: {'; '.join(lacking)}.", "warn"),) if lacking else ()),
        *(Text(f"{name}: {result.method}") for name, result in judged.items() if not many),
        *_tables(summary, judged, found, many),
        *drops(found, many),
    )
    return Section("comparison", "Presets side by side", blocks)


def _tables(
    summary: Summary, judged: Mapping[str, PresetResult], found: Comparison, many: bool
) -> tuple[Block, ...]:
    if not judged:
        return (Text("None of these presets can be computed from this dump.", "warn"),)
    found_in = dict.fromkeys(name for result in judged.values() for name in result.metrics)
    names = [name for name in FIRST_PRESET if name in found_in]  # those with a direction first
    names += [name for name in found_in if name not in FIRST_PRESET]
    known = [name for name in names if any(one.metrics.get(name, ABSENT).known for one in judged.values())]
    unknown = [name for name in names if name not in known]
    others = [name for name in judged if name in found.differences]
    ranked = not is_bug(summary)
    lines: list[tuple[Cell, ...]] = [("metric", *judged, *(("better",) if ranked else ()))]
    lines += [
        (
            metric,
            *(result.metrics.get(metric, ABSENT) for result in judged.values()),
            *((found.better.get(metric, "–"),) if ranked else ()),
        )
        for metric in known
    ]
    facts = f"{count(summary.dump.tokens)} tokens, {count(summary.dump.sequences)} sequences"
    notes = [BETTER if ranked else UNRANKED] if others else []
    notes += [f"Cannot be known from this dump: {', '.join(unknown)}."] if unknown else []
    values = _table("comparison", f"All numbers, with 95% intervals ({facts})", lines, many, tuple(notes))
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
