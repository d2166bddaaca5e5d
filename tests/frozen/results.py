"""The cases whose results are frozen: a dump, the commands run on it, and every number that comes out.

A case is a row of `CASES`. Commands go through the command line, so that nothing inside the package is named
here. Sentences (diagnosis, recommendation, notes) are no part of a frozen result, only numbers; `seen.py`
freezes what is printed.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from typer.testing import CliRunner

from offpol_diag.cli import app
from tests import oracles
from tests.frozen.dumps import (
    Dump,
    beside_bounds,
    fingerprint,
    long_form,
    made,
    piece,
    rewarded,
    sample,
    sentinels,
    turns,
)

SKIPPED = frozenset({"run", "provenance", "diagnosis", "recommendation", "format"})
"""Keys of the JSON that are not frozen: how it was made, and conclusions from the numbers."""
COPIED = re.compile(r"worst\.\w+\.(first|positions|token_ids|log_ratios|\w+_log_probs)(\[\d+\])?")
"""Paths of copied tokens, which are not frozen either."""
LABELS = ("name", "threshold", "dropped_by")
"""Keys that identify the entries of a JSON list; the first that they have counts."""
COMMON = "--quiet --device cpu --threads 1 --seed 0"

Values = dict[str, npt.NDArray[Any]]
"""Path of an array of numbers, e.g. `numbers.preset/token_is.k3` (value, low, high, note, log10, clamped) →
[N] int64 (counts, truth values) or float64 (everything else; NaN where there is null or text)."""


@dataclass(frozen=True)
class Case:
    """A dump, and the commands whose results on it are frozen.

    Attributes:
        name: of the case and of its file of stored numbers.
        dumps: by the name that the commands use.
        commands: run in order. `{a}` is the dump of that name, `{json}` and `{sequences}` the files whose
            numbers are frozen, `{out}` a folder for files in between.
    """

    name: str
    dumps: dict[str, Dump]
    commands: tuple[str, ...]


# ---------------------------------------------------------------- cases

ANALYZE = f"analyze {{a}} --presets all --no-html --json {{json}} --sequences {{sequences}} {COMMON}"
SOME = "token_is,seq_is,seq_mis,geo_rs,slime_icepop,areal_decoupled"


def analyzed(name: str, dump: Dump, more: str = "") -> Case:
    """Make a case of `analyze` with every preset."""
    return Case(name, {"a": dump}, (f"{ANALYZE} {more}".strip(),))


CASES = (
    *(analyzed(name, sample(name), "--group-by tool_calls") for name in ("healthy", "quantized")),
    *(analyzed(name, sample(name), "--group-by tool_calls") for name in ("stale", "collapse")),
    analyzed("turns", made(turns(0.05, 1, 240)), "--group-by host"),
    analyzed("turns_outliers", made(turns(0.2, 2, 120, outliers=0.02)), "--group-by host"),
    analyzed("rollout_old", made(oracles.make_rows(0.1, 3, 120), "current_log_probs", "advantages")),
    analyzed("rollout_current", made(oracles.make_rows(0.1, 4, 120), "old_log_probs")),
    analyzed(
        "three_policies",
        made(
            oracles.make_rows(0.1, 6, 120),
            *("response_mask", "advantages", "token_ids", "sequence_id", "group_id", "step", "policy_lag"),
        ),
    ),
    analyzed("rewards", rewarded),
    analyzed("long_form", long_form),
    analyzed("far", made(oracles.make_rows(3.0, 9, 120, outliers=0.05))),
    analyzed("tiny", made(oracles.make_rows(1e-6, 10, 120))),
    analyzed("sentinels", sentinels),
    analyzed("beside_bounds", beside_bounds),
    Case(
        "merge",
        {"a": piece("stale", 0, 3), "b": piece("stale", 3, None)},
        (
            f"analyze {{a}} --presets all --no-html --tally {{out}}/a.tally.json {COMMON}",
            f"analyze {{b}} --presets all --no-html --tally {{out}}/b.tally.json {COMMON}",
            "merge {out}/a.tally.json {out}/b.tally.json --no-html --json {json} --quiet",
        ),
    ),
    Case("sweep", {"a": sample("stale")}, (f"sweep {{a}} --preset token_is --json {{json}} {COMMON}",)),
    Case(
        "sweep_keep",
        {"a": sample("quantized")},
        (f"sweep {{a}} --preset geo_rs --keep 0.9 --json {{json}} {COMMON}",),
    ),
    Case(
        "compare_presets",
        {"a": sample("quantized")},
        (f"compare {{a}} --presets {SOME} --json {{json}} {COMMON}",),
    ),
    Case(
        "compare_runs",
        {"a": sample("healthy"), "b": sample("stale")},
        (f"compare {{a}} {{b}} --presets token_is,seq_mis --json {{json}} {COMMON}",),
    ),
    Case(
        "gate",
        {"a": sample("stale"), "b": sample("healthy")},
        (
            f"analyze {{b}} --presets token_is,seq_mis --no-html --json {{out}}/base.json {COMMON}",
            "gate {a} --max k3=0.01 --max step:k3=0.01 --min p90:token_is.ess_tokens=0.9 "
            "--min median:drift2.k3=0 --min seq_mis.ess_tokens=0.5 --baseline {out}/base.json "
            f"--presets token_is,seq_mis --json {{json}} {COMMON}",
        ),
    ),
)
BY_NAME = {case.name: case for case in CASES}


# ---------------------------------------------------------------- running one


def values(case: Case, folder: Path) -> Values:
    """Run the commands of a case in an empty folder and return every number they leave.

    Raises:
        RuntimeError: a command fails.
    """
    names = {"json": folder / "result.json", "sequences": folder / "sequences.parquet", "out": folder}
    found: Values = {}
    for name, dump in case.dumps.items():
        if isinstance(dump, Path):
            names[name] = dump
            continue
        names[name] = folder / f"{name}.parquet"
        dump(names[name])
        found[f"dump.{name}.crc32"] = np.array([fingerprint(names[name])])
    for command in case.commands:
        _run([part.format(**names) for part in shlex.split(command)])
    found |= of_json(names["json"])
    if names["sequences"].exists():
        found |= of_table(names["sequences"])
    return found


def _run(arguments: list[str]) -> None:
    """Run one command in this process, without the settings of the environment."""
    unset = {name: None for name in os.environ if name.startswith(("OFFPOL_DIAG_", "GITHUB_"))}
    ran = CliRunner().invoke(app, arguments, env=unset)
    if ran.exit_code and not (arguments[0] == "gate" and isinstance(ran.exception, SystemExit)):
        raise RuntimeError(f"{shlex.join(arguments)}\n{ran.output}") from ran.exception


def of_json(path: Path) -> Values:
    """Return the numbers of a result written by `--json`."""
    return dict(_walk(json.loads(path.read_text()), ""))


def _walk(value: Any, path: str) -> Iterator[tuple[str, npt.NDArray[Any]]]:
    """Yield every number under a path; a list without lists or objects is one array."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name not in SKIPPED:
                yield from _walk(inner, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(one, list | dict) for one in value):
        for label, inner in zip(_labels(value), value, strict=True):
            yield from _walk(inner, f"{path}[{label}]")
    else:
        found = value if isinstance(value, list) else [value]
        numbers = [one if isinstance(one, int | float) else np.nan for one in found]
        if not np.isnan(numbers).all() and not COPIED.fullmatch(path):
            counts = all(isinstance(one, int) for one in numbers)
            yield path, np.array(numbers, np.int64 if counts else np.float64)


def _labels(entries: list[Any]) -> list[str]:
    """Name the entries of a list: by their own name where it is unique, else with their place."""
    name = next((one for one in LABELS if all(isinstance(e, dict) and one in e for e in entries)), None)
    names = [str(entry[name]) if name else "" for entry in entries]
    if len(set(names)) == len(names):
        return names
    return [f"{i}:{one}" if one else str(i) for i, one in enumerate(names)]


def of_table(path: Path) -> Values:
    """Return the columns of the table written by `--sequences`, without text."""
    found: Values = {}
    for name, column in zip((table := pq.read_table(path)).column_names, table.columns, strict=True):
        if pa.types.is_boolean(column.type):
            column = column.cast(pa.int64())
        if not pa.types.is_string(column.type) and column.null_count < len(column):
            whole = pa.types.is_integer(column.type) and not column.null_count
            kind = np.int64 if whole else np.float64
            found[f"sequences.{name}"] = np.asarray(column.to_numpy()).astype(kind)
    return found
