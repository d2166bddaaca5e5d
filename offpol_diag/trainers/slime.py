"""slime: `train/` of the loss, TIS, IcePop, OPSM and the MIS helper; flags, and the helper's mis.yaml.

Every number is reduced as the loss is by default: over the tokens of each sample, then over the samples of
the batch, one without a token counting as 0; --calculate-per-token-loss makes token means of them instead.
The helper's own numbers (`mis_`, examples/train_infer_mismatch_helper/mis.py) are of the mask as it came, so
nothing that is rejected leaves a mean there. The loss's (`pg_clipfrac`, `ppo_kl`,
`train_rollout_logprob_abs_diff`) are taken after the helper's rejection: what it rejects counts as 0, and
still divides (up to v0.2.4 it left the denominator).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import base, config, measures, schema
from offpol_diag.trainers.base import Entry, Log, Row, Rows, Sum, Value, When, mean, per_row, table, weighs
from offpol_diag.trainers.config import IDLE_LOW, ClipKeys, Guards, Parts, Settings, Snippet, Translation
from offpol_diag.trainers.measures import (
    KEPT,
    RATIO,
    ROLLOUT,
    SAFETY,
    TRAIN,
    UPDATE,
    WEIGHT,
    Mask,
    Measure,
    exp,
    expm1,
    where,
)

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View

# ---------------------------------------------------------------- the loss

MOVES = Measure(
    "CISPO's weight moves",
    lambda x: measures.clipped(x.update_ratio, x.preset.clip) != x.update_ratio,
    own=True,
)


def _clipped(view: View, mask: Mask | None) -> Array:
    """Count tokens whose clipped loss is the larger one, [S]; with CISPO, those whose weight is clipped."""
    loss = view.preset.loss
    if loss == "reinforce":
        return view.zeros
    return view.total(MOVES, mask) if loss == "cispo" else measures.clip_decides(view, mask)


OfLoss = Callable[["View", Mask | None], "Array"]


def of_loss(name: str, of: OfLoss, rejects: bool, needs: tuple[str, ...] = ()) -> Sum:
    """Return a per-sample mean of the loss's tokens; with `rejects`, tokens that the helper rejects are 0."""

    def mean(view: View) -> Array:
        if not rejects:
            return of(view, None) / view.divisor
        return where(view.effect.sequences, of(view, KEPT) / view.divisor, 0.0)

    return Sum(name, mean, needs=needs)


def _loss_names(rejects: bool, corrected: When) -> tuple[Entry, ...]:
    """Return the entries of the loss; `corrected` selects the presets under which a TIS function runs."""
    gap = of_loss("abs_diff", lambda view, mask: view.total(measures.DISTANCE, mask), rejects)
    clips = of_loss("clipped", _clipped, rejects, (*UPDATE, "advantages"))
    kl = of_loss("kl", lambda view, mask: -view.total(measures.U, mask), rejects, UPDATE)
    names: dict[str, Row] = {
        "train_rollout_logprob_abs_diff": per_row(gap).means(
            "Mean |log π_old − log π_rollout| (π_θ in π_old's place with --use-rollout-logprobs), nats. "
            "Tokens that the MIS helper rejects are 0 in it and still divide: it falls as more is rejected."
        ),
        "pg_clipfrac": per_row(clips).means(
            "Share of tokens whose clipped loss is the larger one; the ratio is π_θ/π_old (π_θ/π_rollout "
            "with --use-rollout-logprobs), so no number of the mismatch. Of rejected tokens none counts."
        ),
        "ppo_kl": per_row(kl).means(
            "Mean of log π_old − log π_θ (π_rollout in π_old's place with --use-rollout-logprobs), rejected "
            "tokens as 0: of the update, not of the mismatch; it may be negative."
        ),
        "ois": per_row(measures.UPDATE_RATIO).means(
            "Mean of π_θ/π_old (1 before the first update), of all tokens, rejected or not; logged only "
            "where TIS or the mismatch metrics are on. Not clamped.",
            corrected,
        ),
    }
    return table(names, "train/")


