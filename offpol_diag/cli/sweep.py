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
    """Threshold against what is kept, ESS and mean weight: one preset at many thresholds, in one reading.

    Shown overall, for the shortest and longest quarter of the responses and for policy lag 0, with a warning
    where the preset's own threshold drops long responses, or what differs by numerics alone. With --keep the
    bounds that keep an asked share. With -o an HTML report.
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
    from offpol_diag.sweep import SweepOptions

    found = request.presets(name)
    if len(found) != 1:
        raise UsageError(f"--preset {name}: one preset is swept at a time", "name one")
    return SweepOptions.of(found[0], which, at, keep, trainer)
