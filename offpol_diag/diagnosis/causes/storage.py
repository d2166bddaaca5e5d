"""Log-probs that were rounded before they were written."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import Flags, Floats, Rows, percent

GRIDS = {
    "bfloat16": (8, "0.002%"),
    "float16": (11, "0.01%"),
    **{f"{places}-decimal": (places, "2%") for places in (1, 2, 3, 4)},
}
"""Number format → its significant bits or decimals, and the share of values on it by chance."""
ON_GRID, FEWEST, DIFFERENT = 0.98, 50, 20
"""Least share of values on a grid (some are written by another path), fewest values and different ones."""


class LowPrecision(Cause):
    """Log-probs were rounded before they were written.

    All values lie on a grid: bf16 steps of 0.0078 near −1 and 0.0625 near −10, fp16, or three decimals of
    JSON. K3 near 10⁻⁵ to 10⁻³ that no kernel explains, equal for all tokens of a size.
    """

    id = "low_precision_storage"
    sentence = "the {column} log-probs were rounded to {grid} before they were written"
    violates = "log-probs in float32 do not lie on such a grid"
    confirm = "the dtype of the tensor when it is gathered, cast or serialised"
    fix = "compute log-softmax in float32 and keep it so: no .to(torch.bfloat16), no rounding in JSON"
    ruled_out = "rounded log-probs"
    apart = {
        "numerics": "Kernels leave noise at any value, not a grid.",
        "sentinel": "A grid has many values; a sentinel is one.",
    }

    def look(self, rows: Rows) -> Found | None:
        for name, x in (("rollout", rows.q), ("train", rows.p)):
            some = x[(x < -1e-4) & (x > -60)]
            if len(some) < FEWEST or len(np.unique(some)) < DIFFERENT:
                continue
            for grid, (bits, chance) in GRIDS.items():
                share = float(np.mean(_on(grid, bits, some)))
                if share <= ON_GRID:
                    continue
                evidence = (
                    f"{percent(share)} of the {name} log-probs are {grid} numbers (by chance: {chance})"
                )
                q, p = (np.where(y == 0, -1e-6, y) for y in (rows.q, rows.p))  # what was rounded to 0
                words = {"column": name, "grid": grid}
                return self.of_all(evidence, rows, exact=True, repaired=replace(rows, q=q, p=p), words=words)
        return None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        bits = rows.q.astype(np.float32).view(np.uint32) + np.uint32(0x8000)
        return replace(rows, q=(bits & np.uint32(0xFFFF0000)).view(np.float32).astype(np.float64))


def _on(grid: str, bits: int, x: Floats) -> Flags:
    """Return which values are numbers of a grid."""
    single = x.astype(np.float32)
    if grid == "bfloat16":
        return np.asarray((single.view(np.uint32) & 0xFFFF) == 0)
    if grid == "float16":
        return np.asarray(single.astype(np.float16) == single)
    scaled = x * 10.0**bits
    return np.asarray(np.abs(scaled - np.rint(scaled)) < 0.01)
