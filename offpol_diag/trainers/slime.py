"""slime: `train/` of the loss, TIS, IcePop, OPSM and the MIS helper; flags, and the helper's mis.yaml.

Every number is reduced as the loss is by default: over the tokens of each sample, then over the samples of
the batch, one without a token counting as 0; --calculate-per-token-loss makes token means of them instead.
The helper's own numbers (`mis_`, examples/train_infer_mismatch_helper/mis.py) are of the mask as it came, so
nothing that is rejected leaves a mean there. The loss's (`pg_clipfrac`, `ppo_kl`,
`train_rollout_logprob_abs_diff`) are taken after the helper's rejection: what it rejects counts as 0, and
still divides (up to v0.2.4 it left the denominator).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Loss, Preset, Reject
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import (
    DISTANCE,
    EXCESS,
    EXCESS_SIZE,
    EXCESS_SQUARED,
    K3,
    KEPT,
    NEGATIVE,
    RATIO,
    ROLLOUT,
    SAFETY,
    SIDES,
    SMALLEST_NORM,
    TRAIN,
    UPDATE,
    UPDATE_RATIO,
    WEIGHT,
    Entry,
    Log,
    Mask,
    Measure,
    Rows,
    Side,
    Sum,
    Totals,
    U,
    Value,
    When,
    always,
    clip_decides,
    clipped,
    half,
    per_row,
    row_mean,
    weighs,
)
from offpol_diag.trainers.config import (
    IDLE_HIGH,
    IDLE_LOW,
    ClipKeys,
    Habits,
    Parts,
    Said,
    Settings,
    Snippet,
    Trainer,
    cannot,
    clip_bounds,
    clip_remarks,
    clip_settings,
    remarks,
)
from offpol_diag.trainers.schema import block

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import Tokens, View

# ---------------------------------------------------------------- the loss


def _moves(x: Tokens) -> Tensor:
    """Flag the tokens whose CISPO weight is clipped."""
    return clipped(x.update_ratio, x.preset.clip) != x.update_ratio


MOVES = Measure("CISPO's weight moves", _moves, own=True)


def _clipped(view: View, mask: Mask | None) -> Tensor:
    """Count tokens whose clipped loss is the larger one, [S]; with CISPO, those whose weight is clipped."""
    loss = view.preset.loss
    if loss == "reinforce":
        return view.zeros
    return view.total(MOVES, mask) if loss == "cispo" else clip_decides(view, mask)


OfLoss = Callable[["View", Mask | None], "Tensor"]


def of_loss(name: str, of: OfLoss, rejects: bool, needs: tuple[str, ...] = ()) -> Sum:
    """Return a per-sample mean of the loss's tokens; with `rejects`, tokens that the helper rejects are 0."""

    def mean(view: View) -> Tensor:
        if not rejects:
            return of(view, None) / view.divisor
        return (of(view, KEPT) / view.divisor).masked_fill(~view.kept, 0.0)

    return Sum(name, mean, own=True, needs=needs)


def _loss_sums(rejects: bool) -> tuple[Sum, ...]:
    return (
        of_loss("abs_diff", lambda view, mask: view.total(DISTANCE, mask), rejects),
        of_loss("clipped", _clipped, rejects, (*UPDATE, "advantages")),
        of_loss("kl", lambda view, mask: -view.total(U, mask), rejects, UPDATE),
        Sum("ois", row_mean(UPDATE_RATIO), own=True, needs=UPDATE),
    )


def loss_entries(corrected: When) -> tuple[Entry, ...]:
    """Return the entries of the loss; `corrected` selects the presets under which a TIS function runs."""
    return (
        Entry(
            "train/train_rollout_logprob_abs_diff",
            "Mean |log π_old − log π_rollout| (π_θ in π_old's place with --use-rollout-logprobs), nats. "
            "Tokens that the MIS helper rejects are 0 in it and still divide: it falls as more is rejected.",
            per_row("abs_diff"),
        ),
        Entry(
            "train/pg_clipfrac",
            "Share of tokens whose clipped loss is the larger one; the ratio is π_θ/π_old (π_θ/π_rollout "
            "with --use-rollout-logprobs), so no number of the mismatch. Of rejected tokens none counts.",
            per_row("clipped"),
        ),
        Entry(
            "train/ppo_kl",
            "Mean of log π_old − log π_θ (π_rollout in π_old's place with --use-rollout-logprobs), rejected "
            "tokens as 0: of the update, not of the mismatch; it may be negative.",
            per_row("kl"),
        ),
        Entry(
            "train/ois",
            "Mean of π_θ/π_old (1 before the first update), of all tokens, rejected or not; logged only "
            "where TIS or the mismatch metrics are on. Not clamped.",
            per_row("ois"),
            corrected,
        ),
    )


