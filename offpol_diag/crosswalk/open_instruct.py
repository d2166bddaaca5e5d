"""What open-instruct logs (open_instruct/grpo_utils.py): ρ = π_old/π_rollout, log ρ clamped to ±10.

What it takes per "row" is per packed row there, which may hold several responses; here a row is a response.
Means over tokens do not depend on that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from offpol_diag import correction, segments
from offpol_diag.crosswalk import powers
from offpol_diag.crosswalk.bounds import Side, bound, half
from offpol_diag.crosswalk.keys import acted, kept, weighed
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page, Range
from offpol_diag.crosswalk.measures import Measure
from offpol_diag.crosswalk.moments import std
from offpol_diag.crosswalk.view import View
from offpol_diag.presets import Reject
from offpol_diag.ratios import Ratios

# ---------------------------------------------------------------- what is summed


def _clamped(view: View) -> Tensor:
    """Tokens whose ρ, or whose sequence's, the clamp moves, [S]; dropped ones included."""
    weighed, weight = view.pieces.first.weighed, view.preset.weight
    if weighed is None or weight is None or weight.action != "truncate":
        return view.zeros
    moved = weighed.high + weighed.low
    return moved * view.n if weighed.final.per == "sequence" else moved


def _dropped(side: Side) -> Callable[[View], Tensor]:
    """Tokens that the mask drops at one bound, [S]."""

    def of(view: View) -> Tensor:
        rules = view.preset.reject
        return _gone(view, tuple(half(rule, side) for rule in rules if bound(rule, side) is not None))

    return of


def _gone(view: View, rules: tuple[Reject, ...]) -> Tensor:
    if not rules:
        return view.zeros
    preset = view.preset
    if preset.apply and rules == preset.reject and preset.veto is None:
        return view.n - view.pieces.kept_tokens
    some = view.far
    kept = correction.keep(some, replace(view.preset, reject=rules, veto=None))
    if kept.tokens is None:
        return view.n * ~kept.sequences
    return torch.where(kept.sequences, segments.count(~kept.tokens, some.batch.cu_seqlens), view.n)


def _moved(view: View) -> Tensor:
    return torch.expm1(view.of("current").delta - view.of("old").delta)


def _policy_excess(view: View) -> Tensor:
    """Per row, the mean of π_θ/π_old − 1, [S]."""
    return view.total(MOVED) / view.divisor


def _local(view: View) -> Ratios:
    """π_local/π_rollout: π_θ where the dump has it, else π_old, which it copies."""
    return view.of("old" if view.batch.current is None else "current")


MOVED = Measure("open-instruct u − 1", _moved)
DISTANCE = Measure("open-instruct |d|", lambda view: powers.distance(_local(view)))
SQUARED = Measure("open-instruct d²", lambda view: _local(view).delta.square())
REVERSE = Measure("open-instruct reverse", lambda view: -torch.exp(view.batch.rollout) * _local(view).delta)

SUMS = (
    Column("weight", lambda v: v.pieces.sums.first, own=True, by=weighed),
    Column("clamped", _clamped, own=True, by=acted),
    Column("dropped", lambda v: v.n - v.pieces.kept_tokens, own=True, by=kept),
    Column("dropped low", _dropped("lower"), own=True),
    Column("dropped high", _dropped("upper"), own=True),
    Column("u − 1", lambda v: _policy_excess(v) * v.n, needs=("current", "old")),
    Column("(u − 1)²", lambda v: _policy_excess(v).square() * v.n, needs=("current", "old")),
    Column("|d|", lambda v: v.total(DISTANCE)),
    Column("d²", lambda v: v.total(SQUARED)),
    Column("reverse", lambda v: v.total(REVERSE)),
)
EXTREMES = (Range("|d| of a token", lambda v: v.ends(DISTANCE)),)

# ---------------------------------------------------------------- what is logged

LOCAL = "π_local being π_θ where the dump has it, else π_old (with one mini-batch a copy of π_θ there)"
ALL = "all response tokens of the dump; open-instruct takes it per micro-batch"


def _per_token(column: str) -> Callable[[Page], float]:
    return lambda page: page(column) / page.tokens


def _variance(page: Page) -> float:
    mean = page("u − 1") / page.tokens
    return max(page("(u − 1)²") / page.tokens - mean * mean, 0.0)


def _deviation(page: Page) -> float:
    return std(page("|d|"), page("d²"), page.tokens) if page.tokens > 1 else 0.0


ENTRIES = (
    Entry(
        "val/rho_weight",
        "mean over response tokens of the weight that multiplies the loss: ρ = π_old/π_rollout (its log "
        "within ±10) after the clamp, and 0 where the token is dropped; not the mean of ρ",
        _per_token("weight"),
    ),
    Entry(
        "val/rho_clipfrac",
        "the share of response tokens whose ρ the clamp moves, dropped ones included",
        _per_token("clamped"),
    ),
    Entry(
        "val/rho_drop_frac",
        "the share of response tokens whose weight the mask sets to 0; they stay in the loss's denominator",
        _per_token("dropped"),
    ),
    Entry(
        "val/rho_drop_low_frac",
        "of all response tokens, those dropped because ρ (token, sequence, or the row's mean |ρ − 1|) is "
        "below the lower bound",
        _per_token("dropped low"),
    ),
    Entry(
        "val/rho_drop_high_frac",
        "of all response tokens, those dropped because it is above the upper bound",
        _per_token("dropped high"),
    ),
    Entry(
        "val/ratio",
        "π_θ/π_old, unclamped, mean over response tokens: the ratio of PPO's loss and not ρ",
        lambda page: 1 + page("u − 1") / page.tokens,
    ),
    Entry(
        "val/ratio_var",
        "how far the rows' means of π_θ/π_old spread about val/ratio, weighted by length, n below: no "
        "variance over tokens. A row is one response here and a packed row there",
        _variance,
    ),
    Entry(
        "debug/vllm_vs_local_logprob_diff_mean",
        f"|log π_local − log π_rollout|, unclamped, mean over {ALL}; {LOCAL}",
        _per_token("|d|"),
    ),
    Entry(
        "debug/vllm_vs_local_logprob_diff_max",
        f"the largest |log π_local − log π_rollout| of {ALL}",
        lambda page: page.high("|d| of a token"),
    ),
    Entry(
        "debug/vllm_vs_local_logprob_diff_std",
        f"standard deviation of |log π_local − log π_rollout|, n − 1 below, over {ALL}; 0 for one token",
        _deviation,
    ),
    Entry(
        "debug/vllm_local_reverse_kl",
        f"π_rollout·(log π_rollout − log π_local), mean over {ALL}. Weighting sampled tokens by their "
        "probability once more, it estimates no KL divergence",
        _per_token("reverse"),
    ),
)

BOOK = Ledger("open-instruct", SUMS, EXTREMES, ENTRIES)
