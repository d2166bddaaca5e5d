"""The catalogue: the presets that ship, and a user's own file of the same form.

A file is TOML, one table per preset. The grammar is read off the dataclasses of `presets.py`: a field is a
key, and its type says what may stand there. What a type cannot say is the dataclass's own `slips`.
"""

from __future__ import annotations

import json
import math
import re
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, get_args, get_type_hints

from offpol_diag.errors import PresetError, UsageError, did_you_mean
from offpol_diag.presets import Clip, Policy, Preset, Reject, Veto, Weight

LOGS = (
    "verl-2025-10",
    "verl-2025-11",
    "verl-2026-01",
    "verl-2026-03",
    "trl",
    "ms-swift",
    "openrlhf",
    "nemo-rl",
    "slime",
    "slime-mis",
    "areal",
    "prime-rl",
    "skyrl",
    "roll",
    "open-instruct",
)
"""Whose names and definitions the crosswalk knows."""

ALL = "all"
FORM = "a preset begins with its name alone in brackets: [name]"
BUILT_IN = "presets.toml"
NAME = re.compile(r"[A-Za-z0-9_.+-]+")
BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
GRAMMAR = "its form is that of offpol_diag/presets.toml; or see: offpol-diag presets NAME --json -"
UNBOUNDED = frozenset({"safety", "dual", "low", "high"})
"""Keys where `inf` means "no bound": TOML has no null, and leaving the key out means its default."""


# ---------------------------------------------------------------- the catalogue


