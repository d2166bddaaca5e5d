"""Honest mismatches: older weights, few bits, experts routed otherwise, other kernels."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.main_gap import HEALTHY_K3
from offpol_diag.diagnosis.metadata import Metadata
from offpol_diag.diagnosis.profile import CUT, MOSTLY, OUTLYING, RISING, ROUNDED, STALE, Common, Profile
from offpol_diag.diagnosis.rows import Rows, jittered

WIDELY = 0.5
"""Level of a usual token above which quantised weights alone do not fit: 4 bits give up to 0.46."""


class Stale(Cause):
    """The engine sampled with older weights than the trainer's.

    K3 rises with policy_lag and falls to the engine's own level at lag 0; the trainer has moved along its
    advantages, so cov(A, r) is positive. E[r] = 1.
    """

    kind = "honest"
    needs = ("policy_lag",)
    id = "stale"
    speaks_for = ("behind", "grows", "wide", "shared")
    speaks_against = ("flat over lag", "noise", "at lag 0", "close")
    sentence = "stale weights: the engine sampled with older weights than the trainer's"
    confirm = "K3 by policy_lag falls to the engine's own level at lag 0"
    fix = "fewer steps between weight syncs"
    statement = "Stale weights: the engine's are older than the trainer's."
    apart = {"weights_not_synced": "Weights that do not arrive differ at a recorded lag of 0, too."}

    def fits(self, profile: Profile) -> bool:
        return not profile.in_sync

    def look(self, rows: Rows) -> Found | None:
        profile = rows.once(Profile)
        if not profile.over_lag > RISING:
            return None
        evidence = f"K3 ({CUT}) by policy lag: {profile.lags_text}"
        if profile.lags.get(0, 0.0) > HEALTHY_K3:
            evidence += "; what there is at lag 0 is more than rounding, and no lag explains it"
        return Found(self, evidence, rows, rows.every)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Record lags of 0 to 3, with a mismatch of as many parts."""
        lag = np.arange(rows.sequences) // 4 % 4
        return jittered(rows, 0.15 * lag[rows.owner], rng, policy_lag=lag.tolist())


class QuantizedRollout(Cause):
    """The rollout is quantised.

    Every token is off: a usual one by 0.03 to 0.065 of its uncertainty in fp8, up to 0.13 in int8, up to 0.46
    at 4 bits; flat over steps and lags. 10% to 28% of the variance of r is common to tokens of a kind.
    """

    kind = "honest"
    id = "quantized_rollout"
    speaks_for = ("quantised", "broad", "at lag 0")
    speaks_against = ("partly", "plain", "grows", "wide", "shared", "noise", "close")
    sentence = "a quantised rollout, as the dump says ({recorded})"
    confirm = "the same dump with a bf16 rollout"
    fix = "a higher precision of the rollout"
    statement = "A quantised rollout: weights, activations or cache of few bits."
    apart = {
        "weights_not_synced": (
            "With other weights, more than 40% of the variance of r is common to tokens of a kind."
        ),
    }

    def fits(self, profile: Profile) -> bool:
        return profile.usual <= WIDELY and not profile.course.back

    def look(self, rows: Rows) -> Found | None:
        profile = rows.once(Profile)
        recorded = profile.metadata.quantised
        if not recorded or not profile.same_weights or profile.common >= Common.OTHER_STEP:
            return None
        return Found(self, profile.evidence, rows, rows.every, words={"recorded": recorded})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Add what 8 bits do: noise by kind of token and of single ones, of a tenth of the uncertainty."""
        kind = rows.ids if rows.ids is not None else rows.index
        size = 0.1 * -np.expm1(rows.q)
        off = size * (0.4 * np.sin(37.0 * kind) + 0.9 * rng.standard_normal(rows.tokens)) - size**2 / 2
        metadata = Metadata(quantised="rollout_dtype: fp8")
        return replace(rows, p=np.minimum(rows.p + off, -1e-9), metadata=metadata)


class MoeOutliers(Cause):
    """Experts are routed differently in engine and trainer.

    Most tokens agree closely and 1% to 3% differ by much; these carry nearly all of K3, evenly over
    positions. E[r] = 1.
    """

    kind = "honest"
    id = "moe_outliers"
    speaks_for = ("outliers", "noise")
    speaks_against = ("grows", "shared")
    sentence = "most tokens agree closely and a few differ by much, as where experts are routed differently"
    evidence = "{}, beyond 8 times the usual |Δ|/(1 − q) of {:.2g}; the dump says {}"
    confirm = "log router choices on both sides; replay them in the trainer (routing replay, R3)"
    fix = "router in float32, or routing replay"
    statement = "Experts that are routed differently in engine and trainer."
    apart = {"sentinel": "A sentinel is one constant."}

    def fits(self, profile: Profile) -> bool:
        shaped = profile.few_carry >= MOSTLY and profile.usual <= 3 * ROUNDED
        return (shaped or bool(profile.metadata.experts)) and not profile.course.back

    def look(self, rows: Rows) -> Found | None:
        profile = rows.once(Profile)
        recorded = profile.metadata.experts
        fits = profile.same_weights and profile.common < Common.OTHER_STEP
        if not recorded or not profile.outlying or not fits:
            return None
        evidence = self.evidence.format(profile.outliers_text, profile.usual, recorded)
        return Found(self, evidence, rows, rows.every)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Move one uncertain token in fifty by 0.7 nats, so that E[r] stays 1."""
        far = (rng.random(rows.tokens) < 0.02) & (rows.q < -0.3)
        up = rng.random(rows.tokens) < 1 / (1 + np.exp(0.7))
        p = np.where(far, np.minimum(rows.p + np.where(up, 0.7, -0.7), -1e-9), rows.p)
        return replace(rows, p=p, metadata=Metadata(experts="model: Mixtral-8x7B"))


class Numerics(Cause):
    """Two engines compute the same weights with other kernels.

    A usual token is off by 0.005 to 0.04 of its uncertainty in bf16, on both sides; noise of single tokens,
    the same at every step and position. K3 of dense models below 0.001.
    """

    kind = "honest"
    id = "numerics"
    speaks_for = ("close", "noise")
    speaks_against = ("partly", "broad", "grows", "beyond rounding")
    sentence = "numerics: the same weights computed by two engines"
    statement = "Other kernels: the same weights, computed differently."
    apart = {"quantized_rollout": "With few bits, more is common to tokens of a kind."}

    def fits(self, profile: Profile) -> bool:
        little = profile.usual <= 2 * ROUNDED or profile.common <= Common.ROUNDING
        return little and not (profile.partly or profile.course.back or profile.common >= Common.SYSTEMATIC)

    def look(self, rows: Rows) -> Found | None:
        profile = rows.once(Profile)
        if profile.partly or profile.course.high.any():
            return None
        body = profile.usual <= ROUNDED and profile.outliers < OUTLYING
        rounding = body and profile.common < Common.SYSTEMATIC and (rows.healthy or profile.same_weights)
        noise = (
            profile.common == Common.NOISE and profile.usual <= STALE and not profile.changes
        )  # at any lag
        return Found(self, profile.evidence, rows, rows.every) if rounding or noise else None

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return jittered(rows, 0.01, rng)
