"""Older weights, as the dump records them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.rows import Rows, jittered
from offpol_diag.diagnosis.seen import (
    CUT,
    RISING,
    Seen,
    all_behind,
    close,
    follows_lag,
    grows,
    in_sync,
    level_over_lag,
    listed,
    moved,
    noise,
    not_at_step_0,
    shared_much,
    wide,
)


class Stale(Cause):
    """The engine sampled with older weights than the trainer's.

    K3 rises with policy_lag and falls to the engine's own level at lag 0; the trainer has moved along its
    advantages, so cov(A, r) is positive. E[r] = 1.
    """

    kind = "honest"
    needs = ("policy_lag",)
    id = "stale"
    sentence = "stale weights: the engine sampled with older weights than the trainer's"
    confirm = "K3 by policy_lag falls to the engine's own level at lag 0"
    fix = "fewer steps between weight syncs"
    apart = {
        "weights_not_synced": (
            "Weights that do not arrive grow without a saw-tooth, or are there at a recorded lag of 0."
        ),
        "quantized_rollout": "Quantisation is there at lag 0, and does not grow with the lag.",
        "wrong_context": "Another prompt concerns single responses, most at their beginning.",
    }
    statement = "Stale weights: the engine's are older than the trainer's."
    speaks_for = (all_behind, follows_lag, moved, grows, shared_much, wide, not_at_step_0)
    speaks_against = (level_over_lag, noise, in_sync, close)

    def fits(self, seen: Seen) -> bool:
        return not seen.in_sync

    def look(self, rows: Rows) -> Found | None:
        seen = rows.once(Seen)
        first, *later = seen.lags.values() or [0.0]
        if not later or float(np.mean(later)) <= RISING * max(first, 1e-7):
            return None
        evidence = f"K3 ({CUT}) by policy lag: {listed(seen.lags)}"
        if min(seen.lags) == 0 and first > HEALTHY_K3:
            evidence += "; what there is at lag 0 is more than rounding, and no lag explains it"
        return self.of_all(evidence, rows)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Record lags of 0 to 3, with a mismatch of as many parts."""
        lag = np.arange(rows.sequences) // 4 % 4
        p = jittered(rows, 0.15 * lag[rows.owner], rng)
        return replace(rows, p=p, scalars={**rows.scalars, "policy_lag": lag.tolist()})
