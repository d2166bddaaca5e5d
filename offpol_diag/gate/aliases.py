"""Names that trainers log, and the number of ours that equals each.

A name stands for a number of ours where both are equal on every dump (definitions: `docs/crosswalk.md`).
What a trainer logs by another definition is refused, with that definition and the nearest number of ours.
"""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.errors import did_you_mean
from offpol_diag.metrics import PAIRS


def _table(rows: Mapping[str, str]) -> dict[str, str]:
    return {name: ours for ours, names in rows.items() for name in names.split()}


VERL = {
    "kl": "k1",
    "k3_kl": "k3",
    "chi2_token": "chi2_token",
    "chi2_seq": "chi2_sequence",
    "training_ppl": "ppl_train",
    "rollout_ppl": "ppl_rollout",
    **{
        one: one
        for one in ["ppl_ratio", "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min"]
    },
    "rollout_is_eff_sample_size": "ess_tokens",
}
"""verl's word of a policy gap → ours: as it is, after `rollout_corr/`, and after `mismatch/` (2025-10)."""
NAMESPACES = ("", "rollout_corr/", "mismatch/", "mismatch/mismatch_")

GAP: Mapping[str, str] = {
    **{f"{space}{word}": ours for word, ours in VERL.items() for space in NAMESPACES if space + word != ours},
    **_table(
        {
            "k1": "rollout_correction/kl vllm_kl",
            "chi2_token": "rollout_correction/chi2_token",
            "chi2_sequence": "train/mis_chi2_seq",
            "ppl_train": "rollout_correction/training_ppl train/mis_training_ppl",
            "ppl_rollout": "rollout_correction/rollout_ppl train/mis_rollout_ppl",
            "ppl_ratio": "rollout_correction/ppl_ratio train/mis_ppl_ratio",
            "log_ppl_diff": "rollout_correction/log_ppl_diff train/mis_log_ppl_diff train/mis_kl",
            "log_ppl_abs_diff": "rollout_correction/log_ppl_abs_diff train/mis_log_ppl_abs_diff",
            "log_ppl_diff_max": "rollout_correction/log_ppl_diff_max",
            "log_ppl_diff_min": "rollout_correction/log_ppl_diff_min",
            "pearson": "training/rollout_actor_probs_pearson_corr rollout_actor_probs_pearson_corr",
            "prob_diff_mean": "training/rollout_probs_diff_mean rollout_probs_diff_mean",
            "prob_diff_max": "training/rollout_probs_diff_max rollout_probs_diff_max",
            "abs_log_ratio": "sampling/sampling_logp_difference/mean "
            "policy/rollout_train_logprobs_abs_diff_mean",
            "mean_ratio": "is_ratio_mean",
            "total.k3": "mismatch_kl/all/mean",
            "total.abs_log_ratio": "policy/minibatch_rollout_logprobs_abs_diff_mean "
            "debug/vllm_vs_local_logprob_diff_mean",
            "total.mean_ratio": "cispo/ratio_mean",
            "drift2.mean_ratio": "val/ratio",
            "drift2.log_ratio_min": "ppo_actor/update/approx_kl/min",
        }
    ),
}
"""Logged name → the metric of a policy gap; verl's words are of π_old, as under its decoupled presets."""

PRESET: Mapping[str, str] = _table(
    {
        "ess_tokens": "rollout_corr/rollout_is_eff_sample_size rollout_is_eff_sample_size",
        "pg_clipfrac": "actor/pg_clipfrac",
        "pg_clipfrac_lower": "actor/pg_clipfrac_lower",
        "ppo_kl": "actor/ppo_kl",
        "vetoed": "rollout_corr/rollout_is_veto_fraction rollout_is_veto_fraction",
        "catastrophic_tokens": "rollout_corr/rollout_is_catastrophic_token_fraction "
        "rollout_is_catastrophic_token_fraction",
        "truncated_high": "rollout_corr/rollout_is_ratio_fraction_high rollout_is_ratio_fraction_high "
        "rollout_correction/clipped_frac tis_seq_clip_high_ratio val/rho_clipfrac",
        "tokens_rejected": "rollout_corr/rollout_rs_masked_fraction rollout_rs_masked_fraction "
        "val/rho_drop_frac",
        "sequences_touched": "rollout_corr/rollout_rs_seq_masked_fraction rollout_rs_seq_masked_fraction",
        "weight_mean": "rollout_correction/is_weight_mean",
        "weight_max": "sampling/importance_sampling_ratio/max ppo_actor/update/behave_imp_weight/max",
        "weight_min": "sampling/importance_sampling_ratio/min",
    }
)
"""Logged name → the metric of a preset, as in `token_is.actor/pg_clipfrac`."""

UNLIKE: Mapping[str, str] = {
    "rollout_is_eff_sample_size": "verl bounds the weights before it takes their effective sample size",
    "rho_clipfrac": "open-instruct counts the weights that its lower bound raises as well",
}
"""Last part of a name that is understood although the trainer's number may differ → in what."""

NEAREST: Mapping[str, str] = _table(
    {
        "k3": "rollout_correction/k3_kl train/mis_k3_kl train/gen_kl_error train/train_rollout_kl",
        "total.k3": "mismatch_kl/mean",
        "drift2.k1": "ppo_kl train/ppo_kl",
        "chi2_token": "train/mis_chi2_token",
        "chi2_sequence": "rollout_correction/chi2_seq",
        "abs_log_ratio": "train/train_rollout_logprob_abs_diff",
        "mult_prob_error": "train/token_mult_prob_error",
        "ess_tokens": "rollout_correction/ess train/ess_ratio",
    }
)
"""Logged name → the metric of a policy gap that is nearest to it, and not the same."""


def ours(name: str) -> str:
    """Return our name of a number: `total.k3` for `total.k3_kl`, or the name itself if it is no trainer's."""
    gap = next((one for one in PAIRS if one and name.startswith(one)), "")
    found = GAP.get(name.removeprefix(gap), "")
    if found and not (gap and "." in found):
        return gap + found
    prefix, dot, metric = name.partition(".")
    while dot:
        if metric in PRESET and not gap:
            return f"{prefix}.{PRESET[metric]}"
        more, dot, metric = metric.partition(".")
        prefix += f".{more}"
    return name


def unlike(said: str) -> str:
    """Return in what the trainer's number may differ from ours; empty if it cannot."""
    return UNLIKE.get(said.rpartition("/")[2].rpartition(".")[2], "")


def advice(name: str) -> str:
    """Return what an unknown name is, and the number of ours that is nearest; empty if nobody logs it."""
    metric = name.rpartition(".")[2]
    if metric in PRESET:
        return f"it is a number of a preset: name one, PRESET.{PRESET[metric]}"
    from offpol_diag.trainers import LOGS

    logs = {log.name: names[name] for log in LOGS.values() if name in (names := log.names())}
    nearest = f"the nearest of ours is {NEAREST[name]}" if name in NEAREST else ""
    if not logs:
        return did_you_mean(name, [*GAP, *NEAREST]) if "/" in name else ""
    trainer, meaning = next(iter(logs.items()))
    return "; ".join(part for part in (f"{trainer} logs it: {meaning.rstrip('.')}", nearest) if part)
