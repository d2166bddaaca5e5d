"""What prime-rl logs (trainer/rl/loss.py, train.py): r = π_θ/π_rollout, nothing clamped.

What its loss function returns is a mean per sequence, which the trainer then takes the mean and the maximum
of; a sequence without a loss token counts there as 0. The rows of v0.2 log other names.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.bounds import Side, bound, half, half_veto
from offpol_diag.crosswalk.ends import rows
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page, Range
from offpol_diag.crosswalk.moments import std
from offpol_diag.crosswalk.view import KEPT, Mask, Measure, View, kept
from offpol_diag.presets import Over, Preset, Veto
from offpol_diag.ratios import Level

LARGEST = 1e30
"""Where newer versions cut one token's mismatch KL off; older ones log inf beyond float32."""


def _kl(view: View) -> Tensor:
    return (powers.excess(view.ratios).clamp(max=LARGEST) - view.ratios.delta).clamp(max=LARGEST)


def _kl_squared(view: View) -> Tensor:
    return view.values(KL).square()


KL = Measure("prime-rl kl", _kl)
KL_SQUARED = Measure("prime-rl kl²", _kl_squared)


def _per(x: Tensor, tokens: Tensor) -> Tensor:
    """Per sequence, a mean over that many of its tokens; 0 where there is none."""
    return x / tokens.clamp(min=1)


def _failed(view: View) -> Tensor | None:
    """Tokens that the rules on tokens drop, [T] bool."""
    kept = view.done.kept.tokens
    return (
        view.ratios.once("none", lambda: torch.zeros_like(view.ratios.delta, dtype=torch.bool))
        if kept is None
        else ~kept
    )


FAILED = Mask(_failed, lambda view: ("failed", KEPT.by(view)))


def _over_dropped(view: View, of: Measure) -> Tensor:
    """Σ over the tokens that the rules drop: all of a sequence that is dropped as a whole, [S]."""
    return torch.where(view.pieces.sequences, view.total(of, FAILED), view.total(of))


def _dropped(view: View) -> Tensor:
    """How many tokens the preset's rules drop, [S]."""
    return view.n - view.pieces.kept_tokens


def _signed(sign: int) -> Measure:
    """1 for tokens whose advantage has that sign; without advantages for all."""

    def of(view: View) -> Tensor:
        a = view.batch.advantages
        return torch.ones_like(view.ratios.delta) if a is None else (a * sign > 0).to(torch.float64)

    return Measure(f"A has sign {sign}", of)


HIGH, LOW = _signed(1), _signed(-1)


def _dropped_signed(view: View, of: Measure) -> Tensor:
    return view.once(("dropped", of.name), lambda: _over_dropped(view, of))


def _dropped_kl(view: View) -> Tensor:
    return _over_dropped(view, KL)


def _kept_kl(view: View) -> Tensor:
    return torch.where(view.pieces.sequences, view.total(KL, KEPT), 0.0)


# ---------------------------------------------------------------- which rows log what


def _now(preset: Preset) -> bool:
    """The losses since 2026-03, whose masks are on probability differences."""
    return any(rule.statistic == "prob_diff" for rule in preset.reject)


def _then(preset: Preset) -> bool:
    return not _now(preset)


def _default(preset: Preset) -> bool:
    """The loss whose mask looks at the advantage; `ipo` logs less."""
    return any(rule.statistic == "prob_diff" and rule.advantage != "any" for rule in preset.reject)


# ---------------------------------------------------------------- masks of v0.2


def _bands(view: View, over: Over, side: Side) -> list[Level]:
    """What each band of r lets through on one side alone: tokens or sequences."""
    rules = [rule for rule in view.preset.reject if rule.statistic == "ratio" and rule.over == over]
    ratios = view.far
    return [correction.passes(ratios, half(rule, side)) for rule in rules if bound(rule, side) is not None]


def _tokens_outside(side: Side) -> Callable[[View], Tensor]:
    def of(view: View) -> Tensor:
        gone = [~passed.values for passed in _bands(view, "token", side)]
        return (
            segments.count(reduce(torch.logical_or, gone), view.far.batch.cu_seqlens) if gone else view.zeros
        )

    return of


