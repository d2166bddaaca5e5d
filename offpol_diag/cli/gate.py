"""`offpol-diag gate`: bounds on numbers, for CI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.exits import COULD_NOT_SAY, FAILED
from offpol_diag.cli.output import URL, Outputs
from offpol_diag.cli.request import Request
from offpol_diag.cli.show import show
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.blocks import Section, Tone
    from offpol_diag.gate import Bound
    from offpol_diag.summary import GateVerdict, Summary

EXITS = {"passed": 0, "failed": FAILED, "could not say": COULD_NOT_SAY}
SAID: Mapping[str, tuple[str, Tone]] = {
    "passed": ("Passed", "good"),
    "failed": ("Failed", "bad"),
    "could not say": ("Could not say", "warn"),
}
WORDS = {True: "passed", False: "FAILED", None: "could not say"}

Source = Annotated[
    list[str],
    typer.Argument(
        metavar="DUMP|RESULT.json", help="A dump, or a result that --json wrote, to be judged as it is."
    ),
]
AtMost = Annotated[
    list[str] | None,
    typer.Option(
        "--max", metavar="NAME=NUMBER", help="The largest value that passes: --max k3=0.002. Repeatable."
    ),
]
AtLeast = Annotated[
    list[str] | None,
    typer.Option(
        "--min",
        metavar="NAME=NUMBER",
        help="The smallest value that passes: --min seq_mis.ess_tokens=0.5. Repeatable.",
    ),
]


def gate(
    source: Source,
    at_most: AtMost = None,
    at_least: AtLeast = None,
    preset_file: options.PresetFile = None,
    columns: options.Columns = None,
    on_bad_row: options.OnBadRow = "error",
    json: options.Json = None,
    md: options.Markdown = None,
    device: options.Device = "auto",
    engine: options.Engine = "local",
    workers: options.Workers = "auto",
    seed: options.Seed = 0,
    quiet: options.Quiet = False,
) -> None:
    """Hold numbers against bounds; the exit code is the verdict.

    0: every bound holds. 1: a bound failed. 2: no bound failed, but one could not be judged (a name that is
    no metric, a value that cannot be known from this dump, NaN), or nothing could be judged at all. A value
    on its bound passes.
    """
    from offpol_diag.gate import judge, outcome, parse

    bounds = [parse(text, "max") for text in at_most or ()] + [parse(text, "min") for text in at_least or ()]
    if not bounds:
        raise UsageError("no bound is given", "say what must hold: --max k3=0.002 --min ess_tokens=0.5")
    files = Outputs(json=json, markdown=md, quiet=quiet)
    files.check(*source)
    request = Request(
        preset_file, columns, None, device, seed, on_bad_row, quiet, engine=engine, workers=workers
    )
    summary = _summary(request, source, bounds)
    verdicts = judge(summary, bounds)
    judged = summary.model_copy(update={"gates": list(verdicts)})
    files.write(judged)
    if not files.takes_stdout():
        show([_section(verdicts)])
    files.say_where()
    raise SystemExit(EXITS[outcome(verdicts)])


def _section(verdicts: Sequence[GateVerdict]) -> Section:
    from offpol_diag.blocks import Section, Table, Verdict
    from offpol_diag.gate import outcome

    said = outcome(verdicts)
    passed = sum(verdict.passed is True for verdict in verdicts)
    head = Verdict(SAID[said][0], f"{passed} of {len(verdicts)} bounds hold", SAID[said][1])
    rows = tuple((WORDS[one.passed], one.name, f"{one.bound} {one.limit:g}", one.reason) for one in verdicts)
    return Section(
        "gate", "Gate", (head, Table("gates", "Every bound", ("gate", "number", "bound", "why"), rows))
    )


def _summary(request: Request, source: Sequence[str], bounds: Sequence[Bound]) -> Summary:
    """A result is judged as it is; a dump is analysed first, with the presets that the bounds name."""
    results = [name for name in source if name.lower().endswith(".json")]
    if not results:
        from offpol_diag.gate import presets_named

        catalogue = request.catalogue()
        wanted = presets_named(bounds, catalogue)
        return request.run("gate", source, catalogue.resolve(",".join(wanted)) if wanted else ())
    if any(map(URL.match, results)):
        raise UsageError("a result is read from this disk, and a URL is named", "copy it, and name the file")
    if len(source) > 1:
        raise UsageError("a result is judged alone", f"give {results[0]} and nothing else, or only dumps")
    from offpol_diag.summary import load

    return load(Path(results[0]))
