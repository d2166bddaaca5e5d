"""The gap between two policies on the sampled tokens: k1, k2, k3, χ², perplexities, probability differences.

Sums are taken of quantities that vanish on-policy (expm1, not exp), so that nothing is lost to cancellation
when the drift is tiny.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.accumulators import extremes
from offpol_diag.batch import Batch
from offpol_diag.metrics.formula import Formula, Lookup, mean, spread
from offpol_diag.ratios import OVERFLOW

FACTORS = (1.1, 2.0, 5.0, 10.0)
"""τ of F(τ) = P(|Δ| > ln τ)."""


@dataclass(frozen=True)
class Drift:
    """A pair of policies: π_train over π_rollout for drift 1, and so on."""

    prefix: str
    title: str
    denominator: str
    numerator: str

    @property
    def columns(self) -> tuple[str, str]:
        """The dump columns it needs."""
        return f"{self.denominator}_log_probs", f"{self.numerator}_log_probs"


DRIFTS = (
    Drift("", "drift 1: rollout → old", "rollout", "old"),
    Drift("drift2.", "drift 2: old → current", "old", "current"),
    Drift("total.", "total: rollout → current", "rollout", "current"),
)


def factor_name(tau: float) -> str:
    """f_2 for τ = 2, f_1_1 for τ = 1.1."""
    return "f_" + f"{tau:g}".replace(".", "_")


def columns(batch: Batch, drift: Drift) -> dict[str, Tensor]:
    """Per-sequence sums [S] of everything the formulas need, or nothing when a policy is missing."""
    q, p = batch.policy(drift.denominator), batch.policy(drift.numerator)
    if p is None or q is None:
        return {}
    found = _token_sums(q, p, batch.cu_seqlens) | _sequence_values(q, p, batch)
    return {drift.prefix + name: values for name, values in found.items()}


def _token_sums(q: Tensor, p: Tensor, offsets: Tensor) -> dict[str, Tensor]:
    d = p - q
    safe = d.clamp(-OVERFLOW, OVERFLOW)
    r1 = torch.expm1(safe)
    prob_q = torch.exp(q)
    diff = prob_q * r1
    prob_p = prob_q + diff
    terms: dict[str, Callable[[], Tensor]] = {
        "d": lambda: d,
        "dd": lambda: d.square(),
        "abs": lambda: d.abs(),
        "k3": lambda: r1 - d,
        "r1": lambda: r1,
        "r2": lambda: r1 * (r1 + 2),
        "mult": lambda: torch.expm1(safe.abs()),
        "tv": lambda: r1.abs() / 2,
        "pd": lambda: diff.abs(),
        "pdd": lambda: diff.square(),
        "p": lambda: prob_p,
        "q": lambda: prob_q,
        "pp": lambda: prob_p.square(),
        "qq": lambda: prob_q.square(),
        "pq": lambda: prob_p * prob_q,
        "overflow": lambda: (d.abs() > OVERFLOW).to(torch.float64),
        **{factor_name(tau): _beyond(d, tau) for tau in FACTORS},
    }
    return {name: segments.total(make(), offsets) for name, make in terms.items()}


def _beyond(d: Tensor, tau: float) -> Callable[[], Tensor]:
    return lambda: (d.abs() > math.log(tau)).to(torch.float64)


def _sequence_values(q: Tensor, p: Tensor, batch: Batch) -> dict[str, Tensor]:
    """Values per sequence; an empty sequence has 0 everywhere."""
    there = (batch.lengths > 0).to(torch.float64)
    mean_q, mean_p = segments.mean(q, batch.cu_seqlens), segments.mean(p, batch.cu_seqlens)
    gap = segments.mean(p - q, batch.cu_seqlens)
    total = segments.total(p - q, batch.cu_seqlens)
    return {
        "g": gap,
        "g_abs": gap.abs(),
        "ppl_ratio": torch.expm1((-gap).clamp(max=2 * OVERFLOW)),
        "s2": torch.expm1((2 * total).clamp(max=2 * OVERFLOW)),
        "ppl_p": torch.exp((-mean_p).clamp(max=2 * OVERFLOW)) * there,
        "ppl_q": torch.exp((-mean_q).clamp(max=2 * OVERFLOW)) * there,
    }


def ranges(batch: Batch, drift: Drift) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest and largest: Δ, |p − q|, mean Δ of a sequence, ΣΔ of a sequence."""
    q, p = batch.policy(drift.denominator), batch.policy(drift.numerator)
    if p is None or q is None:
        return {}
    there = batch.lengths > 0
    d = p - q
    found = {
        "d": d,
        "pd": (torch.exp(q) * torch.expm1(d.clamp(-OVERFLOW, OVERFLOW))).abs(),
        "g": segments.mean(d, batch.cu_seqlens)[there],
        "s": segments.total(d, batch.cu_seqlens)[there],
    }
    return {drift.prefix + name: extremes(values) for name, values in found.items()}


