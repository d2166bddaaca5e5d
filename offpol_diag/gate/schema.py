"""The grammar of a gate file: its tables, and what one value must be."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, PlainValidator

from offpol_diag.errors import OffpolError
from offpol_diag.gate.bounds import EVERY, Judge, Level, Name, Span, name, span
from offpol_diag.gate.tolerance import Tolerance, comparable, tolerance


def _told(error: OffpolError) -> ValueError:
    return ValueError("; ".join(part for part in (error.message, error.hint) if part))


def _name(value: object) -> Name:
    if not isinstance(value, str):
        raise ValueError("it must be a string")
    try:
        return name(value)
    except OffpolError as error:
        raise _told(error) from error


def _comparable(value: object) -> Name:
    if not isinstance(value, str):
        raise ValueError("it must be a string")
    try:
        return comparable(value)
    except OffpolError as error:
        raise _told(error) from error


def _span(value: object) -> Span:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError('it must be a step (7) or a span of steps ("100..200", "100..", "..99")')
    try:
        return span(str(value))
    except OffpolError as error:
        raise _told(error) from error


def _tolerance(value: object) -> Tolerance:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError('it must be an amount (0.001) or a share ("10%")')
    try:
        return tolerance(str(value))
    except OffpolError as error:
        raise _told(error) from error


Named = Annotated[Name, PlainValidator(_name)]
Compared = Annotated[Name, PlainValidator(_comparable)]
Spanned = Annotated[Span, PlainValidator(_span)]
Tolerated = Annotated[Tolerance, PlainValidator(_tolerance)]
Text = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
    """A table of the file; unknown keys are refused, and so are numbers written as text."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Defaults(Table):
    """What holds where a bound says nothing."""

    level: Level = "error"
    judge: Judge = "interval"


class Override(Table):
    """Other values for some steps, some presets, or both."""

    steps: Spanned | None = None
    presets: list[Text] = []
    max: float | None = None
    min: float | None = None
    level: Level | None = None
    judge: Judge | None = None

    def slips(self, whole: BoundTable) -> list[tuple[str, str]]:
        """What its types cannot say: (key, rule it breaks)."""
        strange = [row for row in self.presets if row not in whole.presets]
        rules: list[tuple[str, str, bool]] = [
            ("", "it says for which steps or presets it holds", self.steps is None and not self.presets),
            ("", "it overrides nothing: give max, min, level or judge", not _changes(self)),
            (
                "steps",
                f"only bounds on {EVERY}:NAME differ by step",
                self.steps is not None and whole.name.over != EVERY,
            ),
            ("presets", f"{', '.join(strange)} is not among the presets of the bound", bool(strange)),
        ]
        return [(key, rule) for key, rule, broken in rules if broken]


def _changes(row: Override) -> bool:
    return any(value is not None for value in (row.max, row.min, row.level, row.judge))


class BoundTable(Table):
    """One bound, for one number or for one number of several presets."""

    name: Named
    max: float | None = None
    min: float | None = None
    level: Level | None = None
    judge: Judge | None = None
    presets: list[Text] = []
    steps: Spanned | None = None
    note: str = ""
    override: list[Override] = []

    def slips(self) -> list[tuple[str, str]]:
        """What its types cannot say: (key, rule it breaks)."""
        crossed = self.max is not None and self.min is not None and self.min > self.max
        bare = self.max is None and self.min is None
        rules: list[tuple[str, str, bool]] = [
            ("", "it has no limit: give max, min or both", bare),
            ("min", "it is above max: no number can hold both", crossed),
            (
                "steps",
                f"{self.name} is a number of the whole dump; write {EVERY}:{self.name} or median:{self.name}",
                self.steps is not None and not self.name.over,
            ),
            (
                "presets",
                f"the name has a preset already: {self.name.number}",
                bool(self.presets) and "." in self.name.number,
            ),
        ]
        own = [(key, rule) for key, rule, broken in rules if broken]
        inner = [
            (f"override {at}{', ' if key else ''}{key}", rule)
            for at, row in enumerate(self.override, 1)
            for key, rule in row.slips(self)
        ]
        return own + inner


class BaselineTable(Table):
    """An earlier result that nothing may be worse than."""

    result: Text | None = None
    tolerance: Tolerated | None = None
    tolerances: dict[Compared, Tolerated] = {}
    only: list[Compared] = []
    presets: list[Text] = []
    level: Level | None = None
    judge: Judge | None = None


class GateFile(Table):
    """The whole file."""

    defaults: Defaults = Defaults()
    bound: list[BoundTable] = []
    baseline: BaselineTable | None = None


TABLES: dict[str, type[Table]] = {
    "defaults": Defaults,
    "bound": BoundTable,
    "override": Override,
    "baseline": BaselineTable,
}
"""Key → the table that stands there."""
