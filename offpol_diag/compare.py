"""Comparisons: presets with a reference preset on one dump, and runs with the first of them.

What is compared is compared within each bootstrap replicate: what two presets, or two runs on the same
prompts, have in common cancels there. Tests of runs are corrected for their number (Holm), over all runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from string import ascii_uppercase
from typing import Literal

import numpy as np

from offpol_diag.core import gap, kept_rows, preset_numbers, tails
from offpol_diag.core.formulas import LARGEST
from offpol_diag.core.gap import DIFFER, DRIFTS
from offpol_diag.core.intervals import (
    FEWEST_GROUPS,
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
from offpol_diag.numerals import FRACTIONS, count, doubted, say, written
from offpol_diag.presets import Preset
from offpol_diag.result import Against, Comparison, Contrast, Pairing, Result, idle

# ---------------------------------------------------------------- presets

MOST_NAMED = 3
"""Most presets that a hint names."""


def reference(
    known: Mapping[str, Preset], columns: Mapping[str, str], presets: Sequence[Preset], against: Preset | None
) -> str:
    """Return the preset that others are compared with: the one named, else the first that can be computed.

    Args:
        known: the catalogue.
        columns: the columns of the dump, by our names.
        presets: those that are compared, in the user's order.
        against: the one that the user named, or None.

    Raises:
        UsageError: it needs a column that the dump lacks, or each of them does.
    """
    have = set(Study.of(columns).columns)
    lacks = {preset.name: preset.lacking(have) for preset in presets}
    if against is not None and lacks[against.name]:
        missing = " and no ".join(lacks[against.name])
        hint = "compare with a preset that can be computed"
        raise UsageError(f"--against {against.name}: the dump has no {missing}", hint)
    if able := [name for name, needs in lacks.items() if not needs]:
        return against.name if against else able[0]
    needed = dict.fromkeys(column for names in lacks.values() for column in names)
    able = [name for name, preset in known.items() if not preset.lacking(columns)][:MOST_NAMED]
    ways = [f"try --presets {','.join(able)}"] if able else []
    if "old_log_probs" in needed and (current := columns.get("current_log_probs")):
        ways.insert(0, f"read the policy there is as the old one with --columns old={current}")
    raise UsageError(
        f"the dump has no {' and no '.join(needed)}, which {', '.join(lacks)} cannot do without",
        ", or ".join(ways) or f"name {'it' if len(needed) == 1 else 'them'} with --columns",
    )


@np.errstate(all="ignore")
def of_presets(found: Examined, summary: Result, against: str) -> Comparison:
    """Compare the presets of a study with the preset `against`; `summary` holds their numbers."""
    out = Readout(found.study, found.state)
    drawn = {preset.name: of_preset(out, preset) for preset in found.study.presets}
    numbers = {name: summary.preset(name) for name in drawn}
    groups = out.reader.groups
    text = f"less that of {against}, within each replicate"
    differences = {
        name: {
            metric: difference(
                [numbers[one][metric] for one in (name, against)],
                [drawn[one][metric] for one in (name, against) if metric in drawn[one]],
                groups,
                text,
            )
            for metric in numbers[name]
            if metric in numbers[against]
        }
        for name in drawn
        if name != against
    }
    metrics = dict.fromkeys(metric for row in numbers.values() for metric in row)
    acting = {name: row for name, row in numbers.items() if not idle(row)}
    leaders = {
        metric: leader(
            {name: row.get(metric, Number()) for name, row in acting.items()},
            {name: row[metric] for name, row in drawn.items() if metric in row and name in acting},
            better(metric),
            groups,
        )
        for metric in metrics
    }
    study, state = found.study, found.state
    return Comparison(
        against=against,
        differences=differences,
        better=leaders,
        **(kept_rows.dropped(state, study.seed, study.pairs) if study.pairs else {}),
    )


def of_preset(out: Readout, preset: Preset) -> dict[str, Array]:
    """Return one preset's numbers that have an interval, with their replicates, [1+B], by name."""
    prefix = f"{preset.name}|"
    rows: list[Formula] = [*preset_numbers.ROWS]
    if f"{prefix}loss" in out.reader.drawn:
        rows += preset_numbers.LOSSES
    return {row.name: row.of(partial(out.reader.column, prefix=prefix)) for row in rows}


