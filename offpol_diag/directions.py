"""Define in which direction each metric is worse, default metrics of the gate, and metrics shown first.

Names are without the prefix of a policy gap (`drift2.`, `total.`) or preset. Imports nothing heavy, so that
results are gated and drawn without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Sign = Literal["higher", "lower", "away", "either"]
Better = Literal["higher", "lower", "neither"]


@dataclass(frozen=True)
class Worse:
    """The worse direction of a metric: `higher`, `lower`, `away` from `target`, or `either` (any change)."""

    sign: Sign
    target: float = 0.0

    def __str__(self) -> str:
        return f"away from {self.target:g}" if self.sign == "away" else self.sign


UP, DOWN, EITHER = Worse("higher"), Worse("lower"), Worse("either")
FROM_0, FROM_1 = Worse("away", 0.0), Worse("away", 1.0)


def _table(rows: Mapping[Worse, str]) -> dict[str, Worse]:
    return {name: worse for worse, names in rows.items() for name in names.split()}


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split())


GAP = _table(
    {
        UP: "k2 k3 chi2_token chi2_sequence log_ppl_abs_diff prob_diff_mean prob_diff_std prob_diff_max "
        "mult_prob_error abs_log_ratio log_ratio_std tv f_1_1 f_2 f_5 f_10 khat_tokens khat_sequences "
        "max_weight_share max_weight_share_sequences k3_top1_share",
        DOWN: "pearson ess_tokens ess_sequences mean_reward",
        EITHER: "ppl_train ppl_rollout",
        FROM_0: "k1 log_ppl_diff log_ppl_diff_max log_ppl_diff_min log_ratio_min log_ratio_max "
        "surrogate_gain log_ratio_p0_1 log_ratio_p1 log_ratio_p5 log_ratio_p25 log_ratio_p50 log_ratio_p75 "
        "log_ratio_p95 log_ratio_p99 log_ratio_p99_9",
        FROM_1: "mean_ratio ppl_ratio ppl_ratio_pooled",
    }
)
"""Metrics of a policy gap: rollout → old, `drift2.` (old → current), `total.` (rollout → current)."""

PRESET = _table(
    {
        UP: "weight_std weight_max truncated_high truncated_low tokens_rejected sequences_dropped "
        "sequences_touched vetoed catastrophic_tokens k3 chi2_token chi2_sequence update_removed "
        "update_removed_positive update_removed_negative pg_clipfrac pg_clipfrac_lower groups_lost",
        DOWN: "ess_tokens ess_sequences tokens_weighted kept_positive kept_negative kept_length_q1 "
        "kept_length_q2 kept_length_q3 kept_length_q4",
        EITHER: "weight_min ppo_kl pg_loss pg_loss_kept pg_loss_own pg_loss_seq_sum pg_loss_seq_mean "
        "pg_loss_seq_norm",
        FROM_1: "weight_mean loss_scale loss_scale_removed loss_scale_kept ppl_ratio update_kept",
    }
)
"""Metrics of a preset."""


GAP_PREFIXES = ("", "drift2.", "total.")


def worse(prefix: str, metric: str) -> Worse:
    """Return a metric's worse direction, for a policy gap (prefix "", `drift2.`, `total.`) or a preset."""
    return (GAP if prefix in GAP_PREFIXES else PRESET).get(metric, EITHER)


WATCHED_GAP = _names("k3 mean_ratio ppl_ratio prob_diff_mean pearson f_2 ess_tokens ess_sequences")
WATCHED_PRESET = _names(
    "ess_tokens ess_sequences tokens_rejected sequences_dropped truncated_high k3 loss_scale"
)
"""Metrics compared with a baseline by default: distinct aspects, none of which grows with the dump."""

FIRST_GAP = _names(
    "k3 k1 mean_ratio ess_tokens ess_sequences chi2_token chi2_sequence ppl_ratio prob_diff_mean "
    "mult_prob_error f_2 f_10"
)
"""Metrics of a policy gap that are shown first, in this order."""
FIRST_PRESET = _names(
    "ess_tokens ess_sequences tokens_weighted tokens_rejected sequences_dropped sequences_touched vetoed "
    "truncated_high truncated_low catastrophic_tokens weight_mean weight_std weight_min weight_max "
    "loss_scale_removed loss_scale_kept pg_loss pg_clipfrac pg_clipfrac_lower ppo_kl"
)
"""Metrics of a preset that are shown first: effective sample size, lost data and weights."""
RANKED = frozenset(FIRST_PRESET[: FIRST_PRESET.index("loss_scale_removed")])
"""Metrics for which a comparison of presets states the better one."""


def better(metric: str) -> Better:
    """Return the better direction of a preset's metric, or `neither` for unranked metrics."""
    ways: dict[Worse, Better] = {UP: "lower", DOWN: "higher"}
    return ways.get(PRESET[metric], "neither") if metric in RANKED else "neither"
