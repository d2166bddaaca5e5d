"""verl's keys, of three generations, and those of its fork for Flash-RL.

Since 0.7.1 its k1 bounds are compared with −Δ, so bounds [lo, hi] on r are written "1/hi_1/lo". A threshold
is always a quoted string: YAML reads 0.5_2 as 0.52.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Loss, Preset, Reject, Statistic
from offpol_diag.trainers import config, schema
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

BLOCK = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
LOSS = "actor_rollout_ref.actor.policy_loss."
LOG_PROBS = {"actor_rollout_ref.rollout.calculate_log_probs": True}
CLIP = ClipKeys("clip_ratio_low", "clip_ratio_high", "clip_ratio_c", dual_default=3.0)
LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
MODES = {
    "ppo_clip": "vanilla",
    "gspo": "gspo",
    "cispo": "cispo",
    "reinforce": "gpg",
}
"""Losses that the decoupled form can have → loss_mode."""
DPPO = {("prob_diff", "against_or_zero"): "dppo_tv", ("binary_kl", "away"): "dppo_kl"}
"""Statistic and advantage of a rule on tokens → loss_mode."""
OPTIONS = {"token": "token", "sum": "seq_sum", "mean": "seq_mean", "max": "seq_max"}


def verl(parts: Parts) -> Translation:
    """Today's keys, and those of the generation whose logs the preset has, or that could still express it."""
    preset = parts.preset
    forms: list[Form] = []
    notes: list[object] = []
    failed: list[ConfigError] = []
    refused = ""
    for keys in (january, november, october):
        if keys is november and not failed and preset.logs not in ("verl-2025-10", "verl-2025-11"):
            break
        if keys is october and preset.logs != "verl-2025-10":
            break
        try:
            (form,), differs = keys(Parts(preset))
        except ConfigError as error:
            failed.append(error)
            if keys is january:
                refused = f"verl from 0.7.1 cannot say this: {error.message}"
        else:
            if all(form.since < newer.since for newer in forms):
                forms.append(form)
                notes += differs
    if not forms:
        raise failed[0]
    return forms, (*notes, refused)


def _translation(
    settings: Settings, preset: Preset, since: str, before: str = "", notes: Sequence[object] = ()
) -> Translation:
    config.no_dual_clip(preset)
    settings = {**settings, **LOG_PROBS, **config.clip_settings(preset, CLIP, ACTOR)}
    idle = "bounds of 1.0e-9 and 1.0e+9 are idle: the log-ratio is clamped to ±20"
    return (Form(settings, since, before),), (*notes, config.idle(settings) and idle, CLIP.remark(preset))


def october(parts: Parts) -> Translation:
    """0.6.0: algorithm.rollout_is*: one level for weight and bounds; bounds on r itself."""
    preset = parts.preset
    parts.need(("old",), ("ppo_clip",))
    settings: Settings = {"rollout_is": not parts.bare}
    weighted = parts.weight is not None
    if weighted:
        settings |= _october_weight(parts)
    veto = parts.take_veto()
    if veto is not None and not weighted:
        cannot("a veto without a weight")
    settings["rollout_is_veto_threshold"] = veto.lower if veto else None
    parts.finish()
    drops = settings["rollout_is_veto_threshold"] or settings.get("rollout_is_mode") == "mask"
    zeroed = "in verl 0.6.0 what is dropped stays in the denominator: its weight is 0"
    return _translation(
        config.prefixed("algorithm.", settings), preset, "0.6.0", "0.6.1", (drops and zeroed,)
    )


def _october_weight(parts: Parts) -> Settings:
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or cannot("weights of a turn")
    band = parts.take_band(over) if parts.rules or (parts.weight and parts.weight.action == "mask") else None
    if band is not None:
        low, high = config.idle_bounds(*band)
        mode = {"rollout_is_mode": "mask", "rollout_is_threshold": high, "rollout_is_threshold_lower": low}
        return {"rollout_is_level": level, **mode}
    weight = parts.take_weight(over)
    _, upper = config.idle_bounds(None, weight.upper if weight else None)
    return {"rollout_is_level": level, "rollout_is_mode": "truncate", "rollout_is_threshold": upper}


