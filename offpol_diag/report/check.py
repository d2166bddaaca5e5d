"""The answer of `check`: whether the curves are what the dump says, since which step not, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import PurePath

from offpol_diag.check import Checked, MetricCheck, relative_difference
from offpol_diag.metrics import Tone
from offpol_diag.numerals import count, counted, rounded
from offpol_diag.report.answer import Answer, Tile, listed
from offpol_diag.report.picture import Kind, Layer, Panel, Picture
from offpol_diag.table import Table

MOST_NAMES = 4
"""Names in a list."""
HEADER = ("metric", "differs", "logged", "the dump says", "off")


def answer(found: Checked) -> Answer:
    """Return the answer: what differs, since which step, and the worst curve."""
    word, sentence = headline(found)
    wrong, worst = found.different, _worst(found)
    tone: Tone = "bad" if wrong else "good"
    equal = len(found.metrics) - len(wrong)
    tiles = [
        Tile("metrics equal", f"{equal} of {len(found.metrics)}", tone=tone),
        Tile("steps", str(len(found.steps)), below=_ranges(found.steps)),
    ]
    if worst is not None:
        starts = [one.first for one in wrong if one.first is not None]
        tiles.append(Tile("first step that differs", str(min(starts)), tone="bad"))
        tiles.append(Tile(worst.name, _off(worst) or "–", tone="bad", below=f"off at step {worst.worst}"))
    return Answer(
        f"{PurePath(found.dump[0]).name if found.dump else 'a dump'}: {found.trainer}, {found.preset}, "
        f"{', '.join(PurePath(one).name for one in found.logged)}",
        word,
        sentence,
        tone,
        more=" ".join(not_finite(found)) if wrong else "The correction and the logging agree.",
        tiles=tuple(tiles),
        tables=tuple(_tables(found)),
        charts=(picture(worst),) if worst is not None else (),
        remarks=notes(found),
    )


def _tables(found: Checked) -> Iterator[Table]:
    """Yield what differs; all metrics stand in a table of their own."""
    equal = [one.name for one in found.metrics if not one.different]
    if found.different:
        table = _table("differ", found, found.different)
        some = (
            f"Equal: {', '.join(equal)}."
            if len(equal) <= MOST_NAMES
            else f"The other {len(equal)} are equal."
        )
        yield replace(table, notes=(some,) if equal else ())
    yield replace(_table("check", found, found.metrics), caption="Every metric", shown="more")


def headline(found: Checked) -> tuple[str, str]:
    """Return the answer: a word, and a sentence."""
    if found.equal:
        many = "the only metric" if len(found.metrics) == 1 else f"all {len(found.metrics)} metrics"
        said = f"{many} at {_steps(found)} {'is' if len(found.metrics) == 1 else 'are'} what the dump says"
        return "Equal", f"{said}, to float32 ({found.trainer} with {found.preset})"
    wrong, worst = found.different, _worst(found)
    start = min(one.first for one in wrong if one.first is not None)
    many = f"{len(wrong)} of {counted(len(found.metrics), 'metric')}"
    said = f"{many} {'differs' if len(wrong) == 1 else 'differ'} "
    said += f"at step {start}" if found.steps == [start] else f"from step {start} on"
    if worst is not None and (off := _off(worst)):
        said += f" ({worst.name} by {off} at step {worst.worst})"
    return "Different", said


def not_finite(found: Checked) -> tuple[str, ...]:
    """Return where logged values are not finite."""
    odd = [one for one in found.different if one.not_finite]
    return tuple(f"{one.name} is NaN or infinite at {_ranges(one.not_finite)}." for one in odd[:MOST_NAMES])


def notes(found: Checked) -> tuple[str, ...]:
    """Return how the comparison was made, and what was not compared."""
    lines = []
    if found.chosen:
        most = f"Of {found.trainer}'s presets {found.preset} reproduces the most"
        lines.append(f"{most}; --preset names another.")
    if found.shift:
        by, at = abs(found.shift), found.steps[0]
        how = f"{'one' if by == 1 else count(by)} {'higher' if found.shift > 0 else 'lower'}"
        lines.append(
            f"Numbering differs: the curves count every step {how} than the dump, whose step {at} is their "
            f"{at + found.shift}. Steps here are the dump's."
        )
    if found.missing:
        lines.append(f"No curve has a point at {_ranges(found.missing)}, which the dump has.")
    if found.ambiguous:
        several = (f"{name} ({', '.join(curves)})" for name, curves in found.ambiguous.items())
        lines.append(f"Not compared, as several curves may be it: {'; '.join(several)}.")
    if found.unmatched:
        lines.append(f"No curve holds {_some(found.unmatched)}.")
    if found.unknown:
        lines.append(f"{found.trainer} logs nothing of the name {_some(found.unknown)}.")
    return tuple(lines)


def _table(name: str, found: Checked, rows: Sequence[MetricCheck]) -> Table:
    """Return a row per metric, with both values at its worst step."""
    cells = []
    for one in sorted(rows, key=_weight, reverse=True):
        at = one.at(one.worst)
        many = f"{len(one.different)} of {len(one.points)}, from {one.first}" if one.different else "equal"
        logged = "not finite" if at.logged is None else f"{at.logged:.7g}"
        cells.append((one.name, many, logged, f"{at.expected:.7g}", _off(one) or "–"))
    caption = f"Values at the step where they are furthest apart, of {_steps(found)}"
    return Table(name, caption, HEADER, tuple(cells))


def picture(one: MetricCheck) -> Picture:
    """Return a metric's logged curve beside the dump's, and the difference."""
    steps = tuple(float(point.step) for point in one.points)
    kind: Kind = "line" if len(steps) > 1 else "points"
    expected = Layer(
        "the dump says", steps, [p.expected for p in one.points], "blue", kind, dashed=True, at=0
    )
    logged = Layer("logged", steps, [p.logged for p in one.points], "orange", kind)
    gaps = [None if p.logged is None else p.logged - p.expected for p in one.points]
    off = Layer("", steps, gaps, "slate", "points")
    panels = (
        Panel("training step", one.name, (expected, logged)),
        Panel("training step", "logged − dump", (off,), levels=((0.0, ""),)),
    )
    at = one.at(one.worst)
    said = "not finite" if at.logged is None else f"{at.logged:.4g}"
    finding = f"{one.name} is {said} at step {at.step} where the dump says {at.expected:.4g}"
    return Picture(f"check-{one.name.replace('/', '-')}", "", finding, "", panels)


def _weight(one: MetricCheck) -> tuple[bool, bool, float]:
    """Order metrics: what differs, means before extremes, the furthest apart first."""
    far = relative_difference(one.at(one.worst))
    return bool(one.different), not one.extreme and math.isfinite(far), far


def _worst(found: Checked) -> MetricCheck | None:
    """Return the mean whose curves are furthest apart, relative to the range of both."""

    def weight(one: MetricCheck) -> tuple[object, ...]:
        logged = [p.logged for p in one.points if p.logged is not None]
        values = [*logged, *(p.expected for p in one.points)]
        gaps = [abs(p.logged - p.expected) for p in one.points if p.logged is not None]
        span = max(values) - min(values)
        return *_weight(one)[:2], max(gaps, default=0.0) / span if span else 0.0, _weight(one)[2]

    return max(found.different, key=weight, default=None)


def _off(one: MetricCheck) -> str:
    """Return the largest difference, relative to the dump's value; empty where there is none to say."""
    at = one.at(one.worst)
    if not one.different or at.logged is None or not at.expected:
        return ""
    times = abs(at.logged / at.expected)
    if times > 10:
        return f"{times:,.0f} times" if times < 1e9 else ""
    return rounded(abs(at.logged / at.expected - 1), "share")


def _steps(found: Checked) -> str:
    return f"{counted(len(found.steps), 'step')} ({_ranges(found.steps).partition(' ')[2]})"


def _ranges(steps: Sequence[int]) -> str:
    """Return steps in words: step 3, steps 3 to 6, steps 3, 5, 9 and 12 more."""
    if len(steps) == 1:
        return f"step {steps[0]}"
    if len(steps) > 2 and steps[-1] - steps[0] == len(steps) - 1:
        return f"steps {steps[0]} to {steps[-1]}"
    return f"steps {_some(list(map(str, steps)))}"


def _some(names: Sequence[str]) -> str:
    """Return names as a list in words, of many the first."""
    left = len(names) - MOST_NAMES
    return listed([*names[:MOST_NAMES], *([f"{left} more"] if left > 0 else [])])
