"""Tables as polars frames and as CSV: numbers at full precision, each with its interval beside it."""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from offpol_diag.errors import UsageError, did_you_mean
from offpol_diag.number import Number

if TYPE_CHECKING:
    import polars as pl

Value = str | int | float | Number | None
"""What a row holds for a column; True and False are ints."""
LONGEST = 80
"""Characters of a table's name that its file keeps."""


@dataclass(frozen=True)
class Data:
    """A table as data: nothing is rounded. Columns named in `floats` are floats even where all are null."""

    id: str
    header: Sequence[str]
    rows: Sequence[Sequence[Value]]
    floats: Collection[str] = ()


def named(tables: Iterable[Data]) -> dict[str, Data]:
    """Return tables by name: letters, digits, dots and underscores, so that a name is a word in code."""
    found: dict[str, Data] = {}
    for one in tables:
        found[_free(re.sub(r"[^\w.]+", "_", one.id), found)] = one
    return found


def chosen(tables: Mapping[str, Data], name: str) -> pl.DataFrame:
    """Return the frame of a table by its name.

    Raises:
        UsageError: there is no such table.
    """
    if name not in tables:
        hint = did_you_mean(name, list(tables)) or f"there are {', '.join(tables)}"
        raise UsageError(f'the result has no table "{name}"', hint)
    return frame(tables[name])


def frame(table: Data) -> pl.DataFrame:
    """Return a table as a polars frame.

    A `Number` of column NAME is its value as a float. Where any has them, NAME_low and NAME_high hold the
    interval, NAME_log10 the logarithm of a value that overflows, NAME_note a caution or why there is none.
    A column `unit` is added where the numbers of each row have one.
    """
    import polars as pl

    columns: dict[str, pl.Series] = {}

    def add(name: str, values: Sequence[Value], kind: Any = None) -> None:
        name = _free(_utf8(name), columns)
        columns[name] = pl.Series(name, *_typed(values) if kind is None else (values, kind))

    for place, head in enumerate(table.header):
        cells = [row[place] for row in table.rows]
        add(head, cells, pl.Float64 if head in table.floats else None)
        numbers = [cell if isinstance(cell, Number) else None for cell in cells]
        ends = [one.interval if one else None for one in numbers]
        if any(ends):
            add(f"{head}_low", [both and both[0] for both in ends], pl.Float64)
            add(f"{head}_high", [both and both[1] for both in ends], pl.Float64)
        logs = [one and one.log10 for one in numbers]
        if any(one is not None for one in logs):
            add(f"{head}_log10", logs, pl.Float64)
        notes = [one and ("; ".join(filter(None, (one.unknown, one.note))) or None) for one in numbers]
        if any(notes):
            add(f"{head}_note", [one and _utf8(one) for one in notes], pl.String)
    units = [{cell.unit for cell in row if isinstance(cell, Number) and cell.unit} for row in table.rows]
    if any(units) and all(len(one) < 2 for one in units):
        add("unit", [next(iter(one), None) for one in units], pl.String)
    return pl.DataFrame(list(columns.values()))


def csv_files(tables: Mapping[str, Data]) -> dict[str, str]:
    """Return tables as CSV, by file names that every file system takes and tells apart."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    for name, one in tables.items():
        sound = name.isascii() and len(name) <= LONGEST and name.lower() not in seen
        seen.add(name.lower())
        kept = re.sub(r"[^\w.]+", "_", name, flags=re.ASCII)[:LONGEST]
        file = name if sound else f"{kept}-{zlib.crc32(name.encode('utf-8')):08x}"
        found[_free(file, found) + ".csv"] = frame(one).write_csv()
    return found


def _typed(values: Sequence[Value]) -> tuple[list[Any], Any]:
    """Return the values of a column in the narrowest type that holds them all as they are."""
    import polars as pl

    plain = [one.value if isinstance(one, Number) else one for one in values]
    known = [one for one in plain if one is not None]
    if any(isinstance(one, str) for one in known):
        return [None if one is None else _text(one) for one in plain], pl.String
    if any(isinstance(one, Number | float) for one in values):
        return [None if one is None else float(one) for one in plain], pl.Float64
    if known and all(isinstance(one, bool) for one in known):
        return plain, pl.Boolean
    wide = any(not -(2**63) <= one < 2**63 for one in known if isinstance(one, int))
    return plain, pl.Null if not known else pl.Float64 if wide else pl.Int64


def _text(value: str | float) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return _utf8(value) if isinstance(value, str) else repr(value)


def _utf8(text: str) -> str:
    """Return a text with lone surrogates written out."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _free(name: str, taken: Iterable[str]) -> str:
    """Return the name, with a number where it is taken."""
    known, place, free = set(taken), 1, name
    while free in known:
        place += 1
        free = f"{name}_{place}"
    return free
