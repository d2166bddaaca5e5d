"""`offpol-diag gate`: bounds on numbers, for CI."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.exits import COULD_NOT_SAY, FAILED
from offpol_diag.cli.output import URL, Outputs, emit, note
from offpol_diag.cli.request import Request, with_request
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.gate import Gates
    from offpol_diag.summary import Summary

EXITS = {"passed": 0, "failed": FAILED, "could not say": COULD_NOT_SAY}
BOUNDS, BASELINE = "What must hold", "Against an earlier result"

Source = Annotated[
    list[str],
    typer.Argument(
        metavar="DUMP|RESULT.json", help="A dump, or a result that --json wrote, to be judged as it is."
    ),
]
PAIR = "NAME=NUMBER"
MAX = "The largest value that passes: --max k3=0.002. Repeatable."
AtMost = Annotated[list[str] | None, options.option(MAX, "--max", metavar=PAIR, panel=BOUNDS)]
MIN = "The smallest value that passes: --min seq_mis.ess_tokens=0.5. Repeatable."
AtLeast = Annotated[list[str] | None, options.option(MIN, "--min", metavar=PAIR, panel=BOUNDS)]
FILE = "Bounds from a file, with levels, steps and presets (docs/ci.md)."
GateFile = Annotated[Path | None, options.option(FILE, "--gates", metavar="FILE.toml", panel=BOUNDS)]
FAIL = "A diagnosis that fails, as every worse one does: bug, cannot_tell or honest_mismatch. Repeatable."
FailOn = Annotated[list[str] | None, options.option(FAIL, "--fail-on", metavar="DIAGNOSIS", panel=BOUNDS)]
VALUES = "Judge the plain values, not their 95% intervals."
Point = Annotated[bool, options.option(VALUES, "--point", panel=BOUNDS)]
BASE = "Nothing may be worse than in this result by more than the tolerance."
Baseline = Annotated[Path | None, options.option(BASE, "--baseline", metavar="RESULT.json", panel=BASELINE)]
WORSE = (
    "How much worse is allowed: a share of the baseline's value, an amount, or both (10%+0.001); of one "
    "number or of all. Default 10%. Repeatable."
)
Tolerances = Annotated[
    list[str] | None, options.option(WORSE, "--tolerance", metavar="[NAME=]10%|0.001", panel=BASELINE)
]
THESE = "Compare these numbers and no others."
Only = Annotated[str | None, options.option(THESE, "--only", metavar="NAME,NAME", panel=BASELINE)]
MORE = "Presets whose numbers are compared as well."
Presets = Annotated[str, options.option(MORE, "--presets", metavar="NAME,NAME", panel=BASELINE, env=True)]
XML = "Write the verdicts as JUnit XML; - is stdout."
JUnit = Annotated[Path | None, options.option(XML, "--junit", metavar="FILE.xml", panel=options.OUTPUT)]


@with_request("group_by", "trainer")
def gate(
    *,
    source: Source,
    fail_on: FailOn = None,
    at_most: AtMost = None,
    at_least: AtLeast = None,
    gates: GateFile = None,
    point: Point = False,
    baseline: Baseline = None,
    tolerance: Tolerances = None,
    only: Only = None,
    presets: Presets = "",
    request: Request,
    out: options.Html = None,
    no_explore: options.NoExplore = False,
    json: options.Json = None,
    md: options.Markdown = None,
    csv: options.Csv = None,
    junit: JUnit = None,
    verbose: options.Verbose = False,
) -> None:
    """Hold numbers against bounds, or against an earlier result; the exit code is the verdict.

    0: every bound holds. 1: a bound failed. 2: no bound failed, but one could not be judged (a name that is
    no metric, a value that cannot be known from this dump or is unreliable, NaN), or nothing could be judged.

    A bound fails only when the whole 95% interval lies beyond it. An interval with values on both sides
    passes, and the table says that it is open. A number without an interval is judged by its value; a value
    on its bound passes.

    --fail-on bug fails where the diagnosis is a bug; it could not be judged where a bug cannot be looked for:
    columns that are copies, fewer than 16 sequences or 4 prompts. Several causes that fit pass as open.
    --fail-on cannot_tell is the strict way: it fails for all of these.

    Against a baseline none may be worse, in the order healthy, honest_mismatch, cannot_tell, bug.

    NAME is a metric (k3, drift2.k3), a preset's (seq_mis.ess_tokens), what a trainer logs that equals one
    (rollout_corr/kl), or any of them over the training steps: step:NAME holds at every step; first, last,
    min, max, mean, median and p90 (any pNN) are one number of them all.

    Under GitHub Actions the job summary gets the Markdown, and the run is annotated.
    """
    from offpol_diag.gate import judged, not_compared, outcome, required
    from offpol_diag.summary import load

    asked = required(
        max=at_most or (),
        min=at_least or (),
        gates=gates,
        fail_on=fail_on or (),
        point=point,
        baseline=baseline,
        tolerance=tolerance or (),
        only=options.names(only),
        presets=options.names(presets),
    )
    files = Outputs(
        html=out, json=json, markdown=md, quiet=request.quiet, junit=junit, csv=csv, explore=not no_explore
    )
    files.check(*source, *(one for one in (gates, asked.result, request.preset_file) if one))
    with files.begin():
        base = load(asked.result) if asked.result else None
        summary = _summary(replace(request, by_step=asked.by_step), source, asked)
        summary.gates = list(judged(summary, asked, base))
        remark = not_compared(base, asked.baseline) if base and asked.baseline else ""
        files.write(summary, verbose, (remark,) if remark else ())
    _report_to_github(summary, files.takes_stdout())
    raise SystemExit(EXITS[outcome(summary.gates)])


def _summary(request: Request, source: Sequence[str], asked: Gates) -> Summary:
    """Load a result, or analyse a dump with the presets that the bounds name."""
    results = [name for name in source if name.lower().endswith(".json")]
    if not results:
        return request.run("gate", source, asked.presets(request.catalogue()))
    if any(map(URL.match, results)):
        raise UsageError("a result is read from this disk, and a URL is named", "copy it, and name the file")
    if len(source) > 1:
        raise UsageError("a result is judged alone", f"give {results[0]} and nothing else, or only dumps")
    from offpol_diag.summary import load

    return load(Path(results[0]))


def _report_to_github(summary: Summary, aside: bool) -> None:
    """Add to the job summary where there is one, and annotate the run of GitHub Actions.

    Annotations go to stdout, or `aside` to stderr, which GitHub also reads. Failing to write the job summary
    does not fail a gate.
    """
    place = os.environ.get("GITHUB_STEP_SUMMARY")
    if place:
        from offpol_diag.report import answered
        from offpol_diag.report.markdown import markdown

        try:
            with Path(place).open("a", encoding="utf-8") as file:
                file.write("\n" + markdown(answered(summary)))
        except OSError as error:
            note(f"GITHUB_STEP_SUMMARY: {place} cannot be written ({error.strerror})")
    if os.environ.get("GITHUB_ACTIONS") == "true":
        from offpol_diag.report.annotations import annotated

        lines = "".join(f"{line}\n" for line in annotated(summary.gates))
        if aside:
            sys.stderr.flush()
            sys.stderr.buffer.write(lines.encode())
            sys.stderr.buffer.flush()
        else:
            emit(lines)
