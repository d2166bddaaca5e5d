"""AReaL: `ppo_actor/update/` (trainer/ppo/actor.py, utils/functional), and actor.rejection_sampling.

Every statistic comes as `/avg`, `/min` and `/max` over the tokens of its own denominator, of which there are
two: the valid tokens (all, or what M2PO leaves), and the behave tokens, those kept with a weight above 0.
A statistic of no token is not logged. The configuration is actor.rejection_sampling since v1.0.4,
behave_imp_weight_* before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from offpol_diag.errors import ConfigError
from offpol_diag.presets import Preset, Reject
from offpol_diag.trainers import base, config, measures, schema
from offpol_diag.trainers.base import Ends, Entry, Log, Rows, Sum, Totals, Value, When, among, applied, ends
from offpol_diag.trainers.config import ClipKeys, Guards, Parts, Settings, Snippet, Trainer, Translation
from offpol_diag.trainers.measures import (
    K1,
    KEPT,
    ONE,
    UPDATE,
    UPDATE_RATIO,
    WEIGHT,
    Mask,
    Measure,
    U,
    under,
    where,
)
from offpol_diag.trainers.measures import LOG as LOG_RATIO

if TYPE_CHECKING:
    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.view import Tokens, View

SCOPE = "ppo_actor/update/"


def _samples(preset: Preset) -> bool:
    """Return whether rejection_sampling is set, or the behave_imp_weight_cap that it replaced."""
    return applied(preset).weight is not None


def _filters(preset: Preset) -> bool:
    """Return whether rejection_sampling is set: a weight masked without its token means the older cap."""
    return _samples(preset) and not _masks(preset)


def _masks(preset: Preset) -> bool:
    """Return whether a weight can be 0, which only a mask makes it."""
    rule = applied(preset).weight
    return rule is not None and rule.action == "mask"


def _of_tokens(preset: Preset) -> bool:
    """Return whether ratios are of tokens; AReaL's GSPO ratio over kept tokens is not computed here."""
    return preset.loss != "gspo"


def _over_batch(preset: Preset) -> tuple[Reject, ...]:
    """Return the M2PO rules, which edit the loss mask before any statistic."""
    return tuple(rule for rule in applied(preset).reject if rule.over == "batch")


# ---------------------------------------------------------------- denominators


@dataclass(frozen=True)
class Denominator:
    """The tokens that a statistic averages over.

    Attributes:
        name: name of the count.
        tokens: selection of tokens within sequences.
        sequences: computes the flags of the sequences, [S] bool; some of them may have no token.
    """

    name: str
    tokens: Mask
    sequences: Rows

    def total(self, view: View, of: Measure) -> Array:
        """Return the sum of a measure over these tokens, [S]."""
        return where(self.sequences(view), view.total(of, self.tokens), 0.0)

    def ends(self, view: View, of: Measure) -> Ends:
        """Return the minimum and maximum over these tokens of each sequence, [S] each."""
        return among(view.ends(of, self.tokens), self.sequences(view))

    def count(self, view: View) -> Array:
        """Count these tokens of each sequence, [S]."""
        return view.mine(("count", self.name), lambda: self.total(view, ONE))


def _valid(x: Tokens) -> Array | None:
    """Flag the tokens that M2PO keeps; None for all."""
    rules = _over_batch(x.preset)
    return x.kept_by(replace(x.preset, reject=rules, veto=None)) if rules else None


def _with_weight(x: Tokens) -> Array | None:
    """Flag kept tokens; with token weights that can be 0, only those with a weight above 0."""
    if not _masks(x.preset) or x.weigh().final.per == "sequence":
        return x.kept
    above = x.weigh().final.values > 0
    return above if x.kept is None else above & x.kept


def _behaving(view: View) -> Array:
    kept, weights = view.effect.sequences, view.effect.per_sequence
    return kept & (weights > 0) if weights is not None and _masks(view.preset) else kept


