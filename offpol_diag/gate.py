"""Numbers and the diagnosis against limits, or against an earlier result.

A limit is judged by the 95% interval of its number:

    whole interval within it             passed
    whole interval beyond it             failed
    limit inside the interval            passed, open: no evidence of a failure
    no interval                          the value alone; on the limit passes
    a value that overflows               its log10, where there is no interval
    NaN, unknown, unreliable             could not say
    unreliable, but certainly beyond it  failed (see `HIDDEN`)

All together: failed if any failed, else could not say if any could not be judged, else passed.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from offpol_diag import files
from offpol_diag.errors import GateFileError, OffpolError, PresetError, UsageError, did_you_mean
from offpol_diag.metrics import WATCHED_GAP, WATCHED_PRESET, Worse, worse
from offpol_diag.number import Number, Numbers, finite
from offpol_diag.numerals import FRACTIONS, doubted, say_limit, told_apart, written
from offpol_diag.presets import Preset, catalogue
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.presets.grammar import MARK
from offpol_diag.result import Diagnosis, DiagnosisVerdict, GateVerdict, Place, Result, place_of
from offpol_diag.trainers.ours import advice, ours, unlike

Kind = Literal["max", "min"]
Outcome = Literal["passed", "failed", "could not say"]
ORDER: tuple[DiagnosisVerdict, ...] = ("healthy", "honest_mismatch", "cannot_tell", "bug")
"""The diagnoses, each worse than the one before."""
GAPS = ("drift2", "total")
"""Prefixes of the metrics of the other two policy gaps; any other prefix is a preset."""
STEP = "step:"
"""What precedes the name of a number that must hold at every training step."""


def joined(*parts: str | None) -> str:
    """Join the non-empty parts of a reason."""
    return "; ".join(part for part in parts if part)


# ---------------------------------------------------------------- what must hold


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


def tolerance(text: str) -> Tolerance:
    """Parse `10%`, `0.001` or `10% + 0.001`."""
    parts = [part.strip() for part in re.split(r"(?<![eE])\+", text)]
    shares = [number_of(part.removesuffix("%")) for part in parts if part.endswith("%")]
    amounts = [number_of(part) for part in parts if not part.endswith("%")]
    if len(shares) > 1 or len(amounts) > 1 or not all(0 <= x < math.inf for x in shares + amounts):
        example = '"10%" (of the baseline), "0.001" (in its unit) or "10% + 0.001"'
        raise ValueError(f'"{text}" is no tolerance; write {example}')
    return Tolerance(sum(shares) / 100, sum(amounts))


def number_of(text: str) -> float:
    """Return a text as a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


class Limit(NamedTuple):
    """The most, or the least, that a number may be; `source`: the option, or the file and its key."""

    name: Name
    kind: Kind
    limit: float
    source: str


@dataclass(frozen=True)
class Gates:
    """What must hold, as options or the same keys of a TOML file say it.

    Attributes:
        max, min: limits by number.
        fail_on: diagnoses that fail, as every worse one does, with what set them.
        baseline: the earlier result: nothing may be worse than in it by more than the tolerance.
        tolerance: how much worse (`TOLERANCE` where none is named), but for numbers in `tolerances`.
        only: the numbers to compare, and no others.
        presets: presets whose numbers are compared as well.
    """

    max: dict[Name, Limit] = field(default_factory=dict)
    min: dict[Name, Limit] = field(default_factory=dict)
    fail_on: dict[DiagnosisVerdict, str] = field(default_factory=dict)
    baseline: str = ""
    tolerance: Tolerance | None = None
    tolerances: dict[Name, Tolerance] = field(default_factory=dict)
    only: list[Name] = field(default_factory=list)
    presets: list[str] = field(default_factory=list)

    @property
    def limits(self) -> list[Limit]:
        """All limits, the largest values first."""
        return [*self.max.values(), *self.min.values()]

    @property
    def label(self) -> str:
        """The name of the earlier result in messages."""
        return Path(self.baseline).name if self.baseline else "the baseline"

    @property
    def compared(self) -> list[Name]:
        """The numbers to compare with the baseline that are named."""
        return list(dict.fromkeys((*self.only, *self.tolerances)))

    def by_step(self, known: Catalogue) -> tuple[str, ...]:
        """Return the numbers that are needed at each training step, with presets' names as in a catalogue."""
        named = dict.fromkeys(one.name for one in self.limits if one.name.by_step)
        return tuple(
            f"{known[one.preset].name}.{split(one.number)[1]}" if one.preset in known else one.number
            for one in named
        )

    def to_compute(self, known: Catalogue) -> tuple[Preset, ...]:
        """Return the presets that the names need; the error on an unknown one of a file names its key."""
        named = [(one.source, one.name.preset) for one in self.limits]
        named += [("", one) for one in (*(one.preset for one in self.compared), *self.presets)]
        found: dict[str, Preset] = {}
        for source, preset in named:
            try:
                found |= {one.name: one for one in (known.resolve(preset) if preset else ())}
            except OffpolError as error:
                place = "" if source.startswith("--") or not source else f"{source}: "
                raise UsageError(f"{place}{error.message}", error.hint) from error
        return tuple(found.values())


