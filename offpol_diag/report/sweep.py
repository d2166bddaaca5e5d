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


def answer(result: Result, found: Sweep) -> Answer:
    """Return what the preset keeps at its own threshold, or within the bounds that were solved for."""
    values = {
        key: [point.numbers.get(key, Number()).value or 0.0 for point in found.points] for key in COLUMNS
    }
    varying = [key for key in COLUMNS if len({*values[key]}) > 1]
    # without weights, ESS is what is kept: of equal columns the first is shown
    shown = [key for i, key in enumerate(varying) if values[key] not in map(values.get, varying[:i])]
    keeps_all = {*values["tokens_weighted"]} == {1.0}
    key = "ess_tokens" if keeps_all else "tokens_weighted"
    points = thinned(found.points, values[key])
    own = next((point for point in points if point.own), points[0])
    value, interval = formatted(own.numbers.get(key, Number()))
    what = f"an ESS of tokens of {value}" if keeps_all else f"{value} of the tokens"
    sentence = f"{found.preset} at {own.threshold:.7g} keeps {what} {interval}".strip()
    then = analysis(result.dump)
    moves = f"{found.which} of {found.preset} moves{'' if '.' in found.which else ', the window [1/b, b]'}; "
    facts = [Fact("Bound", f"{moves}it is on {found.statistic} of each {found.unit}, r = π_train/π_rollout.")]
    if window := found.window:
        ends = {place.rpartition(".")[2]: repr(end) for place, end in window.point.bounds.items()}
        inside = " ≤ ".join(filter(None, (ends.get("lower"), found.statistic, ends.get("upper"))))
        share = format_value(window.kept / window.of, "fraction")
        sentence = f"{inside} keeps {share} of the {found.unit}s"
        kept = f"{count(window.kept)} of {count(window.of)} {found.unit}s"
        facts.append(Fact("Asked", f"{format_value(window.asked, 'fraction')}; kept are {kept}."))
        then = (("preset", f"offpol-diag presets {shlex.quote(window.preset)}"), *then)
    facts += [Fact("Bug?", result.diagnosis.headline)] if result.diagnosis else []
    rows = [
        (f"{point.threshold:.9g}{' ←' if point.own else ''}", *map(point.numbers.get, shown or [key]))
        for point in points
    ]
    caption = f"{found.preset} by threshold of {found.which} (←: the preset as it stands)"
    table = Table("sweep", caption, ("threshold", *map(title, shown or [key])), rows)
    return of_dump(result)("", sentence, "info", facts=tuple(facts), tables=(table,), next=then)


def thinned(points: Sequence[SweptPoint], values: Sequence[float]) -> list[SweptPoint]:
    """Select the thresholds to show: those between which a value moves by a part of its range."""
    part = (max(values) - min(values)) / MOST or math.inf
    found, last = list[SweptPoint](), math.inf
    for point, value in zip(points, values, strict=True):
        moves = abs(value - last) >= part
        if moves or point.own or len(points) <= MOST:
            found.append(point)
        last = value if moves else last
    return found
