"""What could be recommended: methods at thresholds, each with the preset that a trainer knows it by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from offpol_diag import catalogue
from offpol_diag.presets import Policy, Preset
from offpol_diag.tuning import tuned

Judges = Literal["nothing", "token", "sequence"]


@dataclass(frozen=True)
class Candidate:
    """A method at a threshold.

    Attributes:
        name: of its row in the report's table and in the JSON.
        title: in words.
        judges: what one weight or one rule of it is about.
        decoupled: the built-in preset where the train side is π_old, changed by `settings`.
        bypass: the built-in preset nearest to it where the train side is π_θ; None: there is none.
        threshold: as it is printed.
        settings: place in the preset → value, by the grammar of a preset file.
        instead: what bounds r in `bypass`, where that preset is only like this method: it takes no settings.
    """

    name: str
    title: str
    judges: Judges
    decoupled: str
    bypass: str | None
    threshold: str | None = None
    settings: tuple[tuple[str, str], ...] = ()
    instead: str | None = None

    def named(self, policy: Policy) -> tuple[str | None, str | None, dict[str, str]]:
        """The built-in preset for such a dump, the threshold as printed and what of the preset is set."""
        if policy == "old":
            return self.decoupled, self.threshold, self._changes(self.decoupled)
        if self.bypass is None or self.instead is not None:
            return self.bypass, self.instead or self.threshold, {}
        return self.bypass, self.threshold, self._changes(self.bypass)

    def _changes(self, name: str) -> dict[str, str]:
        """What is to be set of a preset: not what it has anyway."""
        row = _shipped()[name]
        return {key: value for key, value in self.settings if _changed(row, key, value)}

    def preset(self, policy: Policy) -> Preset:
        """Under the candidate's name, with that train side."""
        row = tuned(_shipped()[self.decoupled], dict(self.settings))
        return replace(row, name=self.name, policy=policy)


def _changed(row: Preset, key: str, value: str) -> bool:
    return replace(tuned(row, {key: value}), summary=row.summary) != row


@cache
def _shipped() -> Mapping[str, Preset]:
    return catalogue.load()


def _tis(high: str) -> Candidate:
    name, title, settings = f"token_tis_{high}", f"token TIS at {high}", (("weight.upper", high),)
    return Candidate(name, title, "token", "token_is", "bypass_ppo_clip", high, settings, "0.8–1.2")


def _icepop(low: str, high: str) -> Candidate:
    name, title = f"token_icepop_{low}_{high}", f"token IcePop {low}–{high}"
    row, bypass = "decoupled_token_icepop", "bypass_pg_token_icepop"
    settings = (("weight.upper", high), ("weight.lower", low))
    return Candidate(name, title, "token", row, bypass, f"{low}–{high}", settings)


NOTHING = Candidate("none", "no correction", "nothing", "recompute", "ppo_is")
DEFAULT = _tis("2.0")
REFERENCE = _tis("5.0")
"""With nearly no bias of its own that a token's weight could take away, and bounded all the same."""

CANDIDATES = (
    NOTHING,
    _tis("1.5"),
    DEFAULT,
    _tis("3.0"),
    REFERENCE,
    _icepop("0.5", "2.0"),
    _icepop("0.5", "5.0"),
    Candidate(
        "token_mask_0.5_2.0",
        "token mask 0.5–2.0",
        "token",
        "verl_2026_01_rs_token_k1",
        None,
        "0.5–2.0",
        (("reject.lower", "0.5"), ("reject.upper", "2.0")),
    ),
    Candidate("seq_tis_2.0", "sequence TIS at 2.0", "sequence", "seq_is", "pure_is", "2.0"),
    Candidate("seq_mis_0.5_2.0", "sequence MIS 0.5–2.0", "sequence", "seq_mis", None, "0.5–2.0"),
    Candidate(
        "geo_rs_0.1%",
        "geometric rejection ±0.1%",
        "sequence",
        "decoupled_geo_rs",
        "bypass_pg_geo_rs",
        "±0.1%",
    ),
    Candidate(
        "geo_rs_1%",
        "geometric rejection ±1%",
        "sequence",
        "decoupled_geo_rs",
        "bypass_pg_geo_rs",
        "0.99–1.01",
        (("reject.lower", "0.99"), ("reject.upper", "1.01")),
    ),
    Candidate(
        "geo_rs_1%_token_tis_2.0",
        "geometric rejection ±1% with token TIS at 2.0",
        "sequence",
        "decoupled_geo_rs_token_tis",
        "bypass_pg_geo_rs_token_tis",
        "0.99–1.01 and 2.0",
        (("reject.lower", "0.99"), ("reject.upper", "1.01")),
    ),
    Candidate(
        "veto_token_tis_2.0",
        "token TIS at 2.0 with a veto at 1e-4",
        "sequence",
        "verl_2025_10_token_truncate_veto",
        None,
        "2.0, veto 1e-4",
    ),
)
"""In the order in which they are printed."""


MARK = "candidate:"
"""Before the names of candidates among presets; no name of a preset has a colon."""


@cache
def weighed(policy: Policy) -> tuple[Preset, ...]:
    """Those that judge no whole sequences, marked: one of them is recommended wherever one is known."""
    usual = (candidate for candidate in CANDIDATES if candidate.judges != "sequence")
    return tuple(replace(one.preset(policy), name=MARK + one.name) for one in usual)


@cache
def presets(policy: Policy) -> tuple[Preset, ...]:
    """All of them as presets with one train side."""
    return tuple(candidate.preset(policy) for candidate in CANDIDATES)
