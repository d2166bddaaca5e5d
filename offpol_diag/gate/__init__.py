"""Check numbers against limits, or against an earlier result.

`bounds.py` says what must hold, `judge.py` whether it does, `ruling.py` of one number.
"""

from offpol_diag.gate.bounds import Baseline, Bound, FailOn, Gates, Name, Tolerance, read, required
from offpol_diag.gate.judge import beyond, judged, not_compared, outcome, plain

__all__ = [
    "Baseline",
    "Bound",
    "FailOn",
    "Gates",
    "Name",
    "Tolerance",
    "beyond",
    "judged",
    "not_compared",
    "outcome",
    "plain",
    "read",
    "required",
]
