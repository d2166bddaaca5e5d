"""The Python interface: a dump, a table or tensors in, a `Report` out. The command line calls it too.

    import offpol_diag

    report = offpol_diag.analyze("step_100.parquet", presets="token_is,seq_mis")
    report.diagnosis.headline, report.number("k3").interval
    report.to_html("report.html")

The functions are the commands of the same names, with the same defaults; `analyze` says what they take. Text
is read as the value of an option is: `columns="rollout=vllm_logprobs"`, `group_by="host,env"`, `threads="4"`.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial, wraps
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, TypeVar, Unpack

from pydantic import BeforeValidator, ConfigDict, Field, ValidationError, validate_call
from typing_extensions import TypedDict

from offpol_diag import files
from offpol_diag.errors import OffpolError, UsageError, did_you_mean
from offpol_diag.number import Number
from offpol_diag.printable import clean, is_url
from offpol_diag.result import (
    SAMPLE,
    Against,
    Comparison,
    Diagnosis,
    GateVerdict,
    Recommendation,
    Result,
    Sweep,
    load,
)

if TYPE_CHECKING:
    import plotly.graph_objects as go
    import polars as pl

    from offpol_diag.check import Checked
    from offpol_diag.core.observe import Examined
    from offpol_diag.dump.convert import Converted
    from offpol_diag.dump.read import Dump
    from offpol_diag.presets import Preset
    from offpol_diag.presets.catalogue import Catalogue
    from offpol_diag.report.plot import Chart

    File = str | Path
    OnePreset = str | Preset
    Presets = OnePreset | Sequence[OnePreset]
else:
    File, OnePreset, Presets, Checked, Converted = Path, Any, Any, Any, Any

LOG = logging.getLogger("offpol_diag")
COLUMNS = ("name", "preset", "metric")
"""First columns of `Report.numbers`."""
P = ParamSpec("P")
R = TypeVar("R")
MOST_SEED = 2**63 - 1
LONGEST = 80
"""Most characters of a value in a message."""


# ---------------------------------------------------------------- what arguments may be


def _words(value: Any) -> Any:
    """Parse `a,b` into words; anything else stays."""
    return tuple(x.strip() for x in value.split(",") if x.strip()) if isinstance(value, str) else value


def _pairs(value: Any) -> Any:
    """Parse `a=b,c=d` into a mapping."""
    if not isinstance(value, str):
        return value
    pairs = [part.partition("=") for part in value.split(",") if part.strip()]
    for ours, sign, theirs in pairs:
        if not ours.strip() or not theirs.strip():
            raise ValueError(f'"{ours}{sign}{theirs}" names no column')
    return {ours.strip(): theirs.strip() for ours, _, theirs in pairs}


def _whole(value: Any) -> Any:
    """Parse a whole number; None is what `auto` and `all` say."""
    if isinstance(value, bool):
        return value
    if isinstance(value, str):
        return int(value) if re.fullmatch("-?[0-9]{1,20}", value) else value
    return int(value) if isinstance(value, Integral) else value


def _or_none(word: str) -> BeforeValidator:
    return BeforeValidator(lambda value: None if isinstance(value, str) and value == word else _whole(value))


def _share(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError(f"it cannot be {value}")
    return float(value) if isinstance(value, Real) else value


def _joined(value: Any) -> Any:
    several = isinstance(value, Iterable) and not isinstance(value, str | bytes | Mapping)
    return ",".join(map(str, value)) if several else value


def _several(value: Any) -> Any:
    """Return bounds or files in a tuple."""
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return tuple(f"{name}={limit}" for name, limit in value.items())
    return (value,) if isinstance(value, str | Path) and value != "" else value


def _files(value: Any) -> Any:
    """Return files in a tuple, which may not be empty; None for none."""
    found = _several(value)
    if value is not None and not (
        isinstance(found, list | tuple) and found and all(isinstance(one, str | Path) for one in found)
    ):
        raise ValueError(f"it cannot be {shown(value)}")
    return found


Names = Annotated[Sequence[str], BeforeValidator(_words)]
Pairs = Annotated[Mapping[str, str] | str | None, BeforeValidator(_pairs)]
Whole = Annotated[int, Field(strict=True)]
Count = Annotated[Annotated[Whole, Field(ge=1, le=MOST_SEED)] | None, BeforeValidator(_whole)]
Seed = Annotated[Whole, Field(ge=0, le=MOST_SEED), BeforeValidator(_whole)]
Threads = Annotated[Annotated[Whole, Field(ge=1, le=9999)] | None, _or_none("auto")]
Sample = Annotated[Annotated[Whole, Field(ge=2)] | Literal["all"] | None, _or_none("all")]
Device = Annotated[str, Field(pattern="^(auto|cpu|cuda(:[0-9]+)?)$")]
Share = Annotated[float | None, BeforeValidator(_share)]
Thresholds = Annotated[Sequence[float] | str | None, BeforeValidator(_joined)]
Bounds = Annotated[Mapping[str, float] | Sequence[str], BeforeValidator(_several)]
Files = Annotated[Any, BeforeValidator(_files)]
Progress = Callable[[int, int], None] | Literal[False] | None


class Reads(TypedDict, total=False):
    """How a dump is read.

    `columns`: our names → the dump's, `"none"` for no column. `on_bad_row`: stop, or leave such rows out.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", arbitrary_types_allowed=True)  # type: ignore[misc]
    columns: Pairs
    on_bad_row: Literal["error", "skip"]


