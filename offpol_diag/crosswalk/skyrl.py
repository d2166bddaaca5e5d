"""What SkyRL logs (off_policy_correction_utils.py, ppo_utils.py, trainer.py); log r is clamped to ±20.

Its corrections edit the loss mask one after the other (outliers, tokens, weight, sequences), and each number
is over what the earlier ones left. Its fractions of sequences count rows without a token too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable

from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk import skyrl_masks as masks
from offpol_diag.crosswalk.bounds import Side
from offpol_diag.crosswalk.keys import weighed
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page, Range
from offpol_diag.crosswalk.moments import spread, std
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Over, Preset

# ---------------------------------------------------------------- which rows log what


def _corrects(preset: Preset) -> bool:
    """The corrections of a loss that is anchored at π_old."""
    return preset.policy == "old"


def _anchored(preset: Preset) -> bool:
    """The losses whose own ratio is π_θ/π_rollout: they are the correction."""
    return preset.policy == "current"


def _cispo(preset: Preset) -> bool:
    return _anchored(preset) and preset.weight is not None and preset.weight.action == "truncate"


def _outliers(preset: Preset) -> bool:
    return _corrects(preset) and preset.veto is not None


def _token_mask(preset: Preset) -> bool:
    return _corrects(preset) and any(rule.over == "token" for rule in preset.reject)


def _weighs(over: str) -> Callable[[Preset], bool]:
    return lambda preset: _corrects(preset) and preset.weight is not None and preset.weight.over == over


def _counts_left(preset: Preset) -> bool:
    return _token_mask(preset) or _weighs("token")(preset)


def _masks(over: str) -> Callable[[Preset], bool]:
    return lambda preset: _corrects(preset) and any(rule.over == over for rule in preset.reject)


# ---------------------------------------------------------------- what is summed


def _veto(view: View) -> Hashable:
    return view.preset.veto


ROW_MASKS: dict[str, Over] = {"geo": "mean", "product": "sum"}
SIDES: dict[str, Side] = {"over_high": "upper", "under_low": "lower"}

SUMS = (
    Column("r − 1", lambda v: v.total(masks.EXCESS)),
    Column("(r − 1)²", lambda v: v.total(masks.EXCESS_SQUARED)),
    Column("|d|", lambda v: v.total(powers.DISTANCE)),
    Column("d²", lambda v: v.total(powers.SQUARED)),
    Column("outlier masked", masks.outlier_side(None), own=True, when=_outliers, by=_veto),
    *(
        Column(f"outlier {side}", masks.outlier_side(of), own=True, when=_outliers, by=_veto)
        for side, of in SIDES.items()
    ),
    Column("after outliers", masks.left_by_outliers, own=True, when=_token_mask, by=_veto),
    Column("after tokens", masks.left_by_tokens, own=True, when=_counts_left),
    Column("capped tokens", masks.capped_tokens, own=True, when=_weighs("token")),
    Column("capped rows", masks.capped_rows, own=True, when=_weighs("sum")),
    *(
        Column(f"{name} {side}", masks.row_masked(over, of), own=True, when=_masks(over))
        for name, over in ROW_MASKS.items()
        for side, of in SIDES.items()
    ),
    Column(
        "clipped",
        lambda v: v.count(masks.CLIPPED),
        own=True,
        when=_corrects,
        needs=("current", "old", "advantages"),
        by=lambda v: v.preset.clip,
    ),
    Column("clipped anchored", masks.clipped_anchored, own=True, when=_anchored, by=weighed),
    Column("weight", lambda v: v.pieces.weight_sum, own=True, when=_cispo, by=weighed),
)
EXTREMES = (
    Range("r", lambda v: v.ends(masks.RATIO)),
    Range("|d| of a token", lambda v: v.ends(powers.DISTANCE)),
)


# ---------------------------------------------------------------- what is logged


def _hole(page: Page) -> float:
    """Entries of SkyRL's padded batch, rows × longest response, that are no loss token."""
    return page.rows * page.longest - page.tokens


def _ratio_std(page: Page) -> float:
    hole = _hole(page)
    return std(page("r − 1") - hole, page("(r − 1)²") + hole, page.tokens + hole)


def _padded_min(column: str) -> Callable[[Page], float]:
    """Over the padded batch, where everything that is no loss token counts as 0."""
    return lambda page: min(page.low(column), 0.0) if _hole(page) else page.low(column)


def _per_token(column: str, of: str | None = None) -> Callable[[Page], float]:
    """Over the tokens of a stage, or over all."""
    return lambda page: page(column) / max(page(of) if of else page.tokens, 1.0)


def _per_row(*columns: str) -> Callable[[Page], float]:
    return lambda page: sum(page(column) for column in columns) / page.rows


def _row_mask(name: str, over: str) -> tuple[Entry, ...]:
    words = {"geo": "geometric mean", "product": "product"}
    what = (
        "of r = π_old/π_rollout, over the tokens that the outlier and token masks left (1 where none is), "
        "is beyond {}, as a share of all rows"
    )
    both = tuple(f"{name} {side}" for side in SIDES)
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
            for side, of in SIDES.items()
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
        lambda p: p.high("r"),
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
    Entry("cispo/ratio_max", "the largest π_θ/π_rollout of a loss token", lambda p: p.high("r"), _cispo),
    Entry(
        "cispo/ratio_min",
        "the smallest π_θ/π_rollout of a loss token; unlike is_ratio_min no padding enters",
        lambda p: p.low("r"),
        _cispo,
    ),
)

DISTANCE = {
    "mean": ("mean over the loss tokens of the batch", _per_token("|d|")),
    "max": ("largest of any loss token", lambda p: p.high("|d| of a token")),
    "min": ("smallest of any loss token", lambda p: p.low("|d| of a token")),
}


Said = tuple[str, Callable[[Page], float]]


def _distances(stem: str, what: str, when: Callable[[Preset], bool], **said: Said) -> tuple[Entry, ...]:
    each = {**DISTANCE, **said}
    return tuple(Entry(f"{stem}_{name}", f"{what}, {text}", of, when) for name, (text, of) in each.items())


def _sample_std(page: Page) -> float:
    return std(page("|d|"), page("d²"), page.tokens)


def _population_std(page: Page) -> float:
    return spread(page("|d|"), page("d²"), page.tokens) / math.sqrt(page.tokens)


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

BOOK = Ledger("skyrl", SUMS, EXTREMES, ENTRIES)