def november(parts: Parts) -> Translation:
    """0.6.1 and 0.7.0: algorithm.rollout_correction with rollout_rs and the veto; bounds on r itself.

    In bypass mode these releases set the loss where the actors do not see it, so that a PPO clip against the
    rollout is all they can do.
    """
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip",))
    if bypass and not parts.bare:
        cannot("weights or rules of π_θ")
    parts.split_mask()
    settings: Settings = {"rollout_is": None}
    weight = parts.take_weight("token", "sum")
    if weight is not None:
        _, upper = config.idle_bounds(None, weight.upper)
        settings = {"rollout_is": LEVELS[weight.over], "rollout_is_threshold": upper}
    rule = next((rule for over in LEVELS if (rule := parts.take("ratio", over))), None)
    settings["rollout_rs"] = LEVELS[rule.over] if rule else None
    if rule is not None:
        low, high = config.idle_bounds(rule.lower, rule.upper)
        settings |= {"rollout_rs_threshold": high, "rollout_rs_threshold_lower": low}
    veto = parts.take_veto()
    settings["rollout_token_veto_threshold"] = veto.lower if veto else None
    settings["bypass_mode"] = bypass
    parts.finish()
    return _translation(config.prefixed(BLOCK, settings), parts.preset, "0.6.1", "0.7.1")


def january(parts: Parts) -> Translation:
    """Since 0.7.1: algorithm.rollout_correction with the k1, k2, k3 options."""
    bypass = parts.policy == "current"
    parts.need(("old", "current"), ("ppo_clip", "reinforce") if bypass else tuple(MODES))
    dppo = _dppo(parts) if bypass else None
    if dppo is not None:
        parts.finish()
        anchored = "needs the V1 trainer (the default): the legacy one replaces loss_mode in bypass mode"
        return _translation(dppo, parts.preset, "0.9.0", notes=(anchored,))
    if bypass and parts.loss == "ppo_clip" and parts.weight is not None:
        cannot("weights of π_θ under a PPO clip: bypass_mode applies them to loss_type reinforce alone")
    settings = {**_january_weight(parts), **_january_rules(parts)}
    settings |= {"bypass_mode": bypass, **({"loss_type": parts.loss} if bypass else {})}
    if parts.veto is not None:
        cannot("a veto on one token, which is gone since 2026-01-14 (its nearest is rollout_rs=seq_max_k2)")
    parts.finish()
    block = config.prefixed(BLOCK, settings)
    if bypass:
        block |= {ACTOR + "use_rollout_log_probs": True, LOSS + "loss_mode": "bypass_mode"}
        block |= config.prefixed(f"{LOSS}rollout_correction.", settings)
    elif parts.loss != "ppo_clip":
        block[LOSS + "loss_mode"] = MODES[parts.loss]
    rules = settings["rollout_rs"] is not None
    notes = (
        rules
        and any(rule.statistic in ("ratio", "k1") for rule in parts.preset.reject)
        and "since 0.7.1 verl compares k1 bounds with -log r: these thresholds are on 1/r",
        rules
        and not bypass
        and "the V1 trainer (the default) counts rejected tokens in the denominator, the legacy one not",
        bypass and "without the second block the loss falls back to sequence weights with threshold 2",
    )
    return _translation(block, parts.preset, _since(settings, parts.loss), notes=notes)


def _since(settings: Settings, loss: Loss) -> str:
    """Return the first version that reads these keys of the correction."""
    if isinstance(settings.get("rollout_is_threshold"), str):
        return "0.8.0"
    if settings["bypass_mode"] or settings["rollout_rs"]:
        return "0.7.1"
    return "0.7.0" if loss == "cispo" else "0.6.1"


