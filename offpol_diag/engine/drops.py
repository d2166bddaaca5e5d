"""Tokens that one preset drops and another keeps: how many, of what kind, and examples.

A token is dropped if it contributes nothing to the update: rejected, vetoed, or of weight 0. A sequence is
dropped if all its tokens are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import correction, gap, segments
from offpol_diag.engine.accumulators import Best, State, Sums
from offpol_diag.engine.formula import Formula, Reader, missing
from offpol_diag.engine.gap import Drift
from offpol_diag.engine.outcome import applied
from offpol_diag.engine.ratios import Level, Ratios
from offpol_diag.engine.scene import Scene
from offpol_diag.presets import Preset, Reject, formulas
from offpol_diag.summary import Drops, LostSequence, Lot, Number

MOST = 8
"""With more presets than this, drops are not compared."""
EXAMPLES = 5
EVERY = "every"
"""Prefix of the columns over all tokens and all sequences."""

Pair = tuple[Preset, Preset]


def states(scene: Scene, drift: Drift, pairs: Sequence[Pair]) -> dict[str, State]:
    """Compute sums over tokens that one preset drops and the other keeps, both ways, and examples."""
    every = torch.ones(scene.batch.tokens, dtype=torch.bool, device=scene.batch.rollout.device)
    columns = _columns(scene, drift, EVERY, every, scene.counts["sequences"])
    found: dict[str, State] = {}
    for ours, theirs in [*pairs, *((b, a) for a, b in pairs)]:
        left = _left(scene, ours)
        lost = _left(scene, theirs) & ~left
        named = _named(ours.name, theirs.name)
        columns |= _columns(scene, drift, named, lost, _gone(scene.batch, lost, left))
        found[f"drops.{named}"] = _examples(scene, drift, ours, lost)
    return found | {"drops": Sums.of(columns, scene.draws, scene.batch.key)}


def _named(dropped_by: str, kept_by: str) -> str:
    return f"{dropped_by}>{kept_by}"


def _left(scene: Scene, preset: Preset) -> Tensor:
    """Return the tokens that contribute to the loss under a preset as applied, [T] bool."""
    used = applied(preset)
    key = ("left", used.policy, used.weight, used.reject, used.veto)
    return scene.once(key, lambda: left(scene.ratios(used.policy), used))


def left(ratios: Ratios, preset: Preset) -> Tensor:
    """Return the tokens that a preset keeps in the loss with a weight that is not 0, [T] bool."""
    kept, offsets = correction.keep(ratios, preset), ratios.batch.cu_seqlens
    found = segments.spread(kept.sequences, offsets)
    found = found if kept.tokens is None else found & kept.tokens
    if preset.weight is None:
        return found
    weights = correction.weigh(ratios, preset).final
    pulls = weights.values != 0
    return found & (segments.spread(pulls, offsets) if weights.per == "sequence" else pulls)


def _gone(batch: Batch, lost: Tensor, left: Tensor) -> Tensor:
    """Return 1 for sequences that lose tokens and keep none, else 0, [S]."""
    some, none = (segments.count(flags, batch.cu_seqlens) for flags in (lost, left))
    return ((some > 0) & (none == 0)).to(torch.float64)


# ---------------------------------------------------------------- sums


def _columns(scene: Scene, drift: Drift, named: str, lost: Tensor, gone: Tensor) -> dict[str, Tensor]:
    """Compute columns [S] over the tokens `lost` [T], and over the sequences `gone` [S]."""
    batch, offsets, delta = scene.batch, scene.batch.cu_seqlens, _delta(scene, drift)
    tokens = {
        **_kind(batch, segments.count(lost, offsets)),
        **{sign: segments.count(flags & lost, offsets) for sign, flags in _signs(batch.advantages).items()},
        "delta": segments.total(torch.where(lost, delta, 0.0), offsets),
    }
    mean = None if batch.advantages is None else segments.mean(batch.advantages, offsets)
    sequences = {
        **_kind(batch, gone),
        **{sign: gone * flags for sign, flags in _signs(mean).items()},
        "delta": gone * segments.total(delta, offsets),
    }
    both = {"tokens": tokens, "sequences": sequences}
    return {f"{named}|{unit}.{column}": x for unit, found in both.items() for column, x in found.items()}


def _delta(scene: Scene, drift: Drift) -> Tensor:
    terms = gap.terms(scene, drift)
    assert terms is not None
    delta: Tensor = terms.delta
    return delta


def _kind(batch: Batch, many: Tensor) -> dict[str, Tensor]:
    """Compute the count, and the lengths and rewards of the sequences, weighted by it."""
    found = {"count": many, "length": many * batch.lengths}
    return found if batch.rewards is None else found | {"reward": many * batch.rewards}


def _signs(advantages: Tensor | None) -> Mapping[str, Tensor]:
    return {} if advantages is None else {"positive": advantages > 0, "negative": advantages < 0}


# ---------------------------------------------------------------- examples


def _examples(scene: Scene, drift: Drift, preset: Preset, lost: Tensor) -> Best[LostSequence]:
    """Return the sequences with the largest |ΣΔ| among those that lose tokens."""
    batch = scene.batch
    tokens = segments.count(lost, batch.cu_seqlens)
    total = segments.total(_delta(scene, drift), batch.cu_seqlens)
    scores = torch.where(tokens > 0, total.abs(), -1.0)
    best = torch.topk(scores, min(EXAMPLES, len(scores)))
    at = [i for i, score in zip(best.indices.tolist(), best.values.tolist(), strict=True) if score >= 0]
    rows = [_example(scene, i, int(tokens[i]), float(total[i]), preset) for i in at]
    none: Best[LostSequence] = Best(EXAMPLES, ())
    return none.merge(Best(EXAMPLES, tuple((abs(row.log_ratio_sum), row) for row in rows)))


def _example(scene: Scene, at: int, tokens: int, total: float, preset: Preset) -> LostSequence:
    batch = scene.batch
    step, label = (_scalar(batch, name, at) for name in ("step", "sequence_id"))
    return LostSequence(
        sequence_id="?" if label is None else str(label),
        step=step if isinstance(step, int) else None,
        length=int(batch.lengths[at]),
        tokens=tokens,
        log_ratio_sum=total,
        reward=None if batch.rewards is None else float(batch.rewards[at]),
        fired=fired(scene, preset, at),
    )


def _scalar(batch: Batch, name: str, at: int) -> object:
    values = batch.scalars.get(name)
    return None if values is None else values[at]


def fired(scene: Scene, preset: Preset, at: int) -> list[str]:
    """List in words the parts of a preset that drop tokens of the sequence `at`."""
    used = applied(preset)
    ratios = scene.ratios(used.policy)
    rules = [_broken(correction.seen(ratios, before, rule), rule, at) for rule, before in _one_by_one(used)]
    return [text for text in (*rules, _vetoed(ratios, used, at), _weightless(ratios, used, at)) if text]


def _one_by_one(preset: Preset) -> list[tuple[Reject, Preset]]:
    """Return each rule, and the preset with only the rules before it."""
    return [(rule, replace(preset, reject=preset.reject[:i])) for i, rule in enumerate(preset.reject)]


def _broken(ratios: Ratios, rule: Reject, at: int) -> str:
    """Describe a broken rule: by the number of tokens, or by the sequence's value."""
    many = int((~_of(correction.passes(ratios, rule), ratios.batch, at)).sum())
    if not many:
        return ""
    bounds = f"outside {formulas.bounds(rule)}{formulas.SIGNS[rule.advantage]}"
    value = correction.statistic(ratios, rule)
    if value.per != "sequence":
        return f"{_tokens(many)} {bounds}"
    found = float(value.values[at])
    said = math.exp(min(found, 700.0)) if rule.statistic == "ratio" else found
    return f"{formulas.judged(rule)} = {said:.3g}, {bounds}"


