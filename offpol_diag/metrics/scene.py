"""One batch as the observers see it: ratios per numerator policy, and how often each sequence is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import resample
from offpol_diag.batch import Batch
from offpol_diag.presets import Policy
from offpol_diag.ratios import Ratios
from offpol_diag.scope import UNSETTLED, Settled

T = TypeVar("T")


@dataclass
class Scene:
    """A batch, its bootstrap draws [S, B], and the log-ratios computed so far."""

    batch: Batch
    draws: Tensor
    settled: Settled = UNSETTLED
    _ratios: dict[str, Ratios] = field(default_factory=dict)
    _memo: dict[object, object] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, batch: Batch, seed: int, replicates: int, settled: Settled = UNSETTLED) -> Scene:
        """Draw for every sequence."""
        return cls(batch, resample.draws(batch.key, seed, replicates), settled)

    def ratios(self, policy: Policy) -> Ratios:
        """π_policy/π_rollout, shared by everything that asks."""
        if policy not in self._ratios:
            self._ratios[policy] = Ratios(self.batch, policy, self.settled, self._ratios)
        return self._ratios[policy]

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, computed once per key."""
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # type: ignore[return-value]

    def forget(self) -> None:
        """Let go of all that was computed; outcomes and ratios know each other, so no one else would soon."""
        for ratios in tuple(self._ratios.values()):
            ratios.forget()
        self._memo.clear()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Columns that every mean divides by: tokens, sequences with a token, rows."""
        n = self.batch.lengths.to(torch.float64)
        return {"tokens": n, "sequences": (n > 0).to(torch.float64), "rows": torch.ones_like(n)}
