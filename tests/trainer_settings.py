"""Read printed configurations as their trainers do, and choose the restatement that runs with them.

A reader turns a snippet into a flat dict; a trainer's function turns that dict and a batch into what
multiplies each token's loss (0 where it is rejected), the loss, its anchor and its clip. The functions of
`tests/trainers` do the first part; what verl's keys do is restated here.
"""

from __future__ import annotations

import argparse
import ast
import math
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import yaml

from tests.trainers import areal as areal_code
from tests.trainers import nemo_rl as nemo_code
from tests.trainers import prime_skyrl as loop
from tests.trainers import slime as slime_code
from tests.trainers import trl_swift_openrlhf as hub
from tests.trainers.padded import Padded, Verdict, exp, row_mean, row_sum, under, verdict_of, within

Flat = dict[str, Any]


@dataclass
class Effect:
    """Factor of each token's loss, [B, L]; the loss, whose log-probs anchor it, its clip."""

    verdict: Verdict
    loss: str = "ppo_clip"
    anchor: str = "old"
    clip: Sequence[float] | None = None


# ---------------------------------------------------------------- readers


def read_yaml(text: str) -> Flat:
    return flat(yaml.safe_load(text) or {})


def flat(tree: dict[str, Any], prefix: str = "") -> Flat:
    found: Flat = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def read_hydra(text: str) -> Flat:
    """Read Hydra overrides after the shell's quotes: ++ may stand before a key; a quoted value is text."""
    return dict(_override(word) for word in shlex.split(text.replace("\\\n", " ")))


def _override(word: str) -> tuple[str, Any]:
    key, sign, value = word.partition("=")
    assert sign, word
    return key.removeprefix("++"), _hydra(value)


def _hydra(value: str) -> Any:
    if value[0] == '"':
        return value[1:-1]
    if value in ("null", "true", "false"):
        return {"null": None, "true": True, "false": False}[value]
    try:
        return int(value) if value.lstrip("-").isdigit() else float(value)
    except ValueError:
        assert value.replace("_", "").replace("-", "").isalnum(), value
        return value


def read_toml(text: str) -> Flat:
    return flat(tomllib.loads(text))


def read_call(text: str) -> Flat:
    call = ast.parse(text, mode="eval").body
    assert isinstance(call, ast.Call)
    assert isinstance(call.func, ast.Name)
    assert call.func.id == "GRPOConfig"
    return {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}


def read_dict(text: str) -> Flat:
    (assigned,) = ast.parse(text).body
    assert isinstance(assigned, ast.Assign)
    return dict(ast.literal_eval(assigned.value))


def yes(text: str) -> bool:
    return {"true": True, "false": False}[text]


def flags(**given: Any) -> Flat:
    """Return flags by name, each with its arguments of argparse, or with a default that gives its type."""
    return {
        name: how if isinstance(how, dict) else {"type": type(how), "default": how}
        for name, how in given.items()
    }


NUMBER: Flat = {"type": float}
SWITCH: Flat = {"action": "store_true"}


def word(*choices: str, default: str | None = None) -> Flat:
    return {"choices": choices, "default": default}


def boolean(default: bool) -> Flat:
    return {"type": yes, "default": default}


