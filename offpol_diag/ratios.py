"""Log-ratios of one numerator policy over one batch, aggregated over tokens, sequences and turns.

Δ = log π_train − log π_rollout of the sampled token; r = e^Δ. Aggregates are computed when first asked for
and kept, so that presets share them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.presets import Over, Policy, Statistic

OVERFLOW = 345.0
"""Largest |log weight| that is exponentiated: e^(2·345) is still a float64."""

T = TypeVar("T")


@dataclass(frozen=True)
class Level:
    """Values per token [T] or per sequence [S]."""

    values: Tensor
    per: Literal["token", "sequence"]

    def map(self, function: Callable[[Tensor], Tensor]) -> Level:
        """The same level with a function applied to its values."""
        return Level(function(self.values), self.per)


_STATISTICS: dict[str, Callable[[Tensor], Tensor]] = {
    "ratio": lambda d: d,
    "k1": torch.neg,
    "k2": lambda d: d.square() / 2,
    "k3": lambda d: torch.expm1(d) - d,
    "tv": lambda d: torch.expm1(d).abs() / 2,
}
"""Per-token statistics as functions of Δ; `ratio` stays in the log domain, where its bounds are taken too."""

_OVER_SEQUENCE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": segments.total,
    "mean": segments.mean,
    "max": segments.largest,
    "min": segments.smallest,
}


@dataclass
class Ratios:
    """π_train/π_rollout on a batch, for π_train = `policy`.

    Attributes:
        batch: the packed batch.
        policy: old, current, or rollout (Δ is 0 everywhere).
    """

    batch: Batch
    policy: Policy
    _memo: dict[object, object] = field(default_factory=dict, repr=False)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, computed once per key."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]

    def forget(self) -> None:
        """Drop everything computed so far."""
        self._memo.clear()

    @property
    def train(self) -> Tensor:
        """log π_train, [T]."""
        found = self.batch.policy(self.policy)
        if found is None:
            raise ValueError(f"the batch has no {self.policy} log-probs")
        return found

    @property
    def delta(self) -> Tensor:
        """Δ, [T] float64, nats."""
        return self.once("delta", lambda: self.train - self.batch.rollout)

    def clamped(self, safety: float | None) -> Tensor:
        """Δ clamped to ±safety, [T]."""
        if safety is None:
            return self.delta
        return self.once(("clamped", safety), lambda: self.delta.clamp(-safety, safety))

    def token(self, statistic: Statistic, safety: float | None = None) -> Tensor:
        """The statistic of every token, [T]; `ratio` as its logarithm."""
        return self.once((statistic, safety), lambda: self._token(statistic, safety))

    def _token(self, statistic: Statistic, safety: float | None) -> Tensor:
        if statistic == "prob_diff":
            return torch.exp(self.batch.rollout) * torch.expm1(self.clamped(safety))
        return _STATISTICS[statistic](self.clamped(safety))

    def aggregate(self, statistic: Statistic, over: Over, safety: float | None = None) -> Level:
        """The statistic over tokens, sequences or turns, each token's Δ clamped to ±safety first.

        Per sequence: sum, mean, max, min of its tokens (an empty sequence has 0). A turn's mean is given to
        its tokens.
        """
        return self.once((statistic, over, safety), lambda: self._aggregate(statistic, over, safety))

    def _aggregate(self, statistic: Statistic, over: Over, safety: float | None) -> Level:
        x = self.token(statistic, safety)
        if over == "token":
            return Level(x, "token")
        if over == "segment":
            return Level(segments.spread(segments.mean(x, self.batch.cu_runs), self.batch.cu_runs), "token")
        values = _OVER_SEQUENCE[over](x, self.batch.cu_seqlens)
        return Level(torch.where(self.batch.lengths > 0, values, 0.0), "sequence")

    def log_ratio(self, over: Over, safety: float | None, safety_at: str) -> Level:
        """log r over tokens, sequences or turns, bounded where `safety_at` says."""
        if safety is None:
            return self.aggregate("ratio", over)
        if safety_at == "token":
            return self.aggregate("ratio", over, safety)
        bound = safety
        return self.once(
            ("log_ratio", over, safety),
            lambda: self.aggregate("ratio", over).map(lambda x: x.clamp(-bound, bound)),
        )
