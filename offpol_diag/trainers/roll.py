"""ROLL: r = π_old/π_rollout and π_old − π_rollout, unclamped; its train_infer_correction.

Logged numbers are those of utils/train_infer_corrections.py. Four granularities: token; geometric (a mean
over the sequence); sequence (a product, or a sum); segment (a mean over a turn). Its masked mean divides by
(Σmask + 1e-8), which is reproduced.
"""

from __future__ import annotations

import math

from offpol_diag.presets import Over, Preset, Reject, Statistic
from offpol_diag.trainers import config
from offpol_diag.trainers.base import EPS, Array, Log, Numbers, Tokens, Totals, named, np, weighs
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Trainer, Translation
from offpol_diag.trainers.schema import Settings, cannot

GRANULARITIES: dict[str, Over] = {
    "token": "token",
    "geometric": "mean",
    "sequence": "sum",
    "segment": "segment",
}
"""ROLL's word → ours."""
STATISTICS: dict[str, Statistic] = {"ratio": "ratio", "diff": "prob_diff"}


def log(t: Tokens, s: Totals) -> Numbers:
    """Return `actor/`: r and π_old − π_rollout before any filter, then what is_weight and the filters do."""
    return named("actor/", s.part(means, t.only()) | shares(t, s))


def means(t: Tokens, s: Totals) -> Numbers:
    """Return means over the tokens of a row, then over rows with a token, at every granularity."""
    rows = s.sum(t.there)
    return {
        f"train_infer_{measure}_{granularity}_mean@sum": s.sum(x) / (rows + EPS)
        for measure, of in (("ratio", ratio), ("diff", difference))
        for granularity, x in of(t).items()
    }


def ratio(t: Tokens) -> dict[str, Array]:
    """Return row means of r, [S]: of a token, a geometric mean, a product, and of a turn's geometric mean."""
    d = t.log_ratio
    return {
        "token": row_mean(t, t.ratio()),
        "geometric": of_row(t, np.exp(row_mean(t, d))),
        "sequence": of_row(t, np.exp(t.row_sum(d))),
        "segment": row_mean(t, np.exp(turn_mean(t, "ratio"))),
    }


def difference(t: Tokens) -> dict[str, Array]:
    """Return row means of π_old − π_rollout, [S]: of a token, its mean, its sum, and of a turn's mean."""
    x = t.difference
    return {
        "token": row_mean(t, x),
        "geometric": of_row(t, row_mean(t, x)),
        "sequence": of_row(t, t.row_sum(x)),
        "segment": row_mean(t, turn_mean(t, "prob_diff")),
    }


def row_mean(t: Tokens, x: Array) -> Array:
    """Return ROLL's masked mean of each row, [T] → [S]."""
    return t.row_sum(x) / (t.n + EPS)


def of_row(t: Tokens, x: Array) -> Array:
    """Return the masked mean of a number that every token of the row has, [S] → [S]."""
    return x * t.n / (t.n + EPS)


def turn_mean(t: Tokens, statistic: Statistic) -> Array:
    """Return the masked mean of each turn, of r in logs, at its tokens, [T]."""
    many = np.diff(t.batch.cu_runs)
    return t.aggregate(statistic, "segment") * np.repeat(many / (many + EPS), many)


def shares(t: Tokens, s: Totals) -> Numbers:
    """Return shares of loss tokens above the weight's bound, and past filters, each alone (a kind's last)."""
    result, tokens, p = {}, s.sum(t.n), t.preset
    whole = np.maximum(tokens, 1.0)
    if weighs(p) and p.weight is not None and p.weight.upper is not None:
        above = t.n_above * t.n if t.weighs_rows else t.n_above
        result["is_weight_clipfrac@sum"] = s.sum(above) / whole
    for measure, statistic in STATISTICS.items():
        for granularity, over in GRANULARITIES.items():
            rules = [rule for rule in p.reject if (rule.statistic, rule.over) == (statistic, over)]
            if rules:
                passed = t.n - t.dropped_by(rules[-1])
                result[f"train_infer_{granularity}_{measure}_mask_mean@sum"] = s.sum(passed) / whole
    if p.reject:
        result["train_infer_final_mask_mean"] = s.sum(t.applied.n_kept) / (tokens + EPS)
    return result


# ---------------------------------------------------------------- configuration

