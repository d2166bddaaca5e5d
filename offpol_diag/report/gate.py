"""The answer of `gate`: whether every bound holds, the words of its verdicts, and JUnit XML for CI systems.

In JUnit a bound is a test: failed is a failure, "could not say" an error, and what is open the test's output.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from offpol_diag.gate import beyond, outcome, plain, tolerance
from offpol_diag.metrics import Tone
from offpol_diag.number import Number
from offpol_diag.numerals import FRACTIONS, count, counted, say, say_limit, say_value, written
from offpol_diag.printable import printable
from offpol_diag.report.analyze import analysis, of_dump
from offpol_diag.report.answer import Answer, Fact
from offpol_diag.report.plot import BLUE, SHARE, Chart, Panel, chart, curve, level, of_series, steps_axis
from offpol_diag.result import GateVerdict, Result
from offpol_diag.table import Cell, Table

FEW, MOST = 16, 100
"""Most bounds, and most reasons, in a terminal and in a comment of 60 lines; most bounds on the page."""
SAID: Mapping[str, tuple[str, Tone]] = {
    "passed": ("Passed", "good"),
    "failed": ("Failed", "bad"),
    "could not say": ("Could not say", "warn"),
}
WORDS: Mapping[tuple[bool | None, bool], str] = {
    (True, False): "✓ passed",
    (True, True): "~ open",
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


def answer(summary: Result) -> Answer:
    """Return the verdict, the reasons where a bound did not simply pass, the bounds, and the bug check."""
    verdicts = sorted(summary.gates, key=weight)
    judgement, tone = SAID[outcome(verdicts)]
    unlike = [one for one in verdicts if one.passed is not True or (one.open and beyond(one))]
    first = next((one for one in verdicts if one.passed is False), None)
    facts = [Fact(word(one)[2:].capitalize(), explained(one, one is first)) for one in unlike[:FEW]]
    given = summary.diagnosis
    judged = any(one.bound == "diagnosis" for one in verdicts)
    if given is not None and not judged:
        facts.append(Fact("Bug?", given.headline))
    charts = tuple(one for verdict in verdicts if (one := _stepwise(summary, verdict)))
    return of_dump(summary)(
        judgement,
        headline(verdicts).rstrip("."),
        tone,
        facts=tuple(facts),
        tables=_tables(summary.gates, (*_left(len(unlike), "such bounds", FEW), summary.not_compared)),
        charts=charts,
        next=analysis(summary.dump),
        heading="offpol-diag gate",
    )


def _tables(verdicts: Sequence[GateVerdict], remarks: Sequence[str]) -> tuple[Table, ...]:
    """Return a row for each bound, in order; of many, the most important, and more of them on the page."""

    def table(name: str, most: int, shown: Literal["always", "page"], *notes: str) -> Table:
        chosen = verdicts if len(verdicts) <= most else sorted(verdicts, key=weight)[:most]
        rows: list[tuple[Cell, ...]] = []
        for one in chosen:
            value = found(one)
            short = plain(one.diagnosis) if one.diagnosis else value if value.known else "–"
            rows.append((word(one), holds(one), short))
        notes = (*_left(len(verdicts), "bounds", most), *notes)
        return Table(name, "Every bound", ("gate", "must hold", "found"), rows, notes, shown=shown)

    first = table("gates", FEW, "always", *opened(verdicts), *filter(None, remarks))
    return (first, table("every", MOST, "page")) if len(verdicts) > FEW else (first,)


def _left(number: int, what: str, most: int) -> tuple[str, ...]:
    """Return a note if there are more than are listed."""
    return (f"{count(number - most)} more {what}: --json and --junit have all.",) if number > most else ()


def opened(verdicts: Sequence[GateVerdict]) -> tuple[str, ...]:
    """Return what open means, for the kinds of bounds that are."""
    kinds = {one.bound == "diagnosis" for one in verdicts if one.open}
    return tuple(note for kind, note in ((False, OPEN), (True, OPEN_DIAGNOSIS)) if kind in kinds)


def headline(verdicts: Sequence[GateVerdict]) -> str:
    """Return what decided: the bound that failed, or how many and the first; else what was not judged."""
    failed, unknown = ([one for one in verdicts if one.passed is passed] for passed in (False, None))
    decided = failed or unknown
    if not decided:
        return tally(verdicts)
    first = missed(decided[0]) if failed else f"{title(decided[0])}: {decided[0].reason}"
    some = f"{len(decided)} of {counted(len(verdicts), 'bound')}; the first: " if len(decided) > 1 else ""
    others = [one for one in verdicts if one.passed is not decided[0].passed]
    return f"{some}{first}{f'. Of the others {tally(others, True)}' if others else ''}"


def missed(one: GateVerdict) -> str:
    """Return a failed bound in words: `ess_tokens is 96% [90%, 98%], must be ≥ 99%`."""
    must = f"must be {bound(one)}".replace("must be not ", "must not be ").replace(
        "be baseline", "be within baseline"
    )
    what = (
        f"the diagnosis is {plain(one.diagnosis)}" if one.diagnosis else f"{title(one)} is {say(found(one))}"
    )
    return f"{what}{f' at {one.where}' if one.where else ''}, {must}"


def tally(verdicts: Sequence[GateVerdict], short: bool = False) -> str:
    """Return a count: `3 of 7 bounds hold, 1 is open, 1 failed, 1 could not be judged`."""
    said = [one.passed for one in verdicts]
    opened = sum(one.open for one in verdicts if one.passed is True)
    hold = sum(one.passed is True for one in verdicts) - opened
    many = len(verdicts)
    all_hold = "the bound holds" if many == 1 else f"all {count(many)} bounds hold"
    of = "" if short else f" of {counted(many, 'bound')}"
    none = not hold and opened and not short  # then the open ones are what is counted of all
    parts = (
        f"{count(hold)}{of} {'holds' if hold == 1 else 'hold'}" if (hold or not short) and not none else "",
        f"{count(opened)}{of if none else ''} {'is' if opened == 1 else 'are'} open" if opened else "",
        f"{count(said.count(False))} failed" if False in said else "",
        f"{count(said.count(None))} could not be judged" if None in said else "",
    )
    return all_hold if hold == many and not short else ", ".join(part for part in parts if part)


def word(one: GateVerdict) -> str:
    """Return the verdict: passed, open, failed, could not say."""
    return WORDS[one.passed, one.open]


def title(one: GateVerdict) -> str:
    """Return the number's name, with that of the trainer which was given."""
    return f"{one.said}, taken as {one.name}" if one.said else one.name


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
        return f"{SIGNS[one.bound]} {say_limit(one.limit, one.unit)}"
    base = "baseline" if one.baseline is None else f"baseline {say_value(one.baseline, one.unit)}"
    allowed = _allowed(one)
    if one.bound == "within" and one.centre != one.baseline:
        return f"no farther from {say_value(one.centre, one.unit)} than {base} by {allowed}"
    if one.bound == "within":
        return f"{base} ± {allowed}"
    return f"{SIGNS[one.bound]} {base} {'−' if one.bound == 'min' else '+'} {allowed}"


