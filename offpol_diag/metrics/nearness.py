"""Which tokens are near: a look at all of them block by block, and a closer one at the few that are in doubt.

What `Near` watches costs logarithms and exponentials. Of nearly every token a bound says that the rule passes
it (`doubts.py`); only the others are judged by the rule itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from offpol_diag import correction
from offpol_diag.host import here
from offpol_diag.metrics import doubts
from offpol_diag.metrics.doubts import Doubt, May
from offpol_diag.near import Near
from offpol_diag.presets import Policy, Reject, Weight
from offpol_diag.ratios import Ratios

BLOCK = 1 << 15
"""Tokens of a block: in smaller ones being called costs as much as the work; larger ones leave the cache."""


@dataclass(frozen=True)
class Watched:
    """A rule or a tail that |Δ| alone does not tell.

    Attributes:
        ratios: of its numerator, all tokens.
        passes: some tokens → which of them are near as far as it goes, [T] bool.
        doubt: the radius → which tokens within it must be asked about.
    """

    ratios: Ratios
    passes: Callable[[Ratios], Tensor]
    doubt: Callable[[float], Doubt]

    def take(self, index: Tensor | None, close: Tensor) -> None:
        """Take what fails out of `close` [T]; only the tokens `index` may, or any (None)."""
        whole = self.ratios
        if index is None:
            close &= self.passes(whole)
        elif len(index):
            some = Ratios(whole.batch.some(index), whole.policy, whole.settled, whole=whole)
            close[index] &= self.passes(some)


def close(ratios: Ratios, near: Near) -> Tensor:
    """Which tokens are near, [T] bool; `ratios` are of all tokens, of any numerator."""
    watched = _watched(ratios, near)
    if not here(ratios.batch.rollout):
        return _every(ratios, near.radius, watched)
    asked = [one.doubt(near.radius) for one in watched]
    told = {at: (watched[at].ratios.policy, doubt) for at, doubt in enumerate(asked) if callable(doubt)}
    found, known = _look(ratios, near.radius, told)
    for at, (one, doubt) in enumerate(zip(watched, asked, strict=True)):
        one.take(known[at] if callable(doubt) else doubt, found)
    return found


def _watched(ratios: Ratios, near: Near) -> list[Watched]:
    return [_rule(ratios.of(policy), rule) for policy, rule in near.rules] + [
        _tail(ratios.of(policy), weight) for policy, weight in near.tails
    ]


def _rule(ratios: Ratios, rule: Reject) -> Watched:
    return Watched(
        ratios,
        lambda some: correction.passes(some, rule).values,
        lambda radius: doubts.of_rule(ratios, rule, radius),
    )


def _tail(ratios: Ratios, weight: Weight) -> Watched:
    return Watched(
        ratios,
        lambda some: ~correction.in_tail(some, weight),
        lambda radius: doubts.of_tail(ratios, weight, radius),
    )


def _every(ratios: Ratios, radius: float, watched: list[Watched]) -> Tensor:
    """The same with no look before: on a GPU no shape may depend on values."""
    everything = slice(None)
    found = torch.ones(ratios.batch.tokens, dtype=torch.bool, device=ratios.batch.rollout.device)
    for gap in _gaps(ratios):
        found &= gap(everything).abs() <= radius
    for one in watched:
        one.take(None, found)
    return found


def _gaps(ratios: Ratios) -> list[Callable[[slice], Tensor]]:
    """Every log-ratio that a preset or a loss may look at, of some tokens in a row."""
    batch = ratios.batch
    old, current, policies = batch.old, batch.current, ("old", "current")
    deltas = [ratios.of(policy).delta for policy in policies if batch.policy(policy) is not None]  # type: ignore[arg-type]
    found: list[Callable[[slice], Tensor]] = [lambda at, x=x: x[at] for x in deltas]  # type: ignore[misc]
    if old is not None and current is not None:
        found.append(lambda at: current[at] - old[at])
    return found


# ---------------------------------------------------------------- block by block


def _look(
    ratios: Ratios, radius: float, told: Mapping[int, tuple[Policy, May]]
) -> tuple[Tensor, dict[int, Tensor]]:
    """Tokens whose log-ratios all lie within the radius, [T] bool; and those of them that are in doubt."""
    close, gaps, q = (
        np.empty(ratios.batch.tokens, dtype=np.bool_),
        _gaps(ratios),
        ratios.batch.rollout.numpy(),
    )
    deltas = {policy: ratios.of(policy).delta.numpy() for policy, _ in told.values()}
    suspects: dict[int, list[NDArray[np.int64]]] = {key: [] for key in told}
    for begin in range(0, len(close), BLOCK):
        at = slice(begin, begin + BLOCK)
        _within([gap(at).numpy() for gap in gaps], radius, close[at])
        for key, (policy, may) in told.items():
            suspects[key].append(np.flatnonzero(may(deltas[policy][at], q[at]) & close[at]) + begin)
    none = np.zeros(0, dtype=np.int64)
    return torch.from_numpy(close), {
        key: torch.from_numpy(np.concatenate((none, *found))) for key, found in suspects.items()
    }


def _within(gaps: list[NDArray[np.float64]], radius: float, close: NDArray[np.bool_]) -> None:
    """Where all log-ratios lie within the radius; NaN does not."""
    size, inside = np.empty(len(close)), np.ones_like(close)
    close[:] = True
    for gap in gaps:
        close &= np.less_equal(np.abs(gap, out=size), radius, out=inside)
