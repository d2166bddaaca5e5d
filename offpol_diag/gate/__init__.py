"""Check numbers against limits, or against an earlier result.

`bounds.py` says what must hold, `judge.py` whether it does: `ruling.py` of one number, `expect.py` of what a
run claims.
"""

from offpol_diag.gate.bounds import Baseline, Bound, FailOn, Gates, Name, Span, Tolerance, read, required
from offpol_diag.gate.expect import as_expected
from offpol_diag.gate.judge import beyond, judged, not_compared, outcome, plain

__all__ = [
    "Baseline",
    "Bound",
    "FailOn",
    "Gates",
    "Name",
    "Span",
    "Tolerance",
    "as_expected",
    "beyond",
    "judged",
    "not_compared",
    "outcome",
    "plain",
    "read",
    "required",
]