ALL_VALID = Denominator("valid", Mask(_valid), lambda view: view.nonempty)
"""n_valid_tokens."""
LOSS_MASK = Denominator("left", KEPT, lambda view: view.effect.sequences)
"""The loss mask after rejection sampling."""
BEHAVING = Denominator("behave", Mask(_with_weight), _behaving)
"""unclipped_behave_tokens; without rejection sampling there is no such mask, and all valid ones count."""

# ---------------------------------------------------------------- statistics


def _dropped(view: View) -> Array:
    """Count the valid tokens that are dropped, [S]."""
    return ALL_VALID.count(view) - LOSS_MASK.count(view)


def _masked_ratio(view: View) -> Ends:
    """The smallest and largest ratio kept, and 0 for each sequence that lost a token."""
    low, high = LOSS_MASK.ends(view, UPDATE_RATIO)
    lost = _dropped(view) > 0
    return where(lost, low.clip(max=0.0), low), where(lost, high.clip(min=0.0), high)


def _weighted(view: View) -> Array:
    """Σ of the weights over behave tokens."""
    rows = view.effect.per_sequence
    return BEHAVING.total(view, WEIGHT) if rows is None else rows * BEHAVING.count(view)


def _weight_ends(view: View) -> Ends:
    """The smallest and largest of the weights of behave tokens."""
    rows = view.effect.per_sequence
    return BEHAVING.ends(view, WEIGHT) if rows is None else ends(rows, BEHAVING.count(view) > 0)


def _changed(view: View) -> Array:
    """Count the valid tokens that are dropped or have a clamped weight, [S]."""
    rule = view.preset.weight
    return _dropped(view) + (view.capped() if rule and rule.action == "truncate" else 0.0)


VALID, BEHAVE = Sum("valid", ALL_VALID.count), Sum("behave", BEHAVING.count)
CHANGED = Sum("changed", _changed)


def _statistic(
    name: str,
    total: Rows,
    ends: Callable[[View], Ends],
    per: Sum,
    meaning: str,
    when: When = base.always,
    needs: tuple[str, ...] = UPDATE,
) -> tuple[Entry, ...]:
    """Return average, minimum and maximum of a statistic, which are not logged if its denominator is 0."""
    sums, span = Sum(name, total, needs=needs), base.Range(name, ends, needs=needs)

    def entry(end: str, word: str, of: Callable[[Totals], float]) -> Entry:
        def checked(totals: Totals) -> float:
            if totals(per) == 0:
                raise base.Absent(per.name)
            return of(totals)

        value = Value(checked, (per, sums, span))
        return Entry(f"{SCOPE}{name}/{end}", value, f"{meaning} The {word}.", when)

    return (
        entry("avg", "mean", lambda totals: totals(sums) / totals(per)),
        entry("min", "smallest", lambda totals: totals.ends(span)[0]),
        entry("max", "largest", lambda totals: totals.ends(span)[1]),
    )


def _behave(name: str, of: Measure, meaning: str) -> tuple[Entry, ...]:
    """Return a statistic of π_θ against the rollout over the behave tokens."""
    v = under(of, "current")
    return _statistic(
        name, lambda x: BEHAVING.total(x, v), lambda x: BEHAVING.ends(x, v), BEHAVE, meaning.format(_BEHAVE)
    )


