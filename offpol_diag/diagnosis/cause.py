"""A cause of a mismatch: what it looks like, how it is found, confirmed and fixed, and how it is made.

A cause is a subclass in `causes/`, listed in `registry.CAUSES`; how each trainer's settings confirm it, and
public threads, are in data/causes.toml. What `doctor` answers and explains, docs/causes.md, the tests and
benchmarks/doctor.py are made of these.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from inspect import cleandoc
from typing import ClassVar, Literal, NamedTuple

import numpy as np

from offpol_diag.diagnosis.profile import Profile
from offpol_diag.diagnosis.rows import Flags, Rows

TRAINERS = {"verl": "verl", "trl": "TRL", "slime": "slime", "nemo-rl": "NeMo-RL"}
"""Key in data/causes.toml → what the trainer is called."""
DATA = tomllib.loads(files("offpol_diag").joinpath("data", "causes.toml").read_text(encoding="utf-8"))
"""Id of a cause → how each trainer's settings confirm it, and public threads."""


class Thread(NamedTuple):
    """Public threads about one event: `owner/repository#number`, what was seen, and what it came from."""

    at: list[str]
    symptom: str
    cause: str = ""


HALFWAY = 0.5
"""Share of the way to the level of the other tokens that a repair has to go: of six misleading answers to
dumps that no rule had been written on, five named a repair that changed nothing."""


@dataclass(frozen=True)
class Found:
    """A cause that was found in some rows.

    Attributes:
        cause: which.
        evidence: the numbers that show it, in words.
        rows: the rows in which it was found, T tokens of S sequences.
        tokens: flags of the tokens concerned, [T].
        repaired: the rows with the fault undone, or without the tokens concerned; None if no repair is known.
        exact: whether the evidence is a count and needs no interval.
        approximate: whether the repair is approximate.
        words: what is filled into the texts of the cause; `after` replaces its own, `where` is the group of
            sequences that has the fault (`host = b`).
    """

    cause: Cause
    evidence: str
    rows: Rows
    tokens: Flags
    repaired: Rows | None = None
    exact: bool = False
    approximate: bool = False
    words: Mapping[str, str] = field(default_factory=dict)

    @property
    def sequences(self) -> Flags:
        """Flags of the sequences concerned, [S]."""
        return self.rows.sum(self.tokens) > 0

    @property
    def helps(self) -> bool:
        """Whether the repair brings the tokens concerned at least halfway to the K3 of the others.

        Where it concerns every token, it must fall by half. What is counted needs no repair to be true.
        """
        if self.repaired is None or self.exact or not self.repaired.tokens:
            return True
        others = self.rows.k3[~self.tokens]
        before, target = float(self.rows.k3.mean()), float(others.mean()) if len(others) else 0.0
        return float(self.repaired.k3.mean()) <= HALFWAY * (before + target)


class Cause:
    """One cause: the docstring has its title, and what it looks like in the numbers.

    Its texts have fields in braces that `Found.words` fills in.

    Attributes:
        id: the name, as in `doctor --explain ID`.
        kind: the numbers are logged wrongly, tokens were sampled otherwise than logged, the two sides compute
            another model or hold other weights (all of these are bugs), or the mismatch is honest.
        needs: columns without which it is not looked for.
        speaks_for, speaks_against: names in `candidates.evidence` of what speaks for and against it where no
            cause is established, the strongest first.
        sentence: the statement about a dump, a clause.
        evidence: the numbers that show it, a clause; empty where `look` words it.
        confirm: the measurement that confirms it.
        fix: what to change.
        after: the repair that the numbers after the fix assume.
        statement: what would be wrong, a sentence, where nothing is established and it may fit.
        apart: cause that looks like it → what distinguishes the two.
        blanks: field of `confirm` or `fix` → what stands for it where no dump is at hand.
    """

    id: ClassVar[str]
    kind: ClassVar[Literal["logged", "sampled", "model", "weights", "honest"]] = "logged"
    needs: ClassVar[tuple[str, ...]] = ()
    speaks_for: ClassVar[tuple[str, ...]] = ()
    speaks_against: ClassVar[tuple[str, ...]] = ()
    sentence: ClassVar[str]
    evidence: ClassVar[str] = ""
    confirm: ClassVar[str] = ""
    fix: ClassVar[str] = ""
    after: ClassVar[str] = ""
    statement: ClassVar[str] = ""
    apart: ClassVar[Mapping[str, str]] = {}
    blanks: ClassVar[Mapping[str, str]] = {}

    @property
    def title(self) -> str:
        """What is wrong, in a clause."""
        return cleandoc(type(self).__doc__ or "").partition("\n")[0].rstrip(".")

    @property
    def looks(self) -> str:
        """What it looks like in the numbers."""
        return " ".join(cleandoc(type(self).__doc__ or "").partition("\n")[2].split())

    @property
    def verdict(self) -> Literal["bug", "honest"]:
        """Whether it is a bug, or an honest mismatch."""
        return "honest" if self.kind == "honest" else "bug"

    @property
    def settings(self) -> Mapping[str, str]:
        """Trainer → how its own settings and columns confirm it."""
        return {name: text for name, text in DATA[self.id].items() if name in TRAINERS}

    @property
    def threads(self) -> tuple[Thread, ...]:
        """Public threads in which it turned out to be the cause."""
        return tuple(Thread(**one) for one in DATA[self.id].get("threads", ()))

    def look(self, rows: Rows) -> Found | None:
        """Look for it in rows that are repaired of what was found before; None if it is not there."""
        return None

    def look_alone(self, rows: Rows) -> Found | None:
        """Look for what counts only where nothing else is found; of a cause in `registry.ALONE`."""
        return None

    def fits(self, profile: Profile) -> bool:
        """Return whether it may be the cause where none is established; of one in `registry.CANDIDATES`."""
        return False

    def make(self, rows: Rows, rng: np.random.Generator) -> Rows | None:
        """Make the fault in healthy rows, for tests and benchmarks; None if that needs a model."""
        return None
