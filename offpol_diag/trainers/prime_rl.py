"""prime-rl: r = π_θ/π_rollout, nothing clamped (trainer/rl/loss.py, train.py); [trainer.loss].

What its loss function returns is a mean per sequence, which the trainer then takes the mean and the maximum
of; a sequence without a loss token counts there as 0. The configuration is IPO, IcePop, PPO or CISPO, and
refuses keys that it does not know.
"""

from __future__ import annotations

import math
from dataclasses import replace

from offpol_diag.trainers import config
from offpol_diag.trainers.base import Array, Log, Number, Numbers, Tokens, Totals, np, std
from offpol_diag.trainers.config import ClipKeys, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, cannot, toml

LARGEST = 1e30
"""Bound on one token's mismatch KL in newer versions; older ones log inf beyond float32."""


def log(t: Tokens, s: Totals) -> Numbers:
    """Return what is logged since 2026-03, with masks on probability differences."""
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
    x, a, kept = mismatch_kl(t), t.batch.advantages, t.kept
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


PRIME_LOG = Log("prime-rl", log)

# ---------------------------------------------------------------- configuration

CLIP = ClipKeys("ratio_low", "ratio_high")
TABLE = "trainer.loss."
IPO = "2026-08-27 (pull request 3418)"
"""The change that left IPO as the only mask on probabilities."""
CAP = 1e4
"""Default of max_importance_ratio, the bound on the ratio of a token that is kept."""
CAPPED = f"a ratio that is neither clipped nor masked is at most {CAP:g} here (max_importance_ratio)"


def prime_rl(parts: Parts) -> Translation:
    """One gradient pass against the rollout: there is no π_old."""
    parts.need(("current",), ("ppo_clip", "surrogate", "reinforce"))
    if parts.loss == "ppo_clip":
        forms, remark = [Form(_ppo(parts))], CAPPED
    elif parts.loss == "surrogate":
        forms, remark = _probability_mask(parts)
    else:
        forms, remark = _icepop(parts) or _cispo(parts)
    parts.finish()
    return [replace(form, settings=config.prefixed(TABLE, form.settings)) for form in forms], (
        remark,
        "[loss] where the trainer runs alone",
    )


def _ppo(parts: Parts) -> Settings:
    low, high = config.clip_bounds(parts.preset)
    if low >= 1:
        cannot("a ratio that the loss does not clip from below")
    return {"type": "ppo", **_ratios(1 - low, 1 + high)}


def _probability_mask(parts: Parts) -> tuple[list[Form], str]:
    """IPO, whose ratio may have a bound of its own, and until August 2026 DPPO."""
    weight = parts.take_weight("token", actions=("none", "truncate"))
    if weight is None or len(parts.rules) != 1:
        cannot("this loss without exactly one mask on the probability difference")
    rule = parts.rules.pop()
    plain = (rule.statistic, rule.over) == ("prob_diff", "token")
    low, high = rule.lower, rule.upper
    if not plain or low is None or high is None or high < 0 < low:
        cannot("a mask on anything but the token's probability difference, with both bounds")
    cap = weight.upper
    if cap is not None and cap < 1:
        cannot("a bound of the ratio below 1")
    terms = {"adv_tau": 1.0, "kl_tau": 0.0}
    if rule.advantage == "against_or_zero" and cap is None:
        dppo = {"type": "default", "dppo_mask_low": -low, "dppo_mask_high": high, **terms}
        gone = f"prime-rl from {IPO} cannot say this: a mask that asks for the advantage's sign"
        return [Form(dppo, "2026-04-06", IPO)], gone
    if rule.advantage != "any":
        cannot(f"this condition on the advantage ({rule.advantage})")
    if low != -high:
        cannot("a mask on the probability difference with unequal bounds")
    newest = Form({"type": "ipo", "eps": high}, "2026-09-18 (pull request 3586)")
    if cap is not None:
        return [replace(newest, settings={**newest.settings, "max_importance_ratio": cap}, since="")], ""
    former = Form({"type": "ipo", "ipo_threshold": high, **terms}, "2026-06-14 (release 0.6.0)", IPO)
    return [newest, former], CAPPED


def _icepop(parts: Parts) -> tuple[list[Form], str] | None:
    band = parts.take_band("token")
    if band is None:
        return None
    low, high = band
    if not low or high is None:
        cannot("a band of the ratio without both bounds")
    form = Form({"type": "icepop", **_ratios(low, high)}, "2026-09-10 (pull request 3526)")
    return [form], "its loss is -A r, with the gradient of the preset's"


def _cispo(parts: Parts) -> tuple[list[Form], str]:
    weight = parts.take_weight("token", actions=("truncate",), lower=True)
    if weight is None or weight.upper is None or weight.upper < 1 or (weight.lower or 0.0) > 1:
        cannot("REINFORCE without token weights truncated at 1 or above")
    return [Form({"type": "cispo", **_ratios(weight.lower or 0.0, weight.upper)})], ""


def _ratios(low: float, high: float) -> Settings:
    """1 − 0.2 is 0.8 in its config, 1 + 0.28 is 1.28."""
    return {key: float(f"{x:.15g}") for key, x in (("ratio_low", low), ("ratio_high", high))}


READ = "PrimeIntellect-ai/prime-rl (configs/trainer.py with score_centering, read on 2026-11-28)"
TRAINER = Trainer("prime-rl", READ, prime_rl, {"toml": toml}, clip=CLIP, logs=(PRIME_LOG,), title="prime-rl")
