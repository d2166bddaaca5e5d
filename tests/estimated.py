"""Rows of candidates by hand, for tests of what is made of them."""

from __future__ import annotations

from typing import Any

from offpol_diag.candidates import CANDIDATES, NOTHING
from offpol_diag.summary import Alignment, AlignmentRow


def row(name: str = "token_tis_2.0", score: float | None = 0.0, **more: Any) -> AlignmentRow:
    """The row of a candidate on a dump with π_old; measured as expected unless said otherwise."""
    one = next(one for one in CANDIDATES if one.name == name)
    method, threshold, settings = one.named("old")
    given: dict[str, Any] = {
        "title": one.title,
        "judges": one.judges,
        "method": method,
        "threshold": threshold,
        "settings": settings,
        "kept": 1.0,
        "noise": 1.0,
        "expected": score,
        "measured": score,
        "error": None if score is None else 1e-4,
        "score": score,
    }
    return AlignmentRow(**{**given, **more})


def alignment(direction: bool = True, batch: float = 64.0, **rows: AlignmentRow | float | None) -> Alignment:
    """With all scores 0, no correction worse, but for those given (by `spoken` name)."""
    names = {spoken(one.name): one.name for one in CANDIDATES}
    found = {name: row(name) for name in names.values()} | {NOTHING.name: row(NOTHING.name, -0.1)}
    for name, said in rows.items():
        found[names[name]] = said if isinstance(said, AlignmentRow) else row(names[name], said)
    return Alignment(
        batch_sequences=batch,
        reference="token_tis_5.0",
        direction=direction,
        systematic=0.5,
        moved=0.5,
        rows=found,
    )


def spoken(name: str) -> str:
    """A candidate's name as a name in Python."""
    return name.replace(".", "_").replace("%", "")
