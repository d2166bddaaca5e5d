"""What families of power sums are made of: the log-ratios and the columns beside them, of tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Columns = Mapping[str, Array]

GAPS = {"old": ("rollout", "old"), "current": ("rollout", "current"), "drift": ("old", "current")}
"""By direction, the columns of its log-ratio, the second less the first."""
RATIOS = {direction: f"{direction} ratio" for direction in GAPS}
"""By direction, that of e^d − 1 in place of the log-ratio d."""


def _as_is(name: str) -> Callable[[Columns, Array], Array]:
    def into(columns: Columns, out: Array) -> Array:
        out[:] = columns[name]
        return out

    return into


COLUMNS: dict[str, Callable[[Columns, Array], Array]] = {
    "log": _as_is("rollout"),
    "log old": _as_is("old"),
    "probability": lambda columns, out: np.exp(columns["rollout"], out=out),
    "entropy": _as_is("entropy"),
    "A+": lambda columns, out: np.maximum(columns["advantages"], 0.0, out=out),
    "A-": lambda columns, out: np.negative(np.minimum(columns["advantages"], 0.0, out=out), out=out),
    "1+": lambda columns, out: np.greater(columns["advantages"], 0.0, out=out, casting="unsafe"),
    "1-": lambda columns, out: np.less(columns["advantages"], 0.0, out=out, casting="unsafe"),
}
"""By name in a part (`series.py`), what it is of columns by their name in a batch; put into an array."""
