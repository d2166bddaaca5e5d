"""verl: three generations of keys, and its fork for Flash-RL.

Since 0.7.1 its k1 bounds are compared with −Δ, so bounds [lo, hi] on r are written "1/hi_1/lo". A threshold
is always a quoted string: YAML reads 0.5_2 as 0.52.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_remarks, clip_settings, no_dual_clip
from offpol_diag.configs.parts import IDLE_HIGH, IDLE_LOW, Parts, cannot
from offpol_diag.configs.schema import yaml_and_hydra
from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
BLOCK = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
LOSS = "actor_rollout_ref.actor.policy_loss."
LOG_PROBS = {"actor_rollout_ref.rollout.calculate_log_probs": True}
CLIP = ClipKeys("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", dual_default=3.0)
LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
OPTIONS = {"token": "token", "sum": "seq_sum", "mean": "seq_mean", "max": "seq_max"}
IDLE = "bounds of 1.0e-9 and 1.0e+9 are idle: the log-ratio is clamped to ±20"
NOW = "verl from 0.7.1"


def verl(preset: Preset) -> Said:
    """Today's keys, and those of the generation whose logs the preset has, or that could still say it."""
    logs = preset.logs or ""
    older = (november, october) if logs == "verl-2025-10" else (november,)
    tried = [_try(january, preset)]
    if logs in ("verl-2025-10", "verl-2025-11") or isinstance(tried[0], ConfigError):
        tried += [_try(one, preset) for one in older]
    said = [one for one in tried if isinstance(one, tuple)]
    if not said:
        raise next(one for one in tried if isinstance(one, ConfigError))
    gone = f"{NOW} cannot say this: {tried[0].message}" if isinstance(tried[0], ConfigError) else ""
    remarks = dict.fromkeys((*(text for _, texts in said for text in texts), *([gone] if gone else ())))
    return tuple(one for snippets, _ in said for one in snippets), tuple(remarks)


def _try(generation: Callable[[Preset], Said], preset: Preset) -> Said | ConfigError:
    try:
        return generation(preset)
    except ConfigError as error:
        return error


def _said(settings: dict[str, Any], preset: Preset, *remarks: str, added: str = "") -> Said:
    no_dual_clip(preset)
    settings = {**settings, **LOG_PROBS, **clip_settings(preset, CLIP, ACTOR)}
    idle = (IDLE,) if {IDLE_HIGH, IDLE_LOW} & set(map(_number, settings.values())) else ()
    return yaml_and_hydra("verl", settings, added), (*remarks, *idle, *clip_remarks(preset, CLIP))


def _number(value: object) -> object:
    return value if isinstance(value, float) else None


# ---------------------------------------------------------------- 0.6.0, and until 2025-11-07


