"""What each command is asked: a model per command, and a field per option. To add an option, add a field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel

from offpol_diag.errors import UsageError
from offpol_diag.options import (
    MOST_SEED,
    PYTHON,
    SHELL,
    Count,
    Device,
    Files,
    Joined,
    Limits,
    Names,
    Number,
    Pairs,
    Paths,
    Processes,
    Progress,
    Request,
    Seed,
    opt,
    shown,
)

if TYPE_CHECKING:
    from offpol_diag.forms import Reading

READ, WRITE = "What is read", "What is written"
BOUNDS, BASELINE = "What must hold", "Against an earlier result"

# ---------------------------------------------------------------- long help

ALL = (
    "Corrections to evaluate; `offpol-diag presets` lists them. All by default; what a trainer logs is then "
    "computed only for its own presets and what can be recommended, with `all` for every preset."
)
SOME = (
    "Corrections to evaluate; `offpol-diag presets` lists them. Of one dump all, of two runs none, "
    "unless you name some."
)
DUMP = (
    "Parquet files, directories of them, or globs, here or at a URL (s3://, gs://, hf://, …); - is stdin. "
    "Left out: the dump that pyproject.toml or offpol-diag.toml names, else the sample."
)
MANY = (
    "Processes that compute on the CPU; auto is one for each core, where memory and dump are large enough. "
    "The numbers are the same."
)
CURVES = "The trainer's curves by step: exports of W&B or TensorBoard, JSONL, CSV; may be repeated."
BOUND = (
    "Which of its bounds: weight.upper, reject.upper, reject[1].lower, veto.lower; reject or weight alone is "
    "the window [1/b, b]. Left out: the one that the preset is about."
)
WORSE = (
    "How much worse is allowed: a share of the baseline's value, an amount, or both (10%+0.001); of one "
    "number or of all. Default 10%. Repeatable."
)
FAILS = "A diagnosis that fails, as every worse one does: bug, cannot_tell or honest_mismatch. Repeatable."
JSON = "Write the result as JSON; - is stdout."

# ---------------------------------------------------------------- what several commands are asked


class Read(Request):
    """How files are read."""

    columns: Pairs = opt(
        None,
        "Which column is which, where the names do not say it; mask=none: none is.",
        "rollout=NAME,old=NAME",
        READ,
        env=True,
    )
    form: str | None = opt(
        None,
        "The form of the files, where it is not to be detected; `offpol-diag convert --list` has them.",
        "NAME",
        READ,
        env=True,
    )
    align: Joined | None = opt(
        None,
        "How log-probs belong to tokens, where the form's way is wrong: full,shift=1.",
        "response|full,shift=N",
        READ,
        env=True,
    )
    join: str | None = opt(
        None,
        "Columns of a second file, found by sequence_id: other.parquet:old_log_probs.",
        "FILE:COLUMN,COLUMN",
        READ,
        file=True,
    )
    on: str | None = opt(
        None,
        "The column that --join goes by instead; row is the order of the rows.",
        "COLUMN|row",
        READ,
        file=True,
    )

    def way(self) -> Reading:
        """Return how files are read that are no canonical dump."""
        from offpol_diag.forms import Reading

        return Reading(self.form, self.align, self.join, self.on)


class ReadDump(Read):
    """How a dump is read."""

    dump: Paths = opt((), DUMP, "DUMP", file=True, only=SHELL)
    on_bad_row: Literal["error", "skip"] = opt(
        "error",
        "Stop at a row that cannot be read, or leave it out and say so at the top of every report.",
        "<error|skip>",
        READ,
        env=True,
    )
    reading: Any = opt(None, only=PYTHON)

    def way(self) -> Reading:
        """Return how files are read; in Python `reading` is all of it."""
        from offpol_diag.forms import Reading

        if not isinstance(self.reading, Reading | None):
            raise UsageError(f"reading: it cannot be {shown(self.reading)}", "give a forms.Reading, or None")
        return self.reading or super().way()


class Computed(ReadDump):
    """How numbers are computed."""

    device: Device = opt("auto", "Where to compute.", "auto|cpu|cuda[:N]", env=True)
    engine: Literal["local", "ray"] = opt(
        "local",
        "This machine, or the Ray cluster of RAY_ADDRESS (docs/ray.md); the numbers are the same.",
        "<local|ray>",
        env=True,
    )
    workers: Processes = opt(None, MANY, "auto|N", env=True, usual="auto")
    seed: Seed = opt(0, "Seed of the bootstrap intervals.", f"<int range> [0<=x<={MOST_SEED}]", env=True)
    progress: Progress = opt(None, only=PYTHON)
    batch_tokens: Count | None = opt(None, only=PYTHON)


class OwnPresets(BaseModel):
    """Presets of the user."""

    preset_file: Path | None = opt(
        None, "Presets of your own (TOML, the grammar of the catalogue).", "FILE", READ, env=True
    )


class Grouped(BaseModel):
    """What numbers are broken down by."""

    group_by: Names = opt(
        (), "Break the numbers down by these columns (host, engine, env).", "COLUMN,COLUMN", READ, env=True
    )


class ForTrainer(BaseModel):
    """Whose configuration is printed."""

    trainer: str | None = opt(
        None,
        "Print the recommended method in this trainer's own syntax (verl, trl, slime, …).",
        "TRAINER",
        "",
        "--for",
        env=True,
    )


class Drawn(BaseModel):
    """Where a report goes, on the command line."""

    out: Path | None = opt(
        None, "Where the HTML report goes.", "FILE", WRITE, "--out", "-o", "--html", only=SHELL
    )
    no_explore: bool = opt(
        False,
        "Leave out of the HTML what draws its charts large (plotly, 2 MB).",
        "",
        WRITE,
        env=True,
        only=SHELL,
    )
    md: Path | None = opt(None, "Write Markdown; - is stdout.", "FILE|-", WRITE, only=SHELL)
    csv: Path | None = opt(
        None,
        "Write every table of the page as CSV into this folder, which is made if it is missing.",
        "FOLDER",
        WRITE,
        only=SHELL,
    )
    verbose: bool = opt(
        False, "Every table, not the short answer.", "", "", "--verbose", "-v", env=True, only=SHELL
    )


class Written(Drawn):
    """Where a result goes, on the command line."""

    json_file: Path | None = opt(None, JSON, "FILE|-", WRITE, "--json", only=SHELL)


class Texts(BaseModel):
    """Tokens as text."""

    tokenizer: Path | None = opt(
        None,
        "Show tokens as text: the tokenizer.json of the model (package tokenizers).",
        "FILE",
        WRITE,
        only=SHELL,
    )


class Pieces(BaseModel):
    """Sums to be merged, and a report that is written unless it is declined."""

    no_html: bool = opt(False, "Write no HTML report.", "", WRITE, only=SHELL)
    tally: Path | None = opt(
        None, "Write the sums that all numbers are made of, for `offpol-diag merge`.", "FILE.tally", WRITE
    )


# ---------------------------------------------------------------- what each command is asked


class Analyze(Texts, Pieces, Written, ForTrainer, Grouped, OwnPresets, Computed):
    """What `analyze` is asked."""

    presets: Any = opt(None, ALL, "all|NAME,NAME", READ, env=True)
    strict: bool = opt(False, "Exit with 1 where the verdict is a bug.", only=SHELL)
    by_step: Names = opt((), only=PYTHON)
    sequences: Path | None = opt(
        None,
        "Write one row per sequence: its length, ΣΔ, and what each preset keeps of it.",
        "FILE.parquet",
        WRITE,
    )


class Doctor(Written, Grouped, Computed):
    """What `doctor` is asked."""

    strict: bool = opt(False, "Exit with 1 where the verdict is a bug.", only=SHELL)


class Compare(Written, Grouped, OwnPresets, Computed):
    """What `compare` is asked."""

    presets: Any = opt(None, SOME, "all|NAME,NAME", READ, env=True)
    against: Any = opt(
        None,
        "The preset that the others are compared with; the first of --presets unless you name one.",
        "NAME",
        READ,
    )
    as_one: bool = opt(False, "Read several DUMPs as the parts of one dump.", "", READ, only=SHELL)


class Sweep(Written, OwnPresets, Computed):
    """What `sweep` is asked."""

    preset: Any = opt(..., "Whose threshold moves; `offpol-diag presets` lists them.", "NAME", READ)
    which: str | None = opt(None, BOUND, "BOUND")
    at: Joined | None = opt(
        None, "The thresholds, rising. Left out: round numbers where the data change.", "B,B,…"
    )
    keep: Number | None = opt(
        None,
        "Solve for the bounds that keep this share (0.95), around the data; reads the dump twice more.",
        "SHARE",
    )
    trainer: str | None = opt(
        None, "With --keep: print the bounds as this trainer's config.", "TRAINER", "", "--for"
    )


class Gate(Written, OwnPresets, Computed):
    """What `gate` is asked."""

    dump: tuple[str, ...] = opt(
        (),
        "A dump, or a result that --json wrote, to be judged as it is.",
        "DUMP|RESULT.json",
        required=True,
        only=SHELL,
    )
    fail_on: Names = opt((), FAILS, "DIAGNOSIS", BOUNDS, many=True)
    max: Limits | None = opt(
        None, "The largest value that passes: --max k3=0.002. Repeatable.", "NAME=NUMBER", BOUNDS, many=True
    )
    min: Limits | None = opt(
        None,
        "The smallest value that passes: --min seq_mis.ess_tokens=0.5. Repeatable.",
        "NAME=NUMBER",
        BOUNDS,
        many=True,
    )
    gates: Path | None = opt(
        None,
        "Bounds from a file, with levels and overrides by step and preset (docs/ci.md).",
        "FILE.toml",
        BOUNDS,
    )
    point: bool = opt(False, "Judge the plain values, not their 95% intervals.", "", BOUNDS)
    baseline: Path | None = opt(
        None,
        "Nothing may be worse than in this result by more than the tolerance.",
        "RESULT.json",
        BASELINE,
    )
    tolerance: tuple[str, ...] = opt((), WORSE, "[NAME=]10%|0.001", BASELINE, many=True, only=SHELL)
    only: Joined | None = opt(None, "Compare these numbers and no others.", "NAME,NAME", BASELINE, only=SHELL)
    presets: Joined = opt(
        "", "Presets whose numbers are compared as well.", "NAME,NAME", BASELINE, env=True, only=SHELL
    )
    group_by: Names = opt((), only=PYTHON)
    junit: Path | None = opt(
        None, "Write the verdicts as JUnit XML; - is stdout.", "FILE.xml", WRITE, only=SHELL
    )


class Check(Written, OwnPresets, ReadDump):
    """What `check` is asked."""

    logged: Files = opt((), CURVES, "FILE", READ, many=True)
    trainer: str | None = opt(
        None, "Who logged them; found by provenance or by the names, where it is left out.", "NAME", READ
    )
    preset: str | None = opt(
        None,
        "The correction that ran; left out, the trainer's that reproduces the most metrics.",
        "NAME",
        READ,
    )
    micro_batch: Count | None = opt(
        None,
        "Sequences of a micro-batch, where the trainer averages the means of those.",
        "<int range> [x>=1]",
        READ,
    )
    dp: Count | None = opt(
        None,
        "Data-parallel ranks (rows in blocks), where the trainer averages the means of those.",
        "<int range> [x>=1]",
        READ,
    )
    strict: bool = opt(False, "Exit with 1 where a metric differs.", only=SHELL)


class Merge(Pieces, Written, ForTrainer, Request):
    """What `merge` is asked."""

    tallies: tuple[Path, ...] = opt(
        ...,
        "What `analyze --tally` wrote, of every piece once, in the dump's order.",
        "TALLY.json",
        only=SHELL,
    )


class Convert(Read):
    """What `convert` is asked."""

    source: tuple[str, ...] = opt((), "Files, directories of them, or globs, here.", "SRC", only=SHELL)
    to: Path | None = opt(None, "Where the dump goes.", "FILE.parquet", WRITE)
    forms: bool = opt(False, "List the forms that are read.", "", "", "--list")


class Presets(OwnPresets, Request):
    """What `presets` is asked."""

    name: str | None = opt(
        None, "One preset, or several separated by commas: their exact formulas.", "NAME", only=SHELL
    )
    trainer: str | None = opt(
        None,
        "The preset in this trainer's own syntax, ready to paste; without a NAME, what it can say.",
        "TRAINER",
        "",
        "--for",
    )
    changes: tuple[str, ...] = opt(
        (),
        "Change a threshold: weight.upper=3, reject.lower=0.99. Repeat it, or separate by commas.",
        "KEY=VALUE",
        "",
        "--set",
        many=True,
    )
    json_file: Path | None = opt(None, JSON, "FILE|-", WRITE, "--json", only=SHELL)


class Recover(Request):
    """What `recover` is asked."""

    path: str = opt(..., "The dump as it was to be called, or its journal.", "PATH", only=SHELL)
    to: Path | None = opt(
        None, "Another name for the dump; needed where PATH is a journal.", "FILE.parquet", WRITE
    )


class Report(Texts, Drawn, Request):
    """What `report` is asked."""

    result: Path = opt(..., "What --json wrote; - is stdin.", "RESULT.json", only=SHELL)


COMMANDS = (Analyze, Check, Compare, Convert, Doctor, Gate, Merge, Presets, Recover, Report, Sweep)
MODELS: Mapping[str, type[Request]] = {model.__name__.lower(): model for model in COMMANDS}
"""Command → what it is asked."""
ARGUMENTS = ("dump", "tallies", "source", "name", "path", "result")
"""Fields that are words of the command line without a flag."""
