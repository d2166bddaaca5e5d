"""Sums over each sequence of what its tokens have: of one preset, or of many in one operation.

Presets that act on the same tokens differ in which of them pass and in what those weigh. So what a token adds
is a formula that takes the tokens of one preset as well as rows of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.host import here
from offpol_diag.metrics.rows import Rows, distinct, joined, laid, woven
from offpol_diag.presets import Preset
from offpol_diag.ratios import Ratios
from offpol_diag.segments import Reduce

Columns = Mapping[str, Tensor]
Inputs = tuple[Tensor | None, ...]
Join = Callable[[Tensor, Tensor], Tensor]
AT_ONCE, OF_GPU = 1 << 16, 1 << 22
"""Tokens times rows that are looked at together, so that they stay in the caches or fit beside all else."""


class How(NamedTuple):
    """What becomes of a sequence's tokens, and what makes of that of some and of others that of all."""

    reduce: Reduce
    join: Join


TOTAL = How(segments.total, torch.add)
MOST = How(segments.largest, torch.maximum)


class Applied(Protocol):
    """A preset applied to some tokens."""

    @property
    def ratios(self) -> Ratios:
        """Of those tokens."""
        ...


A = TypeVar("A", bound=Applied)


@dataclass(frozen=True, eq=False)
class Summed(Generic[A]):
    """What is summed, by name.

    Attributes:
        key: what tells two sums over the same tokens apart.
        inputs: what they are made of, [T] each, None where there is nothing; or the sums themselves, where
            they are made of other sums. What presets share must be one tensor.
        terms: the inputs → what each token adds; rows of them [K, T] → such rows.
        how: what becomes of the terms.
        near: the sums over near tokens (`pieces.Near`), row by row.
    """

    key: Callable[[A, Preset], Hashable]
    inputs: Callable[[A, Preset], Inputs | dict[str, Tensor]]
    terms: Callable[..., dict[str, Tensor]]
    how: How = TOTAL
    near: Callable[[Any], dict[str, Tensor]] | None = None

    def of_near(self, near: object) -> dict[str, Tensor]:
        """Of near tokens, row by row."""
        assert self.near is not None
        return self.near(near)

    def __call__(self, done: A, preset: Preset) -> dict[str, Tensor]:
        """Of one preset, [S] each."""
        return done.ratios.once(self.key(done, preset), lambda: self._of_one(done, preset))

    def _of_one(self, done: A, preset: Preset) -> dict[str, Tensor]:
        found, offsets = self.inputs(done, preset), done.ratios.batch.cu_seqlens
        if isinstance(found, dict):
            return found
        return {name: self.how.reduce(x, offsets) for name, x in self.terms(*found).items()}

    def of_many(self, asked: Sequence[tuple[A, Preset]]) -> Table:
        """Of many presets."""
        alike: dict[Hashable, _Alike] = {}
        for at, (done, preset) in enumerate(asked):
            offsets, found = done.ratios.batch.cu_seqlens, self.inputs(done, preset)
            lacking = None if isinstance(found, dict) else tuple([x is None for x in found])
            alike.setdefault((id(offsets), lacking), _Alike(offsets)).add(at, found)
        tables = {tuple(one.presets): self._of_alike(one) for one in alike.values()}
        return Table.woven(tables)

    def _of_alike(self, alike: _Alike) -> Table:
        if alike.sums:
            return Table.of(alike.sums)
        first, at = distinct([tuple(map(id, one)) for one in alike.inputs])
        few, offsets = [alike.inputs[row] for row in first], alike.offsets
        (tokens, *_) = [len(x) for x in few[0] if x is not None]
        most = max(1, (AT_ONCE if here(offsets) else OF_GPU) // max(1, tokens))
        parts = [self._rows(few[row : row + most], offsets) for row in range(0, len(few), most)]
        return Table(parts[0].names, Rows(laid([part.rows.values for part in parts]), at))

    def _rows(self, few: Sequence[Inputs], offsets: Tensor) -> Table:
        """One for each, in their order."""
        terms = self.terms(*map(_stacked, zip(*few, strict=True)))
        every = [x.expand(len(few), -1) for x in terms.values()]
        return Table(tuple(terms), Rows(self._reduced(every, offsets), tuple(range(len(few)))))

    def _reduced(self, terms: Sequence[Tensor], offsets: Tensor) -> Tensor:
        """N names' rows [K, T] → [K, N, S]; on a GPU in one operation, elsewhere without a copy of them."""
        reduce = self.how.reduce
        if here(offsets):
            return torch.stack([segments.of_rows(reduce, x, offsets) for x in terms], 1)
        found = segments.of_rows(reduce, torch.cat(list(terms)), offsets)
        return found.view(len(terms), -1, found.shape[-1]).transpose(0, 1)


@dataclass(frozen=True)
class Table:
    """Columns of sequences under P presets; `rows` are [R, N, S], one number for each of N names."""

    names: tuple[str, ...]
    rows: Rows

    @classmethod
    def of(cls, columns: Sequence[Columns]) -> Table:
        """Each preset's columns [S]; where the tensors are the same ones it is one row."""
        names = tuple(columns[0])
        each = [[one[name] for name in names] for one in columns]
        first, at = distinct([tuple(map(id, one)) for one in each])
        values = torch.stack([x for row in first for x in each[row]])
        return cls(names, Rows(values.view(len(first), len(names), -1), at))

    @classmethod
    def woven(cls, tables: Mapping[tuple[int, ...], Table]) -> Table:
        """The rows of some presets and those of all others."""
        (one, *_) = tables.values()
        return cls(one.names, woven({presets: table.rows for presets, table in tables.items()}))

    def of_presets(self, presets: Sequence[int]) -> Table:
        """The rows of some presets."""
        return Table(self.names, self.rows.of(presets))

    def joined(self, more: Table, join: Join) -> Table:
        """With those of other tokens."""
        return Table(self.names, joined(join, self.rows, more.rows))

    @property
    def columns(self) -> dict[str, Rows]:
        """Rows [R, S] by name."""
        each = zip(self.names, self.rows.values.unbind(1), strict=True)
        return {name: Rows(x, self.rows.at) for name, x in each}


@dataclass(frozen=True)
class _Alike:
    """Presets on the same tokens that lack the same inputs, with those; or with their sums."""

    offsets: Tensor
    presets: list[int] = field(default_factory=list)
    inputs: list[Inputs] = field(default_factory=list)
    sums: list[dict[str, Tensor]] = field(default_factory=list)

    def add(self, preset: int, found: Inputs | dict[str, Tensor]) -> None:
        """One preset more."""
        self.presets.append(preset)
        if isinstance(found, dict):
            self.sums.append(found)
        else:
            self.inputs.append(found)


def _stacked(inputs: Sequence[Tensor | None]) -> Tensor | None:
    """Rows [K, T]; [T] where all have the same."""
    if all(x is inputs[0] for x in inputs):
        return inputs[0]
    return torch.stack(inputs)  # type: ignore[arg-type]


def left(x: Tensor, keep: Tensor | None, absent: float = 0.0) -> Tensor:
    """What tokens that are kept add, the others counting as something that is not seen."""
    return x if keep is None else torch.where(keep, x, absent)


def flagged(flags: Tensor, keep: Tensor | None) -> Tensor:
    """1 for tokens with a flag that are kept, 0 for all others."""
    return segments.numbers(flags if keep is None else flags & keep)
