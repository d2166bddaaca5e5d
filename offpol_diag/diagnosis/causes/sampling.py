"""Tokens that were sampled from another distribution than the logged one: temperature, truncation.

If tokens were sampled from the π_rollout that was logged, then E[r] = 1 and k1 = −E[Δ] ≥ 0 whatever the
training policy is, and the mean surprisal equals the mean entropy. K3 = k1 + E[r] − 1 holds for any numbers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np

from offpol_diag.diagnosis.cause import Cause, Found
from offpol_diag.diagnosis.estimates import Estimate, estimate, percent
from offpol_diag.diagnosis.rows import CAP, Floats, Rows

VISIBLE, TINY, CUT = 2e-3, 1e-5, 3.0
"""|E[r] − 1| that kernels stay below; mean |Δ|, and −k1, that rounding explains, nats; and log of the largest
ratio that counts in E[r], which the cut can only lower."""
EXPLAINED, FITS = 0.58, 0.3
"""Smallest share of ΣΔ² that a temperature explains where it is the cause, of likely and of unlikely tokens
(0.64 to 1), and where identities have shown one. Other mismatches grow with the surprisal too, but not as its
own power: it explains up to 0.51 of a soft cap, 0.40 of another model, 0.30 of a repetition penalty."""
FITTED, REST = 6_000, (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Tokens to which a temperature is fitted, about, and numbers of equally likely other tokens to try."""
BASES, PROPORTIONAL = (2, 10), 0.02
"""Bases of logarithms; and mean |p − c·q|, in the mean |Δ|, up to which one column is the other to a base: no
temperature is so exactly proportional."""
ONE_SIDED, TAIL = 0.2, 2.5
"""Least (1 − E[r]) / E|r − 1| where r lies below 1 nearly always; and how far below, nats."""
FAR, FEW, BLUNT = 1.0, 1 / 30, 0.005
"""|Δ| of tokens that may break the identities alone, nats, and most of these; least |surprisal − entropy|
that says something, nats."""


class Identities(NamedTuple):
    """Estimates of k1 and E[r]; and E|r − 1|."""

    k1: Estimate
    ratio: Estimate
    tv: float

    @classmethod
    def of(cls, rows: Rows) -> Identities:
        """Estimate the identities."""
        off = np.expm1(np.minimum(rows.delta, CUT))
        return cls(estimate(rows, -rows.delta), estimate(rows, 1 + off), float(np.mean(np.abs(off))))

    @property
    def negative(self) -> bool:
        """Whether k1 is negative."""
        return self.k1.off(0) < 0 and self.k1.value < -TINY

    @property
    def violated(self) -> bool:
        """Whether k1 is negative, or E[r] above 1 by more than rounding."""
        return self.negative or (self.ratio.off(1) > 0 and self.ratio.value > 1 + VISIBLE)

    @property
    def text(self) -> str:
        """Both with their intervals in words."""
        return f"k1 = {self.k1.text} nats, E[r] = {self.ratio.text}"


class Temperature(NamedTuple):
    """Fit of π_train as π_rollout at another temperature: π_train ∝ π_rollout^power.

    `power` is the rollout temperature over the trainer's; `rest` other tokens are taken as equally likely;
    `explained` is the share of ΣΔ² (|Δ| cut at `CAP`) that it explains, the lesser of likely and unlikely
    tokens'.
    """

    power: float
    rest: float
    explained: float


def tempered(q: Floats, power: float, rest: float) -> Floats:
    """Return log of π^power renormalised, with the mass 1 − π on `rest` equally likely tokens; q = log π."""
    other = np.log(np.maximum(-np.expm1(q), 1e-12))
    own, others = power * q, power * other + (1 - power) * np.log(rest)
    return np.asarray(own - np.logaddexp(own, others))


