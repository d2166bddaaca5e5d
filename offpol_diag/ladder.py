"""Which method: up the ladder from no correction to weights of whole sequences, as far as data ask for it.

Whatever is chosen among many by a noisy estimate looks better than it is, so a method has to earn its place
against the one that stands: token TIS at 2.0, which is hardly ever far from the best.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from offpol_diag.candidates import DEFAULT, NOTHING
from offpol_diag.summary import Alignment, AlignmentRow

Rows = Mapping[str, AlignmentRow]

MARGIN = 0.003
"""By how much of the alignment a method must beat the one that stands, by the lower end of its estimate."""
SURE = {"nothing": 1.0, "token": 1.0, "sequence": 2.0}
"""Standard errors from an estimate to that end, by what is judged: sequences' weights err by far more."""


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
    best = _standing(known, alignment.risk)
    for name, row in known.items():
        if _beats(row, known[best]):
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


def _standing(known: Rows, risk: float | None) -> str:
    """What is taken when no estimate of a direction speaks against it.

    That is the default, which pays for the noise that its weights add; no correction where that price is
    higher than what the systematic part of r may cost.
    """
    default, nothing = known.get(DEFAULT.name), known.get(NOTHING.name)
    if default is None or nothing is None:
        return next(name for name in (DEFAULT.name, NOTHING.name, *known) if name in known)
    price = _noise(default) - _noise(nothing)
    return NOTHING.name if risk is not None and price > risk else DEFAULT.name


def _noise(row: AlignmentRow) -> float:
    return 0.5 * math.log(row.noise) if row.noise else 0.0


def _value(row: AlignmentRow) -> float:
    return row.score or 0.0


def _beats(row: AlignmentRow, standing: AlignmentRow) -> bool:
    """Whether it is better for sure, a bias that may be hidden in noise held against it."""
    if row.measured is None or row.error is None:
        return False
    low = min(row.measured, _value(row)) - SURE[row.judges] * row.error
    return low > _value(standing) + MARGIN


def _share(log: float) -> float:
    """A difference of logs of alignments as a share of the larger one."""
    return 1 - math.exp(-log)
