"""NeMo-RL 7ea279abf: importance weights of its clipped loss, and the error mask before it.

`truncated_importance_sampling_*` and `sequence_level_importance_ratios` are of `loss_fn`,
`seq_logprob_error_threshold` of `grpo`. Weights are float32 there: one that has no room becomes 0.
"""

from __future__ import annotations

import numpy as np

from tests.trainers.padded import Padded, Verdict, exp, over, row_mean, row_sum, verdict_of, within


def finite(weight: np.ndarray) -> np.ndarray:
    """Put 0 in place of what float32 cannot hold."""
    with np.errstate(over="ignore"):
        return np.where(np.isfinite(weight.astype(np.float32)), weight, 0.0)


def nemo_rl(
    p: Padded,
    *,
    truncated_importance_sampling_type: str | None = None,
    truncated_importance_sampling_ratio: float | None = None,
    truncated_importance_sampling_ratio_min: float | None = None,
    sequence_level_importance_ratios: bool = False,
    seq_logprob_error_threshold: float | None = None,
    force_on_policy_ratio: bool = False,
) -> Verdict:
    """Apply use_importance_sampling_correction; the error mask leaves the denominator, the types do not."""
    low, high = truncated_importance_sampling_ratio_min, truncated_importance_sampling_ratio
    gap = p.gap("current") if force_on_policy_ratio else p.gap()  # prev_logprobs are the current ones then
    log = row_sum(gap, p.mask) if sequence_level_importance_ratios else gap
    weight = finite(exp(log)) * np.ones(p.mask.shape)
    if truncated_importance_sampling_type == "tis":
        weight = np.clip(weight, low or 0.0, high)
    elif truncated_importance_sampling_type == "icepop":
        weight = np.where(within(weight, low, high), weight, 0.0)
    elif truncated_importance_sampling_type == "seq-mask-tis":
        weight = np.where(within(exp(row_mean(p.gap(), p.mask)), low, high), weight, 0.0)
    if seq_logprob_error_threshold is None:
        return verdict_of(p, weight)
    error = row_mean(exp(np.abs(p.gap())), p.mask)
    return verdict_of(p, weight, ~over(error, seq_logprob_error_threshold), counted=False)
