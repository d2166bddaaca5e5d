"""Flags of tokens counted by sequence: of many presets in one pass over those that are parted alike."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.host import here

AT_ONCE, OF_GPU = 1 << 17, 1 << 24
"""Tokens times rows that are looked at together, so that they stay in the caches or fit beside all else."""


def failing(passed: Sequence[tuple[Tensor | None, Tensor]], none: Tensor) -> Tensor:
    """How many tokens of each sequence do not pass.

    Args:
        passed: K of which tokens pass, [T] bool or None for all, each with where its sequences begin, [S+1].
        none: 0 for every sequence, [S].

    Returns:
        [K, S] float64.
    """
    found = [none] * len(passed)
    by_part: dict[int, list[int]] = {}
    for at, (flags, offsets) in enumerate(passed):
        if flags is not None:
            by_part.setdefault(id(offsets), []).append(at)
    for each in by_part.values():
        rows = _counted([passed[at][0] for at in each], passed[each[0]][1])  # type: ignore[misc]
        found = [rows[each.index(at)] if at in each else x for at, x in enumerate(found)]
    return torch.stack(found)


def _counted(flags: Sequence[Tensor], offsets: Tensor) -> list[Tensor]:
    """False ones by sequence, [S] each."""
    return [
        row
        for some in chunks(len(flags), offsets)
        for row in segments.of_rows(
            segments.total, segments.numbers(~torch.stack(tuple(flags[some]))), offsets
        ).unbind()
    ]


def chunks(rows: int, offsets: Tensor, width: int = 1) -> Iterator[slice]:
    """Rows of so many numbers of each token, as many together as are looked at at once."""
    each = max(1, width * segments.tokens(offsets))
    most = max(1, (AT_ONCE if here(offsets) else OF_GPU) // each)
    return (slice(at, at + most) for at in range(0, rows, most))