# ---------------------------------------------------------------- vanilla TIS, IcePop, OPSM


def _opsm(preset: Preset) -> Reject | None:
    """Return OPSM's rule as a rule on sequences for any sign of A, or None."""
    for rule in preset.reject:
        if (rule.statistic, rule.of_token, rule.advantage) == ("k1", True, "negative"):
            plain = replace(rule, advantage="any", advantage_of="unit")
            if not plain.on_tokens:
                return plain
    return None


def _beyond(*sides: str) -> Rows:
    """Return the share of weights beyond bounds ("high", "low") per sample, or flags of samples."""

    def share(view: View) -> Array:
        weighed = view.effect.weighed
        assert weighed is not None
        counts = sum((getattr(weighed, side) for side in sides), view.zeros)
        return counts / view.divisor if weighed.final.per == "token" else counts

    return share


def _opsm_masks(view: View) -> Array:
    """Tokens with A < 0 of samples that drifted, those outside the loss mask too, over those in it."""
    rule, negative, batch = _opsm(view.preset), view.total(measures.NEGATIVE), view.batch
    assert rule is not None
    outside = batch.masked_negative  # without A of their own they have their sample's
    if outside is None:
        outside = where(negative > 0, batch.masked, 0)
    return where(view.passes(rule), 0.0, (negative + outside) / view.divisor)


TIS: dict[str, Row] = {
    "tis": per_row(RATIO).means(
        "Mean of π_old/π_rollout before anything is truncated; neither clamped nor the weight that the "
        "loss gets."
    ),
    "tis_clipfrac": per_row(Sum("tis_clipped", _beyond("high", "low"))).means(
        "Share of tokens whose weight differs from their ratio: truncated from either side, or under "
        "IcePop set to 0. A ratio equal to a bound is not counted."
    ),
    "tis_abs": per_row(measures.EXCESS_SIZE).means("Mean |π_old/π_rollout − 1|, before truncation."),
    "opsm_clipfrac": per_row(Sum("opsm", _opsm_masks, needs=("advantages",))).means(
        "Tokens that OPSM masks over loss tokens, averaged over samples. Tool tokens with A < 0 (with "
        "GRPO all of a sample's) count above and not below the line, so that it can exceed 1; per-token "
        "runs divide the same sum by tokens (slime 624b824a8 ppo_utils.py:77-87).",
        lambda preset: preset.apply and _opsm(preset) is not None,
    ),
}
LOG = Log("slime", (*_loss_names(rejects=False, corrected=weighs), *table(TIS, "train/", weighs)))

# ---------------------------------------------------------------- the MIS helper


def _band(preset: Preset, of: str) -> Reject | None:
    """Return the rule of tis_mode mask ("tis") or of use_rs ("rs"), or None.

    tis_mode is mask for an unbounded weight with a rule, which is then the first one.
    """
    bands = [rule for rule in preset.reject if rule.statistic == "ratio"]
    weight = preset.weight
    masks = weighs(preset) and weight is not None and weight.action == "none"
    some = (bands[:1] if of == "tis" else bands[1:]) if masks else [] if of == "tis" else bands
    return some[0] if some else None


def _mode(preset: Preset) -> str:
    """Return tis_mode: truncate, clip or mask; empty if no weight is computed."""
    rule = preset.weight
    if not weighs(preset) or rule is None:
        return ""
    if _band(preset, "tis"):
        return "mask"
    if rule.action != "truncate":
        return ""
    return "clip" if rule.lower is not None else "truncate"


def _in_mode(mode: str) -> When:
    """Return whether tis_mode is this one."""
    return lambda preset: _mode(preset) == mode


def _rejects(preset: Preset) -> bool:
    """Return whether use_rs is set, which a veto requires too."""
    return weighs(preset) and (_band(preset, "rs") is not None or preset.veto is not None)


