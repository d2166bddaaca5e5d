"""Which method: up the ladder from no correction to weights of whole sequences, as far as the data ask for it.

Whatever is chosen among many by a noisy estimate looks better than it is, so a method has to earn its place
against the one that stands: token TIS at 2.0, which is hardly ever far from the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from offpol_diag.candidates import DEFAULT, NOTHING
from offpol_diag.summary import AlignmentRow

Rows = Mapping[str, AlignmentRow]

MARGIN = 0.003
"""By how much of the alignment a method that judges single tokens must beat the one that stands."""
LONG_MARGIN = 0.01
"""The same of one that judges whole sequences, of the lower end of what was measured."""
SURE = 2.0
"""Standard errors from an estimate to that end."""


@dataclass(frozen=True)
class Choice:
    """The method that was chosen, and the one to try next.

    Attributes:
        best: name of its row.
        next: of the runner-up, None where there is none.
        price: share of the alignment that the runner-up would cost, by the estimate; never below 0.
        gain: share of the alignment that the best has over no correction.
    """

    best: str
    next: str | None
    price: float
    gain: float


def choose(rows: Rows) -> Choice | None:
    """The choice among rows that no guard refused; None where nothing is known of any."""
    known = {name: row for name, row in rows.items() if row.score is not None and row.refused is None}
    if not known:
        return None
    best = _standing(known)
    for name, row in known.items():
        if _beats(row, known[best]):
            best = name
    others = {name: _value(row) for name, row in known.items() if name != best and _usual(row)}
    runner_up = max(others, key=lambda name: others[name], default=None)
    price = 0.0 if runner_up is None else _share(_value(known[best]) - others[runner_up])
    nothing = known.get(NOTHING.name)
    gain = 0.0 if nothing is None else _value(known[best]) - _value(nothing)
    return Choice(best, runner_up, max(price, 0.0), _share(gain))


def _standing(known: Rows) -> str:
    """What is taken when nothing speaks against it."""
    return next((name for name in (DEFAULT.name, NOTHING.name) if name in known), next(iter(known)))


def _usual(row: AlignmentRow) -> bool:
    return row.judges != "sequence"


def _value(row: AlignmentRow) -> float:
    assert row.score is not None
    return row.score


def _beats(row: AlignmentRow, standing: AlignmentRow) -> bool:
    if _usual(row):
        return _value(row) > _value(standing) + (MARGIN if _usual(standing) else 0.0)
    if row.measured is None or row.error is None:
        return False
    low = min(row.measured, _value(row)) - SURE * row.error
    return low > _value(standing) + LONG_MARGIN


def _share(log: float) -> float:
    """A difference of logs of alignments as a share of the larger one."""
    return 1 - math.exp(-log)