def _sequences_outside(side: Side) -> Callable[[View], Tensor]:
    def of(view: View) -> Tensor:
        gone = [~passed.values for passed in _bands(view, "mean", side)]
        return reduce(torch.logical_or, gone).to(torch.float64) if gone else view.zeros

    return of


def _vetoed(side: Side) -> Callable[[View], Tensor]:
    def of(view: View) -> Tensor:
        veto = half_veto(view.preset.veto or Veto(), side)
        return (correction.veto_hits(view.far, veto) > 0).to(torch.float64)

    return of


# ---------------------------------------------------------------- what is summed

MASKED_MEANS: dict[str, Callable[[View], Tensor]] = {
    "masked_mismatch_kl": lambda v: _per(_dropped_kl(v), _dropped(v)),
    "unmasked_mismatch_kl": lambda v: _per(_kept_kl(v), v.pieces.kept_tokens),
    "is_masked": lambda v: _per(_dropped(v), v.n),
}
SIGNED_MEANS: dict[str, Callable[[View], Tensor]] = {
    "is_masked_low": lambda v: _per(_dropped_signed(v, LOW), v.n),
    "is_masked_high": lambda v: _per(_dropped_signed(v, HIGH), v.n),
    "masked_advantage_positive": lambda v: _per(_dropped_signed(v, HIGH), _dropped(v)),
    "masked_advantage_negative": lambda v: _per(_dropped_signed(v, LOW), _dropped(v)),
}
"""Per sequence [S]; a preset's own."""

OLD_FLAGS: dict[str, Callable[[View], Tensor]] = {
    "sequence_masked_low": _vetoed("lower"),
    "sequence_masked_high": _vetoed("upper"),
    "geo_masked_low": _sequences_outside("lower"),
    "geo_masked_high": _sequences_outside("upper"),
}
OLD_COUNTS: dict[str, Callable[[View], Tensor]] = {
    "is_masked": _dropped,
    "is_masked_low": _tokens_outside("lower"),
    "is_masked_high": _tokens_outside("upper"),
}
"""Tokens per sequence: v0.2 takes their mean over tokens."""


def _entropy(view: View) -> Tensor:
    assert view.batch.entropy is not None
    return view.batch.entropy


ENTROPY = Measure("entropy", _entropy)


def _row_kl(view: View) -> Tensor:
    return _per(view.total(KL), view.n)


def _both(column: Column, when: Callable[[Preset], bool]) -> Range:
    """The ends of what is summed as well."""
    return Range(column.name, lambda view: rows(column.made(view)), own=column.own, when=when, by=column.by)


ROW_KL = Column("row kl", _row_kl, when=_then)
MASKED = tuple(Column(name, of, own=True, by=kept) for name, of in MASKED_MEANS.items())
SIGNED = tuple(Column(name, of, own=True, when=_default, by=kept) for name, of in SIGNED_MEANS.items())
SUMS = (
    Column("kl", lambda v: v.total(KL)),
    Column("kl²", lambda v: v.total(KL_SQUARED)),
    ROW_KL,
    Column("row kl²", lambda v: _row_kl(v).square(), when=_then),
    Column("geo − 1", lambda v: torch.expm1(v.total(powers.LOG) / v.divisor), when=_then),
    Column("entropy", lambda v: v.total(ENTROPY), needs=("entropy",)),
    *MASKED,
    *SIGNED,
    *(Column(name, of, own=True, when=_then) for name, of in OLD_FLAGS.items()),
    *(Column(f"tokens {name}", of, own=True, when=_then) for name, of in OLD_COUNTS.items()),
)
EXTREMES = (
    Range("token kl", lambda v: v.ends(KL)),
    _both(ROW_KL, _then),
    *(_both(column, _now) for column in MASKED),
    *(_both(column, _default) for column in SIGNED),
)


# ---------------------------------------------------------------- what is logged


def _token_kl(page: Page) -> float:
    return page("kl") / page.tokens


def _over_entropy(kl: Callable[[Page], float]) -> Callable[[Page], float]:
    return lambda page: kl(page) / (page("entropy") / page.tokens) if page("entropy") > 0 else math.nan


def _of_rows(name: str) -> Callable[[Page], float]:
    return lambda page: page(name) / page.rows


def _of_tokens(name: str) -> Callable[[Page], float]:
    return lambda page: page(name) / page.tokens


