"""Bounds from options and from a gate file (TOML), with a message for every mistake in the file.

An override for some steps splits its bound, and each part gets its own verdict. Where several overrides apply
to a step, the last one decides.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import ErrorDetails, PydanticCustomError

from offpol_diag.errors import GateFileError, OffpolError, UsageError, did_you_mean
from offpol_diag.gate.baseline import Baseline, compare, not_compared
from offpol_diag.gate.bounds import (
    EVERY,
    USUAL,
    Bound,
    Judge,
    Kind,
    Level,
    Name,
    Span,
    Steps,
    Tolerance,
    comparable,
    name,
    named_tolerance,
    parse,
    prefixed,
    presets_in,
    span,
    tolerance,
)
from offpol_diag.gate.diagnosis import FailOn, diagnosed, judge_diagnosis
from offpol_diag.gate.verdicts import joined, judge
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.summary import DiagnosisVerdict, GateVerdict, Summary
from offpol_diag.wholefiles import MOST_TOML, toml
from offpol_diag.wholefiles import read as read_whole

T = TypeVar("T")

FORM = "its form is that of docs/ci.md: a bound is a table [[bound]] with a name and max or min"

# ---------------------------------------------------------------- schema


def _parsed(parse: Callable[[str], T], kinds: tuple[type, ...], rule: str) -> PlainValidator:
    """Return a pydantic validator that parses values of the given types from their text."""

    def validate(value: object) -> T:
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(rule)
        try:
            return parse(str(value))
        except OffpolError as error:
            raise ValueError(joined(error.message, error.hint)) from error

    return PlainValidator(validate)


Named = Annotated[Name, _parsed(name, (str,), "it must be a string")]
Compared = Annotated[Name, _parsed(comparable, (str,), "it must be a string")]
Spanned = Annotated[
    Span, _parsed(span, (int, str), 'it must be a step (7) or a span of steps ("100..200", "100..", "..99")')
]
Tolerated = Annotated[
    Tolerance, _parsed(tolerance, (int, float, str), 'it must be an amount (0.001) or a share ("10%")')
]
FailsOn = Annotated[DiagnosisVerdict, _parsed(diagnosed, (str,), "it must be a diagnosis (bug)")]
KINDS: tuple[Kind, ...] = ("max", "min")
Text = Annotated[str, Field(min_length=1)]

Mistake = tuple[tuple[int | str, ...], str]
"""The path of a mistake within its table, and its message."""


class Table(BaseModel):
    """A table of the file; refuses unknown keys and numbers written as strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)

    def mistakes(self) -> Iterator[Mistake]:
        """Yield mistakes that checking the type of each value cannot find."""
        yield from ()

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if found := list(self.mistakes()):
            raise PydanticCustomError("mistakes", "mistakes", {"mistakes": found})
        return self


class Defaults(Table):
    """Default level and judge of the bounds."""

    level: Level = "error"
    judge: Judge = "interval"


class Override(Table):
    """Other values of a bound for some steps, some presets, or both."""

    steps: Spanned | None = None
    presets: list[Text] = []
    max: float | None = None
    min: float | None = None
    level: Level | None = None
    judge: Judge | None = None

    def mistakes(self) -> Iterator[Mistake]:
        """Yield mistakes of the override by itself."""
        if self.steps is None and not self.presets:
            yield (), "it must say for which steps or presets it holds"
        if not _over({}, self):
            yield (), "it overrides nothing: give max, min, level or judge"


class BoundTable(Table):
    """A bound on one number, or on that number of each of several presets."""

    name: Named
    max: float | None = None
    min: float | None = None
    level: Level | None = None
    judge: Judge | None = None
    presets: list[Text] = []
    steps: Spanned | None = None
    note: str = ""
    override: list[Override] = []

    def mistakes(self) -> Iterator[Mistake]:
        """Yield mistakes of the bound, and of its overrides given the bound."""
        if self.max is None and self.min is None:
            yield (), "it has no limit: give max, min or both"
        if self.max is not None and self.min is not None and self.min > self.max:
            yield ("min",), "it is above max: no number can satisfy both"
        if self.steps is not None and not self.name.over:
            instead = f"write {EVERY}:{self.name} or median:{self.name}"
            yield ("steps",), f"{self.name} is a number of the whole dump; {instead}"
        if self.presets and "." in self.name.number:
            yield ("presets",), f"the name has a preset already: {self.name.number}"
        for at, row in enumerate(self.override):
            if row.steps is not None and self.name.over != EVERY:
                yield ("override", at, "steps"), f"only bounds on {EVERY}:NAME differ by step"
            if unknown := [one for one in row.presets if one not in self.presets]:
                rule = f"{', '.join(unknown)} is not among the presets of the bound"
                yield ("override", at, "presets"), rule


