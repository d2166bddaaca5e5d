"""What the MIS helper of slime and miles logs (examples/train_infer_mismatch_helper/mis.py): `train/mis_*`.

Reduced as in `slime`: over the tokens of each sample, then over samples. All of it is of the mask as it came,
so nothing that is rejected leaves a mean here; beside it stand the numbers of the loss, for which it does.
"""

from __future__ import annotations

from collections.abc import Callable

from offpol_diag.crosswalk.ledger import Entry, Ledger, Page, always
from offpol_diag.crosswalk.slime import When, loss_entries, mean, weighs
from offpol_diag.crosswalk.slime_mis_sums import SUMS, in_mode, normal, rejects, vetoes
from offpol_diag.metrics.outcome import SMALLEST_NORM


def _factor(page: Page) -> float:
    """What the final weights are divided by: their mean over tokens, or over samples, empty ones too."""
    weight = page.preset.weight
    if weight is None or not weight.normalize:
        return 1.0
    mean = page("weights") / max(page.tokens, 1) if weight.over == "token" else page("after") / page.rows
    return mean if mean > SMALLEST_NORM else 1.0


def _final(column: str) -> Callable[[Page], float]:
    return lambda page: page(column) / _factor(page) / page.rows


_ROWS: tuple[tuple[str, str, Callable[[Page], float], When], ...] = (
    ("training_log_ppl", "Mean over samples of −mean log π_train, nats.", mean("training_log_ppl"), always),
    (
        "training_ppl",
        "Mean over samples of e^(−mean log π_train): of the perplexities, not e^training_log_ppl.",
        mean("training_ppl"),
        always,
    ),
    ("rollout_log_ppl", "Mean over samples of −mean log π_rollout, nats.", mean("rollout_log_ppl"), always),
    (
        "rollout_ppl",
        "Mean over samples of e^(−mean log π_rollout).",
        mean("rollout_ppl"),
        always,
    ),
    (
        "kl",
        "log π_rollout − log π_train, averaged per sample first: k1, the same number as log_ppl_diff.",
        mean("mis_kl"),
        always,
    ),
    (
        "k3_kl",
        "r − 1 − log r, r = π_train/π_rollout, averaged per sample first; not clamped, as the weights are.",
        mean("k3_kl"),
        always,
    ),
    (
        "log_ppl_diff",
        "Mean over samples of mean log π_rollout − mean log π_train; above 0 where the trainer finds its "
        "samples less likely.",
        mean("mis_kl"),
        always,
    ),
    (
        "log_ppl_abs_diff",
        "Mean over samples of |log_ppl_diff|; signs do not cancel between samples, but do within one.",
        mean("log_ppl_abs_diff"),
        always,
    ),
    (
        "ppl_ratio",
        "Mean over samples of PPL_train/PPL_rollout, the reciprocal of the sample's geometric ratio.",
        mean("ppl_ratio"),
        always,
    ),
    (
        "chi2_token",
        "Mean over samples of their mean r² − 1, log r clamped to ±20; the pooled mean over tokens differs.",
        mean("chi2_token"),
        always,
    ),
    (
        "chi2_seq",
        "Mean over samples of (∏r)² − 1, log ∏r clamped to ±20, so that it ends at e^40.",
        mean("chi2_seq"),
        always,
    ),
    (
        "tis_weight_before_bound",
        "The weight at its level (token, product, geometric mean), its logarithm clamped to ±20, before "
        "tis_mode acts.",
        mean("before"),
        weighs,
    ),
    (
        "tis_weight_after_bound",
        "The weight after tis_mode; in mode mask it is as before, since only the mask changes.",
        mean("after"),
        weighs,
    ),
    (
        "tis_truncate_fraction",
        "Share of weights above tis_upper_bound (of samples where the level is theirs).",
        mean("high"),
        in_mode("truncate"),
    ),
    ("tis_clip_fraction_low", "Share of weights below tis_lower_bound.", mean("low"), in_mode("clip")),
    ("tis_clip_fraction_high", "Share of weights above tis_upper_bound.", mean("high"), in_mode("clip")),
    (
        "tis_mask_fraction_low",
        "Share of weights below tis_lower_bound: what mode mask rejects there.",
        mean("tis_lower"),
        in_mode("mask"),
    ),
    (
        "tis_mask_fraction_high",
        "Share of weights above tis_upper_bound: what mode mask rejects there.",
        mean("tis_upper"),
        in_mode("mask"),
    ),
    (
        "rs_mask_fraction_low",
        "Share of tokens (of samples at a sample's level) below rs_lower_bound, whatever else rejects them; "
        "0 where a veto needs use_rs and its band is open.",
        mean("rs_lower"),
        rejects,
    ),
    (
        "rs_mask_fraction_high",
        "Share of tokens (of samples at a sample's level) above rs_upper_bound, whatever else rejects them.",
        mean("rs_upper"),
        rejects,
    ),
    (
        "rs_catastrophic_token_fraction",
        "Mean over samples of the share of their tokens with r strictly below rs_veto_threshold, unclamped.",
        mean("catastrophic"),
        vetoes,
    ),
    (
        "rs_catastrophic_seq_fraction",
        "Share of samples with such a token: what the veto drops.",
        mean("vetoed"),
        vetoes,
    ),
    (
        "is_ratio_mean_after_tis_rs",
        "The weight after tis_mode once more: rejection changes the mask and no weight, so it is not taken "
        "out of this mean.",
        mean("after"),
        weighs,
    ),
    (
        "batch_norm_factor",
        "What tis_batch_normalize divides by: the mean bounded weight over tokens, or over samples at level "
        "sequence, of the mask as it came; 1 where that is at most 1e-8. The helper takes it per rank and "
        "call, here it is of the whole dump; samples without a token are 0 in the mean that is logged.",
        lambda page: _factor(page) * page.sequences / page.rows,
        normal,
    ),
    (
        "is_ratio_mean_final",
        "Mean of the weights that multiply the loss, after normalisation, rejected tokens included.",
        _final("after"),
        weighs,
    ),
    (
        "is_ratio_min_final",
        "Mean over samples of their smallest final weight; not the smallest of the batch.",
        _final("smallest"),
        weighs,
    ),
    (
        "is_ratio_max_final",
        "Mean over samples of their largest final weight; not the largest of the batch.",
        _final("largest"),
        weighs,
    ),
)

BOOK = Ledger(
    "slime-mis",
    SUMS,
    (),
    (
        *loss_entries(always),
        *(Entry(f"train/mis_{name}", meaning, of, when) for name, meaning, of, when in _ROWS),
    ),
)
