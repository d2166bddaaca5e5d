"""Sums of a batch for one preset at many thresholds, in one pass.

Tokens are sorted once into the intervals between thresholds; what each threshold keeps is a cumulative sum
over the intervals. Where one token's decision depends on others (a cut over the trainer batch, a mean over
the tokens kept) or a rule is on sequences, the preset is applied at each threshold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from offpol_diag.analysis.first_reading import Found
from offpol_diag.analysis.tally import Study, Tally, observe
from offpol_diag.batch import Batch
from offpol_diag.engine import correction, segments, tables
from offpol_diag.engine.accumulators import Bins, State, Sums
from offpol_diag.engine.outcome import PER_SEQUENCE, Outcome, WeightSums, of, powers
from offpol_diag.engine.ratios import FLOAT32_OVERFLOW
from offpol_diag.engine.rows import Sheet
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.selection import LENGTH_BINS, Grid, length_bin
from offpol_diag.presets import Preset, Reject, Weight
from offpol_diag.sweep.rounding import Stored
from offpol_diag.sweep.thresholds import SweptBound

CELLS = 1 << 19
"""Largest number of thresholds × sequences in memory at once."""
COLUMNS = (
    "kept",
    "left",
    "touched",
    "w",
    "ww",
    "v",
    "vv",
    "residual_ww",
    "residual_vv",
    "residual_left",
    "acted",
)
"""Names of the sums per threshold, as the formulas of `engine.method` and `engine.residual` read them."""


@dataclass(frozen=True)
class Plan:
    """The plan of a sweep, as sent to the workers.

    Attributes:
        study: the analysis of the unchanged preset, computed in the same pass.
        found: statistics of whole trainer batches from the first pass.
        bound: the bound that varies.
        values: the thresholds, ascending.
    """

    study: Study
    found: Found
    bound: SweptBound
    values: tuple[float, ...]

    @property
    def preset(self) -> Preset:
        """The preset that is swept."""
        return self.study.presets[0]

    @property
    def per_token(self) -> bool:
        """Return whether the bound acts on tokens rather than on sequences."""
        return self.bound.part != "veto" and self.bound.over(self.preset) in ("token", "segment", "batch")


@dataclass(frozen=True)
class Swept:
    """The job of a sweep: compute the states of the analysis and of the sweep of one batch."""

    plan: Plan

    def __call__(self, batch: Batch) -> Tally:
        """Compute the states of one batch."""
        plan, study = self.plan, self.plan.study
        batch = plan.found.filled(batch)
        scene = Scene.of(batch, study.seed, study.replicates, plan.found.settled, study.near)
        tally = observe(study, scene)
        scene.forget()
        return tally.merge(Tally(states(plan, batch)))


def states(plan: Plan, batch: Batch) -> dict[str, State]:
    """Compute the states of the sweep, in blocks of sequences that bound the memory."""
    size = max(1, CELLS // max(len(plan.values), 1))
    firsts = range(0, batch.sequences, size)
    parts = (batch.rows(first, min(first + size, batch.sequences)) for first in firsts)
    return reduce(Tally.merge, (Tally(_states(plan, part)) for part in parts)).states


def _states(plan: Plan, batch: Batch) -> dict[str, State]:
    study = plan.study
    scene = Scene.of(batch, study.seed, study.replicates, plan.found.settled)
    rows = columns(scene, plan.preset, plan.bound, plan.values)
    found: dict[str, State] = {
        "sweep.sums": _sums(scene, rows, len(plan.values)),
        "sweep.length": _by_length(scene, rows),
        "sweep.steps": Stored.of(batch.rollout, scene.ratios(plan.preset.policy).train),
    }
    values = statistic(scene, plan)
    if values is not None:
        found["sweep.shape"] = Bins.of(values)
    scene.forget()
    return found


def statistic(scene: Scene, plan: Plan) -> Tensor | None:
    """Compute the statistic compared with the thresholds, of each token or non-empty sequence.

    Ratios are returned as logs. None if it depends on which tokens are kept, or on the trainer batch.
    """
    rule, bound, ratios = plan.bound.rule(plan.preset), plan.bound, scene.ratios(plan.preset.policy)
    there = scene.batch.lengths > 0
    if bound.part == "veto":
        return _worst(ratios.delta, scene.batch, bound)[there]
    assert isinstance(rule, Reject | Weight)
    if rule.among == "left" or rule.over == "batch":
        return None
    if isinstance(rule, Reject):
        level = correction.statistic(ratios.of(rule.policy), rule)
    else:
        level = ratios.log_ratio(rule.over, rule.safety, rule.safety_at)
    return level.values if level.per == "token" else level.values[there]


def _worst(delta: Tensor, batch: Batch, bound: SweptBound) -> Tensor:
    """Return the smallest or largest Δ of each sequence, which the veto compares with its bound, [S]."""
    reduced = segments.smallest if bound.side == "lower" else segments.largest
    return reduced(delta, batch.cu_seqlens)


def columns(scene: Scene, preset: Preset, bound: SweptBound, values: Sequence[float]) -> dict[str, Tensor]:
    """Compute `COLUMNS` of the preset at N ascending thresholds, [N, S] float64 each."""
    found = _method(preset, bound)(scene, preset, bound, values)
    n, kept, sums = scene.counts["tokens"], found.kept, found.sums
    weight = sums.first / n.clamp(min=1)
    left = (kept > 0).to(torch.float64)
    away = (sums.excess + kept - n) / n.clamp(min=1)
    touched = ((kept < n) & (n > 0)).to(torch.float64)
    residual_ww, residual_vv = sums.about_one + 2 * sums.excess, away * (away + 2) * left
    made = (kept, left, touched, sums.first, sums.second, weight, weight.square())
    return dict(zip(COLUMNS, (*made, residual_ww, residual_vv, left, found.acted), strict=True))


def _sums(scene: Scene, rows: dict[str, Tensor], many: int) -> Sums:
    """Sum each column at each threshold; also over sequences of policy lag 0, where only numerics differ."""
    lags = scene.batch.scalars.get("policy_lag", [None] * scene.batch.sequences)
    fresh = scene.batch.rollout.new_tensor([1.0 if lag == 0 else 0.0 for lag in lags])
    rows = rows | {"fresh_kept": rows["kept"] * fresh, "fresh_left": rows["left"] * fresh}
    shared = {name: scene.counts[name] for name in ("tokens", "sequences")}
    shared |= {f"fresh_{name}": x * fresh for name, x in shared.items()}
    wide = Sheet(tuple(f"{at}|{name}" for name in rows for at in range(many)), tuple(rows.values()))
    sheet = Sheet.joined(Sheet.of(shared), wide)
    return Sums.of_stacked(sheet.names, sheet.values, scene.draws, scene.batch.key)


def _by_length(scene: Scene, rows: dict[str, Tensor]) -> Grid:
    """Sum by length bin: sequences, tokens, then each column at each threshold, [bins, 2 + columns × N]."""
    counts = scene.counts
    every = torch.cat((counts["sequences"][None], counts["tokens"][None], *rows.values())).T
    at = length_bin(scene.batch.lengths)
    return Grid(every.new_zeros(LENGTH_BINS, every.shape[1]).index_add_(0, at, every))


# ---------------------------------------------------------------- one preset at all thresholds


@dataclass(frozen=True)
class Thresholds:
    """Results at N thresholds for S sequences, [N, S] float64 each.

    Attributes:
        kept: tokens kept.
        sums: sums of the final weights over the tokens kept.
        acted: number of weights that the bound changes; 0 if the bound is not on the weight.
    """

    kept: Tensor
    sums: WeightSums
    acted: Tensor


Method = Callable[[Scene, Preset, SweptBound, Sequence[float]], Thresholds]


def _method(preset: Preset, bound: SweptBound) -> Method:
    rule, weight = bound.rule(preset), preset.weight
    if bound.part == "veto":
        return _veto
    if any(part.among == "left" for part in (*preset.reject, *([weight] if weight else ()))):
        return _one_by_one
    if isinstance(rule, Reject):
        plain = rule.over in ("token", "segment") and rule.advantage == "any"
        return _token_rule if plain else _one_by_one
    assert isinstance(rule, Weight)
    truncated_twice = rule.action == "truncate" and bound.side == "window"
    return _one_by_one if rule.over in PER_SEQUENCE or truncated_twice else _token_weight


def _one_by_one(scene: Scene, preset: Preset, bound: SweptBound, values: Sequence[float]) -> Thresholds:
    ratios = scene.ratios(preset.policy)
    done = [of(ratios, bound.moved(preset, bound.bounds(value))) for value in values]
    sums = [one.sums.named() for one in done]
    return Thresholds(
        torch.stack([one.kept_tokens for one in done]),
        WeightSums(**{name: torch.stack([one[name] for one in sums]) for name in sums[0]}),
        torch.stack([_acted(one, bound) for one in done]),
    )


def _acted(done: Outcome, bound: SweptBound) -> Tensor:
    """Count the weights beyond the varying bound, [S]."""
    if bound.part != "weight" or done.weighed is None:
        return torch.zeros_like(done.kept_tokens)
    sides = {"upper": done.weighed.high, "lower": done.weighed.low}
    return sides[bound.side] if bound.side in sides else done.weighed.high + done.weighed.low


def _veto(scene: Scene, preset: Preset, bound: SweptBound, values: Sequence[float]) -> Thresholds:
    done = of(scene.ratios(preset.policy), bound.moved(preset, {bound.side: None}))
    worst = _worst(done.ratios.delta, scene.batch, bound)
    edges = worst.new_tensor([math.log(value) for value in values])[:, None]
    passed = (worst >= edges if bound.side == "lower" else worst <= edges).to(torch.float64)
    return Thresholds(done.kept_tokens * passed, done.sums.times(passed), torch.zeros_like(passed))


def _token_rule(scene: Scene, preset: Preset, bound: SweptBound, values: Sequence[float]) -> Thresholds:
    rule = bound.rule(preset)
    assert isinstance(rule, Reject)
    others = replace(preset, reject=tuple(one for at, one in enumerate(preset.reject) if at != bound.index))
    done = of(scene.ratios(preset.policy), others)
    x = correction.statistic(done.ratios.of(rule.policy), rule).values
    gaps = _Gaps(_gap(x, bound, rule, values, rule.statistic == "ratio"), len(values), done, bound)
    kept = gaps.within(None)
    none = torch.zeros_like(kept)
    if done.weighed is None:
        return Thresholds(kept, WeightSums(kept, kept, none, none), none)
    each = powers(done.weighed.final.values)
    of_sequences = preset.weight is not None and preset.weight.over in PER_SEQUENCE
    return Thresholds(kept, each.times(kept) if of_sequences else each.map(gaps.within), none)


def _token_weight(scene: Scene, preset: Preset, bound: SweptBound, values: Sequence[float]) -> Thresholds:
    weight = bound.rule(preset)
    assert isinstance(weight, Weight)
    done = of(scene.ratios(preset.policy), preset)
    log = done.ratios.log_ratio(weight.over, weight.safety, weight.safety_at).values
    free = bound.moved(preset, dict.fromkeys(bound.bounds(1.0)))
    raw = correction.weigh(done.ratios, free).final.values
    at = _gap(log, bound, weight, values, logarithmic=True)
    acted = _Gaps(at, len(values), done, bound, every=True)
    if weight.overflow == "zero":
        at = torch.where(log > FLOAT32_OVERFLOW, 0, at)  # dropped whatever the bound
    gaps = _Gaps(at, len(values), done, bound)
    kept = gaps.everything(None)
    beyond = kept - gaps.within(None)
    ends = kept.new_tensor([value if weight.action == "truncate" else 0.0 for value in values])[:, None]
    inside, at_end = powers(raw).map(gaps.within), powers(ends).map(lambda x: x * beyond)
    return Thresholds(kept, inside.plus(at_end), acted.everything(None) - acted.within(None))


@dataclass(frozen=True)
class _Gaps:
    """Tokens sorted into the gaps between N thresholds.

    Attributes:
        at: number of thresholds that each token lies outside of, tightest first, [T] int64 in [0, N].
        size: N.
        done: outcome of the rest of the preset, whose dropped tokens are left out.
        bound: the varying bound; its side says which end is the tightest.
        every: whether to count dropped tokens too.
    """

    at: Tensor
    size: int
    done: Outcome
    bound: SweptBound
    every: bool = False

    def within(self, x: Tensor | None) -> Tensor:
        """Sum x [T] (None: count) over the tokens within each threshold, [N, S]."""
        found = self._by_gap(x).cumsum(dim=1)[:, : self.size].T
        return found.flip(0) if self.bound.side == "lower" else found

    def everything(self, x: Tensor | None) -> Tensor:
        """Sum x over all tokens, the same at each threshold, [N, S]."""
        return self._by_gap(x).sum(dim=1).expand(self.size, -1)

    def _by_gap(self, x: Tensor | None) -> Tensor:
        """Sum x by sequence and interval, without dropped tokens, [S, N + 1]."""
        batch, kept = self.done.ratios.batch, self.done.kept
        many = batch.sequences * (self.size + 1)
        first = torch.arange(0, many, self.size + 1, device=self.at.device)
        codes = segments.spread(first, batch.cu_seqlens) + self.at
        if not self.every and kept.tokens is not None:
            codes, x = codes[kept.tokens], None if x is None else x[kept.tokens]
        found = tables.count(codes, many) if x is None else tables.total(codes, many, x.contiguous())
        found = found.view(batch.sequences, self.size + 1)
        return found if self.every else found * kept.sequences.to(torch.float64)[:, None]


def _gap(
    x: Tensor, bound: SweptBound, rule: Weight | Reject, values: Sequence[float], logarithmic: bool
) -> Tensor:
    """Count the thresholds that each value lies outside of, tightest first; N if beyond a fixed bound."""
    tight_first = list(values) if bound.side != "lower" else list(values)[::-1]
    bounds = [bound.bounds(value) for value in tight_first]
    found = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    for side, sign in (("upper", 1), ("lower", -1)):
        moving = [one[side] for one in bounds if side in one]
        fixed = getattr(rule, side)
        if not moving and (fixed is None or isinstance(rule, Weight)):
            continue  # beyond a fixed bound of the weight a token still counts
        edges = x.new_tensor([sign * _edge(one, logarithmic) for one in moving or [fixed]])
        outside = torch.searchsorted(edges, (x * sign).contiguous(), right=rule.strict)
        found = torch.maximum(found, outside if moving else len(values) * outside)
    return found


def _edge(bound: float, logarithmic: bool) -> float:
    if not logarithmic:
        return bound
    return math.log(bound) if bound > 0 else -math.inf
