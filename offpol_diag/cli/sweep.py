"""`offpol-diag sweep`: one preset at many thresholds."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from offpol_diag.cli import defaults, options
from offpol_diag.cli.output import Outputs
from offpol_diag.cli.request import Request, with_request
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.sweep import SweepOptions

WHOSE = "Whose threshold moves; `offpol-diag presets` lists them."
Named = Annotated[str, options.option(WHOSE, "--preset", metavar="NAME", panel=options.INPUT)]
BOUND = (
    "Which of its bounds: weight.upper, reject.upper, reject[1].lower, veto.lower; reject or weight alone is "
    "the window [1/b, b]. Left out: the one that the preset is about."
)
Which = Annotated[str | None, options.option(BOUND, "--which", metavar="BOUND")]
THRESHOLDS = "The thresholds, rising. Left out: round numbers where the data change."
At = Annotated[str | None, options.option(THRESHOLDS, "--at", metavar="B,B,…")]
SHARE = "Solve for the bounds that keep this share (0.95), around the data; reads the dump twice more."
Keep = Annotated[float | None, options.option(SHARE, "--keep", metavar="SHARE")]
PASTE = "With --keep: print the bounds as this trainer's config."
For = Annotated[str | None, options.option(PASTE, "--for", metavar="TRAINER")]


@with_request("group_by", "trainer")
def sweep(
    *,
    preset: Named,
    dump: options.Dumps = None,
    which: Which = None,
    at: At = None,
    keep: Keep = None,
    trainer: For = None,
    request: Request,
    out: options.Html = None,
    no_explore: options.NoExplore = False,
    json: options.Json = None,
    md: options.Markdown = None,
    csv: options.Csv = None,
    verbose: options.Verbose = False,
) -> None:
    """Threshold against what is kept, ESS, bias and variance: one preset at many thresholds, in one reading.

    Shown overall and by quartile of response length, with a warning where a threshold drops long responses,
    lies under numerical noise, or beside the data. With --keep the bounds that keep an asked share, and what
    they would keep of responses of other lengths. With -o an HTML report.
    """
    dumps = defaults.dumps(dump, request.quiet)
    files = Outputs(out, json, md, request.quiet, csv=csv, explore=not no_explore)
    files.check(*dumps, *([request.preset_file] if request.preset_file else []))
    with files.begin():
        chosen = _checked(request, preset, which, at, keep, trainer)
        summary = request.sweep(dumps, chosen)
        files.write(summary, verbose)


def _checked(
    request: Request, name: str, which: str | None, at: str | None, keep: float | None, trainer: str | None
) -> SweepOptions:
    """Return the options of the sweep, validated before the dump is read."""
    from offpol_diag.sweep import SweepOptions, pick, thresholds, window
    from offpol_diag.trainers import config_for, trainer_named

    found = request.presets(name)
    if len(found) != 1:
        raise UsageError(f"--preset {name}: one preset is swept at a time", "name one")
    preset, bound = found[0], pick(found[0], which)
    values = None if at is None else thresholds.parse(at, preset, bound)
    if keep is not None:
        window.check(keep, preset, bound)
    name_there = ""
    if trainer is not None:
        if keep is None:
            raise UsageError(
                "--for prints the bounds that --keep solves for",
                f"add --keep 0.95, or print the preset: offpol-diag presets {name} --for {trainer}",
            )
        config_for(preset, trainer)  # which refuses a preset that it cannot express
        name_there = trainer_named(trainer)
    return SweepOptions(preset, bound, values, keep, which is not None, name_there)
