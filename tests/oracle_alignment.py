"""The stand-in for the gradient and what is estimated of it, in lists, dicts and `math.fsum`.

Written from the docstrings and the titles of the candidates; nothing is shared with the package.
A dump is a list of `Row`; a row holds what the mask leaves of one sequence.
"""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from dataclasses import dataclass
from itertools import permutations

FOLDS, BUCKETS = 32, 256
STEP, SALT = 0x2545F4914F6CDD1D, 0x5EED0F0F
WORD = 2**64
SAFETY = 20.0
CELL = math.log(5)


@dataclass
class Row:
    """One sequence; `train` by policy, `advantages` per token."""

    key: int
    rollout: list[float]
    train: dict[str, list[float]]
    advantages: list[float]
    ids: list[int]
    position: list[int]


# ---------------------------------------------------------------- the hash


def mix(x: int) -> int:
    """SplitMix64's finaliser, as published."""
    x %= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % WORD
    return x ^ (x >> 31)


def fold(key: int) -> int:
    return mix((key % WORD) ^ SALT) % FOLDS


def coordinate(row: Row, t: int, known: bool) -> tuple[int, int]:
    """Bucket and sign: of the bigram, or of a token by itself."""
    before = row.ids[t - 1] if t else -1
    lone = mix(row.key) + row.position[t] * STEP + mix(bits(row.rollout[t]))
    return placed(mix(mix(before) + row.ids[t] * STEP) if known else mix(lone))


def kind(row: Row, t: int, ids: bool) -> tuple[int, int]:
    """Of the bigram; without token ids of how likely the token was and how far in."""
    if ids:
        return coordinate(row, t, True)
    likely = min(int(math.sqrt(2 * max(-row.rollout[t], 0.0))), 15)
    return placed(mix(likely * 64 + int(math.log2(row.position[t] + 1))))


def placed(mixed: int) -> tuple[int, int]:
    return mixed % BUCKETS, 1 if (mixed >> 20) & 1 else -1


def bits(x: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", x))[0])


# ---------------------------------------------------------------- weights, by what the candidates' titles say


def held(d: float) -> float:
    return min(max(d, -SAFETY), SAFETY)


def tis(upper: float):
    return lambda deltas: [min(math.exp(held(d)), upper) for d in deltas]


def icepop(low: float, high: float):
    return lambda deltas: [
        math.exp(held(d)) if math.log(low) <= held(d) <= math.log(high) else 0.0 for d in deltas
    ]


def token_mask(low: float, high: float):
    return lambda deltas: [float(math.log(low) <= held(d) <= math.log(high)) for d in deltas]


def product(deltas: list[float]) -> float:
    return held(math.fsum(deltas))


def seq_tis(deltas):
    return [min(math.exp(product(deltas)), 2.0)] * len(deltas)


def seq_mis(deltas):
    inside = math.log(0.5) <= product(deltas) <= math.log(2)
    return [math.exp(product(deltas)) if inside else 0.0] * len(deltas)


def geometric(low: float, high: float):
    def weights(deltas):
        mean = math.fsum(held(d) for d in deltas) / max(len(deltas), 1)
        return [float(math.log(low) <= mean <= math.log(high))] * len(deltas)

    return weights


def geometric_tis(low: float, high: float, upper: float):
    return lambda deltas: [
        kept * w for kept, w in zip(geometric(low, high)(deltas), tis(upper)(deltas), strict=True)
    ]


def veto_tis(floor: float, upper: float):
    return lambda deltas: [0.0 if min(deltas) < math.log(floor) else w for w in tis(upper)(deltas)]


WEIGHTS = {
    "none": lambda deltas: [1.0] * len(deltas),
    "token_tis_1.5": tis(1.5),
    "token_tis_2.0": tis(2.0),
    "token_tis_3.0": tis(3.0),
    "token_tis_5.0": tis(5.0),
    "token_icepop_0.5_2.0": icepop(0.5, 2.0),
    "token_icepop_0.5_5.0": icepop(0.5, 5.0),
    "token_mask_0.5_2.0": token_mask(0.5, 2.0),
    "seq_tis_2.0": seq_tis,
    "seq_mis_0.5_2.0": seq_mis,
    "geo_rs_0.1%": geometric(1 / 1.001, 1 / 0.999),
    "geo_rs_1%": geometric(0.99, 1.01),
    "geo_rs_1%_token_tis_2.0": geometric_tis(0.99, 1.01, 2.0),
    "veto_token_tis_2.0": veto_tis(1e-4, 2.0),
}


# ---------------------------------------------------------------- the sums


@dataclass
class Sums:
    """By candidate and (fold, bucket); by fold; over all tokens."""

    sums: dict[str, dict[tuple[int, int], float]]
    weights: dict[str, float]
    cells: tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]
    spread: float
    moved: dict[int, float]
    sequences: dict[int, float]
    tokens: float


def sums(rows: list[Row], policy: str, ids: bool = True, advantages: bool = True) -> Sums:
    """What `Folds` holds."""
    there = [row for row in rows if row.rollout]
    off, ones, squares = defaultdict(list), defaultdict(list), []
    for row in there:
        for t, d in enumerate(deltas(row, policy)):
            bucket, sign = kind(row, t, ids)
            beyond = math.expm1(min(max(d, -CELL), CELL))
            off[fold(row.key), bucket].append(sign * beyond)
            ones[fold(row.key), bucket].append(sign)
            squares.append(beyond**2)
    sequences = defaultdict(float)
    for row in there:
        sequences[fold(row.key)] += 1
    return Sums(
        {name: _of(there, policy, weigh, ids, advantages) for name, weigh in WEIGHTS.items()},
        {name: math.fsum(w for row in there for w in weigh(deltas(row, policy))) for name, weigh in _all()},
        (_added(off), _added(ones)),
        math.fsum(squares),
        _moved(there, policy) if advantages else {},
        dict(sequences),
        float(sum(len(row.rollout) for row in there)),
    )