_BEHAVE = "over tokens that are kept with a weight above 0"
ENTRIES = (
    *_statistic(
        "importance_weight",
        lambda view: LOSS_MASK.total(view, UPDATE_RATIO),
        _masked_ratio,
        VALID,
        "π_θ/π_old over the valid tokens (after M2PO), with 0 for each token that rejection sampling drops: "
        "the loss's own ratio, not the mismatch, and lower the more is dropped. After release 2.0.0 "
        "(3e9f63232 of 2026-08-06) a dropped token counts with its own ratio.",
        _of_tokens,
    ),
    *_statistic(
        "approx_kl",
        lambda view: ALL_VALID.total(view, U),
        lambda view: ALL_VALID.ends(view, U),
        VALID,
        "log π_θ − log π_old over the valid tokens, dropped ones included: the opposite sign of ppo_kl "
        "elsewhere.",
        _of_tokens,
    ),
    *_statistic(
        "behave_imp_weight",
        _weighted,
        _weight_ends,
        BEHAVE,
        f"π_old/π_rollout after masking or clamping, {_BEHAVE}: a mean of survivors, which hides what was "
        "dropped; at level sequence with the ratio it is the geometric mean, by tokens.",
        _samples,
        (),
    ),
    *_statistic(
        "behave_approx_kl",
        lambda view: BEHAVING.total(view, LOG_RATIO),
        lambda view: BEHAVING.ends(view, LOG_RATIO),
        BEHAVE,
        f"log π_old − log π_rollout, {_BEHAVE}; of the token itself at every level, and unclamped: the "
        "opposite sign of k1.",
        _samples,
        (),
    ),
    *_behave(
        "compute_logp/kl_div_direct",
        K1,
        "log π_rollout − log π_θ, {}: k1 of both drifts together, with π_θ where others have π_old.",
    ),
    *_behave(
        "compute_logp/kl_div_taylor",
        measures.K2,
        "(log π_θ − log π_rollout)²/2, {}: k2 of both drifts together.",
    ),
    *_behave(
        "compute_logp/kl_div_dual",
        measures.K3,
        "r − 1 − log r with r = π_θ/π_rollout, {}: k3 of both drifts together, unclamped.",
    ),
)
SHARE = Entry(
    f"{SCOPE}rs_filtered_fraction",
    Value(lambda totals: totals(CHANGED) / max(totals(VALID), 1), (CHANGED, VALID)),
    "Share of the valid tokens that rejection sampling drops (action mask) or whose weight it changes "
    "(action clamp). The trainer averages it over micro-batches, each weighing the same; here it is of "
    "the whole dump. The cap of v1.0.3 and older does not log it (`areal-v1.0.3`).",
    _filters,
)
LOGS = (Log("areal", (*ENTRIES, SHARE)), Log("areal-v1.0.3", ENTRIES))
"""The second is that of `behave_imp_weight_cap`, up to v1.0.3: actor.py:536-542 there, without the share."""

# ---------------------------------------------------------------- configuration

ACTOR, RULE = "actor.", "rejection_sampling."
CLIP = ClipKeys("eps_clip", "eps_clip_higher", "c_clip")
LEVELS = {"token": "token", "mean": "sequence"}
METRICS = {"ratio": "ratio", "k1": "kl_k1", "k2": "kl_k2", "k3_reverse": "kl_k3"}
DECOUPLED = {"use_decoupled_loss": True, "recompute_logprob": True}
"""Required by M2PO too: this loss alone keeps the rollout's log-probs beside the recomputed ones."""


def areal(parts: Parts) -> Translation:
    """Translate a preset: bypass, recompute, or the decoupled loss with one rule."""
    preset = parts.preset
    parts.need(("old", "current"), ("ppo_clip", "gspo", "cispo", "sapo"))
    if parts.loss == "sapo" and not parts.bare:
        config.cannot("weights or rules under the SAPO loss, which refuses use_decoupled_loss")
    settings = {**_correction(parts), **_loss(preset)}
    parts.finish()
    metric = str(settings.get(RULE + "metric", ""))
    now = schema.block("areal", "yaml", config.prefixed(ACTOR, settings))
    return (now, *_before(preset)), config.remarks(
        metric and "a log-ratio that is not finite counts as 0 here (weight 1)",
        metric == "kl_k1" and "kl_k1 is +log r here, the opposite sign of k1 elsewhere",
        metric == "kl_k3" and "kl_k3 is of π_rollout/π_train here, whatever its help says",
        "m2_threshold" in settings
        and "m2_threshold is on the mean of the squared log-ratio, and per micro-batch here",
        settings.get("importance_sampling_level") and "the advantage is averaged per sequence here",
    )


def _correction(parts: Parts) -> Settings:
    if parts.policy == "current":
        return {"use_decoupled_loss": False, "recompute_logprob": False}
    if parts.weight is None:
        moment = parts.take("k2", "batch", "upper")
        if moment is None:
            return {"use_decoupled_loss": False, "recompute_logprob": True}
        return {**DECOUPLED, "rejection_sampling": None, "m2_threshold": 2 * (moment.upper or 0.0)}
    if parts.loss == "gspo":
        config.cannot("weights under the GSPO loss")
    return {**DECOUPLED, **config.prefixed(RULE, _rule(parts))}


