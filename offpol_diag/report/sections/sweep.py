"""Section on one preset at many thresholds: data kept overall and by length; bounds for a requested share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offpol_diag.blocks import Block, Cell, Code, Figure, Section, Series, Table, Text, Verdict
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


def sweep(summary: Summary) -> Section | None:
    """Return the results of a sweep; None if there was none."""
    found = summary.sweep
    if found is None:
        return None
    blocks = (
        Text(_what(found)),
        *(Text(remark, "warn") for remark in found.remarks),
        *((_window(found, found.window),) if found.window else ()),
        _table(found),
        _figure(found),
        _by_length(found),
        _length_figure(found),
        *_details(found),
        _floor(found),
        *(_predicted(found.window) if found.window else ()),
        *(_config(found.window) if found.window else ()),
    )
    return Section("sweep", f"Thresholds of {found.preset}", blocks)


def _what(found: Sweep) -> str:
    window = "" if "." in found.which else ": the window [1/b, b] for each threshold b"
    others = f" Its other bounds: --which {', '.join(found.others)}." if found.others else ""
    return (
        f"{found.which} of {found.preset} moves{window}; it bounds {found.statistic} of each {found.unit}, "
        f"r = π_train/π_rollout.{others}"
    )


# ---------------------------------------------------------------- every threshold


def _table(found: Sweep) -> Table:
    columns = [one for one in COLUMNS if _telling(found, one[0])]
    rows = tuple((*_head(point), *_cells(point.metrics, columns)) for point in found.points)
    notes = (
        "←: the preset as it stands. Marks: L drops long responses, N lies under numerical noise, C lies "
        "beside the data.",
        KAPPA,
    )
    header = ("threshold", "marks", *(head for _, head in columns))
    return Table("sweep", f"{found.preset}: every threshold of {found.which}", header, rows, notes)


def _telling(found: Sweep, name: str) -> bool:
    """Return whether a metric is informative: not all unknown or 0, nor, for bounded weights, all 1."""
    values = {point.metrics[name].value for point in found.points if name in point.metrics}
    weights = any("acted" in point.metrics for point in found.points)
    return bool(values - {None, 0.0}) and not (weights and values == {1.0})


def _head(point: SweptPoint) -> tuple[Cell, Cell]:
    return label(point), "".join(LETTERS[mark] for mark in point.marks) or "–"


def label(point: SweptPoint) -> str:
    """Return a threshold; an arrow marks the preset's own."""
    return f"{point.threshold:.9g}{' ←' if point.own else ''}"


def _cells(numbers: Numbers, columns: Sequence[tuple[str, str]]) -> tuple[Cell, ...]:
    return tuple(numbers.get(name, Number(unknown="not asked")) for name, _ in columns)


def _figure(found: Sweep) -> Figure:
    drawn = distinct(found)
    return Figure(
        id="sweep",
        title=f"What {found.preset} leaves at each threshold",
        caption=_finding(found),
        x_label=f"threshold ({found.which})",
        y_label="share",
        series=tuple(_series(found, name, text) for name, text, _ in drawn),
        y_unit="fraction",
        marks=tuple(mark for _, _, mark in drawn),
    )


def distinct(found: Sweep) -> list[tuple[str, str, str]]:
    """Return the curves without exact duplicates: without weights, ESS equals the share kept."""
    lines: dict[tuple[float | None, ...], tuple[str, str, str]] = {}
    for one in DRAWN:
        values = tuple(point.metrics.get(one[0], Number()).value for point in found.points)
        if _telling(found, one[0]):
            lines.setdefault(values, one)
    return list(lines.values())


def _series(found: Sweep, name: str, text: str) -> Series:
    numbers = [point.metrics.get(name, Number()) for point in found.points]
    return Series(
        name=text,
        x=tuple(map(label, found.points)),
        y=tuple(number.value for number in numbers),
        low=tuple(number.interval[0] if number.interval else None for number in numbers),
        high=tuple(number.interval[1] if number.interval else None for number in numbers),
    )


def _finding(found: Sweep) -> str:
    first, last = found.points[0], found.points[-1]
    name = "acted" if "acted" in first.metrics else "tokens_kept"
    what = {"acted": "weights changed", "tokens_kept": "tokens kept"}[name]
    ends = (f"{say(point.metrics[name])} at {point.threshold:.7g}" for point in (first, last))
    return f"{what}: {', and '.join(ends)}; bands are 95% intervals."


# ---------------------------------------------------------------- by length


def _by_length(found: Sweep) -> Table:
    name = kept_metric(found)
    rows = tuple(
        (*_head(point), *(numbers.get(name, Number()) for numbers in point.quartiles))
        for point in found.points
    )
    header = ("threshold", "marks", *QUARTERS)
    lengths = "; ".join(
        f"{quarter}: {border}" for quarter, border in zip(QUARTERS, found.quartiles, strict=True)
    )
    caption = f"{_what_is_kept(found)} by quartile of response length"
    return Table("sweep-length", caption, header, rows, (f"Tokens of a response: {lengths}.",))


