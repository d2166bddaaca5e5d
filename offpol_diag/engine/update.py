"""Share of the policy update that a preset removes, by the sign of the advantage.

Uncorrected, the gradient of token t on log π_θ is |A_t|. Under a preset it is |slope · w| for kept tokens and
0 elsewhere. Without π_θ the loss's own clip is inactive, as in the first minibatch, where π_θ = π_old.
"""

from __future__ import annotations

from functools import partial

import numpy as np

from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.formula import POSITIVE, Formula, Lookup
from offpol_diag.engine.method import SIGNS
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns, joined
from offpol_diag.engine.segments import Array


def shared(context: BatchContext) -> dict[str, Array]:
    """Compute Σ|A| of each sequence by sign of A, [S]; the same for every preset."""
    advantages, offsets = context.batch.advantages, context.batch.cu_seqlens
    if advantages is None:
        return {}
    parts = dict(zip(SIGNS, (advantages, -advantages), strict=True))
    return context.cached(
        "mass",
        lambda: {f"mass_{sign}": segments.total(np.maximum(x, 0), offsets) for sign, x in parts.items()},
    )


def columns(sums: PresetSums) -> Columns:
    """Compute Σ|slope · w| of the remaining update, and Σ|A| by sign of what is removed, [S] each."""
    if sums.batch.advantages is None:
        return Columns((), ())
    whole, mass = sums.loss_weights, shared(sums.context)
    result = {"update": joined(np.multiply, sums.total("loss", 1), whole)}
    for at, sign in enumerate(SIGNS):
        result[f"still_{sign}"] = joined(
            partial(_left, gone=mass[f"mass_{sign}"]), whole, sums.total("still", at)
        )
    return sums.named(result)


def _left(factor: Array, x: Array, gone: Array) -> Array:
    """Return x, or what is gone where the factor of the sequence's loss is 0."""
    left: Array = np.where(factor == 0, gone, x)
    return left


def _all(get: Lookup, name: str) -> Array:
    return get(f"{name}_positive") + get(f"{name}_negative")


_ZERO = "Σ|A| of tokens that pull nothing (rejected, vetoed, weight 0, or clipped away) / Σ|A|"
_VIEW = "; without current_log_probs no clip acts (π_θ = π_old)"

ROWS = (
    Formula(
        "update_kept",
        "",
        "Σ|A|",
        f"Σ|w · ∂L/∂log π_θ| over tokens not rejected / Σ|A|: the size of the update that is left{_VIEW}",
        lambda get: get("update") / _all(get, "mass"),
        POSITIVE,
    ),
    Formula(
        "update_removed",
        "fraction",
        "Σ|A|",
        _ZERO + _VIEW,
        lambda get: _all(get, "still") / _all(get, "mass"),
    ),
    Formula(
        "update_removed_positive",
        "fraction",
        "Σ|A| where A > 0",
        f"{_ZERO}, where A > 0{_VIEW}",
        lambda get: get("still_positive") / get("mass_positive"),
    ),
    Formula(
        "update_removed_negative",
        "fraction",
        "Σ|A| where A < 0",
        f"{_ZERO}, where A < 0{_VIEW}",
        lambda get: get("still_negative") / get("mass_negative"),
    ),
)
