"""Hold numbers against bounds, or against an earlier result: numbers and bounds → verdicts.

`bounds.py` is the grammar of bounds, `numbers.py` finds the number that a name means, `verdicts.py` judges
it, `baseline.py` compares with an earlier result, and `file.py` gathers what must hold from options and a
gate file.
"""

from offpol_diag.gate.bounds import Bound, Name, Span, Steps, name, parse, span
from offpol_diag.gate.file import Requirements, requirements
from offpol_diag.gate.verdicts import apart, beyond, judge, outcome

__all__ = [
    "Bound",
    "Name",
    "Requirements",
    "Span",
    "Steps",
    "apart",
    "beyond",
    "judge",
    "name",
    "outcome",
    "parse",
    "requirements",
    "span",
]
