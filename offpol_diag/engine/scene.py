"""One batch with its bootstrap draws and its log-ratios, computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag.batch import Batch
from offpol_diag.engine import accumulators
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scope import NO_FITS, BatchFits
from offpol_diag.engine.segments import Memo
from offpol_diag.presets import Policy

T = TypeVar("T")


@dataclass
class Scene:
    """A batch, its bootstrap draws [S, B], and the log-ratios computed so far.

    Attributes:
        compiled: whether presets are computed by the compiled pass, which takes a second to load.
    """

    batch: Batch
    draws: Tensor
    fits: BatchFits = NO_FITS
    compiled: bool = False
    _ratios: dict[str, Ratios] = field(default_factory=dict)
    _memo: Memo = field(default_factory=Memo, repr=False)

    @classmethod
    def of(
        cls, batch: Batch, seed: int, replicates: int, fits: BatchFits = NO_FITS, compiled: bool = False
    ) -> Scene:
        """Build with bootstrap draws for every sequence."""
        return cls(batch, accumulators.draws(batch.key, seed, replicates), fits, compiled)

    def ratios(self, policy: Policy) -> Ratios:
        """Return the ratios π_policy/π_rollout, computed once."""
        if policy not in self._ratios:
            self._ratios[policy] = Ratios(self.batch, policy, self.fits, self._ratios)
        return self._ratios[policy]

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        return self._memo.once(key, make)

    def forget(self) -> None:
        """Drop all cached values; they and the ratios form reference cycles, so nothing else would soon."""
        for ratios in tuple(self._ratios.values()):
            ratios.forget()
        self._memo.clear()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Denominators of means: tokens, sequences with a token, rows; [S] each."""
        n = self.batch.lengths.to(torch.float64)
        return {"tokens": n, "sequences": (n > 0).to(torch.float64), "rows": torch.ones_like(n)}
