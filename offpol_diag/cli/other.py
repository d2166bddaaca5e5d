"""What makes no result of a dump: convert, presets, and the pages about causes."""

from __future__ import annotations

import json as to_json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from offpol_diag.cli.output import STDOUT, check, check_names, note, say_where, write_all
from offpol_diag.errors import UsageError
from offpol_diag.printable import printable_json, printable_lines

if TYPE_CHECKING:
    from offpol_diag import requests
    from offpol_diag.presets import Preset
    from offpol_diag.table import Table
    from offpol_diag.trainers.translate import Config


EVERY = "list"
"""What --explain is given for the list of causes."""
FORM = ("form", "trainer", "files", "holds")
"""Columns of the table of forms."""


def convert(request: requests.Convert) -> None:
    """What a trainer wrote by itself, as a canonical dump: Parquet, one row per sequence.

    Every command that takes a DUMP reads the same files by itself; convert keeps the result.
    """
    if request.forms:
        from offpol_diag.dump.forms import FORMS
        from offpol_diag.report.terminal import tables
        from offpol_diag.table import Table

        rows = tuple((one.name, one.trainer, one.files, one.holds) for one in FORMS if one.rows)
        write_all({}, shown=tables([Table("forms", "", FORM, rows)]))
        return
    source, to = request.source, request.to
    if not source or to is None:
        raise UsageError(
            "convert needs files and a target",
            "offpol-diag convert SRC… --to out.parquet; --list shows the forms",
        )
    from offpol_diag.dump import convert as dumps

    check_names(*source)
    check(to, *source)
    made = dumps.convert(source, to, request.columns)
    for line in made.notes:
        note(line, request.quiet)
    note(f"{to}: {made.sequences:,} sequences, {made.tokens:,} tokens", request.quiet)


def presets(request: requests.Presets) -> None:
    """The catalogue of corrections; with a NAME its exact formulas, or its configuration for a trainer."""
    from offpol_diag.commands import catalogue
    from offpol_diag.report.presets import catalogue as listed
    from offpol_diag.trainers import trainer_named
    from offpol_diag.trainers.translate import config_for, sayable

    name, trainer, json, quiet = request.name, request.trainer, request.json_file, request.quiet
    if json is not None:
        check(json, *([request.preset_file] if request.preset_file else []))
    known = catalogue(request)
    chosen = {preset.name: preset for preset in known.resolve(name or "all")}
    rows: dict[str, Any]
    if trainer and name:
        configs = [config_for(preset, trainer) for preset in chosen.values()]
        drawn = printable_lines("\n".join(config.text() for config in configs))
        rows = {"configs": [_config(config) for config in configs]}
    else:
        if trainer:
            said = trainer_named(trainer)
            hint = f"`offpol-diag presets NAME --for {said}` prints it, ready to paste"
            note(f"what {said} can say; {hint}", quiet)
            chosen = {key: preset for key, preset in chosen.items() if sayable(preset, (said,))}
        rows = {"presets": {key: {**asdict(one), "kind": one.kind} for key, one in chosen.items()}}
        from offpol_diag.report.terminal import tables

        if name:
            drawn = tables([part for one in chosen.values() for part in _explained(one, known.aliases)])
        else:
            drawn = tables([*listed(chosen, known.default)])
    text = printable_json(to_json.dumps({"format": 1} | rows, indent=1, ensure_ascii=False)) + "\n"
    write_all({} if json is None else {json: text}, shown="" if json == STDOUT else drawn)
    if json not in (None, STDOUT) and not quiet:
        say_where("json", json, aside=True)


def explain(request: requests.Doctor, cause: str) -> None:
    """Print what is known of a cause, or the list of causes; with --md as Markdown."""
    from offpol_diag.diagnosis import registry
    from offpol_diag.report.explain import every_cause, explained
    from offpol_diag.report.markdown import markdown
    from offpol_diag.report.terminal import terminal

    given = {"DUMP": request.dump, "-o": request.out, "--json": request.json_file}
    for name, value in given.items():
        if value and not request.from_file("dump"):
            hint = "`offpol-diag doctor --explain CAUSE` writes text, and with --md Markdown"
            raise UsageError(f"--explain reads no dump and has no result, and {name} is given", hint)
    answer = every_cause() if cause == EVERY else explained(registry.cause(cause))
    if request.md is not None:
        check(request.md)
    shown = terminal(answer, request.verbose, request.quiet)
    write_all({} if request.md is None else {request.md: markdown(answer)}, shown=shown)
    if request.md not in (None, STDOUT) and not request.quiet:
        say_where("md", str(request.md), aside=True)


def _explained(preset: Preset, aliases: Mapping[str, str]) -> Iterator[str | Table]:
    """Yield a preset's formulas, and the numbers that they get."""
    from offpol_diag.core.steps import numbers
    from offpol_diag.report.presets import explained
    from offpol_diag.table import Table
    from offpol_diag.trainers.translate import sayable

    yield from explained(preset, aliases, sayable(preset))
    rows = tuple((one.part, one.of, _said(one.lower), _said(one.upper)) for one in numbers(preset))
    if rows:
        yield Table("numbers", "Numbers", ("part", "of", "lower", "upper"), rows)


def _said(bound: float) -> str:
    """Write a bound with six digits; – for none."""
    from offpol_diag.numerals import minus

    return minus(f"{bound:.6g}") if math.isfinite(bound) else "–"


def _config(config: Config) -> dict[str, Any]:
    return {**asdict(config), "text": config.text()}
