"""Read the curves of an experiment tracker: metric name → step → value."""

from __future__ import annotations

import csv
import io
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from offpol_diag.errors import UsageError
from offpol_diag.wholefiles import read as whole

Curves = dict[str, dict[int, float]]
MOST = 1 << 30
"""Maximum bytes of a file of curves."""
STEPS = ("_step", "step", "global_step", "train/global_step", "training/global_step", "trainer/global_step")
"""Columns that hold the training step, in any case; the first that is there is used."""
PREFIXES = ("train", "training", "rollout_corr", "mismatch", "actor", "sampling", "rollout")
"""First parts of metric names that may be missing or differ."""
HINT = (
    "give the CSV export or JSONL history of W&B, CSV, JSON or event files of TensorBoard, or CSV or JSONL "
    "with a column `step`"
)


def read(files: Iterable[Path]) -> Curves:
    """Read files of curves; of a metric logged twice at a step the last value counts.

    Raises:
        UsageError: a file cannot be read, holds several runs, or has no step.
    """
    curves: Curves = {}
    for file in files:
        try:
            data = whole(file, MOST)
        except OSError as error:
            raise UsageError(f"{file}: cannot be read ({error.strerror})", "check its name") from error
        try:
            found = _points(file, data)
            for name, step, value in found:
                curves.setdefault(name, {})[step] = value
        except (
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
            struct.error,
            csv.Error,
        ) as error:
            raise UsageError(f"{file}: holds no curves", HINT) from error
    if not curves:
        raise UsageError("the files hold no number of any step", HINT)
    return curves


def _points(file: Path, data: bytes) -> Iterator[tuple[str, int, float]]:
    if "tfevents" in file.name:
        return _events(data)
    text = data.decode("utf-8-sig")
    if file.suffix.lower() in (".jsonl", ".ndjson", ".json"):
        return _of_rows(file, _json_rows(file, text))
    return _of_rows(file, _csv_rows(file, text))


def _csv_rows(file: Path, text: str) -> list[dict[str, object]]:
    rows = list(csv.DictReader(io.StringIO(text), strict=True))
    names = [name for name in rows[0] if name] if rows else []
    if {name.lower() for name in names} == {"wall time", "step", "value"}:  # a download of TensorBoard
        return [{"step": _get(row, "step"), tag(file): _get(row, "value")} for row in rows]
    runs: dict[str, str] = {}
    for name in names:
        run, found, metric = name.rpartition(" - ")
        if found and not metric.endswith(("__MIN", "__MAX")) and runs.setdefault(metric, run) != run:
            raise UsageError(
                f"{file}: holds {metric} of two runs, {runs[metric]} and {run}", "export one run alone"
            )
    return [
        {
            name.rpartition(" - ")[2]: value
            for name, value in row.items()
            if name and not name.endswith(("__MIN", "__MAX"))
        }
        for row in rows
    ]


def _json_rows(file: Path, text: str) -> list[dict[str, object]]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    rows = found if isinstance(found, list) else [found]
    if rows and all(isinstance(row, list) and len(row) == 3 for row in rows):  # a download of TensorBoard
        return [{"step": row[1], tag(file): row[2]} for row in rows]
    return [dict(_flat(row)) for row in rows]


def _flat(row: Mapping[str, object], before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value


def _get(row: Mapping[str, object], lower: str) -> object:
    return next((value for name, value in row.items() if name and name.lower() == lower), None)


def tag(file: Path) -> str:
    """Return the metric of a TensorBoard download, which is part of its name: `run-RUN-tag-METRIC.csv`."""
    return file.stem.partition("-tag-")[2] or file.stem


def _of_rows(file: Path, rows: Iterable[Mapping[str, object]]) -> Iterator[tuple[str, int, float]]:
    rows = list(rows)
    every = {name.lower() for row in rows for name in row}
    which = next((name for name in STEPS if name in every), None)
    if which is None:
        raise UsageError(f"{file}: has no column of steps", f"name it one of {', '.join(STEPS)}")
    for row in rows:
        step = _number(_get(row, which))
        if step is None or step != int(step):
            continue
        for name, given in row.items():
            value = _number(given)
            if name.lower() != which and value is not None:
                yield name, int(step), value


def _number(given: object) -> float | None:
    """Return a finite number, also from text; else None."""
    if isinstance(given, bool) or not isinstance(given, int | float | str):
        return None
    try:
        value = float(given)
    except (ValueError, OverflowError):
        return None
    return value if math.isfinite(value) else None


def _events(data: bytes) -> Iterator[tuple[str, int, float]]:
    """Yield the scalars of a TensorBoard event file: records of length, checksum, message, checksum."""
    try:
        from tensorboardX.proto.event_pb2 import Event
    except ImportError:
        try:
            from tensorboard.compat.proto.event_pb2 import Event
        except ImportError as error:
            hint = "pip install tensorboardX, or download the curves as CSV"
            raise UsageError("TensorBoard's event files need tensorboardX or tensorboard", hint) from error
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if at + 16 + size > len(data):  # the run still writes it
            return
        event = Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size
        for one in event.summary.value:
            value = one.simple_value
            if one.HasField("tensor"):
                values = one.tensor.float_val
                value = values[0] if len(values) else struct.unpack("<f", one.tensor.tensor_content)[0]
            if math.isfinite(value):
                yield one.tag, event.step, value


def matched(curves: Curves, names: Iterable[str]) -> dict[str, str]:
    """Return logged name → the curve that holds it; names with none or several are left out."""
    found = {}
    for name in names:
        if name in curves:
            found[name] = name
            continue
        same = [one for one in curves if one.endswith(f"/{name}") or _bare(one) == _bare(name)]
        if len(same) == 1:
            found[name] = same[0]
    return found


def _bare(name: str) -> str:
    """Return a metric's name without leading prefixes; TensorBoard's file names have _ for /."""
    bare = name.replace("/", "_")
    while prefix := next((one for one in PREFIXES if bare.startswith(f"{one}_")), ""):
        bare = bare.removeprefix(f"{prefix}_")
    return bare
