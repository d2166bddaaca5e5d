"""What is read in Python: paths, or data in memory as a temporary Parquet file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from offpol_diag import files
from offpol_diag.errors import OffpolError, UsageError


@contextmanager
def sources(what: Any) -> Iterator[tuple[list[str], str]]:
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
        file = folder.path / "table.parquet"
        if isinstance(what, Mapping):
            _write_columns(what, file)
        else:
            _write_table(what, file, label)
        try:
            yield [str(file)], f"<{label}>"
        except OffpolError as error:
            message, *details = (line.replace(str(file), f"<{label}>") for line in error.lines)
            raise type(error)(message, error.hint, details) from error


def _write_columns(columns: Mapping[str, Any], file: Path) -> None:
    """Write padded tensors [S, L] or ragged lists, under the names that a dump's columns may have."""
    import pyarrow as pa

    from offpol_diag.dump.schema import assigned
    from offpol_diag.dump.writer import to_table, write_tables

    ours = {column: role for role, column in assigned(list(columns), {}, "dict").items()}
    try:
        named = {ours.get(name, name): values for name, values in columns.items()}
        write_tables([to_table(named, pa.float64(), refuses=False)], file)
    except (TypeError, ValueError) as slip:
        hint = "give padded tensors [S, L] with a response_mask, or one list per sequence"
        raise UsageError(f"the dict is no dump: {slip}", hint) from slip


def _write_table(what: Any, file: Path, label: str) -> None:
    """Write a pyarrow, polars or pandas table, or anything with the Arrow C stream interface."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    hint = "give paths, a pyarrow, polars or pandas table, or a dict of tensors or lists by column"
    if hasattr(what, "collect_schema") and hasattr(what, "collect"):  # a lazy frame of polars
        try:
            what = what.collect()
        except Exception as error:  # whatever a function in it raises
            why = next(iter(str(error).splitlines()), "") or type(error).__name__
            raise UsageError(f"the lazy frame fails: {why}", "mend it until collect() works") from error
    if not isinstance(what, pa.Table):
        if not hasattr(what, "__arrow_c_stream__"):
            raise UsageError(f"a dump cannot be read from {label}", hint)
        try:
            what = pa.table(what)
        except (pa.ArrowException, TypeError, ValueError) as error:  # one column, or values of no type
            why = next(iter(str(error).splitlines()), "")
            raise UsageError(f"a dump cannot be read from {label}: {why}", hint) from error
    try:
        pq.write_table(what, file, compression="zstd", row_group_size=1 << 14)
    except (pa.ArrowException, TypeError, ValueError) as error:  # a type that Parquet does not have
        why = next(iter(str(error).splitlines()), "")
        raise UsageError(f"a dump cannot be read from {label}: {why}", hint) from error
