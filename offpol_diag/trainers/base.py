"""What each trainer's file is written with: its log as a function, numpy on demand, and parts of presets.

Nothing here imports numpy before a number is computed, so that printing a trainer's configuration is fast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from offpol_diag.presets import Over, Reject, Veto

if TYPE_CHECKING:
    import numpy as np

    from offpol_diag.engine.segments import Array
    from offpol_diag.trainers.logs import Totals
    from offpol_diag.trainers.tokens import Tokens
else:
    Array = Tokens = Totals = Any  # they import numpy

    class _Numpy:
        """numpy, imported when a function of it is first used."""

        def __getattr__(self, name: str) -> Any:
            import numpy

            result = getattr(numpy, name)
            setattr(self, name, result)
            return result

    np = _Numpy()

__all__ = [
    "EPS",
    "SAFETY",
    "Array",
    "Log",
    "Number",
    "Numbers",
    "Side",
    "Tokens",
    "Totals",
    "half",
    "named",
    "np",
    "of_rows",
    "std",
]

EPS = 1e-8
"""Constant that several trainers' masked means add to the denominator; reproduced here."""
SAFETY = 20.0
"""Bound on log-ratios before exp, nats, in most trainers."""

Number = Any
"""A number of the whole dump."""
Numbers = dict[str, Number]
"""Logged name → number; None where there is nothing to log, as `Totals.given` says."""


@dataclass(frozen=True, eq=False)
class Log:
    """What one trainer, or one generation of it, logs.

    Attributes:
        name: the value of `logs` in presets.
        of: the trainer's own formulas, of a batch under a preset and of what adds them up over batches.
    """

    name: str
    of: Callable[[Tokens, Totals], Numbers]


def named(prefix: str, numbers: Numbers) -> Numbers:
    """Return the numbers with a prefix before their names."""
    return {prefix + name: x for name, x in numbers.items()}


def std(first: Number, second: Number, n: Number, less: float = 1) -> Number:
    """Return √((Σx² − (Σx)²/n) / (n − less)) from Σx and Σx²; NaN if n ≤ less. A shift of x is allowed."""
    squares = np.maximum(second - first * first / n, 0.0)
    return np.where(n > less, np.sqrt(squares / (n - less)), np.nan)


# ---------------------------------------------------------------- parts of presets


def of_rows(over: Over) -> bool:
    """Return whether a statistic or weight over this has a number of each sequence, rather than token."""
    return over not in ("token", "segment", "batch")


Side = Literal["lower", "upper"]
Part = TypeVar("Part", Reject, Veto)


def half(rule: Part | None, side: Side) -> Part | None:
    """Return a rule or veto with only its lower or upper bound; None if it has no such bound."""
    if rule is None or getattr(rule, side) is None:
        return None
    return replace(rule, upper=None) if side == "lower" else replace(rule, lower=None)
