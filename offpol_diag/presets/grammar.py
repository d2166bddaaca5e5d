"""The grammar of preset files, and of what stands beside a name: `token_is@3`, `seq_mis@veto.lower=1e-4`.

A field of the classes in `preset.py` is a key; its type says which values it takes, and the class's own
`problems` what a type cannot. After an `@` stand parts, separated by ":": one is KEY=VALUE (weight.upper,
reject.lower of every rule, reject[1].lower, veto.lower, clip.high, policy), or thresholds joined by "..", in
the order of the preset's `places`. They are put into the preset's table, which is read like a file's.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from itertools import groupby
from types import NoneType
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from offpol_diag.errors import PresetError, did_you_mean
from offpol_diag.files import toml
from offpol_diag.presets.preset import Clip, Preset, Reject, Veto, Weight

MARK = "@"
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
RULE = re.compile(r"reject(?:\[(\d{1,4})\])?")
UNBOUNDED = frozenset({"safety", "dual", "low", "high"})
"""Keys where `inf` means "no bound": TOML has no null, and leaving the key out means its default."""
FACTORS = ("ratio", "mult_prob_error")
"""Statistics whose bounds are factors; of the others a band around 0 is [-C, C]."""
FILE = "its form is that of offpol_diag/presets/presets.toml; or see: offpol-diag presets NAME --json -"
KEYS = "write keys like token_is@weight.upper=3, seq_mis@veto.lower=1e-4 or geo_rs@policy=current"
Part = TypeVar("Part", Weight, Reject, Veto, Clip, Preset)


@dataclass(frozen=True)
class Place:
    """A place in a preset file, or in a name such as token_is@3, with which error messages begin.

    Attributes:
        start: `mine.toml: [mine] ` or `token_is@3: `; the key follows it.
        key: the key, with those of the tables that it is in: `weight.upper`.
        hint: what to do where an error has no better hint.
    """

    start: str
    key: str = ""
    hint: str = FILE

    @classmethod
    def of(cls, file: str, table: str) -> Place:
        """Return the place of a table in a file."""
        return cls(f"{file}: [{table if BARE_KEY.fullmatch(table) else shown(table)}] ")

    def __str__(self) -> str:
        return f"{self.start}{self.key}".rstrip(" :")

    def at(self, key: str) -> Place:
        """Return the place of a key further in."""
        return replace(self, key=f"{self.key}.{key}" if self.key else key)

    def fail(self, problem: str, hint: str = "") -> NoReturn:
        """Raise an error about this place."""
        raise PresetError(f"{self}: {problem}", hint or self.hint)

    def refuse(self, value: object, rule: str, hint: str = "") -> NoReturn:
        """Raise an error that shows the value at this place and the rule it breaks."""
        raise PresetError(f"{self} = {shown(value)}; {rule}", hint or self.hint)


def shown(value: object) -> str:
    """Format a value for a message."""
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


# ---------------------------------------------------------------- tables


def read(kind: type[Part], table: object, at: Place, **given: Any) -> Part:
    """Read a table as a preset, or as one of its parts.

    Args:
        kind: what it is read as.
        table: keys and values, as TOML has them.
        at: where it stands.
        given: fields that are no keys.

    Raises:
        PresetError: a key that there is not, a value that it does not take, or values that make no sense
            together.
    """
    known = keys(kind)  # type: ignore[arg-type]
    if not isinstance(table, dict):
        at.refuse(table, f"it must be a table of {', '.join(known)}")
    for key, value in table.items():
        if key not in known:
            dotted = f'a name with a dot in it is quoted: ["{given.get("name")}.{key}"]'
            hint = did_you_mean(key, list(known)) or (dotted if isinstance(value, dict) else "")
            at.at(key).fail(f"no such key; the keys are {', '.join(known)}", hint)
    found = kind(**given, **{key: _value(known[key], value, at.at(key)) for key, value in table.items()})
    for key, rule in found.problems():
        value = table.get(key, getattr(found, key, None))
        if key and not isinstance(value, dict):
            at.at(key).refuse(value, rule)
        (at.at(key) if key else at).fail(rule)
    return found


@cache
def keys(kind: Any) -> Mapping[str, Any]:
    """Return key → the type of its values, for a table of this kind; its header is the name."""
    hints = get_type_hints(kind)
    return {one.name: hints[one.name] for one in fields(kind) if one.name != "name"}


def _value(hint: Any, value: Any, at: Place) -> Any:
    """Read the value of a key by the type of its field; None is the key left out, or `inf`."""
    kind = next((one for one in get_args(hint) if NoneType in get_args(hint)), hint)
    if kind in (Weight, Veto, Clip):
        return read(kind, value, at)
    if kind == tuple[Reject, ...]:
        if not isinstance(value, list):
            return (read(Reject, value, at),)
        return tuple(read(Reject, one, replace(at, key=f"{at.key}[{i}]")) for i, one in enumerate(value))
    if kind == tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            at.refuse(value, "it must be an array of strings")
        return tuple(value)
    if get_origin(kind) is Literal:
        if value not in (allowed := get_args(kind)):
            hint = did_you_mean(value, list(allowed)) if isinstance(value, str) else ""
            at.refuse(value, f"it must be one of {', '.join(allowed)}", hint)
        return value
    if kind is float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            at.refuse(value, "it must be a number")
        if value == math.inf and at.key.rpartition(".")[2] in UNBOUNDED:
            return None
        if not abs(value) <= sys.float_info.max:  # also false for nan
            at.refuse(value, "it must be finite")
        return float(value)
    if not isinstance(value, kind):
        at.refuse(value, "it must be true or false" if kind is bool else "it must be a string")
    return value


def table_of(preset: Preset) -> dict[str, Any]:
    """Return the table that is read as this preset."""

    def table(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
        found = {key: math.inf if x is None and key in UNBOUNDED else x for key, x in pairs if key != "name"}
        return {key: list(x) if isinstance(x, tuple) else x for key, x in found.items() if x is not None}

    return asdict(preset, dict_factory=table)


# ---------------------------------------------------------------- beside a name


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
    at = Place(f"{name}: ", hint=KEYS)
    if "" in changes:
        at = replace(at, hint=f"write {ways(preset)}; inf is no bound" if preset.places else KEYS)
        by_key = _by_position(preset, changes[""].split(".."), at) | by_key
    said = ", ".join(f"{key} = {value}" for key, value in by_key.items())
    table = table_of(preset) | {"summary": f"{preset.summary} (with {said})", "aliases": []}
    for path, text in by_key.items():
        _put(table, path, text, at)
    if isinstance(table["reject"], list):
        table["reject"] = [rule for rule in table["reject"] if not _freed(rule)]
    if _freed(table.get("veto")):
        del table["veto"]
    if _freed(table.get("weight")):
        table["weight"]["action"] = "none"
    return read(Preset, table, at, name=name)


def _put(table: dict[str, Any], path: str, text: str, at: Place) -> None:
    """Put one setting into a preset's table. Its value is TOML, or else text; None is a bound that goes."""
    part, _, key = path.partition(".")
    try:
        value = toml(f"x = {text}")["x"] if "\n" not in text else text
    except ValueError:
        value = text
    if text == "inf" and key in ("lower", "upper"):
        value = None
    held, rule = table.get(part), RULE.fullmatch(part)
    if not key:
        table[part] = value
    elif rule is None:
        table[part] = (held if isinstance(held, dict) else {}) | {key: value}
    elif isinstance(rules := table["reject"], list):
        index = len(rules) if rule[1] is None else int(rule[1])
        if index > len(rules):
            at.at(part).fail(f"the preset has {len(rules)} rules")
        if index == len(rules) and (rule[1] or not rules):
            rules.append({})
        for one in rules if rule[1] is None else [rules[index]]:
            one[key] = value


