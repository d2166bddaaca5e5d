"""Dumps for the trainers: ragged, in several turns, far off-policy, and on and beside every bound."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BOUNDS = (0.1, 0.125, 0.2, 0.5, 0.8, 0.99, 0.999, 1.001, 1.002, 1.01, 1.05, 1.2, 2.0, 3.0, 5.0, 8.0, 10.0)
FAR_BOUNDS = (1e-4, 100.0)
NATS = (0.7, -0.1, -0.5, 2.0, -1e-4)
"""Bounds that trainers put on Δ itself, or (2.0) on Δ²/2."""
HAIR = 3e-5
"""Relative distance from a bound, and the largest on a log."""
WILD = (-100.0, -25.0, 25.0, 100.0)


def masked_rows(rng: np.random.Generator, many: int, *, scalar: bool, wild: bool = True) -> list[dict]:
    """Make rows of 0 to 40 tokens, σ(Δ) from 1e-3 to 3, some leaning one way, some with a token far off."""
    return [_row(rng, i, scalar=scalar, wild=wild) for i in range(many)]


def _row(rng: np.random.Generator, i: int, *, scalar: bool, wild: bool) -> dict:
    n = int(rng.integers(0, 41)) if i % 5 else int(rng.integers(0, 4))
    sigma = 10 ** rng.uniform(-3, math.log10(3))
    lean = (0.0, 0.0, 0.0, sigma, -sigma, 1.5, -1.5)[i % 7]
    old = lean + sigma * rng.standard_normal(n)
    current = old + sigma / 3 * rng.standard_normal(n)
    far = rng.random(n) < (0.0, 0.0, 0.1 * wild)[i % 3]
    old = np.where(far, rng.choice(WILD, n), old)
    current = np.where(far & (rng.random(n) < 0.7), old, current)
    rollout = -rng.exponential(rng.choice((0.05, 0.5, 3.0)), n) - np.maximum(0, np.maximum(old, current))
    advantages = np.where(rng.random(n) < 0.2, 0.0, rng.standard_normal(n)) + (i % 4 == 0)
    return {
        "rollout_log_probs": rollout.tolist(),
        "old_log_probs": (rollout + old).tolist(),
        "current_log_probs": (rollout + current).tolist(),
        "response_mask": _turns(rng, n).tolist() if i % 2 else [1] * n,
        "advantages": float(rng.choice((-1.5, -0.3, 0.0, 0.8))) if scalar else advantages.tolist(),
    }


def _turns(rng: np.random.Generator, n: int) -> np.ndarray:
    """Draw a mask: 1 for tokens of the model, 0 for tools' text in between; now and then nothing is left."""
    flips = rng.random(n) < 0.25
    return (np.cumsum(flips) + int(rng.integers(0, 2))) % 2


def rows_on_bounds() -> list[dict]:
    """Make rows whose token ratio, product, geometric mean or Δ is exactly a bound, for each sign of A."""
    deltas = [math.log(bound) for bound in BOUNDS + FAR_BOUNDS] + list(NATS)
    shapes = [one for x in deltas for one in ([x], [x / 2, x / 2], [x, x], [x, x, x, x])]
    return [exact_row(shape, advantage=a) for shape in shapes for a in (-1.0, 0.0, 1.0)]


def rows_beside_bounds() -> list[dict]:
    """Make rows a hair inside or outside a bound: alone, beside tokens close to 1, or as part of a mean."""
    logs = [math.log(bound) for bound in (*BOUNDS, *FAR_BOUNDS)] + [*NATS, 0.01, -0.01]
    logs += [bisect(lambda x: math.expm1(-x) + x, goal, 0.0, -9.0) for goal in (1.0, 0.01)]  # 1/r − 1 + Δ
    logs += [sign * math.sqrt(2 * goal) for goal in (2.0, 0.01) for sign in (-1, 1)]  # Δ²/2
    logs += [sign * math.log(1 + goal) for goal in (1.1,) for sign in (-1, 1)]  # |r − 1|, e^|Δ| − 1
    logs += [sign * math.log(2.0) for sign in (-1, 1)]
    shapes = []
    for x in (log + hair * min(1, abs(log)) for log in logs for hair in (-HAIR, HAIR)):
        shapes += [[x], [x, 1e-3, 1e-3, 1e-3, 1e-3], [x / 2, x / 2], [x, -x]]
        shapes += [[4.5, 2 * x - 4.5], [-4.5, 2 * x + 4.5], [1.0, 2 * x - 1.0]]
    shapes += [[0.0099] * 200, [-0.0099] * 200, [25.0, -25.0, 1e-4], [100.0, -100.0, 1e-4], [15.0, -15.0]]
    return [exact_row(shape, advantage=a) for shape in shapes for a in (-1.0, 0.0, 1.0)]


