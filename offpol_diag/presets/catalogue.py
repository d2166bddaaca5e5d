"""The catalogue of presets: the built-in ones, and a user's file of the same form.

A file is TOML, one table per preset, by the grammar of `grammar.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.presets import Preset
from offpol_diag.presets.grammar import Spot, values
from offpol_diag.wholefiles import MOST_TOML, read, toml

ALL = "all"
FORM = "a preset begins with its name alone in brackets: [name]"
BUILT_IN = "presets.toml"
NAME = re.compile(r"[A-Za-z0-9_.+-]+")


# ---------------------------------------------------------------- the catalogue


class Catalogue(Mapping[str, Preset]):
    """Presets by name, in the order of their files.

    Lookup also finds aliases, ignores case, and treats `-` and `_` as equal.

    Args:
        presets: the rows, names and aliases unique.
        replaced: names and aliases of built-in presets that a user's file redefines.
    """

    def __init__(self, presets: tuple[Preset, ...], replaced: tuple[str, ...] = ()) -> None:
        self._rows = {preset.name: preset for preset in presets}
        self._found = {plain(word): preset for preset in presets for word in words(preset)}
        self.replaced = replaced

    def __getitem__(self, name: str) -> Preset:
        return self._found[plain(name)]

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def resolve(self, spec: str) -> tuple[Preset, ...]:
        """Resolve a comma-separated list to presets, each once, in that order; `all` is every one.

        Raises:
            UsageError: a name is unknown, or the list is empty.
        """
        asked = [word.strip() for word in spec.split(",") if word.strip()]
        if not asked:
            raise UsageError("no preset is named", "name some, separated by commas, or say all")
        found: dict[str, Preset] = {}
        for word in asked:
            if word not in self and plain(word) != ALL:
                hint = did_you_mean(plain(word), sorted(self._found), quote='"')
                raise UsageError(f'unknown preset "{word}"', hint or "`offpol-diag presets` lists them")
            some = self.values() if plain(word) == ALL else (self[word],)
            found |= {preset.name: preset for preset in some}
        return tuple(found.values())


def chosen(
    presets: str | Preset | Iterable[Preset | str], known: Catalogue | None = None
) -> tuple[Preset, ...]:
    """Resolve a program's argument to presets: names in one text, or a sequence of presets and names.

    Args:
        presets: the argument.
        known: the catalogue that names are looked up in; None for the built-in one.

    Raises:
        UsageError: a name is unknown, or something else is among them.
    """
    known = load() if known is None else known
    if isinstance(presets, str):
        return known.resolve(presets)
    given: Iterable[object] = (presets,) if isinstance(presets, Preset) else presets
    hint = 'give names as in presets="token_is,seq_mis", or presets of catalogue.load()'
    if not isinstance(given, Iterable):
        raise UsageError(f"presets cannot be {type(presets).__name__}", hint)
    found: list[Preset] = []
    for one in given:
        if not isinstance(one, str | Preset):
            raise UsageError(f"{type(one).__name__} is no preset", hint)
        found += known.resolve(one) if isinstance(one, str) else (one,)
    return tuple(found)


def plain(name: str) -> str:
    """Normalise a name for comparison: lower case, `-` as `_`."""
    return name.casefold().replace("-", "_")


def words(preset: Preset) -> tuple[str, ...]:
    """Return the name and aliases of a preset."""
    return (preset.name, *preset.aliases)


def load(path: Path | None = None) -> Catalogue:
    """Load the built-in presets, overlaid with a user's file.

    A user's preset replaces the built-in preset of the same name entirely; a name or alias of the user's that
    is only an alias of a built-in preset is removed from that one.

    Raises:
        PresetError: the file cannot be read or has a slip in it.
    """
    shipped = _shipped()
    return _overlay(shipped, _presets(str(path), _bytes(path)), str(path)) if path else Catalogue(shipped)


@cache
def _shipped() -> tuple[Preset, ...]:
    """Load the built-in presets once: it takes as long as the analysis of 100,000 tokens."""
    return _presets(BUILT_IN, resources.files("offpol_diag.presets").joinpath(BUILT_IN).read_bytes())


def _overlay(shipped: tuple[Preset, ...], own: tuple[Preset, ...], file: str) -> Catalogue:
    mine = {plain(preset.name): preset for preset in own}
    hidden = {plain(row.name) for row in shipped} - set(mine)
    for preset in own:
        for alias in preset.aliases:
            if plain(alias) in hidden:
                Spot(file, preset.name, "aliases").fail(f'"{alias}" is the name of a built-in preset')
    taken = {plain(word) for preset in own for word in words(preset)}
    merged = {plain(row.name): mine.get(plain(row.name)) or _without(row, taken) for row in shipped} | mine
    gone = tuple(word for row in shipped for word in words(row) if plain(word) in taken)
    return Catalogue(tuple(merged.values()), gone)


def _without(preset: Preset, taken: set[str]) -> Preset:
    return replace(preset, aliases=tuple(alias for alias in preset.aliases if plain(alias) not in taken))


# ---------------------------------------------------------------- one file


def _bytes(path: Path) -> bytes:
    try:
        return read(path, MOST_TOML)
    except FileNotFoundError:
        Spot(str(path)).fail("no such file")
    except OSError as error:
        Spot(str(path)).fail(f"cannot be read ({error.strerror})")


def _presets(file: str, data: bytes) -> tuple[Preset, ...]:
    at = Spot(file)
    try:
        tables = toml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        at.fail(f"not UTF-8 (byte {error.start})")
    except ValueError as error:
        at.fail(f"not TOML: {error}")
    if not tables:
        at.fail("holds no preset", FORM)
    presets = tuple(preset(file, name, table) for name, table in tables.items())
    owner: dict[str, str] = {}
    for one in presets:
        for word in words(one):
            if plain(word) in owner:
                Spot(file, one.name).fail(f'"{word}" already finds [{owner[plain(word)]}]')
            owner[plain(word)] = one.name
    return presets


def preset(file: str, name: str, table: object) -> Preset:
    """Build one preset of a file from its table.

    Raises:
        PresetError: a slip in it.
    """
    at = Spot(file, name)
    if not isinstance(table, dict):
        at.refuse(table, "a preset is a table", FORM)
    found = Preset(name, **{"summary": f"from {file}", **values(Preset, table, at)})
    for word in words(found):
        if plain(word) == ALL or not NAME.fullmatch(word):
            at.fail(f'"{word}" cannot be a name: letters, digits and _ . + - make one, and {ALL} is taken')
    return found
