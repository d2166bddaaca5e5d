"""Reads numbers, texts and configurations out of the package, in a form that does not depend on it."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from typer.testing import CliRunner, Result

from offpol_diag.cli import app
from offpol_diag.dump.batch import joined
from offpol_diag.dump.read import open_dump
from offpol_diag.presets.catalogue import load
from offpol_diag.trainers.logged import LOGS, steps_of

ENVIRONMENT = {"COLUMNS": "80", "OFFPOL_DIAG_DEVICE": "cpu", "OFFPOL_DIAG_THREADS": "1"}
UNSET = ("OFFPOL_DIAG_", "GITHUB_", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_", "TERMINAL_WIDTH")


def run(line: str) -> Result:
    """Run a command line in this process, as in a pipe of 80 columns.

    Raises:
        RuntimeError: it ends with an error that has no exit code.
    """
    unset = {name: None for name in os.environ if name.startswith(UNSET)}
    ran = CliRunner().invoke(app, shlex.split(line), env=unset | ENVIRONMENT)
    if ran.exception and not isinstance(ran.exception, SystemExit):
        raise RuntimeError(f"{line}\n{ran.output}") from ran.exception
    return ran


# ---------------------------------------------------------------- numbers


class Number(NamedTuple):
    """A number under its subject (`dump`, `preset/token_is`, `dump@step/3`, …) and name."""

    subject: str
    name: str
    value: float
    low: float = np.nan
    high: float = np.nan


GONE = re.compile(
    r"update_|kept_length_|kept_(positive|negative)$|groups_lost$|loss_scale|positive$|negative$"
)
"""Names that are no part of what is frozen."""


def numbers(path: Path) -> Iterator[Number]:
    """Yield every number of an analysis that `--json` wrote."""
    result = json.loads(path.read_text(encoding="utf-8"))
    dump = result["dump"]
    for name in ("sequences", "tokens", "masked_tokens", "groups"):
        yield Number("dump", name, dump[name])
    for axis, one in result["axes"].items():
        for place, tokens, sequences in zip(one["places"], one["tokens"], one["sequences"], strict=True):
            yield Number(f"dump@{axis}/{place}", "tokens", tokens)
            yield Number(f"dump@{axis}/{place}", "sequences", sequences)
    for subject, found in result["numbers"].items():
        if not subject.startswith("candidate/"):
            yield from listed(subject, found)


def own_numbers(path: Path) -> Iterator[Number]:
    """Yield what the JSON of `compare`, `sweep` and `gate` has beside the numbers of an analysis."""
    result = json.loads(path.read_text(encoding="utf-8"))
    if comparison := result["comparison"]:
        for name, found in comparison["differences"].items():
            yield from listed(f"difference/{name}-{comparison['against']}", found)
        for one in comparison["drops"]:
            for unit in ("tokens", "sequences"):
                subject = f"dropped/{one['dropped_by']}-{one['kept_by']}/{unit}"
                yield Number(subject, "count", one[unit]["count"])
                yield from listed(subject, one[unit]["numbers"])
    for against in result["against"]:
        for at, column in ((3, "difference"), (4, "ratio")):
            yield from listed(f"runs/{column}", {row[0]: row[at] for row in against["contrasts"]})
    if sweep := result["sweep"]:
        for point in sweep["points"]:
            yield from listed(f"sweep/{sweep['preset']}/{point['threshold']:.9g}", point["numbers"])
        if window := sweep["window"]:
            subject = f"keep/{sweep['preset']}"
            yield from (Number(subject, name, x) for name, x in window["point"]["bounds"].items())
            yield from listed(subject, window["point"]["numbers"])
    for gate in result["gates"]:
        value = [*gate["number"], None][0]
        for name, x in (("value", value), ("limit", gate["limit"])):
            if x is not None and not GONE.search(gate["name"].rpartition(".")[2]):
                yield Number(f"gate/{gate['name']}", name, x)


def listed(subject: str, found: Mapping[str, list[Any] | None]) -> Iterator[Number]:
    """Yield the numbers of name → [value, low, high, unit, note, log10, clamped], which may end earlier."""
    for name, numbers in found.items():
        if numbers is None or GONE.search(name.rpartition(".")[2]):
            continue
        value, *more = numbers
        low, high, _, _, log10, clamped = [*more, *[None] * (6 - len(more))]
        if value is not None:
            ends = (np.nan if x is None else float(x) for x in (low, high))
            yield Number(subject, name, float(value), *ends)
        if log10 is not None:
            yield Number(subject, f"{name}.log10", float(log10))
        if clamped:
            yield Number(subject, f"{name}.clamped", clamped)


def sums(path: Path) -> Iterator[Number]:
    """Yield sums of the columns that `--sequences` wrote: Σx, Σx², and Σ(i + 1)x over rows i in order."""
    for name, column in zip((table := pq.read_table(path)).column_names, table.columns, strict=True):
        if not pa.types.is_string(column.type):
            x = column.cast(pa.float64()).fill_null(0).to_numpy()
            subject = f"sequences/{name.rpartition('.')[0]}".rstrip("/")
            for word, factor in (("sum", 1), ("squares", x), ("ordered", np.arange(1, len(x) + 1))):
                yield Number(subject, f"{name.rpartition('.')[2]}.{word}", float((x * factor).sum()))


# ---------------------------------------------------------------- texts


def text(line: str, markdown: Path) -> str:
    """Run a command line; return its exit code, stderr, stdout and Markdown; long numbers are cut.

    Raises:
        RuntimeError: it writes no result.
    """
    ran = run(f"{line} --md {markdown} --json result.json")
    if not markdown.exists():
        raise RuntimeError(f"{line}\n{ran.output}")
    parts = {"stderr": ran.stderr, "stdout": ran.stdout, "Markdown": markdown.read_text(encoding="utf-8")}
    found = f"$ offpol-diag {line}\nexit code {ran.exit_code}\n"
    found += "".join(f"\n======== {title}\n{part}" for title, part in parts.items() if part)
    return re.sub(r"\d+\.\d{5}\d+", lambda number: f"{float(number[0]):.7g}…", found)


# ---------------------------------------------------------------- trainers


def printed(method: str, trainer: str) -> str | None:
    """Return a method's configuration as it is printed; None if the trainer cannot express it."""
    ran = run(f"presets {method} --for {trainer}")
    return ran.stdout if ran.exit_code == 0 else None


def logged(path: Path, pairs: Iterable[tuple[str, str]], step: int | None = None) -> Iterator[Number]:
    """Yield what trainers log of a dump, or of one step of it, under methods: pairs of method and log."""
    table = pq.read_table(path)
    if step is not None:
        table = table.filter(pc.equal(table["step"], step))
    with TemporaryDirectory() as folder:
        pq.write_table(table, part := Path(folder, path.name))
        dump = open_dump([str(part)])
        batch = joined([*dump.batches()])
    known, where = load(), "" if step is None else f"@step/{step}"
    logs = {method: [log for one, log in dict.fromkeys(pairs) if one == method] for method, _ in pairs}
    for one in steps_of(batch, [known[method] for method in logs], dump.columns):
        for log in logs[one.preset.name]:
            for word, x in LOGS[log](one).items():
                yield Number(f"logged/{one.preset.name}/{log}{where}", word, x if np.isfinite(x) else np.nan)
