"""The command line: options → request → result → files and an exit code. A function per command.

A command's function holds its help. Its options are made of its model in `requests.py`, which is imported
when a command is run or asked for its own help, so that `offpol-diag --help` stays instant.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from offpol_diag.cli.exits import exit_codes
from offpol_diag.cli.other import convert, presets
from offpol_diag.cli.results import analyze, check, compare, doctor, gate, report, rescore, sweep

COMMANDS: tuple[Callable[..., None], ...] = (
    analyze,
    check,
    compare,
    convert,
    doctor,
    gate,
    presets,
    report,
    rescore,
    sweep,
)

app = typer.Typer(
    name="offpol-diag",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Command(TyperCommand):
    """A command whose options are made of its model when they are first asked for."""

    def get_params(self, ctx: Any) -> Any:
        """Return the options and words of the command."""
        if not self.params:
            from offpol_diag.cli.options import parameters

            self.params = parameters(str(self.name))
        return super().get_params(ctx)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Read the words after the command."""
        from offpol_diag.cli.options import with_bare_values

        return super().parse_args(ctx, with_bare_values(str(self.name), args))

    def invoke(self, ctx: Any) -> None:
        """Check what is given, and run the command's function on it."""
        from offpol_diag.cli.options import request_of

        with exit_codes():
            does = next(one for one in COMMANDS if one.__name__ == self.name)
            does(request_of(str(self.name), ctx))


def _nothing() -> None:
    """Stand where typer takes the options from."""


for command in COMMANDS:
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")  # one line each: typer keeps line ends
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(command.__name__, cls=Command, help=text)(_nothing)


def _show_version(wanted: bool) -> None:
    if wanted:
        from offpol_diag import __version__

        typer.echo(f"offpol-diag {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    typer.Option(
        "--version", "-V", help="Print the version and exit.", callback=_show_version, is_eager=True
    ),
]


@app.callback(
    epilog="Exit codes: 0 passed · 1 a gate failed, or --strict found a bug or a difference · 2 could not "
    "say (bad arguments, bad dump, no data)."
)
@exit_codes()
def _root(version: Version = False) -> None:
    """Off-policy mismatch in LLM reinforcement learning, from a dump of per-token log-probs."""
