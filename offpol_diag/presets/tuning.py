"""Presets with changed values (`--set`), by the grammar of a preset file."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from offpol_diag.errors import did_you_mean
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.presets.grammar import GRAMMAR, Spot, checked, reader, readers, values
from offpol_diag.wholefiles import toml

PLACE = re.compile(r"(?P<part>[a-z]+)(?:\[(?P<index>\d{1,4})\])?(?:\.(?P<key>[a-z_]+))?")
SETTINGS = "write them like weight.upper=3, reject[0].lower=0.99, veto.lower=1e-5 or clip.high=0.28"


def tuned(preset: Preset, settings: Mapping[str, str], file: str = "--set") -> Preset:
    """Change values of a preset: mostly thresholds, but any key of a preset's table.

    Args:
        preset: preset to change.
        settings: `part.key` (weight, reject, veto, clip) or `key` → the value as it would stand in a preset
            file; text needs no quotes. `reject` is every rule, `reject[0]` the first.
        file: name of the settings' source in error messages.

    Raises:
        PresetError: no such part or key, a value that a preset file could not hold, or values that together
            break a rule of the grammar.
    """
    at = Spot(file, preset.name)
    found = preset
    for part, changes in _by_part(settings, at).items():
        found = _changed(found, part, changes, at)
    if not settings:
        return preset
    said = ", ".join(f"{key}={value}" for key, value in settings.items())
    return replace(found, summary=f"{preset.summary} (with {said})")


def command(name: str, settings: Mapping[str, str]) -> str:
    """Return the command that shows a preset with these settings."""
    said = ",".join(f"{key}={value}" for key, value in settings.items())
    return f"offpol-diag presets {shlex.quote(name)}" + (f" --set {shlex.quote(said)}" if said else "")


KINDS: dict[str, Any] = {"weight": Weight, "reject": Reject, "veto": Veto, "clip": Clip}
Place = tuple[str, int | None]  # (field of Preset, index of the rule)


def _by_part(settings: Mapping[str, str], at: Spot) -> dict[Place, dict[str, str]]:
    """Group changes by part: bounds that change together are checked together."""
    parts: dict[Place, dict[str, str]] = {}
    for path, value in settings.items():
        match = PLACE.fullmatch(path)
        if match is None:
            at.at(path).fail("not a place in a preset", SETTINGS)
        index = None if match["index"] is None else int(match["index"])
        parts.setdefault((match["part"], index), {})[match["key"] or ""] = value
    return parts


def _changed(preset: Preset, place: Place, changes: dict[str, str], at: Spot) -> Preset:
    name, index = place
    if name not in KINDS:
        if index is not None or set(changes) != {""}:
            known = [*KINDS, *(key for key in readers(Preset) if key not in KINDS)]
            at.at(name).fail("the preset has no such part", did_you_mean(name, known) or SETTINGS)
        value = _value(changes[""])
        return replace(preset, **{name: reader(Preset, name, value, at)(value, at.at(name))})
    if "" in changes:
        at.at(name).fail(f"it is a table of {', '.join(readers(KINDS[name]))}", SETTINGS)
    held = getattr(preset, name)
    if name != "reject":
        if index is not None:
            at.at(f"{name}[{index}]").fail("only reject has more than one", SETTINGS)
        return replace(preset, **{name: _with(held, changes, at.at(name))})
    if index is not None and index >= len(held):
        at.at(f"reject[{index}]").fail(f"the preset has {len(held)} rules", SETTINGS)
    if not held:
        _with(None, changes, at.at(name))
    rules = list(held)
    for i in range(len(held)) if index is None else (index,):
        rules[i] = _with(held[i], changes, at.at(f"reject[{i}]"))
    return replace(preset, reject=tuple(rules))


def _with(part: Any, changes: dict[str, str], at: Spot) -> Any:
    if part is None:
        at.fail("the preset has no such part, and there is nothing to change", GRAMMAR)
    found = values(type(part), {key: _value(text) for key, text in changes.items()}, at)
    return checked(replace(part, **found), found, at)


def _value(text: str) -> Any:
    """Parse a value as TOML; what is not TOML is text."""
    try:
        return toml(f"x = {text}")["x"] if "\n" not in text else text
    except ValueError:
        return text.strip()
