"""Weights, rejection and veto of one preset on one batch.

Pure functions; every bound is on r = π_train/π_rollout. Results that concern whole sequences are kept per
sequence [S], those of tokens per token [T]; nothing is broadcast needlessly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from offpol_diag.batch import Batch, places
from offpol_diag.engine import segments
from offpol_diag.engine.ratios import COIN, FLOAT32_OVERFLOW, OVERFLOW, Apart, Level, Ratios
from offpol_diag.engine.segments import Memo, here
from offpol_diag.presets import AGGREGATES, Over, Preset, Reject, Veto, Weight


def outside(x: Tensor, edge: float | None, sign: int, strict: bool = False) -> Tensor | None:
    """Return where x lies above (sign 1) or below (sign -1) an edge; with `strict` also where x equals it.

    None without an edge.
    """
    if edge is None:
        return None
    if sign > 0:
        return x >= edge if strict else x > edge
    return x <= edge if strict else x < edge


def log_edge(bound: float | None, sign: int) -> float | None:
    """Return the logarithm of a bound on r; None for one that nothing is beyond."""
    return None if bound is None or (bound <= 0 and sign < 0) else math.log(bound)


def either(*flags: Tensor | None) -> Tensor | None:
    """Return where any of the given flags is set; None where all are None."""
    there = [one for one in flags if one is not None]
    return reduce(torch.logical_or, there) if there else None


def passes(ratios: Ratios, rule: Reject) -> Level:
    """Return the tokens or sequences that pass one rejection rule; `ratios` have the rule's numerator."""
    if ratios.whole is not None and not rule.on_tokens:
        return passes(ratios.whole, rule)
    return ratios.once(rule, lambda: _passes(ratios, rule))


def passing_tokens(ratios: Ratios, rule: Reject) -> Tensor | None:
    """Return the tokens that pass a rule on tokens, [T] bool; None where all do, if that is cheap to see."""
    if not here(ratios.batch.rollout):
        return passes(ratios, rule).values
    if rule.statistic == "binary_kl" and rule.over == "token" and rule.upper is not None:
        few = places(~_binary_kl_below(ratios, rule.upper))
        if rule.lower is None and 2 * len(few) < ratios.batch.tokens:
            some = Ratios(ratios.batch.some(few), ratios.policy, ratios.settled)
            return torch.ones_like(ratios.delta, dtype=torch.bool).index_put_(
                (few,), passes(some, rule).values
            )
    if rule.over not in ("token", "batch"):
        above, below = beyond(ratios, rule)
        if not (above.values | below.values).any():
            return None
    return passes(ratios, rule).values


def _binary_kl_below(ratios: Ratios, bound: float) -> Tensor:
    """Return tokens whose binary KL is certainly below a bound, as χ² is, which is never less.

    χ² = π_rollout x² / ((1 + x) (1 − π_train)) with x = r − 1; `COIN` adds at most itself to the KL.
    """
    x, rollout = ratios.excess(), ratios.probabilities
    train = rollout * (x + 1)
    return rollout * x.square() < 0.99 * (bound - COIN) * (x + 1) * (1 - train)


def statistic(ratios: Ratios, rule: Reject) -> Level:
    """Compute the statistic that a rule bounds; for `ratio` its logarithm.

    The rule's `safety` clamps the aggregated log-ratio (ratio and k1 only) or each token's.
    """
    early, late = _safety(rule)
    found = ratios.aggregate(rule.statistic, rule.over, early)
    if late is None:
        return found
    key = "bounded", rule.statistic, rule.over, late
    return ratios.once(key, lambda: found.map(lambda x: x.clamp(-late, late)))


def _safety(rule: Reject) -> tuple[float | None, float | None]:
    """Return the bound on each token's Δ, and the bound on the aggregate."""
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
    """Return the tokens, turns or sequences above the upper bound, and those below the lower one."""
    x = _judged(ratios, rule)
    found = (_outside(x.values, rule, sign) for sign in (1, -1))
    above, below = (torch.zeros_like(x.values, dtype=torch.bool) if one is None else one for one in found)
    return Level(above, x.per), Level(below, x.per)


def _judged(ratios: Ratios, rule: Reject) -> Level:
    """Compute the statistic per unit that the rule judges; per turn for rules on turns."""
    if rule.over != "segment":
        return statistic(ratios, rule)
    early, late = _safety(rule)
    found = ratios.turns(rule.statistic, early)
    return Level(found if late is None else found.clamp(-late, late), "turn")


