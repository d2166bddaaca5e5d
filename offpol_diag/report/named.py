"""The charts of a result by name, as figures of plotly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Literal

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.report import answered
from offpol_diag.report.charts import DRIFTS
from offpol_diag.report.explore import explored
from offpol_diag.report.figures import joined, palette
from offpol_diag.report.picture import Picture
from offpol_diag.result import Result

if TYPE_CHECKING:
    import plotly.graph_objects as go

    Base = Mapping[str, go.Figure]
else:
    Base = Mapping

Theme = Literal["light", "dark"]


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
        return joined(known[drift] if drift else next(iter(known.values())), palette(theme))
