"""What each number is called, which way it is worse, and from where on it is bad.

A number of a pair of policies has its name alone for rollout → old (drift 1), or after `drift2.` (old →
current) or `total.` (rollout → current); a number of a preset has it after the preset's name. Formula and
unit stand with the formulas themselves, in `core/`. Nothing heavy is imported, so that results are gated and
drawn without numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offpol_diag.number import Number

Tone = Literal["good", "warn", "bad", "info"]
PAIRS = {"": "rollout → old", "total.": "rollout → current", "drift2.": "old → current"}
"""Prefix → the pair of policies; the first that is known is the main one."""


@dataclass(frozen=True)
class Worse:
    """The worse direction of a number: `higher`, `lower`, `away` from `target`, or `either` (any change)."""

    sign: Literal["higher", "lower", "away", "either"]
    target: float = 0.0


UP, DOWN, EITHER = Worse("higher"), Worse("lower"), Worse("either")
FROM_0, FROM_1 = Worse("away", 0.0), Worse("away", 1.0)


class Metric(NamedTuple):
    """A number, wherever it is of.

    Attributes:
        name: its name in results, gates and tables.
        title: its name for readers.
        worse: which way it is worse.
        log: whether its curve is drawn on a log scale.
    """

    name: str
    title: str
    worse: Worse = EITHER
    log: bool = False


_QUANTILES = ("p0_1", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "p99_9")
_ROWS = (
    Metric("k3", "K3 KL", UP, log=True),
    Metric("k1", "K1", FROM_0),
    Metric("mean_ratio", "E[r]", FROM_1),
    Metric("ppl_ratio", "PPL ratio", FROM_1),
    Metric("ess_tokens", "ESS, tokens", DOWN),
    Metric("ess_sequences", "ESS, sequences", DOWN),
    Metric("khat_tokens", "Pareto k̂, tokens", UP),
    Metric("khat_sequences", "Pareto k̂, sequences", UP),
    Metric("chi2_token", "χ², tokens", UP, log=True),
    Metric("chi2_sequence", "χ², sequences", UP, log=True),
    Metric("prob_diff_mean", "Probability difference", UP),
    Metric("mult_prob_error", "Multiplicative error", UP),
    Metric("pearson", "Correlation of probabilities", DOWN),
    Metric("f_2", "Off by more than 2×", UP),
    Metric("f_10", "Off by more than 10×", UP),
    Metric("k3_top1_share", "K3 in the worst 1%", UP),
    Metric("f_1_1", "Off by more than 1.1×", UP),
    Metric("tokens_differ", "Tokens that differ", UP),
    Metric("f_5", "Off by more than 5×", UP),
    Metric("k2", "K2", UP),
    Metric("abs_log_ratio", "Mean |Δ|", UP),
    Metric("log_ratio_std", "Standard deviation of Δ", UP),
    Metric("tv", "Total variation", UP),
    Metric("prob_diff_std", "Probability difference, standard deviation", UP),
    Metric("prob_diff_max", "Largest probability difference", UP),
    Metric("log_ppl_abs_diff", "|log PPL difference|", UP),
    Metric("max_weight_share", "Share of the largest token weight", UP),
    Metric("max_weight_share_sequences", "Share of the largest sequence weight", UP),
    Metric("ppl_ratio_pooled", "PPL ratio, pooled", FROM_1),
    Metric("log_ppl_diff", "log PPL difference", FROM_0),
    Metric("log_ppl_diff_max", "Largest log PPL difference", FROM_0),
    Metric("log_ppl_diff_min", "Smallest log PPL difference", FROM_0),
    Metric("log_ratio_min", "Smallest Δ", FROM_0),
    Metric("log_ratio_max", "Largest Δ", FROM_0),
    *(Metric(f"log_ratio_{x}", f"Δ, {x[1:].replace('_', '.')}th percentile", FROM_0) for x in _QUANTILES),
    Metric("surrogate_gain", "Surrogate gain", FROM_0),
    Metric("ppl_train", "PPL, trainer"),
    Metric("ppl_rollout", "PPL, engine"),
    Metric("mean_reward", "Mean reward", DOWN),
    # of presets
    Metric("tokens_weighted", "Tokens with a weight", DOWN),
    Metric("tokens_rejected", "Rejected tokens", UP),
    Metric("sequences_dropped", "Dropped sequences", UP),
    Metric("sequences_touched", "Sequences that lose tokens", UP),
    Metric("vetoed", "Vetoed sequences", UP),
    Metric("truncated_high", "Above the upper bound", UP),
    Metric("truncated_low", "Below the lower bound", UP),
    Metric("catastrophic_tokens", "Tokens beyond the veto's bound", UP),
    Metric("weight_mean", "Mean weight", FROM_1),
    Metric("weight_std", "Standard deviation of weights", UP),
    Metric("weight_min", "Smallest weight", EITHER),
    Metric("weight_max", "Largest weight", UP),
    Metric("pg_loss", "Policy loss", EITHER),
    Metric("pg_clipfrac", "Clipped by the loss", UP),
    Metric("pg_clipfrac_lower", "Clipped by the dual clip", UP),
    Metric("ppo_kl", "KL of the update", EITHER),
    Metric("kept_at_lag_0", "Kept at policy lag 0", DOWN),
    Metric("pg_loss_kept", "Policy loss, over all tokens"),
    Metric("pg_loss_own", "Policy loss, own denominator"),
    Metric("pg_loss_seq_sum", "Policy loss, sum of tokens"),
    Metric("pg_loss_seq_mean", "Policy loss, mean of sequences"),
    Metric("pg_loss_seq_norm", "Policy loss, by the longest"),
)
METRICS = {one.name: one for one in _ROWS}
"""Name → number, what matters most first."""
FIRST_GAP = (
    *("k3", "k1", "mean_ratio", "ppl_ratio", "ess_tokens", "ess_sequences", "chi2_token", "chi2_sequence"),
    *("prob_diff_mean", "mult_prob_error", "f_2", "f_10"),
)
"""Numbers of a pair of policies that are shown first, in this order."""
WATCHED_GAP = (
    *("k3", "mean_ratio", "ppl_ratio", "ess_tokens", "ess_sequences", "prob_diff_mean", "pearson", "f_2"),
)
WATCHED_PRESET = (
    *("k3", "ess_tokens", "ess_sequences", "tokens_rejected", "sequences_dropped", "truncated_high"),
)
"""Numbers compared with a baseline: distinct aspects, none of which grows with the dump."""


def metric(name: str) -> Metric:
    """Return the row of a number; of one that has none its name alone."""
    return METRICS.get(name) or Metric(name, name)


def title(name: str) -> str:
    """Return a number's name for readers; of an unknown one the name."""
    return metric(name).title


