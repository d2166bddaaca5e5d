"""slime: `train/` of the loss, TIS, IcePop and the MIS helper; flags, and the helper's mis.yaml.

Every number is reduced as the loss is by default: over the tokens of each sample, then over the samples of
the batch, one without a token counting as 0; --calculate-per-token-loss makes token means of them instead.
The helper's own numbers (`mis_`, examples/train_infer_mismatch_helper/mis.py) are of the mask as it came, so
nothing that is rejected leaves a mean there. The loss's (`pg_clipfrac`, `ppo_kl`,
`train_rollout_logprob_abs_diff`) are taken after the helper's rejection: what it rejects counts as 0, and
still divides (up to v0.2.4 it left the denominator).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from offpol_diag.errors import ConfigError
from offpol_diag.presets import SMALLEST_NORM, Preset, Reject
from offpol_diag.trainers import config
from offpol_diag.trainers.base import (
    SAFETY,
    Array,
    Log,
    Number,
    Numbers,
    Side,
    Tokens,
    Totals,
    half,
    named,
    np,
)
from offpol_diag.trainers.config import FLAGS, IDLE_LOW, ClipKeys, Guards, Parts, Translation
from offpol_diag.trainers.schema import Form, Settings, Snippet, cannot

# ---------------------------------------------------------------- without the helper


def log(t: Tokens, s: Totals) -> Numbers:
    """Return `train/` without the helper: the loss's own numbers, TIS or IcePop."""
    corrects = t.preset.weight is not None
    result = s.part(loss, t.only("loss", "clip"), corrects)
    if corrects:
        result = result | s.part(tis, t.only("weight"))
    return named("train/", result)


def of_samples(t: Tokens, s: Totals, x: Array) -> Number:
    """Return the mean over samples of a number of each, or of its tokens' mean; empty ones are included."""
    return s.sum(x) / s.sum(t.one)


def loss(t: Tokens, s: Totals, corrected: bool) -> Numbers:
    """Return the loss's own numbers, those tokens as 0 that the preset drops; `corrected`: TIS runs."""
    kept = t.kept

    def mean(x: Array) -> Number:
        return of_samples(t, s, t.row_mean(x & kept if x.dtype == bool else np.where(kept, x, 0.0)))

    result = {"train_rollout_logprob_abs_diff": mean(abs(t.log_ratio))}
    if t.batch.current is None:
        return result
    if t.batch.advantages is not None:
        result["pg_clipfrac"] = mean(clip_acts(t))
    result["ppo_kl"] = mean(-t.u)
    if corrected:
        result["ois"] = of_samples(t, s, t.row_mean(t.update_ratio))
    return result


def clip_acts(t: Tokens) -> Array:
    """Return where the clipped loss is the larger one; with CISPO, where the weight is clipped; [T] bool."""
    if t.preset.loss == "reinforce":
        return np.zeros(t.batch.tokens, bool)
    if t.preset.loss == "cispo":
        moved: Array = t.clipped(t.update_ratio) != t.update_ratio
        return moved
    return t.clip_decides


def tis(t: Tokens, s: Totals) -> Numbers:
    """Return the ratio before anything is truncated, and the share of weights that differ from it."""
    return {
        "tis": of_samples(t, s, t.row_mean(t.ratio())),
        "tis_clipfrac": of_samples(t, s, share(t, t.n_above + t.n_below)),
        "tis_abs": of_samples(t, s, t.row_mean(abs(t.ratio_minus_one()))),
    }


def share(t: Tokens, counts: Array) -> Array:
    """Return a share of each sample's tokens, or the flag of a sample that has one weight, [S]."""
    return counts if t.weighs_rows else counts / np.maximum(t.n, 1)


# ---------------------------------------------------------------- with the MIS helper


def mis_log(t: Tokens, s: Totals) -> Numbers:
    """Return `train/` with the helper, and its own `train/mis_`."""
    result = named("train/", s.part(loss, t.only("reject", "veto", "loss", "clip"), True))
    result |= named("train/mis_", s.part(policy_gap, t.only()))
    return result | ({} if t.preset.weight is None else named("train/mis_", helper(t, s)))


