"""A packed batch of sequences: the output of the readers and the input of the analysis.

It has no padding and no mask: the readers drop masked tokens. Shapes: T tokens, S sequences, R runs of
adjacent unmasked tokens (turns).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from offpol_diag.dump.schema import ADVANTAGES, ENTROPY, LOG_PROBS, REFERENCE, TOKEN_IDS, WEIGHT_VERSIONS

Array = npt.NDArray[Any]
FIELDS = {
    name.removesuffix("_log_probs"): name
    for name in (*LOG_PROBS, ADVANTAGES, TOKEN_IDS, ENTROPY, WEIGHT_VERSIONS, REFERENCE)
}
"""Field of a batch with a value per token → its column."""
INCREMENT = np.uint64(0x9E3779B97F4A7C15)
"""Distance of SplitMix64's counters: its n-th word is `mix` of seed + n · INCREMENT, modulo 2⁶⁴."""


def mix(x: Array) -> Array:
    """Scatter 64-bit words, [N] → [N] uint64: SplitMix64's finaliser (Steele et al. 2014), a bijection."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    result: Array = x ^ (x >> np.uint64(31))
    return result


def label(value: object) -> str:
    """Return a scalar of a sequence as the text by which sequences are grouped."""
    return "∅" if value is None else str(value)


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
        return len(self.rollout)

    @property
    def sequences(self) -> int:
        """Number of sequences, S, empty ones included."""
        return len(self.cu_seqlens) - 1

    @cached_property
    def lengths(self) -> Array:
        """Number of unmasked tokens per sequence, [S] int64."""
        return self.cu_seqlens[1:] - self.cu_seqlens[:-1]

    @cached_property
    def turn(self) -> Array:
        """Index of each token's turn among those of its sequence, [T] int64."""
        starts = self.cu_runs[:-1]
        owner = np.searchsorted(self.cu_seqlens, starts, side="right") - 1
        index = np.arange(len(starts)) - np.searchsorted(starts, self.cu_seqlens[owner])
        return np.repeat(index, np.diff(self.cu_runs))

    @cached_property
    def steps(self) -> list[str]:
        """Trainer batch of each sequence, [S]: that of its step; "" of all where the dump has no steps."""
        steps = self.scalars.get("step")
        if steps is None:
            return [""] * self.sequences
        named = {step: label(step) for step in set(steps)}
        return [named[step] for step in steps]

    def rows(self, begin: int, end: int) -> Batch:
        """Return sequences `begin` to before `end`, as views."""
        first, last = int(self.cu_seqlens[begin]), int(self.cu_seqlens[end])
        inside = slice(*np.searchsorted(self.cu_runs, (first + 1, last)))
        ends = np.array([first, last] if last > first else [first], np.int64)
        tokens = {name: x for name in (*FIELDS, "position") if (x := getattr(self, name)) is not None}
        return replace(
            self,
            **{name: x[first:last] for name, x in tokens.items()},
            cu_seqlens=self.cu_seqlens[begin : end + 1] - first,
            cu_runs=np.concatenate((ends[:1], self.cu_runs[inside], ends[1:])) - first,
            key=self.key[begin:end],
            masked=self.masked[begin:end],
            rewards=None if self.rewards is None else self.rewards[begin:end],
            scalars={name: column[begin:end] for name, column in self.scalars.items()},
        )


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
            lengths = np.concatenate([np.diff(value) for value in values])
            found[name] = np.concatenate(([0], lengths.cumsum()))
        else:
            found[name] = np.concatenate(values) if values else None
    return Batch(**found)