def _freed(part: Any) -> bool:
    """Take bounds that go out of a part; return whether they were its last."""
    if not isinstance(part, dict):
        return False
    gone = [key for key, value in part.items() if value is None]
    for key in gone:
        del part[key]
    return bool(gone) and not {"lower", "upper"} & part.keys()


def _by_position(preset: Preset, thresholds: list[str], at: Place) -> dict[str, str]:
    """Return the settings that thresholds by position are: one for each place, or for each band."""
    places, bands = preset.places, _bands(preset)
    if len(thresholds) == len(places):
        return dict(zip(places, thresholds, strict=True))
    if len(thresholds) != len(bands):
        at.fail(f"{preset.name} takes {len(places) or 'no'} threshold{'s' * (len(places) != 1)} by position")
    found: dict[str, str] = {}
    for band, text in zip(bands, thresholds, strict=True):
        if len(band) == 1 or text == "inf":
            found |= dict.fromkeys(band, text)
            continue
        factor = not band[0].startswith("reject") or preset.reject[0].statistic in FACTORS
        bound = _number(text)
        if not bound > (1 if factor else 0):
            least = "above 1, for [1/C, C]" if factor else "above 0, for [-C, C]"
            at.fail(f"one number C for a band must be {least}")
        found |= zip(band, (_shortest(repr(1 / bound if factor else -bound)), text), strict=True)
    return found


def _bands(preset: Preset) -> list[tuple[str, ...]]:
    """Return the places of thresholds, a lower and an upper one of a part together; clip has no bands."""
    parts = groupby(preset.places, lambda place: place if "clip" in place else place.partition(".")[0])
    return [tuple(places) for _, places in parts]


def ways(preset: Preset) -> str:
    """Say which thresholds may stand beside a name: `ipo@reject.lower..reject.upper or ipo@C`."""
    name = preset.name.partition(MARK)[0]
    with_bands = tuple(band[0] if len(band) == 1 else "C" for band in _bands(preset))
    found = dict.fromkeys(f"{name}{MARK}{'..'.join(way)}" for way in (preset.places, with_bands) if way)
    return " or ".join(found)


def _shortest(text: str) -> str:
    """Return a number in its shortest spelling, and other text as it is."""
    number = _number(text)
    return repr(number).removesuffix(".0") if math.isfinite(number) else text.strip()


def _number(text: str) -> float:
    """Return a text as a number; NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan
