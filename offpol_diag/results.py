"""A `Report`: what a function of Python returns, and the forms it is written in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

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

    from offpol_diag.frames import Data


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
    def comparison(self) -> Comparison | Against | None:
        """The result of `compare`: presets side by side, or run A against run B."""
        return self.summary.comparison or self.summary.against

    def values(self) -> dict[str, float]:
        """Return every known number by its gate name: `k3`, `token_is.ess_tokens`."""
        return {key: one.value for _, key, one in _numbers(self.summary) if one.value is not None}

    @property
    def tables(self) -> tuple[str, ...]:
        """Names of the tables that `to_polars` returns: those of the page."""
        return tuple(self._tables)

    @cached_property
    def _tables(self) -> dict[str, Data]:
        from offpol_diag.report.tables import tables

        return tables(self.summary)

    def sequences(self) -> pl.LazyFrame:
        """Return a row per sequence as a lazy frame: length, ΣΔ, and what each preset keeps of it.

        It is there for reports of `analyze`: of the file that `sequences=` named, else of the dump, which is
        read again at the first call, if paths named it.

        Raises:
            UsageError: the report is of another function, or of a dump that lay in memory or came by stdin.
        """
        if self._rows is None:
            what = "the report holds no rows of sequences"
            raise UsageError(what, "call analyze with paths, or with sequences='rows.parquet'")
        return self._rows()

    def to_polars(self, name: str | None = None) -> pl.DataFrame:
        """Return a table of the page by its name in `tables`, at full precision; without one all numbers.

        A number NAME of a table has its interval in NAME_low and NAME_high, where it has one. All numbers are
        a row each, with preset (null for the dump's) and interval.

        Raises:
            UsageError: there is no such table.
        """
        import polars as pl

        if name is not None:
            from offpol_diag.frames import chosen

            return chosen(self._tables, name)
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

    def to_html(self, path: str | Path | None = None, *, explore: bool = True) -> str:
        """Return the page, one file without links to others, and write it to `path` if one is given.

        Args:
            path: where to write it.
            explore: whether the page carries plotly (2 MB), to draw its charts large.
        """
        from offpol_diag.report.page import page

        return _saved(page(self.summary, explore), path)

    @property
    def figures(self) -> Mapping[str, go.Figure]:
        """The charts of the page by name, as figures of plotly, each made when it is asked for."""
        from offpol_diag.report.explore import Figures

        return Figures(self.summary)

    def figure(
        self, name: str, *, drift: str | None = None, theme: Literal["light", "dark"] = "light"
    ) -> go.Figure:
        """Return a chart of the page as a figure of plotly, with its finding as title.

        Args:
            name: its name in `figures` ("by_step").
            drift: the pair of policies, where the result has the numbers: "rollout_old", "old_current" or
                "total" (rollout → current); by default the one that the page draws.
            theme: "light" or "dark".

        Raises:
            UsageError: there is no such figure, or not of that drift.
        """
        from offpol_diag.report.explore import Figures

        return Figures(self.summary).make(name, drift, theme)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the report as Markdown for a pull request, and write it to `path` if one is given."""
        from offpol_diag.report import answered
        from offpol_diag.report.markdown import markdown

        return _saved(markdown(answered(self.summary)), path)

    def log_to(
        self,
        run: Any,
        step: int | None = None,
        prefix: str = "offpol/",
        figures: bool | Sequence[str] = True,
    ) -> None:
        """Log every known number to an experiment tracker, and the charts to those that take figures.

        W&B gets figures of plotly, MLflow HTML artifacts of them, trackio HTML.

        Args:
            run: a W&B or trackio run, or anything with `log(dict, step=)`; `mlflow`, or anything with
                `log_metrics(dict, step=)`; a TensorBoard `SummaryWriter`, or anything with
                `add_scalar(name, value, step)`.
            step: the training step.
            prefix: precedes each name.
            figures: which charts, by their names in `figures`; all, or none.

        Raises:
            UsageError: `run` has none of these methods, or there is no such figure.
        """
        found: dict[str, Any] = {f"{prefix}{name}": value for name, value in self.values().items()}
        tracker = getattr(run, "__name__", type(run).__module__).partition(".")[0]
        if hasattr(run, "add_scalar"):
            for name, value in found.items():
                run.add_scalar(name, value, step)
        elif hasattr(run, "log_metrics"):
            made = self._chosen(figures) if tracker == "mlflow" else {}
            run.log_metrics(found, step=step)
            for name, figure in made.items():
                run.log_figure(figure, f"{prefix}{name}{'' if step is None else f'_{step}'}.html")
        elif hasattr(run, "log"):
            made = self._chosen(figures) if tracker in ("wandb", "trackio") else {}
            found |= {f"{prefix}{name}": _taken(tracker, figure) for name, figure in made.items()}
            run.log(found, step=step)
        else:
            kind = f"{type(run).__name__} has no log, log_metrics or add_scalar"
            raise UsageError(kind, "give a W&B or trackio run, mlflow, or a SummaryWriter")

    def _chosen(self, names: bool | Sequence[str]) -> dict[str, go.Figure]:
        """Return figures by name."""
        every, chosen = self.figures, [names] if isinstance(names, str) else names
        return {name: every[name] for name in (every if chosen is True else chosen or ())}

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


def _taken(tracker: str, figure: go.Figure) -> Any:
    """Return a figure as a tracker takes it: W&B as it is, trackio as HTML."""
    if tracker == "wandb":
        return figure
    import trackio

    return trackio.Html(figure)


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
