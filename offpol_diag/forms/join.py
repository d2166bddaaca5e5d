"""Columns of a second file, found by the id of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from offpol_diag.errors import DumpError, UsageError, did_you_mean
from offpol_diag.forms.form import Array, Row
from offpol_diag.readers.columns import ROLES, SEQUENCE

ORDER = "row"
"""The word for `--on` that joins by the order of the rows."""


def parse(text: str) -> tuple[str, tuple[str, ...], dict[str, str]]:
    """Split `FILE:column,old=column` into the file, the columns, and what the file calls those with a `=`."""
    path, _, names = text.rpartition(":")
    pairs = [tuple(map(str.strip, name.split("=", 1))) for name in names.split(",") if name.strip()]
    if not path or not pairs or "/" in names or not all(map(all, pairs)):
        hint = "write --join FILE:column, as in --join other.parquet:old_log_probs"
        raise UsageError(f"--join {text}: names no column", hint)
    roles = [role_named(pair[0]) for pair in pairs]
    if twice := [name for name in roles if roles.count(name) > 1]:
        raise UsageError(f"--join {text}: {twice[0]!r} is named twice", "name each column once")
    return path, tuple(pair[0] for pair in pairs), {pair[0]: pair[1] for pair in pairs if len(pair) > 1}


def role_named(name: str) -> str:
    """Return the canonical name of a column, or the name itself."""
    return next((role.name for role in ROLES if name in (*role.names, role.short)), name)


@dataclass
class Joined:
    """Columns of a file by the id in column `on`, or by `row`.

    Attributes:
        tokens, scalars: id → columns, as in a row.
        seen: ids that have found their partner.
    """

    source: str
    columns: tuple[str, ...]
    on: str
    tokens: dict[object, dict[str, Array]] = field(default_factory=dict)
    scalars: dict[object, dict[str, Any]] = field(default_factory=dict)
    seen: set[object] = field(default_factory=set)

    @classmethod
    def of(cls, source: str, columns: tuple[str, ...], on: str | None, rows: Iterator[Row]) -> Joined:
        """Read a file."""
        made = cls(source, tuple(map(role_named, columns)), on or SEQUENCE)
        for number, row in enumerate(rows):
            made._take(row, number)
        return made

    def _take(self, row: Row, number: int) -> None:
        """Keep what is asked for of a row of the second file."""
        key = self._key(row, number)
        if key in self.scalars:
            hint = "join by a column that names each row: --on COLUMN, or --on row for their order"
            raise DumpError(f"{row.where}: {self.on} {key!r} comes twice", hint)
        there = [*row.tokens, *row.scalars]
        if odd := [name for name in self.columns if name not in there]:
            hint = did_you_mean(odd[0], there) or f"the columns are {', '.join(there)}"
            raise DumpError(f"{row.where}: there is no column {odd[0]!r} to join", hint)
        # copies: a view would keep the whole file
        self.tokens[key] = {name: np.array(row.tokens[name]) for name in self.columns if name in row.tokens}
        self.scalars[key] = {name: row.scalars[name] for name in self.columns if name not in row.tokens}

    def _key(self, row: Row, number: int) -> object:
        if self.on == ORDER:
            return number
        key = row.scalars.get(role_named(self.on), row.scalars.get(self.on))
        if key is None:
            hint = "name another column with --on COLUMN, or join by the order of the rows with --on row"
            raise DumpError(f"{row.where}: no {self.on} to join by", hint)
        return int(key) if isinstance(key, float) and key.is_integer() else key

    def add(self, row: Row, cut: Row, number: int) -> Row:
        """Return a row of the first file with the joined columns; `cut` is it without prompt and padding.

        They cover what it covers, or its response; `number` is its place in the file.
        """
        key = self._key(row, number)
        if key not in self.scalars:
            hint = "both files need the same sequences; join by another column with --on COLUMN"
            raise DumpError(f"{row.where}: {self.source} has no {self.on} {key!r}", hint)
        if key in self.seen:
            hint = "join by a column that is different in every row"
            raise DumpError(f"{row.where}: {self.on} {key!r} comes twice", hint)
        self.seen.add(key)
        tokens = self.tokens.pop(key)
        lengths = {len(values) for values in tokens.values()}
        base = cut if lengths <= {len(values) for values in cut.tokens.values()} else row
        names = base.names | dict.fromkeys(self.columns, self.source)
        scalars = base.scalars | self.scalars[key]
        return replace(base, tokens=base.tokens | tokens, scalars=scalars, names=names)

    def notes(self) -> list[str]:
        """Return remarks after all rows: how it was joined, and what was left over."""
        left = len(self.scalars) - len(self.seen)
        found = [f"{', '.join(self.columns)} joined from {self.source} by {self.on}"]
        return found + [f"{left} sequences of {self.source} have no partner and are left out"] * bool(left)
