"""Draws as the product sees them: packed batches, or a Parquet file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

import numpy as np
import torch

from benchmarks.advice.draws import Draw
from benchmarks.advice.worlds import Array, Ints
from offpol_diag import DumpWriter
from offpol_diag.batch import Batch
from offpol_diag.candidates import presets
from offpol_diag.metrics import alignment
from offpol_diag.metrics.alignment import Folds
from offpol_diag.metrics.scene import Scene
from offpol_diag.near import Near
from offpol_diag.resample import mix

TRAIN = "old"


@dataclass(frozen=True)
class Seen:
    """What policies are told of a dump, summed.

    Attributes:
        folds: the product's sums for its estimates.
        columns: those there are.
        sequences, tokens: how many.
        log_ratio, squared, apart: Σ Δ, Σ r² and Σ |π − π_rollout| over tokens.
    """

    folds: Folds
    columns: frozenset[str]
    sequences: int
    tokens: int
    log_ratio: float
    squared: float
    apart: float

    def merge(self, other: Seen) -> Seen:
        """Of both parts."""
        return Seen(
            self.folds.merge(other.folds),
            self.columns & other.columns,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
            self.log_ratio + other.log_ratio,
            self.squared + other.squared,
            self.apart + other.apart,
        )


def joined(parts: Iterable[Seen]) -> Seen:
    """Of all parts."""
    return reduce(Seen.merge, parts)


def seen(drawn: Draw, token_ids: bool = True, advantages: bool = True) -> Seen:
    """One piece of a dump, with or without those columns."""
    packed = batch(drawn, token_ids, advantages)
    candidates = presets(TRAIN)
    scene = Scene.of(packed, seed=0, replicates=2, near=Near.of(candidates))
    folds = alignment.sums(scene, candidates)
    scene.forget()
    delta = drawn.delta[drawn.there]
    apart = np.abs(np.exp(drawn.train) - np.exp(drawn.rollout))[drawn.there]
    there = {"token_ids": token_ids, "advantages": advantages}
    return Seen(
        folds,
        frozenset(name for name, given in there.items() if given),
        len(drawn.prompt),
        len(delta),
        float(delta.sum()),
        float(np.exp(np.clip(2 * delta, -40, 40)).sum()),
        float(apart.sum()),
    )


def batch(drawn: Draw, token_ids: bool = True, advantages: bool = True) -> Batch:
    """The product's packed batch."""
    there, lengths = drawn.there, torch.from_numpy(drawn.lengths)
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    position = np.broadcast_to(np.arange(there.shape[1]), there.shape)[there]
    advantage = np.broadcast_to(drawn.advantage[:, None], there.shape)[there]
    return Batch(
        rollout=torch.from_numpy(drawn.rollout[there]),
        old=torch.from_numpy(drawn.train[there]),
        cu_seqlens=starts,
        cu_runs=starts,
        position=torch.from_numpy(np.ascontiguousarray(position)),
        key=mix(torch.from_numpy(drawn.group)),
        masked=torch.zeros_like(lengths),
        advantages=torch.from_numpy(np.ascontiguousarray(advantage)) if advantages else None,
        token_ids=torch.from_numpy(drawn.token[there]) if token_ids else None,
    )


def write(path: Path, pieces: Iterable[Draw]) -> None:
    """A dump in a file, as a trainer writes it."""
    with DumpWriter(path, dtype="float64") as writer:
        for drawn in pieces:
            writer.write(
                rollout_log_probs=_ragged(drawn, drawn.rollout),
                old_log_probs=_ragged(drawn, drawn.train),
                token_ids=_ragged(drawn, drawn.token),
                advantages=list(drawn.advantage),
                rewards=list(drawn.reward),
                group_id=[str(group) for group in drawn.group],
            )


def _ragged(drawn: Draw, values: Array | Ints) -> list[Array]:
    return [row[there] for row, there in zip(values, drawn.there, strict=True)]
