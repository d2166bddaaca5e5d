"""What a rejection rule lets through, and what a veto looks for: tokens, turns or sequences."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.correction.bounds import either, outside, past
from offpol_diag.presets import AGGREGATES, Reject, Veto
from offpol_diag.ratios import Level, Ratios


def passes(ratios: Ratios, rule: Reject) -> Level:
    """Which tokens or sequences one rejection rule lets through, `ratios` being of the rule's numerator."""
    if ratios.whole is not None and not rule.on_tokens:
        return passes(ratios.whole, rule)
    return ratios.once(rule, lambda: _passes(ratios, rule))


def statistic(ratios: Ratios, rule: Reject) -> Level:
    """The number a rule judges; for `ratio` its logarithm.

    The safety bounds log-ratios: the aggregated one, which only ratio and k1 have, or each token's.
    """
    early, late = _safety(rule)
    found = ratios.aggregate(rule.statistic, rule.over, early)
    if late is None:
        return found
    key = "bounded", rule.statistic, rule.over, late
    return ratios.once(key, lambda: found.map(lambda x: x.clamp(-late, late)))


def _safety(rule: Reject) -> tuple[float | None, float | None]:
    """The bound on each token's Δ, and the one on the aggregate."""
    late = rule.safety_at == "aggregate" and rule.statistic in AGGREGATES
    return (None, rule.safety) if late else (rule.safety, None)


def _passes(ratios: Ratios, rule: Reject) -> Level:
    if rule.over == "batch":
        cut = ratios.settled.cut(ratios.policy, rule, ratios.batch)
        return statistic(ratios, rule).map(lambda values: values < cut)
    if rule.advantage == "any":
        passed = _judged(ratios, rule).map(lambda x: _inside(x, rule))
        return _of_tokens(passed, ratios) if rule.on_tokens else passed
    above, below = beyond(ratios, rule)
    if rule.on_tokens:
        above, below = (_of_tokens(flags, ratios) for flags in (above, below))
    return above.map(lambda up: ~fails(rule, up, below.values, _advantage(rule, above, ratios)))


def beyond(ratios: Ratios, rule: Reject) -> tuple[Level, Level]:
    """Which tokens, turns or sequences lie above the upper bound, and which below the lower one."""
    x = _judged(ratios, rule)
    above, below = (x.map(lambda v, s=sign: _flags(_outside(v, rule, s), v)) for sign in (1, -1))  # type: ignore[misc]
    return above, below


def _flags(found: Tensor | None, like: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool) if found is None else found


def _judged(ratios: Ratios, rule: Reject) -> Level:
    """The statistic of what the rule judges: of a turn once."""
    if rule.over != "segment":
        return statistic(ratios, rule)
    early, late = _safety(rule)
    found = ratios.turns(rule.statistic, early)
    return Level(found if late is None else found.clamp(-late, late), "turn")


def _of_tokens(flags: Level, ratios: Ratios) -> Level:
    """Given to the tokens that are here."""
    if flags.per == "token":
        return flags
    if flags.per == "turn":
        return Level(ratios.of_turns(flags.values), "token")
    return Level(segments.spread(flags.values, ratios.batch.cu_seqlens), "token")


def _outside(x: Tensor, rule: Reject, sign: int) -> Tensor | None:
    """Where a statistic lies beyond the rule's upper (sign 1) or lower (-1) bound; None without one."""
    bound = rule.upper if sign > 0 else rule.lower
    if bound is None:
        return None
    return outside(x, math.log(bound) if rule.statistic == "ratio" else bound, sign, rule.strict)


def _inside(x: Tensor, rule: Reject) -> Tensor:
    """Where a statistic lies within the rule's bounds."""
    return ~_flags(either(*(_outside(x, rule, sign) for sign in (1, -1))), x)


_SIGNS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "any": lambda above, below, a: above | below,
    "positive": lambda above, below, a: (above | below) & (a > 0),
    "negative": lambda above, below, a: (above | below) & (a < 0),
    "against": lambda above, below, a: (above & (a > 0)) | (below & (a < 0)),
    "against_or_zero": lambda above, below, a: (above & (a > 0)) | (below & (a <= 0)),
    "away": lambda above, below, a: (above | below) & (a > 0),
}
"""Which violations count, given the advantage (for `away` times Δ)."""


def fails(rule: Reject, above: Tensor, below: Tensor, advantage: Tensor) -> Tensor:
    """Where a violation counts, given the advantage (for `away` times Δ)."""
    return _SIGNS[rule.advantage](above, below, advantage)


def _advantage(rule: Reject, like: Level, ratios: Ratios) -> Tensor:
    """Of tokens, or of sequences, which have the mean of their tokens'; times Δ where `away` is asked."""
    batch = ratios.batch
    if batch.advantages is None:
        raise ValueError("a rule conditioned on advantages needs the advantages column")
    if rule.advantage == "away":
        return batch.advantages * ratios.delta
    if like.per == "token":
        return batch.advantages
    return ratios.of("rollout").once("mean A", lambda: _mean_advantage(batch))


def _mean_advantage(batch: Batch) -> Tensor:
    assert batch.advantages is not None
    return segments.mean(batch.advantages, batch.cu_seqlens)


def veto_hits(ratios: Ratios, veto: Veto | None) -> Tensor:
    """Tokens whose unclamped r lies strictly beyond the veto's bounds, per sequence: [S] float64."""
    return ratios.once(("veto hits", veto), lambda: _veto_hits(ratios, veto))


def _beyond_veto(delta: Tensor, veto: Veto) -> tuple[Tensor | None, Tensor | None]:
    return past(delta, veto.lower, -1), past(delta, veto.upper, 1)


def _veto_hits(ratios: Ratios, veto: Veto | None) -> Tensor:
    hits = None if veto is None else either(*_beyond_veto(ratios.delta, veto))
    if hits is None:
        return torch.zeros_like(ratios.batch.lengths, dtype=torch.float64)
    return segments.count(hits, ratios.batch.cu_seqlens)
