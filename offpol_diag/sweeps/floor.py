"""How far numerics alone move a log-ratio: by how log-probs are stored, and by how logits are computed.

A number x stored with m bits of fraction lies up to half a step, 2^(⌊log2|x|⌋ − m)/2, from what it was, so
that its error has the variance step²/12; the errors of both policies add.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Bits of the fraction of each format."""
LOGIT = 10.0
"""A large logit of a language model: its step is what a matrix product in a format leaves uncertain."""


@dataclass(frozen=True)
class Steps:
    """What the stored values say of their format.

    Attributes:
        unfit: how many values of the sampler's and of the trainer's column each format of `BITS` cannot hold,
            [2, 3].
        squares: Σ 4^⌊log2|x|⌋ of both columns, [2]: of steps, squared, with no bits of fraction.
        tokens: how many, [].
        smallest: the smallest |Δ| that is not 0; inf where all are.
        equal: tokens with Δ = 0, [].
    """

    unfit: Tensor
    squares: Tensor
    tokens: Tensor
    smallest: Tensor
    equal: Tensor

    @classmethod
    def of(cls, rollout: Tensor, train: Tensor) -> Steps:
        """From the log-probs of a batch under both policies, [T] each."""
        both, gaps = (rollout, train), (train - rollout).abs()
        away = torch.where(gaps > 0, gaps, torch.inf)
        one = gaps.new_ones(1)
        return cls(
            torch.stack([_unfit(x) for x in both]),
            torch.stack([_squares(x) for x in both]),
            one[0] * gaps.numel(),
            torch.cat((away, one * torch.inf)).min(),
            (gaps == 0).sum().to(torch.float64),
        )

    def merge(self, other: Steps) -> Steps:
        """Of both."""
        return Steps(
            self.unfit + other.unfit,
            self.squares + other.squares,
            self.tokens + other.tokens,
            torch.minimum(self.smallest, other.smallest),
            self.equal + other.equal,
        )

    def stored(self) -> tuple[str, str]:
        """The coarsest format that holds every value of the sampler's and the trainer's column."""
        first, second = (_coarsest(row) for row in self.unfit.cpu().tolist())
        return first, second

    def deviation(self) -> float:
        """Of Δ, by the rounding of what is stored, nats."""
        variance = sum(
            square * 4.0 ** -BITS.get(name, 52)
            for square, name in zip(self.squares.cpu().tolist(), self.stored(), strict=True)
        )
        return math.sqrt(variance / 12 / max(float(self.tokens), 1.0))


def _coarsest(unfit: list[float]) -> str:
    return next((name for name, many in zip(BITS, unfit, strict=True) if not many), "float64")


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


IN_STATISTIC: dict[tuple[str, str], Callable[[float, float], float]] = {
    ("ratio", "token"): lambda s, n: s,
    ("ratio", "mean"): lambda s, n: s / math.sqrt(n),
    ("ratio", "sum"): lambda s, n: s * math.sqrt(n),
    ("ratio", "segment"): lambda s, n: s / math.sqrt(n),
    ("k1", "token"): lambda s, n: s,
    ("k1", "mean"): lambda s, n: s / math.sqrt(n),
    ("k1", "sum"): lambda s, n: s * math.sqrt(n),
    ("k2", "token"): lambda s, n: s * s / 2,
    ("k2", "mean"): lambda s, n: s * s / 2,
    ("k2", "sum"): lambda s, n: n * s * s / 2,
    ("k3", "token"): lambda s, n: s * s / 2,
    ("k3", "mean"): lambda s, n: s * s / 2,
    ("k3", "sum"): lambda s, n: n * s * s / 2,
}
"""(statistic, over) → how far a token's noise of s moves it, at a length of n; divergences have its mean."""
