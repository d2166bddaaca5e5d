"""Comparisons: presets with a reference preset on one dump, and runs with the first of them.

What is compared is compared within each bootstrap replicate: what two presets, or two runs on the same
prompts, have in common cancels there. Tests of runs are corrected for their number (Holm), over all runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_uppercase

import numpy as np

from offpol_diag.core import gap, kept_rows, preset_numbers, tails
from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import DRIFTS
from offpol_diag.core.intervals import (
    LEVEL,
    ROUNDING,
    Formula,
    Groups,
    compared,
    holm,
    less,
    over,
    p_value,
    subtracted,
    sure,
)
from offpol_diag.core.observe import Examined
from offpol_diag.core.state import COUNTED, Array, State
from offpol_diag.core.study import Readout, Study
from offpol_diag.errors import UsageError
from offpol_diag.metrics import FIRST_GAP, Better, better
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import FRACTIONS, count, counted, doubted, minus, written
from offpol_diag.presets import Preset
from offpol_diag.result import Against, Comparison, Contrast, Result, idle

# ---------------------------------------------------------------- presets


def reference(columns: Mapping[str, str], presets: Sequence[Preset], against: Preset | None) -> str:
    """Return the preset that others are compared with: the one named, else the first that can be computed.

    Raises:
        UsageError: it needs a column that the dump lacks, or each of them does.
    """
    have = set(Study.of(columns).columns)
    asked = presets if against is None else [against]
    able = [preset.name for preset in asked if not preset.lacking(have)]
    if not able:
        needed = dict.fromkeys(column for preset in asked for column in preset.lacking(have))
        names = ", ".join(preset.name for preset in asked)
        missing = f"the dump has no {' and no '.join(needed)}, which {names} cannot do without"
        raise UsageError(missing, "name the column with --columns, or compare other presets")
    return able[0]


@np.errstate(all="ignore")
def of_presets(found: Examined, summary: Result, against: str) -> Comparison:
    """Compare the presets of a study with the preset `against`; `summary` holds their numbers."""
    out, study = Readout(found.study, found.state), found.study
    groups = out.reader.groups
    drawn = {preset.name: of_preset(out, preset) for preset in study.presets}
    numbers = {name: summary.preset(name) for name in drawn}
    acting = {name: row for name, row in numbers.items() if not idle(row)}
    text = f"less that of {against}, within each replicate"
    return Comparison(
        against=against,
        differences={
            name: {
                metric: difference(
                    one,
                    numbers[against][metric],
                    drawn[name].get(metric),
                    drawn[against].get(metric),
                    groups,
                    text,
                )
                for metric, one in row.items()
                if metric in numbers[against]
            }
            for name, row in numbers.items()
            if name != against
        },
        better={
            metric: leader(
                {name: row.get(metric, Number()) for name, row in acting.items()},
                {name: drawn[name][metric] for name in acting if metric in drawn[name]},
                better(metric),
                groups,
            )
            for metric in dict.fromkeys(metric for row in numbers.values() for metric in row)
        },
        **(kept_rows.dropped(found.state, study.seed, study.pairs) if study.pairs else {}),
    )


def of_preset(out: Readout, preset: Preset) -> dict[str, Array]:
    """Return one preset's numbers that have an interval, with their replicates, [1+B], by name."""
    prefix = f"{preset.name}|"
    losses = preset_numbers.LOSSES if f"{prefix}loss" in out.reader.drawn else ()
    column = partial(out.reader.column, prefix=prefix)
    return {row.name: row.of(column) for row in (*preset_numbers.ROWS, *losses)}


def difference(
    one: Number, other: Number, mine: Array | None, theirs: Array | None, groups: Groups, text: str
) -> Number:
    """Return `one` − `other`: within each replicate if both have replicates [1+B], else of the values."""
    if mine is not None and theirs is not None:
        return less(mine, theirs, one, groups, text)
    blank = Number(unit=one.unit, over=one.over, formula=text)
    if one.value is None or other.value is None:
        return replace(blank, unknown=one.unknown or other.unknown or "not known")
    return replace(blank, value=one.value - other.value)


def leader(
    numbers: Mapping[str, Number], drawn: Mapping[str, Array], direction: Better, groups: Groups
) -> str:
    """Return the preset whose number is surely the best, or a dash.

    The interval of its difference from the second best must exclude 0. For a number without replicates (the
    largest weight) the values decide.
    """
    values = {name: number.value for name, number in numbers.items() if number.value is not None}
    if direction == "neither" or len(values) < max(2, len(numbers)):
        return "–"
    first, second = sorted(values, key=lambda name: values[name], reverse=direction == "higher")[:2]
    leads = values[first] != values[second]
    if first in drawn and second in drawn:
        leads = leads and sure(less(drawn[first], drawn[second], numbers[first], groups, ""))
    return first if leads else "–"


# ---------------------------------------------------------------- runs