def _vetoes(preset: Preset) -> bool:
    """Return whether rs_veto_threshold is set."""
    return weighs(preset) and preset.veto is not None


def _outside(of: str, side: base.Side) -> Value:
    """The share of a sample's tokens beyond one bound of a band."""

    def column(view: View) -> Array:
        band = _band(view.preset, of)
        rule = band and base.half(band, side)
        return view.dropped_by(rule) / view.divisor if rule else view.zeros

    return per_row(Sum(f"{of}_{side}", column))


def _before(view: View) -> Array:
    """The mean weight of a sample before its bounds."""
    weighed = view.effect.weighed
    assert weighed is not None
    per_token = weighed.final.per == "token"
    return view.where_nonempty(mean(RAW)(view) if per_token else weighed.raw.values)


def _after(view: View) -> Array:
    """The mean final weight of a sample."""
    rows = view.effect.per_sequence
    return view.where_nonempty(mean(WEIGHT)(view) if rows is None else rows)


def _extreme(at: int) -> Rows:
    """The smallest or largest final weight of each sample, before normalisation."""

    def end(view: View) -> Array:
        rows = view.effect.per_sequence
        found = view.mine("ends", lambda: view.ends(WEIGHT))[at] if rows is None else rows
        return view.where_nonempty(found)

    return end


def _ppl(name: str, of: Measure) -> Value:
    return per_row(Sum(name, lambda view: view.where_nonempty(exp(-mean(of)(view))), shared=True))


def _chi2_row(view: View) -> Array:
    return view.where_nonempty(expm1(2 * view.ratios.log_ratio("sum", SAFETY, "aggregate").values))


RAW = Measure("raw weight", lambda x: x.weigh().raw.values, own=True)
CHI2 = Measure("r² − 1, Δ within ±20", lambda x: x.excess(SAFETY) * (x.excess(SAFETY) + 2))
"""As (r − 1)(r + 1), which keeps the digits of small differences."""
LOG_PPL = Sum("mis_kl", lambda view: -view.mean_log, shared=True)
ABS_LOG_PPL = Sum("log_ppl_abs_diff", lambda view: abs(view.mean_log), shared=True)
PPL_RATIO = Sum("ppl_ratio", lambda view: view.where_nonempty(exp(-view.mean_log)), shared=True)
BEFORE, AFTER = Sum("before", _before), Sum("after", _after)
WEIGHTS = Sum("weights", lambda view: view.effect.weight_sum)


def _factor(totals: base.Totals) -> float:
    """Return the divisor of the final weights: their mean over tokens, or over samples with empty ones."""
    weight = totals.preset.weight
    if weight is None or not weight.normalize:
        return 1.0
    of_tokens = weight.over == "token"
    mean = totals(WEIGHTS) / max(totals.tokens, 1) if of_tokens else totals(AFTER) / totals.rows
    return mean if mean > base.SMALLEST_NORM else 1.0


def _final(column: Sum) -> Value:
    return Value(lambda totals: totals(column) / _factor(totals) / totals.rows, (column, AFTER, WEIGHTS))