BAND: Flat = {"type": float, "nargs": 2, "default": [0.5, 5.0]}
LOSS = {
    "policy_loss_type": word("ppo", "gspo", default="ppo"),
    "eps_clip_low_high": {"type": float, "nargs": 2, "default": [0.2, 0.2]},
    "dual_clip": NUMBER,
}
ACTORS = {f"actor.{name}": how for name, how in LOSS.items()}
CORRECTION = "algo.advantage.is_correction_"
FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "ms-swift": flags(
        use_vllm=boolean(False),
        rollout_importance_sampling_mode=word(
            "token_truncate", "token_mask", "sequence_truncate", "sequence_mask"
        ),
        rollout_importance_sampling_threshold=2.0,
        epsilon=0.2,
        epsilon_high=NUMBER,
        delta=NUMBER,
        importance_sampling_level=word("token", "sequence", default="token"),
        loss_type="grpo",
    ),
    "openrlhf": ACTORS
    | {
        f"{CORRECTION}enable": SWITCH,
        f"{CORRECTION}threshold": BAND,
        f"{CORRECTION}type": word("tis", "icepop", "seq-mask-tis", default="tis"),
    },
    "openrlhf of 2026-09": ACTORS
    | {
        f"{CORRECTION}level": word("off", "token", "seq", default="off"),
        f"{CORRECTION}mode": word("mask", "clip", default="mask"),
        f"{CORRECTION}gating": word("ratio", "binary_kl", "tv", default="ratio"),
        f"{CORRECTION}threshold": BAND | {"nargs": "+"},
    },
    "openrlhf before 0.10.2": LOSS
    | {
        "enable_vllm_is_correction": SWITCH,
        "vllm_is_truncated_threshold": BAND,
        "vllm_is_correction_type": word("tis", "icepop", "seq-mask-tis", "mis", default="tis"),
    },
    "slime": {
        "use-rollout-logprobs": SWITCH,
        "use-tis": SWITCH,
        "tis-clip": NUMBER | {"default": 2.0},
        "tis-clip-low": NUMBER | {"default": 0.0},
        "custom-tis-function-path": {},
        "custom-config-path": {},
        "use-opsm": SWITCH,
        "opsm-delta": NUMBER | {"default": 1e-4},
        "advantage-estimator": word("grpo", "gspo", "cispo", default="grpo"),
        "eps-clip": NUMBER | {"default": 0.2},
        "eps-clip-high": NUMBER,
        "eps-clip-c": NUMBER,
    },
}
FLAGS["miles"] = FLAGS["slime"]


def read_flags(text: str, trainer: str) -> Flat:
    """Read flags as the trainer's own command line declares them; an unknown flag ends the test."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flag, how in FLAGS[trainer].items():
        parser.add_argument(f"--{flag}", dest=flag, **how)
    known, rest = parser.parse_known_args(shlex.split(text.replace("\\\n", " ")))
    assert rest == []
    return vars(known)


# ---------------------------------------------------------------- shared


def nothing(p: Padded) -> Verdict:
    """Apply no correction: every token counts once."""
    return verdict_of(p, p.mask * 1.0)


def named(f: Flat, names: str, prefix: str = "") -> Flat:
    """Select the given ones of the keys, without their prefix."""
    return {name: f[prefix + name] for name in names.split() if prefix + name in f}


def paired(f: Flat, names: str) -> Flat:
    """Return pairs (…_low, …_high) of which either is given."""
    pairs = {name: (f.get(f"{name}_low"), f.get(f"{name}_high")) for name in names.split()}
    return {name: pair for name, pair in pairs.items() if pair != (None, None)}


def below(f: Flat, prefix: str) -> Flat:
    return {key.removeprefix(prefix): value for key, value in f.items()}


def high_or_low(low: float, high: float | None) -> tuple[float, float]:
    return low, low if high is None else high


# ---------------------------------------------------------------- verl

BLOCK = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."


def verl(f: Flat, p: Padded) -> Effect:
    assert f["actor_rollout_ref.rollout.calculate_log_probs"] is True
    run = verl_2025_10 if "algorithm.rollout_is" in f else verl_2026
    found = (verl_2025_11 if BLOCK + "rollout_token_veto_threshold" in f else run)(f, p)
    found.clip = (f.get(ACTOR + "clip_ratio_low", 0.2), f.get(ACTOR + "clip_ratio_high", 0.2))
    return found


def verl_ratio(p: Padded, level: str, policy: str = "old") -> np.ndarray:
    """Compute verl's ratio: the log-ratio is clamped after aggregation."""
    of = {"token": lambda x, mask: x, "sequence": row_sum, "geometric": row_mean}[level]
    return np.exp(np.clip(of(p.gap(policy), p.mask), -20, 20)) * np.ones(p.mask.shape)


