"""The answer of `gate`: whether every bound holds, and JUnit XML, in which a bound is a test."""

from __future__ import annotations

import re
from collections.abc import Mapping

from offpol_diag.gate import DIAGNOSIS, outcome
from offpol_diag.metrics import Tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, format_number
from offpol_diag.printable import printable
from offpol_diag.report.analyze import analysis, of_dump
from offpol_diag.report.answer import Answer, Fact
from offpol_diag.result import GateVerdict, Result
from offpol_diag.table import Cell, Table

MOST = 16
"""Most bounds, and most reasons, that are shown: a comment has 60 lines."""
TONES: Mapping[str, Tone] = {"passed": "good", "failed": "bad", "could not say": "warn"}
WORDS: Mapping[tuple[bool | None, bool], tuple[str, str]] = {
    (False, False): ("✗", "failed"),
    (None, False): ("?", "could not say"),
    (True, True): ("~", "open"),
    (True, False): ("✓", "passed"),
}
"""(passed, open) → verdict in words, the worst first."""


def answer(result: Result) -> Answer:
    """Return the verdict, the reasons where a bound did not simply pass, the bounds, and the bug check."""
    verdicts = sorted(result.gates, key=lambda one: [*WORDS].index((one.passed, one.open)))
    kinds, facts, rows = list[str](), list[Fact](), list[tuple[Cell, ...]]()
    for one in verdicts:
        mark, kind = WORDS[one.passed, one.open]
        kinds.append(kind)
        where = f", at {one.where}" if one.where else ""
        rows.append((f"{mark} {kind}", f"{one.name} {one.must}{where}", judged(result, one)))
        if kind != "passed" and len(facts) < MOST:
            facts.append(Fact(kind.capitalize(), explained(result, one)))
    if result.diagnosis is not None and not any(one.name == DIAGNOSIS for one in verdicts):
        facts.append(Fact("Bug?", result.diagnosis.headline))
    counts = ", ".join(f"{count(kinds.count(kind))} {kind}" for kind in dict.fromkeys(kinds))
    sentence = f"{counted(len(rows), 'bound')}: {counts}"
    if not verdicts[0].passed:
        sentence = explained(result, verdicts[0], reason=False) + (f" ({counts})" if len(rows) > 1 else "")
    notes = [f"{len(rows) - MOST} more bounds: --json and --junit have all."] if len(rows) > MOST else []
    notes += ["open: no evidence against the bound, and none for it: it passes."] if "open" in kinds else []
    return of_dump(result)(
        outcome(verdicts).capitalize(),
        sentence,
        TONES[outcome(verdicts)],
        facts=tuple(facts),
        tables=(Table("gates", "Every bound", ("gate", "must hold", "found"), rows[:MOST], tuple(notes)),),
        next=analysis(result.dump),
        heading="offpol-diag gate",
    )


def explained(result: Result, one: GateVerdict, reason: bool = True) -> str:
    """Return what was found, the bound, and the reason: `ess_tokens is 96% [90%, 98%], must be ≥ 99%`."""
    value = judged(result, one)
    text = f"{one.name} is {value if isinstance(value, str) else format_number(value)}"
    text += f"{f' at {one.where}' if one.where else ''}, must be {one.must}"
    return f"{text}; {one.reason}" if reason and one.reason else text


def judged(result: Result, one: GateVerdict) -> Number | str:
    """Return the judged number, or the diagnosis; a word where it is not known."""
    if one.name == DIAGNOSIS:
        return result.diagnosis.verdict.replace("_", " ") if result.diagnosis else "missing"
    return one.number if one.number.known else "not known"


def junit(result: Result) -> str:
    """Return one suite: failed is a failure, "could not say" an error, what is open the test's output."""
    from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

    cases = []
    for one in result.gates:
        texts = (f"{one.name} {one.must}", explained(result, one))
        name, text = (re.sub("[\ufffe\uffff]", "\ufffd", printable(one)) for one in texts)  # no XML
        case = TestCase(name, classname="offpol_diag.gate")
        if one.passed:
            case.system_out = f"{WORDS[one.passed, one.open][1]}: {text}"
        else:
            case.result = [(Error if one.passed is None else Failure)(text)]
        cases.append(case)
    suite, xml = TestSuite("offpol-diag gate"), JUnitXml("offpol-diag gate")
    suite.add_testcases(cases)  # one by one takes quadratic time
    suite.time = result.run.seconds.get("total", 0.0)
    xml.add_testsuite(suite)
    written: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return f'<?xml version="1.0" encoding="utf-8"?>\n{written.decode()}\n'
