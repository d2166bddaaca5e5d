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
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import (
    K1,
    K2,
    K3,
    KEPT,
    ONE,
    UPDATE,
    UPDATE_RATIO,
    WEIGHT,
    Absent,
    Ends,
    Entry,
    Log,
    Mask,
    Measure,
    Range,
    Rows,
    Sum,
    Totals,
    U,
    Value,
    When,
    always,
    among,
    applied,
    ends,
    under,
    where,
)
from offpol_diag.trainers.base import LOG as LOG_RATIO
from offpol_diag.trainers.config import (
    ClipKeys,
    Habits,
    Parts,
    Said,
    Settings,
    Snippet,
    Trainer,
    cannot,
    clip_remarks,
    clip_settings,
    remarks,
)
from offpol_diag.trainers.schema import block, older

if TYPE_CHECKING:
    from torch import Tensor

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
class Some:
    """A denominator: the tokens that a statistic averages over.

    Attributes:
        name: name of the count.
        tokens: selection of tokens within sequences.
        sequences: computes the flags of the sequences, [S] bool; some of them may have no token.
    """

    name: str
    tokens: Mask
    sequences: Rows

    def total(self, view: View, of: Measure) -> Tensor:
        """Return the sum of a measure over these tokens, [S]."""
        return view.total(of, self.tokens).masked_fill(~self.sequences(view), 0.0)

    def ends(self, view: View, of: Measure) -> Ends:
        """Return the minimum and maximum over these tokens of each sequence, [S] each."""
        return among(view.ends(of, self.tokens), self.sequences(view))

    def count(self, view: View) -> Tensor:
        """Count these tokens of each sequence, [S]."""
        return view.mine(("count", self.name), lambda: self.total(view, ONE))


def _valid(x: Tokens) -> Tensor | None:
    """Flag the tokens that M2PO keeps; None for all."""
    rules = _over_batch(x.preset)
    return x.left_by(replace(x.preset, reject=rules, veto=None)) if rules else None


def _with_weight(x: Tokens) -> Tensor | None:
    """Flag kept tokens; with token weights that can be 0, only those with a weight above 0."""
    if not _masks(x.preset) or x.weigh().final.per == "sequence":
        return x.kept
    above = x.weigh().final.values > 0
    return above if x.kept is None else above & x.kept


def _behaving(view: View) -> Tensor:
    weights = view.row_weights
    return view.kept & (weights > 0) if weights is not None and _masks(view.preset) else view.kept


VALID = Some("valid", Mask(_valid), lambda view: view.there)
"""n_valid_tokens."""
LEFT = Some("left", KEPT, lambda view: view.kept)
"""The loss mask after rejection sampling."""
BEHAVE = Some("behave", Mask(_with_weight), _behaving)
"""unclipped_behave_tokens; without rejection sampling there is no such mask, and all valid ones count."""

# ---------------------------------------------------------------- what is summed

V, V_SQUARED, V_DUAL = (under(of, "current") for of in (K1, K2, K3))
"""K1, K2, K3 of π_θ against π_rollout."""


def _dropped(view: View) -> Tensor:
    """Count the valid tokens that are dropped, [S]."""
    return VALID.count(view) - LEFT.count(view)


def _masked_ratio(view: View) -> Ends:
    """The smallest and largest ratio kept, and 0 for each sequence that lost a token."""
    low, high = LEFT.ends(view, UPDATE_RATIO)
    lost = _dropped(view) > 0
    return where(lost, low.clamp(max=0.0), low), where(lost, high.clamp(min=0.0), high)


def _weighted(view: View) -> Tensor:
    """Σ of the weights over behave tokens."""
    rows = view.row_weights
    return BEHAVE.total(view, WEIGHT) if rows is None else rows * BEHAVE.count(view)


def _weight_ends(view: View) -> Ends:
    """The smallest and largest of the weights of behave tokens."""
    rows = view.row_weights
    return BEHAVE.ends(view, WEIGHT) if rows is None else ends(rows, BEHAVE.count(view) > 0)


def _changed(view: View) -> Tensor:
    """Count the valid tokens that are dropped or have a clamped weight, [S]."""
    rule = view.preset.weight
    return _dropped(view) + (view.capped() if rule and rule.action == "truncate" else 0.0)


@dataclass(frozen=True)
class Stat:
    """A statistic that is logged as average, minimum and maximum.

    Attributes:
        name: name in the tracker, below the scope.
        meaning: the averaged quantity.
        of: the measure of each token.
        over: the denominator.
        when: predicate: the presets under which it is logged.
        needs: required fields of the batch.
        total: computes the sum per sequence, if it is not the sum of `of` over `over`.
        ends: computes the extremes per sequence, likewise.
    """

    name: str
    meaning: str
    of: Measure
    over: Some
    when: When = always
    needs: tuple[str, ...] = UPDATE
    total: Rows | None = None
    ends: Callable[[View], Ends] | None = None

    def sum(self) -> Sum:
        """Σ over its denominator."""
        of = self.total or (lambda view: self.over.total(view, self.of))
        return Sum(self.name, of, own=True, when=self.when, needs=self.needs)

    def range(self) -> Range:
        """Its extremes."""
        of = self.ends or (lambda view: self.over.ends(view, self.of))
        return Range(self.name, of, own=True, when=self.when, needs=self.needs)

    def entries(self) -> tuple[Entry, ...]:
        """avg, min, max."""
        per = "behave" if self.over is BEHAVE else "valid"
        values: dict[str, tuple[str, Value]] = {
            "avg": ("mean", lambda totals: totals(self.name) / _count(totals, per)),
            "min": ("smallest", lambda totals: _count(totals, per) and totals.low(self.name)),
            "max": ("largest", lambda totals: _count(totals, per) and totals.high(self.name)),
        }
        return tuple(
            Entry(f"{SCOPE}{self.name}/{end}", f"{self.meaning} The {word}.", of, self.when)
            for end, (word, of) in values.items()
        )


