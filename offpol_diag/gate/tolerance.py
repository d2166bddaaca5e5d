"""How much worse than an earlier result is allowed."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from offpol_diag.errors import OffpolError, UsageError
from offpol_diag.gate.bounds import EVERY, Name, name


@dataclass(frozen=True)
class Tolerance:
    """How much worse is allowed: a share of the baseline's value, plus an amount in the metric's own unit."""

    share: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        parts = [f"{100 * self.share:g}%"] if self.share or not self.amount else []
        return " + ".join([*parts, *([f"{self.amount:g}"] if self.amount else [])])

    def of(self, value: float) -> float:
        """The amount allowed for a baseline's value."""
        return self.share * abs(value) + self.amount


USUAL = Tolerance(share=0.1)
EXAMPLE = 'write "10%" (of the baseline), "0.001" (in its unit) or "10% + 0.001"'


def tolerance(text: str) -> Tolerance:
    """`10%`, `0.001`, `10% + 0.001`.

    Raises:
        UsageError: anything else, a negative one, or one that is not finite.
    """
    parts = [part.strip() for part in re.split(r"(?<![eE])\+", text)]
    shares = [_amount(part[:-1], text) / 100 for part in parts if part.endswith("%")]
    amounts = [_amount(part, text) for part in parts if not part.endswith("%")]
    if len(shares) > 1 or len(amounts) > 1:
        raise UsageError(f'"{text}" is no tolerance', EXAMPLE)
    return Tolerance(*(shares or [0.0]), *(amounts or [0.0]))


def _amount(text: str, whole: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value) or value < 0:
        raise UsageError(f'"{whole}" is no tolerance', EXAMPLE)
    return value


def named_tolerance(text: str) -> tuple[Name | None, Tolerance]:
    """`10%` for all, `k3=5%` for one.

    Raises:
        UsageError: no such form.
    """
    before, equals, after = text.rpartition("=")
    try:
        return (comparable(before) if equals else None), tolerance(after)
    except OffpolError as error:
        raise UsageError(f'--tolerance "{text}": {error.message}', error.hint) from error


def comparable(text: str) -> Name:
    """A name of which two runs have one number each.

    Raises:
        UsageError: no name, or one that quantifies over every step.
    """
    found = name(text)
    if found.over == EVERY:
        raise UsageError(
            f'"{text}": two runs have different steps', f"compare max:{found.number} or median:{found.number}"
        )
    return found
