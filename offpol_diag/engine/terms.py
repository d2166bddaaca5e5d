"""Per-token arrays that the base metrics share, block by block, and the iteration over the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import Drift as Drift
from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.presets import Policy

BLOCK = 1 << 18
"""Tokens per block: in smaller ones, the overhead of calls exceeds the work."""

FAR = math.log(1.1)
"""Smallest |Δ| above which tokens are counted."""
INVERSE_LIMIT = 3.0
"""Largest −Δ for which r − 1 gives e^|Δ| to 13 digits."""


@dataclass(eq=False)
class Block:
    """Whole sequences of a batch.

    Attributes:
        batch: the packed batch.
        rows: slice of the batch's S sequences.
        tokens: slice of the batch's T tokens.
        offsets: where each sequence of the block starts, [s+1], from 0.
        memory: arrays by name, [t] or longer, that the blocks of a batch write to one after the other.
        size: tokens of the largest of those blocks.
    """

    batch: Batch
    rows: slice
    tokens: slice
    offsets: Array
    memory: dict[str, Array] = field(repr=False)
    size: int
    _probs: dict[Policy, Array] = field(default_factory=dict, repr=False)
    _sums: dict[Policy, tuple[Array, Array]] = field(default_factory=dict, repr=False)

    @classmethod
    def all(cls, batch: Batch) -> Iterator[Block]:
        """Yield a batch in blocks of whole sequences."""
        starts, memory = batch.cu_seqlens, dict[str, Array]()
        spans = segments.spans(starts, BLOCK)
        size = max((int(starts[last] - starts[first]) for first, last in spans), default=0)
        for first, last in spans:
            begin, end = int(starts[first]), int(starts[last])
            offsets = starts[first : last + 1] - begin
            yield cls(batch, slice(first, last), slice(begin, end), offsets, memory, size)

    def out(self, name: str) -> Array:
        """Return the memory of that name, [t]."""
        if name not in self.memory:
            self.memory[name] = np.ones(self.size)
        return self.memory[name][: self.tokens.stop - self.tokens.start]

    @property
    def lengths(self) -> Array:
        """Number of tokens of each sequence, [s]."""
        return self.batch.lengths[self.rows]

    def sum(self, x: Array) -> Array:
        """Sum over each sequence, [s]."""
        return segments.total(x, self.offsets)

    @property
    def position(self) -> Array:
        """Index of each token in its response, [t]."""
        return self.batch.position[self.tokens]

    @property
    def advantages(self) -> Array | None:
        """Advantage of each token, [t], or None."""
        return None if self.batch.advantages is None else self.batch.advantages[self.tokens]

    def log(self, policy: Policy) -> Array | None:
        """Return the log-probs of a policy, [t], or None when the dump lacks them."""
        result = self.batch.policy(policy)
        return None if result is None else result[self.tokens]

    def terms(self, drift: Drift) -> Terms | None:
        """Return a drift's per-token terms; None when a policy is missing."""
        q, p = self.log(drift.denominator), self.log(drift.numerator)
        return None if q is None or p is None else Terms(self, drift.denominator, drift.numerator, q, p)

    def prob(self, policy: Policy) -> Array:
        """Return the probability of every token under a policy, [t]."""
        if policy not in self._probs:
            log = self.log(policy)
            assert log is not None
            self._probs[policy] = np.exp(log, out=self.out(policy))
        return self._probs[policy]

    def prob_sums(self, policy: Policy) -> tuple[Array, Array]:
        """Return the sums of a policy's probabilities and of their squares, [s] each."""
        if policy not in self._sums:
            prob = self.prob(policy)
            self._sums[policy] = self.sum(prob), self.sum(np.square(prob, out=self.out("")))
        return self._sums[policy]


