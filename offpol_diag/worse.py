"""Which way each metric is worse: what a comparison with an earlier result goes by.

A row is a metric's name, as it is after a prefix or a preset, and its way. `WATCHED` are those compared when
none is named: each a different aspect of the mismatch, and none that grows with the size of a dump.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Sign = Literal["higher", "lower", "away", "either"]


@dataclass(frozen=True)
class Worse:
    """A way: `higher` or `lower` is worse; `away`: farther from `target` is; `either`: any change counts."""

    sign: Sign
    target: float = 0.0

    def __str__(self) -> str:
        return f"away from {self.target:g}" if self.sign == "away" else self.sign


UP, DOWN, EITHER = Worse("higher"), Worse("lower"), Worse("either")
FROM_0, FROM_1 = Worse("away", 0.0), Worse("away", 1.0)

GAP: Mapping[str, Worse] = {
    "k1": FROM_0,
    "k2": UP,
    "k3": UP,
    "mean_ratio": FROM_1,
    "chi2_token": UP,
    "chi2_sequence": UP,
    "ppl_train": EITHER,
    "ppl_rollout": EITHER,
    "ppl_ratio": FROM_1,
    "ppl_ratio_pooled": FROM_1,
    "log_ppl_diff": FROM_0,
    "log_ppl_abs_diff": UP,
    "log_ppl_diff_max": FROM_0,
    "log_ppl_diff_min": FROM_0,
    "prob_diff_mean": UP,
    "prob_diff_std": UP,
    "prob_diff_max": UP,
    "pearson": DOWN,
    "mult_prob_error": UP,
    "abs_log_ratio": UP,
    "log_ratio_std": UP,
    "log_ratio_min": FROM_0,
    "log_ratio_max": FROM_0,
    "tv": UP,
    "surrogate_gain": FROM_0,
    "f_1_1": UP,
    "f_2": UP,
    "f_5": UP,
    "f_10": UP,
    "ess_tokens": DOWN,
    "ess_sequences": DOWN,
    "khat_tokens": UP,
    "khat_sequences": UP,
    "max_weight_share": UP,
    "max_weight_share_sequences": UP,
    "k3_top1_share": UP,
    **{f"log_ratio_p{q}": FROM_0 for q in ("0_1", "1", "5", "25", "50", "75", "95", "99", "99_9")},
}
"""Of a policy gap: drift 1, `drift2.`, `total.`."""

PRESET: Mapping[str, Worse] = {
    "weight_mean": FROM_1,
    "weight_std": UP,
    "weight_min": EITHER,
    "weight_max": UP,
    "ess_tokens": DOWN,
    "ess_sequences": DOWN,
    "truncated_high": UP,
    "truncated_low": UP,
    "tokens_rejected": UP,
    "sequences_dropped": UP,
    "sequences_touched": UP,
    "vetoed": UP,
    "catastrophic_tokens": UP,
    "loss_scale": FROM_1,
    "loss_scale_removed": FROM_1,
    "loss_scale_kept": FROM_1,
    "k3": UP,
    "ppl_ratio": FROM_1,
    "chi2_token": UP,
    "chi2_sequence": UP,
    "kept_positive": DOWN,
    "kept_negative": DOWN,
    "update_kept": FROM_1,
    "update_removed": UP,
    "update_removed_positive": UP,
    "update_removed_negative": UP,
    **{f"pg_loss{way}": EITHER for way in ("", "_kept", "_own", "_seq_sum", "_seq_mean", "_seq_norm")},
    "pg_clipfrac": UP,
    "pg_clipfrac_lower": UP,
    "ppo_kl": EITHER,
    **{f"kept_length_q{i}": DOWN for i in range(1, 5)},
    "groups_lost": UP,
}
"""Of a preset."""

WATCHED_GAP = (
    "k3",
    "mean_ratio",
    "ppl_ratio",
    "prob_diff_mean",
    "pearson",
    "f_2",
    "ess_tokens",
    "ess_sequences",
)
WATCHED_PRESET = (
    "ess_tokens",
    "ess_sequences",
    "tokens_rejected",
    "sequences_dropped",
    "truncated_high",
    "k3",
    "loss_scale",
)
