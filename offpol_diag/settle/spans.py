"""Which rows of a batch are of which trainer batch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from offpol_diag import scope
from offpol_diag.batch import Batch
from offpol_diag.ratios import Level
from offpol_diag.readers import columns
from offpol_diag.scope import Label


@dataclass(frozen=True)
class Spans:
    """Which rows of a batch are of which trainer batch.

    Attributes:
        rows: of every label, runs of sequences, from one to before another.
        starts: where sequences begin in the tokens, at the ends of the runs.
        filled: which sequences have a token, [S] bool; None where all have.
    """

    rows: dict[Label, list[tuple[int, int]]]
    starts: dict[int, int]
    filled: Tensor | None

    @classmethod
    def of(cls, batch: Batch) -> Spans:
        """Told by the labels of its sequences."""
        rows: dict[Label, list[tuple[int, int]]] = {}
        for label, first, last in _runs(batch):
            rows.setdefault(label, []).append((first, last))
        ends = sorted({end for runs in rows.values() for run in runs for end in run})
        starts = batch.cu_seqlens[ends].tolist()
        filled = batch.lengths > 0
        return cls(rows, dict(zip(ends, starts, strict=True)), None if bool(filled.all()) else filled)

    def split(self, level: Level) -> Iterator[tuple[Label, Tensor]]:
        """The values of each trainer batch; sequences without a token have none."""
        for label, runs in self.rows.items():
            parts = [self._part(level, *run) for run in runs]
            yield label, parts[0] if len(parts) == 1 else torch.cat(parts)

    def _part(self, level: Level, begin: int, end: int) -> Tensor:
        if level.per == "token":
            return level.values[self.starts[begin] : self.starts[end]]
        x = level.values[begin:end]
        return x if self.filled is None else x[self.filled[begin:end]]


def _runs(batch: Batch) -> Iterator[tuple[Label, int, int]]:
    """Adjacent sequences of one trainer batch: its label, from which to before which."""
    steps = batch.scalars.get(columns.STEP) or [None]
    if batch.sequences and steps.count(steps[0]) == len(steps):  # most batches are of one step
        yield scope.labels(batch.rows(0, 1))[0], 0, batch.sequences
        return
    first = 0
    for label, run in groupby(scope.labels(batch)):
        last = first + len(list(run))
        yield label, first, last
        first = last
