"""`offpol-diag gate`: bounds on numbers, for CI."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from offpol_diag.cli.exits import COULD_NOT_SAY, FAILED
from offpol_diag.cli.output import URL, Outputs, emit, note
from offpol_diag.cli.results import computed
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag import requests
    from offpol_diag.result import Result

EXITS = {"passed": 0, "failed": FAILED, "could not say": COULD_NOT_SAY}


def gate(request: requests.Gate) -> None:
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
    from offpol_diag import commands
    from offpol_diag.gate import outcome

    must = commands.required(request)
    files = Outputs.of(request, *request.dump, *([must.result] if must.result else []))
    with files.begin():
        if (result := _result(request)) is not None:
            judged = commands.gate(result, request, must)
        else:
            judged = computed(partial(commands.gate, must=must), request.dump, request)
        files.write(judged, request.verbose)
    _report_to_github(judged, files.takes_stdout())
    raise SystemExit(EXITS[outcome(judged.gates)])


def _result(request: requests.Gate) -> Result | None:
    """Load the result that is given; None where a dump is."""
    results = [name for name in request.dump if name.lower().endswith(".json")]
    if not results:
        return None
    if any(map(URL.match, results)):
        raise UsageError("a result is read from this disk, and a URL is named", "copy it, and name the file")
    if len(request.dump) > 1:
        raise UsageError("a result is judged alone", f"give {results[0]} and nothing else, or only dumps")
    from offpol_diag.result import load

    return load(Path(results[0]))


def _report_to_github(summary: Result, aside: bool) -> None:
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
