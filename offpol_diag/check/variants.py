"""Other definitions that a trainer may have computed: rows, each of which changes one part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.check.expected import Logged, Values
from offpol_diag.engine import segments
from offpol_diag.engine.segments import Array
from offpol_diag.presets import Preset
from offpol_diag.trainers import logs

BOUNDS = (1.0, 1.2, 1.28, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 8.0, 10.0, 20.0, 100.0)
"""Upper bounds that are tried in place of the preset's, and their inverses as lower ones."""
RANKS = (2, 4, 8, 16, 32, 64)
FACTORS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256)
SPANS = (2, 3, 4, 5, 8, 10, 16, 20, 25, 50, 100)
"""Steps over which a trainer may average before it logs."""
CAPS = (20.0, 10.0, 5.0, 2.0, 1.0)

Change = Callable[["Step", Batch], Batch | None]
Get = Callable[[int], float | None]
"""Step → the value of a metric there, None where the dump has no such step."""
Across = Callable[[Get, int], float | None]


@dataclass(frozen=True, eq=False)
class Variant:
    """Another definition. Each field that is set changes one part; two variants combine where these differ.

    Attributes:
        name: a short key for the JSON.
        text: what the trainer computes, after "the trainer logs".
        fix: what to do about it.
        changes: of the rows of a step; None where one does not apply.
        masked: denominators count masked tokens.
        preset: another correction.
        ranks, strided: means of this many ranks, rows dealt in blocks or in turns.
        micro, weighted: means of this many rows each, averaged as they are or by their tokens.
        outermost: whether maxima and minima of parts are the outermost.
        factor: what means are multiplied by; a name is the total of that summand.
        finish: applied to each value at the end.
        across: value of one step from those of several.
        other: name of the metric whose value is logged.
        alone: whether it is not combined with others.
    """

    name: str
    text: str
    fix: str
    changes: tuple[Change, ...] = ()
    masked: bool = False
    preset: Preset | None = None
    ranks: int | None = None
    strided: bool = False
    micro: int | None = None
    weighted: bool = False
    outermost: bool = True
    factor: float | str | None = None
    finish: Callable[[float], float] | None = None
    across: Across | None = None
    other: str = ""
    alone: bool = False
    simple: int = 1

    @cached_property
    def changed(self) -> frozenset[str]:
        """Names of the fields that are set."""
        own = fields(self)[3:-2]
        return frozenset(one.name for one in own if getattr(self, one.name) != one.default)

    def __and__(self, other: Variant) -> Variant | None:
        """Return both at once; None where they change the same part, or one stands alone."""
        if self.alone or other.alone or self.changed & other.changed - {"changes", "outermost"}:
            return None
        return replace(
            self,
            name=f"{self.name}+{other.name}",
            text=f"{self.text}, and {other.text}",
            fix=f"{self.fix} {other.fix}",
            simple=self.simple + other.simple,
            **{one: getattr(other, one) for one in other.changed - {"changes"}},
            changes=(*self.changes, *other.changes),
        )


@dataclass
class Step:
    """One training step of the dump, and what was computed of it.

    Attributes:
        batch: its rows.
        unmasked: the same rows with masked tokens counted, or None where the dump does not hold them.
        preset: the correction that is assumed.
        columns: canonical columns of the dump.
        micro, ranks: sequences of a micro-batch and number of data-parallel ranks, where they are known.
        tokens: tokens of all batches that were computed.
    """

    batch: Batch
    preset: Preset
    columns: frozenset[str]
    micro: int | None = None
    ranks: int | None = None
    unmasked: Batch | None = None
    tokens: int = 0
    made: dict[object, Any] = field(default_factory=dict)

    def _once(self, key: object, make: Callable[[], Any]) -> Any:
        if key not in self.made:
            self.made[key] = make()
        return self.made[key]

    def logged(self, of: Variant) -> Logged | None:
        """Return the trainer's summands of a variant's batch and preset, computed once."""

        def made() -> Logged | None:
            batch: Batch | None = self.batch
            for change in of.changes:
                batch = batch and change(self, batch)
            self.tokens += batch.tokens if batch else 0
            if batch is None:
                return None
            return Logged.of(batch, of.preset or self.preset, self.columns, of.masked)

        return self._once((of.changes, of.preset, of.masked), made)  # type: ignore[no-any-return]

    def values(self, of: Variant) -> Values:
        """Return logged name → value of this step by a variant, `across` apart; empty where it has none."""
        logged = self.logged(of)
        if logged is None:
            return {}
        ranks, micro, rows = of.ranks or self.ranks or 1, of.micro or self.micro, len(logged.counted)
        if ranks > rows or (of.micro and of.micro >= rows):
            return {}
        parts = split(rows, ranks, micro, of.strided)
        outermost = of.outermost and of.ranks is None and of.micro is None

        def made() -> Values:
            if len(parts) == 1:
                return next(iter(logged.values()), {})
            return logged.averaged(parts, of.weighted, outermost)

        own = (of.changes, of.preset, of.masked)
        found: Values = self._once((*own, parts, of.weighted, outermost), made)
        if of.factor:
            by, ends, base = of.factor, logs.of_whole(logged.preset), self.logged(BASE)
            if isinstance(by, str):
                assert base is not None
                by = float(base.sums[by].sum())
            found = {name: x * by for name, x in found.items() if name not in ends}
        if of.finish:
            found = {name: of.finish(x) for name, x in found.items() if math.isfinite(x)}
        if of.other:
            found = {name: found[of.other] for name in found if name != of.other and of.other in found}
        return found


