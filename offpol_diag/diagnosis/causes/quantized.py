"""Weights, activations or a cache of few bits, as the dump records them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.recorded import FOUR_BITS, Recorded
from offpol_diag.diagnosis.rows import Rows
from offpol_diag.diagnosis.seen import Seen

MOST_K3 = 0.1
"""K3, nats, up to which quantised weights of 8 bits may be the whole cause: the published band above it is
severe. In real rollouts of 4 bits it reaches 0.13, which the ceiling of the format bounds."""
WIDELY = 0.5
"""Level of a usual token above which quantised weights alone do not fit: 4 bits give up to 0.46."""


class QuantizedRollout(Cause):
    """The rollout is quantised.

    Every token is off: a usual one by 0.03 to 0.065 of its uncertainty in fp8, up to 0.13 in int8, up to 0.46
    at 4 bits; flat over steps and lags. 10% to 28% of the variance of r is common to tokens of a kind.
    """

    kind = "honest"
    id = "quantized_rollout"
    sentence = "a quantised rollout, as the dump says ({recorded})"
    confirm = "the same dump with a bf16 rollout"
    fix = "a higher precision of the rollout"
    apart = {
        "stale": "Stale weights follow the lag.",
        "weights_not_synced": "Other weights have more in common between tokens of a kind (above 40%).",
        "model_differs": "Another model is off by more than quantisation reaches.",
    }
    blanks = {"recorded": "its metadata"}
    statement = "A quantised rollout: weights, activations or cache of few bits."
    speaks_for = ("quantised", "broad", "share of few bits", "flat", "at lag 0")
    speaks_against = ("partly", "plain", "grows", "moved", "share of others", "noise", "wide", "close")

    def fits(self, seen: Seen) -> bool:
        return seen.body.scale <= WIDELY and not seen.course.back.any()

    def look(self, rows: Rows) -> Found | None:
        seen = rows.once(Seen)
        four = seen.recorded.precision in FOUR_BITS
        if not seen.recorded.quantised or seen.k3 > min(seen.most, 1.0 if four else MOST_K3):
            return None
        if not seen.same_weights or seen.other_step:
            return None
        return self.of_all(seen.evidence, rows, words={"recorded": seen.recorded.quantised})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Add what 8 bits do: noise by kind of token and of single ones, of a tenth of the uncertainty."""
        kind = rows.ids if rows.ids is not None else rows.index
        common = np.sin(37.0 * kind)
        size = 0.1 * -np.expm1(rows.q)
        off = size * (0.4 * common + 0.9 * rng.standard_normal(rows.tokens)) - size**2 / 2
        known = replace(rows.known, recorded=Recorded(quantised="rollout_dtype: fp8"))
        return replace(rows, p=np.minimum(rows.p + off, -1e-9), known=known)
