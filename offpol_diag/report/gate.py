"""The answer of `gate`: whether every bound holds, and JUnit XML, in which a bound is a test."""

from __future__ import annotations

from collections.abc import Mapping

from offpol_diag.gate import DIAGNOSIS, outcome
from offpol_diag.metrics import Tone
from offpol_diag.number import Number
from offpol_diag.numerals import count, counted, format_number
from offpol_diag.printable import printable
from offpol_diag.report.analyze import analysis, of_dump
from offpol_diag.report.answer import Answer, Fact
from offpol_diag.result import GateVerdict, Result
from offpol_diag.table import Table

HEADER, FEW = ("gate", "must hold", "found"), 16
"""Columns; most bounds, and most reasons, that are shown: a comment has 60 lines."""
TONES: Mapping[str, Tone] = {"passed": "good", "failed": "bad", "could not say": "warn"}
WORDS: Mapping[tuple[bool | None, bool], tuple[str, str]] = {
    (False, False): ("✗", "failed"),
    (None, False): ("?", "could not say"),
    (True, True): ("~", "open"),
    (True, False): ("✓", "passed"),
}
"""(passed, open) → verdict in words, the worst first."""


def answer(summary: Result) -> Answer:
    """Return the verdict, the reasons where a bound did not simply pass, the bounds, and the bug check."""
    verdicts = sorted(summary.gates, key=lambda one: [*WORDS].index((one.passed, one.open)))
    kinds = [WORDS[one.passed, one.open][1] for one in verdicts]
    each = ", ".join(f"{count(kinds.count(kind))} {kind}" for kind in dict.fromkeys(kinds))
    sentence = said(summary, verdicts[0]) + (f" ({each})" if len(verdicts) > 1 else "")
    unlike = [(one, kind) for one, kind in zip(verdicts, kinds, strict=True) if kind != "passed"]
    facts = [Fact(kind.capitalize(), said(summary, one, one.reason)) for one, kind in unlike[:FEW]]
    if summary.diagnosis is not None and not any(one.name == DIAGNOSIS for one in verdicts):
        facts.append(Fact("Bug?", summary.diagnosis.headline))
    rows = [
        (
            " ".join(WORDS[one.passed, one.open]),
            f"{one.name} {one.must}{one.where and f', at {one.where}'}",
            found(summary, one),
        )
        for one in (verdicts if len(verdicts) > FEW else summary.gates)
    ]
    left = f"{len(rows) - FEW} more bounds: --json and --junit have all." if len(rows) > FEW else ""
    note = "open: no evidence against the bound, and none for it: it passes." if "open" in kinds else ""
    return of_dump(summary)(
        outcome(verdicts).capitalize(),
        f"{counted(len(verdicts), 'bound')}: {each}" if verdicts[0].passed else sentence,
        TONES[outcome(verdicts)],
        facts=tuple(facts),
        tables=(Table("gates", "Every bound", HEADER, rows[:FEW], tuple(filter(None, (left, note)))),),
        next=analysis(summary.dump),
        heading="offpol-diag gate",
    )


def said(summary: Result, one: GateVerdict, reason: str = "") -> str:
    """Return what was found, the bound, and the reason: `ess_tokens is 96% [90%, 98%], must be ≥ 99%`."""
    value = found(summary, one)
    value = value if isinstance(value, str) else format_number(value)
    must = f"{one.name} is {value}{one.where and f' at {one.where}'}, must be {one.must}"
    return f"{must}; {reason}" if reason else must


def found(summary: Result, one: GateVerdict) -> Number | str:
    """Return the judged number, or the diagnosis; a word where it is not known."""
    if one.name == DIAGNOSIS:
        return summary.diagnosis.verdict.replace("_", " ") if summary.diagnosis else "missing"
    return one.number if one.number.known else "not known"


def junit(summary: Result) -> str:
    """Return one suite: failed is a failure, "could not say" an error, what is open the test's output."""
    from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

    cases = []
    for one in summary.gates:
        case = TestCase(printable(f"{one.name} {one.must}"), classname="offpol_diag.gate")
        text = printable(said(summary, one, one.reason))
        if one.passed is True:
            case.system_out = f"{WORDS[one.passed, one.open][1]}: {text}"
        else:
            case.result = [(Error if one.passed is None else Failure)(text)]
        cases.append(case)
    suite, xml = TestSuite("offpol-diag gate"), JUnitXml("offpol-diag gate")
    suite.add_testcases(cases)  # one by one takes quadratic time
    suite.time = summary.run.seconds.get("total", 0.0)
    xml.add_testsuite(suite)
    written: bytes = xml.tostring()  # type: ignore[no-untyped-call]
    return f'<?xml version="1.0" encoding="utf-8"?>\n{written.decode()}\n'
