"""The correction pipeline of one preset on one batch: weights, rejection, veto.

Pure; every bound is on r = π_train/π_rollout.

What acts on whole sequences is kept per sequence [S], what acts on tokens per token [T]; nothing is
broadcast that need not be.
"""

from __future__ import annotations

from offpol_diag.correction.kept import Kept, among, keep, seen
from offpol_diag.correction.reads import needs
from offpol_diag.correction.rules import beyond, fails, passes, statistic, veto_hits
from offpol_diag.correction.weights import (
    Weighed,
    by_turn,
    in_tail,
    per_sequence,
    weigh,
    weigh_turns,
    weight_key,
)

__all__ = [
    "Kept",
    "Weighed",
    "among",
    "beyond",
    "by_turn",
    "fails",
    "in_tail",
    "keep",
    "needs",
    "passes",
    "per_sequence",
    "seen",
    "statistic",
    "veto_hits",
    "weigh",
    "weigh_turns",
    "weight_key",
]
