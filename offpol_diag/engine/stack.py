"""Many presets applied to one batch at once, with a row per distinct result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.memo import Memo
from offpol_diag.engine.outcome import (
    How,
    Near,
    Outcome,
    Pieces,
    passing,
    passing_tokens,
    pieces,
    powers,
    token_moments,
)
from offpol_diag.engine.rows import Columns, Rows, Sheet, Summed, Table, joined, together, woven
from offpol_diag.engine.scene import Scene
from offpol_diag.presets import Preset

T = TypeVar("T")


@dataclass(frozen=True)
class Stack:
    """Presets applied to one batch; numbers are float64, attributes those of `Pieces`.

    Attributes:
        scene: the batch and its log-ratios.
        presets: the P presets.
        items: the result of each preset.
    """

    scene: Scene
    presets: tuple[Preset, ...]
    items: tuple[Pieces, ...]
    _memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, scene: Scene, presets: Sequence[Preset]) -> Stack:
        """Apply presets to the batch."""
        return cls(scene, tuple(presets), tuple(pieces(scene, preset) for preset in presets))

    def only(self, which: Callable[[Preset], bool]) -> Stack:
        """Select the presets for which `which` is true."""
        return self._picked([at for at, preset in enumerate(self.presets) if which(preset)])

    @property
    def divided(self) -> tuple[Stack, Stack]:
        """Presets whose near tokens are separate, and all others."""
        apart = [bool(item.near) for item in self.items]
        one, two = ([at for at, flag in enumerate(apart) if flag is x] for x in (True, False))
        return self._picked(one), self._picked(two)

    def _picked(self, at: Sequence[int]) -> Stack:
        if len(at) == len(self.presets):
            return self
        return Stack(self.scene, tuple(self.presets[row] for row in at), tuple(self.items[row] for row in at))

    def named(self, columns: Mapping[str, Rows | Tensor]) -> Sheet:
        """Name columns by preset: one column [S] per preset; a plain tensor [S] is shared by all presets."""
        many = len(self.presets)
        rows = [x if isinstance(x, Rows) else Rows(x[None], (0,) * many) for x in columns.values()]
        names = _names(tuple(columns), tuple(preset.name for preset in self.presets))
        return Sheet(names, tuple(x.values for x in rows), self._places(rows))

    def _places(self, rows: Sequence[Rows]) -> Tensor | None:
        """Return the row of each name's column, [columns · names] int64; None without columns."""
        if not rows:
            return None
        begins = np.cumsum([0, *(len(x.values) for x in rows[:-1])])
        at = np.array([x.at for x in rows], dtype=np.int64).reshape(len(rows), -1) + begins[:, None]
        return torch.from_numpy(at.flatten())

    @property
    def batch(self) -> Batch:
        """The packed batch."""
        return self.scene.batch

    @cached_property
    def n(self) -> Tensor:
        """Tokens of each sequence, [S]."""
        return self.scene.counts["tokens"]

    @cached_property
    def none(self) -> Tensor:
        """Zero for every sequence, [S]."""
        return torch.zeros_like(self.n)

    @cached_property
    def one(self) -> Tensor:
        """One for every sequence, [S]."""
        return torch.ones_like(self.n)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        return self._memo.once(key, make)

    def rows(self, make: Callable[[Pieces], Tensor]) -> Rows:
        """Compute a row [S] per preset, stored once for presets with the same tensor."""
        if not self.items:
            return Rows(self.n.new_zeros((0, len(self.n))), ())
        return Rows.of_tensors([make(item) for item in self.items])

    @cached_property
    def sequences(self) -> Rows:
        """1 where a sequence passes every rule on sequences and the veto, else 0."""
        return self.rows(lambda item: item.sequences).map(segments.numbers)

    @cached_property
    def passed(self) -> Rows:
        """Number of tokens that pass the rules on tokens."""
        if not self.items:
            return self.rows(lambda item: self.n)
        return self.summed(passing_tokens, lambda near: {"passed": near.passed})["passed"]

    @cached_property
    def kept(self) -> Rows:
        """Number of kept tokens."""
        return joined(torch.mul, self.passed, self.sequences)

    @property
    def kept_tokens(self) -> Tensor:
        """Number of kept tokens, [P, S]."""
        return self.kept.all

    @cached_property
    def weights(self) -> Rows:
        """Weights of sequences; 1 where tokens have their own, or there are none."""
        return self.rows(lambda item: self.one if item.per_sequence is None else item.per_sequence)

    @cached_property
    def sums(self) -> dict[str, Rows]:
        """Sums of the final weights over kept tokens, by the names of `WeightSums`."""
        found = self.of_weights(
            lambda w, passed: powers(w).times(passed).named(),
            token_moments,
            lambda near: near.once("sums", lambda: near.sums().named()),
        )
        return {name: joined(torch.mul, x, self.sequences) for name, x in found.items()}

    def of_weights(
        self,
        whole: Callable[[Tensor, Tensor], Mapping[str, Tensor]],
        make: Summed[Outcome],
        near: Callable[[Near], Columns],
    ) -> dict[str, Rows]:
        """Compute columns from weights: of sequences by `whole`, of tokens by `make` and `near`."""
        own, others = (
            [at for at, item in enumerate(self.items) if item.weighs_tokens is x] for x in (True, False)
        )
        each, at = together(self.weights.of(others), self.passed.of(others))
        found = {name: Rows(x, at) for name, x in whole(*each).items()}
        if not own:
            return found
        of_tokens = self._picked(own).summed(make, near)
        return {name: woven({tuple(others): x, tuple(own): of_tokens[name]}) for name, x in found.items()}

    def total(self, make: Summed[Outcome], how: How = passing) -> dict[str, Rows]:
        """Sum over the tokens that pass the rules on tokens, by column; cached."""

        def sums(near: Near) -> Columns:
            return near.once((make, how), lambda: how(near, near.once(make, lambda: make.of_near(near))))

        return self.once(make, lambda: self.summed(make, sums))

    def summed(self, make: Summed[Outcome], near: Callable[[Near], Columns]) -> dict[str, Rows]:
        """Sum over far tokens and join with the results on near ones, by column."""
        table = make.of_many([(item.first, item.preset) for item in self.items])
        parts = [[near(one) for one in item.near] for item in self.items]
        return _with_near(table, parts, make.how.join).columns


def _with_near(
    far: Table, near: Sequence[Sequence[Columns]], join: Callable[[Tensor, Tensor], Tensor]
) -> Table:
    """Join each preset's columns of far tokens with those of its near ones."""
    many: dict[int, list[int]] = {}
    for preset, parts in enumerate(near):
        many.setdefault(len(parts), []).append(preset)
    found = {}
    for count, presets in many.items():
        table = far.of_presets(presets)
        for at in range(count):
            table = table.joined(Table.of([near[preset][at] for preset in presets]), join)
        found[tuple(presets)] = table
    return Table.woven(found)


@cache
def _names(columns: tuple[str, ...], presets: tuple[str, ...]) -> tuple[str, ...]:
    """Name columns for every preset, column by column; cached, since every batch has the same."""
    return tuple(f"{preset}|{column}" for column in columns for preset in presets)