# ---------------------------------------------------------------- bands, in words of their sources


class Band(NamedTuple):
    """A named range of a number (typical, elevated, good, …), from `low` to below `high`, and who set it."""

    name: str
    low: float | None
    high: float | None
    regime: str
    source: str


STUDY = "SGLang/miles study of train-inference mismatch"
_VERL, _PULL = "verl guide (of clamped weights there, of raw ones here)", "verl pull request 3984"
_K3 = (
    Band("typical", None, 1e-3, "dense model, BF16", STUDY),
    Band("elevated", 1e-3, 0.015, "usual for MoE in BF16 and for FP8 rollouts", f"{STUDY}; NeMo-RL recipes"),
    Band("high", 0.015, 0.1, "above the gate for merging a new model", "prime-rl development guide"),
    Band("severe", 0.1, None, "warning level for |KL|", "verl rollout-correction guide"),
)
_ESS = (
    Band("good", 0.5, None, "from 50%", _VERL),
    Band("fair", 0.3, 0.5, "30% to 50%", _VERL),
    Band("low", None, 0.3, "below 30%", _VERL),
)
_CHI2 = (
    Band("typical", None, 1.0, "up to 1", _PULL),
    Band("elevated", 1.0, 10.0, "above 1", _PULL),
    Band("high", 10.0, None, "from 10", _PULL),
)


def _as_ppl_ratio(k3: Band) -> Band:
    """Return a band of K3 as one of the PPL ratio, on its side above 1: a K3 of x nats is a ratio of e^±x."""
    low, high = k3.low and math.exp(k3.low), k3.high and math.exp(k3.high)
    return Band(k3.name, low, high, f"e^±{k3.low or k3.high:g}, the same level as K3", "derived")


BANDS = {
    "k3": _K3,
    "ppl_ratio": tuple(map(_as_ppl_ratio, _K3)),
    "ess_tokens": _ESS,
    "ess_sequences": _ESS,
    "chi2_token": _CHI2,
    "chi2_sequence": _CHI2,
}
"""Name → its bands, best first."""
TONES: dict[str, Tone] = {
    **dict.fromkeys(("typical", "good", "reliable"), "good"),
    **dict.fromkeys(("elevated", "fair"), "info"),
    "high": "warn",
}
"""Name of a band → how bad it is; others are bad."""


def band(name: str, number: Number) -> Band | None:
    """Return the band of a number's value; None if it has none, or is unknown."""
    value = number.value
    if value is None and number.log10 is not None:
        value = math.inf if number.log10 > 0 else 0.0
    if name not in BANDS or value is None:
        return None
    way = METRICS[name].worse
    if way is FROM_1:
        if value <= 0:
            return None
        value = max(value, 1 / value)
    for one in BANDS[name]:
        end = one.low if way is DOWN else one.high
        if end is None or (value > end if way is DOWN else value < end):
            return one
    return None


def tone(name: str) -> Tone:
    """Return how bad a band is."""
    return TONES.get(name, "bad")
