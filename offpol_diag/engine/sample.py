"""A sample of whole sequences, chosen by hash, kept token by token for the diagnosis.

Logging faults (a shift, a constant, a break) show only in adjacent tokens, which sums cannot hold. A sample
of sequences can: it is bounded, it merges, and it does not depend on how a dump is split.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from offpol_diag.batch import Batch
from offpol_diag.engine import accumulators
from offpol_diag.engine.fields import LARGE, NUMBERS, Floats, Ints, Saved, Scalar, require
from offpol_diag.engine.scene import Scene
from offpol_diag.engine.segments import Array
from offpol_diag.engine.terms import Drift

TOKENS, SEQUENCES = 1 << 17, 8192
"""The sample is the longest prefix, in hash order, of at most so many tokens and sequences."""
FIRST, LAST = 1536, 512
"""Number of first and last tokens kept of a longer sequence; those between are dropped."""
COLUMNS = ("q", "p", "position", "token_ids", "entropy", "advantages")


@dataclass(frozen=True)
class Sample(Saved):
    """A sample of sequences.

    Attributes:
        order: hash of each sequence, rising, [S] int64.
        lengths: number of kept tokens of each, [S] int64.
        values: column of `COLUMNS` → the tokens of all sequences, concatenated, [T] float64; columns that
            the dump lacks are absent.
        scalars: per-sequence columns by name, S values each.
        full: whether sequences were dropped from the sample.
    """

    order: Annotated[NDArray[np.int64], Ints("sequences")]
    lengths: Annotated[NDArray[np.int64], Ints("sequences")]
    values: dict[str, Annotated[NDArray[np.float64], Floats("tokens", rule=NUMBERS)]]
    scalars: dict[str, list[Scalar]]
    full: bool = False

    def check(self) -> None:
        """Refuse lengths and columns that contradict each other."""
        rows, lengths = len(self.order), self.lengths
        require(rows <= SEQUENCES, f"there are at most {SEQUENCES} sequences")
        require((self.order[:-1] <= self.order[1:]).all(), "order must rise")
        require(((lengths > 0) & (lengths <= FIRST + LAST)).all(), "lengths are out of range")
        require({"q", "p", "position"} <= self.values.keys() <= set(COLUMNS), f"values are of {COLUMNS}")
        whole = [x for name, x in self.values.items() if name in ("position", "token_ids")]
        require(all((np.abs(x) < LARGE).all() for x in whole), "a position or a token id is a whole number")
        require(len(self.values["q"]) == lengths.sum(), "values are not as many as lengths say")
        require(all(len(column) == rows for column in self.scalars.values()), f"columns have {rows} values")

    def merge(self, other: Sample) -> Sample:
        """Merge the samples of two parts of a dump."""
        order = np.concatenate((self.order, other.order))
        lengths = np.concatenate((self.lengths, other.lengths))
        rank = np.argsort(order, kind="stable")
        kept = _prefix(lengths[rank])
        at = rank[:kept]
        starts = np.concatenate(([0], np.cumsum(lengths)[:-1]))
        tokens = _gathered(starts[at], lengths[at])
        values = {
            name: np.concatenate((self.values[name], other.values[name]))[tokens]
            for name in self.values
            if name in other.values
        }
        names = dict.fromkeys((*self.scalars, *other.scalars))
        both = {name: [*self._column(name), *other._column(name)] for name in names}
        scalars = {name: [column[i] for i in at] for name, column in both.items()}
        return Sample(order[at], lengths[at], values, scalars, self.full or other.full or kept < len(rank))

    def _column(self, name: str) -> list[Any]:
        return self.scalars.get(name, [None] * len(self.order))


def _prefix(lengths: NDArray[np.int64]) -> int:
    """Return how many of the sequences fit, in their order; at least one."""
    fit = int(np.searchsorted(np.cumsum(lengths), TOKENS, side="right"))
    return min(max(fit, 1), SEQUENCES, len(lengths))


def _gathered(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the indices of runs of tokens, concatenated."""
    ends = np.cumsum(lengths)
    return np.repeat(begins - (ends - lengths), lengths) + np.arange(int(ends[-1]) if len(ends) else 0)


def sample(scene: Scene, drift: Drift) -> Sample:
    """Sample one batch, for the two policies of a drift; sequences without a token are left out."""
    batch = scene.batch
    q, p = (batch.policy(policy) for policy in (drift.denominator, drift.numerator))
    assert q is not None
    assert p is not None
    order, begins, whole = hashes(batch, q, p), batch.cu_seqlens[:-1], batch.lengths
    rank = np.argsort(order, kind="stable")
    rank = rank[whole[rank] > 0]
    at = rank[: _prefix(np.minimum(whole[rank], FIRST + LAST))]
    many = whole[at]
    lengths = np.minimum(many, FIRST + LAST)
    within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    skip = np.repeat(many - lengths, lengths) * (within >= FIRST)
    tokens = np.repeat(begins[at], lengths) + within + skip
    columns = {
        "q": q,
        "p": p,
        "position": batch.position,
        "token_ids": batch.token_ids,
        "entropy": batch.entropy,
        "advantages": batch.advantages,
    }
    values = {name: x[tokens].astype(np.float64) for name, x in columns.items() if x is not None}
    scalars = {name: [column[i] for i in at] for name, column in batch.scalars.items()}
    return Sample(order[at], lengths, values, scalars, len(at) < len(rank))


def hashes(batch: Batch, q: Array, p: Array) -> Array:
    """Hash each sequence's group, length, and first and last log-probs, [S] int64."""
    end = max(batch.tokens - 1, 0)
    first, last = (np.clip(x, 0, end) for x in (batch.cu_seqlens[:-1], batch.cu_seqlens[1:] - 1))
    found = accumulators.mix(batch.key + batch.lengths)
    for x, at in ((q, first), (p, last), (q, last), (p, first)) if batch.tokens else ():
        found = accumulators.mix(found ^ x[at].view(np.int64))
    return found