USUAL = {
    "max": "--max k3=0.002",
    "min": "--min ess_tokens=0.5",
    "fail_on": "--fail-on bug",
    "baseline": "--baseline RESULT.json",
    "tolerance": "--tolerance 10% or --tolerance k3=0.001",
    "only": "--only k3,f_2",
    "presets": "--presets seq_mis",
}
"""Option, and key of a gate file → how the option is written."""
FORM = "its form is that of docs/ci.md: [max] and [min] with a line for each number, and fail_on"


def required(gates: Path | None = None, **options: Any) -> Gates:
    """Return what options ask (texts by the keys of `USUAL`), and what a gate file does that they do not.

    Raises:
        UsageError: there is no limit and no baseline, or an option is invalid.
        GateFileError: the file has mistakes in it.
    """
    file = read(gates) if gates else Gates()
    own, mistakes = _parsed({key: value for key, value in options.items() if value})
    if mistakes:
        key, said = mistakes[0]
        raise UsageError(f"--{key.replace('_', '-')}{said}", f"write {USUAL[key]}")
    merged: dict[str, Any] = {}
    for key, asked, there in (
        (one.name, getattr(own, one.name), getattr(file, one.name)) for one in fields(Gates)
    ):
        merged[key] = {**asked, **there, **asked} if isinstance(asked, dict) else asked or there
    found = Gates(**merged)
    if not found.baseline and (found.compared or found.tolerance):
        raise UsageError("there is a tolerance and no baseline", "name it: --baseline RESULT.json")
    if not (found.limits or found.fail_on or found.baseline):
        example = "say what must hold: --fail-on bug, --max k3=0.002 --min ess_tokens=0.5, "
        raise UsageError("no bound is given", f"{example}--gates FILE.toml or --baseline RESULT.json")
    return found


def read(path: Path) -> Gates:
    """Read a gate file; the path of its baseline is taken from beside it.

    Raises:
        GateFileError: it cannot be read, is not TOML, holds nothing, or has mistakes in it (all are listed).
    """
    try:
        table = files.toml(files.read(path, files.MOST_TOML).decode("utf-8-sig"))
    except OSError as error:
        hint = "give a gate file, see docs/ci.md"
        raise GateFileError(f"{path}: cannot be read ({error.strerror})", hint) from error
    except ValueError as error:
        raise GateFileError(f"{path}: not TOML: {error}", FORM) from error
    found, mistakes = _parsed(table, path.name)
    lines = [f"{path}: {key}{said}" for key, said in mistakes or [("", "holds no bound")][bool(table) :]]
    if lines:
        head = lines if len(lines) == 1 else [f"{path}: {len(lines)} mistakes", *lines]
        raise GateFileError(head[0], FORM, head[1:])
    return replace(found, baseline=str(path.parent / found.baseline)) if found.baseline else found


