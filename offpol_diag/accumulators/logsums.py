"""Sums of exponentials too large to be taken."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LogSums:
    """Σ e^x and Σ e^{2x} for x too large for exp: held as e^{x - shift}, [1+B] with the replicates."""

    shift: Tensor
    once: Tensor
    twice: Tensor

    @classmethod
    def of(cls, x: Tensor, draws: Tensor) -> LogSums:
        """From log-weights x [S] and draws [S, B]."""
        shift = torch.clamp(x.max(), min=-1e300) if x.numel() else x.new_tensor(-1e300)
        scaled = torch.stack((torch.exp(x - shift), torch.exp(2 * (x - shift))))
        both = torch.cat((scaled.sum(dim=1, keepdim=True), scaled @ draws), dim=1)
        return cls(shift, both[0], both[1])

    def merge(self, other: LogSums) -> LogSums:
        """Bring both to the larger shift and add."""
        shift = torch.maximum(self.shift, other.shift)
        mine, theirs = torch.exp(self.shift - shift), torch.exp(other.shift - shift)
        once = self.once * mine + other.once * theirs
        return LogSums(shift, once, self.twice * mine**2 + other.twice * theirs**2)
