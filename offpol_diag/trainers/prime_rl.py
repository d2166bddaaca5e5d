"""prime-rl: r = π_θ/π_rollout, nothing clamped (trainer/rl/loss.py, train.py); [trainer.loss].

What its loss function returns is a mean per sequence, which the trainer then takes the mean and the maximum
of; a sequence without a loss token counts there as 0. The rows of v0.2 log other names. The configuration is
DPPO or IPO; ratios and their masks before 0.5.0.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import base, config, schema
from offpol_diag.trainers.base import Range, Row, Side, Sum, Value, highest, mean, per_row, per_token, table
from offpol_diag.trainers.config import Parts, Settings, Trainer, Translation
from offpol_diag.trainers.measures import KEPT, LOG, NEGATIVE, ONE, POSITIVE, Mask, Measure, expm1, where

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import Tokens, View

LARGEST = 1e30
"""Bound on one token's mismatch KL in newer versions; older ones log inf beyond float32."""
KL = Measure("k3 up to 1e30", lambda x: (x.excess().clip(max=LARGEST) - x.delta).clip(max=LARGEST))
ENTROPY = base.total(Measure("entropy", lambda x: x.column("entropy"), policy="rollout", needs=("entropy",)))
ROW_KL = base.row_mean(KL)
ROW_KL_SQUARED = Sum("row kl²", lambda view: mean(KL)(view) ** 2, shared=True)
ROW_KLS = Range("row kl", lambda view: base.ends(mean(KL)(view)), shared=True)
GEO_EXCESS = Sum("geo − 1", lambda view: expm1(mean(LOG)(view)), shared=True)


def _now(preset: Preset) -> bool:
    """Return whether the loss is one since 2026-03, with masks on probability differences."""
    return any(rule.statistic == "prob_diff" for rule in preset.reject)


# ---------------------------------------------------------------- dropped tokens


def _failed(x: Tokens) -> Array:
    """Flag the tokens that the rules on tokens drop."""
    kept = x.kept
    return x.delta != x.delta if kept is None else ~kept


FAILED = Mask(_failed)


def _dropped(view: View) -> Array:
    """Count the tokens that the preset's rules drop, [S]."""
    return view.n - view.effect.kept_tokens


def _over_dropped(view: View, of: Measure) -> Array:
    """Return the sum over dropped tokens, including all tokens of dropped sequences, [S]."""
    return where(view.effect.sequences, view.total(of, FAILED), view.total(of))


def _of_sign(view: View, of: Measure) -> Array:
    """Count the dropped tokens with an advantage of this sign, [S]; all if there are no advantages."""
    return _over_dropped(view, ONE if view.batch.advantages is None else of)


def _tokens(view: View) -> Array:
    return view.n


def _kept(view: View) -> Array:
    return view.effect.kept_tokens


Masks = dict[str, tuple[base.Rows, base.Rows, str]]
"""Name → a sum, the number of tokens that it is divided by, and what that is."""
MASKS: Masks = {
    "masked_mismatch_kl": (
        lambda view: _over_dropped(view, KL),
        _dropped,
        "r − 1 − log r, r = π_θ/π_rollout, over the tokens that the mask drops",
    ),
    "unmasked_mismatch_kl": (
        lambda view: where(view.effect.sequences, view.total(KL, KEPT), 0.0),
        _kept,
        "r − 1 − log r, r = π_θ/π_rollout, over the tokens that the mask keeps",
    ),
    "is_masked": (
        _dropped,
        _tokens,
        "the share of loss tokens that the mask drops, those with A = 0 included",
    ),
}
MASKS_OF_SIGNS: Masks = {
    "is_masked_low": (
        lambda view: _of_sign(view, NEGATIVE),
        _tokens,
        "the share of loss tokens with A < 0 that are dropped at the lower bound; one dropped "
        "with A = 0 is in is_masked alone",
    ),
    "is_masked_high": (
        lambda view: _of_sign(view, POSITIVE),
        _tokens,
        "the share of loss tokens with A > 0 that are dropped at the upper bound",
    ),
    "masked_advantage_positive": (
        lambda view: _of_sign(view, POSITIVE),
        _dropped,
        "of the tokens dropped, the share with A > 0: no advantage itself",
    ),
    "masked_advantage_negative": (
        lambda view: _of_sign(view, NEGATIVE),
        _dropped,
        "of the tokens dropped, the share with A < 0: no advantage itself",
    ),
}
PER_SEQUENCE = "a mean over the tokens of each sequence, then over sequences (one without a loss token is 0)"
WORST = "the largest of the sequences' means, not of the tokens"