def _allowed(one: GateVerdict) -> str:
    """Return the tolerance; beside a percentage `10% of it`, or `2 points`."""
    if one.unit not in FRACTIONS:
        return one.tolerance
    said = tolerance(one.tolerance)
    share = f"{100 * said.share:g}% of it" if said.share or not said.amount else ""
    amount = f"{100 * said.amount:g} points" if said.amount else ""
    return " + ".join(part for part in (share, amount) if part)


def found(one: GateVerdict) -> Number:
    """Return the judged value."""
    value = Number(value=one.value, interval=one.interval, log10=one.log10, unit=one.unit)
    return value if value.known else replace(value, unknown=one.reason or "no value")


def explained(one: GateVerdict, headed: bool = False) -> str:
    """Return the number's name and the reason; of a failed one what it missed.

    Where the headline says that already (`headed`) only the rest.
    """
    if one.passed is not False or not found(one).known:
        return f"{title(one)}: {one.reason}"
    compared, _, more = one.reason.partition("; ")
    rest = more if " is not " in compared else one.reason  # the comparison of value and bound is said
    if headed and rest:
        return f"{title(one)}: {rest}"
    return "; ".join(part for part in (missed(one), rest) if part)


def weight(one: GateVerdict) -> int:
    """Return a sort key: failed, not judged, passed."""
    return {False: 0, None: 1, True: 2}[one.passed]


def _beyond(value: float | None, one: GateVerdict) -> bool:
    return value is not None and value != one.limit and (value > one.limit) == (one.bound == "max")


def _stepwise(summary: Result, one: GateVerdict) -> Chart | None:
    """Return a number by training step against its bound."""
    steps, (step, _, name) = summary.charts.steps, one.name.partition("step:")
    series = steps.series.get(name) if steps and not step else None
    if steps is None or series is None or len(steps.first) < 2 or one.bound == "within":
        return None
    beyond = [at for at, y in zip(steps.first, series.values, strict=True) if _beyond(y, one)]
    wrong = "above" if one.bound == "max" else "below"
    said = f"{name} lies {wrong} {say_limit(one.limit, series.unit)} "
    said += f"at {len(beyond)} of {len(steps.first)} steps"
    said += f", first at step {beyond[0]}" if beyond else ""
    share = series.unit in FRACTIONS
    axis = SHARE if share else {"type": "log"} if all(y is None or y > 0 for y in series.values) else {}
    traces = curve((steps.first, of_series(series), "", BLUE))
    bounds = [level(one.limit, f"bound {bound(one)}")]
    panel = Panel("training step", name, traces, steps_axis(steps.first), axis, bounds)
    return chart(re.sub(r"[^\w.]+", "_", f"step_{name}_{one.bound}"), said, panel)


# ---------------------------------------------------------------- JUnit

SUITE = "offpol-diag gate"
HEAD = '<?xml version="1.0" encoding="utf-8"?>\n'
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(summary: Result) -> str:
    """Return one suite with a test for each bound, in the words of the terminal."""
    from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

    def legal(text: str) -> str:
        """Return printable text without characters that XML does not allow."""
        return NOT_XML.sub("\ufffd", printable(text))

    cases = []
    for one in summary.gates:
        case = TestCase(legal(f"{title(one)} {bound(one)}"), classname="offpol_diag.gate")
        text, number = legal(explained(one)), found(one)
        if one.passed is True:
            case.system_out = f"{word(one)}: {text}"
        else:
            result = (Error if one.passed is None else Failure)(text, word(one)[2:])
            value, interval = written(number) if number.known else ("none", "")
            about = (
                f"value: {value}",
                f"95% interval: {interval or 'none'}",
                f"asked by: {one.source or 'unknown'}",
            )
            result.text = "\n".join((text, *map(legal, about)))
            case.result = [result]
        cases.append(case)
    suite, xml = TestSuite(SUITE), JUnitXml(SUITE)
    suite.add_property("dump", legal(", ".join(summary.dump.files)))
    suite.add_property("version", legal(summary.run.version))
    suite.add_testcases(cases)  # one by one takes quadratic time
    suite.time = summary.run.seconds.get("total", 0.0)
    xml.add_testsuite(suite)
    return HEAD + xml.tostring().decode() + "\n"  # type: ignore[no-untyped-call, no-any-return]
