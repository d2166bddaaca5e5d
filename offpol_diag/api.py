"""The Python interface: a dump, a table or tensors in, a `Report` out.

    import offpol_diag

    report = offpol_diag.analyze("step_100.parquet", presets="token_is,seq_mis")
    report.diagnosis.headline, report.metrics["k3"].value
    report.to_html("report.html")

The functions are the commands of the same names, with the same defaults; `analyze` says what they take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from offpol_diag import wholefiles
from offpol_diag.arguments import require, require_known, require_writable, unwritable
from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.summary import (
    Against,
    Comparison,
    Diagnosis,
    GateVerdict,
    Number,
    Numbers,
    PresetResult,
    Recommendation,
    Summary,
    Sweep,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

    from offpol_diag.analyze import Examined
    from offpol_diag.check import Checked
    from offpol_diag.frames import Data
    from offpol_diag.presets import Preset

Presets: TypeAlias = "str | Preset | Sequence[str | Preset]"
Bounds: TypeAlias = Mapping[str, float]


class Report:
    """A result: its numbers, verdict and recommendation, and the forms it is written in.

    Attributes:
        summary: all of it, as the JSON holds it (docs/result.schema.json).
    """

    def __init__(self, summary: Summary, rows: Callable[[], pl.LazyFrame] | None = None) -> None:
        self.summary = summary
        self._rows = rows

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
        return self.summary.metrics

    @property
    def presets(self) -> dict[str, PresetResult]:
        """Results of the presets by name."""
        return self.summary.presets

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
        return self._sequences

    @cached_property
    def _sequences(self) -> pl.LazyFrame:
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
        from offpol_diag.report.named import Figures

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
        from offpol_diag.report.named import Figures

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


# ---------------------------------------------------------------- what is read


@contextmanager
def _sources(what: Any) -> Iterator[tuple[list[str], str]]:
    """Yield the paths to read, and a name for what lay in memory (else empty).

    What lies in memory is written to a temporary Parquet file, as the workers read files.

    Raises:
        UsageError: it is nothing that can be read.
    """
    each = list(what) if isinstance(what, list | tuple) else [what]
    if each and all(isinstance(one, str | Path) for one in each):
        yield [str(one) for one in each], ""
        return
    kind = type(what)
    label = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}".removeprefix("builtins.")
    with wholefiles.TemporaryFolder() as folder:
        file = folder.path / "table.parquet"
        if isinstance(what, Mapping):
            _write_columns(what, file)
        else:
            _write_table(what, file, label)
        try:
            yield [str(file)], f"<{label}>"
        except OffpolError as error:
            message, *details = (line.replace(str(file), f"<{label}>") for line in error.lines)
            raise type(error)(message, error.hint, details) from error


def _write_columns(columns: Mapping[str, Any], file: Path) -> None:
    """Write padded tensors [S, L] or ragged lists, under the names that a dump's columns may have."""
    from offpol_diag.readers.columns import assigned
    from offpol_diag.writer import DumpWriter

    ours = {column: role for role, column in assigned(list(columns), {}, "dict").items()}
    try:
        with DumpWriter(file, dtype="float64", journal=False) as out:
            out.write(**{ours.get(name, name): values for name, values in columns.items()})
    except (TypeError, ValueError) as slip:
        hint = "give padded tensors [S, L] with a response_mask, or one list per sequence"
        raise UsageError(f"the dict is no dump: {str(slip).removeprefix('batch 0: ')}", hint) from slip


