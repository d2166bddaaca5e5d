"""The command line: a function per command, which calls that of its name in `api` and draws what it finds.

The options of a command are the arguments of that function, and those of `OPTIONS` that it names. Each is an
environment variable too (`OFFPOL_DIAG_SEED`), and a key of `offpol-diag.toml` or of `[tool.offpol-diag]` in
`pyproject.toml`; flags beat the environment, which beats the file. What commands need is imported when they
run, so that `--help` is instant.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import asdict
from functools import partial, reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, get_args, get_type_hints

import typer
from typer.core import TyperGroup

import offpol_diag
from offpol_diag import api
from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.files import MOST_TOML, read, toml
from offpol_diag.printable import clean, printable, printable_json, printable_lines
from offpol_diag.shell import STDOUT, Remarks, check_targets, exit_codes, note, progress, write

SAMPLE = Path(__file__).parent / "data" / "sample.parquet"
EXITS = {"passed": 0, "failed": 1, "could not say": 2}
SETTINGS = {"dump": "what", "for": "trainer"}
"""Key of the settings file → the argument, where their names differ."""
MANY = ("what", "logged", "max", "min", "model")
"""Arguments that are given several times."""
OPTIONS: Mapping[str, tuple[Any, Any]] = {
    "html": (Path, typer.Option("--html", "--out", "-o", metavar="FILE", help="Write the page.")),
    "json": (Path, typer.Option(metavar="FILE|-", help="Write the result as JSON; - is stdout.")),
    "md": (Path, typer.Option(metavar="FILE|-", help="Write Markdown; - is stdout.")),
    "junit": (Path, typer.Option(metavar="FILE|-", help="Write the verdicts as JUnit XML.")),
    "no_html": (bool, typer.Option("--no-html", help="Write no page.")),
    "tokenizer": (Path, typer.Option(metavar="FILE", help="Show tokens as text: a tokenizer.json.")),
    "explain": (str, typer.Option(metavar="CAUSE|list", help="What is known of a cause; reads no dump.")),
    "strict": (bool, typer.Option("--strict", help="Exit with 1 where a bug or a difference is found.")),
    "quiet": (bool, typer.Option("--quiet", "-q", help="One line; no progress and no remarks.")),
    "verbose": (bool, typer.Option("--verbose", "-v", help="Every table, not the short answer.")),
}
"""Option that the command line alone has → its type, and how typer shows it."""
DRAWN = ("html", "md", "quiet", "verbose")
ROWS = {"sequences": "sequences", "dump": "to"}
"""What is said of a Parquet file that a function writes itself → the argument that names it."""


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

api.LOG.addHandler(Remarks())
api.LOG.propagate = False

# ---------------------------------------------------------------- what a command is


def command(function: Callable[..., Any], *own: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function the command for one of `api`, with options of its own.

    It is called with the arguments that were given, and with a namespace of its own options; it returns the
    exit code, or whether that is 1. What it raises becomes a message and an exit code.
    """
    text = (inspect.getdoc(function) or "").partition("\n\nRaises:")[0]
    help = re.sub(r"(?<!\n)\n(?!\n)", " ", text)  # typer keeps line ends

    def decorated(body: Callable[..., Any]) -> Callable[..., Any]:
        def run(context: typer.Context, **given: Any) -> None:
            options = SimpleNamespace(**{name: given.pop(name) for name in own}, context=context)
            api.LOG.setLevel("ERROR" if options.quiet else "INFO")
            asked = {name: x for name, x in given.items() if x not in (None, [])}
            raise typer.Exit(int(body(asked, options) or 0))

        of = [*parameters(function, own)]
        run.__signature__ = inspect.Signature(of)  # type: ignore[attr-defined]
        run.__annotations__ = {one.name: one.annotation for one in of}
        app.command(body.__name__, help=help, context_settings={"auto_envvar_prefix": "OFFPOL_DIAG"})(run)
        return body

    return decorated


