"""The Python interface: a dump, a table or tensors in, a `Report` out.

    import offpol_diag

    report = offpol_diag.analyze("step_100.parquet", presets="token_is,seq_mis")
    report.diagnosis.headline, report.metrics["k3"].value
    report.to_html("report.html")

The functions are the commands of the same names, with the same defaults; `analyze` says what they take.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, TypeVar, Unpack

from offpol_diag import commands, files, requests
from offpol_diag.errors import UsageError
from offpol_diag.inputs import sources
from offpol_diag.options import SHELL, Asked, Request, asked, options
from offpol_diag.result import Result
from offpol_diag.results import Report, require_writable

if TYPE_CHECKING:
    import polars as pl

    from offpol_diag.check import Checked
    from offpol_diag.presets import Preset

__all__ = ["Report", "analyze", "check", "compare", "doctor", "gate", "rescore", "sweep"]

Presets: TypeAlias = "str | Preset | Sequence[str | Preset]"
Bounds: TypeAlias = Mapping[str, float] | Sequence[str]
File: TypeAlias = str | Path
Function = TypeVar("Function", bound=Callable[..., Any])


class Reads(TypedDict, total=False):
    """How a dump is read, for all functions; see `analyze`."""

    columns: Mapping[str, str] | str | None
    on_bad_row: Literal["error", "skip"]


class Computes(Reads, total=False):
    """How numbers are computed, for all functions but `check`; see `analyze`."""

    device: str
    engine: Literal["local", "ray"]
    threads: int | None
    seed: int
    progress: Callable[[int, int], None] | Literal[False] | None
    batch_tokens: int | None


def signed(model: type[Request]) -> Callable[[Function], Function]:
    """Show in a function's signature every argument of its model, each with its default."""

    def shown(function: Function) -> Function:
        *own, _ = inspect.signature(function).parameters.values()  # the last is `how`
        fields = {name: model.model_fields[name] for name in options(model, SHELL)}
        how = [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=field.default)
            for name, field in fields.items()
            if name not in [one.name for one in own]
        ]
        function.__signature__ = inspect.Signature([*own, *how])  # type: ignore[attr-defined]
        return function

    return shown