class Catalogue(Mapping[str, Preset]):
    """Presets by name, in the order of their files.

    A preset is also found by an alias, in any case, and with `-` for `_`.

    Args:
        presets: the rows, names and aliases unique.
        replaced: names of built-in rows, or aliases of them, that a user's file took over.
    """

    def __init__(self, presets: tuple[Preset, ...], replaced: tuple[str, ...] = ()) -> None:
        self._rows = {preset.name: preset for preset in presets}
        self._found = {plain(word): preset for preset in presets for word in words(preset)}
        self._replaced = replaced

    def __getitem__(self, name: str) -> Preset:
        return self._found[plain(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def replaced(self) -> tuple[str, ...]:
        """The built-in names and aliases that mean something else because the user's file says so."""
        return self._replaced

    def resolve(self, spec: str) -> tuple[Preset, ...]:
        """The presets of a comma-separated list, each once, in the order asked for; `all` is every one.

        Raises:
            UsageError: a name is unknown, or the list is empty.
        """
        asked = [word.strip() for word in spec.split(",") if word.strip()]
        if not asked:
            raise UsageError("no preset is named", "name some, separated by commas, or say all")
        found = (preset for word in asked for preset in self._expand(word))
        return tuple({preset.name: preset for preset in found}.values())

    def _expand(self, word: str) -> tuple[Preset, ...]:
        if plain(word) == ALL:
            return tuple(self.values())
        if word not in self:
            hint = did_you_mean(plain(word), sorted(self._found))
            raise UsageError(f'unknown preset "{word}"', hint or "`offpol-diag presets` lists them")
        return (self[word],)


def plain(name: str) -> str:
    """A name as it is compared: without case, `-` and `_` the same."""
    return name.casefold().replace("-", "_")


def words(preset: Preset) -> tuple[str, ...]:
    """Every word that finds the preset."""
    return (preset.name, *preset.aliases)


def load(path: Path | None = None) -> Catalogue:
    """The built-in presets, and a user's over them.

    A user's row replaces the built-in row of the same name, whole; a name or alias of the user's that is only
    an alias of a built-in row is taken from that row.

    Raises:
        PresetError: the file cannot be read or has a slip in it.
    """
    shipped = _presets(BUILT_IN, resources.files("offpol_diag").joinpath(BUILT_IN).read_bytes())
    return _overlay(shipped, _presets(str(path), _bytes(path)), str(path)) if path else Catalogue(shipped)


def _overlay(shipped: tuple[Preset, ...], own: tuple[Preset, ...], file: str) -> Catalogue:
    mine = {plain(preset.name): preset for preset in own}
    _refuse_hidden({plain(row.name) for row in shipped} - set(mine), own, file)
    taken = {plain(word) for preset in own for word in words(preset)}
    merged = {plain(row.name): mine.get(plain(row.name)) or _without(row, taken) for row in shipped} | mine
    gone = tuple(word for row in shipped for word in words(row) if plain(word) in taken)
    return Catalogue(tuple(merged.values()), gone)


def _refuse_hidden(names: set[str], own: tuple[Preset, ...], file: str) -> None:
    for preset in own:
        for alias in preset.aliases:
            if plain(alias) in names:
                Spot(file, preset.name, "aliases").fail(f'"{alias}" is the name of a built-in preset')


def _without(preset: Preset, taken: set[str]) -> Preset:
    return replace(preset, aliases=tuple(alias for alias in preset.aliases if plain(alias) not in taken))


# ---------------------------------------------------------------- one file


@dataclass(frozen=True)
class Spot:
    """Where in a preset file something stands: what every complaint begins with."""

    file: str
    table: str | None = None
    key: str = ""

    def __str__(self) -> str:
        if self.table is None:
            return self.file
        header = self.table if BARE_KEY.fullmatch(self.table) else _shown(self.table)
        return f"{self.file}: [{header}] {self.key}".rstrip()

    def at(self, key: str) -> Spot:
        """The same table, a key further in."""
        return replace(self, key=f"{self.key}.{key}" if self.key else key)

    def fail(self, problem: str, hint: str = "") -> NoReturn:
        """Say what is wrong here."""
        raise PresetError(f"{self}: {problem}", hint or GRAMMAR)

    def refuse(self, value: object, rule: str, hint: str = "") -> NoReturn:
        """Say which value stands here, and the rule it breaks."""
        raise PresetError(f"{self} = {_shown(value)}; {rule}", hint or GRAMMAR)


def _shown(value: object) -> str:
    text = repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        Spot(str(path)).fail("no such file")
    except OSError as error:
        Spot(str(path)).fail(f"cannot be read ({error.strerror})")


def _presets(file: str, data: bytes) -> tuple[Preset, ...]:
    presets = tuple(_preset(file, name, table) for name, table in _tables(Spot(file), data).items())
    _refuse_clash(presets, file)
    return presets


def _tables(at: Spot, data: bytes) -> dict[str, Any]:
    try:
        tables = tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        at.fail(f"not UTF-8 (byte {error.start})")
    except (ValueError, RecursionError) as error:  # an integer too long, arrays too deep: no TOMLDecodeError
        at.fail(f"not TOML: {error}")
    return tables or at.fail("holds no preset", FORM)


def _preset(file: str, name: str, table: object) -> Preset:
    at = Spot(file, name)
    if not isinstance(table, dict):
        at.refuse(table, "a preset is a table", FORM)
    preset = Preset(name, **{"summary": f"from {file}", **_values(Preset, table, at)})
    for word in words(preset):
        if plain(word) == ALL or not NAME.fullmatch(word):
            at.fail(f'"{word}" cannot be a name: letters, digits and _ . + - make one, and {ALL} is taken')
    return preset


def _refuse_clash(presets: tuple[Preset, ...], file: str) -> None:
    owner: dict[str, str] = {}
    for preset in presets:
        for word in words(preset):
            if plain(word) in owner:
                Spot(file, preset.name).fail(f'"{word}" already finds [{owner[plain(word)]}]')
            owner[plain(word)] = preset.name


# ---------------------------------------------------------------- values, by type

Reader = Callable[[Any, Spot], object]
Part = Weight | Reject | Veto | Clip


def _values(kind: type, table: object, at: Spot) -> dict[str, Any]:
    """A table's values as arguments for `kind`."""
    if not isinstance(table, dict):
        at.refuse(table, f"it must be a table of {', '.join(_readers(kind))}")
    return {key: _reader(kind, key, value, at)(value, at.at(key)) for key, value in table.items()}


def _reader(kind: type, key: str, value: object, at: Spot) -> Reader:
    known = _readers(kind)
    if key not in known:
        quoted = f'a name with a dot in it is quoted: ["{at.table}.{key}"]' if isinstance(value, dict) else ""
        hint = did_you_mean(key, list(known)) or quoted
        at.at(key).fail(f"no such key; the keys are {', '.join(known)}", hint)
    return known[key]


@cache
def _readers(kind: type) -> dict[str, Reader]:
    hints = get_type_hints(kind)
    return {
        field.name: READERS.get(hints[field.name]) or partial(_word, get_args(hints[field.name]))
        for field in fields(kind)
        if field.name != "name"  # the table's header is the name
    }


def _word(allowed: tuple[str, ...], value: object, at: Spot) -> object:
    if value not in allowed:
        hint = did_you_mean(value, list(allowed)) if isinstance(value, str) else ""
        at.refuse(value, f"it must be one of {', '.join(allowed)}", hint)
    return value


def _flag(value: object, at: Spot) -> object:
    return value if isinstance(value, bool) else at.refuse(value, "it must be true or false")


def _text(value: object, at: Spot) -> object:
    return value if isinstance(value, str) else at.refuse(value, "it must be a string")


def _number(value: object, at: Spot) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        at.refuse(value, "it must be a number")
    if value == math.inf and at.key.rpartition(".")[2] in UNBOUNDED:
        return None
    if not abs(value) <= sys.float_info.max:  # also false for nan
        at.refuse(value, "it must be finite")
    return float(value)


def _texts(value: object, at: Spot) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        at.refuse(value, "it must be an array of strings")
    return tuple(value)


def _part(kind: type[Part], value: Any, at: Spot) -> Part:
    part = kind(**_values(kind, value, at))
    for key, rule in part.slips():
        at.at(key).refuse(value.get(key, getattr(part, key)), rule) if key else at.fail(rule)
    return part


def _rules(value: object, at: Spot) -> tuple[Part, ...]:
    if isinstance(value, list):
        return tuple(_part(Reject, item, replace(at, key=f"{at.key}[{i}]")) for i, item in enumerate(value))
    return (_part(Reject, value, at),)


READERS: dict[object, Reader] = {
    bool: _flag,
    str: _text,
    str | None: partial(_word, LOGS),  # `logs`, the only one
    float | None: _number,
    tuple[str, ...]: _texts,
    Weight | None: partial(_part, Weight),
    Veto | None: partial(_part, Veto),
    Clip: partial(_part, Clip),
    Policy | None: partial(_word, get_args(Policy)),
    tuple[Reject, ...]: _rules,
}
"""A field's type → how its value is read; a Literal's words are the ones allowed."""


# ---------------------------------------------------------------- one preset, tuned

PLACE = re.compile(r"(?P<part>[a-z]+)(?:\[(?P<index>\d+)\])?(?:\.(?P<key>[a-z_]+))?")
SETTINGS = "write them like weight.upper=3, reject[0].lower=0.99, veto.lower=1e-5 or clip.high=0.28"


def tuned(preset: Preset, settings: Mapping[str, str], file: str = "--set") -> Preset:
    """The preset with some of its values changed: thresholds mostly, but any key of a preset's table.

    Args:
        preset: what is changed.
        settings: `part.key` (weight, reject, veto, clip) or `key` → the value as it would stand in a preset
            file; text needs no quotes. `reject` is every rule, `reject[0]` the first.
        file: what a complaint calls the place where the settings stand.

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


Place = tuple[str, int | None]  # a field of Preset, and which rule of it


def _by_part(settings: Mapping[str, str], at: Spot) -> dict[Place, dict[str, str]]:
    """Changes by the part they are of: bounds that move together are checked together."""
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
        return replace(preset, **_scalars(name, index, changes, at))
    if "" in changes:
        at.at(name).fail(f"it is a table of {', '.join(_readers(KINDS[name]))}", SETTINGS)
    held = getattr(preset, name)
    if name != "reject" and index is not None:
        at.at(f"{name}[{index}]").fail("only reject has more than one", SETTINGS)
    if name != "reject":
        return replace(preset, **{name: _with(held, changes, at.at(name))})
    if index is not None and index >= len(held):
        at.at(f"reject[{index}]").fail(f"the preset has {len(held)} rules", SETTINGS)
    if not held:
        _with(None, changes, at.at(name))
    rules = list(held)
    for i in range(len(held)) if index is None else (index,):
        rules[i] = _with(held[i], changes, at.at(f"reject[{i}]"))
    return replace(preset, reject=tuple(rules))


KINDS: dict[str, Any] = {"weight": Weight, "reject": Reject, "veto": Veto, "clip": Clip}


def _scalars(name: str, index: int | None, changes: dict[str, str], at: Spot) -> dict[str, Any]:
    if index is not None or set(changes) != {""}:
        known = [*KINDS, *(key for key in _readers(Preset) if key not in KINDS)]
        at.at(name).fail("the preset has no such part", did_you_mean(name, known) or SETTINGS)
    value = _value(changes[""])
    return {name: _reader(Preset, name, value, at)(value, at.at(name))}


def _with(part: Any, changes: dict[str, str], at: Spot) -> Any:
    if part is None:
        at.fail("the preset has no such part, and there is nothing to change", GRAMMAR)
    values = _values(type(part), {key: _value(text) for key, text in changes.items()}, at)
    made = replace(part, **values)
    for key, rule in made.slips():
        at.at(key).refuse(getattr(made, key), rule) if key else at.fail(rule)
    return made


def _value(text: str) -> Any:
    """As TOML would read it; what it cannot read is text."""
    try:
        return tomllib.loads(f"x = {text}")["x"] if "\n" not in text else text
    except tomllib.TOMLDecodeError:
        return text.strip()
