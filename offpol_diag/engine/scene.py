"""One batch with its bootstrap draws and its log-ratios, computed once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from offpol_diag.batch import Batch
from offpol_diag.engine import bootstrap
from offpol_diag.engine.ratios import Ratios
from offpol_diag.engine.scope import NO_FITS, BatchFits
from offpol_diag.engine.segments import Array, Memo
from offpol_diag.presets import Policy

T = TypeVar("T")
CPU = "cpu"


@dataclass
class Scene:
    """A batch, its bootstrap draws [S, B], and the log-ratios computed so far.

    Attributes:
        compiled: whether presets are computed by the compiled pass, which takes a second to load.
        device: where presets are computed, `CPU` or a GPU such as "cuda:0"; all else is computed here.
    """

    batch: Batch
    draws: Array
    fits: BatchFits = NO_FITS
    compiled: bool = False
    device: str = CPU
    _ratios: dict[str, Ratios] = field(default_factory=dict)
    _memo: Memo = field(default_factory=Memo, repr=False)

    @classmethod
    def of(
        cls,
        batch: Batch,
        seed: int,
        replicates: int,
        fits: BatchFits = NO_FITS,
        compiled: bool = False,
        device: str = CPU,
    ) -> Scene:
        """Build with bootstrap draws for every sequence."""
        return cls(batch, bootstrap.draws(batch.key, seed, replicates), fits, compiled, device)

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
    def counts(self) -> dict[str, Array]:
        """Denominators of means: tokens, sequences with a token, rows; [S] each."""
        n = self.batch.lengths.astype(np.float64)
        return {"tokens": n, "sequences": (n > 0).astype(np.float64), "rows": np.ones_like(n)}