# ---------------------------------------------------------------- vanilla TIS, IcePop, OPSM


def _opsm(preset: Preset) -> Reject | None:
    """Return OPSM's rule as a rule on sequences for any sign of A, or None."""
    rules = (rule for rule in preset.reject if rule.statistic == "k1" and rule.of_token)
    found = next((rule for rule in rules if rule.advantage == "negative"), None)
    return found and replace(found, advantage="any", advantage_of="unit")


def _masks(preset: Preset) -> bool:
    return preset.apply and _opsm(preset) is not None


def _share(counts: Tensor, view: View) -> Tensor:
    """Convert counts of tokens, or flags of samples, to shares of each sample's tokens."""
    weighed = view.weighed
    assert weighed is not None
    return counts / view.divisor if weighed.final.per == "token" else counts


def _changed(view: View) -> Tensor:
    return _acted("high")(view) + _acted("low")(view)


def _acted(which: str) -> Rows:
    """Return the share of weights beyond one bound, per sample."""
    return lambda view: _share(getattr(view.weighed, which), view)


def _opsm_masks(view: View) -> Tensor:
    """Tokens with A < 0 of samples that drifted, those outside the loss mask too, over those in it."""
    rule, negative, batch = _opsm(view.preset), view.total(NEGATIVE), view.batch
    assert rule is not None
    outside = batch.masked_negative  # without A of their own they have their sample's
    if outside is None:
        outside = batch.masked.masked_fill(negative <= 0, 0)
    return ((negative + outside) / view.divisor).masked_fill(view.passes(rule), 0.0)


LOG = Log(
    "slime",
    (
        *_loss_sums(rejects=False),
        Sum("tis", row_mean(RATIO), when=weighs),
        Sum("tis_abs", row_mean(EXCESS_SIZE), when=weighs),
        Sum("tis_clipped", _changed, own=True, when=weighs),
        Sum("opsm", _opsm_masks, own=True, when=_masks, needs=("advantages",)),
    ),
    (),
    (
        *loss_entries(weighs),
        Entry(
            "train/tis",
            "Mean of π_old/π_rollout before anything is truncated; neither clamped nor the weight that the "
            "loss gets.",
            per_row("tis"),
            weighs,
        ),
        Entry(
            "train/tis_clipfrac",
            "Share of tokens whose weight differs from their ratio: truncated from either side, or under "
            "IcePop set to 0. A ratio equal to a bound is not counted.",
            per_row("tis_clipped"),
            weighs,
        ),
        Entry("train/tis_abs", "Mean |π_old/π_rollout − 1|, before truncation.", per_row("tis_abs"), weighs),
        Entry(
            "train/opsm_clipfrac",
            "Tokens that OPSM masks over loss tokens, averaged over samples. Tool tokens with A < 0 (with "
            "GRPO all of a sample's) count above and not below the line, so that it can exceed 1; per-token "
            "runs divide the same sum by tokens (slime 624b824a8 ppo_utils.py:77-87).",
            per_row("opsm"),
            _masks,
        ),
    ),
)

# ---------------------------------------------------------------- the MIS helper


def _bands(preset: Preset) -> tuple[Reject, ...]:
    return tuple(rule for rule in preset.reject if rule.statistic == "ratio")


def _band(preset: Preset, of: str) -> Reject | None:
    """Return the rule of tis_mode mask ("tis") or of use_rs ("rs"), or None."""
    bands = _bands(preset)
    mine, others = (bands[:1], bands[1:]) if _tis_masks(preset) else ((), bands)
    found = mine if of == "tis" else others
    return found[0] if found else None


def _mode(preset: Preset) -> str:
    """Return tis_mode: truncate, clip or mask; empty if no weight is computed."""
    rule = preset.weight
    if not weighs(preset) or rule is None:
        return ""
    if _tis_masks(preset):
        return "mask"
    if rule.action != "truncate":
        return ""
    return "clip" if rule.lower is not None else "truncate"


