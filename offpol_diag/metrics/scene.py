"""One batch as the observers see it: ratios per numerator policy, and how often each sequence is drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from offpol_diag import resample
from offpol_diag.accumulators import Floor
from offpol_diag.batch import Batch, places
from offpol_diag.host import here
from offpol_diag.memo import Memo
from offpol_diag.metrics.deeds import Deed
from offpol_diag.metrics.nearness import close
from offpol_diag.near import Asked, Near, neutral, splits
from offpol_diag.presets import Over, Policy, Preset, Statistic
from offpol_diag.ratios import ROWS, Apart, Ratios
from offpol_diag.scope import UNSETTLED, Settled

T = TypeVar("T")


@dataclass
class Scene:
    """A batch, its bootstrap draws [S, B], and the log-ratios computed so far.

    Attributes:
        near: what makes a token near; None: all tokens are looked at preset by preset.
        learned: takes down what is asked of near tokens, in a rehearsal; else None.
        floors: by tail, what earlier batches say of it; None for a batch by itself.
        deeds: what each preset did to the batch, by name; empty where that is not known.
    """

    batch: Batch
    draws: Tensor
    settled: Settled = UNSETTLED
    near: Near | None = None
    learned: Asked | None = None
    floors: dict[str, Floor] | None = None
    deeds: Mapping[str, Deed] = field(default_factory=dict, repr=False)
    _ratios: dict[str, Ratios] = field(default_factory=dict)
    _memo: Memo = field(default_factory=Memo, repr=False)
    _parts: tuple[Ratios, Ratios] | None = field(default=None, repr=False)
    _more: list[Ratios] = field(default_factory=list, repr=False)

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
        """Whether near tokens are looked at apart.

        By cells on a CPU only: to look at every token costs a GPU less than to say how many cells there are.
        """
        if self.near is None or not self.near.divides(preset):
            return False
        return splits(preset, self.near.radius) or here(self.batch.rollout)

    @property
    def apart(self) -> tuple[Ratios, Ratios]:
        """Far tokens and near ones; there must be something that makes a token near."""
        if self._parts is None:
            assert self.near is not None
            self._parts = self._split(self.near)
        return self._parts

    def asked_of_sequences(self) -> Asked:
        """What has to be known of near tokens so that whole sequences can be judged apart."""
        return {
            (ratios.policy, (ROWS, statistic, how)): partial(_of_sequences, statistic, how)
            for ratios in self._ratios.values()
            for statistic, how in ratios.asked_of_sequences()
        }

    def judge_apart(self) -> None:
        """From now on whole sequences are judged by far tokens and what is known of near ones."""
        assert self.near is not None
        far, close = self.apart
        for policy, whole in self._ratios.items():
            one, two = far.of(policy), close.of(policy)  # type: ignore[arg-type]
            whole.apart = Apart(one, two, self.near.radius, self.near.leaves)

    def own(self, ratios: Ratios) -> Ratios:
        """Ratios of some tokens more, let go of with all others."""
        self._more.append(ratios)
        return ratios

    def _split(self, near: Near) -> tuple[Ratios, Ratios]:
        """The same batch's far and near tokens."""
        whole = self.ratios("rollout")
        far = places(~close(whole, near))
        one, two = (
            Ratios(some, "rollout", self.settled, whole=whole)
            for some in (self.batch.some(far), self.batch.some(None, far))
        )
        return one, two

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
        for ratios in (*self._ratios.values(), *(self._parts or ())[1:], *self._more):
            ratios.slim(size)

    def forget(self) -> None:
        """Let go of all that was computed; outcomes and ratios know each other, so no one else would soon."""
        for ratios in (*self._ratios.values(), *(self._parts or ()), *self._more):
            ratios.forget()
        self._parts = None
        self._more.clear()
        self._memo.clear()

    @property
    def counts(self) -> dict[str, Tensor]:
        """Columns that every mean divides by: tokens, sequences with a token, rows."""
        n = self.batch.lengths.to(torch.float64)
        return {"tokens": n, "sequences": (n > 0).to(torch.float64), "rows": torch.ones_like(n)}


def _of_sequences(statistic: Statistic, how: Over, scene: Scene, close: Ratios) -> Tensor:
    return close.of_sequences(statistic, how)