class Computes(Reads, total=False):
    """How a dump is read, and how numbers are computed.

    `device`: auto, cpu, cuda or cuda:N. `engine`: threads of this machine, or the cluster of Ray. `threads`:
    how many, None for one per core. `seed`: of the intervals. `progress`: called with rows done and in all.
    `batch_tokens`: tokens that are computed at once. No number depends on device, engine or threads.
    """

    device: Device
    engine: Literal["local", "ray"]
    threads: Threads
    seed: Seed
    progress: Progress
    batch_tokens: Count


# ---------------------------------------------------------------- one message for a wrong argument

NAMES, BOUNDED = 'a list of names, such as ["{}"]', '{"k3": 0.002}, or --max k3=0.002'
GIVE: Mapping[str, str] = {
    "at": "thresholds, such as 1.5,2,3",
    "batch_tokens": "a whole number from 1 on",
    "by_step": NAMES.format("k3"),
    "columns": '{"rollout": "my_logps"}, or --columns rollout=my_logps; mask=none says that no column is it',
    "device": "auto, cpu, cuda or cuda:N",
    "engine": "local or ray",
    "fail_on": "bug or cannot_tell",
    "group_by": NAMES.format("host"),
    "keep": "a share, such as 0.95",
    "logged": "the path of a file or folder of curves, or several",
    "max": BOUNDED,
    "min": BOUNDED,
    "on_bad_row": "error or skip",
    "progress": "a function of rows done and rows in all, or None or False for none",
    "seed": f"a whole number from 0 to {MOST_SEED}",
    "sample": "a number of prompts from 2 on, or all",
    "which": "the name of a bound, such as weight.upper",
    "threads": "a number of threads from 1 to 9999, or auto for one per core",
}
"""Argument → what to give instead; of any other what pydantic says that it should be."""


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """Check the arguments of a function against its annotations, and refuse a wrong one by its name."""
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(function)
    own = [*inspect.signature(function).parameters][:-1]
    how = Reads if function.__name__ in ("convert", "rescore") else Computes

    @wraps(function)
    def call(*args: P.args, **given: P.kwargs) -> R:
        try:
            return validated(*args, **given)
        except ValidationError as error:
            if error.title != function.__name__:
                raise
            raise _refused(
                function.__name__, error.errors()[0], [*own, *how.__annotations__], given
            ) from error

    return call


