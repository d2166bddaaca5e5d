"""Weights, rejection and veto of one preset on one batch.

Pure functions; every bound is on r = π_train/π_rollout. Results that concern whole sequences are kept per
sequence [S], those of tokens per token [T]; nothing is broadcast needlessly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch, places
from offpol_diag.engine import segments
from offpol_diag.engine.ratios import COIN, FLOAT32_OVERFLOW, OVERFLOW, Level, Ratios, Split
from offpol_diag.engine.rows import distinct, of_rows
from offpol_diag.engine.segments import Memo, on_host
from offpol_diag.presets import AGGREGATES, BINARY, Over, Preset, Reject, Veto, Weight

P = TypeVar("P", Weight, Reject)
T = TypeVar("T")


def outside(x: Tensor, edges: Sequence[float | None], sign: int, strict: bool = False) -> Tensor:
    """Return where x [U] lies above (sign 1) or below (sign -1) each of n edges, [n, U]; nowhere without one.

    With `strict` also where x equals the edge.
    """
    column = _column(tuple(edges), x.device)
    if sign > 0:
        return x >= column if strict else x > column
    return x <= column if strict else x < column


@lru_cache(1024)
def _column(edges: tuple[float | None, ...], device: torch.device, absent: float = math.nan) -> Tensor:
    """Copy numbers to a device as a column [n, 1]; cached, since they depend on the presets alone."""
    column = torch.tensor([absent if x is None else x for x in edges], dtype=torch.float64)
    return segments.sent(column, device)[:, None]


def log_edge(bound: float | None, sign: int) -> float | None:
    """Return the logarithm of a bound on r; None for one that nothing is beyond."""
    return None if bound is None or (bound <= 0 and sign < 0) else math.log(bound)


def evaluate(each: Iterable[tuple[Ratios, Preset]]) -> None:
    """Compute the weights of presets and judge their rules, each distinct one once and many in one tensor.

    Rows are weights or rules of the same units: [rules, tokens], [rules, S] or [rules, turns]; their bounds
    are a column. Those among the tokens that other rules leave are computed when they are needed.
    """
    weights: dict[object, dict[object, tuple[Ratios, Weight]]] = {}
    rules: dict[object, dict[object, tuple[Ratios, Reject]]] = {}
    for ratios, preset in each:
        weight = preset.weight
        if weight is not None and weight.among == "all":
            own = _source(ratios, weight)
            key = id(own.batch), _units(weight), weight.action, weight.strict, weight.overflow
            weights.setdefault(key, {})[id(own), weight] = own, weight
        for rule in preset.reject:
            if rule.among == "all" or rule.over == "token":
                own = _source(ratios, rule).of(rule.policy)
                by_sign = None if rule.advantage == "any" else (id(own), rule.advantage, rule.advantage_of)
                alike = id(own.batch), _units(rule), rule.on_tokens, rule.strict, by_sign
                rules.setdefault(alike, {})[id(own), rule] = own, rule
    for some in weights.values():
        _in_rows(list(some.values()), "weight", _weigh)
    for judged in rules.values():
        _in_rows(list(judged.values()), "passes", _passes)


def _in_rows(
    each: Sequence[tuple[Ratios, P]], key: str, make: Callable[[Sequence[tuple[Ratios, P]]], list[T]]
) -> None:
    """Compute a function of many weights or rules of the same units, a few at once."""
    ratios, part = each[0]
    like = ratios.batch.rollout if _on_tokens(part) else ratios.batch.lengths
    for some in segments.in_parts(each, like):
        for (own, one), found in zip(some, make(some), strict=True):
            own.know((key, one), found)


def _units(part: Weight | Reject) -> str:
    """Return what a weight or rule judges one by one: tokens, turns, whole trainer batches or sequences."""
    return part.over if part.over in ("token", "segment", "batch") else "sequence"


def _on_tokens(part: Weight | Reject) -> bool:
    """Return whether tokens are weighted, or fail a rule, one by one."""
    return part.on_tokens if isinstance(part, Reject) else part.over == "token"


def _source(ratios: Ratios, part: Weight | Reject) -> Ratios:
    """Return the ratios on which a weight or rule is computed: of all tokens unless it is one on tokens."""
    return ratios if _on_tokens(part) or ratios.whole is None else ratios.whole


def passes(ratios: Ratios, rule: Reject) -> Level:
    """Return the tokens or sequences that pass one rejection rule; `ratios` have the rule's numerator."""
    own = _source(ratios, rule)
    return own.once(("passes", rule), lambda: _passes([(own, rule)])[0])


