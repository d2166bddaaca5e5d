"""The tails of the uncorrected importance ratios: Pareto k̂, effective sample size, largest shares.

Pareto k̂ is the tail index of the largest weights: the larger, the heavier the tail. Above min(1 − 1/log10 n,
0.7) means of the weights (ESS, χ², E[r]) are unreliable at this sample size.

References: Vehtari, Simpson, Gelman, Yao, Gabry 2024, "Pareto smoothed importance sampling"; Zhang & Stephens
2009.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.intervals import Formula, Reader, plain
from offpol_diag.engine import gap, loglattice
from offpol_diag.engine.bootstrap import log_resampled
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.gap import CHI2_SEQUENCE
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Arrays, largest_of
from offpol_diag.engine.terms import Drift, Terms, collected
from offpol_diag.number import OVERFLOWS, Number, Numbers

TAIL = 1 << 15
"""Largest values kept for a tail fit: enough for M = 3√n up to n = 1.2e8; beyond that a smaller tail is
fitted.
"""


@dataclass(frozen=True)
class Tail:
    """The largest of n values.

    Attributes:
        n: how many values there were.
        kept: the largest of them, falling.
    """

    n: int
    kept: Array

    @classmethod
    def of(cls, x: Array) -> Tail:
        """Keep the largest values of a sample, [N]."""
        return cls(len(x), largest_of(x, min(TAIL, len(x))))

    @classmethod
    def read(cls, largest: Array, n: float) -> Tail:
        """Build from kept values, of which −inf is none."""
        return cls(int(n), largest[largest > -math.inf])


# ---------------------------------------------------------------- fit of a tail

SMALLEST_TAIL = 5
ROUNDING = 8 * np.finfo(np.float64).eps
"""Log-weights that differ by no more, relative to the larger of their size and 1, are taken as equal."""


def limit(n: int) -> float:
    """Return the k̂ above which estimates from n weights are unreliable."""
    return min(1 - 1 / math.log10(n), 0.7) if n > 10 else 0.0


@dataclass(frozen=True)
class Fit:
    """A generalised Pareto distribution fitted to the exceedances of the largest weights.

    Attributes:
        k: its shape; scale: its scale, in units of the largest weight.
        above: the log-weight above which the tail begins.
        logs: the M log-weights beyond it, rising, [M].
    """

    k: float
    scale: float
    above: float
    logs: Array


def khat(tail: Tail) -> float | None:
    """Return k̂ of the largest M = min(n/5, 3√n) weights; None when the tail is constant or too short.

    Beyond 1.2e8 weights M is capped by the tail that was kept.
    """
    fitted = fit(tail)
    return None if fitted is None else fitted.k


def fit(tail: Tail) -> Fit | None:
    """Fit the largest M = min(n/5, 3√n) weights; None when the tail is constant or too short."""
    top = tail.kept
    size = min(math.ceil(min(tail.n / 5, 3 * math.sqrt(tail.n))), len(top) - 1)
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
    if not math.isfinite(k) or not scale > 0:
        return None
    return Fit(k, scale, above, logs[there])


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


TINY = 1e-200
"""θ in place of 0, where the distribution is exponential, and its scale −k/θ would be 0/0."""


# ---------------------------------------------------------------- one batch


class Tails:
    """Collect histograms of Δ and of k3 over tokens."""

    def __init__(self, context: BatchContext, drift: Drift) -> None:
        self.tables = np.zeros((3, loglattice.CODES))

    def see(self, terms: Terms) -> None:
        """Add the next block."""
        counts, k3_counts, k3_sums = self.tables
        at = loglattice.code(terms.k3)
        np.add.at(counts, loglattice.code(terms.delta), 1.0)
        np.add.at(k3_counts, at, 1.0)
        np.add.at(k3_sums, at, terms.k3)


def arrays(context: BatchContext, drift: Drift) -> Arrays:
    """Compute histograms of Δ and k3, tails of tokens and sequences, log Σw and log Σw² of sequences."""
    columns, batch, prefix = gap.columns(context, drift), context.batch, drift.prefix
    if not columns:
        return Arrays()
    counts, *k3 = loglattice.folded(collected(context, drift, Tails).tables)
    total = np.where(batch.lengths > 0, columns[f"{prefix}d"], -np.inf)
    q, p = batch.policy(drift.denominator), batch.policy(drift.numerator)
    assert q is not None
    assert p is not None
    return Arrays(
        sums={f"{prefix}bins.d": counts, f"{prefix}bins.k3": np.stack(k3)},
        log_sums={f"{prefix}products": log_resampled(np.stack((total, 2 * total)), context.draws)},
        largest={
            f"{prefix}tail.tokens": largest_of(p - q, TAIL),
            f"{prefix}tail.sequences": largest_of(total, TAIL),
        },
    )


# ---------------------------------------------------------------- reading

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
    lambda get: get("ess"),
)


def numbers(reader: Reader, arrays: Arrays, drift: Drift, high: Mapping[str, float]) -> Numbers:
    """Read the uncorrected-ratio metrics of one drift, with a note where the tail makes them unreliable.

    Args:
        reader: sums of the dump.
        arrays: those of the dump, as `arrays` makes them.
        drift: the drift.
        high: largest Δ and ΣΔ by name.
    """
    prefix, tokens, sequences = drift.prefix, float(reader.drawn["tokens"][0]), "sequences"
    khat_t = _khat(Tail.read(arrays.largest[f"{prefix}tail.tokens"], tokens), "tokens", "r")
    many = float(reader.drawn["sequences"][0])
    khat_s = _khat(Tail.read(arrays.largest[f"{prefix}tail.sequences"], many), sequences, "e^{ΣΔ}")
    logs = arrays.log_sums[f"{prefix}products"]
    ratios, largest_product = tokens + float(reader.column("r1", prefix)[0]), high[f"{prefix}s"]
    largest = math.exp(min(high[f"{prefix}d"], LARGEST))
    top = _top_share(*arrays.sums[f"{prefix}bins.k3"])
    counts = arrays.sums[f"{prefix}bins.d"]
    text = "quantile of Δ, from a histogram of relative bin width 1/32"
    result = {
        "ess_tokens": doubt(reader.number(ESS_TOKENS, prefix), khat_t),
        "ess_sequences": doubt(reader.wrap(ess_of_sequences(reader, logs), ESS_SEQUENCES), khat_s),
        "chi2_sequence": doubt(chi2_sequence(reader, logs, drift, largest_product), khat_s),
        "khat_tokens": khat_t,
        "khat_sequences": khat_s,
        "max_weight_share": plain(
            largest / ratios if ratios > 0 else math.nan, "fraction", "tokens", "max r / Σr"
        ),
        "max_weight_share_sequences": plain(
            math.exp(largest_product - float(logs[0, 0])) if many else math.nan,
            "fraction",
            sequences,
            "max w / Σw, w = e^{ΣΔ}",
        ),
        "k3_top1_share": plain(
            top, "fraction", "tokens", "Σk3 of the 1% of tokens with the largest k3, over Σk3"
        ),
    }
    result |= {
        f"log_ratio_p{q * 100:g}".replace(".", "_"): plain(quantile, "nats", "tokens", text)
        for q, quantile in ((q, loglattice.quantile(counts, q)) for q in QUANTILES)
    }
    return {prefix + name: number for name, number in result.items()}


def _khat(tail: Tail, over: str, weight: str) -> Number:
    text = (
        f"generalised Pareto shape of the largest weights {weight}; unreliable above min(1 − 1/log10 n, 0.7)"
    )
    k, good = khat(tail), limit(tail.n)
    if k is None:
        return Number(over=over, formula=text, unknown="the tail is constant or too short to fit")
    note = f"above {good:.2f}: means of these weights cannot be trusted" if k > good else None
    return replace(plain(k, "", over, text), note=note)


def doubt(number: Number, khat: Number) -> Number:
    """Note that a mean of weights is unreliable where their tail is too heavy."""
    return _noted(number, khat, f"unreliable: k̂ = {{}} is {(khat.note or '').split(':')[0]}")


def caution(number: Number, khat: Number) -> Number:
    """Note that a few tokens dominate a mean, where the tail of the weights is too heavy."""
    return _noted(number, khat, "a few tokens decide it: k̂ = {}")


def _noted(number: Number, khat: Number, note: str) -> Number:
    if not khat.note:
        return number
    return replace(number, note=note.format(f"{khat.value:.2f}"))


def ess_of_sequences(reader: Reader, logs: Array) -> Array:
    """Compute (Σw)² / (n Σw²) of the dump and of each replicate, [1+B], from log Σw and log Σw², [2, 1+B]."""
    values: Array = np.exp(2 * logs[0] - logs[1]) / reader.drawn["sequences"]
    return values


def chi2_sequence(reader: Reader, logs: Array, drift: Drift, largest: float) -> Number:
    """Compute E[e^{2ΣΔ}] − 1: by expm1 where the `largest` ΣΔ does not overflow, else as a log10."""
    row = CHI2_SEQUENCE
    if largest <= LARGEST:
        return reader.number(row, drift.prefix)
    log = float(logs[1, 0]) - math.log(float(reader.drawn["sequences"][0]))
    log10, unknown = log / math.log(10), OVERFLOWS
    if not math.isfinite(log10):
        log10, unknown = None, "overflows float64, and so does its log10"  # type: ignore[assignment]
    return Number(unit=row.unit, over=row.over, formula=row.text, log10=log10, unknown=unknown)


def _top_share(counts: Array, sums: Array) -> float:
    """Compute the share of Σk3 in the 1% of tokens with the largest k3; linear within a bin."""
    counts, sums = counts[::-1], sums[::-1]
    want = math.ceil(0.01 * float(counts.sum()))
    before = np.cumsum(counts) - counts
    taken = np.clip((want - before) / np.maximum(counts, 1), 0, 1)
    total = float(sums.sum())
    return float((sums * taken).sum()) / total if total > 0 else math.nan
