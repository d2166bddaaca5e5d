"""Runs of tokens of one sequence, position octave and advantage sign.

Sums over locations whose tokens are adjacent need no code per token: they are sums over runs.
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
    """The M runs of a batch in host memory.

    Attributes:
        begins: first token of each run, and the end of the last, [M+1].
        rows: sequence of each run, [M].
        octaves: octave of its positions, [M].
        sequences: number of sequences, S.
        signs: sign of its advantages, [M]: 0 for A < 0, 1 for A = 0, 2 for A > 0; None without advantages, or
            where they change sign so often that single tokens are cheaper.
    """

    begins: Tensor
    rows: Tensor
    octaves: Tensor
    sequences: int
    signs: Tensor | None

    @classmethod
    def of(cls, batch: Batch, octaves: int) -> Stretches:
        """Find the runs; the last of `octaves` octaves includes all later positions."""
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
        """Index of the first run of each sequence, [S+1]."""
        return np.searchsorted(self.rows.numpy(), np.arange(self.sequences + 1))

    def within(self, block: Block) -> tuple[Ints, Tensor]:
        """Return the first tokens of a block's runs, and the index of each sequence's first run, [s+1]."""
        firsts = self.firsts[block.rows.start : block.rows.stop + 1]
        begins = self.begins.numpy()[firsts[0] : firsts[-1]] - block.tokens.start
        return begins, torch.from_numpy(firsts - firsts[0])


def _by_octave(runs: Ints, positions: Ints, last: int) -> tuple[Ints, Ints]:
    """Return the starts of runs of one octave, with the end, and their octaves."""
    ends = positions + np.diff(runs) - 1
    low, high = (np.minimum(_octave(x), last) for x in (positions, ends))
    many = high - low + 1
    first, owner = np.cumsum(many) - many, np.repeat(np.arange(len(low)), many)
    octave = np.arange(len(owner)) - (first - low)[owner]
    begins = runs[owner] + (1 << octave) - 1 - positions[owner]
    begins[first] = runs[:-1]
    return np.append(begins, runs[-1]), octave


def _octave(x: Ints) -> Ints:
    """Compute ⌊log2(x + 1)⌋; negative x count as 0."""
    found: Ints = np.frexp(np.maximum(x + 1, 1).astype(np.float64))[1].astype(np.int64) - 1
    return found


def _signs(batch: Batch) -> tuple[NDArray[np.int8] | None, Ints | None]:
    """Return the sign of each token's advantage, [T], and where it changes (None if that is often)."""
    if batch.advantages is None:
        return None, None
    x = batch.advantages.numpy()
    sign = np.greater(x, 0.0).view(np.int8) - np.less(x, 0.0).view(np.int8) + np.int8(1)
    cuts = np.flatnonzero(sign[1:] != sign[:-1]) + 1
    return sign, None if 8 * len(cuts) > len(x) else cuts
