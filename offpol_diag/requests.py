"""What each command is asked: a model per command, and a field per option. To add an option, add a field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from offpol_diag.options import (
    MOST_SEED,
    PYTHON,
    SHELL,
    Count,
    Device,
    Fields,
    Files,
    Joined,
    Limits,
    Names,
    Number,
    Pairs,
    Paths,
    Progress,
    Request,
    Sample,
    Seed,
    Threads,
    opt,
)

READ, WRITE = "What is read", "What is written"
SAMPLE = 16
"""Prompts that `rescore` begins with."""
BOUNDS, BASELINE = "What must hold", "Against an earlier result"


# ---------------------------------------------------------------- what several commands are asked


class Read(Request):
    """How files are read."""

    columns: Pairs = opt(None, "rollout=NAME,old=NAME", READ, env=True)
    """Which column is which, where the names do not say it; mask=none: none is."""


class ReadDump(Read):
    """How a dump is read."""

    dump: Paths = opt((), "DUMP", file=True, only=SHELL)
    """Parquet files, directories of them, or globs, here or at a URL (s3://, gs://, hf://, …).
    Left out: the dump that pyproject.toml or offpol-diag.toml names, else the sample."""
    on_bad_row: Literal["error", "skip"] = opt("error", "<error|skip>", READ, env=True)
    """Stop at a row that cannot be read, or leave it out and say so at the top of every report."""


class Computed(ReadDump):
    """How numbers are computed."""

    device: Device = opt("auto", "auto|cpu|cuda[:N]", env=True)
    """Where to compute."""
    engine: Literal["local", "ray"] = opt("local", "<local|ray>", env=True)
    """This machine, or the Ray cluster of RAY_ADDRESS (docs/ray.md); the numbers are the same."""
    threads: Threads = opt(None, "auto|N", env=True, usual="auto")
    """Threads that compute; auto is one for each core, as far as memory allows. The numbers are the same."""
    seed: Seed = opt(0, f"<int range> [0<=x<={MOST_SEED}]", env=True)
    """Seed of the bootstrap intervals."""
    progress: Progress = opt(None, only=PYTHON)
    batch_tokens: Count | None = opt(None, only=PYTHON)


class OwnPresets(Fields):
    """Presets of the user."""

    preset_file: Path | None = opt(None, "FILE", READ, env=True)
    """Presets of your own (TOML, the grammar of the catalogue)."""


class Grouped(Fields):
    """What numbers are broken down by."""

    group_by: Names = opt((), "COLUMN,COLUMN", READ, env=True)
    """Break the numbers down by these columns (host, engine, env)."""


class ForTrainer(Fields):
    """Whose configuration is printed."""

    trainer: str | None = opt(None, "TRAINER", "", "--for", env=True)
    """Print the recommended method in this trainer's own syntax (verl, trl, slime, …)."""


class Drawn(Fields):
    """Where a report goes, on the command line."""

    out: Path | None = opt(None, "FILE", WRITE, "--out", "-o", "--html", only=SHELL)
    """Where the HTML report goes."""
    md: Path | None = opt(None, "FILE|-", WRITE, only=SHELL)
    """Write Markdown; - is stdout."""
    verbose: bool = opt(False, "", "", "--verbose", "-v", env=True, only=SHELL)
    """Every table, not the short answer."""


class Written(Drawn):
    """Where a result goes, on the command line."""

    json_file: Path | None = opt(None, "FILE|-", WRITE, "--json", only=SHELL)
    """Write the result as JSON; - is stdout."""


class Texts(Fields):
    """Tokens as text."""

    tokenizer: Path | None = opt(None, "FILE", WRITE, only=SHELL)
    """Show tokens as text: the tokenizer.json of the model (package tokenizers)."""


# ---------------------------------------------------------------- what each command is asked


class Analyze(Texts, Written, ForTrainer, Grouped, OwnPresets, Computed):
    """What `analyze` is asked."""

    presets: Any = opt(None, "all|NAME,NAME", READ, env=True)
    """Corrections to evaluate, also at other thresholds: token_is@3,token_icepop@0.4..4. 20 of all and those
    of the dump's trainer by default; `offpol-diag presets` lists them."""
    no_html: bool = opt(False, "", WRITE, only=SHELL)
    """Write no HTML report."""
    strict: bool = opt(False, only=SHELL)
    """Exit with 1 where the verdict is a bug."""
    by_step: Names = opt((), only=PYTHON)
    sequences: Path | None = opt(None, "FILE.parquet", WRITE)
    """Write one row per sequence: its length, ΣΔ, and what each preset keeps of it."""


class Doctor(Written, Grouped, Computed):
    """What `doctor` is asked."""

    strict: bool = opt(False, only=SHELL)
    """Exit with 1 where the verdict is a bug."""
    explain: str | None = opt(None, "[CAUSE]", only=SHELL, bare="list")
    """Say what is known of a cause (off_by_one, …): what it looks like, public threads, how to confirm it in
    verl, TRL, slime and NeMo-RL, the fix, look-alikes. Reads no dump; without a CAUSE it lists them."""


class Compare(Written, Grouped, OwnPresets, Computed):
    """What `compare` is asked."""

    presets: Any = opt(None, "all|NAME,NAME", READ, env=True)
    """Corrections to evaluate, also at other thresholds: token_is@3; `offpol-diag presets` lists them. Of
    one dump the usual ones, of two runs none, unless you name some."""
    against: Any = opt(None, "NAME", READ)
    """The preset that the others are compared with; the first of --presets unless you name one."""
    as_one: bool = opt(False, "", READ, only=SHELL)
    """Read several DUMPs as the parts of one dump."""


class Sweep(Written, OwnPresets, Computed):
    """What `sweep` is asked."""

    preset: Any = opt(..., "NAME", READ)
    """Whose threshold moves; `offpol-diag presets` lists them."""
    which: str | None = opt(None, "BOUND")
    """Which of its bounds: weight.upper, reject.upper, reject[1].lower, veto.lower; reject or weight alone is
    the window [1/b, b]. Left out: the one that the preset is about."""
    at: Joined | None = opt(None, "B,B,…")
    """The thresholds, rising. Left out: round numbers where the data change."""
    keep: Number | None = opt(None, "SHARE")
    """Solve for the bounds that keep this share (0.95), around the data; reads the dump twice more."""
    trainer: str | None = opt(None, "TRAINER", "", "--for")
    """With --keep: print the bounds as this trainer's config."""


class Gate(Written, OwnPresets, Computed):
    """What `gate` is asked."""

    dump: tuple[str, ...] = opt((), "DUMP|RESULT.json", required=True, only=SHELL)
    """A dump, or a result that --json wrote, to be judged as it is; - is a result on stdin."""
    fail_on: Names = opt((), "DIAGNOSIS", BOUNDS, many=True)
    """A diagnosis that fails, as every worse one does: bug, cannot_tell or honest_mismatch. Repeatable."""
    max: Limits | None = opt(None, "NAME=NUMBER", BOUNDS, many=True)
    """The largest value that passes: --max k3=0.002. Repeatable."""
    min: Limits | None = opt(None, "NAME=NUMBER", BOUNDS, many=True)
    """The smallest value that passes: --min seq_mis.ess_tokens=0.5. Repeatable."""
    gates: Path | None = opt(None, "FILE.toml", BOUNDS)
    """Bounds from a file (docs/ci.md)."""
    baseline: Path | None = opt(None, "RESULT.json", BASELINE)
    """Nothing may be worse than in this result by more than the tolerance."""
    tolerance: Names = opt((), "[NAME=]10%|0.001", BASELINE, many=True)
    """How much worse is allowed: a share of the baseline's value, an amount, or both (10%+0.001); of one
    number or of all. Default 10%. Repeatable."""
    only: Names = opt((), "NAME,NAME", BASELINE)
    """Compare these numbers and no others."""
    presets: Names = opt((), "NAME,NAME", BASELINE, env=True)
    """Presets whose numbers are compared as well."""
    group_by: Names = opt((), only=PYTHON)
    junit: Path | None = opt(None, "FILE.xml", WRITE, only=SHELL)
    """Write the verdicts as JUnit XML; - is stdout."""


class Check(Written, OwnPresets, Computed):
    """What `check` is asked."""

    logged: Files | None = opt(None, "FILE", READ, many=True)
    """The trainer's curves by step: CSV, JSONL or Parquet, as W&B exports them; may be repeated."""
    trainer: str | None = opt(None, "TRAINER", READ, "--for", env=True)
    """Who logs: verl (verl@2025-10, @2025-11, @2026-01, @2026-03), trl, slime, …; left out, what the dump's
    metadata say."""
    presets: Any = opt(None, "NAME,NAME", READ)
    """The corrections that may have run; left out, the recommended one and the trainer's own default."""
    strict: bool = opt(False, only=SHELL)
    """Exit with 1 where a metric differs."""


class Rescore(Written, ReadDump):
    """What `rescore` is asked."""

    model: Any = opt((), "FOLDER|HUB_ID", READ, many=True, required=True)
    """The model that the run trains: a folder with config.json and safetensors, of an adapter of peft too, or
    the name of a model on the hub. Repeated, further ones are other checkpoints, tried as hypotheses."""
    to: Path | None = opt(None, "FILE.parquet", WRITE)
    """Where the scored responses go, with reference_log_probs, reference_entropy and reference_rank beside
    their columns; NAME-rescored.parquet in the working directory unless you name one."""
    sample: Sample = opt(SAMPLE, "N|all")
    """Prompts that are scored, with at least 4,000 tokens; more are taken while the verdict is open."""
    tries: Names = opt((), "all|none|NAME,NAME", "", "--try")
    """Hypotheses to try, by name or family (adapter off, checkpoint, fp8); all of the table by default."""
    base: str | None = opt(None, "FOLDER|HUB_ID", READ)
    """The base model, where --model is an adapter and does not say it."""
    tokenizer: Any = opt(None, "FOLDER", READ)
    """The tokenizer of prompts that are text or messages, where the dump has no prompt_ids."""
    max_length: Count | None = opt(None, "<int range> [x>=1]", READ)
    """Leave out sequences of more tokens, prompt included."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = opt("auto", "auto|float32|bfloat16|float16")
    """Type of the model's body; the head is float32. auto: float32 where it fits, else bfloat16."""
    attention: str | None = opt(None, "NAME")
    """Attention of transformers: sdpa, eager, flex_attention, flash_attention_2."""
    device: Device = opt("auto", "auto|cpu|cuda[:N]", env=True)
    """Where to compute."""
    seed: Seed = opt(0, f"<int range> [0<=x<={MOST_SEED}]", env=True)
    """Seed of the sample, and of the bootstrap intervals."""
    progress: Progress = opt(None, only=PYTHON)
    strict: bool = opt(False, only=SHELL)
    """Exit with 1 where a side is not reproduced."""


class Convert(Read):
    """What `convert` is asked."""

    source: tuple[str, ...] = opt((), "SRC", only=SHELL)
    """Files, directories of them, or globs, here."""
    to: Path | None = opt(None, "FILE.parquet", WRITE)
    """Where the dump goes."""
    forms: bool = opt(False, "", "", "--list")
    """List the forms that are read."""


class Presets(OwnPresets, Request):
    """What `presets` is asked."""

    name: str | None = opt(None, "NAME", only=SHELL)
    """One preset, or several separated by commas, also at other thresholds (token_is@3): their formulas."""
    trainer: str | None = opt(None, "TRAINER", "", "--for")
    """The preset in this trainer's own syntax, ready to paste; without a NAME, what it can say."""
    json_file: Path | None = opt(None, "FILE|-", WRITE, "--json", only=SHELL)
    """Write the result as JSON; - is stdout."""


class Report(Texts, Drawn, Request):
    """What `report` is asked."""

    result: Path = opt(..., "RESULT.json", only=SHELL)
    """What --json wrote; - is stdin."""


COMMANDS = (Analyze, Check, Compare, Convert, Doctor, Gate, Presets, Report, Rescore, Sweep)
MODELS: Mapping[str, type[Request]] = {model.__name__.lower(): model for model in COMMANDS}
"""Command → what it is asked."""
ARGUMENTS = ("dump", "source", "name", "result")
"""Fields that are words of the command line without a flag."""