def _refused(function: str, mistake: Any, known: list[str], given: Mapping[str, Any]) -> UsageError:
    """Return pydantic's first mistake in our words."""
    first, context = mistake["loc"][0], mistake.get("ctx", {})
    name = known[first] if isinstance(first, int) else str(first)
    if mistake["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        hint = did_you_mean(name, known) or f"there are {', '.join(known)}"
        return UsageError(f"{function} has no argument {name!r}", hint)
    if mistake["type"] == "missing_argument":
        return UsageError(f"{function} needs {name}", "give it")
    value = given.get(name, mistake["input"])
    why = str(context["error"]) if mistake["type"] == "value_error" else f"it cannot be {shown(value)}"
    near = did_you_mean(str(value), re.findall("'(.+?)'", str(context.get("expected", ""))))
    instead = GIVE.get(name) or mistake["msg"][:1].lower() + mistake["msg"][1:]
    error = UsageError(why, near or f"give {instead}")
    error.argument = name
    return error


def shown(value: object) -> str:
    """Return a value for a message, a number in text as a number; of what is no plain value its type."""
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,20}(\.[0-9]{1,20})?", value):
        return value
    if isinstance(value, Integral | Real | str | bytes | complex | list | tuple | Mapping | Path | None):
        text = repr(value)
        return text if len(text) <= LONGEST else f"{text[:LONGEST]} …"
    return f"a {type(value).__name__}"


@contextmanager
def argument(name: str) -> Iterator[None]:
    """Say of errors within the block that they are about an argument."""
    try:
        yield
    except OffpolError as error:
        error.argument = name
        raise


# ---------------------------------------------------------------- a report


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
        """What `compare` found: presets side by side, or each further run against the first."""
        return self.summary.comparison or self.summary.against or None

    @property
    def presets(self) -> list[str]:
        """Names of the corrections that were evaluated."""
        return list(self.summary.presets)

    def number(self, name: str, preset: str | None = None) -> Number:
        """Return a number of the dump (`k3`, `drift2.k3`) or of a preset (`ess_tokens`): value and interval.

        Raises:
            UsageError: the report has no such preset, or no such number.
        """
        if preset is not None and preset not in self.summary.presets:
            hint = did_you_mean(preset, self.presets) or f"there are {', '.join(self.presets) or 'none'}"
            raise UsageError(f'the report has no preset "{preset}"', hint)
        found = self.summary.whole if preset is None else self.summary.preset(preset)
        if name not in found:
            hint = did_you_mean(name, list(found)) or "docs/metrics.md lists the names"
            raise UsageError(f'the report has no number "{name}"', hint)
        return found[name]

    def numbers(self) -> pl.DataFrame:
        """Return every number as a row: its name, preset (null for the dump's), value, interval, unit."""
        import polars as pl

        floats, texts = ("value", "low", "high"), ("unit", "over", "formula", "unknown")
        schema = {one: pl.Float64() if one in floats else pl.String() for one in (*COLUMNS, *floats, *texts)}
        rows = [
            (key, preset, name, one.value, *(one.interval or (None, None)), *(getattr(one, x) for x in texts))
            for key, preset, name, one in self._numbers()
        ]
        return pl.DataFrame(rows, schema=schema, orient="row")

    def values(self) -> dict[str, float]:
        """Return every known number by name as trackers take it: `k3`, `token_is.ess_tokens`."""
        return {key: one.value for key, _, _, one in self._numbers() if one.value is not None}

    def _numbers(self) -> Iterator[tuple[str, str | None, str, Number]]:
        for name, one in self.summary.whole.items():
            yield name, None, name, one
        for preset in self.summary.presets:
            for name, one in self.summary.preset(preset).items():
                yield f"{preset}.{name}", preset, name, one

    def sequences(self) -> pl.LazyFrame:
        """Return a row per sequence: length, ΣΔ, and what each preset keeps of it; of `analyze` alone.

        It is the file that `sequences=` named, else the dump is read again at the first call.

        Raises:
            UsageError: the report is of another function, or of a dump that lay in memory.
        """
        if self._rows is None:
            hint = "call analyze with paths, or with sequences='rows.parquet'"
            raise UsageError("the report holds no rows of sequences", hint)
        return self._rows()

    @property
    def figures(self) -> tuple[str, ...]:
        """Names of the charts of the page, each of which `figure` returns."""
        return tuple(self._charts())

    def figure(self, name: str) -> go.Figure:
        """Return a chart of the page (`by_step`) as a figure of plotly, with its finding as title.

        Raises:
            UsageError: there is no such figure.
        """
        known = self._charts()
        if name not in known:
            hint = did_you_mean(name, list(known)) or f"there are {', '.join(known)}"
            raise UsageError(f'unknown figure "{name}"', hint if known else "the result has no charts")
        return known[name].figure()

    def _charts(self) -> dict[str, Chart]:
        from offpol_diag.report import answered

        return {one.name: one for one in answered(self.summary).charts}

    def to_json(self, path: str | Path | None = None) -> str:
        """Return the result as JSON, and write it to `path` if one is given."""
        return _saved(self.summary, "json", path)

    def to_html(self, path: str | Path | None = None) -> str:
        """Return the page, one file that fetches nothing, and write it to `path` if one is given."""
        return _saved(self.summary, "report", path)

    def to_markdown(self, path: str | Path | None = None) -> str:
        """Return the report as Markdown for a pull request, and write it to `path` if one is given."""
        return _saved(self.summary, "md", path)

    def __repr__(self) -> str:
        """Return the verdict in one line."""
        from offpol_diag.report import render

        return f"Report({render(self.summary, 'terminal', quiet=True).strip()})"

    def _repr_html_(self) -> str:
        """Return the terminal's screen for a notebook; `to_html` makes the page."""
        from html import escape

        from offpol_diag.report import render

        return f"<pre>{escape(render(self.summary, 'terminal'))}</pre>"


