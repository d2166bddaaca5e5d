"""Arrays that the base metrics share, block by block, and the walk over the blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import accumulators, host, segments
from offpol_diag.engine.host import here
from offpol_diag.engine.ratios import OVERFLOW
from offpol_diag.engine.scene import Scene
from offpol_diag.presets import Policy

BLOCK = 1 << 17
"""Tokens of a block: in smaller ones, being called at all costs numpy and torch more than the work."""

Array = Any
"""numpy's or torch's: what is asked of them goes by one name in both."""

FAR = math.log(1.1)
"""The least |Δ| beyond which tokens are counted."""
TAME = 3.0
"""Largest |Δ| for which r − 1 tells r, r² and e^|Δ| to 13 digits."""


class Room(dict[str, Any]):
    """Where arrays of a block are made, by name: memory [t] that the block before has left, ones at first."""

    def __init__(self, memory: dict[str, NDArray[np.float64]], size: int, tokens: int) -> None:
        super().__init__()
        self.memory, self.size, self.tokens = memory, size, tokens

    def __missing__(self, name: str) -> NDArray[np.float64]:
        if name not in self.memory:
            self.memory[name] = np.ones(self.size)
        self[name] = found = self.memory[name][: self.tokens]
        return found


class Nowhere(Room):
    """Where torch likes."""

    def __init__(self) -> None:
        super().__init__({}, 0, 0)

    def __missing__(self, name: str) -> None:  # type: ignore[override]
        return None


@dataclass(eq=False)
class Block:
    """Whole sequences of a batch.

    Attributes:
        batch: the packed batch.
        rows: which of its S sequences.
        tokens: which of its T tokens.
        offsets: where each sequence of the block begins, [s+1] from 0.
        room: where arrays are made.
        kit: numpy or torch, whose arrays are.
    """

    batch: Batch
    rows: slice
    tokens: slice
    offsets: Tensor
    room: Room = field(default_factory=Nowhere, repr=False)
    kit: Any = torch
    _probs: dict[Policy, Array] = field(default_factory=dict, repr=False)
    _sums: dict[Policy, tuple[Array, Array]] = field(default_factory=dict, repr=False)

    @classmethod
    def whole(cls, batch: Batch) -> Block:
        """All of a batch, as torch's arrays."""
        return cls(batch, slice(0, batch.sequences), slice(0, batch.tokens), batch.cu_seqlens)

    @classmethod
    def all(cls, batch: Batch) -> Iterator[Block]:
        """A batch in blocks; in one on a GPU, which has no use for smaller ones."""
        starts = batch.cu_seqlens
        if not here(batch.rollout):
            yield cls.whole(batch)
            return
        spans = segments.spans(starts, BLOCK)
        size = max((int(starts[last] - starts[first]) for first, last in spans), default=0)
        memory: dict[str, NDArray[np.float64]] = {}
        for first, last in spans:
            begin, end = int(starts[first]), int(starts[last])
            offsets = starts[first : last + 1] - begin
            room = Room(memory, size, end - begin)
            yield cls(batch, slice(first, last), slice(begin, end), offsets, room, np)

    @property
    def lengths(self) -> Tensor:
        """Tokens of each sequence, [s]."""
        return self.batch.lengths[self.rows]

    def owners(self, tokens: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which sequences some tokens are of, in the host's memory."""
        return np.searchsorted(self.offsets.numpy(), tokens, side="right") - 1

    @cached_property
    def ones(self) -> Array:
        """1 for every token, [t]."""
        return torch.ones_like(self.batch.rollout) if self.kit is torch else self.room["ones"]

    @cached_property
    def begins(self) -> NDArray[np.int64] | None:
        """Where the host sees sequences begin, if none is empty."""
        return None if self.kit is torch else segments.begins(self.offsets)

    def sum(self, x: Array) -> Array:
        """Over each sequence, [s]."""
        begins = self.begins
        return segments.total_of(x, self.offsets) if begins is None else np.add.reduceat(x, begins)

    @property
    def rollout(self) -> Array:
        """log π_rollout, [t]."""
        return self.log("rollout")

    @property
    def position(self) -> Tensor:
        """The index of each token in its response, [t]."""
        return self.batch.position[self.tokens]

    @property
    def advantages(self) -> Tensor | None:
        """Of each token, [t], or None."""
        return None if self.batch.advantages is None else self.batch.advantages[self.tokens]

    def log(self, policy: Policy) -> Array | None:
        """The log-probs of a policy, [t], or None when the dump lacks them."""
        found = self.batch.policy(policy)
        if found is None:
            return None
        return found[self.tokens] if self.kit is torch else found.numpy()[self.tokens]

    def terms(self, denominator: Policy, numerator: Policy) -> Terms | None:
        """What a pair of policies makes of every token; None when one of them is missing."""
        q, p = self.log(denominator), self.log(numerator)
        return None if q is None or p is None else Terms(self, denominator, numerator, q, p)

    def prob(self, policy: Policy) -> Array:
        """The probability of every token under a policy, [t]."""
        if policy not in self._probs:
            log = self.log(policy)
            assert log is not None
            self._probs[policy] = host.exp(log, self.room[policy])
        return self._probs[policy]

    def prob_sums(self, policy: Policy) -> tuple[Array, Array]:
        """The sums of the probabilities and of their squares, [s] each."""
        if policy not in self._sums:
            prob = self.prob(policy)
            self._sums[policy] = self.sum(prob), self.sum(self.kit.square(prob, out=self.room[""]))
        return self._sums[policy]

    def learn(self, policy: Policy, once: Array, twice: Array) -> None:
        """Learn the sums of the probabilities of a policy, and of their squares, from who has them."""
        self._sums[policy] = once, twice


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
    q: Array
    p: Array
    summed: dict[str, Array] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        self._kit, self._room = self.block.kit, self.block.room

    def sum(self, name: str) -> Array:
        """Over each sequence of the array of that name, [s], unless it was made already."""
        return self.summed[name] if name in self.summed else self.block.sum(getattr(self, name))

    @cached_property
    def delta(self) -> Array:
        """Δ, [t]."""
        return self._kit.subtract(self.p, self.q, out=self._room["delta"])

    @cached_property
    def span(self) -> tuple[Array, Array]:
        """The smallest and the largest Δ; (+inf, -inf) of no token."""
        return extremes(self.delta)

    @cached_property
    def reach(self) -> float:
        """The largest |Δ|; inf where the host would have to wait to learn it."""
        if self.block.kit is torch:
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
        return np.flatnonzero(self.size > FAR)

    def beyond(self, bound: float) -> Array:
        """Which tokens have |Δ| beyond a bound of at least `FAR`: where a host sees them; else [t] bool."""
        if self.block.kit is torch:
            return self.size > bound
        return self.far[self.size[self.far] > bound]

    @cached_property
    def size(self) -> Array:
        """|Δ|, [t]."""
        return self._kit.abs(self.delta, out=self._room["size"])

    @property
    def dd(self) -> Array:
        """Δ², [t]; for the moment."""
        return self._kit.square(self.delta, out=self._room[""])

    @cached_property
    def r1(self) -> Array:
        """r − 1, with Δ within what can be exponentiated, [t]."""
        wild = not self.reach <= OVERFLOW
        x = self._kit.clip(self.delta, -OVERFLOW, OVERFLOW, out=self._room[""]) if wild else self.delta
        return host.expm1(x, self._room["r1"])

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
        """e^Δ − 1 − Δ, [t]."""
        return self._kit.subtract(self.r1, self.delta, out=self._room["k3"])

    @property
    def mult(self) -> Array:
        """e^|Δ| − 1, [t]: the larger of r − 1 and |r − 1| / r; for the moment."""
        kit, out = self._kit, self._room[""]
        if self.tame:
            return kit.maximum(
                self.r1, kit.divide(self.off, kit.add(self.r1, 1.0, out=out), out=out), out=out
            )
        return host.expm1(kit.clip(self.size, 0.0, OVERFLOW, out=out), out)

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
        """(π_train − π_rollout)², [t]; for the moment."""
        return self._kit.square(self.diff, out=self._room[""])

    @property
    def cross(self) -> Array:
        """π_rollout (π_train − π_rollout), [t]; for the moment."""
        return self._kit.multiply(self.block.prob(self.denominator), self.diff, out=self._room[""])

    @property
    def pq(self) -> Array:
        """π_train π_rollout, [t]; for the moment."""
        prob = self.block.prob
        return self._kit.multiply(prob(self.numerator), prob(self.denominator), out=self._room[""])


def extremes(x: Array) -> tuple[Array, Array]:
    """Smallest and largest, of numpy's as of torch's; (+inf, -inf) of nothing."""
    if isinstance(x, Tensor):
        return accumulators.extremes(x)
    return (np.minimum.reduce(x), np.maximum.reduce(x)) if len(x) else (math.inf, -math.inf)


def joined(parts: Sequence[Array]) -> Tensor:
    """What one block after the other left, along the last dimension."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts), dim=-1)
    return torch.from_numpy(np.concatenate(parts, axis=-1))


class Pair(Protocol):
    """Two policies, and what the names of their numbers begin with."""

    @property
    def prefix(self) -> str:
        """What tells the pair apart."""
        ...

    @property
    def denominator(self) -> Policy:
        """The policy below."""
        ...

    @property
    def numerator(self) -> Policy:
        """The policy above."""
        ...


class Watch(Protocol):
    """Sees what a pair of policies makes of the tokens of one block after the other."""

    def __init__(self, scene: Scene, pair: Pair) -> None: ...

    def see(self, terms: Terms) -> None:
        """The next block."""


W = TypeVar("W", bound=Watch)


def walk(scene: Scene, asked: Mapping[Pair, Sequence[type[Watch]]]) -> None:
    """Let all see every block, in the order asked; a pair of which the batch lacks a policy has no blocks."""
    for pair, watches in _walked(scene, asked).items():
        for watch in watches:
            scene.once((type(watch), pair.prefix), lambda watch=watch: watch)  # type: ignore[misc]


def seen(scene: Scene, pair: Pair, make: type[W]) -> W:
    """Who saw every block; from a walk of its own where there was none."""
    return scene.once((make, pair.prefix), lambda: _walked(scene, {pair: (make,)})[pair][0])


def _walked(scene: Scene, asked: Mapping[Pair, Sequence[type[W]]]) -> dict[Pair, list[W]]:
    found = {pair: [make(scene, pair) for make in makes] for pair, makes in asked.items()}
    with np.errstate(all="ignore"):  # inf - inf is a NaN that the readers of sums know
        for block in Block.all(scene.batch):
            for pair, watches in found.items():
                terms = block.terms(pair.denominator, pair.numerator)
                for watch in watches if terms else ():
                    watch.see(terms)  # type: ignore[arg-type]
    return found
