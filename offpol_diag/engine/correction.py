"""Weights, rejection and veto of one preset on one batch.

Pure; every bound is on r = π_train/π_rollout. What acts on whole sequences is kept per sequence [S], what
acts on tokens per token [T]; nothing is broadcast that need not be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.memo import Memo
from offpol_diag.engine.ratios import FLOAT32_OVERFLOW, OVERFLOW, Apart, Level, Ratios
from offpol_diag.presets import AGGREGATES, Over, Preset, Reject, Veto, Weight


def outside(x: Tensor, edge: float, sign: int, strict: bool = False) -> Tensor:
    """Where x lies beyond an edge, upwards (sign 1) or downwards (-1); on it too if `strict`."""
    if sign > 0:
        return x >= edge if strict else x > edge
    return x <= edge if strict else x < edge


def past(x: Tensor, bound: float | None, sign: int, strict: bool = False) -> Tensor | None:
    """Where log x lies beyond log(bound); None where there is no such bound."""
    if bound is None or (bound <= 0 and sign < 0):
        return None
    return outside(x, math.log(bound), sign, strict)


def either(*flags: Tensor | None) -> Tensor | None:
    """Where any of those that are there is set; None where none is there."""
    there = [one for one in flags if one is not None]
    return reduce(torch.logical_or, there) if there else None


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


def keep(ratios: Ratios, preset: Preset) -> Kept:
    """What a preset's rejection rules and veto leave of the batch."""
    return ratios.once((preset.reject, preset.veto), lambda: _keep(ratios, preset))


def _keep(ratios: Ratios, preset: Preset) -> Kept:
    tokens: Tensor | None = None
    vetoed, sequences = ratios.once(("vetoed", preset.veto), lambda: _vetoed(ratios, preset.veto))
    for at, rule in enumerate(preset.reject):
        before = preset if rule.among == "all" else replace(preset, reject=preset.reject[:at])
        judge = ratios if rule.on_tokens else ratios.whole or ratios
        passed = passes(seen(judge, before, rule), rule)
        if passed.per == "sequence":
            sequences = sequences & passed.values
        else:
            tokens = passed.values if tokens is None else tokens & passed.values
    return Kept(tokens, sequences, vetoed, veto_hits(ratios, preset.veto))


def _vetoed(ratios: Ratios, veto: Veto | None) -> tuple[Tensor, Tensor]:
    """Sequences that a veto drops, and all others, [S] bool."""
    vetoed = veto_hits(ratios, veto) > 0
    return vetoed, ~vetoed


def on_tokens(rules: tuple[Reject, ...]) -> tuple[Reject, ...]:
    """Those of the rules under which tokens fail one by one."""
    return tuple(rule for rule in rules if rule.on_tokens)


def seen(ratios: Ratios, preset: Preset, part: Weight | Reject) -> Ratios:
    """The ratios as one part of a preset sees them: its numerator, over the tokens left to it.

    Of `preset` that is what drops tokens before.
    """
    own = ratios.of(part.policy) if isinstance(part, Reject) else ratios
    if part.among == "all" or part.over == "token":
        return own
    before = replace(preset, reject=on_tokens(preset.reject))
    if ratios.whole is None:
        return among(ratios, own, before)
    key = before.veto, before.reject
    whole = seen(ratios.whole, preset, part)
    return own.once(("among", key), lambda: replace(own, whole=whole, _memo=Memo()))


def among(ratios: Ratios, own: Ratios, before: Preset) -> Ratios:
    """Ratios aggregated over what a veto and rules on tokens leave, which judge other ones of the batch."""
    key = "among", before.policy, before.veto, before.reject
    return own.once(key, lambda: own.among(lambda: _left(ratios, before), _left_apart(ratios, own, before)))


def _left_apart(ratios: Ratios, own: Ratios, before: Preset) -> Apart | None:
    """What is left of far tokens, where near ones all are."""
    if ratios.apart is None or own.apart is None or not ratios.apart.leaves(before):
        return None
    kept = keep(ratios.apart.far, before)
    return replace(own.apart, left=kept.tokens, rows=kept.sequences)


