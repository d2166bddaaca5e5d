"""Tokens that were sampled from another distribution than the logged one: temperature, truncation.

If tokens were sampled from the π_rollout that was logged, then E[r] = 1 and k1 = −E[Δ] ≥ 0 whatever the
training policy is, and the mean surprisal equals the mean entropy. K3 = k1 + E[r] − 1 holds for any numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.rows import CAP, Estimate, Floats, Rows, estimate, percent

VISIBLE = 2e-3
"""Smallest |E[r] − 1| that counts as a bug; rounding of log-probs by kernels stays below it."""
TINY = 1e-5
"""Mean |Δ|, and −k1, that the rounding of log-probs explains, nats."""
EXPLAINED, FITS = 0.62, 0.3
"""Smallest share of ΣΔ² that a temperature explains where it is the cause, and where identities have shown
one. Other mismatches grow with the surprisal too: it explains 11 to 30% of a repetition penalty, to 56% of a
soft cap, 40% of another model."""
BENT, CELLS = 0.12, 12
"""Share that a temperature may leave of what any function of log π_rollout explains: 1 to 10% where it is the
cause, 12 to 30% of a soft cap; and number of cells of log π_rollout in which such a function is constant."""
FITTED, REST = 6_000, (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Tokens to which a temperature is fitted, about, and numbers of equally likely other tokens to try."""
BASES = {"2": float(np.log(2)), "10": float(np.log(10))}
PROPORTIONAL = 0.02
"""Base of a logarithm → its natural one; and mean |p − c·q| up to which one column is the other to that base,
in the mean |Δ|: no temperature is so exactly proportional."""
MASS, TAIL = 0.7, 2.5
"""−log of the smallest mass that top-p or top-k sampling is assumed to keep, and how far below r may lie."""
ONE_SIDED, SURELY_ONE_SIDED = 0.2, 0.6
"""(1 − E[r]) / E|r − 1| from which r lies below 1 nearly always, also where E[r] = 1 is not excluded by
prompts."""
RARE, UNLIKELY = 0.002, float(np.log(0.02))
"""Share of tokens below this log-prob under which the rare ones were cut off."""


@dataclass(frozen=True)
class Identities:
    """Estimates of k1, E[r] and surprisal − entropy; `tv` is E|r − 1|.

    `weighted` is the latter with the surprisal under π_train, weighted by r. Without logged entropy both are
    None.
    """

    k1: Estimate
    ratio: Estimate
    entropy: Estimate | None
    weighted: Estimate | None
    tv: float

    @classmethod
    def of(cls, rows: Rows) -> Identities:
        """Estimate the identities; ratios are cut at e^3, which can only lower E[r]."""
        off = np.expm1(np.minimum(rows.delta, 3.0))
        gap = other = None
        if rows.entropy is not None and np.isfinite(rows.entropy).all() and (rows.entropy > 0).any():
            gap, other = (estimate(rows, x - rows.entropy) for x in (-rows.q, -rows.p * (1 + off)))
        k1, ratio = estimate(rows, -rows.delta), estimate(rows, 1 + off)
        return cls(k1, ratio, gap, other, float(np.mean(np.abs(off))))

    @property
    def negative(self) -> bool:
        """Whether k1 is negative."""
        return self.k1.off(0) < 0 and self.k1.value < -TINY

    @property
    def above(self) -> bool:
        """Whether E[r] is above 1 by more than rounding."""
        return self.ratio.off(1) > 0 and self.ratio.value > 1 + VISIBLE


class Fitted(NamedTuple):
    """Fit of π_train as π_rollout at another temperature: π_train ∝ π_rollout^power.

    Attributes:
        power: rollout temperature over the trainer's.
        rest: number of other tokens that the fit assumes equally likely.
        explained: share of ΣΔ² that it explains, |Δ| cut at `CAP`.
        bent: share that it leaves of what any function of log π_rollout explains of ΣΔ².
        likely: whether it brings the columns closer, significantly.
    """

    power: float
    rest: float
    explained: float
    bent: float
    likely: bool

    @property
    def clear(self) -> bool:
        """Whether a temperature explains the mismatch: a larger share of it than it does of other faults."""
        return self.fits and self.explained > EXPLAINED and self.bent < BENT

    @property
    def fits(self) -> bool:
        """Whether it fits where the identities have shown that the logged policy did not sample."""
        return self.likely and self.explained > FITS and abs(np.log(self.power)) > 0.02


