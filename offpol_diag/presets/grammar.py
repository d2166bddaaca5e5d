"""The grammar of preset files, and of what stands beside a name: `token_is@3`, `seq_mis@veto.lower=1e-4`.

A field of the classes of this package is a key; its type says which values it takes, and `problems` what a
type cannot. After an `@` stand settings, separated by ":": KEY=VALUE (weight.upper,
reject.lower of every rule, reject[1].lower, veto.lower, clip.high, policy), or thresholds joined by "..", in
the order of the preset's `places`. They are put into the preset's table, which is then read like a file's.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from offpol_diag.errors import PresetError, did_you_mean
from offpol_diag.files import toml
from offpol_diag.presets import BOUNDS, Clip, Preset, Reject, Veto, Weight, problems

MARK = "@"
RULE = re.compile(r"reject(?:\[(\d{1,4})\])?")
UNBOUNDED = frozenset({"safety", "dual", "low", "high"})
"""Keys where `inf` means "no bound": TOML has no null, and leaving the key out means its default."""
FACTORS = ("ratio", "mult_prob_error")
"""Statistics whose bounds are factors, with bands [1/C, C]; of the others a band around 0 is [-C, C]."""
KEYS = "write keys like token_is@weight.upper=3, seq_mis@veto.lower=1e-4 or geo_rs@policy=current"
Part = TypeVar("Part", Weight, Reject, Veto, Clip, Preset)
TYPES = {
    kind: {key: hint for key, hint in get_type_hints(kind).items() if key != "name"}
    for kind in (Weight, Reject, Veto, Clip, Preset)
}
"""Class → key → the type of its values."""


def read(kind: type[Part], table: object, place: str = "", **given: Any) -> Part:
    """Read a table as a preset, or as one of its parts.

    Args:
        kind: what it is read as.
        table: keys and values, as TOML has them; None is no bound, or no part.
        place: the key that it stands under: `reject[0]`; empty for a preset.
        given: fields that are no keys.

    Raises:
        PresetError: an unknown key, a value that it does not take, or values that make no sense together; the
            message begins with the key.
    """
    known = TYPES[kind]
    within = f"{place}." if place else ""
    if not isinstance(table, dict):
        raise wrong(place, table, f"it must be a table of {', '.join(known)}")
    for key in table:
        if key not in known:
            problem = f"{within}{key}: no such key; the keys are {', '.join(known)}"
            raise PresetError(problem, did_you_mean(key, list(known)))
    found = kind(**given, **{key: _value(known[key], x, within + key) for key, x in table.items()})
    for key, rule in problems(found):
        value = table.get(key, getattr(found, key, None))
        if key and not isinstance(value, dict):
            raise wrong(within + key, value, rule)
        raise PresetError(f"{key or place}: {rule}")
    return found


def _value(hint: Any, value: Any, place: str) -> Any:
    """Read the value of a key by the type of its field; `inf` is None where it means "no bound"."""
    kind = get_args(hint)[0] if NoneType in get_args(hint) else hint  # X of `X | None`
    if value is None:
        return None
    if kind in (Weight, Veto, Clip):
        return read(kind, value, place)
    if kind == tuple[Reject, ...]:
        if not isinstance(value, list):
            return (read(Reject, value, place),)
        return tuple(read(Reject, rule, f"{place}[{at}]") for at, rule in enumerate(value))
    if kind is float:
        if value == math.inf and place.rpartition(".")[2] in UNBOUNDED:
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not abs(value) <= sys.float_info.max:  # also false for nan
            raise wrong(place, value, "it must be a finite number")
        return float(value)
    if kind == tuple[str, ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise wrong(place, value, "it must be an array of strings")
        return tuple(value)
    if get_origin(kind) is Literal:
        words = list(get_args(kind))
        if value not in words:
            hint = did_you_mean(str(value), words)
            raise wrong(place, value, f"it must be one of {', '.join(words)}", hint)
    elif not isinstance(value, kind):
        raise wrong(place, value, f"it must be {'true or false' if kind is bool else 'a string'}")
    return value


def wrong(key: str, value: object, rule: str, hint: str = "") -> PresetError:
    """Return the error of a value that breaks a rule; a long value is cut."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return PresetError(f"{key} = {text if len(text) <= 60 else f'{text[:57]}...'}; {rule}", hint)


# ---------------------------------------------------------------- beside a name


def parse_settings(text: str) -> dict[str, str]:
    """Parse what stands after an `@`: key → value, as text; thresholds by position have the key ""."""
    found = {}
    for part in text.split(":"):
        key, sign, value = (word.strip() for word in part.partition("="))
        key, value = (key or sign, value) if sign else ("", key)
        found[key] = "..".join(map(_shortest, value.split("..")))
    return found


def name_with(name: str, changes: Mapping[str, str]) -> str:
    """Return a name with further settings beside those that it has: `token_is@3:veto.lower=0.0001`."""
    word, mark, text = name.partition(MARK)
    every = {"": "", **(parse_settings(text) if mark else {}), **changes}
    parts = [f"{key}={value}" if key else value for key, value in every.items()]
    return f"{word}{MARK}{':'.join(filter(None, parts))}" if mark or changes else name