def parameters(function: Callable[..., Any], own: Sequence[str]) -> Iterator[inspect.Parameter]:
    """Yield the parameters of a command as typer takes them: those of a function, and of `OPTIONS`."""
    of = partial(inspect.Parameter, kind=inspect.Parameter.KEYWORD_ONLY)
    yield of("context", annotation=typer.Context)
    needed = {"what": None, "to": None}  # which have defaults here
    known: dict[str, tuple[Any, Any]] = {
        name: (one.annotation, needed.get(name, one.default))
        for name, one in inspect.signature(function, eval_str=True).parameters.items()
    }
    if how := known.pop("how", None):
        more = get_type_hints(get_args(how[0])[0], include_extras=True)
        known |= {name: (kind, None) for name, kind in more.items()}
    for name, (kind, default) in known.items():
        if hasattr(kind, "__metadata__"):
            type_, shown = kind.__origin__, copy(kind.__metadata__[0])
            type_ = list[str] if name in MANY else str if type_ is Any else type_
            type_ = Path if Path in get_args(type_) else type_
            shown.show_envvar, shown.autocompletion = False, completion(shown.metavar)
            required = default is inspect.Parameter.empty
            yield of(name, annotation=Annotated[type_ | None, shown], default=default if required else None)
    for name in own:
        type_, shown = OPTIONS[name]
        shown.show_envvar, flag = False, type_ is bool
        kind = Annotated[bool if flag else type_ | None, shown]
        yield of(name, annotation=kind, default=False if flag else None)


def completion(metavar: str | None) -> Callable[[str], list[str]] | None:
    """Return what completes names of presets or trainers, the last of several; None for other values."""
    if metavar not in ("PRESET", "PRESET,PRESET", "TRAINER"):
        return None

    def complete(incomplete: str) -> list[str]:
        from offpol_diag.presets.catalogue import load
        from offpol_diag.trainers import TRAINERS

        before, comma, last = incomplete.rpartition(",")
        words = TRAINERS if metavar == "TRAINER" else ("all", *load())
        return [f"{before}{comma}{word}" for word in words if word.startswith(last)]

    return complete


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"offpol-diag {offpol_diag.__version__}")
        raise typer.Exit


@app.callback(
    epilog="Exit codes: 0 passed · 1 a gate failed, or --strict found a bug or a difference · 2 could not "
    "say (bad arguments, bad dump, no data)."
)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", "-V", help="Print the version.", is_eager=True, callback=_show_version),
    ] = False,
) -> None:
    """Off-policy mismatch in LLM reinforcement learning, from a dump of per-token log-probs."""
    context.default_map = settings(context.command)


def settings(group: Any) -> dict[str, Any]:
    """Read the settings of the working directory: command that reads dumps → argument → value.

    Raises:
        UsageError: the file is not TOML, or has an unknown key.
    """
    file, table = Path(), dict[str, Any]()
    for name, place in (("offpol-diag.toml", ()), ("pyproject.toml", ("tool", "offpol-diag"))):
        if not table and Path(name).exists():
            try:
                file, found = Path(name), toml(read(Path(name), MOST_TOML).decode("utf-8-sig"))
                table = reduce(lambda part, key: part.get(key, {}), place, found)
            except (OSError, ValueError) as error:
                raise UsageError(f"{name}: cannot be read as TOML ({error})", "mend it") from error
    others = ("presets", "report", "convert")
    commands = {name: one for name, one in group.commands.items() if name not in others}
    known = [*dict.fromkeys(one.name for command in commands.values() for one in command.params)]
    given = {SETTINGS.get(key := name.replace("-", "_"), key): x for name, x in table.items()}
    for name in given.keys() - known:
        hint = did_you_mean(name, known) or f"the keys are {', '.join(known)}"
        raise UsageError(f"{file}: there is no setting {name!r}", hint)
    options = {name: _as_option(name, x) for name, x in given.items()}
    return dict.fromkeys(commands, options)


def _as_option(name: str, value: Any) -> Any:
    """Return a value of TOML as an option is given: lists by commas, tables as name=value."""
    if isinstance(value, dict):
        value = [f"{key}={one}" for key, one in value.items()]
    several = value if isinstance(value, list) else [value]
    return several if name in MANY else ",".join(map(str, several)) if value is several else value


