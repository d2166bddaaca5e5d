"""What stands for the policy gradient under each correction, summed per fold of a dump.

The gradient itself is not in a dump. What stands for it is a vector with one coordinate for each kind of
token: a token adds A (1 − π_train) times its weight to the coordinate of its bigram (token id and the one
before it), which is the coordinate of the score of a softmax over those tokens that belongs to the sampled
one. Coordinates are hashed into `BUCKETS` with random signs, so that inner products are kept on average
(count sketch: Charikar, Chen & Farach-Colton 2002). Sequences are dealt into `FOLDS` by their group, so that
products of different folds are free of the noise that a square has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import segments, tables
from offpol_diag.batch import Batch
from offpol_diag.host import here
from offpol_diag.metrics import foldblocks
from offpol_diag.metrics.coordinates import BOUND, BUCKETS, FOLDS, coordinates, fold, kinds, sign
from offpol_diag.metrics.outcome import PER_SEQUENCE, Outcome, of
from offpol_diag.metrics.pieces import pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios


@dataclass(frozen=True)
class Folds:
    """Stand-ins for the gradient under M corrections, per fold.

    Attributes:
        names: of the corrections.
        sums: [M, FOLDS, BUCKETS].
        weights: Σ of the final weights, 0 where rejected, [M].
        cells: Σ (r − 1) and Σ 1 by kind of token, r bounded by `BOUND`, [2, FOLDS, BUCKETS].
        spread: Σ (r − 1)² over all tokens, [].
        moved: Σ A (r − 1) per fold, r at most e^`BOUND`, [FOLDS]; 0 without advantages.
        sequences: with a token, per fold, [FOLDS].
        tokens: in all, [].
    """

    names: tuple[str, ...]
    sums: Tensor
    weights: Tensor
    cells: Tensor
    spread: Tensor
    moved: Tensor
    sequences: Tensor
    tokens: Tensor

    def merge(self, other: Folds) -> Folds:
        """Sums of both parts."""
        if self.names != other.names:
            raise ValueError("sums of different corrections do not merge")
        return Folds(
            self.names,
            self.sums + other.sums,
            self.weights + other.weights,
            self.cells + other.cells,
            self.spread + other.spread,
            self.moved + other.moved,
            self.sequences + other.sequences,
            self.tokens + other.tokens,
        )


def sums(scene: Scene, candidates: Sequence[Preset]) -> Folds:
    """What one batch adds; the candidates have one train side."""
    batch, candidates = scene.batch, tuple(candidates)
    found = (foldblocks.found if _by_block(batch, candidates) else _found)(scene, candidates)
    there = (batch.lengths > 0).to(torch.float64)
    return Folds(
        names=tuple(preset.name for preset in candidates),
        sequences=there.new_zeros(FOLDS).index_add(0, fold(batch), there),
        tokens=there.new_full((), float(batch.tokens)),
        **found,
    )


def _by_block(batch: Batch, candidates: tuple[Preset, ...]) -> bool:
    return here(batch.rollout) and foldblocks.alike(candidates)


def _found(scene: Scene, candidates: Sequence[Preset]) -> dict[str, Tensor]:
    """All other fields, with a pass over the tokens for each candidate: on a GPU, or whatever those are."""
    ratios = scene.ratios(candidates[0].policy)
    cells, spread = _cells(scene, ratios)
    rows = [_row(scene, preset) for preset in candidates]
    return {
        "sums": torch.stack([row for row, _ in rows]).reshape(len(rows), FOLDS, BUCKETS),
        "weights": torch.stack([weight for _, weight in rows]),
        "cells": cells,
        "spread": spread,
        "moved": _moved(ratios),
    }


def _row(scene: Scene, preset: Preset) -> tuple[Tensor, Tensor]:
    """The sums of one correction, [FOLDS * BUCKETS], and the sum of its weights."""
    done = pieces(scene, preset)
    times = foldblocks.times(done.first)
    parts = [_part(scene, of(part, rules), rules, times) for part, rules in scene.parts(done.preset)]
    return torch.stack(parts).sum(0), done.sums.first.sum()


def _part(scene: Scene, done: Outcome, rules: Preset, times: Tensor | None) -> Tensor:
    if times is None:  # near tokens are then alike for all presets with the same kind of weight
        key = ("alignment", rules.weight, tuple(rule for rule in rules.reject if rule.on_tokens))
        return done.ratios.once(key, lambda: _added(scene, done, rules, None))
    return _added(scene, done, rules, times)


def _added(scene: Scene, done: Outcome, rules: Preset, times: Tensor | None) -> Tensor:
    ratios = done.ratios
    code, score = ratios.once("alignment scores", lambda: _scores(scene, ratios))
    values = score
    if rules.weight is not None and rules.weight.over not in PER_SEQUENCE and done.weighed is not None:
        values = values * done.weighed.final.values
    if done.kept.tokens is not None:
        values = torch.where(done.kept.tokens, values, 0.0)
    if times is not None:
        values = values * segments.spread(times, ratios.batch.cu_seqlens)
    return _binned(code, values)


def _binned(code: Tensor, values: Tensor) -> Tensor:
    """Sums by fold and bucket, [FOLDS * BUCKETS] float64; of no tokens a count would make integers."""
    return tables.total(code, FOLDS * BUCKETS, values).to(torch.float64)


def _scores(scene: Scene, ratios: Ratios) -> tuple[Tensor, Tensor]:
    """Of each token of a part: the place of its coordinate, int64, and ±A (1 − π_train)."""
    index = ratios.index
    code, sign = scene.once("coordinates", lambda: _placed(scene.batch, coordinates(scene.batch)))
    code, sign = (x if index is None else x.index_select(0, index) for x in (code, sign))
    score = sign * -torch.expm1(ratios.train.clamp(max=0.0))
    advantages = ratios.batch.advantages
    return code, score if advantages is None else score * advantages


def _cells(scene: Scene, ratios: Ratios) -> tuple[Tensor, Tensor]:
    code, sign = scene.once("kinds", lambda: _placed(scene.batch, kinds(scene.batch)))
    off = torch.expm1(ratios.delta.clamp(-BOUND, BOUND))
    added = torch.stack([_binned(code, x) for x in (sign * off, sign)])
    return added.reshape(2, FOLDS, BUCKETS), off.square().sum()


def _moved(ratios: Ratios) -> Tensor:
    """Σ A (r − 1) per fold, [FOLDS]: a trainer that has moved along the gradient raised r where A > 0."""
    batch = ratios.batch
    if batch.advantages is None:
        return torch.zeros(FOLDS, dtype=torch.float64, device=batch.rollout.device)
    off = torch.expm1(ratios.delta.clamp(max=BOUND)) * batch.advantages
    return tables.total(fold(batch), FOLDS, segments.total(off, batch.cu_seqlens))


def _placed(batch: Batch, hashed: Tensor) -> tuple[Tensor, Tensor]:
    """Fold and bucket as one number, and the sign."""
    at = segments.spread(fold(batch) * BUCKETS, batch.cu_seqlens) + (hashed & (BUCKETS - 1))
    return at, sign(hashed)
