"""Where numbers lie beyond a bound, or their logarithms beyond that of a bound."""

from __future__ import annotations

import math
from functools import reduce

import torch
from torch import Tensor


def outside(x: Tensor, edge: float, sign: int, strict: bool = False) -> Tensor:
    """Where x lies beyond an edge, upwards (sign 1) or downwards (-1); on it too if `strict`."""
    if sign > 0:
        return x >= edge if strict else x > edge
    return x <= edge if strict else x < edge


def past(x: Tensor, bound: float | None, sign: int, strict: bool = False) -> Tensor | None:
    """Where log x lies beyond log(bound); None where there is no such bound."""
    if bound is None or (bound <= 0 and sign < 0):
        return None
    return outside(x, math.log(bound), sign, strict)


def either(*flags: Tensor | None) -> Tensor | None:
    """Where any of those that are there is set; None where none is there."""
    there = [one for one in flags if one is not None]
    return reduce(torch.logical_or, there) if there else None