KEPT = ("dump", "run", "axes", "presets", "diagnosis")
"""What of a further run is kept beside its numbers."""
POWERS = frozenset(row.name for row in gap.ROWS if row.log)
"""Numbers that are e to the power of a mean, without the prefix of their drift."""
UNTESTED = "not tested: an extreme, a quantile, a tail index, a reward, or whether anything differs at all"
FEW = 0.2
"""Shares up to this are compared by their ratio; larger ones by percentage points."""


@dataclass(frozen=True)
class Side:
    """The numbers of one run and their bootstrap replicates, by full name (`k3`, `token_is.ess_tokens`)."""

    numbers: Numbers
    drawn: dict[str, Array]
    groups: Groups

    @classmethod
    def of(cls, found: Examined, summary: Result) -> Side:
        """Collect the numbers of the dump's policy gaps and of the study's presets.

        Of the gaps those of size have replicates: not whether any token differs, nor a sum that overflows.
        """
        out = Readout(found.study, found.state)
        there = {drift.prefix for drift in found.study.drifts}
        numbers = {name: number for name, number in summary.whole.items() if _drift(name) in there}
        drawn = dict[str, Array]()
        for prefix in there:
            rows: list[Formula] = [row for row in gap.ROWS if row is not gap.DIFFER]
            rows += [tails.ESS_TOKENS, tails.ESS_SEQUENCES]
            rows += [gap.SURROGATE] if f"{prefix}ax" in out.reader.drawn else []
            rows += [gap.CHI2_SEQUENCE] if out.state.ranges[f"{prefix}s"][1] <= LARGEST else []
            column = partial(out.reader.column, prefix=prefix)
            drawn |= {prefix + row.name: row.of(column) for row in rows}
        for preset in found.study.presets:
            metrics = summary.preset(preset.name)
            numbers |= {f"{preset.name}.{name}": number for name, number in metrics.items()}
            drawn |= {f"{preset.name}.{name}": values for name, values in of_preset(out, preset).items()}
        return cls(numbers, drawn, out.reader.groups)


def _drift(name: str) -> str:
    """Return the prefix of the policy gap that a metric belongs to."""
    return next((drift.prefix for drift in DRIFTS[1:] if name.startswith(drift.prefix)), DRIFTS[0].prefix)


@np.errstate(all="ignore")
def of_runs(runs: Sequence[Examined], results: Sequence[Result]) -> list[Against]:
    """Compare every further run with the first, A; `results` are those of the runs, in the same order.

    Raises:
        UsageError: a dump has no pair of policies in common with the first.
    """
    if len(runs) > len(ascii_uppercase):
        hint = "--as-one reads them as the parts of one dump; a folder or a quoted glob is one run"
        raise UsageError(f"{len(runs)} runs: at most {len(ascii_uppercase)} are compared", hint)
    a, mine, found = runs[0], Side.of(runs[0], results[0]), list[tuple[Groups, list[Contrast]]]()
    letters = ascii_uppercase[1 : len(runs)]
    for letter, run, result in zip(letters, runs[1:], results[1:], strict=True):
        if not {*a.study.drifts} & {*run.study.drifts}:
            what = f"A and {letter} have no pair of policies in common, so nothing can be compared"
            raise UsageError(what, "write the same policies into both dumps")
        theirs = Side.of(run, result)
        groups = mine.groups.fewer(theirs.groups)
        both = [name for name in mine.numbers if name in theirs.numbers]
        found.append((groups, [_contrast(name, mine, theirs, groups, letter) for name in both]))
    corrected = iter(holm([one.p_value for _, some in found for one in some if one.p_value is not None]))
    against = []
    for letter, run, result, (groups, some) in zip(letters, runs[1:], results[1:], found, strict=True):
        prefix, done = next(one.prefix for one in a.study.drifts if one in run.study.drifts), list[Contrast]()
        for one in some:
            p = None if one.p_value is None else next(corrected)
            differs = None if p is None else p < LEVEL
            done.append(one._replace(p_adjusted=p, differs=differs, effect=effect(one)))
        tested = [one for one in done if one.differs is not None]
        differing = sum(one.differs is True for one in tested)
        said = f"{differing} of {len(tested)} metrics differ after correction."
        said = said if differing else f"No difference is established: {said}"
        few = f"Cannot say: {groups.many} groups (prompts) are too few for intervals."
        same = len({*a.facts.files} & {*run.facts.files})
        shared = f"A and {letter} share {counted(same, 'file')}: those rows are compared with themselves."
        against.append(
            Against(
                letter=letter,
                run=Result(subjects=result.subjects, **{name: getattr(result, name) for name in KEPT}),
                headline=said if tested else few,
                pairing=pairing(a, run, letter),
                correction="Holm",
                level=LEVEL,
                tested=len(tested),
                differing=differing,
                contrasts=sorted(done, key=lambda one, prefix=prefix: rank(one, prefix)),  # type: ignore[misc]
                needs=_absent(a, run, letter),
                notes=[shared] if same else [],
            )
        )
    return against


