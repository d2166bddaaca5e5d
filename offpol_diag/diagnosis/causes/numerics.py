"""The same weights, computed otherwise: by other kernels, or with experts that are routed otherwise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.recorded import Recorded
from offpol_diag.diagnosis.rows import Rows, jittered, percent
from offpol_diag.diagnosis.seen import OUTLYING, ROUNDED, STALE, SYSTEMATIC, Seen, holding


class MoeOutliers(Cause):
    """Experts are routed differently in engine and trainer.

    Most tokens agree closely and 1% to 3% differ by much; these carry nearly all of K3, evenly over
    positions. E[r] = 1.
    """

    kind = "honest"
    id = "moe_outliers"
    sentence = "most tokens agree closely and a few differ by much, as where experts are routed differently"
    confirm = "log router choices on both sides; replay them in the trainer (routing replay, R3)"
    fix = "router in float32, or routing replay"
    apart = {
        "sentinel": "Sentinels are one value.",
    }
    statement = "Experts routed otherwise in the engine than in the trainer."
    speaks_for = ("outliers", "noise")
    speaks_against = ("grows", "share of others")

    def fits(self, seen: Seen) -> bool:
        shaped = bool(holding(seen, ["outliers"])) and seen.body.scale <= 3 * ROUNDED
        return (shaped or bool(seen.recorded.experts)) and not seen.course.back.any()

    def look(self, rows: Rows) -> Found | None:
        seen = rows.once(Seen)
        if not seen.recorded.experts or not seen.outlying:
            return None
        if not seen.same_weights or seen.other_step:
            return None
        tail = seen.body
        evidence = (
            f"{percent(tail.tail)} of the uncertain tokens lie beyond 8 times the usual |Δ|/(1 − q) of "
            f"{tail.scale:.2g} and carry {percent(tail.share)} of K3; the dump says {seen.recorded.experts}"
        )
        return self.of_all(evidence, rows)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Move one uncertain token in fifty by 0.7 nats, so that E[r] stays 1."""
        far = (rng.random(rows.tokens) < 0.02) & (rows.q < -0.3)
        up = rng.random(rows.tokens) < 1 / (1 + np.exp(0.7))
        known = replace(rows.known, recorded=Recorded(experts="model: Mixtral-8x7B"))
        p = np.where(far, np.minimum(rows.p + np.where(up, 0.7, -0.7), -1e-9), rows.p)
        return replace(rows, p=p, known=known)


class Numerics(Cause):
    """Two engines compute the same weights with other kernels.

    A usual token is off by 0.005 to 0.04 of its uncertainty in bf16, on both sides; noise of single tokens,
    the same at every step and position. K3 of dense models below 0.001.
    """

    kind = "honest"
    id = "numerics"
    sentence = "numerics: the same weights computed by two engines"
    apart = {
        "low_precision_storage": "Rounded columns lie on a grid.",
        "quantized_rollout": "Quantisation is larger, and more of it is common to tokens of a kind.",
        "model_differs": "Another model is off by ten times as much.",
    }
    statement = "Other kernels: the same weights, computed otherwise."
    speaks_for = ("close", "noise")
    speaks_against = ("partly", "broad", "grows", "beyond rounding")

    def fits(self, seen: Seen) -> bool:
        if seen.body.scale <= ROUNDED and seen.k3 > HEALTHY_K3:
            return False
        little = seen.body.scale <= 2 * ROUNDED or seen.unsystematic
        shared = seen.share is not None and seen.share.low >= SYSTEMATIC
        return little and not (seen.course.back.any() or shared)

    def look(self, rows: Rows) -> Found | None:
        seen, healthy = rows.once(Seen), rows.known.healthy
        rounding = seen.body.scale <= ROUNDED
        if rounding and seen.k3 > HEALTHY_K3:
            return None
        if seen.course.high.any():
            return None
        shared = seen.share is not None and seen.share.low >= SYSTEMATIC
        near = rounding and seen.body.tail < OUTLYING and not shared and (healthy or seen.same_weights)
        single = (
            seen.noise
            and seen.body.scale <= STALE
            and not (seen.moved or seen.course.growth or seen.course.back.any())
        )
        return self.of_all(seen.evidence, rows) if near or single else None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, p=jittered(rows, 0.01, rng))
