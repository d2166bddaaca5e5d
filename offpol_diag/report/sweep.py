"""The answer of `sweep`: what one preset keeps at many thresholds, and the bounds that keep a share."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from itertools import cycle

from offpol_diag.metrics import title as title_of
from offpol_diag.number import Number
from offpol_diag.numerals import count, rounded, say_value, value_or_dash, written
from offpol_diag.presets import catalogue
from offpol_diag.report.analyze import analysis, of_dump
from offpol_diag.report.answer import Answer, Fact, Tile
from offpol_diag.report.plot import COLOURS, LABELS, SHARE, Chart, Panel, chart, curve, upright
from offpol_diag.report.tiles import below_0
from offpol_diag.result import Result, SolvedWindow, Sweep, SweptPoint
from offpol_diag.table import Cell, Table

COLUMNS = {
    "tokens_weighted": "kept tokens",
    "truncated_high": "weights above",
    "truncated_low": "weights below",
    "ess_tokens": "ESS",
    "weight_mean": "mean weight",
    "kept_at_lag_0": "at lag 0",
}
"""Number → header of its column, if it says something of its own."""
NOTES = {
    "tokens_weighted": "Kept tokens: not rejected, and of a weight above 0.",
    "truncated_high": "Weights above, below: the share beyond the upper or lower bound.",
    "ess_tokens": "ESS: (Σw)²/(nΣw²) of the final weights, 0 where rejected; the smaller, the noisier.",
    "weight_mean": "Mean weight: of the tokens not rejected; its distance from 1 is the bias of a constant.",
    "kept_at_lag_0": "At lag 0: kept tokens of policy lag 0, where only numerics make the policies differ.",
}
"""Number → what its column is."""
APART = ("weight_mean", "kept_at_lag_0")
"""Numbers that are not drawn: no shares of all tokens or weights."""
TILES = 8


def answer(summary: Result, found: Sweep) -> Answer:
    """Return what the preset keeps at its own threshold, or within the bounds that were solved for."""
    window, name = found.window, kept(found)
    own = next((one for one in found.points if one.own), found.points[0])
    point = window.point if window else own
    value, interval = written(point.numbers.get(name, Number()))
    what = "an ESS of tokens of " if name == "ess_tokens" else ""
    of = "" if name == "ess_tokens" else " of the tokens"
    sentence = f"{found.preset} at {point.threshold:.7g} keeps {what}{value}{of}"
    facts = [Fact("Bound", _bound(found))]
    if window:
        share = say_value(window.kept / window.of, "fraction")
        sentence, interval = f"{_bounds(found, window)} keeps {share} of the {found.unit}s", ""
        held = f"{count(window.kept)} of {count(window.of)} {found.unit}s"
        facts.append(Fact("Asked", f"{say_value(window.asked, 'fraction')}; kept are {held}."))
    facts += [Fact("Warning", one) for one in found.remarks]
    given = summary.diagnosis
    facts += [Fact("Bug?", given.headline)] if given is not None else []
    where = f"at the preset's own {own.threshold:.7g}" if own.own else f"at {own.threshold:.7g}"
    goes = "; the small curves run over all thresholds" if len(found.points) > 1 else ""
    return of_dump(summary)(
        "",
        sentence,
        "warn" if found.remarks else "info",
        interval,
        _change(found),
        facts=tuple(facts),
        lead=f"{found.preset} {'within these bounds' if window else where}{goes}.",
        tiles=tuple(_tiles(found, point)),
        tables=tuple(_tables(found)),
        charts=tuple(_charts(found)),
        code=((f"For {window.trainer}", window.config),) if window and window.config else (),
        next=tuple(_commands(summary, found)),
    )


def kept(found: Sweep) -> str:
    """Return the name of the number that says what a threshold keeps: of truncated weights alone, the ESS."""
    return "tokens_weighted" if set(_values(found, "tokens_weighted")) != {1.0} else "ess_tokens"


def _bound(found: Sweep) -> str:
    window = "" if "." in found.which else ", the window [1/b, b] for each threshold b"
    others = f" Its other bounds: --which {', '.join(found.others)}." if found.others else ""
    return (
        f"{found.which} of {found.preset} moves{window}; it is on {found.statistic} of each {found.unit}, "
        f"r = π_train/π_rollout.{others}"
    )


def _bounds(found: Sweep, window: SolvedWindow) -> str:
    sides = {place.rpartition(".")[2]: bound for place, bound in window.point.bounds.items()}
    left = f"{sides['lower']!r} ≤ " if "lower" in sides else ""
    right = f" ≤ {sides['upper']!r}" if "upper" in sides else ""
    return f"{left}{found.statistic}{right}"


def _commands(summary: Result, found: Sweep) -> Iterator[tuple[str, str]]:
    """Yield the preset with the bounds that were solved for, on π_train/π_rollout, and the analysis."""
    if found.window:
        # a user's preset needs its file, which is unknown here
        file = "" if found.preset in catalogue.load() else " --preset-file FILE"
        yield "preset", f"offpol-diag presets {shlex.quote(found.window.preset)}{file}"
    yield from analysis(summary.dump)


def _change(found: Sweep) -> str:
    """Say how what is kept changes from the first threshold to the last; empty if there is only one."""
    ends, name = (found.points[0], found.points[-1]), kept(found)
    if len(found.points) == 1:
        return ""
    goes = (f"{value_or_dash(one.numbers.get(name))} at {one.threshold:.7g}" for one in ends)
    return f"Over the thresholds it goes from {' to '.join(goes)}."


def telling(found: Sweep) -> list[str]:
    """Return the numbers that have a column: those that say something which none before them says.

    A share that is 0 everywhere says nothing, and all of a share only if nothing else is left to say. Without
    weights, ESS and mean weight are the share kept.
    """
    each = {name: _values(found, name) for name in COLUMNS}
    known = [name for name in COLUMNS if set(each[name]) - {None, 0.0}]
    new = [
        name
        for at, name in enumerate(known)
        if not any(_equal(each[name], each[earlier]) for earlier in known[:at])
    ]
    return [name for name in new if set(each[name]) - {None} != {1.0}] or new or [*COLUMNS][:1]


def _values(found: Sweep, name: str) -> list[float | None]:
    return [point.numbers.get(name, Number()).value for point in found.points]


def _equal(one: Sequence[float | None], other: Sequence[float | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b or (a is not None and b is not None and abs(a - b) < 1e-12) for a, b in pairs)


def label(point: SweptPoint) -> str:
    """Return a threshold; an arrow marks the preset's own."""
    return f"{point.threshold:.9g}{' ←' if point.own else ''}"


