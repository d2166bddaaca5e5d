"""Pareto k̂: how heavy the tail of the importance weights is.

Above min(1 − 1/log10 n, 0.7) means of the weights (ESS, χ², E[r]) cannot be trusted at this sample size.

Reference: Vehtari, Simpson, Gelman, Yao, Gabry 2024, "Pareto smoothed importance sampling"; Zhang &
Stephens 2009.
"""

from __future__ import annotations

import math

import torch

from offpol_diag.accumulators import Tail

SMALLEST_TAIL = 5


def limit(n: int) -> float:
    """The k̂ above which estimates from n weights are unreliable."""
    return min(1 - 1 / math.log10(n), 0.7) if n > 10 else 0.0


def khat(tail: Tail) -> float | None:
    """k̂ of the largest M = min(n/5, 3√n) weights; None when the tail is constant or too short.

    Beyond 1.2e8 weights M is capped by the tail that was kept.
    """
    from pyro.ops.stats import fit_generalized_pareto

    size = min(math.ceil(min(tail.n / 5, 3 * math.sqrt(tail.n))), len(tail.top) - 1)
    if size < SMALLEST_TAIL:
        return None
    top = tail.top.cpu()
    weights = torch.exp(top[: size + 1] - top[0])
    beyond = (weights[:size] - weights[size]).flip(0)
    exceedances = beyond[
        beyond > 0
    ]  # a weight equal to the border is not beyond it, and the fit has no place for it
    if len(exceedances) < SMALLEST_TAIL or float(exceedances[-1]) <= 1e-12:
        return None
    k, _ = fit_generalized_pareto(exceedances)
    return float(k) if math.isfinite(float(k)) else None
