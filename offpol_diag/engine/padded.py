"""A preset on padded tensors [S, L], on any device: the plain formulas by broadcasting, without packing.

A number of a sequence is [S, 1], so that it broadcasts over tokens; a batch is one trainer batch. All numbers
are float64; what is not counted is 0 on the way, whatever it held.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offpol_diag.engine.tails import Tail, smooth
from offpol_diag.pipeline import namespaces, plan, tables
from offpol_diag.presets import AGGREGATES, SMALLEST_NORM, Preset, Reject, Veto, Weight


@cache
def _formulas() -> Any:
    return namespaces.formulas_on_torch()


def weights_and_mask(
    preset: Preset, log_probs: Mapping[str, Tensor], counted: Tensor, advantages: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Compute the weights of all counted tokens, and which tokens stay in the loss.

    Args:
        preset: the correction.
        log_probs: policy (rollout, old, current) → log-probs of the sampled tokens, [S, L], nats.
        counted: the tokens that count, [S, L] bool; its holes divide a response into turns.
        advantages: of each token, [S, L], for rules that look at its sign.

    Returns:
        Weights before rejection, [S, L] float64, 0 where a token does not count; and the kept tokens, bool.
    """
    given = {name: torch.where(counted, x, 0.0).to(torch.float64) for name, x in log_probs.items()}
    rollout = given["rollout"]
    deltas = {name: x - rollout for name, x in given.items()}
    signs = None if advantages is None else torch.where(counted, advantages, 0.0).to(torch.float64)
    if not preset.apply:
        return counted.to(torch.float64), counted
    vetoed = _vetoed(deltas[preset.policy], preset.veto, counted)
    tokens, dropped = counted, vetoed
    for rule in preset.reject:
        among = tokens & ~vetoed if rule.among == "left" else counted
        failed = _failed(rule, deltas[rule.policy or preset.policy], rollout, signs, counted, among)
        if rule.on_tokens:
            tokens = tokens & ~failed
        else:
            dropped = dropped | failed
    weights = torch.ones_like(rollout)
    if preset.weight is not None:
        left = tokens & ~vetoed if preset.weight.among == "left" else counted
        weights = _weights(preset.weight, deltas[preset.policy], counted, left)
    return torch.where(counted, weights, 0.0), tokens & ~dropped


def _vetoed(delta: Tensor, veto: Veto | None, counted: Tensor) -> Tensor:
    """Return the sequences of which one token is strictly beyond the veto's bounds, [S, 1] bool."""
    if veto is None:
        return torch.zeros_like(counted[:, :1])
    lower, upper = plan.log_bounds(plan.Bounds(veto.lower, veto.upper, strict=False), None)
    beyond: Tensor = _formulas().outside(delta, lower, upper)
    return (beyond & counted).any(1, keepdim=True)


def _failed(
    rule: Reject, delta: Tensor, rollout: Tensor, signs: Tensor | None, counted: Tensor, among: Tensor
) -> Tensor:
    """Return the tokens [S, L], or sequences [S, 1], that a rule rejects; bool."""
    f = _formulas()
    late = rule.safety if rule.safety_at == "aggregate" and rule.statistic in AGGREGATES else None
    bound = math.inf if rule.safety is None or late is not None else rule.safety
    held = delta.clamp(-bound, bound)
    excess = torch.expm1(held)
    value = _aggregated(
        getattr(f, tables.STATISTICS[rule.statistic])(held, excess, rollout), rule.over, among
    )
    if rule.over == "batch":
        assert rule.upper is not None
        return value >= _cut(value[counted], rule.upper)
    if late is not None:
        value = value.clamp(-late, late)
    bounds = plan.log_bounds if rule.statistic == "ratio" else plan.plain_bounds
    lower, upper = bounds(rule, late)
    above, below = _counting(rule, value, delta, signs, counted)
    failed: Tensor = f.rejected(value, lower, upper, above, below)
    return failed


