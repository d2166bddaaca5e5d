"""A rule that is not the product's: each estimate is shrunk by how far its weights are from the ratio.

For every method m the dump tells, against a reference R with next to no bias (token TIS at 5):

    expected  log of the alignment if only the noise differs
    measured  the same from the data, bias included, ± error
    d         variance of the difference between its gradient and R's, over the variance of R's
    z         Σ A (r − 1) in standard errors: how surely the trainer has moved along the gradient since

    share     of the variance of r, what kinds of tokens explain: noise has none, any fixed difference has

Before data, the bias of m is believed to cost in proportion to √d, give or take `SPREAD` × √d:

    prior = expected − (MOVED · clip(z − 1, 0, 3) + SHARED · √share) · √d
    score = prior + (measured − prior) · SPREAD² d / (SPREAD² d + error²)

and the best score among methods of single tokens is taken.
"""

from __future__ import annotations

import math

import numpy as np

from benchmarks.advice.dumps import Seen
from offpol_diag.candidates import CANDIDATES, DEFAULT, REFERENCE
from offpol_diag.metrics import alignment

MOVED, SHARED, SPREAD = 0.25, 0.1, 0.25
TOKEN = tuple(one.name for one in CANDIDATES if one.judges != "sequence")


def proposed(seen: Seen, batch: int) -> str:
    """A candidate."""
    found = scores(seen, batch)
    return max(found, key=found.__getitem__) if found else DEFAULT.name


def scores(seen: Seen, batch: int) -> dict[str, float]:
    """Of every candidate of single tokens."""
    estimates = alignment.estimates(seen.folds, REFERENCE.name, batch)
    cost = MOVED * min(max(z(seen) - 1, 0.0), 3.0) + SHARED * math.sqrt(share(seen))
    found = {}
    for name in TOKEN:
        one, d = estimates[name], distance(seen, name)
        prior = one.expected - cost * math.sqrt(d)
        sure = (SPREAD**2 * d) / (SPREAD**2 * d + one.error**2) if math.isfinite(one.error) and d > 0 else 0.0
        found[name] = prior + (one.measured - prior) * sure if sure else prior
    return {name: score for name, score in found.items() if math.isfinite(score)}


def z(seen: Seen) -> float:
    """Σ A (r − 1) over its standard error, by folds."""
    if "advantages" not in seen.columns:
        return 0.0
    n = seen.folds.sequences.numpy()
    mean = seen.drift.sum() / n.sum()
    spread = math.sqrt(float(np.square(seen.drift - mean * n).sum()))
    return float(seen.drift.sum() / spread) if spread > 0 else 0.0


def share(seen: Seen) -> float:
    """The systematic share of the variance of r, in [0, 1]; 0 where it is not known."""
    found = alignment.systematic(seen.folds).value
    return min(max(found, 0.0), 1.0) if math.isfinite(found) else 0.0


def distance(seen: Seen, name: str) -> float:
    """Variance of the difference of the two gradients' stand-ins over that of the reference."""
    folds = seen.folds
    base = folds.sums[folds.names.index(REFERENCE.name)].numpy()
    mine = folds.sums[folds.names.index(name)].numpy()
    n = folds.sequences.numpy()
    whole = _noise(base, n)
    return max(_noise(mine - base, n) / whole, 0.0) if whole > 0 else 0.0


def _noise(sums: np.ndarray, n: np.ndarray) -> float:
    total, same, squares = n.sum(), np.square(sums).sum(), np.square(n).sum()
    signal = (np.square(sums.sum(0)).sum() - same) / (total**2 - squares)
    return float((same - squares * signal) / total)
