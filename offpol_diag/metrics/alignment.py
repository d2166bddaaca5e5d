"""How well the policy gradient that a correction induces would point, estimated from sums over folds."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from offpol_diag.metrics.coordinates import BUCKETS, FOLDS, fold
from offpol_diag.metrics.folds import Folds, sums

__all__ = [
    "BUCKETS",
    "FOLDS",
    "Estimate",
    "Folds",
    "Share",
    "estimates",
    "fold",
    "moved",
    "sums",
    "systematic",
]

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Estimate:
    """One correction beside the reference, at some number of sequences in a trainer's batch.

    Attributes:
        kept: mean weight over all tokens: how much of the signal is left where weights tell nothing of it.
        noise: the variance of the gradient's stand-in over that of the reference.
        expected: log of the alignment over the reference's, if only `kept` and `noise` differ.
        measured: the same from the data, bias included; NaN where the signal drowns in noise.
        error: its standard error (jackknife over folds); inf where it is not known.
        distance: the variance of the difference to the reference's stand-in, over that of the reference.
        score: what is believed of it: see `estimates`.
    """

    kept: float
    noise: float
    expected: float
    measured: float
    error: float
    distance: float
    score: float


@dataclass(frozen=True)
class Share:
    """How much of the variance of r is the same for all tokens of a kind, and the standard error of that.

    Noise of the numerics differs from token to token, and weights made of it only add noise; what belongs to
    the kind of a token (staleness, a temperature, quantised weights) biases the gradient.
    """

    value: float
    error: float


def systematic(folds: Folds) -> Share:
    """Of the whole dump; NaN where r does not vary."""
    n = folds.sequences.cpu().numpy()
    variance = float(folds.spread / folds.tokens)
    with np.errstate(all="ignore"):
        off, there = (_Product.of(x, x, n) for x in folds.cells.cpu().numpy())
        value = float(np.float64(off.signal) / there.signal / variance)
        left = off.without / there.without / variance
        return Share(value, _jackknife(left, value))


MOVED, SHARED, SPREAD = 0.25, 0.1, 0.25
"""The bias that is expected of a correction for each unit of √distance: where the trainer has moved, for each
standard error of that beyond the first, up to `MOST` of them; for √ of the systematic share; and its standard
deviation. Tuned on those regimes of `benchmarks/advice` that are not held out.
"""
MOST = 3.0


def moved(folds: Folds) -> float:
    """How surely the trainer has moved along the gradient since the tokens were sampled.

    Σ A (r − 1) in its standard errors (over folds): what was rewarded has become likelier. 0 where that is
    not known.
    """
    n, sums_ = folds.sequences.cpu().numpy(), folds.moved.cpu().numpy()
    with np.errstate(all="ignore"):  # what overflows is not known
        spread = math.sqrt(float(np.square(sums_ - sums_.sum() / max(n.sum(), 1) * n).sum()))
    return float(sums_.sum() / spread) if 0 < spread < math.inf else 0.0


def estimates(folds: Folds, reference: str, batch: float) -> dict[str, Estimate]:
    """Every correction beside the reference.

    Alignment is E[ĝ·g] / (|g| √E|ĝ|²), what matters to an optimiser that rescales its steps. The variance is
    told precisely by a dump, the bias hardly. What is believed before it is measured grows with the distance
    from the reference, with how surely the trainer has moved and with what r has in common by kind; the
    measurement counts by its precision beside that (a normal prior). A ladder of estimators with falling bias
    and rising variance is that of Lepski and of SLOPE (Su, Srinath & Krishnamurthy 2020); their hard test
    lost to this mean (docs/advice.md).

    Args:
        folds: sums of the whole dump.
        reference: a correction whose bias is taken for none.
        batch: sequences in one update of the trainer.

    Returns:
        By name.
    """
    sums_, n = folds.sums.cpu().numpy(), folds.sequences.cpu().numpy()
    kept = (folds.weights / folds.tokens).tolist()
    base = sums_[folds.names.index(reference)]
    with np.errstate(all="ignore"):  # what overflows is unknown, and said to be
        cost = MOVED * min(max(moved(folds) - 1, 0.0), MOST) + SHARED * math.sqrt(_share(folds))
        found = {
            name: _estimate(_settled(sums_[at], base), base, n, kept[at], batch)
            for at, name in enumerate(folds.names)
        }
        return {name: replace(one, score=_believed(one, cost)) for name, one in found.items()}


ROUNDING = 1e-12
"""Of the largest sum: what two sums of the same may differ by; a GPU adds in another order each time."""


def _settled(mine: Array, base: Array) -> Array:
    """Sums of one correction; those of the reference where only rounding is between them."""
    return base if np.abs(mine - base).max() <= ROUNDING * np.abs(base).max() else mine


def _share(folds: Folds) -> float:
    """The systematic share, within [0, 1]; 0 where it is not known."""
    found = systematic(folds).value
    return min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0


def _believed(one: Estimate, cost: float) -> float:
    """Prior and measurement by their precisions; `cost` is the bias expected at a distance of 1."""
    prior = one.expected - cost * math.sqrt(max(one.distance, 0.0))
    variance = SPREAD**2 * one.distance
    if not (math.isfinite(one.error) and variance > 0):
        return prior
    return float(prior + (one.measured - prior) * variance / (variance + one.error**2))


def _estimate(mine: Array, base: Array, n: Array, kept: float, batch: float) -> Estimate:
    cross, own, other = _Product.of(mine, base, n), _Product.of(mine, mine, n), _Product.of(base, base, n)
    noise = own.noise / other.noise if other.noise > 0 else math.nan
    expected = _expected(kept, own.noise / batch, other, batch)
    measured = float(_log(cross.signal, own.signal, other.signal, own.noise / batch, other.noise / batch))
    left = _log(cross.without, own.without, other.without, own.noise / batch, other.noise / batch)
    error = _jackknife(left, measured)
    apart = _Product.of(mine - base, mine - base, n).noise / other.noise if other.noise > 0 else math.nan
    return Estimate(kept, noise, expected, measured, error, max(apart, 0.0), math.nan)


@dataclass(frozen=True)
class _Product:
    """The inner product of two mean vectors, by pairs of different folds.

    Attributes:
        signal: the product, for one sequence.
        noise: the covariance of two sequences' vectors, summed over coordinates.
        without: the signal when one fold is left out, [FOLDS].
    """

    signal: float
    noise: float
    without: Array

    @classmethod
    def of(cls, one: Array, two: Array, n: Array) -> _Product:
        """Of fold sums [FOLDS, BUCKETS] of n [FOLDS] sequences each."""
        a, b = one.sum(0), two.sum(0)
        same, total = np.einsum("fk,fk->f", one, two), n.sum()
        pairs = total**2 - (n**2).sum()
        signal = (a @ b - same.sum()) / pairs if pairs > 0 else math.nan
        noise = (same.sum() - (n**2).sum() * signal) / total if total > 0 else math.nan
        left = (a - one, b - two)
        rest = pairs - 2 * n * (total - n)
        without = np.einsum("fk,fk->f", *left) - (same.sum() - same)
        return cls(
            signal, noise, np.divide(without, rest, out=np.full_like(without, math.nan), where=rest > 0)
        )


def _expected(kept: float, noise: float, base: _Product, batch: float) -> float:
    """When the gradient is `kept` times that of the reference."""
    signal, floor = max(base.signal, 0.0), base.noise / batch
    return (
        float(_log(kept * signal, kept**2 * signal, signal, noise, floor))
        if signal > 0
        else _weak(kept, noise, floor)
    )


def _weak(kept: float, noise: float, floor: float) -> float:
    """The limit of no signal: only the noise tells."""
    return (
        math.log(kept) - 0.5 * math.log(noise / floor) if kept > 0 and noise > 0 and floor > 0 else math.nan
    )


def _log(cross: Array | float, own: Array | float, other: Array | float, noise: float, floor: float) -> Array:
    """log of ĝ's alignment with the reference's mean, over the reference's own; NaN where there is none."""
    with np.errstate(all="ignore"):
        square = np.maximum(own, np.square(cross) / other)  # what lies along the reference is at least there
        found = np.log(cross / np.asarray(other)) - 0.5 * np.log(square + noise) + 0.5 * np.log(other + floor)
        return np.where((np.asarray(cross) > 0) & (np.asarray(other) > 0), found, math.nan)


def _jackknife(left: Array, whole: float) -> float:
    if not (math.isfinite(whole) and np.isfinite(left).all()):
        return math.inf
    return float(np.sqrt((len(left) - 1) / len(left) * np.square(left - left.mean()).sum()))
