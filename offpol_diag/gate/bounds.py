"""What must hold: bounds, diagnoses that fail and an earlier result, from options and from a gate file.

    BOUND      = NAME "=" LIMIT
    NAME       = [QUANTIFIER ":"] NUMBER
    QUANTIFIER = step | first | last | min | max | mean | median | pNN      over the training steps
    NUMBER     = METRIC | drift2.METRIC | total.METRIC | PRESET.METRIC   or as logged: `trainers/ours.py`
    PRESET     = NAME | NAME "@" …     the "=" of a bound is the last one, the "." of a metric too
    TOLERANCE  = SHARE "%" | AMOUNT | SHARE "%" "+" AMOUNT
    STEPS      = FIRST ".." LAST | FIRST ".." | ".." LAST | STEP

Options are written as a table of the file (`Gates`), so that one set of models checks both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from offpol_diag.errors import GateFileError, OffpolError, UsageError, did_you_mean
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.presets.tuning import MARK
from offpol_diag.result import DiagnosisVerdict
from offpol_diag.result.facts import sound
from offpol_diag.trainers.ours import ours
from offpol_diag.wholefiles import MOST_TOML, toml
from offpol_diag.wholefiles import read as read_whole

Kind = Literal["max", "min"]
Level = Literal["error", "warn"]
Judge = Literal["interval", "point"]
Expected = Literal["bitwise"]
"""What a run may claim: that both policies' log-probs are equal to the last bit."""

KINDS: tuple[Kind, ...] = ("max", "min")
ORDER: tuple[DiagnosisVerdict, ...] = ("healthy", "honest_mismatch", "cannot_tell", "bug")
"""The diagnoses, each worse than the one before."""
GAPS = ("drift2", "total")
"""Prefixes of the metrics of the other two policy gaps; any other prefix is a preset."""

# ---------------------------------------------------------------- quantifiers


def mean(values: Sequence[float]) -> float:
    """Return the mean, even where the sum overflows."""
    return 2 * math.fsum(x / 2 / len(values) for x in values)


def quantile(values: Sequence[float], share: float) -> float:
    """Return a quantile, interpolated linearly between order statistics; values may be infinite."""
    ranked = sorted(values)
    at = share * (len(ranked) - 1)
    low = math.floor(at)
    return ranked[low] + (at - low) * (ranked[low + 1] - ranked[low]) if at > low else ranked[low]


EVERY = "step"
"""The quantifier by which each step is judged."""
PICKED: Mapping[str, Callable[[Sequence[float]], int]] = {
    "first": lambda values: 0,
    "last": lambda values: len(values) - 1,
    "min": lambda values: values.index(min(values)),
    "max": lambda values: values.index(max(values)),
}
"""Quantifier → values of the steps → the index of the one that is judged."""
POOLED: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": mean,
    "median": partial(quantile, share=0.5),
}
"""Quantifier → values of the steps → one value of them all; percentiles are such as well."""
QUANTIFIERS = (EVERY, *PICKED, *POOLED)
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
GRAMMAR = f"a quantifier is {', '.join(QUANTIFIERS)} or pNN (p90: the 90th percentile over steps)"


def pooled(word: str) -> Callable[[Sequence[float]], float] | None:
    """Return what makes one value of those of the steps: a mean, median or percentile (`p90`)."""
    found = PERCENTILE.fullmatch(word)
    share = float(found[1]) / 100 if found else 0.0
    return partial(quantile, share=share) if share else POOLED.get(word)


# ---------------------------------------------------------------- names, steps, tolerances


def joined(*parts: str | None) -> str:
    """Join the non-empty parts of a reason."""
    return "; ".join(part for part in parts if part)


@dataclass(frozen=True)
class Name:
    """The name of a number: `over` is the quantifier, `said` the trainer's name that was given, if any."""

    number: str
    over: str = ""
    said: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.over}:{self.number}" if self.over else self.number

    @property
    def preset(self) -> str:
        """The preset that it names; empty for a metric of a policy gap."""
        found = split(self.number)[0]
        return "" if found in GAPS else found

    def of(self, known: Catalogue) -> str:
        """Return the number with its preset's name as that catalogue has it: `token_is@3.ess_tokens`."""
        return f"{known[self.preset].name}.{split(self.number)[1]}" if self.preset in known else self.number


