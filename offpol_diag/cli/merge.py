"""`offpol-diag merge`: tallies of pieces of a dump, made into one report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.output import Outputs, default_html
from offpol_diag.cli.request import require_addresses, trainer_name

Tallies = Annotated[
    list[Path],
    typer.Argument(
        metavar="TALLY.json", help="What `analyze --tally` wrote, of every piece once, in the dump's order."
    ),
]


def merge(
    tallies: Tallies,
    out: options.Html = None,
    no_html: options.NoHtml = False,
    no_explore: options.NoExplore = False,
    json: options.Json = None,
    md: options.Markdown = None,
    csv: options.Csv = None,
    tally: options.Tally = None,
    trainer: options.Trainer = None,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Pieces of a dump, analysed apart on any machines, as one report: the same as of one run over the whole.

    The pieces must have been analysed alike: version, presets in full, columns, seed. A piece given twice is
    refused. Methods that judge a token by its whole training step (M2PO, Pareto smoothing, advantages made of
    rewards) need every step to lie whole in one piece. Where a step is torn, such presets are left out, with
    a note; advantages made of rewards are refused.

    The HTML goes to offpol-diag-merged.html in the working directory unless -o says otherwise. With --tally
    the merged tally is written as well, to be merged with others.
    """
    files = Outputs(
        None if no_html else out or default_html(["merged"]),
        json,
        md,
        quiet,
        tally=tally,
        explore=not no_explore,
        csv=csv,
    )
    files.check(*tallies)
    with files.begin() as staged:
        require_addresses()
        from offpol_diag.advice.recommend import advised
        from offpol_diag.analysis import merge as pieces
        from offpol_diag.analysis import tally_file

        name = trainer_name(trainer)
        whole = pieces.merge(tallies)
        summary = advised(pieces.summary(whole), name)
        if tally:
            tally_file.write(staged["tally"], whole)
        files.write(summary, verbose)
