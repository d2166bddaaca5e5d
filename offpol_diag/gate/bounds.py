"""What must hold: bounds, diagnoses that fail and an earlier result, from options and from a gate file.

    BOUND      = NAME "=" LIMIT
    NAME       = [QUANTIFIER ":"] NUMBER
    QUANTIFIER = step | first | last | min | max | mean | median | pNN      over the training steps
    NUMBER     = METRIC | drift2.METRIC | total.METRIC | PRESET.METRIC   or as logged: `trainers/ours.py`
    TOLERANCE  = SHARE "%" | AMOUNT | SHARE "%" "+" AMOUNT
    STEPS      = FIRST ".." LAST | FIRST ".." | ".." LAST | STEP

Options and the file fill the same models, which are the form of the file (`Gates`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

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
from pydantic_core import ErrorDetails, PydanticCustomError

from offpol_diag.errors import GateFileError, OffpolError, UsageError, did_you_mean
from offpol_diag.presets import Preset
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.result import DiagnosisVerdict
from offpol_diag.trainers.ours import ours
from offpol_diag.wholefiles import MOST_TOML, toml
from offpol_diag.wholefiles import read as read_whole

T = TypeVar("T")
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


@dataclass(frozen=True)
class Quantifier:
    """How the numbers of the training steps are judged: each of them, or one made of them.

    Attributes:
        pick: values of the steps → the index of the one that is judged.
        pool: values of the steps → one value of them all; without `pick` and `pool` each is judged.
        needs_all: whether every step of the dump must be in the result.
    """

    pick: Callable[[Sequence[float]], int] | None = None
    pool: Callable[[Sequence[float]], float] | None = None
    needs_all: bool = True


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
QUANTIFIERS: Mapping[str, Quantifier] = {
    EVERY: Quantifier(),
    "first": Quantifier(pick=lambda values: 0, needs_all=False),
    "last": Quantifier(pick=lambda values: len(values) - 1, needs_all=False),
    "min": Quantifier(pick=lambda values: values.index(min(values))),
    "max": Quantifier(pick=lambda values: values.index(max(values))),
    "mean": Quantifier(pool=mean),
    "median": Quantifier(pool=partial(quantile, share=0.5)),
}
PERCENTILE = re.compile(r"p(\d{1,2}(?:\.\d+)?)")
GRAMMAR = f"a quantifier is {', '.join(QUANTIFIERS)} or pNN (p90: the 90th percentile over steps)"


def quantifier(word: str) -> Quantifier | None:
    """Return a row of the table, or the quantifier of a percentile (`p90`)."""
    found = PERCENTILE.fullmatch(word)
    share = float(found[1]) / 100 if found else 0.0
    return Quantifier(pool=partial(quantile, share=share)) if share else QUANTIFIERS.get(word)


# ---------------------------------------------------------------- names, steps, tolerances, diagnoses


def joined(*parts: str | None) -> str:
    """Join the non-empty parts of a reason."""
    return "; ".join(part for part in parts if part)


@contextmanager
def prefixed(place: str, hint: str = "") -> Iterator[None]:
    """Put the place of a mistake before its message, and a hint beside it where it has none."""
    try:
        yield
    except OffpolError as error:
        raise UsageError(f"{place}{error.message}", error.hint or hint) from error


@dataclass(frozen=True)
class Name:
    """The name of a number: `over` is the quantifier, `said` the trainer's name that was given, if any."""

    number: str
    over: str = ""
    said: str = field(default="", compare=False)

    def __str__(self) -> str:
        return f"{self.over}:{self.number}" if self.over else self.number

    def preset(self, known: Container[object]) -> str:
        """Return the preset that it names, preferably a known one; empty for a metric of a policy gap."""
        prefixes = [prefix for prefix, _ in splits(self.number)] or [""]
        found = next((prefix for prefix in prefixes if prefix in known), prefixes[-1])
        return "" if found in GAPS else found


def name(text: str) -> Name:
    """Parse `k3`, `seq_mis.ess_tokens`, `p90:k3`, or a name that a trainer logs (`rollout_corr/kl`)."""
    over, colon, number = (part.strip() for part in text.rpartition(":"))
    if not number or "=" in text:
        raise UsageError(f'"{text}" names no number', "a name is k3, seq_mis.ess_tokens or median:k3")
    if colon and quantifier(over) is None:
        ends = {"p0": "say min", "p100": "say max"}.get(re.sub(r"\.0*$", "", over))
        hint = ends or did_you_mean(over, list(QUANTIFIERS)) or GRAMMAR
        raise UsageError(f'"{text}": "{over}" is no quantifier', hint)
    found = ours(number)
    return Name(found, over, number if found != number else "")


