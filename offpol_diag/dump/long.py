"""One row per token → one row per sequence, a table at a time: the rows of a sequence lie in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.dump.pack import Ints, dense
from offpol_diag.dump.schema import COLUMNS, POSITION, SEQUENCE
from offpol_diag.errors import DumpError

SORT = "sort it: polars.scan_parquet(a).sort('sequence_id', 'position').sink_parquet(b)"


def gathered(
    tables: Iterator[tuple[str, Ints, pa.RecordBatch]],
    columns: Mapping[str, str],
    file: str,
    seen: set[object],
) -> Iterator[tuple[str, Ints, pa.RecordBatch]]:
    """Yield the sequences of a file as tables with lists, each placed by the row in which it begins.

    Args:
        tables: the file's rows, one per token: their row group, their numbers in the file, and a table.
        columns: canonical name → the file's name.
        file: its name, for messages: a sequence may begin in one row group and end in another.
        seen: ids of the sequences of the files before, to which those of this one are added.

    Raises:
        DumpError: a sequence comes back after another one, has no id, or its positions do not rise.
    """
    rest, first = None, 0
    for _, _, table in tables:
        here = pa.Table.from_batches([table])
        rows = here if rest is None else pa.concat_tables([rest, here], promote_options="permissive")
        ids = dense(rows.column(columns[SEQUENCE]).combine_chunks())
        if (null := ids.is_null(nan_is_null=pt.is_floating(ids.type))).true_count:
            what = f"{file}, row {first + null.index(True).as_py()}, column {columns[SEQUENCE]!r}: it is null"
            hint = "give every row the id of its sequence; without one, no sequence can be known to be whole"
            raise DumpError(f"{what}, and a token belongs to a sequence", hint)
        cuts = np.flatnonzero(np.diff(ids.dictionary_encode().indices.to_numpy(), prepend=-1))
        rest = rows.slice(cuts[-1])  # may go on in the next table
        if len(cuts) > 1:
            yield file, first + cuts[:-1], _lists(rows.slice(0, cuts[-1]), cuts, columns, file, first, seen)
        first += int(cuts[-1])
    if rest is not None:
        cuts = np.array([0, len(rest)])
        yield file, first + cuts[:-1], _lists(rest, cuts, columns, file, first, seen)


def _lists(
    rows: pa.Table, cuts: Ints, columns: Mapping[str, str], file: str, first: int, seen: set[object]
) -> pa.RecordBatch:
    """Return whole sequences, which begin at `cuts` [S] and end at the last one, as a table with lists."""
    begins = pa.array(cuts[:-1])
    ids = dense(rows.column(columns[SEQUENCE]).combine_chunks()).take(begins).to_pylist()
    for at, one in zip(cuts, ids, strict=False):
        if one in seen:
            what = f"{file}, row {first + at}: the sequence {str(one)!r} comes back after another one"
            raise DumpError(what, SORT)
        seen.add(one)
    if POSITION in columns:
        column = rows.column(columns[POSITION])
        falls = np.diff(column.to_numpy(), prepend=-np.inf) <= 0
        falls[cuts[:-1]] = False
        if falls.any() or column.null_count:
            what = f"{file}, row {first + int(falls.argmax())}: positions do not rise within a sequence"
            raise DumpError(what, SORT)
    of_tokens = {name for role, name in columns.items() if COLUMNS[role].of_tokens}
    made = {}
    for name in rows.column_names:
        values = rows.column(name).combine_chunks()
        listed = name in of_tokens
        made[name] = (
            pa.LargeListArray.from_arrays(pa.array(cuts), dense(values)) if listed else values.take(begins)
        )
    return pa.RecordBatch.from_pydict(made)
