"""Options of typer from the fields of a model, and the request from what typer has read."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, get_args

import typer
from typer.main import get_command

from offpol_diag import options
from offpol_diag.cli.running import require_addresses
from offpol_diag.cli.settings import settings
from offpol_diag.options import PYTHON, Option, Request
from offpol_diag.requests import ARGUMENTS, MODELS, WRITE, ReadDump

LAST = ("quiet", "verbose")
"""Options at the end of the help."""


def flags(name: str, option: Option) -> tuple[str, ...]:
    """Return the spellings of a field on the command line: flags, or the word of the usage line."""
    return (option.metavar,) if name in ARGUMENTS else option.flags or (f"--{name.replace('_', '-')}",)


def variable(name: str, option: Option) -> str:
    """Return the environment variable that sets a field; empty for none."""
    return f"OFFPOL_DIAG_{options.key(name, option).upper()}" if option.env else ""


def parameters(command: str) -> list[Any]:
    """Return the options and words of a command as its help lists them."""
    model = MODELS[command]
    own, rows = model.__annotations__, options.options(model, PYTHON)

    def rank(name: str) -> int:
        """Put a command's own options first, but for what is written, and how much is printed last."""
        if name in LAST:
            return 3
        return 1 if name not in own else 2 if rows[name].panel == WRITE else 0

    def run(**given: Any) -> None: ...

    made = [_parameter(name, rows[name], model) for name in sorted(rows, key=rank)]
    run.__signature__ = inspect.Signature(made)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in made}
    app = typer.Typer(add_completion=False)
    app.command()(run)
    return get_command(app).params


def _parameter(name: str, option: Option, model: type[Request]) -> inspect.Parameter:
    """Return a field as typer takes it: a flag, a text, or several; the model makes values of texts."""
    field, argument = model.model_fields[name], name in ARGUMENTS
    help, inside = (
        " ".join((field.description or "").split()),
        (field.annotation, *get_args(field.annotation)),
    )
    one: Any = bool if field.annotation is bool else Path if argument and Path in inside else str
    kind: Any = list[one] if option.many or (argument and ... in inside) else one
    default: Any = field.default if isinstance(field.default, str | int) else option.usual or None
    if field.is_required() or option.required:
        default = inspect.Parameter.empty
    elif default is None:
        kind = kind | None
    if argument:
        made = typer.Argument(help=help, metavar=option.metavar, show_default=False)
    else:
        made = typer.Option(
            *flags(name, option),
            help=help,
            metavar=option.metavar or None,
            rich_help_panel=option.panel or None,
            envvar=variable(name, option) or None,
            show_default=one is not bool and default != "",
        )
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, made]
    )


def with_bare_values(command: str, words: Sequence[str]) -> list[str]:
    """Return the words of a command line with a value for each flag that may stand without one."""
    rows = options.options(MODELS[command], PYTHON)
    bare = {flag: one.bare for name, one in rows.items() if one.bare for flag in flags(name, one)}
    found = list(words)
    for at in reversed(range(len(words))):
        if words[at] in bare and (words[at + 1 : at + 2] or ["-"])[0].startswith("-"):
            found.insert(at + 1, bare[words[at]])
    return found


def request_of(command: str, context: Any) -> Request:
    """Return what a command is asked: by flags, else by the environment, else by the settings file.

    Raises:
        UsageError: an option has a value that it cannot have; the error names where that is from.
        OffpolError: there is too little memory for what the command imports.
    """
    model = MODELS[command]
    if issubclass(model, ReadDump):
        require_addresses()
    rows = options.options(model, PYTHON)
    given, places = {}, {name: flags(name, option)[0] for name, option in rows.items()}
    for name, option in rows.items():
        source = getattr(context.get_parameter_source(name), "name", "")
        if source == "ENVIRONMENT":
            places[name] = variable(name, option)
        if source in ("COMMANDLINE", "ENVIRONMENT"):
            given[name] = context.params[name]
    found = settings()
    for key, name in options.settings(model).items():
        if key in found.values and name not in given:
            given[name], places[name] = found.values[key], f"{found.file}: {key}"
    return options.asked(model, given, places, found.file)
