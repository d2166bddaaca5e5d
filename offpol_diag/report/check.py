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


def answer(found: Checked) -> Answer:
    """Return the answer: what differs and since when; without curves the numbers alone."""
    about = f"{PurePath(found.dump[0]).name if found.dump else 'a dump'}: {found.trainer}"
    numbers = tuple(table for preset in found.numbers for table in _numbers(found, preset))
    steps = "the dump as one step" if found.steps == [None] else counted(len(found.steps), "step")
    if not found.logged:
        sentence = f"What {found.trainer} logs of {steps}, under {listed(list(found.numbers))}"
        return Answer(about, "", sentence, "good", tables=numbers)
    rows = [
        (
            row.name,
            f"{row.differs} of {row.steps}, from {row.first}" if row.differs else "equal",
            "not finite" if row.logged is None else f"{row.logged:.7g}",
            f"{row.expected:.7g}",
            "–" if row.off is None else rounded(row.off, "share"),
        )
        for row in found.rows
    ]
    header, metrics = ("metric", "differs", "logged", "the dump says", "off"), counted(len(rows), "metric")
    sentence, wrong = f"all {metrics} at {steps} are what the dump says, to float32", found.different
    if wrong:
        first = [row.first for row in wrong if row.first is not None]  # none of a dump without steps
        sentence = f"{len(wrong)} of {metrics} differ{'s' * (len(wrong) == 1)}"
        sentence += f", from step {min(first)} on" if first else ""
        sentence += f" ({wrong[0].name} by {rows[0][-1]}{f' at step {wrong[0].worst}' if first else ''})"
    remarks = []
    for text, names in (
        (f"{found.trainer} logs nothing of the name", found.unknown),
        ("No single curve has the name of", found.unmatched),
    ):
        remarks += [f"{text} {listed([*names[:4], *['more'] * (len(names) > 4)])}."] if names else []
    return Answer(
        f"{about}, {found.preset}, {', '.join(PurePath(file).name for file in found.logged)}",
        "Different" if wrong else "Equal",
        sentence,
        "bad" if wrong else "good",
        tables=(Table("check", "Where they are furthest apart", header, rows), *numbers),
        remarks=tuple(remarks),
    )


def _numbers(found: Checked, preset: str) -> Iterator[Table]:
    """Yield what is logged under a preset: at the first, the middle and the last step, and at every one."""
    texts = {
        name: ["–" if value is None else f"{value:.4g}" for value in values]
        for name, values in found.numbers[preset].items()
    }
    steps = ["the dump" if step is None else f"step {step}" for step in found.steps]
    some = sorted({0, (len(steps) - 1) // 2, len(steps) - 1})
    rows = [(name, *(values[i] for i in some)) for name, values in texts.items()]
    header, caption = ("logged name", *(steps[i] for i in some)), f"{found.trainer} under {preset}"
    yield Table(f"logged-{preset}", caption, header, rows, shown="more" if found.logged else "always")
    if len(some) < len(steps):
        rows = [(step, name, values[i]) for i, step in enumerate(steps) for name, values in texts.items()]
        yield Table(f"steps-{preset}", f"{caption}, by step", ("", "name", "value"), rows, shown="more")
