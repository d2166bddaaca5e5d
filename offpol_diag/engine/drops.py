"""Tokens that one preset drops and another keeps: how many, of what kind, and examples.

A token is dropped if it contributes nothing to the update: rejected, vetoed, or of weight 0. A sequence is
dropped if all its tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from offpol_diag.core.intervals import ANYWHERE, AS_SEEN, Formula, Reader, mean, missing
from offpol_diag.core.steps import rule as rule_of
from offpol_diag.core.steps import steps
from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments, worst
from offpol_diag.engine.bootstrap import resampled
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array
from offpol_diag.engine.tally import Arrays, Names, Records, Tally
from offpol_diag.engine.terms import Drift
from offpol_diag.presets import OF_SEQUENCES, Preset, Reject, formulas
from offpol_diag.result import Drops, LostSequence, Subset

MOST = 8
"""With more presets than this, drops are not compared."""
EXAMPLES = 5
EVERY = "every"
"""Prefix of the columns over all tokens and all sequences."""

Pair = tuple[Preset, Preset]


def tally(context: BatchContext, drift: Drift, pairs: Sequence[Pair]) -> Tally:
    """Compute sums over tokens that one preset drops and the other keeps, both ways, and examples."""
    every = np.ones(context.batch.tokens, dtype=bool)
    columns = _columns(context, drift, EVERY, every, context.counts["sequences"])
    examples: dict[str, Records] = {}
    for ours, theirs in [*pairs, *((b, a) for a, b in pairs)]:
        kept = _kept(context, ours)
        lost, name = _kept(context, theirs) & ~kept, f"{ours.name}>{theirs.name}"
        columns |= _columns(context, drift, name, lost, _gone(context.batch, lost, kept))
        examples[f"drops.{name}"] = _examples(context, drift, ours, lost)
    sums = resampled(np.stack((*columns.values(),)), context.draws, context.batch.key)
    return Tally(Arrays(sums={"drops": sums}, names={"drops": Names(tuple(columns))}), records=examples)


def _kept(context: BatchContext, preset: Preset) -> Array:
    """Return the tokens that a preset keeps with a weight that is not 0, [T] bool."""
    evaluator, own = context.evaluator, steps(preset)
    kept: Array = evaluator.kept(own.tokens, own.sequences)
    if own.weight is None:
        return kept
    nonzero: Array = evaluator.weight(own.weight) != 0
    return kept & (nonzero if own.weight.on_tokens else evaluator.sequences.spread(nonzero))


def _gone(batch: Batch, lost: Array, left: Array) -> Array:
    """Return 1 for sequences that lose tokens and keep none, else 0, [S]."""
    some, none = (segments.count(flags, batch.cu_seqlens) for flags in (lost, left))
    result: Array = ((some > 0) & (none == 0)).astype(np.float64)
    return result


# ---------------------------------------------------------------- sums


def _columns(context: BatchContext, drift: Drift, name: str, lost: Array, gone: Array) -> dict[str, Array]:
    """Compute columns [S] over the tokens `lost` [T], and over the sequences `gone` [S]."""
    batch, offsets, delta = context.batch, context.batch.cu_seqlens, _delta(context, drift)
    many = segments.count(lost, offsets)
    result = {"tokens.delta": segments.total(np.where(lost, delta, 0.0), offsets)}
    result["sequences.delta"] = gone * segments.total(delta, offsets)
    for unit, count in (("tokens", many), ("sequences", gone)):
        result |= {f"{unit}.count": count, f"{unit}.length": count * batch.lengths}
        if batch.rewards is not None:
            result[f"{unit}.reward"] = count * batch.rewards
    if batch.advantages is not None:
        mean = segments.mean(batch.advantages, offsets)
        for sign, compare in (("positive", np.greater), ("negative", np.less)):
            result[f"tokens.{sign}"] = segments.count(compare(batch.advantages, 0) & lost, offsets)
            result[f"sequences.{sign}"] = gone * compare(mean, 0)
    return {f"{name}|{column}": x for column, x in result.items()}


def _delta(context: BatchContext, drift: Drift) -> Array:
    q, p = context.batch.policy(drift.denominator), context.batch.policy(drift.numerator)
    assert q is not None
    assert p is not None
    return p - q


# ---------------------------------------------------------------- examples


def _examples(context: BatchContext, drift: Drift, preset: Preset, lost: Array) -> Records:
    """Return the sequences with the largest |ΣΔ| among those that lose tokens."""
    batch = context.batch
    tokens = segments.count(lost, batch.cu_seqlens)
    total = np.nan_to_num(segments.total(_delta(context, drift), batch.cu_seqlens))
    scores = np.where(tokens > 0, np.abs(total), -1.0)
    best = np.argsort(-scores, kind="stable")[:EXAMPLES]
    at = [i for i in best.tolist() if scores[i] >= 0]
    rows = [_example(context, i, int(tokens[i]), float(total[i]), preset) for i in at]
    return worst.records(EXAMPLES, LostSequence, [(abs(row.log_ratio_sum), row) for row in rows])


def _example(context: BatchContext, at: int, tokens: int, total: float, preset: Preset) -> LostSequence:
    batch = context.batch
    return LostSequence(
        sequence_id=worst.sequence_id(batch, at),
        step=worst.step(batch, at),
        length=int(batch.lengths[at]),
        tokens=tokens,
        log_ratio_sum=total,
        reward=None if batch.rewards is None else float(batch.rewards[at]),
        fired=fired(context, preset, at),
    )


def fired(context: BatchContext, preset: Preset, at: int) -> list[str]:
    """List in words the parts of a preset that drop tokens of the sequence `at`."""
    result, evaluator, batch, own = list[str](), context.evaluator, context.batch, steps(preset)
    for reject in preset.reject:
        rule = rule_of(preset.policy, reject)
        many = int((~_in_sequence(evaluator.passes(rule), reject.on_tokens, batch, at)).sum())
        if many:
            result.append(_broken(reject, many, evaluator.judged(rule), at))
    veto = own.sequences.veto
    if veto is not None and (vetoed := int(evaluator.veto_hits(veto)[at])):
        result.append(f"veto: {_tokens(vetoed)} with {formulas.veto(preset.veto).removeprefix('any ')}")
    if own.weight is not None:
        weights, on_tokens = evaluator.weight(own.weight), own.weight.on_tokens
        many = int((_in_sequence(weights, on_tokens, batch, at) == 0).sum())
        what = _tokens(many) if on_tokens else "the sequence"
        result.append(f"{what} of weight 0: {formulas.weight(preset.weight)}" if many else "")
    return [text for text in result if text]


def _broken(rule: Reject, many: int, values: Array, at: int) -> str:
    """Describe a broken rule: by the number of tokens, or by the value of the sequence `at`."""
    bounds = f"outside {formulas.bounds(rule)}{formulas.SIGNS[rule.advantage]}"
    if rule.over not in OF_SEQUENCES:
        return f"{_tokens(many)} {bounds}"
    value = float(values[at])
    said = math.exp(min(value, 700.0)) if rule.statistic == "ratio" else value
    return f"{formulas.judged(rule)} = {said:.3g}, {bounds}"


def _tokens(many: int) -> str:
    return "1 token" if many == 1 else f"{many:,} tokens"


def _in_sequence(values: Array, on_tokens: bool, batch: Batch, at: int) -> Array:
    """Return the values of one sequence's tokens, or the value of the sequence, [1]."""
    if on_tokens:
        return values[int(batch.cu_seqlens[at]) : int(batch.cu_seqlens[at + 1])]
    return values[at : at + 1]


