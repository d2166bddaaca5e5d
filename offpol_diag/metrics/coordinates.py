"""Where a token adds to what stands for the gradient: fold, bucket and sign, all by hashing.

A hash of 64 bits tells the bucket by its low bits and the sign by one further up; the fold is that of the
sequence's group. What hashes is written for tensors on a device; arrays of a CPU take shorter ways to it.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.resample import mix, mixed

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Narrow = npt.NDArray[np.int16]

FOLDS, BUCKETS = 32, 256
SIGN = 20
"""The bit of a hash that is set where the sign is +."""
BOUND = math.log(5)
"""Largest |Δ| with which a token counts among its kind: a few broken ones must not be all there is to see."""
LIKELY, OCTAVES = 16, 64
"""Kinds of tokens by how likely they were, and by how far in; none lies as far in as the last octave."""

_SALT = 0x5EED0F0F
_STEP = 0x2545F4914F6CDD1D


def fold(batch: Batch) -> Tensor:
    """The fold of each sequence, [S] int64: that of its group, however the dump is cut."""
    return mix(batch.key ^ _SALT) & (FOLDS - 1)


def sign(hashed: Tensor) -> Tensor:
    """1 or −1, float64."""
    return (((hashed >> (SIGN - 1)) & 2) - 1).to(torch.float64)


def known(batch: Batch) -> bool:
    """Whether a token's coordinate is that of its bigram.

    Without token ids every token has a coordinate of its own, as good as: what can be estimated then is the
    noise, not where the gradient points. The same without advantages.
    """
    return batch.token_ids is not None and batch.advantages is not None


def coordinates(batch: Batch) -> Tensor:
    """The hash of every token's coordinate, [T]."""
    return mix(_bigrams(batch) if known(batch) else _lone(batch))


def kinds(batch: Batch) -> Tensor:
    """The hash of every token's kind: the bigram, where token ids are known, else its class, [T]."""
    return mix(_bigrams(batch)) if batch.token_ids is not None else of_classes(_classes(batch), OCTAVES)


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


def _classes(batch: Batch) -> Tensor:
    """How likely tokens were and how far in, as one number, [T]."""
    likely = (-batch.rollout).clamp(min=0.0).mul(2).sqrt().clamp(max=LIKELY - 1).to(torch.int64)
    return likely * OCTAVES + octave(batch.position)


def octave(position: Tensor) -> Tensor:
    """⌊log2(position + 1)⌋, off the exponent of a float64."""
    return ((position + 1).to(torch.float64).view(torch.int64) >> 52) - 1023


def of_classes(at: Tensor, octaves: int) -> Tensor:
    """The hash of classes, told apart by so many octaves."""
    return mix(at // octaves * OCTAVES + at % octaves)


# ---------------------------------------------------------------- the same of arrays


def bigrams(ids: Ints, begins: Ints) -> Ints:
    """The hash of bigrams of sequences that begin there, none of them empty."""
    before = np.empty_like(ids)
    before[1:] = ids[:-1]
    before[begins] = -1
    found = mixed(before)
    found += ids * _STEP
    return mixed(found)


def lone(of_group: Ints, position: Ints, rollout: Floats) -> Ints:
    """The hash of tokens by themselves, each with the mixed key of its group."""
    found = mixed(rollout)
    found += position * _STEP
    found += of_group
    return mixed(found)


def classes(rollout: Floats, position: Ints, octaves: int) -> Narrow:
    """Classes told apart by so many octaves, which the positions must not exceed.

    In narrow numbers, at a third of the cost: ⌊√x⌋ is ⌊√⌊x⌋⌋, and that of few whole numbers.
    """
    spans = rollout * -2.0
    np.clip(spans, 0.0, float((LIKELY - 1) ** 2), out=spans)
    found = np.sqrt(spans.astype(np.int16).astype(np.float32)).astype(np.int16)
    found *= np.int16(octaves)
    found += _octaves(position, octaves)
    return found


def _octaves(position: Ints, octaves: int) -> Narrow:
    if octaves > 24:  # float32 would round some up to the next
        return octave(torch.from_numpy(position)).numpy().astype(np.int16)
    found = position.astype(np.int32)
    found += 1
    found = found.astype(np.float32).view(np.int32)
    found >>= 23
    found -= 127
    return found.astype(np.int16)
