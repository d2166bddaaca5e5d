"""A batch as trainers that loop over samples hold it: plain lists of the tokens that are trained on."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

Listed = list[list[float]]


@dataclass(frozen=True)
class Sample:
    """One response, masked tokens taken out; log-probs in nats. `outside` are the advantages of those."""

    rollout: list[float]
    old: list[float]
    current: list[float]
    advantages: list[float]
    reward: float
    outside: tuple[float, ...] = ()

    def __len__(self) -> int:
        return len(self.rollout)

    def gap(self, train: str = "old") -> list[float]:
        """Compute log π_train − log π_rollout."""
        return [a - b for a, b in zip(getattr(self, train), self.rollout, strict=True)]

    def update(self, anchor: str = "old") -> list[float]:
        """Compute log π_θ − log π_anchor."""
        return [a - b for a, b in zip(self.current, getattr(self, anchor), strict=True)]


def samples(rows: Iterable[dict]) -> list[Sample]:
    """Make samples from rows of a dump; one advantage of a row is given to each of its tokens."""
    return [_sample(row) for row in rows]


def _sample(row: dict) -> Sample:
    kept = [t for t, on in enumerate(row["response_mask"]) if on]
    given = row["advantages"]
    advantages = given if isinstance(given, list) else [given] * len(row["response_mask"])
    columns = (row[f"{policy}_log_probs"] for policy in ("rollout", "old", "current"))
    lists = ([column[t] for t in kept] for column in (*columns, advantages))
    outside = tuple(a for a, on in zip(advantages, row["response_mask"], strict=True) if not on)
    return Sample(*lists, reward=row.get("rewards", 0.0), outside=outside)


def exp(x: float) -> float:
    """Compute e^x, infinite where float64 overflows."""
    return math.exp(x) if x < 709 else math.inf


def clamp(x: float, low: float, high: float) -> float:
    """Clamp x to [low, high]."""
    return min(max(x, low), high)


def mean(values: Sequence[float]) -> float:
    """Average; 0 for none."""
    return math.fsum(values) / max(len(values), 1)


def each(of: Callable[[float], float], lists: Listed) -> Listed:
    """Apply a function to every token."""
    return [[of(x) for x in one] for one in lists]


def flat(lists: Listed) -> list[float]:
    """Concatenate all tokens."""
    return [x for one in lists for x in one]


def clip_wins(ratio: float, advantage: float, low: float = 0.2, high: float = 0.2) -> bool:
    """Return whether PPO's clipped loss is the larger one."""
    return -advantage * clamp(ratio, 1 - low, 1 + high) > -advantage * ratio