def _tis_masks(preset: Preset) -> bool:
    """Return whether tis_mode is mask: an unbounded weight, with a rule on the same aggregate."""
    rule = preset.weight
    return weighs(preset) and rule is not None and rule.action == "none" and _bands(preset)[:1] != ()


def _in_mode(mode: str) -> When:
    """Return whether tis_mode is this one."""
    return lambda preset: _mode(preset) == mode


def _rejects(preset: Preset) -> bool:
    """Return whether use_rs is set, which a veto requires too."""
    return weighs(preset) and (_band(preset, "rs") is not None or preset.veto is not None)


def _vetoes(preset: Preset) -> bool:
    """Return whether rs_veto_threshold is set."""
    return weighs(preset) and preset.veto is not None


def _normalizes(preset: Preset) -> bool:
    """Return whether tis_batch_normalize is set."""
    return weighs(preset) and preset.weight is not None and preset.weight.normalize


def _outside(of: str, side: Side) -> Rows:
    """The share of a sample's tokens beyond one bound of a band."""

    def column(view: View) -> Tensor:
        band = _band(view.preset, of)
        return view.fails(band and half(band, side))

    return column


def _before(view: View) -> Tensor:
    """The mean weight of a sample before its bounds."""
    weighed = view.weighed
    assert weighed is not None
    per_token = weighed.final.per == "token"
    return view.where_there(row_mean(RAW)(view) if per_token else weighed.raw.values)


def _after(view: View) -> Tensor:
    """The mean final weight of a sample."""
    rows = view.row_weights
    return view.where_there(row_mean(WEIGHT)(view) if rows is None else rows)


def _extreme(at: int) -> Rows:
    """The smallest or largest final weight of each sample, before normalisation."""

    def end(view: View) -> Tensor:
        rows = view.row_weights
        found = view.mine("ends", lambda: view.ends(WEIGHT))[at] if rows is None else rows
        return view.where_there(found)

    return end


def _log_ppl(of: Measure) -> Rows:
    return lambda view: -row_mean(of)(view)


def _ppl(of: Measure) -> Rows:
    return lambda view: view.where_there((-row_mean(of)(view)).exp())


def _chi2_row(view: View) -> Tensor:
    total = view.ratios.log_ratio("sum", SAFETY, "aggregate").values
    return view.where_there((2 * total).expm1())


def _chi2(x: Tokens) -> Tensor:
    """r² − 1 = (r − 1)(r + 1) of each token, which keeps the digits of small differences."""
    excess = x.excess(SAFETY)
    return excess * (excess + 2)


_CHI2 = Measure("r² − 1", lambda x: x.excess() * (x.excess() + 2), linear=((2, EXCESS), (1, EXCESS_SQUARED)))
RAW = Measure("raw weight", lambda x: x.weigh().raw.values, own=True, near=RATIO)
CHI2 = Measure("r² − 1, Δ within ±20", _chi2, near=_CHI2)

MIS_SUMS = (
    *_loss_sums(rejects=True),
    Sum("training_log_ppl", _log_ppl(TRAIN)),
    Sum("training_ppl", _ppl(TRAIN)),
    Sum("rollout_log_ppl", _log_ppl(ROLLOUT)),
    Sum("rollout_ppl", _ppl(ROLLOUT)),
    Sum("mis_kl", lambda view: -view.mean_log),
    Sum("k3_kl", row_mean(K3)),
    Sum("log_ppl_abs_diff", lambda view: view.mean_log.abs()),
    Sum("ppl_ratio", lambda view: view.where_there((-view.mean_log).exp())),
    Sum("chi2_token", row_mean(CHI2)),
    Sum("chi2_seq", _chi2_row),
    Sum("before", _before, own=True, when=weighs),
    Sum("after", _after, own=True, when=weighs),
    Sum("weights", lambda view: view.all_weights, own=True, when=_normalizes),
    Sum("high", _acted("high"), own=True, when=weighs),
    Sum("low", _acted("low"), own=True, when=weighs),
    *(
        Sum(f"{of}_{side}", _outside(of, side), own=True, when=weighs)
        for of in ("tis", "rs")
        for side in SIDES
    ),
    Sum("catastrophic", lambda view: view.catastrophic / view.divisor, own=True, when=_vetoes),
    Sum("vetoed", lambda view: view.vetoed, own=True, when=_vetoes),
    Sum("smallest", _extreme(0), own=True, when=weighs),
    Sum("largest", _extreme(1), own=True, when=weighs),
)


