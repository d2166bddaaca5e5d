"""The answer of `sweep`: what one preset keeps at many thresholds, and the bounds that keep a share."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from offpol_diag.metrics import title
from offpol_diag.number import Number
from offpol_diag.numerals import count, say_value, value_or_dash, written
from offpol_diag.report.analyze import analysis, of_dump
from offpol_diag.report.answer import Answer, Fact
from offpol_diag.report.plot import COLOURS, LABELS, SHARE, Panel, chart, curve, upright
from offpol_diag.result import Result, Sweep, SweptPoint
from offpol_diag.table import Table

COLUMNS = ("tokens_weighted", "truncated_high", "truncated_low", "ess_tokens", "weight_mean", "kept_at_lag_0")
"""Numbers that have a column; the last two are no shares of all tokens or weights, and are not drawn."""
MOST = 12
"""Most thresholds that a table shows, roughly."""


def answer(summary: Result, found: Sweep) -> Answer:
    """Return what the preset keeps at its own threshold, or within the bounds that were solved for."""
    window, columns = found.window, telling(found)
    kept = {one.numbers.get("tokens_weighted", Number()).value for one in found.points}
    name = "ess_tokens" if kept == {1.0} else "tokens_weighted"
    points = shown(found.points, name)
    own = next((one for one in points if one.own), points[0])
    value, interval = written(own.numbers.get(name, Number()))
    what = f"an ESS of tokens of {value}" if name == "ess_tokens" else f"{value} of the tokens"
    sentence = f"{found.preset} at {own.threshold:.7g} keeps {what}"
    bound = f"{found.which} of {found.preset} moves{'' if '.' in found.which else ', the window [1/b, b]'}; "
    bound += f"it is on {found.statistic} of each {found.unit}, r = π_train/π_rollout."
    facts, next_ = [Fact("Bound", bound)], analysis(summary.dump)
    if window:
        ends = {place.rpartition(".")[2]: repr(end) for place, end in window.point.bounds.items()}
        held = " ≤ ".join(filter(None, (ends.get("lower"), found.statistic, ends.get("upper"))))
        sentence = f"{held} keeps {say_value(window.kept / window.of, 'fraction')} of the {found.unit}s"
        interval = ""
        many = f"{count(window.kept)} of {count(window.of)} {found.unit}s"
        facts.append(Fact("Asked", f"{say_value(window.asked, 'fraction')}; kept are {many}."))
        next_ = (("preset", f"offpol-diag presets {shlex.quote(window.preset)}"), *next_)
    if summary.diagnosis is not None:
        facts.append(Fact("Bug?", summary.diagnosis.headline))
    goes = " to ".join(
        f"{value_or_dash(one.numbers.get(name))} at {one.threshold:.7g}" for one in (points[0], points[-1])
    )
    names = [f"{one.threshold:.9g}" for one in points]
    rows = [
        (f"{at}{' ←' if one.own else ''}", *(one.numbers.get(key) for key in columns))
        for at, one in zip(names, points, strict=True)
    ]
    caption = f"{found.preset} by threshold of {found.which} (←: the preset as it stands)"
    traces = []
    for key, colour in zip(COLUMNS[:-2], COLOURS, strict=False):
        if key in columns:
            traces += curve((names, [one.numbers.get(key, Number()) for one in points], title(key), colour))
    here = [upright(at, "as it stands") for at, one in enumerate(points) if one.own]
    panel = Panel(f"threshold b of {found.which}", "share", traces, LABELS, SHARE, here)
    several = len(points) > 1
    return of_dump(summary)(
        "",
        sentence,
        "info",
        interval,
        f"Over the thresholds it goes from {goes}." if several else "",
        facts=tuple(facts),
        tables=(Table("sweep", caption, ("threshold", *map(title, columns)), rows),),
        charts=(chart("sweep", f"{title(name)}: from {goes}", panel),) if several else (),
        next=next_,
    )


def telling(found: Sweep) -> list[str]:
    """Return the numbers that have a column: those that vary, and differ from all before them.

    Without weights, ESS and mean weight are the share kept. Of one threshold, where nothing varies, all are.
    """
    columns: dict[str, list[str]] = {}
    for name in COLUMNS:
        values = [f"{one.numbers.get(name, Number()).value or 0.0:.12g}" for one in found.points]
        varies = len({*values}) > 1 or (len(values) == 1 and name in found.points[0].numbers)
        if varies and values not in columns.values():
            columns[name] = values
    return [*columns] or ["tokens_weighted"]


def shown(points: Sequence[SweptPoint], name: str) -> list[SweptPoint]:
    """Select the thresholds to show: those between which a number moves by a part of its range."""
    values = [one.numbers.get(name, Number()).value or 0.0 for one in points]
    part, last, found = (max(values) - min(values)) / MOST, math.inf, list[SweptPoint]()
    for one, value in zip(points, values, strict=True):
        moves = abs(value - last) >= part > 0
        if moves or one.own or len(points) <= MOST:
            found.append(one)
        last = value if moves else last
    return found or [*points[:1]]
