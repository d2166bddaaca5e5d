"""Older weights, as the dump records them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.rows import Rows, jittered
from offpol_diag.diagnosis.seen import CUT, RISING, Seen


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
    speaks_for = ("behind", "moved", "grows", "share of others", "wide")
    speaks_against = ("flat over lag", "noise", "at lag 0", "close")

    def fits(self, seen: Seen) -> bool:
        return not seen.in_sync

    def look(self, rows: Rows) -> Found | None:
        seen = rows.once(Seen)
        if not seen.over_lag > RISING:
            return None
        evidence = f"K3 ({CUT}) by policy lag: {seen.by_lag}"
        if seen.lags.get(0, 0.0) > HEALTHY_K3:
            evidence += "; what there is at lag 0 is more than rounding, and no lag explains it"
        return self.of_all(evidence, rows)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Record lags of 0 to 3, with a mismatch of as many parts."""
        lag = np.arange(rows.sequences) // 4 % 4
        p = jittered(rows, 0.15 * lag[rows.owner], rng)
        return replace(rows, p=p, scalars={**rows.scalars, "policy_lag": lag.tolist()})