def comparable(text: str) -> Name:
    """Parse a name that means one number per run, so that two runs can be compared."""
    found = name(text)
    if found.over == EVERY:
        hint = f"compare max:{found.number} or median:{found.number}"
        raise UsageError(f'"{text}": two runs have different steps', hint)
    return found


def splits(number: str) -> Iterator[tuple[str, str]]:
    """Split `a.b.c` into (a.b, c) and (a, b.c): names of presets and of metrics may both hold dots."""
    parts = number.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        yield ".".join(parts[:cut]), ".".join(parts[cut:])


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
        raise UsageError(f'"{text}" is no span of steps', 'write "100..200", "100..", "..99" or "7"')
    low, high, one = found.groups()
    made = Span(float(one or low or -math.inf), float(one or high or math.inf))
    if made.last < made.first:
        raise UsageError(f'"{text}" ends before it begins', f'write "{high}..{low}"')
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
    shares = [_finite(part[:-1]) for part in parts if part.endswith("%")]
    amounts = [_finite(part) for part in parts if not part.endswith("%")]
    if len(shares) > 1 or len(amounts) > 1 or min(-1.0 if x is None else x for x in shares + amounts) < 0:
        example = 'write "10%" (of the baseline), "0.001" (in its unit) or "10% + 0.001"'
        raise UsageError(f'"{text}" is no tolerance', example)
    return Tolerance(sum(x or 0.0 for x in shares) / 100, sum(x or 0.0 for x in amounts))


def diagnosed(text: str) -> DiagnosisVerdict:
    """Parse `bug`, `cannot_tell` or `honest_mismatch`; case and `-` for `_` do not matter."""
    plain, names = text.strip().lower().replace("-", "_"), [str(one) for one in ORDER[:0:-1]]
    for verdict in ORDER[1:]:
        if plain == verdict:
            return verdict
    near = did_you_mean(plain, names) or f"it is {', '.join(names[:-1])} or {names[-1]}"
    raise UsageError(f'"{text}" is no diagnosis to fail on', near)


def _finite(text: str) -> float | None:
    try:
        return value if math.isfinite(value := float(text)) else None
    except ValueError:
        return None


# ---------------------------------------------------------------- the models


def _parsed(parse: Callable[[str], T], kinds: tuple[type, ...], rule: str) -> PlainValidator:
    """Return a validator that parses values of the given types from their text, and keeps parsed ones."""

    def validate(value: object) -> object:
        if isinstance(value, Name | Span | Tolerance):
            return value
        if isinstance(value, bool) or not isinstance(value, kinds):
            raise ValueError(rule)
        try:
            return parse(str(value))
        except OffpolError as error:
            raise ValueError(joined(error.message, error.hint)) from error

    return PlainValidator(validate)


Named = Annotated[Name, _parsed(name, (str,), "it must be a string")]
Compared = Annotated[Name, _parsed(comparable, (str,), "it must be a string")]
A_SPAN = 'it must be a step (7) or a span of steps ("100..200", "100..", "..99")'
Steps = Annotated[Span, _parsed(span, (int, str), A_SPAN)]
AN_AMOUNT = 'it must be an amount (0.001) or a share ("10%")'
Tolerated = Annotated[Tolerance, _parsed(tolerance, (int, float, str), AN_AMOUNT)]
FailsOn = Annotated[DiagnosisVerdict, _parsed(diagnosed, (str,), "it must be a diagnosis (bug)")]
Text = Annotated[str, Field(min_length=1)]
Note = Annotated[str, AfterValidator(lambda text: " ".join(text.split()))]

