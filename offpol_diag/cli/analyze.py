"""`offpol-diag analyze`: one dump, everything about it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from offpol_diag.cli import defaults, options
from offpol_diag.cli.exits import FAILED
from offpol_diag.cli.output import Outputs, default_html
from offpol_diag.cli.request import Request, with_request

ROWS = "Write one row per sequence: its length, ΣΔ, and what each preset keeps of it."
Sequences = Annotated[
    Path | None, options.option(ROWS, "--sequences", metavar="FILE.parquet", panel=options.OUTPUT)
]


@with_request()
def analyze(
    *,
    dump: options.Dumps = None,
    presets: options.Presets = None,
    strict: options.Strict = False,
    request: Request,
    out: options.Html = None,
    no_html: options.NoHtml = False,
    no_explore: options.NoExplore = False,
    json: options.Json = None,
    md: options.Markdown = None,
    csv: options.Csv = None,
    sequences: Sequences = None,
    tally: options.Tally = None,
    tokenizer: options.Tokenizer = None,
    verbose: options.Verbose = False,
) -> None:
    """How bad is the mismatch, how sure is that, and where is it: terminal summary and one HTML file.

    The HTML goes to offpol-diag-<name>.html in the working directory unless -o says otherwise. With --json -
    or --md - stdout holds that and nothing else. The exit code is 0 whatever the diagnosis, and with --strict
    1 where it is a bug.

    To analyze a dump in pieces, on many machines, run this on each with --tally, then `offpol-diag merge` on
    the tallies. Cut between training steps: methods that judge a token by its whole step (M2PO, Pareto
    smoothing, advantages made of rewards) are exact only where each step lies whole in one piece.
    """
    dumps = defaults.dumps(dump, request.quiet)
    files = Outputs(
        None if no_html else out or default_html(dumps),
        json,
        md,
        request.quiet,
        sequences,
        tally,
        csv=csv,
        explore=not no_explore,
    )
    files.check(*dumps, *(one for one in (request.preset_file, tokenizer) if one))
    with files.begin() as staged:
        from offpol_diag.analysis.vocabulary import with_texts

        named = "all" if presets is None else presets
        summary = request.run(
            "analyze", dumps, request.presets(named), every_log=presets is not None, **staged
        )
        files.write(with_texts(summary, tokenizer), verbose)
    if strict and summary.is_bug:
        raise SystemExit(FAILED)
