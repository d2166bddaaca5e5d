"""ROLL: r = π_old/π_rollout and π_old − π_rollout, unclamped; its train_infer_correction.

Logged numbers are those of utils/train_infer_corrections.py. Four granularities: token; geometric (a mean
over the sequence); sequence (a product, or a sum); segment (a mean over a turn). Its masked mean divides by
(Σmask + 1e-8), which is reproduced.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offpol_diag.presets import Over, Preset, Reject, Statistic
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import EPS, PROB_DIFF, RATIO, Entry, Log, Rows, Sum, Value, When, weighs
from offpol_diag.trainers.base import LOG as LOG_RATIO
from offpol_diag.trainers.config import (
    ClipKeys,
    Habits,
    Parts,
    Said,
    Settings,
    Trainer,
    cannot,
    clip_bounds,
    clip_remarks,
    clip_settings,
)
from offpol_diag.trainers.schema import block

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import View

GRANULARITIES: dict[str, Over] = {
    "token": "token",
    "geometric": "mean",
    "sequence": "sum",
    "segment": "segment",
}
"""ROLL's word → ours."""
STATISTICS: dict[str, Statistic] = {"ratio": "ratio", "diff": "prob_diff"}


def _row_mean(total: Tensor, view: View) -> Tensor:
    """Return ROLL's masked mean of each row from its sum."""
    return total / (view.n + EPS)


def _of_row(value: Tensor, view: View) -> Tensor:
    """Row means of a number that every token of the row has; 0 for a row without a token."""
    return view.where_there(_row_mean(value * view.n, view))


def _of_turns(statistic: Statistic, view: View, exp: bool) -> Tensor:
    """Return row means of a function of each turn's mean."""
    means, many, added = view.turns(statistic)
    each = means * (many / (many + EPS))
    return _row_mean(added((each.exp() if exp else each) * many), view)


MEANS: dict[str, Rows] = {
    "ratio token": lambda view: _row_mean(view.total(RATIO), view),
    "ratio geometric": lambda view: _of_row(_row_mean(view.total(LOG_RATIO), view).exp(), view),
    "ratio sequence": lambda view: _of_row(view.total(LOG_RATIO).exp(), view),
    "ratio segment": lambda view: _of_turns("ratio", view, exp=True),
    "diff token": lambda view: _row_mean(view.total(PROB_DIFF), view),
    "diff geometric": lambda view: _of_row(_row_mean(view.total(PROB_DIFF), view), view),
    "diff sequence": lambda view: _of_row(view.total(PROB_DIFF), view),
    "diff segment": lambda view: _of_turns("prob_diff", view, exp=False),
}
"""Shared by presets."""


def _rules(preset: Preset, measure: str, granularity: str) -> list[Reject]:
    kind = STATISTICS[measure], GRANULARITIES[granularity]
    return [rule for rule in preset.reject if (rule.statistic, rule.over) == kind]


def _filters(measure: str, granularity: str) -> When:
    return lambda preset: bool(_rules(preset, measure, granularity))


def _passed(measure: str, granularity: str) -> Rows:
    """Count the tokens that a filter keeps; the last filter's if there are several of a kind."""
    return lambda view: view.n - view.failing_alone(_rules(view.preset, measure, granularity)[-1])


def _rejects(preset: Preset) -> bool:
    return bool(preset.reject)


def _capped(preset: Preset) -> bool:
    """Return whether an is_weight with an upper bound is applied."""
    return weighs(preset) and preset.weight is not None and preset.weight.upper is not None


def _above(view: View) -> Tensor:
    """Count the tokens whose weight is above the bound."""
    weighed = view.weighed
    assert weighed is not None
    return weighed.high * view.n if weighed.final.per == "sequence" else weighed.high


SUMS = (
    *(Sum(name, of) for name, of in MEANS.items()),
    Sum("above", _above, own=True, when=_capped),
    Sum("left", lambda view: view.kept_tokens, own=True, when=_rejects),
    *(
        Sum(f"{measure} {name} passed", _passed(measure, name), own=True, when=_filters(measure, name))
        for measure in STATISTICS
        for name in GRANULARITIES
    ),
)

PADDING = (
    "Since v0.2.0 ROLL's token-mean also adds up prompts, tool tokens and padding (functionals.py:253-256 of "
    "8eb27cc2), which a dump does not have, and divides by loss tokens; where there are none it is this"
)
WHAT = {
    "ratio token": "r = π_old/π_rollout of each token",
    "ratio geometric": "the geometric mean of r = π_old/π_rollout over the sequence",
    "ratio sequence": "the product of r = π_old/π_rollout over the sequence",
    "ratio segment": "the geometric mean of r = π_old/π_rollout over the turn (a contiguous run of the mask)",
    "diff token": "π_old − π_rollout, signed, of each token",
    "diff geometric": "the arithmetic mean of π_old − π_rollout over the sequence, whatever its name says",
    "diff sequence": "the sum of π_old − π_rollout over the sequence, so it grows with length",
    "diff segment": "the mean of π_old − π_rollout over the turn",
}


def _over_samples(column: str) -> Value:
    return lambda totals: totals(column) / (totals.sequences + EPS)


def _over_tokens(column: str) -> Value:
    return lambda totals: totals(column) / max(totals.tokens, 1.0)