@dataclass(eq=False)
class Terms:
    """Arrays [t] of Δ = p − q and functions of it on one block, computed on first use.

    Attributes:
        block: block of the tokens.
        denominator, numerator: the policies.
        q: log-probs of the denominator, [t].
        p: log-probs of the numerator, [t].
    """

    block: Block
    denominator: Policy
    numerator: Policy
    q: Array
    p: Array

    def sum(self, name: str) -> Array:
        """Sum the array of that name over each sequence, [s]."""
        return self.block.sum(getattr(self, name))

    @cached_property
    def delta(self) -> Array:
        """Δ, [t]."""
        return np.subtract(self.p, self.q, out=self.block.out("delta"))

    @cached_property
    def span(self) -> tuple[float, float]:
        """Smallest and largest Δ; (+inf, -inf) without tokens."""
        return segments.extremes(self.delta)

    @cached_property
    def reach(self) -> float:
        """Largest |Δ|."""
        low, high = self.span
        return max(-low, high)

    @cached_property
    def far(self) -> Array:
        """Indices of tokens with |Δ| > `FAR`, rising."""
        return np.flatnonzero(self.size > FAR) if self.reach > FAR else self.block.offsets[:0]

    @cached_property
    def size(self) -> Array:
        """|Δ|, [t]."""
        return np.abs(self.delta, out=self.block.out("size"))

    @property
    def dd(self) -> Array:
        """Δ², [t]; a temporary, overwritten by the next."""
        return np.square(self.delta, out=self.block.out(""))

    @cached_property
    def r1(self) -> Array:
        """r − 1, [t], with Δ clamped so that e^Δ does not overflow."""
        wild = not self.reach <= LARGEST
        x = np.clip(self.delta, -LARGEST, LARGEST, out=self.block.out("")) if wild else self.delta
        return np.expm1(x, out=self.block.out("r1"))

    @cached_property
    def off(self) -> Array:
        """|r − 1|, [t]."""
        return np.abs(self.r1, out=self.block.out("off"))

    @cached_property
    def r11(self) -> Array:
        """(r − 1)², [t]."""
        return np.square(self.r1, out=self.block.out("r11"))

    @cached_property
    def k3(self) -> Array:
        """e^Δ − 1 − Δ, [t]; never negative, since a Δ whose r is clamped is clamped too."""
        delta = self.delta
        if not self.reach <= LARGEST:
            delta = np.clip(delta, -math.inf, LARGEST, out=self.block.out("k3"))
        return np.subtract(self.r1, delta, out=self.block.out("k3"))

    @property
    def mult(self) -> Array:
        """e^|Δ| − 1, [t]: the larger of r − 1 and |r − 1| / r; a temporary, overwritten by the next."""
        out = self.block.out("")
        inverse = np.divide(self.off, np.add(self.r1, 1.0, out=out), out=out)
        result = np.maximum(self.r1, inverse, out=out)
        small = self.far[self.delta[self.far] < -INVERSE_LIMIT]  # r is not r − 1 plus 1 there
        result[small] = np.expm1(np.minimum(self.size[small], LARGEST))
        return result

    @cached_property
    def diff(self) -> Array:
        """π_train − π_rollout of the sampled token, [t]: sign(Δ) · max(π_train, π_rollout) · (1 − e^−|Δ|).

        1 − e^−|Δ| is |r − 1| over the larger of r and 1. π_rollout · (r − 1), which is the same, would be 0
        where π_rollout underflows, and r is bounded.
        """
        prob, out, part = self.block.prob, self.block.out("diff"), self.block.out("")
        part = np.divide(self.off, np.maximum(np.add(self.r1, 1.0, out=part), 1.0, out=part), out=part)
        larger = np.maximum(prob(self.numerator), prob(self.denominator), out=out)
        return np.copysign(np.multiply(larger, part, out=out), self.delta, out=out)

    @cached_property
    def pd(self) -> Array:
        """|π_train − π_rollout|, [t]."""
        return np.abs(self.diff, out=self.block.out("pd"))

    @property
    def pdd(self) -> Array:
        """(π_train − π_rollout)², [t]; a temporary, overwritten by the next."""
        return np.square(self.diff, out=self.block.out(""))

    @property
    def pq(self) -> Array:
        """π_train π_rollout, [t]; a temporary, overwritten by the next."""
        prob = self.block.prob
        return np.multiply(prob(self.numerator), prob(self.denominator), out=self.block.out(""))


W = TypeVar("W", bound=Any)
"""A collector: built of a batch and a drift, its `see` gets the terms of one block after another."""


def walk(context: BatchContext, collectors: Mapping[Drift, Sequence[type[Any]]]) -> None:
    """Pass every block to all collectors, in order; a drift that lacks a policy has no blocks."""
    for drift, watches in _walked(context, collectors).items():
        for watch in watches:
            context.cached((type(watch), drift.prefix), lambda watch=watch: watch)  # type: ignore[misc]


def collected(context: BatchContext, drift: Drift, make: type[W]) -> W:
    """Return the collector that saw every block, after a pass of its own if there was none."""
    return context.cached((make, drift.prefix), lambda: _walked(context, {drift: (make,)})[drift][0])


def _walked(context: BatchContext, collectors: Mapping[Drift, Sequence[type[W]]]) -> dict[Drift, list[W]]:
    result = {drift: [make(context, drift) for make in makes] for drift, makes in collectors.items()}
    for block in Block.all(context.batch):
        for drift, watches in result.items():
            terms = block.terms(drift)
            for watch in watches if terms else ():
                watch.see(terms)
    return result
