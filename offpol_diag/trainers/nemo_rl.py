"""NeMo-RL's keys of `loss_fn`."""

from __future__ import annotations

from offpol_diag.presets import Preset
from offpol_diag.trainers import config
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

TYPE, CAP, LOW = (f"truncated_importance_sampling_{key}" for key in ("type", "ratio", "ratio_min"))
CLIP = ClipKeys("ratio_clip_min", "ratio_clip_max", "ratio_clip_c")
RAW = {TYPE: None, CAP: None}
"""No truncation: a ratio that is left over from a base file is an error without its type."""
ON_POLICY = {"surrogate": "force_on_policy_ratio", "reinforce": "disable_ppo_ratio"}
"""Loss → the key that takes the clipped ratio away: a ratio of 1, or REINFORCE."""


def nemo_rl(parts: Parts) -> Translation:
    """tis, icepop or seq-mask-tis, and a threshold on the sequence's log-prob error."""
    on_policy = parts.policy == "current"
    parts.need(
        ("old", "current"), ("surrogate",) if on_policy else ("ppo_clip", "gspo", "cispo", "reinforce")
    )
    error = parts.take("mult_prob_error", "mean", "upper")
    settings = {**_weight_settings(parts), **_loss_settings(parts.preset)}
    parts.finish()
    block = config.prefixed("loss_fn.", settings)
    if error is not None:
        block["grpo.seq_logprob_error_threshold"] = error.upper
    since = "0.7.0" if "use_cispo" in settings or (settings.get(TYPE) == "tis" and settings[LOW]) else "0.6.0"
    return (Form(block, since),), (
        settings.get(TYPE) == "tis"
        and not settings[LOW]
        and f"before NeMo-RL 0.6.0 there is no {TYPE}: the ratio alone means tis",
        on_policy
        and "force_on_policy_ratio takes one update per batch, and skips the pass for the old log-probs",
        error and "the sequences of seq_logprob_error_threshold leave the denominator",
    )


def _weight_settings(parts: Parts) -> Settings:
    """sequence_level_importance_ratios makes both the weight a product and the loss GSPO."""
    if parts.weight is None:
        return {"use_importance_sampling_correction": False, **RAW}
    on = {"use_importance_sampling_correction": True}
    sequence = parts.loss == "gspo"
    if parts.weight.over == "sum" and not sequence:
        cannot("weights of the product ratio without the GSPO loss")
    band = None if sequence else parts.take_band("token")
    if band is not None:
        return on | _bounded("icepop", *band)
    weight = parts.take_weight("sum" if sequence else "token", lower=True)
    if weight is None or weight.action == "none":
        rule = None if sequence else parts.take("ratio", "mean")
        return on | (_bounded("seq-mask-tis", rule.lower, rule.upper) if rule else RAW)
    if weight.upper is None:
        cannot("weights truncated from below alone")
    return {**on, TYPE: "tis", CAP: weight.upper, LOW: weight.lower}


def _bounded(kind: str, low: float | None, high: float | None) -> Settings:
    """icepop and seq-mask-tis need both bounds; a ratio is never below 0."""
    if high is None:
        cannot(f"{kind} without an upper bound")
    return {TYPE: kind, CAP: high, LOW: 0.0 if low is None else low}


def _loss_settings(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = config.clip_bounds(preset)
        return {"use_cispo": True, CLIP.low: low, CLIP.high: high, CLIP.dual: None}
    if preset.loss in ON_POLICY:
        return {ON_POLICY[preset.loss]: True}
    gspo = {"sequence_level_importance_ratios": True, "token_level_loss": False}
    return {**(gspo if preset.loss == "gspo" else {}), **config.clip_settings(preset, CLIP)}


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    error = any(rule.statistic == "mult_prob_error" for rule in preset.reject)
    overflow = "a ratio that float32 cannot hold counts as 0 here"
    return Guards(denominator="kept" if error else "all", overflow=overflow)


READ = "NVIDIA-NeMo/RL 7ea279abf (2026-08-22)"
TRAINER = Trainer("nemo-rl", READ, nemo_rl, config.YAML_AND_HYDRA, _guards, CLIP, "NeMo-RL")
