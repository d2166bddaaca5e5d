"""`offpol-diag compare`: corrections side by side."""

from __future__ import annotations

from offpol_diag.cli import defaults, options
from offpol_diag.cli.output import Outputs
from offpol_diag.cli.request import Request
from offpol_diag.cli.show import show


def compare(
    dump: options.Dumps = None,
    presets: options.Presets = "all",
    preset_file: options.PresetFile = None,
    columns: options.Columns = None,
    group_by: options.GroupBy = None,
    on_bad_row: options.OnBadRow = "error",
    out: options.Html = None,
    json: options.Json = None,
    md: options.Markdown = None,
    device: options.Device = "auto",
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> None:
    """Corrections side by side on one dump: what each keeps, drops and weighs, and which does better.

    Several DUMPs are read as the parts of one dump.
    """
    dumps = defaults.dumps(dump, quiet)
    files = Outputs(out, json, md, quiet)
    files.check(*dumps)
    request = Request(preset_file, columns, group_by, device, seed, on_bad_row, quiet)
    summary = request.run("compare", dumps, request.catalogue().resolve(presets))
    files.write(summary)
    if not files.takes_stdout():
        from offpol_diag.comparison import side_by_side

        show([side_by_side(summary)])
    files.say_where()
