"""What each number is called, what it says, which way it is worse, and from where on it is bad.

A number of a pair of policies has its name alone for rollout → old (drift 1), or after `drift2.` (old →
current) or `total.` (rollout → current); a number of a preset has it after the preset's name. Formula and
unit stand with the formulas themselves, in `core/`. Nothing heavy is imported, so that results are gated
and drawn without numpy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

from offpol_diag.number import Number

Sign = Literal["higher", "lower", "away", "either"]
Of = Literal["", "dump", "preset", "both"]
Tone = Literal["good", "warn", "bad", "info"]
PAIRS = {"": "rollout → old", "total.": "rollout → current", "drift2.": "old → current"}
"""Prefix → the pair of policies; the first that is known is the main one."""


@dataclass(frozen=True)
class Worse:
    """The worse direction of a number: `higher`, `lower`, `away` from `target`, or `either` (any change)."""

    sign: Sign
    target: float = 0.0


UP, DOWN, EITHER = Worse("higher"), Worse("lower"), Worse("either")
FROM_0, FROM_1 = Worse("away", 0.0), Worse("away", 1.0)


@dataclass(frozen=True)
class Metric:
    """A number, wherever it is of.

    Attributes:
        name: its name in results, gates and tables.
        title: its name for readers.
        worse: which way it is worse.
        first: shown first, of the dump ("dump"), of a preset ("preset"), of both ("both"), or not ("").
        watched: compared with a baseline unless others are named: as `first`.
        log: whether its curve is drawn on a log scale.
    """

    name: str
    title: str
    worse: Worse = EITHER
    first: Of = ""
    watched: Of = ""
    log: bool = False

    @property
    def meaning(self) -> str:
        """What it says, in a line; empty where the title says it."""
        return MEANINGS.get(self.name, "")


_QUANTILES = ("p0_1", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "p99_9")
_ROWS = (  # what matters first
    Metric("k3", "K3 KL", UP, "dump", "both", log=True),
    Metric("k1", "K1", FROM_0, "dump"),
    Metric("mean_ratio", "E[r]", FROM_1, "dump", "dump"),
    Metric("ppl_ratio", "PPL ratio", FROM_1, "dump", "dump"),
    Metric("ess_tokens", "ESS, tokens", DOWN, "both", "both"),
    Metric("ess_sequences", "ESS, sequences", DOWN, "both", "both"),
    Metric("khat_tokens", "Pareto k̂, tokens", UP),
    Metric("khat_sequences", "Pareto k̂, sequences", UP),
    Metric("chi2_token", "χ², tokens", UP, "dump", log=True),
    Metric("chi2_sequence", "χ², sequences", UP, "dump", log=True),
    Metric("prob_diff_mean", "Probability difference", UP, "dump", "dump"),
    Metric("mult_prob_error", "Multiplicative error", UP, "dump"),
    Metric("pearson", "Correlation of probabilities", DOWN, watched="dump"),
    Metric("f_2", "Off by more than 2×", UP, "dump", "dump"),
    Metric("f_10", "Off by more than 10×", UP, "dump"),
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
    Metric("tokens_weighted", "Tokens with a weight", DOWN, "preset"),
    Metric("tokens_rejected", "Rejected tokens", UP, "preset", "preset"),
    Metric("sequences_dropped", "Dropped sequences", UP, "preset", "preset"),
    Metric("sequences_touched", "Sequences that lose tokens", UP, "preset"),
    Metric("vetoed", "Vetoed sequences", UP, "preset"),
    Metric("truncated_high", "Above the upper bound", UP, "preset", "preset"),
    Metric("truncated_low", "Below the lower bound", UP, "preset"),
    Metric("catastrophic_tokens", "Tokens beyond the veto's bound", UP, "preset"),
    Metric("weight_mean", "Mean weight", FROM_1, "preset"),
    Metric("weight_std", "Standard deviation of weights", UP, "preset"),
    Metric("weight_min", "Smallest weight", EITHER, "preset"),
    Metric("weight_max", "Largest weight", UP, "preset"),
    Metric("pg_loss", "Policy loss", EITHER, "preset"),
    Metric("pg_clipfrac", "Clipped by the loss", UP, "preset"),
    Metric("pg_clipfrac_lower", "Clipped by the dual clip", UP, "preset"),
    Metric("ppo_kl", "KL of the update", EITHER, "preset"),
    Metric("kept_at_lag_0", "Kept at policy lag 0", DOWN),
    Metric("pg_loss_kept", "Policy loss, over all tokens"),
    Metric("pg_loss_own", "Policy loss, own denominator"),
    Metric("pg_loss_seq_sum", "Policy loss, sum of tokens"),
    Metric("pg_loss_seq_mean", "Policy loss, mean of sequences"),
    Metric("pg_loss_seq_norm", "Policy loss, by the longest"),
)
METRICS = {one.name: one for one in _ROWS}
"""Name → number."""
MEANINGS = {
    "k3": "KL(π_rollout‖π_train) per token; never negative",
    "k1": "the same KL, plain estimator; were it clearly below 0, the logged log-probs cannot be right",
    "mean_ratio": "1 when the tokens were sampled from the logged policy",
    "ppl_ratio": "perplexity of the trainer over that of the engine, mean over sequences",
    "ess_tokens": "effective sample size of the token weights, as a share: E[r]² / (1 + χ²) of raw ones",
    "ess_sequences": "the same of the weights of whole sequences, raw ones being products",
    "khat_tokens": "tail of the token weights; above 0.7 their mean cannot be estimated",
    "khat_sequences": "tail of the sequence weights; above 0.7 their mean cannot be estimated",
    "chi2_token": "E[r²] − 1: the variance of the token weights where E[r] = 1; below 0 it is no χ²",
    "chi2_sequence": "variance of the sequence weights; grows exponentially with length",
    "prob_diff_mean": "mean |p − q| of the sampled tokens",
    "f_2": "tokens whose probability differs that much",
    "k3_top1_share": "share of K3 in the worst 1% of tokens",
    "tokens_differ": "tokens whose log-probs are not equal to the last bit",
}
"""Name → what it says, where its title does not."""


FIRST_GAP = tuple(name for name, one in METRICS.items() if one.first in ("dump", "both"))
FIRST_PRESET = tuple(name for name, one in METRICS.items() if one.first in ("preset", "both"))
"""Numbers of a pair of policies, and of a preset, that are shown first, in this order."""
WATCHED_GAP = tuple(name for name, one in METRICS.items() if one.watched in ("dump", "both"))
WATCHED_PRESET = tuple(name for name, one in METRICS.items() if one.watched in ("preset", "both"))
"""Numbers compared with a baseline by default: distinct aspects, none of which grows with the dump."""


def metric(name: str) -> Metric:
    """Return the row of a number; of one that has none its name alone."""
    return METRICS.get(name) or Metric(name, name)


def title(name: str) -> str:
    """Return a number's name for readers; of an unknown one the name."""
    return metric(name).title


