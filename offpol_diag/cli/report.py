"""`offpol-diag report`: draw a result again, without the dump."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.output import STDOUT, Outputs, default_html
from offpol_diag.errors import UsageError

Result = Annotated[Path, typer.Argument(metavar="RESULT.json", help="What --json wrote; - is stdin.")]

HEAD = 100
"""Characters of a result that say what it is of."""


def report(
    result: Result,
    out: options.Html = None,
    no_explore: options.NoExplore = False,
    md: options.Markdown = None,
    csv: options.Csv = None,
    tokenizer: options.Tokenizer = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Draw a report again from the JSON of a result; equal to the one first drawn."""
    from offpol_diag.analysis.vocabulary import with_texts
    from offpol_diag.check import result as of_check
    from offpol_diag.summary import loads, text_of, text_of_stream

    files = Outputs(
        html=out or default_html([str(result)]), markdown=md, quiet=quiet, csv=csv, explore=not no_explore
    )
    files.check(result, *([tokenizer] if tokenizer else []))
    with files.begin():
        name = "stdin" if result == STDOUT else str(result)
        if result == STDOUT and (sys.stdin is None or sys.stdin.closed):
            hint = "pipe a result in: offpol-diag analyze dump.parquet --json - | offpol-diag report -"
            raise UsageError("-: nothing is piped into standard input", hint)
        text = text_of_stream(sys.stdin.buffer, name) if result == STDOUT else text_of(result)
        if of_check.FORMAT in text[:HEAD]:
            found = of_check.loads(text, name)
            files.write(found, verbose)
        else:
            files.write(with_texts(loads(text, name), tokenizer), verbose)
