"""A printed configuration, read as its trainer would read it: which function of ours restates it, with what.

Keys that choose no factor (log-prob plumbing, the clip of the policy loss) are listed in `ASIDE`; any other
key that is not understood is an error, so that nothing printed goes unread.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Callable
from typing import Any

from tests.trainers import areal, nemo_rl, slime
from tests.trainers import prime_skyrl as loop
from tests.trainers import roll_open_instruct as ai2
from tests.trainers import trl_swift_openrlhf as hub
from tests.trainers.padded import Padded, Verdict, settle

Keys = dict[str, Any]
Read = tuple[Callable[..., Verdict], Keys]


def nothing(p: Padded) -> Verdict:
    """No correction: every token counts once."""
    return settle(p, p.mask * 1.0)


# ---------------------------------------------------------------- syntaxes


def scalar(word: str) -> Any:
    """null, true, 1.0e-4, [], or the word itself."""
    known = {"null": None, "None": None, "true": True, "True": True, "false": False, "False": False, "[]": []}
    if word in known:
        return known[word]
    try:
        return float(word)
    except ValueError:
        return word.strip("\"'")


def flags(text: str) -> Keys:
    """`--a 1 2 --b` → {a: [1, 2], b: True}; one value stands alone."""
    found: Keys = {}
    for part in text.replace("\\\n", " ").split("--")[1:]:
        key, *values = part.split()
        found[key] = True if not values else scalar(values[0]) if len(values) == 1 else [*map(scalar, values)]
    return found


def assignments(text: str) -> Keys:
    """`a.b=1` → {b: 1}."""
    pairs = (part.split("=", 1) for part in text.replace("\\\n", " ").split())
    return {key.rsplit(".", 1)[1]: scalar(value) for key, value in pairs}


def call(text: str) -> Keys:
    """`F(a=1)` → {a: 1}."""
    return {word.arg: ast.literal_eval(word.value) for word in ast.parse(text, mode="eval").body.keywords}


def indented(text: str) -> Keys:
    """The YAML that is printed here: mappings, and lists of mappings."""
    lines = [line for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    return _block(lines, 0)


def _block(lines: list[str], depth: int) -> Any:
    found: Any = [] if lines[0].lstrip().startswith("- ") else {}
    while lines and _depth(lines[0]) >= depth:
        line = lines.pop(0)
        if isinstance(found, list):
            lines.insert(0, " " * (depth + 2) + line.strip()[2:])
            found.append(_block(lines, depth + 2))
            continue
        key, _, word = re.sub(r"\s+#.*", "", line).strip().partition(":")
        found[key] = scalar(word.strip()) if word.strip() else _block(lines, _depth(lines[0]))
    return found


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


# ---------------------------------------------------------------- trainers


def take(keys: Keys, names: str, aside: str = "") -> Keys:
    """Those keys; nothing else may be left but what is aside."""
    rest = set(keys) - {*names.split(), *aside.split()}
    assert not rest, f"not understood: {sorted(rest)}"
    return {name: keys[name] for name in names.split() if name in keys}


VLLM = "vllm_importance_sampling_"


def trl(keys: Keys) -> Read:
    given = {key.removeprefix(VLLM): value for key, value in keys.items()}
    corrected = given.pop("correction")
    given = take(given, "mode clip_max clip_min off_policy_mask_threshold", ASIDE["trl"])
    if corrected:
        return hub.trl, given
    if "off_policy_mask_threshold" in given:
        return hub.deepseek_v32, {"delta": given["off_policy_mask_threshold"]}
    return nothing, take(given, "")


def swift(keys: Keys) -> Read:
    names = "rollout_importance_sampling_mode rollout_importance_sampling_threshold"
    assert set(keys) <= set(ASIDE["ms-swift"].split()) or keys.pop("use_vllm")
    return hub.swift, take(keys, f"{names} off_policy_sequence_mask_delta", ASIDE["ms-swift"])


KINDS = {("token", "clip"): "tis", ("token", "mask"): "icepop", ("seq", "mask"): "seq-mask-tis"}


def openrlhf(keys: Keys) -> Read:
    keys = {key.rsplit(".", 1)[-1]: value for key, value in keys.items()}
    if "is_correction_level" not in keys:
        return nothing, take(keys, "", "policy_loss_type " + ASIDE["openrlhf"])
    level, mode = keys.pop("is_correction_level"), keys.pop("is_correction_mode", "mask")
    assert keys.pop("is_correction_gating", "ratio") == "ratio"
    keys["is_correction_type"] = KINDS[level, mode]
    names = "is_correction_type is_correction_threshold policy_loss_type"
    return hub.openrlhf, take(keys, names, ASIDE["openrlhf"])


def nemo(keys: Keys) -> Read:
    loss, start = keys.get("loss_fn", {}), "truncated_importance_sampling_"
    error = take(keys.get("grpo", {}), "seq_logprob_error_threshold")
    if not loss.pop("use_importance_sampling_correction", False):
        assert not error
        idle = f" {start}type {start}ratio sequence_level_importance_ratios"
        return nothing, take(loss, "", ASIDE["nemo-rl"] + idle)
    names = f"{start}type {start}ratio {start}ratio_min sequence_level_importance_ratios"
    return nemo_rl.nemo_rl, {**take(loss, names, ASIDE["nemo-rl"]), **error}


def slime_(keys: Keys) -> Read:
    helper = keys.pop("mis.yaml", None)
    keys = {key.replace("-", "_"): value for key, value in keys.items()}
    path = str(keys.pop("custom_tis_function_path", ""))
    if helper:
        assert path.endswith("compute_mis_weights_with_cp")
        take(keys, "use_tis custom_config_path", "get_mismatch_metrics " + ASIDE["slime"])
        if not helper.pop("use_tis"):
            return nothing, {}
        return slime.mis, helper
    if keys.pop("use_opsm", False):
        return slime.opsm, take(keys, "opsm_delta", "use_rollout_logprobs " + ASIDE["slime"])
    if not keys.pop("use_tis", False):
        return nothing, take(keys, "", "use_rollout_logprobs " + ASIDE["slime"])
    icepop = path.endswith("icepop_function")
    return slime.tis, {**take(keys, "tis_clip tis_clip_low", ASIDE["slime"]), "icepop": icepop}


def areal_(keys: Keys) -> Read:
    actor = keys["actor"]
    if "m2_threshold" in actor:
        assert actor["use_decoupled_loss"]
        assert actor.pop("rejection_sampling") is None
        return areal.m2po, take(actor, "m2_threshold", ASIDE["areal"])
    rejection = actor.pop("rejection_sampling", None)
    take(actor, "", ASIDE["areal"])
    return (areal.rejection_sampling, rejection) if rejection else (nothing, {})


def prime(keys: Keys) -> Read:
    loss = keys["trainer"]["loss"]
    if loss.get("type") == "default":
        return loop.prime_dppo, take(loss, "dppo_mask_low dppo_mask_high", ASIDE["prime-rl"])
    if loss.get("type") == "ipo":
        return loop.prime_ipo, take(loss, "ipo_threshold", ASIDE["prime-rl"])
    pairs = {name: (loss.pop(f"{name}_low"), loss.pop(f"{name}_high")) for name in V02}
    return loop.prime_v02, {**take(loss, "ratio_type sequence_clip_high", ASIDE["prime-rl"]), **pairs}


V02 = ("token_mask", "geo_mask", "sequence_mask")


def skyrl(keys: Keys) -> Read:
    kind = keys.pop("policy_loss_type", "regular")
    if kind == "rollout_is":
        return loop.skyrl_rollout_is, take(keys, "eps_clip_low eps_clip_high", "logprobs")
    if kind == "dppo":
        return loop.skyrl_dppo, take(keys, "dppo_type delta_low delta_high", "logprobs")
    if keys.pop("cispo_anchor", "old") == "rollout":
        return loop.skyrl_cispo, take(keys, "cispo_eps_clip_low cispo_eps_clip_high", "logprobs")
    pairs = {}
    for name in ("geo_mask", "product_mask", "outlier_token_is_threshold", "token_mask_is_threshold"):
        low, high = keys.pop(f"{name}_low", None), keys.pop(f"{name}_high", None)
        pairs |= {name: (low, high)} if (low, high) != (None, None) else {}
    names = "tis_ratio_type token_tis_ratio_clip_high sequence_tis_ratio_clip_high sequence_mask_metric"
    return loop.skyrl_correction, {**take(keys, names, ASIDE["skyrl"]), **pairs}


def roll(keys: Keys) -> Read:
    given = keys.pop("train_infer_correction", {})
    take(keys, "", ASIDE["roll"])
    weight, filters = given.get("is_weight", {}), given.get("filters", [])
    on = weight.pop("enabled", False)
    kept = tuple({k: v for k, v in one.items() if k != "enabled"} for one in filters if one["enabled"])
    return ai2.roll, {"is_weight": weight if on else None, "filters": kept}


def open_instruct(keys: Keys) -> Read:
    if not keys.pop("use_rho_correction"):
        return nothing, take(keys, "", ASIDE["open-instruct"])
    names = [f"rho_{what}_{side}_bound" for what in ("clamp", "mask") for side in ("lower", "upper")]
    switches = "rho_mask_sequence_level rho_mask_tv_divergence"
    return ai2.open_instruct, take(keys, " ".join(names) + " " + switches, ASIDE["open-instruct"])


ASIDE = {
    "trl": "use_vllm importance_sampling_level loss_type epsilon epsilon_high",
    "ms-swift": "importance_sampling_level loss_type epsilon epsilon_high log_rollout_offpolicy_metrics",
    "openrlhf": "eps_clip_low_high",
    "nemo-rl": "token_level_loss use_cispo ratio_clip_min ratio_clip_max ratio_clip_c",
    "slime": "advantage_estimator eps_clip eps_clip_high",
    "areal": "use_decoupled_loss recompute_logprob importance_sampling_level eps_clip eps_clip_higher",
    "prime-rl": "type adv_tau kl_tau",
    "skyrl": "logprobs cispo_eps_clip_low cispo_eps_clip_high eps_clip_low eps_clip_high",
    "roll": "enable_old_logprobs_recompute use_pg_clip_range pg_clip_low pg_clip_high importance_sampling",
    "open-instruct": "use_vllm_logprobs loss_fn clip_lower clip_higher",
}
READERS: dict[str, tuple[Callable[[str], Keys], Callable[[Keys], Read]]] = {
    "trl": (call, trl),
    "ms-swift": (flags, swift),
    "openrlhf": (flags, openrlhf),
    "nemo-rl": (indented, nemo),
    "slime": (flags, slime_),
    "miles": (flags, slime_),
    "areal": (indented, areal_),
    "prime-rl": (tomllib.loads, prime),
    "skyrl": (assignments, skyrl),
    "roll": (indented, roll),
    "open-instruct": (flags, open_instruct),
}


def understood(trainer: str, snippets: list[tuple[str, str]]) -> Read:
    """The trainer's function and its settings, from the (file, text) of what is printed first."""
    syntax, read = READERS[trainer]
    file, text = snippets[0]
    if not text.strip():
        return nothing, {}
    if file == "mis.yaml":
        return read({**flags(snippets[1][1]), "mis.yaml": indented(text)})
    return read(syntax(text))
