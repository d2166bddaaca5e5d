"""Section on one preset at many thresholds: what each keeps, and the bounds that keep a requested share."""

from __future__ import annotations

from offpol_diag.blocks import Cell, Code, Section, Table, Text, Verdict, filled
from offpol_diag.numerals import count, say, say_value
from offpol_diag.presets import catalogue
from offpol_diag.presets.tuning import command
from offpol_diag.summary import Number, SolvedWindow, Summary, Sweep, SweptPoint

COLUMNS = {
    "tokens_weighted": ("kept tokens", "kept tokens"),
    "truncated_high": ("weights above", "weights above the bound"),
    "truncated_low": ("weights below", "weights below the bound"),
    "ess_tokens": ("ESS", "ESS of tokens"),
    "loss_scale_kept": ("mean weight", "mean weight"),
    "kept_length_q1": ("shortest", "kept of the shortest quarter"),
    "kept_length_q4": ("longest", "kept of the longest quarter"),
    "kept_at_lag_0": ("at lag 0", "kept at policy lag 0"),
}
"""Metric → header of its column, if it says something, and what it is called where there is room."""
QUARTERS = ("shortest", "second", "third", "longest")
NOTES = {
    "tokens_weighted": "Kept tokens: not rejected, and of a weight above 0.",
    "truncated_high": "Weights above, below: the share beyond the upper or lower bound.",
    "ess_tokens": "ESS: (Σw)²/(nΣw²) of the final weights, 0 where rejected; the smaller, the noisier.",
    "loss_scale_kept": "Mean weight: Σw/n, 0 where rejected; its distance from 1 is the bias of a constant.",
    "kept_at_lag_0": "At lag 0: kept tokens of policy lag 0, where only numerics make the policies differ.",
}
"""Metric → what its column is."""


def sweep(summary: Summary) -> Section | None:
    """Return the results of a sweep; None if there was none."""
    found = summary.sweep
    if found is None:
        return None
    window = "" if "." in found.which else ": the window [1/b, b] for each threshold b"
    others = f" Its other bounds: --which {', '.join(found.others)}." if found.others else ""
    what = (
        f"{found.which} of {found.preset} moves{window}; it bounds {found.statistic} of each {found.unit}, "
        f"r = π_train/π_rollout.{others}"
    )
    solved = found.window
    blocks = filled(
        Text(what),
        *(Text(remark, "warn") for remark in found.remarks),
        _window(found, solved) if solved else None,
        _table(found),
        Code(f"The config for {solved.trainer}", solved.config) if solved and solved.config else None,
    )
    return Section("sweep", f"Thresholds of {found.preset}", blocks)


# ---------------------------------------------------------------- every threshold


def columns(found: Sweep) -> list[str]:
    """Return the metrics that have a column: those that say something which none before them says.

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
    return [name for name in new if set(each[name]) != {1.0}] or new or [*COLUMNS][:1]


def _values(found: Sweep, name: str) -> list[float | None]:
    return [point.metrics.get(name, Number()).value for point in found.points]


def _equal(one: list[float | None], other: list[float | None]) -> bool:
    pairs = zip(one, other, strict=True)
    return all(a is b or (a is not None and b is not None and abs(a - b) < 1e-12) for a, b in pairs)


def kept_metric(found: Sweep) -> str:
    """Return the metric that says what a threshold keeps: of weights that are only truncated, the ESS."""
    return "tokens_weighted" if set(_values(found, "tokens_weighted")) != {1.0} else "ess_tokens"


def _table(found: Sweep) -> Table:
    shown = columns(found)
    rows: list[tuple[Cell, ...]] = [
        (label(one), *(one.metrics.get(name, Number()) for name in shown)) for one in found.points
    ]
    notes = ["←: the preset as it stands.", *(NOTES[name] for name in shown if name in NOTES)]
    if "kept_length_q1" in shown or "kept_length_q4" in shown:
        notes[0] += " Shortest, longest: kept of that quarter of the responses by length."
        lengths = (f"{name} {length}" for name, length in zip(QUARTERS, found.quartiles, strict=False))
        notes.append(f"Tokens of a response by quarter: {'; '.join(lengths)}.")
    header = ("threshold", *(COLUMNS[name][0] for name in shown))
    return Table("sweep", f"{found.preset}: every threshold of {found.which}", header, rows, tuple(notes))


def label(point: SweptPoint) -> str:
    """Return a threshold; an arrow marks the preset's own."""
    return f"{point.threshold:.9g}{' ←' if point.own else ''}"


# ---------------------------------------------------------------- the window


def window_text(found: Sweep, window: SolvedWindow) -> tuple[str, str]:
    """Return the bounds with the share that they keep, and how many units that are."""
    sides = {place.rpartition(".")[2]: bound for place, bound in window.point.bounds.items()}
    left = f"{sides['lower']!r} ≤ " if "lower" in sides else ""
    right = f" ≤ {sides['upper']!r}" if "upper" in sides else ""
    bounds, units = f"{left}{found.statistic}{right}", f"{found.unit}s"
    share = say_value(window.kept / window.of, "fraction")
    held = f"{count(window.kept)} of {count(window.of)} {units} ({share}"
    return f"{bounds} keeps {share} of the {units}", f"{bounds} holds {held}"


def _window(found: Sweep, window: SolvedWindow) -> Verdict:
    text = f"{window_text(found, window)[1]}; asked: {say_value(window.asked, 'fraction')})."
    numbers = window.point.metrics
    known = "; ".join(
        f"{COLUMNS[name][1]} {say(numbers[name])}" for name in columns(found) if name in numbers
    )
    settings = {place: repr(bound) for place, bound in window.point.bounds.items()}
    # a user's preset needs its file, which is unknown here
    file = "" if found.preset in catalogue.load() else " --preset-file FILE"
    detail = [
        f"The preset with it: {known}.",
        f"As the preset's bounds, on π_train/π_rollout: {command(found.preset, settings)}{file}",
    ]
    if len(settings) == 2:
        detail.insert(0, "As many are lost below as above: the window follows the data.")
    return Verdict("Window" if len(settings) == 2 else "Bound", text, "info", tuple(detail))
