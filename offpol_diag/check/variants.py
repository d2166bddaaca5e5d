"""What a trainer logs of a step, and other definitions that it may have computed instead, as a table.

To add a variant, add a row to `COMMON` or `variants`, and its words to `variants.toml`.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property, partial
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np

from offpol_diag.analysis.first_pass import of_batch
from offpol_diag.analysis.study import Study
from offpol_diag.batch import Batch, joined
from offpol_diag.engine import scope, segments
from offpol_diag.engine.context import BatchContext
from offpol_diag.engine.segments import Array, sum_by
from offpol_diag.presets import Preset
from offpol_diag.trainers import logs
from offpol_diag.trainers.tokens import Tokens

Values = dict[str, float]
"""Logged name → value."""
Parts = Sequence[Sequence[int]]
"""Rows of each part of a batch."""
Change = Callable[["Step", Batch], Batch | None]
Get = Callable[[int], float | None]
"""Step → the value of a metric there, None where the dump has no such step."""
BOUNDS = (1.0, 1.2, 1.28, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 8.0, 10.0, 20.0, 100.0)
"""Upper bounds that are tried in place of the preset's, and their inverses as lower ones."""
RANKS = (2, 4, 8, 16, 32, 64)
FACTORS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 64, 128, 256)
SPANS = (2, 3, 4, 5, 8, 10, 16, 20, 25, 50, 100)
"""Steps over which a trainer may average before it logs."""
SMOOTHING = tuple(percent / 100 for percent in (*range(5, 100, 5), 97, 98, 99, 99.5, 99.9))
CAPS = (20.0, 10.0, 5.0, 2.0, 1.0)


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
        simple: number of variants that it combines.
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
    across: Callable[[Get, int], float | None] | None = None
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


BASE = Variant("", "", "")
"""The trainer's own definition."""


# ---------------------------------------------------------------- what is logged of a step


def by_step(batches: Iterable[Batch]) -> dict[int, Batch]:
    """Divide a dump by training step; without a column of steps nothing is returned."""
    found: dict[int, list[Batch]] = {}
    for batch in batches:
        rows: dict[int, list[int]] = {}
        for row, step in enumerate(batch.scalars.get("step", ())):
            if isinstance(step, int):
                rows.setdefault(step, []).append(row)
        for step, at in rows.items():
            cuts = [0, *(i for i, (a, b) in enumerate(pairwise(at), 1) if b != a + 1), len(at)]
            runs = [batch.rows(at[a], at[b - 1] + 1) for a, b in pairwise(cuts)]
            found.setdefault(step, []).append(joined(runs))
        scope.refuse_steps(len(found), 0)
    return {step: joined(parts) for step, parts in sorted(found.items())}


@dataclass(frozen=True)
class Logged:
    """What a trainer's log adds up, of each sequence of one training step.

    Attributes:
        t: the sequences under the correction that runs.
        found: summands and numbers whose extremes are logged, of each sequence.
    """

    t: Tokens
    found: logs.Collected

    def values(self, parts: Parts) -> list[Values]:
        """Return what is logged of each part of the sequences, those without a token left out."""
        which = np.zeros(len(self.t.counted), np.int64)
        for part, rows in enumerate(parts):
            which[list(rows)] = part

        def sum_at(at: int) -> Array:
            return sum_by(which, len(parts), self.found.sums[at])

        def ends_at(at: int) -> tuple[Array, Array]:
            low, high = np.full(len(parts), np.inf), np.full(len(parts), -np.inf)
            np.minimum.at(low, which, self.found.ends[at])
            np.maximum.at(high, which, self.found.ends[at])
            return low, high

        whole = self.t.context
        none = BatchContext(whole.batch.rows(0, 0), whole.draws[:0], whole.fits)
        read = logs.read(Tokens(none, self.t.preset), logs.Merged(sum_at, ends_at))
        made = {name: np.broadcast_to(x, len(parts)).tolist() for name, x in read.items()}
        there = np.flatnonzero(sum_by(which, len(parts), self.t.counted) > 0).tolist()
        return [{name: x[part] for name, x in made.items()} for part in there]

    def averaged(self, parts: Parts, weighted: bool, outermost: bool) -> Values:
        """Return the mean over parts of what is logged of each, unweighted or weighted by their tokens.

        With `outermost` maxima and minima are those of the whole.
        """
        made = self.values(parts)
        if len(parts) == 1 or not made:
            return made[0] if made else {}
        sizes = [size for rows in parts if (size := float(self.t.counted[list(rows)].sum()))]
        shares = [(size if weighted else 1.0) / (sum(sizes) if weighted else len(sizes)) for size in sizes]
        found = {
            name: sum(one[name] * share for one, share in zip(made, shares, strict=True))
            for name in made[0]
            if all(name in one for one in made)
        }
        if outermost:
            (whole,) = self.values([range(len(self.t.counted))])
            found |= {name: whole[name] for name in logs.of_whole(self.t.preset) & whole.keys()}
        return found