def name(text: str) -> Name:
    """Parse `k3`, `seq_mis.ess_tokens`, `p90:k3`, or a name that a trainer logs (`rollout_corr/kl`)."""
    over, colon, number = (part.strip() for part in text.partition(":"))
    if not colon or MARK in over:  # a colon after it separates settings of the preset
        over, colon, number = "", "", text.strip()
    if not number or "=" in number.partition(MARK)[0]:
        raise ValueError(f'"{text}" names no number; a name is k3, seq_mis.ess_tokens or median:k3')
    if colon and over not in QUANTIFIERS and not pooled(over):
        ends = {"p0": "say min", "p100": "say max"}.get(re.sub(r"\.0*$", "", over))
        hint = ends or did_you_mean(over, list(QUANTIFIERS)) or GRAMMAR
        raise ValueError(f'"{text}": "{over}" is no quantifier; {hint}')
    found = ours(number)
    return Name(found, over, number if found != number else "")


def comparable(text: str) -> Name:
    """Parse a name that means one number per run, so that two runs can be compared."""
    found = name(text)
    if found.over == EVERY:
        hint = f"compare max:{found.number} or median:{found.number}"
        raise ValueError(f'"{text}": two runs have different steps; {hint}')
    return found


def split(number: str) -> tuple[str, str]:
    """Split at the last dot into preset and metric: `token_is@2.5.ess_tokens`."""
    preset, _, metric = number.rpartition(".")
    return preset, metric


class Span(NamedTuple):
    """A range of training steps, both ends included."""

    first: float = -math.inf
    last: float = math.inf

    def holds(self, step: float) -> bool:
        """Return whether a step is in the range; NaN is in none."""
        return self.first <= step <= self.last

    def __str__(self) -> str:
        first, last = ("" if math.isinf(end) else f"{end:g}" for end in self)
        return first if self.first == self.last else f"{first}..{last}"


ALL_STEPS = Span()
SPAN = re.compile(r"(-?\d+)?\s*\.\.\s*(-?\d+)?|(-?\d+)")


def span(text: str) -> Span:
    """Parse `100..200`, `100..`, `..99` or `7`."""
    found = SPAN.fullmatch(text.strip())
    if not found or text.strip() == "..":
        raise ValueError(f'"{text}" is no span of steps; write "100..200", "100..", "..99" or "7"')
    low, high, one = found.groups()
    made = Span(float(one or low or -math.inf), float(one or high or math.inf))
    if made.last < made.first:
        raise ValueError(f'"{text}" ends before it begins; write "{high}..{low}"')
    return made


class Tolerance(NamedTuple):
    """Allowed worsening: a share of the baseline's value plus an amount in the metric's unit."""

    share: float = 0.0
    amount: float = 0.0

    def __str__(self) -> str:
        share, amount = f"{100 * self.share:g}%", f"{self.amount:g}"
        return " + ".join([share] * bool(self.share or not self.amount) + [amount] * bool(self.amount))

    def of(self, value: float) -> float:
        """Return the allowed amount for a given baseline value."""
        return self.share * abs(value) + self.amount


def tolerance(text: str) -> Tolerance:
    """Parse `10%`, `0.001` or `10% + 0.001`."""
    parts = [part.strip() for part in re.split(r"(?<![eE])\+", text)]
    shares, amounts = (
        [_number(part.removesuffix("%")) for part in parts if part.endswith("%") is share]
        for share in (True, False)
    )
    if len(shares) > 1 or len(amounts) > 1 or not all(0 <= x < math.inf for x in shares + amounts):
        example = '"10%" (of the baseline), "0.001" (in its unit) or "10% + 0.001"'
        raise ValueError(f'"{text}" is no tolerance; write {example}')
    return Tolerance(sum(shares) / 100, sum(amounts))


