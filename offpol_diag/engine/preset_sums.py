"""Presets applied to a batch: sums over kept tokens, and what is decided of whole sequences, by preset."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import segments
from offpol_diag.engine.context import CPU, BatchContext
from offpol_diag.engine.evaluator import Evaluator, Packed
from offpol_diag.engine.rows import Columns, Rows, joined, merged
from offpol_diag.engine.scope import BatchFits
from offpol_diag.engine.segments import Array
from offpol_diag.pipeline import plain
from offpol_diag.pipeline.block import Block
from offpol_diag.pipeline.block import Columns as OfTokens
from offpol_diag.pipeline.plan import COLUMNS, Plan, weighted
from offpol_diag.pipeline.tables import Sums, beside
from offpol_diag.presets import SMALLEST_NORM, Policy, Preset, Reject

BLOCK = {"plain": 1 << 13, "compiled": 1 << 18, "gpu": 1 << 18}
"""Way of computing → about the number of tokens at a time: rows of plain code stay in a core's cache."""
NORMS = ("norm", "norm_units")
"""Names of the sums that the mean weight is computed from: Σ of weights, and their number."""


def normalised(preset: Preset) -> bool:
    """Return whether weights are divided by a batch mean."""
    return preset.weight is not None and preset.weight.normalize


def norm_factor(total: Array, units: Array) -> Array:
    """Compute the divisor of batch normalisation; 1 where the mean weight is at most 1e-8, as in verl."""
    mean_weight = total / units
    return np.where(mean_weight > SMALLEST_NORM, mean_weight, 1.0)


# ---------------------------------------------------------------- a batch as the pipeline reads it


def block_of(batch: Batch, fits: BatchFits, plan: Plan) -> Block:
    """Return a packed batch as the pipeline reads it, with the cuts of its trainer batches."""
    none = np.zeros_like(batch.rollout)
    logs = (batch.rollout, batch.old, batch.current)
    advantages, rollout, old, current = (none if x is None else x for x in (batch.advantages, *logs))
    cut_off = [_cut_off(batch, fits, *one) for one in plan.cut_off]
    columns = OfTokens(
        advantages,
        rollout,
        old,
        current,
        cut_off=np.stack(cut_off) if cut_off else np.zeros((0, batch.tokens)),
    )
    return Block(columns, batch.cu_seqlens, batch.cu_runs)


def _cut_off(batch: Batch, fits: BatchFits, policy: Policy, rule: Reject) -> Array:
    """Return 1 for tokens whose statistic reaches the cut of their trainer batch, [T].

    The cut is the statistic of one of them: it is compared with values that were made in the same way.
    """
    return segments.numbers(~Evaluator(Packed(batch, fits)).passes(rule, policy))


# ---------------------------------------------------------------- sums of a batch


@lru_cache(64)
def plan_of(presets: tuple[Preset, ...], columns: frozenset[str], losses: bool, over_all: bool) -> Plan:
    """Return the plan of presets, made once per process."""
    plan: Plan = Plan.of(presets, columns, losses, over_all)
    return plan


def sums_of(context: BatchContext, plan: Plan) -> Callable[[], Sums]:
    """Compute a plan's sums of a batch, a few sequences at a time.

    Returns: what to call for them: a GPU computes while the host does something else.
    """
    batch = context.batch

    def blocks(wanted: int) -> Iterator[Block]:
        for first, last in segments.spans(batch.cu_seqlens, wanted):
            part = batch if last - first == batch.sequences else batch.rows(first, last)
            yield block_of(part, context.fits, plan)

    if context.device != CPU:
        from offpol_diag.pipeline import gpu

        return gpu.started(plan, blocks(BLOCK["gpu"]), context.device)
    way, compute = "plain", plain.sums
    if context.compiled:
        from offpol_diag.pipeline import compiled

        way, compute = "compiled", compiled.sums
    result = beside([compute(plan, block) for block in blocks(BLOCK[way])], np.concatenate)
    return lambda: result


# ---------------------------------------------------------------- numbers of presets


