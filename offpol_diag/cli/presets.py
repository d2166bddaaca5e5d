"""`offpol-diag presets`: the catalogue, and any of it in a trainer's own syntax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from offpol_diag.cli import options
from offpol_diag.cli.output import STDOUT, check, note, write_all
from offpol_diag.cli.show import drawn
from offpol_diag.printable import printable_json, printable_lines

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offpol_diag.presets import Preset
    from offpol_diag.trainers import Config

Name = Annotated[
    str | None,
    typer.Argument(metavar="NAME", help="One preset, or several separated by commas: their exact formulas."),
]
For = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="TRAINER",
        help="The preset in this trainer's own syntax, ready to paste; without a NAME, what it can say.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change a threshold: weight.upper=3, reject.lower=0.99. Repeat it, or separate by commas.",
    ),
]


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

    check(json, *([preset_file] if preset_file else []))
    asked = _settings(settings)
    catalogue = load(preset_file)
    chosen = _tuned(catalogue.resolve(name or "all"), asked, name)
    if trainer and name:
        _print_configs(chosen, trainer, json, quiet)
        return
    chosen = _sayable(chosen, trainer, quiet) if trainer else chosen
    texts = {} if json is None else {json: _json("presets", _rows(chosen))}
    write_all(texts, shown="" if json == STDOUT else _drawn(chosen, named=name is not None))
    if json not in (None, STDOUT):
        note(f"json    {json}", quiet)


def _settings(given: list[str] | None) -> dict[str, str]:
    from offpol_diag.errors import UsageError
    from offpol_diag.presets.tuning import SETTINGS

    split = [part.partition("=") for text in given or () for part in options.names(text)]
    for key, sign, value in split:
        if not key.strip() or not value.strip():
            raise UsageError(f'--set "{key}{sign}{value}" sets nothing', SETTINGS)
    return {key.strip(): value.strip() for key, _, value in split}


def _tuned(found: tuple[Preset, ...], settings: dict[str, str], name: str | None) -> dict[str, Preset]:
    from offpol_diag.errors import UsageError
    from offpol_diag.presets.tuning import tuned

    if settings and name is None:
        raise UsageError(
            "--set changes a preset; none is named", "say which: offpol-diag presets NAME --set …"
        )
    return {preset.name: tuned(preset, settings) for preset in found}


def _sayable(chosen: dict[str, Preset], trainer: str, quiet: bool) -> dict[str, Preset]:
    from offpol_diag.trainers import sayable, trainer_named

    name = trainer_named(trainer)
    note(f"what {name} can say; `offpol-diag presets NAME --for {name}` prints it, ready to paste", quiet)
    return {key: preset for key, preset in chosen.items() if sayable(preset, (name,))}


def _drawn(chosen: dict[str, Preset], named: bool) -> str:
    from offpol_diag.presets.formulas import catalogue_section, preset_section

    found = [preset_section(one) for one in chosen.values()] if named else [catalogue_section(chosen)]
    return drawn(found)


def _print_configs(chosen: dict[str, Preset], trainer: str, json: Any, quiet: bool) -> None:
    """Print presets as a trainer's configuration; all are translated before any is printed."""
    from offpol_diag.trainers import config_for

    configs = [config_for(preset, trainer) for preset in chosen.values()]
    text = printable_lines("\n".join(config.text() for config in configs))
    found = {} if json is None else {json: _json("configs", [_config(one) for one in configs])}
    write_all({STDOUT: text} | found)
    if json not in (None, STDOUT):
        note(f"json    {json}", quiet)


def _config(config: Config) -> dict[str, Any]:
    from dataclasses import asdict

    said = {**asdict(config), "text": config.text()}
    for snippet in said["snippets"]:
        del snippet["age"]
    return said


def _rows(presets: Mapping[str, Preset]) -> dict[str, Any]:
    from dataclasses import asdict

    return {name: asdict(preset) for name, preset in presets.items()}


def _json(what: str, rows: object) -> str:
    import json

    return printable_json(json.dumps({"format": 1, what: rows}, indent=1, ensure_ascii=False)) + "\n"