def _counting(
    rule: Reject, value: Tensor, delta: Tensor, signs: Tensor | None, counted: Tensor
) -> tuple[Tensor, Tensor]:
    """Return 1 where a violation of the upper bound counts, and of the lower one, else 0."""
    if rule.advantage == "any":
        one = torch.ones_like(value)
        return one, one
    assert signs is not None  # `needs` has been asked
    f = _formulas()
    sign = signs if rule.of_token or value.shape[1] > 1 else _aggregated(signs, "mean", counted)
    if rule.advantage == "away":
        return (f.moves_away(sign, delta),) * 2
    up, down, not_up = f.positive(sign), f.negative(sign), f.not_positive(sign)
    return {
        "positive": (up, up),
        "negative": (down, down),
        "against": (up, down),
        "against_or_zero": (up, not_up),
    }[rule.advantage]


def _aggregated(x: Tensor, over: str, counted: Tensor) -> Tensor:
    """Aggregate numbers of tokens over the counted tokens of each sequence, [S, 1], or turn, [S, L].

    Numbers of tokens and of a whole batch stay as they are; over no token a number is 0.
    """
    if over in ("token", "batch"):
        return x
    there = counted.any(1, keepdim=True)
    if over in ("max", "min"):
        most = torch.where(counted, x, -math.inf).amax(1, keepdim=True)
        least = torch.where(counted, x, math.inf).amin(1, keepdim=True)
        return torch.where(there, most if over == "max" else least, 0.0)
    terms = torch.where(counted, x, 0.0)
    if over == "segment":
        starts = counted & ~torch.nn.functional.pad(counted[:, :-1], (1, 0))
        turn = starts.flatten().cumsum(0)
        sums = x.new_zeros(int(turn[-1]) + 1 if turn.numel() else 1)
        total = sums.index_add(0, turn, terms.flatten())
        many = sums.index_add(0, turn, counted.flatten().to(x.dtype))
        return (total / many.clamp(min=1))[turn].view_as(x)
    total = terms.sum(1, keepdim=True)
    return total / counted.sum(1, keepdim=True).clamp(min=1) if over == "mean" else total


def _cut(values: Tensor, upper: float) -> Tensor | float:
    """Return the value from which on tokens are dropped so that the mean of the rest is below `upper` (M2PO).

    The smallest value is never dropped; inf where none need be.
    """
    rising = values.sort().values
    if not len(rising):
        return math.inf
    many = torch.arange(1, len(rising) + 1, device=rising.device)
    enough = (rising.cumsum(0) < upper * many).nonzero().flatten()
    if not len(enough):
        return torch.nextafter(rising[0], rising.new_tensor(math.inf))
    last = int(enough[-1])
    return math.inf if last == len(rising) - 1 else rising[last + 1]


def _weights(weight: Weight, delta: Tensor, counted: Tensor, left: Tensor) -> Tensor:
    """Compute the weights of tokens, [S, L], normalised over the batch where the preset does so."""
    f = _formulas()
    early = weight.safety if weight.safety_at == "token" else None
    late = weight.safety if early is None else None
    log_ratio = _aggregated(delta if early is None else delta.clamp(-early, early), weight.over, left)
    log_ratio = log_ratio if late is None else log_ratio.clamp(-late, late)
    if weight.action == "psis":
        units = log_ratio[counted] if log_ratio.shape[1] > 1 else log_ratio[counted.any(1)].flatten()
        tail = smooth(Tail.of(units.detach().cpu().numpy()))
        if tail is not None:
            log_ratio = torch.from_numpy(tail(log_ratio.detach().cpu().numpy())).to(delta.device)
    found: Tensor = f.importance_weight(f.importance_ratio(log_ratio), log_ratio, *plan.weight_bounds(weight))
    found = found.expand_as(delta)
    if not weight.normalize:
        return found
    per_token = weight.over == "token"
    every = found[counted] if per_token else _aggregated(found, "mean", counted)[counted.any(1)]
    mean = every.mean() if every.numel() else found.new_ones(())
    return found / torch.where(mean > SMALLEST_NORM, mean, 1.0)
