"""The smallest and the largest: of each sequence first, of the whole batch in one go for all who ask."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Ends = tuple[Tensor, Tensor]
"""The smallest and the largest: of each sequence [S], or of all."""
Columns = dict[str, Tensor]
"""What is summed, [S] each, by name."""
Ranges = dict[str, Ends]
"""Whose ends are kept, by name."""


def among(ends: Ends, there: Tensor) -> Ends:
    """The ends of some of the sequences, ±inf for the others: [S] each."""
    (low, high), gone = ends, ~there
    return low.masked_fill(gone, torch.inf), high.masked_fill(gone, -torch.inf)


def rows(x: Tensor, there: Tensor | None = None) -> Ends:
    """Both ends of numbers of sequences [S], of those that are there."""
    return (x, x) if there is None else among((x, x), there)


def outer(one: Ends, two: Ends) -> Ends:
    """Of both, part by part."""
    return torch.minimum(one[0], two[0]), torch.maximum(one[1], two[1])


def outermost(ranges: Mapping[str, Ends]) -> dict[str, Ends]:
    """Of all parts of each, scalars; ±inf where there is no part. Ends that several share are seen once."""
    which = {name: (id(low), id(high)) for name, (low, high) in ranges.items()}
    own = {key: ranges[name] for name, key in which.items()}
    by_size: dict[int, list[tuple[int, int]]] = {}
    for key, (low, _) in own.items():
        by_size.setdefault(low.numel(), []).append(key)
    found = {key: pair for size, keys in by_size.items() for key, pair in _of_size(own, size, keys)}
    return {name: found[key] for name, key in which.items()}


def _flat(x: Tensor) -> Tensor:
    return x if x.ndim else x[None]


def _of_size(ranges: Mapping[T, Ends], size: int, names: list[T]) -> zip[tuple[T, Ends]]:
    low, high = (torch.stack([_flat(ranges[name][side]) for name in names]) for side in (0, 1))
    if size == 0:
        low, high = (x.new_full((len(names), 1), end) for x, end in ((low, torch.inf), (high, -torch.inf)))
    return zip(names, zip(low.amin(dim=1).unbind(), high.amax(dim=1).unbind(), strict=True), strict=True)


def named(columns: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Columns of many, [K, S] each → each one's, [S]."""
    rows = zip(*(x.unbind() for x in columns.values()), strict=True)
    return [dict(zip(columns, one, strict=True)) for one in rows]