def _number(text: str) -> float:
    """Return a text as a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


# ---------------------------------------------------------------- the models


def _parsed(parse: Callable[[str], object], kinds: tuple[type, ...], rule: str) -> PlainValidator:
    """Return a validator that parses values of some types from their text."""

    def validate(value: object) -> object:
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(rule)
        return parse(str(value))

    return PlainValidator(validate)


Named = Annotated[Name, _parsed(name, (str,), "it must be a string")]
Compared = Annotated[Name, _parsed(comparable, (str,), "it must be a string")]
A_SPAN = 'it must be a step (7) or a span of steps ("100..200", "100..", "..99")'
Steps = Annotated[Span, _parsed(span, (int, str), A_SPAN)]
AN_AMOUNT = 'it must be an amount (0.001) or a share ("10%")'
Tolerated = Annotated[Tolerance, _parsed(tolerance, (int, float, str), AN_AMOUNT)]
FailsOn = Annotated[
    Literal["honest_mismatch", "cannot_tell", "bug"],
    BeforeValidator(lambda one: one.strip().lower().replace("-", "_") if isinstance(one, str) else one),
]
Text = Annotated[str, Field(min_length=1)]
Note = Annotated[str, AfterValidator(lambda text: " ".join(text.split()))]


class Table(BaseModel):
    """A table of the gate file; refuses unknown keys and numbers written as strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    _source: str = ""

    @property
    def source(self) -> str:
        """The option that set it, or the file and its table."""
        return self._source

    def filled(self, source: str, defaults: Defaults) -> Self:
        """Return the table with its source, and with the defaults of what it does not say."""
        of = {key: getattr(defaults, key) for key in Defaults.model_fields if key in type(self).model_fields}
        made = self.model_copy(update={key: x for key, x in of.items() if key not in self.model_fields_set})
        made._source = source
        return made


class Defaults(Table):
    """Whether a failure fails the gate or is only told, and whether the 95% interval or the value decides."""

    level: Level = "error"
    judge: Judge = "interval"


class FailOn(Table):
    """The diagnoses that fail, as every worse one does."""

    fail_on: list[FailsOn] = Field(min_length=1)
    level: Level = "error"
    note: Note = ""


class Bound(Table):
    """What a number, or that number of each of several presets, may be at most and at least."""

    name: Named
    max: float | None = None
    min: float | None = None
    level: Level = "error"
    judge: Judge = "interval"
    presets: list[Text] = []
    steps: Steps = ALL_STEPS
    note: Note = ""

    @property
    def names(self) -> tuple[Name, ...]:
        """The name, or that of each preset."""
        given = self.name.said or self.name.number
        found = tuple(replace(name(f"{preset}.{given}"), over=self.name.over) for preset in self.presets)
        return found or (self.name,)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        """Refuse contradictions."""
        if self.max is None and self.min is None:
            raise ValueError("it has no limit: give max, min or both")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError("min is above max: no number can satisfy both")
        if self.steps != ALL_STEPS and not self.name.over:
            instead = f"write {EVERY}:{self.name} or median:{self.name}"
            raise ValueError(f"steps: {self.name} is a number of the whole dump; {instead}")
        if self.presets and "." in self.name.number:
            raise ValueError(f"presets: the name has a preset already: {self.name.number}")
        if odd := [preset for preset in self.presets if set(preset.partition(MARK)[0]) & set(":=")]:
            raise ValueError(f'presets: "{odd[0]}" is no name of a preset')
        return self


class Baseline(Table):
    """The earlier result: nothing may be worse than in it by more than the tolerance."""

    result: Text | None = None
    tolerance: Tolerated = Tolerance(share=0.1)
    tolerances: dict[Compared, Tolerated] = {}
    only: list[Compared] = []
    presets: list[Text] = []
    level: Level = "error"
    judge: Judge = "interval"

    @property
    def label(self) -> str:
        """The name of the earlier result in messages."""
        return Path(self.result).name if self.result else "the baseline"

    @property
    def named(self) -> tuple[Name, ...]:
        """The numbers that the user names."""
        return tuple(dict.fromkeys((*self.only, *self.tolerances)))


class Gates(Table):
    """All that one run of the gate checks."""

    defaults: Defaults = Defaults()
    diagnosis: Annotated[
        list[FailOn], BeforeValidator(lambda given: given if isinstance(given, list) else [given])
    ] = []
    expect: Expected | None = None
    bound: list[Bound] = []
    baseline: Baseline | None = None

    @property
    def result(self) -> Path | None:
        """The earlier result."""
        return Path(self.baseline.result) if self.baseline and self.baseline.result else None

    def by_step(self, known: Catalogue) -> tuple[str, ...]:
        """Return the numbers that are needed at each training step."""
        names = [*(one for row in self.bound for one in row.names), *self._compared]
        return tuple(dict.fromkeys(one.of(known) for one in names if one.over))

    def presets(self, known: Catalogue) -> tuple[Preset, ...]:
        """Return the presets to compute; the error on an unknown one says which table names it."""
        named = [(row.source, [one.preset for one in row.names]) for row in self.bound]
        named.append(("", [one.preset for one in self._compared]))
        named.append(("", self.baseline.presets if self.baseline else []))
        found: dict[str, Preset] = {}
        for source, presets in named:
            try:
                if spec := ",".join(filter(None, presets)):
                    found |= {one.name: one for one in known.resolve(spec)}
            except OffpolError as error:
                place = f"{source}: " if "[[" in source else ""
                raise UsageError(f"{place}{error.message}", error.hint) from error
        return tuple(found.values())

    @property
    def _compared(self) -> tuple[Name, ...]:
        return self.baseline.named if self.baseline else ()


