"""The candidates' weights, in formulas of their own: what the product computes is not what judges it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from benchmarks.advice.worlds import Array

OfRatio = Callable[[Array], Array]


def _tis(high: float) -> OfRatio:
    return lambda r: np.minimum(r, high)


def _icepop(low: float, high: float) -> OfRatio:
    return lambda r: r * ((r >= low) & (r <= high))


TOKEN: dict[str, OfRatio] = {
    "none": np.ones_like,
    **{f"token_tis_{high}": _tis(high) for high in (1.5, 2.0, 3.0, 5.0)},
    "token_icepop_0.5_2.0": _icepop(0.5, 2.0),
    "token_icepop_0.5_5.0": _icepop(0.5, 5.0),
    "token_mask_0.5_2.0": lambda r: ((r >= 0.5) & (r <= 2.0)).astype(float),
}
"""Weights of a token by its ratio; their expected gradients are exact."""


def sequence(delta: Array, lengths: Array) -> dict[str, Array]:
    """Weights of tokens by all log-ratios of their sequence, [N, T] (0 past its end) → [N, T] each."""
    total = delta.sum(1)
    product, mean = np.exp(np.clip(total, -20, 20)), np.exp(total / np.maximum(lengths, 1))
    tis = np.minimum(np.exp(delta), 2)
    small = np.log(1e-4)
    spread = {
        "seq_tis_2.0": np.minimum(product, 2),
        "seq_mis_0.5_2.0": product * ((product >= 0.5) & (product <= 2)),
        "geo_rs_0.1%": ((mean >= 1 / 1.001) & (mean <= 1.001)).astype(float),
        "geo_rs_1%": ((mean >= 0.99) & (mean <= 1.01)).astype(float),
    }
    found = {name: np.broadcast_to(one[:, None], delta.shape) for name, one in spread.items()}
    found["geo_rs_1%_token_tis_2.0"] = tis * found["geo_rs_1%"]
    found["veto_token_tis_2.0"] = tis * (delta.min(1) >= small)[:, None]
    return found


SEQUENCE = tuple(sequence(np.zeros((1, 1)), np.ones(1)))
NAMES = (*TOKEN, *SEQUENCE)
