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
from offpol_diag.crosswalk.bounds import Side, bound, half
from offpol_diag.crosswalk.ledger import Column, Entry, Ledger, Page, View
from offpol_diag.crosswalk.moments import std
from offpol_diag.presets import Reject

# ---------------------------------------------------------------- what is summed


def _total(x: Tensor, view: View) -> Tensor:
    return segments.total(x, view.batch.cu_seqlens)


def _clamped(view: View) -> Tensor:
    """Tokens whose ρ, or whose sequence's, the clamp moves, [S]; dropped ones included."""
    weighed, weight = view.done.weighed, view.preset.weight
    n = view.batch.lengths.to(torch.float64)
    if weighed is None or weight is None or weight.action != "truncate":
        return torch.zeros_like(n)
    moved = weighed.high + weighed.low
    return moved * n if weighed.final.per == "sequence" else moved


def _dropped(side: Side) -> Callable[[View], Tensor]:
    """Tokens that the mask drops at one bound, [S]."""

    def of(view: View) -> Tensor:
        rules = view.preset.reject
        return _gone(view, tuple(half(rule, side) for rule in rules if bound(rule, side) is not None))

    return of


def _gone(view: View, rules: tuple[Reject, ...]) -> Tensor:
    kept = correction.keep(view.ratios, replace(view.preset, reject=rules, veto=None))
    n = view.batch.lengths.to(torch.float64)
    left = n if kept.tokens is None else segments.count(kept.tokens, view.batch.cu_seqlens)
    return n - left * kept.sequences


def _policy_excess(view: View) -> Tensor:
    """Per row, the mean of π_θ/π_old − 1, [S]."""
    return view.ratios.once("open-instruct u − 1", lambda: _mean_excess(view))


def _mean_excess(view: View) -> Tensor:
    moved = view.scene.ratios("current").delta - view.scene.ratios("old").delta
    return segments.mean(torch.expm1(moved), view.batch.cu_seqlens)


def _local(view: View) -> Tensor:
    """log π_local − log π_rollout of each token: π_θ where the dump has it, else π_old, which it copies."""
    return view.scene.ratios("old" if view.batch.current is None else "current").delta


def _reverse(view: View) -> Tensor:
    return -torch.exp(view.batch.rollout) * _local(view)


def _by_length(x: Tensor, view: View) -> Tensor:
    return x * view.batch.lengths


SUMS = (
    Column("weight", lambda v: v.done.sums.first, own=True),
    Column("clamped", _clamped, own=True),
    Column("dropped", lambda v: v.batch.lengths - v.done.kept_tokens, own=True),
    Column("dropped low", _dropped("lower"), own=True),
    Column("dropped high", _dropped("upper"), own=True),
    Column("u − 1", lambda v: _by_length(_policy_excess(v), v), needs=("current", "old")),
    Column("(u − 1)²", lambda v: _by_length(_policy_excess(v).square(), v), needs=("current", "old")),
    Column("|d|", lambda v: _total(_local(v).abs(), v)),
    Column("d²", lambda v: _total(_local(v).square(), v)),
    Column("reverse", lambda v: _total(_reverse(v), v)),
)
EXTREMES = (Column("|d| of a token", lambda v: _local(v).abs()),)

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
