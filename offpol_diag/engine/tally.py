"""What an analysis keeps of a dump: named arrays in four kinds, of all of it or by key.

Those of two parts of a dump merge to those of both, name by name; a name that one part lacks is the other's.

    sums       add: sums with their replicates, histograms, counts
    maxima     element by element; a minimum is the maximum of −x
    log_sums   log Σ e^x, added in the log domain: products of ratios, whose sum no float holds
    largest    the k largest values along the last axis, falling; −inf where there are fewer
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from heapq import nsmallest
from typing import Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from offpol_diag.core.state import State

Array = npt.NDArray[Any]
T = TypeVar("T")


def largest_of(x: Array, k: int) -> Array:
    """Return the k largest of x [..., N] along the last axis, falling; −inf where there are fewer."""
    beyond = x.shape[-1] - k
    if beyond > 0:
        x = np.partition(x, beyond, axis=-1)[..., beyond:]
    elif beyond < 0:
        x = np.concatenate((x, np.full((*x.shape[:-1], -beyond), -np.inf)), axis=-1)
    return np.sort(x, axis=-1)[..., ::-1]


def _largest_of_both(one: Array, two: Array) -> Array:
    return largest_of(np.concatenate((one, two), axis=-1), one.shape[-1])


Merge = Callable[[Array, Array], Array]
KINDS: dict[str, tuple[Merge, float]] = {
    "sums": (np.add, 0.0),
    "maxima": (np.maximum, -np.inf),
    "log_sums": (np.logaddexp, -np.inf),
    "largest": (_largest_of_both, -np.inf),
}
"""Kind of array → how two merge, and the value that changes nothing."""


@dataclass(frozen=True)
class Names:
    """Names of what stands in an array whose last axis but one, or only axis, has R lines.

    Attributes:
        names: all different.
        lines: the line of each name; names that are equal in every dump share one. None: each has its own.
    """

    names: tuple[str, ...]
    lines: Array | None = None

    def read(self, x: Array) -> dict[str, Array]:
        """Return name → its line of x [R, ...]."""
        each = [*x]
        lines = range(len(each)) if self.lines is None else self.lines.tolist()
        return {name: each[line] for name, line in zip(self.names, lines, strict=True)}

    def same_as(self, other: Names) -> bool:
        """Return whether names stand for the same lines."""
        one, two = self.lines, other.lines
        if one is not two and (one is None or two is None or not np.array_equal(one, two)):
            return False
        return self.names == other.names


@dataclass(frozen=True)
class Arrays:
    """Named arrays of float64, by kind, and the names of what stands in some of them."""

    sums: dict[str, Array] = field(default_factory=dict)
    maxima: dict[str, Array] = field(default_factory=dict)
    log_sums: dict[str, Array] = field(default_factory=dict)
    largest: dict[str, Array] = field(default_factory=dict)
    names: dict[str, Names] = field(default_factory=dict)

    def read(self, name: str) -> dict[str, Array]:
        """Return the lines of an array of sums or maxima by their names."""
        return self.names[name].read(self.sums[name] if name in self.sums else self.maxima[name])

    def merge(self, other: Arrays) -> Arrays:
        """Merge the arrays of two parts of a dump.

        Raises:
            ValueError: arrays of one name are of different columns.
        """
        for name, names in self.names.items():
            if name in other.names and not names.same_as(other.names[name]):
                raise ValueError(f"{name}: sums of different columns do not merge")
        each = {
            kind: _merged(merge, getattr(self, kind), getattr(other, kind))
            for kind, (merge, _) in KINDS.items()
        }
        return Arrays(**each, names=self.names | other.names)

    def map(self, function: Callable[[str, Array], Array]) -> Arrays:
        """Apply a function of kind and array to all arrays."""
        each = {kind: {name: function(kind, x) for name, x in getattr(self, kind).items()} for kind in KINDS}
        return Arrays(**each, names=self.names)


def _merged(merge: Callable[[T, T], T], one: Mapping[str, T], two: Mapping[str, T]) -> dict[str, T]:
    return {**one, **{name: merge(one[name], x) if name in one else x for name, x in two.items()}}


# ---------------------------------------------------------------- by key

MOST_KEYS = 4096
"""Most of a column's values that are kept; all others are merged as `OTHER_KEYS`."""
OTHER_KEYS = "\0others"
"""Key of all that are not kept; no label of a dump holds a NUL."""
SAMPLE = 4096
"""Most groups kept for counts that are not sums; the counts are exact up to that many."""
MOST_STEPS = 64
"""Most groups of steps; more are merged in pairs, fours, …: their width is a power of two."""

Bound = Literal["none", "others", "sample", "steps"]


