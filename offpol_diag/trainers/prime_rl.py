"""prime-rl: r = π_θ/π_rollout, nothing clamped (trainer/rl/loss.py, train.py); [trainer.loss].

What its loss function returns is a mean per sequence, which the trainer then takes the mean and the maximum
of; a sequence without a loss token counts there as 0. The rows of v0.2 log other names. The configuration is
DPPO or IPO; ratios and their masks before 0.5.0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import (
    K3,
    KEPT,
    NEGATIVE,
    ONE,
    POSITIVE,
    SIDES,
    Entry,
    Log,
    Mask,
    Measure,
    Range,
    Rows,
    Side,
    Sum,
    Value,
    When,
    always,
    ends,
    half,
    half_veto,
    highest,
    lowest,
    per_row,
    per_token,
    row_mean,
    squared,
    std,
    where,
)
from offpol_diag.trainers.base import LOG as LOG_RATIO
from offpol_diag.trainers.config import Parts, Said, Settings, Snippet, Trainer, cannot
from offpol_diag.trainers.schema import older

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import Tokens, View

LARGEST = 1e30
"""Bound on one token's mismatch KL in newer versions; older ones log inf beyond float32."""

KL = Measure("k3 up to 1e30", lambda x: (x.excess().clamp(max=LARGEST) - x.delta).clamp(max=LARGEST), near=K3)
ENTROPY = Measure("entropy", lambda x: x.entropy, policy="rollout")


def _now(preset: Preset) -> bool:
    """Return whether the loss is one since 2026-03, with masks on probability differences."""
    return any(rule.statistic == "prob_diff" for rule in preset.reject)


def _then(preset: Preset) -> bool:
    """Return whether the loss is one of v0.2."""
    return not _now(preset)


def _default(preset: Preset) -> bool:
    """Return whether the mask depends on the advantage, as by default; `ipo` logs less."""
    return any(rule.statistic == "prob_diff" and rule.advantage != "any" for rule in preset.reject)


# ---------------------------------------------------------------- dropped tokens


def _failed(x: Tokens) -> Tensor:
    """Flag the tokens that the rules on tokens drop."""
    kept = x.kept
    return x.delta != x.delta if kept is None else ~kept


FAILED = Mask(_failed, near=False)


def _dropped(view: View) -> Tensor:
    """Count the tokens that the preset's rules drop, [S]."""
    return view.n - view.kept_tokens


def _over_dropped(of: Measure) -> Rows:
    """Return the sum over dropped tokens, including all tokens of dropped sequences, [S]."""
    return lambda view: where(view.kept, view.total(of, FAILED), view.total(of))


def _of_sign(of: Measure) -> Rows:
    """Count the dropped tokens with an advantage of this sign, [S]; all if there are no advantages."""
    return lambda view: _over_dropped(ONE if view.batch.advantages is None else of)(view)


def _kept_kl(view: View) -> Tensor:
    return view.total(KL, KEPT).masked_fill(~view.kept, 0.0)


def _mean(of: Rows, tokens: Rows) -> Rows:
    """Divide a sum of each sequence by a number of its tokens, [S]; 0 if there are none."""
    return lambda view: of(view) / tokens(view).clamp(min=1)


def _all(view: View) -> Tensor:
    return view.n


MASKED_MEANS: dict[str, Rows] = {
    "masked_mismatch_kl": _mean(_over_dropped(KL), _dropped),
    "unmasked_mismatch_kl": _mean(_kept_kl, lambda view: view.kept_tokens),
    "is_masked": _mean(_dropped, _all),
}
SIGNED_MEANS: dict[str, Rows] = {
    "is_masked_low": _mean(_of_sign(NEGATIVE), _all),
    "is_masked_high": _mean(_of_sign(POSITIVE), _all),
    "masked_advantage_positive": _mean(_of_sign(POSITIVE), _dropped),
    "masked_advantage_negative": _mean(_of_sign(NEGATIVE), _dropped),
}

