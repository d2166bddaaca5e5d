"""The tails of the uncorrected importance ratios: Pareto k̂, effective sample size, largest shares, quantiles.

Pareto k̂ is the tail index of the largest weights: the larger, the heavier the tail. Above min(1 − 1/log10 n,
0.7) means of the weights (ESS, χ², E[r]) are unreliable at this sample size.

References: Vehtari, Simpson, Gelman, Yao, Gabry 2024, "Pareto smoothed importance sampling"; Zhang & Stephens
2009.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import CHI2_SEQUENCE, Drift, Terms
from offpol_diag.core.histograms import SIZE, edges, index, of_lattice
from offpol_diag.core.intervals import Formula, Reader, known
from offpol_diag.core.state import TAIL, Array, State, Table
from offpol_diag.number import OVERFLOWS, UNRELIABLE, Number, Numbers


def observe(terms: Terms, total: Array, buckets: Array) -> State:
    """Keep the tails of one drift: of tokens' Δ, and of ΣΔ of sequences (`total`, [S]).

    Returns:
        Histograms of Δ, and of k3 with its sums; the largest Δ and ΣΔ; log Σw and log Σw² of sequences.
    """
    prefix, at = terms.drift.prefix, index(terms.k3)
    bins = np.bincount(index(terms.log_ratio), minlength=SIZE)
    k3 = np.stack([np.bincount(at, x, SIZE).astype(np.float64) for x in (None, terms.k3)])
    lowest = SIZE - 1 - int(np.searchsorted(np.cumsum(bins[::-1]), TAIL))  # the bin of the last that is kept
    largest = terms.log_ratio[terms.log_ratio >= edges()[lowest]] if lowest > 0 else terms.log_ratio
    filled = total[terms.tokens.batch.lengths > 0]
    return State(
        tables={f"{prefix}products": Table.of(products(terms, total), buckets, kind="logs")},
        counts={f"{prefix}bins.log_ratio": bins.astype(np.float64), f"{prefix}bins.k3": k3},
        largest={f"{prefix}tail.tokens": largest, f"{prefix}tail.sequences": filled},
    )


def products(terms: Terms, total: Array) -> dict[str, Array]:
    """Return log w and log w² of sequences, w = e^{ΣΔ}, [S]; −inf of an empty one, which has no weight."""
    log_weight = np.where(terms.tokens.batch.lengths > 0, total, -np.inf)
    return {f"{terms.drift.prefix}w": log_weight, f"{terms.drift.prefix}ww": 2 * log_weight}


# ---------------------------------------------------------------- fit of a tail

SMALLEST_TAIL = 5
ROUNDING = 8 * np.finfo(np.float64).eps
"""Log-weights that differ by no more, relative to the larger of their size and 1, are taken as equal."""
TINY = 1e-200
"""θ in place of 0, where the distribution is exponential, and its scale −k/θ would be 0/0."""


def limit(n: int) -> float:
    """Return the k̂ above which estimates from n weights are unreliable."""
    return min(1 - 1 / math.log10(n), 0.7) if n > 10 else 0.0


class Fit(NamedTuple):
    """A generalised Pareto distribution fitted to the exceedances of the largest weights."""

    k: float  # its shape, k̂
    scale: float  # its scale, in units of the largest weight
    above: float  # the log-weight above which the tail begins
    logs: Array  # the M log-weights beyond it, rising, [M]


def fit(largest: Array, n: int) -> Fit | None:
    """Fit the largest M = min(n/5, 3√n) of n weights; None when the tail is constant or too short.

    Args:
        largest: log-weights, falling; M is smaller where there are too few.
        n: number of weights.
    """
    size = min(math.ceil(min(n / 5, 3 * math.sqrt(n))), len(largest) - 1)
    if size < SMALLEST_TAIL:
        return None
    logs, above = largest[:size][::-1], float(largest[size])
    # w − u as w (1 − u/w): the difference of weights that are nearly equal would lose its digits.
    beyond = np.exp(logs - largest[0]) * -np.expm1(above - logs)
    # One equal to the threshold, but for rounding, has no exceedance; the fit takes reciprocals.
    there = (logs - above > ROUNDING * max(abs(above), 1.0)) & (beyond > 1e-300)
    exceedances = beyond[there]
    if len(exceedances) < SMALLEST_TAIL or float(exceedances[-1]) <= 1e-12:
        return None
    k, scale = pareto(exceedances)
    return Fit(k, scale, above, logs[there]) if math.isfinite(k) and scale > 0 else None


def pareto(x: Array) -> tuple[float, float]:
    """Fit a generalised Pareto distribution to values above 0, rising: its shape k and its scale.

    θ = −k/scale is the mean of a grid weighted by the profile likelihood (Zhang & Stephens 2009); k is then
    drawn to ½ as by ten more values (Vehtari et al. 2024).
    """
    n = len(x)
    many, quartile = 30 + math.isqrt(n), x[(n - 2) // 4]
    grid = (1 - np.sqrt(many / (np.arange(many) + 0.5))) / (3 * quartile) + 1 / x[-1]
    grid[grid == 0] = TINY
    terms = np.multiply.outer(-grid, x)
    shapes = np.log1p(terms, out=terms).mean(axis=1)
    likelihood = n * (np.log(-grid / shapes) - shapes - 1)
    weights = np.exp(likelihood - likelihood.max())
    theta = np.sum(grid * weights) / np.sum(weights)
    k = np.log1p(-theta * x).mean()
    return float((n * k + 10 * 0.5) / (n + 10)), float(-k / theta)


# ---------------------------------------------------------------- metrics

QUANTILES = (0.001, 0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99, 0.999)

ESS_TOKENS = Formula(
    "ess_tokens",
    "(Σr)² / (n Σr²), raw token ratios",
    lambda get: (
        (get("tokens") + get("ratio_minus_1")) ** 2
        / (get("tokens") * (get("tokens") + get("ratio_sq_minus_1")))
    ),
    "fraction",
)
ESS_SEQUENCES = Formula(
    "ess_sequences",
    "(Σw)² / (n Σw²), w = e^{ΣΔ}, raw product ratios",
    lambda get: np.exp(2 * get("w") - get("ww")) / get("sequences"),  # which are log Σw and log Σw²
    "fraction",
    "sequences",
)
_KHAT = "generalised Pareto shape of the largest weights {}; unreliable above min(1 − 1/log10 n, 0.7)"
KHAT_TOKENS = Number(over="tokens", formula=_KHAT.format("r"))
KHAT_SEQUENCES = Number(over="sequences", formula=_KHAT.format("e^{ΣΔ}"))
_SHARES = {
    "max_weight_share": Number(unit="fraction", over="tokens", formula="max r / Σr"),
    "max_weight_share_sequences": Number(unit="fraction", over="sequences", formula="max w / Σw, w = e^{ΣΔ}"),
    "k3_top1_share": Number(
        unit="fraction", over="tokens", formula="Σk3 of the 1% of tokens with the largest k3, over Σk3"
    ),
}


def numbers(reader: Reader, state: State, drift: Drift) -> Numbers:
    """Read the uncorrected-ratio metrics of one drift, with a note where the tail makes them unreliable.

    Args:
        reader: sums of the dump.
        state: what was kept of it.
        drift: the drift.
    """
    prefix, tokens, sequences = drift.prefix, int(reader.sum("tokens")), int(reader.sum("sequences"))
    khat_t = _khat(state.top(f"{prefix}tail.tokens"), tokens, KHAT_TOKENS)
    khat_s = _khat(state.top(f"{prefix}tail.sequences"), sequences, KHAT_SEQUENCES)
    high, total = (state.ranges[prefix + name][1] for name in ("log_ratio", "sum_log_ratio"))
    ratios, bins = tokens + reader.sum(f"{prefix}ratio_minus_1"), state.counts[f"{prefix}bins.log_ratio"]
    shares = (
        math.exp(min(high, LARGEST)) / ratios if ratios > 0 else math.nan,
        math.exp(total - reader.sum(f"{prefix}w")) if sequences else math.nan,
        _top_share(*state.counts[f"{prefix}bins.k3"]),
    )
    result = {
        "ess_tokens": qualified(reader.number(ESS_TOKENS, prefix), khat_t, tokens),
        "ess_sequences": qualified(reader.number(ESS_SEQUENCES, prefix), khat_s, sequences),
        "chi2_sequence": qualified(_chi2_sequence(reader, prefix, total), khat_s, sequences),
        "khat_tokens": khat_t,
        "khat_sequences": khat_s,
    }
    result |= {name: known(_SHARES[name], x) for name, x in zip(_SHARES, shares, strict=True)}
    blank = Number(None, None, "nats", "tokens", "quantile of Δ, from a histogram of relative bin width 1/32")
    for q in QUANTILES:
        result[f"log_ratio_p{q * 100:g}".replace(".", "_")] = known(blank, of_lattice(bins, q))
    return result


def _khat(largest: Array, n: int, blank: Number) -> Number:
    fitted, good = fit(largest, n), limit(n)
    if fitted is None:
        return replace(blank, unknown="the tail is constant or too short to fit")
    note = f"above {good:.2f}: means of these weights cannot be trusted" if fitted.k > good else None
    return replace(blank, value=fitted.k, note=note)


HEAVY = UNRELIABLE + "k̂ = {khat:.2f} is above {limit:.2f}"
FEW_DECIDE = "a few tokens decide it: k̂ = {khat:.2f}"


def qualified(number: Number, khat: Number, n: int, note: str = HEAVY) -> Number:
    """Add a note to a mean over n weights where their tail is too heavy."""
    if khat.value is None or khat.value <= limit(n):
        return number
    return replace(number, note=note.format(khat=khat.value, limit=limit(n)))


def _chi2_sequence(reader: Reader, prefix: str, largest: float) -> Number:
    """Compute E[e^{2ΣΔ}] − 1: by expm1 where the `largest` ΣΔ does not overflow, else as a log10."""
    if largest <= LARGEST:
        return reader.number(CHI2_SEQUENCE, prefix)
    log10 = (reader.sum(f"{prefix}ww") - math.log(reader.sum("sequences"))) / math.log(10)
    if not math.isfinite(log10):
        return replace(CHI2_SEQUENCE.blank, unknown="overflows float64, and so does its log10")
    return replace(CHI2_SEQUENCE.blank, log10=log10, unknown=OVERFLOWS)


def _top_share(counts: Array, sums: Array) -> float:
    """Compute the share of Σk3 in the 1% of tokens with the largest k3; linear within a bin."""
    counts, sums = counts[::-1], sums[::-1]
    want = math.ceil(0.01 * float(counts.sum()))
    before = np.cumsum(counts) - counts
    taken = np.clip((want - before) / np.maximum(counts, 1), 0, 1)
    total = float(sums.sum())
    return float((sums * taken).sum()) / total if total > 0 else math.nan
