"""Keeps what was measured, and writes docs/advice.md from it and from nothing else."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

from benchmarks.advice import table
from benchmarks.advice.methods import NAMES
from benchmarks.advice.policies import CHOOSING, POLICIES
from benchmarks.advice.regimes import BATCHES, SIZES

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
PARTS = {"tuned": False, "held out": True}
SHOWN = (
    *CHOOSING,
    "always token TIS 2",
    "always none",
    "always IcePop 0.5–5",
    "verl's guide, by severity",
)
DOCS = HERE.parents[1] / "docs" / "advice.md"


def keep(name: str, found: object) -> None:
    """Put one part in place of its last: `regimes`, or `training`."""
    kept = results() | {name: found}
    RESULTS.write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def results() -> dict[str, Any]:
    """What is kept."""
    return dict(json.loads(RESULTS.read_text(encoding="utf-8"))) if RESULTS.exists() else {}


def write() -> None:
    """Write the page."""
    DOCS.write_text(text(results()), encoding="utf-8")


def text(kept: dict[str, Any]) -> str:
    """The page."""
    rows = kept["regimes"]
    parts = {name: [row for row in rows if row["held_out"] is which] for name, which in PARTS.items()}
    return _template("page").render(
        parts=parts, training=kept.get("training"), many=len(rows), worst_many=16, shown=SHOWN, **_shared()
    )


def tables(rows: list[table.Row]) -> str:
    """The first table of the page, for a terminal."""
    return _template("tables").render(rows=rows, **_shared())


def _shared() -> dict[str, object]:
    return {"policies": list(POLICIES), "batches": BATCHES, "sizes": SIZES, "methods": len(NAMES)}


def _known(rows: list[table.Row]) -> str:
    """The median of the best alignments in batches of 256."""
    return f"{statistics.median(row['best']['256'][1] for row in rows):.2f}"


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f}"


def _apart(both: tuple[list[float], list[float]]) -> str:
    """Mean difference ± its standard error over pairs."""
    apart = [one - other for one, other in zip(*both, strict=True)]
    return f"{statistics.mean(apart):+.3f} ± {statistics.stdev(apart) / math.sqrt(len(apart)):.3f}"


def _cells(values: Iterable[float]) -> str:
    """Mean / 5th percentile, or a dash."""
    found = [*values]
    if not found:
        return "–"
    said = table.told(found)
    return f"{said['mean']:.3f} / {said['p5']:.3f}"


def _template(name: str) -> jinja2.Template:
    return _ENVIRONMENT.get_template(f"{name}.md.j2")


_ENVIRONMENT = jinja2.Environment(
    loader=jinja2.FileSystemLoader(HERE),
    undefined=jinja2.StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"cells": _cells, "known": _known, "mean": _mean, "apart": _apart}
_ENVIRONMENT.globals |= {"scores": table.scores, "blind_scores": table.blind_scores, "worst": table.worst}
