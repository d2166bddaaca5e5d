"""The grammar of preset files, and of what stands beside a name: `token_is@3`, `seq_mis@veto.lower=1e-4`.

A field of the classes of this package is a key; its type says which values it takes, and the class's own
`problems` what a type cannot. After an `@` stand parts, separated by ":": one is KEY=VALUE (weight.upper,
reject.lower of every rule, reject[1].lower, veto.lower, clip.high, policy), or thresholds joined by "..", in
the order of the preset's `places`. They are put into the preset's table, which is read like a file's.
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
from offpol_diag.presets import Clip, Preset, Reject, Veto, Weight

MARK = "@"
RULE = re.compile(r"reject(?:\[(\d{1,4})\])?")
UNBOUNDED = frozenset({"safety", "dual", "low", "high"})
"""Keys where `inf` means "no bound": TOML has no null, and leaving the key out means its default."""
FACTORS = ("ratio", "mult_prob_error")
"""Statistics whose bounds are factors; of the others a band around 0 is [-C, C]."""
KEYS = "write keys like token_is@weight.upper=3, seq_mis@veto.lower=1e-4 or geo_rs@policy=current"
Part = TypeVar("Part", Weight, Reject, Veto, Clip, Preset)
TYPES = {
    kind: {key: hint for key, hint in get_type_hints(kind).items() if key != "name"}
    for kind in (Weight, Reject, Veto, Clip, Preset)
}
"""Kind of table → key → the type of its values."""


def read(kind: type[Part], table: object, place: str = "", **given: Any) -> Part:
    """Read a table as a preset, or as one of its parts.

    Args:
        kind: what it is read as.
        table: keys and values, as TOML has them; None is no bound, or no part.
        place: the key that it stands under: `reject[0]`; empty for a preset.
        given: fields that are no keys.

    Raises:
        PresetError: a key that there is not, a value that it does not take, or values that make no sense
            together; the message begins with the key.
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
    for key, rule in found.problems():
        value = table.get(key, getattr(found, key, None))
        if key and not isinstance(value, dict):
            raise wrong(within + key, value, rule)
        raise PresetError(f"{key or place}: {rule}")
    return found


def _value(hint: Any, value: Any, place: str) -> Any:
    """Read the value of a key by the type of its field; `inf` is none where TOML has no other word for it."""
    kind = next((one for one in get_args(hint) if NoneType in get_args(hint)), hint)
    if value is None or kind in (Weight, Veto, Clip):
        return value if value is None else read(kind, value, place)
    if kind == tuple[Reject, ...]:
        if not isinstance(value, list):
            return (read(Reject, value, place),)
        return tuple(read(Reject, one, f"{place}[{i}]") for i, one in enumerate(value))
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
        if value not in (words := get_args(kind)):
            hint = did_you_mean(str(value), list(words))
            raise wrong(place, value, f"it must be one of {', '.join(words)}", hint)
    elif not isinstance(value, kind):
        raise wrong(place, value, f"it must be {'true or false' if kind is bool else 'a string'}")
    return value


def wrong(key: str, value: object, rule: str, hint: str = "") -> PresetError:
    """Return the error of a value that breaks a rule; a long value is cut."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return PresetError(f"{key} = {text if len(text) <= 60 else f'{text[:57]}...'}; {rule}", hint)


def settings(text: str) -> dict[str, str]:
    """Parse what stands after an `@`: key → value, as text; thresholds by position have the key ""."""
    found = {}
    for part in text.split(":"):
        key, sign, value = (word.strip() for word in part.partition("="))
        key, value = (key or sign, value) if sign else ("", key)
        found[key] = "..".join(map(_shortest, value.split("..")))
    return found


def named(name: str, changes: Mapping[str, str]) -> str:
    """Return the name that says these settings beside those that it has: `token_is@3:veto.lower=0.0001`."""
    word, mark, text = name.partition(MARK)
    all_of = {"": "", **(settings(text) if mark else {}), **changes}
    parts = [f"{key}={value}" if key else value for key, value in all_of.items()]
    return f"{word}{MARK}{':'.join(filter(None, parts))}" if mark or changes else name


def changed(preset: Preset, changes: Mapping[str, str]) -> Preset:
    """Return a preset with other settings, under the name that says them.

    A weight, rule or veto is made where there is none. A rule or veto whose last bound becomes `inf` goes; a
    weight without bounds is the raw ratio.

    Raises:
        PresetError: no such key, a value that a preset file could not hold, or another number of thresholds.
    """
    name, by_key = named(preset.name, changes), {key: text for key, text in changes.items() if key}
    hint = f"write {ways(preset)}; inf is no bound" if "" in changes and preset.places else KEYS
    try:
        if "" in changes:
            by_key = _by_position(preset, changes[""].split("..")) | by_key
        said = ", ".join(f"{key} = {value}" for key, value in by_key.items())
        table = {key: x for key, x in asdict(preset).items() if key != "name"} | {"aliases": []}
        table |= {"summary": f"{preset.summary} (with {said})", "reject": list(table["reject"])}
        for key in (key for key in by_key if "." in key):
            _put(table, key, by_key[key])
        if "inf" in by_key.values():
            table["reject"] = [rule for rule in table["reject"] if not _freed(rule)]
            table["veto"] = None if _freed(table["veto"]) else table["veto"]
            if _freed(table["weight"]):
                table["weight"]["action"] = "none"
        table |= {key: _parsed(text) for key, text in by_key.items() if "." not in key}
        return read(Preset, table, name=name)
    except PresetError as error:
        raise PresetError(f"{name}: {error.message}", error.hint or hint) from error


def _put(table: dict[str, Any], path: str, text: str) -> None:
    """Put a setting into a part of a preset's table; None is a bound that goes."""
    part, _, key = path.partition(".")
    value = None if text == "inf" and key in ("lower", "upper") else _parsed(text)
    if (rule := RULE.fullmatch(part)) is None:
        table[part] = (held if isinstance(held := table.get(part), dict) else {}) | {key: value}
        return
    rules, index = table["reject"], int(rule[1] or 0)
    if index > len(rules):
        raise PresetError(f"{part}: the preset has {len(rules)} rules")
    if index == len(rules):
        rules.append({})
    for one in [rules[index]] if rule[1] else rules:
        one[key] = value


