"""Estimated error of an update under each candidate correction, and how far one lies behind another.

A dump holds no gradients, but what they are made of: advantages, weighted. With a candidate's weights w (0
for a rejected token) the mean advantage under π_train is estimated as m = Σ w·A / Σ w, unbiased for w = r,
where it is m_r = Σ r·A / Σ r. In an update of N sequences its mean squared error is

    error² = (m − m_r)² + V / N        V = S · Σ_s (x_s − m·W_s)² / (Σ_s W_s)²

with the sums x_s of w·A and W_s of w over sequence s: bias² and the variance of a ratio of sums. A constant
added to A changes no error; a factor of A or w changes no comparison. r is bounded by e^±LARGEST only: a
heavy tail of r widens the intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from offpol_diag.engine.formula import ABOVE_MINUS_ONE, POSITIVE, Formula, Lookup, Reader, plain
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns, Rows, joined
from offpol_diag.engine.segments import Array
from offpol_diag.number import Number, Numbers
from offpol_diag.presets import Preset
from offpol_diag.presets.candidates import MARK

UPDATE = 256
"""Sequences of an update; docs/advice.md judges 64, 256 and 1,024."""


def columns(sums: PresetSums) -> Columns:
    """Compute the sums [S] that `ERROR` reads beside `method.weight_columns`, per candidate.

    There are none without advantages. The plan of `sums` must have been made with `ranking`.
    """
    if sums.batch.advantages is None:
        return Columns((), ())
    x, w = joined(np.multiply, sums.total("advantage"), sums.sequences), sums.sums["w"]
    result: dict[str, Rows | Array] = {
        "wA": x,
        "wA²": joined(np.multiply, x, x),
        "wA·w": joined(np.multiply, x, w),
        "W²": joined(np.multiply, w, w),
    }
    return sums.named(result | sums.exact)


def _error(get: Lookup) -> Array:
    m = get("wA") / get("w")
    bias = m - get("rA") / get("r")
    squares = get("wA²") - 2 * m * get("wA·w") + m**2 * get("W²")
    variance = get("sequences") * np.maximum(squares, 0) / get("w") ** 2
    error: Array = np.sqrt(bias**2 + variance / UPDATE)
    return error


ERROR = Formula(
    "error",
    "",
    f"an update of {UPDATE} sequences",
    f"√(bias² + variance / {UPDATE}) of the mean advantage Σ w·A / Σ w; bias: against w = r",
    _error,
    POSITIVE,
)


def numbers(reader: Reader, presets: Sequence[Preset]) -> dict[str, Numbers]:
    """Return the error of each preset, and `error_above.OTHER`: by what share it is above another's.

    The interval is paired: the bootstrap draws a prompt equally often for both.
    """
    errors = {
        preset.name: ERROR.of(partial(reader.column, prefix=f"{preset.name}|"))
        for preset in presets
        if f"{preset.name}|wA" in reader.sums
    }
    return {
        name: {ERROR.name: reader.wrap(error, ERROR)}
        | {
            f"error_above.{other.removeprefix(MARK)}": _above(reader, error / against - 1)
            for other, against in errors.items()
            if other != name
        }
        for name, error in errors.items()
    }


def _above(reader: Reader, values: Array) -> Number:
    result = plain(float(values[0]), "fraction", ERROR.over, "error / error of the other − 1")
    return replace(result, interval=reader.around(values, ABOVE_MINUS_ONE))
