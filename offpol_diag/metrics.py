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
Better = Literal["higher", "lower", "neither"]
Tone = Literal["good", "warn", "bad", "info"]
PAIRS = {"": "rollout → old", "total.": "rollout → current", "drift2.": "old → current"}
"""Prefix → the pair of policies; the first that is known is the main one."""


@dataclass(frozen=True)
class Worse:
    """The worse direction of a number: `higher`, `lower`, `away` from `target`, or `either` (any change)."""

    sign: Sign
    target: float = 0.0

    def __str__(self) -> str:
        return f"away from {self.target:g}" if self.sign == "away" else self.sign

    @property
    def better(self) -> str:
        """The better direction, in a word."""
        words = {"higher": "lower", "lower": "higher", "either": "–"}
        return words.get(self.sign, f"near {self.target:g}")


UP, DOWN, EITHER = Worse("higher"), Worse("lower"), Worse("either")
FROM_0, FROM_1 = Worse("away", 0.0), Worse("away", 1.0)


@dataclass(frozen=True)
class Level:
    """A published warning level: crossed where the number is worse than `at`.

    Attributes:
        name: a stable id.
        at: the level; of a number that is worse away from a target, the distance.
        sentence: what is said where it is crossed.
        source: who set it, and for what.
        beside: another number that is reported with it.
    """

    name: str
    at: float
    sentence: str
    source: str
    beside: str = ""


@dataclass(frozen=True)
class Metric:
    """A number, wherever it is of.

    Attributes:
        name: its name in results, gates and tables.
        title: its name for readers.
        worse: which way it is worse.
        meaning: what it says, in a line; empty where the title says it.
        first: shown first, of the dump ("dump"), of a preset ("preset"), of both ("both"), or not ("").
        watched: compared with a baseline unless others are named: as `first`.
        ranked: whether a comparison of presets states the better one.
        bands: name, end in the worse direction, regime and source of each band, best first.
        levels: published warning levels.
        log: whether its curve is drawn on a log scale.
    """

    name: str
    title: str
    worse: Worse = EITHER
    meaning: str = ""
    first: Literal["", "dump", "preset", "both"] = ""
    watched: Literal["", "dump", "preset", "both"] = ""
    ranked: bool = False
    bands: tuple[tuple[str, float | None, str, str], ...] = ()
    levels: tuple[Level, ...] = ()
    log: bool = False


# ---------------------------------------------------------------- bands, in words of their sources

STUDY = "SGLang/miles study of train-inference mismatch"
_K3 = (
    ("typical", 1e-3, "dense model, BF16", STUDY),
    ("elevated", 0.015, "usual for MoE in BF16 and for FP8 rollouts", f"{STUDY}; NeMo-RL recipes"),
    ("high", 0.1, "above the gate for merging a new model", "prime-rl development guide"),
    ("severe", None, "warning level for |KL|", "verl rollout-correction guide"),
)
_PPL = tuple(
    (name, end and math.exp(end), f"e^±{level}, the same level as K3", "derived")
    for (name, end, *_), level in zip(_K3, (0.001, 0.001, 0.015, 0.1), strict=True)
)
_VERL, _CHI2_SOURCE = "verl guide (of clamped weights there, of raw ones here)", "verl pull request 3984"
_ESS = (
    ("good", 0.5, "from 50%", _VERL),
    ("fair", 0.3, "30% to 50%", _VERL),
    ("low", None, "below 30%", _VERL),
)
_CHI2 = (
    ("typical", 1.0, "up to 1", _CHI2_SOURCE),
    ("elevated", 10.0, "above 1", _CHI2_SOURCE),
    ("high", None, "from 10", _CHI2_SOURCE),
)
REGIMES = (
    ("mult_prob_error", "–", "above 1.05", "any; to be investigated", "NeMo-RL, GRPO guide"),
    ("prob_diff_mean", "–", "above 0.01", "any; precision problem", "verl FAQ"),
    ("pearson", "–", "0.999", "Qwen3-30B-A3B (MoE), healthy run", "Dynamo + verl recipe notes"),
)
"""Published observations: number, band, range, regime and source; those of K3 are in data/floors.toml."""

# ---------------------------------------------------------------- the numbers, what matters first


def _quantiles() -> tuple[Metric, ...]:
    names = ("p0_1", "p1", "p5", "p25", "p50", "p75", "p95", "p99", "p99_9")
    return tuple(
        Metric(f"log_ratio_{name}", f"Δ, {name[1:].replace('_', '.')}th percentile", FROM_0) for name in names
    )


