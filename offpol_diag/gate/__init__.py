"""Check numbers against limits, or against an earlier result.

`bounds.py` parses bounds, `aliases.py` knows the names that trainers log, `numbers.py` looks a number up,
`verdicts.py` checks it against its bound, `diagnosis.py` checks the diagnosis, `baseline.py` compares with an
earlier result, and `file.py` collects the bounds of options and a gate file.
"""

from offpol_diag.gate.bounds import Bound, Name, Span, Steps, name, parse, span
from offpol_diag.gate.file import Requirements, requirements
from offpol_diag.gate.verdicts import beyond, distinct_digits, judge, outcome

__all__ = [
    "Bound",
    "Name",
    "Requirements",
    "Span",
    "Steps",
    "beyond",
    "distinct_digits",
    "judge",
    "name",
    "outcome",
    "parse",
    "requirements",
    "span",
]
