"""A batch as blocks of whole sequences, in arrays of a CPU: a block's arrays stay in a core's cache."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from offpol_diag import host
from offpol_diag.metrics.coordinates import BOUND, BUCKETS, SIGN, Floats, Ints, bigrams, lone
from offpol_diag.metrics.nearsums import spans
from offpol_diag.ratios import Ratios

Words = npt.NDArray[np.uint64]
Placed = tuple[Ints, Words]
"""The bucket of each token, and the bit that is the sign of a float64, set where the token's sign is +."""

BLOCK = 1 << 15
"""Tokens of a block."""
TOP = np.uint64(1 << 63)


@dataclass(frozen=True)
class Block:
    """Tokens of whole sequences.

    Attributes:
        rows: which of all sequences they are.
        lengths: of those, [S].
        filled: which of them have a token, …
        begins: … and where those begin.
        far: which of all far tokens are theirs, and …
        at: … where those stand here.
        rollout, train: log-probs, [T].
        position: [T].
        advantages: [T], or None.
        ids: of tokens, [T], or None.
    """

    rows: slice
    lengths: Ints
    filled: Ints
    begins: Ints
    far: slice
    at: Ints
    rollout: Floats
    train: Floats
    position: Ints
    advantages: Floats | None
    ids: Ints | None

    def add(self, x: Floats, sums: Floats) -> None:
        """x [T] to the sums of all sequences."""
        if len(x):
            sums[self.rows.start + self.filled] += np.add.reduceat(x, self.begins)

    def off(self) -> Floats:
        """r − 1, r at most e^`BOUND`, [T]."""
        return expm1(at_most(self.train - self.rollout, BOUND))

    def coordinates(self, of_group: Ints) -> Placed:
        """Where every token's coordinate is placed, with the mixed key of each group."""
        if self.advantages is not None and self.ids is not None:
            return self.bigrams
        of_group = np.repeat(of_group[self.rows], self.lengths)
        return placed(lone(of_group, self.position, self.rollout))

    @cached_property
    def bigrams(self) -> Placed:
        """Where every token's bigram is placed."""
        assert self.ids is not None
        return placed(bigrams(self.ids, self.begins))


def blocks(ratios: Ratios, far: Ratios) -> Iterator[Block]:
    """The whole batch, in order."""
    assert far.index is not None
    batch, index = ratios.batch, far.index.numpy()
    starts, lengths = batch.cu_seqlens.numpy(), batch.lengths.numpy()
    for first, last in spans(batch.cu_seqlens, BLOCK):
        rows, here = slice(first, last), slice(starts[first], starts[last])
        filled = np.flatnonzero(lengths[rows])
        fars = slice(*np.searchsorted(index, (here.start, here.stop)).tolist())
        yield Block(
            rows,
            lengths[rows],
            filled,
            starts[rows][filled] - here.start,
            fars,
            index[fars] - here.start,
            batch.rollout[here].numpy(),
            ratios.train[here].numpy(),
            batch.position[here].numpy(),
            None if batch.advantages is None else batch.advantages[here].numpy(),
            None if batch.token_ids is None else batch.token_ids[here].numpy(),
        )


def expm1(x: Floats) -> Floats:
    """e^x − 1."""
    return host.expm1(torch.from_numpy(x)).numpy()


def at_most(x: Floats, bound: float) -> Floats:
    """In place."""
    torch.from_numpy(x).clamp_(max=bound)  # numpy takes four times as long
    return x


def placed(hashed: Ints) -> Placed:
    """By hashes, [T]."""
    against = np.left_shift(hashed.view(np.uint64), np.uint64(63 - SIGN))
    against &= TOP
    return hashed & (BUCKETS - 1), against


def signed(minus: Floats, against: Words) -> Floats:
    """x times the sign of each token, of −x, in place."""
    bits = minus.view(np.uint64)
    bits ^= against
    return minus
