"""The command line: a function per command, which calls that of its name in `api` and shows what it returns.

The options of a command are the arguments of that function, and the fields of `Output` that it names. Each is
an environment variable too (`OFFPOL_DIAG_SEED`), and a key of `offpol-diag.toml` or of `[tool.offpol-diag]`
in `pyproject.toml`; flags override the environment, which overrides the file. What commands need is imported
when they run, so that `--help` is instant.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.core import TyperGroup

import offpol_diag
from offpol_diag import api
from offpol_diag.api import option
from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.files import MOST_TOML, read, toml
from offpol_diag.printable import clean, printable, printable_lines
from offpol_diag.shell import STDOUT, check_targets, exit_codes, note, progress, write

Function = Callable[..., Any]
KEYWORD = Parameter.KEYWORD_ONLY
SAMPLE = Path(__file__).parent / "data" / "sample.parquet"
EXITS = {"passed": 0, "failed": 1, "could not say": 2}


@dataclass
class Output:
    """Options that the command line alone has: where a result goes, and how much of it stdout shows."""

    html: Annotated[Path | None, option("FILE", "Write the page.", "--html", "--out", "-o")] = None
    no_html: Annotated[bool, option(None, "Write no page.", "--no-html")] = False
    md: Annotated[Path | None, option("FILE|-", "Write Markdown; - is stdout.")] = None
    json: Annotated[Path | None, option("FILE|-", "Write the result as JSON; - is stdout.")] = None
    junit: Annotated[Path | None, option("FILE|-", "Write the verdicts as JUnit XML.")] = None
    tokenizer: Annotated[Path | None, option("FILE", "Show tokens as text: a tokenizer.json.")] = None
    explain: Annotated[str, option("CAUSE|list", "Explain a cause; reads no dump.")] = ""
    strict: Annotated[bool, option(None, "Exit with 1 if a bug or a difference is found.", "--strict")] = (
        False
    )
    quiet: Annotated[bool, option(None, "Print one line; no progress, no remarks.", "--quiet", "-q")] = False
    verbose: Annotated[bool, option(None, "Show every table.", "--verbose", "-v")] = False


SHOWN = ("html", "md", "json", "quiet", "verbose")

# ---------------------------------------------------------------- what a command is


class Commands(TyperGroup):
    """All commands; what one raises becomes a message and an exit code."""

    def main(self, *args: Any, **given: Any) -> Any:
        """Run the command that the arguments name, and leave."""
        with exit_codes():
            code = super().main(*args, **given | {"standalone_mode": False})
            raise SystemExit(code if isinstance(code, int) else 0)


app = typer.Typer(
    cls=Commands,
    name="offpol-diag",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def options_of(function: Function) -> dict[str, Any]:
    """Return the arguments of a function whose types say how typer shows them: name → type."""
    types = get_type_hints(function, include_extras=True)
    if "how" in types:  # **how: Unpack[Reading]
        types |= get_type_hints(get_args(types["how"])[0], include_extras=True)
    return {name: kind for name, kind in types.items() if get_origin(kind) is Annotated}


def command(function: Function, *own: str, required: Sequence[str] = ()) -> Callable[[Function], Function]:
    """Make a function the command for one of `api`, with these options of `Output`.

    It is called with the `Output`, and by name with the arguments that are given, and returns the exit code,
    or whether that is 1.
    """

    def decorated(body: Function) -> Function:
        def run(**options: Any) -> None:
            given = {name: x for name, x in options.items() if x not in (None, [])}
            out = Output(**{name: given.pop(name) for name in own if name in given})
            raise typer.Exit(int(body(out, **given) or 0))

        options = options_of(function) | {name: options_of(Output)[name] for name in own}
        parameters = [
            Parameter(name, KEYWORD, annotation=kind, default=... if name in required else None)
            for name, kind in options.items()
        ]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # typer reads it
        help = re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")  # typer keeps line ends
        app.command(body.__name__, help=help, context_settings={"auto_envvar_prefix": "OFFPOL_DIAG"})(run)
        return body

    return decorated


def show_version(wanted: bool) -> None:
    """Print the version and leave."""
    if wanted:
        typer.echo(f"offpol-diag {offpol_diag.__version__}")
        raise typer.Exit


@app.callback(epilog="Exit codes: 0 passed · 1 a gate failed, or --strict found a fault · 2 could not say.")
def root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=show_version)
    ] = False,
) -> None:
    """Off-policy mismatch in LLM reinforcement learning, from a dump of per-token log-probs."""
    context.default_map = settings(context.command)


def settings(group: Any) -> dict[str, Any]:
    """Read the settings of the working directory: command → option → value.

    Raises:
        UsageError: the file is not TOML, or has an unknown key.
    """
    own, shared = Path("offpol-diag.toml"), Path("pyproject.toml")
    file = own if own.exists() else shared
    if not file.exists():
        return {}
    try:
        table = toml(read(file, MOST_TOML).decode("utf-8-sig"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{file}: cannot be read as TOML ({error})", "correct it") from error
    given = table if file is own else table.get("tool", {}).get("offpol-diag", {})
    known = {"dump", *(one.name for command in group.commands.values() for one in command.params)} - {"what"}
    for key in given.keys() - known:
        hint = did_you_mean(key, [*known]) or f"the keys are {', '.join(sorted(known))}"
        raise UsageError(f"{file}: there is no setting {key!r}", hint)
    if "dump" in given:
        dump = given.pop("dump")
        given["what"] = [dump] if isinstance(dump, str) else dump
    return dict.fromkeys(group.commands, given)


# ---------------------------------------------------------------- what commands share


def named_or_sample(what: Sequence[str], out: Output) -> list[str]:
    """Return the dumps that are named, else the sample, with a remark."""
    if not what:
        note("no DUMP given: reading the sample dump that ships with offpol-diag", out.quiet)
    return [*what] or [str(SAMPLE)]


def default_html(sources: Sequence[str]) -> Path:
    """Return `offpol-diag-<stem>.html`, named after the first source; of a glob, what is no wildcard."""
    parts = re.split(r"[/\\]", os.path.splitext(clean(sources[0]))[0])  # noqa: PTH122  # of a URL, too
    names = [re.sub(r"[^A-Za-z0-9_.=+-]+", "-", part).strip("._-") for part in parts]
    return Path(f"offpol-diag-{next(filter(None, reversed(names)), 'stdin')[:100]}.html")


def show(out: Output, function: Function, *what: Any, **asked: Any) -> Any:
    """Call a function of `api` on what it reads; write its result in the forms asked for, and show it.

    Stdout gets the summary, or the form that is to go there.
    """
    from offpol_diag.report import render
    from offpol_diag.report.parts import with_texts

    forms = {"report": out.html, "json": out.json, "md": out.md, "junit": out.junit}
    rows = {"sequences": asked.get("sequences"), "dump": asked.get("to")}  # the function writes them itself
    files = {label: Path(file) for label, file in (forms | rows).items() if file}
    reads = [*what, *(asked.get(name, []) for name in ("preset_file", "gates", "baseline", "logged"))]
    check_targets([*files.values()], reads)
    doing, unit = ("scoring", "tokens") if function is api.rescore else ("reading", "rows")
    with progress(out.quiet or function in (api.check, api.report), doing, unit) as bar:
        found = function(*what, **asked, **({"progress": bar} if bar else {}))
    found = with_texts(found, out.tokenizer)
    texts = {file: render(found, form) for form, file in files.items() if form in forms}
    named = [(label, file) for label, file in files.items() if file != STDOUT and not out.quiet]
    where = "".join(printable(f"{label:<8}{file}") + "\n" for label, file in named)
    summary = "" if STDOUT in texts else render(found, "terminal", out.verbose, out.quiet) + where
    write(texts, summary)
    if not summary:  # even an empty text fails where stderr cannot be written
        sys.stderr.write(where)
    return found


# ---------------------------------------------------------------- the commands


@command(api.analyze, "no_html", *SHOWN, "tokenizer", "strict")
def analyze(out: Output, what: Sequence[str] = (), **asked: Any) -> bool:
    dump = named_or_sample(what, out)
    out.html = None if out.no_html else out.html or default_html(dump)
    return bool(show(out, api.analyze, dump, **asked).is_bug and out.strict)


@command(api.check, *SHOWN, "strict")
def check(out: Output, what: Sequence[str] = (), **asked: Any) -> bool:
    return bool(show(out, api.check, named_or_sample(what, out), **asked).different and out.strict)


@command(api.compare, *SHOWN)
def compare(out: Output, what: Sequence[str] = (), **asked: Any) -> None:
    show(out, api.compare, *(what if len(what) > 1 else [named_or_sample(what, out)]), **asked)


@command(api.convert, "quiet", required=("what", "to"))
def convert(out: Output, what: list[str], to: str, **asked: Any) -> None:
    check_targets([Path(to)], [what])
    made = api.convert(what, to, **asked)
    for line in (*made.notes, f"{to}: {made.sequences:,} sequences"):
        note(printable(line), out.quiet)


@command(api.doctor, *SHOWN, "strict", "explain")
def doctor(out: Output, what: Sequence[str] = (), **asked: Any) -> bool:
    if not out.explain:
        return bool(show(out, api.doctor, named_or_sample(what, out), **asked).is_bug and out.strict)
    from offpol_diag.diagnosis import registry
    from offpol_diag.report.terminal import tables
    from offpol_diag.report.words import every_cause, explained

    found = every_cause() if out.explain == "list" else explained(registry.cause(out.explain))
    write({}, tables(found))
    return False


@command(api.gate, *SHOWN, "junit", required=["what"])
def gate(out: Output, what: list[str], **asked: Any) -> int:
    from offpol_diag.gate import outcome
    from offpol_diag.report import render

    found = show(out, api.gate, what[0] if len(what) == 1 else what, **asked)
    if place := os.environ.get("GITHUB_STEP_SUMMARY"):
        with suppress(OSError), Path(place).open("a", encoding="utf-8") as file:
            file.write("\n" + render(found, "md"))
    return EXITS[outcome(found.gates)]


@command(api.report, "html", "md", "quiet", "verbose", "tokenizer", required=["result"])
def report(out: Output, result: str) -> None:
    out.html = out.html or default_html([result])
    show(out, api.report, result)


@command(api.rescore, *SHOWN, "strict", required=["model"])
def rescore(out: Output, what: Sequence[str] = (), **asked: Any) -> bool:
    dump = named_or_sample(what, out)
    asked.setdefault("to", f"{default_html(dump).stem.removeprefix('offpol-diag-')}-rescored.parquet")
    found = show(out, api.rescore, dump, **asked).reference
    return bool(out.strict and found and found.odd)


@command(api.sweep, *SHOWN, required=["preset"])
def sweep(out: Output, what: Sequence[str] = (), **asked: Any) -> None:
    show(out, api.sweep, named_or_sample(what, out), **asked)


@app.command(context_settings={"auto_envvar_prefix": "OFFPOL_DIAG"})
def presets(
    name: Annotated[str, typer.Argument(metavar="PRESET,PRESET", autocompletion=api.preset_names)] = "",
    trainer: api.Trainer = None,
    preset_file: api.PresetFile = None,
) -> None:
    """The catalogue of corrections; of some the exact formulas, or with --for the configuration to paste."""
    from offpol_diag.presets.catalogue import load
    from offpol_diag.report.presets import catalogue, explained
    from offpol_diag.report.terminal import tables
    from offpol_diag.trainers import trainer_named
    from offpol_diag.trainers.translate import config_for, trainers_for

    known = load(preset_file and Path(preset_file))
    chosen = {preset.name: preset for preset in known.resolve(name or "all")}
    if trainer and name:
        text = printable_lines("\n".join(config_for(preset, trainer).text() for preset in chosen.values()))
    elif name:
        parts = (explained(one, known.aliases, trainers_for(one)) for one in chosen.values())
        text = tables([*chain.from_iterable(parts)])
    else:
        if trainer:
            who = trainer_named(trainer)
            chosen = {key: preset for key, preset in chosen.items() if trainers_for(preset, (who,))}
        text = tables([*catalogue(chosen, known.default)])
    write({}, text)
