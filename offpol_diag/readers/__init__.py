"""Read Parquet files into packed batches: `open_dump(sources).batches()`.

sources    paths, directories, globs and URLs → list of files; footers and parts of files
urls       URLs taken apart, and shown without secrets
stores     URLs → filesystems; retries, error messages
columns    roles of columns: aliases, overrides, types; the columns of a dump, checked across files
parquet    footers; row groups → tables of whole rows
decode     tables → arrays → batches; labels and keys of sequences
checks     bad rows, and the signs of the train columns
dump       the steps above as one reader

Files of other forms become canonical Parquet first (`offpol_diag.forms`). What a dump needs of a file:
`parquet.footer` says what it holds, `parquet.tables` yields its rows in order as Arrow tables with the number
of their row group; `decode.Rows` is such a table with the numbers of its rows in the file.

What cannot be read, and what the user named wrongly, is a `DumpError`. In `parquet`, functions of footers
raise one of its `READ_ERRORS`, which the functions around them explain.

Modules that need torch are imported on first use (PEP 562), so that `sources` works without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from offpol_diag.readers.dump import Dump, open_dump

__all__ = ["Dump", "open_dump"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("offpol_diag.readers.dump"), name)