def kept_metric(found: Sweep) -> str:
    """Return the metric that says what a threshold keeps."""
    if any("acted" in point.metrics for point in found.points):
        return "ess_tokens"
    return "tokens_kept" if found.unit == "token" else "sequences_kept"


def _what_is_kept(found: Sweep) -> str:
    return {
        "ess_tokens": "ESS over tokens",
        "tokens_kept": "Tokens kept",
        "sequences_kept": "Sequences kept",
    }[kept_metric(found)]


def _length_figure(found: Sweep) -> Figure:
    name = kept_metric(found)
    series = tuple(
        Series(
            quarter,
            tuple(map(label, found.points)),
            tuple(point.quartiles[at][name].value for point in found.points),
        )
        for at, quarter in enumerate(QUARTERS)
    )
    what = _what_is_kept(found)
    caption = "Lines that part show a threshold that selects by length."
    title = f"{what} by length"
    x_label = f"threshold ({found.which})"
    marks = ("1", "2", "3", "4")
    return Figure("sweep-length", title, caption, x_label, "share", series, y_unit="fraction", marks=marks)


def _details(found: Sweep) -> tuple[Block, ...]:
    """Return a table of all numbers by quartile."""
    names = [(name, head) for name, head in COLUMNS if name in found.points[0].quartiles[0]]
    rows = tuple(
        (label(point), quarter, *_cells(numbers, names))
        for point in found.points
        for quarter, numbers in zip(QUARTERS, point.quartiles, strict=True)
    )
    header = ("threshold", "length", *(head for _, head in names))
    return (Table("sweep-details", "Everything by quartile of length", header, rows, collapsed=True),)


# ---------------------------------------------------------------- noise


def _floor(found: Sweep) -> Table:
    rows = tuple(
        (one.source, "this dump" if one.found else "if so", one.per_token, one.statistic)
        for one in found.floor
    )
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
    units = f"{found.unit}s"
    share = say_value(window.kept / window.of, "fraction")
    held = f"{count(window.kept)} of {count(window.of)} {units} ({share}"
    return (
        f"{left}{found.statistic}{right} keeps {share} of the {units}",
        f"{left}{found.statistic}{right} holds {held}",
    )


def _window(found: Sweep, window: SolvedWindow) -> Verdict:
    text = f"{window_text(found, window)[1]}; asked: {say_value(window.asked, 'fraction')})."
    label = "Window" if len(window.point.bounds) == 2 else "Bound"
    return Verdict(label, text, "info", tuple(filter(None, _evidence(found.preset, window))))


def _evidence(preset: str, window: SolvedWindow) -> tuple[str, ...]:
    settings = {place: repr(bound) for place, bound in window.point.bounds.items()}
    numbers = "; ".join(
        f"{head} {say(window.point.metrics[name])}"
        for name, head in COLUMNS[:6]
        if name in window.point.metrics
    )
    return (
        _centre(window),
        f"The preset with it: {numbers}.",
        f"As the preset's bounds, on π_train/π_rollout: {_command(preset, settings)}",
    )


def _command(preset: str, settings: Mapping[str, str]) -> str:
    """Return the command for a preset; a user's preset needs its file, which is unknown here."""
    file = "" if preset in catalogue.load() else " --preset-file FILE"
    return command(preset, settings) + file


def _centre(window: SolvedWindow) -> str:
    if window.centre is None:
        return ""
    k1 = "" if window.centre_k1 is None else f" (over tokens, −k1 = {say(window.centre_k1)})"
    return (
        "As many are lost below as above: the window follows the data, whose log lies at "
        f"{say(window.centre)} on average{k1}, not at 0."
    )


def _config(window: SolvedWindow) -> tuple[Block, ...]:
    return (Code(f"The config for {window.trainer}", window.config),) if window.config else ()


def _predicted(window: SolvedWindow) -> tuple[Block, ...]:
    if not window.predicted:
        return ()
    rows = tuple((count(round(one.length)), one.kept, one.observed) for one in window.predicted)
    falling, staying = (say(window.spread[name]) for name in ("falling", "staying"))
    notes = (
        f"The spread of log r per token at length L is √(a/L + b) with √a = {falling} and √b = {staying} "
        "nats: the first averages out over a response, the second does not.",
        "In brackets 95%: jackknife over groups, and how far the fit misses the lengths that were seen. "
        "Where none is seen (–) the fit extrapolates, and the interval takes its form for true.",
    )
    caption = "What the same bounds would keep of responses of other lengths"
    return (Table("sweep-predicted", caption, ("tokens", "predicted", "seen near it"), rows, notes),)
