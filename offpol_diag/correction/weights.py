"""The weights of a preset before rejection: of tokens, turns or sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from offpol_diag import segments
from offpol_diag.batch import Batch
from offpol_diag.correction.bounds import either, past
from offpol_diag.correction.kept import on_tokens, seen
from offpol_diag.presets import Over, Preset, Weight
from offpol_diag.ratios import FLOAT32_OVERFLOW, OVERFLOW, Level, Ratios


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
