"""Dumps that lie in memory: tables, and columns by name, as a temporary Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from offpol_diag import files
from offpol_diag.dump.schema import assigned
from offpol_diag.dump.writer import to_table, write_tables
from offpol_diag.errors import OffpolError, UsageError


@contextmanager
def in_files(what: Any) -> Iterator[tuple[list[str], str]]:
    """Yield the paths to read, and a name for what lay in memory (else empty).

    What lies in memory is written to a temporary Parquet file, as the engines read files.

    Raises:
        UsageError: it is nothing that can be read.
    """
    each = list(what) if isinstance(what, list | tuple) else [what]
    if each and all(isinstance(one, str | Path) for one in each):
        yield [str(one) for one in each], ""
        return
    kind = type(what)
    label = f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}".removeprefix("builtins.")
    with files.TemporaryFolder() as folder:
        _write(what, file := folder.path / "table.parquet", label)
        try:
            yield [str(file)], f"<{label}>"
        except OffpolError as error:
            error.lines = tuple(line.replace(str(file), f"<{label}>") for line in error.lines)
            raise


def _write(what: Any, file: Path, label: str) -> None:
    """Write columns by name, or a table: of pyarrow, polars, pandas or with the Arrow C stream interface."""
    hint = "give paths, a pyarrow, polars or pandas table, or a dict of tensors or lists by column"
    wrong, mistakes = f"a dump cannot be read from {label}", (pa.ArrowException, TypeError, ValueError)
    if isinstance(what, Mapping):
        wrong, hint = (
            "the dict is no dump",
            "give padded tensors [S, L] with a response_mask, or a list per row",
        )
    elif hasattr(what, "collect_schema") and hasattr(what, "collect"):  # a lazy frame of polars
        try:
            what = what.collect()
        except Exception as error:  # whatever a function in it raises
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise UsageError(f"the lazy frame fails: {why}", "mend it until collect() works") from error
    elif not hasattr(what, "__arrow_c_stream__"):
        raise UsageError(wrong, hint)
    try:
        if isinstance(what, Mapping):
            ours: dict[Any, str] = {column: role for role, column in assigned(list(what), {}, "dict").items()}
            columns: dict[Any, Any] = {ours.get(name, name): values for name, values in what.items()}
            write_tables([to_table(columns, pa.float64(), refuses=False)], file)
        else:
            table = what if isinstance(what, pa.Table) else pa.table(what)
            pq.write_table(table, file, compression="zstd", row_group_size=1 << 14)
    except mistakes as error:  # one column, values of no type, or of one that Parquet does not have
        raise UsageError(f"{wrong}: {next(iter(str(error).splitlines()), '')}", hint) from error
