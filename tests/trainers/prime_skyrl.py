"""prime-rl (559b44772, and its losses since September 2026), SkyRL a9564572e, verl's DPPO 1dda039b.

Those without π_old put π_θ over the rollout. What they mask still divides the loss.
"""

from __future__ import annotations

import numpy as np

from tests.trainers.padded import Padded, Verdict, exp, over, row_mean, row_sum, under, verdict_of, within


def moved(p: Padded) -> np.ndarray:
    """Compute π_θ − π_rollout of the sampled token, [B, L]."""
    return np.exp(p.current) - np.exp(p.rollout)


def prime_dppo(p: Padded, *, dppo_mask_low: float = 0.2, dppo_mask_high: float = 0.2) -> Verdict:
    """Mask by DPPO: positive advantages meet the upper bound, all others the lower one."""
    gone = np.where(p.advantages > 0, over(moved(p), dppo_mask_high), under(moved(p), -dppo_mask_low))
    return verdict_of(p, exp(p.gap("current")), ~gone)


def prime_icepop(p: Padded, *, ratio_low: float = 0.2, ratio_high: float = 5.0) -> Verdict:
    """Keep tokens within both bounds of the ratio."""
    ratio = exp(p.gap("current"))
    return verdict_of(p, ratio, within(ratio, ratio_low, ratio_high))


def prime_cispo(p: Padded, *, ratio_low: float = 0.0, ratio_high: float = 5.0) -> Verdict:
    """Clip the weight that no gradient passes."""
    return verdict_of(p, np.clip(exp(p.gap("current")), ratio_low, ratio_high))


def prime_ipo(p: Padded, *, ipo_threshold: float = 0.1) -> Verdict:
    """Mask by IPO: both bounds for every token."""
    return verdict_of(p, exp(p.gap("current")), ~over(np.abs(moved(p)), ipo_threshold))


def skyrl_correction(
    p: Padded,
    *,
    tis_ratio_type: str | None = None,
    token_tis_ratio_clip_high: float = 2.0,
    sequence_tis_ratio_clip_high: float = 5.0,
    sequence_mask_metric: str | None = None,
    geo_mask: tuple[float, float] = (0.99, 1.01),
    product_mask: tuple[float, float] = (0.5, 2.0),
    outlier_token_is_threshold: tuple[float | None, float | None] = (None, None),
    token_mask_is_threshold: tuple[float, float] | None = None,
) -> Verdict:
    """Apply off_policy_correction; pairs are (…_low, …_high); each stage sees the mask left by the last."""
    ratio = _bounded_exp(p.gap())
    left = p.mask & ~(p.mask & ~within(ratio, *outlier_token_is_threshold)).any(axis=1, keepdims=True)
    if token_mask_is_threshold is not None:
        left = left & within(ratio, *token_mask_is_threshold)
    weight = np.ones(p.mask.shape)
    if tis_ratio_type == "token":
        weight = np.minimum(ratio, token_tis_ratio_clip_high)
    elif tis_ratio_type == "sequence":
        product = _bounded_exp(row_sum(p.gap(), left))
        weight = np.minimum(product, sequence_tis_ratio_clip_high) * weight
    if sequence_mask_metric == "geometric":
        left = left & within(_bounded_exp(row_mean(p.gap(), left)), *geo_mask)
    elif sequence_mask_metric == "product":
        left = left & within(_bounded_exp(row_sum(p.gap(), left)), *product_mask)
    return verdict_of(p, weight, left)


def _bounded_exp(log: np.ndarray) -> np.ndarray:
    return np.exp(np.clip(log, -20.0, 20.0))


def skyrl_rollout_is(p: Padded, *, eps_clip_low: float = 0.2, eps_clip_high: float = 0.2) -> Verdict:
    """Return the ratio where it is strictly inside the bounds."""
    ratio = _bounded_exp(p.gap("current"))
    inside = over(ratio, 1 - eps_clip_low) & under(ratio, 1 + eps_clip_high)
    return verdict_of(p, np.where(inside, ratio, 0.0))


def skyrl_dppo(
    p: Padded, *, dppo_type: str = "binary_tv", delta_low: float = 0.2, delta_high: float = 0.2
) -> Verdict:
    """Mask by DPPO: only tokens pushed further away are dropped; those of zero advantage never are."""
    change, up, down = moved(p), p.advantages > 0, p.advantages < 0
    if dppo_type == "binary_tv":
        gone = (up & over(change, delta_high)) | (down & over(-change, delta_low))
    else:
        far = _coin_kl(p)
        gone = (up & (change > 0) & over(far, delta_high)) | (down & (change < 0) & over(far, delta_low))
    return verdict_of(p, _bounded_exp(p.gap("current")), ~gone)


def _coin_kl(p: Padded) -> np.ndarray:
    """Compute the KL from the rollout's coin "this token or another" to the current policy's."""
    mu, pi, tiny = np.exp(p.rollout), np.exp(p.current), 1e-8
    return -mu * p.gap("current") + (1 - mu) * np.log((1 - mu + tiny) / (1 - pi + tiny))


def verl_dppo(p: Padded, *, loss_mode: str, clip_ratio: float, clip_ratio_c: float = 10000.0) -> Verdict:
    """Mask in bypass mode; a token of zero advantage has no loss, and dppo_kl keeps it."""
    change, up = moved(p), p.advantages > 0
    if loss_mode == "dppo_tv":
        gone = np.where(up, over(change, clip_ratio), over(-change, clip_ratio))
    else:
        gone = over(_coin_kl(p), clip_ratio) & np.where(up, change > 0, (change < 0) & (p.advantages < 0))
    return verdict_of(p, np.minimum(_bounded_exp(p.gap("current")), clip_ratio_c), ~gone)


def skyrl_cispo(p: Padded, *, cispo_eps_clip_low: float = 1.0, cispo_eps_clip_high: float = 4.0) -> Verdict:
    """Apply CISPO with cispo_anchor=rollout."""
    ratio = _bounded_exp(p.gap("current"))
    return verdict_of(p, np.clip(ratio, 1 - cispo_eps_clip_low, 1 + cispo_eps_clip_high))
