"""What the base metrics ask of every token for one pair of policies: each array is made once and shared.

A batch is looked at block by block, so that a block's arrays stay in a core's own caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag import segments
from offpol_diag.accumulators import extremes
from offpol_diag.batch import Batch
from offpol_diag.host import exp, expm1, here
from offpol_diag.presets import Policy
from offpol_diag.ratios import OVERFLOW

BLOCK = 1 << 17
"""Tokens of a block: in smaller ones, being called at all costs numpy and torch more than the work."""

FAR = math.log(1.1)
"""The least |Δ| beyond which tokens are counted."""
TAME = 3.0
"""Largest |Δ| for which r − 1 tells r, r² and e^|Δ| to 13 digits."""


@dataclass(eq=False)
class Block:
    """Whole sequences of a batch.

    Attributes:
        batch: the packed batch.
        rows: which of its S sequences.
        tokens: which of its T tokens.
        offsets: where each sequence of the block begins, [s+1] from 0.
    """

    batch: Batch
    rows: slice
    tokens: slice
    offsets: Tensor
    _probs: dict[Policy, Callable[[], Tensor]] = field(default_factory=dict, repr=False)
    _sums: dict[Policy, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    @classmethod
    def whole(cls, batch: Batch) -> Block:
        """All of a batch."""
        return cls(batch, slice(0, batch.sequences), slice(0, batch.tokens), batch.cu_seqlens)

    @classmethod
    def all(cls, batch: Batch) -> Iterator[Block]:
        """A batch in blocks; in one on a GPU, which has no use for smaller ones."""
        starts = batch.cu_seqlens
        if not here(batch.rollout) or batch.tokens <= BLOCK:
            yield cls.whole(batch)
            return
        for first, last in segments.spans(starts, BLOCK):
            begin, end = int(starts[first]), int(starts[last])
            yield cls(batch, slice(first, last), slice(begin, end), starts[first : last + 1] - begin)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [s]."""
        return self.batch.lengths[self.rows]

    def owners(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which sequences some tokens are of, in the host's memory."""
        return np.searchsorted(self.offsets.numpy(), tokens, side="right") - 1

    @property
    def rollout(self) -> Tensor:
        """log π_rollout, [t]."""
        return self.batch.rollout[self.tokens]

    @property
    def position(self) -> Tensor:
        """The index of each token in its response, [t]."""
        return self.batch.position[self.tokens]

    @property
    def advantages(self) -> Tensor | None:
        """Of each token, [t], or None."""
        return None if self.batch.advantages is None else self.batch.advantages[self.tokens]

    def log(self, policy: Policy) -> Tensor | None:
        """The log-probs of a policy, [t], or None when the dump lacks them."""
        found = self.batch.policy(policy)
        return None if found is None else found[self.tokens]

    def terms(self, denominator: Policy, numerator: Policy) -> Terms | None:
        """What a pair of policies makes of every token; None when one of them is missing."""
        q, p = self.log(denominator), self.log(numerator)
        return None if q is None or p is None else Terms(self, denominator, numerator, q, p)

    def prob(self, policy: Policy) -> Tensor:
        """The probability of every token under a policy, [t]."""
        if policy not in self._probs:
            log = self.log(policy)
            assert log is not None
            self.learn(policy, exp(log))
        return self._probs[policy]()

    def prob_sums(self, policy: Policy) -> tuple[Tensor, Tensor]:
        """The sums of the probabilities and of their squares, [s] each."""
        if policy not in self._sums:
            prob = self.prob(policy)
            found = segments.totals({"once": lambda: prob, "twice": prob.square}, self.offsets)
            self._sums[policy] = found["once"], found["twice"]
        return self._sums[policy]

    def learn(
        self, policy: Policy, prob: Tensor | Callable[[], Tensor], sums: tuple[Tensor, Tensor] | None = None
    ) -> None:
        """Learn the probabilities of a policy from who made them, or how to make them, and their sums."""
        self._probs[policy] = prob if callable(prob) else lambda: prob
        if sums is not None:
            self._sums[policy] = sums


@dataclass(eq=False)
class Terms:
    """Arrays [t] of Δ = p − q on one block, made when first asked for.

    Attributes:
        block: whose tokens they are.
        denominator, numerator: the policies.
        q: log-probs of the denominator, [t].
        p: log-probs of the numerator, [t].
        summed: sums by name, [s], that somebody had to make on the way.
    """

    block: Block
    denominator: Policy
    numerator: Policy
    q: Tensor
    p: Tensor
    summed: dict[str, Tensor] = field(default_factory=dict, repr=False)

    def sums(self, made: Mapping[str, Callable[[], Tensor]]) -> dict[str, Tensor]:
        """Over each sequence, [s], by name; what was summed already is not made again."""
        there = {name: self.summed[name] for name in made if name in self.summed}
        rest = {name: make for name, make in made.items() if name not in there}
        return there | segments.totals(rest, self.block.offsets)

    @cached_property
    def delta(self) -> Tensor:
        """Δ, [t]."""
        return self.p - self.q

    @cached_property
    def span(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest Δ; (+inf, -inf) of no token."""
        return extremes(self.delta)

    @cached_property
    def reach(self) -> float:
        """The largest |Δ|; inf where the host would have to wait to learn it."""
        if not here(self.delta):
            return math.inf
        low, high = self.span
        return max(-float(low), float(high))

    @cached_property
    def tame(self) -> bool:
        """Whether r − 1 may stand in for r and e^|Δ|."""
        return self.reach <= TAME

    @cached_property
    def far(self) -> NDArray[np.int64]:
        """Where a host sees |Δ| beyond `FAR`, rising."""
        if not self.reach > FAR:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.size.numpy() > FAR)

    def beyond(self, bound: float) -> Tensor:
        """Which tokens have |Δ| beyond a bound of at least `FAR`: where a host sees them; else [t] bool."""
        if not here(self.delta):
            return self.size > bound
        return torch.from_numpy(self.far[self.size.numpy()[self.far] > bound])

    @cached_property
    def size(self) -> Tensor:
        """|Δ|, [t]."""
        return self.delta.abs()

    @cached_property
    def r1(self) -> Tensor:
        """r − 1, with Δ within what can be exponentiated, [t]."""
        return expm1(self.delta if self.reach <= OVERFLOW else self.delta.clamp(-OVERFLOW, OVERFLOW))

    @cached_property
    def off(self) -> Tensor:
        """|r − 1|, [t]."""
        return self.r1.abs()

    @cached_property
    def r11(self) -> Tensor:
        """(r − 1)², [t]."""
        return self.r1.square()

    @cached_property
    def k3(self) -> Tensor:
        """e^Δ − 1 − Δ, [t]."""
        return self.r1 - self.delta

    @property
    def mult(self) -> Tensor:
        """e^|Δ| − 1, [t]: |r − 1|, over r where that is below 1."""
        if self.tame:
            return self.off / self.r1.clamp(max=0.0).add_(1.0)
        return expm1(self.size.clamp(max=OVERFLOW))

    @cached_property
    def diff(self) -> Tensor:
        """π_train − π_rollout of the sampled token, [t]."""
        return self.block.prob(self.denominator) * self.r1

    @cached_property
    def pd(self) -> Tensor:
        """|π_train − π_rollout|, [t]."""
        return self.diff.abs()
