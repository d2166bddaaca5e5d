"""Reference implementation of trainers' settings, with lists, to check printed configurations.

Written from what the trainers document and do; nothing is shared with the package. A reader turns a snippet
into a flat dict; a trainer's function turns that dict and a batch into what multiplies each token's loss (0
where it is rejected), the loss, its anchor and its clip.
"""

from __future__ import annotations

import argparse
import ast
import math
import shlex
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import yaml

from tests.oracles import Sequence, binary_kl, mean, turns

Flat = dict[str, Any]
Batch = list[Sequence]


@dataclass
class Effect:
    """Per sequence and token what multiplies the loss; the loss, whose log-probs anchor it, its clip."""

    factors: list[list[float]]
    loss: str = "ppo_clip"
    anchor: str = "old"
    clip: tuple[float, float] | None = None


# ---------------------------------------------------------------- readers


def read_yaml(text: str) -> Flat:
    return flat(yaml.safe_load(text) or {})


def flat(tree: dict[str, Any], prefix: str = "") -> Flat:
    found: Flat = {}
    for key, value in tree.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


def read_hydra(text: str) -> Flat:
    """After the shell has taken its quotes: ++ may stand before a key; a quoted value is text."""
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


FLAGS: dict[str, dict[str, dict[str, Any]]] = {
    "ms-swift": {
        "--use_vllm": {"type": yes, "default": False},
        "--rollout_importance_sampling_mode": {
            "choices": ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]
        },
        "--rollout_importance_sampling_threshold": {"type": float, "default": 2.0},
        "--off_policy_sequence_mask_delta": {"type": float},
        "--epsilon": {"type": float, "default": 0.2},
        "--epsilon_high": {"type": float},
        "--delta": {"type": float},
        "--importance_sampling_level": {"choices": ["token", "sequence"], "default": "token"},
        "--loss_type": {"default": "grpo"},
    },
    "openrlhf": {
        "--algo.advantage.is_correction_enable": {"action": "store_true"},
        "--algo.advantage.is_correction_threshold": {"type": float, "nargs": 2, "default": [0.5, 5.0]},
        "--algo.advantage.is_correction_type": {
            "choices": ["tis", "icepop", "seq-mask-tis"],
            "default": "tis",
        },
        "--actor.policy_loss_type": {"choices": ["ppo", "gspo"], "default": "ppo"},
        "--actor.eps_clip_low_high": {"type": float, "nargs": 2, "default": [0.2, 0.2]},
        "--actor.dual_clip": {"type": float},
    },
    "openrlhf of 2026-09": {
        "--algo.advantage.is_correction_level": {"choices": ["off", "token", "seq"], "default": "off"},
        "--algo.advantage.is_correction_mode": {"choices": ["mask", "clip"], "default": "mask"},
        "--algo.advantage.is_correction_gating": {
            "choices": ["ratio", "binary_kl", "tv"],
            "default": "ratio",
        },
        "--algo.advantage.is_correction_threshold": {"type": float, "nargs": "+", "default": [0.5, 5.0]},
        "--actor.policy_loss_type": {"choices": ["ppo", "gspo"], "default": "ppo"},
        "--actor.eps_clip_low_high": {"type": float, "nargs": 2, "default": [0.2, 0.2]},
        "--actor.dual_clip": {"type": float},
    },
    "openrlhf before 0.10.2": {
        "--enable_vllm_is_correction": {"action": "store_true"},
        "--vllm_is_truncated_threshold": {"type": float, "nargs": 2, "default": [0.5, 5.0]},
        "--vllm_is_correction_type": {"choices": ["tis", "icepop", "seq-mask-tis", "mis"], "default": "tis"},
        "--policy_loss_type": {"choices": ["ppo", "gspo"], "default": "ppo"},
        "--eps_clip_low_high": {"type": float, "nargs": 2, "default": [0.2, 0.2]},
        "--dual_clip": {"type": float},
    },
    "slime": {
        "--use-rollout-logprobs": {"action": "store_true"},
        "--use-tis": {"action": "store_true"},
        "--tis-clip": {"type": float, "default": 2.0},
        "--tis-clip-low": {"type": float, "default": 0.0},
        "--custom-tis-function-path": {},
        "--custom-config-path": {},
        "--use-opsm": {"action": "store_true"},
        "--opsm-delta": {"type": float, "default": 1e-4},
        "--advantage-estimator": {"choices": ["grpo", "gspo", "cispo"], "default": "grpo"},
        "--eps-clip": {"type": float, "default": 0.2},
        "--eps-clip-high": {"type": float},
        "--eps-clip-c": {"type": float},
    },
    "open-instruct": {
        "--use_rho_correction": {"type": yes, "default": True},
        "--use_vllm_logprobs": {"type": yes, "default": False},
        "--rho_clamp_lower_bound": {"type": float, "default": 0.0},
        "--rho_clamp_upper_bound": {"type": float, "default": 2.0},
        "--rho_mask_lower_bound": {"type": float, "default": 0.0},
        "--rho_mask_upper_bound": {"type": float, "default": 0.0},
        "--rho_mask_sequence_level": {"type": yes, "default": False},
        "--rho_mask_tv_divergence": {"type": yes, "default": False},
        "--loss_fn": {"choices": ["dapo", "cispo"], "default": "dapo"},
        "--clip_lower": {"type": float, "default": 0.2},
        "--clip_higher": {"type": float, "default": 0.272},
    },
}
FLAGS["miles"] = FLAGS["slime"]


