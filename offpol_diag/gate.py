"""Numbers and the diagnosis against limits, or against an earlier result.

A limit is judged by the 95% interval of its number:

    whole interval within it             passed
    whole interval beyond it             failed
    limit inside the interval            passed, open: no evidence of a failure
    no interval                          the value alone; on the limit passes
    NaN, unknown, unreliable             could not say
    unreliable, but certainly beyond it  failed (see `TAIL_WORSENS`)

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
from offpol_diag.metrics import PAIRS, WATCHED_GAP, WATCHED_PRESET, Worse, metric
from offpol_diag.number import Number, finite
from offpol_diag.numerals import doubted, format_number, format_value
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
        preset, _, name = text.removeprefix(STEP).strip().rpartition(".")
        if not preset or f"{preset}." in PAIRS:
            name = f"{preset}.{logged_names('gap').get(name, name)}".lstrip(".")
            return cls(name, "", text.startswith(STEP), kind, value)
        with suppress(KeyError, OffpolError):  # a preset of a user's file is not in the catalogue
            preset = catalogue.load()[preset].name
        return cls(logged_names("preset").get(name, name), preset, text.startswith(STEP), kind, value)

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
        """All limits: upper bounds, then lower bounds."""
        highest = [Limit.of(name, "max", value) for name, value in self.max.items()]
        return highest + [Limit.of(name, "min", value) for name, value in self.min.items()]

    def to_compute(self, known: Catalogue) -> tuple[tuple[Preset, ...], tuple[str, ...]]:
        """Return the presets that the names need, and the numbers that are needed at each training step."""
        named = dict.fromkeys((*(one.preset for one in self.limits if one.preset), *self.presets))
        steps = dict.fromkeys(one.number for one in self.limits if one.step)
        return known.resolve([*named]) if named else (), tuple(steps)


def required(gates: Path | None = None, **options: Any) -> Gates:
    """Return what options ask for, and what a gate file does that they do not.

    Args:
        gates: the file; the path of its baseline is relative to it.
        **options: by the keys of `Gates`; limits as texts `k3=0.002`.

    Raises:
        UsageError: nothing is asked, or an option or the file is invalid.
    """
    filed: dict[str, Any] = {}
    if gates is not None:
        try:
            table = files.toml(files.read(gates, files.MOST_TOML).decode("utf-8-sig"))
            filed = Gates(**table).model_dump(exclude_unset=True)
        except (OSError, ValueError) as error:
            why = first_mistake(error) if isinstance(error, ValidationError) else error
            raise UsageError(f"{gates}: no gate file: {why}", "its form is that of docs/ci.md") from error
        if filed.get("baseline"):
            filed["baseline"] = gates.parent / filed["baseline"]
    asked = {key: value for key, value in options.items() if value or value == 0}
    for kind in ("max", "min"):
        pairs = [text.rpartition("=") for text in asked.get(kind, ())]
        limits = {name.strip(): limit.strip() for name, _, limit in pairs}
        asked[kind] = limits | {name: x for name, x in filed.get(kind, {}).items() if name not in limits}
    try:
        found = Gates(**filed | asked)
    except ValidationError as error:
        hint = "docs/ci.md has the form: --max k3=0.002, --fail-on bug"
        raise UsageError(f"--{first_mistake(error)}", hint) from error
    if not (found.limits or found.fail_on or found.baseline):
        example = "say what must hold: --fail-on bug, --max k3=0.002 --min ess_tokens=0.5, "
        raise UsageError("no bound is given", f"{example}--gates FILE.toml or --baseline RESULT.json")
    return found


# ---------------------------------------------------------------- one number

TAIL_WORSENS: Mapping[str, Kind] = {
    "mean_ratio": "max",
    "chi2_token": "max",
    "chi2_sequence": "max",
    "ess_tokens": "min",
    "ess_sequences": "min",
}
"""Number → the kind of limit that it certainly breaks if its whole interval lies beyond it, however heavy the
tail of the weights: a sample misses the rarest, largest weights, which would make a mean of r or r² larger
and the effective sample size smaller."""
OPEN = "the 95% interval holds values on both sides of the bound"


@dataclass(frozen=True)
class Judgment:
    """Whether a bound holds; `passed` is None where it cannot be judged, `open` a pass without evidence."""

    passed: bool | None
    reason: str = ""
    open: bool = False

    @property
    def rank(self) -> int:
        """0 where it failed, 1 where it could not be judged, 2 where it is open, 3 where it passed."""
        return {False: 0, None: 1, True: 2 if self.open else 3}[self.passed]


def judge(number: Number, kind: Kind, limit: float, certain: bool = False) -> Judgment:
    """Judge a number; one that is unreliable fails only where it is `certain` that it lies farther beyond."""
    value = math.inf if number.value is None else number.value
    ends = number.interval or (value, value)
    if not number.known or any(map(math.isnan, (value, *ends))):
        return Judgment(None, number.unknown or "it is not a number")
    within = [x <= limit if kind == "max" else x >= limit for x in ends]
    note, beyond = number.note or "", not any(within)
    if doubted(number):
        if not (certain and beyond and number.interval):
            return Judgment(None, note)
        note += ", but what a heavy tail hides lies farther beyond the bound"
    if not number.interval:
        return Judgment(not beyond, joined("no interval", note))
    if beyond:
        return Judgment(False, joined("the whole 95% interval lies beyond it", note))
    return Judgment(True, note) if all(within) else Judgment(True, joined(OPEN, note), open=True)


def joined(*parts: str) -> str:
    """Join the non-empty parts of a reason."""
    return "; ".join(filter(None, parts))


def find(result: Result, limit: Limit) -> Number:
    """Return a number of the whole dump; one that is unknown says why."""
    numbers = result.preset(limit.preset) if limit.preset else result.whole
    if limit.name in numbers:
        return numbers[limit.name]
    if limit.preset in result.presets and (needs := result.presets[limit.preset].needs):
        return Number(unknown=f"{limit.preset} needs {', '.join(needs)}, which the dump lacks")
    known = [*result.whole, *(f"{key}.{name}" for key in result.presets for name in result.preset(key))]
    hint = did_you_mean(limit.number, known)
    return Number(unknown=joined(f'no number "{limit.number}" in this result', hint))


def find_by_step(result: Result, limit: Limit) -> tuple[list[tuple[str, Number]], str]:
    """Return the number at each step, marked unreliable if that of the whole dump is; and what is missing.

    Numbers of a pair of policies are by step those of the main pair, without its prefix.
    """
    whole, main, places, rows = find(result, limit), result.prefix, at_steps(result), []
    names = [limit.name, limit.name.removeprefix(main)] if limit.preset or limit.name.startswith(main) else []
    for place in places:
        of_preset = result.of(place_of("step", place.key, f"preset/{limit.preset}"))
        numbers = of_preset if limit.preset else place.numbers
        number = next((numbers[name] for name in names if name in numbers), None)
        if number is not None:
            rows.append((place.key, replace(number, note=whole.note if doubted(whole) else number.note)))
    if not places:
        return [], "no row of this dump has a step"
    every = len(places) + result.axes["step"].left_out
    if len(rows) == every:
        return rows, ""
    if not rows and whole.unknown:
        return rows, whole.unknown
    return rows, f"only {len(rows)} of {every} steps are in this result; gate the dump itself"


def judge_limit(result: Result, limit: Limit) -> GateVerdict:
    """Judge a number, or that of every step by the worst one; one failed step is enough to fail."""
    rows, missing = find_by_step(result, limit) if limit.step else ([("", find(result, limit))], "")
    certain = TAIL_WORSENS.get(limit.name.rpartition(".")[2]) == limit.kind
    if limit.name.endswith(DIFFER):
        rows = [(step, replace(number, interval=None)) for step, number in rows]
    each = [(judge(number, limit.kind, limit.value, certain), step, number) for step, number in rows]
    if missing and all(judgment.passed is not False for judgment, *_ in each):
        each = [(Judgment(None, missing), "", Number())]

    def severity(row: tuple[Judgment, str, Number]) -> tuple[int, float]:
        size = math.inf if row[2].value is None else row[2].value
        return row[0].rank, -size if limit.kind == "max" else size

    judgment, step, number = min(each, key=severity)
    alike = sum(other.rank == judgment.rank for other, *_ in each)
    words = ("fail", "cannot be judged", "are open", "")[judgment.rank]
    steps = f"{alike} of {len(rows)} steps {words}" if step and words else ""
    return GateVerdict(
        name=f"{STEP * limit.step}{limit.number}",
        must=f"{'≤' if limit.kind == 'max' else '≥'} {format_value(limit.value, number.unit, digits=12)}",
        limit=limit.value,
        number=replace(number, note=None),
        where=f"step {step}" if step else "",
        **vars(replace(judgment, reason=joined(judgment.reason, steps))),
    )


def judged(now: Result, gates: Gates, base: Result | None = None) -> list[GateVerdict]:
    """Return all verdicts on the result `now`; `base` is the earlier result."""
    return [
        *([judge_diagnosis(now, gates.fail_on)] if gates.fail_on else []),
        *(judge_limit(now, limit) for limit in gates.limits),
        *(against(now, base, gates) if base else ()),
    ]


def outcome(verdicts: Iterable[GateVerdict]) -> Outcome:
    """Combine verdicts: any failure fails; else, if one was not judged or there is none, "could not say"."""
    passed = [verdict.passed for verdict in verdicts]
    return "failed" if False in passed else "could not say" if None in passed or not passed else "passed"


SEQUENCES, PROMPTS = 16, 4
"""Fewest sequences, and prompts where the dump has group_id, for "no bug" to count as evidence."""


def judge_diagnosis(result: Result, fails: DiagnosisVerdict) -> GateVerdict:
    """Judge the diagnosis (`docs/ci.md` has the table).

    Several causes that fit pass as open, unless `cannot_tell` fails or one of them is a bug.
    """
    found, dump = result.diagnosis, result.dump
    if found is None:
        judgment = Judgment(None, "this result holds no diagnosis")
    elif ORDER.index(found.verdict) >= ORDER.index(fails):
        judgment = Judgment(False)
    elif dump.sequences < SEQUENCES or ("group_id" in dump.columns and dump.groups < PROMPTS):
        few = f"too little to see a bug: that needs {SEQUENCES} sequences and {PROMPTS} prompts"
        judgment = Judgment(None, few)
    elif found.verdict != "cannot_tell":
        judgment = Judgment(True)
    elif not found.candidates or any(one.kind == "bug" for one in found.candidates):
        judgment = Judgment(None, "this dump cannot tell whether it is a bug")
    else:
        judgment = Judgment(True, "this dump cannot tell which cause it is", open=True)
    return on_diagnosis(result, judgment, "no bug" if fails == "bug" else "neither bug nor cannot tell")


def on_diagnosis(result: Result, judgment: Judgment, must: str) -> GateVerdict:
    """Build the verdict on a diagnosis, with what mends its first bug, or decides between what fits."""
    found, reason = result.diagnosis, judgment.reason
    if found:
        bug = next((one for one in found.causes if one.kind == "bug"), None)
        fits = ", ".join(one.id for one in found.candidates) or found.headline
        decide = f"to decide, {found.decide[:1].lower()}{found.decide[1:]}" if found.decide else ""
        more = [f"{bug.id}: {bug.statement}", f"fix: {bug.fix}"] if bug else [fits, decide]
        reason = joined(reason, *(sentence.rstrip(".") for sentence in more))
    return GateVerdict(name=DIAGNOSIS, must=must, **vars(replace(judgment, reason=reason)))


# ---------------------------------------------------------------- against an earlier result


def against(now: Result, base: Result, gates: Gates) -> Iterator[GateVerdict]:
    """Yield a verdict for each watched number that the baseline tells, and one on the diagnosis."""
    main = "" if find(base, Limit("k3")).value is not None else "total."
    names = [Limit(f"{pair}{name}") for pair in (main, "drift2.") for name in WATCHED_GAP]
    names += [Limit.of(f"{preset}.{name}") for preset in gates.presets for name in WATCHED_PRESET]
    for one in names:
        there = find(base, one)
        if not doubted(there) and (there.value is not None or one.preset not in ("", *base.presets)):
            yield judge_change(find(now, one), there, one, gates.tolerance)
    if base.diagnosis:
        earlier, here = base.diagnosis.verdict, now.diagnosis
        passed = None if here is None else ORDER.index(here.verdict) <= ORDER.index(earlier)
        yield on_diagnosis(
            now, Judgment(passed), f"no worse than {earlier.replace('_', ' ')} in the baseline"
        )


def judge_change(here: Number, there: Number, of: Limit, share: float) -> GateVerdict:
    """Judge by how much a number is worse than the baseline's.

    The results count as independent runs: it fails if the whole interval of the difference lies beyond the
    tolerance, a `share` of the baseline's value or of its distance from the target.
    """
    name, limit = of.name.rpartition(".")[2], 0.0
    if here.value is None:
        judgment = Judgment(None, here.unknown or "it overflows")
    elif there.value is None:
        judgment = Judgment(None, f"the baseline: {there.unknown}")
    else:
        way = metric(name).worse
        was = higher_is_worse(there, way)
        change = replace(difference(higher_is_worse(here, way), was), note=here.note, unit=here.unit)
        allowed = share * abs(was.value or 0.0)
        # what a tail hides is worse where it moves the number away from its target, or in its one direction
        above = way.sign != "away" or (here.interval is not None and here.interval[0] >= way.target)
        certain = above and TAIL_WORSENS.get(name) == ("min" if way.sign == "lower" else "max")
        judgment = judge(change, "max", allowed, certain)
        if judgment.passed is not None:
            by, most = format_number(replace(change, note=None)), format_value(allowed, here.unit)
            reason = joined(f"worse by {by}, {most} allowed", judgment.reason)
            judgment = replace(judgment, reason=reason)
            limit = there.value + (-allowed if way.sign == "lower" else allowed)
            limit = abs(there.value - way.target) + allowed if way.sign == "away" else limit
    return GateVerdict(
        name=of.number,
        must=f"no worse than {format_value(there.value, there.unit)} by more than {100 * share:g}%",
        limit=finite(limit),
        number=replace(here, note=None),
        **vars(judgment),
    )


def higher_is_worse(number: Number, way: Worse) -> Number:
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
