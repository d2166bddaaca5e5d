"""Comparisons: presets with the first of them on one dump, and runs with the first of them.

What is compared is compared within each bootstrap replicate: what two presets, or two runs on the same
prompts, have in common cancels there. Tests of runs are corrected for their number (Holm), over all runs.
"""

from __future__ import annotations

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
    Formula,
    Groups,
    difference_of,
    holm,
    log_ratio_of,
    p_value,
    ratio_of,
    subtract,
)
from offpol_diag.core.observe import Examined
from offpol_diag.core.state import COUNTED, Array
from offpol_diag.core.study import Readout, Study
from offpol_diag.errors import UsageError
from offpol_diag.metrics import FIRST_GAP
from offpol_diag.number import Number, Numbers
from offpol_diag.numerals import count, doubted
from offpol_diag.presets import Preset
from offpol_diag.result import Against, Comparison, Contrast, Result


@dataclass(frozen=True)
class Side:
    """One side of a comparison: its numbers by name, and of those that have them the replicates, [1+B]."""

    numbers: Numbers
    drawn: Mapping[str, Array]
    groups: Groups

    def difference_to(self, other: Side, name: str) -> Number:
        """Subtract a number of the other side: within each replicate where both have them, else as it is.

        What rounding alone makes, as of two passes on a GPU, is 0.
        """
        one, theirs = self.numbers[name], other.numbers[name]
        if name in self.drawn and name in other.drawn:
            return difference_of(self.drawn[name], other.drawn[name], one, self.groups.fewer(other.groups))
        blank = Number(unit=one.unit, over=one.over)
        if one.value is None or theirs.value is None:
            return replace(blank, unknown=one.unknown or theirs.unknown or "not known")
        return replace(blank, value=float(subtract(np.array(one.value), np.array(theirs.value))))


def of_preset(out: Readout, summary: Result, preset: Preset) -> Side:
    """Return the numbers of a preset."""
    prefix = f"{preset.name}|"
    losses = preset_numbers.LOSSES if f"{prefix}loss" in out.reader.drawn else ()
    column = partial(out.reader.column, prefix=prefix)
    drawn = {row.name: row.of(column) for row in (*preset_numbers.ROWS, *losses)}
    return Side(summary.preset(preset.name), drawn, out.reader.groups)


# ---------------------------------------------------------------- presets


def reference(columns: Mapping[str, str], presets: Sequence[Preset]) -> str:
    """Return the preset that others are compared with: the first that can be computed.

    Raises:
        UsageError: each of them needs a column that the dump lacks.
    """
    have = Study.of(columns).columns
    lacking = {preset.name: preset.lacking(have) for preset in presets}
    if able := [name for name, missing in lacking.items() if not missing]:
        return able[0]
    needed = dict.fromkeys(column for missing in lacking.values() for column in missing)
    what = f"the dump has no {' and no '.join(needed)}, which {', '.join(lacking)} cannot do without"
    raise UsageError(what, "name the column with --columns, or compare other presets")


@np.errstate(all="ignore")
def of_presets(found: Examined, summary: Result, against: str) -> Comparison:
    """Compare the presets of a study with the preset `against`; `summary` holds their numbers."""
    out, study = Readout(found.study, found.state), found.study
    sides = {preset.name: of_preset(out, summary, preset) for preset in study.presets}
    first = sides.pop(against)
    differences = {
        name: {one: side.difference_to(first, one) for one in side.numbers if one in first.numbers}
        for name, side in sides.items()
    }
    drops = kept_rows.dropped(found.state, study.seed, study.pairs) if study.pairs else {}
    return Comparison(against=against, differences=differences, **drops)


# ---------------------------------------------------------------- runs

KEPT = ("dump", "run", "axes", "presets", "diagnosis")
"""What of a further run is kept beside its numbers."""
POWERS = frozenset(row.name for row in gap.ROWS if row.log)
"""Numbers that are e to the power of a mean, without the prefix of their drift."""
UNTESTED = "not tested: an extreme, a quantile, a tail index, a reward, or whether anything differs at all"


def of_run(found: Examined, summary: Result) -> Side:
    """Return the numbers of a dump's policy gaps and of the presets, by full name (`token_is.ess_tokens`).

    Of the gaps those of size have replicates: not whether any token differs, nor a sum that overflows.
    """
    out = Readout(found.study, found.state)
    there = {drift.prefix for drift in found.study.drifts}
    numbers = {name: number for name, number in summary.whole.items() if _drift(name) in there}
    drawn = dict[str, Array]()
    for prefix in there:
        rows: list[Formula] = [row for row in gap.ROWS if row is not gap.DIFFER]
        rows += [tails.ESS_TOKENS, tails.ESS_SEQUENCES]
        rows += [gap.SURROGATE] if f"{prefix}advantage" in out.reader.drawn else []
        rows += [gap.CHI2_SEQUENCE] if out.state.ranges[f"{prefix}sum_log_ratio"][1] <= LARGEST else []
        column = partial(out.reader.column, prefix=prefix)
        drawn |= {prefix + row.name: row.of(column) for row in rows}
    for preset in found.study.presets:
        side = of_preset(out, summary, preset)
        numbers |= {f"{preset.name}.{name}": number for name, number in side.numbers.items()}
        drawn |= {f"{preset.name}.{name}": values for name, values in side.drawn.items()}
    return Side(numbers, drawn, out.reader.groups)