# ---------------------------------------------------------------- reading


def everything(reader: Reader) -> tuple[Subset, Subset]:
    """Read the numbers of all tokens, and of all sequences, for comparison."""
    return _subset(reader, EVERY, "tokens"), _subset(reader, EVERY, "sequences")


def drops(reader: Reader, records: Mapping[str, Records], ours: str, theirs: str) -> Drops:
    """Read the numbers of what one preset drops and another keeps."""
    name = f"{ours}>{theirs}"
    return Drops(
        dropped_by=ours,
        kept_by=theirs,
        tokens=_subset(reader, name, "tokens"),
        sequences=_subset(reader, name, "sequences"),
        examples=worst.read(records[f"drops.{name}"], LostSequence),
    )


COLUMNS = {
    "length": ("length", "tokens", "mean length of their sequences"),
    "reward": ("reward", "", "mean reward of their sequences"),
    "positive": ("positive", "fraction", "share with A > 0"),
    "negative": ("negative", "fraction", "share with A < 0"),
    "log_ratio": ("delta", "nats", "mean Δ; of sequences mean ΣΔ"),
}
"""Field of a `Subset` → column, unit, formula."""
MEANS = ("length", "reward")
"""Fields that are means of values whose range only the dump tells."""
LACKING = {"reward": ["rewards"], "positive": ["advantages"], "negative": ["advantages"]}


def _subset(reader: Reader, name: str, unit: str) -> Subset:
    prefix, which, text = f"{name}|{unit}.", f"these {unit}", f"share of all {unit}"
    share = Formula("share", "fraction", unit, text, lambda get: get("count") / get(unit))
    result = {share.name: reader.number(share, prefix)}
    for field, (column, kind, words) in COLUMNS.items():
        row = Formula(
            field, kind, which, words, mean(column, "count"), AS_SEEN if field in MEANS else ANYWHERE
        )
        known = prefix + column in reader.drawn
        result[field] = reader.number(row, prefix) if known else missing(row, LACKING[field])
    return Subset(count=round(float(reader.drawn[f"{prefix}count"][0])), numbers=result)