def _parsed(given: Mapping[str, Any], file: str = "") -> tuple[Gates, list[tuple[str, str]]]:
    """Parse options, or the table of a file, and list mistakes: the key, and what is wrong with it.

    A value is a text or a list of texts; in a file [max] and [min] are tables with a line for each number.
    """
    found: dict[str, Any] = {"max": {}, "min": {}, "fail_on": {}, "tolerances": {}, "only": [], "presets": []}
    mistakes = []
    for key, value in given.items():
        if key not in USUAL:
            known = list(USUAL)
            near = did_you_mean(key, known)
            mistakes.append((key, joined(f": no such key; the keys are {', '.join(known)}", near)))
            continue
        if file and isinstance(value, dict) is not (key in ("max", "min")):
            form = "a table: a line NAME = NUMBER for each" if key in ("max", "min") else "a text or a list"
            mistakes.append((key, f": it must be {form}"))
            continue
        source = f"{file}: {key}" if file else f"--{key.replace('_', '-')}"
        for text in _texts(value):
            said, equals, right = (part.strip() for part in text.rpartition("="))
            try:
                match key:
                    case "max" | "min":
                        one, limit = name(said if equals else right), number_of(right if equals else "")
                        if not math.isfinite(limit):
                            raise ValueError("it must be a number" if equals else "it has no limit")
                        if one in found[key]:
                            raise ValueError("one number has two limits")
                        found[key][one] = Limit(one, key, limit, source)
                        low, high = (found[kind].get(one) for kind in ("min", "max"))
                        if low and high and low.limit > high.limit:
                            raise ValueError("min is above max: no number can satisfy both")
                    case "fail_on":
                        found[key][_fails(text)] = source
                    case "tolerance" if equals:
                        found["tolerances"][comparable(said)] = tolerance(right)
                    case "tolerance":
                        found[key] = tolerance(text)
                    case "only":
                        found[key].append(comparable(text))
                    case "presets":
                        found[key].append(text)
                    case _:
                        found[key] = text
            except ValueError as error:
                mistakes.append((key, f' "{text}": {error}'))
    return Gates(**found), mistakes


def _texts(value: Any) -> list[str]:
    """Return the texts of a value; dotted names of a table, which TOML nests, are joined again."""
    if isinstance(value, dict):
        return [
            f"{outer}.{text}" if isinstance(inner, dict) else f"{outer}={inner!r}"
            for outer, inner in value.items()
            for text in (_texts(inner) if isinstance(inner, dict) else [""])
        ]
    return [str(one) for one in value] if isinstance(value, list | tuple) else [str(value)]


def _fails(text: str) -> DiagnosisVerdict:
    """Return the diagnosis of a word."""
    word, known = text.strip().lower().replace("-", "_"), ORDER[1:]
    if word not in known:
        near = did_you_mean(word, [*known])
        raise ValueError(joined(f"it is not {', '.join(known[:-1])} or {known[-1]}", near))
    return known[known.index(word)]


# ---------------------------------------------------------------- one number

HIDDEN: Mapping[str, Kind] = {
    "mean_ratio": "max",
    "chi2_token": "max",
    "chi2_sequence": "max",
    "ess_tokens": "min",
    "ess_sequences": "min",
}
"""Number → the kind of limit that it certainly breaks if its whole interval lies beyond it, however heavy the
tail of the weights: a sample misses the rarest, largest weights, which would make a mean of r or r² larger
and the effective sample size smaller."""


class Ruling(NamedTuple):
    """The verdict on one number: `on` says whether the interval or the value decided."""

    passed: bool | None
    reason: str
    open: bool = False
    on: Literal["interval", "value", ""] = ""


def rule(number: Number, kind: Kind, limit: float, hidden: bool = False) -> Ruling:
    """Check a number against a limit; an unreliable one can fail only if what is `hidden` lies beyond it."""
    keeps = operator.le if kind == "max" else operator.ge
    near, far = (number.interval or (math.nan, math.nan))[:: 1 if kind == "max" else -1]
    has_interval = number.known and number.interval is not None
    beyond_it = has_interval and not keeps(near, limit)
    note, sound = number.note, replace(number, note=None)
    if why := silence(number):
        if silence(sound) or not (beyond_it and hidden):
            return Ruling(None, why)
        note = f"{note}, but what a heavy tail hides lies farther beyond the bound"
    value, ends = written(sound)
    if number.value is None:  # too large for a float: its log10 is compared
        held = keeps(number.log10 or 0.0, math.log10(limit) if limit > 0 else -math.inf)
        left, right = f"10^{number.log10:.4g}", say_limit(limit, number.unit)
    else:
        held = keeps(number.value, limit)
        left, right = told_apart(value, number.value, limit, number.unit)
    said = f"{left} {'' if held else 'is not '}{'≤' if kind == 'max' else '≥'} {right}"
    if not has_interval:
        return Ruling(held, joined(said, "no interval", note), on="value")
    if beyond_it:
        end = ends.strip("[]").split(", ")[0 if kind == "max" else -1] or value
        why = f"from {told_apart(end, near, limit, number.unit)[0]}"
        why = f"the whole 95% interval lies beyond it, {why}"
        return Ruling(False, joined(said, why, note), on="interval")
    within = keeps(far, limit)
    why = "" if within else "the 95% interval holds values on both sides of the bound"
    return Ruling(True, joined(said, why, note), open=not within, on="interval")


