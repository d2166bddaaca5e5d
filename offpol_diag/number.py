"""A number with its interval: a short list in JSON."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

from pydantic import GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic_core import CoreSchema, core_schema

LARGEST = sys.float_info.max
OVERFLOWS = "overflows float64; see its log10"
"""Why there is no value, where there is its logarithm."""
PARTS = ("value", "low", "high", "unit", "note", "log10", "clamped")
"""Entries of the list that a number is in JSON; those at its end that are null are left out."""
SCHEMA: dict[str, Any] = {
    "type": "array",
    "title": "Number",
    "description": f"[{', '.join(PARTS)}]; nulls at the end are left out. `low` and `high` are the 95% "
    "interval, `unit` is null for a pure number, `note` a caution, or why there is no value, `log10` that of "
    "a value that overflows, `clamped` the share of terms on which a safety bound acted.",
    "prefixItems": [{"type": ["string" if part in ("unit", "note") else "number", "null"]} for part in PARTS],
    "items": False,
}
"""JSON schema of a number."""


def finite(x: float) -> float:
    """Return x, or the largest float64 of its sign where it overflows."""
    return min(max(x, -LARGEST), LARGEST)


@dataclass(slots=True)
class Number:
    """A number with its interval, unit and definition.

    `value` is None where the number cannot be computed; `unknown` gives the reason.

    Attributes:
        interval: 95%, bootstrap over groups of sequences; an end that overflows is the largest float64.
        unit: nats, fraction, tokens; empty: a pure number.
        over, formula: what it is averaged over, and how; in memory alone (docs/metrics.md lists them).
        unknown: why there is no value, e.g. "missing column rewards".
        note: a caution on this number, e.g. an unreliable heavy tail.
        log10: log10 of the value, where the value itself overflows.
        clamped: share of terms on which the safety bound acted.
    """

    value: float | None = None
    interval: tuple[float, float] | None = None
    unit: str = ""
    over: str = field(default="", compare=False)
    formula: str = field(default="", compare=False)
    unknown: str | None = None
    note: str | None = None
    log10: float | None = None
    clamped: float | None = None

    @property
    def known(self) -> bool:
        """Whether there is a value, be it the logarithm of one that overflows."""
        return self.value is not None or self.log10 is not None

    def parts(self) -> list[float | str | None]:
        """Return the list that it is in JSON: `PARTS`."""
        low, high = self.interval or (None, None)
        note = "; ".join(filter(None, (self.unknown, self.note))) or None
        found = [self.value, low, high, self.unit or None, note, self.log10, self.clamped]
        while found and found[-1] is None:
            found.pop()
        return found

    @classmethod
    def of(cls, parts: object) -> Number:
        """Return the number that a list of `PARTS` is.

        Raises:
            ValueError: it is no such list.
        """
        if isinstance(parts, Number):
            return parts
        if not isinstance(parts, list) or len(parts) > len(PARTS):
            raise ValueError(f"a number is a list of {', '.join(PARTS)}")
        whole: list[Any] = [*parts, *[None] * (len(PARTS) - len(parts))]
        value, low, high, unit, note, log10, clamped = whole
        floats = [x for x in (value, low, high, log10, clamped) if x is not None]
        if not all(type(x) in (int, float) and abs(x) <= LARGEST for x in floats):
            raise ValueError(f"{parts} holds what is no finite number")
        if not all(isinstance(text, str | None) for text in (unit, note)) or (low is None) != (high is None):
            raise ValueError("unit and note of a number are texts, and an interval has two ends")
        unknown, interval = None, None if low is None else (low, high)
        if value is None and log10 is None:
            unknown, note = note, None
        elif value is None and note and note.startswith(OVERFLOWS):
            unknown, note = OVERFLOWS, note.removeprefix(OVERFLOWS).removeprefix("; ") or None
        return cls(value, interval, unit or "", unknown=unknown, note=note, log10=log10, clamped=clamped)

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Let pydantic read and write it as a list."""
        written = core_schema.plain_serializer_function_ser_schema(cls.parts)
        return core_schema.no_info_plain_validator_function(cls.of, ref="Number", serialization=written)

    @classmethod
    def __get_pydantic_json_schema__(cls, _: CoreSchema, __: GetJsonSchemaHandler) -> dict[str, Any]:
        """Describe the list."""
        return SCHEMA


Numbers = dict[str, Number]