def _of_tokens(flags: Level, ratios: Ratios) -> Level:
    """Spread flags to the tokens of this batch."""
    if flags.per == "token":
        return flags
    if flags.per == "turn":
        return Level(ratios.of_turns(flags.values), "token")
    return Level(segments.spread(flags.values, ratios.batch.cu_seqlens), "token")


def _outside(x: Tensor, rule: Reject, sign: int) -> Tensor | None:
    """Return where a statistic is beyond the rule's upper (sign 1) or lower (-1) bound; None without one."""
    bound = rule.upper if sign > 0 else rule.lower
    return outside(x, log_edge(bound, sign) if rule.statistic == "ratio" else bound, sign, rule.strict)


def _inside(x: Tensor, rule: Reject) -> Tensor:
    """Return where a statistic lies within the rule's bounds."""
    found = either(*(_outside(x, rule, sign) for sign in (1, -1)))
    return torch.ones_like(x, dtype=torch.bool) if found is None else ~found


_SIGNS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "any": lambda above, below, a: above | below,
    "positive": lambda above, below, a: (above | below) & (a > 0),
    "negative": lambda above, below, a: (above | below) & (a < 0),
    "against": lambda above, below, a: (above & (a > 0)) | (below & (a < 0)),
    "against_or_zero": lambda above, below, a: (above & (a > 0)) | (below & (a <= 0)),
    "away": lambda above, below, a: (above | below) & (a > 0),
}
"""Sign condition → violations that count, given the advantage (for `away` times Δ)."""


def fails(rule: Reject, above: Tensor, below: Tensor, advantage: Tensor) -> Tensor:
    """Return where a violation counts, given the advantage (for `away` times Δ)."""
    return _SIGNS[rule.advantage](above, below, advantage)


def _advantage(rule: Reject, like: Level, ratios: Ratios) -> Tensor:
    """Return the advantage of tokens, or the mean advantage of sequences; for `away` A·Δ of tokens."""
    batch = ratios.batch
    if batch.advantages is None:
        raise ValueError("a rule conditioned on advantages needs the advantages column")
    if rule.advantage == "away":
        return batch.advantages * ratios.delta
    if like.per == "token":
        return batch.advantages
    advantages = batch.advantages
    return ratios.of("rollout").once("mean A", lambda: segments.mean(advantages, batch.cu_seqlens))


def veto_hits(ratios: Ratios, veto: Veto | None) -> Tensor:
    """Count tokens whose unclamped r lies strictly beyond the veto's bounds, per sequence: [S] float64."""
    return ratios.once(("veto hits", veto), lambda: _veto_hits(ratios, veto))


def _veto_hits(ratios: Ratios, veto: Veto | None) -> Tensor:
    veto = veto or Veto()
    edges = (log_edge(veto.lower, -1), -1), (log_edge(veto.upper, 1), 1)
    hits = either(*(outside(ratios.delta, edge, sign) for edge, sign in edges))
    if hits is None:
        return torch.zeros_like(ratios.batch.lengths, dtype=torch.float64)
    return segments.count(hits, ratios.batch.cu_seqlens)


@dataclass(frozen=True)
class Kept:
    """Tokens and sequences that pass rejection and veto.

    Attributes:
        tokens: tokens that pass, [T] bool, or None when no rule acts on tokens.
        sequences: sequences that pass every rule on sequences and the veto, [S] bool.
        vetoed: sequences that the veto drops, [S] bool.
        catastrophic: tokens beyond the veto's bounds, [S] float64.
    """

    tokens: Tensor | None
    sequences: Tensor
    vetoed: Tensor
    catastrophic: Tensor


def keep(ratios: Ratios, preset: Preset) -> Kept:
    """Apply a preset's rejection rules and veto to the batch."""
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
    """Return the sequences that a veto drops, and all others, [S] bool each."""
    vetoed = veto_hits(ratios, veto) > 0
    return vetoed, ~vetoed


def on_tokens(rules: tuple[Reject, ...]) -> tuple[Reject, ...]:
    """Return the rules under which tokens fail one by one."""
    return tuple(rule for rule in rules if rule.on_tokens)


