"""`offpol-diag recover`: the dump that a killed writer did not finish."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.output import check, check_names, note
from offpol_diag.errors import DumpError

Source = Annotated[
    str,
    typer.Argument(
        metavar="PATH", show_default=False, help="The dump as it was to be called, or its journal."
    ),
]
TARGET = "Another name for the dump; needed where PATH is a journal."
To = Annotated[Path | None, options.option(TARGET, "--to", metavar="FILE.parquet", panel=options.OUTPUT)]


def recover(path: Source, to: To = None, quiet: options.Quiet = False) -> None:
    """Make the dump that a killed DumpWriter did not finish.

    Every batch that the writer had been given is in a hidden journal beside the dump until the dump has its
    name. recover makes the dump of it, each batch once, and removes the journal. Of a damaged journal it
    makes a dump of the batches before the damage, and the journal stays.
    """
    check_names(path)
    if to is not None:
        check(to, path)
    from offpol_diag.writer import JOURNAL
    from offpol_diag.writer import recover as recovered

    try:
        made = recovered(path, to, warn=note)
    except ValueError as error:
        what, _, hint = str(error).rpartition("; ")
        raise DumpError(what, hint) from error
    except OSError as error:
        reading = str(error.filename).endswith(JOURNAL) or error.filename == path
        if not reading or error.errno == errno.EROFS:
            raise DumpError(
                f"{to or path}: cannot be written ({error.strerror or error})",
                "make room there, or name another place: --to",
            ) from error
        raise DumpError(
            f"{path}: {error.strerror or error}", "check its name, and that it may be read"
        ) from error
    note(f"{made}: recovered", quiet)
