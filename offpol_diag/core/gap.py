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
from offpol_diag.core.evaluate import once
from offpol_diag.core.intervals import (
    ABOVE_MINUS_ONE,
    ABOVE_ONE,
    AS_SEEN,
    CORRELATION,
    POSITIVE,
    Formula,
    Lookup,
    Range,
    mean,
    spread,
)
from offpol_diag.core.plan import Rule
from offpol_diag.core.segments import CPU, Array, Segments, extremes, sent
from offpol_diag.core.sums import LARGEST_SUM, Sums
from offpol_diag.dump.batch import Batch
from offpol_diag.presets import Policy

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
        return found if (given := self.batch.rewards) is None else found | {"reward": given * self.filled}

    def terms(self, drift: Drift) -> Terms:
        """Compute the numbers of tokens that a drift is made of.

        |π_train − π_rollout| is max(π_train, π_rollout) · (1 − e^−|Δ|), and 1 − e^−|Δ| is |r − 1| over the
        larger of r and 1. π_rollout · |r − 1|, which is the same, would be 0 where π_rollout underflows.
        """
        xp, pair = self.xp, (drift.numerator, drift.denominator)
        delta, k3 = self.log_ratio(*pair), self.finite_k3(*pair)
        r1 = self.ratio_minus_1_within(drift.numerator, f.LARGEST, drift.denominator)
        p, q = map(self.probability, pair)
        pd = xp.maximum(p, q) * (xp.abs(r1) / xp.clip(r1 + 1.0, 1.0, None))
        log_p, log_q = (self.log_probs[policy] for policy in pair)
        return Terms(self, drift, log_q, log_p, delta, xp.abs(delta), r1, k3, pd)

    @once
    def probability(self, policy: Policy) -> Array:
        """Compute the probability of the sampled tokens, [T]."""
        return self.xp.exp(self.log_probs[policy])

    @once
    def of_policy(self, policy: Policy, name: str) -> dict[str, Array]:
        """Sum probabilities and their squares, and compute exp(−mean log π), 0 of an empty sequence."""
        prob, logs = self.probability(policy), self.sequences.mean(self.log_probs[policy])
        perplexity = self.xp.exp(self.xp.clip(-logs, None, LARGEST_SUM)) * self.filled
        sums = self.sequences.sum(prob), self.sequences.sum(prob * prob)
        return {name: sums[0], name + name: sums[1], f"ppl_{name}": perplexity}


class Terms(NamedTuple):
    """Numbers of tokens of a drift, [T] each.

    Attributes:
        tokens: the tokens.
        drift: the drift.
        q: log-probs of its denominator, nats.
        p: log-probs of its numerator, nats.
        delta: Δ = p − q, nats.
        size: |Δ|, nats.
        r1: r − 1, with Δ held to ±345 so that neither it nor its square overflows.
        k3: e^Δ − 1 − Δ, nats; never negative, since a Δ whose r is held is held too.
        pd: |π_train − π_rollout| of the sampled token.
    """

    tokens: Tokens
    drift: Drift
    q: Array
    p: Array
    delta: Array
    size: Array
    r1: Array
    k3: Array
    pd: Array


# ---------------------------------------------------------------- Sums of sequences


def columns(terms: Terms) -> dict[str, Array]:
    """Compute what the formulas are made of: drift.prefix + name → a sum of each sequence, [S].

    An empty sequence has 0 everywhere. Σ(r² − 1) is Σ(r − 1)² + 2 Σ(r − 1).
    """
    tokens, drift, _, _, d, size, r1, k3, pd = terms
    runs, xp, p, q = (
        tokens.sequences,
        tokens.xp,
        *map(tokens.probability, (drift.numerator, drift.denominator)),
    )
    of_tokens = {"d": d, "dd": d * d, "abs": size, "r1": r1, "r2": r1 * r1, "k3": k3}
    of_tokens |= {"pd": pd, "pdd": pd * pd, "pq": p * q, "tv": xp.abs(r1) / 2}
    of_tokens["mult"] = xp.maximum(r1, xp.abs(r1) / f.importance_ratio(d))
    if (a := tokens.advantages) is not None:
        x = xp.clip(r1, None, 1.0)
        of_tokens |= {"a": a, "x": x, "ax": a * x}
    result = {name: runs.sum(x) for name, x in of_tokens.items()}
    result |= {name: runs.count(size > bound) for name, bound in BEYOND.items()}
    result |= tokens.of_policy(drift.numerator, "p") | tokens.of_policy(drift.denominator, "q")
    g = result["d"] / runs.at_least_1
    result |= {
        "r2": result["r2"] + 2 * result["r1"],
        "differ": runs.count(d != 0),
        "g": g,
        "g_abs": xp.abs(g),
        "ppl_ratio": xp.expm1(xp.clip(-g, None, LARGEST_SUM)),
        "s2": xp.expm1(xp.clip(2 * result["d"], None, LARGEST_SUM)),
    }
    return {drift.prefix + name: x for name, x in result.items()}


