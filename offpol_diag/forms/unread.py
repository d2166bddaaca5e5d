"""What a conversion leaves behind: fields that nobody reads, and whether one of them looks like a mask."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from offpol_diag.forms.form import Array, Row
from offpol_diag.readers.columns import MASK, ROLLOUT, named_otherwise, no_mask, unnamed_mask


@dataclass
class Unread:
    """Fields of all rows so far that nobody reads.

    Attributes:
        fields: their names, in order; some may be read in other rows.
        read: names of fields that are read.
        numbers: field with 0 or 1 for each token of every row so far → which of the two.
    """

    fields: dict[str, None] = field(default_factory=dict)
    read: set[str] = field(default_factory=set)
    numbers: dict[str, set[int]] = field(default_factory=dict)
    _others: set[str] = field(default_factory=set)

    @property
    def ignored(self) -> tuple[str, ...]:
        """The fields that are read in no row."""
        return tuple(name for name in self.fields if name not in self.read)

    def watched(self, rows: Iterator[Row], columns: Mapping[str, str]) -> Iterator[Row]:
        """Yield rows, and forget what nobody reads of them.

        Raises:
            DumpError: there is no mask, and a field looks like one throughout.
        """
        where = ""
        for row in rows:
            where = where or row.where.rpartition(", ")[0]
            self.read.update(row.names.values(), row.scalars)
            self.fields |= dict.fromkeys(row.unread)
            if MASK not in row.tokens and not no_mask(columns):
                self._judge(row)
            row.unread = {}
            yield row
        if found := [name for name in self.ignored if self.numbers.get(name) == {0, 1}]:
            raise unnamed_mask(where, found)

    def _judge(self, row: Row) -> None:
        """Look for fields with 0 or 1 for each token."""
        length = len(row.tokens.get(ROLLOUT, ()))
        for name, value in row.unread.items():
            if not length or name in self._others:
                continue
            values = _numbers(value)
            found = set(np.unique(values).tolist())
            if len(values) == length and found <= {0, 1} and not named_otherwise(name):
                self.numbers.setdefault(name, set()).update(found)
            else:
                self._others.add(name)
                self.numbers.pop(name, None)


def _numbers(value: object) -> Array:
    """Return a list of numbers as an array; an empty one for anything else."""
    if isinstance(value, list) and {type(one) for one in value} <= {int, float, bool}:
        value = np.asarray(value)
    numeric = isinstance(value, np.ndarray) and value.ndim == 1 and value.dtype.kind in "fiub"
    return value if numeric else np.zeros(0)  # type: ignore[return-value]