def _write_table(what: Any, file: Path, label: str) -> None:
    """Write a pyarrow, polars or pandas table, or anything with the Arrow C stream interface."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    hint = "give paths, a pyarrow, polars or pandas table, or a dict of tensors or lists by column"
    if hasattr(what, "collect_schema") and hasattr(what, "collect"):  # a lazy frame of polars
        try:
            what = what.collect()
        except Exception as error:  # whatever a function in it raises
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise UsageError(f"the lazy frame fails: {why}", "mend it until collect() works") from error
    if not isinstance(what, pa.Table):
        if not hasattr(what, "__arrow_c_stream__"):
            raise UsageError(f"a dump cannot be read from {label}", hint)
        try:
            what = pa.table(what)
        except (pa.ArrowException, TypeError, ValueError) as error:  # one column, or values of no type
            why = next(iter(str(error).splitlines()), "")
            raise UsageError(f"a dump cannot be read from {label}: {why}", hint) from error
    try:
        pq.write_table(what, file, compression="zstd", row_group_size=1 << 14)
    except (pa.ArrowException, TypeError, ValueError) as error:  # a type that Parquet does not have
        why = next(iter(str(error).splitlines()), "")
        raise UsageError(f"a dump cannot be read from {label}: {why}", hint) from error


# ---------------------------------------------------------------- the commands


def analyze(
    what: Any,
    *,
    presets: Presets | None = None,
    trainer: str | None = None,
    sequences: Path | None = None,
    tally: Path | None = None,
    by_step: Sequence[str] = (),
    **how: Any,
) -> Report:
    """Analyse a dump: every number with its interval, the verdict, and the recommended correction.

    Args:
        what: paths (files, directories, globs, URLs) of dumps in any form; or a pyarrow, polars or pandas
            table with a row per sequence or per token; or a dict from column to padded tensors [S, L] (with a
            `response_mask`) or to one list per sequence. Column names are those of docs/dumps.md.
        presets: corrections to compute, by name ("token_is,seq_mis", "all") or as presets; all by default.
            What a trainer logs is then computed for its own presets and for what can be recommended, with
            "all" for every preset.
        trainer: whose configuration is printed with the recommendation.
        sequences: where to write a row per sequence (Parquet), which `Report.sequences` then reads.
        tally: where to write the tally, to be merged with those of other pieces.
        by_step: names of numbers, ours or as logged, to be had for every training step too.
        **how: how to read and compute, for all functions here: `columns` (ours → the dump's), `group_by`
            (not in `sweep`), `on_bad_row` ("error" or "skip"), `device` ("auto", "cpu", "cuda", "cuda:N"),
            `engine` ("local" or "ray"), `workers`, `seed`, `progress` (called as rows are done), `reading`
            (a `forms.Reading`: form, alignment, join).

    Raises:
        OffpolError: the input cannot be read, or an argument cannot be used; with a hint.
    """
    from offpol_diag.presets import catalogue

    _require("analyze", how, trainer=trainer, sequences=sequences, tally=tally, by_step=by_step)
    chosen, whose = catalogue.chosen("all" if presets is None else presets), _trainer(trainer)
    more: dict[str, Any] = {"by_step": _summed_by_step(by_step, chosen), **how}
    more |= {"every_log": presets is not None, "trainer": whose or ""}
    for name, path in {"sequences": sequences, "tally": tally}.items():
        if path is not None:
            require_writable(name, Path(path))
            more[name] = Path(path)
    with _sources(what) as (paths, label):
        found = _examine(paths, chosen, **more)
    rows: Callable[[], pl.LazyFrame] | None = None
    if sequences is not None:
        rows = partial(_scanned, Path(sequences).absolute())
    elif not label and "-" not in paths:
        again = {name: given for name, given in how.items() if name != "progress"}
        rows = partial(_read_again, [_absolute(one) for one in paths], chosen, again)
    return Report(_advised(_named("analyze", found.summary(), label), whose), rows)


def _absolute(path: str) -> str:
    """Return a path that holds in another working directory, too; a URL as it is."""
    return path if "://" in path else str(Path(path).absolute())


def doctor(what: Any, **how: Any) -> Report:
    """Say whether the mismatch is a bug, and which one; no correction is computed. See `analyze`."""
    _require("doctor", how)
    with _sources(what) as (paths, label):
        found = _examine(paths, (), **how)
    return Report(_named("doctor", found.summary(), label))


def compare(
    what: Any, other: Any = None, *, presets: Presets | None = None, against: str | None = None, **how: Any
) -> Report:
    """Compare presets on one dump, or the run of one dump (A) with that of another (B). See `analyze`.

    Args:
        what: the dump, or run A.
        other: run B, or None.
        presets: which; all by default for one dump, none for two.
        against: with one dump, the preset that the others are compared with; the first by default.
        **how: see `analyze`.
    """
    from offpol_diag.compare import lacking, of_presets, of_runs, reference
    from offpol_diag.forms import Reading, open_dump
    from offpol_diag.presets import catalogue

    _require("compare", how)
    if other is not None:
        if against is not None:
            raise UsageError("`against` names a preset, and two runs are compared", "leave it out")
        chosen = catalogue.chosen(presets or ())
        with _sources(what) as (paths, label), _sources(other) as (others, _):
            one, two = _examine(paths, chosen, **how), _examine(others, chosen, **how)
        first, second = _named("compare", one.summary(), label), two.summary()
        return Report(first.model_copy(update={"against": of_runs(one, two, first, second)}))
    chosen, base = catalogue.chosen(presets or "all"), None
    if against is not None:
        named = _one_preset(against)
        chosen, base = tuple(dict.fromkeys((*chosen, named))), named.name
    with _sources(what) as (paths, label):
        dump = open_dump(paths, reading=how.get("reading") or Reading(), columns=how.get("columns"))
        base = reference(lacking(dump.info.columns, chosen), base)
        if base is None:
            raise UsageError("the dump lacks a column for each of the presets", "name one with `columns`")
        one = _examine(paths, chosen, against=base, every_log=presets is not None, **how)
    found = _advised(_named("compare", one.summary(), label))
    return Report(found.model_copy(update={"comparison": of_presets(one, found, base)}))


def sweep(
    what: Any,
    preset: str | Preset,
    *,
    which: str | None = None,
    at: Sequence[float] | None = None,
    keep: float | None = None,
    trainer: str | None = None,
    **how: Any,
) -> Report:
    """Evaluate one preset at many thresholds. See `analyze`.

    Args:
        what: the dump.
        preset: the preset.
        which: which of its bounds moves ("weight.upper", "reject"); None for the one it is about.
        at: the thresholds, rising; None for round numbers where the data change.
        keep: solve for the bounds that keep this share.
        trainer: with `keep`, whose configuration of the bounds is printed.
        **how: see `analyze`.
    """
    from offpol_diag.sweep import SweepOptions
    from offpol_diag.sweep import sweep as swept

    _require("sweep", how, which=which, at=at, keep=keep, trainer=trainer)
    given = None if at is None else ",".join(map(str, at))
    options = SweepOptions.of(_one_preset(preset), which, given, keep, trainer)
    with _sources(what) as (paths, label):
        found = swept(paths, options, **how)
    return Report(_named("sweep", found, label))


def gate(
    what: Any,
    *,
    max: Bounds | None = None,
    min: Bounds | None = None,
    gates: Path | None = None,
    baseline: Path | None = None,
    tolerance: str | Sequence[str] = (),
    only: str | Sequence[str] = (),
    presets: str | Sequence[str] = (),
    point: bool = False,
    fail_on: str | Sequence[str] = (),
    **how: Any,
) -> Report:
    """Hold numbers against bounds, or against an earlier result; `Report.passed` is the verdict.

    What cannot be judged, such as a name that is no metric, has not passed; `Report.gates` says why.

    Args:
        what: the dump, or a `Report` to be judged as it is.
        max: name → the largest value that passes.
        min: name → the smallest value that passes.
        gates: a file of bounds (docs/ci.md).
        baseline: an earlier result (JSON): nothing may be worse by more than the tolerance.
        tolerance: how much worse is allowed: "10%", "0.001", "10% + 0.001", or "k3=5%" of one number.
        only: the numbers to compare with the baseline, and no others.
        presets: presets whose numbers are compared as well.
        point: judge the plain values, not their intervals.
        fail_on: diagnoses that fail, as every worse one does: "bug", "cannot_tell", "honest_mismatch".
        **how: see `analyze`.
    """
    from offpol_diag.gate import judged, required
    from offpol_diag.presets import catalogue
    from offpol_diag.summary import load

    texts = {"tolerance": tolerance, "only": only, "presets": presets, "fail_on": fail_on}
    _require("gate", how, max=max, min=min, gates=gates, baseline=baseline, point=point, **texts)
    gates, baseline = (None if one is None else Path(one) for one in (gates, baseline))
    asked = required(
        max=[f"{name}={value}" for name, value in (max or {}).items()],
        min=[f"{name}={value}" for name, value in (min or {}).items()],
        gates=gates,
        fail_on=[fail_on] if isinstance(fail_on, str) else fail_on,
        point=point,
        baseline=baseline,
        tolerance=[tolerance] if isinstance(tolerance, str) else tolerance,
        only=_words(only),
        presets=_words(presets),
    )
    base = load(asked.result) if asked.result else None
    if isinstance(what, Report):
        found = what.summary
    else:
        with _sources(what) as (paths, label):
            one = _examine(paths, asked.presets(catalogue.load()), by_step=asked.by_step, **how)
        found = _advised(_named("gate", one.summary(), label))
    return Report(found.model_copy(update={"gates": list(judged(found, asked, base))}))


def check(
    what: Any,
    logged: str | Path | Sequence[str | Path],
    *,
    trainer: str | None = None,
    preset: str | None = None,
    micro_batch: int | None = None,
    dp: int | None = None,
    **how: Any,
) -> Checked:
    """Compare the metrics that a trainer logged with what its dump says that they are.

    Args:
        what: the dump.
        logged: curves by step: exports of W&B or TensorBoard, JSONL, CSV.
        trainer: who logged them; by default found by the dump's provenance or the names of the curves.
        preset: the correction that ran; by default the trainer's that reproduces the most metrics.
        micro_batch: sequences of a micro-batch, where the trainer averages over those.
        dp: data-parallel ranks, where the trainer averages over those.
        **how: `columns`, `reading`, `on_bad_row`; see `analyze`.
    """
    from offpol_diag.check.verdict import check as checked

    _require("check", how, logged=logged, trainer=trainer, preset=preset, micro_batch=micro_batch, dp=dp)
    files = [Path(one) for one in ([logged] if isinstance(logged, str | Path) else logged)]
    how |= {"trainer": _trainer(trainer), "preset": preset, "micro_batch": micro_batch, "dp": dp}
    with _sources(what) as (paths, _):
        return checked(paths, files, **how)


ELSEWHERE = ("presets", "against", "by_step", "sequences", "tally", "lag_0")
"""Arguments of `examine` that the functions pass on themselves."""


def _require(function: str, how: Mapping[str, Any], **own: Any) -> None:
    """Check the arguments of a function: those that all have, `how`, and its own.

    Raises:
        UsageError: one is unknown, or has a value that it cannot have.
    """
    require(**own)
    if not how:
        return
    from inspect import signature

    from offpol_diag.analyze import examine
    from offpol_diag.check.verdict import check as checked
    from offpol_diag.forms import Reading
    from offpol_diag.sweep import sweep as swept

    others: dict[str, Callable[..., Any]] = {"check": checked, "sweep": swept}
    known = [
        one.name
        for one in signature(others.get(function, examine)).parameters.values()
        if one.kind is one.KEYWORD_ONLY
    ]
    require_known(function, how, [name for name in known if name not in ELSEWHERE])
    require(**how)
    if not isinstance(reading := how.get("reading"), Reading | None):
        raise UsageError(f"reading cannot be a {type(reading).__name__}", "give a forms.Reading, or None")


def _words(names: str | Sequence[str]) -> list[str]:
    """Return a list of names, which may be given as one text with commas."""
    return [name.strip() for name in (names.split(",") if isinstance(names, str) else names) if name.strip()]


def _trainer(name: str | None) -> str | None:
    """Return the canonical name of a trainer."""
    from offpol_diag.trainers import trainer_named

    return trainer_named(name) if name is not None else None


def _one_preset(named: Any) -> Preset:
    """Return the one preset that an argument names."""
    from offpol_diag.presets import catalogue

    found = catalogue.chosen([named])
    if len(found) != 1:
        raise UsageError(f"{named!r} names {len(found)} presets", "name one")
    return found[0]


def _summed_by_step(names: Sequence[str], presets: Sequence[Preset]) -> tuple[str, ...]:
    """Return numbers by our names.

    Raises:
        UsageError: one is no number that is summed at every step under these presets.
    """
    from offpol_diag.engine.breakdowns import is_by_step, names_by_step
    from offpol_diag.gate.aliases import ours

    found = tuple(map(ours, names))
    for said, name in zip(names, found, strict=True):
        if not is_by_step(name, presets):
            near = did_you_mean(name, names_by_step(presets))
            hint = near or "docs/metrics.md lists the names; those of a preset are PRESET.NAME"
            raise UsageError(f'by_step: "{said}" is no number that is summed by step', hint)
    return found


def _scanned(file: Path) -> pl.LazyFrame:
    """Return the rows of a file that `analyze` wrote."""
    import polars as pl

    if not file.is_file():
        raise UsageError(f"{file}: the rows of sequences are not there any more", "analyze the dump again")
    return pl.scan_parquet(file, glob=False)


def _read_again(paths: Sequence[str], presets: Sequence[Preset], how: Mapping[str, Any]) -> pl.LazyFrame:
    """Read a dump again for its rows of sequences."""
    import polars as pl

    with wholefiles.TemporaryFolder() as folder:
        file = folder.path / "rows.parquet"
        _examine(paths, presets, sequences=file, **how)
        return pl.read_parquet(file, glob=False).lazy()


def _examine(paths: Sequence[str], presets: Sequence[Preset], **how: Any) -> Examined:
    from offpol_diag.analyze import examine

    return examine(paths, presets=presets, **how)


def _named(command: str, summary: Summary, label: str) -> Summary:
    """Return a result with the name of its command, and of its source where that lay in memory."""
    run = summary.run.model_copy(update={"command": command})
    dump = summary.dump.model_copy(update={"files": [label]}) if label else summary.dump
    return summary.model_copy(update={"run": run, "dump": dump})


def _advised(summary: Summary, trainer: str | None = None) -> Summary:
    """Add the recommendation, with the configuration of a trainer."""
    from offpol_diag.advice.recommend import advised
    from offpol_diag.trainers import trainer_named

    return advised(summary, trainer_named(trainer) if trainer else None)


# ---------------------------------------------------------------- what is written


def _numbers(summary: Summary) -> Iterator[tuple[str, str, Number]]:
    """Yield metric, gate name and number of the dump and of every preset."""
    for name, one in summary.metrics.items():
        yield name, name, one
    for preset, result in summary.presets.items():
        for name, one in result.metrics.items():
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
