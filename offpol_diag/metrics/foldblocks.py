"""The sums over folds on a CPU: block by block, so that a block's arrays stay in a core's cache.

To a near token a candidate does nothing, or weighs it by r; whatever else it does, it does to whole
sequences. So near tokens are binned twice for all candidates; far ones are looked at candidate by candidate.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.metrics.coordinates import BOUND, BUCKETS, FOLDS, Floats, fold
from offpol_diag.metrics.foldbins import FoldBins, Times
from offpol_diag.metrics.kindcells import ByBigram, ByClass
from offpol_diag.metrics.outcome import PER_SEQUENCE, Outcome, applied, of
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.tokenblocks import BLOCK, Block, at_most, blocks, expm1, signed
from offpol_diag.near import Near, splits
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios
from offpol_diag.resample import mix

RADIUS = 0.4
"""Largest |Δ| of a near token here, nats: no candidate has a bound within."""


@cache
def alike(candidates: tuple[Preset, ...]) -> bool:
    """Whether near tokens are alike for every one of the candidates, but for what weighs them by r."""
    bare = [replace(applied(one), loss="reinforce") for one in candidates]  # no clip matters here
    near = Near.of(bare)
    return not (near.rules or near.tails) and all(splits(one, RADIUS) for one in bare)


def found(scene: Scene, candidates: Sequence[Preset]) -> dict[str, Tensor]:
    """Fields of `Folds` by name, of candidates that are `alike` and have one train side."""
    ratios = scene.ratios(candidates[0].policy)
    far = scene.own(_far(scene, ratios))
    acts = [_Act.of(of(far, applied(one))) for one in candidates]
    sums = _Sums(ratios.batch, far, acts)
    with np.errstate(all="ignore"):  # what overflows is unknown, and said to be
        for block in blocks(ratios, far):
            sums.add(block)
        made = sums.found()
    return {name: torch.from_numpy(np.asarray(x)) for name, x in made.items()}


def _far(scene: Scene, ratios: Ratios) -> Ratios:
    """Far tokens: of those that are far for the presets, where that tells."""
    near = scene.near
    told = near is not None and near.radius <= RADIUS
    index = _beyond(scene.apart[0].of(ratios.policy)) if told else _beyond(ratios)
    return Ratios(ratios.batch.some(index), ratios.policy, ratios.settled, whole=ratios)


def _beyond(ratios: Ratios) -> Tensor:
    """Which tokens of all are far."""
    train, rollout = ratios.train.numpy(), ratios.batch.rollout.numpy()
    each = [np.empty(0, np.int64)]
    for at in range(0, len(train), BLOCK):
        gap = train[at : at + BLOCK] - rollout[at : at + BLOCK]
        each.append(np.flatnonzero(np.abs(gap, out=gap) > RADIUS) + at)
    found = torch.from_numpy(np.concatenate(each))
    return found if ratios.index is None else ratios.index[found]


# ---------------------------------------------------------------- what candidates do


@dataclass(frozen=True)
class _Act:
    """What a candidate does.

    Attributes:
        kind: of values of near tokens: `plain`, or `weighed` by r.
        times: what it multiplies sequences by.
        far: the weights of far tokens, 0 where one is dropped by itself, [K].
    """

    kind: str
    times: Times
    far: Floats

    @classmethod
    def of(cls, done: Outcome) -> _Act:
        """By what it does to far tokens."""
        own, weight = times(done), done.preset.weight
        weighs = weight is not None and weight.over not in PER_SEQUENCE
        far = torch.ones(done.ratios.batch.tokens, dtype=torch.float64)
        if weighs and done.weighed is not None:
            far = done.weighed.final.values
        if done.kept.tokens is not None:
            far = torch.where(done.kept.tokens, far, 0.0)
        return cls("weighed" if weighs else "plain", None if own is None else own.numpy(), far.numpy())


def times(done: Outcome) -> Tensor | None:
    """What all tokens of a sequence are multiplied by, [S]; None where that is 1 for every preset like it."""
    preset, passed = done.preset, done.kept.sequences
    if done.weighed is not None and preset.weight is not None and preset.weight.over in PER_SEQUENCE:
        return done.weighed.final.values * passed
    judged = preset.veto is not None or any(not rule.on_tokens for rule in preset.reject)
    return passed.to(torch.float64) if judged else None


# ---------------------------------------------------------------- the sums


class _Sums:
    """Sums over the tokens of a batch while its blocks go by."""

    def __init__(self, batch: Batch, far: Ratios, acts: Sequence[_Act]) -> None:
        self._far, self._acts, self._lengths = far.batch, acts, batch.lengths.numpy()
        self._fold, self._group = fold(batch).numpy(), mix(batch.key).numpy()
        kinds = {kind: [act.times for act in acts if act.kind == kind] for kind in ("plain", "weighed")}
        self._near = FoldBins(self._fold, kinds)
        self._cells = (ByClass if batch.token_ids is None else ByBigram)(batch, self._fold)
        self._moved, self._ratio = np.zeros(batch.sequences), np.zeros(batch.sequences)
        self._bucket, self._score = np.empty(far.batch.tokens, np.int64), np.empty(far.batch.tokens)
        self._spread = 0.0

    def add(self, block: Block) -> None:
        """One more block; each once."""
        off, at = block.off(), block.at
        bucket, against = block.coordinates(self._group)
        score = expm1(at_most(block.train.copy(), 0.0))
        if block.advantages is not None:
            score *= block.advantages
            block.add(off * block.advantages, self._moved)
        score = signed(score, against)
        self._bucket[block.far], self._score[block.far] = bucket[at], score[at]
        ratio = off + 1
        score[at] = ratio[at] = 0.0
        block.add(ratio, self._ratio)
        ratio *= score
        self._near.add(block.rows, block.lengths, bucket, {"plain": score, "weighed": ratio})
        torch.from_numpy(off).clamp_(min=math.expm1(-BOUND))
        self._spread += float(off @ off)
        self._cells.add(block, off)

    def found(self) -> dict[str, object]:
        """By the name of the field of `Folds`."""
        near = {kind: iter(self._near.sums(kind)) for kind in ("plain", "weighed")}
        fars = self._far.lengths.numpy()
        rows = np.repeat(np.arange(len(fars)), fars)
        code = self._fold[rows] * BUCKETS + self._bucket
        sums, weights = [], []
        for act in self._acts:
            times = 1.0 if act.times is None else act.times
            far = act.far if act.times is None else act.far * act.times[rows]
            sums.append(next(near[act.kind]))
            if len(code):
                sums[-1] += np.bincount(code, self._score * far, FOLDS * BUCKETS).reshape(FOLDS, BUCKETS)
            n = self._ratio if act.kind == "weighed" else self._lengths - fars
            weights.append(float((n * times).sum() + far.sum()))
        return {
            "sums": np.stack(sums),
            "weights": np.array(weights),
            "cells": self._cells.found(),
            "spread": np.array(self._spread),
            "moved": np.bincount(self._fold, self._moved, FOLDS),
        }