def read_flags(text: str, trainer: str) -> Flat:
    """As the trainer's own command line declares them; an unknown flag ends the test."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for flag, how in FLAGS[trainer].items():
        parser.add_argument(flag, dest=flag[2:], **how)
    known, rest = parser.parse_known_args(shlex.split(text.replace("\\\n", " ")))
    assert rest == []
    return vars(known)


# ---------------------------------------------------------------- shared arithmetic


def deltas(s: Sequence, policy: str = "old") -> list[float]:
    return [a - b for a, b in zip(getattr(s, policy), s.rollout, strict=True)]


def level(s: Sequence, d: list[float], over: str) -> list[float]:
    """log-ratio of tokens, sequences (sum or mean) or turns, per token."""
    if over == "token":
        return d
    if over == "segment":
        out = list(d)
        for turn in turns(s):
            for t in turn:
                out[t] = mean([d[i] for i in turn])
        return out
    whole = {"sum": math.fsum, "mean": mean, "max": max}[over](d)
    return [whole] * s.n


def bounded(x: list[float], by: float | None) -> list[float]:
    return x if by is None else [min(max(v, -by), by) for v in x]


def exp(x: list[float]) -> list[float]:
    return [math.exp(v) for v in x]


def inside(x: list[float], low: float | None, high: float | None) -> list[bool]:
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return [low <= v <= high for v in x]


def clipped(x: list[float], low: float | None, high: float | None) -> list[float]:
    low, high = -math.inf if low is None else low, math.inf if high is None else high
    return [min(max(v, low), high) for v in x]


def times(w: list[float], keep: list[bool]) -> list[float]:
    return [a if k else 0.0 for a, k in zip(w, keep, strict=True)]


def ones(s: Sequence) -> list[float]:
    return [1.0] * s.n


def opsm(s: Sequence, threshold: float | None) -> list[float]:
    """0 on a sequence of negative advantage that drifted too far from the current policy."""
    if threshold is None:
        return ones(s)
    drift = -mean(deltas(s, "current"))
    return [0.0 if drift > threshold and s.advantages[0] < 0 else 1.0] * s.n


# ---------------------------------------------------------------- verl

BLOCK = "algorithm.rollout_correction."
ACTOR = "actor_rollout_ref.actor."
OVERS = {"token": "token", "sequence": "sum", "geometric": "mean"}


def verl(f: Flat, batch: Batch) -> Effect:
    assert f["actor_rollout_ref.rollout.calculate_log_probs"] is True
    run = verl_2025_10 if "algorithm.rollout_is" in f else verl_2026
    found = (verl_2025_11 if BLOCK + "rollout_token_veto_threshold" in f else run)(f, batch)
    found.clip = (f.get(ACTOR + "clip_ratio_low", 0.2), f.get(ACTOR + "clip_ratio_high", 0.2))
    return found


def verl_2025_10(f: Flat, batch: Batch) -> Effect:
    if not f["algorithm.rollout_is"]:
        return Effect([ones(s) for s in batch])
    return Effect([_verl_2025_10(f, s) for s in batch])


def _verl_2025_10(f: Flat, s: Sequence) -> list[float]:
    d = deltas(s)
    w = exp(bounded(level(s, d, OVERS[f["algorithm.rollout_is_level"]]), 20))
    upper = f["algorithm.rollout_is_threshold"]
    if f["algorithm.rollout_is_mode"] == "truncate":
        w = clipped(w, None, upper)
    else:
        w = times(w, inside(w, f.get("algorithm.rollout_is_threshold_lower") or 1 / upper, upper))
    veto = f["algorithm.rollout_is_veto_threshold"]
    return [0.0] * s.n if veto and min(d) < math.log(veto) else w


def verl_2025_11(f: Flat, batch: Batch) -> Effect:
    f = {key.removeprefix(BLOCK): value for key, value in f.items()}
    bypass = f["bypass_mode"]  # no weights and no rules there, whatever is set
    factors = [ones(s) if bypass else _verl_2025_11(f, s, deltas(s)) for s in batch]
    return Effect(factors, "ppo_clip", "rollout" if bypass else "old")


def _verl_2025_11(f: Flat, s: Sequence, d: list[float]) -> list[float]:
    w = ones(s)
    if f["rollout_is"]:
        w = exp(bounded(level(s, d, {"token": "token", "sequence": "sum"}[f["rollout_is"]]), 20))
        w = clipped(w, None, f["rollout_is_threshold"])
    if f["rollout_rs"]:
        upper = f["rollout_rs_threshold"]
        x = exp(bounded(level(s, d, OVERS[f["rollout_rs"]]), 20))
        w = times(w, inside(x, f["rollout_rs_threshold_lower"] or 1 / upper, upper))
    veto = f["rollout_token_veto_threshold"]
    return [0.0] * s.n if veto and min(d) < math.log(veto) else w


def verl_2026(f: Flat, batch: Batch) -> Effect:
    block = {key.removeprefix(BLOCK): value for key, value in f.items() if key.startswith(BLOCK)}
    if not block["bypass_mode"]:
        loss = f.get(ACTOR + "policy_loss.loss_mode", "ppo_clip")
        return Effect(_verl_2026(block, batch, "old"), loss)
    again = ACTOR + "policy_loss.rollout_correction."
    assert {key.removeprefix(again): value for key, value in f.items() if key.startswith(again)} == block
    assert f[ACTOR + "policy_loss.loss_mode"] == "bypass_mode"
    assert f[ACTOR + "use_rollout_log_probs"] is True
    assert block["loss_type"] == "reinforce" or block["rollout_is"] is None
    return Effect(_verl_2026(block, batch, "current"), block["loss_type"], "rollout")


def _verl_2026(f: Flat, batch: Batch, policy: str) -> list[list[float]]:
    weights = [_verl_weight(f, s, deltas(s, policy)) for s in batch]
    if f.get("rollout_is_batch_normalize"):
        flattened = [w for one in weights for w in one]
        by = mean(flattened) if f["rollout_is"] == "token" else mean([mean(one) for one in weights])
        weights = [[w / by for w in one] for one in weights]
    return [times(w, _verl_keep(f, s, deltas(s, policy))) for w, s in zip(weights, batch, strict=True)]


def _verl_weight(f: Flat, s: Sequence, d: list[float]) -> list[float]:
    if f["rollout_is"] is None:
        return ones(s)
    w = exp(bounded(level(s, d, {"token": "token", "sequence": "sum"}[f["rollout_is"]]), 20))
    threshold = f["rollout_is_threshold"]
    if isinstance(threshold, float):
        return clipped(w, None, threshold)
    low, high = map(float, threshold.split("_", 1))
    return times(w, inside(w, low, high))


def _verl_keep(f: Flat, s: Sequence, d: list[float]) -> list[bool]:
    keep = [True] * s.n
    if f["rollout_rs"] is None:
        return keep
    options, thresholds = f["rollout_rs"].split(","), f["rollout_rs_threshold"].split(",")
    assert len(set(options)) == len(options) == len(thresholds)
    for option, threshold in zip(options, thresholds, strict=True):
        how, _, k = option.rpartition("_")
        x = [VERL_K[k](v) for v in bounded(d, 20)]
        x = level(s, x, {"token": "token", "seq_sum": "sum", "seq_mean": "mean", "seq_max": "max"}[how])
        if k == "k1":
            low, high = (math.log(float(bound)) for bound in threshold.split("_", 1))
            ok = inside(x, low, high)
        else:
            ok = inside(x, None, float(threshold))
        keep = [a and b for a, b in zip(keep, ok, strict=True)]
    return keep


VERL_K: dict[str, Callable[[float], float]] = {
    "k1": lambda d: -d,
    "k2": lambda d: d * d / 2,
    "k3": lambda d: math.expm1(d) - d,
}


def flash_rl(f: Flat, batch: Batch) -> Effect:
    assert f["actor_rollout_ref.rollout.calculate_log_probs"] is True
    cap = f[ACTOR + "tis_imp_ratio_cap"]
    factors = [clipped(exp(deltas(s)), None, cap) if cap > 0 else ones(s) for s in batch]
    return Effect(factors, clip=(f.get(ACTOR + "clip_ratio_low", 0.2), f.get(ACTOR + "clip_ratio_high", 0.2)))


# ---------------------------------------------------------------- TRL, ms-swift, OpenRLHF


def trl(f: Flat, batch: Batch) -> Effect:
    assert f["use_vllm"] is True
    return Effect([_trl(f, s) for s in batch], *_hf_loss(f))


def _trl(f: Flat, s: Sequence) -> list[float]:
    mask = opsm(s, f.get("off_policy_mask_threshold"))
    if not f["vllm_importance_sampling_correction"]:
        return mask
    where, _, action = f["vllm_importance_sampling_mode"].partition("_")
    cap = f.get("vllm_importance_sampling_cap")
    low, high = f.get("vllm_importance_sampling_clip_min"), f.get("vllm_importance_sampling_clip_max", cap)
    w = exp(level(s, deltas(s), {"token": "token", "sequence": "sum"}[where]))
    assert action == "mask" or low is not None or high is not None
    w = clipped(w, low, high) if action == "truncate" else times(w, inside(w, low, high))
    return [a * b for a, b in zip(w, mask, strict=True)]


def _hf_loss(f: Flat) -> tuple[str, str, tuple[float, float]]:
    if f.get("loss_type") == "cispo":
        return "cispo", "old", (1.0, f["epsilon_high"] - 1)
    loss = "gspo" if f.get("importance_sampling_level") == "sequence" else "ppo_clip"
    low = f.get("epsilon", 0.2)
    high = f.get("epsilon_high")
    return loss, "old", (low, low if high is None else high)


def ms_swift(f: Flat, batch: Batch) -> Effect:
    return Effect([_ms_swift(f, s) for s in batch], *_hf_loss(f))


def _ms_swift(f: Flat, s: Sequence) -> list[float]:
    mask = opsm(s, f["off_policy_sequence_mask_delta"])
    assert f["use_vllm"] or (f["rollout_importance_sampling_mode"], f["off_policy_sequence_mask_delta"]) == (
        None,
        None,
    )
    mode, upper = f["rollout_importance_sampling_mode"], f["rollout_importance_sampling_threshold"]
    if mode is None:
        return mask
    d = bounded(deltas(s), 20)
    token, geo = exp(d), exp(level(s, d, "mean"))
    w = {
        "token_truncate": clipped(token, None, upper),
        "token_mask": times(token, inside(token, None, upper)),
        "sequence_truncate": clipped(geo, None, upper),
        "sequence_mask": times(token, inside(geo, None, upper)),
    }[mode]
    return [a * b for a, b in zip(w, mask, strict=True)]


def openrlhf(f: Flat, batch: Batch) -> Effect:
    """Apply OpenRLHF's correction in any of its three spellings."""
    prefix = "algo.advantage.is_correction_"
    if "enable_vllm_is_correction" in f:
        on, kind = f["enable_vllm_is_correction"], f["vllm_is_correction_type"].replace("seq-mask-tis", "mis")
        bounds, loss = f["vllm_is_truncated_threshold"], f["policy_loss_type"]
        clip = tuple(f["eps_clip_low_high"])
    elif prefix + "level" in f:
        level, mode = f[prefix + "level"], f[prefix + "mode"]
        assert f[prefix + "gating"] == "ratio"
        assert (level, mode) != ("seq", "clip")
        on, kind = level != "off", {"tokenclip": "tis", "tokenmask": "icepop"}.get(level + mode, "mis")
        bounds, loss = f[prefix + "threshold"], f["actor.policy_loss_type"]
        clip = tuple(f["actor.eps_clip_low_high"])
    else:
        on, kind = f[prefix + "enable"], f[prefix + "type"].replace("seq-mask-tis", "mis")
        bounds, loss = f[prefix + "threshold"], f["actor.policy_loss_type"]
        clip = tuple(f["actor.eps_clip_low_high"])
    if loss == "gspo" or not on:
        anchor = "rollout" if on else "old"
        return Effect([ones(s) for s in batch], "gspo" if loss == "gspo" else "ppo_clip", anchor, clip)
    return Effect([_openrlhf(kind, *bounds, s) for s in batch], clip=clip)