def _left(ratios: Ratios, preset: Preset) -> Tensor:
    """Tokens that the veto and rules on tokens leave, [T]."""
    kept = keep(ratios, preset)
    sequences = segments.spread(kept.sequences, ratios.batch.cu_seqlens)
    return sequences if kept.tokens is None else sequences & kept.tokens


@dataclass(frozen=True)
class Weighed:
    """A preset's weights before rejection.

    Attributes:
        raw: the ratio after the safety bound, before truncation.
        final: after truncation or masking; not normalised (ESS does not depend on scale).
        high: how many tokens (of turns all, or 1 for the sequence) lie above `upper`, [S].
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


def weight_key(preset: Preset) -> object:
    """What a preset's weights depend on: presets with equal keys have equal weights."""
    if preset.weight is None or preset.weight.among == "all":
        return preset.weight
    return preset.weight, preset.veto, on_tokens(preset.reject)


def weigh(ratios: Ratios, preset: Preset) -> Weighed:
    """Weights of every token or sequence under the preset's weight rule, which it must have."""
    assert preset.weight is not None
    weight = preset.weight
    if by_turn(weight):
        return ratios.once(("of turns", weight_key(preset)), lambda: _of_turns(ratios, preset))
    if ratios.whole is not None and weight.over != "token":
        return weigh(ratios.whole, preset)
    return ratios.once(("weight", weight_key(preset)), lambda: _weigh(seen(ratios, preset, weight), weight))


def by_turn(weight: Weight | None) -> bool:
    """Whether a turn has one weight; smoothing asks how many tokens have it."""
    return weight is not None and weight.over == "segment" and weight.action != "psis"


def weigh_turns(ratios: Ratios, preset: Preset) -> Weighed:
    """Weights of every turn under the preset's weight rule, which must be one on turns."""
    assert preset.weight is not None
    weight, whole = preset.weight, ratios.whole or ratios
    return whole.once(("weight", weight_key(preset)), lambda: _weigh(seen(whole, preset, weight), weight))


def _of_turns(ratios: Ratios, preset: Preset) -> Weighed:
    """The weights of turns given to the tokens that are here."""
    found = weigh_turns(ratios, preset)
    raw, final = (Level(ratios.of_turns(each.values), "token") for each in (found.raw, found.final))
    return replace(found, raw=raw, final=final)


def _log_ratio(ratios: Ratios, weight: Weight) -> Level:
    """log r that a weight is made of, bounded where `safety_at` says."""
    if weight.action == "psis":
        ratios = ratios.together()  # the tail was found among sums made like this, to the last bit
    if not by_turn(weight):
        return ratios.log_ratio(weight.over, weight.safety, weight.safety_at)
    if weight.safety is None or weight.safety_at == "token":
        return Level(ratios.turns("ratio", weight.safety), "turn")
    return Level(ratios.turns("ratio").clamp(-weight.safety, weight.safety), "turn")


def _weigh(ratios: Ratios, weight: Weight) -> Weighed:
    log = _log_ratio(ratios, weight)
    raw = _held(_exponentiated(ratios, weight, log), log, weight)
    above = past(log.values, weight.upper, 1, weight.strict)
    below = past(log.values, weight.lower, -1, weight.strict)
    final = _held(_ACTIONS[weight.action](ratios, weight, log, raw, either(above, below)), log, weight)
    high, low = (_counted(ratios, flags, log) for flags in (above, below))
    bounded, tries = _bounded(ratios, weight)
    return Weighed(raw, final, high, low, bounded, tries)


def _exponentiated(ratios: Ratios, weight: Weight, log: Level) -> Level:
    """r of log r, which is that of all weights over the same with the same safety bound."""
    key = "e^log r", log.per, weight.over, weight.safety, weight.safety_at
    return ratios.once(key, lambda: log.map(lambda x: torch.exp(x.clamp(-OVERFLOW, OVERFLOW))))


def _counted(ratios: Ratios, flags: Tensor | None, log: Level) -> Tensor:
    """How many of each sequence lie beyond a bound, [S]; none where there is no such bound."""
    if flags is None:
        return ratios.once("no weight", lambda: torch.zeros_like(ratios.batch.lengths, dtype=torch.float64))
    return per_sequence(flags, log, ratios.batch)


