"""Render the gate's verdicts as JUnit XML, which CI systems list test by test.

    passed                       a test that passed; open questions are its output
    failed                       a failure
    could not say                an error

The texts are those of the terminal.
"""

from __future__ import annotations

import re

from junitparser import Error, Failure, JUnitXml, TestCase, TestSuite

from offpol_diag.numerals import written
from offpol_diag.printable import printable
from offpol_diag.report.gate import bound, explained, found, title, word
from offpol_diag.result import GateVerdict, Result

SUITE = "offpol-diag gate"
HEAD = '<?xml version="1.0" encoding="utf-8"?>\n'
NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(summary: Result) -> str:
    """Return one suite with one test per bound."""
    suite = TestSuite(SUITE)
    suite.add_property("dump", _legal(", ".join(summary.dump.files)))
    suite.add_property("version", _legal(summary.run.version))
    suite.add_testcases([_case(verdict) for verdict in summary.gates])  # one by one takes quadratic time
    suite.time = summary.run.seconds.get("total", 0.0)
    xml = JUnitXml(SUITE)
    xml.add_testsuite(suite)
    return HEAD + xml.tostring().decode() + "\n"  # type: ignore[no-untyped-call, no-any-return]


def _case(verdict: GateVerdict) -> TestCase:
    case = TestCase(_legal(f"{title(verdict)} {bound(verdict)}"), classname="offpol_diag.gate")
    text = _legal(explained(verdict))
    if verdict.passed is True:
        case.system_out = f"{word(verdict)}: {text}"
        return case
    kind = Error if verdict.passed is None else Failure
    result = kind(text, "failed" if verdict.passed is False else "could not say")
    value, interval = written(found(verdict)) if found(verdict).known else ("none", "")
    details = (
        f"value: {value}",
        f"95% interval: {interval or 'none'}",
        f"asked by: {verdict.source or 'unknown'}",
    )
    result.text = "\n".join((text, *map(_legal, details)))
    case.result = [result]
    return case


def _legal(text: str) -> str:
    """Return printable text without characters that XML does not allow."""
    return NOT_XML.sub("\ufffd", printable(text))