def split(rows: int, ranks: int, micro: int | None, strided: bool = False) -> tuple[tuple[int, ...], ...]:
    """Divide rows among ranks, contiguous or in turns, and those of each into micro-batches."""
    cuts = [rows * i // ranks for i in range(ranks + 1)]
    own = (
        [range(i, rows, ranks) for i in range(ranks)] if strided else [range(*cut) for cut in pairwise(cuts)]
    )
    size = micro or rows
    return tuple(tuple(one[at : at + size]) for one in own for at in range(0, len(one), size))


# ---------------------------------------------------------------- changes of the rows


def _zeros(step: Step, batch: Batch) -> Batch | None:
    """Append the masked tokens of each sequence with log-probs and advantages of 0."""
    if not bool(batch.masked.any()):
        return None
    n, more = batch.lengths, batch.masked
    at = np.arange(batch.tokens) + segments.spread(np.cumsum(more) - more, batch.cu_seqlens)
    starts = np.concatenate(([0], np.cumsum(n + more)))

    def wide(x: Array | None) -> Array | None:
        if x is None:
            return None
        found = np.zeros(starts[-1])
        found[at] = x
        return found

    return replace(
        batch,
        **{name: wide(getattr(batch, name)) for name in ("rollout", "old", "current", "advantages")},  # type: ignore[arg-type]
        token_ids=None,
        entropy=None,
        position=segments.spread(-starts[:-1], starts) + np.arange(starts[-1]),
        cu_seqlens=starts,
        cu_runs=np.unique(starts),
        masked=np.zeros_like(more),
        masked_negative=None,
    )


def _reversed(step: Step, batch: Batch) -> Batch | None:
    """Exchange the policy that sampled and the one that is trained."""
    policy = step.preset.policy
    train = batch.policy(policy)
    if policy == "rollout" or train is None:
        return None
    return replace(batch, **{"rollout": train, policy: batch.rollout})  # type: ignore[arg-type]


def _policy(use: str, for_: str) -> Change:
    def change(step: Step, batch: Batch) -> Batch | None:
        x = batch.policy(use)
        return None if x is None or batch.policy(for_) is None else replace(batch, **{for_: x})  # type: ignore[arg-type]

    return change


def _capped(most: float, step: Step, batch: Batch) -> Batch | None:
    """Return log-ratios within ±most, or None where all are."""
    train = batch.policy(step.preset.policy)
    assert train is not None
    gap = train - batch.rollout
    return (
        None if bool((abs(gap) <= most).all()) else replace(batch, rollout=train - np.clip(gap, -most, most))
    )


# ---------------------------------------------------------------- across steps and at the end


def _trailing(steps: int, get: Get, at: int) -> float | None:
    values = [get(at - i) for i in range(steps)]
    known = [x for x in values if x is not None]
    return sum(known) / steps if len(known) == steps else None


def _smoothed(weight: float, debiased: bool, get: Get, at: int) -> float | None:
    """Return the exponential moving average over the dump's steps from the first on."""
    first = at
    while get(first - 1) is not None:
        first -= 1
    total, mass = (0.0, 0.0) if debiased else (get(first) or 0.0, 1.0)
    for step in range(first, at + 1):
        x = get(step)
        if x is None:
            return None
        total = weight * total + (1 - weight) * x
        mass = weight * mass + 1 - weight
    return total / mass


def _digits(many: int, x: float) -> float:
    return float(f"{x:.{many - 1}e}")


def _bfloat16(x: float) -> float:
    """Round to the upper half of a float32, of two as near to the even one."""
    bits = int(np.float32(x).view(np.uint32))
    return float(np.uint32((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32))


def _float16(x: float) -> float:
    return float(np.float16(np.float32(x)))


BASE = Variant("", "", "")
"""The trainer's own definition."""
MASK = "Average over the loss mask: sum(x·mask)/sum(mask)."
NAMES = "Check which policy's log-probs reach the metric."
COMMON: tuple[Variant, ...] = (
    Variant(
        "masked_in_denominator",
        "means whose denominator also counts masked tokens",
        f"{MASK} A plain .mean() divides by padding or tool tokens too.",
        masked=True,
    ),
    Variant(
        "mask_ignored",
        "means over all tokens, masked ones with their log-probs",
        f"{MASK} Tool and prompt tokens were not sampled by this policy.",
        changes=(lambda step, batch: step.unmasked,),
    ),
    Variant(
        "masked_as_zeros",
        "means over all tokens, masked ones with log-probs of 0",
        f"{MASK} Where the mask multiplies log-probs, exp(0) = 1 still counts.",
        changes=(_zeros,),
    ),
    Variant(
        "reversed",
        "the ratio in the other direction, π_rollout/π_train",
        "Subtract rollout from training log-probs, not the other way round, or read the curve with r as 1/r.",
        changes=(_reversed,),
    ),
    Variant(
        "current_for_old", "π_θ (current) where old is meant", NAMES, changes=(_policy("current", "old"),)
    ),
    Variant(
        "old_for_current", "π_old where π_θ (current) is meant", NAMES, changes=(_policy("old", "current"),)
    ),
    Variant(
        "sequence_mean",
        "a mean over sequences of the means of their tokens",
        "Short responses weigh more in it: compare it only with curves averaged alike.",
        micro=1,
    ),
    Variant(
        "token_mean",
        "a mean over tokens, not of the sequences' means",
        "Long responses weigh more in it: compare it only with curves averaged alike.",
        micro=1,
        weighted=True,
    ),
    Variant(
        "mean_of_extremes",
        "maxima and minima averaged over the parts",
        "Reduce max with max and min with min across ranks and micro-batches.",
        outermost=False,
    ),
    Variant(
        "sum_tokens",
        "a sum over tokens, not their mean",
        "Divide by the number of tokens.",
        factor="tokens",
    ),
    Variant(
        "sum_sequences",
        "a sum over sequences, not their mean",
        "Divide by the number of sequences.",
        factor="rows",
    ),
    Variant(
        "step_before",
        "the values of the step before: the curve lags by one",
        "Number both alike: the curve's step is one higher than the dump's.",
        across=lambda get, at: get(at - 1),
    ),
    Variant(
        "step_after",
        "the values of the step after: the curve is one step ahead",
        "Number both alike: the curve's step is one lower than the dump's.",
        across=lambda get, at: get(at + 1),
    ),
    Variant("negated", "the negative value", "Turn its sign.", factor=-1.0, alone=True),
    Variant("percent", "percent, not a share", "Read the curve in percent.", factor=100.0, alone=True),
    Variant(
        "bits",
        "bits (log₂), not nats",
        "Use the natural logarithm, or read the curve in bits.",
        factor=1 / math.log(2),
        alone=True,
    ),
    *(
        Variant(
            kind,
            f"values in {kind}",
            "Reduce and log in float32.",
            finish=rounded,
            alone=True,
        )
        for kind, rounded in (("bfloat16", _bfloat16), ("float16", _float16))
    ),
    *(
        Variant(
            f"decimals_{many}",
            f"values rounded to {many} decimals",
            "Export the tracker's own values, not those of the console.",
            finish=partial(round, ndigits=many),
            alone=True,
        )
        for many in (6, 5, 4, 3, 2)
    ),
    *(
        Variant(
            f"digits_{many}",
            f"values rounded to {many} significant digits",
            "Export the tracker's own values, not those of the console.",
            finish=partial(_digits, many),
            alone=True,
        )
        for many in (5, 4, 3)
    ),
    *(
        Variant(
            f"mean_of_{many}_steps",
            f"the mean of the last {many} steps",
            "Log every step (in TRL logging_steps=1), or compare averages.",
            across=partial(_trailing, many),
            alone=True,
        )
        for many in SPANS
    ),
    *(
        Variant(
            f"smoothed_{percent / 100:g}{'' if debiased else '_plain'}",
            f"values smoothed over steps (exponential moving average, weight {percent / 100:g})",
            "Export the curve with smoothing off.",
            across=partial(_smoothed, percent / 100, debiased),
            alone=True,
        )
        for percent in (*range(5, 100, 5), 97, 98, 99, 99.5, 99.9)
        for debiased in (True, False)
    ),
    *(
        Variant(
            f"log_ratio_{most:g}",
            f"log-ratios clamped to ±{most:g}",
            f"Clamp nothing below e^{most:g}, or say so beside the curve.",
            changes=(partial(_capped, most),),
        )
        for most in CAPS
    ),
    *(
        one
        for by in FACTORS
        for one in (
            Variant(
                f"times_{by}",
                f"{by} times the mean",
                f"Average over ranks and micro-batches: {by} of them were summed.",
                factor=by,
                alone=True,
            ),
            Variant(
                f"over_{by}",
                f"1/{by} of the mean",
                f"It was divided by {by} ranks or micro-batches once too often.",
                factor=1 / by,
                alone=True,
            ),
        )
    ),
)
"""Variants that need no size of the dump."""
UNWEIGHTED = "Weigh each part by its tokens (reduce sums and counts, then divide), or check with --{} {}."


def variants(step: Step) -> Iterator[Variant]:
    """Yield the variants of one part each, the likeliest first."""
    yield from COMMON
    rows = step.batch.sequences
    for ranks in RANKS:
        for strided, how in ((False, "in blocks"), (True, "in turns")):
            text = f"means of {ranks} data-parallel ranks (rows dealt {how}), averaged without their sizes"
            name = f"dp_{ranks}{'_strided' * strided}"
            yield Variant(name, text, UNWEIGHTED.format("dp", ranks), ranks=ranks, strided=strided)
    sizes = {2**k for k in range(1, rows.bit_length())} | {rows // k for k in range(2, 17) if rows // k > 1}
    for micro in sorted(sizes, reverse=True):
        text = f"means of micro-batches of {micro} sequences, averaged without their sizes"
        yield Variant(f"micro_{micro}", text, UNWEIGHTED.format("micro-batch", micro), micro=micro)
    yield from _bounds(step.preset)
    for name in step.values(BASE):
        yield Variant(
            f"is_{name}", f"the value of {name}", "The names are exchanged.", other=name, alone=True
        )


def of_presets(presets: Sequence[Preset]) -> Iterator[Variant]:
    """Yield a variant for each other preset that logs the same names."""
    for one in presets:
        text, fix = f"what it logs under the preset {one.name}", f"Check with --preset {one.name}."
        yield Variant(f"preset_{one.name}", text, fix, preset=one)


def _bounds(preset: Preset) -> Iterator[Variant]:
    """Yield other bounds of the weight and of rejection rules, and other actions at them."""
    fix = "Set the bound that is meant, or name the preset that ran with --preset."
    weight = preset.weight
    if weight is not None:
        for side, bound, one in _others(weight):
            text = f"weights bounded at {bound:.4g} {side}, not at {_said(getattr(weight, side))}"
            yield Variant(f"{side}_{bound:.4g}", text, fix, preset=replace(preset, weight=one))
        raw = replace(weight, action="none", upper=None, lower=None)
        yield Variant("unbounded", "weights without bounds", fix, preset=replace(preset, weight=raw))
        if weight.action in ("truncate", "mask"):
            other = "mask" if weight.action == "truncate" else "truncate"
            text = "weights outside the bounds set to 0, not clamped"
            if other == "truncate":
                text = "weights clamped to the bounds, not set to 0 outside them"
            acted = replace(weight, action=other)  # type: ignore[arg-type]
            yield Variant(f"{other}_weights", text, fix, preset=replace(preset, weight=acted))
    for at, rule in enumerate(preset.reject):
        if rule.statistic != "ratio":
            continue
        for side, bound, one in _others(rule):
            text = f"rejection beyond {bound:.4g} {side}, not {_said(getattr(rule, side))}"
            rules = (*preset.reject[:at], one, *preset.reject[at + 1 :])
            yield Variant(f"reject_{side}_{bound:.4g}", text, fix, preset=replace(preset, reject=rules))
    if preset.reject:
        yield Variant("no_rejection", "no rejection", fix, preset=replace(preset, reject=()))


def _others(rule: Any) -> Iterator[tuple[str, float, Any]]:
    """Yield side, bound and rule for each other bound that leaves the lower one below the upper one."""
    for side, bounds in (("upper", BOUNDS), ("lower", (*(1 / one for one in BOUNDS[1:]), 0.8, 0.0))):
        own, opposite = getattr(rule, side), getattr(rule, "lower" if side == "upper" else "upper")
        for bound in bounds:
            inside = opposite is None or (bound > opposite if side == "upper" else bound < opposite)
            if bound != own and inside and (side == "upper" or own is not None):
                yield side, bound, replace(rule, **{side: bound})


def _said(bound: float | None) -> str:
    return "nothing" if bound is None else f"{bound:g}"