# ---------------------------------------------------------------- options

EXAMPLE = (
    "say what must hold: --fail-on bug, --max k3=0.002 --min ess_tokens=0.5, --expect bitwise, "
    "--gates FILE.toml or --baseline RESULT.json"
)


def required(
    *,
    max: Sequence[str] = (),
    min: Sequence[str] = (),
    gates: Path | None = None,
    fail_on: Sequence[str] = (),
    expect: Expected | None = None,
    point: bool = False,
    baseline: Path | None = None,
    tolerance: Sequence[str] = (),
    only: Sequence[str] = (),
    presets: Sequence[str] = (),
) -> Gates:
    """Return what options ask, and then the gate file, over which options take precedence.

    Raises:
        UsageError: there is no bound and no baseline, or an option is invalid.
        GateFileError: the file has mistakes in it.
    """
    file = read(gates) if gates else Gates()
    limits = [("--max", one) for one in max] + [("--min", one) for one in min]
    pairs = [text.rpartition("=") for text in tolerance]
    given: dict[str, Any] = {
        "result": str(baseline) if baseline else None,
        "tolerance": next((text for _, equals, text in pairs[::-1] if not equals), None),
        "tolerances": {name: text for name, equals, text in pairs if equals},
        "only": list(only),
        "presets": list(presets),
        "judge": "point" if point else None,
    }
    given = {key: value for key, value in given.items() if value or value == ""}
    table = {
        "bound": [_limit(*one) for one in limits],
        "diagnosis": [{"fail_on": [one]} for one in fail_on],
        "baseline": given,
    }
    try:
        own = Gates.model_validate(sound(table))
    except ValidationError as error:
        detail = error.errors()[0]
        option = _option(detail["loc"], limits)
        raise UsageError(f"{option}: {_rule(detail)}", f"write {USUAL[option.split()[0]]}") from error
    against, asked = file.baseline or Baseline(), own.baseline or Baseline()
    update = {key: getattr(asked, key) for key in given}
    update["tolerances"] = against.tolerances | asked.tolerances
    against = against.model_copy(update=update)
    if not against.result and (tolerance or only or file.baseline):
        raise UsageError("there is a tolerance and no baseline", "name it: --baseline RESULT.json")
    bounds = [one.filled(flag, Defaults()) for one, (flag, _) in zip(own.bound, limits, strict=True)]
    diagnoses = [one.filled("--fail-on", Defaults()) for one in own.diagnosis]
    found: dict[str, Any] = {
        "bound": [*bounds, *file.bound],
        "diagnosis": diagnoses + file.diagnosis,
        "expect": expect or file.expect,
        "baseline": against if against.result else None,
    }
    if not any(found.values()):
        raise UsageError("no bound is given", EXAMPLE)
    if point:
        found["bound"] = [one.model_copy(update={"judge": "point"}) for one in found["bound"]]
    made = file.model_copy(update=found)
    made._source = "--expect" if expect else file.source
    return made


USUAL = {
    "--max": "--max k3=0.002",
    "--min": "--min ess_tokens=0.5",
    "--fail-on": "--fail-on bug",
    "--tolerance": "--tolerance 10% or --tolerance k3=0.001",
    "--only": "--only k3,median:k3",
    "--presets": "--presets seq_mis",
}
"""Option → how it is written."""


def _limit(flag: str, text: str) -> dict[str, Any]:
    """Return `k3=0.002` of --max or --min as a table of the file; what is no number stays text."""
    said, sign, limit = (part.strip() for part in text.rpartition("="))
    if not sign:
        said, limit = limit, ""
    value = _number(limit)
    return {"name": said, flag.removeprefix("--"): limit if math.isnan(value) else value}


def _option(loc: Sequence[int | str], limits: Sequence[tuple[str, str]]) -> str:
    """Return the option that a mistake is in: `--max "k3=abc"`."""
    if loc[0] == "bound":
        flag, text = limits[int(loc[1])]
        return f'{flag} "{text}"'
    return "--fail-on" if loc[0] == "diagnosis" else f"--{str(loc[1]).removesuffix('s')}"


