"""The answer of `doctor --explain`: what is known of a cause, and the list of causes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.diagnosis.pages import KINDS, TRAINERS, Case, Page, pages
from offpol_diag.report.answer import Answer, Fact, Line
from offpol_diag.report.diagnosis import sentence
from offpol_diag.table import Table

COMMAND = "offpol-diag doctor --explain"


def explained(page: Page) -> Answer:
    """Return what is known of a cause."""
    others = tuple(("explain", f"{COMMAND} {name}") for name in list(page.alike)[:1])
    return Answer(
        f"{page.id}: {KINDS[page.kind]}",
        "",
        page.title,
        "info",
        facts=tuple(_facts(page)),
        next=(*others, ("doctor", "offpol-diag doctor DUMP.parquet")),
        heading=page.id,
    )


def _facts(page: Page) -> Iterator[Fact]:
    """Yield what it looks like, known threads, how to confirm it, how to fix it, and what looks alike."""
    yield _said("Looks like", page.looks)
    if CAUSES[page.id].violates:
        yield _said("Violates", sentence(CAUSES[page.id].violates))
    if page.cases:
        yield _said("Known from", *map(thread, page.cases))
    for key, name in TRAINERS.items():
        if key in page.confirm:
            yield _said("Confirm" if key == "any" else f"In {name}", plain(page.confirm[key]))
    yield _said("Fix", plain(page.fix))
    yield _said("Look-alikes", *(f"{name}: {what}" for name, what in page.alike.items()))


def thread(case: Case) -> str:
    """Return a public thread in a sentence."""
    cause = f" Cause: {case.cause}." if case.cause else ""
    return f"{', '.join(case.threads)}: {case.symptom}.{cause}"


def plain(text: str) -> str:
    """Return a text without the marks of code."""
    return text.replace("`", "")


def _said(label: str, *lines: str) -> Fact:
    """Return a fact that is said in full; several lines get a bullet each."""
    bullet = "- " if len(lines) > 1 else ""
    return Fact(label, "", lines=tuple(Line(f"{bullet}{one}") for one in lines), spelled=True)


def every_cause() -> Answer:
    """Return the list of causes."""
    known: Mapping[str, Page] = pages()
    rows = [(one.id, one.kind, one.title) for one in known.values()]
    table = Table("causes", "", ("cause", "kind", "what it is"), rows)
    return Answer(
        "what each looks like, how to confirm it in a trainer, and how to fix it",
        "",
        f"{len(rows)} causes of a mismatch",
        "info",
        tables=(table,),
        next=(("explain", f"{COMMAND} CAUSE"),),
    )