def _openrlhf(kind: str, low: float, high: float, s: Sequence) -> list[float]:
    token, geo = exp(deltas(s)), exp(level(s, deltas(s), "mean"))
    return {
        "tis": clipped(token, low, high),
        "icepop": times(token, inside(token, low, high)),
        "mis": times(token, inside(geo, low, high)),
    }[kind]


# ---------------------------------------------------------------- NeMo-RL, slime, miles, AReaL


def nemo_rl(f: Flat, batch: Batch) -> Effect:
    g = {key.removeprefix("loss_fn."): value for key, value in f.items()}
    sequence = g.get("sequence_level_importance_ratios", False)
    assert not sequence or g["token_level_loss"] is False
    loss = "cispo" if g.get("use_cispo") else "gspo" if sequence else "ppo_clip"
    clip = (g.get("ratio_clip_min", 0.2), g.get("ratio_clip_max", 0.2))
    return Effect([_nemo_rl(g, s, sequence) for s in batch], loss, "old", clip)


def _nemo_rl(g: Flat, s: Sequence, sequence: bool) -> list[float]:
    w, start = ones(s), "truncated_importance_sampling_"
    assert g[start + "ratio"] is None or g[start + "type"] is not None
    if g["use_importance_sampling_correction"]:
        w = exp(level(s, deltas(s), "sum" if sequence else "token"))
        kind, name = g["truncated_importance_sampling_type"], "truncated_importance_sampling_ratio"
        if kind == "tis":
            w = clipped(w, g[f"{name}_min"] or 0.0, g[name])
        elif kind is not None:
            assert g[f"{name}_min"] is not None
            x = w if kind == "icepop" else exp(level(s, deltas(s), "mean"))
            w = times(w, inside(x, g[f"{name}_min"], g[name]))
    error = g.get("grpo.seq_logprob_error_threshold")
    return [0.0] * s.n if error and mean([math.exp(abs(d)) for d in deltas(s)]) > error else w