def difference(both: Sequence[Number], drawn: Sequence[Array], groups: Groups, text: str) -> Number:
    """Return the difference of two numbers: within each replicate if both have replicates, else of values.

    Args:
        both: the two numbers; the second is subtracted.
        drawn: the value and replicates [1+B] of each number that has them.
        groups: the groups that were resampled.
        text: the formula of the difference.
    """
    one, other = both
    if len(drawn) == 2:
        return less(drawn[0], drawn[1], one, groups, text)
    blank = Number(unit=one.unit, over=one.over, formula=text)
    if one.value is None or other.value is None:
        return replace(blank, unknown=one.unknown or other.unknown or "not known")
    return replace(blank, value=one.value - other.value)


def leader(
    numbers: Mapping[str, Number], drawn: Mapping[str, Array], direction: Better, groups: Groups
) -> str:
    """Return the preset with the best number, or a word saying why none is named.

    Presets that change nothing on this dump are not among them: weights of 1 have the best ESS of all.

    It is named if the interval of its difference from the second best excludes 0. For a number without
    replicates (the largest weight) the values decide.
    """
    if direction == "neither" or len(numbers) < 2:
        return "–"
    values = {name: number.value for name, number in numbers.items() if number.value is not None}
    if len(values) < len(numbers):
        return "unknown"
    sign = 1 if direction == "higher" else -1
    first, second = sorted(values, key=lambda name: sign * values[name], reverse=True)[:2]
    if values[first] == values[second]:
        return "equal"
    if first not in drawn or second not in drawn:
        return first
    return first if sure(less(drawn[first], drawn[second], numbers[first], groups, "")) else "undecided"


# ---------------------------------------------------------------- runs

CORRECTION = "Holm"
KEPT = ("dump", "run", "axes", "presets", "histograms", "diagnosis")
"""What of a further run is kept beside its numbers."""
EXTREME = "an extreme, a quantile or a tail index: it has no interval"
POWERS = frozenset(row.name for row in gap.ROWS if row.log)
"""Numbers that are e to the power of a mean, without the prefix of their drift."""
UNTESTED = "no metric of the mismatch: it is not tested"
NO_SIZE = "it says whether policies differ, not by how much: it is not tested"
SAME = 1e-12
"""Difference up to which two shares are one number."""
ENOUGH = 0.5
"""Share of the smaller run's groups that both runs must have to be called paired."""
FEW = 0.2
"""Shares up to this are compared by their ratio; larger ones by percentage points."""
NEAR = 1.1
"""Ratios between 1/1.1 and 1.1 are written in per cent."""


@np.errstate(all="ignore")
def of_runs(runs: Sequence[Examined], results: Sequence[Result]) -> list[Against]:
    """Compare every further run with the first, A; `results` are those of the runs, in the same order.

    Raises:
        UsageError: a dump has no pair of policies in common with the first.
    """
    mine, found = Side.of(runs[0], results[0]), list[tuple[str, Groups, list[Contrast]]]()
    for letter, run, result in zip(ascii_uppercase[1:], runs[1:], results[1:], strict=False):
        prefix = next((one.prefix for one in runs[0].study.drifts if one in run.study.drifts), None)
        if prefix is None:
            has = [
                ", ".join(sorted(c for c in x.study.columns if c.endswith("_log_probs")))
                for x in (runs[0], run)
            ]
            raise UsageError(
                f"A has {has[0]} and {letter} has {has[1]}: no pair of policies is in both, so nothing "
                "can be compared",
                "write the same policies into both dumps",
            )
        theirs = Side.of(run, result)
        groups = mine.groups.fewer(theirs.groups)
        both = [name for name in mine.numbers if name in theirs.numbers and not _repeats(name, mine, theirs)]
        found.append((prefix, groups, [_contrast(name, mine, theirs, groups, letter) for name in both]))
    corrected = iter(holm([one.p_value for *_, some in found for one in some if one.p_value is not None]))
    return [
        _against(letter, runs[0], run, result, *one, corrected)
        for letter, run, result, one in zip(ascii_uppercase[1:], runs[1:], results[1:], found, strict=False)
    ]