@dataclass(frozen=True, eq=False)
class PresetSums:
    """Many presets applied to one batch of S sequences; numbers are float64, a row per distinct result.

    Attributes:
        context: the batch and its log-ratios.
        presets: the P presets.
        plan: the plan of these and perhaps more.
        done: what to call for the sums of the plan.
        at: the place of each preset in the plan, P of them.
    """

    context: BatchContext
    presets: tuple[Preset, ...]
    plan: Plan
    done: Callable[[], Sums]
    at: tuple[int, ...]

    @classmethod
    def of(
        cls,
        context: BatchContext,
        presets: Sequence[Preset],
        *,
        losses: bool = True,
        over_all: bool = False,
    ) -> PresetSums:
        """Apply presets to a batch; for the arguments see `Plan.of`."""
        columns = frozenset(name for name in COLUMNS if context.batch.has(name))
        plan = plan_of(tuple(presets), columns, losses, over_all)
        return cls(context, tuple(presets), plan, sums_of(context, plan), tuple(range(len(presets))))

    def only(self, which: Callable[[Preset], bool]) -> PresetSums:
        """Select the presets for which `which` is true."""
        some = [at for at, preset in enumerate(self.presets) if which(preset)]
        return self if len(some) == len(self.presets) else self._picked(some)

    @property
    def of_plan(self) -> Sums:
        """The sums of the plan."""
        return self.done()

    # ------------------------------------------------------------ rows

    def _rows(self, values: Array, lines: Any) -> Rows:
        """Return each preset's row of values [lines, S]; 0 for one that has none."""
        at = lines[list(self.at)].tolist()
        if -1 in at:
            values = np.concatenate((values, np.zeros((1, values.shape[1]))))
            at = [len(values) - 1 if line < 0 else line for line in at]
        return Rows(values, tuple(at))

    def total(self, kind: str, number: int = 0) -> Rows:
        """Return a sum over tokens that pass the rules on tokens, by its kind and place in `SumTables`."""
        values = getattr(self.of_plan.over_tokens, kind)[:, number]
        return self._rows(values, getattr(self.plan.of_preset, kind))

    def number(self, name: str) -> Rows:
        """Return a number of sequences by its name in `OfSequences`; 0 where a preset has none."""
        return self._rows(self.of_plan.numbers, getattr(self._lines, name))

    @property
    def _lines(self) -> Any:
        return self.plan.decisions.of_preset

    def named(self, columns: Mapping[str, Rows | Array]) -> Columns:
        """Name columns by preset: one column [S] per preset; a plain array [S] is shared by all presets."""
        if not columns:
            return Columns((), ())
        many = len(self.presets)
        rows = [x if isinstance(x, Rows) else Rows(x[None], (0,) * many) for x in columns.values()]
        names = _names(tuple(columns), tuple(preset.name for preset in self.presets))
        begins = np.cumsum([0, *(len(x.values) for x in rows[:-1])])
        at = np.array([x.at for x in rows], dtype=np.int64) + begins[:, None]
        return Columns(names, tuple(x.values for x in rows), at.flatten())

    @property
    def batch(self) -> Batch:
        """The packed batch."""
        return self.context.batch

    @cached_property
    def n(self) -> Array:
        """Tokens of each sequence, [S]."""
        return self.context.counts["tokens"]

    @cached_property
    def sequences(self) -> Rows:
        """1 where a sequence passes every rule on sequences and the veto, else 0."""
        return self._rows(segments.numbers(self.of_plan.kept), self._lines.kept)

    @cached_property
    def vetoed(self) -> Rows:
        """1 where the veto drops a sequence, else 0."""
        return self.number("hits").map(lambda x: segments.numbers(x > 0))

    @cached_property
    def passed(self) -> Rows:
        """Number of tokens that pass the rules on tokens."""
        return self.total("kept")

    @cached_property
    def kept(self) -> Rows:
        """Number of kept tokens."""
        return joined(np.multiply, self.passed, self.sequences)

    @cached_property
    def weights(self) -> Rows:
        """Weights of whole sequences; 1 where tokens have their own, or there are none."""
        return self._weights(np.ones(len(self._lines.weight), bool))

    def _weights(self, where: Any) -> Rows:
        """Return weights of whole sequences; 1 also where a preset is not asked for."""
        lines = self._lines.weight
        return self._rows(
            self.of_plan.weights, np.where((lines >= 0) & where, lines, len(self.of_plan.weights) - 1)
        )

    @cached_property
    def loss_weights(self) -> Rows:
        """The factor of each sequence's loss: its weight if the loss is weighted, 0 where it is dropped."""
        where = np.zeros(len(self._lines.weight), bool)
        where[list(self.at)] = [weighted(preset) for preset in self.presets]
        return joined(np.multiply, self._weights(where), self.sequences)

    @cached_property
    def sums(self) -> dict[str, Rows]:
        """Sums of the final weights over kept tokens.

        w: Σw; ww: Σw²; deviation: Σ(w − 1); about_one: Σ(w − 1)²; weighted: tokens with w ≠ 0. The first two
        stay exact when every weight is tiny, the others when every weight is near 1.
        """
        result = {}
        for at, (name, formula) in enumerate(OF_EQUAL_WEIGHTS.items()):
            each = self._either(
                lambda some, at=at: some.total("weight", at),  # type: ignore[misc]
                lambda some, formula=formula: joined(formula, some.weights, some.passed),  # type: ignore[misc]
            )
            result[name] = joined(np.multiply, each, self.sequences)
        return result

    @cached_property
    def spans(self) -> tuple[Rows, Rows]:
        """Smallest and largest final weight of each sequence's kept tokens; (+inf, −inf) if none."""
        lines, spans = self.plan.of_preset.weight, self.of_plan.spans
        high = self._either(lambda some: some._rows(spans[:, 0], lines), lambda some: some.weights)
        minus = self._either(
            lambda some: some._rows(spans[:, 1], lines), lambda some: some.weights.map(np.negative)
        )
        high, minus = (
            joined(lambda x, kept: np.where(kept > 0, x, -math.inf), one, self.kept) for one in (high, minus)
        )
        return minus.map(np.negative), high

    def _either(
        self, of_tokens: Callable[[PresetSums], Rows], of_sequences: Callable[[PresetSums], Rows]
    ) -> Rows:
        """Return rows of presets whose tokens have weights of their own, beside those of all others."""
        makes = {True: of_tokens, False: of_sequences}
        return merged({places: makes[own](some) for own, places, some in self._by_weights})

    @cached_property
    def _by_weights(self) -> tuple[tuple[bool, tuple[int, ...], PresetSums], ...]:
        tokens = np.asarray(self.plan.of_preset.weight)[list(self.at)] >= 0
        each = ((own, tuple(np.flatnonzero(tokens == own).tolist())) for own in (False, True))
        return tuple((own, places, self._picked(places)) for own, places in each if places)

    def _picked(self, places: Sequence[int]) -> PresetSums:
        presets, at = tuple(self.presets[i] for i in places), tuple(self.at[i] for i in places)
        return replace(self, presets=presets, at=at)

    @cached_property
    def acted(self) -> dict[str, Rows]:
        """Weights on which bounds acted.

        high: weights above `upper`; low: below `lower`; units: number of weights; bounded: weights or tokens
        on which the safety bound acted; tries: number of those.
        """
        n, lines = self.n, self._lines
        each = np.stack((n, segments.numbers(n > 0)))
        return {
            "high": self.number("high"),
            "low": self.number("low"),
            "units": self._rows(each, 1 - lines.of_tokens),
            "bounded": self.number("bounded"),
            "tries": self._rows(each, 1 - lines.bounded_of_tokens),
        }

    @cached_property
    def over_all(self) -> Rows:
        """Sum of the final weights over all tokens, rejected or not; of presets whose plan has it."""
        values = self.of_plan.over_tokens.weight[:, 0]
        return self._either(
            lambda some: some._rows(values, self.plan.over_all),
            lambda some: some.weights.map(lambda w: w * self.n),
        )

    def norms(self) -> Columns:
        """Return the sums of the normalising mean, of presets that divide by it.

        The mean of weights before rejection, over tokens, or over sequences of each one's mean.
        """
        some = self.only(normalised)
        if not some.presets:
            return Columns((), ())
        n, over = self.n, some.over_all
        by_token = [preset.weight is not None and preset.weight.over == "token" for preset in some.presets]
        divisors = Rows(np.stack((np.ones_like(n), np.maximum(n, 1))), tuple(int(not x) for x in by_token))
        units = Rows(np.stack((n, segments.numbers(n > 0))), divisors.at)
        return some.named(dict(zip(NORMS, (joined(np.divide, over, divisors), units), strict=True)))


OF_EQUAL_WEIGHTS: dict[str, Callable[[Array, Array], Array]] = {
    "w": lambda w, n: w * n,
    "ww": lambda w, n: w * w * n,
    "deviation": lambda w, n: (w - 1) * n,
    "about_one": lambda w, n: np.square(w - 1) * n,
    "weighted": lambda w, n: np.where(w != 0, n, 0.0),
}
"""Sums of weights, in the order of a plan, of n tokens that share the weight w."""


@cache
def _names(columns: tuple[str, ...], presets: tuple[str, ...]) -> tuple[str, ...]:
    """Name columns for every preset, column by column; cached, since every batch has the same."""
    return tuple(f"{preset}|{column}" for column in columns for preset in presets)
