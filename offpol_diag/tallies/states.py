"""Every kind of state as plain data: its fields, and what must hold of them before they are believed.

A new kind of state is a class here and a row in `kinds.py`.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from offpol_diag import loglattice
from offpol_diag.accumulators import (
    SAMPLE,
    TAIL,
    Best,
    Bins,
    Counts,
    Extremes,
    GroupSample,
    LogSums,
    Sums,
    Tail,
)
from offpol_diag.metrics.prefixes import GRID, Prefixes
from offpol_diag.metrics.sample import COLUMNS, FIRST, LAST, SEQUENCES, Sample
from offpol_diag.metrics.selection import LENGTH_BINS, Grid
from offpol_diag.summary import Model, WorstSequence, WorstToken
from offpol_diag.tallies.arrays import Floats, Ints

Form = tuple[object, ...]
"""What two states must have in common to be merged: names, numbers of columns and of replicates."""


def require(holds: object, rule: str) -> None:
    """Raise the ValueError that pydantic turns into a message with its place."""
    if not holds:
        raise ValueError(rule)


def require_distinct(names: tuple[str, ...]) -> None:
    """No name may stand twice."""
    require(len(set(names)) == len(names), "a name stands twice")


def require_shape(shape: tuple[int, ...], **arrays: Tensor) -> None:
    """All arrays must be of this shape."""
    require(
        all(x.shape == shape for x in arrays.values()),
        f"{' and '.join(arrays)} must be of shape {list(shape)}",
    )


def require_counts(x: Tensor) -> None:
    """Counts are finite and not negative; below 2^62, so that no sum of them overflows."""
    require(((x >= 0) & (x < 2.0**62)).all(), "a count is finite and not negative")


class SavedState(Model):
    """A state, field by field."""

    makes: ClassVar[type]
    kind: str

    @classmethod
    def of(cls, state: Any) -> Self:
        """To be written."""
        return cls(**{name: getattr(state, name) for name in cls.model_fields if name != "kind"})

    def state(self) -> Any:
        """As it was."""
        return self.makes(**{name: getattr(self, name) for name in type(self).model_fields if name != "kind"})

    def form(self) -> Form:
        """What states that are merged with it must have in common with it."""
        return (self.kind,)


class SavedSums(SavedState):
    """K columns, B replicates."""

    makes = Sums
    kind: Literal["sums"] = "sums"
    names: tuple[str, ...]
    point: Floats
    rest: Floats
    drawn: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_distinct(self.names)
        require_shape((len(self.names),), point=self.point, rest=self.rest)
        require(self.drawn.ndim == 2, "drawn must be of shape [K, B]")
        require_shape((len(self.names), self.drawn.shape[1]), drawn=self.drawn)
        return self

    @classmethod
    def of(cls, state: Sums) -> Self:
        """To be written."""
        return super().of(state.whole)

    def form(self) -> Form:
        """Columns, in any order, and replicates."""
        return self.kind, *sorted(self.names), self.drawn.shape[1]


class SavedExtremes(SavedState):
    """K quantities."""

    makes = Extremes
    kind: Literal["extremes"] = "extremes"
    names: tuple[str, ...]
    low: Floats
    high: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_distinct(self.names)
        require_shape((len(self.names),), low=self.low, high=self.high)
        return self

    def form(self) -> Form:
        """Names, in their order."""
        return self.kind, *self.names


class SavedCounts(SavedState):
    """A count for each bin of the lattice."""

    makes = Counts
    kind: Literal["counts"] = "counts"
    counts: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_shape((loglattice.SIZE,), counts=self.counts)
        require_counts(self.counts)
        return self


class SavedBins(SavedState):
    """A count and a sum for each bin of the lattice."""

    makes = Bins
    kind: Literal["bins"] = "bins"
    counts: Floats
    sums: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_shape((loglattice.SIZE,), counts=self.counts, sums=self.sums)
        require_counts(self.counts)
        return self


class SavedTail(SavedState):
    """The largest of n values, falling."""

    makes = Tail
    kind: Literal["tail"] = "tail"
    n: int = Field(ge=0, lt=2**62)
    top: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_shape((min(self.n, TAIL),), top=self.top)
        falls = not self.top.isnan().any() and (self.top[:-1] >= self.top[1:]).all()
        require(falls, "top must fall, without NaN")
        return self

    def state(self) -> Tail:
        """As far as it matters: what was kept beyond the largest is gone."""
        return Tail(self.n, self.top)


class SavedLogSums(SavedState):
    """Two sums and their replicates, [1 + B]."""

    makes = LogSums
    kind: Literal["log_sums"] = "log_sums"
    shift: Floats
    once: Floats
    twice: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_shape((), shift=self.shift)
        require(not self.shift.isnan(), "shift is a number")
        require(self.once.ndim == 1 and len(self.once) > 0, "once must be of shape [1 + B]")
        require_shape(tuple(self.once.shape), twice=self.twice)
        return self

    def form(self) -> Form:
        """Replicates."""
        return self.kind, len(self.once)


class SavedPrefixes(SavedState):
    """Sums at G lengths, the longest that a response has."""

    makes = Prefixes
    kind: Literal["prefixes"] = "prefixes"
    shift: Floats
    once: Floats
    twice: Floats
    many: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(
            self.shift.ndim == 1 and len(self.shift) <= len(GRID), f"there are at most {len(GRID)} lengths"
        )
        require(not self.shift.isnan().any(), "a shift is a number")
        require(self.many.ndim == 2 and self.many.shape[1] > 0, "many must be of shape [G, 1 + B]")
        shape = (len(self.shift), self.many.shape[1])
        require_shape(shape, once=self.once, twice=self.twice, many=self.many)
        require_counts(self.many)
        return self

    @classmethod
    def of(cls, state: Prefixes) -> Self:
        """To be written: without the lengths that no response has."""
        there = int((state.many[:, 0] > 0).sum())
        logs = state.logs
        return cls(
            shift=logs.shift[:there],
            once=logs.once[:there],
            twice=logs.twice[:there],
            many=state.many[:there],
        )

    def state(self) -> Prefixes:
        """As it was."""
        return Prefixes.padded(LogSums(self.shift, self.once, self.twice), self.many)

    def form(self) -> Form:
        """Replicates."""
        return self.kind, self.many.shape[1]


class SavedSample(SavedState):
    """S sequences of T tokens in all."""

    makes = Sample
    kind: Literal["sample"] = "sample"
    order: Ints
    lengths: Ints
    values: dict[Literal[COLUMNS], Floats]  # type: ignore[valid-type]
    scalars: dict[str, list[str | bool | int | float | None]]
    full: bool

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(
            self.order.ndim == 1 and len(self.order) <= SEQUENCES, f"there are at most {SEQUENCES} sequences"
        )
        require((self.order[:-1] <= self.order[1:]).all(), "order must rise")
        require_shape(tuple(self.order.shape), lengths=self.lengths)
        require(((self.lengths > 0) & (self.lengths <= FIRST + LAST)).all(), "lengths are out of range")
        require({"q", "p", "position"} <= self.values.keys(), "q, p and position are needed")
        require_shape((int(self.lengths.sum()),), **self.values)
        require(not any(x.isnan().any() for x in self.values.values()), "a value is a number")
        rows = len(self.order)
        require(all(len(column) == rows for column in self.scalars.values()), f"columns have {rows} values")
        return self

    @classmethod
    def of(cls, state: Sample) -> Self:
        """To be written."""
        return cls(
            order=torch.from_numpy(state.order),
            lengths=torch.from_numpy(state.lengths),
            values={name: torch.from_numpy(x) for name, x in state.values.items()},
            scalars={name: list(map(_scalar, column)) for name, column in state.scalars.items()},
            full=state.full,
        )

    def state(self) -> Sample:
        """As it was."""
        values = {name: x.numpy() for name, x in self.values.items()}
        return Sample(self.order.numpy(), self.lengths.numpy(), values, dict(self.scalars), self.full)


def _scalar(value: object) -> str | bool | int | float | None:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value if value is None or isinstance(value, str | bool | int | float) else str(value)


class SavedGroups(SavedState):
    """G groups, C columns of counts."""

    makes = GroupSample
    kind: Literal["groups"] = "groups"
    keys: Ints
    values: Floats
    full: bool

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(self.keys.ndim == 1 and len(self.keys) <= SAMPLE, f"there are at most {SAMPLE} keys")
        require((self.keys[:-1] < self.keys[1:]).all(), "keys must rise")
        require(not self.full or len(self.keys) == SAMPLE, f"a full sample has {SAMPLE} keys")
        require(self.values.ndim == 2, "values must be of shape [G, C]")
        require_shape((len(self.keys), self.values.shape[1]), values=self.values)
        require_counts(self.values)
        return self

    def form(self) -> Form:
        """Columns."""
        return self.kind, self.values.shape[1]


class SavedGrid(SavedState):
    """C columns of counts by length."""

    makes = Grid
    kind: Literal["grid"] = "grid"
    values: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(self.values.ndim == 2, "values must have columns")
        require_shape((LENGTH_BINS, self.values.shape[1]), values=self.values)
        require_counts(self.values)
        return self

    def form(self) -> Form:
        """Columns."""
        return self.kind, self.values.shape[1]


class SavedBest(SavedState):
    """Up to k sequences or tokens, each with its score."""

    makes = Best
    kind: Literal["best"] = "best"
    k: int = Field(ge=0, le=1000)
    scores: Floats
    records: tuple[WorstSequence, ...] | tuple[WorstToken, ...]

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require(len(self.records) <= self.k, f"there are more than {self.k} records")
        require_shape((len(self.records),), scores=self.scores)
        return self

    @classmethod
    def of(cls, state: Best[Any]) -> Self:
        """To be written."""
        scores = torch.tensor([score for score, _ in state.records], dtype=torch.float64)
        return cls(k=state.k, scores=scores, records=tuple(record for _, record in state.records))

    def state(self) -> Best[Any]:
        """As it was."""
        return Best(self.k, tuple(zip(self.scores.tolist(), self.records, strict=True)))

    def form(self) -> Form:
        """How many are kept."""
        return self.kind, self.k