def slime(f: Flat, batch: Batch) -> Effect:
    """Apply slime's flags and the settings of mis.yaml."""
    estimator = f["advantage-estimator"]
    low, high = f["eps-clip"], f["eps-clip-high"]
    clip = (low, low if high is None else high)
    loss = "ppo_clip" if estimator == "grpo" else estimator
    anchor = "rollout" if f["use-rollout-logprobs"] else "old"
    assert not (f["use-rollout-logprobs"] and f["use-tis"])
    if "mis.compute_mis" in (f["custom-tis-function-path"] or ""):
        assert f["custom-config-path"] == "mis.yaml"
        return Effect(_mis(f, batch), loss, anchor, clip)
    return Effect([_slime(f, s) for s in batch], loss, anchor, clip)


def _slime(f: Flat, s: Sequence) -> list[float]:
    if f["use-opsm"]:
        assert f["use-rollout-logprobs"]
        return opsm(s, f["opsm-delta"])
    if not f["use-tis"]:
        return ones(s)
    w, low, high = exp(deltas(s)), f["tis-clip-low"], f["tis-clip"]
    if f["custom-tis-function-path"]:
        assert f["custom-tis-function-path"].endswith("icepop_function")
        return times(w, inside(w, low, high))
    return clipped(w, low, high)


