"""Identities that hold for tokens sampled from the logged π_rollout, and the faults that violate them.

If tokens were sampled from the π_rollout that was logged, then E[r] = 1 and k1 = −E[Δ] ≥ 0 whatever the
training policy is, and the mean surprisal equals the mean entropy. K3 = k1 + E[r] − 1 holds for any
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from offpol_diag.core.intervals import quantile
from offpol_diag.diagnosis.rows import (
    CAP,
    Estimate,
    Floats,
    Ints,
    Rows,
    alike,
    answered_again,
    clusters,
    estimate,
    numbers,
    partitions,
    uncertain,
)
from offpol_diag.diagnosis.signatures import Found, percent

VISIBLE = 2e-3
"""Smallest |E[r] − 1| that counts as a bug; rounding of log-probs by kernels stays below it."""
BROAD = 0.3
"""Mean |Δ| from which a mismatch is so broad that E[r] at single places shows nothing, nats."""
EXPLAINED = 0.62
"""Smallest share of ΣΔ² that a temperature explains where it is the cause. Other mismatches grow with the
surprisal too: it explains 11 to 30% of a repetition penalty, to 56% of a soft cap, 40% of another model."""
BENT, CELLS = 0.12, 12
"""Share that a temperature may leave of what any function of log π_rollout explains: 1 to 10% where it is the
cause, 12 to 30% of a soft cap; and number of cells of log π_rollout in which such a function is constant."""
FITTED = 6_000
"""Tokens to which a temperature is fitted, about."""
REST = (1.0, 2.0, 4.0, 8.0, 16.0, 64.0)
"""Numbers of equally likely other tokens that are tried when a temperature is fitted."""


@dataclass(frozen=True)
class Identities:
    """Estimates of K1, E[r] and surprisal − entropy; `tv` is E|r − 1|.

    `weighted` is the latter with the surprisal under π_train, weighted by r. Without logged entropy both are
    None.
    """

    k1: Estimate
    ratio: Estimate
    entropy: Estimate | None
    weighted: Estimate | None
    tv: float

    @property
    def one_sided(self) -> float:
        """(1 − E[r]) / E|r − 1|: 0 for tokens sampled from the logged π_rollout, 1 if r ≤ 1 everywhere."""
        return (1 - self.ratio.value) / self.tv if self.tv > 0 else 0.0


def identities(rows: Rows) -> Identities:
    """Estimate the identities; ratios are cut at e^3, which can only lower E[r]."""
    off = np.expm1(np.minimum(rows.delta, 3.0))
    known = rows.entropy is not None and np.isfinite(rows.entropy).all() and bool((rows.entropy > 0).any())
    gaps: list[Estimate | None] = [None, None]
    if known and rows.entropy is not None:
        gaps = [estimate(rows, x - rows.entropy) for x in (-rows.q, -rows.p * (1 + off))]
    return Identities(
        estimate(rows, -rows.delta), estimate(rows, 1 + off), gaps[0], gaps[1], float(np.mean(np.abs(off)))
    )


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
        return self.likely and self.explained > 0.3 and abs(np.log(self.power)) > 0.02


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


def sampling(rows: Rows) -> Found | None:
    """Find a temperature or truncation on one side only, or tokens not sampled from the logged π_rollout."""
    seen = identities(rows)
    size = float(np.mean(np.abs(rows.delta)))
    if size < 1e-5:
        return _unlogged(rows, seen)
    edge = _nucleus(rows, seen)
    if edge is not None:
        return edge
    fitted = fit_temperature(rows)
    negative = seen.k1.off(0) < 0 and seen.k1.value < -1e-5
    clear = fitted.fits if negative else fitted.clear
    if not clear and (negative or seen.ratio.off(1) > 0) and few_far(rows):
        return None  # a few tokens that are logged far off are no temperature
    if clear or negative:
        raw = seen.k1.value < 0
        temperature = 1 / fitted.power if raw else fitted.power
        k1 = seen.k1
        statistic = f"k1 = {k1.value:.3g} [{k1.low:.2g}, {k1.high:.2g}] nats, E[r] = {seen.ratio.text}"
        if clear:
            statistic += (
                f"; log π_train follows {fitted.power:.2f} × log π_rollout (renormalised), which explains "
                f"{percent(fitted.explained)} of the mean square of Δ"
            )
        fields = {"temperature": f"{temperature:.2g}", "shape": "temperature"} if clear else {}
        if clear and not raw and fitted.power > 1:
            fields |= twice(fitted.power)
        repaired = rows.with_q(tempered(rows.q, fitted.power, fitted.rest)) if clear else None
        cause = "rollout_raw_logprobs" if raw else "trainer_temperature"
        return Found.of_all(cause, statistic, rows, repaired=repaired, fields=fields, approximate=True)
    if seen.ratio.off(1) > 0 and seen.ratio.value > 1 + VISIBLE:
        return Found.of_all("rollout_raw_logprobs", f"E[r] = {seen.ratio.text}", rows)
    return _unlogged(rows, seen)


def twice(power: float) -> dict[str, str]:
    """Return the words for a trainer whose distribution is the sharper one."""
    return {
        "temperature": f"{1 / power:.2g}",
        "sentence": "the trainer divides its logits by the sampling temperature twice{temperature}, or never "
        f"by one above 1 (T ≈ {power:.2g})",
        "fix": "divide the logits by the temperature once before log-softmax: not again where the model "
        "itself does",
    }


def few_far(rows: Rows) -> bool:
    """Return whether only tokens with |Δ| > 1, fewer than one in 30, break the identities."""
    far = np.abs(rows.delta) > 1.0
    if not 0 < far.mean() < 1 / 30:
        return False
    rest = identities(rows.keep(~far))
    return rest.k1.off(0) >= 0 and not (rest.ratio.off(1) > 0 and rest.ratio.value > 1 + VISIBLE)


def _nucleus(rows: Rows, seen: Identities) -> Found | None:
    """Find top-p or top-k sampling: r ≤ 1 nearly everywhere, r being the mass that was kept."""
    if seen.k1.value <= 0 or seen.one_sided < 0.2:
        return None
    ratio = estimate(rows, 1 + np.expm1(np.minimum(rows.delta, 3.0)), by_group=False)
    if seen.ratio.off(1) >= 0 and (seen.one_sided < 0.6 or ratio.off(1) >= 0):
        return None
    noise = float(np.quantile(rows.delta, 0.995))
    lowest = float(np.quantile(rows.delta, 0.002))
    if noise > 0.5 * -lowest or lowest < -2.5:
        return None
    certain = (rows.q > -1e-6) & (rows.delta < -1e-3) & (rows.delta > -FAR_MASS)
    kept = seen.ratio.value
    statistic = (
        f"E[r] = {kept:.5g} [{seen.ratio.low:.5g}, {seen.ratio.high:.5g}], and r lies below 1 nearly always: "
        f"99.5% of Δ are below {noise:.2g} and 99.8% above {lowest:.2g} nats; "
        f"{percent(float(certain.mean()))} of tokens are logged as certain and are not"
    )
    return Found.of_all(
        "truncated_sampling",
        statistic,
        rows,
        repaired=rows.with_q(rows.q + np.minimum(rows.delta, 0)),
        fields={"shape": "edge"},
        approximate=True,
    )


FAR_MASS = 0.7
"""−log of the smallest mass that top-p or top-k sampling is assumed to keep, nats."""


def _unlogged(rows: Rows, seen: Identities) -> Found | None:
    """Find surprisal apart from the logged entropy: tokens were sampled more sharply or flatly than logged.

    The entropy is that of π_train, as trainers log it, or of π_rollout. The mean of −log π_rollout is the
    entropy of π_rollout, and the mean of −r log π_train that of π_train: for sampled tokens one of them fits.
    """
    gap, other = seen.entropy, seen.weighted
    if gap is None or other is None or gap.off(0) == 0 or gap.off(0) != other.off(0):
        return None
    if abs(gap.value) < max(0.005, 2 * float(np.mean(rows.size))):
        return None  # an entropy of a third policy, before or after an update, is off by about |Δ|
    way = "below" if gap.value < 0 else "above"
    statistic = (
        f"surprisal − entropy = {gap.value:.3g} [{gap.low:.2g}, {gap.high:.2g}] nats, {way} 0; 0 where "
        "tokens were sampled from the logged distribution"
    )
    rare = float(np.mean(rows.q < np.log(0.02)))
    cause = "truncated_sampling" if gap.value < 0 and rare < 0.002 else "rollout_raw_logprobs"
    return Found.of_all(cause, statistic, rows, fields={"shape": "entropy"})


def _broken_octaves(rows: Rows) -> tuple[Ints, list[tuple[int, Estimate]]]:
    """Return the octave of each token's position, [T], and those where E[r] differs from 1, with E[r].

    Octave 0 is position 0; 1 is 1 and 2; 2 is 3 to 6; and so on.
    """
    octave = np.log2(rows.position + 1).astype(np.int64)
    off = np.expm1(np.minimum(rows.delta, 3.0))
    many = int(octave.max()) + 1
    broken = []
    for k in range(many):
        at = octave == k
        seen = estimate(rows, 1 + off, at)
        tame = not (rows.delta[at] > FAR_MASS).any()  # E[r] is also below 1 if a heavy tail was not sampled
        if seen.off(1, many) > (-2 if tame else 0) and seen.off(1, many) and abs(seen.value - 1) > VISIBLE:
            broken.append((k, seen))
    return octave, broken


def positions(rows: Rows) -> Found | None:
    """Find a range of positions where E[r] is not 1, while it is 1 elsewhere."""
    octave, broken = _broken_octaves(rows)
    if not broken or len(broken) > max(1, (int(octave.max()) + 1) // 3):
        return None
    if broken[-1][0] - broken[0][0] >= len(broken):
        return None  # here and there: no place
    tokens = np.isin(octave, [k for k, _ in broken])
    if not tokens.all() and rows.size[~tokens].mean() > BROAD:
        return None  # of two models that differ everywhere, E[r] misses what neither of them samples
    far = np.abs(rows.delta) > 1.0
    everywhere = far[tokens].mean() < 2 * far.mean()
    if everywhere and few_far(rows) and not _broken_octaves(rows.keep(~far))[1]:
        return None  # a few tokens that are far off at any place
    places = [f"{2**k - 1}" if k == 0 else f"{2**k - 1}–{2 ** (k + 1) - 2}" for k, _ in broken]
    place = f"position {', '.join(places)}" if places != ["0"] else "the first token"
    statistic = "; ".join(
        f"position {name}: E[r] = {seen.text}" for name, (_, seen) in zip(places, broken, strict=True)
    )
    return Found.of_tokens("boundary", statistic, rows, tokens, fields={"place": place, "shape": "E"})


# Storage: number formats of log-probs.


def storage(rows: Rows) -> Found | None:
    """Find a column whose values were rounded to bfloat16, float16 or a few decimals."""
    for name, x in (("rollout", rows.q), ("train", rows.p)):
        some = x[(x < -1e-4) & (x > -60)]
        if len(some) < 50 or len(np.unique(some)) < 20:
            continue
        for grid, (bits, chance) in GRIDS.items():
            single = some.astype(np.float32)
            if grid == "bfloat16":
                fits = (single.view(np.uint32) & 0xFFFF) == 0
            elif grid == "float16":
                fits = single.astype(np.float16) == single
            else:
                scaled = some * 10.0**bits
                fits = np.abs(scaled - np.rint(scaled)) < 0.01
            share = float(np.mean(fits))
            if share <= 0.98:
                continue
            decimals = grid.endswith("decimal")
            step = 10.0**-bits if decimals else 2.0 ** (np.floor(np.log2(np.abs(some))) - bits + 1)
            size = float(np.sqrt(np.mean(np.minimum(np.abs(rows.delta), 1) ** 2)))
            statistic = (
                f"{percent(share)} of the {name} log-probs are {grid} numbers (by chance: {chance}); "
                f"rounding moves them by {np.sqrt(np.mean(step**2 / 12)):.1g} nats (root mean square), the "
                f"whole mismatch is {size:.1g}"
            )
            q, p = (np.where(y == 0, -1e-6, y) for y in (rows.q, rows.p))  # what was rounded to 0
            rest = {"repaired": replace(rows, q=q, p=p), "fields": {"column": name, "grid": grid}}
            return Found.of_all("low_precision_storage", statistic, rows, exact=True, **rest)
    return None


GRIDS = {
    "bfloat16": (8, "0.002%"),
    "float16": (11, "0.01%"),
    **{f"{places}-decimal": (places, "2%") for places in (1, 2, 3, 4)},
}
"""Number format → its significant bits or decimals, and the share of values on it by chance."""


# The systematic share of the mismatch.

FEWEST_KINDS, COVERED = 8, 0.2
"""Fewest clusters, and smallest share of tokens in repeated kinds, for an estimate."""


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
    group = clusters(rows)
    grouped = answered_again(rows)
    if grouped:
        key = np.unique(key, return_inverse=True)[1] * (int(group.max()) + 1) + group[rows.owner]
    _, first, kind = np.unique(key, return_index=True, return_inverse=True)
    r = np.expm1(np.clip(rows.delta, -20, np.log(2)))
    off = r - r.mean()
    cells, cell = np.unique(kind * rows.sequences + rows.owner, return_inverse=True)
    of_cell = cells // rows.sequences  # a cell is a kind within one response
    total = np.bincount(cell, off).astype(np.float64)
    many = np.bincount(cell).astype(np.float64)

    def pairs(x: Floats) -> Floats:
        return np.asarray(np.bincount(of_cell, x) ** 2 - np.bincount(of_cell, x**2), np.float64)

    count = pairs(many)
    some = count > 0
    tokens = np.bincount(kind)
    if not some.any() or tokens[some].sum() < COVERED * rows.tokens:
        return None
    common = tokens[some] * pairs(total)[some] / count[some]
    whole = np.bincount(kind, off**2)[some]
    cluster = group[rows.owner[first]][some] if grouped else np.arange(int(some.sum()))
    above, below = np.bincount(cluster, common), np.bincount(cluster, whole)
    there = np.bincount(cluster) > 0
    above, below, parts = above[there], below[there], int(there.sum())
    if parts < FEWEST_KINDS or not below.sum() > 0:
        return None
    value = float(above.sum() / below.sum())
    error = float(np.sqrt(np.square(above - value * below).sum() * parts / (parts - 1)) / below.sum())
    half = error * quantile(parts - 1)
    return Estimate(value, value - half, value + half, error, parts)


# What a mismatch goes with.


class Shape(NamedTuple):
    """A row of `SHAPES`: what a mismatch may go with.

    Attributes:
        name: in words.
        least: share of the variance from which it carries the mismatch.
        means: what that suggests.
    """

    name: str
    least: float
    means: str


SHAPES = {
    "kind": Shape(
        "token id", 0.25, "weights of an id (embedding, output layer, vocabulary), or an update of weights"
    ),
    "length": Shape(
        "length of prompt and response", 0.2, "YaRN, the scaling of attention, a window, or positions"
    ),
    "prompt": Shape("prompt", 0.75, "padding, a template or a system prompt"),
    "group": Shape("", 0.3, "one machine, or the environment's text"),
}
"""Key → what it suggests. Honest dumps of five architectures, at temperatures from 0.6 on, reach 0.14
(length), 0.35 (prompt), 0.06 (group) and 0.26 (token id; with weights of other steps 0.5)."""


def carried(rows: Rows) -> dict[str, tuple[str, float, float]]:
    """Return by what the mismatch goes with: key of `SHAPES` → name, share of the variance, that by chance.

    For token ids it is the variance of Δ/(1 − π_rollout), for all else that of log |Δ|/(1 − π_rollout) of a
    sequence less its mean by step and lag. The share by chance is the expectation over shuffled rows, of
    which the first is cleared; those are listed that reach `least`.
    """
    some = rows.keep(uncertain(rows))
    if some.sequences < 24:
        return {}
    level = np.log(np.maximum(some.mean(some.scaled), 1e-6))
    weights = alike(some)
    level = level - (np.bincount(weights, level) / np.bincount(weights))[weights]
    length = some.lengths + np.nan_to_num(numbers(some.column("prompt_length")))
    labels = {"length": np.searchsorted(np.quantile(length, np.linspace(0, 1, 9)[1:-1]), length)}
    if answered_again(some):
        labels["prompt"] = clusters(some)
    found = {key: (SHAPES[key].name, *_explained(level, label)) for key, label in labels.items()}
    for name, parts in partitions(some):
        label = np.select(list(parts.values()), range(len(parts)), -1)
        share = _explained(level, label)
        if name != "step" and ("group" not in found or share[0] > found["group"][1]):
            found["group"] = (name, *share)
    if some.ids is not None:
        signed = np.clip(some.delta / np.maximum(-np.expm1(some.q), 1e-3), -CAP, CAP)
        found["kind"] = (SHAPES["kind"].name, *_explained(signed, some.ids))
    return {key: one for key, one in found.items() if one[1] >= SHAPES[key].least}


def _explained(x: Floats, label: Ints) -> tuple[float, float]:
    """Return the share of the variance of x that a label explains, less what it does by chance, and that."""
    which = np.unique(label, return_inverse=True)[1]
    groups, whole = int(which.max()) + 1, np.square(x - x.mean()).sum()
    chance = (groups - 1) / (len(x) - 1)
    if not whole > 0 or chance >= 0.5:
        return 0.0, chance
    left = np.square(x - (np.bincount(which, x) / np.bincount(which))[which]).sum()
    return float((1 - left / whole - chance) / (1 - chance)), chance