def _mean_and_max(name: str, of: base.Rows, tokens: base.Rows) -> tuple[Value, Value]:
    """Return mean and maximum over sequences of a sum over a number of tokens, 0 if there are none."""

    def once(view: View) -> Array:
        return view.mine(name, lambda: of(view) / tokens(view).clip(min=1))

    return per_row(Sum(name, once)), highest(Range(name, lambda view: base.ends(once(view))))


def _means(masks: Masks, most: bool = True) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for name, (of, tokens, meaning) in masks.items():
        average, largest = _mean_and_max(name, of, tokens)
        rows[f"{name}/mean"] = average.means(f"{meaning}: {PER_SEQUENCE}")
        if most:
            rows[f"{name}/max"] = largest.means(f"{meaning}: {WORST}")
    return rows


# ---------------------------------------------------------------- masks of v0.2


def _bands(preset: Preset, over: str, side: Side) -> list[Reject]:
    """List the rules on r at a level, each with only one of its bounds."""
    rules = (rule for rule in preset.reject if rule.statistic == "ratio" and rule.over == over)
    return [one for rule in rules if (one := base.half(rule, side))]


def _tokens_outside(side: Side) -> Sum:
    return Sum(f"tokens {side}", lambda view: view.dropped_by(*_bands(view.preset, "token", side)))


def _rows_outside(side: Side) -> Sum:
    def of(view: View) -> Array:
        passed = view.nonempty | ~view.nonempty
        for rule in _bands(view.preset, "mean", side):
            if not rule.on_tokens:
                passed = passed & view.passes(rule)
        return ~passed + view.zeros

    return Sum(f"rows {side}", of)


def _vetoed(side: Side) -> Sum:
    return Sum(
        f"vetoed {side}",
        lambda view: (view.veto_hits(base.half_veto(view.preset.veto, side)) > 0) + view.zeros,
    )


# ---------------------------------------------------------------- what is logged


def _over_entropy(kl: Value) -> Value:
    def of(totals: base.Totals) -> float:
        entropy = totals(ENTROPY)
        return kl.of(totals) / (entropy / totals.tokens) if entropy > 0 else math.nan

    return Value(of, (*kl.columns, ENTROPY))


NOW: dict[str, Row] = {
    "mismatch_kl/all/mean": per_token(KL).means(
        "r − 1 − log r, r = π_θ/π_rollout, so an estimate of KL(π_rollout‖π_θ); mean over the loss tokens of "
        "the batch. The policy is the one being trained, not π_old"
    ),
    "mismatch_kl/all/std": base.deviation(KL).means("standard deviation of that over tokens, n − 1 below"),
    "mismatch_kl/all/max": highest(KL).means("the largest of any loss token"),
    "kl_ent_ratio/mean": _over_entropy(per_token(KL)).means(
        "mismatch_kl/all/mean over the mean entropy: a ratio of two means, not a mean of ratios. The entropy "
        "is the dump's; prime-rl takes the trainer's"
    ),
}
THEN: dict[str, Row] = {
    "mismatch_kl/mean": per_row(ROW_KL).means(
        f"r − 1 − log r, r = π_θ/π_rollout: {PER_SEQUENCE}. Later versions take it over all tokens"
    ),
    "mismatch_kl/std": Value(
        lambda p: base.std(p(ROW_KL), p(ROW_KL_SQUARED), p.rows), (ROW_KL, ROW_KL_SQUARED)
    ).means("standard deviation of the sequences' means, n − 1 below"),
    "mismatch_kl/min": base.lowest(ROW_KLS).means("the smallest of the sequences' means"),
    "mismatch_kl/max": highest(ROW_KLS).means(WORST),
    "kl_ent_ratio/mean": _over_entropy(per_row(ROW_KL)).means(
        "mismatch_kl/mean over the mean entropy of the tokens"
    ),
    **_means({name: of for name, of in MASKS.items() if name != "is_masked"}, most=False),
    "is_masked/mean": per_token(Sum("dropped", _dropped)).means(
        "the share of loss tokens that any of the masks drops, over tokens: later versions take the "
        "mean of each sequence first"
    ),
    "is_masked_low/mean": per_token(_tokens_outside("lower")).means(
        "the share of loss tokens with r below token_mask_low, whatever their advantage"
    ),
    "is_masked_high/mean": per_token(_tokens_outside("upper")).means(
        "the share of loss tokens with r above token_mask_high, whatever their advantage"
    ),
    "sequence_masked_low/mean": per_row(_vetoed("lower")).means(
        "the share of sequences with a token whose r is below sequence_mask_low"
    ),
    "sequence_masked_high/mean": per_row(_vetoed("upper")).means(
        "the share of sequences with a token whose r is above sequence_mask_high"
    ),
    "geo_masked_low/mean": per_row(_rows_outside("lower")).means(
        "the share of sequences whose geometric mean of r is below geo_mask_low"
    ),
    "geo_masked_high/mean": per_row(_rows_outside("upper")).means(
        "the share of sequences whose geometric mean of r is above geo_mask_high"
    ),
    "geo_seq_ratio/mean": (per_row(GEO_EXCESS) + 1).means(
        "mean over sequences of the geometric mean of r = π_θ/π_rollout, unclamped; a sequence without a "
        "loss token is 1"
    ),
}
ENTRIES = (
    *table(NOW | _means(MASKS), when=_now),
    # `ipo`, whose mask does not depend on the advantage, logs less
    *table(
        _means(MASKS_OF_SIGNS),
        when=lambda preset: any(
            rule.statistic == "prob_diff" and rule.advantage != "any" for rule in preset.reject
        ),
    ),
    *table(THEN, when=lambda preset: not _now(preset)),
)
PRIME_LOG = base.Log("prime-rl", ENTRIES)

