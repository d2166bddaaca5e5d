"""What stands for the policy gradient under each correction, summed per fold of a dump.

The gradient itself is not in a dump. What stands for it is a vector with one coordinate for each kind of
token: a token adds A (1 − π_train) times its weight to the coordinate of its bigram (token id and the one
before it), which is the coordinate of the score of a softmax over those tokens that belongs to the sampled
one. Coordinates are hashed into `BUCKETS` with random signs, so that inner products are kept on average
(count sketch: Charikar, Chen & Farach-Colton 2002). Sequences are dealt into `FOLDS` by their group, so that
products of different folds are free of the noise that a square has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import segments, tables
from offpol_diag.batch import Batch
from offpol_diag.metrics.outcome import PER_SEQUENCE, Outcome, of
from offpol_diag.metrics.pieces import Pieces, pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios
from offpol_diag.resample import mix

FOLDS, BUCKETS = 32, 256
BOUND = math.log(5)
"""Largest |Δ| with which a token counts among its kind: a few broken ones must not be all there is to see."""


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
    batch = scene.batch
    ratios = scene.ratios(candidates[0].policy)
    cells, spread = _cells(scene, ratios)
    rows = [_row(scene, preset) for preset in candidates]
    there = (batch.lengths > 0).to(torch.float64)
    return Folds(
        tuple(preset.name for preset in candidates),
        torch.stack([row for row, _ in rows]).reshape(len(rows), FOLDS, BUCKETS),
        torch.stack([weight for _, weight in rows]),
        cells,
        spread,
        _moved(ratios),
        there.new_zeros(FOLDS).index_add(0, fold(batch), there),
        there.new_tensor(float(batch.tokens)),
    )


def fold(batch: Batch) -> Tensor:
    """The fold of each sequence, [S] int64: that of its group, however the dump is cut."""
    return mix(batch.key ^ _SALT) & (FOLDS - 1)


_SALT = 0x5EED0F0F
_STEP = 0x2545F4914F6CDD1D


def _row(scene: Scene, preset: Preset) -> tuple[Tensor, Tensor]:
    """The sums of one correction, [FOLDS * BUCKETS], and the sum of its weights."""
    done = pieces(scene, preset)
    times = _times(done)
    parts = [_part(scene, of(part, rules), rules, times) for part, rules in scene.parts(done.preset)]
    return torch.stack(parts).sum(0), done.sums.first.sum()


def _times(done: Pieces) -> Tensor | None:
    """What all tokens of a sequence are multiplied by, [S]; None where that is 1 for every preset like it."""
    preset = done.preset
    judged = preset.veto is not None or any(not rule.on_tokens for rule in preset.reject)
    if done.per_sequence is not None:
        return done.per_sequence * done.sequences
    return done.sequences.to(torch.float64) if judged else None


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
    code, sign = scene.once("coordinates", lambda: _coordinates(scene.batch))
    code, sign = (x if index is None else x.index_select(0, index) for x in (code, sign))
    score = sign * -torch.expm1(ratios.train.clamp(max=0.0))
    advantages = ratios.batch.advantages
    return code, score if advantages is None else score * advantages


def _cells(scene: Scene, ratios: Ratios) -> tuple[Tensor, Tensor]:
    code, sign = scene.once("kinds", lambda: _kinds(scene.batch))
    off = torch.expm1(ratios.delta.clamp(-BOUND, BOUND))
    added = torch.stack([_binned(code, x) for x in (sign * off, sign)])
    return added.reshape(2, FOLDS, BUCKETS), off.square().sum()


def _kinds(batch: Batch) -> tuple[Tensor, Tensor]:
    """Kinds of tokens: bigrams, where token ids are known, else how likely they were and how far in."""
    if batch.token_ids is not None:
        mixed = mix(_bigrams(batch))
    else:
        likely = (-batch.rollout).clamp(min=0.0).mul(2).sqrt().to(torch.int64).clamp(max=15)
        along = torch.log2(batch.position.to(torch.float64) + 1).to(torch.int64)
        mixed = mix(likely * 64 + along)
    return _placed(batch, mixed)


def _moved(ratios: Ratios) -> Tensor:
    """Σ A (r − 1) per fold, [FOLDS]: a trainer that has moved along the gradient raised r where A > 0."""
    batch = ratios.batch
    if batch.advantages is None:
        return torch.zeros(FOLDS, dtype=torch.float64, device=batch.rollout.device)
    off = torch.expm1(ratios.delta.clamp(max=BOUND)) * batch.advantages
    return tables.total(fold(batch), FOLDS, segments.total(off, batch.cu_seqlens))


def _placed(batch: Batch, mixed: Tensor) -> tuple[Tensor, Tensor]:
    """Fold and bucket as one number, and the sign."""
    at = segments.spread(fold(batch) * BUCKETS, batch.cu_seqlens) + (mixed & (BUCKETS - 1))
    return at, (((mixed >> 19) & 2) - 1).to(torch.float64)


def _coordinates(batch: Batch) -> tuple[Tensor, Tensor]:
    """Fold and bucket of every token as one number, and its sign.

    Without token ids every token has a coordinate of its own, as good as: what can be estimated then is the
    noise, not where the gradient points. The same without advantages.
    """
    known = batch.token_ids is not None and batch.advantages is not None
    return _placed(batch, mix(_bigrams(batch) if known else _lone(batch)))


def _bigrams(batch: Batch) -> Tensor:
    ids = batch.token_ids
    assert ids is not None
    starts = batch.cu_seqlens[:-1]
    first = torch.where(starts < len(ids), starts, 0)  # empty ones at the end have no token
    before = torch.cat((ids[:1], ids[:-1])).index_fill(0, first, -1) if len(ids) else ids
    return mix(before) + ids * _STEP


def _lone(batch: Batch) -> Tensor:
    of_group = segments.spread(mix(batch.key), batch.cu_seqlens)
    return of_group + batch.position * _STEP + mix(batch.rollout.view(torch.int64))