def seen(ratios: Ratios, preset: Preset, part: Weight | Reject) -> Ratios:
    """Return the ratios for one part of a preset: its numerator, aggregated over the tokens it counts.

    `preset` holds the veto and the rules that drop tokens before this part.
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
    """Return `own`, aggregated only over the tokens that a veto and rules on tokens keep."""
    key = "among", before.policy, before.veto, before.reject
    return own.once(key, lambda: own.among(lambda: _left(ratios, before), _left_apart(ratios, own, before)))


def _left_apart(ratios: Ratios, own: Ratios, before: Preset) -> Apart | None:
    """Return the far tokens that are kept, where the near ones are all kept; else None."""
    if ratios.apart is None or own.apart is None or not ratios.apart.leaves(before):
        return None
    kept = keep(ratios.apart.far, before)
    return replace(own.apart, left=kept.tokens, rows=kept.sequences)


def _left(ratios: Ratios, preset: Preset) -> Tensor:
    """Return the tokens that the veto and rules on tokens keep, [T] bool."""
    kept = keep(ratios, preset)
    sequences = segments.spread(kept.sequences, ratios.batch.cu_seqlens)
    return sequences if kept.tokens is None else sequences & kept.tokens


@dataclass(frozen=True)
class Weighed:
    """A preset's weights before rejection.

    Attributes:
        raw: the ratio after the safety bound, before truncation or masking.
        final: after truncation or masking; not normalised (ESS does not depend on scale).
        high: number of tokens (for turns all of theirs; for a sequence weight 1) above `upper`, [S].
        low: the same number below `lower`, [S].
        bounded: number of weights or tokens on which the safety bound acted, [S].
        tries: number of weights, or of tokens where the safety bound acts on tokens, [S].
    """

    raw: Level
    final: Level
    high: Tensor
    low: Tensor
    bounded: Tensor
    tries: Tensor


def weight_key(preset: Preset) -> object:
    """Key of a preset's weights: presets with equal keys have equal weights."""
    if preset.weight is None or preset.weight.among == "all":
        return preset.weight
    return preset.weight, preset.veto, on_tokens(preset.reject)


def weigh(ratios: Ratios, preset: Preset) -> Weighed:
    """Compute the weights of all tokens or sequences; the preset must have a weight rule."""
    assert preset.weight is not None
    weight = preset.weight
    if by_turn(weight):
        return ratios.once(("of turns", weight_key(preset)), lambda: _of_turns(ratios, preset))
    if ratios.whole is not None and weight.over != "token":
        return weigh(ratios.whole, preset)
    return ratios.once(("weight", weight_key(preset)), lambda: _weigh(seen(ratios, preset, weight), weight))


def by_turn(weight: Weight | None) -> bool:
    """Return whether a turn has a single weight; Pareto smoothing works on its tokens instead."""
    return weight is not None and weight.over == "segment" and weight.action != "psis"


def weigh_turns(ratios: Ratios, preset: Preset) -> Weighed:
    """Compute the weights of all turns; the preset's weight rule must be one on turns."""
    assert preset.weight is not None
    weight, whole = preset.weight, ratios.whole or ratios
    return whole.once(("weight", weight_key(preset)), lambda: _weigh(seen(whole, preset, weight), weight))


def _of_turns(ratios: Ratios, preset: Preset) -> Weighed:
    """Spread the weights of turns to the tokens of this batch."""
    found = weigh_turns(ratios, preset)
    raw, final = (Level(ratios.of_turns(each.values), "token") for each in (found.raw, found.final))
    return replace(found, raw=raw, final=final)


def _log_ratio(ratios: Ratios, weight: Weight) -> Level:
    """Compute the log r that a weight is made of, bounded where `safety_at` says."""
    if weight.action == "psis":
        ratios = ratios.together()  # bitwise equal to the sums in which the tail was found
    if not by_turn(weight):
        return ratios.log_ratio(weight.over, weight.safety, weight.safety_at)
    if weight.safety is None or weight.safety_at == "token":
        return Level(ratios.turns("ratio", weight.safety), "turn")
    return Level(ratios.turns("ratio").clamp(-weight.safety, weight.safety), "turn")