def fit_temperature(rows: Rows) -> Temperature:
    """Fit the power that minimises mean |log π_train − log π_tempered|, and the share of ΣΔ² it explains."""
    some = (rows.q > -12) & (rows.q < -1e-3)
    if some.sum() < 100:
        return Temperature(1.0, 1.0, 0.0)
    q, p = rows.q[some], rows.p[some]
    part = slice(None, None, max(1, len(q) // FITTED))

    def off(power: float, rest: float) -> float:
        return float(np.mean(np.minimum(np.abs(p[part] - tempered(q[part], power, rest)), 1.0)))

    coarse = np.exp(np.linspace(-1.2, 1.2, 17))
    _, power, rest = min((off(power, rest), power, rest) for power in coarse for rest in REST)
    power = min(power * np.exp(np.linspace(-0.05, 0.05, 21)), key=lambda power: off(power, rest))
    left, whole = (np.clip(p - x, -CAP, CAP) ** 2 for x in (tempered(q, power, rest), q))
    halves = (q < np.median(q), q >= np.median(q))
    explained = min(float(1 - left[at].sum() / max(whole[at].sum(), 1e-12)) for at in halves)
    return Temperature(float(power), rest, explained)


def other_base(rows: Rows) -> str | None:
    """Return that one column is the other's logarithm to another base, in a clause; None if it is not."""
    size = float(np.mean(np.abs(rows.delta)))
    for base in BASES:
        for factor, side in ((np.log(base), "rollout"), (1 / np.log(base), "train")):
            if size > TINY and np.mean(np.abs(rows.p - factor * rows.q)) < PROPORTIONAL * size:
                times = f"log π_train is {factor:.4g} × log π_rollout, token for token"
                return f"{times}: is {side} to base {base}?"
    return None


class TruncatedSampling(Cause):
    """Tokens were sampled with top-p, top-k or min-p, and only one side includes it.

    r is hardly ever above 1, and E[r] is the mass that was kept (0.90 for top-p 0.9) with a tiny error. K3 is
    small beside K1.
    """

    kind = "sampled"
    id = "truncated_sampling"
    sentence = "tokens were sampled with top-p, top-k or min-p, and only the rollout column includes it"
    evidence = (
        "E[r] = {:.5g} [{:.5g}, {:.5g}], and r lies below 1 nearly always: 99.5% of Δ are below {:.2g} and "
        "99.8% above {:.2g} nats"
    )
    confirm = "check the sampling parameters of the rollout: top_p < 1, top_k > 0 or min_p > 0"
    fix = "sample with top_p=1.0, top_k=-1 and min_p=0, or apply the same filter to the trainer's logits"
    after = "with the rollout log-probs renormalised over the whole vocabulary (approximate)"
    apart = {"rollout_raw_logprobs": "K1 is negative, or E[r] is above 1."}

    def look(self, rows: Rows) -> Found | None:
        _, ratio, tv = rows.once(Identities.of)
        if tv < TINY or (1 - ratio.value) / tv < ONE_SIDED or ratio.off(1) >= 0:
            return None
        lowest, highest = np.quantile(rows.delta, (0.002, 0.995)).tolist()
        if highest > 0.5 * -lowest or lowest < -TAIL:
            return None
        evidence = self.evidence.format(ratio.value, ratio.low, ratio.high, highest, lowest)
        repaired = replace(rows, q=rows.q + np.minimum(rows.delta, 0), entropy=None)
        return Found(self, evidence, rows, rows.every, repaired, approximate=True)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        """Keep 70% to all of the mass of each token's distribution, on the rollout's side."""
        keep = np.where(rng.random(rows.tokens) < 0.3, 1.0, rng.uniform(0.8, 1.0, rows.tokens))
        kept = np.log(np.maximum(keep, np.exp(rows.q)))
        return replace(rows, q=np.minimum(rows.q - kept, 0.0), entropy=None)


class RawLogProbs(Cause):
    """The rollout column is not the distribution that was sampled.

    K1 is clearly negative, or E[r] clearly above 1: impossible for tokens drawn from the logged distribution.
    log π_train is a steeper or flatter line of log π_rollout; it gets worse with |log T|.
    """

    kind = "sampled"
    id = "rollout_raw_logprobs"
    unknown = {"temperature": ""}
    sentence = "the rollout column does not hold the distribution that tokens were sampled from{temperature}"
    evidence = (
        "{}; log π_train follows {:.2f} × log π_rollout (renormalised), which explains {} of the mean square "
        "of Δ"
    )
    confirm = "compare a logged value with log-softmax(logits / temperature) of that token"
    fix = "log processed log-probs (vLLM: logprobs_mode; SGLang: --enable-return-processed-logprobs)"
    apart = {"trainer_temperature": "E[r] is 1, and K1 is positive."}

    def look(self, rows: Rows) -> Found | None:
        """Find a temperature with k1 below 0, or a surprisal that is not the logged entropy."""
        identities, fit = rows.once(Identities.of), rows.once(fit_temperature)
        if identities.k1.value < 0 and fit.explained > (FITS if identities.negative else EXPLAINED):
            found = _tempered(self, rows, fit, {"temperature": f" (T ≈ {1 / fit.power:.2g})"})
            if found.helps:
                return found
        gap = None if fit.explained > EXPLAINED or identities.violated else _from_entropy(rows)
        if not gap:
            return None
        evidence = f"surprisal − entropy = {gap.text} nats: 0 for tokens sampled as logged"
        return Found(self, evidence, rows, rows.every, words=self.unknown)

    def look_alone(self, rows: Rows) -> Found | None:
        """Find an identity that is violated, and not by a few tokens that are logged far off."""
        identities = others = rows.once(Identities.of)
        far = np.abs(rows.delta) > FAR
        if 0 < far.mean() < FEW:
            others = Identities.of(rows.keep(~far))
        if rows.once(fit_temperature).explained > EXPLAINED or not (identities.violated and others.violated):
            return None
        return Found(self, identities.text, rows, rows.every, words=self.unknown)

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, q=_colder(rows, rows.q), entropy=None)


def _from_entropy(rows: Rows) -> Estimate | None:
    """Estimate how far the surprisal is from the logged entropy; None where they may be equal.

    The entropy is that of π_train, as trainers log it, or of π_rollout. The mean of −log π_rollout is the
    entropy of π_rollout, and the mean of −r log π_train that of π_train: for sampled tokens one fits. That of
    a third policy, before or after an update, is off by about |Δ|.
    """
    if rows.entropy is None or not np.isfinite(rows.entropy).all() or not (rows.entropy > 0).any():
        return None
    surprisal = (-rows.q, -rows.p * np.exp(np.minimum(rows.delta, CUT)))
    gap, other = (estimate(rows, x - rows.entropy) for x in surprisal)
    apart = gap.off(0) != 0 and gap.off(0) == other.off(0)
    return gap if apart and abs(gap.value) >= max(BLUNT, 2 * float(np.mean(rows.gap))) else None


class TrainerTemperature(Cause):
    """The trainer does not divide its logits by the sampling temperature, or divides them twice.

    Large at lag 0 and from the first step on, E[r] = 1, and log π_train is not a power of log π_rollout:
    certain tokens are too uncertain (T < 1) or the reverse.
    """

    kind = "sampled"
    id = "trainer_temperature"
    sentence = "the trainer divides its logits by {times} times the sampling temperature"
    evidence = (
        "{}; log π_train follows {:.2f} × log π_rollout (renormalised), which explains {} of the mean square "
        "of Δ"
    )
    confirm = "look for the division by temperature in the trainer's log-prob computation"
    fix = "divide the logits by the sampling temperature, once, before log-softmax"
    apart = {"rollout_raw_logprobs": "E[r] is not 1."}

    def look(self, rows: Rows) -> Found | None:
        fit = rows.once(fit_temperature)
        if fit.explained <= EXPLAINED or rows.once(Identities.of).k1.value < 0:
            return None
        return _tempered(self, rows, fit, {"times": f"{1 / fit.power:.2g}"})

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows:
        return replace(rows, p=_colder(rows, rows.p), entropy=None)


def _tempered(cause: Cause, rows: Rows, fit: Temperature, words: dict[str, str]) -> Found:
    """Return a temperature that was fitted; the repair has the rollout's log-probs at that temperature."""
    evidence = cause.evidence.format(rows.once(Identities.of).text, fit.power, percent(fit.explained))
    repaired = replace(rows, q=tempered(rows.q, fit.power, fit.rest), entropy=None)
    return Found(cause, evidence, rows, rows.every, repaired, approximate=True, words=words)


def _colder(rows: Rows, x: Floats) -> Floats:
    """Return log-probs at 0.6 of their logits, with as many other tokens as make them a distribution."""
    every = (tempered(x, 0.6, rest) for rest in np.geomspace(1, 64, 49))
    return min(every, key=lambda one: abs(float(np.mean(np.exp(one - rows.q))) - 1))
