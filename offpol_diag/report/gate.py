"""The answer of `gate`: whether every bound holds, and JUnit XML for CI systems.

In JUnit a bound is a test: failed is a failure, "could not say" an error, and what is open the test's output.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from offpol_diag.gate import STEP, outcome, plain
from offpol_diag.metrics import Tone
from offpol_diag.number import Number
from offpol_diag.numerals import FRACTIONS, count, counted, say, say_limit
from offpol_diag.printable import printable
from offpol_diag.report.analyze import analysis, of_dump
from offpol_diag.report.answer import Answer, Fact
from offpol_diag.report.plot import BLUE, SHARE, Chart, Panel, chart, curve, level, steps_axis
from offpol_diag.result import GateVerdict, Result
from offpol_diag.table import Table

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
OPEN = "open: no evidence against the bound, and none for it: it passes."


def answer(summary: Result) -> Answer:
    """Return the verdict, the reasons where a bound did not simply pass, the bounds, and the bug check."""
    verdicts = sorted(summary.gates, key=weight)
    word, tone = SAID[outcome(verdicts)]
    unlike = [one for one in verdicts if one.passed is not True or one.open]
    facts = []
    for one in unlike[:FEW]:
        facts.append(Fact(WORDS[one.passed, one.open][2:].capitalize(), said(summary, one, one.reason)))
    if summary.diagnosis is not None and not any(one.bound == "diagnosis" for one in verdicts):
        facts.append(Fact("Bug?", summary.diagnosis.headline))
    rows = [
        (
            WORDS[one.passed, one.open],
            f"{one.name} {one.must}{one.where and f', at {one.where}'}",
            found(summary, one),
        )
        for one in (verdicts if len(verdicts) > FEW else summary.gates)
    ]
    header, left = ("gate", "must hold", "found"), len(rows) - FEW
    notes: tuple[str, ...] = (f"{count(left)} more bounds: --json and --junit have all.",) if left > 0 else ()
    notes += (OPEN,) if any(one.open for one in verdicts) else ()
    tables = [Table("gates", "Every bound", header, rows[:FEW], notes)]
    if left > 0:
        tables.append(Table("every", "Every bound", header, rows[:MOST], shown="page"))
    return of_dump(summary)(
        word,
        headline(summary, verdicts),
        tone,
        facts=tuple(facts),
        tables=tuple(tables),
        charts=tuple(_stepwise(summary)),
        next=analysis(summary.dump),
        heading="offpol-diag gate",
    )


def headline(summary: Result, verdicts: Sequence[GateVerdict]) -> str:
    """Return the first bound that decided, and how many of each verdict there are."""
    kinds = [WORDS[one.passed, one.open][2:] for one in verdicts]
    each = ", ".join(f"{count(kinds.count(kind))} {kind}" for kind in dict.fromkeys(kinds))
    if not verdicts or verdicts[0].passed:
        return f"{counted(len(verdicts), 'bound')}: {each}" if verdicts else "no bound was judged"
    return said(summary, verdicts[0]) + (f" ({each})" if len(verdicts) > 1 else "")


def said(summary: Result, one: GateVerdict, reason: str = "") -> str:
    """Return what was found, the bound, and the reason: `ess_tokens is 96% [90%, 98%], must be ≥ 99%`."""
    value = found(summary, one)
    value = value if isinstance(value, str) else say(value)
    must = f"{one.name} is {value}{one.where and f' at {one.where}'}, must be {one.must}"
    return f"{must}; {reason}" if reason else must


def found(summary: Result, one: GateVerdict) -> Number | str:
    """Return the judged value, or the diagnosis; a word where it is not known."""
    if one.bound == "diagnosis":
        return plain(summary.diagnosis.verdict) if summary.diagnosis else "missing"
    value = Number(value=one.value, interval=one.interval, log10=one.log10, unit=one.unit)
    return value if value.known else "not known"


def weight(one: GateVerdict) -> int:
    """Return a sort key: failed, not judged, open, passed."""
    return {False: 0, None: 1, True: 3 - one.open}[one.passed]


def _stepwise(summary: Result) -> Iterator[Chart]:
    """Yield each number by training step against its bound."""
    steps = summary.charts.steps
    for one in summary.gates:
        name = one.name.removeprefix(STEP)
        series = steps.series.get(name) if steps and name != one.name else None
        if steps is None or series is None or len(steps.first) < 2:
            continue
        above, unit, values = one.bound == "max", series[0].unit, [number.value for number in series]
        beyond = [
            at
            for at, y in zip(steps.first, values, strict=True)
            if y is not None and (y > one.limit if above else y < one.limit)
        ]
        said = f"{name} lies {'above' if above else 'below'} {say_limit(one.limit, unit)} "
        said += f"at {len(beyond)} of {len(steps.first)} steps"
        said += f", first at step {beyond[0]}" if beyond else ""
        log = {"type": "log"} if all(y is None or y > 0 for y in values) else {}
        traces = curve((steps.first, series, "", BLUE))
        axis = SHARE if unit in FRACTIONS else log
        bounds = [level(one.limit, f"bound {one.must}")]
        panel = Panel("training step", name, traces, steps_axis(steps.first), axis, bounds)
        yield chart(re.sub(r"[^\w.]+", "_", f"step_{name}_{one.bound}"), said, panel)


NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(summary: Result) -> str:
    """Return one suite with a test for each bound, in the words of the terminal."""
    from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

    def legal(text: str) -> str:
        """Return printable text without characters that XML does not allow."""
        return NOT_XML.sub("\ufffd", printable(text))

    cases = []
    for one in summary.gates:
        case = TestCase(legal(f"{one.name} {one.must}"), classname="offpol_diag.gate")
        word, text = (
            WORDS[one.passed, one.open],
            legal(said(summary, one, one.reason)),
        )
        if one.passed is True:
            case.system_out = f"{word}: {text}"
        else:
            case.result = [(Error if one.passed is None else Failure)(text, word[2:])]
            case.result[0].text = text
        cases.append(case)
    suite, xml = TestSuite("offpol-diag gate"), JUnitXml("offpol-diag gate")
    suite.add_property("dump", legal(", ".join(summary.dump.files)))
    suite.add_property("version", legal(summary.run.version))
    suite.add_testcases(cases)  # one by one takes quadratic time
    suite.time = summary.run.seconds.get("total", 0.0)
    xml.add_testsuite(suite)
    head = '<?xml version="1.0" encoding="utf-8"?>\n'
    return head + xml.tostring().decode() + "\n"  # type: ignore[no-untyped-call, no-any-return]
