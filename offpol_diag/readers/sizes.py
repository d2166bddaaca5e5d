"""How large batches are, and the row groups that they are cut from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from offpol_diag.readers.files import Part

ROOM = 1.2
"""By how much batches may be larger than was asked for, where that makes one batch less."""
SLACK = 1.1
"""By how much one may be larger than another: sequences are not cut, and sizes are told by footers."""


@dataclass(frozen=True)
class Size:
    """How large batches are.

    Attributes:
        most: tokens, unless one sequence has more.
        aim: tokens that they have about; inf for as many as they may have.
    """

    most: int
    aim: float = math.inf

    @property
    def even(self) -> bool:
        """Whether they are to be of about one size."""
        return self.aim < math.inf

    @classmethod
    def evenly(cls, tokens: float, asked: int) -> Size:
        """For so many tokens in batches of `asked` or a little more, none of them small."""
        most = max(1, int(ROOM * asked))
        return cls(most, tokens / math.ceil(max(tokens, 1) / most))

    def of(self, tokens: float) -> int:
        """The largest slice of a row group of so many tokens."""
        if not self.even:
            return self.most
        return max(1, math.ceil(SLACK * tokens / math.ceil(max(tokens, 1) / self.most)))


def sizes(parts: Sequence[Part], by_rows: bool) -> list[tuple[Part, int, float]]:
    """Every row group that is read, and how large it is: its bytes, or its rows where those tell more."""
    groups = [(part, at) for part in parts for at in part.groups]
    told = not by_rows and all(part.group_bytes[at] > 0 for part, at in groups if part.group_rows[at])
    return [(part, at, float(_size(part, at) if told else part.group_rows[at])) for part, at in groups]


def _size(part: Part, group: int) -> int:
    return part.group_bytes[group] if part.group_rows[group] else 0


def share(part: Part, group: int) -> float:
    """How much of a row group is read."""
    if part.between is None:
        return 1.0
    return (part.between[1] - part.between[0]) / part.group_rows[group]