def _against(
    letter: str,
    a: Examined,
    b: Examined,
    result: Result,
    prefix: str,
    groups: Groups,
    contrasts: Sequence[Contrast],
    corrected: Iterator[float],
) -> Against:
    """Return what one run's numbers are beside A's, the most important first."""
    judged = []
    for contrast in contrasts:
        p = None if contrast.p_value is None else next(corrected)
        done = contrast._replace(p_adjusted=p, differs=None if p is None else p < LEVEL)
        judged.append(done._replace(effect=effect(done)))
    ordered = sorted(judged, key=lambda contrast: rank(contrast, prefix))
    tested = [contrast for contrast in ordered if contrast.differs is not None]
    differing = [contrast for contrast in tested if contrast.differs]
    same = len(set(a.facts.files) & set(b.facts.files))
    files = "a file" if same == 1 else f"{same} files"
    return Against(
        letter=letter,
        run=Result(numbers=result.numbers, **{name: getattr(result, name) for name in KEPT}),
        headline=_headline(tested, differing, prefix, groups, letter),
        pairing=pairing(a, b, letter),
        correction=CORRECTION,
        level=LEVEL,
        tested=len(tested),
        differing=len(differing),
        contrasts=ordered,
        needs=_needs(a, b, letter),
        notes=[f"A and {letter} share {files}: those rows are compared with themselves."] if same else [],
    )


# ---------------------------------------------------------------- one number


@dataclass(frozen=True)
class Side:
    """The numbers of one run and their bootstrap replicates, by full name (`k3`, `token_is.ess_tokens`)."""

    numbers: Numbers
    drawn: dict[str, Array]
    groups: Groups

    @classmethod
    def of(cls, found: Examined, summary: Result) -> Side:
        """Collect the metrics of the dump's policy gaps and of the study's presets."""
        out = Readout(found.study, found.state)
        there = {drift.prefix for drift in found.study.drifts}
        numbers = {name: number for name, number in summary.whole.items() if _drift(name) in there}
        drawn = _of_dump(out)
        for preset in found.study.presets:
            metrics = summary.preset(preset.name)
            numbers |= {f"{preset.name}.{name}": number for name, number in metrics.items()}
            drawn |= {f"{preset.name}.{name}": values for name, values in of_preset(out, preset).items()}
        return cls(numbers, drawn, out.reader.groups)


def _of_dump(out: Readout) -> dict[str, Array]:
    """Return the gaps' numbers of size that have an interval, with their replicates, [1+B], by name."""
    result: dict[str, Array] = {}
    for drift in out.study.drifts:
        rows: list[Formula] = [row for row in gap.ROWS if row is not gap.DIFFER]
        rows += [tails.ESS_TOKENS, tails.ESS_SEQUENCES]
        if f"{drift.prefix}ax" in out.reader.drawn:
            rows.append(gap.SURROGATE)
        if out.state.ranges[f"{drift.prefix}s"][1] <= LARGEST:  # else too large for sums
            rows.append(gap.CHI2_SEQUENCE)
        column = partial(out.reader.column, prefix=drift.prefix)
        result |= {drift.prefix + row.name: row.of(column) for row in rows}
    return result


def _drift(name: str) -> str:
    """Return the prefix of the policy gap that a metric belongs to."""
    return next((drift.prefix for drift in DRIFTS[1:] if name.startswith(drift.prefix)), DRIFTS[0].prefix)


def _repeats(name: str, *sides: Side) -> bool:
    """Return whether a share of tokens with a weight is the share not rejected, as where no weight is 0.

    A second test of one number would make all others less significant.
    """
    preset, _, metric = name.rpartition(".")
    if metric != "tokens_weighted":
        return False
    pairs = ((one.numbers[name].value, one.numbers[f"{preset}.tokens_rejected"].value) for one in sides)
    return all(w is not None and r is not None and abs(w + r - 1) < SAME for w, r in pairs)


