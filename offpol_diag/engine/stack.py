"""Many presets applied to one batch: a row per preset, so that a step is one operation for all of them."""

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
    """Presets applied to a batch; numbers are float64, the names those of `Pieces`.

    Attributes:
        scene: the batch as the observers see it.
        presets: P of them.
        items: each one's pieces.
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
        """The rows of some presets."""
        return self._picked([at for at, preset in enumerate(self.presets) if which(preset)])

    @property
    def divided(self) -> tuple[Stack, Stack]:
        """The rows of presets that look at near tokens apart, and those of all others."""
        apart = [bool(item.near) for item in self.items]
        one, two = ([at for at, flag in enumerate(apart) if flag is x] for x in (True, False))
        return self._picked(one), self._picked(two)

    def _picked(self, at: Sequence[int]) -> Stack:
        if len(at) == len(self.presets):
            return self
        return Stack(self.scene, tuple(self.presets[row] for row in at), tuple(self.items[row] for row in at))

    def named(self, columns: Mapping[str, Rows | Tensor]) -> Sheet:
        """Columns → one column [S] per preset, under its name; [S] where all presets have the same."""
        many = len(self.presets)
        rows = [x if isinstance(x, Rows) else Rows(x[None], (0,) * many) for x in columns.values()]
        names = _names(tuple(columns), tuple(preset.name for preset in self.presets))
        return Sheet(names, tuple(x.values for x in rows), self._places(rows))

    def _places(self, rows: Sequence[Rows]) -> Tensor | None:
        """Where each name's column lies, [columns · names] int64; None of no column."""
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
        """`make()`, computed once per key."""
        return self._memo.once(key, make)

    def rows(self, make: Callable[[Pieces], Tensor]) -> Rows:
        """A row [S] of each preset, once for all that have the same tensor."""
        if not self.items:
            return Rows(self.n.new_zeros((0, len(self.n))), ())
        return Rows.of_tensors([make(item) for item in self.items])

    @cached_property
    def sequences(self) -> Rows:
        """1 where a sequence passed every rule on sequences and the veto."""
        return self.rows(lambda item: item.sequences).map(segments.numbers)

    @cached_property
    def passed(self) -> Rows:
        """Tokens that pass the rules on tokens."""
        if not self.items:
            return self.rows(lambda item: self.n)
        return self.summed(passing_tokens, lambda near: {"passed": near.passed})["passed"]

    @cached_property
    def kept(self) -> Rows:
        """Tokens left."""
        return joined(torch.mul, self.passed, self.sequences)

    @property
    def kept_tokens(self) -> Tensor:
        """The same, [P, S]."""
        return self.kept.all

    @cached_property
    def weights(self) -> Rows:
        """The weights of sequences; 1 where tokens have their own, or there are none."""
        return self.rows(lambda item: self.one if item.per_sequence is None else item.per_sequence)

    @cached_property
    def sums(self) -> dict[str, Rows]:
        """Of the final weights over the tokens left, by the names of `WeightSums`."""
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
        """What is made of the weights, by column: of a sequence's and what passes, or of tokens' own."""
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
        """Sums over the tokens that pass the rules on tokens, by column; whoever asks again gets the same."""

        def sums(near: Near) -> Columns:
            return near.once((make, how), lambda: how(near, near.once(make, lambda: make.of_near(near))))

        return self.once(make, lambda: self.summed(make, sums))

    def summed(self, make: Summed[Outcome], near: Callable[[Near], Columns]) -> dict[str, Rows]:
        """What is summed of far tokens, joined with what is made of near ones, by column."""
        table = make.of_many([(item.first, item.preset) for item in self.items])
        parts = [[near(one) for one in item.near] for item in self.items]
        return _with_near(table, parts, make.how.join).columns


def _with_near(
    far: Table, near: Sequence[Sequence[Columns]], join: Callable[[Tensor, Tensor], Tensor]
) -> Table:
    """Each preset's columns of far tokens joined with those of its near ones."""
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
    """Of one column under every preset, then of the next; every batch asks for the same."""
    return tuple(f"{preset}|{column}" for column in columns for preset in presets)