def silence(number: Number) -> str:
    """Return the reason why a number cannot be judged; empty if it can."""
    if doubted(number):
        return number.note or ""
    if not number.known:
        return number.unknown or "there is no value"
    parts = (number.value, number.log10, *(number.interval or ()))
    odd = any(part is not None and math.isnan(part) for part in parts)
    return (number.unknown or "it is not a number") if odd else ""


def shown(number: Number, ruling: Ruling) -> dict[str, Any]:
    """Return the fields of a verdict that hold number and ruling; None for infinite and NaN values."""
    value, log10 = (x if x is not None and math.isfinite(x) else None for x in (number.value, number.log10))
    ends = number.interval if number.interval and all(map(math.isfinite, number.interval)) else None
    of = {"passed": ruling.passed, "open": ruling.open, "judged_on": ruling.on}
    return {"value": value, "interval": ends, "log10": log10, "unit": number.unit} | of


# ---------------------------------------------------------------- all of them

DIFFER = "tokens_differ"
"""The share of tokens whose log-probs are not equal to the last bit: a count, judged by its value."""


def judged(now: Result, gates: Gates, base: Result | None = None) -> tuple[GateVerdict, ...]:
    """Return all verdicts on the result `now`; `base` is the earlier result."""
    numbers = Lookup(now)
    equal = now.number(DIFFER).value == 0
    equal = equal and any(split(one.name.number)[1] == DIFFER for one in gates.limits)
    return (
        *(diagnosis(now, fails, source, equal) for fails, source in gates.fail_on.items()),
        *(bound(numbers, *one) for one in gates.limits),
        *(against(numbers, base, gates) if base else ()),
    )


def outcome(verdicts: Iterable[GateVerdict]) -> Outcome:
    """Combine verdicts: any failure fails; else, if one was not judged or there is none, "could not say"."""
    said = [verdict.passed for verdict in verdicts]
    if False in said:
        return "failed"
    return "could not say" if None in said or not said else "passed"


def beyond(verdict: GateVerdict) -> bool:
    """Return whether the plain value lies on the wrong side of the limit, whatever its interval.

    A diagnosis that this dump cannot make lies there too.
    """
    value, limit = verdict.value, verdict.limit
    if verdict.bound == "diagnosis":
        return verdict.passed is False or verdict.open
    if value is None:
        return False
    if verdict.bound == "within":
        return abs(value - (verdict.centre or 0.0)) > limit
    return value > limit if verdict.bound == "max" else value < limit


MOST_HINTS, MOST_NAMED, FEWEST = 5, 5, 5
"""Unknown names for which similar ones are sought, which is slow; steps that a reason lists; fewest sequences
of a step for which its interval is used."""


