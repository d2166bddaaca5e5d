"""`offpol-diag compare`: corrections side by side on one dump, or run A against run B."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from offpol_diag.cli import defaults, options
from offpol_diag.cli.output import STDOUT, Outputs, note
from offpol_diag.cli.request import Request, ran, with_request
from offpol_diag.errors import UsageError

if TYPE_CHECKING:
    from offpol_diag.presets import Preset
    from offpol_diag.summary import Summary

MOST_NAMED = 3
TWO = 2
LIST = (
    "Corrections to evaluate; `offpol-diag presets` lists them. Of one dump all, of two runs none, "
    "unless you name some."
)
Presets = Annotated[
    str | None, options.option(LIST, "--presets", metavar="all|NAME,NAME", panel=options.INPUT, env=True)
]
FIRST = "The preset that the others are compared with; the first of --presets unless you name one."
Reference = Annotated[str | None, options.option(FIRST, "--against", metavar="NAME", panel=options.INPUT)]
PARTS = "Read several DUMPs as the parts of one dump."
AsOne = Annotated[bool, options.option(PARTS, "--as-one", panel=options.INPUT)]


@with_request("trainer")
def compare(
    *,
    dump: options.Dumps = None,
    presets: Presets = None,
    against: Reference = None,
    as_one: AsOne = False,
    request: Request,
    out: options.Html = None,
    no_explore: options.NoExplore = False,
    json: options.Json = None,
    md: options.Markdown = None,
    csv: options.Csv = None,
    verbose: options.Verbose = False,
) -> None:
    """Corrections side by side on one dump, or run A against run B.

    One DUMP: what each correction keeps, drops and weighs, which does better, and what each drops that the
    first one keeps. Differences are paired, with intervals of their own.

    Two DUMPs: the first is run A, the second run B (FP8 against BF16, before against after an upgrade); what
    differs, by how much, and whether it is real after a correction for looking at many numbers. Prompts that
    both runs have (group_id) are resampled together. With --as-one they are the parts of one dump; a quoted
    glob or a directory is one DUMP as well.
    """
    if len(dump or ()) > TWO and not as_one:
        raise UsageError(
            f"{len(dump or ())} DUMPs given: two are compared as run A and run B, more are not",
            "add --as-one to read them as the parts of one dump, or name each run by a directory or a quoted "
            "glob: compare 'before/*.parquet' 'after/*.parquet'",
        )
    two = len(dump or ()) == TWO and not as_one
    dumps = list(dump or []) if two else defaults.dumps(dump, request.quiet)
    files = Outputs(out, json, md, request.quiet, csv=csv, explore=not no_explore)
    files.check(*dumps, *([request.preset_file] if request.preset_file else []))
    with files.begin():
        if two:
            summary = _runs(request, dumps[0], dumps[1], request.presets(presets) if presets else (), against)
        else:
            summary = _presets(request, dumps, presets, against)
        files.write(summary, verbose)


def _runs(request: Request, a: str, b: str, chosen: Sequence[Preset], against: str | None) -> Summary:
    """Analyse both runs alike, one after the other, and compare them."""
    if against is not None:
        raise UsageError(
            "--against names a preset, and two DUMPs are compared as run A and run B",
            "leave it out, or add --as-one to compare presets on both dumps as one",
        )
    if a == b == str(STDOUT):
        raise UsageError("stdin cannot be both runs", "name a file for one of them")
    from offpol_diag.compare import of_runs
    from offpol_diag.readers.sources import clean

    names = f"{clean(a)} is run A, {clean(b)} is run B"
    note(f"2 DUMPs given: {names} (--as-one reads them as one)", request.quiet)
    one, other = request.examined([a], chosen), request.examined([b], chosen)
    first, second = ran("compare", one.summary()), other.summary()
    return first.model_copy(update={"against": of_runs(one, other, first, second)})


def _presets(request: Request, dumps: Sequence[str], named: str | None, against: str | None) -> Summary:
    """Compare the named presets, or all, with one of them."""
    from offpol_diag.advice.recommend import advised
    from offpol_diag.compare import lacking, of_presets, reference
    from offpol_diag.forms import open_dump
    from offpol_diag.presets.catalogue import load

    chosen, base = request.presets("all" if named is None else named), None
    if against is not None:
        found = request.catalogue().resolve(against)
        if len(found) != 1:
            raise UsageError(f"--against {against}: not one preset", "name one")
        chosen, base = (*chosen, *(one for one in found if one not in chosen)), found[0].name
    columns = open_dump(dumps, reading=request.reading(), columns=request.which_columns()).info.columns
    lacks = lacking(columns, chosen)
    if all(lacks.values()):
        missing = dict.fromkeys(column for names in lacks.values() for column in names)
        every = load(request.preset_file).items()
        able = [name for name, preset in every if not preset.lacking(columns)][:MOST_NAMED]
        ways = [f"try --presets {','.join(able)}"] if able else []
        current = columns.get("current_log_probs")
        if current and "old_log_probs" in missing:
            ways.insert(0, f"read the policy there is as the old one with --columns old={current}")
        raise UsageError(
            f"the dump has no {' and no '.join(missing)}, which {', '.join(lacks)} cannot do without",
            ", or ".join(ways) or f"name {'it' if len(missing) == 1 else 'them'} with --columns",
        )
    first = reference(lacks, base)
    assert first is not None  # or there would have been an error
    examined = request.examined(dumps, chosen, against=first, every_log=named is not None)
    summary = ran("compare", examined.summary())
    return advised(summary.model_copy(update={"comparison": of_presets(examined, summary, first)}))
