"""slime's flags, and its MIS helper's mis.yaml."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset
from offpol_diag.trainers import config
from offpol_diag.trainers.config import FLAGS, IDLE_LOW, ClipKeys, Guards, Parts, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
CLIP = ClipKeys("eps-clip", "eps-clip-high", "eps-clip-c")
FILE = "mis.yaml"


def slime(parts: Parts, icepop: str, mis: str, losses: Sequence[str]) -> Translation:
    """Flags where they can express it, else the helper; `icepop` and `mis` are paths of its functions."""
    preset = parts.preset
    parts.need(("old", "current"), losses)
    loss = _loss(preset)
    if parts.policy == "current":
        return _bypass(parts, loss)
    if parts.bare:
        parts.finish()
        return (_form(loss),), ("nothing is corrected without --use-tis",)
    if preset.logs not in ("slime-mis", "miles-mis"):
        try:
            return (_form(_flags(Parts(preset), icepop) | loss),), ()
        except ConfigError:
            pass
    return _helper(parts, mis, loss)


def _form(settings: Settings) -> Form:
    """Return settings with the first release of slime that reads them."""
    if settings.get("advantage-estimator") == "cispo":
        return Form(settings, "0.3.1")
    icepop = "custom-tis-function-path" in settings and "custom-config-path" not in settings
    return Form(settings, "0.2.1" if icepop or "use-opsm" in settings else "0.2.0")


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = config.clip_bounds(preset)
        return {"advantage-estimator": "cispo", "eps-clip": low, "eps-clip-high": high}
    gspo = {"advantage-estimator": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **config.clip_settings(preset, CLIP)}


def _bypass(parts: Parts, loss: Settings) -> Translation:
    """The rollout's log-probs for the old ones; OPSM asks the sign of each token's advantage."""
    opsm: Settings = {}
    for rule in tuple(parts.rules):
        if (rule.statistic, rule.over, rule.advantage, rule.lower) == ("k1", "mean", "negative", None):
            parts.rules.remove(rule)
            opsm = {"use-opsm": True, "opsm-delta": rule.upper}
    parts.finish()
    remark = (
        "opsm asks each token's advantage: the same as the sequence's where all its tokens have one (GRPO)"
    )
    return (_form({"use-rollout-logprobs": True, **opsm, **loss}),), ((remark,) if opsm else ())


def _flags(parts: Parts, icepop: str) -> Settings:
    """--use-tis alone."""
    band = parts.take_band("token")
    settings: Settings = {"use-tis": True}
    if band is not None:
        low, high = band
        settings["custom-tis-function-path"] = icepop
    else:
        weight = parts.take_weight("token", lower=True)
        low, high = (None, None) if weight is None else (weight.lower, weight.upper)
    parts.finish()
    low, high = config.open_bounds(low, high)
    return {**settings, "tis-clip": high, "tis-clip-low": low}


def _helper(parts: Parts, mis: str, loss: Settings) -> Translation:
    """The MIS helper: flags, and its own file."""
    if parts.weight is None:
        cannot("a rejection or a veto without weights (the helper rejects only beside use_tis)")
    parts.split_mask()
    settings = _mis_weights(parts) | _mis_rules(parts)
    parts.finish()
    run = {"use-tis": True, "custom-config-path": FILE, "custom-tis-function-path": mis, **loss}
    return (_form(run | config.prefixed(f"{FILE}/", settings)),), (
        config.idle(settings)
        and "bounds of 1.0e-9 and 1.0e+9 are idle: the helper clamps the log-ratio to ±20",
        settings["rs_veto_threshold"] and "the veto is looked at only inside use_rs",
        settings["tis_batch_normalize"] and "the batch mean is over the micro-batches of one rank here",
        settings["tis_mode"] == "mask"
        and settings["use_rs"]
        and "use_rs looks at what tis_mode mask has left",
    )


def _mis_weights(parts: Parts) -> Settings:
    normalize = ("token", "sum") if parts.weight and parts.weight.normalize else tuple(LEVELS)
    weight = parts.take_weight(*normalize, lower=True, normalize=True)
    if weight is None:
        cannot("this weight")
    mode, low, high = "truncate" if weight.lower is None else "clip", weight.lower, weight.upper
    rule = parts.take("ratio", weight.over) if weight.action == "none" and not weight.normalize else None
    if rule is not None:
        mode, low, high = "mask", IDLE_LOW if rule.lower is None else rule.lower, rule.upper
    return {
        "use_tis": True,
        "tis_level": LEVELS[weight.over],
        "tis_mode": mode,
        "tis_lower_bound": low,
        "tis_upper_bound": config.IDLE_HIGH if high is None else high,
        "tis_batch_normalize": weight.normalize,
    }


def _mis_rules(parts: Parts) -> Settings:
    """use_rs with its level and bounds; the veto is looked at only inside it, so it may need an idle band."""
    rule = next((rule for over in LEVELS if (rule := parts.take("ratio", over))), None)
    veto = parts.take_veto()
    used = rule is not None or veto is not None
    low, high = config.idle_bounds(rule.lower if rule else None, rule.upper if rule else None)
    return {
        "use_rs": used,
        "rs_level": LEVELS[rule.over] if rule else "token",
        "rs_lower_bound": low if used else None,
        "rs_upper_bound": high if used else None,
        "rs_veto_threshold": veto.lower if veto else None,
    }


def guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    """The helper clamps log-ratios, and the loss does not."""
    return Guards(20.0) if any(one.file for one in snippets) else Guards()


SLIME = partial(
    slime,
    icepop="slime.backends.megatron_utils.loss.icepop_function",
    mis="examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp",
    losses=("ppo_clip", "gspo", "cispo"),
)
READ = "THUDM/slime 624b824a8 (2026-08-21)"
TRAINER = config.Trainer("slime", READ, SLIME, FLAGS, guards, CLIP, title="slime")