@dataclass
class Step:
    """One training step of the dump, and what was computed of it.

    Attributes:
        batch: its rows.
        preset: the correction that is assumed.
        columns: canonical columns of the dump.
        micro, ranks: sequences of a micro-batch and number of data-parallel ranks, where they are known.
        unmasked: the same rows with masked tokens counted, or None where the dump does not hold them.
        tokens: tokens of all batches that were computed.
        made: what was computed.
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

    def _logged(self, of: Variant) -> Logged | None:
        """Return the trainer's summands of a variant's batch and preset; None where it does not apply."""
        batch: Batch | None = self.batch
        for change in of.changes:
            batch = batch and change(self, batch)
        if batch is None:
            return None
        self.tokens += batch.tokens
        preset = of.preset or self.preset
        study = Study.of(self.columns, (preset,), (), 0, 2)
        found = of_batch(batch, [preset], "advantages" in study.columns and batch.advantages is None)
        t = Tokens(BatchContext.of(found.filled(batch), 0, 2, found.fits), preset, of.masked)
        return Logged(t, logs.collected(t))

    @np.errstate(all="ignore")
    def values(self, of: Variant = BASE) -> Values:
        """Return logged name → value of this step by a variant, `across` apart; empty where it has none."""
        key = of.changes, of.preset, of.masked
        logged: Logged | None = self._once(key, lambda: self._logged(of))
        rows, ranks, micro = self.batch.sequences, of.ranks or self.ranks or 1, of.micro or self.micro
        if logged is None or ranks > rows or (of.micro and of.micro >= rows):
            return {}
        how = split(rows, ranks, micro, of.strided), of.weighted, of.outermost and not (of.ranks or of.micro)
        found: Values = self._once((key, how), lambda: logged.averaged(*how))
        if of.factor:
            by, ends = of.factor, logs.of_whole(logged.t.preset)
            if isinstance(by, str):
                by = rows if by == "rows" else self.batch.tokens
            found = {name: x * by for name, x in found.items() if name not in ends}
        if of.finish:
            found = {name: of.finish(x) for name, x in found.items() if math.isfinite(x)}
        if of.other:
            found = {name: found[of.other] for name in found if name != of.other and of.other in found}
        return found


def split(rows: int, ranks: int, micro: int | None, strided: bool = False) -> tuple[tuple[int, ...], ...]:
    """Divide rows among ranks, contiguous or in turns, and those of each into micro-batches."""
    every = range(rows)
    cuts = pairwise(rows * i // ranks for i in range(ranks + 1))
    own = [every[i::ranks] for i in range(ranks)] if strided else [every[a:b] for a, b in cuts]
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
    wide: dict[str, Any] = dict.fromkeys(("rollout", "old", "current", "advantages"))
    for name in wide:
        if batch.has(name):
            wide[name] = np.zeros(starts[-1])
            wide[name][at] = getattr(batch, name)
    return replace(
        batch,
        **wide,
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
    exchanged: Any = {"rollout": batch.policy(policy), policy: batch.rollout}
    return replace(batch, **exchanged) if policy != "rollout" and batch.has(policy) else None


def _policy(use: str, for_: str, step: Step, batch: Batch) -> Batch | None:
    used: Any = {for_: batch.policy(use)}
    return replace(batch, **used) if batch.has(use) and batch.has(for_) else None


def _capped(most: float, step: Step, batch: Batch) -> Batch | None:
    """Return log-ratios within ±most, or None where all are."""
    train = batch.policy(step.preset.policy)
    assert train is not None
    gap = train - batch.rollout
    within = bool((abs(gap) <= most).all())
    return None if within else replace(batch, rollout=train - np.clip(gap, -most, most))


# ---------------------------------------------------------------- across steps and at the end


def _trailing(steps: int, get: Get, at: int) -> float | None:
    known = [x for i in range(steps) if (x := get(at - i)) is not None]
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


# ---------------------------------------------------------------- the table

WORDS: dict[str, tuple[str, str]] = tomllib.loads(
    resources.files("offpol_diag.check").joinpath("variants.toml").read_text("utf-8")
)


def row(name: str, kind: str = "", *said: object, **how: Any) -> Variant:
    """Return a variant with the words of its kind, which is its name unless several share them."""
    text, fix = (words.format(*said) for words in WORDS[kind or name])
    return Variant(name, text, fix, **how)


COMMON: tuple[Variant, ...] = (
    row("masked_in_denominator", masked=True),
    row("mask_ignored", changes=(lambda step, batch: step.unmasked,)),
    row("masked_as_zeros", changes=(_zeros,)),
    row("reversed", changes=(_reversed,)),
    row("current_for_old", changes=(partial(_policy, "current", "old"),)),
    row("old_for_current", changes=(partial(_policy, "old", "current"),)),
    row("sequence_mean", micro=1),
    row("token_mean", micro=1, weighted=True),
    row("mean_of_extremes", outermost=False),
    row("sum_tokens", factor="tokens"),
    row("sum_sequences", factor="rows"),
    row("step_before", across=lambda get, at: get(at - 1)),
    row("step_after", across=lambda get, at: get(at + 1)),
    row("negated", factor=-1.0, alone=True),
    row("percent", factor=100.0, alone=True),
    row("bits", factor=1 / math.log(2), alone=True),
    row("bfloat16", "precision", "bfloat16", finish=_bfloat16, alone=True),
    row("float16", "precision", "float16", finish=_float16, alone=True),
    *(
        row(f"decimals_{n}", "decimals", n, finish=partial(round, ndigits=n), alone=True)
        for n in (6, 5, 4, 3, 2)
    ),
    *(row(f"digits_{n}", "digits", n, finish=partial(_digits, n), alone=True) for n in (5, 4, 3)),
    *(row(f"mean_of_{n}_steps", "mean_of_steps", n, across=partial(_trailing, n), alone=True) for n in SPANS),
    *(
        row(f"smoothed_{w:g}{end}", "smoothed", w, across=partial(_smoothed, w, not end), alone=True)
        for w in SMOOTHING
        for end in ("", "_plain")
    ),
    *(row(f"log_ratio_{most:g}", "log_ratio", most, changes=(partial(_capped, most),)) for most in CAPS),
    *(
        row(f"{kind}_{n}", kind, n, factor=factor, alone=True)
        for n in FACTORS
        for kind, factor in (("times", n), ("over", 1 / n))
    ),
)
"""Variants that need no size of the dump."""


def variants(step: Step) -> Iterator[Variant]:
    """Yield the variants of one part each, the likeliest first."""
    yield from COMMON
    for ranks in RANKS:
        yield row(f"dp_{ranks}", "dp", ranks, "in blocks", ranks=ranks)
        yield row(f"dp_{ranks}_strided", "dp", ranks, "in turns", ranks=ranks, strided=True)
    rows = step.batch.sequences
    sizes = {2**k for k in range(1, rows.bit_length())} | {rows // k for k in range(2, 17) if rows // k > 1}
    for micro in sorted(sizes, reverse=True):
        yield row(f"micro_{micro}", "micro", micro, micro=micro)
    yield from _bounds(step.preset)
    for name in step.values():
        yield row(f"is_{name}", "is", name, other=name, alone=True)


def of_presets(presets: Sequence[Preset]) -> Iterator[Variant]:
    """Yield a variant for each other preset that logs the same names."""
    for one in presets:
        yield row(f"preset_{one.name}", "preset", one.name, preset=one)


def _bounds(preset: Preset) -> Iterator[Variant]:
    """Yield other bounds of the weight and of rejection rules, and other actions at them."""
    weight = preset.weight
    if weight is not None:
        for name, said, one in _others(weight):
            yield row(name, "bound", *said, preset=replace(preset, weight=one))
        raw = replace(weight, action="none", upper=None, lower=None)
        yield row("unbounded", preset=replace(preset, weight=raw))
        if weight.action in ("truncate", "mask"):
            other: Any = "mask" if weight.action == "truncate" else "truncate"
            yield row(f"{other}_weights", preset=replace(preset, weight=replace(weight, action=other)))
    for at, rule in enumerate(preset.reject):
        for name, said, one in _others(rule) if rule.statistic == "ratio" else ():
            rules = (*preset.reject[:at], one, *preset.reject[at + 1 :])
            yield row(f"reject_{name}", "reject", *said, preset=replace(preset, reject=rules))
    if preset.reject:
        yield row("no_rejection", preset=replace(preset, reject=()))


def _others(rule: Any) -> Iterator[tuple[str, tuple[object, ...], Any]]:
    """Yield name, words and rule for each other bound that leaves the lower one below the upper one."""
    for side, bounds in (("upper", BOUNDS), ("lower", (*(1 / one for one in BOUNDS[1:]), 0.8, 0.0))):
        own, opposite = getattr(rule, side), getattr(rule, "lower" if side == "upper" else "upper")
        for bound in bounds:
            inside = opposite is None or (bound > opposite if side == "upper" else bound < opposite)
            if bound != own and inside and (side == "upper" or own is not None):
                said = bound, side, "nothing" if own is None else f"{own:g}"
                yield f"{side}_{bound:.4g}", said, replace(rule, **{side: bound})
