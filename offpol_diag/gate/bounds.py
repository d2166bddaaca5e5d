"""What must hold: bounds, diagnoses that fail and an earlier result, from options and from a gate file.

    BOUND      = NAME "=" LIMIT
    NAME       = ["step:"] NUMBER       step: at every training step
    NUMBER     = METRIC | drift2.METRIC | total.METRIC | PRESET.METRIC   or as logged: `trainers/ours.py`
    PRESET     = NAME | NAME "@" …     the "=" of a bound is the last one, the "." of a metric too
    TOLERANCE  = SHARE "%" | AMOUNT | SHARE "%" "+" AMOUNT

Options are written as a table of the file (`Gates`), so that one set of models checks both.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import (
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
from offpol_diag.files import MOST_TOML, toml
from offpol_diag.files import read as read_whole
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.presets.grammar import MARK
from offpol_diag.result import DiagnosisVerdict
from offpol_diag.result.facts import sound
from offpol_diag.trainers.ours import ours

Kind = Literal["max", "min"]
KINDS: tuple[Kind, ...] = ("max", "min")
ORDER: tuple[DiagnosisVerdict, ...] = ("healthy", "honest_mismatch", "cannot_tell", "bug")
"""The diagnoses, each worse than the one before."""
GAPS = ("drift2", "total")
"""Prefixes of the metrics of the other two policy gaps; any other prefix is a preset."""

STEP = "step:"
"""What precedes the name of a number that must hold at every training step."""

# ---------------------------------------------------------------- names, tolerances


def joined(*parts: str | None) -> str:
    """Join the non-empty parts of a reason."""
    return "; ".join(part for part in parts if part)


@dataclass(frozen=True)
class Name:
    """The name of a number, or of that number at each step; `said`: the trainer's name that was given."""

    number: str
    by_step: bool = False
    said: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{STEP * self.by_step}{self.number}"

    @property
    def preset(self) -> str:
        """The preset that it names; empty for a metric of a policy gap."""
        found = split(self.number)[0]
        return "" if found in GAPS else found

    def of(self, known: Catalogue) -> str:
        """Return the number with its preset's name as that catalogue has it: `token_is@3.ess_tokens`."""
        return f"{known[self.preset].name}.{split(self.number)[1]}" if self.preset in known else self.number


def name(text: str) -> Name:
    """Parse `k3`, `seq_mis.ess_tokens`, `step:k3`, or a name that a trainer logs (`rollout_corr/kl`)."""
    word, colon, number = (part.strip() for part in text.partition(":"))
    if not colon or MARK in word:  # a colon after it separates settings of the preset
        word, colon, number = "", "", text.strip()
    if not number or "=" in number.partition(MARK)[0]:
        raise ValueError(f'"{text}" names no number; a name is k3, seq_mis.ess_tokens or step:k3')
    if colon and f"{word}:" != STEP:
        raise ValueError(f'"{text}": only step: may stand before a name')
    found = ours(number)
    return Name(found, bool(colon), number if found != number else "")


def comparable(text: str) -> Name:
    """Parse a name that means one number per run, so that two runs can be compared."""
    found = name(text)
    if found.by_step:
        raise ValueError(f'"{text}": two runs have different steps; compare {found.number}')
    return found


def split(number: str) -> tuple[str, str]:
    """Split at the last dot into preset and metric: `token_is@2.5.ess_tokens`."""
    preset, _, metric = number.rpartition(".")
    return preset, metric


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
AN_AMOUNT = 'it must be an amount (0.001) or a share ("10%")'
Tolerated = Annotated[Tolerance, _parsed(tolerance, (int, float, str), AN_AMOUNT)]
FailsOn = Annotated[
    Literal["honest_mismatch", "cannot_tell", "bug"],
    BeforeValidator(lambda one: one.strip().lower().replace("-", "_") if isinstance(one, str) else one),
]
Text = Annotated[str, Field(min_length=1)]


