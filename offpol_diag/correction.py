"""The correction pipeline of one preset on one batch: weights, rejection, veto.

Pure; every bound is on r = π_train/π_rollout.

What acts on whole sequences is kept per sequence [S], what acts on tokens per token [T]; nothing is
broadcast that need not be.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.presets import AGGREGATES, Over, Preset, Reject, Veto, Weight
from offpol_diag.ratios import OVERFLOW, Level, Ratios


@dataclass(frozen=True)
class Weighed:
    """A preset's weights before rejection.

    Attributes:
        raw: the ratio after the safety bound, before truncation.
        final: after truncation or masking; not normalised (ESS does not depend on scale).
        high: how many tokens (or 1 for the sequence) lie above `upper`, [S].
        low: how many lie below `lower`, [S].
        bounded: on how many the safety bound acted, [S].
        tries: of how many weights, or of how many tokens where it acts on tokens, [S].
    """

    raw: Level
    final: Level
    high: Tensor
    low: Tensor
    bounded: Tensor
    tries: Tensor


@dataclass(frozen=True)
class Kept:
    """What rejection and veto leave.

    Attributes:
        tokens: [T] bool, or None when no rule acts on tokens.
        sequences: [S] bool: passed every rule on sequences and the veto.
        vetoed: [S] bool.
        catastrophic: tokens beyond the veto's bounds, [S] float64.
    """

    tokens: Tensor | None
    sequences: Tensor
    vetoed: Tensor
    catastrophic: Tensor


def needs(preset: Preset, columns: set[str]) -> list[str]:
    """The columns this preset reads and the dump lacks, e.g. ['current_log_probs']."""
    wanted = [] if preset.policy == "rollout" else [f"{preset.policy}_log_probs"]
    if any(rule.advantage != "any" for rule in preset.reject):
        wanted.append("advantages")
    return [column for column in wanted if column not in columns]


def weigh(ratios: Ratios, weight: Weight) -> Weighed:
    """Weights of every token or sequence under one weight rule."""
    return ratios.once(weight, lambda: _weigh(ratios, weight))


def _weigh(ratios: Ratios, weight: Weight) -> Weighed:
    log = ratios.log_ratio(weight.over, weight.safety, weight.safety_at)
    raw = log.map(lambda x: torch.exp(x.clamp(-OVERFLOW, OVERFLOW)))
    above = _beyond(log.values, weight.upper, 1)
    below = _beyond(log.values, weight.lower, -1)
    final = raw.map(lambda x: _ACTIONS[weight.action](x, weight, above | below))
    high, low = (per_sequence(flags, log, ratios.batch) for flags in (above, below))
    bounded, tries = _bounded(ratios, weight)
    return Weighed(raw, final, high, low, bounded, tries)


def _bounded(ratios: Ratios, weight: Weight) -> tuple[Tensor, Tensor]:
    """How often |log r| exceeds the safety bound, and of how many: [S] each."""
    over: Over = "token" if weight.safety_at == "token" else weight.over
    log = ratios.aggregate("ratio", over)
    every = torch.ones_like(log.values, dtype=torch.bool)
    beyond = log.values.abs() > (math.inf if weight.safety is None else weight.safety)
    return per_sequence(beyond, log, ratios.batch), per_sequence(every, log, ratios.batch)


def _truncate(x: Tensor, weight: Weight, outside: Tensor) -> Tensor:
    return x.clamp(weight.lower, weight.upper) if weight.lower or weight.upper else x


def _mask(x: Tensor, weight: Weight, outside: Tensor) -> Tensor:
    return torch.where(outside, 0.0, x)


def _none(x: Tensor, weight: Weight, outside: Tensor) -> Tensor:
    return x


_ACTIONS = {"truncate": _truncate, "mask": _mask, "none": _none}


def _beyond(x: Tensor, bound: float | None, sign: int) -> Tensor:
    """Where log x lies strictly beyond log(bound), upwards (sign 1) or downwards (-1)."""
    if bound is None or (bound <= 0 and sign < 0):
        return torch.zeros_like(x, dtype=torch.bool)
    return x * sign > math.log(bound) * sign


def per_sequence(flag: Tensor, like: Level, batch: Batch) -> Tensor:
    """Flags per token or per sequence → counts per sequence [S] float64 (empty sequences count 0)."""
    if like.per == "token":
        return segments.count(flag, batch.cu_seqlens)
    return (flag & (batch.lengths > 0)).to(torch.float64)


def keep(ratios: Ratios, preset: Preset) -> Kept:
    """What a preset's rejection rules and veto leave of the batch."""
    return ratios.once((preset.reject, preset.veto), lambda: _keep(ratios, preset))


