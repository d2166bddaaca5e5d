"""In which order many results are merged: a tree whose shape depends on their number alone.

Floating-point sums depend on the order of the terms, and results come when they come. A fixed shape makes
every run of the same work the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

FAN = 8
"""Results merged at once."""


@dataclass(frozen=True)
class Place:
    """A node of the tree: level 0 holds the leaves."""

    level: int
    index: int


class Tree(Generic[T]):
    """What is there of the tree, while results come in any order.

    Attributes:
        root: the last result, once it is there.
    """

    root: T | None = None

    def __init__(self, leaves: int) -> None:
        """`leaves` is 1 or more."""
        self._sizes = [leaves]
        while self._sizes[-1] > 1:
            self._sizes.append(-(-self._sizes[-1] // FAN))
        self._held: dict[Place, dict[int, T]] = {}

    def put(self, place: Place, result: T) -> tuple[Place, list[T]] | None:
        """Take a result; the node that can be made now and what it is made of, in order, if there is one."""
        if place.level == len(self._sizes) - 1:
            self.root = result
            return None
        above = Place(place.level + 1, place.index // FAN)
        held = self._held.setdefault(above, {})
        held[place.index] = result
        if len(held) < min(FAN, self._sizes[place.level] - above.index * FAN):
            return None
        del self._held[above]
        ordered = [held[index] for index in sorted(held)]
        return (above, ordered) if len(ordered) > 1 else self.put(above, ordered[0])
