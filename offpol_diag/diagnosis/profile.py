"""The profile of a mismatch: what separates weights, models and honest causes where no count does.

The level of a token is |Δ|/(1 − π_rollout): noise of logits moves a log-prob by about noise × (1 − π). Unlike
K3 it does not grow where text becomes harder.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np

from offpol_diag.diagnosis.estimates import Estimate, answered_again, common_share, estimate, percent
from offpol_diag.diagnosis.main_gap import HEALTHY_K3
from offpol_diag.diagnosis.metadata import TIMES
from offpol_diag.diagnosis.rows import Rows, partitions

CUT = "cut at 1 nat a token"
"""What is said of means of min(K3, 1)."""
ROUNDED = 0.04  # level of a usual token that rounding may explain: bf16 on both sides of six architectures
STALE = 0.16  # level above which weights of another step are likelier than quantised ones of 8 bits
FAR = 8.0  # times the level of a usual token beyond which a token is an outlier
SOME = 0.001  # share of outliers up to which they are but a few tokens
OUTLYING = 0.08  # share of outliers up to which the other tokens are still a body of their own
CLOSE, CARRIED = (
    0.045,
    0.8,
)  # where outliers carry the mismatch: most level of a usual token, least share of K3
MOSTLY = 0.5  # share of K3 from which outliers speak for experts
RISING, FLAT = 2.5, 1.5  # factor of K3 over the lags from which it rises, and up to which it does not
ENOUGH_TOKENS = 50  # fewest tokens of a lag, step or host for a mean
FEWEST_UNCERTAIN = 30  # fewest uncertain tokens for robust statistics

LITTLE, MUCH, MORE, MOST = 0.05, 0.15, 0.25, 0.42
"""Share of the variance of r that is common to tokens of one kind: below the first, noise of single tokens;
above the second, not rounding; above the third other weights are likelier than quantised ones (these give 10%
to 28%, weights of another step 24% to 50%); above the fourth, surely so."""


class Common(IntEnum):
    """What the share of the variance of r that is common to tokens of one kind speaks for, rising."""

    NOISE = 0  # of single tokens, by several answers to a prompt
    ROUNDING = 1  # no more than rounding leaves
    OPEN = 2  # nothing: it is between, too uncertain, or not known
    SYSTEMATIC = 3  # more than rounding leaves
    OTHER_WEIGHTS = 4  # rather other weights than quantised ones
    OTHER_STEP = 5  # surely other weights

    @classmethod
    def of(cls, share: Estimate | None, rows: Rows) -> Common:
        """Judge an estimate of some rows."""
        if share is None:
            return cls.OPEN
        if share.low >= MUCH:
            surely = share.low > MOST
            return cls.OTHER_STEP if surely else cls.OTHER_WEIGHTS if share.value > MORE else cls.SYSTEMATIC
        if share.low < LITTLE and share.high < MUCH:
            return cls.NOISE if share.high < LITTLE and answered_again(rows) else cls.ROUNDING
        return cls.OPEN


FEWEST_SEQUENCES, FEWEST_GROUPS, FEWEST_TOKENS = (
    8,
    4,
    100,
)  # of a step that is compared; tokens: uncertain ones
SEVERAL = 4  # fewest steps of a trend
SYNCED = 0.06  # level up to which the weights may be the same
OFF = 0.12  # level from which they are not: it is beyond 8 bits
APART, ERRORS = 3.0, 3.0  # factor between the levels of such steps, and standard errors beyond `OFF`
GROWN, TREND, AT_ONCE = 2.0, 0.6, 0.5
"""Factor of the level between the first third of the steps and the last, and its rank correlation with the
step, from which it grows; least level of step 0, in the highest, of what is there before any weight has
changed."""


class Course:
    """The mean level of uncertain tokens by step.

    Attributes:
        steps: those that are large enough to be compared, [N].
        level: the mean level of each, [N].
        high: flags of steps whose level is far above that of steps at rounding, [N]; none where no step is.
        back: whether a step is at rounding after one that is far above it.
        growth: factor by which K3 grows over at least four steps, and the level with it; 0 if it does not.
        at_first: whether step 0 is about as far off as any other.
        text: levels by step in words.
    """

    def __init__(self, rows: Rows) -> None:
        step, uncertain, found = rows.numbers("step"), rows.uncertain, []
        many = rows.sum(uncertain)
        for value in np.unique(step[np.isfinite(step)]):
            at = step == value
            enough = at.sum() >= FEWEST_SEQUENCES and many[at].sum() >= FEWEST_TOKENS
            if enough and len(np.unique(rows.group[at])) >= FEWEST_GROUPS:
                level = estimate(rows, rows.scaled_gap, uncertain & at[rows.owner])
                found.append((value, level.value, level.error, rows.k3[at[rows.owner]].mean()))
        self.steps, self.level, error, k3 = np.array(found, np.float64).reshape(-1, 4).T
        least = self.level.min(initial=np.inf)
        known = len(found) > 2 and least <= SYNCED
        self.high = (self.level - ERRORS * error > max(OFF, APART * least)) & known
        self.back = bool(((np.cumsum(self.high) > 0) & (self.level <= SYNCED)).any())
        self.growth, self.at_first = 0.0, False
        if len(found) >= SEVERAL:
            third, order = len(found) // 3, np.argsort(np.argsort(self.level))
            first, last = (float(np.median(part)) for part in (self.level[:third], self.level[-third:]))
            trend = np.corrcoef(order, np.arange(len(found)))[0, 1]
            if last >= GROWN * first and trend >= TREND and not self.back:
                self.growth = float(np.median(k3[-third:]) / max(k3[0], 1e-8))
            self.at_first = bool(self.steps[0] == 0 and self.level[0] >= AT_ONCE * self.level.max())
        self.text = listed(zip(self.steps, self.level, strict=True))


def listed(pairs: Iterable[tuple[float, float]], most: int = 6) -> str:
    """Return numbers by lag or step in words, `0: 0.001, 1: 0.02`; at most `most` of them, evenly spaced."""
    texts = [f"{key:g}: {x:.2g}" for key, x in pairs]
    some = np.unique(np.linspace(0, len(texts) - 1, min(most, len(texts))).round().astype(int))
    return ", ".join(texts[at] for at in some)


class Profile:
    """How far tokens are off, what they have in common, and how that changes with lag and step.

    Attributes:
        metadata: what the metadata says of the engine.
        k3: mean of min(K3, 1), nats.
        usual: level of a usual token, the robust standard deviation of that of uncertain ones.
        outliers: share of the uncertain tokens that are beyond `FAR` times that.
        few_carry: share of K3 that outliers carry, where they are few; else 0.
        outlying: whether a few outliers carry the mismatch, and all other tokens agree.
        partly: whether a usual token is at rounding, and K3 is not.
        outliers_text: how much of K3 outliers carry, in words.
        share: share of the variance of r that is common to tokens of one kind, or None if unknown.
        common, common_text: what that speaks for; and the share in words, empty if unknown.
        in_sync, behind: whether the dump says that every row is at lag 0; that none is.
        lags, lags_text: lag → K3, of lags with enough tokens, empty if the dump records none; and in words.
        over_lag: mean K3 of larger lags over that of the smallest; NaN where there is only one.
        course: levels by step, within one lag where the dump records lags.
        changes: whether the course points to weights of another step.
        same_weights: whether neither that nor the lag does.
        synced: K3 of the whole dump at lag 0, as in `Rows`.
        ceiling: K3 at lag 0, nats, above which a number format excuses nothing: ten times what is published
            of it, or the lowest that the dump's own steps or hosts show in that format.
        inexcusable: whether K3 at lag 0 is above that.
    """

    def __init__(self, rows: Rows) -> None:
        self.metadata, self.synced = rows.metadata, rows.synced
        self._measure_size(rows)
        self.share = common_share(rows)
        self.common, self.common_text = Common.of(self.share, rows), ""
        if self.share is not None:
            value, *ends = (percent(max(x, 0.0)) for x in (self.share.value, self.share.low, self.share.high))
            self.common_text = (
                f"{value} of the variance of r is common to tokens of one kind [{', '.join(ends)}]"
            )
        self._measure_change(rows)

    def _measure_size(self, rows: Rows) -> None:
        """Measure how far usual tokens and outliers are off."""
        self.k3 = float(rows.k3.mean()) if rows.tokens else 0.0
        self.usual = self.outliers = carried = 0.0
        uncertain = rows.uncertain
        if uncertain.sum() >= FEWEST_UNCERTAIN:
            level, k3 = np.abs(rows.delta[uncertain]) / -np.expm1(rows.q[uncertain]), rows.k3[uncertain]
            self.usual = float(np.median(level)) / 0.6745
            far = level > FAR * self.usual
            self.outliers, carried = float(far.mean()), float(k3[far].sum() / max(k3.sum(), 1e-300))
        self.few_carry = carried if SOME < self.outliers < OUTLYING else 0.0
        self.outlying = self.few_carry >= CARRIED and self.usual <= CLOSE
        self.partly = self.usual <= ROUNDED and self.k3 > HEALTHY_K3
        self.outliers_text = (
            f"{percent(self.outliers)} of the uncertain tokens carry {percent(carried)} of K3"
        )

    def _measure_change(self, rows: Rows) -> None:
        """Measure K3 by lag, and the level by step, host and number format within one lag."""
        column = rows.numbers("policy_lag")
        recorded = np.unique(column[np.isfinite(column)]).tolist()
        self.in_sync, self.behind = recorded == [0], bool(recorded) and 0 not in recorded
        parts = {lag: rows.k3[(column == lag)[rows.owner]] for lag in recorded}
        self.lags = {lag: float(k3.mean()) for lag, k3 in parts.items() if len(k3) >= ENOUGH_TOKENS}
        self.lags_text = listed(self.lags.items())
        first, *later = self.lags.values() or [0.0]
        self.over_lag = float(np.mean(later)) / max(first, 1e-7) if later else np.nan
        lag = 0 if 0 in recorded else max(recorded, key=lambda one: np.sum(column == one), default=None)
        same_lag = rows if lag is None else rows.only(column == lag)
        self.course = Course(same_lag)
        self.changes = self.course.back or self.course.growth > 0
        self.same_weights = not (self.behind or self.changes)
        self.ceiling = self.metadata.ceiling
        if not self.behind and (self.metadata.quantised or self.metadata.plain):
            groups = [at for _, values in partitions(same_lag) for at in values.values()]
            enough = [at[same_lag.owner] for at in groups if at @ same_lag.lengths >= ENOUGH_TOKENS]
            own = [float(same_lag.k3[tokens].mean()) for tokens in enough]
            if len(own) > 1:
                self.ceiling = min(self.ceiling, max(TIMES * min(own), HEALTHY_K3))
        self.inexcusable = self.synced is not None and self.synced > self.ceiling

    @property
    def evidence(self) -> str:
        """The level of a usual token and what tokens of one kind share, in words."""
        usual = f"|Δ|/(1 − q) is {self.usual:.2g} for a usual token (robust standard deviation)"
        return f"{usual}; {self.common_text}" if self.common_text else usual
