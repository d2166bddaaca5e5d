"""`offpol-diag doctor`: is it a bug, and which one?"""

from __future__ import annotations

from offpol_diag.cli import defaults, options
from offpol_diag.cli.exits import FAILED
from offpol_diag.cli.output import Outputs
from offpol_diag.cli.request import Request


def doctor(
    dump: options.Dumps = None,
    columns: options.Columns = None,
    form: options.Form = None,
    align: options.Align = None,
    join: options.Join = None,
    on: options.On = None,
    group_by: options.GroupBy = None,
    on_bad_row: options.OnBadRow = "error",
    out: options.Html = None,
    json: options.Json = None,
    md: options.Markdown = None,
    strict: options.Strict = False,
    device: options.Device = "auto",
    engine: options.Engine = "local",
    workers: options.Workers = "auto",
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Is the mismatch a bug, and which one: the verdict, its causes with their evidence, and the fix.

    Says in one sentence whether the log-probs are logged wrongly, then what speaks for each cause, where it
    is, how to confirm it, what to change and the numbers after that, then what was ruled out and what this
    dump cannot decide. No correction is evaluated and none is recommended: `offpol-diag analyze` does both.

    The exit code is 0 whatever the verdict, and with --strict 1 where it is a bug.
    """
    from offpol_diag.report.sections.diagnosis import is_bug

    dumps = defaults.dumps(dump, quiet)
    files = Outputs(out, json, md, quiet)
    files.check(*dumps)
    with files.begin():
        request = Request(
            None,
            columns,
            group_by,
            device,
            seed,
            on_bad_row,
            quiet,
            engine,
            workers,
            form=form,
            align=align,
            join=join,
            on=on,
        )
        summary = request.run("doctor", dumps, ()).model_copy(update={"recommendation": None})
        files.write(summary, verbose)
    if strict and is_bug(summary):
        raise SystemExit(FAILED)
