"""Mergeable state: what is kept of a dump while it streams by.

Every state has `merge`, which is associative and commutative up to rounding (sums are compensated), so how
a dump is cut changes no number. Numbers are read out once, at the end.
"""

from __future__ import annotations

from offpol_diag.accumulators.bins import Bins, Counts
from offpol_diag.accumulators.extreme import Extremes, extremes
from offpol_diag.accumulators.groups import SAMPLE, GroupSample
from offpol_diag.accumulators.logsums import LogSums
from offpol_diag.accumulators.state import Best, Places, State
from offpol_diag.accumulators.sums import Sums
from offpol_diag.accumulators.tails import TAIL, Floor, Tail

__all__ = [
    "SAMPLE",
    "TAIL",
    "Best",
    "Bins",
    "Counts",
    "Extremes",
    "Floor",
    "GroupSample",
    "LogSums",
    "Places",
    "State",
    "Sums",
    "Tail",
    "extremes",
]
