"""The answer of `doctor --explain`: what is known of a cause, and the list of causes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from offpol_diag.diagnosis.cause import TRAINERS, Cause, Thread
from offpol_diag.diagnosis.registry import CAUSES
from offpol_diag.report.answer import EXPLAIN, Answer, Fact, Line
from offpol_diag.report.words import sentence
from offpol_diag.table import Table

KINDS = {
    "logged": "a bug: the numbers are logged wrongly",
    "sampled": "a bug: tokens were sampled from another distribution than the logged one",
    "model": "a bug: the two sides compute different models",
    "weights": "a bug: the two sides hold different weights",
    "honest": "an honest mismatch",
}
"""Kind of a cause → what is said of it."""


def explained(cause: Cause) -> Answer:
    """Return what is known of a cause."""
    others = tuple(("explain", f"{EXPLAIN} {name}") for name in list(cause.apart)[:1])
    return Answer(
        f"{cause.id}: {KINDS[cause.kind]}",
        "",
        cause.title,
        "info",
        facts=tuple(_facts(cause)),
        next=(*others, ("doctor", "offpol-diag doctor DUMP.parquet")),
        heading=cause.id,
    )


def _facts(cause: Cause) -> Iterator[Fact]:
    """Yield what it looks like, known threads, how to confirm it, how to fix it, and what looks alike."""
    yield _said("Looks like", cause.looks)
    if cause.violates:
        yield _said("Violates", sentence(cause.violates))
    if cause.threads:
        yield _said("Known from", *map(thread, cause.threads))
    if cause.confirm:
        yield _said("Confirm", plain(filled(cause, cause.confirm)))
    for name, text in cause.settings.items():
        yield _said(f"In {TRAINERS[name]}", plain(text))
    if cause.fix:
        yield _said("Fix", plain(filled(cause, cause.fix)))
    yield _said("Look-alikes", *(f"{name}: {what}" for name, what in cause.apart.items()))


def filled(cause: Cause, text: str) -> str:
    """Return a text of a cause as a sentence, with words for what a dump would fill in."""
    return sentence(text.format_map(defaultdict(str, cause.blanks)))


def thread(one: Thread) -> str:
    """Return public threads about one event in a sentence."""
    came = f" Cause: {one.cause}." if one.cause else ""
    return f"{', '.join(one.at)}: {one.symptom}.{came}"


def plain(text: str) -> str:
    """Return a text without the marks of code."""
    return text.replace("`", "")


def _said(label: str, *lines: str) -> Fact:
    """Return a fact that is said in full; several lines get a bullet each."""
    bullet = "- " if len(lines) > 1 else ""
    return Fact(label, "", lines=tuple(Line(f"{bullet}{one}") for one in lines), spelled=True)


def every_cause() -> Answer:
    """Return the list of causes."""
    rows = [(one.id, one.kind, one.title) for one in CAUSES]
    return Answer(
        "what each looks like, how to confirm it in a trainer, and how to fix it",
        "",
        f"{len(rows)} causes of a mismatch",
        "info",
        tables=(Table("causes", "", ("cause", "kind", "what it is"), rows),),
        next=(("explain", f"{EXPLAIN} CAUSE"),),
    )