# ---------------------------------------------------------------- configuration

TABLE = "trainer.loss."
KL_TERM = "kl_tau adds a term (log r)² on every loss token, masked ones included; 0 leaves it out"
OLD = "these keys are gone since 2026-03-03: pin prime-rl to release 0.4.0, or write a custom loss"
Forms = tuple[Settings, ...]


def prime_rl(parts: Parts) -> Translation:
    """One gradient pass against the rollout: there is no π_old."""
    parts.need(("current",), ("surrogate", "reinforce"))
    forms, remarks = (_probability_mask if parts.loss == "surrogate" else _ratio_masks)(parts)
    parts.finish()
    named = (config.prefixed(TABLE, settings) for settings in forms)
    snippets = tuple(one for settings in named for one in schema.older("prime-rl", "toml", settings))
    return snippets or config.cannot("bounds that its classes refuse"), remarks


def _probability_mask(parts: Parts) -> tuple[Forms, tuple[str, ...]]:
    """DPPO or IPO, the newest spelling first."""
    weight = parts.take_weight("token", actions=("none",))
    if weight is None or len(parts.rules) != 1:
        config.cannot("this loss without exactly one mask on the probability difference")
    rule = parts.rules.pop()
    plain = (rule.statistic, rule.over, rule.strict, rule.policy) == ("prob_diff", "token", False, None)
    low, high = rule.lower, rule.upper
    if not plain or low is None or high is None or high < 0 < low:
        config.cannot("a mask on anything but the token's probability difference, with both bounds")
    terms = {"adv_tau": 1.0, "kl_tau": 0.0}
    kind = {"against_or_zero": "dppo", "any": "ipo"}.get(rule.advantage)
    if kind is None:
        config.cannot(f"this condition on the advantage ({rule.advantage})")
    forms: Forms = ({"type": "default", f"{kind}_mask_low": -low, f"{kind}_mask_high": high, **terms},)
    if kind == "ipo" and low == -high:
        forms = ({"type": "ipo", "ipo_threshold": high, **terms}, *forms)
    return forms, (KL_TERM, "[loss] where the trainer runs alone")


def _ratio_masks(parts: Parts) -> tuple[Forms, tuple[str, ...]]:
    """The keys before 0.5.0."""
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight("token", "sum")
    if weight is None or (weight.over, weight.action) not in (("token", "none"), ("sum", "truncate")):
        config.cannot("truncated token weights, or no weight")
    bounds = {"token": parts.take("ratio", "token"), "geo": parts.take("ratio", "mean")}
    settings: Settings = {"ratio_type": "token" if weight.over == "token" else "sequence"}
    for name, part in {**bounds, "sequence": parts.take_veto(upper=True)}.items():
        low, high = config.open_bounds(*((part.lower, part.upper) if part else (None, None)))
        settings |= {f"{name}_mask_low": low, f"{name}_mask_high": high}
    if weight.upper is not None and weight.upper > math.exp(10):
        config.cannot("a product above e^10, where it clamps the log-ratio")
    if weight.upper is not None:
        settings["sequence_clip_high"] = weight.upper
    by_length = ("each sequence is divided by its length here",) if weight.over == "sum" else ()
    return ({**settings, "kl_tau": 0.0},), (OLD, *by_length)


TRAINER = Trainer("prime-rl", prime_rl, logs=(PRIME_LOG,))
