"""What a page needs to draw its charts large: the script of plotly and all figures, packed until a click."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from offpol_diag.metrics import PAIRS
from offpol_diag.report import figures
from offpol_diag.report.answer import Answer
from offpol_diag.report.charts import DRIFTS, by_drift
from offpol_diag.report.embedded import digest, packed
from offpol_diag.report.picture import Picture
from offpol_diag.result import Result

Drawn = Mapping[str, Mapping[str, Picture]]
"""Id of a chart → name of a pair of policies (`DRIFTS`; "" where there is but one picture) → picture."""


def library() -> Future[tuple[str, str]]:
    """Begin to pack plotly.js, beside other work; the result is its text, packed, and its hash.

    Raises:
        OffpolError: plotly is not installed.
    """
    return _library(figures.library())


@cache
def _library(path: Path) -> Future[tuple[str, str]]:
    def read() -> tuple[str, str]:
        source = path.read_text(encoding="utf-8")
        return packed(source), digest(source)

    pool = ThreadPoolExecutor(1)
    found = pool.submit(read)
    pool.shutdown(wait=False)
    return found


def drawn(charts: Drawn) -> str:
    """Return all figures and the look that they share, as packed JSON."""
    every = {name: [_one(drift, picture) for drift, picture in some.items()] for name, some in charts.items()}
    found = {"look": figures.template(figures.PAGE)["layout"], "charts": every}
    return packed(json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def _one(drift: str, picture: Picture) -> dict[str, Any]:
    label = "total" if drift == "total" else PAIRS[DRIFTS[drift]] if drift else ""
    words = {"title": figures.escaped(picture.title), "sub": figures.escaped(picture.sub)}
    return {"drift": drift, "label": label, "file": picture.id, **words, **figures.figure(picture)}


def explored(summary: Result, answer: Answer) -> dict[str, dict[str, Picture]]:
    """Return every chart of the page; one of several pairs of policies begins with the one that is drawn."""
    evidence = [fact.chart for fact in answer.facts if fact.chart]
    shown = [*answer.charts, *evidence]
    made: dict[str, dict[str, Picture]] = {}
    taken: set[str] = set()
    for one in shown:
        if one.id not in taken:
            some = _of_runs(one, shown) or by_drift(summary, one.id)
            made[one.id] = some if len(some) > 1 and one in some.values() else {"": one}
            taken |= {one.id, *(other.id for other in made[one.id].values())}
    return made


def _of_runs(one: Picture, shown: list[Picture]) -> dict[str, Picture]:
    """Return the distributions of two runs by pair of policies."""
    names = {f"runs-{prefix}log_ratio": drift for drift, prefix in DRIFTS.items()}
    return {names[other.id]: other for other in shown if other.id in names} if one.id in names else {}


def places(charts: Drawn) -> dict[str, tuple[str, str]]:
    """Return where to find a picture by its id: its chart, and the pair of policies."""
    found: dict[str, tuple[str, str]] = {}
    for name, some in charts.items():
        for drift, one in some.items():
            found.setdefault(one.id, (name, drift))
    return found