def policy_gap(t: Tokens, s: Totals) -> Numbers:
    """Return the helper's perplexities, KL and χ² estimates, averaged per sample first."""
    d, x, difference = t.log_ratio, t.ratio_minus_one(SAFETY), -t.row_mean(t.log_ratio)
    train, rollout = t.row_mean(t.train), t.row_mean(t.batch.rollout)

    def mean(x: Array) -> Number:
        return of_samples(t, s, np.where(t.there, x, 0.0))

    return {
        "training_log_ppl": mean(-train),
        "training_ppl": mean(np.exp(-train)),
        "rollout_log_ppl": mean(-rollout),
        "rollout_ppl": mean(np.exp(-rollout)),
        "kl": mean(difference),
        "k3_kl": mean(t.row_mean(t.k3())),
        "log_ppl_diff": mean(difference),
        "log_ppl_abs_diff": mean(abs(difference)),
        "ppl_ratio": mean(np.exp(difference)),
        "chi2_token": mean(t.row_mean(x * (x + 2))),  # (r − 1)(r + 1) keeps the digits of small differences
        "chi2_seq": mean(np.expm1(2 * t.row_sum(d).clip(-SAFETY, SAFETY))),
    }


def helper(t: Tokens, s: Totals) -> Numbers:
    """Return the numbers of tis_mode, use_rs, the veto and batch normalisation."""
    preset, weight = t.preset, t.preset.weight
    assert weight is not None
    mask, rejects = bands(preset)
    mode, rows, empty = tis_mode(preset), t.weighs_rows, np.zeros_like(t.n)
    raw, final = t.raw_unit_weight, t.unit_weight

    def mean(x: Array) -> Number:
        return of_samples(t, s, np.where(t.there, x, 0.0))

    def outside(rule: Reject | None, side: Side) -> Number:
        """Return the share of a sample's tokens beyond one bound, whatever else rejects them."""
        beyond = rule and half(rule, side)
        return mean(t.dropped_by(beyond) / np.maximum(t.n, 1) if beyond else empty)

    after = mean(final if rows else t.row_mean(final))
    least, most = (final, final) if rows else (t.row_min(final), t.row_max(final))
    result = {
        "tis_weight_before_bound": mean(raw if rows else t.row_mean(raw)),
        "tis_weight_after_bound": after,
    }
    if mode == "truncate":
        result["tis_truncate_fraction"] = mean(share(t, t.n_above))
    if mode == "clip":
        result["tis_clip_fraction_low"] = mean(share(t, t.n_below))
        result["tis_clip_fraction_high"] = mean(share(t, t.n_above))
    if mode == "mask":
        result["tis_mask_fraction_low"] = outside(mask, "lower")
        result["tis_mask_fraction_high"] = outside(mask, "upper")
    if rejects is not None or preset.veto is not None:
        result["rs_mask_fraction_low"] = outside(rejects, "lower")
        result["rs_mask_fraction_high"] = outside(rejects, "upper")
    if preset.veto is not None:
        hits = t.veto_hits(preset.veto)
        result["rs_catastrophic_token_fraction"] = mean(hits / np.maximum(t.n, 1))
        result["rs_catastrophic_seq_fraction"] = mean(hits > 0)
    result["is_ratio_mean_after_tis_rs"] = after
    factor: Number = 1.0
    if weight.normalize:
        average = s.sum(t.row_sum(t.weight)) / s.sum(t.n) if weight.over == "token" else after
        factor = np.where(average > SMALLEST_NORM, average, 1.0)
        result["batch_norm_factor"] = factor * mean(t.one)
    return result | {
        "is_ratio_mean_final": after / factor,
        "is_ratio_min_final": mean(least) / factor,
        "is_ratio_max_final": mean(most) / factor,
    }


def bands(preset: Preset) -> tuple[Reject | None, Reject | None]:
    """Return the rule of tis_mode mask (the first one under an unbounded weight), and that of use_rs."""
    rules = [rule for rule in preset.reject if rule.statistic == "ratio"]
    masks = preset.weight is not None and preset.weight.action == "none"
    own, others = (rules[:1], rules[1:]) if masks else ([], rules)
    return next(iter(own), None), next(iter(others), None)


def tis_mode(preset: Preset) -> str:
    """Return tis_mode: truncate, clip or mask; empty if it is none of them."""
    weight = preset.weight
    if bands(preset)[0]:
        return "mask"
    if weight is None or weight.action != "truncate":
        return ""
    return "clip" if weight.lower is not None else "truncate"


LOG, MIS = Log("slime", log), Log("slime-mis", mis_log)

# ---------------------------------------------------------------- configuration

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
TRAINER = config.Trainer("slime", READ, SLIME, FLAGS, guards, CLIP, (LOG, MIS), "slime")