def passing_tokens(ratios: Ratios, rule: Reject) -> Tensor | None:
    """Return the tokens that pass a rule on tokens, [T] bool; None where all do, if that is cheap to see."""
    if not on_host(ratios.batch.rollout):
        return passes(ratios, rule).values
    if rule.statistic in BINARY and rule.over == "token" and rule.upper is not None:
        few = places(~_binary_kl_below(ratios, rule.upper, both=rule.statistic == "binary_kl_max"))
        if rule.lower is None and 2 * len(few) < ratios.batch.tokens:
            some = Ratios(ratios.batch.some(few), ratios.policy, ratios.fits)
            return torch.ones_like(ratios.delta, dtype=torch.bool).index_put_(
                (few,), passes(some, rule).values
            )
    if rule.over not in ("token", "batch"):
        above, below = beyond(ratios, rule)
        if not (above.values | below.values).any():
            return None
    return passes(ratios, rule).values


def _binary_kl_below(ratios: Ratios, bound: float, *, both: bool) -> Tensor:
    """Return tokens whose binary KL (of both directions) is certainly below a bound, as χ² is, never less.

    χ² = π_rollout x² / ((1 + x) (1 − π_train)) with x = r − 1, of the other direction π_rollout x² /
    (1 − π_rollout). `COIN` adds at most itself to the KL; clamping both probabilities never adds to it.
    """

    def chi2() -> tuple[Tensor, Tensor]:
        x, rollout = ratios.excess(), ratios.probabilities
        return rollout * x.square(), (x + 1) * (1 - rollout * (x + 1))

    size, room = ratios.once("binary χ²", chi2)
    most = 0.99 * (bound - COIN)
    below = size < most * room
    return below & (size < most * (1 - ratios.probabilities)) if both else below


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


def _passes(each: Sequence[tuple[Ratios, Reject]]) -> list[Level]:
    """Judge rules on the same units and of the same sign of A."""
    ratios, rule = each[0]
    if rule.over == "batch":
        return [_below_cut(*one) for one in each]
    above, below = _beyond(each)
    if rule.on_tokens:
        above, below = (_of_tokens(flags, ratios) for flags in (above, below))
    if rule.advantage == "any":
        failed = above.values | below.values
    else:
        failed = fails(rule, above.values, below.values, _advantage(rule, above, ratios))
    return [Level(row, above.per) for row in (~failed).unbind()]


def _below_cut(ratios: Ratios, rule: Reject) -> Level:
    """Return the tokens below the cut of their trainer batch."""
    cut = ratios.fits.cut(ratios.policy, rule, ratios.batch)
    return statistic(ratios, rule).map(lambda values: values < cut)


def beyond(ratios: Ratios, rule: Reject) -> tuple[Level, Level]:
    """Return the tokens, turns or sequences above the upper bound, and those below the lower one."""
    above, below = (flags.map(lambda x: x[0]) for flags in _beyond([(ratios, rule)]))
    return above, below


def _beyond(each: Sequence[tuple[Ratios, Reject]]) -> tuple[Level, Level]:
    """Compute `beyond` of rules on the same units, as rows."""
    judged, strict = [_judged(*one) for one in each], each[0][1].strict
    x, found = torch.stack([one.values for one in judged]), []
    for sign in (1, -1):
        bounds = [(rule.upper if sign > 0 else rule.lower, rule.statistic) for _, rule in each]
        edges = [log_edge(bound, sign) if of == "ratio" else bound for bound, of in bounds]
        found.append(Level(outside(x, edges, sign, strict), judged[0].per))
    return found[0], found[1]


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
    return batch.advantages if like.per == "token" else mean_advantage(ratios)


