"""The answer of `rescore`: which side is reproduced, what the other one computes, and every hypothesis."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from offpol_diag.metrics import Tone
from offpol_diag.numerals import count, counted, rounded
from offpol_diag.report.answer import Answer, Fact, listed
from offpol_diag.result import Outcome, Reference, Result, Side
from offpol_diag.table import Table

COMPARE = "Compare the configuration of both sides; the closest hypotheses are below."
WORDS: Mapping[Outcome, tuple[str, Tone, str]] = {
    "same": ("BOTH REPRODUCED", "good", ""),
    "engine": ("", "bad", COMPARE),
    "trainer": ("", "bad", COMPARE),
    "both": ("BOTH SIDES", "bad", COMPARE),
    "reference": (
        "NOT THE MODEL OF THIS RUN",
        "warn",
        "Give the checkpoint that sampled and scored these responses: --model.",
    ),
    "few": ("TOO LITTLE DATA", "warn", "Give a dump of at least two prompts, with their group_id."),
}
"""Outcome → a word before the sentence, its tone, and what to do where no side has a fix."""

FIRST = 6
"""Hypotheses in the short table."""


def answer(summary: Result, found: Reference) -> Answer:
    """Return the answer."""
    word, tone, todo = WORDS[found.verdict]
    name = PurePath(found.written or (summary.dump.files or ["dump"])[0]).name
    size = f"{counted(found.sequences, 'sequence')}, {counted(found.tokens, 'token')}, {count(found.groups)}"
    sides = {"engine": found.engine, "trainer": found.trainer}
    odd = {side: one for side, one in sides.items() if found.odd and one.state != "same"}
    fixes = [one.fix.format(side=side) for side, one in odd.items() if one.fix] or [todo]
    missing = "; ".join(f"{one}: {why}" for one, why in found.missing.items())
    said = [
        *((side.capitalize(), explained(side, one)) for side, one in odd.items()),
        *(("What to do", fix) for fix in fixes),
        ("Rests on", f"{found.rests_on[:1].upper()}{found.rests_on[1:]}: else it may turn round."),
        ("Too small", found.small and f"Change less than could be told here: {', '.join(found.small)}."),
        ("Not testable", missing and f"{missing}."),
    ]
    apart = [(f"{side} and reference", rounded(one.distance)) for side, one in sides.items()]
    apart.append(("engine and trainer", rounded(found.apart)))
    tables = [Table("distances", "", ("between", "mean |Δ| of a token, nats"), apart)]
    for side, one in (odd or {"engine": found.engine}).items():
        rows = [
            (fit.name, rounded(fit.share, "share"), rounded(fit.k3), rounded(fit.distance))
            for fit in one.fits
        ]
        header = ("hypothesis", "tokens reproduced", "K3 left", "mean |Δ|")
        nearest = Table(f"nearest-{side}", f"Nearest to the {side}", header, rows[:FIRST] if odd else [])
        every = Table(f"every-{side}", f"Every hypothesis against the {side}", header, rows, shown="more")
        tables += [one for one in (nearest, every) if one.rows]
    return Answer(
        f"{name}: {size} prompts, scored by {found.model}",
        word,
        f"{found.headline[:1].upper()}{found.headline[1:]}",
        tone,
        more=f"Given {found.rests_on}.",
        facts=tuple(Fact(label, text) for label, text in said if text),
        tables=tuple(tables),
        next=(("analyze", f"offpol-diag analyze {shlex.quote(found.written)}"),) if found.written else (),
        remarks=(
            f"bf16 alone changes {rounded(found.floor)} nats a token of this model. {found.how}.",
            *found.notes,
        ),
    )


def explained(name: str, side: Side) -> str:
    """Return what a side computes, as far as a hypothesis says it."""
    part = "" if side.share > 0.999 else f" in {rounded(side.share, 'share')} of the tokens"
    part += f", where {side.where}" if side.where else ""
    if side.state == "unknown":
        none = f"The {name} computes something else{part}, and none of these hypotheses reproduces it."
        return f"{none} The nearest is {side.variant}."
    fit = next(one for one in side.fits if one.name == side.variant)
    how = f"{rounded(fit.share, 'share')} of the tokens are as near as bf16 leaves 90% of them"
    how = how if side.reproduced else f"nearest by far ({side.lead:.1f} standard errors), but not to rounding"
    also = f" As well would fit {listed(side.alike)}." if side.alike else ""
    return f"The {name}'s numbers are those of {side.meaning}{part}; {how}.{also}"


def reproduced(found: Reference) -> Fact:
    """Return what a dump with the reference's column says, for other answers."""
    return Fact("Reference", f"Given {found.rests_on}, {found.headline}.")


def deciding(summary: Result) -> Iterator[Fact]:
    """Yield that scoring the responses again decides between candidates, where it does."""
    open_, dump = summary.undecided, summary.dump
    if open_ is None or summary.reference is not None:
        return
    lacks = [name for name in ("token_ids", "prompt_ids") if name not in dump.columns]
    needs = f", with {listed(lacks)} in the dump" if lacks else ""
    yield Fact("Rescore", f"Scoring again with the trainer's checkpoint tells which side is off{needs}.")
