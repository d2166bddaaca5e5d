"""The recommendation with its reasons and weights, the configuration to paste, and the gate's verdicts."""

from __future__ import annotations

from offpol_diag.blocks import Block, Code, Section, Table, Text, Tone, Verdict
from offpol_diag.report.sections.answer import answer
from offpol_diag.report.sections.gate import report
from offpol_diag.report.sections.numbers import alerts
from offpol_diag.summary import Summary

TONES: dict[str, Tone] = {
    "fix the bug first": "bad",
    "no correction needed": "good",
    "METHOD at THRESHOLD": "info",
    "no method helps": "bad",
    "not enough data": "warn",
}


def verdict(summary: Summary) -> Section:
    """Return the recommendation, its evidence, the rules that held and the gates; of a bug, no ranking."""
    found, given = answer(summary), summary.recommendation
    blocks: list[Block] = []
    if given is None:
        blocks.append(Text("No recommendation was made for this dump; the numbers below stand on their own."))
    else:
        tone = "bad" if found.bug else TONES[given.decision]
        preset = (f"Preset: {found.preset}",) if found.preset else ()
        label = "Fix the bug first" if found.bug else found.action
        blocks.append(Verdict(label, found.why, tone, (*preset, *found.sure, *found.reasons)))
    if found.weights:
        names, rows = found.weights
        cells = tuple((title, *row) for title, row in rows)
        blocks.append(Table("weights", "Weights before and after", ("on this dump", *names), cells))
    if found.config:
        blocks.append(Code("The configuration, ready to paste", found.config))
    others = [] if given is None or found.bug else given.fired
    rules = [one for one in others if one not in alerts(summary) and one.rule != (given and given.rule)]
    if rules:
        held = tuple((one.rule, one.sentence, one.source or "–") for one in rules)
        blocks.append(Table("rules", "Other rules that held", ("rule", "what it says", "source"), held))
    blocks += [report(summary.gates)] if summary.gates else []
    return Section("verdict", "Verdict", tuple(blocks))
