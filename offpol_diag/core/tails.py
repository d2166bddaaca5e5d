"""The tails of the uncorrected importance ratios: Pareto k̂, effective sample size, largest shares, quantiles.

Pareto k̂ is the tail index of the largest weights: the larger, the heavier the tail. Above min(1 − 1/log10 n,
0.7) means of the weights (ESS, χ², E[r]) are unreliable at this sample size.

Quantiles are read off a fixed logarithmic lattice, 32 bins to each power of two, for both signs: log-ratios
span 1e-8 to 1e3, and bins of equal width would lose one end. The bin of a float64 is read off its bits, so
binning is a shift, and histograms of two dumps merge by adding.

References: Vehtari, Simpson, Gelman, Yao, Gabry 2024, "Pareto smoothed importance sampling"; Zhang & Stephens
2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import CHI2_SEQUENCE, Drift, Terms
from offpol_diag.core.intervals import Formula, Reader, describe, plain
from offpol_diag.core.state import Array, State, Table, largest_of
from offpol_diag.number import OVERFLOWS, Number, Numbers

TAIL = 1 << 15
"""Largest values kept for a tail fit: enough for M = 3√n up to n = 1.2e8; beyond that a smaller tail is
fitted.
"""


def observe(terms: Terms, total: Array, buckets: Array) -> State:
    """Keep the tails of one drift: of tokens' Δ, and of ΣΔ of sequences (`total`, [S]).

    Returns:
        Histograms of Δ, and of k3 with its sums; the largest Δ and ΣΔ; log Σw and log Σw² of sequences.
    """
    prefix, at = terms.drift.prefix, index(terms.k3)
    k3 = np.stack([np.bincount(at, x, SIZE) for x in (None, terms.k3)])
    logs = np.where(terms.batch.lengths > 0, total, -np.inf)
    return State(
        tables={f"{prefix}products": Table.of({"w": logs, "ww": 2 * logs}, buckets, kind="logs")},
        counts={
            f"{prefix}bins.d": np.bincount(index(terms.delta), minlength=SIZE).astype(np.float64),
            f"{prefix}bins.k3": k3.astype(np.float64),
        },
        largest={
            f"{prefix}tail.tokens": largest_of(terms.delta, TAIL),
            f"{prefix}tail.sequences": largest_of(logs, TAIL),
        },
    )


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
    """A generalised Pareto distribution fitted to the exceedances of the largest weights.

    Attributes:
        k: its shape, k̂.
        scale: its scale, in units of the largest weight.
        above: the log-weight above which the tail begins.
        logs: the M log-weights beyond it, rising, [M].
    """

    k: float
    scale: float
    above: float
    logs: Array


def fit(largest: Array, n: int) -> Fit | None:
    """Fit the largest M = min(n/5, 3√n) of n weights; None when the tail is constant or too short.

    Args:
        largest: log-weights, falling, of which −inf is none; M is smaller where there are too few.
        n: number of weights.
    """
    top = largest[largest > -math.inf]
    size = min(math.ceil(min(n / 5, 3 * math.sqrt(n))), len(top) - 1)
    if size < SMALLEST_TAIL:
        return None
    logs, above = top[:size][::-1], float(top[size])
    # w − u as w (1 − u/w): the difference of weights that are nearly equal would lose its digits.
    beyond = np.exp(logs - top[0]) * -np.expm1(above - logs)
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
    "fraction",
    "tokens",
    "(Σr)² / (n Σr²), raw token ratios",
    lambda get: (get("tokens") + get("r1")) ** 2 / (get("tokens") * (get("tokens") + get("r2"))),
)
ESS_SEQUENCES = Formula(
    "ess_sequences",
    "fraction",
    "sequences",
    "(Σw)² / (n Σw²), w = e^{ΣΔ}, raw product ratios",
    lambda get: np.exp(2 * get("w") - get("ww")) / get("sequences"),
)
"""w and ww are log Σw and log Σw²."""


def numbers(reader: Reader, state: State, drift: Drift, seed: int) -> Numbers:
    """Read the uncorrected-ratio metrics of one drift, with a note where the tail makes them unreliable.

    Args:
        reader: sums of the dump.
        state: what was kept of it.
        drift: the drift.
        seed: of the replicates.
    """
    prefix, largest = drift.prefix, state.largest
    tokens, sequences = (float(reader.drawn[name][0]) for name in ("tokens", "sequences"))
    khat_t = _khat(largest[f"{prefix}tail.tokens"], int(tokens), "tokens", "r")
    khat_s = _khat(largest[f"{prefix}tail.sequences"], int(sequences), "sequences", "e^{ΣΔ}")
    high, total = (state.ranges[prefix + name][1] for name in ("d", "s"))
    logs = state.tables[f"{prefix}products"].drawn(seed)
    ratios = tokens + float(reader.column("r1", prefix)[0])
    ess = ESS_SEQUENCES.of({**reader.drawn, **logs}.__getitem__)
    # max r / Σr, and of sequences
    share = math.exp(min(high, LARGEST)) / ratios if ratios > 0 else math.nan
    of_sequence = math.exp(total - float(logs["w"][0])) if sequences else math.nan
    top = _top_share(*state.counts[f"{prefix}bins.k3"])
    result = {
        "ess_tokens": doubt(reader.number(ESS_TOKENS, prefix), khat_t),
        "ess_sequences": doubt(reader.wrap(ess, ESS_SEQUENCES), khat_s),
        "chi2_sequence": doubt(chi2_sequence(reader, logs, drift, total), khat_s),
        "khat_tokens": khat_t,
        "khat_sequences": khat_s,
        "max_weight_share": plain(share, "fraction", "tokens", "max r / Σr"),
        "max_weight_share_sequences": plain(of_sequence, "fraction", "sequences", "max w / Σw, w = e^{ΣΔ}"),
        "k3_top1_share": plain(
            top, "fraction", "tokens", "Σk3 of the 1% of tokens with the largest k3, over Σk3"
        ),
    }
    for q in QUANTILES:
        value = quantile(state.counts[f"{prefix}bins.d"], q)
        text = "quantile of Δ, from a histogram of relative bin width 1/32"
        result[f"log_ratio_p{q * 100:g}".replace(".", "_")] = plain(value, "nats", "tokens", text)
    return {prefix + name: number for name, number in result.items()}


def _khat(largest: Array, n: int, over: str, weight: str) -> Number:
    text = (
        f"generalised Pareto shape of the largest weights {weight}; unreliable above min(1 − 1/log10 n, 0.7)"
    )
    fitted, good = fit(largest, n), limit(n)
    if fitted is None:
        return Number(over=over, formula=text, unknown="the tail is constant or too short to fit")
    note = f"above {good:.2f}: means of these weights cannot be trusted" if fitted.k > good else None
    return replace(plain(fitted.k, "", over, text), note=note)


def doubt(number: Number, khat: Number) -> Number:
    """Note that a mean of weights is unreliable where their tail is too heavy."""
    return _noted(number, khat, f"unreliable: k̂ = {{}} is {(khat.note or '').split(':')[0]}")


def caution(number: Number, khat: Number) -> Number:
    """Note that a few tokens dominate a mean, where the tail of the weights is too heavy."""
    return _noted(number, khat, "a few tokens decide it: k̂ = {}")


def _noted(number: Number, khat: Number, note: str) -> Number:
    return replace(number, note=note.format(f"{khat.value:.2f}")) if khat.note else number


def chi2_sequence(reader: Reader, logs: Mapping[str, Array], drift: Drift, largest: float) -> Number:
    """Compute E[e^{2ΣΔ}] − 1: by expm1 where the `largest` ΣΔ does not overflow, else as a log10."""
    row = CHI2_SEQUENCE
    if largest <= LARGEST:
        return reader.number(row, drift.prefix)
    log = float(logs["ww"][0]) - math.log(float(reader.drawn["sequences"][0]))
    log10, unknown = log / math.log(10), OVERFLOWS
    if not math.isfinite(log10):
        log10, unknown = None, "overflows float64, and so does its log10"  # type: ignore[assignment]
    return replace(describe(row), log10=log10, unknown=unknown)


def _top_share(counts: Array, sums: Array) -> float:
    """Compute the share of Σk3 in the 1% of tokens with the largest k3; linear within a bin."""
    counts, sums = counts[::-1], sums[::-1]
    want = math.ceil(0.01 * float(counts.sum()))
    before = np.cumsum(counts) - counts
    taken = np.clip((want - before) / np.maximum(counts, 1), 0, 1)
    total = float(sums.sum())
    return float((sums * taken).sum()) / total if total > 0 else math.nan


# ---------------------------------------------------------------- the logarithmic lattice

_LOW, _HIGH, _PER_OCTAVE_BITS = -40, 96, 5  # k3 of a log-ratio of 66 nats is 2^96
_PER_OCTAVE = 1 << _PER_OCTAVE_BITS
HALF = (_HIGH - _LOW) * _PER_OCTAVE
SIZE = 2 * HALF + 1
"""Number of bins: HALF negative ones, one around zero (|x| < 2^-40), HALF positive ones; the outermost also
hold all values beyond.
"""
CODES = 1 << (12 + _PER_OCTAVE_BITS)
"""Number of combinations of sign, exponent and leading fraction bits; the sign is the highest bit."""
SHIFT = 52 - _PER_OCTAVE_BITS
"""Bits of a float64 below those."""


def code(x: Array) -> Array:
    """Return the leading bits of each value, as fine as the bins: float64 → int64 in [0, CODES)."""
    return (np.ascontiguousarray(x).view(np.uint64) >> np.uint64(SHIFT)).view(np.int64)


def index(x: Array) -> Array:
    """Return the bin of each value: float64 → int64 in [0, SIZE)."""
    return _bins().take(code(x), mode="clip")  # codes are in range: a quarter less time


@cache
def _bins() -> Array:
    """Return the bin of each combination of leading bits."""
    around_zero = ((1023 + _LOW) << _PER_OCTAVE_BITS) - 1  # the largest combination of its bin, without sign
    step = np.clip(np.arange(CODES // 2) - around_zero, 0, HALF)
    return np.concatenate((HALF + step, HALF - step))


def edges() -> Array:
    """Return the SIZE + 1 edges of the bins, rising, float64."""
    octave = np.arange(_LOW, _HIGH)[:, None]
    up = np.append(2.0**octave * (1 + np.arange(_PER_OCTAVE) / _PER_OCTAVE), 2.0**_HIGH)
    return np.concatenate((-up[::-1], up))


def quantile(counts: Array, q: float) -> float:
    """Compute the q-quantile, linear within a bin (relative error at most 1/32); NaN without values."""
    total = float(counts.sum())
    if total == 0:
        return float("nan")
    below = np.cumsum(counts)
    wanted = max(q, 1e-12) * total  # q = 0: the first bin that holds anything
    at = min(int(np.searchsorted(below, wanted)), SIZE - 1)
    low, high = edges()[at : at + 2].tolist()
    inside = float(counts[at])
    share = (q * total - (float(below[at]) - inside)) / inside if inside else 0.5
    return float(low + (high - low) * min(max(share, 0.0), 1.0))
