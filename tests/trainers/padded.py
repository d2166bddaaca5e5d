"""The right-padded batch [B, L], float64, that trainers are given, and the form of what they return.

`gap` is log π_train − log π_rollout of the sampled token. A trainer's answer is a `Verdict`. Numbers within
1e-12 of a bound count as equal to it: whether a bound is part of its band is a trainer's decision, how
exp(log(b)) rounds is not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

NEAR = 1e-12


@dataclass(frozen=True)
class Padded:
    """A batch as a trainer holds it, [B, L] each; values where `mask` is False mean nothing.

    Attributes:
        rollout: log π_rollout, nats.
        old: log π_old.
        current: log π_θ.
        mask: response tokens that are trained on.
        advantages: of each token.
        entropy: of the current policy, where a dump has it.
    """

    rollout: np.ndarray
    old: np.ndarray
    current: np.ndarray
    mask: np.ndarray
    advantages: np.ndarray
    entropy: np.ndarray | None = None

    def gap(self, train: str = "old") -> np.ndarray:
        """Compute log π_train − log π_rollout, [B, L]; 0 where masked."""
        return np.where(self.mask, getattr(self, train) - self.rollout, 0.0)

    def row_advantage(self) -> np.ndarray:
        """Compute the mean advantage of each row, [B, 1], for trainers with one advantage per completion."""
        return row_mean(self.advantages, self.mask)


@dataclass(frozen=True)
class Verdict:
    """A trainer's treatment of each token, [B, L].

    Attributes:
        factor: what its loss is multiplied by; 0 where it is masked or dropped.
        counted: whether it is one of the tokens that the loss is divided by.
    """

    factor: np.ndarray
    counted: np.ndarray


def padded(rows: list[dict]) -> Padded:
    """Pad rows of a dump, as lists, on the right; `advantages` may be one number or a list."""
    width = max(len(row["rollout_log_probs"]) for row in rows)

    def block(values, fill):
        return np.array([[*row, *([fill] * (width - len(row)))] for row in values])

    lengths = [len(row["rollout_log_probs"]) for row in rows]
    advantages = [np.broadcast_to(row["advantages"], n) for row, n in zip(rows, lengths, strict=True)]
    return Padded(
        rollout=block((row["rollout_log_probs"] for row in rows), 0.0),
        old=block((row["old_log_probs"] for row in rows), 0.0),
        current=block((row["current_log_probs"] for row in rows), 0.0),
        mask=block((row["response_mask"] for row in rows), 0).astype(bool),
        advantages=block(advantages, 0.0),
        entropy=block((row["entropy"] for row in rows), 0.0) if "entropy" in rows[0] else None,
    )


def exp(x: np.ndarray) -> np.ndarray:
    """Compute e^x, infinite where float64 overflows."""
    with np.errstate(over="ignore"):
        return np.exp(x)


def row_sum(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Sum each row, [B, 1]."""
    return np.where(mask, x, 0.0).sum(axis=1, keepdims=True)


def row_mean(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Average each row, [B, 1]; 0 for a row without a token."""
    return row_sum(x, mask) / np.maximum(mask.sum(axis=1, keepdims=True), 1)


def over(x: np.ndarray, bound: float | None) -> np.ndarray:
    """Return where x is strictly above the bound; nowhere without one."""
    return np.zeros(np.shape(x), bool) if bound is None else x > bound + NEAR * abs(bound)


def under(x: np.ndarray, bound: float | None) -> np.ndarray:
    """Return where x is strictly below the bound; nowhere without one."""
    return np.zeros(np.shape(x), bool) if bound is None else x < bound - NEAR * abs(bound)


def within(x: np.ndarray, low: float | None, high: float | None) -> np.ndarray:
    """Return where x is in the band, its ends included."""
    return ~over(x, high) & ~under(x, low)


def verdict_of(
    p: Padded, factor: np.ndarray, keep: np.ndarray | bool = True, *, counted: bool = True
) -> Verdict:
    """Return the factor on kept tokens; with `counted` dropped ones still divide the loss."""
    alive = p.mask & keep
    return Verdict(np.where(alive, factor, 0.0), p.mask.copy() if counted else alive)