class Lookup:
    """The numbers of a result by their names; one that is unknown says why."""

    def __init__(self, result: Result) -> None:
        self.result = result
        self._hints = MOST_HINTS

    def find(self, name: str) -> Number:
        """Return the number of the whole dump."""
        if name in self.result.whole:
            return self.result.whole[name]
        preset, prefix, metric = self.preset_of(name)
        if preset is None:
            return Number(unknown=self._absent(name))
        if needs := self.result.presets[preset].needs:
            return Number(unknown=f"{prefix} needs {', '.join(needs)}, which the dump lacks")
        numbers = self.result.preset(preset)
        if metric in numbers:
            return numbers[metric]
        return Number(unknown=joined(f'no metric "{metric}" of {prefix}', self._near(metric, list(numbers))))

    def preset(self, name: str) -> str | None:
        """Return the name of a preset given by name or alias, in any spelling that the catalogue accepts."""
        rows, plain = self.result.presets, catalogue.plain
        alike = [key for key, row in rows.items() if plain(name) in map(plain, (key, *row.aliases))]
        with contextlib.suppress(KeyError, PresetError):
            alike.append(catalogue.load()[name].name)
        return name if name in rows else next((key for key in alike if key in rows), None)

    def preset_of(self, name: str) -> tuple[str | None, str, str]:
        """Return the preset that a number belongs to, how it was named, and its metric."""
        prefix, metric = split(name)
        found = None if name in self.result.whole else self.preset(prefix)
        return (found, prefix, metric) if found else (None, "", name)

    def at_steps(self, name: str) -> tuple[list[tuple[str, Number]], str]:
        """Return the number at each step, unreliable where that of the dump is, and what is missing.

        Metrics by step are those of the first policy gap of the dump.
        """
        axis, whole, main = self.result.axes.get("step"), self.find(name), self.result.prefix
        steps = [one for one in self.result.at("step") if math.isfinite(number_of(one.key))]
        if axis is None or not steps:
            why = "no row of this dump has a step" if axis else "the dump has no column step"
            return [("", Number(unknown=why))], ""
        preset, _, metric = self.preset_of(name)
        names = (metric, metric.removeprefix(main)) if preset or metric.startswith(main) else ()
        rows = []
        for place in steps:
            own = self._at(place, preset)
            if number := next((own[one] for one in names if one in own), None):
                interval = None if place.sequences < FEWEST else number.interval
                note = whole.note if doubted(whole) else number.note
                rows.append((place.key, replace(number, interval=interval, note=note)))
        if len(rows) < len(steps):
            unlisted = f"{name} is not listed by step in this result; gate the dump itself"
            return [("", Number(unknown=(not whole.known and whole.unknown) or unlisted))], ""
        every = len(steps) + axis.left_out
        return rows, f"only {len(steps)} of {every} steps are in this result" if len(steps) < every else ""

    def _at(self, place: Place, preset: str | None) -> Numbers:
        subject = place_of("step", place.key, f"preset/{preset}")
        return self.result.of(subject) if preset else place.numbers

    def _absent(self, name: str) -> str:
        """Return why the result has no number of this name."""
        own = {key: list(self.result.preset(key)) for key in self.result.presets}
        known = [*self.result.whole, *(f"{key}.{one}" for key, names in own.items() for one in names)]
        preset, metric = split(name)
        of_preset = preset and any(metric in names for names in own.values())
        if of_preset and self._hints > 0 and not did_you_mean(preset, [*own, *GAPS]):
            self._hints -= 1
            missing = f"{preset} is not among the presets of this result"
            return f"{missing}; analyze the dump with --presets {preset}"
        return joined(f'no metric "{name}" in this result', self._near(name, known))

    def _near(self, name: str, known: list[str]) -> str:
        """Return what an unknown name may mean."""
        self._hints -= 1
        return advice(name) or (did_you_mean(name, known) if self._hints >= 0 else "")


def bound(numbers: Lookup, name: Name, kind: Kind, limit: float, source: str) -> GateVerdict:
    """Judge a number, or that of every step by the worst one; one failed step is enough to fail."""
    rows, missing = [("", numbers.find(name.number))], ""
    if name.by_step:
        rows, missing = numbers.at_steps(name.number)
    metric, sign = split(name.number)[1], 1.0 if kind == "max" else -1.0
    if metric == DIFFER:  # an exact count
        rows = [(key, replace(one, interval=None)) for key, one in rows]
    each = [(key, one, rule(one, kind, limit, HIDDEN.get(metric) == kind)) for key, one in rows]
    failed, unsaid = ([row for row in each if row[2].passed is said] for said in (False, None))
    opened = [row for row in each if row[2].open]

    def badness(row: tuple[str, Number, Ruling]) -> float:
        overflows = math.inf if row[1].log10 is not None else math.nan
        return sign * (overflows if row[1].value is None else row[1].value)

    worst = unsaid[0] if unsaid and not failed else max(failed or each, key=badness)
    step, number, ruling = worst
    reason, where = ruling.reason, f"step {step}" if step else ""
    if missing and not failed and not unsaid:
        where, number, ruling = "", Number(), Ruling(None, "")
        reason = f"{missing}; gate the dump itself"
    elif where:
        those, verb = (failed, "fail") if failed else (unsaid, "cannot be judged")
        before = "at" if unsaid and not failed else "worst at"
        if not those and opened != [worst]:
            those, verb = opened, "hold values on both sides"
        some = _some([key for key, *_ in those], MOST_NAMED)
        more = f"{len(those)} of {len(rows)} steps {verb}: {some}" if those else ""
        more = f"the intervals of {more}" if more and those is opened else more
        reason = joined(f"{before} {where}: {reason}", more)
    return GateVerdict(
        name=str(name),
        said=name.said,
        bound=kind,
        limit=limit,
        source=source,
        reason=joined(reason, unlike(name.said)),
        where=where,
        **shown(number, ruling._replace(open=ruling.passed is True and bool(opened))),
    )