MIS_NAMES: dict[str, Row] = {
    "training_log_ppl": (-per_row(TRAIN)).means("Mean over samples of −mean log π_train, nats."),
    "training_ppl": _ppl("training_ppl", TRAIN).means(
        "Mean over samples of e^(−mean log π_train): of the perplexities, not e^training_log_ppl."
    ),
    "rollout_log_ppl": (-per_row(ROLLOUT)).means("Mean over samples of −mean log π_rollout, nats."),
    "rollout_ppl": _ppl("rollout_ppl", ROLLOUT).means("Mean over samples of e^(−mean log π_rollout)."),
    "kl": per_row(LOG_PPL).means(
        "log π_rollout − log π_train, averaged per sample first: k1, the same number as log_ppl_diff."
    ),
    "k3_kl": per_row(measures.K3).means(
        "r − 1 − log r, r = π_train/π_rollout, averaged per sample first; not clamped, as the weights are."
    ),
    "log_ppl_diff": per_row(LOG_PPL).means(
        "Mean over samples of mean log π_rollout − mean log π_train; above 0 where the trainer "
        "finds its samples less likely."
    ),
    "log_ppl_abs_diff": per_row(ABS_LOG_PPL).means(
        "Mean over samples of |log_ppl_diff|; signs do not cancel between samples, but do within one."
    ),
    "ppl_ratio": per_row(PPL_RATIO).means(
        "Mean over samples of PPL_train/PPL_rollout, the reciprocal of the sample's geometric ratio."
    ),
    "chi2_token": per_row(CHI2).means(
        "Mean over samples of their mean r² − 1, log r clamped to ±20; the pooled mean over tokens differs."
    ),
    "chi2_seq": per_row(Sum("chi2_seq", _chi2_row, shared=True)).means(
        "Mean over samples of (∏r)² − 1, log ∏r clamped to ±20, so that it ends at e^40."
    ),
    "tis_weight_before_bound": per_row(BEFORE).means(
        "The weight at its level (token, product, geometric mean), its logarithm clamped to ±20, "
        "before tis_mode acts.",
        weighs,
    ),
    "tis_weight_after_bound": per_row(AFTER).means(
        "The weight after tis_mode; in mode mask it is as before, since only the mask changes.", weighs
    ),
    "tis_truncate_fraction": per_row(Sum("high", _beyond("high"))).means(
        "Share of weights above tis_upper_bound (of samples where the level is theirs).", _in_mode("truncate")
    ),
    "tis_clip_fraction_low": per_row(Sum("low", _beyond("low"))).means(
        "Share of weights below tis_lower_bound.", _in_mode("clip")
    ),
    "tis_clip_fraction_high": per_row(Sum("high", _beyond("high"))).means(
        "Share of weights above tis_upper_bound.", _in_mode("clip")
    ),
    "tis_mask_fraction_low": _outside("tis", "lower").means(
        "Share of weights below tis_lower_bound: what mode mask rejects there.", _in_mode("mask")
    ),
    "tis_mask_fraction_high": _outside("tis", "upper").means(
        "Share of weights above tis_upper_bound: what mode mask rejects there.", _in_mode("mask")
    ),
    "rs_mask_fraction_low": _outside("rs", "lower").means(
        "Share of tokens (of samples at a sample's level) below rs_lower_bound, whatever else "
        "rejects them; 0 where a veto needs use_rs and its band is open.",
        _rejects,
    ),
    "rs_mask_fraction_high": _outside("rs", "upper").means(
        "Share of tokens (of samples at a sample's level) above rs_upper_bound, whatever else rejects them.",
        _rejects,
    ),
    "rs_catastrophic_token_fraction": per_row(
        Sum("catastrophic", lambda view: view.effect.kept.catastrophic / view.divisor)
    ).means(
        "Mean over samples of the share of their tokens with r strictly below rs_veto_threshold, unclamped.",
        _vetoes,
    ),
    "rs_catastrophic_seq_fraction": per_row(
        Sum("vetoed", lambda view: view.effect.kept.vetoed + view.zeros)
    ).means("Share of samples with such a token: what the veto drops.", _vetoes),
    "is_ratio_mean_after_tis_rs": per_row(AFTER).means(
        "The weight after tis_mode once more: rejection changes the mask and no weight, so it is "
        "not taken out of this mean.",
        weighs,
    ),
    "batch_norm_factor": Value(
        lambda totals: _factor(totals) * totals.sequences / totals.rows,
        (AFTER, WEIGHTS),
    ).means(
        "What tis_batch_normalize divides by: the mean bounded weight over tokens, or over samples at level "
        "sequence, of the mask as it came; 1 where that is at most 1e-8. The helper takes it per rank and "
        "call, here it is of the whole dump; samples without a token are 0 in the mean that is logged.",
        lambda preset: weighs(preset) and preset.weight is not None and preset.weight.normalize,
    ),
    "is_ratio_mean_final": _final(AFTER).means(
        "Mean of the weights that multiply the loss, after normalisation, rejected tokens included.", weighs
    ),
    "is_ratio_min_final": _final(Sum("smallest", _extreme(0))).means(
        "Mean over samples of their smallest final weight; not the smallest of the batch.", weighs
    ),
    "is_ratio_max_final": _final(Sum("largest", _extreme(1))).means(
        "Mean over samples of their largest final weight; not the largest of the batch.", weighs
    ),
}
MIS = Log("slime-mis", (*_loss_names(rejects=True, corrected=base.always), *table(MIS_NAMES, "train/mis_")))

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


