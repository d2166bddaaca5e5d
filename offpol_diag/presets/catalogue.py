"""The catalogue of presets: the built-in ones, and a user's file of the same form.

A file is TOML, one table per preset, by the grammar of `grammar.py`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.files import MOST_TOML, read, toml
from offpol_diag.presets import Preset, tuning
from offpol_diag.presets.grammar import Spot, values

ALL = "all"
FORM = "a preset begins with its name alone in brackets: [name]"
BUILT_IN = "presets.toml"
NAME = re.compile(r"[A-Za-z0-9_.+-]+")
MIS = "mis"
MEANINGS = (
    "in verl it is seq_mis (sequences outside a band of ∏r rejected), in TRL trl_sequence_mask (∏r above a "
    "bound weighs 0), in slime slime_mis (tokens outside a band rejected, with a veto), and in OpenRLHF "
    "seq_mask_tis (sequences outside a band of the geometric mean; its name until 2026-02)"
)
"""What the bare name "mis" means to each trainer."""


# ---------------------------------------------------------------- the catalogue


class Catalogue(Mapping[str, Preset]):
    """Presets by name, in the order of their files.

    Lookup also finds aliases and names with thresholds (`token_is@3`), ignores case, and treats `-` and `_`
    as equal.

    Args:
        presets: the rows, names and aliases unique.
        replaced: names and aliases of built-in presets that a user's file redefines.
        aliases: further names → what each stands for, with or without thresholds.
        default: names of the presets that are evaluated where none are named.
    """

    def __init__(
        self,
        presets: tuple[Preset, ...],
        replaced: tuple[str, ...] = (),
        aliases: Mapping[str, str] | None = None,
        default: tuple[str, ...] = (),
    ) -> None:
        self._rows = {preset.name: preset for preset in presets}
        self._found = {plain(word): preset for preset in presets for word in words(preset)}
        self.aliases = {plain(word): target for word, target in (aliases or {}).items()}
        self.replaced = replaced
        self.default = default

    def __getitem__(self, name: str) -> Preset:
        word, mark, text = name.partition(tuning.MARK)
        changes = tuning.Changes.of(text) if mark else tuning.Changes()
        if plain(word) in self.aliases:
            word, mark, text = self.aliases[plain(word)].partition(tuning.MARK)
            changes = changes.over(tuning.Changes.of(text)) if mark else changes
        return tuning.tuned(self._found[plain(word)], changes)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def resolve(self, spec: str) -> tuple[Preset, ...]:
        """Resolve a comma-separated list to presets, each once, in that order; `all` is every one.

        Raises:
            UsageError: a name is unknown, or the list is empty.
            PresetError: what stands after the `@` of a name is wrong.
        """
        asked = [word.strip() for word in spec.split(",") if word.strip()]
        if not asked:
            raise UsageError("no preset is named", "name some, separated by commas, or say all")
        found: dict[str, Preset] = {}
        for word in asked:
            if word not in self and plain(word) != ALL:
                raise self._unknown(word)
            some = self.values() if plain(word) == ALL else (self[word],)
            found |= {preset.name: preset for preset in some}
        return tuple(found.values())

    def _unknown(self, word: str) -> UsageError:
        name = plain(word.partition(tuning.MARK)[0])
        if name == MIS:
            return UsageError(f'"{word}" is another method in each trainer', MEANINGS)
        hint = did_you_mean(name, sorted({*self._found, *self.aliases}), quote='"')
        return UsageError(f'unknown preset "{word}"', hint or "`offpol-diag presets` lists them")

    def usual(self, columns: Collection[str], trainers: Sequence[str] = ()) -> tuple[Preset, ...]:
        """Return the presets that are evaluated where none are named.

        Where `old_log_probs` is missing, those of π_θ stand in place of those that need it.

        Args:
            columns: the columns of the dump.
            trainers: names of further presets, the current defaults of the dump's trainer.
        """
        found = [self[name] for name in (*self.default, *trainers)]
        if "old_log_probs" not in columns and "current_log_probs" in columns:
            found = [one for one in found if "old_log_probs" not in one.lacking(columns)]
            found += [one for one in self.values() if one.policy == "current"]
        return tuple({one.name: one for one in found}.values())


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
    return name.strip().casefold().replace("-", "_")


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
    return (
        _overlay(shipped, _presets(str(path), _tables(str(path), _bytes(path))), str(path))
        if path
        else shipped
    )


@cache
def _shipped() -> Catalogue:
    """Load the built-in presets once; the tables that are none are `default` and `aliases`."""
    tables = _tables(BUILT_IN, resources.files("offpol_diag.presets").joinpath(BUILT_IN).read_bytes())
    default, further = tables.pop("default"), tables.pop("aliases")
    also: dict[str, list[str]] = {}
    for alias, target in further.items():
        also.setdefault(target, []).append(alias)
    rows = (replace(row, aliases=tuple(also.get(row.name, ()))) for row in _presets(BUILT_IN, tables))
    aliases = {alias: target for alias, target in further.items() if tuning.MARK in target}
    return Catalogue(tuple(rows), aliases=aliases, default=tuple(default))


def _overlay(shipped: Catalogue, own: tuple[Preset, ...], file: str) -> Catalogue:
    mine = {plain(preset.name): preset for preset in own}
    hidden = {plain(name) for name in shipped} - set(mine)
    for preset in own:
        for alias in preset.aliases:
            if plain(alias) in hidden:
                Spot(file, preset.name, "aliases").fail(f'"{alias}" is the name of a built-in preset')
    taken = {plain(word) for preset in own for word in words(preset)}
    rows = shipped.values()
    merged = {plain(row.name): mine.get(plain(row.name)) or _without(row, taken) for row in rows} | mine
    aliases = {
        alias: target
        for alias, target in shipped.aliases.items()
        if alias not in taken and target.partition(tuning.MARK)[0] not in mine
    }
    gone = [word for row in rows for word in words(row) if plain(word) in taken]
    gone += [alias for alias in shipped.aliases if alias in taken]
    default = dict.fromkeys((*shipped.default, *(preset.name for preset in own)))
    return Catalogue(tuple(merged.values()), tuple(gone), aliases, tuple(default))


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


def _tables(file: str, data: bytes) -> dict[str, Any]:
    at = Spot(file)
    try:
        return toml(data.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        at.fail(f"not UTF-8 (byte {error.start})")
    except ValueError as error:
        at.fail(f"not TOML: {error}")


def _presets(file: str, tables: Mapping[str, Any]) -> tuple[Preset, ...]:
    if not tables:
        Spot(file).fail("holds no preset", FORM)
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
    for key, rule in found.slips():
        at.at(key).fail(rule)
    for word in words(found):
        if plain(word) == ALL or not NAME.fullmatch(word):
            at.fail(f'"{word}" cannot be a name: letters, digits and _ . + - make one, and {ALL} is taken')
    return found
