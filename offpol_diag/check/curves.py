"""Read the curves of an experiment tracker: metric name → step → value."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import polars as pl

from offpol_diag.errors import UsageError
from offpol_diag.wholefiles import read as whole

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
HINT = (
    "give the CSV export, history (JSONL, Parquet) or .wandb file of W&B, CSV, JSON or event files of "
    "TensorBoard, or CSV or JSONL with a column `step`"
)
LARGEST = 2.0**53
"""Bound on steps: beyond, JSON has no whole numbers."""
WANDB_HEAD, WANDB_BLOCK = 7, 32768
"""Bytes before the first record of a .wandb file and of each record's own header; bytes of a block."""
EVENTS = ("tensorboardX.proto.event_pb2", "tensorboard.compat.proto.event_pb2")


def read(files: Iterable[Path]) -> Curves:
    """Read files of curves, or directories of event or .wandb files; a later value at a step replaces others.

    NaN and infinities are kept, but never replace a finite value.

    Raises:
        UsageError: a file cannot be read, holds several runs, or has no step.
    """
    curves: Curves = {}
    for file in (one for given in files for one in _files(given)):
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


def _files(given: Path) -> list[Path]:
    """Return a file, or the event or .wandb files of a directory."""
    try:
        if not given.is_dir():
            return [given]
        found = [one for pattern in ("*tfevents*", "*.wandb") for one in sorted(given.rglob(pattern))]
    except (OSError, ValueError) as error:
        raise UsageError(f"{given}: cannot be read", "check its name") from error
    if not found:
        raise UsageError(f"{given}: holds no event file and no .wandb file", HINT)
    return found


# ---------------------------------------------------------------- forms of files


def _points(file: Path, data: bytes) -> Iterator[tuple[str, int, float]]:
    kind = file.suffix.lower()
    if "tfevents" in file.name:
        return _events(data)
    if kind == ".wandb":
        return _of_rows(file, _wandb_rows(data))
    if kind == ".parquet":
        return _of_rows(file, pl.read_parquet(data).iter_rows(named=True))
    text = data.decode("utf-8-sig")
    if kind in (".jsonl", ".ndjson", ".json"):
        return _of_rows(file, _json_rows(file, text))
    return _of_rows(file, _csv_rows(file, text, "\t" if kind == ".tsv" else ","))


def _csv_rows(file: Path, text: str, separator: str) -> Iterator[Row]:
    """Yield the rows of CSV or TSV, cells as text."""
    how: Any = {"infer_schema": False, "truncate_ragged_lines": True, "raise_if_empty": False}
    table = pl.read_csv(text.encode(), separator=separator, **how)
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
        curves = {"step": lower["step"], _tag(file): lower["value"]}
    for row in table.iter_rows(named=True):
        yield {metric: row[name] for metric, name in curves.items()}


def _json_rows(file: Path, text: str) -> list[Row]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        found = [json.loads(line) for line in text.splitlines() if line.strip()]
    if isinstance(found, dict) and isinstance(found.get("log_history"), list):  # trainer_state.json of TRL
        found = found["log_history"]
    if isinstance(found, dict) and all(isinstance(one, dict) for one in found.values()):  # of pandas
        places = dict.fromkeys(place for column in found.values() for place in column)
        turned = [{name: column.get(place) for name, column in found.items()} for place in places]
        found = turned if any(_step(row) for row in turned) else found
    rows = found if isinstance(found, list) else [found]
    if rows and all(isinstance(row, list) and len(row) == 3 for row in rows):  # a download of TensorBoard
        return [{"step": row[1], _tag(file): row[2]} for row in rows]
    return [dict(_flat(row)) for row in rows]


def _flat(row: Row, before: str = "") -> Iterator[tuple[str, object]]:
    for name, value in row.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield before + name, value


def _tag(file: Path) -> str:
    """Return the metric of a TensorBoard download, which is part of its name: `run-RUN-tag-METRIC.csv`."""
    return file.stem.partition("-tag-")[2] or file.stem


def _wandb_rows(data: bytes) -> Iterator[Row]:
    """Yield the history of a .wandb file: a log of records in blocks, as LevelDB's, after a header."""
    try:
        proto: Any = import_module("wandb.proto.wandb_internal_pb2")
    except ImportError as error:
        raise UsageError(".wandb files need the package wandb", f"pip install wandb, or {HINT}") from error
    at, record = WANDB_HEAD, b""
    while at + WANDB_HEAD <= len(data):
        if (room := WANDB_BLOCK - at % WANDB_BLOCK) < WANDB_HEAD:
            at += room
            continue
        _, size, part = struct.unpack_from("<IHB", data, at)  # checksum, length; 1 whole, 2 to 4 its parts
        record += data[at + WANDB_HEAD : at + WANDB_HEAD + size]
        at += WANDB_HEAD + size
        if part in (1, 4):
            history, record = proto.Record.FromString(record).history, b""
            items = (("/".join(one.nested_key) or one.key, one.value_json) for one in history.item)
            yield {name: json.loads(value) for name, value in items}


def _events(data: bytes) -> Iterator[tuple[str, int, float]]:
    """Yield the scalars of a TensorBoard event file: records of length, checksum, message, checksum."""
    proto: Any = None
    for name in EVENTS:
        with suppress(ImportError):
            proto = proto or import_module(name)
    if proto is None:
        hint = "pip install tensorboardX, or download the curves as CSV"
        raise UsageError("TensorBoard's event files need tensorboardX or tensorboard", hint)
    at = 0
    while at + 12 <= len(data):
        (size,) = struct.unpack_from("<Q", data, at)
        if at + 16 + size > len(data):  # the run still writes it
            return
        event = proto.Event.FromString(data[at + 12 : at + 12 + size])
        at += 16 + size
        for one in event.summary.value:
            if one.HasField("simple_value"):
                yield one.tag, event.step, one.simple_value
            elif one.tensor.float_val or len(one.tensor.tensor_content) == 4:
                stored = struct.unpack("<f", one.tensor.tensor_content or b"\0" * 4)
                yield one.tag, event.step, [*one.tensor.float_val, *stored][0]


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
