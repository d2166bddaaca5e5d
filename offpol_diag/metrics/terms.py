"""What the base metrics ask of every token for one pair of policies: each array is made once and shared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.host import expm1
from offpol_diag.ratios import OVERFLOW


@dataclass(eq=False)
class Terms:
    """Arrays [T] and [S] of Δ = p − q on one batch, made when first asked for.

    Attributes:
        batch: the packed batch.
        q: log-probs of the denominator, [T].
        p: log-probs of the numerator, [T].
        delta: Δ, [T].
        prob: e^q, [T]; a function, for whoever asks shares it with other pairs.
    """

    batch: Batch
    q: Tensor
    p: Tensor
    delta: Tensor
    prob: Callable[[], Tensor]

    @cached_property
    def safe(self) -> Tensor:
        """Δ within what can be exponentiated, [T]."""
        return self.delta.clamp(-OVERFLOW, OVERFLOW)

    @cached_property
    def size(self) -> Tensor:
        """|Δ|, [T]."""
        return self.delta.abs()

    @cached_property
    def r1(self) -> Tensor:
        """r − 1, [T]."""
        return expm1(self.safe)

    @cached_property
    def k3(self) -> Tensor:
        """e^Δ − 1 − Δ, [T]."""
        return self.r1 - self.delta

    @cached_property
    def diff(self) -> Tensor:
        """π_train − π_rollout of the sampled token, [T]."""
        return self.prob() * self.r1

    @cached_property
    def pd(self) -> Tensor:
        """|π_train − π_rollout|, [T]."""
        return self.diff.abs()

    @cached_property
    def total(self) -> Tensor:
        """ΣΔ of each sequence, [S]."""
        return segments.total(self.delta, self.batch.cu_seqlens)

    @cached_property
    def mean(self) -> Tensor:
        """Mean Δ of each sequence, [S]; 0 for an empty one."""
        return self.total / self.batch.lengths.clamp(min=1)