def _keep(ratios: Ratios, preset: Preset) -> Kept:
    tokens: Tensor | None = None
    sequences = torch.ones_like(ratios.batch.lengths, dtype=torch.bool)
    for rule in preset.reject:
        passed = passes(ratios, rule)
        if passed.per == "sequence":
            sequences = sequences & passed.values
        else:
            tokens = passed.values if tokens is None else tokens & passed.values
    catastrophic = veto_hits(ratios, preset.veto)
    vetoed = catastrophic > 0
    return Kept(tokens, sequences & ~vetoed, vetoed, catastrophic)


def passes(ratios: Ratios, rule: Reject) -> Level:
    """Which tokens or sequences one rejection rule lets through (bounds inclusive)."""
    return ratios.once(rule, lambda: _passes(ratios, rule))


def statistic(ratios: Ratios, rule: Reject) -> Level:
    """The number a rule judges; for `ratio` its logarithm.

    The safety bounds log-ratios: the aggregated one, which only ratio and k1 have, or each token's.
    """
    late = rule.safety_at == "aggregate" and rule.statistic in AGGREGATES
    if rule.safety is None or not late:
        return ratios.aggregate(rule.statistic, rule.over, rule.safety)
    bound = rule.safety
    return ratios.aggregate(rule.statistic, rule.over).map(lambda x: x.clamp(-bound, bound))


def _passes(ratios: Ratios, rule: Reject) -> Level:
    x = statistic(ratios, rule)
    in_log = rule.statistic == "ratio"
    upper = (
        torch.zeros_like(x.values, dtype=torch.bool)
        if rule.upper is None
        else x.values > _bound(rule.upper, in_log)
    )
    lower = (
        torch.zeros_like(x.values, dtype=torch.bool)
        if rule.lower is None
        else x.values < _bound(rule.lower, in_log)
    )
    return Level(~_signed(upper, lower, rule, x, ratios.batch), x.per)


def _bound(bound: float, in_log: bool) -> float:
    if not in_log:
        return bound
    return math.log(bound) if bound > 0 else -math.inf


def _signed(above: Tensor, below: Tensor, rule: Reject, like: Level, batch: Batch) -> Tensor:
    """Violations that count, given the sign of the advantage the rule is restricted to."""
    if rule.advantage == "any":
        return above | below
    positive, negative = _signs(like, batch)
    if rule.advantage == "against":
        return (above & positive) | (below & negative)
    return (above | below) & (positive if rule.advantage == "positive" else negative)


def _signs(like: Level, batch: Batch) -> tuple[Tensor, Tensor]:
    """Where the advantage is positive, and where negative; a sequence has the sign of its mean advantage."""
    if batch.advantages is None:
        raise ValueError("a rule conditioned on advantages needs the advantages column")
    sign = batch.advantages if like.per == "token" else segments.mean(batch.advantages, batch.cu_seqlens)
    return sign > 0, sign < 0


def veto_hits(ratios: Ratios, veto: Veto | None) -> Tensor:
    """Tokens whose unclamped r lies strictly beyond the veto's bounds, per sequence: [S] float64."""
    if veto is None:
        return torch.zeros_like(ratios.batch.lengths, dtype=torch.float64)
    return ratios.once(veto, lambda: _veto_hits(ratios, veto))


def _veto_hits(ratios: Ratios, veto: Veto) -> Tensor:
    hits = _beyond(ratios.delta, veto.lower, -1) | _beyond(ratios.delta, veto.upper, 1)
    return segments.count(hits, ratios.batch.cu_seqlens)