def ranges(terms: Terms, columns: Mapping[str, Array]) -> dict[str, tuple[float, float]]:
    """Compute the smallest and largest Δ, |p − q|, mean Δ of a sequence (g) and ΣΔ of a sequence (s)."""
    prefix, there = terms.drift.prefix, terms.tokens.sequences.filled
    of_sequences = {"g": columns[f"{prefix}g"], "s": columns[f"{prefix}d"]}
    spans = {"d": extremes(terms.delta), "pd": extremes(terms.pd)}
    spans |= {name: extremes(x[there]) for name, x in of_sequences.items()}
    return {prefix + name: span for name, span in spans.items()}


BEYOND = {"overflow": f.LARGEST, **{name: math.log(tau) for name, tau in FACTORS.items()}}
"""Column → the |Δ| above which it counts tokens."""


# ---------------------------------------------------------------- Metrics


def _pearson(get: Lookup) -> Array:
    n = get("tokens")
    mean_p, mean_q = get("p") / n, get("q") / n
    cov = get("pq") / n - mean_p * mean_q
    var = (get("pp") / n - mean_p**2) * (get("qq") / n - mean_q**2)
    return np.where(var > 0, cov / np.sqrt(np.maximum(var, 1e-300)), np.nan)


def _k1(get: Lookup) -> Array:
    return -get("d") / get("tokens")


def _of_sequences(name: str, text: str, within: Range, plus: float = 0.0, column: str = "") -> Formula:
    """Return the row of a mean over sequences."""
    of = mean(column or name, "sequences", plus)
    return Formula(name, f"mean over sequences of {text}", of, "", "sequences", within)


_S = "sequences"
DIFFER = Formula("tokens_differ", "P(Δ ≠ 0)", mean("differ"), "fraction", counts=True)
"""Says whether two policies are one and the same, not by how much they differ."""
CHI2_SEQUENCE = _of_sequences("chi2_sequence", "e^{2ΣΔ}, minus 1", ABOVE_MINUS_ONE, column="s2")
_KL = "estimates KL(π_rollout‖π_train)"
_PD = "|π_train − π_rollout|"
_ON_POLICY = "1 when tokens were drawn from the logged π_rollout"

ROWS = (
    Formula("k1", f"mean(−Δ); {_KL}", _k1, "nats"),
    Formula("k2", "mean(Δ²/2)", lambda get: get("dd") / get("tokens") / 2, "nats", within=POSITIVE),
    Formula("k3", f"mean(e^Δ − 1 − Δ); {_KL}, never negative", mean("k3"), "nats", within=POSITIVE),
    Formula("mean_ratio", f"mean(r); {_ON_POLICY}", mean("r1", plus=1.0), within=POSITIVE),
    Formula("chi2_token", "mean(r²) − 1", mean("r2"), within=ABOVE_MINUS_ONE),
    _of_sequences("ppl_train", "exp(−mean log π_train)", POSITIVE, column="ppl_p"),
    _of_sequences("ppl_rollout", "exp(−mean log π_rollout)", POSITIVE, column="ppl_q"),
    _of_sequences("ppl_ratio", "exp(−mean Δ)", POSITIVE, plus=1.0),
    Formula("ppl_ratio_pooled", "exp(−mean Δ) over all tokens", lambda get: np.exp(_k1(get)), log=_k1),
    Formula("log_ppl_diff", "mean over sequences of −mean Δ", lambda get: -get("g") / get(_S), "nats", _S),
    Formula("log_ppl_abs_diff", "mean over sequences of |mean Δ|", mean("g_abs", _S), "nats", _S, POSITIVE),
    Formula("prob_diff_mean", f"mean {_PD} of the sampled token", mean("pd"), within=POSITIVE),
    Formula("prob_diff_std", f"standard deviation of {_PD}", spread("pd", "pdd"), within=POSITIVE),
    Formula("pearson", "correlation of the probabilities of the sampled token", _pearson, within=CORRELATION),
    Formula("mult_prob_error", "mean(e^|Δ|)", mean("mult", plus=1.0), within=ABOVE_ONE),
    Formula("abs_log_ratio", "mean |Δ|", mean("abs"), "nats", within=POSITIVE),
    Formula("log_ratio_std", "standard deviation of Δ", spread("d", "dd"), "nats", within=POSITIVE),
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
    lambda get: get("ax") / get("tokens") - (get("a") / get("tokens")) * (get("x") / get("tokens")),
)
"""PPO's surrogate objective less its value at r = 1, with r cut at 2 so that no single token decides."""

_REWARD = "mean reward of the sequences with a token"
REWARD = Formula("mean_reward", _REWARD, mean("reward", _S), over=_S, within=AS_SEEN)
"""Of the dump, not of a gap."""

EXTREMES = (
    Formula("prob_diff_max", f"largest {_PD}", lambda ends: ends("pd")[1]),
    Formula("log_ppl_diff_max", "largest −mean Δ of a sequence", lambda ends: -ends("g")[0], "nats", _S),
    Formula("log_ppl_diff_min", "smallest −mean Δ of a sequence", lambda ends: -ends("g")[1], "nats", _S),
    Formula("log_ratio_min", "smallest Δ", lambda ends: ends("d")[0], "nats"),
    Formula("log_ratio_max", "largest Δ", lambda ends: ends("d")[1], "nats"),
)
"""Formulas over the smallest and largest of a column of `ranges`, [2], without an interval."""
