"""ROLL: r = π_old/π_rollout and π_old − π_rollout, unclamped; its train_infer_correction.

Logged numbers are those of utils/train_infer_corrections.py. Four granularities: token; geometric (a mean
over the sequence); sequence (a product, or a sum); segment (a mean over a turn). Its masked mean divides by
(Σmask + 1e-8), which is reproduced.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offpol_diag.presets import Over, Preset, Reject, Statistic
from offpol_diag.trainers import config, schema
from offpol_diag.trainers.base import Entry, Log, Rows, Sum, Value, weighs
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Settings, Trainer, Translation
from offpol_diag.trainers.measures import EPS, LOG, PROB_DIFF, RATIO, exp

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import View

GRANULARITIES: dict[str, Over] = {
    "token": "token",
    "geometric": "mean",
    "sequence": "sum",
    "segment": "segment",
}
"""ROLL's word → ours."""
STATISTICS: dict[str, Statistic] = {"ratio": "ratio", "diff": "prob_diff"}


def _row_mean(total: Array, view: View) -> Array:
    """Return ROLL's masked mean of each row from its sum."""
    return total / (view.n + EPS)


def _of_row(value: Array, view: View) -> Array:
    """Row means of a number that every token of the row has; 0 for a row without a token."""
    return view.where_nonempty(_row_mean(value * view.n, view))


def _of_turns(statistic: Statistic, view: View) -> Array:
    """Return row means of each turn's mean, of r its geometric mean."""
    means, many, added = view.turns(statistic)
    each = means * (many / (many + EPS))
    return _row_mean(added((exp(each) if statistic == "ratio" else each) * many), view)


MEANS: dict[tuple[str, str], tuple[Rows, str]] = {
    ("ratio", "token"): (
        lambda view: _row_mean(view.total(RATIO), view),
        "r = π_old/π_rollout of each token",
    ),
    ("ratio", "geometric"): (
        lambda view: _of_row(exp(_row_mean(view.total(LOG), view)), view),
        "the geometric mean of r = π_old/π_rollout over the sequence",
    ),
    ("ratio", "sequence"): (
        lambda view: _of_row(exp(view.total(LOG)), view),
        "the product of r = π_old/π_rollout over the sequence",
    ),
    ("ratio", "segment"): (
        lambda view: _of_turns("ratio", view),
        "the geometric mean of r = π_old/π_rollout over the turn (a contiguous run of the mask)",
    ),
    ("diff", "token"): (
        lambda view: _row_mean(view.total(PROB_DIFF), view),
        "π_old − π_rollout, signed, of each token",
    ),
    ("diff", "geometric"): (
        lambda view: _of_row(_row_mean(view.total(PROB_DIFF), view), view),
        "the arithmetic mean of π_old − π_rollout over the sequence, whatever its name says",
    ),
    ("diff", "sequence"): (
        lambda view: _of_row(view.total(PROB_DIFF), view),
        "the sum of π_old − π_rollout over the sequence, so it grows with length",
    ),
    ("diff", "segment"): (
        lambda view: _of_turns("prob_diff", view),
        "the mean of π_old − π_rollout over the turn",
    ),
}
"""(measure, granularity) → its row means, and what they are of."""
PADDING = (
    "Since v0.2.0 ROLL's token-mean also adds up prompts, tool tokens and padding (functionals.py:253-256 of "
    "8eb27cc2), which a dump does not have, and divides by loss tokens; where there are none it is this"
)


def _mean(measure: str, granularity: str) -> Entry:
    of, what = MEANS[measure, granularity]
    column = Sum(f"{measure} {granularity}", of, shared=True)
    return Entry(
        f"actor/train_infer_{measure}_{granularity}_mean@sum",
        Value(lambda totals: totals(column) / (totals.sequences + EPS), (column,)),
        f"{what}: mean over the tokens of a sequence, then over sequences with a token, "
        "before any filter or bound. Older versions log only the granularities they filter by",
    )


def _pass_rate(measure: str, granularity: str) -> Entry:
    """The share of tokens that a filter keeps; the last filter's if there are several of a kind."""

    def rules(preset: Preset) -> list[Reject]:
        kind = STATISTICS[measure], GRANULARITIES[granularity]
        return [rule for rule in preset.reject if (rule.statistic, rule.over) == kind]

    passed = Sum(
        f"{measure} {granularity} passed",
        lambda view: view.n - view.dropped_by(rules(view.preset)[-1]),
    )
    return Entry(
        f"actor/train_infer_{granularity}_{measure}_mask_mean@sum",
        _over_tokens(passed),
        f"the share of tokens that this filter lets through, alone, by {MEANS[measure, granularity][1]}. "
        f"{PADDING}",
        lambda preset: bool(rules(preset)),
    )


def _over_tokens(column: Sum) -> Value:
    return Value(lambda totals: totals(column) / max(totals.tokens, 1.0), (column,))


def _capped(preset: Preset) -> bool:
    """Return whether an is_weight with an upper bound is applied."""
    return weighs(preset) and preset.weight is not None and preset.weight.upper is not None


def _above(view: View) -> Array:
    """Count the tokens whose weight is above the bound."""
    weighed = view.effect.weighed
    assert weighed is not None
    return weighed.high * view.n if weighed.final.per == "sequence" else weighed.high


KEPT_TOKENS = Sum("left", lambda view: view.effect.kept_tokens)
ENTRIES = (
    *(_mean(*kind) for kind in MEANS),
    Entry(
        "actor/is_weight_clipfrac@sum",
        _over_tokens(Sum("above", _above)),
        f"the share of tokens whose weight is above its upper bound, filtered ones included. {PADDING}",
        _capped,
    ),
    *(_pass_rate(*kind) for kind in MEANS),
    Entry(
        "actor/train_infer_final_mask_mean",
        Value(lambda totals: totals(KEPT_TOKENS) / (totals.tokens + EPS), (KEPT_TOKENS,)),
        "the share of tokens that all filters let through; over loss tokens, without padding",
        lambda preset: bool(preset.reject),
    ),
)

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
    return (schema.block("roll", "yaml", settings),), config.remarks(
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
            config.cannot(
                "a penalty of kimi15 other than 0.1: it stands in its code, and kimi15_tau is dropped"
            )
        return "kimi15"
    bounds = config.clip_bounds(preset)
    if preset.loss == "topr" or bounds == CAPPED:
        if bounds != CAPPED:
            config.cannot("bounds of TOPR's weight other than 0 and 1: they stand in its code")
        return "topr" if preset.loss == "topr" else "tis"
    if bounds != CISPO:
        config.cannot(
            "bounds of CISPO's weight other than 0.1 and 0.1: they stand in its code, "
            "and cispo_epsilon_low and cispo_epsilon_high in YAML are dropped"
        )
    return "cispo"


TRAINER = Trainer("roll", roll, Guards(denominator="kept"), CLIP, (Log("roll", ENTRIES),))
