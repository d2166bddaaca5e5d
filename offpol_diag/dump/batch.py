"""A packed batch of sequences: the output of the readers and the input of the analysis.

It has no padding and no mask: the readers drop masked tokens. Shapes: T tokens, S sequences, R runs of
adjacent unmasked tokens (turns).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np

from offpol_diag.engine import segments
from offpol_diag.engine.segments import Array

PER_TOKEN = (
    *("rollout", "old", "current", "advantages", "position", "token_ids", "entropy", "weight_versions"),
    "reference",
)


def label(value: object) -> str:
    """Return a scalar of a sequence as the text by which sequences are grouped."""
    return "∅" if value is None else value.decode() if isinstance(value, bytes) else str(value)


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
        entropy: entropy of the trainer's policy at each token, [T] float64, nats, or None.
        weight_versions: version of the weights that sampled each token, [T] int64, −1 where unknown, or None.
        reference: log-prob under the run's model, computed again by `rescore`, [T] float64, nats, or None.
        scalars: other per-sequence columns by name (sequence_id, group_id, step, policy_lag, host, …), host
            lists of length S, None where null.
        masked: tokens that the mask excluded, per sequence, [S] int64.
    """

    rollout: Array
    cu_seqlens: Array
    cu_runs: Array
    position: Array
    key: Array
    masked: Array
    old: Array | None = None
    current: Array | None = None
    advantages: Array | None = None
    rewards: Array | None = None
    token_ids: Array | None = None
    entropy: Array | None = None
    weight_versions: Array | None = None
    reference: Array | None = None
    scalars: dict[str, list[object]] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Number of tokens, T."""
        return self.rollout.size

    @property
    def sequences(self) -> int:
        """Number of sequences, S, empty ones included."""
        return len(self.cu_seqlens) - 1

    @cached_property
    def lengths(self) -> Array:
        """Number of unmasked tokens per sequence, [S] int64."""
        return segments.lengths(self.cu_seqlens)

    @cached_property
    def turns(self) -> Array:
        """Index of each sequence's first turn among all turns, [S+1] int64."""
        starts = np.searchsorted(self.cu_runs[:-1], self.cu_seqlens[:-1])
        return np.append(starts, len(self.cu_runs) - 1)

    def policy(self, name: str) -> Array | None:
        """Return the log-probs of rollout, old or current, [T] float64, or None when the dump lacks them."""
        found: Array | None = getattr(self, name)
        return found

    def parts(self, most: int) -> list[Batch]:
        """Split a batch in order into even parts of at most `most` sequences, or of one."""
        many = max(math.ceil(self.sequences / max(most, 1)), 1)
        cuts = [self.sequences * i // many for i in range(many + 1)]
        return [self] if many == 1 else [self.rows(begin, end) for begin, end in pairwise(cuts)]

    def rows(self, begin: int, end: int) -> Batch:
        """Return sequences `begin` to before `end`, as views."""
        first, last = (int(self.cu_seqlens[at]) for at in (begin, end))
        ends = np.array([first, last] if last > first else [first])
        after = np.searchsorted(self.cu_runs, ends[0], side="right")
        runs = self.cu_runs[after : np.searchsorted(self.cu_runs, ends[-1])]
        return self._cut(
            slice(first, last),
            cu_seqlens=self.cu_seqlens[begin : end + 1] - first,
            cu_runs=np.concatenate((ends[:1], runs, ends[1:])) - first,
            key=self.key[begin:end],
            masked=self.masked[begin:end],
            rewards=None if self.rewards is None else self.rewards[begin:end],
            scalars={name: column[begin:end] for name, column in self.scalars.items()},
        )

    def _cut(self, at: slice, **of_rows: Any) -> Batch:
        """Slice the token columns, and replace the others."""
        for name in PER_TOKEN:
            of_rows[name] = None if (x := getattr(self, name)) is None else x[at]
        return replace(self, **of_rows)


def joined(batches: Sequence[Batch]) -> Batch:
    """Concatenate batches of the same columns, in order."""
    if len(batches) == 1:
        return batches[0]
    found: dict[str, Any] = {}
    for name in (f.name for f in fields(Batch)):
        values = [x for batch in batches if (x := getattr(batch, name)) is not None]
        if name == "scalars":
            found[name] = {key: list(chain.from_iterable(one[key] for one in values)) for key in values[0]}
        elif name in ("cu_seqlens", "cu_runs"):
            lengths = np.concatenate([segments.lengths(value) for value in values])
            found[name] = np.concatenate(([0], lengths.cumsum()))
        else:
            found[name] = np.concatenate(values) if values else None
    return Batch(**found)
