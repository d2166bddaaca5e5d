"""Numbers that tokens have, and which tokens count: what columns are made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from offpol_diag.crosswalk.view import View


@dataclass(frozen=True)
class Measure:
    """A number of every token.

    Attributes:
        name: as no other measure is called that gives other numbers.
        of: its values, [T].
        by: what of a preset they depend on besides its numerator.
        shared: what all tokens of a sequence have, [S], under presets where they have the same; else None.
    """

    name: str
    of: Callable[[View], Tensor]
    by: Callable[[View], object] | None = None
    shared: Callable[[View], Tensor | None] | None = None

    def then(self, what: str, make: Callable[[Tensor], Tensor]) -> Measure:
        """What is made of each of its values; `what` tells it from all else that is."""
        return Measure(f"{self.name}, {what}", lambda view: make(view.values(self)), self.by)


@dataclass(frozen=True)
class Mask:
    """Some of a batch's tokens.

    Attributes:
        of: which, [T] bool; None for all.
        by: what of a preset that depends on besides its numerator.
    """

    of: Callable[[View], Tensor | None]
    by: Callable[[View], object]
