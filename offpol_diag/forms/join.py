"""Columns of a second file, found by the id of the sequence."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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
    """Split `FILE:column,old=column` into the file, the columns, and what the file calls those with a `=`.

    Raises:
        UsageError: a file or the columns are missing.
    """
    path, _, names = text.rpartition(":")
    pairs = [tuple(map(str.strip, name.split("=", 1))) for name in names.split(",") if name.strip()]
    if not path or not pairs or "/" in names or not all(map(all, pairs)):
        raise UsageError(
            f"--join {text}: names no column",
            "write --join FILE:column, as in --join other.parquet:old_log_probs",
        )
    return path, tuple(pair[0] for pair in pairs), {pair[0]: pair[1] for pair in pairs if len(pair) > 1}


def role_named(name: str) -> str:
    """Return the canonical name of a column, or the name itself."""
    return next((role.name for role in LIST.roles if name in (*role.names, role.short)), name)


@dataclass
class Joined:
    """Columns of a file by the id of the sequence; lists lie in a temporary file.

    Attributes:
        source: the file as given.
        columns: the columns that are added, by canonical name.
        on: the column with the id, or `row`.
    """

    source: str
    columns: tuple[str, ...]
    on: str
    _places: dict[object, dict[str, Place]] = field(default_factory=dict)
    _scalars: dict[object, dict[str, Any]] = field(default_factory=dict)
    _seen: set[object] = field(default_factory=set)
    _map: Array | None = None

    @classmethod
    def of(
        cls, source: str, columns: tuple[str, ...], on: str | None, rows: Iterator[Row], folder: Path
    ) -> Joined:
        """Read a file into the temporary file.

        Raises:
            DumpError: a column or an id that is missing, or an id that comes twice.
        """
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
            raise DumpError(
                f"{row.where}: {self.on} {key!r} comes twice",
                "join by a column that names each row: --on COLUMN, or --on row for their order",
            )
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
                raise DumpError(
                    f"{row.where}: there is no column {name!r} to join",
                    did_you_mean(name, there) or f"the columns are {', '.join(there)}",
                )

    def _key(self, row: Row, number: int) -> object:
        if self.on == ORDER:
            return number
        key = row.scalars.get(role_named(self.on), row.scalars.get(self.on))
        if key is None:
            raise DumpError(
                f"{row.where}: no {self.on} to join by",
                "name another column with --on COLUMN, or join by the order of the rows with --on row",
            )
        return int(key) if isinstance(key, float) and key.is_integer() else key

    def add(self, row: Row, cut: Row, number: int) -> Row:
        """Return a row with the joined columns; they cover what it covers, or its response.

        Args:
            row: the row as it is in the first file.
            cut: the same without prompt and padding.
            number: its place in the first file.

        Raises:
            DumpError: the other file has no such id, a column is in both, or the lengths differ.
        """
        key = self._key(row, number)
        if key not in self._scalars:
            raise DumpError(
                f"{row.where}: {self.source} has no {self.on} {key!r}",
                "both files need the same sequences; join by another column with --on COLUMN",
            )
        if key in self._seen:
            raise DumpError(
                f"{row.where}: {self.on} {key!r} comes twice",
                "join by a column that is different in every row",
            )
        self._seen.add(key)
        tokens = {name: self._array(place) for name, place in self._places[key].items()}
        lengths = {len(values) for values in tokens.values()}
        fits = lengths <= {len(values) for values in cut.tokens.values()}
        base = cut if fits else row
        return Row(
            base.tokens | tokens,
            base.scalars | self._scalars[key],
            base.where,
            base.names | dict.fromkeys(self.columns, self.source),
        )

    def _array(self, place: Place) -> Array:
        dtype, offset, length = place
        if self._map is None or not length:
            return np.empty(0, dtype)
        return np.asarray(self._map[offset : offset + length * dtype.itemsize]).view(dtype)

    def notes(self) -> list[str]:
        """Return remarks after all rows: how it was joined, and what was left over."""
        left = len(self._scalars) - len(self._seen)
        found = [f"{', '.join(self.columns)} joined from {self.source} by {self.on}"]
        return found + (
            [f"{left} sequences of {self.source} have no partner and are left out"] if left else []
        )
