"""The sample of a dump that the diagnosis reads: its sequences as flat numpy arrays."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from offpol_diag.core.kept_rows import Sample
from offpol_diag.diagnosis.metadata import Metadata
from offpol_diag.dump.schema import DIGESTS

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
T = TypeVar("T")

CAP, LARGEST = 3.0, 1e6
"""Bounds, nats: of |Δ| in robust statistics, a factor of 20; of logged values, whose squares stay finite."""
WEIGHTS = ("step", "policy_lag", "rollout_version", "train_version")
"""Columns that say which weights sampled and scored a sequence."""


@dataclass(frozen=True)
class Rows:
    """S non-empty sequences with T tokens in all, concatenated, without masked tokens.

    Attributes:
        q: log π_rollout of the sampled token, [T], nats.
        p: log π_train of the same token (old, or current in a dump of two policies), [T], nats.
        starts: index of the first token of each sequence, and T, [S + 1].
        position: index of the token in its response, counting masked tokens, [T].
        ids: token ids [T], or None.
        entropy: logged entropy of the train policy, or of the one that sampled, [T] nats, or None.
        scalars: name → other column of the sequences, S values each, None for null.
        reference: log-prob under the run's model, computed again by `rescore`, [T] nats, or None.
        turn: index of its turn (a run of tokens between holes of the mask) in its response, [T], or None.
        width: number of tokens of its row, masked ones and padding included, [T], or None.
        sign: 0 where the advantage is negative, 1 where it is 0, 2 where it is positive, [T], or None.
        metadata: what the metadata of the whole dump says of the engine.
        synced: lower end of the interval of the whole dump's K3 at lag 0, or of all rows where no lag is
            recorded, nats.
        healthy: whether rounding explains the whole dump's mismatch, but for single tokens.
    """

    q: Floats
    p: Floats
    starts: Ints
    position: Ints
    ids: Ints | None = None
    entropy: Floats | None = None
    scalars: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reference: Floats | None = None
    turn: Ints | None = None
    width: Ints | None = None
    sign: Floats | None = None
    metadata: Metadata = field(default_factory=Metadata)
    synced: float | None = None
    healthy: bool = False

    @classmethod
    def of(cls, sample: Sample) -> Rows:
        """Build the rows from a sample."""
        values = sample.values
        ids, entropy = values.get("token_ids"), values.get("entropy")
        return cls(
            q=np.clip(values["q"], -LARGEST, LARGEST),
            p=np.clip(values["p"], -LARGEST, LARGEST),
            starts=np.concatenate(([0], np.cumsum(sample.lengths))),
            position=values["position"].astype(np.int64),
            ids=None if ids is None else ids.astype(np.int64),
            entropy=None if entropy is None else np.clip(entropy, -LARGEST, LARGEST),
            scalars={"sequence_id": [*range(len(sample.lengths))]} | sample.scalars,
            reference=values.get("reference"),
            turn=values["turn"],
            width=np.repeat(sample.rows[4], sample.lengths),
            sign=values.get("sign"),
        )

    @property
    def tokens(self) -> int:
        """Number of tokens T."""
        return len(self.q)

    @property
    def sequences(self) -> int:
        """Number of sequences S."""
        return len(self.starts) - 1

    @property
    def every(self) -> Flags:
        """Flags of all tokens, [T]."""
        return np.ones(self.tokens, np.bool_)

    @property
    def both(self) -> tuple[tuple[str, Floats, Floats], ...]:
        """Each column by its name, with the other one."""
        return ("rollout", self.q, self.p), ("train", self.p, self.q)

    @cached_property
    def lengths(self) -> Ints:
        """Number of tokens of each sequence, [S]."""
        return np.diff(self.starts)

    @cached_property
    def owner(self) -> Ints:
        """Index of the sequence of each token, [T]."""
        return np.repeat(np.arange(self.sequences), self.lengths)

    @cached_property
    def index(self) -> Ints:
        """Index of each token among the unmasked tokens of its sequence, [T]."""
        return np.arange(self.tokens) - self.starts[self.owner]

    @cached_property
    def from_end(self) -> Ints:
        """Index counted back from the last unmasked token of the sequence, [T]."""
        return self.lengths[self.owner] - 1 - self.index

    @cached_property
    def delta(self) -> Floats:
        """Δ = log π_train − log π_rollout, [T] nats."""
        return self.p - self.q

    @cached_property
    def gap(self) -> Floats:
        """min(|Δ|, `CAP`), [T] nats."""
        return np.minimum(np.abs(self.delta), CAP)

    @cached_property
    def scaled_gap(self) -> Floats:
        """min(|Δ|/(1 − π_rollout), `CAP`), [T]: what logits differ by, however certain the token is."""
        return np.minimum(np.abs(self.delta) / np.maximum(-np.expm1(np.minimum(self.q, 0.0)), 1e-3), CAP)

    @cached_property
    def mean_gap(self) -> Floats:
        """Mean of `gap` over each sequence, [S] nats."""
        return self.mean(self.gap)

    @cached_property
    def k3(self) -> Floats:
        """min(K3, 1) of each token, [T] nats."""
        delta = np.minimum(self.delta, 2.0)
        return np.asarray(np.minimum(np.expm1(delta) - delta, 1.0))

    @property
    def uncertain(self) -> Flags:
        """Flags of tokens whose logits show: −8 < log π_rollout < −0.02, [T]."""
        return (self.q < -0.02) & (self.q > -8)

    @cached_property
    def edges(self) -> tuple[Ints, Ints]:
        """Distance of each token from both ends of its run of unmasked tokens, [T] each."""
        new = np.append((self.index == 0) | (np.diff(self.position, prepend=-1) != 1), True)
        at = np.flatnonzero(new)
        which, place = np.cumsum(new[:-1]) - 1, np.arange(self.tokens)
        return place - at[which], at[which + 1] - 1 - place

    @cached_property
    def repeated(self) -> Flags:
        """Whether the id of a token came before in its sequence, [T]; of rows with token ids."""
        assert self.ids is not None
        ids = np.unique(self.ids, return_inverse=True)[1]
        repeated = self.every
        repeated[np.unique(self.owner * (int(ids.max()) + 1) + ids, return_index=True)[1]] = False
        return repeated

    @cached_property
    def group(self) -> Ints:
        """Number of the group of each sequence, [S]: its prompt where there is no group_id, or it alone."""
        column = self.column("group_id" if "group_id" in self.scalars else "prompt_ids")
        return numbered((i if value is None else None, value) for i, value in enumerate(column))

    @property
    def weights(self) -> Ints:
        """A number for each sequence, [S], equal where the same weights sampled and scored it."""
        return numbered(zip(*(self.column(name) for name in WEIGHTS), strict=True))

    def sum(self, x: NDArray[Any]) -> Floats:
        """Sum values [T] over each sequence, [S]."""
        return np.add.reduceat(x.astype(np.float64), self.starts[:-1]) if self.tokens else np.zeros(0)

    def mean(self, x: NDArray[Any]) -> Floats:
        """Average values [T] over each sequence, [S]."""
        return self.sum(x) / self.lengths

    def keep(self, tokens: Flags) -> Rows:
        """Drop the tokens that are not flagged, and sequences that become empty."""
        counts = np.bincount(self.owner[tokens], minlength=self.sequences)
        filled = counts > 0
        columns = {name: getattr(self, name) for name in OF_TOKENS}
        scalars = {
            name: [x for x, there in zip(column, filled, strict=True) if there]
            for name, column in self.scalars.items()
        }
        kept: dict[str, Any] = {name: x if x is None else x[tokens] for name, x in columns.items()}
        kept["starts"] = np.concatenate(([0], np.cumsum(counts[filled])))
        return replace(self, **kept, scalars=scalars)

    def only(self, sequences: Flags) -> Rows:
        """Drop the sequences that are not flagged, [S]."""
        return self if sequences.all() else self.keep(sequences[self.owner])

    def once(self, compute: Callable[[Rows], T]) -> T:
        """Return what is computed from the rows, which is done once."""
        name = f"once {compute.__qualname__}"
        if name not in vars(self):
            vars(self)[name] = compute(self)
        found: T = vars(self)[name]
        return found

    def column(self, name: str) -> list[Any]:
        """Return a scalar column, [S]; all None if the dump lacks it."""
        return list(self.scalars.get(name, [None] * self.sequences))

    def numbers(self, name: str) -> Floats:
        """Return a scalar column as floats, [S], NaN for what is no finite number."""
        column = self.column(name)
        known = (isinstance(x, int | float) and not isinstance(x, bool) and math.isfinite(x) for x in column)
        return np.array([x if k else np.nan for x, k in zip(column, known, strict=True)], np.float64)


OF_TOKENS = ("q", "p", "position", "ids", "entropy", "reference", "turn", "width", "sign")
"""Attributes of `Rows` with a value for each token."""


def numbered(keys: Iterable[Hashable]) -> Ints:
    """Number keys from 0 in the order in which they first come; equal ones have one number."""
    held = list(keys)
    number = {key: i for i, key in enumerate(dict.fromkeys(held))}
    return np.array([number[key] for key in held], np.int64)


def jittered(rows: Rows, size: Any, rng: np.random.Generator, **columns: list[Any]) -> Rows:
    """Add noise of `size` [T] × (1 − π_rollout) to log π_train so that E[r] stays, and columns."""
    wide = size * -np.expm1(rows.q)
    noise = np.where(wide > 0, wide * rng.standard_normal(rows.tokens) - wide**2 / 2, 0.0)
    p = np.where(noise == 0, rows.p, np.minimum(rows.p + noise, -1e-9))
    return replace(rows, p=p, scalars={**rows.scalars, **columns})


MACHINES = re.compile("host|engine|rank|worker|node|server|replica|gpu|device|pod|instance")
"""Words in the names of columns that say where a sequence was computed."""
NOT_GROUPS = {"sequence_id", "group_id", "prompt_ids", "prompt_length", "rewards", *WEIGHTS[1:], *DIGESTS}
MOST_VALUES, FEWEST = 64, 4
"""Columns that say nothing of a sequence's origin; most values of one that does, and fewest sequences of two
of its values."""


def partitions(rows: Rows) -> Iterator[tuple[str, dict[Any, Flags]]]:
    """Yield columns with few values that describe a sequence's origin, and value → flags [S].

    A number is a quantity, and no origin, but for steps and the numbers of machines.
    """
    for name, column in rows.scalars.items():
        numeric = all(isinstance(one, int | float | None) and not isinstance(one, bool) for one in column)
        if name in NOT_GROUPS or (numeric and name != "step" and not MACHINES.search(name.lower())):
            continue
        values = dict.fromkeys(column)
        if 2 <= len(values) <= MOST_VALUES:
            parts = {value: np.array([one == value for one in column]) for value in values}
            if sum(at.sum() >= FEWEST for at in parts.values()) >= 2:
                yield name, parts