def changed(preset: Preset, changes: Mapping[str, str]) -> Preset:
    """Return a preset with other settings, under the name that has them.

    A weight, rule or veto is made where there is none; a bound that becomes `inf` is taken away.

    Raises:
        PresetError: no such key, a value that a preset file could not hold, or another number of thresholds.
    """
    name, by_key = name_with(preset.name, changes), {key: text for key, text in changes.items() if key}
    hint = f"write {ways(preset)}; inf is no bound" if "" in changes and preset.places else KEYS
    try:
        if "" in changes:
            by_key = _at_places(preset, changes[""].split("..")) | by_key
        listed = ", ".join(f"{key} = {value}" for key, value in by_key.items())
        table = {key: x for key, x in asdict(preset).items() if key != "name"} | {"aliases": []}
        table |= {"summary": f"{preset.summary} (with {listed})", "reject": list(table["reject"])}
        for key, text in by_key.items():
            if "." in key:
                _set_in_part(table, key, text)
            else:
                table[key] = _from_text(text)
        return read(Preset, table, name=name)
    except PresetError as error:
        raise PresetError(f"{name}: {error.message}", error.hint or hint) from error


def _set_in_part(table: dict[str, Any], path: str, text: str) -> None:
    """Set a key of a part in a preset's table: `veto.lower`, `reject[1].upper`; make the part if need be."""
    part, _, key = path.partition(".")
    value = None if text == "inf" and key in BOUNDS else _from_text(text)
    rule = RULE.fullmatch(part)
    if rule is None:
        there = table.get(part)
        table[part] = (there if isinstance(there, dict) else {}) | {key: value}
        return
    rules, index = table["reject"], int(rule[1] or 0)
    if index > len(rules):
        raise PresetError(f"{part}: the preset has {len(rules)} rules")
    if index == len(rules):
        rules.append({})
    for one in [rules[index]] if rule[1] else rules:
        one[key] = value


def _from_text(text: str) -> Any:
    """Return what a text is as a value of TOML, else the text."""
    try:
        return toml(f"x = {text}")["x"] if "\n" not in text else text
    except ValueError:
        return text


def _at_places(preset: Preset, thresholds: Sequence[str]) -> dict[str, str]:
    """Return the settings that thresholds by position are: one for each place, each band, or all bands."""
    bands = _bands(preset)
    if len(thresholds) == len(preset.places):
        return dict(zip(preset.places, thresholds, strict=True))
    if len(thresholds) == 1 and _share_a_bound(preset):
        thresholds = [*thresholds] * len(bands)
    if len(thresholds) != len(bands):
        raise PresetError(f"{preset.name} takes {len(preset.places)} thresholds by position")
    found: dict[str, str] = {}
    for (lower, *upper), text in zip(bands, thresholds, strict=True):
        found |= dict.fromkeys((lower, *upper), text)
        if upper and text != "inf":
            factor = not lower.startswith("reject") or preset.reject[0].statistic in FACTORS
            bound = _from_text(text)
            if not isinstance(bound, int | float) or not bound > (1 if factor else 0):
                least = "above 1, for [1/C, C]" if factor else "above 0, for [-C, C]"
                raise PresetError(f"one number C for a band must be {least}")
            found[lower] = _shortest(repr(1 / bound if factor else -bound))
    return found


def _bands(preset: Preset) -> list[tuple[str, ...]]:
    """Return the places of thresholds; the lower and the upper one of a part, but of clip, are one band."""
    parts = groupby(preset.places, lambda place: place if "clip" in place else place.partition(".")[0])
    return [tuple(places) for _, places in parts]


def _share_a_bound(preset: Preset) -> bool:
    """Return whether all bands end at the same number, as in seq_mis: min(∏r, 2) within [1/2, 2]."""
    parts = {"weight": preset.weight, "reject": next(iter(preset.reject), None)}
    ends = [band[-1].partition(".") for band in _bands(preset)]
    bounds = {getattr(parts.get(part), key, None) for part, _, key in ends}
    return len(ends) > 1 and len(bounds) == 1 and None not in bounds


def ways(preset: Preset) -> str:
    """Return what may stand beside a name: `ipo@reject.lower..reject.upper or ipo@C`."""
    by_band = [band[0] if len(band) == 1 else "C" for band in _bands(preset)]
    for_all = ["C"] if _share_a_bound(preset) else []
    found = dict.fromkeys("..".join(way) for way in (preset.places, by_band, for_all) if way)
    return " or ".join(f"{preset.name.partition(MARK)[0]}{MARK}{way}" for way in found)


def _shortest(text: str) -> str:
    """Return a number in its shortest spelling, and other text as it is."""
    try:
        return repr(float(text)).removesuffix(".0")
    except ValueError:
        return text.strip()
