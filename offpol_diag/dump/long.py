"""One row per token → one row per sequence, a table at a time: the rows of a sequence lie in one piece."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.dump.pack import Ints, dense
from offpol_diag.dump.schema import COLUMNS, POSITION, SEQUENCE
from offpol_diag.errors import DumpError

SORT = "sort it: polars.scan_parquet(a).sort('sequence_id', 'position').sink_parquet(b)"


@dataclass
class Gathering:
    """Gathers the rows of sequences; `columns` are canonical names → those of the file.

    Attributes:
        seen: ids of the sequences so far, over all files.
    """

    columns: dict[str, str]
    seen: set[object] = field(default_factory=set)

    def gathered(self, tables: Iterator[pa.RecordBatch], file: str) -> Iterator[tuple[pa.RecordBatch, Ints]]:
        """Yield the sequences of a file as tables with lists, and the row in which each begins.

        Raises:
            DumpError: a sequence comes back after another one, has no id, or its positions do not rise.
        """
        rest: pa.Table | None = None
        first = 0
        for table in tables:
            here = pa.Table.from_batches([table])
            rows = here if rest is None else pa.concat_tables([rest, here], promote_options="permissive")
            if not rows.num_rows:
                continue
            cuts = self._cuts(rows, file, first)
            rest = rows.slice(cuts[-1])  # may go on in the next table
            if len(cuts) > 1:
                yield self._lists(rows.slice(0, cuts[-1]), cuts, file, first)
            first += int(cuts[-1])
        if rest is not None:
            yield self._lists(rest, np.array([0, len(rest)]), file, first)

    def _cuts(self, rows: pa.Table, file: str, first: int) -> Ints:
        """Return where sequences begin."""
        name = self.columns[SEQUENCE]
        ids = dense(rows.column(name).combine_chunks())
        if (null := ids.is_null(nan_is_null=pt.is_floating(ids.type))).true_count:
            hint = "give every row the id of its sequence; without one, no sequence can be known to be whole"
            at = first + null.index(True).as_py()
            raise DumpError(
                f"{file}, row {at}, column {name!r}: it is null, and a token belongs to a sequence", hint
            )
        codes = ids.dictionary_encode().indices.to_numpy()
        return np.flatnonzero(np.diff(codes, prepend=-1))

    def _lists(self, rows: pa.Table, cuts: Ints, file: str, first: int) -> tuple[pa.RecordBatch, Ints]:
        ids = (
            dense(rows.column(self.columns[SEQUENCE]).combine_chunks()).take(pa.array(cuts[:-1])).to_pylist()
        )
        for at, one in zip(cuts, ids, strict=False):
            if one in self.seen:
                what = f"{file}, row {first + at}: the sequence {str(one)!r} comes back after another one"
                raise DumpError(what, SORT)
            self.seen.add(one)
        if (position := self.columns.get(POSITION)) is not None:
            column = rows.column(position)
            falls = np.diff(column.to_numpy(), prepend=-np.inf) <= 0
            falls[cuts[:-1]] = False
            if falls.any() or column.null_count:
                what = f"{file}, row {first + int(falls.argmax())}: positions do not rise within a sequence"
                raise DumpError(what, SORT)
        of_tokens = {
            self.columns[name] for name, one in COLUMNS.items() if name in self.columns and one.of_tokens
        }
        made = {}
        for name in rows.column_names:
            values = rows.column(name).combine_chunks()
            if name in of_tokens:
                made[name] = pa.LargeListArray.from_arrays(pa.array(cuts), dense(values))
            else:
                made[name] = values.take(pa.array(cuts[:-1]))
        return pa.RecordBatch.from_pydict(made), first + cuts[:-1]
