"""Numbers and the diagnosis against limits, or against an earlier result.

A limit is judged by the 95% interval of its number:

    whole interval within it             passed
    whole interval beyond it             failed
    limit inside the interval            passed, open: no evidence of a failure
    no interval                          the value alone; on the limit passes
    NaN, unknown, unreliable             could not say
    unreliable, but certainly beyond it  failed (see `HIDDEN`)

All together: failed if any failed, else could not say if any could not be judged, else passed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from offpol_diag import files
from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.metrics import PAIRS, WATCHED_GAP, WATCHED_PRESET, Worse, worse
from offpol_diag.number import Number, finite
from offpol_diag.numerals import doubted, format_limit, format_number, format_value
from offpol_diag.presets import Preset, catalogue
from offpol_diag.presets.catalogue import Catalogue
from offpol_diag.result import DiagnosisVerdict, GateVerdict, Result, at_steps, first_mistake, place_of
from offpol_diag.trainers import logged_names

Kind = Literal["max", "min"]
Outcome = Literal["passed", "failed", "could not say"]
ORDER: tuple[DiagnosisVerdict, ...] = ("healthy", "honest_mismatch", "cannot_tell", "bug")
"""The diagnoses, each worse than the one before."""
DIAGNOSIS = "diagnosis"
"""The name of the verdict on the diagnosis, beside the names of numbers."""
STEP = "step:"
"""What precedes the name of a number that must hold at every training step."""
DIFFER = "tokens_differ"
"""The share of tokens whose log-probs are not equal to the last bit: a count, judged by its value."""

# ---------------------------------------------------------------- what must hold


@dataclass(frozen=True)
class Limit:
    """The most (max) or least (min) that a number may be: of the dump or a preset, whole or at every step."""

    name: str
    preset: str = ""
    step: bool = False
    kind: Kind = "max"
    value: float = math.inf

    @classmethod
    def of(cls, text: str, kind: Kind = "max", value: float = math.inf) -> Limit:
        """Parse a name: `k3`, `total.k3`, `step:k3`, `seq_mis.ess_tokens`; of a preset any of its names.

        A name that a trainer logs is that of the number which equals it: `rollout_corr/kl` is `k1`.
        """
        of, _, name = text.removeprefix(STEP).strip().rpartition(".")
        pair = f"{of}." in PAIRS or not of
        name = logged_names("gap" if pair else "preset").get(name, name)
        if pair:
            of, name = "", f"{of}.{name}".lstrip(".")
        with suppress(KeyError, OffpolError):  # a preset of a user's file is not in the catalogue
            of = of and catalogue.load()[of].name
        return cls(name, of, text.startswith(STEP), kind, value)

    @property
    def number(self) -> str:
        """The number's name, with its preset."""
        return f"{self.preset}.{self.name}" if self.preset else self.name


