"""The gap between two policies on the sampled tokens: K1, K2, K3, χ², perplexities, probability differences.

Each number is a row with its formula over sums of each sequence. Sums are taken of quantities that vanish
on-policy (expm1, not exp), so that nothing is lost to cancellation when the gap is tiny.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offpol_diag.core import formulas as f
from offpol_diag.core.evaluate import Rule, once
from offpol_diag.core.intervals import (
    ABOVE_MINUS_ONE,
    ABOVE_ONE,
    ANYWHERE,
    AS_SEEN,
    CORRELATION,
    POSITIVE,
    Formula,
    Lookup,
    Range,
    mean,
    spread,
)
from offpol_diag.core.segments import Array, Segments, extremes, sent
from offpol_diag.core.sums import LARGEST_SUM, Sums
from offpol_diag.dump.batch import Batch
from offpol_diag.presets import Policy
from offpol_diag.run.devices import CPU

FACTORS = {"f_1_1": 1.1, "f_2": 2.0, "f_5": 5.0, "f_10": 10.0}
"""Name of F(τ) = P(|Δ| > ln τ) → τ."""


@dataclass(frozen=True)
class Drift:
    """A pair of policies; the ratio is numerator over denominator: π_train over π_rollout for drift 1."""

    prefix: str
    title: str
    denominator: Policy
    numerator: Policy

    @property
    def columns(self) -> tuple[str, str]:
        """The dump columns that the drift needs."""
        return f"{self.denominator}_log_probs", f"{self.numerator}_log_probs"


DRIFTS = (
    Drift("", "drift 1: rollout → old", "rollout", "old"),
    Drift("drift2.", "drift 2: old → current", "old", "current"),
    Drift("total.", "total: rollout → current", "rollout", "current"),
)


# ---------------------------------------------------------------- Numbers of tokens


@dataclass(eq=False)
class Tokens(Sums):
    """A batch as its numbers are computed: T tokens of S sequences, on one device.

    Presets, gaps and charts share what was computed of it.

    Attributes:
        batch: the batch.
    """

    batch: Batch = field(kw_only=True)

    @classmethod
    def of(cls, batch: Batch, cut: Callable[[Rule, Array], Array] | None = None, device: str = CPU) -> Tokens:
        """Send a batch to a device.

        Args:
            batch: the batch.
            cut: rule over the trainer batch and its statistic → the value from which on tokens are dropped,
                [T] on the host.
            device: `CPU`, or a GPU such as "cuda:0".
        """
        logs: dict[Policy, Array] = {"rollout": batch.rollout, "old": batch.old, "current": batch.current}
        return cls(
            {policy: sent(x, device) for policy, x in logs.items() if x is not None},
            Segments(sent(batch.cu_seqlens, device), batch.tokens),
            Segments(sent(batch.cu_runs, device), batch.tokens),
            None if batch.advantages is None else sent(batch.advantages, device),
            None if cut is None else lambda rule, x: sent(cut(rule, x), device),
            batch=batch,
        )

    @cached_property
    def counts(self) -> dict[str, Array]:
        """Tokens, sequences with a token, rows, and the rewards of those with a token, [S] each."""
        found = {"tokens": self.sequences.n, "sequences": self.filled, "rows": self.one}
        rewards = self.batch.rewards
        return found if rewards is None else found | {"reward": rewards * self.filled}

    def terms(self, drift: Drift) -> Terms:
        """Compute the numbers of tokens that a drift is made of.

        |π_train − π_rollout| is max(π_train, π_rollout) · (1 − e^−|Δ|), and 1 − e^−|Δ| is |r − 1| over the
        larger of r and 1. π_rollout · |r − 1|, which is the same, would be 0 where π_rollout underflows.
        """
        xp, pair = self.xp, (drift.numerator, drift.denominator)
        log_ratio, k3 = self.log_ratio(*pair), self.finite_k3(*pair)
        r1 = self.ratio_minus_1_within(*pair, f.LARGEST)
        larger = xp.maximum(*map(self.probability, pair))
        prob_diff = larger * (xp.abs(r1) / xp.clip(r1 + 1.0, 1.0, None))
        log_train, log_rollout = (self.log_probs[policy] for policy in pair)
        return Terms(self, drift, log_rollout, log_train, log_ratio, xp.abs(log_ratio), r1, k3, prob_diff)

    @once
    def probability(self, policy: Policy) -> Array:
        """Compute the probability of the sampled tokens, [T]."""
        return self.xp.exp(self.log_probs[policy])

    @once
    def of_policy(self, policy: Policy, side: str) -> dict[str, Array]:
        """Sum probabilities and their squares, and compute exp(−mean log π), 0 of an empty sequence."""
        prob, logs = self.probability(policy), self.sequences.mean(self.log_probs[policy])
        perplexity = self.xp.exp(self.xp.clip(-logs, None, LARGEST_SUM)) * self.filled
        sums = {f"prob_{side}": prob, f"prob_{side}_sq": prob * prob}
        return {f"ppl_{side}": perplexity} | {name: self.sequences.sum(x) for name, x in sums.items()}


class Terms(NamedTuple):
    """Numbers of tokens of a drift, [T] each; its numerator is called train here, its denominator rollout."""

    tokens: Tokens
    drift: Drift
    log_rollout: Array  # nats
    log_train: Array  # nats
    log_ratio: Array  # Δ = log_train − log_rollout, nats
    abs_log_ratio: Array  # |Δ|, nats
    ratio_minus_1: Array  # r − 1, with Δ held to ±345 so that neither it nor its square overflows
    k3: Array  # e^Δ − 1 − Δ, nats; never negative: Δ is clipped where r is
    prob_diff: Array  # |π_train − π_rollout| of the sampled token


# ---------------------------------------------------------------- Sums of sequences


def columns(terms: Terms) -> dict[str, Array]:
    """Compute what the formulas are made of: drift.prefix + name → a sum of each sequence, [S].

    An empty sequence has 0 everywhere. Σ(r² − 1) is Σ(r − 1)² + 2 Σ(r − 1). `gain` is min(r, 2) − 1.
    """
    tokens, drift, runs, xp = terms.tokens, terms.drift, terms.tokens.sequences, terms.tokens.xp
    delta, r1, train, rollout = terms.log_ratio, terms.ratio_minus_1, drift.numerator, drift.denominator
    of_tokens = {
        "log_ratio": delta,
        "log_ratio_sq": delta * delta,
        "abs_log_ratio": terms.abs_log_ratio,
        "ratio_minus_1": r1,
        "ratio_sq_minus_1": r1 * r1,
        "k3": terms.k3,
        "tv": f.total_variation(r1),
        "ratio_either_way_minus_1": xp.maximum(r1, xp.abs(r1) / f.importance_ratio(delta)),
        "prob_diff": terms.prob_diff,
        "prob_diff_sq": terms.prob_diff * terms.prob_diff,
        "prob_product": tokens.probability(train) * tokens.probability(rollout),
    }
    if (advantage := tokens.advantages) is not None:
        gain = xp.clip(r1, None, 1.0)
        of_tokens |= {"advantage": advantage, "gain": gain, "advantage_gain": advantage * gain}
    result = {name: runs.sum(x) for name, x in of_tokens.items()}
    result["ratio_sq_minus_1"] += 2 * result["ratio_minus_1"]
    result |= {name: runs.count(terms.abs_log_ratio > bound) for name, bound in BEYOND.items()}
    result["tokens_differ"] = runs.count(delta != 0)
    result |= tokens.of_policy(train, "train") | tokens.of_policy(rollout, "rollout")
    log_ppl_diff = -result["log_ratio"] / runs.at_least_1
    result |= {
        "log_ppl_diff": log_ppl_diff,
        "log_ppl_abs_diff": xp.abs(log_ppl_diff),
        "ppl_ratio": xp.expm1(xp.clip(log_ppl_diff, None, LARGEST_SUM)),
        "chi2_sequence": xp.expm1(xp.clip(2 * result["log_ratio"], None, LARGEST_SUM)),
    }
    return {drift.prefix + name: x for name, x in result.items()}


def ranges(terms: Terms, columns: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
    """Compute the smallest and largest Δ and |p − q| of tokens, −mean Δ and ΣΔ of sequences."""
    prefix, there = terms.drift.prefix, terms.tokens.sequences.filled
    found = {"log_ratio": terms.log_ratio, "prob_diff": terms.prob_diff}
    found["log_ppl_diff"] = columns[f"{prefix}log_ppl_diff"][there]
    found["sum_log_ratio"] = columns[f"{prefix}log_ratio"][there]
    return {prefix + name: extremes(x) for name, x in found.items()}


BEYOND = {"overflow": f.LARGEST, **{name: math.log(tau) for name, tau in FACTORS.items()}}
"""Column → the |Δ| above which it counts tokens."""


# ---------------------------------------------------------------- Metrics


def _pearson(get: Lookup) -> Array:
    n = get("tokens")
    mean_p, mean_q = get("prob_train") / n, get("prob_rollout") / n
    cov = get("prob_product") / n - mean_p * mean_q
    var = (get("prob_train_sq") / n - mean_p**2) * (get("prob_rollout_sq") / n - mean_q**2)
    return np.where(var > 0, cov / np.sqrt(np.maximum(var, 1e-300)), np.nan)


def _k1(get: Lookup) -> Array:
    return -get("log_ratio") / get("tokens")


def _surrogate_gain(get: Lookup) -> Array:
    n = get("tokens")
    return get("advantage_gain") / n - (get("advantage") / n) * (get("gain") / n)


def _of_sequences(name: str, text: str, within: Range, plus: float = 0.0, unit: str = "") -> Formula:
    """Return the row of a mean over sequences, of the column of its name."""
    return Formula(name, f"mean over sequences of {text}", mean(name, _S, plus), unit, _S, within)


_S = "sequences"
DIFFER = Formula("tokens_differ", "P(Δ ≠ 0)", mean("tokens_differ"), "fraction", counts=True)
"""Says whether two policies are one and the same, not by how much they differ."""
CHI2_SEQUENCE = _of_sequences("chi2_sequence", "e^{2ΣΔ}, minus 1", ABOVE_MINUS_ONE)
_KL = "estimates KL(π_rollout‖π_train)"
_PD = "|π_train − π_rollout|"
_ON_POLICY = "1 when tokens were drawn from the logged π_rollout"

ROWS = (
    Formula("k1", f"mean(−Δ); {_KL}", _k1, "nats"),
    Formula("k2", "mean(Δ²/2)", lambda get: get("log_ratio_sq") / get("tokens") / 2, "nats", within=POSITIVE),
    Formula("k3", f"mean(e^Δ − 1 − Δ); {_KL}, never negative", mean("k3"), "nats", within=POSITIVE),
    Formula("mean_ratio", f"mean(r); {_ON_POLICY}", mean("ratio_minus_1", plus=1.0), within=POSITIVE),
    Formula("chi2_token", "mean(r²) − 1", mean("ratio_sq_minus_1"), within=ABOVE_MINUS_ONE),
    _of_sequences("ppl_train", "exp(−mean log π_train)", POSITIVE),
    _of_sequences("ppl_rollout", "exp(−mean log π_rollout)", POSITIVE),
    _of_sequences("ppl_ratio", "exp(−mean Δ)", POSITIVE, plus=1.0),
    Formula("ppl_ratio_pooled", "exp(−mean Δ) over all tokens", lambda get: np.exp(_k1(get)), log=_k1),
    _of_sequences("log_ppl_diff", "−mean Δ", ANYWHERE, unit="nats"),
    _of_sequences("log_ppl_abs_diff", "|mean Δ|", POSITIVE, unit="nats"),
    Formula("prob_diff_mean", f"mean {_PD} of the sampled token", mean("prob_diff"), within=POSITIVE),
    Formula("prob_diff_std", f"standard deviation of {_PD}", spread("prob_diff"), within=POSITIVE),
    Formula("pearson", "correlation of the probabilities of the sampled token", _pearson, within=CORRELATION),
    Formula("mult_prob_error", "mean(e^|Δ|)", mean("ratio_either_way_minus_1", plus=1.0), within=ABOVE_ONE),
    Formula("abs_log_ratio", "mean |Δ|", mean("abs_log_ratio"), "nats", within=POSITIVE),
    Formula("log_ratio_std", "standard deviation of Δ", spread("log_ratio"), "nats", within=POSITIVE),
    Formula("tv", "mean |r − 1| / 2; estimates the total variation distance", mean("tv"), within=POSITIVE),
    *(
        Formula(name, f"P(|Δ| > ln {x:g})", mean(name), "fraction", counts=True)
        for name, x in FACTORS.items()
    ),
    DIFFER,
)
"""Every number is a mean, or a function of means: a new one is a row here and, if need be, a column above."""

_DRIFT_2 = "{}, Δ = log π_current − log π_old; tokens sampled from π_rollout, not π_old: {}"
SECOND_DRIFT = {
    "k1": _DRIFT_2.format("mean(−Δ)", "no KL; it adds up: k1 + drift2.k1 = total.k1"),
    "k2": _DRIFT_2.format("mean(Δ²/2)", "a size of the change, not a KL"),
    "k3": _DRIFT_2.format("mean(e^Δ − 1 − Δ)", "a size of the change, not a KL, and does not add up"),
    "mean_ratio": _DRIFT_2.format("mean(r)", "not 1 in general"),
    "chi2_token": _DRIFT_2.format("mean(r²) − 1", "not a χ²-divergence, and may be negative"),
    "tv": _DRIFT_2.format("mean |r − 1| / 2", "not a total variation distance"),
}
"""Formula texts for drift 2, whose denominator is not the policy that sampled the tokens."""

SURROGATE = Formula(
    "surrogate_gain",
    "cov(A, min(r, 2)): how much likelier what was rewarded has become; 0 where π_train has not moved",
    _surrogate_gain,
)
"""PPO's surrogate objective less its value at r = 1, with r cut at 2 so that no single token decides."""

REWARD = Formula(
    "mean_reward", "mean reward of the sequences with a token", mean("reward", _S), over=_S, within=AS_SEEN
)
"""Of the dump, not of a gap."""

_DIFF = "−mean Δ of a sequence"
EXTREMES = (
    Formula("prob_diff_max", f"largest {_PD}", lambda ends: ends("prob_diff")[1]),
    Formula("log_ppl_diff_max", f"largest {_DIFF}", lambda ends: ends("log_ppl_diff")[1], "nats", _S),
    Formula("log_ppl_diff_min", f"smallest {_DIFF}", lambda ends: ends("log_ppl_diff")[0], "nats", _S),
    Formula("log_ratio_min", "smallest Δ", lambda ends: ends("log_ratio")[0], "nats"),
    Formula("log_ratio_max", "largest Δ", lambda ends: ends("log_ratio")[1], "nats"),
)
"""Formulas over the smallest and largest of a column of `ranges`, [2], without an interval."""
