"""A slice's columns as arrays, under our names."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import pyarrow as pa

from offpol_diag.readers import columns, kinds
from offpol_diag.readers.ragged import (
    Array,
    Flags,
    Floats,
    Ints,
    Ragged,
    floats,
    ragged,
    starts,
)
from offpol_diag.readers.schemas import Plan

PER_SEQUENCE = (columns.REWARDS, columns.ADVANTAGES)


@dataclass(frozen=True)
class Rows:
    """S rows, masked tokens still there.

    Attributes:
        lists: columns with a list per row.
        numbers: columns with a number per row, [S] float64, NaN where null.
        counts: labels that are numbers, likewise.
    """

    lists: dict[str, Ragged]
    numbers: dict[str, Floats]
    counts: dict[str, Floats] = field(default_factory=dict)

    @property
    def lengths(self) -> Ints:
        """Tokens per row, masked ones counted, [S]."""
        return self.lists[columns.ROLLOUT].lengths

    @cached_property
    def offsets(self) -> Ints:
        """Where each row starts, [S+1]."""
        return starts(self.lengths)

    @cached_property
    def live(self) -> Flags:
        """Tokens that the mask lets through, [T] bool; all where there is no mask."""
        mask = self.lists.get(columns.MASK)
        if mask is None:
            return np.ones(int(self.offsets[-1]), np.bool_)
        return np.equal(mask.values, 1)

    @cached_property
    def kept(self) -> int:
        """How many those are."""
        return int(np.count_nonzero(self.live))

    @cached_property
    def kept_lengths(self) -> Ints:
        """How many of them each row has, [S]."""
        return self.lengths if self.whole else self.counted(self.live)

    def counted(self, flags: Flags) -> Ints:
        """How many tokens of each row have a flag, [T] → [S]."""
        found = np.zeros(len(self.lengths), np.int64)
        filled = np.flatnonzero(self.lengths)  # of an empty row reduceat gives another one's token
        found[filled] = np.add.reduceat(flags.view(np.int8), self.offsets[filled], dtype=np.int32)
        return found

    @property
    def whole(self) -> bool:
        """Whether the mask excludes no token."""
        return self.kept == int(self.offsets[-1])

    def let_through(self, values: Array) -> Array:
        """What the mask lets through of the tokens' values, [T] → [kept]; not to be written to."""
        return values if self.kept == len(values) else values[self.live]


def decode(table: pa.RecordBatch, plan: Plan) -> Rows:
    """The columns of a slice that become tensors, and those of labels that must be numbers."""
    found = {role: table.column(name) for role, name in plan.columns.items()}
    lists = {role: ragged(column) for role, column in found.items() if kinds.is_list(column.type)}
    single = {role: floats(found[role]) for role in PER_SEQUENCE if role in found and role not in lists}
    counts = {role: floats(found[role]) for role in columns.COUNTS if role in found}
    return Rows(lists, single, counts)
