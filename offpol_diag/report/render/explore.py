"""What a page needs to draw its charts large: the script of plotly and all figures, packed until a click."""

from __future__ import annotations

import base64
import gzip
import json
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

from offpol_diag.report import figures
from offpol_diag.report.picture import Picture
from offpol_diag.report.render.embedded import digest
from offpol_diag.report.sections.charts import DRIFTS
from offpol_diag.report.sections.explored import Drawn


def library() -> Future[tuple[str, str]]:
    """Begin to pack plotly.js, beside other work; the result is its text, packed, and its hash.

    Raises:
        OffpolError: plotly is not installed.
    """
    return _library(figures.library())


@cache
def _library(path: Any) -> Future[tuple[str, str]]:
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(lambda: _read(path.read_text(encoding="utf-8")))
    finally:
        pool.shutdown(wait=False)


def _read(source: str) -> tuple[str, str]:
    return packed(source), digest(source)


def packed(text: str) -> str:
    """Gzip a text, in base 64; equal texts give equal ones."""
    return base64.b64encode(gzip.compress(text.encode("utf-8", "replace"), 9, mtime=0)).decode()


def drawn(charts: Drawn) -> str:
    """Return all figures and the look that they share, as packed JSON."""
    every = {name: [_one(drift, picture) for drift, picture in some.items()] for name, some in charts.items()}
    found = {"look": figures.template(figures.PAGE)["layout"], "charts": every}
    return packed(json.dumps(found, ensure_ascii=False, allow_nan=False, separators=(",", ":")))


def _one(drift: str, picture: Picture) -> dict[str, Any]:
    label = "total" if drift == "total" else DRIFTS[drift][1] if drift else ""
    words = {"title": figures.escaped(picture.title), "sub": figures.escaped(picture.sub)}
    return {"drift": drift, "label": label, "file": picture.id, **words, **figures.figure(picture)}