def verl_veto(p: Padded, veto: float | None) -> np.ndarray:
    """Return rows without a token below the threshold, the ratio unclamped, [B, 1]."""
    gone = under(p.gap(), math.log(veto)) & p.mask if veto else np.zeros(p.mask.shape, bool)
    return ~gone.any(axis=1, keepdims=True)


def verl_2025_10(f: Flat, p: Padded) -> Effect:
    f = below(f, "algorithm.")
    if not f["rollout_is"]:
        return Effect(nothing(p))
    w, upper = verl_ratio(p, f["rollout_is_level"]), f["rollout_is_threshold"]
    if f["rollout_is_mode"] == "truncate":
        w = np.minimum(w, upper)
    else:
        w = np.where(within(w, f.get("rollout_is_threshold_lower") or 1 / upper, upper), w, 0.0)
    return Effect(verdict_of(p, w, verl_veto(p, f["rollout_is_veto_threshold"])))


def verl_2025_11(f: Flat, p: Padded) -> Effect:
    f = below(f, BLOCK)
    if f["bypass_mode"]:  # no weights and no rules there, whatever is set
        return Effect(nothing(p), "ppo_clip", "rollout")
    w = np.ones(p.mask.shape)
    if f["rollout_is"]:
        assert f["rollout_is"] in ("token", "sequence")
        w = np.minimum(verl_ratio(p, f["rollout_is"]), f["rollout_is_threshold"])
    keep = verl_veto(p, f["rollout_token_veto_threshold"])
    if f["rollout_rs"]:
        upper = f["rollout_rs_threshold"]
        low = f["rollout_rs_threshold_lower"] or 1 / upper
        keep = keep & within(verl_ratio(p, f["rollout_rs"]), low, upper)
    return Effect(verdict_of(p, w, keep))


def verl_2026(f: Flat, p: Padded) -> Effect:
    block = {key.removeprefix(BLOCK): value for key, value in f.items() if key.startswith(BLOCK)}
    if not block["bypass_mode"]:
        mode = f.get(ACTOR + "policy_loss.loss_mode", "ppo_clip")
        return Effect(_verl_2026(block, p, "old"), "reinforce" if mode == "gpg" else mode)
    mode = f[ACTOR + "policy_loss.loss_mode"]
    if mode in ("dppo_tv", "dppo_kl"):
        bound, cap = f[ACTOR + "clip_ratio_high"], f[ACTOR + "clip_ratio_c"]
        assert f[ACTOR + "clip_ratio_low"] == bound
        return Effect(
            loop.verl_dppo(p, loss_mode=mode, clip_ratio=bound, clip_ratio_c=cap), "reinforce", "rollout"
        )
    again = ACTOR + "policy_loss.rollout_correction."
    assert {key.removeprefix(again): value for key, value in f.items() if key.startswith(again)} == block
    assert f[ACTOR + "policy_loss.loss_mode"] == "bypass_mode"
    assert f[ACTOR + "use_rollout_log_probs"] is True
    assert block["loss_type"] == "reinforce" or block["rollout_is"] is None
    return Effect(_verl_2026(block, p, "current"), block["loss_type"], "rollout")


def _verl_2026(f: Flat, p: Padded, policy: str) -> Verdict:
    w = np.ones(p.mask.shape)
    if f["rollout_is"]:
        assert f["rollout_is"] in ("token", "sequence")
        w, threshold = verl_ratio(p, f["rollout_is"], policy), f["rollout_is_threshold"]
        if isinstance(threshold, float):
            w = np.minimum(w, threshold)
        else:
            w = np.where(within(w, *map(float, threshold.split("_", 1))), w, 0.0)
    if f.get("rollout_is_batch_normalize"):
        w = w / (w[p.mask].mean() if f["rollout_is"] == "token" else row_mean(w, p.mask).mean())
    return verdict_of(p, w, _verl_keep(f, p, policy))