# ---------------------------------------------------------------- what commands share


def dumps(asked: dict[str, Any], own: Any) -> list[str]:
    """Take the dumps to read out of what is asked, else the sample; say what is read."""
    given: list[str] = asked.pop("what", [])
    if not given:
        note("no DUMP given: reading the sample dump that ships with offpol-diag", own.quiet)
    elif len(given) > 1:
        note(f"{len(given)} DUMPs given: they are read as one dump", own.quiet)
    return given or [str(SAMPLE)]


def default_html(sources: Sequence[str]) -> Path:
    """Return `offpol-diag-<stem>.html`, named after the first source; of a glob, what is no wildcard."""
    for part in reversed(re.split(r"[/\\]", clean(sources[0]))):
        stem = re.sub(r"\[[^\]]*\]|[*?]+", "", part.rsplit(".", 1)[0])
        if stem := re.sub(r"[^A-Za-z0-9_.=+-]+", "-", stem).strip("._-")[:100]:
            return Path(f"offpol-diag-{stem}.html")
    return Path("offpol-diag-stdin.html")


def ran(function: Callable[..., Any], asked: Mapping[str, Any], own: Any, *what: Any) -> Any:
    """Call a function of `api` on what it reads, with a progress bar; write, draw and return the result."""
    files = [*what, *(asked.get(name, []) for name in ("preset_file", "gates", "baseline", "logged"))]
    rows = {label: asked[name] for label, name in ROWS.items() if name in asked}
    check_targets([*targets_of(own).values(), *rows.values()], files)
    doing, unit = ("scoring", "tokens") if function is api.rescore else ("reading", "rows")
    with progress(own.quiet, doing, unit) as bar:
        found = function(*what, **asked, progress=bar)
    deliver(found, own, rows)
    return found


def targets_of(own: Any) -> dict[str, Path]:
    """Return form → file, of those that are asked for."""
    forms = {"report": "html", "json": "json", "md": "md", "junit": "junit"}
    return {form: file for form, name in forms.items() if (file := getattr(own, name, None))}


def deliver(found: Any, own: Any, rows: Mapping[str, Path] | None = None) -> None:
    """Write a result in every form that is asked for, draw it on stdout unless that holds one, say where."""
    from offpol_diag.report import render
    from offpol_diag.report.tokens import with_texts

    found, targets = with_texts(found, getattr(own, "tokenizer", None)), targets_of(own)
    texts = {file: render(found, form) for form, file in targets.items()}
    named = {label: file for label, file in (targets | dict(rows or {})).items() if file != STDOUT}
    where = "".join(printable(f"{label:<8}{file}") + "\n" for label, file in named.items() if not own.quiet)
    if STDOUT in texts:
        write(texts)
        sys.stderr.write(where)
    else:
        write(texts, render(found, "terminal", own.verbose, own.quiet) + where)


# ---------------------------------------------------------------- the commands


@command(api.analyze, "no_html", *DRAWN, "json", "tokenizer", "strict")
def analyze(asked: dict[str, Any], own: Any) -> bool:
    read = dumps(asked, own)
    own.html = None if own.no_html else own.html or default_html(read)
    return bool(ran(api.analyze, asked, own, read).is_bug and own.strict)


@command(api.check, *DRAWN, "json", "strict")
def check(asked: dict[str, Any], own: Any) -> bool:
    return bool(ran(api.check, asked, own, dumps(asked, own)).different and own.strict)


@command(api.compare, *DRAWN, "json")
def compare(asked: dict[str, Any], own: Any) -> None:
    runs = len(asked.get("what", [])) > 1
    ran(api.compare, asked, own, *(asked.pop("what") if runs else [dumps(asked, own)]))


@command(api.convert, "quiet")
def convert(asked: dict[str, Any], own: Any) -> None:
    if not {"what", "to"} <= asked.keys():
        raise UsageError("convert needs files and a target", "offpol-diag convert DUMP… --to out.parquet")
    check_targets([asked["to"]], asked["what"])
    made = api.convert(**asked)
    for said in (*made.notes, f"{asked['to']}: {made.sequences:,} sequences"):
        note(printable(said), own.quiet)