def mean_advantage(ratios: Ratios) -> Tensor:
    """Compute the mean advantage of each sequence, [S]."""
    advantages, offsets = ratios.batch.advantages, ratios.batch.cu_seqlens
    assert advantages is not None
    return ratios.of("rollout").once("mean A", lambda: segments.mean(advantages, offsets))


def veto_hits(ratios: Ratios, veto: Veto | None) -> Tensor:
    """Count tokens whose unclamped r lies strictly beyond the veto's bounds, per sequence: [S] float64."""
    return ratios.once(("veto hits", veto), lambda: _veto_hits(ratios, veto))


def _veto_hits(ratios: Ratios, veto: Veto | None) -> Tensor:
    if veto is None:
        return torch.zeros_like(ratios.batch.lengths, dtype=torch.float64)
    high = outside(ratios.delta, [log_edge(veto.upper, 1)], 1)[0]
    low = outside(ratios.delta, [log_edge(veto.lower, -1)], -1)[0]
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
        passed = passes(ratios_for(judge, before, rule), rule)
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


def ratios_for(ratios: Ratios, preset: Preset, part: Weight | Reject) -> Ratios:
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
    whole = ratios_for(ratios.whole, preset, part)
    return own.once(("among", key), lambda: replace(own, whole=whole, _memo=Memo()))


def among(ratios: Ratios, own: Ratios, before: Preset) -> Ratios:
    """Return `own`, aggregated only over the tokens that a veto and rules on tokens keep."""
    key = "among", before.policy, before.veto, before.reject
    return own.once(
        key, lambda: own.among(lambda: _kept_tokens(ratios, before), _kept_split(ratios, own, before))
    )


def _kept_split(ratios: Ratios, own: Ratios, before: Preset) -> Split | None:
    """Return the far tokens that are kept, where the near ones are all kept; else None."""
    if ratios.split is None or own.split is None or not ratios.split.leaves(before):
        return None
    kept = keep(ratios.split.far, before)
    return replace(own.split, counted=kept.tokens, rows=kept.sequences)


def _kept_tokens(ratios: Ratios, preset: Preset) -> Tensor:
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
    return weigh_units(ratios, preset)


def weigh_units(ratios: Ratios, preset: Preset) -> Weighed:
    """Compute the weights of tokens, turns or sequences, whichever have one; there must be a weight rule."""
    assert preset.weight is not None
    weight = preset.weight
    own = ratios_for(_source(ratios, weight), preset, weight)
    return own.once(("weight", weight), lambda: _weigh([(own, weight)])[0])


def by_turn(weight: Weight | None) -> bool:
    """Return whether a turn has a single weight; Pareto smoothing works on its tokens instead."""
    return weight is not None and weight.over == "segment" and weight.action != "psis"


def _of_turns(ratios: Ratios, preset: Preset) -> Weighed:
    """Spread the weights of turns to the tokens of this batch."""
    found = weigh_units(ratios, preset)
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


