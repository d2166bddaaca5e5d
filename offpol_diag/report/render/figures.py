"""Convert pictures to plotly figures, and figure blocks to pictures.

Positions and ticks are computed once, by `picture.Axis`, so that a plotly chart and its static picture agree.
Colours are names of the page's CSS variables (`--c1`), resolved when the page draws.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

from offpol_diag.blocks import Figure
from offpol_diag.numerals import FRACTIONS, say
from offpol_diag.report.picture import (
    COLOURS,
    TONES,
    Axis,
    Layer,
    Panel,
    Picture,
    Tint,
    names,
    x_axis,
    y_axis,
)
from offpol_diag.report.render.svg import HEATS, level
from offpol_diag.summary import Number

Json = dict[str, Any]

SHARED: Json = {
    "layout": {
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 12, "color": "--ink"},
        "margin": {"l": 54, "r": 12, "t": 26, "b": 44},
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": "--card", "bordercolor": "--line", "font": {"color": "--ink"}},
        "showlegend": False,
        "barmode": "overlay",
        "dragmode": False,
        "xaxis": {
            "showgrid": False,
            "linecolor": "--c0",
            "showline": True,
            "zeroline": False,
            "tickfont": {"color": "--soft"},
        },
        "yaxis": {"gridcolor": "--hair", "zeroline": False, "tickfont": {"color": "--soft"}},
    },
    "config": {"responsive": True, "displayModeBar": False},
}
"""Layout and settings common to all panels."""


def panel_figure(panel: Panel) -> Json:
    """Return `data` and `layout` of a panel, to be merged into `SHARED`."""
    x, y = x_axis(panel), y_axis(panel)
    traces = [*_heat(panel, x), *(trace for layer in panel.layers for trace in _traces(layer, panel, x, y))]
    return {"data": traces, "layout": _layout(panel, x, y)}


def _layout(panel: Panel, x: Axis, y: Axis) -> Json:
    shapes = [
        _shape(
            0,
            1,
            y.held(tint.low, True),
            y.held(tint.high, False),
            fillcolor=f"--z{TONES.index(tint.tone) + 1}",
            line={"width": 0},
        )
        for tint in panel.tints
    ]
    dashed = {"line": {"color": "--soft", "width": 1, "dash": "dash"}}
    notes = [
        _note("x domain", "y domain", 0, 1, f"↑ {panel.y_title}", "left", yshift=16, xshift=-46),
        _note(
            "x domain", "y domain", 1, 0, f"{panel.x_title} →" if panel.x_title else "", "right", yshift=-36
        ),
    ]
    for tint in panel.tints:
        top = y.held(tint.high, False)
        if tint.name and top - y.held(tint.low, True) > 0.06 * (y.high - y.low):
            notes.append(_note("x domain", "y", 1, top, tint.name, "right", yshift=-9))
    for at, name in panel.levels:
        place = y.at(at)
        if place is not None and y.low <= place <= y.high:
            shapes.append(_shape(0, 1, place, place, **dashed))
            notes.append(_note("x domain", "y", 0, place, name, "left", yshift=8))
    for number, (at, name) in enumerate(panel.uprights):
        place = x.at(at)
        if place is not None and x.low <= place <= x.high:
            side = place > (x.low + x.high) / 2
            shapes.append(
                {"type": "line", "yref": "y domain", "y0": 0, "y1": 1, "x0": place, "x1": place, **dashed}
            )
            notes.append(
                _note("x", "y domain", place, 1, name, "right" if side else "left", yshift=-8 - 15 * number)
            )
    if panel.heat:
        shapes.append(
            {
                "type": "line",
                "x0": x.low,
                "x1": x.high,
                "y0": x.low,
                "y1": x.high,
                "line": {"color": "--ink", "width": 1, "dash": "dash"},
            }
        )
        if panel.heat.box:
            a, b, c, d = panel.heat.box
            ends = {
                "x0": x.held(a, True),
                "x1": x.held(b, False),
                "y0": y.held(c, True),
                "y1": y.held(d, False),
            }
            shapes.append({"type": "rect", **ends, "line": {"color": "--c2", "width": 2}})
            notes.append(
                _note(
                    "x domain",
                    "y domain",
                    1,
                    0,
                    f"<b>{panel.heat.box_name}</b>",
                    "right",
                    yshift=10,
                    colour="--ink",
                    bgcolor="--card",
                )
            )
    for mark in names(panel, x, y):
        anchor = {"start": "left", "end": "right", "middle": "center"}[mark.anchor]
        colour = f"--f{COLOURS.index(mark.colour)}" if mark.colour else "--ink"
        notes.append(
            _note(
                "x domain",
                "y domain",
                mark.x,
                mark.y,
                f"<b>{mark.text}</b>",
                anchor,
                colour=colour,
                bgcolor="--halo",
            )
        )
    return {
        "xaxis": {"range": [x.low, x.high], **_ticks(x), "autotickangles": [0, -40, -90]},
        "yaxis": {"range": [y.low, y.high], **_ticks(y)},
        "shapes": shapes,
        "annotations": notes,
    }


def _ticks(axis: Axis) -> Json:
    return {
        "tickmode": "array",
        "tickvals": [at for at, _ in axis.ticks],
        "ticktext": [name for _, name in axis.ticks],
    }


def _shape(x0: float, x1: float, y0: float, y1: float, **more: object) -> Json:
    return {
        "type": "rect" if y0 != y1 else "line",
        "xref": "x domain",
        "x0": x0,
        "x1": x1,
        "y0": y0,
        "y1": y1,
        "layer": "below",
        **more,
    }


def _note(
    xref: str, yref: str, x: float, y: float, text: str, anchor: str, colour: str = "--soft", **more: object
) -> Json:
    return {
        "xref": xref,
        "yref": yref,
        "x": x,
        "y": y,
        "text": text,
        "xanchor": anchor,
        "yanchor": "middle",
        "showarrow": False,
        "font": {"size": 12, "color": colour},
        **more,
    }


def _heat(panel: Panel, x: Axis) -> list[Json]:
    heat = panel.heat
    if heat is None:
        return []
    most = max((max(row) for row in heat.counts), default=1)
    edges = [x.held(edge, i == 0) for i, edge in enumerate(heat.edges)]
    size = len(heat.counts)
    z = [[level(n, most) if (n := heat.counts[i][j]) else None for i in range(size)] for j in range(size)]
    said = [[heat.counts[i][j] for i in range(size)] for j in range(size)]
    shades = [[end / HEATS, f"--q{depth}"] for depth in range(HEATS) for end in (depth, depth + 1)]
    return [
        {
            "type": "heatmap",
            "x": edges,
            "y": edges,
            "z": z,
            "text": said,
            "hovertemplate": "%{text} tokens<extra></extra>",
            "zmin": 0,
            "zmax": HEATS - 1,
            "colorscale": shades,
            "showscale": False,
        }
    ]


def _traces(layer: Layer, panel: Panel, x: Axis, y: Axis) -> list[Json]:
    colour = f"--c{COLOURS.index(layer.colour)}"
    across = [x.at(value) for value in layer.x]
    hover = {"hovertext": _said(layer, panel), "hoverinfo": "text"}
    if layer.kind == "bars":
        base = [y.held(value, True) for value in layer.base] or [y.held(0.0, True)] * len(layer.x)
        tops = [
            None
            if (top := y.at((layer.base[i] if layer.base else 0) + (value or 0))) is None
            else top - base[i]
            for i, value in enumerate(layer.y)
        ]
        return [
            {
                "type": "bar",
                "x": across,
                "y": tops,
                "base": base,
                "width": layer.width * 0.92,
                "marker": {"color": colour},
                **hover,
            }
        ]
    ys = [y.at(value) for value in layer.y]
    hollow = layer.hollow or (False,) * len(ys)
    marker = {
        "size": 7,
        "color": ["--card" if one else colour for one in hollow],
        "line": {"color": colour, "width": 2},
    }
    points = layer.kind == "points" or (layer.kind == "line" and not layer.dashed and len(ys) <= 16)
    mode = "markers" if layer.kind == "points" else "lines+markers" if points else "lines"
    line = {"color": colour, "width": 1.6 if layer.dashed else 2, "dash": "dot" if layer.dashed else "solid"}
    trace: Json = {
        "type": "scatter",
        "mode": mode,
        "x": across,
        "y": ys,
        "line": line,
        "marker": marker,
        **hover,
    }
    if layer.kind == "points" and layer.low:
        ends = [
            (y.held(a, True), y.held(b, False)) if a is not None and b is not None else None
            for a, b in zip(layer.low, layer.high, strict=True)
        ]
        pairs = list(zip(ys, ends, strict=True))
        up = [end[1] - at if end and at is not None else None for at, end in pairs]
        down = [at - end[0] if end and at is not None else None for at, end in pairs]
        trace["error_y"] = {
            "type": "data",
            "symmetric": False,
            "array": up,
            "arrayminus": down,
            "color": colour,
            "thickness": 1.4,
            "width": 0,
        }
    return [*_ribbons(layer, x, y), trace]


def _ribbons(layer: Layer, x: Axis, y: Axis) -> list[Json]:
    """Return the 95% band as closed shapes, one per run of known intervals."""
    if layer.kind != "line" or not layer.low:
        return []
    runs: list[list[tuple[float, float, float]]] = [[]]
    for place, value in enumerate(layer.x):
        low, high, at = layer.low[place], layer.high[place], x.at(value)
        if low is None or high is None or at is None or (layer.hollow and layer.hollow[place]):
            runs.append([])
        else:
            runs[-1].append((at, y.held(low, True), y.held(high, False)))
    look = {"type": "scatter", "mode": "lines", "fill": "toself", "line": {"width": 0}, "hoverinfo": "skip"}
    return [
        {
            "x": [a for a, _, _ in [*run, *run[::-1]]],
            "y": [b for _, _, b in run] + [low for _, low, _ in run[::-1]],
            "fillcolor": f"--r{COLOURS.index(layer.colour)}",
            **look,
        }
        for run in runs
        if len(run) > 1
    ]


def _said(layer: Layer, panel: Panel) -> list[str]:
    said = []
    for place, (x, y) in enumerate(zip(layer.x, layer.y, strict=True)):
        where = panel.names[int(x)] if panel.names and 0 <= x < len(panel.names) else f"{x:.5g}"
        name = f"{layer.name}, " if layer.name else ""
        known = say(number(layer, place, panel.percent)) if y is not None else "not known"
        doubt = " (unreliable)" if layer.hollow and layer.hollow[place] else ""
        said.append(f"{name}{where}: {known}{doubt}")
    return said


def number(layer: Layer, place: int, percent: bool) -> Number:
    """Return a point with its interval."""
    low = layer.low[place] if layer.low else None
    high = layer.high[place] if layer.high else None
    ends = None if low is None or high is None else (low, high)
    interval = ends if ends and all(map(math.isfinite, ends)) else None
    return Number(value=_finite(layer.y[place]), interval=interval, unit="share" if percent else "")


# ---------------------------------------------------------------- figure blocks


def picture(figure: Figure) -> Picture:
    """Return the picture of a figure block."""
    cast = dict.fromkeys(x for series in figure.series for x in series.x if isinstance(x, str))
    order = {name: float(place) for place, name in enumerate(cast)}
    drawn = ("blue", "orange", "teal", "purple", "slate", "grey")
    layers = tuple(
        Layer(
            series.name if len(figure.series) > 1 else "",
            tuple(order[x] if isinstance(x, str) else x for x in series.x),
            tuple(_finite(y) for y in series.y),
            drawn[place % len(drawn)],  # type: ignore[arg-type]
            {"bar": "bars"}.get(series.kind, series.kind),  # type: ignore[arg-type]
            tuple(map(_finite, series.low)),
            tuple(map(_finite, series.high)),
            width=_width(series.x),
        )
        for place, series in enumerate(figure.series)
    )
    panel = Panel(
        figure.x_label,
        figure.y_label + (" (log)" if figure.y_log else ""),
        layers,
        "log" if figure.x_log else "linear",
        "log" if figure.y_log else "linear",
        tuple(order),
        figure.y_unit in FRACTIONS,
        levels=figure.reference,
    )
    return Picture(figure.id, "", figure.title, figure.caption, (panel,))


def _width(x: tuple[float | str, ...]) -> float:
    gaps = sorted(b - a for a, b in pairwise(x) if not isinstance(a, str) and not isinstance(b, str))
    return gaps[len(gaps) // 2] if gaps else 1.0


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


__all__ = ["SHARED", "Tint", "number", "panel_figure", "picture"]