@command(api.doctor, *DRAWN, "json", "strict", "explain")
def doctor(asked: dict[str, Any], own: Any) -> bool:
    if own.explain is None:
        return bool(ran(api.doctor, asked, own, dumps(asked, own)).is_bug and own.strict)
    from offpol_diag.diagnosis import registry
    from offpol_diag.report import markdown
    from offpol_diag.report.terminal import terminal
    from offpol_diag.report.words import every_cause, explained

    answer = every_cause() if own.explain == "list" else explained(registry.cause(own.explain))
    write({own.md: markdown(answer)} if own.md else {}, terminal(answer, own.verbose, own.quiet))
    return False


@command(api.gate, *DRAWN, "json", "junit")
def gate(asked: dict[str, Any], own: Any) -> int:
    from offpol_diag.gate import outcome
    from offpol_diag.report import render

    what = asked.pop("what", [])
    if not what:
        raise UsageError("missing argument 'DUMP'", "see `offpol-diag gate --help`")
    found = ran(api.gate, asked, own, what[0] if len(what) == 1 else what)
    if place := os.environ.get("GITHUB_STEP_SUMMARY"):
        with suppress(OSError), Path(place).open("a", encoding="utf-8") as file:
            file.write("\n" + render(found, "md"))
    return EXITS[outcome(found.gates)]


@command(api.report, *DRAWN, "tokenizer")
def report(asked: dict[str, Any], own: Any) -> None:
    name = str(asked["result"])
    own.html = own.html or default_html([name])
    check_targets([*targets_of(own).values()], [name])
    deliver(api.report(name), own)


@command(api.rescore, *DRAWN, "json", "strict")
def rescore(asked: dict[str, Any], own: Any) -> bool:
    read = dumps(asked, own)
    asked.setdefault("to", Path(f"{default_html(read).stem.removeprefix('offpol-diag-')}-rescored.parquet"))
    found = ran(api.rescore, asked, own, read).reference
    return bool(own.strict and found and found.odd)


@command(api.sweep, *DRAWN, "json")
def sweep(asked: dict[str, Any], own: Any) -> None:
    ran(api.sweep, asked, own, dumps(asked, own))


Name = Annotated[str | None, typer.Argument(metavar="PRESET,PRESET", help="Also as token_is@3.")]


def catalogued(name: Name = None, *, trainer: api.Trainer = None, preset_file: api.PresetFile = None) -> None:
    """The catalogue of corrections; of some the exact formulas, or with --for the configuration to paste."""


@command(catalogued, "json", "quiet")
def presets(asked: dict[str, Any], own: Any) -> None:
    from offpol_diag.presets.catalogue import load
    from offpol_diag.report.presets import catalogue, explained
    from offpol_diag.report.terminal import tables
    from offpol_diag.trainers import trainer_named
    from offpol_diag.trainers.translate import config_for, trainers_for

    name, trainer = asked.get("name"), asked.get("trainer")
    known = load(asked.get("preset_file"))
    chosen = {preset.name: preset for preset in known.resolve(name or "all")}
    if trainer and name:
        configs = [config_for(preset, trainer) for preset in chosen.values()]
        drawn = printable_lines("\n".join(config.text() for config in configs))
        rows: dict[str, Any] = {"configs": [{**asdict(one), "text": one.text()} for one in configs]}
    else:
        if trainer:
            said = trainer_named(trainer)
            note(f"what {said} can say; `offpol-diag presets NAME --for {said}` prints it", own.quiet)
            chosen = {key: preset for key, preset in chosen.items() if trainers_for(preset, (said,))}
        rows = {"presets": {key: {**asdict(one), "kind": one.kind} for key, one in chosen.items()}}
        parts = (part for one in chosen.values() for part in explained(one, known.aliases, trainers_for(one)))
        drawn = tables([*parts] if name else [*catalogue(chosen, known.default)])
    text = printable_json(json.dumps({"format": 1} | rows, indent=1, ensure_ascii=False)) + "\n"
    write({own.json: text} if own.json else {}, drawn)
