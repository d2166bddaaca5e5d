"""Section on one preset at many thresholds: data kept overall and by length; bounds for a requested share."""

from __future__ import annotations

from collections.abc import Sequence

from offpol_diag.blocks import Cell, Code, Figure, Section, Series, Table, Text, Verdict, filled
from offpol_diag.numerals import count, say, say_value
from offpol_diag.presets import catalogue
from offpol_diag.presets.tuning import command
from offpol_diag.summary import Number, Numbers, SolvedWindow, Summary, Sweep, SweptPoint

COLUMNS = (
    ("tokens_kept", "kept tokens"),
    ("sequences_kept", "kept seq."),
    ("acted", "bounded"),
    ("ess_tokens", "ESS tok."),
    ("ess_sequences", "ESS seq."),
    ("kappa", "κ"),
    ("chi2_token", "χ² tok."),
    ("chi2_sequence", "χ² seq."),
    ("fresh_kept", "lag 0 kept"),
)
"""Metric and header of each column of the main table, if it is informative."""
DRAWN = (
    ("tokens_kept", "tokens kept", "T"),
    ("sequences_kept", "sequences kept", "S"),
    ("acted", "weights changed", "W"),
    ("ess_tokens", "ESS over tokens", "E"),
    ("ess_sequences", "ESS over sequences", "e"),
)
"""Metric, its label in the figure, and its character in plain text."""
LETTERS = {"length": "L", "floor": "N", "centre": "C"}
QUARTERS = ("q1 short", "q2", "q3", "q4 long")
KAPPA = (
    "κ = Σw/n over all tokens, a rejected one weighs 0: how far it lies from 1 is the bias of a constant; "
    "ESS and χ² are of the final weights: variance. A row may be better in one and worse in the other."
)

BELOW_0 = (
    "χ² below 0 is none: it is mean(w²) − 1 of the final weights, whose mean the bounds have taken below 1."
)


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
        _figure(found),
        *_by_length(found),
        _details(found),
        _floor(found),
        _predicted(solved) if solved else None,
        Code(f"The config for {solved.trainer}", solved.config) if solved and solved.config else None,
    )
    return Section("sweep", f"Thresholds of {found.preset}", blocks)


# ---------------------------------------------------------------- every threshold


def _table(found: Sweep) -> Table:
    columns = [one for one in COLUMNS if _telling(found, one[0])]
    rows = [(*_head(point), *_cells(point.metrics, columns)) for point in found.points]
    notes = (
        "←: the preset as it stands. Marks: L drops long responses, N lies under numerical noise, C lies "
        "beside the data.",
        KAPPA,
        *((BELOW_0,) if any(_below_0(point) for point in found.points) else ()),
    )
    header = ("threshold", "marks", *(head for _, head in columns))
    return Table("sweep", f"{found.preset}: every threshold of {found.which}", header, rows, notes)


def _below_0(point: SweptPoint) -> bool:
    return any((point.metrics.get(key, Number()).value or 0) < 0 for key in ("chi2_token", "chi2_sequence"))


def _telling(found: Sweep, name: str) -> bool:
    """Return whether a metric is informative: not all unknown or 0, nor, for bounded weights, all 1."""
    values = {point.metrics[name].value for point in found.points if name in point.metrics}
    return bool(values - {None, 0.0}) and not (_weighs(found) and values == {1.0})


def _weighs(found: Sweep) -> bool:
    return any("acted" in point.metrics for point in found.points)


def _head(point: SweptPoint) -> tuple[Cell, Cell]:
    return label(point), "".join(LETTERS[mark] for mark in point.marks) or "–"


def label(point: SweptPoint) -> str:
    """Return a threshold; an arrow marks the preset's own."""
    return f"{point.threshold:.9g}{' ←' if point.own else ''}"


def _cells(numbers: Numbers, columns: Sequence[tuple[str, str]]) -> tuple[Cell, ...]:
    return tuple(numbers.get(name, Number(unknown="not asked")) for name, _ in columns)


def distinct(found: Sweep) -> list[tuple[str, str, str]]:
    """Return the curves without exact duplicates: without weights, ESS equals the share kept."""
    lines: dict[tuple[float | None, ...], tuple[str, str, str]] = {}
    for one in DRAWN:
        values = tuple(point.metrics.get(one[0], Number()).value for point in found.points)
        if _telling(found, one[0]):
            lines.setdefault(values, one)
    return list(lines.values())