def _highest(name: str) -> Callable[[Page], float]:
    return lambda page: page.high(name)


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


def _pair(name: str, when: Callable[[Preset], bool]) -> tuple[Entry, Entry]:
    text = f"{MEANINGS[name]}: {PER_SEQUENCE}"
    return (
        Entry(f"{name}/mean", text, _of_rows(name), when),
        Entry(f"{name}/max", f"{MEANINGS[name]}: {WORST}", _highest(name), when),
    )


NOW = (
    Entry(
        "mismatch_kl/all/mean",
        "r − 1 − log r, r = π_θ/π_rollout, so an estimate of KL(π_rollout‖π_θ); mean over the loss tokens of "
        "the batch. The policy is the one being trained, not π_old",
        _token_kl,
        _now,
    ),
    Entry(
        "mismatch_kl/all/std",
        "standard deviation of that over tokens, n − 1 below",
        lambda p: std(p("kl"), p("kl²"), p.tokens),
        _now,
    ),
    Entry("mismatch_kl/all/max", "the largest of any loss token", lambda p: p.high("token kl"), _now),
    Entry(
        "kl_ent_ratio/mean",
        "mismatch_kl/all/mean over the mean entropy: a ratio of two means, not a mean of ratios. The entropy "
        "is the dump's; prime-rl takes the trainer's",
        _over_entropy(_token_kl),
        _now,
    ),
    *(entry for name in MASKED_MEANS for entry in _pair(name, _now)),
    *(entry for name in SIGNED_MEANS for entry in _pair(name, _default)),
)

OLD_FLAG_MEANINGS = {
    "sequence_masked_low": "the share of sequences with a token whose r is below sequence_mask_low",
    "sequence_masked_high": "the share of sequences with a token whose r is above sequence_mask_high",
    "geo_masked_low": "the share of sequences whose geometric mean of r is below geo_mask_low",
    "geo_masked_high": "the share of sequences whose geometric mean of r is above geo_mask_high",
}
OLD_COUNT_MEANINGS = {
    "is_masked": "the share of loss tokens that any of the masks drops, over tokens: later versions take the "
    "mean of each sequence first",
    "is_masked_low": "the share of loss tokens with r below token_mask_low, whatever their advantage",
    "is_masked_high": "the share of loss tokens with r above token_mask_high, whatever their advantage",
}


def _row_mean_kl(page: Page) -> float:
    return page("row kl") / page.rows


THEN = (
    Entry(
        "mismatch_kl/mean",
        f"r − 1 − log r, r = π_θ/π_rollout: {PER_SEQUENCE}. Later versions take it over all tokens",
        _row_mean_kl,
        _then,
    ),
    Entry(
        "mismatch_kl/std",
        "standard deviation of the sequences' means, n − 1 below",
        lambda p: std(p("row kl"), p("row kl²"), p.rows),
        _then,
    ),
    Entry("mismatch_kl/min", "the smallest of the sequences' means", lambda p: p.low("row kl"), _then),
    Entry("mismatch_kl/max", WORST, lambda p: p.high("row kl"), _then),
    Entry(
        "kl_ent_ratio/mean",
        "mismatch_kl/mean over the mean entropy of the tokens",
        _over_entropy(_row_mean_kl),
        _then,
    ),
    *(
        Entry(f"{name}/mean", f"{MEANINGS[name]}: {PER_SEQUENCE}", _of_rows(name), _then)
        for name in ("masked_mismatch_kl", "unmasked_mismatch_kl")
    ),
    *(
        Entry(f"{name}/mean", text, _of_tokens(f"tokens {name}"), _then)
        for name, text in OLD_COUNT_MEANINGS.items()
    ),
    *(Entry(f"{name}/mean", text, _of_rows(name), _then) for name, text in OLD_FLAG_MEANINGS.items()),
    Entry(
        "geo_seq_ratio/mean",
        "mean over sequences of the geometric mean of r = π_θ/π_rollout, unclamped; a sequence without a "
        "loss token is 1",
        lambda p: 1 + p("geo − 1") / p.rows,
        _then,
    ),
)

BOOK = Ledger("prime-rl", SUMS, EXTREMES, (*NOW, *THEN))