class BaselineTable(Table):
    """The earlier result to compare with, and its tolerances."""

    result: Text | None = None
    tolerance: Tolerated | None = None
    tolerances: dict[Compared, Tolerated] = {}
    only: list[Compared] = []
    presets: list[Text] = []
    level: Level | None = None
    judge: Judge | None = None


class DiagnosisTable(Table):
    """The diagnoses that fail."""

    fail_on: list[FailsOn] = Field(min_length=1)
    level: Level | None = None
    note: str = ""


class GateFile(Table):
    """The schema of a gate file."""

    defaults: Defaults = Defaults()
    diagnosis: DiagnosisTable | None = None
    bound: list[BoundTable] = []
    baseline: BaselineTable | None = None

    def mistakes(self) -> Iterator[Mistake]:
        """Yield bounds that repeat an earlier one for the same number, side, level, presets and steps."""
        seen: dict[object, int] = {}
        for at, row in enumerate(self.bound):
            for kind in KINDS:
                key = (row.name, kind, row.level or self.defaults.level, tuple(row.presets), row.steps)
                if getattr(row, kind) is not None and (first := seen.setdefault(key, at)) != at:
                    yield ("bound", at, kind), f"[[bound]] {first + 1} has one already"


TABLES: Mapping[str, type[Table]] = {
    "defaults": Defaults,
    "diagnosis": DiagnosisTable,
    "bound": BoundTable,
    "override": Override,
    "baseline": BaselineTable,
}
"""Key in the file → the table class that it holds."""

# ---------------------------------------------------------------- mistakes


def _message(loc: Sequence[int | str], rule: str, table: Mapping[str, Any]) -> str:
    """Format a mistake as `[[bound]] 2 (k3), override 1, max: rule`."""
    head, *rest = loc
    if head != "bound" or not rest or not isinstance(rest[0], int):
        return f"[{head}] {'.'.join(map(str, rest))}: {rule}" if rest else f"{head}: {rule}"
    at, rest = rest[0], rest[1:]
    row = table["bound"][at]
    named = f" ({row['name']})" if isinstance(row, dict) and isinstance(row.get("name"), str) else ""
    words = [f"[[bound]] {at + 1}{named}"]
    if rest[:1] == ["override"] and len(rest) > 1 and isinstance(rest[1], int):
        words.append(f"override {rest[1] + 1}")
        rest = rest[2:]
    if rest:
        words.append(".".join(map(str, rest)))
    return f"{', '.join(words)}: {rule}"


def _rule(detail: ErrorDetails, loc: Sequence[int | str]) -> str:
    kind, given, key = detail["type"], detail["input"], str(loc[-1]) if loc else ""
    if kind == "extra_forbidden":
        inside = [word for word in loc[:-1] if isinstance(word, str)]
        known = list((TABLES[inside[-1]] if inside else GateFile).model_fields)
        return joined(f"no such key; the keys are {', '.join(known)}", did_you_mean(key, known))
    if kind == "literal_error":
        words = str(detail["ctx"]["expected"]).replace("'", "")
        near = did_you_mean(given, words.split(" or ")) if isinstance(given, str) else ""
        return joined(f"{given!r} is not {words}", near)
    if kind == "list_type" and key in ARRAYS:
        return f"it must be a list of tables: write {ARRAYS[key]}"
    if kind == "value_error":
        return str(detail["ctx"]["error"])
    return RULES.get(kind, detail["msg"][:1].lower() + detail["msg"][1:])


ARRAYS = {"bound": "[[bound]]", "override": "[[bound.override]]"}
RULES = {
    "missing": "it is missing",
    "float_type": "it must be a number",
    "finite_number": "it must be finite",
    "string_type": "it must be a string",
    "string_too_short": "it is empty",
    "list_type": "it must be a list",
    "too_short": "it is empty",
    "dict_type": "it must be a table",
    "model_type": "it must be a table",
}
"""pydantic's error type → the message."""