Mistake = tuple[tuple[int | str, ...], str]
"""The path of a mistake within its table, and its message."""


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

    def mistakes(self) -> Iterator[Mistake]:
        """Yield mistakes that checking the type of each value cannot find."""
        yield from ()

    @model_validator(mode="after")
    def _sound(self) -> Self:
        if found := list(self.mistakes()):
            raise PydanticCustomError("mistakes", "mistakes", {"mistakes": found})
        return self


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

    def mistakes(self) -> Iterator[Mistake]:
        """Yield contradictions."""
        if self.max is None and self.min is None:
            yield (), "it has no limit: give max, min or both"
        if self.max is not None and self.min is not None and self.min > self.max:
            yield ("min",), "it is above max: no number can satisfy both"
        if self.steps != ALL_STEPS and not self.name.over:
            instead = f"write {EVERY}:{self.name} or median:{self.name}"
            yield ("steps",), f"{self.name} is a number of the whole dump; {instead}"
        if self.presets and "." in self.name.number:
            yield ("presets",), f"the name has a preset already: {self.name.number}"
        elif odd := [preset for preset in self.presets if set(preset) & set(":=")]:
            yield ("presets",), f'"{odd[0]}" is no name of a preset'


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
        list[FailOn], BeforeValidator(lambda given: [given] if isinstance(given, dict) else given)
    ] = []
    expect: Expected | None = None
    bound: list[Bound] = []
    baseline: Baseline | None = None

    def mistakes(self) -> Iterator[Mistake]:
        """Yield bounds that repeat an earlier one for the same number, side, level, presets and steps."""
        seen: dict[object, int] = {}
        for at, row in enumerate(self.bound):
            level = row.filled("", self.defaults).level
            for kind in KINDS:
                key = (row.name, kind, level, tuple(row.presets), row.steps)
                if getattr(row, kind) is not None and (first := seen.setdefault(key, at)) != at:
                    yield ("bound", at, kind), f"[[bound]] {first + 1} has one already"

    @property
    def result(self) -> Path | None:
        """The earlier result."""
        return Path(self.baseline.result) if self.baseline and self.baseline.result else None

    @property
    def by_step(self) -> tuple[str, ...]:
        """The numbers that are needed at each training step."""
        names = [*(one for row in self.bound for one in row.names), *self._compared]
        return tuple(dict.fromkeys(one.number for one in names if one.over))

    def presets(self, known: Catalogue) -> tuple[Preset, ...]:
        """Return the presets to compute; the error on an unknown one says where it is used."""
        named = [(row.source, [one.preset(known) for one in row.names]) for row in self.bound]
        named.append(("", [one.preset(known) for one in self._compared]))
        named.append(("", self.baseline.presets if self.baseline else []))
        found: dict[str, Preset] = {}
        for source, presets in named:
            with prefixed("" if not source or source.startswith("--") else f"{source}: "):
                if spec := ",".join(filter(None, presets)):
                    found |= {one.name: one for one in known.resolve(spec)}
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
    bounds = [*(bound("max", one) for one in max), *(bound("min", one) for one in min), *file.bound]
    with prefixed("--fail-on "):
        asked = [FailOn(fail_on=[diagnosed(one)]).filled("--fail-on", Defaults()) for one in fail_on]
    against, own = file.baseline or Baseline(), dict(named_tolerance(one) for one in tolerance)
    given = {
        "result": str(baseline) if baseline else None,
        "tolerance": own.get(None),
        "tolerances": against.tolerances | {name: one for name, one in own.items() if name},
        "only": [comparable(one) for one in only],
        "presets": list(presets),
        "judge": "point" if point else None,
    }
    against = against.model_copy(update={key: value for key, value in given.items() if value})
    if not against.result and (tolerance or only or file.baseline):
        raise UsageError("there is a tolerance and no baseline", "name it: --baseline RESULT.json")
    expected = expect or file.expect
    if not (bounds or asked or file.diagnosis or expected or against.result):
        raise UsageError("no bound is given", EXAMPLE)
    if point:
        bounds = [one.model_copy(update={"judge": "point"}) for one in bounds]
    found = {"bound": bounds, "diagnosis": asked + file.diagnosis, "expect": expected}
    made = file.model_copy(update=found | {"baseline": against if against.result else None})
    made._source = "--expect" if expect else file.source
    return made


def bound(kind: Kind, text: str) -> Bound:
    """Parse `k3=0.002` of --max or --min."""
    said, equals, limit = (part.strip() for part in text.partition("="))
    if not (said and equals and limit):
        raise UsageError(f'--{kind} "{text}": a bound is NAME=NUMBER', f"write --{kind} k3=0.002")
    with prefixed(f"--{kind} ", f"write --{kind} k3=0.002"):
        found = name(said)
    value = _finite(limit)
    if value is None:
        raise UsageError(f'--{kind} "{text}": "{limit}" is no finite number', f"write --{kind} {said}=0.002")
    return Bound.model_validate({"name": found, kind: value}).filled(f"--{kind}", Defaults())


