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

UNRELIABLE = "unreliable: "
"""How the note on a number begins that a heavy tail of the weights leaves unreliable; k̂ follows."""


def finite(x: float) -> float:
    """Return x, or the largest float64 of its sign where it overflows."""
    return min(max(x, -LARGEST), LARGEST)


@dataclass(slots=True)
class Number:
    """A number with its interval, unit and definition.

    `value` is None where the number cannot be computed; `unknown` gives the reason.

    In JSON it is the list [value, low, high, unit, note, log10, clamped], without nulls at the end: `low` and
    `high` are the interval, the unit of a pure number is null, and `note` is why there is no value, where
    there is none.

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
        """Return the list that it is in JSON."""
        low, high = self.interval or (None, None)
        note = self.note if self.known else self.unknown
        found = [self.value, low, high, self.unit or None, note, self.log10, self.clamped]
        while found and found[-1] is None:
            found.pop()
        return found

    @classmethod
    def of(cls, parts: tuple[Any, ...]) -> Number:
        """Return the number that a list in JSON is.

        Raises:
            ValueError: its interval has one end.
        """
        value, low, high, unit, note, log10, clamped = parts
        if (low is None) != (high is None):
            raise ValueError("an interval has two ends")
        found = cls(value, None if low is None else (low, high), unit or "", log10=log10, clamped=clamped)
        found.unknown = note if not found.known else OVERFLOWS if value is None else None
        found.note = note if found.known else None
        return found

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, __: GetCoreSchemaHandler) -> CoreSchema:
        """Let pydantic read and write it as a list."""
        number, text = core_schema.float_schema(allow_inf_nan=False, strict=True), core_schema.str_schema()
        parts: list[CoreSchema] = [
            core_schema.with_default_schema(core_schema.nullable_schema(part), default=None)
            for part in (number, number, number, text, text, number, number)
        ]
        of_list = core_schema.no_info_after_validator_function(cls.of, core_schema.tuple_schema(parts))
        return core_schema.json_or_python_schema(
            of_list,
            core_schema.union_schema([core_schema.is_instance_schema(cls), of_list]),
            ref="Number",
            serialization=core_schema.plain_serializer_function_ser_schema(cls.parts),
        )

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> dict[str, Any]:
        """Describe the list, which may be shorter."""
        found = handler(schema)
        handler.resolve_ref_schema(found)["minItems"] = 0
        return found


Numbers = dict[str, Number]
