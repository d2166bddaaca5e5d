"""What is seen of mended rows: what decides between weights, models and honest causes, and its words.

The level of a token is |Δ|/(1 − π_rollout): noise of logits moves a log-prob by about noise × (1 − π). Unlike
K3 it does not grow where text becomes harder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from offpol_diag.diagnosis.numbers import HEALTHY_K3
from offpol_diag.diagnosis.recorded import TIMES, ceiling
from offpol_diag.diagnosis.rows import (
    Estimate,
    Rows,
    clusters,
    estimate,
    partitions,
    percent,
    ratio,
    uncertain,
)

CUT = "cut at 1 nat a token"
FEWEST_SEQUENCES, FEWEST_OF_STEP, FEWEST_TOKENS, SEVERAL = 8, 4, 100, 4
"""Fewest sequences, prompts and uncertain tokens of a step that is compared; fewest steps of a trend."""
SYNCED, OFF, APART, ERRORS = 0.06, 0.12, 3.0, 3.0
"""Level up to which the weights may be the same; from which they are not, which is beyond 8 bits; factor
between the two, and standard errors by which a step is beyond it."""
GROWN, TREND, AT_ONCE = 2.0, 0.6, 0.5
"""Factor of the level between the first third of the steps and the last, and its rank correlation with the
step, from which it grows; least level of step 0, in the highest, of what is there before any weight has
changed."""


class Course:
    """The mean level of uncertain tokens by step.

    Attributes:
        steps: those that are large enough to be compared, [N].
        level, error: the mean level, and its standard error over prompts, [N] each.
        high: steps whose level is apart from that of steps at rounding, [N]; none where no step is.
        back: whether a step is at rounding after one whose level is apart.
        growth: factor by which K3 grows over at least four steps, and the level with it; 0 if it does not.
        at_first: whether step 0 is as far off as any other.
    """

    def __init__(self, rows: Rows) -> None:
        some, step, group = uncertain(rows), rows.numbers("step"), clusters(rows)
        many, found = rows.sum(some), []
        for one in np.unique(step[np.isfinite(step)]):
            at = step == one
            enough = at.sum() >= FEWEST_SEQUENCES and many[at].sum() >= FEWEST_TOKENS
            if enough and len(np.unique(group[at])) >= FEWEST_OF_STEP:
                level, k3 = estimate(rows, rows.scaled, some & at[rows.owner]), rows.k3_cut[at[rows.owner]]
                found.append((float(one), level.value, level.error, float(k3.mean())))
        self.steps, self.level, self.error, k3s = np.array(found).reshape(-1, 4).T
        least = self.level.min(initial=np.inf)
        known = len(found) > 2 and least <= SYNCED
        self.high = (self.level - ERRORS * self.error > max(OFF, APART * least)) & known
        self.back = bool(((np.cumsum(self.high) > 0) & (self.level <= SYNCED)).any())
        self.growth, self.at_first = 0.0, False
        if len(found) >= SEVERAL:
            third, order = len(found) // 3, np.argsort(np.argsort(self.level))
            first, last = (float(np.median(part)) for part in (self.level[:third], self.level[-third:]))
            trend = np.corrcoef(order, np.arange(len(found)))[0, 1]
            if last >= GROWN * first and trend >= TREND and not self.back:
                self.growth = float(np.median(k3s[-third:]) / max(k3s[0], 1e-8))
            self.at_first = bool(self.steps[0] == 0 and self.level[0] >= AT_ONCE * self.level.max())

    @property
    def text(self) -> str:
        """Levels by step in words."""
        return listed(zip(self.steps, self.level, strict=True))


def listed(pairs: Iterable[tuple[float, float]], most: int = 6) -> str:
    """Return numbers by lag or step in words, `0: 0.001, 1: 0.02`; of many so many, evenly."""
    said = [f"{key:g}: {x:.2g}" for key, x in pairs]
    some = np.unique(np.linspace(0, len(said) - 1, min(most, len(said))).round().astype(int))
    return ", ".join(said[at] for at in some)


FEWEST_KINDS, COVERED = 8, 0.2
"""Fewest clusters, and smallest share of tokens in repeated kinds, for an estimate of what they share."""


def answered_again(rows: Rows) -> bool:
    """Return whether prompts have at least two responses on average."""
    return 2 * (int(clusters(rows).max()) + 1) <= rows.sequences


def common(rows: Rows) -> Estimate | None:
    """Estimate the systematic share: the share of the variance of min(r, 2) common to tokens of one kind.

    A kind is a pair of consecutive token ids, within one prompt if the dump has group_id. Rounding and
    different expert routing vary from token to token; other weights (stale, quantised) or another
    temperature shift every occurrence of a kind alike. Products of tokens of different responses cancel
    each token's own noise. None without token ids, or if kinds hardly repeat.
    """
    if rows.ids is None or rows.sequences < 2:
        return None
    ids, owner = np.unique(rows.ids, return_inverse=True)[1], rows.owner
    follows = (rows.index > 0) & (np.diff(rows.position, prepend=-1) == 1)
    key = (np.where(follows, np.roll(ids, 1), -1) + 1) * (int(ids.max()) + 1) + ids
    group, grouped = clusters(rows), answered_again(rows)
    if grouped:
        key = np.unique(key, return_inverse=True)[1] * (int(group.max()) + 1) + group[owner]
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    r = np.expm1(np.clip(rows.delta, -20, np.log(2)))
    off = r - r.mean()
    cells, cell = np.unique(kind * rows.sequences + owner, return_inverse=True)
    total, count = (  # over pairs of tokens of one kind in different responses
        np.bincount(cells // rows.sequences, x) ** 2 - np.bincount(cells // rows.sequences, x**2)
        for x in (np.bincount(cell, off), np.bincount(cell, np.ones(rows.tokens)))
    )
    some, tokens = count > 0, np.bincount(kind)
    if not some.any() or tokens[some].sum() < COVERED * rows.tokens:
        return None
    cluster = group[owner[first]][some] if grouped else np.arange(int(some.sum()))
    above = np.bincount(cluster, tokens[some] * total[some] / count[some])
    below = np.bincount(cluster, np.bincount(kind, off**2)[some])
    there = np.bincount(cluster) > 0
    if there.sum() < FEWEST_KINDS or not below.sum() > 0:
        return None
    return Estimate(*ratio(above[there], below[there]), int(there.sum()))


ROUNDED = 0.04
"""Largest level of a usual token that rounding may explain: bf16 on both sides of six architectures."""
STALE = 0.16
"""Level of a usual token above which weights of another step are likelier than quantised ones of 8 bits."""
NOISE, SYSTEMATIC, SHARED, OTHER_STEP = 0.05, 0.15, 0.25, 0.42
"""Systematic share of r: below the first, noise of single tokens; above the second, not rounding; above the
third other weights are likelier than quantised ones (these give 10% to 28%, weights of another step 24% to
50%); above the fourth, surely so."""
SOME, OUTLYING, CLOSE, CARRIED, MOSTLY = 0.001, 0.08, 0.045, 0.8, 0.5
"""Least share of outliers that are more than a few tokens, and largest that leaves the others a body of their
own; where these carry the mismatch: largest level of a usual token, and least share of K3; and least share of
K3 with which they speak for experts."""
RISING, FLAT = 2.5, 1.5
"""Factor of K3 at larger lags over that at the smallest from which it rises; and up to which it does not."""
ENOUGH_TOKENS, FEWEST_UNCERTAIN, FAR = 50, 30, 8.0
"""Fewest tokens of a lag, step or host for a mean; fewest uncertain tokens for robust statistics; and times
the level of a usual token beyond which one is an outlier."""


class Seen:
    """All that decides between causes which no count establishes.

    Attributes:
        recorded: what the metadata says of the engine.
        k3: mean of min(K3, 1), nats.
        scale, tail, carried: level of a usual token (robust standard deviation, of uncertain ones), share of
            the tokens beyond `FAR` times that, and what these carry of K3.
        share, common: systematic share of r, or None if it cannot be estimated; and in words.
        noise, unsystematic: whether it is measurably none, by answers to a prompt; none beyond rounding.
        shared, systematic, other_step: whether it is more than rounding leaves; more than quantised weights
            leave; and surely so.
        close, partly: whether a usual token is at rounding; and K3 is not.
        few, outlying: whether outliers are few; and carry the mismatch.
        in_sync, behind: whether the dump says that every row is at lag 0; that none is.
        lags: lag → K3, of lags with enough tokens; empty if the dump records none.
        over_lag: mean K3 of larger lags over that of the smallest; NaN where there is only one.
        course: levels by step, within one lag where the dump records lags.
        changes, same_weights: whether its change by step points to weights of another step; and whether
            nothing does, the lag included.
        most: K3 at lag 0, nats, above which a number format excuses nothing: ten times what is published of
            it, and ten times the lowest level that the dump's own steps or hosts show in that format.
        inexcusable: whether K3 at lag 0, `synced`, is beyond that.
    """

    def __init__(self, rows: Rows) -> None:
        self.recorded, self.synced = rows.recorded, rows.synced
        self.k3 = float(rows.k3_cut.mean()) if rows.tokens else 0.0
        some = uncertain(rows)
        self.scale = self.tail = self.carried = 0.0
        if some.sum() >= FEWEST_UNCERTAIN:
            level, k3 = np.abs(rows.delta[some]) / -np.expm1(rows.q[some]), rows.k3_cut[some]
            self.scale = float(np.median(level)) / 0.6745
            far = level > FAR * self.scale
            self.tail, self.carried = float(far.mean()), float(k3[far].sum() / max(k3.sum(), 1e-300))
        self.close, self.few = self.scale <= ROUNDED, SOME < self.tail < OUTLYING
        self.partly = self.close and self.k3 > HEALTHY_K3
        self.outlying = self.few and self.scale <= CLOSE and self.carried >= CARRIED

        self.share, self.common = common(rows), ""
        self.noise = self.unsystematic = self.shared = self.systematic = self.other_step = False
        if self.share is not None:
            value, low, high = self.share.value, self.share.low, self.share.high
            self.noise = answered_again(rows) and high < NOISE
            self.unsystematic = low < NOISE and high < SYSTEMATIC
            self.shared, self.other_step = low >= SYSTEMATIC, low > OTHER_STEP
            self.systematic = self.shared and value > SHARED
            said, *ends = (percent(max(x, 0.0)) for x in (value, low, high))
            self.common = f"{said} of the variance of r is common to tokens of one kind [{', '.join(ends)}]"

        column = rows.numbers("policy_lag")
        recorded = np.unique(column[np.isfinite(column)]).tolist()
        self.in_sync, self.behind = recorded == [0], bool(recorded) and 0 not in recorded
        parts = {lag: rows.k3_cut[(column == lag)[rows.owner]] for lag in recorded}
        self.lags = {lag: float(k3.mean()) for lag, k3 in parts.items() if len(k3) >= ENOUGH_TOKENS}
        first, *later = self.lags.values() or [0.0]
        self.over_lag = float(np.mean(later)) / max(first, 1e-7) if later else np.nan
        lag = 0 if 0 in recorded else max(recorded, key=lambda one: np.sum(column == one), default=None)
        same = rows if lag is None else rows.only(column == lag)  # rows of one lag
        self.course = Course(same)
        self.changes = self.course.back or self.course.growth > 0
        self.same_weights = not (self.behind or self.changes)

        self.most = ceiling(self.recorded)
        if not self.behind and (self.recorded.quantised or self.recorded.plain):
            hosts = [at for _, values in partitions(same) for at in values.values()]
            own = [same.k3_cut[at[same.owner]].mean() for at in hosts if at @ same.lengths >= ENOUGH_TOKENS]
            if len(own) > 1:
                self.most = min(self.most, max(TIMES * float(min(own)), HEALTHY_K3))
        self.inexcusable = self.synced is not None and self.synced > self.most

    @property
    def evidence(self) -> str:
        """The level of a usual token and what tokens of one kind share of it, in words."""
        said = f"|Δ|/(1 − q) is {self.scale:.2g} for a usual token (robust standard deviation)"
        return f"{said}; {self.common}" if self.common else said

    @property
    def by_lag(self) -> str:
        """K3 by lag in words."""
        return listed(self.lags.items())

    @property
    def outliers(self) -> str:
        """How much of K3 outliers carry, in words."""
        return f"{percent(self.tail)} of the uncertain tokens carry {percent(self.carried)} of K3"


# ---------------------------------------------------------------- what speaks for a cause, or against it

USUAL = "|Δ|/(1 − q) is {0.scale:.2g} for a usual token"
WIDE = f"{USUAL}; 8-bit weights leave 0.06 to 0.13."
PARTLY = f"{USUAL}, and a part of the tokens is far beyond that."
AT_0 = f"K3 is {{0.lags[0]:.2g}} ({CUT}) at a policy_lag of 0."
BEYOND = f"K3 is {{0.k3:.2g}} ({CUT}); engines of a dense model in bf16 stay below {HEALTHY_K3:g} as a rule."
EVIDENCE: dict[str, tuple[str, Callable[[Seen], bool]]] = {
    "behind": ("No row is at a policy_lag of 0.", lambda s: s.behind),
    "at lag 0": (AT_0, lambda s: s.lags.get(0, 0.0) > HEALTHY_K3),
    "flat over lag": (f"K3 does not rise with the lag: {{0.by_lag}}, {CUT}.", lambda s: s.over_lag <= FLAT),
    "grows": ("|Δ|/(1 − q) grows over the steps: {0.course.text}.", lambda s: s.course.growth > 0),
    "back": ("|Δ|/(1 − q) by step falls back to rounding: {0.course.text}.", lambda s: s.course.back),
    "shared": ("{0.common}; quantised weights leave 10% to 25%.", lambda s: s.systematic),
    "noise": ("{0.common}: noise of single tokens.", lambda s: s.unsystematic),
    "wide": (WIDE, lambda s: s.scale > STALE),
    "broad": (f"Every token is off: {WIDE}", lambda s: ROUNDED < s.scale <= STALE),
    "close": (f"{USUAL}, as rounding leaves it.", lambda s: s.close and s.tail < OUTLYING),
    "partly": (PARTLY, lambda s: s.close and s.tail >= OUTLYING),
    "beyond rounding": (BEYOND, lambda s: s.k3 > HEALTHY_K3),
    "outliers": ("{0.outliers}.", lambda s: s.few and s.carried >= MOSTLY),
    "quantised": ("The dump says {0.recorded.quantised}.", lambda s: bool(s.recorded.quantised)),
    "plain": ("The dump says {0.recorded.plain}.", lambda s: bool(s.recorded.plain)),
}
"""Name → a sentence with fields of `Seen`, and when it holds."""


def holding(seen: Seen, names: Iterable[str]) -> dict[str, str]:
    """Return the evidence that holds, name → sentence."""
    return {name: text.format(seen) for name in names for text, holds in [EVIDENCE[name]] if holds(seen)}