def _contrast(name: str, mine: Side, theirs: Side, groups: Groups, letter: str) -> Contrast:
    """Compare one number of both runs; the p-value is not yet corrected for the number of tests."""
    a, b = mine.numbers[name], theirs.numbers[name]
    if name not in mine.drawn or name not in theirs.drawn:
        counted = name == _drift(name) + DIFFER.name
        untested = EXTREME if a.interval is None else NO_SIZE if counted else UNTESTED
        reason = a.unknown or b.unknown or untested
        plain = difference((b, a), (), groups, f"{letter} less A")
        return Contrast(name=name, a=a, b=b, difference=plain, reason=reason)
    one, other = mine.drawn[name], theirs.drawn[name]
    gap = difference((b, a), (other, one), groups, f"{letter} less A, within each replicate")
    powers = name.removeprefix(_drift(name)) in POWERS
    ratio = over(other, one, groups, f"{letter} over A, within each replicate", powers)
    p, reason = None, ""
    if not groups.enough:
        reason = f"fewer than {FEWEST_GROUPS} groups, or some that hold most tokens"
    elif doubted(a) or doubted(b):
        reason = "unreliable: the tail of the weights is too heavy"
    else:
        p = p_value(subtracted(other, one) if ratio is None else compared(other, one), groups)
        reason = "" if p is not None else a.unknown or b.unknown or "undefined in too many replicates"
    return Contrast(name=name, a=a, b=b, difference=gap, ratio=ratio, p_value=p, reason=reason)


def rank(contrast: Contrast, prefix: str) -> tuple[int, int, int, float]:
    """Return the sort key: significant differences first; then `FIRST_GAP`, other metrics, presets.

    Ties go by relative size, rounded so that floating-point differences between devices do not matter.
    """
    judged = {True: 0, False: 1, None: 2}[contrast.differs]
    name = contrast.name.removeprefix(prefix)
    first = FIRST_GAP.index(name) if name in FIRST_GAP else len(FIRST_GAP)
    of_preset = _drift(contrast.name) == "" and "." in contrast.name
    return judged, first, int(of_preset), -float(f"{size(contrast):.9g}")


# ---------------------------------------------------------------- the size of a difference


def size(contrast: Contrast) -> float:
    """Return |B − A| / (|A| + |B|): 0 if they are equal, 1 if one is 0 or the signs differ."""
    a, b = contrast.a.value, contrast.b.value
    if a is None or b is None or _equal(a, b):
        return 0.0
    return abs(b - a) / (abs(a) + abs(b))


def effect(contrast: Contrast) -> str:
    """Return the size of a difference as text; direction only if significant.

    `2.3x [1.9, 2.8] larger`, `smaller, 0.43x [0.36, 0.53] of A's`, `0.3% larger`, `40 points lower`.
    """
    a, b, differs = contrast.a.value, contrast.b.value, contrast.differs
    if a is None or b is None:
        return ""
    if _equal(a, b):
        return "equal"
    share, ratio = contrast.b.unit in FRACTIONS, contrast.ratio
    if ratio is None or ratio.value is None or (share and max(a, b) > FEW):
        word = ("higher" if b > a else "lower") if differs else "apart"
        value, interval = written(_scaled(contrast.difference, 100 if share else 1))
        return _joined(value + (" points" if share else ""), interval, word)
    word = ("larger" if ratio.value > 1 else "smaller") if differs else ""
    if 1 / NEAR < ratio.value < NEAR:
        return _joined(*written(_scaled(ratio, 1, 1.0, "fraction")), word or "apart")
    said, interval = written(ratio)
    text = _joined(f"{said}x", interval)
    if not word:
        return f"{text} of A's"
    return f"{text} larger" if word == "larger" else f"smaller, {text} of A's"


