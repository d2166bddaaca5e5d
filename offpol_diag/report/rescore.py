"""The answer of `rescore`: which side is reproduced, what the other one computes, and the hypotheses."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath

from offpol_diag.metrics import Tone
from offpol_diag.numerals import count, counted, rounded
from offpol_diag.report.answer import Answer, Fact, listed
from offpol_diag.result import Outcome, Reference, Result, Side
from offpol_diag.table import Table

COMPARE = "Compare the configuration of both sides; the closest hypotheses are below."
CHECKPOINT = "Give the checkpoint that sampled and scored these responses: --model."
WORDS: Mapping[Outcome, tuple[str, Tone, str]] = {
    "same": ("BOTH REPRODUCED", "good", ""),
    "engine": ("", "bad", COMPARE),
    "trainer": ("", "bad", COMPARE),
    "both": ("BOTH SIDES", "bad", COMPARE),
    "reference": ("NOT THE MODEL OF THIS RUN", "warn", CHECKPOINT),
    "few": ("TOO LITTLE DATA", "warn", "Give a dump of at least two prompts, with their group_id."),
}
"""Outcome → a word before the sentence, its tone, and what to do where no side has a fix."""
FIRST = 6
"""Hypotheses in a table."""


def answer(result: Result, found: Reference) -> Answer:
    """Return the answer."""
    word, tone, todo = WORDS[found.verdict]
    file = PurePath(found.written or (result.dump.files or ["dump"])[0]).name
    size = f"{counted(found.sequences, 'sequence')}, {counted(found.tokens, 'token')}, {count(found.groups)}"
    sides = {"engine": found.engine, "trainer": found.trainer}
    odd = {name: side for name, side in sides.items() if found.odd and side.state != "same"}
    fixes = [side.fix.format(side=name) for name, side in odd.items() if side.fix] or [todo]
    facts = [(name.capitalize(), explained(name, side)) for name, side in odd.items()]
    facts += [("What to do", fix) for fix in fixes if fix]
    if found.small:
        facts.append(("Too small", f"Smaller than what can be told here: {', '.join(found.small)}."))
    if found.missing:
        facts.append(("Not testable", f"{'; '.join(map(': '.join, found.missing.items()))}."))
    rows = [(f"{name} and reference", rounded(side.distance)) for name, side in sides.items()]
    rows.append(("engine and trainer", rounded(found.apart)))
    tables = [Table("distances", "", ("between", "mean |Δ| of a token, nats"), rows)]
    for name, side in (odd or {"engine": found.engine}).items():
        fits = [
            (fit.name, rounded(fit.share, "share"), rounded(fit.k3), rounded(fit.distance))
            for fit in side.fits[:FIRST]
        ]
        header = ("hypothesis", "tokens reproduced", "K3 left", "mean |Δ|")
        nearest = Table(f"nearest-{name}", f"Hypotheses, the nearest to the {name} first", header, fits)
        tables.append(nearest if odd else replace(nearest, shown="more"))
    return Answer(
        f"{file}: {size} prompts, scored by {found.model}",
        word,
        f"{found.headline[:1].upper()}{found.headline[1:]}",
        tone,
        more=f"Given {found.rests_on}.",
        facts=tuple(Fact(label, text) for label, text in facts),
        tables=tuple(table for table in tables if table.rows),
        next=(("analyze", f"offpol-diag analyze {shlex.quote(found.written)}"),) if found.written else (),
        remarks=(f"bf16 alone changes {rounded(found.floor)} nats a token. {found.how}.", *found.notes),
    )


def explained(name: str, side: Side) -> str:
    """Return what a side computes, as far as a hypothesis says it."""
    part = f" in {rounded(side.share, 'share')} of the tokens" if side.share <= 0.999 else ""
    part += f", where {side.where}" if side.where else ""
    if side.state == "unknown":
        text = f"The {name} computes something else{part}, and none of these hypotheses reproduces it."
        return f"{text} The nearest is {side.variant}."
    fit = next(fit for fit in side.fits if fit.name == side.variant)
    how = f"{rounded(fit.share, 'share')} of the tokens are as near as bf16 leaves 90% of them"
    if not side.reproduced:
        how = f"nearest by far ({side.lead:.1f} standard errors), but not to rounding"
    also = f" As well would fit {listed(side.alike)}." if side.alike else ""
    return f"The {name}'s numbers are those of {side.meaning}{part}; {how}.{also}"