def _contrast(name: str, mine: Side, theirs: Side, groups: Groups, letter: str) -> Contrast:
    """Compare one number of both runs; the p-value is not yet corrected for the number of tests."""
    a, b, one, other = mine.numbers[name], theirs.numbers[name], mine.drawn.get(name), theirs.drawn.get(name)
    gap = difference(b, a, other, one, groups, f"{letter} less A, within each replicate")
    if one is None or other is None:
        reason = a.unknown or b.unknown or UNTESTED
        return Contrast(
            name=name, a=a, b=b, difference=replace(gap, formula=f"{letter} less A"), reason=reason
        )
    powers = name.removeprefix(_drift(name)) in POWERS
    ratio = over(other, one, groups, f"{letter} over A, within each replicate", powers)
    p, reason = None, ""
    if not groups.enough:
        reason = "too few groups, or some that hold most tokens"
    elif doubted(a) or doubted(b):
        reason = "unreliable: the tail of the weights is too heavy"
    else:
        p = p_value(subtracted(other, one) if ratio is None else compared(other, one), groups)
        reason = "" if p is not None else a.unknown or b.unknown or "undefined in too many replicates"
    return Contrast(name=name, a=a, b=b, difference=gap, ratio=ratio, p_value=p, reason=reason)


def rank(contrast: Contrast, prefix: str) -> tuple[int, int, bool, float]:
    """Return the sort key: significant differences first; then `FIRST_GAP`, other metrics, presets.

    Ties go by relative size |B − A| / (|A| + |B|), rounded so that devices do not differ.
    """
    judged = {True: 0, False: 1, None: 2}[contrast.differs]
    name = contrast.name.removeprefix(prefix)
    first = FIRST_GAP.index(name) if name in FIRST_GAP else len(FIRST_GAP)
    a, b = contrast.a.value, contrast.b.value
    size = 0.0 if a is None or b is None or _equal(a, b) else abs(b - a) / (abs(a) + abs(b))
    return judged, first, _drift(contrast.name) == "" and "." in contrast.name, -float(f"{size:.9g}")


def effect(contrast: Contrast) -> str:
    """Return the size of a difference as text: B over A, `2.3x [1.9, 2.8]`, or B less A, `0.3 [0.1, 0.5]`."""
    a, b, ratio = contrast.a.value, contrast.b.value, contrast.ratio
    if a is None or b is None:
        return ""
    if _equal(a, b):
        return "equal"
    large = contrast.b.unit in FRACTIONS and max(a, b) > FEW
    if ratio is None or ratio.value is None or large:
        return minus(" ".join(filter(None, written(replace(contrast.difference, note=None)))))
    value, interval = written(replace(ratio, note=None))
    return " ".join(filter(None, (f"{value}x", interval)))


def _equal(a: float, b: float) -> bool:
    """Return whether two numbers differ by rounding at most, as two passes on a GPU do."""
    return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=0.0)


def pairing(a: Examined, b: Examined, letter: str) -> str:
    """Say how many groups both runs have; the bootstrap resamples these together."""
    one, other = a.state, b.state
    shared = shared_groups(one, other)
    only_a, only_b = max(one.many - shared, 0), max(other.many - shared, 0)
    grouped = all("group_id" in run.facts.columns for run in (a, b))
    what = "prompts (group_id)" if grouped else "responses"
    if not shared:
        return f"Independent: no {what} are in both, and each run is resampled by itself."
    about = "" if one.counted and other.counted else "about "
    return (
        f"Paired: {about}{count(shared)} {what} are in both runs and are resampled together; "
        f"{about}{count(only_a)} are only in A and {about}{count(only_b)} only in {letter}."
    )


def shared_groups(one: State, other: State) -> int:
    """Count shared groups: exactly if all are counted, else estimated from the smallest hashes of both."""
    mine, theirs = (run.groups[:COUNTED] for run in (one, other))
    ends = [run.groups[COUNTED - 1] for run in (one, other) if not run.counted]
    if not ends:
        return len(np.intersect1d(mine, theirs))
    mine, theirs = (groups[groups <= min(ends)] for groups in (mine, theirs))
    return round(len(np.intersect1d(mine, theirs)) * one.many / max(len(mine), 1))


def _absent(a: Examined, b: Examined, letter: str) -> dict[str, str]:
    """Return policy gap or preset that only one run has, or that was asked for in vain → who has it."""
    mine, theirs = (
        {*(drift.title for drift in run.study.drifts), *(preset.name for preset in run.study.presets)}
        for run in (a, b)
    )
    asked = [
        *(drift.title for drift in DRIFTS if drift.title in mine | theirs),
        *(one.name for one in a.presets),
    ]
    alone = [name for name in asked if not (name in mine and name in theirs)]
    return {
        name: "only in A" if name in mine else f"only in {letter}" if name in theirs else "in neither"
        for name in alone
    }