class Gates(BaseModel):
    """What must hold, as options or the same keys of a TOML file say it.

    Attributes:
        fail_on: the mildest diagnosis that fails.
        baseline: the earlier result: nothing may be worse than in it.
        tolerance: by what share of the baseline's value (or of its distance from its target) it may be.
        presets: presets whose numbers are compared with the baseline as well.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    max: dict[str, FiniteFloat] = {}
    min: dict[str, FiniteFloat] = {}
    fail_on: Literal["bug", "cannot_tell"] | None = None
    baseline: Path | None = None
    tolerance: FiniteFloat = Field(0.1, ge=0)
    presets: tuple[str, ...] = ()

    @property
    def limits(self) -> list[Limit]:
        """All limits, the largest values first."""
        highest = [Limit.of(name, "max", value) for name, value in self.max.items()]
        return highest + [Limit.of(name, "min", value) for name, value in self.min.items()]

    def to_compute(self, known: Catalogue) -> tuple[tuple[Preset, ...], tuple[str, ...]]:
        """Return the presets that the names need, and the numbers that are needed at each training step."""
        named = dict.fromkeys((*(one.preset for one in self.limits if one.preset), *self.presets))
        steps = dict.fromkeys(one.number for one in self.limits if one.step)
        return known.resolve([*named]) if named else (), tuple(steps)


def required(gates: Path | None = None, **options: Any) -> Gates:
    """Return what options ask, and what a gate file does that they do not.

    Args:
        gates: the file; the path of its baseline is taken from beside it.
        **options: by the keys of `Gates`; limits as texts `k3=0.002`.

    Raises:
        UsageError: nothing is asked, or an option or the file is invalid.
    """
    filed, asked = Gates(), {key: value for key, value in options.items() if value or value == 0}
    if gates is not None:
        try:
            filed = Gates(**files.toml(files.read(gates, files.MOST_TOML).decode("utf-8-sig")))
        except (OSError, ValueError) as error:
            why = first_mistake(error) if isinstance(error, ValidationError) else error
            raise UsageError(f"{gates}: no gate file: {why}", "its form is that of docs/ci.md") from error
        if filed.baseline:
            filed = filed.model_copy(update={"baseline": gates.parent / filed.baseline})
    for key in {"max", "min"} & asked.keys():
        pairs = [text.rpartition("=") for text in asked[key]]
        own = {name.strip(): limit.strip() for name, _, limit in pairs}
        asked[key] = {**own, **{name: x for name, x in getattr(filed, key).items() if name not in own}}
    try:
        found = Gates(**filed.model_dump(exclude_unset=True) | asked)
    except ValidationError as error:
        hint = "docs/ci.md has the form: --max k3=0.002, --fail-on bug"
        raise UsageError(f"--{first_mistake(error)}", hint) from error
    if not (found.limits or found.fail_on or found.baseline):
        example = "say what must hold: --fail-on bug, --max k3=0.002 --min ess_tokens=0.5, "
        raise UsageError("no bound is given", f"{example}--gates FILE.toml or --baseline RESULT.json")
    return found


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


@dataclass(frozen=True)
class Ruling:
    """Whether a bound holds; `passed` is None where it cannot be judged."""

    passed: bool | None
    reason: str = ""
    open: bool = False


def rule(number: Number, kind: Kind, limit: float, certain: bool = False) -> Ruling:
    """Check a number; one that is unreliable fails only where it is `certain` that it lies farther beyond."""
    if not number.known:
        return Ruling(None, number.unknown or "it is not a number")
    value = math.inf if number.value is None else number.value
    ends = number.interval or (value, value)
    if any(map(math.isnan, (value, *ends))):
        return Ruling(None, "it is not a number")
    within = [x <= limit if kind == "max" else x >= limit for x in ends]
    note, beyond = number.note or "", not any(within)
    if doubted(number):
        if not (certain and beyond and number.interval):
            return Ruling(None, note)
        note += ", but what a heavy tail hides lies farther beyond the bound"
    why = "" if all(within) else "the 95% interval holds values on both sides of the bound"
    why = "the whole 95% interval lies beyond it" if beyond else why
    why = why if number.interval else "no interval"
    return Ruling(not beyond, joined(why, note), open=any(within) and not all(within))


def joined(*parts: str) -> str:
    """Join the non-empty parts of a reason."""
    return "; ".join(filter(None, parts))


def find(result: Result, one: Limit) -> Number:
    """Return a number of the whole dump; one that is unknown says why."""
    numbers = result.preset(one.preset) if one.preset else result.whole
    if one.name in numbers:
        return numbers[one.name]
    if one.preset in result.presets and (needs := result.presets[one.preset].needs):
        return Number(unknown=f"{one.preset} needs {', '.join(needs)}, which the dump lacks")
    known = [*result.whole, *(f"{key}.{name}" for key in result.presets for name in result.preset(key))]
    return Number(unknown=joined(f'no number "{one.number}" in this result', did_you_mean(one.number, known)))


WORDS = {0: "fail", 1: "cannot be judged", 2: "are open"}


def by_step(result: Result, one: Limit) -> tuple[list[tuple[str, Number]], str]:
    """Return the number at each step, unreliable where that of the dump is, and what is missing.

    Numbers of a pair of policies are by step those of the main pair, without its prefix.
    """
    whole, main, rows, places = find(result, one), result.prefix, [], at_steps(result)
    names = (one.name, one.name.removeprefix(main)) if one.preset or one.name.startswith(main) else ()
    for place in places:
        of_preset = result.of(place_of("step", place.key, f"preset/{one.preset}"))
        numbers = of_preset if one.preset else place.numbers
        if number := next((numbers[name] for name in names if name in numbers), None):
            note = whole.note if doubted(whole) else number.note
            rows.append((place.key, replace(number, note=note)))
    if not places:
        return [], "no row of this dump has a step"
    every = len(places) + result.axes["step"].left_out
    missing = f"only {len(rows)} of {every} steps are in this result; gate the dump itself"
    return rows, "" if len(rows) == every else (not rows and whole.unknown) or missing


def bound(result: Result, one: Limit) -> GateVerdict:
    """Judge a number, or that of every step by the worst one; one failed step is enough to fail."""
    rows, missing = by_step(result, one) if one.step else ([("", find(result, one))], "")
    certain, each = HIDDEN.get(one.name.rpartition(".")[2]) == one.kind, []
    for step, number in rows:
        exact = replace(number, interval=None) if one.name.endswith(DIFFER) else number
        ruling = rule(exact, one.kind, one.value, certain)
        rank = 3 if ruling.passed and not ruling.open else {False: 0, None: 1, True: 2}[ruling.passed]
        size = math.inf if exact.value is None else exact.value
        each.append((rank, -size if one.kind == "max" else size, step, exact, ruling))
    if missing and all(rank > 0 for rank, *_ in each):
        each = [(3, 0.0, "", Number(), Ruling(None, missing))]
    rank, _, step, number, ruling = min(each, key=lambda row: row[:2])
    some = sum(other == rank for other, *_ in each)
    alike = f"{some} of {len(rows)} steps {WORDS[rank]}" if step and rank in WORDS else ""
    return GateVerdict(
        name=f"{STEP * one.step}{one.number}",
        must=f"{'≤' if one.kind == 'max' else '≥'} {format_limit(one.value, number.unit)}",
        limit=one.value,
        number=replace(number, note=None),
        where=f"step {step}" if step else "",
        **vars(replace(ruling, reason=joined(ruling.reason, alike))),
    )


# ---------------------------------------------------------------- all of them


def judged(now: Result, gates: Gates, base: Result | None = None) -> list[GateVerdict]:
    """Return all verdicts on the result `now`; `base` is the earlier result."""
    return [
        *([diagnosis(now, gates.fail_on)] if gates.fail_on else []),
        *(bound(now, one) for one in gates.limits),
        *(against(now, base, gates) if base else ()),
    ]


def outcome(verdicts: Iterable[GateVerdict]) -> Outcome:
    """Combine verdicts: any failure fails; else, if one was not judged or there is none, "could not say"."""
    said = [one.passed for one in verdicts]
    return "failed" if False in said else "could not say" if None in said or not said else "passed"


SEQUENCES, PROMPTS = 16, 4
"""Fewest sequences, and prompts where the dump has group_id, of which not finding a bug says something."""


def diagnosis(result: Result, fails: DiagnosisVerdict) -> GateVerdict:
    """Judge the diagnosis (`docs/ci.md` has the table).

    Several causes that fit pass as open, unless `cannot_tell` fails or one of them is a bug.
    """
    found, dump = result.diagnosis, result.dump
    if found is None:
        ruling = Ruling(None, "this result holds no diagnosis")
    elif ORDER.index(found.verdict) >= ORDER.index(fails):
        ruling = Ruling(False)
    elif dump.sequences < SEQUENCES or ("group_id" in dump.columns and dump.groups < PROMPTS):
        few = f"too little to see a bug: that needs {SEQUENCES} sequences and {PROMPTS} prompts"
        ruling = Ruling(None, few)
    elif found.verdict != "cannot_tell":
        ruling = Ruling(True)
    elif not found.candidates:
        ruling = Ruling(None, "whether it is a bug could not be tested")
    elif any(one.kind == "bug" for one in found.candidates):
        ruling = Ruling(None, "whether it is a bug, this dump cannot tell: not all that fits is honest")
    else:
        ruling = Ruling(True, "which cause it is, this dump cannot tell", open=True)
    return _of_diagnosis(result, ruling, "no bug" if fails == "bug" else "neither bug nor cannot tell")


def _of_diagnosis(result: Result, ruling: Ruling, must: str) -> GateVerdict:
    """Build the verdict on a diagnosis, with what mends its first bug, or decides between what fits."""
    found, more = result.diagnosis, [""]
    if found:
        bug = next((one for one in found.causes if one.kind == "bug"), None)
        fits = ", ".join(one.id for one in found.candidates)
        decide = f"to decide, {found.decide[:1].lower()}{found.decide[1:]}" if found.decide else ""
        more = [f"{bug.id}: {bug.statement}", f"fix: {bug.fix}"] if bug else [fits or found.headline, decide]
    reason = joined(ruling.reason, *(one.rstrip(".") for one in more))
    return GateVerdict(name=DIAGNOSIS, must=must, **vars(replace(ruling, reason=reason)))


# ---------------------------------------------------------------- against an earlier result


def against(now: Result, base: Result, gates: Gates) -> Iterator[GateVerdict]:
    """Yield a verdict for each watched number that the baseline tells, and one on the diagnosis."""
    main = "" if find(base, Limit("k3")).value is not None else "total."
    names = [Limit(f"{pair}{name}") for pair in (main, "drift2.") for name in WATCHED_GAP]
    names += [Limit.of(f"{preset}.{name}") for preset in gates.presets for name in WATCHED_PRESET]
    for one in names:
        there = find(base, one)
        if not doubted(there) and (there.value is not None or one.preset not in ("", *base.presets)):
            yield _no_worse(find(now, one), there, one, gates.tolerance)
    if base.diagnosis:
        earlier, here = base.diagnosis.verdict, now.diagnosis
        passed = None if here is None else ORDER.index(here.verdict) <= ORDER.index(earlier)
        yield _of_diagnosis(now, Ruling(passed), f"no worse than {earlier.replace('_', ' ')} in the baseline")


def _no_worse(here: Number, there: Number, one: Limit, share: float) -> GateVerdict:
    """Judge the difference of a number from the baseline's, in the direction that is worse.

    The results count as independent runs: a comparison fails if the whole interval of the difference lies
    beyond the tolerance.
    """
    metric, limit = one.name.rpartition(".")[2], 0.0
    if here.value is None:
        ruling = Ruling(None, here.unknown or "it overflows")
    elif there.value is None:
        ruling = Ruling(None, f"the baseline: {there.unknown}")
    else:
        way = worse(metric)
        was = _badness(there, way)
        change = replace(difference(_badness(here, way), was), note=here.note, unit=here.unit)
        allowed = share * abs(was.value or 0.0)
        # what a tail hides is worse where it moves the number away from its target, or in its one direction
        above = way.sign != "away" or (here.interval is not None and here.interval[0] >= way.target)
        certain = above and HIDDEN.get(metric) == ("min" if way.sign == "lower" else "max")
        ruling = rule(change, "max", allowed, certain)
        if ruling.passed is not None:
            by, bound = format_number(replace(change, note=None)), format_value(allowed, here.unit)
            ruling = replace(ruling, reason=joined(f"worse by {by}, {bound} allowed", ruling.reason))
            limit = there.value + (-allowed if way.sign == "lower" else allowed)
            limit = abs(there.value - way.target) + allowed if way.sign == "away" else limit
    return GateVerdict(
        name=one.number,
        must=f"no worse than {format_value(there.value, there.unit)} by more than {100 * share:g}%",
        limit=finite(limit),
        number=replace(here, note=None),
        **vars(ruling),
    )


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
