"""One batch as the observers see it: ratios per numerator policy, and how often each sequence is drawn."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from offpol_diag import resample
from offpol_diag.batch import Batch
from offpol_diag.presets import Policy
from offpol_diag.ratios import Ratios


@dataclass
class Scene:
    """A batch, its bootstrap draws [S, B], and the log-ratios computed so far."""

    batch: Batch
    draws: Tensor
    _ratios: dict[str, Ratios] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, seed: int, replicates: int) -> Scene:
        """Draw for every sequence."""
        return cls(batch, resample.draws(batch.key, seed, replicates))

    def ratios(self, policy: Policy) -> Ratios:
        """π_policy/π_rollout, shared by everything that asks."""
        if policy not in self._ratios:
            source = Ratios(self.batch, policy)
            if policy == "rollout":
                source.once("delta", lambda: torch.zeros_like(self.batch.rollout))
            self._ratios[policy] = source
        return self._ratios[policy]

    def forget(self) -> None:
        """Let go of all that was computed; outcomes and ratios know each other, so no one else would soon."""
        for ratios in self._ratios.values():
            ratios.forget()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Columns that every mean divides by: tokens, sequences with a token, rows."""
        n = self.batch.lengths.to(torch.float64)
        return {"tokens": n, "sequences": (n > 0).to(torch.float64), "rows": torch.ones_like(n)}
