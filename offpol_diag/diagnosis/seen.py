"""What is seen of mended rows: what decides between weights, models and honest causes.

The level of a token is |Δ|/(1 − π_rollout): noise of logits moves a log-prob by about noise × (1 − π). Unlike
K3 it does not grow where text becomes harder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from offpol_diag.core.intervals import quantile
from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.recorded import TIMES, Recorded, ceiling
from offpol_diag.diagnosis.rows import (
    SURE,
    Estimate,
    Flags,
    Floats,
    Rows,
    alike,
    answered_again,
    clusters,
    estimate,
    numbers,
    partitions,
    percent,
    uncertain,
)
from offpol_diag.numerals import rounded

ROUNDED = 0.04
"""Largest level of a usual token that rounding may explain: bf16 on both sides of six architectures."""
STALE = 0.16
"""Level of a usual token above which weights of another step are likelier than quantised ones of 8 bits."""
NOISE, SYSTEMATIC, SHARED, OTHER_STEP = 0.05, 0.15, 0.25, 0.42
"""Systematic share of r: below the first, noise of single tokens; above the second, not rounding; above the
third other weights are likelier than quantised ones (these give 10% to 28%, weights of another step 24% to
50%); above the fourth, surely so."""
OUTLYING = 0.08
"""Largest share of outliers that leaves the other tokens a body of their own."""
RISING = 2.5
"""Factor between K3 at the smallest lag and at larger ones from which K3 rises over the lag."""
GROWN, WIDER = 4.0, 1.4
"""Factors from which K3 grows over the steps, and the level of a usual token with it."""


class Body(NamedTuple):
    """Robust statistics of the level of uncertain tokens.

    Attributes:
        scale: robust standard deviation (median of the absolute value / 0.6745).
        tail: share of tokens beyond 8 times the scale.
        share: share of ΣK3 (cut at 1 nat a token) that those tokens carry.
    """

    scale: float
    tail: float
    share: float

    @classmethod
    def of(cls, rows: Rows) -> Body:
        """Compute the statistics; zeros for fewer than 30 tokens."""
        some = uncertain(rows)
        if some.sum() < 30:
            return cls(0.0, 0.0, 0.0)
        scaled, off = np.abs(rows.delta[some]) / -np.expm1(rows.q[some]), rows.k3_cut[some]
        scale = float(np.median(scaled)) / 0.6745
        far = scaled > 8 * scale
        return cls(scale, float(far.mean()), float(off[far].sum() / off.sum()) if off.sum() > 0 else 0.0)


class Course(NamedTuple):
    """The mean level of uncertain tokens by step, with its standard error over prompts, [N] each."""

    steps: Floats
    level: Floats
    error: Floats

    @property
    def text(self) -> str:
        """Levels by step in words, at most four from each end."""
        pairs = [f"{s:g}: {x:.2g}" for s, x in zip(self.steps, self.level, strict=True)]
        return ", ".join(pairs if len(pairs) <= 9 else [*pairs[:4], "…", *pairs[-4:]])


FEWEST_SEQUENCES, FEWEST_OF_STEP, FEWEST_TOKENS = 8, 4, 100
"""Least size of a step whose level is compared: sequences, prompts, uncertain tokens."""


def course(rows: Rows) -> Course:
    """Return the level by step, of steps that are large enough to be compared."""
    some, step, group = uncertain(rows), numbers(rows.column("step")), clusters(rows)
    many, found = rows.sum(some), []
    for one in np.unique(step[np.isfinite(step)]):
        at = step == one
        enough = at.sum() >= FEWEST_SEQUENCES and many[at].sum() >= FEWEST_TOKENS
        if enough and len(np.unique(group[at])) >= FEWEST_OF_STEP:
            level = estimate(rows, rows.scaled, some & at[rows.owner])
            found.append((float(one), level.value, level.error))
    return Course(*np.array(found).reshape(-1, 3).T)


AT_ONCE, SEVERAL = 0.5, 4
"""Least level of step 0, in the highest of all steps, of what is there before any weight has changed, and
fewest steps that show it."""


def from_start(rows: Rows) -> Course | None:
    """Return the levels by step if all is at a recorded lag of 0 and step 0 is as far off as any other.

    An adapter that is missing, and weights that do not arrive, are the trainer's own at step 0.
    """
    if not (numbers(rows.column("policy_lag")) == 0).all():
        return None
    seen = course(rows)
    known = len(seen.steps) >= SEVERAL and seen.steps[0] == 0
    return seen if known and seen.level[0] >= AT_ONCE * seen.level.max() else None


FEWEST_KINDS, COVERED = 8, 0.2
"""Fewest clusters, and smallest share of tokens in repeated kinds, for an estimate of what they share."""


def systematic(rows: Rows) -> Estimate | None:
    """Estimate the systematic share: the share of the variance of min(r, 2) common to tokens of one kind.

    A kind is a pair of consecutive token ids, within one prompt if the dump has group_id. Rounding and
    different expert routing vary from token to token; other weights (stale, quantised) or another
    temperature shift every occurrence of a kind alike. Products of tokens of different responses cancel
    each token's own noise. None without token ids, or if kinds hardly repeat.
    """
    if rows.ids is None or rows.sequences < 2:
        return None
    _, ids = np.unique(rows.ids, return_inverse=True)
    follows = (rows.index > 0) & (np.diff(rows.position, prepend=-1) == 1)
    key = (np.where(follows, np.roll(ids, 1), -1) + 1) * (int(ids.max()) + 1) + ids
    group, grouped = clusters(rows), answered_again(rows)
    if grouped:
        key = np.unique(key, return_inverse=True)[1] * (int(group.max()) + 1) + group[rows.owner]
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    r = np.expm1(np.clip(rows.delta, -20, np.log(2)))
    off = r - r.mean()
    cells, cell = np.unique(kind * rows.sequences + rows.owner, return_inverse=True)
    of_cell = cells // rows.sequences  # a cell is a kind within one response

    def pairs(x: Floats) -> Floats:
        return np.asarray(np.bincount(of_cell, x) ** 2 - np.bincount(of_cell, x**2), np.float64)

    total, count = (
        pairs(np.bincount(cell, off).astype(np.float64)),
        pairs(np.bincount(cell).astype(np.float64)),
    )
    some, tokens = count > 0, np.bincount(kind)
    if not some.any() or tokens[some].sum() < COVERED * rows.tokens:
        return None
    cluster = group[rows.owner[first]][some] if grouped else np.arange(int(some.sum()))
    above = np.bincount(cluster, tokens[some] * total[some] / count[some])
    below = np.bincount(cluster, np.bincount(kind, off**2)[some])
    there = np.bincount(cluster) > 0
    above, below, parts = above[there], below[there], int(there.sum())
    if parts < FEWEST_KINDS or not below.sum() > 0:
        return None
    value = float(above.sum() / below.sum())
    error = float(np.sqrt(np.square(above - value * below).sum() * parts / (parts - 1)) / below.sum())
    half = error * quantile(parts - 1)
    return Estimate(value, value - half, value + half, error, parts)


BY_PROMPT, ENOUGH_ROWS = 0.75, 24
"""Share of the variance of log levels of sequences from which a mismatch goes with the prompt: honest dumps
reach 0.35. And fewest sequences to say so."""


def by_prompt(rows: Rows) -> float:
    """Return the share of the variance of log levels that goes with the prompt, less that by chance, or 0."""
    some = rows.keep(uncertain(rows))
    if some.sequences < ENOUGH_ROWS or not answered_again(some):
        return 0.0
    level, weights = np.log(np.maximum(some.mean(some.scaled), 1e-6)), alike(some)
    level = level - (np.bincount(weights, level) / np.bincount(weights))[weights]
    which = np.unique(clusters(some), return_inverse=True)[1]
    whole, chance = np.square(level - level.mean()).sum(), int(which.max()) / (len(level) - 1)
    if not whole > 0 or chance >= 0.5:
        return 0.0
    left = np.square(level - (np.bincount(which, level) / np.bincount(which))[which]).sum()
    return float((1 - left / whole - chance) / (1 - chance))


# ---------------------------------------------------------------- all of it


@dataclass(frozen=True)
class Seen:
    """All that decides between causes which no count establishes; computed on first use."""

    rows: Rows

    @property
    def recorded(self) -> Recorded:
        """What the metadata says of the engine."""
        return self.rows.known.recorded

    @cached_property
    def body(self) -> Body:
        """Robust statistics of the level."""
        return Body.of(self.rows)

    @cached_property
    def share(self) -> Estimate | None:
        """Systematic share of r, or None if it cannot be estimated."""
        return systematic(self.rows)

    @cached_property
    def k3(self) -> float:
        """Mean of min(K3, 1), nats."""
        return float(self.rows.k3_cut.mean())

    @cached_property
    def lags(self) -> dict[float, float]:
        """Lag → K3; empty if the dump records none."""
        return sizes(self.rows, "policy_lag")

    @cached_property
    def of_one_lag(self) -> Rows:
        """The rows of one lag: 0 if there are any, else the most frequent; all if the dump records none."""
        column = [lag for lag in self.rows.column("policy_lag") if lag is not None]
        if not column:
            return self.rows
        one = 0 if 0 in column else max(dict.fromkeys(column), key=column.count)
        return self.rows.only(np.array([lag == one for lag in self.rows.column("policy_lag")]))

    @cached_property
    def steps(self) -> dict[float, float]:
        """Step → K3, within one lag where the dump records lags."""
        return sizes(self.of_one_lag, "step")

    @cached_property
    def course(self) -> Course:
        """Levels by step, within one lag where the dump records lags."""
        return course(self.of_one_lag)

    @cached_property
    def high(self) -> Flags | None:
        """Steps at which the level is apart from rounding at others, [N]; None if it is not."""
        return rises(self.course)

    @cached_property
    def start(self) -> Course | None:
        """Levels by step, if step 0 is as far off as any other at lag 0; None if it is not, or not known."""
        return from_start(self.rows)

    @cached_property
    def by_prompt(self) -> float:
        """Share of the variance of log levels that goes with the prompt."""
        return by_prompt(self.rows)

    @property
    def recorded_lags(self) -> set[object]:
        """The lags that the dump records."""
        return {lag for lag in self.rows.column("policy_lag") if lag is not None}

    @property
    def in_sync(self) -> bool:
        """Whether the dump says that every row is at lag 0."""
        return self.recorded_lags == {0}

    @property
    def behind(self) -> bool:
        """Whether the dump says that every row is behind."""
        return bool(self.recorded_lags) and 0 not in self.recorded_lags

    @cached_property
    def most(self) -> float:
        """K3 at lag 0, nats, above which a number format excuses nothing.

        Ten times what is published of it, and ten times the lowest level that the dump's own steps or hosts
        show in that format.
        """
        if self.behind or not (self.recorded.quantised or self.recorded.plain):
            return ceiling(self.recorded)
        rows = self.of_one_lag
        parts = [*self.steps.values()]
        for name, values in partitions(rows):
            flags = values.values() if name != "step" else ()
            parts += [
                float(rows.k3_cut[at[rows.owner]].mean())
                for at in flags
                if rows.lengths[at].sum() >= ENOUGH_TOKENS
            ]
        own = [max(TIMES * min(parts), HEALTHY_K3)] if len(parts) > 1 else []
        return min([ceiling(self.recorded), *own])

    @property
    def inexcusable(self) -> bool:
        """Whether K3 at lag 0 is beyond what the recorded number format may give."""
        return self.rows.known.synced is not None and self.rows.known.synced > self.most

    @property
    def noise(self) -> bool:
        """Whether r measurably does not depend on the token, by answers to the same prompt."""
        return self.share is not None and answered_again(self.rows) and self.share.high < NOISE

    @property
    def unsystematic(self) -> bool:
        """Whether tokens of one kind have no more in common than rounding or routing leaves."""
        return self.share is not None and self.share.low < NOISE and self.share.high < SYSTEMATIC

    @property
    def outlying(self) -> bool:
        """Whether a few outliers carry the mismatch, with all other tokens close."""
        seen = self.body
        return seen.scale <= 0.045 and 0.001 < seen.tail < OUTLYING and seen.share >= 0.8

    @cached_property
    def growth(self) -> float | None:
        """Factor by which K3 grows over the steps of one lag; None if it does not."""
        found = list(self.steps.values())
        if len(found) < SEVERAL:
            rising = len(found) > 1 and bool((np.diff(found) > 0).all()) and found[-1] > 1.5 * found[0]
            return found[-1] / max(found[0], 1e-8) if rising and self.body.scale >= STALE else None
        rows, order = self.of_one_lag, list(self.steps)
        third, column = max(1, len(order) // 3), rows.column("step")
        first, last = (
            Body.of(rows.only(np.array([step in part for step in column]))).scale
            for part in (order[:third], order[-third:])
        )  # the level grows too, and not only the share of uncertain tokens
        return grown(found) if last >= WIDER * first else None

    @cached_property
    def returns(self) -> list[float]:
        """Steps at which K3 falls back to rounding after a step at which it was large."""
        steps = self.steps
        top = max(steps.values(), default=0.0)
        if len(steps) < 3 or top <= HEALTHY_K3 or self.outlying:
            return []
        large = [step for step, k3 in steps.items() if k3 > top / 4]
        return [k for k, k3 in steps.items() if k3 < min(top / 20, HEALTHY_K3) and k > min(large)]

    @property
    def moves(self) -> bool:
        """Whether growth, returns or advantages point to weights of another step."""
        moved = self.rows.known.moved
        return self.growth is not None or bool(self.returns) or (moved is not None and moved > SURE)

    @property
    def same_weights(self) -> bool:
        """Whether nothing points to weights of another step, the lag included."""
        return not (self.behind or self.moves)

    @property
    def other_step(self) -> bool:
        """Whether tokens of one kind share so much that the weights are surely others."""
        return self.share is not None and self.share.low > OTHER_STEP

    @property
    def evidence(self) -> str:
        """The level of a usual token and what tokens of one kind share of it, in words."""
        said = f"|Δ|/(1 − q) is {self.body.scale:.2g} for a usual token (robust standard deviation)"
        return f"{said}; {self.common}" if self.share is not None else said

    @property
    def common(self) -> str:
        """The systematic share with its interval, in words; empty if it is not known."""
        if self.share is None:
            return ""
        value, low, high = (max(x, 0.0) for x in (self.share.value, self.share.low, self.share.high))
        ends = f"[{percent(low)}, {percent(high)}]"
        return f"{percent(value)} of the variance of r is common to tokens of one kind {ends}"


ENOUGH_TOKENS = 50
"""Fewest tokens of a step, lag or host for a mean."""


def sizes(rows: Rows, column: str) -> dict[float, float]:
    """Return the mean of min(K3, 1) by value of a numeric column, for values with enough tokens."""
    values, total, found = rows.column(column), rows.sum(rows.k3_cut), dict[float, float]()
    for value in sorted({value for value in values if isinstance(value, int | float)}):
        at = np.array([one == value for one in values])
        if rows.lengths[at].sum() >= ENOUGH_TOKENS:
            found[value] = float(total[at].sum() / rows.lengths[at].sum())
    return found


SYNCED, OFF, APART, ERRORS = 0.06, 0.12, 3.0, 3.0
"""Level up to which the weights may be the same; from which they are not, which is beyond 8 bits; factor
between the two, and standard errors by which a step is beyond it."""


def rises(seen: Course) -> Flags | None:
    """Flag the steps, [N], whose level is apart from that of steps at rounding; None where none is."""
    if len(seen.steps) < 3 or seen.level.min() > SYNCED:
        return None
    high = seen.level - ERRORS * seen.error > max(OFF, APART * float(seen.level.min()))
    return high if high.any() else None


def grown(found: Sequence[float]) -> float | None:
    """Return the factor by which K3 grows over at least four steps, or None if it does not.

    From the first third of the steps to the last, or from some step on, where every later step is larger than
    every earlier one.
    """
    third = len(found) // 3
    first, last = float(np.median(found[:third])), float(np.median(found[-third:]))
    parts = [(max(found[:at]), min(found[at:])) for at in range(1, len(found))]
    apart = any(after > GROWN * max(before, 1e-8) for before, after in parts)
    trend = np.corrcoef(np.argsort(np.argsort(found)), np.arange(len(found)))[0, 1]
    if (last < GROWN * max(first, 1e-8) and not apart) or trend < 0.6 or last < 2e-5:
        return None
    return last / max(found[0] if apart else first, 1e-8)


def listed(found: Mapping[float, float]) -> str:
    """Return K3 by lag or step in words: `0: 0.001, 1: 0.02`, three from each end of many."""
    keys = list(found)
    cut = keys if len(keys) <= 6 else [*keys[:3], *keys[-3:]]
    return ", ".join(f"{key:g}: {found[key]:.2g}" for key in cut)


# ---------------------------------------------------------------- evidence: a sentence, or nothing

CUT = "cut at 1 nat a token"


def all_behind(seen: Seen) -> str:
    """State that no row is at lag 0."""
    lags = sorted(numbers([*seen.recorded_lags]))
    many = f" to {lags[-1]:g}" if len(lags) > 1 else ""
    return f"policy_lag is {lags[0]:g}{many}: no row is at lag 0." if seen.behind else ""


def follows_lag(seen: Seen) -> str:
    """State that K3 rises a little with the lag."""
    times = _over_lag(seen)
    return f"K3 rises with the lag: {listed(seen.lags)}, {CUT}." if 1.5 < times <= RISING else ""


def level_over_lag(seen: Seen) -> str:
    """State that K3 does not follow the lag."""
    return f"K3 does not rise with the lag: {listed(seen.lags)}, {CUT}." if _over_lag(seen) <= 1.5 else ""


def _over_lag(seen: Seen) -> float:
    first, *later = seen.lags.values() or [0.0]
    return float(np.mean(later)) / max(first, 1e-7) if later else np.nan


def moved(seen: Seen) -> str:
    """State that the trainer has moved along its advantages."""
    size = seen.rows.known.moved
    if size is None or size <= SURE:
        return ""
    return (
        f"cov(A, min(r, 2)) is {size:.1f} standard errors above 0: the trainer has moved along its "
        "advantages since the tokens were sampled."
    )


def grows(seen: Seen) -> str:
    """State that K3 grows over the steps."""
    if seen.growth is None:
        return ""
    (first, low), *_, (last, high) = seen.steps.items()
    ends = f"{low:.2g} (step {first:g}) to {high:.2g} (step {last:g})"
    return f"K3 grows {rounded(seen.growth)}-fold over the steps: {ends}, {CUT}."


def level_over_steps(seen: Seen) -> str:
    """State that K3 does not grow over at least four steps."""
    steps = list(seen.steps.values())
    if len(steps) < SEVERAL or seen.growth is not None or seen.returns:
        return ""
    flat = max(steps) <= GROWN * max(min(steps), 1e-8)
    return f"K3 does not grow over the steps: {min(steps):.2g} to {max(steps):.2g}, {CUT}." if flat else ""


def returns(seen: Seen) -> str:
    """State that K3 falls back to rounding at some steps."""
    if not seen.returns:
        return ""
    low, high = max(seen.steps[step] for step in seen.returns), max(seen.steps.values())
    at = ", ".join(f"{step:g}" for step in seen.returns[:4])
    return f"K3 falls back to {low:.2g} at step {at}, and is up to {high:.2g} before, {CUT}."


def shared_much(seen: Seen) -> str:
    """State that tokens of one kind have more in common than quantised weights leave."""
    large = seen.share is not None and seen.share.low > SYSTEMATIC and seen.share.value > SHARED
    return f"{seen.common}; quantised weights leave 10% to 25%." if large else ""


def shared_some(seen: Seen) -> str:
    """State that tokens of one kind have as much in common as quantised weights leave."""
    some = seen.share is not None and seen.share.low > 0 and NOISE < seen.share.value <= SHARED
    return f"{seen.common}; quantised weights leave 10% to 25%." if some else ""


def shared_at_all(seen: Seen) -> str:
    """State that tokens of one kind have more in common than rounding leaves."""
    large = seen.share is not None and seen.share.low > SYSTEMATIC
    return f"{seen.common}; rounding leaves at most 12%." if large else ""


def noise(seen: Seen) -> str:
    """State that the mismatch is noise of single tokens."""
    return f"{seen.common}: noise of single tokens." if seen.unsystematic else ""


def wide(seen: Seen) -> str:
    """State that a usual token is off by more than quantised weights of 8 bits move it."""
    return f"{_usual(seen)}; 8-bit weights leave 0.06 to 0.13." if seen.body.scale > STALE else ""


def broad(seen: Seen) -> str:
    """State that every token is off by as much as quantised weights of 8 bits move it."""
    some = ROUNDED < seen.body.scale <= STALE
    return f"Every token is off: {_usual(seen)}; 8-bit weights leave 0.06 to 0.13." if some else ""


def close(seen: Seen) -> str:
    """State that tokens are off by no more than rounding, but for single outliers."""
    rounding = seen.body.scale <= ROUNDED and seen.body.tail < OUTLYING
    return f"{_usual(seen)}, as rounding leaves it." if rounding else ""


def partly(seen: Seen) -> str:
    """State that a part of the tokens is at rounding and a part is not."""
    part = seen.body.scale <= ROUNDED and seen.body.tail >= OUTLYING
    return f"{_usual(seen)}, and {percent(seen.body.tail)} are beyond 8 times that." if part else ""


def _usual(seen: Seen) -> str:
    return f"|Δ|/(1 − q) is {seen.body.scale:.2g} for a usual token"


def outliers(seen: Seen) -> str:
    """State that a few tokens carry the mismatch."""
    tail = seen.body
    few = 0.001 < tail.tail < OUTLYING and tail.share >= 0.5
    return f"{percent(tail.tail)} of the uncertain tokens carry {percent(tail.share)} of K3." if few else ""


def says_quantised(seen: Seen) -> str:
    """State that the metadata says so."""
    return f"The dump says {seen.recorded.quantised}." if seen.recorded.quantised else ""


def says_plain(seen: Seen) -> str:
    """State that the metadata names another number format."""
    return f"The dump says {seen.recorded.plain}." if seen.recorded.plain else ""


def says_experts(seen: Seen) -> str:
    """State that the metadata names experts."""
    return f"The dump says {seen.recorded.experts}." if seen.recorded.experts else ""


def in_sync(seen: Seen) -> str:
    """State that it is there at a recorded lag of 0."""
    k3 = seen.lags.get(0, 0.0)
    return f"K3 is {k3:.2g} ({CUT}) at a policy_lag of 0." if k3 > HEALTHY_K3 else ""


def beyond_dense(seen: Seen) -> str:
    """State that K3 is above what two engines differ by."""
    usual = f"two engines of a dense model in bf16 stay below {HEALTHY_K3:g} as a rule"
    return f"K3 is {seen.k3:.2g} ({CUT}); {usual}." if seen.k3 > HEALTHY_K3 else ""


def concentrated(seen: Seen) -> str:
    """State that few responses carry the mismatch."""
    level, total = seen.rows.level, seen.rows.sum(seen.rows.k3_cut)
    apart = level > 5 * np.median(level)
    carried = float(total[apart].sum() / total.sum()) if total.sum() > 0 else 0.0
    some = 0 < apart.mean() < 0.4 and carried >= 0.5
    return f"{int(apart.sum()):,} of {len(level):,} responses carry {percent(carried)} of K3." if some else ""


def late(seen: Seen) -> str:
    """State that the first tokens agree better than later ones."""
    rows = seen.rows
    first = rows.index < FIRST
    if min(first.sum(), (~first).sum()) < ENOUGH_TOKENS:
        return ""
    begin, end = (estimate(rows, rows.size, at) for at in (first, ~first))
    apart = end.value > 2 * begin.value and end.value - begin.value > 4 * np.hypot(begin.error, end.error)
    said = f"The first {FIRST} tokens differ by {begin.value:.2g} nats, later ones by {end.value:.2g}"
    return f"{said}: after another prompt the first differ most." if apart else ""


FIRST = 8
"""First tokens of a response, which another prompt moves most."""


def at_step_0(seen: Seen) -> str:
    """State that it is there at step 0, before any weight has changed, as at later steps."""
    if seen.start is None or seen.body.scale <= ROUNDED:
        return ""
    return f"It is there at step 0, before any weight has changed: |Δ|/(1 − q) by step {seen.start.text}."


def not_at_step_0(seen: Seen) -> str:
    """State that it is not there at step 0, at a lag of 0."""
    steps = seen.steps if seen.in_sync else {}
    if len(steps) < SEVERAL or 0 not in steps or steps[0] > max(steps.values()) / 10:
        return ""
    return f"At step 0, before any weight has changed, K3 is {steps[0]:.2g}, {CUT}."
