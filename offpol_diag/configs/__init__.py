"""A preset in a trainer's own syntax, ready to paste.

A translation goes by what a preset does (weight, rules, veto, numerator, loss, clip), never by its name. What
a trainer cannot say is refused; what its own guards make different is a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from offpol_diag.configs.areal import areal
from offpol_diag.configs.config import Config, Snippet
from offpol_diag.configs.fixed import colossalai, torchforge
from offpol_diag.configs.habits import Habits, differences
from offpol_diag.configs.ms_swift import ms_swift
from offpol_diag.configs.nemo_rl import nemo_rl
from offpol_diag.configs.open_instruct import open_instruct
from offpol_diag.configs.openrlhf import openrlhf
from offpol_diag.configs.prime_rl import prime_rl
from offpol_diag.configs.roll import roll
from offpol_diag.configs.skyrl import skyrl
from offpol_diag.configs.slime import miles, slime
from offpol_diag.configs.trl import trl
from offpol_diag.configs.verl import flash_rl, verl
from offpol_diag.errors import ConfigError, UsageError, did_you_mean
from offpol_diag.presets import Preset

__all__ = ["TRAINERS", "Config", "Snippet", "config_for", "sayable", "trainer_named"]

Said = tuple[tuple[Snippet, ...], tuple[str, ...]]


PLAIN = Habits()
Sets = Callable[[Preset, tuple[Snippet, ...]], Habits]


@dataclass(frozen=True)
class Trainer:
    """How a preset is said to a trainer, and what that trainer does whatever is said."""

    translate: Callable[[Preset], Said]
    habits: Habits | Sets = PLAIN

    def habits_of(self, preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
        """What it does with this preset said so."""
        return self.habits if isinstance(self.habits, Habits) else self.habits(preset, snippets)


def _verl(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    """Of the newest version that can say it."""
    if all(one.age[0] for one in snippets):
        return Habits(20.0, denominator="kept")
    return Habits(20.0, rule_at="token", denominator=None if preset.policy == "old" else "all")


def _slime(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    return Habits(20.0) if any(one.file for one in snippets) else Habits()


def _nemo_rl(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    error = any(rule.statistic == "mult_prob_error" for rule in preset.reject)
    return Habits(denominator="kept" if error else "all", overflow=OVERFLOW)


def _areal(preset: Preset, snippets: tuple[Snippet, ...]) -> Habits:
    return Habits(denominator="kept" if any(rule.over == "batch" for rule in preset.reject) else "all")


OVERFLOW = "a ratio that float32 cannot hold counts as 0 here"
TRAINERS: dict[str, Trainer] = {
    "verl": Trainer(verl, _verl),
    "trl": Trainer(trl),
    "ms-swift": Trainer(ms_swift, Habits(20.0, "token", "token", frozenset({"k1"}))),
    "openrlhf": Trainer(openrlhf),
    "nemo-rl": Trainer(nemo_rl, _nemo_rl),
    "slime": Trainer(slime, _slime),
    "miles": Trainer(miles, _slime),
    "areal": Trainer(areal, _areal),
    "prime-rl": Trainer(prime_rl),
    "skyrl": Trainer(skyrl, Habits(20.0, unclamped=frozenset({"prob_diff", "binary_kl"}))),
    "roll": Trainer(roll, Habits(denominator="kept")),
    "open-instruct": Trainer(open_instruct, Habits(10.0, "token", "token")),
    "flash-rl": Trainer(flash_rl),
    "colossalai": Trainer(colossalai),
    "torchforge": Trainer(torchforge),
}
"""Every trainer with a configuration to print, the catalogue's commonest first."""


def config_for(preset: Preset, trainer: str) -> Config:
    """The preset in the trainer's own syntax.

    Raises:
        ConfigError: the trainer cannot say it; the message names the part, the hint who can.
        UsageError: no such trainer.
    """
    name = trainer_named(trainer)
    try:
        return _config(preset, name)
    except ConfigError as error:
        able = ", ".join(sayable(preset))
        hint = f"its config can be printed for {able}" if able else "no trainer's config can say it"
        raise ConfigError(f"{name} cannot say {preset.name}: {error.message}", hint) from error


def sayable(preset: Preset, trainers: Iterable[str] = TRAINERS) -> tuple[str, ...]:
    """The trainers that can say the preset, by trying each."""
    return tuple(name for name in trainers if _can(preset, name))


def trainer_named(name: str) -> str:
    """The trainer as this project spells it; case and `_` for `-` do not matter.

    Raises:
        UsageError: there is none of that name.
    """
    found = name.strip().lower().replace("_", "-")
    if found not in TRAINERS:
        known = list(TRAINERS)
        raise UsageError(
            f'unknown trainer "{name}"; there are {", ".join(known)}',
            did_you_mean(found, known) or "write the preset for one of these",
        )
    return found


def _can(preset: Preset, name: str) -> bool:
    try:
        _config(preset, name)
    except ConfigError:
        return False
    return True


def _config(preset: Preset, name: str) -> Config:
    trainer = TRAINERS[name]
    snippets, remarks = trainer.translate(preset)
    every = (*remarks, *differences(preset, trainer.habits_of(preset, snippets)))
    newest_first = sorted(snippets, key=lambda one: one.age[0])
    shown = (one for i, one in enumerate(newest_first) if not any(_covers(a, one) for a in newest_first[:i]))
    return Config(preset.name, name, tuple(shown), tuple(dict.fromkeys(every)))


def _covers(newer: Snippet, older: Snippet) -> bool:
    """Whether all versions that take the older block take the newer one as well."""
    same = (newer.language, newer.file, newer.title) == (older.language, older.file, older.title)
    return same and newer.age[1] >= older.age[1]
