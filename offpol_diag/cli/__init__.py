"""The command line: arguments → call → files and an exit code. One file per command, one line in `COMMANDS`.

Commands import what they need inside their functions, so that `offpol-diag --help` stays instant.
"""

from __future__ import annotations

import inspect
from typing import Annotated

import typer

from offpol_diag.cli import defaults, options
from offpol_diag.cli.analyze import analyze
from offpol_diag.cli.check import check
from offpol_diag.cli.compare import compare
from offpol_diag.cli.convert import convert
from offpol_diag.cli.doctor import doctor
from offpol_diag.cli.exits import exit_codes
from offpol_diag.cli.gate import gate
from offpol_diag.cli.merge import merge
from offpol_diag.cli.presets import presets
from offpol_diag.cli.recover import recover
from offpol_diag.cli.report import report
from offpol_diag.cli.sweep import sweep

COMMANDS = (analyze, check, compare, convert, doctor, gate, merge, presets, recover, report, sweep)

app = typer.Typer(
    name="offpol-diag",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


for command in COMMANDS:
    paragraphs = (inspect.getdoc(command) or "").split("\n\n")  # one line each: typer keeps line ends
    text = "\n\n".join(paragraph.replace("\n", " ") for paragraph in paragraphs)
    app.command(help=text)(exit_codes()(command))


def _show_version(wanted: bool) -> None:
    if wanted:
        from offpol_diag import __version__

        typer.echo(f"offpol-diag {__version__}")
        raise typer.Exit


Version = Annotated[
    bool,
    options.option("Print the version and exit.", "--version", "-V", callback=_show_version, is_eager=True),
]


@app.callback(
    epilog="Exit codes: 0 passed · 1 a gate failed, or --strict found a bug or a difference · 2 could not "
    "say (bad arguments, bad dump, no data)."
)
@exit_codes()
def _root(context: typer.Context, version: Version = False) -> None:
    """Off-policy mismatch in LLM reinforcement learning, from a dump of per-token log-probs."""
    options = defaults.settings().options
    trainer = {"trainer": options["for"]} if "for" in options else {}
    context.default_map = {
        command.__name__: options | (trainer if command in (analyze, merge) else {}) for command in COMMANDS
    }
