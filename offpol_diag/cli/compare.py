"""`offpol-diag compare`: corrections side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from offpol_diag.cli import defaults, options
from offpol_diag.cli.output import Outputs
from offpol_diag.cli.request import Request
from offpol_diag.cli.show import show
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.presets import Preset

MOST_NAMED = 3


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
    engine: options.Engine = "local",
    workers: options.Workers = "auto",
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> None:
    """Corrections side by side on one dump: what each keeps, drops and weighs, and which does better.

    Several DUMPs are read as the parts of one dump.
    """
    dumps = defaults.dumps(dump, quiet)
    files = Outputs(out, json, md, quiet)
    files.check(*dumps)
    request = Request(
        preset_file, columns, group_by, device, seed, on_bad_row, quiet, engine=engine, workers=workers
    )
    chosen = request.presets(presets)
    _require_one(request, dumps, chosen)
    summary = request.run("compare", dumps, chosen)
    files.write(summary)
    if not files.takes_stdout():
        from offpol_diag.comparison import side_by_side

        show([side_by_side(summary)])
    files.say_where()


def _require_one(request: Request, dumps: Sequence[str], chosen: Sequence[Preset]) -> None:
    """Refuse, before the dump is read, a comparison of presets that can none of them be computed from it."""
    from offpol_diag.correction import needs
    from offpol_diag.readers import open_dump

    if not all(needs(preset, set()) for preset in chosen):
        return
    columns = open_dump(dumps, columns=request.which_columns()).info.columns
    lacking = {preset.name: needs(preset, set(columns)) for preset in chosen}
    if all(lacking.values()):
        missing = dict.fromkeys(column for names in lacking.values() for column in names)
        raise UsageError(
            f"the dump has no {' and no '.join(missing)}, which {', '.join(lacking)} cannot do without",
            _instead(request, columns, missing),
        )


def _instead(request: Request, columns: Mapping[str, str], missing: Mapping[str, None]) -> str:
    """What to do about columns that are missing."""
    from offpol_diag.catalogue import load
    from offpol_diag.correction import needs

    able = [name for name, preset in load(request.preset_file).items() if not needs(preset, set(columns))]
    ways = [f"try --presets {','.join(able[:MOST_NAMED])}"] if able else []
    current = columns.get("current_log_probs")
    if current and "old_log_probs" in missing:
        ways.insert(0, f"read the policy there is as the old one with --columns old={current}")
    return ", or ".join(ways) or f"name {'it' if len(missing) == 1 else 'them'} with --columns"
