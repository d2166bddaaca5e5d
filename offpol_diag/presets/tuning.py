"""Presets at other thresholds: `token_is@3`, `seq_mis@2..0.4..2.5`, `geo_rs@policy=current:veto.lower=1e-5`.

After the `@` stand parts, separated by ":". One is KEY=VALUE (weight.upper, reject.lower of every rule,
reject[1].lower, veto.lower, clip.high, policy), or thresholds joined by "..", in the order of the preset's
`at`. One number C for a lower and an upper bound is [1/C, C], of a signed statistic [-C, C]; inf is no bound.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from offpol_diag.errors import did_you_mean
from offpol_diag.files import toml
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight
from offpol_diag.presets.grammar import Spot, checked, reader, readers, values

MARK = "@"
PLACE = re.compile(r"(?P<part>[a-z]+)(?:\[(?P<index>\d{1,4})\])?(?:\.(?P<key>[a-z_]+))?")
SETTINGS = "write keys like token_is@weight.upper=3, seq_mis@veto.lower=1e-4 or geo_rs@policy=current"
FACTORS = ("ratio", "mult_prob_error")
"""Statistics whose bounds are factors; of the others a band around 0 is [-C, C]."""


@dataclass(frozen=True)
class Changes:
    """What stands after the `@` of a name.

    Attributes:
        thresholds: by position, as text.
        settings: key → value, as text.
    """

    thresholds: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, text: str) -> Changes:
        """Parse the text after the `@`."""
        thresholds: tuple[str, ...] = ()
        settings: dict[str, str] = {}
        for part in text.split(":"):
            key, sign, value = (word.strip() for word in part.partition("="))
            if sign:
                settings[key] = _canonical(value)
            else:
                thresholds = tuple(_canonical(word) for word in key.split(".."))
        return cls(thresholds, settings)

    def over(self, before: Changes) -> Changes:
        """Return changes that are made on top of others."""
        return Changes(self.thresholds or before.thresholds, {**before.settings, **self.settings})

    def __str__(self) -> str:
        by_key = (f"{key}={value}" for key, value in self.settings.items())
        return ":".join(filter(None, ("..".join(self.thresholds), *by_key)))


def tuned(preset: Preset, changes: Changes | Mapping[str, str]) -> Preset:
    """Return a preset with changed values, under the name that says them: `token_is@3`.

    Args:
        preset: preset to change.
        changes: thresholds and settings; a mapping is settings alone: `part.key` (weight, reject, veto,
            clip) or `key` → the value as it would stand in a preset file; text needs no quotes. A weight,
            rule or veto is made where there is none.

    Raises:
        PresetError: no such part or key, a value that a preset file could not hold, or values that together
            break a rule of the grammar.
    """
    if not isinstance(changes, Changes):
        changes = Changes((), {key: _canonical(value) for key, value in changes.items()})
    if not changes.thresholds and not changes.settings:
        return preset
    name = f"{preset.name}{MARK}{changes}"
    at = Spot(name, hint=_positions(preset) if changes.thresholds else SETTINGS)
    found = preset
    settings = {**_by_position(preset, changes.thresholds, at), **changes.settings}
    for part, some in _by_part(settings, at).items():
        found = _changed(found, part, some, at)
    for key, rule in found.slips():
        at.at(key).fail(rule)
    summary = f"{preset.summary} (with {', '.join(f'{key} = {value}' for key, value in settings.items())})"
    return replace(found, name=name, summary=summary, aliases=())


def command(name: str, settings: Mapping[str, str]) -> str:
    """Return the command that shows a preset with these settings."""
    word, _, text = name.partition(MARK)
    changes = Changes((), settings).over(Changes.of(text)) if text else Changes((), settings)
    said = f"{word}{MARK}{changes}" if text or settings else name
    return f"offpol-diag presets {shlex.quote(said)}"


# ---------------------------------------------------------------- thresholds by position


def _by_position(preset: Preset, thresholds: Sequence[str], at: Spot) -> dict[str, str]:
    """Return the settings that thresholds by position are."""
    if not thresholds:
        return {}
    bands = _bands(preset)
    if len(thresholds) == len(preset.at):
        return dict(zip(preset.at, thresholds, strict=True))
    if len(thresholds) != len(bands):
        many = len(preset.at)
        at.fail(f"{preset.name} takes {many or 'no'} threshold{'s' * (many != 1)} by position")
    found: dict[str, str] = {}
    for places, text in zip(bands, thresholds, strict=True):
        found |= {places[0]: text} if len(places) == 1 else _band(preset, places, text, at)
    return found


def _bands(preset: Preset) -> list[tuple[str, ...]]:
    """Return the places of thresholds, a lower and an upper one of the same part together."""
    found: list[tuple[str, ...]] = []
    for place in preset.at:
        part, _, side = place.partition(".")
        if side == "upper" and found and found[-1] == (f"{part}.lower",):
            found[-1] += (place,)
        else:
            found.append((place,))
    return found


def _band(preset: Preset, places: tuple[str, ...], text: str, at: Spot) -> dict[str, str]:
    try:
        bound = float(text)
    except ValueError:
        bound = math.nan
    factor = not places[0].startswith("reject") or preset.reject[0].statistic in FACTORS
    if not bound > (1 if factor else 0):
        least = "above 1, for [1/C, C]" if factor else "above 0, for [-C, C]"
        at.fail(f"one number C for a band must be {least}")
    if math.isinf(bound):
        return dict.fromkeys(places, "inf")
    return dict(zip(places, (_canonical(repr(1 / bound if factor else -bound)), text), strict=True))


def _positions(preset: Preset) -> str:
    """Say what may stand beside a name."""
    if not preset.at:
        return SETTINGS
    ways = [f"{preset.name}{MARK}{'..'.join(preset.at)}"]
    bands = _bands(preset)
    if len(bands) < len(preset.at):
        ways.append(f"{preset.name}{MARK}{'..'.join(each[0] if len(each) == 1 else 'C' for each in bands)}")
    return f"write {' or '.join(ways)}; inf is no bound"


def _canonical(text: str) -> str:
    """Return a number in its shortest spelling, and other text as it is."""
    text = text.strip()
    try:
        number = float(text)
    except ValueError:
        return text
    return text if math.isinf(number) and text != "inf" else repr(number).removesuffix(".0")


# ---------------------------------------------------------------- settings by key

KINDS: dict[str, Any] = {"weight": Weight, "reject": Reject, "veto": Veto, "clip": Clip}
Place = tuple[str, int | None]  # (field of Preset, index of the rule)


def _by_part(settings: Mapping[str, str], at: Spot) -> dict[Place, dict[str, str]]:
    """Group changes by part: bounds that change together are checked together."""
    parts: dict[Place, dict[str, str]] = {}
    for path, value in settings.items():
        match = PLACE.fullmatch(path)
        if match is None:
            at.at(path).fail("not a place in a preset")
        index = None if match["index"] is None else int(match["index"])
        parts.setdefault((match["part"], index), {})[match["key"] or ""] = value
    return parts


def _changed(preset: Preset, place: Place, changes: dict[str, str], at: Spot) -> Preset:
    name, index = place
    if name not in KINDS:
        if index is not None or set(changes) != {""}:
            known = [*KINDS, *(key for key in readers(Preset) if key not in KINDS)]
            at.at(name).fail("the preset has no such part", did_you_mean(name, known))
        value = _value(changes[""])
        return replace(preset, **{name: reader(Preset, name, value, at)(value, at.at(name))})
    if "" in changes:
        at.at(name).fail(f"it is a table of {', '.join(readers(KINDS[name]))}")
    if name != "reject":
        if index is not None:
            at.at(f"{name}[{index}]").fail("only reject has more than one")
        return replace(preset, **{name: _with(KINDS[name], getattr(preset, name), changes, at.at(name))})
    held: list[Any] = list(preset.reject)
    if index is not None and index > len(held):
        at.at(f"reject[{index}]").fail(f"the preset has {len(held)} rules")
    if index == len(held) or not held:
        held.append(None)
    for i in range(len(held)) if index is None else (index,):
        held[i] = _with(Reject, held[i], changes, at.at(f"reject[{i}]"))
    return replace(preset, reject=tuple(rule for rule in held if rule))


def _with(kind: Any, part: Any, changes: dict[str, str], at: Spot) -> Any:
    """Return a part with changes, made where there is none; None if no bound is left of a rule or veto."""
    free = {key for key in ("lower", "upper") if kind is not Clip and changes.get(key) == "inf"}
    found = values(kind, {key: _value(text) for key, text in changes.items() if key not in free}, at)
    found |= dict.fromkeys(free)
    part = replace(part, **found) if part else kind(**found)
    if free and part.lower is None and part.upper is None:
        return replace(part, action="none") if kind is Weight else None
    return checked(part, found, at)


def _value(text: str) -> Any:
    """Parse a value as TOML; what is not TOML is text."""
    try:
        return toml(f"x = {text}")["x"] if "\n" not in text else text
    except ValueError:
        return text.strip()