MIS_KEYS = [
    "use_tis",
    "use_rs",
    "tis_level",
    "rs_level",
    "tis_mode",
    "tis_lower_bound",
    "tis_upper_bound",
    "rs_lower_bound",
    "rs_upper_bound",
    "rs_veto_threshold",
    "tis_batch_normalize",
]


def _mis(f: Flat, batch: Batch) -> list[list[float]]:
    assert set(MIS_KEYS) <= set(f)
    assert f["use_tis"] is True
    upper = f["tis_upper_bound"]
    lower = 1 / upper if f["tis_lower_bound"] is None else f["tis_lower_bound"]
    weights, keeps = [], []
    for s in batch:
        w = exp(bounded(level(s, deltas(s), OVERS[f["tis_level"]]), 20))
        keep = inside(w, lower, upper) if f["tis_mode"] == "mask" else [True] * s.n
        w = {"truncate": clipped(w, 0, upper), "clip": clipped(w, lower, upper), "mask": w}[f["tis_mode"]]
        weights.append(w)
        keeps.append([a and b for a, b in zip(keep, _mis_rules(f, s, lower, upper), strict=True)])
    if f["tis_batch_normalize"]:
        assert f["tis_level"] != "geometric"
        every = [w for one in weights for w in one]
        by = mean(every) if f["tis_level"] == "token" else mean([mean(one) for one in weights])
        weights = [[w / by for w in one] for one in weights]
    return [times(w, keep) for w, keep in zip(weights, keeps, strict=True)]


