"""Positive log-probs on the train side.

A value above 0 is no log-probability. In the train columns it is told, not refused: perturbed or
quantised dumps hold some, and every number stays defined. A column that is
positive more often than not has the wrong sign.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from offpol_diag.errors import DumpError
from offpol_diag.readers import columns
from offpol_diag.readers.checks import TOLERANCE, at_most, row_of
from offpol_diag.readers.rows import Rows
from offpol_diag.readers.schemas import Plan
from offpol_diag.readers.slices import Slice

TRAIN = (columns.OLD, columns.CURRENT)
# Enough tokens that more than half of them positive is no accident.
JUDGED_AT = 32
NEGATE = "a log-probability is at most 0; if the column holds negative log-likelihoods, negate it"


@dataclass
class Count:
    """What was seen of one column.

    Attributes:
        tokens: that count.
        positive: beyond the tolerance.
        sizeable: beyond the tolerance on either side of 0.
        first: place and value of the first positive one.
        judged: whether the sign was judged; `sizeable` is not counted from then on.
        wrong: why the sign is wrong; empty when it was found right.
    """

    tokens: int = 0
    positive: int = 0
    sizeable: int = 0
    first: str = ""
    judged: bool = False
    wrong: str = ""

    def decided(self, more: int) -> bool:
        """Whether so many tokens more, none of them positive, change nothing but their number."""
        return self.judged or (not self.positive and self.tokens + more >= JUDGED_AT)

    def add(self, more: Count) -> None:
        """Count what was seen in the rows that follow; the first to see enough tokens has judged."""
        if not self.judged:
            self.sizeable += more.sizeable
            self.judged, self.wrong = more.judged, more.wrong
        self.tokens += more.tokens
        self.positive += more.positive
        self.first = self.first or more.first


@dataclass(frozen=True)
class Signs:
    """Watches the signs of the train columns.

    Attributes:
        plan: the columns.
        counts: by our name of the column.
        waits: a wrong sign is an error only once `merge` knows that no row before these had judged.
    """

    plan: Plan
    counts: dict[str, Count] = field(default_factory=dict)
    waits: bool = False

    def see(self, piece: Slice, rows: Rows) -> None:
        """Count the next rows.

        Raises:
            DumpError: a column with the wrong sign.
        """
        for role in TRAIN:
            if role in rows.lists:
                count = self.counts.setdefault(role, Count())
                if not (count.decided(rows.kept) and at_most(TOLERANCE, rows.lists[role], rows)):
                    self._add(count, role, piece, rows)
                count.tokens += rows.kept
                self._judge(count)

    def _add(self, count: Count, role: str, piece: Slice, rows: Rows) -> None:
        values = np.where(rows.live, rows.lists[role].values, 0.0).astype(np.float64)
        positive = np.flatnonzero(values > TOLERANCE)
        count.positive += positive.size
        if not count.judged:
            count.sizeable += int((np.abs(values) > TOLERANCE).sum())
        if positive.size and not count.first:
            token = positive[0]
            row = int(row_of(positive[:1], rows.offsets)[0])
            at = f"{piece.place(row)}, column {self.plan.columns[role]!r}"
            count.first = f"{at}: token {token - rows.offsets[row]} is {values[token]:.6g}"

    def _judge(self, count: Count) -> None:
        if not count.judged and count.tokens >= JUDGED_AT:
            count.judged = True
            if 2 * count.positive > count.sizeable:
                count.wrong = (
                    f"{count.first}, and {count.positive} of {count.tokens} tokens are above 0 like it: "
                    "the column has the wrong sign"
                )
        if count.wrong and not self.waits:
            raise DumpError(count.wrong, NEGATE)

    def merge(self, counts: Mapping[str, Count]) -> None:
        """Count what others saw in the rows that follow.

        Raises:
            DumpError: a column with the wrong sign.
        """
        for role, more in counts.items():
            count = self.counts.setdefault(role, Count())
            count.add(more)
            self._judge(count)

    def notes(self) -> tuple[str, ...]:
        """A warning for each column with positive values."""
        return remarks({self.plan.columns[role]: count for role, count in self.counts.items()})


def remarks(counts: Mapping[str, Count]) -> tuple[str, ...]:
    """A warning for each column, by its name in the dump, with positive values."""
    return tuple(
        f"{count.positive} of {count.tokens} tokens ({count.positive / count.tokens:.2%}) of "
        f"{column!r} are above 0 by more than {TOLERANCE:g} nats "
        f"(first: {count.first}); such values are no log-probabilities"
        for column, count in counts.items()
        if count.positive
    )