# ---------------------------------------------------------------- the file

FORM = "its form is that of docs/ci.md: a bound is a table [[bound]] with a name and max or min"


def read(path: Path) -> Gates:
    """Read a gate file.

    Raises:
        GateFileError: it cannot be read, is not TOML, holds no bound, or has mistakes in it (all are listed).
    """
    table: dict[str, Any] = {}
    try:
        table = toml(read_whole(path, MOST_TOML).decode("utf-8-sig"))
        found = Gates.model_validate(table)
    except OSError as error:
        hint = "give a gate file, see docs/ci.md"
        raise GateFileError(f"{path}: cannot be read ({error.strerror})", hint) from error
    except ValidationError as error:
        lines = [f"{path}: {_place(one['loc'], table)}{_rule(one)}" for one in error.errors()]
        head = lines if len(lines) == 1 else [f"{path}: {len(lines)} mistakes", *lines]
        raise GateFileError(head[0], FORM, head[1:]) from error
    except ValueError as error:
        raise GateFileError(f"{path}: not TOML: {error}", FORM) from error
    if twice := _repeated(found):
        raise GateFileError(f"{path}: {twice}", FORM)
    if not (found.bound or found.diagnosis or found.expect or found.baseline):
        raise GateFileError(f"{path}: holds no bound", FORM)
    of, base = found.defaults, found.baseline
    if base is not None and base.result:
        base = base.model_copy(update={"result": str(path.parent / base.result)})
    update = {
        "bound": [row.filled(f"{path.name}: [[bound]] {at}", of) for at, row in enumerate(found.bound, 1)],
        "diagnosis": [row.filled(f"{path.name}: [diagnosis]", of) for row in found.diagnosis],
        "baseline": base and base.filled("", of),
    }
    made = found.model_copy(update=update)
    made._source = f"{path.name}: expect" if found.expect else ""
    return made


def _repeated(found: Gates) -> str:
    """Return that a bound repeats an earlier one for the same number, side, level, presets and steps."""
    seen: dict[object, int] = {}
    for at, row in enumerate(found.bound, 1):
        level = row.filled("", found.defaults).level
        for kind in (kind for kind in KINDS if getattr(row, kind) is not None):
            key = (row.name, kind, level, tuple(row.presets), row.steps)
            if (first := seen.setdefault(key, at)) != at:
                return f"[[bound]] {at} ({row.name}), {kind}: [[bound]] {first} has one already"
    return ""


TABLES: Mapping[object, type[Table]] = {
    "defaults": Defaults,
    "diagnosis": FailOn,
    "bound": Bound,
    "baseline": Baseline,
}
"""Key in the file → the model of its tables."""
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


def _place(loc: Sequence[int | str], table: Mapping[str, Any]) -> str:
    """Return where a mistake is: `[[bound]] 2 (k3), max: `."""
    head, *rest = loc
    keys = ".".join(key for key in rest if isinstance(key, str) and key != "[key]")
    if head != "bound" or not rest:
        return f"[{head}] {keys}: " if keys else f"{head}: "
    at = int(rest[0])
    name = table["bound"][at].get("name") if isinstance(table["bound"][at], dict) else None
    named = f" ({name})" if isinstance(name, str) else ""
    return f"[[bound]] {at + 1}{named}{f', {keys}' if keys else ''}: "


def _rule(detail: ErrorDetails) -> str:
    """Return what one of pydantic's errors says, in our words."""
    kind, given, loc = detail["type"], detail["input"], detail["loc"]
    if kind == "list_type" and loc == ("bound",):
        return "it must be a list of tables: write [[bound]]"
    if kind == "extra_forbidden":
        known = list((Gates if len(loc) == 1 else TABLES[loc[0]]).model_fields)
        return joined(f"no such key; the keys are {', '.join(known)}", did_you_mean(str(loc[-1]), known))
    if kind == "literal_error":
        words = str(detail["ctx"]["expected"]).replace("'", "")
        near = did_you_mean(given, re.split(", | or ", words)) if isinstance(given, str) else ""
        return joined(f"{given!r} is not {words}", near)
    said = str(detail["ctx"]["error"]) if kind == "value_error" else detail["msg"]
    return RULES.get(kind) or said[:1].lower() + said[1:]
