"""The answer of `check`: what a trainer logs of each step, and how its curves differ from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePath
from typing import TYPE_CHECKING

from offpol_diag.numerals import counted, rounded
from offpol_diag.report.answer import Answer, listed
from offpol_diag.table import Table

if TYPE_CHECKING:
    from offpol_diag.check import Checked

HEADER, MOST_NAMES = ("metric", "differs", "logged", "the dump says", "off"), 4
"""Columns of the table of differences; names in a list."""


def answer(found: Checked) -> Answer:
    """Return the answer: what differs and since when; without curves the numbers alone."""
    about = f"{PurePath(found.dump[0]).name if found.dump else 'a dump'}: {found.trainer}"
    numbers = tuple(table for preset in found.numbers for table in _numbers(found, preset))
    steps = "the dump as one step" if found.steps == [None] else counted(len(found.steps), "step")
    if not found.logged:
        said = f"What {found.trainer} logs of {steps}, under {listed(list(found.numbers))}"
        return Answer(about, "", said, "good", tables=numbers)
    wrong, many = found.different, counted(len(found.rows), "metric")
    cells = [
        (
            row.name,
            f"{row.differs} of {row.steps}, from {row.first}" if row.differs else "equal",
            "not finite" if row.logged is None else f"{row.logged:.7g}",
            f"{row.expected:.7g}",
            "–" if row.off is None else rounded(row.off, "share"),
        )
        for row in found.rows
    ]
    said = f"all {many} at {steps} are what the dump says, to float32"
    if wrong:
        starts = [row.first for row in wrong if row.first is not None]
        since = f", from step {min(starts)} on" if starts else ""
        at = "" if wrong[0].worst is None else f" at step {wrong[0].worst}"
        said = f"{len(wrong)} of {many} differ{'s' * (len(wrong) == 1)}{since}"
        said += f" ({wrong[0].name} by {cells[0][-1]}{at})"
    alone = {f"{found.trainer} logs nothing of the name": found.unknown}
    alone["No single curve has the name of"] = found.unmatched
    return Answer(
        f"{about}, {found.preset}, {', '.join(PurePath(one).name for one in found.logged)}",
        "Different" if wrong else "Equal",
        said,
        "bad" if wrong else "good",
        tables=(Table("check", "Where they are furthest apart", HEADER, cells), *numbers),
        remarks=tuple(
            f"{what} {listed(some[:MOST_NAMES])}{' and more' * (len(some) > MOST_NAMES)}."
            for what, some in alone.items()
            if some
        ),
    )


def _numbers(found: Checked, preset: str) -> Iterator[Table]:
    """Yield what is logged under a preset: at the first, the middle and the last step, and at every one."""
    values, last = found.numbers[preset], len(found.steps) - 1
    texts = {name: ["–" if x is None else f"{x:.4g}" for x in row] for name, row in values.items()}
    steps = ["the dump" if step is None else f"step {step}" for step in found.steps]
    ends = sorted({0, last // 2, last})
    rows = [(name, *(row[at] for at in ends)) for name, row in texts.items()]
    header, caption = ("logged name", *(steps[at] for at in ends)), f"{found.trainer} under {preset}"
    yield Table(f"logged-{preset}", caption, header, rows, shown="more" if found.logged else "always")
    if len(ends) <= last:
        rows = [(step, name, row[at]) for at, step in enumerate(steps) for name, row in texts.items()]
        yield Table(f"steps-{preset}", f"{caption}, by step", ("", "name", "value"), rows, shown="more")
