"""`offpol-diag report`: draw a result again, without the dump."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.output import STDOUT, Outputs, default_html

Result = Annotated[Path, typer.Argument(metavar="RESULT.json", help="What --json wrote; - is stdin.")]


def report(
    result: Result,
    out: options.Html = None,
    md: options.Markdown = None,
    tokenizer: options.Tokenizer = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Draw a report again from the JSON of a result; equal to the one first drawn."""
    from offpol_diag.analysis.vocabulary import with_texts
    from offpol_diag.summary import load, load_stream

    files = Outputs(html=out or default_html([str(result)]), markdown=md, quiet=quiet)
    files.check(result, *([tokenizer] if tokenizer else []))
    with files.begin():
        summary = load_stream(sys.stdin.buffer, "stdin") if result == STDOUT else load(result)
        files.write(with_texts(summary, tokenizer), verbose)
