"""Candidate corrections for the recommendation, each with the built-in preset that implements it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache

from offpol_diag.presets import Policy, Preset, catalogue
from offpol_diag.presets.tuning import tuned


@dataclass(frozen=True)
class Candidate:
    """A method at a threshold; its bounds are on r = π_train/π_rollout.

    Attributes:
        name: short and stable key.
        title: the method in words.
        decoupled: built-in preset where the numerator is π_old.
        bypass: built-in preset where the numerator is π_θ.
        threshold: threshold as printed.
        settings: place in the preset → value, by the grammar of a preset file.
    """

    name: str
    title: str
    decoupled: str
    bypass: str
    threshold: str | None = None
    settings: tuple[tuple[str, str], ...] = ()

    def preset_name(self, policy: Policy) -> str:
        """Return the built-in preset for dumps whose numerator is `policy`."""
        return self.decoupled if policy == "old" else self.bypass

    def changes(self, policy: Policy) -> dict[str, str]:
        """Return the settings that differ from the preset as shipped."""
        row = _shipped()[self.preset_name(policy)]
        return {key: value for key, value in self.settings if _changed(row, key, value)}

    def preset(self, policy: Policy) -> Preset:
        """Build the preset with its settings, marked as a candidate."""
        row = _shipped()[self.preset_name(policy)]
        return replace(tuned(row, dict(self.settings)), name=MARK + self.name)


def _changed(row: Preset, key: str, value: str) -> bool:
    same = {"name": row.name, "summary": row.summary, "aliases": row.aliases}
    return replace(tuned(row, {key: value}), **same) != row


@cache
def _shipped() -> Mapping[str, Preset]:
    return catalogue.load()


MARK = "candidate:"
"""Prefix of the names of candidates among presets; no preset's name has a colon."""

NOTHING = Candidate("none", "no correction", "recompute", "ppo_is")
DEFAULT = Candidate(
    "token_tis_2.0", "token TIS at 2.0", "token_is", "bypass_pg_token_is", "2.0", (("weight.upper", "2.0"),)
)
ICEPOP = Candidate(
    "token_icepop_0.5_5.0",
    "token IcePop 0.5–5.0",
    "token_icepop",
    "bypass_pg_token_icepop",
    "0.5–5.0",
    (("weight.upper", "5.0"), ("weight.lower", "0.5")),
)
CANDIDATES = (NOTHING, DEFAULT, ICEPOP)


@cache
def presets(policy: Policy) -> tuple[Preset, ...]:
    """Return the candidates for dumps whose numerator is `policy`, as presets."""
    return tuple(one.preset(policy) for one in CANDIDATES)
