"""Which method: the one whose gradient is believed to point best, among those that judge single tokens.

A method that judges whole sequences errs by far more, and whatever is chosen among many by a noisy estimate
looks better than it is: it has to be better for sure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from offpol_diag.candidates import DEFAULT, NOTHING
from offpol_diag.summary import Alignment, AlignmentRow

Rows = Mapping[str, AlignmentRow]

ALIKE = 0.003
"""Alignments that differ by less are equally good."""
MARGIN, SURE = 0.003, 2.0
"""By how much a method that judges whole sequences must beat the best other one: by this share of the
alignment at the lower end of its estimate, so many standard errors below.
"""


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


def choose(alignment: Alignment) -> Choice | None:
    """The choice among rows that no guard refused; None where nothing is known of any."""
    known = _known(alignment.rows)
    if not known:
        return None
    best = _standing(known, alignment.moved is not None)
    for name, row in known.items():
        if row.judges == "sequence" and _beats(row, known[best]):
            best = name
    return _beside(known, best)


def instead_of(rows: Rows, best: str) -> Choice:
    """A row that is taken whatever the estimates say, and the one to try next."""
    return _beside(_known(rows) | {best: rows[best]}, best)


def _known(rows: Rows) -> dict[str, AlignmentRow]:
    """Those of which something is known and that no guard refused."""
    return {name: row for name, row in rows.items() if row.score is not None and row.refused is None}


def _beside(known: Rows, best: str) -> Choice:
    runner_up = _next(known, best)
    price = 0.0 if runner_up is None else _share(_value(known[best]) - _value(known[runner_up]))
    return Choice(best, runner_up, max(price, 0.0), _share(_gain(known, best)))


def _next(known: Rows, best: str) -> str | None:
    """Another method, not the same at another threshold: the default first, then by the estimate."""
    other = [
        name for name, row in known.items() if row.method != known[best].method and row.judges == "token"
    ]
    if DEFAULT.name in other:
        return DEFAULT.name
    return max(other, key=lambda name: _value(known[name]), default=None)


def _gain(known: Rows, best: str) -> float:
    """Over no correction, in logs."""
    nothing = known.get(NOTHING.name)
    return 0.0 if nothing is None else _value(known[best]) - _value(nothing)


def _standing(known: Rows, told: bool) -> str:
    """The best of those that judge single tokens; of such as are as good, the simplest.

    Without advantages a dump does not tell whether the trainer has moved, and less noise alone must not win:
    the default stands.
    """
    usual = {name: row for name, row in known.items() if row.judges != "sequence"} or known
    if DEFAULT.name in usual and not told:
        return DEFAULT.name
    best = max(usual, key=lambda name: _value(usual[name]))
    simple = [name for name in (NOTHING.name, DEFAULT.name) if name in usual]
    return next((name for name in simple if _value(usual[best]) - _value(usual[name]) < ALIKE), best)


def _value(row: AlignmentRow) -> float:
    return row.score or 0.0


def _beats(row: AlignmentRow, standing: AlignmentRow) -> bool:
    """Whether it is better for sure, a bias that may be hidden in noise held against it."""
    if row.measured is None or row.error is None:
        return False
    low = min(row.measured, _value(row)) - SURE * row.error
    return low > _value(standing) + MARGIN


def _share(log: float) -> float:
    """A difference of logs of alignments as a share of the larger one."""
    return 1 - math.exp(-log)