_ALL = (
    Metric(
        "k3",
        "K3 KL",
        UP,
        "KL(π_rollout‖π_train) per token; never negative",
        "dump",
        "both",
        bands=_K3,
        levels=(
            Level(
                "configuration",
                1.0,
                "K3 above 1 nat",
                "slime and miles debugging notes: k3 above 1 at step 1 is a configuration error",
            ),
            Level(
                "above the merge gate",
                0.015,
                "K3 above 0.015, prime-rl's gate for a new model",
                "prime-rl: KL < 0.015 at each of 20 steps before a model is merged",
            ),
        ),
        log=True,
    ),
    Metric(
        "k1",
        "K1",
        FROM_0,
        "the same KL, plain estimator; were it clearly below 0, the logged log-probs cannot be right",
        "dump",
        levels=(Level("large KL", 0.1, "|K1| above 0.1 nats per token", "verl guide: |kl| > 0.1"),),
    ),
    Metric(
        "mean_ratio",
        "E[r]",
        FROM_1,
        "1 when the tokens were sampled from the logged policy",
        "dump",
        "dump",
        levels=(
            Level(
                "weights off centre",
                0.5,
                "Mean ratio below 0.5 or above 1.5",
                "verl guide: rollout_is_mean < 0.5 or > 2 is a wiring error",
            ),
        ),
    ),
    Metric(
        "ppl_ratio",
        "PPL ratio",
        FROM_1,
        "perplexity of the trainer over that of the engine, mean over sequences",
        "dump",
        "dump",
        bands=_PPL,
    ),
    Metric(
        "ess_tokens",
        "ESS, tokens",
        DOWN,
        "effective sample size of the token weights, as a share: E[r]² / (1 + χ²) of raw ones",
        "both",
        "both",
        ranked=True,
        bands=_ESS,
        levels=(
            Level(
                "low ESS",
                0.3,
                "ESS of tokens below 30%",
                "verl guide: ESS < 0.3 is bad (there of clamped weights, which stay above E[w]/C; here of "
                "raw ones)",
            ),
        ),
    ),
    Metric(
        "ess_sequences",
        "ESS, sequences",
        DOWN,
        "the same of the weights of whole sequences, raw ones being products",
        "both",
        "both",
        ranked=True,
        bands=_ESS,
        levels=(
            Level(
                "product ratios unusable",
                0.1,
                "ESS of sequences below 10%",
                "ESS ≈ e^{−2·KL·T} for log-normal ratios (length trap)",
                beside="khat_sequences",
            ),
        ),
    ),
    Metric(
        "khat_tokens",
        "Pareto k̂, tokens",
        UP,
        "tail of the token weights; above 0.7 their mean cannot be estimated",
    ),
    Metric(
        "khat_sequences",
        "Pareto k̂, sequences",
        UP,
        "tail of the sequence weights; above 0.7 their mean cannot be estimated",
    ),
    Metric(
        "chi2_token",
        "χ², tokens",
        UP,
        "E[r²] − 1: the variance of the token weights where E[r] = 1; below 0 it is no χ²",
        "dump",
        bands=_CHI2,
        levels=(Level("large χ²", 1.0, "χ² of tokens above 1", "verl guide: chi2_token > 1"),),
        log=True,
    ),
    Metric(
        "chi2_sequence",
        "χ², sequences",
        UP,
        "variance of the sequence weights; grows exponentially with length",
        "dump",
        bands=_CHI2,
        log=True,
    ),
    Metric(
        "prob_diff_mean",
        "Probability difference",
        UP,
        "mean |p − q| of the sampled tokens",
        "dump",
        "dump",
        levels=(
            Level(
                "probability difference",
                0.01,
                "Mean probability difference above 0.01",
                "verl FAQ: normally below 0.005; above 0.01 is a precision problem of the engine",
            ),
        ),
    ),
    Metric(
        "mult_prob_error",
        "Multiplicative error",
        UP,
        first="dump",
        levels=(
            Level(
                "multiplicative error",
                1.05,
                "token_mult_prob_error above 1.05",
                "NeMo-RL: token_mult_prob_error above 1.05 is to be investigated",
            ),
        ),
    ),
    Metric("pearson", "Correlation of probabilities", DOWN, watched="dump"),
    Metric("f_2", "Off by more than 2×", UP, "tokens whose probability differs that much", "dump", "dump"),
    Metric("f_10", "Off by more than 10×", UP, first="dump"),
    Metric("k3_top1_share", "K3 in the worst 1%", UP, "share of K3 in the worst 1% of tokens"),
    Metric("f_1_1", "Off by more than 1.1×", UP),
    Metric("tokens_differ", "Tokens that differ", UP, "tokens whose log-probs are not equal to the last bit"),
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
    *_quantiles(),
    Metric("surrogate_gain", "Surrogate gain", FROM_0),
    Metric("ppl_train", "PPL, trainer"),
    Metric("ppl_rollout", "PPL, engine"),
    Metric("mean_reward", "Mean reward", DOWN),
    # of presets
    Metric("tokens_weighted", "Tokens with a weight", DOWN, first="preset", ranked=True),
    Metric("tokens_rejected", "Rejected tokens", UP, first="preset", watched="preset", ranked=True),
    Metric("sequences_dropped", "Dropped sequences", UP, first="preset", watched="preset", ranked=True),
    Metric("sequences_touched", "Sequences that lose tokens", UP, first="preset", ranked=True),
    Metric("vetoed", "Vetoed sequences", UP, first="preset", ranked=True),
    Metric("truncated_high", "Above the upper bound", UP, first="preset", watched="preset", ranked=True),
    Metric("truncated_low", "Below the lower bound", UP, first="preset", ranked=True),
    Metric("catastrophic_tokens", "Tokens beyond the veto's bound", UP, first="preset", ranked=True),
    Metric("weight_mean", "Mean weight", FROM_1, first="preset", ranked=True),
    Metric("weight_std", "Standard deviation of weights", UP, first="preset", ranked=True),
    Metric("weight_min", "Smallest weight", first="preset", ranked=True),
    Metric("weight_max", "Largest weight", UP, first="preset", ranked=True),
    Metric("pg_loss", "Policy loss", first="preset"),
    Metric("pg_clipfrac", "Clipped by the loss", UP, first="preset"),
    Metric("pg_clipfrac_lower", "Clipped by the dual clip", UP, first="preset"),
    Metric("ppo_kl", "KL of the update", first="preset"),
    Metric("kept_at_lag_0", "Kept at policy lag 0", DOWN),
    Metric("pg_loss_kept", "Policy loss, over all tokens"),
    Metric("pg_loss_own", "Policy loss, own denominator"),
    Metric("pg_loss_seq_sum", "Policy loss, sum of tokens"),
    Metric("pg_loss_seq_mean", "Policy loss, mean of sequences"),
    Metric("pg_loss_seq_norm", "Policy loss, by the longest"),
)
METRICS = {one.name: one for one in _ALL}
"""Name → number."""


