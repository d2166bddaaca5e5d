"""Sums of a batch for one preset at many thresholds, in one pass.

The preset is applied at each threshold to a block of sequences at a time; ratios are computed once per block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce

import numpy as np

from offpol_diag.analysis.first_pass import FirstPass
from offpol_diag.analysis.study import Study, observe
from offpol_diag.batch import Batch
from offpol_diag.engine import loglattice, segments
from offpol_diag.engine.bootstrap import resampled
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.preset_sums import PresetSums
from offpol_diag.engine.rows import Columns
from offpol_diag.engine.segments import Array
from offpol_diag.engine.selection import LENGTH_BINS, length_bin
from offpol_diag.engine.tally import Arrays, Names, Tally
from offpol_diag.presets import OF_SEQUENCES, Preset, Reject, Veto
from offpol_diag.sweep.thresholds import SweptBound

CELLS = 1 << 21
"""About the largest number of thresholds × tokens in memory at once."""
COLUMNS = ("kept", "left", "w", "ww", "v", "vv", "residual_ww", "residual_vv", "residual_left", "acted")
"""Names of the sums per threshold, as the formulas of `engine.method` and `engine.residual` read them."""


@dataclass(frozen=True)
class Plan:
    """The plan of a sweep, as sent to the workers.

    Attributes:
        study: the analysis of the unchanged preset, computed in the same pass.
        first_pass: statistics of whole trainer batches from the first pass.
        bound: the bound that varies.
        values: the thresholds, ascending.
    """

    study: Study
    first_pass: FirstPass
    bound: SweptBound
    values: tuple[float, ...]

    @property
    def preset(self) -> Preset:
        """The preset that is swept."""
        return self.study.presets[0]

    @property
    def product(self) -> bool:
        """Whether the statistic is of the product of the token ratios of a sequence."""
        return self.bound.over(self.preset) == "sum"

    @property
    def units(self) -> str:
        """Units that the bound acts on: "tokens" or "sequences"."""
        on_tokens = self.bound.over(self.preset) in ("token", "segment", "batch")
        return "tokens" if on_tokens and self.bound.part != "veto" else "sequences"


@dataclass(frozen=True)
class Swept:
    """The job of a sweep: tally one batch for the analysis and for the sweep."""

    plan: Plan

    def __call__(self, batch: Batch) -> Tally:
        """Tally one batch."""
        plan, study = self.plan, self.plan.study
        batch = plan.first_pass.filled(batch)
        context = BatchContext.of(batch, study.seed, study.replicates, plan.first_pass.fits)
        tally = observe(study, context)
        context.forget()
        return tally.merge(Tally(arrays(plan, batch)))


def arrays(plan: Plan, batch: Batch) -> Arrays:
    """Compute the sums of the sweep, in blocks of sequences that bound the memory."""
    spans = segments.spans(batch.cu_seqlens, CELLS // len(plan.values))
    return reduce(Arrays.merge, (_arrays(plan, batch.rows(*span)) for span in spans))


def _arrays(plan: Plan, batch: Batch) -> Arrays:
    study = plan.study
    context = BatchContext.of(batch, study.seed, study.replicates, plan.first_pass.fits)
    rows, counts = columns(context, plan), context.counts
    every = np.concatenate((counts["sequences"][None], counts["tokens"][None], *rows.values())).T
    by_length = np.zeros((LENGTH_BINS, every.shape[1]))
    np.add.at(by_length, length_bin(batch.lengths), every)
    names, sums = _sums(context, rows, len(plan.values))
    found = {"sweep.columns": sums, "sweep.length": by_length}
    found |= stored(batch.rollout, context.evaluator.layout.log_prob(plan.preset.policy))
    values = statistic(context, plan)
    if values is not None:
        found["sweep.shape"] = loglattice.binned(values)
    context.forget()
    return Arrays(sums=found, names={"sweep.columns": Names(names)})


def statistic(context: BatchContext, plan: Plan) -> Array | None:
    """Compute the statistic compared with the thresholds, of each token or non-empty sequence.

    Ratios are returned as logs. None if it depends on which tokens are kept, or on the trainer batch.
    """
    part, policy = plan.bound.rule(plan.preset), plan.preset.policy
    filled = context.batch.lengths > 0
    if isinstance(part, Veto):  # what the veto compares with its bound
        reduced = segments.smallest if plan.bound.side == "lower" else segments.largest
        return reduced(context.evaluator.log_ratio(policy), context.batch.cu_seqlens)[filled]
    if part.among == "left" or part.over == "batch":
        return None
    own = part.policy if isinstance(part, Reject) else None
    values: Array = context.evaluator.statistic(part, own or policy)
    return values[filled] if part.over in OF_SEQUENCES else values


def columns(context: BatchContext, plan: Plan) -> dict[str, Array]:
    """Compute `COLUMNS` of the preset at N ascending thresholds, [N, S] float64 each."""
    bound, n = plan.bound, np.maximum(context.counts["tokens"], 1)
    sums = PresetSums.of(
        context, [bound.moved(plan.preset, bound.bounds(value)) for value in plan.values], losses=False
    )
    kept, w, ww, deviation, about_one = (
        sums.kept.all,
        *(sums.sums[name].all for name in ("w", "ww", "deviation", "about_one")),
    )
    left, away = segments.numbers(kept > 0), (deviation + kept - context.counts["tokens"]) / n
    acted = np.zeros_like(kept)  # weights beyond the varying bound
    if bound.part == "weight":
        acted = sum((sums.acted[end].all for end in ENDS.get(bound.side, ("high", "low"))), acted)
    first = kept, left, w, ww, w / n, (w / n) ** 2
    others = about_one + 2 * deviation, away * (away + 2) * left, left, acted
    return dict(zip(COLUMNS, (*first, *others), strict=True))


ENDS = {"upper": ("high",), "lower": ("low",)}
"""Side of a bound → which weights it acts on."""


def _sums(context: BatchContext, rows: dict[str, Array], many: int) -> tuple[tuple[str, ...], Array]:
    """Sum each column at each threshold; also over sequences of policy lag 0, where only numerics differ."""
    lags = context.batch.scalars.get("policy_lag", [None] * context.batch.sequences)
    fresh = np.array([1.0 if lag == 0 else 0.0 for lag in lags])
    rows = rows | {"fresh_kept": rows["kept"] * fresh, "fresh_left": rows["left"] * fresh}
    shared = {name: context.counts[name] for name in ("tokens", "sequences")}
    shared |= {f"fresh_{name}": x * fresh for name, x in shared.items()}
    wide = Columns(tuple(f"{at}|{name}" for name in rows for at in range(many)), tuple(rows.values()))
    every = Columns.joined(Columns.of(shared), wide)
    return every.names, resampled(every.values, context.draws, context.batch.key)


# ---------------------------------------------------------------- noise of rounding

# A number x stored with m fraction bits is off by up to half a step, 2^(⌊log2|x|⌋ − m)/2; the variance of the
# error is step²/12, and the errors of both policies add.

BITS = {"bfloat16": 7, "float16": 10, "float32": 23}
"""Number format → its fraction bits; bfloat16 is float32 without the lower half."""
LOGIT = 10.0
"""A typical large logit of a language model; its rounding step is the error of a matrix product."""


def stored(rollout: Array, train: Array) -> dict[str, Array]:
    """Count by what `Stored` recognises the formats of log-probs under both policies, [T] each."""
    both = np.stack((rollout, train))
    single = both.astype(np.float32)
    wide = single != both
    unfit = [wide | (single.view(np.uint32) & 0xFFFF != 0), both.astype(np.float16) != both, wide]
    steps = np.exp2(2.0 * (np.frexp(both)[1] - 1))
    return {
        "sweep.unfit": np.stack([flags.sum(1) for flags in unfit], 1).astype(np.float64),
        "sweep.squares": np.where(both == 0, 0.0, steps).sum(1),
    }


@dataclass(frozen=True)
class Stored:
    """Counts by which the number formats of the stored log-probs are recognised.

    Attributes:
        unfit: number of values of the rollout and the train column that each format of `BITS` cannot hold
            exactly, [2, 3].
        squares: Σ 4^⌊log2|x|⌋ of both columns, [2]; times 4^−m this is the sum of squared steps.
        tokens: number of tokens.
    """

    unfit: Array
    squares: Array
    tokens: float

    def formats(self) -> list[str]:
        """Return the coarsest format that holds every value of the rollout and of the train column."""
        rows = self.unfit.tolist()
        return [next((name for name, n in zip(BITS, row, strict=True) if not n), "float64") for row in rows]

    def deviation(self) -> float:
        """Return the standard deviation of Δ due to the rounding of stored values, nats."""
        pairs = zip(self.squares.tolist(), self.formats(), strict=True)
        variance = sum(square * 4.0 ** -BITS.get(name, 52) for square, name in pairs)
        return math.sqrt(variance / 12 / max(self.tokens, 1))


def of_logits(bits: int) -> float:
    """Return the standard deviation of Δ if both policies round a logit of `LOGIT` to so many bits, nats."""
    step = 2.0 ** (math.floor(math.log2(LOGIT)) - bits)
    return step / math.sqrt(12) * math.sqrt(2)


def in_statistic(statistic: str, over: str, deviation: float, length: float) -> float | None:
    """Propagate the noise of Δ of a token to a statistic over `length` tokens: its standard deviation.

    For K2 and K3, which are never negative, its mean. None if no rule is known.
    """
    factors = {"token": 1.0, "mean": length**-0.5, "sum": length**0.5}
    if statistic in ("k2", "k3"):
        factors = {"token": deviation / 2, "mean": deviation / 2, "sum": length * deviation / 2}
    elif statistic == "ratio":
        factors["segment"] = length**-0.5
    elif statistic != "k1":
        return None
    return deviation * factors[over] if over in factors else None
