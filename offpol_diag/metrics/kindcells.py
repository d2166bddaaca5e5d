"""Σ (r − 1) and Σ 1 by fold and kind of token, on a CPU, block by block.

What they tell is how much of r belongs to the kind of a token (`alignment.systematic`).
"""

from __future__ import annotations

import numpy as np
import torch

from offpol_diag.batch import Batch
from offpol_diag.metrics.coordinates import (
    BUCKETS,
    FOLDS,
    LIKELY,
    Floats,
    Ints,
    classes,
    octave,
    of_classes,
    sign,
)
from offpol_diag.metrics.foldbins import FoldBins
from offpol_diag.metrics.tokenblocks import Block, signed
from offpol_diag.tables import LANES

MINUS = np.float64(-1.0).view(np.uint64)


class ByClass:
    """Cells where kinds of tokens are told by class: hashed when all are there.

    Most tokens have the class of the one before, so that lanes pay (`tables.py`).
    """

    def __init__(self, batch: Batch, fold: Ints) -> None:
        self._fold = fold
        self._octaves = int(octave(batch.position.max())) + 1 if batch.tokens else 1
        self._size = LIKELY * self._octaves * LANES
        self._sums = torch.zeros(2, FOLDS * self._size, dtype=torch.float64)
        self._ones, self._lane = torch.ones(0, dtype=torch.float64), np.empty(0, np.int16)

    def add(self, block: Block, off: Floats) -> None:
        """r − 1 of one more block."""
        if len(block.rollout) > len(self._lane):
            self._lane = np.tile(np.arange(LANES, dtype=np.int16), len(block.rollout) // LANES + 1)
            self._ones = torch.ones(len(self._lane), dtype=torch.float64)
        within = classes(block.rollout, block.position, self._octaves)
        within *= np.int16(LANES)
        within += self._lane[: len(within)]
        at = np.repeat(self._fold[block.rows] * self._size, block.lengths)
        at += within
        for sums, x in zip(self._sums, (torch.from_numpy(off), self._ones), strict=True):
            sums.scatter_add_(0, torch.from_numpy(at), x)

    def found(self) -> Floats:
        """Sums of r − 1 and of 1 by fold and bucket, [2, FOLDS, BUCKETS]."""
        hashed = of_classes(torch.arange(LIKELY * self._octaves).repeat_interleave(LANES), self._octaves)
        first = np.arange(0, 2 * FOLDS * BUCKETS, BUCKETS)
        at = first[:, None] + (hashed.numpy() & (BUCKETS - 1))
        x = self._sums.view(2 * FOLDS, -1).numpy() * sign(hashed).numpy()
        sums = np.bincount(at.ravel(), x.ravel(), 2 * FOLDS * BUCKETS).astype(np.float64, copy=False)
        return sums.reshape(2, FOLDS, BUCKETS)


class ByBigram:
    """Cells where kinds of tokens are told by token ids."""

    def __init__(self, batch: Batch, fold: Ints) -> None:
        self._bins = FoldBins(fold, {"off": [None], "there": [None]})

    def add(self, block: Block, off: Floats) -> None:
        """r − 1 of one more block."""
        bucket, against = block.bigrams
        values = {"off": signed(-off, against), "there": (against ^ MINUS).view(np.float64)}
        self._bins.add(block.rows, block.lengths, bucket, values)

    def found(self) -> Floats:
        """Sums of r − 1 and of 1 by fold and bucket, [2, FOLDS, BUCKETS]."""
        return np.stack([self._bins.sums(kind)[0] for kind in ("off", "there")])
