"""`offpol-diag presets`: the catalogue, and any of it in a trainer's own syntax."""

from __future__ import annotations

import json as to_json
import math
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offpol_diag.cli import options
from offpol_diag.cli.output import STDOUT, check, note, say_where, write_all
from offpol_diag.errors import UsageError
from offpol_diag.printable import printable_json, printable_lines

if TYPE_CHECKING:
    from offpol_diag.presets import Preset
    from offpol_diag.table import Table
    from offpol_diag.trainers import Config

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="One preset, or several separated by commas: their exact formulas."),
]
SYNTAX = "The preset in this trainer's own syntax, ready to paste; without a NAME, what it can say."
For = Annotated[str | None, options.option(SYNTAX, "--for", metavar="TRAINER")]
CHANGE = "Change a threshold: weight.upper=3, reject.lower=0.99. Repeat it, or separate by commas."
Set = Annotated[list[str] | None, options.option(CHANGE, "--set", metavar="KEY=VALUE")]


def presets(
    name: Name = None,
    trainer: For = None,
    settings: Set = None,
    preset_file: options.PresetFile = None,
    json: options.Json = None,
    quiet: options.Quiet = False,
) -> None:
    """The catalogue of corrections; with a NAME its exact formulas, or its configuration for a trainer."""
    from offpol_diag.presets.catalogue import load
    from offpol_diag.presets.formulas import catalogue_table
    from offpol_diag.presets.tuning import tuned
    from offpol_diag.trainers import config_for, sayable, trainer_named

    if json is not None:
        check(json, *([preset_file] if preset_file else []))
    changes = _settings(settings)
    found = load(preset_file).resolve(name or "all")
    if changes and name is None:
        raise UsageError(
            "--set changes a preset; none is named", "say which: offpol-diag presets NAME --set …"
        )
    chosen = {preset.name: tuned(preset, changes) for preset in found}
    rows: dict[str, Any] = {"presets": {key: asdict(preset) for key, preset in chosen.items()}}
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
            rows = {"presets": {key: asdict(preset) for key, preset in chosen.items()}}
        from offpol_diag.report.terminal import tables

        each = [part for one in chosen.values() for part in _described(one)]
        drawn = tables(each if name else [catalogue_table(chosen)])
    text = printable_json(to_json.dumps({"format": 1} | rows, indent=1, ensure_ascii=False)) + "\n"
    write_all({} if json is None else {json: text}, shown="" if json == STDOUT else drawn)
    if json not in (None, STDOUT) and not quiet:
        say_where("json", json, aside=True)


def _described(preset: Preset) -> tuple[str | Table, ...]:
    """Return a preset's formulas, and the numbers that they get."""
    from offpol_diag.pipeline.plan import numbers
    from offpol_diag.presets.formulas import description
    from offpol_diag.table import Table

    rows = tuple((one.part, one.of, _said(one.lower), _said(one.upper)) for one in numbers(preset))
    table = Table("numbers", "Numbers", ("part", "of", "lower", "upper"), rows)
    return (*description(preset), table) if rows else description(preset)


def _said(bound: float) -> str:
    """Write a bound with six digits; – for none."""
    from offpol_diag.numerals import minus

    return minus(f"{bound:.6g}") if math.isfinite(bound) else "–"


def _settings(given: list[str] | None) -> dict[str, str]:
    from offpol_diag.presets.tuning import SETTINGS

    split = [part.partition("=") for text in given or () for part in options.names(text)]
    for key, sign, value in split:
        if not key.strip() or not value.strip():
            raise UsageError(f'--set "{key}{sign}{value}" sets nothing', SETTINGS)
    return {key.strip(): value.strip() for key, _, value in split}


def _config(config: Config) -> dict[str, Any]:
    said = {**asdict(config), "text": config.text()}
    for snippet in said["snippets"]:
        del snippet["age"]
    return said
