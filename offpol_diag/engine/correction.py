"""Weights, rejection and veto of one preset on one batch.

Pure functions; every bound is on r = π_train/π_rollout. Results that concern whole sequences are kept per
sequence [S], those of tokens per token [T]; nothing is broadcast needlessly.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.ratios import OVERFLOW, Level, Ratios
from offpol_diag.engine.segments import Array
from offpol_diag.presets import AGGREGATES, FLOAT32_OVERFLOW, Preset, Reject, Veto, Weight

P = TypeVar("P", Weight, Reject)
T = TypeVar("T")


def outside(x: Array, edge: float | None, sign: int, strict: bool = False) -> Array:
    """Return where x lies above (sign 1) or below (sign −1) an edge; nowhere without one.

    With `strict` also where x equals the edge.
    """
    if edge is None:
        return np.zeros_like(x, dtype=bool)
    if sign > 0:
        return x >= edge if strict else x > edge
    return x <= edge if strict else x < edge


def log_edge(bound: float | None, sign: int) -> float | None:
    """Return the logarithm of a bound on r; None for one that nothing is beyond."""
    return None if bound is None or (bound <= 0 and sign < 0) else math.log(bound)


def passes(ratios: Ratios, rule: Reject) -> Level:
    """Return the tokens or sequences that pass one rejection rule; `ratios` have the rule's numerator."""
    return ratios.once(("passes", rule), lambda: _passes(ratios, rule))


def statistic(ratios: Ratios, rule: Reject) -> Level:
    """Compute the statistic that a rule bounds; for `ratio` its logarithm.

    The rule's `safety` clamps the aggregated log-ratio (ratio and k1 only) or each token's.
    """
    early, late = _safety(rule)
    found = ratios.aggregate(rule.statistic, rule.over, early)
    if late is None:
        return found
    key = "bounded", rule.statistic, rule.over, late
    return ratios.once(key, lambda: found.map(lambda x: np.clip(x, -late, late)))


def _safety(rule: Reject) -> tuple[float | None, float | None]:
    """Return the bound on each token's Δ, and the bound on the aggregate."""
    late = rule.safety_at == "aggregate" and rule.statistic in AGGREGATES
    return (None, rule.safety) if late else (rule.safety, None)


def _passes(ratios: Ratios, rule: Reject) -> Level:
    if rule.over == "batch":
        return _below_cut(ratios, rule)
    above, below = beyond(ratios, rule)
    if rule.on_tokens:
        above, below = (_of_tokens(flags, ratios) for flags in (above, below))
    advantage = above.values if rule.advantage == "any" else _advantage(rule, above, ratios)
    return Level(~fails(rule, above.values, below.values, advantage), above.per)


def _below_cut(ratios: Ratios, rule: Reject) -> Level:
    """Return the tokens below the cut of their trainer batch."""
    cut = ratios.fits.cut(ratios.policy, rule, ratios.batch)
    return statistic(ratios, rule).map(lambda values: values < cut)


def beyond(ratios: Ratios, rule: Reject) -> tuple[Level, Level]:
    """Return the tokens, turns or sequences above the upper bound, and those below the lower one."""
    x = _judged(ratios, rule)
    logs = rule.statistic == "ratio"
    ends = ((rule.upper, 1), (rule.lower, -1))
    edges = [(log_edge(bound, sign) if logs else bound, sign) for bound, sign in ends]
    above, below = (Level(outside(x.values, edge, sign, rule.strict), x.per) for edge, sign in edges)
    return above, below


def _judged(ratios: Ratios, rule: Reject) -> Level:
    """Compute the statistic per unit that the rule judges; per turn for rules on turns."""
    if rule.over != "segment":
        return statistic(ratios, rule)
    early, late = _safety(rule)
    found = ratios.turns(rule.statistic, early)
    return Level(found if late is None else np.clip(found, -late, late), "turn")


def _of_tokens(flags: Level, ratios: Ratios) -> Level:
    """Spread flags to the tokens of this batch."""
    if flags.per == "token":
        return flags
    if flags.per == "turn":
        return Level(ratios.of_turns(flags.values), "token")
    return Level(segments.spread(flags.values, ratios.batch.cu_seqlens), "token")


