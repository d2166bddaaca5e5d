"""Sums of a batch for one preset at many thresholds, in one pass.

Tokens are sorted once into the intervals between thresholds; what each threshold keeps is a cumulative sum
over the intervals. Where one token's decision depends on others (a cut over the trainer batch, a mean over
the tokens kept) or a rule is on sequences, the preset is applied at each threshold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import torch
from torch import Tensor

from offpol_diag.analysis.first_pass import Found
from offpol_diag.analysis.tally import Study, Tally, observe
from offpol_diag.batch import Batch
from offpol_diag.engine import correction, segments
from offpol_diag.engine.accumulators import Bins, State, Sums, count_by, sum_by
from offpol_diag.engine.outcome import PER_SEQUENCE, Outcome, WeightSums, of, powers
from offpol_diag.engine.ratios import FLOAT32_OVERFLOW
from offpol_diag.engine.rows import Columns
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
    def units(self) -> str:
        """Units that the bound acts on: "tokens" or "sequences"."""
        on_tokens = self.bound.over(self.preset) in ("token", "segment", "batch")
        return "tokens" if on_tokens and self.bound.part != "veto" else "sequences"


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
    size = max(1, CELLS // len(plan.values))
    firsts = range(0, batch.sequences, size)
    blocks = (batch.rows(first, min(first + size, batch.sequences)) for first in firsts)
    return reduce(Tally.merge, (Tally(_states(plan, block)) for block in blocks)).states


def _states(plan: Plan, batch: Batch) -> dict[str, State]:
    study = plan.study
    scene = Scene.of(batch, study.seed, study.replicates, plan.found.settled)
    rows = columns(scene, plan)
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
    rule, ratios = plan.bound.rule(plan.preset), scene.ratios(plan.preset.policy)
    there = scene.batch.lengths > 0
    if not isinstance(rule, Reject | Weight):
        return _worst(ratios.delta, scene.batch, plan.bound)[there]
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


def columns(scene: Scene, plan: Plan) -> dict[str, Tensor]:
    """Compute `COLUMNS` of the preset at N ascending thresholds, [N, S] float64 each."""
    n, (kept, sums, acted) = scene.counts["tokens"], _thresholds(scene, plan)
    weight = sums.first / n.clamp(min=1)
    left = (kept > 0).to(torch.float64)
    away = (sums.excess + kept - n) / n.clamp(min=1)
    touched = ((kept < n) & (n > 0)).to(torch.float64)
    residual_ww, residual_vv = sums.about_one + 2 * sums.excess, away * (away + 2) * left
    made = (kept, left, touched, sums.first, sums.second, weight, weight.square())
    return dict(zip(COLUMNS, (*made, residual_ww, residual_vv, left, acted), strict=True))


def _sums(scene: Scene, rows: dict[str, Tensor], many: int) -> Sums:
    """Sum each column at each threshold; also over sequences of policy lag 0, where only numerics differ."""
    lags = scene.batch.scalars.get("policy_lag", [None] * scene.batch.sequences)
    fresh = scene.batch.rollout.new_tensor([1.0 if lag == 0 else 0.0 for lag in lags])
    rows = rows | {"fresh_kept": rows["kept"] * fresh, "fresh_left": rows["left"] * fresh}
    shared = {name: scene.counts[name] for name in ("tokens", "sequences")}
    shared |= {f"fresh_{name}": x * fresh for name, x in shared.items()}
    wide = Columns(tuple(f"{at}|{name}" for name in rows for at in range(many)), tuple(rows.values()))
    sheet = Columns.joined(Columns.of(shared), wide)
    return Sums.of_stacked(sheet.names, sheet.values, scene.draws, scene.batch.key)


def _by_length(scene: Scene, rows: dict[str, Tensor]) -> Grid:
    """Sum by length bin: sequences, tokens, then each column at each threshold, [bins, 2 + columns × N]."""
    counts = scene.counts
    every = torch.cat((counts["sequences"][None], counts["tokens"][None], *rows.values())).T
    at = length_bin(scene.batch.lengths)
    return Grid(every.new_zeros(LENGTH_BINS, every.shape[1]).index_add_(0, at, every))


# ---------------------------------------------------------------- one preset at all thresholds

Thresholds = tuple[Tensor, WeightSums, Tensor]
"""At N thresholds for S sequences, [N, S] float64 each: the tokens kept, the sums of the final weights over
them, and the number of weights that the bound changes (0 if it is not on the weight)."""


def _thresholds(scene: Scene, plan: Plan) -> Thresholds:
    preset, rule = plan.preset, plan.bound.rule(plan.preset)
    if not isinstance(rule, Reject | Weight):
        return _veto(scene, plan)
    depends = any(part.among == "left" for part in (*preset.reject, preset.weight) if part)
    if isinstance(rule, Reject):
        alone = rule.over in ("token", "segment") and rule.advantage == "any"
    else:
        alone = rule.over not in PER_SEQUENCE and (rule.action != "truncate" or plan.bound.side != "window")
    return _by_token(scene, plan, rule) if alone and not depends else _one_by_one(scene, plan)


def _one_by_one(scene: Scene, plan: Plan) -> Thresholds:
    ratios, bound = scene.ratios(plan.preset.policy), plan.bound
    done = [of(ratios, bound.moved(plan.preset, bound.bounds(value))) for value in plan.values]
    sums = [one.sums.named() for one in done]
    return (
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


def _veto(scene: Scene, plan: Plan) -> Thresholds:
    done = of(scene.ratios(plan.preset.policy), plan.bound.moved(plan.preset, {plan.bound.side: None}))
    worst = _worst(done.ratios.delta, scene.batch, plan.bound)
    edges = worst.new_tensor([math.log(value) for value in plan.values])[:, None]
    passed = (worst >= edges if plan.bound.side == "lower" else worst <= edges).to(torch.float64)
    return done.kept_tokens * passed, done.sums.times(passed), torch.zeros_like(passed)


def _by_token(scene: Scene, plan: Plan, rule: Reject | Weight) -> Thresholds:
    """Sort tokens into the gaps between thresholds; a token beyond one is dropped, or weighs a constant."""
    preset, bound = plan.preset, plan.bound
    others = tuple(one for at, one in enumerate(preset.reject) if bound.part != "reject" or at != bound.index)
    done = of(scene.ratios(preset.policy), replace(preset, reject=others))
    if isinstance(rule, Reject):
        x = correction.statistic(done.ratios.of(rule.policy), rule).values
        gaps = _Gaps(_outside(x, plan, rule), plan, done)
        kept = gaps.within(None)
        none = torch.zeros_like(kept)
        if done.weighed is None:
            return kept, WeightSums(kept, kept, none, none), none
        each = powers(done.weighed.final.values)
        of_sequences = preset.weight is not None and preset.weight.over in PER_SEQUENCE
        return kept, each.times(kept) if of_sequences else each.map(gaps.within), none
    x = done.ratios.log_ratio(rule.over, rule.safety, rule.safety_at).values
    raw = correction.weigh(done.ratios, bound.moved(preset, dict.fromkeys(bound.bounds(1.0)))).final.values
    at = _outside(x, plan, rule)
    weights = _Gaps(at, plan, done, every=True)
    acted = weights.everything(None) - weights.within(None)
    if rule.overflow == "zero":
        at = torch.where(x > FLOAT32_OVERFLOW, 0, at)  # dropped whatever the bound
    gaps = _Gaps(at, plan, done)
    kept = gaps.everything(None)
    beyond = kept - gaps.within(None)
    ends = kept.new_tensor([value if rule.action == "truncate" else 0.0 for value in plan.values])
    at_end = powers(ends[:, None]).map(lambda x: x * beyond)
    return kept, powers(raw).map(gaps.within).plus(at_end), acted


@dataclass(frozen=True)
class _Gaps:
    """Tokens sorted into the gaps between N thresholds.

    Attributes:
        at: number of thresholds that each token lies outside of, tightest first, [T] int64 in [0, N].
        plan: the thresholds, and the varying bound, whose side says which end is the tightest.
        done: outcome of the rest of the preset, whose dropped tokens are left out.
        every: whether to count dropped tokens too.
    """

    at: Tensor
    plan: Plan
    done: Outcome
    every: bool = False

    def within(self, x: Tensor | None) -> Tensor:
        """Sum x [T] (None: count) over the tokens within each threshold, [N, S]."""
        found = self._by_gap(x).cumsum(dim=1)[:, :-1].T
        return found.flip(0) if self.plan.bound.side == "lower" else found

    def everything(self, x: Tensor | None) -> Tensor:
        """Sum x over all tokens, the same at each threshold, [N, S]."""
        return self._by_gap(x).sum(dim=1).expand(len(self.plan.values), -1)

    def _by_gap(self, x: Tensor | None) -> Tensor:
        """Sum x by sequence and interval, without dropped tokens, [S, N + 1]."""
        batch, kept, wide = self.done.ratios.batch, self.done.kept, len(self.plan.values) + 1
        first = torch.arange(0, batch.sequences * wide, wide, device=self.at.device)
        codes = segments.spread(first, batch.cu_seqlens) + self.at
        if not self.every and kept.tokens is not None:
            codes, x = codes[kept.tokens], None if x is None else x[kept.tokens]
        many = batch.sequences * wide
        found = count_by(codes, many) if x is None else sum_by(codes, many, x.contiguous())
        found = found.view(batch.sequences, wide)
        return found if self.every else found * kept.sequences.to(torch.float64)[:, None]


def _outside(x: Tensor, plan: Plan, rule: Weight | Reject) -> Tensor:
    """Count the thresholds that each value lies outside of, tightest first; N if beyond a fixed bound."""
    values = sorted(plan.values, reverse=plan.bound.side == "lower")
    bounds = [plan.bound.bounds(value) for value in values]
    logs = isinstance(rule, Weight) or rule.statistic == "ratio"
    found = torch.zeros(x.shape, dtype=torch.int64, device=x.device)
    for side, sign in (("upper", 1), ("lower", -1)):
        moving = [one[side] for one in bounds if side in one]
        fixed = getattr(rule, side)
        if not moving and (fixed is None or isinstance(rule, Weight)):
            continue  # beyond a fixed bound of the weight a token still counts
        edges = [(math.log(one) if one > 0 else -math.inf) if logs else one for one in moving or [fixed]]
        signed = x.new_tensor([sign * edge for edge in edges])
        outside = torch.searchsorted(signed, (x * sign).contiguous(), right=rule.strict)
        found = torch.maximum(found, outside if moving else len(values) * outside)
    return found
