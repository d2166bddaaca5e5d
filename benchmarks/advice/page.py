"""Keeps what was measured, and writes docs/advice.md from it and from nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2

from advice import table
from advice.policies import POLICIES
from advice.regimes import BATCHES, SIZES

HERE = Path(__file__).parent
RESULTS = HERE / "results.json"
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
    parts = {
        "tuned": [row for row in rows if not row["held_out"]],
        "held out": [row for row in rows if row["held_out"]],
    }
    return _template("page").render(parts=parts, training=kept.get("training"), many=len(rows), **_shared())


def tables(rows: list[table.Row]) -> str:
    """The first table of the page, for a terminal."""
    return _template("tables").render(rows=rows, **_shared())


def _shared() -> dict[str, object]:
    return {"policies": list(POLICIES), "batches": BATCHES, "sizes": SIZES}


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
_ENVIRONMENT.filters |= {"cells": _cells}
_ENVIRONMENT.globals |= {"scores": table.scores, "blind_scores": table.blind_scores, "worst": table.worst}
