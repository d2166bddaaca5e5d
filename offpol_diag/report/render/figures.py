"""Convert a figure block to a plotly figure.

Colours are names of the page's CSS variables (`--c0`, `--muted`), resolved when the page draws, so that
light, dark and print share one definition. Settings common to all figures are in `SHARED`, once per page.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from offpol_diag.blocks import Figure, Series
from offpol_diag.numerals import FRACTIONS

Json = dict[str, Any]

COLOURS = 6
_MARKERS_UP_TO = 40
_FEW = 8
_ROOM_BELOW = 5.0

_AXIS: Json = {
    "gridcolor": "--rule",
    "linecolor": "--muted",
    "tickcolor": "--muted",
    "zeroline": False,
    "ticks": "outside",
    "ticklen": 4,
    "automargin": True,
    "exponentformat": "e",
    "title": {"font": {"size": 12, "color": "--muted"}, "standoff": 8},
}

SHARED: Json = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "--ink"},
        "margin": {"l": 8, "r": 12, "t": 8, "b": 8},
        "hovermode": "x unified",
        "hoverlabel": {"bgcolor": "--page", "bordercolor": "--rule", "font": {"color": "--ink"}},
        "showlegend": False,
        "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        "bargap": 0,
        "xaxis": {**_AXIS, "showgrid": False, "showline": True},
        "yaxis": _AXIS,
    },
    "config": {"responsive": True, "displayModeBar": False},
}
"""Default layout and settings of all figures."""


def plotly_figure(figure: Figure) -> Json:
    """Return `data` and `layout`, to be merged into `SHARED`; non-finite numbers become null, as in JSON."""
    figure = replace(figure, series=tuple(map(_finite, figure.series)))
    traces = [
        trace
        for place, series in enumerate(figure.series)
        for trace in _traces(series, f"--c{place % COLOURS}")
    ]
    return {"data": traces, "layout": _layout(figure)}


def _finite(series: Series) -> Series:
    parts: dict[str, Any] = {
        part: tuple(
            value if isinstance(value, str) or (value is not None and math.isfinite(value)) else None
            for value in getattr(series, part)
        )
        for part in ("x", "y", "low", "high")
    }
    return replace(series, **parts)


def _layout(figure: Figure) -> Json:
    layout: Json = {
        "xaxis": {"title": {"text": figure.x_label}, **_scale(figure.x_log), **_categories(figure)},
        "yaxis": {"title": {"text": figure.y_label}, **_scale(figure.y_log), **_ticks(figure.y_unit)},
    }
    if len(figure.series) > 1:
        layout["showlegend"] = True
    if figure.y_log:
        layout["yaxis"]["autorangeoptions"] = {"clipmin": _floor(figure)}
    if figure.reference:
        layout["shapes"] = [_line(y) for y, _ in figure.reference]
        layout["annotations"] = [_label(y, label, figure.y_log) for y, label in figure.reference]
    return layout


def _floor(figure: Figure) -> float | None:
    """Return the lower end of a log axis, limited so that intervals close to 0 do not flatten the curve."""
    known = [y for series in figure.series for y in series.y if y is not None and 0 < y < math.inf]
    return min(known) / _ROOM_BELOW if known else None


def _scale(log: bool) -> Json:
    return {"type": "log", "dtick": 1} if log else {}


def _categories(figure: Figure) -> Json:
    """Fix the order of categories to that of the series; plotly's own follows traces, which may lack some."""
    names = list(dict.fromkeys(x for series in figure.series for x in series.x if isinstance(x, str)))
    order = {"categoryorder": "array", "categoryarray": names}
    return {"type": "category", "autotickangles": [0, -40, -90], **order} if names else _whole(figure)


def _whole(figure: Figure) -> Json:
    """Return a tick at every integer if the points are few integers, else plotly's default."""
    points = [x for series in figure.series for x in series.x if isinstance(x, float)]
    few = points and all(x.is_integer() for x in points) and max(points) - min(points) <= _FEW
    return {"dtick": 1} if few else {}


def _ticks(unit: str) -> Json:
    return {"tickformat": ".4~%"} if unit in FRACTIONS else {}


def _line(y: float) -> Json:
    ends = {"xref": "paper", "x0": 0, "x1": 1, "y0": y, "y1": y}
    return {"type": "line", **ends, "layer": "below", "line": {"color": "--muted", "width": 1, "dash": "dot"}}


def _label(y: float, label: str, log: bool) -> Json:
    at = math.log10(y) if log and y > 0 else y  # plotly wants annotations, but not shapes, in log units
    place = {"xref": "paper", "x": 1, "xanchor": "right", "y": at, "yanchor": "bottom"}
    return {**place, "text": label, "showarrow": False, "font": {"size": 11, "color": "--muted"}}


def _traces(series: Series, colour: str) -> list[Json]:
    return {"line": _curve, "points": _points, "bar": _bars}[series.kind](series, colour)


def _bars(series: Series, colour: str) -> list[Json]:
    return [{"type": "bar", **_xy(series), "marker": {"color": colour, "line": {"width": 0}}}]


def _points(series: Series, colour: str) -> list[Json]:
    marker = {"color": colour, "size": 7}
    bars = {"error_y": _errors(series, colour)} if series.low else {}
    return [{"type": "scatter", **_xy(series), "mode": "markers", "marker": marker, **bars}]


def _curve(series: Series, colour: str) -> list[Json]:
    mode = "lines+markers" if len(series.x) <= _MARKERS_UP_TO else "lines"
    look = {"mode": mode, "line": {"color": colour, "width": 2}, "marker": {"size": 5}}
    return [*_band(series, colour), {"type": "scatter", **_xy(series), **look}]


def _xy(series: Series) -> Json:
    return {"name": series.name, "x": list(series.x), "y": list(series.y)}


def _errors(series: Series, colour: str) -> Json:
    """Return asymmetric error bars; points without an interval get none."""
    whole = list(zip(series.y, series.low, series.high, strict=True))
    up = [_between(y, high) for y, _, high in whole]
    down = [_between(low, y) for y, low, _ in whole]
    look = {"color": colour, "thickness": 1.2, "width": 0}
    return {"type": "data", "symmetric": False, "array": up, "arrayminus": down, **look}


def _between(low: float | None, high: float | None) -> float | None:
    """Return high − low; None if unknown or not finite."""
    found = math.inf if low is None or high is None else high - low
    return found if math.isfinite(found) else None


def _band(series: Series, colour: str) -> list[Json]:
    """Return the 95% band as closed shapes, one per contiguous run of known intervals."""
    return [_shape(run, colour) for run in _runs(series)] if series.low else []


def _runs(series: Series) -> list[list[tuple[float | str, float, float]]]:
    runs: list[list[tuple[float | str, float, float]]] = [[]]
    for x, low, high in zip(series.x, series.low, series.high, strict=True):
        if low is None or high is None:
            runs.append([])
        else:
            runs[-1].append((x, low, high))
    return [run for run in runs if len(run) > 1]


def _shape(run: list[tuple[float | str, float, float]], colour: str) -> Json:
    x = [x for x, _, _ in run]
    outline = {"x": x + x[::-1], "y": [high for _, _, high in run] + [low for _, low, _ in run][::-1]}
    look = {"fill": "toself", "fillcolor": f"{colour}-band", "line": {"width": 0}, "mode": "lines"}
    return {"type": "scatter", **outline, **look, "hoverinfo": "skip", "showlegend": False}