def _joined(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _equal(a: float, b: float) -> bool:
    """Return whether two numbers differ by rounding at most, as two passes on a GPU do."""
    return math.isclose(a, b, rel_tol=ROUNDING, abs_tol=0.0)


def _scaled(number: Number, scale: float, origin: float = 0.0, unit: str = "") -> Number:
    """Return the absolute distance from the origin times a scale, with its interval."""
    assert number.value is not None
    scale *= 1 if number.value >= origin else -1
    ends = [scale * (end - origin) for end in number.interval or ()]
    interval = (min(ends), max(ends)) if ends else None
    return Number(value=scale * (number.value - origin), interval=interval, unit=unit)


# ---------------------------------------------------------------- shared groups


By = Literal["group_id", "contents", "nothing"]
WHAT = {"group_id": "prompts (group_id)", "contents": "responses", "nothing": "groups"}
WHY = {
    "group_id": "no group_id is in both runs",
    "contents": "there is no group_id, and no response is in both",
    "nothing": "only one of the two has a group_id",
}


def pairing(a: Examined, b: Examined, letter: str) -> Pairing:
    """Count the groups in both runs and in only one; the bootstrap resamples shared groups together."""
    one, other = a.state, b.state
    shared, exact = _shared(one, other), one.counted and other.counted
    only_a, only_b = max(one.many - shared, 0), max(other.many - shared, 0)
    known = ["group_id" in run.facts.columns for run in (a, b)]
    by: By = "group_id" if all(known) else "nothing" if any(known) else "contents"
    sentence = f"Independent: {WHY[by]}; each run is resampled by itself."
    if shared:
        word = "Paired" if shared >= ENOUGH * (shared + min(only_a, only_b)) else "Paired in part"
        about = "" if exact else "about "
        sentence = (
            f"{word}: {about}{count(shared)} {WHAT[by]} are in both runs and are resampled together; "
            f"{about}{count(only_a)} are only in A and {about}{count(only_b)} only in {letter}."
        )
    return Pairing(by=by, shared=shared, only_a=only_a, only_b=only_b, exact=exact, sentence=sentence)


def _shared(one: State, other: State) -> int:
    """Count shared groups: exactly if all are counted, else estimated from the smallest hashes of both."""
    mine, theirs = (run.groups[:COUNTED] for run in (one, other))
    ends = [run.groups[COUNTED - 1] for run in (one, other) if not run.counted]
    if not ends:
        return len(np.intersect1d(mine, theirs))
    mine, theirs = (groups[groups <= min(ends)] for groups in (mine, theirs))
    return round(len(np.intersect1d(mine, theirs)) * one.many / max(len(mine), 1))


# ---------------------------------------------------------------- in words


def _headline(
    tested: list[Contrast], differing: list[Contrast], prefix: str, groups: Groups, letter: str
) -> str:
    if not tested:
        return f"Cannot say: {groups.many} groups (prompts) are too few for intervals."
    lead = next((c for c in differing or tested if c.name == f"{prefix}k3"), (differing or tested)[0])
    said = f"{lead.name} is {lead.effect}{f' in {letter}' if lead.differs else ''}"
    if not lead.effect:
        said = f"{lead.name} is {say(lead.a)} in A and {say(lead.b)} in {letter}"
    many = f"{len(differing)} of {len(tested)} metrics differ after correction"
    return f"{said}; {many}." if differing else f"No difference is established: {many}; {said}."


def _needs(a: Examined, b: Examined, letter: str) -> dict[str, str]:
    """Return policy gap or preset that only one run has → the columns that the other run lacks."""
    found: dict[str, list[str]] = {}
    for run, one, other in (("A", a, b), (letter, b, a)):
        columns, able = set(one.study.columns), {preset.name for preset in one.study.presets}
        lacking = {drift.title: [name for name in drift.columns if name not in columns] for drift in DRIFTS}
        for drift in DRIFTS:
            if lacking[drift.title] and not set(drift.columns) <= set(other.study.columns):
                del lacking[drift.title]  # neither has it
        for preset in a.presets:
            if preset.name not in able:
                lacking[preset.name] = preset.lacking(columns)
        for name, some in lacking.items():
            if some:
                found.setdefault(name, []).append(f"{run} has no {' and no '.join(some)}")
    return {name: "; ".join(lines) for name, lines in found.items()}
