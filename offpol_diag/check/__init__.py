"""Compare the metrics that a trainer logged with those that its dump says it must have logged.

curves     the files of an experiment tracker → name → step → value
verdict    which metrics are equal, by how much others differ, and from which step on

Here is the result, as `--json` writes it: without numpy, so that a page is drawn again fast.
"""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, FiniteFloat, ValidationError, model_validator

from offpol_diag.errors import ResultError
from offpol_diag.printable import printable_json
from offpol_diag.result import first_mistake

FORMAT: Literal["offpol-diag check 1"] = "offpol-diag check 1"
ABSOLUTE = 2e-8
"""Smallest value that a relative difference is taken of."""

TrainingStep = Annotated[int, Field(ge=-(2**63), lt=2**63)]


class Point(BaseModel):
    """One training step of one metric."""

    step: TrainingStep
    logged: FiniteFloat | None = Field(description="the trainer's value; null where it is not finite")
    expected: FiniteFloat = Field(description="the value that the dump says")


class MetricCheck(BaseModel):
    """One metric of the trainer against the dump."""

    name: str = Field(description="the trainer's name of it")
    curve: str = Field(description="its name in the file of curves")
    verdict: Literal["equal", "different"]
    points: list[Point] = Field(min_length=1, description="both values at each step compared")
    different: list[TrainingStep] = Field([], description="steps that differ")
    worst: TrainingStep = Field(
        description="step where both values are furthest apart, relative to the larger"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if not {self.worst, *self.different} <= {one.step for one in self.points}:
            raise ValueError("a step that differs has no point")
        if bool(self.different) != (self.verdict == "different"):
            raise ValueError("the verdict contradicts the steps that differ")
        return self

    @property
    def first(self) -> int | None:
        """First step that differs."""
        return min(self.different, default=None)

    @property
    def not_finite(self) -> list[int]:
        """Steps at which the logged value is NaN or infinite."""
        return [one.step for one in self.points if one.logged is None]

    def at(self, step: int) -> Point:
        """Return the point of a step."""
        return next(one for one in self.points if one.step == step)

    @property
    def extreme(self) -> bool:
        """Whether it is a maximum or minimum, which says less of what is wrong than a mean."""
        return not {"max", "min"}.isdisjoint(self.name.rpartition("/")[2].split("_"))


class Checked(BaseModel):
    """The verdict on a trainer's curves."""

    format: Literal["offpol-diag check 1"] = FORMAT
    version: str = Field(default_factory=lambda: version("offpol-diag"), description="of offpol-diag")
    dump: list[str] = Field([], description="files of the dump")
    logged: list[str] = Field([], description="files of curves")
    trainer: str
    preset: str
    chosen: bool = Field(description="whether the preset was chosen because it reproduces the most metrics")
    steps: list[TrainingStep] = Field(
        min_length=1, description="training steps that both the dump and the curves hold"
    )
    shift: int = Field(
        0,
        description="how much higher the curves number each step than the dump, whose numbers are used",
    )
    missing: list[TrainingStep] = Field([], description="training steps of the dump that no curve holds")
    metrics: list[MetricCheck] = Field(min_length=1)
    unmatched: list[str] = Field([], description="metrics of the trainer that no curve holds")
    unknown: list[str] = Field([], description="curves that are no metric of the trainer")
    ambiguous: dict[str, list[str]] = Field({}, description="metric → curves that may be it")

    @property
    def different(self) -> list[MetricCheck]:
        """The metrics that differ."""
        return [one for one in self.metrics if one.verdict == "different"]

    @property
    def equal(self) -> bool:
        """Whether every metric compared is equal."""
        return not self.different

    def to_json(self) -> str:
        """Return the result as JSON."""
        return printable_json(json.dumps(self.model_dump(mode="json"), indent=1, ensure_ascii=False)) + "\n"


def loads(text: str, name: str) -> Checked:
    """Parse the JSON of a check; `name` is its name in errors."""
    try:
        return Checked.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: {first_mistake(error)}", "give what check --json wrote") from error


def relative_difference(point: Point) -> float:
    """Return the difference relative to the larger value, 0 to 2; infinite where one is not finite."""
    if point.logged is None:
        return math.inf
    return abs(point.logged - point.expected) / max(abs(point.logged), abs(point.expected), ABSOLUTE)
