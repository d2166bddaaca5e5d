"""Columns of a second file, found by the id of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import numpy as np

from offpol_diag.errors import DumpError, UsageError, did_you_mean
from offpol_diag.forms.form import Array, Row
from offpol_diag.readers.columns import LIST, SEQUENCE

ORDER = "row"
"""The word for `--on` that joins by the order of the rows."""
Place = tuple[np.dtype[Any], int, int]
"""Type, offset and length of an array in the temporary file."""


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
    return next((role.name for role in LIST.roles if name in (*role.names, role.short)), name)


@dataclass
class Joined:
    """Columns of a file by the id in column `on`, or by `row`; their lists lie in a temporary file."""

    source: str
    columns: tuple[str, ...]
    on: str
    _places: dict[object, dict[str, Place]] = field(default_factory=dict)
    _scalars: dict[object, dict[str, Any]] = field(default_factory=dict)
    _seen: set[object] = field(default_factory=set)
    _map: Array = field(default_factory=lambda: np.empty(0, np.uint8))

    @classmethod
    def of(
        cls, source: str, columns: tuple[str, ...], on: str | None, rows: Iterator[Row], folder: Path
    ) -> Joined:
        """Read a file into the temporary file."""
        made = cls(source, tuple(map(role_named, columns)), on or SEQUENCE)
        with (folder / "joined").open("wb") as store:
            for number, row in enumerate(rows):
                made._take(row, number, store)
        if (folder / "joined").stat().st_size:
            made._map = np.memmap(folder / "joined", np.uint8, "r")
        return made

    def _take(self, row: Row, number: int, store: IO[bytes]) -> None:
        """Keep what is asked for of a row of the second file."""
        key = self._key(row, number)
        if key in self._scalars:
            hint = "join by a column that names each row: --on COLUMN, or --on row for their order"
            raise DumpError(f"{row.where}: {self.on} {key!r} comes twice", hint)
        self._scalars[key], self._places[key] = {}, {}
        for name in self.columns:
            if name in row.tokens:
                values = np.ascontiguousarray(row.tokens[name])
                self._places[key][name] = values.dtype, store.tell(), len(values)
                store.write(values.tobytes())
            elif name in row.scalars:
                self._scalars[key][name] = row.scalars[name]
            else:
                there = [*row.tokens, *row.scalars]
                hint = did_you_mean(name, there) or f"the columns are {', '.join(there)}"
                raise DumpError(f"{row.where}: there is no column {name!r} to join", hint)

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
        if key not in self._scalars:
            hint = "both files need the same sequences; join by another column with --on COLUMN"
            raise DumpError(f"{row.where}: {self.source} has no {self.on} {key!r}", hint)
        if key in self._seen:
            hint = "join by a column that is different in every row"
            raise DumpError(f"{row.where}: {self.on} {key!r} comes twice", hint)
        self._seen.add(key)
        tokens = {
            name: np.asarray(self._map[offset : offset + length * dtype.itemsize]).view(dtype)
            for name, (dtype, offset, length) in self._places[key].items()
        }
        lengths = {len(values) for values in tokens.values()}
        base = cut if lengths <= {len(values) for values in cut.tokens.values()} else row
        names = base.names | dict.fromkeys(self.columns, self.source)
        scalars = base.scalars | self._scalars[key]
        return replace(base, tokens=base.tokens | tokens, scalars=scalars, names=names)

    def notes(self) -> list[str]:
        """Return remarks after all rows: how it was joined, and what was left over."""
        left = len(self._scalars) - len(self._seen)
        found = [f"{', '.join(self.columns)} joined from {self.source} by {self.on}"]
        return found + [f"{left} sequences of {self.source} have no partner and are left out"] * bool(left)