def _figure(found: Sweep) -> Figure:
    series = [
        Series(text, mark, [point.metrics.get(name, Number()).value for point in found.points])
        for name, text, mark in distinct(found)
    ]
    title = f"What {found.preset} leaves at each threshold"
    return Figure(title, [*map(label, found.points)], series, "fraction")


# ---------------------------------------------------------------- by length


def kept_metric(found: Sweep) -> str:
    """Return the metric that says what a threshold keeps."""
    if _weighs(found):
        return "ess_tokens"
    return "tokens_kept" if found.unit == "token" else "sequences_kept"


def _by_length(found: Sweep) -> tuple[Table, Figure]:
    """Return what each quartile of response length keeps, as a table and as a figure."""
    name = kept_metric(found)
    what = {
        "ess_tokens": "ESS over tokens",
        "tokens_kept": "Tokens kept",
        "sequences_kept": "Sequences kept",
    }[name]
    rows = [(*_head(one), *(part.get(name, Number()) for part in one.quartiles)) for one in found.points]
    lengths = "; ".join(f"{a}: {b}" for a, b in zip(QUARTERS, found.quartiles, strict=True))
    notes = (f"Tokens of a response: {lengths}.",)
    header = ("threshold", "marks", *QUARTERS)
    table = Table("sweep-length", f"{what} by quartile of response length", header, rows, notes)
    series = [
        Series(text, str(at + 1), [one.quartiles[at][name].value for one in found.points])
        for at, text in enumerate(QUARTERS)
    ]
    return table, Figure(f"{what} by length", [*map(label, found.points)], series, "fraction")


def _details(found: Sweep) -> Table:
    """Return a table of all numbers by quartile."""
    names = [(name, head) for name, head in COLUMNS if name in found.points[0].quartiles[0]]
    rows = [
        (label(point), quarter, *_cells(numbers, names))
        for point in found.points
        for quarter, numbers in zip(QUARTERS, point.quartiles, strict=True)
    ]
    header = ("threshold", "length", *(head for _, head in names))
    return Table("sweep-details", "Everything by quartile of length", header, rows, collapsed=True)


# ---------------------------------------------------------------- noise


def _floor(found: Sweep) -> Table:
    rows = [
        (one.source, "this dump" if one.found else "if so", one.per_token, one.statistic)
        for one in found.floor
    ]
    note = (
        "Standard deviation of rounding: half a step of the format, uniform, under both policies. What "
        "logits were computed in is not in a dump; a threshold closer than that to no mismatch then judges "
        "rounding."
    )
    caption = f"How far numerics alone move Δ, and (the log of) {found.statistic}"
    header = ("source", "known from", "Δ of a token, nats", f"of each {found.unit}")
    return Table("sweep-floor", caption, header, rows, (note,))


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
    known = "; ".join(f"{head} {say(numbers[name])}" for name, head in COLUMNS[:6] if name in numbers)
    settings = {place: repr(bound) for place, bound in window.point.bounds.items()}
    # a user's preset needs its file, which is unknown here
    file = "" if found.preset in catalogue.load() else " --preset-file FILE"
    detail = [
        f"The preset with it: {known}.",
        f"As the preset's bounds, on π_train/π_rollout: {command(found.preset, settings)}{file}",
    ]
    if window.centre is not None:
        k1 = "" if window.centre_k1 is None else f" (over tokens, −k1 = {say(window.centre_k1)})"
        detail.insert(
            0,
            "As many are lost below as above: the window follows the data, whose log lies at "
            f"{say(window.centre)} on average{k1}, not at 0.",
        )
    return Verdict("Window" if len(settings) == 2 else "Bound", text, "info", tuple(detail))


def _predicted(window: SolvedWindow) -> Table | None:
    if not window.predicted:
        return None
    rows = [(count(round(one.length)), one.kept, one.observed) for one in window.predicted]
    falling, staying = (say(window.spread[name]) for name in ("falling", "staying"))
    notes = (
        f"The spread of log r per token at length L is √(a/L + b) with √a = {falling} and √b = {staying} "
        "nats: the first averages out over a response, the second does not.",
        "In brackets 95%: jackknife over groups, and how far the fit misses the lengths that were seen. "
        "Where none is seen (–) the fit extrapolates, and the interval takes its form for true.",
    )
    caption = "What the same bounds would keep of responses of other lengths"
    return Table("sweep-predicted", caption, ("tokens", "predicted", "seen near it"), rows, notes)