def _drift(name: str) -> str:
    """Return the prefix of the policy gap that a metric belongs to."""
    return next((drift.prefix for drift in DRIFTS[1:] if name.startswith(drift.prefix)), DRIFTS[0].prefix)


@np.errstate(all="ignore")
def of_runs(runs: Sequence[Examined], results: Sequence[Result]) -> list[Against]:
    """Compare every further run with the first, A; `results` are those of the runs, in the same order.

    Raises:
        UsageError: a dump has no pair of policies in common with the first, or there are too many runs.
    """
    if len(runs) > len(ascii_uppercase):
        hint = "a folder or a quoted glob is one run"
        raise UsageError(f"{len(runs)} runs: at most {len(ascii_uppercase)} are compared", hint)
    a, mine, found = runs[0], of_run(runs[0], results[0]), list[Against]()
    for letter, run, result in zip(ascii_uppercase[1:], runs[1:], results[1:], strict=False):
        if not set(a.study.drifts) & set(run.study.drifts):
            what = f"A and {letter} have no pair of policies in common, so nothing can be compared"
            raise UsageError(what, "write the same policies into both dumps")
        theirs = of_run(run, result)
        missing = [one.title for one in DRIFTS if (one in a.study.drifts) != (one in run.study.drifts)]
        able = {*a.study.presets} & {*run.study.presets}
        missing += [preset.name for preset in a.presets if preset not in able]
        found.append(
            Against(
                letter=letter,
                run=Result(subjects=result.subjects, **{name: getattr(result, name) for name in KEPT}),
                pairing=pairing(a, run, letter),
                contrasts=[contrast(name, mine, theirs) for name in mine.numbers if name in theirs.numbers],
                missing=missing,
            )
        )
    corrected = iter(holm([one.p_value for run in found for one in run.contrasts if one.p_value is not None]))
    for against, run in zip(found, runs[1:], strict=True):
        main = next(drift.prefix for drift in a.study.drifts if drift in run.study.drifts)
        done = []
        for row in against.contrasts:
            p = None if row.p_value is None else next(corrected)
            done.append(row._replace(p_adjusted=p, differs=None if p is None else p < LEVEL))
        against.contrasts = sorted(done, key=partial(rank, main))
    return found


def contrast(name: str, mine: Side, theirs: Side) -> Contrast:
    """Compare one number of A with that of a further run; the p-value is not yet corrected."""
    a, b, one, other = mine.numbers[name], theirs.numbers[name], mine.drawn.get(name), theirs.drawn.get(name)
    groups, off = mine.groups.fewer(theirs.groups), theirs.difference_to(mine, name)
    if one is None or other is None:
        reason = a.unknown or b.unknown or UNTESTED
        return Contrast(name=name, a=a, b=b, difference=off, reason=reason)
    powers = name.removeprefix(_drift(name)) in POWERS
    ratio, p, reason = ratio_of(other, one, groups, powers), None, ""
    if not groups.enough:
        reason = "too few groups, or some that hold most tokens"
    elif doubted(a) or doubted(b):
        reason = "unreliable: the tail of the weights is too heavy"
    else:
        p = p_value(subtract(other, one) if ratio is None else log_ratio_of(other, one), groups)
        reason = "" if p is not None else a.unknown or b.unknown or "undefined in too many replicates"
    return Contrast(name=name, a=a, b=b, difference=off, ratio=ratio, p_value=p, reason=reason)


def rank(prefix: str, one: Contrast) -> tuple[int, int, bool, float]:
    """Return the sort key: what differs first; in it what is shown first of the main gap, others, presets.

    Ties go by relative size |B − A| / (|A| + |B|), rounded so that devices do not differ.
    """
    name, apart = one.name.removeprefix(prefix), one.difference.value
    first = FIRST_GAP.index(name) if name in FIRST_GAP else len(FIRST_GAP)
    size = abs(apart) / (abs(one.a.value or 0.0) + abs(one.b.value or 0.0)) if apart else 0.0
    judged = {True: 0, False: 1, None: 2}[one.differs]
    return judged, first, not _drift(one.name) and "." in one.name, -float(f"{size:.9g}")


def pairing(a: Examined, b: Examined, letter: str) -> str:
    """Return how many groups both runs have, if all are counted; the bootstrap resamples these together."""
    one, other = a.state, b.state
    shared = len(np.intersect1d(one.groups[:COUNTED], other.groups[:COUNTED]))
    grouped = all("group_id" in run.facts.columns for run in (a, b))
    what = "prompts (group_id)" if grouped else "responses"
    if not shared:
        return f"Independent: no {what} are in both, and each run is resampled by itself."
    if not (one.counted and other.counted):
        return f"Paired: {what} that are in both runs are resampled together."
    only_a, only_b = (count(run.many - shared) for run in (one, other))
    both = f"Paired: {count(shared)} {what} are in both runs and are resampled together; "
    return f"{both}{only_a} are only in A and {only_b} only in {letter}."
