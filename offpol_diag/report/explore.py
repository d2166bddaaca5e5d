"""The charts of a result as figures of plotly: packed into the page until a click, and by name for Python."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.metrics import PAIRS
from offpol_diag.report import answered, figures
from offpol_diag.report.answer import Answer
from offpol_diag.report.charts import DRIFTS, by_drift
from offpol_diag.report.embedded import digest, packed
from offpol_diag.report.picture import Picture
from offpol_diag.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

    Base = Mapping[str, go.Figure]
else:
    Base = Mapping

Theme = Literal["light", "dark"]

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


# ---------------------------------------------------------------- for Python


class UnknownFigure(UsageError, KeyError):
    """A result has no figure of this name."""

    __str__ = UsageError.__str__


class Figures(Base):
    """Name → figure, made when it is asked for."""

    def __init__(self, summary: Result) -> None:
        self._pictures: dict[str, dict[str, Picture]] = {}
        for name, some in explored(summary, answered(summary)).items():
            self._pictures.setdefault(re.sub(r"[^\w.]+", "_", name), some)

    def __getitem__(self, name: str) -> go.Figure:
        return self.make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._pictures)

    def __len__(self) -> int:
        return len(self._pictures)

    def __repr__(self) -> str:
        return f"Figures({', '.join(self)})"

    def make(self, name: str, drift: str | None = None, theme: Theme = "light") -> go.Figure:
        """Return a figure by name; see `Report.figure`."""
        if name not in self._pictures:
            hint = did_you_mean(name, list(self)) or f"there are {', '.join(self)}"
            raise UnknownFigure(f'unknown figure "{name}"', hint if len(self) else "the result has no charts")
        known = self._pictures[name]
        if drift is not None and drift not in (*known, *DRIFTS):
            hint = did_you_mean(drift, list(DRIFTS)) or f"say {', '.join(DRIFTS)}"
            raise UsageError(f'unknown drift "{drift}"', hint)
        if drift is not None and drift not in known:
            able = ", ".join(filter(None, known))
            hint = f"it can be drawn of {able}" if able else "leave out `drift`"
            raise UsageError(f'the figure "{name}" cannot be drawn of the drift "{drift}"', hint)
        if theme not in ("light", "dark"):
            raise UsageError(f'unknown theme "{theme}"', "say light or dark")
        return figures.joined(known[drift] if drift else next(iter(known.values())), figures.palette(theme))