def _weigh(each: Sequence[tuple[Ratios, Weight]]) -> list[Weighed]:
    """Compute weights of the same units that are alike but for their log-ratios and bounds."""
    ratios, weight = each[0]
    levels = [_log_ratio(*one) for one in each]
    per, (first, at) = levels[0].per, distinct([id(x.values) for x in levels])
    logs = torch.stack([levels[i].values for i in first])
    raws = torch.exp(logs.clamp(-OVERFLOW, OVERFLOW))
    if weight.overflow == "zero":  # float32 cannot hold them, and the trainer drops them
        raws = torch.where(logs > FLOAT32_OVERFLOW, 0.0, raws)
    none = ratios.once("no weight", lambda: torch.zeros_like(ratios.batch.lengths, dtype=torch.float64))
    x, flags, counts = of_rows(logs, at), [], []
    for bounds, sign in (([one.upper for _, one in each], 1), ([one.lower for _, one in each], -1)):
        edges = [log_edge(bound, sign) for bound in bounds]
        flags.append(outside(x, edges, sign, weight.strict))
        rows = per_sequence(flags[-1], levels[0], ratios.batch)
        counts.append([none if edge is None else row for edge, row in zip(edges, rows, strict=True)])
    raw = raws.unbind()
    if weight.action == "none":
        final = [raw[i] for i in at]
    elif weight.action == "psis":
        final = [_smoothed(*one, level) for one, level in zip(each, levels, strict=True)]
    elif weight.action == "mask":
        final = list(torch.where(flags[0] | flags[1], 0.0, of_rows(raws, at)).unbind())
    else:
        low = _column(tuple(one.lower for _, one in each), x.device, -math.inf)
        high = _column(tuple(one.upper for _, one in each), x.device, math.inf)
        final = list(of_rows(raws, at).clamp(low, high).unbind())
    if weight.overflow == "zero":
        final = [
            torch.where(level.values > FLOAT32_OVERFLOW, 0.0, w)
            for level, w in zip(levels, final, strict=True)
        ]
    return [
        Weighed(Level(raw[row], per), Level(own, per), high, low, *_bounded(*one))
        for one, row, own, high, low in zip(each, at, final, *counts, strict=True)
    ]


def _bounded(ratios: Ratios, weight: Weight) -> tuple[Tensor, Tensor]:
    """Count how often |log r| exceeds the safety bound, else `OVERFLOW`, and of how many: [S] each."""
    over: Over = "token" if weight.safety_at == "token" and weight.safety is not None else weight.over
    safety, lengths = OVERFLOW if weight.safety is None else weight.safety, ratios.batch.lengths

    def made() -> tuple[Tensor, Tensor]:
        tries = (lengths if over in ("token", "segment") else lengths > 0).to(torch.float64)
        if over == "token":
            some = ratios.beyond(safety)
            return segments.count(some.delta.abs() > safety, some.batch.cu_seqlens), tries
        log = Level(ratios.turns("ratio"), "turn") if over == "segment" else ratios.aggregate("ratio", over)
        return per_sequence((log.values.abs() > safety)[None], log, ratios.batch)[0], tries

    return ratios.once(("bounded", over, safety), made)


def _smoothed(ratios: Ratios, weight: Weight, log: Level) -> Tensor:
    """Compute weights whose largest are smoothed."""
    smoothed = ratios.fits.smoothed(ratios.policy, weight, log.values, log.per, ratios.batch)
    return torch.exp(smoothed.clamp(-OVERFLOW, OVERFLOW))


def in_tail(ratios: Ratios, weight: Weight) -> Tensor:
    """Return the weights that Pareto smoothing may replace, of tokens [T] or sequences [S]."""
    log = ratios.log_ratio(weight.over, weight.safety, weight.safety_at)
    return ratios.fits.in_tail(ratios.policy, weight, log.values, log.per, ratios.batch)


def per_sequence(flags: Tensor, like: Level, batch: Batch) -> Tensor:
    """Count flags by sequence: rows [n, U] of tokens, turns or sequences → [n, S] float64.

    A flagged turn counts all its tokens; an empty sequence counts 0.
    """
    if like.per == "sequence":
        return (flags & (batch.lengths > 0)).to(torch.float64)
    if like.per == "token":
        return segments.of_rows(segments.total, segments.numbers(flags), batch.cu_seqlens)
    tokens = flags * segments.lengths(batch.cu_runs).to(torch.float64)
    return segments.of_rows(segments.total, tokens, batch.turns)


def needs(preset: Preset, columns: set[str]) -> list[str]:
    """Return the columns that a preset reads and the dump lacks, e.g. ['current_log_probs']."""
    policies = dict.fromkeys((preset.policy, *(rule.policy for rule in preset.reject if rule.policy)))
    wanted = [f"{policy}_log_probs" for policy in policies if policy != "rollout"]
    if any(rule.advantage != "any" for rule in preset.reject):
        wanted.append("advantages")
    return [column for column in wanted if column not in columns]
