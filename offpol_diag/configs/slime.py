"""slime and miles: flags, and mis.yaml for the helper with levels, rules and the veto."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

from offpol_diag.configs import syntax
from offpol_diag.configs.config import Snippet
from offpol_diag.configs.habits import ClipKeys, clip_bounds, clip_remarks, clip_settings
from offpol_diag.configs.parts import IDLE_HIGH, IDLE_LOW, Parts, cannot
from offpol_diag.configs.schema import block
from offpol_diag.errors import ConfigError
from offpol_diag.presets import Loss, Preset

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]
LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
CLIP = ClipKeys("eps-clip", "eps-clip-high", "eps-clip-c")
FILE = "mis.yaml"


@dataclass(frozen=True)
class Paths:
    """Where a trainer keeps its functions, and what it lacks."""

    trainer: str
    icepop: str
    mis: str
    cispo: bool


SLIME = Paths(
    "slime",
    "slime.backends.megatron_utils.loss.icepop_function",
    "examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    True,
)
MILES = Paths(
    "miles",
    "miles.backends.training_utils.loss_hub.corrections.icepop_function",
    "examples.infra_features.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    False,
)


def _said(preset: Preset, paths: Paths) -> Said:
    parts = Parts(preset)
    losses: tuple[Loss, ...] = ("ppo_clip", "gspo", "cispo") if paths.cispo else ("ppo_clip", "gspo")
    parts.need(("old", "current"), losses)
    loss = _loss(preset)
    if parts.policy == "current":
        return _bypass(preset, parts, paths, loss)
    if parts.bare:
        parts.finish()
        nothing = "nothing is corrected without --use-tis"
        return (_flagged(paths, loss),), (nothing, *clip_remarks(preset, CLIP))
    if preset.logs in ("slime-mis", "miles-mis"):
        return _helper(preset, paths, loss)
    try:
        return _flags(preset, paths, loss)
    except ConfigError:
        return _helper(preset, paths, loss)


slime = partial(_said, paths=SLIME)
miles = partial(_said, paths=MILES)


def _loss(preset: Preset) -> dict[str, Any]:
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        return {"advantage-estimator": "cispo", "eps-clip": low, "eps-clip-high": high}
    gspo = {"advantage-estimator": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **clip_settings(preset, CLIP)}


def _flagged(paths: Paths, settings: dict[str, Any]) -> Snippet:
    return block(paths.trainer, "flags", syntax.flags(settings), settings)


def _bypass(preset: Preset, parts: Parts, paths: Paths, loss: dict[str, Any]) -> Said:
    """The rollout's log-probs for the old ones; OPSM asks the sign of each token's advantage."""
    delta = parts.take_opsm()
    parts.finish()
    opsm = {} if delta is None else {"use-opsm": True, "opsm-delta": delta}
    remark = (
        "opsm asks each token's advantage: the same as the sequence's where all its tokens have one (GRPO)",
    )
    snippet = _flagged(paths, {"use-rollout-logprobs": True, **opsm, **loss})
    return (snippet,), (*(remark if opsm else ()), *clip_remarks(preset, CLIP))


# ---------------------------------------------------------------- --use-tis alone


def _flags(preset: Preset, paths: Paths, loss: dict[str, Any]) -> Said:
    parts = Parts(preset)
    band = parts.take_band("token")
    settings: dict[str, Any] = {"use-tis": True}
    if band is not None:
        low, high = band
        settings["custom-tis-function-path"] = paths.icepop
    else:
        weight = parts.take_weight("token", lower=True)
        low, high = (None, None) if weight is None else (weight.lower, weight.upper)
    parts.finish()
    settings |= {"tis-clip": math.inf if high is None else high, "tis-clip-low": 0.0 if low is None else low}
    return (_flagged(paths, {**settings, **loss}),), tuple(clip_remarks(preset, CLIP))


# ---------------------------------------------------------------- the MIS helper


def _helper(preset: Preset, paths: Paths, loss: dict[str, Any]) -> Said:
    parts = Parts(preset)
    if parts.weight is None:
        cannot("a rejection or a veto without weights (the helper rejects only beside use_tis)")
    parts.split_mask()
    settings = _mis_weights(parts) | _mis_rules(parts)
    parts.finish()
    run = {
        "use-tis": True,
        "custom-config-path": FILE,
        "custom-tis-function-path": paths.mis,
        **loss,
    }
    both = {**run, **{f"{FILE}/{key}": value for key, value in settings.items()}}
    snippets = (
        block(paths.trainer, "yaml", syntax.yaml(settings), both, file=FILE),
        block(paths.trainer, "flags", syntax.flags(run), both, "flags"),
    )
    return snippets, (*_remarks(settings), *clip_remarks(preset, CLIP))


def _mis_weights(parts: Parts) -> dict[str, Any]:
    normalize = ("token", "sum") if parts.weight and parts.weight.normalize else tuple(LEVELS)
    weight = parts.take_weight(*normalize, lower=True, normalize=True)
    if weight is None:
        cannot("this weight")
    mode, (low, high) = "truncate", (weight.lower, IDLE_HIGH if weight.upper is None else weight.upper)
    if low is not None:
        mode = "clip"
    rule = parts.take("ratio", weight.over) if weight.action == "none" and not weight.normalize else None
    if rule is not None:
        mode, low = "mask", IDLE_LOW if rule.lower is None else rule.lower
        high = IDLE_HIGH if rule.upper is None else rule.upper
    return {
        "use_tis": True,
        "tis_level": LEVELS[weight.over],
        "tis_mode": mode,
        "tis_lower_bound": low,
        "tis_upper_bound": high,
        "tis_batch_normalize": weight.normalize,
    }


def _mis_rules(parts: Parts) -> dict[str, Any]:
    """use_rs with its level and bounds; the veto is looked at only inside it, so it may need an idle band."""
    rule = next((rule for over in LEVELS if (rule := parts.take("ratio", over))), None)
    veto = parts.take_veto()
    low, high = (rule.lower, rule.upper) if rule else (None, None)
    used = rule is not None or veto is not None
    return {
        "use_rs": used,
        "rs_level": LEVELS[rule.over] if rule else "token",
        "rs_lower_bound": IDLE_LOW if used and low is None else low,
        "rs_upper_bound": IDLE_HIGH if used and high is None else high,
        "rs_veto_threshold": veto.lower if veto else None,
    }


def _remarks(settings: dict[str, Any]) -> tuple[str, ...]:
    idle = {IDLE_HIGH, IDLE_LOW} & {value for value in settings.values() if isinstance(value, float)}
    found = (
        idle and "bounds of 1.0e-9 and 1.0e+9 are idle: the helper clamps the log-ratio to ±20",
        settings["rs_veto_threshold"] and "the veto is looked at only inside use_rs",
        settings["tis_batch_normalize"] and "the batch mean is over the micro-batches of one rank here",
        settings["tis_mode"] == "mask"
        and settings["use_rs"]
        and "use_rs looks at what tis_mode mask has left",
    )
    return tuple(text for text in found if isinstance(text, str) and text)
