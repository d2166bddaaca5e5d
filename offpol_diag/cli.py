"""The command line: a function per command, its options its arguments; each calls one function of `api`.

A docstring is the help: its first paragraphs, and under each heading an entry for every option, with two
spaces before what is said of it. Options that several commands have are fields of a group, which stands for
them in a signature. An option is also an environment variable (`OFFPOL_DIAG_SEED`) and a key of
`offpol-diag.toml` or of `[tool.offpol-diag]` in `pyproject.toml`; flags beat the environment, which beats the
file. What commands need is imported when they run, so that `--help` is instant.
"""

from __future__ import annotations

import inspect
import json as to_json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from string import ascii_uppercase
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand

import offpol_diag
from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.printable import clean, printable_json, printable_lines
from offpol_diag.shell import (
    FAILED,
    STDOUT,
    Outputs,
    exit_codes,
    key,
    note,
    require_addresses,
    say_where,
)

SAMPLE = Path(__file__).parent / "data" / "sample.parquet"
HOMES: Mapping[str, tuple[str, ...]] = {"offpol-diag.toml": (), "pyproject.toml": ("tool", "offpol-diag")}
"""Files that may hold settings → the path of tables to them; the first that has any is read."""
NAMES = {"for": "trainer", "out": "html", "list": "forms", "try": "tries"}
"""Flag → its argument, where their names differ."""
LOCAL = frozenset({"explain", "against", "presets trainer", "check presets"})
"""Options that neither the environment nor the settings file sets."""
EXITS = {"passed": 0, "failed": FAILED, "could not say": 2}
WILDCARD, STEM = re.compile(r"\[[^\]]*\]|[*?]+"), 100
"""What stands for other characters in a glob; most characters of a dump's name in a report's name."""

