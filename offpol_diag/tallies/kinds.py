"""Which state is written how; places, whose states are written together, among them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

import torch
from pydantic import Field, model_validator

from offpol_diag.accumulators import (
    Best,
    Bins,
    Counts,
    Extremes,
    GroupSample,
    LogSums,
    Places,
    State,
    Sums,
    Tail,
)
from offpol_diag.metrics.prefixes import Prefixes
from offpol_diag.metrics.sample import Sample
from offpol_diag.metrics.selection import Grid
from offpol_diag.tallies import states
from offpol_diag.tallies.arrays import Floats
from offpol_diag.tallies.states import Form, SavedState, require, require_distinct, require_shape


class SavedPlaces(SavedState):
    """Sums by place: P places, K columns, B replicates; all places have the same columns."""

    makes = Places
    kind: Literal["places"] = "places"
    places: tuple[str, ...]
    names: tuple[str, ...]
    point: Floats
    rest: Floats
    drawn: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        shape = (len(self.places), len(self.names))
        require_distinct(self.places)
        require_distinct(self.names)
        require_shape(shape, point=self.point, rest=self.rest)
        require(self.drawn.ndim == 3, "drawn must be of shape [P, K, B]")
        require_shape((*shape, self.drawn.shape[2]), drawn=self.drawn)
        return self

    @classmethod
    def of(cls, state: Places[Sums]) -> Self:
        """To be written."""
        sums = _alike([one.whole for one in state.sums.values()])
        arrays = {
            name: torch.stack([getattr(one, name) for one in sums]) for name in ("point", "rest", "drawn")
        }
        return cls(places=tuple(state.sums), names=sums[0].names, **arrays)

    def state(self) -> Places[Sums]:
        """As it was."""
        rows = zip(self.places, self.point, self.rest, self.drawn, strict=True)
        return Places({place: Sums(self.names, *arrays) for place, *arrays in rows})

    def form(self) -> Form:
        """Columns, in any order, and replicates."""
        return self.kind, *sorted(self.names), self.drawn.shape[2]


def _alike(sums: Sequence[Sums]) -> Sequence[Sums]:
    """The same sums, every one with the columns of all."""
    if all(one.names == sums[0].names for one in sums):
        return sums
    every = tuple(sorted({name for one in sums for name in one.names}))
    zeros = sums[0].point.new_zeros(len(every), sums[0].drawn.shape[1] + 1)
    none = Sums(every, zeros[:, 0], zeros[:, 0], zeros[:, 1:])
    return [one.merge(none) for one in sums]


class SavedSpans(SavedState):
    """Extremes by place: P places, K quantities."""

    makes = Places
    kind: Literal["spans"] = "spans"
    places: tuple[str, ...]
    names: tuple[str, ...]
    low: Floats
    high: Floats

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_distinct(self.places)
        require_distinct(self.names)
        require_shape((len(self.places), len(self.names)), low=self.low, high=self.high)
        return self

    @classmethod
    def of(cls, state: Places[Extremes]) -> Self:
        """To be written."""
        spans = list(state.sums.values())
        low, high = (torch.stack([getattr(one, name) for one in spans]) for name in ("low", "high"))
        return cls(places=tuple(state.sums), names=spans[0].names, low=low, high=high)

    def state(self) -> Places[Extremes]:
        """As it was."""
        rows = zip(self.places, self.low, self.high, strict=True)
        return Places({place: Extremes(self.names, low, high) for place, low, high in rows})

    def form(self) -> Form:
        """Names, in their order."""
        return self.kind, *self.names


KINDS: dict[tuple[type, ...], type[SavedState]] = {
    (Sums,): states.SavedSums,
    (Extremes,): states.SavedExtremes,
    (Counts,): states.SavedCounts,
    (Bins,): states.SavedBins,
    (Tail,): states.SavedTail,
    (LogSums,): states.SavedLogSums,
    (Prefixes,): states.SavedPrefixes,
    (Sample,): states.SavedSample,
    (GroupSample,): states.SavedGroups,
    (Grid,): states.SavedGrid,
    (Best,): states.SavedBest,
    (Places, Sums): SavedPlaces,
    (Places, Extremes): SavedSpans,
}
"""A class of state, and for places that of their states → how it is written."""

AnySaved = Annotated[
    states.SavedSums
    | states.SavedExtremes
    | states.SavedCounts
    | states.SavedBins
    | states.SavedTail
    | states.SavedLogSums
    | states.SavedPrefixes
    | states.SavedSample
    | states.SavedGroups
    | states.SavedGrid
    | states.SavedBest
    | SavedPlaces
    | SavedSpans,
    Field(discriminator="kind"),
]


def saved(state: State) -> Any:
    """Any state of a tally, to be written: one of `AnySaved`."""
    inner = {type(one) for one in state.sums.values()} if isinstance(state, Places) else set()
    return KINDS[type(state), *inner].of(state)
