"""Read the curves of an experiment tracker: metric name → step → value."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from offpol_diag.errors import UsageError
from offpol_diag.files import read as whole

Curves = dict[str, dict[int, float]]
Row = Mapping[str, object]
MOST = 1 << 28
"""Maximum bytes of a file of curves."""
STEPS = (
    *("training/global_step", "train/global_step", "trainer/global_step", "global_step"),
    *("train/step", "rollout/step", "step", "_step"),
)
"""Names of the training step, in any case; the first that a row has counts. W&B's `_step` counts calls."""
PREFIXES = ("train", "training", "rollout_corr", "mismatch", "actor", "sampling", "rollout")
"""First parts of metric names that may be missing or differ."""
OF_EVALUATION = ("eval", "val", "test")
"""Beginnings of curves that are no training metric where another one has the name."""
HINT = "export the curves as CSV, JSONL or Parquet with a column `step`, as W&B and TensorBoard do"
LARGEST = 2.0**53
"""Bound on steps: beyond, JSON has no whole numbers."""


def read(files: Iterable[Path]) -> Curves:
    """Read files of curves; a later value at a step replaces others.

    NaN and infinities are kept, but never replace a finite value.

    Raises:
        UsageError: a file cannot be read, holds several runs, or has no step.
    """
    curves: Curves = {}
    for file in files:
        try:
            for name, step, value in _points(file, whole(file, MOST)):
                points = curves.setdefault(name, {})
                odd = not math.isfinite(value) and math.isfinite(points.get(step, math.nan))
                if not odd and abs(step) < LARGEST:
                    points[step] = value
        except OSError as error:
            raise UsageError(f"{file}: cannot be read ({error.strerror or error})", HINT) from error
        except UnicodeDecodeError as error:
            raise UsageError(f"{file}: is not UTF-8 text", HINT) from error
        except UsageError:
            raise
        except MemoryError as error:
            raise UsageError(f"{file}: is too large", "export fewer metrics, or fewer steps") from error
        except (Exception, pl.exceptions.PanicException) as error:  # of damaged files
            raise UsageError(f"{file}: holds no curves", HINT) from error
    curves = {name: points for name, points in curves.items() if points}
    if not curves:
        raise UsageError("the files hold no number of any step", HINT)
    return curves


# ---------------------------------------------------------------- forms of files


def _points(file: Path, data: bytes) -> Iterator[tuple[str, int, float]]:
    match file.suffix.lower():
        case ".parquet":
            rows: Iterable[Row] = pl.read_parquet(data).iter_rows(named=True)
        case ".jsonl" | ".ndjson":
            lines = data.decode("utf-8-sig").splitlines()
            rows = (dict(_flat(json.loads(line))) for line in lines if line.strip())
        case ".csv":
            rows = _csv_rows(file, data.decode("utf-8-sig"))
        case _:
            raise UsageError(f"{file}: is no file of curves", HINT)
    return _of_rows(file, rows)


def _csv_rows(file: Path, text: str) -> Iterator[Row]:
    """Yield the rows of CSV, cells as text."""
    how: Any = {"infer_schema": False, "truncate_ragged_lines": True, "raise_if_empty": False}
    table = pl.read_csv(text.encode(), **how)
    curves, runs = {}, dict[str, str]()
    for name in filter(None, table.columns):
        run, found, metric = name.rpartition(" - ")  # of a chart of W&B
        if metric.endswith(("__MIN", "__MAX")):
            continue
        if found and runs.setdefault(metric, run) != run:
            two = f"{metric} of two runs, {runs[metric]} and {run}"
            raise UsageError(f"{file}: holds {two}", "export one run alone")
        curves[metric] = name
    lower = {name.lower(): name for name in curves}
    if lower.keys() == {"wall time", "step", "value"}:  # a download of TensorBoard
        metric = file.stem.partition("-tag-")[2] or file.stem  # `run-RUN-tag-METRIC.csv`
        curves = {"step": lower["step"], metric: lower["value"]}
    for row in table.iter_rows(named=True):
        yield {metric: row[name] for metric, name in curves.items()}


def _flat(row: Row, before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value


# ---------------------------------------------------------------- rows


def _of_rows(file: Path, rows: Iterable[Row]) -> Iterator[tuple[str, int, float]]:
    steps = 0
    for row in rows:
        if found := _step(row):
            steps += 1
            for name, given in row.items():
                value = _number(given)
                if name.lower() != found[0] and value is not None:
                    yield name, found[1], value
    if not steps:
        raise UsageError(f"{file}: has no column of steps", f"name it one of {', '.join(STEPS)}")


def _step(row: Row) -> tuple[str, int] | None:
    """Return the name of a row's step, in lower case, and the step; None where it has none."""
    numbers = {name.lower(): _number(value) for name, value in row.items() if name.lower() in STEPS}
    for name in STEPS:
        value = numbers.get(name)
        if value is not None and math.isfinite(value):
            return (name, int(value)) if value == int(value) else None
    return None


def _number(given: object) -> float | None:
    """Return a number, also from text; else None."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        return float(given)
    except (ValueError, OverflowError):
        return None


# ---------------------------------------------------------------- names


def matched(curves: Curves, names: Iterable[str]) -> tuple[dict[str, str], dict[str, list[str]]]:
    """Return logged name → the curve that holds it, and logged name → curves among which none is chosen."""
    found, several = {}, {}
    ends: dict[str, list[str]] = {}
    for one in curves:
        ends.setdefault(_bare(one), []).append(one)
    for name in names:
        same = [name] if name in curves else [one for one in curves if one.endswith(f"/{name}")]
        same = same or ends.get(_bare(name), [])
        trained = [one for one in same if not one.lower().startswith(OF_EVALUATION)]
        if len(trained or same) == 1:
            found[name] = (trained or same)[0]
        elif same:
            several[name] = same
    return found, several


def _bare(name: str) -> str:
    """Return a metric's name without leading prefixes; TensorBoard's file names have _ for /."""
    bare = name.replace("/", "_")
    while prefix := next((one for one in PREFIXES if bare.startswith(f"{one}_")), ""):
        bare = bare.removeprefix(f"{prefix}_")
    return bare
