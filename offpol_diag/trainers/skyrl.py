"""SkyRL: corrections that edit the loss mask one after the other; trainer.algorithm.off_policy_correction.

Logged numbers are those of off_policy_correction_utils.py, ppo_utils.py and trainer.py; log r is clamped to
±20. The corrections are outliers, tokens, weight, sequences, and each number is over what the earlier ones
left. Its fractions of sequences count rows without a token too. Three losses are against the rollout.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from offpol_diag.presets import Over, Preset, Weight
from offpol_diag.trainers import schema
from offpol_diag.trainers.base import (
    DISTANCE,
    EXCESS,
    RATIO_HELD,
    SAFETY,
    SQUARED,
    Entry,
    Log,
    Measure,
    Range,
    Rows,
    Side,
    Sum,
    Totals,
    Value,
    When,
    half_veto,
    highest,
    squared,
    std,
)
from offpol_diag.trainers.config import (
    IDLE_HIGH,
    IDLE_LOW,
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
    no_dual_clip,
)
from offpol_diag.trainers.schema import block

if TYPE_CHECKING:
    from torch import Tensor

    from offpol_diag.trainers.view import Tokens, View


def _corrects(preset: Preset) -> bool:
    """Return whether the loss is anchored at π_old, and so has separate corrections."""
    return preset.policy == "old"


def _anchored(preset: Preset) -> bool:
    """Return whether the loss's own ratio is π_θ/π_rollout, which is then the correction."""
    return preset.policy == "current"


def _cispo(preset: Preset) -> bool:
    return _anchored(preset) and preset.weight is not None and preset.weight.action == "truncate"


def _outliers(preset: Preset) -> bool:
    return _corrects(preset) and preset.veto is not None


def _token_mask(preset: Preset) -> bool:
    return _corrects(preset) and any(rule.over == "token" for rule in preset.reject)


def _weighs(over: str) -> When:
    return lambda preset: _corrects(preset) and preset.weight is not None and preset.weight.over == over


def _counts_left(preset: Preset) -> bool:
    return _token_mask(preset) or _weighs("token")(preset)


def _masks(over: str) -> When:
    return lambda preset: _corrects(preset) and any(rule.over == over for rule in preset.reject)


# ---------------------------------------------------------------- sums


def _token_rules(preset: Preset) -> Preset:
    """Return the preset with only its rules on tokens."""
    return replace(preset, reject=tuple(rule for rule in preset.reject if rule.over == "token"))


def _beyond(x: Tensor, edge: float | None, sign: int) -> Tensor:
    """Flag where x, a log clamped to ±20, is above (sign 1) or below (−1) log(edge)."""
    return x != x if edge is None else x.clamp(-SAFETY, SAFETY) * sign > math.log(edge) * sign


def _outlier(side: Side | None) -> Rows:
    """Flag rows with a token beyond the outlier bounds, or beyond one of them."""

    def of(view: View) -> Tensor:
        veto = view.preset.veto
        return (view.veto_hits(half_veto(veto, side) if side else veto) > 0) + view.zeros

    return of


def _left_by_tokens(view: View) -> Tensor:
    """Count the tokens that the outlier and token masks keep, [S]."""
    return view.left_by(_token_rules(view.preset))


def _capped_tokens(view: View) -> Tensor:
    """Count the kept tokens whose r is above the weight's cap, [S]."""
    return view.total(CAPPED)


def _capped(x: Tokens) -> Tensor:
    weight, left = x.preset.weight or Weight(), x.left_by(_token_rules(x.preset))
    above = _beyond(x.delta, weight.upper, 1)
    return above if left is None else above & left


def _capped_rows(view: View) -> Tensor:
    """Flag rows whose product of r over kept tokens is above the weight's cap."""
    total = view.aggregate_of_left("sum", _token_rules(view.preset))
    return _beyond(total, (view.preset.weight or Weight()).upper, 1) + view.zeros


def _row_masked(over: Over, side: Side) -> Rows:
    """Rows whose geometric mean (over = mean) or product (sum) of what is left lies beyond one bound."""

    def of(view: View) -> Tensor:
        x = view.aggregate_of_left(over, _token_rules(view.preset))
        rules = (rule for rule in view.preset.reject if rule.over == over)
        flags = (_beyond(x, getattr(rule, side), 1 if side == "upper" else -1) for rule in rules)
        return (sum(flags, view.zeros) > 0) + view.zeros

    return of