# ---------------------------------------------------------------- bands, in words of their sources


class Band(NamedTuple):
    """A named range of a number (typical, elevated, good, …), from `low` to below `high`, and who set it."""

    metric: str
    name: str
    low: float | None
    high: float | None
    regime: str
    source: str


STUDY = "SGLang/miles study of train-inference mismatch"
_NEMO = f"{STUDY}; NeMo-RL recipes"
_K3 = (
    Band("k3", "typical", None, 1e-3, "dense model, BF16", STUDY),
    Band("k3", "elevated", 1e-3, 0.015, "usual for MoE in BF16 and for FP8 rollouts", _NEMO),
    Band("k3", "high", 0.015, 0.1, "above the gate for merging a new model", "prime-rl development guide"),
    Band("k3", "severe", 0.1, None, "warning level for |KL|", "verl rollout-correction guide"),
)
_VERL, _PULL = "verl guide (of clamped weights there, of raw ones here)", "verl pull request 3984"
_BANDS = [*_K3]  # best first; of the PPL ratio on its side above 1
for _k3 in _K3:
    _ends = _k3.low and math.exp(_k3.low), _k3.high and math.exp(_k3.high)
    _as_k3 = f"e^±{_k3.low or _k3.high:g}, the same level as K3"
    _BANDS.append(Band("ppl_ratio", _k3.name, *_ends, _as_k3, "derived"))
for _of in ("ess_tokens", "ess_sequences"):
    _BANDS.append(Band(_of, "good", 0.5, None, "from 50%", _VERL))
    _BANDS.append(Band(_of, "fair", 0.3, 0.5, "30% to 50%", _VERL))
    _BANDS.append(Band(_of, "low", None, 0.3, "below 30%", _VERL))
for _of in ("chi2_token", "chi2_sequence"):
    _BANDS.append(Band(_of, "typical", None, 1.0, "up to 1", _PULL))
    _BANDS.append(Band(_of, "elevated", 1.0, 10.0, "above 1", _PULL))
    _BANDS.append(Band(_of, "high", 10.0, None, "from 10", _PULL))
BANDS = {
    name: tuple(one for one in _BANDS if one.metric == name)
    for name in dict.fromkeys(x.metric for x in _BANDS)
}
"""Name → its bands, best first."""
REGIMES = (
    ("mult_prob_error", "–", "above 1.05", "any; to be investigated", "NeMo-RL, GRPO guide"),
    ("prob_diff_mean", "–", "above 0.01", "any; precision problem", "verl FAQ"),
    ("pearson", "–", "0.999", "Qwen3-30B-A3B (MoE), healthy run", "Dynamo + verl recipe notes"),
)
"""Published observations: number, band, range, regime and source; those of K3 are in data/floors.toml."""
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
