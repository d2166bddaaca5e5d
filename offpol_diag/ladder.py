"""Which method: the one whose gradient is believed to point best, among those that judge single tokens.

Weights and rules of whole sequences err by far more, so that their estimates say little, and where one looked
best it hardly ever was (docs/advice.md): they are shown, and not chosen.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from offpol_diag.candidates import DEFAULT, NOTHING
from offpol_diag.student import Z
from offpol_diag.summary import Alignment, AlignmentRow

Rows = Mapping[str, AlignmentRow]

AHEAD = 0.003
"""By how much of the alignment another method has to be better than the default, hardly ever far off."""


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
    return _beside(known, _best(known, alignment.direction))


def instead_of(rows: Rows, best: str) -> Choice:
    """A row that is taken whatever the estimates say, and the one to try next."""
    return _beside(_known(rows) | {best: rows[best]}, best)


def sure(alignment: Alignment, choice: Choice) -> bool:
    """Whether the best was measured to be better than no correction by more than both errors together.

    Without a measurement, or where its error is not known, it was not. The errors are those of differences
    to the reference, which may go opposite ways.
    """
    best, nothing = (alignment.rows[name] for name in (choice.best, NOTHING.name))
    if None in (best.measured, best.error, nothing.measured, nothing.error):
        return False
    ahead = (best.measured or 0.0) - (nothing.measured or 0.0)
    return ahead > Z * ((best.error or 0.0) + (nothing.error or 0.0))


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
    return max(other, key=lambda name: _rank(known[name]), default=None)


def _gain(known: Rows, best: str) -> float:
    """Over no correction, in logs."""
    nothing = known.get(NOTHING.name)
    return 0.0 if nothing is None else _value(known[best]) - _value(nothing)


def _best(known: Rows, told: bool) -> str:
    """The best of those that judge single tokens, the default where none is better by `AHEAD`.

    Without token ids or advantages a dump does not tell where the gradient points, and less noise alone must
    not win: the default stands.
    """
    usual = {name: row for name, row in known.items() if row.judges != "sequence"} or known
    best = max(usual, key=lambda name: _rank(usual[name]))
    if DEFAULT.name not in usual:
        return best
    ahead = _value(usual[best]) - _value(usual[DEFAULT.name]) > AHEAD
    return best if told and ahead else DEFAULT.name


def _value(row: AlignmentRow) -> float:
    return row.score or 0.0


def _rank(row: AlignmentRow) -> float:
    """Of those that did the same the first is the best: rounding does not decide."""
    return round(_value(row), 9)


def _share(log: float) -> float:
    """A difference of logs of alignments as a share of the larger one."""
    return 1 - math.exp(-log)