def _mis_rules(f: Flat, s: Sequence, lower: float, upper: float) -> list[bool]:
    if not f["use_rs"]:  # the veto is not looked at
        return [True] * s.n
    x = exp(bounded(level(s, deltas(s), OVERS[f["rs_level"]]), 20))
    low = lower if f["rs_lower_bound"] is None else f["rs_lower_bound"]
    high = upper if f["rs_upper_bound"] is None else f["rs_upper_bound"]
    veto = f["rs_veto_threshold"]
    gone = veto is not None and min(deltas(s)) < math.log(veto)
    return [ok and not gone for ok in inside(x, low, high)]


def areal(f: Flat, batch: Batch) -> Effect:
    f = {key.removeprefix("actor."): value for key, value in f.items()}
    low = f.get("eps_clip", 0.2)
    loss = "gspo" if f.get("importance_sampling_level") == "sequence" else "ppo_clip"
    bypass = not f["use_decoupled_loss"] and not f["recompute_logprob"]
    if "m2_threshold" in f:
        assert f.get("rejection_sampling") is None
        assert f.get("behave_imp_weight_mode") in (None, "disabled")
        factors = _m2po(batch, f["m2_threshold"] if f["use_decoupled_loss"] else math.inf)
    else:
        run = _areal_cap if "behave_imp_weight_cap" in f else _areal
        factors = [run(f, s) if f["use_decoupled_loss"] else ones(s) for s in batch]
    return Effect(factors, loss, "rollout" if bypass else "old", (low, f.get("eps_clip_higher") or low))


def _areal(f: Flat, s: Sequence) -> list[float]:
    r = {key.removeprefix("rejection_sampling."): value for key, value in f.items()}
    d, ratio = deltas(s), r["metric"] == "ratio"
    assert not ratio or (r["upper"] > 1 and (r["lower"] is None or r["lower"] > 0))
    statistic = {
        "ratio": d,
        "kl_k1": d,
        "kl_k2": [x * x / 2 for x in d],
        "kl_k3": [math.expm1(-x) + x for x in d],
    }[r["metric"]]
    over = "token" if r["level"] == "token" else r["agg"]
    x = level(s, statistic, over)
    w = exp(level(s, d, "mean") if ratio and r["level"] == "sequence" else d)
    if r["action"] == "clamp":
        assert ratio
        return clipped(w, r["lower"] or 0.0, r["upper"])
    return times(w, inside(exp(x) if ratio else x, r["lower"], r["upper"]))


def _areal_cap(f: Flat, s: Sequence) -> list[float]:
    where, _, action = f["behave_imp_weight_mode"].partition("_")
    w, cap = (
        exp(level(s, deltas(s), {"token": "token", "sequence": "mean"}[where])),
        f["behave_imp_weight_cap"],
    )
    return clipped(w, 0, cap) if action == "truncate" else times(w, inside(w, None, cap))


def _m2po(batch: Batch, threshold: float) -> list[list[float]]:
    rest = sorted(d * d for s in batch for d in deltas(s))
    gone = math.inf
    while rest and not math.fsum(rest) / len(rest) < threshold:
        gone = rest.pop()
    return [[float(d * d < gone) for d in deltas(s)] for s in batch]


# ---------------------------------------------------------------- prime-rl, SkyRL, ROLL, open-instruct


def prime_rl(f: Flat, batch: Batch) -> Effect:
    f = {key.removeprefix("trainer.loss."): value for key, value in f.items()}
    if "type" in f:
        return Effect([_dppo_or_ipo(f, s) for s in batch], "surrogate", "rollout")
    return Effect([_prime_rl_v02(f, s) for s in batch], "reinforce", "rollout")


