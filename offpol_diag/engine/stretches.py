"""Stretches of a sequence in which nothing changes that places are told by: one octave, one sign.

Sums over places whose tokens stand together need no code for each token: they are sums over runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine.terms import Block

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Stretches:
    """M stretches of a batch in the host's memory.

    Attributes:
        begins: where each begins and the last one ends, [M+1].
        rows: which sequence each is of, [M].
        octaves: of its positions, [M].
        sequences: S.
        signs: of its advantages, [M]: 0 below zero, 1 at it, 2 above; None where there are none, or where
            they change so often that they are better looked at token by token.
    """

    begins: Tensor
    rows: Tensor
    octaves: Tensor
    sequences: int
    signs: Tensor | None

    @classmethod
    def of(cls, batch: Batch, octaves: int) -> Stretches:
        """With the last of so many octaves for all that is beyond it."""
        runs = batch.cu_runs.numpy()
        begins, octave = _by_octave(runs, batch.position.numpy()[runs[:-1]], octaves - 1)
        sign, cuts = _signs(batch)
        if cuts is not None and len(cuts):
            within = np.searchsorted(begins, cuts, side="right") - 1
            new = begins[within] != cuts
            begins, octave = (
                np.insert(x, within[new] + 1, y)
                for x, y in ((begins, cuts[new]), (octave, octave[within[new]]))
            )
        rows = np.searchsorted(batch.cu_seqlens.numpy(), begins[:-1], side="right") - 1
        signs = None if cuts is None or sign is None else sign[begins[:-1]].astype(np.int64)
        of_signs = None if signs is None else torch.from_numpy(signs)
        return cls(
            torch.from_numpy(begins),
            torch.from_numpy(rows),
            torch.from_numpy(octave),
            batch.sequences,
            of_signs,
        )

    @cached_property
    def firsts(self) -> Ints:
        """Where the stretches of each sequence begin among all, [S+1]."""
        return np.searchsorted(self.rows.numpy(), np.arange(self.sequences + 1))

    def within(self, block: Block) -> tuple[Ints, Tensor]:
        """Of one block: where its stretches begin, and where those of each sequence do among them, [s+1]."""
        firsts = self.firsts[block.rows.start : block.rows.stop + 1]
        begins = self.begins.numpy()[firsts[0] : firsts[-1]] - block.tokens.start
        return begins, torch.from_numpy(firsts - firsts[0])


def _by_octave(runs: Ints, positions: Ints, last: int) -> tuple[Ints, Ints]:
    """Where stretches of one octave begin, and the end, and their octaves."""
    ends = positions + np.diff(runs) - 1
    low, high = (np.minimum(_octave(x), last) for x in (positions, ends))
    many = high - low + 1
    first, owner = np.cumsum(many) - many, np.repeat(np.arange(len(low)), many)
    octave = np.arange(len(owner)) - (first - low)[owner]
    begins = runs[owner] + (1 << octave) - 1 - positions[owner]
    begins[first] = runs[:-1]
    return np.append(begins, runs[-1]), octave


def _octave(x: Ints) -> Ints:
    """⌊log2(x + 1)⌋, of what is below 0 as of 0."""
    found: Ints = np.frexp(np.maximum(x + 1, 1).astype(np.float64))[1].astype(np.int64) - 1
    return found


def _signs(batch: Batch) -> tuple[NDArray[np.int8] | None, Ints | None]:
    """The sign of the advantage of each token, [T], and where it changes, unless that is often."""
    if batch.advantages is None:
        return None, None
    x = batch.advantages.numpy()
    sign = np.greater(x, 0.0).view(np.int8) - np.less(x, 0.0).view(np.int8) + np.int8(1)
    cuts = np.flatnonzero(sign[1:] != sign[:-1]) + 1
    return sign, None if 8 * len(cuts) > len(x) else cuts
