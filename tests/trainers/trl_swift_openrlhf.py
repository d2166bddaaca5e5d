"""TRL, ms-swift, OpenRLHF: the factors of their policy losses.

TRL f2cd5771, ms-swift 3602360a, OpenRLHF 3c3be623.
"""

from __future__ import annotations

import numpy as np

from tests.trainers.padded import Padded, Verdict, exp, over, row_mean, row_sum, verdict_of, within


def trl(
    p: Padded,
    *,
    mode: str = "sequence_mask",
    clip_max: float | None = 3.0,
    clip_min: float | None = None,
) -> Verdict:
    """Apply `vllm_importance_sampling_*`: a sequence's ratio is the product, unbounded before exp."""
    level, action = mode.split("_")
    log = p.gap() if level == "token" else row_sum(p.gap(), p.mask)
    ratio = np.broadcast_to(exp(log), p.mask.shape)
    if action == "truncate":
        ratio = np.clip(ratio, clip_min, clip_max)
    else:
        ratio = np.where(within(ratio, clip_min, clip_max), ratio, 0.0)
    return verdict_of(p, ratio)


def deepseek_v32(p: Padded, *, delta: float) -> Verdict:
    """Apply the report's M_{i,t}, with the sampler as π_old; it multiplies the terms of an unchanged mean.

    It is 0 on rows of negative advantage, where the sampler's log-prob leads by more than `delta`.
    """
    drift = -row_mean(p.gap("current"), p.mask)
    return verdict_of(p, np.ones(p.mask.shape), (p.row_advantage() >= 0) | ~over(drift, delta))


def swift(
    p: Padded,
    *,
    rollout_importance_sampling_mode: str | None = None,
    rollout_importance_sampling_threshold: float = 2.0,
) -> Verdict:
    """Apply ms-swift: sequence ratios are geometric means; sequence_mask gates by them, weights by token."""
    cap = rollout_importance_sampling_threshold
    rho = np.exp(np.clip(p.gap(), -20, 20))
    geometric = np.exp(row_mean(np.log(np.maximum(rho, 1e-10)), p.mask))
    weights = {
        None: np.ones(p.mask.shape),
        "token_truncate": np.minimum(rho, cap),
        "token_mask": np.where(over(rho, cap), 0.0, rho),
        "sequence_truncate": np.minimum(geometric, cap) * np.ones(p.mask.shape),
        "sequence_mask": np.where(over(geometric, cap), 0.0, rho),
    }
    return verdict_of(p, weights[rollout_importance_sampling_mode])


def openrlhf(
    p: Padded,
    *,
    is_correction_type: str = "tis",
    is_correction_threshold: tuple[float, float] = (0.5, 5.0),
    policy_loss_type: str = "ppo",
) -> Verdict:
    """Apply both thresholds; GSPO anchors at the rollout, unweighted."""
    low, high = is_correction_threshold
    if policy_loss_type == "gspo":
        return verdict_of(p, np.ones(p.mask.shape))
    ratio = exp(p.gap())
    if is_correction_type == "tis":
        return verdict_of(p, np.clip(ratio, low, high))
    gate = ratio if is_correction_type == "icepop" else exp(row_mean(p.gap(), p.mask))
    return verdict_of(p, np.where(within(gate, low, high), ratio, 0.0))