def _verl_keep(f: Flat, p: Padded, policy: str) -> np.ndarray:
    keep = p.mask.copy()
    if f["rollout_rs"] is None:
        return keep
    options, thresholds = f["rollout_rs"].split(","), f["rollout_rs_threshold"].split(",")
    assert len(set(options)) == len(options) == len(thresholds)
    for option, threshold in zip(options, thresholds, strict=True):
        how, _, k = option.rpartition("_")
        x = VERL_K[k](np.clip(p.gap(policy), -20, 20))
        if how != "token":
            x = {"seq_sum": row_sum, "seq_mean": row_mean, "seq_max": areal_code.row_max}[how](x, p.mask)
        low, high = (
            (math.log(float(bound)) for bound in threshold.split("_", 1))
            if k == "k1"
            else (None, float(threshold))
        )
        keep &= within(x, low, high)
    return keep


VERL_K: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: np.expm1(d) - d,
}


def flash_rl(f: Flat, p: Padded) -> Effect:
    assert f["actor_rollout_ref.rollout.calculate_log_probs"] is True
    cap = f[ACTOR + "tis_imp_ratio_cap"]
    verdict = verdict_of(p, np.minimum(exp(p.gap()), cap)) if cap > 0 else nothing(p)
    return Effect(verdict, clip=(f.get(ACTOR + "clip_ratio_low", 0.2), f.get(ACTOR + "clip_ratio_high", 0.2)))


# ---------------------------------------------------------------- TRL, ms-swift, OpenRLHF


def trl(f: Flat, p: Padded) -> Effect:
    assert f["use_vllm"] is True
    start = "vllm_importance_sampling_"
    if not f[start + "correction"]:
        return Effect(nothing(p), *_hf_loss(f))
    cap = f.get(start + "clip_max", f.get(start + "cap"))
    options = {"clip_min": f.get(start + "clip_min"), "clip_max": cap}
    return Effect(hub.trl(p, mode=f[start + "mode"], **options), *_hf_loss(f))


def _hf_loss(f: Flat) -> tuple[str, str, tuple[float, float] | None]:
    if f.get("loss_type") == "cispo":
        return "cispo", "old", (1.0, f["epsilon_high"] - 1)
    loss = "gspo" if f.get("importance_sampling_level") == "sequence" else "ppo_clip"
    return loss, "old", high_or_low(f.get("epsilon", 0.2), f.get("epsilon_high"))


def ms_swift(f: Flat, p: Padded) -> Effect:
    names = "rollout_importance_sampling_mode rollout_importance_sampling_threshold"
    settings = named(f, names)
    assert f["use_vllm"] or settings["rollout_importance_sampling_mode"] is None
    return Effect(hub.swift(p, **settings), *_hf_loss(f))


def openrlhf(f: Flat, p: Padded) -> Effect:
    """Apply OpenRLHF's correction in any of its three spellings."""
    if "enable_vllm_is_correction" in f:
        on, kind = f["enable_vllm_is_correction"], f["vllm_is_correction_type"]
        bounds, f = f["vllm_is_truncated_threshold"], {f"actor.{key}": value for key, value in f.items()}
    else:
        g = below(f, "algo.advantage.is_correction_")
        bounds = g["threshold"]
        if "level" in g:
            assert (g["gating"], g["level"], g["mode"]) != ("ratio", "seq", "clip")
            kinds = {"tokenclip": "tis", "tokenmask": "icepop"}
            on, kind = g["level"] != "off", kinds.get(g["level"] + g["mode"], "mis")
        else:
            on, kind = g["enable"], g["type"]
    loss, clip = f["actor.policy_loss_type"], f["actor.eps_clip_low_high"]
    if loss == "gspo" or not on:
        anchor = "rollout" if on else "old"
        return Effect(nothing(p), "gspo" if loss == "gspo" else "ppo_clip", anchor, clip)
    kind = {"mis": "seq-mask-tis"}.get(kind, kind)
    return Effect(hub.openrlhf(p, is_correction_type=kind, is_correction_threshold=bounds), clip=clip)