def _pearson(get: Lookup) -> Tensor:
    n = get("tokens")
    mean_p, mean_q = get("p") / n, get("q") / n
    cov = get("pq") / n - mean_p * mean_q
    var = (get("pp") / n - mean_p**2) * (get("qq") / n - mean_q**2)
    return torch.where(var > 0, cov / torch.sqrt(var.clamp(min=1e-300)), torch.nan)


_T, _S = "tokens", "sequences"

ROWS = (
    Formula(
        "k1", "nats", _T, "mean(−Δ); estimates KL(π_rollout‖π_train)", lambda get: -get("d") / get("tokens")
    ),
    Formula("k2", "nats", _T, "mean(Δ²/2)", lambda get: get("dd") / get("tokens") / 2),
    Formula(
        "k3", "nats", _T, "mean(e^Δ − 1 − Δ); estimates KL(π_rollout‖π_train), never negative", mean("k3")
    ),
    Formula(
        "mean_ratio",
        "",
        _T,
        "mean(r); 1 when tokens were drawn from the logged π_rollout",
        mean("r1", plus=1.0),
    ),
    Formula("chi2_token", "", _T, "mean(r²) − 1", mean("r2")),
    Formula("ppl_train", "", _S, "mean over sequences of exp(−mean log π_train)", mean("ppl_p", _S)),
    Formula("ppl_rollout", "", _S, "mean over sequences of exp(−mean log π_rollout)", mean("ppl_q", _S)),
    Formula("ppl_ratio", "", _S, "mean over sequences of exp(−mean Δ)", mean("ppl_ratio", _S, plus=1.0)),
    Formula(
        "ppl_ratio_pooled",
        "",
        _T,
        "exp(−mean Δ) over all tokens",
        lambda get: torch.exp(-get("d") / get("tokens")),
    ),
    Formula(
        "log_ppl_diff", "nats", _S, "mean over sequences of −mean Δ", lambda get: -get("g") / get("sequences")
    ),
    Formula("log_ppl_abs_diff", "nats", _S, "mean over sequences of |mean Δ|", mean("g_abs", _S)),
    Formula("prob_diff_mean", "", _T, "mean |π_train − π_rollout| of the sampled token", mean("pd")),
    Formula("prob_diff_std", "", _T, "standard deviation of |π_train − π_rollout|", spread("pd", "pdd", _T)),
    Formula("pearson", "", _T, "correlation of the two probabilities of the sampled token", _pearson),
    Formula("mult_prob_error", "", _T, "mean(e^|Δ|)", mean("mult", plus=1.0)),
    Formula("abs_log_ratio", "nats", _T, "mean |Δ|", mean("abs")),
    Formula("log_ratio_std", "nats", _T, "standard deviation of Δ", spread("d", "dd", _T)),
    Formula("tv", "", _T, "mean |r − 1| / 2; estimates the total variation distance", mean("tv")),
    *(
        Formula(factor_name(tau), "fraction", _T, f"P(|Δ| > ln {tau:g})", mean(factor_name(tau)))
        for tau in FACTORS
    ),
)

CHI2_SEQUENCE = Formula("chi2_sequence", "", _S, "mean over sequences of e^{2ΣΔ}, minus 1", mean("s2", _S))

Pick = Callable[[float, float], float]

EXTREMES: tuple[tuple[str, str, Pick, str, str, str], ...] = (
    ("prob_diff_max", "pd", lambda low, high: high, "", _T, "largest |π_train − π_rollout|"),
    ("log_ppl_diff_max", "g", lambda low, high: -low, "nats", _S, "largest −mean Δ of a sequence"),
    ("log_ppl_diff_min", "g", lambda low, high: -high, "nats", _S, "smallest −mean Δ of a sequence"),
    ("log_ratio_min", "d", lambda low, high: low, "nats", _T, "smallest Δ"),
    ("log_ratio_max", "d", lambda low, high: high, "nats", _T, "largest Δ"),
)
"""(name, range, what to take of (smallest, largest), unit, over, formula)."""
