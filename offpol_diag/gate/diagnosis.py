"""The diagnosis as a bound: which verdict fails, and whether it is worse than in an earlier result.

    healthy < honest_mismatch < cannot_tell < bug

                           --fail-on honest_mismatch    --fail-on cannot_tell    --fail-on bug
    healthy                passed                       passed                   passed
    honest_mismatch        failed                       passed                   passed
    cannot_tell, causes    passed, open                 failed                   passed, open
    cannot_tell, none      could not say                failed                   could not say
    bug                    failed                       failed                   failed
    no diagnosis           could not say                could not say            could not say

With "causes" the columns line up, and several causes fit the dump; with "none" a bug could not be looked for:
the columns are copies, or too short. What would pass is "could not say" with fewer than `SEQUENCES` sequences
or `PROMPTS` prompts. Against a baseline a diagnosis fails that comes later in the order than the baseline's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.gate.bounds import Level
from offpol_diag.gate.verdicts import joined
from offpol_diag.summary import Diagnosis, DiagnosisVerdict, GateVerdict, Summary

ORDER: tuple[DiagnosisVerdict, ...] = ("healthy", "honest_mismatch", "cannot_tell", "bug")
"""The diagnoses, each worse than the one before."""
NAME = "diagnosis"
"""Its name among the numbers of a baseline."""
SEQUENCES, PROMPTS = 16, 4
"""Fewest sequences, and prompts where the dump has group_id, of which not finding a bug says something."""
NONE = "this result holds no diagnosis"
UNSURE = "which cause it is, this dump cannot tell; --fail-on cannot_tell fails for that"
UNTESTED = "whether it is a bug could not be tested"


@dataclass(frozen=True)
class FailOn:
    """A diagnosis that fails the gate, as every worse one does.

    Attributes:
        verdict: the mildest diagnosis that fails; not `healthy`.
        level: whether a failure fails the gate (error) or is only reported (warn).
        source: the option, or the gate file and its table.
        note: the user's note from the gate file.
    """

    verdict: DiagnosisVerdict
    level: Level = "error"
    source: str = "--fail-on"
    note: str = ""


def diagnosed(text: str) -> DiagnosisVerdict:
    """Parse `bug`, `cannot_tell` or `honest_mismatch`; case and `-` for `_` do not matter.

    Raises:
        UsageError: anything else.
    """
    plain = text.strip().lower().replace("-", "_")
    for verdict in ORDER[1:]:
        if plain == verdict:
            return verdict
    names: list[str] = list(reversed(ORDER[1:]))
    near = did_you_mean(plain, names) or f"it is {', '.join(names[:-1])} or {names[-1]}"
    raise UsageError(f'"{text}" is no diagnosis to fail on', near)


def judge_diagnosis(summary: Summary, asked: Sequence[FailOn]) -> Iterator[GateVerdict]:
    """Yield a verdict for each.

    Several causes that fit pass as open unless `cannot_tell` fails; what could not be tested is not judged.
    """
    found = summary.diagnosis
    for one in asked:
        passed: bool | None = None
        unsure, more = False, ""
        if found is not None:
            cannot_tell = found.verdict == "cannot_tell" != one.verdict
            if not cannot_tell and ORDER.index(found.verdict) >= ORDER.index(one.verdict):
                passed = False
            elif few := _few(summary):
                more = few
            elif cannot_tell and not found.candidates:
                more = UNTESTED
            else:
                passed, unsure, more = True, cannot_tell, UNSURE if cannot_tell else ""
        yield _verdict(
            found,
            passed,
            more,
            level=one.level,
            source=one.source,
            note=one.note,
            open=unsure,
            diagnosis_fails=one.verdict,
        )


def _few(summary: Summary) -> str:
    """Return that there is too little data to miss a bug in; empty where there is enough."""
    dump = summary.dump
    counts = [(dump.sequences, SEQUENCES, "sequences")]
    counts += [(dump.groups, PROMPTS, "prompts")] if "group_id" in dump.columns else []
    for many, fewest, unit in counts:
        if many < fewest:
            return f"{UNTESTED}: that needs {fewest} {unit}, and there are {many}"
    return ""


def compare_diagnosis(now: Summary, base: Summary, level: Level, label: str) -> GateVerdict:
    """Return whether the diagnosis is no worse than the baseline's."""
    here, there = now.diagnosis, base.diagnosis
    passed, more = None, ""
    if there is None:
        more = f"{label} holds no diagnosis"
    elif here is not None:
        passed = ORDER.index(here.verdict) <= ORDER.index(there.verdict)
        more = "" if passed else f"it was {plain(there.verdict)} in {label}"
    earlier = there and there.verdict
    return _verdict(here, passed, more, level=level, source=label, diagnosis_baseline=earlier)


def plain(verdict: DiagnosisVerdict) -> str:
    """Return the diagnosis in words."""
    return verdict.replace("_", " ")


def _undecided(found: Diagnosis) -> str:
    """Return the candidates, of which the report says more, and the measurement that decides."""
    said = f"{_lower(found.headline)}: {', '.join(one.id for one in found.candidates)}"
    return joined(said, f"to decide, {_lower(found.decide)}" if found.decide else "")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:].rstrip(".")


def _verdict(found: Diagnosis | None, passed: bool | None, more: str, **rest: Any) -> GateVerdict:
    """Build the verdict; it says the diagnosis with its cause, and the first sentence of the fix of a bug."""
    said = NONE
    if found and found.candidates:
        said = _undecided(found)
    elif found:
        said = f"{plain(found.verdict)}: {found.headline.rstrip('.')}"
        bug = next((one for one in found.causes if one.kind == "bug"), None)
        if bug is not None and found.verdict == "bug":
            fix = re.split(r"(?<=[.!?])\s+(?=[A-Z])", bug.fix)[0].rstrip(".")
            what = f"{plain(found.verdict)} ({bug.id}): {bug.statement.rstrip('.')}"
            said = joined(what, f"fix: {fix}" if fix else "")
    return GateVerdict(
        name=NAME,
        bound="diagnosis",
        limit=0.0,
        value=None,
        diagnosis=found and found.verdict,
        passed=passed,
        reason=joined(said, more),
    ).model_copy(update=rest)
