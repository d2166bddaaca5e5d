"""prime-rl: r = π_θ/π_rollout, nothing clamped (trainer/rl/loss.py, train.py); [trainer.loss].

What its loss function returns is a mean per sequence, which the trainer then takes the mean and the maximum
of; a sequence without a loss token counts there as 0. The rows of v0.2 log other names. The configuration is
DPPO or IPO; ratios and their masks before 0.5.0.
"""

from __future__ import annotations

import math

from offpol_diag.presets import Reject
from offpol_diag.trainers import base, config
from offpol_diag.trainers.base import Array, Log, Number, Numbers, Side, Tokens, Totals, np, std
from offpol_diag.trainers.config import Parts, Trainer, Translation
from offpol_diag.trainers.schema import Settings, cannot, toml

LARGEST = 1e30
"""Bound on one token's mismatch KL in newer versions; older ones log inf beyond float32."""


def log(t: Tokens, s: Totals) -> Numbers:
    """Return what is logged since 2026-03, with masks on probability differences, or before."""
    now = any(rule.statistic == "prob_diff" for rule in t.preset.reject)
    if not now:
        return s.part(kl_v02, t.only()) | masks_v02(t, s)
    return s.part(kl, t.only()) | masks(t, s)


def kl(t: Tokens, s: Totals) -> Numbers:
    """Return r − 1 − log r over all tokens, and over their entropy."""
    tokens, x = s.sum(t.n), mismatch_kl(t)
    total, square = s.sum(t.row_sum(x)), s.sum(t.row_sum(x**2))
    return {
        "mismatch_kl/all/mean": total / tokens,
        "mismatch_kl/all/std": std(total, square, tokens),
        "mismatch_kl/all/max": s.max(t.row_max(x)),
        "kl_ent_ratio/mean": over_entropy(t, s, total / tokens),
    }


def mismatch_kl(t: Tokens) -> Array:
    """Return r − 1 − log r of each token, [T]."""
    return (t.ratio_minus_one().clip(max=LARGEST) - t.log_ratio).clip(max=LARGEST)


def over_entropy(t: Tokens, s: Totals, x: Number) -> Number:
    """Return a number over the dump's mean entropy, NaN where that is 0; None, not logged, without it."""
    if t.batch.entropy is None:
        return None
    entropy = s.sum(t.row_sum(t.batch.entropy)) / s.sum(t.n)
    return np.where(entropy > 0, x / entropy, math.nan)


def masks(t: Tokens, s: Totals) -> Numbers:
    """Return means over tokens of each sequence: of these the mean and the largest."""
    x, a, kept = mismatch_kl(t), t.batch.advantages, t.applied.kept
    result = {
        "masked_mismatch_kl": mean(t, x, ~kept),
        "unmasked_mismatch_kl": mean(t, x, kept),
        "is_masked": share(t, ~kept),
    }
    # `ipo`, whose mask does not depend on the advantage, logs less
    if any(rule.statistic == "prob_diff" and rule.advantage != "any" for rule in t.preset.reject):
        assert a is not None
        result |= {
            "is_masked_low": share(t, ~kept & (a < 0)),
            "is_masked_high": share(t, ~kept & (a > 0)),
            "masked_advantage_positive": mean(t, a > 0, ~kept),
            "masked_advantage_negative": mean(t, a < 0, ~kept),
        }
    rows = s.sum(t.one)
    return {
        f"{name}/{how}": number
        for name, x in result.items()
        for how, number in (("mean", s.sum(x) / rows), ("max", s.max(x)))
    }


def mean(t: Tokens, x: Array, among: Array) -> Array:
    """Return the mean over some tokens of each sequence, [S]; 0 where there are none."""
    return t.row_sum(np.where(among, x, 0.0)) / np.maximum(t.row_sum(among), 1)


def share(t: Tokens, flags: Array) -> Array:
    """Return the share of the tokens of each sequence that are flagged, [S]."""
    return t.row_sum(flags) / np.maximum(t.n, 1)


# ---------------------------------------------------------------- v0.2


def kl_v02(t: Tokens, s: Totals) -> Numbers:
    """Return r − 1 − log r as means of sequences."""
    rows, x = s.sum(t.one), t.row_mean(mismatch_kl(t))
    total, square = s.sum(x), s.sum(x**2)
    return {
        "mismatch_kl/mean": total / rows,
        "mismatch_kl/std": std(total, square, rows),
        "mismatch_kl/min": s.min(x),
        "mismatch_kl/max": s.max(x),
        "kl_ent_ratio/mean": over_entropy(t, s, total / rows),
    }


