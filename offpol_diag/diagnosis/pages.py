"""Pages about causes, and public threads: what is known of a cause beyond its row of `causes.CAUSES`.

Both are data: `data/causes/*.toml` has a table per cause, `data/field_cases.toml` a table per thread.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from offpol_diag.diagnosis.causes import CAUSES
from offpol_diag.errors import UsageError, did_you_mean

DATA = Path(__file__).parents[1] / "data"
FILES = ("logged", "sampled", "sync", "model", "honest")
"""Files of `data/causes`, in the order in which causes are listed."""
TRAINERS = {"any": "any trainer", "verl": "verl", "trl": "TRL", "slime": "slime", "nemo-rl": "NeMo-RL"}
"""Key of `Page.confirm` → what it is called."""
KINDS = {"bug": "a bug", "honest": "an honest mismatch"}
"""Kind of a cause → what is said of it."""


@dataclass(frozen=True)
class Page:
    """What is known of a cause.

    Attributes:
        id: the cause.
        title: what is wrong, in a short clause.
        looks: what it looks like in the numbers.
        fix: what to change.
        confirm: how to confirm it: key of `TRAINERS` → sentence.
        alike: cause that looks like it → what tells the two apart.
    """

    id: str
    title: str
    looks: str
    fix: str
    confirm: Mapping[str, str]
    alike: Mapping[str, str]

    @property
    def kind(self) -> str:
        """The kind of the cause, a key of `KINDS`."""
        return CAUSES[self.id].kind

    @property
    def cases(self) -> tuple[Case, ...]:
        """The public threads of this cause."""
        return tuple(one for one in cases() if one.id == self.id)


@dataclass(frozen=True)
class Case:
    """One or several public threads about one event.

    Attributes:
        threads: where it was told: owner/repository#number.
        symptom: what was seen.
        id: the cause.
        cause: what it came from, as the threads say; empty where there is no more than the symptom.
    """

    threads: tuple[str, ...]
    symptom: str
    id: str
    cause: str = ""


@cache
def pages() -> Mapping[str, Page]:
    """Return every page by the id of its cause."""
    found: dict[str, Page] = {}
    for file in FILES:
        table = tomllib.loads((DATA / "causes" / f"{file}.toml").read_text(encoding="utf-8"))
        found |= {name: Page(name, **values) for name, values in table.items()}
    return found


@cache
def cases() -> tuple[Case, ...]:
    """Return every public thread."""
    table = tomllib.loads((DATA / "field_cases.toml").read_text(encoding="utf-8"))
    return tuple(Case(tuple(row.pop("threads")), **row) for row in table["case"])


def page(cause: str) -> Page:
    """Return the page of a cause.

    Raises:
        UsageError: there is none.
    """
    known = pages()
    name = cause.strip().lower().replace("-", "_")
    if name not in known:
        hint = did_you_mean(name, list(known)) or _mentioned(cause.strip().lower())
        every = "`offpol-diag doctor --explain list` lists all"
        raise UsageError(f"there is no cause {cause!r}", f"{hint or every}{f'; {every}' if hint else ''}")
    return known[name]


def _mentioned(word: str) -> str:
    """Return the causes whose pages have a word, as a hint; empty if none has."""
    said = {
        name: " ".join((one.title, one.looks, one.fix, *one.confirm.values())).lower()
        for name, one in pages().items()
    }
    found = [name for name, text in said.items() if len(word) > 2 and word in text]
    return f"it stands in the pages of {', '.join(found[:3])}" if found else ""