def _dppo(parts: Parts) -> Settings | None:
    """Return the settings of a DPPO mask with its truncated ratio; None if there is none.

    Its bounds are clip_ratio_low and _high, on a divergence from the anchor: the rollout, in bypass mode.
    """
    weight = parts.weight
    mode = next((name for rule in parts.rules if (name := DPPO.get((rule.statistic, rule.advantage)))), None)
    if parts.loss != "reinforce" or mode is None or weight is None or weight.upper is None:
        return None
    rule = parts.rules.pop()
    low = rule.upper if mode == "dppo_kl" else rule.lower and -rule.lower
    if parts.rules or rule.over != "token" or None in (low, rule.upper):
        cannot(f"this rule beside {mode}")
    parts.take_weight("token", actions=("truncate",))
    return {
        BLOCK + "bypass_mode": True,
        LOSS + "loss_mode": mode,
        ACTOR + "clip_ratio_low": low,
        ACTOR + "clip_ratio_high": rule.upper,
        ACTOR + "clip_ratio_c": weight.upper,
    }


def _january_weight(parts: Parts) -> Settings:
    weight = parts.take_weight("token", "sum", actions=("truncate", "none", "mask"), normalize=True)
    if weight is None:
        return {"rollout_is": None}
    low, high = config.idle_bounds(weight.lower, weight.upper)
    band = f"{schema.number(low)}_{schema.number(high)}"
    result = {
        "rollout_is": LEVELS[weight.over],
        "rollout_is_threshold": band if weight.action == "mask" else high,
    }
    return {**result, **({"rollout_is_batch_normalize": True} if weight.normalize else {})}


def _january_rules(parts: Parts) -> Settings:
    options: dict[str, str] = {}
    for rule in tuple(parts.rules):
        option, threshold = _option_of(rule) or ("", "")
        if option and option not in options and parts.take(rule.statistic, rule.over):
            options[option] = threshold
    if not options:
        return {"rollout_rs": None}
    return {"rollout_rs": ",".join(options), "rollout_rs_threshold": ",".join(options.values())}


def _option_of(rule: Reject) -> tuple[str, str] | None:
    """Return (option, threshold) of a rule; None if there is none.

    A k1 option has bounds on 1/r; a missing one is idle where the clamp makes it so.
    """
    over, statistic, open_ended = OPTIONS.get(rule.over), rule.statistic, None in (rule.lower, rule.upper)
    if over is None:
        return None
    if statistic in ("k2", "k3") and rule.lower is None and rule.upper is not None:
        return f"{over}_{statistic}", schema.number(rule.upper)
    if statistic not in ("ratio", "k1") or rule.over == "max" or (rule.over == "sum" and open_ended):
        return None  # tokens are clamped, their sum is not
    low, high = rule.lower, rule.upper
    if statistic == "ratio":
        low, high = high and schema.inverse(high), low and schema.inverse(low)
    else:
        low, high = (None if bound is None else math.exp(bound) for bound in (low, high))
    return f"{over}_k1", "_".join(map(schema.number, config.idle_bounds(low, high)))


def flash_rl(parts: Parts) -> Translation:
    """yaof20/verl, the fork for Flash-RL: an upper bound on the token weight, and nothing else."""
    parts.need(("old",), ("ppo_clip",))
    weight = parts.take_weight("token", actions=("truncate",))
    parts.finish()
    cap = -1.0 if weight is None else weight.upper
    clip = config.clip_settings(parts.preset, CLIP, ACTOR)
    remark = "key of the fork yaof20/verl, main; its branch flash-rl calls it imp_ratio_cap"
    settings = {ACTOR + "tis_imp_ratio_cap": cap, **LOG_PROBS, **clip}
    return (Form(settings),), (remark,)


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    """Return the guards of the newest version that can express the preset."""
    if not any(one.current for one in snippets):
        return Guards(20.0, denominator="kept")
    unclamped: frozenset[Statistic] = frozenset({"prob_diff", "binary_kl"})
    return Guards(20.0, "aggregate", "token", unclamped, None if preset.policy == "old" else "all")


OVERRIDES = partial(schema.hydra, added=LOSS + "rollout_correction")
TRAINER = Trainer(
    "verl",
    "verl-project/verl 1dda039b (2026-08-22)",
    verl,
    {"yaml": schema.yaml, "hydra": OVERRIDES},
    _guards,
    title="verl",
)
FLASH_RL = Trainer(
    "flash-rl", "yaof20/verl 1e413344 (2025-08-27)", flash_rl, config.YAML_AND_HYDRA, clip=CLIP
)
