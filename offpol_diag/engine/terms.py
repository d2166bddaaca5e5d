"""Per-token arrays that the base metrics share, block by block, and the iteration over the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import accumulators, segments
from offpol_diag.engine.ratios import OVERFLOW
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import here
from offpol_diag.presets import Policy

BLOCK = 1 << 17
"""Tokens per block: in smaller ones, call overhead of numpy and torch exceeds the work."""

Array = Any
"""A numpy array or torch tensor: the code uses only names that both have."""

Kept = dict[tuple[Policy, Policy], Tensor]
"""Denominator and numerator → an array of all tokens, [T]."""

FAR = math.log(1.1)
"""Smallest |Δ| above which tokens are counted."""
TAME = 3.0
"""Largest |Δ| for which r − 1 gives r, r² and e^|Δ| to 13 digits."""


class Room(dict[str, Any]):
    """Output arrays of a block by name, in memory [t] reused from the block before; ones at first."""

    def __init__(self, memory: dict[str, NDArray[np.float64]], size: int, tokens: int) -> None:
        super().__init__()
        self.memory, self.size, self.tokens = memory, size, tokens

    def __missing__(self, name: str) -> NDArray[np.float64]:
        if name not in self.memory:
            self.memory[name] = np.ones(self.size)
        self[name] = found = self.memory[name][: self.tokens]
        return found


class Nowhere(Room):
    """No output arrays: torch allocates its own."""

    def __init__(self) -> None:
        super().__init__({}, 0, 0)

    def __missing__(self, name: str) -> None:  # type: ignore[override]
        return None


@dataclass(eq=False)
class Block:
    """Whole sequences of a batch.

    Attributes:
        batch: the packed batch.
        rows: slice of the batch's S sequences.
        tokens: slice of the batch's T tokens.
        offsets: where each sequence of the block starts, [s+1], from 0.
        room: memory for arrays.
        kit: numpy or torch, the module of the arrays.
        kept: arrays of all tokens [T] to which e^Δ − 1 of each pair of policies is written; None to drop it.
    """

    batch: Batch
    rows: slice
    tokens: slice
    offsets: Tensor
    room: Room = field(default_factory=Nowhere, repr=False)
    kit: Any = torch
    kept: Kept | None = field(default=None, repr=False)
    _probs: dict[Policy, Array] = field(default_factory=dict, repr=False)
    _sums: dict[Policy, tuple[Array, Array]] = field(default_factory=dict, repr=False)

    @classmethod
    def whole(cls, batch: Batch) -> Block:
        """Return a whole batch as one block of torch tensors."""
        return cls(batch, slice(0, batch.sequences), slice(0, batch.tokens), batch.cu_seqlens)

    @classmethod
    def all(cls, batch: Batch, kept: Kept | None = None) -> Iterator[Block]:
        """Yield a batch in blocks; on a GPU in a single one."""
        starts = batch.cu_seqlens
        if not here(batch.rollout):
            yield replace(cls.whole(batch), kept=kept)
            return
        spans = segments.spans(starts, BLOCK)
        size = max((int(starts[last] - starts[first]) for first, last in spans), default=0)
        memory: dict[str, NDArray[np.float64]] = {}
        for first, last in spans:
            begin, end = int(starts[first]), int(starts[last])
            offsets = starts[first : last + 1] - begin
            room = Room(memory, size, end - begin)
            yield cls(batch, slice(first, last), slice(begin, end), offsets, room, np, kept)

    @property
    def lengths(self) -> Tensor:
        """Number of tokens of each sequence, [s]."""
        return self.batch.lengths[self.rows]

    def owners(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the sequences of some tokens, on the host."""
        return np.searchsorted(self.offsets.numpy(), tokens, side="right") - 1

    @cached_property
    def begins(self) -> NDArray[np.int64] | None:
        """Starts of the sequences on a CPU if none is empty, else None."""
        return None if self.kit is torch else segments.begins(self.offsets)

    def sum(self, x: Array) -> Array:
        """Sum over each sequence, [s]."""
        begins = self.begins
        return segments.total_of(x, self.offsets) if begins is None else np.add.reduceat(x, begins)

    @property
    def rollout(self) -> Array:
        """log π_rollout, [t]."""
        return self.log("rollout")

    @property
    def position(self) -> Tensor:
        """Index of each token in its response, [t]."""
        return self.batch.position[self.tokens]

    @property
    def advantages(self) -> Tensor | None:
        """Advantage of each token, [t], or None."""
        return None if self.batch.advantages is None else self.batch.advantages[self.tokens]

    def log(self, policy: Policy) -> Array | None:
        """Return the log-probs of a policy, [t], or None when the dump lacks them."""
        found = self.batch.policy(policy)
        if found is None:
            return None
        return found[self.tokens] if self.kit is torch else found.numpy()[self.tokens]

    def terms(self, denominator: Policy, numerator: Policy) -> Terms | None:
        """Return a policy pair's per-token terms; None when a policy is missing."""
        q, p = self.log(denominator), self.log(numerator)
        return None if q is None or p is None else Terms(self, denominator, numerator, q, p)

    def prob(self, policy: Policy) -> Array:
        """Return the probability of every token under a policy, [t]."""
        if policy not in self._probs:
            log = self.log(policy)
            assert log is not None
            self._probs[policy] = segments.exp(log, self.room[policy])
        return self._probs[policy]

    def prob_sums(self, policy: Policy) -> tuple[Array, Array]:
        """Return the sums of a policy's probabilities and of their squares, [s] each."""
        if policy not in self._sums:
            prob = self.prob(policy)
            self._sums[policy] = self.sum(prob), self.sum(self.kit.square(prob, out=self.room[""]))
        return self._sums[policy]

    def learn(self, policy: Policy, once: Array, twice: Array) -> None:
        """Store the sums of a policy's probabilities and of their squares, computed elsewhere."""
        self._sums[policy] = once, twice


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

    def __post_init__(self) -> None:
        self._kit, self._room = self.block.kit, self.block.room

    def sum(self, name: str) -> Array:
        """Sum the array of that name over each sequence, [s]."""
        return self.block.sum(getattr(self, name))

    @cached_property
    def delta(self) -> Array:
        """Δ, [t]."""
        return self._kit.subtract(self.p, self.q, out=self._room["delta"])

    @cached_property
    def span(self) -> tuple[Array, Array]:
        """Smallest and largest Δ; (+inf, -inf) without tokens."""
        return extremes(self.delta)

    @cached_property
    def reach(self) -> float:
        """Largest |Δ|; inf on a GPU, where reading it would make the host wait."""
        if self.block.kit is torch:
            return math.inf
        low, high = self.span
        return max(-float(low), float(high))

    @cached_property
    def tame(self) -> bool:
        """Return whether |Δ| is small enough everywhere to compute r and e^|Δ| from r − 1."""
        return self.reach <= TAME

    @cached_property
    def far(self) -> NDArray[np.int64]:
        """Indices of tokens with |Δ| > `FAR` on a CPU, rising."""
        if not self.reach > FAR:
            return np.empty(0, np.int64)
        return np.flatnonzero(self.size > FAR)

    @cached_property
    def size(self) -> Array:
        """|Δ|, [t]."""
        return self._kit.abs(self.delta, out=self._room["size"])

    @property
    def dd(self) -> Array:
        """Δ², [t]; a temporary, overwritten by the next."""
        return self._kit.square(self.delta, out=self._room[""])

    @cached_property
    def r1(self) -> Array:
        """r − 1, [t], with Δ clamped so that e^Δ does not overflow."""
        wild = not self.reach <= OVERFLOW
        x = self._kit.clip(self.delta, -OVERFLOW, OVERFLOW, out=self._room[""]) if wild else self.delta
        pair, kept = (self.denominator, self.numerator), self.block.kept
        if kept is None:
            return segments.expm1(x, self._room["r1"])
        if self._kit is torch:
            kept[pair] = segments.expm1(x)
            return kept[pair]
        if pair not in kept:
            kept[pair] = torch.empty_like(self.block.batch.rollout)
        return segments.expm1(x, kept[pair].numpy()[self.block.tokens])

    @cached_property
    def off(self) -> Array:
        """|r − 1|, [t]."""
        return self._kit.abs(self.r1, out=self._room["off"])

    @cached_property
    def r11(self) -> Array:
        """(r − 1)², [t]."""
        return self._kit.square(self.r1, out=self._room["r11"])

    @cached_property
    def k3(self) -> Array:
        """e^Δ − 1 − Δ, [t]; never negative, since a Δ whose r is clamped is clamped too."""
        delta = self.delta
        if not self.reach <= OVERFLOW:
            delta = self._kit.clip(delta, -math.inf, OVERFLOW, out=self._room["k3"])
        return self._kit.subtract(self.r1, delta, out=self._room["k3"])

    @property
    def mult(self) -> Array:
        """e^|Δ| − 1, [t]: the larger of r − 1 and |r − 1| / r; a temporary, overwritten by the next."""
        kit, out = self._kit, self._room[""]
        if self.tame:
            return kit.maximum(
                self.r1, kit.divide(self.off, kit.add(self.r1, 1.0, out=out), out=out), out=out
            )
        return segments.expm1(kit.clip(self.size, 0.0, OVERFLOW, out=out), out)

    @cached_property
    def diff(self) -> Array:
        """π_train − π_rollout of the sampled token, [t]."""
        return self._kit.multiply(self.block.prob(self.denominator), self.r1, out=self._room["diff"])

    @cached_property
    def pd(self) -> Array:
        """|π_train − π_rollout|, [t]."""
        return self._kit.abs(self.diff, out=self._room["pd"])

    @property
    def pdd(self) -> Array:
        """(π_train − π_rollout)², [t]; a temporary, overwritten by the next."""
        return self._kit.square(self.diff, out=self._room[""])

    @property
    def cross(self) -> Array:
        """π_rollout (π_train − π_rollout), [t]; a temporary, overwritten by the next."""
        return self._kit.multiply(self.block.prob(self.denominator), self.diff, out=self._room[""])

    @property
    def pq(self) -> Array:
        """π_train π_rollout, [t]; a temporary, overwritten by the next."""
        prob = self.block.prob
        return self._kit.multiply(prob(self.numerator), prob(self.denominator), out=self._room[""])


