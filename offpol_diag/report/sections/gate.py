"""Section on the gate: bounds, values found, and whether the bounds hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offpol_diag.blocks import Cell, Section, Table, Tone, Verdict
from offpol_diag.gate import beyond, outcome
from offpol_diag.gate.diagnosis import plain
from offpol_diag.numerals import count, say_value
from offpol_diag.summary import GateVerdict, Number

MOST = 100
"""Maximum number of bounds listed in the terminal and in comments."""
SAID: Mapping[str, tuple[str, Tone]] = {
    "passed": ("Passed", "good"),
    "failed": ("Failed", "bad"),
    "could not say": ("Could not say", "warn"),
}

WORDS: Mapping[tuple[bool | None, bool], str] = {
    (True, False): "✓ passed",
    (True, True): "✓ open",
    (False, False): "✗ failed",
    (None, False): "? could not say",
}
"""(passed, open) → verdict in words."""

OPEN = (
    "open: the 95% interval holds values on both sides of the bound, which passes for want of evidence "
    "against it."
)
OPEN_DIAGNOSIS = "open: the diagnosis cannot tell, which passes for want of evidence of a bug."
SIGNS: Mapping[str, str] = {"max": "≤", "min": "≥", "within": "±"}


def gate(verdicts: Sequence[GateVerdict], remarks: Sequence[str] = ()) -> Section:
    """Return the overall verdict, the reasons where a bound did not simply pass, and one row per bound."""
    label, tone = SAID[outcome(verdicts)]
    unlike = [
        one for one in sorted(verdicts, key=weight) if one.passed is not True or (one.open and beyond(one))
    ]
    why = (*(f"{word(one)}: {explained(one)}" for one in unlike[:MOST]), *_more(len(unlike), "such bounds"))
    head = Verdict(label, tally(verdicts), tone, why)
    rows: list[tuple[Cell, ...]] = []  # without the reasons, which stand above
    for one in _chosen(verdicts):
        value = found(one)
        short = plain(one.diagnosis) if one.diagnosis else value if value.known else "–"
        rows.append((word(one), holds(one), short))
    notes = (*_more(len(verdicts), "bounds"), *_opened(verdicts), *remarks)
    table = Table("gates", "Every bound", ("gate", "must hold", "found"), rows, notes)
    return Section("gate", "Gate", (head, table))


def _chosen(verdicts: Sequence[GateVerdict]) -> Sequence[GateVerdict]:
    """Return the verdicts in order; if there are more than `MOST`, the most important ones."""
    return verdicts if len(verdicts) <= MOST else sorted(verdicts, key=weight)[:MOST]


def _more(number: int, what: str) -> tuple[str, ...]:
    """Return a note if there are more than `MOST`."""
    more = f"{count(number - MOST)} more {what}: the HTML report, --json and --junit have them all."
    return (more,) if number > MOST else ()


def _opened(verdicts: Sequence[GateVerdict]) -> tuple[str, ...]:
    kinds = {one.bound == "diagnosis" for one in verdicts if one.open}
    return tuple(note for kind, note in ((False, OPEN), (True, OPEN_DIAGNOSIS)) if kind in kinds)


def report(verdicts: Sequence[GateVerdict], whole: bool = True) -> Table:
    """Return a table of bounds with reasons; unless `whole`, the most important ones if there are many."""
    chosen = verdicts if whole else _chosen(verdicts)
    rows: list[tuple[Cell, ...]] = []
    for one in chosen:
        value = plain(one.diagnosis) if one.diagnosis else found(one)
        rows.append((word(one), title(one), bound(one), value, _reason(one) or "–"))
    caption = f"{sum(one.passed is True for one in verdicts)} of {len(verdicts)} gates passed"
    notes = (*(() if whole else _more(len(verdicts), "bounds")), *_opened(verdicts))
    return Table("gates", caption, ("gate", "number", "bound", "value", "why"), rows, notes)


def tally(verdicts: Sequence[GateVerdict]) -> str:
    """Return a count: `3 of 5 bounds hold (1 open); 1 failed; 1 could not be judged; 1 warned`."""
    passed = sum(one.passed is True for one in verdicts)
    errors = [one.passed for one in verdicts if one.level == "error"]
    warned = sum(one.level == "warn" and one.passed is not True for one in verdicts)
    opened = sum(one.open for one in verdicts)
    parts = (
        f"{passed} of {len(verdicts)} bounds hold" + (f" ({opened} open)" if opened else ""),
        f"{errors.count(False)} failed" if False in errors else "",
        f"{errors.count(None)} could not be judged" if None in errors else "",
        f"{warned} warned" if warned else "",
    )
    return "; ".join(part for part in parts if part)


def word(one: GateVerdict) -> str:
    """Return the verdict (passed, open, failed, could not say), with the level unless it is error."""
    return WORDS[one.passed, one.open] + (" (warn)" if one.level == "warn" and one.passed is not True else "")


def title(one: GateVerdict) -> str:
    """Return the number's name, with that of the trainer which was given, and the steps that it covers."""
    name = f"{one.said}, taken as {one.name}" if one.said else one.name
    return f"{name} (steps {one.steps})" if one.steps else name


def holds(one: GateVerdict) -> str:
    """Return the condition in one line: `step:k3 ≤ 0.002, worst at step 7`."""
    worst = "worst " if one.name.startswith("step:") else ""
    return f"{title(one)} {bound(one)}" + (f", {worst}at {one.where}" if one.where else "")


def bound(one: GateVerdict) -> str:
    """Return the bound: `≤ 0.002`, or one relative to the baseline."""
    if one.bound == "diagnosis" and one.diagnosis_fails:
        return f"not {plain(one.diagnosis_fails)}{'' if one.diagnosis_fails == 'bug' else ' or worse'}"
    if one.bound == "diagnosis":
        earlier = one.diagnosis_baseline
        return f"no worse than baseline{f' {plain(earlier)}' if earlier else ''}"
    if not one.tolerance:
        return f"{SIGNS[one.bound]} {say_value(one.limit)}"
    base = "baseline" if one.baseline is None else f"baseline {say_value(one.baseline)}"
    if one.bound == "within" and one.centre != one.baseline:
        return f"no farther from {one.centre:g} than {base} by {one.tolerance}"
    if one.bound == "within":
        return f"{base} ± {one.tolerance}"
    return f"{SIGNS[one.bound]} {base} {'−' if one.bound == 'min' else '+'} {one.tolerance}"


def found(one: GateVerdict) -> Number:
    """Return the judged value."""
    value = Number(value=one.value, interval=one.interval, log10=one.log10)
    return value if value.known else value.model_copy(update={"unknown": _reason(one) or "no value"})


def explained(one: GateVerdict) -> str:
    """Return the number's name, the reason, and the gate file's note."""
    return f"{title(one)}: {_reason(one)}"


def _reason(one: GateVerdict) -> str:
    return "; ".join(part for part in (one.reason, one.note) if part)


def weight(one: GateVerdict) -> tuple[bool, int]:
    """Return a sort key: failed, not judged, open, passed; errors before warnings."""
    return one.level == "warn", {False: 0, None: 1, True: 2}[one.passed]
