"""`offpol-diag convert`: what a trainer wrote, as a canonical dump."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.defaults import judged
from offpol_diag.cli.output import check, check_names, emit, note
from offpol_diag.errors import UsageError

Sources = Annotated[
    list[str] | None,
    typer.Argument(metavar="SRC", show_default=False, help="Files, directories of them, or globs, here."),
]
TARGET = "Where the dump goes."
To = Annotated[Path | None, options.option(TARGET, "--to", metavar="FILE.parquet", panel=options.OUTPUT)]
FORMS = "List the forms that are read."
List = Annotated[bool, options.option(FORMS, "--list")]


def convert(
    source: Sources = None,
    to: To = None,
    listed: List = False,
    columns: options.Columns = None,
    form: options.Form = None,
    align: options.Align = None,
    join: options.Join = None,
    on: options.On = None,
    quiet: options.Quiet = False,
) -> None:
    """What a trainer wrote by itself, as a canonical dump: Parquet, one row per sequence.

    The form is detected. How its log-probs belong to tokens is checked on the first sequences: where a
    neighbouring shift fits far better, that is an error, and --align decides. Every command that takes a DUMP
    reads the same files by itself; convert keeps the result.

    Where one file has no log-probs of both policies, --join takes them from a second one.
    """
    if listed:
        emit(_table())
        return
    if not source or to is None:
        raise UsageError(
            "convert needs files and a target",
            "offpol-diag convert SRC… --to out.parquet; --list shows the forms",
        )
    from offpol_diag.forms import Reading
    from offpol_diag.forms import convert as converted
    from offpol_diag.forms import join as second
    from offpol_diag.forms.detect import find

    read = [*source, second.parse(join)[0]] if join else source
    check_names(*read)
    check(to, *read)

    with judged("columns", columns):
        names = options.pairs(columns)
    found = find(source, form, names, always=True, joined=join is not None)
    assert found is not None
    if any(to.exists() and to.samefile(path) for path in found.files):
        raise UsageError(f"{to}: is what is read", "write to another file")
    made = converted(found, to, Reading(form, align, join, on), names)
    for line in made.notes:
        note(line, quiet)
    note(f"{to}: {made.sequences:,} sequences, {made.tokens:,} tokens", quiet)


def _table() -> str:
    """Return the forms as a table."""
    import io

    from rich.console import Console
    from rich.table import Table

    from offpol_diag.forms.table import FORMS
    from offpol_diag.report.terminal import make_console

    table = Table(box=None, pad_edge=False)
    for title in ("form", "trainer", "files", "holds", "alignment"):
        table.add_column(title, overflow="fold")
    for one in FORMS:
        table.add_row(one.name, one.trainer, one.files, one.holds, str(one.alignment))
    console = Console(file=io.StringIO(), width=make_console().width, highlight=False, markup=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()