def _clips(x: Tokens) -> Tensor:
    """Tokens where the clipped objective of π_θ/π_old is below the unclipped one."""
    a, clip, u = x.advantages, x.preset.clip, x.of("current").delta - x.delta
    high = None if clip.high is None else 1 + clip.high
    low = None if clip.low is None or clip.low >= 1 else 1 - clip.low
    return (_beyond(u, high, 1) & (a > 0)) | (_beyond(u, low, -1) & (a < 0))


def _clipped_anchored(view: View) -> Tensor:
    """Tokens whose weight is cut or zeroed, or that the loss's own mask drops."""
    weighed, dropped = view.weighed, view.n - view.kept_tokens
    return dropped if weighed is None else dropped + weighed.high + weighed.low


EXCESS_HELD = Measure("r − 1, Δ within ±20", lambda x: x.excess(SAFETY), near=EXCESS)
CLIPS = Measure("the clip acts", _clips, own=True)
CAPPED = Measure("above the cap", _capped, own=True)
ROW_MASKS: dict[str, Over] = {"geo": "mean", "product": "sum"}
BEYOND: dict[str, Side] = {"over_high": "upper", "under_low": "lower"}

SUMS = (
    Sum("r − 1", lambda view: view.total(EXCESS_HELD)),
    Sum("(r − 1)²", lambda view: view.total(squared(EXCESS_HELD))),
    Sum("|d|", lambda view: view.total(DISTANCE)),
    Sum("d²", lambda view: view.total(SQUARED)),
    Sum("outlier masked", _outlier(None), own=True, when=_outliers),
    *(Sum(f"outlier {side}", _outlier(of), own=True, when=_outliers) for side, of in BEYOND.items()),
    Sum(
        "after outliers",
        lambda view: view.left_by(replace(view.preset, reject=())),
        own=True,
        when=_token_mask,
    ),
    Sum("after tokens", _left_by_tokens, own=True, when=_counts_left),
    Sum("capped tokens", _capped_tokens, own=True, when=_weighs("token")),
    Sum("capped rows", _capped_rows, own=True, when=_weighs("sum")),
    *(
        Sum(f"{name} {side}", _row_masked(over, of), own=True, when=_masks(over))
        for name, over in ROW_MASKS.items()
        for side, of in BEYOND.items()
    ),
    Sum(
        "clipped",
        lambda view: view.total(CLIPS),
        own=True,
        when=_corrects,
        needs=("current", "old", "advantages"),
    ),
    Sum("clipped anchored", _clipped_anchored, own=True, when=_anchored),
    Sum("weight", lambda view: view.all_weights, own=True, when=_cispo),
)
RANGES = (
    Range("r", lambda view: view.ends(RATIO_HELD)),
    Range("|d| of a token", lambda view: view.ends(DISTANCE)),
)

# ---------------------------------------------------------------- what is logged


def _hole(totals: Totals) -> float:
    """Entries of SkyRL's padded batch, rows × longest response, that are no loss token."""
    return totals.rows * totals.longest - totals.tokens


def _ratio_std(totals: Totals) -> float:
    hole = _hole(totals)
    return std(totals("r − 1") - hole, totals("(r − 1)²") + hole, totals.tokens + hole)


def _padded_min(column: str) -> Value:
    """Over the padded batch, where everything that is no loss token counts as 0."""
    return lambda totals: min(totals.low(column), 0.0) if _hole(totals) else totals.low(column)


def _per_token(column: str, of: str | None = None) -> Value:
    """Over the tokens of a stage, or over all."""
    return lambda totals: totals(column) / max(totals(of) if of else totals.tokens, 1.0)


def _per_row(*names: str) -> Value:
    return lambda totals: sum(map(totals, names)) / totals.rows


def _row_mask(name: str, over: str) -> tuple[Entry, ...]:
    words = {"geo": "geometric mean", "product": "product"}
    what = (
        "of r = π_old/π_rollout, over the tokens that the outlier and token masks left (1 where none is), "
        "is beyond {}, as a share of all rows"
    )
    both = tuple(f"{name} {side}" for side in BEYOND)
    return (
        Entry(
            f"{name}_sequence_mask_masked_ratio",
            f"sequences whose {words[name]} {what.format('either bound')}: not what all masks drop together",
            _per_row(*both),
            _masks(over),
        ),
        *(
            Entry(
                f"{name}_sequence_mask_{side}_ratio",
                f"sequences whose {words[name]} {what.format(f'the {of} bound')}",
                _per_row(f"{name} {side}"),
                _masks(over),
            )
            for side, of in BEYOND.items()
        ),
    )


