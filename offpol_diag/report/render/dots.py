"""Draw a figure in plain text: a row for each point of the axis, a character for each series."""

from __future__ import annotations

import math

from offpol_diag.blocks import Figure
from offpol_diag.numerals import FRACTIONS, say_value

WIDEST, LEAST = 100, 20
"""Maximum width of a drawing, and minimum width of its plotting area, in characters."""
SEVERAL = "*"
"""Character for overlapping marks."""


def dots(figure: Figure, width: int) -> list[str]:
    """Return lines no wider than `width`, unless the plotting area would be narrower than `LEAST`."""
    margin = max(map(len, figure.labels), default=0)
    field = max(min(width, WIDEST) - margin - 3, LEAST)
    low, high = _span(figure)
    rows = [
        f"{label:>{margin}} │{_row(figure, at, field, low, high)}│" for at, label in enumerate(figure.labels)
    ]
    first, last = (say_value(end, figure.y_unit) for end in (low, high))
    axis = f"{' ' * (margin + 1)}{first:<{field + 2 - len(last)}}{last}"
    return [*rows, axis, *_legend(figure, width)]


def share(value: float, low: float, high: float) -> float:
    """Return a value's relative position between `low` and `high`, 0 to 1, without overflow of high − low."""
    span = high / 2 - low / 2
    return min(max((value / 2 - low / 2) / span, 0.0), 1.0) if span > 0 else 0.0


def _span(figure: Figure) -> tuple[float, float]:
    """Return the range of values; for shares it includes 0 to 1."""
    known = [y for series in figure.series for y in series.y if y is not None and math.isfinite(y)]
    ends = (0.0, 1.0) if figure.y_unit in FRACTIONS else ()
    low, high = min([*known, *ends], default=0.0), max([*known, *ends], default=1.0)
    return low, high if high > low else max(low + 1.0, low)


def _row(figure: Figure, at: int, field: int, low: float, high: float) -> str:
    cells = [" "] * field
    for series in figure.series:
        y = series.y[at]
        if y is None or not math.isfinite(y):
            continue
        place = round(share(y, low, high) * (field - 1))
        cells[place] = series.mark if cells[place] == " " else SEVERAL
    return "".join(cells)


def _legend(figure: Figure, width: int) -> list[str]:
    """Return the legend of the marks, wrapped into lines."""
    parts = [f"{series.mark} {series.name}" for series in figure.series]
    lines = [""]
    for part in [*parts, f"{SEVERAL} several"]:
        longer = f"{lines[-1]}, {part}" if lines[-1] else part
        if len(longer) > width and lines[-1]:
            lines.append(part)
        else:
            lines[-1] = longer
    return lines