app = typer.Typer(
    name="offpol-diag",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


# ---------------------------------------------------------------- options that several commands have


@dataclass
class Reads:
    """How a dump is read.

    Given:
        dump DUMP  Parquet files, directories of them, or globs, here or at a URL (s3://, gs://, hf://, …).
            Left out: the dump that pyproject.toml or offpol-diag.toml names, else the sample.

    What is read:
        --columns rollout=NAME,old=NAME  Which column is which, where the names do not say it; mask=none:
            none is.
        --on-bad-row <error|skip>  Stop at a row that cannot be read, or leave it out and say so at the top
            of every report.
    """

    dump: list[str] | None = None
    columns: str | None = None
    on_bad_row: str = "error"

    def asked(self) -> dict[str, Any]:
        """Return the arguments of a function of `api`."""
        return {name: x for name, x in vars(self).items() if name != "dump"}


@dataclass
class Computes(Reads):
    """How numbers are computed.

    Options:
        --device auto|cpu|cuda[:N]  Where to compute.
        --engine <local|ray>  This machine, or the Ray cluster of RAY_ADDRESS (docs/scale.md); the numbers are
            the same.
        --threads auto|N  Threads that compute; auto is one for each core, as far as memory allows. The
            numbers are the same.
        --seed <int range> [x>=0]  Seed of the bootstrap intervals.
    """

    device: str = "auto"
    engine: str = "local"
    threads: str = "auto"
    seed: str = "0"


@dataclass
class Evaluates(Computes):
    """How presets are evaluated.

    What is read:
        --preset-file FILE  Presets of your own (TOML, the grammar of the catalogue).
    """

    preset_file: Path | None = None


@dataclass
class Draws:
    """Where a report goes, and how much is printed.

    What is written:
        --out, -o, --html FILE  Where the HTML report goes.
        --md FILE|-  Write Markdown; - is stdout.

    Options:
        --quiet, -q  One line; no progress and no remarks.
        --verbose, -v  Every table, not the short answer.
    """

    html: Path | None = None
    md: Path | None = None
    quiet: bool = False
    verbose: bool = False


@dataclass
class Writes(Draws):
    """Where a result goes, too.

    What is written:
        --json FILE|-  Write the result as JSON; - is stdout.
    """

    json: Path | None = None


# ---------------------------------------------------------------- what a command is


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Make a function a command; what it raises becomes a message and an exit code."""
    name, (help, said) = function.__name__, described(function)
    parameters, groups = [], dict[str, Any]()
    for one in inspect.signature(function, eval_str=True).parameters.values():
        own = {one.name: (one.annotation, one.default)}
        if is_dataclass(one.annotation):
            group: Any = one.annotation
            groups[one.name] = group
            hints = get_type_hints(group)
            own = {field.name: (hints[field.name], field.default) for field in fields(group)}
            for part in group.__mro__[:-1]:
                said = described(part)[1] | said
        for word, (kind, default) in own.items():
            if word in said:
                flags, more = said[word]
                if flags:
                    more |= {
                        "allow_from_autoenv": LOCAL.isdisjoint({word, f"{name} {word}"}),
                        "show_envvar": False,
                    }
                    if word in NAMES.values() and more["allow_from_autoenv"]:
                        more["envvar"] = f"OFFPOL_DIAG_{flags[0].strip('-').upper()}"
                    kind = Annotated[kind, typer.Option(*flags, **more)]
                else:
                    kind = Annotated[kind, typer.Argument(**more)]
            parameters.append(inspect.Parameter(word, one.KEYWORD_ONLY, default=default, annotation=kind))

    def run(**given: Any) -> None:
        for word, group in groups.items():
            given[word] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        quiet = given["out"].quiet if "out" in given else given["quiet"]
        with exit_codes(given["context"]), remarks(quiet):
            function(**given)

    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    how = {"auto_envvar_prefix": "OFFPOL_DIAG"}
    app.command(name, cls=Doctor if name == "doctor" else TyperCommand, help=help, context_settings=how)(run)
    return function


def described(thing: object) -> tuple[str, dict[str, tuple[list[str], dict[str, Any]]]]:
    """Return the help that a docstring holds, and argument → its flags, and how typer shows it."""
    help, found = [], {}
    for paragraph in (inspect.getdoc(thing) or "").split("\n\n"):
        heading, colon, entries = paragraph.partition(":\n    ")
        if not colon or "\n" in heading:
            help.append(paragraph.replace("\n", " "))  # typer keeps line ends
            continue
        for entry in re.split(r"\n    (?=\S)", entries):
            spelled, _, text = entry.partition("  ")
            names, _, metavar = re.sub(r"(?<=,) ", "", spelled).partition(" ")
            flags = names.split(",")
            word = flags[0].strip("-").replace("-", "_")
            more: dict[str, Any] = {"metavar": metavar or None, "help": " ".join(text.split())}
            more |= {"show_default": bool(metavar), "autocompletion": COMPLETE.get(word)}
            if heading not in ("Given", "Options"):
                more["rich_help_panel"] = heading
            found[NAMES.get(word, word)] = flags if names.startswith("-") else [], more
    return "\n\n".join(help), found


class Doctor(TyperCommand):
    """The command `doctor`, whose `--explain` lists the causes where it stands without one."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command."""
        for at in reversed([at for at, word in enumerate(args) if word == "--explain"]):
            if (args[at + 1 : at + 2] or ["-"])[0].startswith("-"):
                args = [*args[: at + 1], "list", *args[at + 1 :]]
        return super().parse_args(ctx, args)


def complete_presets(incomplete: str) -> list[str]:
    """Complete the last of several names of presets."""
    from offpol_diag.presets.catalogue import load

    before, comma, last = incomplete.rpartition(",")
    return [f"{before}{comma}{name}" for name in ("all", *load()) if name.startswith(last)]


def complete_trainer(incomplete: str) -> list[str]:
    """Complete the name of a trainer."""
    from offpol_diag.trainers import TRAINERS

    return [name for name in TRAINERS if name.startswith(incomplete)]


def _one_of(*values: str) -> Callable[[str], list[str]]:
    def complete(incomplete: str) -> list[str]:
        return [value for value in values if value.startswith(incomplete)]

    return complete


COMPLETE = {
    **dict.fromkeys(("presets", "preset", "against", "name"), complete_presets),
    "for": complete_trainer,
    "on_bad_row": _one_of("error", "skip"),
    "device": _one_of("auto", "cpu", "cuda"),
    "engine": _one_of("local", "ray"),
    "dtype": _one_of("auto", "float32", "bfloat16", "float16"),
    "fail_on": _one_of("bug", "cannot_tell", "honest_mismatch"),
}
"""Word of an option → what completes it on Tab."""


@contextmanager
def remarks(quiet: bool) -> Iterator[None]:
    """Print on stderr what the package logs within the block."""
    handler, logger = logging.Handler(), logging.getLogger("offpol_diag")
    handler.emit = lambda record: note(record.getMessage(), quiet)  # type: ignore[method-assign]
    before = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    try:
        yield
    finally:
        logger.setLevel(before[0])
        logger.propagate = before[1]
        logger.removeHandler(handler)


@contextmanager
def progress(quiet: bool, doing: str = "reading", unit: str = "rows") -> Iterator[Any]:
    """Yield a function that shows (done, in all) as a bar on stderr; None if that is no terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not (console.is_terminal and console.file.isatty()):  # FORCE_COLOR makes a log no terminal
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    rate = TextColumn(f"{unit}, {{task.fields[rate]}} {unit}/s,")
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(doing, total=None, rate="–")

        def report(done: int, total: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=done, total=total, rate="–" if speed is None else f"{speed:,.0f}")

        yield report


def _show_version(wanted: bool) -> None:
    if wanted:
        from offpol_diag import __version__

        typer.echo(f"offpol-diag {__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 passed · 1 a gate failed, or --strict found a bug or a difference · 2 could not "
    "say (bad arguments, bad dump, no data)."
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version", "-V", help="Print the version and exit.", is_eager=True, callback=_show_version
        ),
    ] = False,
) -> None:
    """Off-policy mismatch in LLM reinforcement learning, from a dump of per-token log-probs."""
    with exit_codes():
        context.meta["settings"], context.default_map = settings(context.command)


def settings(group: Any) -> tuple[str, dict[str, Any]]:
    """Read the settings of the working directory: the name of their file, and command → argument → value.

    Raises:
        UsageError: the file is not TOML, or has an unknown key.
    """
    from offpol_diag.files import MOST_TOML, read, toml

    for file, inside in HOMES.items():
        try:
            table: Any = toml(read(Path(file), MOST_TOML).decode("utf-8-sig"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            hint = "mend it, or run in another folder"
            raise UsageError(f"{file}: cannot be read as TOML ({why})", hint) from error
        for name in inside:
            table = table.get(name, {}) if isinstance(table, dict) else {}
        if not table or not isinstance(table, dict):
            continue
        given = {name.replace("-", "_"): value for name, value in table.items()}
        every = allowed(group)
        for name in given.keys() - {name for params in every.values() for name in params}:
            known = list(dict.fromkeys(name for params in every.values() for name in params))
            hint = did_you_mean(name, known) or f"the keys are {', '.join(known)}"
            raise UsageError(f"{file}: there is no setting {name!r}", hint)
        return file, {
            command: {
                param.name: _text(given[name], param) for name, param in params.items() if name in given
            }
            for command, params in every.items()
        }
    return "", {}


def allowed(group: Any) -> dict[str, dict[str, Any]]:
    """Return command → key of the settings file → option of typer."""
    return {
        name: {
            key(param): param
            for param in one.params
            if param.name == "dump" or getattr(param, "allow_from_autoenv", False)
        }
        for name, one in group.commands.items()
    }


def _text(value: Any, param: Any) -> Any:
    """Return a value of TOML as the words of a command line."""
    if getattr(param, "multiple", False) or param.nargs == -1:
        return [str(one) for one in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, dict):
        return ",".join(f"{name}={one}" for name, one in value.items())
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, bool) else str(value)


def dumps(context: Any, how: Reads, quiet: bool) -> list[str]:
    """Return the dumps to read: those given, else the settings file's, else the sample; remarked on."""
    require_addresses()
    read = list(how.dump or ())
    if not read:
        note("no DUMP given: reading the sample dump that ships with offpol-diag", quiet)
    elif from_file(context):
        named, many = ", ".join(map(clean, read)), ", as one dump" * (len(read) > 1)
        note(f"no DUMP given: reading {named}, named in {context.meta['settings']}{many}", quiet)
    elif len(read) > 1:
        note(f"{len(read)} DUMPs given: they are read as one dump", quiet)
    return read or [str(SAMPLE)]


def from_file(context: Any) -> bool:
    """Return whether the settings file names the dump."""
    return getattr(context.get_parameter_source("dump"), "name", "") == "DEFAULT_MAP"


def default_html(sources: Sequence[str]) -> Path:
    """Return `offpol-diag-<stem>.html` in the working directory, named after the first source.

    Of a glob the stem is what is not a wildcard: `train_*.parquet` gives `train`.
    """
    stem = ""
    for part in reversed(re.split(r"[/\\]", clean(sources[0]))):
        name = part.rsplit(".", 1)[0]
        fixed = WILDCARD.sub("-", name)
        if fixed != name:
            fixed = re.sub(r"[_.-]*-[_.-]*", "-", fixed).strip("_")
        stem = stem or re.sub(r"[^A-Za-z0-9_.=+-]+", "-", fixed).strip(".-")
    return Path(f"offpol-diag-{(stem or 'stdin')[:STEM].strip('.-')}.html")


def outputs(out: Draws, *sources: object, junit: Path | None = None, rows: Path | None = None) -> Outputs:
    """Return what is written of a result, checked against what is read."""
    targets = {"report": out.html, "json": getattr(out, "json", None), "md": out.md, "junit": junit}
    return Outputs(targets, *(one for one in sources if one is not None), rows=rows)


def deliver(files: Outputs, found: Any, out: Draws) -> None:
    """Write a result in every form that is asked for, and draw it on stdout unless that holds a form."""
    from offpol_diag.report import render

    texts = {form: render(found, form) for form in files.targets}
    shown = "" if files.takes_stdout else render(found, "terminal", out.verbose, out.quiet)
    files.write(texts, shown, out.quiet)


# ---------------------------------------------------------------- the commands


@command
def analyze(
    context: typer.Context,
    presets: str | None = None,
    trainer: str | None = None,
    group_by: str = "",
    strict: bool = False,
    tokenizer: Path | None = None,
    no_html: bool = False,
    sequences: Path | None = None,
    *,
    how: Evaluates,
    out: Writes,
) -> None:
    """How bad is the mismatch, how sure is that, and where is it: terminal summary and one HTML file.

    The HTML goes to offpol-diag-<name>.html in the working directory unless -o says otherwise. With --json -
    or --md - stdout holds that and nothing else. The exit code is 0 whatever the diagnosis, and with --strict
    1 where it is a bug.

    What is read:
        --presets all|NAME,NAME  Corrections to evaluate, also at other thresholds: token_is@3,
            token_icepop@0.4..4. 20 of all and those of the dump's trainer by default; `offpol-diag presets`
            lists them.
        --group-by COLUMN,COLUMN  Break the numbers down by these columns (host, engine, env).

    What is written:
        --no-html  Write no HTML report.
        --sequences FILE.parquet  Write one row per sequence: its length, ΣΔ, and what each preset keeps of
            it.
        --tokenizer FILE  Show tokens as text: the tokenizer.json of the model (package tokenizers).

    Options:
        --for TRAINER  Print the recommended method in this trainer's own syntax (verl, trl, slime, …).
        --strict  Exit with 1 where the verdict is a bug.
    """
    read = dumps(context, how, out.quiet)
    out.html = None if no_html else out.html or default_html(read)
    with outputs(out, *read, how.preset_file, tokenizer, rows=sequences) as files:
        from offpol_diag.report.tokens import with_texts

        asked: dict[str, Any] = {
            "presets": presets,
            "trainer": trainer,
            "group_by": group_by,
            "sequences": files.staged,
        }
        with progress(out.quiet) as bar:
            found = offpol_diag.analyze(read, **asked, progress=bar, **how.asked()).summary
        deliver(files, with_texts(found, tokenizer), out)
    raise typer.Exit(FAILED if strict and found.is_bug else 0)


@command
def check(
    context: typer.Context,
    logged: list[str] | None = None,
    trainer: str | None = None,
    presets: str | None = None,
    strict: bool = False,
    *,
    how: Evaluates,
    out: Writes,
) -> None:
    """What does a trainer log of this dump? Step by step, and its own curves beside it.

    Each training step of the dump is taken as one batch of the trainer that --for names. With --logged every
    metric is compared with the curve of that name: where they are furthest apart, and from which step on
    they differ by more than float32 rounds.

    The exit code is 0 whatever is found, and with --strict 1 where a metric differs.

    What is read:
        --logged FILE  The trainer's curves by step: CSV, JSONL or Parquet, as W&B exports them; may be
            repeated.
        --for TRAINER  Who logs: verl (verl@2025-10, @2025-11, @2026-01, @2026-03), trl, slime, …; left out,
            what the dump's metadata say.
        --presets NAME,NAME  The corrections that may have run; left out, the recommended one and the
            trainer's own default.

    Options:
        --strict  Exit with 1 where a metric differs.
    """
    read = dumps(context, how, out.quiet)
    with outputs(out, *read, *(logged or ()), how.preset_file) as files:
        asked: dict[str, Any] = {"logged": logged or None, "trainer": trainer, "presets": presets}
        with progress(out.quiet) as bar:
            found = offpol_diag.check(read, **asked, progress=bar, **how.asked())
        deliver(files, found, out)
    raise typer.Exit(FAILED if strict and found.different else 0)


@command
def compare(
    context: typer.Context,
    presets: str | None = None,
    against: str | None = None,
    as_one: bool = False,
    group_by: str = "",
    *,
    how: Evaluates,
    out: Writes,
) -> None:
    """Corrections side by side on one dump, or further runs against the first.

    One DUMP: what each correction keeps, drops and weighs, which does better, and what each drops that the
    first one keeps. Differences are paired, with intervals of their own.

    Several DUMPs: the first is run A, the others are B, C, … (FP8 against BF16, before against after an
    upgrade); what differs from A, by how much, and whether it is real after a correction for looking at many
    numbers. Prompts that runs share (group_id) are resampled together. With --as-one they are the parts of
    one dump; a quoted glob or a directory is one DUMP as well.

    What is read:
        --presets all|NAME,NAME  Corrections to evaluate, also at other thresholds: token_is@3; `offpol-diag
            presets` lists them. Of one dump the usual ones, of two runs none, unless you name some.
        --against NAME  The preset that the others are compared with; the first of --presets unless you name
            one.
        --as-one  Read several DUMPs as the parts of one dump.
        --group-by COLUMN,COLUMN  Break the numbers down by these columns (host, engine, env).
    """
    runs = [] if as_one or from_file(context) else list(how.dump or ())
    if len(runs) > len(ascii_uppercase):
        raise UsageError(
            f"{len(runs)} DUMPs given: at most {len(ascii_uppercase)} runs are compared",
            "add --as-one to read them as the parts of one dump, or name each run by a directory or a quoted "
            "glob: compare 'before/*.parquet' 'after/*.parquet'",
        )
    if len(runs) > 1:
        require_addresses()
        letters = (
            f"{clean(one)} is run {letter}" for one, letter in zip(runs, ascii_uppercase, strict=False)
        )
        note(f"{len(runs)} DUMPs given: {', '.join(letters)} (--as-one reads them as one)", out.quiet)
    read: list[list[str]] = [[one] for one in runs] if runs[1:] else [dumps(context, how, out.quiet)]
    with outputs(out, *(name for one in read for name in one), how.preset_file) as files:
        asked: dict[str, Any] = {"presets": presets, "against": against, "group_by": group_by}
        with progress(out.quiet) as bar:
            found = offpol_diag.compare(read[0], *read[1:], **asked, progress=bar, **how.asked()).summary
        deliver(files, found, out)


@command
def convert(
    context: typer.Context,
    source: list[str] | None = None,
    to: Path | None = None,
    forms: bool = False,
    columns: str | None = None,
    quiet: bool = False,
) -> None:
    """What a trainer wrote by itself, as a canonical dump: Parquet, one row per sequence.

    Every command that takes a DUMP reads the same files by itself; convert keeps the result.

    Given:
        source SRC  Files, directories of them, or globs, here.

    What is read:
        --columns rollout=NAME,old=NAME  Which column is which, where the names do not say it.

    What is written:
        --to FILE.parquet  Where the dump goes.

    Options:
        --list  List the forms that are read.
        --quiet, -q  No remarks.
    """
    if forms:
        from offpol_diag.dump.forms import FORMS
        from offpol_diag.report.terminal import tables
        from offpol_diag.table import Table

        rows = tuple((one.name, one.trainer, one.files, one.holds) for one in FORMS)
        Outputs({}).write({}, tables([Table("forms", "", ("form", "trainer", "files", "holds"), rows)]))
        return
    if not source or to is None:
        hint = "offpol-diag convert SRC… --to out.parquet; --list shows the forms"
        raise UsageError("convert needs files and a target", hint)
    Outputs({"dump": to}, *source)
    made = offpol_diag.convert(source, to, columns=columns)
    for line in (*made.notes, f"{to}: {made.sequences:,} sequences, {made.tokens:,} tokens"):
        note(line, quiet)


@command
def doctor(
    context: typer.Context,
    strict: bool = False,
    explain: str | None = None,
    group_by: str = "",
    *,
    how: Computes,
    out: Writes,
) -> None:
    """Is the mismatch a bug, and which one: the verdict, its causes with their evidence, and the fix.

    Says in one sentence whether the log-probs are logged wrongly, then what speaks for each cause, where it
    is, how to confirm it, what to change and the numbers after that, then what was ruled out and what this
    dump cannot decide. No correction is evaluated and none is recommended: `offpol-diag analyze` does both.

    The exit code is 0 whatever the verdict, and with --strict 1 where it is a bug.

    With --explain no dump is read: it says what is known of one cause.

    What is read:
        --group-by COLUMN,COLUMN  Break the numbers down by these columns (host, engine, env).

    Options:
        --strict  Exit with 1 where the verdict is a bug.
        --explain [CAUSE]  Say what is known of a cause (off_by_one, …): what it looks like, public threads,
            how to confirm it in verl, TRL, slime and NeMo-RL, the fix, look-alikes. Reads no dump; without
            a CAUSE it lists them.
    """
    if explain is not None:
        _explain(
            explain, {"DUMP": how.dump and not from_file(context), "-o": out.html, "--json": out.json}, out
        )
        return
    read = dumps(context, how, out.quiet)
    with outputs(out, *read) as files:
        with progress(out.quiet) as bar:
            found = offpol_diag.doctor(read, group_by=group_by, progress=bar, **how.asked()).summary
        deliver(files, found, out)
    raise typer.Exit(FAILED if strict and found.is_bug else 0)


def _explain(cause: str, beside: Mapping[str, object], out: Writes) -> None:
    """Print what is known of a cause, or the list of causes; with --md as Markdown."""
    from offpol_diag.diagnosis import registry
    from offpol_diag.report.explain import every_cause, explained
    from offpol_diag.report.markdown import markdown
    from offpol_diag.report.terminal import terminal

    for name in (name for name, value in beside.items() if value):
        hint = "`offpol-diag doctor --explain CAUSE` writes text, and with --md Markdown"
        raise UsageError(f"--explain reads no dump and has no result, and {name} is given", hint)
    answer = every_cause() if cause == "list" else explained(registry.cause(cause))
    texts = {"md": markdown(answer)} if out.md else {}
    Outputs({"md": out.md}).write(texts, terminal(answer, out.verbose, out.quiet), out.quiet)


@command
def gate(
    context: typer.Context,
    fail_on: str | None = None,
    max: list[str] | None = None,
    min: list[str] | None = None,
    gates: Path | None = None,
    baseline: Path | None = None,
    tolerance: str | None = None,
    presets: str = "",
    junit: Path | None = None,
    *,
    how: Evaluates,
    out: Writes,
) -> None:
    """Hold numbers against bounds, or against an earlier result; the exit code is the verdict.

    0: every bound holds. 1: a bound failed. 2: no bound failed, but one could not be judged (a name that is
    no metric, a value that cannot be known from this dump or is unreliable, NaN), or nothing could be judged.

    A bound fails only when the whole 95% interval lies beyond it. An interval with values on both sides
    passes, and the table says that it is open. A number without an interval is judged by its value; a value
    on its bound passes.

    --fail-on bug fails where the diagnosis is a bug; it could not be judged (2) where a bug is among several
    causes that fit, or cannot be looked for: columns that are copies, fewer than 16 sequences or 4 prompts.
    Causes that fit and are all honest pass as open. --fail-on cannot_tell is the strict way: it fails for all
    of these.

    Against a baseline none may be worse, in the order healthy, honest_mismatch, cannot_tell, bug.

    NAME is a metric (k3, drift2.k3), a preset's (seq_mis.ess_tokens), or either at every training step
    (step:NAME).

    Under GitHub Actions the job summary gets the Markdown.

    Given:
        dump DUMP|RESULT.json  A dump, or a result that --json wrote, to be judged as it is; - is a result
            on stdin.

    What must hold:
        --fail-on DIAGNOSIS  The mildest diagnosis that fails: cannot_tell or bug.
        --max NAME=NUMBER  The largest value that passes: --max k3=0.002. Repeatable.
        --min NAME=NUMBER  The smallest value that passes: --min seq_mis.ess_tokens=0.5. Repeatable.
        --gates FILE.toml  Bounds from a file (docs/ci.md).

    Against an earlier result:
        --baseline RESULT.json  Nothing may be worse than in this result by more than the tolerance.
        --tolerance SHARE  How much worse is allowed, as a share of the baseline's value; 0.1 by default.
        --presets NAME,NAME  Presets whose numbers are compared as well.

    What is written:
        --junit FILE.xml  Write the verdicts as JUnit XML; - is stdout.
    """
    if not how.dump:
        raise UsageError("missing argument 'DUMP|RESULT.json'", "see `offpol-diag gate --help`")
    require_addresses()
    with outputs(out, *how.dump, gates, baseline, how.preset_file, junit=junit) as files:
        from offpol_diag.gate import outcome

        asked: dict[str, Any] = {"max": max or (), "min": min or (), "gates": gates, "baseline": baseline}
        asked |= {"tolerance": tolerance, "presets": presets, "fail_on": fail_on}
        what: Any = offpol_diag.Report(piped()) if how.dump == [str(STDOUT)] else how.dump
        with progress(out.quiet) as bar:
            found = offpol_diag.gate(what, **asked, progress=bar, **how.asked()).summary
        deliver(files, found, out)
    _add_to_job_summary(found)
    raise typer.Exit(EXITS[outcome(found.gates)])


def piped() -> Any:
    """Return the result that is piped into standard input."""
    from offpol_diag.result import loads, text_of

    if sys.stdin is None or sys.stdin.closed:
        hint = "pipe a result in: offpol-diag analyze dump.parquet --json - | offpol-diag report -"
        raise UsageError("-: nothing is piped into standard input", hint)
    return loads(text_of(sys.stdin.buffer, "stdin"), "stdin")


def _add_to_job_summary(found: Any) -> None:
    """Add to the job summary of GitHub Actions where there is one; failing to write it fails no gate."""
    from offpol_diag.report import render

    if place := os.environ.get("GITHUB_STEP_SUMMARY"):
        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write("\n" + render(found, "md"))
        except OSError as error:
            note(f"GITHUB_STEP_SUMMARY: {place} cannot be written ({error.strerror})")


@command
def presets(
    context: typer.Context,
    name: str | None = None,
    trainer: str | None = None,
    preset_file: Path | None = None,
    json: Path | None = None,
    quiet: bool = False,
) -> None:
    """The catalogue of corrections; with a NAME its exact formulas, or its configuration for a trainer.

    Given:
        name NAME  One preset, or several separated by commas, also at other thresholds (token_is@3): their
            formulas.

    What is read:
        --preset-file FILE  Presets of your own (TOML, the grammar of the catalogue).

    What is written:
        --json FILE|-  Write the result as JSON; - is stdout.

    Options:
        --for TRAINER  The preset in this trainer's own syntax, ready to paste; without a NAME, what it can
            say.
        --quiet, -q  No remarks.
    """
    from offpol_diag.presets.catalogue import load
    from offpol_diag.report.presets import catalogue, explained
    from offpol_diag.report.terminal import tables
    from offpol_diag.trainers import trainer_named
    from offpol_diag.trainers.translate import config_for, sayable

    files = Outputs({"json": json}, *([preset_file] if preset_file else []))
    known = load(preset_file)
    chosen = {preset.name: preset for preset in known.resolve(name or "all")}
    if trainer and name:
        configs = [config_for(preset, trainer) for preset in chosen.values()]
        drawn = printable_lines("\n".join(config.text() for config in configs))
        rows: dict[str, Any] = {"configs": [{**asdict(one), "text": one.text()} for one in configs]}
    else:
        if trainer:
            said = trainer_named(trainer)
            note(
                f"what {said} can say; `offpol-diag presets NAME --for {said}` prints it, ready to paste",
                quiet,
            )
            chosen = {key: preset for key, preset in chosen.items() if sayable(preset, (said,))}
        rows = {"presets": {key: {**asdict(one), "kind": one.kind} for key, one in chosen.items()}}
        parts = [explained(one, known.aliases, sayable(one)) for one in chosen.values()]
        drawn = tables(
            [part for one in parts for part in one] if name else [*catalogue(chosen, known.default)]
        )
    text = printable_json(to_json.dumps({"format": 1} | rows, indent=1, ensure_ascii=False)) + "\n"
    files.write({"json": text} if json else {}, drawn, quiet)


@command
def report(
    context: typer.Context,
    result: Path,
    tokenizer: Path | None = None,
    *,
    out: Draws,
) -> None:
    """Draw a report again from the JSON of a result; equal to the one first drawn.

    Given:
        result RESULT.json  What --json wrote; - is stdin.

    What is written:
        --tokenizer FILE  Show tokens as text: the tokenizer.json of the model (package tokenizers).
    """
    out.html = out.html or default_html([str(result)])
    with outputs(out, result, tokenizer) as files:
        from offpol_diag.report.tokens import with_texts
        from offpol_diag.result import load

        found = piped() if result == STDOUT else load(result)
        deliver(files, with_texts(found, tokenizer), out)


@command
def rescore(
    context: typer.Context,
    model: list[str],
    to: Path | None = None,
    sample: str = "16",
    tries: str = "",
    base: str | None = None,
    max_length: str | None = None,
    dtype: str = "auto",
    attention: str | None = None,
    device: str = "auto",
    seed: str = "0",
    strict: bool = False,
    *,
    how: Reads,
    out: Writes,
) -> None:
    """Who is wrong, the engine or the trainer? The run's model scores the responses again: a third opinion.

    Says which column that model does not reproduce, and tries the hypotheses instead of guessing them:
    without the adapter, at another scale, with other checkpoints, another temperature or prompt, without the
    window, the soft cap, the sinks or the scaling of RoPE. Each column is judged by itself, of all responses
    and by host, step and prompt, against what bf16 alone changes of the model.

    Needs token_ids and prompt_ids in the dump (docs/dumps.md), and the extra rescore. The scored responses
    are written with the reference's log-probs, entropies and ranks beside their columns.

    The exit code is 0 whatever is found, and with --strict 1 where a side is not reproduced.

    What is read:
        --model FOLDER|HUB_ID  The model that the run trains: a folder with config.json and safetensors, of
            an adapter of peft too, or the name of a model on the hub. Repeated, further ones are other
            checkpoints, tried as hypotheses.
        --base FOLDER|HUB_ID  The base model, where --model is an adapter and does not say it.
        --max-length <int range> [x>=1]  Leave out sequences of more tokens, prompt included.

    What is written:
        --to FILE.parquet  Where the scored responses go, with reference_log_probs, reference_entropy and
            reference_rank beside their columns; NAME-rescored.parquet in the working directory unless you
            name one.

    Options:
        --sample N|all  Prompts that are scored, and more of them up to 4,000 tokens.
        --try all|none|NAME,NAME  Hypotheses to try, by name or family (adapter off, checkpoint); all of
            the table by default.
        --dtype auto|float32|bfloat16|float16  Type of the model's body; the head is float32. auto: float32
            where it fits, else bfloat16.
        --attention NAME  Attention of transformers: sdpa, eager, flex_attention, flash_attention_2.
        --device auto|cpu|cuda[:N]  Where to compute.
        --seed <int range> [x>=0]  Seed of the sample, and of the bootstrap intervals.
        --strict  Exit with 1 where a side is not reproduced.
    """
    read = dumps(context, how, out.quiet)
    to = to or Path(f"{default_html(read).stem.removeprefix('offpol-diag-')}-rescored.parquet")
    Outputs({"dump": to}, *map(clean, read))
    with outputs(out, *read) as files:
        asked: dict[str, Any] = {"to": to, "sample": sample, "tries": tries, "base": base, "seed": seed}
        asked |= {"max_length": max_length, "dtype": dtype, "attention": attention}
        with progress(out.quiet, "scoring", "tokens") as bar:
            found = offpol_diag.rescore(
                read, model, **asked, device=device, progress=bar, **how.asked()
            ).summary
        deliver(files, found, out)
    if not out.quiet:
        say_where("dump", to, files.takes_stdout)
    raise typer.Exit(FAILED if strict and found.reference and found.reference.odd else 0)


@command
def sweep(
    context: typer.Context,
    *,
    preset: str,
    which: str | None = None,
    at: str | None = None,
    keep: str | None = None,
    how: Evaluates,
    out: Writes,
) -> None:
    """Threshold against what is kept, ESS, bias and variance: one preset at many thresholds, in one reading.

    With --keep the bounds that keep an asked share. With -o an HTML report.

    What is read:
        --preset NAME  Whose threshold moves; `offpol-diag presets` lists them.

    Options:
        --which BOUND  Which of its bounds: weight.upper, reject[0].lower; reject[0] or weight alone is the
            window [1/b, b]. Left out: the one that the preset is about.
        --at B,B,…  The thresholds, rising. Left out: round numbers where the data change.
        --keep SHARE  Solve for the bounds that keep this share (0.95), around the data; reads the dump once
            more.
    """
    read = dumps(context, how, out.quiet)
    with outputs(out, *read, how.preset_file) as files:
        asked: dict[str, Any] = {"which": which, "at": at, "keep": keep}
        with progress(out.quiet) as bar:
            found = offpol_diag.sweep(read, preset, **asked, progress=bar, **how.asked()).summary
        deliver(files, found, out)