CORRECTIONS = (
    Entry(
        "is_ratio_mean",
        "r = π_old/π_rollout with log r clamped to ±20, mean over the loss tokens before any mask or cap: "
        "not the mean weight. W&B has these names under policy/loss_metrics/, averaged over micro-batches",
        lambda p: 1 + p("r − 1") / p.tokens,
        _corrects,
    ),
    Entry(
        "is_ratio_std",
        "standard deviation over the whole padded batch, where everything that is no loss token counts as a "
        "ratio of 0 (here: rows × longest response of the dump, masked tokens included); so it says how much "
        "padding there is before it says how far r spreads",
        _ratio_std,
        _corrects,
    ),
    Entry(
        "is_ratio_max",
        "the largest r of any loss token, e^20 at most",
        highest("r"),
        _corrects,
    ),
    Entry(
        "is_ratio_min",
        "0 as soon as one entry of the padded batch is masked or padding, else the smallest r: rarely a "
        "ratio",
        _padded_min("r"),
        _corrects,
    ),
    Entry(
        "outlier_seq_masked_ratio",
        "rows with a token whose r is below the low or above the high threshold, as a share of all rows",
        _per_row("outlier masked"),
        _outliers,
    ),
    Entry(
        "outlier_seq_over_high_ratio",
        "rows with a token above the high threshold; a row can count here and below",
        _per_row("outlier over_high"),
        _outliers,
    ),
    Entry(
        "outlier_seq_under_low_ratio",
        "rows with a token below the low threshold",
        _per_row("outlier under_low"),
        _outliers,
    ),
    Entry(
        "token_mask_ratio",
        "tokens with r outside the token mask's band, as a share of those that the outlier mask left",
        lambda p: (p("after outliers") - p("after tokens")) / max(p("after outliers"), 1.0),
        _token_mask,
    ),
    Entry(
        "tis_token_clip_high_ratio",
        "tokens with r above the cap, as a share of those that the outlier and token masks left",
        _per_token("capped tokens", "after tokens"),
        _weighs("token"),
    ),
    Entry(
        "tis_seq_clip_high_ratio",
        "sequences whose product of r over the tokens left is above the cap, as a share of all rows; a row "
        "with nothing left has the product 1",
        _per_row("capped rows"),
        _weighs("sum"),
    ),
    *(entry for name, over in ROW_MASKS.items() for entry in _row_mask(name, over)),
    Entry(
        "clip_ratio",
        "loss tokens where PPO's clip of π_θ/π_old acts (upwards with A > 0, downwards with A < 0), whatever "
        "the corrections drop; needs π_θ, π_old and advantages",
        _per_token("clipped"),
        _corrects,
    ),
)

ANCHORED = (
    Entry(
        "clip_ratio",
        "loss tokens whose π_θ/π_rollout the loss cuts, zeroes or masks, as a share of all",
        _per_token("clipped anchored"),
        _anchored,
    ),
    Entry(
        "cispo/ratio_mean",
        "π_θ/π_rollout before the clamp to its bounds (but with its log within ±20), mean over loss tokens",
        lambda p: 1 + p("r − 1") / p.tokens,
        _cispo,
    ),
    Entry(
        "cispo/ratio_clamped_mean", "the same after the clamp: the mean weight", _per_token("weight"), _cispo
    ),
    Entry("cispo/ratio_max", "the largest π_θ/π_rollout of a loss token", highest("r"), _cispo),
    Entry(
        "cispo/ratio_min",
        "the smallest π_θ/π_rollout of a loss token; unlike is_ratio_min no padding enters",
        lambda p: p.low("r"),
        _cispo,
    ),
)

SIZES = {
    "mean": ("mean over the loss tokens of the batch", _per_token("|d|")),
    "max": ("largest of any loss token", highest("|d| of a token")),
    "min": ("smallest of any loss token", lambda p: p.low("|d| of a token")),
}


