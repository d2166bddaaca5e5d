"""Tokens in bins: the logarithmic lattice on which Δ is counted, and the bins that pictures are drawn from.

Bins are read off the bits of a float64, so binning is a shift and a look-up. Histograms merge by adding, and
do not grow with the dump. Tokens "in sync" are those of policy lag 0.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from offpol_diag.core.gap import Terms
from offpol_diag.core.places import LAG
from offpol_diag.core.state import Array, State
from offpol_diag.number import finite

# ---------------------------------------------------------------- the lattice

_LOW, _HIGH, _BITS = -40, 96, 5  # k3 of a log-ratio of 66 nats is 2^96
HALF = (_HIGH - _LOW) << _BITS
SIZE = 2 * HALF + 1
"""Bins, 32 to each power of two, for both signs: HALF negative ones, one around zero (|x| < 2^-40), HALF
positive ones; the outermost also hold all values beyond. Log-ratios span 1e-8 to 1e3, and bins of equal width
would lose one end.
"""
CODES = 1 << (12 + _BITS)
"""Combinations of sign, exponent and leading fraction bits; the sign is the highest bit."""
SHIFT = np.uint64(52 - _BITS)
"""Bits of a float64 below those."""


def code(x: Array) -> Array:
    """Return the leading bits of each value, as fine as the bins: float64 → int64 in [0, CODES)."""
    return (np.ascontiguousarray(x).view(np.uint64) >> SHIFT).view(np.int64)


def index(x: Array) -> Array:
    """Return the bin of each value: float64 → int64 in [0, SIZE)."""
    return _lattice().take(code(x), mode="clip")  # codes are in range: a quarter less time


@cache
def _lattice() -> Array:
    """Return the bin of each combination of leading bits."""
    around_zero = ((1023 + _LOW) << _BITS) - 1  # the largest combination of its bin, without sign
    step = np.clip(np.arange(CODES // 2) - around_zero, 0, HALF)
    return np.concatenate((HALF + step, HALF - step))


@cache
def edges() -> Array:
    """Return the SIZE + 1 edges of the bins, rising, float64."""
    up = np.append(
        2.0 ** np.arange(_LOW, _HIGH)[:, None] * (1 + np.arange(1 << _BITS) / (1 << _BITS)), 2.0**_HIGH
    )
    return np.concatenate((-up[::-1], up))


def quantile(counts: Array, low: Array, high: Array, q: float) -> float | None:
    """Compute a quantile of binned values, linear within a bin [low, high]; None without values.

    Args:
        counts: of each bin, [N].
        low: the lower end of each bin, rising, [N].
        high: its upper end; of an open bin, inf, the lower end stands for all values.
        q: from 0 to 1.
    """
    total, below = float(counts.sum()), np.cumsum(counts)
    if not total:
        return None
    wanted = max(q, 1e-12) * total  # q = 0: the first bin that holds anything
    at = int(np.searchsorted(below, wanted))
    share = (wanted - float(below[at] - counts[at])) / float(counts[at])
    a, b = float(low[at]), float(high[at])
    return a if math.isinf(b) else a + (b - a) * min(max(share, 0.0), 1.0)


def of_lattice(counts: Array, q: float) -> float:
    """Compute a quantile of values on the lattice: to 1/32; NaN without values."""
    return math.nan if (x := quantile(counts, edges()[:-1], edges()[1:], q)) is None else x


# ---------------------------------------------------------------- bins of pictures

BINS, LOGITS = 55, (-14.0, 14.0)
"""Bins of a probability in the density, the outer two open; logits of the outermost edges between them."""
NOISE_EDGES = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.997, 0.999, 0.9997, 0.9999)
"""Probabilities at which tokens are divided for the quantiles of |Δ|."""
OCTAVES, PER_OCTAVE = (-24, 7), 16
SIZES = (OCTAVES[1] - OCTAVES[0]) * PER_OCTAVE + 2
"""Bins of |Δ|, relative width 1/16 between 2^-24 and 2^7; one below, one above."""
THRESHOLDS = (
    *(1.1, 1.2, 1.3, 1.5, 1.7, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0, 30.0, 50.0, 70.0, 100.0),
    *(200.0, 500.0, 1000.0),
)
"""Thresholds b of rules on tokens."""
FAR = math.log(THRESHOLDS[0])
"""|Δ| up to which tokens are between the smallest thresholds."""
EDGES = np.concatenate((-np.log(THRESHOLDS[::-1]), np.log(THRESHOLDS)))
"""Logarithms of 1/b and b, rising."""
LIKELY, UNLIKELY = 0.9, 0.5
"""A token is lost if the rollout gives it more than the first and the trainer less than the second."""
LENGTHS = np.ceil(2 ** (np.arange(257) / 8) - 1e-9)
"""Lengths at which bins begin, eight to an octave: those below 12 have bins of their own."""


def _on_lattice(log: float) -> float:
    """Round a log-prob to the nearer end of its code, by at most 1.6% of it."""
    ends = ((np.float64(log).view(np.uint64) >> SHIFT) + np.arange(2, dtype=np.uint64)) << SHIFT
    return float(ends.view(np.float64)[np.abs(ends.view(np.float64) - log).argmin()])


DENSITY_LOGS = tuple(_on_lattice(-math.log1p(math.exp(-x))) for x in np.linspace(*LOGITS, BINS - 1).tolist())
NOISE_LOGS = tuple(_on_lattice(math.log(q)) for q in NOISE_EDGES)
"""Log-probs between bins, rising; a bin holds its upper edge."""


@cache
def _bins() -> tuple[Array, ...]:
    """Return the bin of each code of a float64: rollout and trainer bin of the density, noise, |Δ|; int16."""
    codes = np.arange(CODES, dtype=np.uint64) << SHIFT
    logs = np.nan_to_num(codes.view(np.float64), nan=0.0)
    density, noise = (np.searchsorted(logs_of, logs, side="left") for logs_of in (DENSITY_LOGS, NOISE_LOGS))
    size = (np.arange(CODES // 2) >> 1) - (1023 + OCTAVES[0]) * PER_OCTAVE + 1
    sizes = np.tile(np.clip(size, 0, SIZES - 1), 2)
    return tuple(x.astype(np.int16) for x in (density * BINS, density, noise * SIZES, sizes))


def observe(terms: Terms) -> State:
    """Count the tokens of a batch, of the main drift.

    Returns:
        density: by rollout and trainer bin, [BINS²]; noise: without and with lag 0, by rollout probability
        and |Δ|, [2 · Q · SIZES]; in_sync: Δ on the lattice; between: tokens, Σ(r − 1) and Σ(r − 1)² between
        `EDGES`, [3, E+1]; lost: tokens and ΣK3 of those that only the rollout holds likely, [2]; lengths:
        sequences with a token.
    """
    first, second, noise, sizes = _bins()
    of_q, many, batch = code(terms.log_rollout), (len(NOISE_EDGES) + 1) * SIZES, terms.tokens.batch
    both, size = first[of_q] + second[code(terms.log_train)], noise[of_q] + sizes[code(terms.abs_log_ratio)]
    lags, in_sync = batch.scalars.get(LAG, ()), np.zeros(SIZE)
    if any(lag == 0 for lag in lags):
        synced = np.repeat(np.array([lag == 0 for lag in lags], np.int16), batch.lengths)
        size += synced * np.int16(many)
        in_sync += np.bincount(index(terms.log_ratio), synced, SIZE)

    far, at = np.flatnonzero(terms.abs_log_ratio > FAR), np.full(batch.tokens, len(THRESHOLDS))
    at[far] = np.searchsorted(EDGES, terms.log_ratio[far], side="right")
    r1 = terms.ratio_minus_1
    between = np.stack([np.bincount(at, x, len(EDGES) + 1) for x in (None, r1, r1 * r1)])
    lost = (terms.log_rollout > math.log(LIKELY)) & (terms.log_train < math.log(UNLIKELY))
    lengths = batch.lengths[batch.lengths > 0]
    counts = {
        "density": np.bincount(both, minlength=BINS**2),
        "noise": np.bincount(size, minlength=2 * many),
        "in_sync": in_sync,
        "between": between,
        "lost": np.array([lost.sum(), terms.k3[lost].sum()]),
        "lengths": np.bincount((8 * np.log2(lengths)).astype(np.int64), minlength=len(LENGTHS) - 1),
    }
    return State(counts={name: x.astype(np.float64) for name, x in counts.items()})


# ---------------------------------------------------------------- reading

EQUAL = 81
"""About equally wide bins of Δ."""
GROWTH = 1.25
"""Factor by which each bin beyond the equal ones is wider than the one before it."""


def log_ratios(
    counts: Array, ends: tuple[float, float], synced: Array
) -> list[tuple[float, float, int, int]]:
    """Count Δ in whole tokens, in bins that reach from the smallest Δ to the largest, `ends`.

    Bins are about equally wide within the 0.01% and 99.99% quantiles, and grow by a quarter each beyond;
    their edges are edges of the lattice that Δ was counted on, so that no count is interpolated. `synced` are
    counts of lag 0.
    """
    if not counts.any():
        return []
    low, high = map(finite, ends)
    reach = max(abs(of_lattice(counts, q)) for q in (1e-4, 1 - 1e-4)) or 1e-6
    outer = [reach]
    while outer[-1] < max(-low, high, reach):
        outer.append(outer[-1] * GROWTH)
    beyond, fine = np.array(outer[1:]), edges()
    wanted = np.concatenate((-beyond[::-1], np.linspace(-reach, reach, EQUAL + 1), beyond))
    at, occupied = np.unique(np.searchsorted(fine, wanted)), np.flatnonzero(counts)
    inner = at[(at > occupied[0]) & (at < occupied[-1] + 1)]
    ends = (low, high) if low < high else (float(fine[occupied[0]]), float(fine[occupied[-1] + 1]))

    def between(x: Array) -> list[int]:
        below = np.concatenate(([0.0], np.cumsum(x)))
        return [round(count) for count in np.diff(below[[0, *inner, SIZE]]).tolist()]

    bins = pairwise([ends[0], *fine[inner].tolist(), ends[1]])
    return [(*one, *many) for one, *many in zip(bins, between(counts), between(synced), strict=True)]


def density(counts: Array) -> tuple[list[float], list[list[int]]]:
    """Read how many tokens have which probability under both policies."""
    both = counts.astype(np.int64).reshape(BINS, BINS).tolist()
    return [0.0, *map(math.exp, DENSITY_LOGS), 1.0], both


def noise(counts: Array) -> list[tuple[Any, ...]]:
    """Read quantiles of |Δ| by rollout probability: rows of `Charts.noise`."""
    out, synced = counts.reshape(2, -1, SIZES)
    inner = 2.0 ** np.arange(*OCTAVES)[:, None] * (1 + np.arange(PER_OCTAVE) / PER_OCTAVE)
    ends = np.array([0.0, *inner.flatten(), 2.0 ** OCTAVES[1], math.inf])

    def quantiles(rows: Array, q: float) -> list[Any]:
        return [quantile(row, ends[:-1], ends[1:], q) for row in rows]

    bins = pairwise([0.0, *map(math.exp, NOISE_LOGS), 1.0])
    columns = [quantiles(out + synced, q) for q in (0.5, 0.9, 0.99)]
    columns += [[round(n) for n in synced.sum(1).tolist()], quantiles(synced, 0.9)]
    return [(*one, *rest) for one, *rest in zip(bins, *columns, strict=True)]


def token_thresholds(between: Array) -> list[tuple[float, float | None, float, float]]:
    """Read off sums between `EDGES` each threshold b, ESS of min(r, b), and what b truncates and keeps."""
    tokens, r1, r11 = between
    b, many, n = np.array(THRESHOLDS), len(THRESHOLDS), tokens.sum()
    below = np.cumsum(np.stack((tokens, tokens + r1, tokens + 2 * r1 + r11)), axis=1)
    of_b, of_1_over_b = below[:, many:-1], below[0, :many][::-1]
    above = n - of_b[0]
    w, ww = of_b[1] + above * b, of_b[2] + above * b * b
    ess = [share(x, n * xx) for x, xx in zip((w * w).tolist(), ww.tolist(), strict=True)]
    kept = ((of_b[0] - of_1_over_b) / n).tolist()
    return [*zip(THRESHOLDS, ess, (above / n).tolist(), kept, strict=True)]


def share(part: float, whole: float) -> float | None:
    """Return a part of a whole as a share; None where it is not finite."""
    return part / whole if whole and math.isfinite(part / whole) else None


def median_length(counts: Array) -> int | None:
    """Read the median length of a response, to 9%."""
    ends = [max(first, after - 1) for first, after in pairwise(LENGTHS.tolist())]
    found = quantile(counts, LENGTHS[:-1], np.array(ends), 0.5)
    return None if found is None else round(found)
