"""What a comparison shows first, and which way is better where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Better = Literal["higher", "lower", "neither"]

DIRECTIONS: Mapping[str, Better] = {
    "ess_tokens": "higher",
    "ess_sequences": "higher",
    "tokens_rejected": "lower",
    "sequences_dropped": "lower",
    "sequences_touched": "lower",
    "vetoed": "lower",
    "truncated_high": "lower",
    "truncated_low": "lower",
    "catastrophic_tokens": "lower",
    "weight_mean": "neither",
    "weight_std": "lower",
    "weight_min": "neither",
    "weight_max": "lower",
    "loss_scale_removed": "neither",
    "loss_scale_kept": "neither",
    "pg_loss": "neither",
    "pg_clipfrac": "neither",
    "pg_clipfrac_lower": "neither",
    "ppo_kl": "neither",
}
"""Of a preset: more effective samples, less data lost, lighter weights. Others follow, unmarked."""

MATTERS = (
    "k3",
    "k1",
    "mean_ratio",
    "ess_tokens",
    "ess_sequences",
    "chi2_token",
    "chi2_sequence",
    "ppl_ratio",
    "prob_diff_mean",
    "mult_prob_error",
    "f_2",
    "f_10",
)
"""Of the gap, in this order."""
