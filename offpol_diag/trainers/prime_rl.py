"""prime-rl's [trainer.loss]: IPO, IcePop, PPO or CISPO; it refuses keys that it does not know."""

from __future__ import annotations

from dataclasses import replace

from offpol_diag.trainers import config
from offpol_diag.trainers.config import ClipKeys, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, cannot, toml

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
TRAINER = Trainer("prime-rl", READ, prime_rl, {"toml": toml}, clip=CLIP, title="prime-rl")
