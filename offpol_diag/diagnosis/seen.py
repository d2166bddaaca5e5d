"""What is seen of mended rows: what decides between weights, models and honest causes, and its words.

The level of a token is |Δ|/(1 − π_rollout): noise of logits moves a log-prob by about noise × (1 − π). Unlike
K3 it does not grow where text becomes harder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.recorded import TIMES, Recorded, ceiling
from offpol_diag.diagnosis.rows import (
    SURE,
    Estimate,
    Flags,
    Floats,
    Rows,
    answered_again,
    clusters,
    estimate,
    numbers,
    partitions,
    percent,
    uncertain,
)

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
RISING, FLAT_OVER_LAG = 2.5, 1.5
"""Factor of K3 at larger lags over that at the smallest from which it rises; and up to which it does not."""
CUT = "cut at 1 nat a token"
ENOUGH_TOKENS = 50
"""Fewest tokens of a step, lag or host for a mean."""


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

    @property
    def outliers(self) -> str:
        """The tail in words."""
        return f"{percent(self.tail)} of the uncertain tokens carry {percent(self.share)} of K3"


# ---------------------------------------------------------------- by step

FEWEST_SEQUENCES, FEWEST_OF_STEP, FEWEST_TOKENS, SEVERAL = 8, 4, 100, 4
"""Fewest sequences, prompts and uncertain tokens of a step that is compared; fewest steps of a trend."""
SYNCED, OFF, APART, ERRORS = 0.06, 0.12, 3.0, 3.0
"""Level up to which the weights may be the same; from which they are not, which is beyond 8 bits; factor
between the two, and standard errors by which a step is beyond it."""
GROWN, TREND, FLAT = 2.0, 0.6, 4.0
"""Factor of the level between the first third of the steps and the last, and its rank correlation with the
step, from which it grows; and factor of K3 between steps up to which it does not."""
AT_ONCE = 0.5
"""Least level of step 0, in the highest of all steps, of what is there before any weight has changed."""


class Course(NamedTuple):
    """The mean level of uncertain tokens by step, its standard error over prompts, and K3, [N] each."""

    steps: Floats
    level: Floats
    error: Floats
    k3: Floats

    @classmethod
    def of(cls, rows: Rows) -> Course:
        """Compute them of steps that are large enough to be compared."""
        some, step, group = uncertain(rows), numbers(rows.column("step")), clusters(rows)
        many, found = rows.sum(some), []
        for one in np.unique(step[np.isfinite(step)]):
            at = step == one
            enough = at.sum() >= FEWEST_SEQUENCES and many[at].sum() >= FEWEST_TOKENS
            if enough and len(np.unique(group[at])) >= FEWEST_OF_STEP:
                level = estimate(rows, rows.scaled, some & at[rows.owner])
                found.append(
                    (float(one), level.value, level.error, float(rows.k3_cut[at[rows.owner]].mean()))
                )
        return cls(*np.array(found).reshape(-1, 4).T)

    @property
    def high(self) -> Flags:
        """Steps whose level is apart from that of steps at rounding, [N]; none where no step is."""
        if len(self.steps) < 3 or self.level.min() > SYNCED:
            return np.zeros(len(self.steps), np.bool_)
        return self.level - ERRORS * self.error > max(OFF, APART * float(self.level.min()))

    @property
    def back(self) -> Flags:
        """Steps at rounding again, after a step whose level is apart, [N]."""
        return (np.cumsum(self.high) > 0) & (self.level <= SYNCED)

    @property
    def growth(self) -> float | None:
        """Factor by which K3 grows over at least four steps, and the level with it; None if it does not."""
        third, order = len(self.steps) // 3, np.arange(len(self.steps))
        if len(order) < SEVERAL or self.back.any():
            return None
        first, last = (float(np.median(part)) for part in (self.level[:third], self.level[-third:]))
        trend = np.corrcoef(np.argsort(np.argsort(self.level)), order)[0, 1]
        grows = last >= GROWN * first and trend >= TREND
        return float(np.median(self.k3[-third:]) / max(self.k3[0], 1e-8)) if grows else None

    @property
    def flat(self) -> bool:
        """Whether K3 is much the same at all of at least four steps."""
        return len(self.steps) >= SEVERAL and self.k3.max() <= FLAT * self.k3.min() and not self.growth

    @property
    def from_start(self) -> bool:
        """Whether step 0 is as far off as any other, before any weight has changed."""
        known = len(self.steps) >= SEVERAL and self.steps[0] == 0
        return bool(known and self.level[0] >= AT_ONCE * self.level.max())

    @property
    def text(self) -> str:
        """Levels by step in words."""
        return listed(zip(self.steps, self.level, strict=True))

    @property
    def range(self) -> str:
        """Least and largest K3 in words."""
        return f"{self.k3.min():.2g} to {self.k3.max():.2g}"


def listed(pairs: Iterable[tuple[float, float]], most: int = 8) -> str:
    """Return numbers by lag or step in words, `0: 0.001, 1: 0.02`; of many so many, evenly."""
    said = [f"{key:g}: {x:.2g}" for key, x in pairs]
    some = np.unique(np.linspace(0, len(said) - 1, min(most, len(said))).round().astype(int))
    return ", ".join(said[at] for at in some)


# ---------------------------------------------------------------- what tokens of one kind share

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
    ids = np.unique(rows.ids, return_inverse=True)[1]
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

    def pairs(x: NDArray[Any]) -> Floats:
        return np.asarray(np.bincount(of_cell, x) ** 2 - np.bincount(of_cell, x**2), np.float64)

    total, count = pairs(np.bincount(cell, off)), pairs(np.bincount(cell, np.ones(rows.tokens)))
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
    return Estimate.of(value, error, parts)


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
    def recorded_lags(self) -> set[float]:
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
    def lags(self) -> dict[float, float]:
        """Lag → K3, of lags with enough tokens; empty if the dump records none."""
        column = numbers(self.rows.column("policy_lag"))
        parts = {
            lag: self.rows.k3_cut[(column == lag)[self.rows.owner]] for lag in sorted(self.recorded_lags)
        }
        return {lag: float(k3.mean()) for lag, k3 in parts.items() if len(k3) >= ENOUGH_TOKENS}

    @property
    def over_lag(self) -> float:
        """Mean K3 of larger lags over that of the smallest; NaN where there is only one."""
        first, *later = self.lags.values() or [0.0]
        return float(np.mean(later)) / max(first, 1e-7) if later else np.nan

    @property
    def by_lag(self) -> str:
        """K3 by lag in words."""
        return listed(self.lags.items(), 6)

    @cached_property
    def of_one_lag(self) -> Rows:
        """The rows of one lag: 0 if there are any, else the most frequent; all if the dump records none."""
        if not self.recorded_lags:
            return self.rows
        column = self.rows.column("policy_lag")
        one = 0 if 0 in column else max(self.recorded_lags, key=column.count)
        return self.rows.only(numbers(column) == one)

    @cached_property
    def course(self) -> Course:
        """Levels by step, within one lag where the dump records lags."""
        return Course.of(self.of_one_lag)

    @property
    def from_start(self) -> bool:
        """Whether all is at a recorded lag of 0 and step 0 is as far off as any other.

        An adapter that is missing, and weights that do not arrive, are the trainer's own at step 0.
        """
        return self.in_sync and self.course.from_start

    @cached_property
    def most(self) -> float:
        """K3 at lag 0, nats, above which a number format excuses nothing.

        Ten times what is published of it, and ten times the lowest level that the dump's own steps or hosts
        show in that format.
        """
        if self.behind or not (self.recorded.quantised or self.recorded.plain):
            return ceiling(self.recorded)
        rows = self.of_one_lag
        flags = [at for _, parts in partitions(rows) for at in parts.values()]
        k3 = [float(rows.k3_cut[at[rows.owner]].mean()) for at in flags if at @ rows.lengths >= ENOUGH_TOKENS]
        return min([ceiling(self.recorded), *([max(TIMES * min(k3), HEALTHY_K3)] if len(k3) > 1 else [])])

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
    def systematic(self) -> bool:
        """Whether they have more in common than quantised weights leave."""
        return self.share is not None and self.share.low > SYSTEMATIC and self.share.value > SHARED

    @property
    def other_step(self) -> bool:
        """Whether tokens of one kind share so much that the weights are surely others."""
        return self.share is not None and self.share.low > OTHER_STEP

    @property
    def outlying(self) -> bool:
        """Whether a few outliers carry the mismatch, with all other tokens close."""
        return self.body.scale <= 0.045 and 0.001 < self.body.tail < OUTLYING and self.body.share >= 0.8

    @property
    def moved(self) -> bool:
        """Whether the trainer has moved along its advantages since the tokens were sampled."""
        return self.rows.known.moved is not None and self.rows.known.moved > SURE

    @property
    def same_weights(self) -> bool:
        """Whether nothing points to weights of another step, the lag included."""
        return not (self.behind or self.moved or self.course.growth or self.course.back.any())

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
        value, low, high = (percent(max(x, 0.0)) for x in (self.share.value, self.share.low, self.share.high))
        return f"{value} of the variance of r is common to tokens of one kind [{low}, {high}]"


# ---------------------------------------------------------------- what speaks for a cause, or against it

USUAL = "|Δ|/(1 − q) is {0.body.scale:.2g} for a usual token"
FEW_BITS, WIDER = "{0.common}; quantised weights leave 10% to 25%.", "; 8-bit weights leave 0.06 to 0.13."
EVIDENCE: dict[str, tuple[str, Callable[[Seen], bool]]] = {
    "behind": ("No row is at a policy_lag of 0.", lambda seen: seen.behind),
    "at lag 0": (
        f"K3 is {{0.lags[0]:.2g}} ({CUT}) at a policy_lag of 0.",
        lambda seen: seen.lags.get(0, 0.0) > HEALTHY_K3,
    ),
    "flat over lag": (
        f"K3 does not rise with the lag: {{0.by_lag}}, {CUT}.",
        lambda seen: seen.over_lag <= FLAT_OVER_LAG,
    ),
    "moved": (
        "The trainer has moved along its advantages: cov(A, min(r, 2)) is {0.rows.known.moved:.1f} standard "
        "errors above 0.",
        lambda seen: seen.moved,
    ),
    "grows": (f"K3 grows over the steps: {{0.course.range}}, {CUT}.", lambda seen: bool(seen.course.growth)),
    "flat": (f"K3 does not grow over the steps: {{0.course.range}}, {CUT}.", lambda seen: seen.course.flat),
    "back": (
        "K3 is at rounding again after steps at which it was not: |Δ|/(1 − q) by step {0.course.text}.",
        lambda seen: bool(seen.course.back.any()),
    ),
    "share of others": (FEW_BITS, lambda seen: seen.systematic),
    "share of few bits": (
        FEW_BITS,
        lambda seen: seen.share is not None and seen.share.low > 0 and NOISE < seen.share.value <= SHARED,
    ),
    "noise": ("{0.common}: noise of single tokens.", lambda seen: seen.unsystematic),
    "wide": (USUAL + WIDER, lambda seen: seen.body.scale > STALE),
    "broad": (f"Every token is off: {USUAL}{WIDER}", lambda seen: ROUNDED < seen.body.scale <= STALE),
    "close": (
        f"{USUAL}, as rounding leaves it.",
        lambda seen: seen.body.scale <= ROUNDED and seen.body.tail < OUTLYING,
    ),
    "partly": (
        f"{USUAL}, and a part of the tokens is far beyond that.",
        lambda seen: seen.body.scale <= ROUNDED and seen.body.tail >= OUTLYING,
    ),
    "beyond rounding": (
        f"K3 is {{0.k3:.2g}} ({CUT}); engines of a dense model in bf16 stay below {HEALTHY_K3:g} as a rule.",
        lambda seen: seen.k3 > HEALTHY_K3,
    ),
    "outliers": (
        "{0.body.outliers}.",
        lambda seen: 0.001 < seen.body.tail < OUTLYING and seen.body.share >= 0.5,
    ),
    "quantised": ("The dump says {0.recorded.quantised}.", lambda seen: bool(seen.recorded.quantised)),
    "plain": ("The dump says {0.recorded.plain}.", lambda seen: bool(seen.recorded.plain)),
}
"""Name → a sentence with fields of `Seen`, and when it holds."""


def holding(seen: Seen, names: Iterable[str]) -> dict[str, str]:
    """Return the evidence that holds, name → sentence."""
    return {name: text.format(seen) for name in names for text, holds in [EVIDENCE[name]] if holds(seen)}
