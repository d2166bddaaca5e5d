"""A form of dump: its row in the table, its alignment, one sequence read from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from offpol_diag.errors import DumpError
from offpol_diag.forms.files import Head
from offpol_diag.readers.columns import SEQUENCE, STEP
from offpol_diag.writer import PROMPT_IDS

Array = npt.NDArray[Any]
Span = Literal["response", "full"]
Padding = Literal["none", "left", "right"]
Read = Callable[[Sequence[Path], Mapping[str, str]], Iterator["Row"]]
"""Reads files, with the user's `--columns` (role → name): a row per sequence."""


@dataclass(frozen=True)
class Alignment:
    """Alignment of the lists of a row with its tokens.

    Attributes:
        span: whether the lists cover the response, or the whole sequence with its prompt. In a whole
            sequence shorter lists cover its end, and the mask says which tokens are read.
        shift: the trainer's log-prob at index t belongs to token t + shift of the rollout's.
        padding: at which end rows are padded to one length; masked tokens are cut off there.
    """

    span: Span = "response"
    shift: int = 0
    padding: Padding = "none"

    def __str__(self) -> str:
        padded = {"none": "", "left": ", padded on the left", "right": ", padded on the right"}
        covered = {"response": "response only", "full": "whole sequence"}
        return f"{covered[self.span]}, shift {self.shift}{padded[self.padding]}"


@dataclass(eq=False)
class Row:
    """One sequence: columns per token, and further ones, by canonical name; `names` are those in the file.

    `where` is file and place in it, for messages; `unread` are fields of the file that nobody reads.
    """

    tokens: dict[str, Array]
    scalars: dict[str, Any]
    where: str
    names: dict[str, str] = field(default_factory=dict)
    unread: dict[str, Any] = field(default_factory=dict)


def numbers(value: object, name: str, where: str) -> Array:
    """Return a list of numbers as a 1-D array; null is NaN."""
    try:
        found = np.asarray(value)
        if found.dtype == object:
            found = np.asarray(value, np.float64)  # null becomes NaN
    except (TypeError, ValueError, OverflowError):
        found = np.empty((0, 0))
    if found.ndim == 1 and found.size == 0:
        return np.empty(0, np.float32)
    if found.ndim != 1 or found.dtype.kind not in "fiub":
        hint = "give each token one number, in one flat list"
        raise DumpError(f"{where}: {name!r} is no list of numbers", hint)
    return found


def prompt_ids(tokens: object) -> dict[str, Any]:
    """Return the tokens of a prompt as a column, where they are ids that a dump can hold."""
    found = np.asarray(tokens)
    with np.errstate(invalid="ignore"):
        whole = found.ndim == 1 and found.dtype.kind in "fiu" and (found == found.astype(np.int32)).all()
    return {PROMPT_IDS: found.astype(np.int32)} if whole else {}


def step_in(name: str, pattern: str) -> int | None:
    """Return the training step that a pattern finds in the name of a file, if it is a whole number there."""
    found = re.search(pattern, name)
    return int(found[1]) if found and len(found[1]) < 18 else None


def named(step: int | None, *within: object) -> dict[str, Any]:
    """Return the step, and an id of the sequence made of it and of the place within the step."""
    name = "/".join(str(part) for part in (step, *within) if part is not None)
    return ({SEQUENCE: name} if name else {}) | ({} if step is None else {STEP: step})


@dataclass(frozen=True)
class Form:
    """A form in which dumps are found: a row of `table.FORMS`.

    Attributes:
        name: the word for `--form`.
        trainer: who writes it; empty for anyone.
        files: what its files are called, for people.
        holds: what they hold of a dump, for people.
        detect: whether a file is of this form.
        alignment: as its trainer writes it.
        guess: whether other files could look alike; it is then said that this one was chosen.
        choose: its files → those to read, and notes on those that are left out.
        source: repository, commit and file where this was read.
    """

    name: str
    trainer: str
    files: str
    holds: str
    detect: Callable[[Head], bool]
    read: Read
    alignment: Alignment = Alignment()
    guess: bool = False
    choose: Callable[[Sequence[Path]], tuple[list[Path], list[str]]] | None = None
    source: str = ""


def having(kind: str, *fields: str, named: str = "") -> Callable[[Head], bool]:
    """Return a test for files of a kind with some fields, and with a name that matches a pattern."""
    return lambda head: (
        head.kind == kind and head.fields.issuperset(fields) and bool(re.search(named, head.path.name))
    )