def _weigh(ratios: Ratios, weight: Weight) -> Weighed:
    log = _log_ratio(ratios, weight)
    key = "e^log r", log.per, weight.over, weight.safety, weight.safety_at
    raw = ratios.once(key, lambda: log.map(lambda x: torch.exp(x.clamp(-OVERFLOW, OVERFLOW))))
    edges = (log_edge(weight.upper, 1), 1), (log_edge(weight.lower, -1), -1)
    above, below = (outside(log.values, edge, sign, weight.strict) for edge, sign in edges)

    def held(weights: Level) -> Level:
        """Set weights that float32 cannot hold to 0, where the trainer drops those."""
        if weight.overflow == "limit":
            return weights
        return weights.map(lambda x: torch.where(log.values > FLOAT32_OVERFLOW, 0.0, x))

    def counted(flags: Tensor | None) -> Tensor:
        """Count the weights of each sequence beyond a bound, [S]; 0 without a bound."""
        if flags is None:
            return ratios.once(
                "no weight", lambda: torch.zeros_like(ratios.batch.lengths, dtype=torch.float64)
            )
        return per_sequence(flags, log, ratios.batch)

    final = held(_ACTIONS[weight.action](ratios, weight, log, held(raw), either(above, below)))
    return Weighed(held(raw), final, counted(above), counted(below), *_bounded(ratios, weight))


def _bounded(ratios: Ratios, weight: Weight) -> tuple[Tensor, Tensor]:
    """Count how often |log r| exceeds the safety bound, and of how many: [S] each."""
    over: Over = "token" if weight.safety_at == "token" else weight.over
    safety, lengths = weight.safety, ratios.batch.lengths

    def made() -> tuple[Tensor, Tensor]:
        tries = (lengths if over in ("token", "segment") else lengths > 0).to(torch.float64)
        if safety is None:
            return torch.zeros_like(tries), tries
        if over == "token":
            some = ratios.beyond(safety)
            return segments.count(some.delta.abs() > safety, some.batch.cu_seqlens), tries
        log = Level(ratios.turns("ratio"), "turn") if over == "segment" else ratios.aggregate("ratio", over)
        return per_sequence(log.values.abs() > safety, log, ratios.batch), tries

    return ratios.once(("bounded", over, safety), made)


def _truncate(ratios: Ratios, weight: Weight, log: Level, raw: Level, outside: Tensor | None) -> Level:
    if not (weight.lower or weight.upper):
        return raw
    return raw.map(lambda x: x.clamp(weight.lower, weight.upper))


def _mask(ratios: Ratios, weight: Weight, log: Level, raw: Level, outside: Tensor | None) -> Level:
    return raw if outside is None else raw.map(lambda x: torch.where(outside, 0.0, x))


def _psis(ratios: Ratios, weight: Weight, log: Level, raw: Level, outside: Tensor | None) -> Level:
    smoothed = ratios.settled.smoothed(ratios.policy, weight, log.values, log.per, ratios.batch)
    return Level(torch.exp(smoothed.clamp(-OVERFLOW, OVERFLOW)), log.per)


_ACTIONS: dict[str, Callable[[Ratios, Weight, Level, Level, Tensor | None], Level]] = {
    "truncate": _truncate,
    "mask": _mask,
    "none": lambda ratios, weight, log, raw, outside: raw,
    "psis": _psis,
}


def in_tail(ratios: Ratios, weight: Weight) -> Tensor:
    """Return the weights that Pareto smoothing may replace, of tokens [T] or sequences [S]."""
    log = ratios.log_ratio(weight.over, weight.safety, weight.safety_at)
    return ratios.settled.in_tail(ratios.policy, weight, log.values, log.per, ratios.batch)


def per_sequence(flag: Tensor, like: Level, batch: Batch) -> Tensor:
    """Count flags per token or sequence by sequence, [S] float64 (empty sequences count 0).

    A flagged turn counts all its tokens.
    """
    if like.per == "token":
        return segments.count(flag, batch.cu_seqlens)
    if like.per == "turn":
        return segments.total(flag * segments.lengths(batch.cu_runs).to(torch.float64), batch.turns)
    return (flag & (batch.lengths > 0)).to(torch.float64)


def needs(preset: Preset, columns: set[str]) -> list[str]:
    """Return the columns that a preset reads and the dump lacks, e.g. ['current_log_probs']."""
    policies = dict.fromkeys((preset.policy, *(rule.policy for rule in preset.reject if rule.policy)))
    wanted = [f"{policy}_log_probs" for policy in policies if policy != "rollout"]
    if any(rule.advantage != "any" for rule in preset.reject):
        wanted.append("advantages")
    return [column for column in wanted if column not in columns]
