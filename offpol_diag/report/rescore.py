"""The answer of `rescore`: which side is reproduced, what the other one computes, and every hypothesis."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from pathlib import PurePath

from offpol_diag.metrics import Tone
from offpol_diag.numerals import count, counted, rounded
from offpol_diag.report.answer import Answer, Fact, listed
from offpol_diag.report.words import capital
from offpol_diag.result import Outcome, Reference, Result, Side
from offpol_diag.table import Table

WORDS: Mapping[Outcome, tuple[str, Tone, str]] = {
    "same": ("BOTH REPRODUCED", "good", ""),
    "engine": ("", "bad", "Compare the configuration of both sides; the closest hypotheses are below."),
    "trainer": ("", "bad", "Compare the configuration of both sides; the closest hypotheses are below."),
    "both": (
        "BOTH SIDES",
        "bad",
        "Compare the configuration of both sides; the closest hypotheses are below.",
    ),
    "reference": (
        "NOT THE MODEL OF THIS RUN",
        "warn",
        "Give the checkpoint that sampled and scored these responses: --model.",
    ),
    "few": ("TOO LITTLE DATA", "warn", "Give a dump of at least two prompts, with their group_id."),
}
"""Outcome → a word before the sentence, its tone, and what to do where no side has a fix."""
HEADER = ("hypothesis", "tokens reproduced", "K3 left", "mean |Δ|")
FIRST = 6
"""Hypotheses in the short table."""
NOISE = {"numerics", "moe_outliers"}
"""Candidates that scoring again does not tell apart: kernels and routing are others there too."""
TRIANGLE = """\
trainer ── {trainer:^8} ── reference
       \\                  /
       {apart:<8}   {engine:>8}
           \\          /
              engine"""


def answer(summary: Result, found: Reference) -> Answer:
    """Return the answer."""
    word, tone, todo = WORDS[found.verdict]
    name = PurePath(found.written or (summary.dump.files or ["dump"])[0]).name
    size = f"{counted(found.sequences, 'sequence')}, {counted(found.tokens, 'token')}, {count(found.groups)}"
    odd = _odd(found)
    facts = [Fact(capital(name), explained(name, side)) for name, side in odd]
    fixes = [side.fix.format(side=name) for name, side in odd if side.fix]
    facts += [Fact("What to do", one) for one in fixes or filter(None, (todo,))]
    facts.append(Fact("Rests on", f"{capital(found.rests_on)}: else it may turn round."))
    if found.small:
        facts.append(Fact("Too small", f"Change less than could be told here: {', '.join(found.small)}."))
    if found.missing:
        facts.append(
            Fact("Not testable", "; ".join(f"{one}: {why}" for one, why in found.missing.items()) + ".")
        )
    sides = {"trainer": found.trainer.distance, "engine": found.engine.distance, "apart": found.apart}
    drawn = TRIANGLE.format(**{side: rounded(value) for side, value in sides.items()})
    again = f"offpol-diag analyze {shlex.quote(found.written or '')}"
    return Answer(
        f"{name}: {size} prompts, scored by {found.model}",
        word,
        capital(found.headline),
        tone,
        more=f"Given {found.rests_on}.",
        facts=tuple(facts),
        tables=tuple(one for one in _tables(found) if one.rows),
        code=(("Mean |Δ| of a token, nats", drawn),),
        next=(("analyze", again),) if found.written else (),
        remarks=(
            f"bf16 alone changes {rounded(found.floor)} nats a token of this model. {found.how}.",
            *found.notes,
        ),
    )


def _odd(found: Reference) -> list[tuple[str, Side]]:
    sides = (("engine", found.engine), ("trainer", found.trainer))
    return [(name, side) for name, side in sides if side.state != "same"] if found.odd else []


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
    also = f" {capital(listed(side.alike))} would fit as well." if side.alike else ""
    return f"The {name}'s numbers are those of {side.meaning}{part}; {how}.{also}"


def _tables(found: Reference) -> Iterator[Table]:
    """Yield the nearest hypotheses of each side, all of them, and which fits each prompt best."""
    for name, side in _odd(found) or [("engine", found.engine)]:
        rows = [
            (one.name, rounded(one.share, "share"), rounded(one.k3), rounded(one.distance))
            for one in side.fits
        ]
        if found.odd:
            caption = f"Nearest to the {name}, of {len(rows)} hypotheses"
            yield Table(f"hypotheses-{name}", caption, HEADER, rows[:FIRST])
        every = [(*row, one.meaning) for row, one in zip(rows, side.fits, strict=True)]
        header, caption = (*HEADER, "what it means"), f"Every hypothesis against the {name}"
        yield Table(f"hypotheses-{name}-all", caption, header, every, shown="more")
        caption = f"Hypotheses by prompt ({name})"
        yield Table(
            f"prompts-{name}", caption, ("fits best", "prompts"), [*side.groups.items()], shown="more"
        )


def reproduced(found: Reference) -> Fact:
    """Return what a dump with the reference's column says, for other answers."""
    return Fact("Reference", f"Given {found.rests_on}, {found.headline}.")


def deciding(summary: Result) -> Iterator[Fact]:
    """Yield that scoring the responses again decides between candidates, where it does."""
    open_, dump = summary.undecided, summary.dump
    if open_ is None or summary.reference is not None or {one.id for one in open_.candidates} <= NOISE:
        return
    held = {"token_ids": "token_ids" in dump.columns, "prompt_ids": bool(dump.prompts)}
    lacks = [name for name, here in held.items() if not here]
    needs = f", with {listed(lacks)} in the dump" if lacks else ""
    said = f"Scoring again with the trainer's checkpoint tells which side is off{needs}."
    yield Fact("Rescore", said)