# ---------------------------------------------------------------- what must hold

EXAMPLE = (
    "say what must hold: --fail-on bug, --max k3=0.002 --min ess_tokens=0.5, --gates FILE.toml or "
    "--baseline RESULT.json"
)


@dataclass(frozen=True)
class Requirements:
    """The bounds and the baseline that one run of the gate checks.

    Attributes:
        bounds: those of options first, then those of the file.
        fail_on: the diagnoses that fail, in the same order.
        baseline: settings for comparing with an earlier result, or None.
        result: path of the earlier result, or None.
    """

    bounds: tuple[Bound, ...]
    baseline: Baseline | None = None
    result: Path | None = None
    fail_on: tuple[FailOn, ...] = ()

    @property
    def by_step(self) -> tuple[str, ...]:
        """The names of the numbers that are needed at each training step."""
        names = [bound.full_name for bound in self.bounds]
        names += list(self.baseline.named) if self.baseline else []
        return tuple(dict.fromkeys(one.number for one in names if one.over))

    def presets(self, known: Catalogue) -> tuple[Preset, ...]:
        """Return the presets to compute.

        Raises:
            UsageError: a name is unknown; the error says where it is used.
        """
        named = [
            ("" if bound.source.startswith("--") else f"{bound.source}: ", presets_in([bound.name], known))
            for bound in self.bounds
        ]
        if self.baseline:
            named.append(("", presets_in([one.number for one in self.baseline.named], known)))
            named.append(("", self.baseline.presets))
        found: dict[str, Preset] = {}
        for place, names in named:
            with prefixed(place):
                found |= {one.name: one for one in known.resolve(",".join(names))} if names else {}
        return tuple(found.values())

    def judge(self, now: Summary, base: Summary | None) -> tuple[GateVerdict, ...]:
        """Return all verdicts on the result `now`; `base` is the earlier result."""
        compared = compare(now, base, self.baseline) if base and self.baseline else ()
        return (*judge_diagnosis(now, self.fail_on), *judge(now, self.bounds), *compared)

    def remarks(self, now: Summary, base: Summary | None) -> tuple[str, ...]:
        """Return notes to print with the verdicts."""
        said = not_compared(now, base, self.baseline) if base and self.baseline else ""
        return (said,) if said else ()


def requirements(
    at_most: Sequence[str],
    at_least: Sequence[str],
    file: Path | None,
    result: Path | None,
    tolerances: Sequence[str],
    only: str | None,
    presets: str,
    point: bool,
    fail_on: Sequence[str] = (),
) -> Requirements:
    """Collect the requirements of options and of a gate file; options take precedence.

    Raises:
        UsageError: there is no bound and no baseline, or an option is invalid.
        GateFileError: the file has mistakes in it.
    """
    gates = read(file) if file else Requirements(())
    bounds = (
        *(parse(one, "max") for one in at_most),
        *(parse(one, "min") for one in at_least),
        *gates.bounds,
    )
    with prefixed("--fail-on "):
        diagnoses = (*(FailOn(diagnosed(one)) for one in fail_on), *gates.fail_on)
    base = result or gates.result
    if base is None and (tolerances or only or gates.baseline):
        raise UsageError("there is a tolerance and no baseline", "name it: --baseline RESULT.json")
    if not (bounds or diagnoses) and base is None:
        raise UsageError("no bound is given", EXAMPLE)
    baseline = None
    if base:
        given = dict(named_tolerance(one) for one in tolerances)
        said = gates.baseline or Baseline()
        baseline = replace(
            said,
            label=base.name,
            default=given.get(None) or said.default,
            tolerances={**said.tolerances, **{name: one for name, one in given.items() if name}},
            only=tuple(comparable(word) for word in _words(only)) or said.only,
            presets=_words(presets) or said.presets,
        )
    if point:
        bounds = tuple(replace(one, judge="point") for one in bounds)
        baseline = replace(baseline, judge="point") if baseline else None
    return Requirements(bounds, baseline, base, diagnoses)


def _words(text: str | None) -> tuple[str, ...]:
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


# ---------------------------------------------------------------- reading a file


