"""What a trainer logs of a dump, step by step, and the curves that it did log beside it.

`numbers` computes the one, `curves` reads the other from files, and `compared` lays them side by side.
"""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from polars import selectors

from offpol_diag.dump.batch import Batch, joined
from offpol_diag.dump.read import Dump
from offpol_diag.errors import UsageError
from offpol_diag.presets import Preset
from offpol_diag.printable import printable_json
from offpol_diag.trainers import named_in, trainer_named
from offpol_diag.trainers.logged import GENERATIONS, LOGS, TRAINERS, log_of, steps_of
from offpol_diag.trainers.translate import as_numbers

ROUNDING, SMALL = 1e-5, 2e-3
"""Relative difference up to which two values are equal in float32; smaller ones count as SMALL in it."""
STEPS = (
    *("training/global_step", "train/global_step", "trainer/global_step", "global_step"),
    *("train/step", "rollout/step", "step", "_step"),
)
"""Names of the training step, in any case; the first that a file has counts. W&B's `_step` counts calls."""
HINT = "export the curves as CSV, JSONL or Parquet with a column `step`, as W&B does"
READERS: Mapping[str, Callable[[bytes], pl.DataFrame]] = {
    ".csv": lambda data: pl.read_csv(data, infer_schema=False),
    ".parquet": pl.read_parquet,
    ".jsonl": lambda data: pl.from_dicts(
        [json.loads(line) for line in data.splitlines() if line.strip()],
        strict=False,
        infer_schema_length=None,
    ),
}
"""Suffix of a file of curves → its reader; polars' own of JSON lines has no NaN."""

Curves = dict[str, dict[Any, float]]
"""Name → step → value; the step is None where a dump has none."""


@dataclass(frozen=True)
class Row:
    """One metric beside its curve, at the steps that both have."""

    name: str  # the trainer's name of it
    curve: str  # its name in the file of curves
    steps: int  # how many both have
    worst: int | None  # the step where they are furthest apart, relative to the larger
    logged: float | None  # the curve there; None where it is not finite
    expected: float  # what the dump says there
    off: float | None  # the relative difference there; None where the curve is not finite
    first: int | None  # the first step that differs
    differs: int  # how many steps differ


@dataclass(frozen=True)
class Checked:
    """What a trainer logs of a dump, and its own curves beside it."""

    trainer: str  # who logs, with the generation where what it logs has several
    steps: list[int | None]  # [None] for a dump without steps
    numbers: dict[str, dict[str, list[float | None]]]  # preset → logged name → finite value at each step
    preset: str  # the one whose numbers are beside the curves: most of them are equal
    rows: list[Row]  # metrics with a curve, those that differ first
    unmatched: list[str]  # metrics that match no curve, or several
    unknown: list[str]  # curves that are no metric of the trainer
    dump: tuple[str, ...] = ()  # files
    logged: tuple[str, ...] = ()  # files of curves
    version: str = field(default_factory=lambda: version("offpol-diag"))

    @property
    def different(self) -> list[Row]:
        """The metrics that differ at some step."""
        return [row for row in self.rows if row.differs]

    def to_json(self) -> str:
        """Return the result as JSON."""
        text = json.dumps({"format": "offpol-diag check 2", **asdict(self)}, indent=1, ensure_ascii=False)
        return f"{printable_json(text)}\n"


def who_logs(trainer: str | None, provenance: Mapping[str, Any]) -> tuple[str, str]:
    """Return the trainer, and a generation of verl: as asked, else the metadata's, else the newest.

    Raises:
        UsageError: neither says it, or what this trainer logs is not known.
    """
    given, _, generation = (trainer or named_in(provenance)).partition("@")
    name = trainer_named(given) if given else ""
    if name not in TRAINERS:
        problem = f"what {name} logs is not known" if name else "the dump does not name its trainer"
        raise UsageError(problem, f"--for one of {', '.join(TRAINERS)}")
    if generation and (name != "verl" or generation not in GENERATIONS):
        known = ", ".join(f"verl@{one}" for one in GENERATIONS)
        raise UsageError(f"{name} has no generation {generation!r}", f"there are {known}")
    versions = provenance.get("versions")
    ran = as_numbers(str(versions.get("verl", "")))[:3] if isinstance(versions, dict) else ()
    return name, generation or next(one for one, row in GENERATIONS.items() if (ran or (99,)) >= row.since)


def by_step(dump: Dump) -> Iterator[tuple[int | None, Batch]]:
    """Yield a dump a step at a time, as soon as it is whole; one without a column `step` as one."""
    if "step" not in dump.columns:
        yield None, joined([*dump.batches()])
        return
    left = Counter(step for batch in dump.batches() for step in batch.scalars["step"])
    parts = defaultdict[int, list[Batch]](list)
    for batch in dump.batches():
        for step, run in groupby(range(batch.sequences), batch.scalars["step"].__getitem__):
            rows = [*run]
            left[step] -= len(rows)
            if isinstance(step, int | float) and float(step).is_integer():
                parts[int(step)].append(batch.rows(rows[0], rows[-1] + 1))
                if not left[step]:
                    yield int(step), joined(parts.pop(int(step)))