def _dppo_or_ipo(f: Flat, s: Sequence) -> list[float]:
    gap = [math.exp(c) - math.exp(r) for c, r in zip(s.current, s.rollout, strict=True)]
    if f["type"] == "ipo":
        return times(exp(deltas(s, "current")), [abs(g) <= f["ipo_threshold"] for g in gap])
    if "ipo_mask_low" in f:
        return times(exp(deltas(s, "current")), inside(gap, -f["ipo_mask_low"], f["ipo_mask_high"]))
    gone = [
        g > f["dppo_mask_high"] if a > 0 else g < -f["dppo_mask_low"]
        for g, a in zip(gap, s.advantages, strict=True)
    ]
    return times(exp(deltas(s, "current")), [not g for g in gone])


def _prime_rl_v02(f: Flat, s: Sequence) -> list[float]:
    v = deltas(s, "current")
    token, geo = exp(v), exp(level(s, v, "mean"))
    outlier = min(token) < f["sequence_mask_low"] or max(token) > f["sequence_mask_high"]
    ok = inside(token, f["token_mask_low"], f["token_mask_high"])
    fine = inside(geo, f["geo_mask_low"], f["geo_mask_high"])
    w = token
    if f["ratio_type"] == "sequence":
        w = [min(math.exp(min(math.fsum(v), 10)), f["sequence_clip_high"])] * s.n
    return times(w, [a and b and not outlier for a, b in zip(ok, fine, strict=True)])


SKYRL, CORRECTION = "trainer.algorithm.", "off_policy_correction."


def skyrl(f: Flat, batch: Batch) -> Effect:
    assert f["generator.sampling_params.logprobs"] == 1
    f = {key.removeprefix(SKYRL): value for key, value in f.items()}
    kind = f["policy_loss_type"]
    if kind == "rollout_is":
        band = (1 - f["eps_clip_low"], 1 + f["eps_clip_high"])
        return Effect([_rollout_is(s, *band) for s in batch], "reinforce", "rollout")
    if kind == "dppo":
        return Effect([_skyrl_dppo(f, s) for s in batch], "surrogate", "rollout")
    low, high = f.get("cispo.cispo_eps_clip_low", 1.0), f.get("cispo.cispo_eps_clip_high", 4.0)
    if kind == "cispo" and f.get("cispo.cispo_anchor") == "rollout":
        factors = [clipped(exp(deltas(s, "current")), 1 - low, 1 + high) for s in batch]
        return Effect(factors, "reinforce", "rollout")
    clip = (low, high) if kind == "cispo" else (f.get("eps_clip_low", 0.2), f.get("eps_clip_high", 0.2))
    loss = {"regular": "ppo_clip", "dual_clip": "ppo_clip"}.get(kind, kind)
    return Effect([_skyrl(f, s) for s in batch], loss, "old", clip)


def _rollout_is(s: Sequence, low: float, high: float) -> list[float]:
    w = exp(deltas(s, "current"))
    return times(w, [low < x < high for x in w])


def _skyrl_dppo(f: Flat, s: Sequence) -> list[float]:
    v, keep = deltas(s, "current"), []
    for d, q, a in zip(v, s.rollout, s.advantages, strict=True):
        gap = math.exp(q) * math.expm1(d)
        beyond = gap > f["dppo.delta_high"] if a > 0 else -gap > f["dppo.delta_low"]
        if f["dppo.dppo_type"] == "binary_kl":
            beyond = binary_kl(d, q) > f["dppo.delta_high"] and a * gap > 0
        keep.append(a == 0 or not beyond)
    return times(exp(v), keep)


def _skyrl(f: Flat, s: Sequence) -> list[float]:
    """Apply SkyRL's corrections in order, each on the mask that the previous one returned."""
    c = {key.removeprefix(CORRECTION): value for key, value in f.items()}
    d, keep = bounded(deltas(s), 20), [True] * s.n
    out = inside(exp(d), c.get("outlier_token_is_threshold_low"), c.get("outlier_token_is_threshold_high"))
    keep = keep if all(out) else [False] * s.n
    if "token_mask_is_threshold_low" in c:
        ok = inside(exp(d), c["token_mask_is_threshold_low"], c["token_mask_is_threshold_high"])
        keep = [a and b for a, b in zip(keep, ok, strict=True)]
    left = [x for x, k in zip(d, keep, strict=True) if k]
    w = ones(s)
    if c["tis_ratio_type"] == "token":
        w = clipped(exp(d), None, c["token_tis_ratio_clip_high"])
    elif c["tis_ratio_type"] == "sequence":
        w = clipped(exp(bounded([math.fsum(left)] * s.n, 20)), None, c["sequence_tis_ratio_clip_high"])
    metric = c.get("sequence_mask_metric")
    if metric and left:
        name, total = ("geo", mean(left)) if metric == "geometric" else ("product", math.fsum(left))
        (ok,) = inside(exp(bounded([total], 20)), c[f"{name}_mask_low"], c[f"{name}_mask_high"])
        keep = [k and ok for k in keep]
    return times(w, keep)