def _rule(parts: Parts) -> Settings:
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight(*LEVELS, lower=True)
    if weight is None:
        config.cannot("this weight")
    if weight.action == "truncate":
        return _bounded(LEVELS[weight.over], "clamp", "ratio", weight.lower, weight.upper)
    for rule in tuple(parts.rules):
        if _fits(rule, weight.over) and parts.take(rule.statistic, rule.over):
            low, high = rule.lower, rule.upper
            if rule.statistic == "k1":  # +Δ there
                low, high = (None if bound is None else -bound for bound in (rule.upper, rule.lower))
            level = "token" if rule.over == "token" else "sequence"
            return _bounded(level, "mask", METRICS[rule.statistic], low, high, rule.over)
    return config.cannot("untruncated weights without a rejection by one of its metrics")


def _fits(rule: Reject, over: str) -> bool:
    """Return whether the rule does not change the weight; a rule on sequence ratios makes it their mean."""
    if rule.statistic not in METRICS or rule.over == "batch":
        return False
    if rule.statistic == "ratio" and rule.over != "token":
        return over == "mean" and rule.over in ("mean", "sum", "max")
    return over == "token" and rule.over in ("token", "mean", "sum")


def _bounded(
    level: str, action: str, metric: str, low: float | None, high: float | None, agg: str = "mean"
) -> Settings:
    if high is None:
        config.cannot("a rule without an upper bound")
    if metric == "ratio" and high <= 1:
        config.cannot("an upper bound of the ratio that is not above 1")
    aggregate = {"agg": agg} if level == "sequence" else {}
    return {"level": level, "action": action, "metric": metric, **aggregate, "upper": high, "lower": low}


def _loss(preset: Preset) -> Settings:
    if preset.loss == "sapo":
        taus = {"tau_positive": "sapo_tau_pos", "tau_negative": "sapo_tau_neg"}
        return {"use_sapo_loss": True, **config.shape_settings(preset, taus)}
    if preset.loss == "cispo":
        low, high = config.clip_bounds(preset)
        if high <= 0:
            config.cannot("CISPO without an upper bound above 1")
        return {"use_cispo_loss": True, CLIP.low: low, CLIP.high: high}
    gspo = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**gspo, **config.clip_settings(preset, CLIP)}


def _before(preset: Preset) -> tuple[Snippet, ...]:
    """The keys of before 1.0.4, where they suffice: an upper bound, or M2PO without weights."""
    try:
        settings = {**DECOUPLED, **_cap(Parts(preset)), **_loss(preset)}
    except ConfigError:
        return ()
    return schema.older("areal", "yaml", config.prefixed(ACTOR, settings))


def _cap(parts: Parts) -> Settings:
    parts.need(("old",), ("ppo_clip",))
    moment = parts.take("k2", "batch", "upper") if parts.weight is None else None
    if moment is not None:
        parts.finish()
        threshold = 2 * (moment.upper or 0.0)
        return {
            "behave_imp_weight_mode": "disabled",
            "behave_imp_weight_cap": None,
            "m2_threshold": threshold,
        }
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or config.cannot("no weight")
    band, mode = parts.take_band(over), "mask"
    low, high = band or (None, None)
    if band is None:
        weight, mode = parts.take_weight(over, actions=("truncate",)), "truncate"
        high = weight.upper if weight else None
    parts.finish()
    if low is not None or high is None:
        config.cannot("a lower bound")
    return {"behave_imp_weight_cap": high, "behave_imp_weight_mode": f"{level}_{mode}"}


def _guards(preset: Preset, snippets: tuple[Snippet, ...]) -> Guards:
    return Guards(denominator="kept" if _over_batch(preset) else "all")


TRAINER = Trainer("areal", areal, _guards, CLIP, LOGS)
