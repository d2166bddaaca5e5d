"""What must be equal before two tallies may be merged: presets in full, columns, seed, replicates.

Presets are written as the tables of a preset file, `null` standing for "none", and read by its grammar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from typing import Any

from pydantic import Field

from offpol_diag import catalogue, correction
from offpol_diag.grammar import UNBOUNDED
from offpol_diag.presets import Preset
from offpol_diag.summary import Model
from offpol_diag.tally import Study

MOST_REPLICATES = 4096
MOST_PRESETS = 4096


class Settings(Model):
    """How pieces were analysed.

    Attributes:
        presets: name → table, all that were asked for, in order.
        columns: our name → the column it was read from.
        made: columns that were made of others: advantages, where they were made of rewards.
        group_by: extra location axes.
        seed: of the bootstrap.
        replicates: of the bootstrap.
    """

    presets: dict[str, dict[str, Any]] = Field(max_length=MOST_PRESETS)
    columns: dict[str, str]
    made: list[str]
    group_by: list[str]
    seed: int = Field(ge=0, lt=2**63)
    replicates: int = Field(ge=0, le=MOST_REPLICATES)

    @classmethod
    def of(cls, study: Study, asked: Sequence[Preset], columns: Mapping[str, str]) -> Settings:
        """Of an analysis: its study, the presets asked for, and which column is which."""
        return cls(
            presets={preset.name: table(preset) for preset in asked},
            columns=dict(columns),
            made=sorted(study.columns - set(columns)),
            group_by=list(study.group_by),
            seed=study.seed,
            replicates=study.replicates,
        )

    def asked(self, file: str) -> tuple[Preset, ...]:
        """The presets that were asked for; `file` is what errors call the file.

        Raises:
            PresetError: a table that is no preset.
        """
        return tuple(catalogue.preset(file, name, _toml(one)) for name, one in self.presets.items())

    def study(self, file: str) -> Study:
        """The study they make.

        Raises:
            PresetError: a table that is no preset.
        """
        columns = frozenset(self.columns) | set(self.made)
        able = tuple(one for one in self.asked(file) if not correction.needs(one, set(columns)))
        return Study(able, columns, tuple(self.group_by), self.seed, self.replicates)

    @cached_property
    def flat(self) -> dict[str, object]:
        """Every setting under a name that says where it stands; presets key by key."""
        whole: dict[str, object] = {
            "seed": self.seed,
            "replicates": self.replicates,
            "group_by": self.group_by,
            "columns made": self.made,
            "order of the presets": list(self.presets),
        }
        columns = {f"column {ours}": theirs for ours, theirs in self.columns.items()}
        presets = {f"preset {name}": one for name, one in self.presets.items()}
        return whole | columns | dict(_leaves(presets, ""))


def table(preset: Preset) -> dict[str, Any]:
    """A preset as the table of a preset file, every key said."""
    found: dict[str, Any] = json.loads(json.dumps(asdict(preset)))
    del found["name"]
    return found


def _toml(value: Any) -> Any:
    """JSON's null as the grammar has it: `inf` for a bound that may be absent, else the key left out."""
    if value is None:
        return math.inf
    if isinstance(value, dict):
        kept = ((k, v) for k, v in value.items() if v is not None or k in UNBOUNDED)
        return {k: _toml(v) for k, v in kept}
    return [_toml(one) for one in value] if isinstance(value, list) else value


def _leaves(value: object, name: str) -> Iterator[tuple[str, object]]:
    """Tables taken apart; lists (rules of rejection) by number."""
    if isinstance(value, list) and any(isinstance(one, dict) for one in value):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from _leaves(inner, f"{name}.{key}".lstrip("."))


_ABSENT = object()


def differences(one: Settings, two: Settings) -> list[str]:
    """Which settings differ, and how, the presets that only one of them has first."""
    names = dict.fromkeys((*one.presets, *two.presets))
    alone = [
        f"preset {name} is in only one of them"
        for name in names
        if (name in one.presets) != (name in two.presets)
    ]
    if alone:
        return alone
    every = dict.fromkeys((*one.flat, *two.flat))
    pairs = ((name, one.flat.get(name, _ABSENT), two.flat.get(name, _ABSENT)) for name in every)
    return [f"{name}: {_said(a)} and {_said(b)}" for name, a, b in pairs if a != b]


def _said(value: object) -> str:
    if value is _ABSENT:
        return "nothing"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else text[:57] + "..."