@signed(requests.Analyze)
def analyze(
    what: Any,
    *,
    presets: Presets | None = None,
    trainer: str | None = None,
    sequences: File | None = None,
    by_step: Sequence[str] = (),
    group_by: Sequence[str] = (),
    preset_file: File | None = None,
    **how: Unpack[Computes],
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
        by_step: names of numbers, ours or as logged, to be had for every training step too.
        group_by: columns to break the numbers down by.
        preset_file: presets of your own (docs/preset-files.md).
        **how: how to read and compute, for all functions here: `columns` (ours → the dump's),
            `on_bad_row` ("error" or "skip"), `device` ("auto", "cpu", "cuda", "cuda:N"), `engine` ("local"
            or "ray"), `threads`, `seed`, `progress` (called as rows are done), `batch_tokens`. Text is read
            as the value of an option of the command line.

    Raises:
        OffpolError: the input cannot be read, or an argument cannot be used; with a hint.
    """
    request = _asked(requests.Analyze, locals())
    if request.sequences is not None:
        require_writable("sequences", request.sequences)
    with sources(what) as (paths, label):
        found = labelled(commands.analyze(paths, request), label)
    rows: Callable[[], pl.LazyFrame] | None = None
    if request.sequences is not None:
        rows = partial(_scanned, request.sequences.absolute())
    elif not label:
        again = request.model_copy(update={"progress": None})
        rows = partial(_read_again, [_absolute(one) for one in paths], again)
    return Report(found, rows)


@signed(requests.Doctor)
def doctor(what: Any, *, group_by: Sequence[str] = (), **how: Unpack[Computes]) -> Report:
    """Say whether the mismatch is a bug, and which one; no correction is computed. See `analyze`."""
    request = _asked(requests.Doctor, locals())
    with sources(what) as (paths, label):
        return Report(labelled(commands.doctor(paths, request), label))


@signed(requests.Compare)
def compare(
    what: Any,
    *others: Any,
    presets: Presets | None = None,
    against: str | Preset | None = None,
    group_by: Sequence[str] = (),
    preset_file: File | None = None,
    **how: Unpack[Computes],
) -> Report:
    """Compare presets on one dump, or the runs of other dumps (B, C, …) with the first (A). See `analyze`.

    Args:
        what: the dump, or run A.
        *others: further runs.
        presets: which; all by default for one dump, none for several.
        against: with one dump, the preset that the others are compared with; the first by default.
        group_by: see `analyze`.
        preset_file: see `analyze`.
        **how: see `analyze`.
    """
    request = _asked(requests.Compare, locals())
    with ExitStack() as stack:
        (paths, label), *further = (stack.enter_context(sources(one)) for one in (what, *others))
        found = commands.compare(paths, [one for one, _ in further], request)
    return Report(labelled(found, label))


@signed(requests.Sweep)
def sweep(
    what: Any,
    preset: str | Preset,
    *,
    which: str | None = None,
    at: Sequence[float] | str | None = None,
    keep: float | None = None,
    trainer: str | None = None,
    preset_file: File | None = None,
    **how: Unpack[Computes],
) -> Report:
    """Evaluate one preset at many thresholds. See `analyze`.

    Args:
        what: the dump.
        preset: the preset.
        which: which of its bounds moves ("weight.upper", "reject"); None for the one it is about.
        at: the thresholds, rising; None for round numbers where the data change.
        keep: solve for the bounds that keep this share.
        trainer: with `keep`, whose configuration of the bounds is printed.
        preset_file: see `analyze`.
        **how: see `analyze`.
    """
    request = _asked(requests.Sweep, locals())
    with sources(what) as (paths, label):
        return Report(labelled(commands.sweep(paths, request), label))


@signed(requests.Gate)
def gate(
    what: Any,
    *,
    max: Bounds | None = None,
    min: Bounds | None = None,
    gates: File | None = None,
    baseline: File | None = None,
    tolerance: str | Sequence[str] = (),
    only: str | Sequence[str] = (),
    presets: str | Sequence[str] = (),
    fail_on: str | Sequence[str] = (),
    group_by: Sequence[str] = (),
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
        tolerance: how much worse is allowed: "10%", "0.001", "10% + 0.001", or "k3=5%" of one number.
        only: the numbers to compare with the baseline, and no others.
        presets: presets whose numbers are compared as well.
        fail_on: diagnoses that fail, as every worse one does: "bug", "cannot_tell", "honest_mismatch".
        group_by: see `analyze`.
        preset_file: see `analyze`.
        **how: see `analyze`.
    """
    request = _asked(requests.Gate, locals())
    must = commands.required(request)
    if isinstance(what, Report):
        return Report(commands.gate(what.summary, request, must))
    with sources(what) as (paths, label):
        given = None if label else commands.saved(paths)
        return Report(labelled(commands.gate(given or paths, request, must), label))


@signed(requests.Rescore)
def rescore(
    what: Any,
    model: Any,
    *,
    to: File | None = None,
    sample: int | Literal["all"] | None = requests.SAMPLE,
    tries: str | Sequence[str] = (),
    base: File | None = None,
    tokenizer: Any = None,
    max_length: int | None = None,
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto",
    attention: str | None = None,
    device: str = "auto",
    seed: int = 0,
    progress: Callable[[int, int], None] | Literal[False] | None = None,
    **how: Unpack[Reads],
) -> Report:
    """Score a dump's responses with the run's model: which side is reproduced, and what the other computes.

    Args:
        what: the dump, with `token_ids` and `prompt_ids`; see `analyze`.
        model: a folder or a name on the hub, or several, the run's own first; or a live causal model of
            transformers, such as a trainer has in a debugger. It is left as it was.
        to: where the scored responses go; nowhere by default.
        sample: how many prompts are scored at first; "all" or None for all of them.
        tries: hypotheses to try, by name or family; all by default.
        base: the base model of an adapter that does not say it.
        tokenizer: a folder, or with a live model its tokenizer.
        max_length: sequences of more tokens are left out.
        dtype: type of the body; "auto" is float32 where it fits.
        attention: which attention of transformers.
        device: see `analyze`.
        seed: of the sample, and of the intervals.
        progress: called with tokens done and in all.
        **how: `columns`, `on_bad_row`; see `analyze`.
    """
    given = locals()
    live = None
    if not isinstance(model, str | Path | list | tuple):
        live, given["model"] = model, ("a live model",)
    request = _asked(requests.Rescore, given)
    if request.to is not None:
        require_writable("to", request.to)
    with sources(what) as (paths, label), files.TemporaryFolder() as folder:
        asked = request.model_copy(update={"to": request.to or folder.path / "rescored.parquet"})
        found = commands.rescore(paths, asked, model=live)
        if request.to is None and found.reference is not None:
            found.reference.written = ""
    return Report(labelled(found, label))


@signed(requests.Check)
def check(
    what: Any,
    *,
    logged: File | Sequence[File] | None = None,
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
    request = _asked(requests.Check, locals())
    with sources(what) as (paths, _):
        return commands.check(paths, request)


# ---------------------------------------------------------------- what they share


def _asked(model: type[Asked], given: Mapping[str, Any]) -> Asked:
    """Return what a function is asked, of its arguments by name."""
    own = {name: x for name, x in given.items() if name not in ("what", "others", "how")}
    return asked(model, own | given["how"])


def labelled(summary: Result, label: str) -> Result:
    """Return a result with the name of its source where that lay in memory."""
    if not label:
        return summary
    named = summary.dump.model_copy(update={"files": [label], "given": []})
    return summary.model_copy(update={"dump": named})


def _absolute(path: str) -> str:
    """Return a path that holds in another working directory, too; a URL as it is."""
    return path if "://" in path else str(Path(path).absolute())


def _scanned(file: Path) -> pl.LazyFrame:
    """Return the rows of a file that `analyze` wrote."""
    import polars as pl

    if not file.is_file():
        raise UsageError(f"{file}: the rows of sequences are not there any more", "analyze the dump again")
    return pl.scan_parquet(file, glob=False)


def _read_again(paths: Sequence[str], request: requests.Analyze) -> pl.LazyFrame:
    """Read a dump again for its rows of sequences."""
    import polars as pl

    with files.TemporaryFolder() as folder:
        file = folder.path / "rows.parquet"
        commands.analyze(paths, request.model_copy(update={"sequences": file}))
        return pl.read_parquet(file, glob=False).lazy()
