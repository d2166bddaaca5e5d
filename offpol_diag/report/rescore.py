"""The answer of `rescore`: which side is reproduced, what the other one computes, and every hypothesis."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath

from offpol_diag.metrics import Tone
from offpol_diag.numerals import count, counted, duration, rounded
from offpol_diag.report.answer import Answer, Fact, Line, listed
from offpol_diag.report.words import capital
from offpol_diag.result import SAMPLE, SAMPLE_TOKENS, Outcome, Reference, Result, Side
from offpol_diag.table import Table

WORDS: Mapping[Outcome, tuple[str, Tone]] = {
    "same": ("BOTH REPRODUCED", "good"),
    "engine": ("", "bad"),
    "trainer": ("", "bad"),
    "both": ("BOTH SIDES", "bad"),
    "reference": ("NOT THE MODEL OF THIS RUN", "warn"),
    "few": ("TOO LITTLE DATA", "warn"),
}
"""Outcome → a word before the sentence, and its tone."""
HEADER = ("hypothesis", "tokens reproduced", "K3 left", "mean |Δ|")
FIRST = 6
"""Hypotheses in the short table."""
MOST_NAMED = 4
PASSES, PARAMETERS, PEAK, USED = 18, 7e9, 989e12, 0.4
"""Of the estimate: passes over the sample, as with the adapter of `sample_data`; parameters of the model;
FLOP/s of an H100 in bf16, and the share of them that is assumed to be reached."""
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
    word, tone = WORDS[found.verdict]
    name = PurePath(found.written or (summary.dump.files or ["dump"])[0]).name
    some = f" of {count(whole)}" if (whole := found.groups_in_dump or 0) > found.groups else ""
    size = f"{counted(found.sequences, 'sequence')}, {counted(found.tokens, 'token')}"
    again = [("analyze", f"offpol-diag analyze {shlex.quote(found.written)}")] if found.written else []
    return Answer(
        f"{name}: {size}, {count(found.groups)}{some} prompts, scored by {found.model}",
        word,
        capital(found.headline),
        tone,
        more=f"Given {found.rests_on}.",
        facts=tuple(_facts(found)),
        tables=tuple(one for one in _tables(found) if one.rows),
        code=(("Mean |Δ| of a token, nats", triangle(found)),),
        next=tuple(again),
        remarks=(
            f"bf16 alone changes {rounded(found.floor)} nats a token of this model. {found.how}.",
            *found.notes,
        ),
    )


def triangle(found: Reference) -> str:
    """Draw the three distances."""
    sides = {"trainer": found.trainer.distance, "engine": found.engine.distance, "apart": found.apart}
    return TRIANGLE.format(**{name: rounded(value) for name, value in sides.items()})


def reproduced(found: Reference) -> Fact:
    """Return what a dump with the reference's column says, for other answers."""
    return Fact("Reference", f"Given {found.rests_on}, {found.headline}.")


def deciding(summary: Result) -> Iterator[Fact]:
    """Yield what scoring the responses again decides between candidates, and how long it takes."""
    open_, dump = summary.undecided, summary.dump
    if open_ is None or summary.reference is not None or {one.id for one in open_.candidates} <= NOISE:
        return
    tokens = round(min(dump.tokens, max(SAMPLE * dump.tokens / max(dump.groups, 1), SAMPLE_TOKENS)))
    took = PASSES * tokens * 2 * PARAMETERS / (USED * PEAK)
    held = {"token_ids": "token_ids" in dump.columns, "prompt_ids": bool(dump.prompts)}
    lacks = listed([name for name, here in held.items() if not here] or [""])
    needs = f", with {lacks} in the dump" if lacks else ""
    reckoned = (
        f"Reckoned, not measured: {PASSES} passes × {count(tokens)} tokens × 2 × {PARAMETERS / 1e9:.0f}·10⁹ "
        f"FLOP, at {USED:.0%} of {PEAK / 1e12:.0f} TFLOP/s in bf16; prompts add to it, and float32 takes 8 "
        "times as long."
    )
    yield Fact(
        "Rescore",
        f"Scoring again with the trainer's checkpoint tells which side is off{needs}: about {duration(took)} "
        "for a 7B model on one H100.",
        lines=(Line(reckoned),),
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
    also = f" {capital(listed(side.alike[:MOST_NAMED]))} would fit as well." if side.alike else ""
    return f"The {name}'s numbers are those of {side.meaning}{part}; {how}.{also}"


def _facts(found: Reference) -> Iterator[Fact]:
    odd = _odd(found)
    for name, side in odd:
        yield Fact("Cause" if len(odd) == 1 else capital(name), explained(name, side))
        if side.fix:
            yield Fact("What to do", side.fix.format(side=name))
    if found.verdict == "reference":
        yield Fact("What to do", "Give the checkpoint that sampled and scored these responses: --model.")
    elif found.verdict == "few":
        yield Fact("What to do", "Give a dump of at least two prompts, with their group_id.")
    elif odd and not any(side.fix for _, side in odd):
        yield Fact("What to do", "Compare the configuration of both sides; the closest hypotheses are below.")
    rests = f"{capital(found.rests_on)}: with another prompt or temperature it may turn round."
    yield Fact("Rests on", rests)
    if found.small:
        most = sorted(found.small.items(), key=lambda one: one[1])[:MOST_NAMED]
        said = "; ".join(f"{name} ({count(many)} tokens)" for name, many in most)
        more = f", and {len(found.small) - len(most)} more" if len(found.small) > len(most) else ""
        yield Fact("Too small", f"Change less than could be told here: {said}{more} (--sample).")
    if found.missing:
        yield Fact("Not testable", "; ".join(f"{name}: {why}" for name, why in found.missing.items()) + ".")


def _odd(found: Reference) -> list[tuple[str, Side]]:
    sides = (("engine", found.engine), ("trainer", found.trainer))
    return [(name, side) for name, side in sides if side.state != "same"] if found.odd else []


def _tables(found: Reference) -> Iterator[Table]:
    for name, side in _odd(found) or [("engine", found.engine)]:
        own = "hypotheses" if name == "engine" else f"hypotheses-{name}"
        numbers = [
            (fit.name, rounded(fit.share, "share"), rounded(fit.k3), rounded(fit.distance))
            for fit in side.fits
        ]
        short = [
            (*row, "◂" if side.state == "variant" and row[0] == side.variant else "")
            for i, row in enumerate(numbers)
            if i < FIRST or row[0] == "as given"
        ]
        if found.odd:
            yield Table(own, f"Nearest to the {name}, of {len(numbers)} hypotheses", (*HEADER, ""), short)
        every = [(*row, fit.meaning) for row, fit in zip(numbers, side.fits, strict=True)]
        title = f"Every hypothesis against the {name}"
        yield Table(f"{own}-all", title, (*HEADER, "what it means"), every, shown="more")
        title, tally = f"Hypotheses by prompt ({name})", list(side.groups.items())
        yield Table(f"prompts-{name}", title, ("fits best", "prompts"), tally, shown="more")
    missing: Sequence[tuple[str, str]] = list(found.missing.items())
    yield Table("not-testable", "Not testable here", ("hypothesis", "why"), missing, shown="page")