def _count(totals: Totals, per: str) -> float:
    """Return the number of tokens of the denominator.

    Raises:
        Absent: there are none.
    """
    found = totals(per)
    if found == 0:
        raise Absent(per)
    return found


_BEHAVE = "over tokens that are kept with a weight above 0"
STATS = (
    Stat(
        "importance_weight",
        "π_θ/π_old over the valid tokens (after M2PO), with 0 for each token that rejection sampling drops: "
        "the loss's own ratio, not the mismatch, and lower the more is dropped.",
        UPDATE_RATIO,
        LEFT,
        _of_tokens,
        ends=_masked_ratio,
    ),
    Stat(
        "approx_kl",
        "log π_θ − log π_old over the valid tokens, dropped ones included: the opposite sign of ppo_kl "
        "elsewhere.",
        U,
        VALID,
        _of_tokens,
    ),
    Stat(
        "behave_imp_weight",
        f"π_old/π_rollout after masking or clamping, {_BEHAVE}: a mean of survivors, which hides what was "
        "dropped; at level sequence with the ratio it is the geometric mean, by tokens.",
        WEIGHT,
        BEHAVE,
        _samples,
        (),
        _weighted,
        _weight_ends,
    ),
    Stat(
        "behave_approx_kl",
        f"log π_old − log π_rollout, {_BEHAVE}; of the token itself at every level, and unclamped: the "
        "opposite sign of k1.",
        LOG_RATIO,
        BEHAVE,
        _samples,
        (),
    ),
    Stat(
        "compute_logp/kl_div_direct",
        f"log π_rollout − log π_θ, {_BEHAVE}: k1 of both drifts together, with π_θ where others have π_old.",
        V,
        BEHAVE,
    ),
    Stat(
        "compute_logp/kl_div_taylor",
        f"(log π_θ − log π_rollout)²/2, {_BEHAVE}: k2 of both drifts together.",
        V_SQUARED,
        BEHAVE,
    ),
    Stat(
        "compute_logp/kl_div_dual",
        f"r − 1 − log r with r = π_θ/π_rollout, {_BEHAVE}: k3 of both drifts together, unclamped.",
        V_DUAL,
        BEHAVE,
    ),
)

SUMS = (
    Sum("valid", VALID.count, own=True),
    Sum("behave", BEHAVE.count, own=True),
    *(stat.sum() for stat in STATS),
)
CHANGED = Sum("changed", _changed, own=True, when=_filters)
RANGES = tuple(stat.range() for stat in STATS)
ENTRIES = tuple(entry for stat in STATS for entry in stat.entries())
SHARE = Entry(
    f"{SCOPE}rs_filtered_fraction",
    "Share of the valid tokens that rejection sampling drops (action mask) or whose weight it changes "
    "(action clamp). The trainer averages it over micro-batches, each weighing the same; here it is of "
    "the whole dump. The cap of v1.0.3 and older does not log it (`areal-v1.0.3`).",
    lambda totals: totals("changed") / max(totals("valid"), 1),
    _filters,
)
LOGS = (
    Log("areal", (*SUMS, CHANGED), RANGES, (*ENTRIES, SHARE)),
    Log("areal-v1.0.3", SUMS, RANGES, ENTRIES),
)
"""The second is that of `behave_imp_weight_cap`, up to v1.0.3: actor.py:536-542 there, without the share."""

# ---------------------------------------------------------------- configuration

ACTOR, RULE = "actor.", "rejection_sampling."
CLIP = ClipKeys("eps_clip", "eps_clip_higher", "c_clip")
LEVELS = {"token": "token", "mean": "sequence"}
METRICS = {"ratio": "ratio", "k1": "kl_k1", "k2": "kl_k2", "k3_reverse": "kl_k3"}
BYPASS = {"use_decoupled_loss": False, "recompute_logprob": False}
RECOMPUTE = {"use_decoupled_loss": False, "recompute_logprob": True}
DECOUPLED = {"use_decoupled_loss": True, "recompute_logprob": True}


def areal(preset: Preset) -> Said:
    """Translate a preset: bypass, recompute, or the decoupled loss with one rule."""
    parts = Parts(preset)
    parts.need(("old", "current"), ("ppo_clip", "gspo"))
    settings = {**_correction(parts), **_loss(preset)}
    parts.finish()
    now = {ACTOR + key: value for key, value in settings.items()}
    snippets = (block("areal", "yaml", schema.yaml(now), now), *_before(preset))
    return snippets, (*_remarks(settings), *clip_remarks(preset, CLIP))