def _held(weights: Level, log: Level, weight: Weight) -> Level:
    """The weights, 0 where float32 cannot hold them and the trainer drops those, whatever the lower bound."""
    if weight.overflow == "limit":
        return weights
    return weights.map(lambda x: torch.where(log.values > FLOAT32_OVERFLOW, 0.0, x))


def _bounded(ratios: Ratios, weight: Weight) -> tuple[Tensor, Tensor]:
    """How often |log r| exceeds the safety bound, and of how many: [S] each."""
    over: Over = "token" if weight.safety_at == "token" else weight.over
    return ratios.once(("bounded", over, weight.safety), lambda: _beyond_safety(ratios, over, weight.safety))


def _beyond_safety(ratios: Ratios, over: Over, safety: float | None) -> tuple[Tensor, Tensor]:
    if over == "token":
        return _tokens_beyond(ratios, safety)
    log = Level(ratios.turns("ratio"), "turn") if over == "segment" else ratios.aggregate("ratio", over)
    lengths = ratios.batch.lengths
    tries = (lengths > 0 if log.per == "sequence" else lengths).to(torch.float64)
    if safety is None:
        return torch.zeros_like(tries), tries
    return per_sequence(log.values.abs() > safety, log, ratios.batch), tries


def _tokens_beyond(ratios: Ratios, safety: float | None) -> tuple[Tensor, Tensor]:
    tries = ratios.batch.lengths.to(torch.float64)
    if safety is None:
        return torch.zeros_like(tries), tries
    some = ratios.beyond(safety)
    return segments.count(some.delta.abs() > safety, some.batch.cu_seqlens), tries


def _truncate(ratios: Ratios, weight: Weight, log: Level, raw: Level, outside: Tensor | None) -> Level:
    if not (weight.lower or weight.upper):
        return raw
    return raw.map(lambda x: x.clamp(weight.lower, weight.upper))


def _mask(ratios: Ratios, weight: Weight, log: Level, raw: Level, outside: Tensor | None) -> Level:
    return raw if outside is None else raw.map(lambda x: torch.where(outside, 0.0, x))


def _none(ratios: Ratios, weight: Weight, log: Level, raw: Level, outside: Tensor | None) -> Level:
    return raw


def _psis(ratios: Ratios, weight: Weight, log: Level, raw: Level, outside: Tensor | None) -> Level:
    smoothed = ratios.settled.smoothed(ratios.policy, weight, log.values, log.per, ratios.batch)
    return Level(torch.exp(smoothed.clamp(-OVERFLOW, OVERFLOW)), log.per)


def in_tail(ratios: Ratios, weight: Weight) -> Tensor:
    """Which weights Pareto smoothing may replace, of tokens [T] or sequences [S]."""
    log = ratios.log_ratio(weight.over, weight.safety, weight.safety_at)
    return ratios.settled.in_tail(ratios.policy, weight, log.values, log.per, ratios.batch)


_ACTIONS: dict[str, Callable[[Ratios, Weight, Level, Level, Tensor | None], Level]] = {
    "truncate": _truncate,
    "mask": _mask,
    "none": _none,
    "psis": _psis,
}


def per_sequence(flag: Tensor, like: Level, batch: Batch) -> Tensor:
    """Flags per token or per sequence → counts per sequence [S] float64 (empty sequences count 0).

    Of turns all tokens count.
    """
    if like.per == "token":
        return segments.count(flag, batch.cu_seqlens)
    if like.per == "turn":
        return segments.total(flag * segments.lengths(batch.cu_runs).to(torch.float64), batch.turns)
    return (flag & (batch.lengths > 0)).to(torch.float64)


def needs(preset: Preset, columns: set[str]) -> list[str]:
    """The columns this preset reads and the dump lacks, e.g. ['current_log_probs']."""
    policies = dict.fromkeys((preset.policy, *(rule.policy for rule in preset.reject if rule.policy)))
    wanted = [f"{policy}_log_probs" for policy in policies if policy != "rollout"]
    if any(rule.advantage != "any" for rule in preset.reject):
        wanted.append("advantages")
    return [column for column in wanted if column not in columns]
