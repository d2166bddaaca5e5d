"""One row per token → one row per sequence, a table at a time: the rows of a sequence lie in one piece."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from offpol_diag.dump.pack import Ints, dense, plain
from offpol_diag.dump.schema import OF_TOKENS, POSITION, SEQUENCE
from offpol_diag.errors import DumpError

Placed = tuple[str, Ints, pa.RecordBatch]
"""File and row group of a table, the number of each row in the file, and the table."""
SORT = "sort it: polars.scan_parquet(a).sort('sequence_id', 'position').sink_parquet(b)"


def gathered(
    tables: Iterator[Placed], columns: Mapping[str, str], file: str, seen: set[object]
) -> Iterator[Placed]:
    """Yield the sequences of a file as tables with lists, each placed by the row in which it begins.

    Args:
        tables: the file's rows, one per token.
        columns: canonical name → the file's name.
        file: its name, for messages: a sequence may begin in one row group and end in another.
        seen: ids of the sequences of the files before, to which those of this one are added.

    Raises:
        DumpError: a sequence comes back after another one, has no id or one that is no text, or its
            positions do not rise.
    """
    listed = {name for role, name in columns.items() if role in OF_TOKENS}
    pending, first = list[pa.Table](), 0  # of a sequence that may go on in the next table; its first row
    for table in chain((pa.Table.from_batches([one]) for _, _, one in tables), [None]):
        pending += [] if table is None else [table]
        if not pending:
            return
        rows = pa.concat_tables(pending, promote_options="permissive").combine_chunks()
        ids = dense(rows.column(columns[SEQUENCE]).combine_chunks())
        if (null := ids.is_null(nan_is_null=pt.is_floating(ids.type))).true_count:
            what = f"{file}, row {first + null.index(True).as_py()}, column {columns[SEQUENCE]!r}: it is null"
            raise DumpError(what, "give every row the id of its sequence")
        cuts = np.flatnonzero(np.diff(ids.dictionary_encode().indices.to_numpy(), prepend=-1))
        cuts = np.append(cuts, len(rows)) if table is None else cuts
        pending, whole, begins = [rows.slice(cuts[-1])], rows.slice(0, cuts[-1]), pa.array(cuts[:-1])
        if not len(begins):
            continue
        place = f"{file}, from row {first} on, column {columns[SEQUENCE]!r}"
        for at, one in zip(cuts, plain(ids.take(begins), place), strict=False):
            if one in seen:
                what = f"{file}, row {first + at}: the sequence {str(one)!r} comes back after another one"
                raise DumpError(what, SORT)
            seen.add(one)
        if POSITION in columns:
            position = whole.column(columns[POSITION])
            falls = np.diff(position.to_numpy(), prepend=-np.inf) <= 0
            falls[cuts[:-1]] = False
            if falls.any() or position.null_count:
                what = f"{file}, row {first + int(falls.argmax())}: positions do not rise within a sequence"
                raise DumpError(what, SORT)
        made, offsets = dict[str, pa.Array](), pa.array(cuts)
        for name, x in zip(whole.column_names, whole.combine_chunks().to_batches()[0].columns, strict=True):
            lists = name in listed
            made[name] = pa.LargeListArray.from_arrays(offsets, dense(x)) if lists else x.take(begins)
        yield file, first + cuts[:-1], pa.RecordBatch.from_pydict(made)
        first += int(cuts[-1])