def _some(names: Sequence[str], most: int) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


# ---------------------------------------------------------------- the diagnosis

SEQUENCES, PROMPTS = 16, 4
"""Fewest sequences, and prompts where the dump has group_id, of which not finding a bug says something."""
UNTESTED = "whether it is a bug could not be tested"


def diagnosis(result: Result, fails: DiagnosisVerdict, source: str, equal: bool = False) -> GateVerdict:
    """Judge the diagnosis (`docs/ci.md` has the table).

    Several causes that fit pass as open, unless `cannot_tell` fails. What could not be tested is not judged,
    and whether it is a bug is not where one of the causes that fit is a bug. Columns that are `equal` because
    a limit asks for it are no copies, and pass.
    """
    found, dump, ruling = result.diagnosis, result.dump, Ruling(None, "")
    counts = [(dump.sequences, SEQUENCES, "sequences")]
    counts += [(dump.groups, PROMPTS, "prompts")] if "group_id" in dump.columns else []
    few = next(
        (f"{UNTESTED}: that needs {most} {unit}, and there are {n}" for n, most, unit in counts if n < most),
        "",
    )
    if found is not None:
        unsure = found.verdict == "cannot_tell" != fails
        bugs = [one.id for one in found.candidates if one.kind == "bug" == fails]
        if equal and found.verdict == "cannot_tell" and not few:
            ruling = Ruling(True, "")
        elif not unsure and ORDER.index(found.verdict) >= ORDER.index(fails):
            ruling = Ruling(False, few if equal and found.verdict == "cannot_tell" else "")
        elif few:
            ruling = Ruling(None, few)
        elif unsure and not found.candidates:
            ruling = Ruling(None, UNTESTED)
        elif bugs:
            perhaps = f"whether it is a bug, this dump cannot tell: {' or '.join(bugs)} would be one"
            ruling = Ruling(None, perhaps)
        else:
            strict = "which cause it is, this dump cannot tell; --fail-on cannot_tell fails for that"
            ruling = Ruling(True, strict if unsure else "", open=unsure)
    return _diagnosis(found, ruling, source=source, diagnosis_fails=fails)


def plain(verdict: DiagnosisVerdict) -> str:
    """Return the diagnosis in words."""
    return verdict.replace("_", " ")


def _diagnosis(found: Diagnosis | None, ruling: Ruling, **of: Any) -> GateVerdict:
    """Build the verdict; it says the diagnosis with its cause, and the first sentence of the fix of a bug."""
    said = "this result holds no diagnosis"
    if found:
        headline, decide = (
            text[:1].lower() + text[1:].rstrip(".") for text in (found.headline, found.decide)
        )
        said = f"{plain(found.verdict)}: {found.headline.rstrip('.')}"
        bug = next((one for one in found.causes if one.kind == "bug"), None)
        if found.candidates:
            causes = ", ".join(one.id for one in found.candidates)
            said = joined(f"{headline}: {causes}", f"to decide, {decide}" if decide else "")
        elif bug and found.verdict == "bug":
            fix = re.split(r"(?<=[.!?])\s+(?=[A-Z])", bug.fix)[0].rstrip(".")
            what = f"{plain(found.verdict)} ({bug.id}): {bug.statement.rstrip('.')}"
            said = joined(what, f"fix: {fix}" if fix else "")
    given = shown(Number(), ruling) | {"diagnosis": found and found.verdict, **of}
    reason = joined(said, ruling.reason)
    return GateVerdict(name="diagnosis", bound="diagnosis", limit=0.0, reason=reason, **given)


# ---------------------------------------------------------------- against an earlier result