def _correction(parts: Parts) -> Settings:
    if parts.policy == "current":
        return dict(BYPASS)
    if parts.weight is None:
        moment = parts.take("k2", "batch", "upper")
        if moment is None:
            return dict(RECOMPUTE)
        return {**DECOUPLED, "rejection_sampling": None, **_moment(moment)}
    if parts.loss == "gspo":
        cannot("weights under the GSPO loss")
    return {**DECOUPLED, **{RULE + key: value for key, value in _rule(parts).items()}}


def _moment(rule: Reject) -> Settings:
    """Require the decoupled loss, which alone keeps the rollout's log-probs beside the recomputed ones."""
    return {"m2_threshold": 2 * (rule.upper or 0.0)}


def _rule(parts: Parts) -> Settings:
    parts.split_mask()
    parts.drop_idle()
    weight = parts.take_weight(*LEVELS, lower=True)
    if weight is None:
        cannot("this weight")
    level = LEVELS[weight.over]
    if weight.action == "truncate":
        return _bounded(level, "clamp", "ratio", weight.lower, weight.upper)
    for rule in tuple(parts.rules):
        if _fits(rule, weight.over) and parts.take(rule.statistic, rule.over):
            return _masked(rule)
    return cannot("untruncated weights without a rejection by one of its metrics")


def _fits(rule: Reject, over: str) -> bool:
    """Return whether the rule does not change the weight; a rule on sequence ratios makes it their mean."""
    if rule.statistic not in METRICS or rule.over == "batch":
        return False
    if rule.statistic == "ratio" and rule.over != "token":
        return over == "mean" and rule.over in ("mean", "sum", "max")
    return over == "token" and rule.over in ("token", "mean", "sum")


def _masked(rule: Reject) -> Settings:
    metric, low, high = METRICS[rule.statistic], rule.lower, rule.upper
    if rule.statistic == "k1":  # +Δ there
        low, high = (None if bound is None else -bound for bound in (rule.upper, rule.lower))
    if rule.over == "token":
        return _bounded("token", "mask", metric, low, high)
    return _bounded("sequence", "mask", metric, low, high, rule.over)


def _bounded(
    level: str, action: str, metric: str, low: float | None, high: float | None, agg: str = ""
) -> Settings:
    if high is None:
        cannot("a rule without an upper bound")
    if metric == "ratio" and high <= 1:
        cannot("an upper bound of the ratio that is not above 1")
    aggregate = {"agg": agg or "mean"} if level == "sequence" else {}
    return {"level": level, "action": action, "metric": metric, **aggregate, "upper": high, "lower": low}


def _loss(preset: Preset) -> Settings:
    gspo = {"importance_sampling_level": "sequence"} if preset.loss == "gspo" else {}
    return {**gspo, **clip_settings(preset, CLIP)}


def _remarks(settings: Settings) -> tuple[str, ...]:
    metric = str(settings.get(RULE + "metric", ""))
    return remarks(
        metric and "a log-ratio that is not finite counts as 0 here (weight 1)",
        metric == "kl_k1" and "kl_k1 is +log r here, the opposite sign of k1 elsewhere",
        metric == "kl_k3" and "kl_k3 is of π_rollout/π_train here, whatever its help says",
        "m2_threshold" in settings
        and "m2_threshold is on the mean of the squared log-ratio, and per micro-batch here",
        settings.get("importance_sampling_level") and "the advantage is averaged per sequence here",
    )


def _before(preset: Preset) -> tuple[Snippet, ...]:
    """The keys of before 1.0.4, where they can say it: an upper bound, or M2PO without weights."""
    try:
        settings = _cap(Parts(preset))
    except ConfigError:
        return ()
    said = {ACTOR + key: value for key, value in {**DECOUPLED, **settings, **_loss(preset)}.items()}
    return older("areal", "yaml", schema.yaml(said), said)


def _cap(parts: Parts) -> Settings:
    parts.need(("old",), ("ppo_clip",))
    moment = parts.take("k2", "batch", "upper") if parts.weight is None else None
    if moment is not None:
        parts.finish()
        return {"behave_imp_weight_mode": "disabled", "behave_imp_weight_cap": None, **_moment(moment)}
    over = parts.weight.over if parts.weight else ""
    level = LEVELS.get(over) or cannot("no weight")
    band, mode = parts.take_band(over), "mask"
    low, high = band or (None, None)
    if band is None:
        weight, mode = parts.take_weight(over, actions=("truncate",)), "truncate"
        high = weight.upper if weight else None
    parts.finish()
    if low is not None or high is None:
        cannot("a lower bound")
    return {"behave_imp_weight_cap": high, "behave_imp_weight_mode": f"{level}_{mode}"}


def _habits(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    return Habits(denominator="kept" if _over_batch(preset) else "all")


TRAINER = Trainer("areal", areal, _habits, LOGS)
