"""Forecast of the share of sequences that a window on log r keeps at other response lengths.

The model: log r of a sequence, per token, has standard deviation √(a/L + b) at length L, since the noise of
single tokens averages out and what the tokens of a response share does not. a and b are fitted to the spread
at each length; the shape is the data's own, with all lengths scaled to unit spread. The standard error
combines a jackknife over sixteenths of the groups with the misfit of the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from offpol_diag.engine import bootstrap, segments
from offpol_diag.engine.segments import Array
from offpol_diag.engine.selection import length_bin

FOLDS, BINS, REACH = 16, 512, 4.0
LENGTHS = 128
"""Number of length bins, four to an octave."""
ENOUGH = 30
"""Fewest sequences of a length bin for its spread to be fitted."""
Window = tuple[float, float]


@dataclass(frozen=True)
class Scale:
    """The axis of log r per token: from `middle` − REACH·`half` to `middle` + REACH·`half`."""

    middle: float
    half: float

    @property
    def edges(self) -> Array:
        """The edges of the bins, [BINS + 1]."""
        return self.middle + self.half * np.linspace(-REACH, REACH, BINS + 1)


def spreads(x: Array, lengths: Array, key: Array, scale: Scale) -> dict[str, Array]:
    """Count sequences by fold, length and log r per token, [FOLDS, LENGTHS, BINS + 2]; sum 1/L by length.

    Args: log r per token, lengths and group keys of sequences, [S] each, and the axis.
    """
    at = np.searchsorted(scale.edges, x)
    bins = np.minimum(length_bin(lengths) // 2, LENGTHS - 1)
    code = ((bootstrap.mix(key) & (FOLDS - 1)) * LENGTHS + bins) * (BINS + 2) + at
    counts = segments.count_by(code, FOLDS * LENGTHS * (BINS + 2))
    inverse = segments.sum_by(bins, LENGTHS, 1 / lengths)
    return {"sweep.spreads": counts.reshape(FOLDS, LENGTHS, BINS + 2), "sweep.inverse": inverse}


@dataclass(frozen=True)
class Fit:
    """The fitted spread √(falling/L + staying) at length L, and the standardised distribution of log r.

    Attributes:
        middle: the median of log r per token.
        falling: a, nats² × tokens.
        staying: b, nats².
        low, high: ends of each non-empty bin, in units of the spread at its length, [K].
        weight: number of sequences in each bin, [K].
    """

    middle: float
    falling: float
    staying: float
    low: Array
    high: Array
    weight: Array

    def kept(self, length: float, window: Window) -> float:
        """Return the modelled share of sequences of a length whose log r per token lies in the window."""
        spread = math.sqrt(self.falling / length + self.staying) or 1e-300
        first, last = ((end - self.middle) / spread for end in window)
        inside = np.minimum(self.high, last) - np.maximum(self.low, first)
        width = np.maximum(self.high - self.low, 1e-300)
        return float(np.sum(np.clip(inside / width, 0, 1) * self.weight) / np.sum(self.weight))


def fit(counts: Array, inverse: Array, scale: Scale) -> Fit | None:
    """Fit to counts by length and log r [LENGTHS, BINS + 2] and the mean of 1/L in each length bin.

    Returns:
        The fit, or None if no length bin has `ENOUGH` sequences.
    """
    many, edges = counts.sum(axis=1), scale.edges
    usable = np.flatnonzero(many >= ENOUGH)
    if not len(usable):
        return None

    def quantiles(row: Array, *wanted: float) -> Array:  # linear within bins; beyond the axis, its ends
        upto = np.concatenate(([0.0], np.cumsum(row)))
        found: Array = np.interp(np.array(wanted) * upto[-1], upto, np.pad(edges, 1, mode="edge"))
        return found

    variance = np.array([(np.diff(quantiles(counts[at], 0.1587, 0.8413))[0] / 2) ** 2 for at in usable])
    falling, staying = _line(inverse[usable], variance, many[usable])
    middle = float(quantiles(counts.sum(axis=0), 0.5)[0])
    spread = np.sqrt(falling * inverse + staying)
    at, bins = np.nonzero((counts > 0) & (spread > 0)[:, None])
    ends = np.concatenate(([edges[0] - scale.half], edges, [edges[-1] + scale.half]))
    low, high = ((ends[bins + more] - middle) / spread[at] for more in (0, 1))
    return Fit(middle, falling, staying, low, high, counts[at, bins])


def _line(inverse: Array, variance: Array, many: Array) -> tuple[float, float]:
    """Fit variance = a/L + b, a, b ≥ 0, by weighted least squares; each has a relative error of √(2/n)."""
    fitted = np.maximum(np.average(variance, weights=many), 1e-300) * np.ones_like(variance)
    best = (0.0, float(fitted[0]))
    for _ in range(8):
        best = _weighted(inverse, variance, many / fitted**2)
        fitted = np.maximum(best[0] * inverse + best[1], 1e-300)
    return best


def _weighted(x: Array, y: Array, w: Array) -> tuple[float, float]:
    """Return the slope and intercept, neither negative, with the least weighted squared error."""
    mean_x, mean_y = np.average(x, weights=w), float(np.average(y, weights=w))
    options = [(float(np.sum(w * x * y) / np.sum(w * x * x)), 0.0), (0.0, mean_y)]
    spread = np.sum(w * (x - mean_x) ** 2)
    if spread > 0:
        slope = float(np.sum(w * (x - mean_x) * (y - mean_y)) / spread)
        options.append((slope, float(mean_y - slope * mean_x)))
    allowed = [one for one in options if min(one) >= 0]
    return min(allowed, key=lambda one: float(np.sum(w * (y - one[0] * x - one[1]) ** 2)))


class Forecast(NamedTuple):
    """The share kept at one length, its standard error, and the observed share near that length."""

    length: float
    kept: float
    error: float
    observed: float | None


@dataclass(frozen=True)
class Model:
    """The fit of a dump, and its jackknife fits, each without one sixteenth of the groups.

    Attributes:
        rows: counts of sequences by length and log r per token, [LENGTHS, BINS + 2].
        scale: the axis of log r.
        whole: the fit to all groups.
        without: the jackknife fits.
        product: whether windows are on the product of token ratios rather than on the geometric mean.
    """

    rows: Array
    scale: Scale
    whole: Fit
    without: tuple[Fit, ...]
    product: bool

    @classmethod
    def of(cls, sums: Mapping[str, Array], scale: Scale, product: bool) -> Model | None:
        """Fit the model to sums of `spreads`; None if there are too few sequences."""
        counts, lengths = sums["sweep.spreads"], sums["sweep.inverse"]
        rows = counts.sum(axis=0)
        many = rows.sum(axis=1)
        middles = 2.0 ** -((np.arange(LENGTHS) + 0.5) / 4)
        inverse = np.where(many > 0, lengths / np.maximum(many, 1), middles)
        whole = fit(rows, inverse, scale)
        folds = [fit(rows - one, inverse, scale) for one in counts if one.sum()]
        if whole is None:
            return None
        return cls(rows, scale, whole, tuple(one for one in folds if one is not None), product)

    def forecast(self, lengths: Sequence[float], window: Window) -> list[Forecast]:
        """Forecast the share kept at each length by a window on the log of the ratio."""
        miss, many = self._miss(window), len(self.without)
        found = []
        for length in lengths:
            ends = self._per_token(length, window)
            each = np.array([one.kept(length, ends) for one in self.without])
            variance = (many - 1) / many * np.sum((each - each.mean()) ** 2) if many > 1 else 0.0
            at = int(math.log2(max(length, 1.0)) * 4)
            near = self.rows[max(at - 1, 0) : at + 2].sum(axis=0)  # within a quarter octave or so
            seen = self._share(near, ends) if near.sum() >= ENOUGH else None
            error = math.sqrt(float(variance) + miss**2)
            found.append(Forecast(length, self.whole.kept(length, ends), error, seen))
        return found

    def seen(self) -> tuple[float, float]:
        """Return the shortest and the longest length of the dump, to a quarter octave."""
        at = np.flatnonzero(self.rows.sum(axis=1))
        return 2.0 ** (float(at[0]) / 4), 2.0 ** (float(at[-1] + 1) / 4)

    def _per_token(self, length: float, window: Window) -> Window:
        return (window[0] / length, window[1] / length) if self.product else window

    def _share(self, counts: Array, window: Window) -> float:
        """Return the share that a window keeps of sequences counted by log r per token."""
        below, within = np.interp(window, self.scale.edges, np.cumsum(counts)[:-1])
        return float((within - below) / counts.sum())

    def _miss(self, window: Window) -> float:
        """Return the root mean square misfit over lengths, beyond sampling noise, weighted by sequences."""
        many = self.rows.sum(axis=1)
        squares = weights = 0.0
        for at in np.flatnonzero(many >= ENOUGH):
            length = 2.0 ** ((at + 0.5) / 4)
            ends = self._per_token(length, window)
            seen = self._share(self.rows[at], ends)
            chance = max(seen * (1 - seen), 1 / many[at]) / many[at]
            squares += many[at] * ((self.whole.kept(length, ends) - seen) ** 2 - chance)
            weights += many[at]
        return math.sqrt(max(squares / weights, 0.0)) if weights else 0.0
