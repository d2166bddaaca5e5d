"""`offpol-diag presets`: the catalogue."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from offpol_diag.cli import options
from offpol_diag.cli.output import STDOUT, check, note, write
from offpol_diag.cli.show import show

if TYPE_CHECKING:
    from collections.abc import Mapping

    from offpol_diag.presets import Preset

Name = Annotated[
    str | None, typer.Argument(metavar="NAME", help="One preset, or several: its exact formulas.")
]


def presets(
    name: Name = None,
    preset_file: options.PresetFile = None,
    json: options.Json = None,
    quiet: options.Quiet = False,
) -> None:
    """The catalogue of corrections; with a NAME its exact formulas, their direction and their source."""
    from offpol_diag.catalogue import load
    from offpol_diag.formulas import catalogue_section, preset_section

    check(json)
    catalogue = load(preset_file)
    chosen = {preset.name: preset for preset in catalogue.resolve(name or "all")}
    if json is not None:
        write(json, _json(chosen))
    if json != STDOUT:
        show([preset_section(one) for one in chosen.values()] if name else [catalogue_section(chosen)])
    if json not in (None, STDOUT):
        note(f"json written to {json}", quiet)


def _json(presets: Mapping[str, Preset]) -> str:
    import json
    from dataclasses import asdict

    rows = {name: asdict(preset) for name, preset in presets.items()}
    return json.dumps({"format": 1, "presets": rows}, indent=1, ensure_ascii=False) + "\n"
