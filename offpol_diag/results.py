"""A `Report`: what a function of Python returns, and the forms it is written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.number import Number, Numbers
from offpol_diag.result import (
    Against,
    Comparison,
    Diagnosis,
    GateVerdict,
    PresetFacts,
    Recommendation,
    Result,
    Sweep,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl


class Report:
    """A result: its numbers, verdict and recommendation, and the forms it is written in.

    Attributes:
        summary: all of it, as the JSON holds it.
    """

    def __init__(self, summary: Result, rows: Callable[[], pl.LazyFrame] | None = None) -> None:
        self.summary = summary
        self._rows = rows and cache(rows)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """Whether the mismatch is a bug, and its causes."""
        return self.summary.diagnosis

    @property
    def recommendation(self) -> Recommendation | None:
        """Which correction, at which threshold, and why; None from `sweep` and `doctor`."""
        return self.summary.recommendation

    @property
    def metrics(self) -> Numbers:
        """Numbers of the dump by name (`k3`, `drift2.k3`), each with value and interval."""
        return self.summary.whole

    @property
    def presets(self) -> dict[str, PresetFacts]:
        """What each preset does, by name; `needs` names the columns that the dump lacks for it."""
        return self.summary.presets

    def preset(self, name: str) -> Numbers:
        """Return the numbers of a preset (`ess_tokens`), each with value and interval.

        Raises:
            UsageError: the report has no such preset.
        """
        if name not in self.presets:
            hint = did_you_mean(name, list(self.presets)) or f"there are {', '.join(self.presets) or 'none'}"
            raise UsageError(f'the report has no preset "{name}"', hint)
        return self.summary.preset(name)

    @property
    def gates(self) -> list[GateVerdict]:
        """Verdicts of `gate`."""
        return self.summary.gates

    @property
    def passed(self) -> bool:
        """Whether every bound of `gate` holds."""
        from offpol_diag.gate import outcome

        return outcome(self.gates) == "passed"

    @property
    def sweep(self) -> Sweep | None:
        """The thresholds of `sweep`."""
        return self.summary.sweep

    @property
    def comparison(self) -> Comparison | list[Against] | None:
        """The result of `compare`: presets side by side, or each further run against the first."""
        return self.summary.comparison or self.summary.against or None

    def values(self) -> dict[str, float]:
        """Return every known number by its gate name: `k3`, `token_is.ess_tokens`."""
        return {key: one.value for _, key, one in _numbers(self.summary) if one.value is not None}

    def sequences(self) -> pl.LazyFrame:
        """Return a row per sequence as a lazy frame: length, ΣΔ, and what each preset keeps of it.

        It is there for reports of `analyze`: of the file that `sequences=` named, else of the dump, which is
        read again at the first call, if paths named it.

        Raises:
            UsageError: the report is of another function, or of a dump that lay in memory.
        """
        if self._rows is None:
            what = "the report holds no rows of sequences"
            raise UsageError(what, "call analyze with paths, or with sequences='rows.parquet'")
        return self._rows()

    def to_polars(self) -> pl.DataFrame:
        """Return every number as a row, with preset (null for the dump's) and interval."""
        import polars as pl

        floats, texts = ("value", "low", "high"), ("unit", "over", "formula", "unknown")
        rows = []
        for name, key, one in _numbers(self.summary):
            preset = key.removesuffix(f".{name}") if key != name else None
            low, high = one.interval or (None, None)
            rows.append((key, preset, name, one.value, low, high, *(getattr(one, text) for text in texts)))
        names = ("name", "preset", "metric", *floats, *texts)
        schema = {one: pl.Float64() if one in floats else pl.String() for one in names}
        return pl.DataFrame(rows, schema=schema, orient="row")

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the published JSON, and write it to `path` if one is given."""
        return _saved(self.summary.to_json(), path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the page, one file without links to others, and write it to `path` if one is given."""
        from offpol_diag.report.page import page

        return _saved(page(self.summary), path)

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the charts that `figure` returns: those of the page."""
        from offpol_diag.report.figures import pictures

        return tuple(pictures(self.summary))

    def figure(self, name: str) -> go.Figure:
        """Return a chart of the page as a figure of plotly, with its finding as title.

        Args:
            name: its name in `figures` ("by_step").

        Raises:
            UsageError: there is no such figure.
        """
        from offpol_diag.report.figures import figure

        return figure(self.summary, name)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the report as Markdown for a pull request, and write it to `path` if one is given."""
        from offpol_diag.report import answered
        from offpol_diag.report.markdown import markdown

        return _saved(markdown(answered(self.summary)), path)

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        from offpol_diag.report import answered
        from offpol_diag.report.terminal import terminal

        return f"Report({terminal(answered(self.summary), quiet=True).strip()})"

    def _repr_html_(self) -> str:
        """Return the terminal's screen for a notebook; `to_html` makes the page."""
        from html import escape

        from offpol_diag.report import answered
        from offpol_diag.report.terminal import terminal

        return f"<pre>{escape(terminal(answered(self.summary)))}</pre>"


# ---------------------------------------------------------------- what is written


def _numbers(summary: Result) -> Iterator[tuple[str, str, Number]]:
    """Yield metric, gate name and number of the dump and of every preset."""
    for name, one in summary.whole.items():
        yield name, name, one
    for preset in summary.presets:
        for name, one in summary.preset(preset).items():
            yield name, f"{preset}.{name}", one


def _saved(text: str, path: str | Path | None) -> str:
    if path is not None:
        if not isinstance(path, str | Path):
            raise UsageError(f"a result cannot be written to a {type(path).__name__}", "give a path")
        try:
            Path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            raise unwritable(path, error) from error
    return text


def require_writable(name: str, path: Path) -> None:
    """Check that a file can be written at a path, as far as its folder says so.

    Raises:
        UsageError: it is a directory, or its folder does not exist.
    """
    try:
        folder, there = path.is_dir(), path.parent.is_dir()
    except (OSError, ValueError) as error:
        raise unwritable(path, error) from error
    if folder:
        raise UsageError(f"{name}: {path} is a directory", "name a file in it")
    if not there:
        raise UsageError(f"{path}: its folder does not exist", f"make it first: mkdir -p {path.parent}")


def unwritable(path: str | Path, error: Exception) -> UsageError:
    """Return the error for a file that cannot be written."""
    why = getattr(error, "strerror", None) or error
    return UsageError(f"{path}: cannot be written ({why})", "choose another place")
