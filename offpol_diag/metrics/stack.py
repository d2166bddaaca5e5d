"""Many presets applied to one batch: a row per preset, so that a step is one operation for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.metrics.alike import firsts
from offpol_diag.metrics.outcome import Moments, powers
from offpol_diag.metrics.pieces import How, Make, Pieces, passing, pieces
from offpol_diag.metrics.scene import Scene
from offpol_diag.presets import Preset
from offpol_diag.sheet import Sheet


@dataclass(frozen=True)
class Stack:
    """Presets applied to a batch; [P, S] float64 each, the names those of `Pieces`.

    Attributes:
        scene: the batch as the observers see it.
        presets: P of them.
        items: each one's pieces.
        names: of all presets that are told of; None: of these.
        which: the row of each of those names; None: each has its own.
    """

    scene: Scene
    presets: tuple[Preset, ...]
    items: tuple[Pieces, ...]
    names: tuple[str, ...] | None = None
    which: tuple[int, ...] | None = None

    @classmethod
    def of(cls, scene: Scene, presets: Sequence[Preset]) -> Stack:
        """Apply presets to the batch."""
        return cls(scene, tuple(presets), tuple(pieces(scene, preset) for preset in presets))

    def on(self, scene: Scene) -> Stack:
        """The same rows of another batch."""
        return replace(self, scene=scene, items=Stack.of(scene, self.presets).items)

    @cached_property
    def few(self) -> Stack:
        """The same presets with one row for all that did the same."""
        first = firsts(self.presets, self.items)
        rows = {at: row for row, at in enumerate(dict.fromkeys(first))}
        if self.which is not None or len(rows) == len(first):
            return self
        presets, items = (tuple(each[at] for at in rows) for each in (self.presets, self.items))
        return Stack(
            self.scene,
            presets,  # type: ignore[arg-type]
            items,  # type: ignore[arg-type]
            tuple(preset.name for preset in self.presets),
            tuple(rows[at] for at in first),
        )

    @cached_property
    def users(self) -> tuple[tuple[str, int], ...]:
        """Name and row of every preset."""
        if self.names is None or self.which is None:
            return tuple((preset.name, at) for at, preset in enumerate(self.presets))
        return tuple(zip(self.names, self.which, strict=True))

    def only(self, which: Callable[[Preset], bool]) -> Stack:
        """The rows of some presets; those that are alike must go together."""
        left = [at for at, preset in enumerate(self.presets) if which(preset)]
        if len(left) == len(self.presets):
            return self
        presets, items = tuple(self.presets[at] for at in left), tuple(self.items[at] for at in left)
        if self.which is None:
            return Stack(self.scene, presets, items)
        rows = {at: row for row, at in enumerate(left)}
        users = [(name, rows[at]) for name, at in self.users if at in rows]
        names, places = zip(*users, strict=True) if users else ((), ())
        return Stack(self.scene, presets, items, names, places)

    def named(self, columns: Mapping[str, Tensor]) -> Sheet:
        """Columns [P, S] → one column [S] per preset, under its name."""
        many = len(self.presets)
        rows = tuple(x.expand(many, -1) for x in columns.values())
        names = _names(tuple(columns), tuple(name for name, _ in self.users))
        return Sheet(names, rows, None if self.which is None else _rows(len(columns), many, self.which))

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

    def rows(self, make: Callable[[Pieces], Tensor]) -> Tensor:
        """A row [S] of each preset."""
        if not self.items:
            return self.n.new_zeros((0, len(self.n)))
        return torch.stack([make(item) for item in self.items])

    @cached_property
    def sequences(self) -> Tensor:
        """1 where a sequence passed every rule on sequences and the veto."""
        return self.rows(lambda item: item.sequences).to(torch.float64)

    @cached_property
    def kept_tokens(self) -> Tensor:
        """Tokens left."""
        return self.rows(lambda item: item.passed) * self.sequences

    @cached_property
    def weights(self) -> Tensor:
        """The weights of sequences; 1 where tokens have their own, or there are none."""
        one = torch.ones_like(self.n)
        return self.rows(lambda item: one if item.per_sequence is None else item.per_sequence)

    @cached_property
    def sums(self) -> Moments:
        """Of the final weights over the tokens left."""
        whole = powers(self.weights).times(self.kept_tokens)
        own = [item.weighs_tokens for item in self.items]
        if not any(own):
            return whole
        at = torch.tensor([i for i, flag in enumerate(own) if flag], device=self.n.device)
        items = [item for item, flag in zip(self.items, own, strict=True) if flag]
        found = stacked([item.moments() for item in items])
        own_sums = Moments(**found).times(self.sequences[at])
        return whole.replaced(at, own_sums)

    def total(self, make: Make, how: How = passing) -> dict[str, Tensor]:
        """Sums over the tokens that pass the rules on tokens, by column, [P, S] each."""
        return stacked([item.total(make, how) for item in self.items])


def stacked(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The same columns [S] of P presets, [P, S] each."""
    return {name: torch.stack([one[name] for one in columns]) for name in (columns[0] if columns else ())}


@cache
def _names(columns: tuple[str, ...], presets: tuple[str, ...]) -> tuple[str, ...]:
    """Of one column under every preset, then of the next; every batch asks for the same."""
    return tuple(f"{preset}|{column}" for column in columns for preset in presets)


@lru_cache(maxsize=64)
def _rows(columns: int, many: int, which: tuple[int, ...]) -> Tensor:
    """The row of every preset in one column, then in the next: [columns · P] int64."""
    return (many * torch.arange(columns)[:, None] + torch.tensor(which, dtype=torch.int64)).flatten()
