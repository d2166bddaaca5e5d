"""The smallest and the largest value seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from offpol_diag.accumulators.fields import Floats, Names, Saved


@dataclass(frozen=True)
class Extremes(Saved):
    """Smallest and largest value seen, per name: [K] each."""

    names: Annotated[tuple[str, ...], Names("K", ordered=True)]
    low: Annotated[Tensor, Floats("K")]
    high: Annotated[Tensor, Floats("K")]

    @classmethod
    def of(cls, values: dict[str, tuple[Tensor, Tensor]]) -> Extremes:
        """From pairs of scalars (smallest, largest); ±inf where there was nothing to see."""
        if not values:
            return cls((), torch.empty(0), torch.empty(0))
        low, high = zip(*values.values(), strict=True)
        return cls(tuple(values), torch.stack(low), torch.stack(high))

    def merge(self, other: Extremes) -> Extremes:
        """Element-wise minimum and maximum."""
        if self.names != other.names:
            raise ValueError("extremes of different quantities do not merge")
        return Extremes(self.names, torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def read(self) -> dict[str, tuple[float, float]]:
        """Name → (smallest, largest)."""
        return dict(zip(self.names, zip(self.low.tolist(), self.high.tolist(), strict=True), strict=True))


def extremes(x: Tensor, there: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Smallest and largest of a tensor where `there` is true; (+inf, -inf) when that is nowhere."""
    if x.numel() == 0:
        return x.new_full((), torch.inf), x.new_full((), -torch.inf)
    if there is not None:
        low, high = torch.where(there, x, torch.inf), torch.where(there, x, -torch.inf)
        return low.min(), high.max()
    low, high = torch.aminmax(x)
    return low, high
