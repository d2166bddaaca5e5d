"""Sums of exponentials too large to be taken."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from offpol_diag.accumulators.fields import NUMBERS, Floats, Saved


@dataclass(frozen=True)
class LogSums(Saved):
    """Σ e^x and Σ e^{2x} for x too large for exp: held as e^{x - shift}, [..., 1+B] with the replicates.

    The leading dimensions are those of `shift`: there may be many sums, each with a shift of its own.
    """

    shift: Annotated[Tensor, Floats("...", rule=NUMBERS)]
    once: Annotated[Tensor, Floats("...", "B")]
    twice: Annotated[Tensor, Floats("...", "B")]

    @classmethod
    def of(cls, x: Tensor, draws: Tensor) -> LogSums:
        """From log-weights x [..., S] and draws [S, B]."""
        largest = x.amax(dim=-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
        shift = torch.clamp(largest, min=-1e300)
        x = x - shift[..., None]
        scaled = torch.stack((torch.exp(x), torch.exp(2 * x)))
        both = torch.cat((scaled.sum(dim=-1, keepdim=True), scaled @ draws), dim=-1)
        return cls(shift, both[0], both[1])

    def merge(self, other: LogSums) -> LogSums:
        """Bring both to the larger shift and add."""
        shift = torch.maximum(self.shift, other.shift)
        mine, theirs = (torch.exp(one.shift - shift)[..., None] for one in (self, other))
        once = self.once * mine + other.once * theirs
        return LogSums(shift, once, self.twice * mine**2 + other.twice * theirs**2)
