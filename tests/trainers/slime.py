"""slime 624b824a8 (miles 31f1ca961 corrects alike): vanilla TIS, IcePop, OPSM, and the MIS helper.

Since 2026-05-25 what they zero still divides the loss.
"""

from __future__ import annotations

import math

import numpy as np

from tests.trainers.padded import Padded, Verdict, exp, over, row_mean, row_sum, under, verdict_of, within


def tis(p: Padded, *, tis_clip: float = 2.0, tis_clip_low: float = 0.0, icepop: bool = False) -> Verdict:
    """Apply --use-tis; `icepop` stands for --custom-tis-function-path …icepop_function."""
    ratio = exp(p.gap())
    inside = within(ratio, tis_clip_low, tis_clip)
    return verdict_of(p, np.where(inside, ratio, 0.0) if icepop else np.clip(ratio, tis_clip_low, tis_clip))


def opsm(p: Padded, *, opsm_delta: float = 1e-4) -> Verdict:
    """Apply OPSM with --use-rollout-logprobs: a drifted row loses every token of negative advantage."""
    drift = -row_mean(p.gap("current"), p.mask)
    return verdict_of(p, np.ones(p.mask.shape), ~((p.advantages < 0) & over(drift, opsm_delta)))


def _ratio(p: Padded, level: str) -> np.ndarray:
    log = {
        "token": p.gap(),
        "sequence": row_sum(p.gap(), p.mask),
        "geometric": row_mean(p.gap(), p.mask),
    }[level]
    return np.exp(np.clip(log, -20.0, 20.0)) * np.ones(p.mask.shape)


def mis(
    p: Padded,
    *,
    tis_level: str = "token",
    tis_mode: str = "truncate",
    tis_lower_bound: float | None = 0.5,
    tis_upper_bound: float = 2.0,
    use_rs: bool = False,
    rs_level: str = "token",
    rs_lower_bound: float | None = None,
    rs_upper_bound: float | None = None,
    rs_veto_threshold: float | None = None,
    tis_batch_normalize: bool = False,
) -> Verdict:
    """Apply mis.yaml; the batch mean is of bounded weights under the mask before any rejection."""
    low = 1 / tis_upper_bound if tis_lower_bound is None else tis_lower_bound
    keep = np.ones(p.mask.shape, bool)
    weight = _ratio(p, tis_level)
    if tis_mode == "truncate":
        weight = np.minimum(weight, tis_upper_bound)
    elif tis_mode == "clip":
        weight = np.clip(weight, low, tis_upper_bound)
    else:
        keep &= within(weight, low, tis_upper_bound)
    if use_rs:
        high = tis_upper_bound if rs_upper_bound is None else rs_upper_bound
        keep &= within(_ratio(p, rs_level), low if rs_lower_bound is None else rs_lower_bound, high)
        keep &= ~_catastrophic(p, rs_veto_threshold)
    if tis_batch_normalize:
        weight = weight / _batch_mean(weight, p, tis_level)
    return verdict_of(p, weight, keep)


def _catastrophic(p: Padded, threshold: float | None) -> np.ndarray:
    """Return rows with a trained token strictly below the threshold, the ratio unclamped, [B, 1]."""
    if threshold is None:
        return np.zeros((len(p.mask), 1), bool)
    return (under(p.gap(), math.log(threshold)) & p.mask).any(axis=1, keepdims=True)


def _batch_mean(weight: np.ndarray, p: Padded, level: str) -> float:
    if level == "geometric":
        raise ValueError("the helper normalises token and sequence weights only")
    if level == "token":
        mean = weight[p.mask].mean()
    else:
        rows = p.mask.any(axis=1)
        mean = row_mean(weight, p.mask)[rows].mean()
    return float(mean) if mean > 1e-8 else 1.0
