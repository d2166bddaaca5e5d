"""Corrections of the catalogue and of `rows.toml`, with their restatement: (function, its settings).

The settings are written down from the trainers' own keys and defaults; nothing here is read from our presets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.trainers import areal, nemo_rl, slime
from tests.trainers import prime_skyrl as loop
from tests.trainers import trl_swift_openrlhf as hub
from tests.trainers.padded import Padded, Verdict, verdict_of

Trainer = Callable[..., Verdict]

GEOMETRIC = {"tis_level": "geometric", "tis_lower_bound": 0.999, "tis_upper_bound": 1.001}
SEQUENCE = {"tis_level": "sequence", "tis_lower_bound": None, "tis_upper_bound": 5.0}
SKYRL_OUTLIERS = {"outlier_token_is_threshold": (1e-4, 100.0)}
SKYRL_TOKENS = {"token_mask_is_threshold": (0.5, 5.0)}
KL = {"level": "token", "action": "mask"}
KL_ROW = {"level": "sequence", "action": "mask", "agg": "mean", "upper": 0.01}
RATIO_ROW = {"level": "sequence", "action": "mask", "metric": "ratio"}


def _tis(kind: str, high: float, low: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "truncated_importance_sampling_type": kind,
        "truncated_importance_sampling_ratio": high,
        "truncated_importance_sampling_ratio_min": low,
        **more,
    }


def bare(p: Padded) -> Verdict:
    """Return a loss that nothing multiplies, of all tokens."""
    return verdict_of(p, np.ones(p.mask.shape))


def _swift(mode: str) -> dict[str, Any]:
    return {"rollout_importance_sampling_mode": mode, "rollout_importance_sampling_threshold": 2.0}


TABLE: dict[str, tuple[Trainer, dict[str, Any]]] = {
    "vanilla_is": (nemo_rl.nemo_rl, {}),
    "areal_decoupled": (areal.rejection_sampling, {}),
    # ---- TRL
    "trl_token_truncate": (hub.trl, {"mode": "token_truncate"}),
    "trl_token_clip": (hub.trl, {"mode": "token_truncate", "clip_min": 0.5}),
    "trl_token_mask": (hub.trl, {"mode": "token_mask"}),
    "trl_token_icepop": (hub.trl, {"mode": "token_mask", "clip_min": 0.5, "clip_max": 5.0}),
    "trl_sequence_truncate": (hub.trl, {"mode": "sequence_truncate"}),
    "trl_sequence_clip": (hub.trl, {"mode": "sequence_truncate", "clip_min": 0.5}),
    "trl_sequence_mask": (hub.trl, {}),
    "seq_icepop": (hub.trl, {"clip_min": 0.5}),
    "trl_cispo": (hub.trl, {}),
    # ---- ms-swift
    "swift_token_truncate": (hub.swift, _swift("token_truncate")),
    "swift_token_mask": (hub.swift, _swift("token_mask")),
    "geo_is": (hub.swift, _swift("sequence_truncate")),
    "swift_sequence_mask": (hub.swift, _swift("sequence_mask")),
    # ---- OpenRLHF
    "token_clip": (hub.openrlhf, {}),
    "openrlhf_icepop": (hub.openrlhf, {"is_correction_type": "icepop"}),
    "openrlhf_seq_mask": (
        hub.openrlhf,
        {"is_correction_type": "seq-mask-tis", "is_correction_threshold": (0.9, 1.1)},
    ),
    "seq_mask_tis": (hub.openrlhf, {"is_correction_type": "seq-mask-tis"}),
    "openrlhf_gspo": (hub.openrlhf, {"policy_loss_type": "gspo"}),
    # ---- NeMo-RL
    "nemo_rl_force_on_policy": (nemo_rl.nemo_rl, {**_tis("tis", 2.0), "force_on_policy_ratio": True}),
    "nemo_rl_reinforce": (nemo_rl.nemo_rl, _tis("tis", 2.0)),
    "nemo_rl_tis": (nemo_rl.nemo_rl, _tis("tis", 2.0)),
    "nemo_rl_icepop": (nemo_rl.nemo_rl, _tis("icepop", 5.0, 0.5)),
    "nemo_rl_seq_mask_tis": (nemo_rl.nemo_rl, _tis("seq-mask-tis", 1.002, 0.999)),
    "seq_error_mask": (nemo_rl.nemo_rl, {"seq_logprob_error_threshold": 2.0}),
    "nemo_rl_seq_product": (nemo_rl.nemo_rl, _tis("tis", 5.0, sequence_level_importance_ratios=True)),
    # ---- slime, miles
    "slime_tis": (slime.tis, {}),
    "slime_tis_two_sided": (slime.tis, {"tis_clip_low": 0.5}),
    "slime_icepop": (slime.tis, {"tis_clip_low": 0.5, "tis_clip": 5.0, "icepop": True}),
    "slime_mis": (slime.mis, {"use_rs": True, "rs_veto_threshold": 1e-4, "tis_batch_normalize": True}),
    "slime_mis_token_truncate": (slime.mis, {"tis_mode": "truncate"}),
    "slime_mis_token_clip": (slime.mis, {"tis_mode": "clip"}),
    "slime_mis_token_mask": (slime.mis, {"tis_mode": "mask"}),
    "slime_mis_sequence_truncate": (slime.mis, {**SEQUENCE, "tis_mode": "truncate"}),
    "slime_mis_sequence_clip": (slime.mis, {**SEQUENCE, "tis_mode": "clip"}),
    "slime_mis_sequence_mask": (slime.mis, {**SEQUENCE, "tis_mode": "mask"}),
    "slime_mis_geometric_truncate": (slime.mis, {**GEOMETRIC, "tis_mode": "truncate"}),
    "slime_mis_geometric_clip": (slime.mis, {**GEOMETRIC, "tis_mode": "clip"}),
    "geo_mask": (slime.mis, {**GEOMETRIC, "tis_mode": "mask"}),
    "slime_mis_geo_rs": (
        slime.mis,
        {
            "use_rs": True,
            "rs_level": "geometric",
            "rs_lower_bound": 0.999,
            "rs_upper_bound": 1.001,
            "rs_veto_threshold": 1e-4,
        },
    ),
    "token_is_veto": (
        slime.mis,
        {"use_rs": True, "rs_lower_bound": 1e-9, "rs_upper_bound": 1e9, "rs_veto_threshold": 1e-4},
    ),
    "miles_tis": (slime.tis, {}),
    "miles_icepop": (slime.tis, {"tis_clip_low": 0.5, "tis_clip": 5.0, "icepop": True}),
    "miles_mis": (slime.mis, {"use_rs": True, "rs_veto_threshold": 1e-4, "tis_batch_normalize": True}),
    # ---- AReaL
    "areal_token_clamp": (areal.rejection_sampling, {"action": "clamp", "upper": 2.0}),
    "kpop": (areal.rejection_sampling, {"metric": "binary_kl", "upper": 2.0}),
    "areal_icepop": (areal.rejection_sampling, {"upper": 5.0, "lower": 0.5}),
    "areal_sequence_clamp": (
        areal.rejection_sampling,
        {"level": "sequence", "action": "clamp", "upper": 2.0},
    ),
    "areal_sequence_mask": (areal.rejection_sampling, {**RATIO_ROW, "upper": 1.002, "lower": 0.999}),
    "areal_sequence_mask_sum": (
        areal.rejection_sampling,
        {**RATIO_ROW, "agg": "sum", "upper": 2.0, "lower": 0.5},
    ),
    "areal_sequence_mask_max": (areal.rejection_sampling, {**RATIO_ROW, "agg": "max", "upper": 100.0}),
    "areal_token_k1": (areal.rejection_sampling, {**KL, "metric": "kl_k1", "upper": 0.7}),
    "areal_token_k2": (areal.rejection_sampling, {**KL, "metric": "kl_k2", "upper": 2.0}),
    "token_k3_mask": (areal.rejection_sampling, {**KL, "metric": "kl_k3", "upper": 1.0}),
    "areal_sequence_k1": (areal.rejection_sampling, {**KL_ROW, "metric": "kl_k1"}),
    "areal_sequence_k2": (areal.rejection_sampling, {**KL_ROW, "metric": "kl_k2"}),
    "areal_sequence_k3": (areal.rejection_sampling, {**KL_ROW, "metric": "kl_k3"}),
    "areal_cap_token_truncate": (areal.behave_cap, {"behave_imp_weight_mode": "token_truncate"}),
    "areal_cap_token_mask": (areal.behave_cap, {}),
    "areal_cap_sequence_truncate": (areal.behave_cap, {"behave_imp_weight_mode": "sequence_truncate"}),
    "areal_cap_sequence_mask": (areal.behave_cap, {"behave_imp_weight_mode": "sequence_mask"}),
    "m2po": (areal.m2po, {}),
    "areal_cispo": (areal.rejection_sampling, {}),
    # ---- prime-rl
    "dppo_tv": (loop.prime_dppo, {}),
    "ipo": (loop.prime_ipo, {}),
    # ---- SkyRL
    "skyrl_tis_token": (loop.skyrl_correction, {"tis_ratio_type": "token"}),
    "skyrl_tis_sequence": (loop.skyrl_correction, {"tis_ratio_type": "sequence"}),
    "skyrl_outlier": (loop.skyrl_correction, {"tis_ratio_type": "token", **SKYRL_OUTLIERS}),
    "skyrl_token_mask": (loop.skyrl_correction, {"tis_ratio_type": "token", **SKYRL_TOKENS}),
    "skyrl_dppo_tv": (loop.skyrl_dppo, {}),
    "skyrl_dppo_kl": (loop.skyrl_dppo, {"dppo_type": "binary_kl"}),
    "skyrl_cispo_rollout": (loop.skyrl_cispo, {}),
    "skyrl_importance_sampling": (bare, {}),
    # ---- the rest
    "verl_dppo_tv": (loop.verl_dppo, {"loss_mode": "dppo_tv", "clip_ratio": 0.15}),
    "dppo_kl": (loop.verl_dppo, {"loss_mode": "dppo_kl", "clip_ratio": 0.05}),
    "verl_gpg": (bare, {}),
    "opsm": (hub.deepseek_v32, {"delta": 0.1}),
}
