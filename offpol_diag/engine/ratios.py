"""Log-ratios of one numerator policy over one batch, aggregated over tokens, sequences and turns.

Δ = log π_train − log π_rollout of the sampled token; r = e^Δ. Aggregates are computed on first use and
cached, so that presets share them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.scope import NO_FITS, BatchFits
from offpol_diag.engine.segments import Array, Memo
from offpol_diag.pipeline import formulas
from offpol_diag.pipeline.tables import STATISTICS
from offpol_diag.presets import Over, Policy, Statistic

OVERFLOW = formulas.LARGEST
"""Largest |log weight| that is exponentiated: e^(2·345) is still a float64."""

OF_EXCESS = frozenset({"k3", "tv"})
"""Statistics that are made of r − 1."""

T = TypeVar("T")


@dataclass(frozen=True)
class Level:
    """Values per token [T], per sequence [S] or per turn [R]."""

    values: Array
    per: Literal["token", "sequence", "turn"]

    def map(self, function: Callable[[Array], Array]) -> Level:
        """Return the same level with a function applied to its values."""
        return Level(function(self.values), self.per)


_OVER_SEQUENCE: dict[str, tuple[Callable[[Array, Array], Array], float]] = {
    "sum": (segments.total, 0.0),
    "mean": (segments.mean, 0.0),
    "max": (segments.largest, -math.inf),
    "min": (segments.smallest, math.inf),
}
"""Aggregation over a sequence, and the value that makes it ignore a token."""


@dataclass
class Ratios:
    """π_train/π_rollout on a batch, for π_train = `policy`.

    Attributes:
        batch: the packed batch.
        policy: old, current, or rollout (Δ is 0 everywhere).
        fits: cuts and tails per trainer batch, for rules and weights that look beyond one sequence.
        peers: ratios of the same batch with other numerators, shared by all of them.
        counted: tokens that aggregates run over, [T] bool, or a function that computes them; None for all.
    """

    batch: Batch
    policy: Policy
    fits: BatchFits = NO_FITS
    peers: dict[str, Ratios] = field(default_factory=dict, repr=False)
    counted: Array | Callable[[], Array] | None = field(default=None, repr=False)
    _memo: Memo = field(default_factory=Memo, repr=False)

    def of(self, policy: Policy | None) -> Ratios:
        """Return the ratios with another numerator; None for this one's own."""
        if policy is None or policy == self.policy:
            return self
        if policy not in self.peers:
            self.peers[policy] = replace(self, policy=policy, counted=None, _memo=Memo())
        return self.peers[policy]

    def among(self, counted: Callable[[], Array]) -> Ratios:
        """Return the same ratios, aggregated over the tokens `counted` [T]."""
        return Ratios(self.batch, self.policy, self.fits, self.peers, counted)

    @property
    def _counted(self) -> Array | None:
        if callable(self.counted):
            self.counted = self.counted()
        return self.counted

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        return self._memo.once(key, make)

    def forget(self) -> None:
        """Drop all cached values, of the other numerators too: they form reference cycles."""
        for ratios in (self, *self.peers.values()):
            ratios._memo.clear()
        self.peers.clear()

    @property
    def train(self) -> Array:
        """log π_train, [T]."""
        found = self.batch.policy(self.policy)
        if found is None:
            raise ValueError(f"the batch has no {self.policy} log-probs")
        return found

    @property
    def delta(self) -> Array:
        """Δ, [T] float64, nats."""
        return self.once("delta", lambda: self.train - self.batch.rollout)

    def clamped(self, safety: float | None) -> Array:
        """Return Δ clamped to ±safety, [T]."""
        if safety is None:
            return self.delta
        return self.once(("clamped", safety), lambda: np.clip(self.delta, -safety, safety))

    def excess(self, safety: float | None = None) -> Array:
        """Return r − 1, with Δ clamped to ±safety, [T]."""
        if safety is None:
            return self.once("r − 1", lambda: np.expm1(self.delta))
        low, high = math.expm1(-safety), math.expm1(safety)
        return self.once(("r − 1", safety), lambda: np.clip(self.excess(), low, high))

    def difference(self, safety: float | None = None) -> Array:
        """Return π_train − π_rollout, with Δ clamped to ±safety, [T]; exact at every Δ.

        π_rollout · (r − 1) would be 0 · e^Δ where π_rollout underflows, and is inf or NaN where r overflows.
        """
        return self.once(("p − q", safety), lambda: self._difference(safety))

    def _difference(self, safety: float | None) -> Array:
        d, q = self.clamped(safety), self.batch.rollout
        p = self.train if safety is None else q + d  # of a log-prob of −1e30, q + d would not be p
        found: Array = np.copysign(np.exp(np.maximum(p, q)) * -np.expm1(-np.abs(d)), d)
        return found

    def token(self, statistic: Statistic, safety: float | None = None) -> Array:
        """Compute the statistic of every token, [T]; `ratio` as its logarithm."""
        return self.once((statistic, safety), lambda: self._token(statistic, safety))

    def _token(self, statistic: Statistic, safety: float | None) -> Array:
        if statistic in ("prob_diff", "prob_gap"):
            gap = self.difference(safety)
            return gap if statistic == "prob_diff" else np.abs(gap)
        excess = self.excess(safety) if statistic in OF_EXCESS else None
        of = getattr(formulas, STATISTICS[statistic])
        found: Array = of(self.clamped(safety), excess, self.batch.rollout)
        return found

    def aggregate(self, statistic: Statistic, over: Over, safety: float | None = None) -> Level:
        """Compute the statistic over tokens, sequences or turns; each token's Δ is clamped to ±safety first.

        Per sequence: sum, mean, max or min of its tokens (0 for an empty sequence). A turn's mean is spread
        to its tokens.
        """
        if over == "segment":
            key = ("of turns", statistic, safety)
            return self.once(key, lambda: Level(self.of_turns(self.turns(statistic, safety)), "token"))
        return self.once((statistic, over, safety), lambda: self._aggregate(statistic, over, safety))

    def _aggregate(self, statistic: Statistic, over: Over, safety: float | None) -> Level:
        if over in ("token", "batch"):
            return Level(self.token(statistic, safety), "token")
        values = self._reduced(self.token(statistic, safety), over, self.batch.cu_seqlens)
        there = self.once("there", lambda: self.batch.lengths > 0)
        return Level(np.where(there, values, 0.0), "sequence")

    def turns(self, statistic: Statistic, safety: float | None = None) -> Array:
        """Compute the mean of the statistic over each turn, [R]."""
        key, offsets = ("turns", statistic, safety), self.batch.cu_runs
        return self.once(key, lambda: self._reduced(self.token(statistic, safety), "mean", offsets))

    def of_turns(self, x: Array) -> Array:
        """Spread each turn's value [R] to its tokens, [T]."""
        return segments.spread(x, self.batch.cu_runs)

    def _reduced(self, x: Array, over: Over, offsets: Array) -> Array:
        """Aggregate per run [R], over the included tokens; 0 where there is none."""
        reduce, absent = _OVER_SEQUENCE[over]
        counted = self._counted
        if counted is None:
            return reduce(x, offsets)
        there = segments.count(counted, offsets)
        x = np.where(counted, x, absent)
        values = segments.total(x, offsets) / np.maximum(there, 1) if over == "mean" else reduce(x, offsets)
        return np.where(there > 0, values, 0.0)

    def log_ratio(self, over: Over, safety: float | None, safety_at: str) -> Level:
        """Compute log r over tokens, sequences or turns, bounded where `safety_at` says."""
        if safety is None:
            return self.aggregate("ratio", over)
        if safety_at == "token":
            return self.aggregate("ratio", over, safety)
        bound = safety
        return self.once(
            ("log_ratio", over, safety),
            lambda: self.aggregate("ratio", over).map(lambda x: np.clip(x, -bound, bound)),
        )
