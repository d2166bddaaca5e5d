"""What is kept of a dump while it streams by, by place and by rank; and what all such states can do."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Annotated, Generic, Protocol, Self, TypeVar

from offpol_diag.accumulators.fields import Saved, Size, require


class State(Protocol):
    """What a tally is made of."""

    def merge(self, other: Self) -> Self:
        """The state of both parts together."""
        ...


M = TypeVar("M", bound=State)


@dataclass(frozen=True)
class Places(Saved, Generic[M]):
    """States by place: one step, one position bucket, one host; mostly sums."""

    sums: dict[str, M]

    def merge(self, other: Places[M]) -> Places[M]:
        """Merge place by place."""
        merged = dict(self.sums)
        for key, sums in other.sums.items():
            merged[key] = merged[key].merge(sums) if key in merged else sums
        return Places(merged)


T = TypeVar("T")


@dataclass(frozen=True)
class Best(Saved, Generic[T]):
    """The k records with the highest score."""

    k: Annotated[int, Size("K")]
    records: tuple[tuple[float, T], ...]

    def check(self) -> None:
        """Refuse more records than are kept."""
        require(len(self.records) <= self.k, f"there are more than {self.k} records")

    def merge(self, other: Best[T]) -> Best[T]:
        """The best of both; equals are ordered by their text, so that the cut does not matter."""
        both = sorted((*self.records, *other.records), key=lambda record: -record[0])
        best: list[tuple[float, T]] = []
        for _, equal in groupby(both, key=lambda record: record[0]):
            if len(best) >= self.k:
                break
            tied = list(equal)
            best += tied if len(tied) == 1 else sorted(tied, key=lambda record: str(record[1]))
        return Best(self.k, tuple(best[: self.k]))
