"""Sums of columns of sequences, and the same sums in every bootstrap replicate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from offpol_diag import tables
from offpol_diag.accumulators.fields import Floats, Ints, Names, Saved, require
from offpol_diag.host import here


@dataclass(frozen=True)
class Sums(Saved):
    """Sums of per-sequence columns, and the same sums in every bootstrap replicate.

    Columns that were equal everywhere so far share a row: presets that did the same left the same numbers.

    Attributes:
        names: K column names.
        point: [R] the sums; `rest` [R] what rounding lost of them (compensated summation).
        drawn: [R, B] the sums with each sequence counted as often as its group was drawn.
        which: the row of each name, [K] int64 in the host's memory; None: each has its own.
    """

    names: Annotated[tuple[str, ...], Names("K")]
    point: Annotated[Tensor, Floats("rows")]
    rest: Annotated[Tensor, Floats("rows")]
    drawn: Annotated[Tensor, Floats("rows", "B")]
    which: Annotated[Tensor, Ints("K")] | None = None

    def check(self) -> None:
        """Refuse names without a row."""
        rows = len(self.point)
        if self.which is None:
            require(len(self.names) == rows, f"point is of shape [{rows}], and must be [K]")
        else:
            require(((self.which >= 0) & (self.which < rows)).all(), f"which is not among {rows} rows")

    @classmethod
    def of(cls, columns: dict[str, Tensor], draws: Tensor, key: Tensor | None = None) -> Sums:
        """Sum columns of shape [S] under draws [S, B]; equal keys [S] say whose draws are the same."""
        return cls.of_stacked(tuple(columns), torch.stack(tuple(columns.values())), draws, key)

    @classmethod
    def of_stacked(
        cls,
        names: tuple[str, ...],
        columns: Tensor,
        draws: Tensor,
        key: Tensor | None = None,
        which: Tensor | None = None,
    ) -> Sums:
        """The same of columns that lie in one tensor, [K, S]; of [R, S] with `which` [K] is each name's."""
        return cls.of_parts(names, (columns,), draws, key, which)

    @classmethod
    def of_parts(
        cls,
        names: tuple[str, ...],
        parts: Sequence[Tensor],
        draws: Tensor,
        key: Tensor | None = None,
        which: Tensor | None = None,
    ) -> Sums:
        """The same of rows that lie in several tensors, one after the other: what is summed is not copied."""
        point, (drawn, same) = torch.cat([part.sum(dim=1) for part in parts]), _drawn(parts, draws, key)
        if same is not None:
            first, rows = _pairs(same, point.numpy().view(np.int64))
            point, drawn = point[first], drawn[same[first]]
            which = rows if which is None else rows[which]
        return cls(names, point, torch.zeros_like(point), drawn, which)

    @property
    def whole(self) -> Sums:
        """The same with a row for each name."""
        if self.which is None:
            return self
        return Sums(self.names, *self._rows(self.which.to(self.point.device)))

    def _rows(self, at: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.point.index_select(0, at), self.rest.index_select(0, at), self.drawn.index_select(0, at)

    def merge(self, other: Sums) -> Sums:
        """Two-sum of the points; columns that only one side has are kept."""
        if self.names != other.names:
            return self.whole._widen(other.whole).merge(other.whole._widen(self.whole))
        if self.which is None or other.which is None:
            return self.whole._plus(other.whole, None)
        if torch.equal(self.which, other.which):
            return self._plus(other, self.which)
        first, which = _pairs(self.which, other.which.numpy())
        one, two = (Sums(self.names, *each._rows(each.which[first])) for each in (self, other))  # type: ignore[index]
        return one._plus(two, which)

    def _plus(self, other: Sums, which: Tensor | None) -> Sums:
        """Row by row."""
        point = self.point + other.point
        moved = point - self.point
        lost = (self.point - (point - moved)) + (other.point - moved)
        return Sums(self.names, point, self.rest + other.rest + lost, self.drawn + other.drawn, which)

    def _widen(self, other: Sums) -> Sums:
        """The same sums over the union of both sets of columns, in sorted order."""
        names = tuple(sorted({*self.names, *other.names}))
        at = {name: i for i, name in enumerate(self.names)}
        mine = torch.tensor([at.get(name, len(self.names)) for name in names], device=self.point.device)
        wide = [torch.cat((x, torch.zeros_like(x[:1])))[mine] for x in (self.point, self.rest, self.drawn)]
        return Sums(names, *wide)

    def read(self) -> dict[str, Tensor]:
        """Name → [1+B] on the CPU: the sum, then its replicates; names that share a row share it here too."""
        both = torch.cat(((self.point + self.rest)[:, None], self.drawn), dim=1).cpu().unbind()
        each = both if self.which is None else [both[at] for at in self.which.tolist()]
        return dict(zip(self.names, each, strict=True))


def _pairs(one: Tensor, two: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Of N pairs of whole numbers, where each distinct one is first, [R], and which of those each is, [N]."""
    order = np.lexsort((two, one.numpy()))  # stable: the first of equal ones comes first
    x, y = one.numpy()[order], two[order]
    new = np.concatenate(([True], (x[1:] != x[:-1]) | (y[1:] != y[:-1])))[: len(x)]
    which = np.empty(len(order), np.int64)
    which[order] = np.cumsum(new) - 1
    return torch.from_numpy(order[new]), torch.from_numpy(which)


def _drawn(parts: Sequence[Tensor], draws: Tensor, key: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Columns [K, S] in parts times draws [S, B], rows, and the row of each; None: each has its own.

    Neighbours with one key, drawn alike, are added first.
    """
    begins = None if key is None or not here(key) or not len(key) else tables.runs(key)[:-1]
    if begins is None or 2 * len(begins) > len(draws):
        return torch.cat([part @ draws for part in parts]), None
    with np.errstate(all="ignore"):  # inf - inf is a NaN that the readers of sums know
        together = [np.add.reduceat(part.numpy(), begins.numpy(), axis=1) for part in parts]
        return _of_distinct(np.concatenate(together), draws[begins])


def _of_distinct(rows: npt.NDArray[np.float64], draws: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows [K, G] times draws [G, B], as `_drawn` gives them; equal rows are multiplied once.

    Presets that did the same in a batch left the same columns there, and most of what is rare left zeros.
    Which rows may be equal is told by their products with one vector, and looked at before it is believed.
    """
    mark = rows @ np.sqrt(np.arange(2.0, 2.0 + rows.shape[1]))
    _, first, which = np.unique(mark, return_index=True, return_inverse=True)
    other = np.flatnonzero(
        (rows[first][which] != rows).any(axis=1)
    )  # of nearly the same product, or no numbers
    few = rows[np.concatenate((first, other))]
    which[other] = len(first) + np.arange(len(other))
    if 2 * len(few) > len(rows):
        return torch.from_numpy(rows) @ draws, None
    return torch.from_numpy(few) @ draws, torch.from_numpy(which)
