"""What verl logs beside the correction: probabilities of the two policies, and the clipped update."""

from __future__ import annotations

import math

from offpol_diag.crosswalk.read import EPS, Read
from offpol_diag.presets import Preset

Logged = dict[str, float]


def logged(preset: Preset, read: Read) -> Logged:
    """`training/` of decoupled presets, whose old policy the trainer computed; `actor/` with its columns."""
    return (_probabilities(read) if preset.policy == "old" else {}) | _actor(preset, read)


def _probabilities(read: Read) -> Logged:
    """|π_old − π_rollout| over tokens, from the sums that the policy gap has made."""
    n, sums = read.sums["tokens"], read.sums
    return {
        "training/rollout_probs_diff_valid": 1.0,
        "training/rollout_probs_diff_max": read.ranges["pd"][1],
        "training/rollout_probs_diff_mean": sums["pd"] / n,
        "training/rollout_probs_diff_std": _std(sums["pd"], sums["pdd"], n),
        "training/rollout_actor_probs_pearson_corr": _pearson(sums, n),
    }


def _std(first: float, second: float, n: float) -> float:
    """n − 1 in the denominator: NaN for one token."""
    return math.sqrt(max(second - first * first / n, 0.0) / (n - 1)) if n > 1 else math.nan


def _pearson(sums: dict[str, float], n: float) -> float:
    """NaN where a policy's probabilities do not vary."""
    p, q = sums["p"] / n, sums["q"] / n
    of_p, of_q = sums["pp"] / n - p * p, sums["qq"] / n - q * q
    return (sums["pq"] / n - p * q) / math.sqrt(of_p * of_q) if of_p > 0 and of_q > 0 else math.nan


_ACTOR = {"actor/pg_clipfrac": "clipped", "actor/pg_clipfrac_lower": "clipped_lower", "actor/ppo_kl": "kl"}


def _actor(preset: Preset, read: Read) -> Logged:
    """Over the tokens that rejection leaves; nothing where the dump has no update to look at.

    REINFORCE clips nothing, and logs no share of it.
    """
    kept = read.sums[f"{preset.name}|kept"] + EPS
    clips = preset.loss != "reinforce"
    found = {name: f"{preset.name}|{column}" for name, column in _ACTOR.items() if clips or column == "kl"}
    return {name: read.sums[column] / kept for name, column in found.items() if column in read.sums}


_MASK = "over tokens that rejection leaves; of the dump's current policy, where verl averages mini-batches"

MEANINGS = {
    "training/rollout_probs_diff_valid": "1: there was a token to compare.",
    "training/rollout_probs_diff_max": "Largest |π_old − π_rollout| of a sampled token: probabilities, not "
    "logs. Decoupled runs only, as all of training/rollout_*.",
    "training/rollout_probs_diff_mean": "Mean |π_old − π_rollout| over tokens: probabilities, so unlikely "
    "tokens, which carry the mismatch, hardly show.",
    "training/rollout_probs_diff_std": "Standard deviation (n − 1) of |π_old − π_rollout| over tokens.",
    "training/rollout_actor_probs_pearson_corr": "Correlation of the two probabilities over tokens; near 1 "
    "for any two policies that agree on which tokens are sure.",
    "actor/pg_clipfrac": f"Share where the clipped term of the PPO loss is the larger one, {_MASK}.",
    "actor/pg_clipfrac_lower": f"Share where A < 0 and the dual clip decides, {_MASK}.",
    "actor/ppo_kl": f"Mean log π_anchor − log π_θ, nats, the anchor being π_old (π_rollout in bypass), "
    f"{_MASK}: it may be negative. PPO and CISPO bound it to ±20 per token; REINFORCE and GSPO do not.",
}
"""Name → what it means."""
