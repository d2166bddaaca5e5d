"""A packed batch of sequences: what the readers make and everything else consumes.

No padding and no mask exist here: the readers drop what the mask excludes. Shapes: T tokens, S sequences, R
runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from offpol_diag.engine import segments
from offpol_diag.engine.host import here, sent

POLICIES = ("rollout", "old", "current")
PER_TOKEN = ("rollout", "old", "current", "advantages", "position", "token_ids", "entropy")

FEW = 4
"""Tokens that are left out of a batch are few where there are this many times as many others."""


def places(flags: Tensor) -> Tensor:
    """Where flags are set, rising."""
    if here(flags):  # numpy takes a sixth of the time
        return torch.from_numpy(np.flatnonzero(flags.numpy()))
    return torch.nonzero(flags).flatten()


@dataclass(frozen=True)
class Batch:
    """Unmasked response tokens of S sequences, packed.

    Attributes:
        rollout: log π_rollout of the sampled token, [T] float64, nats.
        old: log π_old, [T] float64, or None when the dump has no such column.
        current: log π_θ, [T] float64, or None.
        cu_seqlens: where each sequence starts, [S+1] int64. A sequence may be empty (all of it was masked).
        cu_runs: where each contiguous run of unmasked tokens (a turn) starts, [R+1] int64; runs nest in
            sequences.
        position: index of each token in its response as it was sampled, masked tokens counted, [T] int64.
        key: a hash of the group (prompt) each sequence belongs to, [S] int64: the unit of the bootstrap.
        advantages: [T] float64, or None.
        rewards: [S] float64, or None.
        token_ids: [T] int64, or None.
        entropy: entropy of the sampled distribution at each token, [T] float64, nats, or None.
        scalars: other per-sequence columns by name (sequence_id, group_id, step, policy_lag, host, …), host
            lists of length S, None where null.
        masked: tokens that the mask excluded, per sequence, [S] int64.
        masked_negative: those of them with A < 0, [S] int64; None where the dump has no advantage of each
            token: then they have the advantage of their sequence.
    """

    rollout: Tensor
    cu_seqlens: Tensor
    cu_runs: Tensor
    position: Tensor
    key: Tensor
    masked: Tensor
    old: Tensor | None = None
    current: Tensor | None = None
    advantages: Tensor | None = None
    rewards: Tensor | None = None
    masked_negative: Tensor | None = None
    token_ids: Tensor | None = None
    entropy: Tensor | None = None
    scalars: dict[str, list[object]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """T."""
        return self.rollout.numel()

    @property
    def sequences(self) -> int:
        """S, empty ones included."""
        return self.cu_seqlens.numel() - 1

    @cached_property
    def lengths(self) -> Tensor:
        """Unmasked tokens per sequence, [S] int64."""
        return segments.lengths(self.cu_seqlens)

    @cached_property
    def turns(self) -> Tensor:
        """Where the turns of each sequence start among all turns, [S+1] int64."""
        starts = torch.searchsorted(self.cu_runs[:-1], self.cu_seqlens[:-1])
        many = len(self.cu_runs) - 1
        return segments.sized(torch.cat((starts, sent(torch.tensor([many]), starts.device))), many)

    def policy(self, name: str) -> Tensor | None:
        """The log-probs of one of `POLICIES`, [T] float64, or None when the dump lacks them."""
        found: Tensor | None = getattr(self, name)
        return found

    def has(self, name: str) -> bool:
        """Whether it has a column of tokens."""
        return getattr(self, name) is not None

    def some(self, index: Tensor | None, without: Tensor | None = None) -> Some:
        """All sequences with only some of their tokens, `index` [K] rising; turns are not told apart.

        `without` are all other tokens, rising, where they are known and few; one of both is enough.
        """
        every = Some.of(self, index, without)
        many = self.tokens - len(without) if without is not None else len(every.index)
        starts = segments.sized(every.before(self.cu_seqlens), many)
        return every.by(cu_seqlens=starts, cu_runs=starts)

    def halves(self) -> tuple[Batch, Batch]:
        """Two batches in order, cut between sequences near the middle token; of two sequences or more."""
        middle = int(torch.searchsorted(self.cu_seqlens, self.tokens // 2))
        at = min(max(middle, 1), self.sequences - 1)
        return self.rows(0, at), self.rows(at, self.sequences)

    def parts(self, most: int) -> list[Batch]:
        """In order, as even as can be, each of at most so many sequences, or of one."""
        many = max(math.ceil(self.sequences / max(most, 1)), 1)
        cuts = [self.sequences * i // many for i in range(many + 1)]
        return [self] if many == 1 else [self.rows(begin, end) for begin, end in pairwise(cuts)]

    def rows(self, begin: int, end: int) -> Batch:
        """The sequences from one to before another; what a sequence holds is not copied."""
        first, last = (int(self.cu_seqlens[at]) for at in (begin, end))
        runs = self.cu_runs[(self.cu_runs > first) & (self.cu_runs < last)]
        ends = self.cu_runs.new_tensor([first, last] if last > first else [first])
        return self._cut(
            slice(first, last),
            cu_seqlens=self.cu_seqlens[begin : end + 1] - first,
            cu_runs=torch.cat((ends[:1], runs, ends[1:])) - first,
            key=self.key[begin:end],
            masked=self.masked[begin:end],
            rewards=None if self.rewards is None else self.rewards[begin:end],
            masked_negative=None if self.masked_negative is None else self.masked_negative[begin:end],
            scalars={name: column[begin:end] for name, column in self.scalars.items()},
        )

    def _cut(self, at: slice, **of_rows: Any) -> Batch:
        """Some of the tokens in a row, and what else becomes of the batch."""
        values: dict[str, Any] = {
            name: None if (x := getattr(self, name)) is None else x[at] for name in PER_TOKEN
        }
        return replace(self, **values, **of_rows)

    def over(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with a function applied to every tensor."""
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: function(x) if isinstance(x, Tensor) else x for name, x in found.items()
        }
        return Batch(**moved)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on another device; the host remembers how many tokens there are."""
        batch = self.over(lambda x: x.to(device, non_blocking=non_blocking))
        for offsets in (batch.cu_seqlens, batch.cu_runs):
            segments.sized(offsets, self.tokens)
        return batch


class Some(Batch):
    """Some of a batch's tokens; a column is copied when it is first asked for.

    Attributes:
        whole: the batch.
        without: all other tokens, where that is known and `index` rises; else None.
    """

    whole: Batch
    without: Tensor | None

    @classmethod
    def of(cls, whole: Batch, index: Tensor | None, without: Tensor | None = None, **changes: Any) -> Some:
        """Of a batch, whose rows they have unless `changes` says what else."""
        made = cls.__new__(cls)
        own = {f.name: getattr(whole, f.name) for f in fields(whole) if f.name not in (*PER_TOKEN, *changes)}
        vars(made).update(own | changes, whole=whole, without=without)
        if index is not None:
            vars(made)["index"] = index
        return made

    def by(self, **of_rows: Any) -> Some:
        """The same tokens by other rows."""
        return Some.of(self.whole, vars(self).get("index"), self.without, **of_rows)

    @cached_property
    def index(self) -> Tensor:
        """Which tokens, [K] int64; found when it is first asked for where all others tell it."""
        assert self.without is not None
        there = torch.ones(self.whole.tokens, dtype=torch.bool, device=self.without.device)
        there.index_fill_(0, self.without, False)
        return places(there)

    def before(self, at: Tensor) -> Tensor:
        """How many of the tokens, which rise, stand before places in the batch."""
        if self.without is None:
            return torch.searchsorted(self.index, at)
        return at - torch.searchsorted(self.without, at)

    def nth(self, k: Tensor) -> Tensor:
        """Where in the batch some of the tokens stand, counted from 0."""
        if self.without is None:
            return self.index[k]
        before = self.without - torch.arange(len(self.without), device=k.device)
        return k + torch.searchsorted(before, k, right=True)

    @property
    def tokens(self) -> int:
        """K; nothing is copied to know it."""
        return segments.tokens(self.cu_seqlens)

    def _cut(self, at: slice, **of_rows: Any) -> Batch:
        rows = {name: of_rows.get(name, getattr(self, name)) for name in _OF_ROWS}
        segments.sized(rows["cu_seqlens"], at.stop - at.start)
        return Some.of(self.whole, self.index[at], **rows)

    def has(self, name: str) -> bool:
        """Whether it has a column of tokens; none is copied to know it."""
        return self.whole.has(name)

    def _copied(self, name: str) -> Tensor | None:
        x: Tensor | None = getattr(self.whole, name)
        return None if x is None else x.index_select(0, self.index)


_OF_ROWS = tuple(f.name for f in fields(Batch) if f.name not in PER_TOKEN)


def _column(name: str) -> cached_property[Tensor | None]:
    """A column of some tokens; the dataclass sets no field of its own where there is one."""
    made = cached_property(lambda some: some._copied(name))
    made.__set_name__(Some, name)
    return made


for _name in PER_TOKEN:
    setattr(Some, _name, _column(_name))