# ---------------------------------------------------------------- NeMo-RL, slime, miles, AReaL


def nemo_rl(f: Flat, p: Padded) -> Effect:
    g, start = below(f, "loss_fn."), "truncated_importance_sampling_"
    sequence = g.get("sequence_level_importance_ratios", False)
    assert not sequence or g["token_level_loss"] is False
    assert g[start + "ratio"] is None or g[start + "type"] is not None
    loss = "cispo" if g.get("use_cispo") else "gspo" if sequence else "ppo_clip"
    loss = "reinforce" if g.get("disable_ppo_ratio") else loss
    on_policy = named(g, "force_on_policy_ratio") if g.get("force_on_policy_ratio") else {}
    loss = "surrogate" if on_policy else loss
    clip = (g.get("ratio_clip_min", 0.2), g.get("ratio_clip_max", 0.2))
    error = named(f, "seq_logprob_error_threshold", "grpo.")
    anchor = "rollout" if on_policy else "old"
    if not g["use_importance_sampling_correction"]:
        weighed = nemo_code.nemo_rl(p, **error)
        factor = np.where(weighed.factor > 0, 1.0, 0.0)
        return Effect(Verdict(factor, weighed.counted), loss, "old", clip)
    settings = named(g, f"{start}type {start}ratio {start}ratio_min sequence_level_importance_ratios")
    return Effect(nemo_code.nemo_rl(p, **settings, **error, **on_policy), loss, anchor, clip)


MIS = (
    "use_rs tis_level rs_level tis_mode tis_lower_bound tis_upper_bound rs_lower_bound rs_upper_bound "
    "rs_veto_threshold tis_batch_normalize"
)


def slime(f: Flat, p: Padded) -> Effect:
    """Apply slime's flags and the settings of mis.yaml."""
    estimator = f["advantage-estimator"]
    loss = "ppo_clip" if estimator == "grpo" else estimator
    bypass, path = f["use-rollout-logprobs"], f["custom-tis-function-path"] or ""
    assert not (bypass and f["use-tis"])
    verdict = nothing(p)
    if "mis.compute_mis" in path:
        assert f["custom-config-path"] == "mis.yaml"
        assert set(MIS.split()) <= set(f)
        assert f["use_tis"] is True
        verdict = slime_code.mis(p, **named(f, MIS))
    elif f["use-opsm"]:
        assert bypass
        verdict = slime_code.opsm(p, opsm_delta=f["opsm-delta"])
    elif f["use-tis"]:
        assert not path or path.endswith("icepop_function")
        band = {"tis_clip": f["tis-clip"], "tis_clip_low": f["tis-clip-low"]}
        verdict = slime_code.tis(p, **band, icepop=bool(path))
    return Effect(
        verdict, loss, "rollout" if bypass else "old", high_or_low(f["eps-clip"], f["eps-clip-high"])
    )


def areal(f: Flat, p: Padded) -> Effect:
    f = below(f, "actor.")
    loss = "gspo" if f.get("importance_sampling_level") == "sequence" else "ppo_clip"
    bypass = not f["use_decoupled_loss"] and not f["recompute_logprob"]
    verdict = nothing(p)
    if "m2_threshold" in f:
        assert f["use_decoupled_loss"]
        assert f.get("rejection_sampling") is None
        assert f.get("behave_imp_weight_mode") in (None, "disabled")
        verdict = areal_code.m2po(p, m2_threshold=f["m2_threshold"])
    elif f["use_decoupled_loss"] and "behave_imp_weight_cap" in f:
        verdict = areal_code.behave_cap(p, **named(f, "behave_imp_weight_cap behave_imp_weight_mode"))
    elif f["use_decoupled_loss"]:
        settings = named(f, "level action metric agg upper lower", "rejection_sampling.")
        assert settings["action"] == "mask" or settings["metric"] == "ratio"
        verdict = areal_code.rejection_sampling(p, **settings)
    clip = high_or_low(f.get("eps_clip", 0.2), f.get("eps_clip_higher"))
    if f.get("use_cispo_loss"):
        assert f["eps_clip_higher"] > 0
        loss = "cispo"
    return Effect(verdict, loss, "rollout" if bypass else "old", clip)