def _factor(totals: Totals) -> float:
    """Return the divisor of the final weights: their mean over tokens, or over samples with empty ones."""
    weight = totals.preset.weight
    if weight is None or not weight.normalize:
        return 1.0
    of_tokens = weight.over == "token"
    mean = totals("weights") / max(totals.tokens, 1) if of_tokens else totals("after") / totals.rows
    return mean if mean > SMALLEST_NORM else 1.0


def _final(column: str) -> Value:
    return lambda totals: totals(column) / _factor(totals) / totals.rows


_ROWS: tuple[tuple[str, str, Value, When], ...] = (
    (
        "training_log_ppl",
        "Mean over samples of −mean log π_train, nats.",
        per_row("training_log_ppl"),
        always,
    ),
    (
        "training_ppl",
        "Mean over samples of e^(−mean log π_train): of the perplexities, not e^training_log_ppl.",
        per_row("training_ppl"),
        always,
    ),
    (
        "rollout_log_ppl",
        "Mean over samples of −mean log π_rollout, nats.",
        per_row("rollout_log_ppl"),
        always,
    ),
    (
        "rollout_ppl",
        "Mean over samples of e^(−mean log π_rollout).",
        per_row("rollout_ppl"),
        always,
    ),
    (
        "kl",
        "log π_rollout − log π_train, averaged per sample first: k1, the same number as log_ppl_diff.",
        per_row("mis_kl"),
        always,
    ),
    (
        "k3_kl",
        "r − 1 − log r, r = π_train/π_rollout, averaged per sample first; not clamped, as the weights are.",
        per_row("k3_kl"),
        always,
    ),
    (
        "log_ppl_diff",
        "Mean over samples of mean log π_rollout − mean log π_train; above 0 where the trainer finds its "
        "samples less likely.",
        per_row("mis_kl"),
        always,
    ),
    (
        "log_ppl_abs_diff",
        "Mean over samples of |log_ppl_diff|; signs do not cancel between samples, but do within one.",
        per_row("log_ppl_abs_diff"),
        always,
    ),
    (
        "ppl_ratio",
        "Mean over samples of PPL_train/PPL_rollout, the reciprocal of the sample's geometric ratio.",
        per_row("ppl_ratio"),
        always,
    ),
    (
        "chi2_token",
        "Mean over samples of their mean r² − 1, log r clamped to ±20; the pooled mean over tokens differs.",
        per_row("chi2_token"),
        always,
    ),
    (
        "chi2_seq",
        "Mean over samples of (∏r)² − 1, log ∏r clamped to ±20, so that it ends at e^40.",
        per_row("chi2_seq"),
        always,
    ),
    (
        "tis_weight_before_bound",
        "The weight at its level (token, product, geometric mean), its logarithm clamped to ±20, before "
        "tis_mode acts.",
        per_row("before"),
        weighs,
    ),
    (
        "tis_weight_after_bound",
        "The weight after tis_mode; in mode mask it is as before, since only the mask changes.",
        per_row("after"),
        weighs,
    ),
    (
        "tis_truncate_fraction",
        "Share of weights above tis_upper_bound (of samples where the level is theirs).",
        per_row("high"),
        _in_mode("truncate"),
    ),
    ("tis_clip_fraction_low", "Share of weights below tis_lower_bound.", per_row("low"), _in_mode("clip")),
    ("tis_clip_fraction_high", "Share of weights above tis_upper_bound.", per_row("high"), _in_mode("clip")),
    (
        "tis_mask_fraction_low",
        "Share of weights below tis_lower_bound: what mode mask rejects there.",
        per_row("tis_lower"),
        _in_mode("mask"),
    ),
    (
        "tis_mask_fraction_high",
        "Share of weights above tis_upper_bound: what mode mask rejects there.",
        per_row("tis_upper"),
        _in_mode("mask"),
    ),
    (
        "rs_mask_fraction_low",
        "Share of tokens (of samples at a sample's level) below rs_lower_bound, whatever else rejects them; "
        "0 where a veto needs use_rs and its band is open.",
        per_row("rs_lower"),
        _rejects,
    ),
    (
        "rs_mask_fraction_high",
        "Share of tokens (of samples at a sample's level) above rs_upper_bound, whatever else rejects them.",
        per_row("rs_upper"),
        _rejects,
    ),
    (
        "rs_catastrophic_token_fraction",
        "Mean over samples of the share of their tokens with r strictly below rs_veto_threshold, unclamped.",
        per_row("catastrophic"),
        _vetoes,
    ),
    (
        "rs_catastrophic_seq_fraction",
        "Share of samples with such a token: what the veto drops.",
        per_row("vetoed"),
        _vetoes,
    ),
    (
        "is_ratio_mean_after_tis_rs",
        "The weight after tis_mode once more: rejection changes the mask and no weight, so it is not taken "
        "out of this mean.",
        per_row("after"),
        weighs,
    ),
    (
        "batch_norm_factor",
        "What tis_batch_normalize divides by: the mean bounded weight over tokens, or over samples at level "
        "sequence, of the mask as it came; 1 where that is at most 1e-8. The helper takes it per rank and "
        "call, here it is of the whole dump; samples without a token are 0 in the mean that is logged.",
        lambda totals: _factor(totals) * totals.sequences / totals.rows,
        _normalizes,
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

MIS = Log(
    "slime-mis",
    MIS_SUMS,
    (),
    (
        *loss_entries(always),
        *(Entry(f"train/mis_{name}", meaning, of, when) for name, meaning, of, when in _ROWS),
    ),
)

# ---------------------------------------------------------------- configuration

LEVELS = {"token": "token", "sum": "sequence", "mean": "geometric"}
CLIP = ClipKeys("eps-clip", "eps-clip-high", "eps-clip-c")
FILE = "mis.yaml"


@dataclass(frozen=True)
class Paths:
    """Paths of a trainer's functions, and the features that it lacks."""

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


def translate(preset: Preset, paths: Paths) -> Said:
    """Flags where they can say it, else the helper."""
    parts = Parts(preset)
    losses: tuple[Loss, ...] = ("ppo_clip", "gspo", "cispo") if paths.cispo else ("ppo_clip", "gspo")
    parts.need(("old", "current"), losses)
    loss = _said_loss(preset)
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


def _said_loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = clip_bounds(preset)
        return {"advantage-estimator": "cispo", "eps-clip": low, "eps-clip-high": high}
    gspo = {"advantage-estimator": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **clip_settings(preset, CLIP)}


def _flagged(paths: Paths, settings: Settings) -> Snippet:
    return block(paths.trainer, "flags", schema.flags(settings), settings)


def _bypass(preset: Preset, parts: Parts, paths: Paths, loss: Settings) -> Said:
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


def _flags(preset: Preset, paths: Paths, loss: Settings) -> Said:
    parts = Parts(preset)
    band = parts.take_band("token")
    settings: Settings = {"use-tis": True}
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


def _helper(preset: Preset, paths: Paths, loss: Settings) -> Said:
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
        block(paths.trainer, "yaml", schema.yaml(settings), both, file=FILE),
        block(paths.trainer, "flags", schema.flags(run), both, "flags"),
    )
    return snippets, (*_remarks(settings), *clip_remarks(preset, CLIP))


def _mis_weights(parts: Parts) -> Settings:
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


def _mis_rules(parts: Parts) -> Settings:
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


def _remarks(settings: Settings) -> tuple[str, ...]:
    idle = {IDLE_HIGH, IDLE_LOW} & {value for value in settings.values() if isinstance(value, float)}
    return remarks(
        idle and "bounds of 1.0e-9 and 1.0e+9 are idle: the helper clamps the log-ratio to ±20",
        settings["rs_veto_threshold"] and "the veto is looked at only inside use_rs",
        settings["tis_batch_normalize"] and "the batch mean is over the micro-batches of one rank here",
        settings["tis_mode"] == "mask"
        and settings["use_rs"]
        and "use_rs looks at what tis_mode mask has left",
    )


def habits(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    """The helper clamps log-ratios, and the loss does not."""
    return Habits(20.0) if any(one.file for one in snippets) else Habits()


TRAINER = Trainer("slime", partial(translate, paths=SLIME), habits, (LOG, MIS))
