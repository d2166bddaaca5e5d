"""One walk over a batch's tokens, block by block, for all who want to see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

import numpy as np

from offpol_diag.metrics.scene import Scene
from offpol_diag.metrics.terms import Block, Terms
from offpol_diag.presets import Policy


class Pair(Protocol):
    """Two policies, and what the names of their numbers begin with."""

    @property
    def prefix(self) -> str:
        """What tells the pair apart."""
        ...

    @property
    def denominator(self) -> Policy:
        """The policy below."""
        ...

    @property
    def numerator(self) -> Policy:
        """The policy above."""
        ...


class Watch(Protocol):
    """Sees what a pair of policies makes of the tokens of one block after the other."""

    def __init__(self, scene: Scene, pair: Pair) -> None: ...

    def see(self, terms: Terms) -> None:
        """The next block."""


W = TypeVar("W", bound=Watch)


def walk(scene: Scene, asked: Mapping[Pair, Sequence[type[Watch]]]) -> None:
    """Let all see every block, in the order asked; a pair of which the batch lacks a policy has no blocks."""
    for pair, watches in _walked(scene, asked).items():
        for watch in watches:
            scene.once((type(watch), pair.prefix), lambda watch=watch: watch)  # type: ignore[misc]


def seen(scene: Scene, pair: Pair, make: type[W]) -> W:
    """Who saw every block; from a walk of its own where there was none."""
    return scene.once((make, pair.prefix), lambda: _walked(scene, {pair: (make,)})[pair][0])


def _walked(scene: Scene, asked: Mapping[Pair, Sequence[type[W]]]) -> dict[Pair, list[W]]:
    found = {pair: [make(scene, pair) for make in makes] for pair, makes in asked.items()}
    with np.errstate(all="ignore"):  # inf - inf is a NaN that the readers of sums know
        for block in Block.all(scene.batch):
            for pair, watches in found.items():
                terms = block.terms(pair.denominator, pair.numerator)
                for watch in watches if terms else ():
                    watch.see(terms)  # type: ignore[arg-type]
    return found