# ---------------------------------------------------------------- masks of v0.2


def _bands(preset: Preset, over: str, side: Side) -> list[Reject]:
    """List the rules on r at a level, each with only one of its bounds."""
    rules = (rule for rule in preset.reject if rule.statistic == "ratio" and rule.over == over)
    return [one for rule in rules if (one := half(rule, side))]


def _tokens_outside(side: Side) -> Rows:
    return lambda view: view.failing(*_bands(view.preset, "token", side))


def _rows_outside(side: Side) -> Rows:
    def of(view: View) -> Tensor:
        passed = view.there | ~view.there
        for rule in _bands(view.preset, "mean", side):
            passed = passed & view.passes(rule)
        return ~passed + view.zeros

    return of


def _vetoed(side: Side) -> Rows:
    return lambda view: (view.veto_hits(half_veto(view.preset.veto, side)) > 0) + view.zeros


ENDS: dict[Side, str] = {"lower": "low", "upper": "high"}
FLAGS = {
    **{f"sequence_masked_{ENDS[side]}": _vetoed(side) for side in SIDES},
    **{f"geo_masked_{ENDS[side]}": _rows_outside(side) for side in SIDES},
}
COUNTS = {"is_masked": _dropped} | {f"is_masked_{ENDS[side]}": _tokens_outside(side) for side in SIDES}
"""Tokens per sequence: v0.2 takes their mean over tokens."""

_row_kl = row_mean(KL)


def _sum_and_range(name: str, of: Rows, sums: When, ranges: When) -> tuple[Sum, Range]:
    """Computed once for both."""

    def once(view: View) -> Tensor:
        return view.mine(name, lambda: of(view))

    return (
        Sum(name, once, own=True, when=sums),
        Range(name, lambda view: ends(once(view)), own=True, when=ranges),
    )


OF_MASKS = (
    *(_sum_and_range(name, of, always, _now) for name, of in MASKED_MEANS.items()),
    *(_sum_and_range(name, of, _default, _default) for name, of in SIGNED_MEANS.items()),
)

SUMS = (
    Sum("kl", lambda view: view.total(KL)),
    Sum("kl²", lambda view: view.total(squared(KL))),
    Sum("row kl", _row_kl, when=_then),
    Sum("row kl²", lambda view: _row_kl(view).square(), when=_then),
    Sum("geo − 1", lambda view: row_mean(LOG_RATIO)(view).expm1(), when=_then),
    Sum("entropy", lambda view: view.total(ENTROPY), needs=("entropy",)),
    *(one for one, _ in OF_MASKS),
    *(Sum(name, of, own=True, when=_then) for name, of in FLAGS.items()),
    *(Sum(f"tokens {name}", of, own=True, when=_then) for name, of in COUNTS.items()),
)
RANGES = (
    Range("token kl", lambda view: view.ends(KL)),
    Range("row kl", lambda view: ends(_row_kl(view)), when=_then),
    *(one for _, one in OF_MASKS),
)

# ---------------------------------------------------------------- what is logged


def _over_entropy(kl: Value) -> Value:
    return lambda totals: (
        kl(totals) / (totals("entropy") / totals.tokens) if totals("entropy") > 0 else math.nan
    )


PER_SEQUENCE = "a mean over the tokens of each sequence, then over sequences (one without a loss token is 0)"
WORST = "the largest of the sequences' means, not of the tokens"
MEANINGS = {
    "masked_mismatch_kl": "r − 1 − log r, r = π_θ/π_rollout, over the tokens that the mask drops",
    "unmasked_mismatch_kl": "r − 1 − log r, r = π_θ/π_rollout, over the tokens that the mask keeps",
    "is_masked": "the share of loss tokens that the mask drops, those with A = 0 included",
    "is_masked_low": "the share of loss tokens with A < 0 that are dropped at the lower bound; one dropped "
    "with A = 0 is in is_masked alone",
    "is_masked_high": "the share of loss tokens with A > 0 that are dropped at the upper bound",
    "masked_advantage_positive": "of the tokens dropped, the share with A > 0: no advantage itself",
    "masked_advantage_negative": "of the tokens dropped, the share with A < 0: no advantage itself",
}


