"""Estimates of means over tokens, with errors over prompts; and how far two columns are related."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offpol_diag.core.intervals import quantile
from offpol_diag.diagnosis.rows import CAP, Flags, Floats, Rows

SURE = 5.0
"""Standard errors beyond which an identity counts as violated, with many groups: two-sided p = 6e-7."""


class Estimate(NamedTuple):
    """A mean, its standard error over groups, and the number of groups."""

    value: float
    error: float
    groups: int

    @classmethod
    def ratio(cls, above: NDArray[Any], below: NDArray[Any]) -> Estimate:
        """Estimate Σ above / Σ below over groups, [G] each; the error of a single group is infinite."""
        value, groups = float(above.sum() / below.sum()), len(above)
        if groups < 2:
            return cls(value, math.inf, groups)
        rest = np.square(above - value * below).sum()
        return cls(value, float(np.sqrt(rest * groups / (groups - 1)) / below.sum()), groups)

    @property
    def low(self) -> float:
        """Lower end of its 95% interval, by Student's t."""
        return self.value - self.error * float(quantile(max(self.groups - 1, 2)))

    @property
    def high(self) -> float:
        """Upper end of its 95% interval."""
        return 2 * self.value - self.low

    @property
    def text(self) -> str:
        """The mean and its interval in words."""
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"

    def off(self, target: float) -> int:
        """Return 1 if the mean is significantly above the target, −1 if below, else 0."""
        off = self.value - target
        return int(np.sign(off)) if abs(off) > bound(self.groups) * self.error else 0


def bound(groups: int) -> float:
    """Return the critical value, in standard errors over this many groups, at the significance of `SURE`.

    The tails are those of Student's t, by Wallace's normal approximation (1959).
    """
    freedom = max(groups - 1, 2)
    exponent = (SURE * (8 * freedom + 3) / (8 * freedom + 1)) ** 2 / freedom
    return math.sqrt(freedom * math.expm1(exponent))


def estimate(rows: Rows, x: NDArray[Any], among: Flags | None = None) -> Estimate:
    """Estimate the mean of x over tokens, all or flagged ones, [T] each, with an error over prompts."""
    kept = rows.every if among is None else among
    total, count = (np.bincount(rows.group, rows.sum(some)) for some in (np.where(kept, x, 0.0), kept))
    return Estimate.ratio(total[count > 0], count[count > 0])


def correlation(x: Floats, y: Floats) -> float:
    """Return the Pearson correlation of log-probs cut at −20; NaN for fewer than 3 values or a constant."""
    x, y = np.maximum(x, -20), np.maximum(y, -20)
    varies = len(x) > 2 and x.std() > 0 and y.std() > 0
    return float(np.corrcoef(x, y)[0, 1]) if varies else float("nan")


def against_chance(rows: Rows, first: int, last: int) -> float:
    """Return mean |p − q| of tokens [first, last) over that of all pairs (p, q) of them; 1: unrelated."""
    last = min(last, first + 256)
    p, q = rows.p[first:last], rows.q[first:last]
    pairs = np.minimum(np.abs(p[:, None] - q[None, :]), CAP).mean()
    return float(np.minimum(np.abs(p - q), CAP).mean() / pairs) if pairs > 0 else 0.0


def percent(share: float) -> str:
    """Format a share: 16%, 0.42%."""
    return f"{100 * share:.2g}%" if share < 0.995 else f"{100 * share:.3g}%"


FEWEST_KINDS, COVERED = 8, 0.2
"""Fewest groups, and smallest share of tokens in repeated kinds, for an estimate of what they share."""


def answered_again(rows: Rows) -> bool:
    """Return whether prompts have at least two responses on average."""
    return 2 * (int(rows.group.max()) + 1) <= rows.sequences


def common_share(rows: Rows) -> Estimate | None:
    """Estimate the share of the variance of min(r, 2) that is common to tokens of one kind.

    A kind is a pair of consecutive token ids, within one prompt if the dump has group_id. Rounding and
    different expert routing vary from token to token; other weights (stale, quantised) or another
    temperature shift every occurrence of a kind alike. Products of tokens of different responses cancel
    each token's own noise. None without token ids, or if kinds hardly repeat.
    """
    if rows.ids is None or rows.sequences < 2:
        return None
    ids, owner = np.unique(rows.ids, return_inverse=True)[1], rows.owner
    follows = (rows.index > 0) & (np.diff(rows.position, prepend=-1) == 1)
    key = (np.where(follows, np.roll(ids, 1), -1) + 1) * (int(ids.max()) + 1) + ids
    grouped = answered_again(rows)
    if grouped:
        key = np.unique(key, return_inverse=True)[1] * (int(rows.group.max()) + 1) + rows.group[owner]
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    r = np.expm1(np.clip(rows.delta, -20, np.log(2)))
    off = r - r.mean()
    # sums over pairs of tokens of one kind in different responses: all pairs less those within a response
    cells, cell = np.unique(kind * rows.sequences + owner, return_inverse=True)
    kind_of_cell = cells // rows.sequences
    total, pairs = (
        np.bincount(kind_of_cell, x) ** 2 - np.bincount(kind_of_cell, x**2)
        for x in (np.bincount(cell, off), np.bincount(cell, np.ones(rows.tokens)))
    )
    some, tokens = pairs > 0, np.bincount(kind)
    if not some.any() or tokens[some].sum() < COVERED * rows.tokens:
        return None
    group = rows.group[owner[first]][some] if grouped else np.arange(int(some.sum()))
    above = np.bincount(group, tokens[some] * total[some] / pairs[some])
    below = np.bincount(group, np.bincount(kind, off**2)[some])
    there = np.bincount(group) > 0
    if there.sum() < FEWEST_KINDS or not below.sum() > 0:
        return None
    return Estimate.ratio(above[there], below[there])