TOLERANCE = Tolerance(share=0.1)
"""By how much a number may be worse than the baseline's, if nothing else is said."""


def against(now: Lookup, base: Result, asked: Gates) -> Iterator[GateVerdict]:
    """Yield a verdict per number, and one on the diagnosis.

    Default numbers are compared only if reliable in the baseline, and the diagnosis if it has one.
    """
    there, rows = Lookup(base), _rows(base, asked)
    names = [one for one in asked.compared if one.number != "diagnosis"]
    if not asked.only:
        usual = _gaps(there)
        usual += [f"{row}.{one}" for row in rows if there.preset(row) for one in WATCHED_PRESET]
        names += [Name(one) for one in usual if Name(one) not in names and _usable(there.find(one))]
        names += [Name(f"{row}.{WATCHED_PRESET[0]}") for row in rows if there.preset(row) is None]
    for one in names:
        yield _compare(now, there, one, asked)
    if Name("diagnosis") in asked.compared or (base.diagnosis and not asked.only):
        here, earlier = now.result.diagnosis, base.diagnosis
        ruling = Ruling(None, "" if earlier else f"{asked.label} holds no diagnosis")
        if here and earlier:
            passed = ORDER.index(here.verdict) <= ORDER.index(earlier.verdict)
            ruling = Ruling(passed, "" if passed else f"it was {plain(earlier.verdict)} in {asked.label}")
        was = earlier and earlier.verdict
        yield _diagnosis(here, ruling, source=asked.label, diagnosis_baseline=was)


def not_compared(base: Result, asked: Gates) -> str:
    """Return a sentence naming what was not compared; empty if everything was."""
    there = Lookup(base)
    doubtful = [one for one in _gaps(there) if doubted(there.find(one))]
    named = [there.preset(row) for row in _rows(base, asked)]
    rows = [row for row in base.presets if row not in named]
    parts = joined(
        f"{', '.join(doubtful)}: unreliable in {asked.label}" if doubtful else "",
        f"its presets ({_some(rows, 3)}): name them with --presets" if rows else "",
    )
    return f"Not compared: {parts}." if parts and not asked.only else ""


def _gaps(base: Lookup) -> list[str]:
    """List the default numbers of the policy gaps: rollout → old (or rollout → current), old → current."""
    first = "" if _usable(base.find("k3")) else "total."
    return [f"{gap}{metric}" for gap in (first, "drift2.") for metric in WATCHED_GAP]


def _rows(base: Result, asked: Gates) -> list[str]:
    """List the presets to compare, each once; `all` stands for every preset of the baseline."""
    every = [base.presets if catalogue.plain(row) == catalogue.ALL else [row] for row in asked.presets]
    return list(dict.fromkeys(row for rows in every for row in rows))


def _usable(number: Number) -> bool:
    return number.value is not None and not doubted(number)


def _compare(now: Lookup, base: Lookup, name: Name, asked: Gates) -> GateVerdict:
    """Judge the difference of a number from the baseline's, in the direction that is worse.

    The results count as independent runs: a comparison fails if the whole interval of the difference lies
    beyond the tolerance.
    """
    here, there = now.find(name.number), base.find(name.number)
    metric, allowance = split(name.number)[1], asked.tolerances.get(name, asked.tolerance or TOLERANCE)
    ruling = Ruling(None, _uncomparable(now, base, name, asked.label))
    limit: dict[str, Any] = {"bound": "max", "limit": 0.0}
    if not ruling.reason and here.value is not None and there.value is not None:
        way, earlier = worse(metric), there.value
        was_bad = _badness(there, way)
        change = replace(difference(_badness(here, way), was_bad), note=here.note)
        allowed = allowance.share * abs(was_bad.value or 0.0) + allowance.amount
        above = way.sign == "away" and here.interval is not None and here.interval[0] >= way.target
        outward = "max" if way.sign == "higher" or above else "min"
        ruling = rule(change, "max", allowed, HIDDEN.get(metric) == outward)
        if way.sign == "either":
            other = rule(change, "min", -allowed)
            ruling = min(ruling, other, key=lambda one: (one.passed is True, not one.open))
        if ruling.passed is not None:
            ruling = ruling._replace(reason=_worse_by(way, change, allowed, ruling, here.unit))
            distance = abs(earlier - way.target) + allowed
            limits: dict[str, dict[str, Any]] = {
                "away": {"bound": "within", "centre": way.target, "limit": distance},
                "either": {"bound": "within", "centre": earlier, "limit": allowed},
                "lower": {"bound": "min", "limit": earlier - allowed},
                "higher": {"bound": "max", "limit": earlier + allowed},
            }
            limit = limits[way.sign]
            limit["limit"] = finite(limit["limit"])
    was = shown(there, ruling)
    return GateVerdict(
        name=str(name),
        said=name.said,
        source=asked.label,
        tolerance=str(allowance),
        baseline=was["value"],
        baseline_interval=was["interval"],
        reason=joined(ruling.reason, unlike(name.said)),
        **limit,
        **shown(here, ruling),
    )