def _pair(name: str, when: When) -> tuple[Entry, Entry]:
    text = f"{MEANINGS[name]}: {PER_SEQUENCE}"
    return (
        Entry(f"{name}/mean", text, per_row(name), when),
        Entry(f"{name}/max", f"{MEANINGS[name]}: {WORST}", highest(name), when),
    )


NOW = (
    Entry(
        "mismatch_kl/all/mean",
        "r − 1 − log r, r = π_θ/π_rollout, so an estimate of KL(π_rollout‖π_θ); mean over the loss tokens of "
        "the batch. The policy is the one being trained, not π_old",
        per_token("kl"),
        _now,
    ),
    Entry(
        "mismatch_kl/all/std",
        "standard deviation of that over tokens, n − 1 below",
        lambda p: std(p("kl"), p("kl²"), p.tokens),
        _now,
    ),
    Entry("mismatch_kl/all/max", "the largest of any loss token", highest("token kl"), _now),
    Entry(
        "kl_ent_ratio/mean",
        "mismatch_kl/all/mean over the mean entropy: a ratio of two means, not a mean of ratios. The entropy "
        "is the dump's; prime-rl takes the trainer's",
        _over_entropy(per_token("kl")),
        _now,
    ),
    *(entry for name in MASKED_MEANS for entry in _pair(name, _now)),
    *(entry for name in SIGNED_MEANS for entry in _pair(name, _default)),
)

FLAG_MEANINGS = {
    "sequence_masked_low": "the share of sequences with a token whose r is below sequence_mask_low",
    "sequence_masked_high": "the share of sequences with a token whose r is above sequence_mask_high",
    "geo_masked_low": "the share of sequences whose geometric mean of r is below geo_mask_low",
    "geo_masked_high": "the share of sequences whose geometric mean of r is above geo_mask_high",
}
COUNT_MEANINGS = {
    "is_masked": "the share of loss tokens that any of the masks drops, over tokens: later versions take the "
    "mean of each sequence first",
    "is_masked_low": "the share of loss tokens with r below token_mask_low, whatever their advantage",
    "is_masked_high": "the share of loss tokens with r above token_mask_high, whatever their advantage",
}


THEN = (
    Entry(
        "mismatch_kl/mean",
        f"r − 1 − log r, r = π_θ/π_rollout: {PER_SEQUENCE}. Later versions take it over all tokens",
        per_row("row kl"),
        _then,
    ),
    Entry(
        "mismatch_kl/std",
        "standard deviation of the sequences' means, n − 1 below",
        lambda p: std(p("row kl"), p("row kl²"), p.rows),
        _then,
    ),
    Entry("mismatch_kl/min", "the smallest of the sequences' means", lowest("row kl"), _then),
    Entry("mismatch_kl/max", WORST, highest("row kl"), _then),
    Entry(
        "kl_ent_ratio/mean",
        "mismatch_kl/mean over the mean entropy of the tokens",
        _over_entropy(per_row("row kl")),
        _then,
    ),
    *(
        Entry(f"{name}/mean", f"{MEANINGS[name]}: {PER_SEQUENCE}", per_row(name), _then)
        for name in ("masked_mismatch_kl", "unmasked_mismatch_kl")
    ),
    *(
        Entry(f"{name}/mean", text, per_token(f"tokens {name}"), _then)
        for name, text in COUNT_MEANINGS.items()
    ),
    *(Entry(f"{name}/mean", text, per_row(name), _then) for name, text in FLAG_MEANINGS.items()),
    Entry(
        "geo_seq_ratio/mean",
        "mean over sequences of the geometric mean of r = π_θ/π_rollout, unclamped; a sequence without a "
        "loss token is 1",
        lambda p: 1 + p("geo − 1") / p.rows,
        _then,
    ),
)

