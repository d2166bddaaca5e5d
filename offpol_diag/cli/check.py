"""`offpol-diag check`: the trainer's own curves against what its dump says that they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from offpol_diag.cli import defaults, options
from offpol_diag.cli.exits import FAILED
from offpol_diag.cli.output import Outputs
from offpol_diag.cli.request import Request, with_request
from offpol_diag.errors import UsageError

CURVES = "The trainer's curves by step: exports of W&B or TensorBoard, JSONL, CSV; may be repeated."
Logged = Annotated[list[Path] | None, options.option(CURVES, "--logged", metavar="FILE", panel=options.INPUT)]
WHO = "Who logged them; found by provenance or by the names, where it is left out."
Trainer = Annotated[str | None, options.option(WHO, "--trainer", metavar="NAME", panel=options.INPUT)]
METHOD = "The correction that ran; left out, the trainer's that reproduces the most metrics."
Preset = Annotated[str | None, options.option(METHOD, "--preset", metavar="NAME", panel=options.INPUT)]
MICRO = "Sequences of a micro-batch, where the trainer averages the means of those."
Micro = Annotated[int | None, options.option(MICRO, "--micro-batch", min=1, panel=options.INPUT)]
RANKS = "Data-parallel ranks (rows in blocks), where the trainer averages the means of those."
Ranks = Annotated[int | None, options.option(RANKS, "--dp", min=1, panel=options.INPUT)]

STRICT = "Exit with 1 where a metric differs."
Strict = Annotated[bool, options.option(STRICT, "--strict")]


@with_request("group_by", "device", "engine", "workers", "seed", "trainer")
def check(
    *,
    dump: options.Dumps = None,
    logged: Logged = None,
    trainer: Trainer = None,
    preset: Preset = None,
    micro_batch: Micro = None,
    dp: Ranks = None,
    strict: Strict = False,
    request: Request,
    out: options.Html = None,
    no_explore: options.NoExplore = False,
    json: options.Json = None,
    md: options.Markdown = None,
    csv: options.Csv = None,
    verbose: options.Verbose = False,
) -> None:
    """Does the trainer log what its dump says? Its own curves beside the numbers they must be.

    Each training step of the dump is taken as one batch of the trainer, and every metric that the crosswalk
    knows is compared with the curve of that name. Where they differ by more than float32 rounds, variants
    are tried, alone and in pairs: masked tokens counted, means over micro-batches or ranks, the other
    direction of the ratio, other bounds, another pair of policies, sums, another step. The one that
    reproduces the curve is named.

    The exit code is 0 whatever is found, and with --strict 1 where a metric differs.
    """
    if not logged:
        raise UsageError("check needs the trainer's curves", "offpol-diag check DUMP --logged history.jsonl")
    dumps = defaults.dumps(dump, request.quiet)
    files = Outputs(out, json, md, request.quiet, csv=csv, explore=not no_explore)
    files.check(*dumps, *logged, *([request.preset_file] if request.preset_file else []))
    columns = request.which_columns()
    with defaults.judged("preset_file", request.preset_file):
        from offpol_diag.presets.catalogue import load

        catalogue = load(request.preset_file)
    from offpol_diag.check.verdict import check as checked

    found = checked(
        dumps,
        logged,
        trainer=trainer,
        preset=preset,
        micro_batch=micro_batch,
        dp=dp,
        catalogue=catalogue,
        columns=columns,
        reading=request.reading(),
        on_bad_row=request.on_bad_row,
    )
    files.write(found, verbose)
    if strict and not found.equal:
        raise SystemExit(FAILED)
