"""The answer of `check`: what a trainer logs of each step, and how its curves differ from it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING

from offpol_diag.metrics import Tone
from offpol_diag.numerals import counted, rounded
from offpol_diag.report.answer import Answer, Tile, listed
from offpol_diag.table import Table

if TYPE_CHECKING:
    from offpol_diag.check import Checked

MOST_NAMES = 4
"""Names in a list."""


def answer(found: Checked) -> Answer:
    """Return the answer: what differs and since when; without curves the numbers alone."""
    about = f"{PurePath(found.dump[0]).name if found.dump else 'a dump'}: {found.trainer}"
    steps = "the dump as one step" if found.steps == [None] else counted(len(found.steps), "step")
    numbers = tuple(table for preset in found.numbers for table in _numbers(found, preset))
    if not found.logged:
        said = f"What {found.trainer} logs of {steps}, under {listed(list(found.numbers))}"
        return Answer(about, "", said, "good", tables=numbers)
    wrong, many = found.different, counted(len(found.rows), "metric")
    tone: Tone = "bad" if wrong else "good"
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
    header = ("metric", "differs", "logged", "the dump says", "off")
    said = f"all {many} at {steps} are what the dump says, to float32"
    if wrong:
        said = f"{len(wrong)} of {many} {'differs' if len(wrong) == 1 else 'differ'}"
        starts = [row.first for row in wrong if row.first is not None]
        said += f", from step {min(starts)} on" if starts else ""
        at = "" if wrong[0].worst is None else f" at step {wrong[0].worst}"
        said += f" ({wrong[0].name} by {cells[0][-1]}{at})"
    remarks = []
    if found.unknown:
        remarks.append(f"{found.trainer} logs nothing of the name {_some(found.unknown)}.")
    if found.unmatched:
        remarks.append(f"No single curve has the name of {_some(found.unmatched)}.")
    return Answer(
        f"{about}, {found.preset}, {', '.join(PurePath(one).name for one in found.logged)}",
        "Different" if wrong else "Equal",
        said,
        tone,
        tiles=(Tile("metrics equal", f"{len(cells) - len(wrong)} of {len(cells)}", tone=tone),),
        tables=(Table("check", "Where they are furthest apart", header, cells), *numbers),
        remarks=tuple(remarks),
    )


def _numbers(found: Checked, preset: str) -> Iterator[Table]:
    """Yield what is logged under a preset: at the first, the middle and the last step, and at every one."""
    values, last = found.numbers[preset], len(found.steps) - 1
    steps = ["the dump" if step is None else f"step {step}" for step in found.steps]
    ends = sorted({0, last // 2, last})
    rows = [(name, *(_value(x[at]) for at in ends)) for name, x in values.items()]
    header = ("logged name", *(steps[at] for at in ends))
    caption = f"{found.trainer} under {preset}"
    yield Table(f"logged-{preset}", caption, header, rows, shown="more" if found.logged else "always")
    if len(ends) <= last:
        rows = [(step, name, _value(x[at])) for at, step in enumerate(steps) for name, x in values.items()]
        header = ("", "logged name", "value")
        yield Table(f"steps-{preset}", f"{caption}, step by step", header, rows, shown="more")


def _value(x: float | None) -> str:
    return "–" if x is None else f"{x:.4g}"


def _some(names: Sequence[str]) -> str:
    """Return names as a list in words, of many the first."""
    left = len(names) - MOST_NAMES
    return listed([*names[:MOST_NAMES], *([f"{left} more"] if left > 0 else [])])