Worded = tuple[str, Value]


def _distances(stem: str, what: str, when: When, **said: Worded) -> tuple[Entry, ...]:
    each = {**SIZES, **said}
    return tuple(Entry(f"{stem}_{name}", f"{what}, {text}", of, when) for name, (text, of) in each.items())


def _sample_std(totals: Totals) -> float:
    return std(totals("|d|"), totals("d²"), totals.tokens)


def _population_std(totals: Totals) -> float:
    return std(totals("|d|"), totals("d²"), totals.tokens, less=0)


ENTRIES = (
    *CORRECTIONS,
    *ANCHORED,
    *_distances(
        "policy/rollout_train_logprobs_abs_diff",
        "|log π_old − log π_rollout|, unclamped",
        _corrects,
        std=("standard deviation over loss tokens, n − 1 below", _sample_std),
    ),
    *_distances(
        "policy/minibatch_rollout_logprobs_abs_diff",
        "|log π_θ − log π_rollout|, unclamped, which SkyRL logs where it takes no pass for π_old",
        _anchored,
        min=(
            "0 as soon as one entry of the padded batch is masked or padding, else the smallest: rarely a "
            "difference (worker_utils.py:48-57 of a9564572e)",
            _padded_min("|d| of a token"),
        ),
        std=("standard deviation over loss tokens, n below", _population_std),
    ),
)

LOG = Log("skyrl", SUMS, RANGES, ENTRIES)

# ---------------------------------------------------------------- configuration

ALGORITHM, CORRECTION = "trainer.algorithm.", "off_policy_correction."
DUAL = "clip_ratio_c"


def _dual(bound: float) -> str:
    return f"policy_loss_type is dual_clip and {DUAL} is {bound:g}"


CLIP = ClipKeys("eps_clip_low", "eps_clip_high", DUAL, dual_said=_dual)
IDLE = "bounds of 1.0e-9 and 1.0e+9 are idle: log-ratios are clamped to ±20"
ORDER = "outliers, token mask, weights, sequence mask, in that order: each over what the one before has left"


def skyrl(preset: Preset) -> Said:
    """Overrides, and the same as YAML."""
    parts = Parts(preset)
    settings = _bypass(parts) if parts.policy == "current" else _decoupled(parts)
    parts.finish()
    said = {ALGORITHM + key: value for key, value in settings.items()}
    said["generator.sampling_params.logprobs"] = 1
    snippets = (
        block("skyrl", "hydra", schema.hydra(said), said),
        block("skyrl", "yaml", schema.yaml(said), said, "as YAML"),
    )
    idle = {IDLE_LOW, IDLE_HIGH} & {value for value in settings.values() if isinstance(value, float)}
    several = len(preset.reject) + bool(preset.veto) > 1 or any(
        rule.among == "left" for rule in preset.reject
    )
    dual = settings.get("policy_loss_type") == "regular"
    remarks = clip_remarks(preset, CLIP) if dual else ()
    return snippets, (*((IDLE,) if idle else ()), *((ORDER,) if several else ()), *remarks)


def _decoupled(parts: Parts) -> Settings:
    parts.need(("old",), ("ppo_clip", "gspo", "cispo"))
    tokens = any(rule.on_tokens for rule in parts.rules)
    found = {
        **_said_outliers(parts),
        **_said_token_mask(parts),
        **_said_weight(parts, tokens),
        **_sequence_mask(parts, tokens),
    }
    return {**{CORRECTION + key: value for key, value in found.items()}, **_loss(parts.preset)}


def _said_outliers(parts: Parts) -> Settings:
    veto = parts.take_veto(upper=True)
    bounds = {"low": veto.lower, "high": veto.upper} if veto else {}
    return {f"outlier_token_is_threshold_{side}": value for side, value in bounds.items()}


def _said_token_mask(parts: Parts) -> Settings:
    parts.split_mask()
    rule = parts.take("ratio", "token")
    if rule is None:
        return {}
    return {
        "token_mask_is_threshold_low": IDLE_LOW if rule.lower is None else rule.lower,
        "token_mask_is_threshold_high": IDLE_HIGH if rule.upper is None else rule.upper,
    }


