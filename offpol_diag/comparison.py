"""Presets side by side: a Summary → one section; metrics as rows, or presets where these are many."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from offpol_diag.blocks import Block, Cell, Section, Table, Text
from offpol_diag.summary import Number, PresetResult, Summary

Better = Literal["higher", "lower", "neither"]

ROWS: Mapping[str, Better] = {
    "ess_tokens": "higher",
    "ess_sequences": "higher",
    "tokens_rejected": "lower",
    "sequences_dropped": "lower",
    "sequences_touched": "lower",
    "vetoed": "lower",
    "truncated_high": "lower",
    "truncated_low": "lower",
    "catastrophic_tokens": "lower",
    "weight_mean": "neither",
    "weight_std": "lower",
    "weight_min": "neither",
    "weight_max": "lower",
    "loss_scale_removed": "neither",
    "loss_scale_kept": "neither",
    "pg_loss": "neither",
    "pg_clipfrac": "neither",
    "pg_clipfrac_lower": "neither",
    "ppo_kl": "neither",
}
"""Which way is better: more effective samples, less data lost, lighter weights. Others follow, unmarked."""

ACROSS = 8
"""So many presets stand in columns; more of them in rows."""

NO_DIRECTION, EQUAL, CLOSE, UNKNOWN = "–", "equal", "overlap", "unknown"


def side_by_side(summary: Summary) -> Section:
    """The table, after a sentence that says what its last column means."""
    judged = {name: result for name, result in summary.presets.items() if not result.needs}
    return Section(
        "comparison",
        "Presets side by side",
        (*_needing(summary.presets), *_methods(judged), *_table(summary, judged)),
    )


def better(numbers: Mapping[str, Number], direction: Better) -> str:
    """The preset whose number is better, or in words why none is named."""
    if direction == "neither" or len(numbers) < 2:
        return NO_DIRECTION
    values = {name: number.value for name, number in numbers.items() if number.value is not None}
    if len(values) < len(numbers):
        return UNKNOWN
    sign = 1 if direction == "higher" else -1
    first, second = sorted(values, key=lambda name: sign * values[name], reverse=True)[:2]
    if values[first] == values[second]:
        return EQUAL
    return first if _apart(numbers[first], numbers[second]) else CLOSE


def _apart(one: Number, other: Number) -> bool:
    """Whether the intervals leave no doubt; without intervals the values speak."""
    if one.interval is None or other.interval is None:
        return True
    return one.interval[1] < other.interval[0] or other.interval[1] < one.interval[0]


def _needing(presets: Mapping[str, PresetResult]) -> tuple[Block, ...]:
    lacking = [f"{name} needs {', '.join(result.needs)}" for name, result in presets.items() if result.needs]
    return (Text(f"Not computed, for want of columns: {'; '.join(lacking)}.", "warn"),) if lacking else ()


def _methods(judged: Mapping[str, PresetResult]) -> tuple[Block, ...]:
    return tuple(Text(f"{name}: {result.method}") for name, result in judged.items())


def _table(summary: Summary, judged: Mapping[str, PresetResult]) -> tuple[Block, ...]:
    if not judged:
        return (Text("None of these presets can be computed from this dump.", "warn"),)
    known, unknown = _metrics(judged)
    lines = (("metric", *judged, "better"), *(_row(metric, judged) for metric in known))
    header, *rows = zip(*lines, strict=True) if len(judged) > ACROSS else lines
    caption = (
        f"{summary.dump.tokens:,} tokens, {summary.dump.sequences:,} sequences; 95 % intervals in brackets"
    )
    notes = (
        f"better: a preset is named where its interval lies apart from the next; {CLOSE}: it does not.",
        *([f"Cannot be known from this dump: {', '.join(unknown)}."] if unknown else []),
    )
    titles = ("preset" if len(judged) > ACROSS else "metric", *map(str, header[1:]))
    return (Table("comparison", caption, titles, tuple(rows), notes),)


def _metrics(judged: Mapping[str, PresetResult]) -> tuple[list[str], list[str]]:
    """The metrics that some preset has a value for, and those that none has; in the order of `ROWS`."""
    found = dict.fromkeys(name for result in judged.values() for name in result.metrics)
    ordered = [name for name in ROWS if name in found] + [name for name in found if name not in ROWS]
    known = [name for name in ordered if any(_has_value(result, name) for result in judged.values())]
    return known, [name for name in ordered if name not in known]


def _has_value(result: PresetResult, metric: str) -> bool:
    number = result.metrics.get(metric)
    return number is not None and (number.value is not None or number.log10 is not None)


def _row(metric: str, judged: Mapping[str, PresetResult]) -> tuple[Cell, ...]:
    absent = Number(unknown="not computed for this preset")
    numbers = {name: result.metrics.get(metric, absent) for name, result in judged.items()}
    return (metric, *numbers.values(), better(numbers, ROWS.get(metric, "neither")))