_SIGNS: dict[str, Callable[[Array, Array, Array], Array]] = {
    "any": lambda above, below, a: above | below,
    "positive": lambda above, below, a: (above | below) & (a > 0),
    "negative": lambda above, below, a: (above | below) & (a < 0),
    "against": lambda above, below, a: (above & (a > 0)) | (below & (a < 0)),
    "against_or_zero": lambda above, below, a: (above & (a > 0)) | (below & (a <= 0)),
    "away": lambda above, below, a: (above | below) & (a > 0),
}
"""Sign condition → violations that count, given the advantage (for `away` times Δ)."""


def fails(rule: Reject, above: Array, below: Array, advantage: Array) -> Array:
    """Return where a violation counts, given the advantage (for `away` times Δ)."""
    return _SIGNS[rule.advantage](above, below, advantage)


def _advantage(rule: Reject, like: Level, ratios: Ratios) -> Array:
    """Return the advantage of tokens, or the mean advantage of sequences; for `away` A·Δ of tokens."""
    batch = ratios.batch
    if batch.advantages is None:
        raise ValueError("a rule conditioned on advantages needs the advantages column")
    if rule.advantage == "away":
        return batch.advantages * ratios.delta
    return batch.advantages if like.per == "token" else mean_advantage(ratios)


def mean_advantage(ratios: Ratios) -> Array:
    """Compute the mean advantage of each sequence, [S]."""
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    return ratios.of("rollout").once("mean A", lambda: segments.mean(advantages, offsets))


def veto_hits(ratios: Ratios, veto: Veto | None) -> Array:
    """Count tokens whose unclamped r lies strictly beyond the veto's bounds, per sequence: [S] float64."""
    return ratios.once(("veto hits", veto), lambda: _veto_hits(ratios, veto))


def _veto_hits(ratios: Ratios, veto: Veto | None) -> Array:
    if veto is None:
        return np.zeros(ratios.batch.sequences)
    high = outside(ratios.delta, log_edge(veto.upper, 1), 1)
    low = outside(ratios.delta, log_edge(veto.lower, -1), -1)
    return segments.count(high | low, ratios.batch.cu_seqlens)


@dataclass(frozen=True)
class Kept:
    """Tokens and sequences that pass rejection and veto.

    Attributes:
        tokens: tokens that pass, [T] bool, or None when no rule acts on tokens.
        sequences: sequences that pass every rule on sequences and the veto, [S] bool.
        vetoed: sequences that the veto drops, [S] bool.
        catastrophic: tokens beyond the veto's bounds, [S] float64.
    """

    tokens: Array | None
    sequences: Array
    vetoed: Array
    catastrophic: Array


def keep(ratios: Ratios, preset: Preset) -> Kept:
    """Apply a preset's rejection rules and veto to the batch."""
    return ratios.once((preset.reject, preset.veto), lambda: _keep(ratios, preset))


def _keep(ratios: Ratios, preset: Preset) -> Kept:
    tokens: Array | None = None
    vetoed, sequences = ratios.once(("vetoed", preset.veto), lambda: _vetoed(ratios, preset.veto))
    for at, rule in enumerate(preset.reject):
        before = preset if rule.among == "all" else replace(preset, reject=preset.reject[:at])
        passed = passes(ratios_for(ratios, before, rule), rule)
        if passed.per == "sequence":
            sequences = sequences & passed.values
        else:
            tokens = passed.values if tokens is None else tokens & passed.values
    return Kept(tokens, sequences, vetoed, veto_hits(ratios, preset.veto))


def _vetoed(ratios: Ratios, veto: Veto | None) -> tuple[Array, Array]:
    """Return the sequences that a veto drops, and all others, [S] bool each."""
    vetoed = veto_hits(ratios, veto) > 0
    return vetoed, ~vetoed


def on_tokens(rules: tuple[Reject, ...]) -> tuple[Reject, ...]:
    """Return the rules under which tokens fail one by one."""
    return tuple(rule for rule in rules if rule.on_tokens)


