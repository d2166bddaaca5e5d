"""A form of dump: its row in the table, and one sequence read from it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from offpol_diag.errors import DumpError
from offpol_diag.forms.files import Head
from offpol_diag.readers.columns import MASK, SEQUENCE, STEP
from offpol_diag.writer import PROMPT_IDS

Array = npt.NDArray[Any]
Covers = Literal["response", "sequence", "padded"]
Read = Callable[[Sequence[Path], Mapping[str, str]], Iterator["Row"]]
"""Reads files, with the user's `--columns` (role → name): a row per sequence."""


@dataclass(eq=False)
class Row:
    """One sequence: columns per token, and further ones, by canonical name; `names` are those in the file.

    `where` is file and place in it, for messages; `unread` are fields of the file that nobody reads.
    """

    tokens: dict[str, Array]
    scalars: dict[str, Any]
    where: str
    names: dict[str, str] = field(default_factory=dict)
    unread: Sequence[str] = ()


def cut(row: Row, covers: Covers) -> Row | None:
    """Return the tokens of a response, without prompt and padding; None if there is none.

    Columns of a whole sequence end together, and its mask says where the response is.
    """
    sizes = {name: len(values) for name, values in row.tokens.items()}
    least = min(sizes.values(), default=0)
    if covers != "sequence" and len({*sizes.values()}) > 1:
        short, long = (pick(sizes, key=lambda name: sizes[name]) for pick in (min, max))
        what = f"{row.where}: {short!r} has {least} values, and {long!r} {sizes[long]}"
        raise DumpError(what, "write one value per response token in each column")
    tokens = {name: values[len(values) - least :] for name, values in row.tokens.items()}
    if covers != "response" and MASK in tokens:
        counted = np.flatnonzero(tokens[MASK])
        begin, last = (int(counted[0]), int(counted[-1]) + 1) if len(counted) else (0, 0)
        end = least if covers == "padded" and last else last
        tokens = {name: values[begin:end] for name, values in tokens.items()}
    return replace(row, tokens=tokens) if any(map(len, tokens.values())) or not row.tokens else None


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
        name: a word for it.
        trainer: who writes it; empty for anyone.
        files: what its files are called, for people.
        holds: what they hold of a dump, for people.
        detect: whether a file is of this form.
        covers: what the lists of a row cover: the response, the whole sequence, or the response with padding
            before it; the mask then says where the response is.
        choose: its files → those to read, and notes on those that are left out.
        source: repository, commit and file where this was read.
    """

    name: str
    trainer: str
    files: str
    holds: str
    detect: Callable[[Head], bool]
    read: Read
    covers: Covers = "response"
    choose: Callable[[Sequence[Path]], tuple[list[Path], list[str]]] | None = None
    source: str = ""


def having(kind: str, *fields: str) -> Callable[[Head], bool]:
    """Return a test for files of a kind with some fields."""
    return lambda head: head.kind == kind and head.fields.issuperset(fields)