def _parsed(text: str) -> Any:
    """Return what a text is as a value of TOML, else the text."""
    try:
        return toml(f"x = {text}")["x"] if "\n" not in text else text
    except ValueError:
        return text


def _freed(part: Any) -> bool:
    """Return whether a part in a table has lost its last bound."""
    bounds = [x for key, x in part.items() if key in ("lower", "upper")] if isinstance(part, dict) else []
    return bool(bounds) and all(x is None for x in bounds)


def _by_position(preset: Preset, thresholds: Sequence[str]) -> dict[str, str]:
    """Return the settings that thresholds by position are: one for each place, for each band, or for all."""
    places, bands = preset.places, _bands(preset)
    if len(thresholds) == len(places):
        return dict(zip(places, thresholds, strict=True))
    thresholds = (
        [*thresholds] * len(bands) if len(thresholds) == 1 and _of_one_threshold(preset) else thresholds
    )
    if len(thresholds) != len(bands):
        raise PresetError(f"{preset.name} takes {len(places)} thresholds by position")
    found: dict[str, str] = {}
    for band, text in zip(bands, thresholds, strict=True):
        found |= dict.fromkeys(band, text)
        if len(band) > 1 and text != "inf":
            factor = not band[0].startswith("reject") or preset.reject[0].statistic in FACTORS
            bound = _parsed(text)
            if not isinstance(bound, int | float) or not bound > (1 if factor else 0):
                least = "above 1, for [1/C, C]" if factor else "above 0, for [-C, C]"
                raise PresetError(f"one number C for a band must be {least}")
            found[band[0]] = _shortest(repr(1 / bound if factor else -bound))
    return found


def _bands(preset: Preset) -> list[tuple[str, ...]]:
    """Return the places of thresholds, a lower and an upper one of a part together; clip has no bands."""
    parts = groupby(preset.places, lambda place: place if "clip" in place else place.partition(".")[0])
    return [tuple(places) for _, places in parts]


def _of_one_threshold(preset: Preset) -> bool:
    """Return whether all bands have the same upper bound, as in seq_mis: min(∏r, 2) within [1/2, 2]."""
    parts = {"weight": preset.weight, "reject": next(iter(preset.reject), None), "clip": preset.clip}
    ends = [band[-1].partition(".") for band in _bands(preset)]
    bounds = {getattr(parts.get(part), key, None) for part, _, key in ends}
    return len(ends) > 1 and len(bounds) == 1 and None not in bounds


def ways(preset: Preset) -> str:
    """Return what may stand beside a name: `ipo@reject.lower..reject.upper or ipo@C`."""
    name = preset.name.partition(MARK)[0]
    with_bands = tuple(band[0] if len(band) == 1 else "C" for band in _bands(preset))
    all_ways = (preset.places, with_bands, ("C",) if _of_one_threshold(preset) else ())
    found = dict.fromkeys(f"{name}{MARK}{'..'.join(way)}" for way in all_ways if way)
    return " or ".join(found)


def _shortest(text: str) -> str:
    """Return a number in its shortest spelling, and other text as it is."""
    try:
        return repr(float(text)).removesuffix(".0")
    except ValueError:
        return text.strip()