def _vetoed(ratios: Ratios, preset: Preset, at: int) -> str:
    many = int(correction.veto_hits(ratios, preset.veto)[at])
    return f"veto: {_tokens(many)} with {formulas.veto(preset.veto).removeprefix('any ')}" if many else ""


def _weightless(ratios: Ratios, preset: Preset, at: int) -> str:
    if preset.weight is None:
        return ""
    weights = correction.weigh(ratios, preset).final
    many = int((_of(weights, ratios.batch, at) == 0).sum())
    if not many:
        return ""
    what = "the sequence" if weights.per == "sequence" else _tokens(many)
    return f"{what} of weight 0: {formulas.weight(preset.weight)}"


def _tokens(many: int) -> str:
    return "1 token" if many == 1 else f"{many:,} tokens"


def _of(level: Level, batch: Batch, at: int) -> Tensor:
    """Return the value of one sequence, or the values of its tokens."""
    if level.per == "sequence":
        return level.values[at : at + 1]
    return level.values[int(batch.cu_seqlens[at]) : int(batch.cu_seqlens[at + 1])]


# ---------------------------------------------------------------- reading


def everything(reader: Reader) -> tuple[Lot, Lot]:
    """Read the numbers of all tokens, and of all sequences, for comparison."""
    return _lot(reader, EVERY, "tokens", "all"), _lot(reader, EVERY, "sequences", "all")


def drops(reader: Reader, states: Mapping[str, State], ours: str, theirs: str) -> Drops:
    """Read the numbers of what one preset drops and another keeps."""
    named, text = _named(ours, theirs), f"dropped by {ours}, kept by {theirs}"
    best = states[f"drops.{named}"]
    assert isinstance(best, Best)
    return Drops(
        dropped_by=ours,
        kept_by=theirs,
        tokens=_lot(reader, named, "tokens", text),
        sequences=_lot(reader, named, "sequences", text),
        examples=[row for _, row in best.records],
    )


COLUMNS = {
    "length": ("length", "tokens", "mean length of their sequences"),
    "reward": ("reward", "", "mean reward of their sequences"),
    "positive": ("positive", "fraction", "share with A > 0"),
    "negative": ("negative", "fraction", "share with A < 0"),
    "log_ratio": ("delta", "nats", "mean Δ; of sequences mean ΣΔ"),
}
"""Field of a `Lot` → column, unit, formula."""
LACKING = {"reward": ["rewards"], "positive": ["advantages"], "negative": ["advantages"]}


def _lot(reader: Reader, named: str, unit: str, over: str) -> Lot:
    prefix, which = f"{named}|{unit}.", f"{unit} {over}" if over != "all" else f"all {unit}"
    share = Formula(
        "share",
        "fraction",
        unit,
        f"share of all {unit} that are {over}",
        lambda get: get("count") / get(unit),
    )
    rows = {
        field: Formula(field, kind, which, text, lambda get, c=column: get(c) / get("count"))  # type: ignore[misc]
        for field, (column, kind, text) in COLUMNS.items()
    }
    return Lot(
        count=round(float(reader.sums[f"{prefix}count"][0])),
        share=reader.number(share, prefix),
        **{field: _number(reader, row, prefix, field) for field, row in rows.items()},
    )


def _number(reader: Reader, row: Formula, prefix: str, field: str) -> Number:
    if f"{prefix}{COLUMNS[field][0]}" not in reader.sums:
        return missing(row, LACKING[field])
    return reader.number(row, prefix)