def _saved(result: Result, form: str, path: object) -> str:
    """Return a form of a result, and write it to a path, if any."""
    from offpol_diag.report import render

    text = render(result, form)
    if path is not None:
        if not isinstance(path, str | Path):
            raise UsageError(f"{shown(path)}: cannot be written, as it is no path", "give a path")
        try:
            Path(path).write_text(text, encoding="utf-8")
        except (OSError, ValueError) as error:  # a name with a NUL is a ValueError
            raise _unwritable(path, error) from error
    return text


def _unwritable(path: object, error: Exception) -> UsageError:
    why = getattr(error, "strerror", None) or error
    return UsageError(f"{path}: cannot be written ({why})", "choose another place")


# ---------------------------------------------------------------- the commands


@checked
def analyze(
    what: Any,
    *,
    presets: Presets | None = None,
    trainer: str | None = None,
    sequences: File | None = None,
    by_step: Names = (),
    group_by: Names = (),
    preset_file: File | None = None,
    **how: Unpack[Computes],
) -> Report:
    """Analyse a dump: every number with its interval, the verdict, and the recommended correction.

    Args:
        what: paths (files, directories, globs, URLs) of dumps in any form; or a pyarrow, polars or pandas
            table with a row per sequence or per token; or a dict from column to padded tensors [S, L] (with a
            `response_mask`) or to one list per sequence. Column names are those of docs/dumps.md.
        presets: corrections, by name ("token_is,seq_mis@3", "all") or as presets; None for the usual ones.
        trainer: whose configuration is printed with the recommendation.
        sequences: where to write a row per sequence (Parquet), which `Report.sequences` then reads.
        by_step: names of numbers to be had for every training step too.
        group_by: columns to break the numbers down by.
        preset_file: presets of your own (docs/preset-files.md).
        **how: `columns`, `on_bad_row`, `device`, `engine`, `threads`, `seed`, `progress`, `batch_tokens`
            (see `Computes`), for all functions here.

    Raises:
        OffpolError: the input cannot be read, or an argument cannot be used; with a hint.
    """
    from offpol_diag.core.breakdowns import names_by_step, row_by_step
    from offpol_diag.presets.catalogue import FAMILIES
    from offpol_diag.trainers import trainer_named

    known = _catalogue(preset_file)
    asked = _presets(known, presets)
    with argument("trainer"):
        trainer = trainer and trainer_named(trainer)
    rows = None if sequences is None else Path(sequences)
    if rows is not None:
        _require_writable("sequences", rows)
    with _opened(what, how, group_by) as (dump, label):
        columns = dump.info.columns
        chosen = asked or _usual(dump, known, trainer)
        taken = {preset.name for preset in chosen}
        family = [known[name] for name in FAMILIES["old" if "old_log_probs" in columns else "current"]]
        chosen += tuple(one for one in family if one.name not in taken and not one.lacking(columns))
        with argument("by_step"):
            for name in by_step:
                if row_by_step(name, chosen) is None:
                    hint = did_you_mean(name, names_by_step(chosen)) or "docs/metrics.md lists the names"
                    raise UsageError(f'"{name}" is no number that is summed by step', hint)
        examined = _examined(dump, how, chosen, group_by, sequences=rows, by_step=by_step)
    found = _labelled(_within(_advised(examined, "analyze", trainer)), label)
    if rows is not None:
        return Report(found, partial(_scanned, rows.absolute()))
    if label:
        return Report(found)
    paths = [str(one) for one in (what if isinstance(what, list | tuple) else [what])]
    again = {"presets": presets, "group_by": group_by, "preset_file": preset_file, **how, "progress": None}
    given = [one if is_url(one) else str(Path(one).absolute()) for one in paths]
    return Report(found, partial(_read_again, given, again))


