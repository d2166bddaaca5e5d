"""The catalogue of presets: the built-in ones, and those of a user's file of the same form, by name."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from offpol_diag.errors import PresetError, UsageError, did_you_mean
from offpol_diag.files import MOST_TOML, toml
from offpol_diag.files import read as read_whole
from offpol_diag.presets import Policy, Preset
from offpol_diag.presets.grammar import MARK, changed, parse_settings, read, wrong

ALL = "all"
FORM = "a preset begins with its name alone in brackets: [name]"
HINT = "its form is that of offpol_diag/presets/presets.toml"
BUILT_IN = "presets.toml"
NAME = re.compile(r"[A-Za-z0-9_.+-]+")
MEANINGS = (
    "in verl it is seq_mis (sequences outside a band of ∏r rejected), in TRL trl_sequence_mask (∏r above a "
    "bound weighs 0), in slime slime_mis (tokens outside a band rejected, with a veto), and in OpenRLHF "
    "seq_mask_tis (sequences outside a band of the geometric mean; its name until 2026-02)"
)
"""What the bare name "mis" means to each trainer."""
FAMILIES: Mapping[Policy, tuple[str, ...]] = {
    "old": ("token_is", "token_icepop", "seq_is", "seq_mis", "geo_rs"),
    "current": (
        *("bypass_pg_token_is", "bypass_pg_token_icepop", "pure_is"),
        *("bypass_ppo_clip_geo_rs", "bypass_ppo_clip_k3_rs"),
    ),
}
"""Numerator of the main drift → the preset that is recommended by default, then those shown beside it."""


@dataclass(frozen=True, eq=False)
class Catalogue(Mapping[str, Preset]):
    """Presets by name, in the order of their files.

    Lookup also finds aliases and names with thresholds (`token_is@3`), ignores case, and treats `-` and `_`
    as equal.

    Attributes:
        rows: the presets by name; names and aliases are unique.
        aliases: further names → the name of what each stands for, with or without thresholds.
        default: names of the presets that are evaluated where none are named.
    """

    rows: Mapping[str, Preset]
    aliases: Mapping[str, str]
    default: tuple[str, ...]

    @cached_property
    def _targets(self) -> dict[str, str]:
        """Plain name or alias → the name of a row, with or without thresholds."""
        own = {plain(word): row.name for row in self.rows.values() for word in (row.name, *row.aliases)}
        return {plain(alias): target for alias, target in self.aliases.items()} | own

    def __getitem__(self, name: str) -> Preset:
        word, mark, text = name.partition(MARK)
        target, target_mark, target_text = self._targets[plain(word)].partition(MARK)
        changes = (parse_settings(target_text) if target_mark else {}) | (
            parse_settings(text) if mark else {}
        )
        found = changed(self.rows[target], changes) if changes else self.rows[target]
        also = (alias for alias, meant in self.aliases.items() if meant == found.name)
        return replace(found, aliases=(*found.aliases, *also))

    def __iter__(self) -> Iterator[str]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def resolve(self, asked: str | Preset | Iterable[str | Preset]) -> tuple[Preset, ...]:
        """Resolve names to presets, in that order, each once.

        Args:
            asked: names in one text, separated by commas, where `all` is every preset; a preset; or several
                texts and presets.

        Raises:
            UsageError: a name is unknown, or a text names none.
            PresetError: what stands after the `@` of a name is wrong.
        """
        found: list[Preset] = []
        for one in (asked,) if isinstance(asked, str | Preset) else asked:
            if isinstance(one, Preset):
                found.append(one)
            elif words := [word.strip() for word in one.split(",") if word.strip()]:
                for word in words:
                    found += self.values() if plain(word) == ALL else [self._find(word)]
            else:
                raise UsageError("no preset is named", "name some, separated by commas, or say all")
        return tuple(dict.fromkeys(found))

    def _find(self, name: str) -> Preset:
        word = plain(name.partition(MARK)[0])
        if word in self._targets:
            return self[name]
        if word == "mis":
            raise UsageError(f'"{name}" is another method in each trainer', MEANINGS)
        hint = did_you_mean(word, sorted(self._targets), quote='"')
        raise UsageError(f'unknown preset "{name}"', hint or "`offpol-diag presets` lists them")

    def usual(self, columns: Collection[str], trainers: Sequence[str] = ()) -> tuple[Preset, ...]:
        """Return the presets evaluated where none are named, with `trainers`, those of the dump's trainer.

        Where `columns`, the dump's, lack `old_log_probs`, those of π_θ stand in place of those that need it.
        """
        found = [self[name] for name in (*self.default, *trainers)]
        if "old_log_probs" not in columns and "current_log_probs" in columns:
            found = [one for one in found if "old_log_probs" not in one.lacking(columns)]
            found += [one for one in self.values() if one.policy == "current"]
        return tuple({one.name: one for one in found}.values())


def plain(name: str) -> str:
    """Normalise a name for comparison: lower case, `-` as `_`."""
    return name.strip().casefold().replace("-", "_")


def load(path: Path | None = None) -> Catalogue:
    """Load the built-in presets, overlaid with a user's file.

    A user's preset replaces the built-in preset of the same name entirely, with its aliases; a name or alias
    of the user's that is only an alias of a built-in preset is taken from that one.

    Raises:
        PresetError: the file cannot be read or has a mistake in it.
    """
    shipped = _shipped()
    if path is None:
        return shipped
    own = {plain(row.name): row for row in _presets(str(path), _tables(path))}
    taken = {plain(word) for row in own.values() for word in (row.name, *row.aliases)}
    if clash := sorted(taken & (shipped.rows.keys() - own.keys())):
        raise PresetError(f'{path}: "{clash[0]}" is the name of a built-in preset', "choose another alias")
    aliases = {
        alias: target
        for alias, target in shipped.aliases.items()
        if alias not in taken and target.partition(MARK)[0] not in own
    }
    rows = {row.name: row for row in {**shipped.rows, **own}.values()}
    default = dict.fromkeys((*shipped.default, *(row.name for row in own.values())))
    return Catalogue(rows, aliases, tuple(default))


@cache
def _shipped() -> Catalogue:
    """Load the built-in presets once; beside them stand `default`, and `aliases` by what they mean."""
    tables = _tables(Path(__file__).with_name(BUILT_IN))
    default, further = tables.pop("default"), tables.pop("aliases")
    aliases = {alias: target for target, names in further.items() for alias in names}
    return Catalogue({row.name: row for row in _presets(BUILT_IN, tables)}, aliases, tuple(default))


def _tables(path: Path) -> dict[str, Any]:
    try:
        return toml(read_whole(path, MOST_TOML).decode("utf-8-sig"))
    except OSError as error:
        raise PresetError(f"{path}: cannot be read ({error.strerror})", "check the path") from error
    except ValueError as error:  # also of what is no UTF-8
        raise PresetError(f"{path}: not TOML: {error}", HINT) from error


def _presets(file: str, tables: Mapping[str, Any]) -> list[Preset]:
    """Read the presets of a file, each a table, and check that every name and alias finds one."""
    if not tables:
        raise PresetError(f"{file}: holds no preset", FORM)
    found: list[Preset] = []
    owner: dict[str, str] = {}  # plain name or alias → the preset that has it
    for name, table in tables.items():
        place = f"{file}: [{name if NAME.fullmatch(name) else json.dumps(name)}]"
        if not isinstance(table, dict):
            raise wrong(place, table, "a preset is a table", FORM)
        try:
            found.append(read(Preset, {"summary": f"from {file}"} | table, name=name))
        except PresetError as error:
            raise PresetError(f"{place} {error.message}", error.hint or HINT) from error
        for word in (name, *found[-1].aliases):
            if plain(word) == ALL or not NAME.fullmatch(word):
                rule = f"letters, digits and _ . + - make one, and {ALL} is taken"
                raise PresetError(f'{place}: "{word}" cannot be a name: {rule}', FORM)
            if plain(word) in owner:
                raise PresetError(f'{place}: "{word}" already finds [{owner[plain(word)]}]', HINT)
            owner[plain(word)] = name
    return found