@np.errstate(all="ignore")  # a trainer's inf and NaN are null here
def numbers(dump: Dump, presets: Sequence[Preset], trainer: str, generation: str) -> dict[str, Curves]:
    """Return preset → logged name → step → what the trainer logs, for presets whose columns the dump has."""
    found: dict[str, Curves] = {}
    for step, batch in by_step(dump):
        for under in steps_of(batch, presets, dump.columns) if batch.tokens else ():
            curves = found.setdefault(under.preset.name, {})
            for name, x in LOGS[log_of(trainer, generation, under.preset)](under).items():
                curves.setdefault(name, {})[step] = x
    return found


def curves(files: Sequence[Path]) -> Curves:
    """Read files of curves: a row per step. A later value at a step replaces others, NaN no number.

    W&B names a column `RUN - METRIC`; numbers may stand there as texts.

    Raises:
        UsageError: a file cannot be read, holds several runs, or has no step.
    """
    found: Curves = {}
    for file in files:
        try:
            table = READERS[file.suffix.lower()](file.read_bytes())
            some = (selectors.numeric() | selectors.string()) - selectors.ends_with("__MIN", "__MAX")
            table = table.select(some).cast(pl.Float64, strict=False)
            table = table.rename(lambda name: name.rpartition(" - ")[2])
        except (Exception, pl.exceptions.PanicException) as error:  # of damaged files
            raise UsageError(f"{file}: cannot be read as curves of one run", HINT) from error
        lower = {name.lower(): name for name in table.columns}
        step = next((lower[one] for one in STEPS if one in lower), "")
        at = table.filter(pl.col(step).is_finite() & (pl.col(step) % 1 == 0)) if step else table.clear()
        if at.is_empty():
            raise UsageError(f"{file}: has no column of steps", f"name it one of {', '.join(STEPS)}")
        for name in table.drop(step).columns:
            values = at.select(pl.col(step).cast(pl.Int64), name).drop_nulls()
            finite = values.filter(pl.col(name).is_finite())
            found.setdefault(name, {}).update([*values.iter_rows(), *finite.iter_rows()])
    return found


def curve_of(name: str, curves: Curves) -> str | None:
    """Return the curve of a name, or the only one that has it after a prefix: `train/sampling/x`."""
    found = [name] if name in curves else [curve for curve in curves if curve.endswith(f"/{name}")]
    return found[0] if len(found) == 1 else None


def finite(x: float | None) -> float | None:
    """Return a number that JSON has, else None."""
    return x if x is not None and math.isfinite(x) else None


def apart(logged: float, expected: float) -> float:
    """Return the relative difference; inf if the logged value is not finite."""
    if not math.isfinite(logged):
        return math.inf
    return abs(logged - expected) / max(abs(logged), abs(expected), SMALL)


def compared(expected: Curves, logged: Curves) -> list[Row]:
    """Compare what the dump says with the curves of the same names; what is furthest off comes first."""
    rows = []
    for name, points in expected.items():
        curve = curve_of(name, logged) or ""
        values = logged.get(curve, {})
        if None in points and len(values) == 1:  # a dump without steps, and a curve of one
            values = {None: next(iter(values.values()))}
        both = [step for step, x in points.items() if step in values and math.isfinite(x)]
        off = {step: apart(values[step], points[step]) for step in both}
        if off:
            wrong = [step for step, share in off.items() if share > ROUNDING]
            worst = max(off, key=off.__getitem__)
            there = finite(values[worst]), points[worst], finite(off[worst])
            rows.append(Row(name, curve, len(off), worst, *there, min(wrong, default=None), len(wrong)))
    return sorted(rows, key=lambda row: (row.differs > 0, row.off is None, row.off or 0.0), reverse=True)


def checked(found: Mapping[str, Curves], logged: Curves, trainer: str) -> Checked:
    """Return what a trainer logs under each preset, and the curves beside that which most of them equal.

    Raises:
        UsageError: curves are given, and no name or no step is in both.
    """
    of_each = {preset: compared(one, logged) for preset, one in found.items()}
    best, rows = max(of_each.items(), key=lambda one: (sum(not r.differs for r in one[1]), -len(one[1])))
    steps = sorted({step for curves in found.values() for one in curves.values() for step in one})
    if logged and not rows:
        hint = f"the dump has steps {steps[0]} to {steps[-1]}, and it logs {', '.join(found[best])}"
        raise UsageError(f"no curve has a name that {trainer} logs under {best}, at a step of the dump", hint)
    numbers = {
        preset: {name: [finite(curve.get(step)) for step in steps] for name, curve in curves.items()}
        for preset, curves in found.items()
    }
    known = {row.name for row in rows} | {row.curve for row in rows}
    unmatched = [name for name in found[best] if logged and name not in known]
    unknown = [name for name in logged if name not in known]
    return Checked(trainer, steps, numbers, best, rows, unmatched, unknown)
