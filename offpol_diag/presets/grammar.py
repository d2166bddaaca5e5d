"""The grammar of a preset file, derived from the dataclasses of `presets`: reading and checking values.

Each field is a key, and its type determines the allowed values. Rules that a type cannot express are in the
dataclass's own `slips`.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any, NoReturn, TypeVar, get_args, get_type_hints

from offpol_diag.errors import PresetError, did_you_mean
from offpol_diag.presets import Clip, Reject, Veto, Weight

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
    "miles",
    "miles-mis",
    "areal",
    "prime-rl",
    "skyrl",
)
"""Trainers whose logged numbers are known, with generations: what `trainers/logged.py` has functions for."""

BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
GRAMMAR = "its form is that of offpol_diag/presets.toml; or see: offpol-diag presets NAME --json -"
UNBOUNDED = frozenset({"safety", "dual", "low", "high"})
"""Keys where `inf` means "no bound": TOML has no null, and leaving the key out means its default."""


@dataclass(frozen=True)
class Spot:
    """A place in a preset file, or in a name such as token_is@3, with which error messages begin."""

    file: str
    table: str | None = None
    key: str = ""
    hint: str = GRAMMAR

    def __str__(self) -> str:
        if self.table is None:
            return f"{self.file}: {self.key}" if self.key else self.file
        header = self.table if BARE_KEY.fullmatch(self.table) else shown(self.table)
        return f"{self.file}: [{header}] {self.key}".rstrip()

    def at(self, key: str) -> Spot:
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


Reader = Callable[[Any, Spot], Any]
Part = TypeVar("Part", Weight, Reject, Veto, Clip)


def values(kind: type, table: object, at: Spot) -> dict[str, Any]:
    """Read a table's values as arguments for `kind`."""
    if not isinstance(table, dict):
        at.refuse(table, f"it must be a table of {', '.join(readers(kind))}")
    return {key: reader(kind, key, value, at)(value, at.at(key)) for key, value in table.items()}


def reader(kind: type, key: str, value: object, at: Spot) -> Reader:
    """Return the function that reads the value of a key.

    Raises:
        PresetError: there is no such key.
    """
    known = readers(kind)
    if key not in known:
        quoted = f'a name with a dot in it is quoted: ["{at.table}.{key}"]' if isinstance(value, dict) else ""
        hint = did_you_mean(key, list(known)) or quoted
        at.at(key).fail(f"no such key; the keys are {', '.join(known)}", hint)
    return known[key]


@cache
def readers(kind: type) -> dict[str, Reader]:
    """Return key → the function that reads it, for a table of this kind; its header is the name."""
    hints = get_type_hints(kind)
    keys = (field.name for field in fields(kind) if field.name != "name")
    return {key: READERS.get(hints[key]) or partial(_word, get_args(hints[key])) for key in keys}


def checked(part: Part, table: Mapping[str, Any], at: Spot) -> Part:
    """Return a part of a preset whose values make sense together; `table` shows them as they were written."""
    for key, rule in part.slips():
        at.at(key).refuse(table.get(key, getattr(part, key)), rule) if key else at.fail(rule)
    return part


def _word(allowed: tuple[str, ...], value: object, at: Spot) -> object:
    if value not in allowed:
        hint = did_you_mean(value, list(allowed)) if isinstance(value, str) else ""
        at.refuse(value, f"it must be one of {', '.join(allowed)}", hint)
    return value


def _typed(kind: type, words: str, value: object, at: Spot) -> object:
    return value if isinstance(value, kind) else at.refuse(value, f"it must be {words}")


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


def _part(kind: Any, value: Any, at: Spot) -> Any:
    return checked(kind(**values(kind, value, at)), value, at)


def _rules(value: object, at: Spot) -> tuple[Reject, ...]:
    if isinstance(value, list):
        return tuple(_part(Reject, item, replace(at, key=f"{at.key}[{i}]")) for i, item in enumerate(value))
    return (_part(Reject, value, at),)


READERS: dict[object, Reader] = {
    bool: partial(_typed, bool, "true or false"),
    str: partial(_typed, str, "a string"),
    str | None: partial(_word, LOGS),  # only `logs` has this type
    float: _number,
    float | None: _number,
    tuple[str, ...]: _texts,
    Weight | None: partial(_part, Weight),
    Veto | None: partial(_part, Veto),
    Clip: partial(_part, Clip),
    tuple[Reject, ...]: _rules,
}
"""Type of a field → the function that reads its value; a Literal allows only its own words."""
