"""ms-swift: rollout_importance_sampling_mode; its "sequence" is the geometric mean."""

from __future__ import annotations

from offpol_diag.trainers.config import FLAGS, IDLE_HIGH, ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, cannot
from offpol_diag.trainers.trl import loss

CLIP = ClipKeys("epsilon", "epsilon_high", "delta")
MODE = "rollout_importance_sampling_mode"


def ms_swift(parts: Parts) -> Translation:
    """rollout_importance_sampling_mode with an upper bound; its "sequence" is the geometric mean."""
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    settings: Settings = {}
    upper = None
    if parts.weight is not None:
        if parts.weight.over == "sum":
            cannot("weights of the product ratio (its sequence modes take the geometric mean)")
        mode, upper = _mode(parts)
        bound = IDLE_HIGH if upper is None else upper
        settings = {MODE: mode, "rollout_importance_sampling_threshold": bound}
    parts.finish()
    settings = ({"use_vllm": "true"} if settings else {}) | settings | loss(parts.preset, CLIP)
    return (Form(settings, "3.11.0"),), (
        parts.loss == "gspo"
        and "importance_sampling_level sequence_token has the same loss and, with one advantage per "
        "sequence, the same gradient",
        "use_vllm" not in settings and f"ms-swift corrects nothing unless {MODE} is set",
        MODE in settings
        and "the weights multiply the KL-to-reference term as well; needs vLLM 0.10.2 or later",
        MODE in settings
        and upper is None
        and "a threshold of 1.0e+9 is idle: the log-ratio is clamped to ±20",
    )


def _mode(parts: Parts) -> tuple[str, float | None]:
    over = parts.weight.over if parts.weight else ""
    band = parts.take_band(over)
    if band is not None:
        if band[0] is not None or over != "token":
            cannot("a lower bound of the mask" if over == "token" else "weights zeroed by the geometric mean")
        return "token_mask", band[1]
    weight = parts.take_weight("token", "mean")
    raw = weight is not None and weight.action == "none"
    rule = parts.take("ratio", "mean", "upper") if raw and over == "token" else None
    if rule is not None:
        return "sequence_mask", rule.upper
    name = {"token": "token_truncate", "mean": "sequence_truncate"}[over]
    return name, None if weight is None else weight.upper


GUARDS = Guards(20.0, "token", "token", frozenset({"k1"}))
READ = "modelscope/ms-swift 3602360a (2026-08-22)"
TRAINER = Trainer("ms-swift", READ, ms_swift, FLAGS, GUARDS, CLIP, "ms-swift")
