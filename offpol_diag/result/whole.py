"""The Result, which holds every number of every report, and its JSON (`format = 2`).

Renderers, the recommendation and the gate read only a `Result`: it suffices to draw a report again, and none
of them computes a number of the analysis. What is in memory is what is in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, repeat
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Self

from pydantic import BaseModel, Field, ValidationError, model_validator

from offpol_diag.errors import ResultError
from offpol_diag.files import MOST_RESULT, read, up_to
from offpol_diag.metrics import worse
from offpol_diag.number import Number, Numbers
from offpol_diag.printable import printable_json
from offpol_diag.result.charts import Charts, Lengths
from offpol_diag.result.compared import Comparison, Contrast, Pairing, Sweep
from offpol_diag.result.facts import Axis, DumpFacts, Histogram, Place, PresetFacts, Run, Worst
from offpol_diag.result.findings import Diagnosis, GateVerdict, Recommendation
from offpol_diag.result.parts import Model, Whole
from offpol_diag.result.reference import Reference
from offpol_diag.rows import Columns

FORMAT = 2
HINT = "give the file that `offpol-diag analyze --json` wrote"
SAVED = re.compile(r'\s*\{\s*"format":\s*([0-9]+,\s*"(dump|run)"|"offpol-diag check)')
"""How the JSON of a result or of a check begins."""
KIND = re.compile("[/@]")
"""What ends the first word of a subject."""


class Against(Model):
    """A further run against run A (the result around this); of it only the numbers compared are kept."""

    letter: str = Field("B", description="what the run is called: B, C, …")
    run: Result
    headline: str
    pairing: Pairing
    correction: str = Field(description="how p-values were corrected for their number, over all runs")
    level: float
    tested: Whole
    differing: Whole
    contrasts: Annotated[list[Contrast], Columns(Contrast)] = Field(description="most important first")
    needs: dict[str, str] = Field({}, description="what cannot be compared → the columns that it needs")
    notes: list[str] = []


class Metric(Model):
    """What a number is."""

    unit: str = Field("", description="empty: a pure number")
    over: str = Field("", description="what it is averaged over")
    formula: str = ""
    worse: str = Field("", description="which way it is worse: higher, lower, away from a value; or empty")


class Result(Model):
    """The result of an analysis: every number of the report.

    A number is found by its subject and its name. Subjects are `dump`, `preset/NAME`, and these at a place:
    `dump@step/3`, `preset/token_is@step/3`.
    """

    format: Literal[2] = 2
    dump: DumpFacts
    run: Run
    metrics: dict[str, dict[str, Metric]] = Field(
        {}, description="dump, preset, … → name of a number → what it is, at places too"
    )
    numbers: dict[str, Numbers] = Field({}, description="subject → name → number")
    axes: dict[str, Axis] = {}
    presets: dict[str, PresetFacts] = Field({}, description="without what is as by default")
    histograms: dict[str, Histogram] = {}
    worst: Worst = Worst()
    lengths: Lengths | None = None
    diagnosis: Diagnosis | None = None
    recommendation: Recommendation | None = None
    reference: Reference | None = Field(
        None, description="the verdict of three, of a dump with what `rescore` writes"
    )
    charts: Charts = Charts()
    gates: list[GateVerdict] = []
    sweep: Sweep | None = Field(None, description="one preset over many thresholds (`sweep`)")
    comparison: Comparison | None = Field(None, description="presets side by side (`compare DUMP`)")
    against: list[Against] = Field([], description="further runs against this one (`compare A B C`)")

    # ------------------------------------------------------------ numbers

    def of(self, subject: str) -> Numbers:
        """Return the numbers of a subject; none if it has none."""
        return self.numbers.get(subject, {})

    @property
    def whole(self) -> Numbers:
        """The numbers of the whole dump by name, with their prefix."""
        return self.of("dump")

    def preset(self, name: str) -> Numbers:
        """Return the numbers of a preset."""
        return self.of(f"preset/{name}")

    def at(self, axis: str, subject: str = "dump") -> list[Place]:
        """Return the places of an axis with the numbers of a subject there; none without the axis."""
        found = self.axes.get(axis)
        if found is None:
            return []
        rows = zip(found.places, found.order, found.tokens, found.sequences, strict=True)
        first = place_of(axis, "", subject)
        return [Place(*row, self.numbers.get(first + row[0], {})) for row in rows]

    @property
    def prefix(self) -> str:
        """The prefix of the main pair of policies: rollout → old, or the first other that is known."""
        known = (one for one in ("", "total.", "drift2.") if self.number("k3", one).value is not None)
        return next(known, "")

    def number(self, name: str, prefix: str | None = None) -> Number:
        """Return a number of a pair of policies, by default the main one; an empty one if there is none."""
        return self.whole.get((self.prefix if prefix is None else prefix) + name, Number())

    @model_validator(mode="after")
    def _read(self) -> Self:
        self.describe()
        return self

    def describe(self) -> None:
        """Let `metrics` say what each name means, as its first number does, and each number what it is."""
        for kind, numbers in self._by_kind():
            known = self.metrics.setdefault(kind, {})
            for name, number in numbers.items():
                one = known.get(name)
                if one is None or not (one.unit or one.over or one.formula):
                    way = str(worse(name)).replace("either", "")
                    said = {"unit": number.unit, "over": number.over, "formula": number.formula}
                    known[name] = Metric(**said, worse=way)
                else:
                    number.unit, number.over, number.formula = one.unit, one.over, one.formula

    def _by_kind(self) -> Iterator[tuple[str, Numbers]]:
        """Yield all numbers, with the kind of subject that they are of."""
        for subject, numbers in self.numbers.items():
            yield KIND.split(subject, maxsplit=1)[0], numbers
        if self.diagnosis and self.diagnosis.systematic:
            yield "diagnosis", {"systematic": self.diagnosis.systematic}
        if self.lengths:
            yield "length", {"longest": self.lengths.longest}
            for at in self.lengths.curve:
                yield "length", {"ess_sequences": at.ess_sequences}
        if self.sweep:
            points = [*self.sweep.points, *([self.sweep.window.point] if self.sweep.window else [])]
            yield from (("preset", one.numbers) for one in points)
        if self.comparison:
            yield from self.comparison.by_kind()
        for contrast in (contrast for one in self.against for contrast in one.contrasts):
            yield from contrast.by_kind()

    @property
    def is_bug(self) -> bool:
        """Whether the log-probs are logged wrongly, so that no correction may be ranked."""
        return self.diagnosis is not None and self.diagnosis.verdict == "bug"

    @property
    def undecided(self) -> Diagnosis | None:
        """The diagnosis of a dump that cannot decide between causes that fit; None of any other."""
        return self.diagnosis if self.diagnosis is not None and self.diagnosis.candidates else None

    def to_json(self) -> str:
        """Return the published JSON: one object, indented, ending in a newline."""
        self.describe()
        found = self.model_dump(mode="json", exclude={"presets"})
        found["presets"] = {
            name: one.model_dump(mode="json", exclude_defaults=True) for name, one in self.presets.items()
        }
        ordered = {name: found[name] for name in type(self).model_fields}
        return printable_json("".join(indented(ordered))) + "\n"


def idle(numbers: Numbers) -> bool:
    """Return whether every token weighs 1 under a preset with these numbers: no merit of its ESS of 100%."""
    ones = (numbers.get(name) for name in ("weight_min", "weight_max", "tokens_weighted"))
    return all(one is not None and one.value == 1.0 for one in ones)


def place_of(axis: str, place: str, subject: str = "dump") -> str:
    """Return the subject at a place; a slash in the name of an axis is written %2F."""
    return f"{subject}@{axis.replace('%', '%25').replace('/', '%2F')}/{place}"


def indented(value: Any, indent: str = "\n") -> Iterator[str]:
    """Yield the parts of a JSON text: an entry of an object a line, and lists of plain values in one."""
    if isinstance(value, dict) and value:
        for begin, (key, inner) in zip(chain("{", repeat(",")), value.items(), strict=False):
            yield f"{begin}{indent} {json.dumps(key, ensure_ascii=False)}: "
            yield from indented(inner, f"{indent} ")
        yield f"{indent}}}"
    elif isinstance(value, list) and any(isinstance(one, dict | list) for one in value):
        for begin, inner in zip(chain("[", repeat(",")), value, strict=False):
            yield f"{begin}{indent} "
            yield from indented(inner, f"{indent} ")
        yield f"{indent}]"
    else:
        yield json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)


def _unlike(text: str) -> str:
    """Return why a text is no result."""
    if not text.strip():
        return "the file is empty"
    if SAVED.match(text):
        return "this result is cut off: its JSON has no end"
    return "this is not a result of offpol-diag"


class _Stamp(BaseModel):
    format: Whole


def load(path: Path) -> Result:
    """Read a result written by `to_json`.

    Raises:
        ResultError: not readable, not JSON, not ours, or of another format.
    """
    return loads(text_of(path), str(path))


def text_of(path: Path) -> str:
    """Read the JSON of a result."""
    with _readable(str(path)):
        return read(path, MOST_RESULT).decode()


def text_of_stream(stream: BinaryIO, name: str) -> str:
    """Read the JSON of a result from a stream."""
    with _readable(name):
        return up_to(stream, MOST_RESULT).decode()


@contextmanager
def _readable(name: str) -> Iterator[None]:
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ResultError(f"{name}: cannot be read as a result ({why})", HINT) from error


def first_mistake(error: ValidationError) -> str:
    """Return the place of the first mistake in a file, and what is wrong there."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].removeprefix('Value error, ')}"


def loads(text: str, name: str) -> Result:
    """Parse the JSON of a result; `name` is its name in errors."""
    try:
        stamp = _Stamp.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: {_unlike(text)}", HINT) from error
    if stamp.format != FORMAT:
        message = f"{name}: result format {stamp.format}, this version reads format {FORMAT}"
        newer = "a newer version wrote it: update offpol-diag"
        raise ResultError(message, newer if stamp.format > FORMAT else "analyze the dump again")
    try:
        return Result.model_validate_json(text)
    except ValidationError as error:
        raise ResultError(f"{name}: {first_mistake(error)}", HINT) from error
