"""The gap between two policies on the sampled tokens: K1, K2, K3, χ², perplexities, probability differences.

Sums are taken of quantities that vanish on-policy (expm1, not exp), so that nothing is lost to cancellation
when the drift is tiny.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.intervals import (
    ABOVE_MINUS_ONE,
    ABOVE_ONE,
    AS_SEEN,
    CORRELATION,
    POSITIVE,
    Formula,
    Lookup,
    mean,
    spread,
)
from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.terms import Drift, Terms, collected
from offpol_diag.presets import Policy

FACTORS = (1.1, 2.0, 5.0, 10.0)
"""τ of F(τ) = P(|Δ| > ln τ)."""


DRIFTS = (
    Drift("", "drift 1: rollout → old", "rollout", "old"),
    Drift("drift2.", "drift 2: old → current", "old", "current"),
    Drift("total.", "total: rollout → current", "rollout", "current"),
)


def factor_name(tau: float) -> str:
    """Return the name of F(τ): f_2 for τ = 2, f_1_1 for τ = 1.1."""
    return "f_" + f"{tau:g}".replace(".", "_")


class Gap:
    """Collect sums over every sequence, and extremes over all tokens."""

    def __init__(self, context: BatchContext, drift: Drift) -> None:
        self.parts: list[dict[str, Array]] = []
        self.spans: dict[str, list[tuple[float, float]]] = {"d": [], "pd": []}

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        self.parts.append(_token_sums(terms) | _probabilities(terms) | _surrogate(terms))
        for name, span in {"d": terms.span, "pd": segments.extremes(terms.pd)}.items():
            self.spans[name].append(span)

    @property
    def columns(self) -> dict[str, Array]:
        """Sums by name, [S] each; none when a policy is missing. Σ(r² − 1) is Σ(r − 1)² + 2Σ(r − 1)."""
        if not self.parts:
            return {}
        result = {name: np.concatenate([part[name] for part in self.parts]) for name in self.parts[0]}
        return result | {"r2": result.pop("r11") + 2 * result["r1"], "tv": result["tv"] / 2}

    @property
    def ranges(self) -> dict[str, tuple[float, float]]:
        """Smallest and largest value by name."""
        return {name: _widest(spans) for name, spans in self.spans.items() if spans}


def _widest(spans: Sequence[tuple[float, float]]) -> tuple[float, float]:
    low, high = np.array(spans).T
    return low.min(), high.max()


def columns(context: BatchContext, drift: Drift) -> dict[str, Array]:
    """Compute the per-sequence sums [S] that the formulas need; empty when a policy is missing."""
    return context.cached(("gap", drift.prefix), lambda: _columns(context, drift))


def _columns(context: BatchContext, drift: Drift) -> dict[str, Array]:
    named = collected(context, drift, Gap).columns
    return {
        drift.prefix + name: values
        for name, values in (named | _sequence_values(context, named, drift)).items()
    }


def _token_sums(terms: Terms) -> dict[str, Array]:
    """Compute sums of Δ, Δ², |Δ|, r and related terms."""
    names = {"d": "delta", "dd": "dd", "abs": "size", "r1": "r1", "r11": "r11", "k3": "k3", "mult": "mult"}
    return (
        {name: terms.sum(array) for name, array in names.items()} | {"tv": terms.sum("off")} | _counts(terms)
    )


def _counts(terms: Terms) -> dict[str, Array]:
    """Count the tokens of each sequence that differ, and beyond each bound: only |Δ| > `FAR` is looked at."""
    size, offsets = terms.size[terms.far], np.searchsorted(terms.far, terms.block.offsets)
    result = {"differ": segments.count(terms.delta != 0, terms.block.offsets)}
    return result | {name: segments.count(size > bound, offsets) for name, bound in _BEYOND.items()}


_BEYOND = {"overflow": LARGEST, **{factor_name(tau): math.log(tau) for tau in FACTORS}}
"""Column → the |Δ| above which it counts tokens."""


def _probabilities(terms: Terms) -> dict[str, Array]:
    """Compute sums of the probabilities q (denominator) and p (numerator), their products and differences."""
    (q, qq), (p, pp) = map(terms.block.prob_sums, (terms.denominator, terms.numerator))
    result = {name: terms.sum(name) for name in ("pd", "pdd", "pq")}
    return result | {"q": q, "qq": qq, "p": p, "pp": pp}


def _surrogate(terms: Terms) -> dict[str, Array]:
    """Compute sums of A, of min(r, 2) − 1 and of their product."""
    block, a = terms.block, terms.block.advantages
    if a is None:
        return {}
    x = np.minimum(terms.r1, 1.0, out=block.out(""))
    return {"a": block.sum(a), "x": block.sum(x), "ax": block.sum(np.multiply(a, x, out=x))}


def _sequence_values(context: BatchContext, sums: Mapping[str, Array], drift: Drift) -> dict[str, Array]:
    """Compute values per sequence; an empty sequence has 0 everywhere."""
    if not sums:
        return {}
    there, mean = context.counts["sequences"], _mean(context, sums["d"])
    mean_q, mean_p = (_mean_log(context, policy) for policy in (drift.denominator, drift.numerator))
    return {
        "g": mean,
        "g_abs": np.abs(mean),
        "ppl_ratio": np.expm1(np.minimum(-mean, 2 * LARGEST)),
        "s2": np.expm1(np.minimum(2 * sums["d"], 2 * LARGEST)),
        "ppl_p": np.exp(np.minimum(-mean_p, 2 * LARGEST)) * there,
        "ppl_q": np.exp(np.minimum(-mean_q, 2 * LARGEST)) * there,
    }


def _mean(context: BatchContext, total: Array) -> Array:
    return total / np.maximum(context.batch.lengths, 1)


def _mean_log(context: BatchContext, policy: Policy) -> Array:
    log = context.batch.policy(policy)
    assert log is not None
    return context.cached(("mean log", policy), lambda: segments.mean(log, context.batch.cu_seqlens))


def ranges(context: BatchContext, drift: Drift) -> dict[str, tuple[float, float]]:
    """Compute smallest and largest Δ, |p − q|, mean Δ of a sequence and ΣΔ of a sequence."""
    return context.cached(("ranges", drift.prefix), lambda: _ranges(context, drift))


def _ranges(context: BatchContext, drift: Drift) -> dict[str, tuple[float, float]]:
    result = columns(context, drift)
    if not result:
        return {}
    there, total = context.batch.lengths > 0, result[drift.prefix + "d"]
    spans = collected(context, drift, Gap).ranges | {
        "g": segments.extremes(_mean(context, total), there),
        "s": segments.extremes(total, there),
    }
    return {drift.prefix + name: span for name, span in spans.items()}


def _pearson(get: Lookup) -> Array:
    n = get("tokens")
    mean_p, mean_q = get("p") / n, get("q") / n
    cov = get("pq") / n - mean_p * mean_q
    var = (get("pp") / n - mean_p**2) * (get("qq") / n - mean_q**2)
    return np.where(var > 0, cov / np.sqrt(np.maximum(var, 1e-300)), np.nan)


def _k1(get: Lookup) -> Array:
    return -get("d") / get("tokens")


_T, _S = "tokens", "sequences"

DIFFER = Formula("tokens_differ", "fraction", _T, "P(Δ ≠ 0)", mean("differ"), counts=True)
"""Says whether two policies are one and the same, not by how much they differ."""

ROWS = (
    Formula("k1", "nats", _T, "mean(−Δ); estimates KL(π_rollout‖π_train)", _k1),
    Formula("k2", "nats", _T, "mean(Δ²/2)", lambda get: get("dd") / get("tokens") / 2, POSITIVE),
    Formula(
        "k3",
        "nats",
        _T,
        "mean(e^Δ − 1 − Δ); estimates KL(π_rollout‖π_train), never negative",
        mean("k3"),
        POSITIVE,
    ),
    Formula(
        "mean_ratio",
        "",
        _T,
        "mean(r); 1 when tokens were drawn from the logged π_rollout",
        mean("r1", plus=1.0),
        POSITIVE,
    ),
    Formula("chi2_token", "", _T, "mean(r²) − 1", mean("r2"), ABOVE_MINUS_ONE),
    Formula(
        "ppl_train", "", _S, "mean over sequences of exp(−mean log π_train)", mean("ppl_p", _S), POSITIVE
    ),
    Formula(
        "ppl_rollout", "", _S, "mean over sequences of exp(−mean log π_rollout)", mean("ppl_q", _S), POSITIVE
    ),
    Formula(
        "ppl_ratio", "", _S, "mean over sequences of exp(−mean Δ)", mean("ppl_ratio", _S, plus=1.0), POSITIVE
    ),
    Formula(
        "ppl_ratio_pooled",
        "",
        _T,
        "exp(−mean Δ) over all tokens",
        lambda get: np.exp(_k1(get)),
        POSITIVE,
        log=_k1,
    ),
    Formula(
        "log_ppl_diff", "nats", _S, "mean over sequences of −mean Δ", lambda get: -get("g") / get("sequences")
    ),
    Formula("log_ppl_abs_diff", "nats", _S, "mean over sequences of |mean Δ|", mean("g_abs", _S), POSITIVE),
    Formula(
        "prob_diff_mean", "", _T, "mean |π_train − π_rollout| of the sampled token", mean("pd"), POSITIVE
    ),
    Formula(
        "prob_diff_std",
        "",
        _T,
        "standard deviation of |π_train − π_rollout|",
        spread("pd", "pdd", _T),
        POSITIVE,
    ),
    Formula(
        "pearson", "", _T, "correlation of the two probabilities of the sampled token", _pearson, CORRELATION
    ),
    Formula("mult_prob_error", "", _T, "mean(e^|Δ|)", mean("mult", plus=1.0), ABOVE_ONE),
    Formula("abs_log_ratio", "nats", _T, "mean |Δ|", mean("abs"), POSITIVE),
    Formula("log_ratio_std", "nats", _T, "standard deviation of Δ", spread("d", "dd", _T), POSITIVE),
    Formula("tv", "", _T, "mean |r − 1| / 2; estimates the total variation distance", mean("tv"), POSITIVE),
    *(
        Formula(factor_name(tau), "fraction", _T, f"P(|Δ| > ln {tau:g})", mean(factor_name(tau)), counts=True)
        for tau in FACTORS
    ),
    DIFFER,
)

_SAMPLED_BEFORE = "Δ = log π_current − log π_old; tokens sampled from π_rollout, not π_old: {}"
SECOND_DRIFT = {
    "k1": "mean(−Δ), " + _SAMPLED_BEFORE.format("no KL; it adds up: k1 + drift2.k1 = total.k1"),
    "k2": "mean(Δ²/2), " + _SAMPLED_BEFORE.format("a size of the change, not a KL"),
    "k3": "mean(e^Δ − 1 − Δ), "
    + _SAMPLED_BEFORE.format("a size of the change, not a KL, and does not add up"),
    "mean_ratio": "mean(r), " + _SAMPLED_BEFORE.format("not 1 in general"),
    "chi2_token": "mean(r²) − 1, " + _SAMPLED_BEFORE.format("not a χ²-divergence, and may be negative"),
    "tv": "mean |r − 1| / 2, " + _SAMPLED_BEFORE.format("not a total variation distance"),
}
"""Formula texts for drift 2, whose denominator is not the policy that sampled the tokens."""

CHI2_SEQUENCE = Formula(
    "chi2_sequence", "", _S, "mean over sequences of e^{2ΣΔ}, minus 1", mean("s2", _S), ABOVE_MINUS_ONE
)

Pick = Callable[[float, float], float]

SURROGATE = Formula(
    "surrogate_gain",
    "",
    _T,
    "cov(A, min(r, 2)): how much likelier what was rewarded has become; 0 where π_train has not moved",
    lambda get: get("ax") / get("tokens") - (get("a") / get("tokens")) * (get("x") / get("tokens")),
)
"""PPO's surrogate objective less its value at r = 1, with r cut at 2 so that no single token decides."""

REWARD = Formula(
    "mean_reward", "", _S, "mean reward of the sequences with a token", mean("reward", _S), AS_SEEN
)
"""Of the dump, not of a gap."""


def rewards(context: BatchContext) -> dict[str, Array]:
    """Return the reward of each sequence with a token, else 0, [S]; nothing without rewards."""
    given = context.batch.rewards
    return {} if given is None else {"reward": given * context.counts["sequences"]}


EXTREMES: tuple[tuple[str, str, Pick, str, str, str], ...] = (
    ("prob_diff_max", "pd", lambda low, high: high, "", _T, "largest |π_train − π_rollout|"),
    ("log_ppl_diff_max", "g", lambda low, high: -low, "nats", _S, "largest −mean Δ of a sequence"),
    ("log_ppl_diff_min", "g", lambda low, high: -high, "nats", _S, "smallest −mean Δ of a sequence"),
    ("log_ratio_min", "d", lambda low, high: low, "nats", _T, "smallest Δ"),
    ("log_ratio_max", "d", lambda low, high: high, "nats", _T, "largest Δ"),
)
"""(name, range, function of (smallest, largest), unit, over, formula)."""