class Table(BaseModel):
    """A table of the gate file; refuses unknown keys and numbers written as strings."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)
    _source: str = ""

    @property
    def source(self) -> str:
        """The option that set it, or the file and its table."""
        return self._source

    def sourced(self, source: str) -> Self:
        """Return the table with its source."""
        made = self.model_copy()
        made._source = source
        return made


class FailOn(Table):
    """The diagnoses that fail, as every worse one does."""

    fail_on: list[FailsOn] = Field(min_length=1)


class Bound(Table):
    """What a number, or that number of each of several presets, may be at most and at least."""

    name: Named
    max: float | None = None
    min: float | None = None
    presets: list[Text] = []

    @property
    def names(self) -> tuple[Name, ...]:
        """The name, or that of each preset."""
        given = self.name.said or self.name.number
        found = tuple(
            replace(name(f"{preset}.{given}"), by_step=self.name.by_step) for preset in self.presets
        )
        return found or (self.name,)

    @model_validator(mode="after")
    def _sound(self) -> Self:
        """Refuse contradictions."""
        if self.max is None and self.min is None:
            raise ValueError("it has no limit: give max, min or both")
        if self.max is not None and self.min is not None and self.min > self.max:
            raise ValueError("min is above max: no number can satisfy both")
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

    diagnosis: Annotated[
        list[FailOn], BeforeValidator(lambda given: given if isinstance(given, list) else [given])
    ] = []
    bound: list[Bound] = []
    baseline: Baseline | None = None

    @property
    def result(self) -> Path | None:
        """The earlier result."""
        return Path(self.baseline.result) if self.baseline and self.baseline.result else None

    def by_step(self, known: Catalogue) -> tuple[str, ...]:
        """Return the numbers that are needed at each training step."""
        names = [one for row in self.bound for one in row.names]
        return tuple(dict.fromkeys(one.of(known) for one in names if one.by_step))

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
    "say what must hold: --fail-on bug, --max k3=0.002 --min ess_tokens=0.5, "
    "--gates FILE.toml or --baseline RESULT.json"
)


def required(
    *,
    max: Sequence[str] = (),
    min: Sequence[str] = (),
    gates: Path | None = None,
    fail_on: Sequence[str] = (),
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
    bounds = [one.sourced(flag) for one, (flag, _) in zip(own.bound, limits, strict=True)]
    diagnoses = [one.sourced("--fail-on") for one in own.diagnosis]
    found: dict[str, Any] = {
        "bound": [*bounds, *file.bound],
        "diagnosis": diagnoses + file.diagnosis,
        "baseline": against if against.result else None,
    }
    if not any(found.values()):
        raise UsageError("no bound is given", EXAMPLE)
    return file.model_copy(update=found)


USUAL = {
    "--max": "--max k3=0.002",
    "--min": "--min ess_tokens=0.5",
    "--fail-on": "--fail-on bug",
    "--tolerance": "--tolerance 10% or --tolerance k3=0.001",
    "--only": "--only k3,f_2",
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
    if not (found.bound or found.diagnosis or found.baseline):
        raise GateFileError(f"{path}: holds no bound", FORM)
    base = found.baseline
    if base is not None and base.result:
        base = base.model_copy(update={"result": str(path.parent / base.result)})
    update = {
        "bound": [row.sourced(f"{path.name}: [[bound]] {at}") for at, row in enumerate(found.bound, 1)],
        "diagnosis": [row.sourced(f"{path.name}: [diagnosis]") for row in found.diagnosis],
        "baseline": base,
    }
    return found.model_copy(update=update)


def _repeated(found: Gates) -> str:
    """Return that a bound repeats an earlier one for the same number, side and presets."""
    seen: dict[object, int] = {}
    for at, row in enumerate(found.bound, 1):
        for kind in (kind for kind in KINDS if getattr(row, kind) is not None):
            key = (row.name, kind, tuple(row.presets))
            if (first := seen.setdefault(key, at)) != at:
                return f"[[bound]] {at} ({row.name}), {kind}: [[bound]] {first} has one already"
    return ""


TABLES: Mapping[object, type[Table]] = {
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