def tempered(q: Floats, power: float, rest: float) -> Floats:
    """Return log of π^power renormalised, with the mass 1 − π on `rest` equally likely tokens; q = log π."""
    other = np.log(np.maximum(-np.expm1(q), 1e-12))
    own, others = power * q, power * other + (1 - power) * np.log(rest)
    return np.asarray(own - np.logaddexp(own, others))


def fit_temperature(rows: Rows) -> Fitted:
    """Fit the power that minimises mean |log π_train − log π_tempered|, and the share of ΣΔ² it explains."""
    step = max(1, rows.tokens // FITTED)
    q, p = rows.q[::step], rows.p[::step]
    some = (q > -12) & (q < -1e-3)
    if some.sum() < 100:
        return Fitted(1.0, 1.0, 0.0, 1.0, False)
    q, p = q[some], p[some]

    def off(power: float, rest: float) -> float:
        return float(np.mean(np.minimum(np.abs(p - tempered(q, power, rest)), 1.0)))

    coarse = np.exp(np.linspace(-1.2, 1.2, 17))
    _, power, rest = min((off(power, rest), power, rest) for power in coarse for rest in REST)
    fine = power * np.exp(np.linspace(-0.05, 0.05, 21))
    power = min(fine, key=lambda power: off(power, rest))
    rests = rows.p - tempered(rows.q, power, rest)
    gain = estimate(rows, np.minimum(np.abs(rows.delta), 1.0) - np.minimum(np.abs(rests), 1.0))
    some = (rows.q > -12) & (rows.q < -1e-3)
    left, whole = (np.clip(x[some], -CAP, CAP) for x in (rests, rows.delta))
    explained = float(1 - np.square(left).sum() / np.square(whole).sum()) if whole.any() else 0.0
    bent = _curve(rows.q[some], left) / max(_curve(rows.q[some], whole), 1e-12)
    return Fitted(float(power), rest, explained, bent, gain.errors_from(0.0) > 4)


def _curve(q: Floats, x: Floats) -> float:
    """Return Σ of the squared mean of x as a function of q, without what chance adds to it."""
    cell = np.searchsorted(np.quantile(q, np.linspace(0, 1, CELLS + 1)[1:-1]), q)
    many = np.maximum(np.bincount(cell, minlength=CELLS), 2)
    mean, square = (np.bincount(cell, some, CELLS) / many for some in (x, x**2))
    return max(float(many @ (mean**2 - (square - mean**2) / (many - 1))), 0.0)


def other_base(rows: Rows) -> str | None:
    """Return that one column is the other's logarithm to another base, in a clause; None if it is not."""
    size = float(np.mean(np.abs(rows.delta)))
    for base, times in BASES.items():
        for factor, side in ((times, "rollout"), (1 / times, "train")):
            if size > TINY and np.mean(np.abs(rows.p - factor * rows.q)) < PROPORTIONAL * size:
                return (
                    f"log π_train is {factor:.4g} × log π_rollout, token for token: is {side} to base {base}?"
                )
    return None


def few_far(rows: Rows) -> bool:
    """Return whether only tokens with |Δ| > 1, fewer than one in 30, break the identities."""
    far = np.abs(rows.delta) > 1.0
    if not 0 < far.mean() < 1 / 30:
        return False
    rest = Identities.of(rows.keep(~far))
    return rest.k1.off(0) >= 0 and not rest.above


class TruncatedSampling(Cause):
    """Sampled with top-p, top-k or min-p, and only one side knows.

    r is hardly ever above 1, and E[r] is the mass that was kept (0.90 for top-p 0.9) with a tiny error. K3 is
    small beside K1.
    """

    kind = "sampled"
    id = "truncated_sampling"
    sentence = "tokens were sampled with top-p, top-k or min-p, and only the rollout column knows of it"
    violates = "E[r] = 1: here r = the probability mass that was kept, never above 1"
    confirm = "the sampling parameters of the rollout: top_p < 1, top_k > 0 or min_p > 0"
    fix = "sample with top_p=1.0, top_k=-1 and min_p=0, or apply the same filter to the trainer's logits"
    after = "with the rollout log-probs renormalised over the whole vocabulary (approximate)"
    ruled_out = "top-p or top-k on one side"
    apart = {
        "rollout_raw_logprobs": (
            "There K1 is negative or E[r] above 1: the logged numbers are of another distribution than the "
            "sampled one, in both directions."
        ),
        "trainer_temperature": "There E[r] is 1, and r lies on both sides.",
    }

    def look(self, rows: Rows) -> Found | None:
        seen = rows.once(Identities.of)
        if seen.k1.value <= 0 or seen.tv < TINY or other_base(rows) is not None:
            return None
        one_sided = (1 - seen.ratio.value) / seen.tv
        ratio = estimate(rows, 1 + np.expm1(np.minimum(rows.delta, 3.0)), by_group=False)
        sure = one_sided >= SURELY_ONE_SIDED and ratio.off(1) < 0
        if one_sided < ONE_SIDED or (seen.ratio.off(1) >= 0 and not sure):
            return None
        noise, lowest = (float(np.quantile(rows.delta, part)) for part in (0.995, 0.002))
        if noise > 0.5 * -lowest or lowest < -TAIL:
            return None
        certain = (rows.q > -1e-6) & (rows.delta < -1e-3) & (rows.delta > -MASS)
        evidence = (
            f"E[r] = {seen.ratio.value:.5g} [{seen.ratio.low:.5g}, {seen.ratio.high:.5g}], and r lies below "
            f"1 nearly always: 99.5% of Δ are below {noise:.2g} and 99.8% above {lowest:.2g} nats; "
            f"{percent(float(certain.mean()))} of tokens are logged as certain and are not"
        )
        mended = rows.with_q(rows.q + np.minimum(rows.delta, 0))
        return self.of_all(evidence, rows, repaired=mended, approximate=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Keep 70% to all of the mass of each token's distribution, on the rollout's side."""
        keep = np.where(rng.random(rows.tokens) < 0.3, 1.0, rng.uniform(0.8, 1.0, rows.tokens))
        return replace(
            rows, q=np.minimum(rows.q - np.log(np.maximum(keep, np.exp(rows.q))), 0.0), entropy=None
        )


class RawLogProbs(Cause):
    """The rollout column is not the distribution that was sampled.

    K1 is clearly negative, or E[r] clearly above 1: impossible for tokens drawn from the logged distribution.
    log π_train is a steeper or flatter line of log π_rollout; it gets worse with |log T|.
    """

    kind = "sampled"
    id = "rollout_raw_logprobs"
    sentence = "the rollout column does not hold the distribution that tokens were sampled from{temperature}"
    violates = "k1 ≥ 0 and E[r] = 1 for tokens sampled from the logged distribution"
    confirm = "compare a logged value with log-softmax(logits / temperature) of that token"
    fix = (
        "log processed log-probs in the engine (vLLM: logprobs_mode=processed_logprobs; SGLang: "
        "--enable-return-processed-logprobs or temperature 1)"
    )
    ruled_out = "tokens sampled from another distribution than the logged one"
    apart = {
        "trainer_temperature": "There the trainer forgets the temperature: E[r] is 1 and K1 positive.",
        "repetition_penalty": (
            "A penalty on one side breaks the same identities, but only for ids seen before."
        ),
        "top1_logged": "There the logged number is the best token's and never below the sampled one's.",
    }
    blanks = {"temperature": ""}

    def look(self, rows: Rows) -> Found | None:
        seen = rows.once(Identities.of)
        if np.mean(np.abs(rows.delta)) < TINY:
            return self._by_entropy(rows, seen)
        fitted, k1 = rows.once(fit_temperature), seen.k1
        if fitted.fits if seen.negative else fitted.clear and k1.value < 0:
            found = None if other_base(rows) else _tempered(self, rows, fitted, 1 / fitted.power)
            return found and (found if found.helps else replace(found, repaired=None, words={}))
        if fitted.clear:
            return None
        if not seen.negative and not seen.above:
            return self._by_entropy(rows, seen)
        if other_base(rows) is not None or few_far(rows):
            return None  # a few tokens that are logged far off are no temperature
        of_k1 = f"k1 = {k1.value:.3g} [{k1.low:.2g}, {k1.high:.2g}] nats, " if seen.negative else ""
        return self.of_all(f"{of_k1}E[r] = {seen.ratio.text}", rows, alone=True)

    def _by_entropy(self, rows: Rows, seen: Identities) -> Found | None:
        """Find surprisal apart from the logged entropy: tokens were not sampled as logged.

        The entropy is that of π_train, as trainers log it, or of π_rollout. The mean of −log π_rollout is the
        entropy of π_rollout, and the mean of −r log π_train that of π_train: for sampled tokens one fits.
        """
        gap, other = seen.entropy, seen.weighted
        if gap is None or other is None or gap.off(0) == 0 or gap.off(0) != other.off(0):
            return None
        if abs(gap.value) < max(0.005, 2 * float(np.mean(rows.size))):
            return None  # an entropy of a third policy, before or after an update, is off by about |Δ|
        way = "below" if gap.value < 0 else "above"
        evidence = (
            f"surprisal − entropy = {gap.value:.3g} [{gap.low:.2g}, {gap.high:.2g}] nats, {way} 0; 0 where "
            "tokens were sampled from the logged distribution"
        )
        cut = gap.value < 0 and float(np.mean(rows.q < UNLIKELY)) < RARE
        return (TruncatedSampling() if cut else self).of_all(evidence, rows)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=_colder(rows, rows.q), entropy=None)


class TrainerTemperature(Cause):
    """The trainer does not divide its logits by the sampling temperature.

    Large at lag 0 and from the first step on, E[r] = 1, and log π_train is not a power of log π_rollout:
    certain tokens are too uncertain (T < 1) or the reverse.
    """

    kind = "sampled"
    id = "trainer_temperature"
    sentence = "the trainer does not divide its logits by the sampling temperature{temperature}"
    violates = "log π_train is not a power of log π_rollout under any noise or staleness"
    confirm = "look for the division by temperature in the trainer's log-prob computation"
    fix = (
        "divide the logits by the temperature before log-softmax (verl: "
        "actor_rollout_ref.rollout.temperature reaches compute_log_prob; TRL: temperature in GRPOConfig)"
    )
    ruled_out = "a temperature on one side only"
    apart = {
        "rollout_raw_logprobs": "There the engine's numbers are at another temperature: E[r] is not 1.",
        "stale": "Stale weights keep the slope of the line at 1 and vanish at lag 0.",
    }
    blanks = {"temperature": ""}

    def look(self, rows: Rows) -> Found | None:
        fitted, k1 = rows.once(fit_temperature), rows.once(Identities.of).k1
        if not fitted.clear or k1.value < 0 or other_base(rows) is not None:
            return None
        if fitted.power <= 1:
            return _tempered(self, rows, fitted, fitted.power)
        twice = {
            "sentence": "the trainer divides its logits by the sampling temperature twice{temperature}, or "
            f"never by one above 1 (T ≈ {fitted.power:.2g})",
            "fix": "divide the logits by the temperature once before log-softmax: not again where the model "
            "itself does",
        }
        return _tempered(self, rows, fitted, 1 / fitted.power, twice)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, p=_colder(rows, rows.p), entropy=None)


def _colder(rows: Rows, x: Floats) -> Floats:
    """Return log-probs at 0.6 of their logits, with as many other tokens as make them a distribution."""
    every = (tempered(x, 0.6, rest) for rest in np.geomspace(1, 64, 49))
    return min(every, key=lambda one: abs(float(np.mean(np.exp(one - rows.q))) - 1))


def _tempered(
    cause: Cause, rows: Rows, fitted: Fitted, temperature: float, words: dict[str, str] | None = None
) -> Found:
    """Return a temperature that was fitted; the repair has the rollout's log-probs at that temperature."""
    seen = rows.once(Identities.of)
    evidence = (
        f"k1 = {seen.k1.value:.3g} [{seen.k1.low:.2g}, {seen.k1.high:.2g}] nats, E[r] = {seen.ratio.text}; "
        f"log π_train follows {fitted.power:.2f} × log π_rollout (renormalised), which explains "
        f"{percent(fitted.explained)} of the mean square of Δ"
    )
    mended = rows.with_q(tempered(rows.q, fitted.power, fitted.rest))
    said = {"temperature": f" (T ≈ {temperature:.2g})"} | (words or {})
    return cause.of_all(evidence, rows, repaired=mended, approximate=True, words=said)