def _tables(found: Sweep) -> Iterator[Table]:
    names = telling(found)
    notes = ["←: the preset as it stands.", *(NOTES[name] for name in names if name in NOTES)]
    header = ("threshold", *(COLUMNS[name] for name in names))
    caption = f"{found.preset}: every threshold of {found.which}"
    yield Table("sweep", caption, header, _rows(found, names), tuple(notes))
    if any(one.value for point in found.points for one in point.dropped.values()):
        lengths = [*found.points[0].dropped]
        rows = [(label(one), *(one.dropped.get(key) for key in lengths)) for one in found.points]
        caption = "Dropped sequences by their length in tokens"
        yield Table("sweep-length", caption, ("threshold", *lengths), rows, shown="more")


def _rows(found: Sweep, names: Sequence[str]) -> list[tuple[Cell, ...]]:
    return [(label(one), *(one.numbers.get(name, Number()) for name in names)) for one in found.points]


def _tiles(found: Sweep, point: SweptPoint) -> Iterator[Tile]:
    ends = (found.points[0], found.points[-1])
    for name in telling(found)[:TILES]:
        number = point.numbers.get(name, Number())
        if number.known:
            values = [one.numbers.get(name, Number()).value for one in found.points]
            below = " → ".join(value_or_dash(one.numbers.get(name)) for one in ends)
            many = len(found.points) > 1
            yield Tile(
                title_of(name),
                number,
                below_0(name, number),
                below=below if many else "",
                key=name,
                curve=values,
            )


def _charts(found: Sweep) -> Iterator[Chart]:
    names = [f"{one.threshold:.9g}" for one in found.points]
    shares = {
        name: [one.numbers.get(name, Number()) for one in found.points]
        for name in telling(found)
        if name not in APART
    }
    known = {name: some for name, some in shares.items() if any(one.value is not None for one in some)}
    if not known or len(names) < 2:
        return
    first, *_ = known
    seen = [(at, one.value) for at, one in zip(names, known[first], strict=True) if one.value is not None]
    some = (seen[0], seen[len(seen) // 2], seen[-1])
    goes = ", ".join(f"{rounded(y, 'share')} at {at}" for at, y in some)
    title = f"{title_of(first)}: {goes}"
    traces = [
        trace
        for (name, numbers), colour in zip(known.items(), cycle(COLOURS), strict=False)
        for trace in curve((names, numbers, title_of(name), colour))
    ]
    own = [upright(i, "as it stands") for i, one in enumerate(found.points) if one.own]
    across = f"threshold b of {found.which}"
    yield chart("sweep", title, Panel(across, "share", traces, LABELS, SHARE, own))