@checked
def doctor(what: Any, *, group_by: Names = (), **how: Unpack[Computes]) -> Report:
    """Say whether the mismatch is a bug, and which one; no correction is computed. See `analyze`."""
    with _opened(what, how, group_by) as (dump, label):
        found = _diagnosed(_examined(dump, how, (), group_by))
    return Report(_labelled(_within(_named(found, "doctor")), label))


@checked
def compare(
    what: Any,
    *others: Any,
    presets: Presets | None = None,
    against: OnePreset | None = None,
    group_by: Names = (),
    preset_file: File | None = None,
    **how: Unpack[Computes],
) -> Report:
    """Compare presets on one dump, or the runs of other dumps (B, C, …) with the first (A). See `analyze`.

    Args:
        what: the dump, or run A.
        *others: further runs.
        presets: which; the usual ones for one dump, none for several.
        against: with one dump, the preset that the others are compared with; the first by default.
        group_by: see `analyze`.
        preset_file: see `analyze`.
        **how: see `analyze`.
    """
    from offpol_diag.compare import of_presets, of_runs, reference

    known = _catalogue(preset_file)
    asked = _presets(known, presets)
    base = None if against is None else _one_preset(known, "against", against)
    if base is not None and others:
        hint = "leave it out, or compare presets on the dumps as one: --as-one, or in Python a list"
        raise UsageError("--against names a preset, and runs are compared with run A", hint)
    with ExitStack() as stack:
        (dump, label), *further = (
            stack.enter_context(_opened(one, how, group_by)) for one in (what, *others)
        )
        if others:
            runs = [_examined(one, how, asked, group_by) for one, _ in ((dump, label), *further)]
            results = [*map(_diagnosed, runs)]
            found = _named(results[0], "compare")
            update: dict[str, Any] = {"against": of_runs(runs, results)}
        else:
            chosen = tuple(dict.fromkeys((*(asked or _usual(dump, known)), *([base] if base else []))))
            name = reference(dump.info.columns, chosen, base)
            examined = _examined(dump, how, chosen, group_by, against=name)
            found = _advised(examined, "compare")
            update = {"comparison": of_presets(examined, found, name)}
    return Report(_labelled(found.model_copy(update=update), label))


@checked
def sweep(
    what: Any,
    preset: OnePreset,
    *,
    which: str | None = None,
    at: Thresholds = None,
    keep: Share = None,
    preset_file: File | None = None,
    **how: Unpack[Computes],
) -> Report:
    """Evaluate one preset at many thresholds. See `analyze`.

    Args:
        what: the dump.
        preset: the preset.
        which: which of its bounds moves ("weight.upper", "reject"); None for the one it is about.
        at: the thresholds, rising; None for round numbers where the data change.
        keep: solve for the bounds that keep this share, as many lost below as above.
        preset_file: see `analyze`.
        **how: see `analyze`.
    """
    from offpol_diag.sweep import sweep as swept

    moved = _one_preset(_catalogue(preset_file), "preset", preset)
    with _opened(what, how) as (dump, label):
        return Report(_labelled(swept(dump, moved, which, at, keep, **_where(how)), label))  # type: ignore[arg-type]