def slime(parts: Parts, paths: Paths) -> Translation:
    """Flags where they can express it, else the helper."""
    preset = parts.preset
    parts.need(("old", "current"), ("ppo_clip", "gspo", "cispo") if paths.cispo else ("ppo_clip", "gspo"))
    loss = _loss(preset)
    if parts.policy == "current":
        return _bypass(parts, paths, loss)
    if parts.bare:
        parts.finish()
        return (schema.block(paths.trainer, "flags", loss),), ("nothing is corrected without --use-tis",)
    if preset.logs not in ("slime-mis", "miles-mis"):
        try:
            return (_flags(Parts(preset), paths, loss),), ()
        except ConfigError:
            pass
    return _helper(parts, paths, loss)


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        low, high = config.clip_bounds(preset)
        return {"advantage-estimator": "cispo", "eps-clip": low, "eps-clip-high": high}
    gspo = {"advantage-estimator": "gspo"} if preset.loss == "gspo" else {}
    return {**gspo, **config.clip_settings(preset, CLIP)}


def _bypass(parts: Parts, paths: Paths, loss: Settings) -> Translation:
    """The rollout's log-probs for the old ones; OPSM asks the sign of each token's advantage."""
    delta = parts.take_opsm()
    parts.finish()
    opsm = {} if delta is None else {"use-opsm": True, "opsm-delta": delta}
    remark = (
        "opsm asks each token's advantage: the same as the sequence's where all its tokens have one (GRPO)"
    )
    snippet = schema.block(paths.trainer, "flags", {"use-rollout-logprobs": True, **opsm, **loss})
    return (snippet,), ((remark,) if opsm else ())


def _flags(parts: Parts, paths: Paths, loss: Settings) -> Snippet:
    """--use-tis alone."""
    band = parts.take_band("token")
    settings: Settings = {"use-tis": True}
    if band is not None:
        low, high = band
        settings["custom-tis-function-path"] = paths.icepop
    else:
        weight = parts.take_weight("token", lower=True)
        low, high = (None, None) if weight is None else (weight.lower, weight.upper)
    parts.finish()
    low, high = config.open_bounds(low, high)
    settings |= {"tis-clip": high, "tis-clip-low": low}
    return schema.block(paths.trainer, "flags", {**settings, **loss})


def _helper(parts: Parts, paths: Paths, loss: Settings) -> Translation:
    """The MIS helper: flags, and its own file."""
    if parts.weight is None:
        config.cannot("a rejection or a veto without weights (the helper rejects only beside use_tis)")
    parts.split_mask()
    settings = _mis_weights(parts) | _mis_rules(parts)
    parts.finish()
    run = {"use-tis": True, "custom-config-path": FILE, "custom-tis-function-path": paths.mis, **loss}
    both = {**run, **{f"{FILE}/{key}": value for key, value in settings.items()}}
    snippets = (
        schema.block(paths.trainer, "yaml", both, file=FILE, shown=settings),
        schema.block(paths.trainer, "flags", both, "flags", shown=run),
    )
    return snippets, config.remarks(
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
        config.cannot("this weight")
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


TRAINER = config.Trainer("slime", partial(slime, paths=SLIME), guards, CLIP, (LOG, MIS))