TYPES = {over: name for name, over in GRANULARITIES.items()}


def _dual(bound: float) -> str:
    switches = "dual_clip_loss and use_pg_clip_range are true"
    return f"{switches} and pg_clip is {(bound - 1) / 2:g} (the bound is 1 + 2 pg_clip)"


CLIP = ClipKeys("pg_clip_low", "pg_clip_high", "dual_clip_loss", dual_words=_dual)
BLOCK = "train_infer_correction."
PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
CISPO = (0.1, 0.1)
"""The bounds in its code: no configuration class has a key for them."""
CAPPED = (1.0, 0.0)
"""The bounds of tis and topr, a weight in [0, 1]: tis_lower_bound and tis_upper_bound have no key either."""
KIMI15 = 0.1
"""The penalty of kimi15 in its code."""


def roll(parts: Parts) -> Translation:
    """One is_weight and a filter per rule; all filters must pass."""
    parts.need(("old",), ("ppo_clip", "gspo", "cispo", "reinforce", "topr", "dro"))
    parts.split_mask()
    weight = parts.take_weight(*TYPES)
    settings: Settings = {f"{BLOCK}is_weight.enabled": weight is not None}
    if weight is not None:
        settings[f"{BLOCK}is_weight.weight_type"] = TYPES[weight.over]
        settings[f"{BLOCK}is_weight.upper_bound"] = weight.upper
    fitting = [r for r in parts.rules if r.statistic in ("ratio", "prob_diff") and r.over in TYPES]
    settings[f"{BLOCK}filters"] = [_filter(r) for r in fitting if parts.take(r.statistic, r.over)]
    parts.finish()
    settings |= {"enable_old_logprobs_recompute": True, **_loss(parts.preset)}
    rules = bool(parts.preset.reject)
    return (settings,), (
        rules and "with enable_old_logprobs_recompute the filters act on the whole batch",
        rules and "under loss_agg_mode token-mean the sum ignores the mask: filtered tokens still push there",
        parts.loss == "gspo"
        and "importance_sampling is a key of the RLVR pipeline; its mean is over the "
        "tokens left by the filters",
    )


def _filter(rule: Reject) -> Settings:
    ratio = rule.statistic == "ratio"
    name, least = ("ratio", 0.0) if ratio else ("diff", -math.inf)
    return {
        "enabled": True,
        "agg_type": TYPES[rule.over],
        "ratio_enabled": ratio,
        "diff_enabled": not ratio,
        f"{name}_low": least if rule.lower is None else rule.lower,
        f"{name}_high": math.inf if rule.upper is None else rule.upper,
    }


def _loss(preset: Preset) -> Settings:
    if preset.loss in ("cispo", "reinforce", "topr", "dro"):
        return {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": _variant(preset)}
    clip = config.clip_settings(preset, CLIP)
    dual = clip.pop(CLIP.dual, None)
    seq = {"importance_sampling": "seq"} if preset.loss == "gspo" else {}
    if dual is None:
        return {**seq, **({"use_pg_clip_range": True} if clip else {}), **clip}
    low, high = config.clip_bounds(preset)
    bound = {"dual_clip_loss": True, "pg_clip": (dual - 1) / 2}
    return {**seq, "use_pg_clip_range": True, CLIP.low: low, CLIP.high: high, **bound}


def _variant(preset: Preset) -> str:
    if preset.loss == "reinforce":
        return "vanilla"
    if preset.loss == "dro":
        if preset.shape.penalty != KIMI15:
            cannot("a penalty of kimi15 other than 0.1: it stands in its code, and kimi15_tau is dropped")
        return "kimi15"
    bounds = config.clip_bounds(preset)
    if preset.loss == "topr" or bounds == CAPPED:
        if bounds != CAPPED:
            cannot("bounds of TOPR's weight other than 0 and 1: they stand in its code")
        return "topr" if preset.loss == "topr" else "tis"
    if bounds != CISPO:
        cannot(
            "bounds of CISPO's weight other than 0.1 and 0.1: they stand in its code, "
            "and cispo_epsilon_low and cispo_epsilon_high in YAML are dropped"
        )
    return "cispo"


TRAINER = Trainer("roll", roll, config.YAML, Guards(denominator="kept"), CLIP, (Log("roll", log),))
