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
from offpol_diag.host import exp, expm1, here
from offpol_diag.metrics.formula import Formula, Lookup, mean, spread
from offpol_diag.metrics.interval import ABOVE_MINUS_ONE, ABOVE_ONE, CORRELATION, POSITIVE
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.terms import Terms
from offpol_diag.presets import Policy
from offpol_diag.ratios import OVERFLOW

FACTORS = (1.1, 2.0, 5.0, 10.0)
"""τ of F(τ) = P(|Δ| > ln τ)."""


@dataclass(frozen=True)
class Drift:
    """A pair of policies: π_train over π_rollout for drift 1, and so on."""

    prefix: str
    title: str
    denominator: Policy
    numerator: Policy

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


def terms(scene: Scene, drift: Drift) -> Terms | None:
    """What a drift makes of every token, shared by all who ask; None when a policy is missing."""
    return scene.once(("terms", drift.prefix), lambda: _terms(scene, drift))


def _terms(scene: Scene, drift: Drift) -> Terms | None:
    q, p = scene.batch.policy(drift.denominator), scene.batch.policy(drift.numerator)
    if p is None or q is None:
        return None
    delta = scene.ratios(drift.numerator).delta if drift.denominator == "rollout" else p - q
    return Terms(scene.batch, q, p, delta, lambda: _prob(scene, drift.denominator))


def _prob(scene: Scene, policy: Policy) -> Tensor:
    """The probability of every token under a policy, [T]."""
    log = scene.batch.policy(policy)
    assert log is not None
    return scene.once(("prob", policy), lambda: exp(log))


def columns(scene: Scene, drift: Drift) -> dict[str, Tensor]:
    """Per-sequence sums [S] of everything the formulas need, or nothing when a policy is missing."""
    return scene.once(("gap", drift.prefix), lambda: _columns(scene, drift))


def _columns(scene: Scene, drift: Drift) -> dict[str, Tensor]:
    found = terms(scene, drift)
    if found is None:
        return {}
    named = _token_sums(found) | _probabilities(scene, found, drift) | _sequence_values(scene, found, drift)
    return {drift.prefix + name: values for name, values in named.items()}


def _token_sums(terms: Terms) -> dict[str, Tensor]:
    """Sums of Δ, r and their kin; Σ(r² − 1) is Σ(r − 1)² + 2Σ(r − 1)."""
    offsets = terms.batch.cu_seqlens
    summed: dict[str, Callable[[], Tensor]] = {
        "dd": terms.delta.square,
        "abs": lambda: terms.size,
        "k3": lambda: terms.k3,
        "r1": lambda: terms.r1,
        "r11": terms.r1.square,
        "mult": lambda: expm1(terms.safe.abs()),
        "tv": terms.r1.abs,
    }
    found = {name: segments.total(make(), offsets) for name, make in summed.items()}
    found |= _counts(terms)
    r11, tv = found.pop("r11"), found.pop("tv")
    return found | {"d": terms.total, "r2": r11 + 2 * found["r1"], "tv": tv / 2}


def _counts(terms: Terms) -> dict[str, Tensor]:
    """Tokens beyond each bound; where the host can see at once that nothing is, nothing is counted."""
    offsets = terms.batch.cu_seqlens
    reach = float(terms.size.max()) if here(terms.size) and len(terms.size) else math.inf
    none = torch.zeros_like(terms.total)
    return {
        name: segments.count_above(terms.size, bound, offsets) if reach > bound else none
        for name, bound in _BEYOND.items()
    }


_BEYOND = {"overflow": OVERFLOW, **{factor_name(tau): math.log(tau) for tau in FACTORS}}
"""Column → the |Δ| beyond which it counts tokens."""


def _probabilities(scene: Scene, terms: Terms, drift: Drift) -> dict[str, Tensor]:
    """Sums of the probabilities q and p, their products and their differences."""
    offsets = terms.batch.cu_seqlens
    (q, qq), (p, pp) = (_prob_sums(scene, policy) for policy in (drift.denominator, drift.numerator))
    both = _prob(scene, drift.numerator) * _prob(scene, drift.denominator)
    products = {"pd": terms.pd, "pdd": terms.diff.square(), "pq": both}
    sums = {name: segments.total(x, offsets) for name, x in products.items()}
    return {"q": q, "p": p, "qq": qq, "pp": pp} | sums


def _prob_sums(scene: Scene, policy: Policy) -> tuple[Tensor, Tensor]:
    prob, offsets = _prob(scene, policy), scene.batch.cu_seqlens
    return scene.once(
        ("prob sums", policy),
        lambda: (segments.total(prob, offsets), segments.total(prob.square(), offsets)),
    )


def _sequence_values(scene: Scene, terms: Terms, drift: Drift) -> dict[str, Tensor]:
    """Values per sequence; an empty sequence has 0 everywhere."""
    there = scene.counts["sequences"]
    mean_q, mean_p = (_mean_log(scene, policy) for policy in (drift.denominator, drift.numerator))
    return {
        "g": terms.mean,
        "g_abs": terms.mean.abs(),
        "ppl_ratio": torch.expm1((-terms.mean).clamp(max=2 * OVERFLOW)),
        "s2": torch.expm1((2 * terms.total).clamp(max=2 * OVERFLOW)),
        "ppl_p": torch.exp((-mean_p).clamp(max=2 * OVERFLOW)) * there,
        "ppl_q": torch.exp((-mean_q).clamp(max=2 * OVERFLOW)) * there,
    }


def _mean_log(scene: Scene, policy: Policy) -> Tensor:
    log = scene.batch.policy(policy)
    assert log is not None
    return scene.once(("mean log", policy), lambda: segments.mean(log, scene.batch.cu_seqlens))


def ranges(scene: Scene, drift: Drift) -> dict[str, tuple[Tensor, Tensor]]:
    """Smallest and largest: Δ, |p − q|, mean Δ of a sequence, ΣΔ of a sequence."""
    return scene.once(("ranges", drift.prefix), lambda: _ranges(scene, drift))


def _ranges(scene: Scene, drift: Drift) -> dict[str, tuple[Tensor, Tensor]]:
    found = terms(scene, drift)
    if found is None:
        return {}
    there = scene.batch.lengths > 0
    spans = {
        "d": extremes(found.delta),
        "pd": extremes(found.pd),
        "g": extremes(found.mean, there),
        "s": extremes(found.total, there),
    }
    return {drift.prefix + name: span for name, span in spans.items()}


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
        lambda get: torch.exp(-get("d") / get("tokens")),
        POSITIVE,
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
)

CHI2_SEQUENCE = Formula(
    "chi2_sequence", "", _S, "mean over sequences of e^{2ΣΔ}, minus 1", mean("s2", _S), ABOVE_MINUS_ONE
)

Pick = Callable[[float, float], float]

EXTREMES: tuple[tuple[str, str, Pick, str, str, str], ...] = (
    ("prob_diff_max", "pd", lambda low, high: high, "", _T, "largest |π_train − π_rollout|"),
    ("log_ppl_diff_max", "g", lambda low, high: -low, "nats", _S, "largest −mean Δ of a sequence"),
    ("log_ppl_diff_min", "g", lambda low, high: -high, "nats", _S, "smallest −mean Δ of a sequence"),
    ("log_ratio_min", "d", lambda low, high: low, "nats", _T, "smallest Δ"),
    ("log_ratio_max", "d", lambda low, high: high, "nats", _T, "largest Δ"),
)
"""(name, range, what to take of (smallest, largest), unit, over, formula)."""