# ---------------------------------------------------------------- prime-rl, SkyRL, ColossalAI


def prime_rl(f: Flat, p: Padded) -> Effect:
    f = below(f, "trainer.loss.")
    ratios = named(f, "ratio_low ratio_high")
    if f["type"] == "icepop":
        return Effect(loop.prime_icepop(p, **ratios), "reinforce", "rollout")
    if f["type"] == "cispo":
        return Effect(loop.prime_cispo(p, **ratios), "reinforce", "rollout")
    if f["type"] == "ppo":
        return Effect(nothing(p), "ppo_clip", "rollout", (1 - f["ratio_low"], f["ratio_high"] - 1))
    if f["type"] == "ipo":
        verdict = loop.prime_ipo(p, ipo_threshold=f.get("eps", f.get("ipo_threshold")))
    else:
        verdict = loop.prime_dppo(p, **named(f, "dppo_mask_low dppo_mask_high"))
    return Effect(verdict, "surrogate", "rollout")


def skyrl(f: Flat, p: Padded) -> Effect:
    assert f["generator.sampling_params.logprobs"] == 1
    f = below(f, "trainer.algorithm.")
    kind = f["policy_loss_type"]
    if kind == "rollout_is":
        verdict = loop.skyrl_rollout_is(p, **named(f, "eps_clip_low eps_clip_high"))
        return Effect(verdict, "reinforce", "rollout")
    if kind == "dppo":
        verdict = loop.skyrl_dppo(p, **named(f, "dppo_type delta_low delta_high", "dppo."))
        return Effect(verdict, "surrogate", "rollout")
    cispo = named(f, "cispo_eps_clip_low cispo_eps_clip_high", "cispo.")
    if kind == "cispo" and f.get("cispo.cispo_anchor") == "rollout":
        return Effect(loop.skyrl_cispo(p, **cispo), "reinforce", "rollout")
    c = below(f, "off_policy_correction.")
    names = "tis_ratio_type token_tis_ratio_clip_high sequence_tis_ratio_clip_high sequence_mask_metric"
    pairs = paired(c, "geo_mask product_mask outlier_token_is_threshold token_mask_is_threshold")
    clip = (f.get("eps_clip_low", 0.2), f.get("eps_clip_high", 0.2))
    clip = tuple(cispo.values()) if kind == "cispo" else clip
    loss = {"regular": "ppo_clip", "dual_clip": "ppo_clip"}.get(kind, kind)
    if kind == "importance_sampling":
        assert c["tis_ratio_type"] is None
        clip, loss = (1.0, None), "ppo_clip"
    return Effect(loop.skyrl_correction(p, **named(c, names), **pairs), loss, "old", clip)


def colossalai(f: Flat, p: Padded) -> Effect:
    return Effect(nothing(p), "ppo_clip", "rollout", (f["clip_eps_low"], f["clip_eps_high"]))


TRAINERS: dict[str, Callable[[Flat, Padded], Effect]] = {
    "verl": verl,
    "trl": trl,
    "ms-swift": ms_swift,
    "openrlhf": openrlhf,
    "nemo-rl": nemo_rl,
    "slime": slime,
    "miles": slime,
    "areal": areal,
    "prime-rl": prime_rl,
    "skyrl": skyrl,
    "flash-rl": flash_rl,
    "colossalai": colossalai,
}
