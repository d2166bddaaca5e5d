"""One batch with its bootstrap draws, and what was computed of it."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from offpol_diag.core.devices import CPU, sent
from offpol_diag.core.segments import Segments
from offpol_diag.core.steps import Rule
from offpol_diag.core.sums import Sums
from offpol_diag.dump.batch import Batch
from offpol_diag.engine import bootstrap
from offpol_diag.engine.segments import Array
from offpol_diag.presets import Policy

T = TypeVar("T")


Cut = Callable[[Batch, Rule, Array], Array]
"""Batch, rule over a trainer batch, its statistic [T] → the value from which on tokens are dropped, [T]."""


def evaluator(batch: Batch, cut: Cut | None = None, device: str = CPU) -> Sums:
    """Return what applies presets to a batch, with the cuts of its trainer batches, on a device."""
    logs: dict[Policy, Array | None]
    logs = {"rollout": batch.rollout, "old": batch.old, "current": batch.current}
    return Sums(
        {policy: sent(x, device) for policy, x in logs.items() if x is not None},
        Segments(sent(batch.cu_seqlens, device), batch.tokens),
        Segments(sent(batch.cu_runs, device), batch.tokens),
        None if batch.advantages is None else sent(batch.advantages, device),
        None if cut is None else lambda rule, x: sent(cut(batch, rule, x), device),
    )


@dataclass
class BatchContext:
    """A batch, its bootstrap draws [S, B], and one cache of what was computed of it.

    Attributes:
        device: where presets are computed, `CPU` or a GPU such as "cuda:0"; all else is computed here.
    """

    batch: Batch
    draws: Array
    cut: Cut | None = None
    device: str = CPU
    _memo: dict[Hashable, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def of(
        cls,
        batch: Batch,
        seed: int,
        replicates: int,
        cut: Cut | None = None,
        device: str = CPU,
    ) -> BatchContext:
        """Build with bootstrap draws for every sequence."""
        return cls(batch, bootstrap.draws(batch.key, seed, replicates), cut, device)

    @cached_property
    def evaluator(self) -> Sums:
        """What applies presets to the batch, one at a time."""
        return replace(evaluator(self.batch, self.cut), known=self._memo)

    def cached(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, computed once per key."""
        if key not in self._memo:
            self._memo[key] = make()
        result: T = self._memo[key]
        return result

    def forget(self) -> None:
        """Drop all cached values, which may refer to this object: nothing else would soon."""
        self._memo.clear()

    @property
    def counts(self) -> dict[str, Array]:
        """Denominators of means: tokens, sequences with a token, rows; [S] each."""
        n = self.batch.lengths.astype(np.float64)
        return {"tokens": n, "sequences": (n > 0).astype(np.float64), "rows": np.ones_like(n)}
