"""One batch with its bootstrap draws, and what was computed of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

import numpy as np

from offpol_diag.dump.batch import Batch
from offpol_diag.engine import bootstrap
from offpol_diag.engine.evaluator import Evaluator, Packed
from offpol_diag.engine.scope import NO_FITS, BatchFits
from offpol_diag.engine.segments import Array, Memo

T = TypeVar("T")
CPU = "cpu"


@dataclass
class BatchContext:
    """A batch, its bootstrap draws [S, B], and one cache of what was computed of it.

    Attributes:
        compiled: whether presets are computed by the compiled pass, which takes a second to load.
        device: where presets are computed, `CPU` or a GPU such as "cuda:0"; all else is computed here.
    """

    batch: Batch
    draws: Array
    fits: BatchFits = NO_FITS
    compiled: bool = False
    device: str = CPU
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
    ) -> BatchContext:
        """Build with bootstrap draws for every sequence."""
        return cls(batch, bootstrap.draws(batch.key, seed, replicates), fits, compiled, device)

    @cached_property
    def evaluator(self) -> Evaluator:
        """What applies presets to the batch, one at a time."""
        return Evaluator(Packed(self.batch, self.fits), self._memo)

    def cached(self, key: object, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        return self._memo.cached(key, make)

    def forget(self) -> None:
        """Drop all cached values, which may refer to this object: nothing else would soon."""
        self._memo.clear()

    @property
    def counts(self) -> dict[str, Array]:
        """Denominators of means: tokens, sequences with a token, rows; [S] each."""
        n = self.batch.lengths.astype(np.float64)
        return {"tokens": n, "sequences": (n > 0).astype(np.float64), "rows": np.ones_like(n)}