def _said_weight(parts: Parts, tokens: bool) -> Settings:
    weight = parts.weight
    if weight is None:
        return {"tis_ratio_type": None}
    if weight.over == "sum" and tokens and weight.among != "left":
        cannot("a product over tokens that its token mask has taken out")
    parts.take_weight("token", "sum")
    name = {"token": "token", "sum": "sequence"}[weight.over]
    return {"tis_ratio_type": name, f"{name}_tis_ratio_clip_high": _upper(weight)}


def _upper(weight: Weight) -> float:
    return IDLE_HIGH if weight.upper is None or weight.action == "none" else weight.upper


def _sequence_mask(parts: Parts, tokens: bool) -> Settings:
    for rule in tuple(parts.rules):
        name = {"mean": "geo", "sum": "product"}.get(rule.over)
        plain = (rule.statistic, rule.advantage, rule.policy, rule.strict) == ("ratio", "any", None, False)
        if name and plain and (rule.among == "left" or not tokens):
            parts.rules.remove(rule)
            return {
                "sequence_mask_metric": "geometric" if name == "geo" else "product",
                f"{name}_mask_low": IDLE_LOW if rule.lower is None else rule.lower,
                f"{name}_mask_high": IDLE_HIGH if rule.upper is None else rule.upper,
            }
    return {}


def _loss(preset: Preset) -> Settings:
    if preset.loss == "cispo":
        return {"policy_loss_type": "cispo", **_said_cispo(*clip_bounds(preset))}
    no_dual_clip(preset)
    clip = clip_settings(preset, CLIP)
    dual = clip.pop(DUAL, None)
    if preset.loss == "gspo":
        return {"policy_loss_type": "gspo", **clip}
    if dual is None:  # the usual one is a guard, said in a remark
        return {"policy_loss_type": "regular", **clip}
    return {"policy_loss_type": "dual_clip", **clip, DUAL: dual}


def _said_cispo(low: float, high: float) -> Settings:
    return {"cispo.cispo_eps_clip_low": low, "cispo.cispo_eps_clip_high": high}


# ---------------------------------------------------------------- against the rollout


def _bypass(parts: Parts) -> Settings:
    if parts.loss == "surrogate":
        return _dppo(parts)
    parts.need(("current",), ("reinforce",))
    weight = parts.weight
    if weight is None or weight.over != "token" or weight.normalize:
        cannot("REINFORCE against the rollout without token weights")
    if weight.action == "mask" and weight.strict:
        return _rollout_is(parts, weight)
    found = parts.take_weight("token", actions=("truncate",), lower=True)
    if found is None or found.upper is None:
        cannot("this weight")
    bounds = _said_cispo(1 - (found.lower or 0.0), found.upper - 1)
    return {"policy_loss_type": "cispo", "cispo.cispo_anchor": "rollout", **_short(bounds)}


def _rollout_is(parts: Parts, weight: Weight) -> Settings:
    if weight.lower is None or weight.upper is None:
        cannot("rollout_is without both bounds")
    parts.weight = None
    bounds = {"eps_clip_low": 1 - weight.lower, "eps_clip_high": weight.upper - 1}
    return {"policy_loss_type": "rollout_is", **_short(bounds)}


def _short(bounds: dict[str, float]) -> Settings:
    """1.2 − 1 is 0.2 in its config, not 0.19999999999999996."""
    return {key: float(f"{value:.15g}") for key, value in bounds.items()}


def _dppo(parts: Parts) -> Settings:
    parts.take_weight("token", actions=("none",))
    if len(parts.rules) != 1 or parts.preset.weight is None:
        cannot("this loss without exactly one mask")
    rule = parts.rules.pop()
    kind = {("prob_diff", "against"): "binary_tv", ("binary_kl", "away"): "binary_kl"}.get(
        (rule.statistic, rule.advantage)
    )
    low = rule.upper if kind == "binary_kl" else None if rule.lower is None else -rule.lower
    if kind is None or rule.over != "token" or rule.strict or low is None or rule.upper is None:
        cannot(f"a mask by {rule.statistic} with this condition on the advantage ({rule.advantage})")
    bounds = {"dppo.delta_low": low, "dppo.delta_high": rule.upper}
    return {"policy_loss_type": "dppo", "dppo.dppo_type": kind, **bounds}


TRAINER = Trainer("skyrl", skyrl, Habits(20.0, unclamped=frozenset({"prob_diff", "binary_kl"})), (LOG,))
