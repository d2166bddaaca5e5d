"""Noise of a log-ratio from rounding alone: of stored log-probs, and of logits in low precision.

A number x stored with m fraction bits is off by up to half a step, 2^(⌊log2|x|⌋ − m)/2; the variance of the
error is step²/12, and the errors of both policies add.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Number format → its fraction bits."""
LOGIT = 10.0
"""A typical large logit of a language model; its rounding step is the error of a matrix product."""


@dataclass(frozen=True)
class Stored:
    """Counts by which the number formats of the stored log-probs are recognised.

    Attributes:
        unfit: number of values of the rollout and the train column that each format of `BITS` cannot hold
            exactly, [2, 3].
        squares: Σ 4^⌊log2|x|⌋ of both columns, [2]; times 4^−m this is the sum of squared steps.
        tokens: number of tokens, [].
    """

    unfit: Tensor
    squares: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, rollout: Tensor, train: Tensor) -> Stored:
        """Compute the state of a batch from its log-probs under both policies, [T] each."""
        both = torch.stack((rollout, train))
        unfit = [(both.to(getattr(torch, name)).to(torch.float64) != both).sum(1) for name in BITS]
        steps = torch.exp2(2.0 * (torch.frexp(both).exponent.to(torch.float64) - 1))
        squares = torch.where(both == 0, 0.0, steps).sum(1)
        return cls(torch.stack(unfit, 1).to(torch.float64), squares, rollout.new_tensor(float(len(rollout))))

    def merge(self, other: Stored) -> Stored:
        """Add the counts."""
        return Stored(self.unfit + other.unfit, self.squares + other.squares, self.tokens + other.tokens)

    def formats(self) -> list[str]:
        """Return the coarsest format that holds every value of the rollout and of the train column."""
        rows = self.unfit.tolist()
        return [next((name for name, n in zip(BITS, row, strict=True) if not n), "float64") for row in rows]

    def deviation(self) -> float:
        """Return the standard deviation of Δ due to the rounding of stored values, nats."""
        pairs = zip(self.squares.tolist(), self.formats(), strict=True)
        variance = sum(square * 4.0 ** -BITS.get(name, 52) for square, name in pairs)
        return math.sqrt(variance / 12 / max(float(self.tokens), 1.0))


def of_logits(bits: int) -> float:
    """Return the standard deviation of Δ if both policies round a logit of `LOGIT` to so many bits, nats."""
    step = 2.0 ** (math.floor(math.log2(LOGIT)) - bits)
    return step / math.sqrt(12) * math.sqrt(2)


def in_statistic(statistic: str, over: str, deviation: float, length: float) -> float | None:
    """Propagate the noise of Δ of a token to a statistic over `length` tokens: its standard deviation.

    For K2 and K3, which are never negative, its mean. None if no rule is known.
    """
    factors = {"token": 1.0, "mean": length**-0.5, "sum": length**0.5}
    if statistic in ("k2", "k3"):
        factors = {"token": deviation / 2, "mean": deviation / 2, "sum": length * deviation / 2}
    elif statistic == "ratio":
        factors["segment"] = length**-0.5
    elif statistic != "k1":
        return None
    return deviation * factors[over] if over in factors else None