def _names(where: str, of: str) -> tuple[str, ...]:
    return tuple(name for name, one in METRICS.items() if getattr(one, where) in (of, "both"))


FIRST_GAP, FIRST_PRESET = _names("first", "dump"), _names("first", "preset")
"""Numbers of a pair of policies, and of a preset, that are shown first, in this order."""
WATCHED_GAP, WATCHED_PRESET = _names("watched", "dump"), _names("watched", "preset")
"""Numbers compared with a baseline by default: distinct aspects, none of which grows with the dump."""


def metric(name: str) -> Metric:
    """Return the row of a number; of one that has none its name alone."""
    return METRICS.get(name) or Metric(name, name)


def title(name: str) -> str:
    """Return a number's name for readers; of an unknown one the name."""
    return metric(name).title


def worse(name: str) -> Worse:
    """Return which way a number is worse, given its name with or without a prefix."""
    return metric(name.rpartition(".")[2]).worse


def better(name: str) -> Better:
    """Return the better direction of a preset's number, or `neither` for unranked ones."""
    ways: dict[Worse, Better] = {UP: "lower", DOWN: "higher"}
    return ways.get(metric(name).worse, "neither") if metric(name).ranked else "neither"


# ---------------------------------------------------------------- bands


class Band(NamedTuple):
    """A named range of a number (typical, elevated, good, …), from `low` to below `high`, and who set it."""

    metric: str
    name: str
    low: float | None
    high: float | None
    regime: str
    source: str


TONES: dict[str, Tone] = {
    "typical": "good",
    "good": "good",
    "reliable": "good",
    "elevated": "info",
    "fair": "info",
    "high": "warn",
}
"""Name of a band → how bad it is; others are bad."""


def _ranges(metric: Metric) -> tuple[Band, ...]:
    start, found = None, []
    for name, end, regime, source in metric.bands:
        low, high = (end, start) if metric.worse is DOWN else (start, end)
        found.append(Band(metric=metric.name, name=name, low=low, high=high, regime=regime, source=source))
        start = end
    return tuple(found)


BANDS = {name: _ranges(one) for name, one in METRICS.items() if one.bands}
"""Name → its bands, best first; those of the PPL ratio are of its side above 1."""


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
        end = start_of_next(one)
        if end is None or (value > end if way is DOWN else value < end):
            return one
    raise AssertionError(f"the worst band of {name} has an end")


def start_of_next(one: Band) -> float | None:
    """Return where a band ends in the worse direction; None for the worst."""
    return one.low if METRICS[one.metric].worse is DOWN else one.high


def start(one: Band) -> float | None:
    """Return where a band begins in the worse direction; None for the best."""
    return one.high if METRICS[one.metric].worse is DOWN else one.low


def tone(name: str) -> Tone:
    """Return how bad a band is."""
    return TONES.get(name, "bad")


def crossed(metric: Metric, value: float) -> tuple[Level, ...]:
    """Return the published levels than which a number's value is worse."""
    sign, target = metric.worse.sign, metric.worse.target
    over = {"higher": value, "lower": -value, "away": abs(value - target)}.get(sign, -math.inf)
    return tuple(one for one in metric.levels if over > (-one.at if sign == "lower" else one.at))