def masks_v02(t: Tokens, s: Totals) -> Numbers:
    """Return shares of tokens and sequences beyond each bound alone; the sequence mask is a veto."""
    tokens, rows = s.sum(t.n), s.sum(t.one)
    x, kept, veto = mismatch_kl(t), t.applied.kept, t.preset.veto
    result = {
        "masked_mismatch_kl/mean": s.sum(mean(t, x, ~kept)) / rows,
        "unmasked_mismatch_kl/mean": s.sum(mean(t, x, kept)) / rows,
        "is_masked/mean": s.sum(t.row_sum(~kept)) / tokens,
    }
    for word, side in SIDES.items():
        result[f"is_masked_{word}/mean"] = s.sum(t.dropped_by(*bands(t, "token", side))) / tokens
    for word, side in SIDES.items():
        hits = t.veto_hits(base.half(veto, side)) > 0
        result[f"sequence_masked_{word}/mean"] = s.sum(hits) / rows
    for word, side in SIDES.items():
        beyond = [~t.passes(rule) for rule in bands(t, "mean", side) if not rule.on_tokens]
        result[f"geo_masked_{word}/mean"] = s.sum(sum(beyond, 0 * t.n) > 0) / rows
    geo = np.expm1(t.row_mean(t.log_ratio))
    return result | {"geo_seq_ratio/mean": s.sum(geo) / rows + 1}


SIDES: dict[str, Side] = {"low": "lower", "high": "upper"}


def bands(t: Tokens, over: str, side: Side) -> list[Reject]:
    """List the rules on r at a level, each with only one of its bounds."""
    rules = (rule for rule in t.preset.reject if rule.statistic == "ratio" and rule.over == over)
    return [one for rule in rules if (one := base.half(rule, side))]


PRIME_LOG = Log("prime-rl", log)

# ---------------------------------------------------------------- configuration

TABLE = "trainer.loss."
KL_TERM = "kl_tau adds a term (log r)² on every loss token, masked ones included; 0 leaves it out"
OLD = "these keys are gone since 2026-03-03: pin prime-rl to release 0.4.0, or write a custom loss"
Forms = tuple[Settings, ...]


def prime_rl(parts: Parts) -> Translation:
    """One gradient pass against the rollout: there is no π_old."""
    parts.need(("current",), ("surrogate", "reinforce"))
    forms, remarks = (_probability_mask if parts.loss == "surrogate" else _ratio_masks)(parts)
    parts.finish()
    return [config.prefixed(TABLE, settings) for settings in forms], remarks


def _probability_mask(parts: Parts) -> tuple[Forms, tuple[str, ...]]:
    """DPPO or IPO, the newest spelling first."""
    weight = parts.take_weight("token", actions=("none",))
    if weight is None or len(parts.rules) != 1:
        cannot("this loss without exactly one mask on the probability difference")
    rule = parts.rules.pop()
    plain = (rule.statistic, rule.over, rule.strict, rule.policy) == ("prob_diff", "token", False, None)
    low, high = rule.lower, rule.upper
    if not plain or low is None or high is None or high < 0 < low:
        cannot("a mask on anything but the token's probability difference, with both bounds")
    terms = {"adv_tau": 1.0, "kl_tau": 0.0}
    kind = {"against_or_zero": "dppo", "any": "ipo"}.get(rule.advantage)
    if kind is None:
        cannot(f"this condition on the advantage ({rule.advantage})")
    forms: Forms = ({"type": "default", f"{kind}_mask_low": -low, f"{kind}_mask_high": high, **terms},)
    if kind == "ipo" and low == -high:
        forms = ({"type": "ipo", "ipo_threshold": high, **terms}, *forms)
    return forms, (KL_TERM, "[loss] where the trainer runs alone")


def _ratio_masks(parts: Parts) -> tuple[Forms, tuple[str, ...]]:
    """The keys before 0.5.0."""
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight("token", "sum")
    if weight is None or (weight.over, weight.action) not in (("token", "none"), ("sum", "truncate")):
        cannot("truncated token weights, or no weight")
    bounds = {"token": parts.take("ratio", "token"), "geo": parts.take("ratio", "mean")}
    settings: Settings = {"ratio_type": "token" if weight.over == "token" else "sequence"}
    for name, part in {**bounds, "sequence": parts.take_veto(upper=True)}.items():
        low, high = config.open_bounds(*((part.lower, part.upper) if part else (None, None)))
        settings |= {f"{name}_mask_low": low, f"{name}_mask_high": high}
    if weight.upper is not None and weight.upper > math.exp(10):
        cannot("a product above e^10, where it clamps the log-ratio")
    if weight.upper is not None:
        settings["sequence_clip_high"] = weight.upper
    by_length = ("each sequence is divided by its length here",) if weight.over == "sum" else ()
    return ({**settings, "kl_tau": 0.0},), (OLD, *by_length)


TRAINER = Trainer("prime-rl", prime_rl, {"toml": toml}, logs=(PRIME_LOG,))