@checked
def gate(
    what: Any,
    *,
    max: Bounds = (),
    min: Bounds = (),
    gates: File | None = None,
    baseline: File | None = None,
    tolerance: str | float | None = None,
    presets: Names = (),
    fail_on: Literal["bug", "cannot_tell"] | None = None,
    group_by: Names = (),
    preset_file: File | None = None,
    **how: Unpack[Computes],
) -> Report:
    """Hold numbers against bounds, or against an earlier result; `Report.passed` is the verdict.

    What cannot be judged, such as a name that is no metric, has not passed; `Report.gates` says why.

    Args:
        what: the dump; or a `Report`, or the file of a result (RESULT.json), to be judged as it is.
        max: name → the largest value that passes.
        min: name → the smallest value that passes.
        gates: a file of bounds (docs/ci.md).
        baseline: an earlier result (JSON): nothing may be worse by more than the tolerance.
        tolerance: the share of the baseline's value by which it may be; 0.1 by default.
        presets: presets whose numbers are compared with the baseline as well.
        fail_on: the mildest diagnosis that fails: "cannot_tell" or "bug".
        group_by: see `analyze`.
        preset_file: see `analyze`.
        **how: see `analyze`.
    """
    from offpol_diag.gate import judged, required

    asked: dict[str, Any] = {"max": max, "min": min, "fail_on": fail_on, "baseline": baseline}
    must = required(None if gates is None else Path(gates), tolerance=tolerance, presets=presets, **asked)
    base, label = load(must.baseline) if must.baseline else None, ""
    found = what.summary if isinstance(what, Report) else _result(what)
    if found is None:
        chosen, steps = must.to_compute(_catalogue(preset_file))
        with _opened(what, how, group_by) as (dump, label):
            found = _advised(_examined(dump, how, chosen, group_by, by_step=steps), "gate")
    return Report(_labelled(found.model_copy(update={"gates": judged(found, must, base)}), label))


@checked
def check(
    what: Any,
    *,
    logged: Files = None,
    trainer: str | None = None,
    presets: Presets | None = None,
    preset_file: File | None = None,
    **how: Unpack[Computes],
) -> Checked:
    """Compute what a trainer logs of a dump, step by step, and lay its own curves beside it.

    Args:
        what: the dump.
        logged: curves by step: CSV, JSONL or Parquet, as W&B exports them; none: numbers alone.
        trainer: who logs, verl also of a generation (`verl@2025-11`); by default what the metadata say.
        presets: corrections that may have run; by default the recommended one and the trainer's default.
        preset_file: see `analyze`.
        **how: see `analyze`.
    """
    from offpol_diag.check import checked as compared
    from offpol_diag.check import curves, numbers, who_logs
    from offpol_diag.trainers import defaults

    known = _catalogue(preset_file)
    asked = _presets(known, presets)
    drawn = curves([Path(one) for one in logged or ()])
    with _opened(what, how) as (dump, _):
        with argument("trainer"):
            who, generation = who_logs(trainer, dump.info.provenance)
        if not asked:
            usual = _usual(dump, known, who)
            with _opened(what, how) as (same, _):
                advice = _advised(_examined(same, how, usual), "check").recommendation
            best = advice.method if advice else None
            names = dict.fromkeys((best or usual[0].name, *defaults(who)[:1]))
            asked = tuple(known[name] for name in names)
        found = numbers(dump, asked, who, generation)
    if not found:
        lacks = dict.fromkeys(column for preset in asked for column in preset.lacking(dump.info.columns))
        missing = f"the dump has no {' and no '.join(lacks) or 'token'}"
        raise UsageError(missing, "log it, or name other presets with --presets")
    name = f"{who}@{generation}" if who == "verl" else who
    curves_of = tuple(map(str, logged or ()))
    return replace(compared(found, drawn, name), dump=tuple(dump.info.files), logged=curves_of)