def _moved(rows: list[Row], policy: str) -> dict[int, float]:
    """Σ A (r − 1) by fold, r at most 5."""
    found = defaultdict(list)
    for row in rows:
        for d, a in zip(deltas(row, policy), row.advantages, strict=True):
            found[fold(row.key)].append(math.expm1(min(d, CELL)) * a)
    return {at: math.fsum(terms) for at, terms in found.items()}


def deltas(row: Row, policy: str) -> list[float]:
    return [p - q for p, q in zip(row.train[policy], row.rollout, strict=True)]


def _all():
    return WEIGHTS.items()


def _of(rows, policy, weigh, ids, advantages):
    found = defaultdict(list)
    for row in rows:
        for t, w in enumerate(weigh(deltas(row, policy))):
            bucket, sign = coordinate(row, t, ids and advantages)
            a = row.advantages[t] if advantages else 1.0
            score = -math.expm1(min(row.train[policy][t], 0.0))
            found[fold(row.key), bucket].append(sign * a * score * w)
    return _added(found)


def _added(parts):
    return {at: math.fsum(values) for at, values in parts.items()}


# ---------------------------------------------------------------- the estimate


Vectors = list[list[float]]  # by fold, by bucket


@dataclass
class Pairs:
    """Two corrections' sums, and the product of every fold of one with every fold of the other."""

    n: list[float]
    products: list[list[float]]

    @classmethod
    def of(cls, one: Vectors, two: Vectors, n: list[float]) -> Pairs:
        return cls(n, [[math.fsum(x * y for x, y in zip(a, b, strict=True)) for b in two] for a in one])

    def signal(self, leave: int | None = None) -> float:
        """The mean product of two sequences of different folds."""
        folds = [f for f in range(len(self.n)) if f != leave]
        pairs = list(permutations(folds, 2))
        count = math.fsum(self.n[f] * self.n[g] for f, g in pairs)
        return math.fsum(self.products[f][g] for f, g in pairs) / count if count else math.nan

    def noise(self) -> float:
        """The covariance of two sequences' vectors, summed over coordinates."""
        same = math.fsum(self.products[f][f] for f in range(len(self.n)))
        return (same - math.fsum(x * x for x in self.n) * self.signal()) / math.fsum(self.n)


def log_alignment(cross: float, own: float, other: float, mine: float, floor: float) -> float:
    """log of E[ĝ·g] / (|g| √E|ĝ|²), less the reference's own."""
    if not (cross > 0 and other > 0):
        return math.nan
    square = max(own, cross**2 / other)
    return math.log(cross / other) - 0.5 * math.log(square + mine) + 0.5 * math.log(other + floor)


def jackknife(left: list[float], whole: float) -> float:
    if not all(math.isfinite(x) for x in (*left, whole)):
        return math.inf
    middle = math.fsum(left) / len(left)
    return math.sqrt((len(left) - 1) / len(left) * math.fsum((x - middle) ** 2 for x in left))


def estimate(
    mine: Vectors, base: Vectors, n: list[float], kept: float, batch: float, cost: float
) -> dict[str, float]:
    """What `Estimate` holds; `cost` is the bias expected at a distance of 1, a quarter its deviation."""
    apart = [[x - y for x, y in zip(a, b, strict=True)] for a, b in zip(mine, base, strict=True)]
    pairs = ((mine, base), (mine, mine), (base, base), (apart, apart))
    cross, own, other, between = (Pairs.of(a, b, n) for a, b in pairs)
    var, floor = own.noise() / batch, other.noise() / batch
    left = [
        log_alignment(*(one.signal(leave) for one in (cross, own, other)), var, floor)
        for leave in (None, *range(len(n)))
    ]
    there = other.signal()
    if there > 0:
        expected = log_alignment(kept * there, kept**2 * there, there, var, floor)
    else:
        expected = math.log(kept) - 0.5 * math.log(var / floor)
    error = jackknife(left[1:], left[0])
    distance = max(between.noise() / other.noise(), 0.0)
    return {
        "kept": kept,
        "noise": var / floor,
        "expected": expected,
        "measured": left[0],
        "error": error,
        "distance": distance,
        "score": believed(expected - cost * math.sqrt(distance), distance / 16, left[0], error),
    }


def believed(prior: float, variance: float, measured: float, error: float) -> float:
    """The mean of two normal beliefs, each counted by its precision."""
    if not (math.isfinite(measured) and math.isfinite(error)) or variance == 0:
        return prior
    if error == 0:
        return measured
    return (prior / variance + measured / error**2) / (1 / variance + 1 / error**2)


def moved(raised: list[float], n: list[float]) -> float:
    """The sum over folds in standard errors: what is left of each when its share of the mean is taken out."""
    mean = math.fsum(raised) / math.fsum(n)
    spread = math.sqrt(math.fsum((x - mean * m) ** 2 for x, m in zip(raised, n, strict=True)))
    return math.fsum(raised) / spread if spread else 0.0


def cost(raised: list[float], n: list[float], share: float) -> float:
    """The bias expected at a distance of 1: by how surely the trainer moved, and by what r has in common."""
    beyond = min(max(moved(raised, n) - 1, 0.0), 3.0)
    return 0.25 * beyond + 0.1 * math.sqrt(min(max(share, 0.0), 1.0))
