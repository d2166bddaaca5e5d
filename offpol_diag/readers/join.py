"""Small batches → larger ones: many small row groups are then no slower to analyse than a few large ones."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch

OFFSETS = frozenset({"cu_seqlens", "cu_runs"})


def join(batches: Iterable[Batch], most: int, aim: float = math.inf) -> Iterator[Batch]:
    """The same sequences in order, in batches of at most `most` tokens unless one alone is larger.

    A batch ends where it is nearest to `aim` tokens.
    """
    held: list[Batch] = []
    size = 0
    for batch in batches:
        if size and (size + batch.tokens > most or size + batch.tokens / 2 > aim):
            yield _concatenated(held)
            held, size = [], 0
        held.append(batch)
        size += batch.tokens
    if held:
        yield _concatenated(held)


def _concatenated(batches: Sequence[Batch]) -> Batch:
    if len(batches) == 1:
        return batches[0]
    parts = {f.name: [getattr(batch, f.name) for batch in batches] for f in fields(Batch)}
    scalars = parts.pop("scalars")
    joined: dict[str, Any] = {name: _joined(name, values) for name, values in parts.items()}
    return Batch(
        **joined, scalars={key: list(chain.from_iterable(s[key] for s in scalars)) for key in scalars[0]}
    )


def _joined(name: str, values: Sequence[Tensor | None]) -> Tensor | None:
    present = [value for value in values if value is not None]
    if not present:
        return None
    if name in OFFSETS:
        return _offsets(torch.cat([segments.lengths(value) for value in present]))
    return torch.cat(present)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
