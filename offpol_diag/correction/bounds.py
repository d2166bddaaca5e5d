"""Where a logarithm lies beyond a bound on what it is of."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def past(x: Tensor, bound: float | None, sign: int, strict: bool = False) -> Tensor:
    """Where log x lies beyond log(bound), upwards (sign 1) or downwards (-1); on it too if `strict`."""
    if bound is None or (bound <= 0 and sign < 0):
        return torch.zeros_like(x, dtype=torch.bool)
    edge = math.log(bound) * sign
    return x * sign >= edge if strict else x * sign > edge