LOG = Log("prime-rl", SUMS, RANGES, (*NOW, *THEN))

# ---------------------------------------------------------------- configuration

TABLE = "trainer.loss"
KL_TERM = "kl_tau adds a term (log r)² on every loss token, masked ones included; 0 leaves it out"
OLD = "these keys are gone since 2026-03-03: pin prime-rl to release 0.4.0, or write a custom loss"


def prime_rl(preset: Preset) -> Said:
    """One gradient pass against the rollout: there is no π_old."""
    parts = Parts(preset)
    parts.need(("current",), ("surrogate", "reinforce"))
    forms, remarks = (_head if parts.loss == "surrogate" else _before)(parts)
    parts.finish()
    snippets = tuple(one for settings in forms for one in _written(settings))
    return snippets or cannot("bounds that its classes refuse"), remarks


def _written(settings: Settings) -> tuple[Snippet, ...]:
    named = {f"{TABLE}.{key}": value for key, value in settings.items()}
    return older("prime-rl", "toml", schema.toml(TABLE, settings), named)


def _head(parts: Parts) -> tuple[tuple[Settings, ...], tuple[str, ...]]:
    weight = parts.take_weight("token", actions=("none",))
    if weight is None or len(parts.rules) != 1:
        cannot("this loss without exactly one mask on the probability difference")
    rule = parts.rules.pop()
    plain = (rule.statistic, rule.over, rule.strict, rule.policy) == ("prob_diff", "token", False, None)
    if not plain or rule.lower is None or rule.upper is None or rule.upper < 0 < rule.lower:
        cannot("a mask on anything but the token's probability difference, with both bounds")
    terms = {"adv_tau": 1.0, "kl_tau": 0.0}
    forms = tuple({**mask, **terms} for mask in _mask_forms(rule, rule.lower, rule.upper))
    return forms, (KL_TERM, "[loss] where the trainer runs alone")


def _mask_forms(rule: Reject, low: float, high: float) -> tuple[Settings, ...]:
    """The newest spelling first."""
    if rule.advantage == "against_or_zero":
        return ({"type": "default", "dppo_mask_low": -low, "dppo_mask_high": high},)
    if rule.advantage != "any":
        return cannot(f"this condition on the advantage ({rule.advantage})")
    two_sided = {"type": "default", "ipo_mask_low": -low, "ipo_mask_high": high}
    return ({"type": "ipo", "ipo_threshold": high}, two_sided) if low == -high else (two_sided,)


def _before(parts: Parts) -> tuple[tuple[Settings, ...], tuple[str, ...]]:
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight("token", "sum")
    if weight is None or (weight.over, weight.action) not in (("token", "none"), ("sum", "truncate")):
        cannot("truncated token weights, or no weight")
    token, geo = parts.take("ratio", "token"), parts.take("ratio", "mean")
    veto = parts.take_veto(upper=True)
    bounds = {"token": token, "geo": geo, "sequence": veto}
    settings: Settings = {"ratio_type": "token" if weight.over == "token" else "sequence"}
    for name, part in bounds.items():
        low, high = (part.lower, part.upper) if part else (None, None)
        settings[f"{name}_mask_low"] = 0.0 if low is None else low
        settings[f"{name}_mask_high"] = math.inf if high is None else high
    if weight.upper is not None and weight.upper > math.exp(10):
        cannot("a product above e^10, where it clamps the log-ratio")
    if weight.upper is not None:
        settings["sequence_clip_high"] = weight.upper
    by_length = ("each sequence is divided by its length here",) if weight.over == "sum" else ()
    return ({**settings, "kl_tau": 0.0},), (OLD, *by_length)


TRAINER = Trainer("prime-rl", prime_rl, logs=(LOG,))