def ratios_for(ratios: Ratios, preset: Preset, part: Weight | Reject) -> Ratios:
    """Return the ratios for one part of a preset: its numerator, aggregated over the tokens it counts.

    `preset` holds the veto and the rules that drop tokens before this part.
    """
    own = ratios.of(part.policy) if isinstance(part, Reject) else ratios
    if part.among == "all" or part.over == "token":
        return own
    return among(ratios, own, replace(preset, reject=on_tokens(preset.reject)))


def among(ratios: Ratios, own: Ratios, before: Preset) -> Ratios:
    """Return `own`, aggregated only over the tokens that a veto and rules on tokens keep."""
    key = "among", before.policy, before.veto, before.reject
    return own.once(key, lambda: own.among(lambda: _kept_tokens(ratios, before)))


def _kept_tokens(ratios: Ratios, preset: Preset) -> Array:
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
    """

    raw: Level
    final: Level
    high: Array
    low: Array


def weigh(ratios: Ratios, preset: Preset) -> Weighed:
    """Compute the weights of all tokens or sequences; the preset must have a weight rule."""
    weight = preset.weight
    assert weight is not None
    own = ratios_for(ratios, preset, weight)
    return own.once(("weight", weight), lambda: _weigh(own, weight))


def by_turn(weight: Weight | None) -> bool:
    """Return whether a turn has a single weight; Pareto smoothing works on its tokens instead."""
    return weight is not None and weight.over == "segment" and weight.action != "psis"


def _log_ratio(ratios: Ratios, weight: Weight) -> Level:
    """Compute the log r that a weight is made of, bounded where `safety_at` says."""
    if not by_turn(weight):
        return ratios.log_ratio(weight.over, weight.safety, weight.safety_at)
    if weight.safety is None or weight.safety_at == "token":
        return Level(ratios.turns("ratio", weight.safety), "turn")
    return Level(np.clip(ratios.turns("ratio"), -weight.safety, weight.safety), "turn")


def _weigh(ratios: Ratios, weight: Weight) -> Weighed:
    log = _log_ratio(ratios, weight)
    raw = np.exp(np.clip(log.values, -OVERFLOW, OVERFLOW))
    too_large = log.values > FLOAT32_OVERFLOW if weight.overflow == "zero" else None
    if too_large is not None:  # float32 cannot hold them, and the trainer drops them
        raw = np.where(too_large, 0.0, raw)
    high, low = (
        outside(log.values, log_edge(bound, sign), sign, weight.strict)
        for bound, sign in ((weight.upper, 1), (weight.lower, -1))
    )
    final = raw
    if weight.action == "psis":
        smoothed = ratios.fits.smoothed(ratios.policy, weight, log.values, log.per, ratios.batch)
        final = np.exp(np.clip(smoothed, -OVERFLOW, OVERFLOW))
    elif weight.action == "mask":
        final = np.where(high | low, 0.0, raw)
    elif weight.action == "truncate":
        final = np.clip(raw, weight.lower, weight.upper)
    if too_large is not None:
        final = np.where(too_large, 0.0, final)
    counts = (per_sequence(flags, log, ratios.batch) for flags in (high, low))
    values = (Level(x, log.per) for x in (raw, final))
    raws, finals = (_of_tokens(x, ratios) if x.per == "turn" else x for x in values)
    return Weighed(raws, finals, *counts)


def per_sequence(flags: Array, like: Level, batch: Batch) -> Array:
    """Count flags of tokens, turns or sequences [U] by sequence, [S] float64.

    A flagged turn counts all its tokens; an empty sequence counts 0.
    """
    if like.per == "sequence":
        return (flags & (batch.lengths > 0)).astype(np.float64)
    if like.per == "token":
        return segments.count(flags, batch.cu_seqlens)
    return segments.total(flags * segments.lengths(batch.cu_runs).astype(np.float64), batch.turns)


def needs(preset: Preset, columns: set[str]) -> list[str]:
    """Return the columns that a preset reads and the dump lacks, e.g. ['current_log_probs']."""
    policies = dict.fromkeys((preset.policy, *(rule.policy for rule in preset.reject if rule.policy)))
    wanted = [f"{policy}_log_probs" for policy in policies if policy != "rollout"]
    if any(rule.advantage != "any" for rule in preset.reject):
        wanted.append("advantages")
    return [column for column in wanted if column not in columns]
