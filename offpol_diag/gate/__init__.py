"""Check numbers against limits, or against an earlier result.

`bounds.py` says what must hold, `judge.py` whether it does.
"""

from offpol_diag.gate.bounds import Baseline, Bound, FailOn, Gates, Name, Span, Tolerance, read, required
from offpol_diag.gate.judge import beyond, judged, not_compared, outcome, plain

__all__ = [
    "Baseline",
    "Bound",
    "FailOn",
    "Gates",
    "Name",
    "Span",
    "Tolerance",
    "beyond",
    "judged",
    "not_compared",
    "outcome",
    "plain",
    "read",
    "required",
]
