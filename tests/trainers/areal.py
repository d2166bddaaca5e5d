"""AReaL: rejection sampling (4aef98d8d), the cap it replaced (03d71153a, up to v1.0.3), and M2PO.

Its denominator is counted before rejection sampling and after M2PO.
"""

from __future__ import annotations

import numpy as np

from tests.trainers.padded import Padded, Verdict, exp, over, row_mean, row_sum, verdict_of, within

METRICS = {
    "kl_k1": lambda gap: gap,
    "kl_k2": lambda gap: gap**2 / 2,
    "kl_k3": lambda gap: exp(-gap) - 1 + gap,
}
"""Of log π_train − log π_rollout: k1 has the sign that others call −k1, k3 is that of π_rollout/π_train."""


def row_max(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return the maximum of each row, [B, 1]; 0 for a row without a token."""
    largest = np.where(mask, x, -np.inf).max(axis=1, keepdims=True)
    return np.where(np.isfinite(largest), largest, 0.0)


AGGREGATES = {"sum": row_sum, "mean": row_mean, "max": row_max}


def rejection_sampling(
    p: Padded,
    *,
    level: str = "token",
    action: str = "mask",
    metric: str = "ratio",
    agg: str = "mean",
    upper: float = 5.0,
    lower: float | None = None,
) -> Verdict:
    """Apply rejection sampling: a sequence's ratio is aggregated in logs, a sequence's KL as it stands.

    The weight of level sequence with metric ratio is the geometric mean, whatever `agg` is; in all else it
    is the token's ratio.
    """
    gap, shape = p.gap(), p.mask.shape
    judged = gap if metric == "ratio" else kpop(p) if metric == "binary_kl" else METRICS[metric](gap)
    weight = exp(gap)
    if level == "sequence":
        judged = AGGREGATES[agg](judged, p.mask)
        if metric == "ratio":
            weight = exp(row_mean(gap, p.mask)) * np.ones(shape)
    inside = within(exp(judged) if metric == "ratio" else judged, lower, upper) & np.ones(shape, bool)
    if action == "mask":
        return verdict_of(p, weight, inside)
    return verdict_of(p, np.where(inside, weight, np.clip(weight, lower or 0.0, upper)))


def kpop(p: Padded) -> np.ndarray:
    """Compute KPop's measure (cbff54d64): the larger KL of two coins, clamped to [1e-8, 1 - 1e-8]."""
    one, two = (np.clip(exp(x), 1e-8, 1 - 1e-8) for x in (p.old, p.rollout))

    def kl(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return a * np.log(a / b) + (1 - a) * np.log((1 - a) / (1 - b))

    return np.maximum(kl(one, two), kl(two, one))


def behave_cap(
    p: Padded, *, behave_imp_weight_cap: float = 5.0, behave_imp_weight_mode: str = "token_mask"
) -> Verdict:
    """Apply the former cap: without a lower bound, and a sequence's weight is its geometric mean."""
    level, action = behave_imp_weight_mode.split("_")
    log = p.gap() if level == "token" else row_mean(p.gap(), p.mask)
    weight = exp(log) * np.ones(p.mask.shape)
    beyond = over(weight, behave_imp_weight_cap)
    return verdict_of(p, np.where(beyond, 0.0 if action == "mask" else behave_imp_weight_cap, weight))


def m2po(p: Padded, *, m2_threshold: float = 0.04) -> Verdict:
    """Drop the batch's largest squared gaps until the mean of the rest is below; one token always stays."""
    squares = p.gap()[p.mask] ** 2
    order = np.argsort(squares, kind="stable")
    means = np.cumsum(squares[order]) / np.arange(1, len(squares) + 1)
    stay = max(int(np.sum(means < m2_threshold)), 1)
    alive = np.zeros(len(squares), bool)
    alive[order[:stay]] = True
    keep = np.zeros(p.mask.shape, bool)
    keep[p.mask] = alive
    return verdict_of(p, np.ones(p.mask.shape), keep, counted=False)
