"""`offpol-diag doctor`: is it a bug, and which one?"""

from __future__ import annotations

from offpol_diag.cli import defaults, options
from offpol_diag.cli.exits import FAILED
from offpol_diag.cli.output import Outputs
from offpol_diag.cli.request import Request, with_request


@with_request("preset_file", "trainer")
def doctor(
    *,
    dump: options.Dumps = None,
    strict: options.Strict = False,
    request: Request,
    out: options.Html = None,
    no_explore: options.NoExplore = False,
    json: options.Json = None,
    md: options.Markdown = None,
    csv: options.Csv = None,
    verbose: options.Verbose = False,
) -> None:
    """Is the mismatch a bug, and which one: the verdict, its causes with their evidence, and the fix.

    Says in one sentence whether the log-probs are logged wrongly, then what speaks for each cause, where it
    is, how to confirm it, what to change and the numbers after that, then what was ruled out and what this
    dump cannot decide. No correction is evaluated and none is recommended: `offpol-diag analyze` does both.

    The exit code is 0 whatever the verdict, and with --strict 1 where it is a bug.
    """
    dumps = defaults.dumps(dump, request.quiet)
    files = Outputs(out, json, md, request.quiet, csv=csv, explore=not no_explore)
    files.check(*dumps)
    with files.begin():
        summary = request.run("doctor", dumps, ()).model_copy(update={"recommendation": None})
        files.write(summary, verbose)
    if strict and summary.is_bug:
        raise SystemExit(FAILED)
