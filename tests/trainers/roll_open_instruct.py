"""ROLL 8eb27cc2 (train_infer_correction) and open-instruct e6c3044aa (rho)."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.trainers.padded import Padded, Verdict, exp, over, row_mean, row_sum, turn_mean, verdict_of, within

ROLL_AGGREGATES = {
    "token": lambda x, mask: x,
    "segment": turn_mean,
    "geometric": row_mean,
    "sequence": row_sum,
}


def roll(
    p: Padded, *, is_weight: dict[str, Any] | None = None, filters: tuple[dict[str, Any], ...] = ()
) -> Verdict:
    """Apply ROLL: weights and filters see the original mask; filtered tokens leave the denominator.

    That is with enable_old_logprobs_recompute; a probability difference of level sequence is a sum.
    """
    weight = np.ones(p.mask.shape)
    if is_weight is not None:
        ratio = exp(ROLL_AGGREGATES[is_weight.get("weight_type", "token")](p.gap(), p.mask))
        weight = np.clip(ratio, 0.0, is_weight.get("upper_bound", 1.2)) * weight
    keep = np.ones(p.mask.shape, bool)
    for one in filters:
        keep &= _roll_filter(p, **one)
    return verdict_of(p, weight, keep, counted=False)


def _roll_filter(
    p: Padded,
    agg_type: str = "token",
    ratio_enabled: bool = True,
    ratio_low: float = 0.8,
    ratio_high: float = 1.2,
    diff_enabled: bool = False,
    diff_low: float = -0.2,
    diff_high: float = 0.2,
) -> np.ndarray:
    aggregate = ROLL_AGGREGATES[agg_type]
    keep = np.ones(p.mask.shape, bool)
    if ratio_enabled:
        keep &= within(exp(aggregate(p.gap(), p.mask)), ratio_low, ratio_high)
    if diff_enabled:
        change = np.where(p.mask, np.exp(p.old) - np.exp(p.rollout), 0.0)
        keep &= within(aggregate(change, p.mask), diff_low, diff_high)
    return keep


def open_instruct(
    p: Padded,
    *,
    rho_clamp_lower_bound: float = 0.0,
    rho_clamp_upper_bound: float = 2.0,
    rho_mask_lower_bound: float = 0.0,
    rho_mask_upper_bound: float = 0.0,
    rho_mask_sequence_level: bool = False,
    rho_mask_tv_divergence: bool = False,
) -> Verdict:
    """Apply rho: a bound of 0 is no bound; each log-ratio is first held within ±10."""
    gap = np.clip(p.gap(), -10.0, 10.0)
    rho = np.exp(row_mean(gap, p.mask) if rho_mask_sequence_level else gap) * np.ones(p.mask.shape)
    band = rho_mask_lower_bound or None, rho_mask_upper_bound or None
    if rho_mask_tv_divergence:
        far = ~within(row_mean(np.abs(rho - 1), p.mask), *band)
        gone = far & (np.sign(gap) * p.advantages > 0)
    else:
        gone = ~within(rho, *band)
    if rho_clamp_lower_bound:
        rho = np.maximum(rho, rho_clamp_lower_bound)
    if rho_clamp_upper_bound:
        rho = np.where(over(rho, rho_clamp_upper_bound), rho_clamp_upper_bound, rho)
    return verdict_of(p, rho, ~gone)
