"""One batch as the observers see it: ratios per numerator policy, and how often each sequence is drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import resample
from offpol_diag.accumulators import Floor
from offpol_diag.batch import Batch, places
from offpol_diag.memo import Memo
from offpol_diag.metrics.nearness import close
from offpol_diag.moments import Moments
from offpol_diag.near import Near, neutral, splits
from offpol_diag.presets import Policy, Preset
from offpol_diag.ratios import Apart, Ratios
from offpol_diag.scope import UNSETTLED, Settled

T = TypeVar("T")
POLICIES: tuple[Policy, ...] = ("rollout", "old", "current")


@dataclass
class Scene:
    """A batch, its bootstrap draws [S, B], and the log-ratios computed so far.

    Attributes:
        near: what makes a token near; None: all tokens are looked at preset by preset.
        floors: by tail, what earlier batches say of it; None for a batch by itself.
    """

    batch: Batch
    draws: Tensor
    settled: Settled = UNSETTLED
    near: Near | None = None
    floors: dict[str, Floor] | None = None
    _ratios: dict[str, Ratios] = field(default_factory=dict)
    _memo: Memo = field(default_factory=Memo, repr=False)
    _parts: tuple[Ratios, Ratios] | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        batch: Batch,
        seed: int,
        replicates: int,
        settled: Settled = UNSETTLED,
        near: Near | None = None,
    ) -> Scene:
        """Draw for every sequence."""
        return cls(batch, resample.draws(batch.key, seed, replicates), settled, near)

    def ratios(self, policy: Policy) -> Ratios:
        """π_policy/π_rollout, shared by everything that asks."""
        if policy not in self._ratios:
            self._ratios[policy] = Ratios(self.batch, policy, self.settled, self._ratios)
        return self._ratios[policy]

    @property
    def numerators(self) -> tuple[Ratios, ...]:
        """The ratios that were asked for so far."""
        return tuple(self._ratios.values())

    def parts(self, preset: Preset) -> tuple[tuple[Ratios, Preset], ...]:
        """The tokens the preset can act on, and all others with what is left of the preset for them.

        One part with all tokens, where the preset looks beyond single tokens or sequences.
        """
        if self.near is None or not splits(preset, self.near.radius):
            return ((self.ratios(preset.policy), preset),)
        far, close = self.apart
        return (far.of(preset.policy), preset), (close.of(preset.policy), neutral(preset))

    def divides(self, preset: Preset) -> bool:
        """Whether near tokens are looked at apart."""
        return self.near is not None and self.near.divides(preset)

    @property
    def moments(self) -> Moments:
        """Of the near tokens; there must be something that makes a token near."""
        moments = self.apart[1].moments
        assert moments is not None
        return moments

    @property
    def apart(self) -> tuple[Ratios, Ratios]:
        """Far tokens and near ones; there must be something that makes a token near."""
        if self._parts is None:
            assert self.near is not None
            self._parts = self._split(self.near)
        return self._parts

    def judge_apart(self) -> None:
        """From now on whole sequences are judged by far tokens and what is known of near ones."""
        assert self.near is not None
        far, close = self.apart
        for policy in POLICIES:
            if self.batch.has(policy):
                parts = far.of(policy), close.of(policy)
                self.ratios(policy).apart = Apart(*parts, self.near.radius, self.near.leaves)

    def _split(self, near: Near) -> tuple[Ratios, Ratios]:
        """The same batch's far and near tokens."""
        whole = self.ratios("rollout")
        far = places(~close(whole, near))
        few, rest = self.batch.some(far), self.batch.some(None, far)
        return (
            Ratios(few, "rollout", self.settled, whole=whole),
            Ratios(rest, "rollout", self.settled, whole=whole, moments=Moments.near(self.batch, far)),
        )

    def floor(self, tail: str) -> Floor | None:
        """Below what no value of a tail counts any more."""
        return None if self.floors is None else self.floors.setdefault(tail, Floor())

    def once(self, key: object, make: Callable[[], T]) -> T:
        """`make()`, computed once per key."""
        return self._memo.once(key, make)

    def slim(self) -> None:
        """Let go of what is as long as the tokens; who asks again gets it made again."""
        size = max(2 * self.batch.sequences, 4096)
        self._memo.slim(size)
        for ratios in (*self._ratios.values(), *(self._parts or ())[1:]):
            ratios.slim(size)

    def forget(self) -> None:
        """Let go of all that was computed; outcomes and ratios know each other, so no one else would soon."""
        for ratios in (*self._ratios.values(), *(self._parts or ())):
            ratios.forget()
        self._parts = None
        self._memo.clear()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Columns that every mean divides by: tokens, sequences with a token, rows."""
        n = self.batch.lengths.to(torch.float64)
        return {"tokens": n, "sequences": (n > 0).to(torch.float64), "rows": torch.ones_like(n)}