def _uncomparable(now: Lookup, base: Lookup, name: Name, label: str) -> str:
    """Return why two numbers cannot be compared; empty if they can, or if only the new one is unreliable."""
    here, there = now.find(name.number), base.find(name.number)
    (mine, preset, _), (other, _, _) = now.preset_of(name.number), base.preset_of(name.number)
    unknown, was_unknown = (
        silence(one) or ("the value overflows float64" if one.value is None else "") for one in (here, there)
    )
    if unknown and not doubted(here):
        return unknown
    if mine and not other:
        return f"{label} has no preset {preset}; it has {_some(list(base.result.presets), 8) or 'none'}"
    if mine and other:
        ours, theirs = now.result.presets[mine], base.result.presets[other]
        if any(getattr(ours, key) != getattr(theirs, key) for key in ("method", "policy", "loss")):
            return f"{preset} is another method in {label}: {theirs.method} there, {ours.method} here"
    return f"{label}: {was_unknown}" if was_unknown else unknown if here.value is None else ""


def _badness(number: Number, way: Worse) -> Number:
    """Transform a number so that higher is worse: negate it, or take its distance from the target."""
    assert number.value is not None
    value, (low, high) = number.value, number.interval or (number.value, number.value)
    if way.sign == "lower":
        value, low, high = -value, -high, -low
    elif way.sign == "away":
        ends = sorted((abs(low - way.target), abs(high - way.target)))
        value, low, high = abs(value - way.target), 0.0 if low <= way.target <= high else ends[0], ends[1]
    return Number(value=value, interval=(low, high) if number.interval else None)


def difference(one: Number, other: Number) -> Number:
    """Return `one` − `other` of independent runs; without an interval if either has none.

    Each end lies √(a² + b²) from the difference, a and b being the distances of the two ends it comes from
    (Zou and Donner 2008).
    """
    assert one.value is not None
    assert other.value is not None
    gap = one.value - other.value
    if one.interval is None or other.interval is None:
        return Number(value=gap)
    below = math.hypot(one.value - one.interval[0], other.interval[1] - other.value)
    above = math.hypot(one.interval[1] - one.value, other.value - other.interval[0])
    return Number(value=gap, interval=(gap - below, gap + above))


def _worse_by(way: Worse, change: Number, allowed: float, ruling: Ruling, unit: str) -> str:
    """Return the reason: `worse by 0.01 [0.005, 0.015], 0.002 allowed; …`."""
    value, (low, high) = change.value or 0.0, change.interval or (0.0, 0.0)
    kind = "changed" if way.sign == "either" else "better" if value < 0 else "worse"
    if kind == "better":
        value, low, high = -value, -high, -low
    scale, points = (100.0, " points") if unit in FRACTIONS else (1.0, "")
    value, exact = value * scale, allowed * scale
    of = Number(value=value, interval=(low * scale, high * scale) if change.interval else None)
    size, interval = written(of)
    short = float(f"{exact:.4g}")  # of a share of the baseline four digits do
    bound = short if (value > short) is (value > exact) and value != short else exact
    size, right = told_apart(size, value, bound, "")
    sure = ruling.passed is False and ruling.on == "interval"
    hides = f"although {change.note}: what a heavy tail hides is worse still"
    return joined(
        f"{kind} by {size}{points}{f' {interval}' if interval else ''}, {right}{points} allowed",
        "the whole 95% interval of the difference lies beyond that" if sure else "",
        "" if change.interval else "no interval",
        hides if doubted(change) else change.note,
    )
