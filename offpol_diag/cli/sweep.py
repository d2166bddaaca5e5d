"""`offpol-diag sweep`: one preset at many thresholds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offpol_diag.cli import defaults, options
from offpol_diag.cli.output import Outputs, shown
from offpol_diag.cli.request import Request
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.sweep import SweepOptions

Named = Annotated[
    str,
    typer.Option(
        "--preset",
        metavar="NAME",
        rich_help_panel=options.INPUT,
        help="Whose threshold moves; `offpol-diag presets` lists them.",
    ),
]
Which = Annotated[
    str | None,
    typer.Option(
        "--which",
        metavar="BOUND",
        help="Which of its bounds: weight.upper, reject.upper, reject[1].lower, veto.lower; reject or weight "
        "alone is the window [1/b, b]. Left out: the one that the preset is about.",
    ),
]
At = Annotated[
    str | None,
    typer.Option(
        "--at",
        metavar="B,B,…",
        help="The thresholds, rising. Left out: round numbers where the data change.",
    ),
]
Keep = Annotated[
    float | None,
    typer.Option(
        "--keep",
        metavar="SHARE",
        help="Solve for the bounds that keep this share (0.95), around the data; reads the dump twice more.",
    ),
]
For = Annotated[
    str | None,
    typer.Option("--for", metavar="TRAINER", help="With --keep: print the bounds as this trainer's config."),
]


def sweep(
    preset: Named,
    dump: options.Dumps = None,
    which: Which = None,
    at: At = None,
    keep: Keep = None,
    trainer: For = None,
    preset_file: options.PresetFile = None,
    columns: options.Columns = None,
    on_bad_row: options.OnBadRow = "error",
    out: options.Html = None,
    json: options.Json = None,
    md: options.Markdown = None,
    device: options.Device = "auto",
    engine: options.Engine = "local",
    workers: options.Workers = "auto",
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Threshold against what is kept, ESS, bias and variance: one preset at many thresholds, in one reading.

    Shown overall and by quartile of response length, with a warning where a threshold drops long responses,
    lies under numerical noise, or beside the data. With --keep the bounds that keep an asked share, and what
    they would keep of responses of other lengths. With -o an HTML report.
    """
    dumps = defaults.dumps(dump, quiet)
    files = Outputs(out, json, md, quiet)
    files.check(*dumps)
    with files.begin():
        request = Request(
            preset_file, columns, None, device, seed, on_bad_row, quiet, engine=engine, workers=workers
        )
        chosen = _checked(request, preset, which, at, keep, trainer)
        summary = request.sweep(dumps, chosen)
        files.write(summary, lambda: shown(summary, verbose, quiet))


def _checked(
    request: Request, name: str, which: str | None, at: str | None, keep: float | None, trainer: str | None
) -> SweepOptions:
    """Return the options of the sweep, validated before the dump is read."""
    from offpol_diag.sweep import SweepOptions, pick, thresholds, window

    found = request.presets(name)
    if len(found) != 1:
        raise UsageError(f"--preset {name}: one preset is swept at a time", "name one")
    preset, bound = found[0], pick(found[0], which)
    values = None if at is None else thresholds.parse(at, preset, bound)
    if keep is not None:
        window.check(keep, preset, bound)
    return SweepOptions(
        preset, bound, values, keep, which is not None, _trainer(trainer, keep, request, name)
    )


def _trainer(trainer: str | None, keep: float | None, request: Request, name: str) -> str:
    """Return the trainer's name after checking that it can express the preset, with bounds to be found."""
    from offpol_diag.trainers import config_for, trainer_named

    if trainer is None:
        return ""
    if keep is None:
        raise UsageError(
            "--for prints the bounds that --keep solves for",
            f"add --keep 0.95, or print the preset: offpol-diag presets {name} --for {trainer}",
        )
    config_for(request.presets(name)[0], trainer)
    return trainer_named(trainer)
