"""Run A against run B: every number of both, the difference, and whether it is real after correction."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from offpol_diag import correction
from offpol_diag.analysis.readout import Readout
from offpol_diag.analysis.replicates import (
    LEVEL,
    Groups,
    Replicates,
    base,
    compared,
    holm,
    less,
    of_preset,
    over,
    p_value,
    subtracted,
)
from offpol_diag.analyze import Examined
from offpol_diag.better import MATTERS
from offpol_diag.contrast.effects import effect, size
from offpol_diag.contrast.pairing import pairing
from offpol_diag.errors import UsageError
from offpol_diag.metrics.gap import DRIFTS
from offpol_diag.metrics.interval import FEWEST_GROUPS
from offpol_diag.numerals import doubted, say
from offpol_diag.summary import Against, Contrast, Number, Numbers, OtherRun, Summary

T = TypeVar("T")

CORRECTION = "Holm"

EXTREME = "an extreme, a quantile or a tail index: it has no interval"


@dataclass(frozen=True)
class Side:
    """One run: its numbers and their replicates, by full name (`k3`, `token_is.ess_tokens`)."""

    numbers: Numbers
    drawn: Replicates
    groups: Groups

    @classmethod
    def of(cls, found: Examined, summary: Summary) -> Side:
        """The base metrics, and those of the presets of the study."""
        out = Readout(found.study, found.tally)
        numbers, drawn = dict(_known(summary.metrics, found)), base(out)
        for preset in found.study.presets:
            numbers |= _under(preset.name, summary.presets[preset.name].metrics)
            drawn |= _under(preset.name, of_preset(out, preset))
        return cls(numbers, drawn, Groups.of(out.reader.sums["tokens"], out.groups.groups))


def _known(metrics: Numbers, found: Examined) -> Iterator[tuple[str, Number]]:
    """Those of the drifts that the dump has."""
    there = {drift.prefix for drift in found.study.drifts}
    return ((name, number) for name, number in metrics.items() if _drift(name) in there)


def _drift(name: str) -> str:
    """The prefix of the drift that a base metric is about."""
    return next((drift.prefix for drift in DRIFTS[1:] if name.startswith(drift.prefix)), DRIFTS[0].prefix)


def _under(preset: str, found: Mapping[str, T]) -> dict[str, T]:
    return {f"{preset}.{name}": value for name, value in found.items()}


def of_runs(a: Examined, b: Examined, one: Summary, other: Summary) -> Against:
    """Run A, whose Summary is `one`, against run B.

    Raises:
        UsageError: the two dumps have no pair of policies in common.
    """
    _require_common(a, b)
    mine, theirs = Side.of(a, one), Side.of(b, other)
    groups = mine.groups.fewer(theirs.groups)
    found = _corrected(
        [_contrast(name, mine, theirs, groups) for name in mine.numbers if name in theirs.numbers]
    )
    prefix = next(drift.prefix for drift in a.study.drifts if drift in b.study.drifts)
    ordered = sorted(found, key=lambda contrast: _rank(contrast, prefix))
    tested = [contrast for contrast in ordered if contrast.differs is not None]
    differing = [contrast for contrast in tested if contrast.differs]
    return Against(
        b=_other(other),
        headline=_headline(tested, differing, prefix, groups),
        pairing=pairing(a, b),
        correction=CORRECTION,
        level=LEVEL,
        tested=len(tested),
        differing=len(differing),
        contrasts=ordered,
        needs=_needs(a, b),
        notes=_notes(a, b),
    )


def _require_common(a: Examined, b: Examined) -> None:
    if set(a.study.drifts) & set(b.study.drifts):
        return
    has = [", ".join(sorted(c for c in run.study.columns if c.endswith("_log_probs"))) for run in (a, b)]
    raise UsageError(
        f"A has {has[0]} and B has {has[1]}: no pair of policies is in both, so nothing can be compared",
        "write the same policies into both dumps",
    )


def _other(summary: Summary) -> OtherRun:
    """What of run B is kept beside the contrasts."""
    return OtherRun(
        dump=summary.dump,
        metrics=summary.metrics,
        presets=summary.presets,
        by=summary.by,
        histograms=summary.histograms,
        diagnosis=summary.diagnosis,
        run=summary.run,
    )


# ---------------------------------------------------------------- one number


def _contrast(name: str, mine: Side, theirs: Side, groups: Groups) -> Contrast:
    a, b = mine.numbers[name], theirs.numbers[name]
    if name not in mine.drawn or name not in theirs.drawn:
        return Contrast(
            name=name, a=a, b=b, difference=_plain(a, b), reason=a.unknown or b.unknown or EXTREME
        )
    one, other = mine.drawn[name], theirs.drawn[name]
    difference = less(other, one, b, groups, "B less A, within each replicate")
    ratio = over(other, one, groups, "B over A, within each replicate")
    scale = subtracted(other, one) if ratio is None else compared(other, one)
    p, reason = _tested(a, b, scale, groups)
    return Contrast(name=name, a=a, b=b, difference=difference, ratio=ratio, p_value=p, reason=reason)


def _plain(a: Number, b: Number) -> Number:
    blank = Number(unit=b.unit, over=b.over, formula="B less A")
    if a.value is None or b.value is None:
        return blank.model_copy(update={"unknown": a.unknown or b.unknown or "not known"})
    return blank.model_copy(update={"value": b.value - a.value})


def _tested(a: Number, b: Number, values: Tensor, groups: Groups) -> tuple[float | None, str]:
    """The p-value, or why there is none."""
    if not groups.enough:
        return None, f"fewer than {FEWEST_GROUPS} groups, or some that hold most tokens"
    if doubted(a) or doubted(b):
        return None, "unreliable: the tail of the weights is too heavy"
    p = p_value(values, groups)
    return p, "" if p is not None else a.unknown or b.unknown or "undefined in too many replicates"


def _corrected(found: list[Contrast]) -> list[Contrast]:
    """With p-values corrected for their number, and what follows."""
    tested = [contrast.p_value for contrast in found if contrast.p_value is not None]
    corrected = iter(holm(tested))
    return [_judged(one, None if one.p_value is None else next(corrected)) for one in found]


def _judged(contrast: Contrast, p: float | None) -> Contrast:
    differs = None if p is None else p < LEVEL
    done = contrast.model_copy(update={"p_adjusted": p, "differs": differs})
    return done.model_copy(update={"effect": effect(done)})


def _rank(contrast: Contrast, prefix: str) -> tuple[int, int, int, float]:
    """What differs; in it what a reader looks at first, then the gap, then presets; in these the largest.

    Rounding, which differs by device, does not decide between two that are as large.
    """
    judged = {True: 0, False: 1, None: 2}[contrast.differs]
    name = contrast.name.removeprefix(prefix)
    first = MATTERS.index(name) if name in MATTERS else len(MATTERS)
    of_preset = _drift(contrast.name) == "" and "." in contrast.name
    return judged, first, int(of_preset), -float(f"{size(contrast):.9g}")


# ---------------------------------------------------------------- in words


def _headline(tested: list[Contrast], differing: list[Contrast], prefix: str, groups: Groups) -> str:
    if not tested:
        return f"Cannot say: {groups.many} groups (prompts) are too few for intervals."
    lead = next((c for c in differing or tested if c.name == f"{prefix}k3"), (differing or tested)[0])
    many = f"{len(differing)} of {len(tested)} metrics differ after correction"
    if not differing:
        return (
            f"No difference is established: 0 of {len(tested)} metrics differ after correction; {_led(lead)}."
        )
    return f"{_led(lead)}; {many}."


def _led(lead: Contrast) -> str:
    where = " in B" if lead.differs else ""
    if not lead.effect:
        return f"{lead.name} is {say(lead.a)} in A and {say(lead.b)} in B"
    return f"{lead.name} is {lead.effect}{where}"


def _needs(a: Examined, b: Examined) -> dict[str, str]:
    """What only one run can say, and what the other one needs for it."""
    found: dict[str, str] = {}
    for drift in DRIFTS:
        lacking = {
            run: [column for column in drift.columns if column not in one.study.columns]
            for run, one in (("A", a), ("B", b))
        }
        if bool(lacking["A"]) != bool(lacking["B"]):
            found[drift.title] = _lacks(lacking)
    able = {run: {preset.name for preset in one.study.presets} for run, one in (("A", a), ("B", b))}
    for preset in a.presets:
        lacking = {
            run: correction.needs(preset, set(one.study.columns))
            for run, one in (("A", a), ("B", b))
            if preset.name not in able[run]
        }
        if lacking:
            found[preset.name] = _lacks(lacking)
    return found


def _lacks(lacking: Mapping[str, list[str]]) -> str:
    return "; ".join(
        f"{run} has no {' and no '.join(columns)}" for run, columns in lacking.items() if columns
    )


def _notes(a: Examined, b: Examined) -> list[str]:
    """What a reader must know before believing a difference."""
    same = len(set(a.facts.files) & set(b.facts.files))
    files = "a file" if same == 1 else f"{same} files"
    return [f"A and B share {files}: those rows are compared with themselves."] if same else []