def named_tolerance(text: str) -> tuple[Name | None, Tolerance]:
    """Parse `10%` (for all numbers) or `k3=5%` (for one)."""
    before, equals, after = text.rpartition("=")
    with prefixed(f'--tolerance "{text}": '):
        return (comparable(before) if equals else None), tolerance(after)


# ---------------------------------------------------------------- the file

FORM = "its form is that of docs/ci.md: a bound is a table [[bound]] with a name and max or min"


def read(path: Path) -> Gates:
    """Read a gate file.

    Raises:
        GateFileError: it cannot be read, is not TOML, holds no bound, or has mistakes in it (all are listed).
    """
    try:
        table = toml(read_whole(path, MOST_TOML).decode("utf-8-sig"))
        found = Gates.model_validate(table)
    except FileNotFoundError as error:
        raise GateFileError(f"{path}: no such file", "give a gate file, see docs/ci.md") from error
    except OSError as error:
        raise GateFileError(f"{path}: cannot be read ({error.strerror})", "give a gate file") from error
    except UnicodeDecodeError as error:
        raise GateFileError(f"{path}: not UTF-8 (byte {error.start})", FORM) from error
    except ValidationError as error:
        lines = list(dict.fromkeys(f"{path}: {one}" for row in error.errors() for one in _told(row, table)))
        head = lines if len(lines) == 1 else [f"{path}: {len(lines)} mistakes", *lines]
        raise GateFileError(head[0], FORM, head[1:]) from error
    except ValueError as error:
        raise GateFileError(f"{path}: not TOML: {error}", FORM) from error
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


TABLES: Mapping[str, type[Table]] = {
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
OF_KEY = {
    ("list_type", "bound"): "it must be a list of tables: write [[bound]]",
    ("list_type", "diagnosis"): "it must be a table",
    ("extra_forbidden", "override"): "there is no such table: write a second [[bound]] with steps or presets",
}
"""pydantic's error type and a key → its message."""


def _told(detail: ErrorDetails, table: Mapping[str, Any]) -> Iterator[str]:
    """Yield the mistakes of one of pydantic's errors."""
    loc = detail["loc"]
    if detail["type"] == "mistakes":
        for at, rule in detail["ctx"]["mistakes"]:
            yield f"{_place((*loc, *at), table)}: {rule}"
        return
    if loc[-1] == "[key]":  # of a table whose keys are values: the key itself is wrong
        loc = loc[:-2]
    elif isinstance(loc[-1], int):
        loc = loc[:-1]
    yield f"{_place(loc, table)}: {_rule(detail, loc)}"


def _place(loc: Sequence[int | str], table: Mapping[str, Any]) -> str:
    """Return where a mistake is: `[[bound]] 2 (k3), max`."""
    head, *rest = loc
    keys = ".".join(key for key in rest if isinstance(key, str))
    if head != "bound" or not rest or not isinstance(rest[0], int):
        return f"[{head}] {keys}" if keys else str(head)
    row = table["bound"][rest[0]]
    named = f" ({row['name']})" if isinstance(row, dict) and isinstance(row.get("name"), str) else ""
    return f"[[bound]] {rest[0] + 1}{named}{f', {keys}' if keys else ''}"


def _rule(detail: ErrorDetails, loc: Sequence[int | str]) -> str:
    """Return what one of pydantic's errors says, in our words."""
    kind, given, key = detail["type"], detail["input"], str(loc[-1])
    if found := OF_KEY.get((kind, key)) or RULES.get(kind):
        return found
    if kind == "extra_forbidden":
        known = list((Gates if len(loc) == 1 else TABLES[str(loc[0])]).model_fields)
        return joined(f"no such key; the keys are {', '.join(known)}", did_you_mean(key, known))
    if kind == "literal_error":
        words = str(detail["ctx"]["expected"]).replace("'", "")
        near = did_you_mean(given, words.split(" or ")) if isinstance(given, str) else ""
        return joined(f"{given!r} is not {words}", near)
    return (
        str(detail["ctx"]["error"])
        if kind == "value_error"
        else detail["msg"][:1].lower() + detail["msg"][1:]
    )