@checked
def rescore(
    what: Any,
    model: Any,
    *,
    to: File | None = None,
    sample: Sample = SAMPLE,
    tries: Names = (),
    base: File | None = None,
    max_length: Count = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    attention: str | None = None,
    device: Device = "auto",
    seed: Seed = 0,
    progress: Progress = None,
    **how: Unpack[Reads],
) -> Report:
    """Score a dump's responses with the run's model: which side is reproduced, and what the other computes.

    Args:
        what: the dump, with `token_ids` and `prompt_ids`; see `analyze`.
        model: a folder or a name on the hub, or several, the run's own first; or a live causal model of
            transformers, such as a trainer has in a debugger. It is left as it was.
        to: where the scored responses go; nowhere by default.
        sample: how many prompts are scored; "all" or None for all of them.
        tries: hypotheses to try, by name or family; all by default.
        base: the base model of an adapter that does not say it.
        max_length: sequences of more tokens are left out.
        dtype: type of the body; "auto" is float32 where it fits.
        attention: which attention of transformers.
        device: see `analyze`.
        seed: of the sample, and of the intervals.
        progress: called with tokens done and in all.
        **how: `columns`, `on_bad_row`; see `analyze`.
    """
    from offpol_diag.dump.convert import in_files
    from offpol_diag.rescore.command import rescored

    given = locals()
    names = ("sample", "tries", "base", "max_length", "dtype", "attention", "device", "seed")
    if to is not None:
        _require_writable("to", Path(to))
    with in_files(what) as (paths, label), files.TemporaryFolder() as folder:
        target = folder.path / "rescored.parquet" if to is None else Path(to)
        asked: dict[str, Any] = {name: given[name] for name in (*names, "progress")} | how
        reference, columns = rescored(paths, model, target, LOG.info, **asked)
        again: Computes = {"seed": seed, "device": "cpu", "columns": columns}
        with _opened(str(target), again) as (dump, _):
            found = _named(_diagnosed(_examined(dump, again, ())), "rescore")
        reference.written = "" if to is None else reference.written
    return Report(_labelled(found.model_copy(update={"reference": reference}), label))


@checked
def convert(what: Any, to: File, **how: Unpack[Reads]) -> Converted:
    """Write what a trainer wrote by itself as a canonical dump: Parquet, a row per sequence.

    Args:
        what: files, directories of them, or globs, on this disk.
        to: the file that is written.
        **how: `columns`; see `analyze`.
    """
    from offpol_diag.dump.convert import convert as converted

    given = [str(one) for one in (what if isinstance(what, list | tuple) else [what])]
    return converted(given, Path(to), how.get("columns"))  # type: ignore[arg-type]


def report(result: File) -> Report:
    """Load the result that `to_json`, or `--json` of a command, wrote.

    Raises:
        ResultError: it cannot be read back.
    """
    return Report(load(Path(result)))


# ---------------------------------------------------------------- what they share


@contextmanager
def _opened(what: Any, how: Any, group_by: Sequence[str] = ()) -> Iterator[tuple[Dump, str]]:
    """Yield what is given as a dump, and a name for what lay in memory (else empty)."""
    from offpol_diag.dump.convert import in_files, open_dump
    from offpol_diag.run.threads import TOKENS

    given = {"on_bad_row": how["on_bad_row"]} if "on_bad_row" in how else {}
    given["batch_tokens"] = how.get("batch_tokens") or TOKENS
    with in_files(what) as (paths, label):
        dump = open_dump(paths, columns=how.get("columns") or None, group_by=group_by, **given)
        dump.info = replace(dump.info, given=tuple(map(clean, paths)))
        yield dump, label


def _where(how: Computes) -> Any:
    """Return the arguments on computing of every pass over a dump."""
    return {name: x for name, x in how.items() if name not in ("columns", "on_bad_row", "batch_tokens")}


def _examined(
    dump: Dump, how: Computes, presets: Sequence[Preset], group_by: Sequence[str] = (), **more: Any
) -> Examined:
    from offpol_diag.core.observe import examine

    return examine(dump, presets=presets, group_by=group_by, **_where(how), **more)