@dataclass(frozen=True)
class ByKey:
    """Arrays of parts of a dump by key (its steps, hosts, prompts): a row of their first axis for each.

    Attributes:
        keys: rising, [N] str or int64.
        arrays: [N, ...] each.
        bound: what happens to many keys. none: nothing. others: beyond `MOST_KEYS`, by hash, they are merged
            as `OTHER_KEYS`. sample: the `SAMPLE` + 1 smallest, which are hashes, are kept. steps: they are
            grouped; a key is the first step of a group, and `maxima["shift"]` log2 of its width.
    """

    keys: Array
    arrays: Arrays
    bound: Bound = "none"

    @classmethod
    def of(cls, keys: Collection[str], arrays: Arrays, bound: Bound = "none") -> ByKey:
        """Build from texts in any order."""
        result = np.array(list(keys), dtype=object)
        order = np.argsort(result, kind="stable")
        return cls(result[order], arrays.map(lambda _, x: x[order]), bound)

    def merge(self, other: ByKey) -> ByKey:
        """Merge key by key, within the bound on their number."""
        keys = np.union1d(self.keys, other.keys)
        merged = replace(self, keys=keys, arrays=self._among(keys).merge(other._among(keys)))
        return merged.bounded

    def _among(self, keys: Array) -> Arrays:
        """Return the arrays of all of some keys; those that are not here hold nothing."""
        if len(keys) == len(self.keys):
            return self.arrays
        at = np.searchsorted(keys, self.keys)

        def spread(kind: str, x: Array) -> Array:
            wide = np.full((len(keys), *x.shape[1:]), KINDS[kind][1])
            wide[at] = x
            return wide

        return self.arrays.map(spread)

    def __len__(self) -> int:
        return len(self.keys)

    def items(self) -> Iterator[tuple[Any, Arrays]]:
        """Yield each key and its arrays."""
        for at, key in enumerate(self.keys.tolist()):
            yield key, self.arrays.map(lambda _, x, at=at: x[at])  # type: ignore[misc]

    def grouped(self, keys: Array) -> ByKey:
        """Merge those that get the same new key, [N]."""
        result, which = np.unique(keys, return_inverse=True)

        def added(kind: str, x: Array) -> Array:
            merge, nothing = KINDS[kind]
            total = np.full((len(result), *x.shape[1:]), nothing)
            for row, one in zip(which, x, strict=True):
                total[row] = merge(total[row], one)
            return total

        return replace(self, keys=result, arrays=self.arrays.map(added))

    @property
    def bounded(self) -> ByKey:
        """The same arrays, of as few keys as the bound allows."""
        if self.bound == "others" and len(self) > MOST_KEYS:
            kept = retained(self.keys.tolist())
            return self.grouped(
                np.array([key if key in kept else OTHER_KEYS for key in self.keys.tolist()], object)
            )
        if self.bound == "sample" and len(self) > SAMPLE + 1:
            return replace(
                self, keys=self.keys[: SAMPLE + 1], arrays=self.arrays.map(lambda _, x: x[: SAMPLE + 1])
            )
        return self._of_steps if self.bound == "steps" else self

    @property
    def _of_steps(self) -> ByKey:
        shifts = self.arrays.maxima["shift"]
        shift = int(shifts.max(initial=0))
        while len(np.unique(keys := self.keys >> shift << shift)) > MOST_STEPS:
            shift += 1
        if (shifts == shift).all():
            return self
        result = self.grouped(keys)
        result.arrays.maxima["shift"][:] = shift
        return result


def retained(keys: Collection[str]) -> set[str]:
    """Choose at most `MOST_KEYS` keys by hash, so that parts of a dump, in any order, choose the same."""
    keys = [key for key in keys if key != OTHER_KEYS]
    return set(keys if len(keys) <= MOST_KEYS else nsmallest(MOST_KEYS, keys, key=_hashed))


def estimated_others(keys: Collection[str]) -> int:
    """Number how many keys `OTHER_KEYS` stands for, from the density of the hashes of those kept."""
    if OTHER_KEYS not in keys:
        return 0
    kept = len(keys) - 1
    return max(
        1, round((kept - 1) / (max(_hashed(key) for key in keys if key != OTHER_KEYS) / 2.0**64)) - kept
    )


def _hashed(key: str) -> int:
    return int.from_bytes(blake2b(key.encode(errors="surrogatepass"), digest_size=8).digest(), "big")


# ---------------------------------------------------------------- the whole


@dataclass(frozen=True)
class Tally:
    """All that is kept of a dump.

    Attributes:
        whole: arrays of all of it.
        by_key: arrays by key, by the name of what the keys are of.
        state: what is kept by bucket of groups.
    """

    whole: Arrays = field(default_factory=Arrays)
    by_key: dict[str, ByKey] = field(default_factory=dict)
    state: State = field(default_factory=State)

    @np.errstate(all="ignore")
    def merge(self, other: Tally) -> Tally:
        """Merge the tallies of two parts of a dump."""
        return Tally(
            self.whole.merge(other.whole),
            _merged(ByKey.merge, self.by_key, other.by_key),
            self.state.merge(other.state),
        )