def rows_beside_probabilities() -> list[dict]:
    """Make tokens whose probability moved, or whose coin's KL is, a hair less or more than a bound."""
    pairs = []
    for hair in (-HAIR, HAIR):
        for move in (0.1 * (1 + hair), 0.2 * (1 + hair)):
            pairs += [(0.3, 0.3 + move), (0.6, 0.6 - move)]
        goal = 0.2 * (1 + hair)
        pairs += [(0.4, bisect(lambda pi: coin_kl(0.4, pi), goal, 0.4, end)) for end in (0.999, 0.001)]
    shapes = [
        one for pair in pairs for one in ([pair], [pair, pair], [pair, (0.5, 0.5)], [pair] * 2 + [(0.7, 0.7)])
    ]
    shapes += [[(q, q + (p - q) / 2)] * 2 for q, p in pairs] + [
        [(q, q + 2 * (p - q)), (0.5, 0.5)] for q, p in pairs
    ]
    legal = [shape for shape in shapes if all(0 < x < 1 for pair in shape for x in pair)]
    return [probable_row(shape, advantage=a) for shape in legal for a in (-1.0, 0.0, 1.0)]


def coin_kl(mu: float, pi: float) -> float:
    return mu * math.log(mu / pi) + (1 - mu) * math.log((1 - mu) / (1 - pi))


def bisect(f, goal: float, low: float, high: float) -> float:
    """Find the point in [low, high] where f, below the goal at `low` and above at `high`, reaches it."""
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if f(middle) < goal else (low, middle)
    return (low + high) / 2


def exact_row(deltas, *, current=None, advantage=1.0) -> dict:
    """Make a row whose old and rollout log-probs differ by exactly these numbers: one of the two is 0."""
    current = deltas if current is None else current
    rollout = [-max(x, y, 0.0) for x, y in zip(deltas, current, strict=True)]
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": [q + x for q, x in zip(rollout, deltas, strict=True)],
        "current_log_probs": [q + x for q, x in zip(rollout, current, strict=True)],
        "response_mask": [1] * len(rollout),
        "advantages": advantage,
    }


def probable_row(pairs, *, advantage=1.0) -> dict:
    """Make a row of tokens of given (π_rollout, π_train), the latter both old and current."""
    rollout, train = ([math.log(pair[i]) for pair in pairs] for i in (0, 1))
    return {
        "rollout_log_probs": rollout,
        "old_log_probs": train,
        "current_log_probs": train,
        "response_mask": [1] * len(rollout),
        "advantages": advantage,
    }


def write(rows: list[dict], path: Path) -> str:
    """Write the rows as a Parquet file."""
    lists = pa.list_(pa.float64())
    scalar = not isinstance(rows[0].get("advantages"), list)
    kinds = {
        "rollout_log_probs": lists,
        "old_log_probs": lists,
        "current_log_probs": lists,
        "response_mask": pa.list_(pa.int8()),
        "advantages": pa.float64() if scalar else lists,
        "rewards": pa.float64(),
        "entropy": lists,
        "step": pa.int64(),
    }
    kinds = {name: kind for name, kind in kinds.items() if name in rows[0]}
    pq.write_table(
        pa.table({name: pa.array([row[name] for row in rows], kind) for name, kind in kinds.items()}), path
    )
    return str(path)
