"""How far rounding alone moves a log-ratio: by how log-probs are stored, and by how logits are computed.

A number x stored with m bits of fraction lies up to half a step, 2^(⌊log2|x|⌋ − m)/2, from what it was, so
that its error has the variance step²/12; the errors of both policies add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Bits of the fraction of each format."""
LOGIT = 10.0
"""A large logit of a language model: its step is what a matrix product in a format leaves uncertain."""


@dataclass(frozen=True)
class Stored:
    """State from which the format of the stored values is recognised.

    Attributes:
        unfit: how many values of the sampler's and of the trainer's column each format of `BITS` cannot hold,
            [2, 3].
        squares: Σ 4^⌊log2|x|⌋ of both columns, [2]: of steps, squared, with no bits of fraction.
        tokens: how many, [].
    """

    unfit: Tensor
    squares: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, rollout: Tensor, train: Tensor) -> Stored:
        """Make the state of a batch from its log-probs under both policies, [T] each."""
        both = (rollout, train)
        many = rollout.new_tensor(float(rollout.numel()))
        return cls(torch.stack([_unfit(x) for x in both]), torch.stack([_squares(x) for x in both]), many)

    def merge(self, other: Stored) -> Stored:
        """Merge."""
        return Stored(self.unfit + other.unfit, self.squares + other.squares, self.tokens + other.tokens)

    def formats(self) -> tuple[str, str]:
        """The coarsest format that holds every value of the sampler's and the trainer's column."""
        first, second = (
            next((name for name, many in zip(BITS, row, strict=True) if not many), "float64")
            for row in self.unfit.cpu().tolist()
        )
        return first, second

    def deviation(self) -> float:
        """Standard deviation of Δ by the rounding of what is stored, nats."""
        variance = sum(
            square * 4.0 ** -BITS.get(name, 52)
            for square, name in zip(self.squares.cpu().tolist(), self.formats(), strict=True)
        )
        return math.sqrt(variance / 12 / max(float(self.tokens), 1.0))


def _unfit(x: Tensor) -> Tensor:
    kinds = (torch.bfloat16, torch.float16, torch.float32)
    return torch.stack([(x.to(kind).to(torch.float64) != x).sum() for kind in kinds]).to(torch.float64)


def _squares(x: Tensor) -> Tensor:
    _, power = torch.frexp(x[x != 0])
    return torch.exp2(2.0 * (power.to(torch.float64) - 1)).sum()


def of_logits(bits: int) -> float:
    """Standard deviation of Δ when both policies round one logit of about `LOGIT` to that many bits, nats."""
    step = 2.0 ** (math.floor(math.log2(LOGIT)) - bits)
    return step / math.sqrt(12) * math.sqrt(2)


def in_statistic(statistic: str, over: str, deviation: float, length: float) -> float | None:
    """How far a token's noise moves a statistic over so many tokens; a divergence has its mean.

    None where no rule is known.
    """
    factors = {
        ("ratio", "k1"): {"token": 1.0, "mean": length**-0.5, "sum": length**0.5},
        ("ratio",): {"segment": length**-0.5},
        ("k2", "k3"): {"token": deviation / 2, "mean": deviation / 2, "sum": length * deviation / 2},
    }
    found = (by[over] for names, by in factors.items() if statistic in names and over in by)
    factor = next(found, None)
    return None if factor is None else deviation * factor
