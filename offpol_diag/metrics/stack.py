"""Many presets applied to one batch: a row per preset, so that a step is one operation for all of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.host import here
from offpol_diag.memo import Memo
from offpol_diag.metrics.alike import deeds
from offpol_diag.metrics.deeds import Deed, of_sequence, of_token
from offpol_diag.metrics.outcome import passing_tokens, powers, token_moments
from offpol_diag.metrics.pieces import How, Lot, Make, Pieces, passing, pieces
from offpol_diag.metrics.rows import Rows, distinct, joined, together, woven
from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.summed import Columns, Join, Table
from offpol_diag.presets import Preset
from offpol_diag.sheet import Sheet

T = TypeVar("T")
Key = Callable[[Deed], Hashable]
"""What of a preset's deed a row depends on."""


@dataclass(frozen=True)
class Stack:
    """Presets applied to a batch; numbers are float64, the names those of `Pieces`.

    Attributes:
        scene: the batch as the observers see it.
        presets: P of them.
        items: each one's pieces.
        names: of all presets that are told of; None: of these.
        which: the row of each of those names; None: each has its own.
        told: what each preset did, where that is known already.
    """

    scene: Scene
    presets: tuple[Preset, ...]
    items: tuple[Pieces, ...]
    names: tuple[str, ...] | None = None
    which: tuple[int, ...] | None = None
    told: tuple[Deed, ...] | None = None
    _memo: Memo = field(default_factory=Memo, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, scene: Scene, presets: Sequence[Preset]) -> Stack:
        """Apply presets to the batch."""
        return cls(scene, tuple(presets), tuple(pieces(scene, preset) for preset in presets))

    def on(self, scene: Scene) -> Stack:
        """The same rows of a part of the batch: presets that did the same did so in every part."""
        return replace(self, scene=scene, items=Stack.of(scene, self.presets).items, told=self.deeds)

    @cached_property
    def deeds(self) -> tuple[Deed, ...]:
        """What each preset did."""
        return deeds(self.presets, self.items) if self.told is None else self.told

    @property
    def few(self) -> Stack:
        """The same presets with one row for all that did the same."""
        return self._fewer or self

    @cached_property
    def _fewer(self) -> Stack | None:
        """That, or None where no two did the same: a stack that keeps itself is let go of late."""
        first, at = distinct(self.deeds)
        if self.which is not None or len(first) == len(at):
            return None
        names = tuple(preset.name for preset in self.presets)
        return replace(self._picked(first), names=names, which=at)

    def _picked(self, at: Sequence[int]) -> Stack:
        """Some of the presets, by themselves."""
        each = ([x[row] for row in at] for x in (self.presets, self.items, self.deeds))
        presets, items, told = map(tuple, each)
        return Stack(self.scene, presets, items, told=told)  # type: ignore[arg-type]

    @cached_property
    def users(self) -> tuple[tuple[str, int], ...]:
        """Name and row of every preset."""
        if self.names is None or self.which is None:
            return tuple((preset.name, at) for at, preset in enumerate(self.presets))
        return tuple(zip(self.names, self.which, strict=True))

    def only(self, which: Callable[[Preset], bool]) -> Stack:
        """The rows of some presets; those that are alike must go together."""
        return self._left([at for at, preset in enumerate(self.presets) if which(preset)])

    @property
    def divided(self) -> tuple[Stack, Stack]:
        """The rows of presets that look at near tokens apart, and those of all others."""
        apart, whole = (
            [at for at, item in enumerate(self.items) if bool(item.near) is x] for x in (True, False)
        )
        return self._left(apart), self._left(whole)

    def _left(self, left: Sequence[int]) -> Stack:
        if len(left) == len(self.presets):
            return self
        if self.which is None:
            return self._picked(left)
        rows = {at: row for row, at in enumerate(left)}
        users = [(name, rows[at]) for name, at in self.users if at in rows]
        names, places = zip(*users, strict=True) if users else ((), ())
        return replace(self._picked(left), names=names, which=places)

    def named(self, columns: Mapping[str, Rows | Tensor]) -> Sheet:
        """Columns → one column [S] per preset, under its name; [S] where all presets have the same."""
        many = len(self.presets)
        rows = [x if isinstance(x, Rows) else Rows(x[None], (0,) * many) for x in columns.values()]
        names = _names(tuple(columns), tuple(name for name, _ in self.users))
        return Sheet(names, tuple(x.values for x in rows), self._places(rows))

    def _places(self, rows: Sequence[Rows]) -> Tensor | None:
        """Where each name's column lies, [columns · names] int64; None of no column."""
        if not rows:
            return None
        begins = np.cumsum([0, *(len(x.values) for x in rows[:-1])])
        at = np.array([x.at for x in rows], dtype=np.int64).reshape(len(rows), -1) + begins[:, None]
        places = (at if self.which is None else at[:, list(self.which)]).flatten()
        return torch.from_numpy(places)

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

    def keys(self, by: Key) -> Sequence[Hashable]:
        """What tells rows apart; a GPU copies rows sooner than it is told which are the same."""
        return [by(deed) for deed in self.deeds] if here(self.n) else range(len(self.presets))

    def rows(self, by: Key, make: Callable[[Pieces], Tensor]) -> Rows:
        """A row [S] of each preset, once for all with an equal key."""
        if not self.items:
            return self._no_rows
        return Rows.made(self.keys(by), lambda at: make(self.items[at]))

    @property
    def _no_rows(self) -> Rows:
        return Rows(self.n.new_zeros((0, len(self.n))), ())

    @cached_property
    def sequences(self) -> Rows:
        """1 where a sequence passed every rule on sequences and the veto."""
        return self.rows(lambda deed: deed.sequences, lambda item: item.sequences).map(segments.numbers)

    @cached_property
    def passed(self) -> Rows:
        """Tokens that pass the rules on tokens."""
        if not self.items:
            return self._no_rows
        found = self.summed(lambda deed: deed.tokens, passing_tokens, lambda lot: {"passed": lot.passed})
        return found["passed"]

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
        return self.rows(
            of_sequence, lambda item: self.one if item.per_sequence is None else item.per_sequence
        )

    @cached_property
    def sums(self) -> dict[str, Rows]:
        """Of the final weights over the tokens left, by the names of `Moments`."""
        found = self.of_weights(
            lambda w, passed: powers(w).times(passed).named(),
            token_moments,
            lambda lot: lot.moments().named(),
        )
        return {name: joined(torch.mul, x, self.sequences) for name, x in found.items()}

    def of_weights(
        self,
        whole: Callable[[Tensor, Tensor], Mapping[str, Tensor]],
        make: Make,
        near: Callable[[Lot], Columns],
    ) -> dict[str, Rows]:
        """What is made of the weights, by column: of a sequence's and what passes, or of tokens' own."""
        own, others = (
            [at for at, item in enumerate(self.items) if item.weighs_tokens is x] for x in (True, False)
        )
        each, at = together(self.weights.of(others), self.passed.of(others))
        found = {name: Rows(x, at) for name, x in whole(*each).items()}
        if not own:
            return found
        of_tokens = self._picked(own).summed(lambda deed: (deed.tokens, of_token(deed)), make, near)
        return {name: woven({tuple(others): x, tuple(own): of_tokens[name]}) for name, x in found.items()}

    def total(self, by: Key, make: Make, how: How = passing) -> dict[str, Rows]:
        """Sums over the tokens that pass the rules on tokens, by column; whoever asks again gets the same."""

        def near(lot: Lot) -> Columns:
            return how(lot, make(lot.done, lot.preset))

        return self.once(make, lambda: self.summed(lambda deed: (deed.tokens, by(deed)), make, near))

    def summed(self, by: Key, make: Make, near: Callable[[Lot], Columns]) -> dict[str, Rows]:
        """What is summed of far tokens, joined with that of each lot of near ones, by column."""
        first, at = distinct(self.keys(by))
        items = [self.items[preset] for preset in first]
        far = make.of_many([(item.first, item.preset) for item in items])
        lots = [[near(lot) for lot in item.near] for item in items]
        return _with_near(far, lots, make.how.join).of_presets(at).columns


def _with_near(far: Table, near: Sequence[Sequence[Columns]], join: Join) -> Table:
    """Each preset's columns of far tokens joined with those of its lots of near ones."""
    many: dict[int, list[int]] = {}
    for preset, lots in enumerate(near):
        many.setdefault(len(lots), []).append(preset)
    found = {}
    for count, presets in many.items():
        table = far.of_presets(presets)
        for lot in range(count):
            table = table.joined(Table.of([near[preset][lot] for preset in presets]), join)
        found[tuple(presets)] = table
    return Table.woven(found)


@cache
def _names(columns: tuple[str, ...], presets: tuple[str, ...]) -> tuple[str, ...]:
    """Of one column under every preset, then of the next; every batch asks for the same."""
    return tuple(f"{preset}|{column}" for column in columns for preset in presets)
