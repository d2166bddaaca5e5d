"""The answer of `doctor --explain`: what is known of a cause, and the list of causes."""

from __future__ import annotations

from collections import defaultdict

from offpol_diag.diagnosis.cause import TRAINERS, Cause
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
    """Return what it looks like, known threads, how to confirm it, how to fix it, and what looks alike."""
    said = {
        "Looks like": [cause.looks],
        "Violates": [sentence(cause.violates)] if cause.violates else [],
        "Known from": [
            f"{', '.join(one.at)}: {one.symptom}.{f' Cause: {one.cause}.' if one.cause else ''}"
            for one in cause.threads
        ],
        "Confirm": [plain(filled(cause, cause.confirm))] if cause.confirm else [],
        **{f"In {TRAINERS[name]}": [plain(text)] for name, text in cause.settings.items()},
        "Fix": [plain(filled(cause, cause.fix))] if cause.fix else [],
        "Look-alikes": [f"{name}: {what}" for name, what in cause.apart.items()],
    }
    others = tuple(("explain", f"{EXPLAIN} {name}") for name in list(cause.apart)[:1])
    return Answer(
        f"{cause.id}: {KINDS[cause.kind]}",
        "",
        cause.title,
        "info",
        facts=tuple(
            Fact(label, "", lines=tuple(Line("- " * (len(some) > 1) + one) for one in some), spelled=True)
            for label, some in said.items()
            if some
        ),
        next=(*others, ("doctor", "offpol-diag doctor DUMP.parquet")),
        heading=cause.id,
    )


def filled(cause: Cause, text: str) -> str:
    """Return a text of a cause as a sentence, with words for what a dump would fill in."""
    return sentence(text.format_map(defaultdict(str, cause.blanks)))


def plain(text: str) -> str:
    """Return a text without the marks of code."""
    return text.replace("`", "")


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
