"""Estimated error of an update under each candidate correction, and how far one lies behind another.

A dump holds no gradients, but what they are made of: advantages, weighted. With a candidate's weights w (0
for a rejected token) the mean advantage under π_train is estimated as m = Σ w·A / Σ w, unbiased for w = r,
where it is m_r = Σ r·A / Σ r. In an update of N sequences its mean squared error is

    error² = (m − m_r)² + V / N        V = S · Σ_s (x_s − m·W_s)² / (Σ_s W_s)²

with the sums x_s of w·A and W_s of w over sequence s: bias² and the variance of a ratio of sums. A constant
added to A changes no error; a factor of A or w changes no comparison. r is bounded by e^±OVERFLOW only: a
heavy tail of r widens the intervals.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from offpol_diag.engine.formula import ABOVE_MINUS_ONE, POSITIVE, Formula, Lookup, Reader, plain
from offpol_diag.engine.outcome import NearOutcome, Outcome, Outcomes
from offpol_diag.engine.ratios import OVERFLOW
from offpol_diag.engine.rows import Columns, Inputs, Summed, joined, masked
from offpol_diag.presets import Preset
from offpol_diag.presets.candidates import MARK, NOTHING
from offpol_diag.summary import Number, Numbers

UPDATE = 256
"""Sequences of an update; docs/advice.md judges 64, 256 and 1,024."""


def columns(outcomes: Outcomes) -> Columns:
    """Compute the sums [S] that `ERROR` reads beside `method.weight_columns`, per candidate.

    There are none without advantages.
    """
    if outcomes.batch.advantages is None:
        return outcomes.named({})
    x = joined(torch.mul, outcomes.total(_weighted)["wA"], outcomes.sequences)
    w = outcomes.sums["first"]
    exact = outcomes.only(lambda preset: preset.name == MARK + NOTHING.name).total(_exact)
    found = {
        "wA": x,
        "wA²": joined(torch.mul, x, x),
        "wA·w": joined(torch.mul, x, w),
        "W²": joined(torch.mul, w, w),
    }
    return outcomes.named(found | {name: rows.of_preset(0) for name, rows in exact.items()})


def _advantages(done: Outcome) -> Tensor:
    assert done.far.batch.advantages is not None
    return done.far.batch.advantages


def _near_sum(near: NearOutcome, weighted: bool) -> Tensor:
    """Compute Σ A·r, or ΣA, over near tokens."""
    direction = near.preset.policy if weighted else "rollout"
    return near.moments.exp(direction, side="A+") - near.moments.exp(direction, side="A-")


def _of_weights(done: Outcome) -> Inputs:
    return _advantages(done), done.token_weights if done.weighs_tokens else None, done.kept.tokens


_weighted = Summed(
    _of_weights,
    lambda a, w, keep: {"wA": masked(a if w is None else a * w, keep)},
    lambda near: {"wA": _near_sum(near, near.preset.weight is not None)},
)
_exact = Summed(
    lambda done: (_advantages(done), done.far.delta.clamp(-OVERFLOW, OVERFLOW).exp()),
    lambda a, r: {"rA": a * r, "r": r},
    lambda near: {"rA": _near_sum(near, True), "r": near.moments.exp(near.preset.policy)},
)


def _error(get: Lookup) -> Tensor:
    m = get("wA") / get("w")
    bias = m - get("rA") / get("r")
    squares = get("wA²") - 2 * m * get("wA·w") + m**2 * get("W²")
    variance = get("sequences") * squares.clamp(min=0) / get("w") ** 2
    return torch.sqrt(bias**2 + variance / UPDATE)


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


def _above(reader: Reader, values: Tensor) -> Number:
    found = plain(float(values[0]), "fraction", ERROR.over, "error / error of the other − 1")
    return found.model_copy(update={"interval": reader.around(values, ABOVE_MINUS_ONE)})