def roll(f: Flat, batch: Batch) -> Effect:
    assert f["enable_old_logprobs_recompute"] is True
    if f.get("actor_train.worker_cls") == "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker":
        assert f["actor_train.pg_variant"] == "cispo"
        clip, loss = (0.1, 0.1), "cispo"
    else:
        ranged, seq = f.get("use_pg_clip_range", False), f.get("importance_sampling") == "seq"
        clip = (f["pg_clip_low"], f["pg_clip_high"]) if ranged else (0.2, 0.2)
        loss = "gspo" if seq else "ppo_clip"
    return Effect([_roll(f, s) for s in batch], loss, "old", clip)


ROLL = {"token": "token", "segment": "segment", "geometric": "mean", "sequence": "sum"}


def _roll(f: Flat, s: Sequence) -> list[float]:
    c = {key.removeprefix("train_infer_correction."): value for key, value in f.items()}
    d, w = deltas(s), ones(s)
    if c["is_weight.enabled"]:
        w = clipped(exp(level(s, d, ROLL[c["is_weight.weight_type"]])), 0, c["is_weight.upper_bound"])
    gap = [math.exp(o) - math.exp(r) for o, r in zip(s.old, s.rollout, strict=True)]
    for one in c["filters"]:
        assert one["enabled"]
        over = ROLL[one["agg_type"]]
        if one["ratio_enabled"]:
            w = times(w, inside(exp(level(s, d, over)), one["ratio_low"], one["ratio_high"]))
        if one["diff_enabled"]:
            w = times(w, inside(level(s, gap, over), one["diff_low"], one["diff_high"]))
    return w


def open_instruct(f: Flat, batch: Batch) -> Effect:
    for part in ("clamp", "mask"):
        low, high = f[f"rho_{part}_lower_bound"], f[f"rho_{part}_upper_bound"]
        assert low == 0 or 0 < low < 1
        assert high == 0 or high > 1
    assert not (f["use_rho_correction"] and f["use_vllm_logprobs"])
    loss = {"dapo": "ppo_clip", "cispo": "cispo"}[f["loss_fn"]]
    clip = (1.0 if loss == "cispo" else f["clip_lower"], f["clip_higher"])
    factors = [_rho(f, s) if f["use_rho_correction"] else ones(s) for s in batch]
    return Effect(factors, loss, "rollout" if f["use_vllm_logprobs"] else "old", clip)


def _rho(f: Flat, s: Sequence) -> list[float]:
    d = bounded(deltas(s), 10)
    rho = exp(level(s, d, "mean") if f["rho_mask_sequence_level"] else d)
    low, high = f["rho_mask_lower_bound"] or None, f["rho_mask_upper_bound"] or None
    keep = inside(rho, low, high)
    if f["rho_mask_tv_divergence"]:
        (fine,) = inside([mean([abs(math.expm1(x)) for x in d])], low, high)
        keep = [fine or not x * a > 0 for x, a in zip(d, s.advantages, strict=True)]
    w = clipped(rho, f["rho_clamp_lower_bound"] or None, f["rho_clamp_upper_bound"] or None)
    return times(w, keep)


def colossalai(f: Flat, batch: Batch) -> Effect:
    return Effect([ones(s) for s in batch], "ppo_clip", "rollout", (f["clip_eps_low"], f["clip_eps_high"]))


def torchforge(f: Flat, batch: Batch) -> Effect:
    assert f == {}
    factors = [clipped(exp(deltas(s, "current")), 0.1, 10.0) for s in batch]
    return Effect(factors, "reinforce", "rollout")


TRAINERS: dict[str, Callable[[Flat, Batch], Effect]] = {
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
    "roll": roll,
    "open-instruct": open_instruct,
    "flash-rl": flash_rl,
    "colossalai": colossalai,
    "torchforge": torchforge,
}
