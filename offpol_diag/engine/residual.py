"""The policy gap among the tokens that a preset keeps: a falling rejection rate alone is no sign of health.

Numerator and denominator are the preset's own: π_old or π_θ over π_rollout.
"""

from __future__ import annotations

import numpy as np

from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.intervals import ABOVE_MINUS_ONE, POSITIVE, Formula, mean
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns, joined
from offpol_diag.engine.segments import Array


def columns(sums: PresetSums) -> Columns:
    """Compute the per-sequence columns [S]: Σ k3 over kept tokens, their perplexity ratio and w² − 1."""
    kept, n = sums["kept"], np.maximum(sums.n, 1)
    columns = {
        "residual_k3": sums["k3"],
        "residual_ppl": joined(_ppl, sums["delta"], kept),
        "residual_left": kept.map(_there),
        "residual_ww": joined(
            lambda squares, deviation: squares + 2 * deviation,
            sums["about_one"],
            sums["deviation"],
        ),
        "residual_vv": joined(lambda deviation, many: _vv(deviation, many, n), sums["deviation"], kept),
    }
    return sums.named(columns)


def _there(kept: Array) -> Array:
    """Return 1 for a sequence with a kept token, else 0."""
    return (kept > 0).astype(np.float64)


def _ppl(delta: Array, kept: Array) -> Array:
    """Compute exp(−mean Δ) − 1 over the kept tokens, `delta` being ΣΔ; 0 where none is kept."""
    gap = delta / np.maximum(kept, 1)
    return np.expm1(np.minimum(-gap, 2 * LARGEST)) * _there(kept)


def _vv(deviation: Array, kept: Array, n: Array) -> Array:
    """Compute v² − 1 from Σ(w − 1), v = mean weight, 0 for rejected tokens; 0 where no token is kept."""
    away = (deviation + kept - n) / n
    return away * (away + 2) * _there(kept)


ROWS = (
    Formula(
        "k3",
        "nats",
        "tokens not rejected",
        "mean(e^Δ − 1 − Δ) of the tokens not rejected",
        lambda get: get("residual_k3") / get("kept"),
        POSITIVE,
    ),
    Formula(
        "ppl_ratio",
        "",
        "sequences left",
        "mean over sequences left of exp(−mean Δ of their tokens not rejected)",
        lambda get: get("residual_ppl") / get("residual_left") + 1,
        POSITIVE,
    ),
    Formula(
        "chi2_token",
        "",
        "tokens not rejected",
        "mean(w²) − 1 of the final weights",
        mean("residual_ww", "kept"),
        ABOVE_MINUS_ONE,
    ),
    Formula(
        "chi2_sequence",
        "",
        "sequences left",
        "mean(v²) − 1, v = mean final weight over the sequence's tokens, 0 where rejected",
        mean("residual_vv", "residual_left"),
        ABOVE_MINUS_ONE,
    ),
)