def _mean_entry(measure: str, name: str) -> Entry:
    return Entry(
        f"actor/train_infer_{measure}_{name}_mean@sum",
        f"{WHAT[f'{measure} {name}']}: mean over the tokens of a sequence, then over sequences with a token, "
        "before any filter or bound. Older versions log only the granularities they filter by",
        _over_samples(f"{measure} {name}"),
    )


def _pass_rate(measure: str, name: str) -> Entry:
    return Entry(
        f"actor/train_infer_{name}_{measure}_mask_mean@sum",
        f"the share of tokens that this filter lets through, alone, by {WHAT[f'{measure} {name}']}. "
        f"{PADDING}",
        _over_tokens(f"{measure} {name} passed"),
        _filters(measure, name),
    )


ENTRIES = (
    *(_mean_entry(measure, name) for measure in STATISTICS for name in GRANULARITIES),
    Entry(
        "actor/is_weight_clipfrac@sum",
        f"the share of tokens whose weight is above its upper bound, filtered ones included. {PADDING}",
        _over_tokens("above"),
        _capped,
    ),
    *(_pass_rate(measure, name) for measure in STATISTICS for name in GRANULARITIES),
    Entry(
        "actor/train_infer_final_mask_mean",
        "the share of tokens that all filters let through; over loss tokens, without padding",
        lambda totals: totals("left") / (totals.tokens + EPS),
        _rejects,
    ),
)

LOG = Log("roll", SUMS, (), ENTRIES)

# ---------------------------------------------------------------- configuration

TYPES = {over: name for name, over in GRANULARITIES.items()}


def _dual(bound: float) -> str:
    switches = "dual_clip_loss and use_pg_clip_range are true"
    return f"{switches} and pg_clip is {(bound - 1) / 2:g} (the bound is 1 + 2 pg_clip)"


CLIP = ClipKeys("pg_clip_low", "pg_clip_high", "dual_clip_loss", dual_said=_dual)
BLOCK = "train_infer_correction."
PG_WORKER = "roll.pipeline.rlvr.actor_pg_worker.ActorPGWorker"
CISPO = (0.1, 0.1)
"""The bounds in its code: no configuration class has a key for them."""


def roll(preset: Preset) -> Said:
    """One is_weight and a filter per rule; all filters must pass."""
    parts = Parts(preset)
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    parts.split_mask()
    settings = {**_weight(parts), BLOCK + "filters": _filters_said(parts)}
    parts.finish()
    settings |= {"enable_old_logprobs_recompute": True, **_loss(preset)}
    found = (
        "with enable_old_logprobs_recompute the filters act on the whole batch",
        "under loss_agg_mode token-mean the sum ignores the mask: filtered tokens still push there",
    )
    shown = found if preset.reject else ()
    seq = (
        "importance_sampling is a key of the RLVR pipeline; its mean is over the tokens left by the filters",
    )
    said = (*shown, *(seq if preset.loss == "gspo" else ()), *clip_remarks(preset, CLIP))
    return (block("roll", "yaml", schema.yaml(settings), settings),), said


def _weight(parts: Parts) -> Settings:
    weight = parts.take_weight(*TYPES)
    found: Settings = {"enabled": weight is not None}
    if weight is not None:
        found |= {"weight_type": TYPES[weight.over], "upper_bound": weight.upper}
    return {f"{BLOCK}is_weight.{key}": value for key, value in found.items()}


def _filters_said(parts: Parts) -> list[Settings]:
    taken = ((rule, parts.take(rule.statistic, rule.over)) for rule in tuple(parts.rules) if _fits(rule))
    return [_filter(rule) for rule, found in taken if found is not None]


def _fits(rule: Reject) -> bool:
    return rule.statistic in ("ratio", "prob_diff") and rule.over in TYPES


def _filter(rule: Reject) -> Settings:
    ratio = rule.statistic == "ratio"
    least = 0.0 if ratio else -math.inf
    low, high = least if rule.lower is None else rule.lower, math.inf if rule.upper is None else rule.upper
    name = "ratio" if ratio else "diff"
    return {
        "enabled": True,
        "agg_type": TYPES[rule.over],
        "ratio_enabled": ratio,
        "diff_enabled": not ratio,
        f"{name}_low": low,
        f"{name}_high": high,
    }


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        if clip_bounds(preset) != CISPO:
            cannot(
                "bounds of CISPO's weight other than 0.1 and 0.1: they stand in its code, "
                "and cispo_epsilon_low and cispo_epsilon_high in YAML are dropped"
            )
        return {"actor_train.worker_cls": PG_WORKER, "actor_train.pg_variant": "cispo"}
    clip = clip_settings(preset, CLIP)
    dual = clip.pop(CLIP.dual, None)
    seq = {"importance_sampling": "seq"} if preset.loss == "gspo" else {}
    if dual is None:
        return {**seq, **({"use_pg_clip_range": True} if clip else {}), **clip}
    low, high = clip_bounds(preset)
    bound = {"dual_clip_loss": True, "pg_clip": (dual - 1) / 2}
    return {**seq, "use_pg_clip_range": True, CLIP.low: low, CLIP.high: high, **bound}


TRAINER = Trainer("roll", roll, Habits(denominator="kept"), (LOG,))