def extremes(x: Array) -> tuple[Array, Array]:
    """Return the smallest and largest value of an array or tensor; (+inf, -inf) of an empty one."""
    if isinstance(x, Tensor):
        return accumulators.extremes(x)
    return (np.minimum.reduce(x), np.maximum.reduce(x)) if len(x) else (math.inf, -math.inf)


def joined(parts: Sequence[Array]) -> Tensor:
    """Concatenate the results of blocks along the last dimension."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts), dim=-1)
    return torch.from_numpy(np.concatenate(parts, axis=-1))


class Pair(Protocol):
    """Two policies, and the prefix of their numbers' names."""

    @property
    def prefix(self) -> str:
        """Prefix of the names."""
        ...

    @property
    def denominator(self) -> Policy:
        """Policy in the denominator of the ratio."""
        ...

    @property
    def numerator(self) -> Policy:
        """Policy in the numerator of the ratio."""
        ...


W = TypeVar("W", bound=Any)
"""A collector: built of a scene and a pair, its `see` gets the terms of one block after another."""


def walk(scene: Scene, asked: Mapping[Pair, Sequence[type[Any]]]) -> None:
    """Pass every block to all collectors, in order; a pair that lacks a policy has no blocks."""
    for pair, watches in _walked(scene, asked).items():
        for watch in watches:
            scene.once((type(watch), pair.prefix), lambda watch=watch: watch)  # type: ignore[misc]


def seen(scene: Scene, pair: Pair, make: type[W]) -> W:
    """Return the collector that saw every block, after a pass of its own if there was none."""
    return scene.once((make, pair.prefix), lambda: _walked(scene, {pair: (make,)})[pair][0])


def _walked(scene: Scene, asked: Mapping[Pair, Sequence[type[W]]]) -> dict[Pair, list[W]]:
    found = {pair: [make(scene, pair) for make in makes] for pair, makes in asked.items()}
    with np.errstate(all="ignore"):  # inf − inf is a NaN, which readers of sums handle
        for block in Block.all(scene.batch, scene.excess if scene.near else None):
            for pair, watches in found.items():
                terms = block.terms(pair.denominator, pair.numerator)
                for watch in watches if terms else ():
                    watch.see(terms)
    return found
