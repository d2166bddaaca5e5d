"""The answer of `sweep`: what one preset keeps at many thresholds, and the bounds that keep a share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from offpol_diag.metrics import title
from offpol_diag.number import Number
from offpol_diag.numerals import count, format_value, formatted
from offpol_diag.report.analyze import analysis, of_dump
from offpol_diag.report.answer import Answer, Fact
from offpol_diag.result import Result, Sweep, SweptPoint
from offpol_diag.table import Table

COLUMNS = ("tokens_weighted", "truncated_high", "truncated_low", "ess_tokens", "weight_mean", "kept_at_lag_0")
"""Numbers that may have a column."""
MOST = 12
"""Most thresholds that a table shows, roughly."""


def answer(summary: Result, found: Sweep) -> Answer:
    """Return what the preset keeps at its own threshold, or within the bounds that were solved for."""
    columns = dict[tuple[float, ...], str]()
    for name in COLUMNS:  # those that vary, and differ from all before: without weights ESS is what is kept
        values = tuple(one.numbers.get(name, Number()).value or 0.0 for one in found.points)
        columns |= {values: name} if len({*values}) > 1 and values not in columns else {}
    kept = {one.numbers.get("tokens_weighted", Number()).value for one in found.points}
    name = "ess_tokens" if kept == {1.0} else "tokens_weighted"
    shown, points = [*columns.values()] or [name], some(found.points, name)
    own = next((one for one in points if one.own), points[0])
    value, interval = formatted(own.numbers.get(name, Number()))
    what = f"an ESS of tokens of {value}" if name == "ess_tokens" else f"{value} of the tokens"
    sentence = f"{found.preset} at {own.threshold:.7g} keeps {what} {interval}".strip()
    next_ = analysis(summary.dump)
    bound = f"{found.which} of {found.preset} moves{'' if '.' in found.which else ', the window [1/b, b]'}; "
    facts = [Fact("Bound", f"{bound}it is on {found.statistic} of each {found.unit}, r = π_train/π_rollout.")]
    if window := found.window:
        ends = {place.rpartition(".")[2]: repr(end) for place, end in window.point.bounds.items()}
        held = " ≤ ".join(filter(None, (ends.get("lower"), found.statistic, ends.get("upper"))))
        share = format_value(window.kept / window.of, "fraction")
        sentence = f"{held} keeps {share} of the {found.unit}s"
        many = f"{count(window.kept)} of {count(window.of)} {found.unit}s"
        facts.append(Fact("Asked", f"{format_value(window.asked, 'fraction')}; kept are {many}."))
        next_ = (("preset", f"offpol-diag presets {shlex.quote(window.preset)}"), *next_)
    facts += [Fact("Bug?", summary.diagnosis.headline)] if summary.diagnosis else []
    rows = [
        (f"{one.threshold:.9g}{' ←' if one.own else ''}", *(one.numbers.get(key) for key in shown))
        for one in points
    ]
    caption = f"{found.preset} by threshold of {found.which} (←: the preset as it stands)"
    table = Table("sweep", caption, ("threshold", *map(title, shown)), rows)
    return of_dump(summary)("", sentence, "info", facts=tuple(facts), tables=(table,), next=next_)


def some(points: Sequence[SweptPoint], name: str) -> list[SweptPoint]:
    """Select the thresholds to show: those between which a number moves by a part of its range."""
    values = [one.numbers.get(name, Number()).value or 0.0 for one in points]
    part, last, found = (max(values) - min(values)) / MOST, math.inf, list[SweptPoint]()
    for one, value in zip(points, values, strict=True):
        moves = abs(value - last) >= part > 0
        if moves or one.own or len(points) <= MOST:
            found.append(one)
        last = value if moves else last
    return found or [*points[:1]]