def _diagnosed(found: Examined) -> Result:
    from offpol_diag.diagnosis.decide import diagnosed

    return diagnosed(found)


def _advised(found: Examined, command: str, trainer: str | None = None) -> Result:
    """Return the numbers with the recommendation, and its configuration for a trainer."""
    from offpol_diag.advice import advised

    return advised(_named(_diagnosed(found), command), trainer)


def _named(result: Result, command: str) -> Result:
    """Return the result with the name of its command."""
    return result.model_copy(update={"run": result.run.model_copy(update={"command": command})})


def _labelled(result: Result, label: str) -> Result:
    """Return a result with the name of its source where that lay in memory."""
    if not label:
        return result
    return result.model_copy(update={"dump": result.dump.model_copy(update={"files": [label], "given": []})})


def _within(result: Result) -> Result:
    """Return the result with the range that K3 is expected in, where the metadata of the dump says enough."""
    from offpol_diag.diagnosis import recorded

    found = recorded.expected(result.dump.provenance)
    return result.model_copy(update={"charts": result.charts.model_copy(update={"expected": found})})


def _catalogue(file: File | None) -> Catalogue:
    """Return the built-in presets and the user's; a built-in name of another meaning is a warning."""
    from offpol_diag.presets import catalogue

    with argument("preset_file"):
        found = catalogue.load(None if file is None else Path(file))
    if found.replaced:
        LOG.warning("%s gives its own meaning to %s", file, ", ".join(found.replaced))
    return found


def _presets(known: Catalogue, named: Presets | None) -> tuple[Preset, ...]:
    with argument("presets"):
        return () if named is None else known.resolve(named)


def _one_preset(known: Catalogue, name: str, given: OnePreset) -> Preset:
    with argument(name):
        found = known.resolve([given])
        if len(found) != 1:
            raise UsageError(f"{shown(given)} names {len(found)} presets", "name one")
    return found[0]


def _usual(dump: Dump, known: Catalogue, trainer: str | None = None) -> tuple[Preset, ...]:
    """Return the presets that are evaluated of a dump where none are named."""
    from offpol_diag.trainers import defaults, named_in

    return known.usual(dump.info.columns, defaults(trainer or named_in(dump.info.provenance)))


def _result(what: Any) -> Result | None:
    """Return the result that is given in place of a dump; None where a dump is.

    Raises:
        UsageError: it is at a URL, or not alone.
    """
    paths = [
        str(one)
        for one in (what if isinstance(what, list | tuple) else [what])
        if isinstance(one, str | Path)
    ]
    results = [name for name in paths if name.lower().endswith(".json")]
    if any(map(is_url, results)):
        raise UsageError("a result is read from this disk, and a URL is named", "copy it, and name the file")
    if results and len(paths) > 1:
        raise UsageError("a result is judged alone", f"give {results[0]} and nothing else, or only dumps")
    return load(Path(results[0])) if results else None


def _require_writable(name: str, path: Path) -> None:
    """Refuse a path that is a directory, or whose folder does not exist."""
    try:
        folder, there = path.is_dir(), path.parent.is_dir()
    except (OSError, ValueError) as error:
        raise _unwritable(path, error) from error
    if folder:
        raise UsageError(f"{name}: {path} is a directory", "name a file in it")
    if not there:
        raise UsageError(f"{path}: its folder does not exist", f"make it first: mkdir -p {path.parent}")


def _scanned(file: Path) -> pl.LazyFrame:
    """Return the rows of sequences in a file that `analyze` wrote."""
    import polars as pl

    if not file.is_file():
        raise UsageError(f"{file}: the rows of sequences are not there any more", "analyze the dump again")
    return pl.scan_parquet(file, glob=False)


def _read_again(paths: Sequence[str], how: Any) -> pl.LazyFrame:
    """Analyse a dump again for its rows of sequences."""
    import polars as pl

    with files.TemporaryFolder() as folder:
        analyze(paths, sequences=(file := folder.path / "rows.parquet"), **how)
        return pl.read_parquet(file, glob=False).lazy()
