"""The true numbers of a world: closed forms given length and spread of a response, averaged over many.

Nothing of the product is used: the formulas are written out again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr

from benchmarks.covering.worlds import MEAN_PROBABILITY, WORLDS, Array, Sequences, World, sequences

PRESETS = {
    "tis": "token_is@2.0",
    "mask": "token_mask@0.5..2.0",
    "geo": "decoupled_geo_rs@0.99..1.01",
}
"""Our name of a preset → the built-in one, and its thresholds."""
UPPER, LOW, HIGH = 2.0, 0.5, 2.0
"""Bound of token TIS, and bounds of the token mask."""
WINDOW = (0.99, 1.01)
"""Bounds of the geometric rejection."""
MOST_WIDE = 12
"""Largest number of wide tokens of one response that is counted."""
PARTS = 40
"""Parts of the sample, from whose spread the standard error is estimated."""


@dataclass(frozen=True)
class _Class:
    """One class of tokens, [S]: its share, and mean and spread of Δ."""

    share: Array
    m: Array
    s: Array


Means = dict[str, Array]


def _classes(world: World, given: Sequences) -> tuple[_Class, _Class]:
    wide = np.where(given.lost, 1.0, world.wide)
    both = ((1 - wide, given.spread), (wide, np.full_like(given.spread, world.width)))
    one, two = (_Class(share, given.shift - s**2 / 2, s) for share, s in both)
    return one, two


def _below(x: float, one: _Class, power: int = 0) -> Array:
    """Compute E[r^power; Δ ≤ x]."""
    whole = np.exp(power * one.m + (power * one.s) ** 2 / 2)
    return np.asarray(whole * ndtr((x - one.m - power * one.s**2) / one.s))


_INF = math.inf
TOKEN: dict[str, Callable[[_Class], Array]] = {
    "d": lambda c: c.m,
    "dd": lambda c: c.m**2 + c.s**2,
    "r": lambda c: _below(_INF, c, 1),
    "rr": lambda c: _below(_INF, c, 2),
    "inverse": lambda c: np.exp(-c.m + c.s**2 / 2),
    "apart": lambda c: _below(_INF, c, 1) - 1 + 2 * (_below(0.0, c) - _below(0.0, c, 1)),
    "far": lambda c: 1 - _below(math.log(2), c) + _below(-math.log(2), c),
    "kept": lambda c: _below(math.log(HIGH), c) - _below(math.log(LOW), c),
    "w": lambda c: _below(math.log(UPPER), c, 1) + UPPER * (1 - _below(math.log(UPPER), c)),
    "ww": lambda c: _below(math.log(UPPER), c, 2) + UPPER**2 * (1 - _below(math.log(UPPER), c)),
}
"""Expectations of one token of a class."""


def _given(world: World, given: Sequences) -> Means:
    """Compute expected per-sequence sums given the responses, [S] each."""
    classes, n = _classes(world, given), given.n.astype(float)
    token = {name: sum(c.share * of(c) for c in classes) for name, of in TOKEN.items()}
    sums: Means = {name: n * np.asarray(x) for name, x in token.items()}
    sums |= {"n": n, "one": np.ones_like(n)}
    with np.errstate(over="ignore"):  # then there is no truth, and the number is left out
        sums["s"], sums["ss"] = np.asarray(token["r"]) ** n, np.asarray(token["rr"]) ** n
    root = sum(c.share * np.exp(-c.m / n + (c.s / n) ** 2 / 2) for c in classes)
    sums["ppl"] = np.asarray(root) ** n
    for name, first, second in (("v", "w", "ww"), ("u", "kept", "kept")):
        mean, square = np.asarray(token[first]), np.asarray(token[second])
        sums[name], sums[name * 2] = mean, mean**2 + (square - mean**2) / n
    sums["out"] = _outside(classes, given)
    sums["n out"] = n * sums["out"]
    return sums


def _outside(classes: tuple[_Class, _Class], given: Sequences) -> Array:
    """Compute P(the mean Δ of a response lies outside the window), over how many of its tokens are wide."""
    usual, wide = classes
    n, low, high = given.n, *np.log(WINDOW)
    found, chance = np.zeros(len(n)), np.where(given.lost, 1.0, (1 - wide.share) ** n)
    for count in range(MOST_WIDE + 1):
        many = np.where(given.lost, n, np.minimum(count, n))
        mean = ((n - many) * usual.m + many * wide.m) / n
        sd = np.sqrt((n - many) * usual.s**2 + many * wide.s**2) / n
        found += chance * (ndtr((low - mean) / sd) + 1 - ndtr((high - mean) / sd))
        odds = np.where(given.lost, 0.0, wide.share / np.maximum(1 - wide.share, 1e-300))
        chance = chance * odds * (n - count).clip(min=0) / (count + 1)
    return found


Total = Callable[[str], float]

METRICS: dict[str, Callable[[Total], float]] = {
    "k1": lambda e: -e("d") / e("n"),
    "k2": lambda e: e("dd") / e("n") / 2,
    "k3": lambda e: e("r") / e("n") - 1 - e("d") / e("n"),
    "mean_ratio": lambda e: e("r") / e("n"),
    "chi2_token": lambda e: e("rr") / e("n") - 1,
    "chi2_sequence": lambda e: e("ss") / e("one") - 1,
    "ppl_ratio": lambda e: e("ppl") / e("one"),
    "tv": lambda e: e("apart") / e("n") / 2,
    "f_2": lambda e: e("far") / e("n"),
    "prob_diff_mean": lambda e: MEAN_PROBABILITY * e("apart") / e("n"),
    "log_ratio_std": lambda e: np.sqrt(e("dd") / e("n") - (e("d") / e("n")) ** 2),
    "ess_tokens": lambda e: e("r") ** 2 / (e("n") * e("rr")),
    "ess_sequences": lambda e: e("s") ** 2 / (e("one") * e("ss")),
    "tis.weight_mean": lambda e: e("w") / e("n"),
    "tis.weight_std": lambda e: np.sqrt(e("ww") / e("n") - (e("w") / e("n")) ** 2),
    "tis.ess_tokens": lambda e: e("w") ** 2 / (e("n") * e("ww")),
    "tis.ess_sequences": lambda e: e("v") ** 2 / (e("one") * e("vv")),
    "mask.tokens_rejected": lambda e: 1 - e("kept") / e("n"),
    "mask.ess_sequences": lambda e: e("u") ** 2 / (e("one") * e("uu")),
    "geo.sequences_dropped": lambda e: e("out") / e("one"),
    "geo.tokens_rejected": lambda e: e("n out") / e("n"),
    "mask − geo: tokens_rejected": lambda e: 1 - e("kept") / e("n") - e("n out") / e("n"),
    "tis − mask: ess_sequences": lambda e: (
        e("v") ** 2 / (e("one") * e("vv")) - e("u") ** 2 / (e("one") * e("uu"))
    ),
}


@dataclass(frozen=True)
class Known:
    """A true number and its standard error."""

    value: float
    error: float


def truths(world: World, groups: int = 200_000) -> dict[str, Known]:
    """Compute every true number of a world."""
    rng = np.random.default_rng((7, WORLDS.index(world)))
    parts = [_given(world, sequences(world, groups // PARTS, rng)) for _ in range(PARTS)]
    sums = {name: np.array([part[name].sum() for part in parts]) for name in parts[0]}
    with np.errstate(all="ignore"):  # what overflows has no truth
        return {name: _jackknifed(of, sums) for name, of in METRICS.items()}


def _jackknifed(of: Callable[[Total], float], sums: Means) -> Known:
    whole = of(lambda name: sums[name].sum())
    left = np.array([of(lambda name, i=i: sums[name].sum() - sums[name][i]) for i in range(PARTS)])
    return Known(float(whole), float(np.sqrt((PARTS - 1) / PARTS * np.square(left - left.mean()).sum())))