def october(preset: Preset) -> Said:
    """algorithm.rollout_is*: one level for weight and bounds; bounds on r itself."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip",))
    settings: dict[str, Any] = {"rollout_is": preset.apply and not parts.bare}
    if parts.weight is not None:
        settings |= _october_weight(parts)
    veto = parts.take_veto()
    if veto is not None and parts.weight is None and "rollout_is_level" not in settings:
        cannot("a veto without a weight")
    settings["rollout_is_veto_threshold"] = veto.lower if veto else None
    parts.preset = Preset(preset.name, preset.summary)  # `apply` has been said
    parts.finish()
    block = {f"algorithm.{key}": value for key, value in settings.items()}
    drops = settings["rollout_is_veto_threshold"] or settings.get("rollout_is_mode") == "mask"
    zeroed = ("in verl 0.6.0 what is dropped stays in the denominator: its weight is 0",) if drops else ()
    return _said(block, preset, *zeroed)


def _october_weight(parts: Parts) -> dict[str, Any]:
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or cannot("weights of a turn")
    band = parts.take_band(over) if parts.rules or (parts.weight and parts.weight.action == "mask") else None
    if band is not None:
        low, high = _idle(*band)
        mode = {"rollout_is_mode": "mask", "rollout_is_threshold": high, "rollout_is_threshold_lower": low}
        return {"rollout_is_level": level, **mode}
    weight = parts.take_weight(over)
    upper = IDLE_HIGH if weight is None or weight.upper is None else weight.upper
    return {"rollout_is_level": level, "rollout_is_mode": "truncate", "rollout_is_threshold": upper}


# ---------------------------------------------------------------- 0.6.1 and 0.7.0


def november(preset: Preset) -> Said:
    """algorithm.rollout_correction with rollout_rs and the veto; bounds on r itself.

    In bypass mode these releases set the loss where the actors do not see it, so that a PPO clip against the
    rollout is all they can do.
    """
    parts = Parts(preset)
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",))
    if bypass and not parts.bare:
        cannot("weights or rules of π_θ")
    parts.split_mask()
    settings = {**_november_weight(parts), **_november_rule(parts)}
    veto = parts.take_veto()
    settings["rollout_token_veto_threshold"] = veto.lower if veto else None
    settings["bypass_mode"] = bypass
    parts.finish()
    return _said({BLOCK + key: value for key, value in settings.items()}, preset)


def _november_weight(parts: Parts) -> dict[str, Any]:
    weight = parts.take_weight("token", "sum")
    if weight is None:
        return {"rollout_is": None}
    upper = IDLE_HIGH if weight.upper is None else weight.upper
    return {"rollout_is": LEVELS[weight.over], "rollout_is_threshold": upper}


def _november_rule(parts: Parts) -> dict[str, Any]:
    for over, name in LEVELS.items():
        rule = parts.take("ratio", over)
        if rule is not None:
            low, high = _idle(rule.lower, rule.upper)
            return {"rollout_rs": name, "rollout_rs_threshold": high, "rollout_rs_threshold_lower": low}
    return {"rollout_rs": None}


def _idle(low: float | None, high: float | None) -> tuple[float, float]:
    return (IDLE_LOW if low is None else low, IDLE_HIGH if high is None else high)


# ---------------------------------------------------------------- since 0.7.1


def january(preset: Preset) -> Said:
    """algorithm.rollout_correction with the k1, k2, k3 options."""
    parts = Parts(preset)
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip", "reinforce") if bypass else ("ppo_clip", "gspo", "cispo"))
    if bypass and parts.loss == "ppo_clip" and parts.weight is not None:
        cannot("weights of π_θ under a PPO clip: bypass_mode applies them to loss_type reinforce alone")
    settings = {**_january_weight(parts), **_january_rules(parts)}
    settings |= {"bypass_mode": bypass, **({"loss_type": parts.loss} if bypass else {})}
    if parts.veto is not None:
        cannot("a veto on one token, which is gone since 2026-01-14 (its nearest is rollout_rs=seq_max_k2)")
    parts.finish()
    block = {BLOCK + key: value for key, value in settings.items()}
    if bypass:
        block |= {ACTOR + "use_rollout_log_probs": True, LOSS + "loss_mode": "bypass_mode"}
        block |= {f"{LOSS}rollout_correction.{key}": value for key, value in settings.items()}
    elif parts.loss != "ppo_clip":
        block[LOSS + "loss_mode"] = parts.loss
    return _said(block, preset, *_remarks(preset, settings, bypass), added=LOSS + "rollout_correction")


def _january_weight(parts: Parts) -> dict[str, Any]:
    weight = parts.take_weight("token", "sum", actions=("truncate", "none", "mask"), normalize=True)
    if weight is None:
        return {"rollout_is": None}
    threshold: object = IDLE_HIGH if weight.upper is None else weight.upper
    if weight.action == "mask":
        low, high = _idle(weight.lower, weight.upper)
        threshold = f"{syntax.number(low)}_{syntax.number(high)}"
    found = {"rollout_is": LEVELS[weight.over], "rollout_is_threshold": threshold}
    return {**found, **({"rollout_is_batch_normalize": True} if weight.normalize else {})}


def _january_rules(parts: Parts) -> dict[str, Any]:
    said: dict[str, str] = {}
    for rule in tuple(parts.rules):
        found = _option(rule)
        if found and found[0] not in said and parts.take(rule.statistic, rule.over):
            said[found[0]] = found[1]
    if not said:
        return {"rollout_rs": None}
    return {"rollout_rs": ",".join(said), "rollout_rs_threshold": ",".join(said.values())}


def _option(rule: Reject) -> tuple[str, str] | None:
    """(option, threshold) of a rule; None where there is none."""
    over, statistic = OPTIONS.get(rule.over), rule.statistic
    if over is None:
        return None
    if statistic in ("k2", "k3") and rule.lower is None and rule.upper is not None:
        return f"{over}_{statistic}", syntax.number(rule.upper)
    if statistic not in ("ratio", "k1") or rule.over == "max":
        return None
    bounds = _k1(rule)
    return None if bounds is None else (f"{over}_k1", "_".join(map(syntax.number, bounds)))


def _k1(rule: Reject) -> tuple[float, float] | None:
    """The bounds on 1/r that keep what the rule keeps; a missing one is idle where the clamp makes it so."""
    if rule.over == "sum" and None in (rule.lower, rule.upper):
        return None  # tokens are clamped, their sum is not
    if rule.statistic == "ratio":
        low = IDLE_LOW if rule.upper is None else syntax.inverse(rule.upper)
        return low, IDLE_HIGH if rule.lower is None else syntax.inverse(rule.lower)
    low = IDLE_LOW if rule.lower is None else math.exp(rule.lower)
    return low, IDLE_HIGH if rule.upper is None else math.exp(rule.upper)


def _remarks(preset: Preset, settings: dict[str, Any], bypass: bool) -> tuple[str, ...]:
    rules = settings["rollout_rs"] is not None
    loose = not bypass and rules
    kept = "the V1 trainer (the default) counts rejected tokens in the denominator, the legacy one not"
    found = (
        rules
        and any(rule.statistic in ("ratio", "k1") for rule in preset.reject)
        and "since 0.7.1 verl compares k1 bounds with -log r: these thresholds are on 1/r",
        loose and kept,
        bypass and "without the second block the loss falls back to sequence weights with threshold 2",
    )
    return tuple(text for text in found if text)


# ---------------------------------------------------------------- the fork for Flash-RL


def flash_rl(preset: Preset) -> Said:
    """yaof20/verl: an upper bound on the token weight, and nothing else."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip",))
    weight = parts.take_weight("token", actions=("truncate",))
    parts.finish()
    cap = -1.0 if weight is None else weight.upper
    settings = {ACTOR + "tis_imp_ratio_cap": cap, **LOG_PROBS, **clip_settings(preset, CLIP, ACTOR)}
    remark = "key of the fork yaof20/verl, main; its branch flash-rl calls it imp_ratio_cap"
    return yaml_and_hydra("flash-rl", settings), (remark, *clip_remarks(preset, CLIP))
