"""Honest causes of a mismatch, with correctly logged numbers: staleness, precision, outliers.

A cause is named only where the dump records it (`policy_lag`, provenance) or where the mismatch has a shape
that nothing else has (`named`). All else is left to `candidates`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.floors import ceiling
from offpol_diag.diagnosis.laws import carried
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.recorded import FOUR_BITS, Recorded
from offpol_diag.diagnosis.rows import SURE, Estimate, Rows, answered_again
from offpol_diag.diagnosis.signatures import Found, percent
from offpol_diag.diagnosis.sync import Course, course, from_start, growth, split

ROUNDED = 0.04
"""Largest scale of Δ/(1 − π_rollout) that rounding may explain."""
NOISE, SYSTEMATIC, OTHER_STEP = 0.05, 0.15, 0.42
"""Systematic share of r: below the first, noise of single tokens; above the second, not rounding; above the
third, weights of another step are likelier than quantised ones."""
STALE = 0.16
"""Scale of Δ/(1 − π_rollout) above which weights of another step are likelier than quantised ones."""
OUTLYING = 0.08
"""Largest share of outliers that leaves the other tokens a body of their own."""
QUANTISED_K3 = 0.1
"""K3, nats, up to which quantised weights of 8 bits may be the whole cause: the published band above it is
severe. (In rollouts of 4 bits it reaches 0.13: `floors.ceiling` bounds it.)"""
JUMPED = 1.5
"""Factor below which a level does not grow after a jump."""
RISING = 2.5
"""Factor between K3 at the smallest lag and at larger ones from which K3 rises over the lag."""
GROWN = 4.0
"""Factor from which K3 grows over the steps."""


class Body(NamedTuple):
    """Robust statistics of |Δ|/(1 − π_rollout): noise of logits moves a log-prob by about noise × (1 − π).

    Attributes:
        scale: robust standard deviation (median of the absolute value / 0.6745).
        tail: share of tokens beyond 8 times the scale.
        share: share of ΣK3 (cut at 1 nat a token) that those tokens carry.
    """

    scale: float
    tail: float
    share: float


def body(rows: Rows) -> Body:
    """Compute the statistics over tokens with −8 < log π_rollout < −0.02; zeros for fewer than 30."""
    some = (rows.q < -0.02) & (rows.q > -8)
    if some.sum() < 30:
        return Body(0.0, 0.0, 0.0)
    scaled = np.abs(rows.delta[some]) / -np.expm1(rows.q[some])
    scale = float(np.median(scaled)) / 0.6745
    off = rows.k3_cut[some]
    far = scaled > 8 * scale
    return Body(scale, float(far.mean()), float(off[far].sum() / off.sum()) if off.sum() > 0 else 0.0)


# What is measured.


@dataclass(frozen=True)
class Seen:
    """All that decides between honest causes.

    Attributes:
        rows: the tokens, with all faults repaired.
        recorded: what the metadata says of the engine.
        share: systematic share of r (`laws.systematic`), or None if it cannot be estimated.
        moved: standard errors by which cov(A, min(r, 2)) lies above 0, or None.
        synced: lower end of the interval of K3 at lag 0, or of all rows where no lag is recorded, nats.
    """

    rows: Rows
    recorded: Recorded = field(default_factory=Recorded)
    share: Estimate | None = None
    moved: float | None = None
    synced: float | None = None

    @cached_property
    def body(self) -> Body:
        """Robust statistics of |Δ|/(1 − π_rollout)."""
        return body(self.rows)

    @cached_property
    def k3(self) -> float:
        """Mean of min(K3, 1), nats."""
        return float(self.rows.k3_cut.mean())

    @cached_property
    def lags(self) -> dict[float, float]:
        """Lag → K3; empty if the dump records none."""
        return sizes(self.rows, "policy_lag")

    @cached_property
    def of_one_lag(self) -> Rows:
        """The rows of one lag: 0 if there are any, else the most frequent; all if the dump records none."""
        column = [lag for lag in self.rows.column("policy_lag") if lag is not None]
        if not column:
            return self.rows
        one = 0 if 0 in column else max(dict.fromkeys(column), key=column.count)
        return self.rows.only(np.array([lag == one for lag in self.rows.column("policy_lag")]))

    @cached_property
    def steps(self) -> dict[float, float]:
        """Step → K3, within one lag where the dump records lags."""
        return sizes(self.of_one_lag, "step")

    @cached_property
    def jump(self) -> tuple[float, float, float] | None:
        """Step at which the level of |Δ|/(1 − π) jumps for good, and both levels; None if it does not."""
        seen = course(self.of_one_lag)
        high = split(seen) if seen else None
        if high is None or high[0] or not high[int(np.argmax(high)) :].all():
            return None
        first = int(np.argmax(high))
        levels = (float(np.mean(part)) for part in (seen.level[:first], seen.level[first:]))
        low, after = levels
        flat = len(high) - first >= 3 and growth(seen.level[first:]) < JUMPED
        return (float(seen.steps[first]), low, after) if flat and after > ROUNDED else None

    @cached_property
    def carried(self) -> dict[str, tuple[str, float, float]]:
        """What the mismatch goes with (`laws.carried`)."""
        return carried(self.rows)

    @cached_property
    def start(self) -> Course | None:
        """Levels by step, if step 0 is as far off as any other at lag 0; None if it is not, or not known."""
        return from_start(self.rows)

    @property
    def known(self) -> bool:
        """Whether the dump records the policy lag."""
        return any(lag is not None for lag in self.rows.column("policy_lag"))

    @property
    def in_sync(self) -> bool:
        """Whether the dump says that every row is at lag 0."""
        return {lag for lag in self.rows.column("policy_lag") if lag is not None} == {0}

    @property
    def behind(self) -> bool:
        """Whether the dump says that every row is behind."""
        return self.known and min(lag for lag in self.rows.column("policy_lag") if lag is not None) > 0

    @property
    def inexcusable(self) -> bool:
        """Whether K3 at lag 0 is beyond what the recorded number format is published to give."""
        return self.synced is not None and self.synced > ceiling(self.recorded)

    @property
    def noise(self) -> bool:
        """Whether r measurably does not depend on the token, by answers to the same prompt."""
        return self.share is not None and answered_again(self.rows) and self.share.high < NOISE

    @property
    def outlying(self) -> bool:
        """Whether a few outliers carry the mismatch, with all other tokens close."""
        seen = self.body
        return seen.scale <= 0.045 and 0.001 < seen.tail < OUTLYING and seen.share >= 0.8

    @cached_property
    def growth(self) -> float | None:
        """Factor by which K3 grows over the steps of one lag; None if it does not."""
        found = list(self.steps.values())
        if len(found) < 4:
            rising = len(found) > 1 and bool((np.diff(found) > 0).all()) and found[-1] > 1.5 * found[0]
            return found[-1] / max(found[0], 1e-8) if rising and self.body.scale >= STALE else None
        return grown(found) if self._wider() else None

    def _wider(self) -> bool:
        """Return whether |Δ|/(1 − π) grows too, and not only the share of uncertain tokens."""
        rows, order = self.of_one_lag, list(self.steps)
        third = max(1, len(order) // 3)
        column = rows.column("step")
        first, last = (
            body(rows.only(np.array([step in part for step in column]))).scale
            for part in (order[:third], order[-third:])
        )
        return last >= 1.4 * first

    @cached_property
    def returns(self) -> list[float]:
        """Steps at which K3 falls back to rounding after a step at which it was large."""
        steps = self.steps
        top = max(steps.values(), default=0.0)
        if len(steps) < 3 or top <= HEALTHY_K3 or self.outlying:
            return []
        large = [step for step, k3 in steps.items() if k3 > top / 4]
        return [k for k, k3 in steps.items() if k3 < min(top / 20, HEALTHY_K3) and k > min(large)]

    @property
    def statistic(self) -> str:
        """The size of the mismatch and what tokens of one kind share of it, in words."""
        said = f"|Δ|/(1 − q) is {self.body.scale:.2g} for a usual token (robust standard deviation)"
        return f"{said}; {self.common}" if self.share is not None else said

    @property
    def common(self) -> str:
        """The systematic share with its interval, in words; empty if it is not known."""
        if self.share is None:
            return ""
        value, low, high = (max(x, 0.0) for x in (self.share.value, self.share.low, self.share.high))
        ends = f"[{percent(low)}, {percent(high)}]"
        return f"{percent(value)} of the variance of r is common to tokens of one kind {ends}"


def sizes(rows: Rows, column: str) -> dict[float, float]:
    """Return the mean of min(K3, 1) by value of a numeric column, for values with at least 50 tokens."""
    values = rows.column(column)
    total, many = rows.sum(rows.k3_cut), rows.lengths
    found: dict[float, float] = {}
    for value in sorted({value for value in values if isinstance(value, int | float)}):
        at = np.array([one == value for one in values])
        if many[at].sum() >= 50:
            found[value] = float(total[at].sum() / many[at].sum())
    return found


def listed(found: Mapping[float, float]) -> str:
    """Return K3 by lag or step in words: `0: 0.001, 1: 0.02`, three from each end of many."""
    keys = list(found)
    cut = keys if len(keys) <= 6 else [*keys[:3], *keys[-3:]]
    return ", ".join(f"{key:g}: {found[key]:.2g}" for key in cut)


def _by(found: Mapping[float, float], name: str) -> str:
    return f"K3 (cut at 1 nat a token) by {name}: {listed(found)}"


def grown(found: Sequence[float]) -> float | None:
    """Return the factor by which K3 grows over at least four steps, or None if it does not.

    From the first third of the steps to the last, or from some step on, where every later step is larger than
    every earlier one.
    """
    third = len(found) // 3
    first, last = float(np.median(found[:third])), float(np.median(found[-third:]))
    parts = [(max(found[:at]), min(found[at:])) for at in range(1, len(found))]
    apart = any(after > GROWN * max(before, 1e-8) for before, after in parts)
    trend = np.corrcoef(np.argsort(np.argsort(found)), np.arange(len(found)))[0, 1]
    if (last < GROWN * max(first, 1e-8) and not apart) or trend < 0.6 or last < 2e-5:
        return None
    return last / max(found[0] if apart else first, 1e-8)


# Causes that are established.


def named(seen: Seen, healthy: bool) -> Found | None:
    """Return the cause that the dump records or that has a shape of its own, or None."""
    if seen.inexcusable:  # a few outliers of a healthy dump may be, too, and no metadata excuse them
        return _numerics(seen, True) if healthy else None
    found = stale(seen) or quantised(seen) or experts(seen)
    return found or _numerics(seen, healthy or _alone(seen))


def stale(seen: Seen) -> Found | None:
    """Find a mismatch that grows with the recorded policy lag."""
    first, *later = seen.lags.values() or [0.0]
    if not later or float(np.mean(later)) <= RISING * max(first, 1e-7):
        return None
    statistic = _by(seen.lags, "policy lag")
    if min(seen.lags) == 0 and first > HEALTHY_K3:
        statistic += "; what there is at lag 0 is more than rounding, and no lag explains it"
    return Found.of_all("stale", statistic, seen.rows)


def quantised(seen: Seen) -> Found | None:
    """Find a rollout that the metadata calls quantised, with a mismatch that this alone may explain."""
    most = ceiling(seen.recorded)
    most = most if seen.recorded.precision in FOUR_BITS else min(QUANTISED_K3, most)
    if not seen.recorded.quantised or seen.k3 > most or not _alone(seen) or _other_step(seen):
        return None
    fields = {"recorded": seen.recorded.quantised}
    return Found.of_all("quantized_rollout", seen.statistic, seen.rows, fields=fields)


def experts(seen: Seen) -> Found | None:
    """Find a mismatch that a few outliers carry, in a model that the metadata calls a mixture of experts."""
    if not seen.recorded.experts or not seen.outlying or not _alone(seen) or _other_step(seen):
        return None
    tail = seen.body
    statistic = (
        f"{percent(tail.tail)} of the uncertain tokens lie beyond 8 times the usual |Δ|/(1 − q) of "
        f"{tail.scale:.2g} and carry {percent(tail.share)} of K3; the dump says {seen.recorded.experts}"
    )
    return Found.of_all("moe_outliers", statistic, seen.rows)


def _numerics(seen: Seen, alone: bool) -> Found | None:
    """Find the shape of rounding: noise of single tokens, or a mismatch that is small for a usual token.

    Where a usual token is at rounding and K3 is not, something else moves the tokens that carry it.
    """
    rounded = seen.body.scale <= ROUNDED
    if rounded and seen.k3 > HEALTHY_K3:
        return None
    shared = seen.share is not None and seen.share.low >= SYSTEMATIC
    close = alone and rounded and seen.body.tail < OUTLYING and not shared
    noise = seen.noise and seen.body.scale <= STALE and not _other_weights(seen)  # at any lag
    if seen.jump is not None or "prompt" in seen.carried or not (close or noise):
        return None
    return Found.of_all("numerics", seen.statistic, seen.rows)


def unsystematic(share: Estimate | None) -> bool:
    """Return whether tokens of one kind have no more in common than rounding or routing leaves."""
    return share is not None and share.low < NOISE and share.high < SYSTEMATIC


def _other_step(seen: Seen) -> bool:
    return seen.share is not None and seen.share.low > OTHER_STEP


def _alone(seen: Seen) -> bool:
    """Return whether nothing points to weights of another step, the lag included."""
    return not (seen.behind or _other_weights(seen))


def _other_weights(seen: Seen) -> bool:
    """Return whether growth, returns or advantages point to weights of another step."""
    moved = seen.moved is not None and seen.moved > SURE
    return seen.growth is not None or bool(seen.returns) or moved