def read(path: Path) -> Requirements:
    """Read a gate file.

    Raises:
        GateFileError: it cannot be read, is not TOML, holds no bound, or has mistakes in it (all are listed).
    """
    try:
        table = toml(read_whole(path, MOST_TOML).decode("utf-8-sig"))
        found = GateFile.model_validate(table)
    except FileNotFoundError as error:
        raise GateFileError(f"{path}: no such file", "give a gate file, see docs/ci.md") from error
    except OSError as error:
        raise GateFileError(f"{path}: cannot be read ({error.strerror})", "give a gate file") from error
    except UnicodeDecodeError as error:
        raise GateFileError(f"{path}: not UTF-8 (byte {error.start})", FORM) from error
    except ValidationError as error:
        mistakes: list[tuple[Sequence[int | str], str]] = []
        for detail in error.errors():
            loc = detail["loc"]
            if detail["type"] == "mistakes":
                mistakes += [((*loc, *at), rule) for at, rule in detail["ctx"]["mistakes"]]
                continue
            if loc[-1] == "[key]":  # of a table whose keys are values: the key itself is wrong
                loc = loc[:-2]
            elif isinstance(loc[-1], int):
                loc = loc[:-1]
            mistakes.append((loc, _rule(detail, loc)))
        texts = dict.fromkeys(_message(loc, rule, table) for loc, rule in mistakes)
        lines = [f"{path}: {message}" for message in texts]
        if len(lines) == 1:
            raise GateFileError(lines[0], FORM) from error
        raise GateFileError(f"{path}: {len(lines)} mistakes", FORM, lines) from error
    except ValueError as error:
        raise GateFileError(f"{path}: not TOML: {error}", FORM) from error
    if not found.bound and found.baseline is None and found.diagnosis is None:
        raise GateFileError(f"{path}: holds no bound", FORM)
    defaults, said = found.defaults, found.diagnosis
    bounds = tuple(
        bound
        for at, row in enumerate(found.bound, 1)
        for bound in _bounds(row, defaults, f"{path.name}: [[bound]] {at}")
    )
    fail_on: tuple[FailOn, ...] = ()
    if said is not None:
        of = (said.level or defaults.level, f"{path.name}: [diagnosis]", " ".join(said.note.split()))
        fail_on = tuple(FailOn(one, *of) for one in said.fail_on)
    row = found.baseline
    if row is None:
        return Requirements(bounds, fail_on=fail_on)
    baseline = Baseline(
        only=tuple(row.only),
        presets=tuple(row.presets),
        default=row.tolerance or USUAL,
        tolerances=row.tolerances,
        level=row.level or found.defaults.level,
        judge=row.judge or found.defaults.judge,
    )
    return Requirements(bounds, baseline, path.parent / row.result if row.result else None, fail_on)


def _bounds(row: BoundTable, defaults: Defaults, source: str) -> Iterator[Bound]:
    """Yield the bounds of one table: one per limit, preset and part of the steps."""
    note = " ".join(row.note.split())
    for preset in row.presets or [""]:
        held = _over({"level": defaults.level, "judge": defaults.judge}, row)
        rows = [one for one in row.override if not one.presets or preset in one.presets]
        for one in rows:
            held = _over(held, one) if one.steps is None else held
        given = row.name.said or row.name.number
        named = name(f"{preset}.{given}") if preset else row.name
        for steps, values in _parts(row.steps or Span(), held, [one for one in rows if one.steps]):
            level, judge = values["level"], values["judge"]
            for kind in KINDS:
                if kind in values:
                    of = (values[kind], row.name.over, level, judge, steps, source, note, named.said)
                    yield Bound(named.number, kind, *of)


def _over(earlier: Mapping[str, Any], row: Override | BoundTable) -> dict[str, Any]:
    """Update earlier limits, level and judge by those that a table sets."""
    said = {key: getattr(row, key) for key in ("max", "min", "level", "judge")}
    return {**earlier, **{key: value for key, value in said.items() if value is not None}}


def _parts(
    whole: Span, values: Mapping[str, Any], rows: Sequence[Override]
) -> Iterator[tuple[Steps, Mapping[str, Any]]]:
    """Yield the steps without an override, then those of each override without those of later overrides."""
    spans = [row.steps or Span() for row in rows]
    yield Steps(whole, tuple(spans)), values
    for at, row in enumerate(rows):
        within = Span(max(whole.first, spans[at].first), min(whole.last, spans[at].last))
        if within.first <= within.last:
            yield Steps(within, tuple(spans[at + 1 :])), _over(values, row)
